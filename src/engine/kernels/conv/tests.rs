//! CPU kernels against candle's autograd on the f64 reference: every type, thread count and shape, including batches
//! that the threads do not divide and images split into several blocks.

use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;

use super::*;
use crate::base::random::RngKey;

/// One convolution and the number of threads to run it with.
#[derive(Clone, Copy, Debug)]
struct ConvCase {
    g: ConvGeometry,
    batch: usize,
    threads: usize,
    dtype: DType,
    bias: bool,
    act: Activation,
}

/// Tolerance against f64, relative to the largest value: the bounds of `layers::gradcheck` for f32 and bf16; f16 has
/// three mantissa bits more than bf16.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 2e-5,
        DType::F16 => 2e-2 / 8.0,
        _ => 2e-2,
    }
}

/// Values in [-1, 1), rounded to `dtype`.
fn random(shape: &[usize], dtype: DType, stream: u64) -> Tensor {
    let r = RngKey::new(5, stream);
    let values = (0..shape.iter().product::<usize>()).map(|i| 2.0 * r.f64(i as u64) as f32 - 1.0);
    let values = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap();
    values.to_dtype(dtype).unwrap()
}

fn flat(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// `terms`: products summed per value. Where products cancel, their rounding errors do not. So the scale is at least
/// the standard deviation of such a sum; one product of two values uniform in [-1, 1) has 1/3.
fn assert_near(what: &str, case: &ConvCase, terms: usize, actual: &Tensor, expected: &Tensor) {
    let (actual, expected) = (flat(actual), flat(expected));
    let scale = expected.iter().fold((terms as f64).sqrt() / 3.0, |m, v| m.max(v.abs()));
    for (i, (a, b)) in actual.iter().zip(&expected).enumerate() {
        // Written so that NaN fails.
        assert!((a - b).abs() <= bound(case.dtype) * scale, "{what} {i} is {a}, not {b}: {case:?}");
    }
}

fn check(case: &ConvCase) {
    let ConvCase { g, batch, threads, dtype, act, .. } = *case;
    let x = random(&[batch, g.height, g.width, g.in_channels], dtype, 1);
    let weight = random(&[g.out_channels, g.kernel, g.kernel, g.in_channels / g.groups], dtype, 2);
    let bias = case.bias.then(|| random(&[g.out_channels], dtype, 3));
    let conv = ConvKernel { geometry: g, weight: &weight, bias: bias.as_ref(), act };

    // Gradients accumulate, so start from nonzero values.
    let sums = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let (dw, db) = (random(weight.dims(), sums, 4), random(&[g.out_channels], sums, 5));
    let initial = (dw.copy().unwrap(), db.copy().unwrap());
    let grads = WeightBiasGrads { weight: Some(&dw), bias: bias.is_some().then_some(&db) };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let (y, dy, dx) = pool.install(|| {
        let (y, pre) = conv.forward(&x).unwrap();
        let dy = random(y.dims(), dtype, 6);
        let v = if act.saved_for_backward() == SavedForBackward::Input { pre.as_ref() } else { Some(&y) };
        let v = v.filter(|_| act != Activation::Identity);
        let dx = conv.backward(Some(&x), v, dy.copy().unwrap(), &grads, true).unwrap().unwrap();
        (y, dy, dx)
    });

    let leaf = |t: &Tensor| Var::from_tensor(&t.to_dtype(DType::F64).unwrap()).unwrap();
    let (x, weight, bias) = (leaf(&x), leaf(&weight), bias.as_ref().map(leaf));
    let oracle = ConvKernel { geometry: g, weight: &weight, bias: bias.as_ref().map(|b| b.as_tensor()), act };
    let expected = oracle.reference(&x).unwrap();
    let autograd_grads = (&expected * leaf(&dy).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    let on = |before: &Tensor, var: &Var| {
        (before.to_dtype(DType::F64).unwrap() + autograd_grads.get(var).unwrap()).unwrap()
    };
    let window = g.kernel * g.kernel;
    let pixels = y.elem_count() / g.out_channels;
    assert_near("output", case, window * g.in_channels / g.groups, &y, &expected);
    assert_near(
        "input gradient",
        case,
        window * g.out_channels / g.groups,
        &dx,
        autograd_grads.get(&x).unwrap(),
    );
    assert_near("weight gradient", case, pixels, &dw, &on(&initial.0, &weight));
    if let Some(bias) = &bias {
        assert_near("bias gradient", case, pixels, &db, &on(&initial.1, bias));
    }
}

fn types() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::F32, DType::F64, DType::BF16, DType::F16])
}

/// Arbitrary sizes: odd channels, groups, strides with a remainder, images of a single patch and of several blocks.
fn small() -> impl Strategy<Value = ConvCase> {
    let sizes = (1usize..10, 1usize..10, 1usize..6, 1usize..4, 0usize..3, 1usize..3);
    let rest = (1usize..4, 0usize..24, 0usize..24, 1usize..8, 1usize..5, types(), any::<bool>());
    // No clamp, whose derivative at 0 depends on rounding, and no GELU, whose derivative in candle has seven digits.
    let acts = prop::sample::select(vec![Activation::Identity, Activation::Silu]);
    (sizes, rest, acts).prop_map(|(sizes, rest, act)| {
        let (inputs, outputs, kernel, stride, padding, dilation) = sizes;
        let (groups, dh, dw, batch, threads, dtype, bias) = rest;
        let kernel_extent = dilation * (kernel - 1) + 1;
        let (height, width) = (kernel_extent + dh, kernel_extent + dw);
        let (inputs, outputs) = (inputs * groups, outputs * groups);
        let g = ConvGeometry {
            height,
            width,
            in_channels: inputs,
            out_channels: outputs,
            kernel,
            stride,
            padding,
            dilation,
            groups,
        };
        ConvCase { g, batch, threads, dtype, bias, act }
    })
}

/// Channel counts that tiles and vectors divide, and neighbors that they do not.
fn wide() -> impl Strategy<Value = ConvCase> {
    let channels = prop::sample::select(vec![16usize, 24, 31, 32, 33, 48, 64]);
    (small(), channels.clone(), channels, 4usize..9).prop_map(|(trial, inputs, outputs, side)| {
        let kernel = trial.g.kernel.min(3);
        let g = ConvGeometry {
            height: 2 * side,
            width: side + 4,
            in_channels: inputs,
            out_channels: outputs,
            kernel,
            groups: 1,
            ..trial.g
        };
        ConvCase { g, ..trial }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_convolution_is_right(trial in small()) {
        check(&trial);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn wide_convolutions_are_right(trial in wide()) {
        check(&trial);
    }
}

/// Five images for two threads, several blocks per image: ranges of equal length would end past the batch.
#[test]
fn a_batch_that_the_threads_do_not_divide() {
    let g = ConvGeometry {
        height: 32,
        width: 32,
        in_channels: 24,
        out_channels: 48,
        kernel: 5,
        stride: 1,
        padding: 2,
        dilation: 1,
        groups: 1,
    };
    for (batch, threads, dtype) in [(5, 2, DType::F32), (5, 3, DType::BF16), (10, 4, DType::F16)] {
        check(&ConvCase { g, batch, threads, dtype, bias: true, act: Activation::Identity });
    }
}
