//! `trainer export`: write a trained model as the files of other tools.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::base::units::Bytes;
use crate::inference::export::{
    ExportError, ExportFormat, ExportOptions, ExportProgress, ExportSource, ExportSummary,
    ImageNormalization, Quantization, TokenizerSource, WeightDtype, export,
};
use crate::job::{Job, SourceConfig};
use crate::memory::probe;
use crate::planner::budget;
use crate::train::Failure;
use crate::train::checkpoint::Checkpoints;
use crate::train::run_dir::RunDir;
use crate::train::setup::Setup;

/// Write a trained model as the files of other tools
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Formats:
  hf           a folder for transformers (gpt, llama, bert, vit) or torchvision (resnet, mobilenet)
  safetensors  the weights, and the job, classes and preprocessing as JSON
  gguf         a file for llama.cpp (gpt, llama), with tokenizer and chat template
  onnx         a graph for ONNX Runtime, with a dynamic batch

Examples:
  trainer export runs/first --format hf -o exported
  trainer export runs/first --format onnx --dtype f16 -o exported
  trainer export runs/first --format gguf --quantize q4_k_m -o exported")]
pub struct ExportArgs {
    /// The run
    #[arg(value_name = "RUN", value_hint = clap::ValueHint::DirPath)]
    pub run: PathBuf,
    /// What to write
    #[arg(long, value_name = "FORMAT", value_parser = words::<ExportFormat, _>(ExportFormat::ALL.map(ExportFormat::name)))]
    pub format: ExportFormat,
    /// The folder to create
    #[arg(short, long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub output: PathBuf,
    /// Type of the weights [default: f16 for gguf, f32 for the others]
    #[arg(long, value_name = "TYPE", value_parser = words::<WeightDtype, _>(WeightDtype::ALL.map(WeightDtype::name)))]
    pub dtype: Option<WeightDtype>,
    /// Quantize the matrices; gguf only
    #[arg(long, value_name = "TYPE", value_parser = words::<Quantization, _>(Quantization::ALL.map(Quantization::name)))]
    pub quantize: Option<Quantization>,
    /// Replace a folder that is not empty
    #[arg(long)]
    pub force: bool,
}

/// Parses one of these words.
fn words<T, const N: usize>(names: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|word| word.parse::<T>())
}

impl ExportArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let options = ExportOptions {
            format: self.format,
            dtype: self.dtype,
            quantize: self.quantize,
            folder: self.output.clone(),
            force: self.force,
        };
        let run_dir = RunDir::new(&self.run);
        let job = Job::load(&run_dir.job(), &common.set)?;
        options.check(job.model.kind()).map_err(cli_error)?;
        start_threads()?;
        let found = Checkpoints::new(run_dir.checkpoints()).newest();
        let Some((state, checkpoint)) = found.found else {
            let (folder, skipped) = (run_dir.checkpoints(), found.skipped);
            return Err(Failure::NoWholeCheckpoint { folder, skipped }.into());
        };
        let ram = budget::host(&job.memory, &probe::host()?);
        let setup = Setup::open(job, ram, &common.open_options())?;
        let (weights, tokenizer) = (checkpoint.join("model.safetensors"), checkpoint.join("tokenizer.json"));
        let features = setup.datasets.train.features();
        let source = ExportSource {
            name: &setup.job.name,
            model: &setup.job.model,
            features,
            weights: &weights,
            tokenizer: tokenizer_source(&setup.job.data.source, &tokenizer),
            chat_template: None,
            normalization: features.pixel_lut.as_deref().and_then(ImageNormalization::from_lut),
            job: serde_json::to_value(&setup.job)?,
            preprocessing: serde_json::to_value(&setup.job.data)?,
            step: state.step,
        };
        let show_progress = !common.quiet && io::stderr().is_terminal();
        let mut progress = BarProgress::new(show_progress);
        let written = export(&source, &options, &mut progress);
        progress.0.finish_and_clear();
        self.finish(&written.map_err(cli_error)?, common)
    }

    fn finish(&self, summary: &ExportSummary, common: &CommonArgs) -> anyhow::Result<Exit> {
        if common.json {
            print_line(serde_json::to_string_pretty(summary)?)?;
            return Ok(Exit::Done);
        }
        summary.notes.iter().for_each(|note| eprintln!("note: {note}"));
        if !common.quiet {
            for file in &summary.files {
                print_line(format_args!(
                    "{:>10}  {}",
                    Bytes(file.bytes),
                    summary.folder.join(&file.name).display()
                ))?;
            }
            let (from, to) = (Bytes(summary.source_bytes), Bytes(summary.bytes));
            print_line(format_args!(
                "{} as {}: {to}, from {from} of f32 weights",
                summary.format, summary.dtype
            ))?;
        }
        Ok(Exit::Done)
    }
}

/// How the data was tokenized.
fn tokenizer_source<'a>(data: &SourceConfig, file: &'a Path) -> TokenizerSource<'a> {
    let tokens = match data {
        SourceConfig::Text(text) => &text.tokens,
        SourceConfig::Jsonl(jsonl) => &jsonl.tokens,
        _ => "",
    };
    match () {
        () if file.exists() => TokenizerSource::File(file),
        () if tokens == "bytes" => TokenizerSource::Bytes,
        () => TokenizerSource::None,
    }
}

fn cli_error(error: ExportError) -> anyhow::Error {
    match error.is_usage() {
        true => CliError { exit: Exit::Usage, message: error.to_string(), hint: error.hint() }.into(),
        false => error.into(),
    }
}

/// A bar over the bytes of the tensors.
struct BarProgress(ProgressBar);

impl BarProgress {
    fn new(shown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if shown {
            bar.set_draw_target(ProgressDrawTarget::stderr());
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
