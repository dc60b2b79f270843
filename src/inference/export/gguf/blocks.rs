//! The types of GGUF tensors: floats and blocks that candle rounds to, and the legacy blocks, 32 values with one scale:
//! their grids, and their bytes when the scales are given.

use std::borrow::Cow;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use half::f16;

use super::super::error::ExportError;
use super::super::weights::check_f16;
use super::quantization::block_name;
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

/// The values of the parameter `name` in this type, rounded to the nearest. Refuses finite values that it cannot hold.
pub(in super::super) fn quantize(
    name: &str,
    values: Vec<f32>,
    shape: &[usize],
    dtype: GgmlDType,
) -> Result<QTensor, ExportError> {
    if dtype == GgmlDType::F16 {
        check_f16(name, &values)?;
    }
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?;
    let blocks = QTensor::quantize(&tensor, dtype)?;
    if dtype.block_size() > 1 {
        check_blocks(name, &tensor, &blocks)?;
    }
    Ok(blocks)
}

/// Refuses finite values that are decoded as infinities or NaN: the scale of a block is stored as f16. Decodes a few
/// blocks at a time.
fn check_blocks(name: &str, tensor: &Tensor, blocks: &QTensor) -> Result<(), ExportError> {
    const BLOCKS: usize = 256;
    let (dtype, bytes, source) = (blocks.dtype(), blocks.data()?, tensor.flatten_all()?);
    let (block, block_bytes) = (dtype.block_size(), dtype.type_size());
    for (at, bytes) in bytes.chunks(BLOCKS * block_bytes).enumerate() {
        let len = bytes.len() / block_bytes * block;
        let storage = QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, dtype)?;
        let decoded = QTensor::new(storage, len)?.dequantize(&Device::Cpu)?.to_vec1::<f32>()?;
        if decoded.iter().all(|value| value.is_finite()) {
            continue;
        }
        let values = source.narrow(0, at * BLOCKS * block, len)?.to_vec1::<f32>()?;
        let is_finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        let mut pairs = values.chunks_exact(block).zip(decoded.chunks_exact(block));
        if let Some((values, _)) = pairs.find(|(values, decoded)| is_finite(values) && !is_finite(decoded)) {
            let value =
                values.iter().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most });
            return Err(ExportError::Overflow { tensor: name.to_owned(), value, dtype: block_name(dtype) });
        }
    }
    Ok(())
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

    /// Far from the start, so that it is not in the first blocks that are checked.
    #[test]
    fn a_value_that_its_block_cannot_hold_is_refused_by_name() {
        let key = RngKey::new(2, stream_id("gguf overflow"));
        let normal: Vec<f32> = (0..300 * 512).map(|i| key.normal(i) as f32).collect();
        let names = [
            (GgmlDType::Q4_0, "q4_0"),
            (GgmlDType::Q4_1, "q4_1"),
            (GgmlDType::Q5_0, "q5_0"),
            (GgmlDType::Q5_1, "q5_1"),
            (GgmlDType::Q8_0, "q8_0"),
            (GgmlDType::Q4K, "q4_k"),
            (GgmlDType::Q5K, "q5_k"),
            (GgmlDType::Q6K, "q6_k"),
            (GgmlDType::F16, "f16"),
        ];
        for (dtype, name) in names {
            let with = |value: f32| {
                let mut values = normal.clone();
                values[299 * 512 + 7] = value;
                quantize("w", values, &[300, 512], dtype)
            };
            let error = with(-1e10).unwrap_err().to_string();
            assert_eq!(error, format!("`w` has the value -10000000000, which {name} cannot hold"));
            assert!(with(1000.0).is_ok(), "{name}");
        }
    }
}
