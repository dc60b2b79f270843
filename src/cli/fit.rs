//! `trainer fit`: train a job.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::{CliError, CommonArgs, DeviceArg, Exit, JobFile, plan, report, start_threads};
use crate::base::units::Bytes;
use crate::events::{EventLog, JsonStream, MetricsLog, Reporter, Summary};
use crate::job::{EvalConfig, Job};
use crate::memory::pressure::PressureMonitor;
use crate::memory::{alloc_failure, pressure, probe};
use crate::planner::budget;
use crate::report::{DisplayOptions, Mlflow, TensorBoard, Terminal, html};
use crate::train::fault_injection::{FaultHooks, InjectedCrashes};
use crate::train::run::{RunOptions, RunOutcome};
use crate::train::run_dir::{RequestedRun, RunDir};
use crate::train::run_lock::RunLock;
use crate::train::setup::Setup;
use crate::train::signals::{ExitMessages, Signal, SignalSource, Signals};
use crate::train::supervisor::WorkerOrders;
use crate::train::{self, Failure};

/// Train a job, or resume a run
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer fit job.toml                                   a new run in runs/NAME/TIMESTAMP
  trainer fit job.toml --set optimizer.lr=3e-4           with another learning rate
  trainer fit job.toml --resume                          continue the last run of this job
  trainer fit job.toml --resume --set train.epochs=20    train a finished run for longer
  trainer fit job.toml --run-dir runs/first --resume     in this folder: continue it, or start it
  trainer fit job.toml --frozen                          only with the memory plan in job.lock
  trainer fit job.toml --json > events.jsonl             everything that happens, for a program

Ctrl-C finishes the update and writes a checkpoint; a second Ctrl-C leaves at once. In both cases the run can be \
resumed, and ends with the same weights as if nothing had happened.

A run's folder has checkpoints/, events.jsonl, metrics.jsonl, summary.json, report.html, and tensorboard/.")]
pub struct FitArgs {
    #[command(flatten)]
    pub job: JobFile,
    /// Resume the run in the folder RUN, or in --run-dir, or the last one of this job's name
    #[arg(long, value_name = "RUN", num_args = 0..=1, value_hint = clap::ValueHint::DirPath)]
    pub resume: Option<Option<PathBuf>>,
    /// Stop after this many steps (updates) in total, with a checkpoint; --resume continues
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// Folder to create for the run [default: runs/NAME/TIMESTAMP]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub run_dir: Option<PathBuf>,
    /// Print the memory plan and stop, as `trainer plan` does
    #[arg(long)]
    pub dry_run: bool,
    /// Resume even though the data has changed since
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
            train::parent_death::end_with_parent()?;
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
            let code = train::supervisor::supervise(folder, self.resume.is_some(), job.memory.max_retries);
            // Not in the worker, whose memory is planned.
            if job.log.report && !matches!(code, Ok(code) if code == i32::from(Exit::Usage.code())) {
                write_report(folder, common.quiet);
                if matches!(code, Ok(0)) && !job.eval.prompts.is_empty() {
                    write_texts(folder, &job.eval, common);
                    write_report(folder, common.quiet);
                }
            }
            return Ok(Exit::Worker(code? as u8));
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
        let display = common.display_options(io::stderr().is_terminal());
        let signals = Signals::watch(signal_source, self.exit_messages(common, display, &requested))?;
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
            signals: signals.clone(),
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
        let (logged, report) = (job.clone(), job.log.report);
        let json = common.json;
        let make_reporter = |folder: &RunDir, resumed: bool| {
            let history = match resumed && folder.events().exists() {
                true => Summary::from_events(&folder.events())?,
                false => Summary::default(),
            };
            let mut reporter = Reporter::default().with_required(EventLog::open(&folder.events())?);
            reporter = reporter.with_optional(MetricsLog::open(&folder.metrics())?);
            if logged.log.tensorboard {
                let mut tensorboard = TensorBoard::new(&folder.tensorboard()).with_hparams(&logged);
                tensorboard.read_evaluations(folder.evaluation());
                reporter = reporter.with_optional(tensorboard);
            }
            if let Some(uri) = &logged.log.mlflow {
                let mlflow = Mlflow::start(uri, folder, &logged);
                reporter = reporter.with_optional(mlflow.map_err(Failure::io("start a thread for", uri))?);
            }
            let terminal = Terminal::new(io::stderr(), display, history)
                .with_resume_command(self.resume_command(common, &folder.root))
                .live(reporter.activity.clone(), signals)
                .map_err(Failure::io("start a thread for", "stderr"))?;
            reporter = reporter.with_optional(terminal);
            Ok(if json { reporter.with_optional(JsonStream(io::stdout())) } else { reporter })
        };
        // Run on a pool thread, so that a kernel hands work to the other workers instead of waking the pool from
        // outside.
        let outcome = rayon::scope(|_| train::run::fit(job, options, make_reporter));
        if let Some((folder, _)) = run_lock.as_ref().filter(|_| report) {
            // The plan does not count the report page: it uses memory that the run has freed.
            pressure::release_to_os();
            write_report(folder, common.quiet);
        }
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
    /// The command that resumes the run in this folder, to paste into a shell.
    fn resume_command(&self, common: &CommonArgs, run: &Path) -> String {
        self.command(common, [OsStr::new("--resume"), run.as_os_str()])
    }

