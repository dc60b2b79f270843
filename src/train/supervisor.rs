//! The process above the one that works: it waits, passes signals on, and starts another when the worker was
//! killed or an allocation aborted it.
//!
//! Neither can be caught from inside. Where the kernel's own counters say that it killed for lack of memory, or an
//! allocation was refused, the next worker has less; after a `kill -9` it has the same plan. Any other end, as by a
//! fault in memory or an overflow of the stack, would come again: it is told. The supervisor opens no data and holds
//! no tensors, so it is not what the kernel looks for. It takes the folder of the run, gives the exit code of the
//! last worker, and refuses to go on after `memory.max_retries` deaths in a row that brought no new checkpoint.

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
    /// Where to note that the system refused an allocation: a file descriptor.
    refusals: i32,
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

/// Decides. `asked`: the exit code that a signal passed on to the worker stands for; `seen`: what else is known of
/// this death; `deaths`: those in a row before this one, without a new checkpoint.
pub fn next(end: End, asked: Option<i32>, seen: Seen, deaths: u32, max_retries: u32) -> Next {
    let comes_again = match end {
        End::Signal(SIGKILL) => false,
        End::Signal(SIGABRT) => !seen.refused,
        _ => true,
    };
    match (end, asked) {
        (End::Code(code), _) => Next::Leave(code),
        (End::Signal(_), Some(code)) => Next::Leave(code),
        (End::Signal(signal), None) if comes_again => Next::Tell(signal),
        (End::Signal(_), None) if deaths < max_retries => Next::Restart,
        (End::Signal(_), None) => Next::GiveUp,
    }
}

/// What is known of a worker's death beside its signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Processes that the kernel killed for lack of memory meanwhile, where it says.
    pub oom_kills: Option<u64>,
    /// The system refused the worker an allocation.
    pub refused: bool,
}

