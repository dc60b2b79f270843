//! Predicts the memory of a run without running it. A dry run executes the network without tensors, and the log of its
//! planning ledger shows what is live at every moment. The peak follows from lifetimes, not from a sum or a factor.
//!
//! A dry run depends only on the micro-batch, the recomputed blocks and activation offload, so the result is cached,
//! however many execution plans are compared.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use candle_core::DType;

use super::ledger_trace::{self, BlockIndex};
use super::plan::{MemoryPart, MemorySpace, Offload, PhasePeak};
use crate::base::Role;
use crate::base::features::{Features, InputSpec};
use crate::base::{Backend, MicroBatchSpec};
use crate::graph::network::{Executor, Network};
use crate::graph::offload::ActivationOffload;
use crate::kernels::{matmul, sample_keys};
use crate::memory::ledger::{Ledger, LedgerEntry};
use crate::memory::process::ProcessMemory;
use crate::params::{FlatLayout, MemoryFormat, ParamLayout};

/// Heap bytes the program holds besides its reservations: the measured size of argument parsing, the job, the network
/// description, thread pools and reports, with a margin.
pub const PROGRAM_HEAP_BYTES: u64 = 3 << 19;

/// Device bytes for allocations too small to count one by one: reductions that are read back, and the driver's
/// rounding.
pub const SMALL_ALLOCATION_BYTES: u64 = 256 << 10;

/// Device bytes of the workspace that all GEMMs on a GPU share.
pub const GEMM_WORKSPACE_BYTES: u64 = 32 << 20;

/// The name that reservations for batches in transfer to the GPU carry.
pub const STAGED_BATCH: &str = "micro-batch on its way";

/// The phase before the first step: data is located, counted and tokenized.
pub const PREPARATION_PHASE: &str = "preparation";

const MASTER_WEIGHTS: &str = "master weights";
const GRADIENTS: &str = "gradients";

/// A job, as far as its memory is concerned.
#[derive(Clone, Copy)]
pub struct EstimatorInputs<'a> {
    pub network: &'a Network,
    pub layout: &'a ParamLayout,
    pub features: &'a Features,
    pub dtype: DType,
    /// Where layers compute and tensors reside.
    pub backend: Backend,
    pub optimizer_state: u64,
    /// Bytes of 8-bit optimizer state, if the optimizer has such a variant.
    pub optimizer_state_8bit: u64,
    /// Device bytes of the staging buffers for offloaded optimizer state.
    pub state_staging_bytes: u64,
    /// Bytes of temporaries during the optimizer step.
    pub update_workspace: u64,
    /// The run keeps an exponential moving average of the weights.
    pub keeps_ema: bool,
    /// Bytes the dataset holds regardless of the batch size.
    pub resident_data: u64,
    /// Process memory besides the counted heap, and what data preparation used.
    pub process: ProcessMemory,
    /// Host bytes the run may use.
    pub ram: u64,
    /// Bytes the loader holds for a micro-batch of this size, within this many host bytes.
    pub loader_bytes: &'a dyn Fn(usize, u64) -> u64,
    /// Samples per update at most. A micro-batch rounded up to whole normalization groups may exceed it.
    pub update_samples: u64,
    pub valid_samples: u64,
}

impl EstimatorInputs<'_> {
    /// Whether tensors reside in device memory rather than host memory.
    fn on_device(&self) -> bool {
        self.backend.is_cuda()
    }
}

/// How a step is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutionPlan {
    pub micro_batch: usize,
    /// Number of recomputed blocks.
    pub recompute: usize,
    pub eval_micro_batch: usize,
    /// 8-bit optimizer state.
    pub state_8bit: bool,
    pub offload: &'static [Offload],
}

impl ExecutionPlan {
    pub fn offloads(&self, what: Offload) -> bool {
        self.offload.contains(&what)
    }
}

/// The peak memory of an execution plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub vram: u64,
    pub ram: u64,
    /// Phase of the device peak; on the CPU, of the host peak.
    pub phase: &'static str,
    pub phases: Vec<(&'static str, MemoryUsage)>,
    /// Bytes of activations that a micro-batch copies to the host and back.
    pub transfer_bytes: u64,
}

