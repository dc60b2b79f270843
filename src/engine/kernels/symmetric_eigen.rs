//! Eigenvalues and eigenvectors of a symmetric matrix on the host, in f64.
//!
//! Householder reflections make the matrix tridiagonal, and implicit QL iterations make that diagonal. Rows and strips
//! of columns are processed in parallel, and every sum is in an order that does not depend on threads.

use rayon::prelude::*;

use super::low_rank::dot;

/// Columns of the eigenvectors that are rotated together.
const STRIP: usize = 64;
/// Two are usual.
const MAX_ITERATIONS: usize = 60;

/// Host bytes of the decomposition of an (n, n) matrix, itself included.
pub fn workspace_bytes(n: usize) -> usize {
    8 * (5 * n * n / 2 + 8 * n) + n * size_of::<[Vec<f64>; 4]>()
}

/// An eigenvalue of each eigenvector; eigenvectors are rows of length 1. In no order.
pub fn eigen(matrix: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let n = matrix.len();
    let Tridiagonal { mut diagonal, mut beside, reflections } = tridiagonalize(matrix);
    let mut strips = transposed_strips(reflect_identity(n, reflections));
    let mut rotations = Vec::new();
    for first in 0..n {
        for _ in 0..MAX_ITERATIONS {
            let last = (first..n - 1)
                .find(|i| beside[*i].abs() <= f64::EPSILON * (diagonal[*i].abs() + diagonal[i + 1].abs()))
                .unwrap_or(n - 1);
            if last == first {
                break;
            }
            rotations.clear();
            iterate(&mut diagonal, &mut beside, first, last, &mut rotations);
            strips.par_iter_mut().for_each(|strip| rotate(strip, n, &rotations));
        }
    }
    let row = |i: usize| -> Vec<f64> {
        strips.iter().flat_map(|strip| &strip[i * (strip.len() / n)..][..strip.len() / n]).copied().collect()
    };
    (diagonal, (0..n).map(row).collect())
}

struct Tridiagonal {
    diagonal: Vec<f64>,
    /// The values beside the diagonal: the one at `i` couples `i` and `i + 1`.
    beside: Vec<f64>,
    /// Of unit length; the vector at `k` reflects the rows from `k + 1` on.
    reflections: Vec<Vec<f64>>,
}

fn tridiagonalize(mut a: Vec<Vec<f64>>) -> Tridiagonal {
    let n = a.len();
    let (mut beside, mut reflections) = (vec![0.0; n], Vec::with_capacity(n));
    for k in 0..n.saturating_sub(1) {
        let mut v: Vec<f64> = a[k][k + 1..].to_vec();
        let norm = dot(&v, &v).sqrt();
        beside[k] = -norm.copysign(v[0]);
        v[0] -= beside[k];
        let length = dot(&v, &v).sqrt();
        if length > 0.0 {
            v.iter_mut().for_each(|x| *x /= length);
        }
        // H A H = A - v w' - w v', with w = 2 A v - 2 (v' A v) v.
        let rest = &mut a[k + 1..];
        let mut w: Vec<f64> = rest.par_iter().map(|row| 2.0 * dot(&row[k + 1..], &v)).collect();
        let overlap = dot(&w, &v);
        w.iter_mut().zip(&v).for_each(|(w, v)| *w -= overlap * v);
        rest.par_iter_mut().zip(v.par_iter().zip(&w)).for_each(|(row, (vi, wi))| {
            for (x, (v, w)) in row[k + 1..].iter_mut().zip(v.iter().zip(&w)) {
                *x -= vi * w + wi * v;
            }
        });
        reflections.push(v);
    }
    Tridiagonal { diagonal: (0..n).map(|i| a[i][i]).collect(), beside, reflections }
}

