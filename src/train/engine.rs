//! Tensors and what is done to them: one micro-batch, one update, one evaluation batch.
//!
//! Prints nothing and decides nothing: an out of memory is a value for the caller. Everything that lives
//! as long as the run is asked of the ledger here, before it is allocated.

use candle_core::{DType, Tensor};

use super::checkpoint::CheckpointTensors;
use super::event::Event;
#[cfg(feature = "cuda")]
use super::graph_cache::{self, CaptureOutcome, GraphCache, PassKey};
use super::setup::Setup;
use super::staging::BatchStaging;
use crate::data;
use crate::features::Features;
#[cfg(feature = "cuda")]
use crate::kernels::grad_stats::gpu::{DeviceGradStats, PendingGradStats};
use crate::kernels::grad_stats::{GradStats, GradStatsConfig};
use crate::kernels::update::{cast_into, clear, ema_update, sum_of_squares, swap};
use crate::layers::loss::{MetricSums, PendingMetricSums};
use crate::layers::network::{DeviceBatch, Executor, Network, StepError};
use crate::layers::offload::ActivationOffload;
use crate::layers::{FusionContext, MicroBatchSpec, Mode, PassContext};
use crate::memory::estimate::{batch_bytes, persistent_allocations};
use crate::memory::plan::{MemorySpace, Offload};
use crate::memory::process::WorkPhase;
use crate::memory::{InjectedOom, Ledger, Reservation, Role};
use crate::optim::{self, Optimizer, OptimizerStep};
use crate::params::ParamStore;

/// The accounts of a run: of tensors, and of what the host holds beside them.
#[derive(Clone)]
pub struct Ledgers {
    pub tensors: Ledger,
    pub host: Ledger,
}

