//! Group normalisation, channels last, with a clip fused: each sample by itself, over groups of channels.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};

use super::channels::{Affine, Cut, card_workspace, moments};
use super::clip::Clip;
#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::Grads;
use super::{Elem, Real, cpu, reference};
use crate::layers::At;
use crate::with_elem;

/// The operands: `weight` and `bias` are (channels), `x` is (batch, height, width, channels).
pub struct GroupNorm<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: Clip,
    pub eps: f64,
    /// Groups the channels are cut into.
    pub groups: usize,
}

impl GroupNorm<'_> {
    fn cut(&self, x: &Tensor) -> Result<Cut> {
        let channels = self.weight.elem_count();
        let rows = x.elem_count() / channels;
        Ok(Cut { channels, rows, unit: rows / x.dim(0)?.max(1) })
    }

    /// The reference.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, channels) = (x.dim(0)?, self.weight.elem_count());
        let rows =
            x.reshape((batch, x.elem_count() / batch / channels, self.groups, channels / self.groups))?;
        let mean = rows.mean_keepdim(3)?.mean_keepdim(1)?;
        let from = rows.broadcast_sub(&mean)?;
        let var = from.sqr()?.mean_keepdim(3)?.mean_keepdim(1)?;
        let y = from.broadcast_mul(&(var + self.eps)?.sqrt()?.recip()?)?.reshape(x.shape())?;
        self.act.reference(&y.broadcast_mul(self.weight)?.broadcast_add(self.bias)?)
    }

    /// The output and (batch, 2, groups) of mean and one over the deviation, in the type computed with;
    /// nothing but zeros where the reference ran, which does not use them.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.forward_card(device, x);
        }
        if !reference::has_body(x) {
            let kept = Tensor::zeros((x.dim(0)?, 2, self.groups), DType::F32, x.device())?;
            return Ok((self.reference(x)?, kept));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x))
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let (cut, values) = (self.cut(x)?, cpu::view::<T>(x)?);
        let size = cut.channels / self.groups;
        let mut kept = Vec::with_capacity(cut.units() * 2 * self.groups);
        for [means, m2s] in moments(&values, &cut) {
            let mean_of = |means: &[f64]| means.iter().sum::<f64>() / size as f64;
            let mut rstds = Vec::with_capacity(self.groups);
            for (means, m2s) in means.chunks_exact(size).zip(m2s.chunks_exact(size)) {
                let mean = mean_of(means);
                let apart: f64 = means.iter().map(|m| (m - mean) * (m - mean)).sum();
                let var = (mean_of(m2s) / cut.unit as f64) + apart / size as f64;
                kept.push(T::Acc::of(mean));
                rstds.push(T::Acc::of(1.0 / (var + self.eps).sqrt()));
            }
            kept.extend(rstds);
        }
        let mut y = cpu::fresh::<T>(values.len());
        self.affine::<T>(&kept)?.apply(&values, &mut y, &cut, self.act);
        Ok((cpu::tensor(y, x.shape())?, cpu::tensor(kept, (cut.units(), 2, self.groups))?))
    }

    /// What is done to each value, from (batch, 2, groups).
    fn affine<T: Elem>(&self, kept: &[T::Acc]) -> Result<Affine<T::Acc>> {
        let (weight, bias) = (cpu::view::<T>(self.weight)?, cpu::view::<T>(self.bias)?);
        let size = weight.len() / self.groups;
        let numbers = |kept: &[T::Acc]| {
            let (mean, rstd) = kept.split_at(self.groups);
            [
                (0..weight.len()).map(|c| mean[c / size]).collect(),
                weight.iter().enumerate().map(|(c, w)| rstd[c / size] * w.up()).collect(),
                bias.iter().map(|b| b.up()).collect(),
            ]
        };
        Ok(Affine(kept.chunks_exact(2 * self.groups).map(numbers).collect()))
    }

    /// Adds the parameters' gradients to `grads` and returns the input's where it is wanted. `kept` is
    /// what [`forward`](Self::forward) gave.
    pub fn backward(
        &self,
        x: &Tensor,
        kept: &Tensor,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.backward_card(device, x, kept, dy, grads, want);
        }
        if !reference::has_body(x) {
            let found = reference::gradients(&[x, self.weight, self.bias], dy, |t| {
                GroupNorm { weight: &t[1], bias: &t[2], ..*self }.reference(&t[0])
            })?;
            return reference::share_out(found, grads, want);
        }
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, kept, dy, grads, want))
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        kept: &Tensor,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let (cut, values, d) = (self.cut(x)?, cpu::view::<T>(x)?, cpu::view::<T>(dy)?);
        let (kept, weight) = (cpu::view::<T::Acc>(kept)?, cpu::view::<T>(self.weight)?);
        let affine = self.affine::<T>(&kept)?;
        let sums = affine.sums(&values, &d, &cut, self.act);
        let (size, groups) = (cut.channels / self.groups, self.groups);
        let rstd = |unit: usize, c: usize| kept[(2 * unit + 1) * groups + c / size].wide();
        let (mut dw, mut db) = (vec![0f64; cut.channels], vec![0f64; cut.channels]);
        for (unit, [sum, cross]) in sums.iter().enumerate() {
            db.iter_mut().zip(sum).for_each(|(b, s)| *b += s);
            dw.iter_mut().zip(cross).enumerate().for_each(|(c, (w, k))| *w += k * rstd(unit, c));
        }
        cpu::update::<T::Acc, _>(grads.weight, |into| {
            into.iter_mut().zip(&dw).for_each(|(a, b)| *a += T::Acc::of(*b))
        })?;
        if let Some(bias) = grads.bias {
            cpu::update::<T::Acc, _>(bias, |into| {
                into.iter_mut().zip(&db).for_each(|(a, b)| *a += T::Acc::of(*b))
            })?;
        }
        if !want {
            return Ok(None);
        }
        let n = (cut.unit * size) as f64;
        let weighed = |sums: &[f64], group: usize| -> f64 {
            let of = group * size..(group + 1) * size;
            sums[of.clone()].iter().zip(&weight[of]).map(|(s, w)| s * w.up().wide()).sum::<f64>() / n
        };
        let pull = |(unit, [sum, cross]): (usize, &[Vec<f64>; 2])| {
            let (mut slope, mut level) = (Vec::with_capacity(cut.channels), Vec::with_capacity(cut.channels));
            for group in 0..groups {
                let r = rstd(unit, group * size);
                slope.extend(std::iter::repeat_n(T::Acc::of(weighed(cross, group) * r * r * r), size));
                level.extend(std::iter::repeat_n(T::Acc::of(weighed(sum, group) * r), size));
            }
            [slope, level]
        };
        let pull: Vec<[Vec<T::Acc>; 2]> = sums.iter().enumerate().map(pull).collect();
        Ok(Some(cpu::tensor(affine.backward(&values, &d, &cut, self.act, &pull), x.shape())?))
    }
}

/// Bytes of temporaries of the forward pass and of the backward pass, as batch norm's, but that the sums
/// are gone when the affine map is made, and the parameters' gradients are added up in f64.
pub fn workspace(at: At, cut: &Cut, groups: usize) -> (u64, u64) {
    let dtype = at.dtype;
    if at.on.is_cuda() {
        let (forward, backward) = card_workspace(dtype, cut, groups);
        return (forward as u64, backward as u64);
    }
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let (partials, numbers) = (acc * cut.partials(), cut.units() * cut.channels);
    let forward = (16 * numbers + partials).max(3 * acc * numbers);
    let backward = (16 + 3 * acc) * numbers + partials.max(16 * cut.channels + 2 * acc * numbers);
    (forward as u64, backward as u64)
}
