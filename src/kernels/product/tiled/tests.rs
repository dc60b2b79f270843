//! Against sums in f64, in every type that AMX multiplies.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::kernels::clip::Clip;
use crate::random::Random;

fn values<E: Split>(count: usize, stream: u64) -> Vec<E> {
    (0..count).map(|i| E::down(Random::new(7, stream).normal(i as u64) as f32)).collect()
}

fn laid<E>(data: &[E], rows: usize, cols: usize, turned: bool) -> Mat<'_, E> {
    if turned { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
}

fn at<E: Split>(m: &Mat<E>, i: usize, j: usize) -> f64 {
    m.data[i * m.row + j * m.col].up() as f64
}

/// In other dispatches the tests say so.
fn skipped() -> bool {
    if dispatch() != Dispatch::Amx {
        println!("skipped: the dispatch is {:?}", dispatch());
    }
    dispatch() != Dispatch::Amx
}

/// How far a sum in f32 of products may be from the exact one, in units of the sum of their sizes, and the result of
/// type `O` from that, in units of itself.
fn bounds<E: Split, O: Split>() -> (f64, f64) {
    let left_out = if E::PARTS == 2 { 2f64.powi(-16) } else { 0.0 };
    let digits = match O::PARTS {
        1 => 8,
        2 => 11,
        _ => 30,
    };
    (1e-6 + left_out, 2f64.powi(-digits))
}

fn product<E: Split>(x: Mat<E>, y: Mat<E>) -> Vec<f32> {
    let mut out = vec![0.0; x.rows * y.cols];
    // SAFETY: the dispatch is AMX, and `out` has room.
    unsafe { multiply(&mut out, y.cols, x, y, false, None) };
    out
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    m: usize,
    k: usize,
    n: usize,
    turn_a: bool,
    turn_b: bool,
    add: bool,
    then: bool,
    gap: usize,
}

