//! What the training rows have in each column, found in one pass by threads side by side: the mean and the
//! deviation of numbers, the different values of categories.
//!
//! The parts that threads take are fixed by the files and put together in their order, so that every sum is
//! taken the same way whatever the number of threads.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::OnMissing;
use super::columns::{Column, Kind, Reading};
use super::{Cells, Raw, Settings};
use crate::data::split::Plan;
use crate::data::{DataError, Watch};

/// Columns of all parts that are gone through at a time, at most: 56 bytes each.
const MOST_SEEN: usize = 1 << 19;

/// The longest name of a category, in bytes.
const LONGEST: usize = 256;

/// Of the columns used, in their order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Rows that were counted.
    pub rows: u64,
    /// Rows that were left out because they cannot be used.
    pub left_out: u64,
    pub columns: Vec<Seen>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Seen {
    Number(Moments),
    Category(Counts),
}

/// Of numbers that were not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    pub count: u64,
    pub missing: u64,
    pub mean: f64,
    /// The sum of the squared distances from the mean.
    squares: f64,
}

/// How often each value came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    pub missing: u64,
    pub values: BTreeMap<String, u64>,
}

impl Moments {
    /// Takes one number in, after Welford.
    fn see(&mut self, x: f64) {
        self.count += 1;
        let before = x - self.mean;
        self.mean += before / self.count as f64;
        self.squares += before * (x - self.mean);
    }

    /// Takes in what another part saw, after Chan.
    fn merge(&mut self, other: &Self) {
        self.missing += other.missing;
        if other.count == 0 {
            return;
        }
        let (a, b) = (self.count as f64, other.count as f64);
        let apart = other.mean - self.mean;
        self.count += other.count;
        self.mean += apart * b / (a + b);
        self.squares += other.squares + apart * apart * a * b / (a + b);
    }

    /// The deviation of the numbers themselves, as `StandardScaler` takes it: 0 where they are all one.
    pub fn std(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

/// What a pass needs to know beside the rows.
pub struct Pass<'a> {
    pub file: &'a Path,
    pub columns: &'a [Column],
    pub reading: &'a Reading,
    pub settings: &'a Settings,
    /// Which rows are trained on; all where absent.
    pub plan: Option<Plan>,
    pub watch: &'a dyn Watch,
}

impl Pass<'_> {
    /// Goes through the training rows of `raw`. A row that cannot be used ends it, or is left out where the
    /// settings say so.
    pub fn over(&self, raw: &dyn Raw) -> Result<Statistics, DataError> {
        let (parts, all) = (raw.parts(), raw.bytes());
        let (done, doing) = (AtomicU64::new(0), format!("statistics of {}", self.file.display()));
        let mut total = self.nothing();
        // A batch of parts at a time, so that what threads found does not pile up; of many columns fewer parts.
        let threads = rayon::current_num_threads();
        let most = (MOST_SEEN / self.columns.len().max(1)).clamp(threads, 16 * threads);
        for batch in (0..parts).collect::<Vec<_>>().chunks(most) {
            let found: Vec<_> = batch
                .par_iter()
                .map(|&part| {
                    let found = self.part(raw, part);
                    let bytes = raw.part_bytes(part);
                    let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
                    self.watch.pass(&doing, done.min(all), all);
                    found
                })
                .collect();
            for found in found {
                self.merge(&mut total, found?)?;
            }
        }
        self.watch.pass(&doing, all, all);
        Ok(total)
    }

    fn nothing(&self) -> Statistics {
        let columns = self.columns.iter().map(|column| match column.kind {
            Kind::Number => Seen::Number(Moments::default()),
            Kind::Category => Seen::Category(Counts::default()),
        });
        Statistics { rows: 0, left_out: 0, columns: columns.collect() }
    }

