//! Multithreaded AMX GEMMs of f32, bf16 and f16.
//!
//! One pass splits and packs the right operand for all threads, one slice of K at a time. A thread packs a few row
//! panels onto its stack and computes the tiles of these rows, each from the slice's first K index to its last. So no
//! value depends on which thread computed it or on how rows are distributed.

#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::cpu::{DisjointSliceMut, parallel_for, parallel_for_chunks};
use super::super::dispatch::{Dispatch, dispatch};
use super::super::im2col::ConvGeometry;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K, TileConfigGuard};
use super::avx512::{lane_mask, transpose_16x16};
use super::bf16_split::{AmxElem, Operand, StridedOperand};
use super::implicit_gemm::{FlippedWeight, MAX_LINE, PatchColumns, PatchRows};
use super::{ConvArgs, CpuEpilogue, MatView, Threading, Transposed};

/// Most tiles of a panel in one slice of K; twice as many if all rows fit in `FEW_ROW_PANELS` panels.
pub(super) const MAX_PANEL_TILES: usize = 48;
const FEW_ROW_PANELS: usize = 32;
/// Tiles of a panel processed at once, so that the packed operands stay in the L1 cache: 12 KiB of rows, 24 KiB of
/// columns.
const L1_TILES: usize = 12;
/// Most row panels a thread packs at once, half as many for long slices: 384 KiB, a fifth of an L2 cache.
const MAX_ROW_PANELS: usize = 8;
/// Column panels multiplied with each row panel in turn, and the columns of their sums.
const COLUMN_PANELS: usize = 2;
const SUMS_COLUMNS: usize = COLUMN_PANELS * TILE_DIM;
/// Smallest M, N and K that pay for the packing.
const MIN_DIM: usize = 48;

/// Bytes of stack that [`GemmSlice::compute`] takes, with the line of a patch that it packs. A function touches every
/// page of so large a frame when it is entered, however small the GEMM is.
pub(super) const STACK_BYTES: usize = MAX_ROW_PANELS * MAX_PANEL_TILES * TILE_BYTES
    + 2 * size_of::<PanelAccumulators>()
    + MAX_LINE * size_of::<f32>();

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Tile([u8; TILE_BYTES]);

/// The sums of the current panels, row by row.
#[repr(C, align(64))]
struct PanelAccumulators([[[f32; SUMS_COLUMNS]; TILE_DIM]; MAX_ROW_PANELS]);

impl PanelAccumulators {
    /// The sums of one panel.
    ///
    /// # Safety
    /// `panel` is less than [`MAX_ROW_PANELS`].
    unsafe fn panel(all: *mut Self, panel: usize) -> *mut f32 {
        // SAFETY: the caller keeps `panel` in bounds.
        unsafe { (&raw mut (*all).0).cast::<f32>().add(panel * TILE_DIM * SUMS_COLUMNS) }
    }
}

/// Whether AMX takes an (m, n) result over `k`. For f32: if it is large enough and tile padding does not dominate. For
/// half types: always, because any other kernel must first convert whole operands.
pub(super) fn supports<E: AmxElem>((m, k, n): (usize, usize, usize)) -> bool {
    let filled = |size: usize, to: usize| size.next_multiple_of(to) as f64 / size as f64;
    let large =
        || m.min(k).min(n) >= MIN_DIM && filled(m, TILE_DIM) * filled(k, TILE_K) * filled(n, TILE_DIM) < 1.3;
    dispatch() == Dispatch::Amx && k > 0 && (E::PARTS < 3 || large())
}

/// Slices of K. They depend on the sizes alone, because the sums are rounded to f32 at the end of each slice.
struct KSlices {
    /// K steps per slice.
    steps: usize,
    count: usize,
    /// Most row panels a thread packs.
    panels: usize,
}

