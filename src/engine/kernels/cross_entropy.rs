//! Softmax cross-entropy fused with the linear layer before it, in chunks of rows.
//!
//! Only one chunk of logits is in memory at a time. It is turned into its own gradient in place (on Hopper up to a
//! factor per row), which immediately yields the gradients of the input, the weight and the bias.
//!
//! The target of a row is a class, a class and the weight of the row, or two classes and a fraction (mixup, CutMix). In
//! the last case the loss is the sum of both classes' losses, weighted by the fraction and its complement.

#[cfg(feature = "cuda")]
mod fused;
#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor, WithDType};

use super::linear::{
    self, LinearKernel, WeightBiasGrads, WeightLayout, column_sums_bytes, hopper_supports_logits,
};
use super::matmul::{
    MatView, Threading, Transposed, downcast_slice, gemm, gemm_workspace, matmul, matmul_workspace, round,
};
use super::metric_sums::{self, MetricSums, PendingMetricSums};
use super::partial_sums::{PartialSums, num_parts};
use super::{Activation, Elem, Real, cpu, lanes, reference};
use crate::base::features::IGNORE_INDEX;
use crate::{vectorised, with_elem};

/// Budget in bytes for a chunk of logits, and the minimum number of rows for efficient GEMMs, which takes precedence.
const CHUNK_BYTES: usize = 4 << 20;
const CHUNK_ROWS: usize = 128;

/// Rows per chunk of logits.
pub fn chunk_rows(rows: usize, classes: usize) -> usize {
    (CHUNK_BYTES / (4 * classes)).max(CHUNK_ROWS).min(rows)
}

/// Cross-entropy of `logits = x W' + b` against one target per row.
pub struct LinearCrossEntropy<'a> {
    /// (classes, width)
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// Fraction of the target that is spread over all classes (label smoothing).
    pub smoothing: f64,
    /// Exponent of the focal loss, which multiplies the cross-entropy by (1 - probability of the class)^gamma; 0 for
    /// plain cross-entropy. Not with smoothing or two classes per row.
    pub focal_gamma: f64,
    /// A weight per class. The mean loss divides by the sum of the targets' weights.
    pub class_weights: Option<&'a ClassWeights>,
}

/// A weight per class, with a device copy once a pass on a GPU has needed it.
#[derive(Clone, Debug, Default)]
pub struct ClassWeights {
    values: Vec<f32>,
    #[cfg(feature = "cuda")]
    uploaded: std::sync::OnceLock<Tensor>,
}

impl From<Vec<f32>> for ClassWeights {
    fn from(values: Vec<f32>) -> Self {
        Self {
            values,
            #[cfg(feature = "cuda")]
            uploaded: std::sync::OnceLock::new(),
        }
    }
}

impl std::ops::Deref for ClassWeights {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

/// What a backward pass computes.
#[derive(Clone, Copy)]
struct HeadBackward<'a> {
    /// Factor on the summed loss.
    scale: f64,
    grads: WeightBiasGrads<'a>,
    needs_input_grad: bool,
}

