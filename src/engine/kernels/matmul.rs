//! GEMMs on plain slices: by AMX (`amx`), by panels of packed operands (`packed`) or of operands where they are
//! (`unpacked`), and for a few rows by a kernel that streams the other operand (`gemv`). No GEMM on all threads converts
//! a whole operand or result to another type.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_tiles;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bf16_split;
mod gemv;
#[cfg(target_arch = "x86_64")]
mod implicit_gemm;
mod packed;
mod panel;
mod unpacked;
mod vectors;
mod workspace;

use candle_core::DType;

use super::clamp::{ClampActivation, clamp};
use super::cpu::{parallel_for_rows, uninit};
#[cfg(target_arch = "x86_64")]
use super::dispatch::{Dispatch, dispatch};
use super::im2col::ConvGeometry;
use super::kernel_timer::{self, KernelScope};
use super::{Elem, Real};
use crate::vectorised;

pub use gemv::GemvScope;
pub(super) use gemv::{add_weighted, dot_rows};
pub use workspace::{
    Transposed, conv_weight_gradient_workspace, conv_workspace, gemm_buffer_bytes, gemm_workspace,
    matmul_workspace, thread_stack_bytes,
};

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

    /// Strides of rows and columns.
    fn strides(&self) -> (usize, usize) {
        (self.row_stride, self.col_stride)
    }

    /// Where an element is.
    fn at(&self, row: usize, col: usize) -> *const T {
        self.data[row * self.row_stride + col * self.col_stride..].as_ptr()
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
    if k == 0 {
        if !accumulate {
            out.chunks_mut(stride).for_each(|row| row[..n].fill(T::Acc::ZERO));
        }
        return;
    }
    if threading == Threading::Parallel {
        if gemv::supports(&a, &b) {
            return gemv::gemv(out, stride, a, b, accumulate, CpuEpilogue::NONE);
        }
        if try_blocks::<T, T::Acc>(out, stride, a, b, accumulate, None) {
            return;
        }
    }
    let (a_data, b_data) = (T::to_acc_slice(a.data, threading), T::to_acc_slice(b.data, threading));
    multiply_unpacked(out, stride, a.with_data(&a_data), b.with_data(&b_data), accumulate, threading);
}

/// Whether a GEMM on all threads that AMX does not take packs blocks of its operands: of half types always, because
/// they must be converted.
fn packs_blocks(dtype: DType, sizes: (usize, usize, usize)) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) || !unpacked::is_fastest(sizes)
}

/// Runs `$body` with `$P` bound to the [`panel::PanelKernel`]s of the dispatch for operands of type `$E`.
macro_rules! with_panel_kernel {
    ($E:ty, $P:ident => $body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        // The constant comes first: without vectors only the portable kernels are compiled.
        if <$E>::VECTORIZE && dispatch() >= Dispatch::Avx512 {
            type $P = vectors::Avx512;
            $body
        } else if <$E>::VECTORIZE && dispatch() == Dispatch::Avx2 {
            type $P = vectors::Avx2;
            $body
        } else {
            type $P = vectors::Portable;
            $body
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            type $P = vectors::Portable;
            $body
        }
    }};
}

/// Runs a GEMM and its epilogue on AMX, or by packed blocks, if that is faster than converting its operands and
/// multiplying them where they are; returns whether it did. The caller has checked the sizes, and does not accumulate
/// into a half-precision output.
fn try_blocks<T: Elem, O: Elem<Acc = T::Acc>>(
    out: &mut [O],
    stride: usize,
    a: MatView<T>,
    b: MatView<T>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) -> bool {
    let sizes @ (_, k, _) = (a.rows, a.cols, b.cols);
    if try_amx(out, stride, a, b, accumulate, epilogue) {
        return true;
    }
    let takes_result = size_of::<O>() == size_of::<O::Acc>() || packed::rounds(k);
    if k == 0 || !takes_result || !packs_blocks(T::DTYPE, sizes) {
        return false;
    }
    // SAFETY: the dispatch has the instructions, and the caller has checked every size.
    with_panel_kernel!(T, P => unsafe { packed::gemm::<T, O, P>(out, stride, a, b, accumulate, epilogue) });
    true
}

/// [`try_blocks`] on AMX.
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
        let handled = with_amx_elem!(T::DTYPE, E => match (a.downcast::<E>(), b.downcast::<E>()) {
            (Some(a), Some(b)) if amx::supports::<E>((a.rows, a.cols, b.cols)) => {
                // SAFETY: the dispatch is AMX, and the caller has checked every size.
                unsafe {
                    if let Some(out) = downcast_slice_mut::<O, E>(out) {
                        let epilogue = epilogue.and_then(CpuEpilogue::downcast::<E>);
                        amx::gemm(out, stride, a, b, accumulate, epilogue);
                        Some(())
                    } else {
                        let epilogue = epilogue.and_then(CpuEpilogue::downcast::<f32>);
                        let out = downcast_slice_mut::<O, f32>(out);
                        out.map(|out| amx::gemm(out, stride, a, b, accumulate, epilogue))
                    }
                }
            }
            _ => None,
        });
        return handled.is_some();
    }
    let _ = (out, stride, a, b, accumulate, epilogue);
    false
}

/// `out = a b`, or `out += a b` with `accumulate`, in the accumulator type.
fn multiply_unpacked<R: Real>(
    out: &mut [R],
    stride: usize,
    a: MatView<R>,
    b: MatView<R>,
    accumulate: bool,
    threading: Threading,
) {
    // SAFETY: the dispatch has the instructions, and `gemm` has checked every size.
    with_panel_kernel!(R, P => unsafe {
        match threading {
            Threading::Serial => unpacked::gemm::<R, P>(out, stride, a, b, accumulate),
            Threading::Parallel => unpacked::gemm_parallel::<R, P>(out, stride, a, b, accumulate),
        }
    });
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
mod panel_tests;
#[cfg(test)]
mod tests;
