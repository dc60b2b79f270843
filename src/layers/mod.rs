//! Layers: what a model is made of. Each file holds one: parameters, forward, backward and cost.
//!
//! A layer owns its backward pass. `forward_workspace` returns the output and exactly what `backward_workspace` will need;
//! `backward_workspace` consumes that, adds parameter gradients in place and returns the input's gradient; `cost`
//! says, for a micro-batch, what all of this holds, to the byte. No graph is recorded, and nothing else
//! in the program knows a layer's insides. [`network`] runs layers and asks the ledger for them.

pub mod activation;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
pub mod categorical_embedding;
pub mod class_token;
pub mod conv;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod first_token;
pub mod flatten;
pub mod global_pool;
#[cfg(test)]
pub mod gradcheck;
pub mod group_norm;
pub mod linear;
pub mod loss;
pub mod max_pool;
pub mod network;
pub mod norm;
pub mod offload;
pub mod packed_linear;
pub mod pointwise_loss;
pub mod squeeze_excite;
pub mod swiglu;

use candle_core::{DType, Result, Tensor};

use crate::kernels::linear::ActBackward;
use crate::kernels::sample_keys::SampleKeys;
use crate::kernels::{Activation, SavedForBackward, add};
use crate::params::{ParamId, ParamStore, StatId};
use crate::random::RngKey;

/// A layer of a network. Tensors are contiguous, the first dimension is the sample.
pub trait Layer: Send + Sync {
    /// Its path in the model, which is also the prefix of its parameters' names.
    fn name(&self) -> &str;

    /// The shape of one sample's output.
    fn output_shape(&self) -> Vec<usize>;

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)>;

    /// As `forward_workspace`, with `onto` added to the output, which must be nobody's but the caller's, and `act` of the sum.
    fn forward_add_act(
        &self,
        x: &Tensor,
        residual: &Tensor,
        act: Activation,
        pass: &PassContext,
    ) -> Result<(Tensor, SavedTensors)> {
        let (y, saved) = self.forward(x, pass)?;
        Ok((add::inplace(&y, residual, act)?, saved))
    }

    /// `dy` is the layer's to overwrite; no input gradient is made unless it is wanted.
    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>>;

    /// As `backward_workspace`, with `onto`, the gradient that reaches the input by another way, added to it.
    fn backward_accumulate(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        residual_grad: &Tensor,
    ) -> Result<Option<Tensor>> {
        let dx = self.backward(saved, dy, pass, true)?;
        dx.map(|dx| add::inplace(&dx, residual_grad, Activation::Identity)).transpose()
    }

    /// As `backward_workspace` where `forward_add_act` made `recomputed_output`: `dy` is first turned into the gradient before `act`, in place.
    fn backward_add_act(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        (y, act): (&Tensor, Activation),
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        add::activation_backward_inplace(y, &dy, act)?;
        self.backward(saved, dy, pass, needs_input_grad)
    }

    /// Whether both of these are made there within the layer's own passes: then what is added is made first, and `recomputed_output`
    /// is held for as long as the layer's gradient is made.
    fn fuses_add_act(&self, _act: Activation, _backend: Backend) -> bool {
        false
    }

    /// The output once more from what the layer saved, where that takes no more than a pass over it: such an output
    /// is not kept for the layer after it, but made again when that one needs it. The same bits, but for a GELU that
    /// a card makes within the product: it is made again from what was saved, which is rounded.
    fn recompute_output(&self, _saved: &SavedTensors, _pass: &PassContext) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Whether there [`backward_input`](Layer::backward_early) gives the output too, made again within its passes.
    fn recomputes_in_backward(&self, _backend: Backend) -> bool {
        false
    }

    /// Whether there the input's gradient is made without the input: then an input that is made again on the way of the
    /// layer before is waited for, and [`backward_weight`](Layer::backward_late) comes when it is there.
    fn can_defer_weight_grad(&self, _backend: Backend) -> bool {
        false
    }

    /// As `backward_workspace`, or `backward_accumulate` where there is something `onto` it, and more or less of it: with `again` the
    /// output as well, in memory that the pass needs no longer; where the layer [`can_defer_weight_grad`](Layer::waits), and what it saved
    /// is without its input, all but the gradients that need the input.
    fn backward_input(
        &self,
        saved: SavedTensors,
        dy: &Tensor,
        pass: &PassContext,
        (needs_input_grad, residual_grad): (bool, Option<&Tensor>),
        recompute: bool,
    ) -> Result<InputGrad> {
        let _ = (saved, dy, pass, needs_input_grad, residual_grad, recompute);
        candle_core::bail!("{} makes its gradients at once", self.name())
    }

    /// What the gradient of the output meets first in the layer, where the layer after it may take it through that.
    fn fusible_act_backward<'a>(
        &self,
        _saved: &'a SavedTensors,
        _pass: &'a PassContext,
    ) -> Option<ActBackward<'a>> {
        None
    }

    /// What [`backward_input`](Layer::backward_early) left to do, once the input is there; `dy` is as that left it.
    fn backward_weight(&self, _x: &Tensor, _dy: &Tensor, _pass: &PassContext) -> Result<()> {
        Ok(())
    }

    /// The parameter whose gradient is the sum over all rows of the gradient that the layer is given, which whoever makes
    /// that may add to it on the way.
    fn fusible_bias_grad(&self) -> Option<ParamId> {
        None
    }

    /// Whether there the backward pass can sum over the rows of the gradient it makes.
    fn fuses_bias_grad(&self, _backend: Backend) -> bool {
        false
    }

    /// What [`again`](Layer::again) makes the output from there.
    fn recompute_source(&self, _backend: Backend) -> RecomputeSource {
        RecomputeSource::Unsupported
    }

    /// Whether `backward_workspace` writes to the `dy` it is given.
    fn overwrites_dy(&self) -> bool {
        false
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost;

    /// A micro-batch is a multiple of so many samples, but for the last.
    fn micro_batch_multiple(&self) -> usize {
        1
    }

    /// Values of all its parameters.
    fn num_parameters(&self) -> usize;
}

