//! Multi-head attention over the positions of a sample: takes packed queries, keys and values, gives the outputs of the
//! heads. The projections before and after it are separate linear layers.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Cost, Layer, Mode, PassContext, SavedTensors};
use crate::base::random::stream_id;
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::attention::{AttentionDims, AttentionKernel as Kernel, DropoutMask};
use crate::kernels::cpu::acc_bytes;
use crate::kernels::rotary::Rotary;

pub struct Attention {
    pub name: String,
    pub sizes: AttentionDims,
    pub causal: bool,
    /// Rotary tables, shared by all layers of the model.
    pub rotary: Option<Arc<Rotary>>,
    /// Probability of dropping an attention weight during training.
    pub dropout: f64,
    /// Samples carry their lengths; positions beyond the length are masked.
    pub padded: bool,
}

impl Attention {
    fn kernel<'a>(&'a self, pass: &'a PassContext) -> Kernel<'a> {
        Kernel {
            dims: self.sizes,
            causal: self.causal,
            rotary: self.rotary.as_deref(),
            lengths: pass.lengths,
            sample_info: pass.sample_info,
            dropout: (self.dropout > 0.0 && pass.mode != Mode::Eval).then(|| self.dropout_mask(pass)),
        }
    }

    fn dropout_mask<'a>(&self, pass: &PassContext<'a>) -> DropoutMask<'a> {
        DropoutMask::new(self.dropout, pass.sample_keys(stream_id(&self.name)))
    }
}

