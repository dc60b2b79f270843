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

use super::super::cpu::Blocks;
use super::super::dispatch::{Dispatch, dispatch};
use super::super::windows::Geometry;
use super::small::{mask, turned};
use super::split::{Lines, Operand, Split};
use super::tiles::{DEPTH, SIDE, TILE, Unit};
use super::windows::{Flipped, Turned, Windows};
use super::{By, Convolution, Mat, Then};

/// Tiles of a panel in a slice of the inner sums, at most; twice as many where all rows are in so few panels.
const TILES: usize = 48;
const LOW: usize = 32;
/// Tiles of a panel whose steps are made at once, so that what is packed for them stays in the first-level cache: 12 KiB
/// of rows, 24 KiB of columns.
const NEAR: usize = 12;
/// Panels of rows that a thread packs at once, at most, half as many of long slices: 384 KiB, a fifth of a second-level
/// cache.
const PANELS: usize = 8;
/// Panels of columns that meet each of them in turn, and the columns of their sums.
const PAIR: usize = 2;
const WIDTH: usize = PAIR * SIDE;
/// The fewest rows, columns and inner sums that are worth the packing.
const LEAST: usize = 48;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Tile([u8; TILE]);

/// The sums of the panels in hand, row after row.
#[repr(C, align(64))]
struct Sums([[[f32; WIDTH]; SIDE]; PANELS]);

impl Sums {
    /// The sums of a panel.
    ///
    /// # Safety
    /// There are [`PANELS`] of them.
    unsafe fn of(all: *mut Self, panel: usize) -> *mut f32 {
        // SAFETY: as promised.
        unsafe { (&raw mut (*all).0).cast::<f32>().add(panel * SIDE * WIDTH) }
    }
}

/// Whether an (m, n) matrix over `k` is made here. Of f32 where it is large enough and not mostly what tiles are filled up
/// with. Narrower types always: any other way has to widen whole operands first.
pub(super) fn takes<E: Split>((m, k, n): (usize, usize, usize)) -> bool {
    let filled = |size: usize, to: usize| size.next_multiple_of(to) as f64 / size as f64;
    let large = || m.min(k).min(n) >= LEAST && filled(m, SIDE) * filled(k, DEPTH) * filled(n, SIDE) < 1.3;
    dispatch() == Dispatch::Amx && k > 0 && (E::PARTS < 3 || large())
}

/// Slices of the inner sums of a product. By the sizes alone: where a slice ends, its sums are rounded to f32.
struct Slices {
    /// Steps of each.
    steps: usize,
    count: usize,
    /// Panels of rows that a thread packs at most.
    panels: usize,
}

impl Slices {
    /// Of `k` inner sums of values of `E` in `m` rows. A result that is `narrow` cannot hold sums between slices, and is
    /// made in one if that is not too long.
    fn new<E: Split>(m: usize, k: usize, narrow: bool) -> Self {
        let steps = k.div_ceil(DEPTH);
        let most = TILES / E::PARTS;
        let longer = if m <= LOW * SIDE || narrow && (most + 1..=2 * most).contains(&steps) { 2 } else { 1 };
        let count = steps.div_ceil(most * longer);
        Self { steps: steps.div_ceil(count), count, panels: PANELS / longer }
    }

    /// Bytes of a packed operand of `columns`.
    fn packed<E: Split>(&self, columns: usize) -> usize {
        self.steps * columns.div_ceil(SIDE) * E::PARTS * TILE
    }

    /// Bytes of the sums between slices, of a result of (m, n) values.
    fn between(&self, m: usize, n: usize, narrow: bool) -> usize {
        if narrow && self.count > 1 { m * n * size_of::<f32>() } else { 0 }
    }
}

/// Whether results of `O` hold the sums that they are made of.
fn is_narrow<O: Split>() -> bool {
    O::PARTS < 3
}

/// Bytes that [`multiply`] takes for all threads to make an (m, n) matrix of `O` over `k` of `E`, at most; `turned` where
/// the left operand is a transpose.
pub(super) fn packing<E: Split, O: Split>((m, k, n): (usize, usize, usize), turned: bool) -> usize {
    let room = |rows: usize, columns: usize| {
        let slices = Slices::new::<E>(rows, k, is_narrow::<O>());
        slices.packed::<E>(columns) + slices.between(m, n, is_narrow::<O>())
    };
    match n > m {
        true if turned => room(n, m),
        true => room(n, m).max(room(m, n)),
        false => room(m, n),
    }
}

