//! Column selection and typing, and parsing of text cells.
//!
//! Types that are not declared are inferred from the first rows: a column is numeric if every value there is a number,
//! and a column of dates becomes a numeric column for each part of a date.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use parquet::data_type::ByteArray;
use serde::{Deserialize, Serialize};

use super::column_typing::ColumnTyping;
use super::column_warnings;
use super::decimal::parse_decimal;
use super::index_evidence::names_rows;
use super::inference::ColumnInference;
use super::notation::Notation;
use super::text_encoding::TextEncoding;
use super::{CellValue, TableSettings, TableTask};
use crate::{DataError, labels};

/// Column names listed in an error message.
const MAX_SHOWN_NAMES: usize = 30;

/// A column in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    pub name: String,
    /// Index in the file, from 0.
    pub index: usize,
    pub kind: ColumnKind,
    /// Part of a row's target: what is predicted, or the row's weight.
    pub target: bool,
    /// Holds sample weights; it comes last.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weight: bool,
    /// How its numbers are written, if it is numeric.
    pub notation: Notation,
    /// Which value of a list it is.
    pub element: Option<ListElement>,
}

/// A value of the lists of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListElement {
    /// From 0.
    pub at: usize,
    /// Length of the lists.
    pub of: usize,
}

/// The columns in use, and what to report about others.
#[derive(Debug)]
pub struct SelectedColumns {
    /// Inputs in file order, then targets in the declared order.
    pub columns: Vec<Column>,
    pub remarks: ColumnRemarks,
}

/// What to report about the columns of a file.
#[derive(Debug, Default)]
pub struct ColumnRemarks {
    /// (column, why it is no input) of columns that were left out without being asked to.
    pub left_out: Vec<(String, String)>,
    /// What is suspicious about the inputs.
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    Number,
    Category,
    /// Any number of labels in a cell.
    Labels,
    /// Whether the row has the label that is the column's name.
    Flag,
}

/// Parses text cells.
#[derive(Clone, Debug)]
pub struct CellParser {
    missing: Vec<Vec<u8>>,
    missing_numbers: Vec<f64>,
    /// First bytes of the missing-value markers; they rule out most cells with one lookup.
    missing_first_bytes: [bool; 256],
    trim: Vec<char>,
    encoding: TextEncoding,
    label_separator: Option<String>,
}

impl CellParser {
    pub fn new(missing: &[String], trim: &str, encoding: TextEncoding) -> Self {
        let mut first = [false; 256];
        let numbers = missing.iter().filter_map(|text| text.parse().ok()).filter(|x: &f64| x.is_finite());
        let missing_numbers = numbers.collect();
        let missing: Vec<Vec<u8>> = missing.iter().map(|text| encoding.encode(text)).collect();
        missing.iter().filter_map(|text| text.first()).for_each(|byte| first[*byte as usize] = true);
        let trim = trim.chars().collect();
        Self { missing, missing_numbers, missing_first_bytes: first, trim, encoding, label_separator: None }
    }

    /// For the cells of a table with these settings.
    pub fn of_settings(settings: &TableSettings, encoding: TextEncoding) -> Self {
        let label_separator = settings.label_separator.clone();
        Self { label_separator, ..Self::new(&settings.missing, &settings.trim, encoding) }
    }

    #[inline]
    pub fn is_missing(&self, cell: CellValue<'_>) -> bool {
        match cell {
            CellValue::Missing => true,
            CellValue::Number(x) => x.is_nan() || self.missing_numbers.contains(&x),
            CellValue::Text(text) => {
                text.first().is_none_or(|byte| self.missing_first_bytes[*byte as usize])
                    && (self.missing.iter().any(|missing| missing == text) || self.is_missing_number(text))
            }
            CellValue::Texts(_) => false,
        }
    }

    /// Whether a text is the number of a marker in another form: pandas writes -999 as `-999.0` among fractions.
    fn is_missing_number(&self, text: &[u8]) -> bool {
        !self.missing_numbers.is_empty()
            && parse_decimal(text).is_some_and(|number| self.missing_numbers.contains(&number))
    }

