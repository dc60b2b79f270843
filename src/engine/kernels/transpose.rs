//! Transposes one matrix per sample.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::{Elem, cpu, reference};
use crate::with_elem;

/// Side of the square tiles, small enough that source and destination stay in cache.
const TILE: usize = 16;

/// (batch, rows, cols) to (batch, cols, rows).
pub fn forward(x: &Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    let batch = x.elem_count() / (rows * cols).max(1);
    on_cuda!(x, |device| gpu::forward(device, x, (batch, rows, cols)));
    if !reference::has_cpu_kernel(x) {
        return x.reshape((batch, rows, cols))?.transpose(1, 2)?.contiguous();
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let mut y = cpu::uninit::<T>(values.len());
        let matrix = (rows * cols).max(1);
        cpu::parallel_for_chunks(&mut y, matrix, |i, y| {
            transpose_columns(&values[i * matrix..][..matrix], y, rows, cols, 0)
        });
        cpu::tensor(y, (batch, cols, rows))
    })
}

/// Transposes a (rows, cols) matrix on all threads.
pub fn matrix<T: Elem>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    let mut y = cpu::uninit::<T>(x.len());
    let strip = TILE * rows.max(1);
    cpu::parallel_for_chunks(&mut y, strip, |i, y| transpose_columns(x, y, rows, cols, i * TILE));
    y
}

/// Writes the columns of `x` from `from` on, as many as `y` has rows, to the rows of `y`.
fn transpose_columns<T: Elem>(x: &[T], y: &mut [T], rows: usize, cols: usize, from: usize) {
    for first in (0..rows).step_by(TILE) {
        for (tile, lines) in y.chunks_mut(TILE * rows).enumerate() {
            for (line, to) in lines.chunks_exact_mut(rows).enumerate() {
                let col = from + tile * TILE + line;
                for row in first..(first + TILE).min(rows) {
                    to[row] = x[row * cols + col];
                }
            }
        }
    }
}
