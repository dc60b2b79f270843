//! Operands as the matrix unit reads them: every f32 in three values of bf16, in tiles.
//!
//! The first part is the value rounded to bf16, the second what that left, rounded, the third the rest, which has few
//! enough digits to be exact. A tile pairs inner index `p` with `p + 16`: with that either direction an operand is dense
//! in gives whole vectors, and one form of a tile is the transpose of the other.

use std::arch::x86_64::*;
use std::ops::Range;

use super::small::{mask, turned};
use super::tiles::{DEPTH, SIDE, STEP};

const LANES: usize = 16;
const TILE: usize = 1024;

/// An operand as a list of lines: rows of the left one, columns of the right one.
pub(super) trait Operand: Sync {
    /// Packs values `inner` of lines `first..first + SIDE`, as many as there are; what is beyond them is 0. `columns`
    /// gives tiles of pairs by lines, as the right operand is read, instead of lines by pairs.
    ///
    /// # Safety
    /// The machine has AVX-512 (F), the values lie inside their slice, and `to` has room for a [`STEP`] for each begun
    /// [`DEPTH`] of them, aligned to 64.
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8);
}

/// Lines of a matrix: value `p` of line `i` is at `i * line + p * inner`, and one of the two is 1.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    pub data: *const f32,
    pub count: usize,
    pub line: usize,
    pub inner: usize,
}

// SAFETY: it is a borrowed slice whose bounds the caller has checked.
unsafe impl Send for Lines {}
unsafe impl Sync for Lines {}

impl Operand for Lines {
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        // SAFETY: the same promises.
        unsafe { self.pack_lines(first, inner, columns, to) }
    }
}

impl Lines {
    #[target_feature(enable = "avx512f")]
    unsafe fn pack_lines(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        let lines = self.count.saturating_sub(first).min(SIDE);
        for (step, p) in inner.clone().step_by(DEPTH).enumerate() {
            // SAFETY: `lines` and the depth left keep reads inside.
            unsafe {
                let data = self.data.add(first * self.line + p * self.inner);
                self.fetch(data.wrapping_add(DEPTH * self.inner));
                self.square(data, lines, (inner.end - p).min(DEPTH), columns, to.add(step * STEP));
            }
        }
    }

    /// Brings near the next values to be packed: they lie too far from each other for the machine's own prefetchers.
    #[inline]
    fn fetch(&self, data: *const f32) {
        let (rows, apart, vectors) =
            if self.inner == 1 { (SIDE, self.line, DEPTH / LANES) } else { (DEPTH, self.inner, 1) };
        for (row, vector) in (0..rows).flat_map(|row| (0..vectors).map(move |vector| (row, vector))) {
            // SAFETY: nothing is read.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(data.wrapping_add(row * apart + vector * LANES).cast()) }
        }
    }

    /// One tile of each part, from `lines` lines of `depth` values.
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn square(&self, data: *const f32, lines: usize, depth: usize, columns: bool, to: *mut u8) {
        let dense = self.inner == 1;
        // SAFETY: masks keep the reads inside; a vector of which nothing is read may begin outside. A tile has 16 rows of
        // 64 bytes.
        unsafe {
            if dense {
                let (low, high) = (mask(depth), mask(depth.saturating_sub(LANES)));
                for i in 0..LANES {
                    let line = data.wrapping_add(i * self.line);
                    let (low, high) = if i < lines { (low, high) } else { (0, 0) };
                    let a = _mm512_maskz_loadu_ps(low, line);
                    let b = _mm512_maskz_loadu_ps(high, line.wrapping_add(LANES));
                    store(a, b, to.add(i * 64));
                }
            } else {
                let all = mask(lines);
                for i in 0..LANES {
                    let (low, high) =
                        (if i < depth { all } else { 0 }, if i + LANES < depth { all } else { 0 });
                    let a = _mm512_maskz_loadu_ps(low, data.wrapping_add(i * self.inner));
                    let b = _mm512_maskz_loadu_ps(high, data.wrapping_add((i + LANES) * self.inner));
                    store(a, b, to.add(i * 64));
                }
            }
            if dense == columns {
                for part in 0..3 {
                    turn(to.add(part * TILE).cast());
                }
            }
        }
    }
}

/// Writes the parts of two vectors, in pairs, to a row of each part's tile.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn store(a: __m512, b: __m512, to: *mut u8) {
    let ([a0, a1, a2], [b0, b1, b2]) = (split(a), split(b));
    // SAFETY: promised by the caller.
    unsafe {
        for (part, (a, b)) in [(a0, b0), (a1, b1), (a2, b2)].into_iter().enumerate() {
            let pairs = _mm512_or_si512(_mm512_srli_epi32::<16>(a), b);
            _mm512_store_si512(to.add(part * TILE).cast(), pairs);
        }
    }
}

/// The transpose of a tile in place.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn turn(tile: *mut f32) {
    let mut rows = [_mm512_setzero_ps(); LANES];
    // SAFETY: a tile has 16 rows of 16 words.
    unsafe {
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm512_load_ps(tile.add(i * LANES));
        }
        let rows = turned(rows);
        for (i, row) in rows.iter().enumerate() {
            _mm512_store_ps(tile.add(i * LANES), *row);
        }
    }
}

/// The three parts of 16 values, each in the upper half of its 32 bits with a lower half of 0. Their sum is the value;
/// what is not finite makes one that is not a number.
#[target_feature(enable = "avx512f")]
#[inline]
fn split(x: __m512) -> [__m512i; 3] {
    let (high, rest) = rounded(x);
    let (middle, rest) = rounded(rest);
    [high, middle, _mm512_castps_si512(rest)]
}

/// A value rounded to bf16, and what is left of it.
#[target_feature(enable = "avx512f")]
#[inline]
fn rounded(x: __m512) -> (__m512i, __m512) {
    let half = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    let near = _mm512_and_si512(half, _mm512_set1_epi32(!0xffff));
    (near, _mm512_sub_ps(x, _mm512_castsi512_ps(near)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::dispatch::{Dispatch, dispatch};

    proptest! {
        /// The parts of a value add up to it exactly, each is a value of bf16, and each is small beside the one before.
        #[test]
        fn nothing_of_a_value_is_lost(digits: u32, exponent in 30u32..240, negative: bool) {
            if dispatch() < Dispatch::Avx512 {
                println!("skipped: the dispatch is {:?}", dispatch());
                return Ok(());
            }
            let value = f32::from_bits((negative as u32) << 31 | exponent << 23 | digits & 0x7f_ffff);
            let mut bits = [[0u32; LANES]; 3];
            // SAFETY: AVX-512 was found, and each array has room for a vector.
            unsafe {
                for (part, bits) in split(_mm512_set1_ps(value)).into_iter().zip(&mut bits) {
                    _mm512_storeu_si512(bits.as_mut_ptr().cast(), part);
                }
            }
            let parts = bits.map(|bits| f32::from_bits(bits[0]) as f64);
            prop_assert_eq!(parts.iter().sum::<f64>(), value as f64);
            prop_assert!(bits.iter().all(|bits| bits[0] & 0xffff == 0));
            prop_assert!(parts[1].abs() <= parts[0].abs() / 256.0);
            prop_assert!(parts[2].abs() <= parts[0].abs() / 65536.0);
        }
    }
}
