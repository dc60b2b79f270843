//! Columns whose intent is plain are read as it is, and others are refused with the value that shows it.

use super::*;
use crate::table::dialect_detection::DialectSettings;

/// Rows of `x` and a target of two classes.
fn table(values: impl IntoIterator<Item = String>) -> String {
    let rows = values.into_iter().enumerate().map(|(i, x)| format!("{x},{}\n", ["no", "yes"][i % 2]));
    format!("x,y\n{}", rows.collect::<String>())
}

fn opened(text: &str) -> Result<DatasetRef, DataError> {
    let fixture = TableFixture::new();
    let path = [fixture.file("a.csv", text)];
    let format = TableFileFormat::Csv(DialectSettings::default());
    fixture.open(&path, &path, format, &target(&["y"])).map(|(train, _)| train)
}

fn refused(values: impl IntoIterator<Item = String>) -> String {
    opened(&table(values)).map(|set| set.input_names()).unwrap_err().to_string()
}

#[test]
fn a_few_texts_among_numbers_are_marks_of_missing_values() {
    let values = (0..400).map(|i| if i % 7 == 0 { "unknown".into() } else { format!("{i}.5") });
    assert!(refused(values).contains("most values are numbers, but `unknown` in line 2"));
    // They may be more than the numbers, which may be few.
    let values = (0..40).map(|i| if i % 5 < 3 { "unspecified".into() } else { format!("{i}.5") });
    assert!(refused(values).contains("some values are numbers, but `unspecified` in line 2 is not"));
    let codes = |none: &str| {
        let none = none.to_owned();
        (0..40).map(move |i| if i % 5 < 3 { none.clone() } else { (i % 3).to_string() })
    };
    for none in ["unknown", "Missing", "--", "n.a."] {
        assert!(refused(codes(none)).contains("some values are numbers, but"), "{none}");
    }
    // Codes of which one is a word.
    assert_eq!(opened(&table(codes("more"))).unwrap().features().input_len(), 4);
    // Ticket numbers, of which some have the prefix of an office.
    let tickets = (0..400).map(|i| if i % 4 == 0 { format!("A/{i} 21{i}") } else { format!("{}", 3 * i) });
    assert_eq!(opened(&table(tickets)).unwrap().features().input_len(), 400);
}

#[test]
fn a_text_among_dates_is_refused() {
    let dates = |bad: &str| {
        let bad = bad.to_owned();
        (0..100).map(
            move |i| if i == 50 { bad.clone() } else { format!("2021-{:02}-{:02}", i % 12 + 1, i % 28 + 1) },
        )
    };
    for bad in ["2021-02-30", "0000-00-00", "soon"] {
        assert!(refused(dates(bad)).contains(&format!("most values are dates, but `{bad}` in line 52")));
    }
    let names = opened(&table(dates("2021-02-28"))).unwrap().input_names();
    assert_eq!(names, ["x.year", "x.month", "x.day", "x.weekday"]);
}

#[test]
fn days_and_months_that_are_equal_decide_nothing() {
    let error = refused((0..30).map(|i| format!("{0:02}/{0:02}/2021", i % 12 + 1)));
    assert!(error.contains("may be the day or the month"), "{error}");
}

#[test]
fn numbers_with_units_are_refused() {
    for (unit, shown) in [("{} kg", "0.5 kg"), ("{}k", "0.5k"), ("USD {}", "USD 0.5")] {
        let error = refused((0..100).map(|i| unit.replace("{}", &format!("{i}.5"))));
        assert!(error.contains(&format!("numbers with a unit, as `{shown}` in line 2")), "{error}");
    }
    // A few of them, as many of them.
    for (units, shown) in [(["5 kg", "3 kg"], "5 kg"), (["8GB", "16GB"], "8GB")] {
        let error = refused((0..100).map(|i| units[i % 2].into()));
        assert!(error.contains(&format!("numbers with a unit, as `{shown}` in line 2")), "{error}");
    }
    for few in [["1st", "2nd"], ["4G", "5G"], ["2", "5more"]] {
        let set = opened(&table((0..100).map(|i| few[i % 2].into()))).unwrap();
        assert_eq!(set.features().input_len(), 2, "{few:?}");
    }
    // Codes are categories.
    for code in ["A{}", "{}-B", "N{}UA"] {
        let codes = (0..100).map(|i| code.replace("{}", &i.to_string()));
        assert_eq!(opened(&table(codes)).unwrap().features().input_len(), 100, "{code}");
    }
}

