//! Column selection and typing, and parsing of text cells.
//!
//! Types that are not declared are inferred from the first rows: a column is numeric if every value there is a number.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::decimal::parse_decimal;
use super::{CellValue, TableSettings, TableTask};
use crate::data::DataError;

/// Rows that types are inferred from.
pub const SAMPLE_ROWS: usize = 1000;
/// An integer target is treated as classes if it has at most this many distinct values.
const MAX_INTEGER_CLASSES: usize = 20;
/// Column names listed in an error message.
const MAX_SHOWN_NAMES: usize = 30;

/// A column in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    pub name: String,
    /// Index in the file, from 0.
    pub index: usize,
    pub kind: ColumnKind,
    pub target: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnKind {
    Number,
    Category,
}

/// Parses text cells.
#[derive(Clone, Debug)]
pub struct CellParser {
    missing: Vec<Vec<u8>>,
    missing_numbers: Vec<f64>,
    /// First bytes of the missing-value markers; they rule out most cells with one lookup.
    missing_first_bytes: [bool; 256],
    trim: Vec<char>,
}

impl CellParser {
    pub fn new(missing: &[String], trim: &str) -> Self {
        let mut first = [false; 256];
        missing.iter().filter_map(|text| text.bytes().next()).for_each(|byte| first[byte as usize] = true);
        let numbers = missing.iter().filter_map(|text| text.parse().ok()).filter(|x: &f64| x.is_finite());
        Self {
            missing: missing.iter().map(|text| text.clone().into_bytes()).collect(),
            missing_numbers: numbers.collect(),
            missing_first_bytes: first,
            trim: trim.chars().collect(),
        }
    }

    #[inline]
    pub fn is_missing(&self, cell: CellValue<'_>) -> bool {
        match cell {
            CellValue::Missing => true,
            CellValue::Number(x) => x.is_nan() || self.missing_numbers.contains(&x),
            CellValue::Text(text) => {
                text.first().is_none_or(|byte| self.missing_first_bytes[*byte as usize])
                    && self.missing.iter().any(|missing| missing == text)
            }
        }
    }

    /// The cell as a finite number.
    #[inline]
    pub fn number(&self, cell: CellValue<'_>) -> Option<f64> {
        let number = match cell {
            CellValue::Missing => None,
            CellValue::Number(x) => Some(x),
            CellValue::Text(text) => parse_decimal(text).or_else(|| parse_any_number(text)),
        };
        number.filter(|x| x.is_finite())
    }

    /// The category name in a cell.
    pub fn category<'a>(&self, cell: CellValue<'a>) -> Cow<'a, str> {
        match cell {
            CellValue::Missing => "".into(),
            CellValue::Number(x) => x.to_string().into(),
            CellValue::Text(text) => {
                let text = String::from_utf8_lossy(text);
                let trimmed = text.trim_matches(&self.trim[..]);
                if trimmed.len() == text.len() { text } else { trimmed.to_owned().into() }
            }
        }
    }
}

/// Parses a number in any notation, surrounded by any whitespace.
#[cold]
fn parse_any_number(text: &[u8]) -> Option<f64> {
    str::from_utf8(text).ok()?.trim().parse().ok()
}

/// What the first rows show about one column.
#[derive(Clone, Debug, Default)]
pub struct ColumnInference {
    /// A value was not a number.
    has_text: bool,
    has_fraction: bool,
    values: usize,
    /// Whether distinct values are counted. Only the type of a target depends on them, and a table may have very many
    /// columns.
    counts_distinct: bool,
    distinct: BTreeSet<String>,
    /// Why its values cannot be used at all.
    unsupported: Option<&'static str>,
}

impl ColumnInference {
    /// For a column whose type the file declares.
    pub fn declared(text: bool, unsupported: Option<&'static str>) -> Self {
        Self { has_text: text, unsupported, ..Self::default() }
    }

    /// Also count distinct values.
    pub fn count_distinct(&mut self) {
        self.counts_distinct = true;
    }

    pub fn observe(&mut self, cell: CellValue<'_>, parser: &CellParser) {
        if parser.is_missing(cell) {
            return;
        }
        self.values += 1;
        match (parser.number(cell), cell) {
            (None, _) => self.has_text = true,
            (Some(_), CellValue::Text(text)) => {
                self.has_fraction |= !text.iter().all(|b| b.is_ascii_digit() || b"+-".contains(b))
            }
            (Some(x), _) => self.has_fraction |= x.fract() != 0.0,
        }
        if self.counts_distinct && self.distinct.len() <= MAX_INTEGER_CLASSES {
            self.distinct.insert(parser.category(cell).into_owned());
        }
    }

    /// Whether it looks like class labels: text, or a few repeated integers.
    fn looks_categorical(&self) -> bool {
        let few = self.distinct.len() <= MAX_INTEGER_CLASSES && 2 * self.distinct.len() <= self.values;
        self.has_text || (!self.has_fraction && few)
    }
}

