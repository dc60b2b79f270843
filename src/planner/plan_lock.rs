//! The lock file beside a job: the memory plan that was reviewed, written reproducibly.
//!
//! Holds the plan, the machine it was made on and the margins within which another plan counts as the same. It does not
//! record free memory, so locking twice on one machine gives the same text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::execution_plan::{BatchSplit, ExecutionPlan};
use super::plan::{MemoryPlan, Peak, PlanVerdict};
use crate::base::units::{Bytes, MemorySize};

const HEADER: &str = "\
# The memory plan of the job beside this file, written by `--lock`. With `--frozen`, a run that would be planned
# otherwise is refused. Bytes are bytes.

";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanLock {
    pub plan: LockedPlan,
    pub machine: LockedMachine,
    pub margins: Margins,
}

/// The reviewed part of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LockedPlan {
    pub verdict: PlanVerdict,
    pub device: String,
    pub samples_per_update: usize,
    pub requested: BatchSplit,
    pub chosen: ExecutionPlan,
    pub peak: Peak,
    /// Bytes at the peak by role, device and host together.
    pub roles: BTreeMap<String, u64>,
}

/// Where the plan was made; for the reader, and for the message if another machine plans differently.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedMachine {
    pub threads: usize,
    /// Maximum host bytes of a process there.
    pub ram_bytes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub vram_bytes: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Tolerated differences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Margins {
    /// How much the peak may exceed the locked one: a different number of threads has different workspaces.
    pub peak: MemorySize,
    /// The job's `memory.headroom`.
    pub headroom: MemorySize,
}

/// A difference between a plan and the locked one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanDifference {
    pub key: String,
    pub was: String,
    pub now: String,
}

impl std::fmt::Display for PlanDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "`{}` was {} and is {}", self.key, self.was, self.now)
    }
}

/// Why there is no lock to compare with.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("cannot read `{}`", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("`{}` is not a lock", path.display())]
    Parse {
        path: PathBuf,
        #[source]
        source: Box<toml::de::Error>,
    },
}

/// Path of the lock file: `job.lock` for `job.toml`.
pub fn path(job: &Path) -> PathBuf {
    job.with_extension("lock")
}

impl PlanLock {
    pub fn new(plan: &MemoryPlan, machine: LockedMachine, headroom: MemorySize) -> Self {
        let mut roles = BTreeMap::new();
        for part in &plan.parts {
            *roles.entry(part.role.to_string().replace(' ', "_")).or_default() += part.bytes;
        }
        let plan = LockedPlan {
            verdict: plan.verdict,
            device: plan.device.clone(),
            samples_per_update: plan.samples_per_update,
            requested: plan.requested,
            chosen: plan.chosen,
            peak: plan.peak,
            roles,
        };
        Self { plan, machine, margins: Margins { peak: MemorySize::Percent(5.0), headroom } }
    }

    /// The text of the file.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        Ok(HEADER.to_owned() + &toml::to_string(self)?)
    }

    pub fn read(path: &Path) -> Result<Self, LockError> {
        /// A larger file is not a lock.
        const MAX_BYTES: u64 = 1 << 20;
        let text = crate::base::regular_file::read_to_string(path, MAX_BYTES)
            .map_err(|source| LockError::Read { path: path.to_owned(), source })?;
        toml::from_str(&text)
            .map_err(|source| LockError::Parse { path: path.to_owned(), source: Box::new(source) })
    }
}

