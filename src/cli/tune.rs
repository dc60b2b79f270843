//! `trainer tune`: train a job with several settings, and compare.

mod lr;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::fit::{RUNS_DIR, shell_quoted, timestamp};
use super::{CliError, CommonArgs, DeviceArg, Exit, plan, print_line, start_threads};
use crate::base::units::Bytes;
use crate::job::Job;
use crate::report::{self, DisplayOptions, Verbosity};
use crate::train::Failure;
use crate::train::run_dir::RunDir;
use crate::train::run_lock::RunLock;
use crate::train::signals::{ExitMessages, Signal, SignalSource, Signals};
use crate::tune::folder::{self, PREFIX, Results};
use crate::tune::search_space::{self, MAX_TRIALS};
use crate::tune::slots::side_by_side;
use crate::tune::{
    Capacity, ChildOptions, MemoryNeed, Parameter, PlannedTrial, Sweep, SweepEnd, SweepEvent, SweepOptions,
    TuneFolder,
};

/// Train a job with several settings, and compare
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer tune job.toml --set optimizer.lr=1e-4,1e-3,1e-2           a grid; several --set multiply
  trainer tune job.toml --set optimizer.lr=1e-5..1e-2:log --trials 30   30 values at random
  trainer tune job.toml --set model.dropout=0.0..0.5 --metric valid.accuracy
  trainer tune job.toml --set model.hidden=[64],[256,128] --halving 1   every trial to its end
  trainer tune --resume                                             continue the last sweep
  trainer tune job.toml --lr                                        find a learning rate: a range test

Every trial is planned first, and one that does not fit is never started. The others run side by side within \
`memory.ram`, `memory.vram` and the cores of this machine. After a part of their updates the best third goes \
on. Ctrl-C stops all trials with a checkpoint.")]
pub struct TuneArgs {
    /// The job file (TOML); may be omitted with --resume
    #[arg(value_name = "JOB", value_hint = clap::ValueHint::FilePath, required_unless_present = "resume")]
    pub job: Option<PathBuf>,
    /// What ranks the trials, such as valid.accuracy [default: the job's checkpoint.best]
    #[arg(long, value_name = "METRIC")]
    pub metric: Option<String>,
    /// Trials: draws of ranges (20 if absent), or how many points of a grid
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_TRIALS as u64))]
    pub trials: Option<u64>,
    /// Stop after this many minutes, resumable
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..=525_600))]
    pub minutes: Option<u64>,
    /// One of N trials goes on after a part of its updates; 1 lets every trial finish
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub halving: u64,
    /// Trials at the same time, at most [default: what memory and cores hold]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub parallel: Option<u64>,
    /// Continue the sweep in the folder DIR, or the last one
    #[arg(long, value_name = "DIR", num_args = 0..=1, value_hint = clap::ValueHint::DirPath)]
    pub resume: Option<Option<PathBuf>>,
    /// Learning-rate range test instead of a sweep: the rate grows until the loss diverges [default rates: 1e-5..1]
    #[arg(long, value_name = "LOW..HIGH", num_args = 0..=1, require_equals = true, default_missing_value = "1e-5..1")]
    #[arg(conflicts_with_all = ["resume", "metric", "trials", "minutes", "halving", "parallel"])]
    pub lr: Option<lr::LrBounds>,
    /// Updates of the range test
    #[arg(long, value_name = "N", requires = "lr", default_value_t = 200)]
    #[arg(value_parser = clap::value_parser!(u64).range(20..=1_000_000))]
    pub updates: u64,
}

