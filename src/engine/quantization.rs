//! Integers in place of floats: 8-bit activations with a scale and a zero point each, 8-bit weights with a scale per
//! output.
//!
//! [`points`] says where a network is quantized, [`calibration`] finds the ranges of its activations, and a model
//! whose [`ActivationPoints`] are `Quantize` computes in floats what a runtime computes in integers. [`gptq`] rounds
//! matrices to the blocks of a format, by the [`input_products`] of their layers.

pub mod blocks;
pub mod gptq;
pub mod grid;
mod histogram;
pub mod input_products;
pub mod points;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use self::histogram::ClipMethod;
pub use crate::kernels::fake_quantize::AffineQuantization;

use self::input_products::InputProducts;
use self::points::Observers;

/// The quantization of each point, by its name.
pub type ActivationQuantization = BTreeMap<String, AffineQuantization>;

/// What happens to the activations of a model where they are quantized.
#[derive(Clone, Default)]
pub enum ActivationPoints {
    /// Nothing: the model computes in floats.
    #[default]
    None,
    Observe(Arc<Observers>),
    Quantize(Arc<ActivationQuantization>),
    /// What linear layers take is observed.
    Inputs(Arc<InputProducts>),
}

/// The largest magnitude of a bias in steps: half of what an i32 holds, so that a runtime can add products to it.
const MAX_BIAS_STEPS: f64 = (1u32 << 30) as f64;

/// The weight and the bias of a layer as integers, with a scale per output each.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedLayer {
    /// -127 to 127, outputs first.
    pub weight: Vec<i8>,
    pub weight_scales: Vec<f32>,
    pub bias: Vec<i32>,
    /// Those of the weight times that of the layer's input. Not finite if no f32 scale makes a bias fit.
    pub bias_scales: Vec<f32>,
}

impl QuantizedLayer {
    /// Of a weight with one output per value of `bias`. Where the scale of an output is too small for its bias, it is
    /// larger: weights lose what is small next to the bias, for inputs in the range of `input_scale`.
    pub fn new(weight: &[f32], bias: &[f32], input_scale: f32) -> Self {
        let smallest_scale =
            |bias: &f32| (f64::from(bias.abs()) / (f64::from(input_scale) * MAX_BIAS_STEPS)) as f32;
        let smallest_scales: Vec<f32> = bias.iter().map(smallest_scale).collect();
        let (weight, weight_scales) = quantize_rows(weight, &smallest_scales);
        let bias_scales: Vec<f32> = weight_scales.iter().map(|scale| scale * input_scale).collect();
        Self { weight, weight_scales, bias: quantize_bias(bias, &bias_scales), bias_scales }
    }
}

