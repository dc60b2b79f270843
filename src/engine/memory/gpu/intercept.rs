//! Intercepts the driver's stream-ordered allocator and serves it from our heaps.
//!
//! candle and cudarc allocate with `cuMemAllocAsync`, free with `cuMemFreeAsync`, and offer no allocator hook. The
//! linker resolves both symbols to the definitions here before the driver library's, so every call of this program
//! arrives here. A call on a stream with a registered heap is served from the heap; every other call goes to the
//! driver. NVIDIA's own libraries load the driver themselves and are not affected.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};

use super::chunks::MappedChunks;
use crate::memory::device_heap::{DeviceHeap, HeapOom};

static HEAPS: Mutex<Vec<RegisteredHeap>> = Mutex::new(Vec::new());
static LAST_OOM: Mutex<Option<HeapOom>> = Mutex::new(None);

struct RegisteredHeap {
    /// The stream whose allocations the heap serves; `None` once the device is dropped and only tensors remain.
    stream: Option<usize>,
    heap: Arc<Mutex<DeviceHeap<MappedChunks>>>,
}

/// From now on, the heap serves the allocations of this stream.
pub fn register(stream: &CudaStream, heap: &Arc<Mutex<DeviceHeap<MappedChunks>>>) {
    lock(&HEAPS).push(RegisteredHeap { stream: Some(stream.cu_stream() as usize), heap: heap.clone() });
}

/// Unregisters the heap of a dropped device; it is released with its last tensor at the latest.
pub fn unregister(heap: &Arc<Mutex<DeviceHeap<MappedChunks>>>) {
    let mut heaps = lock(&HEAPS);
    heaps.iter_mut().filter(|one| Arc::ptr_eq(&one.heap, heap)).for_each(|one| one.stream = None);
    heaps.retain(|one| one.stream.is_some() || lock(&one.heap).used_bytes() > 0);
}

/// The last allocation failure; clears it.
pub fn take_last_oom() -> Option<HeapOom> {
    lock(&LAST_OOM).take()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// Same contract as the driver's function.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cuMemAllocAsync(
    pointer: *mut sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> sys::CUresult {
    let heaps = lock(&HEAPS);
    let Some(registered) = heaps.iter().find(|one| one.stream == Some(stream as usize)) else {
        drop(heaps);
        type Allocate = unsafe extern "C" fn(*mut sys::CUdeviceptr, usize, sys::CUstream) -> sys::CUresult;
        static DRIVER_FN: OnceLock<Option<usize>> = OnceLock::new();
        let Some(function) = DRIVER_FN.get_or_init(|| driver_fn(c"cuMemAllocAsync")) else {
            return sys::CUresult::CUDA_ERROR_NOT_FOUND;
        };
        // SAFETY: `function` is the driver's function of this name and type; the arguments are passed on unchanged.
        let code = unsafe { std::mem::transmute::<usize, Allocate>(*function)(pointer, bytes, stream) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let available = result::mem_get_info().map_or(0, |(free, _)| free as u64);
            *lock(&LAST_OOM) = Some(HeapOom { bytes: bytes as u64, available });
        }
        return code;
    };
    match lock(&registered.heap).allocate(bytes as u64) {
        Ok(at) => {
            // SAFETY: the caller's pointer is valid for writes, by the contract of this function.
            unsafe { *pointer = at };
            sys::CUresult::CUDA_SUCCESS
        }
        Err(oom) => {
            *lock(&LAST_OOM) = Some(oom);
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
        }
    }
}

/// # Safety
/// Same contract as the driver's function.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cuMemFreeAsync(pointer: sys::CUdeviceptr, stream: sys::CUstream) -> sys::CUresult {
    let mut heaps = lock(&HEAPS);
    if heaps.iter().any(|one| lock(&one.heap).free(pointer)) {
        heaps.retain(|one| one.stream.is_some() || lock(&one.heap).used_bytes() > 0);
        return sys::CUresult::CUDA_SUCCESS;
    }
    drop(heaps);
    type Free = unsafe extern "C" fn(sys::CUdeviceptr, sys::CUstream) -> sys::CUresult;
    static DRIVER_FN: OnceLock<Option<usize>> = OnceLock::new();
    let Some(function) = DRIVER_FN.get_or_init(|| driver_fn(c"cuMemFreeAsync")) else {
        return sys::CUresult::CUDA_ERROR_NOT_FOUND;
    };
    // SAFETY: as in `cuMemAllocAsync`.
    unsafe { std::mem::transmute::<usize, Free>(*function)(pointer, stream) }
}

/// The driver's own function of this name, in the ABI version of CUDA 11.2.
fn driver_fn(name: &CStr) -> Option<usize> {
    let mut function: *mut c_void = std::ptr::null_mut();
    // SAFETY: the name is a C string, and the result is written to a local.
    let code =
        unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut function, 11020, 0, std::ptr::null_mut()) };
    (code == sys::CUresult::CUDA_SUCCESS && !function.is_null()).then_some(function as usize)
}
