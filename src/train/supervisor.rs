//! Supervises the worker process: waits for it, forwards signals, and starts another if it was killed or a failed
//! allocation aborted it. A process can catch neither from inside.
//!
//! If the kernel's counters show an OOM kill, or an allocation was refused, the next worker gets a smaller budget;
//! after a `kill -9` it gets the same plan. Any other death, such as a segmentation fault or a stack overflow, would
//! happen again: the supervisor reports it. It opens no data and holds no tensors, so the OOM killer does not pick
//! it. Takes the run directory, returns the exit code of the last worker, and gives up after `memory.max_retries`
//! consecutive deaths without a new checkpoint.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Environment variable that carries a worker's [`WorkerOrders`].
const WORKER_ORDERS_VAR: &str = "TRAINER_ORDERS";

/// What the supervisor passes to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerOrders {
    /// Pid of the supervisor.
    supervisor: u32,
    /// Run directory.
    pub folder: PathBuf,
    /// Resume the run there, if there is one.
    pub resume: bool,
    pub restart: Option<RestartInfo>,
    /// File descriptor on which the worker reports that the system refused an allocation.
    failure_fd: i32,
}

/// Why this worker replaces another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestartInfo {
    /// Workers lost so far.
    pub restarts: u32,
    /// How the last one died.
    pub cause: String,
    /// Memory limit in bytes, if the last worker's need is known.
    pub max_ram: Option<u64>,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerExit {
    Code(i32),
    Signal(i32),
}

/// What the supervisor does after a worker ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextAction {
    /// Exit with this code.
    Exit(i32),
    /// Report a signal that has nothing to do with memory.
    ReportSignal(i32),
    Restart,
    GiveUp,
}

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

/// Decides what to do after a worker ends. `requested_code` is the exit code of a signal forwarded to the worker;
/// `evidence` is what else is known of this death; `deaths` counts consecutive deaths before it without a new
/// checkpoint.
pub fn decide(
    end: WorkerExit,
    requested_code: Option<i32>,
    evidence: CrashEvidence,
    deaths: u32,
    max_retries: u32,
) -> NextAction {
    let would_recur = match end {
        WorkerExit::Signal(SIGKILL) => false,
        WorkerExit::Signal(SIGABRT) => !evidence.alloc_failed,
        _ => true,
    };
    match (end, requested_code) {
        (WorkerExit::Code(code), _) => NextAction::Exit(code),
        (WorkerExit::Signal(_), Some(code)) => NextAction::Exit(code),
        (WorkerExit::Signal(signal), None) if would_recur => NextAction::ReportSignal(signal),
        (WorkerExit::Signal(_), None) if deaths < max_retries => NextAction::Restart,
        (WorkerExit::Signal(_), None) => NextAction::GiveUp,
    }
}

/// What is known about a worker's death besides its signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrashEvidence {
    /// OOM kills by the kernel meanwhile, if it reports them.
    pub oom_kills: Option<u64>,
    /// The system refused the worker an allocation.
    pub alloc_failed: bool,
}

impl CrashEvidence {
    /// Whether this signal ended the worker for lack of memory. If unknown, assume so.
    pub fn is_out_of_memory(self, signal: i32) -> bool {
        signal == SIGABRT || self.oom_kills != Some(0)
    }
}

/// Budget in bytes for the next worker, after one died whose plan had this peak.
pub fn reduced_budget(peak: u64) -> u64 {
    peak / 4 * 3
}

/// Delay before the next worker, after this many consecutive deaths: whatever took the memory may finish soon.
pub fn restart_delay(deaths: u32) -> Duration {
    match deaths {
        0 | 1 => Duration::ZERO,
        n => Duration::from_millis(250 << (n - 2).min(7)),
    }
}

