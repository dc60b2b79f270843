//! What the kernels of AVX-512 and AMX share.

use std::arch::x86_64::*;

/// f32 lanes of a vector.
pub(super) const LANES: usize = 16;

/// A mask of the first `count` lanes, at most all of them.
pub(super) fn lane_mask(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// Transposes 16 vectors: exchanges pairs, then groups of four, then 128-bit lanes.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn transpose_16x16(rows: [__m512; LANES]) -> [__m512; LANES] {
    let mut pairs = rows;
    for i in (0..LANES).step_by(2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    let mut fours = pairs;
    for i in (0..LANES).step_by(4) {
        for half in 0..2 {
            let (a, b) = (_mm512_castps_pd(pairs[i + half]), _mm512_castps_pd(pairs[i + 2 + half]));
            fours[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    let mut eights = fours;
    for i in 0..4 {
        for half in [0, 8] {
            let (a, b) = (fours[half + i], fours[half + 4 + i]);
            eights[half + i] = _mm512_shuffle_f32x4::<0x88>(a, b);
            eights[half + 4 + i] = _mm512_shuffle_f32x4::<0xdd>(a, b);
        }
    }
    let mut whole = eights;
    for i in 0..8 {
        whole[i] = _mm512_shuffle_f32x4::<0x88>(eights[i], eights[8 + i]);
        whole[8 + i] = _mm512_shuffle_f32x4::<0xdd>(eights[i], eights[8 + i]);
    }
    whole
}
