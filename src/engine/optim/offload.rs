//! Offloaded optimizer state: it stays in host memory and passes through a few staging buffers on the GPU, one chunk of
//! all state buffers at a time, while the weights of another chunk are updated.
//!
//! Owns the chunk ranges, the size of the staging buffers and, with CUDA, the memory itself. Only elementwise rules can
//! be updated in chunks; the results are bit-exact.

use std::ops::Range;

use crate::job::OptimizerConfig as Rule;

/// Staging buffers: one is filled, one is in use, one is drained.
const STAGING_BUFFERS: usize = 3;

/// Maximum values per chunk: long copies reach the full bandwidth of the link.
const MAX_CHUNK_LEN: usize = 1 << 22;

/// Chunks start at multiples of this, so that kernels read whole vector packs.
const CHUNK_ALIGN: usize = 1 << 10;

/// Whether a rule's state can be offloaded: it has state, one value per weight.
pub fn is_supported(rule: &Rule) -> bool {
    match rule {
        Rule::Adamw(_) | Rule::Lion(_) => true,
        Rule::Sgd(sgd) => sgd.momentum > 0.0,
        Rule::Adafactor(_) | Rule::Adamw8bit(_) => false,
    }
}

/// Values per chunk for `len` weights: a sixteenth, at most `MAX_CHUNK_LEN`.
fn chunk_len(len: usize) -> usize {
    len.div_ceil(16).next_multiple_of(CHUNK_ALIGN).min(MAX_CHUNK_LEN)
}

/// The chunks in which `len` values are updated.
pub fn chunk_ranges(len: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = chunk_len(len);
    (0..len).step_by(chunk.max(1)).map(move |start| start..(start + chunk).min(len))
}

/// Bytes of the staging buffers for `state` bytes of state over `len` weights.
pub fn staging_bytes(state: u64, len: usize) -> u64 {
    if len == 0 { 0 } else { state / len as u64 * (STAGING_BUFFERS * chunk_len(len)) as u64 }
}

pub use gpu::OffloadedState;

mod gpu {
    use candle_core::{CudaDevice, DType, Result, Tensor};

    use super::{Range, STAGING_BUFFERS, chunk_len, chunk_ranges};
    use crate::kernels::cuda::copy_streams::{CopyStreams, PinnedBuffer, StreamEvent};
    use crate::kernels::cuda::uninit;

    /// Flat state buffers in host memory, and their staging buffers.
    pub struct OffloadedState {
        copy_streams: CopyStreams,
        staging: Vec<StagingSlot>,
        buffers: Vec<PinnedBuffer>,
        len: usize,
    }

    /// One chunk of each state buffer on the GPU, and the event after which it can be refilled.
    struct StagingSlot {
        state: Vec<Tensor>,
        free_event: StreamEvent,
    }

    impl OffloadedState {
        /// `count` buffers of `len` zeros.
        pub fn new(device: &CudaDevice, dtype: DType, count: usize, len: usize) -> Result<Self> {
            let copy_streams = CopyStreams::new(device)?;
            let pinned = (0..count).map(|_| PinnedBuffer::new(device, dtype, len));
            let buffers = pinned.collect::<Result<_>>()?;
            let slot = || {
                let state = (0..count).map(|_| uninit(device, dtype, chunk_len(len)));
                Ok(StagingSlot {
                    state: state.collect::<Result<_>>()?,
                    free_event: copy_streams.record_compute()?,
                })
            };
            let staging = (0..STAGING_BUFFERS).map(|_| slot()).collect::<Result<_>>()?;
            Ok(Self { staging, buffers, len, copy_streams })
        }

        /// The buffers, in order, as host tensors.
        pub fn host_tensors(&self) -> impl Iterator<Item = Tensor> {
            self.buffers.iter().map(|buffer| buffer.tensor().clone())
        }

        /// Waits until the last update has written the buffers.
        pub fn synchronize(&self) -> Result<()> {
            self.copy_streams.synchronize()
        }

        /// Runs `body` on every chunk, with its range and its state on the GPU.
        pub fn update_chunks(&mut self, body: impl Fn(Range<usize>, &[Tensor]) -> Result<()>) -> Result<()> {
            let Self { copy_streams, staging, buffers, len } = self;
            for (i, range) in chunk_ranges(*len).enumerate() {
                let slot = &mut staging[i % STAGING_BUFFERS];
                let slice = |tensor: &Tensor| tensor.narrow(0, 0, range.len());
                let state = slot.state.iter().map(slice).collect::<Result<Vec<_>>>()?;
                let byte_offset = |tensor: &Tensor| range.start * tensor.dtype().size_in_bytes();
                for (buffer, tensor) in buffers.iter().zip(&state) {
                    let copied =
                        copy_streams.copy_to_device(buffer, byte_offset(tensor), tensor, &slot.free_event)?;
                    copy_streams.compute_wait(&copied)?;
                }
                body(range.clone(), &state)?;
                for (buffer, tensor) in buffers.iter().zip(&state) {
                    // The last event covers all earlier copies on the same stream.
                    slot.free_event = copy_streams.copy_to_host(tensor, buffer, byte_offset(tensor))?;
                }
            }
            Ok(())
        }
    }

    impl Drop for OffloadedState {
        fn drop(&mut self) {
            // The staging and pinned buffers must outlive the last copy. An error here means that the device has
            // failed.
            let _ = self.copy_streams.synchronize();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_are_even_whole_and_in_order(len in 0usize..100_000_000) {
            let mut end = 0;
            for range in chunk_ranges(len) {
                prop_assert_eq!(range.start, end);
                prop_assert!(range.start % CHUNK_ALIGN == 0 && !range.is_empty());
                prop_assert!(range.len() <= MAX_CHUNK_LEN);
                end = range.end;
            }
            prop_assert_eq!(end, len);
            prop_assert!(staging_bytes(8 * len as u64, len) <= (8 * STAGING_BUFFERS * MAX_CHUNK_LEN) as u64);
        }
    }
}
