//! Two-dimensional convolution, channels last, with bias and activation fused.
//!
//! The windows of a block of output pixels are gathered into the rows of a small matrix that stays in
//! the cache and is multiplied at once; the gathered matrix is never whole in memory. Where a machine has a matrix unit
//! and there are channels enough for it, it is gathered as the unit's tiles are packed.

#[cfg(feature = "cuda")]
pub(super) mod card;
#[cfg(feature = "cuda")]
mod gathered;
#[cfg(test)]
mod tests;

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::activation::each_activation;
use super::channels::{Cut, Parts};
use super::clip::Clip;
#[cfg(feature = "cuda")]
use super::cuda;
use super::linear::{Grads, add_all, through_activation};
use super::product::{
    By, Convolution, Mat, Then, convolve, convolving, multiply, packing, round, weigh, weighing,
};
use super::windows::{Block, Geometry};
use super::{Activation, Elem, Reads, Real, activation, add, cpu, depthwise, reference, turn};
use crate::{vectorised, with_elem};

/// The operands of a convolution: `weight` is (out, height, width, in / groups).
pub struct Conv<'a> {
    pub geometry: Geometry,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub act: Activation,
}

impl Conv<'_> {
    /// The reference: one product for each cell of the window. (candle's own convolution cannot be
    /// differentiated where the stride leaves a rest.)
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        activation::reference::forward(&self.before_activation(x)?, self.act)
    }

    fn before_activation(&self, x: &Tensor) -> Result<Tensor> {
        let g = &self.geometry;
        let ((h, w), batch) = (g.output(), x.dim(0)?);
        let (cg, ng) = (g.inputs / g.groups, g.outputs / g.groups);
        let x = x.pad_with_zeros(1, g.padding, g.padding)?.pad_with_zeros(2, g.padding, g.padding)?;
        let mut groups = Vec::with_capacity(g.groups);
        for group in 0..g.groups {
            let x = x.narrow(3, group * cg, cg)?.contiguous()?;
            let weight = self.weight.narrow(0, group * ng, ng)?;
            let mut sum = None;
            for (ky, kx) in (0..g.kernel * g.kernel).map(|i| (i / g.kernel, i % g.kernel)) {
                let seen = reference::seen_by_cell(&x, (ky * g.dilation, kx * g.dilation), g.stride, (h, w))?;
                let cell = weight.narrow(1, ky, 1)?.narrow(2, kx, 1)?.contiguous()?.reshape((ng, cg))?;
                let part = seen.reshape((batch * h * w, cg))?.matmul(&cell.t()?)?;
                sum = Some(match sum {
                    Some(sum) => (sum + part)?,
                    None => part,
                });
            }
            groups.extend(sum);
        }
        let y = Tensor::cat(&groups, 1)?.reshape((batch, h, w, g.outputs))?;
        match self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// The output (batch, height, width, out), and what the activation was given where its backward
    /// pass reads that.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x) {
            return self.forward_card(device, x);
        }
        if !reference::has_body(x) {
            let pre = self.before_activation(x)?;
            let y = activation::reference::forward(&pre, self.act)?;
            return Ok((y, (self.act.reads() == Reads::Input).then_some(pre)));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x))
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        if g.is_depthwise() {
            return self.forward_depthwise::<T>(x);
        }
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (picture, ng) = (g.height * g.width * g.inputs, n / g.groups);
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let batch = values.len() / picture;
        let mut y = cpu::fresh::<T>(batch * pixels * n);
        let mut pre = if self.act.reads() == Reads::Input { cpu::fresh::<T>(y.len()) } else { Vec::new() };
        let (h, w) = g.output();
        let shape = (batch, h, w, n);
        if let Some(clip) = Clip::of(self.act).filter(|_| pre.is_empty()) {
            let then = Then { bias: bias.as_deref(), clip, onto: None };
            if convolve(&mut y, Convolution { g, pictures: &values, weight: &weight, back: false, then }) {
                return Ok((cpu::tensor(y, shape)?, None));
            }
        }
        let blocking = g.blocks(g.cells(), batch, cpu::threads());
        let room = g.gathered(T::DTYPE, blocking.rows(), g.cells()) / size_of::<T::Acc>();
        // Every block packs the weight for its product, which is slow across the rows of what it reads: it is
        // turned once.
        let weight = T::widened(&weight, By::All);
        let weight: Vec<Vec<T::Acc>> = weight.chunks_exact(ng * k).map(|w| turn::matrix(w, ng, k)).collect();
        // Straight into the output, where it is of the type that is computed in and needs no copy.
        let direct = pre.is_empty() && T::as_acc_mut(&mut y[..0]).is_some();
        let wide_bias = bias.as_deref().map(|bias| T::widened(bias, By::Me));
        let (outputs, befores) = (cpu::Blocks::new(&mut y), cpu::Blocks::new(&mut pre));
        blocking.all().into_par_iter().for_each_init(
            || (cpu::fresh::<T::Acc>(room), vec![T::Acc::ZERO; if direct { 0 } else { blocking.rows() * n }]),
            |(gathered, wide), block| {
                let (at, len) = (block.row(pixels) * n, block.rows() * n);
                // SAFETY: this block alone writes its rows.
                let (out, before) = unsafe { (outputs.get(at, len), befores.get(at, len)) };
                let mut product = |to: &mut [T::Acc]| {
                    for (group, w) in weight.iter().enumerate() {
                        let a = g.windows(&values, block, group, 0..g.cells(), gathered);
                        let a = Mat::new(a, block.rows(), k);
                        multiply::<T::Acc>(&mut to[group * ng..], n, a, Mat::new(w, k, ng), false, By::Me);
                    }
                };
                match T::as_acc_mut(out) {
                    Some(out) if direct => {
                        product(out);
                        super::linear::finish(out, n, wide_bias.as_deref(), self.act);
                    }
                    _ => {
                        product(wide);
                        finish(&wide[..len], bias.as_deref(), out, before, self.act, n);
                    }
                }
            },
        );
        let pre = if pre.is_empty() { None } else { Some(cpu::tensor(pre, shape)?) };
        Ok((cpu::tensor(y, shape)?, pre))
    }

    fn forward_depthwise<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        let ((h, w), c, picture) = (g.output(), g.outputs, g.height * g.width * g.inputs);
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let weight = depthwise::turned(&weight, c);
        let batch = values.len() / picture;
        let mut y = cpu::fresh::<T>(batch * h * w * c);
        let mut pre = if self.act.reads() == Reads::Input { cpu::fresh::<T>(y.len()) } else { Vec::new() };
        let befores = cpu::Blocks::new(&mut pre);
        y.par_chunks_mut((w * c).max(1)).enumerate().for_each_init(
            || vec![T::Acc::ZERO; w * c],
            |wide, (i, y)| {
                depthwise::line(g, &values[i / h * picture..][..picture], &weight, i % h, wide);
                // SAFETY: line i is the only one that writes these values.
                let before = unsafe { befores.get(i * w * c, w * c) };
                finish(wide, bias.as_deref(), y, before, self.act, c);
            },
        );
        let shape = (batch, h, w, c);
        let pre = if pre.is_empty() { None } else { Some(cpu::tensor(pre, shape)?) };
        Ok((cpu::tensor(y, shape)?, pre))
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
        if let Some(device) = cuda::of(x) {
            return self.backward_card(device, x, v, &dy, grads, want, None);
        }
        if !reference::has_body(x) {
            let mut inputs = vec![x, self.weight];
            inputs.extend(self.bias);
            let found = reference::gradients(&inputs, &dy, |t| {
                Conv { geometry: self.geometry, weight: &t[1], bias: t.get(2), act: self.act }
                    .reference(&t[0])
            })?;
            reference::accumulate(grads.weight, &found[1])?;
            if let (Some(into), Some(bias)) = (grads.bias, found.get(2)) {
                reference::accumulate(into, bias)?;
            }
            return Ok(want.then(|| found[0].clone()));
        }
        with_elem!(x.dtype(), T => self.backward_cpu::<T>(x, v, dy, grads, want))
    }

    /// As `backward`, with `onto` added to the input's gradient: within the product on a card where it is one.
    pub fn backward_onto(
        &self,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &Grads,
        onto: &Tensor,
    ) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::of(x)
            && self.geometry.is_product()
            && let Some(dx) = self.backward_card(device, x, v, &dy, grads, true, Some(onto))?
        {
            return Ok(dx);
        }
        match self.backward(x, v, dy, grads, true)? {
            Some(dx) => add::into(&dx, onto, Activation::Identity),
            None => Ok(onto.clone()),
        }
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let n = self.geometry.outputs;
        let v = v.map(cpu::view::<T>).transpose()?;
        let sums = cpu::update::<T, _>(&dy, |d| {
            through_activation(d, v.as_deref(), self.act, n, grads.bias.is_some())
        })?;
        if let Some(bias) = grads.bias {
            cpu::update::<T::Acc, _>(bias, |bias| add_all(bias, &sums))?;
        }
        let (values, d) = (cpu::view::<T>(x)?, cpu::view::<T>(&dy)?);
        if self.geometry.is_depthwise() {
            let partials = depthwise::weight_gradient::<T>(&self.geometry, &values, &d);
            cpu::update::<T::Acc, _>(grads.weight, |into| {
                let cells = into.len() / n;
                for partial in &partials {
                    into.iter_mut().enumerate().for_each(|(i, a)| *a += partial[i % cells * n + i / cells]);
                }
            })?;
            drop(partials);
            if !want {
                return Ok(None);
            }
            let weight = cpu::view::<T>(self.weight)?;
            let dx = depthwise::input_gradient(&self.geometry, &weight, &d);
            return Ok(Some(cpu::tensor(dx, x.shape())?));
        }
        cpu::update::<T::Acc, _>(grads.weight, |into| self.weight_gradient::<T>(&values, &d, into))?;
        if !want {
            return Ok(None);
        }
        let weight = cpu::view::<T>(self.weight)?;
        Ok(Some(cpu::tensor(self.input_gradient::<T>(&weight, &d), x.shape())?))
    }

    /// Adds the weight gradient. The images are split into one part per thread: the first part adds in place, the others
    /// to sums of their own.
    fn weight_gradient<T: Elem>(&self, values: &[T], d: &[T], into: &mut [T::Acc]) {
        let g = &self.geometry;
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (ng, cells, picture) = (n / g.groups, g.panel(), g.height * g.width * g.inputs);
        let batch = values.len() / picture;
        let parts = parts(batch, cpu::threads());
        let blocking = g.blocks(cells, batch, cpu::threads());
        let room = g.gathered(T::DTYPE, blocking.rows(), cells) / size_of::<T::Acc>();
        let add = |part: usize, sum: &mut [T::Acc]| {
            let Range { start, end } = images_of(part, parts, batch);
            let (inputs, outputs) = (picture * start..picture * end, pixels * n * start..pixels * n * end);
            if weigh(sum, g, &values[inputs], &d[outputs]) {
                return;
            }
            let mut gathered = cpu::fresh::<T::Acc>(room);
            for (group, first) in
                (0..g.groups).flat_map(|group| (0..g.cells()).step_by(cells).map(move |c| (group, c)))
            {
                let seen = first..(first + cells).min(g.cells());
                let sum = &mut sum[group * ng * k + first * g.depth()..];
                for block in blocking.of(start..end) {
                    let a = g.windows(values, block, group, seen.clone(), &mut gathered);
                    let a = Mat::new(a, block.rows(), seen.len() * g.depth());
                    let d = T::widened(&d[block.row(pixels) * n..][..block.rows() * n], By::Me);
                    let d = Mat::strided(&d[group * ng..], block.rows(), ng, n).t();
                    multiply::<T::Acc>(sum, k, d, a, true, By::Me);
                }
            }
        };
        let others = || {
            let one = |part: usize| {
                let mut sum = vec![T::Acc::ZERO; n * k];
                add(part, &mut sum);
                sum
            };
            (1..parts).into_par_iter().map(one).collect::<Vec<_>>()
        };
        let ((), partials) = rayon::join(|| add(0, into), others);
        add_all(into, &partials);
    }

    fn input_gradient<T: Elem>(&self, weight: &[T], d: &[T]) -> Vec<T> {
        let g = &self.geometry;
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (picture, ng) = (g.height * g.width * g.inputs, n / g.groups);
        let batch = d.len() / (pixels * n);
        let blocking = g.blocks(g.cells(), batch, cpu::threads());
        let mut dx = cpu::fresh::<T>(batch * picture);
        if let Some(g) = &g.back()
            && convolve(&mut dx, Convolution { g, pictures: d, weight, back: true, then: Then::NOTHING })
        {
            return dx;
        }
        let (narrow, weight) = (T::as_acc_mut(&mut dx[..0]).is_none(), T::widened(weight, By::All));
        dx.par_chunks_mut(blocking.pictures * picture).enumerate().for_each_init(
            || {
                let wide = if narrow { blocking.pictures * picture } else { 0 };
                (vec![T::Acc::ZERO; blocking.rows() * k], vec![T::Acc::ZERO; wide])
            },
            |(gathered, wide), (i, dx)| {
                let from = i * blocking.pictures;
                {
                    let sums = match T::as_acc_mut(dx) {
                        Some(dx) => dx,
                        None => wide.as_mut_slice(),
                    };
                    sums.fill(T::Acc::ZERO);
                    for block in blocking.of(from..from + blocking.pictures) {
                        let d = T::widened(&d[block.row(pixels) * n..][..block.rows() * n], By::Me);
                        for group in 0..g.groups {
                            let d = Mat::strided(&d[group * ng..], block.rows(), ng, n);
                            let w = Mat::new(&weight[group * ng * k..][..ng * k], ng, k);
                            multiply::<T::Acc>(&mut gathered[..block.rows() * k], k, d, w, false, By::Me);
                            let pictures = sums.chunks_exact_mut(picture);
                            for (rows, sums) in
                                gathered.chunks_exact(block.part * k).zip(pictures).take(block.pictures)
                            {
                                vectorised!(T, || g.scatter(rows, block.first, group, sums));
                            }
                        }
                    }
                }
                if narrow {
                    round(wide, dx, By::Me);
                }
            },
        );
        dx
    }
}

