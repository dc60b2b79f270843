//! Panics that are caught and told as errors, and do not print themselves.
//!
//! Some libraries that read files panic on damaged ones, and a bug of ours must end one run with a sentence and not
//! with a trace of the stack in the middle of it. The panic hook, which prints before anybody can catch, is kept
//! quiet on a thread for as long as it runs such code.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// How many calls of [`caught`] this thread is in.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`; a panic becomes what it says and where.
pub fn caught<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| match INSIDE.get() {
            0 => others(panic),
            _ => LAST.set(described(panic)),
        }));
    });
    INSIDE.set(INSIDE.get() + 1);
    let ran = catch_unwind(AssertUnwindSafe(body));
    INSIDE.set(INSIDE.get() - 1);
    ran.map_err(|_| LAST.take())
}

fn described(panic: &PanicHookInfo) -> String {
    let text = panic.payload_as_str().unwrap_or("no message");
    panic.location().map_or_else(|| text.to_owned(), |place| format!("{text} ({place})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_what_it_says() {
        assert_eq!(caught(|| 3), Ok(3));
        let told = caught(|| -> () { panic!("no {}", 7) }).unwrap_err();
        assert!(told.starts_with("no 7 (src") && told.contains("caught.rs:"), "{told}");
        let nested = caught(|| caught(|| -> () { panic!("inner") }).unwrap_err()).unwrap();
        assert!(nested.starts_with("inner"), "{nested}");
        assert_eq!(INSIDE.get(), 0);
    }
}
