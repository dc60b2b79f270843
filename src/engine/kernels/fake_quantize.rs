//! Fake quantization: floats rounded to the values that 8-bit integers stand for. Activations have a scale and a zero
//! point per tensor, from a range that training observes; weights have a scale per output.
//!
//! Rounding has no gradient, so the backward pass is a straight-through estimator: the gradient passes where a value is
//! in the range, and stops where it is clipped. The grid of a weight covers all its values, so nothing is clipped, and
//! a norm that is folded into the weight, one factor per output, scales the grid with it.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::clamp::clamp;
use super::parallel::{ParallelChunks, ParallelItems};
use super::update::cast_into;
use super::{Elem, Real, cpu, host, kernel_timer, reference as reference_kernel};
use crate::base::Backend;
use crate::{vectorised, with_elem};

/// Values of the range of an activation: its ends, then the lowest and the highest value since the last update. All
/// are 0 until values are rounded, and 0 is in every range.
pub const RANGE_LEN: usize = 4;

/// Values per task of a pass that finds extremes.
const CHUNK: usize = 64 * 1024;

/// `real = scale (stored - zero_point)`, where what is stored has 8 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineQuantization {
    pub scale: f32,
    pub zero_point: i8,
}

impl AffineQuantization {
    /// Covers the values from `low` to `high` and 0, which is exact. If that is only 0, the values up to about 1.
    pub fn of_range(low: f32, high: f32) -> Self {
        Self::covering(low, high).unwrap_or(Self { scale: 1.0 / 255.0, zero_point: 0 })
    }

    /// As [`of_range`](Self::of_range); `None` if the range has no length.
    fn covering(low: f32, high: f32) -> Option<Self> {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let scale = (high - low) / 255.0;
        let zero_point = (-128.0 - low / scale).round_ties_even().clamp(-128.0, 127.0);
        scale.is_normal().then_some(Self { scale, zero_point: zero_point as i8 })
    }

    /// The nearest value that has a form. NaN stays NaN.
    #[inline(always)]
    pub fn rounded(self, value: f32) -> f32 {
        let zero = f32::from(self.zero_point);
        (value / self.scale).round_ties_even().clamp(-128.0 - zero, 127.0 - zero) * self.scale
    }
}

/// The step between the values of a weight whose largest magnitude this is, -127 to 127 of them. It has 16 significant
/// bits, so that its multiples are exact and rounding a rounded weight changes no bit; an export has all 24.
pub(super) fn symmetric_scale(largest: f32) -> f32 {
    let scale = largest / 127.0;
    // Veltkamp's splitting.
    let spread = scale * 257.0;
    let short = spread - (spread - scale);
    if short.is_normal() { short } else { 1.0 }
}

/// Adding and subtracting it rounds to an integer, ties to even.
fn to_integer<R: Real>() -> R {
    R::of_f64(if size_of::<R>() == 4 { 1.5 * (1u64 << 23) as f64 } else { 1.5 * (1u64 << 52) as f64 })
}

/// The multiples of a step between two bounds.
#[derive(Clone, Copy)]
struct Grid<R> {
    step: R,
    /// In steps.
    bounds: (R, R),
}

impl<R: Real> Grid<R> {
    /// Of a range; `None` if values are not rounded yet.
    fn of_range([low, high, ..]: [f64; RANGE_LEN]) -> Option<Self> {
        let AffineQuantization { scale, zero_point } = AffineQuantization::covering(low as f32, high as f32)?;
        let bound = |end: f64| R::of_f64(end - f64::from(zero_point));
        Some(Self { step: R::of_f64(f64::from(scale)), bounds: (bound(-128.0), bound(127.0)) })
    }

    /// Of a weight of this largest magnitude.
    fn of_weight(largest: R) -> Self {
        let step = R::of_f64(f64::from(symmetric_scale(largest.as_f64() as f32)));
        Self { step, bounds: (R::of_f64(-127.0), R::of_f64(127.0)) }
    }

    #[inline(always)]
    fn rounded(self, value: R) -> R {
        let steps = clamp(value / self.step, self.bounds);
        ((steps + to_integer()) - to_integer()) * self.step
    }

    #[inline(always)]
    fn contains(self, value: R) -> bool {
        let steps = value / self.step;
        steps >= self.bounds.0 && steps <= self.bounds.1
    }
}

/// Ranges are in f32 but for checks of gradients, which compute in f64.
fn has_gpu_kernel(range: &Tensor) -> bool {
    range.dtype() == DType::F32
}

