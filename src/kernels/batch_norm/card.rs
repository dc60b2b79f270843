//! Batch normalisation on a card: every channel has its own statistics.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::channels::card::Norm;
use super::{BatchNorm, Cut, Grads, Running};

impl BatchNorm<'_> {
    fn norm(&self, x: &Tensor) -> Result<Norm<'_>> {
        let cut = self.cut(x)?;
        let Self { weight, bias, act, eps, .. } = *self;
        Ok(Norm { weight, bias, act, eps, cut, groups: cut.channels })
    }

    pub(super) fn forward_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        running: Option<&Running>,
    ) -> Result<(Tensor, Tensor)> {
        self.norm(x)?.forward(device, x, running.map(|r| (r.mean, r.var, r.momentum)))
    }

    pub(super) fn again_card(&self, device: &CudaDevice, x: &Tensor, kept: &Tensor) -> Result<Tensor> {
        self.norm(x)?.again(device, x, kept)
    }

    pub(super) fn judge_card(&self, device: &CudaDevice, x: &Tensor, running: &Running) -> Result<Tensor> {
        let norm = self.norm(x)?;
        let cut = Cut { unit: norm.cut.rows.max(1), ..norm.cut };
        Norm { cut, ..norm }.judge(device, x, running.mean, running.var)
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
        self.norm(x)?.backward(device, x, kept, dy, grads, want)
    }
}
