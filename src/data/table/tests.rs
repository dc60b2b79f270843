//! Tables from files to samples: values, and the error messages for bad input.

mod intent;
mod parquet_files;
mod published;
mod tool_files;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::dataset::DatasetRef;
use super::*;
use crate::cache::Cache;
use crate::split::{SplitMethod, SplitSettings, ValidSet};
use crate::{BatchRow, DatasetContext, InputSpec, SampleKey, SliceMut, TargetSpec};

/// A folder for files and a cache.
struct TableFixture(tempfile::TempDir);

impl TableFixture {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn dataset_context(&self) -> DatasetContext {
        DatasetContext { cache: Cache::at(self.0.path().join("cache")), ..DatasetContext::default() }
    }

    fn open(
        &self,
        train: &[PathBuf],
        valid: &[PathBuf],
        format: TableFileFormat,
        settings: &TableSettings,
    ) -> Result<(DatasetRef, DatasetRef), DataError> {
        let mut split = SplitSettings::random(0.25);
        if !valid.is_empty() {
            split.valid = ValidSet::OwnFiles;
        }
        let files = TableFiles { train: train.to_vec(), valid: valid.to_vec(), test: Vec::new(), split };
        open(&files, format, settings, &self.dataset_context()).map(|sets| (sets.train, sets.valid))
    }

