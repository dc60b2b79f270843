//! `out = a b` for a few rows of `a`, as when a model generates one token at a time. Every weight is read once and used
//! once, so memory bandwidth decides: the kernel reads `b` as it is stored, in its own type and order, and neither packs
//! nor converts it. A GEMM would do both, at several times the traffic.
//!
//! Each output is summed in an order that depends on the sizes alone. How outputs are divided among threads changes
//! nothing.

use std::cell::Cell;

use super::{CpuEpilogue, MatView};
use crate::kernels::clamp::clamp;
use crate::kernels::cpu::{DisjointSliceMut, acc_bytes, parallel_for, threads, uninit};
use crate::kernels::dispatch::{Dispatch, dispatch};
use crate::kernels::lanes::LANES;
use crate::kernels::{Elem, Real};
use crate::vectorised;

/// Most rows of `a`. Beyond it, the arithmetic of one pass over the weights takes longer than reading them.
const MAX_ROWS: usize = 8;
/// The same where registers hold the sums of a single row.
const MAX_ROWS_ALONE: usize = 4;
/// Rows of `a` that share each weight once it is read and converted: as many as AVX-512 has registers for their sums.
const ROWS: usize = 4;

/// Whether rows are multiplied [`ROWS`] at a time. It changes no result.
fn shares_weights() -> bool {
    dispatch() >= Dispatch::Avx512
}

fn max_rows() -> usize {
    if shares_weights() { MAX_ROWS } else { MAX_ROWS_ALONE }
}

/// Weights below which one thread is faster than handing out work.
const SERIAL_WEIGHTS: usize = 1 << 15;
/// Weights per task at least, where the columns of `b` are contiguous.
const TASK_WEIGHTS: usize = 1 << 14;
/// Columns of a task at most, where the rows of `b` are contiguous. Their sums stay in the L1 cache; the longer the part
/// of a row that is read, the better the hardware prefetches it.
const COLUMNS: usize = 1024;
/// Rows of the transposed `b` that are summed at once, so that additions do not wait for one another.
const DOTS: usize = 4;
/// Rows of `b` that are added at once, so that sums are loaded and stored a quarter as often.
const UNROLL: usize = 4;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread multiplies a few rows with this kernel. Training does without it: it sums in another order
/// than a GEMM, and a micro-batch of four samples should round like one of forty.
pub struct GemvScope {
    outer: bool,
}

impl GemvScope {
    pub fn enter() -> Self {
        Self { outer: ENABLED.replace(true) }
    }
}

impl Drop for GemvScope {
    fn drop(&mut self) {
        ENABLED.set(self.outer);
    }
}

/// Whether this kernel takes a product of these operands; `transposed_a` as in [`super::gemm_workspace`].
pub(super) fn supports_sizes(m: usize, transposed_a: bool) -> bool {
    ENABLED.get() && m <= max_rows() && !transposed_a
}

pub(super) fn supports<T>(a: &MatView<T>, b: &MatView<T>) -> bool {
    // The transpose of one column has contiguous rows too, but is planned as a transpose.
    let transposed_a = a.col_stride != 1 || a.row_stride < a.cols;
    supports_sizes(a.rows, transposed_a) && a.cols > 0 && (b.row_stride == 1 || b.col_stride == 1)
}

/// Bytes of the rows of `a` in the accumulator type.
pub(super) fn workspace(dtype: candle_core::DType, m: usize, k: usize) -> u64 {
    (m * k * acc_bytes(dtype)) as u64
}