impl TuneArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        if let Some(bounds) = self.lr {
            return lr::run(self.job.as_deref().unwrap_or(Path::new("")), bounds, self.updates, common);
        }
        let display = common.display_options(io::stderr().is_terminal());
        let progress = Progress::new(display, "trials");
        let (folder, sweep, lock) = match &self.resume {
            Some(dir) => self.continued(dir.as_deref(), common)?,
            None => self.planned(common, &progress)?,
        };
        // Children hold the lock too: a sweep whose tuner was killed continues once they are gone.
        #[cfg(unix)]
        lock.share_with_children()?;
        let base: Job = serde_json::from_value(sweep.base.clone()).context("tune.json has no valid job")?;
        let machine = plan::local_machine(&base, common)?;
        let memory = MemoryNeed { ram: machine.ram, vram: machine.vram };
        let context_bytes = if machine.vram > 0 { machine.context_bytes } else { 0 };
        let budgets: Vec<MemoryNeed> =
            sweep.trials.iter().filter(|trial| trial.fits()).map(|trial| trial.budget).collect();
        let cores = rayon::current_num_threads();
        let slots = side_by_side(&budgets, memory, self.parallel.map_or(cores, |n| cores.min(n as usize)));
        let threads = (cores / slots).max(1);
        let options = SweepOptions {
            child: ChildOptions { arguments: child_arguments(common), threads },
            capacity: Capacity { ram: memory.ram, vram: memory.vram + context_bytes, slots },
            context_bytes,
            deadline: self.minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
            signals: Signals::watch(SignalSource::Anyone, ExitMessages::default())?,
        };
        // The first signal stops the trials, each with a checkpoint.
        options.signals.begin();
        progress.lines(&report::tune::header_lines(&sweep, &folder, slots, threads, display));
        let (end, results) = sweep.run(&folder, &options, |event| progress.show(&sweep, event))?;
        progress.bar.finish_and_clear();
        self.finish(&folder, &sweep, end, &results, common)
    }

    /// A new sweep: every trial planned, and the folder that states it.
    fn planned(
        &self,
        common: &CommonArgs,
        progress: &Progress,
    ) -> anyhow::Result<(TuneFolder, Sweep, RunLock)> {
        let path = self.job.clone().unwrap_or_default();
        let space: Vec<Parameter> =
            common.set.iter().map(|set| Parameter::parse(set)).collect::<Result<_, _>>()?;
        if let Some(shared) = space.iter().find(|p| p.varies() && p.key.starts_with("memory.")) {
            let message = format!("`{}` cannot vary: the trials share the memory of the machine", shared.key);
            return Err(
                CliError::usage(message, "give it one value, the budget of all trials together").into()
            );
        }
        let is_fixed = |set: &&String| Parameter::parse(set).is_ok_and(|parameter| !parameter.varies());
        let mut fixed: Vec<String> = common.set.iter().filter(is_fixed).cloned().collect();
        if let Some(metric) = &self.metric {
            let name = metric.strip_prefix("valid.").unwrap_or(metric);
            fixed.push(format!("checkpoint.best=valid.{name}"));
        }
        let base = Job::load(&path, &fixed)?;
        let points = search_space::trials(&space, self.trials.map(|n| n as usize), base.seed)?;
        let mut jobs = Vec::new();
        for point in &points {
            let sets: Vec<String> =
                fixed.iter().cloned().chain(point.iter().map(|assignment| assignment.to_set())).collect();
            jobs.push(Job::load(&path, &sets)?);
        }
        start_threads()?;
        let machine = plan::local_machine(&base, common)?;
        let mut trials = Vec::new();
        progress.begin("planning", points.len());
        for (number, (set, job)) in points.into_iter().zip(&mut jobs).enumerate() {
            let planned = PlannedTrial::plan(
                set.clone(),
                job.clone(),
                &machine,
                &common.open_options(),
                common.uses_reference(),
            );
            let label = || set.iter().map(|a| a.to_set()).collect::<Vec<_>>().join(" ");
            let trial =
                planned.with_context(|| format!("trial {number:03} cannot be planned: {}", label()))?;
            trial.limit(job);
            trials.push(trial);
            progress.bar.inc(1);
        }
        progress.bar.finish_and_clear();
        let memory = MemoryNeed { ram: machine.ram, vram: machine.vram };
        if !trials.iter().any(PlannedTrial::fits) {
            return Err(no_trial_fits(&trials, memory).into());
        }
        let sweep = Sweep {
            job: path,
            set: common.set.clone(),
            fixed,
            base: base.to_json(),
            metric: base.checkpoint.best,
            halving: self.halving,
            memory,
            trials,
        };
        let home = Path::new(RUNS_DIR).join(&base.name);
        let root = new_folder(&home, PREFIX)?;
        let lock = RunLock::acquire(&RunDir::new(&root))?;
        let folder = TuneFolder::new(root);
        folder.write(&sweep, &jobs)?;
        Ok((folder, sweep, lock))
    }

    /// The sweep to continue.
    fn continued(
        &self,
        dir: Option<&Path>,
        common: &CommonArgs,
    ) -> anyhow::Result<(TuneFolder, Sweep, RunLock)> {
        let named = match &self.job {
            Some(path) => Some(Job::load(path, &[])?.name),
            None => None,
        };
        let folder = match dir {
            Some(dir) => TuneFolder::new(dir),
            None => folder::newest(Path::new(RUNS_DIR), named.as_deref()).ok_or_else(|| {
                let of = named.map_or(String::new(), |name| format!(" of `{name}`"));
                CliError::usage(
                    format!("there is no sweep{of} in `{RUNS_DIR}`"),
                    "start one without `--resume`",
                )
            })?,
        };
        if !folder.sweep_file().exists() {
            let message = format!("`{}` is not a sweep: it has no tune.json", folder.root.display());
            return Err(CliError::usage(message, "`trainer tune JOB --set KEY=A,B` starts one").into());
        }
        let lock = RunLock::acquire(&RunDir::new(&folder.root))?;
        let sweep = folder.read()?;
        if let Some(path) = &self.job {
            let changes = Job::load(path, &sweep.fixed)?.structural_changes_since(&sweep.base);
            if let Some(change) = changes.first() {
                let message = format!(
                    "`{}` is a sweep of another job: `{}` was {} and is {}",
                    folder.root.display(),
                    change.key,
                    change.was,
                    change.now
                );
                return Err(CliError::usage(message, "start a new sweep without `--resume`").into());
            }
        }
        if !common.set.is_empty() && common.set != sweep.set {
            let message = format!("`--set` differs from that of the sweep: {}", sweep.set.join(" "));
            return Err(CliError::usage(message, "omit it, or start a new sweep without `--resume`").into());
        }
        start_threads()?;
        Ok((folder, sweep, lock))
    }

    /// Prints the comparison and returns the exit code.
    fn finish(
        &self,
        folder: &TuneFolder,
        sweep: &Sweep,
        end: SweepEnd,
        results: &Results,
        common: &CommonArgs,
    ) -> anyhow::Result<Exit> {
        let best = sweep.ranking(results).first().copied();
        let page = write_page(folder, sweep);
        let retrain = best.map(|trial| retrain_command(sweep, &sweep.trials[trial], common));
        if common.json {
            let complete = end == SweepEnd::Complete;
            let document = report::tune::document(sweep, results, folder, complete, retrain);
            print_line(serde_json::to_string_pretty(&document)?)?;
        } else if !common.quiet {
            let display = common.display_options(io::stdout().is_terminal());
            report::tune::table(sweep, results, display).iter().try_for_each(print_line)?;
            print_line("")?;
            if let Some(page) = page {
                print_line(format_args!("report   {}", page.display()))?;
            }
            if let (Some(trial), Some(retrain)) = (best, retrain) {
                let run = folder.trial_run(trial).root;
                print_line(format_args!("best     {}", run.display()))?;
                print_line(format_args!(
                    "show     {}",
                    command_line(&["eval".into(), run.display().to_string()])
                ))?;
                print_line(format_args!("retrain  {retrain}"))?;
            }
            if end != SweepEnd::Complete {
                let root = folder.root.display().to_string();
                print_line(format_args!(
                    "resume   {}",
                    command_line(&["tune".into(), "--resume".into(), root])
                ))?;
            }
        }
        match end {
            SweepEnd::Stopped(Signal::Interrupt) => Ok(Exit::Sigint),
            SweepEnd::Stopped(Signal::Terminate) => Ok(Exit::Sigterm),
            SweepEnd::NoMemory { trial } => Err(CliError {
                exit: Exit::Memory,
                message: format!(
                    "trial {trial:03} needs {}, and less memory is left now than when it was planned",
                    Bytes(sweep.trials[trial].budget.ram)
                ),
                hint: Some("resume the sweep when memory is free".into()),
            }
            .into()),
            SweepEnd::Complete if best.is_none() => Err(CliError {
                exit: Exit::Failure,
                message: format!("no trial has a {}", sweep.metric.name()),
                hint: Some(format!("the logs are in {}", folder.root.join("trial-*.log").display())),
            }
            .into()),
            SweepEnd::Complete | SweepEnd::OutOfTime => Ok(Exit::Done),
        }
    }
}

