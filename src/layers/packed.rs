//! Linear layers of one input whose outputs lie side by side: queries, keys and values, or a gate and
//! what it lets through, each under the name other tools know it by.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, On, Pass, Saved};
use crate::kernels::cpu::{acc_bytes, rows_per_chunk};
use crate::kernels::linear::card_workspace;
use crate::kernels::packed::{Map, backward, forward, workspace};
use crate::params::{Declared, Init, ParamId};

pub struct Packed {
    name: String,
    maps: Vec<(ParamId, Option<ParamId>)>,
    /// Shape of a sample without the last dimension.
    leading: Vec<usize>,
    inputs: usize,
    /// Outputs of each map, and of all.
    widths: Vec<usize>,
    outputs: usize,
}

impl Packed {
    /// Maps `name.PART` of the given widths over samples of shape `input`; biases begin at 0.
    pub fn new(
        declared: &mut Declared,
        name: &str,
        input: &[usize],
        parts: &[(&str, usize)],
        init: Init,
        bias: bool,
    ) -> Self {
        let (inputs, leading) = match input.split_last() {
            Some((last, leading)) => (*last, leading.to_vec()),
            None => (1, Vec::new()),
        };
        let mut map = |&(part, width): &(&str, usize)| {
            let weight = declared.param(format!("{name}.{part}.weight"), [width, inputs], init);
            let bias =
                bias.then(|| declared.param(format!("{name}.{part}.bias"), [width], Init::Constant(0.0)));
            (weight, bias)
        };
        let maps = parts.iter().map(&mut map).collect();
        let widths: Vec<usize> = parts.iter().map(|(_, width)| *width).collect();
        let outputs = widths.iter().sum();
        Self { name: name.into(), maps, leading, inputs, widths, outputs }
    }

    fn maps<'a>(&self, of: impl Fn(ParamId) -> &'a Tensor) -> Vec<Map<'a>> {
        self.maps.iter().map(|(weight, bias)| Map { weight: of(*weight), bias: bias.map(&of) }).collect()
    }

    fn has_bias(&self) -> bool {
        self.maps.iter().any(|(_, bias)| bias.is_some())
    }
}

impl Layer for Packed {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        [self.leading.as_slice(), &[self.outputs]].concat()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        Ok((forward(x, &self.maps(|id| pass.weight(id)))?, Saved(vec![x.clone()])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let (maps, grads) = (self.maps(|id| pass.weight(id)), self.maps(|id| pass.grad(id)));
        backward(&saved.0[0], &maps, &dy, &grads, want)
    }

    fn cost(&self, at: At) -> Cost {
        let per_sample: usize = self.leading.iter().product();
        let (rows, k, n) = (at.batch * per_sample, self.inputs, self.outputs);
        let (forward, backward) = match at.on {
            On::Cpu { .. } => {
                let sums = rows.div_ceil(rows_per_chunk(n)) * n * acc_bytes(at.dtype);
                let (forward, backward) = workspace(at.dtype, rows, k, &self.widths);
                (forward, backward + if self.has_bias() { sums as u64 } else { 0 })
            }
            On::Cuda { .. } => {
                let sums = self.widths.iter().map(|&n| card_workspace(at.dtype, rows, n)).max().unwrap_or(0);
                (0, if self.has_bias() { sums } else { 0 })
            }
        };
        Cost {
            input: at.bytes(per_sample * k),
            output: at.bytes(per_sample * n),
            keeps_input: true,
            forward,
            backward,
            flops: 2 * (rows * k * n) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        self.outputs * (self.inputs + self.has_bias() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, cost_is_exact, differences_agree, random};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..4, k in 1usize..20, q in 1usize..20, kv in 1usize..9, bias: bool) {
            let build = |d: &mut Declared| {
                let parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
                Box::new(Packed::new(d, "a", &[t, k], &parts, Init::Normal(1.0), bias)) as Box<dyn Layer>
            };
            let x = random(&[batch, t, k], 1);
            differences_agree(&build, &x);
            autograd_agrees(&build, &x, &|x, p| {
                let maps: Vec<Map> = match bias {
                    true => p.chunks(2).map(|p| Map { weight: &p[0], bias: Some(&p[1]) }).collect(),
                    false => p.iter().map(|weight| Map { weight, bias: None }).collect(),
                };
                crate::kernels::packed::reference(x, &maps)
            });
            cost_is_exact(&build, &|batch| random(&[batch, t, k], 1));
        }
    }
}
