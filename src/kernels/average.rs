//! Average pooling, channels last: over windows, and over the whole picture.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::pool::Window;
use super::{Elem, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// The reference. Padding counts as zeros that belong to the window, as `torch.nn.AvgPool2d` has it.
pub fn reference_windows(x: &Tensor, w: &Window) -> Result<Tensor> {
    let x = x.pad_with_zeros(1, w.padding, w.padding)?.pad_with_zeros(2, w.padding, w.padding)?;
    let cells = (0..w.size * w.size)
        .map(|i| reference::seen_by_cell(&x, (i / w.size, i % w.size), w.stride, w.output()));
    Tensor::stack(&cells.collect::<Result<Vec<_>>>()?, 0)?.mean(0)
}

/// Means of windows: (batch, height, width, channels) to fewer pixels.
pub fn windows(x: &Tensor, w: &Window) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(x) {
        return card::windows(device, x, w);
    }
    if !reference::has_body(x) {
        return reference_windows(x, w);
    }
    with_elem!(x.dtype(), T => windows_cpu::<T>(x, w))
}

fn windows_cpu<T: Elem>(x: &Tensor, w: &Window) -> Result<Tensor> {
    let values = cpu::view::<T>(x)?;
    let ((h, width), c) = (w.output(), w.channels);
    let (picture, batch) = (w.height * w.width * c, x.dim(0)?);
    let share = T::Acc::of(1.0 / (w.size * w.size) as f64);
    let mut y = cpu::fresh::<T>(batch * h * width * c);
    y.par_chunks_mut(width * c).enumerate().with_min_len(8).for_each_init(
        || vec![T::Acc::ZERO; c],
        |sum, (line, y)| {
            let values = &values[line / h * picture..][..picture];
            vectorised!(T, || {
                for (ox, y) in y.chunks_exact_mut(c).enumerate() {
                    sum.fill(T::Acc::ZERO);
                    for (_, cell) in w.cells(line % h, ox) {
                        sum.iter_mut().zip(&values[cell * c..][..c]).for_each(|(s, x)| *s += x.up());
                    }
                    y.iter_mut().zip(&*sum).for_each(|(y, s)| *y = T::down(*s * share));
                }
            })
        },
    );
    cpu::tensor(y, (batch, h, width, c))
}

/// Gives each cell of a window its share of the mean's gradient.
pub fn windows_backward(dy: &Tensor, w: &Window) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(dy) {
        return card::windows_backward(device, dy, w);
    }
    if !reference::has_body(dy) {
        let shape = (dy.dim(0)?, w.height, w.width, w.channels);
        let x = Tensor::zeros(shape, dy.dtype(), dy.device())?;
        return Ok(reference::gradients(&[&x], dy, |t| reference_windows(&t[0], w))?.remove(0));
    }
    with_elem!(dy.dtype(), T => windows_backward_cpu::<T>(dy, w))
}

fn windows_backward_cpu<T: Elem>(dy: &Tensor, w: &Window) -> Result<Tensor> {
    let d = cpu::view::<T>(dy)?;
    let ((h, width), c) = (w.output(), w.channels);
    let (picture, batch) = (w.height * w.width * c, dy.dim(0)?);
    let share = T::Acc::of(1.0 / (w.size * w.size) as f64);
    let mut dx = cpu::zeros::<T>(batch * picture);
    dx.par_chunks_mut(picture).enumerate().for_each(|(b, dx)| {
        vectorised!(T, || {
            for (oy, ox) in (0..h * width).map(|i| (i / width, i % width)) {
                let d = &d[((b * h + oy) * width + ox) * c..][..c];
                for (_, cell) in w.cells(oy, ox) {
                    let to = &mut dx[cell * c..][..c];
                    to.iter_mut().zip(d).for_each(|(to, d)| *to = T::down(to.up() + d.up() * share));
                }
            }
        })
    });
    cpu::tensor(dx, (batch, w.height, w.width, c))
}

/// The reference: (batch, height, width, channels) to (batch, channels).
pub fn reference_whole(x: &Tensor) -> Result<Tensor> {
    x.flatten(1, 2)?.mean(1)
}

/// Means of whole pictures: (batch, height, width, channels) to (batch, channels).
pub fn whole(x: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(x) {
        return card::whole(device, x);
    }
    if !reference::has_body(x) {
        return reference_whole(x);
    }
    with_elem!(x.dtype(), T => whole_cpu::<T>(x))
}

fn whole_cpu<T: Elem>(x: &Tensor) -> Result<Tensor> {
    let (batch, h, w, c) = x.dims4()?;
    let values = cpu::view::<T>(x)?;
    let share = T::Acc::of(1.0 / (h * w) as f64);
    let mut y = cpu::fresh::<T>(batch * c);
    y.par_chunks_mut(c).zip(values.par_chunks(h * w * c)).for_each_init(
        || vec![T::Acc::ZERO; c],
        |sum, (y, x)| {
            vectorised!(T, || {
                sum.fill(T::Acc::ZERO);
                for row in x.chunks_exact(c) {
                    sum.iter_mut().zip(row).for_each(|(s, x)| *s += x.up());
                }
                y.iter_mut().zip(&*sum).for_each(|(y, s)| *y = T::down(*s * share));
            })
        },
    );
    cpu::tensor(y, (batch, c))
}

/// Spreads the gradient of the means, (batch, channels), over pictures of `pixels` = (height, width).
pub fn whole_backward(dy: &Tensor, (h, w): (usize, usize)) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(dy) {
        return card::whole_backward(device, dy, (h, w));
    }
    let (batch, c) = dy.dims2()?;
    if !reference::has_body(dy) {
        let share = (dy / (h * w) as f64)?.reshape((batch, 1, 1, c))?;
        return share.broadcast_as((batch, h, w, c))?.contiguous();
    }
    with_elem!(dy.dtype(), T => {
        let d = cpu::view::<T>(dy)?;
        let share = <T as Elem>::Acc::of(1.0 / (h * w) as f64);
        let mut dx = cpu::fresh::<T>(batch * h * w * c);
        dx.par_chunks_mut(h * w * c).zip(d.par_chunks(c)).for_each(|(dx, d)| vectorised!(T, || {
            for row in dx.chunks_exact_mut(c) {
                row.iter_mut().zip(d).for_each(|(x, d)| *x = T::down(d.up() * share));
            }
        }));
        cpu::tensor(dx, (batch, h, w, c))
    })
}
