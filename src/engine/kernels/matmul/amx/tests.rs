//! AMX kernels against f64 sums, in every type that AMX supports.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::base::random::RngKey;
use crate::kernels::clamp::ClampActivation;

fn values<E: AmxElem>(count: usize, stream: u64) -> Vec<E> {
    (0..count).map(|i| E::from_acc(RngKey::new(7, stream).normal(i as u64) as f32)).collect()
}

fn mat_view<E>(data: &[E], rows: usize, cols: usize, transposed: bool) -> MatView<'_, E> {
    if transposed { MatView::new(data, cols, rows).t() } else { MatView::new(data, rows, cols) }
}

fn at<E: AmxElem>(m: &MatView<E>, i: usize, j: usize) -> f64 {
    m.data[i * m.row_stride + j * m.col_stride].to_acc() as f64
}

/// True, with a message, under any other dispatch.
fn skipped() -> bool {
    if dispatch() != Dispatch::Amx {
        println!("skipped: the dispatch is {:?}", dispatch());
    }
    dispatch() != Dispatch::Amx
}

/// Tolerance of an f32 sum of products, relative to the sum of their magnitudes, and of the result's rounding to `O`,
/// relative to the result.
fn tolerances<E: AmxElem, O: AmxElem>() -> (f64, f64) {
    let dropped = if E::PARTS == 2 { 2f64.powi(-16) } else { 0.0 };
    let digits = match O::PARTS {
        1 => 8,
        2 => 11,
        _ => 30,
    };
    (1e-6 + dropped, 2f64.powi(-digits))
}

fn gemm_f32<E: AmxElem>(x: MatView<E>, y: MatView<E>) -> Vec<f32> {
    let mut out = vec![0.0; x.rows * y.cols];
    // SAFETY: the dispatch is AMX, and `out` has room for the result.
    unsafe { gemm(&mut out, y.cols, x, y, false, None) };
    out
}

#[derive(Clone, Copy, Debug)]
struct GemmCase {
    m: usize,
    k: usize,
    n: usize,
    transpose_a: bool,
    transpose_b: bool,
    add: bool,
    with_epilogue: bool,
    gap: usize,
}

