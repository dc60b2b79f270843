//! GEMMs of bf16 and f16 on AVX-512, on all threads. Blocks of the operands are widened to f32 where they are packed, and
//! sums are rounded while they are in cache: no operand or result is written to memory in f32.
//!
//! A sum runs over K in order, from slab to slab, so a value depends neither on its neighbors nor on the threads.

#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::ops::Range;

use super::avx512::{LANES, PANEL_K, PANEL_VECTORS, PanelGemm, lane_mask, pack};
use super::bf16_split::AmxElem;
use super::{CpuEpilogue, MatView};
use crate::kernels::cpu::{DisjointSliceMut, parallel_for, threads, uninit};

/// Longest slab of K. A half-precision result of a longer K is summed in f32 by the caller.
const MAX_DEPTH: usize = 2048;
/// Most values of a block of either operand: 4 MiB in f32.
const MAX_BLOCK: usize = 1 << 20;
/// Rows that are multiplied with one panel after another: at most 387 KiB, a third of an L2 cache.
const STRIP_ROWS: usize = 48;
const PANEL_COLUMNS: usize = PANEL_VECTORS * LANES;
/// Multiplications below which one thread is faster than handing out work.
const SERIAL_MULTIPLIES: usize = 1 << 20;
/// Values by which the block of panels is larger, so that they can be aligned.
const ALIGNMENT: usize = LANES;

/// Whether a half-precision result over `k` is rounded as it is computed.
pub(super) fn rounds(k: usize) -> bool {
    k <= MAX_DEPTH
}

/// Values between the rows of a strip: at a power of two they would share the sets of the caches.
fn padded(depth: usize) -> usize {
    depth + LANES
}

/// The values of a block of either operand of an (m, n) result over `depth` values of K.
fn block_lens((m, depth, n): (usize, usize, usize)) -> (usize, usize) {
    let a = (padded(depth) * m.next_multiple_of(STRIP_ROWS)).min(MAX_BLOCK);
    (a, (depth * n.next_multiple_of(LANES)).min(MAX_BLOCK) + ALIGNMENT)
}

/// Bytes that [`gemm`] allocates for an (m, n) result over `k`.
pub(super) fn workspace((m, k, n): (usize, usize, usize)) -> usize {
    let (a, b) = block_lens((m, k.min(MAX_DEPTH), n));
    (a + b) * size_of::<f32>()
}

/// `out = a b`, or `out += a b` with `accumulate`, then `epilogue`.
///
/// # Safety
/// The dispatch has AVX-512, K is not 0, the operands lie inside their slices, and `out` has room for every (i, j) at
/// `i * stride + j`. If `out` is half-precision, it does not accumulate, and [`rounds`] holds.
pub(super) unsafe fn gemm<E: AmxElem, O: AmxElem>(
    out: &mut [O],
    stride: usize,
    a: MatView<E>,
    b: MatView<E>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (depth, parallel) = (k.min(MAX_DEPTH), m * k * n > SERIAL_MULTIPLIES);
    // Whole tasks, and whole panels.
    let rows = MAX_BLOCK / padded(depth) / STRIP_ROWS * STRIP_ROWS;
    let columns = MAX_BLOCK / depth / PANEL_COLUMNS * PANEL_COLUMNS;
    let (a_len, b_len) = block_lens((m, depth, n));
    let (mut a_block, mut b_block) = (uninit::<f32>(a_len), uninit::<f32>(b_len));
    let aligned = b_block.as_ptr().align_offset(LANES * size_of::<f32>());
    let out = DisjointSliceMut::new(out);
    for from in (0..k).step_by(depth) {
        let inner = from..k.min(from + depth);
        for first in (0..n).step_by(columns) {
            let panels = Panels { columns: first..n.min(first + columns), depth: inner.len() };
            panels.pack(b, inner.start, parallel, &mut b_block[aligned..]);
            for top in (0..m).step_by(rows) {
                let strips =
                    Strips::widen(a, (top..m.min(top + rows), inner.clone()), parallel, &mut a_block);
                let block = Block {
                    a: strips,
                    b: b_block[aligned..].as_ptr(),
                    panels: &panels,
                    out: &out,
                    stride,
                    accumulate: accumulate || from > 0,
                    epilogue: epilogue.filter(|_| inner.end == k),
                };
                block.compute_all(parallel);
            }
        }
    }
}

