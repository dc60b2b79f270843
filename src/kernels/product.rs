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
use super::cpu::{acc_bytes, for_rows, fresh};
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

/// The same slice, where both types are one.
pub(super) fn same<T: Elem, U: Elem>(values: &[T]) -> Option<&[U]> {
    // SAFETY: every type of number has a `DTYPE` of its own, so the two are one type.
    (T::DTYPE == U::DTYPE)
        .then(|| unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) })
}

/// As [`same`], to be written to.
pub(super) fn same_mut<T: Elem, U: Elem>(values: &mut [T]) -> Option<&mut [U]> {
    // SAFETY: as above.
    (T::DTYPE == U::DTYPE)
        .then(|| unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) })
}

impl<'a, T: Elem> Mat<'a, T> {
    fn same<U: Elem>(self) -> Option<Mat<'a, U>> {
        same::<T, U>(self.data).map(|data| self.of(data))
    }
}

impl<'a, T: Elem> Then<'a, T> {
    fn same<U: Elem>(self) -> Option<Then<'a, U>> {
        let (bias, onto) = (self.bias.map(same::<T, U>), self.onto.map(same::<T, U>));
        (T::DTYPE == U::DTYPE).then_some(Then { bias: bias.flatten(), clip: self.clip, onto: onto.flatten() })
    }
}

/// Runs `$body` with `$E` bound to the type of `$dtype`, if AMX multiplies it.
#[cfg(target_arch = "x86_64")]
macro_rules! with_split {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $E = f32;
                $body
            }
            DType::BF16 => {
                type $E = half::bf16;
                $body
            }
            DType::F16 => {
                type $E = half::f16;
                $body
            }
            _ => None,
        }
    };
}

/// Whether products of this type by all threads are made without copies of their operands in another type.
pub fn copies_nothing(dtype: DType) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        return true;
    }
    matches!(dtype, DType::F32 | DType::F64)
}

/// `out = a b`, or `out += a b` with `add`; `out` is row-major with rows `stride` apart.
pub fn multiply<T: Elem>(out: &mut [T::Acc], stride: usize, a: Mat<T>, b: Mat<T>, add: bool, by: By) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(out.len() >= (m - 1) * stride + n, "a product outside its slice");
    if by == By::All && tiled::<T, T::Acc>(out, stride, a, b, add, None) {
        return;
    }
    let (a_data, b_data) = (T::widened(a.data, by), T::widened(b.data, by));
    let (a, b) = (a.of(&a_data), b.of(&b_data));
    if small(out, stride, a, b, add, by) {
        return;
    }
    // SAFETY: the asserts above and those of `Mat` keep every access inside its slice.
    unsafe {
        if let (Some(out), Some(a), Some(b)) = (same_mut(out), a.same(), b.same()) {
            blocked::f32(out, stride, a, b, add, by)
        } else if let (Some(out), Some(a), Some(b)) = (same_mut(out), a.same(), b.same()) {
            blocked::f64(out, stride, a, b, add, by)
        }
    }
}

/// Makes a product by AMX, and what comes `then`, where that is faster; says whether it did. The caller has checked the
/// sizes, and adds to nothing that is narrow.
fn tiled<T: Elem, O: Elem>(
    out: &mut [O],
    stride: usize,
    a: Mat<T>,
    b: Mat<T>,
    add: bool,
    then: Option<Then<O>>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let sizes = (a.rows, a.cols, b.cols);
        let made = with_split!(T::DTYPE, E => match (a.same::<E>(), b.same::<E>()) {
            (Some(a), Some(b)) if tiled::takes::<E>(sizes) => {
                // SAFETY: the dispatch is AMX, and the caller has checked every size.
                unsafe {
                    if let Some(out) = same_mut::<O, E>(out) {
                        tiled::multiply(out, stride, a, b, add, then.and_then(Then::same::<E>))
                    } else if let Some(out) = same_mut::<O, f32>(out) {
                        tiled::multiply(out, stride, a, b, add, then.and_then(Then::same::<f32>))
                    }
                }
                Some(())
            }
            _ => None,
        });
        return made.is_some();
    }
    let _ = (out, stride, a, b, add, then);
    false
}

