//! From a job to everything a run needs but the tensors: data opened, network built, memory planned.

use std::sync::Arc;

use candle_core::DType;

use super::Failure;
use crate::data::order::Order;
use crate::data::shapes::{Part, Shapes};
use crate::data::{Source, loader};
use crate::features::Features;
use crate::job::{self, Job, Length, Precision, Rung};
use crate::layers::At;
use crate::layers::network::{Block, Network};
use crate::memory::estimate::{Estimate, Subject};
use crate::memory::ladder::{self, Request};
use crate::memory::plan::{Plan, Split};
use crate::optim;
use crate::params::Layout;

/// Floating-point operations a core does in a second, and seconds a layer costs whatever its size: what
/// the ladder compares ways of running with. Their ratio matters, not their truth.
const CORE_FLOPS: f64 = 5e10;
const LAYER_S: f64 = 2e-5;

/// The training and the validation set.
pub struct Sets {
    pub train: Arc<dyn Source>,
    pub valid: Arc<dyn Source>,
}

impl Sets {
    pub fn open(job: &Job) -> Result<Self, Failure> {
        match &job.data.source {
            job::Source::Shapes(s) => {
                let part = |samples: usize, part| Shapes::new(s.image_size, samples as u64, job.seed, part);
                Ok(Self {
                    train: Arc::new(part(s.train_samples, Part::Train)?),
                    valid: Arc::new(part(s.valid_samples, Part::Valid)?),
                })
            }
        }
    }
}

/// A job made ready.
pub struct Setup {
    pub job: Job,
    pub sets: Sets,
    pub network: Network,
    pub layout: Layout,
    pub order: Order,
    /// Updates of the whole run.
    pub total_steps: u64,
    pub dtype: DType,
    pub workers: usize,
    /// Bytes the loader may hold.
    pub prefetch: u64,
    pub threads: usize,
}

impl Setup {
    /// `ram` is the host budget in bytes.
    pub fn new(job: Job, ram: u64) -> Result<Self, Failure> {
        let sets = Sets::open(&job)?;
        let built = crate::models::build(&job.model, sets.train.features())?;
        let samples = job.train.samples_per_update() as u64;
        let order = Order::new(sets.train.len(), samples, job.seed, job.data.loading.shuffle)?;
        let total_steps = match job.train.length() {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs.saturating_mul(order.updates_per_epoch()),
        };
        let threads = rayon::current_num_threads();
        let workers = match job.data.loading.workers {
            0 => threads,
            workers => workers,
        };
        // A tenth of the budget is more than enough for every set whose samples are small.
        let prefetch = match job.data.loading.prefetch {
            crate::units::Size::Auto => (ram / 10).min(256 << 20),
            size => size.of(crate::units::Bytes(ram)).0,
        };
        let dtype = match job.train.precision {
            Precision::Auto | Precision::F32 => DType::F32,
        };
        Ok(Self {
            job,
            sets,
            network: built.network,
            layout: built.layout,
            order,
            total_steps,
            dtype,
            workers,
            prefetch,
            threads,
        })
    }

    pub fn features(&self) -> &Features {
        self.sets.train.features()
    }

    pub fn parameters(&self) -> u64 {
        self.layout.params.len as u64
    }

    /// Whether the job allows this when memory is short.
    pub fn may(&self, rung: Rung) -> bool {
        self.job.memory.on_oom.contains(&rung)
    }

    /// Bytes the loader holds for micro-batches of this size.
    pub fn pipeline(&self, micro_batch: usize) -> u64 {
        loader::holds(self.features(), micro_batch, self.prefetch, self.workers)
    }

    /// Lends `body` the job as the memory estimate sees it.
    pub fn with_subject<R>(&self, body: impl FnOnce(&Subject) -> R) -> R {
        let pipeline = |micro_batch| self.pipeline(micro_batch);
        body(&Subject {
            network: &self.network,
            layout: &self.layout,
            features: self.features(),
            dtype: self.dtype,
            threads: self.threads,
            optimizer_state: optim::state_bytes(&self.job.optimizer, &self.layout.params),
            resident_data: self.sets.train.resident_bytes() + self.sets.valid.resident_bytes(),
            pipeline: &pipeline,
            train_samples: self.sets.train.len(),
            valid_samples: self.sets.valid.len(),
        })
    }

    /// The memory plan within `ram` bytes. Touches no device and allocates no tensor.
    pub fn plan(&self, ram: u64) -> Plan {
        let train = &self.job.train;
        let samples = train.samples_per_update().min(self.sets.train.len() as usize);
        let at = At { batch: samples, dtype: self.dtype, threads: self.threads };
        let seconds = |block: &Block| {
            let flops: u64 = block.layers().iter().map(|layer| layer.cost(at).flops).sum();
            flops as f64 / (CORE_FLOPS * self.threads as f64)
        };
        let request = Request {
            device: "cpu".into(),
            ram,
            vram: 0,
            split: Split { micro_batch: train.batch_size, accumulation_steps: train.accumulation_steps },
            samples_per_update: train.samples_per_update(),
            group: self.network.group(),
            optimizer: self.job.optimizer.kind().into(),
            eval_micro_batch: self.job.eval.batch_size,
            may_shrink: self.may(Rung::Shrink),
            may_recompute: self.may(Rung::Recompute),
            forward_s: self.network.blocks.iter().map(seconds).collect(),
            overhead_s: 3.0 * LAYER_S * self.network.layers().len() as f64,
        };
        self.with_subject(|subject| ladder::plan(&request, &|way| Estimate::new(subject, way)))
    }
}
