//! Attention between the positions of a sample, from packed queries, keys and values to the heads' outputs.
//! The projections before and after it are linear layers of their own.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Mode, On, Pass, Saved};
use crate::kernels::attention::{Attention as Kernel, Mask, Sizes};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::rotary::Rotary;
use crate::random::stream;

pub struct Attention {
    pub name: String,
    pub sizes: Sizes,
    pub causal: bool,
    /// Tables of the whole model, shared by its layers.
    pub rotary: Option<Arc<Rotary>>,
    /// Chance that a weight, what a query takes of a value, is dropped while training.
    pub dropout: f64,
    /// Samples come with their lengths, and what is behind these is left out.
    pub padded: bool,
}

impl Attention {
    fn kernel<'a>(&'a self, pass: &'a Pass) -> Kernel<'a> {
        Kernel {
            sizes: self.sizes,
            causal: self.causal,
            rotary: self.rotary.as_deref(),
            lengths: pass.lengths,
            staged: pass.staged,
            mask: (self.dropout > 0.0 && pass.mode != Mode::Eval).then(|| self.mask(pass)),
        }
    }

    fn mask<'a>(&self, pass: &Pass<'a>) -> Mask<'a> {
        Mask::new(self.dropout, pass.keys(stream(&self.name)))
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
            On::Cuda { .. } => {
                s.card_workspace(at.dtype, at.batch, self.rotary.is_some(), self.dropout > 0.0, self.padded)
            }
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
    use super::super::Pass;
    use super::super::check::{
        Subject, autograd_agrees, bf16_follows, cost_is_exact, device, differences_agree, distance, flat,
        random,
    };
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    fn layer(sizes: Sizes, causal: bool, rotary: bool, dropout: f64) -> Attention {
        let rotary = rotary.then(|| Arc::new(Rotary::new(sizes.length, sizes.head, 10_000.0)));
        Attention { name: "a".into(), sizes, causal, rotary, dropout, padded: false }
    }

    fn proven(batch: usize, sizes: Sizes, causal: bool, rotary: bool, dropout: f64) {
        let layer = || layer(sizes, causal, rotary, dropout);
        let build = |_: &mut crate::params::Declared| Box::new(layer()) as Box<dyn Layer>;
        let input = |batch: usize| random(&[batch, sizes.length, sizes.packed()], 1);
        differences_agree(&build, &input(batch));
        let subject = Subject::new(Default::default(), DType::F64, batch);
        autograd_agrees(&build, &input(batch), &|x, _| {
            layer().kernel(&subject.pass(Mode::Train)).reference(x)
        });
        cost_is_exact(&build, &input);
    }

    fn dropouts() -> impl Strategy<Value = f64> {
        prop_oneof![Just(0.0), 0.05f64..0.9]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(batch in 1usize..4, length in 1usize..20, kv_heads in 1usize..4, group in 1usize..4, half in 1usize..6, causal: bool, rotary: bool, dropout in dropouts()) {
            let sizes = Sizes { length, heads: kv_heads * group, kv_heads, head: 2 * half };
            proven(batch, sizes, causal, rotary, dropout);
        }

        #[test]
        fn samples_of_their_own_lengths_are_as_if_alone(seen in 1usize..100, more in 0usize..80, causal: bool, rotary: bool, dropout in dropouts()) {
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
                let layer = layer(sizes, causal, rotary, dropout);
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
        for (length, causal, dropout) in
            [(64, true, 0.0), (65, true, 0.2), (130, false, 0.2), (200, true, 0.0), (300, false, 0.2)]
        {
            proven(1, Sizes { length, heads: 2, kv_heads: 1, head: 6 }, causal, true, dropout);
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let sizes = Sizes { length: 80, heads: 1, kv_heads: 1, head: 4 };
        let subject = Subject::new(Default::default(), DType::F32, 1);
        let x = (random(&[1, 80, 12], 1) * 200.0).unwrap().to_dtype(DType::F32).unwrap();
        let (y, saved) = layer(sizes, true, false, 0.0).forward(&x, &subject.pass(Mode::Train)).unwrap();
        let dx = layer(sizes, true, false, 0.0).backward(
            saved,
            y.ones_like().unwrap(),
            &subject.pass(Mode::Train),
            true,
        );
        assert!(flat(&y).iter().chain(&flat(&dx.unwrap().unwrap())).all(|v| v.is_finite()));
    }

    #[test]
    fn bf16_follows_f64() {
        for (length, head, causal, rotary, dropout) in [
            (20, 64, true, false, 0.0),
            (70, 64, false, true, 0.0),
            (130, 64, true, true, 0.0),
            (20, 24, false, false, 0.3),
            (70, 64, true, true, 0.3),
            (193, 128, false, true, 0.3),
            (257, 64, true, false, 0.3),
        ] {
            let sizes = Sizes { length, heads: 4, kv_heads: 2, head };
            bf16_follows(
                &|_| Box::new(layer(sizes, causal, rotary, dropout)),
                &random(&[2, length, sizes.packed()], 1),
            );
        }
    }

    /// What each weight of two samples was multiplied with, (2, heads, length, length): the scores are all equal, so
    /// that weights are, and the values are the rows of the identity.
    fn kept(sizes: Sizes, dtype: DType, pass: &Pass, dropout: f64) -> Vec<f64> {
        let Sizes { length, heads, .. } = sizes;
        let samples = pass.ids.len();
        let value = |i: usize| {
            let (position, column) = (i / sizes.packed() % length, i % sizes.packed());
            (column >= 2 * heads * sizes.head && column % sizes.head == position) as u8 as f64
        };
        let x: Vec<f64> = (0..samples * length * sizes.packed()).map(value).collect();
        let x = Tensor::from_vec(x, (samples, length, sizes.packed()), &device()).unwrap();
        let (y, _) = layer(sizes, false, false, dropout).forward(&x.to_dtype(dtype).unwrap(), pass).unwrap();
        let y = y.to_dtype(DType::F64).unwrap().reshape((samples, length, heads, sizes.head)).unwrap();
        let y = y.narrow(3, 0, length).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
        flat(&(y * length as f64).unwrap())
    }

    #[test]
    fn the_weights_dropped_are_those_of_the_mask() {
        for (length, head, dtype) in
            [(64, 64, DType::F64), (51, 51, DType::F32), (51, 64, DType::BF16), (128, 128, DType::BF16)]
        {
            let sizes = Sizes { length, heads: 3, kv_heads: 3, head };
            let subject = Subject::new(Default::default(), dtype, 2);
            let pass = subject.pass(Mode::Train);
            let found = kept(sizes, dtype, &pass, 0.25);
            let mut wanted = vec![0.0; length];
            for (at, found) in found.chunks_exact(length).enumerate() {
                let mask = layer(sizes, false, false, 0.25).mask(&pass);
                mask.row(at / length / 3, at / length % 3, at % length, 0, &mut wanted);
                assert!(distance(found, &wanted) < 0.01, "{sizes:?} {dtype:?}, row {at}");
            }
            let share = found.iter().filter(|v| **v == 0.0).count() as f64 / found.len() as f64;
            assert!((share - 0.25).abs() < 0.02, "{share} dropped of {sizes:?}");
            let mean = found.iter().sum::<f64>() / found.len() as f64;
            assert!((mean - 1.0).abs() < 0.03, "{mean} left of {sizes:?}");
            let heads: Vec<_> = found.chunks_exact(length * length).collect();
            assert!(
                (1..heads.len()).all(|i| heads[0] != heads[i]),
                "heads and samples have masks of their own"
            );
        }
    }

    #[test]
    fn masks_follow_the_sample_and_judging_has_none() {
        // More samples than the arguments of one launch have room for the keys of.
        let (sizes, samples) = (Sizes { length: 16, heads: 2, kv_heads: 2, head: 16 }, 227);
        for dtype in [DType::F32, DType::BF16] {
            let subject = Subject::new(Default::default(), dtype, samples);
            let all = subject.pass(Mode::Train);
            let whole = kept(sizes, dtype, &all, 0.4);
            let last = kept(sizes, dtype, &Pass { ids: &subject.ids[223..], ..all }, 0.4);
            assert_eq!(whole[whole.len() - last.len()..], last, "however a batch is split");
            assert_eq!(whole, kept(sizes, dtype, &Pass { mode: Mode::Again, ..all }, 0.4));
            assert_ne!(whole, kept(sizes, dtype, &Pass { epoch: 9, ..all }, 0.4));
            let x = random(&[samples, 16, sizes.packed()], 1).to_dtype(dtype).unwrap();
            let judged = |dropout: f64| {
                flat(&layer(sizes, true, false, dropout).forward(&x, &subject.pass(Mode::Eval)).unwrap().0)
            };
            assert_eq!(judged(0.4), judged(0.0), "dropout changes no bit of an evaluation");
        }
    }
}
