//! The boundary between candle tensors and CUDA: raw pointers for launchers, uninitialized tensors, copies, and typed
//! launch errors. Launchers themselves are declared in the file of their kernel.
//!
//! All work except the copies of [`staging_buffer`] and [`copy_streams`] runs on the one stream of the tensors' device.
//! A launcher therefore sees what the previous one wrote, and freed memory is reused in stream order.

pub mod column_sums;
pub mod copy_streams;
pub mod cublaslt;
pub mod cudnn;
pub mod graph;
pub mod staging_buffer;

use std::ffi::{c_int, c_void};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DriverError, result, sys, sys::CUresult};
use candle_core::cuda_backend::{CudaDevice, CudaError, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Error, Result, Shape, Storage, Tensor, WithDType, bail};

use super::reference;

/// The `cudaStream_t` that a launcher enqueues on.
pub type RawStream = *mut c_void;

/// The CUDA device of a tensor; `None` for a tensor on another device.
pub fn device_of(tensor: &Tensor) -> Option<&CudaDevice> {
    match tensor.device() {
        Device::Cuda(device) if !reference::is_selected() => Some(device),
        _ => None,
    }
}

pub fn stream(device: &CudaDevice) -> RawStream {
    device.cuda_stream().cu_stream().cast()
}

/// The dtype code that launchers take: `Type` in `cuda/type.h`.
pub fn dtype_code(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F64 => Ok(1),
        DType::BF16 => Ok(2),
        DType::F16 => Ok(3),
        other => bail!("kernels compute in f32, f64, bf16 or f16, not {other:?}"),
    }
}

/// The accumulation dtype of a dtype: kernels compute in it, and gradients and statistics are stored in it.
pub fn acc_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The device pointer to a contiguous tensor's first value. Writes through it are visible in every view of the storage.
pub fn pointer(tensor: &Tensor) -> Result<*mut c_void> {
    let (base, start, _) = buffer(tensor)?;
    Ok((base + start * tensor.dtype().size_in_bytes()) as *mut c_void)
}

/// Number of values from the tensor's first value to the end of the buffer it is a view of.
pub fn capacity(tensor: &Tensor) -> Result<usize> {
    let (_, start, len) = buffer(tensor)?;
    Ok(len - start)
}

/// The buffer's base address, the tensor's offset in it and the buffer's length, the last two in values.
fn buffer(tensor: &Tensor) -> Result<(usize, usize, usize)> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!(
            "a CUDA kernel needs a contiguous tensor: shape {:?}, strides {:?}",
            layout.dims(),
            layout.stride()
        )
    };
    let Storage::Cuda(cuda) = &*storage else { bail!("a CUDA kernel needs a CUDA tensor") };
    macro_rules! by_dtype {
        ($($variant:ident),*) => {
            match &cuda.slice {
                $(CudaStorageSlice::$variant(slice) => (slice.device_ptr(slice.stream()).0, slice.len()),)*
                _ => bail!("a CUDA kernel was given {:?}", cuda.dtype()),
            }
        };
    }
    let (base, len) = by_dtype!(F32, F64, BF16, F16, U32, U8, I64);
    Ok((base as usize, start, len))
}

/// Like [`pointer`], but null for `None`.
pub fn pointer_or_null(tensor: Option<&Tensor>) -> Result<*mut c_void> {
    tensor.map_or(Ok(std::ptr::null_mut()), pointer)
}

/// A tensor with uninitialized memory. The caller must write every value before anything reads it.
pub fn uninit(device: &CudaDevice, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    // The driver rejects allocations of zero bytes.
    let len = shape.elem_count().max(1);
    let stream = device.cuda_stream();
    macro_rules! by_dtype {
        ($($variant:ident: $type:ty),*) => {
            match dtype {
                // SAFETY: the element types are plain numbers, and the caller writes them before they are read.
                $(DType::$variant => CudaStorageSlice::$variant(unsafe { stream.alloc::<$type>(len) }.w()?),)*
                other => bail!("CUDA tensors of {other:?} are not supported"),
            }
        };
    }
    let slice = by_dtype!(F32: f32, F64: f64, BF16: half::bf16, F16: half::f16, U32: u32, U8: u8, I64: i64);
    let storage = Storage::Cuda(CudaStorage { slice, device: device.clone() });
    Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
}

/// Temporary bytes for one launcher. The allocator frees them in stream order.
pub fn scratch(device: &CudaDevice, bytes: usize) -> Result<Tensor> {
    uninit(device, DType::U8, bytes)
}

/// Copies a contiguous tensor into newly allocated memory.
pub fn copy(device: &CudaDevice, from: &Tensor) -> Result<Tensor> {
    let to = uninit(device, from.dtype(), from.shape())?;
    copy_into(device, from, &to)?;
    Ok(to)
}

/// Copies `from` into `to`. Both must be contiguous, with the same dtype and number of values.
pub fn copy_into(device: &CudaDevice, from: &Tensor, to: &Tensor) -> Result<()> {
    if (from.dtype(), from.elem_count()) != (to.dtype(), to.elem_count()) {
        bail!("copy_into: from {:?} {:?} to {:?} {:?}", from.shape(), from.dtype(), to.shape(), to.dtype())
    }
    let bytes = from.elem_count() * from.dtype().size_in_bytes();
    if bytes > 0 {
        let (from, to, stream) = (pointer(from)? as u64, pointer(to)? as u64, device.cuda_stream());
        // SAFETY: both tensors hold `bytes` bytes, and the stream orders this copy after their writes and before their
        // frees.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.w()?;
    }
    Ok(())
}

