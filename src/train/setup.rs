//! From a job to everything a run needs but the tensors: data opened, network built, memory planned.

use std::sync::Arc;

use candle_core::{DType, Device};

use super::Failure;
use super::sets::Sets;
use crate::data::bad::OnBad;
use crate::data::loader::Reading;
use crate::data::order::Order;
use crate::data::picture::Large;
use crate::data::{Opening, loader, stream};
use crate::features::Features;
use crate::job::{Job, Length, Loading, OnBadRecord, Optimizer, Precision};
use crate::layers::On;
use crate::layers::network::Network;
use crate::memory::budget::Machine;
use crate::memory::card::Card;
use crate::memory::measure;
use crate::memory::plan::Offload;
use crate::memory::process::{Process, Work};
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
    /// The order in which the validation set is judged: its own.
    pub valid_order: Order,
    /// Updates of the whole run.
    pub total_steps: u64,
    pub dtype: DType,
    pub workers: usize,
    /// Bytes the loader may hold.
    pub prefetch: u64,
    pub threads: usize,
    /// Host bytes the run may use.
    pub ram: u64,
    /// The card that computes, if it is not the CPU.
    pub card: Option<Arc<Card>>,
    /// The optimizer in force: the job's, or the same with its state in bytes where the plan took that rung.
    pub optimizer: Optimizer,
    /// A run that goes on keeps the optimizer it has state of.
    pub(super) optimizer_is_fixed: bool,
    /// Bytes of the tokenizer that checkpoints keep, and of what the data has in the cache.
    pub(super) tokenizer_bytes: u64,
    pub(super) data_cache_bytes: u64,
    /// What waits in host memory, where the plan took that rung.
    pub offload: &'static [Offload],
    /// Pictures that are decoded one at a time because of their size.
    pub large: Arc<Large>,
    /// Heap bytes that opening the data took and did not give back.
    pub(super) opened: u64,
    /// What this process takes beside its heap; nothing until it is measured.
    pub process: Process,
}

/// A network for padded samples that are shorter than the longest; its parameters are those of the whole one.
pub struct Shorter {
    /// Of a sample that is cut to this length.
    pub features: Features,
    pub network: Network,
}

impl Setup {
    /// Where layers compute.
    pub fn on(&self) -> On {
        match &self.card {
            Some(card) => On::Cuda { capability: card.capability },
            None => On::Cpu { threads: self.threads },
        }
    }

    /// Where tensors are.
    pub fn device(&self) -> Device {
        self.card.as_ref().map_or(Device::Cpu, |card| card.device.clone())
    }

    /// The same job where this card computes.
    pub fn on_card(mut self, card: Option<Arc<Card>>) -> Self {
        self.dtype = dtype(self.job.train.precision, card.is_some());
        #[cfg(feature = "cuda")]
        crate::kernels::cuda::product::allow_tf32(self.job.train.tf32);
        self.card = card;
        self.rank_blocks();
        self
    }

    /// This machine, with so many host bytes.
    pub fn machine(&self, ram: u64, most_ram: u64) -> Machine {
        let cpu = Machine::cpu(ram, most_ram);
        match &self.card {
            Some(card) => {
                let device = format!("cuda:{}", card.ordinal);
                Machine {
                    device,
                    vram: card.limit,
                    context: card.context,
                    capability: card.capability,
                    ..cpu
                }
            }
            None => cpu,
        }
    }

    /// `ram` is the host budget in bytes.
    pub fn new(job: Job, ram: u64) -> Result<Self, Failure> {
        Self::open(job, ram, &Opening::default())
    }

    /// As [`Setup::new`], with the means to open data of `opening` (its `max_bytes`, `seed` and `shuffle_buffer` are set here).
    pub fn open(job: Job, ram: u64, opening: &Opening) -> Result<Self, Failure> {
        let (seed, shuffle_buffer) = (job.seed, shuffle_buffer(&job));
        let opening = Opening { max_bytes: ram, seed, shuffle_buffer, ..opening.clone() };
        let before = measure::live();
        let sets = Sets::open(&job, &opening)?;
        let opened = measure::live().saturating_sub(before);
        let setup = Self::with(sets, job, ram)?;
        let data_cache_bytes = opening.cache.used_bytes();
        Ok(Self { opened, data_cache_bytes, large: opening.large, ..setup })
    }

