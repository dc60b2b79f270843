//! Before the first update: the teacher computes its logits of all training samples, if the job stores them.
//!
//! They are an entry of the data cache, whose key is everything that they depend on. The teacher's memory is given back
//! before the tensors of training are allocated.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use super::{RunOptions, UpdateError, ended_early, startup};
use crate::base::{MicroBatchSpec, Phase, Role};
use crate::data::cache::CacheKey;
use crate::data::fingerprint::hash_bytes;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::data::stored_logits::StoredLogits;
use crate::data::{DataError, HostBatch};
use crate::events::Reporter;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::graph::network::StepError;
use crate::layers::{Mode, PassContext};
use crate::memory::{Oom, Reservation, measure, resident_limit};
use crate::param_store::ParamStore;
use crate::planner::ExecutionPlan;
use crate::planner::estimate::{Allocation, batch_bytes};
use crate::train::Failure;
use crate::train::engine::{Ledgers, map_device_oom};
use crate::train::postmortem::OomAttempt;
use crate::train::setup::Setup;
use crate::train::staging::BatchStaging;
use crate::train::teacher::Teacher;

/// The name of the cache entry, and the version of its content.
const ENTRY: &str = "teacher-logits";
const VERSION: u32 = 1;

/// The logits of a run: in the cache, or to be computed.
pub(super) struct LogitEntry {
    key: CacheKey,
    found: Option<PathBuf>,
}

impl LogitEntry {
    /// Looks for the logits in the cache, which reads all of them; `None` if the job stores none.
    pub fn find(setup: &Setup, options: &RunOptions) -> Result<Option<Self>, Failure> {
        let (Some(teacher), Some((format, _))) = (&setup.teacher, &setup.stored_logits) else {
            return Ok(None);
        };
        let data = match &options.data {
            Some(data) => data.clone(),
            None => startup::fingerprint(setup, None, &options.opening)?,
        };
        let samples = (setup.job.seed, &setup.job.data.source, setup.features());
        let (samples, format_of_weights) =
            (serde_json::json!(samples), teacher.weight_format(setup.backend()));
        let preprocessing = hash_bytes(&setup.preprocessing.to_json());
        let contents: Vec<&str> = data.sources.iter().map(|source| source.content.as_str()).collect();
        let contents = contents.join(" ");
        let settings =
            format!("{VERSION} {format:?} {format_of_weights} {samples} {preprocessing} {contents}");
        let key = CacheKey::new(&[], &settings)?;
        let found = options.opening.cache.find(ENTRY, key);
        Ok(Some(Self { key, found }))
    }

    /// Bytes that the file will take on disk.
    pub fn missing_bytes(&self, setup: &Setup) -> u64 {
        if self.found.is_some() { 0 } else { setup.stored_logits_bytes() }
    }

    /// Opens the logits; computes them first if they are not in the cache. `None` if a stop was requested meanwhile.
    pub fn open(
        self,
        setup: &Setup,
        options: &RunOptions,
        plan: ExecutionPlan,
        report: &mut Reporter,
    ) -> Result<Option<StoredLogits>, Failure> {
        let (Some(teacher), Some((format, _))) = (&setup.teacher, &setup.stored_logits) else {
            return Ok(None);
        };
        let (begun, samples) = (Instant::now(), setup.datasets.train.len());
        let was_stored = self.found.is_some();
        let path = match self.found {
            Some(path) => path,
            None => {
                report.activity.begin(Work::Teacher, 0, samples);
                let mut computed = None;
                let put = options.opening.cache.put(ENTRY, self.key, |out| {
                    match computed.insert(compute(setup, options, teacher, plan, report, out)) {
                        Ok(true) => Ok(()),
                        // An error, so that the cache keeps no entry; `computed` holds the cause.
                        _ => Err(DataError::OutOfMemory { bytes: 0 }),
                    }
                });
                if computed.transpose()? == Some(false) {
                    return Ok(None);
                }
                // If the computation was not begun, the error is that of the cache.
                put?
            }
        };
        let (seconds, bytes) = (begun.elapsed().as_secs_f64(), format.file_bytes(samples));
        let shown = path.display().to_string();
        report.record(Event::TeacherLogits { path: shown, samples, bytes, was_stored, seconds })?;
        Ok(Some(StoredLogits::open(&path, *format, samples)?))
    }
}

