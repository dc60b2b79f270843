//! Numbers a kernel stores ([`Elem`]) and numbers it computes with ([`Real`]).
//!
//! Kernels are written once over both: `f32` and `f64` compute in themselves, `bf16` and `f16` are
//! widened to `f32`, computed, and rounded once on the way out. The transcendental functions of `f32`
//! are branch free so that loops over them vectorise; those of `f64` are the library's, because only
//! tests run in `f64` and they want the last digit.

use std::borrow::Cow;

use super::cpu::{self, Slices};
use super::product::By;
use half::{bf16, f16};

/// A number kernels compute with.
pub trait Real:
    Elem<Acc = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
    + std::ops::SubAssign
    + std::ops::MulAssign
    + PartialOrd
    + std::iter::Sum
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn abs(self) -> Self;

    /// `self * a + b`, fused where the machine does so.
    fn fma(self, a: Self, b: Self) -> Self;

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

/// A number kernels store.
pub trait Elem: Slices + Default {
    type Acc: Real;

    fn up(self) -> Self::Acc;
    fn down(value: Self::Acc) -> Self;

    /// The values as they are computed with; free where the two types are one.
    fn widened(values: &[Self], by: By) -> Cow<'_, [Self::Acc]>;

    /// The values to be computed with, where the two types are one.
    fn as_acc(values: &[Self]) -> Option<&[Self::Acc]>;

    /// The values to be computed into, where the two types are one.
    fn as_acc_mut(values: &mut [Self]) -> Option<&mut [Self::Acc]>;

    /// Whether loops over it are compiled for the vectors of the machine at hand; see [`crate::vectorised`].
    const WIDE: bool = false;
}

/// Runs `body` compiled for 32-byte vectors.
///
/// # Safety
/// The processor has AVX2, FMA and BMI2: [`Dispatch::Avx2`](super::dispatch::Dispatch) or better.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2")]
#[inline]
pub unsafe fn with_v3<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// Runs `body` compiled for 64-byte vectors.
///
/// # Safety
/// The processor has AVX-512: [`Dispatch::Avx512`](super::dispatch::Dispatch) or better.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi2,avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
pub unsafe fn with_v4<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// `vectorised!(T, || loop)` runs a loop over values of `T` compiled for the vectors of the [dispatch](super::dispatch).
///
/// A macro and not a function, so that every width has a closure of its own: one that is called from a
/// single place is always inlined there, and takes on that place's instructions. A comment for the assembler keeps
/// apart what the compiler would else find to be the same and make one function of, for no width. The arithmetic is
/// the same in all widths.
#[macro_export]
macro_rules! vectorised {
    ($T:ty, || $body:expr $(,)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            use $crate::kernels::dispatch::{Dispatch, dispatch};
            use $crate::kernels::elem::{with_v3, with_v4};
            // The constant comes first: for a type that is not wide no other body is compiled.
            if <$T as $crate::kernels::Elem>::WIDE && dispatch() >= Dispatch::Avx512 {
                let body = || {
                    // SAFETY: a comment does nothing.
                    unsafe { std::arch::asm!("# 4", options(nomem, nostack, preserves_flags)) };
                    $body
                };
                // SAFETY: the dispatch has these vectors.
                unsafe { with_v4(body) }
            } else if <$T as $crate::kernels::Elem>::WIDE && dispatch() == Dispatch::Avx2 {
                let body = || {
                    // SAFETY: a comment does nothing.
                    unsafe { std::arch::asm!("# 3", options(nomem, nostack, preserves_flags)) };
                    $body
                };
                // SAFETY: the dispatch has these vectors.
                unsafe { with_v3(body) }
            } else {
                $body
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        $body
    }};
}

impl Elem for f32 {
    type Acc = f32;

    #[inline(always)]
    fn up(self) -> f32 {
        self
    }

    #[inline(always)]
    fn down(value: f32) -> f32 {
        value
    }

    const WIDE: bool = true;

    fn widened(values: &[f32], _: By) -> Cow<'_, [f32]> {
        Cow::Borrowed(values)
    }

    #[inline(always)]
    fn as_acc(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }

    fn as_acc_mut(values: &mut [f32]) -> Option<&mut [f32]> {
        Some(values)
    }
}

impl Elem for f64 {
    type Acc = f64;

    #[inline(always)]
    fn up(self) -> f64 {
        self
    }

    #[inline(always)]
    fn down(value: f64) -> f64 {
        value
    }

    fn widened(values: &[f64], _: By) -> Cow<'_, [f64]> {
        Cow::Borrowed(values)
    }

    #[inline(always)]
    fn as_acc(values: &[f64]) -> Option<&[f64]> {
        Some(values)
    }

    fn as_acc_mut(values: &mut [f64]) -> Option<&mut [f64]> {
        Some(values)
    }
}

