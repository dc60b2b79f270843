//! Cross-entropy on a GPU: cuBLASLt GEMMs around a kernel that computes loss and gradient in place, or the kernels of
//! `fused`.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Device, Result, Tensor, bail};

use super::fused::{CrossEntropyChunk, HopperCrossEntropy};
use super::{ClassWeights, LinearCrossEntropy, cuda_chunk_rows, cuda_logit_stride};
use crate::kernels::cuda::column_sums::add_column_sums;
use crate::kernels::cuda::cublaslt::{Addend, Epilogue, GpuMat, matmul};
use crate::kernels::cuda::{
    RawStream, capacity, check_status, dtype_code, graph, pointer, pointer_or_null, stream, uninit,
};
use crate::kernels::linear::WeightBiasGrads;
use crate::kernels::metric_sums::PendingMetricSums;
use crate::kernels::metric_sums::gpu::RowMetrics;

impl LinearCrossEntropy<'_> {
    pub(super) fn forward_backward_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<(PendingMetricSums, Option<Tensor>)> {
        let dx = needs_input_grad.then(|| uninit(device, x.dtype(), x.shape())).transpose()?;
        let metrics = self.run_chunks_cuda(device, x, targets, Some((scale, grads, dx.as_ref())))?;
        Ok((metrics, dx))
    }

    pub(super) fn evaluate_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        targets: &Tensor,
    ) -> Result<PendingMetricSums> {
        self.run_chunks_cuda(device, x, targets, None)
    }

    fn run_chunks_cuda(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        targets: &Tensor,
        backward: Option<(f64, &WeightBiasGrads, Option<&Tensor>)>,
    ) -> Result<PendingMetricSums> {
        let (classes, width) = self.weight.dims2()?;
        let rows = x.elem_count() / width;
        let per_row = targets.elem_count() / rows.max(1);
        if ![1, 2, 3].contains(&per_row) || per_row * rows != targets.elem_count() {
            bail!("{} target values for {rows} rows", targets.elem_count())
        }
        let (chunk, stride) = (cuda_chunk_rows(x.dtype(), rows, classes), cuda_logit_stride(classes));
        let logits = uninit(device, x.dtype(), chunk * stride)?;
        let weights = self.class_weights.map(|weights| weights.to_device(x.device())).transpose()?;
        let class_weight_sum = match self.class_weights {
            Some(w) => w.iter().map(|w| *w as f64).sum(),
            None => classes as f64,
        };
        let row_metrics = RowMetrics::new(device, rows)?;
        let padded_classes = self.padded_classes(classes, width, backward.map(|(_, grads, _)| grads))?;
        let w = GpuMat::new(self.weight, padded_classes, width);
        let fused = match backward {
            Some(_) if per_row == 1 => HopperCrossEntropy::new(self, device, x, chunk)?,
            _ => None,
        };
        for first in (0..rows).step_by(chunk.max(1)) {
            let n = chunk.min(rows - first);
            let part = |of| GpuMat { offset: first * width, rows: n, ..GpuMat::new(of, rows, width) };
            let x = part(x);
            let d = GpuMat { rows: n, cols: padded_classes, ..GpuMat::new(&logits, chunk, stride) };
            let targets = pointer(targets)?.cast::<u32>().wrapping_add(first * per_row);
            let row_ptrs = row_metrics.row_ptrs(first)?;
            if let (Some(fused), Some((scale, grads, dx))) = (&fused, backward) {
                fused.forward_backward(
                    device,
                    CrossEntropyChunk { x, logits: d, dx: dx.map(part), targets, row_ptrs },
                    scale,
                    grads,
                )?;
                continue;
            }
            matmul(&d, x, w.t(), Addend::Zero, Epilogue::Identity)?;
            let (loss, weight, hits) = row_ptrs;
            let args = CrossEntropyArgs {
                dtype: dtype_code(logits.dtype())?,
                backward: backward.is_some() as c_int,
                logits: pointer(&logits)?,
                bias: pointer_or_null(self.bias)?,
                class_weights: pointer_or_null(weights.as_ref())?.cast(),
                targets,
                loss,
                weight,
                hits,
                rows: n as i64,
                stride: stride as i64,
                classes: classes as c_int,
                padded_classes: padded_classes as c_int,
                per_row: per_row as c_int,
                smoothing: self.smoothing,
                focal_gamma: self.focal_gamma,
                class_weight_sum,
                scale: backward.map_or(0.0, |(scale, ..)| scale),
            };
            // SAFETY: every pointer refers to `n` rows, or to a value per class.
            check_status("cross_entropy_loss_grad", unsafe {
                cross_entropy_loss_grad(&args, stream(device))
            })?;
            let Some((_, grads, dx)) = backward else { continue };
            if let Some(dweight) = grads.weight {
                let into = GpuMat::new(dweight, padded_classes, width);
                matmul(&into, d.t(), x, Addend::Output, Epilogue::Identity)?;
            }
            if let Some(dx) = dx {
                matmul(&part(dx), d, w, Addend::Zero, Epilogue::Identity)?;
            }
            if let Some(bias) = grads.bias {
                add_column_sums(device, bias, GpuMat { cols: classes, ..d })?;
            }
        }
        row_metrics.reduce(device)
    }

    /// The number of classes to run GEMMs with: padded for tensor cores, if the memory behind the weight's rows is
    /// readable. It belongs to other parameters in the same flat buffer. Nothing reads the extra logits, and the extra
    /// gradients are zero.
    fn padded_classes(&self, classes: usize, width: usize, grads: Option<&WeightBiasGrads>) -> Result<usize> {
        let padded = classes.next_multiple_of(8);
        let mut available = capacity(self.weight)?;
        if let Some(dweight) = grads.and_then(|grads| grads.weight) {
            available = available.min(capacity(dweight)?);
        }
        Ok(if padded * width <= available { padded } else { classes })
    }
}

impl ClassWeights {
    /// Uploaded by the first pass that needs them, which is never captured, and kept.
    pub(in crate::kernels) fn to_device(&self, device: &Device) -> Result<Tensor> {
        if let Some(tensor) = self.uploaded.get() {
            return Ok(tensor.clone());
        }
        graph::not_capturable("class weights are not on the device yet");
        let tensor = Tensor::new(&**self, device)?;
        Ok(self.uploaded.get_or_init(|| tensor).clone())
    }
}

/// `CrossEntropyArgs` in cross_entropy.cu.
#[repr(C)]
struct CrossEntropyArgs {
    dtype: c_int,
    backward: c_int,
    logits: *mut c_void,
    bias: *const c_void,
    class_weights: *const f32,
    targets: *const u32,
    loss: *mut f64,
    weight: *mut f64,
    hits: *mut u32,
    rows: i64,
    stride: i64,
    classes: c_int,
    padded_classes: c_int,
    per_row: c_int,
    smoothing: f64,
    focal_gamma: f64,
    class_weight_sum: f64,
    scale: f64,
}

unsafe extern "C" {
    fn cross_entropy_loss_grad(args: *const CrossEntropyArgs, stream: RawStream) -> c_int;
}
