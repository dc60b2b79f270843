//! Memory planning of a prepared job: the inputs of the planner, and applying the plan it chose.

use super::retry::ShrinkLimits;
use super::setup::{Setup, fused_network};
use crate::base::units::Bytes;
use crate::base::{Backend, MemorySpace, MicroBatchSpec, Phase};
use crate::graph::network::{LayerBlock, Network};
use crate::job::{Interval, Job, OomAction, OptimizerKind, PruneStructure, Reductions};
use crate::memory::probe;
use crate::models::{self, FEATURE_MAPS, LossOptions};
use crate::optim;
use crate::params::{ParamLayout, ParamRules};
use crate::planner::budget::TargetMachine;
use crate::planner::cost_model::{CostModel, recompute_ranks};
use crate::planner::estimate::{Estimator, EstimatorInputs, MemoryPredictor};
use crate::planner::execution_plan::{BatchSplit, ExecutionPlan, Offload};
use crate::planner::plan::{Disk, MemoryPlan, PlanVerdict, PrunedModel, RemovedUnits};
use crate::planner::prediction::{PredictionCost, SmallerModel};
use crate::planner::search::PlanRequest;
use crate::planner::{ladder, search};

/// Speeds with which the planner compares execution plans. Only the ratios matter, not the absolute values: overhead
/// per layer against FLOPs, recomputation against smaller micro-batches, transfers against compute.
struct DeviceSpeed {
    /// Floating-point operations per second.
    flops: f64,
    /// Fixed seconds per layer.
    layer_overhead: f64,
    /// Bytes per second that an optimizer update reads and writes.
    memory_bandwidth: f64,
}

/// One CPU core, and a whole GPU.
const CPU_CORE: DeviceSpeed = DeviceSpeed { flops: 5e10, layer_overhead: 2e-5, memory_bandwidth: 5e9 };
const GPU: DeviceSpeed = DeviceSpeed { flops: 1e14, layer_overhead: 1e-5, memory_bandwidth: 1e12 };

/// Bytes per second between host and GPU: what PCI Express 3.0 x16 reaches.
const PCIE_BANDWIDTH: f64 = 12e9;

/// Upper bound on the bytes of a checkpoint that are not tensors: its state and the file headers.
const NON_TENSOR_BYTES: u64 = 128 << 10;

/// Time of an update with 8-bit optimizer state, relative to f32 state.
const UPDATE_8BIT_SLOWDOWN: f64 = 2.0;

impl Setup {
    /// The memory plan for this machine with `ram` bytes of host memory. Allocates no tensor.
    pub fn plan(&self, ram: u64) -> MemoryPlan {
        self.plan_for(&self.target_machine(ram, probe::host().map_or(u64::MAX, |host| host.process_budget())))
    }

    /// The memory plan for any machine.
    pub fn plan_for(&self, machine: &TargetMachine) -> MemoryPlan {
        let mut plan = ladder::plan(&self.plan_request(machine), &self.estimator_for(machine));
        if let Some(image) = self.image_too_large(&plan) {
            plan.advice = Some(image);
        }
        let (parameters, trained_parameters) = (self.num_parameters(), self.num_trained());
        let (disk, pruned) = (self.disk(plan.chosen.optimizer), self.pruned_model().map(Box::new));
        let prediction = self.smaller_model();
        MemoryPlan { disk, parameters, trained_parameters, pruned, prediction, ..plan }
    }