impl KSlices {
    /// Slices for `m` rows and `k` values of `E`. A half-precision result (`narrow`) cannot hold partial sums between
    /// slices, so it gets a single slice if that is not too long.
    fn new<E: AmxElem>(m: usize, k: usize, narrow: bool) -> Self {
        let steps = k.div_ceil(TILE_K);
        let most = MAX_PANEL_TILES / E::PARTS;
        let longer = if m <= FEW_ROW_PANELS * TILE_DIM || narrow && (most + 1..=2 * most).contains(&steps) {
            2
        } else {
            1
        };
        // Not slices of equal length: where one more is needed all would be shorter, and fewer samples, which are the K
        // of a weight gradient, would need more memory.
        let (most, count) = (most * longer, steps.div_ceil(most * longer));
        Self { steps: steps.min(most), count, panels: MAX_ROW_PANELS / longer }
    }

    /// Bytes of a packed operand with `columns` columns.
    fn packed_bytes<E: AmxElem>(&self, columns: usize) -> usize {
        self.steps * columns.div_ceil(TILE_DIM) * E::PARTS * TILE_BYTES
    }

    /// Bytes of the f32 sums kept between slices for an (m, n) result.
    fn partial_sum_bytes(&self, m: usize, n: usize, narrow: bool) -> usize {
        if narrow && self.count > 1 { m * n * size_of::<f32>() } else { 0 }
    }
}

/// Whether `O` is too narrow to hold f32 partial sums.
fn is_half_precision<O: AmxElem>() -> bool {
    O::PARTS < 3
}

/// Bytes [`gemm`] allocates, over all threads, for an (m, n) result of `O` over `k` values of `E`.
pub(super) fn gemm_workspace<E: AmxElem, O: AmxElem>(
    (m, k, n): (usize, usize, usize),
    transposed: Transposed,
) -> usize {
    let bytes = |rows: usize, columns: usize| {
        let slices = KSlices::new::<E>(rows, k, is_half_precision::<O>());
        slices.packed_bytes::<E>(columns) + slices.partial_sum_bytes(m, n, is_half_precision::<O>())
    };
    match n > m {
        // A single row is contiguous either way, so that `gemm` cannot tell it from a transposed column.
        true if transposed.a && m == 1 => bytes(n, m).max(bytes(m, n)),
        true if transposed.a || transposed.b => bytes(n, m),
        _ => bytes(m, n),
    }
}

/// `out = a b`, or `out += a b` with `accumulate`, then `epilogue`. A result that is wider than tall is computed as its
/// transpose: all threads then read the smaller operand, and each multiplies it with several panels of the larger. Not
/// if both operands already have the layout that tiles need: they would have to be transposed.
///
/// # Safety
/// The dispatch is AMX, K is not 0, the operands lie inside their slices, `out` has room for every (i, j) at
/// `i * stride + j`, and a half-precision `out` does not accumulate.
pub(super) unsafe fn gemm<E: AmxElem, O: AmxElem>(
    out: &mut [O],
    stride: usize,
    a: MatView<E>,
    b: MatView<E>,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<O>>,
) {
    let transpose_output = b.cols > a.rows && (a.col_stride != 1 || b.row_stride == 1);
    let (a, b) = if transpose_output { (b.t(), a.t()) } else { (a, b) };
    let sizes = (a.rows, a.cols, b.cols);
    let a = StridedOperand {
        data: a.data.as_ptr(),
        count: a.rows,
        outer_stride: a.row_stride,
        inner_stride: a.col_stride,
    };
    let b = StridedOperand {
        data: b.data.as_ptr(),
        count: b.cols,
        outer_stride: b.col_stride,
        inner_stride: b.row_stride,
    };
    let options = GemmOptions {
        transpose_output,
        swap_operands: transpose_output && a.inner_stride != 1,
        accumulate,
        epilogue,
        threading: Threading::Parallel,
    };
    // SAFETY: the caller upholds the same contract.
    unsafe { gemm_operands(out, stride, (&a, &b), sizes, options) }
}

/// Half types take any number of channels; f32 those that tiles read without a copy.
fn takes_channels<E: AmxElem>(g: &ConvGeometry, multiple: usize) -> bool {
    g.groups == 1 && (E::PARTS < 3 || g.in_channels.is_multiple_of(multiple))
}

