//! What is used of a card before anybody has a context on it: the management library's word, loaded when it is
//! asked for. Where there is none, nothing is known.

use std::ffi::{CStr, c_char, c_int, c_void};

/// Memory of a card in bytes, as the library has it.
#[repr(C)]
#[derive(Default)]
struct NvmlMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// Bytes that all processes and the driver use of the card at this PCI address.
pub fn used_bytes(pci_bus_id: &CStr) -> Option<u64> {
    type Init = unsafe extern "C" fn() -> c_int;
    type Handle = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Info = unsafe extern "C" fn(*mut c_void, *mut NvmlMemory) -> c_int;
    const RTLD_NOW: c_int = 2;
    // SAFETY: the signatures are those of the library's first and second interface, which it keeps; names are C
    // strings, and what is written to is there. The library stays loaded: others in the process may use it.
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

/// The PCI address of a card, by the driver's number.
pub fn pci_bus_id(ordinal: usize) -> Option<std::ffi::CString> {
    use candle_core::cuda_backend::cudarc::driver::{result, sys};
    let device = result::device::get(ordinal as c_int).ok()?;
    let mut text = [0u8; 32];
    // SAFETY: the buffer is as long as it says, and is ended by the zeros it began with.
    let status =
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as c_int - 1, device) };
    status.result().ok()?;
    CStr::from_bytes_until_nul(&text).ok().map(CStr::to_owned)
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}
