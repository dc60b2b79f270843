//! Products too small or too thin for packing to pay, in f32 on AVX-512.
//!
//! A panel of up to 64 columns of `b` is copied to the stack, in the order it is used; rows of `a` are read where
//! they lie, a value at a time for all columns of the panel. A sum runs over the inner size in order, so a row of
//! the result does not depend on the rows beside it.

use std::arch::x86_64::*;

use rayon::prelude::*;

use super::Mat;

/// Values in a vector.
const LANES: usize = 16;
/// Vectors in a row of the widest panel.
const WIDE: usize = 4;
/// The most inner sums of a panel: with 64 columns it has 64 KiB.
const DEPTH: usize = 256;
/// Multiplications above which `gemm` is at least as fast.
const SMALL: usize = 1 << 26;

/// Whether an (m, n) matrix over `k` is made here.
pub(super) fn takes((m, k, n): (usize, usize, usize)) -> bool {
    k > 0 && m.saturating_mul(k).saturating_mul(n) <= SMALL
}

/// `out = a b`, or `out += a b` with `add`.
///
/// # Safety
/// The machine has AVX-512 (F), the operands lie inside their slices, and `out` has room for every (i, j) at
/// `i * stride + j`.
pub(super) unsafe fn multiply(out: &mut [f32], stride: usize, a: Mat<f32>, b: Mat<f32>, add: bool) {
    // SAFETY: what the caller promises.
    unsafe { panels(Operands::of(&a, &b), a.rows, a.cols, b.cols, out.as_mut_ptr(), stride, add) }
}

/// As [`multiply`], by all threads: each makes some rows, or some columns where there are more of these.
///
/// # Safety
/// As of [`multiply`].
pub(super) unsafe fn spread(out: &mut [f32], stride: usize, a: Mat<f32>, b: Mat<f32>, add: bool) {
    /// Multiplications that are worth another thread's time.
    const LEAST: usize = 1 << 17;
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let rows = m >= n;
    // Whole tiles and whole panels, of which no thread's share ends in the middle.
    let (size, unit) = if rows { (m, 48) } else { (n, WIDE * LANES) };
    let worth = (m * k * n / LEAST).clamp(1, rayon::current_num_threads());
    let share = size.div_ceil(worth).next_multiple_of(unit);
    if share >= size {
        // SAFETY: what the caller promises.
        return unsafe { multiply(out, stride, a, b, add) };
    }
    struct Parts {
        o: Operands,
        out: *mut f32,
    }
    // SAFETY: operands are only read, and every thread writes to rows or columns of its own.
    unsafe impl Sync for Parts {}
    let parts = &Parts { o: Operands::of(&a, &b), out: out.as_mut_ptr() };
    (0..size.div_ceil(share)).into_par_iter().for_each(|part| {
        let (first, count) = (part * share, share.min(size - part * share));
        let Parts { mut o, mut out } = *parts;
        // SAFETY: what the caller promises of all rows and columns holds for `count` of them from `first` on.
        unsafe {
            let (m, n) = if rows {
                (o.a, out) = (o.a.add(first * o.a_row), out.add(first * stride));
                (count, n)
            } else {
                (o.b, out) = (o.b.add(first * o.b_col), out.add(first));
                (m, count)
            };
            panels(o, m, k, n, out, stride, add)
        }
    });
}

/// Element (i, p) of `a` is at `i * a_row + p * a_col`, (p, j) of `b` at `p * b_row + j * b_col`.
#[derive(Clone, Copy)]
struct Operands {
    a: *const f32,
    a_row: usize,
    a_col: usize,
    b: *const f32,
    b_row: usize,
    b_col: usize,
}

impl Operands {
    fn of(a: &Mat<f32>, b: &Mat<f32>) -> Self {
        Self {
            a: a.data.as_ptr(),
            a_row: a.row,
            a_col: a.col,
            b: b.data.as_ptr(),
            b_row: b.row,
            b_col: b.col,
        }
    }
}

/// A panel of `b`, row after row of its columns.
type Panel = [[__m512; WIDE]; DEPTH];

