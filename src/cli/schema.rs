//! `trainer schema`: the definition of a job, for editors and for the docs.

use clap::Args;

use super::{Exit, print_line};
use crate::job;

/// Print the JSON Schema of a job, for completion and checks in editors
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer schema > job.schema.json
  # first line of a job, for taplo and Even Better TOML:
  #:schema ./job.schema.json")]
pub struct SchemaArgs {
    /// Print the reference page instead, in Markdown
    #[arg(long)]
    pub markdown: bool,
}

impl SchemaArgs {
    pub fn run(&self) -> anyhow::Result<Exit> {
        if self.markdown {
            print_line(job::job_markdown().trim_end())?;
        } else {
            print_line(format_args!("{:#}", job::schema()))?;
        }
        Ok(Exit::Done)
    }
}
