//! `out = a b` for a few rows of `a`, as when a model generates one token at a time. Every weight is read once and used
//! once, so memory bandwidth decides: the kernel reads `b` as it is stored, in its own type and order, and neither
//! packs nor converts it. A GEMM would do both, at several times the traffic.
//!
//! Each output is summed in an order that depends on the sizes alone. How outputs are divided among threads changes
//! nothing.

use std::cell::Cell;

use super::{CpuEpilogue, MatView, Transposed};
use crate::kernels::clamp::clamp;
use crate::kernels::cpu::{DisjointSliceMut, acc_bytes, parallel_for, threads, uninit};
use crate::kernels::lanes::LANES;
use crate::kernels::{Elem, Real};
use crate::vectorised;

/// Most rows of `a`. Beyond it, the arithmetic of one pass over the weights takes longer than reading them.
pub(super) const MAX_ROWS: usize = 4;

/// Weights below which one thread is faster than handing out work.
const SERIAL_WEIGHTS: usize = 1 << 15;
/// Weights per task at least, where the columns of `b` are contiguous.
const TASK_WEIGHTS: usize = 1 << 14;
/// Columns of a task at most, where the rows of `b` are contiguous. Their sums stay in the L1 cache; the longer the
/// part of a row that is read, the better the hardware prefetches it.
const COLUMNS: usize = 1024;
/// Rows of the transposed `b` that are summed at once, so that additions do not wait for one another.
const DOTS: usize = 4;
/// Rows of `b` that are added at once, so that sums are loaded and stored a quarter as often.
const UNROLL: usize = 4;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread multiplies a few rows with this kernel. Training does without it: it sums in another
/// order than a GEMM, and a micro-batch of four samples should round like one of forty.
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

/// Whether this kernel takes a product of these operands; `transposed` as in [`super::gemm_workspace`].
pub(super) fn supports_sizes(m: usize, transposed: Transposed) -> bool {
    ENABLED.get() && m <= MAX_ROWS && !transposed.a
}

pub(super) fn supports<T>(a: &MatView<T>, b: &MatView<T>) -> bool {
    // The transpose of one column has contiguous rows too, but is planned as a transpose.
    let transposed = Transposed { a: a.col_stride != 1 || a.row_stride < a.cols, b: b.col_stride != 1 };
    supports_sizes(a.rows, transposed) && a.cols > 0 && (b.row_stride == 1 || b.col_stride == 1)
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
    let sink = GemvOutput { out: DisjointSliceMut::new(out), stride, n, accumulate, epilogue };
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
struct GemvOutput<'a, O> {
    out: DisjointSliceMut<'a, O>,
    stride: usize,
    /// Columns of the result.
    n: usize,
    accumulate: bool,
    epilogue: CpuEpilogue<'a, O>,
}

impl<O: Elem> GemvOutput<'_, O> {
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
    sink: &GemvOutput<O>,
) {
    let column = |j: usize| &b.data[j * b.col_stride..][..k];
    vectorised!(T, || {
        for j in (first..first + width).step_by(DOTS) {
            let count = DOTS.min(first + width - j);
            // The last columns are repeated where fewer are left.
            let columns: [&[T]; DOTS] = std::array::from_fn(|d| column(j + d.min(count - 1)));
            for (i, x) in x.chunks_exact(k).enumerate() {
                sink.store(i, j, &dot_rows(columns, x)[..count]);
            }
        }
    })
}

/// The dot products of `x` with each of the rows.
#[inline(always)]
pub(in crate::kernels) fn dot_rows<T: Elem, const N: usize>(rows: [&[T]; N], x: &[T::Acc]) -> [T::Acc; N] {
    let mut lanes = [[T::Acc::ZERO; LANES]; N];
    let rows = rows.map(|row| &row[..x.len()]);
    let (chunks, rest) = x.as_chunks::<LANES>();
    for (i, x) in chunks.iter().enumerate() {
        for (row, lanes) in rows.iter().zip(&mut lanes) {
            let row = &row[i * LANES..][..LANES];
            for (lane, sum) in lanes.iter_mut().enumerate() {
                *sum += row[lane].to_acc() * x[lane];
            }
        }
    }
    let done = x.len() - rest.len();
    for (row, lanes) in rows.iter().zip(&mut lanes) {
        for ((value, x), sum) in row[done..].iter().zip(rest).zip(lanes.iter_mut()) {
            *sum += value.to_acc() * *x;
        }
    }
    lanes.map(|mut lanes| {
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    })
}

/// Rows of `b` that are contiguous: the outputs are a sum of its rows, weighted by `x`.
fn sums<T: Elem, O: Elem<Acc = T::Acc>>(
    x: &[T::Acc],
    k: usize,
    b: &MatView<T>,
    first: usize,
    width: usize,
    sink: &GemvOutput<O>,
) {
    let row = |p: usize| &b.data[p * b.row_stride + first..][..width];
    vectorised!(T, || {
        let mut sums = [[T::Acc::ZERO; COLUMNS]; MAX_ROWS];
        let m = x.len() / k;
        for p in (0..k).step_by(UNROLL) {
            let count = UNROLL.min(k - p);
            if count == UNROLL {
                let rows: [&[T]; UNROLL] = std::array::from_fn(|u| row(p + u));
                for (i, sums) in sums.iter_mut().enumerate().take(m) {
                    let weights: [T::Acc; UNROLL] = std::array::from_fn(|u| x[i * k + p + u]);
                    add_weighted(&mut sums[..width], rows, weights);
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
        fn products_are_those_of_candle(m in 1usize..=MAX_ROWS, k in 1usize..300, n in 1usize..300, gap in 0usize..3) {
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
