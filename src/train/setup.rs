//! From a job to everything a run needs but the tensors: data opened, network built, memory planned.

use candle_core::DType;

use super::Failure;
use super::sets::Sets;
use crate::data::order::Order;
use crate::data::{Opening, loader};
use crate::features::Features;
use crate::job::{Job, Length, Optimizer, Precision};
use crate::layers::network::Network;
use crate::models::ModelError;
use crate::params::Layout;
use crate::units::{Bytes, Size};

/// A job made ready.
pub struct Setup {
    pub job: Job,
    pub sets: Sets,
    pub network: Network,
    /// Where samples are padded: the same network for shorter ones, ascending.
    pub shorter: Vec<Shorter>,
    pub layout: Layout,
    pub order: Order,
    /// Updates of the whole run.
    pub total_steps: u64,
    pub dtype: DType,
    pub workers: usize,
    /// Bytes the loader may hold.
    pub prefetch: u64,
    pub threads: usize,
    /// Host bytes the run may use.
    pub ram: u64,
    /// The optimizer in force: the job's, or the same with its state in bytes where the plan took that rung.
    pub optimizer: Optimizer,
    /// A run that goes on keeps the optimizer it has state of.
    pub(super) optimizer_is_fixed: bool,
}

/// A network for padded samples that are shorter than the longest; its parameters are those of the whole one.
pub struct Shorter {
    /// Of a sample that is cut to this length.
    pub features: Features,
    pub network: Network,
}

impl Setup {
    /// `ram` is the host budget in bytes.
    pub fn new(job: Job, ram: u64) -> Result<Self, Failure> {
        Self::open(job, ram, &Opening::default())
    }

    /// As [`Setup::new`], with the means to open data of `opening` (its `max_bytes` and `seed` are set here).
    pub fn open(job: Job, ram: u64, opening: &Opening) -> Result<Self, Failure> {
        let opening = Opening { max_bytes: ram, seed: job.seed, ..opening.clone() };
        let sets = Sets::open(&job, &opening)?;
        let built = crate::models::build(&job.model, sets.train.features())?;
        let shorter = sets.train.features().shorter().map(|features| {
            let network = crate::models::build(&job.model, &features)?.network;
            Ok(Shorter { features, network })
        });
        let shorter = shorter.collect::<Result<Vec<_>, ModelError>>()?;
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
        let (prefetch, dtype) = (prefetch(&job, ram), dtype(job.train.precision, false));
        let mut setup = Self {
            optimizer: job.optimizer.clone(),
            optimizer_is_fixed: false,
            ram,
            job,
            sets,
            network: built.network,
            shorter,
            layout: built.layout,
            order,
            total_steps,
            dtype,
            workers,
            prefetch,
            threads,
        };
        setup.rank_blocks();
        Ok(setup)
    }

    pub fn features(&self) -> &Features {
        self.sets.train.features()
    }

    /// What a micro-batch whose longest sample has so many positions is run with.
    pub fn fitting(&self, longest: usize) -> (&Features, &Network) {
        let shorter = self.shorter.iter().find(|shorter| longest <= shorter.features.input_len());
        shorter.map_or((self.features(), &self.network), |shorter| (&shorter.features, &shorter.network))
    }

    pub fn parameters(&self) -> u64 {
        self.layout.params.len as u64
    }

    /// Bytes the loader holds for micro-batches of this size.
    pub fn pipeline(&self, micro_batch: usize) -> u64 {
        loader::holds(self.features(), micro_batch, self.prefetch, self.workers)
    }
}

/// Bytes the loader may hold within so many host bytes.
pub(super) fn prefetch(job: &Job, ram: u64) -> u64 {
    match job.data.loading.prefetch {
        // A tenth of the budget is more than enough for every set whose samples are small.
        Size::Auto => (ram / 10).min(256 << 20),
        size => size.of(Bytes(ram)).0,
    }
}

/// The type of activations, on the host or on a device.
pub(super) fn dtype(precision: Precision, on_device: bool) -> DType {
    match precision {
        Precision::Auto if on_device => DType::BF16,
        Precision::Auto | Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
        Precision::F16 => DType::F16,
    }
}
