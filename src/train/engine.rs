//! The tensors of a run and the operations on them: a training micro-batch, an update, an evaluation micro-batch.
//!
//! Prints nothing and decides nothing: an out-of-memory error (OOM) is a value for the caller. Every tensor that
//! lives as long as the run is reserved in the ledger here, before it is allocated.

// The GPU-only parts of an engine. Builds without CUDA have the same interface, without function.
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "engine/no_gpu.rs"]
mod gpu;

use candle_core::{DType, Tensor};

use super::Failure;
use super::checkpoint::CheckpointTensors;
use super::pass_key::PassKey;
use super::setup::Setup;
use super::staging::BatchStaging;
use super::teacher::Teacher;
use crate::base::{MemorySpace, MicroBatchSpec, Phase, Role};
use crate::data;
use crate::data::stored_logits::{LogitFormat, StoredLogits, TopRows};
use crate::events::event::Event;
use crate::graph::network::{DeviceBatch, Executor, Network, StepError};
use crate::graph::offload::ActivationOffload;
use crate::kernels::distillation::TeacherLogits;
use crate::kernels::distillation::top::TopLogits;
use crate::kernels::fake_quantize::move_range;
use crate::kernels::grad_stats::{GradStats, GradStatsConfig};
use crate::kernels::reference::ReferenceScope;
use crate::kernels::update::{cast_into, clear, ema_update, sum_of_squares, swap};
use crate::layers::loss::{MetricSums, PendingMetricSums};
use crate::layers::{Mode, PassContext};
use crate::memory::gpu::GpuDevice;
use crate::memory::{InjectedOom, Ledger, Reservation, resident_limit};
use crate::optim::prune::{self, PrunedCount, Pruning};
use crate::optim::{self, Optimizer, OptimizerStep};
use crate::param_store::ParamStore;
use crate::planner::estimate::{
    Allocation, PRUNING, QUANTIZATION, STORED_LOGITS, batch_bytes, rounding_bytes,
};
use crate::planner::execution_plan::{ExecutionPlan, Offload};
use gpu::{GpuState, PassScope, PendingGradStats};

/// Memory ledgers of a run: one for tensors, one for everything else on the host.
#[derive(Clone)]
pub struct Ledgers {
    pub tensors: Ledger,
    pub host: Ledger,
}

impl Ledgers {
    /// On the CPU both are the same ledger. `injected_oom` makes tensor reservations fail, for tests.
    pub fn new(setup: &Setup, ram: u64, injected_oom: Option<InjectedOom>) -> Self {
        Self::on(setup.gpu.as_deref(), ram, injected_oom)
    }

    /// For tensors on this GPU, or on the CPU.
    pub fn on(gpu: Option<&GpuDevice>, ram: u64, injected_oom: Option<InjectedOom>) -> Self {
        match gpu {
            Some(gpu) => Self {
                tensors: Ledger::of(MemorySpace::Vram, gpu.limit, injected_oom),
                host: Ledger::new(ram, None),
            },
            None => {
                let ledger = Ledger::new(ram, injected_oom);
                Self { tensors: ledger.clone(), host: ledger }
            }
        }
    }
}

pub struct Engine<'a> {
    setup: &'a Setup,
    pub store: ParamStore,
    pub optimizer: Optimizer,
    /// Ledger of tensor memory, on the compute device.
    pub ledger: Ledger,
    /// Ledger of host memory that is not tensors; the same ledger as `ledger` on the CPU.
    pub host_ledger: Ledger,
    /// The plan in force.
    plan: ExecutionPlan,
    /// Host buffers for the inputs of recomputed blocks, if these are offloaded from the GPU.
    activation_offload: Option<ActivationOffload>,
    /// EMA of the weights, if the job sets one.
    pub average: Option<Tensor>,
    /// The mask of pruned weights, if the job prunes.
    pruning: Option<Pruning>,
    /// The weights of the teacher, if one computes in every step.
    teacher: Option<ParamStore>,
    /// The logits of the teacher, if they are stored.
    pub stored_logits: Option<StoredLogits>,
    /// Copies batches to the device.
    staging: BatchStaging,
    /// Running statistics at the start of the current update, for a rollback.
    saved_stats: Tensor,
    gpu: GpuState,
    _reservations: Vec<Reservation>,
}

/// Turns a failed GPU allocation into an OOM error.
pub(super) fn map_device_oom(setup: &Setup, ledger: &Ledger, role: Role, error: StepError) -> StepError {
    gpu::map_oom(setup, ledger, role, error)
}

