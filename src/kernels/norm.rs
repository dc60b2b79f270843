//! Normalisation of each row to one mean square: layer norm (centred) and RMS norm.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::{Grads, add_all};
use super::{Activation, Elem, Real, add, cpu, lanes, reference};
use crate::{vectorised, with_elem};

/// `y = w (x - mean) / sqrt(mean((x - mean)^2) + eps) + b` over the last dimension.
pub struct Norm<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    /// Layer norm; without it the mean counts as 0, which is RMS norm.
    pub centred: bool,
    pub eps: f64,
}

/// What a backward pass does beside the gradients, without another pass over them.
#[derive(Clone, Copy, Default)]
pub struct Also<'a> {
    /// Is added to the input's gradient.
    pub onto: Option<&'a Tensor>,
    /// The sums over all rows of the input's gradient are added to it. On a card alone.
    pub sums: Option<&'a Tensor>,
    /// The gradient that is given becomes the output, bit for bit. On a card alone.
    pub again: bool,
}

/// Rows whose parameter gradients are summed before they are added to those of others.
pub fn chunk_rows(width: usize) -> usize {
    cpu::rows_per_chunk(width).max(32)
}

/// Ranges of rows whose parameter gradients a card sums apart: as many blocks as the 132 processors of a large one have in
/// hand at once, of four warps where a warp has whole rows, of a thread for each 16 bytes of a row otherwise.
pub fn card_parts(dtype: DType, rows: usize, width: usize) -> usize {
    let bytes = width * dtype.size_in_bytes();
    let threads = bytes.div_ceil(16).next_multiple_of(32);
    let blocks = match bytes {
        ..=768 => 4,
        769..=1536 => 2,
        _ => (512 / threads).clamp(4, 8),
    };
    rows.div_ceil(8).clamp(1, 132 * blocks)
}

/// Bytes of these sums, of as many `vectors` as there are parameters, and of those of the input's gradient.
pub fn card_workspace(dtype: DType, rows: usize, width: usize, vectors: usize) -> u64 {
    (card_parts(dtype, rows, width) * (vectors + 1) * width * cpu::acc_bytes(dtype)) as u64
}

