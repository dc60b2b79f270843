//! `trainer report`: runs as a page.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::runs::warn_of_skipped;
use super::{CommonArgs, Exit, print_line};
use crate::report::{html, text};
use crate::train::Failure;

/// Draw runs as one HTML page: curves, memory, plan, job, and what differs between them
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
        let histories = html::read(&self.runs, None)?.unwrap_or_default();
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
