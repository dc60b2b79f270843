//! Predicts the memory of a run without running it. A dry run executes the network without tensors, and the log of its
//! planning ledger shows what is live at every moment. The peak follows from lifetimes, not from a sum or a factor.
//!
//! A dry run depends only on the micro-batch, the recomputed blocks and activation offload, so the result is cached,
//! however many execution plans are compared.

mod sizes;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use candle_core::DType;

pub use self::sizes::*;

use super::budget;
use super::execution_plan::{ExecutionPlan, Offload};
use super::ledger_trace::{self, BlockIndex};
use super::plan::{MemoryPart, Peak, PhasePeak};
use crate::base::features::Features;
use crate::base::{Backend, MemorySpace, MicroBatchSpec, Phase, Role};
use crate::data::loader;
use crate::data::stored_logits::LogitFormat;
use crate::graph::network::{Executor, Network};
use crate::graph::offload::ActivationOffload;
use crate::job::{Job, MemoryLog, OptimizerConfig};
use crate::kernels::{low_rank, matmul};
use crate::memory::ledger::{Ledger, LedgerEntry};
use crate::memory::process::ProcessMemory;
use crate::memory::recorder::RECORDER_BYTES;
use crate::optim;
use crate::params::{ParamLayout, TensorSpec};

/// A job, as far as its memory is concerned.
#[derive(Clone, Copy)]
pub struct EstimatorInputs<'a> {
    pub job: &'a Job,
    /// The job's optimizer, or the one whose state a resumed run has. A plan may name its 8-bit variant.
    pub optimizer: &'a OptimizerConfig,
    pub network: &'a Network,
    pub layout: &'a ParamLayout,
    pub features: &'a Features,
    pub dtype: DType,
    /// Where layers compute and tensors reside.
    pub backend: Backend,
    /// Bytes the dataset holds regardless of the batch size.
    pub resident_data: u64,
    /// Process memory besides the counted heap, and what data preparation used.
    pub process: ProcessMemory,
    /// Threads of the loader.
    pub workers: usize,
    /// Updates of the run.
    pub updates: u64,
    /// Samples per update at most. A micro-batch rounded up to whole normalization groups may exceed it.
    pub update_samples: u64,
    pub valid_samples: u64,
    /// Whether evaluations read the outputs of the model, and host bytes of the metrics computed from them.
    pub eval_outputs: bool,
    pub eval_metric_bytes: u64,
    /// Bytes of the weights of the teacher; 0 without one.
    pub teacher_bytes: u64,
    /// How the logits of the teacher are stored before the first update, if they are.
    pub stored_logits: Option<LogitFormat>,
    pub train_samples: u64,
}

impl EstimatorInputs<'_> {
    /// Whether tensors reside in device memory rather than host memory.
    fn on_device(&self) -> bool {
        self.backend.on_gpu()
    }

    /// Bytes the loader holds for micro-batches of this size, of so many updates of `samples`.
    fn loader_bytes(&self, micro_batch: usize, prefetch: u64, (updates, samples): (u64, u64)) -> u64 {
        let batches = loader::num_batches(updates, samples, micro_batch);
        loader::max_held_bytes(self.features, micro_batch, prefetch, self.workers, batches)
    }

    /// An allocation where memory of its role resides if nothing is offloaded.
    fn allocation(&self, role: Role, name: &'static str, bytes: u64) -> Allocation {
        let on_host =
            matches!(role, Role::DataPipeline | Role::CheckpointWriting | Role::Reserve | Role::Process);
        let space = if on_host || !self.on_device() { MemorySpace::Ram } else { MemorySpace::Vram };
        Allocation { role, name, bytes, space }
    }
}

/// Bytes held under one name.
pub struct Allocation {
    pub role: Role,
    pub name: &'static str,
    pub bytes: u64,
    pub space: MemorySpace,
}

/// The peak memory of an execution plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub peak: Peak,
    pub phases: Vec<PhasePeak>,
    /// Bytes of activations that a micro-batch copies to the host and back.
    pub transfer_bytes: u64,
}

