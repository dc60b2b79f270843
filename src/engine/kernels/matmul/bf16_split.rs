//! Operands in the form AMX reads: every value as a sum of bf16 parts, packed in tiles.
//!
//! A bf16 is its own only part. An f16 has two parts: itself rounded to bf16, and the remainder, which has few enough
//! bits to be exact. An f32 has three, by the same rule. A tile holds pairs of K indices. Any pairing works as long as
//! both operands agree, so each type uses the pairing that its vector loads give for free.

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::super::Elem;
use super::amx_tiles::{TILE_BYTES, TILE_DIM, TILE_K};
use super::avx512::{lane_mask, transpose_16x16};

const LANES: usize = 16;

/// One tile row per part, the largest part first; parts beyond `PARTS` are ignored.
type SplitRow = [__m512i; 3];

/// A stored type that AMX supports.
///
/// # Safety
/// All methods need AVX-512 (F, BW, VL), and pointers to as many values as masks and counts select.
pub(super) trait AmxElem: Elem<Acc = f32> {
    /// bf16 parts that add up to one value.
    const PARTS: usize;
    /// Pair `i` of a tile has the K indices `i * PAIR.0` and `i * PAIR.0 + PAIR.1`.
    const PAIR: (usize, usize);

    /// The pairs of the first `count`, at most [`TILE_K`], of contiguous values.
    unsafe fn pack_contiguous(from: *const Self, count: usize) -> SplitRow;

    /// The pairs of 16 lines: one value of each line at `low` and one at `high`, for the lines in the masks.
    unsafe fn pack_strided(low: (*const Self, __mmask16), high: (*const Self, __mmask16)) -> SplitRow;

    unsafe fn load(from: *const Self, mask: __mmask16) -> __m512;

    /// Rounds to nearest, ties to even.
    unsafe fn store(to: *mut Self, mask: __mmask16, values: __m512);
}

impl AmxElem for f32 {
    const PARTS: usize = 3;
    const PAIR: (usize, usize) = (1, LANES);

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_contiguous(from: *const f32, count: usize) -> SplitRow {
        let high = (from.wrapping_add(LANES), lane_mask(count.saturating_sub(LANES)));
        // SAFETY: the caller upholds this function's contract.
        unsafe { Self::pack_strided((from, lane_mask(count)), high) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_strided(low: (*const f32, __mmask16), high: (*const f32, __mmask16)) -> SplitRow {
        // SAFETY: the caller upholds this function's contract.
        let (a, b) = unsafe { (Self::load(low.0, low.1), Self::load(high.0, high.1)) };
        let ([a0, a1, a2], [b0, b1, b2]) = (split_f32(a), split_f32(b));
        [interleave_bf16(a0, b0), interleave_bf16(a1, b1), interleave_bf16(a2, b2)]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(from: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store(to: *mut f32, mask: __mmask16, values: __m512) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm512_mask_storeu_ps(to, mask, values) }
    }
}

impl AmxElem for bf16 {
    const PARTS: usize = 1;
    const PAIR: (usize, usize) = (2, 1);

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_contiguous(from: *const bf16, count: usize) -> SplitRow {
        let mask = if count >= TILE_K { !0 } else { (1u32 << count) - 1 };
        // SAFETY: the caller upholds this function's contract.
        let pairs = unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) };
        [pairs; 3]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_strided(low: (*const bf16, __mmask16), high: (*const bf16, __mmask16)) -> SplitRow {
        // SAFETY: the caller upholds this function's contract.
        let (a, b) = unsafe { (load_u16(low.0.cast(), low.1), load_u16(high.0.cast(), high.1)) };
        [_mm512_or_si512(a, _mm512_slli_epi32::<16>(b)); 3]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(from: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller upholds this function's contract.
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(unsafe { load_u16(from.cast(), mask) }))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store(to: *mut bf16, mask: __mmask16, values: __m512) {
        let bits = _mm512_castps_si512(values);
        let lsb = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), lsb);
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        // Sets the quiet bit, so a NaN stays NaN when its lower half is cut off.
        let rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x40_0000));
        let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), mask, words) }
    }
}

impl AmxElem for f16 {
    const PARTS: usize = 2;
    const PAIR: (usize, usize) = (1, LANES);

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_contiguous(from: *const f16, count: usize) -> SplitRow {
        let high = (from.wrapping_add(LANES), lane_mask(count.saturating_sub(LANES)));
        // SAFETY: the caller upholds this function's contract.
        unsafe { Self::pack_strided((from, lane_mask(count)), high) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_strided(low: (*const f16, __mmask16), high: (*const f16, __mmask16)) -> SplitRow {
        // SAFETY: the caller upholds this function's contract.
        let (a, b) = unsafe { (Self::load(low.0, low.1), Self::load(high.0, high.1)) };
        let ((a0, a1), (b0, b1)) = (round_to_bf16(a), round_to_bf16(b));
        let rest = interleave_bf16(_mm512_castps_si512(a1), _mm512_castps_si512(b1));
        [interleave_bf16(a0, b0), rest, rest]
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn load(from: *const f16, mask: __mmask16) -> __m512 {
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn store(to: *mut f16, mask: __mmask16, values: __m512) {
        let words = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), mask, words) }
    }
}

/// Loads 16-bit words, zero-extended to 32 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn load_u16(from: *const i16, mask: __mmask16) -> __m512i {
    // SAFETY: the caller upholds this function's contract.
    _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, from) })
}

