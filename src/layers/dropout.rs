//! Dropout: each value is dropped with a chance that depends on (seed, epoch, sample, layer) alone.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Mode, Pass, Saved};
use crate::kernels::dropout::apply;
use crate::kernels::keys::Keys;
use crate::random::stream;

pub struct Dropout {
    pub name: String,
    /// Shape of a sample.
    pub shape: Vec<usize>,
    /// Chance that a value is dropped.
    pub p: f64,
}

impl Dropout {
    fn apply(&self, x: &Tensor, pass: &Pass) -> Result<Tensor> {
        apply(x, self.p, &pass.keys(stream(&self.name)))
    }
}

impl Layer for Dropout {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let y = if pass.mode == Mode::Eval { x.copy()? } else { self.apply(x, pass)? };
        Ok((y, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        want.then(|| self.apply(&dy, pass)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let len: usize = self.shape.iter().product();
        let keys = if at.on.is_cuda() { Keys::bytes(at.batch) } else { 0 };
        Cost {
            input: at.bytes(len),
            output: at.bytes(len),
            forward: keys,
            backward: keys,
            flops: (at.batch * len) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{Subject, cost_is_exact, device, differences_agree, flat, random};
    use super::*;
    use candle_core::DType;

    fn layer(p: f64) -> Dropout {
        Dropout { name: "d".into(), shape: vec![5, 7], p }
    }

    #[test]
    fn gradients_are_right() {
        differences_agree(&|_| Box::new(layer(0.4)), &random(&[3, 5, 7], 1));
        cost_is_exact(&|_| Box::new(layer(0.4)), &|batch| random(&[batch, 5, 7], 1));
    }

    #[test]
    fn a_sample_is_dropped_alike_in_any_company() {
        let x = random(&[4, 5, 7], 1);
        let subject = Subject::new(Default::default(), DType::F64, 4);
        let all = subject.pass(Mode::Train);
        let last = Pass { ids: &subject.ids[3..], ..all };
        let whole = layer(0.4).forward(&x, &all).unwrap().0;
        let alone = layer(0.4).forward(&x.narrow(0, 3, 1).unwrap().copy().unwrap(), &last).unwrap().0;
        assert_eq!(flat(&whole.narrow(0, 3, 1).unwrap()), flat(&alone));
        let next_epoch = layer(0.4).forward(&x, &Pass { epoch: 9, ..all }).unwrap().0;
        assert_ne!(flat(&whole), flat(&next_epoch));
    }

    #[test]
    fn the_share_dropped_and_the_mean_are_as_stated() {
        let x = Tensor::ones((64, 5, 7), DType::F64, &device()).unwrap();
        let subject = Subject::new(Default::default(), DType::F64, 64);
        let y = flat(&layer(0.25).forward(&x, &subject.pass(Mode::Train)).unwrap().0);
        let share = y.iter().filter(|v| **v == 0.0).count() as f64 / y.len() as f64;
        assert!((share - 0.25).abs() < 0.03, "{share}");
        assert!((y.iter().sum::<f64>() / y.len() as f64 - 1.0).abs() < 0.04);
    }
}
