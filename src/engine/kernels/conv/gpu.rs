//! Convolution on CUDA. A pointwise convolution is a plain GEMM. Few input channels take im2col and a GEMM per block of
//! rows. The rest goes to cuDNN if it is present and has a deterministic engine, else to im2col.
//!
//! Every path receives the same workspace, so the planner knows what a convolution takes without querying cuDNN.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Shape, Tensor};

use super::super::channels::gpu::acc_dtype;
use super::super::channels::{ChannelLayout, GridPartition};
use super::super::cuda::cublaslt::{Addend, Epilogue, GpuMat, matmul, tf32_allowed};
use super::super::cuda::{
    RawStream, check_status, cudnn, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};
use super::im2col_cuda::{accumulate_gradient, blocking, col2im, im2col, pad_rows, submatrix};
use super::workspace::{cuda_patch_workspace, padded_patch_len, weight_copy_bytes, weight_gradient_bytes};
use super::{Activation, ConvGeometry, ConvKernel, SavedForBackward, WeightBiasGrads, depthwise};

/// The pass that cuDNN computes: `ConvPass` in conv/cudnn.cpp.
#[derive(Clone, Copy)]
enum ConvPass {
    Output = 0,
    InputGradient = 1,
    WeightGradient = 2,
}

impl ConvKernel<'_> {
    pub(super) fn forward_cuda(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        let ((h, w), batch) = (g.output(), x.dim(0)?);
        let y = uninit(device, x.dtype(), (batch, h, w, g.out_channels))?;
        if y.elem_count() > 0 {
            if g.is_depthwise() {
                depthwise::gpu::forward(device, g, x, self.weight, &y)?;
            } else {
                self.conv_into(device, x, &y)?;
            }
        }
        let saves_input = self.act.saved_for_backward() == SavedForBackward::Input;
        let pre = saves_input.then(|| uninit(device, y.dtype(), y.shape())).transpose()?;
        if self.bias.is_some() || self.act != Activation::Identity {
            let (rows, GridPartition { chunk, parts }) = self.row_partition(&y);
            let (to, pre) = (pointer(&y)?, pointer_or_null(pre.as_ref())?);
            let bias = pointer_or_null(self.bias)?;
            let (dtype, act, n) = (dtype_code(y.dtype())?, self.act as c_int, g.out_channels as c_int);
            // SAFETY: `y` and `pre` have `rows` rows of `n` values; stream order keeps them alive until the kernel
            // finishes.
            check_status("conv_bias_activation", unsafe {
                conv_bias_activation(
                    dtype,
                    act,
                    to,
                    pre,
                    bias,
                    rows as i64,
                    n,
                    chunk as i64,
                    parts as c_int,
                    stream(device),
                )
            })?;
        }
        Ok((y, pre))
    }

    /// The output before bias and activation.
    fn conv_into(&self, device: &CudaDevice, x: &Tensor, y: &Tensor) -> Result<()> {
        let g = &self.geometry;
        let (k, n, batch) = (g.patch_len(), g.out_channels, x.dim(0)?);
        let rows = batch * g.output_pixels();
        if g.is_pointwise() {
            let w = GpuMat::new(self.weight, n, k).t();
            return matmul(
                &GpuMat::new(y, rows, n),
                GpuMat::new(x, rows, k),
                w,
                Addend::Zero,
                Epilogue::Identity,
            );
        }
        let (dtype, row) = (x.dtype(), padded_patch_len(g));
        let workspace = uninit(device, dtype, cuda_patch_workspace(g, batch, dtype) / dtype.size_in_bytes())?;
        if !prefers_im2col(g) && self.try_cudnn(device, ConvPass::Output, [x, self.weight, y], &workspace)? {
            return Ok(());
        }
        let padded_weight = match weight_copy_bytes(g, dtype) {
            0 => None,
            bytes => Some(pad_rows(device, self.weight, bytes, n, k, row)?),
        };
        let (ng, weight) = (n / g.groups, padded_weight.as_ref().unwrap_or(self.weight));
        for block in blocking(g, batch, workspace.elem_count()).blocks() {
            for group in 0..g.groups {
                im2col(device, g, x, &workspace, group, block)?;
                let out =
                    submatrix(y, block.first_row(g.output_pixels()) * n + group * ng, block.rows(), ng, n);
                let w = submatrix(weight, group * ng * row, ng, row, row).t();
                matmul(
                    &out,
                    GpuMat::new(&workspace, block.rows(), row),
                    w,
                    Addend::Zero,
                    Epilogue::Identity,
                )?;
            }
        }
        Ok(())
    }

    /// Like `backward`. `residual_grad` must be `None` unless the convolution is pointwise: only that path adds it.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
        residual_grad: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let (g, shape) = (&self.geometry, self.input_shape(dy)?);
        self.activation_backward(device, v, dy, grads)?;
        if dy.elem_count() == 0 {
            return match residual_grad {
                Some(residual_grad) => Ok(Some(residual_grad.clone())),
                None => needs_input_grad.then(|| Tensor::zeros(&shape, dy.dtype(), dy.device())).transpose(),
            };
        }
        let (k, n, rows) = (g.patch_len(), g.out_channels, shape[0] * g.output_pixels());
        let d = GpuMat::new(dy, rows, n);
        if let (Some(x), Some(dweight)) = (x, grads.weight) {
            match (g.is_depthwise(), g.is_pointwise()) {
                (true, _) => depthwise::gpu::weight_gradient(device, g, x, dy, dweight)?,
                (false, true) => {
                    let into = GpuMat::new(dweight, n, k);
                    matmul(&into, d.t(), GpuMat::new(x, rows, k), Addend::Output, Epilogue::Identity)?;
                }
                (false, false) => self.weight_gradient_cuda(device, x, dy, dweight)?,
            }
        }
        if !needs_input_grad {
            return Ok(None);
        }
        if g.is_depthwise() {
            return depthwise::gpu::input_gradient(device, g, dy, self.weight, &Shape::from(&shape))
                .map(Some);
        }
        if !g.is_pointwise() {
            return self.input_gradient_cuda(device, dy).map(Some);
        }
        let dx = uninit(device, dy.dtype(), &shape)?;
        let w = GpuMat::new(self.weight, n, k);
        matmul(
            &GpuMat::new(&dx, rows, k),
            d,
            w,
            residual_grad.map_or(Addend::Zero, Addend::Matrix),
            Epilogue::Identity,
        )?;
        Ok(Some(dx))
    }

    /// Turns `dy` into the gradient before the activation, in place, and accumulates the bias gradient.
    fn activation_backward(
        &self,
        device: &CudaDevice,
        v: Option<&Tensor>,
        dy: &Tensor,
        grads: &WeightBiasGrads,
    ) -> Result<()> {
        if grads.bias.is_none() && self.act == Activation::Identity {
            return Ok(());
        }
        let (rows, GridPartition { chunk, parts }) = self.row_partition(dy);
        let sums = grads.bias.map(|_| {
            scratch(device, parts * self.geometry.out_channels * acc_dtype(dy.dtype()).size_in_bytes())
        });
        let sums = sums.transpose()?;
        let (partials, dbias) = (pointer_or_null(sums.as_ref())?, pointer_or_null(grads.bias)?);
        let (v, d) = (pointer_or_null(v)?, pointer(dy)?);
        let (dtype, act, n) =
            (dtype_code(dy.dtype())?, self.act as c_int, self.geometry.out_channels as c_int);
        // SAFETY: `v` and `dy` have `rows` rows of `n` values, `sums` has `parts` rows of `n`; stream order keeps all
        // of them alive until the kernels finish.
        check_status("conv_activation_backward", unsafe {
            conv_activation_backward(
                dtype,
                act,
                v,
                d,
                partials,
                dbias,
                rows as i64,
                n,
                chunk as i64,
                parts as c_int,
                stream(device),
            )
        })
    }

    /// Rows of an output, and how thread blocks split them.
    fn row_partition(&self, y: &Tensor) -> (usize, GridPartition) {
        let channels = self.geometry.out_channels;
        let rows = y.elem_count() / channels;
        (rows, GridPartition::new(y.dtype(), &ChannelLayout { channels, rows, rows_per_unit: rows }))
    }

    fn weight_gradient_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        dy: &Tensor,
        dweight: &Tensor,
    ) -> Result<()> {
        let g = &self.geometry;
        let (k, n, batch, row) = (g.patch_len(), g.out_channels, x.dim(0)?, padded_patch_len(g));
        let (dtype, acc) = (x.dtype(), dweight.dtype());
        let dw_buffer = uninit(device, acc, weight_gradient_bytes(g, dtype) / acc.size_in_bytes())?;
        let workspace = uninit(device, dtype, cuda_patch_workspace(g, batch, dtype) / dtype.size_in_bytes())?;
        if !prefers_im2col(g)
            && self.try_cudnn(device, ConvPass::WeightGradient, [dy, x, &dw_buffer], &workspace)?
        {
            return accumulate_gradient(device, dtype, &dw_buffer, dweight, n, k, k);
        }
        let (ng, direct) = (n / g.groups, row == k);
        let sums = if direct { dweight } else { &dw_buffer };
        for (i, block) in blocking(g, batch, workspace.elem_count()).blocks().into_iter().enumerate() {
            for group in 0..g.groups {
                im2col(device, g, x, &workspace, group, block)?;
                let d =
                    submatrix(dy, block.first_row(g.output_pixels()) * n + group * ng, block.rows(), ng, n)
                        .t();
                let out = submatrix(sums, group * ng * row, ng, row, row);
                let accumulate = if direct || i > 0 { Addend::Output } else { Addend::Zero };
                matmul(&out, d, GpuMat::new(&workspace, block.rows(), row), accumulate, Epilogue::Identity)?;
            }
        }
        if direct { Ok(()) } else { accumulate_gradient(device, acc, &dw_buffer, dweight, n, k, row) }
    }

    fn input_gradient_cuda(&self, device: &CudaDevice, dy: &Tensor) -> Result<Tensor> {
        let (g, shape) = (&self.geometry, self.input_shape(dy)?);
        let (k, n, batch) = (g.patch_len(), g.out_channels, shape[0]);
        let (dtype, acc) = (dy.dtype(), acc_dtype(dy.dtype()));
        let patches = uninit(device, acc, cuda_patch_workspace(g, batch, dtype) / acc.size_in_bytes())?;
        let dx = uninit(device, dtype, &shape)?;
        if self.try_cudnn(device, ConvPass::InputGradient, [dy, self.weight, &dx], &patches)? {
            return Ok(dx);
        }
        let (ng, blocking) = (n / g.groups, blocking(g, batch, patches.elem_count()));
        // A block that is a part of an image adds to what the previous block wrote, so `dx` must start from zero.
        let whole_images = blocking.block_pixels == blocking.image_pixels;
        let dx = if whole_images {
            dx
        } else {
            drop(dx);
            Tensor::zeros(&shape, dtype, dy.device())?
        };
        for block in blocking.blocks() {
            for group in 0..g.groups {
                let d =
                    submatrix(dy, block.first_row(g.output_pixels()) * n + group * ng, block.rows(), ng, n);
                let w = submatrix(self.weight, group * ng * k, ng, k, k);
                matmul(&GpuMat::new(&patches, block.rows(), k), d, w, Addend::Zero, Epilogue::Identity)?;
                col2im(device, g, &patches, &dx, group, block, !whole_images)?;
            }
        }
        Ok(dx)
    }

    /// Asks cuDNN to compute `out` from `a` and `b`; returns false if it has no engine for the pass.
    fn try_cudnn(
        &self,
        device: &CudaDevice,
        pass: ConvPass,
        [a, b, out]: [&Tensor; 3],
        workspace: &Tensor,
    ) -> Result<bool> {
        if a.dtype() == DType::F64 || !cudnn::is_usable() {
            return Ok(false);
        }
        let g = ConvGeometryFfi::new(&self.geometry);
        let args = CudnnConvArgs {
            dtype: dtype_code(a.dtype())?,
            pass: pass as c_int,
            tf32: tf32_allowed() as c_int,
            batch: a.dim(0)? as c_int,
            height: g.height,
            width: g.width,
            inputs: g.inputs,
            out_height: g.out_height,
            out_width: g.out_width,
            outputs: g.outputs,
            kernel: g.kernel,
            stride: g.stride,
            padding: g.padding,
            dilation: g.dilation,
            groups: g.groups,
            a: pointer(a)?,
            b: pointer(b)?,
            out: pointer(out)?,
            workspace: pointer(workspace)?,
            workspace_bytes: (workspace.elem_count() * workspace.dtype().size_in_bytes()) as i64,
        };
        // SAFETY: the tensors have the sizes of the geometry; stream order keeps them alive until the kernel finishes.
        match unsafe { conv_cudnn(&args, stream(device)) } {
            NO_ENGINE => Ok(false),
            code => check_status("conv_cudnn", code).map(|()| true),
        }
    }
}

