//! Matrix products on plain slices: by the `gemm` crate (`gemm_crate`), and by kernels of their own for small ones and for
//! processors with AMX.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_tiles;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16_split;
pub(super) mod gemm_crate;
#[cfg(target_arch = "x86_64")]
mod implicit_gemm;

use candle_core::DType;

use super::clamp::{ClampActivation, clamp};
use super::cpu::{acc_bytes, parallel_for_rows, uninit};
#[cfg(target_arch = "x86_64")]
use super::dispatch::{Dispatch, dispatch};
use super::im2col::ConvGeometry;
use super::{Elem, Real};
use crate::vectorised;

/// A matrix over a slice: element (i, j) is at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub struct MatView<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T> MatView<'a, T> {
    /// A row-major (rows, cols) matrix.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows begin `row_stride` values apart.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            rows == 0 || cols == 0 || data.len() >= (rows - 1) * row_stride + cols,
            "a matrix outside its slice"
        );
        // What follows the matrix is not its own: a narrow type is widened as far as the slice goes.
        let len = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
        Self { data: &data[..len], rows, cols, row_stride, col_stride: 1 }
    }

    /// The same places of other values.
    fn with_data<U>(self, data: &[U]) -> MatView<'_, U> {
        MatView {
            data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }

    /// The transpose: the same values, read the other way.
    pub fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// Who does the work: the whole machine, or the thread that asks (inside a parallel loop).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threading {
    Parallel,
    Serial,
}

/// What follows the sums of a product: `clamp(sum + bias) + residual`.
#[derive(Clone, Copy)]
pub struct CpuEpilogue<'a, R> {
    /// A value for each column.
    pub bias: Option<&'a [R]>,
    pub clamp: ClampActivation,
    /// Laid out as the result.
    pub residual: Option<&'a [R]>,
}

impl<T: Elem> CpuEpilogue<'_, T> {
    pub const NONE: Self = Self { bias: None, clamp: ClampActivation::Identity, residual: None };

    /// Finishes whole rows of `n` sums, of which the first is number `first`.
    fn apply(&self, rows: &mut [T], first: usize, n: usize) {
        let bounds = self.clamp.bounds();
        vectorised!(T, || {
            for (i, row) in rows.chunks_exact_mut(n).enumerate() {
                match self.bias {
                    Some(bias) => row
                        .iter_mut()
                        .zip(bias)
                        .for_each(|(v, b)| *v = T::from_acc(clamp(v.to_acc() + b.to_acc(), bounds))),
                    None => row.iter_mut().for_each(|v| *v = T::from_acc(clamp(v.to_acc(), bounds))),
                }
                if let Some(residual) = self.residual {
                    let residual = &residual[(first + i) * n..][..n];
                    row.iter_mut().zip(residual).for_each(|(v, o)| *v = T::from_acc(v.to_acc() + o.to_acc()));
                }
            }
        });
    }
}

/// The same slice, where both types are one.
pub(super) fn downcast_slice<T: Elem, U: Elem>(values: &[T]) -> Option<&[U]> {
    // SAFETY: every type of number has a `DTYPE` of its own, so the two are one type.
    (T::DTYPE == U::DTYPE)
        .then(|| unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) })
}

/// As [`same`], to be written to.
pub(super) fn downcast_slice_mut<T: Elem, U: Elem>(values: &mut [T]) -> Option<&mut [U]> {
    // SAFETY: as above.
    (T::DTYPE == U::DTYPE)
        .then(|| unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), values.len()) })
}

impl<'a, T: Elem> MatView<'a, T> {
    fn downcast<U: Elem>(self) -> Option<MatView<'a, U>> {
        downcast_slice::<T, U>(self.data).map(|data| self.with_data(data))
    }
}

impl<'a, T: Elem> CpuEpilogue<'a, T> {
    fn downcast<U: Elem>(self) -> Option<CpuEpilogue<'a, U>> {
        let (bias, residual) =
            (self.bias.map(downcast_slice::<T, U>), self.residual.map(downcast_slice::<T, U>));
        (T::DTYPE == U::DTYPE).then_some(CpuEpilogue {
            bias: bias.flatten(),
            clamp: self.clamp,
            residual: residual.flatten(),
        })
    }
}

