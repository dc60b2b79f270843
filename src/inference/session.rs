//! A trained model in memory: planned first, then loaded, then computing micro-batches.
//!
//! Holds the weights in the compute dtype and nothing of training: no master weights, gradients or optimizer state.
//! The plan is a dry run of the same walk; the largest micro-batch that fits is chosen.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::bad_records::BadRecords;
use super::trained_model::TrainedModel;
use crate::base::features::Features;
use crate::base::units::Bytes;
use crate::base::{Backend, MicroBatchSpec, Phase, Role};
use crate::data::loader::{self, Loader, LoaderOptions};
use crate::data::order::{Cursor, Order};
use crate::data::{Dataset, HostBatch, streaming};
use crate::graph::network::{DeviceBatch, Executor, Network, StepError};
use crate::job::{LoaderConfig, Reductions};
use crate::kernels::matmul;
use crate::layers::loss::MetricSums;
use crate::layers::{Mode, PassContext};
use crate::memory::gpu::GpuDevice;
use crate::memory::process::{ProcessMemory, ThreadStacks};
use crate::memory::{Ledger, Reservation};
use crate::models::{self, BuiltModel, LossOptions};
use crate::param_store::ParamStore;
use crate::params::{ParamLayout, ParamRules};
use crate::planner::estimate::{
    GEMM_WORKSPACE_BYTES, PROGRAM_HEAP_BYTES, SMALL_ALLOCATION_BYTES, batch_bytes, staging_bytes,
};
use crate::quantization::{ActivationPoints, input_products, points};
use crate::train::Failure;
use crate::train::engine::Ledgers;
use crate::train::run::ended_early;
use crate::train::setup::{BucketNetwork, activation_dtype, bucket_networks, fused_network};
use crate::train::staging::BatchStaging;
use crate::train::tensor_files::load_views;

/// Bytes of batches that the loader prepares ahead.
const PREFETCH_BYTES: u64 = 16 << 20;

/// Where a session computes, and within which memory.
#[derive(Clone)]
pub struct SessionOptions {
    /// `None` for the CPU.
    pub gpu: Option<Arc<GpuDevice>>,
    /// Host memory budget, in bytes.
    pub ram: u64,
    /// Compute with candle's own operations.
    pub reference: bool,
    /// Samples per micro-batch at most.
    pub max_micro_batch: usize,
    /// Host bytes that a command holds besides: the scores of an evaluation, the largest image.
    pub held_bytes: u64,
}

/// What a session computes per micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassOutput {
    /// Sums of the loss and of what the metrics count; logits exist in parts only.
    Metrics,
    /// Every logit or prediction.
    Logits,
}

/// The memory of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionPlan {
    /// Samples per micro-batch.
    pub micro_batch: usize,
    /// Weights and running statistics.
    pub weights_bytes: u64,
    /// Activations and workspaces at the peak of a pass, with its micro-batch.
    pub pass_bytes: u64,
    /// Dataset and loader.
    pub data_bytes: u64,
    /// The process outside its heap, and what the program holds.
    pub process_bytes: u64,
    /// Peaks in device and host memory.
    pub vram_bytes: u64,
    pub ram_bytes: u64,
}

/// A model that is loaded.
pub struct Session {
    pub features: Features,
    pub plan: SessionPlan,
    network: Network,
    buckets: Vec<BucketNetwork>,
    store: ParamStore,
    dtype: DType,
    backend: Backend,
    ledgers: Ledgers,
    staging: BatchStaging,
    workers: usize,
    seed: u64,
    points: ActivationPoints,
    _weights: Vec<Reservation>,
}

/// A micro-batch between two blocks.
#[derive(Clone)]
pub(super) struct BlockInput {
    pub x: Tensor,
    epoch: u64,
    ids: Vec<u64>,
    lengths: Vec<u32>,
}

impl BlockInput {
    /// Unpadded positions per sample; `None` if nothing is padded.
    pub fn lengths(&self) -> Option<&[u32]> {
        (!self.lengths.is_empty()).then_some(&self.lengths)
    }
}

/// A network before its weights are loaded.
struct Unloaded {
    network: Network,
    buckets: Vec<BucketNetwork>,
    layout: ParamLayout,
    dtype: DType,
    backend: Backend,
}

