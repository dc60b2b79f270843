//! Start of a run: planning, its directory, and its weights, initial or from a checkpoint.

use super::{Run, RunOptions};
use crate::base::features::{InputSpec, TargetSpec};
use crate::data::DatasetContext;
use crate::data::fingerprint::{self, DataFingerprint};
use crate::events::Summary;
use crate::events::event::Event;
use crate::job::Job;
use crate::kernels::update::cast_into;
use crate::memory::measure;
use crate::planner::plan::{MemoryPlan, PlanVerdict};
use crate::train::Failure;
use crate::train::checkpoint::{self, CheckpointState, Checkpoints, NewestCheckpoint};
use crate::train::datasets::Datasets;
use crate::train::run_dir::RunDir;
use crate::train::setup::Setup;

/// Prepares and plans the job. The budget is the host's; after a worker died it is less than that worker needed,
/// unless no plan is that small. `previous` is the checkpoint state of the run being resumed.
pub(super) fn plan_run(
    job: Job,
    options: &RunOptions,
    previous: Option<&CheckpointState>,
) -> Result<PlannedRun, Failure> {
    let ram_cap = options.restart.as_ref().and_then(|restart| restart.max_ram);
    let ram = ram_cap.map_or(options.ram, |most| most.min(options.ram));
    let mut setup = Setup::open(job, ram, &options.opening)?.on_gpu(options.gpu.clone());
    let recorded = previous.and_then(|state| state.data.as_ref());
    let data = fingerprint(&setup, recorded, &options.opening)?;
    if options.own_process {
        setup = setup.with_process_measured();
    }
    // The heap of the steps is compared with the plan; data preparation is a phase of its own.
    measure::reset_peaks();
    if let Some(state) = previous {
        setup.keep_optimizer(state.optimizer);
    }
    let plan = setup.plan(ram);
    let minimum = plan.peak.ram_bytes;
    match plan.verdict {
        PlanVerdict::DoesNotFit if ram < minimum && minimum <= options.ram => {
            let plan = setup.plan(minimum);
            Ok(PlannedRun { setup, plan, ram: minimum, data })
        }
        PlanVerdict::DoesNotFit => Err(Failure::DoesNotFit(Box::new(plan))),
        PlanVerdict::Fits | PlanVerdict::FitsAfterShrink => Ok(PlannedRun { setup, plan, ram, data }),
    }
}

/// A prepared job and its plan.
pub(super) struct PlannedRun {
    pub setup: Setup,
    pub plan: MemoryPlan,
    /// Host memory budget, in bytes.
    pub ram: u64,
    pub data: DataFingerprint,
}

/// Fingerprints the data. `recorded` is the fingerprint in the checkpoint being resumed.
fn fingerprint(
    setup: &Setup,
    recorded: Option<&DataFingerprint>,
    opening: &DatasetContext,
) -> Result<DataFingerprint, Failure> {
    let sources = fingerprint::fingerprint_sources(
        Datasets::inputs(&setup.job)?,
        recorded,
        &opening.cache,
        opening.observer.as_ref(),
    )?;
    let features = setup.features();
    let classes = match &features.target {
        TargetSpec::Class { names } => names.clone(),
        _ => Vec::new(),
    };
    let vocabulary = match features.input {
        InputSpec::Tokens { vocab, .. } => Some(vocab),
        _ => None,
    };
    let tokenizer = setup.datasets.train.tokenizer_json().map(|text| fingerprint::hash_bytes(&text));
    Ok(DataFingerprint { sources, classes, vocabulary, tokenizer })
}