/// Bytes held at one moment, on the device and on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    pub vram: u64,
    pub ram: u64,
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
    pub fn new(phases: Vec<(&'static str, MemoryUsage)>, transfer_bytes: u64) -> Self {
        let highest =
            |of: fn(&MemoryUsage) -> u64| {
                let first = phases.iter().fold(("start", 0), |best, (phase, held)| {
                    if of(held) > best.1 { (*phase, of(held)) } else { best }
                });
                (first.0, first.1)
            };
        let (vram, ram) = (highest(|held| held.vram), highest(|held| held.ram));
        let phase = if vram.1 > 0 { vram.0 } else { ram.0 };
        Self { vram: vram.1, ram: ram.1, phase, phases, transfer_bytes }
    }

    pub fn phases(&self) -> Vec<PhasePeak> {
        let one = |(name, held): &(&str, MemoryUsage)| PhasePeak {
            name: (*name).into(),
            vram_bytes: held.vram,
            ram_bytes: held.ram,
        };
        self.phases.iter().map(one).collect()
    }
}

/// Bytes per value of the master weights.
fn master_dtype_bytes(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Where memory of this role resides if nothing is offloaded.
pub fn memory_space(role: Role, backend: Backend) -> MemorySpace {
    match (role, backend) {
        (Role::DataPipeline | Role::CheckpointWriting | Role::Reserve | Role::Process, _)
        | (_, Backend::Cpu { .. }) => MemorySpace::Ram,
        (_, Backend::Cuda { .. }) => MemorySpace::Vram,
    }
}

/// What a run holds from start to end, in reservation order, and where.
pub fn persistent_allocations(
    s: &EstimatorInputs,
    offload: &[Offload],
) -> Vec<(Role, &'static str, u64, MemorySpace)> {
    let (params, stats, master_bytes) =
        (s.layout.params.len as u64, s.layout.stats.len as u64, master_dtype_bytes(s.dtype));
    let compute_copy_bytes = if s.dtype.size_in_bytes() as u64 == master_bytes {
        0
    } else {
        params * s.dtype.size_in_bytes() as u64
    };
    let packing = if let Backend::Cpu { threads } = s.backend {
        threads as u64 * matmul::thread_buffer_bytes(s.dtype)
    } else {
        0
    };
    let mut all = vec![
        (Role::Reserve, "program", PROGRAM_HEAP_BYTES + packing),
        (Role::Weights, MASTER_WEIGHTS, (params + stats) * master_bytes),
        (Role::Weights, "computed copy", compute_copy_bytes),
        (Role::Weights, "moving average", if s.keeps_ema { params * master_bytes } else { 0 }),
        (Role::Weights, "statistics before an update", stats * master_bytes),
        (Role::Gradients, GRADIENTS, params * master_bytes),
        (Role::OptimizerState, "optimizer state", s.optimizer_state),
        (Role::DataPipeline, "data in memory", s.resident_data),
    ];
    // Reservations are numbered (see `InjectedOom`), so a part that was not measured makes none.
    let measured = [
        (Role::Process, "process", s.process.non_heap),
        (Role::DataPipeline, "left by preparation", s.process.leftover_heap),
    ];
    all.extend(measured.into_iter().filter(|(_, _, bytes)| *bytes > 0));
    if s.on_device() {
        all.push((Role::Workspace, "matrix products", GEMM_WORKSPACE_BYTES));
        all.push((Role::Workspace, "rounding", SMALL_ALLOCATION_BYTES));
    }
    let state_offloaded = offload.contains(&Offload::OptimizerState);
    if state_offloaded {
        all.push((Role::Workspace, "optimizer state on its way", s.state_staging_bytes));
    }
    let placed = |role| match role {
        Role::OptimizerState if state_offloaded => MemorySpace::Ram,
        role => memory_space(role, s.backend),
    };
    all.into_iter().map(|(role, name, bytes)| (role, name, bytes, placed(role))).collect()
}

/// Bytes of a micro-batch as tensors. On the CPU, floats arrive as f32 and are rounded afterwards.
pub fn batch_bytes(features: &Features, spec: MicroBatchSpec) -> u64 {
    let value = match (&features.input, spec.backend) {
        (InputSpec::Floats { .. }, Backend::Cuda { .. }) => spec.dtype.size_in_bytes(),
        (InputSpec::Floats { .. } | InputSpec::Tabular { .. } | InputSpec::Tokens { .. }, _) => 4,
    };
    let sample_key_bytes =
        if spec.backend.is_cuda() { sample_keys::sample_info_bytes(spec.batch) } else { 0 };
    (spec.batch * (value * features.input_len() + 4 * features.target_len()) + sample_key_bytes) as u64
}

/// Bytes of a micro-batch in transfer to a GPU: this many in pinned host memory, and as many on the device.
pub fn staging_bytes(features: &Features, samples: usize) -> u64 {
    (samples * features.value_bytes() + sample_keys::sample_info_bytes(samples)) as u64
}

/// Bytes needed to write a checkpoint: the largest parameter that must be permuted from channels-last, and the file
/// buffer.
pub fn checkpoint_write_bytes(layout: &ParamLayout, dtype: DType) -> u64 {
    largest_param_len(layout, |memory_format| memory_format == MemoryFormat::ChannelsLast)
        * master_dtype_bytes(dtype)
        + (1 << 20)
}

/// Number of values in the largest parameter of such a memory format.
fn largest_param_len(layout: &ParamLayout, matches: impl Fn(MemoryFormat) -> bool) -> u64 {
    let sizes = layout
        .params
        .iter()
        .filter(|(spec, _)| matches(spec.memory_format))
        .map(|(spec, _)| spec.len() as u64);
    sizes.max().unwrap_or(0)
}

/// Ranks blocks for recompute: least time per freed byte first; on ties the earlier block, whose activations live
/// longest; blocks that free nothing last. Returns the rank of each block.
pub fn recompute_ranks(flops: &[u64], freed: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..flops.len()).collect();
    // Compares flops / freed without division; a block that frees nothing has infinite cost per byte.
    order.sort_by(|&a, &b| {
        let cost = |x: usize, y: usize| u128::from(flops[x].max(1)) * u128::from(freed[y]);
        match (freed[a], freed[b]) {
            (0, 0) => std::cmp::Ordering::Equal,
            (0, _) => std::cmp::Ordering::Greater,
            (_, 0) => std::cmp::Ordering::Less,
            _ => cost(a, b).cmp(&cost(b, a)),
        }
    });
    let mut ranks = vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(rank, block)| ranks[block] = rank);
    ranks
}

