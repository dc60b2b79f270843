//! Losses over predicted values (squared error, Huber, binary cross-entropy, focal), fused with the linear layer that
//! predicts them.

use candle_core::{Result, Tensor};

use super::loss::{Loss, PendingMetricSums};
use super::{Cost, PassContext};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::Activation;
use crate::kernels::cross_entropy::ClassWeights;
use crate::kernels::linear::{LinearKernel, TrainedParts, WeightLayout};
pub use crate::kernels::pointwise_loss::PointwiseLossFn;
use crate::kernels::pointwise_loss::{LinearPointwiseLoss, cuda_workspace, reference_workspace, workspace};
use crate::params::ParamId;

pub struct PointwiseLoss {
    pub name: String,
    pub kind: PointwiseLossFn,
    /// (outputs, width)
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Rows per sample: 1, or the positions of a sequence.
    pub positions: usize,
    pub width: usize,
    pub outputs: usize,
    /// Weights of binary targets that are 1, one per output.
    pub positive_weights: Option<ClassWeights>,
    /// Label smoothing: how far binary targets move towards 1/2.
    pub smoothing: f64,
}

impl PointwiseLoss {
    fn head<'a>(&'a self, pass: &'a PassContext) -> LinearPointwiseLoss<'a> {
        LinearPointwiseLoss {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            loss_fn: self.kind,
            positive_weights: self.positive_weights.as_ref(),
            smoothing: self.smoothing,
        }
    }
}

impl Loss for PointwiseLoss {
    fn name(&self) -> &str {
        &self.name
    }

    fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)> {
        let grads = pass.weight_bias_grads(self.weight, self.bias);
        self.head(pass).forward_backward(x, targets, pass.loss_scale, &grads, needs_input_grad)
    }

    fn evaluate(&self, x: &Tensor, targets: &Tensor, pass: &PassContext) -> Result<PendingMetricSums> {
        self.head(pass).evaluate(x, targets)
    }

    fn output_layer<'a>(&self, pass: &'a PassContext) -> LinearKernel<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        LinearKernel {
            weight: pass.weight(self.weight),
            weight_layout: WeightLayout::OutIn,
            bias,
            act: Activation::Identity,
        }
    }

    fn outputs_per_sample(&self) -> usize {
        self.positions * self.outputs
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let rows = spec.batch * self.positions;
        let (forward, backward) = match spec.backend {
            Backend::Cpu { .. } => {
                let trained = TrainedParts {
                    weight: self.weight.trained,
                    bias: self.bias.is_some_and(|bias| bias.trained),
                };
                workspace(spec.dtype, rows, self.outputs, self.width, trained)
            }
            Backend::Reference { .. } => reference_workspace(spec.dtype, rows, self.outputs, self.width),
            Backend::Cuda { .. } => {
                let (bias, weighted) = (self.bias.is_some(), self.positive_weights.is_some());
                cuda_workspace(spec.dtype, spec.batch, rows, self.outputs, bias, weighted)
            }
        };
        Cost {
            input_grad: spec.bytes(self.positions * self.width),
            forward_workspace: forward,
            backward_workspace: backward,
            flops: 2 * (rows * self.width * self.outputs) as u64,
            trains: self.weight.trained || self.bias.is_some_and(|bias| bias.trained),
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
        TestContext, check_loss_finite_differences, leaf, random_tensor, relative_error, test_device,
        to_f64_vec,
    };
    use super::super::{Mode, PassContext};
    use super::*;
    use crate::params::{ParamInit, ParamRegistry};
    use candle_core::{DType, Device, Var};
    use proptest::prelude::*;

    fn loss(
        d: &mut ParamRegistry,
        kind: PointwiseLossFn,
        width: usize,
        outputs: usize,
        bias: bool,
    ) -> PointwiseLoss {
        PointwiseLoss {
            name: "head".into(),
            kind,
            weight: d.param("head.weight", [outputs, width], ParamInit::Normal(1.0)),
            bias: bias.then(|| d.param("head.bias", [outputs], ParamInit::Normal(1.0))),
            positions: 1,
            width,
            outputs,
            positive_weights: None,
            smoothing: 0.0,
        }
    }

    fn targets(rows: usize, outputs: usize, kind: PointwiseLossFn) -> Tensor {
        let of = |v: f64| if is_binary(kind) { (v > 0.0) as u8 as f64 } else { 2.0 * v };
        let values: Vec<f32> =
            to_f64_vec(&random_tensor(&[rows, outputs], 3)).into_iter().map(|v| of(v) as f32).collect();
        Tensor::from_vec(values, (rows, outputs), &test_device()).unwrap()
    }

    fn is_binary(kind: PointwiseLossFn) -> bool {
        matches!(kind, PointwiseLossFn::BceWithLogits | PointwiseLossFn::Focal { .. })
    }

    /// The targets, with a weight behind those of each sample.
    fn weighted(targets: &Tensor) -> Tensor {
        let rows = targets.dim(0).unwrap();
        let weights: Vec<f32> = (0..rows).map(|i| [0.5, 2.0, 0.0, 1.0][i % 4]).collect();
        let weights = Tensor::from_vec(weights, (rows, 1), &test_device()).unwrap();
        Tensor::cat(&[targets, &weights], 1).unwrap()
    }

    fn kind() -> impl Strategy<Value = PointwiseLossFn> {
        prop::sample::select(vec![
            PointwiseLossFn::SquaredError,
            PointwiseLossFn::AbsoluteError,
            PointwiseLossFn::Huber { delta: 0.7 },
            PointwiseLossFn::BceWithLogits,
            PointwiseLossFn::Focal { gamma: 2.0 },
            PointwiseLossFn::Focal { gamma: 0.5 },
        ])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(
            rows in 1usize..7,
            width in 1usize..9,
            outputs in 1usize..6,
            bias: bool,
            kind in kind(),
        ) {
            let x = random_tensor(&[rows, width], 1);
            check_loss_finite_differences(
                &|d| Box::new(loss(d, kind, width, outputs, bias)),
                &x,
                &targets(rows, outputs, kind),
            );
        }

        #[test]
        fn gradients_are_right_with_weights(
            rows in 1usize..7,
            width in 1usize..9,
            outputs in 1usize..6,
            kind in kind(),
            smooth: bool,
        ) {
            let x = random_tensor(&[rows, width], 1);
            let (binary, t) = (is_binary(kind), weighted(&targets(rows, outputs, kind)));
            let positive = || (0..outputs).map(|c| 0.5 + c as f32).collect::<Vec<f32>>().into();
            let build = |d: &mut ParamRegistry| {
                let plain = loss(d, kind, width, outputs, true);
                let smoothing = if smooth && binary { 0.1 } else { 0.0 };
                Box::new(PointwiseLoss { positive_weights: binary.then(positive), smoothing, ..plain }) as Box<dyn Loss>
            };
            check_loss_finite_differences(&build, &x, &t);
        }

        #[test]
        fn weights_and_smoothing_follow_the_reference(rows in 1usize..300, outputs in 1usize..9, kind in kind()) {
            let mut registry = ParamRegistry::default();
            let positive = is_binary(kind).then(|| (0..outputs).map(|c| 0.5 + c as f32).collect::<Vec<f32>>().into());
            let smoothing = if is_binary(kind) { 0.1 } else { 0.0 };
            let loss = PointwiseLoss {
                positive_weights: positive,
                smoothing,
                ..loss(&mut registry, kind, 16, outputs, true)
            };
            let subject = TestContext::new(registry, DType::F32, rows);
            let (x, t) = (
                random_tensor(&[rows, 16], 1).to_dtype(DType::F32).unwrap(),
                weighted(&targets(rows, outputs, kind)),
            );
            let pass = PassContext { loss_scale: 0.5, ..subject.pass(Mode::Train) };
            let (metrics, dx) = loss.forward_backward(&x, &t, &pass, true).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = LinearPointwiseLoss {
                weight: &vars[1],
                bias: Some(&vars[2]),
                loss_fn: kind,
                positive_weights: loss.positive_weights.as_ref(),
                smoothing,
            };
            let wanted = head.reference(&vars[0], &t.to_device(&Device::Cpu).unwrap()).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let metrics = metrics.read().unwrap();
            prop_assert!((metrics.loss - value).abs() < 1e-4 * value.abs().max(1.0), "{} {value}", metrics.loss);
            prop_assert_eq!(metrics.weight, (0..rows).map(|i| [0.5, 2.0, 0.0, 1.0][i % 4]).sum::<f64>());
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(
                relative_error(&to_f64_vec(dx.as_ref().unwrap()), &to_f64_vec(grads.get(&vars[0]).unwrap()))
                    < 1e-4
            );
        }

        #[test]
        fn the_f32_body_follows_the_reference(rows in 1usize..300, outputs in 1usize..9, kind in kind()) {
            let mut registry = ParamRegistry::default();
            let loss = loss(&mut registry, kind, 16, outputs, true);
            let subject = TestContext::new(registry, DType::F32, rows);
            let (x, t) = (random_tensor(&[rows, 16], 1).to_dtype(DType::F32).unwrap(), targets(rows, outputs, kind));
            let pass = PassContext { loss_scale: 0.5, ..subject.pass(Mode::Train) };
            let (metrics, dx) = loss.forward_backward(&x, &t, &pass, true).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let wanted = LinearPointwiseLoss {
                weight: &vars[1],
                bias: Some(&vars[2]),
                loss_fn: kind,
                positive_weights: None,
                smoothing: 0.0,
            }
            .reference(&vars[0], &t.to_device(&Device::Cpu).unwrap())
            .unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let metrics = metrics.read().unwrap();
            prop_assert!((metrics.loss - value).abs() < 1e-4 * value.abs().max(1.0), "{} {value}", metrics.loss);
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(
                relative_error(&to_f64_vec(dx.as_ref().unwrap()), &to_f64_vec(grads.get(&vars[0]).unwrap()))
                    < 1e-4
            );
            for (ours, var) in subject.store.grad_views().iter().zip(&vars[1..]) {
                prop_assert!(relative_error(&to_f64_vec(ours), &to_f64_vec(grads.get(var).unwrap())) < 1e-4);
            }
        }
    }

    #[test]
    fn binary_prediction_is_correct_when_all_logits_are() {
        let mut registry = ParamRegistry::default();
        let loss = loss(&mut registry, PointwiseLossFn::BceWithLogits, 1, 1, false);
        let store = crate::param_store::ParamStore::new(
            registry.into_layout().unwrap(),
            1,
            DType::F32,
            &test_device(),
        )
        .unwrap();
        crate::kernels::update::cast_into(
            &Tensor::ones(1, DType::F32, &test_device()).unwrap(),
            &store.master_weights,
        )
        .unwrap();
        let pass = PassContext::new(&store, Mode::Eval, &[0, 1, 2]);
        let of = |v: [f32; 3]| Tensor::from_vec(v.to_vec(), (3, 1), &test_device()).unwrap();
        let metrics =
            loss.evaluate(&of([2.0, -1.0, 60.0]), &of([1.0, 1.0, 1.0]), &pass).unwrap().read().unwrap();
        assert_eq!((metrics.count, metrics.top1), (3, 2));
        let wanted = (-2f64).exp().ln_1p() + 1f64.exp().ln_1p();
        assert!((metrics.loss - wanted).abs() < 1e-5, "{} {wanted}", metrics.loss);
    }
}