/// `out = a b`, or `out += a b` with `add`, and what comes `then`. A result that is wider than high is made as its
/// transpose: what all threads read is the smaller operand, and each meets several panels of the larger. Not where both
/// operands lie as tiles want them: they would have to be turned.
///
/// # Safety
/// The dispatch is AMX, there are inner sums, the operands lie inside their slices, `out` has room for every (i, j) at
/// `i * stride + j`, and where it is narrow nothing is added.
pub(super) unsafe fn multiply<E: Split, O: Split>(
    out: &mut [O],
    stride: usize,
    a: Mat<E>,
    b: Mat<E>,
    add: bool,
    then: Option<Then<O>>,
) {
    let wide = b.cols > a.rows && (a.col != 1 || b.row == 1);
    let (a, b) = if wide { (b.t(), a.t()) } else { (a, b) };
    let sizes = (a.rows, a.cols, b.cols);
    let a = Lines { data: a.data.as_ptr(), count: a.rows, line: a.row, inner: a.col };
    let b = Lines { data: b.data.as_ptr(), count: b.cols, line: b.col, inner: b.row };
    let how = How { wide, crossed: wide && a.inner != 1, add, then, by: By::All };
    // SAFETY: the same promises.
    unsafe { shared(out, stride, (&a, &b), sizes, how) }
}

/// Whether a convolution of so many images is made here.
pub(super) fn convolves<E: Split>(g: &Geometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.inputs.is_multiple_of(DEPTH);
    whole && takes::<E>((batch * g.pixels(), g.window(), g.outputs))
}

/// Bytes that [`convolve`] takes for all threads.
pub(super) fn convolving<E: Split>(g: &Geometry, batch: usize) -> usize {
    let rows = batch * g.pixels();
    let slices = Slices::new::<E>(rows, g.window(), is_narrow::<E>());
    slices.packed::<E>(g.outputs) + slices.between(rows, g.outputs, is_narrow::<E>())
}

/// Whether the gradient of its weight is.
pub(super) fn weighs<E: Split>(g: &Geometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.inputs.is_multiple_of(SIDE);
    whole && takes::<E>((g.window(), batch * g.pixels(), g.outputs))
}

/// Bytes that a thread packs then.
pub(super) fn weighing<E: Split>(g: &Geometry, batch: usize) -> usize {
    Slices::new::<E>(g.window(), batch * g.pixels(), false).packed::<E>(g.outputs)
}

/// Adds the gradient of a convolution's weight, by the thread that asks; `d` is that of its output.
///
/// # Safety
/// It [`weighs`] them, the slices are as long as the sizes say.
pub(super) unsafe fn weigh<E: Split>(into: &mut [f32], g: &Geometry, pictures: &[E], d: &[E]) {
    let windows = Windows::new(g, pictures);
    let sizes = (g.window(), windows.count(), g.outputs);
    let d = Lines { data: d.as_ptr(), count: g.outputs, line: 1, inner: g.outputs };
    let how = How { wide: true, crossed: true, add: true, then: None, by: By::Me };
    // SAFETY: the same promises.
    unsafe { shared(into, g.window(), (&Turned(windows), &d), sizes, how) }
}

/// Makes a convolution.
///
/// # Safety
/// It [`convolves`] the pictures, the slices are as long as the sizes say.
pub(super) unsafe fn convolve<E: Split>(out: &mut [E], of: Convolution<E>) {
    let Convolution { g, pictures, weight, back, then } = of;
    let (windows, n) = (Windows::new(g, pictures), g.outputs);
    let sizes = (windows.count(), g.window(), n);
    let how = How { wide: false, crossed: false, add: false, then: Some(then), by: By::All };
    // SAFETY: the same promises.
    unsafe {
        if back {
            let weight = Flipped { weight, count: n, cells: g.cells(), depth: g.inputs };
            shared(out, n, (&windows, &weight), sizes, how)
        } else {
            let weight = Lines { data: weight.as_ptr(), count: n, line: g.window(), inner: 1 };
            shared(out, n, (&windows, &weight), sizes, how)
        }
    }
}

/// How a product of rows and columns is made.
#[derive(Clone, Copy)]
struct How<'a, O> {
    /// The result is the transpose of what is made.
    wide: bool,
    /// AMX is given the two operands the other way round, so that its tiles are those of the transpose: where neither
    /// is dense along the inner sums, only the smaller operand has to be turned then.
    crossed: bool,
    add: bool,
    then: Option<Then<'a, O>>,
    by: By,
}

