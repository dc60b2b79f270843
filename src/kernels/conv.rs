//! Two-dimensional convolution, channels last, with bias and activation fused.
//!
//! The windows of a block of output pixels are gathered into the rows of a small matrix that stays in
//! the cache and is multiplied at once; the gathered matrix is never whole in memory.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::activation::each_activation;
use super::linear::{Grads, add_all, through_activation};
use super::product::{By, Mat, multiply};
use super::{Activation, Elem, Reads, Real, activation, cpu, depthwise, reference};
use crate::with_elem;

/// Gathered values a block holds: half a megabyte of f32, which leaves room in the second-level cache.
const BLOCK: usize = 128 * 1024;

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
        self.kernel * self.kernel * self.inputs / self.groups
    }

    /// Output pixels gathered at once, at most a picture's.
    fn block(&self) -> usize {
        let (h, w) = self.output();
        (BLOCK / self.window()).clamp(1, (h * w).max(1))
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

    /// Gathers the windows of output pixels `first..` of one picture, group `g`, into rows.
    fn gather<T: Elem>(&self, picture: &[T], first: usize, g: usize, rows: &mut [T]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.inputs / self.groups, self.kernel);
        for (i, row) in rows.chunks_exact_mut(self.window()).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for (ky, line) in row.chunks_exact_mut(k * cg).enumerate() {
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    line.fill(T::default());
                    continue;
                }
                let start = y as usize * self.width;
                if self.dilation == 1 && self.groups == 1 && x0 >= 0 && x0 as usize + k <= self.width {
                    line.copy_from_slice(&picture[(start + x0 as usize) * c..][..k * c]);
                    continue;
                }
                for (kx, cell) in line.chunks_exact_mut(cg).enumerate() {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x < 0 || x >= self.width as isize {
                        cell.fill(T::default());
                    } else {
                        cell.copy_from_slice(&picture[(start + x as usize) * c + g * cg..][..cg]);
                    }
                }
            }
        }
    }

    /// The reverse of [`Geometry::gather`]: adds the rows back to where they came from.
    fn scatter<R: Real>(&self, rows: &[R], first: usize, g: usize, picture: &mut [R]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.inputs / self.groups, self.kernel);
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
        let blocks_per_picture = pixels.div_ceil(g.block());
        // One block of output pixels of one picture; blocks never cross pictures.
        let block_rows = |i: usize| {
            let (b, first) = (i / blocks_per_picture, (i % blocks_per_picture) * g.block());
            (b, first, g.block().min(pixels - first))
        };
        let (outputs, befores) = (Blocks::new(&mut y), Blocks::new(&mut pre));
        (0..batch * blocks_per_picture).into_par_iter().for_each_init(
            || {
                (
                    cpu::fresh::<T>(if g.is_product() { 0 } else { g.block() * k }),
                    vec![T::Acc::ZERO; g.block() * n],
                )
            },
            |(gathered, wide), i| {
                let (b, first, rows) = block_rows(i);
                let picture = &values[b * picture..][..picture];
                for group in 0..g.groups {
                    let a = if g.is_product() {
                        &picture[first * k..][..rows * k]
                    } else {
                        g.gather(picture, first, group, &mut gathered[..rows * k]);
                        &gathered[..rows * k]
                    };
                    let w = Mat::new(&weight[group * ng * k..][..ng * k], ng, k).t();
                    multiply(&mut wide[group * ng..], n, Mat::new(a, rows, k), w, false, By::Me);
                }
                // SAFETY: block i is the only one that writes these rows.
                let out = unsafe { outputs.get((b * pixels + first) * n, rows * n) };
                let before = unsafe { befores.get((b * pixels + first) * n, rows * n) };
                finish(&wide[..rows * n], bias.as_deref(), out, before, self.act, n);
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
        let partials = self.weight_gradient::<T>(&values, &d);
        cpu::update::<T::Acc, _>(grads.weight, |into| add_all(into, &partials))?;
        drop(partials);
        if !want {
            return Ok(None);
        }
        let weight = cpu::view::<T>(self.weight)?;
        Ok(Some(cpu::tensor(self.input_gradient::<T>(&weight, &d), x.shape())?))
    }

    /// The weight's gradient as sums over as many runs of pictures as there are threads.
    fn weight_gradient<T: Elem>(&self, values: &[T], d: &[T]) -> Vec<Vec<T::Acc>> {
        let g = &self.geometry;
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (picture, ng) = (g.height * g.width * g.inputs, n / g.groups);
        let batch = values.len() / picture;
        let run = batch.div_ceil(cpu::threads()).max(1);
        (0..batch.div_ceil(run))
            .into_par_iter()
            .map(|part| {
                let mut sum = vec![T::Acc::ZERO; n * k];
                let mut gathered = cpu::fresh::<T>(if g.is_product() { 0 } else { g.block() * k });
                for b in part * run..((part + 1) * run).min(batch) {
                    let picture = &values[b * picture..][..picture];
                    for first in (0..pixels).step_by(g.block()) {
                        let rows = g.block().min(pixels - first);
                        for group in 0..g.groups {
                            let a = if g.is_product() {
                                &picture[first * k..][..rows * k]
                            } else {
                                g.gather(picture, first, group, &mut gathered[..rows * k]);
                                &gathered[..rows * k]
                            };
                            let d = &d[(b * pixels + first) * n + group * ng..];
                            let d = Mat::strided(d, rows, ng, n).t();
                            multiply(
                                &mut sum[group * ng * k..][..ng * k],
                                k,
                                d,
                                Mat::new(a, rows, k),
                                true,
                                By::Me,
                            );
                        }
                    }
                }
                sum
            })
            .collect()
    }

    fn input_gradient<T: Elem>(&self, weight: &[T], d: &[T]) -> Vec<T> {
        let g = &self.geometry;
        let (pixels, k, n) = (g.pixels(), g.window(), g.outputs);
        let (picture, ng) = (g.height * g.width * g.inputs, n / g.groups);
        let batch = d.len() / (pixels * n);
        let mut dx = cpu::fresh::<T>(batch * picture);
        dx.par_chunks_mut(picture).enumerate().for_each_init(
            || (vec![T::Acc::ZERO; g.block() * k], vec![T::Acc::ZERO; picture]),
            |(gathered, wide), (b, dx)| {
                wide.fill(T::Acc::ZERO);
                for first in (0..pixels).step_by(g.block()) {
                    let rows = g.block().min(pixels - first);
                    for group in 0..g.groups {
                        let d = Mat::strided(&d[(b * pixels + first) * n + group * ng..], rows, ng, n);
                        let w = Mat::new(&weight[group * ng * k..][..ng * k], ng, k);
                        multiply(&mut gathered[..rows * k], k, d, w, false, By::Me);
                        T::vectorised(|| g.scatter(&gathered[..rows * k], first, group, wide));
                    }
                }
                dx.iter_mut().zip(&*wide).for_each(|(dx, w)| *dx = T::down(*w));
            },
        );
        dx
    }
}

/// Bytes of temporaries of the forward pass and of the backward pass.
pub fn workspace(geometry: &Geometry, at: crate::layers::At) -> (u64, u64) {
    let g = geometry;
    if g.is_depthwise() {
        return g.depthwise_workspace(at);
    }
    let elem = at.dtype.size_in_bytes();
    let acc = if at.dtype == DType::F64 { 8 } else { 4 };
    let gathered = if g.is_product() { 0 } else { g.block() * g.window() * elem };
    let picture = g.height * g.width * g.inputs;
    let forward = at.threads * (gathered + g.block() * g.outputs * acc);
    let weight = at.threads.min(at.batch) * (g.outputs * g.window() * acc + gathered);
    let input = at.threads * (g.block() * g.window() + picture) * acc;
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
    T::vectorised(|| {
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