fn read_range(range: &Tensor) -> Result<[f64; RANGE_LEN]> {
    with_elem!(range.dtype(), R => {
        let values = host::read::<R>(range)?;
        Ok(std::array::from_fn(|i| values[i].to_acc().as_f64()))
    })
}

fn write_range(range: &Tensor, values: [f64; RANGE_LEN]) -> Result<()> {
    with_elem!(range.dtype(), R => host::write::<R, _>(range, |range| {
        let value = |value: f64| <R as Elem>::from_acc(<R as Elem>::Acc::of_f64(value));
        range.iter_mut().zip(values).for_each(|(range, v)| *range = value(v));
    }))
}

/// The grid of a range in tensors of one value each, and a 1 if values are not rounded yet. No value comes from the
/// host, so that a GPU pass with it can be captured.
struct TensorGrid {
    step: Tensor,
    bounds: [Tensor; 2],
    off: Tensor,
}

impl TensorGrid {
    fn new(range: &Tensor, dtype: DType) -> Result<Self> {
        let range = range.to_dtype(DType::F32)?;
        let (low, high) = (range.narrow(0, 0, 1)?, range.narrow(0, 1, 1)?);
        let step = ((high - &low)? / filled(&low, 255.0)?)?;
        let off = step.lt(&filled(&low, f32::MIN_POSITIVE)?)?.to_dtype(DType::F32)?;
        // Whatever it is while values are not rounded, it divides.
        let step = (step + &off)?;
        let (first, last) = (filled(&low, -128.0)?, filled(&low, 127.0)?);
        let zero = integer((&first - (low / &step)?)?)?.maximum(&first)?.minimum(&last)?;
        let bounds = [(first - &zero)?, (last - zero)?];
        let [low, high] = bounds.map(|bound| bound.to_dtype(dtype));
        Ok(Self { step: step.to_dtype(dtype)?, bounds: [low?, high?], off: off.to_dtype(dtype)? })
    }

    /// 1 where the gradient passes, else 0.
    fn mask(&self, x: &Tensor) -> Result<Tensor> {
        let steps = x.broadcast_div(&self.step)?;
        let [low, high] = &self.bounds;
        let inside = (steps.broadcast_ge(low)? * steps.broadcast_le(high)?)?;
        inside.to_dtype(x.dtype())?.broadcast_maximum(&self.off)?.ne(&x.zeros_like()?)
    }

    fn rounded(&self, x: &Tensor) -> Result<Tensor> {
        let [low, high] = &self.bounds;
        let steps = x.broadcast_div(&self.step)?.broadcast_maximum(low)?.broadcast_minimum(high)?;
        let rounded = integer(steps)?.broadcast_mul(&self.step)?;
        self.off.ne(&self.off.zeros_like()?)?.broadcast_as(x.shape())?.where_cond(x, &rounded)
    }
}

/// A tensor of the same shape with this value.
fn filled(like: &Tensor, value: f32) -> Result<Tensor> {
    like.zeros_like()?.affine(1.0, f64::from(value))
}

/// The nearest integers, ties to even; candle's own rounds ties away from zero.
fn integer(x: Tensor) -> Result<Tensor> {
    let large = if x.dtype() == DType::F64 { to_integer::<f64>() } else { f64::from(to_integer::<f32>()) };
    x.affine(1.0, large)?.affine(1.0, -large)
}

/// What an operation in candle's operations computes in.
fn acc_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Reference implementation of [`forward`], with the straight-through gradient for autograd.
pub fn reference(x: &Tensor, range: &Tensor) -> Result<Tensor> {
    let (v, grid) = (x.to_dtype(acc_dtype(x.dtype()))?, TensorGrid::new(range, acc_dtype(x.dtype()))?);
    let passed = grid.mask(&v.detach())?.where_cond(&v, &v.zeros_like()?)?;
    // The difference is 0, and has the gradient.
    (grid.rounded(&v.detach())? + (&passed - passed.detach())?)?.to_dtype(x.dtype())
}

/// Reference implementation of [`round_rows`].
pub fn reference_rows(weights: &Tensor, rows: usize) -> Result<Tensor> {
    let v = weights.to_dtype(DType::F32)?.reshape((rows, ()))?;
    let largest = v.abs()?.max_keepdim(1)?;
    let scale = (&largest / filled(&largest, 127.0)?)?;
    let spread = (&scale * 257.0)?;
    let short = (&spread - (&spread - &scale)?)?;
    let is_normal = short.ge(&filled(&short, f32::MIN_POSITIVE)?)?;
    let short = is_normal.where_cond(&short, &filled(&short, 1.0)?)?;
    let steps = integer(v.broadcast_div(&short)?)?;
    let steps =
        steps.broadcast_maximum(&filled(&short, -127.0)?)?.broadcast_minimum(&filled(&short, 127.0)?)?;
    steps.broadcast_mul(&short)?.flatten_all()
}

