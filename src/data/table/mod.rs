//! Tables: rows of named columns, of text (`csv`) or of typed columns (`parquet`), made into samples.
//!
//! Owns the choice of columns ([`columns`]), what is known of them ([`statistics`]) and how a row becomes a sample
//! ([`encoding`]), which are the same for every file format; a format is a [`TableReader`] reader. Takes files and
//! [`TableSettings`], gives a training and a validation set. Nothing is read ahead but the first rows, unless a mean,
//! a deviation or the list of a column's categories is needed: then the training rows are read once, and what was
//! found is kept in the cache.

mod columns;
mod compressed_csv;
mod csv;
mod dataset;
mod decimal;
mod dialect;
mod encoding;
mod parquet;
mod parquet_pages;
mod row_index;
mod rows;
mod statistics;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use dataset::{TableFileFormat, TableFiles, open};
pub use dialect::{Dialect, FieldDelimiter};

use self::columns::Column;
use super::DataError;

/// What is declared of a table's columns.
#[derive(Clone, Debug)]
pub struct TableSettings {
    /// Columns to predict.
    pub target: Vec<String>,
    /// Columns to use as input; empty for all others.
    pub columns: Vec<String>,
    pub ignore: Vec<String>,
    pub categorical: Vec<String>,
    pub numeric: Vec<String>,
    pub task: TableTask,
    /// Classes in order; empty for those found in the training rows.
    pub classes: Vec<String>,
    /// Categories become places in a list for the model to learn vectors of, instead of an input for each.
    pub embed: bool,
    /// What stands for a value that is not there.
    pub missing: Vec<String>,
    pub on_missing: MissingPolicy,
    /// Adds an input, 1 where the value is missing, for each column of numbers that lacks some.
    pub missing_flags: bool,
    pub on_unknown: UnknownPolicy,
    pub max_categories: usize,
    /// Characters taken off both ends of categories and classes.
    pub trim: String,
    /// Numbers, of inputs and targets, less the mean and over the deviation of the training rows.
    pub standardise: bool,
    /// Leave rows out of the statistics that cannot be used, rather than refuse the table.
    pub skip_bad: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableTask {
    Auto,
    Classification,
    Regression,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPolicy {
    Error,
    Mean,
    Zero,
}

/// What a category becomes that no training row has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownPolicy {
    Zeros,
    Error,
}

impl Default for TableSettings {
    fn default() -> Self {
        Self {
            target: Vec::new(),
            columns: Vec::new(),
            ignore: Vec::new(),
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
        }
    }
}

/// A cell as a file has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CellValue<'a> {
    Missing,
    Number(f64),
    Text(&'a [u8]),
}

/// One row of the columns used.
pub trait RowCells {
    fn cell(&self, i: usize) -> CellValue<'_>;

    /// That the cell of column `i` is not what was `wanted`.
    fn cell_error(&self, i: usize, wanted: String) -> DataError;
}

/// What is done with a row and its number: its cells, or why it has none.
pub type RowVisitor<'a> = dyn FnMut(u64, Result<&dyn RowCells, DataError>) -> Result<(), DataError> + 'a;

/// The rows of a table as files have them, in parts that threads can go through side by side.
pub trait TableReader: Send + Sync {
    fn rows(&self) -> u64;

    /// Parts; they depend on the files alone.
    fn partitions(&self) -> usize;

    /// Bytes of a part, and of all of them.
    fn partition_bytes(&self, part: usize) -> u64;

    fn bytes(&self) -> u64 {
        (0..self.partitions()).map(|part| self.partition_bytes(part)).sum()
    }

    /// Shows each row of a part, in order.
    fn scan(&self, partition: usize, columns: &[Column], visit: &mut RowVisitor<'_>)
    -> Result<(), DataError>;
}

/// What is wanted of a number.
const EXPECTED_NUMBER: &str = "a finite number";

/// What is wanted of a cell that has no value.
fn expected_present(column: &Column) -> String {
    match column.target {
        true => "a target: it is missing".into(),
        false => "a value: it is missing, and `on_missing` is \"error\"".into(),
    }
}

/// A value as an error shows it: one short line.
fn display_value(value: &[u8]) -> String {
    const MAX_CHARS: usize = 60;
    let text = String::from_utf8_lossy(&value[..value.len().min(4 * MAX_CHARS)]).into_owned();
    let mut short: String = text.chars().take(MAX_CHARS).flat_map(char::escape_debug).collect();
    if text.chars().nth(MAX_CHARS).is_some() || value.len() > 4 * MAX_CHARS {
        short += "...";
    }
    short.replace("\\\"", "\"").replace("\\'", "'")
}

fn unterminated_quote(file: &Path, line: u64) -> DataError {
    DataError::Table {
        file: file.to_owned(),
        place: format!("line {line}"),
        problem: "a field of this row begins with `\"` and never ends".into(),
        hint: "close the quote; a `\"` inside of quotes is written twice",
    }
}

fn row_too_long(file: &Path, line: u64) -> DataError {
    DataError::Table {
        file: file.to_owned(),
        place: format!("line {line}"),
        problem: format!("the row is longer than {} MiB", dialect::MAX_ROW_BYTES >> 20),
        hint: "check that the file is a table of text, and that its quotes are closed",
    }
}
