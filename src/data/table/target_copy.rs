//! Whether a column is a relabelled copy of the target: each of its values occurs with one class only, and each class
//! with one value.

use std::collections::BTreeMap;

use super::{CellValue, hash};

/// Distinct values up to which a column is compared.
const MAX_VALUES: usize = 20;
/// Rows of each value from which on this is no coincidence.
const MIN_ROWS: usize = 5;

/// The pairs of values seen so far, by their hashes.
#[derive(Clone, Debug, Default)]
pub struct TargetCopy {
    of_value: BTreeMap<u64, u64>,
    of_target: BTreeMap<u64, u64>,
    rows: usize,
}

impl TargetCopy {
    /// Adds a row; returns whether the column may still be a copy.
    pub fn observe(&mut self, cell: CellValue<'_>, target: CellValue<'_>) -> bool {
        let (Some(cell), Some(target)) = (cell_hash(cell), cell_hash(target)) else { return true };
        self.rows += 1;
        let same_target = *self.of_value.entry(cell).or_insert(target) == target;
        let same_cell = *self.of_target.entry(target).or_insert(cell) == cell;
        same_target && same_cell && self.of_value.len() <= MAX_VALUES
    }

    /// Number of values, if they are those of the target.
    pub fn values(&self) -> Option<usize> {
        let values = self.of_value.len();
        (values > 1 && self.rows >= MIN_ROWS * values.max(4)).then_some(values)
    }
}

fn cell_hash(cell: CellValue<'_>) -> Option<u64> {
    match cell {
        CellValue::Number(number) => Some(hash(&number.to_le_bytes())),
        CellValue::Text(text) => Some(hash(text)).filter(|_| !text.is_empty()),
        CellValue::Missing | CellValue::Texts(_) => None,
    }
}
