//! GEMMs on all threads whose operands are packed block by block. Blocks of half-precision operands are widened where
//! they are packed, and sums are rounded while they are in cache: no operand or result is written to memory in f32.
//! Rows that need no conversion are read, and sums that need none written, where they are.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::panel::{MAX_COLUMNS, MAX_LANES, PANEL_K, PackedPanel, PanelGemm, PanelKernel, RowEpilogue};
use super::{CpuEpilogue, MatView};
use crate::kernels::cpu::{DisjointSliceMut, parallel_for, threads, uninit};
use crate::kernels::{Elem, Real};

/// Longest slab of K. A half-precision result of a longer K is summed in f32 by the caller.
pub(super) const MAX_DEPTH: usize = 2048;
/// Most values of a block of either operand: 4 MiB in f32.
pub(super) const MAX_BLOCK: usize = 1 << 20;
/// Rows that are multiplied with one panel after another: at most 387 KiB, a third of an L2 cache.
const STRIP_ROWS: usize = 48;
/// Most values of the panels that strip after strip is multiplied with: half a MiB, half of an L2 cache.
const GROUP_VALUES: usize = 1 << 17;
/// Most rows of a result whose panels are packed by the task that multiplies them, on its stack: packed in memory, they
/// would be read too few times to pay for the writing.
pub(super) const FEW_ROWS: usize = 8 * STRIP_ROWS;
/// Multiplications below which one thread is faster than handing out work.
const SERIAL_MULTIPLIES: usize = 1 << 20;
/// Bytes to which panels are aligned, and values by which their block is therefore larger.
const ALIGNMENT: usize = 64;
const ALIGNMENT_VALUES: usize = ALIGNMENT / size_of::<f32>();
/// Values between the ends of the rows of a strip: at a power of two they would share the sets of the caches.
const ROW_GAP: usize = 16;

/// Whether a half-precision result over `k` is rounded as it is computed.
pub(super) fn rounds(k: usize) -> bool {
    k <= MAX_DEPTH
}

/// Whether values of this type need no conversion.
fn is_acc<E: Elem>() -> bool {
    size_of::<E>() == size_of::<E::Acc>()
}

/// The values of a block of `a`, and of what there is for each column: its packed values, or the sums of few rows, if
/// the result is converted. Fewer rows never need more.
fn block_lens((m, depth, n): (usize, usize, usize), copies_a: bool, converts_out: bool) -> (usize, usize) {
    let a = ((depth + ROW_GAP) * m.next_multiple_of(STRIP_ROWS)).min(MAX_BLOCK);
    let few_lines = if converts_out { m } else { 0 };
    let lines = if m <= FEW_ROWS { few_lines } else { depth.max(FEW_ROWS) };
    let columns = (lines * n.next_multiple_of(MAX_LANES)).min(MAX_BLOCK) + ALIGNMENT_VALUES;
    (if copies_a { a } else { 0 }, columns)
}

/// Values of the accumulator type that [`gemm`] allocates for an (m, n) result over `k`. `copies_a`: `a` is a transpose
/// or converted.
pub(super) fn workspace((m, k, n): (usize, usize, usize), copies_a: bool, converts_out: bool) -> usize {
    let (a, columns) = block_lens((m, k.min(MAX_DEPTH), n), copies_a, converts_out);
    a + columns
}