/// Whether AMX takes a convolution of `batch` images.
pub(super) fn supports_conv<E: AmxElem>(g: &ConvGeometry, batch: usize) -> bool {
    takes_channels::<E>(g, TILE_K)
        && supports::<E>((batch * g.output_pixels(), g.patch_len(), g.out_channels))
}

/// Bytes [`conv`] allocates, over all threads.
pub(super) fn conv_workspace<E: AmxElem>(g: &ConvGeometry, batch: usize) -> usize {
    let rows = batch * g.output_pixels();
    let slices = KSlices::new::<E>(rows, g.patch_len(), is_half_precision::<E>());
    slices.packed_bytes::<E>(g.out_channels)
        + slices.partial_sum_bytes(rows, g.out_channels, is_half_precision::<E>())
}

/// Whether AMX takes the weight gradient of a convolution of `batch` images.
pub(super) fn supports_conv_weight_gradient<E: AmxElem>(g: &ConvGeometry, batch: usize) -> bool {
    takes_channels::<E>(g, TILE_DIM)
        && supports::<E>((g.patch_len(), batch * g.output_pixels(), g.out_channels))
}

/// Bytes a thread packs for that weight gradient.
pub(super) fn conv_weight_gradient_workspace<E: AmxElem>(g: &ConvGeometry, batch: usize) -> usize {
    KSlices::new::<E>(g.patch_len(), batch * g.output_pixels(), false).packed_bytes::<E>(g.out_channels)
}

/// Accumulates the weight gradient of a convolution in the calling thread; `d` is the output gradient.
///
/// # Safety
/// [`supports_conv_weight_gradient`] holds, and the slices have the lengths that the geometry implies.
pub(super) unsafe fn conv_weight_gradient<E: AmxElem>(
    dweight: &mut [f32],
    g: &ConvGeometry,
    images: &[E],
    d: &[E],
) {
    let windows = PatchRows::new(g, images);
    let sizes = (g.patch_len(), windows.count(), g.out_channels);
    let d = StridedOperand {
        data: d.as_ptr(),
        count: g.out_channels,
        outer_stride: 1,
        inner_stride: g.out_channels,
    };
    let options = GemmOptions {
        transpose_output: true,
        swap_operands: true,
        accumulate: true,
        epilogue: None,
        threading: Threading::Serial,
    };
    // SAFETY: the caller's contract covers that of `gemm_operands`.
    unsafe { gemm_operands(dweight, g.patch_len(), (&PatchColumns(windows), &d), sizes, options) }
}

/// Computes a convolution as an implicit GEMM.
///
/// # Safety
/// [`supports_conv`] holds, and the slices have the lengths that the geometry implies.
pub(super) unsafe fn conv<E: AmxElem>(out: &mut [E], args: ConvArgs<E>) {
    let ConvArgs { g, images, weight, input_gradient, epilogue } = args;
    let (windows, n) = (PatchRows::new(g, images), g.out_channels);
    let sizes = (windows.count(), g.patch_len(), n);
    let options = GemmOptions {
        transpose_output: false,
        swap_operands: false,
        accumulate: false,
        epilogue: Some(epilogue),
        threading: Threading::Parallel,
    };
    // SAFETY: the caller's contract covers that of `gemm_operands`.
    unsafe {
        if input_gradient {
            let weight =
                FlippedWeight { weight, count: n, kernel_area: g.kernel_area(), channels: g.in_channels };
            gemm_operands(out, n, (&windows, &weight), sizes, options)
        } else {
            let weight = StridedOperand {
                data: weight.as_ptr(),
                count: n,
                outer_stride: g.patch_len(),
                inner_stride: 1,
            };
            gemm_operands(out, n, (&windows, &weight), sizes, options)
        }
    }
}

/// How the GEMM of two operands runs.
#[derive(Clone, Copy)]
struct GemmOptions<'a, O> {
    /// The result is stored as the transpose of what the tiles compute.
    transpose_output: bool,
    /// AMX receives the operands in swapped order, so that its tiles are those of the transpose. Where neither operand
    /// is contiguous along K, only the smaller one then needs a transpose.
    swap_operands: bool,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<'a, O>>,
    threading: Threading,
}

