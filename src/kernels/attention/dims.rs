//! The sizes of an attention, and the bytes its passes take beside what they are given and give.

use candle_core::DType;

use super::{BACKWARD_BUFFERS, FORWARD_BUFFERS, KEY_TILE, QUERY_TILE};
use crate::kernels::cpu;
use crate::kernels::sample_keys::SampleKeys;

/// Bytes within which cuDNN's backward pass may keep scores, which are quadratic in the length; queries and keys of
/// its tile; and what each pass takes beside.
const CUDNN_SCORE_BYTES: usize = 1 << 30;
const CUDNN_TILE: (usize, usize) = (64, 128);
const CUDNN_FIXED_BYTES: usize = 256;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDims {
    /// Positions of a sample.
    pub length: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
}

impl AttentionDims {
    /// Values of a position of the input.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Values of a position of the output.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Types of 16 bits, and heads that both cuDNN and our own tensor cores take.
    pub(super) fn fits_tensor_cores(&self, dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && self.head_dim.is_multiple_of(8) && self.head_dim <= 128
    }

    /// Bytes of temporaries on a card: those of cuDNN, or a value a row for the backward pass of our own kernels, which
    /// make all that is `dropout`.
    pub fn cuda_workspace(
        &self,
        dtype: DType,
        batch: usize,
        rotary: bool,
        dropout: bool,
        padded: bool,
    ) -> (u64, u64) {
        // The projections with their queries and keys turned, made anew in each pass.
        let rotated =
            if rotary { cpu::size_in_bytes(dtype, batch * self.length * self.qkv_width()) } else { 0 };
        // cuDNN's kernels take no lengths.
        let cudnn = self.fits_tensor_cores(dtype) && !padded;
        // An evaluation drops nothing, so that cuDNN makes it for a model with dropout too.
        let forward = if cudnn { CUDNN_FIXED_BYTES } else { 0 };
        let backward = if cudnn && !dropout {
            self.samples_per_call(batch) * self.cudnn_backward_bytes() + CUDNN_FIXED_BYTES
        } else {
            batch * self.heads * self.length * cpu::acc_bytes(dtype)
        };
        let keys = if dropout { SampleKeys::bytes(batch) } else { 0 };
        (rotated + forward as u64 + keys, rotated + backward as u64 + keys)
    }

    /// Bytes that cuDNN's deterministic backward pass takes for a sample: the gradients of all scores of its heads in
    /// whole tiles, a value a row, and where heads share keys the gradients of these and of the values for each.
    fn cudnn_backward_bytes(&self) -> usize {
        let (rows, columns) =
            (self.length.next_multiple_of(CUDNN_TILE.0), self.length.next_multiple_of(CUDNN_TILE.1));
        let shared = if self.kv_heads < self.heads { 2 * 2 * self.length * self.head_dim } else { 0 };
        self.heads * (2 * rows * columns + 4 * self.length + shared)
    }

    /// Samples that cuDNN is given at once, so that no more scores than [`CUDNN_SCORE_BYTES`] are whole in memory.
    pub(super) fn samples_per_call(&self, batch: usize) -> usize {
        let max_samples = (CUDNN_SCORE_BYTES / self.cudnn_backward_bytes()).clamp(1, batch.max(1));
        // As even as can be: a small rest would leave most of the card idle.
        batch.div_ceil(batch.div_ceil(max_samples).max(1))
    }

    /// Bytes of temporaries of the forward and of the backward pass.
    pub fn workspace(&self, dtype: DType, batch: usize, threads: usize) -> (u64, u64) {
        let workers = threads.min(batch * self.kv_heads) * cpu::acc_bytes(dtype);
        let of = |(sequences, tiles, scores, rows)| {
            let values = sequences * self.length * self.head_dim
                + tiles * QUERY_TILE * self.head_dim
                + scores * QUERY_TILE * KEY_TILE
                + rows * QUERY_TILE;
            (workers * values) as u64
        };
        (of(FORWARD_BUFFERS), of(BACKWARD_BUFFERS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// (length, heads, kv_heads, head, samples) and the bytes that the cuDNN of PyTorch 2.11 asked for on an H200.
    #[test]
    fn workspace_matches_cudnn() {
        for (length, heads, kv_heads, head, batch, requested) in [
            (17, 3, 3, 64, 8, 395_104),
            (50, 12, 12, 64, 8, 1_592_320),
            (65, 6, 6, 32, 8, 1_585_600),
            (197, 12, 12, 64, 8, 12_658_816),
            (257, 3, 3, 32, 1, 740_620),
            (257, 8, 2, 64, 2, 5_001_536),
            (1000, 8, 2, 128, 1, 20_905_472),
            (1024, 12, 12, 64, 16, 403_439_872),
        ] {
            let sizes = AttentionDims { length, heads, kv_heads, head_dim: head };
            assert_eq!(
                sizes.cuda_workspace(DType::BF16, batch, false, false, false),
                (256, requested),
                "{sizes:?}"
            );
            let (rows, keys) = ((batch * heads * length * 4) as u64, SampleKeys::bytes(batch));
            let masked = sizes.cuda_workspace(DType::BF16, batch, false, true, false);
            assert_eq!(masked, (256 + keys, rows + keys), "{sizes:?}");
            let padded = sizes.cuda_workspace(DType::BF16, batch, false, false, true);
            assert_eq!(padded, (0, rows), "{sizes:?}");
        }
    }

    proptest! {
        #[test]
        fn samples_at_once_fit_and_make_up_the_batch(length in 1usize..5000, heads in 1usize..65, batch in 1usize..2000) {
            let sizes = AttentionDims { length, heads, kv_heads: heads, head_dim: 64 };
            let n = sizes.samples_per_call(batch);
            prop_assert!((1..=batch).contains(&n));
            prop_assert!(n == 1 || n * sizes.cudnn_backward_bytes() <= CUDNN_SCORE_BYTES);
            let rest = batch - (batch.div_ceil(n) - 1) * n;
            prop_assert!(n - rest < batch.div_ceil(n), "{n} at once and {} at last", rest);
        }
    }
}
