//! `trainer compress`: find a smaller variant of a trained model that is good enough.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;

use super::eval::{ModelArgs, counting_bar, session_options};
use super::export::{calibration_set, check_output, cli_error, open_set, skipped_note};
use super::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::data::split::DatasetSplit;
use crate::inference::compress::{CompressRequest, Compressed, Frontier, compress};
use crate::inference::export::ExportFolder;
use crate::job::SizeRatio;
use crate::report::frontier;
use crate::train::run_dir::{RunDir, write_atomic};

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
        let model = self.model.open(common)?;
        let run = RunDir::of_checkpoint(&model.folder).map_or_else(|| self.model.run.clone(), |run| run.root);
        let output = self.output.clone().unwrap_or_else(|| run.join("compressed"));
        check_output(&output, &model)?;
        // A temporary folder beside it: the old one stays until the new one is complete.
        let folder = ExportFolder::create(&output, self.force).map_err(cli_error)?;
        start_threads()?;
        let mut session = session_options(common, &model, self.batch_size)?;
        let validation = open_set(DatasetSplit::Valid, &model, &mut session, common)?;
        let (calibration, note) = calibration_set(&model, &mut session, common)?;
        let request = CompressRequest {
            target: self.target,
            max_loss: self.max_loss,
            validation: &validation,
            calibration: &calibration,
            session: &session,
            scratch: folder.path(),
        };
        let bar = counting_bar(common.display_options(io::stderr().is_terminal()), 0, "compress", "variants");
        let progress = |done: usize, total: usize| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        };
        let found = rayon::scope(|_| compress(&model, &request, progress));
        bar.finish_and_clear();
        let Compressed { frontier, chosen, skipped } = found.map_err(cli_error)?;
        note.into_iter().chain(skipped_note(skipped)).for_each(|note| eprintln!("note: {note}"));
        self.print(&frontier, common)?;
        let Some(chosen) = chosen else { return Err(self.no_variant_error(&frontier).into()) };
        let write = |name: &str, text: &str| write_atomic(&chosen.join(name), text.as_bytes());
        write("frontier.json", &format!("{}\n", serde_json::to_string_pretty(&frontier)?))?;
        write("frontier.svg", &frontier::svg(&frontier)?)?;
        folder.commit_part(&chosen).map_err(cli_error)?;
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
    fn no_variant_error(&self, found: &Frontier) -> CliError {
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
        let hint = format!("{}; a job with [lowrank] or [prune] trains a smaller model", nearest.join("; "));
        CliError { exit: Exit::Failure, message, hint: Some(hint) }
    }
}
