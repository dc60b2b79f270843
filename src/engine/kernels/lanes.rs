//! Sums and maxima over rows in a fixed number of lanes: they vectorize, and the order of summation is the same on
//! every machine.

use super::{Elem, Real};

/// Row lengths that are a multiple of this leave no scalar remainder.
pub const LANES: usize = 16;

/// The sum of `f` over the elements of `N` rows of equal length.
#[inline(always)]
pub fn sum<T: Elem, const N: usize>(rows: [&[T]; N], f: impl Fn([T::Acc; N]) -> T::Acc) -> T::Acc {
    fold(rows, T::Acc::ZERO, |sum, values| sum + f(values), |a, b| a + b)
}

/// The largest value of a row; negative infinity if it is empty.
#[inline(always)]
pub fn max<R: Real>(row: &[R]) -> R {
    fold([row], R::NEG_INFINITY, |max, [value]| value.larger(max), |a, b| a.larger(b))
}

#[inline(always)]
fn fold<T: Elem, const N: usize>(
    rows: [&[T]; N],
    start: T::Acc,
    add: impl Fn(T::Acc, [T::Acc; N]) -> T::Acc,
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
) -> T::Acc {
    let mut lanes = [start; LANES];
    // Arrays are filled by loops: `map` would be compiled for each of the many instances of this function.
    let whole_chunks = rows[0].len() / LANES;
    for i in 0..whole_chunks {
        let mut chunk = [&rows[0].as_chunks::<LANES>().0[i]; N];
        for (chunk, row) in chunk.iter_mut().zip(rows) {
            *chunk = &row.as_chunks().0[i];
        }
        for (lane, sum) in lanes.iter_mut().enumerate() {
            let mut values = [T::Acc::ZERO; N];
            for (value, chunk) in values.iter_mut().zip(chunk) {
                *value = chunk[lane].to_acc();
            }
            *sum = add(*sum, values);
        }
    }
    for (i, sum) in (whole_chunks * LANES..rows[0].len()).zip(&mut lanes) {
        let mut values = [T::Acc::ZERO; N];
        for (value, row) in values.iter_mut().zip(rows) {
            *value = row[i].to_acc();
        }
        *sum = add(*sum, values);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = combine(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_counts_once() {
        for n in [0usize, 1, 15, 16, 17, 100] {
            let a: Vec<f64> = (0..n).map(|i| i as f64 - 40.0).collect();
            let b: Vec<f64> = (0..n).map(|i| (i * i % 7) as f64).collect();
            assert_eq!(sum([&a, &b], |[a, b]| a * b), a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>());
            assert_eq!(max(&a), a.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
