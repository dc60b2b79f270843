//! Memory used on a GPU before any context exists, as NVML reports it. NVML is loaded on demand; without it, nothing is
//! known.

use std::ffi::{CStr, c_char, c_int, c_void};

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
#[derive(Default)]
struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// Bytes that all processes and the driver use on the GPU at this PCI address.
pub fn used_bytes(pci_bus_id: &CStr) -> Option<u64> {
    type Init = unsafe extern "C" fn() -> c_int;
    type Handle = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Info = unsafe extern "C" fn(*mut c_void, *mut NvmlMemory) -> c_int;
    const RTLD_NOW: c_int = 2;
    // SAFETY: the signatures match NVML's stable v1 and v2 APIs; names are C strings, and out-pointers point to locals.
    // The library stays loaded, since others in the process may use it.
    unsafe {
        let library = dlopen(c"libnvidia-ml.so.1".as_ptr(), RTLD_NOW);
        if library.is_null() {
            return None;
        }
        let symbol = |name: &CStr| Some(dlsym(library, name.as_ptr())).filter(|found| !found.is_null());
        let init = std::mem::transmute::<*mut c_void, Init>(symbol(c"nvmlInit_v2")?);
        let handle = std::mem::transmute::<*mut c_void, Handle>(symbol(c"nvmlDeviceGetHandleByPciBusId_v2")?);
        let info = std::mem::transmute::<*mut c_void, Info>(symbol(c"nvmlDeviceGetMemoryInfo")?);
        let (mut device, mut memory) = (std::ptr::null_mut(), NvmlMemory::default());
        let done =
            init() == 0 && handle(pci_bus_id.as_ptr(), &mut device) == 0 && info(device, &mut memory) == 0;
        done.then_some(memory.used)
    }
}

/// The PCI address of the GPU with this driver ordinal.
pub fn pci_bus_id(ordinal: usize) -> Option<std::ffi::CString> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let device = result::device::get(ordinal as c_int).ok()?;
    let mut text = [0u8; 32];
    // SAFETY: the buffer is one byte longer than stated and zeroed, so the result is NUL-terminated.
    let status =
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as c_int - 1, device) };
    status.result().ok()?;
    CStr::from_bytes_until_nul(&text).ok().map(CStr::to_owned)
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}
