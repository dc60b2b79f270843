//! Matrix products on plain slices: by the `gemm` crate (`blocked`), and by kernels of their own for small ones and for
//! processors with AMX.

pub(super) mod blocked;
#[cfg(target_arch = "x86_64")]
mod small;
#[cfg(target_arch = "x86_64")]
mod split;
#[cfg(target_arch = "x86_64")]
mod tiled;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod windows;

use candle_core::DType;

use super::clip::{Clip, clip};
use super::cpu::{acc_bytes, for_rows};
#[cfg(target_arch = "x86_64")]
use super::dispatch::{Dispatch, dispatch};
use super::windows::Geometry;
use super::{Elem, Real};
use crate::vectorised;

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

/// What follows the sums of a product: `clip(sum + bias) + onto`.
#[derive(Clone, Copy)]
pub struct Then<'a, R> {
    /// A value for each column.
    pub bias: Option<&'a [R]>,
    pub clip: Clip,
    /// Laid out as the result.
    pub onto: Option<&'a [R]>,
}

impl<T: Elem> Then<'_, T> {
    pub const NOTHING: Self = Self { bias: None, clip: Clip::Nothing, onto: None };

    /// Finishes whole rows of `n` sums, of which the first is number `first`.
    fn finish(&self, rows: &mut [T], first: usize, n: usize) {
        let bounds = self.clip.bounds();
        vectorised!(T, || {
            for (i, row) in rows.chunks_exact_mut(n).enumerate() {
                match self.bias {
                    Some(bias) => row
                        .iter_mut()
                        .zip(bias)
                        .for_each(|(v, b)| *v = T::down(clip(v.up() + b.up(), bounds))),
                    None => row.iter_mut().for_each(|v| *v = T::down(clip(v.up(), bounds))),
                }
                if let Some(onto) = self.onto {
                    let onto = &onto[(first + i) * n..][..n];
                    row.iter_mut().zip(onto).for_each(|(v, o)| *v = T::down(v.up() + o.up()));
                }
            }
        });
    }
}

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
    then: Option<Then<T::Acc>>,
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
    // SAFETY: the three asserts above and those of `Mat` keep every access inside its slice.
    unsafe { T::Acc::multiply_blocked(out, stride, a, b, add, by) };
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
    then: Option<Then<f32>>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() >= Dispatch::Avx512 {
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

/// The convolution `g` of `pictures`, and what comes `then`.
#[derive(Clone, Copy)]
pub struct Convolution<'a, T> {
    pub g: &'a Geometry,
    pub pictures: &'a [T],
    pub weight: &'a [T],
    /// It is the gradient of the input of a convolution with this weight.
    pub back: bool,
    pub then: Then<'a, T>,
}

/// Makes a convolution where there is a faster way than block by block of its windows; says whether it did.
pub fn convolve<T: Elem>(out: &mut [T], of: Convolution<T>) -> bool {
    let Some(out) = T::as_acc_mut(out) else { return false };
    let Convolution { g, back, then, .. } = of;
    let (bias, onto) = (then.bias.map(T::widened), then.onto.map(T::widened));
    let then = Then { bias: bias.as_deref(), clip: then.clip, onto: onto.as_deref() };
    let (pictures, weight) = (T::widened(of.pictures), T::widened(of.weight));
    assert_eq!(weight.len(), g.outputs * g.window(), "the weight of a convolution");
    assert_eq!(
        out.len() * g.height * g.width * g.inputs,
        pictures.len() * g.pixels() * g.outputs,
        "the pictures of a convolution and what is made of them"
    );
    T::Acc::convolve_faster(out, Convolution { g, pictures: &pictures, weight: &weight, back, then })
}

/// Bytes that [`convolve`] packs operands into, where it does it.
pub fn convolving(dtype: DType, g: &Geometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dtype == DType::F32 && tiled::convolves(g, batch) {
        return Some(tiled::convolving(g, batch) as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Adds the gradient of a convolution's weight by the thread that asks, where there is a faster way than block by block of
/// its windows; says whether it did. `d` is the gradient of the output.
pub fn weigh<T: Elem>(into: &mut [T::Acc], g: &Geometry, pictures: &[T], d: &[T]) -> bool {
    assert_eq!(into.len(), g.outputs * g.window(), "the gradient of a convolution's weight");
    assert_eq!(
        d.len() * g.height * g.width * g.inputs,
        pictures.len() * g.pixels() * g.outputs,
        "the pictures of a convolution and what was made of them"
    );
    // Not where copies of a wider type would have to be made.
    T::as_acc_mut(&mut []).is_some() && T::Acc::weigh_faster(into, g, &T::widened(pictures), &T::widened(d))
}

/// Bytes that [`weigh`] packs operands into, where it does it.
pub fn weighing(dtype: DType, g: &Geometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dtype == DType::F32 && tiled::weighs(g, batch) {
        return Some(tiled::weighing(g, batch) as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// [`weigh`] in f32.
pub(super) fn weigh_faster(into: &mut [f32], g: &Geometry, pictures: &[f32], d: &[f32]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let batch = pictures.len() / (g.height * g.width * g.inputs);
        if tiled::weighs(g, batch) {
            // SAFETY: AVX-512 and the unit were found, and `weigh` has checked every size.
            unsafe { tiled::weigh(into, g, pictures, d) };
            return true;
        }
    }
    let _ = (into, g, pictures, d);
    false
}

/// [`convolve`] in f32.
pub(super) fn convolve_faster(out: &mut [f32], of: Convolution<f32>) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let batch = of.pictures.len() / (of.g.height * of.g.width * of.g.inputs);
        if tiled::convolves(of.g, batch) {
            // SAFETY: AVX-512 and the unit were found, and `convolve` has checked every size.
            unsafe { tiled::convolve(out, of) };
            return true;
        }
    }
    let _ = (out, of);
    false
}

/// Bytes that [`multiply`] packs operands into while it makes an (m, n) matrix over `k`; `turned` where `a` is a
/// transpose. What each thread keeps for good is not in it: `memory::estimate::PACKING`.
pub fn packing(dtype: DType, (m, k, n): (usize, usize, usize), turned: bool, by: By) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if by == By::All && acc_bytes(dtype) == 4 && tiled::takes((m, k, n)) {
        return tiled::packing((m, k, n), turned) as u64;
    }
    let _ = by;
    // As `gemm` 0.19 decides it, with the tile heights of AVX2 and AVX-512: it makes the transposed product, packs
    // slices of at most so many of the inner sums, `a` where its rows are long strides and `b` where it is narrow.
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

/// As [`multiply_rounded`] by all threads, and what comes `then`: where the product allows it as the sums are made,
/// while they are near.
pub fn multiply_then<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, then: Then<T>) {
    let n = b.cols;
    let done = match T::as_acc_mut(out) {
        Some(out) => {
            let (bias, onto) = (then.bias.map(T::widened), then.onto.map(T::widened));
            let then = Then { bias: bias.as_deref(), clip: then.clip, onto: onto.as_deref() };
            product::<T>(out, n, a, b, false, By::All, Some(then))
        }
        None => {
            multiply_rounded(out, a, b, By::All);
            false
        }
    };
    if !done {
        for_rows(out, n, |first, rows| then.finish(rows, first, n));
    }
}
