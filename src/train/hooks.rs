//! Disturbances on purpose, so that recovery can be tested anywhere. Hidden from users; documented in
//! `docs/contributing.md`.

use std::str::FromStr;

/// What is done to a run that nobody asked for.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    /// How each process that works on the run ends, the first by the first.
    pub deaths: Vec<Death>,
    /// Bytes that are allocated and held without being asked for.
    pub unasked: usize,
}

/// A process's end before it makes the update after `step`: `kill:12`, `abort:12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    pub step: u64,
    pub by: By,
}

/// How a process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Kill,
    Abort,
    /// An allocation that the system refuses.
    Allocation,
    /// Of the stack.
    Overflow,
}

impl Hooks {
    /// Ends the process, where this is the place for the one started after `restarts` others.
    pub fn die(&self, restarts: u32, step: u64) {
        match self.deaths.get(restarts as usize) {
            Some(death) if death.step == step => death.now(),
            _ => {}
        }
    }
}

impl Death {
    fn now(self) {
        match self.by {
            #[cfg(unix)]
            By::Kill => {
                use rustix::process::{Signal, getpid, kill_process};
                // Does not return where it works, and an abort is next best.
                let _ = kill_process(getpid(), Signal::KILL);
            }
            By::Allocation => drop(std::hint::black_box(Vec::<u8>::with_capacity(isize::MAX as usize))),
            By::Overflow => println!("{}", overflow(0)),
            _ => {}
        }
        std::process::abort()
    }
}

/// Goes deeper than any stack.
fn overflow(depth: u64) -> u64 {
    let frame = std::hint::black_box([depth; 512]);
    if depth == u64::MAX { 0 } else { overflow(depth + 1) + frame[(depth % 512) as usize] }
}

impl FromStr for Death {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed =
            || format!("`{text}` is none of `kill:STEP`, `abort:STEP`, `alloc:STEP` and `overflow:STEP`");
        let (how, step) = text.split_once(':').ok_or_else(allowed)?;
        let step = step.parse().map_err(|_| allowed())?;
        let by = match how {
            "kill" => By::Kill,
            "abort" => By::Abort,
            "alloc" => By::Allocation,
            "overflow" => By::Overflow,
            _ => return Err(allowed()),
        };
        Ok(Self { step, by })
    }
}

/// One death a process, by commas.
pub struct Deaths(pub Vec<Death>);

impl FromStr for Deaths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deaths_parse() {
        assert_eq!("kill:3".parse(), Ok(Death { step: 3, by: By::Kill }));
        assert_eq!("abort:0".parse(), Ok(Death { step: 0, by: By::Abort }));
        assert!(["", "kill", "kill:", "stab:3"].iter().all(|text| text.parse::<Death>().is_err()));
    }
}
