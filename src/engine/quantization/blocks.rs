//! Matrices as integers of 4 or 8 bits with a scale per block of 128 inputs: the weights of language models, whose
//! activations stay floats.

/// Inputs that share a scale.
pub const BLOCK: usize = 128;

/// Bits of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockBits {
    Four,
    Eight,
}

/// The shape of a matrix, and the dimension that its blocks run along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    pub rows: usize,
    pub cols: usize,
    pub axis: usize,
}

impl BlockLayout {
    /// The shape of the scales.
    pub fn scale_shape(self) -> [usize; 2] {
        match self.axis {
            0 => [self.rows.div_ceil(BLOCK), self.cols],
            _ => [self.rows, self.cols.div_ceil(BLOCK)],
        }
    }

    /// Which scale belongs to value `at`.
    fn scale_index(self, at: usize) -> usize {
        let (row, col) = (at / self.cols, at % self.cols);
        match self.axis {
            0 => row / BLOCK * self.cols + col,
            _ => row * self.cols.div_ceil(BLOCK) + col / BLOCK,
        }
    }
}

/// Scales of 4 bits that are tried, as fractions of the one that represents the largest value.
const FRACTIONS: [f32; 8] = [1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7];

/// The largest integer of these bits; the smallest is its negative.
fn largest_integer(bits: BlockBits) -> f32 {
    if bits == BlockBits::Four { 7.0 } else { 127.0 }
}

fn rounded(value: f32, scale: f32, most: f32) -> f32 {
    (value / scale).round_ties_even().clamp(-most, most)
}

/// The integers of a matrix and the scales of its blocks. With 4 bits a scale is the one with the least squared error
/// among a few that clip the largest values.
pub fn quantize(values: &[f32], layout: BlockLayout, bits: BlockBits) -> (Vec<i8>, Vec<f32>) {
    let most = largest_integer(bits);
    let fractions = if bits == BlockBits::Four { &FRACTIONS[..] } else { &FRACTIONS[..1] };
    let blocks = layout.scale_shape().iter().product();
    let mut largest = vec![0f32; blocks];
    for (at, value) in values.iter().enumerate() {
        let block = &mut largest[layout.scale_index(at)];
        *block = block.max(value.abs());
    }
    let scale = |largest: f32, fraction: f32| {
        let scale = fraction * largest / most;
        if scale.is_normal() { scale } else { 1.0 }
    };
    let mut best: Vec<(f32, f32)> =
        largest.iter().map(|largest| (f32::INFINITY, scale(*largest, 1.0))).collect();
    for fraction in fractions {
        let mut errors = vec![0f32; blocks];
        for (at, value) in values.iter().enumerate() {
            let block = layout.scale_index(at);
            let scale = scale(largest[block], *fraction);
            errors[block] += (rounded(*value, scale, most) * scale - value).powi(2);
        }
        for (block, error) in errors.into_iter().enumerate() {
            if error < best[block].0 {
                best[block] = (error, scale(largest[block], *fraction));
            }
        }
    }
    let scales: Vec<f32> = best.into_iter().map(|(_, scale)| scale).collect();
    (integers(values, &scales, layout, bits), scales)
}

/// The integers of a matrix whose blocks have these scales.
pub fn integers(values: &[f32], scales: &[f32], layout: BlockLayout, bits: BlockBits) -> Vec<i8> {
    let most = largest_integer(bits);
    let integer = |(at, value): (usize, &f32)| rounded(*value, scales[layout.scale_index(at)], most) as i8;
    values.iter().enumerate().map(integer).collect()
}

/// The values that integers stand for.
pub fn dequantize(mut integers: Vec<f32>, scales: &[f32], layout: BlockLayout) -> Vec<f32> {
    for (at, value) in integers.iter_mut().enumerate() {
        *value *= scales[layout.scale_index(at)];
    }
    integers
}

/// Two integers of 4 bits per byte, the first in the lower half.
pub fn pack(integers: &[i8]) -> Vec<u8> {
    let low = |integer: i8| integer as u8 & 15;
    integers.chunks(2).map(|pair| low(pair[0]) | pair.get(1).map_or(0, |second| low(*second) << 4)).collect()
}

/// The first `len` integers of packed bytes.
pub fn unpack(bytes: &[u8], len: usize) -> Vec<i8> {
    let integer = |at: usize| {
        let shifted = if at.is_multiple_of(2) { bytes[at / 2] << 4 } else { bytes[at / 2] };
        shifted as i8 >> 4
    };
    (0..len).map(integer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::{RngKey, stream_id};

    #[test]
    fn a_value_moves_by_half_a_step_of_its_block() {
        let key = RngKey::new(1, stream_id("blocks"));
        for (rows, cols, axis) in [(300, 5, 0), (4, 200, 1), (128, 3, 0), (7, 128, 1)] {
            let layout = BlockLayout { rows, cols, axis };
            // Blocks of very different sizes.
            let values: Vec<f32> = (0..(rows * cols) as u64)
                .map(|i| (2.0 * key.f64(i) - 1.0) as f32 * (1 + layout.scale_index(i as usize)) as f32)
                .collect();
            for bits in [BlockBits::Eight, BlockBits::Four] {
                let (integers, scales) = quantize(&values, layout, bits);
                assert_eq!(scales.len(), layout.scale_shape().iter().product::<usize>());
                let floats: Vec<f32> = integers.iter().map(|integer| f32::from(*integer)).collect();
                let restored = dequantize(floats, &scales, layout);
                let clips = if bits == BlockBits::Four { 3.0 } else { 0.501 };
                for (at, value) in values.iter().enumerate() {
                    let step = scales[layout.scale_index(at)];
                    assert!((restored[at] - value).abs() <= clips * step, "{value} {}", restored[at]);
                }
                // Values of the grid stay what they are.
                assert!(super::integers(&restored, &scales, layout, bits) == integers);
                assert_eq!(unpack(&pack(&[-7, 7, 0, -1, 5]), 5), [-7, 7, 0, -1, 5]);
            }
        }
    }
}
