//! Softmax cross-entropy fused with the linear map before it, in chunks of rows.
//!
//! Only a chunk of scores is ever in memory; it is turned into its own gradient in place (on Hopper but for a factor a row) and
//! used for the gradients of the input, the weight and the bias at once.
//!
//! A row's target is a class, or two classes and a share: then its loss is the share of the first's and the
//! rest of the second's.

#[cfg(feature = "cuda")]
mod card;
#[cfg(feature = "cuda")]
mod fused;

use candle_core::{DType, Result, Tensor, WithDType};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::{self, Grads, add_all, hopper_scores};
use super::product::{
    By, Mat, copies_nothing, multiply, multiply_rounded, packing, packing_rounded, round, same, same_mut,
};
use super::tally::{self, Counted, Tally};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// A target that is not to be learned nor counted.
pub const IGNORE: u32 = u32::MAX;

/// Score bytes a chunk may hold where that still makes products tall enough to be fast.
const CHUNK_BYTES: usize = 4 << 20;
const CHUNK_ROWS: usize = 128;

/// Rows of scores in memory at once.
pub fn chunk_rows(rows: usize, classes: usize) -> usize {
    (CHUNK_BYTES / (4 * classes)).max(CHUNK_ROWS).min(rows)
}

/// `scores = x W' + b`, compared with a class a row.
pub struct Head<'a> {
    /// (classes, width)
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// Share of the target spread over all classes.
    pub smoothing: f64,
    /// A weight per class; the mean loss is over the sum of the targets' weights.
    pub class_weights: Option<&'a ClassWeights>,
}

/// A weight per class, and the same on a GPU once a pass needed them there.
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