impl Ledgers {
    /// One account for both where the CPU computes. `injected_oom`: asks for tensors that fail, for tests.
    pub fn new(setup: &Setup, ram: u64, injected_oom: Option<InjectedOom>) -> Self {
        match &setup.gpu {
            Some(gpu) => Self { tensors: Ledger::new(gpu.limit, injected_oom), host: Ledger::new(ram, None) },
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
    /// What tensors take, on the device.
    pub ledger: Ledger,
    /// What the host holds beside them; the very same account where the CPU computes.
    pub host_ledger: Ledger,
    /// Blocks that keep only their input and run forward again.
    pub recompute_blocks: usize,
    /// Where their inputs wait, if not on the card.
    activation_offload: Option<ActivationOffload>,
    /// The moving average of the weights, where the job asks for one.
    pub average: Option<Tensor>,
    /// The way of batches to where tensors are.
    pub staging: BatchStaging,
    /// The statistics as they were when the update in hand began.
    saved_stats: Tensor,
    /// Judges updates on a card, where the rule reads its findings there.
    #[cfg(feature = "cuda")]
    device_grad_stats: Option<DeviceGradStats>,
    /// Repeats passes on a card, where these have memory of their own.
    #[cfg(feature = "cuda")]
    graph_cache: Option<GraphCache>,
    _reservations: Vec<Reservation>,
}

/// What is known, or will be, of an update's gradients.
pub enum UpdateGradStats {
    Ready(GradStats),
    #[cfg(feature = "cuda")]
    Pending(PendingGradStats),
}

impl UpdateGradStats {
    /// Waits for the card, where it has not come to it yet.
    pub fn read(&self) -> candle_core::Result<GradStats> {
        match self {
            UpdateGradStats::Ready(stats) => Ok(*stats),
            #[cfg(feature = "cuda")]
            UpdateGradStats::Pending(pending) => pending.read(),
        }
    }

    pub fn is_ready(&self) -> bool {
        matches!(self, UpdateGradStats::Ready(_))
    }
}

/// What lives as long as the run.
struct PersistentState {
    store: ParamStore,
    optimizer: Optimizer,
    activation_offload: Option<ActivationOffload>,
    saved_stats: Tensor,
    average: Option<Tensor>,
    #[cfg(feature = "cuda")]
    device_grad_stats: Option<DeviceGradStats>,
    #[cfg(feature = "cuda")]
    graph_cache: Option<GraphCache>,
}

impl<'a> Engine<'a> {
    /// `graphs`: passes on a GPU may be captured as CUDA graphs.
    pub fn new(
        setup: &'a Setup,
        ledgers: Ledgers,
        recompute_blocks: usize,
        graphs: bool,
    ) -> Result<Self, StepError> {
        let staging = BatchStaging::new(setup, &ledgers);
        let Ledgers { tensors: ledger, host: host_ledger } = ledgers;
        let reservations = setup.with_estimator_inputs(|inputs| {
            persistent_allocations(inputs, setup.offload)
                .into_iter()
                .map(|(role, name, bytes, place)| match place {
                    MemorySpace::Ram => host_ledger.reserve(role, name, bytes),
                    MemorySpace::Vram => ledger.reserve(role, name, bytes),
                })
                .collect()
        });
        let reservations: Result<Vec<Reservation>, _> = reservations;
        let reservations = reservations?;
        let persistent = Self::allocate(setup, &host_ledger, graphs);
        let persistent = persistent.map_err(|error| map_oom(setup, &ledger, Role::Weights, error.into()));
        let persistent = persistent?;
        Ok(Self {
            setup,
            store: persistent.store,
            optimizer: persistent.optimizer,
            ledger,
            host_ledger,
            recompute_blocks,
            activation_offload: persistent.activation_offload,
            average: persistent.average,
            staging,
            saved_stats: persistent.saved_stats,
            #[cfg(feature = "cuda")]
            device_grad_stats: persistent.device_grad_stats,
            #[cfg(feature = "cuda")]
            graph_cache: persistent.graph_cache,
            _reservations: reservations,
        })
    }

    /// Allocates what lives as long as the run.
    fn allocate(setup: &Setup, host: &Ledger, graphs: bool) -> candle_core::Result<PersistentState> {
        let _ = graphs;
        let store = ParamStore::new(setup.layout.clone(), setup.job.seed, setup.dtype, &setup.device())?;
        let offloads = |what| setup.offload.contains(&what);
        let optimizer = Optimizer::new(&setup.optimizer, &store, offloads(Offload::OptimizerState))?;
        let activation_offload =
            offloads(Offload::Activations).then(|| ActivationOffload::new(host.clone(), &setup.device()));
        let activation_offload = activation_offload.transpose()?;
        let saved_stats = store.stats.copy()?;
        let average = setup.job.train.ema.map(|_| store.master_weights.copy()).transpose()?;
        #[cfg(feature = "cuda")]
        let device_grad_stats = match crate::kernels::cuda::device_of(&store.master_weights) {
            Some(device) if optim::reads_device_grad_scale(&setup.optimizer) => {
                Some(DeviceGradStats::new(device)?)
            }
            _ => None,
        };
        Ok(PersistentState {
            store,
            optimizer,
            activation_offload,
            saved_stats,
            average,
            #[cfg(feature = "cuda")]
            device_grad_stats,
            #[cfg(feature = "cuda")]
            graph_cache: setup.gpu.as_ref().map(|gpu| GraphCache::new(gpu, graphs)).transpose()?.flatten(),
        })
    }

    /// What a sample's gradient is multiplied with, so that their sum is near their mean. The update
    /// divides by the weight that was really there.
    fn nominal_weight(&self) -> f64 {
        let samples = self.setup.job.train.samples_per_update();
        (samples * self.setup.features().targets_per_sample()) as f64
    }

    /// Adds the gradients of a micro-batch, times `scale`. A card is not waited for.
    pub fn forward_backward(
        &self,
        batch: &data::HostBatch,
        scale: f64,
    ) -> Result<PendingMetricSums, StepError> {
        self.run_batch(batch, Mode::Train, scale, |network, exec, batch, scope| {
            scope.run(batch, |batch| network.forward_backward(exec, Some(batch)))
        })
    }

    /// What came of the first capture of a CUDA graph, once; `step` updates were made before it.
    pub fn take_capture_event(&self, step: u64) -> Option<Event> {
        #[cfg(feature = "cuda")]
        return self.graph_cache.as_ref().and_then(GraphCache::take_outcome).map(|outcome| match outcome {
            CaptureOutcome::Graph { launches, arena_bytes, lower_bound: bound } => {
                let arena_waste_bytes = arena_bytes - bound;
                Event::CudaGraphCaptured { step, launches, arena_bytes, arena_waste_bytes }
            }
            CaptureOutcome::Failed { reason } => Event::CudaGraphDisabled { step, reason },
        });
        #[cfg(not(feature = "cuda"))]
        {
            let _ = step;
            None
        }
    }

    /// Lets go of what makes passes faster and takes memory.
    pub fn release_graphs(&self) {
        #[cfg(feature = "cuda")]
        self.graph_cache.iter().for_each(GraphCache::clear);
    }

    /// What is to be done with gradients learned with `scale`, by micro-batches that counted this. A card is waited
    /// for only where its findings are wanted `now`, or the rule of updates cannot do without.
    pub fn compute_grad_stats(
        &mut self,
        pending_sums: &[PendingMetricSums],
        scale: f64,
        now: bool,
    ) -> Result<UpdateGradStats, StepError> {
        let terms = self.terms(scale);
        #[cfg(feature = "cuda")]
        if let Some(device_stats) = self.device_grad_stats.as_mut().filter(|_| !now) {
            let pending = device_stats.launch(pending_sums, &self.store.grads, &terms);
            return Ok(UpdateGradStats::Pending(pending.map_err(|error| self.map_oom(error.into()))?));
        }
        let _ = now;
        let mut total = MetricSums::default();
        for part in pending_sums {
            total += part.read().map_err(|error| self.map_oom(error.into()))?;
        }
        // Where all records were left out there is nothing to measure.
        let squares = if total.weight == 0.0 { 0.0 } else { sum_of_squares(&self.store.grads)? };
        Ok(UpdateGradStats::Ready(terms.compute(total, squares)))
    }

    /// What gradients learned with `scale` are judged by.
    pub fn terms(&self, scale: f64) -> GradStatsConfig {
        GradStatsConfig {
            divisor: self.nominal_weight(),
            loss_scale: scale,
            max_norm: self.setup.job.train.clip_norm,
        }
    }

    /// Judges a micro-batch.
    pub fn evaluate(&self, batch: &data::HostBatch) -> Result<MetricSums, StepError> {
        let pending_sums = self.run_batch(batch, Mode::Eval, 1.0, |network, exec, batch, _| {
            network.evaluate(exec, Some(batch))
        })?;
        Ok(pending_sums.read()?)
    }

    /// What the loss judges of a micro-batch, in f32: (samples, outputs) or (samples, positions, outputs).
    pub fn logits(&self, batch: &data::HostBatch) -> Result<Tensor, StepError> {
        let logits = self.run_batch(batch, Mode::Eval, 1.0, |network, exec, batch, _| {
            network.logits(exec, &batch.inputs)
        })?;
        Ok(logits.to_dtype(DType::F32)?)
    }

    /// Puts the moving average in the place of the weights, or back; nothing where there is none.
    pub fn swap_average(&self) -> candle_core::Result<()> {
        match &self.average {
            Some(average) => {
                swap(average, &self.store.master_weights).and_then(|()| self.store.sync_compute_weights())
            }
            None => Ok(()),
        }
    }

    /// Runs a micro-batch; one of padded samples is cut to the smallest bucket that holds its longest.
    fn run_batch<R>(
        &self,
        batch: &data::HostBatch,
        mode: Mode,
        scale: f64,
        run: impl FnOnce(&Network, &Executor, &DeviceBatch, &PassScope) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        self.setup.limit_resident_memory(if mode == Mode::Eval {
            WorkPhase::Evaluation
        } else {
            WorkPhase::Training
        });
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let (features, network) = self.setup.network_for_length(longest);
        let spec =
            MicroBatchSpec { batch: batch.ids.len(), dtype: self.setup.dtype, backend: self.setup.backend() };
        self.ledger.set_phase(if mode == Mode::Eval { "eval" } else { "forward" });
        let _hold = self.ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec))?;
        self.staging.reserve_buffers(batch, features).map_err(|error| self.map_oom(error))?;
        // The scope ends after everything of the pass is freed: it is dropped last.
        let scope = self.pass_scope(batch, features, mode, scale);
        let tensors = self.staging.to_tensors(batch, features).map_err(|error| self.map_oom(error))?;
        let pass = PassContext {
            store: &self.store,
            mode,
            seed: self.setup.job.seed,
            epoch: batch.epoch,
            sample_ids: &batch.ids,
            lengths: (!batch.lengths.is_empty()).then_some(&batch.lengths),
            sample_info: tensors.sample_info.as_ref(),
            loss_scale: scale / self.nominal_weight(),
            fusion: FusionContext::default(),
        };
        let (ledger, recompute, offload) =
            (&self.ledger, self.recompute_blocks, self.activation_offload.as_ref());
        let exec = Executor { pass: Some(pass), spec, ledger, recompute_blocks: recompute, offload };
        let result = run(network, &exec, &tensors, &scope).map_err(|error| self.map_oom(error))?;
        scope.finish();
        Ok(result)
    }