/// The warnings about a table of `x` and `y`.
fn warnings(text: &str) -> Vec<String> {
    let lines = opened(text).unwrap().describe();
    lines.into_iter().filter(|(name, _)| name == "warning").map(|(_, text)| text).collect()
}

#[test]
fn months_of_six_digits_are_dates_if_there_are_several_years() {
    let months = |years: usize| (0..60).map(move |i| format!("{}{:02}", 2019 + i % years, i % 12 + 1));
    let set = opened(&table(months(3))).unwrap();
    assert_eq!(set.input_names(), ["x.year", "x.month", "x.day", "x.weekday"]);
    assert_eq!(read(&set, 1).unwrap().0[..3], [2020.0, 2.0, 1.0]);
    assert_eq!(opened(&table(months(1))).unwrap().input_names(), ["x"]);
    let others = (0..60).map(|i| (201_301 + 7 * i).to_string());
    assert_eq!(opened(&table(others)).unwrap().input_names(), ["x"]);
    let wrong = months(3).enumerate().map(|(i, month)| if i == 30 { "202113".into() } else { month });
    assert!(refused(wrong).contains("most values are dates, but not all"));
}

#[test]
fn numbers_that_may_stand_for_something_else_are_warned_of() {
    let marked = (0..60).map(|i| if i % 9 == 0 { "-999".into() } else { format!("{}.25", i % 31) });
    let found = warnings(&table(marked));
    assert!(found.len() == 1 && found[0].contains("column `x` has `-999` 7 times"), "{found:?}");
    let times = (0..200).map(|i| (1_600_000_000 + 3600 * i).to_string());
    let found = warnings(&table(times));
    assert!(found.len() == 1 && found[0].contains("looks like seconds since 1970"), "{found:?}");
}

