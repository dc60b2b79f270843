//! Adafactor (Shazeer and Stern, 2018): the second moment of a matrix kept as a mean a row and a mean a
//! column. Steps are in proportion to the size of the weights. As `torch.optim.Adafactor` has it, but
//! that a filter is the matrix (outputs, all else) and not many small ones.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::linear::card_workspace;
use super::update::{CHUNK, Common, clear, follow};
use super::{Elem, Real, cpu, reference};
use crate::params::Flat;
use crate::{vectorised, with_elem};

#[derive(Clone, Copy, Debug)]
pub struct Adafactor {
    /// The second moment forgets at the rate `step^decay`; negative.
    pub decay: f64,
    /// A step is at least so large in proportion to the root mean square of the weights.
    pub eps: f64,
    /// Root mean square at which a step is cut.
    pub clip: f64,
    /// Updates made, this one included.
    pub step: u64,
}

/// The smallest second moment, as `torch.finfo(torch.float32).eps`.
const TINY: f64 = 1.192_092_895_507_812_5e-7;

/// A parameter in the flat buffer and its state in the state's. A vector has one column and its state is
/// its second moment; a matrix's is a number a row, then a number a column.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: usize,
    rows: usize,
    cols: usize,
    state: usize,
}

impl Part {
    fn len(&self) -> usize {
        self.rows * self.cols
    }

    fn is_matrix(&self) -> bool {
        self.cols > 1
    }

    fn state_len(&self) -> usize {
        if self.is_matrix() { self.rows + self.cols } else { self.rows }
    }

    /// Rows of a chunk that a thread takes at once.
    fn chunk(&self) -> usize {
        (CHUNK / self.cols).max(1)
    }
}

fn parts(params: &Flat) -> Vec<Part> {
    let mut state = 0;
    let part = |(spec, range): (&crate::params::Spec, std::ops::Range<usize>)| {
        let rows = if spec.shape.len() < 2 { range.len() } else { spec.shape[0] };
        let part = Part { start: range.start, rows, cols: range.len() / rows.max(1), state };
        state += part.state_len();
        part
    };
    params.iter().map(part).collect()
}

/// Values of its state, of the master's type.
pub fn state_len(params: &Flat) -> usize {
    parts(params).iter().map(Part::state_len).sum()
}

/// Values of the largest workspace an update needs: the sums of columns by chunks of rows.
pub fn workspace_len(params: &Flat) -> usize {
    parts(params).iter().map(|p| p.rows.div_ceil(p.chunk()) * p.cols).max().unwrap_or(0)
}

/// Blocks of a card that sum over a parameter.
const CARD_BLOCKS: usize = 528;

/// Bytes of the sums of columns on a card.
fn card_columns(params: &Flat, dtype: DType) -> u64 {
    parts(params).iter().map(|p| card_workspace(dtype, p.rows, p.cols)).max().unwrap_or(0)
}

/// Bytes of the sums of blocks on a card, and of the three numbers that are found.
const CARD_SUMS: u64 = (CARD_BLOCKS as u64 + 3) * size_of::<f64>() as u64;

/// Bytes an update takes on a card, with weights of this type.
pub fn card_bytes(params: &Flat, dtype: DType) -> u64 {
    card_columns(params, dtype) + CARD_SUMS
}

impl Adafactor {
    /// Decoupled weight decay, then the step, parameter by parameter; clears the gradients. `state` is
    /// flat, [`state_len`] long, zeros at first.
    pub fn apply(
        &self,
        c: &Common,
        params: &Flat,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
        copy: Option<&Tensor>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(weights) {
            self.card(device, c, params, (weights, grads, state))?;
            return follow(weights, copy);
        }
        match reference::has_body(weights) {
            false => self.reference(c, params, weights, grads, state)?,
            true => with_elem!(weights.dtype(), T => self.cpu::<T>(c, params, weights, grads, state)?),
        }
        follow(weights, copy)
    }

    fn cpu<T: Elem>(
        &self,
        c: &Common,
        params: &Flat,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
    ) -> Result<()> {
        cpu::update::<T, _>(weights, |w| {
            cpu::update::<T, _>(grads, |g| {
                cpu::update::<T, _>(state, |s| {
                    for part in parts(params) {
                        let range = part.start..part.start + part.len();
                        let state = &mut s[part.state..][..part.state_len()];
                        self.part(c, &part, &mut w[range.clone()], &mut g[range], state);
                    }
                })
            })
        })???;
        Ok(())
    }