/// Gradient statistics of an update: known, or still being computed on the GPU.
pub enum UpdateGradStats {
    Ready(GradStats),
    Pending(PendingGradStats),
}

impl UpdateGradStats {
    /// Returns the statistics. Pending ones synchronize with the GPU.
    pub fn read(&self) -> candle_core::Result<GradStats> {
        match self {
            UpdateGradStats::Ready(stats) => Ok(*stats),
            UpdateGradStats::Pending(pending) => pending.read(),
        }
    }

    pub fn is_ready(&self) -> bool {
        matches!(self, UpdateGradStats::Ready(_))
    }
}

/// Tensors that live as long as the run.
struct PersistentState {
    store: ParamStore,
    optimizer: Optimizer,
    activation_offload: Option<ActivationOffload>,
    saved_stats: Tensor,
    average: Option<Tensor>,
    pruning: Option<Pruning>,
    teacher: Option<ParamStore>,
    gpu: GpuState,
}

impl<'a> Engine<'a> {
    /// `graphs` permits capturing GPU passes as CUDA graphs.
    pub fn new(
        setup: &'a Setup,
        ledgers: Ledgers,
        plan: ExecutionPlan,
        graphs: bool,
    ) -> Result<Self, StepError> {
        let staging = BatchStaging::new(setup.dtype, &setup.device(), &ledgers);
        let Ledgers { tensors: ledger, host: host_ledger } = ledgers;
        let reserve = |Allocation { role, name, bytes, space }| match space {
            MemorySpace::Ram => host_ledger.reserve(role, name, bytes),
            MemorySpace::Vram => ledger.reserve(role, name, bytes),
        };
        let reservations: Vec<Reservation> = setup
            .estimator()
            .persistent_allocations(plan)
            .into_iter()
            .map(reserve)
            .collect::<Result<_, _>>()?;
        let persistent = Self::allocate(setup, plan, &host_ledger, graphs);
        let persistent =
            persistent.map_err(|error| gpu::map_oom(setup, &ledger, Role::Weights, error.into()));
        let persistent = persistent?;
        Ok(Self {
            setup,
            store: persistent.store,
            optimizer: persistent.optimizer,
            ledger,
            host_ledger,
            plan,
            activation_offload: persistent.activation_offload,
            average: persistent.average,
            pruning: persistent.pruning,
            teacher: persistent.teacher,
            stored_logits: setup.stored_logits.as_ref().map(|(format, _)| StoredLogits::blank(*format)),
            staging,
            saved_stats: persistent.saved_stats,
            gpu: persistent.gpu,
            _reservations: reservations,
        })
    }

    /// Allocates the tensors that live as long as the run.
    fn allocate(
        setup: &Setup,
        plan: ExecutionPlan,
        host: &Ledger,
        graphs: bool,
    ) -> candle_core::Result<PersistentState> {
        let store = ParamStore::new(setup.layout.clone(), setup.job.seed, setup.dtype, &setup.device())?;
        let rule = setup.optimizer.of_kind(plan.optimizer);
        let optimizer = Optimizer::new(&rule, &store, plan.offloads(Offload::OptimizerState))?;
        let offload = || ActivationOffload::new(host.clone(), &setup.device());
        let activation_offload = plan.offloads(Offload::Activations).then(offload).transpose()?;
        let saved_stats = store.stats.copy()?;
        let average = setup.job.train.ema.map(|_| store.copy_master_weights()).transpose()?;
        let prune = |config| Pruning::new(config, &setup.layout, &setup.device());
        let pruning = setup.job.pruning().map(prune).transpose()?;
        let store_of = |teacher: &Teacher| teacher.store(setup.backend(), &setup.device());
        let teacher = setup.teacher.as_ref().filter(|_| setup.stored_logits.is_none());
        let teacher = teacher.map(store_of).transpose()?;
        let gpu = GpuState::new(setup, &rule, &store, graphs)?;
        Ok(PersistentState {
            store,
            optimizer,
            activation_offload,
            saved_stats,
            average,
            pruning,
            teacher,
            gpu,
        })
    }

    /// Loads the weights of the teacher, which are zero before.
    pub fn load_teacher(&self) -> Result<(), Failure> {
        match (&self.setup.teacher, &self.teacher) {
            (Some(teacher), Some(store)) => teacher.load(store),
            _ => Ok(()),
        }
    }

    pub fn plan(&self) -> ExecutionPlan {
        self.plan
    }

    /// Runs under another plan from here on, with the same optimizer and offload.
    pub fn set_plan(&mut self, plan: ExecutionPlan) {
        self.plan = plan;
        self.clear_staging();
    }

