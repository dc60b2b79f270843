//! The [`PanelKernel`]s: loops over arrays, which the compiler turns into the vectors of each instruction set. Only
//! squares are transposed by intrinsics.

use candle_core::DType;

use super::panel::{Microkernel, PanelGemm, PanelKernel, RowEpilogue, tiles};
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

/// Tiles of vectors of `LANES` values. Multiplications and additions are fused where the baseline has an instruction
/// for it, or with `FUSED`: elsewhere it would be a library call.
struct Vectors<const LANES: usize, const FUSED: bool>;

impl<R: Real, const LANES: usize, const FUSED: bool> Microkernel<R> for Vectors<LANES, FUSED> {
    #[inline(always)]
    unsafe fn tile<const ROWS: usize, const VECTORS: usize>(
        gemm: &PanelGemm<R>,
        i: usize,
        (row, col): (usize, usize),
    ) {
        let mut sums = [[[R::ZERO; LANES]; VECTORS]; ROWS];
        // SAFETY: the caller's contract; panels are padded to whole vectors.
        unsafe {
            let (mut a, mut packed) = (gemm.a.add(i * row), gemm.packed.cast::<[[R; LANES]; VECTORS]>());
            for _ in 0..gemm.depth {
                let values = *packed;
                for (r, sums) in sums.iter_mut().enumerate() {
                    let factor = *a.add(r * row);
                    for (sums, values) in sums.iter_mut().zip(&values) {
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = match FUSED || cfg!(target_arch = "aarch64") {
                                true => factor.fma(*value, *sum),
                                false => *sum + factor * *value,
                            };
                        }
                    }
                }
                // The last step may point past the end; nothing is read there.
                (a, packed) = (a.wrapping_add(col), packed.wrapping_add(1));
            }
            for (r, sums) in sums.into_iter().enumerate() {
                let out = gemm.out.add((i + r) * gemm.stride);
                if gemm.columns == VECTORS * LANES {
                    let out = std::slice::from_raw_parts_mut(out, VECTORS * LANES);
                    add(sums.as_flattened(), out, gemm.accumulate);
                } else {
                    // A copy: values that are indexed by a variable could not stay in registers until here.
                    let sums = std::hint::black_box(sums);
                    let out = std::slice::from_raw_parts_mut(out, gemm.columns);
                    add(sums.as_flattened(), out, gemm.accumulate);
                }
            }
        }
    }
}

/// `out += sums`, or `out = sums`.
#[inline(always)]
fn add<R: Real>(sums: &[R], out: &mut [R], accumulate: bool) {
    match accumulate {
        true => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += *sum),
        false => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum),
    }
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
    if R::DTYPE == DType::F32 && LANES >= 8 {
        let square = std::ptr::from_mut(square);
        // SAFETY: each numeric type has its own `DTYPE`, so these are the types of the values.
        return unsafe {
            match LANES {
                8 => transpose_8x8(&mut *square.cast()),
                _ => transpose_16x16(&mut *square.cast()),
            }
        };
    }
    for i in 0..LANES {
        for j in 0..i {
            (square[i][j], square[j][i]) = (square[j][i], square[i][j]);
        }
    }
}

/// Exchanges pairs, then groups of four, then halves.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn transpose_8x8(square: &mut Square<f32, 8>) {
    use std::arch::x86_64::*;
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
    use std::arch::x86_64::{_mm512_loadu_ps, _mm512_storeu_ps};
    // SAFETY: arrays of 16 values are read and written.
    let rows = square.each_ref().map(|row| unsafe { _mm512_loadu_ps(row.as_ptr()) });
    for (row, values) in square.iter_mut().zip(super::avx512::transpose_16x16(rows)) {
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
    ($kernel:ident, $lanes:literal, $fused:literal, $vectors:literal,
     $($width:pat => $tile:tt),+ $(; #[$features:meta])?) => {
        impl $kernel {
            $(#[$features])?
            unsafe fn multiply<R: Real>(gemm: &PanelGemm<R>) {
                // SAFETY: the caller upholds the same contract, as below.
                unsafe {
                    match gemm.columns.div_ceil($lanes) {
                        $($width => panel_kernel!(@tiles gemm, $lanes, $fused, $tile)),+
                    }
                }
            }
        }

        impl<E: Elem, O: Elem<Acc = E::Acc>> PanelKernel<E, O> for $kernel {
            const LANES: usize = $lanes;
            const PANEL_COLUMNS: usize = $vectors * $lanes;

            $(#[$features])?
            unsafe fn widen(from: *const E, to: &mut [E::Acc]) {
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

            unsafe fn multiply(gemm: &PanelGemm<E::Acc>) {
                unsafe { Self::multiply(gemm) }
            }

            $(#[$features])?
            unsafe fn store(sums: *const E::Acc, out: &mut [O], epilogue: Option<RowEpilogue<O>>) {
                unsafe { store(sums, out, epilogue) }
            }
        }
    };
    (@tiles $gemm:ident, $lanes:literal, $fused:literal, ($rows:literal, $width:literal)) => {
        tiles::<R, Vectors<$lanes, $fused>, $rows, $width>($gemm)
    };
}

// Panels of up to so many vectors, and for each width the rows and vectors of a tile: its sums, with a row of the panel,
// fit into 16 or 32 registers.
panel_kernel!(Portable, 4, false, 2, 2 => (6, 2), _ => (12, 1));
#[cfg(target_arch = "x86_64")]
panel_kernel!(Avx2, 8, true, 2, 2 => (6, 2), _ => (12, 1); #[target_feature(enable = "avx2,fma,bmi2")]);
#[cfg(target_arch = "x86_64")]
panel_kernel!(
    Avx512, 16, true, 4, 4 => (6, 4), 3 => (8, 3), 2 => (12, 2), _ => (8, 1);
    #[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
);