    /// What one sample takes on this machine with the trained model, if the job prunes or distills.
    pub fn smaller_model(&self) -> Option<SmallerModel> {
        if self.job.pruning().is_none() && self.teacher.is_none() {
            return None;
        }
        let reduced = self.without_pruned_units();
        let job = reduced.as_ref().unwrap_or(&self.job);
        let (backend, features) = (self.backend(), self.features());
        let spec = MicroBatchSpec { batch: 1, dtype: self.dtype, backend };
        // The trained model has no teacher in its loss.
        let loss = LossOptions { distill: None, features: Vec::new(), ..self.loss.clone() };
        let rules = ParamRules::of_job(job);
        let built = fused_network(&job.model, &loss, &rules, features, self.dtype, backend).ok()?;
        let model = PredictionCost::of(&built.network, &built.layout, features, spec);
        let teacher = self.teacher.as_ref().and_then(|teacher| {
            let network = teacher.network(features, backend).ok()?;
            let spec = MicroBatchSpec { dtype: network.dtype, ..spec };
            Some(PredictionCost::of(&network.network, &teacher.layout, features, spec))
        });
        Some(SmallerModel { model, teacher })
    }

    /// The weights that the run ends with, if the job prunes.
    pub fn pruned_model(&self) -> Option<PrunedModel> {
        let prune = self.job.pruning()?;
        let sparsity = prune.sparsity(self.total_steps);
        let weights = self.layout.params.pruned_len() as u64;
        let (params, stats) = exported_values(&self.layout);
        if let Some(reduced) = self.without_pruned_units() {
            let reductions = Reductions::of_job(&reduced);
            let layout = models::build_reduced(&reduced.model, self.features(), &reductions).ok()?.layout;
            let (params_left, stats_left) = exported_values(&layout);
            let (removed, all) = (params - params_left, params_left + stats_left);
            return Some(PrunedModel {
                weights,
                sparsity: removed as f64 / weights.max(1) as f64,
                bytes: 4 * all,
                compressed_bytes: optim::prune::compressed_bytes(all, 0.0),
                units: Some(self.removed_units(prune.structure, sparsity)),
            });
        }
        let all = params + stats;
        let compressed_bytes = optim::prune::compressed_bytes(weights, sparsity)
            + optim::prune::compressed_bytes(all - weights, 0.0);
        Some(PrunedModel { weights, sparsity, bytes: 4 * all, compressed_bytes, units: None })
    }

    /// The job of the model that the run ends with, if it prunes channels or heads.
    fn without_pruned_units(&self) -> Option<Job> {
        let prune = self.job.pruning().filter(|prune| prune.structure.has_units())?;
        let kept = optim::prune::kept_at(&self.layout.units, prune.sparsity(self.total_steps));
        Some(models::without_pruned(&self.job, kept))
    }

    fn removed_units(&self, structure: PruneStructure, sparsity: f64) -> RemovedUnits {
        let units: usize = self.layout.units.iter().map(|group| group.units).sum();
        let kept: usize = optim::prune::kept_at(&self.layout.units, sparsity).values().sum();
        RemovedUnits { structure, removed: (units - kept) as u64, units: units as u64 }
    }

    /// How many layers are factorized, and the number of parameters if none was; `None` without `[lowrank]`.
    pub fn factorized(&self) -> Option<(usize, u64)> {
        let layers = self.layout.matrices.iter().filter_map(|layer| Some((layer, layer.rank?)));
        let saved: Vec<usize> =
            layers.map(|(layer, rank)| layer.weight.len() - layer.factors_len(rank)).collect();
        let whole = self.num_parameters() + saved.iter().sum::<usize>() as u64;
        (!saved.is_empty()).then_some((saved.len(), whole))
    }

    /// Advice for a plan that fails only because of one large image.
    fn image_too_large(&self, plan: &MemoryPlan) -> Option<String> {
        let largest = self.large_images.largest().filter(|_| plan.verdict == PlanVerdict::DoesNotFit)?;
        let (needs, beyond) = (plan.peak.ram_bytes, largest.extra_bytes);
        (needs.saturating_sub(beyond) <= plan.budget.ram_bytes).then(|| {
            format!(
                "decoding `{}` takes {}: give the job `memory.ram = \"{}MiB\"`, or make the image a bad record with \
                 `data.max_pixels = {}`",
                largest.path.display(),
                Bytes(largest.bytes),
                needs.div_ceil(1 << 20),
                largest.pixels.saturating_sub(1)
            )
        })
    }