    /// Frees the buffers through which batches reach the GPU; the next batch allocates them in its own size.
    pub fn clear_staging(&mut self) {
        self.staging.clear();
    }

    /// Divisor of each sample's gradient: the nominal number of targets per update, so that the accumulated sum is near
    /// the mean. The update divides by the actual weight.
    fn nominal_weight(&self) -> f64 {
        let samples = self.setup.job.train.samples_per_update();
        (samples * self.setup.features().targets_per_sample()) as f64
    }

    /// Accumulates the gradients of a micro-batch, multiplied by `scale`. Does not synchronize with the GPU.
    pub fn forward_backward(
        &self,
        batch: &data::HostBatch,
        scale: f64,
    ) -> Result<PendingMetricSums, StepError> {
        self.run_batch(batch, Mode::Train, scale, |network, exec, batch, scope| {
            scope.run(batch, |batch| network.forward_backward(exec, Some(batch)))
        })
    }

    /// The outcome of the first CUDA graph capture, once, as an event; `step` is the number of updates before it.
    pub fn take_capture_event(&self, step: u64) -> Option<Event> {
        self.gpu.take_capture_event(step)
    }

    /// Why the run ends without a capture outcome, as an event; `None` if an outcome was reported or none was due.
    pub fn no_graph_event(&self, step: u64) -> Option<Event> {
        self.gpu.no_graph_event(step)
    }

    /// The error that disabled cuDNN for evaluations, once.
    pub fn take_cudnn_failure(&self) -> Option<String> {
        self.gpu.take_cudnn_failure()
    }

    /// Frees CUDA graphs and their arenas; passes then launch kernel by kernel.
    pub fn release_graphs(&self) {
        self.gpu.release_graphs();
    }

    /// Computes the statistics of gradients accumulated with `scale` from these micro-batches. Synchronizes with the
    /// GPU only if the caller needs them `now`, or the optimizer cannot read them on the device.
    pub fn compute_grad_stats(
        &mut self,
        pending_sums: &[PendingMetricSums],
        scale: f64,
        now: bool,
    ) -> Result<UpdateGradStats, StepError> {
        let terms = self.terms(scale);
        if !now && let Some(launched) = self.gpu.launch_grad_stats(pending_sums, &self.store.grads, &terms) {
            return Ok(UpdateGradStats::Pending(launched.map_err(|error| self.map_oom(error.into()))?));
        }
        let mut total = MetricSums::default();
        for part in pending_sums {
            total += part.read().map_err(|error| self.map_oom(error.into()))?;
        }
        // An update whose records were all skipped has no gradient to measure.
        let squares = if total.weight == 0.0 { 0.0 } else { sum_of_squares(&self.store.grads)? };
        Ok(UpdateGradStats::Ready(terms.compute(total, squares)))
    }

    /// Divisor, loss scale and clipping norm for gradients accumulated with `scale`.
    pub fn terms(&self, scale: f64) -> GradStatsConfig {
        GradStatsConfig {
            divisor: self.nominal_weight(),
            loss_scale: scale,
            max_norm: self.setup.job.train.clip_norm,
        }
    }

    /// Evaluates a micro-batch and returns its metric sums, and the outputs of the model if metrics need them.
    pub fn evaluate(&self, batch: &data::HostBatch) -> Result<(MetricSums, Vec<f32>), StepError> {
        let needs_outputs = self.setup.metrics.needs_outputs();
        let (pending_sums, outputs) = self.run_batch(batch, Mode::Eval, 1.0, |network, exec, batch, _| {
            self.gpu.without_failing_cudnn(|| network.evaluate(exec, Some(batch), needs_outputs))
        })?;
        Ok((pending_sums.read()?, outputs))
    }

    /// Logits of a micro-batch, in f32: (samples, outputs) or (samples, positions, outputs).
    pub fn logits(&self, batch: &data::HostBatch) -> Result<Tensor, StepError> {
        let logits = self.run_batch(batch, Mode::Eval, 1.0, |network, exec, batch, _| {
            self.gpu.without_failing_cudnn(|| network.logits(exec, Some(&batch.inputs)))
        })?;
        let logits = logits.ok_or_else(|| candle_core::Error::Msg("a pass without tensors".into()))?;
        Ok(logits.to_dtype(DType::F32)?)
    }

