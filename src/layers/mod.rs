//! Layers: what a model is made of. Each file holds one: parameters, forward, backward and cost.
//!
//! A layer owns its backward pass. `forward` returns the output and exactly what `backward` will need;
//! `backward` consumes that, adds parameter gradients in place and returns the input's gradient; `cost`
//! says, for a micro-batch, what all of this holds, to the byte. No graph is recorded, and nothing else
//! in the program knows a layer's insides. [`network`] runs layers and asks the ledger for them.

pub mod activation;
pub mod aside;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
#[cfg(test)]
pub mod check;
pub mod class_token;
pub mod conv;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod first;
pub mod flatten;
pub mod global_pool;
pub mod group_norm;
pub mod linear;
pub mod lookup;
pub mod loss;
pub mod network;
pub mod norm;
pub mod packed;
pub mod pointwise_loss;
pub mod pool;
pub mod squeeze_excite;
pub mod swiglu;

use candle_core::{DType, Result, Tensor};

use crate::kernels::keys::Keys;
use crate::kernels::linear::Before;
use crate::kernels::{Activation, Reads, add};
use crate::params::{ParamId, StatId, Store};
use crate::random::Random;

/// A layer of a network. Tensors are contiguous, the first dimension is the sample.
pub trait Layer: Send + Sync {
    /// Its path in the model, which is also the prefix of its parameters' names.
    fn name(&self) -> &str;

    /// The shape of one sample's output.
    fn output(&self) -> Vec<usize>;

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)>;

    /// As `forward`, with `onto` added to the output, which must be nobody's but the caller's, and `act` of the sum.
    fn forward_onto(
        &self,
        x: &Tensor,
        onto: &Tensor,
        act: Activation,
        pass: &Pass,
    ) -> Result<(Tensor, Saved)> {
        let (y, saved) = self.forward(x, pass)?;
        Ok((add::into(&y, onto, act)?, saved))
    }

    /// `dy` is the layer's to overwrite; no input gradient is made unless it is wanted.
    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>>;

    /// As `backward`, with `onto`, the gradient that reaches the input by another way, added to it.
    fn backward_onto(&self, saved: Saved, dy: Tensor, pass: &Pass, onto: &Tensor) -> Result<Option<Tensor>> {
        let dx = self.backward(saved, dy, pass, true)?;
        dx.map(|dx| add::into(&dx, onto, Activation::Identity)).transpose()
    }

    /// As `backward` where `forward_onto` made `y`: `dy` is first turned into the gradient before `act`, in place.
    fn backward_through(
        &self,
        saved: Saved,
        dy: Tensor,
        (y, act): (&Tensor, Activation),
        pass: &Pass,
        want: bool,
    ) -> Result<Option<Tensor>> {
        add::through(y, &dy, act)?;
        self.backward(saved, dy, pass, want)
    }

    /// Whether both of these are made there within the layer's own passes: then what is added is made first, and `y`
    /// is held for as long as the layer's gradient is made.
    fn joins(&self, _act: Activation, _on: On) -> bool {
        false
    }

    /// The output once more from what the layer saved, where that takes no more than a pass over it: such an output
    /// is not kept for the layer after it, but made again when that one needs it. The same bits, but for a GELU that
    /// a card makes within the product: it is made again from what was saved, which is rounded.
    fn again(&self, _saved: &Saved, _pass: &Pass) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Whether there [`backward_early`](Layer::backward_early) gives the output too, made again within its passes.
    fn remakes_on_the_way(&self, _on: On) -> bool {
        false
    }

    /// Whether there the input's gradient is made without the input: then an input that is made again on the way of the
    /// layer before is waited for, and [`backward_late`](Layer::backward_late) comes when it is there.
    fn waits(&self, _on: On) -> bool {
        false
    }

    /// As `backward`, or `backward_onto` where there is something `onto` it, and more or less of it: with `again` the
    /// output as well, in memory that the pass needs no longer; where the layer [`waits`](Layer::waits), and what it saved
    /// is without its input, all but the gradients that need the input.
    fn backward_early(
        &self,
        saved: Saved,
        dy: &Tensor,
        pass: &Pass,
        (want, onto): (bool, Option<&Tensor>),
        again: bool,
    ) -> Result<Early> {
        let _ = (saved, dy, pass, want, onto, again);
        candle_core::bail!("{} makes its gradients at once", self.name())
    }

    /// What the gradient of the output meets first in the layer, where the layer after it may take it through that.
    fn met<'a>(&self, _saved: &'a Saved, _pass: &'a Pass) -> Option<Before<'a>> {
        None
    }

    /// What [`backward_early`](Layer::backward_early) left to do, once the input is there; `dy` is as that left it.
    fn backward_late(&self, _x: &Tensor, _dy: &Tensor, _pass: &Pass) -> Result<()> {
        Ok(())
    }

    /// The parameter whose gradient is the sum over all rows of the gradient that the layer is given, which whoever makes
    /// that may add to it on the way.
    fn adds_rows(&self) -> Option<ParamId> {
        None
    }

    /// Whether there the backward pass can sum over the rows of the gradient it makes.
    fn sums(&self, _on: On) -> bool {
        false
    }

    /// What [`again`](Layer::again) makes the output from there.
    fn remakes(&self, _on: On) -> Remakes {
        Remakes::Never
    }

    /// Whether `backward` writes to the `dy` it is given.
    fn overwrites(&self) -> bool {
        false
    }

    fn cost(&self, at: At) -> Cost;

    /// A micro-batch is a multiple of so many samples, but for the last.
    fn group(&self) -> usize {
        1
    }

    /// Values of all its parameters.
    fn parameters(&self) -> usize;
}

