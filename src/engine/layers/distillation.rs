//! Cross-entropy with the targets and divergence from a teacher's probabilities, over the same linear layer:
//! `(1 - a) CE + a T^2 KL`.

use candle_core::{Result, Tensor};

use super::cross_entropy::CrossEntropy;
use super::loss::{Loss, PendingMetricSums};
use super::{Cost, PassContext};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::cross_entropy::reference_workspace;
use crate::kernels::distillation::top::TopSoftTargets;
use crate::kernels::distillation::{self, SoftTargets, TeacherLogits};
use crate::kernels::linear::{self, LinearKernel, TrainedParts, WeightLayout};
use crate::kernels::{Activation, add};
use crate::params::ParamId;

/// The teacher's part in a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistillOptions {
    pub temperature: f64,
    /// The teacher's fraction of the loss.
    pub weight: f64,
    /// How many logits of each row are known, if they are stored; `None` if the teacher runs in every step, so that all
    /// are.
    pub top_k: Option<usize>,
}

pub struct Distillation {
    pub hard: CrossEntropy,
    pub options: DistillOptions,
}

impl Loss for Distillation {
    fn name(&self) -> &str {
        self.hard.name()
    }

    fn forward_backward(
        &self,
        x: &Tensor,
        targets: &Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)> {
        let Some(teacher) = pass.teacher_logits else {
            candle_core::bail!("distillation: a pass without the teacher's logits")
        };
        let DistillOptions { temperature, weight, .. } = self.options;
        let hard_pass = PassContext { loss_scale: (1.0 - weight) * pass.loss_scale, ..*pass };
        let (sums, dx) = self.hard.forward_backward(x, targets, &hard_pass, needs_input_grad)?;
        let head = self.hard.output_layer(pass);
        let logits = head.forward(x)?.0;
        let scale = weight * pass.loss_scale;
        let soft_loss = match teacher {
            TeacherLogits::All(teacher) => {
                let teacher = &teacher.reshape(logits.shape())?;
                SoftTargets { teacher, targets, temperature }.forward_backward(&logits, scale)?
            }
            TeacherLogits::Top(teacher) => {
                TopSoftTargets { teacher, targets, temperature }.forward_backward(&logits, scale)?
            }
        };
        let grads = pass.weight_bias_grads(self.hard.weight, self.hard.bias);
        let soft_dx = head.backward(Some(x), None, logits, &grads, needs_input_grad)?;
        let dx = match (dx, soft_dx) {
            (Some(dx), Some(soft_dx)) => Some(add::inplace(&dx, &soft_dx, Activation::Identity)?),
            (dx, _) => dx,
        };
        Ok((sums.with_loss(1.0 - weight, &(soft_loss * weight)?)?, dx))
    }

    /// Without the teacher: a validation loss is that of the targets.
    fn evaluate(&self, x: &Tensor, targets: &Tensor, pass: &PassContext) -> Result<PendingMetricSums> {
        self.hard.evaluate(x, targets, pass)
    }

