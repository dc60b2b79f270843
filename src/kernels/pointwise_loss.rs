//! Elementwise losses, fused with the linear layer before them: squared error, Huber, and binary cross-entropy with
//! logits.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::linear::{LinearKernel, WeightBiasGrads, WeightLayout};
use super::metric_sums::{self, MetricSums, PendingMetricSums};
use super::{Activation, Elem, Real, cpu, reference};
use crate::with_elem;

/// The loss of a prediction `p` for a target `t`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PointwiseLossFn {
    /// `(p - t)^2`
    SquaredError,
    /// `|p - t|`
    AbsoluteError,
    /// `(p - t)^2 / 2` up to `delta`, then linear with the same slope.
    Huber { delta: f64 },
    /// `-ln(sigmoid(p))` for `t` = 1, `-ln(1 - sigmoid(p))` for `t` = 0, and their interpolation in between.
    BceWithLogits,
}

impl PointwiseLossFn {
    /// The loss and its derivative.
    #[inline(always)]
    fn value_and_slope<R: Real>(self, p: R, t: R) -> (R, R) {
        match self {
            PointwiseLossFn::SquaredError => ((p - t) * (p - t), (p - t) + (p - t)),
            PointwiseLossFn::AbsoluteError => {
                let d = p - t;
                let sign = if d < R::ZERO { -R::ONE } else { R::ONE };
                (d.abs(), if d == R::ZERO { R::ZERO } else { sign })
            }
            PointwiseLossFn::Huber { delta } => {
                let (d, delta) = (p - t, R::of_f64(delta));
                let far = d.abs() > delta;
                let sign = if d < R::ZERO { -R::ONE } else { R::ONE };
                match far {
                    true => (delta * (d.abs() - R::of_f64(0.5) * delta), sign * delta),
                    false => (R::of_f64(0.5) * d * d, d),
                }
            }
            PointwiseLossFn::BceWithLogits => {
                let small = (-p.abs()).exp();
                let sigmoid = if p < R::ZERO { small / (R::ONE + small) } else { R::ONE / (R::ONE + small) };
                (p.larger(R::ZERO) - p * t + (R::ONE + small).ln(), sigmoid - t)
            }
        }
    }

    /// The reference, elementwise.
    fn reference(self, p: &Tensor, t: &Tensor) -> Result<Tensor> {
        match self {
            PointwiseLossFn::SquaredError => (p - t)?.sqr(),
            PointwiseLossFn::AbsoluteError => (p - t)?.abs(),
            PointwiseLossFn::Huber { delta } => {
                let d = (p - t)?.abs()?;
                let near = d.minimum(&(d.ones_like()? * delta)?)?;
                (near.sqr()? * 0.5)? + ((d - near)? * delta)?
            }
            // ln(1 + e^-|p|), in operations that autograd can differentiate.
            PointwiseLossFn::BceWithLogits => {
                (p.relu()? - (p * t)?)? + (p.abs()?.neg()?.exp()? + 1.0)?.log()?
            }
        }
    }
}

/// `p = x W' + b`, (rows, outputs), compared with as many targets. The loss of a sample is the mean over its values.
pub struct LinearPointwiseLoss<'a> {
    /// (outputs, width)
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub loss_fn: PointwiseLossFn,
}

