//! Optimizer state that waits in host memory: it passes through a few windows on the card, one chunk of all
//! buffers after the other, while weights move in another.
//!
//! Owns the ranges that chunks are cut at, their bytes on the card and, with a card, the memory itself. Only rules
//! that look at one value at a time are updated in chunks; the numbers are the same to the bit.

use std::ops::Range;

use crate::job::OptimizerConfig as Rule;

/// Windows: one is filled, one is in use, one is emptied.
const STAGING_BUFFERS: usize = 3;

/// Values of a chunk at most: long copies reach the full speed of the link.
const MAX_CHUNK_LEN: usize = 1 << 22;

/// Chunks begin at multiples of this, so that every one is read in whole packs.
const CHUNK_ALIGN: usize = 1 << 10;

/// Whether the state of a rule can wait in host memory: it has some, of one value for each weight.
pub fn is_supported(rule: &Rule) -> bool {
    match rule {
        Rule::Adamw(_) | Rule::Lion(_) => true,
        Rule::Sgd(sgd) => sgd.momentum > 0.0,
        Rule::Adafactor(_) | Rule::Adamw8bit(_) => false,
    }
}

/// Values of a chunk of `len`: a sixteenth, where that is less than the longest.
fn chunk_len(len: usize) -> usize {
    len.div_ceil(16).next_multiple_of(CHUNK_ALIGN).min(MAX_CHUNK_LEN)
}

/// The chunks that `len` values are updated in.
pub fn chunk_ranges(len: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = chunk_len(len);
    (0..len).step_by(chunk.max(1)).map(move |start| start..(start + chunk).min(len))
}

/// Bytes of the windows for state of so many bytes over `len` weights.
pub fn staging_bytes(state: u64, len: usize) -> u64 {
    if len == 0 { 0 } else { state / len as u64 * (STAGING_BUFFERS * chunk_len(len)) as u64 }
}

#[cfg(feature = "cuda")]
pub use gpu::OffloadedState;

#[cfg(feature = "cuda")]
mod gpu {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor};

    use super::{Range, STAGING_BUFFERS, chunk_len, chunk_ranges};
    use crate::kernels::cuda::copy_streams::{CopyStreams, PinnedBuffer, StreamEvent};
    use crate::kernels::cuda::uninit;

    /// Flat buffers in host memory, and the windows they pass through.
    pub struct OffloadedState {
        copy_streams: CopyStreams,
        staging: Vec<StagingSlot>,
        buffers: Vec<PinnedBuffer>,
        len: usize,
    }

    /// A chunk of each buffer on the card, and when its memory may be filled again.
    struct StagingSlot {
        state: Vec<Tensor>,
        free_event: StreamEvent,
    }

    impl OffloadedState {
        /// So many buffers of `len` values, all zero.
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

        /// The buffers, in order, as tensors of the host.
        pub fn host_tensors(&self) -> impl Iterator<Item = Tensor> {
            self.buffers.iter().map(|buffer| buffer.tensor().clone())
        }

        /// Waits until the buffers are as the last update left them.
        pub fn synchronize(&self) -> Result<()> {
            self.copy_streams.synchronize()
        }

        /// Lets `body` update every chunk: it is given the range and the state of it, on the card.
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
                    // The last of the marks stands for all before it on the same stream.
                    slot.free_event = copy_streams.copy_to_host(tensor, buffer, byte_offset(tensor))?;
                }
            }
            Ok(())
        }
    }

    impl Drop for OffloadedState {
        fn drop(&mut self) {
            // The windows and the buffers are let go of after the last copy; an error here is the card's end.
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
