//! Products by the matrix unit, which all threads share, in f32.
//!
//! The right operand is split and packed once for all threads, a slice of the inner sums at a time. A thread packs a few
//! panels of rows to its stack and makes the tiles of these rows, each from the slice's first inner sum to its last: no
//! value depends on who made it or on how the rows are shared out.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use rayon::prelude::*;

use super::super::cpu::Blocks;
use super::super::dispatch::{Dispatch, dispatch};
use super::super::windows::Geometry;
use super::small::{mask, turned};
use super::split::{Lines, Operand};
use super::tiles::{DEPTH, SIDE, STEP, Unit};
use super::windows::{Flipped, Turned, Windows};
use super::{By, Convolution, Mat, Then};

/// Steps of a slice of the inner sums, at most; twice as many where all rows are in so few panels.
const STEPS: usize = 16;
const LOW: usize = 32;
/// Steps that are made at once of a tile, so that what is packed for them stays in the first-level cache: 12 KiB of
/// rows, 24 KiB of columns.
const NEAR: usize = 4;
/// Panels of rows that a thread packs at once, at most, half as many of long slices: 384 KiB, a fifth of a second-level
/// cache.
const PANELS: usize = 8;
/// Panels of columns that meet each of them in turn, and the columns of their sums.
const PAIR: usize = 2;
const WIDTH: usize = PAIR * SIDE;
/// The fewest rows, columns and inner sums that are worth the packing.
const LEAST: usize = 48;

/// What is packed of a panel for [`DEPTH`] inner sums.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Step([u8; STEP]);

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

/// Whether an (m, n) matrix over `k` is made here: large enough, and not mostly what tiles are filled up with.
pub(super) fn takes((m, k, n): (usize, usize, usize)) -> bool {
    let filled = |size: usize, to: usize| size.next_multiple_of(to) as f64 / size as f64;
    dispatch() == Dispatch::Amx
        && m.min(k).min(n) >= LEAST
        && filled(m, SIDE) * filled(k, DEPTH) * filled(n, SIDE) < 1.3
}

/// Steps of each slice of `k` inner sums, slices, and the panels of `m` rows that a thread packs at most. By the sizes
/// alone: where a slice ends, its sums are rounded.
fn slices(m: usize, k: usize) -> (usize, usize, usize) {
    let longer = if m <= LOW * SIDE { 2 } else { 1 };
    let steps = k.div_ceil(DEPTH);
    let count = steps.div_ceil(STEPS * longer);
    (steps.div_ceil(count), count, PANELS / longer)
}

/// Bytes that are packed for all threads, for an (m, n) matrix over `k`, at most; `turned` where the left operand is a
/// transpose.
pub(super) fn packing((m, k, n): (usize, usize, usize), turned: bool) -> usize {
    let packed = |rows: usize, columns: usize| slices(rows, k).0 * columns.div_ceil(SIDE) * STEP;
    match n > m {
        true if turned => packed(n, m),
        true => packed(n, m).max(packed(m, n)),
        false => packed(m, n),
    }
}

