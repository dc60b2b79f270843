//! Losses: the end of a network. A loss owns the last linear layer where that saves memory, and computes its input
//! gradient in the same pass as its value, so it saves nothing between passes.

use candle_core::{Result, Tensor};

use super::{Cost, PassContext};
use crate::base::MicroBatchSpec;
use crate::kernels::linear::LinearKernel;
pub use crate::kernels::metric_sums::{MetricSums, PendingMetricSums};
use crate::params::ParamId;

pub trait Loss: Send + Sync {
    fn name(&self) -> &str;

    /// Computes the metric sums of a micro-batch and, if `needs_input_grad`, the gradient of its summed loss, times
    /// `pass.loss_scale`, with respect to `x`. Accumulates the gradients of the loss's own parameters. Never
    /// synchronizes with the device.
    fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)>;

    /// Computes the metric sums only.
    fn evaluate(&self, x: &Tensor, targets: &Tensor, pass: &PassContext) -> Result<PendingMetricSums>;

    /// The linear layer that computes the logits or predictions.
    fn output_layer<'a>(&self, pass: &'a PassContext) -> LinearKernel<'a>;

    /// Logits or predictions per sample.
    fn outputs_per_sample(&self) -> usize;

    /// `input_grad` is the size of the gradient, `backward_workspace` the temporaries of `forward_backward`, and
    /// `forward_workspace` those of `evaluate`.
    fn cost(&self, spec: MicroBatchSpec) -> Cost;

    /// The parameters that it reads, those of a layer that it shares too.
    fn params(&self) -> Vec<ParamId>;
}
