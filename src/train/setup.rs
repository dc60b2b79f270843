//! Prepares a job: opens the data, builds the network and plans the memory. Allocates no tensors.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use candle_core::{DType, Device};

use super::Failure;
use super::datasets::{self, tables};
use super::initial_weights::InitialWeights;
use super::low_rank;
use super::teacher::Teacher;
use super::validation_metrics::RequestedMetrics;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::base::units::Bytes;
use crate::base::{Backend, MicroBatchSpec};
use crate::data::bad_records::BadRecordPolicy;
use crate::data::loader::LoaderOptions;
use crate::data::order::Order;
use crate::data::preprocessing::Preprocessing;
use crate::data::stored_logits::LogitFormat;
use crate::data::transforms::LargeImages;
use crate::data::{Dataset, DatasetContext, Datasets, loader, streaming};
use crate::graph::network::Network;
use crate::job::{
    ClassWeightsConfig, ClassWeightsRule, Job, LoaderConfig, LogitSource, ModelConfig, OnBadRecord,
    OptimizerConfig, Precision, RunLength, TrainConfig,
};
use crate::kernels::matmul;
use crate::layers::distillation::DistillOptions;
use crate::memory::gpu::GpuDevice;
use crate::memory::measure;
use crate::memory::process::{ProcessMemory, ThreadStacks};
use crate::metrics::task::TargetScale;
use crate::models::{BuiltModel, LossOptions, ModelError};
use crate::params::{ParamLayout, ParamRules};
use crate::planner::ExecutionPlan;
use crate::planner::budget::{self, TargetMachine};

/// A prepared job.
pub struct Setup {
    pub job: Job,
    /// The test set is not kept: no run reads it.
    pub datasets: Datasets,
    /// Samples of the test set, if the job has one.
    pub test_samples: Option<u64>,
    /// What training minimizes.
    pub loss: LossOptions,
    /// What evaluations compute.
    pub metrics: RequestedMetrics,
    pub network: Network,
    /// The network fused for the other kind of device, once a plan needed it.
    pub(super) network_for_other_device: OnceLock<Network>,
    /// For padded samples: the same network at shorter lengths, ascending.
    pub bucket_networks: Vec<BucketNetwork>,
    pub layout: ParamLayout,
    /// The model that this one learns from, if the job distills.
    pub teacher: Option<Teacher>,
    /// How its logits of the training samples are stored, if they are, and the order in which it computes them.
    pub stored_logits: Option<(LogitFormat, Order)>,
    pub order: Order,
    /// Order of the validation set, independent of the training order.
    pub valid_order: Order,
    /// Updates in the whole run.
    pub total_steps: u64,
    pub dtype: DType,
    pub workers: usize,
    /// Limit of the loader's buffers, in bytes.
    pub prefetch: u64,
    pub threads: usize,
    /// Host memory budget, in bytes.
    pub ram: u64,
    /// The GPU that computes; `None` for the CPU.
    pub gpu: Option<Arc<GpuDevice>>,
    /// Computes with candle's own operations instead of the kernels of the device.
    reference: bool,
    /// The job's optimizer, or the one whose state a resumed run has, which no plan changes. The plan may choose its
    /// 8-bit variant otherwise.
    pub(super) optimizer: OptimizerConfig,
    pub(super) optimizer_is_fixed: bool,
    /// What turns inputs into samples; checkpoints keep it.
    pub preprocessing: Preprocessing,
    /// Bytes of the tokenizer that checkpoints keep, and of the data cache on disk.
    pub(super) tokenizer_bytes: u64,
    pub(super) data_cache_bytes: u64,
    /// Images so large that only one is decoded at a time.
    pub large_images: Arc<LargeImages>,
    /// Heap bytes that opening the data took and did not free.
    pub(super) opened_heap_bytes: u64,
    /// Memory of this process outside its heap; zero until measured.
    pub process: ProcessMemory,
}

/// The network for padded samples of a shorter bucket. Shares its parameters with the full-length network.
pub struct BucketNetwork {
    /// Features of a sample cut to this length.
    pub features: Features,
    pub network: Network,
}

impl Setup {
    /// Where layers compute.
    pub fn backend(&self) -> Backend {
        match &self.gpu {
            gpu if self.reference => Backend::Reference { on_gpu: gpu.is_some() },
            Some(gpu) => Backend::Cuda { capability: gpu.capability },
            None => Backend::Cpu { threads: self.threads },
        }
    }