/// `out = a b`, or `out += a b` with `accumulate`, then `epilogue`; `out` is row-major with row stride `stride`. The
/// sums are rounded once. The caller has checked the sizes.
pub(super) fn gemv<T: Elem, O: Elem<Acc = T::Acc>>(
    out: &mut [O],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    epilogue: CpuEpilogue<O>,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let mut x = uninit::<T::Acc>(m * k);
    for (i, x) in x.chunks_exact_mut(k).enumerate() {
        let row = &a.data[i * a.row_stride..][..k];
        vectorised!(T, || x.iter_mut().zip(row).for_each(|(x, v)| *x = v.to_acc()));
    }
    let sink = Sink { out: DisjointSliceMut::new(out), stride, n, accumulate, epilogue };
    // A matrix of one row or column may be either; with one column the transpose is contiguous.
    let transposed = b.row_stride == 1 && (b.col_stride != 1 || n == 1);
    let columns = match transposed {
        // A few tasks per thread, so that one that is late holds up little.
        true => n.div_ceil(4 * threads()).max(TASK_WEIGHTS / k).next_multiple_of(DOTS).max(DOTS),
        // As many tasks for each thread, all of the same size.
        false => {
            let tasks = threads() * n.div_ceil(threads() * COLUMNS);
            n.div_ceil(tasks).next_multiple_of(LANES).min(COLUMNS)
        }
    };
    let task = |index: usize| {
        let first = index * columns;
        let width = columns.min(n - first);
        match transposed {
            true => dots(&x, k, &b, first, width, &sink),
            false => sums(&x, k, &b, first, width, &sink),
        }
    };
    let tasks = n.div_ceil(columns);
    match k * n <= SERIAL_WEIGHTS {
        true => (0..tasks).for_each(task),
        false => parallel_for(tasks, &task),
    }
}

/// Where results go.
struct Sink<'a, O> {
    out: DisjointSliceMut<O>,
    stride: usize,
    /// Columns of the result.
    n: usize,
    accumulate: bool,
    epilogue: CpuEpilogue<'a, O>,
}

impl<O: Elem> Sink<'_, O> {
    /// Stores sums of row `i` from column `first` on. Only the task that owns these columns may call this.
    #[inline(always)]
    fn store(&self, i: usize, first: usize, sums: &[O::Acc]) {
        // SAFETY: tasks own disjoint columns.
        let out = unsafe { self.out.range_mut(i * self.stride + first, sums.len()) };
        if self.accumulate {
            out.iter_mut().zip(sums).for_each(|(o, s)| *o = O::from_acc(o.to_acc() + *s));
            return;
        }
        let bounds = self.epilogue.clamp.bounds();
        for (j, (o, sum)) in out.iter_mut().zip(sums).enumerate() {
            let bias = self.epilogue.bias.map_or(O::Acc::ZERO, |bias| bias[first + j].to_acc());
            let residual =
                self.epilogue.residual.map_or(O::Acc::ZERO, |all| all[i * self.n + first + j].to_acc());
            *o = O::from_acc(clamp(*sum + bias, bounds) + residual);
        }
    }
}

/// Columns of `b` that are contiguous: each output is a dot product.
fn dots<T: Elem, O: Elem<Acc = T::Acc>>(
    x: &[T::Acc],
    k: usize,
    b: &MatView<T>,
    first: usize,
    width: usize,
    sink: &Sink<O>,
) {
    let column = |j: usize| &b.data[j * b.col_stride..][..k];
    let shares = shares_weights();
    vectorised!(T, || {
        for j in (first..first + width).step_by(DOTS) {
            let count = DOTS.min(first + width - j);
            // The last columns are repeated where fewer are left.
            let columns: [&[T]; DOTS] = std::array::from_fn(|d| column(j + d.min(count - 1)));
            let mut i = 0;
            while shares && (i + ROWS) * k <= x.len() {
                let rows: [&[T::Acc]; ROWS] = std::array::from_fn(|r| &x[(i + r) * k..][..k]);
                for (r, sums) in dot_products(columns, rows).iter().enumerate() {
                    sink.store(i + r, j, &sums[..count]);
                }
                i += ROWS;
            }
            for (r, x) in x[i * k..].chunks_exact(k).enumerate() {
                let [sums] = dot_products(columns, [x]);
                sink.store(i + r, j, &sums[..count]);
            }
        }
    })
}

/// The dot products of `x` with each of the rows.
#[inline(always)]
pub(in crate::kernels) fn dot_rows<T: Elem, const N: usize>(rows: [&[T]; N], x: &[T::Acc]) -> [T::Acc; N] {
    let [sums] = dot_products(rows, [x]);
    sums
}