fn check_gemm<E: AmxElem, O: AmxElem>(case: GemmCase) {
    let GemmCase { m, k, n, transpose_a, transpose_b, with_epilogue, gap, .. } = case;
    let add = case.add && !is_half_precision::<O>();
    let (a, b, stride) = (values::<E>(m * k, 1), values::<E>(k * n, 2), n + gap);
    let initial = values::<O>(m * stride, 3);
    let mut out = initial.clone();
    let (x, y) = (mat_view(&a, m, k, transpose_a), mat_view(&b, k, n, transpose_b));
    let (bias, residual) = (values::<O>(n, 4), values::<O>(m * stride, 5));
    let epilogue =
        CpuEpilogue { bias: Some(&bias), clamp: ClampActivation::Relu6, residual: Some(&residual) };
    // SAFETY: the dispatch is AMX and `out` has `m` rows of `stride`.
    unsafe { gemm(&mut out, stride, x, y, add, with_epilogue.then_some(epilogue)) };
    let (of_sums, of_result) = tolerances::<E, O>();
    for (i, j) in (0..m).flat_map(|i| (0..stride).map(move |j| (i, j))) {
        let (was, is) = (initial[i * stride + j].to_acc() as f64, out[i * stride + j].to_acc() as f64);
        if j >= n {
            assert_eq!(was, is, "padding between rows was written");
            continue;
        }
        let terms = (0..k).map(|p| at(&x, i, p) * at(&y, p, j));
        let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
        let sum = sum + if add { was } else { 0.0 };
        let expected = match with_epilogue {
            true => {
                (sum + bias[j].to_acc() as f64).clamp(0.0, 6.0) + residual[i * stride + j].to_acc() as f64
            }
            false => sum,
        };
        let bound = of_sums * size + of_result * expected.abs();
        assert!((is - expected).abs() <= bound, "{is} is not {expected} at {i} {j}: {case:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every layout of the operands, odd sizes and strides, several K slices; the epilogue is applied once to every
    /// value.
    #[test]
    fn gemm_matches_f64(
        (m, k, n) in (1usize..200, prop_oneof![1usize..1200, 1200usize..4000], 1usize..150),
        (transpose_a, transpose_b, add, then) in any::<(bool, bool, bool, bool)>(),
        gap in 0usize..9,
    ) {
        if !skipped() {
            // Few rows for a large K, because the f64 sums are slow.
            let m = if k > 1200 { m / 8 + 1 } else { m };
            let trial = GemmCase { m, k, n, transpose_a, transpose_b, add, with_epilogue: then, gap };
            check_gemm::<f32, f32>(trial);
            check_gemm::<bf16, bf16>(trial);
            check_gemm::<bf16, f32>(trial);
            check_gemm::<f16, f16>(trial);
            check_gemm::<f16, f32>(trial);
        }
    }
}

/// Enough rows that slices are short, and a K so long that a half-precision result needs sums between slices.
#[test]
fn narrow_results_of_several_slices_are_right() {
    if !skipped() {
        let trial = GemmCase {
            m: 530,
            k: 3200,
            n: 17,
            transpose_a: false,
            transpose_b: true,
            add: false,
            with_epilogue: true,
            gap: 3,
        };
        assert!(KSlices::new::<bf16>(trial.m, trial.k, true).count > 1);
        check_gemm::<bf16, bf16>(trial);
        check_gemm::<f16, f16>(GemmCase { k: 1700, transpose_a: true, ..trial });
    }
}

/// Calls `term` with the indices of every product of a convolution: into its output, its images and its weight.
fn for_each_product(g: &ConvGeometry, batch: usize, mut term: impl FnMut(usize, usize, usize)) {
    let ((h, w), k) = (g.output(), g.kernel);
    for (pixel, cell) in (0..batch * h * w).flat_map(|p| (0..k * k).map(move |cell| (p, cell))) {
        let input_index = |i: usize, cell: usize, size: usize| {
            (i * g.stride + cell * g.dilation).checked_sub(g.padding).filter(|at| *at < size)
        };
        let (image, at) = (pixel / (h * w), pixel % (h * w));
        let (y, x) = (input_index(at / w, cell / k, g.height), input_index(at % w, cell % k, g.width));
        let (Some(y), Some(x)) = (y, x) else { continue };
        for (o, c) in (0..g.out_channels).flat_map(|o| (0..g.in_channels).map(move |c| (o, c))) {
            let input = ((image * g.height + y) * g.width + x) * g.in_channels + c;
            term(pixel * g.out_channels + o, input, (o * k * k + cell) * g.in_channels + c);
        }
    }
}

fn is_close<E: AmxElem, O: AmxElem>(actual: &[O], expected: &[(f64, f64)]) -> bool {
    let (of_sums, of_result) = tolerances::<E, O>();
    let bound = |sum: f64, size: f64| of_sums * (1.0 + size) + of_result * sum.abs();
    actual
        .iter()
        .zip(expected)
        .all(|(is, (sum, size))| (is.to_acc() as f64 - sum).abs() <= bound(*sum, *size))
}

fn check_conv<E: AmxElem>(g: &ConvGeometry, batch: usize) {
    let images = values::<E>(batch * g.height * g.width * g.in_channels, 1);
    let (weight, d) = (
        values::<E>(g.out_channels * g.patch_len(), 2),
        values::<E>(batch * g.output_pixels() * g.out_channels, 3),
    );
    let (mut out, mut dx, initial) = (d.clone(), images.clone(), values::<f32>(weight.len(), 4));
    let mut dw = initial.clone();
    let epilogue =
        CpuEpilogue { bias: Some(&weight[..g.out_channels]), clamp: ClampActivation::Relu, residual: None };
    // SAFETY: the dispatch is AMX, and all slices have the lengths that the geometry implies.
    unsafe {
        conv(&mut out, ConvArgs { g, images: &images, weight: &weight, input_gradient: false, epilogue });
        conv_weight_gradient(&mut dw, g, &images, &d);
    }
    let mut sums = [out.len(), dx.len(), dw.len()].map(|len| vec![(0.0, 0.0); len]);
    for_each_product(g, batch, |y, x, w| {
        let (of_y, of_x, of_w) = (d[y].to_acc() as f64, images[x].to_acc() as f64, weight[w].to_acc() as f64);
        for (of, at, term) in [(0, y, of_x * of_w), (1, x, of_y * of_w), (2, w, of_y * of_x)] {
            let (sum, size): &mut (f64, f64) = &mut sums[of][at];
            (*sum, *size) = (*sum + term, *size + term.abs());
        }
    });
    for (i, (sum, _)) in sums[0].iter_mut().enumerate() {
        *sum = (*sum + weight[i % g.out_channels].to_acc() as f64).max(0.0);
    }
    sums[2].iter_mut().zip(&initial).for_each(|((sum, _), before)| *sum += *before as f64);
    assert!(is_close::<E, E>(&out, &sums[0]), "output of {g:?}");
    assert!(is_close::<E, f32>(&dw, &sums[2]), "weight gradient of {g:?}");
    if let Some(backward) = g.input_gradient_geometry() {
        let args = ConvArgs {
            g: &backward,
            images: &d,
            weight: &weight,
            input_gradient: true,
            epilogue: CpuEpilogue::NONE,
        };
        // SAFETY: as above.
        unsafe { conv(&mut dx, args) };
        assert!(is_close::<E, E>(&dx, &sums[1]), "input gradient of {g:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The output, the input gradient where the stride is 1, and the weight gradient, which accumulates.
    #[test]
    fn conv_matches_f64(
        (height, width, batch) in (3usize..11, 3usize..11, 1usize..4),
        (inputs, outputs) in (1usize..4, 1usize..4),
        (kernel, stride, dilation) in (1usize..4, 1usize..3, 1usize..3),
        padding in 0usize..3,
    ) {
        let (inputs, outputs) = (32 * inputs, 32 * outputs);
        let g = ConvGeometry {
            height,
            width,
            in_channels: inputs,
            out_channels: outputs,
            kernel,
            stride,
            padding,
            dilation,
            groups: 1,
        };
        if !skipped() && g.output_pixels() > 0 && padding <= dilation * (kernel - 1) {
            check_conv::<f32>(&g, batch);
            check_conv::<bf16>(&g, batch);
            check_conv::<f16>(&g, batch);
        }
    }
}

/// AMX multiplies in bf16; for f32 operands the result is as accurate as f32 sums.
#[test]
fn errors_are_those_of_f32() {
    if skipped() {
        return;
    }
    let (m, k, n) = (64, 700, 64);
    let (a, b) = (values::<f32>(m * k, 1), values::<f32>(k * n, 2));
    let (x, y) = (MatView::new(&a, m, k), MatView::new(&b, k, n));
    let out = gemm_f32(x, y);
    let (mut ours, mut plain) = (0.0, 0.0);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let exact: f64 = (0..k).map(|p| at(&x, i, p) * at(&y, p, j)).sum();
        let f32_sum = (0..k).fold(0f32, |sum, p| (at(&x, i, p) as f32).mul_add(at(&y, p, j) as f32, sum));
        ours += (out[i * n + j] as f64 - exact).powi(2);
        plain += (f32_sum as f64 - exact).powi(2);
    }
    assert!(ours <= plain, "{ours} {plain}");
}

fn bits_do_not_depend_on_the_threads<E: AmxElem>() {
    let (a, b) = (values::<E>(333 * 600, 1), values::<E>(600 * 200, 2));
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| gemm_f32(MatView::new(&a, 333, 600), MatView::new(&b, 600, 200)))
    };
    let one = run(1);
    for threads in [2, 3, 16] {
        assert!(
            one.iter().zip(run(threads)).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{threads} threads, {:?}",
            E::DTYPE
        );
    }
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    if !skipped() {
        bits_do_not_depend_on_the_threads::<f32>();
        bits_do_not_depend_on_the_threads::<bf16>();
        bits_do_not_depend_on_the_threads::<f16>();
    }
}

fn check_non_finite<E: AmxElem>(bad: f32) {
    let (mut a, b) = (values::<E>(64 * 64, 1), values::<E>(64 * 64, 2));
    a[5 * 64 + 17] = E::from_acc(bad);
    let out = gemm_f32(MatView::new(&a, 64, 64), MatView::new(&b, 64, 64));
    for (i, row) in out.chunks(64).enumerate() {
        assert_eq!(row.iter().all(|v| !v.is_finite()), i == 5, "{bad} in row {i}, {:?}", E::DTYPE);
    }
}

/// A diverging loss must be visible: a non-finite input makes its whole row or column non-finite.
#[test]
fn non_finite_values_propagate() {
    if skipped() {
        return;
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
        check_non_finite::<f32>(bad);
        check_non_finite::<bf16>(bad);
        check_non_finite::<f16>(bad);
    }
}