impl LinearCrossEntropy<'_> {
    #[cfg(feature = "cuda")]
    fn is_plain_softmax(&self) -> bool {
        let weighted = self.class_weights.is_some() || self.focal_gamma > 0.0;
        is_plain_softmax(self.bias.is_some(), self.smoothing, weighted)
    }

    /// The reference: the summed loss in plain candle ops. `targets` must not contain [`IGNORE_INDEX`].
    pub fn reference(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let targets = targets.flatten_all()?;
        let ones = Tensor::ones(targets.dims(), x.dtype(), x.device())?;
        self.reference_soft_targets(x, &[(targets, ones)], None)
    }

    /// The reference for rows with several classes: pairs of (rows) `u32` classes and (rows) fractions; and weights,
    /// (rows).
    pub fn reference_soft_targets(
        &self,
        x: &Tensor,
        soft_targets: &[(Tensor, Tensor)],
        row_weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (classes, width) = self.weight.dims2()?;
        let x = x.reshape((x.elem_count() / width, width))?;
        let logits = x.matmul(&self.weight.t()?)?;
        let logits = match self.bias {
            Some(bias) => logits.broadcast_add(bias)?,
            None => logits,
        };
        let log_p = candle_nn::ops::log_softmax(&logits, 1)?;
        let weights = match self.class_weights {
            Some(w) => Tensor::new(&**w, x.device())?.to_dtype(x.dtype())?,
            None => Tensor::ones(classes, x.dtype(), x.device())?,
        };
        let of_rows = |values: Tensor| match row_weights {
            Some(weights) => (values * weights)?.sum_all(),
            None => values.sum_all(),
        };
        let weighted_sum = of_rows(log_p.broadcast_mul(&weights)?.sum(1)?)?;
        let mut loss = (weighted_sum * (-self.smoothing / classes as f64))?;
        for (targets, fraction) in soft_targets {
            let target_log_p = log_p.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
            let faded = match self.focal_gamma > 0.0 {
                true => (&target_log_p * (1.0 - target_log_p.exp()?)?.powf(self.focal_gamma)?)?,
                false => target_log_p,
            };
            let hard = of_rows(((faded * weights.index_select(targets, 0)?)? * fraction)?)?;
            loss = (loss + (hard * (self.smoothing - 1.0))?)?;
        }
        Ok(loss)
    }

    /// Returns the metric sums and, if `needs_input_grad`, the gradient of `scale` times the summed loss with respect
    /// to `x`, and accumulates the gradients of weight and bias into `grads`. `targets` holds one class per row,
    /// (class, bits of the row's weight), or (class, class, bits of the first one's fraction). Only
    /// [`evaluate`](Self::evaluate) counts top-1 and top-5 hits reliably: some
    /// implementations skip them here.
    pub fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)> {
        on_cuda!(x, |device| self.forward_backward_cuda(device, x, targets, scale, grads, needs_input_grad));
        let backward = Some(HeadBackward { scale, grads: *grads, needs_input_grad });
        let (sums, dx) = match reference::has_cpu_kernel(x) {
            true => with_elem!(x.dtype(), T => self.run_cpu::<T>(x, targets, backward)?),
            false => self.run_reference(x, targets, backward)?,
        };
        Ok((sums.into(), dx))
    }

    /// The metric sums only.
    pub fn evaluate(&self, x: &Tensor, targets: &Tensor) -> Result<PendingMetricSums> {
        on_cuda!(x, |device| self.evaluate_cuda(device, x, targets));
        let (sums, _) = match reference::has_cpu_kernel(x) {
            true => with_elem!(x.dtype(), T => self.run_cpu::<T>(x, targets, None)?),
            false => self.run_reference(x, targets, None)?,
        };
        Ok(sums.into())
    }

    /// In candle's operations; the host counts hits.
    fn run_reference(
        &self,
        x: &Tensor,
        targets: &Tensor,
        backward: Option<HeadBackward>,
    ) -> Result<(MetricSums, Option<Tensor>)> {
        let (classes, width) = self.weight.dims2()?;
        let rows = x.elem_count() / width;
        let targets: Vec<u32> = targets.flatten_all()?.to_vec1()?;
        let per_row = targets.len() / rows.max(1);
        let logits = self.linear().reference(x)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let (mut sums, mut kept, mut goals) = (MetricSums::default(), Vec::new(), [const { Vec::new() }; 2]);
        let mut weights = Vec::new();
        for (at, (mut row, target)) in
            logits.chunks(classes).map(<[f64]>::to_vec).zip(targets.chunks(per_row)).enumerate()
        {
            self.loss_grad_row(&mut row, target, None, &mut sums);
            if target[0] == IGNORE_INDEX {
                continue;
            }
            kept.push(at as u32);
            match *target {
                [a, b, bits] => {
                    goals[0].push((a, f32::from_bits(bits)));
                    goals[1].push((b, 1.0 - f32::from_bits(bits)));
                }
                [class, bits] => {
                    goals[0].push((class, 1.0));
                    weights.push(f32::from_bits(bits));
                }
                _ => goals[0].push((target[0], 1.0)),
            }
        }
        if kept.is_empty() {
            let dx = backward.filter(|backward| backward.needs_input_grad);
            return Ok((sums, dx.map(|_| x.zeros_like()).transpose()?));
        }
        let n = kept.len();
        let kept = Tensor::from_vec(kept, n, x.device())?;
        let goal = |goal: &Vec<(u32, f32)>| -> Result<(Tensor, Tensor)> {
            let (classes, fractions): (Vec<u32>, Vec<f32>) = goal.iter().copied().unzip();
            let fractions = Tensor::from_vec(fractions, n, x.device())?.to_dtype(x.dtype())?;
            Ok((Tensor::from_vec(classes, n, x.device())?, fractions))
        };
        let weights = match &weights[..] {
            [] => None,
            weights => Some(Tensor::new(weights, x.device())?.to_dtype(x.dtype())?),
        };
        let goals: Vec<_> = goals.iter().filter(|goal| !goal.is_empty()).map(goal).collect::<Result<_>>()?;
        let loss = |t: &[Tensor]| {
            let x = t[0].reshape((rows, width))?.index_select(&kept, 0)?;
            LinearCrossEntropy { weight: &t[1], bias: t.get(2), ..*self }.reference_soft_targets(
                &x,
                &goals,
                weights.as_ref(),
            )
        };
        let inputs: Vec<&Tensor> = [x, self.weight].into_iter().chain(self.bias).collect();
        let value = loss(&inputs.iter().map(|t| (*t).clone()).collect::<Vec<_>>())?;
        sums.loss = value.to_dtype(DType::F64)?.to_scalar()?;
        let Some(HeadBackward { scale, grads, needs_input_grad }) = backward else { return Ok((sums, None)) };
        let dy = Tensor::new(scale, x.device())?.to_dtype(x.dtype())?;
        let computed = reference::gradients(&inputs, &dy, loss)?;
        Ok((sums, reference::accumulate_weight_bias(computed, &grads, needs_input_grad)?))
    }

    /// The linear layer that computes the logits.
    fn linear(&self) -> LinearKernel<'_> {
        LinearKernel {
            weight: self.weight,
            bias: self.bias,
            act: Activation::Identity,
            weight_layout: WeightLayout::OutIn,
        }
    }

    fn run_cpu<T: Elem>(
        &self,
        x: &Tensor,
        targets: &Tensor,
        backward: Option<HeadBackward>,
    ) -> Result<(MetricSums, Option<Tensor>)> {
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let (classes, width) = self.weight.dims2()?;
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let targets = cpu::view::<u32>(targets)?;
        let rows = values.len() / width;
        let per_row = targets.len() / rows.max(1);
        if ![1, 2, 3].contains(&per_row) || per_row * rows != targets.len() {
            candle_core::bail!("{} target values for {rows} rows", targets.len())
        }
        let chunk = chunk_rows(rows, classes);
        let mut logits = cpu::uninit::<T::Acc>(chunk * classes);
        let needs_input_grad = backward.is_some_and(|backward| backward.needs_input_grad);
        let mut dx = cpu::uninit::<T>(if needs_input_grad { rows * width } else { 0 });
        let rounds = backward.is_some() && T::DTYPE != <T::Acc as WithDType>::DTYPE;
        let mut rounded = cpu::uninit::<T>(if rounds { logits.len() } else { 0 });
        let mut sums = MetricSums::default();
        let w = MatView::new(&weight, classes, width);
        for first in (0..rows).step_by(chunk.max(1)) {
            let n = chunk.min(rows - first);
            let logits = &mut logits[..n * classes];
            let x = MatView::new(&values[first * width..][..n * width], n, width);
            gemm(logits, classes, x, w.t(), false, Threading::Parallel);
            let scale = backward.map(|backward| backward.scale);
            let targets = &targets[first * per_row..][..n * per_row];
            let (chunk_sums, columns) = self.loss_grad_rows(logits, bias.as_deref(), targets, n, scale);
            sums += chunk_sums;
            let Some(HeadBackward { grads, .. }) = backward else { continue };
            if let Some(into) = grads.bias {
                cpu::with_slice_mut::<T::Acc, _>(into, |into| columns.add_to(into, 0))?;
            }
            let d = match downcast_slice(logits) {
                Some(d) => d,
                None => {
                    round(logits, &mut rounded[..n * classes], Threading::Parallel);
                    &rounded[..n * classes]
                }
            };
            let d = MatView::new(d, n, classes);
            if let Some(into) = grads.weight {
                cpu::with_slice_mut::<T::Acc, _>(into, |into| {
                    gemm(into, width, d.t(), x, true, Threading::Parallel)
                })?;
            }
            if needs_input_grad {
                matmul(&mut dx[first * width..][..n * width], d, w, Threading::Parallel);
            }
        }
        let dx = needs_input_grad.then(|| cpu::tensor(dx, x.shape())).transpose()?;
        Ok((sums, dx))
    }

    /// Metric sums of rows of logits. In the backward pass, also turns the rows into gradients and returns their column
    /// sums.
    fn loss_grad_rows<T: Elem>(
        &self,
        logits: &mut [T::Acc],
        bias: Option<&[T]>,
        targets: &[u32],
        rows: usize,
        scale: Option<f64>,
    ) -> (MetricSums, PartialSums<T::Acc>) {
        let (classes, per_row) = (logits.len() / rows.max(1), targets.len() / rows.max(1));
        let num_columns = if bias.is_some() && scale.is_some() { classes } else { 0 };
        let mut parts = vec![MetricSums::default(); num_parts(rows, classes)];
        let (metrics, logits) = (cpu::DisjointSliceMut::new(&mut parts), cpu::DisjointSliceMut::new(logits));
        let columns = PartialSums::of_rows(rows, classes, num_columns, &|part, rows, columns| {
            // SAFETY: parts and their rows do not overlap.
            let (metrics, logits) = unsafe {
                (metrics.range_mut(part, 1), logits.range_mut(rows.start * classes, rows.len() * classes))
            };
            let targets = &targets[rows.start * per_row..rows.end * per_row];
            vectorised!(T::Acc, || {
                for (row, target) in logits.chunks_exact_mut(classes).zip(targets.chunks_exact(per_row)) {
                    if let Some(bias) = bias {
                        row.iter_mut().zip(bias).for_each(|(s, b)| *s += b.to_acc());
                    }
                    self.loss_grad_row(row, target, scale, &mut metrics[0]);
                    columns.iter_mut().zip(&*row).for_each(|(c, d)| *c += *d);
                }
            });
        });
        let mut total = MetricSums::default();
        parts.into_iter().for_each(|sums| total += sums);
        (total, columns)
    }

    /// One row of logits: adds to `sums`, and turns the row into `scale` times its gradient.
    #[inline(always)]
    fn loss_grad_row<R: Real>(
        &self,
        row: &mut [R],
        target: &[u32],
        scale: Option<f64>,
        sums: &mut MetricSums,
    ) {
        if target[0] == IGNORE_INDEX {
            row.fill(R::ZERO);
            return;
        }
        // Classes and their fractions. The larger fraction comes first, because metrics count the first class.
        let pair = match *target {
            [a, b, bits] => {
                let fraction = f32::from_bits(bits) as f64;
                let (a, b) = ((a as usize, fraction), (b as usize, 1.0 - fraction));
                if fraction < 0.5 { [b, a] } else { [a, b] }
            }
            _ => [(target[0] as usize, 1.0); 2],
        };
        let soft_targets = if target.len() == 3 { &pair[..] } else { &pair[..1] };
        let row_weight = if let [_, bits] = *target { f32::from_bits(bits).into() } else { 1.0 };
        let (classes, target) = (row.len(), pair[0].0);
        let weight = |class: usize| row_weight * self.class_weights.map_or(1.0, |w| w[class] as f64);
        let target_logit = row[target];
        let max_logit = lanes::max(row);
        let above = row.iter().filter(|s| **s > target_logit).count() as u64;
        let equal_before = row[..target].iter().filter(|s| **s == target_logit).count() as u64;
        // Ties go to the lower class index, so that constant logits do not count as correct.
        let rank = above + equal_before;
        let is_number = !target_logit.as_f64().is_nan();
        sums.count += 1;
        sums.top1 += (is_number && rank == 0) as u64;
        sums.top5 += (is_number && rank < 5) as u64;

        let target_logits = pair.map(|(class, _)| (row[class] - max_logit).as_f64());
        let weighted_sum: f64 = match self.smoothing > 0.0 {
            true => row.iter().enumerate().map(|(c, &s)| weight(c) * (s - max_logit).as_f64()).sum(),
            false => 0.0,
        };
        row.iter_mut().for_each(|s| *s = (*s - max_logit).exp());
        let total = lanes::sum([&*row], |[s]| s);
        let log_total = total.as_f64().ln();
        let smoothing_per_class = self.smoothing / classes as f64;
        let class_weight_sum: f64 = match (self.smoothing > 0.0, self.class_weights) {
            (false, _) => 0.0,
            (true, None) => row_weight * classes as f64,
            (true, Some(w)) => row_weight * w.iter().map(|w| *w as f64).sum::<f64>(),
        };
        let (fade, gradient_fade) = match self.focal_gamma > 0.0 {
            true => focal_factors(target_logits[0] - log_total, self.focal_gamma),
            false => (1.0, 1.0),
        };
        let hard_weight = |(class, part): (usize, f64)| (1.0 - self.smoothing) * part * weight(class);
        for (&goal, score) in soft_targets.iter().zip(target_logits) {
            sums.loss += fade * hard_weight(goal) * (log_total - score);
            sums.weight += goal.1 * weight(goal.0);
        }
        sums.loss += smoothing_per_class * (class_weight_sum * log_total - weighted_sum);
        let Some(scale) = scale else { return };
        let hard_weight = |goal: (usize, f64)| gradient_fade * hard_weight(goal);
        let hard_weight_sum: f64 = soft_targets.iter().map(|goal| hard_weight(*goal)).sum();
        let softmax_scale =
            R::of_f64(scale * (hard_weight_sum + smoothing_per_class * class_weight_sum)) / total;
        row.iter_mut().for_each(|s| *s *= softmax_scale);
        if self.smoothing > 0.0 {
            row.iter_mut()
                .enumerate()
                .for_each(|(c, s)| *s -= R::of_f64(scale * smoothing_per_class * weight(c)));
        }
        soft_targets.iter().for_each(|goal| row[goal.0] -= R::of_f64(scale * hard_weight(*goal)));
    }
}