/// Combines bf16 values, each in the upper half of its 32 bits, into pairs with `first` in the lower half.
#[target_feature(enable = "avx512f")]
#[inline]
fn interleave_bf16(first: __m512i, second: __m512i) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(first), second)
}

/// Writes one row of each part's tile.
///
/// # Safety
/// The CPU has AVX-512 (F), and `to` has room for a tile of each part of `E`, aligned to 64.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn store_tile_row<E: AmxElem>(parts: SplitRow, to: *mut u8) {
    for (part, pairs) in parts.into_iter().enumerate().take(E::PARTS) {
        // SAFETY: the caller upholds this function's contract.
        unsafe { _mm512_store_si512(to.add(part * TILE_BYTES).cast(), pairs) }
    }
}

/// An operand as a list of lines: rows of the left operand, columns of the right.
pub(super) trait Operand: Sync {
    type Value: AmxElem;

    /// Packs the K range `inner` of lines `first..first + TILE_DIM`; lines past the last are 0. `columns` packs pairs
    /// by lines, the layout of AMX's right operand, instead of lines by pairs.
    ///
    /// # Safety
    /// The CPU has AVX-512 (F, BW, VL), the values lie inside their slice, and `to` has room, aligned to 64, for a tile
    /// of each part for every [`TILE_K`] of `inner`, rounded up.
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8);
}

/// Lines of a matrix: value `p` of line `i` is at `i * outer_stride + p * inner_stride`; one of the strides is 1.
#[derive(Clone, Copy)]
pub(super) struct StridedOperand<E> {
    pub data: *const E,
    pub count: usize,
    pub outer_stride: usize,
    pub inner_stride: usize,
}

// SAFETY: `data` points into a borrowed slice, and the caller has checked the bounds.
unsafe impl<E: Sync> Send for StridedOperand<E> {}
unsafe impl<E: Sync> Sync for StridedOperand<E> {}

impl<E: AmxElem> Operand for StridedOperand<E> {
    type Value = E;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack(&self, first: usize, inner: Range<usize>, columns: bool, to: *mut u8) {
        let lines = self.count.saturating_sub(first).min(TILE_DIM);
        for (step, p) in inner.clone().step_by(TILE_K).enumerate() {
            // SAFETY: `lines` and the remaining range of `inner` bound the reads.
            unsafe {
                let data = self.data.add(first * self.outer_stride + p * self.inner_stride);
                self.prefetch(data.wrapping_add(TILE_K * self.inner_stride));
                self.pack_tile(
                    data,
                    lines,
                    (inner.end - p).min(TILE_K),
                    columns,
                    to.add(step * E::PARTS * TILE_BYTES),
                );
            }
        }
    }
}

impl<E: AmxElem> StridedOperand<E> {
    /// Prefetches the next values to pack: their stride is too long for hardware prefetchers.
    #[inline]
    fn prefetch(&self, data: *const E) {
        let (rows, stride, bytes) = match self.inner_stride {
            1 => (TILE_DIM, self.outer_stride, TILE_K * size_of::<E>()),
            inner => (TILE_K, inner, TILE_DIM * size_of::<E>()),
        };
        for (row, byte) in (0..rows).flat_map(|row| (0..bytes).step_by(64).map(move |byte| (row, byte))) {
            // SAFETY: a prefetch does not access memory architecturally.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(data.wrapping_add(row * stride).cast::<i8>().wrapping_add(byte))
            }
        }
    }

    /// One tile of each part, from `lines` lines of `depth` values.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    unsafe fn pack_tile(&self, data: *const E, lines: usize, depth: usize, columns: bool, to: *mut u8) {
        let dense = self.inner_stride == 1;
        // SAFETY: counts and masks bound the reads; a vector with an empty mask may begin outside the slice. A tile has
        // 16 rows of 64 bytes.
        unsafe {
            if dense {
                for i in 0..LANES {
                    let line = data.wrapping_add(i * self.outer_stride);
                    store_tile_row::<E>(
                        E::pack_contiguous(line, if i < lines { depth } else { 0 }),
                        to.add(i * 64),
                    );
                }
            } else {
                let all = lane_mask(lines);
                let at =
                    |p: usize| (data.wrapping_add(p * self.inner_stride), if p < depth { all } else { 0 });
                for i in 0..LANES {
                    let low = i * E::PAIR.0;
                    store_tile_row::<E>(E::pack_strided(at(low), at(low + E::PAIR.1)), to.add(i * 64));
                }
            }
            if dense == columns {
                for part in 0..E::PARTS {
                    transpose_tile(to.add(part * TILE_BYTES).cast());
                }
            }
        }
    }
}

