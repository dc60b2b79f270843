//! Weights held as 8-bit integers, symmetric around 0, with a scale per output: `weight = scale (stored - 128)`.
//!
//! They are rounded once, on the host, when a file is read, and become floats again for as long as a layer computes.
//! The scales are f32 whatever the floats are, and every backend computes the same bits.

use candle_core::{DType, Result, Tensor};

use super::fake_quantize::symmetric_scale;
use super::update::cast_into;
use super::{Elem, Real, cpu, kernel_timer, reference as reference_kernel};
use crate::base::MicroBatchSpec;
use crate::params::ScaleGrid;
use crate::{vectorised, with_elem};

/// What is stored for a weight of 0.
const ZERO: u8 = 128;

/// Values that candle's operations dequantize at a time.
const CHUNK: usize = 1 << 20;

/// Raises the largest magnitude of each output to those of `values`, which begin at a row of the weight. What is not
/// finite stays.
pub fn raise_largest(grid: ScaleGrid, first_row: usize, values: &[f32], largest: &mut [f32]) {
    let raise = |largest: &mut f32, value: &f32| {
        if value.abs() > *largest || value.is_nan() {
            *largest = value.abs();
        }
    };
    for (row, values) in values.chunks_exact(grid.columns).enumerate() {
        match grid.per_column {
            true => largest.iter_mut().zip(values).for_each(|(largest, value)| raise(largest, value)),
            false => values.iter().for_each(|value| raise(&mut largest[first_row + row], value)),
        }
    }
}

/// The scale of an output of this largest magnitude. Of one that is not finite, all weights become NaN.
pub fn scale(largest: f32) -> f32 {
    if largest.is_finite() { symmetric_scale(largest) } else { f32::NAN }
}

/// What is stored for `values`, which begin at a row of the weight: the nearest multiples of the scales.
pub fn quantize(grid: ScaleGrid, first_row: usize, values: &[f32], scales: &[f32], into: &mut [u8]) {
    let stored = |value: f32, scale: f32| {
        let steps = (value / scale).round_ties_even().clamp(-127.0, 127.0);
        (steps as i16 + i16::from(ZERO)) as u8
    };
    let rows = values.chunks_exact(grid.columns).zip(into.chunks_exact_mut(grid.columns));
    for (row, (values, into)) in rows.enumerate() {
        for (column, (value, into)) in values.iter().zip(into).enumerate() {
            *into = stored(*value, scales[if grid.per_column { column } else { first_row + row }]);
        }
    }
}

/// Rows that candle's operations dequantize at a time.
fn rows_per_chunk(grid: ScaleGrid) -> usize {
    (CHUNK / grid.columns.max(1)).clamp(1, grid.rows.max(1))
}

/// Bytes of these weights as floats of the spec's type, all at the same time, and of temporaries.
pub fn dequantized_bytes(grids: impl Iterator<Item = ScaleGrid>, spec: MicroBatchSpec) -> u64 {
    let on_cpu = spec.threads() > 0;
    let (mut floats, mut temporary) = (0, 0);
    for grid in grids {
        floats += grid.rows * grid.columns * spec.dtype.size_in_bytes();
        temporary = temporary.max(2 * rows_per_chunk(grid) * grid.columns * size_of::<f32>());
    }
    (floats + if on_cpu { 0 } else { temporary }) as u64
}

/// Reference implementation: rows as floats.
fn reference_rows(stored: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let floats = stored.to_dtype(DType::F32)?;
    let centered = floats.affine(1.0, -f64::from(ZERO))?;
    drop(floats);
    centered.broadcast_mul(scales)
}

/// The weights in a float type, in the shape of `stored`. `stored` has the rows and columns of `grid`, `scales` is
/// flat.
pub fn dequantize(stored: &Tensor, scales: &Tensor, grid: ScaleGrid, dtype: DType) -> Result<Tensor> {
    let _scope = kernel_timer::enter(module_path!());
    if reference_kernel::has_cpu_kernel(stored) {
        return with_elem!(dtype, T => dequantize_cpu::<T>(stored, scales, grid));
    }
    let ScaleGrid { rows, columns, per_column } = grid;
    let into = Tensor::zeros(rows * columns, dtype, stored.device())?;
    let (from, chunk) = (stored.reshape((rows, columns))?, rows_per_chunk(grid));
    for first in (0..rows).step_by(chunk) {
        let some = chunk.min(rows - first);
        let scales = match per_column {
            true => scales.reshape((1, columns))?,
            false => scales.narrow(0, first, some)?.reshape((some, 1))?,
        };
        let floats = reference_rows(&from.narrow(0, first, some)?, &scales)?.flatten_all()?;
        cast_into(&floats, &into.narrow(0, first * columns, some * columns)?)?;
    }
    into.reshape(stored.shape())
}