    fn part<T: Elem>(&self, c: &Common, p: &Part, w: &mut [T], g: &mut [T], state: &mut [T]) {
        let new = (self.step as f64).powf(self.decay);
        let size = (p.chunk() * p.cols).max(1);
        let squares = |values: &[T]| -> f64 {
            let sum = |v: &[T]| vectorised!(T, || v.iter().map(|v| v.up() * v.up()).sum::<T::Acc>().wide());
            values.par_chunks(size).map(sum).collect::<Vec<f64>>().into_iter().sum()
        };
        let keep = if p.start < c.decayed { 1.0 - c.lr * c.weight_decay } else { 1.0 };
        let rms = (squares(w) / p.len() as f64).sqrt();
        self.remember(c, p, g, state, new);

        // What divides the gradient: a factor a row and one a column, or the moment itself.
        let (rows, columns) = state.split_at(p.rows);
        let mean = rows.iter().map(|r| r.up().wide()).sum::<f64>() / p.rows as f64;
        let over = 1.0 / mean.max(TINY);
        let root = |row: T, column: T::Acc| {
            let v = row.up() * column;
            let least = T::Acc::of(TINY * TINY);
            T::Acc::ONE / v.larger(least).sqrt()
        };
        let column = |j: usize| columns.get(j).map_or(T::Acc::ONE, |v| T::Acc::of(v.up().wide() * over));
        let columns: Vec<T::Acc> = (0..p.cols).map(column).collect();
        let gs = T::Acc::of(c.grad_scale);
        let sum_of = |(g, rows): (&[T], &[T])| {
            vectorised!(T, || {
                let mut sum = T::Acc::ZERO;
                for (g, row) in g.chunks_exact(p.cols).zip(rows) {
                    for (g, column) in g.iter().zip(&columns) {
                        let u = g.up() * gs * root(*row, *column);
                        sum += u * u;
                    }
                }
                sum.wide()
            })
        };
        let sums: Vec<f64> = g.par_chunks(size).zip(rows.par_chunks(p.chunk())).map(sum_of).collect();
        let length = (sums.iter().sum::<f64>() / p.len() as f64).sqrt();
        let rate = c.lr.min(1.0 / (self.step as f64).sqrt());
        let go = T::Acc::of(rate * rms.max(self.eps) / (length / self.clip).max(1.0));
        let keep = T::Acc::of(keep);
        let chunks = w.par_chunks_mut(size).zip(g.par_chunks_mut(size)).zip(rows.par_chunks(p.chunk()));
        chunks.for_each(|((w, g), rows)| {
            vectorised!(T, || {
                for ((w, g), row) in w.chunks_exact_mut(p.cols).zip(g.chunks_exact_mut(p.cols)).zip(rows) {
                    for ((w, g), column) in w.iter_mut().zip(g).zip(&columns) {
                        let u = g.up() * gs * root(*row, *column);
                        *w = T::down(w.up() * keep - go * u);
                        *g = T::default();
                    }
                }
            })
        });
    }

    /// Moves the second moment towards that of the gradient by the share `new`.
    fn remember<T: Elem>(&self, c: &Common, p: &Part, g: &[T], state: &mut [T], new: f64) {
        let gs = T::Acc::of(c.grad_scale);
        let mix = |s: &mut T, found: f64| *s = T::down(T::Acc::of((1.0 - new) * s.up().wide() + new * found));
        let (rows, columns) = state.split_at_mut(p.rows);
        let size = (p.chunk() * p.cols).max(1);
        let one = |(g, rows): (&[T], &mut [T])| {
            let mut sums = vec![T::Acc::ZERO; columns.len()];
            vectorised!(T, || {
                for (g, row) in g.chunks_exact(p.cols).zip(rows) {
                    let squares = |g: &T| (g.up() * gs) * (g.up() * gs);
                    sums.iter_mut().zip(g).for_each(|(s, g)| *s += squares(g));
                    let sum = g.iter().map(squares).sum::<T::Acc>();
                    mix(row, sum.wide() / p.cols as f64);
                }
            });
            sums
        };
        let sums: Vec<Vec<T::Acc>> =
            g.par_chunks(size).zip(rows.par_chunks_mut(p.chunk())).map(one).collect();
        for (j, column) in columns.iter_mut().enumerate() {
            mix(column, sums.iter().map(|s| s[j].wide()).sum::<f64>() / p.rows as f64);
        }
    }