impl LinearPointwiseLoss<'_> {
    fn linear(&self) -> LinearKernel<'_> {
        LinearKernel {
            weight: self.weight,
            weight_layout: WeightLayout::OutIn,
            bias: self.bias,
            act: Activation::Identity,
        }
    }

    /// The reference: the summed loss in plain candle ops.
    pub fn reference(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let p = self.linear().reference(x)?;
        let targets = targets.to_dtype(x.dtype())?.reshape(p.shape())?;
        let values = p.elem_count() / x.dim(0)?;
        self.loss_fn.reference(&p, &targets)?.sum_all()? / values as f64
    }

    /// Returns the metric sums and, if `needs_input_grad`, the gradient of `scale` times the summed loss with respect to
    /// `x`, and accumulates the gradients of weight and bias into `grads`. `targets` are f32.
    pub fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)> {
        let (p, _) = self.linear().forward(x)?;
        let sums = self.loss_and_grad(&p, targets, Some(scale))?;
        Ok((sums, self.linear().backward(Some(x), None, p, grads, needs_input_grad)?))
    }

    /// The metric sums only.
    pub fn evaluate(&self, x: &Tensor, targets: &Tensor) -> Result<PendingMetricSums> {
        let (p, _) = self.linear().forward(x)?;
        self.loss_and_grad(&p, targets, None)
    }

    /// Metric sums of the predictions; with a `scale`, also turns the predictions into gradients.
    fn loss_and_grad(&self, p: &Tensor, targets: &Tensor, scale: Option<f64>) -> Result<PendingMetricSums> {
        on_cuda!(p, |device| gpu::loss_and_grad(device, self.loss_fn, p, targets, scale));
        if !reference::has_cpu_kernel(p) {
            return Ok(self.loss_and_grad_reference(p, targets, scale)?.into());
        }
        Ok(with_elem!(p.dtype(), T => self.loss_and_grad_cpu::<T>(p, targets, scale)?).into())
    }

    /// In candle's operations; the host counts hits.
    fn loss_and_grad_reference(
        &self,
        p: &Tensor,
        targets: &Tensor,
        scale: Option<f64>,
    ) -> Result<MetricSums> {
        let samples = p.dim(0)?;
        let values = p.elem_count() / samples.max(1);
        let targets = targets.to_dtype(p.dtype())?.reshape(p.shape())?;
        let loss = |p: &Tensor| self.loss_fn.reference(p, &targets)?.sum_all()? / values as f64;
        let hits = match self.loss_fn {
            PointwiseLossFn::BceWithLogits => {
                let wrong = p.gt(0.0)?.ne(&targets.gt(0.5)?)?.reshape((samples, values))?;
                wrong.max(1)?.to_vec1::<u8>()?.iter().filter(|wrong| **wrong == 0).count() as u64
            }
            _ => 0,
        };
        let total = loss(p)?.to_dtype(DType::F64)?.to_scalar()?;
        if let Some(scale) = scale {
            let dy = Tensor::new(scale, p.device())?.to_dtype(p.dtype())?;
            p.slice_set(&reference::gradients(&[p], &dy, |t| loss(&t[0]))?.remove(0), 0, 0)?;
        }
        Ok(MetricSums { loss: total, weight: samples as f64, count: samples as u64, top1: hits, top5: hits })
    }

    fn loss_and_grad_cpu<T: Elem>(
        &self,
        p: &Tensor,
        targets: &Tensor,
        scale: Option<f64>,
    ) -> Result<MetricSums> {
        let samples = p.dim(0)?;
        let values = p.elem_count() / samples.max(1);
        let targets = cpu::view::<f32>(targets)?;
        if targets.len() != samples * values {
            candle_core::bail!("{} targets for {samples} samples of {values} predictions", targets.len());
        }
        let grad_scale = scale.map(|scale| T::Acc::of_f64(scale / values as f64));
        let rows = cpu::rows_per_chunk(values);
        let one = |(p, t): (&mut [T], &[f32])| {
            let (mut loss, mut correct) = (0f64, 0u64);
            for (p, t) in p.chunks_exact_mut(values).zip(t.chunks_exact(values)) {
                let (mut sum, mut all_correct) = (T::Acc::ZERO, true);
                for (p, t) in p.iter_mut().zip(t) {
                    let (prediction, t) = (p.to_acc(), T::Acc::of_f64(*t as f64));
                    let (value, slope) = self.loss_fn.value_and_slope(prediction, t);
                    sum += value;
                    all_correct &= (prediction > T::Acc::ZERO) == (t > T::Acc::of_f64(0.5));
                    if let Some(pull) = grad_scale {
                        *p = T::from_acc(slope * pull);
                    }
                }
                loss += sum.as_f64() / values as f64;
                correct += (all_correct && self.loss_fn == PointwiseLossFn::BceWithLogits) as u64;
            }
            (loss, correct)
        };
        let parts: Vec<(f64, u64)> = cpu::with_slice_mut::<T, _>(p, |p| {
            p.par_chunks_mut(rows * values).zip(targets.par_chunks(rows * values)).map(one).collect()
        })?;
        let mut sums = MetricSums { weight: samples as f64, count: samples as u64, ..MetricSums::default() };
        for (loss, correct) in parts {
            sums.loss += loss;
            sums.top1 += correct;
            sums.top5 += correct;
        }
        Ok(sums)
    }
}

/// Workspace in bytes of `evaluate` and of `forward_backward` for `rows` rows of predictions, with a weight that is frozen
/// or `trained`.
pub fn workspace(dtype: DType, rows: usize, outputs: usize, width: usize, trained: bool) -> (u64, u64) {
    let (forward, backward) =
        super::linear::workspace(dtype, WeightLayout::OutIn, rows, (width, outputs), trained);
    let predictions = cpu::size_in_bytes(dtype, rows * outputs);
    (predictions + forward, predictions + backward)
}

/// Like [`workspace`], in candle's operations.
pub fn reference_workspace(dtype: DType, rows: usize, outputs: usize, width: usize) -> (u64, u64) {
    let (predictions, input) = (rows * outputs, (rows + outputs) * width);
    let evaluate = cpu::size_in_bytes(dtype, 10 * predictions + 2 * input);
    (evaluate, evaluate + cpu::size_in_bytes(dtype, 16 * predictions + 6 * input))
}

/// Like [`workspace`], on a GPU.
pub fn cuda_workspace(dtype: DType, samples: usize, rows: usize, outputs: usize, bias: bool) -> (u64, u64) {
    let evaluate = cpu::size_in_bytes(dtype, rows * outputs) + metric_sums::cuda_workspace(samples);
    let sums = if bias { super::linear::bias_gradient_workspace(dtype, rows, outputs) } else { 0 };
    // The metrics per row are reduced, and freed, before the gradients are computed.
    (evaluate, evaluate.max(cpu::size_in_bytes(dtype, rows * outputs) + sums + 5 * size_of::<f64>() as u64))
}
