//! `trainer predict`: a row of predictions for each row of input.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::eval::{ModelArgs, opening, parse_test_time, sample_bar, session_options};
use super::{CliError, CommonArgs, Exit, start_threads};
use crate::base::units::counted;
use crate::data::table::TableRows;
use crate::inference::predict::{InputRows, OutputFormat, PredictOptions, PredictSummary, predict};
use crate::inference::trained_model::TrainedModel;
use crate::job::{OnBadRecord, SourceConfig};
use crate::train::datasets::inference::{Samples, TestTimeAugmentation, TrainedModelData};
use crate::train::datasets::tables::TableSource;

/// Predict with a trained model: one row out for each row in, in the order given
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer predict RUN new.csv -o out.csv                rows of a table
  trainer predict RUN photos/ -o out.jsonl              images, at any depth of a folder
  cat new.csv | trainer predict RUN - --with-inputs     rows on stdin, predictions on stdout
  trainer predict RUN new.parquet -o out.parquet --probabilities")]
pub struct PredictArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Files in the format of the job's data, folders of images, or `-` for rows on stdin
    #[arg(value_name = "INPUT", required = true, value_hint = clap::ValueHint::AnyPath)]
    pub inputs: Vec<PathBuf>,
    /// Output file: .csv, .jsonl or .parquet; stdout without it
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Format of the output; by default that of the file's extension, csv on stdout
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<FormatArg>,
    /// Write the columns of the input before the prediction
    #[arg(long)]
    pub with_inputs: bool,
    /// Write one column per class with its probability
    #[arg(long)]
    pub probabilities: bool,
    /// Samples per micro-batch at most; fewer if memory is short
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
    /// Average over views of each image: `flip` for it and its mirror image, or a number of views, all but the first
    /// drawn from the job's `[data.augment]`
    #[arg(long, value_name = "flip|N", value_parser = parse_test_time)]
    pub tta: Option<TestTimeAugmentation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    Csv,
    Jsonl,
    Parquet,
}

impl PredictArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let format = self.format(common)?;
        let model = self.model.open(common)?;
        start_threads()?;
        let mut session = session_options(common, &model, self.batch_size)?;
        let tokenizer = model.tokenizer();
        let trained = TrainedModelData {
            job: &model.job,
            preprocessing: &model.preprocessing,
            tokenizer: tokenizer.as_deref(),
            test_time: self.tta.unwrap_or_default(),
        };
        let (inputs, _spooled) = self.spooled_inputs(&model)?;
        if let Some(output) = &self.output
            && let Some(input) = inputs.iter().find(|input| is_same_file(input, output))
        {
            let message = format!("`-o` would overwrite `{}`, which is to be read", input.display());
            return Err(CliError::usage(message, "name another file").into());
        }
        let ctx = opening(common, &model, session.ram);
        let dataset = trained.open(Samples::Unlabelled(&inputs), &ctx)?;
        session.held_bytes = ctx.large_images.extra_bytes();
        let mut rows = self.with_inputs.then(|| table_rows(&model, &inputs)).transpose()?;
        let names = rows.as_ref().map(|rows| rows.names.clone());
        let mut next = || rows.as_mut().map_or(Ok(None), TableRows::next_row);
        let beside = names.map(|names| InputRows { names, next: &mut next });
        let rows_out = dataset.len() / dataset.views();
        let bar = sample_bar(common.display_options(io::stderr().is_terminal()), rows_out, "predict");
        let options = PredictOptions {
            probabilities: self.probabilities,
            stop_at_bad_row: model.job.data.loader.on_bad_record == OnBadRecord::Fail,
        };
        let summary = predict(
            &model,
            &dataset,
            beside,
            (self.output.as_deref(), format),
            (&session, options),
            |done| bar.set_position(done),
        )?;
        bar.finish_and_clear();
        self.report(common, &summary)
    }

    fn format(&self, common: &CommonArgs) -> Result<OutputFormat, CliError> {
        match (self.format, &self.output) {
            (Some(FormatArg::Csv), _) => Ok(OutputFormat::Csv),
            (Some(FormatArg::Jsonl), _) => Ok(OutputFormat::JsonLines),
            (Some(FormatArg::Parquet), _) => Ok(OutputFormat::Parquet),
            (None, None) if common.json => Ok(OutputFormat::JsonLines),
            (None, None) => Ok(OutputFormat::Csv),
            (None, Some(path)) => OutputFormat::of(path).ok_or_else(|| {
                CliError::usage(
                    format!("the format of `{}` is not known from its name", path.display()),
                    "name it .csv, .jsonl or .parquet, or add `--format`",
                )
            }),
        }
    }

    /// The inputs, with stdin copied to a temporary file that lives as long as the second value.
    fn spooled_inputs(
        &self,
        model: &TrainedModel,
    ) -> anyhow::Result<(Vec<PathBuf>, Vec<tempfile::TempPath>)> {
        let (mut inputs, mut spooled) = (self.inputs.clone(), Vec::new());
        for input in inputs.iter_mut().filter(|input| input.as_os_str() == "-") {
            if let SourceConfig::Images(_) | SourceConfig::Idx(_) = model.job.data.source {
                return Err(CliError::usage(
                    "images cannot be read from stdin",
                    "name their files or their folder",
                )
                .into());
            }
            let mut file = tempfile::Builder::new().prefix("trainer-stdin-").tempfile()?;
            io::copy(&mut io::stdin().lock(), file.as_file_mut() as &mut File)?;
            let path = file.into_temp_path();
            *input = path.to_path_buf();
            spooled.push(path);
        }
        Ok((inputs, spooled))
    }

    fn report(&self, common: &CommonArgs, summary: &PredictSummary) -> anyhow::Result<Exit> {
        if !common.quiet {
            eprintln!(
                "{}{}",
                counted(summary.rows, "row"),
                match &self.output {
                    Some(path) => format!(" in {}", path.display()),
                    None => String::new(),
                }
            );
            for (column, cells) in &summary.unseen_categories {
                let cells = counted(*cells, "cell");
                eprintln!("warning: column `{column}`: a category that no training row had in {cells}");
            }
        }
        match &summary.first_error {
            None => Ok(Exit::Done),
            Some(first) => {
                let bad = counted(summary.bad_rows, "bad row");
                let the_first = if summary.bad_rows == 1 { "" } else { ", the first" };
                eprintln!("error: {bad}{the_first}: {first}");
                Ok(Exit::Data)
            }
        }
    }
}

/// Whether both paths lead to the same file, by links too.
fn is_same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    let id = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).ok().filter(|file| file.is_file()).map(|file| (file.dev(), file.ino()))
    };
    #[cfg(not(unix))]
    let id = |path: &Path| path.canonicalize().ok();
    id(a).is_some_and(|a| Some(a) == id(b))
}

fn table_rows(model: &TrainedModel, inputs: &[PathBuf]) -> anyhow::Result<TableRows> {
    let Some(source) = TableSource::of(&model.job) else {
        let hint = "images have the column `file`; leave `--with-inputs` out";
        return Err(CliError::usage("`--with-inputs` is for tables", hint).into());
    };
    Ok(TableRows::open(inputs, source.format).map_err(crate::train::Failure::from)?)
}
