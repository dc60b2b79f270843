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
use super::small::mask;
use super::split::Lines;
use super::tiles::{self, DEPTH, SIDE, STEP, Unit, WIDTH};
use super::{Mat, Piece, Then};

/// Steps of a slice of the inner sums, at most.
const STEPS: usize = 16;
/// Steps that are made at once of a tile, so that what is packed for them stays in the first-level cache: 12 KiB of
/// rows, 24 KiB of columns.
const NEAR: usize = 4;
/// Panels of rows that a thread packs at once, at most: 384 KiB, a fifth of a second-level cache.
const PANELS: usize = 8;
/// Panels of columns that meet them at once.
const PAIR: usize = WIDTH / SIDE;
/// The fewest rows, columns and inner sums that are worth the packing.
const LEAST: usize = 48;

/// What is packed of a panel for [`DEPTH`] inner sums.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Step([u8; STEP]);

/// The sums of the panels in hand, row after row.
#[repr(C, align(64))]
struct Sums([[f32; WIDTH]; PANELS * SIDE]);

/// Whether an (m, n) matrix over `k` is made here: large enough, and not mostly what tiles are filled up with. Debug
/// builds never do: there only dependencies are optimised.
pub(super) fn takes((m, k, n): (usize, usize, usize)) -> bool {
    let filled = |size: usize, to: usize| size.next_multiple_of(to) as f64 / size as f64;
    cfg!(not(debug_assertions))
        && m.min(k).min(n) >= LEAST
        && filled(m, SIDE) * filled(k, DEPTH) * filled(n, SIDE) < 1.3
        && tiles::there()
}

/// Steps of each slice of `k` inner sums, and slices.
fn slices(k: usize) -> (usize, usize) {
    let steps = k.div_ceil(DEPTH);
    let count = steps.div_ceil(STEPS);
    (steps.div_ceil(count), count)
}

/// Bytes that are packed for a product with `n` columns over `k` inner sums.
pub(super) fn packing(k: usize, n: usize) -> usize {
    slices(k).0 * n.div_ceil(SIDE) * STEP
}

/// `out = a b`, or `out += a b` with `add`, and what comes `then` for each piece as it is done.
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
    then: Then<f32>,
) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    let (steps, count) = slices(k);
    let (rows, columns) = (m.div_ceil(SIDE), n.div_ceil(SIDE));
    let mut room = Vec::<MaybeUninit<Step>>::with_capacity(columns * steps);
    // SAFETY: the capacity is there, and what is not initialised is a value of this type.
    unsafe { room.set_len(columns * steps) };
    // A few tasks for each thread, of rows alone where there are enough of them.
    let wanted = 4 * rayon::current_num_threads();
    let tall = rows.div_ceil(wanted).clamp(1, PANELS);
    let across = (wanted / rows.div_ceil(tall)).clamp(1, columns.div_ceil(8));
    let out = Blocks::new(out);
    let b = Lines { data: b.data.as_ptr(), count: n, line: b.col, inner: b.row };
    for slice in 0..count {
        let from = slice * steps * DEPTH;
        let inner = from..k.min(from + steps * DEPTH);
        room.par_chunks_mut(steps).enumerate().with_min_len(4).for_each(|(panel, to)| {
            // SAFETY: as promised; a panel has room for the steps of a slice.
            unsafe { b.pack(panel * SIDE, inner.clone(), true, to.as_mut_ptr().cast()) }
        });
        let share = Share {
            a: Lines { data: a.data.as_ptr(), count: m, line: a.row, inner: a.col },
            inner: inner.clone(),
            packed: &room,
            panel: steps,
            out: &out,
            stride,
            columns: n,
            add: add || slice > 0,
            then: then.filter(|_| slice + 1 == count),
        };
        (0..rows.div_ceil(tall) * across).into_par_iter().for_each(|task| {
            let (high, wide) = (task / across, task % across);
            let rows = high * tall..rows.min((high + 1) * tall);
            // SAFETY: as promised, and no two tasks have a panel of rows and one of columns in common.
            unsafe { share.make(rows, columns * wide / across..columns * (wide + 1) / across) }
        });
    }
}

/// What a thread needs to know of a slice of a product.
struct Share<'a> {
    a: Lines,
    /// The slice of the inner sums.
    inner: Range<usize>,
    /// The right operand, panel after panel, each of so many steps.
    packed: &'a [MaybeUninit<Step>],
    panel: usize,
    out: &'a Blocks<f32>,
    stride: usize,
    /// Columns of the result.
    columns: usize,
    add: bool,
    then: Then<'a, f32>,
}

impl Share<'_> {
    /// Makes the results of panels of rows, at most [`PANELS`], and of columns.
    unsafe fn make(&self, rows: Range<usize>, columns: Range<usize>) {
        let steps = self.inner.len().div_ceil(DEPTH);
        let mut panels = MaybeUninit::<[Step; PANELS * STEPS]>::uninit();
        let mut sums = MaybeUninit::<Sums>::uninit();
        let (panels, sums) = (panels.as_mut_ptr().cast::<Step>(), sums.as_mut_ptr().cast::<f32>());
        // SAFETY: as promised to `multiply`; panels and sums have room for this many rows.
        unsafe {
            for (i, row) in rows.clone().enumerate() {
                self.a.pack(row * SIDE, self.inner.clone(), false, panels.add(i * steps).cast());
            }
            let unit = Unit::new();
            for column in columns.clone().step_by(PAIR) {
                // Where a single panel is left it stands for both; what the second makes is not stored.
                let pair = [column, (column + 1).min(columns.end - 1)]
                    .map(|c| self.packed.as_ptr().add(c * self.panel));
                for near in (0..steps).step_by(NEAR) {
                    for i in 0..rows.len() {
                        let a = panels.add(i * steps + near).cast();
                        let b = pair.map(|b| b.add(near).cast());
                        unit.sums(a, b, NEAR.min(steps - near), sums.add(i * SIDE * WIDTH), near > 0);
                    }
                }
                let rows = rows.start * SIDE..self.a.count.min(rows.end * SIDE);
                let until = (column + PAIR).min(columns.end) * SIDE;
                self.store(sums, rows, column * SIDE..self.columns.min(until));
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn store(&self, sums: *const f32, rows: Range<usize>, columns: Range<usize>) {
        let masks = [mask(columns.len()), mask(columns.len().saturating_sub(SIDE))];
        let piece = Piece { all: self.out, stride: self.stride, rows, columns };
        for (i, (_, row)) in piece.rows().enumerate() {
            for (v, mask) in masks.into_iter().enumerate() {
                let to = row.as_mut_ptr().wrapping_add(v * SIDE);
                // SAFETY: there are sums for every row, and masks keep to the columns of the piece.
                unsafe {
                    let sum = _mm512_load_ps(sums.add(i * WIDTH + v * SIDE));
                    let before = _mm512_maskz_loadu_ps(if self.add { mask } else { 0 }, to);
                    _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sum));
                }
            }
        }
        if let Some(then) = self.then {
            then(piece);
        }
    }
}
