//! Batch normalization over groups of samples (ghost batches), channels last, with a clamp activation fused.
//!
//! The forward pass saves only mean and rstd per group and channel. The backward pass recomputes everything else from
//! the input as it reads it.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::channels::{Affine, ChannelLayout, cuda_workspace, moments};
use super::clamp::ClampActivation;
#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::WeightBiasGrads;
use super::{Activation, Elem, Real, add, cpu, kernel_timer, reference};
use crate::base::MicroBatchSpec;
use crate::with_elem;

/// The operands: `weight` and `bias` are (channels).
pub struct BatchNormKernel<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: ClampActivation,
    pub eps: f64,
    /// Samples normalized together; the last group of a batch may have fewer.
    pub group_size: usize,
}

/// Running mean and variance, (channels) each, and the momentum a new group's statistics enter with.
pub struct RunningStats<'a> {
    pub mean: &'a Tensor,
    pub var: &'a Tensor,
    pub momentum: f64,
}

impl BatchNormKernel<'_> {
    fn layout(&self, x: &Tensor) -> Result<ChannelLayout> {
        let channels = self.weight.elem_count();
        let rows = x.elem_count() / channels;
        let per_sample = rows / x.dim(0)?.max(1);
        Ok(ChannelLayout { channels, rows, rows_per_unit: self.group_size * per_sample })
    }

    /// Reference implementation: one group after another, in batch order.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let groups = self.groups(x)?;
        let normalize_group = |x: &Tensor| {
            let (mean, var) = reference_moments(x)?;
            self.normalize(x, &mean, &(var + self.eps)?.sqrt()?.recip()?)
        };
        Tensor::cat(&groups.iter().map(normalize_group).collect::<Result<Vec<_>>>()?, 0)
    }

    fn groups(&self, x: &Tensor) -> Result<Vec<Tensor>> {
        let batch = x.dim(0)?;
        (0..batch).step_by(self.group_size).map(|i| x.narrow(0, i, self.group_size.min(batch - i))).collect()
    }

    fn normalize(&self, x: &Tensor, mean: &Tensor, rstd: &Tensor) -> Result<Tensor> {
        let y = x.broadcast_sub(mean)?.broadcast_mul(rstd)?;
        self.act.reference(&y.broadcast_mul(self.weight)?.broadcast_add(self.bias)?)
    }

    /// Returns the output and the saved statistics: (groups, 2, channels) of mean and rstd in the accumulator type.
    /// Updates `running` if present.
    pub fn forward(&self, x: &Tensor, running: Option<&RunningStats>) -> Result<(Tensor, Tensor)> {
        on_cuda!(x, |device| self.forward_cuda(device, x, running, None));
        if !reference::has_cpu_kernel(x) {
            return self.forward_reference(x, running);
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, running))
    }

    /// Like [`forward`](Self::forward), then `act(y + residual)`. CUDA fuses this into the normalization pass where
    /// `fusable_clamp` allows.
    pub fn forward_add_act(
        &self,
        x: &Tensor,
        running: Option<&RunningStats>,
        residual: &Tensor,
        act: Activation,
    ) -> Result<(Tensor, Tensor)> {
        let _scope = kernel_timer::enter(module_path!());
        #[cfg(feature = "cuda")]
        if let (Some(device), Some(act)) = (cuda::device_of(x), self.fusable_clamp(act)) {
            return self.forward_cuda(device, x, running, Some((residual, act)));
        }
        let (y, saved_stats) = self.forward(x, running)?;
        Ok((add::inplace(&y, residual, act)?, saved_stats))
    }

    /// `act` as a clamp, if the normalization pass can apply it after the residual add.
    #[cfg(feature = "cuda")]
    fn fusable_clamp(&self, act: Activation) -> Option<ClampActivation> {
        ClampActivation::from_activation(act).filter(|_| self.act == ClampActivation::Identity)
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor, running: Option<&RunningStats>) -> Result<(Tensor, Tensor)> {
        let (layout, values) = (self.layout(x)?, cpu::view::<T>(x)?);
        let unit_moments = moments(&values, &layout);
        let mut saved_stats = Vec::with_capacity(layout.units() * 2 * layout.channels);
        for (unit, [mean, m2]) in unit_moments.iter().enumerate() {
            let n = layout.unit_rows(unit) as f64;
            saved_stats.extend(mean.iter().map(|m| T::Acc::of_f64(*m)));
            saved_stats.extend(m2.iter().map(|m2| T::Acc::of_f64(1.0 / (m2 / n + self.eps).sqrt())));
            if let Some(running) = running {
                let unbiased: Vec<f64> = m2.iter().map(|m2| m2 / (n - 1.0).max(1.0)).collect();
                update_running_stat::<T::Acc>(running.mean, mean, running.momentum)?;
                update_running_stat::<T::Acc>(running.var, &unbiased, running.momentum)?;
            }
        }
        let saved_stats = cpu::tensor(saved_stats, (layout.units(), 2, layout.channels))?;
        Ok((self.recompute_output_cpu::<T>(x, &saved_stats)?, saved_stats))
    }

    /// Recomputes the output from the input and the statistics that [`forward`](Self::forward) saved.
    pub fn recompute_output(&self, x: &Tensor, saved_stats: &Tensor) -> Result<Tensor> {
        on_cuda!(x, |device| self.recompute_output_cuda(device, x, saved_stats));
        with_elem!(x.dtype(), T => self.recompute_output_cpu::<T>(x, saved_stats))
    }

    fn recompute_output_cpu<T: Elem>(&self, x: &Tensor, saved_stats: &Tensor) -> Result<Tensor> {
        let (layout, values, saved_stats) =
            (self.layout(x)?, cpu::view::<T>(x)?, cpu::view::<T::Acc>(saved_stats)?);
        let mut y = cpu::uninit::<T>(values.len());
        self.affine::<T>(&saved_stats)?.apply(&values, &mut y, &layout, self.act);
        cpu::tensor(y, x.shape())
    }

    /// The affine map of each value, from statistics of shape (groups, 2, channels).
    fn affine<T: Elem>(&self, saved_stats: &[T::Acc]) -> Result<Affine<T::Acc>> {
        let (weight, bias) = (cpu::view::<T>(self.weight)?, cpu::view::<T>(self.bias)?);
        let c = weight.len();
        let coefficients = |saved_stats: &[T::Acc]| {
            let (mean, rstd) = saved_stats.split_at(c);
            let scale = rstd.iter().zip(&*weight).map(|(r, w)| *r * w.to_acc()).collect();
            [mean.to_vec(), scale, bias.iter().map(|b| b.to_acc()).collect()]
        };
        Ok(Affine(saved_stats.chunks_exact(2 * c).map(coefficients).collect()))
    }

    /// The output under the running statistics.
    pub fn evaluate(&self, x: &Tensor, running: &RunningStats) -> Result<Tensor> {
        on_cuda!(x, |device| self.evaluate_cuda(device, x, running));
        if !reference::has_cpu_kernel(x) {
            let cast = |t: &Tensor| t.to_dtype(x.dtype());
            return self.normalize(
                x,
                &cast(running.mean)?,
                &(cast(running.var)? + self.eps)?.sqrt()?.recip()?,
            );
        }
        with_elem!(x.dtype(), T => self.evaluate_cpu::<T>(x, running))
    }

    fn evaluate_cpu<T: Elem>(&self, x: &Tensor, running: &RunningStats) -> Result<Tensor> {
        let values = cpu::view::<T>(x)?;
        let (mean, var) = (cpu::view::<T::Acc>(running.mean)?, cpu::view::<T::Acc>(running.var)?);
        let rstd = var.iter().map(|v| T::Acc::of_f64(1.0 / (v.as_f64() + self.eps).sqrt()));
        let saved_stats: Vec<T::Acc> = mean.iter().copied().chain(rstd).collect();
        let mut y = cpu::uninit::<T>(values.len());
        let layout = self.layout(x)?;
        self.affine::<T>(&saved_stats)?.apply(
            &values,
            &mut y,
            &ChannelLayout { rows_per_unit: layout.rows, ..layout },
            self.act,
        );
        cpu::tensor(y, x.shape())
    }

    /// The input gradient of [`evaluate`](Self::evaluate), from the gradient before its activation.
    pub fn evaluate_backward(&self, dy: &Tensor, running: &RunningStats) -> Result<Tensor> {
        let Self { weight, eps, group_size, .. } = *self;
        let (bias, mean) = (&self.bias.zeros_like()?, &running.mean.zeros_like()?);
        let scale = BatchNormKernel { weight, bias, act: ClampActivation::Identity, eps, group_size };
        scale.evaluate(dy, &RunningStats { mean, var: running.var, momentum: running.momentum })
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
        on_cuda!(x, |device| self.backward_cuda(device, x, saved_stats, (dy, None), grads, needs_input_grad));
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, saved_stats, dy, grads, needs_input_grad))
    }

    /// Like [`backward`](Self::backward), for an output `y` of [`forward_add_act`](Self::forward_add_act) with `act`.
    /// `dy` becomes, in place, the gradient before `act`; CUDA does that in the pass that reduces it.
    pub fn backward_add_act(
        &self,
        x: &Tensor,
        saved_stats: &Tensor,
        dy: &Tensor,
        (y, act): (&Tensor, Activation),
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let _scope = kernel_timer::enter(module_path!());
        #[cfg(feature = "cuda")]
        if let (Some(device), Some(act)) = (cuda::device_of(x), self.fusable_clamp(act)) {
            return self.backward_cuda(device, x, saved_stats, (dy, Some((y, act))), grads, needs_input_grad);
        }
        add::activation_backward_inplace(y, dy, act)?;
        self.backward(x, saved_stats, dy, grads, needs_input_grad)
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
        let saved_stats = cpu::view::<T::Acc>(saved_stats)?;
        let affine = self.affine::<T>(&saved_stats)?;
        let sums = affine.gradient_sums(&values, &d, &layout, self.act);
        let rstd = |unit: usize| saved_stats[(2 * unit + 1) * layout.channels..][..layout.channels].iter();
        for (unit, [sum, cross]) in sums.iter().enumerate() {
            let weight_grad = cross.iter().zip(rstd(unit)).map(|(k, r)| k * r.as_f64());
            if let Some(weight) = grads.weight {
                accumulate::<T::Acc>(weight, weight_grad)?;
            }
            if let Some(bias) = grads.bias {
                accumulate::<T::Acc>(bias, sum.iter().copied())?;
            }
        }
        if !needs_input_grad {
            return Ok(None);
        }
        let correction = |(unit, [sum, cross]): (usize, &[Vec<f64>; 2])| {
            let n = layout.unit_rows(unit) as f64;
            let scale = &affine.0[unit][1];
            let slopes = cross.iter().zip(rstd(unit)).zip(scale);
            let levels = sum.iter().zip(scale);
            [
                slopes
                    .map(|((k, r), a)| T::Acc::of_f64(k * r.as_f64() * r.as_f64() / n * a.as_f64()))
                    .collect(),
                levels.map(|(s, a)| T::Acc::of_f64(s / n * a.as_f64())).collect(),
            ]
        };
        let corrections: Vec<[Vec<T::Acc>; 2]> = sums.iter().enumerate().map(correction).collect();
        Ok(Some(cpu::tensor(affine.backward(&values, &d, &layout, self.act, &corrections), x.shape())?))
    }

    fn forward_reference(&self, x: &Tensor, running: Option<&RunningStats>) -> Result<(Tensor, Tensor)> {
        let (mut outputs, mut saved_stats) = (Vec::new(), Vec::new());
        for x in self.groups(x)? {
            let (mean, var) = reference_moments(&x)?;
            let rstd = (&var + self.eps)?.sqrt()?.recip()?;
            outputs.push(self.normalize(&x, &mean, &rstd)?);
            if let Some(running) = running {
                let n = (x.elem_count() / mean.elem_count()) as f64;
                for (into, new) in [(running.mean, &mean), (running.var, &(var * (n / (n - 1.0).max(1.0)))?)]
                {
                    let new = (new.to_dtype(into.dtype())? * running.momentum)?;
                    into.slice_set(&((into * (1.0 - running.momentum))? + new)?, 0, 0)?;
                }
            }
            saved_stats.push(Tensor::stack(&[mean, rstd], 0)?);
        }
        Ok((Tensor::cat(&outputs, 0)?, Tensor::stack(&saved_stats, 0)?))
    }
}

