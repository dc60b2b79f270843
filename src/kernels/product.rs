//! Matrix products on plain slices: the one place that calls `gemm`, and ways of their own for small ones and for
//! machines with a matrix unit.

#[cfg(target_arch = "x86_64")]
mod small;
#[cfg(target_arch = "x86_64")]
mod split;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use candle_core::DType;
use gemm::Parallelism;
use rayon::prelude::*;

use super::cpu::{Blocks, acc_bytes, rows_per_chunk};
#[cfg(target_arch = "x86_64")]
use super::elem::{Vectors, vectors};
use super::{Elem, Real};

/// A matrix over a slice: element (i, j) is at `i * row + j * col`.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row: usize,
    col: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A row-major (rows, cols) matrix.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows begin `row` values apart.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row: usize) -> Self {
        assert!(
            rows == 0 || cols == 0 || data.len() >= (rows - 1) * row + cols,
            "a matrix outside its slice"
        );
        // What follows the matrix is not its own: a narrow type is widened as far as the slice goes.
        let len = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row + cols };
        Self { data: &data[..len], rows, cols, row, col: 1 }
    }

    /// The same places of other values.
    fn of<U>(self, data: &[U]) -> Mat<'_, U> {
        Mat { data, rows: self.rows, cols: self.cols, row: self.row, col: self.col }
    }

    /// The transpose: the same values, read the other way.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row: self.col, col: self.row, ..self }
    }
}

/// Who does the work: the whole machine, or the thread that asks (inside a parallel loop).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    All,
    Me,
}

/// Rows of some columns of a result, which their holder alone may write.
pub struct Piece<'a, R> {
    all: &'a Blocks<R>,
    stride: usize,
    rows: Range<usize>,
    /// The columns of the result that these are.
    pub columns: Range<usize>,
}

impl<'a, R> Piece<'a, R> {
    /// Each row with its number.
    pub fn rows(&self) -> impl Iterator<Item = (usize, &'a mut [R])> {
        let (all, stride, columns) = (self.all, self.stride, self.columns.clone());
        self.rows.clone().map(move |row| {
            // SAFETY: a piece is given to one thread, and no place is in two of them.
            (row, unsafe { all.get(row * stride + columns.start, columns.len()) })
        })
    }
}

/// What is done with each piece of a result once its sums are whole.
pub(super) type Then<'a, R> = Option<&'a (dyn Fn(Piece<R>) + Sync)>;

/// `out = a b`, or `out += a b` with `add`; `out` is row-major with rows `stride` apart.
pub fn multiply<T: Elem>(out: &mut [T::Acc], stride: usize, a: Mat<T>, b: Mat<T>, add: bool, by: By) {
    product::<T>(out, stride, a, b, add, by, None);
}

/// As [`multiply`]; says whether `then` was done too.
fn product<T: Elem>(
    out: &mut [T::Acc],
    stride: usize,
    a: Mat<T>,
    b: Mat<T>,
    add: bool,
    by: By,
    then: Then<T::Acc>,
) -> bool {
    let (a_data, b_data) = (T::widened(a.data), T::widened(b.data));
    let (a, b) = (a.of(&a_data), b.of(&b_data));
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner sizes of a product");
    if m == 0 || n == 0 {
        return true;
    }
    assert!(out.len() >= (m - 1) * stride + n, "a product outside its slice");
    if T::Acc::multiply_faster(out, stride, a, b, add, by, then) {
        return true;
    }
    let parallelism = if by == By::All { Parallelism::Rayon(0) } else { Parallelism::None };
    // SAFETY: the three asserts above and those of `Mat` keep every access inside its slice.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride as isize,
            add,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            T::Acc::ONE,
            T::Acc::ONE,
            false,
            false,
            false,
            parallelism,
        )
    }
    then.is_none()
}

/// Makes a product, and what comes then, without `gemm`, where that is faster; says whether it did.
#[inline]
pub(super) fn faster(
    out: &mut [f32],
    stride: usize,
    a: Mat<f32>,
    b: Mat<f32>,
    add: bool,
    by: By,
    then: Then<f32>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if vectors() == Vectors::V4 {
        let sizes = (a.rows, a.cols, b.cols);
        // SAFETY: AVX-512 was found, the unit where it is used, and `multiply` has checked every size.
        match by {
            By::Me if then.is_none() && small::takes(sizes) => unsafe {
                small::multiply(out, stride, a, b, add)
            },
            By::All if tiled::takes(sizes) => unsafe { tiled::multiply(out, stride, a, b, add, then) },
            _ => return false,
        }
        return true;
    }
    let _ = (out, stride, a, b, add, by, then);
    false
}

/// Bytes that [`multiply`] packs operands into while it makes an (m, n) matrix over `k`; `turned` where `a` is a
/// transpose. What each thread keeps for good is not in it: `memory::estimate::PACKING`.
pub fn packing(dtype: DType, m: usize, k: usize, n: usize, turned: bool) -> u64 {
    // As `gemm` 0.19 decides it, with the tile heights of AVX2 and AVX-512: it makes the transposed product, packs
    // slices of at most so many of the inner sums, `a` where its rows are long strides and `b` where it is narrow.
    #[cfg(target_arch = "x86_64")]
    if acc_bytes(dtype) == 4 && vectors() == Vectors::V4 && tiled::takes((m, k, n)) {
        return tiled::packing(k, n) as u64;
    }
    const DEPTH: usize = 512;
    const LOW: usize = 24;
    const HIGH: usize = 48;
    let depth = k.div_ceil(k.div_ceil(DEPTH).max(1));
    let a = n > LOW * if turned { 2 } else { gemm::get_rhs_packing_threshold() };
    let b = n <= 16 * HIGH;
    let values = if a { m.next_multiple_of(8) } else { 0 } + if b { n.next_multiple_of(HIGH) } else { 0 };
    (acc_bytes(dtype) * depth * values) as u64
}

/// As [`multiply`], rounding the result to the stored type; `out` is a whole row-major (m, n) matrix.
pub fn multiply_rounded<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, by: By) {
    let n = b.cols;
    match T::as_acc_mut(out) {
        Some(out) => multiply(out, n, a, b, false, by),
        None => {
            let mut wide = vec![T::Acc::ZERO; a.rows * n];
            multiply(&mut wide, n, a, b, false, by);
            out.iter_mut().zip(wide).for_each(|(o, w)| *o = T::down(w));
        }
    }
}

/// What is done with the values of a product, of the stored type or of the one it is computed in.
pub trait Finish<T: Elem>: Sync {
    fn finish<R: Elem<Acc = T::Acc>>(&self, piece: Piece<R>);
}

/// As [`multiply_rounded`] by all threads, and then `finish` with every part of the result once: as it is made, while it
/// is still near, where the product allows it.
pub fn multiply_finished<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, finish: &impl Finish<T>) {
    let (m, n) = (a.rows, b.cols);
    let done = match T::as_acc_mut(out) {
        Some(out) => product::<T>(out, n, a, b, false, By::All, Some(&|piece| finish.finish(piece))),
        None => {
            multiply_rounded(out, a, b, By::All);
            false
        }
    };
    if !done {
        let (all, high) = (&Blocks::new(out), rows_per_chunk(n));
        (0..m.div_ceil(high)).into_par_iter().for_each(|i| {
            let rows = i * high..m.min((i + 1) * high);
            finish.finish(Piece { all, stride: n, rows, columns: 0..n });
        });
    }
}
