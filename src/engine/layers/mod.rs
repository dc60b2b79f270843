//! Layers: the building blocks of a model. Each file holds one layer: parameters, forward, backward and cost.
//!
//! A layer owns its backward pass. `forward` returns the output and exactly what `backward` needs; `backward` consumes
//! that, accumulates parameter gradients in place and returns the input gradient; `cost` states, to the byte, what both
//! hold for a micro-batch. There is no autograd graph, and nothing outside a layer depends on its internals.
//! [`network`](crate::graph::network) executes layers and reserves their memory from the ledger.

pub mod activation;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
pub mod cached_attention;
pub mod categorical_embedding;
pub mod class_token;
pub mod conv;
pub mod cross_entropy;
pub mod distillation;
pub mod dropout;
pub mod embedding;
pub mod fake_quantize;
pub mod first_token;
pub mod flatten;
pub mod global_pool;
#[cfg(any(test, feature = "testing"))]
pub mod gradcheck;
pub mod group_norm;
pub mod kv_cache;
pub mod linear;
pub mod loss;
pub mod max_pool;
pub mod norm;
pub mod packed_linear;
pub mod pointwise_loss;
pub mod reference;
pub mod squeeze_excite;
pub mod swiglu;

use std::any::Any;
use std::cell::OnceCell;

use candle_core::{Result, Tensor, Var};

use crate::base::MicroBatchSpec;
use crate::base::random::RngKey;
use crate::kernels::distillation::TeacherLogits;
use crate::kernels::linear::WeightBiasGrads;
use crate::kernels::sample_keys::SampleKeys;
use crate::kernels::{Activation, SavedForBackward};
use crate::param_store::ParamStore;
use crate::params::{ParamId, StatId};
use kv_cache::CachePass;

/// A layer of a network. Tensors are contiguous; the first dimension is the batch.
pub trait Layer: Any + Send + Sync {
    /// Path in the model, which is also the prefix of its parameter names.
    fn name(&self) -> &str;

    /// Output shape of one sample.
    fn output_shape(&self) -> Vec<usize>;

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)>;

    /// The layer may overwrite `dy`, if its cost says so. It computes the input gradient only if `needs_input_grad`.
    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>>;

    fn cost(&self, spec: MicroBatchSpec) -> Cost;

    /// Every micro-batch except the last must be a multiple of this many samples.
    fn micro_batch_multiple(&self) -> usize {
        1
    }

    /// The parameters that it reads.
    fn params(&self) -> Vec<ParamId> {
        Vec::new()
    }
}

/// What a layer keeps for its backward pass. The input comes first, if the layer saves it.
#[derive(Default)]
pub struct SavedTensors(pub Vec<Tensor>);

impl SavedTensors {
    /// For a layer with a fused activation: its input, if the weight gradient reads it, and what the activation's
    /// backward reads.
    fn with_activation(x: Option<&Tensor>, y: &Tensor, pre: Option<Tensor>, act: Activation) -> Self {
        let read = match act.saved_for_backward() {
            SavedForBackward::Nothing => None,
            SavedForBackward::Output => Some(y.clone()),
            SavedForBackward::Input => pre,
        };
        Self(x.cloned().into_iter().chain(read).collect())
    }
}

/// What a layer holds and computes for one micro-batch. Bytes are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of the input gradient.
    pub input_grad: u64,
    /// Bytes of the output; 0 if it is a view of the input.
    pub output: u64,
    /// The output aliases the input.
    pub output_is_view: bool,
    /// `backward` reads the input, or the output.
    pub saves_input: bool,
    pub saves_output: bool,
    /// `backward` overwrites the output gradient.
    pub overwrites_dy: bool,
    /// Bytes saved for `backward` besides these two.
    pub saved: u64,
    /// Bytes of temporaries during `forward` and `backward`.
    pub forward_workspace: u64,
    pub backward_workspace: u64,
    /// Bytes of temporaries during `backward` if it computes the input gradient, where that takes more.
    pub input_grad_workspace: u64,
    /// Floating-point operations of the forward pass.
    pub flops: u64,
    /// `backward` accumulates gradients of parameters. A layer whose parameters are all frozen, or that has none, is
    /// skipped unless its input gradient is needed.
    pub trains: bool,
}

impl Cost {
    /// Bytes of temporaries during a `backward` with or without the input gradient.
    pub fn workspace_of_backward(&self, needs_input_grad: bool) -> u64 {
        self.backward_workspace.max(if needs_input_grad { self.input_grad_workspace } else { 0 })
    }
}