fn product_is_right<E: Split, O: Split>(trial: Trial) {
    let Trial { m, k, n, turn_a, turn_b, then, gap, .. } = trial;
    let add = trial.add && !is_narrow::<O>();
    let (a, b, stride) = (values::<E>(m * k, 1), values::<E>(k * n, 2), n + gap);
    let before = values::<O>(m * stride, 3);
    let mut out = before.clone();
    let (x, y) = (laid(&a, m, k, turn_a), laid(&b, k, n, turn_b));
    let (bias, onto) = (values::<O>(n, 4), values::<O>(m * stride, 5));
    let follows = Then { bias: Some(&bias), clip: Clip::Relu6, onto: Some(&onto) };
    // SAFETY: the dispatch is AMX and `out` has `m` rows of `stride`.
    unsafe { multiply(&mut out, stride, x, y, add, then.then_some(follows)) };
    let (of_sums, of_result) = bounds::<E, O>();
    for (i, j) in (0..m).flat_map(|i| (0..stride).map(move |j| (i, j))) {
        let (was, is) = (before[i * stride + j].up() as f64, out[i * stride + j].up() as f64);
        if j >= n {
            assert_eq!(was, is, "what lies between the rows is left alone");
            continue;
        }
        let terms = (0..k).map(|p| at(&x, i, p) * at(&y, p, j));
        let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
        let sum = sum + if add { was } else { 0.0 };
        let wanted = match then {
            true => (sum + bias[j].up() as f64).clamp(0.0, 6.0) + onto[i * stride + j].up() as f64,
            false => sum,
        };
        let bound = of_sums * size + of_result * wanted.abs();
        assert!((is - wanted).abs() <= bound, "{is} is not {wanted} at {i} {j}: {trial:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Over every direction of the operands, odd sizes and strides, several slices; what comes then is done once with
    /// every value.
    #[test]
    fn products_are_right(
        (m, k, n) in (1usize..200, prop_oneof![1usize..1200, 1200usize..4000], 1usize..150),
        (turn_a, turn_b, add, then) in any::<(bool, bool, bool, bool)>(),
        gap in 0usize..9,
    ) {
        if !skipped() {
            // Few rows of many inner sums: the sums in f64 take their time.
            let m = if k > 1200 { m / 8 + 1 } else { m };
            let trial = Trial { m, k, n, turn_a, turn_b, add, then, gap };
            product_is_right::<f32, f32>(trial);
            product_is_right::<bf16, bf16>(trial);
            product_is_right::<bf16, f32>(trial);
            product_is_right::<f16, f16>(trial);
            product_is_right::<f16, f32>(trial);
        }
    }
}

/// Tall enough that slices are short, and so deep that a narrow result needs sums between them.
#[test]
fn narrow_results_of_several_slices_are_right() {
    if !skipped() {
        let trial =
            Trial { m: 530, k: 3200, n: 17, turn_a: false, turn_b: true, add: false, then: true, gap: 3 };
        assert!(Slices::new::<bf16>(trial.m, trial.k, true).count > 1);
        product_is_right::<bf16, bf16>(trial);
        product_is_right::<f16, f16>(Trial { k: 1700, turn_a: true, ..trial });
    }
}

/// Calls `term` with the places of every product of a convolution in its output, its pictures and its weight.
fn terms(g: &Geometry, batch: usize, mut term: impl FnMut(usize, usize, usize)) {
    let ((h, w), k) = (g.output(), g.kernel);
    for (pixel, cell) in (0..batch * h * w).flat_map(|p| (0..k * k).map(move |cell| (p, cell))) {
        let along = |i: usize, cell: usize, size: usize| {
            (i * g.stride + cell * g.dilation).checked_sub(g.padding).filter(|at| *at < size)
        };
        let (picture, at) = (pixel / (h * w), pixel % (h * w));
        let (y, x) = (along(at / w, cell / k, g.height), along(at % w, cell % k, g.width));
        let (Some(y), Some(x)) = (y, x) else { continue };
        for (o, c) in (0..g.outputs).flat_map(|o| (0..g.inputs).map(move |c| (o, c))) {
            let seen = ((picture * g.height + y) * g.width + x) * g.inputs + c;
            term(pixel * g.outputs + o, seen, (o * k * k + cell) * g.inputs + c);
        }
    }
}

fn near<E: Split, O: Split>(found: &[O], wanted: &[(f64, f64)]) -> bool {
    let (of_sums, of_result) = bounds::<E, O>();
    let bound = |sum: f64, size: f64| of_sums * (1.0 + size) + of_result * sum.abs();
    found.iter().zip(wanted).all(|(is, (sum, size))| (is.up() as f64 - sum).abs() <= bound(*sum, *size))
}

fn convolution_is_right<E: Split>(g: &Geometry, batch: usize) {
    let pictures = values::<E>(batch * g.height * g.width * g.inputs, 1);
    let (weight, d) =
        (values::<E>(g.outputs * g.window(), 2), values::<E>(batch * g.pixels() * g.outputs, 3));
    let (mut out, mut dx, before) = (d.clone(), pictures.clone(), values::<f32>(weight.len(), 4));
    let mut dw = before.clone();
    let then = Then { bias: Some(&weight[..g.outputs]), clip: Clip::Relu, onto: None };
    // SAFETY: the dispatch is AMX, and all are as long as the sizes say.
    unsafe {
        convolve(&mut out, Convolution { g, pictures: &pictures, weight: &weight, back: false, then });
        weigh(&mut dw, g, &pictures, &d);
    }
    let mut sums = [out.len(), dx.len(), dw.len()].map(|len| vec![(0.0, 0.0); len]);
    terms(g, batch, |y, x, w| {
        let (of_y, of_x, of_w) = (d[y].up() as f64, pictures[x].up() as f64, weight[w].up() as f64);
        for (of, at, term) in [(0, y, of_x * of_w), (1, x, of_y * of_w), (2, w, of_y * of_x)] {
            let (sum, size): &mut (f64, f64) = &mut sums[of][at];
            (*sum, *size) = (*sum + term, *size + term.abs());
        }
    });
    for (i, (sum, _)) in sums[0].iter_mut().enumerate() {
        *sum = (*sum + weight[i % g.outputs].up() as f64).max(0.0);
    }
    sums[2].iter_mut().zip(&before).for_each(|((sum, _), before)| *sum += *before as f64);
    assert!(near::<E, E>(&out, &sums[0]), "the output of {g:?}");
    assert!(near::<E, f32>(&dw, &sums[2]), "the weight's gradient of {g:?}");
    if let Some(back) = g.back() {
        let of = Convolution { g: &back, pictures: &d, weight: &weight, back: true, then: Then::NOTHING };
        // SAFETY: the same.
        unsafe { convolve(&mut dx, of) };
        assert!(near::<E, E>(&dx, &sums[1]), "the pictures' gradient of {g:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The output, the gradient of the pictures where windows move by one, and that of the weight, which is added to what
    /// is there.
    #[test]
    fn convolutions_are_right(
        (height, width, batch) in (3usize..11, 3usize..11, 1usize..4),
        (inputs, outputs) in (1usize..4, 1usize..4),
        (kernel, stride, dilation) in (1usize..4, 1usize..3, 1usize..3),
        padding in 0usize..3,
    ) {
        let (inputs, outputs) = (32 * inputs, 32 * outputs);
        let g = Geometry { height, width, inputs, outputs, kernel, stride, padding, dilation, groups: 1 };
        if !skipped() && g.pixels() > 0 && padding <= dilation * (kernel - 1) {
            convolution_is_right::<f32>(&g, batch);
            convolution_is_right::<bf16>(&g, batch);
            convolution_is_right::<f16>(&g, batch);
        }
    }
}

/// AMX multiplies in bf16; of f32 the result is as near to the exact one as sums in f32 are.
#[test]
fn errors_are_those_of_f32() {
    if skipped() {
        return;
    }
    let (m, k, n) = (64, 700, 64);
    let (a, b) = (values::<f32>(m * k, 1), values::<f32>(k * n, 2));
    let (x, y) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
    let out = product(x, y);
    let (mut ours, mut plain) = (0.0, 0.0);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let exact: f64 = (0..k).map(|p| at(&x, i, p) * at(&y, p, j)).sum();
        let f32_sum = (0..k).fold(0f32, |sum, p| (at(&x, i, p) as f32).mul_add(at(&y, p, j) as f32, sum));
        ours += (out[i * n + j] as f64 - exact).powi(2);
        plain += (f32_sum as f64 - exact).powi(2);
    }
    assert!(ours <= plain, "{ours} {plain}");
}

fn bits_do_not_depend_on_the_threads<E: Split>() {
    let (a, b) = (values::<E>(333 * 600, 1), values::<E>(600 * 200, 2));
    let by = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| product(Mat::new(&a, 333, 600), Mat::new(&b, 600, 200)))
    };
    let one = by(1);
    for threads in [2, 3, 16] {
        assert!(
            one.iter().zip(by(threads)).all(|(a, b)| a.to_bits() == b.to_bits()),
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

fn what_is_not_finite_stays<E: Split>(bad: f32) {
    let (mut a, b) = (values::<E>(64 * 64, 1), values::<E>(64 * 64, 2));
    a[5 * 64 + 17] = E::down(bad);
    let out = product(Mat::new(&a, 64, 64), Mat::new(&b, 64, 64));
    for (i, row) in out.chunks(64).enumerate() {
        assert_eq!(row.iter().all(|v| !v.is_finite()), i == 5, "{bad} in row {i}, {:?}", E::DTYPE);
    }
}

/// A loss that grows without bound must be seen: what is not finite makes its row or column not finite.
#[test]
fn what_is_not_finite_is_not_lost() {
    if skipped() {
        return;
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
        what_is_not_finite_stays::<f32>(bad);
        what_is_not_finite_stays::<bf16>(bad);
        what_is_not_finite_stays::<f16>(bad);
    }
}
