//! Batch normalisation of pictures over groups of a fixed number of samples, with a clip fused.
//!
//! A group is stated by the model, never by what fitted in memory: a micro-batch is a multiple of it.
//! Training moves the running statistics group by group in the order of the samples; judging uses them.

use candle_core::{DType, Result, Tensor};

use super::{At, Cost, Layer, Mode, On, Pass, Remakes, Saved};
use crate::kernels::batch_norm::{BatchNorm as Kernel, Running, workspace};
use crate::kernels::channels::Cut;
use crate::kernels::linear::Grads;
use crate::kernels::{Activation, Clip, add};
use crate::params::{Declared, Init, ParamId, StatId};

/// As PyTorch has them.
const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

pub struct BatchNorm {
    name: String,
    weight: ParamId,
    bias: ParamId,
    mean: StatId,
    var: StatId,
    /// (height, width, channels), or (channels).
    shape: Vec<usize>,
    group: usize,
    act: Clip,
}

impl BatchNorm {
    /// `shape` is a sample's, its last dimension the channels; `group` samples are normalised together.
    pub fn new(declared: &mut Declared, name: &str, shape: &[usize], group: usize, act: Clip) -> Self {
        let channels = shape.last().copied().unwrap_or(1);
        Self {
            name: name.into(),
            weight: declared.param(format!("{name}.weight"), [channels], Init::Constant(1.0)),
            bias: declared.param(format!("{name}.bias"), [channels], Init::Constant(0.0)),
            mean: declared.stat(format!("{name}.running_mean"), channels, 0.0),
            var: declared.stat(format!("{name}.running_var"), channels, 1.0),
            shape: shape.to_vec(),
            group,
            act,
        }
    }