impl Norm<'_> {
    /// The reference.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let n = self.weight.elem_count() as f64;
        let last = x.rank() - 1;
        let x = match self.centred {
            true => x.broadcast_sub(&(x.sum_keepdim(last)? / n)?)?,
            false => x.clone(),
        };
        let root = ((x.sqr()?.sum_keepdim(last)? / n)? + self.eps)?.sqrt()?;
        let y = x.broadcast_div(&root)?.broadcast_mul(self.weight)?;
        match self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Values kept of each row: one over its root mean square, and its mean before that where centred.
    fn kept(&self) -> usize {
        1 + self.centred as usize
    }

    /// The output and what is kept of each row.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.forward_card(device, x);
        }
        with_elem!(x.dtype(), T => {
            let shape = (x.elem_count() / self.weight.elem_count(), self.kept());
            if !reference::has_body(x) {
                let stats = Tensor::zeros(shape, <<T as Elem>::Acc as candle_core::WithDType>::DTYPE, x.device())?;
                return Ok((self.reference(x)?, stats));
            }
            let (y, stats) = self.forward_cpu::<T>(x)?;
            Ok((cpu::tensor(y, x.shape())?, cpu::tensor(stats, shape)?))
        })
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Vec<T>, Vec<T::Acc>)> {
        let (x, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let (n, kept) = (weight.len(), self.kept());
        let (share, eps) = (T::Acc::of(1.0 / n as f64), T::Acc::of(self.eps));
        let mut y = cpu::fresh::<T>(x.len());
        let mut stats = vec![T::Acc::ZERO; x.len() / n * kept];
        let rows = cpu::rows_per_chunk(n);
        let chunks = x.par_chunks(rows * n).zip(y.par_chunks_mut(rows * n));
        chunks.zip(stats.par_chunks_mut(rows * kept)).for_each(|((x, y), stats)| {
            vectorised!(T, || {
                for ((x, y), stats) in
                    x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(stats.chunks_exact_mut(kept))
                {
                    let mean = if self.centred { lanes::sum([x], |[x]| x) * share } else { T::Acc::ZERO };
                    let square = lanes::sum([x], |[x]| (x - mean) * (x - mean)) * share;
                    let scale = T::Acc::ONE / (square + eps).sqrt();
                    (stats[0], stats[kept - 1]) = (mean, scale);
                    match &bias {
                        Some(bias) => {
                            y.iter_mut().zip(x).zip(&*weight).zip(&**bias).for_each(|(((y, x), w), b)| {
                                *y = T::down((x.up() - mean) * scale * w.up() + b.up())
                            })
                        }
                        None => y
                            .iter_mut()
                            .zip(x)
                            .zip(&*weight)
                            .for_each(|((y, x), w)| *y = T::down((x.up() - mean) * scale * w.up())),
                    }
                }
            })
        });
        Ok((y, stats))
    }

    /// The output once more, bit for bit, where a card made it: there a pass over the input costs less than the
    /// room for the output.
    pub fn again(&self, _x: &Tensor, _stats: &Tensor) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(_x) {
            return self.output_card(device, _x, _stats, true).map(Some);
        }
        Ok(None)
    }

    /// Adds the parameters' gradients to `grads` and returns the input's where it is wanted; `stats` is
    /// what `forward` kept.
    pub fn backward(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
        also: Also,
    ) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.backward_card(device, (x, stats, dy), grads, want, also);
        }
        if also.again || also.sums.is_some() {
            candle_core::bail!("only a card makes more than gradients in a pass")
        }
        if !reference::has_body(x) {
            let mut inputs = vec![x, self.weight];
            inputs.extend(self.bias);
            let found = reference::gradients(&inputs, dy, |t| {
                Norm { weight: &t[1], bias: t.get(2), ..*self }.reference(&t[0])
            })?;
            reference::accumulate(grads.weight, &found[1])?;
            if let (Some(into), Some(bias)) = (grads.bias, found.get(2)) {
                reference::accumulate(into, bias)?;
            }
            let dx = want.then(|| found[0].clone());
            return match (dx, also.onto) {
                (Some(dx), Some(onto)) => add::into(&dx, onto, Activation::Identity).map(Some),
                (dx, _) => Ok(dx),
            };
        }
        with_elem!(x.dtype(), T => {
            let dx = self.backward_cpu::<T>(x, stats, dy, grads, want, also.onto)?;
            want.then(|| cpu::tensor(dx, x.shape())).transpose()
        })
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
        onto: Option<&Tensor>,
    ) -> Result<Vec<T>> {
        let onto = onto.map(cpu::view::<T>).transpose()?;
        let (x, dy, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(dy)?, cpu::view::<T>(self.weight)?);
        let stats = cpu::view::<T::Acc>(stats)?;
        let (n, kept) = (weight.len(), self.kept());
        let mut dx = cpu::fresh::<T>(if want { x.len() } else { 0 });
        let (all, rows) = (cpu::Blocks::new(&mut dx), chunk_rows(n));
        let chunks = x.par_chunks(rows * n).zip(dy.par_chunks(rows * n)).zip(stats.par_chunks(rows * kept));
        let (weights, biases): (Vec<_>, Vec<_>) = chunks
            .enumerate()
            .map(|(i, ((x, dy), stats))| {
                // SAFETY: chunk i is the only one that writes these rows.
                let dx = unsafe { all.get(i * rows * n, x.len()) };
                let mut dw = vec![T::Acc::ZERO; n];
                let mut db = vec![T::Acc::ZERO; if self.bias.is_some() { n } else { 0 }];
                vectorised!(T, || {
                    let row = x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(stats.chunks_exact(kept));
                    for (r, ((x, dy), stats)) in row.enumerate() {
                        let mean = if self.centred { stats[0] } else { T::Acc::ZERO };
                        let scale = stats[kept - 1];
                        if want {
                            let dx = &mut dx[r * n..][..n];
                            self.row_gradient::<T>(x, dy, &weight, mean, scale, dx);
                            if let Some(onto) = &onto {
                                let onto = &onto[(i * rows + r) * n..][..n];
                                dx.iter_mut().zip(onto).for_each(|(dx, o)| *dx = T::down(dx.up() + o.up()));
                            }
                        }
                        dw.iter_mut()
                            .zip(x)
                            .zip(dy)
                            .for_each(|((dw, x), dy)| *dw += dy.up() * (x.up() - mean) * scale);
                        db.iter_mut().zip(dy).for_each(|(db, dy)| *db += dy.up());
                    }
                });
                (dw, db)
            })
            .unzip();
        cpu::update::<T::Acc, _>(grads.weight, |into| add_all(into, &weights))?;
        if let Some(into) = grads.bias {
            cpu::update::<T::Acc, _>(into, |into| add_all(into, &biases))?;
        }
        Ok(dx)
    }

    #[inline(always)]
    fn row_gradient<T: Elem>(&self, x: &[T], dy: &[T], w: &[T], mean: T::Acc, scale: T::Acc, dx: &mut [T]) {
        let share = T::Acc::of(1.0 / x.len() as f64);
        let along = lanes::sum([x, dy, w], |[x, dy, w]| dy * w * (x - mean)) * scale * scale * share;
        let level = match self.centred {
            true => lanes::sum([dy, w], |[dy, w]| dy * w) * share,
            false => T::Acc::ZERO,
        };
        for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(w) {
            *dx = T::down(scale * (dy.up() * w.up() - level - (x.up() - mean) * along));
        }
    }
}