    fn part(&self, raw: &dyn Raw, part: usize) -> Result<Statistics, DataError> {
        let mut found = self.nothing();
        // Numbers need no map, and there may be a great many of them.
        let categories = self.columns.iter().rposition(|column| column.kind == Kind::Category);
        let mut counts: Vec<HashMap<String, u64>> =
            vec![HashMap::new(); categories.map_or(0, |last| last + 1)];
        let mut numbers = vec![0.0; self.columns.len()];
        raw.pass(part, self.columns, &mut |row, cells| {
            if self.plan.is_some_and(|plan| !plan.trained(row)) {
                return Ok(());
            }
            let usable = cells.and_then(|cells| self.usable(cells, &mut numbers).map(|()| cells));
            let cells = match usable {
                Ok(cells) => cells,
                Err(error) if self.settings.skip_bad && error.is_record() => {
                    found.left_out += 1;
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            found.rows += 1;
            for (i, (seen, &x)) in found.columns.iter_mut().zip(&numbers).enumerate() {
                match seen {
                    Seen::Number(moments) if x.is_nan() => moments.missing += 1,
                    Seen::Number(moments) => moments.see(x),
                    Seen::Category(counts) if self.reading.is_missing(cells.cell(i)) => counts.missing += 1,
                    Seen::Category(_) => {
                        let value = self.reading.category(cells.cell(i));
                        match counts[i].get_mut(value.as_ref()) {
                            Some(count) => *count += 1,
                            None => drop(counts[i].insert(value.into_owned(), 1)),
                        }
                        if counts[i].len() > self.settings.max_categories {
                            return Err(self.too_many(i));
                        }
                    }
                }
            }
            Ok(())
        })?;
        for (seen, counts) in found.columns.iter_mut().zip(counts) {
            if let Seen::Category(seen) = seen {
                seen.values = counts.into_iter().collect();
            }
        }
        Ok(found)
    }

    /// Whether every cell of a row is what its column wants; its numbers, NaN where one is missing.
    fn usable(&self, cells: &dyn Cells, numbers: &mut [f64]) -> Result<(), DataError> {
        for (i, column) in self.columns.iter().enumerate() {
            let cell = cells.cell(i);
            if self.reading.is_missing(cell) {
                if column.target || self.settings.on_missing == OnMissing::Error {
                    return Err(cells.fault(i, super::present(column)));
                }
                numbers[i] = f64::NAN;
            } else if column.kind == Kind::Number {
                numbers[i] = self.reading.number(cell).ok_or_else(|| cells.fault(i, super::NUMBER.into()))?;
            } else if self.reading.category(cell).len() > LONGEST {
                return Err(cells.fault(i, format!("a category of at most {LONGEST} bytes")));
            }
        }
        Ok(())
    }

    fn merge(&self, total: &mut Statistics, part: Statistics) -> Result<(), DataError> {
        total.rows += part.rows;
        total.left_out += part.left_out;
        for (i, (all, part)) in total.columns.iter_mut().zip(part.columns).enumerate() {
            match (all, part) {
                (Seen::Number(all), Seen::Number(part)) => all.merge(&part),
                (Seen::Category(all), Seen::Category(part)) => {
                    all.missing += part.missing;
                    part.values.into_iter().for_each(|(value, n)| *all.values.entry(value).or_default() += n);
                    if all.values.len() > self.settings.max_categories {
                        return Err(self.too_many(i));
                    }
                }
                _ => unreachable!("both were laid out by the same columns"),
            }
        }
        Ok(())
    }

    fn too_many(&self, column: usize) -> DataError {
        let (name, most) = (&self.columns[column].name, self.settings.max_categories);
        DataError::Table {
            file: self.file.to_owned(),
            place: String::new(),
            problem: format!("column `{name}` has more than {most} different values"),
            hint: "put the column in `ignore` or, if it is of numbers, in `numeric`, or raise `max_categories`",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Parts put together in order give the mean and deviation of all numbers, to rounding.
        #[test]
        fn parts_add_up(numbers in prop::collection::vec(-1e6..1e6f64, 1..60), cuts in prop::collection::vec(0usize..60, 0..4)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(numbers.len())).chain([0, numbers.len()]).collect();
            cuts.sort_unstable();
            let mut total = Moments::default();
            for cut in cuts.windows(2) {
                let mut part = Moments::default();
                numbers[cut[0]..cut[1]].iter().for_each(|x| part.see(*x));
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
        (0..1000).for_each(|_| moments.see(0.1));
        assert_eq!((moments.mean, moments.std()), (0.1, 0.0));
        assert_eq!(Moments::default().std(), 0.0);
    }
}