/// Predicts the memory of an execution plan.
pub trait MemoryPredictor {
    fn estimate(&self, exec_plan: ExecutionPlan) -> Estimate;

    /// The same with a host budget of `ram` bytes, which some buffers scale with.
    fn estimate_within(&self, exec_plan: ExecutionPlan, ram: u64) -> Estimate {
        let _ = ram;
        self.estimate(exec_plan)
    }

    /// What is live at the peak, by role, largest first.
    fn peak_breakdown(&self, exec_plan: ExecutionPlan) -> Vec<MemoryPart>;
}

impl Estimate {
    pub fn new(phases: Vec<PhasePeak>, transfer_bytes: u64) -> Self {
        // The first phase on ties.
        let highest = |bytes: fn(&PhasePeak) -> u64| {
            phases.iter().fold((Phase::Start, 0), |best, phase| {
                if bytes(phase) > best.1 { (phase.name, bytes(phase)) } else { best }
            })
        };
        let (vram, ram) = (highest(|phase| phase.vram_bytes), highest(|phase| phase.ram_bytes));
        let phase = if vram.1 > 0 { vram.0 } else { ram.0 };
        Self { peak: Peak { vram_bytes: vram.1, ram_bytes: ram.1, phase }, phases, transfer_bytes }
    }
}

/// Predicts the memory of a job by dry runs.
pub struct Estimator<'a> {
    inputs: EstimatorInputs<'a>,
    blocks: BlockIndex,
    train_cache: RefCell<BTreeMap<(usize, usize, bool), Rc<PassPeaks>>>,
    eval_cache: RefCell<BTreeMap<usize, Rc<PassPeaks>>>,
    teacher_cache: RefCell<BTreeMap<usize, u64>>,
}

/// Peak bytes of a dry run per phase, and the peak of block inputs offloaded to host memory.
#[derive(Default)]
struct PassPeaks {
    phase_peaks: Vec<(Phase, u64)>,
    offloaded_bytes: u64,
}

impl<'a> Estimator<'a> {
    pub fn new(inputs: EstimatorInputs<'a>) -> Self {
        let blocks = BlockIndex::new(inputs.network);
        let (train_cache, eval_cache) = (RefCell::default(), RefCell::default());
        Self { inputs, blocks, train_cache, eval_cache, teacher_cache: RefCell::default() }
    }

    /// Bytes that each block frees if it saves only its input, for one sample.
    pub fn freed_by_recompute(&self) -> Vec<u64> {
        let all = self.inputs.network.blocks.len();
        let (saved, inputs) = (self.saved_bytes(0, false), self.saved_bytes(all, false));
        saved.into_iter().zip(inputs).map(|(saved, input)| saved.saturating_sub(input)).collect()
    }

    /// Bytes of each block's input that activation offload copies to the host, for one sample.
    pub fn offloaded_inputs(&self) -> Vec<u64> {
        let all = self.inputs.network.blocks.len();
        let (resident, left) = (self.saved_bytes(all, false), self.saved_bytes(all, true));
        let copied = resident.into_iter().zip(left).map(|(resident, left)| resident.saturating_sub(left));
        // An input is an output of the block before; that of the first block, the micro-batch, stays.
        std::iter::once(0).chain(copied).take(all).collect()
    }

    /// Bytes that each block holds after the forward pass of one sample.
    fn saved_bytes(&self, recompute: usize, offload: bool) -> Vec<u64> {
        ledger_trace::saved_bytes_per_block(&self.log_forward_backward(1, recompute, offload).0, &self.blocks)
    }

    /// The ledger log of a training dry run, and the peak bytes offloaded to host memory.
    fn log_forward_backward(&self, batch: usize, recompute: usize, offload: bool) -> (Vec<LedgerEntry>, u64) {
        let host = Ledger::planning();
        let offload = offload.then(|| ActivationOffload::accounting_only(host.clone()));
        let body = |network: &Network, exec: &Executor| {
            drop(network.forward_backward(
                &Executor { pass: None, recompute_blocks: recompute, offload: offload.as_ref(), ..*exec },
                None,
            ));
        };
        (self.log_pass(Phase::Forward, batch, body), host.peak())
    }

