//! Elementwise losses, fused with the linear layer before them: squared and absolute error, Huber, and binary
//! cross-entropy with logits, plain or focal.
//!
//! The targets of a sample are as many as its predictions, and optionally its weight behind them.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::cross_entropy::ClassWeights;
use super::linear::{LinearKernel, TrainedParts, WeightBiasGrads, WeightLayout};
use super::metric_sums::{self, MetricSums, PendingMetricSums};
use super::parallel::{ParallelChunks, ParallelItems};
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
    /// `BceWithLogits` times (1 - probability of the target)^`gamma`, which fades out what is predicted well.
    Focal { gamma: f64 },
}

impl PointwiseLossFn {
    /// Whether targets are 0 or 1 and predictions are logits.
    fn is_binary(self) -> bool {
        matches!(self, PointwiseLossFn::BceWithLogits | PointwiseLossFn::Focal { .. })
    }

    /// The loss and its derivative. `positive` is the weight of a binary target that is 1.
    #[inline(always)]
    fn value_and_slope<R: Real>(self, p: R, t: R, positive: R) -> (R, R) {
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
            PointwiseLossFn::BceWithLogits | PointwiseLossFn::Focal { .. } => {
                let small = (-p.abs()).exp();
                let (large_part, small_part) = (R::ONE / (R::ONE + small), small / (R::ONE + small));
                let (yes, no) = if p < R::ZERO { (small_part, large_part) } else { (large_part, small_part) };
                // Losses for the targets 1 and 0: -ln(yes) and -ln(no).
                let log = (R::ONE + small).ln();
                let (if_one, if_zero) = ((-p).larger(R::ZERO) + log, p.larger(R::ZERO) + log);
                let (one, zero) = (t * positive, R::ONE - t);
                match self {
                    PointwiseLossFn::Focal { gamma } => {
                        let gamma = R::of_f64(gamma);
                        let (fade_one, fade_zero) = ((-gamma * if_zero).exp(), (-gamma * if_one).exp());
                        let value = one * fade_one * if_one + zero * fade_zero * if_zero;
                        let slope = zero * fade_zero * (yes + gamma * no * if_zero)
                            - one * fade_one * (no + gamma * yes * if_one);
                        (value, slope)
                    }
                    _ => (one * if_one + zero * if_zero, zero * yes - one * no),
                }
            }
        }
    }

    /// The reference, elementwise. `positive`, (outputs), are the weights of binary targets that are 1.
    fn reference(self, p: &Tensor, t: &Tensor, positive: Option<&Tensor>) -> Result<Tensor> {
        match self {
            PointwiseLossFn::SquaredError => (p - t)?.sqr(),
            PointwiseLossFn::AbsoluteError => (p - t)?.abs(),
            PointwiseLossFn::Huber { delta } => {
                let d = (p - t)?.abs()?;
                let near = d.minimum(&(d.ones_like()? * delta)?)?;
                (near.sqr()? * 0.5)? + ((d - near)? * delta)?
            }
            PointwiseLossFn::BceWithLogits | PointwiseLossFn::Focal { .. } => {
                // ln(1 + e^-|p|), in operations that autograd can differentiate.
                let log = (p.abs()?.neg()?.exp()? + 1.0)?.log()?;
                let (if_one, if_zero) = ((p.neg()?.relu()? + &log)?, (p.relu()? + &log)?);
                let one = match positive {
                    Some(weights) => t.broadcast_mul(weights)?,
                    None => t.clone(),
                };
                let (mut one, mut zero) = ((one * &if_one)?, ((1.0 - t)? * &if_zero)?);
                if let PointwiseLossFn::Focal { gamma } = self {
                    one = (one * (if_zero * -gamma)?.exp()?)?;
                    zero = (zero * (if_one * -gamma)?.exp()?)?;
                }
                one + zero
            }
        }
    }
}

