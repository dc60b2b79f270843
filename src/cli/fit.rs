//! `trainer fit`: train a job.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;

use super::{CliError, CommonArgs, Exit, JobFile, plan, start_threads};
use crate::base::units::Bytes;
use crate::events::{EventLog, JsonStream, MetricsLog, Reporter, Summary};
use crate::job::Job;
use crate::memory::pressure::PressureMonitor;
use crate::memory::{alloc_failure, probe};
use crate::planner::budget;
use crate::report::{TensorBoard, Terminal};
use crate::train::fault_injection::{FaultHooks, InjectedCrashes};
use crate::train::run::{RunOptions, RunOutcome};
use crate::train::run_dir::{RequestedRun, RunDir};
use crate::train::run_lock::RunLock;
use crate::train::setup::Setup;
use crate::train::signals::{Signal, SignalSource, Signals};
use crate::train::supervisor::WorkerOrders;
use crate::train::{self, Failure};

/// Train a job
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer fit job.toml
  trainer fit job.toml --set optimizer.lr=3e-4 --set train.steps=1000
  trainer fit job.toml --run-dir runs/first
  trainer fit job.toml --run-dir runs/first --resume     resume it, or start it
  trainer fit job.toml --frozen                          only with the plan in job.lock
  trainer fit job.toml --json > events.jsonl")]
pub struct FitArgs {
    #[command(flatten)]
    pub job: JobFile,
    /// Resume the run in RUN, or in --run-dir, or the last active run of the job's name
    #[arg(long, value_name = "RUN", num_args = 0..=1, value_hint = clap::ValueHint::DirPath)]
    pub resume: Option<Option<PathBuf>>,
    /// Stop, with a checkpoint, after this many updates in total
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// Folder of the run [default: runs/NAME/TIMESTAMP]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub run_dir: Option<PathBuf>,
    /// Print the memory plan and stop, as `trainer plan` does
    #[arg(long)]
    pub dry_run: bool,
    /// Resume although the data changed since the run was trained on it
    #[arg(long)]
    pub allow_changed_data: bool,
    #[command(flatten)]
    pub locking: plan::LockArgs,
}

