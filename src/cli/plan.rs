//! `trainer plan`: what memory a job will take, before a byte of it is taken.

use std::io::{self, IsTerminal, Write};

use clap::Args;

use super::{Common, Exit, JobFile, say};
use crate::job::Job;
use crate::memory::plan::Verdict;
use crate::memory::{self, budget, probe};
use crate::report;
use crate::train::setup::Setup;
use crate::units::Size;

/// Say what memory a job will take and whether it fits
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer plan job.toml
  trainer plan job.toml --ram 8GiB           would it fit on a machine with 8 GiB?
  trainer plan job.toml --strict             exit code 3 unless it fits as written")]
pub struct Plan {
    #[command(flatten)]
    pub job: JobFile,
    /// Plan for this much host memory instead of the job's `memory.ram`
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// Exit with code 3 unless the job fits as written
    #[arg(long)]
    pub strict: bool,
}

impl Plan {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let mut job = common.job(&self.job.path)?;
        job.memory.ram = self.ram.unwrap_or(job.memory.ram);
        // A size on the command line is of a machine that is not here; all else is of this one.
        let ram = match self.ram {
            Some(Size::Bytes(bytes)) => Some(bytes.0),
            _ => None,
        };
        show(job, ram, self.strict, common)
    }
}

/// Plans and prints. Opens no device and allocates no tensor.
pub fn show(job: Job, ram: Option<u64>, strict: bool, common: &Common) -> anyhow::Result<Exit> {
    let ram = match ram {
        Some(ram) => ram,
        None => budget::host(&job.memory, &probe::host()?),
    };
    let plan = Setup::new(job, ram)?.plan(ram);
    if common.json {
        say(serde_json::to_string_pretty(&plan)?)?;
    } else if !common.quiet {
        let look = common.look(io::stdout().is_terminal());
        report::plan::lines(&plan, look).iter().try_for_each(say)?;
    }
    Ok(match plan.verdict {
        Verdict::Fits => Exit::Done,
        Verdict::FitsAfterShrink if !strict => Exit::Done,
        Verdict::FitsAfterShrink | Verdict::DoesNotFit => Exit::Memory,
    })
}

/// The plan of a run that will not be, on stderr.
pub fn print(plan: &memory::Plan, common: &Common) -> io::Result<()> {
    if common.quiet {
        return Ok(());
    }
    let look = common.look(io::stderr().is_terminal());
    report::plan::lines(plan, look).iter().try_for_each(|line| writeln!(io::stderr().lock(), "{line}"))
}
