//! The memory plan of a job made ready: what the ladder is given, and what a run takes over from it.

use super::setup::{Setup, dtype, prefetch};
use crate::data::loader;
use crate::job::{Every, Rung};
use crate::layers::network::Block;
use crate::layers::{At, On};
use crate::memory::budget::Machine;
use crate::memory::estimate::{Estimator, Subject, ranks};
use crate::memory::ladder;
use crate::memory::plan::{Disk, Offload, Plan, Split, Verdict};
use crate::memory::probe;
use crate::memory::search::{OFFLOADS, Request};
use crate::memory::time::Times;
use crate::optim;
use crate::units::Bytes;

/// What the ladder compares ways of running with. The ratios matter, not their truth: a layer's fixed cost
/// against its operations, recomputation against micro-batches, moving against computing.
struct Speed {
    /// Floating-point operations in a second.
    flops: f64,
    /// Seconds a layer costs whatever its size.
    layer: f64,
    /// Bytes an update reads and writes in a second.
    memory: f64,
}

/// A core of a CPU, and the whole of a card.
const CORE: Speed = Speed { flops: 5e10, layer: 2e-5, memory: 5e9 };
const CARD: Speed = Speed { flops: 1e14, layer: 1e-5, memory: 1e12 };

/// Bytes a second between a card and its host: what PCI Express 3.0 with 16 lanes reaches.
const LINK: f64 = 12e9;

/// Bytes of a checkpoint that are not tensors, at most: its state and the headers of its files.
const BESIDE_TENSORS: u64 = 128 << 10;

/// How much longer an update takes whose state is in bytes.
const EIGHT_BIT: f64 = 2.0;

impl Setup {
    /// The memory plan on this machine, within `ram` bytes of the host. Allocates no tensor.
    pub fn plan(&self, ram: u64) -> Plan {
        self.plan_for(&self.machine(ram, probe::host().map_or(u64::MAX, |host| host.for_process())))
    }

    /// The memory plan on a machine that need not be here.
    pub fn plan_for(&self, machine: &Machine) -> Plan {
        let request = self.request(machine);
        let mut plan =
            self.with_subject_on(machine, |subject| ladder::plan(&request, &Estimator::new(*subject)));
        if let Some(image) = self.image_too_large(&plan) {
            plan.advice = Some(image);
        }
        Plan { disk: self.disk(&plan.chosen.optimizer), ..plan }
    }

    /// What to do where it is one image that does not fit.
    fn image_too_large(&self, plan: &Plan) -> Option<String> {
        let largest = self.large.largest().filter(|_| plan.verdict == Verdict::DoesNotFit)?;
        let (needs, beyond) = (plan.peak.ram_bytes, largest.beyond);
        (needs.saturating_sub(beyond) <= plan.budget.ram_bytes).then(|| {
            format!(
                "decoding `{}` takes {}: give the job `memory.ram = \"{}MiB\"`, or make the image a bad record with \
                 `data.max_pixels = {}`",
                largest.picture.display(),
                Bytes(largest.bytes),
                needs.div_ceil(1 << 20),
                largest.pixels.saturating_sub(1)
            )
        })
    }

    /// What the run keeps on disk, with an optimizer of this kind.
    fn disk(&self, optimizer: &str) -> Disk {
        let (job, params) = (&self.job, &self.layout.params);
        let eight_bit = job.optimizer.eight_bit().filter(|rule| rule.kind() == optimizer);
        let state = optim::state_bytes(eight_bit.as_ref().unwrap_or(&job.optimizer), params);
        let averages = if job.train.ema.is_some() { 2 } else { 1 };
        let values = (averages * params.len + self.layout.stats.len) as u64 * 4;
        let checkpoint_bytes = values + state + self.tokenizer_bytes + BESIDE_TENSORS;
        let times = |every: Every| match every {
            Every::Steps(n) => self.total_steps / n,
            Every::Epochs(n) => self.total_steps / n.saturating_mul(self.order.updates_per_epoch()).max(1),
            Every::Minutes(_) => u64::MAX,
        };
        // A short run makes fewer than may be kept.
        let made = times(job.checkpoint.every()).saturating_add(times(job.eval.every())).saturating_add(1);
        let checkpoints = (job.checkpoint.keep as u64 + 2).min(made);
        Disk {
            checkpoint_bytes,
            checkpoints,
            checkpoints_bytes: checkpoint_bytes.saturating_mul(checkpoints),
            data_cache_bytes: self.data_cache_bytes,
        }
    }

    /// Plans, and takes over the optimizer and what is offloaded as chosen. A run that goes on keeps the one it has state of:
    /// `before` is the optimizer's kind.
    pub fn settle(&mut self, ram: u64, before: Option<&str>) -> Plan {
        if let Some(kind) = before {
            self.take_optimizer(kind);
            self.optimizer_is_fixed = true;
        }
        let plan = self.plan(ram);
        self.take_optimizer(&plan.chosen.optimizer);
        self.offload = OFFLOADS.into_iter().find(|all| *all == plan.chosen.offload).unwrap_or_default();
        plan
    }

    /// Puts the optimizer of this kind in force: the job's own, or the one with its state in bytes.
    pub(super) fn take_optimizer(&mut self, kind: &str) {
        let stated = &self.job.optimizer;
        match stated.eight_bit().filter(|rule| rule.kind() == kind) {
            Some(rule) => self.optimizer = rule,
            None => self.optimizer = stated.clone(),
        }
    }