/// Factors by which the focal loss differs from the cross-entropy, of the value and of the gradient, for a class of
/// this log-probability.
#[inline]
fn focal_factors(log_p: f64, gamma: f64) -> (f64, f64) {
    let missing = -log_p.exp_m1();
    let fade = missing.powf(gamma);
    // The derivative of the factor vanishes with the loss; its quotient would be 0 / 0 for gamma below 1.
    let slope = if missing > 0.0 { gamma * log_p.exp() * missing.powf(gamma - 1.0) * log_p } else { fade };
    (fade, fade - slope)
}

/// Workspace in bytes of `evaluate` and of `forward_backward` for `rows` rows.
pub fn workspace(dtype: DType, rows: usize, classes: usize, width: usize, bias: bool) -> (u64, u64) {
    let (acc, chunk) = (cpu::acc_bytes(dtype), chunk_rows(rows, classes));
    let is_narrow = dtype.size_in_bytes() != acc;
    let logits = gemm_workspace(dtype, (chunk, width, classes), Transposed::B, Threading::Parallel);
    let weight = gemm_workspace(dtype, (classes, chunk, width), Transposed::A, Threading::Parallel);
    let input = matmul_workspace(dtype, (chunk, classes, width), Transposed::NONE, Threading::Parallel);
    let evaluate = chunk * classes * acc;
    let columns = if bias { column_sums_bytes(dtype, chunk, classes) } else { 0 };
    let rounding = if is_narrow { chunk * classes * dtype.size_in_bytes() } else { 0 };
    (evaluate as u64 + logits, (evaluate + rounding) as u64 + columns + logits.max(weight).max(input))
}

