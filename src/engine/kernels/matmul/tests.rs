//! The GEMM that the sizes, the type and the dispatch choose.

use half::{bf16, f16};

use super::*;
use crate::base::random::RngKey;

fn values<T: Elem<Acc = f32>>(count: usize, stream: u64) -> Vec<T> {
    (0..count).map(|i| T::from_acc(RngKey::new(3, stream).normal(i as u64) as f32)).collect()
}

/// Products whose operands are converted block by block, in both layouts, against those of converted operands.
fn check<T: Elem<Acc = f32>>((m, k, n): (usize, usize, usize), transposed: bool, ulp: f32) {
    let (a, b) = (values::<T>(m * k, 1), values::<T>(k * n, 2));
    let converted = |values: &[T]| values.iter().map(|v| v.to_acc()).collect::<Vec<f32>>();
    let (a_acc, b_acc) = (converted(&a), converted(&b));
    fn view<U>(b: &[U], k: usize, n: usize, transposed: bool) -> MatView<'_, U> {
        if transposed { MatView::new(b, n, k).t() } else { MatView::new(b, k, n) }
    }
    let (a, b) = (MatView::new(&a, m, k), view(&b, k, n, transposed));
    let mut expected = vec![0.0; m * n];
    let b_acc = view(&b_acc, k, n, transposed);
    gemm::<f32>(&mut expected, n, MatView::new(&a_acc, m, k), b_acc, false, Threading::Parallel);
    let close = |got: f32, want: f32, ulp: f32| {
        let bound = ulp * want.abs() + 1e-5 * k as f32;
        assert!((got - want).abs() <= bound, "({m}, {k}, {n}): {got} instead of {want}");
    };
    let stride = n + 3;
    let mut sums = vec![1.0; m * stride];
    gemm(&mut sums, stride, a, b, true, Threading::Parallel);
    for (i, sum) in sums.iter().enumerate() {
        let (row, column) = (i / stride, i % stride);
        let product = if column < n { expected[row * n + column] } else { 0.0 };
        close(*sum, 1.0 + product, 1e-6);
    }
    let mut out = vec![T::from_acc(f32::NAN); m * n];
    matmul(&mut out, a, b, Threading::Parallel);
    out.iter().zip(&expected).for_each(|(got, want)| close(got.to_acc(), *want, ulp));
}

#[test]
fn operands_are_converted_block_by_block() {
    for size in [(5, 2100, 700), (37, 40, 20_011), (500, 5000, 257), (3, 1025, 513), (9, 300, 64), (4, 1, 3)]
    {
        for transposed in [false, true] {
            check::<bf16>(size, transposed, 0.008);
            check::<f16>(size, transposed, 0.001);
        }
    }
}

#[test]
fn an_empty_sum_is_zero() {
    let (a, b) = (MatView::new(&[], 2, 0), MatView::new(&[], 0, 3));
    for threading in [Threading::Serial, Threading::Parallel] {
        let mut out = [7f32; 8];
        gemm::<f32>(&mut out, 4, a, b, true, threading);
        assert_eq!(out, [7.0; 8]);
        gemm::<f32>(&mut out, 4, a, b, false, threading);
        assert_eq!(out, [0.0, 0.0, 0.0, 7.0, 0.0, 0.0, 0.0, 7.0]);
        let mut out = [bf16::ONE; 6];
        let (a, b) = (MatView::new(&[], 2, 0), MatView::new(&[], 0, 3));
        matmul::<bf16>(&mut out, a, b, threading);
        assert_eq!(out, [bf16::ZERO; 6]);
    }
}
