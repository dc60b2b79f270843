//! AdamW with 8-bit moments: one byte per value and moment, and one f32 scale per block of 256 values and moment.
//!
//! A byte encodes a small float (three mantissa bits) relative to the block's maximum: 127 steps down to 2^-15.8 plus a
//! sign for the first moment, 255 steps down to 2^-31.8 for the second. Rounding is stochastic. Rounding to nearest
//! would never let a moment decay, because one update changes it by less than a step. The random bits are a function of
//! the update's number and the value's index, so updates are reproducible.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Device, Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::update::{
    AdamWKernel, CHUNK, UpdateArgs, apply_weight_decay, sync_compute_weights, weight_decay_reference,
};
use super::{Elem, Real, cpu, reference};
use crate::params::FlatLayout;
use crate::{vectorised, with_elem};

/// Values per scale.
pub const BLOCK: usize = 256;

/// Number of f32 mantissa bits that the code drops.
const DROPPED_BITS: u32 = 20;
/// The bits of 1.0 without the dropped ones.
const ONE_CODE: u32 = 0x3f80_0000 >> DROPPED_BITS;

/// The moments: codes, (values) each, and scales, (blocks) each.
pub struct AdamW8bitState {
    pub m: Tensor,
    pub v: Tensor,
    pub m_scale: Tensor,
    pub v_scale: Tensor,
}

/// Number of blocks of a buffer of `len` values.
pub fn blocks(len: usize) -> usize {
    len.div_ceil(BLOCK)
}

pub fn state_bytes(params: &FlatLayout) -> u64 {
    2 * (params.trained_len + 4 * blocks(params.trained_len)) as u64
}

impl AdamW8bitState {
    /// Zero moments.
    pub fn new(params: &FlatLayout, device: &Device) -> Result<Self> {
        let bytes = || Tensor::zeros(params.trained_len, DType::U8, device);
        let scales = || Tensor::zeros(blocks(params.trained_len), DType::F32, device);
        Ok(Self { m: bytes()?, v: bytes()?, m_scale: scales()?, v_scale: scales()? })
    }
}

/// The code of `x` in [0, 1], stochastically rounded: up if the dropped bits plus as many random bits carry over.
/// Values more than `steps` steps below 1 encode to 0.
#[inline(always)]
fn encode(x: f32, random: u32, steps: u32) -> u32 {
    let kept = (x.to_bits() + (random >> (32 - DROPPED_BITS))) >> DROPPED_BITS;
    kept.saturating_sub(ONE_CODE - steps)
}

#[inline(always)]
fn decode(code: u32, steps: u32) -> f32 {
    let value = f32::from_bits((code + (ONE_CODE - steps)) << DROPPED_BITS);
    if code == 0 { 0.0 } else { value }
}

const SIGNED_STEPS: u32 = 127;
const UNSIGNED_STEPS: u32 = 255;

#[inline(always)]
fn decode_signed(code: u8) -> f32 {
    let size = decode((code & 127) as u32, SIGNED_STEPS);
    if code > 127 { -size } else { size }
}

#[inline(always)]
fn encode_signed(x: f32, random: u32) -> u8 {
    encode(x.abs(), random, SIGNED_STEPS) as u8 | if x < 0.0 { 128 } else { 0 }
}

