//! `trainer plan`: how much memory a job will take, before it allocates any.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use clap::Args;

use super::{CliError, CommonArgs, Exit, JobFile, print_line, start_threads};
use crate::base::units::{Bytes, MemorySize, counted};
use crate::base::{ComputeCapability, HOPPER};
use crate::job::Job;
use crate::memory::probe;
use crate::planner::MemoryPlan;
use crate::planner::budget;
use crate::planner::budget::TargetMachine;
use crate::planner::plan::PlanVerdict;
use crate::planner::plan_lock;
use crate::planner::plan_lock::PlanLock;
use crate::report;
use crate::train::setup::Setup;
use crate::train::{Failure, autotune};

/// Show how much memory a job takes and whether it fits, without training
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer plan job.toml
  trainer plan job.toml --ram 8GiB                 would it fit on a machine with 8 GiB?
  trainer plan job.toml --vram 24GiB --ram 64GiB   and on a GPU with 24 GiB?
  trainer plan job.toml --vram 24GiB --gpu 8.9     and on one of compute capability 8.9?
  trainer plan job.toml --strict                   exit code 3 unless it fits as written
  trainer plan job.toml --measure                  time the best execution plans for a few updates")]
pub struct PlanArgs {
    #[command(flatten)]
    pub job: JobFile,
    /// Plan for this much host memory instead of the job's `memory.ram`
    #[arg(long, value_name = "SIZE")]
    pub ram: Option<MemorySize>,
    /// Plan for a GPU with this much memory; it need not be present
    #[arg(long, value_name = "SIZE")]
    pub vram: Option<Bytes>,
    /// Plan for a GPU of this compute capability, which determines the kernels and their workspaces [default: 9.0]
    #[arg(long, value_name = "CAPABILITY", requires = "vram")]
    pub gpu: Option<CapabilityArg>,
    /// Exit with code 3 unless the job fits as written
    #[arg(long)]
    pub strict: bool,
    /// Time the best execution plans for a few updates and choose the fastest
    #[arg(long, conflicts_with = "vram")]
    pub measure: bool,
    #[command(flatten)]
    pub locking: LockArgs,
}

/// The `--gpu` argument: a compute capability such as `8.9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapabilityArg(pub ComputeCapability);

impl std::str::FromStr for CapabilityArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts =
            text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        match parts {
            Some((major, minor)) if major >= MIN_CAPABILITY_MAJOR && minor < 10 => Ok(Self((major, minor))),
            Some((major, minor)) if minor < 10 => Err(format!(
                "compute capability {major}.{minor} has no bf16: the kernels are for 8.0 or newer"
            )),
            _ => Err("expected a compute capability such as 8.0, 8.6, 8.9 or 9.0".into()),
        }
    }
}

/// Oldest major compute capability that the kernels are compiled for.
const MIN_CAPABILITY_MAJOR: u32 = 8;

/// The lock beside a job.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct LockArgs {
    /// Write the memory plan to a file beside the job (job.lock for job.toml), for review
    #[arg(long, conflicts_with = "frozen")]
    pub lock: bool,
    /// Refuse, with exit code 3, a memory plan that differs from that file
    #[arg(long)]
    pub frozen: bool,
}

impl PlanArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let mut job = common.load_job(&self.job.path)?;
        start_threads()?;
        job.memory.ram = self.ram.unwrap_or(job.memory.ram);
        let mut machine = match self.ram {
            // A size on the command line describes another machine; anything else describes this one.
            Some(MemorySize::Bytes(ram)) => TargetMachine::cpu(ram.0, u64::MAX),
            _ => local_machine(&job, common)?,
        };
        if let Some(Bytes(vram)) = self.vram {
            if vram == 0 {
                return Err(CliError::usage("`--vram` must be above 0", "omit it to plan for the CPU").into());
            }
            let capability = self.gpu.map_or(HOPPER, |gpu| gpu.0);
            machine = TargetMachine { device: "cuda".into(), vram, context_bytes: 0, capability, ..machine };
        }
        let job_memory = job.memory.clone();
        let mut setup = Setup::open(job, machine.ram, &common.open_options())?.with_process_measured();
        // A run would refuse weights that do not match the model.
        setup.initial_weights()?;
        setup.set_reference(common.uses_reference());
        let plan = match self.measure {
            // On a pool thread, as in a run.
            true => {
                setup = setup.on_gpu(common.open_gpu(&job_memory)?);
                rayon::scope(|_| autotune::plan(&setup, &machine))?
            }
            false => setup.plan_for(&machine),
        };
        self.locking.apply(&self.job.path, &setup, &machine, &plan)?;
        let exit = print_plan(&plan, self.strict, common)?;
        let fused = setup.fused_nodes_on(&machine);
        if common.verbose && !common.json && !common.quiet {
            let mut sections = vec![("fused layers", fused)];
            if let Some([student, teacher]) = setup.feature_blocks() {
                sections.push(("blocks that `distill.features` can name as `student`", student));
                sections.push(("blocks that `distill.features` can name as `teacher`", teacher));
            }
            for (title, lines) in sections.iter().filter(|(_, lines)| !lines.is_empty()) {
                print_line(format_args!("\n{title}"))?;
                lines.iter().try_for_each(|line| print_line(format_args!("    {line}")))?;
            }
        }
        Ok(exit)
    }
}

