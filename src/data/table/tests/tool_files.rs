//! Files that pandas, pyarrow and spreadsheets write, against what these tools read back: `tests/data`, written by
//! `scripts/make-test-data.py`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct ToolTable {
    file: String,
    keys: BTreeMap<String, String>,
    inputs: BTreeMap<String, Vec<f64>>,
    #[serde(default)]
    left_out: Vec<String>,
}

impl ToolTable {
    fn format(&self) -> TableFileFormat {
        let encoding = match self.keys.get("encoding").map(String::as_str) {
            Some("latin-1") => Some(TextEncoding::Latin1),
            Some(other) => panic!("{other}"),
            None => None,
        };
        match self.keys.get("kind").map(String::as_str) {
            Some("json") => return TableFileFormat::Json,
            Some("parquet") => return TableFileFormat::Parquet,
            Some(other) => panic!("{other}"),
            None => {}
        }
        TableFileFormat::Csv(DialectSettings { encoding, ..DialectSettings::default() })
    }

    fn settings(&self) -> TableSettings {
        let on_missing = match self.keys.get("on_missing").map(String::as_str) {
            Some("zero") => MissingPolicy::Zero,
            Some(other) => panic!("{other}"),
            None => MissingPolicy::Error,
        };
        TableSettings {
            on_missing,
            ignore: self.left_out.clone(),
            task: TableTask::Regression,
            ..target(&["y"])
        }
    }
}

/// Every value of every column is what the tool reads.
#[test]
fn files_are_read_as_the_tools_that_wrote_them_read_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let tables: Vec<ToolTable> =
        serde_json::from_slice(&fs::read(folder.join("tables.json")).unwrap()).unwrap();
    assert!(tables.len() >= 8);
    for table in tables {
        let fixture = TableFixture::new();
        let path = [folder.join(&table.file)];
        let name = &table.file;
        let (set, _) = fixture
            .open(&path, &path, table.format(), &table.settings())
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let names = set.input_names();
        assert_eq!(
            names.iter().collect::<std::collections::BTreeSet<_>>(),
            table.inputs.keys().collect(),
            "{name}"
        );
        for (row, (input, _)) in all(&set).iter().enumerate() {
            for (column, value) in names.iter().zip(input) {
                assert_eq!(*value, table.inputs[column][row] as f32, "{name}, row {row}, `{column}`");
            }
        }
    }
}

/// Opens a text with everything detected.
fn detected(text: impl AsRef<[u8]>, settings: &TableSettings) -> Result<DatasetRef, DataError> {
    let fixture = TableFixture::new();
    let path = [fixture.file("a.csv", text)];
    let format = TableFileFormat::Csv(DialectSettings::default());
    fixture.open(&path, &path, format, settings).map(|(train, _)| train)
}

#[test]
fn what_stays_open_is_refused_with_the_line_the_value_and_the_key() {
    let settings = || TableSettings { task: TableTask::Regression, ..target(&["y"]) };
    let many: String = (0..60).map(|i| format!("{}.5;1\n", i * 7)).collect();
    let cases = [
        ("x;y\n1,234;1\n5,678;2\n", "column `x`: `1,234` in line 2 may have a decimal comma", "decimal"),
        ("x;y\n1,5;1\n1.5;2\n", "column `x`: `1.5` in line 3 has another decimal mark", "decimal"),
        (
            "x;y\n5%;1\n0.05;2\n",
            "column `x`: `0.05` in line 3: some values have a percent sign",
            "categorical",
        ),
        ("x;y\n$5;1\n€6;2\n", "column `x`: `€6` in line 3 has another currency", "categorical"),
        ("x;y\n01/02/2020;1\n03/04/2020;2\n", "`01/02/2020` in line 2 may be the day or the month", "dates"),
        (
            &format!("x;y\n{many}abc;1\n"),
            "column `x`: most values are numbers, but `abc` in line 62",
            "missing",
        ),
        ("x;y\ninf;1\n2;1\n", "line 2, column `x`: `inf` is not a finite number", "on_bad_record"),
    ];
    for (text, expected, key) in cases {
        let set = detected(text, &settings());
        let error = set.and_then(|set| (0..set.len()).try_for_each(|i| read(&set, i).map(drop))).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.hint().unwrap().contains(key), "{:?}", error.hint());
    }
    let latin = detected(b"x;name;y\n1;M\xfcller;1\n2;b;2\n", &settings()).err().unwrap();
    assert!(latin.to_string().contains("is not UTF-8 text; `encoding` says what else it is"), "{latin}");
    let header = detected(b"gr\xf6\xdfe;y\n1;1\n2;2\n", &settings()).err().unwrap();
    assert!(header.to_string().contains("line 1: the column name"), "{header}");
}

