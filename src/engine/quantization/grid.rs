//! The values that a block of a quantized matrix can have: `minimum + scale * code`, where codes are integers of a few
//! bits, and scale and minimum belong to the block.

use half::f16;

use super::blocks::{BLOCK, BlockBits};

/// The blocks of a format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockGrid {
    /// Inputs that share a scale.
    pub block: usize,
    /// The smallest and the largest code.
    pub low: f32,
    pub high: f32,
    /// Blocks have a minimum; it is 0 otherwise.
    pub has_minimum: bool,
    /// Scale and minimum are stored as f16, and a scale may be negative.
    pub half: bool,
}

/// What the values of a block share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockScale {
    pub scale: f32,
    pub minimum: f32,
}

/// Ranges that are tried, as fractions of the one that covers all values. Above 1 the largest value is not the last of
/// the grid, whose negative side is longer.
const FRACTIONS: [f64; 12] = [1.0, 1.14, 1.07, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.72, 0.68, 0.64];

impl BlockGrid {
    /// The blocks of [`blocks`](super::blocks).
    pub fn of_bits(bits: BlockBits) -> Self {
        let high = if bits == BlockBits::Four { 7.0 } else { 127.0 };
        Self { block: BLOCK, low: -high, high, has_minimum: false, half: false }
    }

    /// The code of the nearest value.
    pub fn code(self, value: f32, block: BlockScale) -> f32 {
        match block.scale == 0.0 {
            true => 0.0,
            false => ((value - block.minimum) / block.scale).round_ties_even().clamp(self.low, self.high),
        }
    }

    /// The nearest value.
    pub fn rounded(self, value: f32, block: BlockScale) -> f32 {
        block.minimum + block.scale * self.code(value, block)
    }

    /// The scale with the least squared error of `values`, each weighted, among a few. It is infinite if f16 holds none
    /// of them.
    pub fn choose(self, values: &[f64], weights: &[f64]) -> BlockScale {
        let stored = |value: f64| if self.half { f16::from_f64(value).to_f32() } else { value as f32 };
        let mut best = (f64::INFINITY, BlockScale { scale: 1.0, minimum: 0.0 });
        let mut overflows = true;
        let (low, high) = values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(*value), high.max(*value))
        });
        for fraction in FRACTIONS {
            let (scale, minimum) = match self.has_minimum {
                true => {
                    let range = fraction * (high - low);
                    (range / f64::from(self.high - self.low), low + (high - low - range) / 2.0)
                }
                // The value of the largest magnitude has the lowest code, which may be one more than the highest.
                false => {
                    let extreme = if -low > high { low } else { high };
                    let scale = fraction * extreme / f64::from(self.low);
                    (if self.half { scale } else { scale.abs() }, 0.0)
                }
            };
            let block = BlockScale { scale: stored(scale), minimum: stored(minimum) };
            if !(block.scale.is_finite() && block.minimum.is_finite()) {
                continue;
            }
            overflows = false;
            let error = values.iter().zip(weights).map(|(value, weight)| {
                weight * (f64::from(self.rounded(*value as f32, block)) - value).powi(2)
            });
            let error = error.sum();
            if error < best.0 {
                best = (error, block);
            }
        }
        match overflows && values.iter().all(|value| value.is_finite()) {
            true => BlockScale { scale: f32::INFINITY, minimum: 0.0 },
            false => best.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::{RngKey, stream_id};

    #[test]
    fn rounding_again_changes_nothing() {
        let key = RngKey::new(1, stream_id("grid"));
        let q4_0 = BlockGrid { block: 32, low: -8.0, high: 7.0, has_minimum: false, half: true };
        let q5_1 = BlockGrid { low: 0.0, high: 31.0, has_minimum: true, ..q4_0 };
        for grid in [q4_0, q5_1, BlockGrid::of_bits(BlockBits::Four), BlockGrid::of_bits(BlockBits::Eight)] {
            for block in 0..50 {
                let at = |i: u64| key.normal(block * 200 + i) * 0.02 + if block > 25 { 0.05 } else { 0.0 };
                let values: Vec<f64> = (0..grid.block as u64).map(at).collect();
                let scale = grid.choose(&values, &vec![1.0; grid.block]);
                let largest = values.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
                for value in values {
                    let rounded = grid.rounded(value as f32, scale);
                    assert_eq!(grid.rounded(rounded, scale), rounded);
                    assert!((f64::from(rounded) - value).abs() < 0.5 * largest, "{value} {rounded}");
                }
            }
            // A block of zeros has a scale.
            let zeros = grid.choose(&vec![0.0; grid.block], &vec![1.0; grid.block]);
            assert_eq!(grid.rounded(0.0, zeros), 0.0);
        }
    }

    #[test]
    fn values_beyond_all_scales_have_an_infinite_one() {
        let q4_1 = BlockGrid { block: 32, low: 0.0, high: 15.0, has_minimum: true, half: true };
        let q4_0 = BlockGrid { low: -8.0, high: 7.0, has_minimum: false, ..q4_1 };
        for grid in [q4_0, q4_1] {
            assert!(grid.choose(&[0.5, -1e10], &[1.0; 2]).scale.is_infinite());
            assert!(grid.choose(&[0.5, -1e4], &[1.0; 2]).scale.is_finite());
            // Not a matter of f16.
            assert_eq!(grid.choose(&[0.5, f64::NAN], &[1.0; 2]).scale, 1.0);
        }
    }

    #[test]
    fn a_weighted_value_is_close() {
        let grid = BlockGrid::of_bits(BlockBits::Four);
        let values = [1.0, 0.65, 0.1, -0.2];
        let error = |weights: [f64; 4]| {
            let scale = grid.choose(&values, &weights);
            (grid.rounded(0.65, scale) - 0.65).abs()
        };
        assert!(error([1.0, 1e6, 1.0, 1.0]) < error([1e6, 1.0, 1.0, 1.0]));
    }
}
