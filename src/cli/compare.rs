//! `trainer compare`: what differs between runs.

use std::path::PathBuf;

use clap::Args;

use super::runs::{color, warn_of_skipped};
use super::{CommonArgs, Exit, print_line};
use crate::history::RunRecord;
use crate::report::runs;

/// Compare runs: what differs in their jobs, and in their results
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer compare runs/mnist/20260101-000000 runs/mnist/20260102-000000
  trainer compare runs/mnist/*                         all runs of a job
  trainer compare RUN RUN --json                       for a program")]
pub struct CompareArgs {
    /// Folders of runs, at least two
    #[arg(value_name = "RUN", num_args = 2.., required = true, value_hint = clap::ValueHint::DirPath)]
    pub runs: Vec<PathBuf>,
}

impl CompareArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let found = self.runs.iter().map(|root| RunRecord::read(root)).collect::<Result<Vec<_>, _>>()?;
        warn_of_skipped(&found);
        match common.json {
            true => print_line(serde_json::to_string_pretty(&runs::comparison_json(&found))?)?,
            false => runs::comparison_lines(&found, color(common)).iter().try_for_each(print_line)?,
        }
        Ok(Exit::Done)
    }
}
