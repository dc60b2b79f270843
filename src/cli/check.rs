//! `trainer check`: every mistake in a job, without training it.

use clap::Args;
use serde_json::json;

use super::{Common, Exit, JobFile, say};
use crate::job::{Job, Length};

/// Find every mistake in a job, without training it
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer check job.toml
  trainer check job.toml -v                  also the job with every default filled in
  trainer check job.toml --json              the mistakes, or the resolved job, for a program")]
pub struct Check {
    #[command(flatten)]
    pub job: JobFile,
}

impl Check {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let job = common.job(&self.job.path)?;
        if common.json {
            say(json!({ "ok": true, "job": job.to_json() }))?;
        } else if !common.quiet {
            say(summary(&job))?;
            if common.verbose {
                say(format_args!("\n{}", job.to_toml().trim_end()))?;
            }
        }
        Ok(Exit::Done)
    }
}

/// What the job would do, in a line or two.
fn summary(job: &Job) -> String {
    let length = match job.train.length() {
        Length::Epochs(1) => "1 epoch".to_owned(),
        Length::Epochs(n) => format!("{n} epochs"),
        Length::Steps(n) => format!("{n} steps"),
    };
    format!(
        "ok: {} trains {} on {} for {length}, {} samples an update",
        job.name,
        job.model.kind(),
        job.data.source.kind(),
        job.train.samples_per_update(),
    )
}