    /// The labels in a cell; `None` for a marker of a missing value. An empty cell has no labels.
    pub fn labels(&self, cell: CellValue<'_>) -> Option<Vec<String>> {
        let trim = |label: String| label.trim_matches(&self.trim[..]).to_owned();
        match cell {
            CellValue::Missing | CellValue::Text(b"") => Some(Vec::new()),
            CellValue::Texts(texts) => {
                let label = |text: &ByteArray| trim(String::from_utf8_lossy(text.data()).into_owned());
                Some(texts.iter().map(label).collect())
            }
            cell if self.is_missing(cell) => None,
            cell => {
                let text = self.text(cell);
                let labels = labels::split(&text, self.label_separator.as_deref());
                Some(labels.into_iter().map(trim).collect())
            }
        }
    }

    /// Whether a cell of a label's own column says that the row has the label.
    pub fn flag(&self, cell: CellValue<'_>) -> Option<bool> {
        match cell {
            CellValue::Number(x) => [0.0, 1.0].contains(&x).then_some(x == 1.0),
            CellValue::Missing | CellValue::Texts(_) => None,
            CellValue::Text(text) => match self.encoding.decode(text)?.trim().to_ascii_lowercase().as_str() {
                "true" => Some(true),
                "false" => Some(false),
                number => number.parse().ok().filter(|x| [0.0, 1.0].contains(x)).map(|x: f64| x == 1.0),
            },
        }
    }

    /// The cell as a finite number.
    #[inline]
    pub fn number(&self, cell: CellValue<'_>, notation: Notation) -> Option<f64> {
        self.any_number(cell, notation).filter(|x| x.is_finite())
    }

    /// Whether the cell is a number, but not a finite one: `inf`, `NaN`, `1e400`.
    #[cold]
    pub fn is_not_finite(&self, cell: CellValue<'_>, notation: Notation) -> bool {
        self.any_number(cell, notation).is_some_and(|x| !x.is_finite())
    }

    #[inline]
    fn any_number(&self, cell: CellValue<'_>, notation: Notation) -> Option<f64> {
        match cell {
            CellValue::Missing | CellValue::Texts(_) => None,
            CellValue::Number(x) => notation.of_number(x),
            CellValue::Text(text) => notation.parse(text),
        }
    }

    /// Whether the text of a cell has the encoding of the file.
    #[inline]
    pub fn is_readable(&self, cell: CellValue<'_>) -> bool {
        match cell {
            CellValue::Text(text) => self.encoding == TextEncoding::Latin1 || str::from_utf8(text).is_ok(),
            CellValue::Texts(texts) => texts.iter().all(|text| str::from_utf8(text.data()).is_ok()),
            CellValue::Missing | CellValue::Number(_) => true,
        }
    }

    /// The category name in a cell.
    pub fn category<'a>(&self, cell: CellValue<'a>) -> Cow<'a, str> {
        let text = self.text(cell);
        let trimmed = text.trim_matches(&self.trim[..]);
        if trimmed.len() == text.len() { text } else { trimmed.to_owned().into() }
    }

    /// The text of a cell.
    fn text<'a>(&self, cell: CellValue<'a>) -> Cow<'a, str> {
        match cell {
            CellValue::Missing | CellValue::Texts(_) => "".into(),
            CellValue::Number(x) => x.to_string().into(),
            // A text that cannot be decoded is refused before it becomes a category.
            CellValue::Text(text) => {
                self.encoding.decode(text).unwrap_or_else(|| String::from_utf8_lossy(text))
            }
        }
    }
}

/// Hint for a table whose column names look like values.
const NO_HEADER: &str =
    "if the file has no header, set `header = false`: its columns are then called 0, 1, 2 and so on";

