//! The columns of a table and their statistics in the training rows: what a trained model keeps of its table.

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::TableSettings;
use super::categories::CategoryIndex;
use super::columns::{Column, ColumnKind};
use super::statistics::{CategoryCounts, ColumnStatistics, TableStatistics};
use crate::DataError;

/// The columns of a table and their statistics in the training rows: with the job's settings, all that encodes a row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableSchema {
    /// Inputs, then targets.
    pub columns: Vec<Column>,
    /// Column of the file that each of them is read from: a date is several columns.
    sources: Vec<String>,
    /// Those of `columns`; `None` if none were needed.
    pub statistics: Option<TableStatistics>,
}

impl TableSchema {
    /// `names` are those of all columns of the file.
    pub fn new(columns: Vec<Column>, names: &[String], statistics: Option<TableStatistics>) -> Self {
        let source = |column: &Column| names.get(column.index).unwrap_or(&column.name).clone();
        Self { sources: columns.iter().map(source).collect(), columns, statistics }
    }

    /// The schema of the inputs alone, for rows without a target.
    pub fn inputs(&self) -> Self {
        self.filtered(|column| !column.target)
    }

    fn filtered(&self, keeps: impl Fn(&Column) -> bool) -> Self {
        let kept = || (0..self.columns.len()).filter(|i| keeps(&self.columns[*i]));
        Self {
            columns: kept().map(|i| self.columns[i].clone()).collect(),
            sources: kept().map(|i| self.sources[i].clone()).collect(),
            statistics: self.statistics.as_ref().map(|statistics| TableStatistics {
                columns: kept().map(|i| statistics.columns[i].clone()).collect(),
                ..statistics.clone()
            }),
        }
    }

    /// The schema without the sample weights, which only training needs.
    pub fn without_weight(&self) -> Self {
        self.filtered(|column| !column.weight)
    }

    /// The same schema for a file with other columns around these, or in another order.
    pub fn located(&self, file: &Path, names: &[String]) -> Result<Self, DataError> {
        let places: HashMap<&str, usize> = names.iter().map(String::as_str).zip(0..).collect();
        let locate = |(column, source): (&Column, &String)| match places.get(source.as_str()) {
            Some(&index) => Ok(Column { index, ..column.clone() }),
            None => Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: format!(
                    "it has no column `{source}`{}",
                    super::columns::suggest_column(source, names)
                ),
                hint: "the model is trained with this column: every file must have all columns in use",
            }),
        };
        let columns = self.columns.iter().zip(&self.sources).map(locate).collect::<Result<_, _>>()?;
        Ok(Self { columns, ..self.clone() })
    }

    /// Training rows of each of these classes, if they were counted.
    pub fn class_counts(&self, names: &[String]) -> Option<Vec<u64>> {
        let target = self.columns.iter().position(|column| column.target)?;
        let columns = &self.statistics.as_ref()?.columns;
        match &columns[target] {
            ColumnStatistics::Category(_) if self.columns[target].kind == ColumnKind::Flag => {
                let flags =
                    columns.iter().zip(&self.columns).filter(|(_, column)| column.kind == ColumnKind::Flag);
                let present = |counts: &CategoryCounts| counts.values.get("1").copied().unwrap_or(0);
                let count = |statistics: &ColumnStatistics| match statistics {
                    ColumnStatistics::Category(counts) => present(counts),
                    ColumnStatistics::Number(_) => 0,
                };
                Some(flags.map(|(statistics, _)| count(statistics)).collect())
            }
            ColumnStatistics::Category(counts) => Some(CategoryIndex::of(names).counts(counts)),
            ColumnStatistics::Number(_) => None,
        }
    }

    /// What turns the standardized values of the targets back into their own units, as (mean, standard deviation).
    pub fn target_scales(&self, settings: &TableSettings) -> Vec<(f64, f64)> {
        let scale = |(i, column): (usize, &Column)| {
            let statistics = self.statistics.as_ref().map(|statistics| &statistics.columns[i]);
            match (column.kind, statistics) {
                (ColumnKind::Number, Some(ColumnStatistics::Number(moments))) if settings.standardise => {
                    (moments.mean, if moments.std() > 0.0 { moments.std() } else { 1.0 })
                }
                _ => (0.0, 1.0),
            }
        };
        let predicted = |(_, column): &(usize, &Column)| column.target && !column.weight;
        self.columns.iter().enumerate().filter(predicted).map(scale).collect()
    }
}