    /// Where layers compute on this machine.
    pub(super) fn backend_on(&self, machine: &TargetMachine) -> Backend {
        match machine.on_device() {
            on_gpu if self.reference => Backend::Reference { on_gpu },
            true => Backend::Cuda { capability: machine.capability },
            false => Backend::Cpu { threads: self.threads },
        }
    }

    /// Dtype of activations on this backend.
    pub(super) fn activation_dtype(&self, backend: Backend) -> DType {
        activation_dtype(self.job.train.precision, backend)
    }

    /// Where tensors live.
    pub fn device(&self) -> Device {
        self.gpu.as_ref().map_or(Device::Cpu, |gpu| gpu.device.clone())
    }

    /// The same setup, computing on this GPU.
    pub fn on_gpu(mut self, gpu: Option<Arc<GpuDevice>>) -> Self {
        #[cfg(feature = "cuda")]
        crate::kernels::cuda::cublaslt::allow_tf32(self.job.train.tf32);
        self.gpu = gpu;
        self.rebuild_networks();
        self
    }

    /// Computes with candle's own operations, or with the kernels of the device.
    pub fn set_reference(&mut self, reference: bool) {
        self.reference = reference;
        self.rebuild_networks();
    }

    /// Builds the networks for the backend in force.
    fn rebuild_networks(&mut self) {
        self.dtype = self.activation_dtype(self.backend());
        self.network = self.network_on(self.backend(), self.features());
        self.network_for_other_device = OnceLock::new();
        for i in 0..self.bucket_networks.len() {
            let network = self.network_on(self.backend(), &self.bucket_networks[i].features);
            self.bucket_networks[i].network = network;
        }
        self.rank_recompute_blocks();
    }

    /// The job's network for samples of these features, fused for this backend.
    pub(super) fn network_on(&self, backend: Backend, features: &Features) -> Network {
        let (rules, dtype) = (ParamRules::of_job(&self.job), self.activation_dtype(backend));
        let built = fused_network(&self.job.model, &self.loss, &rules, features, dtype, backend);
        let network =
            built.and_then(|built| with_teacher(built.network, self.teacher.as_ref(), features, backend));
        match network {
            Ok(network) => network,
            Err(error) => unreachable!("this model was built before: {error}"),
        }
    }

    /// This machine, with these limits on host memory.
    pub fn target_machine(&self, ram: u64, max_ram: u64) -> TargetMachine {
        let cpu = TargetMachine::cpu(ram, max_ram);
        match &self.gpu {
            Some(gpu) => {
                let device = format!("cuda:{}", gpu.ordinal);
                TargetMachine {
                    device,
                    vram: gpu.limit,
                    context_bytes: gpu.context_bytes,
                    capability: gpu.capability,
                    ..cpu
                }
            }
            None => cpu,
        }
    }

    /// `ram` is the host memory budget in bytes.
    pub fn new(job: Job, ram: u64) -> Result<Self, Failure> {
        Self::open(job, ram, &DatasetContext::default())
    }

    /// As [`Setup::new`], with a context for opening the data. Sets the context's `max_bytes`, `seed`,
    /// `shuffle` and `shuffle_buffer`.
    pub fn open(job: Job, ram: u64, opening: &DatasetContext) -> Result<Self, Failure> {
        let (seed, shuffle, shuffle_buffer) = (job.seed, job.data.loader.shuffle, shuffle_buffer(&job));
        let opening = DatasetContext { max_bytes: ram, seed, shuffle, shuffle_buffer, ..opening.clone() };
        let before = measure::live_bytes();
        let mut sets = datasets::open(&job, &opening)?;
        let test_samples = sets.test.take().map(|test| test.samples());
        let opened_heap_bytes = measure::live_bytes().saturating_sub(before);
        let setup = Self::from_datasets(sets, job, ram)?;
        let data_cache_bytes = opening.cache.used_bytes();
        let large_images = opening.large_images;
        Ok(Self { test_samples, opened_heap_bytes, data_cache_bytes, large_images, ..setup })
    }