/// Transposes a tile in place.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn transpose_tile(tile: *mut f32) {
    let mut rows = [_mm512_setzero_ps(); LANES];
    // SAFETY: a tile has 16 rows of 16 words.
    unsafe {
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm512_load_ps(tile.add(i * LANES));
        }
        let rows = transpose_16x16(rows);
        for (i, row) in rows.iter().enumerate() {
            _mm512_store_ps(tile.add(i * LANES), *row);
        }
    }
}

/// The three parts of 16 values, each in the upper half of its 32 bits, with a zero lower half. They add up to the
/// value exactly, if it is 2^-97 or larger; a non-finite value has a NaN part.
#[target_feature(enable = "avx512f")]
#[inline]
fn split_f32(x: __m512) -> [__m512i; 3] {
    let (high, rest) = round_to_bf16(x);
    let (middle, rest) = round_to_bf16(rest);
    // A subnormal remainder has digits in its lower half, which is the place of the other value of its pair.
    [high, middle, _mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32(!0xffff))]
}

/// A value rounded to bf16, and the remainder.
#[target_feature(enable = "avx512f")]
#[inline]
fn round_to_bf16(x: __m512) -> (__m512i, __m512) {
    let half = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    let rounded = _mm512_and_si512(half, _mm512_set1_epi32(!0xffff));
    (rounded, _mm512_sub_ps(x, _mm512_castsi512_ps(rounded)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::dispatch::{Dispatch, dispatch};

    fn skipped() -> bool {
        if dispatch() < Dispatch::Avx512 {
            println!("skipped: the dispatch is {:?}", dispatch());
        }
        dispatch() < Dispatch::Avx512
    }

    fn words_of(vector: __m512i) -> [u32; LANES] {
        // SAFETY: both are 64 bytes without padding.
        unsafe { std::mem::transmute(vector) }
    }

    proptest! {
        /// The parts add up to the value exactly, each is a bf16, and each is small relative to the one before.
        #[test]
        fn nothing_of_a_value_is_lost(digits: u32, exponent in 30u32..240, negative: bool) {
            if skipped() {
                return Ok(());
            }
            let value = f32::from_bits((negative as u32) << 31 | exponent << 23 | digits & 0x7f_ffff);
            // SAFETY: the CPU has AVX-512.
            let bits = unsafe { split_f32(_mm512_set1_ps(value)) }.map(words_of);
            let parts = bits.map(|bits| f32::from_bits(bits[0]) as f64);
            prop_assert_eq!(parts.iter().sum::<f64>(), value as f64);
            prop_assert!(bits.iter().all(|bits| bits[0] & 0xffff == 0));
            prop_assert!(parts[1].abs() <= parts[0].abs() / 256.0);
            prop_assert!(parts[2].abs() <= parts[0].abs() / 65536.0);
        }

        /// A value of any size has nothing in the place of the other value of its pair.
        #[test]
        fn a_value_does_not_reach_into_its_neighbour(bits: u32) {
            if skipped() || !f32::from_bits(bits).is_finite() {
                return Ok(());
            }
            let (low, high) = ([1f32; LANES], [f32::from_bits(bits); LANES]);
            // SAFETY: the CPU has AVX-512, and each array has a vector.
            let parts = unsafe { f32::pack_strided((low.as_ptr(), !0), (high.as_ptr(), !0)) }.map(words_of);
            prop_assert_eq!(parts.map(|part| part[0] << 16), [1f32.to_bits(), 0, 0]);
        }

        /// Rounds like the `half` crate, for any value.
        #[test]
        fn stores_round_to_nearest_even(bits: u32) {
            if skipped() {
                return Ok(());
            }
            let value = f32::from_bits(bits);
            let (mut narrow, mut half) = ([bf16::ZERO; LANES], [f16::ZERO; LANES]);
            // SAFETY: the CPU has AVX-512, and each array has room for a vector.
            unsafe {
                <bf16 as AmxElem>::store(narrow.as_mut_ptr(), !1, _mm512_set1_ps(value));
                <f16 as AmxElem>::store(half.as_mut_ptr(), !1, _mm512_set1_ps(value));
            }
            prop_assert_eq!((narrow[0], half[0]), (bf16::ZERO, f16::ZERO), "masked out");
            prop_assert_eq!(narrow[1].to_bits(), bf16::from_f32(value).to_bits());
            prop_assert!(half[1].to_bits() == f16::from_f32(value).to_bits() || value.is_nan() && half[1].is_nan());
        }
    }

    /// Every finite f16 is the sum of its two parts.
    #[test]
    fn two_parts_are_enough_for_f16() {
        if skipped() {
            return;
        }
        for value in (0..=u16::MAX).map(f16::from_bits).filter(|v| v.is_finite()) {
            let values = [value; TILE_K];
            // SAFETY: the CPU has AVX-512, and `values` has `TILE_K` elements.
            let parts = unsafe { f16::pack_contiguous(values.as_ptr(), TILE_K) }.map(words_of);
            let low = |part: usize| f32::from_bits(parts[part][3] << 16) as f64;
            let high = |part: usize| f32::from_bits(parts[part][3] & 0xffff_0000) as f64;
            assert_eq!((low(0) + low(1), high(0) + high(1)), (value.to_f64(), value.to_f64()));
        }
    }
}
