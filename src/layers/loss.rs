//! Losses: the end of a network. A loss owns the last linear map where that saves memory, and makes
//! its input's gradient in the same pass that computes it, so that nothing is saved in between.

use candle_core::{Result, Tensor};

use super::{At, Cost, Pass};
use crate::kernels::linear::Linear;
pub use crate::kernels::tally::{Counted, Tally};

pub trait Loss: Send + Sync {
    fn name(&self) -> &str;

    /// The tally of a micro-batch and the gradient of its summed loss, times `pass.scale`, with respect
    /// to `x`. Adds the gradients of the loss's own parameters. Waits for nothing.
    fn learn(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<(Counted, Tensor)>;

    /// The tally alone.
    fn judge(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<Counted>;

    /// The linear map whose outputs are judged.
    fn map<'a>(&self, pass: &'a Pass) -> Linear<'a>;

    /// `input` is the gradient's bytes, `backward` the temporaries of `learn`, `forward` those of `judge`.
    fn cost(&self, at: At) -> Cost;

    /// Values of its own parameters.
    fn parameters(&self) -> usize;
}
