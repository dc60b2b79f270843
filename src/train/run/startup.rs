//! Start of a run: planning, its directory, and its weights, initial or from a checkpoint.

use super::evaluation::EvaluationState;
use super::skipped_records::SkippedRecordLog;
use super::{Run, RunOptions};
use crate::base::features::{InputSpec, TargetSpec};
use crate::base::{Role, regular_file};
use crate::data::DatasetContext;
use crate::data::fingerprint::{self, DataFingerprint, FingerprintInput};
use crate::data::language::tokenizer::MAX_SETTINGS_BYTES;
use crate::events::event::Event;
use crate::events::{Reporter, Summary};
use crate::graph::network::StepError;
use crate::job::Job;
use crate::kernels::update::cast_into;
use crate::memory::{measure, pressure};
use crate::planner::estimate::FACTORIZATION;
use crate::planner::plan::{MemoryPlan, PlanVerdict};
use crate::train::Failure;
use crate::train::checkpoint::{self, CheckpointState, Checkpoints, NewestCheckpoint};
use crate::train::datasets;
use crate::train::initial_weights::InitReport;
use crate::train::low_rank;
use crate::train::no_graph::NoGraph;
use crate::train::run_dir::{self, RunDir};
use crate::train::setup::Setup;
use crate::train::supervisor::RestartInfo;

