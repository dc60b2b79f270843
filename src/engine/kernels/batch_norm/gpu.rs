//! CUDA bindings of batch normalization: each channel has its own statistics.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::channels::gpu::ChannelNorm;
use super::{BatchNormKernel, ChannelLayout, ClampActivation, RunningStats, WeightBiasGrads};

impl BatchNormKernel<'_> {
    fn norm(&self, x: &Tensor) -> Result<ChannelNorm<'_>> {
        let layout = self.layout(x)?;
        let Self { weight, bias, act, eps, .. } = *self;
        Ok(ChannelNorm { weight, bias, act, eps, layout, groups: layout.channels })
    }

    pub(super) fn forward_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        running: Option<&RunningStats>,
        residual: Option<(&Tensor, ClampActivation)>,
    ) -> Result<(Tensor, Tensor)> {
        let running = running.map(|r| (r.mean, r.var, r.momentum));
        self.with_clamp(x, residual)?.forward(device, x, running, residual.map(|(x, _)| x))
    }

    /// With the clamp that follows the residual add, if there is one.
    fn with_clamp(&self, x: &Tensor, with: Option<(&Tensor, ClampActivation)>) -> Result<ChannelNorm<'_>> {
        Ok(ChannelNorm { act: with.map_or(self.act, |(_, act)| act), ..self.norm(x)? })
    }

    pub(super) fn recompute_output_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        saved_stats: &Tensor,
    ) -> Result<Tensor> {
        self.norm(x)?.recompute_output(device, x, saved_stats)
    }

    pub(super) fn evaluate_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        running: &RunningStats,
    ) -> Result<Tensor> {
        let norm = self.norm(x)?;
        let layout = ChannelLayout { rows_per_unit: norm.layout.rows.max(1), ..norm.layout };
        ChannelNorm { layout, ..norm }.evaluate(device, x, running.mean, running.var)
    }

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        saved_stats: &Tensor,
        (dy, residual_output): (&Tensor, Option<(&Tensor, ClampActivation)>),
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        self.with_clamp(x, residual_output)?.backward(
            device,
            x,
            saved_stats,
            (dy, residual_output.map(|(y, _)| y)),
            grads,
            needs_input_grad,
        )
    }
}
