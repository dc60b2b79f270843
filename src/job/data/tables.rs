//! Tabular data in files.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::FilesConfig;
use super::one_or_many::{OneOrMany, any_number};

/// Tables of text: rows of fields, quoted where needed; plain, gzip or zstd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CsvConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Whether the first row names the columns; otherwise they are called `0`, `1`, `2` and so on.
    #[serde(default = "yes")]
    pub header: bool,
    /// What stands between fields.
    #[serde(default)]
    pub delimiter: Delimiter,
    /// Lines at the beginning of each file, before the header, that are no part of the table.
    #[serde(default)]
    #[schemars(range(max = 1_000_000))]
    pub skip_lines: u64,
    #[serde(flatten)]
    pub columns: ColumnsConfig,
}

/// Tables in Parquet files, of which only the columns used are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ParquetConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    #[serde(flatten)]
    pub columns: ColumnsConfig,
}

/// What the columns of a table are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ColumnsConfig {
    /// The column to predict, of classes or of numbers; or a list of several of numbers.
    #[schemars(transform = any_number)]
    pub target: OneOrMany<String>,
    /// What is predicted.
    #[serde(default)]
    pub task: Task,
    /// The classes in order; where absent, those of the training rows, ordered as numbers or as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("uniqueItems" = true))]
    pub classes: Vec<String>,
    /// Columns to use as input, in the order of the file; where absent, all but the target and `ignore`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("uniqueItems" = true))]
    pub columns: Vec<String>,
    /// Columns to leave out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("uniqueItems" = true))]
    pub ignore: Vec<String>,
    /// Columns of categories, whatever they look like. Columns in which the first rows have text are such by themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("uniqueItems" = true))]
    pub categorical: Vec<String>,
    /// What a category is to the model.
    #[serde(default)]
    pub encode: CategoryEncoding,
    /// Columns of numbers, whatever they look like; what is no number in them is a bad record.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("uniqueItems" = true))]
    pub numeric: Vec<String>,
    /// What stands for a value that is not there.
    #[serde(default = "missing")]
    pub missing: Vec<String>,
    /// What happens to an input that is missing. A target that is missing is a bad record always.
    #[serde(default)]
    pub on_missing: OnMissing,
    /// Add an input, 1 where the value is missing, for each column of numbers that lacks some in the training rows.
    #[serde(default)]
    pub missing_flags: bool,
    /// What happens to a category that no training row has. A class that is unknown is a bad record always.
    #[serde(default)]
    pub on_unknown: OnUnknown,
    /// A column with more different values is refused.
    #[serde(default = "thousand")]
    #[schemars(range(min = 2, max = 1_000_000))]
    pub max_categories: usize,
    /// Characters that are taken off both ends of categories and classes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trim: String,
    /// Take the training rows' mean from every number, of inputs and targets, and divide by their deviation. The rows
    /// are read once for it, and for categories; what is found is kept in `runs/.data`.
    #[serde(default = "yes")]
    pub standardise: bool,
}

/// What stands between fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Delimiter {
    #[default]
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

/// What is predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Classes where `classes` are given, or where the first rows have text or at most 20 different whole numbers,
    /// each twice on average; otherwise numbers.
    #[default]
    Auto,
    /// The class of a row.
    Classes,
    /// One number or several.
    Values,
}

/// What a category is to the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CategoryEncoding {
    /// One input for each different value of the column, 1 for the one it is and 0 for the others.
    #[default]
    OneHot,
    /// Values that are learned, half as many as the column has different ones and at most 50: `embeddings.0.weight` of
    /// the first such column and so on. For `mlp` and `layers`.
    Embed,
}

/// What happens to an input that is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnMissing {
    /// The row is a bad record.
    #[default]
    Error,
    /// A number is the mean of the training rows; in a category, missing is a value of its own.
    Mean,
    /// A number is 0, before it is standardised; in a category, missing is a value of its own.
    Zero,
}

/// What happens to a category that no training row has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknown {
    /// All inputs of the column are 0; the vector too, where categories are embedded.
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
    ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"].map(String::from).to_vec()
}