    /// Disk usage of the run with an optimizer of this kind.
    fn disk(&self, optimizer: OptimizerKind) -> Disk {
        let (job, params) = (&self.job, &self.layout.params);
        let state = optim::state_bytes(&job.optimizer.of_kind(optimizer), params);
        let averages = if job.train.ema.is_some() { 2 } else { 1 };
        let mask = if job.pruning().is_some() { optim::prune::mask_bytes(params) } else { 0 };
        let values = (averages * params.len + self.layout.stats.len) as u64 * 4 + mask;
        let checkpoint_bytes = values + state + self.attached_bytes() + NON_TENSOR_BYTES;
        let count = |every: Interval| match every {
            Interval::Steps(n) => self.total_steps / n,
            Interval::Epochs(n) => self.total_steps / n.saturating_mul(self.order.updates_per_epoch()).max(1),
            Interval::Minutes(_) => u64::MAX,
        };
        // A short run writes fewer checkpoints than it may keep.
        let written = count(job.checkpoint.every()).saturating_add(count(job.eval.every())).saturating_add(1);
        let checkpoints = (job.checkpoint.keep as u64 + 2).min(written);
        Disk {
            checkpoint_bytes,
            checkpoints,
            checkpoints_bytes: checkpoint_bytes.saturating_mul(checkpoints),
            data_cache_bytes: self.data_cache_bytes,
            stored_logits_bytes: self.stored_logits_bytes(),
        }
    }

    /// Bytes on disk of the teacher's logits, if they are stored.
    pub(super) fn stored_logits_bytes(&self) -> u64 {
        let samples = self.datasets.train.len();
        self.stored_logits.as_ref().map_or(0, |(format, _)| format.file_bytes(samples))
    }

    /// Keeps the optimizer of this kind, whose state a resumed run has.
    pub(super) fn keep_optimizer(&mut self, kind: OptimizerKind) {
        self.optimizer = self.job.optimizer.of_kind(kind);
        self.optimizer_is_fixed = true;
    }

    /// Ranks the blocks for recomputation, by bytes freed per FLOP.
    pub(super) fn rank_recompute_blocks(&mut self) {
        let spec = MicroBatchSpec { batch: 1, dtype: self.dtype, backend: self.backend() };
        let flops: Vec<u64> = self.network.blocks.iter().map(|block| flops(block, spec)).collect();
        let freed_bytes = self.estimator().freed_by_recompute();
        let ranks = recompute_ranks(&flops, &freed_bytes);
        for network in
            std::iter::once(&mut self.network).chain(self.bucket_networks.iter_mut().map(|s| &mut s.network))
        {
            network.blocks.iter_mut().zip(&ranks).for_each(|(block, rank)| block.recompute_rank = *rank);
        }
    }

