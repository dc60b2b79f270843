//! Linear layers over one input whose outputs are concatenated (queries, keys and values, or gate and up projection),
//! each with the parameter names of its reference implementation.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::linear::{bias_gradient_workspace, column_sums_bytes};
use crate::kernels::packed_linear::{Projection, backward, forward, workspace};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct PackedLinear {
    name: String,
    pub projections: Vec<(ParamId, Option<ParamId>)>,
    /// Shape of one sample without the last dimension.
    leading_dims: Vec<usize>,
    inputs: usize,
    /// Outputs of each projection, and of all.
    widths: Vec<usize>,
    outputs: usize,
}

impl PackedLinear {
    /// Projections `name.PART` of the given widths over samples of shape `input`; biases start at 0.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        input: &[usize],
        parts: &[(&str, usize)],
        init: ParamInit,
        bias: bool,
    ) -> Self {
        let (inputs, leading_dims) = match input.split_last() {
            Some((last, leading)) => (*last, leading.to_vec()),
            None => (1, Vec::new()),
        };
        let mut map = |&(part, width): &(&str, usize)| {
            let weight = registry.param(format!("{name}.{part}.weight"), [width, inputs], init);
            let bias = bias
                .then(|| registry.param(format!("{name}.{part}.bias"), [width], ParamInit::Constant(0.0)));
            (weight, bias)
        };
        let projections = parts.iter().map(&mut map).collect();
        let widths: Vec<usize> = parts.iter().map(|(_, width)| *width).collect();
        let outputs = widths.iter().sum();
        Self { name: name.into(), projections, leading_dims, inputs, widths, outputs }
    }

    fn projections<'a>(&self, pass: &'a PassContext) -> Vec<Projection<'a>> {
        let projection = |(weight, bias): &(ParamId, Option<ParamId>)| Projection {
            weight: pass.weight(*weight),
            bias: bias.map(|id| pass.weight(id)),
        };
        self.projections.iter().map(projection).collect()
    }

    /// Shape of an input sample.
    pub fn input_shape(&self) -> Vec<usize> {
        [self.leading_dims.as_slice(), &[self.inputs]].concat()
    }

    /// Whether a weight, and whether a bias is trained.
    fn trained(&self) -> (bool, bool) {
        let weights = self.projections.iter().any(|(weight, _)| weight.trained);
        (weights, self.projections.iter().any(|(_, bias)| bias.is_some_and(|bias| bias.trained)))
    }
}

impl Layer for PackedLinear {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        [self.leading_dims.as_slice(), &[self.outputs]].concat()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let saved = self.trained().0.then(|| x.clone()).into_iter().collect();
        Ok((forward(x, &self.projections(pass))?, SavedTensors(saved)))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let grads = self.projections.iter().map(|(weight, bias)| pass.weight_bias_grads(*weight, *bias));
        let grads: Vec<_> = grads.collect();
        backward(saved.0.first(), &self.projections(pass), &dy, &grads, needs_input_grad)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let per_sample: usize = self.leading_dims.iter().product();
        let (rows, k, n) = (spec.batch * per_sample, self.inputs, self.outputs);
        let (weights, biases) = self.trained();
        let (forward, backward) = match spec.backend {
            Backend::Cpu { .. } => {
                let trained: Vec<bool> = self.projections.iter().map(|(weight, _)| weight.trained).collect();
                let (forward, backward) = workspace(spec.dtype, rows, k, &self.widths, &trained);
                (forward, backward + if biases { column_sums_bytes(spec.dtype, rows, n) } else { 0 })
            }
            Backend::Reference { .. } => (0, 0),
            Backend::Cuda { .. } => {
                let sums = self
                    .widths
                    .iter()
                    .map(|&n| bias_gradient_workspace(spec.dtype, rows, n))
                    .max()
                    .unwrap_or(0);
                (0, if biases { sums } else { 0 })
            }
        };
        Cost {
            input_grad: spec.bytes(per_sample * k),
            output: spec.bytes(per_sample * n),
            saves_input: weights,
            forward_workspace: forward,
            backward_workspace: backward,
            flops: 2 * (rows * k * n) as u64,
            trains: weights || biases,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        self.projections.iter().flat_map(|(weight, bias)| std::iter::once(*weight).chain(*bias)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..5,
            t in 1usize..4,
            k in 1usize..20,
            q in 1usize..20,
            kv in 1usize..9,
            bias: bool,
        ) {
            let build = |d: &mut ParamRegistry| {
                let parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
                Box::new(PackedLinear::new(d, "a", &[t, k], &parts, ParamInit::Normal(1.0), bias)) as Box<dyn Layer>
            };
            let x = random_tensor(&[batch, t, k], 1);
            check_finite_differences(&build, &x);
            check_against_autograd(&build, &x, &|x, p| {
                let maps: Vec<Projection> = match bias {
                    true => p.chunks(2).map(|p| Projection { weight: &p[0], bias: Some(&p[1]) }).collect(),
                    false => p.iter().map(|weight| Projection { weight, bias: None }).collect(),
                };
                crate::kernels::packed_linear::reference(x, &maps)
            });
            check_cost(&build, &|batch| random_tensor(&[batch, t, k], 1));
        }
    }
}
