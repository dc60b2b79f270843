//! Two-dimensional convolution, channels last, with bias and activation fused.
//!
//! The CPU kernel runs im2col block by block: it gathers the patches of a block of output pixels into a small matrix
//! that stays in cache, and multiplies it. The full im2col matrix never exists. With AMX and enough channels it is an
//! implicit GEMM: patches are gathered while the tiles are packed.

#[cfg(feature = "cuda")]
pub(super) mod gpu;
#[cfg(feature = "cuda")]
mod im2col_cuda;
#[cfg(test)]
mod tests;
mod workspace;

pub use self::workspace::{ConvWorkspace, workspace};

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::activation::each_activation;
use super::clamp::ClampActivation;
#[cfg(feature = "cuda")]
use super::cuda;
use super::im2col::ConvGeometry;
use super::linear::{WeightBiasGrads, activation_backward};
use super::matmul::{
    ConvArgs, CpuEpilogue, MatView, Threading, gemm, round, try_conv, try_conv_weight_gradient,
};
use super::parallel::{ParallelChunks, ParallelItems};
use super::partial_sums::PartialSums;
use super::{
    Activation, Elem, Real, SavedForBackward, activation, add, cpu, depthwise, reference, transpose,
};
use crate::{vectorised, with_elem};

/// The operands of a convolution: `weight` is (out, height, width, in / groups).
pub struct ConvKernel<'a> {
    pub geometry: ConvGeometry,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub act: Activation,
}

