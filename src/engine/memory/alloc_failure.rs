//! A failed allocation that the program cannot survive: exits with an error message.
//!
//! Rust aborts in that case, and nothing may be allocated from then on. So a SIGABRT handler catches the abort and
//! builds the message on the stack.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of the last allocation that failed; 0 if none did.
static FAILED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Records a failed allocation. The caller may be able to continue without it.
pub fn record(bytes: usize) {
    FAILED_BYTES.store(bytes, Relaxed);
}

/// From now on, an abort caused by a failed allocation ends the process with this exit code and a message on stderr.
/// Other aborts are unaffected.
#[cfg(unix)]
pub fn exit_on_alloc_abort(code: i32) -> std::io::Result<()> {
    let end = move || {
        let bytes = FAILED_BYTES.load(Relaxed);
        if bytes > 0 {
            write_message(bytes);
            signal_hook::low_level::exit(code);
        }
    };
    // SAFETY: the handler only reads an atomic, writes to a file descriptor and exits, which are async-signal-safe.
    unsafe { signal_hook::low_level::register(signal_hook::consts::SIGABRT, end) }.map(drop)
}

#[cfg(not(unix))]
pub fn end_with(_: i32) -> std::io::Result<()> {
    Ok(())
}

#[cfg(unix)]
fn write_message(bytes: usize) {
    unsafe extern "C" {
        fn write(file: i32, bytes: *const u8, count: usize) -> isize;
    }
    let mut digits = [0; 20];
    let mut first = digits.len();
    let mut rest = bytes;
    while rest > 0 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    for part in [
        b"error: out of memory: the system refused ".as_slice(),
        &digits[first..],
        b" bytes\n  hint: raise the limit on memory (`trainer probe` says which binds), or lower `memory.ram`\n",
    ] {
        // SAFETY: the pointer is valid for `part.len()` bytes. If stderr is closed, the message is lost.
        let _ = unsafe { write(2, part.as_ptr(), part.len()) };
    }
}
