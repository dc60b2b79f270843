//! Zeroes the masked values of a flat buffer, in place: those whose byte in the mask is 0.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::{cpu, reference};
use crate::with_elem;

/// Values per chunk of a thread.
const CHUNK: usize = 32 * 1024;

/// Reference implementation.
pub fn reference(values: &Tensor, mask: &Tensor) -> Result<Tensor> {
    mask.where_cond(values, &values.zeros_like()?)
}

/// `values` becomes 0 where `mask`, of bytes and of the same length, is 0.
pub fn apply(values: &Tensor, mask: &Tensor) -> Result<()> {
    on_cuda!(values, |device| gpu::apply(device, values, mask));
    if !reference::has_cpu_kernel(values) {
        return values.slice_set(&reference(values, mask)?, 0, 0);
    }
    let mask = cpu::view::<u8>(mask)?;
    with_elem!(values.dtype(), T => cpu::with_slice_mut::<T, _>(values, |values| {
        values.par_chunks_mut(CHUNK).zip(mask.par_chunks(CHUNK)).for_each(|(values, mask)| {
            // Selects rather than multiplies: the result is +0, and a NaN does not survive.
            values.iter_mut().zip(mask).for_each(|(v, keep)| *v = if *keep == 0 { T::default() } else { *v });
        })
    }))
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::layers::gradcheck::test_device;

    #[test]
    fn masked_values_become_zero_and_others_stay() {
        let device = test_device();
        for (len, dtype) in
            [(0, DType::F32), (7, DType::F32), (100_003, DType::F32), (40_001, DType::BF16), (33, DType::F16)]
        {
            let values: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin() - 2.0).collect();
            let mask: Vec<u8> = (0..len).map(|i| u8::from(i * i % 7 > 2)).collect();
            let tensor = Tensor::from_vec(values, len, &device).unwrap().to_dtype(dtype).unwrap();
            let mask = Tensor::from_vec(mask, len, &device).unwrap();
            let expected = if len == 0 { tensor.copy().unwrap() } else { reference(&tensor, &mask).unwrap() };
            apply(&tensor, &mask).unwrap();
            let bits = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(bits(&tensor), bits(&expected), "{len} of {dtype:?}");
        }
    }

    #[test]
    fn a_masked_nan_or_negative_value_becomes_positive_zero() {
        let values = Tensor::new(&[f32::NAN, -1.0, f32::NEG_INFINITY, -3.0], &test_device()).unwrap();
        apply(&values, &Tensor::new(&[0u8, 0, 0, 1], &test_device()).unwrap()).unwrap();
        let bits: Vec<u32> = values.to_vec1::<f32>().unwrap().iter().map(|v| v.to_bits()).collect();
        assert_eq!(bits, [0, 0, 0, (-3f32).to_bits()]);
    }
}