impl ConvKernel<'_> {
    /// Reference implementation: one matmul per kernel tap. (candle's own convolution cannot be differentiated where
    /// the stride leaves a remainder.)
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        activation::reference::forward(&self.preactivation(x)?, self.act)
    }

    fn preactivation(&self, x: &Tensor) -> Result<Tensor> {
        let (g, (h, w)) = (&self.geometry, self.geometry.output());
        let (batch, cg, ng) = (x.dim(0)?, g.in_channels / g.groups, g.out_channels / g.groups);
        let x = x.pad_with_zeros(1, g.padding, g.padding)?.pad_with_zeros(2, g.padding, g.padding)?;
        let taps = || (0..g.kernel * g.kernel).map(|i| (i / g.kernel, i % g.kernel));
        let sum = |products: Vec<Tensor>| products.into_iter().map(Ok).reduce(|a, b| a? + b?).transpose();
        // A product for every tap of the window, in groups of channels.
        let group = |first: usize, channels: usize, out_channels: usize| {
            let x = if channels == g.in_channels {
                x.clone()
            } else {
                x.narrow(3, first * channels, channels)?.contiguous()?
            };
            let weight = self.weight.narrow(0, first * out_channels, out_channels)?;
            let product = |(ky, kx)| {
                let at = (ky * g.dilation, kx * g.dilation);
                let x = reference::inputs_at_tap(&x, at, g.stride, (h, w))?;
                let weight = weight.narrow(1, ky, 1)?.narrow(2, kx, 1)?.contiguous()?;
                match g.is_depthwise() {
                    true => x.broadcast_mul(&weight.flatten_all()?),
                    false => {
                        let weight = weight.reshape((out_channels, channels))?;
                        x.reshape((batch * h * w, channels))?.matmul(&weight.t()?)
                    }
                }
            };
            sum(taps().map(product).collect::<Result<_>>()?)
        };
        let groups = match g.is_depthwise() {
            true => vec![group(0, g.in_channels, g.out_channels)?],
            false => (0..g.groups).map(|at| group(at, cg, ng)).collect::<Result<_>>()?,
        };
        let groups: Vec<Tensor> = groups.into_iter().flatten().collect();
        let y = if groups.len() == 1 { groups[0].clone() } else { Tensor::cat(&groups, 1)? };
        let y = y.reshape((batch, h, w, g.out_channels))?;
        match self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Returns the output (batch, height, width, out), and the pre-activation if the activation's backward pass reads
    /// it.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        on_cuda!(x, |device| self.forward_cuda(device, x));
        if !reference::has_cpu_kernel(x) {
            let pre = self.preactivation(x)?;
            let y = activation::reference::forward(&pre, self.act)?;
            return Ok((y, (self.act.saved_for_backward() == SavedForBackward::Input).then_some(pre)));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x))
    }

    fn forward_cpu<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        if g.is_depthwise() {
            return self.forward_depthwise::<T>(x);
        }
        let (pixels, k, n) = (g.output_pixels(), g.patch_len(), g.out_channels);
        let (image_len, ng) = (g.height * g.width * g.in_channels, n / g.groups);
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let batch = values.len() / image_len;
        let mut y = cpu::uninit::<T>(batch * pixels * n);
        let mut pre = if self.act.saved_for_backward() == SavedForBackward::Input {
            cpu::uninit::<T>(y.len())
        } else {
            Vec::new()
        };
        let (h, w) = g.output();
        let shape = (batch, h, w, n);
        if let Some(clamp) = ClampActivation::from_activation(self.act).filter(|_| pre.is_empty()) {
            let epilogue = CpuEpilogue { bias: bias.as_deref(), clamp, residual: None };
            if try_conv(
                &mut y,
                ConvArgs { g, images: &values, weight: &weight, input_gradient: false, epilogue },
            ) {
                return Ok((cpu::tensor(y, shape)?, None));
            }
        }
        let blocking = g.blocking(g.kernel_area(), batch, cpu::threads());
        let patch_capacity =
            g.im2col_bytes(T::DTYPE, blocking.max_rows(), g.kernel_area()) / size_of::<T::Acc>();
        // Every block packs the weight for its GEMM, and packing across the rows of the source is slow. Transpose it
        // once instead.
        let weight = T::to_acc_slice(&weight, Threading::Parallel);
        let weight: Vec<Vec<T::Acc>> =
            weight.chunks_exact(ng * k).map(|w| transpose::matrix(w, ng, k)).collect();
        // The GEMM writes straight into the output if that has the accumulator type and no pre-activation must be
        // saved.
        let direct = pre.is_empty() && T::as_acc_mut(&mut y[..0]).is_some();
        let acc_bias = bias.as_deref().map(|bias| T::to_acc_slice(bias, Threading::Serial));
        let (outputs, preacts) = (cpu::DisjointSliceMut::new(&mut y), cpu::DisjointSliceMut::new(&mut pre));
        blocking.blocks().as_slice().for_each_init(
            || {
                (
                    cpu::uninit::<T::Acc>(patch_capacity),
                    vec![T::Acc::ZERO; if direct { 0 } else { blocking.max_rows() * n }],
                )
            },
            |(patches, acc), &block| {
                let (at, len) = (block.first_row(pixels) * n, block.rows() * n);
                // SAFETY: only this block writes its rows.
                let (out, preact) = unsafe { (outputs.range_mut(at, len), preacts.range_mut(at, len)) };
                let mut gemm_block = |to: &mut [T::Acc]| {
                    for (group, w) in weight.iter().enumerate() {
                        let a = g.im2col_block(&values, block, group, 0..g.kernel_area(), patches);
                        let a = MatView::new(a, block.rows(), k);
                        gemm::<T::Acc>(
                            &mut to[group * ng..],
                            n,
                            a,
                            MatView::new(w, k, ng),
                            false,
                            Threading::Serial,
                        );
                    }
                };
                match T::as_acc_mut(out) {
                    Some(out) if direct => {
                        gemm_block(out);
                        super::linear::bias_activation(out, n, acc_bias.as_deref(), self.act);
                    }
                    _ => {
                        gemm_block(acc);
                        apply_bias_activation(&acc[..len], bias.as_deref(), out, preact, self.act, n);
                    }
                }
            },
        );
        let pre = if pre.is_empty() { None } else { Some(cpu::tensor(pre, shape)?) };
        Ok((cpu::tensor(y, shape)?, pre))
    }

    fn forward_depthwise<T: Elem>(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        let ((h, w), c, image_len) = (g.output(), g.out_channels, g.height * g.width * g.in_channels);
        let (values, weight) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let weight = depthwise::transposed_weight(&weight, c);
        let batch = values.len() / image_len;
        let mut y = cpu::uninit::<T>(batch * h * w * c);
        let mut pre = if self.act.saved_for_backward() == SavedForBackward::Input {
            cpu::uninit::<T>(y.len())
        } else {
            Vec::new()
        };
        let preacts = cpu::DisjointSliceMut::new(&mut pre);
        y.par_chunks_mut((w * c).max(1)).enumerate().for_each_init(
            || vec![T::Acc::ZERO; w * c],
            |acc, (i, y)| {
                depthwise::forward_row(g, &values[i / h * image_len..][..image_len], &weight, i % h, acc);
                // SAFETY: only row `i` writes these values.
                let preact = unsafe { preacts.range_mut(i * w * c, w * c) };
                apply_bias_activation(acc, bias.as_deref(), y, preact, self.act, c);
            },
        );
        let shape = (batch, h, w, c);
        let pre = if pre.is_empty() { None } else { Some(cpu::tensor(pre, shape)?) };
        Ok((cpu::tensor(y, shape)?, pre))
    }

    /// The shape of an input whose output has the gradient `dy`.
    fn input_shape(&self, dy: &Tensor) -> Result<[usize; 4]> {
        let g = &self.geometry;
        Ok([dy.dim(0)?, g.height, g.width, g.in_channels])
    }

    /// Accumulates the parameter gradients into `grads` and returns the input gradient if `needs_input_grad`. Only the
    /// weight gradient reads `x`. `v` is the tensor that [`Activation::saved_for_backward`] names; `dy` is overwritten.
    pub fn backward(
        &self,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        on_cuda!(&dy, |device| self.backward_cuda(device, x, v, &dy, grads, needs_input_grad, None));
        with_elem!(dy.dtype(), T => self.backward_cpu::<T>(x, v, dy, grads, needs_input_grad))
    }

    /// Like `backward`, with `residual_grad` added to the input gradient. CUDA fuses the addition into the GEMM of a
    /// pointwise convolution.
    pub fn backward_accumulate(
        &self,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &WeightBiasGrads,
        residual_grad: &Tensor,
    ) -> Result<Tensor> {
        let _scope = super::kernel_timer::enter(module_path!());
        #[cfg(feature = "cuda")]
        if let Some(device) = cuda::device_of(&dy)
            && self.geometry.is_pointwise()
            && let Some(dx) = self.backward_cuda(device, x, v, &dy, grads, true, Some(residual_grad))?
        {
            return Ok(dx);
        }
        match self.backward(x, v, dy, grads, true)? {
            Some(dx) => add::inplace(&dx, residual_grad, Activation::Identity),
            None => Ok(residual_grad.clone()),
        }
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let n = self.geometry.out_channels;
        let v = v.map(cpu::view::<T>).transpose()?;
        let sums = cpu::with_slice_mut::<T, _>(&dy, |d| {
            activation_backward(d, v.as_deref(), self.act, n, grads.bias.is_some())
        })?;
        if let Some(bias) = grads.bias {
            cpu::with_slice_mut::<T::Acc, _>(bias, |bias| sums.add_to(bias, 0))?;
        }
        let d = cpu::view::<T>(&dy)?;
        if let (Some(x), Some(into)) = (x, grads.weight) {
            let values = cpu::view::<T>(x)?;
            match self.geometry.is_depthwise() {
                true => {
                    let partials = depthwise::weight_gradient::<T>(&self.geometry, &values, &d);
                    cpu::with_slice_mut::<T::Acc, _>(into, |into| {
                        let cells = into.len() / n;
                        for partial in partials.parts() {
                            let sums = into.iter_mut().enumerate();
                            sums.for_each(|(i, a)| *a += partial[i % cells * n + i / cells]);
                        }
                    })?;
                }
                false => cpu::with_slice_mut::<T::Acc, _>(into, |into| {
                    self.weight_gradient::<T>(&values, &d, into);
                })?,
            }
        }
        if !needs_input_grad {
            return Ok(None);
        }
        let weight = cpu::view::<T>(self.weight)?;
        let dx = match self.geometry.is_depthwise() {
            true => depthwise::input_gradient(&self.geometry, &weight, &d),
            false => self.input_gradient::<T>(&weight, &d),
        };
        Ok(Some(cpu::tensor(dx, self.input_shape(&dy)?.to_vec())?))
    }

    /// Accumulates the weight gradient. The images are split into one chunk per thread: the first chunk adds in place,
    /// the others into partial sums of their own.
    fn weight_gradient<T: Elem>(&self, values: &[T], d: &[T], dweight: &mut [T::Acc]) {
        let g = &self.geometry;
        let (pixels, k, n) = (g.output_pixels(), g.patch_len(), g.out_channels);
        let (ng, cells, image_len) = (n / g.groups, g.taps_per_panel(), g.height * g.width * g.in_channels);
        let batch = values.len() / image_len;
        let chunks = weight_gradient_chunks(batch, cpu::threads());
        let blocking = g.blocking(cells, batch, cpu::threads());
        let patch_capacity = g.im2col_bytes(T::DTYPE, blocking.max_rows(), cells) / size_of::<T::Acc>();
        let accumulate_chunk = |chunk: usize, sum: &mut [T::Acc]| {
            let Range { start, end } = chunk_images(chunk, chunks, batch);
            let (inputs, outputs) =
                (image_len * start..image_len * end, pixels * n * start..pixels * n * end);
            if try_conv_weight_gradient(sum, g, &values[inputs], &d[outputs]) {
                return;
            }
            let mut patches = cpu::uninit::<T::Acc>(patch_capacity);
            for (group, first) in
                (0..g.groups).flat_map(|group| (0..g.kernel_area()).step_by(cells).map(move |c| (group, c)))
            {
                let taps = first..(first + cells).min(g.kernel_area());
                let sum = &mut sum[group * ng * k + first * g.group_channels()..];
                for block in blocking.blocks_of_images(start..end) {
                    let a = g.im2col_block(values, block, group, taps.clone(), &mut patches);
                    let a = MatView::new(a, block.rows(), taps.len() * g.group_channels());
                    let d = T::to_acc_slice(
                        &d[block.first_row(pixels) * n..][..block.rows() * n],
                        Threading::Serial,
                    );
                    let d = MatView::strided(&d[group * ng..], block.rows(), ng, n).t();
                    gemm::<T::Acc>(sum, k, d, a, true, Threading::Serial);
                }
            }
        };
        let other_chunks =
            || PartialSums::of_parts(chunks - 1, n * k, &|i, sum| accumulate_chunk(1 + i, sum));
        let ((), partials) = rayon::join(|| accumulate_chunk(0, dweight), other_chunks);
        partials.add_to(dweight, 0);
    }

    fn input_gradient<T: Elem>(&self, weight: &[T], d: &[T]) -> Vec<T> {
        let g = &self.geometry;
        let (pixels, k, n) = (g.output_pixels(), g.patch_len(), g.out_channels);
        let (image_len, ng) = (g.height * g.width * g.in_channels, n / g.groups);
        let batch = d.len() / (pixels * n);
        let blocking = g.blocking(g.kernel_area(), batch, cpu::threads());
        let mut dx = cpu::uninit::<T>(batch * image_len);
        if let Some(g) = &g.input_gradient_geometry()
            && try_conv(
                &mut dx,
                ConvArgs { g, images: d, weight, input_gradient: true, epilogue: CpuEpilogue::NONE },
            )
        {
            return dx;
        }
        let (is_half, weight) =
            (T::as_acc_mut(&mut dx[..0]).is_none(), T::to_acc_slice(weight, Threading::Parallel));
        dx.par_chunks_mut(blocking.block_images * image_len).enumerate().for_each_init(
            || {
                let acc_len = if is_half { blocking.block_images * image_len } else { 0 };
                (vec![T::Acc::ZERO; blocking.max_rows() * k], vec![T::Acc::ZERO; acc_len])
            },
            |(patches, acc), (i, dx)| {
                let from = i * blocking.block_images;
                {
                    let sums = match T::as_acc_mut(dx) {
                        Some(dx) => dx,
                        None => acc.as_mut_slice(),
                    };
                    sums.fill(T::Acc::ZERO);
                    for block in blocking.blocks_of_images(from..from + blocking.block_images) {
                        let d = T::to_acc_slice(
                            &d[block.first_row(pixels) * n..][..block.rows() * n],
                            Threading::Serial,
                        );
                        for group in 0..g.groups {
                            let d = MatView::strided(&d[group * ng..], block.rows(), ng, n);
                            let w = MatView::new(&weight[group * ng * k..][..ng * k], ng, k);
                            gemm::<T::Acc>(
                                &mut patches[..block.rows() * k],
                                k,
                                d,
                                w,
                                false,
                                Threading::Serial,
                            );
                            let images = sums.chunks_exact_mut(image_len);
                            for (rows, sums) in
                                patches.chunks_exact(block.pixels * k).zip(images).take(block.images)
                            {
                                vectorised!(T, || g.col2im(rows, block.first_pixel, group, sums));
                            }
                        }
                    }
                }
                if is_half {
                    round(acc, dx, Threading::Serial);
                }
            },
        );
        dx
    }
}