/// Gives the memory of the teacher back, so that updates are compared with what they take alone. Returns the device
/// bytes that the teacher took at its peak.
pub(super) fn end_phase(setup: &Setup, plan: ExecutionPlan) -> u64 {
    measure::take_recent_peak();
    if setup.gpu.is_none() {
        measure::set_planned_peak(setup.peak_bytes(plan).saturating_sub(setup.process.non_heap));
    }
    setup.gpu.as_ref().map_or(0, |gpu| gpu.take_recent_peak())
}

/// Writes the logits of all samples. After an out-of-memory error it continues with smaller micro-batches. Returns
/// whether it wrote them all, and no stop was requested.
fn compute(
    setup: &Setup,
    options: &RunOptions,
    teacher: &Teacher,
    mut plan: ExecutionPlan,
    report: &mut Reporter,
    out: &mut dyn Write,
) -> Result<bool, Failure> {
    let ledgers = Ledgers::new(setup, options.ram, options.injected_oom.clone());
    let (mut done, mut tried, mut first) = (0, Vec::new(), None);
    loop {
        let attempt = TeacherPass::new(setup, teacher, ledgers.clone(), plan)
            .and_then(|pass| pass.run(options, report, &mut done, out));
        let oom = match attempt {
            Err(UpdateError::Oom(oom)) => oom,
            Err(UpdateError::Failed(failure)) => return Err(failure),
            Ok(complete) => return Ok(complete),
        };
        let Oom { phase, bytes, available: left, .. } = oom;
        report.record(Event::Oom { step: 0, phase, requester: oom.requester.clone(), bytes, left })?;
        let batch = setup.estimator().teacher_batch(plan);
        // The weights of the teacher have no smaller form: what is refused at one sample is retried once as it is.
        let may_retry =
            tried.len() < setup.job.memory.max_retries as usize && (batch > 1 || tried.is_empty());
        let next = may_retry.then(|| batch.div_ceil(2));
        let change = next.map(|batch| format!("teacher's micro-batch {batch}"));
        tried.push(OomAttempt::new(0, &oom, change));
        let first: &Oom = first.get_or_insert(oom);
        match next {
            Some(eval_micro_batch) => plan = ExecutionPlan { eval_micro_batch, prefetch: 0, ..plan },
            None => return Err(Failure::OutOfMemory { first: Box::new(first.clone()), tried }),
        }
    }
}

/// The teacher in memory.
struct TeacherPass<'a> {
    setup: &'a Setup,
    store: ParamStore,
    ledgers: Ledgers,
    staging: BatchStaging,
    plan: ExecutionPlan,
    _reservations: Vec<Reservation>,
}

impl<'a> TeacherPass<'a> {
    fn new(
        setup: &'a Setup,
        teacher: &Teacher,
        ledgers: Ledgers,
        plan: ExecutionPlan,
    ) -> Result<Self, UpdateError> {
        ledgers.tensors.set_phase(Phase::Teacher);
        ledgers.host.set_phase(Phase::Teacher);
        let reserve = |Allocation { role, name, bytes, space }| {
            let ledger = if space == ledgers.tensors.space() { &ledgers.tensors } else { &ledgers.host };
            ledger.reserve(role, name, bytes)
        };
        let parts = setup.estimator().teacher_allocations(plan).into_iter().map(reserve);
        let reservations = parts.collect::<Result<_, _>>().map_err(UpdateError::Oom)?;
        let (backend, device) = (setup.backend(), setup.device());
        let store = teacher
            .store(backend, &device)
            .map_err(|error| map_device_oom(setup, &ledgers.tensors, Role::Weights, error.into()))?;
        teacher.load(&store)?;
        let staging = BatchStaging::new(teacher.dtype(backend), &device, &ledgers);
        Ok(Self { setup, store, staging, ledgers, plan, _reservations: reservations })
    }

