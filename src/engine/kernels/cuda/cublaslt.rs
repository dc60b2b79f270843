//! GEMM on a GPU through cuBLASLt: bias, GELU and accumulation are fused, and all calls share one workspace.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::{RawStream, check_status, dtype_code, pointer, pointer_or_null, scratch, stream};
use crate::kernels::kernel_timer;

/// The name of GEMMs in a profile, as on the CPU.
const GEMM: &str = "matmul";

/// Size in bytes of the workspace that all GEMMs of a GPU share: what cuBLAS recommends for Hopper. The memory plan
/// counts it as `memory::estimate::GEMM_WORKSPACE_BYTES`.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// A row-major matrix within a tensor, or its transpose. `stride` is the distance between rows in values.
#[derive(Clone, Copy)]
pub struct GpuMat<'a> {
    pub tensor: &'a Tensor,
    /// Index of the first value in the tensor.
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
    pub transposed: bool,
}

impl<'a> GpuMat<'a> {
    /// A whole contiguous tensor as a matrix.
    pub fn new(tensor: &'a Tensor, rows: usize, cols: usize) -> Self {
        Self { tensor, offset: 0, rows, cols, stride: cols, transposed: false }
    }

    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// The columns `start..start + cols`.
    fn narrow_cols(self, start: usize, cols: usize) -> Self {
        let step = if self.transposed { self.stride } else { 1 };
        Self { offset: self.offset + start * step, cols, ..self }
    }

    /// Device pointer to the first value.
    pub fn data(&self) -> Result<*mut c_void> {
        Ok(pointer(self.tensor)?.wrapping_byte_add(self.offset * self.tensor.dtype().size_in_bytes()))
    }

    fn to_ffi(self) -> Result<GemmOperand> {
        Ok(GemmOperand {
            data: self.data()?,
            stride: self.stride as i64,
            transposed: self.transposed as c_int,
        })
    }
}