/// Like [`gemm`], for the rows of `a` and the columns of `b`.
unsafe fn gemm_operands<A: Operand, O: AmxElem>(
    out: &mut [O],
    stride: usize,
    (a, b): (&A, &impl Operand<Value = A::Value>),
    (m, k, n): (usize, usize, usize),
    options: GemmOptions<O>,
) {
    let slices = KSlices::new::<A::Value>(m, k, is_half_precision::<O>());
    let panel_tiles = slices.steps * A::Value::PARTS;
    let (rows, columns) = (m.div_ceil(TILE_DIM), n.div_ceil(TILE_DIM));
    let mut packed = Vec::<MaybeUninit<Tile>>::with_capacity(columns * panel_tiles);
    // SAFETY: the capacity suffices, and `MaybeUninit` needs no initialization.
    unsafe { packed.set_len(columns * panel_tiles) };
    let mut partial_sums = super::super::cpu::uninit::<f32>(
        slices.partial_sum_bytes(m, n, is_half_precision::<O>()) / size_of::<f32>(),
    );
    // A few tasks per thread; they split only rows if there are enough of them.
    let wanted = if options.threading == Threading::Parallel { 4 * rayon::current_num_threads() } else { 1 };
    let panels_per_task = rows.div_ceil(wanted).clamp(1, slices.panels);
    let column_tasks = (wanted / rows.div_ceil(panels_per_task)).clamp(1, columns.div_ceil(8));
    let (out, partial_sums) = (DisjointSliceMut::new(out), DisjointSliceMut::new(&mut partial_sums));
    for slice in 0..slices.count {
        let from = slice * slices.steps * TILE_K;
        let inner = from..k.min(from + slices.steps * TILE_K);
        let pack = |(i, to): (usize, &mut [MaybeUninit<Tile>])| {
            // SAFETY: the caller upholds the contract; a packed panel has room for the steps of a slice.
            unsafe { b.pack(i * TILE_DIM, inner.clone(), !options.swap_operands, to.as_mut_ptr().cast()) }
        };
        match options.threading {
            Threading::Parallel => parallel_for_chunks(&mut packed, panel_tiles, |i, to| pack((i, to))),
            Threading::Serial => packed.chunks_mut(panel_tiles).enumerate().for_each(pack),
        }
        let is_last = slice + 1 == slices.count;
        let gemm_slice = GemmSlice {
            a,
            rows: m,
            inner: inner.clone(),
            packed: &packed,
            panel_tiles,
            out: &out,
            stride,
            partial_sums: (is_half_precision::<O>() && slices.count > 1).then_some(&partial_sums),
            is_last,
            columns: n,
            options: GemmOptions {
                accumulate: options.accumulate || slice > 0,
                epilogue: options.epilogue.filter(|_| is_last),
                ..options
            },
        };
        let run_task = |task: usize| {
            let (i, j) = (task / column_tasks, task % column_tasks);
            let rows = i * panels_per_task..rows.min((i + 1) * panels_per_task);
            // SAFETY: the caller upholds the contract, and no two tasks share both a row panel and a column panel.
            unsafe { gemm_slice.compute(rows, columns * j / column_tasks..columns * (j + 1) / column_tasks) }
        };
        let tasks = rows.div_ceil(panels_per_task) * column_tasks;
        match options.threading {
            Threading::Parallel => parallel_for(tasks, &run_task),
            Threading::Serial => (0..tasks).for_each(run_task),
        }
    }
}

/// What a thread needs to compute one K slice of a GEMM.
struct GemmSlice<'a, A, O> {
    a: &'a A,
    rows: usize,
    /// The range of K.
    inner: Range<usize>,
    /// The packed right operand, panel after panel of `panel_tiles` tiles.
    packed: &'a [MaybeUninit<Tile>],
    panel_tiles: usize,
    out: &'a DisjointSliceMut<'a, O>,
    stride: usize,
    /// The sums between slices if `out` cannot hold them: the layout of the result, without padding.
    partial_sums: Option<&'a DisjointSliceMut<'a, f32>>,
    /// This is the last slice.
    is_last: bool,
    /// Columns of the computed matrix.
    columns: usize,
    options: GemmOptions<'a, O>,
}

