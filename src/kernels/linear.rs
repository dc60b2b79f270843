//! `y = act(x W' + b)`: the matrix product with its bias and activation fused.

#[cfg(feature = "cuda")]
pub mod card;
#[cfg(feature = "cuda")]
pub mod hopper;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::activation::{apply, each_activation};
use super::clip::Clip;
use super::product::{
    By, Mat, Then, copies_nothing, multiply, multiply_rounded, multiply_then, packing, packing_rounded,
};
use super::{Activation, Elem, Reads, Real, cpu, reference};
use crate::{vectorised, with_elem};

/// How a weight lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    /// (out, in), as `torch.nn.Linear` keeps it.
    OutIn,
    /// (in, out), as GPT-2's `Conv1D` keeps it.
    InOut,
}

/// The operands of a linear map; `x` is (rows, in) however many dimensions its rows have.
pub struct Linear<'a> {
    pub weight: &'a Tensor,
    pub lies: Lies,
    pub bias: Option<&'a Tensor>,
    pub act: Activation,
}

/// Where parameter gradients are added.
pub struct Grads<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
}

/// What the gradient of a map's input meets first on its way back: the activation whose output the input is.
#[derive(Clone, Copy)]
pub struct Before<'a> {
    pub act: Activation,
    /// What it was given.
    pub v: &'a Tensor,
    /// The gradient of the bias that was added before it.
    pub bias: Option<&'a Tensor>,
}

