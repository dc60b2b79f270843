//! Batch normalization of images over groups of a fixed number of samples, with a fused clamp activation.
//!
//! The model sets the group size, never the available memory: a micro-batch is a multiple of it. Training updates the
//! running statistics group by group in sample order; evaluation normalizes with them. So does training if both
//! parameters are frozen, like Keras's layer with `trainable = False`: the statistics stay what the weights were
//! trained with, and the layer is a scale and a shift per channel.

use candle_core::{DType, Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::batch_norm::{BatchNormKernel as Kernel, RunningStats, evaluate_workspace, workspace};
use crate::kernels::channels::ChannelLayout;
use crate::kernels::{Activation, ClampActivation, add};
use crate::params::{ParamId, ParamInit, ParamRegistry, StatId};

/// PyTorch's defaults.
pub const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

pub struct BatchNorm {
    name: String,
    pub weight: ParamId,
    pub bias: ParamId,
    pub running_mean: StatId,
    pub running_var: StatId,
    /// (height, width, channels), or (channels).
    pub shape: Vec<usize>,
    group_size: usize,
    pub act: ClampActivation,
}

impl BatchNorm {
    /// `shape` is the shape of one sample, channels last; `group_size` samples are normalized together.
    pub fn new(
        registry: &mut ParamRegistry,
        name: &str,
        shape: &[usize],
        group_size: usize,
        act: ClampActivation,
    ) -> Self {
        let channels = shape.last().copied().unwrap_or(1);
        Self {
            name: name.into(),
            weight: registry.param(format!("{name}.weight"), [channels], ParamInit::Constant(1.0)),
            bias: registry.param(format!("{name}.bias"), [channels], ParamInit::Constant(0.0)),
            running_mean: registry.running_stat(format!("{name}.running_mean"), channels, 0.0),
            running_var: registry.running_stat(format!("{name}.running_var"), channels, 1.0),
            shape: shape.to_vec(),
            group_size,
            act,
        }
    }

    fn kernel<'a>(&self, pass: &'a PassContext) -> Kernel<'a> {
        let (weight, bias) = (pass.weight(self.weight), pass.weight(self.bias));
        Kernel { weight, bias, act: self.act, eps: EPS, group_size: self.group_size }
    }

    fn running_stats<'a>(&self, pass: &'a PassContext) -> RunningStats<'a> {
        RunningStats {
            mean: pass.stat(self.running_mean),
            var: pass.stat(self.running_var),
            momentum: MOMENTUM,
        }
    }

    fn channels(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Whether it normalizes with the running statistics in training too.
    pub fn is_frozen(&self) -> bool {
        !self.weight.trained && !self.bias.trained
    }

    /// Computes `act(forward(x) + residual)`; not if frozen.
    pub fn forward_add_act(
        &self,
        x: &Tensor,
        residual: &Tensor,
        act: Activation,
        pass: &PassContext,
    ) -> Result<(Tensor, SavedTensors)> {
        if pass.mode == Mode::Eval {
            let y = self.kernel(pass).evaluate(x, &self.running_stats(pass))?;
            return Ok((add::inplace(&y, residual, act)?, SavedTensors::default()));
        }
        let running = self.running_stats(pass);
        let running = (pass.mode == Mode::Train).then_some(&running);
        let (y, saved_stats) = self.kernel(pass).forward_add_act(x, running, residual, act)?;
        Ok((y, SavedTensors(vec![x.clone(), saved_stats])))
    }

    /// Backward of `forward_add_act`, whose output and activation are given.
    pub fn backward_add_act(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        output_act: (&Tensor, Activation),
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let grads = pass.weight_bias_grads(self.weight, Some(self.bias));
        self.kernel(pass).backward_add_act(
            &saved.0[0],
            &saved.0[1],
            &dy,
            output_act,
            &grads,
            needs_input_grad,
        )
    }

    /// Whether the normalization pass can add a residual and apply `act` after it.
    pub fn can_add_act(&self, act: Activation) -> bool {
        !self.is_frozen()
            && self.act == ClampActivation::Identity
            && ClampActivation::from_activation(act).is_some()
    }

    /// Recomputes the output, bit for bit.
    pub fn recompute_output(&self, saved: &SavedTensors, pass: &PassContext) -> Result<Tensor> {
        self.kernel(pass).recompute_output(&saved.0[0], &saved.0[1])
    }
}