/// Predicts the memory of a job by dry runs.
pub struct Estimator<'a> {
    inputs: EstimatorInputs<'a>,
    blocks: BlockIndex,
    train_cache: RefCell<BTreeMap<(usize, usize, bool), Rc<PassPeaks>>>,
    eval_cache: RefCell<BTreeMap<usize, Rc<PassPeaks>>>,
}

/// Peak bytes of a dry run per phase, and the peak of block inputs offloaded to host memory.
#[derive(Default)]
struct PassPeaks {
    phase_peaks: Vec<(&'static str, u64)>,
    offloaded_bytes: u64,
}

impl<'a> Estimator<'a> {
    pub fn new(inputs: EstimatorInputs<'a>) -> Self {
        let blocks = BlockIndex::new(inputs.network);
        Self { inputs, blocks, train_cache: RefCell::default(), eval_cache: RefCell::default() }
    }

    /// Bytes that each block frees if it saves only its input, for one sample.
    pub fn freed_by_recompute(&self) -> Vec<u64> {
        let kept = |recompute| {
            ledger_trace::saved_bytes_per_block(
                &self.log_forward_backward(1, recompute, false).0,
                &self.blocks,
            )
        };
        let all = self.inputs.network.blocks.len();
        kept(0).into_iter().zip(kept(all)).map(|(whole, input)| whole.saturating_sub(input)).collect()
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
        (self.log_pass("forward", batch, body), host.peak())
    }

    fn log_evaluate(&self, batch: usize) -> Vec<LedgerEntry> {
        self.log_pass("eval", batch, |network, exec| drop(network.evaluate(exec, None)))
    }