    /// Opens one text file as both training and validation set.
    fn csv(
        &self,
        text: impl AsRef<[u8]>,
        dialect: Dialect,
        settings: &TableSettings,
    ) -> Result<DatasetRef, DataError> {
        let path = [self.file("a.csv", text)];
        self.open(&path, &path, TableFileFormat::Csv(dialect.into()), settings).map(|(train, _)| train)
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn target(names: &[&str]) -> TableSettings {
    let target = names.iter().map(|name| name.to_string()).collect();
    TableSettings { target, standardise: false, ..TableSettings::default() }
}

fn read(set: &DatasetRef, index: u64) -> Result<(Vec<f32>, Vec<f32>), DataError> {
    let features = set.features();
    let mut input = vec![f32::NAN; features.input_len()];
    let mut values = vec![f32::NAN; features.target_len()];
    let mut class = vec![u32::MAX; 1];
    let of_classes = matches!(features.target, TargetSpec::Class { .. });
    let target = if of_classes { SliceMut::U32(&mut class) } else { SliceMut::F32(&mut values) };
    let mut row = BatchRow { input: SliceMut::F32(&mut input), target, length: 0 };
    set.read(index, SampleKey { seed: 0, epoch: 0, sample: index }, &mut row)?;
    Ok((input, if of_classes { vec![class[0] as f32] } else { values }))
}

fn all(set: &DatasetRef) -> Vec<(Vec<f32>, Vec<f32>)> {
    (0..set.len()).map(|i| read(set, i).unwrap()).collect()
}

fn shape(set: &DatasetRef) -> usize {
    set.features().input_len()
}

fn classes(set: &DatasetRef) -> Vec<String> {
    match &set.features().target {
        TargetSpec::Class { names } => names.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn numbers_categories_and_classes_become_a_sample() {
    let fixture = TableFixture::new();
    let text = "a,colour,b,kind\n1,red,0.5,yes\n2,blue,-1e1,no\n3,red,7,yes\n4,red,0,yes\n";
    let set = fixture.csv(text, Dialect::default(), &target(&["kind"])).unwrap();
    assert_eq!(classes(&set), ["no", "yes"]);
    assert_eq!(set.features().input, InputSpec::Floats { shape: vec![4] });
    // a, blue, red, b.
    assert_eq!(read(&set, 1).unwrap(), (vec![2.0, 1.0, 0.0, -10.0], vec![0.0]));
    assert_eq!(read(&set, 0).unwrap(), (vec![1.0, 0.0, 1.0, 0.5], vec![1.0]));
    let declared = TableSettings { classes: vec!["yes".into(), "no".into()], ..target(&["kind"]) };
    assert_eq!(read(&fixture.csv(text, Dialect::default(), &declared).unwrap(), 1).unwrap().1, [1.0]);
    let two = fixture
        .csv(text, Dialect::default(), &TableSettings { ignore: vec!["kind".into()], ..target(&["b", "a"]) })
        .unwrap();
    assert_eq!(read(&two, 2).unwrap(), (vec![0.0, 1.0], vec![7.0, 3.0]));
    let ordered = "x,n\n0,10\n0,9\n0,-1\n0,10\n0,9\n0,-1\n";
    assert_eq!(
        classes(&fixture.csv(ordered, Dialect::default(), &target(&["n"])).unwrap()),
        ["-1", "9", "10"]
    );
    let about = set.describe();
    assert_eq!(about[1], ("colour".into(), "category of 2 values".into()));
    assert_eq!(about[3], ("kind".into(), "target: 2 classes".into()));
}

#[test]
fn every_way_of_writing_a_table_reads_the_same() {
    let fixture = TableFixture::new();
    let plain = "x,name,y\n1,\"a, b\",2\n3,c,4\n";
    let expected = all(&fixture.csv(plain, Dialect::default(), &target(&["y"])).unwrap());
    let dialect =
        |delimiter, header, skip_lines| Dialect { delimiter, header, skip_lines, ..Dialect::default() };
    let byte = FieldDelimiter::Byte;
    let cases = [
        ("x,name,y\r\n1,\"a, b\",2\r\n\r\n3,c,4", dialect(byte(b','), true, 0)),
        ("\u{feff}x , name,y\n1, \"a, b\" , 2\n \n3,c ,4\n\n", dialect(byte(b','), true, 0)),
        ("made by hand\n\nx;name;y\n1;a, b;2\n3;c;4\n", dialect(byte(b';'), true, 2)),
        ("x\tname\ty\n1\ta, b\t2\n3\tc\t4\n", dialect(byte(b'\t'), true, 0)),
        ("  x name   y\n1 \"a, b\"\t2\n 3 c 4  \n", dialect(FieldDelimiter::Whitespace, true, 0)),
    ];
    for (text, dialect) in cases {
        let set = fixture.csv(text, dialect, &target(&["y"])).unwrap();
        assert_eq!(all(&set), expected, "{text}");
        let zstd = zstd::encode_all(text.as_bytes(), 1).unwrap();
        for packed in [gzip(text.as_bytes()), zstd] {
            assert_eq!(all(&fixture.csv(packed, dialect, &target(&["y"])).unwrap()), expected, "{text}");
        }
    }
    let numbered =
        fixture.csv("1,\"a, b\",2\n3,c,4\n", dialect(byte(b','), false, 0), &target(&["2"])).unwrap();
    assert_eq!(all(&numbered), expected);
}

#[test]
fn several_files_are_one_table() {
    let fixture = TableFixture::new();
    let a = fixture.file("part-1.csv", "x,y\n1,0.5\n2,0.5\n");
    fixture.file("part-2.csv", "x,y\n");
    fixture.file("part-3.csv", "x,y\n3,0.5");
    let pattern = [fixture.0.path().join("part-*.csv")];
    let format = TableFileFormat::Csv(Dialect::default().into());
    let plain = fixture.open(&pattern, &pattern, format, &target(&["y"])).unwrap().0;
    let inputs = |set: &DatasetRef| all(set).iter().map(|(input, _)| input[0]).collect::<Vec<_>>();
    assert_eq!(inputs(&plain), [1.0, 2.0, 3.0]);
    fixture.file("part-2.csv", gzip(b"x,y\n9,0.5\n"));
    let packed = fixture.open(&pattern, &pattern, format, &target(&["y"])).unwrap().0;
    assert_eq!(inputs(&packed), [1.0, 2.0, 9.0, 3.0]);
    let other = fixture.file("other.csv", "x,z\n1,2\n");
    let error = fixture.open(&[a, other], &[], format, &target(&["y"])).err().unwrap().to_string();
    assert!(error.contains("its column 2 is `z`") && error.contains("is `y`"), "{error}");
}

#[test]
fn standardising_takes_the_training_rows_alone_and_is_cached() {
    let fixture = TableFixture::new();
    let train = [fixture.file("train.csv", "x,k,c,y\n1,7,a,10\n2,7,b,20\n3,7,a,30\n")];
    let valid = [fixture.file("valid.csv", "x,k,c,y\n1000,8,z,20\n")];
    let format = TableFileFormat::Csv(Dialect::default().into());
    let settings = TableSettings { standardise: true, task: TableTask::Regression, ..target(&["y"]) };
    let (a, b) = fixture.open(&train, &valid, format, &settings).unwrap();
    let scale = (2.0f64 / 3.0).sqrt();
    let (input, value) = read(&a, 2).unwrap();
    assert_eq!(input, [(1.0 / scale) as f32, 0.0, 1.0, 0.0]);
    assert!((value[0] - (1.0 / scale) as f32).abs() < 1e-6);
    // An unknown category is 0 everywhere; a constant column is only shifted.
    assert_eq!(read(&b, 0).unwrap(), (vec![(998.0 / scale) as f32, 1.0, 0.0, 0.0], vec![0.0]));
    let refused = TableSettings { on_unknown: UnknownPolicy::Error, ..settings.clone() };
    let error = read(&fixture.open(&train, &valid, format, &refused).unwrap().1, 0).unwrap_err();
    assert!(
        error.is_bad_record()
            && error.to_string().contains("line 2, column `c`: `z` is not one of the 2 categories"),
        "{error}"
    );
    let kept = fs::read_dir(fixture.0.path().join("cache")).unwrap().count();
    let reopened = fixture.open(&train, &valid, format, &settings).unwrap().0;
    assert_eq!(
        (all(&reopened), fs::read_dir(fixture.0.path().join("cache")).unwrap().count()),
        (all(&a), kept)
    );
}

#[test]
fn a_split_is_standardised_by_the_training_rows() {
    let fixture = TableFixture::new();
    let text: String = (0..4000).map(|i| format!("{},{}\n", (i * 37) % 101, i)).collect();
    let path = [fixture.file("a.csv", format!("x,y\n{text}"))];
    let settings = TableSettings { standardise: true, ..target(&["y"]) };
    for bytes in [fs::read(&path[0]).unwrap(), gzip(&fs::read(&path[0]).unwrap())] {
        fs::write(&path[0], bytes).unwrap();
        let (train, valid) =
            fixture.open(&path, &[], TableFileFormat::Csv(Dialect::default().into()), &settings).unwrap();
        assert_eq!((train.len(), valid.len()), (3000, 1000));
        let samples = all(&train);
        for column in [|s: &(Vec<f32>, Vec<f32>)| s.0[0] as f64, |s: &(Vec<f32>, Vec<f32>)| s.1[0] as f64] {
            let mean = samples.iter().map(column).sum::<f64>() / 3000.0;
            let square = samples.iter().map(|s| column(s).powi(2)).sum::<f64>() / 3000.0;
            assert!(mean.abs() < 1e-6 && (square - 1.0).abs() < 1e-5, "{mean} {square}");
        }
    }
}

#[test]
fn missing_values_follow_the_stated_rule() {
    let fixture = TableFixture::new();
    let text = "x,c,y\n1,a,0.5\n,b,0.5\n3,?,0.5\n";
    let open = |on_missing, missing_flags| {
        let settings = TableSettings { on_missing, missing_flags, ..target(&["y"]) };
        fixture.csv(text, Dialect::default(), &settings)
    };
    let inputs = |set: DatasetRef| all(&set).into_iter().map(|(input, _)| input).collect::<Vec<_>>();
    let error = open(MissingPolicy::Error, false).err().unwrap();
    assert_eq!(
        error.to_string().split_once("a.csv").unwrap().1,
        "`, line 3, column `x`: `` is not a value: it is missing, and `on_missing` is \"error\""
    );
    // x, a, b, missing.
    assert_eq!(
        inputs(open(MissingPolicy::Mean, false).unwrap()),
        [[1.0, 1.0, 0.0, 0.0], [2.0, 0.0, 1.0, 0.0], [3.0, 0.0, 0.0, 1.0]]
    );
    assert_eq!(
        inputs(open(MissingPolicy::Zero, true).unwrap()),
        [[1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0, 1.0]]
    );
    // Bad rows can be skipped: by the statistics here, by the loader later.
    let numeric = vec!["x".into()];
    let skip = TableSettings { skip_bad: true, standardise: true, numeric, ..target(&["y"]) };
    let set = fixture.csv("x,y\n1,0.5\nNA,0.5\n3,0.5\n1,2,3\nx1,0.5\n", Dialect::default(), &skip);
    let set = set.unwrap();
    let skipped = set.describe().pop().unwrap().1;
    assert!(skipped.starts_with("3 bad training rows; the first: `"), "{skipped}");
    assert!(
        skipped.ends_with(
            "line 3, column `x`: `NA` is not a value: it is missing, and `on_missing` is \"error\""
        ),
        "{skipped}"
    );
    assert_eq!(read(&set, 0).unwrap().0, [-1.0]);
    assert!((1..=4).filter(|i| read(&set, *i).is_err_and(|error| error.is_bad_record())).eq([1, 3, 4]));
}

#[test]
fn embedded_categories_are_places_behind_the_numbers() {
    let fixture = TableFixture::new();
    let train = [fixture.file("t.csv", "c,x,d,y\nb,1,u,0.5\na,2,v,0.5\n?,3,u,0.5\n")];
    let valid = [fixture.file("v.csv", "c,x,d,y\nz,4,?,0.5\na,5,w,0.5\n?,6,v,0.5\n")];
    let open = |on_unknown| {
        let settings =
            TableSettings { embed: true, on_unknown, on_missing: MissingPolicy::Mean, ..target(&["y"]) };
        fixture.open(&train, &valid, TableFileFormat::Csv(Dialect::default().into()), &settings).unwrap()
    };
    let inputs = |set: &DatasetRef| all(set).into_iter().map(|(input, _)| input).collect::<Vec<_>>();
    let (set, others) = open(UnknownPolicy::Zeros);
    // Ids of `c`: a, b, missing. Ids of `d`, which has no missing value in the training rows: u, v.
    assert_eq!(set.features().input, InputSpec::Tabular { num_numeric: 1, cardinalities: vec![3, 2] });
    assert_eq!(set.input_names(), ["x", "c", "d"]);
    assert_eq!(inputs(&set), [[1.0, 1.0, 0.0], [2.0, 0.0, 1.0], [3.0, 2.0, 0.0]]);
    // An unknown category gets the id after the last one; in `d`, so does a missing value.
    assert_eq!(inputs(&others), [[4.0, 3.0, 2.0], [5.0, 0.0, 2.0], [6.0, 2.0, 1.0]]);
    assert_eq!(set.describe()[0].1, "category of 2 values, 1 missing, embedded");
    let (_, others) = open(UnknownPolicy::Error);
    let error = read(&others, 0).unwrap_err().to_string();
    assert!(error.contains("column `c`: `z` is not one of the 2 categories"), "{error}");
    // Without categories there is nothing to embed: plain numeric inputs.
    let numbers = TableSettings { embed: true, ..target(&["y"]) };
    let set = fixture.csv("x,y\n1,0.5\n2,0.5\n", Dialect::default(), &numbers).unwrap();
    assert_eq!(set.features().input, InputSpec::Floats { shape: vec![1] });
}

#[test]
fn every_error_is_reported_with_its_location() {
    let numbers = || TableSettings { numeric: vec!["x".into()], ..target(&["y"]) };
    let standard = || TableSettings { standardise: true, ..target(&["y"]) };
    let many: String = (0..12).map(|i| format!("v{i},1\n")).collect();
    let cases: Vec<(&str, String, TableSettings, &str)> = vec![
        ("empty", "".into(), target(&["y"]), "a.csv` is empty"),
        ("blank", "\n \n".into(), target(&["y"]), "it has no rows"),
        ("header only", "x,y\n".into(), target(&["y"]), "it has a header but no rows"),
        (
            "no number",
            "x,y\n1,0.5\n\nabc,0.5\n".into(),
            TableSettings { standardise: true, ..numbers() },
            "line 4, column `x`: `abc` is not a finite number",
        ),
        (
            "infinite",
            "x,y\n1,0.5\n1e999,0.5\n".into(),
            TableSettings { standardise: true, ..numbers() },
            "line 3, column `x`: `1e999` is not a finite number",
        ),
        (
            "more than 32 bits",
            "x,y\n1,0.5\n1e39,0.5\n".into(),
            numbers(),
            "line 3, column `x`: `1e39` is not a number within the range of 32-bit floats",
        ),
        (
            "no target",
            "x,y\n1,\n2,0.5\n".into(),
            standard(),
            "line 2, column `y`: `` is not a target: it is missing",
        ),
        ("ragged", "x,y\n1,0.5\n1,2,3\n".into(), standard(), "line 3: expected 2 fields, got 3"),
        (
            "unended",
            "x,y\n1,0.5\n\"a\n,2\n".into(),
            standard(),
            "line 3: a quoted field of this row is not closed",
        ),
        (
            "delimiter",
            "x;y\n1;2\n".into(),
            target(&["y"]),
            "it has only one column, `x;y`, which contains `;`",
        ),
        (
            "nothing there",
            "x,z,y\n1,,0.5\n2,,0.5\n".into(),
            TableSettings { on_missing: MissingPolicy::Zero, ..standard() },
            "column `z` is missing in every training row",
        ),
        ("one class", "x,y\n1,a\n2,a\n".into(), target(&["y"]), "the target has 1 class: a"),
        (
            "class unknown",
            "x,y\n1,a\n2,b\n".into(),
            TableSettings { classes: vec!["a".into(), "c".into()], ..target(&["y"]) },
            "line 3, column `y`: `b` is not one of the 2 classes",
        ),
        (
            "many",
            format!("x,y\n{many}"),
            TableSettings { max_categories: 10, ..target(&["y"]) },
            "column `x` has more than 10 distinct values",
        ),
        ("names", "x,x,y\n1,2,3\n".into(), target(&["y"]), "two columns are named `x`"),
        (
            "json",
            "[{\"x\": 1, \"y\": 2},\n {\"x\": 3, \"y\": 4}]\n".into(),
            target(&["y"]),
            "it is JSON, not",
        ),
        ("zeros", "x,y\n1\0,3\n".into(), target(&["y"]), "it contains NUL bytes"),
        ("near", "x,price\n1,3\n".into(), target(&["prices"]), "did you mean `price`?"),
    ];
    for (name, text, settings, expected) in cases {
        for packed in [false, true] {
            let fixture = TableFixture::new();
            let bytes =
                if packed && !text.is_empty() { gzip(text.as_bytes()) } else { text.clone().into_bytes() };
            let set = fixture.csv(bytes, Dialect::default(), &settings);
            let error = set.and_then(|set| (0..set.len()).try_for_each(|i| read(&set, i).map(drop)));
            let error = error.expect_err(name);
            assert!(error.to_string().contains(expected), "{name}: {error}");
            assert!(error.hint().is_some(), "{name}");
        }
    }
}

/// Quotes every field such that any reader returns it unchanged.
fn written(rows: &[Vec<String>], crlf: bool) -> String {
    let field = |text: &String| match text.contains(['"', ',', '\n', '\r', ' ']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.clone(),
    };
    let end = if crlf { "\r\n" } else { "\n" };
    rows.iter().map(|row| row.iter().map(field).collect::<Vec<_>>().join(",") + end).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// What a simple writer writes is read back, by index in any order, plain and compressed.
    #[test]
    fn what_was_written_is_read(
        rows in prop::collection::vec(("[a-c\", \n]{0,6}", -1000i32..1000), 1..40), crlf: bool, seed: u64,
    ) {
        let fixture = TableFixture::new();
        let cell = |text: &str| format!("<{text}>");
        let mut lines = vec![vec!["text".to_string(), "n".into(), "y".into()]];
        lines.extend(rows.iter().map(|(text, n)| vec![cell(text), n.to_string(), "0.5".into()]));
        let settings = TableSettings { missing: vec![], ..target(&["y"]) };
        let bytes = written(&lines, crlf).into_bytes();
        let mut names: Vec<String> = rows.iter().map(|(text, _)| cell(text)).collect();
        names.sort();
        names.dedup();
        for bytes in [bytes.clone(), gzip(&bytes)] {
            let set = fixture.csv(bytes, Dialect::default(), &settings);
            let set = set.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(set.len(), rows.len() as u64);
            for i in 0..set.len() {
                // Visit indices with an odd stride.
                let index = (i.wrapping_mul(seed | 1)) % set.len();
                let (text, n) = &rows[index as usize];
                let (input, _) = read(&set, index).map_err(|e| TestCaseError::fail(e.to_string()))?;
                let place = input[..names.len()].iter().position(|x| *x == 1.0).unwrap();
                prop_assert_eq!(&names[place], &cell(text));
                prop_assert_eq!(input[names.len()], *n as f32);
            }
        }
    }

    /// Mutated text is read or refused.
    #[test]
    fn mutated_text_is_read_or_refused(
        edits in prop::collection::vec((0usize..120, prop::sample::select(b"\",\n\r\0 ;9a\xff".to_vec())), 0..6),
        cut in 0usize..40, packed in 0usize..3, skip_bad: bool, standardise: bool,
    ) {
        let fixture = TableFixture::new();
        let mut text = b"x,colour,y\n1,red,2\n2,\"blue\ngreen\",3\n,red,4\n5,\"a\"\"b\",5\n6,red,7\n".to_vec();
        let mutate = |bytes: &mut Vec<u8>| {
            for &(at, byte) in &edits {
                if let Some(place) = bytes.get_mut(at) { *place = byte; }
            }
            bytes.truncate(bytes.len() - cut.saturating_sub(25).min(bytes.len()));
        };
        match packed {
            0 => mutate(&mut text),
            1 => { mutate(&mut text); text = gzip(&text); }
            _ => { text = gzip(&text); mutate(&mut text); }
        }
        let settings = TableSettings { skip_bad, standardise, on_missing: MissingPolicy::Mean, ..target(&["y"]) };
        if let Ok(set) = fixture.csv(text, Dialect::default(), &settings) {
            prop_assert!(set.resident_bytes() < 100_000);
            (0..set.len()).for_each(|i| drop(read(&set, i)));
        }
    }
}

/// Rows of a group stay together in every format; the group is no input; the test rows do not enter the statistics.
#[test]
fn rows_are_split_by_group_and_the_test_set_is_unseen() {
    let fixture = TableFixture::new();
    let row = |i: usize| format!("{},{},p{}\n", i, i % 2, i / 4);
    let text = format!("x,y,patient\n{}", (0..80).map(row).collect::<String>());
    let plain = fixture.file("a.csv", &text);
    let packed = fixture.file("a.csv.gz", gzip(text.as_bytes()));
    let settings = TableSettings { group: Some("patient".into()), ..target(&["y"]) };
    let mut found: Vec<Vec<Vec<usize>>> = Vec::new();
    for path in [plain, packed] {
        let method = SplitMethod::Grouped("patient".into());
        let split = SplitSettings { test_fraction: 0.25, valid: ValidSet::Fraction(0.25), method };
        let files = TableFiles { train: vec![path], valid: Vec::new(), test: Vec::new(), split };
        let format = TableFileFormat::Csv(Dialect::default().into());
        let sets = open(&files, format, &settings, &fixture.dataset_context()).unwrap();
        let Some(crate::TestSet::Open(test)) = sets.test else { panic!("no test set") };
        assert_eq!(sets.train.features().input, InputSpec::Floats { shape: vec![1] });
        let rows = |set: &DatasetRef| {
            (0..set.len()).map(|i| read(set, i).unwrap().0[0] as usize).collect::<Vec<_>>()
        };
        let sets = [&sets.train, &sets.valid, &test].map(rows);
        assert_eq!([sets[0].len(), sets[1].len(), sets[2].len()], [40, 20, 20]);
        let group =
            |rows: &Vec<usize>| rows.iter().map(|row| row / 4).collect::<std::collections::BTreeSet<_>>();
        assert!(
            group(&sets[0]).is_disjoint(&group(&sets[1])) && group(&sets[0]).is_disjoint(&group(&sets[2]))
        );
        found.push(sets.to_vec());
    }
    assert_eq!(found[0], found[1], "the same split of the same rows");
    let wrong = TableSettings { group: Some("patien".into()), ..target(&["y"]) };
    let error = fixture.csv(&text, Dialect::default(), &wrong).err().unwrap().to_string();
    assert!(error.contains("`group` names `patien`, which is not a column"), "{error}");
    assert!(error.contains("did you mean `patient`?"), "{error}");
}

/// A test row with a huge value and a new category changes neither the scale nor the categories.
#[test]
fn statistics_are_those_of_the_training_rows() {
    let fixture = TableFixture::new();
    let row = |i: usize| format!("{},{},{}\n", i % 7, ["a", "b"][i % 2], i % 2);
    let rows: String = (0..40).map(row).collect();
    let train = fixture.file("train.csv", format!("x,c,y\n{rows}"));
    let test = fixture.file("test.csv", "x,c,y\n1000000,new,0\n");
    let settings = TableSettings { target: vec!["y".into()], ..TableSettings::default() };
    let format = TableFileFormat::Csv(Dialect::default().into());
    let schema = |test: Vec<PathBuf>| {
        let files = TableFiles {
            train: vec![train.clone()],
            valid: Vec::new(),
            test,
            split: SplitSettings::random(0.25),
        };
        let sets = open(&files, format, &settings, &fixture.dataset_context()).unwrap();
        format!("{:?}", sets.train.table_schema().unwrap())
    };
    assert_eq!(schema(vec![test]), schema(Vec::new()));
}
