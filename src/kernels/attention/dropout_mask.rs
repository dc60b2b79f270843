//! Dropout of attention weights: which are dropped is a function of sample, head, query and key alone, so that no
//! mask is kept, and the backward pass draws it again.
//!
//! A draw serves a square of two queries and two keys. That is what a thread of a card holds of the scores, whether
//! queries or keys are the rows of its product.

use candle_core::{Result, Tensor};

use super::AttentionDims;
use crate::kernels::sample_keys::SampleKeys;
use crate::kernels::{Real, dropout};

/// Weights that are dropped with one chance.
pub struct DropoutMask<'a> {
    /// A draw of 16 bits below it drops a weight.
    pub(super) threshold: u64,
    /// What the others are multiplied with.
    pub(super) scale: f64,
    /// The randomness of each sample.
    pub(super) keys: SampleKeys<'a>,
}

impl<'a> DropoutMask<'a> {
    /// Drops with chance `p`, rounded to a multiple of 2^-16.
    pub fn new(p: f64, keys: SampleKeys<'a>) -> Self {
        let (threshold, scale) = dropout::threshold_and_scale(p);
        Self { threshold, scale, keys }
    }

    /// What the weights of a query and the keys from `from` on, which is even, are multiplied with.
    #[inline(always)]
    pub fn fill_row<R: Real>(&self, sample: usize, head: usize, query: usize, from: usize, into: &mut [R]) {
        let (key, scale) = (self.keys.for_row(sample), R::of_f64(self.scale));
        // Heads are below 2^16 and positions below 2^25: nothing overlaps, and the length does not matter.
        let first = ((head as u64) << 48) | ((query as u64 / 2) << 24) | (from as u64 / 2);
        for (i, pair) in into.chunks_mut(2).enumerate() {
            let bits = key.bits(first + i as u64) >> (32 * (query % 2));
            for (lane, kept) in pair.iter_mut().enumerate() {
                *kept = if (bits >> (16 * lane)) & 0xffff >= self.threshold { scale } else { R::ZERO };
            }
        }
    }

    /// The reference: all of it, (batch, heads, length, length), of the type and on the device of `like`.
    pub(super) fn to_tensor(&self, sizes: &AttentionDims, like: &Tensor) -> Result<Tensor> {
        let (batch, AttentionDims { length, heads, .. }) = (like.dim(0)?, *sizes);
        let mut kept = vec![0f64; batch * heads * length * length];
        for (at, row) in kept.chunks_exact_mut(length).enumerate() {
            self.fill_row(at / length / heads, at / length % heads, at % length, 0, row);
        }
        Tensor::from_vec(kept, (batch, heads, length, length), like.device())?.to_dtype(like.dtype())
    }
}
