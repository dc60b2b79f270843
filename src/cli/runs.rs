//! `trainer runs`: the runs below a folder.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use clap::Args;

use super::fit::RUNS_DIR;
use super::{CommonArgs, Exit, print_line};
use crate::history::{RunRecord, SortKey, find_runs, sort};
use crate::report::runs;

/// List runs: their state, best metric, steps, time, peak memory, and how their jobs differ
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer runs                                those below runs/
  trainer runs runs/mnist --sort valid.loss   the best first
  trainer runs --json | jq -r '.[] | select(.state == \"killed\") | .run'")]
pub struct RunsArgs {
    /// The folder to search
    #[arg(value_name = "DIR", default_value = RUNS_DIR, value_hint = clap::ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Order by a metric such as valid.loss, the best first, or by steps, time or peak
    #[arg(long, value_name = "METRIC")]
    pub sort: Option<String>,
}

impl RunsArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let mut found = find_runs(&self.dir)?;
        if let Some(key) = &self.sort {
            sort(&mut found, &SortKey::from(key.as_str()))?;
        }
        warn_of_skipped(&found);
        if common.json {
            print_line(serde_json::to_string_pretty(&runs::list_json(&found))?)?;
            return Ok(Exit::Done);
        }
        runs::list_lines(&found, color(common)).iter().try_for_each(print_line)?;
        if !common.quiet {
            eprintln!("{}", runs::count_line(&found));
        }
        Ok(Exit::Done)
    }
}

/// Whether tables on stdout are colored.
pub fn color(common: &CommonArgs) -> bool {
    common.display_options(io::stdout().is_terminal()).color
}

/// Says on stderr which lines of the runs could not be used.
pub fn warn_of_skipped(found: &[RunRecord]) {
    runs::warnings(found).iter().for_each(|line| eprintln!("{line}"));
}