/// Chunks of images whose weight gradients threads sum in parallel. A batch below the thread count has fewer chunks,
/// and so fewer partial sums.
fn weight_gradient_chunks(batch: usize, threads: usize) -> usize {
    batch.min(threads).max(1)
}

/// The images of one chunk; the first chunks have one more image where the batch does not divide evenly.
fn chunk_images(chunk: usize, chunks: usize, batch: usize) -> Range<usize> {
    let (each, larger) = (batch / chunks, batch % chunks);
    let start = chunk * each + chunk.min(larger);
    start..start + each + usize::from(chunk < larger)
}

/// `y = act(acc + bias)`. Also writes the pre-activation, unless `preact` is empty.
fn apply_bias_activation<T: Elem>(
    acc: &[T::Acc],
    bias: Option<&[T]>,
    y: &mut [T],
    preact: &mut [T],
    act: Activation,
    n: usize,
) {
    vectorised!(T, || {
        each_activation!(act, f => {
            for (i, (acc, y)) in acc.chunks_exact(n).zip(y.chunks_exact_mut(n)).enumerate() {
                match bias {
                    Some(bias) => y
                .iter_mut()
                .zip(acc)
                .zip(bias)
                .for_each(|((y, w), b)| *y = T::from_acc(f.value(*w + b.to_acc()))),
                    None => y.iter_mut().zip(acc).for_each(|(y, w)| *y = T::from_acc(f.value(*w))),
                }
                if let Some(preact) = preact.get_mut(i * n..(i + 1) * n) {
                    match bias {
                        Some(bias) => preact
                    .iter_mut()
                    .zip(acc)
                    .zip(bias)
                    .for_each(|((p, w), b)| *p = T::from_acc(*w + b.to_acc())),
                        None => preact.iter_mut().zip(acc).for_each(|(p, w)| *p = T::from_acc(*w)),
                    }
                }
            }
        })
    })
}