    /// As [`Setup::new`], with datasets that are already open.
    pub fn from_datasets(datasets: Datasets, mut job: Job, ram: u64) -> Result<Self, Failure> {
        low_rank::resolve(&mut job, datasets.train.features(), ram)?;
        let shuffle_buffer = shuffle_buffer(&job);
        let threads = rayon::current_num_threads();
        let backend = Backend::Cpu { threads };
        let dtype = activation_dtype(job.train.precision, backend);
        let teacher = Teacher::of(&job, datasets.valid.as_ref())?;
        let loss = loss_options(&job, datasets.train.as_ref(), teacher.as_ref())?;
        let metrics = RequestedMetrics::of(&job, datasets.valid.features(), datasets.valid.len())?;
        let (rules, features) = (ParamRules::of_job(&job), datasets.train.features());
        let built = fused_network(&job.model, &loss, &rules, features, dtype, backend)?;
        let network = with_teacher(built.network, teacher.as_ref(), features, backend)?;
        let of_buckets = bucket_networks(&job.model, &loss, &rules, features, dtype, backend)?;
        let with_its_teacher = |BucketNetwork { features, network }| {
            let network = with_teacher(network, teacher.as_ref(), &features, backend)?;
            Ok(BucketNetwork { features, network })
        };
        let bucket_networks: Result<_, ModelError> = of_buckets.into_iter().map(with_its_teacher).collect();
        let bucket_networks = bucket_networks?;
        let samples = job.train.samples_per_update() as u64;
        let shuffle = job.data.loader.shuffle;
        let order = Order::for_dataset(datasets.train.as_ref(), samples, job.seed, shuffle, shuffle_buffer)?;
        let (valid, buffer) =
            (datasets.valid.as_ref(), shuffle_buffer.min(streaming::SEQUENTIAL_WINDOW_BYTES));
        let valid_order = Order::for_dataset(valid, valid.len(), job.seed, false, buffer)?;
        let stored_logits = match &loss.distill {
            Some(DistillOptions { temperature, top_k: Some(top_k), .. }) => {
                let (train, top_k) = (datasets.train.as_ref(), *top_k);
                let classes = num_classes(features);
                let positions = network.loss.outputs_per_sample() / classes.max(1);
                let format = LogitFormat { classes, top_k, positions, temperature: *temperature };
                Some((format, Order::for_dataset(train, train.len(), job.seed, false, buffer)?))
            }
            _ => None,
        };
        let total_steps = match job.train.length() {
            RunLength::Steps(steps) => steps,
            RunLength::Epochs(epochs) => epochs.saturating_mul(order.updates_per_epoch()),
        };
        let has_weights = job.train.init.is_some();
        job.quantize.iter_mut().for_each(|quantize| quantize.resolve(total_steps, has_weights));
        let workers = match job.data.loader.workers {
            0 => threads.min(datasets.train.len() as usize).max(1),
            workers => workers,
        };
        let prefetch = budget::prefetch(&job, datasets.train.features(), ram);
        let template = super::datasets::chat_template(&job)?;
        let mut setup = Self {
            optimizer: job.optimizer.clone(),
            optimizer_is_fixed: false,
            loss,
            metrics,
            preprocessing: Preprocessing::of(datasets.valid.as_ref(), template),
            tokenizer_bytes: tokenizer_bytes(&job, datasets.train.as_ref()),
            data_cache_bytes: 0,
            large_images: Arc::default(),
            opened_heap_bytes: 0,
            process: ProcessMemory::default(),
            ram,
            gpu: None,
            reference: false,
            job,
            test_samples: datasets.test.as_ref().map(|test| test.samples()),
            datasets,
            network,
            teacher,
            stored_logits,
            network_for_other_device: OnceLock::new(),
            bucket_networks,
            layout: built.layout,
            order,
            valid_order,
            total_steps,
            dtype,
            workers,
            prefetch,
            threads,
        };
        setup.rank_recompute_blocks();
        Ok(setup)
    }

    /// Returns memory that preparing the data left behind to the system, and measures this process outside its heap.
    pub fn with_process_measured(mut self) -> Self {
        let leftover_heap = self.opened_heap_bytes.saturating_sub(self.resident_data_bytes());
        let stacks = ThreadStacks {
            compute_threads: self.threads,
            kernel_bytes: matmul::thread_stack_bytes(),
            loader_threads: self.workers,
        };
        self.process = ProcessMemory::measure(stacks, leftover_heap);
        self
    }

    pub fn features(&self) -> &Features {
        self.datasets.train.features()
    }

    /// What turns predictions back into the units of their targets.
    pub fn target_scales(&self) -> Vec<TargetScale> {
        let TargetSpec::Values { len } = self.features().target else { return Vec::new() };
        tables::target_scales(&self.job, self.preprocessing.table.as_ref(), len)
    }

    /// Features and network for a micro-batch whose longest sample has this many positions.
    pub fn network_for_length(&self, longest: usize) -> (&Features, &Network) {
        let bucket = self.bucket_networks.iter().find(|bucket| longest <= bucket.features.input_len());
        bucket.map_or((self.features(), &self.network), |bucket| (&bucket.features, &bucket.network))
    }