fn dequantize_cpu<T: Elem>(stored: &Tensor, scales: &Tensor, grid: ScaleGrid) -> Result<Tensor> {
    let (values, scales) = (cpu::view::<u8>(stored)?, cpu::view::<f32>(scales)?);
    let (values, scales): (&[u8], &[f32]) = (&values, &scales);
    let columns = grid.columns.max(1);
    let mut floats = cpu::uninit::<T>(values.len());
    let float = |stored: u8, scale: f32| {
        T::from_acc(T::Acc::of_f64(f64::from((f32::from(stored) - f32::from(ZERO)) * scale)))
    };
    cpu::parallel_for_rows(&mut floats, columns, |first, floats| {
        let rows = floats.chunks_exact_mut(columns).zip(values[first * columns..].chunks_exact(columns));
        vectorised!(T, || for (row, (floats, values)) in rows.enumerate() {
            let pairs = floats.iter_mut().zip(values);
            match grid.per_column {
                true => pairs.zip(scales).for_each(|((to, from), scale)| *to = float(*from, *scale)),
                false => {
                    let scale = scales[first + row];
                    pairs.for_each(|(to, from)| *to = float(*from, scale));
                }
            }
        })
    });
    cpu::tensor(floats, stored.shape())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::reference::ReferenceScope;
    use crate::layers::gradcheck::test_device;
    use proptest::prelude::*;

    /// Stored values and scales of `values`, in chunks of rows as a file is read.
    fn quantized(grid: ScaleGrid, values: &[f32], chunk_rows: usize) -> (Vec<u8>, Vec<f32>) {
        let mut largest = vec![0.0; grid.num_scales()];
        let chunk = chunk_rows * grid.columns;
        for (i, values) in values.chunks(chunk).enumerate() {
            raise_largest(grid, i * chunk_rows, values, &mut largest);
        }
        let scales: Vec<f32> = largest.into_iter().map(scale).collect();
        let mut stored = vec![0; values.len()];
        for (i, (values, into)) in values.chunks(chunk).zip(stored.chunks_mut(chunk)).enumerate() {
            quantize(grid, i * chunk_rows, values, &scales, into);
        }
        (stored, scales)
    }

    fn dequantized(grid: ScaleGrid, stored: &[u8], scales: &[f32], dtype: DType) -> Vec<f32> {
        let device = test_device();
        let stored = Tensor::from_slice(stored, (grid.rows, grid.columns), &device).unwrap();
        let scales = Tensor::from_slice(scales, scales.len(), &device).unwrap();
        let floats = dequantize(&stored, &scales, grid, dtype).unwrap();
        floats.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn weights_come_back_within_half_a_step(
            rows in 1usize..9,
            columns in 1usize..40,
            per_column: bool,
            chunk_rows in 1usize..4,
            seed: u64,
            magnitude in -20i32..20,
        ) {
            let grid = ScaleGrid { rows, columns, per_column };
            let random = crate::base::random::RngKey::new(seed, 1);
            let value = |i: usize| (random.normal(i as u64) * 2f64.powi(magnitude)) as f32;
            let values: Vec<f32> = (0..rows * columns).map(value).collect();
            let (stored, scales) = quantized(grid, &values, chunk_rows);
            let floats = dequantized(grid, &stored, &scales, DType::F32);
            for (i, (value, float)) in values.iter().zip(&floats).enumerate() {
                let step = scales[if per_column { i % columns } else { i / columns }];
                prop_assert!((value - float).abs() <= 0.5001 * step, "{value} {float} {step}");
            }
            // In candle's operations too, and rounded once in narrow types.
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let ours = dequantized(grid, &stored, &scales, dtype);
                let _kernels = ReferenceScope::enter(true);
                prop_assert_eq!(&ours, &dequantized(grid, &stored, &scales, dtype));
            }
        }
    }

    #[test]
    fn zeros_stay_zero_and_what_is_not_finite_is_seen() {
        let grid = ScaleGrid { rows: 3, columns: 2, per_column: false };
        let (stored, scales) = quantized(grid, &[0.0, -0.0, 1.0, f32::NAN, f32::INFINITY, 2.0], 2);
        let floats = dequantized(grid, &stored, &scales, DType::F32);
        assert_eq!(floats[..2], [0.0, 0.0]);
        assert!(floats[2..].iter().all(|value| value.is_nan()), "{floats:?}");
    }
}
