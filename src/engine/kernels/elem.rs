//! The types a kernel stores ([`Elem`]) and the types it computes in ([`Real`]).
//!
//! Kernels are generic over both. `f32` and `f64` compute in their own type; `bf16` and `f16` are widened to `f32` and
//! rounded once on store. The transcendental functions of `f32` are branch-free, so loops over them vectorize. Those of
//! `f64` come from the standard library and candle: only tests run in `f64`, and they need the last digit.

use std::borrow::Cow;

use super::cpu::{self, WithDTypeMut};
use super::matmul::Threading;
use half::{bf16, f16};

/// A type kernels compute in.
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

    fn of_f64(value: f64) -> Self;
    fn as_f64(self) -> f64;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn abs(self) -> Self;

    /// `self * a + b`; fused for f32.
    fn fma(self, a: Self, b: Self) -> Self;

    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }
}

/// A type kernels store.
pub trait Elem: WithDTypeMut + Default {
    type Acc: Real;

    fn to_acc(self) -> Self::Acc;
    fn from_acc(value: Self::Acc) -> Self;

    /// Becomes `other` if that is larger; returns whether it is.
    #[inline(always)]
    fn raise(&mut self, other: Self) -> bool {
        let larger = other.to_acc() > self.to_acc();
        *self = if larger { other } else { *self };
        larger
    }

    /// The value, or 0 without the condition.
    #[inline(always)]
    fn keep_if(self, condition: bool) -> Self {
        if condition { self } else { Self::default() }
    }

    /// The values in the accumulator type; borrowed if the two types are the same.
    fn to_acc_slice(values: &[Self], threading: Threading) -> Cow<'_, [Self::Acc]>;

    /// The values as accumulators, if the two types are the same.
    fn as_acc(values: &[Self]) -> Option<&[Self::Acc]>;

    /// The values as writable accumulators, if the two types are the same.
    fn as_acc_mut(values: &mut [Self]) -> Option<&mut [Self::Acc]>;