    /// What serves the allocations of a pass on a GPU, and may run it as a CUDA graph.
    fn pass_scope(
        &self,
        batch: &data::HostBatch,
        features: &Features,
        mode: Mode,
        scale: f64,
    ) -> PassScope<'_> {
        #[cfg(feature = "cuda")]
        return PassScope(self.graph_cache.as_ref().map(|passes| {
            passes.begin(PassKey {
                mode,
                samples: batch.ids.len(),
                input: features.input_len(),
                targets: batch.targets.len(),
                padded: !batch.lengths.is_empty(),
                scale,
                recompute: self.recompute_blocks,
            })
        }));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (batch, features, mode, scale);
            PassScope(std::marker::PhantomData)
        }
    }

    fn map_oom(&self, error: StepError) -> StepError {
        map_oom(self.setup, &self.ledger, Role::Activations, error)
    }

    /// Remembers the statistics, so that the update that begins can be begun again.
    pub fn begin_update(&self) -> candle_core::Result<()> {
        cast_into(&self.store.stats, &self.saved_stats)
    }

    /// Takes back everything the update in hand has done.
    pub fn rollback_update(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)?;
        cast_into(&self.saved_stats, &self.store.stats)
    }

    /// Moves the weights as was found right, and clears the gradients. What it needs is asked for before anything
    /// changes.
    pub fn update(&mut self, grad_stats: &UpdateGradStats, lr: f64, number: u64) -> Result<(), StepError> {
        self.ledger.set_phase("update");
        self.setup.limit_resident_memory(WorkPhase::Training);
        let setup = self.setup;
        let bytes = optim::workspace_bytes(&setup.optimizer, &setup.layout.params, setup.backend());
        let _work = self.ledger.reserve(Role::Workspace, "optimizer", bytes)?;
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
            #[cfg(feature = "cuda")]
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

    /// All tensors that a checkpoint holds.
    pub fn checkpoint_tensors(&self) -> CheckpointTensors<'_> {
        CheckpointTensors { store: &self.store, optimizer: &self.optimizer, average: self.average.as_ref() }
    }

    /// Forgets the gradients of an update that is not made.
    pub fn discard_gradients(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)
    }
}

