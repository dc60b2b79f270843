//! GEMMs by panels with the kernels of every instruction set of this CPU, against f64 sums: every type, results of both
//! widths, packed or not.

use candle_core::WithDType;
use half::{bf16, f16};
use proptest::prelude::*;

use super::packed::{self, FEW_ROWS, MAX_BLOCK, MAX_DEPTH};
use super::panel::PanelKernel;
use super::vectors::Portable;
#[cfg(target_arch = "x86_64")]
use super::vectors::{Avx2, Avx512};
use super::*;
use crate::base::random::RngKey;

fn values<E: Elem>(count: usize, stream: u64) -> Vec<E> {
    let value = |i| E::from_acc(E::Acc::of_f64(RngKey::new(7, stream).normal(i)));
    (0..count as u64).map(value).collect()
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

/// A GEMM of a case on so many threads: its result replaces that of before.
type RunGemm<'a, O> = dyn Fn(&mut [O], usize) + Sync + 'a;

/// A case and what its result must be: for each value, the sum, after the epilogue, and how far from it may be.
struct Expected<'a, E: Elem, O: Elem> {
    case: Case,
    a: MatView<'a, E>,
    b: MatView<'a, E>,
    epilogue: Option<CpuEpilogue<'a, O>>,
    /// The result before, and whether it is added to.
    before: &'a [O],
    accumulate: bool,
    values: Vec<(f64, f64)>,
}

/// Runs a case with each instruction set of this CPU.
fn check<E: Elem, O: Elem<Acc = E::Acc>>(case: Case) -> Result<(), TestCaseError> {
    let Case { m, k, n, gap, .. } = case;
    let (a, b, stride) = (values::<E>(m * k, 1), values::<E>(k * n, 2), n + gap);
    let before = values::<O>(m * stride, 3);
    let (a, b) = (view(&a, m, k, case.transpose_a), view(&b, k, n, case.transpose_b));
    let (bias, residual) = (values::<O>(n, 4), values::<O>(m * stride, 5));
    let epilogue =
        CpuEpilogue { bias: Some(&*bias), clamp: ClampActivation::Relu, residual: Some(&*residual) };
    let epilogue = case.with_epilogue.then_some(epilogue);
    let is_acc = O::DTYPE == E::Acc::DTYPE;
    let (accumulate, unit) = (case.add && is_acc, 2f64.powi(if is_acc { -23 } else { -8 }));
    let f64_rows = |m: &MatView<E>| -> Vec<Vec<f64>> {
        let at = |i: usize, j: usize| m.data[i * m.row_stride + j * m.col_stride].to_acc().as_f64();
        (0..m.rows).map(|i| (0..m.cols).map(|j| at(i, j)).collect()).collect()
    };
    let (rows, columns) = (f64_rows(&a), f64_rows(&b.t()));
    let f64_at = |all: &[O], at: usize| all[at].to_acc().as_f64();
    let expected = |at: usize| {
        let (i, j) = (at / stride, at % stride);
        if j >= n {
            return (f64_at(&before, at), 0.0);
        }
        let terms = rows[i].iter().zip(&columns[j]).map(|(a, b)| a * b);
        let (sum, magnitude) = terms.fold((0.0, 1.0), |(sum, all), term| (sum + term, all + term.abs()));
        let sum = if accumulate { sum + f64_at(&before, at) } else { sum };
        let value = match case.with_epilogue {
            true => (sum + f64_at(&bias, j)).max(0.0) + f64_at(&residual, at),
            false => sum,
        };
        (value, 1e-6 * magnitude + unit * value.abs())
    };
    let values = (0..m * stride).map(expected).collect();
    let expected = Expected { case, a, b, epilogue, before: &before, accumulate, values };
    expected.check_with::<Portable>()?;
    #[cfg(target_arch = "x86_64")]
    if E::VECTORIZE && Dispatch::Avx2.is_available() {
        expected.check_with::<Avx2>()?;
    }
    #[cfg(target_arch = "x86_64")]
    if E::VECTORIZE && Dispatch::Avx512.is_available() {
        expected.check_with::<Avx512>()?;
    }
    Ok(())
}

fn view<T>(data: &[T], rows: usize, cols: usize, transposed: bool) -> MatView<'_, T> {
    if transposed { MatView::new(data, cols, rows).t() } else { MatView::new(data, rows, cols) }
}

impl<E: Elem, O: Elem<Acc = E::Acc>> Expected<'_, E, O> {
    fn check_with<P: PanelKernel<E, O> + PanelKernel<E::Acc, E::Acc>>(&self) -> Result<(), TestCaseError> {
        let (stride, add) = (self.case.n + self.case.gap, self.accumulate);
        self.check(&|out, _| {
            // SAFETY: the CPU has the instructions, and the result has `m` rows of `stride` values.
            unsafe { packed::gemm::<E, O, P>(out, stride, self.a, self.b, add, self.epilogue) }
        })?;
        let (Some(a), Some(b)) = (self.a.downcast::<E::Acc>(), self.b.downcast::<E::Acc>()) else {
            return Ok(());
        };
        if self.epilogue.is_some() {
            return Ok(());
        }
        self.check(&|out, threads| {
            let Some(out) = downcast_slice_mut::<O, E::Acc>(out) else { unreachable!("no wider type") };
            match threads {
                // SAFETY: as above.
                1 => unsafe { unpacked::gemm::<E::Acc, P>(out, stride, a, b, add) },
                _ => unsafe { unpacked::gemm_parallel::<E::Acc, P>(out, stride, a, b, add) },
            }
        })
    }

    /// Threads change no bit, and the padding between rows of the result stays untouched.
    fn check(&self, gemm: &RunGemm<O>) -> Result<(), TestCaseError> {
        let run = |threads: usize| -> Vec<f64> {
            let mut out = self.before.to_vec();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| gemm(&mut out, threads));
            out.into_iter().map(|value| value.to_acc().as_f64()).collect()
        };
        let (out, shared) = (run(1), run(self.case.threads));
        let same = out.iter().zip(&shared).all(|(a, b)| a.to_bits() == b.to_bits());
        prop_assert!(same, "bits of {} threads", self.case.threads);
        for (at, (is, (value, bound))) in out.iter().zip(&self.values).enumerate() {
            prop_assert!((is - value).abs() <= *bound, "{is} instead of {value} at {at}");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

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
        check::<f64, f64>(case)?;
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
