//! The [`PanelKernel`]s: packing and rounding are loops that the compiler vectorizes for each instruction set; tiles of
//! sums, which must stay in registers, and transposes use its intrinsics.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use candle_core::DType;

#[cfg(target_arch = "x86_64")]
use super::avx512::{self, lane_mask};
use super::panel::{PanelGemm, PanelKernel, RowEpilogue};
use crate::kernels::clamp::clamp;
use crate::kernels::{Elem, Real};

/// The baseline of the architecture.
pub(super) struct Portable;

/// AVX2, FMA and BMI2.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx2;

/// AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
pub(super) struct Avx512;

/// A vector of an instruction set.
///
/// # Safety
/// The CPU has its instructions, and pointers are to as many values as the vector or `count` says. Methods are inlined
/// into a function that has the instructions.
trait Vector<R>: Copy {
    const LANES: usize;

    unsafe fn splat(value: R) -> Self;
    unsafe fn load(from: *const R) -> Self;
    /// `self + a * b`.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    /// `out = self`, or `out += self`, for the first `count` values; all if there are more.
    unsafe fn store(self, out: *mut R, count: usize, accumulate: bool);
}

impl<R: Real> Vector<R> for [R; 4] {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: R) -> Self {
        [value; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const R) -> Self {
        // SAFETY: the caller's contract, as below.
        unsafe { *from.cast() }
    }

