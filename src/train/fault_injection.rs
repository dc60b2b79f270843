//! Disturbances on purpose, so that recovery can be tested anywhere. Hidden from users; documented in
//! `docs/contributing.md`.

use std::str::FromStr;

/// What is done to a run that nobody asked for.
#[derive(Clone, Debug, Default)]
pub struct FaultHooks {
    /// How each process that works on the run ends, the first by the first.
    pub crashes: Vec<InjectedCrash>,
    /// Bytes that are allocated and held without being asked for.
    pub unreserved_bytes: usize,
}

/// A process's end before it makes the update after `step`: `kill:12`, `abort:12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedCrash {
    pub step: u64,
    pub kind: CrashKind,
}

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKind {
    Kill,
    Abort,
    /// An allocation that the system refuses.
    AllocFailure,
    /// Of the stack.
    StackOverflow,
}

impl FaultHooks {
    /// Ends the process, where this is the place for the one started after `restarts` others.
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
                // Does not return where it works, and an abort is next best.
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

/// Goes deeper than any stack.
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

/// One death a process, by commas.
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
