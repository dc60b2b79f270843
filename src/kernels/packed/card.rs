//! The body for cards: a product for each map, into its columns.

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Map, placed};
use crate::kernels::cuda::columns::add_sums;
use crate::kernels::cuda::fresh;
use crate::kernels::cuda::product::{Mat, Onto, Then, multiply};

/// The columns of one map in the (rows, all) matrix of all of them.
fn of_map(all: &Tensor, rows: usize, first: usize, cols: usize, stride: usize) -> Mat<'_> {
    Mat { from: first, cols, ..Mat::new(all, rows, stride) }
}

pub(super) fn forward(device: &CudaDevice, x: &Tensor, maps: &[Map]) -> Result<Tensor> {
    let ((maps, n), k) = (placed(maps)?, x.dim(x.rank() - 1)?);
    let rows = x.elem_count() / k;
    let y = fresh(device, x.dtype(), [&x.dims()[..x.rank() - 1], &[n]].concat())?;
    for (first, map) in maps {
        let outputs = map.weight.dim(0)?;
        let then = map.bias.map_or(Then::Nothing, Then::Bias);
        let w = Mat::new(map.weight, outputs, k).t();
        multiply(&of_map(&y, rows, first, outputs, n), Mat::new(x, rows, k), w, Onto::Nothing, then)?;
    }
    Ok(y)
}

pub(super) fn backward(
    device: &CudaDevice,
    x: &Tensor,
    maps: &[Map],
    dy: &Tensor,
    grads: &[Map],
    want: bool,
) -> Result<Option<Tensor>> {
    let ((maps, n), k) = (placed(maps)?, x.dim(x.rank() - 1)?);
    let rows = x.elem_count() / k;
    let dx = if want { Some(fresh(device, x.dtype(), x.shape())?) } else { None };
    for (i, ((first, map), grad)) in maps.iter().zip(grads).enumerate() {
        let outputs = map.weight.dim(0)?;
        let d = of_map(dy, rows, *first, outputs, n);
        let into = Mat::new(grad.weight, outputs, k);
        multiply(&into, d.t(), Mat::new(x, rows, k), Onto::Itself, Then::Nothing)?;
        if let Some(bias) = grad.bias {
            add_sums(device, bias, d)?;
        }
        if let Some(dx) = &dx {
            let onto = if i == 0 { Onto::Nothing } else { Onto::Itself };
            multiply(&Mat::new(dx, rows, k), d, Mat::new(map.weight, outputs, k), onto, Then::Nothing)?;
        }
    }
    Ok(dx)
}
