//! A child process that must not outlive its parent, however that ends: the kernel kills it.
//!
//! The parent passes its pid; the child requests the signal from the kernel. Elsewhere than on Linux nothing happens.

use std::process::Command;

/// Environment variable that carries the pid of the parent.
const PARENT_VAR: &str = "TRAINER_PARENT";

/// Makes the command's process end with this one, if it calls [`end_with_parent`]. The kernel watches the thread that
/// starts it: that must be the main thread.
pub fn end_with_this_process(command: &mut Command) {
    command.env(PARENT_VAR, std::process::id().to_string());
}

/// Ends this process with its parent, if the parent asked for that.
#[cfg(target_os = "linux")]
pub fn end_with_parent() -> std::io::Result<()> {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    let Ok(parent) = std::env::var(PARENT_VAR) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before the signal was set.
    match getppid().is_some_and(|pid| pid.as_raw_nonzero().to_string() == parent) {
        true => Ok(()),
        false => Err(std::io::Error::other("the process that started this one is gone")),
    }
}

#[cfg(not(target_os = "linux"))]
pub fn end_with_parent() -> std::io::Result<()> {
    Ok(())
}