/// As [`multiply`], of the rows `a` and the columns `b`.
unsafe fn shared<A: Operand, O: Split>(
    out: &mut [O],
    stride: usize,
    (a, b): (&A, &impl Operand<Value = A::Value>),
    (m, k, n): (usize, usize, usize),
    how: How<O>,
) {
    let slices = Slices::new::<A::Value>(m, k, is_narrow::<O>());
    let panel = slices.steps * A::Value::PARTS;
    let (rows, columns) = (m.div_ceil(SIDE), n.div_ceil(SIDE));
    let mut room = Vec::<MaybeUninit<Tile>>::with_capacity(columns * panel);
    // SAFETY: the capacity is there, and what is not initialised is a value of this type.
    unsafe { room.set_len(columns * panel) };
    let mut between =
        super::super::cpu::fresh::<f32>(slices.between(m, n, is_narrow::<O>()) / size_of::<f32>());
    // A few tasks for each thread, of rows alone where there are enough of them.
    let wanted = if how.by == By::All { 4 * rayon::current_num_threads() } else { 1 };
    let tall = rows.div_ceil(wanted).clamp(1, slices.panels);
    let across = (wanted / rows.div_ceil(tall)).clamp(1, columns.div_ceil(8));
    let (out, between) = (Blocks::new(out), Blocks::new(&mut between));
    for slice in 0..slices.count {
        let from = slice * slices.steps * DEPTH;
        let inner = from..k.min(from + slices.steps * DEPTH);
        let pack = |(i, to): (usize, &mut [MaybeUninit<Tile>])| {
            // SAFETY: as promised; a panel has room for the steps of a slice.
            unsafe { b.pack(i * SIDE, inner.clone(), !how.crossed, to.as_mut_ptr().cast()) }
        };
        match how.by {
            By::All => room.par_chunks_mut(panel).enumerate().with_min_len(4).for_each(pack),
            By::Me => room.chunks_mut(panel).enumerate().for_each(pack),
        }
        let last = slice + 1 == slices.count;
        let share = Share {
            a,
            rows: m,
            inner: inner.clone(),
            packed: &room,
            panel,
            out: &out,
            stride,
            between: (is_narrow::<O>() && slices.count > 1).then_some(&between),
            last,
            columns: n,
            how: How { add: how.add || slice > 0, then: how.then.filter(|_| last), ..how },
        };
        let make = |task: usize| {
            let (i, j) = (task / across, task % across);
            let rows = i * tall..rows.min((i + 1) * tall);
            // SAFETY: as promised, and no two tasks have a panel of rows and one of columns in common.
            unsafe { share.make(rows, columns * j / across..columns * (j + 1) / across) }
        };
        let tasks = 0..rows.div_ceil(tall) * across;
        match how.by {
            By::All => tasks.into_par_iter().for_each(make),
            By::Me => tasks.for_each(make),
        }
    }
}

/// What a thread needs to know of a slice of a product.
struct Share<'a, A, O> {
    a: &'a A,
    rows: usize,
    /// The slice of the inner sums.
    inner: Range<usize>,
    /// The right operand, panel after panel, each of so many tiles.
    packed: &'a [MaybeUninit<Tile>],
    panel: usize,
    out: &'a Blocks<O>,
    stride: usize,
    /// Where sums are kept between slices, if not in `out`: as the result, without gaps.
    between: Option<&'a Blocks<f32>>,
    /// No slice follows.
    last: bool,
    /// Columns of what is made.
    columns: usize,
    how: How<'a, O>,
}

