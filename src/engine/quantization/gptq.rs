//! GPTQ: rounds the weights of a linear layer so that its outputs change least on the inputs that it has.
//!
//! Inputs are rounded in order, and what rounding one costs is made up for by those that follow, by the inverse of the
//! products of inputs: Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained
//! transformers", 2022. A block's scale is chosen from its weights as updated when the block begins.

use rayon::prelude::*;

use super::grid::{BlockGrid, BlockScale};

/// What is added to the diagonal of the products, as a fraction of its mean: the weight of a small change of the
/// weights themselves against one of the outputs.
pub const DAMPING: f64 = 0.01;

/// Rows of weights that are rounded together, so that a row of the factor is read once for them.
const ROWS: usize = 16;

/// The upper triangular factor `U` of the inverse of the products `X'X`: `U'U = (X'X)^-1`.
pub struct InverseFactor {
    /// Row by row.
    values: Vec<f64>,
    inputs: usize,
}

impl InverseFactor {
    /// Host bytes for this many inputs.
    pub fn bytes(inputs: usize) -> u64 {
        (inputs * inputs * size_of::<f64>()) as u64
    }

    /// Of the products (`inputs`, `inputs`), which are symmetric. Inputs that are always zero get a diagonal of one.
    pub fn new(products: &[f32], inputs: usize, damping: f64) -> Self {
        let mut values: Vec<f64> = products.iter().map(|value| f64::from(*value)).collect();
        let mean = (0..inputs).map(|i| values[i * (inputs + 1)]).sum::<f64>() / inputs as f64;
        let mean = if mean.is_normal() { mean } else { 1.0 };
        for i in 0..inputs {
            let diagonal = &mut values[i * (inputs + 1)];
            *diagonal = if *diagonal > 0.0 { *diagonal } else { mean } + damping * mean;
        }
        // Damping keeps the pivots positive; rounding may not, and the floor makes that harmless.
        let floor = 1e-3 * damping * mean;
        factor(&mut values, inputs, floor);
        invert(&mut values, inputs);
        Self { values, inputs }
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.inputs..][..self.inputs]
    }
}

/// Turns `H` into an upper triangular `R` with `R R' = H`, from its last row to the first. What is below the diagonal
/// has no meaning afterwards.
fn factor(h: &mut [f64], n: usize, floor: f64) {
    for j in (0..n).rev() {
        let (before, rest) = h.split_at_mut(j * n);
        let row = &mut rest[..n];
        let pivot = (row[j] - dot(&row[j + 1..], &row[j + 1..])).max(floor).sqrt();
        row[j] = pivot;
        before.par_chunks_mut(n).with_min_len(8).for_each(|other| {
            other[j] = (other[j] - dot(&other[j + 1..], &row[j + 1..])) / pivot;
        });
    }
}

/// Turns an upper triangular matrix into its inverse, from the last row to the first.
fn invert(r: &mut [f64], n: usize) {
    const COLUMNS: usize = 256;
    for i in (0..n).rev() {
        let (head, below) = r.split_at_mut((i + 1) * n);
        let row = &mut head[i * n..];
        let factors = row[i..].to_vec();
        row[i..].fill(0.0);
        row[i] = 1.0;
        let (first, scale) = (i, 1.0 / factors[0]);
        row.par_chunks_mut(COLUMNS).enumerate().for_each(|(chunk, into)| {
            let columns = chunk * COLUMNS..chunk * COLUMNS + into.len();
            for (k, factor) in factors.iter().enumerate().skip(1) {
                // Row `first + k` of the inverse begins at its diagonal.
                if first + k < columns.end {
                    let other = &below[(k - 1) * n..][columns.clone()];
                    into.iter_mut().zip(other).for_each(|(into, other)| *into -= factor * other);
                }
            }
            into.iter_mut().for_each(|value| *value *= scale);
        });
        row[..i].fill(0.0);
    }
}

/// In eight sums, so that it is vectorized.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (chunks_a, rest_a) = a.as_chunks::<8>();
    let (chunks_b, rest_b) = b.as_chunks::<8>();
    for (a, b) in chunks_a.iter().zip(chunks_b) {
        (0..8).for_each(|i| sums[i] += a[i] * b[i]);
    }
    sums.iter().sum::<f64>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f64>()
}

/// Rounds weights (outputs, inputs) to `grid` in place. Returns the scales of its blocks, (outputs, blocks of an
/// output); a last block may be shorter.
pub fn round(weights: &mut [f32], factor: &InverseFactor, grid: BlockGrid) -> Vec<BlockScale> {
    let inputs = factor.inputs;
    let importance: Vec<f64> = (0..inputs).map(|i| factor.row(i)[i].powi(-2)).collect();
    let blocks = inputs.div_ceil(grid.block);
    let mut scales = vec![BlockScale { scale: 1.0, minimum: 0.0 }; weights.len() / inputs * blocks];
    let groups = weights.par_chunks_mut(ROWS * inputs).zip(scales.par_chunks_mut(ROWS * blocks));
    groups.for_each(|(weights, scales)| round_rows(weights, scales, factor, grid, &importance));
    scales
}