    /// Writes the logits of the samples after the first `done`, which it advances.
    fn run(
        &self,
        options: &RunOptions,
        report: &Reporter,
        done: &mut u64,
        out: &mut dyn Write,
    ) -> Result<bool, UpdateError> {
        let (setup, samples) = (self.setup, self.setup.datasets.train.len());
        let Some((format, order)) = &setup.stored_logits else { return Ok(true) };
        let batch = setup.estimator().teacher_batch(self.plan);
        let from = Cursor { update: 0, done: *done };
        let loading = setup.loader_options(batch, self.plan.prefetch);
        let source = setup.datasets.train.clone();
        let mut loader = Loader::start(source, order.clone(), from, 1, loading).map_err(Failure::from)?;
        let mut encoded = Vec::with_capacity(format.file_bytes(batch as u64) as usize);
        while *done < samples {
            if options.signals.stop_requested().is_some() {
                return Ok(false);
            }
            let batch = loader.next().map_err(|error| self.map_data_error(error))?;
            let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
            let logits = if batch.ids.is_empty() { Vec::new() } else { self.logits(&batch)? };
            encoded.clear();
            let (per_sample, mut id) = (logits.len() / batch.ids.len().max(1), *done);
            let mut begin = 0;
            // Ids ascend; those that are absent are bad records.
            while begin < batch.ids.len() {
                let run =
                    batch.ids[begin..].iter().zip(batch.ids[begin]..).take_while(|(a, b)| *a == b).count();
                (id..batch.ids[begin]).for_each(|_| format.encode_missing(&mut encoded));
                let end = begin + run;
                format.encode(&logits[begin * per_sample..end * per_sample], run, &mut encoded);
                (id, begin) = (batch.ids[end - 1] + 1, end);
            }
            (id..*done + batch.consumed).for_each(|_| format.encode_missing(&mut encoded));
            out.write_all(&encoded).map_err(Failure::io("write", ENTRY))?;
            *done += batch.consumed;
            report.activity.advance(batch.consumed);
        }
        Ok(true)
    }

    /// The logits of a micro-batch, padded samples cut to the smallest bucket that holds the longest of them.
    fn logits(&self, batch: &HostBatch) -> Result<Vec<f32>, UpdateError> {
        resident_limit::trim();
        let (setup, ledger) = (self.setup, &self.ledgers.tensors);
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let (features, network) = setup.network_for_length(longest);
        let Some(teacher) = &network.teacher else { return Ok(Vec::new()) };
        let spec = MicroBatchSpec { batch: batch.ids.len(), dtype: teacher.dtype, backend: setup.backend() };
        ledger.set_phase(Phase::Teacher);
        let run = || -> Result<Vec<f32>, StepError> {
            let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec))?;
            self.staging.reserve_buffers(batch, features)?;
            let tensors = self.staging.to_tensors(batch, features)?;
            let pass = PassContext {
                seed: setup.job.seed,
                epoch: batch.epoch,
                lengths: (!batch.lengths.is_empty()).then_some(&batch.lengths),
                sample_info: tensors.sample_info.as_ref(),
                ..PassContext::new(&self.store, Mode::Eval, &batch.ids)
            };
            teacher.logits_on_host(&teacher.executor(Some(pass), spec, ledger), Some(&tensors.inputs))
        };
        Ok(run().map_err(|error| map_device_oom(setup, ledger, Role::Activations, error))?)
    }

    /// Maps a buffer allocation that the system refused to an OOM.
    fn map_data_error(&self, error: DataError) -> UpdateError {
        match error {
            DataError::OutOfMemory { bytes } => {
                UpdateError::Oom(self.ledgers.host.oom_error(Role::DataPipeline, "prefetch", bytes))
            }
            error => UpdateError::Failed(error.into()),
        }
    }
}