/// Runs `$body` with `$E` bound to the type of `$dtype`, if AMX multiplies it.
#[cfg(target_arch = "x86_64")]
macro_rules! with_amx_elem {
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
pub fn is_native_dtype(dtype: DType) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        return true;
    }
    matches!(dtype, DType::F32 | DType::F64)
}

/// `out = a b`, or `out += a b` with `accumulate`; `out` is row-major with rows `stride` apart.
pub fn gemm<T: Elem>(
    out: &mut [T::Acc],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    threading: Threading,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "inner sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(out.len() >= (m - 1) * stride + n, "a product outside its slice");
    if threading == Threading::Parallel && try_amx::<T, T::Acc>(out, stride, a, b, accumulate, None) {
        return;
    }
    let (a_data, b_data) = (T::to_acc_slice(a.data, threading), T::to_acc_slice(b.data, threading));
    let (a, b) = (a.with_data(&a_data), b.with_data(&b_data));
    if try_avx512(out, stride, a, b, accumulate, threading) {
        return;
    }
    // SAFETY: the asserts above and those of `MatView` keep every access inside its slice.
    unsafe {
        if let (Some(out), Some(a), Some(b)) = (downcast_slice_mut(out), a.downcast(), b.downcast()) {
            gemm_crate::f32(out, stride, a, b, accumulate, threading)
        } else if let (Some(out), Some(a), Some(b)) = (downcast_slice_mut(out), a.downcast(), b.downcast()) {
            gemm_crate::f64(out, stride, a, b, accumulate, threading)
        }
    }
}

/// Makes a product by AMX, and what comes `epilogue`, where that is faster; says whether it did. The caller has checked the
/// sizes, and adds to nothing that is narrow.
fn try_amx<T: Elem, O: Elem>(
    out: &mut [O],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let sizes = (a.rows, a.cols, b.cols);
        let handled = with_amx_elem!(T::DTYPE, E => match (a.downcast::<E>(), b.downcast::<E>()) {
            (Some(a), Some(b)) if amx::supports::<E>(sizes) => {
                // SAFETY: the dispatch is AMX, and the caller has checked every size.
                unsafe {
                    if let Some(out) = downcast_slice_mut::<O, E>(out) {
                        amx::gemm(out, stride, a, b, accumulate, epilogue.and_then(CpuEpilogue::downcast::<E>))
                    } else if let Some(out) = downcast_slice_mut::<O, f32>(out) {
                        amx::gemm(out, stride, a, b, accumulate, epilogue.and_then(CpuEpilogue::downcast::<f32>))
                    }
                }
                Some(())
            }
            _ => None,
        });
        return handled.is_some();
    }
    let _ = (out, stride, a, b, accumulate, epilogue);
    false
}

/// Whether f32 products of these sizes are made without packing: small ones by the thread that asks, and with AMX all that
/// its tiles do not take, so that `gemm` and what it keeps for each thread are not needed there at all.
fn uses_avx512(sizes: (usize, usize, usize), threading: Threading) -> bool {
    #[cfg(target_arch = "x86_64")]
    return match dispatch() {
        Dispatch::Amx => true,
        Dispatch::Avx512 => threading == Threading::Serial && avx512::supports(sizes),
        _ => false,
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (sizes, threading);
        false
    }
}

/// Makes a product without packing where it [`uses_avx512`]; says whether it did.
fn try_avx512<R: Real>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
    threading: Threading,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if uses_avx512((a.rows, a.cols, b.cols), threading)
        && let (Some(out), Some(a), Some(b)) = (downcast_slice_mut(out), a.downcast(), b.downcast())
    {
        // SAFETY: the dispatch has AVX-512, and `gemm` has checked every size.
        unsafe {
            match threading {
                Threading::Serial => avx512::gemm(out, stride, a, b, accumulate),
                Threading::Parallel => avx512::gemm_parallel(out, stride, a, b, accumulate),
            }
        }
        return true;
    }
    let _ = (out, stride, a, b, accumulate, threading);
    false
}

/// The convolution `g` of `images`, and what comes `epilogue`.
#[derive(Clone, Copy)]
pub struct ConvArgs<'a, T> {
    pub g: &'a ConvGeometry,
    pub images: &'a [T],
    pub weight: &'a [T],
    /// It is the gradient of the input of a convolution with this weight.
    pub input_gradient: bool,
    pub epilogue: CpuEpilogue<'a, T>,
}