    /// Decides in which order blocks are recomputed.
    pub(super) fn rank_blocks(&mut self) {
        let at = At { batch: 1, dtype: self.dtype, on: self.on() };
        let flops: Vec<u64> = self.network.blocks.iter().map(|block| flops(block, at)).collect();
        let freed = self.with_subject(|subject| Estimator::new(*subject).freed());
        let ranks = ranks(&flops, &freed);
        for network in
            std::iter::once(&mut self.network).chain(self.shorter.iter_mut().map(|s| &mut s.network))
        {
            network.blocks.iter_mut().zip(&ranks).for_each(|(block, rank)| block.rank = *rank);
        }
    }

    /// Lends `body` the job as the memory estimate sees it, on this machine.
    pub fn with_subject<R>(&self, body: impl FnOnce(&Subject) -> R) -> R {
        self.with_subject_on(&self.machine(self.ram, u64::MAX), body)
    }

    pub(super) fn with_subject_on<R>(&self, machine: &Machine, body: impl FnOnce(&Subject) -> R) -> R {
        // What the run will hold, and what it would hold had it been given another budget.
        let pipeline = |micro_batch, ram| {
            let limit =
                if ram == machine.ram { self.prefetch } else { prefetch(&self.job, self.features(), ram) };
            loader::holds(self.features(), micro_batch, limit, self.workers)
        };
        let (rule, params) = (&self.optimizer, &self.layout.params);
        let on_device = machine.on_device();
        let on = if on_device { On::Cuda { capability: machine.capability } } else { self.on() };
        body(&Subject {
            network: &self.network,
            layout: &self.layout,
            features: self.features(),
            dtype: dtype(self.job.train.precision, on_device),
            on,
            optimizer_state: optim::state_bytes(rule, params),
            optimizer_state_8bit: rule.eight_bit().map_or(0, |rule| optim::state_bytes(&rule, params)),
            state_window: optim::window_bytes(rule, params),
            update_workspace: optim::workspace_bytes(rule, params, on),
            average: self.job.train.ema.is_some(),
            resident_data: self.resident_data(),
            process: self.process,
            ram: machine.ram,
            pipeline: &pipeline,
            update_samples: self.sets.train.len().min(self.job.train.samples_per_update() as u64),
            valid_samples: self.sets.valid.len(),
        })
    }

    pub(super) fn request(&self, machine: &Machine) -> Request {
        let train = &self.job.train;
        let eight_bit = self.optimizer.eight_bit().filter(|_| !self.optimizer_is_fixed);
        Request {
            device: machine.device.clone(),
            ram: machine.ram,
            vram: machine.vram,
            most_ram: machine.most_ram,
            context: machine.context,
            split: Split { micro_batch: train.batch_size, accumulation_steps: train.accumulation_steps },
            samples_per_update: train.samples_per_update(),
            group: self.network.group(),
            optimizer: self.optimizer.kind().into(),
            optimizer_8bit: eight_bit.map(|rule| rule.kind().into()),
            eval_micro_batch: self.job.eval.batch_size,
            may: self.job.memory.on_oom.clone(),
            offloads: match optim::away::can(&self.optimizer) {
                true => vec![Offload::OptimizerState, Offload::Activations],
                false => vec![Offload::Activations],
            },
            more: false,
            times: self.times(machine),
        }
    }

    fn times(&self, machine: &Machine) -> Times {
        let on_device = machine.on_device();
        let (speed, cores) = if on_device { (CARD, 1) } else { (CORE, self.threads) };
        let samples = self.job.train.samples_per_update().min(self.sets.train.len() as usize);
        let on = if on_device { On::Cuda { capability: machine.capability } } else { self.on() };
        let at = At { batch: samples, dtype: dtype(self.job.train.precision, on_device), on };
        let seconds = |flops: u64| flops as f64 / (speed.flops * cores as f64);
        let mut blocks: Vec<&Block> = self.network.blocks.iter().collect();
        blocks.sort_by_key(|block| block.rank);
        let params = &self.layout.params;
        let state = optim::state_bytes(&self.optimizer, params);
        let state_8bit = self.optimizer.eight_bit().map_or(0, |rule| optim::state_bytes(&rule, params));
        let moved = |bytes: u64| bytes as f64 / LINK;
        // Weights and gradients are read and written, and so is the state.
        let touched = 2 * (8 * params.len as u64 + state);
        let update = touched as f64 / (speed.memory * cores as f64);
        Times {
            blocks: blocks.into_iter().map(|block| seconds(flops(block, at))).collect(),
            loss: seconds(self.network.loss.cost(at).flops),
            micro_batch: 3.0 * speed.layer * self.network.layers().len() as f64,
            update,
            update_8bit: EIGHT_BIT * update,
            state: moved(state),
            state_8bit: moved(state_8bit),
            link: LINK,
            samples: samples as f64,
        }
    }

    /// Whether the job allows this when memory is short.
    pub fn may(&self, rung: Rung) -> bool {
        self.job.memory.on_oom.contains(&rung)
    }
}

/// Operations of a block's forward pass.
fn flops(block: &Block, at: At) -> u64 {
    block.layers().iter().map(|layer| layer.cost(at).flops).sum()
}
