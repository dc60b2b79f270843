//! Losses of single values, together with the linear map that predicts them: squared, Huber's, and
//! binary cross-entropy of a score.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::linear::{Grads, Lies, Linear};
use super::tally::{self, Counted, Tally};
use super::{Activation, Elem, Real, cpu, reference};
use crate::with_elem;

/// What a prediction `p` costs where `t` is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// `(p - t)^2`
    Squared,
    /// Half the square up to `delta`, then a straight line that goes on at the same slope.
    Huber { delta: f64 },
    /// `-ln(sigmoid(p))` of the answer `t` = 1, `-ln(1 - sigmoid(p))` of 0, mixed in between.
    Binary,
}

impl Kind {
    /// The loss and its slope.
    #[inline(always)]
    fn at<R: Real>(self, p: R, t: R) -> (R, R) {
        match self {
            Kind::Squared => ((p - t) * (p - t), (p - t) + (p - t)),
            Kind::Huber { delta } => {
                let (d, delta) = (p - t, R::of(delta));
                let far = d.abs() > delta;
                let sign = if d < R::ZERO { -R::ONE } else { R::ONE };
                match far {
                    true => (delta * (d.abs() - R::of(0.5) * delta), sign * delta),
                    false => (R::of(0.5) * d * d, d),
                }
            }
            Kind::Binary => {
                let small = (-p.abs()).exp();
                let sigmoid = if p < R::ZERO { small / (R::ONE + small) } else { R::ONE / (R::ONE + small) };
                (p.larger(R::ZERO) - p * t + (R::ONE + small).ln(), sigmoid - t)
            }
        }
    }

    /// The reference, value by value.
    fn reference(self, p: &Tensor, t: &Tensor) -> Result<Tensor> {
        match self {
            Kind::Squared => (p - t)?.sqr(),
            Kind::Huber { delta } => {
                let d = (p - t)?.abs()?;
                let near = d.minimum(&(d.ones_like()? * delta)?)?;
                (near.sqr()? * 0.5)? + ((d - near)? * delta)?
            }
            // ln(1 + e^-|p|) by what autograd differentiates.
            Kind::Binary => (p.relu()? - (p * t)?)? + (p.abs()?.neg()?.exp()? + 1.0)?.log()?,
        }
    }
}

/// `p = x W' + b`, (rows, outputs), compared with as many values; a sample's loss is the mean of its
/// values'.
pub struct Head<'a> {
    /// (outputs, width)
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub kind: Kind,
}

impl Head<'_> {
    fn map(&self) -> Linear<'_> {
        Linear { weight: self.weight, lies: Lies::OutIn, bias: self.bias, act: Activation::Identity }
    }

    /// The reference: the summed loss in plain candle ops.
    pub fn reference(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let p = self.map().reference(x)?;
        let targets = targets.to_dtype(x.dtype())?.reshape(p.shape())?;
        let values = p.elem_count() / x.dim(0)?;
        self.kind.reference(&p, &targets)?.sum_all()? / values as f64
    }

    /// The sums and the gradient of `scale` times the summed loss with respect to `x`; adds those of the
    /// weight and the bias to `grads`. `targets` are f32.
    pub fn learn(
        &self,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &Grads,
    ) -> Result<(Counted, Tensor)> {
        let (p, _) = self.map().forward(x)?;
        let sums = self.compare(&p, targets, Some(scale))?;
        match self.map().backward(x, None, p, grads, true)? {
            Some(dx) => Ok((sums, dx)),
            None => candle_core::bail!("a wanted gradient was not made"),
        }
    }

    /// The sums alone.
    pub fn judge(&self, x: &Tensor, targets: &Tensor) -> Result<Counted> {
        let (p, _) = self.map().forward(x)?;
        self.compare(&p, targets, None)
    }

    /// Sums over predictions and, when learning, the predictions turned into gradients.
    fn compare(&self, p: &Tensor, targets: &Tensor, scale: Option<f64>) -> Result<Counted> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(p) {
            return card::compare(device, self.kind, p, targets, scale);
        }
        if !reference::has_body(p) {
            candle_core::bail!("losses of single values have no body for this device yet")
        }
        Ok(with_elem!(p.dtype(), T => self.cpu::<T>(p, targets, scale)?).into())
    }

    fn cpu<T: Elem>(&self, p: &Tensor, targets: &Tensor, scale: Option<f64>) -> Result<Tally> {
        let samples = p.dim(0)?;
        let values = p.elem_count() / samples.max(1);
        let targets = cpu::view::<f32>(targets)?;
        if targets.len() != samples * values {
            candle_core::bail!("{} targets for {samples} samples of {values} predictions", targets.len());
        }
        let pull = scale.map(|scale| T::Acc::of(scale / values as f64));
        let rows = cpu::rows_per_chunk(values);
        let one = |(p, t): (&mut [T], &[f32])| {
            let (mut loss, mut right) = (0f64, 0u64);
            for (p, t) in p.chunks_exact_mut(values).zip(t.chunks_exact(values)) {
                let (mut sum, mut agree) = (T::Acc::ZERO, true);
                for (p, t) in p.iter_mut().zip(t) {
                    let (at, t) = (p.up(), T::Acc::of(*t as f64));
                    let (value, slope) = self.kind.at(at, t);
                    sum += value;
                    agree &= (at > T::Acc::ZERO) == (t > T::Acc::of(0.5));
                    if let Some(pull) = pull {
                        *p = T::down(slope * pull);
                    }
                }
                loss += sum.wide() / values as f64;
                right += (agree && self.kind == Kind::Binary) as u64;
            }
            (loss, right)
        };
        let parts: Vec<(f64, u64)> = cpu::update::<T, _>(p, |p| {
            p.par_chunks_mut(rows * values).zip(targets.par_chunks(rows * values)).map(one).collect()
        })?;
        let mut sums = Tally { weight: samples as f64, count: samples as u64, ..Tally::default() };
        for (loss, right) in parts {
            sums.loss += loss;
            sums.top1 += right;
            sums.top5 += right;
        }
        Ok(sums)
    }
}

/// Bytes of temporaries of judging and of learning `rows` rows of predictions.
pub fn workspace(dtype: DType, rows: usize, outputs: usize, width: usize) -> (u64, u64) {
    let (forward, backward) =
        super::linear::workspace(dtype, super::linear::Lies::OutIn, rows, width, outputs);
    let scores = cpu::bytes(dtype, rows * outputs);
    (scores + forward, scores + backward)
}

/// As [`workspace`], on a card, for judging and for learning.
pub fn card_workspace(dtype: DType, samples: usize, rows: usize, outputs: usize, bias: bool) -> (u64, u64) {
    let judge = cpu::bytes(dtype, rows * outputs) + tally::card_workspace(samples);
    let sums = if bias { super::linear::card_workspace(dtype, rows, outputs) } else { 0 };
    // The rows' tallies are added up before the gradients are made.
    (judge, judge.max(cpu::bytes(dtype, rows * outputs) + sums + 5 * size_of::<f64>() as u64))
}