/// What the first part of a backward pass gives.
pub struct Early {
    /// The input's gradient, where it is wanted.
    pub dx: Option<Tensor>,
    /// The output, where it is made again.
    pub y: Option<Tensor>,
    /// Whether the gradient went through what is [`before`](Along::before) as well.
    pub through: bool,
}

/// What a layer can make its output from once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remakes {
    Never,
    /// From its input, which must have been kept, and what else it saved.
    WithInput,
    /// From what it saved beside its input.
    Alone,
}

/// What a layer keeps between its passes; its input first, where it keeps that.
#[derive(Default)]
pub struct Saved(pub Vec<Tensor>);

impl Saved {
    /// What a map with an activation fused keeps: its input, and what the activation reads.
    fn around(x: &Tensor, y: &Tensor, pre: Option<Tensor>, act: Activation) -> Self {
        let read = match act.reads() {
            Reads::Nothing => None,
            Reads::Output => Some(y.clone()),
            Reads::Input => pre,
        };
        Self(std::iter::once(x.clone()).chain(read).collect())
    }
}

/// What a cost is asked for.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Samples in the micro-batch.
    pub batch: usize,
    /// The type of activations.
    pub dtype: DType,
    /// Whose bodies run.
    pub on: On,
}

/// Where layers compute: kernels have a body for each, with workspaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The CPU; each thread has a workspace.
    Cpu { threads: usize },
    /// A GPU of this compute capability, which decides which kernels run.
    Cuda { capability: Capability },
}

/// Compute capability of a GPU: major, minor.
pub type Capability = (u32, u32);

/// The one whose kernels take the most memory: for a GPU that nobody named.
pub const HOPPER: Capability = (9, 0);

impl On {
    pub fn is_cuda(self) -> bool {
        matches!(self, On::Cuda { .. })
    }

    /// Whether the kernels for Hopper run, whose instructions no other GPU has.
    pub fn is_hopper(self) -> bool {
        matches!(self, On::Cuda { capability: HOPPER })
    }
}

impl At {
    /// Threads of the CPU bodies; none where a card computes.
    pub fn threads(&self) -> usize {
        match self.on {
            On::Cpu { threads } => threads,
            On::Cuda { .. } => 0,
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
    pub input: u64,
    /// Bytes of the output; 0 where it is a view of the input.
    pub output: u64,
    /// The output shares the input's memory.
    pub view: bool,
    /// `backward` reads the input, or the output.
    pub keeps_input: bool,
    pub keeps_output: bool,
    /// Bytes saved for `backward` beside these two.
    pub saved: u64,
    /// Bytes of temporaries while `forward` and `backward` run.
    pub forward: u64,
    pub backward: u64,
    /// Floating-point operations of the forward pass.
    pub flops: u64,
}

/// Why the forward pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// To learn: dropout is on, statistics move.
    Train,
    /// To learn, again: what was saved is made a second time, and nothing else may change.
    Again,
    /// To judge: nothing is saved.
    Eval,
}

/// What one pass over a micro-batch works with.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    pub store: &'a Store,
    pub mode: Mode,
    pub seed: u64,
    pub epoch: u64,
    /// Global ids of the micro-batch's samples, in order.
    pub ids: &'a [u64],
    /// Positions of each sample that are not padding, from the first; all where absent.
    pub lengths: Option<&'a [u32]>,
    /// The epoch, the ids and the lengths where a GPU reads them, as [`keys::staged`](crate::kernels::keys::staged) lays them out.
    pub staged: Option<&'a Tensor>,
    /// What a sample's loss gradient is multiplied with.
    pub scale: f64,
    pub along: Along<'a>,
}

/// What the backward passes of neighbouring layers do for each other.
#[derive(Clone, Copy, Default)]
pub struct Along<'a> {
    /// To whose gradient the layer is to add the sums over all rows of the input's gradient, if it
    /// [`sums`](Layer::sums) them.
    pub sums: Option<ParamId>,
    /// Whether those of the gradient that the layer is given were added already.
    pub summed: bool,
    /// What the input's gradient meets next, which the layer may take it through.
    pub before: Option<Before<'a>>,
    /// Whether the layer after took the gradient through what this one [`met`](Layer::met).
    pub through: bool,
}

impl<'a> Pass<'a> {
    pub fn weight(&self, id: ParamId) -> &Tensor {
        &self.store.weights()[id.0]
    }

    pub fn grad(&self, id: ParamId) -> &Tensor {
        &self.store.grad_views()[id.0]
    }

    pub fn stat(&self, id: StatId) -> &Tensor {
        &self.store.stat_views()[id.0]
    }

    /// The randomness of the layer `stream` for each sample of the micro-batch.
    pub fn keys(&self, stream: u64) -> Keys<'a> {
        Keys {
            layer: Random::new(self.seed, stream),
            epoch: self.epoch,
            ids: self.ids,
            on_device: self.staged,
        }
    }
}
