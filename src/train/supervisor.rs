//! The process above the one that works: it waits, passes signals on, and starts another when the kernel
//! killed the worker or an allocation aborted it.
//!
//! Neither can be caught from inside. The supervisor opens no data and holds no tensors, so it is not what
//! the kernel looks for. It takes the folder of the run, gives the exit code of the last worker, and refuses
//! to go on after `memory.max_retries` deaths in a row that brought no new checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Names the environment variable in which a worker finds its [`Orders`].
const ORDERS: &str = "TRAINER_ORDERS";

/// What a worker is told by its supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The supervisor's process id.
    supervisor: u32,
    /// Folder of the run.
    pub folder: PathBuf,
    /// Go on with the run there, if there is one.
    pub resume: bool,
    pub restart: Option<Restart>,
}

/// Why there is another worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// Workers lost so far.
    pub restarts: u32,
    /// How the last one was.
    pub cause: String,
    /// Bytes to stay within, where what the last one needed is known.
    pub most_ram: Option<u64>,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Code(i32),
    Signal(i32),
}

/// What comes after a worker's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Leave with this exit code.
    Leave(i32),
    /// Tell of a signal that has nothing to do with memory.
    Tell(i32),
    Restart,
    GiveUp,
}

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

/// Decides. `asked`: the exit code that a signal passed on to the worker stands for; `deaths`: those in a row
/// before this one, without a new checkpoint.
pub fn next(end: End, asked: Option<i32>, deaths: u32, max_retries: u32) -> Next {
    match (end, asked) {
        (End::Code(code), _) => Next::Leave(code),
        (End::Signal(_), Some(code)) => Next::Leave(code),
        (End::Signal(SIGKILL | SIGABRT), None) if deaths < max_retries => Next::Restart,
        (End::Signal(SIGKILL | SIGABRT), None) => Next::GiveUp,
        (End::Signal(signal), None) => Next::Tell(signal),
    }
}

/// Bytes for the next worker after one died that planned to use `peak`.
pub fn less(peak: u64) -> u64 {
    peak / 4 * 3
}

/// How long to wait before another worker starts after so many died in a row: who takes the memory may be done
/// soon.
pub fn pause(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        n => Duration::from_millis(250 << (n - 2).min(7)),
    }
}

/// What happened, in people's words. `oom_kills`: processes the kernel killed for memory meanwhile, where known.
fn cause(signal: i32, oom_kills: Option<u64>) -> &'static str {
    match (signal, oom_kills) {
        (SIGABRT, _) => "aborted (an allocation failed)",
        (_, Some(1..)) => "killed by the kernel, which ran out of memory",
        _ => "killed (by the kernel's memory killer, or `kill -9`)",
    }
}

