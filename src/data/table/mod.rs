//! Tables: rows of named columns, as text (`csv`, `json`) or typed (`parquet`, also of Arrow files), encoded into
//! samples.
//!
//! Owns column selection ([`columns`]), column statistics ([`statistics`]) and row encoding ([`encoding`]), which
//! are the same for every file format; a format implements [`TableReader`]. Takes files and [`TableSettings`], and
//! gives a training and a validation set. Opening a table reads only the first rows, unless a mean, a standard
//! deviation or the categories of a column are needed: then it reads the training rows once and caches the result.

mod arrow_file;
mod arrow_rows;
mod categories;
mod checked_pages;
mod coded_numbers;
mod column_encoder;
mod column_report;
mod column_typing;
mod column_warnings;
mod columns;
mod csv;
mod dataset;
mod date_text;
mod dates;
mod decimal;
mod delta_text;
mod dialect;
mod dialect_detection;
mod encoding;
mod flatbuffer;
mod index_evidence;
mod inference;
mod input_rows;
mod json_rows;
mod notation;
mod parquet;
mod parquet_groups;
mod parquet_pages;
mod parquet_partitions;
mod parquet_values;
mod parquet_zones;
mod quantity_forms;
mod row_index;
mod rows;
mod same_reading;
mod schema;
mod sequential_table;
mod split_keys;
mod statistics;
mod target_copy;
#[cfg(test)]
mod tests;
mod text_encoding;
mod time_zone;
mod units;

use std::path::Path;

use ::parquet::data_type::ByteArray;

pub use dataset::{TableFileFormat, TableFiles, open, open_with_schema};
pub use date_text::DateOrder;
pub use dialect::{Dialect, FieldDelimiter};
pub use dialect_detection::{CommentSetting, DialectSettings};
pub use input_rows::TableRows;
pub use notation::DecimalMark;
pub use parquet_partitions::resolve_files as resolve_parquet_files;
pub use schema::TableSchema;
pub use text_encoding::TextEncoding;

use self::columns::Column;
use super::DataError;
use super::error::EXPECTED_UTF8;

/// Declared properties of the columns.
#[derive(Clone, Debug)]
pub struct TableSettings {
    /// Columns to predict.
    pub target: Vec<String>,
    /// The column of sample weights.
    pub weight: Option<String>,
    /// What separates the labels of a target cell; `None` if a text is one class.
    pub label_separator: Option<String>,
    /// Input columns; empty for all others.
    pub columns: Vec<String>,
    pub ignore: Vec<String>,
    /// Column whose values group the rows for a split; no input unless `columns` names it.
    pub group: Option<String>,
    pub categorical: Vec<String>,
    pub numeric: Vec<String>,
    pub task: TableTask,
    /// Classes in order; empty for those found in the training rows.
    pub classes: Vec<String>,
    /// Encode categories as ids for learned embeddings instead of one-hot.
    pub embed: bool,
    /// Markers of a missing value.
    pub missing: Vec<String>,
    pub on_missing: MissingPolicy,
    /// Add an indicator input, 1 if the value is missing, for each numeric column with missing values.
    pub missing_flags: bool,
    pub on_unknown: UnknownPolicy,
    pub max_categories: usize,
    /// Characters stripped from both ends of categories and classes.
    pub trim: String,
    /// Standardize numeric inputs and targets: minus the mean, divided by the standard deviation of the training rows.
    pub standardise: bool,
    /// Skip unusable rows in the statistics instead of refusing the table.
    pub skip_bad: bool,
    /// The decimal mark of numbers in text; `None` if the columns decide.
    pub decimal: Option<DecimalMark>,
    /// The order of day and month in text; `None` if the columns decide.
    pub dates: Option<DateOrder>,
}

impl TableSettings {
    /// Whether a missing value of the column is substituted.
    fn fills(&self, column: &Column) -> bool {
        !column.target && self.on_missing != MissingPolicy::Error
    }