impl Unloaded {
    fn new(model: &TrainedModel, features: &Features, options: &SessionOptions) -> Result<Self, Failure> {
        let backend = match &options.gpu {
            gpu if options.reference => Backend::Reference { on_gpu: gpu.is_some() },
            Some(gpu) => Backend::Cuda { capability: gpu.capability },
            None => Backend::Cpu { threads: rayon::current_num_threads() },
        };
        if !matches!(model.points, ActivationPoints::None) {
            return Self::with_points(model, features, backend);
        }
        let dtype = activation_dtype(model.job.train.precision, backend);
        // Smoothing and weights belong to training: a loss is that of the targets as they are.
        let rules =
            ParamRules::of_reductions(&Reductions::of_job(&model.job)).quantized(model.has_trained_ranges());
        let loss = LossOptions::default();
        let BuiltModel { network, layout } =
            fused_network(&model.job.model, &loss, &rules, features, dtype, backend)?;
        let buckets = bucket_networks(&model.job.model, &loss, &rules, features, dtype, backend)?;
        Ok(Self { network, buckets, layout, dtype, backend })
    }

    /// A network whose activations are observed or quantized: in f32, and not fused, since points stand between its
    /// layers.
    fn with_points(model: &TrainedModel, features: &Features, backend: Backend) -> Result<Self, Failure> {
        let BuiltModel { mut network, layout } =
            models::build_reduced(&model.job.model, features, &Reductions::of_job(&model.job))?;
        if let ActivationPoints::Inputs(products) = &model.points {
            input_products::insert(&mut network, products);
        }
        points::insert(&mut network, &features.input_shape(), &model.points).map_err(|point| {
            Failure::UnusableExport {
                folder: model.folder.clone(),
                problem: format!("it has no quantization of `{point}`"),
            }
        })?;
        Ok(Self { network, buckets: Vec::new(), layout, dtype: DType::F32, backend })
    }

    /// Peak bytes of a pass over `batch` samples, by a dry run.
    fn pass_bytes(&self, features: &Features, batch: usize, output: PassOutput) -> u64 {
        let spec = MicroBatchSpec { batch, dtype: self.dtype, backend: self.backend };
        let ledger = Ledger::planning();
        // A planning ledger has no limit, so nothing here fails.
        let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec)).ok();
        let exec = Executor::new(None, spec, &ledger);
        match output {
            PassOutput::Metrics => drop(self.network.evaluate(&exec, None, false)),
            PassOutput::Logits => {
                drop(self.network.logits(&exec, None));
                // The f32 copy that the host reads.
                let values = batch * self.network.loss.outputs_per_sample();
                drop(ledger.reserve(Role::Activations, "outputs", 4 * values as u64));
            }
        }
        ledger.peak()
    }

    fn plan(
        &self,
        features: &Features,
        batch: usize,
        output: PassOutput,
        resident_data: u64,
        process: ProcessMemory,
        workers: usize,
    ) -> SessionPlan {
        let values = self.layout.params.len as u64 * self.dtype.size_in_bytes() as u64;
        let weights_bytes = values + 4 * self.layout.stats.len as u64;
        let pass_bytes = self.pass_bytes(features, batch, output);
        let data_bytes =
            resident_data + loader::max_held_bytes(features, batch, PREFETCH_BYTES, workers, u64::MAX);
        let process_bytes = process.non_heap + process.leftover_heap + PROGRAM_HEAP_BYTES;
        let host = data_bytes + process_bytes;
        let (vram_bytes, ram_bytes) = match self.backend.on_gpu() {
            true => {
                let staged = staging_bytes(features, batch);
                (
                    weights_bytes + pass_bytes + staged + GEMM_WORKSPACE_BYTES + SMALL_ALLOCATION_BYTES,
                    host + staged,
                )
            }
            false => (0, weights_bytes + pass_bytes + host),
        };
        SessionPlan {
            micro_batch: batch,
            weights_bytes,
            pass_bytes,
            data_bytes,
            process_bytes,
            vram_bytes,
            ram_bytes,
        }
    }
}

