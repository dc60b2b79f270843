//! GEMMs of half types where no instruction multiplies them. Each tile of the result converts the values that it needs
//! to the accumulator type and multiplies those, in the cache of its thread. Converting whole operands first would move
//! them through memory twice more, and take twice the bytes that the type saves.
//!
//! The tiles depend on the sizes alone, and with them the order of every sum.

use candle_core::DType;

use super::sink::Sink;
use super::{CpuEpilogue, MatView, Threading};
use crate::kernels::Elem;
use crate::kernels::cpu::{acc_bytes, parallel_for, threads, uninit};
use crate::vectorised;

/// Rows and columns of a tile. A value is converted once for each tile that reads it.
const TILE: usize = 128;
/// Values of K converted at once.
const DEPTH: usize = 512;

/// Whether this kernel takes a product over `k`, where no kernel for the type itself does.
pub(super) fn supports(dtype: DType, k: usize) -> bool {
    k > 0 && dtype.size_in_bytes() < acc_bytes(dtype)
}

/// Bytes of the tiles in flight: one for each thread.
pub(super) fn workspace(dtype: DType, (m, k, n): (usize, usize, usize)) -> u64 {
    let tiles = m.div_ceil(TILE) * n.div_ceil(TILE);
    (threads().min(tiles) * tile_bytes(dtype, (m, k, n))) as u64
}

/// Bytes of the tiles of any number of products at once.
pub(super) fn workspace_bound(dtype: DType) -> u64 {
    (threads() * tile_bytes(dtype, (TILE, DEPTH, TILE))) as u64
}

fn tile_bytes(dtype: DType, (m, k, n): (usize, usize, usize)) -> usize {
    let (rows, depth, cols) = (TILE.min(m), DEPTH.min(k), TILE.min(n));
    (rows * depth + depth * cols + rows * cols) * acc_bytes(dtype)
}

/// `out = a b`, or `out += a b` with `accumulate`, then `epilogue`; `out` is row-major with row stride `stride`. The
/// sums are rounded once. The caller has checked the sizes; K is not 0.
pub(super) fn gemm<T: Elem, O: Elem<Acc = T::Acc>>(
    out: &mut [O],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    epilogue: CpuEpilogue<O>,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let sink = Sink::new(out, stride, n, accumulate, epilogue);
    let tiles_per_row = n.div_ceil(TILE);
    parallel_for(m.div_ceil(TILE) * tiles_per_row, &|index| {
        let (i, j) = (index / tiles_per_row * TILE, index % tiles_per_row * TILE);
        let (rows, cols) = (TILE.min(m - i), TILE.min(n - j));
        let mut sums = uninit::<T::Acc>(rows * cols);
        let mut converted = [rows, cols].map(|size| uninit::<T::Acc>(size * DEPTH.min(k)));
        let [a_values, b_values] = &mut converted;
        for p in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - p);
            let a = convert(a.block((i, rows), (p, depth)), a_values);
            let b = convert(b.block((p, depth), (j, cols)), b_values);
            super::gemm(&mut sums, cols, a, b, p > 0, Threading::Serial);
        }
        vectorised!(T, || {
            for (row, sums) in sums.chunks_exact(cols).enumerate() {
                sink.store(i + row, j, sums);
            }
        });
    });
}

/// The same matrix in the accumulator type, in the order in which it is stored.
fn convert<'a, T: Elem>(view: MatView<T>, to: &'a mut [T::Acc]) -> MatView<'a, T::Acc> {
    if view.col_stride != 1 && view.row_stride == 1 {
        return convert(view.t(), to).t();
    }
    let to = &mut to[..view.rows * view.cols];
    for (i, to) in to.chunks_exact_mut(view.cols).enumerate() {
        let from = &view.data[i * view.row_stride..];
        if view.col_stride == 1 {
            T::convert_to_acc(&from[..view.cols], to);
        } else {
            to.iter_mut().zip(from.iter().step_by(view.col_stride)).for_each(|(to, v)| *to = v.to_acc());
        }
    }
    MatView::new(to, view.rows, view.cols)
}
