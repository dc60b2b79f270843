//! Optimizer state that waits in host memory: it passes through a few windows on the card, one chunk of all
//! buffers after the other, while weights move in another.
//!
//! Owns the ranges that chunks are cut at, their bytes on the card and, with a card, the memory itself. Only rules
//! that look at one value at a time are updated in chunks; the numbers are the same to the bit.

use std::ops::Range;

use crate::job::Optimizer as Rule;

/// Windows: one is filled, one is in use, one is emptied.
const WINDOWS: usize = 3;

/// Values of a chunk at most: long copies reach the full speed of the link.
const LONGEST: usize = 1 << 22;

/// Chunks begin at multiples of this, so that every one is read in whole packs.
const EVEN: usize = 1 << 10;

/// Whether the state of a rule can wait in host memory: it has some, of one value for each weight.
pub fn can(rule: &Rule) -> bool {
    match rule {
        Rule::Adamw(_) | Rule::Lion(_) => true,
        Rule::Sgd(sgd) => sgd.momentum > 0.0,
        Rule::Adafactor(_) | Rule::Adamw8bit(_) => false,
    }
}

/// Values of a chunk of `len`: a sixteenth, where that is less than the longest.
fn chunk(len: usize) -> usize {
    len.div_ceil(16).next_multiple_of(EVEN).min(LONGEST)
}

/// The chunks that `len` values are updated in.
pub fn chunks(len: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = chunk(len);
    (0..len).step_by(chunk.max(1)).map(move |start| start..(start + chunk).min(len))
}

/// Bytes of the windows for state of so many bytes over `len` weights.
pub fn window_bytes(state: u64, len: usize) -> u64 {
    if len == 0 { 0 } else { state / len as u64 * (WINDOWS * chunk(len)) as u64 }
}

#[cfg(feature = "cuda")]
pub use card::Away;

#[cfg(feature = "cuda")]
mod card {
    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor};

    use super::{Range, WINDOWS, chunk, chunks};
    use crate::kernels::cuda::fresh;
    use crate::kernels::cuda::link::{Link, Mark, Pinned};

    /// Flat buffers in host memory, and the windows they pass through.
    pub struct Away {
        link: Link,
        windows: Vec<Window>,
        buffers: Vec<Pinned>,
        len: usize,
    }

    /// A chunk of each buffer on the card, and when its memory may be filled again.
    struct Window {
        state: Vec<Tensor>,
        free: Mark,
    }

    impl Away {
        /// So many buffers of `len` values, all zero.
        pub fn new(device: &CudaDevice, dtype: DType, count: usize, len: usize) -> Result<Self> {
            let link = Link::new(device)?;
            let pinned = (0..count).map(|_| Pinned::new(device, dtype, len));
            let buffers = pinned.collect::<Result<_>>()?;
            let window = || {
                let state = (0..count).map(|_| fresh(device, dtype, chunk(len)));
                Ok(Window { state: state.collect::<Result<_>>()?, free: link.now()? })
            };
            let windows = (0..WINDOWS).map(|_| window()).collect::<Result<_>>()?;
            Ok(Self { windows, buffers, len, link })
        }

        /// The buffers, in order, as tensors of the host.
        pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
            self.buffers.iter().map(|buffer| buffer.tensor().clone())
        }

        /// Waits until the buffers are as the last update left them.
        pub fn settle(&self) -> Result<()> {
            self.link.settle()
        }

        /// Lets `body` update every chunk: it is given the range and the state of it, on the card.
        pub fn each(&mut self, body: impl Fn(Range<usize>, &[Tensor]) -> Result<()>) -> Result<()> {
            let Self { link, windows, buffers, len } = self;
            for (i, range) in chunks(*len).enumerate() {
                let window = &mut windows[i % WINDOWS];
                let part = |tensor: &Tensor| tensor.narrow(0, 0, range.len());
                let state = window.state.iter().map(part).collect::<Result<Vec<_>>>()?;
                let byte = |tensor: &Tensor| range.start * tensor.dtype().size_in_bytes();
                for (buffer, tensor) in buffers.iter().zip(&state) {
                    let came = link.fetch(buffer, byte(tensor), tensor, &window.free)?;
                    link.computes_after(&came)?;
                }
                body(range.clone(), &state)?;
                for (buffer, tensor) in buffers.iter().zip(&state) {
                    // The last of the marks stands for all before it on the same stream.
                    window.free = link.send(tensor, buffer, byte(tensor))?;
                }
            }
            Ok(())
        }
    }

    impl Drop for Away {
        fn drop(&mut self) {
            // The windows and the buffers are let go of after the last copy; an error here is the card's end.
            let _ = self.link.settle();
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
            for range in chunks(len) {
                prop_assert_eq!(range.start, end);
                prop_assert!(range.start % EVEN == 0 && !range.is_empty());
                prop_assert!(range.len() <= LONGEST);
                end = range.end;
            }
            prop_assert_eq!(end, len);
            prop_assert!(window_bytes(8 * len as u64, len) <= (8 * WINDOWS * LONGEST) as u64);
        }
    }
}
