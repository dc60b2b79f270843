//! `y = act(x W' + b)` over the last dimension, W' being the transpose of W.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::linear::{
    ActBackward, LinearKernel as Kernel, TrainedParts, WeightLayout, bias_gradient_workspace,
    hopper_column_sums_bytes, hopper_supports, workspace,
};
use crate::kernels::{Activation, SavedForBackward, activation};
use crate::params::{ParamId, ParamInit, ParamRegistry};

pub struct Linear {
    name: String,
    pub weight: ParamId,
    bias: Option<ParamId>,
    pub weight_layout: WeightLayout,
    act: Activation,
    /// Shape of one sample without the last dimension: () for a vector, (T) for a sequence.
    leading_dims: Vec<usize>,
    inputs: usize,
    outputs: usize,
}

/// Options of a [`Linear`] besides its sizes.
#[derive(Clone, Copy)]
pub struct LinearOptions {
    pub bias: bool,
    pub act: Activation,
    pub weight_layout: WeightLayout,
    pub init: ParamInit,
    /// Initialization of the bias.
    pub bias_init: ParamInit,
}

impl LinearOptions {
    /// Initialized like `torch.nn.Linear`: weight and bias uniform in ±1/sqrt(inputs).
    pub fn torch_default(inputs: usize, act: Activation) -> Self {
        let init = ParamInit::Uniform(1.0 / (inputs as f64).sqrt());
        Self { bias: true, act, weight_layout: WeightLayout::OutIn, init, bias_init: init }
    }
}

/// What [`Linear::backward_input`] does for its neighbours, and what they did for it.
#[derive(Clone, Copy, Default)]
pub struct LinearBackwardFusion<'a> {
    pub needs_input_grad: bool,
    /// The gradient that reaches the input along the other branch of a residual connection.
    pub residual_grad: Option<&'a Tensor>,
    /// Also recompute the output, in place of the saved pre-activation.
    pub recompute_output: bool,
    /// The preceding layer's activation, to backpropagate the input gradient through.
    pub input_act_backward: Option<ActBackward<'a>>,
    /// The next layer accumulated the bias gradient.
    pub bias_grad_done: bool,
    /// The next layer backpropagated `dy` through this layer's activation.
    pub act_backward_done: bool,
}

/// Result of [`Linear::backward_input`].
pub struct LinearInputGrad {
    pub dx: Option<Tensor>,
    pub recomputed_output: Option<Tensor>,
    /// Whether `dx` passed through `input_act_backward`: the kernel takes only some sizes.
    pub input_act_backward_done: bool,
}