    /// Swaps the EMA with the weights; a second call swaps back. Does nothing without an EMA.
    pub fn swap_average(&self) -> candle_core::Result<()> {
        match &self.average {
            Some(average) => {
                swap(average, &self.store.master_weights).and_then(|()| self.store.sync_compute_weights())
            }
            None => Ok(()),
        }
    }

    /// Runs a micro-batch. Cuts padded samples to the smallest bucket that holds the longest of them.
    fn run_batch<R>(
        &self,
        batch: &data::HostBatch,
        mode: Mode,
        scale: f64,
        run: impl FnOnce(&Network, &Executor, &DeviceBatch, &PassScope) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        resident_limit::trim();
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let (features, network) = self.setup.network_for_length(longest);
        let spec =
            MicroBatchSpec { batch: batch.ids.len(), dtype: self.setup.dtype, backend: self.setup.backend() };
        self.ledger.set_phase(if mode == Mode::Eval { Phase::Eval } else { Phase::Forward });
        let _hold = self.ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec))?;
        self.staging.reserve_buffers(batch, features).map_err(|error| self.map_oom(error))?;
        // Declared first so that it drops last: the scope must end after every tensor of the pass is freed.
        let scope = self.gpu.pass_scope(PassKey {
            mode,
            samples: batch.ids.len(),
            input: features.input_len(),
            targets: batch.targets.len(),
            padded: !batch.lengths.is_empty(),
            scale,
            recompute: self.plan.recompute,
        });
        let tensors = self.staging.to_tensors(batch, features).map_err(|error| self.map_oom(error))?;
        let stored = self.stored_logits.as_ref().filter(|_| mode == Mode::Train);
        let stored = stored.map(|stored| self.read_logits(stored, network, &batch.ids)).transpose();
        let stored = stored.map_err(|error| self.map_oom(error))?;
        let pass = PassContext {
            seed: self.setup.job.seed,
            epoch: batch.epoch,
            lengths: (!batch.lengths.is_empty()).then_some(&batch.lengths),
            sample_info: tensors.sample_info.as_ref(),
            loss_scale: scale / self.nominal_weight(),
            teacher: self.teacher.as_ref(),
            teacher_logits: stored.as_ref().map(|(logits, _)| TeacherLogits::Top(logits)),
            ..PassContext::new(&self.store, mode, &batch.ids)
        };
        let (ledger, recompute_blocks, offload) =
            (&self.ledger, self.plan.recompute, self.activation_offload.as_ref());
        let exec = Executor { recompute_blocks, offload, ..Executor::new(Some(pass), spec, ledger) };
        let result = run(network, &exec, &tensors, &scope).map_err(|error| self.map_oom(error))?;
        scope.finish();
        Ok(result)
    }

    /// The stored logits of these samples, as many rows as the network has.
    fn read_logits(
        &self,
        stored: &StoredLogits,
        network: &Network,
        ids: &[u64],
    ) -> Result<(TopLogits, Reservation), StepError> {
        let LogitFormat { classes, top_k, .. } = stored.format;
        let bytes = stored.format.batch_bytes(ids.len());
        let hold = self.ledger.reserve(Role::Batch, STORED_LOGITS, bytes)?;
        let is_copied = self.ledger.space() != self.host_ledger.space();
        let copied = is_copied.then(|| self.host_ledger.reserve(Role::DataPipeline, STORED_LOGITS, bytes));
        let _copied = copied.transpose()?;
        let rows = stored.read(ids, network.loss.outputs_per_sample() / classes);
        let TopRows { classes, logits, rest } = rows.map_err(candle_core::Error::wrap)?;
        let (rows, device) = (rest.len(), self.setup.device());
        let logits = TopLogits {
            classes: Tensor::from_vec(classes, (rows, top_k), &device)?,
            logits: Tensor::from_vec(logits, (rows, top_k), &device)?,
            rest: Tensor::from_vec(rest, rows, &device)?,
        };
        Ok((logits, hold))
    }

    fn map_oom(&self, error: StepError) -> StepError {
        gpu::map_oom(self.setup, &self.ledger, Role::Activations, error)
    }

    pub fn ledgers(&self) -> Ledgers {
        Ledgers { tensors: self.ledger.clone(), host: self.host_ledger.clone() }
    }

    /// Saves the running statistics, so that the update can be rolled back and retried.
    pub fn begin_update(&self) -> candle_core::Result<()> {
        self.ledger.begin_update();
        if self.ledger.space() != self.host_ledger.space() {
            self.host_ledger.begin_update();
        }
        cast_into(&self.store.stats, &self.saved_stats)
    }

    /// Undoes the current update so far: clears the gradients and restores the running statistics.
    pub fn rollback_update(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)?;
        cast_into(&self.saved_stats, &self.store.stats)
    }

    /// Applies the optimizer step and clears the gradients. Reserves its workspace before it changes anything, so
    /// that an OOM leaves the state intact.
    pub fn update(&mut self, grad_stats: &UpdateGradStats, lr: f64, number: u64) -> Result<(), StepError> {
        self.ledger.set_phase(Phase::Update);
        resident_limit::trim();
        let setup = self.setup;
        let bytes = optim::workspace_bytes(&self.optimizer.rule, &setup.layout.params, setup.backend());
        let _work = self.ledger.reserve(Role::Workspace, "optimizer", bytes)?;
        let _kernels = ReferenceScope::enter(setup.backend().is_reference());
        match grad_stats {
            UpdateGradStats::Ready(GradStats { grad_scale, .. }) => {
                let step = OptimizerStep {
                    lr,
                    grad_scale: *grad_scale,
                    device_grad_scale: None,
                    step_count: number,
                };
                self.optimizer.update(&self.store, step)?;
            }
            UpdateGradStats::Pending(pending) => {
                let device_scale = pending.grad_scale()?;
                let step = OptimizerStep {
                    lr,
                    grad_scale: f64::NAN,
                    device_grad_scale: Some(&device_scale),
                    step_count: number,
                };
                self.optimizer.update(&self.store, step)?;
            }
        }
        if let (Some(average), Some(decay)) = (&self.average, self.setup.job.train.ema) {
            ema_update(average, &self.store.master_weights, decay)?;
        }
        Ok(())
    }

    /// Reserves what pruning and rounding after update `step` take. Call it before the update: after an OOM here, the
    /// update must not have been applied.
    pub fn reserve_compression(&self, step: u64) -> Result<Vec<Reservation>, StepError> {
        let (layout, backend) = (&self.setup.layout, self.setup.backend());
        let mut parts = vec![(&self.ledger, QUANTIZATION, rounding_bytes(&layout.params, backend))];
        if let Some(pruning) = self.pruning.as_ref().filter(|pruning| pruning.is_active(step)) {
            let selection = if pruning.is_due(step) { prune::selection_bytes(layout, backend) } else { 0 };
            parts.push((&self.ledger, PRUNING, prune::workspace_bytes(&layout.params, backend)));
            parts.push((&self.host_ledger, PRUNING, selection));
        }
        let parts = parts.into_iter().filter(|(.., bytes)| *bytes > 0);
        Ok(parts
            .map(|(ledger, name, bytes)| ledger.reserve(Role::Workspace, name, bytes))
            .collect::<Result<_, _>>()?)
    }

    /// Keeps pruned weights at zero after update `step`, and selects more of them if that is due.
    pub fn prune(&self, step: u64) -> candle_core::Result<Option<PrunedCount>> {
        let Some(pruning) = &self.pruning else { return Ok(None) };
        let _kernels = ReferenceScope::enter(self.setup.backend().is_reference());
        pruning.after_update(&self.store, self.average.as_ref(), step)
    }

    /// Moves the ranges of activations after update `step`, and rounds the weights, if the job quantizes.
    pub fn quantize(&self, step: u64) -> candle_core::Result<()> {
        let Some(config) = self.setup.job.quantize.as_ref().filter(|config| config.training) else {
            return Ok(());
        };
        let fraction = config.range_fraction(step);
        let specs = self.store.layout.stats.in_declaration_order().map(|(spec, _)| spec);
        for (_, range) in specs.zip(self.store.stat_views()).filter(|(spec, _)| spec.is_activation_range()) {
            move_range(range, fraction)?;
        }
        self.round_weights(step)
    }

    /// The weights that layers compute with after `step` updates, rounded if the job quantizes.
    pub fn round_weights(&self, step: u64) -> candle_core::Result<()> {
        let Some(config) = &self.setup.job.quantize else { return Ok(()) };
        let _kernels = ReferenceScope::enter(self.setup.backend().is_reference());
        self.store.set_rounding(config.rounds_after(step));
        self.store.sync_compute_weights()
    }

    /// The tensors a checkpoint saves.
    pub fn checkpoint_tensors(&self) -> CheckpointTensors<'_> {
        CheckpointTensors {
            store: &self.store,
            optimizer: &self.optimizer,
            average: self.average.as_ref(),
            mask: self.pruning.as_ref().map(Pruning::mask),
        }
    }

    /// Clears the gradients of an update that is skipped.
    pub fn discard_gradients(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)
    }
}
