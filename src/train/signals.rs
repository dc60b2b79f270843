//! SIGINT, SIGTERM and SIGHUP: the first asks the run to stop after the current update; a second of the same kind
//! ends the process, as does the first before the run has begun.
//!
//! A worker obeys only its supervisor. A terminal or a batch system signals the whole process group, so both
//! processes receive the signal, and it must count once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Placeholders for platforms without these signals; nothing registers them there.
#[cfg(not(unix))]
const SIGHUP: i32 = 1;
#[cfg(not(unix))]
const SIGUSR1: i32 = 10;
#[cfg(not(unix))]
const SIGUSR2: i32 = 12;

/// A request to stop the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    /// SIGTERM, or SIGHUP: the terminal closed.
    Terminate,
}

impl Signal {
    pub fn name(self) -> &'static str {
        match self {
            Signal::Interrupt => "SIGINT",
            Signal::Terminate => "SIGTERM",
        }
    }

    /// The request that a received signal stands for.
    pub fn from_number(number: i32) -> Self {
        if number == SIGINT { Signal::Interrupt } else { Signal::Terminate }
    }

    /// The signal a supervisor forwards the request with.
    pub fn forwarded_number(self) -> i32 {
        match self {
            Signal::Interrupt => SIGUSR1,
            Signal::Terminate => SIGUSR2,
        }
    }

    /// Exit code of a run that this request stopped.
    pub fn exit_code(self) -> i32 {
        128 + if self == Signal::Interrupt { SIGINT } else { SIGTERM }
    }
}

/// Whose signals a process obeys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalSource {
    Anyone,
    Supervisor,
}

/// What a process writes to stderr when a signal ends it at once; whole lines.
#[derive(Clone, Debug, Default)]
pub struct ExitMessages {
    /// Before the run has begun, so that there is nothing to finish.
    pub starting: String,
    /// When a second signal ends it.
    pub running: String,
}

/// Signals received. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    state: Arc<SignalState>,
}

#[derive(Debug, Default)]
struct SignalState {
    /// Exit code of the last request; 0 if there was none.
    received: AtomicUsize,
    /// The run has begun: the first signal lets it finish the update.
    begun: AtomicBool,
}

impl Signals {
    /// Starts watching the process's signals. Until [`begin`](Self::begin), the first one ends the process.
    pub fn watch(source: SignalSource, messages: ExitMessages) -> io::Result<Self> {
        let (signals, messages) = (Self::default(), Arc::new(messages));
        for number in stop_signals() {
            let signal = Signal::from_number(number);
            match source {
                SignalSource::Anyone => signals.register(number, signal, &messages)?,
                SignalSource::Supervisor => {
                    signal_hook::flag::register(number, Arc::new(AtomicBool::new(false)))?;
                }
            }
        }
        if source == SignalSource::Supervisor {
            for signal in [Signal::Interrupt, Signal::Terminate] {
                signals.register(signal.forwarded_number(), signal, &messages)?;
            }
        }
        Ok(signals)
    }

    fn register(&self, number: i32, signal: Signal, messages: &Arc<ExitMessages>) -> io::Result<()> {
        let (state, messages, code) = (self.state.clone(), messages.clone(), signal.exit_code());
        let seen = AtomicBool::new(false);
        let handler = move || {
            let begun = state.begun.load(Ordering::Relaxed);
            if begun && !seen.swap(true, Ordering::Relaxed) {
                return state.received.store(code as usize, Ordering::Relaxed);
            }
            write_to_stderr(if begun { &messages.running } else { &messages.starting });
            signal_hook::low_level::exit(code);
        };
        // SAFETY: the handler is async-signal-safe: it uses atomics, `write` and `_exit`, and allocates nothing.
        unsafe { signal_hook::low_level::register(number, handler) }?;
        Ok(())
    }

    /// The run has begun: from now on the first signal is a request, and the second of its kind ends the process.
    pub fn begin(&self) {
        self.state.begun.store(true, Ordering::Relaxed);
    }

    /// Acts as if the signal had been received.
    #[cfg(test)]
    pub fn request(&self, signal: Signal) {
        self.state.received.store(signal.exit_code() as usize, Ordering::Relaxed);
    }

    /// The stop request received, if any.
    pub fn stop_requested(&self) -> Option<Signal> {
        let code = self.state.received.load(Ordering::Relaxed) as i32;
        [Signal::Interrupt, Signal::Terminate].into_iter().find(|signal| signal.exit_code() == code)
    }
}

/// Writes without a lock or a buffer, as a signal handler must.
fn write_to_stderr(text: &str) {
    #[cfg(unix)]
    // SAFETY: the descriptor is only used for this call; if it is closed, the write fails.
    let _ = rustix::io::write(unsafe { std::os::fd::BorrowedFd::borrow_raw(2) }, text.as_bytes());
    #[cfg(not(unix))]
    let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
}

/// Name of a signal that can end a process.
pub fn name(number: i32) -> String {
    let names = [
        (3, "SIGQUIT"),
        (4, "SIGILL"),
        (6, "SIGABRT, an abort"),
        (7, "SIGBUS, as when a mapped file is cut short"),
        (8, "SIGFPE"),
        (9, "SIGKILL"),
        (11, "SIGSEGV, a fault in memory"),
        (31, "SIGSYS"),
    ];
    let known = names.iter().find(|(n, _)| cfg!(target_os = "linux") && *n == number);
    known.map_or_else(|| format!("signal {number}"), |(_, name)| (*name).to_owned())
}

/// A write beyond `RLIMIT_FSIZE` raises SIGXFSZ, which ends the process unless it is handled. With a handler the
/// write fails instead, as on a full disk.
pub fn ignore_sigxfsz() {
    #[cfg(unix)]
    drop(signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false))));
}

/// The signals that ask a run to stop. `nohup` makes its children ignore SIGHUP, and the run respects that.
pub fn stop_signals() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let hangup = (cfg!(unix) && !ignores(&status, SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM].into_iter().chain(hangup).collect()
}

/// Whether a process ignores a signal, from the text of its `/proc/self/status`.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        let status = "Name:\tx\nSigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, SIGHUP) && !ignores(status, SIGINT));
        assert!(!ignores("SigIgn:\t0000000000000000\n", SIGHUP) && !ignores("", SIGHUP));
    }
}
