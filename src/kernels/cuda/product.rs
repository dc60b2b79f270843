//! Matrix products on a card: cuBLASLt with bias, GELU and accumulation fused, and one workspace for all.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{Stream, checked, code, pointer, pointer_or_null, scratch, stream};

/// Bytes of the workspace that all products of a card share: what cuBLAS advises for Hopper. The plan counts it as
/// `memory::estimate::PRODUCTS`.
pub const WORKSPACE: usize = 32 << 20;

/// A row-major matrix in a tensor, or its transpose. `stride` values lie between the starts of rows.
#[derive(Clone, Copy)]
pub struct Mat<'a> {
    pub of: &'a Tensor,
    /// Values before the first.
    pub from: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
    pub turned: bool,
}

impl<'a> Mat<'a> {
    /// The whole of a contiguous tensor.
    pub fn new(of: &'a Tensor, rows: usize, cols: usize) -> Self {
        Self { of, from: 0, rows, cols, stride: cols, turned: false }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, turned: !self.turned, ..self }
    }

    /// The columns `from..from + cols`.
    fn columns(self, from: usize, cols: usize) -> Self {
        let step = if self.turned { self.stride } else { 1 };
        Self { from: self.from + from * step, cols, ..self }
    }

    /// Where its first value is.
    pub fn data(&self) -> Result<*mut c_void> {
        Ok(pointer(self.of)?.wrapping_byte_add(self.from * self.of.dtype().size_in_bytes()))
    }

    fn raw(&self) -> Result<Raw> {
        Ok(Raw { data: self.data()?, stride: self.stride as i64, turned: self.turned as c_int })
    }
}

