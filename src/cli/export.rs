//! `trainer export`: write a trained model as the files of other tools.

use std::io::{self, IsTerminal};
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::eval::{ModelArgs, counting_bar, opening, sample_bar, session_options, with_skip_hint};
use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::base::units::{Bytes, counted};
use crate::data::Dataset;
use crate::data::split::DatasetSplit;
use crate::inference::calibration::calibrate;
use crate::inference::export::{
    ExportError, ExportFormat, ExportOptions, ExportProgress, ExportSource, ExportSummary, QuantizedType,
    RoundedWeights, Rounding, ShrunkModel, WeightDtype, compare, export, round_matrices, shrink,
};
use crate::inference::session::SessionOptions;
use crate::inference::trained_model::TrainedModel;
use crate::planner::plan::RemovedUnits;
use crate::quantization::{ActivationQuantization, ClipMethod};
use crate::train::Failure;
use crate::train::datasets::inference::{Samples, TestTimeAugmentation, TrainedModelData};
use crate::train::run_dir::RunDir;

/// Write a trained model as the files of other tools
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Formats:
  hf           a folder for transformers (gpt, llama, bert, vit) or torchvision (resnet, mobilenet)
  safetensors  the weights, and the job, classes and preprocessing as JSON
  gguf         a file for llama.cpp (gpt, llama), with tokenizer and chat template
  onnx         a graph for ONNX Runtime, with a dynamic batch
  tflite       a graph for LiteRT on phones and small boards (mlp, cnn, resnet, mobilenet)

What was written is read back and evaluated on the validation set beside the model itself.

Examples:
  trainer export runs/first --format hf -o exported
  trainer export runs/first --format onnx --dtype f16 -o exported
  trainer export runs/first --format gguf --quantize q4_k_m -o exported
  trainer export runs/first --format gguf --quantize q4_0 --rounding gptq -o exported
  trainer export runs/first --format tflite --quantize int8 -o exported")]
pub struct ExportArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to write
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = words::<ExportFormat>(ExportFormat::ALL.map(ExportFormat::name))
    )]
    pub format: ExportFormat,
    /// The folder to create
    #[arg(short, long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub output: PathBuf,
    /// Type of the weights [default: f16 for gguf, f32 for the others]
    #[arg(
        long,
        value_name = "TYPE",
        value_parser = words::<WeightDtype>(WeightDtype::ALL.map(WeightDtype::name))
    )]
    pub dtype: Option<WeightDtype>,
    /// Quantize: int8 for onnx and tflite, int4 for onnx, the others for gguf
    #[arg(long, value_name = "TYPE", value_parser = quantized_types())]
    pub quantize: Option<QuantizedType>,
    /// How weights are rounded when a gpt or llama is quantized [default: nearest]
    #[arg(
        long,
        value_name = "METHOD",
        value_parser = words::<Rounding>(Rounding::ALL.map(Rounding::name))
    )]
    pub rounding: Option<Rounding>,
    /// Samples of the training set for the ranges of int8 activations [default: 512] or for gptq [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub calibrate: Option<u64>,
    /// How int8 chooses the range of an activation [default: mse]
    #[arg(
        long,
        value_name = "METHOD",
        value_parser = words::<ClipMethod>(ClipMethod::ALL.map(ClipMethod::name))
    )]
    pub clip: Option<ClipMethod>,
    /// Replace a folder that is not empty
    #[arg(long)]
    pub force: bool,
    /// Samples per micro-batch of the evaluation at most; fewer if memory is short
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
}

/// Samples that activations are calibrated on by default.
const CALIBRATION_SAMPLES: u64 = 512;
/// Samples whose inputs GPTQ takes by default.
const GPTQ_SAMPLES: u64 = 128;

fn quantized_types() -> impl TypedValueParser<Value = QuantizedType> {
    words(QuantizedType::all().into_iter().map(QuantizedType::name))
}

/// Parses one of these words.
fn words<T>(names: impl IntoIterator<Item = &'static str>) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(names.into_iter().map(PossibleValue::new)).try_map(|word| word.parse::<T>())
}