/// Makes a convolution by AMX, where that is faster than block by block of its windows; says whether it did.
pub fn try_conv<T: Elem>(out: &mut [T], args: ConvArgs<T>) -> bool {
    let ConvArgs { g, images, weight, input_gradient, epilogue } = args;
    assert_eq!(weight.len(), g.out_channels * g.patch_len(), "the weight of a convolution");
    assert_eq!(
        out.len() * g.height * g.width * g.in_channels,
        images.len() * g.output_pixels() * g.out_channels,
        "the images of a convolution and what is made of them"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = images.len() / (g.height * g.width * g.in_channels);
        let handled = with_amx_elem!(T::DTYPE, E => {
            match (downcast_slice_mut::<T, E>(out), downcast_slice::<T, E>(images), downcast_slice(weight), epilogue.downcast()) {
                (Some(out), Some(images), Some(weight), Some(epilogue)) if amx::supports_conv::<E>(g, batch) => {
                    // SAFETY: the dispatch is AMX, and every size was checked.
                    unsafe { amx::conv(out, ConvArgs { g, images, weight, input_gradient, epilogue }) };
                    Some(())
                }
                _ => None,
            }
        });
        return handled.is_some();
    }
    let _ = (input_gradient, epilogue);
    false
}

/// Bytes that [`try_conv`] takes for temporaries, where it does it.
pub fn conv_workspace(dtype: DType, g: &ConvGeometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => amx::supports_conv::<E>(g, batch).then(|| amx::conv_workspace::<E>(g, batch)));
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Adds the gradient of a convolution's weight by the thread that asks, by AMX where that is faster than block by block of
/// its windows; says whether it did. `d` is the gradient of the output.
pub fn try_conv_weight_gradient<T: Elem>(
    dweight: &mut [T::Acc],
    g: &ConvGeometry,
    images: &[T],
    d: &[T],
) -> bool {
    assert_eq!(dweight.len(), g.out_channels * g.patch_len(), "the gradient of a convolution's weight");
    assert_eq!(
        d.len() * g.height * g.width * g.in_channels,
        images.len() * g.output_pixels() * g.out_channels,
        "the images of a convolution and what was made of them"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = images.len() / (g.height * g.width * g.in_channels);
        let handled = with_amx_elem!(T::DTYPE, E => match (downcast_slice_mut(dweight), downcast_slice::<T, E>(images), downcast_slice(d)) {
            (Some(dweight), Some(images), Some(d)) if amx::supports_conv_weight_gradient::<E>(g, batch) => {
                // SAFETY: the dispatch is AMX, and every size was checked.
                unsafe { amx::conv_weight_gradient(dweight, g, images, d) };
                Some(())
            }
            _ => None,
        });
        return handled.is_some();
    }
    false
}

/// Bytes that [`try_conv_weight_gradient`] packs operands into, where it does it.
pub fn conv_weight_gradient_workspace(dtype: DType, g: &ConvGeometry, batch: usize) -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => amx::supports_conv_weight_gradient::<E>(g, batch).then(|| amx::conv_weight_gradient_workspace::<E>(g, batch)));
        return bytes.map(|bytes| bytes as u64);
    }
    let _ = (dtype, g, batch);
    None
}

/// Bytes of temporaries of [`gemm`] while it makes an (m, n) matrix over `k`: copies of operands in the type that is
/// computed in, where it is another, and what is packed; `transposed_a` where `a` is a transpose. What each thread keeps for good
/// is not in it: [`thread_buffer_bytes`].
pub fn gemm_workspace(
    dtype: DType,
    (m, k, n): (usize, usize, usize),
    transposed_a: bool,
    threading: Threading,
) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports::<E>((m, k, n)).then(|| amx::gemm_workspace::<E, f32>((m, k, n), transposed_a) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    // As `gemm` 0.19 decides it, with the tile heights of AVX2 and AVX-512: it makes the transposed product, packs
    // slices of at most so many of the inner sums, `a` where its rows are long strides and `b` where it is narrow.
    const KC: usize = 512;
    const MR_AVX2: usize = 24;
    const MR_AVX512: usize = 48;
    let packed = || {
        // Where `a` is a transpose the inner sums are over the samples, and a smaller batch may be cut into deeper slices.
        let depth = if transposed_a { k.min(KC) } else { k.div_ceil(k.div_ceil(KC).max(1)) };
        let a = n > MR_AVX2 * if transposed_a { 2 } else { gemm::get_rhs_packing_threshold() };
        let b = n <= 16 * MR_AVX512;
        let values =
            if a { m.next_multiple_of(8) } else { 0 } + if b { n.next_multiple_of(MR_AVX512) } else { 0 };
        depth * values
    };
    let packed = if dtype != DType::F64 && uses_avx512((m, k, n), threading) { 0 } else { packed() };
    (acc_bytes(dtype) * (packed + converted_elements(dtype, m * k + k * n))) as u64
}