/// What the first part of a backward pass gives.
pub struct InputGrad {
    /// The input's gradient, where it is wanted.
    pub dx: Option<Tensor>,
    /// The output, where it is made again.
    pub recomputed_output: Option<Tensor>,
    /// Whether the gradient went through what is [`input_act_backward`](Along::before) as well.
    pub input_act_backward_done: bool,
}

/// What a layer can make its output from once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeSource {
    Unsupported,
    /// From its input, which must have been kept, and what else it saved.
    InputAndSaved,
    /// From what it saved beside its input.
    SavedOnly,
}

/// What a layer keeps between its passes; its input first, where it keeps that.
#[derive(Default)]
pub struct SavedTensors(pub Vec<Tensor>);

impl SavedTensors {
    /// What a map with an activation fused keeps: its input, and what the activation reads.
    fn with_activation(x: &Tensor, y: &Tensor, pre: Option<Tensor>, act: Activation) -> Self {
        let read = match act.saved_for_backward() {
            SavedForBackward::Nothing => None,
            SavedForBackward::Output => Some(y.clone()),
            SavedForBackward::Input => pre,
        };
        Self(std::iter::once(x.clone()).chain(read).collect())
    }
}

/// What a cost is asked for.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatchSpec {
    /// Samples in the micro-batch.
    pub batch: usize,
    /// The type of activations.
    pub dtype: DType,
    /// Whose bodies run.
    pub backend: Backend,
}

/// Where layers compute: kernels have a body for each, with workspaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The CPU; each thread has a workspace.
    Cpu { threads: usize },
    /// A GPU of this compute capability, which decides which kernels run.
    Cuda { capability: ComputeCapability },
}

/// Compute capability of a GPU: major, minor.
pub type ComputeCapability = (u32, u32);

/// The one whose kernels take the most memory: for a GPU that nobody named.
pub const HOPPER: ComputeCapability = (9, 0);