/// `out = a b`, or `out += a b` with `accumulate`, then `epilogue`.
///
/// # Safety
/// The dispatch has the instructions of `P`, K is not 0, the operands lie inside their slices, and `out` has room for
/// every (i, j) at `i * stride + j`. If `out` is half-precision, it does not accumulate, and [`rounds`] holds.
pub(super) unsafe fn gemm<E: Elem, O: Elem<Acc = E::Acc>, P: PanelKernel<E, O>>(
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
    let rows = MAX_BLOCK / (depth + ROW_GAP) / STRIP_ROWS * STRIP_ROWS;
    let columns = MAX_BLOCK / if few { m } else { depth } / P::PANEL_COLUMNS * P::PANEL_COLUMNS;
    let (a_len, columns_len) = block_lens((m, depth, n), !is_acc::<E>() || a.col_stride != 1, !is_acc::<O>());
    let (mut a_block, mut column_block) = (uninit::<E::Acc>(a_len), uninit::<E::Acc>(columns_len));
    let aligned = column_block.as_ptr().align_offset(ALIGNMENT);
    let column_block = &mut column_block[aligned..];
    let out = DisjointSliceMut::new(out);
    for from in (0..k).step_by(depth) {
        let inner = from..k.min(from + depth);
        let mut kept = None;
        for first in (0..n).step_by(columns) {
            let panels = Panels::<E, O, P>::new(first..n.min(first + columns), inner.len());
            if !few {
                panels.pack(b, from, parallel, column_block);
            }
            for top in (0..m).step_by(rows) {
                let strips = match kept.take() {
                    Some(strips) if m <= rows => strips,
                    _ => Strips::widen::<E, O, P>(
                        a,
                        (top..m.min(top + rows), inner.clone()),
                        parallel,
                        &mut a_block,
                    ),
                };
                let block = ResultBlock {
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

/// Calls `body` with every index below `count`, on all threads if `parallel`.
fn for_each(count: usize, parallel: bool, body: &(dyn Fn(usize) + Sync)) {
    if parallel { parallel_for(count, body) } else { (0..count).for_each(body) }
}

/// Rows of `a` in the accumulator type, one strip after another: value (i, p) of a strip is at `i * row + p * col`.
struct Strips<R> {
    rows: Range<usize>,
    data: *const R,
    strip_len: usize,
    row: usize,
    col: usize,
}

// SAFETY: the block is only read while it is shared.
unsafe impl<R: Real> Sync for Strips<R> {}

impl<R: Real> Strips<R> {
    /// These rows of `a`, in a slab of K: where they are, or widened into `to`.
    fn widen<E: Elem<Acc = R>, O: Elem<Acc = R>, P: PanelKernel<E, O>>(
        a: MatView<E>,
        (rows, inner): (Range<usize>, Range<usize>),
        parallel: bool,
        to: &mut [R],
    ) -> Self {
        /// Lines of a task.
        const LINES: usize = 16;
        let (depth, row_stride, col_stride) = (inner.len(), a.row_stride, a.col_stride);
        if is_acc::<E>() && col_stride == 1 {
            let data = a.data[rows.start * row_stride + inner.start..].as_ptr().cast();
            return Self { rows, data, strip_len: STRIP_ROWS * row_stride, row: row_stride, col: 1 };
        }
        let (row, col) = if a.col_stride == 1 { (depth + ROW_GAP, 1) } else { (1, STRIP_ROWS) };
        let strips = Self { rows, data: to.as_ptr(), strip_len: STRIP_ROWS * (depth + ROW_GAP), row, col };
        let to = DisjointSliceMut::new(to);
        // Lines as `a` has them: rows, or values of K.
        let lines = if col == 1 { strips.rows.len() } else { depth };
        let a = &a.data[strips.rows.start * a.row_stride + inner.start * a.col_stride..];
        let stride = if col == 1 { row_stride } else { col_stride };
        for_each(lines.div_ceil(LINES), parallel, &|task| {
            for line in task * LINES..lines.min((task + 1) * LINES) {
                let from = &a[line * stride..];
                let widen = |from: &[E], at: usize| {
                    // SAFETY: lines do not overlap, and the dispatch has the instructions of `P`.
                    unsafe { P::widen(from.as_ptr(), to.range_mut(at, from.len())) }
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

/// Columns of `b` as panels of up to [`PanelKernel::PANEL_COLUMNS`], one after another, each row by row and zero-padded
/// to whole vectors.
struct Panels<E, O, P> {
    columns: Range<usize>,
    depth: usize,
    kernel: PhantomData<fn(E, O, P)>,
}

impl<E: Elem, O: Elem<Acc = E::Acc>, P: PanelKernel<E, O>> Panels<E, O, P> {
    fn new(columns: Range<usize>, depth: usize) -> Self {
        Self { columns, depth, kernel: PhantomData }
    }

    fn vectors(&self) -> usize {
        self.columns.len().div_ceil(P::LANES)
    }

    fn count(&self) -> usize {
        self.columns.len().div_ceil(P::PANEL_COLUMNS)
    }

    /// The vectors of panel `w`.
    fn panel(&self, w: usize) -> Range<usize> {
        self.vectors() * w / self.count()..self.vectors() * (w + 1) / self.count()
    }

    /// Values of a packed row of panel `w`, and of all panels before it.
    fn width(&self, w: usize) -> usize {
        self.panel(w).len() * P::LANES
    }

    fn columns_before(&self, w: usize) -> usize {
        self.panel(w).start * P::LANES
    }

    /// The columns of panel `w` in `b`.
    fn panel_columns(&self, w: usize) -> Range<usize> {
        let first = self.columns.start + self.columns_before(w);
        first..self.columns.end.min(first + self.width(w))
    }

    /// Widens rows `from` on of these columns of `b` into `to`.
    fn pack(&self, b: MatView<E>, from: usize, parallel: bool, to: &mut [E::Acc]) {
        /// Rows of a task if they are contiguous: it reads long parts of a few of them.
        const FEW_ROWS: usize = 16;
        let to = DisjointSliceMut::new(&mut to[..self.vectors() * P::LANES * self.depth]);
        let (rows_per_task, panels_per_task) =
            if b.col_stride == 1 { (FEW_ROWS, self.count()) } else { (PANEL_K, 1) };
        let groups = self.count().div_ceil(panels_per_task);
        for_each(self.depth.div_ceil(rows_per_task) * groups, parallel, &|task| {
            let (chunk, group) = (task / groups, task % groups);
            let rows = chunk * rows_per_task..self.depth.min((chunk + 1) * rows_per_task);
            for w in group * panels_per_task..self.count().min((group + 1) * panels_per_task) {
                let (columns, width) = (self.panel_columns(w), self.width(w));
                let at = self.columns_before(w) * self.depth + rows.start * width;
                // SAFETY: no two tasks have rows of a panel in common, and `b` has the rows and columns.
                unsafe {
                    let to = to.range_mut(at, rows.len() * width).as_mut_ptr();
                    P::pack(
                        b.at(from + rows.start, columns.start),
                        b.strides(),
                        rows.len(),
                        columns.len(),
                        to,
                    );
                }
            }
        });
    }
}

/// A block of the result: the rows of all strips, and the columns of all panels.
struct ResultBlock<'a, E: Elem, O, P> {
    a: &'a Strips<E::Acc>,
    panels: &'a Panels<E, O, P>,
    out: &'a DisjointSliceMut<'a, O>,
    stride: usize,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<'a, O>>,
}

/// Room for the sums of a strip in the columns of a panel.
#[repr(C, align(64))]
struct Sums<R>([[R; MAX_COLUMNS]; STRIP_ROWS]);

impl<E: Elem, O: Elem<Acc = E::Acc>, P: PanelKernel<E, O>> ResultBlock<'_, E, O, P> {
    /// Computes the block from packed panels: all strips of rows with one group of panels after another. Groups stay in
    /// cache, and are smaller where strips are too few for all threads.
    fn compute_strips(&self, parallel: bool, packed: &[E::Acc]) {
        let (strips, panels) = (self.a.count(), self.panels.count());
        let wanted = if parallel { 16 * threads() } else { 1 };
        let group_panels = (GROUP_VALUES / (P::PANEL_COLUMNS * self.panels.depth)).max(1);
        let groups = wanted.div_ceil(strips).max(panels.div_ceil(group_panels)).min(panels);
        for_each(strips * groups, parallel, &|task| {
            let (group, strip) = (task / strips, task % strips);
            let mut sums = MaybeUninit::<Sums<E::Acc>>::uninit();
            let sums = sums.as_mut_ptr().cast::<E::Acc>();
            for w in panels * group / groups..panels * (group + 1) / groups {
                let packed = &packed[self.panels.columns_before(w) * self.panels.depth..];
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

    /// Computes the block some panels at a time: a part of each is packed and multiplied with all strips. `sums` has
    /// room for those of all rows and columns, if the result is not of the accumulator type.
    fn compute_panels(&self, b: MatView<E>, from: usize, parallel: bool, sums: &mut [E::Acc]) {
        let (rows, depth, panels_per_task) =
            (self.a.rows.len(), self.panels.depth, MAX_COLUMNS / P::PANEL_COLUMNS);
        let sums = DisjointSliceMut::new(sums);
        for_each(self.panels.count().div_ceil(panels_per_task), parallel, &|task| {
            let task_panels = task * panels_per_task..self.panels.count().min((task + 1) * panels_per_task);
            // No two panels have columns in common.
            let strip_sums = |strip: usize, w: usize| {
                let before = self.panels.columns_before(w) * rows + strip * STRIP_ROWS * self.panels.width(w);
                sums.ptr_at(before).cast_mut()
            };
            let mut packed = MaybeUninit::<PackedPanel<E::Acc>>::uninit();
            let packed = packed.as_mut_ptr().cast::<E::Acc>();
            let packed_panel =
                |w: usize| packed.wrapping_add((w - task_panels.start) * PANEL_K * P::PANEL_COLUMNS);
            for part in (0..depth).step_by(PANEL_K) {
                for w in task_panels.clone() {
                    let columns = self.panels.panel_columns(w);
                    let lines = PANEL_K.min(depth - part);
                    // SAFETY: the caller of `gemm` upholds its contract, and there is room for parts of the panels.
                    unsafe {
                        let b_part = b.at(from + part, columns.start);
                        P::pack(b_part, b.strides(), lines, columns.len(), packed_panel(w));
                    }
                }
                for strip in 0..self.a.count() {
                    for w in task_panels.clone() {
                        // SAFETY: as above.
                        unsafe { self.multiply((strip, w), part, packed_panel(w), strip_sums(strip, w)) };
                    }
                }
            }
            for strip in 0..self.a.count() {
                for w in task_panels.clone() {
                    // SAFETY: as above; no other task has this panel.
                    unsafe { self.store((strip, w), strip_sums(strip, w)) };
                }
            }
        });
    }

    /// Adds the products of a strip with the packed rows `from` on of a panel, at most [`PANEL_K`], to the result if it
    /// is of the accumulator type, or to `sums`, or begins these.
    unsafe fn multiply(
        &self,
        (strip, w): (usize, usize),
        from: usize,
        packed: *const E::Acc,
        sums: *mut E::Acc,
    ) {
        let (depth, columns) = (self.panels.depth, self.panels.panel_columns(w));
        let (out, stride, columns, accumulate) = if is_acc::<O>() {
            let at = (self.a.rows.start + self.a.strip(strip).start) * self.stride + columns.start;
            (self.out.ptr_at(at).cast_mut().cast(), self.stride, columns.len(), self.accumulate)
        } else {
            if from + PANEL_K >= depth {
                self.prefetch(self.a.strip(strip), columns);
            }
            (sums, self.panels.width(w), self.panels.width(w), false)
        };
        // SAFETY: the caller's contract; the strip has all values of K.
        unsafe {
            P::multiply(&PanelGemm {
                rows: self.a.strip(strip).len(),
                depth: PANEL_K.min(depth - from),
                columns,
                a: self.a.data.add(strip * self.a.strip_len + from * self.a.col),
                a_strides: (self.a.row, self.a.col),
                packed,
                out,
                stride,
                accumulate: accumulate || from > 0,
            });
        }
    }

    /// Prefetches what [`Self::store`] will read and write; hardware prefetchers do not predict these addresses.
    fn prefetch(&self, rows: Range<usize>, columns: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        for row in rows {
            use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
            let residual = self.epilogue.and_then(|epilogue| epilogue.residual);
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
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (rows, columns);
    }

    /// Writes the sums of a strip in the columns of a panel, after the epilogue. Those of the accumulator type are
    /// where they belong.
    unsafe fn store(&self, (strip, w): (usize, usize), sums: *const E::Acc) {
        if is_acc::<O>() && self.epilogue.is_none() {
            return;
        }
        let (columns, width) = (self.panels.panel_columns(w), self.panels.width(w));
        let mut row_sums = [E::Acc::ZERO; MAX_COLUMNS];
        for (i, row) in self.a.strip(strip).enumerate() {
            let at = (self.a.rows.start + row) * self.stride + columns.start;
            // SAFETY: the caller's contract; no other strip has these values.
            unsafe {
                let out = self.out.range_mut(at, columns.len());
                let sums = match O::as_acc(out) {
                    Some(values) => {
                        row_sums[..values.len()].copy_from_slice(values);
                        row_sums.as_ptr()
                    }
                    None => sums.add(i * width),
                };
                let epilogue = self
                    .epilogue
                    .map(|epilogue| RowEpilogue::new(epilogue, at, columns.start, columns.len()));
                P::store(sums, out, epilogue);
            }
        }
    }
}
