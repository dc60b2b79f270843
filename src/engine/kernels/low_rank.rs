//! The singular values of a matrix on the host, and its best factors of a rank.
//!
//! Takes f32 values in row-major order and computes in f64: the eigenvectors of the Gram matrix of the smaller
//! side. Squaring costs half of f64's digits, so that singular values are exact to 1e-7 of the largest one, about what
//! f32 resolves. The time grows with the cube of the smaller side.

use std::borrow::Cow;

use rayon::prelude::*;

use super::symmetric_eigen;
use crate::params::{MatrixLayer, ParamLayout};

/// Eigenvalues below this fraction of the norm of the Gram matrix are rounding noise.
const NOISE: f64 = 1e-14;
/// Components below this fraction of the largest singular value are not balanced further between the factors.
const MIN_BALANCE: f64 = 1e-6;

/// A matrix of `rows` x `columns` values.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub values: &'a [f32],
    pub rows: usize,
    pub columns: usize,
}

/// Two matrices, (rows, rank) and (rank, columns).
pub struct Factors {
    pub left: Vec<f32>,
    pub right: Vec<f32>,
}

/// Host bytes of a decomposition of a matrix that is in memory, with its factors of this rank.
pub fn workspace_bytes(rows: usize, columns: usize, rank: usize) -> u64 {
    let small = rows.min(columns);
    let transposed = if columns < rows { 4 * rows * columns } else { 0 };
    let factors = 4 * rank * (rows + columns);
    // A projection per thread, and the vectors that hold rows.
    let scratch = rayon::current_num_threads() * 8 * rows.max(columns) + 64 * small;
    (transposed + symmetric_eigen::workspace_bytes(small) + factors + scratch) as u64
}

/// Host bytes at most while a layer of a model is factorized, its whole weight included.
pub fn factorization_bytes(layout: &ParamLayout) -> u64 {
    layout.matrices.iter().map(|layer| layer_bytes(layer, layer.rank)).max().unwrap_or(0)
}

/// Host bytes of a decomposition of a layer's weight, and of its factors of this rank; 0 without a rank.
pub fn layer_bytes(layer: &MatrixLayer, rank: Option<usize>) -> u64 {
    // A row is permuted at a time, in parts of the file.
    const READ_BYTES: u64 = 1 << 20;
    let (rows, columns) = layer.dims();
    rank.map_or(0, |rank| {
        4 * (rows * columns + 2 * columns) as u64 + READ_BYTES + workspace_bytes(rows, columns, rank)
    })
}

/// The singular values, descending.
pub fn singular_values(matrix: Matrix) -> Vec<f64> {
    Spectrum::of(matrix).values
}

/// The factors whose product is the matrix of this rank that is closest to `matrix`. Both have the norm of the
/// square root of each singular value.
pub fn factorize(matrix: Matrix, rank: usize) -> Factors {
    let Spectrum { rows, values, vectors } = Spectrum::of(matrix);
    let long = rows.first().map_or(0, |row| row.len());
    let largest = values.first().copied().unwrap_or(0.0);
    let scale = |value: f64| if largest > 0.0 { value.max(MIN_BALANCE * largest).sqrt() } else { 1.0 };
    let components = values.into_par_iter().zip(vectors).take(rank).map(|(value, vector)| {
        let mut projection = vec![0f64; long];
        if value > 0.0 {
            for (weight, row) in vector.iter().zip(&*rows) {
                projection.iter_mut().zip(row.iter()).for_each(|(sum, x)| *sum += weight * f64::from(*x));
            }
        }
        let scale = scale(value);
        let projection: Vec<f32> = projection.into_iter().map(|x| (x / scale) as f32).collect();
        (vector.into_iter().map(|x| (x * scale) as f32).collect::<Vec<f32>>(), projection)
    });
    let components: Vec<(Vec<f32>, Vec<f32>)> = components.collect();
    let of_rows = |(short, long): &(Vec<f32>, Vec<f32>), row: usize| {
        if matrix.columns < matrix.rows { long[row] } else { short[row] }
    };
    let mut left = Vec::with_capacity(matrix.rows * components.len());
    for row in 0..matrix.rows {
        left.extend(components.iter().map(|component| of_rows(component, row)));
    }
    let right = components.into_iter().flat_map(
        |(short, long)| {
            if matrix.columns < matrix.rows { short } else { long }
        },
    );
    Factors { left, right: right.collect() }
}