fn round_rows(
    weights: &mut [f32],
    scales: &mut [BlockScale],
    factor: &InverseFactor,
    grid: BlockGrid,
    importance: &[f64],
) {
    let (inputs, blocks) = (factor.inputs, factor.inputs.div_ceil(grid.block));
    let mut updated: Vec<f64> = weights.iter().map(|weight| f64::from(*weight)).collect();
    for i in 0..inputs {
        let begins = i.is_multiple_of(grid.block);
        let end = (i + grid.block).min(inputs);
        let follow = &factor.row(i)[i..];
        for (row, updated) in updated.chunks_exact_mut(inputs).enumerate() {
            let block = &mut scales[row * blocks + i / grid.block];
            if begins {
                *block = grid.choose(&updated[i..end], &importance[i..end]);
            }
            let rounded = grid.rounded(updated[i] as f32, *block);
            weights[row * inputs + i] = rounded;
            let error = (updated[i] - f64::from(rounded)) / follow[0];
            updated[i..].iter_mut().zip(follow).for_each(|(value, factor)| *value -= error * factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::{RngKey, stream_id};
    use crate::quantization::blocks::BlockBits;

    /// Inputs (samples, inputs) that depend on each other, their products, and weights.
    fn layer(seed: u64, samples: usize, inputs: usize, outputs: usize) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let key = RngKey::new(seed, stream_id("gptq"));
        let noise = |at: usize| key.normal(at as u64) as f32;
        let causes = 1 + inputs / 4;
        let mixing: Vec<f32> = (0..inputs * causes).map(noise).collect();
        let mut x = Vec::new();
        for sample in 0..samples {
            let base = 1_000_000 + sample * (causes + inputs);
            let cause: Vec<f32> = (0..causes).map(|c| noise(base + c)).collect();
            x.extend((0..inputs).map(|i| {
                let sum: f32 = (0..causes).map(|c| mixing[i * causes + c] * cause[c]).sum();
                sum + 0.3 * noise(base + causes + i)
            }));
        }
        let product = |i: usize, j: usize| {
            (0..samples).map(|s| f64::from(x[s * inputs + i] * x[s * inputs + j])).sum::<f64>() as f32
        };
        let products = (0..inputs * inputs).map(|at| product(at / inputs, at % inputs)).collect();
        let weights = (0..outputs * inputs).map(|at| 0.02 * noise(9_000_000 + at)).collect();
        (x, products, weights)
    }

    #[test]
    fn the_factor_is_that_of_the_inverse() {
        for inputs in [1, 7, 40, 300] {
            let products = layer(1, inputs + 20, inputs, 1).1;
            let factor = InverseFactor::new(&products, inputs, DAMPING);
            let mean =
                (0..inputs).map(|i| f64::from(products[i * (inputs + 1)])).sum::<f64>() / inputs as f64;
            // U'U H = 1, for a few columns.
            for column in [0, inputs / 2, inputs - 1] {
                let h = |i: usize| {
                    f64::from(products[i * inputs + column]) + if i == column { DAMPING * mean } else { 0.0 }
                };
                let uh: Vec<f64> =
                    (0..inputs).map(|i| (0..inputs).map(|k| factor.row(i)[k] * h(k)).sum::<f64>()).collect();
                for i in 0..inputs {
                    let one = (0..inputs).map(|k| factor.row(k)[i] * uh[k]).sum::<f64>();
                    let expected = if i == column { 1.0 } else { 0.0 };
                    assert!((one - expected).abs() < 1e-5, "{inputs}: {i} {column}: {one}");
                }
            }
        }
    }

    #[test]
    fn outputs_change_less_than_by_rounding_to_the_nearest() {
        let (samples, outputs) = (400, 24);
        let q4_0 = BlockGrid { block: 32, low: -8.0, high: 7.0, has_minimum: false, half: true };
        for (inputs, grid) in [(128, q4_0), (200, BlockGrid::of_bits(BlockBits::Four))] {
            let (x, products, weights) = layer(2, samples, inputs, outputs);
            let error = |rounded: &[f32]| {
                let mut sum = 0.0;
                for sample in x.chunks_exact(inputs) {
                    for (row, exact) in rounded.chunks_exact(inputs).zip(weights.chunks_exact(inputs)) {
                        let change =
                            row.iter().zip(exact).zip(sample).map(|((a, b), x)| f64::from((a - b) * x));
                        sum += change.sum::<f64>().powi(2);
                    }
                }
                sum
            };
            let mut rounded = weights.clone();
            let scales = round(&mut rounded, &InverseFactor::new(&products, inputs, DAMPING), grid);
            let mut nearest = weights.clone();
            for row in nearest.chunks_exact_mut(inputs) {
                for block in row.chunks_mut(grid.block) {
                    let values: Vec<f64> = block.iter().map(|value| f64::from(*value)).collect();
                    let scale = grid.choose(&values, &vec![1.0; values.len()]);
                    block.iter_mut().for_each(|value| *value = grid.rounded(*value, scale));
                }
            }
            let (gptq, nearest) = (error(&rounded), error(&nearest));
            assert!(gptq < 0.5 * nearest, "{gptq} {nearest}");
            // Every weight is on the grid of its block.
            let blocks = inputs.div_ceil(grid.block);
            assert_eq!(scales.len(), outputs * blocks);
            for (at, value) in rounded.iter().enumerate() {
                let block = scales[at / inputs * blocks + at % inputs / grid.block];
                assert_eq!(grid.rounded(*value, block), *value);
            }
        }
    }

    #[test]
    fn inputs_that_are_never_seen_are_rounded_to_the_nearest() {
        let grid = BlockGrid::of_bits(BlockBits::Eight);
        let weights = vec![0.5, -0.25, 0.125, 1.0];
        for products in [vec![0.0; 16], [vec![4.0], vec![0.0; 15]].concat()] {
            let mut rounded = weights.clone();
            let scales = round(&mut rounded, &InverseFactor::new(&products, 4, DAMPING), grid);
            let nearest: Vec<f32> = weights.iter().map(|value| grid.rounded(*value, scales[0])).collect();
            assert_eq!(rounded, nearest);
        }
    }
}
