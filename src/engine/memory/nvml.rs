//! Memory used on a GPU before any context exists, as NVML reports it. Without NVML, nothing is known.

use std::ffi::{CStr, c_int};

use candle_core::cuda_backend::cudarc::driver::{result, sys};
use nvml_wrapper::Nvml;

/// Bytes that all processes and the driver use on the GPU with this driver ordinal.
pub fn used_bytes(ordinal: usize) -> Option<u64> {
    let nvml = Nvml::init().ok()?;
    Some(nvml.device_by_pci_bus_id(pci_bus_id(ordinal)?).ok()?.memory_info().ok()?.used)
}

/// The PCI address of the GPU with this driver ordinal: NVML counts GPUs in another order.
fn pci_bus_id(ordinal: usize) -> Option<String> {
    let device = result::device::get(ordinal as c_int).ok()?;
    let mut text = [0u8; 32];
    // SAFETY: the buffer is one byte longer than stated and zeroed, so the result is NUL-terminated.
    let status =
        unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as c_int - 1, device) };
    status.result().ok()?;
    Some(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.to_owned())
}
