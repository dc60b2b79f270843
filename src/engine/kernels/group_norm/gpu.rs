//! CUDA bindings of group normalization: each sample is its own unit.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::channels::gpu::ChannelNorm;
use super::{GroupNormKernel, WeightBiasGrads};

impl GroupNormKernel<'_> {
    fn norm(&self, x: &Tensor) -> Result<ChannelNorm<'_>> {
        let Self { weight, bias, act, eps, groups } = *self;
        Ok(ChannelNorm { weight, bias, act, eps, groups, layout: self.layout(x)? })
    }

    pub(super) fn forward_cuda(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.norm(x)?.forward(device, x, None, None)
    }

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        saved_stats: &Tensor,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        self.norm(x)?.backward(device, x, saved_stats, (dy, None), grads, needs_input_grad)
    }
}
