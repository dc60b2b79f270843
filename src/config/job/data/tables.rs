//! Tabular data in files.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::one_or_many::{OneOrMany, any_number, list_of_one_or_many, one_or_list};
use super::{FilesConfig, SplitKind};

/// Tables of text: rows of fields, quoted where needed; plain or compressed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CsvConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Whether the first row names the columns; otherwise they are called `0`, `1`, `2` and so on.
    #[serde(default = "yes")]
    pub header: bool,
    /// The field delimiter; by default the one that gives the first rows equally many fields.
    #[serde(default)]
    pub delimiter: Delimiter,
    /// The character around fields that contain delimiters or line breaks; inside, it is written twice.
    #[serde(default)]
    pub quote: Quote,
    /// The first character of lines that are not rows.
    #[serde(default)]
    pub comment: Comment,
    /// The character encoding.
    #[serde(default)]
    pub encoding: Encoding,
    /// The decimal mark. The other one may group digits, as in `1,234.50`.
    #[serde(default)]
    pub decimal: Decimal,
    /// The order of dates such as `03/04/2021`; year-month-day is always read. A column of dates becomes the numbers
    /// `.year`, `.month`, `.day`, `.weekday` (0 is Monday) and, if there are times, `.hour` (13.5 is 13:30).
    #[serde(default)]
    pub dates: Dates,
    /// Lines to skip at the beginning of each file, before the header.
    #[serde(default)]
    #[schemars(range(max = 1_000_000))]
    pub skip_lines: u64,
    #[serde(flatten)]
    pub columns: ColumnsConfig,
}

/// Tables in JSON: an array of objects, or one object per line; plain or compressed, read sequentially. The columns are
/// the fields of the first 1000 records in alphabetical order; nested fields are called `a.b`, the values of a list
/// `a.0`, `a.1` and so on. A list of texts is one column, for labels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JsonConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    #[serde(flatten)]
    pub columns: ColumnsConfig,
}

/// Parquet files, of which only the columns in use are read, and Feather files (Arrow IPC).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ParquetConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    #[serde(flatten)]
    pub columns: ColumnsConfig,
}

/// The columns of a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ColumnsConfig {
    /// The column to predict, classes or numbers; or a list of columns: numbers, or with `task = "labels"` 1 or 0 for
    /// each label.
    #[schemars(transform = any_number)]
    pub target: OneOrMany<String>,
    /// Classification or regression.
    #[serde(default)]
    pub task: Task,
    /// What separates the labels of a target with several per row, as `|` does in `red|round`; spaces around them do
    /// not count, and an empty cell has none. A cell may also be a list: of JSON, of Parquet, or a text such as
    /// `["a", "b"]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_separator: Option<String>,
    /// A column of sample weights, 0 or more, which is no input: the loss of an update is the weighted mean over all of
    /// its samples. Metrics other than the loss count every sample once. A missing, negative or infinite weight is a
    /// bad record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// The classes or labels in order; by default those of the training rows, in numeric or alphabetical order.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(extend("uniqueItems" = true), transform = one_or_list)]
    pub classes: Vec<String>,
    /// Input columns; by default all but the target, `weight` and `ignore`. Their order is that of the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(extend("uniqueItems" = true), transform = one_or_list)]
    pub columns: Vec<String>,
    /// Columns that are no input.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(extend("uniqueItems" = true), transform = one_or_list)]
    pub ignore: Vec<String>,
    /// How samples of `train` are assigned to the validation and the test set.
    #[serde(default, skip_serializing_if = "SplitKind::is_random")]
    pub split: SplitKind,
    /// A column whose values group the rows, such as a patient: all rows of a group are in the same set, and rows
    /// without a value are one group. It is no input unless `columns` names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Categorical columns, whatever their values. Columns with text in the first 1000 rows are categorical by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(extend("uniqueItems" = true), transform = one_or_list)]
    pub categorical: Vec<String>,
    /// How a category is presented to the model.
    #[serde(default)]
    pub encode: CategoryEncoding,
    /// Numeric columns, whatever their values; a value that is not a number is a bad record.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(extend("uniqueItems" = true), transform = one_or_list)]
    pub numeric: Vec<String>,
    /// Texts that mean a missing value.
    #[serde(default = "missing", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = one_or_list)]
    pub missing: Vec<String>,
    /// What to do with a missing input. A missing target is always a bad record.
    #[serde(default)]
    pub on_missing: OnMissing,
    /// Add an indicator input, 1 if the value is missing, for each numeric column with missing values in the training
    /// rows.
    #[serde(default)]
    pub missing_flags: bool,
    /// What to do with a category that no training row has. An unknown class is always a bad record.
    #[serde(default)]
    pub on_unknown: OnUnknown,
    /// Maximum number of distinct values of a categorical column.
    #[serde(default = "thousand")]
    #[schemars(range(min = 2, max = 1_000_000))]
    pub max_categories: usize,
    /// Characters to strip from both ends of categories and classes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trim: String,
    /// Standardize numeric inputs and targets: minus the mean, divided by the standard deviation of the training rows.
    /// These are computed in one pass, as are categories, and cached in `runs/.data`.
    #[serde(default = "yes")]
    pub standardise: bool,
}