    fn reference(
        &self,
        c: &Common,
        params: &Flat,
        weights: &Tensor,
        grads: &Tensor,
        state: &Tensor,
    ) -> Result<()> {
        let new = (self.step as f64).powf(self.decay);
        let mix = |old: &Tensor, found: &Tensor| (old * (1.0 - new))? + (found * new)?;
        let rms = |t: &Tensor| t.to_dtype(DType::F64)?.sqr()?.mean_all()?.to_scalar::<f64>().map(f64::sqrt);
        for p in parts(params) {
            let w = weights.narrow(0, p.start, p.len())?.reshape((p.rows, p.cols))?;
            let g = (grads.narrow(0, p.start, p.len())?.reshape((p.rows, p.cols))? * c.grad_scale)?;
            let size = rms(&w)?;
            let w = if p.start < c.decayed { (w * (1.0 - c.lr * c.weight_decay))? } else { w };
            let rows = mix(&state.narrow(0, p.state, p.rows)?, &g.sqr()?.mean(1)?)?;
            state.slice_set(&rows, 0, p.state)?;
            let mut v = rows.reshape((p.rows, 1))?;
            if p.is_matrix() {
                let columns = mix(&state.narrow(0, p.state + p.rows, p.cols)?, &g.sqr()?.mean(0)?)?;
                state.slice_set(&columns, 0, p.state + p.rows)?;
                let mean = rows.to_dtype(DType::F64)?.mean_all()?.to_scalar::<f64>()?;
                v = v.broadcast_mul(&(columns.reshape((1, p.cols))? / mean.max(TINY))?)?;
            }
            let u = (g / v.maximum(TINY * TINY)?.sqrt()?)?;
            let rate = c.lr.min(1.0 / (self.step as f64).sqrt());
            let go = rate * size.max(self.eps) / (rms(&u)? / self.clip).max(1.0);
            weights.slice_set(&(w - (u * go)?)?.flatten_all()?, 0, p.start)?;
        }
        clear(grads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::check::{device, distance, flat, random};
    use crate::params::{Declared, Init, Store};

    fn store(dtype: DType, shapes: &[(&str, &[usize])]) -> Store {
        let mut declared = Declared::default();
        for (name, shape) in shapes {
            declared.param(*name, shape.to_vec(), Init::Normal(0.5));
        }
        Store::new(declared.layout().unwrap(), 3, dtype, &device()).unwrap()
    }

    /// ```python
    /// import torch, math
    /// w = torch.nn.Parameter(torch.tensor([[.1, -.2, .3], [-.4, .5, -.6]]))
    /// b = torch.nn.Parameter(torch.tensor([.7, -.8]))
    /// opt = torch.optim.Adafactor([{"params": [w]}, {"params": [b], "weight_decay": 0.}], lr=.05, weight_decay=.1)
    /// for s in range(1, 11):
    ///     g = torch.tensor([math.sin(3 * i + s) for i in range(8)])
    ///     w.grad, b.grad = g[:6].reshape(2, 3), g[6:]
    ///     opt.step()
    /// print([round(x, 6) for x in w.flatten().tolist() + b.tolist()])
    /// ```
    #[test]
    fn ten_updates_equal_pytorchs() {
        for dtype in [DType::F32, DType::F64] {
            let store = store(dtype, &[("w", &[2, 3]), ("x", &[2])]);
            let set = |t: &Tensor, v: Vec<f64>| {
                super::super::update::round_into(&Tensor::new(v, &device()).unwrap(), t).unwrap()
            };
            set(&store.master, vec![0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8]);
            let params = &store.layout.params;
            assert_eq!(state_len(params), 2 + 3 + 2);
            let state = Tensor::zeros(state_len(params), store.master.dtype(), &device()).unwrap();
            let c = Common {
                lr: 0.05,
                grad_scale: 0.5,
                judged: None,
                weight_decay: 0.1,
                decayed: params.decayed,
            };
            for step in 1..=10u64 {
                set(&store.grads, (0..8).map(|i| 2.0 * ((3 * i + step) as f64).sin()).collect());
                let rule = Adafactor { decay: -0.8, eps: 1e-3, clip: 1.0, step };
                rule.apply(&c, params, &store.master, &store.grads, &state, None).unwrap();
            }
            let far = distance(&flat(&store.master), &PYTORCH);
            assert!(far < 2e-6, "{far}: {:?}", flat(&store.master));
        }
    }

    const PYTORCH: [f64; 8] =
        [0.066259, -0.154738, 0.243122, -0.332139, 0.424783, -0.518772, 0.583409, -0.677011];

    #[test]
    fn the_body_follows_the_reference() {
        let shapes: &[(&str, &[usize])] = &[("a", &[300, 170]), ("b", &[7, 3, 3, 5]), ("c", &[40_000])];
        let (ours, plain) = (store(DType::F32, shapes), store(DType::F64, shapes));
        let params = &ours.layout.params;
        let zeros = |dtype| Tensor::zeros(state_len(params), dtype, &device()).unwrap();
        let (s, t) = (zeros(DType::F32), zeros(DType::F64));
        let c =
            Common { lr: 0.05, grad_scale: 0.5, judged: None, weight_decay: 0.1, decayed: params.decayed };
        for step in 1..=4 {
            let g = random(&[params.len], 90 + step);
            super::super::update::round_into(&g, &ours.grads).unwrap();
            super::super::update::round_into(&g, &plain.grads).unwrap();
            let rule = Adafactor { decay: -0.8, eps: 1e-3, clip: 1.0, step };
            rule.apply(&c, params, &ours.master, &ours.grads, &s, None).unwrap();
            rule.reference(&c, params, &plain.master, &plain.grads, &t).unwrap();
        }
        assert!(distance(&flat(&ours.master), &flat(&plain.master)) < 1e-5);
        assert!(flat(&ours.grads).iter().all(|g| *g == 0.0), "gradients are cleared");
    }
}
