//! Two-dimensional convolution, channels last, with bias and activation fused.
//!
//! The windows of a block of output pixels are gathered into the rows of a small matrix that stays in
//! the cache and is multiplied at once; the gathered matrix is never whole in memory.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::activation::each_activation;
use super::linear::{Grads, add_all, through_activation};
use super::product::{By, Mat, multiply, packing};
use super::{Activation, Elem, Reads, Real, activation, cpu, depthwise, reference, turn};
use crate::{vectorised, with_elem};

/// Gathered values a block holds where windows are small: half a megabyte of f32, which leaves room in the
/// second-level cache.
const BLOCK: usize = 128 * 1024;

/// Rows a block has at least: each block packs the whole weight for its product, which fewer would not pay.
const ROWS: usize = 256;

/// Values of a weight's gradient that are summed at once: a megabyte of f32, which the second-level cache keeps
/// while block after block is added to it.
const PANEL: usize = 256 * 1024;

/// The sizes of a convolution; the same along height and width where one number is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub height: usize,
    pub width: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
    /// Inputs and outputs are cut into so many groups that do not see each other.
    pub groups: usize,
}

impl Geometry {
    fn along(&self, size: usize) -> usize {
        let reach = self.dilation * (self.kernel - 1) + 1;
        (size + 2 * self.padding).checked_sub(reach).map_or(0, |room| room / self.stride + 1)
    }

    /// (height, width) of the output; 0 where the window does not fit in the picture.
    pub fn output(&self) -> (usize, usize) {
        (self.along(self.height), self.along(self.width))
    }

    /// Values a window has in one group.
    fn window(&self) -> usize {
        self.cells() * self.depth()
    }

    /// Cells of a window.
    fn cells(&self) -> usize {
        self.kernel * self.kernel
    }

    /// Values a window has in one group in each cell.
    fn depth(&self) -> usize {
        self.inputs / self.groups
    }

    /// Cells whose weight gradients are summed at once, in runs as even as they can be.
    fn panel(&self) -> usize {
        let most = PANEL / (self.outputs / self.groups * self.depth());
        let runs = self.cells().div_ceil(most.max(1));
        self.cells().div_ceil(runs)
    }

    /// What is gathered at once where `cells` of a window are.
    fn blocks(&self, cells: usize, batch: usize, threads: usize) -> Blocking {
        let (wanted, pixels) = ((BLOCK / (cells * self.depth())).max(ROWS), self.pixels().max(1));
        let each = batch.div_ceil(threads).max(1);
        Blocking { batch, pixels, pictures: (wanted / pixels).clamp(1, each), part: wanted.min(pixels) }
    }

    fn pixels(&self) -> usize {
        let (h, w) = self.output();
        h * w
    }

    pub fn flops(&self, batch: usize) -> u64 {
        2 * (batch * self.pixels() * self.outputs * self.window()) as u64
    }

    /// A window of one pixel that moves by one: the picture is already the gathered matrix.
    fn is_product(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0 && self.groups == 1
    }

    /// Some cells of the windows of a block, group `g`, as rows: gathered into `room`, or where they lie already.
    fn windows<'a, T: Elem>(
        &self,
        values: &'a [T],
        block: Block,
        g: usize,
        cells: Range<usize>,
        room: &'a mut [T],
    ) -> &'a [T] {
        let (picture, k) = (self.height * self.width * self.inputs, cells.len() * self.depth());
        if self.is_product() {
            return &values[block.row(self.pixels()) * k..][..block.rows() * k];
        }
        let pictures = values[block.picture * picture..].chunks_exact(picture);
        let room = &mut room[..block.rows() * k];
        for (rows, picture) in room.chunks_exact_mut(block.part * k).zip(pictures) {
            self.gather(picture, block.first, g, &cells, rows);
        }
        room
    }

    /// Gathers these cells of the windows of output pixels `first..` of one picture, group `g`, into rows.
    fn gather<T: Elem>(&self, picture: &[T], first: usize, g: usize, cells: &Range<usize>, rows: &mut [T]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.depth(), self.kernel);
        for (i, mut row) in rows.chunks_exact_mut(cells.len() * cg).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for ky in cells.start / k..cells.end.div_ceil(k) {
                let (from, to) = (cells.start.max(ky * k) - ky * k, cells.end.min((ky + 1) * k) - ky * k);
                let (line, rest) = row.split_at_mut((to - from) * cg);
                row = rest;
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    line.fill(T::default());
                    continue;
                }
                let start = y as usize * self.width;
                let (left, right) = (x0 + from as isize, x0 + to as isize);
                if self.dilation == 1 && self.groups == 1 && left >= 0 && right <= self.width as isize {
                    copy(&picture[(start + left as usize) * c..][..line.len()], line);
                    continue;
                }
                for (kx, cell) in (from..to).zip(line.chunks_exact_mut(cg)) {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x < 0 || x >= self.width as isize {
                        cell.fill(T::default());
                    } else {
                        copy(&picture[(start + x as usize) * c + g * cg..][..cg], cell);
                    }
                }
            }
        }
    }

    /// The reverse of [`Geometry::gather`]: adds the rows back to where they came from.
    #[inline(always)]
    fn scatter<R: Real>(&self, rows: &[R], first: usize, g: usize, picture: &mut [R]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.depth(), self.kernel);
        for (i, row) in rows.chunks_exact(self.window()).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for (ky, line) in row.chunks_exact(k * cg).enumerate() {
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    continue;
                }
                let start = y as usize * self.width;
                if self.dilation == 1 && self.groups == 1 && x0 >= 0 && x0 as usize + k <= self.width {
                    let to = &mut picture[(start + x0 as usize) * c..][..k * c];
                    to.iter_mut().zip(line).for_each(|(a, b)| *a += *b);
                    continue;
                }
                for (kx, cell) in line.chunks_exact(cg).enumerate() {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x >= 0 && x < self.width as isize {
                        let to = &mut picture[(start + x as usize) * c + g * cg..][..cg];
                        to.iter_mut().zip(cell).for_each(|(a, b)| *a += *b);
                    }
                }
            }
        }
    }
}

