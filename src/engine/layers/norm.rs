//! Layer norm and RMS norm over the last dimension.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::norm::{NormBackwardFusion, NormKernel as Kernel, cuda_workspace};
use crate::kernels::partial_sums;
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct NormLayer {
    name: String,
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Layer norm subtracts the mean, RMS norm does not.
    pub centred: bool,
    pub eps: f64,
    /// Shape of one sample.
    shape: Vec<usize>,
    width: usize,
}

impl NormLayer {
    /// Layer norm over samples of `shape`; `eps` is 1e-5 in PyTorch and GPT-2, 1e-12 in BERT.
    pub fn layer_norm(registry: &mut ParamRegistry, name: &str, shape: &[usize], eps: f64) -> Self {
        let mut norm = Self::rms_norm(registry, name, shape, eps);
        norm.bias = Some(registry.param(format!("{name}.bias"), [norm.width], ParamInit::Constant(0.0)));
        norm.centred = true;
        norm
    }

    /// RMS norm over samples of `shape`; `eps` is 1e-6 in Llama.
    pub fn rms_norm(registry: &mut ParamRegistry, name: &str, shape: &[usize], eps: f64) -> Self {
        let width = shape.last().copied().unwrap_or(1);
        let weight = registry.param(format!("{name}.weight"), [width], ParamInit::Constant(1.0));
        Self { name: name.into(), weight, bias: None, centred: false, eps, shape: shape.to_vec(), width }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        Kernel {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            centred: self.centred,
            eps: self.eps,
        }
    }

    /// Recomputes the output, bit for bit; CUDA only.
    pub fn recompute_output(&self, saved: &SavedTensors, pass: &PassContext) -> Result<Tensor> {
        match self.kernel(pass).recompute_output(&saved.0[0], &saved.0[1])? {
            Some(y) => Ok(y),
            None => candle_core::bail!("{}: only a GPU recomputes the output of a norm", self.name),
        }
    }

    /// Like `backward`, and what else `fusion` names in the same pass.
    pub fn backward_fused(
        &self,
        saved: &SavedTensors,
        dy: &Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
        fusion: NormBackwardFusion,
    ) -> Result<Option<Tensor>> {
        let grads = pass.weight_bias_grads(self.weight, self.bias);
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], dy, &grads, needs_input_grad, fusion)
    }
}

impl Layer for NormLayer {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, stats) = self.kernel(pass).forward(x)?;
        Ok((y, SavedTensors(vec![x.clone(), stats])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        self.backward_fused(&saved, &dy, pass, needs_input_grad, NormBackwardFusion::default())
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let len: usize = self.shape.iter().product();
        let rows = spec.batch * len / self.width;
        let (acc, stats) = (acc_bytes(spec.dtype), 1 + self.centred as usize);
        let bias_trained = self.bias.is_some_and(|bias| bias.trained) as usize;
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            saves_input: true,
            saved: (rows * stats * acc) as u64,
            backward_workspace: match spec.backend {
                Backend::Cpu { .. } => {
                    let vectors = self.weight.trained as usize + bias_trained;
                    partial_sums::bytes(spec.dtype, rows, self.width, vectors * self.width)
                }
                Backend::Reference { .. } => 0,
                // The kernel sums the weight gradient whether it is accumulated or not.
                Backend::Cuda { .. } => cuda_workspace(spec.dtype, rows, self.width, 1 + bias_trained),
            },
            flops: (8 * spec.batch * len) as u64,
            trains: self.weight.trained || bias_trained > 0,
            ..Cost::default()
        }
    }

    fn params(&self) -> Vec<ParamId> {
        std::iter::once(self.weight).chain(self.bias).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_bf16, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(batch in 1usize..5, t in 1usize..50, n in 3usize..40, centred: bool) {
            let build = |d: &mut ParamRegistry| -> Box<dyn Layer> {
                match centred {
                    true => Box::new(NormLayer::layer_norm(d, "n", &[t, n], 1e-5)),
                    false => Box::new(NormLayer::rms_norm(d, "n", &[t, n], 1e-6)),
                }
            };
            let x = random_tensor(&[batch, t, n], 1);
            check_finite_differences(&build, &x);
            check_against_autograd(&build, &x, &|x, p| {
                Kernel { weight: &p[0], bias: p.get(1), centred, eps: if centred { 1e-5 } else { 1e-6 } }
                    .reference(x)
            });
            check_cost(&build, &|batch| random_tensor(&[batch, t, n], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        // On a GPU: scalar rows, short rows of half and whole vector packs, full or not, and every mid-size row length.
        for (t, n) in
            [(5, 33), (7, 64), (40, 384), (11, 520), (3, 768), (5, 1024), (2, 1600), (2, 3200), (2, 2500)]
        {
            let x = random_tensor(&[3, t, n], 1);
            check_bf16(&|d| Box::new(NormLayer::layer_norm(d, "n", &[t, n], 1e-5)), &x);
            check_bf16(&|d| Box::new(NormLayer::rms_norm(d, "n", &[t, n], 1e-6)), &x);
        }
    }
}
