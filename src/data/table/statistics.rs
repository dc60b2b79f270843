//! Column statistics of the training rows in one parallel pass: mean and standard deviation of numbers, distinct values
//! of categories.
//!
//! The files alone determine the partitions, and they are merged in order, so the result is bit-identical for any
//! number of threads.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::columns::{CellParser, Column, ColumnKind};
use super::{RowCells, TableReader, TableSettings};
use crate::split::SplitPlan;
use crate::{DataError, ProgressObserver};

/// Maximum columns, over all partitions, that are scanned at a time: 56 bytes each.
const MAX_BATCH_COLUMNS: usize = 1 << 19;

/// Maximum magnitude of a number: the products of [`Moments`] stay finite for 2^62 rows.
const MAX_MAGNITUDE: f64 = 1e120;
const EXPECTED_MAGNITUDE: &str =
    "a number from -1e120 to 1e120: beyond these, a column has no standard deviation";

/// Maximum bytes of a category name.
const MAX_CATEGORY_BYTES: usize = 256;

/// Statistics of the columns in use, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TableStatistics {
    /// Rows counted.
    pub rows: u64,
    /// Unusable rows that were skipped, and what is wrong with the first.
    pub skipped_rows: u64,
    #[serde(default)]
    pub first_skipped: Option<String>,
    pub columns: Vec<ColumnStatistics>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ColumnStatistics {
    Number(Moments),
    Category(CategoryCounts),
}

/// Running mean and variance; the numbers are not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    pub count: u64,
    pub missing: u64,
    pub mean: f64,
    /// Sum of squared deviations from the mean.
    m2: f64,
}

/// Number of occurrences per value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CategoryCounts {
    pub missing: u64,
    pub values: BTreeMap<String, u64>,
}

impl Moments {
    /// Adds one number (Welford's algorithm).
    fn push(&mut self, x: f64) {
        self.count += 1;
        let before = x - self.mean;
        self.mean += before / self.count as f64;
        self.m2 += before * (x - self.mean);
    }

    /// Adds the moments of another partition (Chan's algorithm).
    fn merge(&mut self, other: &Self) {
        self.missing += other.missing;
        if other.count == 0 {
            return;
        }
        let (a, b) = (self.count as f64, other.count as f64);
        let delta = other.mean - self.mean;
        self.count += other.count;
        self.mean += delta * b / (a + b);
        self.m2 += other.m2 + delta * delta * a * b / (a + b);
    }

    /// Population standard deviation, as in scikit-learn's `StandardScaler`; 0 if all values are equal.
    pub fn std(&self) -> f64 {
        (self.m2 / self.count.max(1) as f64).sqrt()
    }
}

/// What a pass needs besides the rows.
pub struct StatisticsPass<'a> {
    pub file: &'a Path,
    pub columns: &'a [Column],
    pub parser: &'a CellParser,
    pub settings: &'a TableSettings,
    /// Which rows are for training; all if `None`.
    pub split_plan: Option<&'a SplitPlan>,
    pub observer: &'a dyn ProgressObserver,
}