/// Bytes that each thread keeps after its first product of this type: `gemm` packs into a buffer of its own as large as
/// the second-level cache. With AMX it makes no products but those of f64.
pub fn thread_buffer_bytes(dtype: DType) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx && dtype != DType::F64 {
        return 0;
    }
    gemm_common::cache::CACHE_INFO[1].cache_bytes as u64
}

/// Values of so many that a product copies to another type.
fn converted_elements(dtype: DType, values: usize) -> usize {
    if acc_bytes(dtype) == dtype.size_in_bytes() { 0 } else { values }
}

/// As [`gemm_workspace`], of [`matmul`] and [`matmul_epilogue`].
pub fn matmul_workspace(
    dtype: DType,
    (m, k, n): (usize, usize, usize),
    transposed_a: bool,
    threading: Threading,
) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if threading == Threading::Parallel && dispatch() == Dispatch::Amx {
        let bytes = with_amx_elem!(dtype, E => {
            amx::supports::<E>((m, k, n)).then(|| amx::gemm_workspace::<E, E>((m, k, n), transposed_a) as u64)
        });
        if let Some(bytes) = bytes {
            return bytes;
        }
    }
    gemm_workspace(dtype, (m, k, n), transposed_a, threading)
        + (acc_bytes(dtype) * converted_elements(dtype, m * n)) as u64
}

/// As [`gemm`], rounding the result to the stored type; `out` is a whole row-major (m, n) matrix.
pub fn matmul<T: Elem>(out: &mut [T], a: MatView<T>, b: MatView<T>, threading: Threading) {
    matmul_maybe_fused(out, a, b, threading, None);
}

/// As [`matmul`] by all threads, and what comes `epilogue`: where the product allows it as the sums are made,
/// while they are near.
pub fn matmul_epilogue<T: Elem>(out: &mut [T], a: MatView<T>, b: MatView<T>, epilogue: CpuEpilogue<T>) {
    let n = b.cols;
    if !matmul_maybe_fused(out, a, b, Threading::Parallel, Some(epilogue)) {
        parallel_for_rows(out, n, |first, rows| epilogue.apply(rows, first, n));
    }
}

/// As [`matmul`]; says whether `epilogue` was done too.
fn matmul_maybe_fused<T: Elem>(
    out: &mut [T],
    a: MatView<T>,
    b: MatView<T>,
    threading: Threading,
    epilogue: Option<CpuEpilogue<T>>,
) -> bool {
    let n = b.cols;
    assert_eq!(a.cols, b.rows, "inner sizes of a product");
    assert!(out.len() >= a.rows * n, "a product outside its slice");
    if threading == Threading::Parallel && !out.is_empty() && try_amx::<T, T>(out, n, a, b, false, epilogue) {
        return true;
    }
    match T::as_acc_mut(out) {
        Some(out) => gemm(out, n, a, b, false, threading),
        None => {
            let mut acc = uninit::<T::Acc>(a.rows * n);
            gemm(&mut acc, n, a, b, false, threading);
            round(&acc, out, threading);
        }
    }
    epilogue.is_none()
}

/// `out = values`, rounded to the stored type.
pub fn round<T: Elem>(values: &[T::Acc], out: &mut [T], threading: Threading) {
    let convert = |first: usize, out: &mut [T]| {
        vectorised!(T, || out.iter_mut().zip(&values[first..]).for_each(|(o, v)| *o = T::from_acc(*v)))
    };
    match threading {
        Threading::Parallel => parallel_for_rows(out, 1, convert),
        Threading::Serial => convert(0, out),
    }
}