impl Layer for Attention {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.sizes.length, self.sizes.width()]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let (y, logsumexp) = self.kernel(pass).forward(x)?;
        Ok((y.clone(), SavedTensors(vec![x.clone(), y, logsumexp])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let [x, y, logsumexp] = &saved.0[..] else { candle_core::bail!("attention saved three tensors") };
        needs_input_grad.then(|| self.kernel(pass).backward(x, y, logsumexp, &dy)).transpose()
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let s = &self.sizes;
        let (forward, backward) = match spec.backend {
            Backend::Cpu { threads } => s.workspace(spec.dtype, spec.batch, threads),
            Backend::Reference { .. } => s.reference_workspace(spec.dtype, spec.batch),
            Backend::Cuda { .. } => s.cuda_workspace(
                spec.dtype,
                spec.batch,
                self.rotary.is_some(),
                self.dropout > 0.0,
                self.padded,
            ),
        };
        let matmul_flops = 4 * spec.batch * s.width() * s.length * s.length;
        Cost {
            input_grad: spec.bytes(s.length * s.qkv_width()),
            output: spec.bytes(s.length * s.width()),
            saves_input: true,
            saves_output: true,
            saved: (spec.batch * s.heads * s.length * acc_bytes(spec.dtype)) as u64,
            forward_workspace: forward,
            backward_workspace: backward,
            flops: if self.causal { matmul_flops / 2 } else { matmul_flops } as u64,
            ..Cost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PassContext;
    use super::super::gradcheck::{
        TestContext, check_against_autograd, check_bf16, check_cost, check_finite_differences, random_tensor,
        relative_error, test_device, to_f64_vec,
    };
    use super::*;
    use candle_core::DType;
    use proptest::prelude::*;

    fn layer(sizes: AttentionDims, causal: bool, rotary: bool, dropout: f64) -> Attention {
        let rotary = rotary.then(|| Arc::new(Rotary::new(sizes.length, sizes.head_dim, 10_000.0)));
        Attention { name: "a".into(), sizes, causal, rotary, dropout, padded: false }
    }

    fn check_layer(batch: usize, sizes: AttentionDims, causal: bool, rotary: bool, dropout: f64) {
        let layer = || layer(sizes, causal, rotary, dropout);
        let build = |_: &mut crate::params::ParamRegistry| Box::new(layer()) as Box<dyn Layer>;
        let input = |batch: usize| random_tensor(&[batch, sizes.length, sizes.qkv_width()], 1);
        check_finite_differences(&build, &input(batch));
        let subject = TestContext::new(Default::default(), DType::F64, batch);
        check_against_autograd(&build, &input(batch), &|x, _| {
            layer().kernel(&subject.pass(Mode::Train)).reference(x)
        });
        check_cost(&build, &input);
    }

    fn dropouts() -> impl Strategy<Value = f64> {
        prop_oneof![Just(0.0), 0.05f64..0.9]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn gradients_are_right(
            batch in 1usize..4,
            length in 1usize..20,
            kv_heads in 1usize..4,
            group in 1usize..4,
            half in 1usize..6,
            causal: bool,
            rotary: bool,
            dropout in dropouts(),
        ) {
            let sizes = AttentionDims { length, heads: kv_heads * group, kv_heads, head_dim: 2 * half };
            check_layer(batch, sizes, causal, rotary, dropout);
        }

        #[test]
        fn samples_of_their_own_lengths_are_as_if_alone(
            seen in 1usize..100,
            more in 0usize..80,
            causal: bool,
            rotary: bool,
            dropout in dropouts(),
        ) {
            let long = AttentionDims { length: seen + more, heads: 2, kv_heads: 1, head_dim: 4 };
            let short = AttentionDims { length: seen, ..long };
            let subject = TestContext::new(Default::default(), DType::F64, 2);
            let lengths = [seen as u32, (seen + more) as u32];
            let pass = subject.pass(Mode::Train);
            let padded = PassContext { lengths: Some(&lengths), ..pass };
            let first = |t: &Tensor| t.narrow(0, 0, 1).unwrap().narrow(1, 0, seen).unwrap().copy().unwrap();
            let x = random_tensor(&[2, long.length, long.qkv_width()], 1);
            let dy = random_tensor(&[2, long.length, long.width()], 2).pad_with_zeros(1, 0, 0).unwrap();
            let dy = Tensor::cat(
                &[&first(&dy).pad_with_zeros(1, 0, more).unwrap(), &dy.narrow(0, 1, 1).unwrap()],
                0,
            )
            .unwrap();
            let run = |sizes: AttentionDims, x: &Tensor, dy: &Tensor, pass: &PassContext| {
                let layer = layer(sizes, causal, rotary, dropout);
                let (y, saved) = layer.forward(x, pass).unwrap();
                (y, layer.backward(saved, dy.clone(), pass, true).unwrap().unwrap())
            };
            let (y, dx) = run(long, &x, &dy, &padded);
            let (y_alone, dx_alone) = run(short, &first(&x), &first(&dy), &pass);
            prop_assert!(relative_error(&to_f64_vec(&first(&y)), &to_f64_vec(&y_alone)) < 1e-12);
            prop_assert!(relative_error(&to_f64_vec(&first(&dx)), &to_f64_vec(&dx_alone)) < 1e-12);
            let beyond = to_f64_vec(&dx.narrow(0, 0, 1).unwrap().narrow(1, seen, more).unwrap());
            prop_assert!(beyond.iter().all(|v| *v == 0.0), "padded positions have no gradient");
            let (_, whole) = run(long, &x, &dy, &pass);
            prop_assert_eq!(to_f64_vec(&whole.narrow(0, 1, 1).unwrap()), to_f64_vec(&dx.narrow(0, 1, 1).unwrap()));
        }
    }

    #[test]
    fn tiles_are_joined_where_they_meet() {
        for (length, causal, dropout) in
            [(64, true, 0.0), (65, true, 0.2), (130, false, 0.2), (200, true, 0.0), (300, false, 0.2)]
        {
            check_layer(
                1,
                AttentionDims { length, heads: 2, kv_heads: 1, head_dim: 6 },
                causal,
                true,
                dropout,
            );
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let sizes = AttentionDims { length: 80, heads: 1, kv_heads: 1, head_dim: 4 };
        let subject = TestContext::new(Default::default(), DType::F32, 1);
        let x = (random_tensor(&[1, 80, 12], 1) * 200.0).unwrap().to_dtype(DType::F32).unwrap();
        let (y, saved) = layer(sizes, true, false, 0.0).forward(&x, &subject.pass(Mode::Train)).unwrap();
        let dx = layer(sizes, true, false, 0.0).backward(
            saved,
            y.ones_like().unwrap(),
            &subject.pass(Mode::Train),
            true,
        );
        assert!(to_f64_vec(&y).iter().chain(&to_f64_vec(&dx.unwrap().unwrap())).all(|v| v.is_finite()));
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
            let sizes = AttentionDims { length, heads: 4, kv_heads: 2, head_dim: head };
            check_bf16(
                &|_| Box::new(layer(sizes, causal, rotary, dropout)),
                &random_tensor(&[2, length, sizes.qkv_width()], 1),
            );
        }
    }

    /// The dropout factor of each attention weight, (samples, heads, length, length). All logits are equal, so all
    /// weights are too, and the values are rows of the identity, so the output shows the weights.
    fn dropout_factors(sizes: AttentionDims, dtype: DType, pass: &PassContext, dropout: f64) -> Vec<f64> {
        let AttentionDims { length, heads, .. } = sizes;
        let samples = pass.sample_ids.len();
        let value = |i: usize| {
            let (position, column) = (i / sizes.qkv_width() % length, i % sizes.qkv_width());
            (column >= 2 * heads * sizes.head_dim && column % sizes.head_dim == position) as u8 as f64
        };
        let x: Vec<f64> = (0..samples * length * sizes.qkv_width()).map(value).collect();
        let x = Tensor::from_vec(x, (samples, length, sizes.qkv_width()), &test_device()).unwrap();
        let (y, _) = layer(sizes, false, false, dropout).forward(&x.to_dtype(dtype).unwrap(), pass).unwrap();
        let y = y.to_dtype(DType::F64).unwrap().reshape((samples, length, heads, sizes.head_dim)).unwrap();
        let y = y.narrow(3, 0, length).unwrap().transpose(1, 2).unwrap().contiguous().unwrap();
        to_f64_vec(&(y * length as f64).unwrap())
    }

    #[test]
    fn the_weights_dropped_are_those_of_the_mask() {
        for (length, head, dtype) in
            [(64, 64, DType::F64), (51, 51, DType::F32), (51, 64, DType::BF16), (128, 128, DType::BF16)]
        {
            let sizes = AttentionDims { length, heads: 3, kv_heads: 3, head_dim: head };
            let subject = TestContext::new(Default::default(), dtype, 2);
            let pass = subject.pass(Mode::Train);
            let found = dropout_factors(sizes, dtype, &pass, 0.25);
            let mut wanted = vec![0.0; length];
            for (row, found) in found.chunks_exact(length).enumerate() {
                let mask = layer(sizes, false, false, 0.25).dropout_mask(&pass);
                mask.fill_row(row / length / 3, row / length % 3, row % length, 0, &mut wanted);
                assert!(relative_error(found, &wanted) < 0.01, "{sizes:?} {dtype:?}, row {row}");
            }
            let dropped = found.iter().filter(|v| **v == 0.0).count() as f64 / found.len() as f64;
            assert!((dropped - 0.25).abs() < 0.02, "{dropped} dropped of {sizes:?}");
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
    fn dropout_masks_follow_the_sample_and_eval_has_none() {
        // More samples than one kernel launch can take keys for in its arguments.
        let (sizes, samples) = (AttentionDims { length: 16, heads: 2, kv_heads: 2, head_dim: 16 }, 227);
        for dtype in [DType::F32, DType::BF16] {
            let subject = TestContext::new(Default::default(), dtype, samples);
            let all = subject.pass(Mode::Train);
            let whole = dropout_factors(sizes, dtype, &all, 0.4);
            let last = dropout_factors(
                sizes,
                dtype,
                &PassContext { sample_ids: &subject.sample_ids[223..], ..all },
                0.4,
            );
            assert_eq!(whole[whole.len() - last.len()..], last, "however a batch is split");
            assert_eq!(
                whole,
                dropout_factors(sizes, dtype, &PassContext { mode: Mode::Recompute, ..all }, 0.4)
            );
            assert_ne!(whole, dropout_factors(sizes, dtype, &PassContext { epoch: 9, ..all }, 0.4));
            let x = random_tensor(&[samples, 16, sizes.qkv_width()], 1).to_dtype(dtype).unwrap();
            let eval_output = |dropout: f64| {
                to_f64_vec(
                    &layer(sizes, true, false, dropout).forward(&x, &subject.pass(Mode::Eval)).unwrap().0,
                )
            };
            assert_eq!(eval_output(0.4), eval_output(0.0), "dropout changes no bit of an evaluation");
        }
    }
}
