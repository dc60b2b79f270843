//! Attention between the positions of a sample, from packed queries, keys and values to the heads' outputs.
//! The projections before and after it are linear layers of their own.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, On, Pass, Saved};
use crate::kernels::attention::{Attention as Kernel, Sizes};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::rotary::Rotary;

pub struct Attention {
    pub name: String,
    pub sizes: Sizes,
    pub causal: bool,
    /// Tables of the whole model, shared by its layers.
    pub rotary: Option<Arc<Rotary>>,
}

impl Attention {
    fn kernel<'a>(&'a self, pass: &'a Pass) -> Kernel<'a> {
        Kernel {
            sizes: self.sizes,
            causal: self.causal,
            rotary: self.rotary.as_deref(),
            lengths: pass.lengths,
        }
    }
}

impl Layer for Attention {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.sizes.length, self.sizes.width()]
    }

    fn forward(&self, x: &Tensor, pass: &Pass) -> Result<(Tensor, Saved)> {
        let (y, sums) = self.kernel(pass).forward(x)?;
        Ok((y.clone(), Saved(vec![x.clone(), y, sums])))
    }

    fn backward(&self, saved: Saved, dy: Tensor, pass: &Pass, want: bool) -> Result<Option<Tensor>> {
        let [x, y, sums] = &saved.0[..] else { candle_core::bail!("attention saved three tensors") };
        want.then(|| self.kernel(pass).backward(x, y, sums, &dy)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let s = &self.sizes;
        let (forward, backward) = match at.on {
            On::Cpu { threads } => s.workspace(at.dtype, at.batch, threads),
            On::Cuda => s.card_workspace(at.dtype, at.batch, self.rotary.is_some()),
        };
        let products = 4 * at.batch * s.width() * s.length * s.length;
        Cost {
            input: at.bytes(s.length * s.packed()),
            output: at.bytes(s.length * s.width()),
            keeps_input: true,
            keeps_output: true,
            saved: (at.batch * s.heads * s.length * acc_bytes(at.dtype)) as u64,
            forward,
            backward,
            flops: if self.causal { products / 2 } else { products } as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{
        Subject, autograd_agrees, bf16_follows, cost_is_exact, differences_agree, distance, flat, random,
    };
    use super::super::{Mode, Pass};
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    fn layer(sizes: Sizes, causal: bool, rotary: bool) -> Attention {
        let rotary = rotary.then(|| Arc::new(Rotary::new(sizes.length, sizes.head, 10_000.0)));
        Attention { name: "a".into(), sizes, causal, rotary }
    }

    fn proven(batch: usize, sizes: Sizes, causal: bool, rotary: bool) {
        let build =
            |_: &mut crate::params::Declared| Box::new(layer(sizes, causal, rotary)) as Box<dyn Layer>;
        let input = |batch: usize| random(&[batch, sizes.length, sizes.packed()], 1);
        differences_agree(&build, &input(batch));
        autograd_agrees(&build, &input(batch), &|x, _| {
            let Attention { rotary, .. } = &layer(sizes, causal, rotary);
            Kernel { sizes, causal, rotary: rotary.as_deref(), lengths: None }.reference(x)
        });
        cost_is_exact(&build, &input);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(batch in 1usize..4, length in 1usize..20, kv_heads in 1usize..4, group in 1usize..4, half in 1usize..6, causal: bool, rotary: bool) {
            proven(batch, Sizes { length, heads: kv_heads * group, kv_heads, head: 2 * half }, causal, rotary);
        }

        #[test]
        fn samples_of_their_own_lengths_are_as_if_alone(seen in 1usize..100, more in 0usize..80, causal: bool, rotary: bool) {
            let long = Sizes { length: seen + more, heads: 2, kv_heads: 1, head: 4 };
            let short = Sizes { length: seen, ..long };
            let subject = Subject::new(Default::default(), DType::F64, 2);
            let lengths = [seen as u32, (seen + more) as u32];
            let pass = subject.pass(Mode::Train);
            let padded = Pass { lengths: Some(&lengths), ..pass };
            let first = |t: &Tensor| t.narrow(0, 0, 1).unwrap().narrow(1, 0, seen).unwrap().copy().unwrap();
            let x = random(&[2, long.length, long.packed()], 1);
            let dy = random(&[2, long.length, long.width()], 2).pad_with_zeros(1, 0, 0).unwrap();
            let dy = Tensor::cat(&[&first(&dy).pad_with_zeros(1, 0, more).unwrap(), &dy.narrow(0, 1, 1).unwrap()], 0).unwrap();
            let run = |sizes: Sizes, x: &Tensor, dy: &Tensor, pass: &Pass| {
                let layer = layer(sizes, causal, rotary);
                let (y, saved) = layer.forward(x, pass).unwrap();
                (y, layer.backward(saved, dy.clone(), pass, true).unwrap().unwrap())
            };
            let (y, dx) = run(long, &x, &dy, &padded);
            let (y_alone, dx_alone) = run(short, &first(&x), &first(&dy), &pass);
            prop_assert!(distance(&flat(&first(&y)), &flat(&y_alone)) < 1e-12);
            prop_assert!(distance(&flat(&first(&dx)), &flat(&dx_alone)) < 1e-12);
            let beyond = flat(&dx.narrow(0, 0, 1).unwrap().narrow(1, seen, more).unwrap());
            prop_assert!(beyond.iter().all(|v| *v == 0.0), "what nobody sees has no gradient");
            let (_, whole) = run(long, &x, &dy, &pass);
            prop_assert_eq!(flat(&whole.narrow(0, 1, 1).unwrap()), flat(&dx.narrow(0, 1, 1).unwrap()));
        }
    }

    #[test]
    fn tiles_are_joined_where_they_meet() {
        for (length, causal) in [(64, true), (65, true), (130, false), (200, true)] {
            proven(1, Sizes { length, heads: 2, kv_heads: 1, head: 6 }, causal, true);
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let sizes = Sizes { length: 80, heads: 1, kv_heads: 1, head: 4 };
        let subject = Subject::new(Default::default(), DType::F32, 1);
        let x = (random(&[1, 80, 12], 1) * 200.0).unwrap().to_dtype(DType::F32).unwrap();
        let (y, saved) = layer(sizes, true, false).forward(&x, &subject.pass(Mode::Train)).unwrap();
        let dx = layer(sizes, true, false).backward(
            saved,
            y.ones_like().unwrap(),
            &subject.pass(Mode::Train),
            true,
        );
        assert!(flat(&y).iter().chain(&flat(&dx.unwrap().unwrap())).all(|v| v.is_finite()));
    }

    #[test]
    fn bf16_follows_f64() {
        for (length, causal, rotary) in [(20, true, false), (70, false, true), (130, true, true)] {
            let sizes = Sizes { length, heads: 4, kv_heads: 2, head: 64 };
            bf16_follows(
                &|_| Box::new(layer(sizes, causal, rotary)),
                &random(&[2, length, sizes.packed()], 1),
            );
        }
    }
}
