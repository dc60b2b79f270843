//! The legacy blocks of GGUF, 32 values with one scale: their grids, and their bytes when the scales are given.

use candle_core::quantized::GgmlDType;
use half::f16;

use crate::quantization::grid::{BlockGrid, BlockScale};

/// The grid of a type; `None` for floats and for blocks whose scales are quantized too.
pub(in super::super) fn grid(dtype: GgmlDType) -> Option<BlockGrid> {
    let (low, high, has_minimum) = match dtype {
        GgmlDType::Q4_0 => (-8.0, 7.0, false),
        GgmlDType::Q4_1 => (0.0, 15.0, true),
        GgmlDType::Q5_0 => (-16.0, 15.0, false),
        GgmlDType::Q5_1 => (0.0, 31.0, true),
        GgmlDType::Q8_0 => (-127.0, 127.0, false),
        _ => return None,
    };
    Some(BlockGrid { block: dtype.block_size(), low, high, has_minimum, half: true })
}

/// The bytes of values that are on the grid, by the scales of their blocks.
pub(super) fn encode(values: &[f32], scales: &[BlockScale], grid: BlockGrid) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (values, scale) in values.chunks_exact(grid.block).zip(scales) {
        bytes.extend(f16::from_f32(scale.scale).to_le_bytes());
        if grid.has_minimum {
            bytes.extend(f16::from_f32(scale.minimum).to_le_bytes());
        }
        let codes = values.iter().map(|value| grid.code(*value, *scale));
        if grid.high - grid.low > 31.0 {
            bytes.extend(codes.map(|code| code as i8 as u8));
            continue;
        }
        // From 0 up; the fifth bits of all values come first, then the lower four, two values per byte.
        let codes: Vec<u8> = codes.map(|code| (code - grid.low) as u8).collect();
        if grid.high - grid.low > 15.0 {
            let fifth =
                codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | u32::from(code >> 4) << i);
            bytes.extend(fifth.to_le_bytes());
        }
        let (first, second) = codes.split_at(grid.block / 2);
        bytes.extend(first.iter().zip(second).map(|(low, high)| low & 15 | high << 4));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use candle_core::Device;
    use candle_core::quantized::{QStorage, QTensor};

    use super::*;
    use crate::base::random::{RngKey, stream_id};

    #[test]
    fn candle_reads_the_values_that_were_encoded() {
        let key = RngKey::new(1, stream_id("gguf blocks"));
        let types = [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q5_0, GgmlDType::Q5_1, GgmlDType::Q8_0];
        for dtype in types {
            let grid = grid(dtype).unwrap();
            let values: Vec<f64> = (0..128).map(|i| key.normal(i) * (1.0 + i as f64)).collect();
            let weights = [1.0; 32];
            let scales: Vec<BlockScale> =
                values.chunks_exact(32).map(|block| grid.choose(block, &weights)).collect();
            let rounded: Vec<f32> =
                (0..128).map(|i| grid.rounded(values[i] as f32, scales[i / 32])).collect();
            let bytes = encode(&rounded, &scales, grid);
            let storage = QStorage::from_data(Cow::Owned(bytes), &Device::Cpu, dtype).unwrap();
            let tensor = QTensor::new(storage, (2, 64)).unwrap().dequantize(&Device::Cpu).unwrap();
            let read: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
            assert_eq!(read, rounded, "{dtype:?}");
            let distinct: std::collections::BTreeSet<u32> =
                rounded[..32].iter().map(|value| value.to_bits()).collect();
            assert!(distinct.len() > 7, "{dtype:?}");
        }
        assert_eq!(super::grid(GgmlDType::Q4K), None);
    }
}