/// The field delimiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Delimiter {
    /// The one that gives the first rows equally many fields.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = ",")]
    Comma,
    #[serde(rename = ";")]
    Semicolon,
    #[serde(rename = "|")]
    Bar,
    /// A tab.
    #[serde(rename = "tab")]
    Tab,
    /// Any number of spaces and tabs.
    #[serde(rename = "space")]
    Space,
}

/// The character around fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Quote {
    /// `"`, or `'` if the first rows use only that.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = "\"")]
    Double,
    #[serde(rename = "'")]
    Single,
}

/// The first character of lines that are not rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Comment {
    /// `#`, if lines among the first start with it that do not have as many fields as the table.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// Every line is a row.
    #[serde(rename = "none")]
    None,
    #[serde(rename = "#")]
    Hash,
    #[serde(rename = "%")]
    Percent,
}

/// The character encoding of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Encoding {
    /// UTF-16 if the file starts with its byte order mark, otherwise UTF-8.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = "utf-8")]
    Utf8,
    /// Windows-1252, which extends ISO 8859-1.
    #[serde(rename = "latin-1")]
    Latin1,
    /// Little endian, unless a byte order mark says otherwise. Read sequentially.
    #[serde(rename = "utf-16")]
    Utf16,
}

/// The decimal mark of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Decimal {
    /// What the values of a column show, or those of other columns; a column that remains open is refused.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = ".")]
    Point,
    #[serde(rename = ",")]
    Comma,
}

/// The order of day and month.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dates {
    /// What the first rows show; a column without a day beyond 12 is refused.
    #[default]
    Auto,
    /// day/month/year.
    DayFirst,
    /// month/day/year.
    MonthFirst,
}

/// Classification or regression.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// `labels` if `label_separator` is given or the target holds lists of texts; `classes` if `classes` are given, or
    /// if the first rows have text or at most 20 distinct whole numbers, each twice on average; otherwise `values`.
    #[default]
    Auto,
    /// Classification: one class per row.
    Classes,
    /// Classification with any number of labels per row: one column of lists, or a column of 1 and 0 for each label.
    Labels,
    /// Regression: one number or several.
    Values,
}

/// How a category is presented to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CategoryEncoding {
    /// One-hot: one input per distinct value of the column.
    #[default]
    OneHot,
    /// A learned embedding, of half as many dimensions as the column has distinct values and at most 50:
    /// `embeddings.0.weight` for the first such column and so on. For `mlp` and `layers`.
    Embed,
}

/// What to do with a missing input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnMissing {
    /// The row is a bad record.
    #[default]
    Error,
    /// Substitute a number by the mean of the training rows; for categories, missing is a category of its own.
    Mean,
    /// Substitute a number by 0, before standardization; for categories, missing is a category of its own.
    Zero,
}

/// What to do with a category that no training row has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknown {
    /// All inputs of the column, or its embedding, are 0.
    #[default]
    Zeros,
    /// The row is a bad record.
    Error,
}

fn yes() -> bool {
    true
}

fn thousand() -> usize {
    1000
}

fn missing() -> Vec<String> {
    // What pandas takes for missing, and a question mark.
    [
        "", "NA", "N/A", "n/a", "NaN", "nan", "-NaN", "-nan", "null", "NULL", "None", "<NA>", "#N/A", "#NA",
        "NaT", "?",
    ]
    .map(String::from)
    .to_vec()
}