    /// Whether loops over this type are compiled for the dispatch's vector width; see [`crate::vectorised`].
    const VECTORIZE: bool = false;
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

/// Not `Copy`: a closure that moves it can be called once.
pub struct Once;

/// Its argument: an attribute may stand before an argument, and not before the value of a variable.
#[inline(always)]
pub fn closure<R, F: FnOnce() -> R>(closure: F) -> F {
    closure
}

/// `vectorised!(T, || loop)` runs a loop over values of `T` compiled for the vector width of the
/// [dispatch](super::dispatch).
///
/// This is a macro, not a function, so that each width gets a closure of its own, which is always inlined where it
/// takes the target features of that width. A closure that is called instead has none, whoever calls it: its loops
/// would run without vectors. It moves a [`Once`], since a closure that could be called twice is called through a
/// function that is inlined only if it is short. All widths do the same arithmetic.
#[macro_export]
macro_rules! vectorised {
    ($T:ty, || $body:expr $(,)?) => {{
        #[cfg(target_arch = "x86_64")]
        {
            use $crate::kernels::dispatch::{Dispatch, dispatch};
            use $crate::kernels::elem::{Once, closure, with_v3, with_v4};
            let once = Once;
            // The constant comes first: if `VECTORIZE` is false, only the portable body is compiled.
            if <$T as $crate::kernels::Elem>::VECTORIZE && dispatch() >= Dispatch::Avx512 {
                let body = closure(
                    #[inline(always)]
                    || {
                        let _once = once;
                        $body
                    },
                );
                // SAFETY: the dispatch has AVX-512.
                unsafe { with_v4(body) }
            } else if <$T as $crate::kernels::Elem>::VECTORIZE && dispatch() == Dispatch::Avx2 {
                let body = closure(
                    #[inline(always)]
                    || {
                        let _once = once;
                        $body
                    },
                );
                // SAFETY: the dispatch has AVX2.
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
    fn to_acc(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_acc(value: f32) -> f32 {
        value
    }

    const VECTORIZE: bool = true;

    fn to_acc_slice(values: &[f32], _: Threading) -> Cow<'_, [f32]> {
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
    fn to_acc(self) -> f64 {
        self
    }

    #[inline(always)]
    fn from_acc(value: f64) -> f64 {
        value
    }

    fn to_acc_slice(values: &[f64], _: Threading) -> Cow<'_, [f64]> {
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

/// Selection by masks of bits: loops over values of half the size of what they are compared in vectorize poorly.
macro_rules! half_selection {
    () => {
        #[inline(always)]
        fn raise(&mut self, other: Self) -> bool {
            let before = *self;
            let larger = other.to_acc() > before.to_acc();
            let bits = if larger { other.to_bits() as u32 } else { before.to_bits() as u32 };
            *self = Self::from_bits(bits as u16);
            // In the narrow type: what is larger has other bits.
            self.to_bits() != before.to_bits()
        }

        #[inline(always)]
        fn keep_if(self, condition: bool) -> Self {
            Self::from_bits(self.to_bits() & (condition as u16).wrapping_neg())
        }
    };
}

impl Elem for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn to_acc(self) -> f32 {
        f32::from_bits((self.to_bits() as u32) << 16)
    }

    /// Round to nearest, ties to even. Branch-free, so loops vectorize; `half`'s conversion has branches.
    #[inline(always)]
    fn from_acc(value: f32) -> bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        // Sets the quiet bit, so a NaN stays NaN when its lower half is cut off.
        let whole = if value.is_nan() { bits | 0x40_0000 } else { rounded };
        bf16::from_bits((whole >> 16) as u16)
    }

    half_selection!();

    const VECTORIZE: bool = true;

    fn to_acc_slice(values: &[bf16], threading: Threading) -> Cow<'_, [f32]> {
        Cow::Owned(convert_to_acc(values, threading))
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

    /// Branch-free bit arithmetic: `half`'s conversion is a function call per value.
    #[inline(always)]
    fn to_acc(self) -> f32 {
        // The smallest normal f16, 2^-14, and the difference of the exponent biases of f32 and f16.
        const MIN_NORMAL: u32 = 113 << 23;
        const EXPONENT_REBIAS: u32 = 112 << 23;
        let bits = self.to_bits() as u32;
        let magnitude = (bits & 0x7fff) << 13;
        let normal = magnitude + EXPONENT_REBIAS;
        // A subnormal has no implicit 1: add one, then subtract it.
        let subnormal = (f32::from_bits(magnitude | MIN_NORMAL) - f32::from_bits(MIN_NORMAL)).to_bits();
        let whole = if magnitude < 1 << 23 { subnormal } else { normal };
        let whole = if magnitude >= 31 << 23 { normal + EXPONENT_REBIAS } else { whole };
        f32::from_bits(whole | (bits & 0x8000) << 16)
    }

    /// Round to nearest, ties to even; infinity from 65520 on.
    #[inline(always)]
    fn from_acc(value: f32) -> f16 {
        const EXPONENT_REBIAS: u32 = 112 << 23;
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let normal =
            magnitude.wrapping_sub(EXPONENT_REBIAS).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
        // Adding 1/2 to a value below 2^-14 leaves its f16 mantissa, rounded, in the low bits.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let whole = if magnitude < 113 << 23 { subnormal } else { normal };
        let whole = if magnitude >= 143 << 23 { 0x7c00 } else { whole };
        let whole = if magnitude > 255 << 23 { 0x7e00 | magnitude >> 13 & 0x3ff } else { whole };
        f16::from_bits((whole | bits >> 16 & 0x8000) as u16)
    }

    half_selection!();

    const VECTORIZE: bool = true;

    fn to_acc_slice(values: &[f16], threading: Threading) -> Cow<'_, [f32]> {
        Cow::Owned(convert_to_acc(values, threading))
    }

    #[inline(always)]
    fn as_acc(_: &[f16]) -> Option<&[f32]> {
        None
    }

    fn as_acc_mut(_: &mut [f16]) -> Option<&mut [f32]> {
        None
    }
}

fn convert_to_acc<T: Elem<Acc = f32>>(values: &[T], threading: Threading) -> Vec<f32> {
    let mut out = cpu::uninit::<f32>(values.len());
    let convert = |first: usize, out: &mut [f32]| {
        vectorised!(T, || out.iter_mut().zip(&values[first..]).for_each(|(w, v)| *w = v.to_acc()))
    };
    match threading {
        Threading::Parallel => cpu::parallel_for_rows(&mut out, 1, convert),
        Threading::Serial => convert(0, &mut out),
    }
    out
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn of_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn as_f64(self) -> f64 {
        self as f64
    }

    /// Within 2 ulp. Returns 0 below -87.3, where the result would be subnormal, and saturates at exp(88.37).
    #[inline(always)]
    fn exp(self) -> f32 {
        // x = n ln 2 + r with |r| <= ln 2 / 2; adding 1.5 x 2^23 rounds n to the nearest integer.
        const ROUND: f32 = 12_582_912.0;
        // Above 88.37 n would be 128, and 2^128 is infinite.
        let x = self.clamp(-87.3, 88.37);
        let shifted = x.fused_mul_add(std::f32::consts::LOG2_E, ROUND);
        let n = shifted - ROUND;
        let r = n.fused_mul_add(-0.693_359_4, x);
        let r = n.fused_mul_add(2.121_944_4e-4, r);
        let mut p = 1.987_569_2e-4_f32;
        for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p.fused_mul_add(r, c);
        }
        let e = p.fused_mul_add(r * r, r) + 1.0;
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

    /// Within 3e-7 absolute error.
    #[inline(always)]
    fn tanh(self) -> f32 {
        // Beyond 9.1 the result is 1 to the last digit.
        let power = Real::exp(2.0 * self.clamp(-10.0, 10.0));
        fast_reciprocal(power + 1.0).fused_mul_add(-2.0, 1.0)
    }

    /// Within 5e-7 absolute error (Abramowitz and Stegun 7.1.26, evaluated in f32).
    #[inline(always)]
    fn erf(self) -> f32 {
        let x = f32::abs(self);
        let t = 1.0 / x.fused_mul_add(0.327_591_1, 1.0);
        let mut p = 1.061_405_4_f32;
        for c in [-1.453_152_1, 1.421_413_8, -0.284_496_72, 0.254_829_6] {
            p = p.fused_mul_add(t, c);
        }
        (1.0 - p * t * Real::exp(-x * x)).copysign(self)
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn fma(self, a: f32, b: f32) -> f32 {
        self.fused_mul_add(a, b)
    }
}

/// `1 / x` within 1 ulp, for `x` from 1e-30 to 1e30. A vector division takes as long as 16 other operations. An initial
/// guess by integer subtraction, which negates the exponent (within 1/8), and three Newton steps are faster.
#[inline(always)]
fn fast_reciprocal(x: f32) -> f32 {
    let mut y = f32::from_bits(0x7ef3_11c7_u32.wrapping_sub(x.to_bits()));
    for _ in 0..3 {
        y = (-x).fused_mul_add(y, 1.0).fused_mul_add(y, y);
    }
    y
}

trait FusedMulAdd {
    fn fused_mul_add(self, a: Self, b: Self) -> Self;
}

impl FusedMulAdd for f32 {
    /// Rounds once. One instruction in the loops of AVX2 and up; under [`Dispatch::Portable`] on x86 a library call,
    /// which costs time but no accuracy.
    ///
    /// [`Dispatch::Portable`]: super::dispatch::Dispatch::Portable
    #[inline(always)]
    fn fused_mul_add(self, a: f32, b: f32) -> f32 {
        self.mul_add(a, b)
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn of_f64(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn as_f64(self) -> f64 {
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

    fn max_error(range: std::ops::Range<i32>, step: f32, error: impl Fn(f32) -> f64) -> f64 {
        range.map(|i| error(i as f32 * step)).fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_good_to_the_last_digits() {
        let relative = |x: f32| ((Real::exp(x) as f64) / (x as f64).exp() - 1.0).abs();
        assert!(max_error(-87_000..88_000, 1e-3, relative) < 2.5e-7);
        assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Real::exp(-1000f32), 0.0);
        assert!(Real::exp(f32::NAN).is_nan());
        assert!(Real::exp(89f32).is_finite(), "saturates at the largest exponent instead of overflowing");
    }

    #[test]
    fn inverses_are_good_to_the_last_digits() {
        for magnitude in [1e-30f32, 1e-3, 1.0, 1e9, 1e30] {
            let relative =
                |x: f32| (fast_reciprocal(x * magnitude) as f64 * (x * magnitude) as f64 - 1.0).abs();
            assert!(max_error(1_000..2_100, 1e-3, relative) < 2.5e-7, "{magnitude}");
        }
        assert!(fast_reciprocal(f32::NAN).is_nan());
    }

    /// Matches the `half` crate, which has its own tests: widening of every value, and rounding of values in between.
    #[test]
    fn narrow_types_are_converted_as_half_does_it() {
        for bits in 0..=u16::MAX {
            let (narrow, half) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert!(
                narrow.to_acc().to_bits() == narrow.to_f32().to_bits()
                    || narrow.is_nan() && narrow.to_acc().is_nan()
            );
            assert!(
                half.to_acc().to_bits() == half.to_f32().to_bits() || half.is_nan() && half.to_acc().is_nan(),
                "{half}"
            );
        }
        let check_rounding = |value: f32| {
            let (narrow, half) = (<bf16 as Elem>::from_acc(value), <f16 as Elem>::from_acc(value));
            assert_eq!(narrow.to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            let wanted = f16::from_f32(value);
            assert!(
                half.to_bits() == wanted.to_bits() || value.is_nan() && half.is_nan(),
                "{value:e}: {half} {wanted}"
            );
        };
        // Every sign and exponent, with mantissas on both sides of every rounding boundary.
        for high in 0..1u32 << 16 {
            for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                check_rounding(f32::from_bits(high << 16 | low));
            }
        }
    }

    #[test]
    fn tanh_and_erf_are_good_in_absolute_terms() {
        assert!(
            max_error(-20_000..20_000, 1e-3, |x| ((Real::tanh(x) as f64) - (x as f64).tanh()).abs()) < 3e-7
        );
        assert!(
            max_error(-6_000..6_000, 1e-3, |x| ((Real::erf(x) as f64) - Real::erf(x as f64)).abs()) < 5e-7
        );
        assert!(Real::tanh(f32::NAN).is_nan() && Real::tanh(f32::INFINITY) == 1.0);
    }
}