/// Writes the page that compares the trials, unless the job wants none. The sweep is complete without it.
fn write_page(folder: &TuneFolder, sweep: &Sweep) -> Option<PathBuf> {
    let base: Job = serde_json::from_value(sweep.base.clone()).ok()?;
    let runs: Vec<PathBuf> = (0..sweep.trials.len())
        .map(|trial| folder.trial_run(trial))
        .filter(|run| run.events().exists())
        .map(|run| run.root)
        .collect();
    if !base.log.report || runs.is_empty() {
        return None;
    }
    let path = folder.root.join("report.html");
    let written = report::html::read(&runs, None)
        .map_err(anyhow::Error::from)
        .and_then(|histories| Ok(report::html::write_file(&path, &histories.unwrap_or_default())?));
    match written {
        Ok(_) => Some(path),
        Err(error) => {
            eprintln!("warning: `{}` was not written: {error}", path.display());
            None
        }
    }
}

/// Flags of this command that its children share.
fn child_arguments(common: &CommonArgs) -> Vec<std::ffi::OsString> {
    let mut arguments = match common.device {
        DeviceArg::Auto => Vec::new(),
        DeviceArg::Cpu => vec!["--device".into(), "cpu".into()],
        DeviceArg::Cuda(ordinal) => vec!["--device".into(), format!("cuda:{ordinal}").into()],
    };
    if common.uses_reference() {
        arguments.extend(["--backend".into(), "reference".into()]);
    }
    arguments
}

