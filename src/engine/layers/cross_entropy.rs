//! Cross-entropy over classes, fused with the linear layer that computes the logits.

use candle_core::{Result, Tensor};

use super::loss::{Loss, PendingMetricSums};
use super::{Cost, PassContext};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::Activation;
use crate::kernels::cross_entropy::{
    ClassWeights, LinearCrossEntropy, cuda_workspace, fused_workspace, is_plain_softmax, reference_workspace,
    workspace,
};
use crate::kernels::linear::{LinearKernel, WeightLayout};
use crate::params::ParamId;

pub struct CrossEntropy {
    pub name: String,
    /// (classes, width); may belong to another layer, as in a language model with tied embeddings.
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Rows per sample: 1, or the positions of a sequence.
    pub positions: usize,
    pub width: usize,
    pub classes: usize,
    /// Label smoothing: the fraction of each target spread over all classes.
    pub smoothing: f64,
    /// Exponent of the focal loss; 0 for plain cross-entropy.
    pub focal_gamma: f64,
    pub class_weights: Option<ClassWeights>,
}

impl CrossEntropy {
    fn head<'a>(&'a self, pass: &'a PassContext) -> LinearCrossEntropy<'a> {
        LinearCrossEntropy {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            smoothing: self.smoothing,
            focal_gamma: self.focal_gamma,
            class_weights: self.class_weights.as_ref(),
        }
    }
}

impl Loss for CrossEntropy {
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
        self.positions * self.classes
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let rows = spec.batch * self.positions;
        let (bias, weighted) = (self.bias.is_some(), self.class_weights.is_some());
        let (forward, backward) = match spec.backend {
            Backend::Cpu { .. } => workspace(spec.dtype, rows, self.classes, self.width, bias),
            Backend::Reference { .. } => reference_workspace(spec.dtype, rows, self.classes, self.width),
            Backend::Cuda { .. } => {
                let (eval_bytes, train_bytes) =
                    cuda_workspace(spec.dtype, rows, self.classes, bias, weighted);
                let changed = weighted || self.focal_gamma > 0.0;
                let fused = if spec.backend.is_hopper() && is_plain_softmax(bias, self.smoothing, changed) {
                    fused_workspace(spec.dtype, rows, self.classes, self.width)
                } else {
                    0
                };
                (eval_bytes, train_bytes + fused)
            }
        };
        Cost {
            input_grad: spec.bytes(self.positions * self.width),
            forward_workspace: forward,
            backward_workspace: backward,
            flops: 2 * (rows * self.width * self.classes) as u64,
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
        TestContext, check_loss_bf16, check_loss_finite_differences, leaf, random_tensor, relative_error,
        test_device, to_f64_vec,
    };
    use super::super::{Mode, PassContext};
    use super::*;
    use crate::base::features::IGNORE_INDEX;
    use crate::params::{ParamInit, ParamRegistry};
    use candle_core::{DType, Device, Var};
    use proptest::prelude::*;

    fn loss(
        d: &mut ParamRegistry,
        width: usize,
        classes: usize,
        bias: bool,
        smoothing: f64,
        weighted: bool,
    ) -> CrossEntropy {
        CrossEntropy {
            name: "head".into(),
            weight: d.param("head.weight", [classes, width], ParamInit::Normal(1.0)),
            bias: bias.then(|| d.param("head.bias", [classes], ParamInit::Normal(1.0))),
            positions: 1,
            width,
            classes,
            smoothing,
            focal_gamma: 0.0,
            class_weights: weighted
                .then(|| (0..classes).map(|c| 0.5 + c as f32 * 0.25).collect::<Vec<_>>().into()),
        }
    }

    fn targets(rows: usize, classes: usize, ignore: bool) -> Tensor {
        let of = |i: usize| if ignore && i % 3 == 1 { IGNORE_INDEX } else { (i * 5 % classes) as u32 };
        Tensor::from_vec((0..rows).map(of).collect::<Vec<u32>>(), rows, &test_device()).unwrap()
    }

