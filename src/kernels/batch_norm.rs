//! Batch normalisation over groups of samples, channels last, with a clip fused.
//!
//! Only the mean and one over the deviation, of each group and channel, are kept; everything else the
//! backward pass needs is made again from the input while it is read.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};

use super::channels::{Affine, Cut, card_workspace, moments};
use super::clip::Clip;
#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::Grads;
use super::{Activation, Elem, Real, add, cpu, reference};
use crate::layers::At;
use crate::with_elem;

/// The operands: `weight` and `bias` are (channels).
pub struct BatchNorm<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: Clip,
    pub eps: f64,
    /// Samples normalised together; the last group of a batch may have fewer.
    pub group: usize,
}

/// Running mean and variance, (channels) each, and the share a new group has in them.
pub struct Running<'a> {
    pub mean: &'a Tensor,
    pub var: &'a Tensor,
    pub momentum: f64,
}

impl BatchNorm<'_> {
    fn cut(&self, x: &Tensor) -> Result<Cut> {
        let channels = self.weight.elem_count();
        let rows = x.elem_count() / channels;
        let per_sample = rows / x.dim(0)?.max(1);
        Ok(Cut { channels, rows, unit: self.group * per_sample })
    }

    /// The reference: group by group, in the order of the batch.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let groups = self.groups(x)?;
        let normal = |x: &Tensor| {
            let (mean, var) = plain_moments(x)?;
            self.scaled(x, &mean, &(var + self.eps)?.sqrt()?.recip()?)
        };
        Tensor::cat(&groups.iter().map(normal).collect::<Result<Vec<_>>>()?, 0)
    }

    fn groups(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let batch = x.dim(0)?;
        (0..batch).step_by(self.group).map(|i| x.narrow(0, i, self.group.min(batch - i))).collect()
    }

    fn scaled(&self, x: &Tensor, mean: &Tensor, rstd: &Tensor) -> Result<Tensor> {
        let y = x.broadcast_sub(mean)?.broadcast_mul(rstd)?;
        self.act.reference(&y.broadcast_mul(self.weight)?.broadcast_add(self.bias)?)
    }

    /// The output and (groups, 2, channels) of mean and one over the deviation, in the type computed
    /// with; moves `running` where there is one.
    pub fn forward(&self, x: &Tensor, running: Option<&Running>) -> Result<(Tensor, Tensor)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.forward_card(device, x, running, None);
        }
        if !reference::has_body(x) {
            return self.forward_reference(x, running);
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, running))
    }

    /// As [`forward`](Self::forward), with `onto` added to the output, and `act` of the sum: in the same pass on a card.
    pub fn forward_onto(
        &self,
        x: &Tensor,
        running: Option<&Running>,
        onto: &Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        #[cfg(feature = "cuda")]
        if let (Some(device), Some(act)) = (cuda::of(x), self.joined(act)) {
            return self.forward_card(device, x, running, Some((onto, act)));
        }
        let (y, kept) = self.forward(x, running)?;
        Ok((add::into(&y, onto, act)?, kept))
    }

    /// The activation of a sum as a clip, where it can be made in this normalisation's passes.
    #[cfg(feature = "cuda")]
    fn joined(&self, act: Activation) -> Option<Clip> {
        Clip::of(act).filter(|_| self.act == Clip::Nothing)
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor, running: Option<&Running>) -> Result<(Tensor, Tensor)> {
        let (cut, values) = (self.cut(x)?, cpu::view::<T>(x)?);
        let found = moments(&values, &cut);
        let mut kept = Vec::with_capacity(cut.units() * 2 * cut.channels);
        for (unit, [mean, m2]) in found.iter().enumerate() {
            let n = cut.unit_rows(unit) as f64;
            kept.extend(mean.iter().map(|m| T::Acc::of(*m)));
            kept.extend(m2.iter().map(|m2| T::Acc::of(1.0 / (m2 / n + self.eps).sqrt())));
            if let Some(running) = running {
                let unbiased: Vec<f64> = m2.iter().map(|m2| m2 / (n - 1.0).max(1.0)).collect();
                mix::<T::Acc>(running.mean, mean, running.momentum)?;
                mix::<T::Acc>(running.var, &unbiased, running.momentum)?;
            }
        }
        let kept = cpu::tensor(kept, (cut.units(), 2, cut.channels))?;
        Ok((self.again_cpu::<T>(x, &kept)?, kept))
    }

    /// The output, from the input and what [`forward`](Self::forward) kept.
    pub fn again(&self, x: &Tensor, kept: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.again_card(device, x, kept);
        }
        if !reference::has_body(x) {
            return self.reference(x);
        }
        with_elem!(x.dtype(), T => self.again_cpu::<T>(x, kept))
    }

    fn again_cpu<T: Elem>(&self, x: &Tensor, kept: &Tensor) -> Result<Tensor> {
        let (cut, values, kept) = (self.cut(x)?, cpu::view::<T>(x)?, cpu::view::<T::Acc>(kept)?);
        let mut y = cpu::fresh::<T>(values.len());
        self.affine::<T>(&kept)?.apply(&values, &mut y, &cut, self.act);
        cpu::tensor(y, x.shape())
    }

    /// What is done to each value, from (groups, 2, channels).
    fn affine<T: Elem>(&self, kept: &[T::Acc]) -> Result<Affine<T::Acc>> {
        let (weight, bias) = (cpu::view::<T>(self.weight)?, cpu::view::<T>(self.bias)?);
        let c = weight.len();
        let numbers = |kept: &[T::Acc]| {
            let (mean, rstd) = kept.split_at(c);
            let scale = rstd.iter().zip(&*weight).map(|(r, w)| *r * w.up()).collect();
            [mean.to_vec(), scale, bias.iter().map(|b| b.up()).collect()]
        };
        Ok(Affine(kept.chunks_exact(2 * c).map(numbers).collect()))
    }

    /// The output by the running statistics.
    pub fn judge(&self, x: &Tensor, running: &Running) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.judge_card(device, x, running);
        }
        if !reference::has_body(x) {
            let of = |t: &Tensor| t.to_dtype(x.dtype());
            return self.scaled(x, &of(running.mean)?, &(of(running.var)? + self.eps)?.sqrt()?.recip()?);
        }
        with_elem!(x.dtype(), T => self.judge_cpu::<T>(x, running))
    }

    fn judge_cpu<T: Elem>(&self, x: &Tensor, running: &Running) -> Result<Tensor> {
        let values = cpu::view::<T>(x)?;
        let (mean, var) = (cpu::view::<T::Acc>(running.mean)?, cpu::view::<T::Acc>(running.var)?);
        let rstd = var.iter().map(|v| T::Acc::of(1.0 / (v.wide() + self.eps).sqrt()));
        let kept: Vec<T::Acc> = mean.iter().copied().chain(rstd).collect();
        let mut y = cpu::fresh::<T>(values.len());
        let cut = self.cut(x)?;
        self.affine::<T>(&kept)?.apply(&values, &mut y, &Cut { unit: cut.rows, ..cut }, self.act);
        cpu::tensor(y, x.shape())
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
            return self.backward_card(device, x, kept, (dy, None), grads, want);
        }
        if !reference::has_body(x) {
            let found = reference::gradients(&[x, self.weight, self.bias], dy, |t| {
                BatchNorm { weight: &t[1], bias: &t[2], ..*self }.reference(&t[0])
            })?;
            return reference::share_out(found, grads, want);
        }
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, kept, dy, grads, want))
    }

    /// As [`backward`](Self::backward) where [`forward_onto`](Self::forward_onto) made `y` with `act`: `dy` becomes the
    /// gradient before that, in the pass that sums it on a card.
    pub fn backward_through(
        &self,
        x: &Tensor,
        kept: &Tensor,
        dy: &Tensor,
        (y, act): (&Tensor, Activation),
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let (Some(device), Some(act)) = (cuda::of(x), self.joined(act)) {
            return self.backward_card(device, x, kept, (dy, Some((y, act))), grads, want);
        }
        add::through(y, dy, act)?;
        self.backward(x, kept, dy, grads, want)
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
        let kept = cpu::view::<T::Acc>(kept)?;
        let affine = self.affine::<T>(&kept)?;
        let sums = affine.sums(&values, &d, &cut, self.act);
        let rstd = |unit: usize| kept[(2 * unit + 1) * cut.channels..][..cut.channels].iter();
        for (unit, [sum, cross]) in sums.iter().enumerate() {
            let along = cross.iter().zip(rstd(unit)).map(|(k, r)| k * r.wide());
            add_all::<T::Acc>(grads.weight, along)?;
            if let Some(bias) = grads.bias {
                add_all::<T::Acc>(bias, sum.iter().copied())?;
            }
        }
        if !want {
            return Ok(None);
        }
        let pull = |(unit, [sum, cross]): (usize, &[Vec<f64>; 2])| {
            let n = cut.unit_rows(unit) as f64;
            let scale = &affine.0[unit][1];
            let slopes = cross.iter().zip(rstd(unit)).zip(scale);
            let levels = sum.iter().zip(scale);
            [
                slopes.map(|((k, r), a)| T::Acc::of(k * r.wide() * r.wide() / n * a.wide())).collect(),
                levels.map(|(s, a)| T::Acc::of(s / n * a.wide())).collect(),
            ]
        };
        let pull: Vec<[Vec<T::Acc>; 2]> = sums.iter().enumerate().map(pull).collect();
        Ok(Some(cpu::tensor(affine.backward(&values, &d, &cut, self.act, &pull), x.shape())?))
    }

    fn forward_reference(&self, x: &Tensor, running: Option<&Running>) -> Result<(Tensor, Tensor)> {
        let (mut outputs, mut kept) = (Vec::new(), Vec::new());
        for x in self.groups(x)? {
            let (mean, var) = plain_moments(&x)?;
            let rstd = (&var + self.eps)?.sqrt()?.recip()?;
            outputs.push(self.scaled(&x, &mean, &rstd)?);
            if let Some(running) = running {
                let n = (x.elem_count() / mean.elem_count()) as f64;
                for (into, new) in [(running.mean, &mean), (running.var, &(var * (n / (n - 1.0).max(1.0)))?)]
                {
                    let new = (new.to_dtype(into.dtype())? * running.momentum)?;
                    into.slice_set(&((into * (1.0 - running.momentum))? + new)?, 0, 0)?;
                }
            }
            kept.push(Tensor::stack(&[mean, rstd], 0)?);
        }
        Ok((Tensor::cat(&outputs, 0)?, Tensor::stack(&kept, 0)?))
    }
}

