//! The factors by which a runtime rescales 8-bit integers: the scale of what an operator computes over that of its
//! output. XNNPACK, which LiteRT uses by default, refuses a file with a factor of 2^8 or more, or, of a sum, below
//! 2^-10. A factor is that large where a value hardly varies, as after a layer whose weights were all pruned. The scale
//! of the value is then raised; nothing is lost, since its steps were finer than those of its inputs.

use super::{FoldedNetwork, FoldedValue, FoldedWeights, Op, Operator};
use crate::inference::export::error::ExportError;
use crate::inference::export::weights::SavedWeights;

/// Factors are kept between these, within what is accepted.
const MAX_FACTOR: f32 = 250.0;
const MIN_FACTOR_OF_SUM: f32 = 1.0 / 1000.0;

impl FoldedNetwork<'_> {
    /// Raises the scales of values until no factor is out of range.
    pub(in super::super) fn bound_rescaling(&mut self, files: &SavedWeights) -> Result<(), ExportError> {
        bound(&mut self.values, &self.operators, &mut |weights, input_scale| {
            let layer = weights.quantize(files, input_scale)?;
            Ok(layer.bias_scales.into_iter().fold(0.0, f32::max))
        })
    }
}

/// `sum_scale` is the largest scale of the sums of a layer whose input has the given scale.
fn bound(
    values: &mut [FoldedValue],
    operators: &[Operator],
    sum_scale: &mut dyn FnMut(&FoldedWeights, f32) -> Result<f32, ExportError>,
) -> Result<(), ExportError> {
    let scale = |values: &[FoldedValue], at: usize| values[at].quantization.map(|q| q.scale);
    let mut is_bound = false;
    // Terminates: scales only grow, and those of inputs by no more than that of their output.
    while !std::mem::replace(&mut is_bound, true) {
        for operator in operators {
            let inputs: Option<Vec<f32>> = operator.inputs.iter().map(|at| scale(values, *at)).collect();
            let (Some(inputs), Some(output)) = (inputs, scale(values, operator.output)) else { continue };
            let largest = inputs.iter().copied().fold(0.0, f32::max);
            let computed = match &operator.op {
                Op::Conv(_, weights) | Op::Linear(weights) => sum_scale(weights, inputs[0])?,
                Op::Add | Op::GlobalPool => largest,
                // Values that are only moved keep their scale.
                Op::MaxPool(_) | Op::Flatten => MAX_FACTOR * largest,
                Op::Activation(_) | Op::GroupNorm { .. } | Op::Embedding { .. } => continue,
            };
            let mut raise = |at: usize, least: f32| {
                if let Some(quantization) = values[at].quantization.as_mut().filter(|q| q.scale < least) {
                    quantization.scale = least;
                    is_bound = false;
                }
            };
            raise(operator.output, computed / MAX_FACTOR);
            match &operator.op {
                Op::Add => operator.inputs.iter().for_each(|at| raise(*at, output * MIN_FACTOR_OF_SUM)),
                Op::MaxPool(_) | Op::Flatten => raise(operator.inputs[0], output),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::ClampActivation;
    use crate::params::ParamRegistry;
    use crate::quantization::AffineQuantization;

    #[test]
    fn scales_are_raised_until_every_factor_is_accepted() {
        let mut registry = ParamRegistry::default();
        let weight = registry.table("w.weight", [2, 2], crate::params::ParamInit::Constant(0.0));
        let layout = registry.into_layout().unwrap();
        let weights = || FoldedWeights { weight: layout.params.spec(weight.index), bias: None, norm: None };
        let value = |scale: Option<f32>| FoldedValue {
            name: String::new(),
            shape: vec![2],
            quantization: scale.map(|scale| AffineQuantization { scale, zero_point: -3 }),
        };
        let operator = |op, inputs: &[usize], output| Operator {
            op,
            inputs: inputs.into(),
            output,
            clamp: ClampActivation::Identity,
        };
        // 0 -> linear 1 -> flatten 2, 2 + 3 -> 4 -> mean 5 -> in floats 6.
        let scales = [Some(1.0), Some(1e-6), Some(1e-6), Some(1e-9), Some(10.0), Some(1e-3), None];
        let mut values = scales.map(value);
        let operators = [
            operator(Op::Linear(weights()), &[0], 1),
            operator(Op::Flatten, &[1], 2),
            operator(Op::Add, &[2, 3], 4),
            operator(Op::GlobalPool, &[4], 5),
            operator(Op::Linear(weights()), &[5], 6),
        ];
        let mut calls = 0;
        let mut sum_scale = |_: &FoldedWeights, input: f32| {
            calls += 1;
            Ok(2.0 * input)
        };
        bound(&mut values, &operators, &mut sum_scale).unwrap();
        let scales: Vec<f32> = values[..6].iter().map(|value| value.quantization.unwrap().scale).collect();
        assert_eq!(scales[0], 1.0, "nothing computes the input");
        assert_eq!((scales[1], scales[4]), (scales[2], 10.0));
        let close = |a: f32, b: f32| (a / b - 1.0).abs() < 1e-5;
        assert!(close(scales[2], 10.0 / 1000.0) && close(scales[3], 10.0 / 1000.0), "{scales:?}");
        assert!(close(scales[5], 10.0 / 250.0) && calls > 1, "{scales:?}");
        assert!(values[..6].iter().all(|value| value.quantization.unwrap().zero_point == -3));
        assert!(values[6].quantization.is_none());
    }
}
