//! The dimensions of an attention, and the workspace that its passes need besides their inputs and outputs.

use candle_core::DType;

use super::{BACKWARD_BUFFERS, FORWARD_BUFFERS, KEY_TILE, QUERY_TILE};
use crate::kernels::cpu;
use crate::kernels::sample_keys::SampleKeys;

/// Budget in bytes for the scores that cuDNN's backward pass stores, which are quadratic in the length; queries and
/// keys of its tile; and the fixed workspace of each pass.
const CUDNN_SCORE_BYTES: usize = 1 << 30;
const CUDNN_TILE: (usize, usize) = (64, 128);
const CUDNN_FIXED_BYTES: usize = 256;

/// The dimensions of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDims {
    /// Positions per sample.
    pub length: usize,
    pub heads: usize,
    /// Must divide `heads`.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
}

impl AttentionDims {
    /// Values per position of the packed input.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Values per position of the output.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Whether dtype and head size suit both cuDNN and our own tensor-core kernels.
    pub(super) fn fits_tensor_cores(&self, dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && self.head_dim.is_multiple_of(8) && self.head_dim <= 128
    }

    /// Workspace in bytes on a GPU, forward and backward: cuDNN's own, or one value per row for the backward pass of
    /// our kernels. Our kernels run everything that has dropout or padding.
    pub fn cuda_workspace(
        &self,
        dtype: DType,
        batch: usize,
        rotary: bool,
        dropout: bool,
        padded: bool,
    ) -> (u64, u64) {
        // Each pass recomputes the projections with RoPE applied.
        let rotated =
            if rotary { cpu::size_in_bytes(dtype, batch * self.length * self.qkv_width()) } else { 0 };
        // The cuDNN path takes no lengths per sample.
        let cudnn = self.fits_tensor_cores(dtype) && !padded;
        // Evaluation has no dropout, so cuDNN may run the forward pass of a model that trains with dropout.
        let forward = if cudnn { CUDNN_FIXED_BYTES } else { 0 };
        let backward = if cudnn && !dropout {
            self.samples_per_call(batch) * self.cudnn_backward_bytes() + CUDNN_FIXED_BYTES
        } else {
            batch * self.heads * self.length * cpu::acc_bytes(dtype)
        };
        let keys = if dropout { SampleKeys::bytes(batch) } else { 0 };
        (rotated + forward as u64 + keys, rotated + backward as u64 + keys)
    }

    /// Bytes that cuDNN's deterministic backward pass needs per sample: the gradients of all scores, padded to whole
    /// tiles; one value per row; and with grouped-query attention, a key and a value gradient for every query head.
    fn cudnn_backward_bytes(&self) -> usize {
        let (rows, columns) =
            (self.length.next_multiple_of(CUDNN_TILE.0), self.length.next_multiple_of(CUDNN_TILE.1));
        let shared = if self.kv_heads < self.heads { 2 * 2 * self.length * self.head_dim } else { 0 };
        self.heads * (2 * rows * columns + 4 * self.length + shared)
    }

    /// Samples per cuDNN call, chosen so that the stored scores stay within [`CUDNN_SCORE_BYTES`].
    pub(super) fn samples_per_call(&self, batch: usize) -> usize {
        let max_samples = (CUDNN_SCORE_BYTES / self.cudnn_backward_bytes()).clamp(1, batch.max(1));
        // Split evenly: a small last call would leave most of the GPU idle.
        batch.div_ceil(batch.div_ceil(max_samples).max(1))
    }

    /// Workspace in bytes of the forward and the backward pass in candle's operations: the scores, and what softmax and
    /// dropout make of them, of all queries and keys.
    pub fn reference_workspace(&self, dtype: DType, batch: usize) -> (u64, u64) {
        let masks = batch * self.length * self.length;
        let scores = cpu::size_in_bytes(dtype, self.heads * masks) + cpu::size_in_bytes(DType::F32, masks);
        (6 * scores, 14 * scores)
    }

    /// Workspace in bytes of the forward and the backward pass on the CPU.
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

    /// (length, heads, kv_heads, head_dim, samples) and the workspace that the cuDNN of PyTorch 2.11 requested on an
    /// H200.
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
        fn samples_at_once_fit_and_make_up_the_batch(
            length in 1usize..5000,
            heads in 1usize..65,
            batch in 1usize..2000,
        ) {
            let sizes = AttentionDims { length, heads, kv_heads: heads, head_dim: 64 };
            let n = sizes.samples_per_call(batch);
            prop_assert!((1..=batch).contains(&n));
            prop_assert!(n == 1 || n * sizes.cudnn_backward_bytes() <= CUDNN_SCORE_BYTES);
            let rest = batch - (batch.div_ceil(n) - 1) * n;
            prop_assert!(n - rest < batch.div_ceil(n), "{n} at once and {} at last", rest);
        }
    }
}