impl Layer for BatchNorm {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let running = self.running_stats(pass);
        if pass.mode == Mode::Eval {
            return Ok((self.kernel(pass).evaluate(x, &running)?, SavedTensors::default()));
        }
        if self.is_frozen() {
            let y = self.kernel(pass).evaluate(x, &running)?;
            let saved = (self.act != ClampActivation::Identity).then(|| y.clone());
            return Ok((y, SavedTensors(saved.into_iter().collect())));
        }
        let running = (pass.mode == Mode::Train).then_some(&running);
        let (y, saved_stats) = self.kernel(pass).forward(x, running)?;
        Ok((y, SavedTensors(vec![x.clone(), saved_stats])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        if self.is_frozen() {
            if let Some(y) = saved.0.first() {
                add::activation_backward_inplace(y, &dy, self.act.activation())?;
            }
            let dx = || self.kernel(pass).evaluate_backward(&dy, &self.running_stats(pass));
            return needs_input_grad.then(dx).transpose();
        }
        let grads = pass.weight_bias_grads(self.weight, Some(self.bias));
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], &dy, &grads, needs_input_grad)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let (len, channels) = (self.shape.iter().product::<usize>(), self.channels());
        let pixels = len / channels;
        let cut =
            ChannelLayout { channels, rows: spec.batch * pixels, rows_per_unit: self.group_size * pixels };
        let (forward, backward) = workspace(spec, &cut);
        let acc = if spec.dtype == DType::F64 { 8 } else { 4 };
        let flops = (8 * spec.batch * len) as u64;
        if self.is_frozen() {
            let (forward_workspace, backward_workspace) = evaluate_workspace(spec, channels);
            let clamps = self.act != ClampActivation::Identity;
            return Cost {
                input_grad: spec.bytes(len),
                output: spec.bytes(len),
                saves_output: clamps,
                overwrites_dy: clamps,
                forward_workspace,
                backward_workspace,
                flops,
                ..Cost::default()
            };
        }
        Cost {
            input_grad: spec.bytes(len),
            output: spec.bytes(len),
            saves_input: true,
            saved: (cut.units() * 2 * channels * acc) as u64,
            forward_workspace: forward,
            backward_workspace: backward,
            flops,
            trains: true,
            ..Cost::default()
        }
    }

    fn micro_batch_multiple(&self) -> usize {
        if self.is_frozen() { 1 } else { self.group_size }
    }

    fn params(&self) -> Vec<ParamId> {
        vec![self.weight, self.bias]
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        TestContext, check_against_autograd, check_bf16, check_cost, check_finite_differences,
        frozen_registry, random_tensor, relative_error, test_device, to_f64_vec,
    };
    use super::*;
    use proptest::prelude::*;

    fn clip() -> impl Strategy<Value = ClampActivation> {
        prop::sample::select(vec![ClampActivation::Identity, ClampActivation::Relu, ClampActivation::Relu6])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        // At least six values per channel: with two, the gradient is pure rounding error.
        #[test]
        fn gradients_are_right(
            batch in 1usize..7,
            group in 1usize..5,
            h in 2usize..5,
            w in 3usize..6,
            c in 1usize..20,
            act in clip(),
        ) {
            let build = |d: &mut ParamRegistry| {
                Box::new(BatchNorm::new(d, "n", &[h, w, c], group, act)) as Box<dyn Layer>
            };
            let x = random_tensor(&[batch, h, w, c], 1);
            // Finite differences are invalid across the kink of a clamp; autograd checks those.
            if act == ClampActivation::Identity {
                check_finite_differences(&build, &x);
            }
            check_against_autograd(&build, &x, &|x, p| {
                Kernel { weight: &p[0], bias: &p[1], act, eps: EPS, group_size: group }.reference(x)
            });
            check_cost(&build, &|batch| random_tensor(&[batch, h, w, c], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        for (batch, group, c) in [(6, 6, 64), (6, 2, 40), (5, 2, 3), (2, 2, 1040)] {
            let x = random_tensor(&[batch, 9, 7, c], 1);
            check_bf16(
                &|d| Box::new(BatchNorm::new(d, "n", &[9, 7, c], group, ClampActivation::Identity)),
                &x,
            );
        }
    }

    /// Fusing the end of a residual branch into the layer's own passes gives the unfused output, gradients and shortcut
    /// gradient.
    #[test]
    fn fused_add_act_matches_unfused() {
        for (act, c) in [(Activation::Identity, 40), (Activation::Relu, 64), (Activation::Relu6, 3)] {
            let run = |fused: bool| {
                let mut registry = ParamRegistry::default();
                let layer = BatchNorm::new(&mut registry, "n", &[5, 6, c], 2, ClampActivation::Identity);
                let subject = TestContext::new(registry, DType::F32, 3);
                let pass = subject.pass(Mode::Train);
                let [x, residual, dy] =
                    [1, 2, 3].map(|i| random_tensor(&[3, 5, 6, c], i).to_dtype(DType::F32).unwrap());
                let (y, dx) = if fused {
                    let (y, saved) = layer.forward_add_act(&x, &residual, act, &pass).unwrap();
                    let dx = layer.backward_add_act(saved, dy.clone(), (&y, act), &pass, true).unwrap();
                    (y, dx)
                } else {
                    let (y, saved) = layer.forward(&x, &pass).unwrap();
                    let y = add::inplace(&y, &residual, act).unwrap();
                    add::activation_backward_inplace(&y, &dy, act).unwrap();
                    (y, layer.backward(saved, dy.clone(), &pass, true).unwrap())
                };
                [y, dx.unwrap(), dy, subject.store.grads.clone(), subject.store.stats.clone()]
                    .map(|t| to_f64_vec(&t))
            };
            for (fused, unfused) in run(true).iter().zip(run(false)) {
                assert!(relative_error(fused, &unfused) < 1e-5, "{act:?}");
            }
        }
    }

    /// Frozen, it scales and shifts by its running statistics, which stay, and passes the gradient of that.
    #[test]
    fn a_frozen_layer_evaluates() {
        for act in [ClampActivation::Identity, ClampActivation::Relu, ClampActivation::Relu6] {
            let build = |d: &mut ParamRegistry| {
                *d = frozen_registry(&["*"]);
                Box::new(BatchNorm::new(d, "n", &[2, 3, 4], 2, act)) as Box<dyn Layer>
            };
            let x = random_tensor(&[5, 2, 3, 4], 1);
            check_finite_differences(&build, &x);
            let mut registry = ParamRegistry::default();
            let layer = build(&mut registry);
            assert_eq!(layer.micro_batch_multiple(), 1);
            let subject = TestContext::new(registry, DType::F64, 5);
            let (trained, _) = layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
            let (evaluated, _) = layer.forward(&x, &subject.pass(Mode::Eval)).unwrap();
            assert_eq!(to_f64_vec(&trained), to_f64_vec(&evaluated));
            assert_eq!(to_f64_vec(&subject.store.stats), [[0.0; 4], [1.0; 4]].concat());
        }
    }

    /// Statistics merged from many chunks, for values far from zero.
    #[test]
    fn a_large_group_is_normal() {
        let (batch, pixels, c) = (32, 400, 3);
        let mut registry = ParamRegistry::default();
        let layer = BatchNorm::new(&mut registry, "n", &[20, 20, c], 32, ClampActivation::Identity);
        let store = crate::param_store::ParamStore::new(
            registry.into_layout().unwrap(),
            1,
            DType::F32,
            &test_device(),
        )
        .unwrap();
        let ids: Vec<u64> = (0..batch as u64).collect();
        let pass = PassContext::new(&store, Mode::Train, &ids);
        let x =
            random_tensor(&[batch, 20, 20, c], 5).affine(3.0, 1000.0).unwrap().to_dtype(DType::F32).unwrap();
        let y = to_f64_vec(&layer.forward(&x, &pass).unwrap().0);
        for channel in 0..c {
            let mean_of = |f: &dyn Fn(f64) -> f64| {
                y.iter().skip(channel).step_by(c).map(|v| f(*v)).sum::<f64>() / (batch * pixels) as f64
            };
            assert!(mean_of(&|v| v).abs() < 1e-3, "mean {}", mean_of(&|v| v));
            assert!((mean_of(&|v| v * v) - 1.0).abs() < 1e-3, "variance {}", mean_of(&|v| v * v));
        }
    }

    #[test]
    fn running_statistics_move_group_by_group_and_only_in_training() {
        let mut registry = ParamRegistry::default();
        let layer = BatchNorm::new(&mut registry, "n", &[1, 1, 1], 2, ClampActivation::Identity);
        let subject = TestContext::new(registry, DType::F64, 4);
        let x = Tensor::new(&[1f64, 3.0, 10.0, 14.0], &test_device()).unwrap().reshape((4, 1, 1, 1)).unwrap();
        let stats = || to_f64_vec(&subject.store.stats);
        for mode in [Mode::Recompute, Mode::Eval] {
            layer.forward(&x, &subject.pass(mode)).unwrap();
            assert_eq!(stats(), [0.0, 1.0], "{mode:?}");
        }
        layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        // Groups (1, 3) and (10, 14): means 2 and 12, unbiased variances 2 and 8.
        let wanted = [0.9 * 0.2 + 0.1 * 12.0, 0.9 * (0.9 + 0.1 * 2.0) + 0.1 * 8.0];
        stats().iter().zip(wanted).for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{a} {b}"));
    }
}
