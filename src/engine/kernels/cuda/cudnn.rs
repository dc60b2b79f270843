//! Detects cuDNN. The library is loaded on first use, from where the system's loader finds `libcudnn.so.9`. Every
//! kernel that would use it has its own implementation for systems without it.

use std::cell::Cell;
use std::ffi::c_int;

thread_local! {
    static AVOIDED: Cell<bool> = const { Cell::new(false) };
}

/// The library's version, 90700 for 9.7.0; `None` if it is not installed or the crate was built without it.
pub fn version() -> Option<c_int> {
    // SAFETY: the function takes no arguments and is thread-safe.
    Some(unsafe { cudnn_available() }).filter(|version| *version != 0)
}

/// Runs `pass`, in which this thread launches our own kernels where it would use cuDNN.
pub fn without<R>(pass: impl FnOnce() -> R) -> R {
    AVOIDED.set(true);
    let result = pass();
    AVOIDED.set(false);
    result
}

/// Whether kernels may use cuDNN now.
pub fn is_usable() -> bool {
    !AVOIDED.get() && version().is_some()
}

unsafe extern "C" {
    fn cudnn_available() -> c_int;
}