#[target_feature(enable = "avx512f")]
unsafe fn panels(o: Operands, m: usize, k: usize, n: usize, out: *mut f32, stride: usize, add: bool) {
    let mut panel = std::mem::MaybeUninit::<Panel>::uninit();
    let packed = panel.as_mut_ptr().cast::<f32>();
    let (depths, vectors) = (k.div_ceil(DEPTH), n.div_ceil(LANES));
    let widths = vectors.div_ceil(WIDE);
    for d in 0..depths {
        let (from, to) = (k * d / depths, k * (d + 1) / depths);
        for w in 0..widths {
            let (first, last) = (vectors * w / widths, vectors * (w + 1) / widths);
            let (start, cols) = (first * LANES, (last * LANES).min(n) - first * LANES);
            // SAFETY: rows `from..to` of columns `start..start + cols` lie inside `b`, and the same of `a` and `out`.
            unsafe {
                let b = o.b.add(from * o.b_row + start * o.b_col);
                pack(b, o.b_row, o.b_col, to - from, cols, packed);
                let tall = Tall {
                    rows: m,
                    depth: to - from,
                    a: o.a.add(from * o.a_col),
                    packed,
                    out: out.add(start),
                    stride,
                    last: mask(cols - (last - first - 1) * LANES),
                    add: add || d > 0,
                };
                match last - first {
                    4 => tall.by_direction::<6, 4>(o.a_row, o.a_col),
                    3 => tall.by_direction::<8, 3>(o.a_row, o.a_col),
                    2 => tall.by_direction::<12, 2>(o.a_row, o.a_col),
                    _ => tall.by_direction::<16, 1>(o.a_row, o.a_col),
                }
            }
        }
    }
}