impl Session {
    /// Plans, then loads the weights of `model` for the samples of `dataset`.
    pub fn load(
        model: &TrainedModel,
        dataset: &dyn Dataset,
        output: PassOutput,
        options: &SessionOptions,
    ) -> Result<Self, Failure> {
        // Quantization points read activations on the host.
        let on_cpu = SessionOptions { gpu: None, reference: false, ..options.clone() };
        let options = if matches!(model.points, ActivationPoints::None) { options } else { &on_cpu };
        // Samples to be predicted have no target, and the model has the outputs that it was trained with.
        let features = Features { target: model.features().target.clone(), ..dataset.features().clone() };
        let parts = Unloaded::new(model, &features, options)?;
        let workers = match model.job.data.loader.workers {
            0 => rayon::current_num_threads(),
            workers => workers,
        };
        let stacks = ThreadStacks {
            compute_threads: rayon::current_num_threads(),
            kernel_bytes: matmul::thread_stack_bytes(),
            loader_threads: workers,
        };
        let process = ProcessMemory::measure(stacks, 0);
        let resident_data = dataset.resident_bytes() + options.held_bytes;
        let of = |batch| parts.plan(&features, batch, output, resident_data, process, workers);
        let vram = options.gpu.as_ref().map_or(0, |gpu| gpu.limit);
        let fits = |plan: &SessionPlan| plan.ram_bytes <= options.ram && plan.vram_bytes <= vram;
        let most = options.max_micro_batch.min(dataset.len().try_into().unwrap_or(usize::MAX)).max(1);
        let halves = std::iter::successors(Some(most), |n| (*n > 1).then_some(n / 2));
        let plan = halves.map(of).find(fits).ok_or_else(|| {
            let smallest = of(1);
            Failure::SessionDoesNotFit {
                needs: Bytes(smallest.ram_bytes),
                ram: Bytes(options.ram),
                needs_vram: Bytes(smallest.vram_bytes),
                vram: Bytes(vram),
            }
        })?;
        let ledgers = Ledgers::on(options.gpu.as_deref(), options.ram, None);
        let weights = ledgers.tensors.reserve(Role::Weights, "weights", plan.weights_bytes);
        let host = plan.data_bytes + plan.process_bytes;
        let host = ledgers.host.reserve(Role::Process, "process and data", host);
        let reserved = vec![weights.map_err(StepError::Oom)?, host.map_err(StepError::Oom)?];
        let device = options.gpu.as_ref().map_or(Device::Cpu, |gpu| gpu.device.clone());
        let store = ParamStore::for_inference(parts.layout, parts.dtype, &device)?;
        load_views(&model.weights, &store.layout.params, store.weight_views())?;
        load_views(&model.statistics, &store.layout.stats, store.stat_views())?;
        store.set_rounding(model.rounds_to_int8());
        store.sync_compute_weights()?;
        Ok(Self {
            features,
            plan,
            network: parts.network,
            buckets: parts.buckets,
            store,
            dtype: parts.dtype,
            backend: parts.backend,
            staging: BatchStaging::new(parts.dtype, &device, &ledgers),
            ledgers,
            workers,
            seed: model.job.seed,
            points: model.points.clone(),
            _weights: reserved,
        })
    }

    /// Calls `visit` with every micro-batch of `dataset`, in its order. Bad records are left out of the batch and
    /// listed in it.
    pub fn for_each_batch(
        &self,
        dataset: Arc<dyn Dataset>,
        visit: impl FnMut(&HostBatch) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let samples = dataset.len();
        self.for_samples(dataset, samples, false, visit)
    }

    /// The same for `samples` samples of `dataset`, or all if it has fewer, drawn by the job's seed, for calibration. A
    /// bad record is an error or is left out, as `loading` says. Returns how many were left out.
    pub fn for_some_batches(
        &self,
        dataset: Arc<dyn Dataset>,
        samples: u64,
        loading: &LoaderConfig,
        mut visit: impl FnMut(&HostBatch) -> Result<(), Failure>,
    ) -> Result<u64, Failure> {
        let samples = samples.min(dataset.len());
        let (mut bad_records, mut usable) = (BadRecords::new(loading, dataset.views()), 0);
        self.for_samples(dataset, samples, true, |batch| {
            bad_records.add(&batch.bad_records)?;
            usable += batch.ids.len() as u64;
            visit(batch)
        })?;
        bad_records.check_usable("the data to calibrate on", usable)?;
        Ok(bad_records.count())
    }

    fn for_samples(
        &self,
        dataset: Arc<dyn Dataset>,
        samples: u64,
        shuffle: bool,
        mut visit: impl FnMut(&HostBatch) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let window = streaming::SEQUENTIAL_WINDOW_BYTES;
        let order = Order::for_dataset(dataset.as_ref(), samples, self.seed, shuffle, window)?;
        let options = LoaderOptions {
            micro_batch: self.plan.micro_batch,
            max_bytes: PREFETCH_BYTES,
            workers: self.workers,
            skip_bad: true,
        };
        let mut loader = Loader::start(dataset, order, Cursor::default(), 1, options)?;
        let mut done = 0;
        while done < samples {
            let batch = loader.next()?.ok_or_else(ended_early)?;
            visit(&batch)?;
            done += batch.consumed;
        }
        Ok(())
    }

