//! Losses: the end of a network. A loss owns the last linear map where that saves memory, and makes
//! its input's gradient in the same pass that computes it, so that nothing is saved in between.

use candle_core::{Result, Tensor};

use super::{Cost, MicroBatchSpec, PassContext};
use crate::kernels::linear::LinearKernel;
pub use crate::kernels::metric_sums::{MetricSums, PendingMetricSums};

pub trait Loss: Send + Sync {
    fn name(&self) -> &str;

    /// The tally of a micro-batch and the gradient of its summed loss, times `pass.scale`, with respect
    /// to `x`. Adds the gradients of the loss's own parameters. Waits for nothing.
    fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        pass: &PassContext,
    ) -> Result<(PendingMetricSums, Tensor)>;

    /// The tally alone.
    fn evaluate(&self, x: &Tensor, targets: &Tensor, pass: &PassContext) -> Result<PendingMetricSums>;

    /// The linear map whose outputs are judged.
    fn output_layer<'a>(&self, pass: &'a PassContext) -> LinearKernel<'a>;

    /// `input` is the gradient's bytes, `backward` the temporaries of `forward_backward`, `forward` those of `evaluate`.
    fn cost(&self, spec: MicroBatchSpec) -> Cost;

    /// Values of its own parameters.
    fn num_parameters(&self) -> usize;
}