    fn output_layer<'a>(&self, pass: &'a PassContext) -> LinearKernel<'a> {
        self.hard.output_layer(pass)
    }

    fn outputs_per_sample(&self) -> usize {
        self.hard.outputs_per_sample()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let CrossEntropy { positions, width, classes, ref weight, bias, .. } = self.hard;
        let (hard, rows) = (self.hard.cost(spec), spec.batch * positions);
        let on_cpu = matches!(spec.backend, Backend::Cpu { .. });
        let products = match spec.backend {
            Backend::Cpu { .. } => {
                let sizes = (width, classes);
                let trained =
                    TrainedParts { weight: weight.trained, bias: bias.is_some_and(|bias| bias.trained) };
                let (forward, backward) =
                    linear::workspace(spec.dtype, WeightLayout::OutIn, rows, sizes, trained);
                forward.max(backward)
            }
            Backend::Reference { .. } => reference_workspace(spec.dtype, rows, classes, width).1,
            Backend::Cuda { .. } => {
                let bias = bias.map_or(0, |_| linear::bias_gradient_workspace(spec.dtype, rows, classes));
                let fused =
                    spec.backend.is_hopper() && linear::hopper_supports(spec.dtype, rows, width, classes);
                bias.max(if fused { linear::hopper_column_sums_bytes(rows, width) as u64 } else { 0 })
            }
        };
        // The hard loss has freed its temporaries before the soft one computes all logits and a second input gradient.
        let divergence = match self.options.top_k {
            Some(k) => distillation::top::workspace(spec.dtype, rows, classes, k, on_cpu),
            None => distillation::workspace(spec.dtype, rows, classes, on_cpu),
        };
        let soft = spec.bytes(positions * classes) + hard.input_grad + products + divergence;
        Cost { backward_workspace: hard.backward_workspace.max(soft), flops: 2 * hard.flops, ..hard }
    }

    fn params(&self) -> Vec<ParamId> {
        self.hard.params()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use proptest::prelude::*;

    use super::super::Mode;
    use super::super::gradcheck::{
        TestContext, leaf, random_tensor, relative_error, test_device, to_f64_vec,
    };
    use super::*;
    use crate::base::features::IGNORE_INDEX;
    use crate::kernels::cross_entropy::LinearCrossEntropy;
    use crate::kernels::distillation::top::TopLogits;
    use crate::kernels::reference::ReferenceScope;
    use crate::params::{ParamInit, ParamRegistry};

    fn loss(d: &mut ParamRegistry, width: usize, classes: usize, options: DistillOptions) -> Distillation {
        let hard = CrossEntropy {
            name: "head".into(),
            weight: d.param("head.weight", [classes, width], ParamInit::Normal(1.0)),
            bias: Some(d.param("head.bias", [classes], ParamInit::Normal(1.0))),
            positions: 1,
            width,
            classes,
            smoothing: 0.1,
            focal_gamma: 0.0,
            class_weights: None,
        };
        Distillation { hard, options }
    }

    /// The `k` largest logits of each row, and the sum of the others.
    fn top_logits(teacher: &Tensor, k: usize, temperature: f64) -> TopLogits {
        let (mut classes, mut logits, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        let wide = teacher.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        for row in wide.to_vec2::<f64>().unwrap() {
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            let most = row[order[0]];
            let others = order.split_off(k);
            order.sort();
            classes.extend(order.iter().map(|class| *class as u32));
            logits.extend(order.iter().map(|class| (row[*class] - most) as f32));
            let sum: f64 = others.iter().map(|class| ((row[*class] - most) / temperature).exp()).sum();
            rest.push(sum.ln() as f32);
        }
        let (rows, device) = (rest.len(), teacher.device());
        TopLogits {
            classes: Tensor::from_vec(classes, (rows, k), device).unwrap(),
            logits: Tensor::from_vec(logits, (rows, k), device).unwrap(),
            rest: Tensor::from_vec(rest, rows, device).unwrap(),
        }
    }

    /// The loss and the gradients of input, weight and bias, by candle's autograd.
    fn expected(
        inputs: [&Tensor; 3],
        teacher: &Tensor,
        kept: &[u32],
        classes: &[u32],
        options: DistillOptions,
    ) -> (f64, Vec<Vec<f64>>) {
        let vars: Vec<Var> = inputs.map(leaf).into();
        let cpu = &Device::Cpu;
        let rows = Tensor::new(kept, cpu).unwrap();
        let x = vars[0].index_select(&rows, 0).unwrap();
        let head = LinearCrossEntropy {
            weight: &vars[1],
            bias: Some(&vars[2]),
            smoothing: 0.1,
            focal_gamma: 0.0,
            class_weights: None,
        };
        let hard = head.reference(&x, &Tensor::new(classes, cpu).unwrap()).unwrap();
        let logits = x.matmul(&vars[1].t().unwrap()).unwrap().broadcast_add(&vars[2]).unwrap();
        let teacher =
            teacher.to_device(cpu).unwrap().to_dtype(DType::F64).unwrap().index_select(&rows, 0).unwrap();
        let ones = Tensor::ones(kept.len(), DType::F64, cpu).unwrap();
        let temperature = options.temperature;
        let soft = match options.top_k {
            None => SoftTargets { teacher: &teacher, targets: &rows, temperature }.reference(&logits, &ones),
            Some(k) => {
                let teacher = &top_logits(&teacher, k, temperature);
                TopSoftTargets { teacher, targets: &rows, temperature }.reference(&logits, &ones)
            }
        };
        let soft = soft.unwrap();
        let all = ((hard * (1.0 - options.weight)).unwrap() + (soft * options.weight).unwrap()).unwrap();
        let grads = (&all * 0.5).unwrap().backward().unwrap();
        let grads = vars.iter().map(|var| to_f64_vec(grads.get(var).unwrap())).collect();
        (all.to_scalar().unwrap(), grads)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Loss and gradients against candle's autograd, in f32 and f64, by the kernel and in candle's operations, with
        /// all logits of the teacher and with the largest ones.
        #[test]
        fn gradients_are_those_of_autograd(
            rows in 2usize..200,
            width in 1usize..12,
            classes in 2usize..30,
            temperature in prop::sample::select(vec![0.5, 1.0, 4.0]),
            weight in prop::sample::select(vec![0.0, 0.3, 1.0]),
            k in prop::sample::select(vec![0usize, 0, 1, 4, 30]),
            f64s: bool,
            by_reference: bool,
            ignore: bool,
        ) {
            let top_k = (k > 0).then(|| k.min(classes));
            let options = DistillOptions { temperature, weight, top_k };
            let dtype = if f64s { DType::F64 } else { DType::F32 };
            let mut registry = ParamRegistry::default();
            let loss = loss(&mut registry, width, classes, options);
            let subject = TestContext::new(registry, dtype, rows);
            let x = random_tensor(&[rows, width], 1).to_dtype(dtype).unwrap();
            let teacher = (random_tensor(&[rows, classes], 2).to_dtype(dtype).unwrap() * 3.0).unwrap();
            let ignored = |row: usize| ignore && row % 3 == 1;
            let class = |row: usize| (row * 5 % classes) as u32;
            let targets: Vec<u32> = (0..rows).map(|row| if ignored(row) { IGNORE_INDEX } else { class(row) }).collect();
            let targets = Tensor::from_vec(targets, rows, &test_device()).unwrap();
            let top = top_k.map(|k| top_logits(&teacher, k, temperature));
            let known = top.as_ref().map_or(TeacherLogits::All(&teacher), TeacherLogits::Top);
            let pass = PassContext { loss_scale: 0.5, teacher_logits: Some(known), ..subject.pass(Mode::Train) };
            let (sums, dx) = {
                let _scope = ReferenceScope::enter(by_reference);
                loss.forward_backward(&x, &targets, &pass, true).unwrap()
            };
            let kept: Vec<u32> = (0..rows).filter(|row| !ignored(*row)).map(|row| row as u32).collect();
            let goals: Vec<u32> = kept.iter().map(|row| class(*row as usize)).collect();
            let wide = |t: &Tensor| t.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
            let [x, w, b] = [&x, pass.weight(loss.hard.weight), pass.weight(loss.hard.bias.unwrap())].map(wide);
            let (value, grads) = expected([&x, &w, &b], &teacher, &kept, &goals, options);
            let bound = if f64s { 1e-9 } else { 1e-4 };
            let sums = sums.read().unwrap();
            prop_assert!((sums.loss - value).abs() < bound * value.abs().max(1.0), "{} and {value}", sums.loss);
            prop_assert_eq!(sums.count, kept.len() as u64);
            prop_assert!(relative_error(&to_f64_vec(&dx.unwrap()), &grads[0]) < bound);
            for (ours, expected) in subject.store.grad_views().iter().zip(&grads[1..]) {
                prop_assert!(relative_error(&to_f64_vec(ours), expected) < bound);
            }
        }
    }

    /// Stored logits of all classes teach what all logits teach, and those of a few teach the same probabilities: with
    /// one class known, the loss is that of two classes.
    #[test]
    fn the_largest_logits_are_the_same_probabilities() {
        let temperature = 2.0;
        let (cpu, zeros) = (&Device::Cpu, Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap());
        let of = |seed| random_tensor(&[3, 6], seed).to_device(cpu).unwrap().to_dtype(DType::F64).unwrap();
        let (student, teacher) = (of(1), of(2));
        let copy = || student.copy().unwrap();
        let all = SoftTargets { teacher: &teacher, targets: &zeros, temperature };
        let (gradient, top_gradient) = (copy(), copy());
        let loss = all.forward_backward(&gradient, 1.0).unwrap().to_scalar::<f64>().unwrap();
        let top = top_logits(&teacher, 6, temperature);
        let targets = TopSoftTargets { teacher: &top, targets: &zeros, temperature };
        let top_loss = targets.forward_backward(&top_gradient, 1.0).unwrap().to_scalar::<f64>().unwrap();
        assert!((loss - top_loss).abs() < 1e-5, "{loss} {top_loss}");
        assert!(relative_error(&to_f64_vec(&top_gradient), &to_f64_vec(&gradient)) < 1e-5);
        let top = top_logits(&teacher, 1, temperature);
        let targets = TopSoftTargets { teacher: &top, targets: &zeros, temperature };
        let loss = targets.forward_backward(&copy(), 1.0).unwrap().to_scalar::<f64>().unwrap();
        let softmax = |t: &Tensor| {
            candle_nn::ops::softmax(&(t / temperature).unwrap(), 1).unwrap().to_vec2::<f64>().unwrap()
        };
        let (p, q, classes) = (softmax(&student), softmax(&teacher), to_f64_vec(&top.classes));
        let of_row = |row: usize| {
            let (p, q) = (p[row][classes[row] as usize], q[row][classes[row] as usize]);
            q * (q / p).ln() + (1.0 - q) * ((1.0 - q) / (1.0 - p)).ln()
        };
        let expected = temperature.powi(2) * (0..3).map(of_row).sum::<f64>();
        assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    }

    /// A student whose logits are the teacher's has nothing to learn from it.
    #[test]
    fn equal_logits_have_no_soft_gradient() {
        let mut registry = ParamRegistry::default();
        let loss = loss(&mut registry, 5, 7, DistillOptions { temperature: 2.0, weight: 1.0, top_k: None });
        let subject = TestContext::new(registry, DType::F32, 9);
        let x = random_tensor(&[9, 5], 1).to_dtype(DType::F32).unwrap();
        let teacher = loss.output_layer(&subject.pass(Mode::Train)).forward(&x).unwrap().0;
        let targets = Tensor::zeros(9, DType::U32, &test_device()).unwrap();
        let pass =
            PassContext { teacher_logits: Some(TeacherLogits::All(&teacher)), ..subject.pass(Mode::Train) };
        let (sums, dx) = loss.forward_backward(&x, &targets, &pass, true).unwrap();
        assert!(sums.read().unwrap().loss.abs() < 1e-6);
        assert!(to_f64_vec(&dx.unwrap()).iter().all(|d| d.abs() < 1e-6));
    }
}
