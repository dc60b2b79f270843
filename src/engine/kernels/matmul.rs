//! GEMMs on plain slices: by AMX, by AVX-512 kernels that pack their operands (`avx512_packed`) or do not (`avx512`), by
//! the `gemm` crate (`gemm_crate`), and for a few rows by a kernel that streams the other operand (`gemv`).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_tiles;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_packed;
#[cfg(target_arch = "x86_64")]
mod bf16_split;
pub(super) mod gemm_crate;
mod gemv;
#[cfg(target_arch = "x86_64")]
mod implicit_gemm;
mod workspace;

use candle_core::DType;

use super::clamp::{ClampActivation, clamp};
use super::cpu::{parallel_for_rows, uninit};
use super::dispatch::{Dispatch, dispatch};
use super::im2col::ConvGeometry;
use super::kernel_timer::{self, KernelScope};
use super::{Elem, Real};
use crate::vectorised;

#[cfg(target_arch = "x86_64")]
use bf16_split::AmxElem;
pub use gemv::GemvScope;
pub(super) use gemv::{add_weighted, dot_rows};
pub use workspace::{
    Transposed, conv_weight_gradient_workspace, conv_workspace, gemm_buffer_bytes, gemm_workspace,
    matmul_workspace, thread_buffer_bytes, thread_stack_bytes,
};
use workspace::{converted_depth, max_packed_rows};

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
        // Cuts off what follows the matrix: conversion of a half type to f32 covers the whole slice.
        let len = if rows == 0 || cols == 0 { 0 } else { (rows - 1) * row_stride + cols };
        Self { data: &data[..len], rows, cols, row_stride, col_stride: 1 }
    }

    /// The same view over other values.
    fn with_data<U>(self, data: &[U]) -> MatView<'_, U> {
        MatView {
            data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }

    /// `count` columns from `first` on.
    fn columns(self, first: usize, count: usize) -> Self {
        Self { data: &self.data[first * self.col_stride..], cols: count, ..self }
    }

    /// `count` rows from `first` on.
    fn row_range(self, first: usize, count: usize) -> Self {
        Self { data: &self.data[first * self.row_stride..], rows: count, ..self }
    }

    /// The transpose: the same values with swapped strides.
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

/// Who does the work: all threads, or only the caller (inside a parallel loop).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Threading {
    Parallel,
    Serial,
}

/// Epilogue of a GEMM: `clamp(sum + bias) + residual`.
#[derive(Clone, Copy)]
pub struct CpuEpilogue<'a, R> {
    /// One value per column.
    pub bias: Option<&'a [R]>,
    pub clamp: ClampActivation,
    /// Same layout as the result.
    pub residual: Option<&'a [R]>,
}

impl<T: Elem> CpuEpilogue<'_, T> {
    pub const NONE: Self = Self { bias: None, clamp: ClampActivation::Identity, residual: None };

    /// Applies the epilogue to whole rows of `n` sums; `first` is the index of the first row.
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

/// The same slice, if both types are the same.
pub(super) fn downcast_slice<T: Elem, U: Elem>(values: &[T]) -> Option<&[U]> {
    // SAFETY: each numeric type has its own `DTYPE`, so `T` and `U` are the same type.
    (T::DTYPE == U::DTYPE)
        .then(|| unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) })
}

/// Like [`downcast_slice`], for writing.
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

/// Runs `$body` with `$E` bound to the type of `$dtype`, if AMX supports it.
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
#[cfg(target_arch = "x86_64")]
use with_amx_elem;

/// Whether a parallel GEMM of this type runs without converted copies of its operands.
pub fn is_native_dtype(dtype: DType) -> bool {
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        return true;
    }
    matches!(dtype, DType::F32 | DType::F64)
}

/// Times a GEMM on all threads. A serial one is a tile of another kernel, too short to be timed.
fn scope(threading: Threading) -> Option<KernelScope> {
    if threading == Threading::Parallel { kernel_timer::enter(module_path!()) } else { None }
}

/// `out = a b`, or `out += a b` with `accumulate`; `out` is row-major with row stride `stride`.
pub fn gemm<T: Elem>(
    out: &mut [T::Acc],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    threading: Threading,
) {
    let _scope = scope(threading);
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert_eq!(k, b.rows, "gemm: K of a and b differ");
    if m == 0 || n == 0 {
        return;
    }
    assert!(out.len() >= (m - 1) * stride + n, "gemm: result exceeds its slice");
    if threading == Threading::Parallel && gemv::supports(&a, &b) {
        return gemv::gemv(out, stride, a, b, accumulate, CpuEpilogue::NONE);
    }
    if threading == Threading::Parallel && try_blocks::<T, T::Acc>(out, stride, a, b, accumulate, None) {
        return;
    }
    let (a_data, depth) = (T::to_acc_slice(a.data, threading), converted_depth(T::DTYPE, (k, n), threading));
    let a = a.with_data(&a_data);
    if depth == k {
        let b_data = T::to_acc_slice(b.data, threading);
        return multiply(out, stride, a, b.with_data(&b_data), accumulate, threading);
    }
    let mut buffer = uninit::<T::Acc>(depth * n);
    for first in (0..k).step_by(depth) {
        let rows = depth.min(k - first);
        let b = convert_rows(b, first, rows, &mut buffer[..rows * n]);
        multiply(out, stride, a.columns(first, rows), b, accumulate || first > 0, threading);
    }
}

