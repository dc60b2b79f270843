//! `trainer verify`: prove that a job's result does not depend on how its memory is used.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Common, Exit, JobFile, Stop, plan, say, start_threads};
use crate::memory;
use crate::report::{self, Verbosity};
use crate::train::Failure;
use crate::train::setup::Setup;
use crate::train::signals::{Heard, Signal, Signals};
use crate::train::verify::{Proof, Report, Told, verify};

/// Prove that a job's result does not depend on splits, recomputation, retries and resumes
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Makes a few updates as planned, then again in other splits, with recomputation, through an out of memory and
across a resume, and compares losses, gradients, weights and samples. Exit code 1 when they differ.

Examples:
  trainer verify job.toml
  trainer verify job.toml --updates 20
  trainer verify job.toml --json")]
pub struct Verify {
    #[command(flatten)]
    pub job: JobFile,
    /// Updates to make in every way
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub updates: u64,
}

impl Verify {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let job = common.job(&self.job.path)?;
        start_threads()?;
        let ram = memory::budget::host(&job.memory, &memory::probe::host()?);
        let card = common.card(&job.memory)?;
        let setup = Setup::open(job, ram, &common.opening())?.on_card(card).measured();
        let proof = Proof {
            updates: self.updates,
            ram,
            folder: PathBuf::from("runs").join(format!("verify-{}", std::process::id())),
            signals: Signals::watch(Heard::FromAnyone)?,
        };
        let look = common.look(io::stderr().is_terminal());
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if look.live && look.verbosity > Verbosity::Quiet {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if let Ok(style) =
            ProgressStyle::with_template("verify {bar:24} {pos}/{len} updates  {msg}  {eta} left")
        {
            bar.set_style(style);
        }
        let shown = bar.clone();
        let tell = move |told: Told| match told {
            Told::Begun { plan, notes, updates } => {
                shown.set_length(updates);
                if look.verbosity > Verbosity::Quiet {
                    report::verify::before(plan, notes, look).iter().for_each(|line| eprintln!("{line}"));
                }
            }
            Told::Updated { way } => {
                shown.set_message(way.to_owned());
                shown.inc(1);
            }
            Told::Checked(_) => {}
        };
        let signals = proof.signals.clone();
        let proved = rayon::scope(|_| verify(setup, &proof, Arc::new(tell)));
        bar.finish_and_clear();
        match proved {
            Ok(Some(report)) => self.end(&report, common),
            Ok(None) => Ok(match signals.stop() {
                Some(Signal::Terminate) => Exit::Sigterm,
                _ => Exit::Sigint,
            }),
            Err(Failure::DoesNotFit(plan)) => {
                plan::print(&plan, common)?;
                Err(Failure::DoesNotFit(plan).into())
            }
            Err(failure) => Err(failure.into()),
        }
    }

    fn end(&self, report: &Report, common: &Common) -> anyhow::Result<Exit> {
        if common.json {
            say(serde_json::to_string_pretty(report)?)?;
        } else if !common.quiet {
            report::verify::lines(report, common.look(io::stdout().is_terminal()))
                .iter()
                .try_for_each(say)?;
        }
        match report::verify::complaint(report) {
            None => Ok(Exit::Done),
            // The document on stdout has said it already.
            Some(_) if common.json => Ok(Exit::Failure),
            Some(message) => Err(Stop { exit: Exit::Failure, message, hint: None }.into()),
        }
    }
}