impl Seen {
    /// Whether a worker that this signal ended lacked memory. Where nobody knows, it may have.
    pub fn is_memory(self, signal: i32) -> bool {
        signal == SIGABRT || self.oom_kills != Some(0)
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

/// What happened, in people's words.
fn cause(signal: i32, seen: Seen) -> &'static str {
    match (signal, seen.oom_kills) {
        (SIGABRT, _) => "aborted (an allocation failed)",
        (_, Some(0)) => "killed, not by the kernel's memory killer but by `kill -9`",
        (_, Some(_)) => "killed by the kernel, which ran out of memory",
        (_, None) => "killed (by the kernel's memory killer, or `kill -9`)",
    }
}

#[cfg(target_os = "linux")]
pub use linux::supervise;

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{self, Read};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};
    use std::time::Instant;

    use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
    use rustix::process::{Pid, Signal as Number, getppid, kill_process, set_parent_process_death_signal};
    use signal_hook::consts::SIGCHLD;

    use super::*;
    use crate::memory::Plan;
    use crate::memory::ledger::Holder;
    use crate::memory::measure::note_refusals_at;
    use crate::memory::probe::oom_kills;
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
            // SAFETY: the supervisor left it open for this process alone, which takes it here, once.
            let refusals = unsafe { OwnedFd::from_raw_fd(orders.refusals) };
            fcntl_setfd(&refusals, FdFlags::CLOEXEC)?;
            note_refusals_at(refusals);
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
            let (resume, supervisor) = (resume || restart.is_some(), std::process::id());
            let started = || {
                let (read, write) = io::pipe()?;
                fcntl_setfd(&write, FdFlags::empty())?;
                // Whoever lacks memory must not wait, and neither must who looks for the note.
                ioctl_fionbio(&read, true)?;
                ioctl_fionbio(&write, true)?;
                let (folder, refusals) = (folder.root.clone(), write.as_raw_fd());
                let orders = Orders { supervisor, folder, resume, restart, refusals };
                let mut command = Command::new(&program);
                command.args(std::env::args_os().skip(1)).env(ORDERS, serde_json::to_string(&orders)?);
                Ok((command.spawn()?, read))
            };
            started().map_err(Failure::io("start", &program))
        };
        let newest = || Checkpoints::new(folder.checkpoints()).done().next();
        let mut signals = signal_hook::iterator::Signals::new(stopping().into_iter().chain([SIGCHLD]))
            .map_err(Failure::io("watch the signals of", &program))?;
        let (mut restart, mut restarts, mut deaths, mut checkpoint) = (None, 0, Vec::new(), newest());
        let mut lacked_memory = false;
        loop {
            let before = oom_kills();
            let (mut child, mut refusals) = start(restart.take())?;
            let (end, asked) = wait(&mut child, &mut signals).map_err(Failure::io("wait for", &program))?;
            let killed = oom_kills().zip(before).map(|(now, before)| now.saturating_sub(before));
            let refused = refusals.read(&mut [0]).is_ok_and(|bytes| bytes > 0);
            let seen = Seen { oom_kills: killed, refused };
            if newest() > checkpoint {
                (checkpoint, deaths) = (newest(), Vec::new());
            }
            let (signal, next) = match (end, next(end, asked, seen, deaths.len() as u32, max_retries)) {
                (_, Next::Leave(code)) => return Ok(code),
                (End::Code(code), _) => return Ok(code),
                (End::Signal(signal), next) => (signal, next),
            };
            let plan = plan(folder);
            let step = checkpoint.unwrap_or(0);
            if let Next::Tell(signal) = next {
                let failure = Failure::Signal { signal, deaths: 1 };
                bury(folder, &failure, plan, step);
                return Err(failure);
            }
            let memory = seen.is_memory(signal);
            lacked_memory = memory || lacked_memory && !deaths.is_empty();
            let cause = cause(signal, seen).to_owned();
            deaths.push(cause.clone());
            if next == Next::GiveUp {
                let failure = match lacked_memory {
                    true => Failure::Killed { deaths },
                    false => Failure::Signal { signal, deaths: deaths.len() },
                };
                bury(folder, &failure, plan, step);
                return Err(failure);
            }
            let most_ram = plan.filter(|_| memory).map(|plan| less(plan.peak.ram_bytes));
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

    /// The plan of the worker that died, where it got so far.
    fn plan(folder: &Folder) -> Option<Plan> {
        serde_json::from_slice(&std::fs::read(folder.plan()).ok()?).ok()
    }

    /// Leaves in the folder what can be said of a run that is given up. Best effort: the failure itself is
    /// the caller's to tell.
    fn bury(folder: &Folder, failure: &Failure, plan: Option<Plan>, step: u64) {
        let error = describe(failure);
        if let Failure::Killed { deaths } = failure {
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
        }
        if !folder.root.exists() {
            return;
        }
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

    const REFUSED: Seen = Seen { oom_kills: Some(0), refused: true };
    const UNKNOWN: Seen = Seen { oom_kills: None, refused: false };

    #[test]
    fn only_deaths_that_need_not_come_again_bring_another_worker() {
        assert_eq!(next(End::Code(5), None, UNKNOWN, 0, 8), Next::Leave(5));
        assert_eq!(next(End::Signal(9), None, UNKNOWN, 7, 8), Next::Restart);
        assert_eq!(next(End::Signal(6), None, REFUSED, 7, 8), Next::Restart);
        assert_eq!(next(End::Signal(6), None, REFUSED, 8, 8), Next::GiveUp);
        assert_eq!(next(End::Signal(9), None, UNKNOWN, 0, 0), Next::GiveUp);
        // An abort, as after an overflow of the stack, and a fault in memory.
        assert_eq!(next(End::Signal(6), None, UNKNOWN, 0, 8), Next::Tell(6));
        assert_eq!(next(End::Signal(11), None, REFUSED, 0, 8), Next::Tell(11));
        // Stopped before it could listen.
        assert_eq!(next(End::Signal(10), Some(130), UNKNOWN, 0, 8), Next::Leave(130));
        assert_eq!(next(End::Signal(9), Some(143), UNKNOWN, 0, 8), Next::Leave(143));
    }

    #[test]
    fn only_a_lack_of_memory_makes_the_next_worker_smaller() {
        let killed = |oom_kills| Seen { oom_kills, refused: false }.is_memory(SIGKILL);
        assert_eq!([killed(Some(1)), killed(None), killed(Some(0))], [true, true, false]);
        assert!(REFUSED.is_memory(SIGABRT));
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
        let killed = |oom_kills| cause(9, Seen { oom_kills, refused: false });
        assert!(killed(Some(1)).contains("by the kernel,"));
        assert!(killed(Some(0)).contains("but by `kill -9`") && killed(None).contains("or `kill -9`"));
        assert!(cause(6, REFUSED).contains("allocation"));
    }
}