/// Describes the death for people.
fn describe_cause(signal: i32, evidence: CrashEvidence) -> &'static str {
    match (signal, evidence.oom_kills) {
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
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Child, Command};
    use std::time::Instant;

    use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
    use rustix::process::{Pid, Signal as Number, getppid, kill_process, set_parent_process_death_signal};
    use signal_hook::consts::SIGCHLD;

    use super::*;
    use crate::events::event::Event;
    use crate::events::{EventLog, Reporter, Summary};
    use crate::memory::ledger::Holder;
    use crate::memory::measure::set_alloc_failure_fd;
    use crate::memory::probe::oom_kills;
    use crate::planner::MemoryPlan;
    use crate::train::Failure;
    use crate::train::checkpoint::Checkpoints;
    use crate::train::postmortem::PostMortem;
    use crate::train::run::error_chain;
    use crate::train::run_dir::RunDir;
    use crate::train::signals::{Signal, stop_signals};

    impl WorkerOrders {
        /// Reads this process's orders if it is a worker. From then on the kernel kills it when its supervisor dies.
        pub fn from_env() -> io::Result<Option<Self>> {
            let Ok(text) = std::env::var(WORKER_ORDERS_VAR) else { return Ok(None) };
            let orders: WorkerOrders = serde_json::from_str(&text)?;
            // SAFETY: the supervisor left this descriptor open for this process alone, which takes ownership here,
            // once.
            let fd = unsafe { OwnedFd::from_raw_fd(orders.failure_fd) };
            fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
            set_alloc_failure_fd(fd);
            set_parent_process_death_signal(Some(Number::KILL))?;
            // The supervisor may have died before the death signal was set.
            match getppid().map(|pid| pid.as_raw_nonzero().get() as u32) == Some(orders.supervisor) {
                true => Ok(Some(orders)),
                false => Err(io::Error::other("the supervisor of this process is gone")),
            }
        }
    }

    /// Runs this same command in workers and returns the exit code of the last.
    pub fn supervise(folder: &RunDir, resume: bool, max_retries: u32) -> Result<i32, Failure> {
        let program = std::env::current_exe().map_err(Failure::io("find", "this program"))?;
        let start = |restart: Option<RestartInfo>| {
            let (resume, supervisor) = (resume || restart.is_some(), std::process::id());
            let started = || {
                let (read, write) = io::pipe()?;
                fcntl_setfd(&write, FdFlags::empty())?;
                // Non-blocking: neither a worker out of memory nor the reader of the pipe may wait.
                ioctl_fionbio(&read, true)?;
                ioctl_fionbio(&write, true)?;
                let (folder, failure_fd) = (folder.root.clone(), write.as_raw_fd());
                let orders = WorkerOrders { supervisor, folder, resume, restart, failure_fd };
                let mut command = Command::new(&program);
                // Messages name the program as the user does.
                if let Some(name) = std::env::args_os().next() {
                    command.arg0(name);
                }
                command
                    .args(std::env::args_os().skip(1))
                    .env(WORKER_ORDERS_VAR, serde_json::to_string(&orders)?);
                Ok((command.spawn()?, read))
            };
            started().map_err(Failure::io("start", &program))
        };
        let newest = || Checkpoints::new(folder.checkpoints()).complete_steps().next();
        let mut signals = signal_hook::iterator::Signals::new(stop_signals().into_iter().chain([SIGCHLD]))
            .map_err(Failure::io("watch the signals of", &program))?;
        let (mut restart, mut restarts, mut deaths, mut checkpoint) = (None, 0, Vec::new(), newest());
        let mut lacked_memory = false;
        loop {
            let before = oom_kills();
            let (mut child, mut failure_pipe) = start(restart.take())?;
            let (end, requested_code) =
                wait_for_worker(&mut child, &mut signals).map_err(Failure::io("wait for", &program))?;
            let killed = oom_kills().zip(before).map(|(now, before)| now.saturating_sub(before));
            let alloc_failed = failure_pipe.read(&mut [0]).is_ok_and(|bytes| bytes > 0);
            let evidence = CrashEvidence { oom_kills: killed, alloc_failed };
            if newest() > checkpoint {
                (checkpoint, deaths) = (newest(), Vec::new());
            }
            let (signal, action) =
                match (end, decide(end, requested_code, evidence, deaths.len() as u32, max_retries)) {
                    (_, NextAction::Exit(code)) => return Ok(code),
                    (WorkerExit::Code(code), _) => return Ok(code),
                    (WorkerExit::Signal(signal), next) => (signal, next),
                };
            let plan = read_plan(folder);
            let step = checkpoint.unwrap_or(0);
            if let NextAction::ReportSignal(signal) = action {
                let failure = Failure::Signal { signal, deaths: 1 };
                write_failure(folder, &failure, plan, step);
                return Err(failure);
            }
            let out_of_memory = evidence.is_out_of_memory(signal);
            lacked_memory = out_of_memory || lacked_memory && !deaths.is_empty();
            let cause = describe_cause(signal, evidence).to_owned();
            deaths.push(cause.clone());
            if action == NextAction::GiveUp {
                let failure = match lacked_memory {
                    true => Failure::Killed { deaths },
                    false => Failure::Signal { signal, deaths: deaths.len() },
                };
                write_failure(folder, &failure, plan, step);
                return Err(failure);
            }
            let max_ram = plan.filter(|_| out_of_memory).map(|plan| reduced_budget(plan.peak.ram_bytes));
            if let Some(signal) = sleep_unless_signalled(restart_delay(deaths.len() as u32), &mut signals) {
                return Ok(signal.exit_code());
            }
            restarts += 1;
            restart = Some(RestartInfo { restarts, cause, max_ram });
        }
    }

    /// Waits for a worker to end and forwards signals. Also returns the exit code of the last signal forwarded.
    fn wait_for_worker(
        child: &mut Child,
        signals: &mut signal_hook::iterator::Signals,
    ) -> io::Result<(WorkerExit, Option<i32>)> {
        let mut requested_code = None;
        for number in signals.forever() {
            if number == SIGCHLD {
                if let Some(status) = child.try_wait()? {
                    let signal = status.signal().map(WorkerExit::Signal);
                    return Ok((
                        signal.unwrap_or(WorkerExit::Code(status.code().unwrap_or(1))),
                        requested_code,
                    ));
                }
                continue;
            }
            let signal = Signal::from_number(number);
            requested_code = Some(signal.exit_code());
            if let Some(number) = Number::from_named_raw(signal.forwarded_number()) {
                // Signalling a worker that has exited but is not yet reaped has no effect.
                let _ = kill_process(Pid::from_child(child), number);
            }
        }
        Err(io::Error::other("the signals ended"))
    }

    /// Sleeps, unless a signal asks to stop.
    fn sleep_unless_signalled(
        delay: Duration,
        signals: &mut signal_hook::iterator::Signals,
    ) -> Option<Signal> {
        let until = Instant::now() + delay;
        loop {
            if let Some(number) = signals.pending().find(|number| *number != SIGCHLD) {
                return Some(Signal::from_number(number));
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The plan of the dead worker, if it got far enough to write one.
    fn read_plan(folder: &RunDir) -> Option<MemoryPlan> {
        serde_json::from_slice(&std::fs::read(folder.plan()).ok()?).ok()
    }

    /// Records the failure of an abandoned run in its directory. Best effort: the caller reports the failure itself.
    fn write_failure(folder: &RunDir, failure: &Failure, plan: Option<MemoryPlan>, step: u64) {
        let error = error_chain(failure);
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
        if let Ok(events) = EventLog::open(&folder.events()) {
            let mut reporter = Reporter::default().with_required(events);
            let _ = reporter.record(Event::Failed { step, error }).and_then(|()| reporter.finish());
            let _ = Summary::from_events(&folder.events()).and_then(|s| s.write(&folder.summary()));
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl WorkerOrders {
    /// Other platforms have no workers.
    pub fn received() -> std::io::Result<Option<Self>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const REFUSED: CrashEvidence = CrashEvidence { oom_kills: Some(0), alloc_failed: true };
    const UNKNOWN: CrashEvidence = CrashEvidence { oom_kills: None, alloc_failed: false };

    #[test]
    fn only_deaths_that_need_not_come_again_bring_another_worker() {
        assert_eq!(decide(WorkerExit::Code(5), None, UNKNOWN, 0, 8), NextAction::Exit(5));
        assert_eq!(decide(WorkerExit::Signal(9), None, UNKNOWN, 7, 8), NextAction::Restart);
        assert_eq!(decide(WorkerExit::Signal(6), None, REFUSED, 7, 8), NextAction::Restart);
        assert_eq!(decide(WorkerExit::Signal(6), None, REFUSED, 8, 8), NextAction::GiveUp);
        assert_eq!(decide(WorkerExit::Signal(9), None, UNKNOWN, 0, 0), NextAction::GiveUp);
        // An abort, as after a stack overflow, and a segmentation fault.
        assert_eq!(decide(WorkerExit::Signal(6), None, UNKNOWN, 0, 8), NextAction::ReportSignal(6));
        assert_eq!(decide(WorkerExit::Signal(11), None, REFUSED, 0, 8), NextAction::ReportSignal(11));
        // Stopped before it installed its signal handlers.
        assert_eq!(decide(WorkerExit::Signal(10), Some(130), UNKNOWN, 0, 8), NextAction::Exit(130));
        assert_eq!(decide(WorkerExit::Signal(9), Some(143), UNKNOWN, 0, 8), NextAction::Exit(143));
    }

    #[test]
    fn only_a_lack_of_memory_makes_the_next_worker_smaller() {
        let killed = |oom_kills| CrashEvidence { oom_kills, alloc_failed: false }.is_out_of_memory(SIGKILL);
        assert_eq!([killed(Some(1)), killed(None), killed(Some(0))], [true, true, false]);
        assert!(REFUSED.is_out_of_memory(SIGABRT));
    }

    proptest! {
        #[test]
        fn each_worker_has_less_than_the_one_before(peak in 1u64..1 << 50) {
            prop_assert!(reduced_budget(peak) < peak && reduced_budget(peak) >= (peak / 2).saturating_sub(3));
        }

        #[test]
        fn the_first_is_replaced_at_once_and_later_ones_after_a_while(deaths in 1u32..100) {
            prop_assert_eq!(restart_delay(1), Duration::ZERO);
            prop_assert!(
                restart_delay(deaths) <= restart_delay(deaths + 1)
                    && restart_delay(deaths) <= Duration::from_secs(32)
            );
        }
    }

    #[test]
    fn the_message_says_what_is_known() {
        let killed = |oom_kills| describe_cause(9, CrashEvidence { oom_kills, alloc_failed: false });
        assert!(killed(Some(1)).contains("by the kernel,"));
        assert!(killed(Some(0)).contains("but by `kill -9`") && killed(None).contains("or `kill -9`"));
        assert!(describe_cause(6, REFUSED).contains("allocation"));
    }
}