impl Head<'_> {
    #[cfg(feature = "cuda")]
    fn plain(&self) -> bool {
        is_plain(self.bias.is_some(), self.smoothing, self.class_weights.is_some())
    }

    /// The reference: the summed loss in plain candle ops. `targets` has no [`IGNORE`].
    pub fn reference(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let targets = targets.flatten_all()?;
        let whole = Tensor::ones(targets.dims(), x.dtype(), x.device())?;
        self.reference_mixed(x, &[(targets, whole)])
    }

    /// The reference for rows of several classes, each of (rows) `u32` with its (rows) shares.
    pub fn reference_mixed(&self, x: &Tensor, goals: &[(Tensor, Tensor)]) -> Result<Tensor> {
        let (classes, width) = self.weight.dims2()?;
        let x = x.reshape((x.elem_count() / width, width))?;
        let scores = x.matmul(&self.weight.t()?)?;
        let scores = match self.bias {
            Some(bias) => scores.broadcast_add(bias)?,
            None => scores,
        };
        let log_p = candle_nn::ops::log_softmax(&scores, 1)?;
        let weights = match self.class_weights {
            Some(w) => Tensor::new(&**w, x.device())?.to_dtype(x.dtype())?,
            None => Tensor::ones(classes, x.dtype(), x.device())?,
        };
        let spread = log_p.broadcast_mul(&weights)?.sum_all()?;
        let mut loss = (spread * (-self.smoothing / classes as f64))?;
        for (targets, share) in goals {
            let of_target = log_p.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
            let hard = ((of_target * weights.index_select(targets, 0)?)? * share)?.sum_all()?;
            loss = (loss + (hard * (self.smoothing - 1.0))?)?;
        }
        Ok(loss)
    }

    /// The sums and the gradient of `scale` times the summed loss with respect to `x`; adds those of the
    /// weight and the bias to `grads`. `targets` has a class a row, or (two classes, bits of the first's share). Who was
    /// right is for [`judge`](Self::judge) to count: some bodies do not here.
    pub fn learn(
        &self,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &Grads,
    ) -> Result<(Counted, Tensor)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.learn_card(device, x, targets, scale, grads);
        }
        let (sums, dx) = with_elem!(x.dtype(), T => self.cpu::<T>(x, targets, Some((scale, grads)))?);
        match dx {
            Some(dx) => Ok((sums.into(), dx)),
            None => candle_core::bail!("cross-entropy made no gradient"),
        }
    }

    /// The sums alone.
    pub fn judge(&self, x: &Tensor, targets: &Tensor) -> Result<Counted> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.judge_card(device, x, targets);
        }
        Ok(with_elem!(x.dtype(), T => self.cpu::<T>(x, targets, None)?).0.into())
    }

    fn cpu<T: Elem>(
        &self,
        x: &Tensor,
        targets: &Tensor,
        learn: Option<(f64, &Grads)>,
    ) -> Result<(Tally, Option<Tensor>)> {
        if !reference::has_body(x) {
            candle_core::bail!("cross-entropy has no body for this device yet")
        }
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        if copies_nothing(T::DTYPE) {
            return self.chunks::<T, T>(x, &values, &weight, targets, learn);
        }
        // Widened once, not for each of the products of each chunk.
        let (values, weight) = (T::widened(&values, By::All), T::widened(&weight, By::All));
        self.chunks::<T, T::Acc>(x, &values, &weight, targets, learn)
    }

    /// Chunk by chunk of the rows, with products of values of `V`: the logits' gradients are rounded to it.
    fn chunks<T: Elem, V: Elem<Acc = T::Acc>>(
        &self,
        x: &Tensor,
        values: &[V],
        weight: &[V],
        targets: &Tensor,
        learn: Option<(f64, &Grads)>,
    ) -> Result<(Tally, Option<Tensor>)> {
        let (classes, width) = self.weight.dims2()?;
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let targets = cpu::view::<u32>(targets)?;
        let rows = values.len() / width;
        let per_row = targets.len() / rows.max(1);
        if ![1, 3].contains(&per_row) || per_row * rows != targets.len() {
            candle_core::bail!("{} target values for {rows} rows", targets.len())
        }
        let chunk = chunk_rows(rows, classes);
        let mut scores = cpu::fresh::<T::Acc>(chunk * classes);
        let mut dx = cpu::fresh::<T>(if learn.is_some() { rows * width } else { 0 });
        let when = |needed: bool, values: usize| if needed && learn.is_some() { values } else { 0 };
        let mut rounded = cpu::fresh::<V>(when(V::DTYPE != <T::Acc as WithDType>::DTYPE, scores.len()));
        let mut wide = cpu::fresh::<T::Acc>(when(V::DTYPE != T::DTYPE, chunk * width));
        let mut sums = Tally::default();
        let w = Mat::new(weight, classes, width);
        for first in (0..rows).step_by(chunk.max(1)) {
            let n = chunk.min(rows - first);
            let scores = &mut scores[..n * classes];
            let x = Mat::new(&values[first * width..][..n * width], n, width);
            multiply(scores, classes, x, w.t(), false, By::All);
            let scale = learn.map(|(scale, _)| scale);
            let targets = &targets[first * per_row..][..n * per_row];
            let (part, columns) = self.score_rows(scores, bias.as_deref(), targets, n, scale);
            sums += part;
            let Some((_, grads)) = learn else { continue };
            if let Some(into) = grads.bias {
                cpu::update::<T::Acc, _>(into, |into| add_all(into, &columns))?;
            }
            let d = match same(scores) {
                Some(d) => d,
                None => {
                    round(scores, &mut rounded[..n * classes], By::All);
                    &rounded[..n * classes]
                }
            };
            let d = Mat::new(d, n, classes);
            cpu::update::<T::Acc, _>(grads.weight, |into| multiply(into, width, d.t(), x, true, By::All))?;
            let dx = &mut dx[first * width..][..n * width];
            match same_mut(dx) {
                Some(dx) => multiply_rounded::<V>(dx, d, w, By::All),
                None => {
                    multiply(&mut wide, width, d, w, false, By::All);
                    round(&wide[..n * width], dx, By::All);
                }
            }
        }
        let dx = learn.is_some().then(|| cpu::tensor(dx, x.shape())).transpose()?;
        Ok((sums, dx))
    }

    /// Tally of rows of scores and, when learning, the rows turned into gradients and their column sums.
    fn score_rows<T: Elem>(
        &self,
        scores: &mut [T::Acc],
        bias: Option<&[T]>,
        targets: &[u32],
        rows: usize,
        scale: Option<f64>,
    ) -> (Tally, Vec<Vec<T::Acc>>) {
        let (classes, per_row) = (scores.len() / rows.max(1), targets.len() / rows.max(1));
        let rows = cpu::rows_per_chunk(classes);
        let parts: Vec<(Tally, Vec<T::Acc>)> = scores
            .par_chunks_mut(rows * classes)
            .zip(targets.par_chunks(rows * per_row))
            .map(|(scores, targets)| {
                let mut sums = Tally::default();
                let mut columns =
                    vec![T::Acc::ZERO; if bias.is_some() && scale.is_some() { classes } else { 0 }];
                vectorised!(T::Acc, || {
                    for (row, target) in scores.chunks_exact_mut(classes).zip(targets.chunks_exact(per_row)) {
                        if let Some(bias) = bias {
                            row.iter_mut().zip(bias).for_each(|(s, b)| *s += b.up());
                        }
                        self.row(row, target, scale, &mut sums);
                        columns.iter_mut().zip(&*row).for_each(|(c, d)| *c += *d);
                    }
                });
                (sums, columns)
            })
            .collect();
        let mut total = Tally::default();
        let mut columns = Vec::with_capacity(parts.len());
        for (sums, part) in parts {
            total += sums;
            columns.push(part);
        }
        (total, columns)
    }

    /// One row of scores: adds to `sums`, and turns the row into `scale` times its gradient.
    #[inline(always)]
    fn row<R: Real>(&self, row: &mut [R], target: &[u32], scale: Option<f64>, sums: &mut Tally) {
        if target[0] == IGNORE {
            row.fill(R::ZERO);
            return;
        }
        // Classes and their shares; what is judged is the first, so the larger share comes first.
        let pair = match *target {
            [a, b, share] => {
                let share = f32::from_bits(share) as f64;
                let (a, b) = ((a as usize, share), (b as usize, 1.0 - share));
                if share < 0.5 { [b, a] } else { [a, b] }
            }
            _ => [(target[0] as usize, 1.0); 2],
        };
        let goals = if target.len() == 1 { &pair[..1] } else { &pair[..] };
        let (classes, target) = (row.len(), pair[0].0);
        let weight = |class: usize| self.class_weights.map_or(1.0, |w| w[class] as f64);
        let of_target = row[target];
        let mut largest = R::NEG_INFINITY;
        let (mut above, mut equal_before) = (0u64, 0u64);
        for (class, &s) in row.iter().enumerate() {
            largest = largest.larger(s);
            above += (s > of_target) as u64;
            equal_before += (s == of_target && class < target) as u64;
        }
        // Of equal scores the first counts as the answer, so that a model that says nothing is not right.
        let rank = above + equal_before;
        let known = !of_target.wide().is_nan();
        sums.count += 1;
        sums.top1 += (known && rank == 0) as u64;
        sums.top5 += (known && rank < 5) as u64;

        let scores = pair.map(|(class, _)| (row[class] - largest).wide());
        let spread: f64 = match self.smoothing > 0.0 {
            true => row.iter().enumerate().map(|(c, &s)| weight(c) * (s - largest).wide()).sum(),
            false => 0.0,
        };
        let mut total = R::ZERO;
        for s in row.iter_mut() {
            *s = (*s - largest).exp();
            total += *s;
        }
        let log_total = total.wide().ln();
        let share = self.smoothing / classes as f64;
        let all_weights: f64 = match (self.smoothing > 0.0, self.class_weights) {
            (false, _) => 0.0,
            (true, None) => classes as f64,
            (true, Some(w)) => w.iter().map(|w| *w as f64).sum(),
        };
        let hard = |(class, part): (usize, f64)| (1.0 - self.smoothing) * part * weight(class);
        for (&goal, score) in goals.iter().zip(scores) {
            sums.loss += hard(goal) * (log_total - score);
            sums.weight += goal.1 * weight(goal.0);
        }
        sums.loss += share * (all_weights * log_total - spread);
        let Some(scale) = scale else { return };
        let all_hard: f64 = goals.iter().map(|goal| hard(*goal)).sum();
        let pull = R::of(scale * (all_hard + share * all_weights)) / total;
        row.iter_mut().for_each(|s| *s *= pull);
        if self.smoothing > 0.0 {
            row.iter_mut().enumerate().for_each(|(c, s)| *s -= R::of(scale * share * weight(c)));
        }
        goals.iter().for_each(|goal| row[goal.0] -= R::of(scale * hard(*goal)));
    }
}