    fn log_evaluate(&self, batch: usize) -> Vec<LedgerEntry> {
        let outputs = self.inputs.eval_outputs;
        self.log_pass(Phase::Eval, batch, |network, exec| drop(network.evaluate(exec, None, outputs)))
    }

    fn log_pass(&self, phase: Phase, batch: usize, body: impl Fn(&Network, &Executor)) -> Vec<LedgerEntry> {
        let s = &self.inputs;
        let ledger = Ledger::planning();
        ledger.set_phase(phase);
        {
            let spec = MicroBatchSpec { batch, dtype: s.dtype, backend: s.backend };
            // A planning ledger has no limit, so this cannot fail.
            let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(s.features, spec)).ok();
            let stored = s.stored_logits.filter(|_| phase == Phase::Forward);
            let _stored =
                stored.map(|format| ledger.reserve(Role::Batch, STORED_LOGITS, format.batch_bytes(batch)));
            body(s.network, &Executor::new(None, spec, &ledger));
        }
        ledger.log()
    }

    fn train_peaks(&self, exec_plan: ExecutionPlan) -> Rc<PassPeaks> {
        let (batch, recompute) = (self.train_batch(exec_plan), exec_plan.recompute);
        let offload = self.offloads_activations(exec_plan);
        let walk = || {
            let (log, offloaded_bytes) = self.log_forward_backward(batch, recompute, offload);
            Rc::new(PassPeaks { phase_peaks: ledger_trace::phase_peaks(&log), offloaded_bytes })
        };
        self.train_cache.borrow_mut().entry((batch, recompute, offload)).or_insert_with(walk).clone()
    }

    fn eval_peaks(&self, batch: usize) -> Rc<PassPeaks> {
        let walk = || {
            Rc::new(PassPeaks {
                phase_peaks: ledger_trace::phase_peaks(&self.log_evaluate(batch)),
                offloaded_bytes: 0,
            })
        };
        self.eval_cache.borrow_mut().entry(batch).or_insert_with(walk).clone()
    }

    /// Samples per micro-batch of the teacher that computes the logits to be stored.
    pub fn teacher_batch(&self, exec_plan: ExecutionPlan) -> usize {
        exec_plan.eval_micro_batch.min(self.inputs.train_samples as usize).max(1)
    }

    fn log_teacher(&self, batch: usize) -> Vec<LedgerEntry> {
        let s = &self.inputs;
        let ledger = Ledger::planning();
        ledger.set_phase(Phase::Teacher);
        if let Some(teacher) = &s.network.teacher {
            let spec = MicroBatchSpec { batch, dtype: teacher.dtype, backend: s.backend };
            // A planning ledger has no limit, so this cannot fail.
            let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(s.features, spec)).ok();
            drop(teacher.logits_on_host(&teacher.executor(None, spec, &ledger), None));
        }
        ledger.log()
    }

    /// Peak bytes of a pass of the teacher that computes the logits to be stored.
    fn teacher_peak(&self, batch: usize) -> u64 {
        let walk =
            || ledger_trace::phase_peaks(&self.log_teacher(batch)).first().map_or(0, |(_, bytes)| *bytes);
        *self.teacher_cache.borrow_mut().entry(batch).or_insert_with(walk)
    }

    /// Whether block inputs are offloaded to host memory.
    fn offloads_activations(&self, exec_plan: ExecutionPlan) -> bool {
        self.inputs.on_device() && exec_plan.offloads(Offload::Activations)
    }

    fn train_batch(&self, exec_plan: ExecutionPlan) -> usize {
        exec_plan.micro_batch.min(self.inputs.update_samples as usize)
    }

    /// Samples per evaluation batch; `None` if there is no validation set.
    fn eval_batch(&self, exec_plan: ExecutionPlan) -> Option<usize> {
        let samples = self.inputs.valid_samples as usize;
        (samples > 0).then(|| exec_plan.eval_micro_batch.min(samples))
    }

    /// Whether the weights that layers compute with are a copy of the master weights, in another dtype or rounded.
    fn has_compute_copy(&self) -> bool {
        self.inputs.dtype.size_in_bytes() as u64 != master_dtype_bytes(self.inputs.dtype)
            || self.inputs.layout.params.quantized().next().is_some()
    }

    /// Number of values of these parameters or statistics, per owning layer.
    fn by_layer(
        &self,
        specs: impl Iterator<Item = (&'a TensorSpec, Range<usize>)>,
    ) -> BTreeMap<&'a str, u64> {
        let mut values = BTreeMap::new();
        for (spec, range) in specs {
            // A layer's name is a prefix of its parameters' names.
            let mut owner = spec.name.as_str();
            while let Some((above, _)) = owner.rsplit_once('.') {
                owner = above;
                if self.blocks.contains(owner) {
                    break;
                }
            }
            *values.entry(owner).or_default() += range.len() as u64;
        }
        values
    }

    /// What a run holds from start to end, in reservation order.
    pub fn persistent_allocations(&self, exec_plan: ExecutionPlan) -> Vec<Allocation> {
        let s = &self.inputs;
        let (params, stats, master_bytes) =
            (s.layout.params.len as u64, s.layout.stats.len as u64, master_dtype_bytes(s.dtype));
        let trained = s.layout.params.trained_len as u64;
        // Frozen parameters have no master weights besides the copy in the compute dtype.
        let (masters, compute_copy_bytes) = match self.has_compute_copy() {
            true => (trained, params * s.dtype.size_in_bytes() as u64),
            false => (params, 0),
        };
        let packing = match s.backend {
            Backend::Reference { on_gpu: false } => {
                rayon::current_num_threads() as u64 * matmul::gemm_buffer_bytes()
            }
            Backend::Cpu { .. } | Backend::Cuda { .. } | Backend::Reference { on_gpu: true } => 0,
        };
        let average_bytes = if s.job.train.ema.is_some() { trained * master_bytes } else { 0 };
        let rule = s.optimizer.of_kind(exec_plan.optimizer);
        let mut state = s.allocation(
            Role::OptimizerState,
            "optimizer state",
            optim::state_bytes(&rule, &s.layout.params),
        );
        let state_offloaded = s.on_device() && exec_plan.offloads(Offload::OptimizerState);
        if state_offloaded {
            state.space = MemorySpace::Ram;
        }
        let mut all = vec![
            s.allocation(Role::Reserve, "program", PROGRAM_HEAP_BYTES + packing),
            s.allocation(Role::Weights, MASTER_WEIGHTS, (masters + stats) * master_bytes),
            s.allocation(Role::Weights, "computed copy", compute_copy_bytes),
            s.allocation(Role::Weights, "moving average", average_bytes),
            s.allocation(Role::Weights, "statistics before an update", stats * master_bytes),
            s.allocation(Role::Gradients, GRADIENTS, trained * master_bytes),
            state,
            s.allocation(Role::DataPipeline, "data in memory", s.resident_data),
        ];
        // Reservations are numbered (see `InjectedOom`), so a part that was not measured makes none.
        let measured = [
            s.allocation(Role::Process, "process", s.process.non_heap),
            s.allocation(Role::DataPipeline, "left by preparation", s.process.leftover_heap),
        ];
        all.extend(measured.into_iter().filter(|part| part.bytes > 0));
        if s.teacher_bytes > 0 && s.stored_logits.is_none() {
            all.push(s.allocation(Role::Weights, TEACHER, s.teacher_bytes));
        }
        if s.job.pruning().is_some() {
            all.push(s.allocation(Role::Weights, "pruning mask", optim::prune::mask_bytes(&s.layout.params)));
        }
        if s.job.log.memory == MemoryLog::Detailed {
            let ledgers = 1 + u64::from(s.on_device());
            all.push(s.allocation(Role::Reserve, RECORDER, ledgers * RECORDER_BYTES));
        }
        if s.on_device() {
            all.push(s.allocation(Role::Workspace, GEMM_WORKSPACE, GEMM_WORKSPACE_BYTES));
            all.push(s.allocation(Role::Workspace, ROUNDING, SMALL_ALLOCATION_BYTES));
        }
        if state_offloaded {
            let bytes = optim::staging_bytes(&rule, &s.layout.params);
            all.push(s.allocation(Role::Workspace, "optimizer state in staging", bytes));
        }
        all
    }

    /// What is held while the teacher computes the logits to be stored, in reservation order, besides its passes and
    /// the staging of its batches: its weights, and of what a run holds all that is no tensor of training.
    pub fn teacher_allocations(&self, exec_plan: ExecutionPlan) -> Vec<Allocation> {
        let (s, batch) = (&self.inputs, self.teacher_batch(exec_plan));
        let is_held = |part: &Allocation| match part.role {
            Role::Reserve => part.name != RECORDER,
            Role::DataPipeline | Role::Process => true,
            Role::Workspace => part.name == GEMM_WORKSPACE || part.name == ROUNDING,
            _ => false,
        };
        let mut all: Vec<Allocation> =
            self.persistent_allocations(exec_plan).into_iter().filter(is_held).collect();
        all.push(s.allocation(Role::Weights, TEACHER, s.teacher_bytes));
        let prefetch = s.loader_bytes(batch, exec_plan.prefetch, (1, s.train_samples));
        all.push(s.allocation(Role::DataPipeline, "prefetch", prefetch));
        if let Some(format) = s.stored_logits {
            let computed = 4 * (batch * format.positions * format.classes) as u64;
            let on_host = if s.on_device() { computed } else { 0 };
            let bytes = format.file_bytes(batch as u64) + FILE_BUFFER_BYTES + on_host;
            all.push(s.allocation(Role::DataPipeline, STORED_LOGITS, bytes));
        }
        all
    }

    /// The phase in which the teacher computes the logits to be stored.
    fn teacher_phase(&self, exec_plan: ExecutionPlan) -> Vec<Allocation> {
        let (s, batch) = (&self.inputs, self.teacher_batch(exec_plan));
        let mut all = self.teacher_allocations(exec_plan);
        if s.on_device() {
            let bytes = staging_bytes(s.features, batch);
            all.extend([Role::Batch, Role::DataPipeline].map(|role| s.allocation(role, STAGED_BATCH, bytes)));
        }
        all
    }

    /// What a phase holds besides its dry run.
    fn held(&self, exec_plan: ExecutionPlan, phase: Phase) -> Vec<Allocation> {
        match phase {
            Phase::Teacher => self.teacher_phase(exec_plan),
            _ => self.persistent(exec_plan).into_iter().chain(self.transient(exec_plan, phase)).collect(),
        }
    }

    /// What is held from start to end, buffers of the plan included.
    fn persistent(&self, exec_plan: ExecutionPlan) -> Vec<Allocation> {
        let s = &self.inputs;
        let mut persistent = self.persistent_allocations(exec_plan);
        // A run asks the loader for no more samples than the training set has.
        let samples = exec_plan.micro_batch.min(s.train_samples as usize);
        let prefetch = s.loader_bytes(samples, exec_plan.prefetch, (s.updates, s.update_samples));
        persistent.push(s.allocation(Role::DataPipeline, "prefetch", prefetch));
        if s.on_device() {
            // Staging buffers for the larger of the training and evaluation micro-batches, on both sides.
            let samples = self.train_batch(exec_plan).max(self.eval_batch(exec_plan).unwrap_or(0));
            let bytes = staging_bytes(s.features, samples);
            let sides = [Role::Batch, Role::DataPipeline];
            persistent.extend(sides.map(|role| s.allocation(role, STAGED_BATCH, bytes)));
            if let Some(format) = s.stored_logits {
                // On their way to the device.
                let bytes = format.batch_bytes(self.train_batch(exec_plan));
                persistent.push(s.allocation(Role::DataPipeline, STORED_LOGITS, bytes));
            }
        }
        if self.offloads_activations(exec_plan) {
            persistent.push(Allocation {
                role: Role::Activations,
                name: "inputs of blocks",
                bytes: self.train_peaks(exec_plan).offloaded_bytes,
                space: MemorySpace::Ram,
            });
        }
        persistent
    }

    /// What a phase holds besides the persistent allocations and the dry run's.
    fn transient(&self, exec_plan: ExecutionPlan, phase: Phase) -> Vec<Allocation> {
        let s = &self.inputs;
        match (phase, self.eval_batch(exec_plan)) {
            (Phase::Start, _) => {
                let (role, bytes) = (Role::Workspace, low_rank::factorization_bytes(s.layout));
                vec![Allocation { role, name: FACTORIZATION, bytes, space: MemorySpace::Ram }]
            }
            (Phase::Update, _) => {
                let rule = s.optimizer.of_kind(exec_plan.optimizer);
                let bytes = optim::workspace_bytes(&rule, &s.layout.params, s.backend);
                let mut parts = vec![s.allocation(Role::Workspace, "optimizer", bytes)];
                let bytes = rounding_bytes(&s.layout.params, s.backend);
                parts.push(s.allocation(Role::Workspace, QUANTIZATION, bytes));
                if s.job.pruning().is_some() {
                    let role = Role::Workspace;
                    let bytes = optim::prune::workspace_bytes(&s.layout.params, s.backend);
                    parts.push(s.allocation(role, PRUNING, bytes));
                    let (bytes, space) =
                        (optim::prune::selection_bytes(s.layout, s.backend), MemorySpace::Ram);
                    parts.push(Allocation { role, name: PRUNING, bytes, space });
                }
                parts
            }
            (Phase::Eval, Some(batch)) => {
                let bytes = s.loader_bytes(batch, exec_plan.prefetch, (1, s.valid_samples));
                vec![
                    s.allocation(Role::DataPipeline, "evaluation prefetch", bytes),
                    s.allocation(Role::DataPipeline, EVALUATION_METRICS, s.eval_metric_bytes),
                ]
            }
            (Phase::Checkpoint, _) => {
                let bytes = checkpoint_write_bytes(s.layout, s.dtype);
                let file = s.allocation(Role::CheckpointWriting, "checkpoint", bytes);
                // On a GPU, weights and optimizer states pass through host memory one after another, each held twice:
                // as copied and as written.
                let largest = largest_param_len(s.layout, |_| true);
                let values = match exec_plan.offloads(Offload::OptimizerState) {
                    true => largest,
                    false => largest.max(s.layout.params.trained_len as u64),
                };
                let copied = if s.on_device() { 2 * values * master_dtype_bytes(s.dtype) } else { 0 };
                vec![file, s.allocation(Role::CheckpointWriting, "copy", copied)]
            }
            _ => Vec::new(),
        }
    }

    /// Where activations reside.
    fn activation_space(&self) -> MemorySpace {
        if self.inputs.on_device() { MemorySpace::Vram } else { MemorySpace::Ram }
    }
}

