//! `trainer fit`: train a job.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;

use super::{Common, Exit, JobFile, Stop, plan, start_threads};
use crate::job::Job;
use crate::memory::pressure::Watch;
use crate::memory::{budget, probe, refusal};
use crate::report::{Events, Metrics, Reporter, Stream, Summary, TensorBoard, Terminal};
use crate::train::folder::{Folder, Wish};
use crate::train::hooks::{Deaths, Hooks};
use crate::train::owner::Owner;
use crate::train::run::{Ended, Options};
use crate::train::setup::Setup;
use crate::train::signals::{Heard, Signal, Signals};
use crate::train::supervisor::Orders;
use crate::train::{self, Failure};
use crate::units::Bytes;

/// Train a job
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer fit job.toml
  trainer fit job.toml --set optimizer.lr=3e-4 --set train.steps=1000
  trainer fit job.toml --run-dir runs/first
  trainer fit job.toml --run-dir runs/first --resume     continue where it stopped, or begin
  trainer fit job.toml --frozen                          only with the plan in job.lock
  trainer fit job.toml --json > events.jsonl")]
pub struct Fit {
    #[command(flatten)]
    pub job: JobFile,
    /// Continue the run in RUN, else in --run-dir, else the one of the job's name that was last active
    #[arg(long, value_name = "RUN", num_args = 0..=1, value_hint = clap::ValueHint::DirPath)]
    pub resume: Option<Option<PathBuf>>,
    /// Stop, with a checkpoint, after this many updates of the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// The folder of this very run [default: runs/NAME/TIMESTAMP]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub run_dir: Option<PathBuf>,
    /// Print the memory plan and stop, as `trainer plan` does
    #[arg(long)]
    pub dry_run: bool,
    /// Resume on data that is not what the run was trained on
    #[arg(long)]
    pub allow_changed_data: bool,
    #[command(flatten)]
    pub locking: plan::Locking,
}

impl Fit {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let job = common.job(&self.job.path)?;
        let orders = Orders::received()?;
        if orders.is_none() {
            // A worker's abort tells its supervisor to start another with less memory.
            refusal::end_with(Exit::Memory.code().into())?;
        }
        // What the lock says was heeded by the process that gave the orders.
        if self.dry_run || self.locking.any() && orders.is_none() {
            start_threads()?;
            let machine = plan::here(&job, common)?;
            let setup = Setup::open(job.clone(), machine.ram, &common.opening())?.measured();
            let planned = setup.plan_for(&machine);
            self.locking.heed(&self.job.path, &setup, &machine, &planned)?;
            if self.dry_run {
                return plan::show(&planned, false, common);
            }
        }
        // A worker has its supervisor's lock.
        let owned = if orders.is_none() { Some(self.own(&job)?) } else { None };
        #[cfg(target_os = "linux")]
        if job.memory.supervise
            && let Some((folder, owner)) = &owned
        {
            owner.share()?;
            let code = train::supervisor::supervise(folder, self.resume.is_some(), job.memory.max_retries)?;
            return Ok(Exit::Worker(code as u8));
        }
        let run_dir = owned.as_ref().map(|(folder, _)| folder.root.clone());
        start_threads()?;
        let (wish, heard, restart) = match orders {
            None => {
                let resume = self.resume.is_some().then_some(None);
                (Wish { run_dir, resume }, Heard::FromAnyone, None)
            }
            Some(orders) => {
                let resume = orders.resume.then_some(None);
                (Wish { run_dir: Some(orders.folder), resume }, Heard::FromSupervisor, orders.restart)
            }
        };
        let options = Options {
            wish,
            runs: PathBuf::from(RUNS),
            stamp: stamp(),
            max_steps: self.max_steps,
            ram: budget::host(&job.memory, &probe::host()?),
            card: common.card(&job.memory)?,
            own_process: true,
            opening: common.opening(),
            fault: hook("TRAINER_FAULT_ASK")?,
            signals: Signals::watch(heard)?,
            watch: match std::env::var_os("TRAINER_FAULT_PRESSURE") {
                Some(file) => Watch::File(file.into()),
                None => Watch::System(None),
            },
            data: None,
            allow_changed_data: self.allow_changed_data,
            observer: None,
            restart,
            hooks: Hooks {
                deaths: hook("TRAINER_FAULT_DIE")?.map_or_else(Vec::new, |Deaths(deaths)| deaths),
                unasked: hook("TRAINER_FAULT_UNASKED")?.map_or(0, |Bytes(bytes)| bytes as usize),
            },
        };
        let tensorboard = job.log.tensorboard;
        let look = common.look(io::stderr().is_terminal());
        let json = common.json;
        let report = |folder: &Folder, resumed: bool| {
            let history = match resumed && folder.events().exists() {
                true => Summary::from_events(&folder.events())?,
                false => Summary::default(),
            };
            let mut reporter = Reporter::default().truth(Events::open(&folder.events())?);
            reporter = reporter.view(Metrics::open(&folder.metrics())?);
            if tensorboard {
                reporter = reporter.view(TensorBoard::new(&folder.tensorboard()));
            }
            reporter = reporter.view(Terminal::new(io::stderr(), look, history));
            Ok(if json { reporter.view(Stream(io::stdout())) } else { reporter })
        };
        // On a thread of the pool, so that a kernel hands work to its neighbours instead of waking a pool.
        let ended = rayon::scope(|_| train::run::fit(job, options, report));
        match ended {
            Ok(Ended::Done) => Ok(Exit::Done),
            Ok(Ended::Stopped(Signal::Interrupt)) => Ok(Exit::Sigint),
            Ok(Ended::Stopped(Signal::Terminate)) => Ok(Exit::Sigterm),
            Err(Failure::DoesNotFit(plan)) => {
                plan::print(&plan, common)?;
                Err(Failure::DoesNotFit(plan).into())
            }
            Err(failure) => Err(failure.into()),
        }
    }
}

impl Fit {
    /// The folder of the run, and the sole right to work on it.
    fn own(&self, job: &Job) -> Result<(Folder, Owner), Failure> {
        let wish = Wish { run_dir: self.run_dir.clone(), resume: self.resume.clone() };
        loop {
            let (folder, _) = Folder::choose(&wish, job, Path::new(RUNS), &stamp())?;
            match Owner::of(&folder) {
                // Another process began in the same second; the next name is free.
                Err(Failure::Locked { .. }) if wish.run_dir.is_none() && wish.resume.is_none() => {}
                owner => return Ok((folder, owner?)),
            }
        }
    }
}

/// Where runs go that are not given a folder.
const RUNS: &str = "runs";

/// Names a new run by the time it begins.
fn stamp() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}

/// A disturbance on purpose that an environment variable asks for, for tests of recovery.
fn hook<T: FromStr<Err: Display>>(name: &str) -> anyhow::Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    let wrong = |error| Stop::usage(format!("`{name}` is wrong: {error}"), "unset it: it is for tests");
    Ok(Some(text.parse().map_err(wrong)?))
}