/// What cuBLASLt applies to the result before it writes it.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    Identity,
    /// Adds a bias per column.
    Bias(&'a Tensor),
    /// Adds a bias, then applies tanh GELU. The second tensor, if any, receives the pre-activation.
    GeluBias(&'a Tensor, Option<&'a Tensor>),
    /// Adds a bias, then applies ReLU.
    ReluBias(&'a Tensor),
}

/// The matrix `C` that is added to the GEMM.
#[derive(Clone, Copy)]
pub enum Addend<'a> {
    Zero,
    /// Accumulate into the output.
    Output,
    /// Another matrix of the output's shape.
    Matrix(&'a Tensor),
}

/// Alignment of the split point in values, and the smallest size for which a separate remainder GEMM costs less than
/// narrow loads for the whole.
const SPLIT_ALIGN: usize = 64;
const MIN_SPLIT: usize = 1024;

/// Where to split a large dimension that is not a multiple of 8, so that all but a small remainder uses wide loads.
/// With 50,257 columns, narrow loads took four times as long.
fn split_point(size: usize) -> Option<usize> {
    (size > MIN_SPLIT && !size.is_multiple_of(8)).then(|| size / SPLIT_ALIGN * SPLIT_ALIGN)
}

/// `out = epilogue(a b + addend)`. `out` is row-major with rows `stride` values apart, in the operands' dtype or in
/// f32.
pub fn matmul(out: &GpuMat, a: GpuMat, b: GpuMat, addend: Addend, epilogue: Epilogue) -> Result<()> {
    let _scope = kernel_timer::enter(GEMM);
    let plain = matches!(epilogue, Epilogue::Identity) && !matches!(addend, Addend::Matrix(_));
    let is_aligned = |mat: &GpuMat| mat.stride.is_multiple_of(8);
    if plain && let Some(at) = split_point(out.cols).filter(|_| is_aligned(out)) {
        for (from, cols) in [(0, at), (at, out.cols - at)] {
            launch_gemm(&out.narrow_cols(from, cols), a, b.narrow_cols(from, cols), addend, epilogue)?;
        }
        return Ok(());
    }
    if plain && let Some(at) = split_point(out.rows).filter(|_| a.transposed && is_aligned(&a)) {
        for (from, rows) in [(0, at), (at, out.rows - at)] {
            launch_gemm(
                &out.t().narrow_cols(from, rows).t(),
                a.t().narrow_cols(from, rows).t(),
                b,
                addend,
                epilogue,
            )?;
        }
        return Ok(());
    }
    // A split of K rounds the output twice. The small remainder runs first, so the extra rounding applies to the
    // smaller partial sum.
    if plain && let Some(at) = split_point(a.cols).filter(|_| is_aligned(&a)) {
        let part = |from, n| (a.narrow_cols(from, n), b.t().narrow_cols(from, n).t());
        let ((a_rest, b_rest), (a_most, b_most)) = (part(at, a.cols - at), part(0, at));
        launch_gemm(out, a_rest, b_rest, addend, epilogue)?;
        return launch_gemm(out, a_most, b_most, Addend::Output, epilogue);
    }
    launch_gemm(out, a, b, addend, epilogue)
}

fn launch_gemm(out: &GpuMat, a: GpuMat, b: GpuMat, addend: Addend, epilogue: Epilogue) -> Result<()> {
    if (a.cols, a.rows, b.cols) != (b.rows, out.rows, out.cols) {
        candle_core::bail!(
            "gemm: shapes do not match: {:?} x {:?} into {:?}",
            (a.rows, a.cols),
            (b.rows, b.cols),
            (out.rows, out.cols)
        )
    }
    if out.rows == 0 || out.cols == 0 {
        return Ok(());
    }
    let Some(device) = super::device_of(a.tensor) else {
        candle_core::bail!("gemm: the tensors are not on a CUDA device")
    };
    let into = out.to_ffi()?;
    let c = match addend {
        Addend::Zero => std::ptr::null(),
        Addend::Output => into.data,
        Addend::Matrix(tensor) => pointer(tensor)?.cast_const(),
    };
    let (epilogue_code, bias, aux) = match epilogue {
        Epilogue::Identity => (0, None, None),
        Epilogue::Bias(bias) => (1, Some(bias), None),
        Epilogue::GeluBias(bias, aux) => (2, Some(bias), aux),
        Epilogue::ReluBias(bias) => (3, Some(bias), None),
    };
    let args = GemmArgs {
        dtype: dtype_code(a.tensor.dtype())?,
        out_dtype: dtype_code(out.tensor.dtype())?,
        m: out.rows as c_int,
        n: out.cols as c_int,
        k: a.cols as c_int,
        epilogue: epilogue_code,
        a: a.to_ffi()?,
        b: b.to_ffi()?,
        c,
        d: into.data.cast_mut(),
        d_stride: into.stride,
        bias: pointer_or_null(bias)?.cast_const(),
        aux: pointer_or_null(aux)?,
        aux_stride: out.cols as i64,
    };
    with_gemm_context(device, |context| {
        // SAFETY: the sizes were checked above, and every pointer belongs to a tensor that outlives the launch.
        check_status("gemm", unsafe { cublaslt_matmul(context, &args, stream(device)) })
    })
}

/// Whether cuBLASLt can fuse GELU for rows of `n` values of this dtype: its epilogue moves 16 bytes at a time.
pub fn gelu_is_fused(dtype: DType, n: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && n.is_multiple_of(8)
}

/// Sets whether f32 GEMMs may round their operands to TF32. Call it before the first GEMM.
pub fn allow_tf32(allow: bool) {
    gemm_context().tf32 = allow;
}

/// Whether f32 GEMMs may use TF32.
pub fn tf32_allowed() -> bool {
    gemm_context().tf32
}

/// Creates the handle and the workspace now instead of on the first GEMM.
pub fn prepare(device: &CudaDevice) -> Result<()> {
    with_gemm_context(device, |_| Ok(()))
}

/// The cuBLASLt handle and its workspace, created on the first GEMM.
struct GemmContext {
    handle: Option<(*mut c_void, Tensor)>,
    tf32: bool,
}

// SAFETY: the handle is only used under the lock.
unsafe impl Send for GemmContext {}

static GEMM_CONTEXT: Mutex<GemmContext> = Mutex::new(GemmContext { handle: None, tf32: false });

fn gemm_context() -> std::sync::MutexGuard<'static, GemmContext> {
    GEMM_CONTEXT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_gemm_context(device: &CudaDevice, body: impl FnOnce(*mut c_void) -> Result<()>) -> Result<()> {
    let mut context = gemm_context();
    let handle = match &context.handle {
        Some((handle, _)) => *handle,
        None => {
            let workspace = scratch(device, WORKSPACE_BYTES)?;
            let mut handle = std::ptr::null_mut();
            // SAFETY: the workspace lives as long as the handle.
            check_status("cublasLtCreate", unsafe {
                cublaslt_context_new(
                    pointer(&workspace)?,
                    WORKSPACE_BYTES,
                    context.tf32 as c_int,
                    &mut handle,
                )
            })?;
            context.handle = Some((handle, workspace));
            handle
        }
    };
    body(handle)
}

/// `GemmOperand` in cublaslt.cu.
#[repr(C)]
struct GemmOperand {
    data: *const c_void,
    stride: i64,
    transposed: c_int,
}

/// `GemmArgs` in cublaslt.cu.
#[repr(C)]
struct GemmArgs {
    dtype: c_int,
    out_dtype: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    epilogue: c_int,
    a: GemmOperand,
    b: GemmOperand,
    c: *const c_void,
    d: *mut c_void,
    d_stride: i64,
    bias: *const c_void,
    aux: *mut c_void,
    aux_stride: i64,
}

unsafe extern "C" {
    fn cublaslt_context_new(
        workspace: *mut c_void,
        bytes: usize,
        tf32: c_int,
        out: *mut *mut c_void,
    ) -> c_int;
    fn cublaslt_matmul(context: *mut c_void, args: *const GemmArgs, stream: RawStream) -> c_int;
}