/// `x` rounded to the grid of `range`; a copy if the range has no length yet. With `observe`, `range` keeps the lowest
/// and the highest value of `x`.
pub fn forward(x: &Tensor, range: &Tensor, observe: bool) -> Result<Tensor> {
    let _scope = kernel_timer::enter(module_path!());
    if has_gpu_kernel(range) {
        on_cuda!(x, |device| gpu::forward(device, x, range, observe));
    }
    if !reference_kernel::has_cpu_kernel(x) {
        if observe {
            observe_reference(x, range)?;
        }
        return reference(x, range)?.contiguous();
    }
    let [low, high, seen_low, seen_high] = read_range(range)?;
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let grid = Grid::<<T as Elem>::Acc>::of_range([low, high, seen_low, seen_high]);
        let mut y = cpu::uninit::<T>(values.len());
        cpu::parallel_for_rows(&mut y, 1, |start, y| match grid {
            Some(grid) => round(&values[start..][..y.len()], y, grid),
            None => y.copy_from_slice(&values[start..][..y.len()]),
        });
        if observe {
            let (x_low, x_high) = extremes(&values);
            write_range(range, [low, high, seen_low.min(x_low), seen_high.max(x_high)])?;
        }
        cpu::tensor(y, x.shape())
    })
}

fn round<T: Elem>(x: &[T], y: &mut [T], grid: Grid<T::Acc>) {
    vectorised!(T, || x.iter().zip(y).for_each(|(x, y)| *y = T::from_acc(grid.rounded(x.to_acc()))))
}

/// The lowest and the highest value; 0 of none. NaN is neither.
fn extremes<T: Elem>(values: &[T]) -> (f64, f64) {
    let of_chunk = |chunk: usize| {
        let (mut low, mut high) = (T::Acc::ZERO, T::Acc::ZERO);
        let values = &values[chunk * CHUNK..];
        vectorised!(T, || for value in &values[..values.len().min(CHUNK)] {
            let value = value.to_acc();
            low = if value < low { value } else { low };
            high = if value > high { value } else { high };
        });
        (low.as_f64(), high.as_f64())
    };
    let all = cpu::parallel_map(values.len().div_ceil(CHUNK), &of_chunk);
    all.into_iter().fold((0.0, 0.0), |(low, high), (l, h)| (low.min(l), high.max(h)))
}

fn observe_reference(x: &Tensor, range: &Tensor) -> Result<()> {
    let values = x.flatten_all()?.to_dtype(range.dtype())?;
    let (low, high) = (range.narrow(0, 2, 1)?, range.narrow(0, 3, 1)?);
    cast_into(&values.min_keepdim(0)?.minimum(&low)?, &low)?;
    cast_into(&values.max_keepdim(0)?.maximum(&high)?, &high)
}

/// `dx = dy` where `x` is in the range, else 0.
pub fn backward(x: &Tensor, dy: &Tensor, range: &Tensor) -> Result<Tensor> {
    let _scope = kernel_timer::enter(module_path!());
    if has_gpu_kernel(range) {
        on_cuda!(x, |device| gpu::backward(device, x, dy, range));
    }
    if !reference_kernel::has_cpu_kernel(x) {
        let v = x.to_dtype(acc_dtype(x.dtype()))?;
        let mask = TensorGrid::new(range, v.dtype())?.mask(&v)?;
        return mask.where_cond(dy, &dy.zeros_like()?);
    }
    let range = read_range(range)?;
    with_elem!(x.dtype(), T => {
        let (x, dy, shape) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?, x.shape());
        let grid = Grid::<<T as Elem>::Acc>::of_range(range);
        let mut dx = cpu::uninit::<T>(dy.len());
        cpu::parallel_for_rows(&mut dx, 1, |start, dx| {
            let (x, dy) = (&x[start..][..dx.len()], &dy[start..][..dx.len()]);
            match grid {
                Some(grid) => pass_through(x, dy, dx, grid),
                None => dx.copy_from_slice(dy),
            }
        });
        cpu::tensor(dx, shape)
    })
}