    /// Logits or predictions, row by row: (samples, outputs per sample), in f32 on the host.
    pub fn logits(&self, batch: &HostBatch) -> Result<Vec<f32>, Failure> {
        let logits = self.run(batch, |network, exec, batch| network.logits(exec, Some(&batch.inputs)))?;
        let logits = logits.ok_or_else(|| candle_core::Error::Msg("a pass without tensors".into()))?;
        let bytes = 4 * logits.elem_count() as u64;
        let _hold =
            self.ledgers.tensors.reserve(Role::Activations, "outputs", bytes).map_err(StepError::Oom)?;
        let mut values = to_host(&logits)?;
        match &self.points {
            ActivationPoints::None | ActivationPoints::Inputs(_) => {}
            ActivationPoints::Observe(observers) => observers.add(self.network.loss.name(), &values)?,
            ActivationPoints::Quantize(all) => {
                if let Some(quantization) = all.get(self.network.loss.name()) {
                    values.iter_mut().for_each(|value| *value = quantization.rounded(*value));
                }
            }
        }
        Ok(values)
    }

    /// Sums of the loss and of what the metrics count.
    pub fn evaluate(&self, batch: &HostBatch) -> Result<MetricSums, Failure> {
        let sums = self.run(batch, |network, exec, batch| network.evaluate(exec, Some(batch), false))?.0;
        Ok(sums.read()?)
    }

    /// Logits or predictions per sample.
    pub fn outputs_per_sample(&self) -> usize {
        self.network.loss.outputs_per_sample()
    }

    /// Runs a micro-batch. Cuts padded samples to the smallest bucket that holds the longest of them.
    fn run<R>(
        &self,
        batch: &HostBatch,
        run: impl FnOnce(&Network, &Executor, &DeviceBatch) -> Result<R, StepError>,
    ) -> Result<R, Failure> {
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let bucket = self.buckets.iter().find(|bucket| longest <= bucket.features.input_len());
        let (features, network) =
            bucket.map_or((&self.features, &self.network), |bucket| (&bucket.features, &bucket.network));
        let spec = MicroBatchSpec { batch: batch.ids.len(), dtype: self.dtype, backend: self.backend };
        let ledger = &self.ledgers.tensors;
        ledger.set_phase(Phase::Eval);
        let hold = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec));
        let _hold = hold.map_err(StepError::Oom)?;
        self.staging.reserve_buffers(batch, features)?;
        let tensors = self.staging.to_tensors(batch, features)?;
        let mut pass = self.pass(batch.epoch, &batch.ids, &batch.lengths);
        pass.sample_info = tensors.sample_info.as_ref();
        let exec = Executor::new(Some(pass), spec, ledger);
        Ok(run(network, &exec, &tensors)?)
    }

    fn pass<'a>(&'a self, epoch: u64, ids: &'a [u64], lengths: &'a [u32]) -> PassContext<'a> {
        PassContext {
            seed: self.seed,
            epoch,
            lengths: (!lengths.is_empty()).then_some(lengths),
            ..PassContext::new(&self.store, Mode::Eval, ids)
        }
    }

    pub(super) fn store(&self) -> &ParamStore {
        &self.store
    }

    /// A micro-batch before its first block, on the CPU.
    pub(super) fn block_input(&self, batch: &HostBatch) -> Result<BlockInput, Failure> {
        self.staging.reserve_buffers(batch, &self.features)?;
        let x = self.staging.to_tensors(batch, &self.features)?.inputs;
        Ok(BlockInput { x, epoch: batch.epoch, ids: batch.ids.clone(), lengths: batch.lengths.clone() })
    }

    /// What a block gives for a micro-batch, on the CPU. The caller has reserved what it keeps.
    pub(super) fn run_block(&self, block: usize, input: &BlockInput) -> Result<Tensor, Failure> {
        let spec = MicroBatchSpec { batch: input.ids.len(), dtype: self.dtype, backend: self.backend };
        let ledger = &self.ledgers.tensors;
        let pass = Some(self.pass(input.epoch, &input.ids, &input.lengths));
        let exec = Executor::new(pass, spec, ledger);
        Ok(self.network.run_block(&exec, block, &input.x)?)
    }
}

fn to_host(logits: &Tensor) -> candle_core::Result<Vec<f32>> {
    logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}