impl ExportArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let opened = self.model.open(common)?;
        check_output(&self.output, &opened)?;
        start_threads()?;
        let mut session = session_options(common, &opened, self.batch_size)?;
        let options = ExportOptions {
            format: self.format,
            dtype: self.dtype,
            quantize: self.quantize,
            rounding: self.rounding.unwrap_or_default(),
            folder: self.output.clone(),
            force: self.force,
            max_bytes: session.ram,
        };
        options.check(opened.job.model.kind()).map_err(cli_error)?;
        let (whole, mut model) = match shrink(&opened, session.ram).map_err(cli_error)? {
            Some(ShrunkModel { model, removed }) => (Some((opened, removed)), model),
            None => (None, opened),
        };
        let display = common.display_options(io::stderr().is_terminal());
        let mut notes = Vec::new();
        let activations = self.activations(&mut model, &mut session, common, &mut notes)?;
        let rounded = self.rounded(&options, &mut model, &mut session, common, &mut notes)?;
        let mut progress = BarProgress::new(!common.quiet && display.interactive);
        let own = ExportSource::new(&model);
        let source = ExportSource {
            activations: activations.as_ref(),
            weights: rounded.as_ref().map_or(own.weights, |rounded| &rounded.file),
            scales: rounded.as_ref().map(|rounded| &rounded.scales),
            ..own
        };
        let written = export(&source, &options, &mut progress);
        progress.0.finish_and_clear();
        drop(rounded);
        let mut summary = written.map_err(cli_error)?;
        summary.notes.append(&mut notes);
        if let Some((whole, RemovedUnits { structure, removed, units })) = &whole {
            summary.source_bytes = whole.weights.metadata().map_or(summary.source_bytes, |file| file.len());
            let noun = structure.noun();
            summary
                .notes
                .push(format!("{removed} of {units} {noun} are pruned, and the export is without them"));
        }
        let whole = whole.as_ref().map(|(whole, _)| whole);
        match open_set(DatasetSplit::Valid, &model, &mut session, common) {
            Ok(dataset) => {
                let bar = sample_bar(display, 2 * dataset.len(), "compare");
                let on_progress = |done| bar.set_position(done);
                let compared =
                    rayon::scope(|_| compare(whole, &mut model, &options, &dataset, &session, on_progress));
                bar.finish_and_clear();
                summary.comparison = compared.map_err(cli_error)?;
            }
            Err(failure) => summary.notes.push(format!(
                "the export was not evaluated, because the validation set cannot be opened: {failure}"
            )),
        }
        self.finish(&summary, common)
    }

    /// The ranges of the activations, if they are quantized, and notes about the samples they come from.
    fn activations(
        &self,
        model: &mut TrainedModel,
        session: &mut SessionOptions,
        common: &CommonArgs,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Option<ActivationQuantization>> {
        let kind = model.job.model.kind();
        if !self.quantize.is_some_and(|quantized| quantized.quantizes_activations(kind)) {
            let rounds = self.rounding == Some(Rounding::Gptq);
            let named =
                [("--calibrate", self.calibrate.is_some() && !rounds), ("--clip", self.clip.is_some())];
            return match named.into_iter().find(|(_, given)| *given) {
                None => Ok(None),
                Some((option, _)) => Err(CliError {
                    exit: Exit::Usage,
                    message: format!("`{option}` is for activations, which are not quantized here"),
                    hint: Some("`--quantize int8` quantizes those of mlp, cnn, resnet and mobilenet".into()),
                }
                .into()),
            };
        }
        let (dataset, note) = calibration_set(model, session, common)?;
        let samples = self.calibrate.unwrap_or(CALIBRATION_SAMPLES).min(dataset.len());
        let method = self.clip.unwrap_or(ClipMethod::Mse);
        let bar = sample_bar(common.display_options(io::stderr().is_terminal()), samples, "calibrate");
        let on_progress = |done| bar.set_position(done);
        let found = rayon::scope(|_| calibrate(model, &dataset, samples, method, session, on_progress));
        bar.finish_and_clear();
        let found = found.map_err(with_skip_hint)?;
        notes.extend(note.into_iter().chain(skipped_note(found.skipped)));
        Ok(Some(found.activations))
    }

    /// The weights as GPTQ rounds them, if it does.
    fn rounded(
        &self,
        options: &ExportOptions,
        model: &mut TrainedModel,
        session: &mut SessionOptions,
        common: &CommonArgs,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Option<RoundedWeights>> {
        if options.rounding != Rounding::Gptq {
            return Ok(None);
        }
        let (dataset, note) = calibration_set(model, session, common)?;
        let samples = self.calibrate.unwrap_or(GPTQ_SAMPLES).min(dataset.len());
        let display = common.display_options(io::stderr().is_terminal());
        let bar = counting_bar(display, 0, "gptq", "matrices");
        let on_progress = |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        };
        let rounded =
            rayon::scope(|_| round_matrices(model, options, &dataset, samples, session, on_progress));
        bar.finish_and_clear();
        let rounded = rounded.map_err(cli_error)?;
        notes.extend(note.into_iter().chain(skipped_note(rounded.skipped)));
        Ok(Some(rounded))
    }

    fn finish(&self, summary: &ExportSummary, common: &CommonArgs) -> anyhow::Result<Exit> {
        if common.json {
            print_line(serde_json::to_string_pretty(summary)?)?;
            return Ok(Exit::Done);
        }
        summary.notes.iter().for_each(|note| eprintln!("note: {note}"));
        for file in &summary.files {
            let path = summary.folder.join(&file.name);
            print_line(format_args!("{:>10}  {}", Bytes(file.bytes), path.display()))?;
        }
        let (from, to) = (Bytes(summary.source_bytes), Bytes(summary.bytes));
        print_line(format_args!("{} as {}: {to}, from {from} of weights", summary.format, summary.dtype))?;
        if !summary.comparison.is_empty() {
            print_line(format_args!("{:<18} {:>12} {:>12}", "validation", "model", "export"))?;
        }
        summary.comparison.iter().try_for_each(|one| {
            print_line(format_args!("{:<18} {:>12.6} {:>12.6}", one.metric, one.before, one.after))
        })?;
        Ok(Exit::Done)
    }
}