impl FitArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let job = common.load_job(&self.job.path)?;
        let orders = WorkerOrders::from_env()?;
        if orders.is_none() {
            // A worker must abort on a failed allocation: the abort makes its supervisor start another with less
            // memory.
            alloc_failure::exit_on_alloc_abort(Exit::Memory.code().into())?;
        }
        // The supervisor already applied the lock before it started this worker.
        if self.dry_run || self.locking.is_requested() && orders.is_none() {
            start_threads()?;
            let machine = plan::local_machine(&job, common)?;
            let setup =
                Setup::open(job.clone(), machine.ram, &common.open_options())?.with_process_measured();
            let planned = setup.plan_for(&machine);
            self.locking.apply(&self.job.path, &setup, &machine, &planned)?;
            if self.dry_run {
                return plan::print_plan(&planned, false, common);
            }
        }
        // A worker inherits its supervisor's lock.
        let run_lock = if orders.is_none() { Some(self.acquire_run_dir(&job)?) } else { None };
        #[cfg(target_os = "linux")]
        if job.memory.supervise
            && let Some((folder, owner)) = &run_lock
        {
            owner.share_with_children()?;
            let code = train::supervisor::supervise(folder, self.resume.is_some(), job.memory.max_retries)?;
            return Ok(Exit::Worker(code as u8));
        }
        let run_dir = run_lock.as_ref().map(|(folder, _)| folder.root.clone());
        start_threads()?;
        let (requested, signal_source, restart) = match orders {
            None => {
                let resume = self.resume.is_some().then_some(None);
                (RequestedRun { run_dir, resume }, SignalSource::Anyone, None)
            }
            Some(orders) => {
                let resume = orders.resume.then_some(None);
                (
                    RequestedRun { run_dir: Some(orders.folder), resume },
                    SignalSource::Supervisor,
                    orders.restart,
                )
            }
        };
        let options = RunOptions {
            requested,
            runs: PathBuf::from(RUNS_DIR),
            stamp: timestamp(),
            max_steps: self.max_steps,
            ram: budget::host(&job.memory, &probe::host()?),
            gpu: common.open_gpu(&job.memory)?,
            reference: common.uses_reference(),
            own_process: true,
            opening: common.open_options(),
            injected_oom: fault_from_env("TRAINER_FAULT_OOM")?,
            signals: Signals::watch(signal_source)?,
            pressure_monitor: match std::env::var_os("TRAINER_FAULT_PRESSURE") {
                Some(file) => PressureMonitor::File(file.into()),
                None => PressureMonitor::System(None),
            },
            data: None,
            allow_changed_data: self.allow_changed_data,
            observer: None,
            restart,
            fault_hooks: FaultHooks {
                crashes: fault_from_env("TRAINER_FAULT_CRASH")?
                    .map_or_else(Vec::new, |InjectedCrashes(crashes)| crashes),
                unreserved_bytes: fault_from_env("TRAINER_FAULT_UNRESERVED")?
                    .map_or(0, |Bytes(bytes)| bytes as usize),
            },
        };
        let tensorboard = job.log.tensorboard;
        let display = common.display_options(io::stderr().is_terminal());
        let json = common.json;
        let make_reporter = |folder: &RunDir, resumed: bool| {
            let history = match resumed && folder.events().exists() {
                true => Summary::from_events(&folder.events())?,
                false => Summary::default(),
            };
            let mut reporter = Reporter::default().with_required(EventLog::open(&folder.events())?);
            reporter = reporter.with_optional(MetricsLog::open(&folder.metrics())?);
            if tensorboard {
                reporter = reporter.with_optional(TensorBoard::new(&folder.tensorboard()));
            }
            reporter = reporter.with_optional(Terminal::new(io::stderr(), display, history));
            Ok(if json { reporter.with_optional(JsonStream(io::stdout())) } else { reporter })
        };
        // Run on a pool thread, so that a kernel hands work to the other workers instead of waking the pool from
        // outside.
        let outcome = rayon::scope(|_| train::run::fit(job, options, make_reporter));
        match outcome {
            Ok(RunOutcome::Done) => Ok(Exit::Done),
            Ok(RunOutcome::Stopped(Signal::Interrupt)) => Ok(Exit::Sigint),
            Ok(RunOutcome::Stopped(Signal::Terminate)) => Ok(Exit::Sigterm),
            Err(Failure::DoesNotFit(plan)) => {
                plan::eprint_plan(&plan, common)?;
                Err(Failure::DoesNotFit(plan).into())
            }
            Err(failure) => Err(failure.into()),
        }
    }
}

impl FitArgs {
    /// The run directory, and the exclusive lock on it.
    fn acquire_run_dir(&self, job: &Job) -> Result<(RunDir, RunLock), Failure> {
        let requested = RequestedRun { run_dir: self.run_dir.clone(), resume: self.resume.clone() };
        loop {
            let (folder, _) = RunDir::resolve(&requested, job, Path::new(RUNS_DIR), &timestamp())?;
            match RunLock::acquire(&folder) {
                // Another process started within the same second; the next name is free.
                Err(Failure::Locked { .. }) if requested.run_dir.is_none() && requested.resume.is_none() => {}
                owner => return Ok((folder, owner?)),
            }
        }
    }
}

/// Parent directory of runs without `--run-dir`.
const RUNS_DIR: &str = "runs";

/// Names a new run by its start time.
fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}

/// A fault to inject, read from an environment variable, for tests of recovery.
fn fault_from_env<T: FromStr<Err: Display>>(name: &str) -> anyhow::Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    let invalid = |error| CliError::usage(format!("invalid `{name}`: {error}"), "unset it: it is for tests");
    Ok(Some(text.parse().map_err(invalid)?))
}