/// Whether f32 products of these sizes are made without packing: small ones by the thread that asks, and with AMX all that
/// its tiles do not take, so that `gemm` and what it keeps for each thread are not needed there at all.
fn is_small(sizes: (usize, usize, usize), by: By) -> bool {
    #[cfg(target_arch = "x86_64")]
    return match dispatch() {
        Dispatch::Amx => true,
        Dispatch::Avx512 => by == By::Me && small::takes(sizes),
        _ => false,
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (sizes, by);
        false
    }
}

/// Makes a product without packing where it [`is_small`]; says whether it did.
fn small<R: Real>(out: &mut [R], stride: usize, a: Mat<R>, b: Mat<R>, add: bool, by: By) -> bool {
    #[cfg(target_arch = "x86_64")]
    if is_small((a.rows, a.cols, b.cols), by)
        && let (Some(out), Some(a), Some(b)) = (same_mut(out), a.same(), b.same())
    {
        // SAFETY: the dispatch has AVX-512, and `multiply` has checked every size.
        unsafe {
            match by {
                By::Me => small::multiply(out, stride, a, b, add),
                By::All => small::spread(out, stride, a, b, add),
            }
        }
        return true;
    }
    let _ = (out, stride, a, b, add, by);
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

/// Makes a convolution by AMX, where that is faster than block by block of its windows; says whether it did.
pub fn convolve<T: Elem>(out: &mut [T], of: Convolution<T>) -> bool {
    let Convolution { g, pictures, weight, back, then } = of;
    assert_eq!(weight.len(), g.outputs * g.window(), "the weight of a convolution");
    assert_eq!(
        out.len() * g.height * g.width * g.inputs,
        pictures.len() * g.pixels() * g.outputs,
        "the pictures of a convolution and what is made of them"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = pictures.len() / (g.height * g.width * g.inputs);
        let made = with_split!(T::DTYPE, E => {
            match (same_mut::<T, E>(out), same::<T, E>(pictures), same(weight), then.same()) {
                (Some(out), Some(pictures), Some(weight), Some(then)) if tiled::convolves::<E>(g, batch) => {
                    // SAFETY: the dispatch is AMX, and every size was checked.
                    unsafe { tiled::convolve(out, Convolution { g, pictures, weight, back, then }) };
                    Some(())
                }
                _ => None,
            }
        });
        return made.is_some();
    }
    let _ = (back, then);
    false
}

/// Bytes that [`convolve`] takes for temporaries, where it does it.
pub fn convolving(dtype: DType, g: &Geometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_split!(dtype, E => tiled::convolves::<E>(g, batch).then(|| tiled::convolving::<E>(g, batch)));
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Adds the gradient of a convolution's weight by the thread that asks, by AMX where that is faster than block by block of
/// its windows; says whether it did. `d` is the gradient of the output.
pub fn weigh<T: Elem>(into: &mut [T::Acc], g: &Geometry, pictures: &[T], d: &[T]) -> bool {
    assert_eq!(into.len(), g.outputs * g.window(), "the gradient of a convolution's weight");
    assert_eq!(
        d.len() * g.height * g.width * g.inputs,
        pictures.len() * g.pixels() * g.outputs,
        "the pictures of a convolution and what was made of them"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = pictures.len() / (g.height * g.width * g.inputs);
        let made = with_split!(T::DTYPE, E => match (same_mut(into), same::<T, E>(pictures), same(d)) {
            (Some(into), Some(pictures), Some(d)) if tiled::weighs::<E>(g, batch) => {
                // SAFETY: the dispatch is AMX, and every size was checked.
                unsafe { tiled::weigh(into, g, pictures, d) };
                Some(())
            }
            _ => None,
        });
        return made.is_some();
    }
    false
}

/// Bytes that [`weigh`] packs operands into, where it does it.
pub fn weighing(dtype: DType, g: &Geometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes =
            with_split!(dtype, E => tiled::weighs::<E>(g, batch).then(|| tiled::weighing::<E>(g, batch)));
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Bytes of temporaries of [`multiply`] while it makes an (m, n) matrix over `k`: copies of operands in the type that is
/// computed in, where it is another, and what is packed; `turned` where `a` is a transpose. What each thread keeps for good
/// is not in it: [`kept_by_thread`].
pub fn packing(dtype: DType, (m, k, n): (usize, usize, usize), turned: bool, by: By) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if by == By::All && dispatch() == Dispatch::Amx {
        let bytes = with_split!(dtype, E => {
            tiled::takes::<E>((m, k, n)).then(|| tiled::packing::<E, f32>((m, k, n), turned) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    // As `gemm` 0.19 decides it, with the tile heights of AVX2 and AVX-512: it makes the transposed product, packs
    // slices of at most so many of the inner sums, `a` where its rows are long strides and `b` where it is narrow.
    const DEPTH: usize = 512;
    const LOW: usize = 24;
    const HIGH: usize = 48;
    let packed = || {
        // Where `a` is a transpose the inner sums are over the samples, and a smaller batch may be cut into deeper slices.
        let depth = if turned { k.min(DEPTH) } else { k.div_ceil(k.div_ceil(DEPTH).max(1)) };
        let a = n > LOW * if turned { 2 } else { gemm::get_rhs_packing_threshold() };
        let b = n <= 16 * HIGH;
        let values = if a { m.next_multiple_of(8) } else { 0 } + if b { n.next_multiple_of(HIGH) } else { 0 };
        depth * values
    };
    let packed = if dtype != DType::F64 && is_small((m, k, n), by) { 0 } else { packed() };
    (acc_bytes(dtype) * (packed + copied(dtype, m * k + k * n))) as u64
}

/// Bytes that each thread keeps after its first product of this type: `gemm` packs into a buffer of its own as large as
/// the second-level cache. With AMX it makes no products but those of f64.
pub fn kept_by_thread(dtype: DType) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx && dtype != DType::F64 {
        return 0;
    }
    gemm_common::cache::CACHE_INFO[1].cache_bytes as u64
}

/// Values of so many that a product copies to another type.
fn copied(dtype: DType, values: usize) -> usize {
    if acc_bytes(dtype) == dtype.size_in_bytes() { 0 } else { values }
}

/// As [`packing`], of [`multiply_rounded`] and [`multiply_then`].
pub fn packing_rounded(dtype: DType, (m, k, n): (usize, usize, usize), turned: bool, by: By) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if by == By::All && dispatch() == Dispatch::Amx {
        let bytes = with_split!(dtype, E => {
            tiled::takes::<E>((m, k, n)).then(|| tiled::packing::<E, E>((m, k, n), turned) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    packing(dtype, (m, k, n), turned, by) + (acc_bytes(dtype) * copied(dtype, m * n)) as u64
}

/// As [`multiply`], rounding the result to the stored type; `out` is a whole row-major (m, n) matrix.
pub fn multiply_rounded<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, by: By) {
    rounded(out, a, b, by, None);
}

/// As [`multiply_rounded`] by all threads, and what comes `then`: where the product allows it as the sums are made,
/// while they are near.
pub fn multiply_then<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, then: Then<T>) {
    let n = b.cols;
    if !rounded(out, a, b, By::All, Some(then)) {
        for_rows(out, n, |first, rows| then.finish(rows, first, n));
    }
}

/// As [`multiply_rounded`]; says whether `then` was done too.
fn rounded<T: Elem>(out: &mut [T], a: Mat<T>, b: Mat<T>, by: By, then: Option<Then<T>>) -> bool {
    let n = b.cols;
    assert_eq!(a.cols, b.rows, "inner sizes of a product");
    assert!(out.len() >= a.rows * n, "a product outside its slice");
    if by == By::All && !out.is_empty() && tiled::<T, T>(out, n, a, b, false, then) {
        return true;
    }
    match T::as_acc_mut(out) {
        Some(out) => multiply(out, n, a, b, false, by),
        None => {
            let mut wide = fresh::<T::Acc>(a.rows * n);
            multiply(&mut wide, n, a, b, false, by);
            round(&wide, out, by);
        }
    }
    then.is_none()
}

/// `out = values`, rounded to the stored type.
pub fn round<T: Elem>(values: &[T::Acc], out: &mut [T], by: By) {
    let some = |first: usize, out: &mut [T]| {
        vectorised!(T, || out.iter_mut().zip(&values[first..]).for_each(|(o, v)| *o = T::down(*v)))
    };
    match by {
        By::All => for_rows(out, 1, some),
        By::Me => some(0, out),
    }
}