fn pass_through<T: Elem>(x: &[T], dy: &[T], dx: &mut [T], grid: Grid<T::Acc>) {
    vectorised!(T, || {
        for ((x, dy), dx) in x.iter().zip(dy).zip(dx) {
            *dx = if grid.contains(x.to_acc()) { *dy } else { T::default() };
        }
    })
}

/// Moves the ends of a range towards what was seen since the last update, by `fraction` of the distance, and forgets
/// that. Without a fraction, or if a value was not finite, the range stays.
pub fn move_range(range: &Tensor, fraction: Option<f64>) -> Result<()> {
    if has_gpu_kernel(range) {
        on_cuda!(range, |device| gpu::move_range(device, range, fraction));
    }
    let [low, high, seen_low, seen_high] = read_range(range)?;
    let is_finite = seen_low.is_finite() && seen_high.is_finite();
    let moved = |end: f64, seen: f64| match fraction {
        Some(fraction) if is_finite => end + fraction * (seen - end),
        _ => end,
    };
    write_range(range, [moved(low, seen_low), moved(high, seen_high), 0.0, 0.0])
}

/// Bytes of temporaries of [`round_rows`] for a weight of `len` values.
pub fn rows_workspace(len: usize, backend: Backend) -> u64 {
    match backend {
        Backend::Cpu { .. } | Backend::Cuda { .. } => 0,
        Backend::Reference { .. } => 5 * (len * size_of::<f32>()) as u64,
    }
}

/// Rounds the weights `from`, in f32 and with `rows` outputs, to the grid of each output. Without `from`, rounds those
/// of `into` in place.
pub fn round_rows(from: Option<&Tensor>, into: &Tensor, rows: usize) -> Result<()> {
    on_cuda!(into, |device| gpu::round_rows(device, from, into, rows));
    if !reference_kernel::has_cpu_kernel(into) {
        return cast_into(&reference_rows(from.unwrap_or(into), rows)?, into);
    }
    let width = (into.elem_count() / rows.max(1)).max(1);
    let from = from.map(cpu::view::<f32>).transpose()?;
    with_elem!(into.dtype(), T => cpu::with_slice_mut::<T, _>(into, |into| match &from {
        Some(from) => {
            into.par_chunks_mut(width).zip(from.par_chunks(width)).for_each(|(into, from)| {
                let grid = Grid::of_weight(largest(from));
                let value = |value: f32| <T as Elem>::from_acc(<T as Elem>::Acc::of_f64(f64::from(value)));
                into.iter_mut().zip(from).for_each(|(into, from)| *into = value(grid.rounded(*from)));
            });
        }
        None => into.par_chunks_mut(width).for_each(|row| {
            let grid = Grid::of_weight(largest(row));
            row.iter_mut().for_each(|value| *value = T::from_acc(grid.rounded(value.to_acc())));
        }),
    }))
}

