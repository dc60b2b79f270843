//! Products by AMX, which all threads share, of f32, bf16 and f16.
//!
//! The right operand is split and packed once for all threads, a slice of the inner sums at a time. A thread packs a few
//! panels of rows to its stack and makes the tiles of these rows, each from the slice's first inner sum to its last: no
//! value depends on who made it or on how the rows are shared out.

#[cfg(test)]
mod tests;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use super::super::cpu::DisjointSliceMut;
use super::super::dispatch::{Dispatch, dispatch};
use super::super::im2col::ConvGeometry;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K, TileConfigGuard};
use super::avx512::{lane_mask, transpose_16x16};
use super::bf16_split::{AmxElem, Operand, StridedOperand};
use super::implicit_gemm::{FlippedWeight, PatchColumns, PatchRows};
use super::{ConvArgs, CpuEpilogue, MatView, Threading};

/// Tiles of a panel in a slice of the inner sums, at most; twice as many where all rows are in so few panels.
const MAX_PANEL_TILES: usize = 48;
const FEW_ROW_PANELS: usize = 32;
/// Tiles of a panel whose steps are made at once, so that what is packed for them stays in the first-level cache: 12 KiB
/// of rows, 24 KiB of columns.
const L1_TILES: usize = 12;
/// Panels of rows that a thread packs at once, at most, half as many of long slices: 384 KiB, a fifth of a second-level
/// cache.
const MAX_ROW_PANELS: usize = 8;
/// Panels of columns that meet each of them in turn, and the columns of their sums.
const COLUMN_PANELS: usize = 2;
const SUMS_COLUMNS: usize = COLUMN_PANELS * TILE_DIM;
/// The fewest rows, columns and inner sums that are worth the packing.
const MIN_DIM: usize = 48;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Tile([u8; TILE_BYTES]);

/// The sums of the panels in hand, row after row.
#[repr(C, align(64))]
struct PanelAccumulators([[[f32; SUMS_COLUMNS]; TILE_DIM]; MAX_ROW_PANELS]);

impl PanelAccumulators {
    /// The sums of a panel.
    ///
    /// # Safety
    /// There are [`MAX_ROW_PANELS`] of them.
    unsafe fn panel(all: *mut Self, panel: usize) -> *mut f32 {
        // SAFETY: as promised.
        unsafe { (&raw mut (*all).0).cast::<f32>().add(panel * TILE_DIM * SUMS_COLUMNS) }
    }
}

/// Whether an (m, n) matrix over `k` is made here. Of f32 where it is large enough and not mostly what tiles are filled up
/// with. Narrower types always: any other way has to widen whole operands first.
pub(super) fn supports<E: AmxElem>((m, k, n): (usize, usize, usize)) -> bool {
    let filled = |size: usize, to: usize| size.next_multiple_of(to) as f64 / size as f64;
    let large =
        || m.min(k).min(n) >= MIN_DIM && filled(m, TILE_DIM) * filled(k, TILE_K) * filled(n, TILE_DIM) < 1.3;
    dispatch() == Dispatch::Amx && k > 0 && (E::PARTS < 3 || large())
}

/// Slices of the inner sums of a product. By the sizes alone: where a slice ends, its sums are rounded to f32.
struct KSlices {
    /// Steps of each.
    steps: usize,
    count: usize,
    /// Panels of rows that a thread packs at most.
    panels: usize,
}

impl KSlices {
    /// Of `k` inner sums of values of `E` in `m` rows. A result that is `narrow` cannot hold sums between slices, and is
    /// made in one if that is not too long.
    fn new<E: AmxElem>(m: usize, k: usize, narrow: bool) -> Self {
        let steps = k.div_ceil(TILE_K);
        let most = MAX_PANEL_TILES / E::PARTS;
        let longer = if m <= FEW_ROW_PANELS * TILE_DIM || narrow && (most + 1..=2 * most).contains(&steps) {
            2
        } else {
            1
        };
        let count = steps.div_ceil(most * longer);
        Self { steps: steps.div_ceil(count), count, panels: MAX_ROW_PANELS / longer }
    }

    /// Bytes of a packed operand of `columns`.
    fn packed_bytes<E: AmxElem>(&self, columns: usize) -> usize {
        self.steps * columns.div_ceil(TILE_DIM) * E::PARTS * TILE_BYTES
    }

    /// Bytes of the sums between slices, of a result of (m, n) values.
    fn partial_sum_bytes(&self, m: usize, n: usize, narrow: bool) -> usize {
        if narrow && self.count > 1 { m * n * size_of::<f32>() } else { 0 }
    }
}

/// Whether results of `O` hold the sums that they are made of.
fn is_half_precision<O: AmxElem>() -> bool {
    O::PARTS < 3
}

