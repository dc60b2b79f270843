//! Catches panics and returns them as errors, without printing them.
//!
//! Some file readers panic on damaged files, and a bug of ours must end a run with an error message, not with a
//! backtrace in the middle of its output. The panic hook prints before anyone can catch, so it is silenced on a thread
//! while such code runs.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Nesting depth of [`catch_panic`] on this thread.
    static CATCH_DEPTH: Cell<u32> = const { Cell::new(0) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`; returns the message and location of a panic as an error.
pub fn catch_panic<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    static INSTALL_HOOK: Once = Once::new();
    INSTALL_HOOK.call_once(|| {
        let previous_hook = take_hook();
        set_hook(Box::new(move |panic| match CATCH_DEPTH.get() {
            0 => previous_hook(panic),
            _ => LAST_PANIC.set(panic_message(panic)),
        }));
    });
    CATCH_DEPTH.set(CATCH_DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(body));
    CATCH_DEPTH.set(CATCH_DEPTH.get() - 1);
    result.map_err(|_| LAST_PANIC.take())
}

fn panic_message(panic: &PanicHookInfo) -> String {
    let text = panic.payload_as_str().unwrap_or("no message");
    panic.location().map_or_else(|| text.to_owned(), |place| format!("{text} ({place})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_what_it_says() {
        assert_eq!(catch_panic(|| 3), Ok(3));
        let message = catch_panic(|| -> () { panic!("no {}", 7) }).unwrap_err();
        assert!(message.starts_with("no 7 (src") && message.contains("panics.rs:"), "{message}");
        let nested = catch_panic(|| catch_panic(|| -> () { panic!("inner") }).unwrap_err()).unwrap();
        assert!(nested.starts_with("inner"), "{nested}");
        assert_eq!(CATCH_DEPTH.get(), 0);
    }
}