/// Random bits for value `i` (below 256) of the block with bits `key`.
#[inline(always)]
fn rounding_bits(key: u32, i: u32) -> u32 {
    let x = (key ^ i.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    let x = (x ^ (x >> 15)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

fn block_key(step: u64, block: u64) -> u32 {
    let x = (step << 40 ^ block).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x >> 32) as u32
}

/// A decoded block of both moments.
struct MomentBlock {
    m: [f32; BLOCK],
    v: [f32; BLOCK],
}

impl AdamWKernel {
    /// Like [`AdamWKernel::apply`], with 8-bit moments.
    pub fn apply_8bit(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        state: &AdamW8bitState,
        compute_weights: Option<&Tensor>,
    ) -> Result<()> {
        on_cuda!(weights, |device| self.apply_8bit_cuda(device, c, (weights, grads), state, compute_weights));
        match reference::has_cpu_kernel(weights) {
            false => self.reference_8bit(c, weights, grads, state)?,
            true => with_elem!(weights.dtype(), T => self.apply_8bit_cpu::<T>(c, weights, grads, state)?),
        }
        sync_compute_weights(weights, compute_weights)
    }

    fn apply_8bit_cpu<T: Elem>(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        s: &AdamW8bitState,
    ) -> Result<()> {
        const BLOCKS: usize = CHUNK / BLOCK;
        cpu::with_slice_mut::<T, _>(weights, |w| {
            cpu::with_slice_mut::<T, _>(grads, |g| {
                cpu::with_slice_mut::<u8, _>(&s.m, |m| {
                    cpu::with_slice_mut::<u8, _>(&s.v, |v| {
                        cpu::with_slice_mut::<f32, _>(&s.m_scale, |ms| {
                            cpu::with_slice_mut::<f32, _>(&s.v_scale, |vs| {
                                let values = w.par_chunks_mut(CHUNK).zip(g.par_chunks_mut(CHUNK));
                                let codes = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
                                let scales = ms.par_chunks_mut(BLOCKS).zip(vs.par_chunks_mut(BLOCKS));
                                values.zip(codes).zip(scales).enumerate().for_each(
                                    |(i, (((w, g), (m, v)), (ms, vs)))| {
                                        apply_weight_decay(w, i * CHUNK, c);
                                        let blocks = w.chunks_mut(BLOCK).zip(g.chunks_mut(BLOCK));
                                        let codes = m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK));
                                        let scales = ms.iter_mut().zip(vs);
                                        for (j, (((w, g), codes), scales)) in
                                            blocks.zip(codes).zip(scales).enumerate()
                                        {
                                            let key = block_key(self.step, (i * BLOCKS + j) as u64);
                                            vectorised!(T, || self.update_block(c, w, g, codes, scales, key));
                                        }
                                    },
                                )
                            })
                        })
                    })
                })
            })
        })??????;
        Ok(())
    }

    #[inline(always)]
    fn update_block<T: Elem>(
        &self,
        c: &UpdateArgs,
        w: &mut [T],
        g: &mut [T],
        (m, v): (&mut [u8], &mut [u8]),
        (m_scale, v_scale): (&mut f32, &mut f32),
        key: u32,
    ) {
        let (step, root) = self.bias_corrections(c.lr);
        let (b1, b2, eps) = (self.beta1 as f32, self.beta2 as f32, self.eps as f32);
        let (a1, a2) = ((1.0 - self.beta1) as f32, (1.0 - self.beta2) as f32);
        let (step, inv_root, gs) = (step as f32, (1.0 / root) as f32, c.grad_scale as f32);
        let mut moments = MomentBlock { m: [0.0; BLOCK], v: [0.0; BLOCK] };
        let (mut m_absmax, mut v_max) = (0f32, 0f32);
        for (((w, g), (m, v)), (first, second)) in w
            .iter_mut()
            .zip(g.iter_mut())
            .zip(m.iter().zip(&*v))
            .zip(moments.m.iter_mut().zip(&mut moments.v))
        {
            let d = g.to_acc().as_f64() as f32 * gs;
            *first = b1 * decode_signed(*m) * *m_scale + a1 * d;
            *second = b2 * decode(*v as u32, UNSIGNED_STEPS) * *v_scale + a2 * d * d;
            m_absmax = m_absmax.max(first.abs());
            v_max = v_max.max(*second);
            let delta = step * *first / (second.sqrt() * inv_root + eps);
            *w = T::from_acc(w.to_acc() - T::Acc::of_f64(delta as f64));
            *g = T::default();
        }
        let inverse = |most: f32| if most > 0.0 { 1.0 / most } else { 0.0 };
        let (m_inv, v_inv) = (inverse(m_absmax), inverse(v_max));
        for (i, ((m, v), (first, second))) in
            m.iter_mut().zip(v).zip(moments.m.iter().zip(&moments.v)).enumerate()
        {
            let random = rounding_bits(key, i as u32);
            *m = encode_signed(first * m_inv, random);
            // A second moment of zero with a nonzero first moment would cause a huge step.
            let least = (*second > 0.0) as u32;
            *v = encode(second * v_inv, random.rotate_left(16), UNSIGNED_STEPS).clamp(least, UNSIGNED_STEPS)
                as u8;
        }
        (*m_scale, *v_scale) = (m_absmax, v_max);
    }

    /// The same arithmetic in candle ops where precision matters; encodes and decodes on the host.
    fn reference_8bit(
        &self,
        c: &UpdateArgs,
        weights: &Tensor,
        grads: &Tensor,
        s: &AdamW8bitState,
    ) -> Result<()> {
        let n = weights.elem_count();
        let decoded = |codes: &Tensor, scales: &Tensor, of: fn(u8) -> f32| -> Result<Tensor> {
            let (codes, scales) = (codes.to_vec1::<u8>()?, scales.to_vec1::<f32>()?);
            let values = codes.iter().enumerate().map(|(i, code)| of(*code) * scales[i / BLOCK]);
            Tensor::from_vec(values.collect::<Vec<f32>>(), n, weights.device())?.to_dtype(weights.dtype())
        };
        let (m, v) = (
            decoded(&s.m, &s.m_scale, decode_signed)?,
            decoded(&s.v, &s.v_scale, |code| decode(code as u32, UNSIGNED_STEPS))?,
        );
        let (step, root) = self.bias_corrections(c.lr);
        let g = (grads * c.grad_scale)?;
        let first = ((m * self.beta1)? + (&g * (1.0 - self.beta1))?)?;
        let second = ((v * self.beta2)? + (g.sqr()? * (1.0 - self.beta2))?)?;
        let direction = (&first / ((second.sqrt()? / root)? + self.eps)?)?;
        weights.slice_set(&(weight_decay_reference(weights, c)? - (direction * step)?)?, 0, 0)?;
        grads.slice_set(&grads.zeros_like()?, 0, 0)?;

        let plain = |t: &Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
        let (first, second) = (plain(&first)?, plain(&second)?);
        let block_absmax = |values: &[f32]| -> Vec<f32> {
            values.chunks(BLOCK).map(|b| b.iter().fold(0f32, |most, v| most.max(v.abs()))).collect()
        };
        let (m_absmax, v_max) = (block_absmax(&first), block_absmax(&second));
        let normalized = |x: f32, most: f32| if most > 0.0 { x * (1.0 / most) } else { 0.0 };
        let code = |i: usize| {
            let random = rounding_bits(block_key(self.step, (i / BLOCK) as u64), (i % BLOCK) as u32);
            let m = encode_signed(normalized(first[i], m_absmax[i / BLOCK]), random);
            let v = encode(normalized(second[i], v_max[i / BLOCK]), random.rotate_left(16), UNSIGNED_STEPS);
            (m, v.clamp((second[i] > 0.0) as u32, UNSIGNED_STEPS) as u8)
        };
        let (m, v): (Vec<u8>, Vec<u8>) = (0..n).map(code).unzip();
        let device = weights.device();
        s.m.slice_set(&Tensor::from_vec(m, n, device)?, 0, 0)?;
        s.v.slice_set(&Tensor::from_vec(v, n, device)?, 0, 0)?;
        s.m_scale.slice_set(&Tensor::from_vec(m_absmax, blocks(n), device)?, 0, 0)?;
        s.v_scale.slice_set(&Tensor::from_vec(v_max, blocks(n), device)?, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::update::cast_into;
    use super::*;
    use crate::layers::gradcheck::{random_tensor, relative_error, test_device, to_f64_vec};
    use crate::params::{ParamInit, ParamRegistry};

    fn params(len: usize) -> FlatLayout {
        let mut declared = ParamRegistry::default();
        declared.param("w", [len, 1], ParamInit::Constant(0.0));
        declared.into_layout().unwrap().params
    }

    #[test]
    fn every_code_is_its_own_and_the_largest_value_is_exact() {
        for code in 0..=255u32 {
            assert_eq!(encode(decode(code, UNSIGNED_STEPS), 0, UNSIGNED_STEPS), code);
            assert_eq!(
                encode(decode(code, UNSIGNED_STEPS), u32::MAX, UNSIGNED_STEPS),
                code,
                "random bits move no code"
            );
            if code != 128 {
                assert_eq!(encode_signed(decode_signed(code as u8), 77), code as u8);
            }
        }
        assert_eq!(
            (decode(UNSIGNED_STEPS, UNSIGNED_STEPS), decode_signed(127), decode_signed(255)),
            (1.0, 1.0, -1.0)
        );
    }

    #[test]
    fn rounding_is_right_on_average_and_off_by_an_eighth_at_most() {
        for x in [0.9f32, 0.33, 1.3e-3, 7.7e-5] {
            let draws: Vec<f64> = (0..4096)
                .map(|i| decode_signed(encode_signed(x, rounding_bits(block_key(1, i), i as u32))) as f64)
                .collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            assert!((mean / x as f64 - 1.0).abs() < 5e-3, "{x}: {mean}");
            assert!(draws.iter().all(|v| (v / x as f64 - 1.0).abs() <= 0.125), "{x}");
        }
    }

    #[test]
    fn state_bytes_match_the_tensors() {
        for len in [1, 256, 257, 100_000] {
            let params = params(len);
            let state = AdamW8bitState::new(&params, &test_device()).unwrap();
            let bytes = |t: &Tensor| (t.elem_count() * t.dtype().size_in_bytes()) as u64;
            let held: u64 = [&state.m, &state.v, &state.m_scale, &state.v_scale].map(bytes).iter().sum();
            assert_eq!(held, state_bytes(&params), "{len}");
        }
    }

    /// Gradients of a quadratic bowl, `w - aim` plus noise: the weights follow those of AdamW in f64.
    #[test]
    fn it_follows_adamw() {
        let n = CHUNK + 300;
        let (params, aim) = (params(n), to_f64_vec(&random_tensor(&[n], 9)));
        let c = UpdateArgs {
            lr: 0.02,
            grad_scale: 0.5,
            device_grad_scale: None,
            weight_decay: 0.1,
            decayed_len: n / 2,
        };
        let zeros = |dtype| Tensor::zeros(n, dtype, &test_device()).unwrap();
        let (w, g) = (zeros(DType::F32), zeros(DType::F32));
        let (exact, eg, em, ev) =
            (zeros(DType::F64), zeros(DType::F64), zeros(DType::F64), zeros(DType::F64));
        let (by_reference, rg) = (zeros(DType::F32), zeros(DType::F32));
        let (state, copy) = (
            AdamW8bitState::new(&params, &test_device()).unwrap(),
            AdamW8bitState::new(&params, &test_device()).unwrap(),
        );
        for step in 1..=150u64 {
            let noise = to_f64_vec(&random_tensor(&[n], 1000 + step));
            let pull = |at: &Tensor, into: &Tensor| {
                let d: Vec<f64> = to_f64_vec(at)
                    .iter()
                    .zip(&aim)
                    .zip(&noise)
                    .map(|((w, a), n)| 2.0 * (w - a) + 0.2 * n)
                    .collect();
                cast_into(&Tensor::new(d, &test_device()).unwrap(), into).unwrap();
            };
            let rule = AdamWKernel { beta1: 0.9, beta2: 0.99, eps: 1e-8, step };
            pull(&w, &g);
            rule.apply_8bit(&c, &w, &g, &state, None).unwrap();
            pull(&exact, &eg);
            rule.apply(&c, &exact, &eg, (&em, &ev), None).unwrap();
            if step <= 3 {
                pull(&by_reference, &rg);
                rule.reference_8bit(&c, &by_reference, &rg, &copy).unwrap();
                assert!(
                    relative_error(&to_f64_vec(&w), &to_f64_vec(&by_reference)) < 1e-4,
                    "the reference, step {step}"
                );
            }
        }
        let off = |w: &Tensor| {
            let squares = to_f64_vec(w).iter().zip(&aim).map(|(w, a)| (w - a).powi(2)).sum::<f64>();
            (squares / n as f64).sqrt()
        };
        let apart: f64 =
            to_f64_vec(&w).iter().zip(to_f64_vec(&exact)).map(|(a, b)| (a - b).powi(2)).sum::<f64>()
                / n as f64;
        assert!(apart.sqrt() < 0.02, "{} from AdamW in f64", apart.sqrt());
        assert!(off(&w) < 1.05 * off(&exact), "{} and {} from the aim", off(&w), off(&exact));
        assert!(to_f64_vec(&g).iter().all(|g| *g == 0.0), "gradients are cleared");
    }
}