    /// Fused only where the baseline has an instruction for it: elsewhere it would be a library call.
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        std::array::from_fn(|i| match cfg!(target_arch = "aarch64") {
            true => a[i].fma(b[i], self[i]),
            false => self[i] + a[i] * b[i],
        })
    }

    #[inline(always)]
    unsafe fn store(self, out: *mut R, count: usize, accumulate: bool) {
        for (i, value) in self.into_iter().enumerate() {
            if i < count {
                unsafe { *out.add(i) = if accumulate { *out.add(i) + value } else { value } }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector<f32> for __m256 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        unsafe { _mm256_fmadd_ps(a, b, self) }
    }

    #[inline(always)]
    unsafe fn store(self, out: *mut f32, count: usize, accumulate: bool) {
        unsafe {
            if count >= 8 {
                let before = if accumulate { _mm256_loadu_ps(out) } else { _mm256_setzero_ps() };
                return _mm256_storeu_ps(out, _mm256_add_ps(before, self));
            }
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
            let before = if accumulate { _mm256_maskload_ps(out, mask) } else { _mm256_setzero_ps() };
            _mm256_maskstore_ps(out, mask, _mm256_add_ps(before, self));
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Vector<f32> for __m512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        unsafe { _mm512_fmadd_ps(a, b, self) }
    }

    #[inline(always)]
    unsafe fn store(self, out: *mut f32, count: usize, accumulate: bool) {
        let mask = lane_mask(count);
        unsafe {
            let before = _mm512_maskz_loadu_ps(if accumulate { mask } else { 0 }, out);
            _mm512_mask_storeu_ps(out, mask, _mm512_add_ps(before, self));
        }
    }
}

/// Rows `i..i + ROWS` of a strip in `VECTORS` vectors of columns; value (i, p) of `a` is at `i * row + p * col`.
///
/// # Safety
/// As for [`PanelKernel::multiply`].
#[inline(always)]
unsafe fn tile<R: Real, V: Vector<R>, const ROWS: usize, const VECTORS: usize>(
    gemm: &PanelGemm<R>,
    i: usize,
    (row, col): (usize, usize),
) {
    // SAFETY: the caller's contract; panels are padded to whole vectors.
    unsafe {
        let mut sums = [[V::splat(R::ZERO); VECTORS]; ROWS];
        let (mut a, mut packed) = (gemm.a.add(i * row), gemm.packed);
        for _ in 0..gemm.depth {
            let mut values = [V::splat(R::ZERO); VECTORS];
            for (v, value) in values.iter_mut().enumerate() {
                *value = V::load(packed.add(v * V::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = V::splat(*a.add(r * row));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = sum.add_product(factor, value);
                }
            }
            // The last step may point past the end; nothing is read there.
            (a, packed) = (a.wrapping_add(col), packed.wrapping_add(VECTORS * V::LANES));
        }
        for (r, sums) in sums.into_iter().enumerate() {
            let out = gemm.out.add((i + r) * gemm.stride);
            for (v, sum) in sums.into_iter().enumerate() {
                let count = if v + 1 < VECTORS { V::LANES } else { gemm.columns - v * V::LANES };
                sum.store(out.add(v * V::LANES), count, gemm.accumulate);
            }
        }
    }
}

/// All rows of a strip in tiles of `ROWS`, and the last ones in smaller tiles.
///
/// # Safety
/// As for [`PanelKernel::multiply`].
#[inline(always)]
unsafe fn tiles<R: Real, V: Vector<R>, const ROWS: usize, const VECTORS: usize>(gemm: &PanelGemm<R>) {
    // A unit stride of `a`, if it has one, becomes a constant, so that addresses are cheap to compute.
    // SAFETY: the caller upholds the same contract, as below.
    unsafe {
        match gemm.a_strides {
            (row, 1) => strided_tiles::<R, V, ROWS, VECTORS>(gemm, (row, 1)),
            (1, col) => strided_tiles::<R, V, ROWS, VECTORS>(gemm, (1, col)),
            strides => strided_tiles::<R, V, ROWS, VECTORS>(gemm, strides),
        }
    }
}

#[inline(always)]
unsafe fn strided_tiles<R: Real, V: Vector<R>, const ROWS: usize, const VECTORS: usize>(
    gemm: &PanelGemm<R>,
    strides: (usize, usize),
) {
    let mut i = 0;
    unsafe {
        while i + ROWS <= gemm.rows {
            tile::<R, V, ROWS, VECTORS>(gemm, i, strides);
            i += ROWS;
        }
        while i + 4 <= gemm.rows {
            tile::<R, V, 4, VECTORS>(gemm, i, strides);
            i += 4;
        }
        while i < gemm.rows {
            tile::<R, V, 1, VECTORS>(gemm, i, strides);
            i += 1;
        }
    }
}

// Tiles for each number of vectors in the rows of a panel: their sums and a row of the panel fit into 16 registers, or
// with AVX-512 into 32.

unsafe fn multiply_portable<R: Real>(gemm: &PanelGemm<R>) {
    // SAFETY: the caller upholds the contract of `tiles`, as below.
    unsafe {
        match gemm.columns.div_ceil(4) {
            2 => tiles::<R, [R; 4], 6, 2>(gemm),
            _ => tiles::<R, [R; 4], 12, 1>(gemm),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2")]
unsafe fn multiply_avx2(gemm: &PanelGemm<f32>) {
    unsafe {
        match gemm.columns.div_ceil(8) {
            2 => tiles::<f32, __m256, 6, 2>(gemm),
            _ => tiles::<f32, __m256, 12, 1>(gemm),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn multiply_avx512(gemm: &PanelGemm<f32>) {
    unsafe {
        match gemm.columns.div_ceil(16) {
            4 => tiles::<f32, __m512, 6, 4>(gemm),
            3 => tiles::<f32, __m512, 8, 3>(gemm),
            2 => tiles::<f32, __m512, 12, 2>(gemm),
            _ => tiles::<f32, __m512, 16, 1>(gemm),
        }
    }
}

/// The same GEMM, whose values are f32: kernels with vectors are only chosen for types that accumulate in f32.
#[cfg(target_arch = "x86_64")]
fn in_f32<R: Real>(gemm: &PanelGemm<R>) -> &PanelGemm<f32> {
    assert_eq!(R::DTYPE, DType::F32, "a GEMM in vectors of f32");
    // SAFETY: each numeric type has its own `DTYPE`, so `R` is f32.
    unsafe { &*std::ptr::from_ref(gemm).cast() }
}

#[inline(always)]
unsafe fn widen<E: Elem>(from: *const E, to: &mut [E::Acc]) {
    // SAFETY: the caller's contract.
    let from = unsafe { std::slice::from_raw_parts(from, to.len()) };
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_acc());
}

#[inline(always)]
unsafe fn pack<E: Elem, const LANES: usize>(
    from: *const E,
    (row, col): (usize, usize),
    depth: usize,
    cols: usize,
    to: *mut E::Acc,
) {
    let width = cols.next_multiple_of(LANES);
    // SAFETY: the caller's contract; `to` has room for whole vectors.
    unsafe {
        if col == 1 {
            for p in 0..depth {
                let to = std::slice::from_raw_parts_mut(to.add(p * width), width);
                widen(from.add(p * row), &mut to[..cols]);
                to[cols..].fill(E::Acc::ZERO);
            }
            return;
        }
        // Two squares at a time, a cache line or more of every column: columns may share a set of the cache.
        for j in (0..width).step_by(LANES) {
            for p in (0..depth).step_by(2 * LANES) {
                let mut squares = [[[E::Acc::ZERO; LANES]; LANES]; 2];
                for q in 0..LANES.min(cols - j) {
                    for (half, square) in squares.iter_mut().enumerate() {
                        let first = p + half * LANES;
                        let from = from.wrapping_add((j + q) * col + first);
                        match depth.saturating_sub(first) {
                            count if count >= LANES => widen(from, &mut square[q]),
                            count => widen(from, &mut square[q][..count]),
                        }
                    }
                }
                for (half, square) in squares.iter_mut().enumerate() {
                    let first = p + half * LANES;
                    transpose(square);
                    for (i, line) in square.iter().enumerate().take(depth.saturating_sub(first)) {
                        *to.add((first + i) * width + j).cast() = *line;
                    }
                }
            }
        }
    }
}

type Square<R, const LANES: usize> = [[R; LANES]; LANES];

/// # Safety
/// The CPU has the instructions of the kernel with vectors of `LANES`.
#[inline(always)]
unsafe fn transpose<R: Real, const LANES: usize>(square: &mut Square<R, LANES>) {
    #[cfg(target_arch = "x86_64")]
    if LANES >= 8 && R::DTYPE == DType::F32 {
        let square = std::ptr::from_mut(square);
        // SAFETY: each numeric type has its own `DTYPE`, so these are the types of the values.
        return unsafe {
            match LANES {
                8 => transpose_8x8(&mut *square.cast()),
                _ => transpose_16x16(&mut *square.cast()),
            }
        };
    }
    let rows = *square;
    *square = std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]));
}

/// Exchanges pairs, then groups of four, then halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn transpose_8x8(square: &mut Square<f32, 8>) {
    // SAFETY: arrays of eight values are read and written.
    let rows = square.each_ref().map(|row| unsafe { _mm256_loadu_ps(row.as_ptr()) });
    let mut pairs = rows;
    for i in (0..8).step_by(2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    let mut fours = pairs;
    for i in (0..8).step_by(4) {
        for half in 0..2 {
            let (a, b) = (_mm256_castps_pd(pairs[i + half]), _mm256_castps_pd(pairs[i + 2 + half]));
            fours[i + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            fours[i + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
    for i in 0..4 {
        let low = _mm256_permute2f128_ps::<0x20>(fours[i], fours[4 + i]);
        let high = _mm256_permute2f128_ps::<0x31>(fours[i], fours[4 + i]);
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_ps(square[i].as_mut_ptr(), low);
            _mm256_storeu_ps(square[4 + i].as_mut_ptr(), high);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose_16x16(square: &mut Square<f32, 16>) {
    // SAFETY: arrays of 16 values are read and written.
    let rows = square.each_ref().map(|row| unsafe { _mm512_loadu_ps(row.as_ptr()) });
    for (row, values) in square.iter_mut().zip(avx512::transpose_16x16(rows)) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(row.as_mut_ptr(), values) }
    }
}

#[inline(always)]
unsafe fn store<O: Elem>(sums: *const O::Acc, out: &mut [O], epilogue: Option<RowEpilogue<O>>) {
    // SAFETY: the caller's contract.
    let sums = unsafe { std::slice::from_raw_parts(sums, out.len()) };
    let Some(RowEpilogue { bias, bounds, residual }) = epilogue else {
        return out.iter_mut().zip(sums).for_each(|(out, sum)| *out = O::from_acc(*sum));
    };
    match (bias, residual) {
        (None, None) => out.iter_mut().zip(sums).for_each(|(o, s)| *o = O::from_acc(clamp(*s, bounds))),
        (Some(bias), None) => {
            let values = out.iter_mut().zip(sums).zip(bias);
            values.for_each(|((o, s), b)| *o = O::from_acc(clamp(*s + b.to_acc(), bounds)));
        }
        (None, Some(residual)) => {
            let values = out.iter_mut().zip(sums).zip(residual);
            values.for_each(|((o, s), r)| *o = O::from_acc(clamp(*s, bounds) + r.to_acc()));
        }
        (Some(bias), Some(residual)) => {
            let values = out.iter_mut().zip(sums).zip(bias).zip(residual);
            values.for_each(|(((o, s), b), r)| {
                *o = O::from_acc(clamp(*s + b.to_acc(), bounds) + r.to_acc());
            });
        }
    }
}

macro_rules! panel_kernel {
    ($kernel:ident, $lanes:literal, $columns:literal, |$gemm:ident| $multiply:expr $(, #[$features:meta])?) => {
        impl<E: Elem, O: Elem<Acc = E::Acc>> PanelKernel<E, O> for $kernel {
            const PANEL_COLUMNS: usize = $columns;
            const LANES: usize = $lanes;

            $(#[$features])?
            unsafe fn widen(from: *const E, to: &mut [E::Acc]) {
                // SAFETY: the caller upholds the same contract, as below.
                unsafe { widen(from, to) }
            }

            $(#[$features])?
            unsafe fn pack(
                from: *const E,
                strides: (usize, usize),
                depth: usize,
                cols: usize,
                to: *mut E::Acc,
            ) {
                unsafe { pack::<E, $lanes>(from, strides, depth, cols, to) }
            }

            unsafe fn multiply($gemm: &PanelGemm<E::Acc>) {
                unsafe { $multiply }
            }

            $(#[$features])?
            unsafe fn store(sums: *const E::Acc, out: &mut [O], epilogue: Option<RowEpilogue<O>>) {
                unsafe { store(sums, out, epilogue) }
            }
        }
    };
}

panel_kernel!(Portable, 4, 8, |gemm| multiply_portable(gemm));
#[cfg(target_arch = "x86_64")]
panel_kernel!(Avx2, 8, 16, |gemm| multiply_avx2(in_f32(gemm)), #[target_feature(enable = "avx2,fma,bmi2")]);
#[cfg(target_arch = "x86_64")]
panel_kernel!(
    Avx512, 16, 64, |gemm| multiply_avx512(in_f32(gemm)),
    #[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
);