impl Linear<'_> {
    /// (in, out)
    fn sizes(&self) -> Result<(usize, usize)> {
        let (a, b) = self.weight.dims2()?;
        Ok(if self.lies == Lies::OutIn { (b, a) } else { (a, b) })
    }

    /// `W` as the (in, out) matrix that rows are multiplied with.
    fn matrix<'a, T>(&self, w: &'a [T]) -> Result<Mat<'a, T>> {
        let (a, b) = self.weight.dims2()?;
        let w = Mat::new(w, a, b);
        Ok(if self.lies == Lies::OutIn { w.t() } else { w })
    }

    fn output_shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let mut shape = x.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.sizes()?.1;
        }
        Ok(shape)
    }

    /// The reference.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        activate(&self.before_activation(x)?, self.act)
    }

    fn before_activation(&self, x: &Tensor) -> Result<Tensor> {
        let (k, _) = self.sizes()?;
        let rows = x.elem_count() / k;
        let w = if self.lies == Lies::OutIn { self.weight.t()? } else { self.weight.clone() };
        let y = x.reshape((rows, k))?.matmul(&w)?;
        let y = match self.bias {
            Some(b) => y.broadcast_add(b)?,
            None => y,
        };
        y.reshape(self.output_shape(x)?)
    }

    /// The output, and what the activation was given where its backward pass reads that.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(x) {
            return self.forward_card(device, x, None);
        }
        if !reference::has_body(x) {
            let pre = self.before_activation(x)?;
            let y = activate(&pre, self.act)?;
            return Ok((y, (self.act.reads() == Reads::Input).then_some(pre)));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, None))
    }

    /// As `forward`, with `onto` added to the output, and `act` of the sum: within the product where neither has an
    /// activation.
    pub fn forward_onto(
        &self,
        x: &Tensor,
        onto: &Tensor,
        act: Activation,
    ) -> Result<(Tensor, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(x)
            && [self.act, act] == [Activation::Identity; 2]
        {
            return self.forward_card(device, x, Some(onto));
        }
        if reference::has_body(x) && [self.act, act] == [Activation::Identity; 2] {
            return with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, Some(onto)));
        }
        let (y, pre) = self.forward(x)?;
        Ok((super::add::into(&y, onto, act)?, pre))
    }

    /// With `onto` added to the output.
    fn forward_cpu<T: Elem>(&self, x: &Tensor, onto: Option<&Tensor>) -> Result<(Tensor, Option<Tensor>)> {
        let ((k, n), shape) = (self.sizes()?, self.output_shape(x)?);
        let (values, w) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let onto = onto.map(cpu::view::<T>).transpose()?;
        let rows = values.len() / k;
        let (x, w) = (Mat::new(&values, rows, k), self.matrix(&w)?);
        let then = Then {
            bias: bias.as_deref(),
            clip: Clip::of(self.act).unwrap_or(Clip::Nothing),
            onto: onto.as_deref(),
        };
        let mut made = cpu::fresh::<T>(rows * n);
        match (then.bias, then.clip, then.onto) {
            (None, Clip::Nothing, None) => multiply_rounded(&mut made, x, w, By::All),
            _ => multiply_then(&mut made, x, w, then),
        }
        if self.act.reads() == Reads::Input {
            let mut y = cpu::fresh::<T>(rows * n);
            cpu::for_rows(&mut y, 1, |start, y| apply(&made[start..][..y.len()], y, self.act));
            return Ok((cpu::tensor(y, shape.clone())?, Some(cpu::tensor(made, shape)?)));
        }
        if Clip::of(self.act).is_none() {
            cpu::for_rows(&mut made, n, |_, rows| finish(rows, n, None, self.act));
        }
        Ok((cpu::tensor(made, shape)?, None))
    }

    /// Adds the parameters' gradients to `grads` and returns the input's where it is wanted. `v` is
    /// what the activation [`reads`](Activation::reads); `dy` is overwritten.
    pub fn backward(
        &self,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(x) {
            return self.backward_card(device, x, v, dy, grads, want);
        }
        if !reference::has_body(x) {
            return self.backward_reference(x, dy, grads, want);
        }
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, v, dy, grads, want))
    }

    /// What `backward` does without the input, on a card: turns `dy` into the gradient before the activation, adds the
    /// bias's, and gives the input's where it is wanted, with `onto` added to it. With `again`, what the activation read
    /// becomes the output, in the pass that makes its slope. The second value tells whether the input's gradient went through
    /// what is `before` too: then that one's `v` is its output, and its bias has its gradient.
    pub fn backward_input(
        &self,
        v: Option<&Tensor>,
        dy: &Tensor,
        bias: Option<&Tensor>,
        (want, onto): (bool, Option<&Tensor>),
        (again, before): (bool, Option<Before>),
    ) -> Result<(Option<Tensor>, bool)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = super::cuda::of(dy) {
            return self.input_card(device, v, dy, bias, (want, onto), (again, before));
        }
        let _ = (v, bias, want, onto, again, before);
        candle_core::bail!("a gradient on {:?} is made at once", dy.device().location())
    }

    /// What is left of `backward` after [`backward_input`](Self::backward_input), whose `dy` this is.
    pub fn backward_weight(&self, x: &Tensor, dy: &Tensor, into: &Tensor) -> Result<()> {
        #[cfg(feature = "cuda")]
        if super::cuda::of(dy).is_some() {
            return self.weight_card(x, dy, into);
        }
        let _ = (x, into);
        candle_core::bail!("a gradient on {:?} is made at once", dy.device().location())
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let (k, n) = self.sizes()?;
        let values = cpu::view::<T>(x)?;
        let rows = values.len() / k;
        let through = |v| {
            let v = cpu::view::<T>(v)?;
            cpu::update::<T, _>(&dy, |d| through_activation(d, Some(&v), self.act, n, grads.bias.is_some()))
        };
        let sums = v.map(through).transpose()?;
        let (d, w) = (cpu::view::<T>(&dy)?, cpu::view::<T>(self.weight)?);
        let all: &[T] = &d;
        let (values, d, w) = (Mat::new(&values, rows, k), Mat::new(all, rows, n), self.matrix(&w)?);
        let weight = || {
            if let Some(bias) = grads.bias {
                let sums = sums.unwrap_or_else(|| column_sums(all, n));
                cpu::update::<T::Acc, _>(bias, |bias| add_all(bias, &sums))?;
            }
            cpu::update::<T::Acc, _>(grads.weight, |dw| match self.lies {
                Lies::OutIn => multiply(dw, k, d.t(), values, true, By::All),
                Lies::InOut => multiply(dw, n, values.t(), d, true, By::All),
            })
        };
        let input = || {
            let mut dx = cpu::fresh::<T>(rows * k);
            multiply_rounded(&mut dx, d, w.t(), By::All);
            dx
        };
        let (done, dx) = both(T::DTYPE, weight, || want.then(input));
        done?;
        dx.map(|dx| cpu::tensor(dx, x.shape())).transpose()
    }

    fn backward_reference(
        &self,
        x: &Tensor,
        dy: Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let mut inputs = vec![x, self.weight];
        inputs.extend(self.bias);
        let found = reference::gradients(&inputs, &dy, |t| {
            Linear { weight: &t[1], lies: self.lies, bias: t.get(2), act: self.act }.reference(&t[0])
        })?;
        reference::accumulate(grads.weight, &found[1])?;
        if let (Some(into), Some(g)) = (grads.bias, found.get(2)) {
            reference::accumulate(into, g)?;
        }
        Ok(want.then(|| found[0].clone()))
    }
}

/// Whether both products of `backward` run at once, so that threads rarely wait for each other between the parts of one:
/// not where they are of copies in another type, which would take twice the room.
fn at_once(dtype: DType) -> bool {
    copies_nothing(dtype)
}

/// Does both, [`at_once`] or one after the other.
pub(super) fn both<A: Send, B: Send>(
    dtype: DType,
    weight: impl FnOnce() -> A + Send,
    input: impl FnOnce() -> B + Send,
) -> (A, B) {
    if at_once(dtype) { rayon::join(weight, input) } else { (weight(), input()) }
}