/// A copy that is not worth a call where there are a few values only, as in a picture of one channel.
#[inline(always)]
fn copy<T: Elem>(from: &[T], to: &mut [T]) {
    match from.len() {
        0..=16 => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
        _ => to.copy_from_slice(from),
    }
}

/// How the output pixels of a batch are cut into blocks: several whole pictures, or a part of one.
#[derive(Clone, Copy)]
struct Blocking {
    batch: usize,
    /// Output pixels of a picture.
    pixels: usize,
    /// Pictures of a block, and pixels of each.
    pictures: usize,
    part: usize,
}

/// A block: the pixels `first..first + part` of the pictures from `picture`.
#[derive(Clone, Copy)]
struct Block {
    picture: usize,
    pictures: usize,
    first: usize,
    part: usize,
}

impl Blocking {
    /// Rows a block has at most.
    fn rows(&self) -> usize {
        self.pictures * self.part
    }

    /// The blocks of the pictures of a range, in order.
    fn of(self, pictures: std::ops::Range<usize>) -> impl Iterator<Item = Block> {
        let until = pictures.end.min(self.batch);
        pictures.step_by(self.pictures).flat_map(move |picture| {
            let pictures = self.pictures.min(until - picture);
            (0..self.pixels).step_by(self.part).map(move |first| Block {
                picture,
                pictures,
                first,
                part: self.part.min(self.pixels - first),
            })
        })
    }

    fn all(self) -> Vec<Block> {
        self.of(0..self.batch).collect()
    }
}

impl Block {
    fn rows(&self) -> usize {
        self.pictures * self.part
    }

