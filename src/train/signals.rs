//! SIGINT and SIGTERM: the first asks the run to stop after the update in hand, the second ends it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

/// A signal that asks a run to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    Terminate,
}

impl Signal {
    pub fn name(self) -> &'static str {
        match self {
            Signal::Interrupt => "SIGINT",
            Signal::Terminate => "SIGTERM",
        }
    }
}

/// What signals were seen. Clones see the same.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    seen: Arc<AtomicUsize>,
}

impl Signals {
    /// Watches the process's signals from here on.
    pub fn watch() -> io::Result<Self> {
        let signals = Self::default();
        for signal in [SIGINT, SIGTERM] {
            // In this order: the shutdown looks at the flag before this very signal raises it.
            let again = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
            signal_hook::flag::register(signal, again)?;
            signal_hook::flag::register_usize(signal, signals.seen.clone(), signal as usize)?;
        }
        Ok(signals)
    }

    /// The signal that asked the run to stop, if one did.
    pub fn stop(&self) -> Option<Signal> {
        match self.seen.load(Ordering::Relaxed) as i32 {
            SIGINT => Some(Signal::Interrupt),
            SIGTERM => Some(Signal::Terminate),
            _ => None,
        }
    }
}