    /// The command that resumes whichever run this command line names.
    pub fn resume_newest_command(&self, common: &CommonArgs) -> String {
        let run = self.resume.as_ref().and_then(|run| run.as_ref()).map(|run| run.as_os_str());
        let folder = self.run_dir.iter().flat_map(|dir| [OsStr::new("--run-dir"), dir.as_os_str()]);
        self.command(common, folder.chain([OsStr::new("--resume")]).chain(run))
    }

    /// This command line as far as it decides the experiment, and these arguments.
    fn command<'a>(&self, common: &CommonArgs, more: impl IntoIterator<Item = &'a OsStr>) -> String {
        let program = std::env::args_os().next().unwrap_or_else(|| "trainer".into());
        let mut words = vec![program, "fit".into(), self.job.path.clone().into()];
        for set in &common.set {
            words.extend(["--set".into(), set.into()]);
        }
        match common.device {
            DeviceArg::Auto => {}
            DeviceArg::Cpu => words.extend(["--device".into(), "cpu".into()]),
            DeviceArg::Cuda(ordinal) => words.extend(["--device".into(), format!("cuda:{ordinal}").into()]),
        }
        if common.uses_reference() {
            words.extend(["--backend".into(), "reference".into()]);
        }
        words.extend(more.into_iter().map(OsStr::to_owned));
        words.iter().map(|word| shell_quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
    }

    /// What the process prints when a second signal, or one before the run has begun, ends it.
    fn exit_messages(
        &self,
        common: &CommonArgs,
        display: DisplayOptions,
        requested: &RequestedRun,
    ) -> ExitMessages {
        if common.quiet {
            return ExitMessages::default();
        }
        let clear = if display.interactive { "\r\x1b[K" } else { "" };
        let folder = requested.run_dir.as_deref().unwrap_or(Path::new(RUNS_DIR));
        let resume = self.resume_command(common, folder);
        ExitMessages {
            starting: format!("{clear}stopped before the first update\n"),
            running: format!(
                "{clear}stopped now; updates since the last checkpoint are repeated\nresume   {resume}\n"
            ),
        }
    }

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

/// What writing `report.html` at the end of a run may take.
const REPORT_LIMIT: Duration = Duration::from_secs(1);

/// Writes `report.html` into the folder of a run that has ended. A failure is a warning: the run is complete.
fn write_report(folder: &RunDir, quiet: bool) {
    if !folder.events().exists() {
        return;
    }
    let path = folder.report();
    match html::read(&[&folder.root], Some(REPORT_LIMIT)) {
        Ok(Some(runs)) => {
            if let Err(error) = html::write_file(&path, &runs) {
                eprintln!("warning: cannot write `{}`: {error}", path.display());
            }
        }
        Ok(None) if quiet => {}
        Ok(None) => {
            let run = shell_quoted(&folder.root.to_string_lossy());
            eprintln!("report   the run is long: `trainer report {run}` draws it");
        }
        Err(error) => eprintln!("warning: `{}` is not written: {error}", path.display()),
    }
}

/// Continues the prompts of the job and keeps the texts in the folder of the run. A failure is a warning, as above.
#[cfg(target_os = "linux")]
fn write_texts(folder: &RunDir, eval: &EvalConfig, common: &CommonArgs) {
    // The run is complete: a signal ends the process at once, and no longer goes to a worker.
    for signal in train::signals::stop_signals() {
        drop(signal_hook::flag::register_conditional_default(signal, Arc::new(true.into())));
    }
    let written = report::generate_texts(&folder.root, eval, common).and_then(|texts| {
        texts.write(&folder.generated())?;
        Ok(texts.error)
    });
    match written {
        Ok(None) => {}
        Ok(Some(error)) => eprintln!("warning: `eval.prompts` are not continued: {error}"),
        Err(error) => eprintln!("warning: `eval.prompts` are not continued: {error:#}"),
    }
}

/// A word for a POSIX shell.
pub(super) fn shell_quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,@%+".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Parent directory of runs without `--run-dir`.
pub(super) const RUNS_DIR: &str = "runs";

/// Names a new run by its start time.
pub(super) fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}

/// A fault to inject, read from an environment variable, for tests of recovery.
fn fault_from_env<T: FromStr<Err: Display>>(name: &str) -> anyhow::Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    let invalid = |error| CliError::usage(format!("invalid `{name}`: {error}"), "unset it: it is for tests");
    Ok(Some(text.parse().map_err(invalid)?))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Everything that decides the experiment is repeated, whatever a shell makes of its characters.
    #[test]
    fn the_resume_command_can_be_pasted() {
        let resume = |args: &[&str]| {
            let cli = Cli::parse_from([&["trainer", "fit"], args].concat());
            let Command::Fit(fit) = &cli.command else { panic!("not a fit") };
            let full = fit.resume_command(&cli.common, Path::new("runs/a b/1"));
            let newest = fit.resume_newest_command(&cli.common);
            [full, newest].map(|text| text.split_once(" fit ").unwrap().1.to_owned())
        };
        let plain = resume(&["job.toml", "-v", "--max-steps", "3"]);
        assert_eq!(plain, ["job.toml --resume 'runs/a b/1'", "job.toml --resume"]);
        let quoted = resume(&["a job.toml", "--set", "name=it's", "--device", "cpu", "--run-dir", "out"]);
        let experiment = r"'a job.toml' --set 'name=it'\''s' --device cpu";
        assert_eq!(quoted[0], format!("{experiment} --resume 'runs/a b/1'"));
        assert_eq!(quoted[1], format!("{experiment} --run-dir out --resume"));
        assert_eq!(resume(&["job.toml", "--resume", "runs/x"])[1], "job.toml --resume runs/x");
    }
}