/// The dot products of each `x` with each of the rows. The order of a sum does not depend on how many there are.
#[inline(always)]
fn dot_products<T: Elem, const N: usize, const R: usize>(
    rows: [&[T]; N],
    x: [&[T::Acc]; R],
) -> [[T::Acc; N]; R] {
    let mut lanes = [[[T::Acc::ZERO; LANES]; N]; R];
    let k = x[0].len();
    let (rows, x) = (rows.map(|row| &row[..k]), x.map(|x| &x[..k]));
    for at in (0..k - k % LANES).step_by(LANES) {
        let weights =
            rows.map(|row| -> [T::Acc; LANES] { std::array::from_fn(|lane| row[at + lane].to_acc()) });
        for (x, lanes) in x.iter().zip(&mut lanes) {
            let x = &x[at..][..LANES];
            for (weights, lanes) in weights.iter().zip(lanes) {
                for (lane, sum) in lanes.iter_mut().enumerate() {
                    *sum += weights[lane] * x[lane];
                }
            }
        }
    }
    let done = k - k % LANES;
    for (x, lanes) in x.iter().zip(&mut lanes) {
        for (row, lanes) in rows.iter().zip(lanes) {
            for ((value, x), sum) in row[done..].iter().zip(&x[done..]).zip(lanes.iter_mut()) {
                *sum += value.to_acc() * *x;
            }
        }
    }
    lanes.map(|lanes| lanes.map(sum_of_lanes))
}