impl<A: Operand, O: Split> Share<'_, A, O> {
    const PARTS: usize = A::Value::PARTS;

    /// Makes the results of panels of rows, at most [`PANELS`], and of columns.
    unsafe fn make(&self, rows: Range<usize>, columns: Range<usize>) {
        let tiles = self.inner.len().div_ceil(DEPTH) * Self::PARTS;
        let mut panels = MaybeUninit::<[Tile; PANELS * TILES]>::uninit();
        let mut sums = MaybeUninit::<[Sums; 2]>::uninit();
        let (panels, sums) = (panels.as_mut_ptr().cast::<Tile>(), sums.as_mut_ptr().cast::<Sums>());
        let mut last = sums;
        // SAFETY: as promised to `multiply`; panels and sums have room for this many rows.
        unsafe {
            for (i, row) in rows.clone().enumerate() {
                let to = panels.add(i * tiles).cast();
                self.a.pack(row * SIDE, self.inner.clone(), self.how.crossed, to);
            }
            let unit = Unit::new();
            let mut waiting = None;
            for (turn, column) in columns.clone().step_by(PAIR).enumerate() {
                let (now, before) = (sums.add(turn % 2), sums.add((turn + 1) % 2));
                let pair = column..columns.end.min(column + PAIR);
                let span = pair.start * SIDE..self.columns.min(pair.end * SIDE);
                for near in (0..tiles).step_by(NEAR) {
                    let steps = NEAR.min(tiles - near) / Self::PARTS;
                    for (i, row) in rows.clone().enumerate() {
                        let a = panels.add(i * tiles + near).cast_const().cast();
                        for (at, column) in pair.clone().enumerate() {
                            let b = self.packed.as_ptr().add(column * self.panel + near).cast();
                            let (a, b) = if self.how.crossed { (b, a) } else { (a, b) };
                            let sums = Sums::of(now, i).add(at * SIDE);
                            match Self::PARTS {
                                1 => unit.sums::<1>(a, b, steps, sums, 4 * WIDTH, near > 0),
                                2 => unit.sums::<2>(a, b, steps, sums, 4 * WIDTH, near > 0),
                                _ => unit.sums::<3>(a, b, steps, sums, 4 * WIDTH, near > 0),
                            }
                        }
                        // The sums before these are stored while AMX works, and these sums' places come near.
                        if near == 0 {
                            self.fetch(row, &span);
                            if let Some(waiting) = &waiting {
                                self.store(Sums::of(before, i), row, waiting);
                            }
                        }
                    }
                }
                (waiting, last) = (Some(span), now);
            }
            if let Some(waiting) = &waiting {
                rows.enumerate().for_each(|(i, row)| self.store(Sums::of(last, i), row, waiting));
            }
        }
    }

    /// Brings near what [`Share::store`] will read and write, which no prefetcher of the machine foresees.
    fn fetch(&self, panel: usize, columns: &Range<usize>) {
        let onto = self.how.then.and_then(|then| then.onto);
        let rows = panel * SIDE..self.rows.min((panel + 1) * SIDE);
        let (rows, columns) = if self.how.wide { (columns, &rows) } else { (&rows, columns) };
        for row in rows.clone() {
            let at = row * self.stride + columns.start;
            for line in (at..at + columns.len()).step_by(64 / size_of::<O>()) {
                // SAFETY: nothing is read.
                unsafe {
                    _mm_prefetch::<_MM_HINT_ET0>(self.out.at(line).cast());
                    if let Some(onto) = onto {
                        _mm_prefetch::<_MM_HINT_T0>(onto.as_ptr().wrapping_add(line).cast());
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
            match &self.how.then {
                None => self.store_with::<false>(sums, panel, columns, &Then::NOTHING),
                Some(then) => self.store_with::<true>(sums, panel, columns, then),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store_with<const THEN: bool>(
        &self,
        sums: *const f32,
        panel: usize,
        columns: &Range<usize>,
        then: &Then<O>,
    ) {
        let rows = panel * SIDE..self.rows.min((panel + 1) * SIDE);
        for (v, first) in columns.clone().step_by(SIDE).enumerate() {
            let columns = first..columns.end.min(first + SIDE);
            // SAFETY: there are sums for every row and column of a tile; those that the result has not are left out.
            unsafe {
                let line = |i: usize| _mm512_load_ps(sums.add(i * WIDTH + v * SIDE));
                if self.how.crossed {
                    self.put::<THEN>(line, columns, &rows, then);
                } else if self.how.wide {
                    let mut lines = [_mm512_setzero_ps(); SIDE];
                    (0..SIDE).for_each(|i| lines[i] = line(i));
                    let lines = turned(lines);
                    self.put::<THEN>(|i| lines[i], columns, &rows, then);
                } else {
                    self.put::<THEN>(line, rows.clone(), &columns, then);
                }
            }
        }
    }

    /// Writes a line of sums to each of these rows of the result, in at most [`SIDE`] columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn put<const THEN: bool>(
        &self,
        line: impl Fn(usize) -> __m512,
        rows: Range<usize>,
        columns: &Range<usize>,
        then: &Then<O>,
    ) {
        let mask = mask(columns.len());
        let (low, high) = then.clip.bounds::<f32>();
        let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
        // SAFETY: the slice has as many values as the mask lets through.
        let load = |all: &[O], at: usize| unsafe { O::load(all[at..][..columns.len()].as_ptr(), mask) };
        let bias = then.bias.map(|bias| load(bias, columns.start));
        let width = if self.how.wide { self.rows } else { self.columns };
        for (i, row) in rows.enumerate() {
            let at = row * self.stride + columns.start;
            let mut sum = line(i);
            // SAFETY: this task alone has these columns of the row.
            unsafe {
                if let Some(between) = self.between {
                    let kept = between.get(row * width + columns.start, columns.len()).as_mut_ptr();
                    if self.how.add {
                        sum = _mm512_add_ps(f32::load(kept, mask), sum);
                    }
                    if !self.last {
                        f32::store(kept, mask, sum);
                        continue;
                    }
                }
                let to = self.out.get(at, columns.len()).as_mut_ptr();
                if self.how.add && self.between.is_none() {
                    sum = _mm512_add_ps(O::load(to, mask), sum);
                }
                if THEN {
                    if let Some(bias) = bias {
                        sum = _mm512_add_ps(sum, bias);
                    }
                    // In this order what is not a number passes through.
                    sum = _mm512_min_ps(high, _mm512_max_ps(low, sum));
                    if let Some(onto) = then.onto {
                        sum = _mm512_add_ps(sum, load(onto, at));
                    }
                }
                O::store(to, mask, sum);
            }
        }
    }
}