/// Bytes that [`gemm`] takes for all threads to make an (m, n) matrix of `O` over `k` of `E`, at most; `transposed_a` where
/// the left operand is a transpose.
pub(super) fn gemm_workspace<E: AmxElem, O: AmxElem>(
    (m, k, n): (usize, usize, usize),
    transposed_a: bool,
) -> usize {
    let bytes = |rows: usize, columns: usize| {
        let slices = KSlices::new::<E>(rows, k, is_half_precision::<O>());
        slices.packed_bytes::<E>(columns) + slices.partial_sum_bytes(m, n, is_half_precision::<O>())
    };
    match n > m {
        true if transposed_a => bytes(n, m),
        true => bytes(n, m).max(bytes(m, n)),
        false => bytes(m, n),
    }
}

/// `out = a b`, or `out += a b` with `accumulate`, and what comes `epilogue`. A result that is wider than high is made as its
/// transpose: what all threads read is the smaller operand, and each meets several panels of the larger. Not where both
/// operands lie as tiles want them: they would have to be turned.
///
/// # Safety
/// The dispatch is AMX, there are inner sums, the operands lie inside their slices, `out` has room for every (i, j) at
/// `i * stride + j`, and where it is narrow nothing is added.
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
    // SAFETY: the same promises.
    unsafe { gemm_operands(out, stride, (&a, &b), sizes, options) }
}

/// Whether a convolution of so many images is made here.
pub(super) fn supports_conv<E: AmxElem>(g: &ConvGeometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.in_channels.is_multiple_of(TILE_K);
    whole && supports::<E>((batch * g.output_pixels(), g.patch_len(), g.out_channels))
}

/// Bytes that [`conv`] takes for all threads.
pub(super) fn conv_workspace<E: AmxElem>(g: &ConvGeometry, batch: usize) -> usize {
    let rows = batch * g.output_pixels();
    let slices = KSlices::new::<E>(rows, g.patch_len(), is_half_precision::<E>());
    slices.packed_bytes::<E>(g.out_channels)
        + slices.partial_sum_bytes(rows, g.out_channels, is_half_precision::<E>())
}

/// Whether the gradient of its weight is.
pub(super) fn supports_conv_weight_gradient<E: AmxElem>(g: &ConvGeometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.in_channels.is_multiple_of(TILE_DIM);
    whole && supports::<E>((g.patch_len(), batch * g.output_pixels(), g.out_channels))
}

/// Bytes that a thread packs then.
pub(super) fn conv_weight_gradient_workspace<E: AmxElem>(g: &ConvGeometry, batch: usize) -> usize {
    KSlices::new::<E>(g.patch_len(), batch * g.output_pixels(), false).packed_bytes::<E>(g.out_channels)
}

/// Adds the gradient of a convolution's weight, by the thread that asks; `d` is that of its output.
///
/// # Safety
/// It [`supports_conv_weight_gradient`] them, the slices are as long as the sizes say.
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
    // SAFETY: the same promises.
    unsafe { gemm_operands(dweight, g.patch_len(), (&PatchColumns(windows), &d), sizes, options) }
}

/// Makes a convolution.
///
/// # Safety
/// It [`supports_conv`] the pictures, the slices are as long as the sizes say.
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
    // SAFETY: the same promises.
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

/// How a product of rows and columns is made.
#[derive(Clone, Copy)]
struct GemmOptions<'a, O> {
    /// The result is the transpose of what is made.
    transpose_output: bool,
    /// AMX is given the two operands the other way round, so that its tiles are those of the transpose: where neither
    /// is dense along the inner sums, only the smaller operand has to be turned then.
    swap_operands: bool,
    accumulate: bool,
    epilogue: Option<CpuEpilogue<'a, O>>,
    threading: Threading,
}

