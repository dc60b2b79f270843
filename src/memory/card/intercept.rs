//! The driver's stream-ordered allocation, served from our heaps.
//!
//! candle and cudarc allocate by `cuMemAllocAsync` and free by `cuMemFreeAsync`, and have no other door for an allocator. The
//! linker takes these two definitions before the driver library's, so each call of this program arrives here: one of a
//! stream that has a heap is served from it, every other goes to the driver. Libraries of NVIDIA's load the driver by
//! themselves and are not affected.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

use super::chunks::Chunks;
use crate::memory::heap::{Heap, Refusal};

static HEAPS: Mutex<Vec<Registered>> = Mutex::new(Vec::new());
static REFUSAL: Mutex<Option<Refusal>> = Mutex::new(None);

struct Registered {
    /// Of whose allocations it is; none once its device is gone, and only tensors remain.
    stream: Option<usize>,
    heap: Arc<Mutex<Heap<Chunks>>>,
}

/// Allocations of this stream are the heap's from here on.
pub fn register(stream: &CudaStream, heap: &Arc<Mutex<Heap<Chunks>>>) {
    lock(&HEAPS).push(Registered { stream: Some(stream.cu_stream() as usize), heap: heap.clone() });
}

/// Lets go of a heap whose device is gone, at the latest when the last of its tensors is.
pub fn retire(heap: &Arc<Mutex<Heap<Chunks>>>) {
    let mut heaps = lock(&HEAPS);
    heaps.iter_mut().filter(|one| Arc::ptr_eq(&one.heap, heap)).for_each(|one| one.stream = None);
    heaps.retain(|one| one.stream.is_some() || lock(&one.heap).used() > 0);
}

/// The last refusal, once.
pub fn refusal() -> Option<Refusal> {
    lock(&REFUSAL).take()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cuMemAllocAsync(
    pointer: *mut sys::CUdeviceptr,
    bytes: usize,
    stream: sys::CUstream,
) -> sys::CUresult {
    let heaps = lock(&HEAPS);
    let Some(one) = heaps.iter().find(|one| one.stream == Some(stream as usize)) else {
        drop(heaps);
        type Allocate = unsafe extern "C" fn(*mut sys::CUdeviceptr, usize, sys::CUstream) -> sys::CUresult;
        static DRIVERS: OnceLock<Option<usize>> = OnceLock::new();
        let Some(function) = DRIVERS.get_or_init(|| drivers(c"cuMemAllocAsync")) else {
            return sys::CUresult::CUDA_ERROR_NOT_FOUND;
        };
        // SAFETY: the driver's function of this name and type, with the arguments it was meant to have.
        return unsafe { std::mem::transmute::<usize, Allocate>(*function)(pointer, bytes, stream) };
    };
    match lock(&one.heap).allocate(bytes as u64) {
        Ok(at) => {
            // SAFETY: the caller's pointer is there to be written to.
            unsafe { *pointer = at };
            sys::CUresult::CUDA_SUCCESS
        }
        Err(refusal) => {
            *lock(&REFUSAL) = Some(refusal);
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
        }
    }
}

/// # Safety
/// As the driver's.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cuMemFreeAsync(pointer: sys::CUdeviceptr, stream: sys::CUstream) -> sys::CUresult {
    let mut heaps = lock(&HEAPS);
    if heaps.iter().any(|one| lock(&one.heap).free(pointer)) {
        heaps.retain(|one| one.stream.is_some() || lock(&one.heap).used() > 0);
        return sys::CUresult::CUDA_SUCCESS;
    }
    drop(heaps);
    type Free = unsafe extern "C" fn(sys::CUdeviceptr, sys::CUstream) -> sys::CUresult;
    static DRIVERS: OnceLock<Option<usize>> = OnceLock::new();
    let Some(function) = DRIVERS.get_or_init(|| drivers(c"cuMemFreeAsync")) else {
        return sys::CUresult::CUDA_ERROR_NOT_FOUND;
    };
    // SAFETY: as above.
    unsafe { std::mem::transmute::<usize, Free>(*function)(pointer, stream) }
}

/// The driver's own function of this name, as CUDA 11.2 introduced it.
fn drivers(name: &CStr) -> Option<usize> {
    let mut function: *mut c_void = std::ptr::null_mut();
    // SAFETY: the name is a C string, and the result is written to a local.
    let code =
        unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &mut function, 11020, 0, std::ptr::null_mut()) };
    (code == sys::CUresult::CUDA_SUCCESS && !function.is_null()).then_some(function as usize)
}
