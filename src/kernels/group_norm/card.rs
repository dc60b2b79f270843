//! Group normalisation on a card: every sample is a unit of its own.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::channels::card::Norm;
use super::{Grads, GroupNorm};

impl GroupNorm<'_> {
    fn norm(&self, x: &Tensor) -> Result<Norm<'_>> {
        let Self { weight, bias, act, eps, groups } = *self;
        Ok(Norm { weight, bias, act, eps, groups, cut: self.cut(x)? })
    }

    pub(super) fn forward_card(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.norm(x)?.forward(device, x, None, None)
    }

    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        kept: &Tensor,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        self.norm(x)?.backward(device, x, kept, (dy, None), grads, want)
    }
}
