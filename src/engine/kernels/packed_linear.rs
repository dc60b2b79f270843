//! Several linear maps of one input, their outputs concatenated: `y = [x W1^T + b1, x W2^T + b2, ...]`.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{DType, Result, Tensor};

use super::linear::column_sums;
use super::matmul::{MatView, Threading, Transposed, gemm, gemm_workspace, round};
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// One map: its weight is (out, in), its bias (out).
#[derive(Clone, Copy)]
pub struct Projection<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
}

/// The gradients of a map; `None` for a frozen parameter.
pub type ProjectionGrads<'a> = super::linear::WeightBiasGrads<'a>;

/// The maps, each with its first output column, and the total number of columns.
fn with_column_offsets<'a>(projections: &[Projection<'a>]) -> Result<(Vec<(usize, Projection<'a>)>, usize)> {
    let mut columns = 0;
    let mut offsets = Vec::with_capacity(projections.len());
    for projection in projections {
        offsets.push((columns, *projection));
        columns += projection.weight.dim(0)?;
    }
    Ok((offsets, columns))
}

/// Reference implementation.
pub fn reference(x: &Tensor, projections: &[Projection]) -> Result<Tensor> {
    let k = x.dim(x.rank() - 1)?;
    let rows = x.reshape((x.elem_count() / k, k))?;
    let project = |projection: &Projection| {
        let y = rows.matmul(&projection.weight.t()?)?;
        projection.bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
    };
    let y = Tensor::cat(&projections.iter().map(project).collect::<Result<Vec<_>>>()?, 1)?;
    y.reshape([&x.dims()[..x.rank() - 1], &[y.dim(1)?]].concat())
}

pub fn forward(x: &Tensor, projections: &[Projection]) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::forward(device, x, projections));
    if !reference::has_cpu_kernel(x) {
        return reference(x, projections);
    }
    with_elem!(x.dtype(), T => forward_cpu::<T>(x, projections))
}

fn forward_cpu<T: Elem>(x: &Tensor, projections: &[Projection]) -> Result<Tensor> {
    let ((projections, n), k) = (with_column_offsets(projections)?, x.dim(x.rank() - 1)?);
    let values = cpu::view::<T>(x)?;
    let rows = values.len() / k;
    let mut y = cpu::uninit::<T>(rows * n);
    let mut acc = vec![T::Acc::ZERO; if T::as_acc_mut(&mut y).is_none() { rows * n } else { 0 }];
    let out = T::as_acc_mut(&mut y).unwrap_or(&mut acc);
    for (first, projection) in &projections {
        let w = cpu::view::<T>(projection.weight)?;
        let w = MatView::new(&w, w.len() / k, k).t();
        gemm::<T>(&mut out[*first..], n, MatView::new(&values, rows, k), w, false, Threading::Parallel);
    }
    if !acc.is_empty() {
        round(&acc, &mut y, Threading::Parallel);
    }
    let mut biases = Vec::with_capacity(projections.len());
    for (first, projection) in &projections {
        if let Some(bias) = projection.bias {
            biases.push((*first, cpu::view::<T>(bias)?));
        }
    }
    if !biases.is_empty() {
        let biases: Vec<(usize, &[T])> = biases.iter().map(|(first, bias)| (*first, &**bias)).collect();
        cpu::parallel_for_rows(&mut y, n, |_, y| {
            vectorised!(T, || {
                for row in y.chunks_exact_mut(n) {
                    for (first, bias) in &biases {
                        let row = row[*first..].iter_mut().zip(*bias);
                        row.for_each(|(y, b)| *y = T::from_acc(y.to_acc() + b.to_acc()));
                    }
                }
            })
        });
    }
    cpu::tensor(y, [&x.dims()[..x.rank() - 1], &[n]].concat())
}

/// The shape of the input of these maps, whose output has the gradient `dy`.
fn input_shape(projections: &[Projection], dy: &Tensor) -> Result<Vec<usize>> {
    let mut shape = dy.dims().to_vec();
    if let (Some(last), Some(projection)) = (shape.last_mut(), projections.first()) {
        *last = projection.weight.dim(1)?;
    }
    Ok(shape)
}

