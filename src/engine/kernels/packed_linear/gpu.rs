//! Packed linear maps on CUDA: one GEMM per map, into its columns.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Projection, ProjectionGrads, input_shape, with_column_offsets};
use crate::kernels::cuda::column_sums::add_column_sums;
use crate::kernels::cuda::cublaslt::{Addend, Epilogue, GpuMat, matmul};
use crate::kernels::cuda::uninit;

/// The columns of one map in the (rows, stride) matrix of all maps.
fn projection_columns(all: &Tensor, rows: usize, first: usize, cols: usize, stride: usize) -> GpuMat<'_> {
    GpuMat { offset: first, cols, ..GpuMat::new(all, rows, stride) }
}

pub(super) fn forward(device: &CudaDevice, x: &Tensor, projections: &[Projection]) -> Result<Tensor> {
    let ((projections, n), k) = (with_column_offsets(projections)?, x.dim(x.rank() - 1)?);
    let rows = x.elem_count() / k;
    let y = uninit(device, x.dtype(), [&x.dims()[..x.rank() - 1], &[n]].concat())?;
    for (first, projection) in projections {
        let outputs = projection.weight.dim(0)?;
        let epilogue = projection.bias.map_or(Epilogue::Identity, Epilogue::Bias);
        let w = GpuMat::new(projection.weight, outputs, k).t();
        matmul(
            &projection_columns(&y, rows, first, outputs, n),
            GpuMat::new(x, rows, k),
            w,
            Addend::Zero,
            epilogue,
        )?;
    }
    Ok(y)
}

pub(super) fn backward(
    device: &CudaDevice,
    x: Option<&Tensor>,
    projections: &[Projection],
    dy: &Tensor,
    grads: &[ProjectionGrads],
    needs_input_grad: bool,
) -> Result<Option<Tensor>> {
    let shape = input_shape(projections, dy)?;
    let ((projections, n), k) = (with_column_offsets(projections)?, shape.last().copied().unwrap_or(1));
    let rows = dy.elem_count() / n;
    let dx = if needs_input_grad { Some(uninit(device, dy.dtype(), shape)?) } else { None };
    for (i, ((first, projection), grad)) in projections.iter().zip(grads).enumerate() {
        let outputs = projection.weight.dim(0)?;
        let d = projection_columns(dy, rows, *first, outputs, n);
        if let (Some(x), Some(dweight)) = (x, grad.weight) {
            let into = GpuMat::new(dweight, outputs, k);
            matmul(&into, d.t(), GpuMat::new(x, rows, k), Addend::Output, Epilogue::Identity)?;
        }
        if let Some(bias) = grad.bias {
            add_column_sums(device, bias, d)?;
        }
        if let Some(dx) = &dx {
            let accumulate = if i == 0 { Addend::Zero } else { Addend::Output };
            matmul(
                &GpuMat::new(dx, rows, k),
                d,
                GpuMat::new(projection.weight, outputs, k),
                accumulate,
                Epilogue::Identity,
            )?;
        }
    }
    Ok(dx)
}