    /// As [`Setup::new`], with sets that are open already.
    pub fn with(sets: Sets, job: Job, ram: u64) -> Result<Self, Failure> {
        let shuffle_buffer = shuffle_buffer(&job);
        let built = crate::models::build(&job.model, sets.train.features())?;
        let shorter = sets.train.features().shorter().map(|features| {
            let network = crate::models::build(&job.model, &features)?.network;
            Ok(Shorter { features, network })
        });
        let shorter = shorter.collect::<Result<Vec<_>, ModelError>>()?;
        let samples = job.train.samples_per_update() as u64;
        let shuffle = job.data.loading.shuffle;
        let order = Order::of(sets.train.as_ref(), samples, job.seed, shuffle, shuffle_buffer)?;
        let (valid, buffer) = (sets.valid.as_ref(), shuffle_buffer.min(stream::IN_ORDER));
        let valid_order = Order::of(valid, valid.len(), job.seed, false, buffer)?;
        let total_steps = match job.train.length() {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => epochs.saturating_mul(order.updates_per_epoch()),
        };
        let threads = rayon::current_num_threads();
        let workers = match job.data.loading.workers {
            0 => threads,
            workers => workers,
        };
        let prefetch = prefetch(&job, sets.train.features(), ram);
        let dtype = dtype(job.train.precision, false);
        let mut setup = Self {
            optimizer: job.optimizer.clone(),
            optimizer_is_fixed: false,
            offload: &[],
            tokenizer_bytes: sets.train.tokenizer().map_or(0, |text| text.len() as u64),
            data_cache_bytes: 0,
            large: Arc::default(),
            opened: 0,
            process: Process::default(),
            ram,
            card: None,
            job,
            sets,
            network: built.network,
            shorter,
            layout: built.layout,
            order,
            valid_order,
            total_steps,
            dtype,
            workers,
            prefetch,
            threads,
        };
        setup.rank_blocks();
        Ok(setup)
    }

    /// Gives back what preparing the data left behind, and measures what this process takes beside its heap.
    pub fn measured(mut self) -> Self {
        let left_behind = self.opened.saturating_sub(self.resident_data());
        self.process = Process::measure(self.threads, self.workers, left_behind);
        self
    }

    /// Before a piece of work: keeps resident memory within the plan. With a GPU most of what is resident is the driver's
    /// and its libraries' code, which runs in every step: to drop it would cost milliseconds each time.
    pub(super) fn keep_within_plan(&self, work: Work) {
        if self.card.is_none() {
            self.process.keep_within(measure::planned() + self.process.beside_heap, work);
        }
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

    /// Bytes that the sets and their orders keep for as long as they live.
    pub fn resident_data(&self) -> u64 {
        let sets = self.sets.train.resident_bytes() + self.sets.valid.resident_bytes();
        sets + self.large.bytes() + self.order.resident_bytes() + self.valid_order.resident_bytes()
    }

    /// How samples are read in micro-batches of this size, within so many bytes.
    pub fn reading(&self, micro_batch: usize, limit: u64) -> Reading {
        Reading {
            micro_batch,
            limit,
            workers: self.workers,
            skip_bad: on_bad(&self.job.data.loading).skips(),
        }
    }

    /// Bytes the loader holds for micro-batches of this size.
    pub fn pipeline(&self, micro_batch: usize) -> u64 {
        loader::holds(self.features(), micro_batch, self.prefetch, self.workers)
    }
}

/// Micro-batches that the loader may hold however large they are: fewer would make those who fill them wait for one
/// another.
const AHEAD: u64 = 4;

/// Bytes the loader may hold within so many host bytes.
pub(super) fn prefetch(job: &Job, features: &Features, ram: u64) -> u64 {
    match job.data.loading.prefetch {
        // A tenth of the budget is more than enough for every set whose samples are small.
        Size::Auto => {
            let some = features.sample_bytes().saturating_mul(AHEAD * job.train.batch_size as u64);
            (ram / 10).min(some.max(256 << 20))
        }
        size => size.of(Bytes(ram)).0,
    }
}

/// Bytes within which sets that are read forward are mixed.
fn shuffle_buffer(job: &Job) -> u64 {
    // A job states a size, not a share, so that the order is the same whatever memory there is.
    job.data.loading.shuffle_buffer.of(Bytes(0)).0
}

/// What happens to records that cannot be used.
pub(super) fn on_bad(loading: &Loading) -> OnBad {
    match loading.on_bad_record {
        OnBadRecord::Fail => OnBad::Fail,
        OnBadRecord::Skip => OnBad::Skip { most: loading.max_bad_records },
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
