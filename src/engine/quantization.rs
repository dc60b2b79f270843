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

/// Symmetric 8-bit values of a weight with `rows` outputs, -127 to 127, and the scale of each output.
pub fn quantize_rows(values: &[f32], rows: usize) -> (Vec<i8>, Vec<f32>) {
    let mut quantized = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(rows);
    for row in values.chunks_exact((values.len() / rows).max(1)) {
        let largest = row.iter().fold(0f32, |most, value| most.max(value.abs()));
        let scale = largest / 127.0;
        let scale = if scale.is_normal() { scale } else { 1.0 };
        quantized
            .extend(row.iter().map(|value| (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8));
        scales.push(scale);
    }
    (quantized, scales)
}

/// A bias as 32-bit integers in steps of these scales.
pub fn quantize_bias(values: &[f32], scales: &[f32]) -> Vec<i32> {
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
            let (quantized, scales) = quantize_rows(&values, 3);
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
        assert_eq!(quantize_rows(&[0.0; 4], 2), (vec![0; 4], vec![1.0; 2]));
        assert_eq!(quantize_bias(&[1.0, -0.25], &[0.5, 0.125]), [2, -2]);
    }
}