/// As [`gemm`], of the rows `a` and the columns `b`.
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
    // SAFETY: the capacity is there, and what is not initialised is a value of this type.
    unsafe { packed.set_len(columns * panel_tiles) };
    let mut partial_sums = super::super::cpu::uninit::<f32>(
        slices.partial_sum_bytes(m, n, is_half_precision::<O>()) / size_of::<f32>(),
    );
    // A few tasks for each thread, of rows alone where there are enough of them.
    let wanted = if options.threading == Threading::Parallel { 4 * rayon::current_num_threads() } else { 1 };
    let panels_per_task = rows.div_ceil(wanted).clamp(1, slices.panels);
    let column_tasks = (wanted / rows.div_ceil(panels_per_task)).clamp(1, columns.div_ceil(8));
    let (out, partial_sums) = (DisjointSliceMut::new(out), DisjointSliceMut::new(&mut partial_sums));
    for slice in 0..slices.count {
        let from = slice * slices.steps * TILE_K;
        let inner = from..k.min(from + slices.steps * TILE_K);
        let pack = |(i, to): (usize, &mut [MaybeUninit<Tile>])| {
            // SAFETY: as promised; a panel has room for the steps of a slice.
            unsafe { b.pack(i * TILE_DIM, inner.clone(), !options.swap_operands, to.as_mut_ptr().cast()) }
        };
        match options.threading {
            Threading::Parallel => {
                packed.par_chunks_mut(panel_tiles).enumerate().with_min_len(4).for_each(pack)
            }
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
            // SAFETY: as promised, and no two tasks have a panel of rows and one of columns in common.
            unsafe { gemm_slice.compute(rows, columns * j / column_tasks..columns * (j + 1) / column_tasks) }
        };
        let tasks = 0..rows.div_ceil(panels_per_task) * column_tasks;
        match options.threading {
            Threading::Parallel => tasks.into_par_iter().for_each(run_task),
            Threading::Serial => tasks.for_each(run_task),
        }
    }
}

/// What a thread needs to know of a slice of a product.
struct GemmSlice<'a, A, O> {
    a: &'a A,
    rows: usize,
    /// The slice of the inner sums.
    inner: Range<usize>,
    /// The right operand, panel after panel, each of so many tiles.
    packed: &'a [MaybeUninit<Tile>],
    panel_tiles: usize,
    out: &'a DisjointSliceMut<O>,
    stride: usize,
    /// Where sums are kept between slices, if not in `out`: as the result, without gaps.
    partial_sums: Option<&'a DisjointSliceMut<f32>>,
    /// No slice follows.
    is_last: bool,
    /// Columns of what is made.
    columns: usize,
    options: GemmOptions<'a, O>,
}

impl<A: Operand, O: AmxElem> GemmSlice<'_, A, O> {
    const PARTS: usize = A::Value::PARTS;

    /// Makes the results of panels of rows, at most [`MAX_ROW_PANELS`], and of columns.
    unsafe fn compute(&self, rows: Range<usize>, columns: Range<usize>) {
        let tiles = self.inner.len().div_ceil(TILE_K) * Self::PARTS;
        let mut panels = MaybeUninit::<[Tile; MAX_ROW_PANELS * MAX_PANEL_TILES]>::uninit();
        let mut sums = MaybeUninit::<[PanelAccumulators; 2]>::uninit();
        let (panels, sums) =
            (panels.as_mut_ptr().cast::<Tile>(), sums.as_mut_ptr().cast::<PanelAccumulators>());
        let mut last_sums = sums;
        // SAFETY: as promised to `gemm`; panels and sums have room for this many rows.
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
                        // The sums before these are stored while AMX works, and these sums' places come near.
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

    /// Brings near what [`GemmSlice::store`] will read and write, which no prefetcher of the machine foresees.
    fn prefetch_output(&self, panel: usize, columns: &Range<usize>) {
        let residual = self.options.epilogue.and_then(|then| then.residual);
        let rows = panel * TILE_DIM..self.rows.min((panel + 1) * TILE_DIM);
        let (rows, columns) = if self.options.transpose_output { (columns, &rows) } else { (&rows, columns) };
        for row in rows.clone() {
            let at = row * self.stride + columns.start;
            for line in (at..at + columns.len()).step_by(64 / size_of::<O>()) {
                // SAFETY: nothing is read.
                unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(self.out.ptr_at(line).cast());
                    if let Some(residual) = residual {
                        _mm_prefetch::<_MM_HINT_T0>(residual.as_ptr().wrapping_add(line).cast());
                    }
                }
            }
        }
    }

    /// Writes the sums of a panel of rows in these columns, and what follows them.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn store(&self, sums: *const f32, panel: usize, columns: &Range<usize>) {
        // SAFETY: the same promises.
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
            // SAFETY: there are sums for every row and column of a tile; those that the result has not are left out.
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

    /// Writes a line of sums to each of these rows of the result, in at most [`TILE_DIM`] columns.
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
        // SAFETY: the slice has as many values as the mask lets through.
        let load = |all: &[O], at: usize| unsafe { O::load(all[at..][..columns.len()].as_ptr(), mask) };
        let bias = epilogue.bias.map(|bias| load(bias, columns.start));
        let width = if self.options.transpose_output { self.rows } else { self.columns };
        for (i, row) in rows.enumerate() {
            let at = row * self.stride + columns.start;
            let mut sum = line(i);
            // SAFETY: this task alone has these columns of the row.
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
                    // In this order what is not a number passes through.
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