/// The product of the reflections.
fn reflect_identity(n: usize, reflections: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let unit = |i: usize| (0..n).map(|j| f64::from(u8::from(i == j))).collect();
    let mut q: Vec<Vec<f64>> = (0..n).map(unit).collect();
    for (k, v) in reflections.iter().enumerate().rev() {
        let rest = &mut q[k + 1..];
        let mut sums = vec![0.0; n - k - 1];
        for (v, row) in v.iter().zip(rest.iter()) {
            sums.iter_mut().zip(&row[k + 1..]).for_each(|(sum, x)| *sum += 2.0 * v * x);
        }
        rest.par_iter_mut().zip(v).for_each(|(row, v)| {
            row[k + 1..].iter_mut().zip(&sums).for_each(|(x, sum)| *x -= v * sum);
        });
    }
    q
}

/// The transpose, in strips of columns, each row by row.
fn transposed_strips(q: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    let n = q.len();
    let strip =
        |columns: &[Vec<f64>]| (0..n).flat_map(|i| columns.iter().map(move |column| column[i])).collect();
    q.chunks(STRIP).map(strip).collect()
}

/// A rotation of rows `row` and `row + 1`.
struct Rotation {
    row: usize,
    cosine: f64,
    sine: f64,
}

/// An implicit QL iteration on the block from `first` to `last`.
fn iterate(
    diagonal: &mut [f64],
    beside: &mut [f64],
    first: usize,
    last: usize,
    rotations: &mut Vec<Rotation>,
) {
    let slope = (diagonal[first + 1] - diagonal[first]) / (2.0 * beside[first]);
    let shift = beside[first] / (slope + slope.hypot(1.0).copysign(slope));
    let mut g = diagonal[last] - diagonal[first] + shift;
    let (mut sine, mut cosine, mut p) = (1.0, 1.0, 0.0);
    for i in (first..last).rev() {
        let (f, b) = (sine * beside[i], cosine * beside[i]);
        let r = f.hypot(g);
        beside[i + 1] = r;
        if r == 0.0 {
            // The block falls apart here.
            diagonal[i + 1] -= p;
            beside[last] = 0.0;
            return;
        }
        (sine, cosine) = (f / r, g / r);
        g = diagonal[i + 1] - p;
        let turned = (diagonal[i] - g) * sine + 2.0 * cosine * b;
        p = sine * turned;
        diagonal[i + 1] = g + p;
        g = cosine * turned - b;
        rotations.push(Rotation { row: i, cosine, sine });
    }
    diagonal[first] -= p;
    beside[first] = g;
    beside[last] = 0.0;
}

fn rotate(strip: &mut [f64], rows: usize, rotations: &[Rotation]) {
    let width = strip.len() / rows;
    for Rotation { row, cosine, sine } in rotations {
        let (upper, lower) = strip[row * width..(row + 2) * width].split_at_mut(width);
        for (x, y) in upper.iter_mut().zip(lower) {
            (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::{RngKey, stream_id};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// `A v = λ v` for orthonormal vectors; with few different values, so that eigenvalues coincide and blocks
        /// fall apart.
        #[test]
        fn vectors_are_orthonormal_and_only_scaled(n in 0usize..150, levels in 1u32..6, seed: u64) {
            let mut rng = RngKey::new(seed, stream_id("symmetric")).rng();
            let drawn: Vec<f64> =
                (0..n * n).map(|_| f64::from((rng.uniform(0.0, 1.0) * levels as f32) as u32)).collect();
            let row = |i: usize| (0..n).map(|j| drawn[i.max(j) * n + i.min(j)]).collect();
            let a: Vec<Vec<f64>> = (0..n).map(row).collect();
            let (values, vectors) = eigen(a.clone());
            let scale = 1e-12 * (1.0 + (n as f64) * f64::from(levels));
            for (i, (value, vector)) in values.iter().zip(&vectors).enumerate() {
                for (row, x) in a.iter().zip(vector) {
                    prop_assert!((dot(row, vector) - value * x).abs() <= scale);
                }
                for (j, other) in vectors.iter().enumerate() {
                    let expected = f64::from(u8::from(i == j));
                    prop_assert!((dot(vector, other) - expected).abs() <= 1e-12 * (1.0 + n as f64));
                }
            }
            prop_assert_eq!((values.len(), vectors.len()), (n, n));
        }
    }
}