/// Refuses to resume an experiment other than the checkpoint's or, without a checkpoint, that of the run's
/// `job.toml`. Refuses changed data too, unless the options allow it.
pub(super) fn check_same_experiment(
    folder: &RunDir,
    found: Option<&CheckpointState>,
    job: &Job,
    options: &RunOptions,
) -> Result<(), Failure> {
    let mut changes = match found {
        Some(state) => job.structural_changes_since(&state.job),
        None => match Job::load(&folder.job(), &[]) {
            Ok(before) => before.structural_changes(job),
            Err(_) => return Err(Failure::UnknownExperiment(folder.root.clone())),
        },
    };
    if let Some((was, now)) = found.and_then(|state| state.data.as_ref()).zip(options.data.as_ref()) {
        // Contents decide, not paths: moved files are the same data.
        changes.retain(|change| !change.is_path_change());
        let differs = was.changes(now);
        if changes.is_empty() && !differs.is_empty() && !options.allow_changed_data {
            return Err(Failure::DataChanged(differs));
        }
    }
    match changes.is_empty() {
        true => Ok(()),
        false => Err(Failure::JobChanged(changes)),
    }
}

/// Refuses to start if the disk has no space for the checkpoints the run will keep.
pub(super) fn check_disk_space(
    folder: &RunDir,
    plan: &MemoryPlan,
    checkpoints: &Checkpoints,
) -> Result<(), Failure> {
    let needed = plan.disk.checkpoints_bytes.saturating_sub(checkpoints.bytes());
    match folder.free_bytes() {
        Some(free) if free < needed => {
            Err(Failure::DiskTooSmall { folder: folder.root.clone(), free, needed })
        }
        _ => Ok(()),
    }
}

pub(super) fn started_event(setup: &Setup, folder: &RunDir) -> Event {
    Event::Started {
        name: setup.job.name.clone(),
        run: folder.root.display().to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        seed: setup.job.seed,
        device: setup.target_machine(0, 0).device,
        threads: setup.threads,
        parameters: setup.num_parameters(),
        train_samples: setup.datasets.train.len(),
        valid_samples: setup.datasets.valid.len(),
        total_steps: setup.total_steps,
        steps_per_epoch: setup.order.updates_per_epoch(),
    }
}

impl Run<'_> {
    /// Loads the initial weights the job names, if the run starts from scratch.
    pub(super) fn load_initial_weights(&self, from_scratch: bool) -> Result<(), Failure> {
        let store = &self.engine.store;
        match &self.setup.job.train.init {
            Some(file) if from_scratch => {
                checkpoint::load_weights(file, store)?;
                match &self.engine.average {
                    Some(average) => Ok(cast_into(&store.master_weights, average)?),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Resumes from a checkpoint, or starts from scratch if there is none.
    pub(super) fn resume(
        &mut self,
        NewestCheckpoint { found, skipped }: NewestCheckpoint,
    ) -> Result<(), Failure> {
        let checkpoint = found.as_ref().map(|(_, path)| path.display().to_string());
        if let Some((state, path)) = found {
            checkpoint::load(&path, &self.engine.checkpoint_tensors())?;
            self.grad_scaler = state.scaling;
            (self.step, self.cursor, self.samples) = (state.step, state.cursor, state.samples);
            (self.reported_bad, self.skipped_records) = (state.left_out.count(), state.left_out);
            (self.digest, self.best, self.metrics) = (state.digest, state.best, state.metrics);
            (self.evaluation_due, self.deferred.evaluation) = (state.evaluation_due, state.evaluation_owed);
            (self.last_finite, self.unproven_checkpoint) = (state.step, Some(state.step));
            (self.clock.previous_s, self.clock.data_wait_s) = (state.elapsed_s, state.data_wait_s);
            self.last_checkpoint = Some((state.step, path));
        }
        self.report.record(Event::Resumed { step: self.step, checkpoint, skipped })?;
        Ok(())
    }
}

/// Lines of `events.jsonl` that do not parse as events.
pub(super) fn damaged_event_lines(folder: &RunDir) -> Vec<String> {
    let path = folder.events();
    let lines = Summary::from_events(&path).map(|summary| summary.damaged_lines).unwrap_or_default();
    lines.iter().map(|line| format!("{}: line {line} is not an event", path.display())).collect()
}