/// Bytes of temporaries of the forward and the backward pass. Each unit and channel takes two f64 sums and three affine
/// coefficients; the backward pass takes two more coefficients.
pub fn workspace(at: MicroBatchSpec, layout: &ChannelLayout) -> (u64, u64) {
    let dtype = at.dtype;
    if at.backend.is_reference() {
        return (0, 0);
    }
    if at.backend.is_cuda() {
        let (forward, backward) = cuda_workspace(dtype, layout, layout.channels);
        return (forward as u64, backward as u64);
    }
    let acc = if dtype == DType::F64 { 8 } else { 4 };
    let (partials, numbers) = (acc * layout.num_partials(), layout.units() * layout.channels);
    // Two lists of sums and three of coefficients per unit; the backward pass has a further two, less a temporary one.
    let lists = |count: usize| count * size_of::<Vec<f64>>() * layout.units();
    let forward = 16 * numbers + partials.max(3 * acc * numbers) + lists(5);
    let backward = (16 + 3 * acc) * numbers + partials.max(2 * acc * numbers) + lists(8);
    (forward as u64, backward as u64)
}

/// Bytes of temporaries of [`evaluate`](BatchNormKernel::evaluate) and of
/// [`evaluate_backward`](BatchNormKernel::evaluate_backward): statistics and coefficients, and the zeros that the
/// second replaces two of them with.
pub fn evaluate_workspace(at: MicroBatchSpec, channels: usize) -> (u64, u64) {
    let acc = if at.dtype == DType::F64 { 8 } else { 4 };
    match at.backend.is_reference() {
        true => (0, 0),
        false => ((5 * channels * acc) as u64, (7 * channels * acc) as u64),
    }
}

/// `into = (1 - momentum) into + momentum new`.
fn update_running_stat<R: Real>(into: &Tensor, new: &[f64], momentum: f64) -> Result<()> {
    cpu::with_slice_mut::<R, _>(into, |into| {
        into.iter_mut()
            .zip(new)
            .for_each(|(a, b)| *a = R::of_f64((1.0 - momentum) * a.as_f64() + momentum * b))
    })
}

fn accumulate<R: Real>(into: &Tensor, new: impl Iterator<Item = f64>) -> Result<()> {
    cpu::with_slice_mut::<R, _>(into, |into| into.iter_mut().zip(new).for_each(|(a, b)| *a += R::of_f64(b)))
}

fn reference_moments(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = x.flatten_to(x.rank() - 2)?;
    let mean = rows.mean(0)?;
    let var = rows.broadcast_sub(&mean)?.sqr()?.mean(0)?;
    Ok((mean, var))
}