/// Parts in which threads sum the weight gradient. A smaller batch has no more of them, and so no more sums.
fn parts(batch: usize, threads: usize) -> usize {
    batch.min(threads).max(1)
}

/// The images of one of these parts; the first parts are one image larger where the batch does not divide.
fn images_of(part: usize, parts: usize, batch: usize) -> Range<usize> {
    let (each, larger) = (batch / parts, batch % parts);
    let start = part * each + part.min(larger);
    start..start + each + usize::from(part < larger)
}

/// Bytes of temporaries of the forward pass and of the backward pass.
pub fn workspace(geometry: &Geometry, bias: bool, act: Activation, at: crate::layers::At) -> (u64, u64) {
    let g = geometry;
    if at.on.is_cuda() {
        return card_workspace(g, bias, at.batch, at.dtype);
    }
    if g.is_depthwise() {
        return g.depthwise_workspace(at);
    }
    let (elem, acc) = (at.dtype.size_in_bytes(), cpu::acc_bytes(at.dtype));
    // The type that is computed in, and copies of operands in it where they are of another.
    let computed = if acc == 8 { DType::F64 } else { DType::F32 };
    let copies = |values: usize| if elem == acc { 0 } else { values * acc };
    let packed = |m, k, n, turned| packing(computed, (m, k, n), turned, By::Me) as usize;
    let blocking = g.blocks(g.cells(), at.batch, at.threads());
    let (rows, k, n, ng) = (blocking.rows(), g.window(), g.outputs, g.outputs / g.groups);
    let list =
        at.batch.div_ceil(blocking.pictures) * blocking.pixels.div_ceil(blocking.part) * size_of::<Block>();
    let direct = elem == acc && act.reads() != Reads::Input;
    let forward = match convolving(at.dtype, g, at.batch).filter(|_| Clip::of(act).is_some()) {
        Some(packed) => packed as usize,
        None => {
            let outputs = if direct { 0 } else { rows * n * acc };
            let turned = n * k * acc + g.groups * size_of::<Vec<f32>>();
            let of_thread = g.gathered(at.dtype, rows, g.cells()) + outputs + packed(rows, k, ng, false);
            at.threads() * of_thread + list + turned + copies(n * k)
        }
    };
    let cells = g.panel();
    let panel_rows = g.blocks(cells, at.batch, at.threads()).rows();
    let weighs = |batch: usize| match weighing(at.dtype, g, batch) {
        Some(packed) => packed as usize,
        None => {
            let product = copies(panel_rows * n) + packed(ng, panel_rows, cells * g.depth(), true);
            g.gathered(at.dtype, panel_rows, cells) + product
        }
    };
    let parts = parts(at.batch, at.threads());
    let weight = (0..parts).map(|part| weighs(images_of(part, parts, at.batch).len())).sum::<usize>()
        + (parts - 1) * n * k * acc;
    let input = match g.back().and_then(|back| convolving(at.dtype, &back, at.batch)) {
        Some(packed) => packed as usize,
        None => {
            let wide = copies(blocking.pictures * g.height * g.width * g.inputs);
            let product = copies(rows * n) + packed(rows, ng, k, false);
            at.threads() * (rows * k * acc + wide + product) + copies(n * k)
        }
    };
    (forward as u64, weight.max(input) as u64)
}