impl StatisticsPass<'_> {
    /// Scans the training rows of `reader`, at most `parallel` partitions at a time. An unusable row is an error, or is
    /// skipped if the settings say so.
    pub fn run(&self, reader: &dyn TableReader, parallel: usize) -> Result<TableStatistics, DataError> {
        let (parts, all) = (reader.partitions(), reader.bytes());
        let (done, activity) = (AtomicU64::new(0), format!("statistics of {}", self.file.display()));
        let mut total = self.empty();
        // Scan a batch of partitions at a time, so that results do not pile up in memory; a wide table gets smaller
        // batches.
        let threads = rayon::current_num_threads();
        let most = (MAX_BATCH_COLUMNS / self.columns.len().max(1)).clamp(threads, 16 * threads);
        // Memory for fewer scans than there are threads: no more in a batch.
        let most = if parallel < threads { parallel } else { most };
        for batch in (0..parts).collect::<Vec<_>>().chunks(most) {
            let found: Vec<_> = batch
                .par_iter()
                .map(|&part| {
                    let found = self.scan_partition(reader, part);
                    let bytes = reader.partition_bytes(part);
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    self.observer.report(&activity, done.min(all), all);
                    found
                })
                .collect();
            for found in found {
                self.merge(&mut total, found?)?;
            }
        }
        self.observer.report(&activity, all, all);
        Ok(total)
    }

    fn empty(&self) -> TableStatistics {
        let columns = self.columns.iter().map(|column| match column.kind {
            ColumnKind::Number => ColumnStatistics::Number(Moments::default()),
            ColumnKind::Category | ColumnKind::Labels | ColumnKind::Flag => {
                ColumnStatistics::Category(CategoryCounts::default())
            }
        });
        TableStatistics { columns: columns.collect(), ..TableStatistics::default() }
    }

    fn scan_partition(&self, reader: &dyn TableReader, part: usize) -> Result<TableStatistics, DataError> {
        let mut found = self.empty();
        // Numeric columns need no map, and there may be very many of them.
        let categories = self.columns.iter().rposition(|column| column.kind != ColumnKind::Number);
        let mut counts: Vec<HashMap<String, u64>> =
            vec![HashMap::new(); categories.map_or(0, |last| last + 1)];
        let mut numbers = vec![0.0; self.columns.len()];
        reader.scan(part, self.columns, &mut |row, cells| {
            if self.split_plan.is_some_and(|plan| !plan.is_train(row)) {
                return Ok(());
            }
            let usable = cells.and_then(|cells| self.check_row(cells, &mut numbers).map(|()| cells));
            let cells = match usable {
                Ok(cells) => cells,
                Err(error) if self.settings.skip_bad && error.is_bad_record() => {
                    found.skipped_rows += 1;
                    found.first_skipped.get_or_insert_with(|| error.to_string());
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            found.rows += 1;
            for (i, (column, &x)) in found.columns.iter_mut().zip(&numbers).enumerate() {
                match column {
                    ColumnStatistics::Number(moments) if x.is_nan() => moments.missing += 1,
                    ColumnStatistics::Number(moments) => moments.push(x),
                    ColumnStatistics::Category(_) if self.columns[i].kind == ColumnKind::Labels => {
                        let mut labels = self.parser.labels(cells.cell(i)).unwrap_or_default();
                        labels.sort_unstable();
                        labels.dedup();
                        labels.into_iter().for_each(|label| *counts[i].entry(label).or_default() += 1);
                    }
                    ColumnStatistics::Category(counts) if self.parser.is_missing(cells.cell(i)) => {
                        counts.missing += 1
                    }
                    ColumnStatistics::Category(_) if self.columns[i].kind == ColumnKind::Flag => {
                        let present = self.parser.flag(cells.cell(i)) == Some(true);
                        *counts[i].entry(if present { "1" } else { "0" }.to_owned()).or_default() += 1;
                    }
                    ColumnStatistics::Category(_) => {
                        let value = self.parser.category(cells.cell(i));
                        match counts[i].get_mut(value.as_ref()) {
                            Some(count) => *count += 1,
                            None => drop(counts[i].insert(value.into_owned(), 1)),
                        }
                    }
                }
                if counts.get(i).is_some_and(|counts| counts.len() > self.settings.max_categories) {
                    return Err(self.too_many_categories(i));
                }
            }
            Ok(())
        })?;
        for (column, counts) in found.columns.iter_mut().zip(counts) {
            if let ColumnStatistics::Category(column) = column {
                column.values = counts.into_iter().collect();
            }
        }
        Ok(found)
    }

    /// Checks every cell of a row against its column and extracts the numbers; NaN for a missing one.
    fn check_row(&self, cells: &dyn RowCells, numbers: &mut [f64]) -> Result<(), DataError> {
        for (i, column) in self.columns.iter().enumerate() {
            let cell = cells.cell(i);
            if column.kind == ColumnKind::Labels {
                self.check_labels(cells, i)?;
            } else if self.parser.is_missing(cell) {
                if !self.settings.fills(column) {
                    return Err(cells.cell_error(i, super::expected_present(column)));
                }
                numbers[i] = f64::NAN;
            } else if column.kind == ColumnKind::Number {
                numbers[i] = match self.parser.number(cell, column.notation) {
                    Some(number) => number,
                    None if self.settings.fills(column)
                        && self.parser.is_not_finite(cell, column.notation) =>
                    {
                        f64::NAN
                    }
                    None => return Err(cells.cell_error(i, column.notation.expected().into())),
                };
                if numbers[i].abs() > MAX_MAGNITUDE {
                    return Err(cells.cell_error(i, EXPECTED_MAGNITUDE.into()));
                }
                if column.weight && numbers[i] < 0.0 {
                    return Err(cells.cell_error(i, super::EXPECTED_WEIGHT.into()));
                }
            } else if column.kind == ColumnKind::Flag {
                if self.parser.flag(cell).is_none() {
                    return Err(cells.cell_error(i, super::EXPECTED_FLAG.into()));
                }
            } else if !self.parser.is_readable(cell) {
                return Err(cells.cell_error(i, super::EXPECTED_UTF8.into()));
            } else if self.parser.category(cell).len() > MAX_CATEGORY_BYTES {
                return Err(cells.cell_error(i, format!("a category of at most {MAX_CATEGORY_BYTES} bytes")));
            }
        }
        Ok(())
    }

    fn check_labels(&self, cells: &dyn RowCells, i: usize) -> Result<(), DataError> {
        let cell = cells.cell(i);
        if !self.parser.is_readable(cell) {
            return Err(cells.cell_error(i, super::EXPECTED_UTF8.into()));
        }
        match self.parser.labels(cell) {
            None => Err(cells.cell_error(i, super::expected_present(&self.columns[i]))),
            Some(labels) if labels.iter().any(|label| label.len() > MAX_CATEGORY_BYTES) => {
                Err(cells.cell_error(i, format!("labels of at most {MAX_CATEGORY_BYTES} bytes")))
            }
            Some(_) => Ok(()),
        }
    }

    fn merge(&self, total: &mut TableStatistics, part: TableStatistics) -> Result<(), DataError> {
        total.rows += part.rows;
        total.skipped_rows += part.skipped_rows;
        total.first_skipped = total.first_skipped.take().or(part.first_skipped);
        for (i, (all, part)) in total.columns.iter_mut().zip(part.columns).enumerate() {
            match (all, part) {
                (ColumnStatistics::Number(all), ColumnStatistics::Number(part)) => all.merge(&part),
                (ColumnStatistics::Category(all), ColumnStatistics::Category(part)) => {
                    all.missing += part.missing;
                    part.values.into_iter().for_each(|(value, n)| *all.values.entry(value).or_default() += n);
                    if all.values.len() > self.settings.max_categories {
                        return Err(self.too_many_categories(i));
                    }
                }
                _ => unreachable!("both have the same columns"),
            }
        }
        Ok(())
    }

    fn too_many_categories(&self, column: usize) -> DataError {
        let (name, most) = (&self.columns[column].name, self.settings.max_categories);
        DataError::Table {
            file: self.file.to_owned(),
            place: String::new(),
            problem: format!("column `{name}` has more than {most} distinct values"),
            hint: "add the column to `ignore` or, if it is numeric, to `numeric`, or raise `max_categories`",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Merged partitions give the mean and standard deviation of all numbers, up to rounding.
        #[test]
        fn parts_add_up(
            numbers in prop::collection::vec(-1e6..1e6f64, 1..60),
            cuts in prop::collection::vec(0usize..60, 0..4),
        ) {
            let cuts = cuts.into_iter().map(|cut| cut.min(numbers.len()));
            let mut cuts: Vec<usize> = cuts.chain([0, numbers.len()]).collect();
            cuts.sort_unstable();
            let mut total = Moments::default();
            for cut in cuts.windows(2) {
                let mut part = Moments::default();
                numbers[cut[0]..cut[1]].iter().for_each(|x| part.push(*x));
                total.merge(&part);
            }
            let n = numbers.len() as f64;
            let mean = numbers.iter().sum::<f64>() / n;
            let std = (numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
            prop_assert_eq!(total.count, numbers.len() as u64);
            prop_assert!((total.mean - mean).abs() <= 1e-9 * (1.0 + mean.abs()));
            prop_assert!((total.std() - std).abs() <= 1e-6 * (1.0 + std), "{} {std}", total.std());
        }
    }

    #[test]
    fn numbers_that_are_all_one_have_no_deviation() {
        let mut moments = Moments::default();
        (0..1000).for_each(|_| moments.push(0.1));
        assert_eq!((moments.mean, moments.std()), (0.1, 0.0));
        assert_eq!(Moments::default().std(), 0.0);
    }

    /// The largest numbers, in the most rows: nothing overflows on the way.
    #[test]
    fn numbers_of_any_accepted_magnitude_have_a_deviation() {
        let mut half = Moments::default();
        half.push(MAX_MAGNITUDE);
        half.count = 1 << 61;
        let mut total = Moments { mean: -MAX_MAGNITUDE, ..half };
        total.merge(&half);
        assert_eq!((total.mean, total.std()), (0.0, MAX_MAGNITUDE));
    }
}