/// # Safety
/// `from` points to as many values as `to` has, and the dispatch has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widen_line<E: AmxElem>(from: *const E, to: &mut [f32]) {
    for j in (0..to.len()).step_by(LANES) {
        let mask = lane_mask(to.len() - j);
        // SAFETY: the mask excludes what is beyond the line.
        unsafe { f32::store(to.as_mut_ptr().add(j), mask, E::load(from.add(j), mask)) };
    }
}

/// Calls `body` with every index below `count`, on all threads if `parallel`.
fn for_each(count: usize, parallel: bool, body: &(dyn Fn(usize) + Sync)) {
    if parallel { parallel_for(count, body) } else { (0..count).for_each(body) }
}

/// Rows of `a` in f32, one strip after another: value (i, p) of a strip is at `i * row + p * col`.
struct Strips {
    rows: Range<usize>,
    data: *const f32,
    strip_len: usize,
    row: usize,
    col: usize,
}

// SAFETY: the block is only read while it is shared.
unsafe impl Sync for Strips {}

impl Strips {
    /// Widens these rows of `a`, in a slab of K, into `to`.
    fn widen<E: AmxElem>(
        a: MatView<E>,
        (rows, inner): (Range<usize>, Range<usize>),
        parallel: bool,
        to: &mut [f32],
    ) -> Self {
        let depth = inner.len();
        let (row, col) = if a.col_stride == 1 { (padded(depth), 1) } else { (1, STRIP_ROWS) };
        let strips = Self { rows, data: to.as_ptr(), strip_len: STRIP_ROWS * padded(depth), row, col };
        let to = DisjointSliceMut::new(to);
        for_each(strips.count(), parallel, &|strip| {
            let rows = strips.strip(strip);
            let (first, count) = (strips.rows.start + rows.start, rows.len());
            let from = a.data[first * a.row_stride + inner.start * a.col_stride..].as_ptr();
            let (lines, len, stride, step) =
                if col == 1 { (count, depth, a.row_stride, row) } else { (depth, count, a.col_stride, col) };
            for line in 0..lines {
                // SAFETY: strips do not overlap, the dispatch has AVX-512, and `a` has the rows and the slab.
                unsafe {
                    widen_line(
                        from.add(line * stride),
                        to.range_mut(strip * strips.strip_len + line * step, len),
                    )
                };
            }
        });
        strips
    }

    fn count(&self) -> usize {
        self.rows.len().div_ceil(STRIP_ROWS)
    }

    /// The rows of a strip, counted from the first one of the block.
    fn strip(&self, index: usize) -> Range<usize> {
        index * STRIP_ROWS..self.rows.len().min((index + 1) * STRIP_ROWS)
    }
}

/// Columns of `b` as panels of up to [`PANEL_COLUMNS`], one after another, each row by row and zero-padded to whole
/// vectors.
struct Panels {
    columns: Range<usize>,
    depth: usize,
}

impl Panels {
    fn vectors(&self) -> usize {
        self.columns.len().div_ceil(LANES)
    }

    fn count(&self) -> usize {
        self.vectors().div_ceil(PANEL_VECTORS)
    }

    /// The vectors of panel `w`.
    fn panel(&self, w: usize) -> Range<usize> {
        self.vectors() * w / self.count()..self.vectors() * (w + 1) / self.count()
    }

    /// Widens rows `from` on of these columns of `b` into `to`.
    fn pack<E: AmxElem>(&self, b: MatView<E>, from: usize, parallel: bool, to: &mut [f32]) {
        let to = DisjointSliceMut::new(&mut to[..self.vectors() * LANES * self.depth]);
        let blocks = self.depth.div_ceil(PANEL_K);
        for_each(self.count() * blocks, parallel, &|task| {
            let (panel, block) = (self.panel(task / blocks), task % blocks);
            let rows = block * PANEL_K..self.depth.min((block + 1) * PANEL_K);
            let first = self.columns.start + panel.start * LANES;
            let (width, columns) = (panel.len() * LANES, (panel.len() * LANES).min(self.columns.end - first));
            let at = panel.start * LANES * self.depth + rows.start * width;
            let from = &b.data[(from + rows.start) * b.row_stride + first * b.col_stride..];
            // SAFETY: no two tasks have rows of a panel in common, the dispatch has AVX-512, and `b` has the rows and
            // columns.
            unsafe {
                let to = to.range_mut(at, rows.len() * width).as_mut_ptr();
                pack(from.as_ptr(), (b.row_stride, b.col_stride), rows.len(), columns, to);
            }
        });
    }
}