    /// The weights that the job's `train.init` names, matched with the model; `None` if it names none.
    pub fn initial_weights(&self) -> Result<Option<InitialWeights>, Failure> {
        let train = &self.job.train;
        let open = |path: &PathBuf| {
            InitialWeights::open(path, &self.layout, self.network.loss.name(), train.init_head)
        };
        Ok(train.init.as_ref().map(open).transpose()?)
    }

    /// Bytes of the files that every checkpoint has besides its tensors and its state.
    pub(super) fn attached_bytes(&self) -> u64 {
        self.tokenizer_bytes + self.preprocessing.file_bytes()
    }

    pub fn num_parameters(&self) -> u64 {
        self.layout.params.len as u64
    }

    /// How many of them are not frozen.
    pub fn num_trained(&self) -> u64 {
        self.layout.params.trained_len as u64
    }

    /// Bytes that the datasets and their orders hold for as long as they live.
    pub fn resident_data_bytes(&self) -> u64 {
        let sets = self.datasets.train.resident_bytes() + self.datasets.valid.resident_bytes();
        sets + self.large_images.extra_bytes()
            + self.order.resident_bytes()
            + self.valid_order.resident_bytes()
            + self.stored_logits.as_ref().map_or(0, |(_, order)| order.resident_bytes())
    }

    /// Loader options for micro-batches of this size, within `limit` bytes.
    pub fn loader_options(&self, micro_batch: usize, limit: u64) -> LoaderOptions {
        LoaderOptions {
            micro_batch,
            max_bytes: limit,
            workers: self.workers,
            skip_bad: bad_record_policy(&self.job.data.loader).skips(),
        }
    }

    /// Samples of a training batch as the loader reads it: no more than the training set has.
    pub fn loaded_batch(&self, plan: ExecutionPlan) -> usize {
        plan.micro_batch.min(self.datasets.train.len() as usize)
    }

    /// Buffer bytes of the loader for micro-batches of this size, within `limit` bytes, in so many updates.
    pub fn loader_bytes(&self, micro_batch: usize, limit: u64, updates: u64) -> u64 {
        let batches = loader::num_batches(updates, self.update_samples(), micro_batch);
        loader::max_held_bytes(self.features(), micro_batch, limit, self.workers, batches)
    }

    /// Buffer bytes of the loader of an evaluation, likewise.
    pub fn eval_loader_bytes(&self, micro_batch: usize, limit: u64) -> u64 {
        let batches = loader::num_batches(1, self.datasets.valid.len(), micro_batch);
        loader::max_held_bytes(self.features(), micro_batch, limit, self.workers, batches)
    }

    /// Samples of an update at most.
    pub fn update_samples(&self) -> u64 {
        self.datasets.train.len().min(self.job.train.samples_per_update() as u64)
    }
}

/// Bytes of the shuffle buffer for sequential datasets.
fn shuffle_buffer(job: &Job) -> u64 {
    // The job states bytes, not a fraction of memory, so that the sample order does not depend on the machine.
    job.data.loader.shuffle_buffer.resolve(Bytes(0)).0
}

/// What to do with bad records.
pub(super) fn bad_record_policy(loading: &LoaderConfig) -> BadRecordPolicy {
    match loading.on_bad_record {
        OnBadRecord::Fail => BadRecordPolicy::Fail,
        OnBadRecord::Skip => BadRecordPolicy::Skip { limit: loading.max_bad_records },
    }
}

