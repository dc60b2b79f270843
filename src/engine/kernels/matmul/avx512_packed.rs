//! GEMMs of f32, bf16 and f16 on AVX-512, on all threads. Blocks of half-precision operands are widened to f32 where
//! they are packed, and sums are rounded while they are in cache: no operand or result is written to memory in f32.
//! Rows of f32 are read, and sums of f32 written, where they are.
//!
//! A sum runs over K in order, from slab to slab, so a value depends neither on its neighbors nor on the threads.

#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::ops::Range;

use super::avx512::{LANES, PANEL_K, PANEL_VECTORS, PackedPanel, PanelGemm, lane_mask, pack};
use super::bf16_split::AmxElem;
use super::{CpuEpilogue, MatView};
use crate::kernels::cpu::{DisjointSliceMut, parallel_for, threads, uninit};

/// Longest slab of K. A half-precision result of a longer K is summed in f32 by the caller.
const MAX_DEPTH: usize = 2048;
/// Most values of a block of either operand: 4 MiB in f32.
const MAX_BLOCK: usize = 1 << 20;
/// Rows that are multiplied with one panel after another: at most 387 KiB, a third of an L2 cache.
const STRIP_ROWS: usize = 48;
/// Most values of the panels that strip after strip is multiplied with: half a MiB, half of an L2 cache.
const GROUP_VALUES: usize = 1 << 17;
const PANEL_COLUMNS: usize = PANEL_VECTORS * LANES;
/// Most rows of a result whose panels are packed by the task that multiplies them, on its stack: packed in memory, they
/// would be read too few times to pay for the writing.
const FEW_ROWS: usize = 8 * STRIP_ROWS;
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

/// Whether values of this type are f32, which needs no conversion.
fn is_f32<E: AmxElem>() -> bool {
    E::PARTS == 3
}

/// The values of a block of `a`, and of what there is for each column: its packed values, or the half-precision sums of
/// few rows. Fewer rows never need more.
fn block_lens<E: AmxElem, O: AmxElem>(
    (m, depth, n): (usize, usize, usize),
    transposed_a: bool,
) -> (usize, usize) {
    let a = (padded(depth) * m.next_multiple_of(STRIP_ROWS)).min(MAX_BLOCK);
    let few_lines = if is_f32::<O>() { 0 } else { m };
    let lines = if m <= FEW_ROWS { few_lines } else { depth.max(FEW_ROWS) };
    let columns = (lines * n.next_multiple_of(LANES)).min(MAX_BLOCK) + ALIGNMENT;
    (if is_f32::<E>() && !transposed_a { 0 } else { a }, columns)
}