/// The columns to use: inputs in file order, then targets in the declared order.
pub fn select_columns(
    file: &Path,
    names: &[String],
    inferred: &[ColumnInference],
    settings: &TableSettings,
) -> Result<Vec<Column>, DataError> {
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
            return Err(wrong(
                format!("two columns are named `{name}`"),
                "rename one, or set `header = false` and `skip_lines = 1` and name columns by number, from 0",
            ));
        }
    }
    let lists = [
        ("target", &settings.target),
        ("columns", &settings.columns),
        ("ignore", &settings.ignore),
        ("categorical", &settings.categorical),
        ("numeric", &settings.numeric),
    ];
    for (key, list) in lists {
        for name in list {
            if !places.contains_key(name.as_str()) {
                return Err(wrong(
                    format!("`{key}` names `{name}`, which is not a column{}", suggest_column(name, names)),
                    "use a column of the table; without a header they are called 0, 1, 2 and so on",
                ));
            }
        }
    }
    let [target, chosen, ignored, categorical, numeric] =
        lists.map(|(_, list)| list.iter().map(String::as_str).collect::<HashSet<&str>>());
    if let Some(name) = settings.categorical.iter().find(|name| numeric.contains(name.as_str())) {
        return Err(wrong(
            format!("column `{name}` is both in `categorical` and in `numeric`"),
            "remove it from one of them",
        ));
    }
    let kind = |i: usize| match names[i].as_str() {
        name if categorical.contains(name) => ColumnKind::Category,
        name if numeric.contains(name) => ColumnKind::Number,
        _ if inferred[i].has_text => ColumnKind::Category,
        _ => ColumnKind::Number,
    };
    let used = |i: &usize| {
        let name = names[*i].as_str();
        (chosen.is_empty() || chosen.contains(name)) && !ignored.contains(name) && !target.contains(name)
    };
    let column = |index: usize, kind, target| Column { name: names[index].clone(), index, kind, target };
    let mut columns: Vec<Column> =
        (0..names.len()).filter(used).map(|at| column(at, kind(at), false)).collect();
    if columns.is_empty() {
        return Err(wrong(
            format!("no column remains as input{}", suggest_column("", names)),
            "check `columns`, `ignore` and `delimiter`",
        ));
    }
    for name in &settings.target {
        let Some(&at) = places.get(name.as_str()) else { continue };
        let declared = categorical.contains(name.as_str()) || numeric.contains(name.as_str());
        let kind = match settings.task {
            TableTask::Classification => ColumnKind::Category,
            TableTask::Regression => ColumnKind::Number,
            TableTask::Auto if declared => kind(at),
            TableTask::Auto if !settings.classes.is_empty() => ColumnKind::Category,
            TableTask::Auto if settings.target.len() == 1 && inferred[at].looks_categorical() => {
                ColumnKind::Category
            }
            TableTask::Auto => ColumnKind::Number,
        };
        columns.push(column(at, kind, true));
    }
    let targets = columns.iter().filter(|column| column.target);
    if settings.target.len() > 1 && targets.clone().any(|column| column.kind == ColumnKind::Category) {
        return Err(wrong(
            "several targets must all be numeric, but one is categorical".into(),
            "name one target, or set `task = \"values\"`",
        ));
    }
    if let Some((column, why)) =
        columns.iter().find_map(|c| inferred[c.index].unsupported.map(|why| (c, why)))
    {
        return Err(wrong(
            format!("column `{}` contains {why}, which are not supported", column.name),
            "add the column to `ignore`",
        ));
    }
    Ok(columns)
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
            let reading = CellParser::new(&[], "");
            for text in [text, x.to_string(), format!("{x:.3}"), format!("{x:e}")] {
                let expected = text.trim().parse().ok().filter(|x: &f64| x.is_finite()).map(f64::to_bits);
                let number = reading.number(CellValue::Text(text.as_bytes()));
                prop_assert_eq!(number.map(f64::to_bits), expected, "{}", text);
            }
        }
    }

    fn looks(columns: &[&[&str]]) -> Vec<ColumnInference> {
        let reading = CellParser::new(&["".into(), "?".into()], "");
        let look = |cells: &&[&str]| {
            let mut look = ColumnInference::default();
            look.count_distinct();
            cells.iter().for_each(|text| look.observe(CellValue::Text(text.as_bytes()), &reading));
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
        Ok(columns.iter().map(show).collect())
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
        let columns = select_columns("a.csv".as_ref(), &names, &looks, &settings).unwrap();
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

    #[test]
    fn cells_are_understood_as_declared() {
        let reading = CellParser::new(&["".into(), "-999".into(), "NA".into()], ".");
        assert!(reading.is_missing(CellValue::Text(b"")) && reading.is_missing(CellValue::Text(b"-999")));
        assert!(
            reading.is_missing(CellValue::Number(-999.0)) && reading.is_missing(CellValue::Number(f64::NAN))
        );
        assert!(!reading.is_missing(CellValue::Text(b"-99")) && !reading.is_missing(CellValue::Text(b"N")));
        assert_eq!(reading.number(CellValue::Text(b" 1e3 ")), Some(1000.0));
        for text in ["inf", "1e999", "nan", "", "x", "1,5"] {
            assert_eq!(reading.number(CellValue::Text(text.as_bytes())), None, "{text}");
        }
        assert_eq!(reading.category(CellValue::Text(b"<=50K.")), "<=50K");
        assert_eq!(reading.category(CellValue::Number(3.0)), "3");
    }
}