    /// Whether a row may have any number of labels, as far as the settings say.
    fn is_multi_label(&self) -> bool {
        self.task == TableTask::MultiLabel || self.label_separator.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableTask {
    Auto,
    Classification,
    /// Any number of labels per row.
    MultiLabel,
    Regression,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPolicy {
    Error,
    Mean,
    Zero,
}

/// What to do with a category that no training row has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPolicy {
    Zeros,
    Error,
}

impl Default for TableSettings {
    fn default() -> Self {
        Self {
            target: Vec::new(),
            weight: None,
            label_separator: None,
            columns: Vec::new(),
            ignore: Vec::new(),
            group: None,
            categorical: Vec::new(),
            numeric: Vec::new(),
            task: TableTask::Auto,
            classes: Vec::new(),
            embed: false,
            missing: ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?"].map(String::from).to_vec(),
            on_missing: MissingPolicy::Error,
            missing_flags: false,
            on_unknown: UnknownPolicy::Zeros,
            max_categories: 1000,
            trim: String::new(),
            standardise: true,
            skip_bad: false,
            decimal: None,
            dates: None,
        }
    }
}

/// A cell as stored in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellValue<'a> {
    Missing,
    Number(f64),
    Text(&'a [u8]),
    /// A list of texts.
    Texts(&'a [ByteArray]),
}

/// The columns in use of one row.
pub trait RowCells {
    fn cell(&self, i: usize) -> CellValue<'_>;

    /// Error for column `i`, whose cell is not what was `expected`.
    fn cell_error(&self, i: usize, expected: String) -> DataError;
}

/// Called with each row number and its cells, or the error of that row.
pub type RowVisitor<'a> = dyn FnMut(u64, Result<&dyn RowCells, DataError>) -> Result<(), DataError> + 'a;

/// The rows of a table as stored, in partitions that threads can scan in parallel.
pub trait TableReader: Send + Sync {
    fn rows(&self) -> u64;

    /// Number of partitions; depends only on the files.
    fn partitions(&self) -> usize;

    /// Bytes of a partition.
    fn partition_bytes(&self, part: usize) -> u64;

    fn bytes(&self) -> u64 {
        (0..self.partitions()).map(|part| self.partition_bytes(part)).sum()
    }

    /// Bytes of memory that scanning a partition takes at most, if that depends on the files.
    fn scan_bytes(&self) -> u64 {
        0
    }

    /// Calls `visit` for each row of a partition, in order.
    fn scan(&self, partition: usize, columns: &[Column], visit: &mut RowVisitor<'_>)
    -> Result<(), DataError>;
}

/// What is expected of a number that a sample holds in 32 bits.
const EXPECTED_IN_RANGE: &str = "a number within the range of 32-bit floats as it is encoded";

/// What is expected of a sample weight.
const EXPECTED_WEIGHT: &str = "a weight: a number of 0 or more";

/// What is expected of a column that says whether a row has a label.
const EXPECTED_FLAG: &str = "1 or 0, or true or false";

/// What is expected of an empty cell.
fn expected_present(column: &Column) -> String {
    match column.target {
        true if column.weight => EXPECTED_WEIGHT.into(),
        true => "a target: it is missing".into(),
        false => "a value: it is missing, and `on_missing` is \"error\"".into(),
    }
}

/// A value and its line, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CellPlace {
    line: u64,
    value: String,
}

fn hash(text: &[u8]) -> u64 {
    twox_hash::XxHash3_128::oneshot(text) as u64
}

/// A value for an error message: one short line.
fn display_value(value: &[u8]) -> String {
    const MAX_CHARS: usize = 60;
    let text = String::from_utf8_lossy(&value[..value.len().min(4 * MAX_CHARS)]).into_owned();
    let mut short: String = text.chars().take(MAX_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_CHARS).is_some() || value.len() > 4 * MAX_CHARS {
        short += "...";
    }
    short.replace("\\\"", "\"").replace("\\'", "'")
}

/// Bytes of a list of strings.
fn strings_bytes<'a>(strings: impl IntoIterator<Item = &'a String>) -> u64 {
    strings.into_iter().map(|text| (size_of::<String>() + text.capacity()) as u64).sum()
}

fn unterminated_quote(file: &Path, line: u64) -> DataError {
    DataError::Table {
        file: file.to_owned(),
        place: format!("line {line}"),
        problem: "a quoted field of this row is not closed".into(),
        hint: "close the quote; inside quotes, `\"` is written twice",
    }
}

fn row_too_long(file: &Path, line: u64) -> DataError {
    DataError::Table {
        file: file.to_owned(),
        place: format!("line {line}"),
        problem: format!("the row is longer than {} MiB", dialect::MAX_ROW_BYTES >> 20),
        hint: "check that the file is a text table and that its quotes are closed",
    }
}
