//! Linear layers on CUDA: cuBLASLt GEMMs with bias, GELU and accumulation fused into the epilogue.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{
    ActBackward, LinearKernel, WeightBiasGrads, WeightLayout, bias_gradient_workspace, cuda_row_ranges,
    hopper,
};
use crate::kernels::cuda::cublaslt::{Addend, Epilogue, GpuMat, gelu_is_fused, matmul};
use crate::kernels::cuda::{
    RawStream, check_status, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};
use crate::kernels::{Activation, SavedForBackward, activation};

impl LinearKernel<'_> {
    /// `W` as the (in, out) right operand.
    fn weight_matrix_cuda(&self) -> Result<GpuMat<'_>> {
        let (a, b) = self.weight.dims2()?;
        let w = GpuMat::new(self.weight, a, b);
        Ok(if self.weight_layout == WeightLayout::OutIn { w.t() } else { w })
    }

    /// Like `forward`; `residual` is added to the GEMM's result before the activation.
    pub(super) fn forward_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let ((k, n), shape) = (self.in_out_features()?, self.output_shape(x)?);
        let rows = x.elem_count() / k;
        let (values, w) = (GpuMat::new(x, rows, k), self.weight_matrix_cuda()?);
        let accumulate = residual.map_or(Addend::Zero, Addend::Matrix);
        let y = uninit(device, x.dtype(), shape.clone())?;
        let out = GpuMat::new(&y, rows, n);
        match (self.act, self.bias) {
            (Activation::GeluTanh, Some(bias)) if gelu_is_fused(x.dtype(), n) => {
                let pre = uninit(device, x.dtype(), shape)?;
                match hopper::supports(x, w, rows, bias)? {
                    true => hopper::linear_gelu(device, (x, w, rows), bias, (&y, &pre))?,
                    false => matmul(&out, values, w, accumulate, Epilogue::GeluBias(bias, Some(&pre)))?,
                }
                Ok((y, Some(pre)))
            }
            (Activation::Relu, Some(bias)) => {
                matmul(&out, values, w, accumulate, Epilogue::ReluBias(bias))?;
                Ok((y, None))
            }
            (act, bias) => {
                matmul(&out, values, w, accumulate, bias.map_or(Epilogue::Identity, Epilogue::Bias))?;
                match act.saved_for_backward() {
                    SavedForBackward::Nothing => Ok((y, None)),
                    SavedForBackward::Input => Ok((activation::forward(&y, act)?, Some(y))),
                    SavedForBackward::Output => {
                        activation::gpu::forward_into(device, &y, &y, act)?;
                        Ok((y, None))
                    }
                }
            }
        }
    }

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: &Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let (dx, _) =
            self.backward_input_cuda(device, v, dy, grads.bias, (needs_input_grad, None), (false, None))?;
        if let (Some(x), Some(dweight)) = (x, grads.weight) {
            self.backward_weight_cuda(x, dy, dweight)?;
        }
        Ok(dx)
    }

    pub(super) fn backward_input_cuda(
        &self,
        device: &CudaDevice,
        v: Option<&Tensor>,
        dy: &Tensor,
        bias: Option<&Tensor>,
        (needs_input_grad, residual_grad): (bool, Option<&Tensor>),
        (recompute, act_backward): (bool, Option<ActBackward>),
    ) -> Result<(Option<Tensor>, bool)> {
        let (k, n) = self.in_out_features()?;
        let rows = dy.elem_count() / n;
        activation_bias_backward(device, dy, v, (self.act, recompute), bias, rows, n)?;
        if !needs_input_grad {
            return Ok((None, false));
        }
        let (dx, w) = (uninit(device, dy.dtype(), self.input_shape(dy)?)?, self.weight_matrix_cuda()?.t());
        if let (Some(act_backward), None) =
            (act_backward.filter(|before| before.act == Activation::GeluTanh), residual_grad)
            && hopper::supports(dy, w, rows, act_backward.v)?
        {
            hopper::linear_gelu_backward(device, (dy, w, rows), act_backward, &dx)?;
            return Ok((Some(dx), true));
        }
        let accumulate = residual_grad.map_or(Addend::Zero, Addend::Matrix);
        matmul(&GpuMat::new(&dx, rows, k), GpuMat::new(dy, rows, n), w, accumulate, Epilogue::Identity)?;
        Ok((Some(dx), false))
    }

    pub(super) fn backward_weight_cuda(&self, x: &Tensor, dy: &Tensor, dweight: &Tensor) -> Result<()> {
        let (k, n) = self.in_out_features()?;
        let rows = dy.elem_count() / n;
        let (d, values) = (GpuMat::new(dy, rows, n), GpuMat::new(x, rows, k));
        match self.weight_layout {
            WeightLayout::OutIn => {
                matmul(&GpuMat::new(dweight, n, k), d.t(), values, Addend::Output, Epilogue::Identity)
            }
            WeightLayout::InOut => {
                matmul(&GpuMat::new(dweight, k, n), values.t(), d, Addend::Output, Epilogue::Identity)
            }
        }
    }
}

/// Turns the (rows, n) gradient `d` into the gradient before the activation, in place, and adds its column sums to the
/// bias gradient. With `recompute`, `v`, the activation's input, becomes its output.
pub fn activation_bias_backward(
    device: &CudaDevice,
    d: &Tensor,
    v: Option<&Tensor>,
    (act, recompute): (Activation, bool),
    bias: Option<&Tensor>,
    rows: usize,
    n: usize,
) -> Result<()> {
    let (dtype, stream) = (dtype_code(d.dtype())?, stream(device));
    let (at, values) = (pointer(d)?, pointer_or_null(v)?);
    let act = if v.is_some() { act } else { Activation::Identity };
    // SAFETY: `v` has the shape of `d`, and the partial sums have `cuda_row_ranges` rows of `n` values.
    match bias {
        Some(bias) => {
            let partial = scratch(device, bias_gradient_workspace(d.dtype(), rows, n) as usize)?;
            let (partial, bias) = (pointer(&partial)?, pointer(bias)?);
            check_status("linear_activation_bias_backward", unsafe {
                let ranges = cuda_row_ranges(rows, n) as c_int;
                linear_activation_bias_backward(
                    dtype,
                    act as c_int,
                    values,
                    at,
                    partial,
                    bias,
                    rows as i64,
                    n as c_int,
                    ranges,
                    recompute as c_int,
                    stream,
                )
            })
        }
        None => {
            let Some(v) = v else { return Ok(()) };
            activation::gpu::backward(device, v, d, d, act)?;
            if recompute { activation::gpu::forward_into(device, v, v, act) } else { Ok(()) }
        }
    }
}

unsafe extern "C" {
    fn linear_activation_bias_backward(
        dtype: c_int,
        act: c_int,
        v: *mut c_void,
        d: *mut c_void,
        partial: *mut c_void,
        bias: *mut c_void,
        rows: i64,
        n: c_int,
        ranges: c_int,
        recompute: c_int,
        stream: RawStream,
    ) -> c_int;
}