impl Linear {
    /// `input` is the shape of one sample; its last dimension is projected to `outputs`.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        input: &[usize],
        outputs: usize,
        options: LinearOptions,
    ) -> Self {
        let names = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        Self::with_param_names(registry, name, names, input, outputs, options)
    }

    /// Like `new`, with explicit names for weight and bias.
    pub fn with_param_names(
        registry: &mut ParamRegistry,
        name: &str,
        [weight, bias]: [String; 2],
        input: &[usize],
        outputs: usize,
        options: LinearOptions,
    ) -> Self {
        let (inputs, leading_dims) = match input.split_last() {
            Some((last, leading)) => (*last, leading.to_vec()),
            None => (1, Vec::new()),
        };
        let weight = match options.weight_layout {
            WeightLayout::OutIn => registry.param(weight, [outputs, inputs], options.init),
            WeightLayout::InOut => registry.transposed_weight(weight, [inputs, outputs], options.init),
        };
        let bias = options.bias.then(|| registry.param(bias, [outputs], options.bias_init));
        Self {
            name: name.into(),
            weight,
            bias,
            weight_layout: options.weight_layout,
            act: options.act,
            leading_dims,
            inputs,
            outputs,
        }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        Kernel { weight: pass.weight(self.weight), weight_layout: self.weight_layout, bias, act: self.act }
    }

    fn rows_per_sample(&self) -> usize {
        self.leading_dims.iter().product()
    }

    /// Shape of an input sample.
    pub fn input_shape(&self) -> Vec<usize> {
        [self.leading_dims.as_slice(), &[self.inputs]].concat()
    }

    pub fn act(&self) -> Activation {
        self.act
    }

    pub fn act_mut(&mut self) -> &mut Activation {
        &mut self.act
    }

    pub fn bias(&self) -> Option<ParamId> {
        self.bias
    }

    /// Computes `forward(x) + residual`.
    pub fn forward_add(
        &self,
        x: &Tensor,
        residual: &Tensor,
        pass: &PassContext,
    ) -> Result<(Tensor, SavedTensors)> {
        let (y, pre) = self.kernel(pass).forward_add_act(x, residual, Activation::Identity)?;
        let saved = SavedTensors::with_activation(Some(x).filter(|_| self.weight.trained), &y, pre, self.act);
        Ok((y, saved))
    }

    /// Recomputes the output from the saved pre-activation, which was rounded: not bit-exact where the forward pass
    /// fused the activation into the GEMM.
    pub fn recompute_output(&self, saved: &SavedTensors) -> Result<Tensor> {
        match saved.0.last() {
            Some(pre) => activation::forward(pre, self.act),
            None => candle_core::bail!("{} saved no pre-activation", self.name),
        }
    }

    /// Like `backward`; accumulates the bias gradient only if `bias_grad`.
    pub fn backward_own_bias(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
        bias_grad: bool,
    ) -> Result<Option<Tensor>> {
        let grads = pass.weight_bias_grads(self.weight, self.bias.filter(|_| bias_grad));
        let (x, v) = self.split_saved(&saved);
        self.kernel(pass).backward(x, v, dy, &grads, needs_input_grad)
    }

    /// The input, saved for the weight gradient, and what the activation's backward pass reads.
    fn split_saved<'a>(&self, saved: &'a SavedTensors) -> (Option<&'a Tensor>, Option<&'a Tensor>) {
        let reads = (self.act.saved_for_backward() != SavedForBackward::Nothing) as usize;
        let (x, v) = saved.0.split_at(saved.0.len().saturating_sub(reads));
        (x.first(), v.first())
    }

    /// The backward pass in two parts, CUDA only. This one computes everything but the weight gradient, which needs
    /// the input; `dy` becomes the gradient before the activation, as [`backward_weight`](Self::backward_weight) takes
    /// it. The weight gradient too if `saved` has the input.
    pub fn backward_input(
        &self,
        saved: SavedTensors,
        dy: &Tensor,
        pass: &PassContext,
        fusion: LinearBackwardFusion,
    ) -> Result<LinearInputGrad> {
        let (kernel, (x, v)) = (self.kernel(pass), self.split_saved(&saved));
        let (dx, input_act_backward_done) = kernel.backward_input(
            v.filter(|_| !fusion.act_backward_done),
            dy,
            self.bias.filter(|_| !fusion.bias_grad_done).and_then(|id| pass.grad(id)),
            (fusion.needs_input_grad, fusion.residual_grad),
            (fusion.recompute_output, fusion.input_act_backward),
        )?;
        if let Some(x) = x {
            self.backward_weight(x, dy, pass)?;
        }
        let recomputed_output = v.filter(|_| fusion.recompute_output).cloned();
        Ok(LinearInputGrad { dx, recomputed_output, input_act_backward_done })
    }

    pub fn backward_weight(&self, x: &Tensor, dy: &Tensor, pass: &PassContext) -> Result<()> {
        match pass.grad(self.weight) {
            Some(dweight) => self.kernel(pass).backward_weight(x, dy, dweight),
            None => Ok(()),
        }
    }

    /// The backward pass of this layer's activation, for the next layer to fuse into its input gradient.
    pub fn act_backward<'a>(
        &self,
        saved: &'a SavedTensors,
        pass: &'a PassContext,
    ) -> Option<ActBackward<'a>> {
        let v = saved.0.last().filter(|_| self.act.saved_for_backward() == SavedForBackward::Input)?;
        Some(ActBackward { act: self.act, v, bias: self.bias.and_then(|id| pass.grad(id)) })
    }
}