/// The singular values of a matrix and the singular vectors of its smaller side.
struct Spectrum<'a> {
    /// The smaller side as rows.
    rows: Vec<Cow<'a, [f32]>>,
    /// Descending.
    values: Vec<f64>,
    vectors: Vec<Vec<f64>>,
}

impl<'a> Spectrum<'a> {
    fn of(matrix: Matrix<'a>) -> Self {
        let Matrix { values, rows, columns } = matrix;
        let rows: Vec<Cow<[f32]>> = match columns < rows {
            true => (0..columns)
                .map(|column| values.iter().skip(column).step_by(columns).copied().collect())
                .collect(),
            false => values.chunks_exact(columns.max(1)).map(Into::into).collect(),
        };
        let gram = rows.par_iter().map(|row| rows.iter().map(|other| dot(row, other)).collect());
        let (eigenvalues, mut eigenvectors) = symmetric_eigen::eigen(gram.collect());
        let floor = NOISE * dot(&eigenvalues, &eigenvalues).sqrt();
        let mut values: Vec<(f64, usize)> =
            eigenvalues.into_iter().enumerate().map(|(i, value)| (value, i)).collect();
        values.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let vectors = values.iter().map(|(_, i)| std::mem::take(&mut eigenvectors[*i])).collect();
        let singular = |(value, _): (f64, usize)| if value > floor { value.sqrt() } else { 0.0 };
        Self { rows, values: values.into_iter().map(singular).collect(), vectors }
    }
}

/// The inner product, in lanes that the compiler turns into vectors.
pub(super) fn dot<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0f64; LANES];
    let (a_lanes, a_rest) = a.as_chunks::<LANES>();
    let (b_lanes, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += (*a).into() * (*b).into();
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| (*a).into() * (*b).into()).sum();
    sums.iter().sum::<f64>() + rest
}