#[inline(always)]
fn sum_of_lanes<R: Real>(mut lanes: [R; LANES]) -> R {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Rows of `b` that are contiguous: the outputs are a sum of its rows, weighted by `x`.
fn sums<T: Elem, O: Elem<Acc = T::Acc>>(
    x: &[T::Acc],
    k: usize,
    b: &MatView<T>,
    first: usize,
    width: usize,
    sink: &Sink<O>,
) {
    let row = |p: usize| &b.data[p * b.row_stride + first..][..width];
    let shares = shares_weights();
    vectorised!(T, || {
        let mut sums = [[T::Acc::ZERO; COLUMNS]; MAX_ROWS];
        let m = x.len() / k;
        for p in (0..k).step_by(UNROLL) {
            let count = UNROLL.min(k - p);
            if count == UNROLL {
                let rows: [&[T]; UNROLL] = std::array::from_fn(|u| row(p + u));
                let of_row = |i: usize| -> [T::Acc; UNROLL] { std::array::from_fn(|u| x[i * k + p + u]) };
                let shared = if shares { m - m % ROWS } else { 0 };
                let (blocks, _) = sums[..shared].as_chunks_mut::<ROWS>();
                for (block, sums) in blocks.iter_mut().enumerate() {
                    let weights: [_; ROWS] = std::array::from_fn(|r| of_row(block * ROWS + r));
                    add_weighted_to_rows(sums, width, rows, weights);
                }
                for (i, sums) in sums.iter_mut().enumerate().take(m).skip(shared) {
                    add_weighted(&mut sums[..width], rows, of_row(i));
                }
            } else {
                for p in p..k {
                    for (i, sums) in sums.iter_mut().enumerate().take(m) {
                        add_weighted(&mut sums[..width], [row(p)], [x[i * k + p]]);
                    }
                }
            }
        }
        sums.iter().enumerate().take(m).for_each(|(i, sums)| sink.store(i, first, &sums[..width]));
    })
}

/// `sums += weights[0] rows[0] + weights[1] rows[1] + ...`
#[inline(always)]
pub(in crate::kernels) fn add_weighted<T: Elem, const N: usize>(
    sums: &mut [T::Acc],
    rows: [&[T]; N],
    weights: [T::Acc; N],
) {
    let rows = rows.map(|row| &row[..sums.len()]);
    for (j, sum) in sums.iter_mut().enumerate() {
        for (row, weight) in rows.iter().zip(&weights) {
            *sum += row[j].to_acc() * *weight;
        }
    }
}

/// `sums[r] += weights[r][0] rows[0] + weights[r][1] rows[1] + ...` in the first `width` columns, for each `r`.
#[inline(always)]
fn add_weighted_to_rows<T: Elem, const N: usize, const R: usize>(
    sums: &mut [[T::Acc; COLUMNS]; R],
    width: usize,
    rows: [&[T]; N],
    weights: [[T::Acc; N]; R],
) {
    let width = width.min(COLUMNS);
    let rows = rows.map(|row| &row[..width]);
    for j in 0..width {
        let values = rows.map(|row| row[j].to_acc());
        for (sums, weights) in sums.iter_mut().zip(&weights) {
            for (value, weight) in values.iter().zip(weights) {
                sums[j] += *value * *weight;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::{RngKey, stream_id};
    use crate::kernels::clamp::ClampActivation;

    fn values<T: Elem>(n: usize, key: u64) -> Vec<T> {
        let key = RngKey::new(key, stream_id("gemv"));
        (0..n).map(|i| T::from_acc(T::Acc::of_f64(2.0 * key.f64(i as u64) - 1.0))).collect()
    }

    /// `a b` in f64 by candle, the reference; each value with the sum of the magnitudes of its terms.
    fn reference<T: Elem>(a: &MatView<T>, b: &MatView<T>) -> Vec<(f64, f64)> {
        let matrix = |v: &MatView<T>| {
            let at = |i: usize, j: usize| v.data[i * v.row_stride + j * v.col_stride].to_acc().as_f64();
            let all: Vec<f64> = (0..v.rows * v.cols).map(|x| at(x / v.cols, x % v.cols)).collect();
            candle_core::Tensor::from_vec(all, (v.rows, v.cols), &Device::Cpu).unwrap()
        };
        let (a, b) = (matrix(a), matrix(b));
        let product = |a: &candle_core::Tensor, b: &candle_core::Tensor| {
            a.matmul(b).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
        };
        product(&a, &b).into_iter().zip(product(&a.abs().unwrap(), &b.abs().unwrap())).collect()
    }

    /// Products of both layouts, with padding between the rows, accumulated and with an epilogue.
    fn check<T: Elem>(m: usize, k: usize, n: usize, gap: usize, unit: f64) {
        let a = values::<T>(m * (k + gap), 1);
        let a = MatView::strided(&a, m, k, k + gap);
        for transposed in [false, true] {
            let b = values::<T>(n * k, 2);
            let b = if transposed { MatView::new(&b, n, k).t() } else { MatView::new(&b, k, n) };
            let _scope = GemvScope::enter();
            assert!(supports(&a, &b));
            let expected = reference(&a, &b);
            let within = |got: T, want: f64, (sum, magnitude): (f64, f64)| {
                let error = (got.to_acc().as_f64() - want).abs();
                let bound = unit * (want.abs() + 1.0) + 1e-6 * (magnitude + sum.abs() + 1.0);
                assert!(error <= bound, "({m}, {k}, {n}), transposed {transposed}: {error} above {bound}");
            };
            let mut out = vec![T::from_acc(T::Acc::of_f64(f64::NAN)); m * n];
            gemv(&mut out, n, a, b, false, CpuEpilogue::NONE);
            out.iter().zip(&expected).for_each(|(o, e)| within(*o, e.0, *e));
            let start = values::<T>(m * (n + gap), 3);
            let mut out = start.clone();
            gemv(&mut out, n + gap, a, b, true, CpuEpilogue::NONE);
            for (i, e) in expected.iter().enumerate() {
                let at = i / n * (n + gap) + i % n;
                within(out[at], e.0 + start[at].to_acc().as_f64(), *e);
            }
            for at in (0..m * (n + gap)).filter(|at| at % (n + gap) >= n) {
                assert_eq!(out[at].to_acc().as_f64(), start[at].to_acc().as_f64(), "between the rows");
            }
            let (bias, residual) = (values::<T>(n, 4), values::<T>(m * n, 5));
            let epilogue =
                CpuEpilogue { bias: Some(&bias), clamp: ClampActivation::Relu, residual: Some(&residual) };
            let mut out = vec![T::default(); m * n];
            gemv(&mut out, n, a, b, false, epilogue);
            for (i, (o, e)) in out.iter().zip(&expected).enumerate() {
                let want = (e.0 + bias[i % n].to_acc().as_f64()).max(0.0) + residual[i].to_acc().as_f64();
                within(*o, want, *e);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn products_are_those_of_candle(m in 1usize..=max_rows(), k in 1usize..300, n in 1usize..300, gap in 0usize..3) {
            check::<f32>(m, k, n, gap, 1e-6);
            check::<f64>(m, k, n, gap, 1e-12);
            check::<bf16>(m, k, n, gap, 4e-3);
            check::<f16>(m, k, n, gap, 5e-4);
        }
    }

    #[test]
    fn large_products_use_all_threads() {
        check::<f32>(1, 700, 900, 0, 1e-6);
        check::<bf16>(3, 513, 1025, 1, 4e-3);
    }
}