impl MemoryPredictor for Estimator<'_> {
    fn estimate(&self, exec_plan: ExecutionPlan) -> Estimate {
        let bytes_in = |space: MemorySpace, parts: &[Allocation]| {
            parts.iter().filter(|part| part.space == space).map(|part| part.bytes).sum::<u64>()
        };
        let train = self.train_peaks(exec_plan);
        let eval = self.eval_batch(exec_plan).map(|batch| self.eval_peaks(batch)).unwrap_or_default();
        let factorizes = self.inputs.job.lowrank.is_some() && self.inputs.job.train.init.is_some();
        let start = factorizes.then_some((Phase::Start, 0));
        let teacher = self.inputs.stored_logits;
        let teacher = teacher.map(|_| (Phase::Teacher, self.teacher_peak(self.teacher_batch(exec_plan))));
        let pass_peaks = teacher
            .iter()
            .chain(&start)
            .chain(&train.phase_peaks)
            .chain(&[(Phase::Update, 0)])
            .chain(&eval.phase_peaks)
            .chain(&[(Phase::Checkpoint, 0)]);
        let phases = pass_peaks.map(|(name, pass_bytes)| {
            let allocations = self.held(exec_plan, *name);
            let held = |space| {
                let pass_bytes = if space == self.activation_space() { *pass_bytes } else { 0 };
                bytes_in(space, &allocations) + pass_bytes
            };
            PhasePeak { name: *name, vram_bytes: held(MemorySpace::Vram), ram_bytes: held(MemorySpace::Ram) }
        });
        // Measured: preparation is over when the plan is made, and no plan can lower its peak.
        let ram_bytes = self.inputs.process.preparation_peak;
        let preparation = PhasePeak { name: Phase::Preparation, vram_bytes: 0, ram_bytes };
        let all = std::iter::once(preparation).filter(|phase| phase.ram_bytes > 0).chain(phases);
        Estimate::new(all.collect(), 2 * train.offloaded_bytes)
    }

    fn estimate_within(&self, exec_plan: ExecutionPlan, ram: u64) -> Estimate {
        let prefetch = budget::prefetch(self.inputs.job, self.inputs.features, ram);
        self.estimate(ExecutionPlan { prefetch, ..exec_plan })
    }

    fn peak_breakdown(&self, exec_plan: ExecutionPlan) -> Vec<MemoryPart> {
        let estimate = self.estimate(exec_plan);
        let mut parts = Vec::new();
        for place in [MemorySpace::Vram, MemorySpace::Ram] {
            let held = |phase: &PhasePeak| phase.bytes_in(place);
            // The first phase on ties, like the phase of `Estimate::peak`.
            let peak = estimate.phases.iter().map(held).max().unwrap_or(0);
            let Some(phase) =
                estimate.phases.iter().find(|phase| held(phase) == peak).map(|phase| phase.name)
            else {
                continue;
            };
            let mut add = |name: &str, role, bytes| {
                if bytes > 0 {
                    parts.push(MemoryPart { name: name.into(), role, bytes, r#where: place });
                }
            };
            if phase == Phase::Preparation {
                add("preparation", Role::DataPipeline, peak);
                continue;
            }
            let allocations = self.held(exec_plan, phase).into_iter();
            for Allocation { role, name, bytes, .. } in allocations.filter(|part| part.space == place) {
                match name {
                    MASTER_WEIGHTS | GRADIENTS => {
                        let (params, stats) = (&self.inputs.layout.params, &self.inputs.layout.stats);
                        let weights = name == MASTER_WEIGHTS;
                        let frozen = weights && !self.has_compute_copy();
                        let frozen = frozen.then(|| params.frozen()).into_iter().flatten();
                        let stats = weights.then(|| stats.iter()).into_iter().flatten();
                        for (layer, values) in self.by_layer(params.trained().chain(frozen).chain(stats)) {
                            add(layer, role, values * master_dtype_bytes(self.inputs.dtype));
                        }
                    }
                    _ => add(name, role, bytes),
                }
            }
            if place != self.activation_space() {
                continue;
            }
            let log = match (phase, self.eval_batch(exec_plan)) {
                (Phase::Forward | Phase::Backward, _) => {
                    self.log_forward_backward(
                        self.train_batch(exec_plan),
                        exec_plan.recompute,
                        self.offloads_activations(exec_plan),
                    )
                    .0
                }
                (Phase::Eval, Some(batch)) => self.log_evaluate(batch),
                (Phase::Teacher, _) => self.log_teacher(self.teacher_batch(exec_plan)),
                _ => continue,
            };
            ledger_trace::live_at_peak(&log, phase)
                .iter()
                .for_each(|((role, name), bytes)| add(name, *role, *bytes));
        }
        parts
            .sort_by_key(|part| (part.r#where == MemorySpace::Ram, part.role, std::cmp::Reverse(part.bytes)));
        parts
    }
}
