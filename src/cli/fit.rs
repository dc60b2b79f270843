//! `trainer fit`: train a job.

use std::path::PathBuf;

use clap::Args;

use super::{Common, Exit, JobFile};

/// Train a job
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer fit job.toml
  trainer fit job.toml --set optimizer.lr=3e-4 --set train.steps=1000
  trainer fit job.toml --run-dir runs/first
  trainer fit job.toml --run-dir runs/first --resume     go on where it stopped, or begin
  trainer fit job.toml --json > events.jsonl")]
pub struct Fit {
    #[command(flatten)]
    pub job: JobFile,
    /// Go on with the run in RUN, else in --run-dir, else the newest run of the job's name
    #[arg(long, value_name = "RUN", num_args = 0..=1, value_hint = clap::ValueHint::DirPath)]
    pub resume: Option<Option<PathBuf>>,
    /// Stop, with a checkpoint, after this many updates of the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_steps: Option<u64>,
    /// The folder of this very run [default: runs/NAME/TIMESTAMP]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub run_dir: Option<PathBuf>,
    /// Print the memory plan and stop, as `trainer plan` does
    #[arg(long)]
    pub dry_run: bool,
}

impl Fit {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        common.job(&self.job.path)?;
        anyhow::bail!("not built yet")
    }
}