impl Elem for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn up(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    /// To the nearest, ties to even. Without branches, so that loops vectorise; `half` has some.
    #[inline(always)]
    fn down(value: f32) -> bf16 {
        let bits = value.to_bits();
        let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        // What is not a number stays so when its lower half is cut off.
        let whole = if value.is_nan() { bits | 0x40_0000 } else { near };
        bf16::from_bits((whole >> 16) as u16)
    }

    const WIDE: bool = true;

    fn widened(values: &[bf16], by: By) -> Cow<'_, [f32]> {
        Cow::Owned(widen(values, by))
    }

    #[inline(always)]
    fn as_acc(_: &[bf16]) -> Option<&[f32]> {
        None
    }

    fn as_acc_mut(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }
}

impl Elem for f16 {
    type Acc = f32;

    /// In whole numbers and without branches: the conversion of `half` is a call for each value.
    #[inline(always)]
    fn up(self) -> f32 {
        // The smallest normal number, 2^-14, and how much larger exponents are in f32.
        const NORMAL: u32 = 113 << 23;
        const HIGHER: u32 = 112 << 23;
        let bits = self.to_bits() as u32;
        let size = (bits & 0x7fff) << 13;
        let normal = size + HIGHER;
        // Digits without the 1 before them: it is put there, and taken off again.
        let below = (f32::from_bits(size | NORMAL) - f32::from_bits(NORMAL)).to_bits();
        let whole = if size < 1 << 23 { below } else { normal };
        let whole = if size >= 31 << 23 { normal + HIGHER } else { whole };
        f32::from_bits(whole | (bits & 0x8000) << 16)
    }

    /// To the nearest, ties to even; infinite from 65520 on.
    #[inline(always)]
    fn down(value: f32) -> f16 {
        const HIGHER: u32 = 112 << 23;
        let bits = value.to_bits();
        let size = bits & 0x7fff_ffff;
        let normal = size.wrapping_sub(HIGHER).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
        // Added to 1/2, a number below 2^-14 leaves the digits that f16 has of it, rounded.
        let below = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let whole = if size < 113 << 23 { below } else { normal };
        let whole = if size >= 143 << 23 { 0x7c00 } else { whole };
        let whole = if size > 255 << 23 { 0x7e00 | size >> 13 & 0x3ff } else { whole };
        f16::from_bits((whole | bits >> 16 & 0x8000) as u16)
    }

    const WIDE: bool = true;

    fn widened(values: &[f16], by: By) -> Cow<'_, [f32]> {
        Cow::Owned(widen(values, by))
    }

    #[inline(always)]
    fn as_acc(_: &[f16]) -> Option<&[f32]> {
        None
    }

    fn as_acc_mut(_: &mut [f16]) -> Option<&mut [f32]> {
        None
    }
}