#[test]
fn a_column_that_is_the_target_in_other_words_is_warned_of() {
    let found = warnings(&table((0..60).map(|i| (i % 2).to_string())));
    assert!(
        found[0].contains("each of the 2 values of column `x` goes with one value of the target"),
        "{found:?}"
    );
    let found = warnings(&table((0..60).map(|i| (i % 2 + i / 59).to_string())));
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn numbers_with_marks_are_refused_and_many_categories_are_warned_of() {
    for (form, what) in
        [("=\"\"{}\"\"", "numbers with marks"), ("{}*", "numbers with marks"), ("({}, 3)", "pairs")]
    {
        let error = refused((0..200).map(|i| format!("\"{}\"", form.replace("{}", &i.to_string()))));
        assert!(error.contains(&format!("its values look like {what}")), "{error}");
    }
    let ratings = opened(&table((0..200).map(|i| format!("{}*", i % 5)))).unwrap();
    assert_eq!(ratings.features().input_len(), 5);
    let found = warnings(&table((0..200).map(|i| format!("A{}", i % 90))));
    assert!(found[0].contains("column `x` has 90 different values in 200 training rows"), "{found:?}");
    assert!(warnings(&table((0..200).map(|i| format!("A{}", i % 31)))).is_empty());
}

#[test]
fn many_ranges_are_refused_and_a_few_are_names_of_groups() {
    let error = refused((0..200).map(|i| format!("{i}-{}", i + 5)));
    assert!(error.contains("its values look like ranges, as `0-5` in line 2"), "{error}");
    let groups = opened(&table((0..200).map(|i| format!("{0}0-{0}9", i % 7 + 1)))).unwrap();
    assert_eq!(groups.features().input_len(), 7);
}

#[test]
fn row_numbers_that_start_again_are_no_input() {
    let rows = (0..60).map(|i| format!("{},{}.5,{}\n", i % 30, i, ["a", "b"][i % 2]));
    let text = format!(",x,y\n{}", rows.collect::<String>());
    assert_eq!(opened(&text).unwrap().input_names(), ["x"]);
    let measured = text.replace("\n3,", "\n7,");
    assert_eq!(opened(&measured).unwrap().input_names(), ["0", "x"]);
}

#[test]
fn whole_numbers_with_a_point_are_classes() {
    let rows = (0..60).map(|i| format!("{i}.5,{}.0\n", i % 2));
    let set = opened(&format!("x,y\n{}", rows.collect::<String>())).unwrap();
    assert_eq!(classes(&set).len(), 2);
}

#[test]
fn a_target_of_dates_or_of_texts_that_all_differ_is_refused() {
    let of = |y: &dyn Fn(usize) -> String| {
        let rows = (0..60).map(|i| format!("{i}.5,{}\n", y(i)));
        let text = format!("x,y\n{}", rows.collect::<String>());
        opened(&text).map(|set| set.len()).unwrap_err().to_string()
    };
    assert!(
        of(&|i| format!("2021-01-{:02}", i % 28 + 1))
            .contains("dates, which are neither classes nor numbers")
    );
    assert!(of(&|i| format!("note {}", "x".repeat(i))).contains("a text of its own"));
}

#[test]
fn excel_states_the_delimiter_and_old_macs_end_lines_with_returns() {
    let rows: String = (0..30).map(|i| format!("{i},5;{}\n", ["a", "b"][i % 2])).collect();
    let set = opened(&format!("sep=;\nx;y\n{rows}")).unwrap();
    assert_eq!(read(&set, 3).unwrap().0, [3.5]);
    let rows = rows.replace(';', "\t");
    assert_eq!(read(&opened(&format!("sep=\t\nx\ty\n{rows}")).unwrap(), 3).unwrap().0, [3.5]);
    let error = opened("x,y\r1,a\r2,b\r").map(|set| set.len()).unwrap_err().to_string();
    assert!(error.contains("carriage return"), "{error}");
}

#[test]
fn validation_files_may_have_their_columns_in_another_order() {
    let fixture = TableFixture::new();
    let train = [fixture.file("a.csv", "x,z,y\n1,5,a\n2,6,b\n3,7,a\n")];
    let valid = [fixture.file("b.csv", "y;note;z;x\nb;n;8;9\na;n;10;11\n")];
    let format = TableFileFormat::Csv(DialectSettings::default());
    let (_, valid_set) = fixture.open(&train, &valid, format, &target(&["y"])).unwrap();
    assert_eq!(all(&valid_set), [(vec![9.0, 8.0], vec![1.0]), (vec![11.0, 10.0], vec![0.0])]);
    let valid = [fixture.file("c.csv", "y,x\nb,1\n")];
    let error = fixture.open(&train, &valid, format, &target(&["y"])).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("it has no column `z`"), "{error}");
}

#[test]
fn a_header_of_numbers_is_a_warning() {
    let fixture = TableFixture::new();
    let path = [fixture.file("a.csv", "1,2,0\n3,4,1\n5,6,0\n7,8,1\n")];
    let format = TableFileFormat::Csv(DialectSettings::default());
    let (train, _) = fixture.open(&path, &path, format, &target(&["0"])).unwrap();
    let warned = |set: &DatasetRef| set.describe().iter().any(|(_, text)| text.contains("`header = false`"));
    assert!(warned(&train));
    let format = TableFileFormat::Csv(DialectSettings { header: false, ..DialectSettings::default() });
    let (train, _) = fixture.open(&path, &path, format, &target(&["2"])).unwrap();
    assert!(!warned(&train));
}