#[test]
fn keys_decide_what_stays_open() {
    let inputs = |text: &str, settings: TableSettings| {
        let set = detected(text, &TableSettings { task: TableTask::Regression, ..settings }).unwrap();
        all(&set).into_iter().map(|(input, _)| input).collect::<Vec<_>>()
    };
    let comma = TableSettings { decimal: Some(DecimalMark::Comma), ..target(&["y"]) };
    assert_eq!(inputs("x;y\n1,234;1\n5,678;2\n", comma), [[1.234], [5.678]]);
    let point = TableSettings { decimal: Some(DecimalMark::Point), ..target(&["y"]) };
    assert_eq!(inputs("x;y\n1,234;1\n5,678;2\n", point), [[1234.0], [5678.0]]);
    // Another column shows it.
    assert_eq!(inputs("x;z;y\n1,234;0,5;1\n5,678;1;2\n", target(&["y"])), [[1.234, 0.5], [5.678, 1.0]]);
    let month = TableSettings { dates: Some(DateOrder::MonthFirst), ..target(&["y"]) };
    assert_eq!(inputs("x;y\n01/02/2020;1\n03/04/2020;2\n", month)[0], [2020.0, 1.0, 2.0, 3.0]);
    // Declared columns are what they are declared to be.
    let text = TableSettings { categorical: vec!["x".into()], ..target(&["y"]) };
    assert_eq!(inputs("x;y\n1,234;1\n5,678;2\n", text), [[1.0, 0.0], [0.0, 1.0]]);
    // A text among numbers is a bad record where those are skipped.
    let many: String = (0..60).map(|i| format!("{}.5;1\n", i * 7)).collect();
    let skip = TableSettings { skip_bad: true, ..target(&["y"]) };
    let set = detected(format!("x;y\n{many}abc;1\n"), &TableSettings { task: TableTask::Regression, ..skip });
    let set = set.unwrap();
    assert_eq!((shape(&set), set.len()), (1, 61));
    assert!(read(&set, 60).unwrap_err().is_bad_record());
}

#[test]
fn row_numbers_without_a_name_are_no_input() {
    let about = |text: &str| {
        let set = detected(text, &TableSettings { task: TableTask::Regression, ..target(&["y"]) }).unwrap();
        (set.input_names(), set.describe())
    };
    let (names, lines) = about(",x,y\n0,5,1\n1,5,2\n2,6,3\n");
    assert_eq!(names, ["x"]);
    assert_eq!(lines[0].0, "column 0");
    assert!(lines[0].1.contains("not an input"), "{lines:?}");
    assert_eq!(about("Unnamed: 0,x,y\n7,5,1\n3,5,2\n").0, ["x"]);
    // Values that repeat, and fractions, are a column whose name is missing.
    assert_eq!(about(",x,y\n0,5,1\n0,5,2\n").0, ["0", "x"]);
    assert_eq!(about(",x,y\n0.5,5,1\n1.5,5,2\n").0, ["0", "x"]);
    let chosen = TableSettings { columns: vec!["0".into(), "x".into()], ..target(&["y"]) };
    let set = detected(",x,y\n0,5,1.5\n1,5,2.5\n", &chosen).unwrap();
    assert_eq!(set.input_names(), ["0", "x"]);
}

