//! `trainer fit`: train a job.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;

use super::{Common, Exit, JobFile, Stop, plan};
use crate::report::{Events, Metrics, Reporter, Stream, Summary, TensorBoard, Terminal};
use crate::train::folder::{Folder, Wish};
use crate::train::run::{Ended, Options};
use crate::train::setup::Setup;
use crate::train::signals::{Signal, Signals};
use crate::train::{self, Failure};

/// Train a job
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer fit job.toml
  trainer fit job.toml --set optimizer.lr=3e-4 --set train.steps=1000
  trainer fit job.toml --run-dir runs/first
  trainer fit job.toml --run-dir runs/first --resume     go on where it stopped, or begin
  trainer fit job.toml --frozen                          only with the plan in job.lock
  trainer fit job.toml --json > events.jsonl")]
pub struct Fit {
    #[command(flatten)]
    pub job: JobFile,
    /// Go on with the run in RUN, else in --run-dir, else the newest run of the job's name
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
    #[command(flatten)]
    pub locking: plan::Locking,
}

impl Fit {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let job = common.job(&self.job.path)?;
        let machine = plan::here(&job)?;
        if self.dry_run || self.locking.any() {
            let setup = Setup::new(job.clone(), machine.ram)?;
            let planned = setup.plan_for(&machine);
            self.locking.heed(&self.job.path, &setup, &machine, &planned)?;
            if self.dry_run {
                return plan::show(&planned, false, common);
            }
        }
        let options = Options {
            wish: Wish { run_dir: self.run_dir.clone(), resume: self.resume.clone() },
            runs: PathBuf::from("runs"),
            stamp: jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string(),
            max_steps: self.max_steps,
            ram: machine.ram,
            fault: fault()?,
            signals: Signals::watch()?,
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

/// The ask for memory that `TRAINER_FAULT_ASK` makes fail, for tests of recovery.
fn fault() -> anyhow::Result<Option<u64>> {
    match std::env::var("TRAINER_FAULT_ASK") {
        Err(_) => Ok(None),
        Ok(text) => match text.parse() {
            Ok(n) => Ok(Some(n)),
            Err(_) => {
                Err(Stop::usage("`TRAINER_FAULT_ASK` is not a number", "unset it: it is for tests").into())
            }
        },
    }
}
