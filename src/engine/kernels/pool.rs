//! Max pooling, channels last. One byte per output saves the argmax within its window.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::{Result, Tensor};

use super::{Elem, cpu, reference};
use crate::{vectorised, with_elem};

/// Sizes of a pooling window over (height, width, channels) images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolGeometry {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub size: usize,
    pub stride: usize,
    pub padding: usize,
}

impl PoolGeometry {
    fn output_dim(&self, size: usize) -> usize {
        (size + 2 * self.padding).checked_sub(self.size).map_or(0, |slack| slack / self.stride + 1)
    }

    pub fn output(&self) -> (usize, usize) {
        (self.output_dim(self.height), self.output_dim(self.width))
    }

    /// The taps of an output pixel's window: (tap index, input pixel within the image).
    pub(super) fn taps(&self, oy: usize, ox: usize) -> impl Iterator<Item = (usize, usize)> {
        let (size, stride, padding, width, height) =
            (self.size, self.stride, self.padding, self.width, self.height);
        (0..size * size).filter_map(move |i| {
            let y = (oy * stride + i / size).checked_sub(padding)?;
            let x = (ox * stride + i % size).checked_sub(padding)?;
            (y < height && x < width).then_some((i, y * width + x))
        })
    }
}

/// Reference implementation: the maximum over the taps of the window.
pub fn reference_max(x: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    // Padding loses against every value.
    let pad = |x: Tensor, dim: usize| match w.padding {
        0 => Ok(x),
        padding => {
            let mut shape = x.dims().to_vec();
            shape[dim] = padding;
            let border = Tensor::full(f32::MIN, shape, x.device())?.to_dtype(x.dtype())?;
            Tensor::cat(&[&border, &x, &border], dim)
        }
    };
    let x = pad(pad(x.clone(), 1)?, 2)?;
    let tap_inputs = (0..w.size * w.size)
        .map(|i| reference::inputs_at_tap(&x, (i / w.size, i % w.size), w.stride, w.output()));
    Tensor::stack(&tap_inputs.collect::<Result<Vec<_>>>()?, 0)?.max(0)
}

/// The maxima and, as bytes of the same shape, the tap each came from (the first of equals).
pub fn max(x: &Tensor, w: &PoolGeometry) -> Result<(Tensor, Tensor)> {
    on_cuda!(x, |device| gpu::max(device, x, w));
    if !reference::has_cpu_kernel(x) {
        let y = reference_max(x, w)?;
        let indices = Tensor::zeros(y.shape(), candle_core::DType::U8, y.device())?;
        return Ok((y, indices));
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let ((h, width), c) = (w.output(), w.channels);
        let (image_len, batch) = (w.height * w.width * c, x.dim(0)?);
        let mut y = cpu::uninit::<T>(batch * h * width * c);
        let mut indices = vec![0u8; y.len()];
        use rayon::prelude::*;
        let lines = y.par_chunks_mut(width * c).zip(indices.par_chunks_mut(width * c)).enumerate();
        lines.for_each(|(line, (y, which))| {
            let values = &values[line / h * image_len..][..image_len];
            vectorised!(T, || {
                for (ox, (y, indices)) in y.chunks_exact_mut(c).zip(which.chunks_exact_mut(c)).enumerate() {
                    let mut first = true;
                    for (i, pixel) in w.taps(line % h, ox) {
                        let from = &values[pixel * c..][..c];
                        if std::mem::take(&mut first) {
                            y.copy_from_slice(from);
                            indices.fill(i as u8);
                            continue;
                        }
                        for ((y, index), v) in y.iter_mut().zip(indices.iter_mut()).zip(from) {
                            *index = if y.raise(*v) { i as u8 } else { *index };
                        }
                    }
                }
            })
        });
        let shape = (batch, h, width, c);
        Ok((cpu::tensor(y, shape)?, cpu::tensor(indices, shape)?))
    })
}

/// Routes each maximum's gradient to the pixel it came from.
pub fn max_backward(indices: &Tensor, dy: &Tensor, w: &PoolGeometry) -> Result<Tensor> {
    on_cuda!(dy, |device| gpu::max_backward(device, indices, dy, w));
    with_elem!(dy.dtype(), T => {
        let (indices, d) = (cpu::view::<u8>(indices)?, cpu::view::<T>(dy)?);
        let (image_len, batch) = (w.height * w.width * w.channels, dy.dim(0)?);
        // Windows that tile the image exactly write each pixel once, so `dx` needs no zeroing.
        let disjoint = w.stride == w.size
            && w.padding == 0
            && w.height.is_multiple_of(w.size)
            && w.width.is_multiple_of(w.size);
        let mut dx = if disjoint { cpu::uninit::<T>(batch * image_len) } else { cpu::zeros::<T>(batch * image_len) };
        cpu::parallel_for_chunks(&mut dx, image_len, |b, dx| match disjoint {
            true => scatter_gradient(&indices, &d, w, b, dx, |_, share| share),
            false => scatter_gradient(&indices, &d, w, b, dx, |there: T, share: T| {
                T::from_acc(there.to_acc() + share.to_acc())
            }),
        });
        cpu::tensor(dx, (batch, w.height, w.width, w.channels))
    })
}

/// One image. `combine` computes a pixel's new gradient from its current one and the window's contribution.
#[inline(always)]
fn scatter_gradient<T: Elem>(
    indices: &[u8],
    d: &[T],
    w: &PoolGeometry,
    image: usize,
    dx: &mut [T],
    combine: impl Fn(T, T) -> T,
) {
    let ((h, width), c) = (w.output(), w.channels);
    vectorised!(T, || {
        for (oy, ox) in (0..h * width).map(|i| (i / width, i % width)) {
            let at = ((image * h + oy) * width + ox) * c;
            let (indices, d) = (&indices[at..][..c], &d[at..][..c]);
            for (i, pixel) in w.taps(oy, ox) {
                let to = &mut dx[pixel * c..][..c];
                for ((to, index), d) in to.iter_mut().zip(indices).zip(d) {
                    *to = combine(*to, d.keep_if(*index == i as u8));
                }
            }
        }
    })
}
