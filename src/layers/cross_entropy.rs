//! Cross-entropy over classes, together with the linear map that scores them.

use candle_core::{Result, Tensor};

use super::loss::{Counted, Loss};
use super::{At, Cost, On, Pass};
use crate::kernels::Activation;
use crate::kernels::cross_entropy::{
    ClassWeights, Head, card_workspace, fused_workspace, is_plain, workspace,
};
use crate::kernels::linear::{Grads, Lies, Linear};
use crate::params::ParamId;

pub struct CrossEntropy {
    pub name: String,
    /// (classes, width); may be a parameter of another layer, as in a tied language model.
    pub weight: ParamId,
    /// The weight belongs to another layer.
    pub tied: bool,
    pub bias: Option<ParamId>,
    /// Rows a sample has: 1, or the positions of a sequence.
    pub positions: usize,
    pub width: usize,
    pub classes: usize,
    /// Share of each target that is spread over all classes.
    pub smoothing: f64,
    pub class_weights: Option<ClassWeights>,
}

impl CrossEntropy {
    fn head<'a>(&'a self, pass: &'a Pass) -> Head<'a> {
        Head {
            weight: pass.weight(self.weight),
            bias: self.bias.map(|id| pass.weight(id)),
            smoothing: self.smoothing,
            class_weights: self.class_weights.as_ref(),
        }
    }
}

impl Loss for CrossEntropy {
    fn name(&self) -> &str {
        &self.name
    }

