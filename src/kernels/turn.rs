//! Rows and columns of a matrix a sample change places.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::{Elem, cpu, reference};
use crate::with_elem;

/// Rows and columns of the squares that are turned at once, so that both sides stay in the cache.
const SQUARE: usize = 16;

/// (batch, rows, cols) to (batch, cols, rows).
pub fn forward(x: &Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    let batch = x.elem_count() / (rows * cols).max(1);
    #[cfg(feature = "cuda")]
    if let Some(device) = super::cuda::of(x) {
        return card::forward(device, x, (batch, rows, cols));
    }
    if !reference::has_body(x) {
        return x.reshape((batch, rows, cols))?.transpose(1, 2)?.contiguous();
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let mut y = cpu::fresh::<T>(values.len());
        y.par_chunks_mut(rows * cols).zip(values.par_chunks(rows * cols)).for_each(|(y, x)| turn(x, y, rows, cols, 0));
        cpu::tensor(y, (batch, cols, rows))
    })
}

/// A (rows, cols) matrix as (cols, rows), by all threads.
pub fn matrix<T: Elem>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    let mut y = cpu::fresh::<T>(x.len());
    let strip = SQUARE * rows.max(1);
    y.par_chunks_mut(strip).enumerate().for_each(|(i, y)| turn(x, y, rows, cols, i * SQUARE));
    y
}

/// The columns of `x` from `from` on, as many as `y` has rows, as rows of `y`.
fn turn<T: Elem>(x: &[T], y: &mut [T], rows: usize, cols: usize, from: usize) {
    for first in (0..rows).step_by(SQUARE) {
        for (square, lines) in y.chunks_mut(SQUARE * rows).enumerate() {
            for (line, to) in lines.chunks_exact_mut(rows).enumerate() {
                let col = from + square * SQUARE + line;
                for row in first..(first + SQUARE).min(rows) {
                    to[row] = x[row * cols + col];
                }
            }
        }
    }
}
