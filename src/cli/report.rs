//! `trainer report`: runs as a page.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::eval::{opening, session_options};
use super::runs::warn_of_skipped;
use super::{CommonArgs, Exit, print_line, start_threads};
use crate::history::{RecordedState, RunHistory};
use crate::inference::generate::job_prompts::GeneratedTexts;
use crate::inference::trained_model::{CheckpointChoice, TrainedModel};
use crate::job::{EvalConfig, Job};
use crate::memory::code_pages;
use crate::report::{html, text};
use crate::train::Failure;

/// Prompts that are continued at the same time.
const MAX_SEQUENCES: u32 = 8;

/// Draw runs as one HTML page: curves, evaluation, memory, plan, job, and what differs between them
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer report runs/mnist/20260101-000000       writes report.html
  trainer report runs/mnist/* -o mnist.html       all runs of a job, overlaid and compared

The page needs no network and no server. `trainer fit` writes one into the run's folder at the end (log.report = false \
turns it off).")]
pub struct ReportArgs {
    /// Folders of runs; one may still be running
    #[arg(value_name = "RUN", num_args = 1.., required = true, value_hint = clap::ValueHint::DirPath)]
    pub runs: Vec<PathBuf>,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html", value_hint = clap::ValueHint::FilePath)]
    pub output: PathBuf,
}

impl ReportArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let mut histories = html::read(&self.runs, None)?.unwrap_or_default();
        histories.iter_mut().for_each(|history| update_texts(history, common));
        let bytes = html::write_file(&self.output, &histories).map_err(Failure::io("write", &self.output))?;
        let records: Vec<_> = histories.into_iter().map(|history| history.record).collect();
        warn_of_skipped(&records);
        let path = self.output.display().to_string();
        if common.json {
            print_line(json!({ "report": path, "bytes": bytes, "runs": self.runs }))?;
        } else if !common.quiet {
            eprintln!("wrote {path}, {}", text::bytes(bytes));
        }
        Ok(Exit::Done)
    }
}

/// Continues the prompts of a run whose texts are missing or of another checkpoint. A run that is training keeps its
/// memory for itself, and one whose checkpoints are gone keeps the texts it has.
fn update_texts(history: &mut RunHistory, common: &CommonArgs) {
    let run = &history.record;
    let Ok(job) = Job::load(&run.folder.job(), &[]) else { return };
    let step = run.summary.best.as_ref().map_or(run.summary.steps, |best| best.step);
    let is_current = history.generated.as_ref().is_some_and(|texts| texts.are_of(step, &job.eval));
    if job.eval.prompts.is_empty() || is_current || run.state == RecordedState::Running {
        return;
    }
    match generate_texts(&run.folder.root, &job.eval, common) {
        Ok(texts) => history.generated = Some(texts),
        Err(error) => eprintln!("warning: `eval.prompts` of `{}`: {error}", run.folder.root.display()),
    }
}

/// Continues these prompts with the best checkpoint of a run.
pub(super) fn generate_texts(
    run: &Path,
    eval: &EvalConfig,
    common: &CommonArgs,
) -> anyhow::Result<GeneratedTexts> {
    // What ran before is not needed while a tokenizer is compiled, which takes more memory than most of what follows.
    code_pages::drop_all();
    let model = TrainedModel::open(run, CheckpointChoice::Best, &[])?;
    start_threads()?;
    let options = session_options(common, &model, MAX_SEQUENCES)?;
    Ok(GeneratedTexts::generate(&model, eval, &options, &opening(common, &model, options.ram)))
}
