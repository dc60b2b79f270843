//! `trainer compress`: find a smaller variant of a trained model that is good enough.

use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;

use super::eval::{ModelArgs, counting_bar, session_options};
use super::export::{calibration_set, cli_error, open_set};
use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::data::split::DatasetSplit;
use crate::inference::compress::{CompressRequest, Frontier, compress};
use crate::job::SizeRatio;
use crate::report::frontier;
use crate::train::Failure;

/// Find the best smaller variant of a trained model: lower ranks, zeros and fewer bits
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Each variant is exported to ONNX, read back and evaluated on the validation set, without training. The best of those \
that are small and good enough is written, beside the table as frontier.json and a chart as frontier.svg; if there is \
none, the exit code is 1. A job with [lowrank], [prune] or [distill] trains a smaller model, which loses less.

Examples:
  trainer compress runs/first --target 4x
  trainer compress runs/first --target 10x --max-loss 0.02 -o small")]
pub struct CompressArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// How many times smaller the gzipped ONNX file is to be, such as 4x
    #[arg(long, value_name = "RATIO")]
    pub target: SizeRatio,
    /// How much may be lost: of the accuracy, or the fraction by which a loss grows
    #[arg(long, value_name = "LOSS", default_value_t = 0.01)]
    pub max_loss: f64,
    /// The folder to create [default: RUN/compressed]
    #[arg(short, long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub output: Option<PathBuf>,
    /// Replace a folder that is not empty
    #[arg(long)]
    pub force: bool,
    /// Samples per micro-batch of the evaluation at most; fewer if memory is short
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_size: u32,
}

impl CompressArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        if !(self.max_loss >= 0.0 && self.max_loss.is_finite()) {
            let message = format!("`--max-loss` must be 0 or more, not {}", self.max_loss);
            return Err(CliError::usage(message, "0.01 is one percent").into());
        }
        let output = self.output.clone().unwrap_or_else(|| self.model.run.join("compressed"));
        if !self.force && fs::read_dir(&output).is_ok_and(|mut entries| entries.next().is_some()) {
            let message = format!("`{}` exists and is not empty", output.display());
            return Err(CliError::usage(message, "`--force` replaces it, `-o` names another").into());
        }
        let model = self.model.open(common)?;
        start_threads()?;
        let mut session = session_options(common, &model, self.batch_size)?;
        let validation = open_set(DatasetSplit::Valid, &model, &mut session, common)?;
        let calibration = calibration_set(&model, &mut session, common)?;
        let parent = output.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(".".as_ref());
        fs::create_dir_all(parent).map_err(Failure::io("create", parent))?;
        let scratch = tempfile::Builder::new().prefix(".compress").tempdir_in(parent);
        let scratch = scratch.map_err(Failure::io("create a folder in", parent))?;
        let request = CompressRequest {
            target: self.target,
            max_loss: self.max_loss,
            validation: &validation,
            calibration: &calibration,
            session: &session,
            scratch: scratch.path(),
        };
        let bar = counting_bar(common.display_options(io::stderr().is_terminal()), 0, "compress", "variants");
        let progress = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let found = rayon::scope(|_| compress(&model, &request, progress));
        bar.finish_and_clear();
        let (frontier, folder) = found.map_err(cli_error)?;
        self.print(&frontier, common)?;
        let Some(folder) = folder else { return Err(self.nothing(&frontier).into()) };
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).map_err(Failure::io("write", path))
        };
        write("frontier.json", &format!("{}\n", serde_json::to_string_pretty(&frontier)?))?;
        write("frontier.svg", &frontier::svg(&frontier)?)?;
        if output.exists() {
            fs::remove_dir_all(&output).map_err(Failure::io("replace", &output))?;
        }
        fs::rename(&folder, &output).map_err(Failure::io("write", &output))?;
        if !common.quiet && !common.json {
            print_line(format_args!("\nwritten to {}", output.display()))?;
        }
        Ok(Exit::Done)
    }

    fn print(&self, found: &Frontier, common: &CommonArgs) -> anyhow::Result<()> {
        if common.json {
            print_line(serde_json::to_string_pretty(found)?)?;
        } else if !common.quiet {
            frontier::lines(found).iter().try_for_each(print_line)?;
        }
        Ok(())
    }

    /// The error if no variant is small and good enough: it names the nearest ones.
    fn nothing(&self, found: &Frontier) -> CliError {
        let good = found.variants.iter().filter(|one| one.loss <= self.max_loss);
        let smallest = good.max_by(|a, b| a.ratio.total_cmp(&b.ratio));
        let small = found.variants.iter().filter(|one| one.ratio >= self.target.value());
        let best = small.min_by(|a, b| a.loss.total_cmp(&b.loss));
        let (target, most, metric) = (self.target, self.max_loss, found.metric);
        let message = format!("no variant is {target} smaller and loses at most {most} of the {metric}");
        let smallest =
            smallest.map(|one| format!("{} is {:.2}x smaller", frontier::describe(one), one.ratio));
        let best = best.map(|one| format!("{} loses {:.4}", frontier::describe(one), one.loss));
        let nearest: Vec<String> = smallest.into_iter().chain(best).collect();
        let hint = format!("{}; a job with [lowrank] or [prune] trains a smaller model", nearest.join(", "));
        CliError { exit: Exit::Failure, message, hint: Some(hint) }
    }
}