/// Most bytes of workspace a convolution is given on a card: what cuDNN's engines want at most for the weight gradients
/// of large filters, and little enough that windows which are gathered stay in the card's cache in part.
const ROOM: usize = 64 << 20;

/// Bytes of workspace a convolution that is no product is given on a card, whoever makes it: no more than all its
/// windows would take, than its operands have, and than [`ROOM`]; but one window in any case.
fn card_room(g: &Geometry, batch: usize, dtype: DType) -> usize {
    let acc = dtype.size_in_bytes().max(4);
    let windows = batch * g.pixels() * card_row(g) * acc;
    let pictures = batch * (g.height * g.width * g.inputs + g.pixels() * g.outputs) * dtype.size_in_bytes();
    let room = windows.min(pictures + 8 * g.outputs * card_row(g)).min(ROOM);
    room.max(card_row(g) * acc).next_multiple_of(256)
}

/// Values of a gathered window on a card, zeros at its end: a multiple of what a product loads at once.
fn card_row(g: &Geometry) -> usize {
    g.window().next_multiple_of(8)
}

/// Bytes of a weight of this type, rows as long as gathered windows.
fn card_weight(g: &Geometry, dtype: DType) -> usize {
    (g.outputs * card_row(g) * dtype.size_in_bytes()).next_multiple_of(256)
}

