//! Matrix products on plain slices: the one place that calls `gemm`.

use gemm::Parallelism;

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
        Self { data, rows, cols, row, col: 1 }
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

/// `out = a b`, or `out += a b` with `add`; `out` is row-major with rows `stride` apart.
pub fn multiply<T: Elem>(out: &mut [T::Acc], stride: usize, a: Mat<T>, b: Mat<T>, add: bool, by: By) {
    let (a_data, b_data) = (T::widened(a.data), T::widened(b.data));
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(out.len() >= (m - 1) * stride + n, "a product outside its slice");
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
            a_data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b_data.as_ptr(),
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
