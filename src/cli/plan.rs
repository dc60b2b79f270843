//! `trainer plan`: what memory a job will take, before a byte of it is taken.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use clap::Args;

use super::{Common, Exit, JobFile, Stop, say, start_threads};
use crate::job::Job;
use crate::layers::{Capability, HOPPER};
use crate::memory::budget::Machine;
use crate::memory::lock::{self, Lock};
use crate::memory::plan::Verdict;
use crate::memory::{self, budget, probe};
use crate::report;
use crate::train::setup::Setup;
use crate::train::{Failure, trial};
use crate::units::{Bytes, Size};

/// Say what memory a job will take and whether it fits
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer plan job.toml
  trainer plan job.toml --ram 8GiB                 would it fit on a machine with 8 GiB?
  trainer plan job.toml --vram 24GiB --ram 64GiB   and on a GPU with 24 GiB?
  trainer plan job.toml --vram 24GiB --gpu 8.9     and on one of compute capability 8.9?
  trainer plan job.toml --strict                   exit code 3 unless it fits as written
  trainer plan job.toml --measure                  run the best ways for some updates; the clock decides")]
pub struct Plan {
    #[command(flatten)]
    pub job: JobFile,
    /// Plan for this much host memory instead of the job's `memory.ram`
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<Size>,
    /// Plan for a GPU with this much memory, which need not be here
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Bytes>,
    /// Plan for a GPU of this compute capability, whose kernels decide what is taken; without it, the one that takes the most
    #[arg(long, value_name = "CAPABILITY", requires = "vram")]
    pub gpu: Option<Gpu>,
    /// Exit with code 3 unless the job fits as written
    #[arg(long)]
    pub strict: bool,
    /// Run the few best ways for some updates and choose by the clock
    #[arg(long, conflicts_with = "vram")]
    pub measure: bool,
    #[command(flatten)]
    pub locking: Locking,
}

/// A compute capability as typed: `8.9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu(pub Capability);

impl std::str::FromStr for Gpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts =
            text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        match parts {
            Some((major, minor)) if major >= OLDEST && minor < 10 => Ok(Self((major, minor))),
            Some((major, minor)) if minor < 10 => Err(format!(
                "compute capability {major}.{minor} has no bf16: the kernels are for 8.0 or newer"
            )),
            _ => Err("expected a compute capability such as 8.0, 8.6, 8.9 or 9.0".into()),
        }
    }
}

/// The oldest major compute capability that the kernels are compiled for.
const OLDEST: u32 = 8;

/// The lock beside a job.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct Locking {
    /// Write the plan to JOB.lock beside the job, for review
    #[arg(long, conflicts_with = "frozen")]
    pub lock: bool,
    /// Refuse, with exit code 3, a plan that is not the one in JOB.lock
    #[arg(long)]
    pub frozen: bool,
}

impl Plan {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let mut job = common.job(&self.job.path)?;
        start_threads()?;
        job.memory.ram = self.ram.unwrap_or(job.memory.ram);
        let mut machine = match self.ram {
            // A size on the command line is of a machine that is not here; all else is of this one.
            Some(Size::Bytes(ram)) => Machine::cpu(ram.0, u64::MAX),
            _ => here(&job, common)?,
        };
        if let Some(Bytes(vram)) = self.vram {
            if vram == 0 {
                return Err(Stop::usage("`--vram` is nothing", "leave it out to plan for the CPU").into());
            }
            let capability = self.gpu.map_or(HOPPER, |gpu| gpu.0);
            machine = Machine { device: "cuda".into(), vram, context: 0, capability, ..machine };
        }
        let job_memory = job.memory.clone();
        let mut setup = Setup::open(job, machine.ram, &common.opening())?.measured();
        let plan = match self.measure {
            // On a thread of the pool, as a run is.
            true => {
                setup = setup.on_card(common.card(&job_memory)?);
                rayon::scope(|_| trial::plan(&mut setup, &machine))?
            }
            false => setup.plan_for(&machine),
        };
        self.locking.heed(&self.job.path, &setup, &machine, &plan)?;
        show(&plan, self.strict, common)
    }
}

/// This machine, with the card that is meant.
pub fn here(job: &Job, common: &Common) -> anyhow::Result<Machine> {
    let host = probe::host()?;
    let cpu = Machine::cpu(budget::host(&job.memory, &host), host.for_process());
    Ok(match common.seen()? {
        Some(seen) => {
            let (device, vram) = (format!("cuda:{}", seen.ordinal), budget::card(&job.memory, &seen));
            Machine { device, vram, context: seen.context, capability: seen.capability, ..cpu }
        }
        None => cpu,
    })
}

/// Prints a plan and gives the exit code of its verdict.
pub fn show(plan: &memory::Plan, strict: bool, common: &Common) -> anyhow::Result<Exit> {
    if common.json {
        say(serde_json::to_string_pretty(plan)?)?;
    } else if !common.quiet {
        let look = common.look(io::stdout().is_terminal());
        report::plan::lines(plan, look).iter().try_for_each(say)?;
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

impl Locking {
    pub fn any(self) -> bool {
        self.lock || self.frozen
    }

    /// Writes the lock, or refuses a plan that is not the locked one. A plan that does not fit is neither.
    pub fn heed(
        self,
        job: &Path,
        setup: &Setup,
        machine: &Machine,
        plan: &memory::Plan,
    ) -> anyhow::Result<()> {
        if plan.verdict == Verdict::DoesNotFit {
            return Ok(());
        }
        let path = lock::path(job);
        if self.lock {
            let lock = Lock::new(plan, seen(setup, machine), setup.job.memory.headroom);
            std::fs::write(&path, lock.text()?).map_err(Failure::io("write", &path))?;
        }
        if self.frozen {
            let name = path.display();
            let hint = format!("write it with `trainer plan {} --lock`", job.display());
            let locked = Lock::read(&path).map_err(|error| {
                let cause = std::error::Error::source(&error).map(|e| format!(": {e}")).unwrap_or_default();
                Stop::usage(format!("{error}{}", cause.trim_end()), hint)
            })?;
            let found: Vec<String> = lock::compare(&locked, plan).iter().map(ToString::to_string).collect();
            if !found.is_empty() {
                let (was, now) = (locked.machine, seen(setup, machine));
                let machines = if was == now { String::new() } else { format!("; {}", moved(&was, &now)) };
                return Err(Stop {
                    exit: Exit::Memory,
                    message: format!("the plan is not the one in `{name}`: {}", found.join(", ")),
                    hint: Some(format!("`--lock` instead of `--frozen` accepts it{machines}")),
                }
                .into());
            }
        }
        Ok(())
    }
}

/// The machine as a lock states it: not what is free now, which is never twice the same.
fn seen(setup: &Setup, machine: &Machine) -> lock::Machine {
    let most = probe::host().map_or(machine.ram, |host| host.most());
    let not_here = machine.most_ram == u64::MAX;
    lock::Machine {
        threads: setup.threads,
        ram_bytes: if not_here { machine.ram } else { most },
        vram_bytes: machine.vram,
    }
}

fn moved(was: &lock::Machine, now: &lock::Machine) -> String {
    let shown = |m: &lock::Machine| {
        let card =
            if m.vram_bytes > 0 { format!(" and {} of vram", Bytes(m.vram_bytes)) } else { String::new() };
        format!("{} threads, {} of ram{card}", m.threads, Bytes(m.ram_bytes))
    };
    format!("it was made with {} and this is {}", shown(was), shown(now))
}
