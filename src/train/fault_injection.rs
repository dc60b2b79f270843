//! Fault injection for tests of recovery. Hidden from users; documented in `docs/contributing.md`.

use std::str::FromStr;

/// Faults to inject into a run.
#[derive(Clone, Debug, Default)]
pub struct FaultHooks {
    /// How each successive worker process crashes: the first worker by the first entry.
    pub crashes: Vec<InjectedCrash>,
    /// Bytes to allocate and hold without reserving them in the ledger.
    pub unreserved_bytes: usize,
}

/// A crash before the update after `step`: `kill:12`, `abort:12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedCrash {
    pub step: u64,
    pub kind: CrashKind,
}

/// How the process crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKind {
    Kill,
    Abort,
    /// Requests an allocation that the system refuses.
    AllocFailure,
    /// Overflows the stack.
    StackOverflow,
}

impl FaultHooks {
    /// Crashes the process if one is due at `step`; `restarts` is the number of workers before this one.
    pub fn crash_if_due(&self, restarts: u32, step: u64) {
        match self.crashes.get(restarts as usize) {
            Some(crash) if crash.step == step => crash.trigger(),
            _ => {}
        }
    }
}

impl InjectedCrash {
    fn trigger(self) {
        match self.kind {
            #[cfg(unix)]
            CrashKind::Kill => {
                use rustix::process::{Signal, getpid, kill_process};
                // Does not return on success; otherwise the abort below ends the process.
                let _ = kill_process(getpid(), Signal::KILL);
            }
            CrashKind::AllocFailure => {
                drop(std::hint::black_box(Vec::<u8>::with_capacity(isize::MAX as usize)))
            }
            CrashKind::StackOverflow => println!("{}", overflow_stack(0)),
            _ => {}
        }
        std::process::abort()
    }
}

/// Recurses until the stack overflows.
fn overflow_stack(depth: u64) -> u64 {
    let frame = std::hint::black_box([depth; 512]);
    if depth == u64::MAX { 0 } else { overflow_stack(depth + 1) + frame[(depth % 512) as usize] }
}

impl FromStr for InjectedCrash {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed =
            || format!("`{text}` is none of `kill:STEP`, `abort:STEP`, `alloc:STEP` and `overflow:STEP`");
        let (how, step) = text.split_once(':').ok_or_else(allowed)?;
        let step = step.parse().map_err(|_| allowed())?;
        let kind = match how {
            "kill" => CrashKind::Kill,
            "abort" => CrashKind::Abort,
            "alloc" => CrashKind::AllocFailure,
            "overflow" => CrashKind::StackOverflow,
            _ => return Err(allowed()),
        };
        Ok(Self { step, kind })
    }
}

/// Comma-separated crashes, one per process.
pub struct InjectedCrashes(pub Vec<InjectedCrash>);

impl FromStr for InjectedCrashes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crashes_parse() {
        assert_eq!("kill:3".parse(), Ok(InjectedCrash { step: 3, kind: CrashKind::Kill }));
        assert_eq!("abort:0".parse(), Ok(InjectedCrash { step: 0, kind: CrashKind::Abort }));
        assert!(["", "kill", "kill:", "stab:3"].iter().all(|text| text.parse::<InjectedCrash>().is_err()));
    }
}