/// Why a forward pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Training: dropout is on and running statistics are updated.
    Train,
    /// Training, second forward of a recomputed block: rebuilds what was saved and must change nothing else.
    Recompute,
    /// Evaluation: nothing is saved.
    Eval,
}

/// The state of one pass over a micro-batch.
#[derive(Clone, Copy)]
pub struct PassContext<'a> {
    pub store: &'a ParamStore,
    pub mode: Mode,
    pub seed: u64,
    pub epoch: u64,
    /// Global ids of the samples, in order.
    pub sample_ids: &'a [u64],
    /// Unpadded positions per sample, counted from the first; `None` if nothing is padded.
    pub lengths: Option<&'a [u32]>,
    /// Epoch, ids and lengths in GPU memory, laid out by
    /// [`pack_sample_info`](crate::kernels::sample_keys::pack_sample_info).
    pub sample_info: Option<&'a Tensor>,
    /// Factor on the loss gradient of every sample.
    pub loss_scale: f64,
    /// If given, layers read these copies of their parameters.
    pub copies: Option<ParamCopies<'a>>,
    /// The key-value cache that this pass reads and appends to, if it decodes.
    pub cache: Option<CachePass<'a>>,
    /// The weights of the teacher, if the network has one.
    pub teacher: Option<&'a ParamStore>,
    /// The teacher's logits of this micro-batch, for the loss.
    pub teacher_logits: Option<TeacherLogits<'a>>,
}

impl<'a> PassContext<'a> {
    /// A pass over unpadded samples of epoch 0, with seed 0.
    pub fn new(store: &'a ParamStore, mode: Mode, sample_ids: &'a [u64]) -> Self {
        Self {
            store,
            mode,
            seed: 0,
            epoch: 0,
            sample_ids,
            lengths: None,
            sample_info: None,
            loss_scale: 1.0,
            copies: None,
            cache: None,
            teacher: None,
            teacher_logits: None,
        }
    }
}

/// Copies of parameters that a layer reads in place of those in the store.
#[derive(Clone, Copy)]
pub enum ParamCopies<'a> {
    Tracked(&'a TrackedParams),
    /// The floats of those that the store has as 8-bit integers.
    Dequantized(&'a [(ParamId, Tensor)]),
}

/// Copies of the trained parameters that a layer reads, for candle's autograd to track.
pub struct TrackedParams(Vec<OnceCell<Tensor>>);

impl TrackedParams {
    /// For parameters with the ids 0 to `num_params`.
    pub fn new(num_params: usize) -> Self {
        Self((0..num_params).map(|_| OnceCell::new()).collect())
    }

    /// The copies made so far, and the ids of their parameters.
    pub fn read(&self) -> impl Iterator<Item = (ParamId, &Tensor)> {
        self.0
            .iter()
            .enumerate()
            .filter_map(|(index, copy)| Some((ParamId { index, trained: true }, copy.get()?)))
    }

    fn get(&self, id: ParamId, weight: &Tensor) -> &Tensor {
        self.0[id.index].get_or_init(|| match Var::from_tensor(weight) {
            Ok(copy) => copy.into_inner(),
            // Without a copy autograd finds no gradient, which the caller reports.
            Err(_) => weight.clone(),
        })
    }
}

impl<'a> PassContext<'a> {
    pub fn weight(&self, id: ParamId) -> &Tensor {
        let weight = &self.store.weight_views()[id.index];
        match self.copies {
            Some(ParamCopies::Tracked(copies)) if id.trained => copies.get(id, weight),
            Some(ParamCopies::Dequantized(copies)) => {
                copies.iter().find(|(of, _)| *of == id).map_or(weight, |(_, copy)| copy)
            }
            _ => weight,
        }
    }

    /// The gradient to accumulate into; `None` for a frozen parameter.
    pub fn grad(&self, id: ParamId) -> Option<&Tensor> {
        self.store.grad(id)
    }

    /// The gradients of a weight and, if there is one, its bias.
    pub fn weight_bias_grads(&self, weight: ParamId, bias: Option<ParamId>) -> WeightBiasGrads<'_> {
        WeightBiasGrads { weight: self.grad(weight), bias: bias.and_then(|id| self.grad(id)) }
    }

    pub fn stat(&self, id: StatId) -> &Tensor {
        &self.store.stat_views()[id.0]
    }

    /// The RNG keys of the layer `stream`, one per sample of the micro-batch.
    pub fn sample_keys(&self, stream: u64) -> SampleKeys<'a> {
        SampleKeys {
            layer: RngKey::new(self.seed, stream),
            epoch: self.epoch,
            ids: self.sample_ids,
            sample_info: self.sample_info,
        }
    }
}
