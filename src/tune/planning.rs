//! Plans a trial as `trainer plan` plans a job, and gives it a budget of its own.

use super::folder::PlannedTrial;
use super::search_space::Assignment;
use super::slots::MemoryNeed;
use crate::base::units::{Bytes, MemorySize};
use crate::data::DatasetContext;
use crate::job::Job;
use crate::planner::budget::TargetMachine;
use crate::train::Failure;
use crate::train::setup::Setup;

impl PlannedTrial {
    /// Plans `job`, which has the settings `set`, for the whole machine.
    pub fn plan(
        set: Vec<Assignment>,
        job: Job,
        machine: &TargetMachine,
        opening: &DatasetContext,
        reference: bool,
    ) -> Result<Self, Failure> {
        let mut setup = Setup::open(job, machine.ram, opening)?.with_process_measured();
        setup.set_reference(reference);
        let plan = setup.plan_for(machine);
        let peak = MemoryNeed { ram: plan.peak.ram_bytes, vram: plan.peak.vram_bytes };
        let wanted = MemoryNeed::of_peak(peak);
        let budget = MemoryNeed { ram: wanted.ram.min(machine.ram), vram: wanted.vram.min(machine.vram) };
        Ok(Self { set, verdict: plan.verdict, peak, budget, total_steps: setup.total_steps })
    }

    /// Limits the job to the budget of this trial.
    pub fn limit(&self, job: &mut Job) {
        job.memory.ram = MemorySize::Bytes(Bytes(self.budget.ram));
        if self.budget.vram > 0 {
            job.memory.vram = MemorySize::Bytes(Bytes(self.budget.vram));
        }
    }
}
