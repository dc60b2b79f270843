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
    pub by_kill: bool,
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
        #[cfg(unix)]
        if self.by_kill {
            use rustix::process::{Signal, getpid, kill_process};
            // Does not return where it works, and an abort is next best.
            let _ = kill_process(getpid(), Signal::KILL);
        }
        std::process::abort()
    }
}

impl FromStr for Death {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || format!("`{text}` is neither `kill:STEP` nor `abort:STEP`");
        let (how, step) = text.split_once(':').ok_or_else(allowed)?;
        let step = step.parse().map_err(|_| allowed())?;
        match how {
            "kill" => Ok(Self { step, by_kill: true }),
            "abort" => Ok(Self { step, by_kill: false }),
            _ => Err(allowed()),
        }
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
        assert_eq!("kill:3".parse(), Ok(Death { step: 3, by_kill: true }));
        assert_eq!("abort:0".parse(), Ok(Death { step: 0, by_kill: false }));
        assert!(["", "kill", "kill:", "stab:3"].iter().all(|text| text.parse::<Death>().is_err()));
    }
}
