//! Batch normalisation on a card: every channel has its own statistics.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::super::channels::card::Norm;
use super::{BatchNorm, Clip, Cut, Grads, Running};

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
        onto: Option<(&Tensor, Clip)>,
    ) -> Result<(Tensor, Tensor)> {
        let running = running.map(|r| (r.mean, r.var, r.momentum));
        self.with_clip(x, onto)?.forward(device, x, running, onto.map(|(onto, _)| onto))
    }

    /// With the clip of what is added to the output, where there is such.
    fn with_clip(&self, x: &Tensor, with: Option<(&Tensor, Clip)>) -> Result<Norm<'_>> {
        Ok(Norm { act: with.map_or(self.act, |(_, act)| act), ..self.norm(x)? })
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
        (dy, through): (&Tensor, Option<(&Tensor, Clip)>),
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        self.with_clip(x, through)?.backward(device, x, kept, (dy, through.map(|(y, _)| y)), grads, want)
    }
}