    /// Predicts the memory of this job on this machine.
    pub fn estimator(&self) -> Estimator<'_> {
        self.estimator_for(&self.target_machine(self.ram, u64::MAX))
    }

    pub(super) fn estimator_for(&self, machine: &TargetMachine) -> Estimator<'_> {
        let backend = self.backend_on(machine);
        Estimator::new(EstimatorInputs {
            job: &self.job,
            optimizer: &self.optimizer,
            network: self.network_fused_for(backend),
            layout: &self.layout,
            features: self.features(),
            dtype: self.activation_dtype(backend),
            backend,
            resident_data: self.resident_data_bytes(),
            process: self.process,
            workers: self.workers,
            updates: self.total_steps,
            update_samples: self.update_samples(),
            valid_samples: self.datasets.valid.len(),
            eval_outputs: self.metrics.needs_outputs(),
            eval_metric_bytes: self.metrics.bytes,
            teacher_bytes: self.teacher.as_ref().map_or(0, |teacher| teacher.bytes(backend)),
            stored_logits: self.stored_logits.as_ref().map(|(format, _)| *format),
            train_samples: self.datasets.train.len(),
        })
    }

    /// The network as this backend runs it. A plan for another device walks the network as it is fused there.
    fn network_fused_for(&self, backend: Backend) -> &Network {
        if backend.on_gpu() == self.backend().on_gpu() {
            return &self.network;
        }
        self.network_for_other_device.get_or_init(|| {
            let mut network = self.network_on(backend, self.features());
            let ranks = self.network.blocks.iter().map(|block| block.recompute_rank);
            network.blocks.iter_mut().zip(ranks).for_each(|(block, rank)| block.recompute_rank = rank);
            network
        })
    }

    /// A line for every node that the fusion pass makes on this machine.
    pub fn fused_nodes_on(&self, machine: &TargetMachine) -> Vec<String> {
        let network = self.network_fused_for(self.backend_on(machine));
        network.fused_nodes().iter().map(|node| node.describe()).collect()
    }

    /// A line for every block of the model, and for every block of its teacher, if one computes in every step.
    pub fn feature_blocks(&self) -> Option<[Vec<String>; 2]> {
        let teacher = self.network.teacher.as_ref().filter(|teacher| teacher.every_step)?;
        let line = |block: &LayerBlock| format!("{} {:?}", block.name, block.output_shape());
        Some([&self.network, &teacher.network].map(|network| network.blocks.iter().map(line).collect()))
    }

    pub(super) fn plan_request(&self, machine: &TargetMachine) -> PlanRequest {
        let train = &self.job.train;
        let eight_bit = self.optimizer.eight_bit().filter(|_| !self.optimizer_is_fixed);
        PlanRequest {
            device: machine.device.clone(),
            ram: machine.ram,
            vram: machine.vram,
            max_ram: machine.max_ram,
            context_bytes: machine.context_bytes,
            split: BatchSplit { micro_batch: train.batch_size, accumulation_steps: train.accumulation_steps },
            samples_per_update: train.samples_per_update(),
            micro_batch_multiple: self.network.micro_batch_multiple(),
            optimizer: self.optimizer.kind(),
            optimizer_8bit: eight_bit.map(|rule| rule.kind()),
            eval_micro_batch: self.job.eval.batch_size,
            prefetch: self.prefetch,
            allowed: self.job.memory.on_oom.clone(),
            offloads: match optim::offload::is_supported(&self.optimizer) {
                true => vec![Offload::OptimizerState, Offload::Activations],
                false => vec![Offload::Activations],
            },
            include_alternatives: false,
            cost: self.cost_model(machine),
        }
    }

    fn cost_model(&self, machine: &TargetMachine) -> CostModel {
        let on_device = machine.on_device();
        let (speed, cores) = if on_device { (GPU, 1) } else { (CPU_CORE, self.threads) };
        let samples = self.job.train.samples_per_update().min(self.datasets.train.len() as usize);
        let spec = MicroBatchSpec {
            batch: samples,
            dtype: self.activation_dtype(self.backend_on(machine)),
            backend: self.backend_on(machine),
        };
        let seconds = |flops: u64| flops as f64 / (speed.flops * cores as f64);
        let mut blocks: Vec<&LayerBlock> = self.network.blocks.iter().collect();
        blocks.sort_by_key(|block| block.recompute_rank);
        let params = &self.layout.params;
        let state = optim::state_bytes(&self.optimizer, params);
        let transfer_seconds = |bytes: u64| bytes as f64 / PCIE_BANDWIDTH;
        // An update reads and writes weights, gradients and optimizer state.
        let bytes_touched = 2 * (8 * params.trained_len as u64 + state);
        let update = bytes_touched as f64 / (speed.memory_bandwidth * cores as f64);
        let (update_8bit, state_8bit) = match self.optimizer.eight_bit() {
            Some(rule) => (UPDATE_8BIT_SLOWDOWN * update, optim::state_bytes(&rule, params)),
            None => (update, state),
        };
        CostModel {
            block_forward: blocks.into_iter().map(|block| seconds(flops(block, spec))).collect(),
            loss_forward: seconds(self.network.loss.cost(spec).flops),
            micro_batch_overhead: 3.0 * speed.layer_overhead * self.network.layers().len() as f64,
            update,
            update_8bit,
            state_transfer: transfer_seconds(state),
            state_transfer_8bit: transfer_seconds(state_8bit),
            host_bandwidth: PCIE_BANDWIDTH,
            samples: samples as f64,
        }
    }

    /// What a run of this job may change when memory is short.
    pub(super) fn shrink_limits(&self) -> ShrinkLimits {
        let spec = MicroBatchSpec { batch: 1, dtype: self.dtype, backend: self.backend() };
        ShrinkLimits {
            may_shrink: self.allows(OomAction::Shrink),
            may_recompute: self.allows(OomAction::Recompute),
            blocks: self.network.blocks_with_backward(spec),
            samples_per_update: self.job.train.samples_per_update(),
            micro_batch_multiple: self.network.micro_batch_multiple(),
        }
    }

    /// Estimated peak bytes of a run under this plan, on the compute device. What comes before the first update is
    /// over.
    pub(super) fn peak_bytes(&self, plan: ExecutionPlan) -> u64 {
        self.highest(plan, |phase| !matches!(phase, Phase::Preparation | Phase::Teacher))
    }

    /// As [`peak_bytes`](Self::peak_bytes), in these phases alone.
    pub(super) fn peak_bytes_in(&self, plan: ExecutionPlan, phases: &[Phase]) -> u64 {
        self.highest(plan, |phase| phases.contains(&phase))
    }

    fn highest(&self, plan: ExecutionPlan, counts: impl Fn(Phase) -> bool) -> u64 {
        let space = if self.gpu.is_some() { MemorySpace::Vram } else { MemorySpace::Ram };
        let phases = self.estimator().estimate(plan).phases.into_iter().filter(|phase| counts(phase.name));
        phases.map(|phase| phase.bytes_in(space)).max().unwrap_or(0)
    }

    /// The plan with the lowest peak that the job allows, with the optimizer and offload of `current`, and that peak in
    /// bytes.
    pub(super) fn leanest_plan(&self, current: ExecutionPlan) -> (ExecutionPlan, u64) {
        let limits = self.shrink_limits();
        let steps = match limits.may_shrink {
            true => limits.samples_per_update,
            false => self.job.train.accumulation_steps,
        };
        let split = search::split(limits.samples_per_update, steps, limits.micro_batch_multiple);
        let plan = |recompute| {
            let plan =
                ExecutionPlan { recompute, eval_micro_batch: 1, prefetch: 0, ..current.with_split(split) };
            (plan, self.peak_bytes(plan))
        };
        let (saved, recomputed) = (plan(0), plan(if limits.may_recompute { limits.blocks } else { 0 }));
        if recomputed.1 < saved.1 { recomputed } else { saved }
    }

    /// Whether the job permits this action when memory is short.
    pub fn allows(&self, action: OomAction) -> bool {
        self.job.memory.on_oom.contains(&action)
    }
}

/// Parameters and statistics of an export, as numbers of values: the maps to a teacher's features and the ranges of
/// activations are no part of it.
fn exported_values(layout: &ParamLayout) -> (u64, u64) {
    let params = layout.params.iter().filter(|(spec, _)| !spec.name.starts_with(FEATURE_MAPS));
    let stats = layout.stats.iter().filter(|(spec, _)| !spec.is_activation_range());
    (params.map(|(_, range)| range.len() as u64).sum(), stats.map(|(_, range)| range.len() as u64).sum())
}

/// FLOPs of a block's forward pass.
fn flops(block: &LayerBlock, spec: MicroBatchSpec) -> u64 {
    block.layers().iter().map(|layer| layer.cost(spec).flops).sum()
}
