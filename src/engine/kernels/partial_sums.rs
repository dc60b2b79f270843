//! Sums over parts of the rows, computed in parallel and added in order: the same bits whatever the number of threads.
//! All parts are in one buffer, which goes back to the system as a whole: many small ones would stay resident.

use std::ops::Range;

use candle_core::DType;

use super::{Real, cpu};

/// Enough parts for the threads of most machines, and few: each has a sum for every column.
const MAX_PARTS: usize = 128;

/// The number of parts that rows of `width` values are cut into.
pub fn num_parts(rows: usize, width: usize) -> usize {
    rows.div_ceil(cpu::rows_per_chunk(width)).min(MAX_PARTS)
}

/// Bytes of [`PartialSums::of_rows`].
pub fn bytes(dtype: DType, rows: usize, width: usize, columns: usize) -> u64 {
    (num_parts(rows, width) * columns * cpu::acc_bytes(dtype)) as u64
}

/// Adds rows to the sums of their part, which it is given as the part, its rows and its sums.
type AddRows<'a, R> = dyn Fn(usize, Range<usize>, &mut [R]) + Sync + 'a;

pub struct PartialSums<R> {
    /// (parts, columns)
    values: Vec<R>,
    columns: usize,
}

impl<R: Real> PartialSums<R> {
    /// Calls `add(part, sums)` for each part, with `columns` zeros to add to.
    pub fn of_parts(parts: usize, columns: usize, add: &(dyn Fn(usize, &mut [R]) + Sync)) -> Self {
        let mut values = vec![R::ZERO; parts * columns];
        let all = cpu::DisjointSliceMut::new(&mut values);
        cpu::parallel_for(parts, &|part| {
            // SAFETY: parts do not overlap, and each is visited once.
            add(part, unsafe { all.range_mut(part * columns, columns) });
        });
        Self { values, columns }
    }

    /// Cuts `rows` rows of `width` values into parts of about the same size, and calls `add` for each.
    pub fn of_rows(rows: usize, width: usize, columns: usize, add: &AddRows<R>) -> Self {
        let parts = num_parts(rows, width);
        Self::of_parts(parts, columns, &|part, sums| {
            add(part, part * rows / parts..(part + 1) * rows / parts, sums);
        })
    }

    /// The sums of each part, in order.
    pub fn parts(&self) -> impl Iterator<Item = &[R]> {
        self.values.chunks_exact(self.columns.max(1))
    }

    /// Adds the sums of the columns from `first` on.
    pub fn add_to(&self, into: &mut [R], first: usize) {
        cpu::parallel_for_rows(into, 1, |start, into| {
            for part in self.parts() {
                into.iter_mut().zip(&part[first + start..]).for_each(|(a, b)| *a += *b);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_part_and_more_rows_never_take_less() {
        for width in [1, 7, 500, 12_000, 1 << 20] {
            let mut last = 0;
            for rows in [0, 1, 2, 127, 128, 129, 300, 5000] {
                let sums = PartialSums::<f64>::of_rows(rows, width, 2, &|_, range, sums| {
                    sums[0] += range.len() as f64;
                    sums[1] += range.map(|row| row as f64).sum::<f64>();
                });
                let mut total = [1.0; 2];
                sums.add_to(&mut total, 0);
                assert_eq!(total, [1.0 + rows as f64, 1.0 + (rows * rows.saturating_sub(1) / 2) as f64]);
                let taken = bytes(DType::F64, rows, width, 2);
                assert_eq!(taken, 8 * sums.values.len() as u64);
                assert!(taken >= last && sums.parts().count() <= MAX_PARTS);
                last = taken;
            }
        }
    }
}
