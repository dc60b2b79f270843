//! Dropout of attention weights. The mask is a function of sample, head, query and key alone, so it is never stored:
//! the backward pass redraws it.
//!
//! One draw serves two queries by two keys. A GPU thread holds exactly such a square of scores, whether queries or keys
//! are the rows of its MMA.

use candle_core::{Result, Tensor};

use super::AttentionDims;
use crate::kernels::sample_keys::SampleKeys;
use crate::kernels::{Real, dropout};

/// Dropout of attention weights with one probability.
pub struct DropoutMask<'a> {
    /// A weight whose 16-bit draw is below this is dropped.
    pub(super) threshold: u64,
    /// Factor of the kept weights.
    pub(super) scale: f64,
    /// The RNG key of each sample.
    pub(super) keys: SampleKeys<'a>,
}

impl<'a> DropoutMask<'a> {
    /// Dropout with probability `p`, rounded to a multiple of 2^-16.
    pub fn new(p: f64, keys: SampleKeys<'a>) -> Self {
        let (threshold, scale) = dropout::threshold_and_scale(p);
        Self { threshold, scale, keys }
    }

    /// Writes the factors of the weights of a query, for the keys from `from` on. `from` must be even.
    #[inline(always)]
    pub fn fill_row<R: Real>(&self, sample: usize, head: usize, query: usize, from: usize, into: &mut [R]) {
        let (key, scale) = (self.keys.for_row(sample), R::of_f64(self.scale));
        // Heads are below 2^16 and positions below 2^25, so the bit fields do not overlap, and the draw does not depend
        // on the length.
        let first = ((head as u64) << 48) | ((query as u64 / 2) << 24) | (from as u64 / 2);
        for (i, pair) in into.chunks_mut(2).enumerate() {
            let bits = key.bits(first + i as u64) >> (32 * (query % 2));
            for (lane, kept) in pair.iter_mut().enumerate() {
                *kept = if (bits >> (16 * lane)) & 0xffff >= self.threshold { scale } else { R::ZERO };
            }
        }
    }

    /// The whole mask, (batch, heads, length, length), in the dtype and on the device of `like`; for the reference
    /// implementation.
    pub(super) fn to_tensor(&self, sizes: &AttentionDims, like: &Tensor) -> Result<Tensor> {
        let (batch, AttentionDims { length, heads, .. }) = (like.dim(0)?, *sizes);
        let mut kept = vec![0f64; batch * heads * length * length];
        for (at, row) in kept.chunks_exact_mut(length).enumerate() {
            self.fill_row(at / length / heads, at / length % heads, at % length, 0, row);
        }
        Tensor::from_vec(kept, (batch, heads, length, length), like.device())?.to_dtype(like.dtype())
    }
}
