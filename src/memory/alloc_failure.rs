//! An allocation that the system refuses and nobody can do without: the process ends, with a sentence.
//!
//! Rust aborts then, and by the time it does nothing may be allocated. So the abort is caught where it arrives as a
//! signal, and what is said there is put together on the stack.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of the allocation that was refused last; 0 for none.
static FAILED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Notes an allocation that the system refused. Who asked may do without.
pub fn record(bytes: usize) {
    FAILED_BYTES.store(bytes, Relaxed);
}

/// From here on an abort for lack of memory ends the process with this exit code and a message on stderr. Other aborts
/// stay what they are.
#[cfg(unix)]
pub fn exit_on_alloc_abort(code: i32) -> std::io::Result<()> {
    let end = move || {
        let bytes = FAILED_BYTES.load(Relaxed);
        if bytes > 0 {
            write_message(bytes);
            signal_hook::low_level::exit(code);
        }
    };
    // SAFETY: the handler reads an atomic, writes to a file descriptor and exits, all of which a signal handler may.
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
        // SAFETY: the pointer is to so many bytes. Where stderr is closed there is nobody to be told.
        let _ = unsafe { write(2, part.as_ptr(), part.len()) };
    }
}