/// Symmetric 8-bit values of a weight, -127 to 127, and the scale of each output, which is no smaller than stated.
fn quantize_rows(values: &[f32], smallest_scales: &[f32]) -> (Vec<i8>, Vec<f32>) {
    let rows = smallest_scales.len();
    let mut quantized = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(rows);
    let scale_of = |values: &[f32]| {
        let scale = values.iter().fold(0f32, |most, value| most.max(value.abs())) / 127.0;
        scale.is_normal().then_some(scale)
    };
    // For a row of zeros, which has no scale of its own.
    let common = scale_of(values).unwrap_or(1.0);
    for (row, smallest) in values.chunks_exact((values.len() / rows).max(1)).zip(smallest_scales) {
        let scale = scale_of(row).unwrap_or(common).max(*smallest);
        quantized
            .extend(row.iter().map(|value| (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8));
        scales.push(scale);
    }
    (quantized, scales)
}

/// A bias as 32-bit integers in steps of these scales.
fn quantize_bias(values: &[f32], scales: &[f32]) -> Vec<i32> {
    values
        .iter()
        .zip(scales)
        .map(|(value, scale)| (f64::from(*value) / f64::from(*scale)).round_ties_even() as i32)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_value_in_range_moves_by_half_a_step(low in -50f32..0.0, high in 0f32..50.0, at in 0f32..1.0) {
            let quantization = AffineQuantization::of_range(low, high);
            prop_assert_eq!(quantization.rounded(0.0), 0.0);
            let value = low + at * (high - low);
            // The zero point is rounded, so that an end of the range may be half a step outside.
            prop_assert!((quantization.rounded(value) - value).abs() <= 1.001 * quantization.scale);
            let outside = quantization.rounded(high + 100.0);
            prop_assert!((outside - high).abs() <= quantization.scale);
        }

        #[test]
        fn weights_move_by_half_a_step_of_their_row(values in prop::collection::vec(-3f32..3.0, 12)) {
            let (quantized, scales) = quantize_rows(&values, &[0.0; 3]);
            for (at, value) in values.iter().enumerate() {
                let scale = scales[at / 4];
                prop_assert!((f32::from(quantized[at]) * scale - value).abs() <= 0.501 * scale);
            }
        }
    }

    #[test]
    fn a_range_without_values_has_a_scale() {
        assert_eq!(AffineQuantization::of_range(0.0, 0.0).rounded(0.0), 0.0);
        let relu = AffineQuantization::of_range(0.0, 2.55);
        assert_eq!((relu.zero_point, relu.rounded(-1.0)), (-128, 0.0));
        assert!(relu.rounded(f32::NAN).is_nan());
        assert_eq!(quantize_rows(&[0.0; 4], &[0.0; 2]), (vec![0; 4], vec![1.0; 2]));
        assert_eq!(quantize_bias(&[1.0, -0.25], &[0.5, 0.125]), [2, -2]);
    }

    /// Small weights, small inputs or both: the bias is exact to half a step, and a sum of products can be added to it.
    #[test]
    fn a_bias_fits_where_weights_and_inputs_are_small() {
        let bias = [1.25, -3e4, 0.0, 1e-9];
        for (largest, input_scale) in [(1e-9f32, 1e-3f32), (0.5, 4e-10), (1e-20, 1e-12), (0.0, 1e-12)] {
            let weight: Vec<f32> = (0..8).map(|at| largest * [1.0, -0.5][at % 2]).collect();
            let layer = QuantizedLayer::new(&weight, &bias, input_scale);
            for (at, value) in bias.iter().enumerate() {
                let (steps, scale) = (layer.bias[at], layer.bias_scales[at]);
                assert!(steps.unsigned_abs() <= (1 << 30) + 1024, "{largest} {input_scale}: {steps} steps");
                let error = f64::from(steps) * f64::from(scale) - f64::from(*value);
                assert!(error.abs() <= 0.501 * f64::from(scale), "{largest} {input_scale}: {error}");
                assert_eq!(scale, layer.weight_scales[at] * input_scale);
                let row = layer.weight[2 * at..].iter().zip(&weight[2 * at..]).take(2);
                for (quantized, weight) in row {
                    let step = layer.weight_scales[at];
                    assert!((f32::from(*quantized) * step - weight).abs() <= 0.501 * step);
                }
            }
        }
    }

    /// The scale of a row is that of its weights alone where its bias fits.
    #[test]
    fn a_bias_that_fits_changes_no_scale() {
        let (weight, bias) = ([0.5, -0.25, 1e-3, 2e-3], [100.0, -7.0]);
        let layer = QuantizedLayer::new(&weight, &bias, 0.01);
        let (quantized, scales) = quantize_rows(&weight, &[0.0; 2]);
        let bias_scales: Vec<f32> = scales.iter().map(|scale| scale * 0.01).collect();
        let bias = quantize_bias(&bias, &bias_scales);
        assert_eq!(layer, QuantizedLayer { weight: quantized, weight_scales: scales, bias, bias_scales });
    }

    #[test]
    fn a_bias_that_no_scale_can_hold_has_none() {
        let layer = QuantizedLayer::new(&[1.0, 1.0], &[f32::INFINITY, 1.0], 1e-3);
        assert!(layer.bias_scales[0].is_infinite() && layer.bias_scales[1].is_finite());
    }
}
