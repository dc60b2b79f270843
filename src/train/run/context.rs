//! What every part of a run works with: the job, its tensors, its training data, its position and its reporter.

use super::position::Position;
use super::{RunOptions, UpdateError};
use crate::base::{Phase, Role};
use crate::data::DataError;
use crate::data::loader::Loader;
use crate::data::stored_logits::StoredLogits;
use crate::events::Reporter;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::graph::network::StepError;
use crate::job::MemoryLog;
use crate::memory::{Oom, RefusedBy, Reservation};
use crate::metrics::histogram::Histogram;
use crate::planner::ExecutionPlan;
use crate::train::Failure;
use crate::train::engine::{Engine, Ledgers};
use crate::train::memory_snapshot::{MemorySnapshot, SnapshotReason};
use crate::train::run_dir::RunDir;
use crate::train::setup::Setup;

pub(super) struct RunContext<'a> {
    pub setup: &'a Setup,
    pub options: &'a RunOptions,
    folder: &'a RunDir,
    pub engine: Engine<'a>,
    /// The training loader; `None` until the next update opens one, as after a change of plan.
    pub train_loader: Option<TrainLoader>,
    pub position: Position,
    report: &'a mut Reporter,
}

/// A training loader, and the reservation of its buffers.
pub(super) struct TrainLoader {
    pub loader: Loader,
    reservation: Reservation,
}

impl<'a> RunContext<'a> {
    /// Allocates the tensors of a run. `graphs` permits capturing GPU passes as CUDA graphs; `logits` are those of the
    /// teacher, if they are stored.
    pub fn new(
        setup: &'a Setup,
        options: &'a RunOptions,
        folder: &'a RunDir,
        plan: ExecutionPlan,
        graphs: bool,
        logits: Option<StoredLogits>,
        report: &'a mut Reporter,
    ) -> Result<Self, Failure> {
        let ledgers = Ledgers::new(setup, options.ram, options.injected_oom.clone());
        if setup.job.log.memory == MemoryLog::Detailed {
            ledgers.tensors.record();
            ledgers.host.record();
        }
        let mut engine = match Engine::new(setup, ledgers.clone(), plan, graphs) {
            // There is no smaller plan for the weights themselves: retry once as is.
            Err(StepError::Oom(oom)) => {
                report.record(oom_event(0, &oom))?;
                report.record(snapshot_event(folder, 0, SnapshotReason::Oom, &ledgers, Some(&oom)))?;
                if oom.refused_by == RefusedBy::Driver {
                    setup.gpu.iter().for_each(|gpu| gpu.release_free_chunks());
                }
                Engine::new(setup, ledgers, plan, graphs)?
            }
            other => other?,
        };
        engine.load_teacher()?;
        if logits.is_some() {
            engine.stored_logits = logits;
        }
        let position = Position::start(setup.total_steps.min(options.max_steps.unwrap_or(u64::MAX)));
        Ok(Self { setup, options, folder, engine, train_loader: None, position, report })
    }

    pub fn record(&mut self, event: Event) -> Result<(), Failure> {
        Ok(self.report.record(event)?)
    }

    /// Passes the distribution of a tensor's values to the sinks.
    pub fn record_histogram(&mut self, name: &str, histogram: &Histogram) -> Result<(), Failure> {
        Ok(self.report.record_histogram(self.position.step, name, histogram)?)
    }

    /// Begins work of which `total` samples will be counted.
    pub fn begin(&self, work: Work, total: u64) {
        self.report.activity.begin(work, self.position.step, total);
    }

    /// Counts samples of the current work.
    pub fn advance(&self, samples: u64) {
        self.report.activity.advance(samples);
    }

    pub fn record_oom(&mut self, oom: &Oom) -> Result<(), Failure> {
        self.record(oom_event(self.position.step, oom))?;
        self.record_snapshot(SnapshotReason::Oom, Some(oom))
    }