fn largest<T: Elem>(values: &[T]) -> T::Acc {
    values.iter().fold(T::Acc::ZERO, |most, value| value.to_acc().abs().larger(most))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layers::gradcheck::{leaf, random_tensor, relative_error, test_device, to_f64_vec};

    fn range(low: f64, high: f64) -> Tensor {
        Tensor::new(&[low as f32, high as f32, 0.0, 0.0], &test_device()).unwrap()
    }

    proptest! {
        /// What a runtime computes with integers, bit for bit, and the gradient of autograd on the reference.
        #[test]
        fn values_and_gradients_are_right(low in -2f64..0.0, high in 0f64..2.0, len in 1usize..3000) {
            let range = range(low, high);
            let x = random_tensor(&[len], 3).to_dtype(DType::F32).unwrap();
            let y = to_f64_vec(&forward(&x, &range, true).unwrap());
            let integers = AffineQuantization::of_range(low as f32, high as f32);
            let values: Vec<f32> = to_f64_vec(&x).iter().map(|v| *v as f32).collect();
            let expected: Vec<f64> = values.iter().map(|v| f64::from(integers.rounded(*v))).collect();
            prop_assert_eq!(&y, &expected);
            let seen = values.iter().fold([0f32; 2], |[l, h], v| [l.min(*v), h.max(*v)]);
            prop_assert_eq!(&to_f64_vec(&range)[2..], &seen.map(f64::from));

            let dy = random_tensor(&[len], 5).to_dtype(DType::F32).unwrap();
            let dx = to_f64_vec(&backward(&x, &dy, &range).unwrap());
            let var = leaf(&x);
            let host = range.to_device(&candle_core::Device::Cpu).unwrap();
            let y = reference(var.as_tensor(), &host).unwrap();
            let grads = (y * leaf(&dy).as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
            prop_assert_eq!(dx, to_f64_vec(grads.get(&var).unwrap()));
        }

        #[test]
        fn rounding_weights_again_changes_no_bit(rows in 1usize..7, width in 1usize..200, exponent in -30i32..30) {
            let x = random_tensor(&[rows * width], 7).affine(2f64.powi(exponent), 0.0).unwrap();
            let from = x.to_dtype(DType::F32).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                let into = from.to_dtype(dtype).unwrap().copy().unwrap();
                round_rows(None, &into, rows).unwrap();
                let again = into.copy().unwrap();
                round_rows(None, &again, rows).unwrap();
                prop_assert_eq!(to_f64_vec(&into), to_f64_vec(&again));
                round_rows(Some(&from), &into, rows).unwrap();
                let once = to_f64_vec(&into);
                for (from, once) in to_f64_vec(&from).chunks(width).zip(once.chunks(width)) {
                    let largest = from.iter().fold(0f64, |most, v| most.max(v.abs()));
                    // Half a step, and in bf16 half of the distance between its values, 1 / 128 of the largest.
                    let step = largest / 127.0 * if dtype == DType::BF16 { 1.001 } else { 0.501 };
                    from.iter().zip(once).for_each(|(a, b)| assert!((a - b).abs() <= step, "{a} {b} {step}"));
                }
            }
            let reference = reference_rows(&from, rows).unwrap();
            let into = from.copy().unwrap();
            round_rows(None, &into, rows).unwrap();
            prop_assert_eq!(to_f64_vec(&into), to_f64_vec(&reference));
        }
    }

    #[test]
    fn every_dtype_follows_the_reference() {
        for (dtype, error) in
            [(DType::F32, 1e-7), (DType::F64, 1e-7), (DType::BF16, 1e-12), (DType::F16, 1e-12)]
        {
            let x = random_tensor(&[5, 40_001], 9).to_dtype(dtype).unwrap();
            for range in [range(-0.4, 0.9), range(0.0, 0.0), range(0.0, 0.7)] {
                let y = to_f64_vec(&forward(&x, &range, false).unwrap());
                assert!(
                    relative_error(&y, &to_f64_vec(&reference(&x, &range).unwrap())) <= error,
                    "{dtype:?}"
                );
                assert_eq!(to_f64_vec(&range)[2..], [0.0; 2]);
            }
        }
    }

    /// Without a range values pass as they are, and so does the gradient.
    #[test]
    fn nothing_is_rounded_before_there_is_a_range() {
        let (x, range) = (random_tensor(&[100], 1).to_dtype(DType::F32).unwrap(), range(0.0, 0.0));
        assert_eq!(to_f64_vec(&forward(&x, &range, true).unwrap()), to_f64_vec(&x));
        assert_eq!(to_f64_vec(&backward(&x, &x, &range).unwrap()), to_f64_vec(&x));
        let seen = to_f64_vec(&range)[2..].to_vec();
        move_range(&range, None).unwrap();
        assert_eq!(to_f64_vec(&range), [0.0; 4]);
        forward(&x, &range, true).unwrap();
        move_range(&range, Some(1.0)).unwrap();
        assert_eq!(to_f64_vec(&range), [seen.clone(), vec![0.0; 2]].concat());
        forward(&x.affine(2.0, 0.0).unwrap(), &range, true).unwrap();
        move_range(&range, Some(0.25)).unwrap();
        let moved = to_f64_vec(&range);
        assert!((moved[0] - 1.25 * seen[0]).abs() < 1e-6 && (moved[1] - 1.25 * seen[1]).abs() < 1e-6);
    }

    #[test]
    fn values_that_are_not_finite_move_no_range() {
        let range = range(-1.0, 1.0);
        let x = Tensor::new(&[f32::NAN, 0.5, f32::INFINITY], &test_device()).unwrap();
        let y = to_f64_vec(&forward(&x, &range, true).unwrap());
        assert!(y[0].is_nan() && (y[2] - 1.0).abs() < 0.01);
        move_range(&range, Some(0.5)).unwrap();
        assert_eq!(to_f64_vec(&range), [-1.0, 1.0, 0.0, 0.0]);
        assert_eq!(symmetric_scale(0.0), 1.0);
        assert_eq!(symmetric_scale(f32::INFINITY), 1.0);
    }
}