impl Layer for Linear {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        [self.leading_dims.as_slice(), &[self.outputs]].concat()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, pre) = self.kernel(pass).forward(x)?;
        let saved = SavedTensors::with_activation(Some(x).filter(|_| self.weight.trained), &y, pre, self.act);
        Ok((y, saved))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        self.backward_own_bias(saved, dy, pass, needs_input_grad, true)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let (rows, k, n) = (spec.batch * self.rows_per_sample(), self.inputs, self.outputs);
        let output = spec.bytes(self.rows_per_sample() * n);
        let trained =
            TrainedParts { weight: self.weight.trained, bias: self.bias.is_some_and(|bias| bias.trained) };
        let (forward, backward) = match spec.backend {
            Backend::Cpu { .. } => workspace(spec.dtype, self.weight_layout, rows, (k, n), trained),
            Backend::Reference { .. } => (0, 0),
            Backend::Cuda { .. } => {
                let bias = if trained.bias { bias_gradient_workspace(spec.dtype, rows, n) } else { 0 };
                let fused = spec.backend.is_hopper() && hopper_supports(spec.dtype, rows, k, n);
                let fused = if fused { hopper_column_sums_bytes(rows, k) as u64 } else { 0 };
                (0, bias.max(fused))
            }
        };
        let reads = self.act.saved_for_backward();
        Cost {
            input_grad: spec.bytes(self.rows_per_sample() * k),
            output,
            saves_input: self.weight.trained,
            saves_output: reads == SavedForBackward::Output,
            overwrites_dy: self.act != Activation::Identity,
            saved: if reads == SavedForBackward::Input { output } else { 0 },
            forward_workspace: forward,
            backward_workspace: backward,
            flops: 2 * (rows * k * n) as u64,
            trains: trained.weight || trained.bias,
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

    fn activation() -> impl Strategy<Value = Activation> {
        use Activation::*;
        prop::sample::select(vec![Identity, Relu, Relu6, Gelu, GeluTanh, Silu, Sigmoid, Tanh])
    }

    fn weight_layout() -> impl Strategy<Value = WeightLayout> {
        prop::sample::select(vec![WeightLayout::OutIn, WeightLayout::InOut])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..5,
            t in 1usize..4,
            k in 1usize..20,
            n in 1usize..20,
            act in activation(),
            weight_layout in weight_layout(),
            bias: bool,
        ) {
            let options = LinearOptions { bias, weight_layout, ..LinearOptions::torch_default(k, act) };
            let build = |d: &mut ParamRegistry| Box::new(Linear::new(d, "l", &[t, k], n, options)) as Box<dyn Layer>;
            let x = random_tensor(&[batch, t, k], 1);
            // Finite differences are invalid across the kinks of clamp activations; autograd checks those.
            if !matches!(act, Activation::Relu | Activation::Relu6) {
                check_finite_differences(&build, &x);
            }
            check_against_autograd(&build, &x, &|x, p| {
                Kernel { weight: &p[0], weight_layout, bias: p.get(1), act }.reference(x)
            });
            check_cost(&build, &|batch| random_tensor(&[batch, t, k], 1));
        }
    }

    /// The partial sums of a bias gradient take as much as its rows.
    #[test]
    fn wide_outputs_cost_what_is_stated() {
        for (k, n) in [(2, 20_000), (64, 20_000), (3, 4096)] {
            let options = LinearOptions::torch_default(k, Activation::Gelu);
            let build =
                |d: &mut ParamRegistry| Box::new(Linear::new(d, "l", &[2, k], n, options)) as Box<dyn Layer>;
            check_cost(&build, &|batch| random_tensor(&[batch, 2, k], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        for act in [Activation::Identity, Activation::GeluTanh, Activation::Silu] {
            for weight_layout in [WeightLayout::OutIn, WeightLayout::InOut] {
                let options = LinearOptions { weight_layout, ..LinearOptions::torch_default(64, act) };
                let build = |d: &mut ParamRegistry| {
                    Box::new(Linear::new(d, "l", &[9, 64], 128, options)) as Box<dyn Layer>
                };
                check_bf16(&build, &random_tensor(&[3, 9, 64], 1));
            }
        }
    }
}