/// Budget in bytes for logits on a GPU, and the row multiple that suits its GEMMs.
const CUDA_LOGIT_BYTES: usize = 400 << 20;
const CUDA_ROW_MULTIPLE: usize = 256;

/// Row stride of logits on a GPU, in values: GEMMs are fast if rows start at multiples of 128 bytes.
fn cuda_logit_stride(classes: usize) -> usize {
    classes.next_multiple_of(64)
}

/// Rows per chunk of logits on a GPU. Chunks are not balanced: then fewer rows could need more memory than the plan for
/// more rows reserves.
fn cuda_chunk_rows(dtype: DType, rows: usize, classes: usize) -> usize {
    let max_rows = CUDA_LOGIT_BYTES / (cuda_logit_stride(classes) * dtype.size_in_bytes());
    (max_rows / CUDA_ROW_MULTIPLE * CUDA_ROW_MULTIPLE).max(CUDA_ROW_MULTIPLE).min(rows)
}

/// Like [`workspace`], in candle's operations: the logits as the host reads them, log-softmax and its gradients.
pub fn reference_workspace(dtype: DType, rows: usize, classes: usize, width: usize) -> (u64, u64) {
    let (logits, input) = (rows * classes, (rows + classes) * width);
    let evaluate =
        cpu::size_in_bytes(DType::F64, 2 * logits) + cpu::size_in_bytes(dtype, 7 * logits + 2 * input);
    (evaluate, evaluate + cpu::size_in_bytes(dtype, 11 * logits + 6 * input))
}

