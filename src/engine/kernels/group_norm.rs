//! Group normalization, channels last, with a clamp activation fused: statistics per sample and group of channels.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::channels::{Affine, ChannelLayout, cuda_workspace, moments};
use super::clamp::ClampActivation;
use super::linear::WeightBiasGrads;
use super::{Elem, Real, cpu, reference};
use crate::base::MicroBatchSpec;
use crate::with_elem;

/// The operands: `weight` and `bias` are (channels), `x` is (batch, height, width, channels).
pub struct GroupNormKernel<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: ClampActivation,
    pub eps: f64,
    /// Number of channel groups.
    pub groups: usize,
}

impl GroupNormKernel<'_> {
    fn layout(&self, x: &Tensor) -> Result<ChannelLayout> {
        let channels = self.weight.elem_count();
        let rows = x.elem_count() / channels;
        Ok(ChannelLayout { channels, rows, rows_per_unit: rows / x.dim(0)?.max(1) })
    }

    /// Reference implementation.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, channels) = (x.dim(0)?, self.weight.elem_count());
        let rows =
            x.reshape((batch, x.elem_count() / batch / channels, self.groups, channels / self.groups))?;
        let mean = rows.mean_keepdim(3)?.mean_keepdim(1)?;
        let centered = rows.broadcast_sub(&mean)?;
        let var = centered.sqr()?.mean_keepdim(3)?.mean_keepdim(1)?;
        let y = centered.broadcast_mul(&(var + self.eps)?.sqrt()?.recip()?)?.reshape(x.shape())?;
        self.act.reference(&y.broadcast_mul(self.weight)?.broadcast_add(self.bias)?)
    }

    /// Returns the output and the saved statistics: (batch, 2, groups) of mean and rstd in the accumulator type. The
    /// reference returns zeros instead, because its backward pass does not read them.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        on_cuda!(x, |device| self.forward_cuda(device, x));
        if !reference::has_cpu_kernel(x) {
            let saved_stats = Tensor::zeros((x.dim(0)?, 2, self.groups), DType::F32, x.device())?;
            return Ok((self.reference(x)?, saved_stats));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x))
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let (layout, values) = (self.layout(x)?, cpu::view::<T>(x)?);
        let group_channels = layout.channels / self.groups;
        let mut saved_stats = Vec::with_capacity(layout.units() * 2 * self.groups);
        for [means, m2s] in moments(&values, &layout) {
            let mean_of = |means: &[f64]| means.iter().sum::<f64>() / group_channels as f64;
            let mut rstds = Vec::with_capacity(self.groups);
            for (means, m2s) in means.chunks_exact(group_channels).zip(m2s.chunks_exact(group_channels)) {
                let mean = mean_of(means);
                let mean_spread: f64 = means.iter().map(|m| (m - mean) * (m - mean)).sum();
                let var = (mean_of(m2s) / layout.rows_per_unit as f64) + mean_spread / group_channels as f64;
                saved_stats.push(T::Acc::of_f64(mean));
                rstds.push(T::Acc::of_f64(1.0 / (var + self.eps).sqrt()));
            }
            saved_stats.extend(rstds);
        }
        let mut y = cpu::uninit::<T>(values.len());
        self.affine::<T>(&saved_stats)?.apply(&values, &mut y, &layout, self.act);
        Ok((cpu::tensor(y, x.shape())?, cpu::tensor(saved_stats, (layout.units(), 2, self.groups))?))
    }

    /// The affine map of each value, from statistics of shape (batch, 2, groups).
    fn affine<T: Elem>(&self, saved_stats: &[T::Acc]) -> Result<Affine<T::Acc>> {
        let (weight, bias) = (cpu::view::<T>(self.weight)?, cpu::view::<T>(self.bias)?);
        let group_channels = weight.len() / self.groups;
        let coefficients = |saved_stats: &[T::Acc]| {
            let (mean, rstd) = saved_stats.split_at(self.groups);
            [
                (0..weight.len()).map(|c| mean[c / group_channels]).collect(),
                weight.iter().enumerate().map(|(c, w)| rstd[c / group_channels] * w.to_acc()).collect(),
                bias.iter().map(|b| b.to_acc()).collect(),
            ]
        };
        Ok(Affine(saved_stats.chunks_exact(2 * self.groups).map(coefficients).collect()))
    }

    /// Accumulates the parameter gradients into `grads` and returns the input gradient if `needs_input_grad`.
    /// `saved_stats` comes from [`forward`](Self::forward).
    pub fn backward(
        &self,
        x: &Tensor,
        saved_stats: &Tensor,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        on_cuda!(x, |device| self.backward_cuda(device, x, saved_stats, dy, grads, needs_input_grad));
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, saved_stats, dy, grads, needs_input_grad))
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        saved_stats: &Tensor,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let (layout, values, d) = (self.layout(x)?, cpu::view::<T>(x)?, cpu::view::<T>(dy)?);
        let (saved_stats, weight) = (cpu::view::<T::Acc>(saved_stats)?, cpu::view::<T>(self.weight)?);
        let affine = self.affine::<T>(&saved_stats)?;
        let sums = affine.gradient_sums(&values, &d, &layout, self.act);
        let (group_channels, groups) = (layout.channels / self.groups, self.groups);
        let rstd = |unit: usize, c: usize| saved_stats[(2 * unit + 1) * groups + c / group_channels].as_f64();
        let (mut dw, mut db) = (vec![0f64; layout.channels], vec![0f64; layout.channels]);
        for (unit, [sum, cross]) in sums.iter().enumerate() {
            db.iter_mut().zip(sum).for_each(|(b, s)| *b += s);
            dw.iter_mut().zip(cross).enumerate().for_each(|(c, (w, k))| *w += k * rstd(unit, c));
        }
        for (into, sums) in [(grads.weight, &dw), (grads.bias, &db)] {
            let Some(into) = into else { continue };
            cpu::with_slice_mut::<T::Acc, _>(into, |into| {
                into.iter_mut().zip(sums).for_each(|(a, b)| *a += T::Acc::of_f64(*b))
            })?;
        }
        if !needs_input_grad {
            return Ok(None);
        }
        let n = (layout.rows_per_unit * group_channels) as f64;
        let weighted_mean = |sums: &[f64], group: usize| -> f64 {
            let of = group * group_channels..(group + 1) * group_channels;
            sums[of.clone()].iter().zip(&weight[of]).map(|(s, w)| s * w.to_acc().as_f64()).sum::<f64>() / n
        };
        let correction = |(unit, [sum, cross]): (usize, &[Vec<f64>; 2])| {
            let (mut slope, mut level) =
                (Vec::with_capacity(layout.channels), Vec::with_capacity(layout.channels));
            for group in 0..groups {
                let r = rstd(unit, group * group_channels);
                slope.extend(std::iter::repeat_n(
                    T::Acc::of_f64(weighted_mean(cross, group) * r * r * r),
                    group_channels,
                ));
                level.extend(std::iter::repeat_n(
                    T::Acc::of_f64(weighted_mean(sum, group) * r),
                    group_channels,
                ));
            }
            [slope, level]
        };
        let corrections: Vec<[Vec<T::Acc>; 2]> = sums.iter().enumerate().map(correction).collect();
        Ok(Some(cpu::tensor(affine.backward(&values, &d, &layout, self.act, &corrections), x.shape())?))
    }
}

/// Bytes of temporaries of the forward and the backward pass. Like batch norm's, except that the sums are freed before
/// the affine map is built, and parameter gradients are accumulated in f64.
pub fn workspace(at: MicroBatchSpec, layout: &ChannelLayout, groups: usize) -> (u64, u64) {
    let dtype = at.dtype;
    if at.backend.is_reference() {
        return (0, 0);
    }
    if at.backend.is_cuda() {
        let (forward, backward) = cuda_workspace(dtype, layout, groups);
        return (forward as u64, backward as u64);
    }
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let (partials, numbers) = (acc * layout.num_partials(), layout.units() * layout.channels);
    let forward = (16 * numbers + partials).max(3 * acc * numbers);
    let lists = 7 * size_of::<Vec<f64>>() * layout.units();
    let backward = (16 + 3 * acc) * numbers + partials.max(16 * layout.channels + 2 * acc * numbers) + lists;
    (forward as u64, backward as u64)
}
