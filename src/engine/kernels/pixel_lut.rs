//! Converts u8 images to normalized values: (..., channels) through a 256-entry lookup table per channel.

#[cfg(feature = "cuda")]
mod gpu;

use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, cpu};
use crate::base::features::PixelLut;

/// Pixels per parallel chunk.
const CHUNK: usize = 1 << 14;

#[cfg(feature = "cuda")]
pub use gpu::expand;

/// The values of `bytes`, channels last, rounded to `T`: the reference, and the CPU kernel.
pub fn expand_bytes<T: Elem<Acc = f32>>(lut: &PixelLut, bytes: &[u8]) -> Vec<T> {
    let mut values = cpu::uninit::<T>(bytes.len());
    let tables: Vec<[T; 256]> = lut.tables.iter().map(|table| table.map(T::from_acc)).collect();
    let tables = tables.as_slice();
    let chunk = CHUNK * tables.len().max(1);
    values.par_chunks_mut(chunk).zip(bytes.par_chunks(chunk)).for_each(|(values, bytes)| match tables {
        [grey] => lookup_pixels([grey], values, bytes),
        [r, g, b] => lookup_pixels([r, g, b], values, bytes),
        tables => {
            let tables = tables.iter().cycle();
            values.iter_mut().zip(bytes).zip(tables).for_each(|((v, b), table)| *v = table[*b as usize]);
        }
    });
    values
}

/// A constant channel count keeps bounds checks out of the loop.
fn lookup_pixels<T: Copy, const C: usize>(tables: [&[T; 256]; C], values: &mut [T], bytes: &[u8]) {
    for (values, bytes) in values.chunks_exact_mut(C).zip(bytes.chunks_exact(C)) {
        for c in 0..C {
            values[c] = tables[c][bytes[c] as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::{RngKey, stream_id};

    fn test_lut(channels: usize) -> PixelLut {
        let table = |c: usize| std::array::from_fn(|byte| (byte as f32 / 255.0 - 0.1 * c as f32) / 0.3);
        PixelLut { tables: (0..channels).map(table).collect() }
    }

    fn bytes(len: usize, seed: u64) -> Vec<u8> {
        (0..len as u64).map(|i| RngKey::new(seed, stream_id("test")).bits(i) as u8).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Every byte maps to the value of its channel, in every chunk.
        #[test]
        fn a_byte_is_looked_up_in_its_channel(channels in 1usize..5, pixels in 1usize..3 * CHUNK, seed: u64) {
            let (palette, bytes) = (test_lut(channels), bytes(pixels * channels, seed));
            let wanted: Vec<f32> =
                bytes.iter().enumerate().map(|(i, b)| palette.tables[i % channels][*b as usize]).collect();
            prop_assert!(expand_bytes::<f32>(&palette, &bytes) == wanted);
            let rounded: Vec<bf16> = wanted.iter().map(|v| bf16::from_f32(*v)).collect();
            prop_assert!(expand_bytes::<bf16>(&palette, &bytes) == rounded);
        }
    }

    /// The GPU gives the same bits as the CPU, rounded where the network computes in a narrower type.
    #[cfg(feature = "cuda")]
    #[test]
    fn gpu_matches_cpu() {
        use candle_core::{DType, Tensor};
        let device = crate::layers::gradcheck::test_device();
        if device.is_cpu() {
            return eprintln!("skipped: needs a GPU (TRAINER_TEST_DEVICE=cuda)");
        }
        for (channels, pixels) in [(1, 1), (3, 4095), (3, 70_000), (4, 12_345), (2, 4096)] {
            let (palette, bytes) = (test_lut(channels), bytes(pixels * channels, 1));
            let wanted =
                Tensor::from_vec(expand_bytes::<f32>(&palette, &bytes), (pixels, channels), &device).unwrap();
            let tables = Tensor::from_slice(palette.tables.as_flattened(), (channels, 256), &device).unwrap();
            let bytes = Tensor::from_vec(bytes, (pixels, channels), &device).unwrap();
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let expanded = Tensor::zeros((pixels, channels), dtype, &device).unwrap();
                expand(&bytes, &tables, &expanded).unwrap();
                let bits = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
                assert!(
                    bits(&expanded) == bits(&wanted.to_dtype(dtype).unwrap()),
                    "{channels} {pixels} {dtype:?}"
                );
            }
        }
    }
}