impl<A: Operand, O: AmxElem> GemmSlice<'_, A, O> {
    const PARTS: usize = A::Value::PARTS;

    /// Computes the results of at most [`MAX_ROW_PANELS`] row panels and the given column panels.
    unsafe fn compute(&self, rows: Range<usize>, columns: Range<usize>) {
        let tiles = self.inner.len().div_ceil(TILE_K) * Self::PARTS;
        let mut panels = MaybeUninit::<[Tile; MAX_ROW_PANELS * MAX_PANEL_TILES]>::uninit();
        let mut sums = MaybeUninit::<[PanelAccumulators; 2]>::uninit();
        let (panels, sums) =
            (panels.as_mut_ptr().cast::<Tile>(), sums.as_mut_ptr().cast::<PanelAccumulators>());
        let mut last_sums = sums;
        // SAFETY: the contract of `gemm`; `panels` and `sums` have room for this many row panels.
        unsafe {
            for (i, row) in rows.clone().enumerate() {
                let to = panels.add(i * tiles).cast();
                self.a.pack(row * TILE_DIM, self.inner.clone(), self.options.swap_operands, to);
            }
            let amx = TileConfigGuard::new();
            let mut pending = None;
            for (iteration, column) in columns.clone().step_by(COLUMN_PANELS).enumerate() {
                let (current, previous) = (sums.add(iteration % 2), sums.add((iteration + 1) % 2));
                let pair = column..columns.end.min(column + COLUMN_PANELS);
                let span = pair.start * TILE_DIM..self.columns.min(pair.end * TILE_DIM);
                for first_tile in (0..tiles).step_by(L1_TILES) {
                    let steps = L1_TILES.min(tiles - first_tile) / Self::PARTS;
                    for (i, row) in rows.clone().enumerate() {
                        let a = panels.add(i * tiles + first_tile).cast_const().cast();
                        for (at, column) in pair.clone().enumerate() {
                            let b = self.packed.as_ptr().add(column * self.panel_tiles + first_tile).cast();
                            let (a, b) = if self.options.swap_operands { (b, a) } else { (a, b) };
                            let sums = PanelAccumulators::panel(current, i).add(at * TILE_DIM);
                            match Self::PARTS {
                                1 => amx.multiply_panels::<1>(
                                    a,
                                    b,
                                    steps,
                                    sums,
                                    4 * SUMS_COLUMNS,
                                    first_tile > 0,
                                ),
                                2 => amx.multiply_panels::<2>(
                                    a,
                                    b,
                                    steps,
                                    sums,
                                    4 * SUMS_COLUMNS,
                                    first_tile > 0,
                                ),
                                _ => amx.multiply_panels::<3>(
                                    a,
                                    b,
                                    steps,
                                    sums,
                                    4 * SUMS_COLUMNS,
                                    first_tile > 0,
                                ),
                            }
                        }
                        // While AMX works, store the previous sums and prefetch the output of the current ones.
                        if first_tile == 0 {
                            self.prefetch_output(row, &span);
                            if let Some(pending) = &pending {
                                self.store(PanelAccumulators::panel(previous, i), row, pending);
                            }
                        }
                    }
                }
                (pending, last_sums) = (Some(span), current);
            }
            if let Some(pending) = &pending {
                rows.enumerate()
                    .for_each(|(i, row)| self.store(PanelAccumulators::panel(last_sums, i), row, pending));
            }
        }
    }

    /// Prefetches what [`GemmSlice::store`] will read and write; hardware prefetchers do not predict these addresses.
    fn prefetch_output(&self, panel: usize, columns: &Range<usize>) {
        let residual = self.options.epilogue.and_then(|then| then.residual);
        let rows = panel * TILE_DIM..self.rows.min((panel + 1) * TILE_DIM);
        let (rows, columns) = if self.options.transpose_output { (columns, &rows) } else { (&rows, columns) };
        for row in rows.clone() {
            let at = row * self.stride + columns.start;
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

    /// Writes the sums of a row panel in the given columns, after the epilogue.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(&self, sums: *const f32, panel: usize, columns: &Range<usize>) {
        // SAFETY: the caller upholds the same contract.
        unsafe {
            match &self.options.epilogue {
                None => self.store_tiles::<false>(sums, panel, columns, &CpuEpilogue::NONE),
                Some(epilogue) => self.store_tiles::<true>(sums, panel, columns, epilogue),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store_tiles<const EPILOGUE: bool>(
        &self,
        sums: *const f32,
        panel: usize,
        columns: &Range<usize>,
        epilogue: &CpuEpilogue<O>,
    ) {
        let rows = panel * TILE_DIM..self.rows.min((panel + 1) * TILE_DIM);
        for (v, first) in columns.clone().step_by(TILE_DIM).enumerate() {
            let columns = first..columns.end.min(first + TILE_DIM);
            // SAFETY: `sums` holds every row and column of a tile; those outside the result are not stored.
            unsafe {
                let line = |i: usize| _mm512_load_ps(sums.add(i * SUMS_COLUMNS + v * TILE_DIM));
                if self.options.swap_operands {
                    self.store_rows::<EPILOGUE>(line, columns, &rows, epilogue);
                } else if self.options.transpose_output {
                    let mut lines = [_mm512_setzero_ps(); TILE_DIM];
                    (0..TILE_DIM).for_each(|i| lines[i] = line(i));
                    let lines = transpose_16x16(lines);
                    self.store_rows::<EPILOGUE>(|i| lines[i], columns, &rows, epilogue);
                } else {
                    self.store_rows::<EPILOGUE>(line, rows.clone(), &columns, epilogue);
                }
            }
        }
    }

    /// Writes one vector of sums to each of the given rows, in at most [`TILE_DIM`] columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store_rows<const EPILOGUE: bool>(
        &self,
        line: impl Fn(usize) -> __m512,
        rows: Range<usize>,
        columns: &Range<usize>,
        epilogue: &CpuEpilogue<O>,
    ) {
        let mask = lane_mask(columns.len());
        let (low, high) = epilogue.clamp.bounds::<f32>();
        let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
        // SAFETY: the slice has as many values as the mask selects.
        let load = |all: &[O], at: usize| unsafe { O::load(all[at..][..columns.len()].as_ptr(), mask) };
        let bias = epilogue.bias.map(|bias| load(bias, columns.start));
        let width = if self.options.transpose_output { self.rows } else { self.columns };
        for (i, row) in rows.enumerate() {
            let at = row * self.stride + columns.start;
            let mut sum = line(i);
            // SAFETY: only this task writes these columns of the row.
            unsafe {
                if let Some(partial_sums) = self.partial_sums {
                    let partial =
                        partial_sums.range_mut(row * width + columns.start, columns.len()).as_mut_ptr();
                    if self.options.accumulate {
                        sum = _mm512_add_ps(f32::load(partial, mask), sum);
                    }
                    if !self.is_last {
                        f32::store(partial, mask, sum);
                        continue;
                    }
                }
                let to = self.out.range_mut(at, columns.len()).as_mut_ptr();
                if self.options.accumulate && self.partial_sums.is_none() {
                    sum = _mm512_add_ps(O::load(to, mask), sum);
                }
                if EPILOGUE {
                    if let Some(bias) = bias {
                        sum = _mm512_add_ps(sum, bias);
                    }
                    // With this operand order NaN propagates.
                    sum = _mm512_min_ps(high, _mm512_max_ps(low, sum));
                    if let Some(residual) = epilogue.residual {
                        sum = _mm512_add_ps(sum, load(residual, at));
                    }
                }
                O::store(to, mask, sum);
            }
        }
    }
}
