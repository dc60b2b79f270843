//! `trainer verify`: checks that a job's result does not depend on how it uses memory.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, CommonArgs, Exit, JobFile, plan, print_line, start_threads};
use crate::memory::probe;
use crate::planner::budget;
use crate::report::{self, Verbosity};
use crate::train::Failure;
use crate::train::setup::Setup;
use crate::train::signals::{ExitMessages, Signal, SignalSource, Signals};
use crate::train::verify::{VerifyEvent, VerifyOptions, VerifyReport, verify};

/// Check that memory-saving measures do not change the result of a job
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Runs a few updates as planned, then repeats them in other micro-batches, with recomputation, after an injected \
out-of-memory error and across a resume, and compares losses, gradients, weights and samples. The last repetition, \
`candle`, computes with candle's own operations and autograd instead of our kernels. Exit code 1 if they differ.

Examples:
  trainer verify job.toml
  trainer verify job.toml --updates 20
  trainer verify job.toml --json")]
pub struct VerifyArgs {
    #[command(flatten)]
    pub job: JobFile,
    /// Updates to run in each variant
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub updates: u64,
}

impl VerifyArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let job = common.load_job(&self.job.path)?;
        start_threads()?;
        let ram = budget::host(&job.memory, &probe::host()?);
        let gpu = common.open_gpu(&job.memory)?;
        let mut setup = Setup::open(job, ram, &common.open_options())?.on_gpu(gpu).with_process_measured();
        setup.set_reference(common.uses_reference());
        let options = VerifyOptions {
            updates: self.updates,
            ram,
            folder: PathBuf::from("runs").join(format!("verify-{}", std::process::id())),
            signals: Signals::watch(SignalSource::Anyone, ExitMessages::default())?,
        };
        // The first signal lets it remove its folder.
        options.signals.begin();
        let display = common.display_options(io::stderr().is_terminal());
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if display.interactive && display.verbosity > Verbosity::Quiet {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if let Ok(style) =
            ProgressStyle::with_template("verify {bar:24} {pos}/{len} updates  {msg}  {eta} left")
        {
            bar.set_style(style);
        }
        let progress_bar = bar.clone();
        let on_progress = move |progress: VerifyEvent| match progress {
            VerifyEvent::Started { plan, notes, updates } => {
                progress_bar.set_length(updates);
                if display.verbosity > Verbosity::Quiet {
                    report::verify::header_lines(plan, notes, display)
                        .iter()
                        .for_each(|line| eprintln!("{line}"));
                }
            }
            VerifyEvent::Updated { variant } => {
                progress_bar.set_message(variant.to_owned());
                progress_bar.inc(1);
            }
            VerifyEvent::VariantDone(_) => {}
        };
        let signals = options.signals.clone();
        let outcome = rayon::scope(|_| verify(setup, &options, Arc::new(on_progress)));
        bar.finish_and_clear();
        match outcome {
            Ok(Some(report)) => self.finish(&report, common),
            Ok(None) => Ok(match signals.stop_requested() {
                Some(Signal::Terminate) => Exit::Sigterm,
                _ => Exit::Sigint,
            }),
            Err(Failure::DoesNotFit(plan)) => {
                plan::eprint_plan(&plan, common)?;
                Err(Failure::DoesNotFit(plan).into())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    fn finish(&self, report: &VerifyReport, common: &CommonArgs) -> anyhow::Result<Exit> {
        if common.json {
            print_line(serde_json::to_string_pretty(report)?)?;
        } else if !common.quiet {
            report::verify::lines(report, common.display_options(io::stdout().is_terminal()))
                .iter()
                .try_for_each(print_line)?;
        }
        match report::verify::failure_message(report) {
            None => Ok(Exit::Done),
            // The JSON document on stdout already reports it.
            Some(_) if common.json => Ok(Exit::Failure),
            Some(message) => Err(CliError { exit: Exit::Failure, message, hint: None }.into()),
        }
    }
}
