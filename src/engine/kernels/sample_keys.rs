//! The RNG key of each sample of a micro-batch: what dropout draws its masks from.
//!
//! On a GPU, a kernel derives the keys from the epoch and the sample ids uploaded with the micro-batch, so a replayed
//! CUDA graph draws masks for the samples of the current batch.

use crate::base::random::RngKey;

/// The sample keys of one layer.
#[derive(Clone, Copy)]
pub struct SampleKeys<'a> {
    /// RNG key of the layer, the same in all epochs.
    pub layer: RngKey,
    pub epoch: u64,
    /// Global ids of the samples, in order.
    pub ids: &'a [u64],
    /// Epoch and ids on the device, in the layout of [`pack_sample_info`]. If `None`, they are uploaded when needed.
    pub sample_info: Option<&'a candle_core::Tensor>,
}

impl SampleKeys<'_> {
    pub fn for_row(&self, row: usize) -> RngKey {
        self.layer.fold_in(self.epoch).fold_in(self.ids[row])
    }

    /// Bytes of the keys of `samples` samples on a GPU.
    pub fn bytes(samples: usize) -> u64 {
        (samples * size_of::<RngKey>()) as u64
    }
}

/// Packs the epoch, the sample ids and, for padded samples, their lengths into the words of one tensor.
pub fn pack_sample_info(epoch: u64, ids: &[u64], lengths: &[u32]) -> Vec<u32> {
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let values = std::iter::once(epoch).chain(ids.iter().copied());
    values.flat_map(halves).chain(lengths.iter().copied()).collect()
}

/// Upper bound in bytes of the sample info of `samples` samples.
pub fn sample_info_bytes(samples: usize) -> usize {
    4 * (2 + 3 * samples)
}

#[cfg(feature = "cuda")]
mod gpu {
    use std::ffi::{c_int, c_void};

    use candle_core::cuda_backend::CudaDevice;
    use candle_core::{DType, Result, Tensor};

    use super::{SampleKeys, pack_sample_info};
    use crate::base::random::RngKey;
    use crate::kernels::cuda::{RawStream, check_status, graph, pointer, stream, uninit};
    use crate::kernels::kernel_timer;

    /// Uploads words from the host now. A graph replay would not repeat this with new values.
    pub fn upload(device: &CudaDevice, words: &[u32]) -> Result<Tensor> {
        graph::not_capturable("the sample info is not uploaded with the batch");
        Tensor::new(words, &candle_core::Device::Cuda(device.clone()))
    }

    impl SampleKeys<'_> {
        /// Derives the key of each sample on the device.
        pub fn derive(&self, device: &CudaDevice) -> Result<Tensor> {
            let _scope = kernel_timer::enter(module_path!());
            let uploaded = match self.sample_info {
                Some(_) => None,
                None => Some(upload(device, &pack_sample_info(self.epoch, self.ids, &[]))?),
            };
            let words = self.sample_info.or(uploaded.as_ref());
            let keys = uninit(device, DType::U8, SampleKeys::bytes(self.ids.len()) as usize)?;
            let samples = self.ids.len() as c_int;
            let from = words.map_or(Ok(std::ptr::null_mut()), pointer)?;
            // SAFETY: the sample info holds the epoch and an id per sample, and `keys` a key per sample.
            check_status("sample_keys", unsafe {
                sample_keys(&self.layer, from, pointer(&keys)?, samples, stream(device))
            })?;
            Ok(keys)
        }
    }

    unsafe extern "C" {
        fn sample_keys(
            layer: *const RngKey,
            sample_info: *const c_void,
            to: *mut c_void,
            samples: c_int,
            stream: RawStream,
        ) -> c_int;
    }
}

#[cfg(feature = "cuda")]
pub use gpu::upload;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::stream_id;

    #[test]
    fn sample_info_is_laid_out_as_kernels_read_it() {
        let words = pack_sample_info(1 << 40 | 7, &[3, u64::MAX], &[5, 6]);
        assert_eq!(words, [7, 256, 3, 0, u32::MAX, u32::MAX, 5, 6]);
        assert_eq!(words.len() * 4, sample_info_bytes(2));
    }

    #[test]
    fn keys_are_those_of_the_samples() {
        let layer = RngKey::new(3, stream_id("layer"));
        let keys = SampleKeys { layer, epoch: 2, ids: &[5, 9], sample_info: None };
        assert_eq!(keys.for_row(1), layer.fold_in(2).fold_in(9));
        #[cfg(feature = "cuda")]
        if let candle_core::Device::Cuda(device) = crate::layers::gradcheck::test_device() {
            let derived: Vec<u8> = keys.derive(&device).unwrap().to_vec1().unwrap();
            let wanted: Vec<u8> = [keys.for_row(0), keys.for_row(1)]
                .iter()
                // SAFETY: `RngKey` is two u64 words without padding.
                .flat_map(|key| unsafe { std::mem::transmute::<RngKey, [u8; 16]>(*key) })
                .collect();
            assert_eq!(derived, wanted);
        }
    }
}