/// Like [`workspace`], on a GPU.
pub fn cuda_workspace(dtype: DType, rows: usize, classes: usize, bias: bool, weighted: bool) -> (u64, u64) {
    let chunk = cuda_chunk_rows(dtype, rows, classes);
    let logits = cpu::size_in_bytes(dtype, chunk * cuda_logit_stride(classes));
    let weights = if weighted { cpu::size_in_bytes(DType::F32, classes) } else { 0 };
    let evaluate = logits + weights + metric_sums::cuda_workspace(rows);
    let columns = if bias { linear::bias_gradient_workspace(dtype, chunk, classes) } else { 0 };
    (evaluate, evaluate + columns)
}

/// Tiles of 256 columns whose exponentials the Hopper kernel sums separately.
fn fused_column_tiles(classes: usize) -> usize {
    classes.div_ceil(256)
}

/// Whether the Hopper kernel can run a head: it supports plain log-softmax only.
pub fn is_plain_softmax(bias: bool, smoothing: f64, weighted: bool) -> bool {
    !bias && smoothing == 0.0 && !weighted
}

/// Bytes that `forward_backward` needs beyond [`cuda_workspace`] if the Hopper kernel runs it.
pub fn fused_workspace(dtype: DType, rows: usize, classes: usize, width: usize) -> u64 {
    let chunk = cuda_chunk_rows(dtype, rows, classes);
    if !hopper_supports_logits(dtype, chunk, classes, width) {
        return 0;
    }
    cpu::size_in_bytes(DType::F32, chunk * (fused_column_tiles(classes) + 1))
        + cpu::size_in_bytes(dtype, chunk * width)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The last batch of an epoch, which is smaller, stays within the plan.
        #[test]
        fn fewer_rows_take_no_more_of_a_card(
            rows in 1usize..20_000,
            less in 0usize..20_000,
            classes in 2usize..60_000,
            narrow: bool,
        ) {
            let (dtype, fewer) = (if narrow { DType::BF16 } else { DType::F32 }, rows.saturating_sub(less).max(1));
            let room = |rows| {
                let (judge, learn) = cuda_workspace(dtype, rows, classes, false, false);
                (judge, learn + fused_workspace(dtype, rows, classes, 768))
            };
            let (few, many) = (room(fewer), room(rows));
            prop_assert!(few.0 <= many.0 && few.1 <= many.1, "{few:?} for {fewer} rows, {many:?} for {rows}");
            // The logits stay within the budget, except for the minimum number of rows.
            let most = (CUDA_LOGIT_BYTES as u64)
                .max((CUDA_ROW_MULTIPLE * cuda_logit_stride(classes) * dtype.size_in_bytes()) as u64);
            prop_assert!(
                cpu::size_in_bytes(dtype, cuda_chunk_rows(dtype, rows, classes) * cuda_logit_stride(classes))
                    <= most
            );
        }
    }
}