/// Bytes of temporaries of judging and of learning `rows` rows.
pub fn workspace(dtype: DType, rows: usize, classes: usize, width: usize, bias: bool) -> (u64, u64) {
    let (acc, chunk) = (cpu::acc_bytes(dtype), chunk_rows(rows, classes));
    let is_narrow = dtype.size_in_bytes() != acc;
    // The type of the products' operands, which are copied to it once where it is another.
    let copied = !copies_nothing(dtype);
    let operands = if copied { DType::F32 } else { dtype };
    let copies = if copied { (rows + classes) * width * acc } else { 0 };
    let scores = packing(operands, (chunk, width, classes), false, By::All);
    let weight = packing(operands, (classes, chunk, width), true, By::All);
    let input = packing_rounded(operands, (chunk, classes, width), false, By::All);
    let judge = chunk * classes * acc + copies;
    let columns = if bias { chunk.div_ceil(cpu::rows_per_chunk(classes)) * classes * acc } else { 0 };
    let rounding = match (is_narrow, copied) {
        (false, _) => 0,
        (true, true) => chunk * width * acc,
        (true, false) => chunk * classes * dtype.size_in_bytes(),
    };
    (judge as u64 + scores, (judge + columns + rounding) as u64 + scores.max(weight).max(input))
}