/// Whether a column is named like a value: a number that is not a column number.
fn is_fraction(name: &str) -> bool {
    name.contains(['.', '-']) && name.parse::<f64>().is_ok_and(f64::is_finite)
}

/// The columns to use: inputs in file order, then targets in the declared order.
pub fn select_columns(
    file: &Path,
    names: &[String],
    inferred: &[ColumnInference],
    settings: &TableSettings,
) -> Result<SelectedColumns, DataError> {
    let wrong = |problem: String, hint: &'static str| DataError::Table {
        file: file.to_owned(),
        place: String::new(),
        problem,
        hint,
    };
    // Lookup only: never iterated, so no result depends on hash order. A linear search per name would take hours for
    // 200,000 columns.
    let mut places: HashMap<&str, usize> = HashMap::with_capacity(names.len());
    for (i, name) in names.iter().enumerate() {
        if places.insert(name, i).is_some() {
            let hint = match name.parse::<f64>() {
                Ok(_) => NO_HEADER,
                Err(_) => {
                    "rename one, or set `header = false` and `skip_lines = 1` and name columns by number, from 0"
                }
            };
            return Err(wrong(format!("two columns are named `{name}`"), hint));
        }
    }
    let weight: Vec<String> = settings.weight.iter().cloned().collect();
    let lists = [
        ("target", &settings.target),
        ("weight", &weight),
        ("columns", &settings.columns),
        ("ignore", &settings.ignore),
        ("categorical", &settings.categorical),
        ("numeric", &settings.numeric),
    ];
    let group = ("group", &Vec::from_iter(settings.group.clone()));
    for (key, list) in lists.into_iter().chain([group]) {
        for name in list {
            if !places.contains_key(name.as_str()) {
                let problem =
                    format!("`{key}` names `{name}`, which is not a column{}", suggest_column(name, names));
                let has = |column: &str| places.contains_key(column);
                let hint = if has(&format!("{name}.0")) || has(&format!("0.{name}")) || has("data.0.0") {
                    "the file holds columns and not a record per row: pandas writes these by \
                     `df.to_json(file, orient=\"records\")`"
                } else if names.iter().any(|name| is_fraction(name)) {
                    NO_HEADER
                } else {
                    "use a column of the table; without a header they are called 0, 1, 2 and so on"
                };
                return Err(wrong(problem, hint));
            }
        }
    }
    let [target, weights, chosen, ignored, categorical, numeric] =
        lists.map(|(_, list)| list.iter().map(String::as_str).collect::<HashSet<&str>>());
    if let Some(name) = settings.categorical.iter().find(|name| numeric.contains(name.as_str())) {
        return Err(wrong(
            format!("column `{name}` is both in `categorical` and in `numeric`"),
            "remove it from one of them",
        ));
    }
    if let Some(name) = settings.weight.iter().find(|name| target.contains(name.as_str())) {
        return Err(wrong(
            format!("column `{name}` is both the target and the weight"),
            "name another column in `weight`",
        ));
    }
    let typing = ColumnTyping::new(file, names, inferred, settings);
    let kind = |i: usize| match names[i].as_str() {
        name if categorical.contains(name) => ColumnKind::Category,
        name if numeric.contains(name) => ColumnKind::Number,
        _ if inferred[i].is_mostly_numbers() && settings.skip_bad => ColumnKind::Number,
        _ if inferred[i].is_text() => ColumnKind::Category,
        _ => ColumnKind::Number,
    };
    let declared = |name: &str| categorical.contains(name) || numeric.contains(name);
    let named = |name: &str| declared(name) || chosen.contains(name) || target.contains(name);
    let mut left_out = Vec::new();
    let mut columns = Vec::new();
    for (i, name) in names.iter().enumerate() {
        let used = (chosen.is_empty() || chosen.contains(name.as_str())) && !ignored.contains(name.as_str());
        let groups = settings.group.as_ref() == Some(name) && !chosen.contains(name.as_str());
        if !used || groups || target.contains(name.as_str()) || weights.contains(name.as_str()) {
            continue;
        }
        // A list of texts in Parquet gets an error of its own below.
        if inferred[i].text_list && inferred[i].unsupported.is_none() && !named(name) {
            left_out.push((format!("column {name}"), "holds lists of texts: not an input".into()));
            continue;
        }
        if inferred[i].is_index() && !names_rows(name) && !named(name) {
            left_out.push((
                format!("column {name}"),
                "has no name and the numbers or names of rows: not an input".into(),
            ));
            continue;
        }
        match kind(i) {
            _ if inferred[i].list.is_some() => columns.extend(typing.list_elements(i, false)),
            _ if !declared(name) && typing.is_date(i) => columns.extend(typing.date_parts(i)?),
            kind => {
                if !declared(name) {
                    typing.check_text(i)?;
                }
                columns.push(typing.column(i, kind, false)?);
            }
        }
    }
    if columns.is_empty() {
        return Err(wrong(
            format!("no column remains as input{}", suggest_column("", names)),
            "check `columns`, `ignore` and `delimiter`",
        ));
    }
    for name in &settings.target {
        let Some(&at) = places.get(name.as_str()) else { continue };
        let undecided = matches!(settings.task, TableTask::Auto | TableTask::MultiLabel);
        if undecided && !declared(name) && settings.target.len() == 1 {
            typing.check_labels(at)?;
        }
        let one = settings.target.len() == 1;
        let kind = match settings.task {
            _ if one && (settings.is_multi_label() || inferred[at].text_list) => ColumnKind::Labels,
            TableTask::MultiLabel => ColumnKind::Flag,
            TableTask::Classification => ColumnKind::Category,
            TableTask::Regression => ColumnKind::Number,
            TableTask::Auto if declared(name) => kind(at),
            TableTask::Auto if !settings.classes.is_empty() => ColumnKind::Category,
            TableTask::Auto if settings.target.len() == 1 && inferred[at].looks_categorical() => {
                typing.check_text(at)?;
                typing.check_classes(at)?;
                if inferred[at].is_text() { kind(at) } else { ColumnKind::Category }
            }
            TableTask::Auto => {
                typing.check_classes(at)?;
                ColumnKind::Number
            }
        };
        match inferred[at].list.filter(|_| kind != ColumnKind::Labels) {
            Some(_) => columns.extend(typing.list_elements(at, true)),
            None => columns.push(typing.column(at, kind, true)?),
        }
    }
    let targets = columns.iter().filter(|column| column.target);
    if settings.target.len() > 1 && targets.clone().any(|column| column.kind == ColumnKind::Category) {
        return Err(wrong(
            "several targets must all be numeric, but one is categorical".into(),
            "name one target, or set `task = \"values\"`, or `task = \"labels\"` for columns of 1 and 0",
        ));
    }
    if settings.target.len() > 1 && settings.label_separator.is_some() {
        return Err(wrong(
            "`label_separator` separates the labels in one column, and `target` names several".into(),
            "name one target, or remove `label_separator` and set `task = \"labels\"` for columns of 1 and 0",
        ));
    }
    for name in &weight {
        let Some(&at) = places.get(name.as_str()) else { continue };
        columns.push(Column { weight: true, ..typing.column(at, ColumnKind::Number, true)? });
    }
    if let Some((column, why)) = columns
        .iter()
        .filter(|c| c.kind != ColumnKind::Labels)
        .find_map(|c| inferred[c.index].unsupported.map(|why| (c, why)))
    {
        return Err(wrong(
            format!("column `{}` contains {why}, which are not supported", column.name),
            "add the column to `ignore`",
        ));
    }
    let mut warnings = column_warnings::of_columns(&columns, inferred, &numeric);
    let mut targets = columns.iter().filter(|column| column.target && !column.weight);
    if settings.target.len() > 1
        && settings.task == TableTask::Auto
        && targets.all(|column| inferred[column.index].is_binary())
    {
        warnings.push(
            "the targets have only 0 and 1, and are learned as numbers: `task = \"labels\"` makes each a label".into(),
        );
    }
    Ok(SelectedColumns { columns, remarks: ColumnRemarks { left_out, warnings } })
}

