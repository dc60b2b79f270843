//! `trainer plan`: what memory a job will take, before a byte of it is taken.

use clap::Args;

use super::{Common, Exit, JobFile};
use crate::units::Size;

/// Say what memory a job will take and whether it fits
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer plan job.toml
  trainer plan job.toml --vram 8GiB          would it fit on a card of 8 GiB?
  trainer plan job.toml --strict             exit code 3 unless it fits as written")]
pub struct Plan {
    #[command(flatten)]
    pub job: JobFile,
    /// Plan for this much device memory instead of the job's `memory.vram`
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Size>,
    /// Plan for this much host memory instead of the job's `memory.ram`
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// Exit with code 3 unless the job fits as written
    #[arg(long)]
    pub strict: bool,
}

impl Plan {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        common.job(&self.job.path)?;
        anyhow::bail!("not built yet")
    }
}