/// Bytes of temporaries of the products with a weight of `k` inputs and `n` outputs, forward and backward.
pub fn workspace(dtype: DType, lies: Lies, rows: usize, k: usize, n: usize) -> (u64, u64) {
    let output = packing_rounded(dtype, (rows, k, n), false, By::All);
    let input = packing_rounded(dtype, (rows, n, k), false, By::All);
    let weight = match lies {
        Lies::OutIn => packing(dtype, (n, rows, k), true, By::All),
        Lies::InOut => packing(dtype, (k, rows, n), true, By::All),
    };
    (output, if at_once(dtype) { weight + input } else { weight.max(input) })
}

/// Ranges of rows whose column sums a card makes apart: enough blocks, of 128 columns, for a large one (six for each of
/// 132 processors), by the sizes alone.
pub fn card_ranges(rows: usize, n: usize) -> usize {
    (792 / n.div_ceil(128)).clamp(1, rows.div_ceil(32).clamp(1, 256))
}

/// Bytes of the partial sums of a bias's gradient on a card.
pub fn card_workspace(dtype: DType, rows: usize, n: usize) -> u64 {
    (card_ranges(rows, n) * n * cpu::acc_bytes(dtype)) as u64
}

/// Whether products of (rows, deep) and (deep, columns) are the body for Hopper's, by their sizes: whole tiles of columns,
/// deep enough that one is finished while the next is made, and two or more for each processor.
pub fn hopper_fits(dtype: DType, rows: usize, columns: usize, deep: usize) -> bool {
    let tiles = rows.div_ceil(128) * columns / 256;
    let whole = deep.is_multiple_of(64) && columns.is_multiple_of(256);
    dtype == DType::BF16 && whole && deep >= 6 * 64 && tiles >= 2 * 132 && rows <= i32::MAX as usize
}

/// As [`hopper_fits`], of scores: the last tile of many may be a part of one.
pub fn hopper_scores(dtype: DType, rows: usize, classes: usize, width: usize) -> bool {
    classes >= 8 * 256 && hopper_fits(dtype, rows, classes.next_multiple_of(256), width)
}

/// Bytes of the sums over 64 rows that such a product leaves.
pub fn hopper_sums(rows: usize, columns: usize) -> usize {
    rows.div_ceil(64) * columns * size_of::<f32>()
}

fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    super::activation::reference::forward(x, act)
}

/// `y = act(y + bias)` over whole rows of `n` values.
pub(super) fn finish<T: Elem>(rows: &mut [T], n: usize, bias: Option<&[T]>, act: Activation) {
    match bias {
        None if act == Activation::Identity => {}
        None => vectorised!(T, || {
            each_activation!(act, f => rows.iter_mut().for_each(|y| *y = T::down(f.value(y.up()))))
        }),
        Some(bias) => vectorised!(T, || {
            each_activation!(act, f => {
                for row in rows.chunks_exact_mut(n) {
                    row.iter_mut().zip(bias).for_each(|(y, b)| *y = T::down(f.value(y.up() + b.up())));
                }
            })
        }),
    }
}

/// Turns `dy` into the gradient before the activation, in place, and gives the column sums of the
/// result by chunks of rows (none unless asked for).
pub(super) fn through_activation<T: Elem>(
    d: &mut [T],
    v: Option<&[T]>,
    act: Activation,
    n: usize,
    sums: bool,
) -> Vec<Vec<T::Acc>> {
    let chunk = cpu::rows_per_chunk(n) * n;
    let one = |i: usize, d: &mut [T]| {
        let mut sum = vec![T::Acc::ZERO; if sums { n } else { 0 }];
        vectorised!(T, || {
            for (row, d) in d.chunks_exact_mut(n).enumerate() {
                if let Some(v) = v {
                    let v = &v[i * chunk + row * n..][..n];
                    each_activation!(act, f => d.iter_mut().zip(v).for_each(|(d, v)| *d = T::down(d.up() * f.slope(v.up()))));
                }
                sum.iter_mut().zip(d).for_each(|(s, d)| *s += d.up());
            }
        });
        sum
    };
    if v.is_none() && !sums {
        return Vec::new();
    }
    d.par_chunks_mut(chunk).enumerate().map(|(i, d)| one(i, d)).collect()
}

/// Column sums of rows of `n` values, by chunks of rows.
pub(super) fn column_sums<T: Elem>(d: &[T], n: usize) -> Vec<Vec<T::Acc>> {
    let one = |d: &[T]| {
        let mut sum = vec![T::Acc::ZERO; n];
        vectorised!(T, || {
            for row in d.chunks_exact(n) {
                sum.iter_mut().zip(row).for_each(|(s, d)| *s += d.up());
            }
        });
        sum
    };
    d.par_chunks(cpu::rows_per_chunk(n) * n).map(one).collect()
}

/// Adds partial sums in order.
pub(super) fn add_all<R: Real>(into: &mut [R], partials: &[impl AsRef<[R]> + Sync]) {
    cpu::for_rows(into, 1, |first, into| {
        for partial in partials {
            into.iter_mut().zip(&partial.as_ref()[first..]).for_each(|(a, b)| *a += *b);
        }
    });
}