    /// Writes who holds what, if the job enables it.
    pub fn snapshot_memory(&mut self, reason: SnapshotReason) -> Result<(), Failure> {
        match self.setup.job.log.memory {
            MemoryLog::Summary => Ok(()),
            MemoryLog::Detailed => self.record_snapshot(reason, None),
        }
    }

    fn record_snapshot(&mut self, reason: SnapshotReason, oom: Option<&Oom>) -> Result<(), Failure> {
        let event = snapshot_event(self.folder, self.position.step, reason, &self.engine.ledgers(), oom);
        self.record(event)
    }

    /// Reports, once, why this session captured no CUDA graph.
    pub fn report_no_graph(&mut self) -> Result<(), Failure> {
        match self.engine.no_graph_event(self.position.step) {
            Some(event) => self.record(event),
            None => Ok(()),
        }
    }

    /// Reports, once, that evaluations do without cuDNN.
    pub fn report_cudnn_disabled(&mut self) -> Result<(), Failure> {
        match self.engine.take_cudnn_failure() {
            Some(reason) => self.record(Event::CudnnDisabled { step: self.position.step, reason }),
            None => Ok(()),
        }
    }

    /// The open training loader, or a new one that starts at the cursor.
    pub fn take_train_loader(&mut self) -> Result<TrainLoader, UpdateError> {
        if let Some(train_loader) = self.train_loader.take() {
            return Ok(train_loader);
        }
        let (setup, plan) = (self.setup, self.engine.plan());
        let micro_batch = setup.loaded_batch(plan);
        self.engine.host_ledger.set_phase(Phase::Start);
        let prefetch_bytes = setup.loader_bytes(micro_batch, plan.prefetch, setup.total_steps);
        let reservation = self
            .engine
            .host_ledger
            .reserve(Role::DataPipeline, "prefetch", prefetch_bytes)
            .map_err(UpdateError::Oom)?;
        let (source, until) = (setup.datasets.train.clone(), self.position.last_step);
        let options = setup.loader_options(micro_batch, plan.prefetch);
        let loader = Loader::start(source, setup.order.clone(), self.position.cursor, until, options);
        Ok(TrainLoader { loader: loader.map_err(Failure::from)?, reservation })
    }

    /// Runs under another plan from here on. If only the read-ahead shrinks, the loader continues with the batches it
    /// holds.
    pub fn set_plan(&mut self, plan: ExecutionPlan) {
        let current = self.engine.plan();
        let prefetch_shrinks =
            plan == ExecutionPlan { prefetch: plan.prefetch, ..current } && plan.prefetch < current.prefetch;
        match &mut self.train_loader {
            Some(train_loader) if prefetch_shrinks => {
                train_loader.reservation.shrink_to(train_loader.loader.shrink(plan.prefetch))
            }
            train_loader => *train_loader = None,
        }
        self.engine.set_plan(plan);
    }

    /// Maps a buffer allocation that the system refused to an OOM.
    pub fn map_data_error(&self, error: DataError) -> UpdateError {
        match error {
            DataError::OutOfMemory { bytes } => {
                UpdateError::Oom(self.engine.host_ledger.oom_error(Role::DataPipeline, "prefetch", bytes))
            }
            error => UpdateError::Failed(error.into()),
        }
    }
}

fn oom_event(step: u64, oom: &Oom) -> Event {
    let Oom { phase, bytes, available: left, .. } = *oom;
    Event::Oom { step, phase, requester: oom.requester.clone(), bytes, left }
}

/// Writes a snapshot. A file that cannot be written is part of the event: it costs no run.
fn snapshot_event(
    folder: &RunDir,
    step: u64,
    reason: SnapshotReason,
    ledgers: &Ledgers,
    oom: Option<&Oom>,
) -> Event {
    let snapshot = MemorySnapshot::new(step, reason, ledgers, oom);
    let (path, error) = match snapshot.write(folder) {
        Ok(path) => (Some(path.display().to_string()), None),
        Err(error) => (None, Some(error.to_string())),
    };
    Event::MemorySnapshot { step, path, peak_bytes: snapshot.peak_bytes(), error }
}
