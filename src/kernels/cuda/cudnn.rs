//! Whether cuDNN is there. It is loaded when it is first asked for, from where the system's loader finds
//! `libcudnn.so.9`; kernels that would use it have bodies of their own for where it is not.

use std::ffi::c_int;

/// The version of the library, 90700 for 9.7.0; none where it is not installed or the crate was built without it.
pub fn version() -> Option<c_int> {
    // SAFETY: takes nothing, and may be called from any thread.
    Some(unsafe { cudnn_available() }).filter(|version| *version != 0)
}

unsafe extern "C" {
    fn cudnn_available() -> c_int;
}