/// Score bytes that a card has in hand, and rows that its products like to come in.
const CARD_BYTES: usize = 400 << 20;
const CARD_ROWS: usize = 256;

/// Values between rows of scores on a card: products are fast where rows begin at multiples of 128 bytes.
fn card_stride(classes: usize) -> usize {
    classes.next_multiple_of(64)
}

/// Rows of scores on a card at once. Chunks are not made even: fewer rows would take more memory than a plan for more has.
fn card_chunk(dtype: DType, rows: usize, classes: usize) -> usize {
    let most = CARD_BYTES / (card_stride(classes) * dtype.size_in_bytes());
    (most / CARD_ROWS * CARD_ROWS).max(CARD_ROWS).min(rows)
}

/// As [`workspace`], on a card.
pub fn card_workspace(dtype: DType, rows: usize, classes: usize, bias: bool, weighted: bool) -> (u64, u64) {
    let chunk = card_chunk(dtype, rows, classes);
    let scores = cpu::bytes(dtype, chunk * card_stride(classes));
    let weights = if weighted { cpu::bytes(DType::F32, classes) } else { 0 };
    let judge = scores + weights + tally::card_workspace(rows);
    let columns = if bias { linear::card_workspace(dtype, chunk, classes) } else { 0 };
    (judge, judge + columns)
}

/// Columns of scores whose exponentials the body for Hopper sums up by themselves.
fn fused_tiles(classes: usize) -> usize {
    classes.div_ceil(256)
}

/// Whether that body makes a head: all that is asked of its scores is the logarithm of their share.
pub fn is_plain(bias: bool, smoothing: f64, weighted: bool) -> bool {
    !bias && smoothing == 0.0 && !weighted
}

/// Bytes that learning takes beside [`card_workspace`] where that body makes it.
pub fn fused_workspace(dtype: DType, rows: usize, classes: usize, width: usize) -> u64 {
    let chunk = card_chunk(dtype, rows, classes);
    if !hopper_scores(dtype, chunk, classes, width) {
        return 0;
    }
    cpu::bytes(DType::F32, chunk * (fused_tiles(classes) + 1)) + cpu::bytes(dtype, chunk * width)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The last batch of an epoch is within the plan of the others.
        #[test]
        fn fewer_rows_take_no_more_of_a_card(rows in 1usize..20_000, less in 0usize..20_000, classes in 2usize..60_000, narrow: bool) {
            let (dtype, fewer) = (if narrow { DType::BF16 } else { DType::F32 }, rows.saturating_sub(less).max(1));
            let room = |rows| {
                let (judge, learn) = card_workspace(dtype, rows, classes, false, false);
                (judge, learn + fused_workspace(dtype, rows, classes, 768))
            };
            let (few, many) = (room(fewer), room(rows));
            prop_assert!(few.0 <= many.0 && few.1 <= many.1, "{few:?} for {fewer} rows, {many:?} for {rows}");
            // Scores stay within what is said, but for so few rows as products need.
            let most = (CARD_BYTES as u64).max((CARD_ROWS * card_stride(classes) * dtype.size_in_bytes()) as u64);
            prop_assert!(cpu::bytes(dtype, card_chunk(dtype, rows, classes) * card_stride(classes)) <= most);
        }
    }
}