/// Bytes that [`gemm`] allocates for an (m, n) result over `k`.
pub(super) fn workspace<E: AmxElem, O: AmxElem>(
    (m, k, n): (usize, usize, usize),
    transposed_a: bool,
) -> usize {
    let (a, columns) = block_lens::<E, O>((m, k.min(MAX_DEPTH), n), transposed_a);
    (a + columns) * size_of::<f32>()
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
    let few = m <= FEW_ROWS;
    // Whole tasks, and whole panels.
    let rows = MAX_BLOCK / padded(depth) / STRIP_ROWS * STRIP_ROWS;
    let columns = MAX_BLOCK / if few { m } else { depth } / PANEL_COLUMNS * PANEL_COLUMNS;
    let (a_len, columns_len) = block_lens::<E, O>((m, depth, n), a.col_stride != 1);
    let (mut a_block, mut column_block) = (uninit::<f32>(a_len), uninit::<f32>(columns_len));
    let aligned = column_block.as_ptr().align_offset(LANES * size_of::<f32>());
    let column_block = &mut column_block[aligned..];
    let out = DisjointSliceMut::new(out);
    for from in (0..k).step_by(depth) {
        let inner = from..k.min(from + depth);
        let mut kept = None;
        for first in (0..n).step_by(columns) {
            let panels = Panels { columns: first..n.min(first + columns), depth: inner.len() };
            if !few {
                panels.pack(b, from, parallel, column_block);
            }
            for top in (0..m).step_by(rows) {
                let strips = match kept.take() {
                    Some(strips) if m <= rows => strips,
                    _ => Strips::widen(a, (top..m.min(top + rows), inner.clone()), parallel, &mut a_block),
                };
                let block = Block {
                    a: &strips,
                    panels: &panels,
                    out: &out,
                    stride,
                    accumulate: accumulate || from > 0,
                    epilogue: epilogue.filter(|_| inner.end == k),
                };
                if few {
                    block.compute_panels(b, from, parallel, column_block);
                } else {
                    block.compute_strips(parallel, column_block);
                }
                kept = Some(strips);
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
    /// These rows of `a`, in a slab of K: where they are, or widened into `to`.
    fn widen<E: AmxElem>(
        a: MatView<E>,
        (rows, inner): (Range<usize>, Range<usize>),
        parallel: bool,
        to: &mut [f32],
    ) -> Self {
        /// Lines of a task.
        const LINES: usize = 16;
        let (depth, row_stride, col_stride) = (inner.len(), a.row_stride, a.col_stride);
        if is_f32::<E>() && col_stride == 1 {
            let data = a.data[rows.start * row_stride + inner.start..].as_ptr().cast();
            return Self { rows, data, strip_len: STRIP_ROWS * row_stride, row: row_stride, col: 1 };
        }
        let (row, col) = if a.col_stride == 1 { (padded(depth), 1) } else { (1, STRIP_ROWS) };
        let strips = Self { rows, data: to.as_ptr(), strip_len: STRIP_ROWS * padded(depth), row, col };
        let to = DisjointSliceMut::new(to);
        // Lines as `a` has them: rows, or values of K.
        let lines = if col == 1 { strips.rows.len() } else { depth };
        let a = &a.data[strips.rows.start * a.row_stride + inner.start * a.col_stride..];
        let stride = if col == 1 { row_stride } else { col_stride };
        for_each(lines.div_ceil(LINES), parallel, &|task| {
            for line in task * LINES..lines.min((task + 1) * LINES) {
                let from = &a[line * stride..];
                let widen = |from: &[E], at: usize| {
                    // SAFETY: lines do not overlap, and the dispatch has AVX-512.
                    unsafe { widen_line(from.as_ptr(), to.range_mut(at, from.len())) }
                };
                if col == 1 {
                    let (strip, row) = (line / STRIP_ROWS, line % STRIP_ROWS);
                    widen(&from[..depth], strip * strips.strip_len + row * strips.row);
                    continue;
                }
                for strip in 0..strips.count() {
                    let rows = strips.strip(strip);
                    widen(&from[rows], strip * strips.strip_len + line * col);
                }
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

    /// Values of a packed row of panel `w`.
    fn width(&self, w: usize) -> usize {
        self.panel(w).len() * LANES
    }

    /// The columns of panel `w` in `b`.
    fn panel_columns(&self, w: usize) -> Range<usize> {
        let vectors = self.panel(w);
        let first = self.columns.start;
        first + vectors.start * LANES..self.columns.end.min(first + vectors.end * LANES)
    }

    /// Widens rows `from` on of these columns of `b` into `to`.
    fn pack<E: AmxElem>(&self, b: MatView<E>, from: usize, parallel: bool, to: &mut [f32]) {
        /// Rows of a task if they are contiguous: it reads long parts of a few of them.
        const FEW_ROWS: usize = 16;
        let to = DisjointSliceMut::new(&mut to[..self.vectors() * LANES * self.depth]);
        let (rows_per_task, panels_per_task) =
            if b.col_stride == 1 { (FEW_ROWS, self.count()) } else { (PANEL_K, 1) };
        let groups = self.count().div_ceil(panels_per_task);
        for_each(self.depth.div_ceil(rows_per_task) * groups, parallel, &|task| {
            let (chunk, group) = (task / groups, task % groups);
            let rows = chunk * rows_per_task..self.depth.min((chunk + 1) * rows_per_task);
            for w in group * panels_per_task..self.count().min((group + 1) * panels_per_task) {
                let (panel, columns) = (self.panel(w), self.panel_columns(w));
                let width = self.width(w);
                let at = panel.start * LANES * self.depth + rows.start * width;
                let from = &b.data[(from + rows.start) * b.row_stride + columns.start * b.col_stride..];
                // SAFETY: no two tasks have rows of a panel in common, the dispatch has AVX-512, and `b` has the rows
                // and columns.
                unsafe {
                    let to = to.range_mut(at, rows.len() * width).as_mut_ptr();
                    pack(from.as_ptr(), (b.row_stride, b.col_stride), rows.len(), columns.len(), to);
                }
            }
        });
    }
}

/// A block of the result: the rows of all strips, and the columns of all panels.
struct Block<'a, O> {
    a: &'a Strips,
    panels: &'a Panels,
    out: &'a DisjointSliceMut<'a, O>,
    stride: usize,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<'a, O>>,
}

/// The sums of a strip in the columns of a panel.
#[repr(C, align(64))]
struct Sums([[f32; PANEL_COLUMNS]; STRIP_ROWS]);

impl<O: AmxElem> Block<'_, O> {
    /// Computes the block from packed panels: all strips of rows with one group of panels after another. Groups stay in
    /// cache, and are smaller where strips are too few for all threads.
    fn compute_strips(&self, parallel: bool, packed: &[f32]) {
        let (strips, panels) = (self.a.count(), self.panels.count());
        let wanted = if parallel { 16 * threads() } else { 1 };
        let group_panels = (GROUP_VALUES / (PANEL_COLUMNS * self.panels.depth)).max(1);
        let groups = wanted.div_ceil(strips).max(panels.div_ceil(group_panels)).min(panels);
        for_each(strips * groups, parallel, &|task| {
            let (group, strip) = (task / strips, task % strips);
            let mut sums = std::mem::MaybeUninit::<Sums>::uninit();
            let sums = sums.as_mut_ptr().cast::<f32>();
            for w in panels * group / groups..panels * (group + 1) / groups {
                let packed = &packed[self.panels.panel(w).start * LANES * self.panels.depth..];
                for from in (0..self.panels.depth).step_by(PANEL_K) {
                    let packed = packed[from * self.panels.width(w)..].as_ptr();
                    // SAFETY: the caller of `gemm` upholds its contract, and there is room for the sums of a strip.
                    unsafe { self.multiply((strip, w), from, packed, sums) };
                }
                // SAFETY: as above; no other task has this strip and this panel.
                unsafe { self.store((strip, w), sums) };
            }
        });
    }

    /// Computes the block panel by panel: each is packed a part at a time and multiplied with all strips. `sums` has
    /// room for those of all rows and columns, if the result is not f32.
    fn compute_panels<E: AmxElem>(&self, b: MatView<E>, from: usize, parallel: bool, sums: &mut [f32]) {
        let (rows, depth) = (self.a.rows.len(), self.panels.depth);
        let sums = DisjointSliceMut::new(sums);
        for_each(self.panels.count(), parallel, &|w| {
            let (width, columns) = (self.panels.width(w), self.panels.panel_columns(w));
            // No two panels have columns in common.
            let first = self.panels.panel(w).start * LANES * rows;
            let strip_sums = |strip: usize| sums.ptr_at(first + strip * STRIP_ROWS * width).cast_mut();
            let mut packed = std::mem::MaybeUninit::<PackedPanel>::uninit();
            let packed = packed.as_mut_ptr().cast::<f32>();
            for part in (0..depth).step_by(PANEL_K) {
                let at = (from + part) * b.row_stride + columns.start * b.col_stride;
                let (b_part, strides) = (b.data[at..].as_ptr(), (b.row_stride, b.col_stride));
                // SAFETY: the caller of `gemm` upholds its contract, and there is room for a part of a panel.
                unsafe { pack(b_part, strides, PANEL_K.min(depth - part), columns.len(), packed) };
                for strip in 0..self.a.count() {
                    // SAFETY: as above.
                    unsafe { self.multiply((strip, w), part, packed, strip_sums(strip)) };
                }
            }
            for strip in 0..self.a.count() {
                // SAFETY: as above; no other task has this panel.
                unsafe { self.store((strip, w), strip_sums(strip)) };
            }
        });
    }

    /// Adds the products of a strip with the packed rows `from` on of a panel, at most [`PANEL_K`], to the f32 result,
    /// or to `sums`, or begins these.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn multiply(&self, (strip, w): (usize, usize), from: usize, packed: *const f32, sums: *mut f32) {
        let (depth, columns) = (self.panels.depth, self.panels.panel_columns(w));
        let (out, stride, last_mask, accumulate) = if is_f32::<O>() {
            let at = (self.a.rows.start + self.a.strip(strip).start) * self.stride + columns.start;
            let last = columns.len() - (self.panels.panel(w).len() - 1) * LANES;
            (self.out.ptr_at(at).cast_mut().cast(), self.stride, lane_mask(last), self.accumulate)
        } else {
            (sums, self.panels.width(w), !0, false)
        };
        if !is_f32::<O>() && from + PANEL_K >= depth {
            self.prefetch(self.a.strip(strip), columns);
        }
        // SAFETY: the caller's contract; the strip has all values of K.
        unsafe {
            let gemm = PanelGemm {
                rows: self.a.strip(strip).len(),
                k: PANEL_K.min(depth - from),
                a: self.a.data.add(strip * self.a.strip_len + from * self.a.col),
                packed,
                out,
                stride,
                last_mask,
                accumulate: accumulate || from > 0,
            };
            gemm.run(self.panels.panel(w).len(), self.a.row, self.a.col);
        }
    }

    /// Prefetches what [`Self::store`] will read and write; hardware prefetchers do not predict these addresses.
    fn prefetch(&self, rows: Range<usize>, columns: Range<usize>) {
        let residual = self.epilogue.and_then(|epilogue| epilogue.residual);
        for row in rows {
            let at = (self.a.rows.start + row) * self.stride + columns.start;
            for line in (at..at + columns.len()).step_by(64 / size_of::<O>()) {
                // SAFETY: a prefetch does not access memory architecturally.
                unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(self.out.ptr_at(line).cast());
                    if let Some(residual) = residual {
                        _mm_prefetch::<_MM_HINT_T0>(residual.as_ptr().wrapping_add(line).cast());
                    }
                }
            }
        }
    }

    /// Writes the sums of a strip in the columns of a panel, after the epilogue. Those of f32 are where they belong.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(&self, (strip, w): (usize, usize), sums: *const f32) {
        let columns = self.panels.panel_columns(w);
        for (i, row) in self.a.strip(strip).enumerate() {
            let row = self.a.rows.start + row;
            // SAFETY: the caller's contract.
            unsafe {
                if !is_f32::<O>() {
                    self.store_row(row, &columns, sums.add(i * self.panels.width(w)));
                } else if self.epilogue.is_some() {
                    self.store_row(row, &columns, self.out.ptr_at(row * self.stride + columns.start).cast());
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store_row(&self, row: usize, columns: &Range<usize>, sums: *const f32) {
        let at = row * self.stride + columns.start;
        // SAFETY: no other strip has these values.
        let out = unsafe { self.out.range_mut(at, columns.len()) };
        for j in (0..columns.len()).step_by(LANES) {
            let mask = lane_mask(columns.len() - j);
            // SAFETY: the mask excludes what is beyond the columns, of which biases, residual and result have all.
            unsafe {
                let load = |all: &[O], at: usize| O::load(all[at..].as_ptr(), mask);
                let mut sum = f32::load(sums.add(j), mask);
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