/// The smallest rank that keeps this fraction of the sum of squares of the singular values.
pub fn rank_of_energy(values: &[f64], energy: f64) -> usize {
    let wanted = energy * values.iter().map(|value| value * value).sum::<f64>();
    let mut kept = 0.0;
    let needed = values.iter().position(|value| {
        kept += value * value;
        kept >= wanted
    });
    needed.map_or(values.len(), |index| index + 1).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::{RngKey, stream_id};

    fn random_matrix(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
        let mut rng = RngKey::new(seed, stream_id("matrix")).rng();
        (0..rows * columns).map(|_| rng.uniform(-1.0, 1.0)).collect()
    }

    fn product(factors: &Factors, rows: usize, columns: usize, rank: usize) -> Vec<f64> {
        let mut out = vec![0.0; rows * columns];
        for (i, out) in out.iter_mut().enumerate() {
            let (row, column) = (i / columns, i % columns);
            let pair = |k: usize| {
                f64::from(factors.left[row * rank + k]) * f64::from(factors.right[k * columns + column])
            };
            *out = (0..rank).map(pair).sum();
        }
        out
    }

    fn distance(a: &[f32], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum::<f64>().sqrt()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// The theorem of Eckart and Young: the error of the best approximation is the norm of the singular values
        /// it lacks.
        #[test]
        fn factors_are_the_best_of_their_rank(
            rows in 1usize..40,
            columns in 1usize..40,
            fraction in 0.0f64..1.0,
            seed: u64,
        ) {
            let values = random_matrix(rows, columns, seed);
            let matrix = Matrix { values: &values, rows, columns };
            let spectrum = singular_values(matrix);
            let rank = 1 + (fraction * (rows.min(columns) - 1) as f64) as usize;
            let factors = factorize(matrix, rank);
            prop_assert_eq!((factors.left.len(), factors.right.len()), (rows * rank, rank * columns));
            let lost = spectrum[rank..].iter().map(|s| s * s).sum::<f64>().sqrt();
            let error = distance(&values, &product(&factors, rows, columns, rank));
            prop_assert!((error - lost).abs() <= 1e-5 * spectrum[0], "{error} and {lost}");
        }

        /// Rows of the right factor are orthogonal, columns of the left one too, and both have the singular values
        /// as squares.
        #[test]
        fn factors_are_orthogonal_and_balanced(rows in 2usize..30, columns in 2usize..30, seed: u64) {
            let values = random_matrix(rows, columns, seed);
            let matrix = Matrix { values: &values, rows, columns };
            let (rank, spectrum) = (rows.min(columns), singular_values(matrix));
            let Factors { left, right } = factorize(matrix, rank);
            let column = |k: usize| left.iter().skip(k).step_by(rank).copied().collect::<Vec<f32>>();
            for (i, value) in spectrum.iter().enumerate() {
                for j in 0..rank {
                    let expected = if i == j { *value } else { 0.0 };
                    let [a, b] = [i, j].map(|k| &right[k * columns..(k + 1) * columns]);
                    // Small components are resolved to 1e-8 of the largest, squared.
                    let close = |value: f64| (value - expected).abs() <= 1e-4 * spectrum[0];
                    prop_assert!(close(dot(a, b)), "right {i} {j}");
                    prop_assert!(close(dot(&column(i), &column(j))), "left {i} {j}");
                }
            }
        }
    }

    /// numpy.linalg.svd(numpy.arange(12).reshape(3, 4), compute_uv=False); the rank is two.
    #[test]
    fn singular_values_are_those_of_numpy() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        for (rows, columns, expected) in [(3, 4, [22.4092982, 1.95534034]), (4, 3, [22.4467488, 1.46405850])]
        {
            let found = singular_values(Matrix { values: &values, rows, columns });
            assert!(
                (found[0] - expected[0]).abs() < 1e-6 && (found[1] - expected[1]).abs() < 1e-6,
                "{found:?}"
            );
            assert!(found[2] < 1e-6, "{found:?}");
        }
    }

    /// Components beyond the rank of the matrix change nothing, and one of their factors is not zero, so that they
    /// are trained.
    #[test]
    fn a_matrix_of_lower_rank_is_exact() {
        let (rows, columns) = (6, 9);
        let of = |i: usize| ((i / columns) as f32 - 2.0) * ((i % columns) as f32 + 1.0);
        for values in [(0..rows * columns).map(of).collect::<Vec<_>>(), vec![0.0; rows * columns]] {
            let factors = factorize(Matrix { values: &values, rows, columns }, 3);
            assert!(distance(&values, &product(&factors, rows, columns, 3)) < 1e-4);
            for k in 0..3 {
                let left = (0..rows).map(|row| factors.left[row * 3 + k].abs()).sum::<f32>();
                let right =
                    factors.right[k * columns..(k + 1) * columns].iter().map(|x| x.abs()).sum::<f32>();
                assert!(left + right > 0.0);
            }
        }
    }

    #[test]
    fn the_rank_keeps_the_energy() {
        let values = [2.0, 1.0, 1.0, 0.0];
        let ranks = [0.1, 0.66, 0.67, 0.83, 0.84, 1.0].map(|energy| rank_of_energy(&values, energy));
        assert_eq!(ranks, [1, 1, 2, 2, 3, 3]);
        assert_eq!(rank_of_energy(&[0.0, 0.0], 0.5), 1);
    }
}
