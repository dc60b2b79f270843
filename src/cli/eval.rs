//! `trainer eval`: the metrics of a trained model.

use std::fmt;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::base::units::{counted, format_count};
use crate::data::DatasetContext;
use crate::data::split::DatasetSplit;
use crate::inference::evaluate::{Evaluation, evaluate};
use crate::inference::session::SessionOptions;
use crate::inference::trained_model::{CheckpointChoice, TrainedModel};
use crate::memory::probe;
use crate::metrics::classification::Confusion;
use crate::metrics::task::TaskMetrics;
use crate::planner::budget;
use crate::report::{DisplayOptions, Verbosity};
use crate::train::Failure;
use crate::train::datasets::inference::{Samples, TestTimeAugmentation, TrainedModelData};

/// Evaluate a trained model on its validation or test set, or on other data
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer eval runs/mnist/20260101-000000               its best checkpoint on the validation set
  trainer eval RUN --split test                         its test set
  trainer eval RUN --data test.csv --json               other data, the metrics for a program
  trainer eval RUN --tta flip                           averaged over each image and its mirror image
  trainer eval RUN/checkpoints/step-00000500            a checkpoint by its folder")]
pub struct EvalArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Labelled data in the format of the job's own, instead of its validation set
    #[arg(long, value_name = "PATH", num_args = 1.., value_hint = clap::ValueHint::AnyPath)]
    pub data: Vec<PathBuf>,
    /// Which set of the job
    #[arg(long, value_name = "SET", default_value = "valid", conflicts_with = "data")]
    pub split: EvalSplit,
    /// Samples per micro-batch at most; fewer if memory is short
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
    /// Average over views of each image: `flip` for it and its mirror image, or a number of views, all but the first
    /// drawn from the job's `[data.augment]`
    #[arg(long, value_name = "flip|N", value_parser = parse_test_time)]
    pub tta: Option<TestTimeAugmentation>,
}

/// Views at most: their cost is that of as many images.
const MAX_VIEWS: u64 = 1000;

/// Parses `flip` or a number of views.
pub fn parse_test_time(text: &str) -> Result<TestTimeAugmentation, String> {
    match text.parse() {
        Ok(views @ 2..=MAX_VIEWS) => Ok(TestTimeAugmentation::Views(views)),
        _ if text == "flip" => Ok(TestTimeAugmentation::Flip),
        _ => Err(format!("expected `flip` or a number of views, 2 to {MAX_VIEWS}")),
    }
}

/// A set of the job.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum EvalSplit {
    /// The validation set
    Valid,
    /// The test set, which training never reads
    Test,
    /// The training set, not augmented
    Train,
}

impl From<EvalSplit> for DatasetSplit {
    fn from(split: EvalSplit) -> Self {
        match split {
            EvalSplit::Valid => Self::Valid,
            EvalSplit::Test => Self::Test,
            EvalSplit::Train => Self::Train,
        }
    }
}

/// A trained model on the command line.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// The folder of a run, of one of its checkpoints or of an export
    #[arg(value_name = "RUN", value_hint = clap::ValueHint::DirPath)]
    pub run: PathBuf,
    /// Which checkpoint of the run: best, last or step-N
    #[arg(long, value_name = "WHICH", default_value = "best")]
    pub checkpoint: CheckpointChoice,
}

impl ModelArgs {
    /// Opens the model and says which weights are used.
    pub fn open(&self, common: &CommonArgs) -> anyhow::Result<TrainedModel> {
        let model = TrainedModel::open(&self.run, self.checkpoint, &common.set)?;
        if !common.quiet {
            eprintln!("model  {}", model.describe());
        }
        Ok(model)
    }
}

/// Where and within what a command computes.
pub fn session_options(
    common: &CommonArgs,
    model: &TrainedModel,
    batch_size: u32,
) -> anyhow::Result<SessionOptions> {
    Ok(SessionOptions {
        ram: budget::host(&model.job.memory, &probe::host()?),
        gpu: common.open_gpu(&model.job.memory)?,
        reference: common.uses_reference(),
        max_micro_batch: batch_size as usize,
        held_bytes: 0,
    })
}

/// How the data of a command is opened.
pub fn opening(common: &CommonArgs, model: &TrainedModel, ram: u64) -> DatasetContext {
    DatasetContext { max_bytes: ram, seed: model.job.seed, ..common.open_options() }
}

/// A bar that counts samples; hidden unless stderr is a terminal.
pub fn sample_bar(display: DisplayOptions, samples: u64, verb: &str) -> ProgressBar {
    counting_bar(display, samples, verb, "samples")
}

/// A bar that counts `nouns`; hidden unless stderr is a terminal.
pub fn counting_bar(display: DisplayOptions, total: u64, verb: &str, nouns: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
    if display.interactive && display.verbosity > Verbosity::Quiet {
        bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(4));
    }
    let template = format!("{verb} {{bar:16}} {{pos}}/{{len}} {nouns}  {{rate}}  {{eta}} left");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        let rate = |state: &ProgressState, out: &mut dyn fmt::Write| {
            let _ = write!(out, "{}/s", format_count(state.per_sec().round() as u64));
        };
        bar.set_style(style.with_key("rate", rate));
    }
    bar
}