/// The pass in hand; on the CPU there is nothing to it.
struct PassScope<'a>(
    #[cfg(feature = "cuda")] Option<graph_cache::GraphScope<'a>>,
    #[cfg(not(feature = "cuda"))] std::marker::PhantomData<&'a ()>,
);

impl PassScope<'_> {
    fn run(
        &self,
        batch: &DeviceBatch,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> Result<PendingMetricSums, StepError> {
        #[cfg(feature = "cuda")]
        if let Some(scope) = &self.0 {
            return scope.run(batch, forward_backward);
        }
        forward_backward(batch)
    }

    fn finish(&self) {
        #[cfg(feature = "cuda")]
        self.0.iter().for_each(graph_cache::GraphScope::finish);
    }
}

/// A refused allocation of a GPU is an OOM like any other, with the heap's own figures.
fn map_oom(setup: &Setup, ledger: &Ledger, role: Role, error: StepError) -> StepError {
    match error {
        StepError::Tensor(error) if is_out_of_memory(&error) => {
            let (bytes, available) =
                setup.gpu.as_ref().and_then(|gpu| gpu.take_last_oom()).unwrap_or_default();
            StepError::Oom(ledger.device_oom(role, bytes, available))
        }
        error => error,
    }
}

/// Whether an error is a card's: out of memory.
fn is_out_of_memory(error: &candle_core::Error) -> bool {
    #[cfg(feature = "cuda")]
    return crate::kernels::cuda::is_out_of_memory(error);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = error;
        false
    }
}