    fn learn(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<(Counted, Tensor)> {
        let grads = Grads { weight: pass.grad(self.weight), bias: self.bias.map(|id| pass.grad(id)) };
        self.head(pass).learn(x, targets, pass.scale, &grads)
    }

    fn judge(&self, x: &Tensor, targets: &Tensor, pass: &Pass) -> Result<Counted> {
        self.head(pass).judge(x, targets)
    }

    fn map<'a>(&self, pass: &'a Pass) -> Linear<'a> {
        let bias = self.bias.map(|id| pass.weight(id));
        Linear { weight: pass.weight(self.weight), lies: Lies::OutIn, bias, act: Activation::Identity }
    }

    fn cost(&self, at: At) -> Cost {
        let rows = at.batch * self.positions;
        let (bias, weighted) = (self.bias.is_some(), self.class_weights.is_some());
        let (forward, backward) = match at.on {
            On::Cpu { .. } => workspace(at.dtype, rows, self.classes, self.width, bias),
            On::Cuda { .. } => {
                let (judge, learn) = card_workspace(at.dtype, rows, self.classes, bias, weighted);
                let fused = if at.on.is_hopper() && is_plain(bias, self.smoothing, weighted) {
                    fused_workspace(at.dtype, rows, self.classes, self.width)
                } else {
                    0
                };
                (judge, learn + fused)
            }
        };
        Cost {
            input: at.bytes(self.positions * self.width),
            forward,
            backward,
            flops: 2 * (rows * self.width * self.classes) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        let weight = if self.tied { 0 } else { self.width * self.classes };
        weight + self.bias.map_or(0, |_| self.classes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{
        Subject, device, distance, flat, leaf, loss_bf16_follows, loss_differences_agree, random,
    };
    use super::super::{Mode, Pass};
    use super::*;
    use crate::kernels::cross_entropy::IGNORE;
    use crate::params::{Declared, Init};
    use candle_core::{DType, Device, Var};
    use proptest::prelude::*;

    fn loss(
        d: &mut Declared,
        width: usize,
        classes: usize,
        bias: bool,
        smoothing: f64,
        weighted: bool,
    ) -> CrossEntropy {
        CrossEntropy {
            name: "head".into(),
            weight: d.param("head.weight", [classes, width], Init::Normal(1.0)),
            tied: false,
            bias: bias.then(|| d.param("head.bias", [classes], Init::Normal(1.0))),
            positions: 1,
            width,
            classes,
            smoothing,
            class_weights: weighted
                .then(|| (0..classes).map(|c| 0.5 + c as f32 * 0.25).collect::<Vec<_>>().into()),
        }
    }

    fn targets(rows: usize, classes: usize, ignore: bool) -> Tensor {
        let of = |i: usize| if ignore && i % 3 == 1 { IGNORE } else { (i * 5 % classes) as u32 };
        Tensor::from_vec((0..rows).map(of).collect::<Vec<u32>>(), rows, &device()).unwrap()
    }

    /// Rows of (two classes, bits of the first's share); the classes meet now and then.
    fn mixed(rows: usize, classes: usize) -> (Tensor, [(Tensor, Tensor); 2]) {
        let share = |i: usize| [0.3f32, 1.0, 0.5, 0.75, 0.0][i % 5];
        let class = |i: usize, k: usize| ((i * k + k) % classes) as u32;
        let row = |i: usize| [class(i, 5), class(i, 3), share(i).to_bits()];
        let bits: Vec<u32> = (0..rows).flat_map(row).collect();
        let goal = |k: usize, share: &dyn Fn(usize) -> f64| {
            let classes: Vec<u32> = (0..rows).map(|i| class(i, k)).collect();
            let shares: Vec<f64> = (0..rows).map(share).collect();
            let on = &Device::Cpu;
            (Tensor::from_vec(classes, rows, on).unwrap(), Tensor::from_vec(shares, rows, on).unwrap())
        };
        let goals = [goal(5, &|i| share(i) as f64), goal(3, &|i| 1.0 - share(i) as f64)];
        (Tensor::from_vec(bits, (rows, 3), &device()).unwrap(), goals)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_of_mixed_classes_are_right(rows in 1usize..7, width in 1usize..9, classes in 2usize..9, bias: bool, smooth in prop::sample::select(vec![0.0, 0.1]), weighted: bool) {
            let x = random(&[rows, width], 1);
            loss_differences_agree(&|d| Box::new(loss(d, width, classes, bias, smooth, weighted)), &x, &mixed(rows, classes).0);
        }

        #[test]
        fn mixed_classes_follow_the_reference(rows in 1usize..300, classes in 2usize..40, smooth in prop::sample::select(vec![0.0, 0.1]), weighted: bool) {
            let mut declared = Declared::default();
            let loss = loss(&mut declared, 16, classes, true, smooth, weighted);
            let subject = Subject::new(declared, DType::F32, rows);
            let x = random(&[rows, 16], 1).to_dtype(DType::F32).unwrap();
            let (targets, goals) = mixed(rows, classes);
            let pass = Pass { scale: 0.5, ..subject.pass(Mode::Train) };
            let (tally, dx) = loss.learn(&x, &targets, &pass).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = Head { weight: &vars[1], bias: Some(&vars[2]), smoothing: smooth, class_weights: loss.class_weights.as_ref() };
            let wanted = head.reference_mixed(&vars[0], &goals).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let tally = tally.read().unwrap();
            prop_assert!((tally.loss - value).abs() < 1e-4 * value.abs().max(1.0));
            let weight = |class: u32| loss.class_weights.as_ref().map_or(1.0, |w| w[class as usize] as f64);
            let weights: f64 = goals.iter().map(|(classes, shares)| {
                let (classes, shares): (Vec<u32>, Vec<f64>) = (classes.to_vec1().unwrap(), shares.to_vec1().unwrap());
                classes.into_iter().zip(shares).map(|(class, share)| weight(class) * share).sum::<f64>()
            }).sum();
            prop_assert!((tally.weight - weights).abs() < 1e-5 * weights);
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(distance(&flat(&dx), &flat(grads.get(&vars[0]).unwrap())) < 1e-4);
            for (ours, var) in subject.store.grad_views().iter().zip(&vars[1..]) {
                prop_assert!(distance(&flat(ours), &flat(grads.get(var).unwrap())) < 1e-4);
            }
        }

        #[test]
        fn gradients_are_right(rows in 1usize..7, width in 1usize..9, classes in 2usize..9, bias: bool, smooth in prop::sample::select(vec![0.0, 0.1]), weighted: bool, ignore: bool) {
            let x = random(&[rows, width], 1);
            loss_differences_agree(&|d| Box::new(loss(d, width, classes, bias, smooth, weighted)), &x, &targets(rows, classes, ignore));
        }

        #[test]
        fn the_f32_body_follows_the_reference(rows in 1usize..300, classes in 2usize..40, smooth in prop::sample::select(vec![0.0, 0.1]), weighted: bool) {
            let mut declared = Declared::default();
            let loss = loss(&mut declared, 16, classes, true, smooth, weighted);
            let subject = Subject::new(declared, DType::F32, rows);
            let (x, t) = (random(&[rows, 16], 1).to_dtype(DType::F32).unwrap(), targets(rows, classes, false));
            let pass = Pass { scale: 0.5, ..subject.pass(Mode::Train) };
            let (tally, dx) = loss.learn(&x, &t, &pass).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let head = Head { weight: &vars[1], bias: Some(&vars[2]), smoothing: smooth, class_weights: loss.class_weights.as_ref() };
            let wanted = head.reference(&vars[0], &t.to_device(&Device::Cpu).unwrap()).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let tally = tally.read().unwrap();
            prop_assert!((tally.loss - value).abs() < 1e-4 * value.abs().max(1.0));
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(distance(&flat(&dx), &flat(grads.get(&vars[0]).unwrap())) < 1e-4);
            for (ours, var) in subject.store.grad_views().iter().zip(&vars[1..]) {
                prop_assert!(distance(&flat(ours), &flat(grads.get(var).unwrap())) < 1e-4);
            }
        }
    }

    #[test]
    fn of_mixed_classes_the_larger_share_is_judged() {
        let mut declared = Declared::default();
        let loss = loss(&mut declared, 3, 3, false, 0.0, false);
        let subject = Subject::new(declared, DType::F32, 4);
        let pass = subject.pass(Mode::Eval);
        let x = random(&[4, 3], 2).to_dtype(DType::F32).unwrap();
        let scores = x.matmul(&pass.weight(loss.weight).t().unwrap()).unwrap().to_vec2::<f32>().unwrap();
        let best = |row: &Vec<f32>| (0..3).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
        let tally = |share: f32| {
            let row = |s| [best(s), (best(s) + 1) % 3, share.to_bits()];
            let targets: Vec<u32> = scores.iter().flat_map(row).collect();
            loss.judge(&x, &Tensor::from_vec(targets, (4, 3), &device()).unwrap(), &pass)
                .unwrap()
                .read()
                .unwrap()
        };
        assert_eq!((tally(0.6).top1, tally(0.5).top1, tally(0.4).top1), (4, 4, 0));
        let hard = Tensor::from_vec(scores.iter().map(best).collect::<Vec<_>>(), 4, &device()).unwrap();
        assert_eq!(tally(1.0), loss.judge(&x, &hard, &pass).unwrap().read().unwrap());
        let odd = Tensor::zeros((4, 2), DType::U32, &device()).unwrap();
        assert!(loss.judge(&x, &odd, &pass).is_err());
    }

    #[test]
    fn a_model_that_says_nothing_is_not_right() {
        let mut declared = Declared::default();
        let loss = loss(&mut declared, 4, 10, false, 0.0, false);
        let subject = Subject::new(declared, DType::F32, 10);
        let x = Tensor::zeros((10, 4), DType::F32, &device()).unwrap();
        let t = Tensor::from_vec((0..10u32).collect::<Vec<_>>(), 10, &device()).unwrap();
        let tally = loss.judge(&x, &t, &subject.pass(Mode::Eval)).unwrap().read().unwrap();
        assert_eq!((tally.count, tally.top1, tally.top5), (10, 1, 5));
        assert!((tally.mean_loss() - 10f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn bf16_follows_f64() {
        for (rows, classes, smoothing) in [(7, 5, 0.0), (40, 65, 0.1), (300, 1000, 0.0)] {
            let build =
                |d: &mut Declared| Box::new(loss(d, 32, classes, true, smoothing, true)) as Box<dyn Loss>;
            loss_bf16_follows(&build, &random(&[rows, 32], 1), &targets(rows, classes, true));
        }
    }
}
