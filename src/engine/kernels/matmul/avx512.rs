//! f32 GEMMs on AVX-512 that are too small or too thin for packing to pay.
//!
//! The kernel copies a panel of up to 64 columns of `b` to the stack, in the order of use. It reads rows of `a` in
//! place and broadcasts one value at a time over all columns of the panel. A sum runs over K in order, so a row of the
//! result does not depend on its neighbors.

use std::arch::x86_64::*;

use super::MatView;
use super::bf16_split::AmxElem;
use crate::kernels::cpu::parallel_for;

/// f32 lanes of a vector.
pub(super) const LANES: usize = 16;
/// Vectors per row of the widest panel.
pub(super) const PANEL_VECTORS: usize = 4;
/// Largest K of a panel: with 64 columns it takes 64 KiB.
pub(super) const PANEL_K: usize = 256;
/// Rows, values of K, and multiplications up to which packing does not pay.
const FEW_ROWS: usize = 384;
const FEW_STEPS: usize = 128;
const FEW_MULTIPLIES: usize = 1 << 26;

/// Whether this kernel is the fastest for an (m, n) result over `k` on all threads.
pub(super) fn is_fastest((m, k, n): (usize, usize, usize)) -> bool {
    m <= FEW_ROWS || k <= FEW_STEPS || m.saturating_mul(k).saturating_mul(n) <= FEW_MULTIPLIES
}

/// `out = a b`, or `out += a b` with `accumulate`.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL), the operands lie inside their slices, and `out` has room for every (i, j) at
/// `i * stride + j`.
pub(super) unsafe fn gemm(
    out: &mut [f32],
    stride: usize,
    a: MatView<f32>,
    b: MatView<f32>,
    accumulate: bool,
) {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        gemm_panels(Operands::new(&a, &b), a.rows, a.cols, b.cols, out.as_mut_ptr(), stride, accumulate)
    }
}

/// Like [`gemm`], on all threads: each computes some rows of some columns.
///
/// # Safety
/// As for [`gemm`].
pub(super) unsafe fn gemm_parallel(
    out: &mut [f32],
    stride: usize,
    a: MatView<f32>,
    b: MatView<f32>,
    accumulate: bool,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (rows, columns) = grid((m, k, n), rayon::current_num_threads());
    if (rows, columns) == (m, n) {
        // SAFETY: the caller upholds this function's contract.
        return unsafe { gemm(out, stride, a, b, accumulate) };
    }
    struct SharedOperands {
        o: Operands,
        out: *mut f32,
    }
    // SAFETY: the operands are only read, and every thread writes its own rows and columns.
    unsafe impl Sync for SharedOperands {}
    let shared = &SharedOperands { o: Operands::new(&a, &b), out: out.as_mut_ptr() };
    let column_chunks = n.div_ceil(columns);
    parallel_for(m.div_ceil(rows) * column_chunks, &|index| {
        let (row, column) = (index / column_chunks * rows, index % column_chunks * columns);
        let SharedOperands { mut o, mut out } = *shared;
        // SAFETY: the caller's contract for all rows and columns holds for some of them.
        unsafe {
            o.a = o.a.add(row * o.a_row);
            o.b = o.b.add(column * o.b_col);
            out = out.add(row * stride + column);
            gemm_panels(o, rows.min(m - row), k, columns.min(n - column), out, stride, accumulate)
        }
    });
}

/// The rows and columns of an (m, n) result over `k` that one of `threads` computes at a time. The longer side is split
/// first, into whole tiles or whole panels; the other, and panels into vectors, where that is too few for all threads.
fn grid((m, k, n): (usize, usize, usize), threads: usize) -> (usize, usize) {
    /// Multiplications that are worth another thread.
    const MIN_MULTIPLIES_PER_THREAD: usize = 1 << 17;
    /// Rows of whole tiles of every width, and of most.
    const TILE_ROWS: [usize; 2] = [48, 12];
    const PANEL_COLUMNS: [usize; 2] = [PANEL_VECTORS * LANES, LANES];
    let wanted = (m * k * n / MIN_MULTIPLIES_PER_THREAD).clamp(1, threads);
    // The length of chunks of whole `granularity`, at most `count` of them.
    let chunk = |size: usize, granularity: usize, count: usize| {
        size.div_ceil(count.min(size.div_ceil(granularity))).next_multiple_of(granularity).min(size)
    };
    let rest = |size: usize, chunk: usize| wanted.div_ceil(size.div_ceil(chunk));
    let (rows, columns) = if m >= n {
        let rows = chunk(m, TILE_ROWS[0], wanted);
        (rows, chunk(n, PANEL_COLUMNS[0], rest(m, rows)))
    } else {
        let columns = chunk(n, PANEL_COLUMNS[0], wanted);
        (chunk(m, TILE_ROWS[1], rest(n, columns)), columns)
    };
    match m.div_ceil(rows) * n.div_ceil(columns) < wanted {
        true if m >= n => (chunk(m, TILE_ROWS[1], rest(n, columns)), columns),
        true => (rows, chunk(n, PANEL_COLUMNS[1], rest(m, rows))),
        false => (rows, columns),
    }
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
    fn new(a: &MatView<f32>, b: &MatView<f32>) -> Self {
        Self {
            a: a.data.as_ptr(),
            a_row: a.row_stride,
            a_col: a.col_stride,
            b: b.data.as_ptr(),
            b_row: b.row_stride,
            b_col: b.col_stride,
        }
    }
}

