//! Max pooling, channels last. The place of each maximum is kept in one byte.

#[cfg(feature = "cuda")]
pub(super) mod card;

use candle_core::{Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Elem, cpu, reference};
use crate::{vectorised, with_elem};

/// Sizes of a pooling window over (height, width, channels) pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    pub size: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Window {
    fn along(&self, size: usize) -> usize {
        (size + 2 * self.padding).checked_sub(self.size).map_or(0, |room| room / self.stride + 1)
    }

    pub fn output(&self) -> (usize, usize) {
        (self.along(self.height), self.along(self.width))
    }

    /// The input positions (within a picture, in pixels) of an output pixel's window, with their number.
    pub(super) fn cells(&self, oy: usize, ox: usize) -> impl Iterator<Item = (usize, usize)> {
        let (size, stride, padding, width, height) =
            (self.size, self.stride, self.padding, self.width, self.height);
        (0..size * size).filter_map(move |i| {
            let y = (oy * stride + i / size).checked_sub(padding)?;
            let x = (ox * stride + i % size).checked_sub(padding)?;
            (y < height && x < width).then_some((i, y * width + x))
        })
    }
}

/// The reference: the largest of what the cells of the window see.
pub fn reference_max(x: &Tensor, w: &Window) -> Result<Tensor> {
    // Padding must lose against every value: the picture is lifted above zero and let down again.
    let lift = 1e4;
    let x = (x + lift)?.pad_with_zeros(1, w.padding, w.padding)?.pad_with_zeros(2, w.padding, w.padding)?;
    let cells = (0..w.size * w.size)
        .map(|i| reference::seen_by_cell(&x, (i / w.size, i % w.size), w.stride, w.output()));
    Tensor::stack(&cells.collect::<Result<Vec<_>>>()?, 0)?.max(0)? - lift
}

/// Maxima and, as bytes of the same shape, which cell of the window each came from (the first of equals).
pub fn max(x: &Tensor, w: &Window) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(x) {
        return card::max(device, x, w);
    }
    if !reference::has_body(x) {
        let y = reference_max(x, w)?;
        let which = Tensor::zeros(y.shape(), candle_core::DType::U8, y.device())?;
        return Ok((y, which));
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let ((h, width), c) = (w.output(), w.channels);
        let (picture, batch) = (w.height * w.width * c, x.dim(0)?);
        let mut y = cpu::fresh::<T>(batch * h * width * c);
        let mut which = vec![0u8; y.len()];
        use rayon::prelude::*;
        y.par_chunks_mut(width * c).zip(which.par_chunks_mut(width * c)).enumerate().with_min_len(8).for_each(|(line, (y, which))| {
            let values = &values[line / h * picture..][..picture];
            vectorised!(T, || {
                for (ox, (y, which)) in y.chunks_exact_mut(c).zip(which.chunks_exact_mut(c)).enumerate() {
                    let mut first = true;
                    for (i, cell) in w.cells(line % h, ox) {
                        let from = &values[cell * c..][..c];
                        if std::mem::take(&mut first) {
                            y.copy_from_slice(from);
                            which.fill(i as u8);
                            continue;
                        }
                        for ((y, which), v) in y.iter_mut().zip(which.iter_mut()).zip(from) {
                            let larger = v.up() > y.up();
                            *y = if larger { *v } else { *y };
                            *which = if larger { i as u8 } else { *which };
                        }
                    }
                }
            })
        });
        let shape = (batch, h, width, c);
        Ok((cpu::tensor(y, shape)?, cpu::tensor(which, shape)?))
    })
}

/// Gives each maximum's gradient to the cell it came from.
pub fn max_backward(which: &Tensor, dy: &Tensor, w: &Window) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(dy) {
        return card::max_backward(device, which, dy, w);
    }
    with_elem!(dy.dtype(), T => {
        let (which, d) = (cpu::view::<u8>(which)?, cpu::view::<T>(dy)?);
        let (picture, batch) = (w.height * w.width * w.channels, dy.dim(0)?);
        // Windows that lie side by side and fill the picture write each cell once.
        let once = w.stride == w.size && w.padding == 0 && w.height.is_multiple_of(w.size) && w.width.is_multiple_of(w.size);
        let mut dx = if once { cpu::fresh::<T>(batch * picture) } else { cpu::zeros::<T>(batch * picture) };
        use rayon::prelude::*;
        dx.par_chunks_mut(picture).enumerate().for_each(|(b, dx)| match once {
            true => share_out(&which, &d, w, b, dx, |_, share| share),
            false => share_out(&which, &d, w, b, dx, |there: T, share: T| T::down(there.up() + share.up())),
        });
        cpu::tensor(dx, (batch, w.height, w.width, w.channels))
    })
}

/// One picture: `put` makes a cell's new value of what is there and its share.
#[inline(always)]
fn share_out<T: Elem>(
    which: &[u8],
    d: &[T],
    w: &Window,
    picture: usize,
    dx: &mut [T],
    put: impl Fn(T, T) -> T,
) {
    let ((h, width), c) = (w.output(), w.channels);
    vectorised!(T, || {
        for (oy, ox) in (0..h * width).map(|i| (i / width, i % width)) {
            let at = ((picture * h + oy) * width + ox) * c;
            let (which, d) = (&which[at..][..c], &d[at..][..c]);
            for (i, cell) in w.cells(oy, ox) {
                let to = &mut dx[cell * c..][..c];
                for ((to, which), d) in to.iter_mut().zip(which).zip(d) {
                    *to = put(*to, if *which == i as u8 { *d } else { T::default() });
                }
            }
        }
    })
}