#[test]
fn check_warns_of_identifiers_copies_of_the_target_and_rows_in_both_sets() {
    let rows: String = (0..200)
        .map(|i| format!("{},{},{},{}\n", 9000 - 7 * i, i % 5, i % 3, if i == 7 { "rare" } else { "b" }))
        .collect();
    let text = format!("id,x,z,y\n{rows}");
    let fixture = TableFixture::new();
    let path = [fixture.file("a.csv", &text)];
    let format = TableFileFormat::Csv(DialectSettings::default());
    let settings =
        TableSettings { classes: ["rare", "b", "never"].map(String::from).to_vec(), ..target(&["y"]) };
    let (train, valid) =
        fixture.open(&path, &path, format, &TableSettings { standardise: true, ..settings }).unwrap();
    let found = crate::warnings::warnings(&*train, &*valid, 0);
    let expected = [
        "column `id` has as many values as rows, 200 whole numbers",
        "class `never` has no training sample",
        "class `b` has 199 times as many training samples as `rare`",
        "200 different rows of the first 200 of the validation set are among the first 200 training rows",
    ];
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "{found}");
    }
    // A copy of the target, and a category for each row.
    let rows: String = (0..30).map(|i| format!("n{i},{}.5,{}.5\n", i % 4, i % 4)).collect();
    let set = detected(format!("name,copy,y\n{rows}"), &target(&["y"])).unwrap();
    let lines = set.describe();
    let warnings: Vec<&String> =
        lines.iter().filter(|(name, _)| name == "warning").map(|(_, text)| text).collect();
    assert!(warnings[0].contains("column `copy` equals the target"), "{warnings:?}");
    assert!(warnings[1].contains("column `name` has as many values as training rows, 30"), "{warnings:?}");
}

/// pandas writes the offset of a zone to text, and keeps points in time in UTC elsewhere.
#[test]
fn points_in_time_are_those_of_the_clock_of_their_zone_in_every_format() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let opened = |name: &str, format| {
        let path = [folder.join(name)];
        let (set, _) = TableFixture::new().open(&path, &path, format, &target(&["y"])).unwrap();
        (set.input_names(), all(&set))
    };
    let text = opened("zoned.csv", TableFileFormat::Csv(DialectSettings::default()));
    assert_eq!((text.0.len(), text.1.len()), (13, 12));
    // The clock jumps from 2 to 3 in the night.
    assert_eq!(text.1[0].0[..5], [2021.0, 3.0, 27.0, 5.0, 22.258_333]);
    assert_eq!(text.1[1].0[4], 4.258_333);
    assert_eq!(opened("zoned.parquet", TableFileFormat::Parquet), text);
    assert_eq!(opened("zoned.arrows", TableFileFormat::Parquet), text);
}

/// A damaged Arrow file is an error or other values, never a panic or an allocation without bounds.
#[test]
fn damaged_arrow_files_are_errors() {
    use crate::base::random::RngKey;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let (mut refused, mut read_through) = (0, 0);
    for name in ["lz4.feather", "zstd.feather", "uncompressed.feather", "views.arrow", "zoned.arrows"] {
        let whole = fs::read(folder.join(name)).unwrap();
        for seed in 0..400 {
            let mut draws = RngKey::new(seed, 1).rng();
            let mut bytes = whole.clone();
            match seed % 8 {
                0 => bytes.truncate(draws.below(whole.len() as u64) as usize),
                // The metadata is at the end.
                flips => (0..flips).for_each(|_| {
                    let reach = if seed % 2 == 0 { whole.len() } else { 2000 };
                    let at = whole.len() - 1 - draws.below(reach as u64) as usize;
                    bytes[at] = draws.bits() as u8;
                }),
            }
            let fixture = TableFixture::new();
            let path = [fixture.file("a.feather", &bytes)];
            let settings = TableSettings {
                task: TableTask::Regression,
                on_missing: MissingPolicy::Zero,
                ..target(&["y"])
            };
            let read_all = fixture
                .open(&path, &path, TableFileFormat::Parquet, &settings)
                .and_then(|(set, _)| (0..set.len()).try_for_each(|i| read(&set, i).map(drop)));
            match read_all {
                Ok(()) => read_through += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 200 && read_through > 50, "{refused} {read_through}");
}

#[test]
fn arrow_files_are_refused_where_they_cannot_be_read() {
    let fixture = TableFixture::new();
    let path = [fixture.file("old.feather", b"FEA1 and more")];
    let old = fixture.open(&path, &path, TableFileFormat::Parquet, &target(&["y"])).err().unwrap();
    assert!(old.to_string().contains("version 1") && old.hint().unwrap().contains("to_parquet"), "{old}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let as_text = detected(fs::read(folder.join("lz4.feather")).unwrap(), &target(&["y"])).err().unwrap();
    assert!(as_text.hint().unwrap().contains("data.kind = \"parquet\""), "{as_text}");
}