    fn kernel<'a>(&self, pass: &'a Pass) -> Kernel<'a> {
        let (weight, bias) = (pass.weight(self.weight), pass.weight(self.bias));
        Kernel { weight, bias, act: self.act, eps: EPS, group: self.group }
    }

    fn running<'a>(&self, pass: &'a Pass) -> Running<'a> {
        Running { mean: pass.stat(self.mean), var: pass.stat(self.var), momentum: MOMENTUM }
    }

    fn channels(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl Layer for BatchNorm {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let running = self.running(pass);
        if pass.mode == Mode::Eval {
            return Ok((self.kernel(pass).judge(x, &running)?, Saved::default()));
        }
        let running = (pass.mode == Mode::Train).then_some(&running);
        let (y, kept) = self.kernel(pass).forward(x, running)?;
        Ok((y, Saved(vec![x.clone(), kept])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: Some(pass.grad(self.bias)) };
        self.kernel(pass).backward(&saved.0[0], &saved.0[1], &dy, &grads, want)
    }

    fn forward_onto(
        &self,
        x: &Tensor,
        onto: &Tensor,
        act: Activation,
        pass: &Pass,
    ) -> Result<(Tensor, Saved)> {
        if pass.mode == Mode::Eval {
            let y = self.kernel(pass).judge(x, &self.running(pass))?;
            return Ok((add::into(&y, onto, act)?, Saved::default()));
        }
        let running = self.running(pass);
        let running = (pass.mode == Mode::Train).then_some(&running);
        let (y, kept) = self.kernel(pass).forward_onto(x, running, onto, act)?;
        Ok((y, Saved(vec![x.clone(), kept])))
    }

    fn backward_through(
        &self,
        saved: Saved,
        dy: Tensor,
        through: (&Tensor, Activation),
        pass: &Pass,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let grads = Grads { weight: pass.grad(self.weight), bias: Some(pass.grad(self.bias)) };
        self.kernel(pass).backward_through(&saved.0[0], &saved.0[1], &dy, through, &grads, want)
    }

    fn joins(&self, act: Activation, on: On) -> bool {
        on.is_cuda() && self.act == Clip::Nothing && Clip::of(act).is_some()
    }

    fn again(&self, saved: &Saved, pass: &Pass) -> Result<Option<Tensor>> {
        self.kernel(pass).again(&saved.0[0], &saved.0[1]).map(Some)
    }

    fn remakes(&self, _: On) -> Remakes {
        Remakes::WithInput
    }

    fn cost(&self, at: At) -> Cost {
        let (len, channels) = (self.shape.iter().product::<usize>(), self.channels());
        let pixels = len / channels;
        let cut = Cut { channels, rows: at.batch * pixels, unit: self.group * pixels };
        let (forward, backward) = workspace(at, &cut);
        let acc = if at.dtype == DType::F64 { 8 } else { 4 };
        Cost {
            input: at.bytes(len),
            output: at.bytes(len),
            keeps_input: true,
            saved: (cut.units() * 2 * channels * acc) as u64,
            forward,
            backward,
            flops: (8 * at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn group(&self) -> usize {
        self.group
    }

    fn parameters(&self) -> usize {
        2 * self.channels()
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{
        Subject, autograd_agrees, bf16_follows, cost_is_exact, device, differences_agree, distance, flat,
        random,
    };
    use super::*;
    use proptest::prelude::*;

    fn clip() -> impl Strategy<Value = Clip> {
        prop::sample::select(vec![Clip::Nothing, Clip::Relu, Clip::Relu6])
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        // At least six values a channel: of two, the gradient is what rounding leaves.
        #[test]
        fn gradients_are_right(batch in 1usize..7, group in 1usize..5, h in 2usize..5, w in 3usize..6, c in 1usize..20, act in clip()) {
            let build = |d: &mut Declared| Box::new(BatchNorm::new(d, "n", &[h, w, c], group, act)) as Box<dyn Layer>;
            let x = random(&[batch, h, w, c], 1);
            // A difference across the corner of a clip is no slope: autograd judges those.
            if act == Clip::Nothing {
                differences_agree(&build, &x);
            }
            autograd_agrees(&build, &x, &|x, p| Kernel { weight: &p[0], bias: &p[1], act, eps: EPS, group }.reference(x));
            cost_is_exact(&build, &|batch| random(&[batch, h, w, c], 1));
        }
    }

    #[test]
    fn bf16_follows_f64() {
        for (batch, group, c) in [(6, 6, 64), (6, 2, 40), (5, 2, 3), (2, 2, 1040)] {
            let x = random(&[batch, 9, 7, c], 1);
            bf16_follows(&|d| Box::new(BatchNorm::new(d, "n", &[9, 7, c], group, Clip::Nothing)), &x);
        }
    }

    /// The end of a residual branch made in the layer's own passes is that made after it: output, gradients, and the
    /// gradient left for the shortcut.
    #[test]
    fn a_sum_within_is_the_sum_after() {
        for (act, c) in [(Activation::Identity, 40), (Activation::Relu, 64), (Activation::Relu6, 3)] {
            let made = |within: bool| {
                let mut declared = Declared::default();
                let layer = BatchNorm::new(&mut declared, "n", &[5, 6, c], 2, Clip::Nothing);
                let subject = Subject::new(declared, DType::F32, 3);
                let pass = subject.pass(Mode::Train);
                let [x, onto, dy] = [1, 2, 3].map(|i| random(&[3, 5, 6, c], i).to_dtype(DType::F32).unwrap());
                let (y, dx) = if within {
                    let (y, saved) = layer.forward_onto(&x, &onto, act, &pass).unwrap();
                    let dx = layer.backward_through(saved, dy.clone(), (&y, act), &pass, true).unwrap();
                    (y, dx)
                } else {
                    let (y, saved) = layer.forward(&x, &pass).unwrap();
                    let y = add::into(&y, &onto, act).unwrap();
                    add::through(&y, &dy, act).unwrap();
                    (y, layer.backward(saved, dy.clone(), &pass, true).unwrap())
                };
                [y, dx.unwrap(), dy, subject.store.grads.clone(), subject.store.stats.clone()]
                    .map(|t| flat(&t))
            };
            for (within, after) in made(true).iter().zip(made(false)) {
                assert!(distance(within, &after) < 1e-5, "{act:?}");
            }
        }
    }

    /// Statistics of many chunks, put together, of values far from zero.
    #[test]
    fn a_large_group_is_normal() {
        let (batch, pixels, c) = (32, 400, 3);
        let mut declared = Declared::default();
        let layer = BatchNorm::new(&mut declared, "n", &[20, 20, c], 32, Clip::Nothing);
        let store = crate::params::Store::new(declared.layout().unwrap(), 1, DType::F32, &device()).unwrap();
        let ids: Vec<u64> = (0..batch as u64).collect();
        let pass = Pass {
            store: &store,
            mode: Mode::Train,
            seed: 0,
            epoch: 0,
            ids: &ids,
            lengths: None,
            staged: None,
            scale: 1.0,
            along: super::super::Along::default(),
        };
        let x = random(&[batch, 20, 20, c], 5).affine(3.0, 1000.0).unwrap().to_dtype(DType::F32).unwrap();
        let y = flat(&layer.forward(&x, &pass).unwrap().0);
        for channel in 0..c {
            let of = |f: &dyn Fn(f64) -> f64| {
                y.iter().skip(channel).step_by(c).map(|v| f(*v)).sum::<f64>() / (batch * pixels) as f64
            };
            assert!(of(&|v| v).abs() < 1e-3, "mean {}", of(&|v| v));
            assert!((of(&|v| v * v) - 1.0).abs() < 1e-3, "variance {}", of(&|v| v * v));
        }
    }

    #[test]
    fn running_statistics_move_group_by_group_and_only_in_training() {
        let mut declared = Declared::default();
        let layer = BatchNorm::new(&mut declared, "n", &[1, 1, 1], 2, Clip::Nothing);
        let subject = Subject::new(declared, DType::F64, 4);
        let x = Tensor::new(&[1f64, 3.0, 10.0, 14.0], &device()).unwrap().reshape((4, 1, 1, 1)).unwrap();
        let stats = || flat(&subject.store.stats);
        for mode in [Mode::Again, Mode::Eval] {
            layer.forward(&x, &subject.pass(mode)).unwrap();
            assert_eq!(stats(), [0.0, 1.0], "{mode:?}");
        }
        layer.forward(&x, &subject.pass(Mode::Train)).unwrap();
        // Groups (1, 3) and (10, 14): means 2 and 12, unbiased variances 2 and 8.
        let wanted = [0.9 * 0.2 + 0.1 * 12.0, 0.9 * (0.9 + 0.1 * 2.0) + 0.1 * 8.0];
        stats().iter().zip(wanted).for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{a} {b}"));
    }
}