fn widen<T: Elem<Acc = f32>>(values: &[T], by: By) -> Vec<f32> {
    let mut wide = cpu::fresh::<f32>(values.len());
    let some = |first: usize, wide: &mut [f32]| {
        vectorised!(T, || wide.iter_mut().zip(&values[first..]).for_each(|(w, v)| *w = v.up()))
    };
    match by {
        By::All => cpu::for_rows(&mut wide, 1, some),
        By::Me => some(0, &mut wide),
    }
    wide
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn wide(self) -> f64 {
        self as f64
    }

    /// Within 2 units in the last place; 0 below -87.3, where the result is no longer normal, and that of
    /// 88.37 above it.
    #[inline(always)]
    fn exp(self) -> f32 {
        // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 x 2^23 rounds n to the nearest whole number.
        const ROUND: f32 = 12_582_912.0;
        // Above 88.37 n would be 128, whose power of two is infinite.
        let x = self.clamp(-87.3, 88.37);
        let shifted = x.mul_or_fuse(std::f32::consts::LOG2_E, ROUND);
        let n = shifted - ROUND;
        let r = n.mul_or_fuse(-0.693_359_4, x);
        let r = n.mul_or_fuse(2.121_944_4e-4, r);
        let mut p = 1.987_569_2e-4_f32;
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p.mul_or_fuse(r, c);
        }
        let e = p.mul_or_fuse(r * r, r) + 1.0;
        let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
        let value = e * scale;
        if self < -87.3 {
            0.0
        } else if self.is_nan() {
            self
        } else {
            value
        }
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        f32::ln(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }

    /// Within 3e-7 absolute.
    #[inline(always)]
    fn tanh(self) -> f32 {
        // Beyond 9.1 it is 1 to the last digit.
        let power = Real::exp(2.0 * self.clamp(-10.0, 10.0));
        inverse(power + 1.0).mul_or_fuse(-2.0, 1.0)
    }

    /// Within 5e-7 absolute (Abramowitz and Stegun 7.1.26, evaluated in f32).
    #[inline(always)]
    fn erf(self) -> f32 {
        let x = f32::abs(self);
        let t = 1.0 / x.mul_or_fuse(0.327_591_1, 1.0);
        let mut p = 1.061_405_4_f32;
        for c in [-1.453_152_1, 1.421_413_8, -0.284_496_72, 0.254_829_6] {
            p = p.mul_or_fuse(t, c);
        }
        (1.0 - p * t * Real::exp(-x * x)).copysign(self)
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn fma(self, a: f32, b: f32) -> f32 {
        self.mul_or_fuse(a, b)
    }
}

/// `1 / x` within a unit in the last place, for `x` from 1e-30 to 1e30: where a division of a vector takes as long as
/// 16 other operations, a guess (by the exponent turned around, within an eighth) and three of Newton's steps do not.
#[inline(always)]
fn inverse(x: f32) -> f32 {
    let mut y = f32::from_bits(0x7ef3_11c7_u32.wrapping_sub(x.to_bits()));
    for _ in 0..3 {
        y = (-x).mul_or_fuse(y, 1.0).mul_or_fuse(y, y);
    }
    y
}

trait MulOrFuse {
    fn mul_or_fuse(self, a: Self, b: Self) -> Self;
}

impl MulOrFuse for f32 {
    /// One rounding, by one instruction in the loops of every width that has it; in those of [`Dispatch::Portable`] on
    /// x86 a library call, which costs time and no digits.
    ///
    /// [`Dispatch::Portable`]: super::dispatch::Dispatch::Portable
    #[inline(always)]
    fn mul_or_fuse(self, a: f32, b: f32) -> f32 {
        self.mul_add(a, b)
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }

    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn ln(self) -> f64 {
        f64::ln(self)
    }

    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }

    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    fn erf(self) -> f64 {
        candle_core::cpu::erf::erf_f64(self)
    }

    fn abs(self) -> f64 {
        f64::abs(self)
    }

    #[inline(always)]
    fn fma(self, a: f64, b: f64) -> f64 {
        self * a + b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(range: std::ops::Range<i32>, step: f32, error: impl Fn(f32) -> f64) -> f64 {
        range.map(|i| error(i as f32 * step)).fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_good_to_the_last_digits() {
        let relative = |x: f32| ((Real::exp(x) as f64) / (x as f64).exp() - 1.0).abs();
        assert!(worst(-87_000..88_000, 1e-3, relative) < 2.5e-7);
        assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Real::exp(-1000f32), 0.0);
        assert!(Real::exp(f32::NAN).is_nan());
        assert!(Real::exp(89f32).is_finite(), "saturates at the largest exponent instead of overflowing");
    }

    #[test]
    fn inverses_are_good_to_the_last_digits() {
        for magnitude in [1e-30f32, 1e-3, 1.0, 1e9, 1e30] {
            let relative = |x: f32| (inverse(x * magnitude) as f64 * (x * magnitude) as f64 - 1.0).abs();
            assert!(worst(1_000..2_100, 1e-3, relative) < 2.5e-7, "{magnitude}");
        }
        assert!(inverse(f32::NAN).is_nan());
    }

    /// As the `half` crate converts, which is tested elsewhere: every value up, and down again whatever is between.
    #[test]
    fn narrow_types_are_converted_as_half_does_it() {
        for bits in 0..=u16::MAX {
            let (narrow, half) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(
                narrow.up().to_bits() == narrow.to_f32().to_bits() || narrow.is_nan() && narrow.up().is_nan()
            );
            assert!(
                half.up().to_bits() == half.to_f32().to_bits() || half.is_nan() && half.up().is_nan(),
                "{half}"
            );
        }
        let down = |value: f32| {
            let (narrow, half) = (<bf16 as Elem>::down(value), <f16 as Elem>::down(value));
            assert_eq!(narrow.to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            let wanted = f16::from_f32(value);
            assert!(
                half.to_bits() == wanted.to_bits() || value.is_nan() && half.is_nan(),
                "{value:e}: {half} {wanted}"
            );
        };
        // Every exponent and sign, with digits around each place where rounding turns.
        for high in 0..1u32 << 16 {
            for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                down(f32::from_bits(high << 16 | low));
            }
        }
    }

    #[test]
    fn tanh_and_erf_are_good_in_absolute_terms() {
        assert!(worst(-20_000..20_000, 1e-3, |x| ((Real::tanh(x) as f64) - (x as f64).tanh()).abs()) < 3e-7);
        assert!(worst(-6_000..6_000, 1e-3, |x| ((Real::erf(x) as f64) - Real::erf(x as f64)).abs()) < 5e-7);
        assert!(Real::tanh(f32::NAN).is_nan() && Real::tanh(f32::INFINITY) == 1.0);
    }
}