#[test]
fn weights_that_are_all_zero_are_refused() {
    let fixture = TableFixture::new();
    let path = [fixture.file("a.csv", "x,w,y\n1,0,a\n2,0,b\n3,0,a\n")];
    let settings = TableSettings { weight: Some("w".into()), standardise: true, ..target(&["y"]) };
    let format = TableFileFormat::Csv(DialectSettings::default());
    let error = fixture.open(&path, &path, format, &settings).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("all sample weights are 0"), "{error}");
}

#[test]
fn partitions_of_text_files_are_a_warning() {
    let fixture = TableFixture::new();
    fs::create_dir(fixture.0.path().join("year=2020")).unwrap();
    let path = [fixture.file("year=2020/a.csv", "x,y\n1,a\n2,b\n3,a\n")];
    let format = TableFileFormat::Csv(DialectSettings::default());
    let (train, _) = fixture.open(&path, &path, format, &target(&["y"])).unwrap();
    let about = train.describe();
    assert!(about.iter().any(|(name, text)| name == "warning" && text.contains("`year`")), "{about:?}");
}

#[test]
fn bounds_among_numbers_are_refused() {
    for (bound, shown) in [("<{}.5", "<0.5"), (">10", ">10"), ("<= {}", "<= 0")] {
        let value = |i: usize| {
            if i.is_multiple_of(3) { bound.replace("{}", &i.to_string()) } else { format!("{i}.25") }
        };
        let error = opened(&table((0..60).map(value))).map(|set| set.len()).unwrap_err();
        assert!(error.to_string().contains(&format!("`{shown}` in line 2 is a bound")), "{error}");
        assert!(error.hint().unwrap().contains("`missing`"));
    }
    // Groups are classes.
    let groups = (0..60).map(|i| ["<18", ">=18"][i % 2].into());
    assert_eq!(opened(&table(groups)).unwrap().features().input_len(), 2);
}

#[test]
fn dates_of_eight_digits_are_dates() {
    let date = |i: usize| format!("2021{:02}{:02}", i % 12 + 1, i % 28 + 1);
    let set = opened(&table((0..60).map(date))).unwrap();
    assert_eq!(set.input_names(), ["x.year", "x.month", "x.day", "x.weekday"]);
    assert_eq!(read(&set, 1).unwrap().0, [2021.0, 2.0, 2.0, 1.0]);
    // Among dates that are written otherwise.
    let mixed = (0..60).map(|i| if i % 2 == 0 { date(i) } else { "2021-03-04".into() });
    assert_eq!(opened(&table(mixed)).unwrap().input_names().len(), 4);
    let error = refused((0..60).map(|i| if i == 7 { "20210230".into() } else { date(i) }));
    assert!(error.contains("most values are dates"), "{error}");
    // Other numbers of eight digits.
    let numbers = (0..60).map(|i| (20_210_101 + 997 * i).to_string());
    assert_eq!(opened(&table(numbers)).unwrap().input_names(), ["x"]);
    let rows: String = (0..60).map(|i| format!("{i}.5,{}\n", date(i))).collect();
    let error = opened(&format!("x,y\n{rows}")).map(|set| set.len()).unwrap_err().to_string();
    assert!(error.contains("the target has dates"), "{error}");
}

#[test]
fn other_forms_of_dates_are_dates() {
    let names =
        |value: &dyn Fn(usize) -> String| opened(&table((0..60).map(value))).unwrap().input_names().len();
    assert_eq!(names(&|i| format!("2021年{:02}月{:02}日", i % 12 + 1, i % 28 + 1)), 4);
    assert_eq!(names(&|i| format!("2021-W{:02}", i % 52 + 1)), 4);
    assert_eq!(names(&|i| format!("{}Q{}", 2000 + i % 9, i % 4 + 1)), 4);
    assert_eq!(names(&|i| format!("Sat Jan  {} 14:{i:02}:00 2021", i % 9 + 1)), 5);
}