/// The command that trains this trial alone, to paste into a shell.
fn retrain_command(sweep: &Sweep, trial: &PlannedTrial, common: &CommonArgs) -> String {
    let sets = sweep.fixed.iter().cloned().chain(trial.set.iter().map(|assignment| assignment.to_set()));
    let sets = sets.flat_map(|set| ["--set".to_owned(), set]);
    let shared = child_arguments(common).into_iter().map(|word| word.to_string_lossy().into_owned());
    let all: Vec<String> =
        ["fit".to_owned(), sweep.job.display().to_string()].into_iter().chain(sets).chain(shared).collect();
    command_line(&all)
}

/// A command line of this program.
fn command_line(arguments: &[String]) -> String {
    let program = std::env::args_os().next().unwrap_or_else(|| "trainer".into());
    let program = program.to_string_lossy().into_owned();
    std::iter::once(&program).chain(arguments).map(|word| shell_quoted(word)).collect::<Vec<_>>().join(" ")
}

fn no_trial_fits(trials: &[PlannedTrial], memory: MemoryNeed) -> CliError {
    let smallest = trials.iter().map(|trial| trial.peak).min_by_key(|peak| (peak.vram, peak.ram));
    let peak = smallest.unwrap_or_default();
    let vram = match peak.vram {
        0 => String::new(),
        vram => format!(", and {} of GPU memory of {}", Bytes(vram), Bytes(memory.vram)),
    };
    CliError {
        exit: Exit::Memory,
        message: format!(
            "no trial fits in memory: the smallest needs {} of RAM of {}{vram}",
            Bytes(peak.ram),
            Bytes(memory.ram)
        ),
        hint: Some("`trainer plan` with the settings of a trial says what to change".into()),
    }
}

/// What people see while a sweep runs: a line per result and, on a terminal, a bar.
struct Progress {
    bar: ProgressBar,
    display: DisplayOptions,
}

impl Progress {
    /// `unit`: what the bar counts.
    fn new(display: DisplayOptions, unit: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if display.interactive && display.verbosity > Verbosity::Quiet {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if let Ok(style) = ProgressStyle::with_template(&format!(
            "{{prefix}} {{bar:24}} {{pos}}/{{len}} {unit}  {{msg}}  {{elapsed}}"
        )) {
            bar.set_style(style);
        }
        Self { bar, display }
    }

    fn begin(&self, what: &str, length: usize) {
        self.bar.reset();
        self.bar.set_length(length as u64);
        self.bar.set_prefix(what.to_owned());
    }

    fn lines(&self, lines: &[String]) {
        if self.display.verbosity > Verbosity::Quiet {
            self.bar.suspend(|| lines.iter().for_each(|line| eprintln!("{line}")));
        }
    }

    fn show(&self, sweep: &Sweep, event: SweepEvent) {
        match event {
            SweepEvent::Rung { rung, left } => {
                self.begin(&format!("rung {} of {}", rung + 1, sweep.rungs().rungs()), left);
            }
            SweepEvent::Started { trial, .. } => self.bar.set_message(format!("trial {trial:03}")),
            SweepEvent::Ended(result) => {
                self.bar.inc(1);
                self.lines(&[report::tune::result_line(sweep, result, self.display)]);
            }
        }
    }
}
/// Creates a folder in `home`, named by `prefix` and the time. One that was created within the same second has another
/// name.
fn new_folder(home: &Path, prefix: &str) -> Result<PathBuf, Failure> {
    std::fs::create_dir_all(home).map_err(Failure::io("create the folder", home))?;
    let name = format!("{prefix}{}", timestamp());
    let (mut folder, mut number) = (home.join(&name), 1);
    loop {
        match std::fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                number += 1;
                folder = home.join(format!("{name}-{number}"));
            }
            done => return done.map(|()| folder.clone()).map_err(Failure::io("create the folder", &folder)),
        }
    }
}
