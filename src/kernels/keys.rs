//! The randomness of each sample of a micro-batch: what dropout draws its masks from.
//!
//! On a GPU it is derived from the epoch and the sample ids that were staged with the micro-batch, so that a replayed CUDA
//! graph drops for the samples that are there by then.

use crate::random::Random;

/// Keys for one layer.
#[derive(Clone, Copy)]
pub struct Keys<'a> {
    /// The randomness of the layer in all epochs.
    pub layer: Random,
    pub epoch: u64,
    /// Global ids of the samples, in order.
    pub ids: &'a [u64],
    /// These on the device, as [`staged`] lays them out; uploaded when they are needed where absent.
    pub on_device: Option<&'a candle_core::Tensor>,
}

impl Keys<'_> {
    pub fn of(&self, row: usize) -> Random {
        self.layer.at(self.epoch).at(self.ids[row])
    }

    /// Bytes of the keys of so many samples on a GPU.
    pub fn bytes(samples: usize) -> u64 {
        (samples * size_of::<Random>()) as u64
    }
}

/// The epoch, the sample ids and, where samples are padded, their lengths as one tensor of words is made of them.
pub fn staged(epoch: u64, ids: &[u64], lengths: &[u32]) -> Vec<u32> {
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let values = std::iter::once(epoch).chain(ids.iter().copied());
    values.flat_map(halves).chain(lengths.iter().copied()).collect()
}

/// Bytes of what is staged of so many samples, at most.
pub fn staged_bytes(samples: usize) -> usize {
    4 * (2 + 3 * samples)
}

#[cfg(feature = "cuda")]
mod on_device {
    use std::ffi::{c_int, c_void};

    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor};

    use super::{Keys, staged};
    use crate::kernels::cuda::{Stream, checked, fresh, graph, pointer, stream};
    use crate::random::Random;

    /// Words on the device that the host has now, and a replay would not have.
    pub fn upload(device: &CudaDevice, words: &[u32]) -> Result<Tensor> {
        graph::not_capturable("what is known of its samples is not staged with it");
        Tensor::new(words, &candle_core::Device::Cuda(device.clone()))
    }

    impl Keys<'_> {
        /// The key of each sample, on the device.
        pub fn derive(&self, device: &CudaDevice) -> Result<Tensor> {
            let uploaded = match self.on_device {
                Some(_) => None,
                None => Some(upload(device, &staged(self.epoch, self.ids, &[]))?),
            };
            let words = self.on_device.or(uploaded.as_ref());
            let keys = fresh(device, DType::U8, Keys::bytes(self.ids.len()) as usize)?;
            let samples = self.ids.len() as c_int;
            let from = words.map_or(Ok(std::ptr::null_mut()), pointer)?;
            // SAFETY: an epoch and as many ids were staged, and there is a key for each.
            checked("sample_keys", unsafe {
                sample_keys(&self.layer, from, pointer(&keys)?, samples, stream(device))
            })?;
            Ok(keys)
        }
    }

    unsafe extern "C" {
        fn sample_keys(
            layer: *const Random,
            staged: *const c_void,
            to: *mut c_void,
            samples: c_int,
            stream: Stream,
        ) -> c_int;
    }
}

#[cfg(feature = "cuda")]
pub use on_device::upload;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::stream;

    #[test]
    fn what_is_staged_is_laid_out_as_kernels_read_it() {
        let words = staged(1 << 40 | 7, &[3, u64::MAX], &[5, 6]);
        assert_eq!(words, [7, 256, 3, 0, u32::MAX, u32::MAX, 5, 6]);
        assert_eq!(words.len() * 4, staged_bytes(2));
    }

    #[test]
    fn keys_are_those_of_the_samples() {
        let layer = Random::new(3, stream("layer"));
        let keys = Keys { layer, epoch: 2, ids: &[5, 9], on_device: None };
        assert_eq!(keys.of(1), layer.at(2).at(9));
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(device) = crate::layers::check::device() {
            let derived: Vec<u8> = keys.derive(&device).unwrap().to_vec1().unwrap();
            let wanted: Vec<u8> = [keys.of(0), keys.of(1)]
                .iter()
                // SAFETY: two words without padding.
                .flat_map(|key| unsafe { std::mem::transmute::<Random, [u8; 16]>(*key) })
                .collect();
            assert_eq!(derived, wanted);
        }
    }
}
