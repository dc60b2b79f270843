//! Against f64 sums, in every type and in results of both widths.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::base::random::RngKey;
use crate::kernels::clamp::ClampActivation;
use crate::kernels::dispatch::{Dispatch, dispatch};

fn values<E: AmxElem>(count: usize, stream: u64) -> Vec<E> {
    (0..count).map(|i| E::from_acc(RngKey::new(7, stream).normal(i as u64) as f32)).collect()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    k: usize,
    n: usize,
    transpose_a: bool,
    transpose_b: bool,
    add: bool,
    with_epilogue: bool,
    gap: usize,
    threads: usize,
}

/// Padding between rows of the result must stay untouched, and threads change no bit.
fn check<E: AmxElem, O: AmxElem>(case: Case) -> Result<(), TestCaseError> {
    if dispatch() < Dispatch::Avx512 {
        println!("skipped: the dispatch is {:?}", dispatch());
        return Ok(());
    }
    let Case { m, k, n, gap, .. } = case;
    let (a, b, stride) = (values::<E>(m * k, 1), values::<E>(k * n, 2), n + gap);
    let view = |data, rows, cols, transposed: bool| {
        if transposed { MatView::new(data, cols, rows).t() } else { MatView::new(data, rows, cols) }
    };
    let (x, y) = (view(&a, m, k, case.transpose_a), view(&b, k, n, case.transpose_b));
    let (before, bias, residual) =
        (values::<O>(m * stride, 3), values::<O>(n, 4), values::<O>(m * stride, 5));
    let epilogue =
        CpuEpilogue { bias: Some(&*bias), clamp: ClampActivation::Relu, residual: Some(&*residual) };
    let epilogue = case.with_epilogue.then_some(epilogue);
    let add = case.add && O::PARTS == 3;
    let run = |threads: usize| {
        let mut out = before.clone();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        // SAFETY: the CPU has AVX-512, and `out` has `m` rows of `stride` values.
        pool.install(|| unsafe { gemm(&mut out, stride, x, y, add, epilogue) });
        out
    };
    let out = run(1);
    let same = |(a, b): (&O, &O)| a.to_acc().to_bits() == b.to_acc().to_bits();
    prop_assert!(out.iter().zip(&run(case.threads)).all(same), "bits of {} threads", case.threads);
    let at = |m: &MatView<E>, i: usize, j: usize| m.data[i * m.row_stride + j * m.col_stride].to_acc() as f64;
    let digits = if O::PARTS == 3 { 23 } else { 8 };
    for i in 0..m {
        for j in 0..stride {
            let (was, is) = (before[i * stride + j].to_acc(), out[i * stride + j].to_acc());
            if j >= n {
                prop_assert_eq!(was, is);
                continue;
            }
            let terms = (0..k).map(|p| at(&x, i, p) * at(&y, p, j));
            let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
            let sum = sum + if add { was as f64 } else { 0.0 };
            let expected = match case.with_epilogue {
                true => (sum + bias[j].to_acc() as f64).max(0.0) + residual[i * stride + j].to_acc() as f64,
                false => sum,
            };
            let bound = 1e-6 * size + 2f64.powi(-digits) * expected.abs();
            prop_assert!((is as f64 - expected).abs() <= bound, "{is} instead of {expected} at {i} {j}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_are_right(
        m in 1usize..500,
        k in 1usize..600,
        n in 1usize..200,
        (transpose_a, transpose_b, add, with_epilogue) in any::<(bool, bool, bool, bool)>(),
        gap in 0usize..9,
        threads in 2usize..6,
    ) {
        let case = Case { m, k, n, transpose_a, transpose_b, add, with_epilogue, gap, threads };
        check::<bf16, bf16>(case)?;
        check::<bf16, f32>(case)?;
        check::<f16, f16>(case)?;
        check::<f16, f32>(case)?;
        check::<f32, f32>(case)?;
    }
}

/// Several slabs of K, and several blocks of rows and of columns, of few rows and of many.
#[test]
fn blocks_add_up() {
    let case = Case {
        m: 5,
        k: MAX_DEPTH + 3,
        n: MAX_BLOCK / MAX_DEPTH + 7,
        transpose_a: false,
        transpose_b: true,
        add: true,
        with_epilogue: true,
        gap: 2,
        threads: 3,
    };
    check::<bf16, f32>(case).unwrap();
    check::<f16, f32>(Case { transpose_b: false, add: false, ..case }).unwrap();
    check::<f16, f16>(Case { m: FEW_ROWS, k: 3, n: MAX_BLOCK / FEW_ROWS + 7, ..case }).unwrap();
    let many = Case { m: case.n, transpose_a: true, ..case };
    check::<f16, f32>(many).unwrap();
    check::<f32, f32>(many).unwrap();
    check::<f32, f32>(Case { transpose_a: false, ..many }).unwrap();
    check::<bf16, bf16>(Case { k: MAX_DEPTH, transpose_a: false, transpose_b: false, ..many }).unwrap();
}