/// The loss that the job states, with weights for the classes of this training set.
fn loss_options(
    job: &Job,
    dataset: &dyn Dataset,
    teacher: Option<&Teacher>,
) -> Result<LossOptions, ModelError> {
    let train = &job.train;
    let target = &dataset.features().target;
    let names = target.names();
    let class_counts = || dataset.class_counts().or_else(|| dataset.table_schema()?.class_counts(names));
    let class_weights = match &train.class_weights {
        None => None,
        Some(ClassWeightsConfig::Named(ClassWeightsRule::Balanced)) => {
            let counts = class_counts().ok_or(ModelError::NoClassCounts)?;
            let all: u64 = counts.iter().sum();
            // A class without samples has no weight to give.
            let weight = |count: &u64| match target {
                TargetSpec::MultiLabel { .. } => {
                    dataset.len().saturating_sub(*count) as f64 / (*count).max(1) as f64
                }
                _ => all as f64 / (counts.len() as f64 * (*count).max(1) as f64),
            };
            Some(counts.iter().map(|count| weight(count) as f32).collect())
        }
        Some(ClassWeightsConfig::Table(weights)) => {
            if let Some(name) = weights.keys().find(|name| !names.contains(name)) {
                let classes = names.join(", ");
                return Err(ModelError::ClassWeight { name: name.clone(), classes });
            }
            let weights: Vec<f32> =
                names.iter().map(|name| weights.get(name).copied().unwrap_or(1.0) as f32).collect();
            let counts = class_counts();
            let has_samples = |class: usize| counts.as_ref().is_none_or(|counts| counts[class] > 0);
            // Those of several labels weigh their presence only.
            let is_one = matches!(target, TargetSpec::Class { .. });
            if is_one
                && !weights.iter().enumerate().any(|(class, weight)| *weight > 0.0 && has_samples(class))
            {
                return Err(ModelError::NoClassWeight);
            }
            Some(weights)
        }
    };
    let TrainConfig { loss: kind, huber_delta, focal_gamma, label_smoothing, .. } = *train;
    let distill = job.distill.as_ref().map(|distill| DistillOptions {
        temperature: distill.temperature,
        weight: distill.weight,
        top_k: (distill.logits == LogitSource::Stored)
            .then(|| distill.top_k.min(num_classes(dataset.features()))),
    });
    let features = job.distill.as_ref().map_or(&[][..], |distill| &distill.features);
    let features =
        teacher.map_or(Ok(Vec::new()), |teacher| teacher.features(features, dataset.features()))?;
    Ok(LossOptions { kind, huber_delta, focal_gamma, label_smoothing, class_weights, distill, features })
}

/// Logits per row of a model that classifies samples or predicts tokens.
fn num_classes(features: &Features) -> usize {
    match (&features.target, &features.input) {
        (TargetSpec::Tokens, InputSpec::Tokens { vocab, .. }) => *vocab,
        (target, _) => target.names().len(),
    }
}

/// The network with its teacher, if there is one.
fn with_teacher(
    network: Network,
    teacher: Option<&Teacher>,
    features: &Features,
    backend: Backend,
) -> Result<Network, ModelError> {
    let Some(teacher) = teacher else { return Ok(network) };
    let teacher = teacher.network(features, backend)?;
    for matched in &network.features {
        let (ours, theirs) = (&network.blocks[matched.student], &teacher.network.blocks[matched.teacher]);
        let (student, shape) = (ours.name.clone(), ours.output_shape());
        let (teacher, expected) = (theirs.name.clone(), theirs.output_shape());
        if shape[..shape.len().saturating_sub(1)] != expected[..expected.len().saturating_sub(1)] {
            return Err(ModelError::FeatureShape { student, teacher, ours: shape, theirs: expected });
        }
    }
    Ok(Network { teacher: Some(Box::new(teacher)), ..network })
}

/// The networks for padded samples of the shorter buckets.
pub fn bucket_networks(
    model: &ModelConfig,
    loss: &LossOptions,
    rules: &ParamRules,
    features: &Features,
    dtype: DType,
    backend: Backend,
) -> Result<Vec<BucketNetwork>, ModelError> {
    let network = |features: Features| {
        let network = fused_network(model, loss, rules, &features, dtype, backend)?.network;
        Ok(BucketNetwork { features, network })
    };
    features.shorter_buckets().map(network).collect()
}

/// The network of a job's model for samples of these features, fused for this backend.
pub fn fused_network(
    model: &ModelConfig,
    loss: &LossOptions,
    rules: &ParamRules,
    features: &Features,
    dtype: DType,
    backend: Backend,
) -> Result<BuiltModel, ModelError> {
    let BuiltModel { network, layout } = crate::models::build_with(model, features, loss, rules)?;
    let network = network.for_backend(MicroBatchSpec { batch: 1, dtype, backend }, &layout.params);
    Ok(BuiltModel { network, layout })
}

/// Bytes of the tokenizer and of what was published beside it; 0 if there is none.
fn tokenizer_bytes(job: &Job, dataset: &dyn Dataset) -> u64 {
    let settings = || datasets::tokenizer_settings(job).into_iter().filter_map(|file| file.metadata().ok());
    let tokenizer = dataset.tokenizer_json().map(|text| text.len() as u64);
    tokenizer.map_or(0, |bytes| bytes + settings().map(|file| file.len()).sum::<u64>())
}

/// Dtype of activations: what the job says or, on the reference backend, f32, which candle has everywhere.
pub fn activation_dtype(precision: Precision, backend: Backend) -> DType {
    match precision {
        _ if backend.is_reference() => DType::F32,
        Precision::Auto if backend.is_cuda() => DType::BF16,
        Precision::Auto | Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
        Precision::F16 => DType::F16,
    }
}