/// Bytes of temporaries of the forward pass and of the backward pass. Of each unit and channel there are
/// two sums in f64, three numbers of the affine map, and two more on the way back.
pub fn workspace(at: At, cut: &Cut) -> (u64, u64) {
    let dtype = at.dtype;
    if at.on.is_cuda() {
        let (forward, backward) = card_workspace(dtype, cut, cut.channels);
        return (forward as u64, backward as u64);
    }
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let (partials, numbers) = (acc * cut.partials(), cut.units() * cut.channels);
    let forward = 16 * numbers + partials.max(3 * acc * numbers);
    let backward = (16 + 3 * acc) * numbers + partials.max(2 * acc * numbers);
    (forward as u64, backward as u64)
}

/// `into = (1 - share) into + share new`.
fn mix<R: Real>(into: &Tensor, new: &[f64], share: f64) -> Result<()> {
    cpu::update::<R, _>(into, |into| {
        into.iter_mut().zip(new).for_each(|(a, b)| *a = R::of((1.0 - share) * a.wide() + share * b))
    })
}

fn add_all<R: Real>(into: &Tensor, new: impl Iterator<Item = f64>) -> Result<()> {
    cpu::update::<R, _>(into, |into| into.iter_mut().zip(new).for_each(|(a, b)| *a += R::of(b)))
}

fn plain_moments(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = x.flatten_to(x.rank() - 2)?;
    let mean = rows.mean(0)?;
    let var = rows.broadcast_sub(&mean)?.sqr()?.mean(0)?;
    Ok((mean, var))
}
