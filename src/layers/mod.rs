//! Layers: the building blocks of a model. Each file holds one layer: parameters, forward, backward and cost.
//!
//! A layer owns its backward pass. `forward` returns the output and exactly what `backward` needs; `backward` consumes
//! that, accumulates parameter gradients in place and returns the input gradient; `cost` states, to the byte, what both
//! hold for a micro-batch. There is no autograd graph, and nothing outside a layer depends on its internals.
//! [`network`] executes layers and reserves their memory from the ledger.

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
pub mod norm;
pub mod packed_linear;
pub mod pointwise_loss;
pub mod squeeze_excite;
pub mod swiglu;

use candle_core::{Result, Tensor};

use crate::base::random::RngKey;
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::linear::ActBackward;
use crate::kernels::sample_keys::SampleKeys;
use crate::kernels::{Activation, SavedForBackward, add};
use crate::param_store::ParamStore;
use crate::params::{ParamId, StatId};

/// A layer of a network. Tensors are contiguous; the first dimension is the batch.
pub trait Layer: Send + Sync {
    /// Path in the model, which is also the prefix of its parameter names.
    fn name(&self) -> &str;

    /// Output shape of one sample.
    fn output_shape(&self) -> Vec<usize>;

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)>;

    /// Computes `act(forward(x) + residual)`. The sum overwrites the output, so the layer must not have saved it.
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

    /// The layer may overwrite `dy`. It computes the input gradient only if `needs_input_grad`.
    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>>;

    /// Like `backward`, and adds `residual_grad`, the gradient that reaches the input along the other branch.
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

    /// Backward of `forward_add_act`, whose output was `y`: first backpropagates `dy` through `act`, in place.
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

    /// Whether the layer fuses `forward_add_act` and `backward_add_act` into its own passes on this backend. The
    /// executor then runs the shortcut before the branch, and keeps `y` until the layer has computed its gradients.
    fn fuses_add_act(&self, _act: Activation, _backend: Backend) -> bool {
        false
    }

    /// Recomputes the output from the saved tensors, if that costs no more than one pass over it. The executor does not
    /// keep such an output for the next layer, but recomputes it when the next layer's backward needs it. The result is
    /// bit-exact except for a GELU fused into a GEMM epilogue on a GPU: recomputing it starts from the saved
    /// pre-activation, which is rounded.
    fn recompute_output(&self, _saved: &SavedTensors, _pass: &PassContext) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Whether [`backward_input`](Layer::backward_input) can also return the output, recomputed within its own passes.
    fn recomputes_in_backward(&self, _backend: Backend) -> bool {
        false
    }

    /// Whether the layer computes its input gradient without its input on this backend. If the preceding layer
    /// recomputes that input during its own backward, the executor defers the weight gradient and calls
    /// [`backward_weight`](Layer::backward_weight) once the input exists.
    fn can_defer_weight_grad(&self, _backend: Backend) -> bool {
        false
    }

    /// Like `backward`, or `backward_accumulate` if there is a `residual_grad`, with two differences. With `recompute`
    /// it also returns the output, in memory that the pass no longer needs. If the layer
    /// [`can_defer_weight_grad`](Layer::can_defer_weight_grad) and `saved` lacks its input, it skips the gradients that
    /// need the input.
    fn backward_input(
        &self,
        saved: SavedTensors,
        dy: &Tensor,
        pass: &PassContext,
        (needs_input_grad, residual_grad): (bool, Option<&Tensor>),
        recompute: bool,
    ) -> Result<InputGrad> {
        let _ = (saved, dy, pass, needs_input_grad, residual_grad, recompute);
        candle_core::bail!("{} cannot split its backward pass", self.name())
    }

    /// The activation backward that `dy` passes through first in this layer, if the next layer may fuse it.
    fn fusible_act_backward<'a>(
        &self,
        _saved: &'a SavedTensors,
        _pass: &'a PassContext,
    ) -> Option<ActBackward<'a>> {
        None
    }

    /// Computes the gradients that [`backward_input`](Layer::backward_input) skipped, now that the input exists; `dy`
    /// is as that call left it.
    fn backward_weight(&self, _x: &Tensor, _dy: &Tensor, _pass: &PassContext) -> Result<()> {
        Ok(())
    }

    /// The parameter whose gradient is the sum of `dy` over all rows (a bias). Whoever produces `dy` may accumulate it
    /// in the same pass.
    fn fusible_bias_grad(&self) -> Option<ParamId> {
        None
    }

    /// Whether the backward pass can also sum its input gradient over all rows on this backend.
    fn fuses_bias_grad(&self, _backend: Backend) -> bool {
        false
    }

    /// What [`recompute_output`](Layer::recompute_output) needs on this backend.
    fn recompute_source(&self, _backend: Backend) -> RecomputeSource {
        RecomputeSource::Unsupported
    }

    /// Whether `backward` overwrites the `dy` it takes.
    fn overwrites_dy(&self) -> bool {
        false
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost;

    /// Every micro-batch except the last must be a multiple of this many samples.
    fn micro_batch_multiple(&self) -> usize {
        1
    }

    /// Number of values in all its parameters.
    fn num_parameters(&self) -> usize;
}

/// Result of [`Layer::backward_input`].
pub struct InputGrad {
    /// The input gradient, if requested.
    pub dx: Option<Tensor>,
    /// The output, if its recompute was requested.
    pub recomputed_output: Option<Tensor>,
    /// Whether `dx` also passed through [`input_act_backward`](FusionContext::input_act_backward).
    pub input_act_backward_done: bool,
}

/// What a layer can recompute its output from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecomputeSource {
    Unsupported,
    /// From its input, which must still be saved, and its other saved tensors.
    InputAndSaved,
    /// From its saved tensors other than the input.
    SavedOnly,
}

/// What a layer keeps for its backward pass. The input comes first, if the layer saves it.
#[derive(Default)]
pub struct SavedTensors(pub Vec<Tensor>);

impl SavedTensors {
    /// For a layer with a fused activation: its input, and what the activation's backward reads.
    fn with_activation(x: &Tensor, y: &Tensor, pre: Option<Tensor>, act: Activation) -> Self {
        let read = match act.saved_for_backward() {
            SavedForBackward::Nothing => None,
            SavedForBackward::Output => Some(y.clone()),
            SavedForBackward::Input => pre,
        };
        Self(std::iter::once(x.clone()).chain(read).collect())
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
    /// Bytes saved for `backward` besides these two.
    pub saved: u64,
    /// Bytes of temporaries during `forward` and `backward`.
    pub forward_workspace: u64,
    pub backward_workspace: u64,
    /// Floating-point operations of the forward pass.
    pub flops: u64,
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
    pub fusion: FusionContext<'a>,
}

/// Work that the backward passes of adjacent layers do for each other.
#[derive(Clone, Copy, Default)]
pub struct FusionContext<'a> {
    /// The preceding layer's bias, whose gradient is the sum of this layer's input gradient over all rows. The layer
    /// accumulates it if it [`fuses_bias_grad`](Layer::fuses_bias_grad).
    pub input_bias_grad: Option<ParamId>,
    /// The producer of `dy` already accumulated this layer's bias gradient.
    pub bias_grad_done: bool,
    /// The preceding layer's activation backward, which this layer may apply to its input gradient.
    pub input_act_backward: Option<ActBackward<'a>>,
    /// The next layer already applied this layer's [`fusible_act_backward`](Layer::fusible_act_backward) to `dy`.
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
