//! What is suspicious about the columns in use: copies of the target, row numbers and identifiers among the inputs, and
//! numbers that may stand for something else.

use std::collections::HashSet;

use super::columns::{Column, ColumnKind};
use super::inference::ColumnInference;
use super::notation::Notation;

/// Warnings about `columns`; those in `numeric` were declared to be plain numbers.
pub fn of_columns(columns: &[Column], inferred: &[ColumnInference], numeric: &HashSet<&str>) -> Vec<String> {
    let is_own = |column: &&Column| {
        let is_date_part = matches!(column.notation, Notation::Date { .. } | Notation::Stamp { .. });
        column.element.is_none() && !is_date_part
    };
    let warning = |column: &Column| {
        let (name, inferred) = (&column.name, &inferred[column.index]);
        let is_number = column.kind == ColumnKind::Number && !numeric.contains(name.as_str());
        let copy = || copy_warning(name, inferred).filter(|_| !column.target);
        let number = || inferred.number_warning(name).filter(|_| is_number);
        let identifier = || identifier_warning(name, inferred).filter(|_| !column.target);
        copy().or_else(number).or_else(identifier)
    };
    columns.iter().filter(is_own).filter_map(warning).collect()
}

fn copy_warning(name: &str, inferred: &ColumnInference) -> Option<String> {
    if inferred.equals_target() {
        return Some(format!(
            "column `{name}` equals the target in the first rows: it is no input, add it to `ignore`"
        ));
    }
    let values = inferred.copied_values()?;
    Some(format!(
        "each of the {values} values of column `{name}` goes with one value of the target in the first rows: if it is \
         the target in other words, add it to `ignore`"
    ))
}

fn identifier_warning(name: &str, inferred: &ColumnInference) -> Option<String> {
    if inferred.has_row_numbers() {
        return Some(format!(
            "column `{name}` has the row numbers of a data frame, as pandas' `reset_index` keeps them: add it to \
             `ignore`"
        ));
    }
    let rows = inferred.identifiers()?;
    Some(format!(
        "column `{name}` has as many values as rows, {rows} whole numbers in the first {rows} rows: if they identify \
         the row, add it to `ignore`"
    ))
}