impl EvalArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let model = self.model.open(common)?;
        start_threads()?;
        let mut options = session_options(common, &model, self.batch_size)?;
        let tokenizer = model.tokenizer();
        let trained = TrainedModelData {
            job: &model.job,
            preprocessing: &model.preprocessing,
            tokenizer: tokenizer.as_deref(),
            test_time: self.tta.unwrap_or_default(),
        };
        let samples = match self.data.is_empty() {
            true => Samples::Set(self.split.into()),
            false => Samples::Labelled(&self.data),
        };
        let ctx = opening(common, &model, options.ram);
        let dataset = trained.open(samples, &ctx).map_err(|failure| self.with_data_hint(failure))?;
        options.held_bytes = ctx.large_images.extra_bytes();
        let display = common.display_options(io::stderr().is_terminal());
        let bar = sample_bar(display, dataset.len() / dataset.views(), "eval");
        let evaluation =
            rayon::scope(|_| evaluate(&model, &dataset, &options, |done| bar.set_position(done)))
                .map_err(|failure| self.with_data_hint(failure))?;
        bar.finish_and_clear();
        match common.json {
            true => print_line(serde_json::to_string_pretty(&evaluation.to_json())?)?,
            false => lines(&evaluation).iter().try_for_each(print_line)?,
        }
        if evaluation.skipped > 0 && !common.quiet {
            eprintln!("left out: {}", counted(evaluation.skipped as u64, "bad record"));
        }
        Ok(Exit::Done)
    }
}

impl EvalArgs {
    /// A run outlives its data: its sets may be gone, but not those that `--data` names.
    fn with_data_hint(&self, failure: Failure) -> anyhow::Error {
        match &failure {
            Failure::Data(error) if self.data.is_empty() && error.is_not_found() => CliError {
                exit: Exit::Data,
                message: format!("the data of the run is not where it was: {error}"),
                hint: Some("`--data PATH` evaluates the model on other labelled data".into()),
            }
            .into(),
            _ => with_skip_hint(failure),
        }
    }
}

/// The error of a command that has no row for each record: it can leave bad ones out.
pub(super) fn with_skip_hint(failure: Failure) -> anyhow::Error {
    match failure {
        Failure::BadRow(_) => CliError {
            exit: Exit::Data,
            message: failure.to_string(),
            hint: Some("`--set data.on_bad_record=skip` leaves bad rows out and counts them".into()),
        }
        .into(),
        _ => failure.into(),
    }
}

/// Classes that the table for people lists.
const MAX_LISTED_CLASSES: usize = 40;

fn lines(evaluation: &Evaluation) -> Vec<String> {
    let mut lines = vec![format!("{:<18} {}", "samples", evaluation.samples)];
    // What rounds to 0 has no sign.
    let shown = |value: f64| if value.abs() < 5e-7 { 0.0 } else { value };
    let metrics = evaluation.metrics.values().into_iter();
    lines.extend(metrics.map(|(name, value)| format!("{name:<18} {:.6}", shown(value))));
    if let TaskMetrics::Classification { names, metrics } = &evaluation.metrics {
        lines.push(String::new());
        lines.push(format!(
            "{:<18} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "class", "samples", "precision", "recall", "f1", "roc_auc"
        ));
        for (name, class) in names.iter().zip(&metrics.classes).take(MAX_LISTED_CLASSES) {
            let auc = class.roc_auc.map_or("-".into(), |auc| format!("{auc:.4}"));
            lines.push(format!(
                "{name:<18} {:>9} {:>9.4} {:>9.4} {:>9.4} {auc:>9}",
                class.samples, class.precision, class.recall, class.f1
            ));
        }
        if names.len() > MAX_LISTED_CLASSES {
            lines.push(format!(
                "... {}: `--json` lists all",
                counted((names.len() - MAX_LISTED_CLASSES) as u64, "more class")
            ));
        }
        lines.extend(confusion_lines(names, &metrics.confusion));
    }
    if let TaskMetrics::MultiLabel { names, metrics } = &evaluation.metrics {
        lines.push(String::new());
        lines.push(format!(
            "{:<18} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "label", "samples", "precision", "recall", "f1", "avg prec"
        ));
        for (name, label) in names.iter().zip(&metrics.labels).take(MAX_LISTED_CLASSES) {
            let precision = label.average_precision.map_or("-".into(), |value| format!("{value:.4}"));
            lines.push(format!(
                "{name:<18} {:>9} {:>9.4} {:>9.4} {:>9.4} {precision:>9}",
                label.samples, label.precision, label.recall, label.f1
            ));
        }
        if names.len() > MAX_LISTED_CLASSES {
            lines.push(format!("... {} more labels: `--json` lists all", names.len() - MAX_LISTED_CLASSES));
        }
    }
    lines
}

/// Classes whose confusion matrix fits a terminal.
const MAX_MATRIX_CLASSES: usize = 10;

/// Samples by their class, in rows, and by what was predicted, in columns.
fn confusion_lines(names: &[String], confusion: &Confusion) -> Vec<String> {
    const WIDTH: usize = 9;
    if names.len() > MAX_MATRIX_CLASSES {
        return vec!["confusion matrix: `--json` has it, and the page of `trainer report`".into()];
    }
    let column = |name: &String| format!(" {:>WIDTH$}", name.chars().take(WIDTH).collect::<String>());
    let header = format!("{:<18}{}", "class / predicted", names.iter().map(column).collect::<String>());
    let row = |(name, counts): (&String, &[u64])| {
        let counts: String = counts.iter().map(|count| format!(" {count:>WIDTH$}")).collect();
        format!("{name:<18}{counts}")
    };
    let rows = names.iter().zip(confusion.rows()).map(row);
    [String::new(), header].into_iter().chain(rows).collect()
}