/// This machine, with the selected GPU.
pub fn local_machine(job: &Job, common: &CommonArgs) -> anyhow::Result<TargetMachine> {
    let host = probe::host()?;
    let cpu = TargetMachine::cpu(budget::host(&job.memory, &host), host.process_budget());
    Ok(match common.gpu_info()? {
        Some(info) => {
            let (device, vram) = (format!("cuda:{}", info.ordinal), budget::gpu(&job.memory, &info));
            TargetMachine {
                device,
                vram,
                context_bytes: info.context_bytes,
                capability: info.capability,
                ..cpu
            }
        }
        None => cpu,
    })
}

/// Prints a plan and returns the exit code of its verdict.
pub fn print_plan(plan: &MemoryPlan, strict: bool, common: &CommonArgs) -> anyhow::Result<Exit> {
    if common.json {
        print_line(serde_json::to_string_pretty(plan)?)?;
    } else if !common.quiet {
        let display = common.display_options(io::stdout().is_terminal());
        let lines = report::plan::lines(plan, display);
        report::fit_terminal(lines, &console::Term::stdout()).iter().try_for_each(print_line)?;
    }
    Ok(match plan.verdict {
        PlanVerdict::Fits => Exit::Done,
        PlanVerdict::FitsAfterShrink if !strict => Exit::Done,
        PlanVerdict::FitsAfterShrink | PlanVerdict::DoesNotFit => Exit::Memory,
    })
}

/// Prints the plan of a run that will not start, on stderr.
pub fn eprint_plan(plan: &MemoryPlan, common: &CommonArgs) -> io::Result<()> {
    if common.quiet {
        return Ok(());
    }
    let display = common.display_options(io::stderr().is_terminal());
    let lines = report::fit_terminal(report::plan::lines(plan, display), &console::Term::stderr());
    lines.iter().try_for_each(|line| writeln!(io::stderr().lock(), "{line}"))
}

impl LockArgs {
    pub fn is_requested(self) -> bool {
        self.lock || self.frozen
    }

    /// Writes the lock, or refuses a plan that differs from it. A plan that does not fit is neither locked nor
    /// compared.
    pub fn apply(
        self,
        job: &Path,
        setup: &Setup,
        machine: &TargetMachine,
        plan: &MemoryPlan,
    ) -> anyhow::Result<()> {
        if plan.verdict == PlanVerdict::DoesNotFit {
            return Ok(());
        }
        let path = plan_lock::path(job);
        if self.lock {
            let lock = PlanLock::new(plan, lock_machine(setup, machine), setup.job.memory.headroom);
            std::fs::write(&path, lock.to_toml()?).map_err(Failure::io("write", &path))?;
        }
        if self.frozen {
            let name = path.display();
            let hint = format!("write it with `trainer plan {} --lock`", job.display());
            let locked = PlanLock::read(&path).map_err(|error| {
                let cause = std::error::Error::source(&error).map(|e| format!(": {e}")).unwrap_or_default();
                CliError::usage(format!("{error}{}", cause.trim_end()), hint)
            })?;
            let differences: Vec<String> =
                plan_lock::compare(&locked, plan).iter().map(ToString::to_string).collect();
            if !differences.is_empty() {
                let (was, now) = (locked.machine, lock_machine(setup, machine));
                let machines = if was == now {
                    String::new()
                } else {
                    format!("; {}", describe_machine_change(&was, &now))
                };
                return Err(CliError {
                    exit: Exit::Memory,
                    message: format!("the plan differs from `{name}`: {}", differences.join(", ")),
                    hint: Some(format!("`--lock` instead of `--frozen` accepts the new plan{machines}")),
                }
                .into());
            }
        }
        Ok(())
    }
}

/// The machine as the lock states it: its limits, not its free memory, which is never the same twice.
fn lock_machine(setup: &Setup, machine: &TargetMachine) -> plan_lock::LockedMachine {
    let limit = probe::host().map_or(machine.ram, |host| host.process_limit());
    let other_machine = machine.max_ram == u64::MAX;
    plan_lock::LockedMachine {
        threads: setup.threads,
        ram_bytes: if other_machine { machine.ram } else { limit },
        vram_bytes: machine.vram,
    }
}

fn describe_machine_change(was: &plan_lock::LockedMachine, now: &plan_lock::LockedMachine) -> String {
    let describe = |m: &plan_lock::LockedMachine| {
        let vram =
            if m.vram_bytes > 0 { format!(" and {} of vram", Bytes(m.vram_bytes)) } else { String::new() };
        format!("{}, {} of ram{vram}", counted(m.threads as u64, "thread"), Bytes(m.ram_bytes))
    };
    format!("it was planned for {}, this machine has {}", describe(was), describe(now))
}