/// The first `count` of a vector's values, at most all.
pub(super) fn mask(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// Copies `depth` rows of `cols` columns of `b` one after the other, each filled up to whole vectors with zeros.
#[target_feature(enable = "avx512f")]
unsafe fn pack(b: *const f32, row: usize, col: usize, depth: usize, cols: usize, to: *mut f32) {
    let width = cols.next_multiple_of(LANES);
    // SAFETY: the caller's rows and columns lie inside `b`, a panel has room for them, and masks keep the rest out.
    unsafe {
        if col == 1 {
            for p in 0..depth {
                for j in (0..width).step_by(LANES) {
                    let values = _mm512_maskz_loadu_ps(mask(cols - j), b.add(p * row + j));
                    _mm512_storeu_ps(to.add(p * width + j), values);
                }
            }
        } else {
            for p in (0..depth).step_by(LANES) {
                let deep = (depth - p).min(LANES);
                for j in (0..width).step_by(LANES) {
                    let mut square = [_mm512_setzero_ps(); LANES];
                    for (q, values) in square.iter_mut().enumerate().take(cols - j) {
                        *values = _mm512_maskz_loadu_ps(mask(deep), b.add((j + q) * col + p * row));
                    }
                    for (q, values) in turned(square).into_iter().enumerate().take(deep) {
                        _mm512_storeu_ps(to.add((p + q) * width + j), values);
                    }
                }
            }
        }
    }
}

/// The transpose of a square of vectors: pairs, then fours, then quarters are exchanged.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn turned(rows: [__m512; LANES]) -> [__m512; LANES] {
    let mut pairs = rows;
    for i in (0..LANES).step_by(2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    let mut fours = pairs;
    for i in (0..LANES).step_by(4) {
        for half in 0..2 {
            let (a, b) = (_mm512_castps_pd(pairs[i + half]), _mm512_castps_pd(pairs[i + 2 + half]));
            fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    let mut eights = fours;
    for i in 0..4 {
        for half in [0, 8] {
            let (a, b) = (fours[half + i], fours[half + 4 + i]);
            eights[half + i] = _mm512_shuffle_f32x4::<0x88>(a, b);
            eights[half + 4 + i] = _mm512_shuffle_f32x4::<0xdd>(a, b);
        }
    }
    let mut whole = eights;
    for i in 0..8 {
        whole[i] = _mm512_shuffle_f32x4::<0x88>(eights[i], eights[8 + i]);
        whole[8 + i] = _mm512_shuffle_f32x4::<0xdd>(eights[i], eights[8 + i]);
    }
    whole
}

/// All rows of the result in the columns of a panel.
struct Tall {
    rows: usize,
    depth: usize,
    a: *const f32,
    packed: *const f32,
    out: *mut f32,
    stride: usize,
    /// The columns of the last vector.
    last: __mmask16,
    add: bool,
}

impl Tall {
    /// Tells the compiler in which direction `a` is dense, if it is, so that addresses are cheap.
    #[target_feature(enable = "avx512f")]
    unsafe fn by_direction<const ROWS: usize, const VECTORS: usize>(&self, row: usize, col: usize) {
        // SAFETY: the same promises.
        unsafe {
            match (row, col) {
                (row, 1) => self.tiles::<ROWS, VECTORS>(row, 1),
                (1, col) => self.tiles::<ROWS, VECTORS>(1, col),
                (row, col) => self.tiles::<ROWS, VECTORS>(row, col),
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn tiles<const ROWS: usize, const VECTORS: usize>(&self, row: usize, col: usize) {
        let mut i = 0;
        // SAFETY: the same promises; `i` stays below the rows.
        unsafe {
            while i + ROWS <= self.rows {
                self.tile::<ROWS, VECTORS>(i, row, col);
                i += ROWS;
            }
            while i + 4 <= self.rows {
                self.tile::<4, VECTORS>(i, row, col);
                i += 4;
            }
            while i < self.rows {
                self.tile::<1, VECTORS>(i, row, col);
                i += 1;
            }
        }
    }

    /// Rows `i..i + ROWS`: the sums stay in registers until they are done.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn tile<const ROWS: usize, const VECTORS: usize>(&self, i: usize, row: usize, col: usize) {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        // SAFETY: the same promises; masks keep accesses of the last vector inside the result.
        unsafe {
            let (mut a, mut b) = (self.a.add(i * row), self.packed);
            for _ in 0..self.depth {
                let mut values = [_mm512_setzero_ps(); VECTORS];
                for (v, value) in values.iter_mut().enumerate() {
                    *value = _mm512_load_ps(b.add(v * LANES));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let factor = _mm512_set1_ps(*a.add(r * row));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = _mm512_fmadd_ps(factor, value, *sum);
                    }
                }
                // The last step may point past the end, and nothing is read there.
                a = a.wrapping_add(col);
                b = b.wrapping_add(VECTORS * LANES);
            }
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let at = self.out.add((i + r) * self.stride + v * LANES);
                    let mask = if v + 1 == VECTORS { self.last } else { !0 };
                    let before = _mm512_maskz_loadu_ps(if self.add { mask } else { 0 }, at);
                    _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(before, sum));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::dispatch::{Dispatch, dispatch};
    use crate::random::Random;

    fn values(count: usize, stream: u64) -> Vec<f32> {
        (0..count).map(|i| Random::new(7, stream).normal(i as u64) as f32).collect()
    }

    fn laid(data: &[f32], rows: usize, cols: usize, turned: bool) -> Mat<'_, f32> {
        if turned { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Against sums in f64, over every direction of the operands, odd sizes and strides; what lies between the
        /// rows of the result is left alone.
        #[test]
        fn products_are_right(m in 1usize..150, k in 1usize..600, n in 1usize..150, turn_a: bool, turn_b: bool, add: bool, gap in 0usize..9, threads in 1usize..5) {
            if dispatch() < Dispatch::Avx512 {
                println!("skipped: the dispatch is {:?}", dispatch());
                return Ok(());
            }
            let (a, b, stride) = (values(m * k, 1), values(k * n, 2), n + gap);
            let before = values(m * stride, 3);
            let mut out = before.clone();
            let (x, y) = (laid(&a, m, k, turn_a), laid(&b, k, n, turn_b));
            // SAFETY: AVX-512 was found and `out` has `m` rows of `stride`.
            unsafe { multiply(&mut out, stride, x, y, add) };
            let mut together = before.clone();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            // SAFETY: as above.
            pool.install(|| unsafe { spread(&mut together, stride, x, y, add) });
            prop_assert!(out.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits()), "bits of {} threads", threads);
            let at = |m: &Mat<f32>, i: usize, j: usize| m.data[i * m.row + j * m.col] as f64;
            for i in 0..m {
                for j in 0..stride {
                    let (was, is) = (before[i * stride + j], out[i * stride + j]);
                    if j >= n {
                        prop_assert_eq!(was, is);
                        continue;
                    }
                    let terms = (0..k).map(|p| at(&x, i, p) * at(&y, p, j));
                    let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
                    let wanted = sum + if add { was as f64 } else { 0.0 };
                    prop_assert!((is as f64 - wanted).abs() <= 1e-6 * size, "{} {} at {} {}", is, wanted, i, j);
                }
            }
        }
    }
}