/// `out = a b`, or `out += a b` with `add`, and what comes `then`. A result that is wider than high is made as its
/// transpose: what all threads read is the smaller operand, and each meets several panels of the larger. Not where both
/// operands lie as tiles want them: they would have to be turned.
///
/// # Safety
/// [`takes`] these sizes, the operands lie inside their slices, and `out` has room for every (i, j) at
/// `i * stride + j`.
pub(super) unsafe fn multiply(
    out: &mut [f32],
    stride: usize,
    a: Mat<f32>,
    b: Mat<f32>,
    add: bool,
    then: Option<Then<f32>>,
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

/// Whether a convolution of so many pictures is made here.
pub(super) fn convolves(g: &Geometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.inputs.is_multiple_of(DEPTH);
    whole && takes((batch * g.pixels(), g.window(), g.outputs))
}

/// Bytes that are packed for all threads then.
pub(super) fn convolving(g: &Geometry, batch: usize) -> usize {
    slices(batch * g.pixels(), g.window()).0 * g.outputs.div_ceil(SIDE) * STEP
}

/// Whether the gradient of its weight is.
pub(super) fn weighs(g: &Geometry, batch: usize) -> bool {
    let whole = g.groups == 1 && g.inputs.is_multiple_of(SIDE);
    whole && takes((g.window(), batch * g.pixels(), g.outputs))
}

/// Bytes that a thread packs then.
pub(super) fn weighing(g: &Geometry, batch: usize) -> usize {
    slices(g.window(), batch * g.pixels()).0 * g.outputs.div_ceil(SIDE) * STEP
}

/// Adds the gradient of a convolution's weight, by the thread that asks; `d` is that of its output.
///
/// # Safety
/// It [`weighs`] them, the slices are as long as the sizes say.
pub(super) unsafe fn weigh(into: &mut [f32], g: &Geometry, pictures: &[f32], d: &[f32]) {
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
pub(super) unsafe fn convolve(out: &mut [f32], of: Convolution<f32>) {
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
struct How<'a> {
    /// The result is the transpose of what is made.
    wide: bool,
    /// The unit is given the two operands the other way round, so that its tiles are those of the transpose: where neither
    /// is dense along the inner sums, only the smaller operand has to be turned then.
    crossed: bool,
    add: bool,
    then: Option<Then<'a, f32>>,
    by: By,
}

/// As [`multiply`], of the rows `a` and the columns `b`.
unsafe fn shared<A: Operand>(
    out: &mut [f32],
    stride: usize,
    (a, b): (&A, &impl Operand),
    (m, k, n): (usize, usize, usize),
    how: How,
) {
    let (steps, count, most) = slices(m, k);
    let (rows, columns) = (m.div_ceil(SIDE), n.div_ceil(SIDE));
    let mut room = Vec::<MaybeUninit<Step>>::with_capacity(columns * steps);
    // SAFETY: the capacity is there, and what is not initialised is a value of this type.
    unsafe { room.set_len(columns * steps) };
    // A few tasks for each thread, of rows alone where there are enough of them.
    let wanted = if how.by == By::All { 4 * rayon::current_num_threads() } else { 1 };
    let tall = rows.div_ceil(wanted).clamp(1, most);
    let across = (wanted / rows.div_ceil(tall)).clamp(1, columns.div_ceil(8));
    let out = Blocks::new(out);
    for slice in 0..count {
        let from = slice * steps * DEPTH;
        let inner = from..k.min(from + steps * DEPTH);
        let pack = |(panel, to): (usize, &mut [MaybeUninit<Step>])| {
            // SAFETY: as promised; a panel has room for the steps of a slice.
            unsafe { b.pack(panel * SIDE, inner.clone(), !how.crossed, to.as_mut_ptr().cast()) }
        };
        match how.by {
            By::All => room.par_chunks_mut(steps).enumerate().with_min_len(4).for_each(pack),
            By::Me => room.chunks_mut(steps).enumerate().for_each(pack),
        }
        let share = Share {
            a,
            rows: m,
            inner: inner.clone(),
            packed: &room,
            panel: steps,
            out: &out,
            stride,
            columns: n,
            how: How { add: how.add || slice > 0, then: how.then.filter(|_| slice + 1 == count), ..how },
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
struct Share<'a, A> {
    a: &'a A,
    rows: usize,
    /// The slice of the inner sums.
    inner: Range<usize>,
    /// The right operand, panel after panel, each of so many steps.
    packed: &'a [MaybeUninit<Step>],
    panel: usize,
    out: &'a Blocks<f32>,
    stride: usize,
    /// Columns of what is made.
    columns: usize,
    how: How<'a>,
}

impl<A: Operand> Share<'_, A> {
    /// Makes the results of panels of rows, at most [`PANELS`], and of columns.
    unsafe fn make(&self, rows: Range<usize>, columns: Range<usize>) {
        let steps = self.inner.len().div_ceil(DEPTH);
        let mut panels = MaybeUninit::<[Step; PANELS * STEPS]>::uninit();
        let mut sums = MaybeUninit::<[Sums; 2]>::uninit();
        let (panels, sums) = (panels.as_mut_ptr().cast::<Step>(), sums.as_mut_ptr().cast::<Sums>());
        let mut last = sums;
        // SAFETY: as promised to `multiply`; panels and sums have room for this many rows.
        unsafe {
            for (i, row) in rows.clone().enumerate() {
                let to = panels.add(i * steps).cast();
                self.a.pack(row * SIDE, self.inner.clone(), self.how.crossed, to);
            }
            let unit = Unit::new();
            let mut waiting = None;
            for (turn, column) in columns.clone().step_by(PAIR).enumerate() {
                let (now, before) = (sums.add(turn % 2), sums.add((turn + 1) % 2));
                let pair = column..columns.end.min(column + PAIR);
                let span = pair.start * SIDE..self.columns.min(pair.end * SIDE);
                for near in (0..steps).step_by(NEAR) {
                    for (i, row) in rows.clone().enumerate() {
                        let a = panels.add(i * steps + near).cast_const().cast();
                        for (at, column) in pair.clone().enumerate() {
                            let b = self.packed.as_ptr().add(column * self.panel + near).cast();
                            let (a, b) = if self.how.crossed { (b, a) } else { (a, b) };
                            let sums = Sums::of(now, i).add(at * SIDE);
                            unit.sums(a, b, NEAR.min(steps - near), sums, 4 * WIDTH, near > 0);
                        }
                        // The sums before these are stored while the unit works, and these sums' places come near.
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
            for line in (at..at + columns.len()).step_by(SIDE) {
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
    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, sums: *const f32, panel: usize, columns: &Range<usize>) {
        // SAFETY: the same promises.
        unsafe {
            match &self.how.then {
                None => self.store_with::<false>(sums, panel, columns, &Then::NOTHING),
                Some(then) => self.store_with::<true>(sums, panel, columns, then),
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn store_with<const THEN: bool>(
        &self,
        sums: *const f32,
        panel: usize,
        columns: &Range<usize>,
        then: &Then<f32>,
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
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn put<const THEN: bool>(
        &self,
        line: impl Fn(usize) -> __m512,
        rows: Range<usize>,
        columns: &Range<usize>,
        then: &Then<f32>,
    ) {
        let mask = mask(columns.len());
        let (low, high) = then.clip.bounds::<f32>();
        let (low, high) = (_mm512_set1_ps(low), _mm512_set1_ps(high));
        let part = |all: &[f32], at: usize| all[at..][..columns.len()].as_ptr();
        // SAFETY: masks keep to these columns.
        let load = |from: *const f32| unsafe { _mm512_maskz_loadu_ps(mask, from) };
        let bias = then.bias.map(|bias| load(part(bias, columns.start)));
        for (i, row) in rows.enumerate() {
            let at = row * self.stride + columns.start;
            // SAFETY: this task alone has these columns of the row.
            let to = unsafe { self.out.get(at, columns.len()) }.as_mut_ptr();
            let mut sum = line(i);
            if self.how.add {
                sum = _mm512_add_ps(load(to), sum);
            }
            if THEN {
                if let Some(bias) = bias {
                    sum = _mm512_add_ps(sum, bias);
                }
                // In this order what is not a number passes through.
                sum = _mm512_min_ps(high, _mm512_max_ps(low, sum));
                if let Some(onto) = then.onto {
                    sum = _mm512_add_ps(sum, load(part(onto, at)));
                }
            }
            // SAFETY: the same.
            unsafe { _mm512_mask_storeu_ps(to, mask, sum) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::clip::Clip;
    use crate::random::Random;

    fn values(count: usize, stream: u64) -> Vec<f32> {
        (0..count).map(|i| Random::new(7, stream).normal(i as u64) as f32).collect()
    }

    fn laid(data: &[f32], rows: usize, cols: usize, turned: bool) -> Mat<'_, f32> {
        if turned { Mat::new(data, cols, rows).t() } else { Mat::new(data, rows, cols) }
    }

    fn at(m: &Mat<f32>, i: usize, j: usize) -> f32 {
        m.data[i * m.row + j * m.col]
    }

    /// In other dispatches the tests say so.
    fn skipped() -> bool {
        if dispatch() != Dispatch::Amx {
            println!("skipped: the dispatch is {:?}", dispatch());
        }
        dispatch() != Dispatch::Amx
    }

    fn product(x: Mat<f32>, y: Mat<f32>) -> Vec<f32> {
        let mut out = vec![0.0; x.rows * y.cols];
        // SAFETY: the unit is there, AVX-512 with it, and `out` has room.
        unsafe { multiply(&mut out, y.cols, x, y, false, None) };
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Against sums in f64, over every direction of the operands, odd sizes and strides, several slices; what lies
        /// between the rows of the result is left alone, and what comes then is done once with every value.
        #[test]
        fn products_are_right(m in 1usize..200, k in 1usize..1200, n in 1usize..150, turn_a: bool, turn_b: bool, add: bool, then: bool, gap in 0usize..9) {
            if skipped() {
                return Ok(());
            }
            let (a, b, stride) = (values(m * k, 1), values(k * n, 2), n + gap);
            let before = values(m * stride, 3);
            let mut out = before.clone();
            let (x, y) = (laid(&a, m, k, turn_a), laid(&b, k, n, turn_b));
            let (bias, onto) = (values(n, 4), values(m * stride, 5));
            let follows = Then { bias: Some(&bias), clip: Clip::Relu6, onto: Some(&onto) };
            // SAFETY: the unit is there and `out` has `m` rows of `stride`.
            unsafe { multiply(&mut out, stride, x, y, add, then.then_some(follows)) };
            for i in 0..m {
                for j in 0..stride {
                    let (was, is) = (before[i * stride + j], out[i * stride + j]);
                    if j >= n {
                        prop_assert_eq!(was, is);
                        continue;
                    }
                    let terms = (0..k).map(|p| at(&x, i, p) as f64 * at(&y, p, j) as f64);
                    let (sum, size) = terms.fold((0.0, 1.0), |(s, l), t| (s + t, l + t.abs()));
                    let sum = sum + if add { was as f64 } else { 0.0 };
                    let wanted = match then {
                        true => (sum + bias[j] as f64).clamp(0.0, 6.0) + onto[i * stride + j] as f64,
                        false => sum,
                    };
                    prop_assert!((is as f64 - wanted).abs() <= 1e-6 * size, "{} {} at {} {}", is, wanted, i, j);
                }
            }
        }
    }

    /// Calls `term` with the places of every product of a convolution in its output, its pictures and its weight.
    fn terms(g: &Geometry, batch: usize, mut term: impl FnMut(usize, usize, usize)) {
        let ((h, w), k) = (g.output(), g.kernel);
        for (pixel, cell) in (0..batch * h * w).flat_map(|p| (0..k * k).map(move |cell| (p, cell))) {
            let along = |i: usize, cell: usize, size: usize| {
                (i * g.stride + cell * g.dilation).checked_sub(g.padding).filter(|at| *at < size)
            };
            let (picture, at) = (pixel / (h * w), pixel % (h * w));
            let (y, x) = (along(at / w, cell / k, g.height), along(at % w, cell % k, g.width));
            let (Some(y), Some(x)) = (y, x) else { continue };
            for (o, c) in (0..g.outputs).flat_map(|o| (0..g.inputs).map(move |c| (o, c))) {
                let seen = ((picture * g.height + y) * g.width + x) * g.inputs + c;
                term(pixel * g.outputs + o, seen, (o * k * k + cell) * g.inputs + c);
            }
        }
    }

    fn near(found: &[f32], wanted: &[(f64, f64)]) -> bool {
        found.iter().zip(wanted).all(|(is, (sum, size))| (*is as f64 - sum).abs() <= 1e-6 * (1.0 + size))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Against sums in f64: the output, the gradient of the pictures where windows move by one, and that of the weight,
        /// which is added to what is there.
        #[test]
        fn convolutions_are_right(
            (height, width, batch) in (3usize..11, 3usize..11, 1usize..4),
            (inputs, outputs) in (1usize..4, 1usize..4),
            (kernel, stride, dilation) in (1usize..4, 1usize..3, 1usize..3),
            padding in 0usize..3,
        ) {
            let (inputs, outputs) = (32 * inputs, 32 * outputs);
            let g = Geometry { height, width, inputs, outputs, kernel, stride, padding, dilation, groups: 1 };
            if skipped() || g.pixels() == 0 || padding > dilation * (kernel - 1) {
                return Ok(());
            }
            let pictures = values(batch * height * width * inputs, 1);
            let (weight, d) = (values(outputs * g.window(), 2), values(batch * g.pixels() * outputs, 3));
            let (mut out, mut dx, before) = (d.clone(), pictures.clone(), values(weight.len(), 4));
            let mut dw = before.clone();
            let then = Then { bias: Some(&weight[..outputs]), clip: Clip::Relu, onto: None };
            // SAFETY: the unit is there, AVX-512 with it, and all are as long as the sizes say.
            unsafe {
                let of = Convolution { g: &g, pictures: &pictures, weight: &weight, back: false, then };
                convolve(&mut out, of);
                weigh(&mut dw, &g, &pictures, &d);
            }
            let mut sums = [vec![(0.0, 0.0); out.len()], vec![(0.0, 0.0); dx.len()], vec![(0.0, 0.0); dw.len()]];
            terms(&g, batch, |y, x, w| {
                let (of_y, of_x, of_w) = (d[y] as f64, pictures[x] as f64, weight[w] as f64);
                for (of, at, term) in [(0, y, of_x * of_w), (1, x, of_y * of_w), (2, w, of_y * of_x)] {
                    let (sum, size): &mut (f64, f64) = &mut sums[of][at];
                    (*sum, *size) = (*sum + term, *size + term.abs());
                }
            });
            sums[0].iter_mut().enumerate().for_each(|(i, (sum, _))| *sum = (*sum + weight[i % outputs] as f64).max(0.0));
            sums[2].iter_mut().zip(&before).for_each(|((sum, _), before)| *sum += *before as f64);
            prop_assert!(near(&out, &sums[0]), "the output of {g:?}");
            prop_assert!(near(&dw, &sums[2]), "the weight's gradient of {g:?}");
            if let Some(back) = g.back() {
                let then = Then::NOTHING;
                let of = Convolution { g: &back, pictures: &d, weight: &weight, back: true, then };
                // SAFETY: the same.
                unsafe { convolve(&mut dx, of) };
                prop_assert!(near(&dx, &sums[1]), "the pictures' gradient of {g:?}");
            }
        }
    }

    /// The unit multiplies in bf16; the result is as near to the exact one as sums in f32 are.
    #[test]
    fn errors_are_those_of_f32() {
        if skipped() {
            return;
        }
        let (m, k, n) = (64, 700, 64);
        let (a, b) = (values(m * k, 1), values(k * n, 2));
        let (x, y) = (Mat::new(&a, m, k), Mat::new(&b, k, n));
        let out = product(x, y);
        let (mut ours, mut plain) = (0.0, 0.0);
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let exact: f64 = (0..k).map(|p| at(&x, i, p) as f64 * at(&y, p, j) as f64).sum();
            let f32_sum = (0..k).fold(0f32, |sum, p| at(&x, i, p).mul_add(at(&y, p, j), sum));
            ours += (out[i * n + j] as f64 - exact).powi(2);
            plain += (f32_sum as f64 - exact).powi(2);
        }
        assert!(ours <= plain, "{ours} {plain}");
    }

    #[test]
    fn the_bits_do_not_depend_on_the_threads() {
        if skipped() {
            return;
        }
        let (a, b) = (values(333 * 600, 1), values(600 * 200, 2));
        let by = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| product(Mat::new(&a, 333, 600), Mat::new(&b, 600, 200)))
        };
        let one = by(1);
        for threads in [2, 3, 16] {
            assert!(
                one.iter().zip(by(threads)).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{threads} threads"
            );
        }
    }

    /// A loss that grows without bound must be seen: what is not finite makes its row or column not a number.
    #[test]
    fn what_is_not_finite_is_not_lost() {
        if skipped() {
            return;
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
            let (mut a, b) = (values(64 * 64, 1), values(64 * 64, 2));
            a[5 * 64 + 17] = bad;
            let out = product(Mat::new(&a, 64, 64), Mat::new(&b, 64, 64));
            for (i, row) in out.chunks(64).enumerate() {
                assert_eq!(row.iter().all(|v| !v.is_finite()), i == 5, "{bad} in row {i}");
            }
        }
    }
}