/// Refuses to overwrite an input: `output` must not contain the model, or the teacher or initial weights of its run,
/// nor be in a folder of their checkpoints.
pub(super) fn check_output(output: &Path, model: &TrainedModel) -> Result<(), CliError> {
    let target = resolved(output);
    let teacher = model.job.distill.as_ref().map(|distill| &distill.teacher);
    let inputs = [Some(&model.folder), teacher, model.job.train.init.as_ref()];
    let is_replaced = |input: &&PathBuf| {
        let folder = resolved(input);
        let run = RunDir::of_checkpoint(&folder).unwrap_or_else(|| RunDir::new(&folder));
        let checkpoints = run.checkpoints();
        folder.starts_with(&target) || (checkpoints.is_dir() && target.starts_with(checkpoints))
    };
    match inputs.into_iter().flatten().find(is_replaced) {
        None => Ok(()),
        Some(input) => {
            let input = input.display();
            let message = format!("`-o` would replace `{input}`, which is to be read, or a part of it");
            Err(CliError::usage(message, "name another folder"))
        }
    }
}

/// The path without links and `..`; what does not exist has none.
fn resolved(path: &Path) -> PathBuf {
    let existing = path.ancestors().find_map(|ancestor| {
        let folder = if ancestor.as_os_str().is_empty() { Path::new(".") } else { ancestor };
        Some((folder.canonicalize().ok()?, path.strip_prefix(ancestor).ok()?))
    });
    let Some((mut real, rest)) = existing else { return path.to_owned() };
    for part in rest.components() {
        match part {
            Component::ParentDir => {
                real.pop();
            }
            part => real.push(part),
        }
    }
    real
}

/// The training set; the validation set if that cannot be opened, with a note that says so.
pub(super) fn calibration_set(
    model: &TrainedModel,
    session: &mut SessionOptions,
    common: &CommonArgs,
) -> Result<(Arc<dyn Dataset>, Option<String>), Failure> {
    let failure = match open_set(DatasetSplit::Train, model, session, common) {
        Ok(dataset) => return Ok((dataset, None)),
        Err(failure) => failure,
    };
    let dataset = open_set(DatasetSplit::Valid, model, session, common)?;
    let note =
        format!("calibrated on the validation set, because the training set cannot be opened: {failure}");
    Ok((dataset, Some(note)))
}

/// A note on bad records that a calibration left out.
pub(super) fn skipped_note(skipped: u64) -> Option<String> {
    (skipped > 0).then(|| format!("calibrated without {}", counted(skipped, "bad record")))
}

pub(super) fn open_set(
    set: DatasetSplit,
    model: &TrainedModel,
    session: &mut SessionOptions,
    common: &CommonArgs,
) -> Result<Arc<dyn Dataset>, Failure> {
    let tokenizer = model.tokenizer();
    let trained = TrainedModelData {
        job: &model.job,
        preprocessing: &model.preprocessing,
        tokenizer: tokenizer.as_deref(),
        test_time: TestTimeAugmentation::Off,
    };
    let ctx = opening(common, model, session.ram);
    let dataset = trained.open(Samples::Set(set), &ctx)?;
    session.held_bytes = ctx.large_images.extra_bytes();
    Ok(dataset)
}

pub(super) fn cli_error(error: ExportError) -> anyhow::Error {
    let exit = match error {
        ExportError::Evaluation(failure) => return with_skip_hint(failure),
        ExportError::Memory { .. } => Exit::Memory,
        _ if error.is_usage() => Exit::Usage,
        _ => return error.into(),
    };
    CliError { exit, message: error.to_string(), hint: error.hint() }.into()
}

/// A bar over the bytes of the tensors.
struct BarProgress(ProgressBar);

impl BarProgress {
    fn new(shown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if shown {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(4));
        }
        if let Ok(style) = ProgressStyle::with_template("export {bar:24} {bytes}/{total_bytes}  {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }
}

impl ExportProgress for BarProgress {
    fn started(&mut self, bytes: u64) {
        self.0.set_length(bytes);
    }

    fn tensor_written(&mut self, name: &str, bytes: u64) {
        self.0.set_message(name.to_owned());
        self.0.inc(bytes);
    }
}