#[test]
fn shuffled_row_numbers_are_no_input() {
    let rows = |name: &str| {
        let row = |i: usize| format!("{},{i}.5,{}\n", i * 37 % 60 % 30, ["a", "b"][i % 2]);
        format!("{name},x,y\n{}", (0..60).map(row).collect::<String>())
    };
    assert_eq!(opened(&rows("")).unwrap().input_names(), ["x"]);
    assert_eq!(opened(&rows("Unnamed: 0.1")).unwrap().input_names(), ["x"]);
    let named = opened(&rows("index")).unwrap();
    assert_eq!(named.input_names(), ["index", "x"]);
    let about = named.describe();
    assert!(about.iter().any(|(_, text)| text.contains("column `index` has the row numbers")), "{about:?}");
}

#[test]
fn spellings_of_a_class_are_one() {
    let rows = |values: &[&str]| {
        let row = |i: usize| format!("{i}.5,{}\n", values[i % values.len()]);
        format!("x,y\n{}", (0..60).map(row).collect::<String>())
    };
    let set = opened(&rows(&["1", "0.0", "1.0", "0"])).unwrap();
    assert_eq!(classes(&set), ["0", "1"]);
    assert_eq!(all(&set).iter().map(|(_, y)| y[0]).take(4).collect::<Vec<_>>(), [1.0, 0.0, 1.0, 0.0]);
    assert_eq!(
        classes(&opened(&rows(&["True", "false", "TRUE", "False", "true"])).unwrap()),
        ["False", "TRUE"]
    );
}

#[test]
fn labels_that_only_stand_together_are_refused() {
    let rows: String = (0..60).map(|i| format!("{i}.5,{}\n", ["cat|pet", "cow|farm"][i % 2])).collect();
    let error = opened(&format!("x,y\n{rows}")).map(|set| set.len()).unwrap_err();
    assert!(error.to_string().contains("lists of labels, separated by `|`"), "{error}");
    assert!(error.hint().unwrap().contains("label_separator"));
}

#[test]
fn currencies_of_a_validation_file_are_read() {
    let fixture = TableFixture::new();
    let train = [fixture.file("a.csv", "x,y\n1.5,a\n2,b\n3,a\n")];
    let valid = [fixture.file("b.csv", "x,y\n$8.50,b\n€9,a\n")];
    let format = TableFileFormat::Csv(DialectSettings::default());
    let (_, valid_set) = fixture.open(&train, &valid, format, &target(&["y"])).unwrap();
    assert_eq!(all(&valid_set), [(vec![8.5], vec![1.0]), (vec![9.0], vec![0.0])]);
}

#[test]
fn durations_lists_and_fractions_are_refused() {
    for (value, what) in [
        (&(|i| format!("{i}:15:00")) as &dyn Fn(usize) -> String, "durations, as `0:15:00` in line 2"),
        (&|i| format!("{}h{}m", i % 3, i % 2), "durations, as `0h0m`"),
        (&|i| format!("\"[{i}, {}]\"", i % 2), "lists, as `[0, 0]`"),
        (&|i| format!("{}/80", 100 + i), "fractions, as `100/80`"),
    ] {
        let error = refused((0..60).map(value));
        assert!(error.contains(what), "{error}");
    }
    // Times of day are read, and a few fractions are names of sizes.
    assert_eq!(
        opened(&table((0..60).map(|i| format!("{}:15:00", i % 24)))).unwrap().input_names(),
        ["x.hour"]
    );
    let sizes = (0..60).map(|i| ["1/2", "3/4"][i % 2].into());
    assert_eq!(opened(&table(sizes)).unwrap().features().input_len(), 2);
}

#[test]
fn dates_of_eight_digits_that_end_with_the_year_are_refused() {
    let error = refused((0..60).map(|i| format!("{:02}{:02}2021", i % 28 + 1, i % 12 + 1)));
    assert!(error.contains("its numbers of eight digits look like dates"), "{error}");
}