/// Rows of `b` from `first` on, converted by all threads into `buffer`, in the layout of `b`.
fn convert_rows<'a, T: Elem>(
    b: MatView<T>,
    first: usize,
    rows: usize,
    buffer: &'a mut [T::Acc],
) -> MatView<'a, T::Acc> {
    let is_transposed = b.col_stride != 1;
    let (width, stride) = if is_transposed { (rows, b.col_stride) } else { (b.cols, b.row_stride) };
    let start = first * b.row_stride;
    parallel_for_rows(buffer, width, |line, into| {
        vectorised!(T, || {
            for (i, into) in into.chunks_exact_mut(width).enumerate() {
                let from = &b.data[start + (line + i) * stride..][..width];
                into.iter_mut().zip(from).for_each(|(w, v)| *w = v.to_acc());
            }
        })
    });
    if is_transposed { MatView::new(buffer, b.cols, rows).t() } else { MatView::new(buffer, rows, b.cols) }
}

/// `out = a b`, or `out += a b` with `accumulate`, in the accumulator type.
fn multiply<R: Real>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
    threading: Threading,
) {
    if try_avx512(out, stride, a, b, accumulate, threading) {
        return;
    }
    let block = max_packed_rows(R::DTYPE, a.cols);
    for first in (0..a.rows).step_by(block) {
        let (out, a) = (&mut out[first * stride..], a.row_range(first, block.min(a.rows - first)));
        // SAFETY: the caller's asserts and those of `MatView` keep every access inside its slice.
        unsafe {
            if let (Some(out), Some(a), Some(b)) = (downcast_slice_mut(out), a.downcast(), b.downcast()) {
                gemm_crate::f32(out, stride, a, b, accumulate, threading)
            } else if let (Some(out), Some(a), Some(b)) =
                (downcast_slice_mut(out), a.downcast(), b.downcast())
            {
                gemm_crate::f64(out, stride, a, b, accumulate, threading)
            }
        }
    }
}

/// Whether the AVX-512 kernel that packs blocks of its operands takes a GEMM on all threads: of half types always,
/// because any other kernel must first convert whole operands.
#[cfg(target_arch = "x86_64")]
fn packs_blocks(dtype: DType, sizes: (usize, usize, usize)) -> bool {
    let pays = match dtype {
        DType::F32 => !avx512::is_fastest(sizes),
        dtype => matches!(dtype, DType::BF16 | DType::F16),
    };
    dispatch() == Dispatch::Avx512 && sizes.1 > 0 && pays
}

/// Whether a parallel GEMM of this type converts whole operands, and the gaps between their rows.
pub fn converts_operands(dtype: DType) -> bool {
    dispatch() < Dispatch::Avx512 && matches!(dtype, DType::BF16 | DType::F16)
}

/// Runs a GEMM and its epilogue on AMX, or on AVX-512 by packed blocks, if that is faster; returns whether it did. The
/// caller has checked the sizes, and does not accumulate into a half-precision output.
fn try_blocks<T: Elem, O: Elem>(
    out: &mut [O],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let handled = with_amx_elem!(T::DTYPE, E => match (a.downcast::<E>(), b.downcast::<E>()) {
            (Some(a), Some(b)) => {
                if let Some(out) = downcast_slice_mut::<O, E>(out) {
                    Some(run_blocks(out, stride, a, b, accumulate, epilogue.and_then(CpuEpilogue::downcast::<E>)))
                } else {
                    let epilogue = epilogue.and_then(CpuEpilogue::downcast::<f32>);
                    downcast_slice_mut::<O, f32>(out).map(|out| run_blocks(out, stride, a, b, accumulate, epilogue))
                }
            }
            _ => None,
        });
        handled.unwrap_or(false)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (out, stride, a, b, accumulate, epilogue);
        false
    }
}

/// [`try_blocks`] in the types of its operands and its result.
#[cfg(target_arch = "x86_64")]
fn run_blocks<E: AmxElem, O: AmxElem>(
    out: &mut [O],
    stride: usize,
    a: MatView<E>,
    b: MatView<E>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) -> bool {
    let k = a.cols;
    // SAFETY: the dispatch has the instructions, and the caller has checked every size.
    unsafe {
        if amx::supports::<E>((a.rows, k, b.cols)) {
            amx::gemm(out, stride, a, b, accumulate, epilogue);
        } else if packs_blocks(E::DTYPE, (a.rows, k, b.cols))
            && (O::DTYPE == DType::F32 || avx512_packed::rounds(k))
        {
            avx512_packed::gemm(out, stride, a, b, accumulate, epilogue);
        } else {
            return false;
        }
    }
    true
}