impl Backend {
    pub fn is_cuda(self) -> bool {
        matches!(self, Backend::Cuda { .. })
    }

    /// Whether the kernels for Hopper run, whose instructions no other GPU has.
    pub fn is_hopper(self) -> bool {
        matches!(self, Backend::Cuda { capability: HOPPER })
    }
}

impl MicroBatchSpec {
    /// Threads of the CPU bodies; none where a card computes.
    pub fn threads(&self) -> usize {
        match self.backend {
            Backend::Cpu { threads } => threads,
            Backend::Cuda { .. } => 0,
        }
    }

    /// Bytes of `per_sample` values of every sample.
    pub fn bytes(&self, per_sample: usize) -> u64 {
        (self.batch * per_sample * self.dtype.size_in_bytes()) as u64
    }
}

/// What a layer holds and does for one micro-batch. Bytes are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of the input's gradient.
    pub input_grad: u64,
    /// Bytes of the output; 0 where it is a view of the input.
    pub output: u64,
    /// The output shares the input's memory.
    pub output_is_view: bool,
    /// `backward_workspace` reads the input, or the output.
    pub saves_input: bool,
    pub saves_output: bool,
    /// Bytes saved for `backward_workspace` beside these two.
    pub saved: u64,
    /// Bytes of temporaries while `forward_workspace` and `backward_workspace` run.
    pub forward_workspace: u64,
    pub backward_workspace: u64,
    /// Floating-point operations of the forward pass.
    pub flops: u64,
}

/// Why the forward pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To learn: dropout is on, statistics move.
    Train,
    /// To learn, again: what was saved is made a second time, and nothing else may change.
    Recompute,
    /// To judge: nothing is saved.
    Eval,
}

/// What one pass over a micro-batch works with.
#[derive(Clone, Copy)]
pub struct PassContext<'a> {
    pub store: &'a ParamStore,
    pub mode: Mode,
    pub seed: u64,
    pub epoch: u64,
    /// Global ids of the micro-batch's samples, in order.
    pub sample_ids: &'a [u64],
    /// Positions of each sample that are not padding, from the first; all where absent.
    pub lengths: Option<&'a [u32]>,
    /// The epoch, the ids and the lengths where a GPU reads them, as [`sample_keys::sample_info`](crate::kernels::keys::staged) lays them out.
    pub sample_info: Option<&'a Tensor>,
    /// What a sample's loss gradient is multiplied with.
    pub loss_scale: f64,
    pub fusion: FusionContext<'a>,
}

/// What the backward passes of neighbouring layers do for each other.
#[derive(Clone, Copy, Default)]
pub struct FusionContext<'a> {
    /// To whose gradient the layer is to add the sums over all rows of the input's gradient, if it
    /// [`sums`](Layer::sums) them.
    pub input_bias_grad: Option<ParamId>,
    /// Whether those of the gradient that the layer is given were added already.
    pub bias_grad_done: bool,
    /// What the input's gradient meets next, which the layer may take it through.
    pub input_act_backward: Option<ActBackward<'a>>,
    /// Whether the layer after took the gradient through what this one [`fusible_act_backward`](Layer::met).
    pub act_backward_done: bool,
}

impl<'a> PassContext<'a> {
    pub fn weight(&self, id: ParamId) -> &Tensor {
        &self.store.weight_views()[id.0]
    }

    pub fn grad(&self, id: ParamId) -> &Tensor {
        &self.store.grad_views()[id.0]
    }

    pub fn stat(&self, id: StatId) -> &Tensor {
        &self.store.stat_views()[id.0]
    }

    /// The randomness of the layer `stream` for each sample of the micro-batch.
    pub fn sample_keys(&self, stream: u64) -> SampleKeys<'a> {
        SampleKeys {
            layer: RngKey::new(self.seed, stream),
            epoch: self.epoch,
            ids: self.sample_ids,
            sample_info: self.sample_info,
        }
    }
}