/// Accumulates the gradients of the maps into `grads`, in the same order, and returns the input gradient if
/// `needs_input_grad`. Only the weight gradients read `x`.
pub fn backward(
    x: Option<&Tensor>,
    projections: &[Projection],
    dy: &Tensor,
    grads: &[ProjectionGrads],
    needs_input_grad: bool,
) -> Result<Option<Tensor>> {
    on_cuda!(dy, |device| gpu::backward(device, x, projections, dy, grads, needs_input_grad));
    with_elem!(dy.dtype(), T => backward_cpu::<T>(x, projections, dy, grads, needs_input_grad))
}

fn backward_cpu<T: Elem>(
    x: Option<&Tensor>,
    projections: &[Projection],
    dy: &Tensor,
    grads: &[ProjectionGrads],
    needs_input_grad: bool,
) -> Result<Option<Tensor>> {
    let shape = input_shape(projections, dy)?;
    let ((projections, n), k) = (with_column_offsets(projections)?, shape.last().copied().unwrap_or(1));
    let (values, d) = (x.map(cpu::view::<T>).transpose()?, cpu::view::<T>(dy)?);
    let (values, d): (Option<&[T]>, &[T]) = (values.as_deref(), &d);
    let rows = d.len() / n;
    let sums = grads.iter().any(|g| g.bias.is_some()).then(|| column_sums(d, n));
    let projection_columns = |first: usize, outputs: usize| MatView::strided(&d[first..], rows, outputs, n);
    let weights = || -> Result<()> {
        for ((first, projection), grad) in projections.iter().zip(grads) {
            let d = projection_columns(*first, projection.weight.dim(0)?);
            if let (Some(dw), Some(values)) = (grad.weight, values) {
                cpu::with_slice_mut::<T::Acc, _>(dw, |dw| {
                    gemm::<T>(dw, k, d.t(), MatView::new(values, rows, k), true, Threading::Parallel)
                })?;
            }
            if let (Some(bias), Some(sums)) = (grad.bias, &sums) {
                cpu::with_slice_mut::<T::Acc, _>(bias, |into| sums.add_to(into, *first))?;
            }
        }
        Ok(())
    };
    let input = || -> Result<Vec<T>> {
        let mut dx = cpu::uninit::<T>(rows * k);
        let mut acc = vec![T::Acc::ZERO; if T::as_acc_mut(&mut dx).is_none() { rows * k } else { 0 }];
        let out = T::as_acc_mut(&mut dx).unwrap_or(&mut acc);
        for (i, (first, projection)) in projections.iter().enumerate() {
            let w = cpu::view::<T>(projection.weight)?;
            let outputs = w.len() / k;
            gemm::<T>(
                out,
                k,
                projection_columns(*first, outputs),
                MatView::new(&w, outputs, k),
                i > 0,
                Threading::Parallel,
            );
        }
        if !acc.is_empty() {
            round(&acc, &mut dx, Threading::Parallel);
        }
        Ok(dx)
    };
    let (done, dx) = rayon::join(weights, || needs_input_grad.then(input).transpose());
    done?;
    dx?.map(|dx| cpu::tensor(dx, shape)).transpose()
}

/// Bytes of temporaries of the forward and the backward pass of maps from `k` values to `widths`, each of them
/// `trained` or frozen.
pub fn workspace(dtype: DType, rows: usize, k: usize, widths: &[usize], trained: &[bool]) -> (u64, u64) {
    let acc = cpu::acc_bytes(dtype);
    // Results in the accumulator type, if that is not the stored type.
    let acc_copy = |values: usize| if dtype.size_in_bytes() == acc { 0 } else { (values * acc) as u64 };
    let columns: usize = widths.iter().sum();
    let largest = |packed: &dyn Fn(usize) -> u64| widths.iter().map(|n| packed(*n)).max().unwrap_or(0);
    let output = largest(&|n| gemm_workspace(dtype, (rows, k, n), Transposed::B, Threading::Parallel));
    let input = largest(&|n| gemm_workspace(dtype, (rows, n, k), Transposed::NONE, Threading::Parallel))
        + acc_copy(rows * k);
    let weights = widths.iter().zip(trained).filter(|(_, trained)| **trained);
    let weights =
        weights.map(|(n, _)| gemm_workspace(dtype, (*n, rows, k), Transposed::A, Threading::Parallel));
    (output + acc_copy(rows * columns), weights.max().unwrap_or(0) + input)
}