    fn log_pass(
        &self,
        phase: &'static str,
        batch: usize,
        body: impl Fn(&Network, &Executor),
    ) -> Vec<LedgerEntry> {
        let s = &self.inputs;
        let ledger = Ledger::planning();
        ledger.set_phase(phase);
        {
            let spec = MicroBatchSpec { batch, dtype: s.dtype, backend: s.backend };
            // A planning ledger has no limit, so this cannot fail.
            let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(s.features, spec)).ok();
            body(
                s.network,
                &Executor { pass: None, spec, ledger: &ledger, recompute_blocks: 0, offload: None },
            );
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

    /// Number of values of the parameters, and of `stats`, per owning layer.
    fn by_layer(&self, stats: Option<&'a FlatLayout>) -> BTreeMap<&'a str, u64> {
        let mut values = BTreeMap::new();
        let flats = [Some(&self.inputs.layout.params), stats];
        for (spec, range) in flats.into_iter().flatten().flat_map(FlatLayout::iter) {
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

    fn memory_space(&self, role: Role) -> MemorySpace {
        memory_space(role, self.inputs.backend)
    }

    /// What is held from start to end.
    fn persistent(&self, exec_plan: ExecutionPlan, ram: u64) -> Vec<(Role, &'static str, u64, MemorySpace)> {
        let mut s = EstimatorInputs { ram, ..self.inputs };
        if exec_plan.state_8bit {
            s.optimizer_state = s.optimizer_state_8bit;
        }
        let mut persistent = persistent_allocations(&s, if s.on_device() { exec_plan.offload } else { &[] });
        let prefetch = (s.loader_bytes)(exec_plan.micro_batch, s.ram);
        let more = [(Role::DataPipeline, "prefetch", prefetch)].into_iter().chain(self.staging(exec_plan));
        persistent.extend(more.map(|(role, name, bytes)| (role, name, bytes, self.memory_space(role))));
        if self.offloads_activations(exec_plan) {
            persistent.push((
                Role::Activations,
                "inputs of blocks",
                self.train_peaks(exec_plan).offloaded_bytes,
                MemorySpace::Ram,
            ));
        }
        persistent
    }

    /// Staging buffers for the larger of the training and evaluation micro-batches, on the device and on the host.
    fn staging(&self, exec_plan: ExecutionPlan) -> Vec<(Role, &'static str, u64)> {
        let samples = self.train_batch(exec_plan).max(self.eval_batch(exec_plan).unwrap_or(0));
        let bytes = staging_bytes(self.inputs.features, samples);
        let both = vec![(Role::Batch, STAGED_BATCH, bytes), (Role::DataPipeline, STAGED_BATCH, bytes)];
        if self.inputs.on_device() { both } else { Vec::new() }
    }

    /// What a phase holds besides the persistent allocations and the dry run's.
    fn transient(
        &self,
        exec_plan: ExecutionPlan,
        ram: u64,
        phase: &str,
    ) -> Vec<(Role, &'static str, u64, MemorySpace)> {
        let s = &EstimatorInputs { ram, ..self.inputs };
        let mut transient = match (phase, self.eval_batch(exec_plan)) {
            ("update", _) => vec![(Role::Workspace, "optimizer", s.update_workspace)],
            ("eval", Some(batch)) => {
                vec![(Role::DataPipeline, "evaluation prefetch", (s.loader_bytes)(batch, s.ram))]
            }
            ("checkpoint", _) => {
                vec![(Role::CheckpointWriting, "checkpoint", checkpoint_write_bytes(s.layout, s.dtype))]
            }
            _ => Vec::new(),
        };
        if phase == "checkpoint" && s.on_device() {
            // Weights and optimizer states pass through host memory one after another, each held twice: as copied and
            // as written.
            let values = match exec_plan.offloads(Offload::OptimizerState) {
                true => largest_param_len(s.layout, |_| true),
                false => s.layout.params.len as u64,
            };
            let copy = 2 * values * master_dtype_bytes(s.dtype);
            transient.push((Role::CheckpointWriting, "copy", copy));
        }
        transient
            .into_iter()
            .map(|(role, name, bytes)| (role, name, bytes, self.memory_space(role)))
            .collect()
    }

    /// Where activations reside.
    fn activation_space(&self) -> MemorySpace {
        if self.inputs.on_device() { MemorySpace::Vram } else { MemorySpace::Ram }
    }
}

impl MemoryPredictor for Estimator<'_> {
    fn estimate(&self, exec_plan: ExecutionPlan) -> Estimate {
        self.estimate_within(exec_plan, self.inputs.ram)
    }

    fn estimate_within(&self, exec_plan: ExecutionPlan, budget: u64) -> Estimate {
        let bytes_in = |place: MemorySpace, parts: &[(Role, &str, u64, MemorySpace)]| {
            parts.iter().filter(|part| part.3 == place).map(|part| part.2).sum::<u64>()
        };
        let persistent = self.persistent(exec_plan, budget);
        let (vram, ram) = (bytes_in(MemorySpace::Vram, &persistent), bytes_in(MemorySpace::Ram, &persistent));
        let train = self.train_peaks(exec_plan);
        let eval = self.eval_batch(exec_plan).map(|batch| self.eval_peaks(batch)).unwrap_or_default();
        let pass_peaks = train
            .phase_peaks
            .iter()
            .chain(&[("update", 0)])
            .chain(&eval.phase_peaks)
            .chain(&[("checkpoint", 0)]);
        let phases = pass_peaks.map(|(phase, high)| {
            let transient = self.transient(exec_plan, budget, phase);
            let pass_bytes = |place| if place == self.activation_space() { *high } else { 0 };
            let held = MemoryUsage {
                vram: vram + bytes_in(MemorySpace::Vram, &transient) + pass_bytes(MemorySpace::Vram),
                ram: ram + bytes_in(MemorySpace::Ram, &transient) + pass_bytes(MemorySpace::Ram),
            };
            (*phase, held)
        });
        // Measured: preparation is over when the plan is made, and no plan can lower its peak.
        let preparation = MemoryUsage { vram: 0, ram: self.inputs.process.preparation_peak };
        let all =
            std::iter::once((PREPARATION_PHASE, preparation)).filter(|(_, held)| held.ram > 0).chain(phases);
        Estimate::new(all.collect(), 2 * train.offloaded_bytes)
    }

    fn peak_breakdown(&self, exec_plan: ExecutionPlan) -> Vec<MemoryPart> {
        let estimate = self.estimate(exec_plan);
        let mut parts = Vec::new();
        for place in [MemorySpace::Vram, MemorySpace::Ram] {
            let of = |held: &MemoryUsage| if place == MemorySpace::Vram { held.vram } else { held.ram };
            // The first phase on ties, like `Estimate::phase`.
            let peak = estimate.phases.iter().map(|(_, held)| of(held)).max().unwrap_or(0);
            let Some((phase, _)) = estimate.phases.iter().find(|(_, held)| of(held) == peak) else {
                continue;
            };
            let mut add = |name: &str, role, bytes| {
                if bytes > 0 {
                    parts.push(MemoryPart { name: name.into(), role, bytes, r#where: place });
                }
            };
            if *phase == PREPARATION_PHASE {
                add(PREPARATION_PHASE, Role::DataPipeline, peak);
                continue;
            }
            let budget = self.inputs.ram;
            let allocations = self
                .persistent(exec_plan, budget)
                .into_iter()
                .chain(self.transient(exec_plan, budget, phase));
            for (role, name, bytes, _) in allocations.filter(|part| part.3 == place) {
                match name {
                    MASTER_WEIGHTS | GRADIENTS => {
                        let stats = (name == MASTER_WEIGHTS).then_some(&self.inputs.layout.stats);
                        for (layer, values) in self.by_layer(stats) {
                            add(layer, role, values * master_dtype_bytes(self.inputs.dtype));
                        }
                    }
                    _ => add(name, role, bytes),
                }
            }
            if place != self.activation_space() {
                continue;
            }
            let log = match (*phase, self.eval_batch(exec_plan)) {
                ("forward" | "backward", _) => {
                    self.log_forward_backward(
                        self.train_batch(exec_plan),
                        exec_plan.recompute,
                        self.offloads_activations(exec_plan),
                    )
                    .0
                }
                ("eval", Some(batch)) => self.log_evaluate(batch),
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