/// `p = x W' + b`, (rows, outputs), compared with as many targets. The loss of a sample is the mean over its values,
/// times its weight.
pub struct LinearPointwiseLoss<'a> {
    /// (outputs, width)
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub loss_fn: PointwiseLossFn,
    /// Weights of binary targets that are 1, one per output.
    pub positive_weights: Option<&'a ClassWeights>,
    /// How far binary targets move towards 1/2 (label smoothing): 1 all the way.
    pub smoothing: f64,
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
        let (targets, weights) = self.split_targets(&p, targets)?;
        self.reference_of(&p, &targets, weights.as_ref())
    }

    /// The targets of predictions `p`, in their shape, and the weights of the samples, (samples, 1).
    fn split_targets(&self, p: &Tensor, targets: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let samples = p.dim(0)?;
        let values = p.elem_count() / samples.max(1);
        let targets = targets.to_dtype(p.dtype())?;
        let (targets, weights) = match targets.elem_count() == samples * values {
            true => (targets, None),
            false => {
                let rows = targets.reshape((samples, values + 1))?;
                (rows.narrow(1, 0, values)?.contiguous()?, Some(rows.narrow(1, values, 1)?))
            }
        };
        Ok((((targets.reshape(p.shape())? * (1.0 - self.smoothing))? + self.smoothing / 2.0)?, weights))
    }

    /// The summed loss of predictions in plain candle ops.
    fn reference_of(&self, p: &Tensor, targets: &Tensor, weights: Option<&Tensor>) -> Result<Tensor> {
        let samples = p.dim(0)?;
        let values = p.elem_count() / samples.max(1);
        let positive =
            self.positive_weights.map(|weights| Tensor::new(&**weights, p.device())?.to_dtype(p.dtype()));
        let loss =
            self.loss_fn.reference(p, targets, positive.transpose()?.as_ref())?.reshape((samples, values))?;
        let loss = match weights {
            Some(weights) => loss.broadcast_mul(weights)?,
            None => loss,
        };
        loss.sum_all()? / values as f64
    }

    /// Returns the metric sums and, if `needs_input_grad`, the gradient of `scale` times the summed loss with respect
    /// to `x`, and accumulates the gradients of weight and bias into `grads`. `targets` are f32.
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
        on_cuda!(p, |device| gpu::loss_and_grad(device, self, p, targets, scale));
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
        let (targets, weights) = self.split_targets(p, targets)?;
        let loss = |p: &Tensor| self.reference_of(p, &targets, weights.as_ref());
        let hits = match self.loss_fn.is_binary() {
            true => {
                let wrong = p.gt(0.0)?.ne(&targets.gt(0.5)?)?.reshape((samples, values))?;
                wrong.max(1)?.to_vec1::<u8>()?.iter().filter(|wrong| **wrong == 0).count() as u64
            }
            false => 0,
        };
        let weight = match &weights {
            Some(weights) => weights.to_dtype(DType::F64)?.sum_all()?.to_scalar()?,
            None => samples as f64,
        };
        let total = loss(p)?.to_dtype(DType::F64)?.to_scalar()?;
        if let Some(scale) = scale {
            let dy = Tensor::new(scale, p.device())?.to_dtype(p.dtype())?;
            p.slice_set(&reference::gradients(&[p], &dy, |t| loss(&t[0]))?.remove(0), 0, 0)?;
        }
        Ok(MetricSums { loss: total, weight, count: samples as u64, top1: hits, top5: hits })
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
        let per_sample = targets.len() / samples.max(1);
        if per_sample * samples != targets.len() || ![values, values + 1].contains(&per_sample) {
            candle_core::bail!("{} targets for {samples} samples of {values} predictions", targets.len());
        }
        let binary = self.loss_fn.is_binary();
        let outputs = self.weight.dim(0)?;
        let (kept, moved) = (T::Acc::of_f64(1.0 - self.smoothing), T::Acc::of_f64(self.smoothing / 2.0));
        let rows = cpu::rows_per_chunk(values);
        let one = |(p, t): (&mut [T], &[f32])| {
            let mut sums = MetricSums::default();
            for (p, t) in p.chunks_exact_mut(values).zip(t.chunks_exact(per_sample)) {
                let weight = t.get(values).map_or(1.0, |weight| f64::from(*weight));
                let grad_scale = scale.map(|scale| T::Acc::of_f64(scale * weight / values as f64));
                let (mut sum, mut all_correct) = (T::Acc::ZERO, true);
                for (i, (p, t)) in p.iter_mut().zip(t).enumerate() {
                    let (prediction, t) = (p.to_acc(), T::Acc::of_f64(*t as f64));
                    let positive =
                        self.positive_weights.map_or(T::Acc::ONE, |w| T::Acc::of_f64(w[i % outputs].into()));
                    let (value, slope) = self.loss_fn.value_and_slope(prediction, t * kept + moved, positive);
                    sum += value;
                    all_correct &= (prediction > T::Acc::ZERO) == (t > T::Acc::of_f64(0.5));
                    if let Some(pull) = grad_scale {
                        *p = T::from_acc(slope * pull);
                    }
                }
                sums.loss += weight * (sum.as_f64() / values as f64);
                sums.weight += weight;
                sums.count += 1;
                sums.top1 += (all_correct && binary) as u64;
            }
            sums
        };
        let parts: Vec<MetricSums> = cpu::with_slice_mut::<T, _>(p, |p| {
            p.par_chunks_mut(rows * values).zip(targets.par_chunks(rows * per_sample)).map_collect(one)
        })?;
        let mut sums = MetricSums::default();
        parts.into_iter().for_each(|part| sums += part);
        sums.top5 = sums.top1;
        Ok(sums)
    }
}

/// Workspace in bytes of `evaluate` and of `forward_backward` for `rows` rows of predictions.
pub fn workspace(
    dtype: DType,
    rows: usize,
    outputs: usize,
    width: usize,
    trained: TrainedParts,
) -> (u64, u64) {
    let (forward, backward) =
        super::linear::workspace(dtype, WeightLayout::OutIn, rows, (width, outputs), trained);
    let predictions = cpu::size_in_bytes(dtype, rows * outputs);
    (predictions + forward, predictions + backward)
}

/// Like [`workspace`], in candle's operations.
pub fn reference_workspace(dtype: DType, rows: usize, outputs: usize, width: usize) -> (u64, u64) {
    let (predictions, input) = (rows * outputs, (rows + outputs) * width);
    let evaluate = cpu::size_in_bytes(dtype, 18 * predictions + 2 * input);
    (evaluate, evaluate + cpu::size_in_bytes(dtype, 28 * predictions + 6 * input))
}

/// Like [`workspace`], on a GPU.
pub fn cuda_workspace(
    dtype: DType,
    samples: usize,
    rows: usize,
    outputs: usize,
    bias: bool,
    weighted: bool,
) -> (u64, u64) {
    let weights = if weighted { cpu::size_in_bytes(DType::F32, outputs) } else { 0 };
    let evaluate = cpu::size_in_bytes(dtype, rows * outputs) + weights + metric_sums::cuda_workspace(samples);
    let sums = if bias { super::linear::bias_gradient_workspace(dtype, rows, outputs) } else { 0 };
    // The metrics per row are reduced, and freed, before the gradients are computed.
    let backward = cpu::size_in_bytes(dtype, rows * outputs) + weights + sums + 5 * size_of::<f64>() as u64;
    (evaluate, evaluate.max(backward))
}