/// What is done to a product before it is written.
#[derive(Clone, Copy)]
pub enum Then<'a> {
    Nothing,
    /// A bias a column is added.
    Bias(&'a Tensor),
    /// A bias, then GELU through tanh; what GELU was given is kept where that is wanted.
    GeluBias(&'a Tensor, Option<&'a Tensor>),
    /// A bias, then ReLU.
    ReluBias(&'a Tensor),
}

/// What a product is written over.
#[derive(Clone, Copy)]
pub enum Onto<'a> {
    Nothing,
    /// It is added to what is there.
    Itself,
    /// It is added to another matrix of the same shape.
    Other(&'a Tensor),
}

/// Values that tensor cores are fed at once, and a size from which a rest apart costs less than narrow loads for all.
const GRAIN: usize = 64;
const LONG: usize = 1024;

/// Where a long size that is no multiple of 8 is cut, so that all but a small rest is made with wide loads: with 50,257
/// columns the narrow ones took four times as long.
fn cut(size: usize) -> Option<usize> {
    (size > LONG && !size.is_multiple_of(8)).then(|| size / GRAIN * GRAIN)
}

/// `out = then(a b + onto)`; `out` is row-major with rows `stride` apart, of the operands' type or of f32.
pub fn multiply(out: &Mat, a: Mat, b: Mat, onto: Onto, then: Then) -> Result<()> {
    let plain = matches!(then, Then::Nothing) && !matches!(onto, Onto::Other(_));
    let strided = |mat: &Mat| mat.stride.is_multiple_of(8);
    if plain && let Some(at) = cut(out.cols).filter(|_| strided(out)) {
        for (from, cols) in [(0, at), (at, out.cols - at)] {
            product(&out.columns(from, cols), a, b.columns(from, cols), onto, then)?;
        }
        return Ok(());
    }
    if plain && let Some(at) = cut(out.rows).filter(|_| a.turned && strided(&a)) {
        for (from, rows) in [(0, at), (at, out.rows - at)] {
            product(&out.t().columns(from, rows).t(), a.t().columns(from, rows).t(), b, onto, then)?;
        }
        return Ok(());
    }
    // The rest first, which is small, so that what is added to it is rounded once more only there.
    if plain && let Some(at) = cut(a.cols).filter(|_| strided(&a)) {
        let part = |from, n| (a.columns(from, n), b.t().columns(from, n).t());
        let ((a_rest, b_rest), (a_most, b_most)) = (part(at, a.cols - at), part(0, at));
        product(out, a_rest, b_rest, onto, then)?;
        return product(out, a_most, b_most, Onto::Itself, then);
    }
    product(out, a, b, onto, then)
}

fn product(out: &Mat, a: Mat, b: Mat, onto: Onto, then: Then) -> Result<()> {
    if (a.cols, a.rows, b.cols) != (b.rows, out.rows, out.cols) {
        candle_core::bail!(
            "a product of {:?} and {:?} into {:?}",
            (a.rows, a.cols),
            (b.rows, b.cols),
            (out.rows, out.cols)
        )
    }
    if out.rows == 0 || out.cols == 0 {
        return Ok(());
    }
    let Some(device) = super::of(a.of) else {
        candle_core::bail!("a product of tensors that are on no card")
    };
    let into = out.raw()?;
    let c = match onto {
        Onto::Nothing => std::ptr::null(),
        Onto::Itself => into.data,
        Onto::Other(tensor) => pointer(tensor)?.cast_const(),
    };
    let (epilogue, bias, aux) = match then {
        Then::Nothing => (0, None, None),
        Then::Bias(bias) => (1, Some(bias), None),
        Then::GeluBias(bias, aux) => (2, Some(bias), aux),
        Then::ReluBias(bias) => (3, Some(bias), None),
    };
    let asked = Asked {
        dtype: code(a.of.dtype())?,
        out_dtype: code(out.of.dtype())?,
        m: out.rows as c_int,
        n: out.cols as c_int,
        k: a.cols as c_int,
        epilogue,
        a: a.raw()?,
        b: b.raw()?,
        c,
        d: into.data.cast_mut(),
        d_stride: into.stride,
        bias: pointer_or_null(bias)?.cast_const(),
        aux: pointer_or_null(aux)?,
        aux_stride: out.cols as i64,
    };
    with_products(device, |products| {
        // SAFETY: the sizes were checked above, and every pointer is of a tensor that outlives the launch.
        checked("product", unsafe { products_multiply(products, &asked, stream(device)) })
    })
}

/// Whether the fused GELU takes rows of `n` values of this type: it moves 16 bytes at once.
pub fn gelu_is_fused(dtype: DType, n: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && n.is_multiple_of(8)
}

/// Whether f32 products may round their operands to TF32, as the job says; to be called before the first product.
pub fn allow_tf32(allow: bool) {
    products().tf32 = allow;
}

/// Whether they may.
pub fn tf32() -> bool {
    products().tf32
}

/// Makes what all products share, as the first of them would.
pub fn prepare(device: &CudaDevice) -> Result<()> {
    with_products(device, |_| Ok(()))
}

/// The library's handle and its workspace, made with the first product.
struct Products {
    handle: Option<(*mut c_void, Tensor)>,
    tf32: bool,
}

// SAFETY: the handle is used under the lock alone.
unsafe impl Send for Products {}

static PRODUCTS: Mutex<Products> = Mutex::new(Products { handle: None, tf32: false });

fn products() -> std::sync::MutexGuard<'static, Products> {
    PRODUCTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_products(device: &CudaDevice, body: impl FnOnce(*mut c_void) -> Result<()>) -> Result<()> {
    let mut products = products();
    let handle = match &products.handle {
        Some((handle, _)) => *handle,
        None => {
            let workspace = scratch(device, WORKSPACE)?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: the workspace lives as long as the handle.
            checked("cublasLtCreate", unsafe {
                products_new(pointer(&workspace)?, WORKSPACE, products.tf32 as c_int, &mut handle)
            })?;
            products.handle = Some((handle, workspace));
            handle
        }
    };
    body(handle)
}

/// `Matrix` in product.cu.
#[repr(C)]
struct Raw {
    data: *const c_void,
    stride: i64,
    turned: c_int,
}

/// `Asked` in product.cu.
#[repr(C)]
struct Asked {
    dtype: c_int,
    out_dtype: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    epilogue: c_int,
    a: Raw,
    b: Raw,
    c: *const c_void,
    d: *mut c_void,
    d_stride: i64,
    bias: *const c_void,
    aux: *mut c_void,
    aux_stride: i64,
}

unsafe extern "C" {
    fn products_new(workspace: *mut c_void, bytes: usize, tf32: c_int, out: *mut *mut c_void) -> c_int;
    fn products_multiply(products: *mut c_void, asked: *const Asked, stream: Stream) -> c_int;
}