#[cfg(target_os = "linux")]
pub use linux::supervise;

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};
    use std::time::Instant;

    use rustix::process::{Pid, Signal as Number, getppid, kill_process, set_parent_process_death_signal};
    use signal_hook::consts::SIGCHLD;

    use super::*;
    use crate::memory::Plan;
    use crate::memory::ledger::Holder;
    use crate::report::{Events, Reporter, Summary};
    use crate::train::Failure;
    use crate::train::checkpoint::Checkpoints;
    use crate::train::event::Event;
    use crate::train::folder::Folder;
    use crate::train::postmortem::PostMortem;
    use crate::train::run::describe;
    use crate::train::signals::{Signal, stopping};

    impl Orders {
        /// The orders of this process, if it is a worker; from here on it dies with its supervisor.
        pub fn received() -> io::Result<Option<Self>> {
            let Ok(text) = std::env::var(ORDERS) else { return Ok(None) };
            let orders: Orders = serde_json::from_str(&text)?;
            set_parent_process_death_signal(Some(Number::KILL))?;
            // The supervisor may have died before that took effect.
            match getppid().map(|pid| pid.as_raw_nonzero().get() as u32) == Some(orders.supervisor) {
                true => Ok(Some(orders)),
                false => Err(io::Error::other("the supervisor of this process is gone")),
            }
        }
    }

    /// Has this very command done by workers, and gives the exit code of the last.
    pub fn supervise(folder: &Folder, resume: bool, max_retries: u32) -> Result<i32, Failure> {
        let program = std::env::current_exe().map_err(Failure::io("find", "this program"))?;
        let start = |restart: Option<Restart>| {
            let resume = resume || restart.is_some();
            let orders =
                Orders { supervisor: std::process::id(), folder: folder.root.clone(), resume, restart };
            let text = serde_json::to_string(&orders).map_err(io::Error::from);
            let mut command = Command::new(&program);
            text.and_then(|text| command.args(std::env::args_os().skip(1)).env(ORDERS, text).spawn())
                .map_err(Failure::io("start", &program))
        };
        let newest = || Checkpoints::new(folder.checkpoints()).steps().first().copied();
        let mut signals = signal_hook::iterator::Signals::new(stopping().into_iter().chain([SIGCHLD]))
            .map_err(Failure::io("watch the signals of", &program))?;
        let (mut restart, mut restarts, mut deaths, mut checkpoint) = (None, 0, Vec::new(), newest());
        loop {
            let before = oom_kills();
            let mut child = start(restart.take())?;
            let (end, asked) = wait(&mut child, &mut signals).map_err(Failure::io("wait for", &program))?;
            if newest() > checkpoint {
                (checkpoint, deaths) = (newest(), Vec::new());
            }
            let (signal, next) = match (end, next(end, asked, deaths.len() as u32, max_retries)) {
                (_, Next::Leave(code)) => return Ok(code),
                (_, Next::Tell(signal)) => return Err(Failure::Signal(signal)),
                (End::Signal(signal), next) => (signal, next),
                (End::Code(code), _) => return Ok(code),
            };
            let killed = oom_kills().zip(before).map(|(now, before)| now.saturating_sub(before));
            let cause = cause(signal, killed).to_owned();
            deaths.push(cause.clone());
            let plan = plan(folder);
            if next == Next::GiveUp {
                let failure = Failure::Killed { deaths };
                bury(folder, &failure, plan, checkpoint.unwrap_or(0));
                return Err(failure);
            }
            let most_ram = plan.map(|plan| less(plan.peak.ram_bytes));
            if let Some(signal) = rest(pause(deaths.len() as u32), &mut signals) {
                return Ok(signal.code());
            }
            restarts += 1;
            restart = Some(Restart { restarts, cause, most_ram });
        }
    }

    /// Waits for a worker's end and passes signals on; also gives the exit code the last of them stands for.
    fn wait(
        child: &mut Child,
        signals: &mut signal_hook::iterator::Signals,
    ) -> io::Result<(End, Option<i32>)> {
        let mut asked = None;
        for number in signals.forever() {
            if number == SIGCHLD {
                if let Some(status) = child.try_wait()? {
                    let signal = status.signal().map(End::Signal);
                    return Ok((signal.unwrap_or(End::Code(status.code().unwrap_or(1))), asked));
                }
                continue;
            }
            let signal = Signal::of(number);
            asked = Some(signal.code());
            if let Some(number) = Number::from_named_raw(signal.passed_on()) {
                // One that has just ended, and is not yet waited for, hears nothing.
                let _ = kill_process(Pid::from_child(child), number);
            }
        }
        Err(io::Error::other("the signals ended"))
    }

    /// Waits, unless a signal asks to stop.
    fn rest(pause: Duration, signals: &mut signal_hook::iterator::Signals) -> Option<Signal> {
        let until = Instant::now() + pause;
        loop {
            if let Some(number) = signals.pending().find(|number| *number != SIGCHLD) {
                return Some(Signal::of(number));
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Processes the kernel has killed for lack of memory since the machine started, in any group.
    fn oom_kills() -> Option<u64> {
        let text = std::fs::read_to_string("/proc/vmstat").ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())
    }

    /// The plan of the worker that died, where it got so far.
    fn plan(folder: &Folder) -> Option<Plan> {
        serde_json::from_slice(&std::fs::read(folder.plan()).ok()?).ok()
    }

    /// Leaves in the folder what can be said of a run that is given up. Best effort: the failure itself is
    /// the caller's to tell.
    fn bury(folder: &Folder, failure: &Failure, plan: Option<Plan>, step: u64) {
        let Failure::Killed { deaths } = failure else { return };
        let error = describe(failure);
        let live = plan.iter().flat_map(|plan| &plan.parts);
        let live = live.map(|p| Holder { role: p.role, name: p.name.as_str().into(), bytes: p.bytes });
        let post = PostMortem {
            error: error.clone(),
            budget_bytes: plan.as_ref().map_or(0, |plan| plan.budget.ram_bytes),
            live: live.collect(),
            deaths: deaths.clone(),
            ..PostMortem::default()
        };
        let _ = post.write(folder);
        if let Ok(events) = Events::open(&folder.events()) {
            let mut reporter = Reporter::default().truth(events);
            let _ = reporter.record(Event::Failed { step, error }).and_then(|()| reporter.finish());
            let _ = Summary::from_events(&folder.events()).and_then(|s| s.write(&folder.summary()));
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl Orders {
    /// Elsewhere there are no workers.
    pub fn received() -> std::io::Result<Option<Self>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_deaths_by_memory_that_nobody_asked_for_bring_another_worker() {
        assert_eq!(next(End::Code(5), None, 0, 8), Next::Leave(5));
        assert_eq!(next(End::Signal(9), None, 7, 8), Next::Restart);
        assert_eq!(next(End::Signal(6), None, 8, 8), Next::GiveUp);
        assert_eq!(next(End::Signal(9), None, 0, 0), Next::GiveUp);
        assert_eq!(next(End::Signal(11), None, 0, 8), Next::Tell(11));
        // Stopped before it could listen.
        assert_eq!(next(End::Signal(10), Some(130), 0, 8), Next::Leave(130));
        assert_eq!(next(End::Signal(9), Some(143), 0, 8), Next::Leave(143));
    }

    proptest! {
        #[test]
        fn each_worker_has_less_than_the_one_before(peak in 1u64..1 << 50) {
            prop_assert!(less(peak) < peak && less(peak) >= (peak / 2).saturating_sub(3));
        }

        #[test]
        fn the_first_is_replaced_at_once_and_later_ones_after_a_while(deaths in 1u32..100) {
            prop_assert_eq!(pause(1), Duration::ZERO);
            prop_assert!(pause(deaths) <= pause(deaths + 1) && pause(deaths) <= Duration::from_secs(32));
        }
    }

    #[test]
    fn the_message_says_what_is_known() {
        assert!(cause(9, Some(1)).contains("by the kernel,"));
        assert!(cause(9, Some(0)).contains("or `kill -9`") && cause(9, None).contains("or `kill -9`"));
        assert!(cause(6, Some(1)).contains("allocation"));
    }
}