/// A block of the result: the rows of all strips, and the columns of all panels.
struct Block<'a, O> {
    a: Strips,
    b: *const f32,
    panels: &'a Panels,
    out: &'a DisjointSliceMut<'a, O>,
    stride: usize,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<'a, O>>,
}

// SAFETY: operands are only read, and no two strips have a value of the result in common.
unsafe impl<O: Sync + Send> Sync for Block<'_, O> {}

/// The sums of a strip in the columns of a panel.
#[repr(C, align(64))]
struct Sums([[f32; PANEL_COLUMNS]; STRIP_ROWS]);

impl<O: AmxElem> Block<'_, O> {
    /// Computes the block in strips of rows, and in groups of panels where strips are too few for all threads.
    fn compute_all(&self, parallel: bool) {
        let (strips, panels) = (self.a.count(), self.panels.count());
        let wanted = if parallel { 16 * threads() } else { 1 };
        let groups = wanted.div_ceil(strips).min(panels);
        for_each(strips * groups, parallel, &|task| {
            let (strip, group) = (task / groups, task % groups);
            for w in panels * group / groups..panels * (group + 1) / groups {
                // SAFETY: the caller of `gemm` upholds its contract.
                unsafe { self.compute(strip, w) };
            }
        });
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn compute(&self, strip: usize, w: usize) {
        let (rows, vectors, depth) = (self.a.strip(strip), self.panels.panel(w), self.panels.depth);
        let width = vectors.len() * LANES;
        let first = self.panels.columns.start + vectors.start * LANES;
        let columns = first..self.panels.columns.end.min(first + width);
        let mut sums = std::mem::MaybeUninit::<Sums>::uninit();
        let sums = sums.as_mut_ptr().cast::<f32>();
        // SAFETY: the caller's contract; rows and columns lie inside the blocks, and `sums` has room for both.
        unsafe {
            let a = self.a.data.add(strip * self.a.strip_len);
            let b = self.b.add(vectors.start * LANES * depth);
            for from in (0..depth).step_by(PANEL_K) {
                let gemm = PanelGemm {
                    rows: rows.len(),
                    k: PANEL_K.min(depth - from),
                    a: a.add(from * self.a.col),
                    packed: b.add(from * width),
                    out: sums,
                    stride: PANEL_COLUMNS,
                    last_mask: !0,
                    accumulate: from > 0,
                };
                gemm.run(vectors.len(), self.a.row, self.a.col);
            }
            for i in 0..rows.len() {
                self.store(self.a.rows.start + rows.start + i, &columns, sums.add(i * PANEL_COLUMNS));
            }
        }
    }

    /// Writes the sums of a row in the given columns, after the epilogue.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store(&self, row: usize, columns: &Range<usize>, sums: *const f32) {
        let at = row * self.stride + columns.start;
        // SAFETY: no other strip has these values.
        let out = unsafe { self.out.range_mut(at, columns.len()) };
        for j in (0..columns.len()).step_by(LANES) {
            let mask = lane_mask(columns.len() - j);
            // SAFETY: the mask excludes what is beyond the columns, of which biases, residual and result have all.
            unsafe {
                let load = |all: &[O], at: usize| O::load(all[at..].as_ptr(), mask);
                let mut sum = _mm512_load_ps(sums.add(j));
                if self.accumulate {
                    sum = _mm512_add_ps(O::load(out.as_ptr().add(j), mask), sum);
                }
                if let Some(epilogue) = &self.epilogue {
                    if let Some(bias) = epilogue.bias {
                        sum = _mm512_add_ps(sum, load(bias, columns.start + j));
                    }
                    let (low, high) = epilogue.clamp.bounds::<f32>();
                    // With this operand order NaN propagates.
                    sum = _mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), sum));
                    if let Some(residual) = epilogue.residual {
                        sum = _mm512_add_ps(sum, load(residual, at + j));
                    }
                }
                O::store(out.as_mut_ptr().add(j), mask, sum);
            }
        }
    }
}