/// A panel of `b`, row by row.
pub(super) type PackedPanel = [[__m512; PANEL_VECTORS]; PANEL_K];

/// Bytes of stack that [`gemm_panels`] takes.
pub(super) const STACK_BYTES: usize = size_of::<PackedPanel>();

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn gemm_panels(
    o: Operands,
    m: usize,
    k: usize,
    n: usize,
    out: *mut f32,
    stride: usize,
    accumulate: bool,
) {
    let mut panel = std::mem::MaybeUninit::<PackedPanel>::uninit();
    let packed = panel.as_mut_ptr().cast::<f32>();
    let (k_blocks, vectors) = (k.div_ceil(PANEL_K), n.div_ceil(LANES));
    let n_blocks = vectors.div_ceil(PANEL_VECTORS);
    for d in 0..k_blocks {
        let (from, to) = (k * d / k_blocks, k * (d + 1) / k_blocks);
        for w in 0..n_blocks {
            let (first, last) = (vectors * w / n_blocks, vectors * (w + 1) / n_blocks);
            let (start, cols) = (first * LANES, (last * LANES).min(n) - first * LANES);
            // SAFETY: rows `from..to` of columns `start..start + cols` lie inside `b`, and likewise for `a` and `out`.
            unsafe {
                let b = o.b.add(from * o.b_row + start * o.b_col);
                pack(b, (o.b_row, o.b_col), to - from, cols, packed);
                let gemm = PanelGemm {
                    rows: m,
                    k: to - from,
                    a: o.a.add(from * o.a_col),
                    packed,
                    out: out.add(start),
                    stride,
                    last_mask: lane_mask(cols - (last - first - 1) * LANES),
                    accumulate: accumulate || d > 0,
                };
                gemm.run(last - first, o.a_row, o.a_col);
            }
        }
    }
}

/// A mask of the first `count` lanes, at most all of them.
pub(super) fn lane_mask(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// Copies `depth` rows of `cols` columns of `b`, in f32, each zero-padded to whole vectors.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL), one of the strides is 1, the values lie inside `b`, and `to` has room for the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack<E: AmxElem>(
    b: *const E,
    (row, col): (usize, usize),
    depth: usize,
    cols: usize,
    to: *mut f32,
) {
    let width = cols.next_multiple_of(LANES);
    // SAFETY: masks exclude what is beyond the rows and columns.
    unsafe {
        if col == 1 {
            for p in 0..depth {
                for j in (0..width).step_by(LANES) {
                    let values = E::load(b.add(p * row + j), lane_mask(cols - j));
                    _mm512_storeu_ps(to.add(p * width + j), values);
                }
            }
        } else {
            // A cache line of every column at once: columns may share a set of the cache.
            const LINE: usize = 2 * LANES;
            for j in (0..width).step_by(LANES) {
                for p in (0..depth).step_by(LINE) {
                    let mut squares = [[_mm512_setzero_ps(); LANES]; 2];
                    for q in 0..LANES.min(cols - j) {
                        for (half, square) in squares.iter_mut().enumerate() {
                            let first = p + half * LANES;
                            let from = b.wrapping_add((j + q) * col + first * row);
                            square[q] = E::load(from, lane_mask(depth.saturating_sub(first)));
                        }
                    }
                    for (half, square) in squares.into_iter().enumerate() {
                        let first = p + half * LANES;
                        let lines = depth.saturating_sub(first).min(LANES);
                        for (q, values) in transpose_16x16(square).into_iter().enumerate().take(lines) {
                            _mm512_storeu_ps(to.add((first + q) * width + j), values);
                        }
                    }
                }
            }
        }
    }
}

/// Transposes 16 vectors: exchanges pairs, then groups of four, then 128-bit lanes.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transpose_16x16(rows: [__m512; LANES]) -> [__m512; LANES] {
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

/// All rows of the result in the columns of one panel.
pub(super) struct PanelGemm {
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) a: *const f32,
    /// Aligned to vectors.
    pub(super) packed: *const f32,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// Mask of the last vector's columns.
    pub(super) last_mask: __mmask16,
    pub(super) accumulate: bool,
}