    /// Rows of (class, class, bits of the first one's fraction); in some rows both classes are the same.
    fn mixed_targets(rows: usize, classes: usize) -> (Tensor, [(Tensor, Tensor); 2]) {
        let fraction = |i: usize| [0.3f32, 1.0, 0.5, 0.75, 0.0][i % 5];
        let class = |i: usize, k: usize| ((i * k + k) % classes) as u32;
        let row = |i: usize| [class(i, 5), class(i, 3), fraction(i).to_bits()];
        let bits: Vec<u32> = (0..rows).flat_map(row).collect();
        let goal = |k: usize, fraction: &dyn Fn(usize) -> f64| {
            let classes: Vec<u32> = (0..rows).map(|i| class(i, k)).collect();
            let fractions: Vec<f64> = (0..rows).map(fraction).collect();
            let cpu = &Device::Cpu;
            (Tensor::from_vec(classes, rows, cpu).unwrap(), Tensor::from_vec(fractions, rows, cpu).unwrap())
        };
        let goals = [goal(5, &|i| fraction(i) as f64), goal(3, &|i| 1.0 - fraction(i) as f64)];
        (Tensor::from_vec(bits, (rows, 3), &test_device()).unwrap(), goals)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_of_mixed_classes_are_right(
            rows in 1usize..7,
            width in 1usize..9,
            classes in 2usize..9,
            bias: bool,
            smooth in prop::sample::select(vec![0.0, 0.1]),
            weighted: bool,
        ) {
            let x = random_tensor(&[rows, width], 1);
            check_loss_finite_differences(
                &|d| Box::new(loss(d, width, classes, bias, smooth, weighted)),
                &x,
                &mixed_targets(rows, classes).0,
            );
        }

        #[test]
        fn mixed_classes_follow_the_reference(
            rows in 1usize..300,
            classes in 2usize..40,
            smooth in prop::sample::select(vec![0.0, 0.1]),
            weighted: bool,
        ) {
            let mut registry = ParamRegistry::default();
            let loss = loss(&mut registry, 16, classes, true, smooth, weighted);
            let subject = TestContext::new(registry, DType::F32, rows);
            let x = random_tensor(&[rows, 16], 1).to_dtype(DType::F32).unwrap();
            let (targets, goals) = mixed_targets(rows, classes);
            let pass = PassContext { loss_scale: 0.5, ..subject.pass(Mode::Train) };
            let (metrics, dx) = loss.forward_backward(&x, &targets, &pass, true).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = LinearCrossEntropy {
                weight: &vars[1],
                bias: Some(&vars[2]),
                smoothing: smooth,
                focal_gamma: 0.0,
                class_weights: loss.class_weights.as_ref(),
            };
            let wanted = head.reference_soft_targets(&vars[0], &goals, None).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let metrics = metrics.read().unwrap();
            prop_assert!((metrics.loss - value).abs() < 1e-4 * value.abs().max(1.0));
            let weight = |class: u32| loss.class_weights.as_ref().map_or(1.0, |w| w[class as usize] as f64);
            let weights: f64 = goals.iter().map(|(classes, fractions)| {
                let (classes, fractions): (Vec<u32>, Vec<f64>) =
                    (classes.to_vec1().unwrap(), fractions.to_vec1().unwrap());
                classes.into_iter().zip(fractions).map(|(class, fraction)| weight(class) * fraction).sum::<f64>()
            }).sum();
            prop_assert!((metrics.weight - weights).abs() < 1e-5 * weights);
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(
                relative_error(&to_f64_vec(dx.as_ref().unwrap()), &to_f64_vec(grads.get(&vars[0]).unwrap()))
                    < 1e-4
            );
            for (ours, var) in subject.store.grad_views().iter().zip(&vars[1..]) {
                prop_assert!(relative_error(&to_f64_vec(ours), &to_f64_vec(grads.get(var).unwrap())) < 1e-4);
            }
        }

        #[test]
        fn gradients_are_right(
            rows in 1usize..7,
            width in 1usize..9,
            classes in 2usize..9,
            bias: bool,
            smooth in prop::sample::select(vec![0.0, 0.1]),
            weighted: bool,
            ignore: bool,
        ) {
            let x = random_tensor(&[rows, width], 1);
            check_loss_finite_differences(
                &|d| Box::new(loss(d, width, classes, bias, smooth, weighted)),
                &x,
                &targets(rows, classes, ignore),
            );
        }

        #[test]
        fn the_f32_body_follows_the_reference(
            rows in 1usize..300,
            classes in 2usize..40,
            smooth in prop::sample::select(vec![0.0, 0.1]),
            weighted: bool,
        ) {
            let mut registry = ParamRegistry::default();
            let loss = loss(&mut registry, 16, classes, true, smooth, weighted);
            let subject = TestContext::new(registry, DType::F32, rows);
            let (x, t) = (random_tensor(&[rows, 16], 1).to_dtype(DType::F32).unwrap(), targets(rows, classes, false));
            let pass = PassContext { loss_scale: 0.5, ..subject.pass(Mode::Train) };
            let (metrics, dx) = loss.forward_backward(&x, &t, &pass, true).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = LinearCrossEntropy {
                weight: &vars[1],
                bias: Some(&vars[2]),
                smoothing: smooth,
                focal_gamma: 0.0,
                class_weights: loss.class_weights.as_ref(),
            };
            let wanted = head.reference(&vars[0], &t.to_device(&Device::Cpu).unwrap()).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let metrics = metrics.read().unwrap();
            prop_assert!((metrics.loss - value).abs() < 1e-4 * value.abs().max(1.0));
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

    /// Rows of (class, bits of the row's weight).
    fn weighted_targets(rows: usize, classes: usize) -> Tensor {
        let row = |i: usize| [(i * 5 % classes) as u32, [0.5f32, 2.0, 0.0, 1.0][i % 4].to_bits()];
        Tensor::from_vec((0..rows).flat_map(row).collect::<Vec<u32>>(), (rows, 2), &test_device()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_of_weighted_rows_and_of_the_focal_loss_are_right(
            rows in 1usize..7, width in 1usize..9, classes in 2usize..9, smooth: bool, weighted: bool,
            gamma in prop::sample::select(vec![0.0, 0.5, 2.0]),
        ) {
            let x = random_tensor(&[rows, width], 1);
            let smoothing = if smooth && gamma == 0.0 { 0.1 } else { 0.0 };
            let build = |d: &mut ParamRegistry| {
                let loss = loss(d, width, classes, true, smoothing, weighted);
                Box::new(CrossEntropy { focal_gamma: gamma, ..loss }) as Box<dyn Loss>
            };
            check_loss_finite_differences(&build, &x, &weighted_targets(rows, classes));
        }

        /// A weight of 2 counts as the row twice, and one of 0 as none.
        #[test]
        fn a_weight_is_a_number_of_rows(
            rows in 1usize..50,
            classes in 2usize..9,
            gamma in prop::sample::select(vec![0.0, 2.0]),
            smooth: bool,
        ) {
            let mut registry = ParamRegistry::default();
            let smoothing = if smooth && gamma == 0.0 { 0.1 } else { 0.0 };
            let loss = CrossEntropy { focal_gamma: gamma, ..loss(&mut registry, 4, classes, true, smoothing, true) };
            let subject = TestContext::new(registry, DType::F64, rows);
            let x = random_tensor(&[rows, 4], 1);
            let class = |i: usize| (i * 5 % classes) as u32;
            let once: Vec<u32> = (0..rows).flat_map(|i| [class(i), ((i % 3) as f32).to_bits()]).collect();
            let once = Tensor::from_vec(once, (rows, 2), &test_device()).unwrap();
            let repeated: Vec<u32> = (0..rows).flat_map(|i| vec![i as u32; i % 3]).collect();
            prop_assume!(!repeated.is_empty());
            let classes = repeated.iter().map(|i| class(*i as usize)).collect::<Vec<u32>>();
            let several = Tensor::from_vec(classes, repeated.len(), &test_device()).unwrap();
            let x_repeated = x.index_select(&Tensor::new(&repeated[..], &test_device()).unwrap(), 0).unwrap();
            let pass = subject.pass(Mode::Train);
            let a = loss.evaluate(&x, &once, &pass).unwrap().read().unwrap();
            let b = loss.evaluate(&x_repeated, &several, &pass).unwrap().read().unwrap();
            prop_assert!((a.loss - b.loss).abs() < 1e-9 * b.loss.abs().max(1.0), "{a:?} {b:?}");
            prop_assert!((a.weight - b.weight).abs() < 1e-9 * b.weight.max(1.0));
            prop_assert_eq!(a.count, rows as u64);
        }

        #[test]
        fn the_focal_loss_follows_the_reference(rows in 1usize..300, classes in 2usize..40, weighted: bool) {
            let mut registry = ParamRegistry::default();
            let loss = CrossEntropy { focal_gamma: 2.0, ..loss(&mut registry, 16, classes, true, 0.0, weighted) };
            let subject = TestContext::new(registry, DType::F32, rows);
            let (x, t) = (random_tensor(&[rows, 16], 1).to_dtype(DType::F32).unwrap(), targets(rows, classes, false));
            let pass = PassContext { loss_scale: 0.5, ..subject.pass(Mode::Train) };
            let (metrics, dx) = loss.forward_backward(&x, &t, &pass, true).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = LinearCrossEntropy {
                weight: &vars[1],
                bias: Some(&vars[2]),
                smoothing: 0.0,
                focal_gamma: 2.0,
                class_weights: loss.class_weights.as_ref(),
            };
            let wanted = head.reference(&vars[0], &t.to_device(&Device::Cpu).unwrap()).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            prop_assert!((metrics.read().unwrap().loss - value).abs() < 1e-4 * value.abs().max(1.0));
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(
                relative_error(&to_f64_vec(dx.as_ref().unwrap()), &to_f64_vec(grads.get(&vars[0]).unwrap()))
                    < 1e-4
            );
        }
    }

    #[test]
    fn mixed_targets_are_scored_by_the_larger_fraction() {
        let mut registry = ParamRegistry::default();
        let loss = loss(&mut registry, 3, 3, false, 0.0, false);
        let subject = TestContext::new(registry, DType::F32, 4);
        let pass = subject.pass(Mode::Eval);
        let x = random_tensor(&[4, 3], 2).to_dtype(DType::F32).unwrap();
        let logits = x.matmul(&pass.weight(loss.weight).t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
        let best = |row: &Vec<f32>| (0..3).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
        let metrics = |fraction: f32| {
            let row = |s| [best(s), (best(s) + 1) % 3, fraction.to_bits()];
            let targets: Vec<u32> = logits.iter().flat_map(row).collect();
            loss.evaluate(&x, &Tensor::from_vec(targets, (4, 3), &test_device()).unwrap(), &pass)
                .unwrap()
                .read()
                .unwrap()
        };
        assert_eq!((metrics(0.6).top1, metrics(0.5).top1, metrics(0.4).top1), (4, 4, 0));
        let hard = Tensor::from_vec(logits.iter().map(best).collect::<Vec<_>>(), 4, &test_device()).unwrap();
        assert_eq!(metrics(1.0), loss.evaluate(&x, &hard, &pass).unwrap().read().unwrap());
        let odd = Tensor::zeros((4, 4), DType::U32, &test_device()).unwrap();
        assert!(loss.evaluate(&x, &odd, &pass).is_err());
    }

    #[test]
    fn constant_logits_are_right_by_chance_only() {
        let mut registry = ParamRegistry::default();
        let loss = loss(&mut registry, 4, 10, false, 0.0, false);
        let subject = TestContext::new(registry, DType::F32, 10);
        let x = Tensor::zeros((10, 4), DType::F32, &test_device()).unwrap();
        let t = Tensor::from_vec((0..10u32).collect::<Vec<_>>(), 10, &test_device()).unwrap();
        let metrics = loss.evaluate(&x, &t, &subject.pass(Mode::Eval)).unwrap().read().unwrap();
        assert_eq!((metrics.count, metrics.top1, metrics.top5), (10, 1, 5));
        assert!((metrics.mean_loss() - 10f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn bf16_follows_f64() {
        for (rows, classes, smoothing) in [(7, 5, 0.0), (40, 65, 0.1), (300, 1000, 0.0)] {
            let build = |d: &mut ParamRegistry| {
                Box::new(loss(d, 32, classes, true, smoothing, true)) as Box<dyn Loss>
            };
            check_loss_bf16(&build, &random_tensor(&[rows, 32], 1), &targets(rows, classes, true));
        }
    }
}