    /// The row of the whole batch that is the block's first. Its rows follow each other, because a block of
    /// several pictures has all their pixels.
    fn row(&self, pixels: usize) -> usize {
        self.picture * pixels + self.first
    }
}

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
        let blocking = g.blocks(g.cells(), batch, cpu::threads());
        let room = if g.is_product() { 0 } else { blocking.rows() * k };
        // Every block packs the weight for its product, which is slow across the rows of what it reads: it is
        // turned once.
        let weight: Vec<Vec<T>> = weight.chunks_exact(ng * k).map(|w| turn::matrix(w, ng, k)).collect();
        // Straight into the output, where it is of the type that is computed in and needs no copy.
        let direct = pre.is_empty() && T::as_acc_mut(&mut y[..0]).is_some();
        let wide_bias = bias.as_deref().map(T::widened);
        let (outputs, befores) = (Blocks::new(&mut y), Blocks::new(&mut pre));
        blocking.all().into_par_iter().for_each_init(
            || (cpu::fresh::<T>(room), vec![T::Acc::ZERO; if direct { 0 } else { blocking.rows() * n }]),
            |(gathered, wide), block| {
                let (at, len) = (block.row(pixels) * n, block.rows() * n);
                // SAFETY: this block alone writes its rows.
                let (out, before) = unsafe { (outputs.get(at, len), befores.get(at, len)) };
                let mut product = |to: &mut [T::Acc]| {
                    for (group, w) in weight.iter().enumerate() {
                        let a = g.windows(&values, block, group, 0..g.cells(), gathered);
                        let a = Mat::new(a, block.rows(), k);
                        multiply(&mut to[group * ng..], n, a, Mat::new(w, k, ng), false, By::Me);
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
        let (h, w) = g.output();
        let shape = (batch, h, w, n);
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
        let befores = Blocks::new(&mut pre);
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

    /// Adds the weight's gradient: the pictures are cut into as many runs as there are threads, of which the
    /// first adds in place and the others to sums of their own.
    fn weight_gradient<T: Elem>(&self, values: &[T], d: &[T], into: &mut [T::Acc]) {
        let g = &self.geometry;
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (ng, cells) = (n / g.groups, g.panel());
        let batch = values.len() / (g.height * g.width * g.inputs);
        let run = batch.div_ceil(cpu::threads()).max(1);
        let blocking = g.blocks(cells, batch, cpu::threads());
        let room = if g.is_product() { 0 } else { blocking.rows() * cells * g.depth() };
        let add = |part: usize, sum: &mut [T::Acc]| {
            let mut gathered = cpu::fresh::<T>(room);
            for (group, first) in
                (0..g.groups).flat_map(|group| (0..g.cells()).step_by(cells).map(move |c| (group, c)))
            {
                let seen = first..(first + cells).min(g.cells());
                let sum = &mut sum[group * ng * k + first * g.depth()..];
                for block in blocking.of(part * run..(part + 1) * run) {
                    let a = g.windows(values, block, group, seen.clone(), &mut gathered);
                    let a = Mat::new(a, block.rows(), seen.len() * g.depth());
                    let d = Mat::strided(&d[block.row(pixels) * n + group * ng..], block.rows(), ng, n).t();
                    multiply(sum, k, d, a, true, By::Me);
                }
            }
        };
        let others = || {
            let one = |part: usize| {
                let mut sum = vec![T::Acc::ZERO; n * k];
                add(part, &mut sum);
                sum
            };
            (1..batch.div_ceil(run)).into_par_iter().map(one).collect::<Vec<_>>()
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
        let narrow = T::as_acc_mut(&mut dx[..0]).is_none();
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
                        for group in 0..g.groups {
                            let at = block.row(pixels) * n + group * ng;
                            let d = Mat::strided(&d[at..], block.rows(), ng, n);
                            let w = Mat::new(&weight[group * ng * k..][..ng * k], ng, k);
                            multiply(&mut gathered[..block.rows() * k], k, d, w, false, By::Me);
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
                    dx.iter_mut().zip(&*wide).for_each(|(dx, w)| *dx = T::down(*w));
                }
            },
        );
        dx
    }
}

/// Bytes of temporaries of the forward pass and of the backward pass.
pub fn workspace(geometry: &Geometry, act: Activation, at: crate::layers::At) -> (u64, u64) {
    let g = geometry;
    if g.is_depthwise() {
        return g.depthwise_workspace(at);
    }
    let elem = at.dtype.size_in_bytes();
    let acc = if at.dtype == DType::F64 { 8 } else { 4 };
    let blocking = g.blocks(g.cells(), at.batch, at.threads);
    let (rows, k, ng) = (blocking.rows(), g.window(), g.outputs / g.groups);
    let (cells, runs) = (g.panel(), at.batch.div_ceil(at.batch.div_ceil(at.threads).max(1)));
    let (panel_rows, panel) = (g.blocks(cells, at.batch, at.threads).rows(), cells * g.depth());
    // The operands of a product in the type it computes in, where that is another, and what it packs.
    let copies = |values: usize| if elem == acc { 0 } else { values * acc };
    let packed = |m, k, n, turned| packing(at.dtype, m, k, n, turned) as usize;
    let forward_product = copies(rows * k + ng * k) + packed(rows, k, ng, false);
    let weight_product = copies(panel_rows * (panel + g.outputs)) + packed(ng, panel_rows, panel, true);
    let input_product = copies(rows * g.outputs + ng * k) + packed(rows, ng, k, false);
    let gathered = if g.is_product() { 0 } else { rows * k * elem };
    let wide = if elem == acc { 0 } else { blocking.pictures * g.height * g.width * g.inputs * acc };
    let list =
        at.batch.div_ceil(blocking.pictures) * blocking.pixels.div_ceil(blocking.part) * size_of::<Block>();
    let direct = elem == acc && act.reads() != Reads::Input;
    let outputs = if direct { 0 } else { rows * g.outputs * acc };
    let turned = g.outputs * k * elem + g.groups * size_of::<Vec<f32>>();
    let forward = at.threads * (gathered + outputs + forward_product) + list + turned;
    let seen = if g.is_product() { 0 } else { panel_rows * panel * elem };
    let weight = runs.saturating_sub(1) * g.outputs * k * acc + runs * (seen + weight_product);
    let input = at.threads * (rows * k * acc + wide + input_product);
    (forward as u64, weight.max(input) as u64)
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

/// A slice that parallel workers write disjoint ranges of.
pub(super) struct Blocks<T>(*mut T, usize);

// SAFETY: `get` promises that no two workers hold one range.
unsafe impl<T: Send> Sync for Blocks<T> {}

impl<T> Blocks<T> {
    pub(super) fn new(all: &mut [T]) -> Self {
        Self(all.as_mut_ptr(), all.len())
    }

    /// An empty slice where the whole is empty.
    ///
    /// # Safety
    /// No two calls whose results live at once may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn get(&self, start: usize, len: usize) -> &mut [T] {
        if self.1 == 0 {
            return &mut [];
        }
        assert!(start + len <= self.1, "a block outside its slice");
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}