/// Lists the columns and suggests the closest name.
pub fn suggest_column(name: &str, names: &[String]) -> String {
    let similar = names.iter().map(|other| (strsim::jaro_winkler(name, other), other));
    let best = similar.filter(|(similarity, _)| *similarity > 0.8).max_by(|a, b| a.0.total_cmp(&b.0));
    let suggestion = best.map(|(_, other)| format!("; did you mean `{other}`?")).unwrap_or_default();
    let shown: Vec<String> = names
        .iter()
        .take(MAX_SHOWN_NAMES)
        .map(|name| format!("`{}`", super::display_value(name.as_bytes())))
        .collect();
    let more = names.len().saturating_sub(MAX_SHOWN_NAMES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("; the columns are {}{more}{suggestion}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every string parses to the same bits as in the standard library, or fails as it does there.
        #[test]
        fn numbers_are_read_exactly(text in "-?[0-9]{0,17}\\.?[0-9]{0,17}|[-+.e0-9 ]{0,8}", x: f64) {
            let reading = CellParser::new(&[], "", TextEncoding::Utf8);
            for text in [text, x.to_string(), format!("{x:.3}"), format!("{x:e}")] {
                let expected = text.trim().parse().ok().filter(|x: &f64| x.is_finite()).map(f64::to_bits);
                let number = reading.number(CellValue::Text(text.as_bytes()), Notation::Plain);
                prop_assert_eq!(number.map(f64::to_bits), expected, "{}", text);
            }
        }
    }

    fn looks(columns: &[&[&str]]) -> Vec<ColumnInference> {
        let reading = CellParser::new(&["".into(), "?".into()], "", TextEncoding::Utf8);
        let look = |cells: &&[&str]| {
            let mut look = ColumnInference::default();
            look.count_distinct();
            cells.iter().for_each(|text| look.observe(CellValue::Text(text.as_bytes()), &reading, 1));
            look
        };
        columns.iter().map(look).collect()
    }

    fn chosen(settings: TableSettings) -> Result<Vec<String>, String> {
        let names = ["age", "city", "few", "price"].map(String::from);
        let looks = looks(&[&["1", "2.5", "?"], &["a", "b", ""], &["0", "1", "1", "0"], &["1e3", "2", "3"]]);
        let columns =
            select_columns("a.csv".as_ref(), &names, &looks, &settings).map_err(|error| error.to_string())?;
        let show = |c: &Column| format!("{}{:?}{}", c.name, c.kind, if c.target { " target" } else { "" });
        Ok(columns.columns.iter().map(show).collect())
    }

    fn target(names: &[&str]) -> TableSettings {
        TableSettings {
            target: names.iter().map(|name| name.to_string()).collect(),
            ..TableSettings::default()
        }
    }

    #[test]
    fn types_are_inferred_or_declared() {
        assert_eq!(
            chosen(target(&["price"])).unwrap(),
            ["ageNumber", "cityCategory", "fewNumber", "priceNumber target"]
        );
        assert_eq!(chosen(target(&["few"])).unwrap()[3], "fewCategory target");
        let values = TableSettings {
            task: TableTask::Regression,
            ignore: vec!["city".into()],
            ..target(&["few", "price"])
        };
        assert_eq!(chosen(values).unwrap(), ["ageNumber", "fewNumber target", "priceNumber target"]);
        let declared = TableSettings {
            categorical: vec!["few".into()],
            columns: vec!["few".into(), "age".into()],
            ..target(&["price"])
        };
        assert_eq!(chosen(declared).unwrap(), ["ageNumber", "fewCategory", "priceNumber target"]);
    }

    /// A linear search per name would take 20 billion comparisons here, which is many minutes.
    #[test]
    fn many_columns_are_chosen_as_few_are() {
        let names: Vec<String> = (0..200_000).map(|i| format!("column {i}")).collect();
        let every = |n: usize| names.iter().skip(1).step_by(n).cloned().collect::<Vec<_>>();
        let settings = TableSettings {
            columns: names.clone(),
            ignore: every(3),
            categorical: every(7),
            ..target(&["column 0"])
        };
        let looks = vec![ColumnInference::default(); names.len()];
        let columns = select_columns("a.csv".as_ref(), &names, &looks, &settings).unwrap().columns;
        assert_eq!(columns.len(), names.len() - settings.ignore.len());
        assert!(columns.last().unwrap().target && columns[0].name == "column 2");
    }

    #[test]
    fn what_is_not_there_is_named_with_the_nearest() {
        let error = chosen(target(&["prise"])).unwrap_err();
        assert!(
            error.contains("`target` names `prise`") && error.contains("did you mean `price`?"),
            "{error}"
        );
        let error = chosen(TableSettings { numeric: vec!["x".into()], ..target(&["price"]) }).unwrap_err();
        assert!(
            error.contains(
                "`numeric` names `x`, which is not a column; the columns are `age`, `city`, `few`, `price`"
            ),
            "{error}"
        );
        let only = TableSettings { columns: vec!["price".into()], ..target(&["price"]) };
        assert!(chosen(only).unwrap_err().contains("no column remains as input"));
        assert!(
            chosen(target(&["city", "price"])).is_ok(),
            "with `task = values` and text, reading the rows fails"
        );
        let both = TableSettings {
            categorical: vec!["age".into()],
            numeric: vec!["age".into()],
            ..target(&["price"])
        };
        assert!(chosen(both).unwrap_err().contains("both in `categorical` and in `numeric`"));
    }

    /// The hint says what kind of file has such names.
    #[test]
    fn names_that_are_values_or_parts_of_columns_are_recognized() {
        let hint = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
            let inferred = vec![ColumnInference::default(); names.len()];
            let error = select_columns("a".as_ref(), &names, &inferred, &target(&["y"])).unwrap_err();
            error.hint().unwrap()
        };
        for names in [&["0.0", "0.0", "1"][..], &["Berlin", "-0.436", "0.2"]] {
            let hint = hint(names);
            assert!(hint.contains("`header = false`") && !hint.contains("skip_lines"), "{names:?}: {hint}");
        }
        assert!(hint(&["x", "x", "y"]).contains("`skip_lines = 1`"));
        for names in [&["x.0", "x.1", "y.0", "y.1"][..], &["0.x", "0.y"], &["columns", "data.0.0", "index.0"]]
        {
            assert!(hint(names).contains("orient=\"records\""), "{names:?}");
        }
        assert!(hint(&["a", "b"]).contains("use a column of the table"));
    }

    #[test]
    fn cells_are_understood_as_declared() {
        let reading = CellParser::new(&["".into(), "-999".into(), "NA".into()], ".", TextEncoding::Utf8);
        assert!(reading.is_missing(CellValue::Text(b"")) && reading.is_missing(CellValue::Text(b"-999")));
        assert!(
            reading.is_missing(CellValue::Number(-999.0)) && reading.is_missing(CellValue::Number(f64::NAN))
        );
        assert!(reading.is_missing(CellValue::Text(b"-999.0")));
        assert!(!reading.is_missing(CellValue::Text(b"-99")) && !reading.is_missing(CellValue::Text(b"N")));
        assert_eq!(reading.number(CellValue::Text(b" 1e3 "), Notation::Plain), Some(1000.0));
        for text in ["inf", "1e999", "nan", "", "x", "1,5"] {
            assert_eq!(reading.number(CellValue::Text(text.as_bytes()), Notation::Plain), None, "{text}");
        }
        assert_eq!(reading.category(CellValue::Text(b"<=50K.")), "<=50K");
        assert_eq!(reading.category(CellValue::Number(3.0)), "3");
    }
}