/// Whether im2col runs even where cuDNN is available. With so few channels cuDNN first pads them with zeros and takes
/// two to five times as long.
fn prefers_im2col(g: &ConvGeometry) -> bool {
    g.groups == 1 && g.in_channels < 8
}

/// `ConvGeometry` in cuda/windows.cuh.
#[repr(C)]
pub(in super::super) struct ConvGeometryFfi {
    height: c_int,
    width: c_int,
    inputs: c_int,
    out_height: c_int,
    out_width: c_int,
    outputs: c_int,
    kernel: c_int,
    stride: c_int,
    padding: c_int,
    dilation: c_int,
    groups: c_int,
}

impl ConvGeometryFfi {
    pub(in super::super) fn new(g: &ConvGeometry) -> Self {
        let (h, w) = g.output();
        Self {
            height: g.height as c_int,
            width: g.width as c_int,
            inputs: g.in_channels as c_int,
            out_height: h as c_int,
            out_width: w as c_int,
            outputs: g.out_channels as c_int,
            kernel: g.kernel as c_int,
            stride: g.stride as c_int,
            padding: g.padding as c_int,
            dilation: g.dilation as c_int,
            groups: g.groups as c_int,
        }
    }
}

/// `CudnnConvArgs` in conv/cudnn.cpp.
#[repr(C)]
struct CudnnConvArgs {
    dtype: c_int,
    pass: c_int,
    tf32: c_int,
    batch: c_int,
    height: c_int,
    width: c_int,
    inputs: c_int,
    out_height: c_int,
    out_width: c_int,
    outputs: c_int,
    kernel: c_int,
    stride: c_int,
    padding: c_int,
    dilation: c_int,
    groups: c_int,
    a: *const c_void,
    b: *const c_void,
    out: *mut c_void,
    workspace: *mut c_void,
    workspace_bytes: i64,
}

/// Status of `conv_cudnn` when cuDNN has no engine for the pass.
const NO_ENGINE: c_int = -1;

unsafe extern "C" {
    fn conv_cudnn(asked: *const CudnnConvArgs, stream: RawStream) -> c_int;
    fn conv_bias_activation(
        dtype: c_int,
        act: c_int,
        y: *mut c_void,
        pre: *mut c_void,
        bias: *const c_void,
        rows: i64,
        n: c_int,
        chunk: i64,
        parts: c_int,
        stream: RawStream,
    ) -> c_int;
    fn conv_activation_backward(
        dtype: c_int,
        act: c_int,
        v: *const c_void,
        dy: *mut c_void,
        sums: *mut c_void,
        dbias: *mut c_void,
        rows: i64,
        n: c_int,
        chunk: i64,
        parts: c_int,
        stream: RawStream,
    ) -> c_int;
}