/// The differences between `now` and the locked plan. The verdict follows from the rest; a peak that is lower, or
/// within the lock's margin, counts as the same plan on another machine.
pub fn compare(lock: &PlanLock, now: &MemoryPlan) -> Vec<PlanDifference> {
    let now = PlanLock::new(now, lock.machine.clone(), lock.margins.headroom).plan;
    let was = &lock.plan;
    let mut differences = Vec::new();
    let mut differ = |key: &str, was: String, now: String| {
        if was != now {
            differences.push(PlanDifference { key: key.into(), was, now });
        }
    };
    let split = |split: BatchSplit| format!("{} x {}", split.micro_batch, split.accumulation_steps);
    let (old, new) = (&was.chosen, &now.chosen);
    differ("device", was.device.clone(), now.device.clone());
    differ("samples_per_update", was.samples_per_update.to_string(), now.samples_per_update.to_string());
    differ("requested", split(was.requested), split(now.requested));
    differ("chosen.micro_batch", split(old.split()), split(new.split()));
    differ("chosen.recompute", old.recompute.to_string(), new.recompute.to_string());
    differ("chosen.optimizer", old.optimizer.to_string(), new.optimizer.to_string());
    differ("chosen.offload", old.offload_names(), new.offload_names());
    differ("chosen.eval_micro_batch", old.eval_micro_batch.to_string(), new.eval_micro_batch.to_string());
    let higher = |was: u64, now: u64| now > was + lock.margins.peak.resolve(Bytes(was)).0;
    let mut grown = false;
    for (key, was, now) in [
        ("peak.vram_bytes", was.peak.vram_bytes, now.peak.vram_bytes),
        ("peak.ram_bytes", was.peak.ram_bytes, now.peak.ram_bytes),
    ] {
        if higher(was, now) {
            grown = true;
            differ(key, Bytes(was).to_string(), Bytes(now).to_string());
        }
    }
    for (role, bytes) in now.roles.iter().filter(|_| grown) {
        let before = was.roles.get(role).copied().unwrap_or(0);
        if higher(before, *bytes) {
            differ(&format!("roles.{role}"), Bytes(before).to_string(), Bytes(*bytes).to_string());
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::OptimizerKind;
    use crate::planner::execution_plan::Offload;
    use crate::report::fixtures;

    fn locked() -> PlanLock {
        let machine = LockedMachine { threads: 2, ram_bytes: 8 << 30, vram_bytes: 0 };
        PlanLock::new(&fixtures::plan(), machine, MemorySize::Percent(5.0))
    }

    fn differences(change: impl FnOnce(&mut MemoryPlan)) -> Vec<String> {
        let mut plan = fixtures::plan();
        change(&mut plan);
        compare(&locked(), &plan).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_lock_reads_back_and_says_the_same_twice() {
        let text = locked().to_toml().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = path(&folder.path().join("job.toml"));
        std::fs::write(&file, &text).unwrap();
        assert_eq!(file.file_name().unwrap(), "job.lock");
        let reread = PlanLock::read(&file).unwrap();
        assert_eq!((reread.to_toml().unwrap(), reread), (text, locked()));
    }

    #[test]
    fn what_differs_harmlessly_is_the_same_plan() {
        let none: Vec<String> = vec![];
        assert_eq!(differences(|_| {}), none);
        assert_eq!(differences(|plan| plan.budget.ram_bytes *= 2), none, "free memory");
        assert_eq!(differences(|plan| plan.peak.ram_bytes -= 50 << 20), none, "less");
        assert_eq!(differences(|plan| plan.peak.ram_bytes += 10 << 20), none, "within 5 %");
        assert_eq!(differences(|plan| plan.candidates.clear()), none);
    }

    #[test]
    fn another_execution_plan_is_named() {
        let found = differences(|plan| {
            (plan.chosen.micro_batch, plan.chosen.accumulation_steps) = (25, 4);
            plan.chosen.optimizer = OptimizerKind::Adamw8bit;
            plan.chosen.offload = &[Offload::OptimizerState];
            plan.chosen.recompute = 3;
        });
        assert_eq!(
            found,
            [
                "`chosen.micro_batch` was 50 x 2 and is 25 x 4",
                "`chosen.recompute` was 0 and is 3",
                "`chosen.optimizer` was adamw and is adamw8bit",
                "`chosen.offload` was nothing and is optimizer state",
            ]
        );
    }

    #[test]
    fn a_peak_that_grew_says_what_grew() {
        let found = differences(|plan| {
            plan.peak.ram_bytes += 68 << 20;
            plan.parts[4].bytes += 68 << 20;
        });
        assert_eq!(
            found,
            [
                "`peak.ram_bytes` was 212.00 MiB and is 280.00 MiB",
                "`roles.activations` was 132.00 MiB and is 200.00 MiB"
            ]
        );
    }
}