/// Prepares and plans the job. The budget is the host's; after a worker died it is less than that worker needed,
/// unless no plan is that small. `previous` is the checkpoint state of the run being resumed.
pub(super) fn plan_run(
    mut job: Job,
    options: &RunOptions,
    previous: Option<&CheckpointState>,
) -> Result<PlannedRun, Failure> {
    if let Some(state) = previous {
        low_rank::keep_ranks(&mut job, &state.job);
        keep_begin_step(&mut job, &state.job);
    }
    let ram_cap = options.restart.as_ref().and_then(|restart| restart.max_ram);
    let ram = ram_cap.map_or(options.ram, |most| most.min(options.ram));
    let mut setup = Setup::open(job, ram, &options.opening)?.on_gpu(options.gpu.clone());
    setup.set_reference(options.reference);
    let recorded = previous.and_then(|state| state.data.as_ref());
    let data = fingerprint(&setup, recorded, &options.opening)?;
    if options.own_process {
        setup = setup.with_process_measured();
        // On a GPU most resident memory is the driver's, and code that every step runs.
        if setup.gpu.is_none() {
            setup.process.enforce();
        }
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

/// Takes the `quantize.begin_step` of the job of a checkpoint, as JSON, if `job` states none.
fn keep_begin_step(job: &mut Job, before: &serde_json::Value) {
    if let (Some(quantize), Some(begin)) = (&mut job.quantize, before["quantize"]["begin_step"].as_u64()) {
        quantize.begin_step.get_or_insert(begin);
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
pub(super) fn fingerprint(
    setup: &Setup,
    recorded: Option<&DataFingerprint>,
    opening: &DatasetContext,
) -> Result<DataFingerprint, Failure> {
    // Fingerprint the teacher's weights too: if they change, it is another experiment.
    let teacher = setup.teacher.as_ref().map(|teacher| &teacher.weights);
    let teacher = teacher.map(|file| FingerprintInput::file("distill.teacher", file));
    let sources = fingerprint::fingerprint_sources(
        datasets::inputs(&setup.job)?.into_iter().chain(teacher).collect(),
        recorded,
        &opening.cache,
        opening.observer.as_ref(),
    )?;
    let features = setup.features();
    let classes = match &features.target {
        TargetSpec::Class { names } | TargetSpec::MultiLabel { names } => names.clone(),
        _ => Vec::new(),
    };
    let vocabulary = match features.input {
        InputSpec::Tokens { vocab, .. } => Some(vocab),
        _ => None,
    };
    let tokenizer = setup.datasets.train.tokenizer_json().map(|text| fingerprint::hash_bytes(&text));
    Ok(DataFingerprint { sources, classes, vocabulary, tokenizer })
}

/// The checkpoint that a run starts from, and the newer ones that were skipped. Refuses to resume another experiment,
/// or a run none of whose checkpoints is intact.
pub(super) fn newest_checkpoint(
    folder: &RunDir,
    resumed: bool,
    setup: &Setup,
    options: &RunOptions,
) -> Result<NewestCheckpoint, Failure> {
    let mut newest = NewestCheckpoint::default();
    if resumed {
        newest = Checkpoints::new(folder.checkpoints()).newest();
        if newest.found.is_none() && !newest.skipped.is_empty() {
            let skipped = newest.skipped;
            return Err(Failure::NoWholeCheckpoint { folder: folder.checkpoints(), skipped });
        }
        let found = newest.found.as_ref().map(|(state, _)| state);
        check_same_experiment(folder, found, &setup.job, options)?;
        if let Some(step) = found.map(|state| state.step).filter(|step| *step > setup.total_steps) {
            let (total, key) = (setup.total_steps, setup.job.train.length().key());
            return Err(Failure::BeyondEnd { step, total, key });
        }
        newest.skipped.extend(damaged_event_lines(folder));
    } else if options.requested.resume.is_some() {
        newest.skipped.push(format!("{}: there is no run to resume", folder.root.display()));
    }
    Ok(newest)
}

/// Refuses to resume an experiment other than the checkpoint's or, without a checkpoint, that of the run's
/// `job.toml`. Refuses changed data too, unless the options allow it.
fn check_same_experiment(
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

/// Refuses to start if the disk has no space for the checkpoints the run will keep, and for `logits` bytes of the
/// teacher's logits.
pub(super) fn check_disk_space(folder: &RunDir, plan: &MemoryPlan, logits: u64) -> Result<(), Failure> {
    let present = Checkpoints::new(folder.checkpoints()).bytes();
    let needed = plan.disk.checkpoints_bytes.saturating_sub(present).saturating_add(logits);
    match folder.free_bytes() {
        Some(free) if free < needed => {
            let what = if logits > 0 { "checkpoints and the teacher's logits" } else { "checkpoints" };
            Err(Failure::DiskTooSmall { folder: folder.root.clone(), free, needed, what })
        }
        _ => Ok(()),
    }
}

/// Creates the run directory, with the job, the tokenizer and the plan.
pub(super) fn write_run_files(folder: &RunDir, setup: &Setup, plan: &MemoryPlan) -> Result<(), Failure> {
    folder.create(&setup.job)?;
    if let Some(tokenizer) = setup.datasets.train.tokenizer_json() {
        run_dir::write_atomic(&folder.tokenizer(), &tokenizer)?;
        for file in datasets::tokenizer_settings(&setup.job) {
            let text = regular_file::read(&file, MAX_SETTINGS_BYTES).map_err(Failure::io("read", &file))?;
            let name = file.file_name().unwrap_or_default();
            run_dir::write_atomic(&folder.root.join(name), &text)?;
        }
    }
    run_dir::write_atomic_with(&folder.preprocessing(), |out| setup.preprocessing.write(out))?;
    run_dir::write_atomic_with(&folder.plan(), |out| Ok(serde_json::to_writer_pretty(out, plan)?))?;
    // A vocabulary as JSON leaves many small freed blocks, which would fragment the heap of training.
    pressure::trim_malloc();
    Ok(())
}

pub(super) fn report_start(
    report: &mut Reporter,
    setup: &Setup,
    options: &RunOptions,
    folder: &RunDir,
    plan: &MemoryPlan,
) -> Result<(), Failure> {
    report.record(started_event(setup, folder))?;
    if let Some(RestartInfo { restarts, cause, .. }) = &options.restart {
        let (restarts, cause) = (*restarts, cause.clone());
        report.record(Event::Restarted { restarts, cause, budget: options.ram })?;
    }
    Ok(report.record(Event::Planned { plan: plan.clone() })?)
}

/// Takes the planned device memory, if there is a GPU. Returns whether passes may be captured as CUDA graphs; reports
/// why not.
pub(super) fn prepare_gpu(
    report: &mut Reporter,
    setup: &Setup,
    options: &RunOptions,
    plan: &MemoryPlan,
    newest: &NewestCheckpoint,
) -> Result<bool, Failure> {
    let Some(gpu) = &setup.gpu else { return Ok(false) };
    gpu.preallocate(plan.peak.vram_bytes);
    let reason = match () {
        // The observer must see every reservation of every pass, and a replayed graph makes none.
        () if options.observer.is_some() => NoGraph::Observed,
        () if setup.backend().is_reference() => NoGraph::Reference,
        () if !setup.job.memory.graphs => NoGraph::TurnedOff,
        () if setup.teacher.is_some() => NoGraph::Distilled,
        () if !plan.chosen.offload.is_empty() => NoGraph::Offloaded,
        () => return Ok(true),
    };
    let step = newest.found.as_ref().map_or(0, |(state, _)| state.step);
    report.record(Event::CudaGraphDisabled { step, reason: reason.to_string() })?;
    Ok(false)
}

fn started_event(setup: &Setup, folder: &RunDir) -> Event {
    Event::Started {
        name: setup.job.name.clone(),
        run: folder.root.display().to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        seed: setup.job.seed,
        device: setup.target_machine(0, 0).device,
        threads: setup.threads,
        parameters: setup.num_parameters(),
        trained_parameters: Some(setup.num_trained()),
        train_samples: setup.datasets.train.len(),
        valid_samples: setup.datasets.valid.len(),
        test_samples: setup.test_samples,
        total_steps: setup.total_steps,
        steps_per_epoch: setup.order.updates_per_epoch(),
    }
}

impl Run<'_> {
    /// Loads the weights to start from: those of the checkpoint or, without one, those that the job names, if any.
    pub(super) fn load(&mut self, newest: NewestCheckpoint) -> Result<(), Failure> {
        if newest.found.is_none() {
            self.load_initial_weights()?;
            if let Some(observer) = &self.ctx.options.observer {
                observer.on_start(&self.ctx.engine.store)?;
            }
        }
        if self.ctx.options.requested.resume.is_some() { self.resume(newest) } else { Ok(()) }
    }

    fn load_initial_weights(&mut self) -> Result<(), Failure> {
        let Some(weights) = self.ctx.setup.initial_weights()? else { return Ok(()) };
        let bytes = weights.factorization_bytes(&self.ctx.engine.store.layout);
        let host = self.ctx.engine.host_ledger.clone();
        let reserve = || host.reserve(Role::Workspace, FACTORIZATION, bytes);
        let held = match (bytes > 0).then(reserve).transpose() {
            Ok(held) => held,
            // Loading has no smaller form: retry once as is.
            Err(first) => {
                self.ctx.record_oom(&first)?;
                Some(reserve().map_err(StepError::Oom)?)
            }
        };
        let (store, average) = (&self.ctx.engine.store, &self.ctx.engine.average);
        weights.load(store)?;
        drop(held);
        if let Some(average) = average {
            cast_into(&store.master_weights, average)?;
        }
        let InitReport { matched, new, resized, left_over, factorized } = weights.report;
        self.ctx.record(Event::Initialized { matched, new, resized, left_over, factorized })
    }

    /// Resumes from a checkpoint, or starts from scratch if there is none.
    fn resume(&mut self, NewestCheckpoint { found, skipped }: NewestCheckpoint) -> Result<(), Failure> {
        let checkpoint = found.as_ref().map(|(_, path)| path.display().to_string());
        if let Some((state, path)) = found {
            checkpoint::load(&path, &self.ctx.engine.checkpoint_tensors())?;
            self.ctx.position.resume(&state);
            self.ctx.engine.round_weights(state.step)?;
            self.clock.resume(state.elapsed_s, state.data_wait_s);
            self.grad_scaler = state.grad_scaler;
            self.skipped_records = SkippedRecordLog::resumed(state.skipped_records);
            self.evaluation = EvaluationState {
                due: state.evaluation_due,
                metrics: state.metrics,
                detail: None,
                best: state.best,
                stop: state.stop,
                train_sums: state.train_sums,
            };
            self.deferred.evaluation = state.evaluation_deferred;
            self.checkpoints.resume(state.step, path, state.best.map(|(_, step)| step));
        }
        self.ctx.record(Event::Resumed { step: self.ctx.position.step, checkpoint, skipped })
    }
}

/// Lines of `events.jsonl` that do not parse as events.
fn damaged_event_lines(folder: &RunDir) -> Vec<String> {
    let path = folder.events();
    let lines = Summary::from_events(&path).map(|summary| summary.damaged_lines).unwrap_or_default();
    lines.iter().map(|line| format!("{}: line {line} is not an event", path.display())).collect()
}
