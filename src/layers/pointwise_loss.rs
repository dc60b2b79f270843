//! Losses of predicted values (squared, Huber's, binary cross-entropy) together with the linear map that
//! predicts them.

use candle_core::{Result, Tensor};

use super::loss::{Counted, Loss};
use super::{At, Cost, On, Pass};
use crate::kernels::Activation;
use crate::kernels::linear::{Grads, Lies, Linear};
pub use crate::kernels::pointwise_loss::Kind;
use crate::kernels::pointwise_loss::{Head, card_workspace, workspace};
use crate::params::ParamId;

pub struct PointwiseLoss {
    pub name: String,
    pub kind: Kind,
    /// (outputs, width)
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Rows a sample has: 1, or the positions of a sequence.
    pub positions: usize,
    pub width: usize,
    pub outputs: usize,
}

impl PointwiseLoss {
    fn head<'a>(&self, pass: &'a Pass) -> Head<'a> {
        Head { weight: pass.weight(self.weight), bias: self.bias.map(|id| pass.weight(id)), kind: self.kind }
    }
}

impl Loss for PointwiseLoss {
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
        let (forward, backward) = match at.on {
            On::Cpu { .. } => workspace(at.dtype, rows, self.outputs, self.width),
            On::Cuda { .. } => card_workspace(at.dtype, at.batch, rows, self.outputs, self.bias.is_some()),
        };
        Cost {
            input: at.bytes(self.positions * self.width),
            forward,
            backward,
            flops: 2 * (rows * self.width * self.outputs) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        self.outputs * self.width + self.bias.map_or(0, |_| self.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{Subject, device, distance, flat, leaf, loss_differences_agree, random};
    use super::super::{Along, Mode, Pass};
    use super::*;
    use crate::params::{Declared, Init};
    use candle_core::{DType, Device, Var};
    use proptest::prelude::*;

    fn loss(d: &mut Declared, kind: Kind, width: usize, outputs: usize, bias: bool) -> PointwiseLoss {
        PointwiseLoss {
            name: "head".into(),
            kind,
            weight: d.param("head.weight", [outputs, width], Init::Normal(1.0)),
            bias: bias.then(|| d.param("head.bias", [outputs], Init::Normal(1.0))),
            positions: 1,
            width,
            outputs,
        }
    }

    fn targets(rows: usize, outputs: usize, kind: Kind) -> Tensor {
        let of = |v: f64| if kind == Kind::Binary { (v > 0.0) as u8 as f64 } else { 2.0 * v };
        let values: Vec<f32> = flat(&random(&[rows, outputs], 3)).into_iter().map(|v| of(v) as f32).collect();
        Tensor::from_vec(values, (rows, outputs), &device()).unwrap()
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop::sample::select(vec![Kind::Squared, Kind::Huber { delta: 0.7 }, Kind::Binary])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(rows in 1usize..7, width in 1usize..9, outputs in 1usize..6, bias: bool, kind in kind()) {
            let x = random(&[rows, width], 1);
            loss_differences_agree(&|d| Box::new(loss(d, kind, width, outputs, bias)), &x, &targets(rows, outputs, kind));
        }

        #[test]
        fn the_f32_body_follows_the_reference(rows in 1usize..300, outputs in 1usize..9, kind in kind()) {
            let mut declared = Declared::default();
            let loss = loss(&mut declared, kind, 16, outputs, true);
            let subject = Subject::new(declared, DType::F32, rows);
            let (x, t) = (random(&[rows, 16], 1).to_dtype(DType::F32).unwrap(), targets(rows, outputs, kind));
            let pass = Pass { scale: 0.5, ..subject.pass(Mode::Train) };
            let (tally, dx) = loss.learn(&x, &t, &pass).unwrap();
            let vars: Vec<Var> = [&x, pass.weight(loss.weight), pass.weight(loss.bias.unwrap())] .map(leaf).into();
            let wanted = Head { weight: &vars[1], bias: Some(&vars[2]), kind }.reference(&vars[0], &t.to_device(&Device::Cpu).unwrap()).unwrap();
            let value = wanted.to_scalar::<f64>().unwrap();
            let tally = tally.read().unwrap();
            prop_assert!((tally.loss - value).abs() < 1e-4 * value.abs().max(1.0), "{} {value}", tally.loss);
            let grads = (wanted * 0.5).unwrap().backward().unwrap();
            prop_assert!(distance(&flat(&dx), &flat(grads.get(&vars[0]).unwrap())) < 1e-4);
            for (ours, var) in subject.store.grad_views().iter().zip(&vars[1..]) {
                prop_assert!(distance(&flat(ours), &flat(grads.get(var).unwrap())) < 1e-4);
            }
        }
    }

    #[test]
    fn a_binary_answer_is_right_where_all_its_scores_are() {
        let mut declared = Declared::default();
        let loss = loss(&mut declared, Kind::Binary, 1, 1, false);
        let store = crate::params::Store::new(declared.layout().unwrap(), 1, DType::F32, &device()).unwrap();
        crate::kernels::update::round_into(&Tensor::ones(1, DType::F32, &device()).unwrap(), &store.master)
            .unwrap();
        let pass = Pass {
            store: &store,
            mode: Mode::Eval,
            seed: 0,
            epoch: 0,
            ids: &[0, 1, 2],
            lengths: None,
            staged: None,
            scale: 1.0,
            along: Along::default(),
        };
        let of = |v: [f32; 3]| Tensor::from_vec(v.to_vec(), (3, 1), &device()).unwrap();
        let tally = loss.judge(&of([2.0, -1.0, 60.0]), &of([1.0, 1.0, 1.0]), &pass).unwrap().read().unwrap();
        assert_eq!((tally.count, tally.top1), (3, 2));
        let wanted = (-2f64).exp().ln_1p() + 1f64.exp().ln_1p();
        assert!((tally.loss - wanted).abs() < 1e-5, "{} {wanted}", tally.loss);
    }
}