/// Bytes a weight takes by itself where its windows are gathered and its rows are no multiples of what is loaded at once.
fn card_filter(g: &Geometry, dtype: DType) -> usize {
    if card_row(g) == g.window() { 0 } else { card_weight(g, dtype) }
}

/// Bytes a weight's gradient takes by itself before it is added.
fn card_gradient(g: &Geometry, dtype: DType) -> usize {
    card_weight(g, if dtype == DType::F64 { DType::F64 } else { DType::F32 })
}

fn card_workspace(g: &Geometry, bias: bool, batch: usize, dtype: DType) -> (u64, u64) {
    let rows = batch * g.pixels();
    let cut = Cut { channels: g.outputs, rows, unit: rows };
    let sums = match bias {
        true => Parts::new(dtype, &cut).parts * g.outputs * dtype.size_in_bytes().max(4),
        false => 0,
    };
    let (forward, backward) = match (g.is_depthwise(), g.is_product()) {
        (true, _) => (0, depthwise::card_workspace(g, batch, dtype)),
        (_, true) => (0, 0),
        _ => {
            let room = card_room(g, batch, dtype);
            (room + card_filter(g, dtype), room + card_gradient(g, dtype))
        }
    };
    (forward as u64, backward.max(sums) as u64)
}

/// `y = act(wide + bias)`, keeping what the activation was given where `before` has room for it.
fn finish<T: Elem>(
    wide: &[T::Acc],
    bias: Option<&[T]>,
    y: &mut [T],
    before: &mut [T],
    act: Activation,
    n: usize,
) {
    vectorised!(T, || {
        each_activation!(act, f => {
            for (i, (wide, y)) in wide.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate() {
                match bias {
                    Some(bias) => y.iter_mut().zip(wide).zip(bias).for_each(|((y, w), b)| *y = T::down(f.value(*w + b.up()))),
                    None => y.iter_mut().zip(wide).for_each(|(y, w)| *y = T::down(f.value(*w))),
                }
                if let Some(before) = before.get_mut(i * n..(i + 1) * n) {
                    match bias {
                        Some(bias) => before.iter_mut().zip(wide).zip(bias).for_each(|((p, w), b)| *p = T::down(*w + b.up())),
                        None => before.iter_mut().zip(wide).for_each(|(p, w)| *p = T::down(*w)),
                    }
                }
            }
        })
    })
}
