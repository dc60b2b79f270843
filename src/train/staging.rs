//! Turns a batch in host memory into tensors on the compute device.
//!
//! On the CPU this is a copy. To a GPU, batches go over a copy stream of their own (`gpu`), through staging buffers
//! that are reserved in the ledgers for the first batch, and again for one that does not fit them.

#[cfg_attr(not(feature = "cuda"), path = "staging/no_gpu.rs")]
mod gpu;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};

use super::engine::Ledgers;
use crate::base::features::{Features, InputSpec, TargetSpec};
use crate::data::{self, BatchValues};
use crate::graph::network::{DeviceBatch, StepError};
use crate::kernels::matmul::{self, Threading};
use crate::kernels::{Elem, pixel_lut};

pub struct BatchStaging {
    /// Dtype in which the network takes floats.
    dtype: DType,
    gpu: Option<gpu::GpuStaging>,
}

/// Dtype and shapes of a batch's tensors.
struct BatchSpec {
    dtype: DType,
    inputs: Vec<usize>,
    targets: Vec<usize>,
}

impl BatchStaging {
    /// For a network that takes floats as `dtype` on `device`.
    pub fn new(dtype: DType, device: &Device, ledgers: &Ledgers) -> Self {
        Self { dtype, gpu: gpu::GpuStaging::new(device, ledgers) }
    }

    /// Frees the staging buffers held for later batches.
    pub fn clear(&self) {
        self.gpu.iter().for_each(gpu::GpuStaging::clear);
    }

    /// Reserves staging buffers for a batch: for the first one, and for one that does not fit them.
    pub fn reserve_buffers(&self, batch: &data::HostBatch, features: &Features) -> Result<(), StepError> {
        self.gpu.iter().try_for_each(|gpu| gpu.reserve_buffers(batch, self.batch_spec(batch, features)))?;
        Ok(())
    }

    /// The tensors of a batch, with samples cut to the length of `features`.
    pub fn to_tensors(&self, batch: &data::HostBatch, features: &Features) -> Result<DeviceBatch, StepError> {
        let spec = self.batch_spec(batch, features);
        if let Some(gpu) = &self.gpu {
            return gpu.to_tensors(batch, spec);
        }
        let inputs = host_tensor(&batch.inputs, spec.inputs, spec.dtype)?;
        let targets = host_tensor(&batch.targets, spec.targets, DType::F32)?;
        Ok(DeviceBatch { inputs, targets, sample_info: None })
    }

    fn batch_spec(&self, batch: &data::HostBatch, features: &Features) -> BatchSpec {
        let rows = batch.ids.len();
        // Category indices are integers that bf16 or f16 would round.
        let (dtype, sample) = match &features.input {
            InputSpec::Floats { shape } => (self.dtype, shape.clone()),
            InputSpec::Tabular { .. } => (DType::F32, vec![features.input_len()]),
            InputSpec::Tokens { length, .. } => (DType::U32, vec![*length]),
        };
        // Validation targets are class indices even if mixup makes the training targets soft.
        let row = batch.targets.len() / rows.max(1);
        let targets = match if features.target == TargetSpec::Tokens { features.target_len() } else { row } {
            1 => vec![rows],
            n => vec![rows, n],
        };
        BatchSpec { dtype, inputs: [vec![rows], sample].concat(), targets }
    }
}

/// A tensor of rows, its floats rounded to `dtype` one by one, so that no copy of all is made in f32; takes from each
/// row the first values, as many as `shape` holds.
fn host_tensor(values: &BatchValues, shape: Vec<usize>, dtype: DType) -> candle_core::Result<Tensor> {
    fn rounded<T: Elem<Acc = f32>>(values: &[f32]) -> Vec<T> {
        let mut all = vec![T::from_acc(0.0); values.len()];
        matmul::round(values, &mut all, Threading::Parallel);
        all
    }
    let (row, taken) = (values.len() / shape[0].max(1), shape[1..].iter().product::<usize>());
    let device = &Device::Cpu;
    match (values, dtype) {
        (BatchValues::U8(bytes, lut), DType::BF16) => {
            Tensor::from_vec(pixel_lut::expand_bytes::<bf16>(lut, bytes), shape, device)
        }
        (BatchValues::U8(bytes, lut), DType::F16) => {
            Tensor::from_vec(pixel_lut::expand_bytes::<f16>(lut, bytes), shape, device)
        }
        (BatchValues::U8(bytes, lut), _) => {
            Tensor::from_vec(pixel_lut::expand_bytes::<f32>(lut, bytes), shape, device)?.to_dtype(dtype)
        }
        (BatchValues::F32(values), DType::BF16) => Tensor::from_vec(rounded::<bf16>(values), shape, device),
        (BatchValues::F32(values), DType::F16) => Tensor::from_vec(rounded::<f16>(values), shape, device),
        (BatchValues::F32(values), _) => Tensor::from_slice(values, shape, device)?.to_dtype(dtype),
        (BatchValues::U32(values), _) if taken == row => Tensor::from_slice(values, shape, device),
        (BatchValues::U32(values), _) => {
            let mut all = Vec::with_capacity(shape[0] * taken);
            values.chunks_exact(row.max(1)).for_each(|row| all.extend_from_slice(&row[..taken]));
            Tensor::from_vec(all, shape, device)
        }
    }
}