/// Whether GEMMs of this type that neither AMX nor [`packs_blocks`] takes run on AVX-512 without packing: f32, so that
/// the process needs neither `gemm` nor its per-thread buffers.
fn uses_avx512(dtype: DType) -> bool {
    dispatch() >= Dispatch::Avx512 && dtype != DType::F64
}

/// Runs a GEMM without packing where its type [`uses_avx512`]; returns whether it did.
fn try_avx512<R: Real>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
    threading: Threading,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if uses_avx512(R::DTYPE)
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

/// The convolution `g` of `images`, and its epilogue.
#[derive(Clone, Copy)]
pub struct ConvArgs<'a, T> {
    pub g: &'a ConvGeometry,
    pub images: &'a [T],
    pub weight: &'a [T],
    /// Whether this computes the input gradient of a convolution with this weight.
    pub input_gradient: bool,
    pub epilogue: CpuEpilogue<'a, T>,
}

/// Runs a convolution on AMX if that is faster than im2col block by block; returns whether it did.
pub fn try_conv<T: Elem>(out: &mut [T], args: ConvArgs<T>) -> bool {
    let ConvArgs { g, images, weight, input_gradient, epilogue } = args;
    assert_eq!(weight.len(), g.out_channels * g.patch_len(), "conv: length of the weight");
    assert_eq!(
        out.len() * g.height * g.width * g.in_channels,
        images.len() * g.output_pixels() * g.out_channels,
        "conv: lengths of the images and the output"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = images.len() / (g.height * g.width * g.in_channels);
        let handled = with_amx_elem!(T::DTYPE, E => {
            let out = downcast_slice_mut::<T, E>(out);
            match (out, downcast_slice::<T, E>(images), downcast_slice(weight), epilogue.downcast()) {
                (Some(out), Some(images), Some(weight), Some(epilogue)) if amx::supports_conv::<E>(g, batch) => {
                    // SAFETY: the dispatch is AMX, and the asserts above checked every size.
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

/// Accumulates the weight gradient of a convolution in the calling thread, on AMX if that is faster than im2col block
/// by block; returns whether it did. `d` is the output gradient.
pub fn try_conv_weight_gradient<T: Elem>(
    dweight: &mut [T::Acc],
    g: &ConvGeometry,
    images: &[T],
    d: &[T],
) -> bool {
    assert_eq!(dweight.len(), g.out_channels * g.patch_len(), "conv: length of the weight gradient");
    assert_eq!(
        d.len() * g.height * g.width * g.in_channels,
        images.len() * g.output_pixels() * g.out_channels,
        "conv: lengths of the images and the output gradient"
    );
    #[cfg(target_arch = "x86_64")]
    if dispatch() == Dispatch::Amx {
        let batch = images.len() / (g.height * g.width * g.in_channels);
        let handled = with_amx_elem!(T::DTYPE, E => {
            match (downcast_slice_mut(dweight), downcast_slice::<T, E>(images), downcast_slice(d)) {
                (Some(dweight), Some(images), Some(d)) if amx::supports_conv_weight_gradient::<E>(g, batch) => {
                    // SAFETY: the dispatch is AMX, and the asserts above checked every size.
                    unsafe { amx::conv_weight_gradient(dweight, g, images, d) };
                    Some(())
                }
                _ => None,
            }
        });
        return handled.is_some();
    }
    false
}

/// Like [`gemm`], with the result rounded to the stored type; `out` is a whole row-major (m, n) matrix.
pub fn matmul<T: Elem>(out: &mut [T], a: MatView<T>, b: MatView<T>, threading: Threading) {
    matmul_maybe_fused(out, a, b, threading, None);
}

/// Like [`matmul`] on all threads, followed by `epilogue`. It is fused into the GEMM where possible, while the sums are
/// in cache.
pub fn matmul_epilogue<T: Elem>(out: &mut [T], a: MatView<T>, b: MatView<T>, epilogue: CpuEpilogue<T>) {
    let n = b.cols;
    if !matmul_maybe_fused(out, a, b, Threading::Parallel, Some(epilogue)) {
        parallel_for_rows(out, n, |first, rows| epilogue.apply(rows, first, n));
    }
}

/// Like [`matmul`]; returns whether `epilogue` was applied too.
fn matmul_maybe_fused<T: Elem>(
    out: &mut [T],
    a: MatView<T>,
    b: MatView<T>,
    threading: Threading,
    epilogue: Option<CpuEpilogue<T>>,
) -> bool {
    let _scope = scope(threading);
    let n = b.cols;
    assert_eq!(a.cols, b.rows, "matmul: K of a and b differ");
    assert!(out.len() >= a.rows * n, "matmul: result exceeds its slice");
    if threading == Threading::Parallel && !out.is_empty() && gemv::supports(&a, &b) {
        gemv::gemv(out, n, a, b, false, epilogue.unwrap_or(CpuEpilogue::NONE));
        return true;
    }
    if threading == Threading::Parallel
        && !out.is_empty()
        && try_blocks::<T, T>(out, n, a, b, false, epilogue)
    {
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

#[cfg(test)]
mod tests;
