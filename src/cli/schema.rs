//! `trainer schema`: the job's definition, for editors and for the docs.

use clap::Args;

use super::{Exit, say};
use crate::job;

/// Print the JSON Schema of a job, for editors to complete and check
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer schema > job.schema.json
  # first line of a job, for taplo and Even Better TOML:
  #:schema ./job.schema.json")]
pub struct Schema {
    /// Print the reference page instead, in Markdown
    #[arg(long)]
    pub markdown: bool,
}

impl Schema {
    pub fn run(&self) -> anyhow::Result<Exit> {
        if self.markdown {
            say(job::page().trim_end())?;
        } else {
            say(format_args!("{:#}", job::schema()))?;
        }
        Ok(Exit::Done)
    }
}
