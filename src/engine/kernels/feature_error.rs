//! The error between features of a student and those of its teacher: the mean squared difference of each row, weighted
//! and summed over rows.

use candle_core::{DType, Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// Bytes of temporaries in candle's operations, and of the weights of rows.
pub fn workspace(dtype: DType, rows: usize, width: usize, runs_cpu_kernel: bool) -> u64 {
    let weights = 4 * rows as u64;
    if runs_cpu_kernel {
        return weights;
    }
    // The difference, its square and the gradient, an operand of each, and of 16-bit types both features in f32.
    let (dtype, tensors) = match dtype {
        DType::F32 | DType::F64 => (dtype, 4),
        _ => (DType::F32, 6),
    };
    weights + cpu::size_in_bytes(dtype, (tensors * width + 4) * rows)
}

/// Reference implementation: the summed error. Features are (rows, width), `weights` has one value per row.
pub fn reference(student: &Tensor, teacher: &Tensor, weights: &Tensor) -> Result<Tensor> {
    ((student - teacher)?.sqr()?.mean(1)? * weights)?.sum_all()
}

/// Overwrites the features of the student, (..., width), with the gradient of `scale` times the summed error; returns
/// the summed error, one f64 on the device. Those of the teacher have the same number of values and the same type.
pub fn forward_backward(student: &Tensor, teacher: &Tensor, weights: Vec<f32>, scale: f64) -> Result<Tensor> {
    let width = student.dims().last().copied().unwrap_or(1);
    let rows = weights.len();
    if student.elem_count() != rows * width || teacher.elem_count() != rows * width {
        let (student, teacher) = (student.dims(), teacher.dims());
        candle_core::bail!(
            "features of shape {student:?}, and of shape {teacher:?} of the teacher, in {rows} rows"
        )
    }
    if reference::has_cpu_kernel(student) {
        let error = with_elem!(student.dtype(), T => run_cpu::<T>(student, teacher, &weights, scale))?;
        return Tensor::new(error, student.device());
    }
    let wide = |features: &Tensor| match features.dtype() {
        DType::F64 => features.reshape((rows, width)),
        _ => features.reshape((rows, width))?.to_dtype(DType::F32),
    };
    let (ours, theirs) = (wide(student)?, wide(teacher)?);
    let weights = Tensor::from_vec(weights, rows, student.device())?.to_dtype(ours.dtype())?;
    let error = reference(&ours, &theirs, &weights)?.to_dtype(DType::F64)?;
    let factor = (weights.unsqueeze(1)? * (2.0 * scale / width as f64))?;
    let gradient = (ours - theirs)?.broadcast_mul(&factor)?.to_dtype(student.dtype())?;
    student.slice_set(&gradient.reshape(student.shape())?, 0, 0)?;
    Ok(error)
}

fn run_cpu<T: Elem>(student: &Tensor, teacher: &Tensor, weights: &[f32], scale: f64) -> Result<f64> {
    let width = student.elem_count() / weights.len().max(1);
    let (teacher, rows) = (cpu::view::<T>(teacher)?, cpu::rows_per_chunk(width));
    let parts: Vec<f64> = cpu::with_slice_mut::<T, _>(student, |student| {
        let chunks = student.par_chunks_mut(rows * width).zip(teacher.par_chunks(rows * width));
        let sum = |((student, teacher), weights): ((&mut [T], &[T]), &[f32])| {
            vectorised!(T, || {
                let rows = student.chunks_exact_mut(width).zip(teacher.chunks_exact(width)).zip(weights);
                rows.map(|((student, teacher), weight)| row(student, teacher, *weight as f64, scale))
                    .sum::<f64>()
            })
        };
        chunks.zip(weights.par_chunks(rows)).map_collect(sum)
    })?;
    Ok(parts.into_iter().sum())
}

/// Turns a row of features into its gradient and returns its error.
#[inline(always)]
fn row<T: Elem>(student: &mut [T], teacher: &[T], weight: f64, scale: f64) -> f64 {
    // Padding may hold anything.
    if weight == 0.0 {
        student.fill(T::default());
        return 0.0;
    }
    let width = student.len() as f64;
    let factor = T::Acc::of_f64(2.0 * scale * weight / width);
    let mut squares = T::Acc::ZERO;
    for (value, teacher) in student.iter_mut().zip(teacher) {
        let difference = value.to_acc() - teacher.to_acc();
        squares += difference * difference;
        *value = T::from_acc(difference * factor);
    }
    weight * squares.as_f64() / width
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::Activation;
    use crate::kernels::linear::{LinearKernel, WeightBiasGrads, WeightLayout};
    use crate::kernels::reference::ReferenceScope;
    use crate::layers::gradcheck::{leaf, random_tensor, relative_error, test_device, to_f64_vec};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// The error of mapped features and its gradients against candle's autograd, by the kernel and in candle's
        /// operations.
        #[test]
        fn gradients_are_those_of_autograd(
            rows in 1usize..300,
            inputs in 1usize..10,
            width in 1usize..20,
            f64s: bool,
            by_reference: bool,
        ) {
            let dtype = if f64s { DType::F64 } else { DType::F32 };
            let of = |shape: &[usize], seed| random_tensor(shape, seed).to_dtype(dtype).unwrap();
            let (x, map) = (of(&[rows, inputs], 1), of(&[width, inputs], 2));
            let teacher = of(&[rows, width], 3);
            let weights: Vec<f32> = (0..rows).map(|row| (row % 3) as f32 * 0.5).collect();
            let gradient = Tensor::zeros((width, inputs), dtype, &test_device()).unwrap();
            let (error, dx) = {
                let _scope = ReferenceScope::enter(by_reference);
                let kernel = LinearKernel {
                    weight: &map,
                    weight_layout: WeightLayout::OutIn,
                    bias: None,
                    act: Activation::Identity,
                };
                let mapped = kernel.forward(&x).unwrap().0;
                let error = forward_backward(&mapped, &teacher, weights.clone(), 0.7).unwrap();
                let grads = WeightBiasGrads { weight: Some(&gradient), bias: None };
                (error, kernel.backward(Some(&x), None, mapped, &grads, true).unwrap().unwrap())
            };
            let vars = [leaf(&x), leaf(&map)];
            let mapped = vars[0].matmul(&vars[1].t().unwrap()).unwrap();
            let wide = teacher.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
            let weights = Tensor::from_vec(weights, rows, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
            let expected = reference(&mapped, &wide, &weights).unwrap();
            let grads = (&expected * 0.7).unwrap().backward().unwrap();
            let bound = if f64s { 1e-9 } else { 1e-4 };
            let (error, expected) = (error.to_scalar::<f64>().unwrap(), expected.to_scalar::<f64>().unwrap());
            prop_assert!((error - expected).abs() <= bound * expected.max(1.0), "{error} and {expected}");
            for (ours, var) in [&dx, &gradient].into_iter().zip(&vars) {
                prop_assert!(relative_error(&to_f64_vec(ours), &to_f64_vec(grads.get(var).unwrap())) < bound);
            }
        }
    }
}
