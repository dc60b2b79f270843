//! Average pooling, channels last: windowed and global.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::parallel::{ParallelChunks, ParallelItems};
use super::pool::PoolGeometry;
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// Reference implementation. The mean counts padding zeros, like `torch.nn.AvgPool2d` by default.
pub fn avg_pool2d_reference(x: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    let x = x.pad_with_zeros(1, w.padding, w.padding)?.pad_with_zeros(2, w.padding, w.padding)?;
    let cells = (0..w.size * w.size)
        .map(|i| reference::inputs_at_tap(&x, (i / w.size, i % w.size), w.stride, w.output()));
    Tensor::stack(&cells.collect::<Result<Vec<_>>>()?, 0)?.mean(0)
}

/// Window means of (batch, height, width, channels); the output has fewer pixels.
pub fn avg_pool2d(x: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::avg_pool2d(device, x, w));
    if !reference::has_cpu_kernel(x) {
        return avg_pool2d_reference(x, w);
    }
    with_elem!(x.dtype(), T => avg_pool2d_cpu::<T>(x, w))
}

fn avg_pool2d_cpu<T: Elem>(x: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    let values = cpu::view::<T>(x)?;
    let ((h, width), c) = (w.output(), w.channels);
    let (image_len, batch) = (w.height * w.width * c, x.dim(0)?);
    let inv_count = T::Acc::of_f64(1.0 / (w.size * w.size) as f64);
    let mut y = cpu::uninit::<T>(batch * h * width * c);
    y.par_chunks_mut(width * c).enumerate().for_each_init(
        || vec![T::Acc::ZERO; c],
        |sum, (line, y)| {
            let values = &values[line / h * image_len..][..image_len];
            vectorised!(T, || {
                for (ox, y) in y.chunks_exact_mut(c).enumerate() {
                    sum.fill(T::Acc::ZERO);
                    for (_, cell) in w.taps(line % h, ox) {
                        sum.iter_mut().zip(&values[cell * c..][..c]).for_each(|(s, x)| *s += x.to_acc());
                    }
                    y.iter_mut().zip(&*sum).for_each(|(y, s)| *y = T::from_acc(*s * inv_count));
                }
            })
        },
    );
    cpu::tensor(y, (batch, h, width, c))
}

/// Spreads each mean's gradient evenly over the pixels of its window.
pub fn avg_pool2d_backward(dy: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    on_cuda!(dy, |device| gpu::avg_pool2d_backward(device, dy, w));
    with_elem!(dy.dtype(), T => avg_pool2d_backward_cpu::<T>(dy, w))
}

fn avg_pool2d_backward_cpu<T: Elem>(dy: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    let d = cpu::view::<T>(dy)?;
    let ((h, width), c) = (w.output(), w.channels);
    let (image_len, batch) = (w.height * w.width * c, dy.dim(0)?);
    let inv_count = T::Acc::of_f64(1.0 / (w.size * w.size) as f64);
    let mut dx = cpu::zeros::<T>(batch * image_len);
    cpu::parallel_for_chunks(&mut dx, image_len, |b, dx| {
        vectorised!(T, || {
            for (oy, ox) in (0..h * width).map(|i| (i / width, i % width)) {
                let d = &d[((b * h + oy) * width + ox) * c..][..c];
                for (_, cell) in w.taps(oy, ox) {
                    let to = &mut dx[cell * c..][..c];
                    to.iter_mut()
                        .zip(d)
                        .for_each(|(to, d)| *to = T::from_acc(to.to_acc() + d.to_acc() * inv_count));
                }
            }
        })
    });
    cpu::tensor(dx, (batch, w.height, w.width, c))
}

/// Reference implementation: (batch, height, width, channels) to (batch, channels).
pub fn global_avg_pool_reference(x: &Tensor) -> Result<Tensor> {
    x.flatten(1, 2)?.mean(1)
}

/// Mean over all pixels: (batch, height, width, channels) to (batch, channels).
pub fn global_avg_pool(x: &Tensor) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::global_avg_pool(device, x));
    if !reference::has_cpu_kernel(x) {
        return global_avg_pool_reference(x);
    }
    with_elem!(x.dtype(), T => global_avg_pool_cpu::<T>(x))
}

fn global_avg_pool_cpu<T: Elem>(x: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let values = cpu::view::<T>(x)?;
    let inv_count = T::Acc::of_f64(1.0 / (h * w) as f64);
    let mut y = cpu::uninit::<T>(batch * c);
    y.par_chunks_mut(c).zip(values.par_chunks(h * w * c)).for_each_init(
        || vec![T::Acc::ZERO; c],
        |sum, (y, x)| {
            vectorised!(T, || {
                sum.fill(T::Acc::ZERO);
                for row in x.chunks_exact(c) {
                    sum.iter_mut().zip(row).for_each(|(s, x)| *s += x.to_acc());
                }
                y.iter_mut().zip(&*sum).for_each(|(y, s)| *y = T::from_acc(*s * inv_count));
            })
        },
    );
    cpu::tensor(y, (batch, c))
}

/// Spreads the gradient of the means, (batch, channels), over images of (height, width) pixels.
pub fn global_avg_pool_backward(dy: &Tensor, (h, w): (usize, usize)) -> Result<Tensor> {
    on_cuda!(dy, |device| gpu::global_avg_pool_backward(device, dy, (h, w)));
    let (batch, c) = dy.dims2()?;
    with_elem!(dy.dtype(), T => {
        let d = cpu::view::<T>(dy)?;
        let inv_count = <T as Elem>::Acc::of_f64(1.0 / (h * w) as f64);
        let mut dx = cpu::uninit::<T>(batch * h * w * c);
        dx.par_chunks_mut(h * w * c).zip(d.par_chunks(c)).for_each(|(dx, d)| vectorised!(T, || {
            for row in dx.chunks_exact_mut(c) {
                row.iter_mut().zip(d).for_each(|(x, d)| *x = T::from_acc(d.to_acc() * inv_count));
            }
        }));
        cpu::tensor(dx, (batch, h, w, c))
    })
}