/// Copies the first `width` values of each row. The row pitch is `from_pitch` values in `from` and `to_pitch` in `to`;
/// the row count is that of `to`.
pub fn copy_rows(
    device: &CudaDevice,
    from: &Tensor,
    from_pitch: usize,
    to: &Tensor,
    to_pitch: usize,
    width: usize,
) -> Result<()> {
    let rows = to.elem_count() / to_pitch.max(1);
    if rows == 0 || width == 0 {
        return Ok(());
    }
    if from.dtype() != to.dtype() || width > from_pitch.min(to_pitch) || from.elem_count() < rows * from_pitch
    {
        bail!("{width} values of each row of {:?} into {:?}", from.shape(), to.shape())
    }
    let size = from.dtype().size_in_bytes();
    let device_memory = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device_memory,
        srcHost: std::ptr::null(),
        srcDevice: pointer(from)? as u64,
        srcArray: std::ptr::null_mut(),
        srcPitch: from_pitch * size,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device_memory,
        dstHost: std::ptr::null_mut(),
        dstDevice: pointer(to)? as u64,
        dstArray: std::ptr::null_mut(),
        dstPitch: to_pitch * size,
        WidthInBytes: width * size,
        Height: rows,
    };
    // SAFETY: both tensors hold `rows` rows, and the stream orders this copy after their writes and before their frees.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, device.cuda_stream().cu_stream()) }.result().w()
}

/// Turns a launcher's return code into a `Result`.
pub fn check_status(kernel: &'static str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Error::Cuda(Box::new(LaunchError { kernel, code }))),
    }
}

/// A CUDA kernel launch that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the CUDA kernel `{kernel}` was refused with error code {code}")]
pub struct LaunchError {
    pub kernel: &'static str,
    pub code: c_int,
}

impl LaunchError {
    /// `cudaErrorMemoryAllocation`, which is also the driver's `CUDA_ERROR_OUT_OF_MEMORY`.
    const OUT_OF_MEMORY: c_int = 2;
    /// Codes from here on are cuBLAS's status (`CUBLAS_ERRORS` in cublaslt.cu).
    const CUBLAS: c_int = 10_000;
    const CUBLAS_ALLOC_FAILED: c_int = Self::CUBLAS + 3;
    /// Codes from here on are those of cuDNN's front end (`ERRORS` in with_cudnn.h).
    const CUDNN: c_int = 20_000;

    /// Whether cuDNN reported it.
    pub fn is_cudnn(&self) -> bool {
        self.code >= Self::CUDNN
    }
}

/// The failed launch that caused an error, if one did.
pub fn launch_error(error: &Error) -> Option<&LaunchError> {
    match error {
        Error::Cuda(inner) => inner.downcast_ref::<LaunchError>(),
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } | Error::WithPath { inner, .. } => {
            launch_error(inner)
        }
        Error::WrappedContext { wrapped, .. } => wrapped.downcast_ref::<Error>().and_then(launch_error),
        _ => None,
    }
}

/// Whether cuBLAS or cuDNN reported an error.
pub fn is_library_error(error: &Error) -> bool {
    launch_error(error).is_some_and(|launch| launch.code >= LaunchError::CUBLAS)
}

/// Whether the cause of an error is a CUDA out-of-memory error. candle wraps it in several layers, and `Error::source`
/// does not expose any of them.
pub fn is_out_of_memory(error: &Error) -> bool {
    match error {
        Error::Cuda(inner) => {
            let is_oom = |error: &DriverError| error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            if let Some(launch_error) = inner.downcast_ref::<LaunchError>() {
                return [LaunchError::OUT_OF_MEMORY, LaunchError::CUBLAS_ALLOC_FAILED]
                    .contains(&launch_error.code);
            }
            match inner.downcast_ref::<CudaError>() {
                Some(CudaError::Cuda(error) | CudaError::Load { cuda: error, .. }) => is_oom(error),
                _ => inner.downcast_ref::<DriverError>().is_some_and(is_oom),
            }
        }
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } | Error::WithPath { inner, .. } => {
            is_out_of_memory(inner)
        }
        Error::WrappedContext { wrapped, .. } => {
            wrapped.downcast_ref::<Error>().is_some_and(is_out_of_memory)
        }
        _ => false,
    }
}

/// Copies a contiguous tensor to the host. Synchronizes the stream.
pub fn to_host<T: WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
    let Some(device) = device_of(tensor) else { bail!("expected a CUDA tensor") };
    if tensor.dtype() != T::DTYPE {
        bail!("to_host: the tensor is {:?}, not {:?}", tensor.dtype(), T::DTYPE)
    }
    let (stream, mut values) = (device.cuda_stream(), vec![T::zero(); tensor.elem_count()]);
    // SAFETY: both sides hold the same number of values of the same type and live until the stream is synchronized.
    unsafe { result::memcpy_dtoh_async(&mut values, pointer(tensor)? as u64, stream.cu_stream()) }.w()?;
    stream.synchronize().w()?;
    Ok(values)
}

/// Overwrites a contiguous tensor with host values. Synchronizes the stream.
pub fn from_host<T: WithDType>(tensor: &Tensor, values: &[T]) -> Result<()> {
    let Some(device) = device_of(tensor) else { bail!("expected a CUDA tensor") };
    if tensor.dtype() != T::DTYPE || tensor.elem_count() != values.len() {
        bail!("from_host: {} of {:?} into {:?} {:?}", values.len(), T::DTYPE, tensor.shape(), tensor.dtype())
    }
    let stream = device.cuda_stream();
    // SAFETY: as in `to_host`.
    unsafe { result::memcpy_htod_async(pointer(tensor)? as u64, values, stream.cu_stream()) }.w()?;
    stream.synchronize().w()
}