impl PanelGemm {
    /// Computes the columns of a panel of `vectors` vectors; value (i, p) of `a` is at `i * row + p * col`.
    ///
    /// # Safety
    /// The CPU has AVX-512 (F), and the operands and the result have the rows, the columns and the values of K.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn run(&self, vectors: usize, row: usize, col: usize) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match vectors {
                4 => self.with_const_strides::<6, 4>(row, col),
                3 => self.with_const_strides::<8, 3>(row, col),
                2 => self.with_const_strides::<12, 2>(row, col),
                _ => self.with_const_strides::<16, 1>(row, col),
            }
        }
    }

    /// Makes a unit stride of `a`, if it has one, a constant, so that addresses are cheap to compute.
    #[target_feature(enable = "avx512f")]
    unsafe fn with_const_strides<const ROWS: usize, const VECTORS: usize>(&self, row: usize, col: usize) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match (row, col) {
                (row, 1) => self.row_tiles::<ROWS, VECTORS>(row, 1),
                (1, col) => self.row_tiles::<ROWS, VECTORS>(1, col),
                (row, col) => self.row_tiles::<ROWS, VECTORS>(row, col),
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn row_tiles<const ROWS: usize, const VECTORS: usize>(&self, row: usize, col: usize) {
        let mut i = 0;
        // SAFETY: the caller upholds the same contract; `i` stays below `rows`.
        unsafe {
            while i + ROWS <= self.rows {
                self.microkernel::<ROWS, VECTORS>(i, row, col);
                i += ROWS;
            }
            while i + 4 <= self.rows {
                self.microkernel::<4, VECTORS>(i, row, col);
                i += 4;
            }
            while i < self.rows {
                self.microkernel::<1, VECTORS>(i, row, col);
                i += 1;
            }
        }
    }

    /// Rows `i..i + ROWS`: the sums stay in registers until they are complete.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn microkernel<const ROWS: usize, const VECTORS: usize>(&self, i: usize, row: usize, col: usize) {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        // SAFETY: the caller upholds the same contract; masks keep accesses of the last vector inside the result.
        unsafe {
            let (mut a, mut b) = (self.a.add(i * row), self.packed);
            for _ in 0..self.k {
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
                // The last step may point past the end; nothing is read there.
                a = a.wrapping_add(col);
                b = b.wrapping_add(VECTORS * LANES);
            }
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let at = self.out.add((i + r) * self.stride + v * LANES);
                    let mask = if v + 1 == VECTORS { self.last_mask } else { !0 };
                    let previous = _mm512_maskz_loadu_ps(if self.accumulate { mask } else { 0 }, at);
                    _mm512_mask_storeu_ps(at, mask, _mm512_add_ps(previous, sum));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::RngKey;
    use crate::kernels::dispatch::{Dispatch, dispatch};

    fn values(count: usize, stream: u64) -> Vec<f32> {
        (0..count).map(|i| RngKey::new(7, stream).normal(i as u64) as f32).collect()
    }

    fn mat_view(data: &[f32], rows: usize, cols: usize, transposed: bool) -> MatView<'_, f32> {
        if transposed { MatView::new(data, cols, rows).t() } else { MatView::new(data, rows, cols) }
    }

    #[test]
    fn threads_share_results_of_any_shape() {
        for (sizes, threads, expected) in [
            ((1000, 500, 70), 4, (288, 70)),
            ((70, 500, 1000), 4, (70, 256)),
            // Two panels for four threads; vectors for eight.
            ((64, 3136, 128), 4, (36, 64)),
            ((20, 3136, 128), 8, (12, 32)),
            ((100, 3000, 90), 8, (36, 64)),
            // Not worth a second thread.
            ((64, 16, 64), 8, (64, 64)),
        ] {
            assert_eq!(grid(sizes, threads), expected, "{sizes:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Against f64 sums, over every layout of the operands, odd sizes and strides; padding between rows of the
        /// result must stay untouched.
        #[test]
        fn products_are_right(
            m in 1usize..150,
            k in 1usize..600,
            n in 1usize..150,
            transpose_a: bool,
            transpose_b: bool,
            add: bool,
            gap in 0usize..9,
            threads in 1usize..5,
        ) {
            if dispatch() < Dispatch::Avx512 {
                println!("skipped: the dispatch is {:?}", dispatch());
                return Ok(());
            }
            let (a, b, stride) = (values(m * k, 1), values(k * n, 2), n + gap);
            let before = values(m * stride, 3);
            let mut out = before.clone();
            let (x, y) = (mat_view(&a, m, k, transpose_a), mat_view(&b, k, n, transpose_b));
            // SAFETY: the CPU has AVX-512, and `out` has `m` rows of `stride` values.
            unsafe { gemm(&mut out, stride, x, y, add) };
            let mut parallel = before.clone();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            // SAFETY: as above.
            pool.install(|| unsafe { gemm_parallel(&mut parallel, stride, x, y, add) });
            prop_assert!(
                out.iter().zip(&parallel).all(|(a, b)| a.to_bits() == b.to_bits()),
                "bits of {} threads",
                threads
            );
            let at = |m: &MatView<f32>, i: usize, j: usize| m.data[i * m.row_stride + j * m.col_stride] as f64;
            for i in 0..m {
                for j in 0..stride {
                    let (was, is) = (before[i * stride + j], out[i * stride + j]);
                    if j >= n {
                        prop_assert_eq!(was, is);
                        continue;
                    }
                    let terms = (0..k).map(|p| at(&x, i, p) * at(&y, p, j));
                    let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
                    let expected = sum + if add { was as f64 } else { 0.0 };
                    prop_assert!((is as f64 - expected).abs() <= 1e-6 * size, "{} {} at {} {}", is, expected, i, j);
                }
            }
        }
    }
}
