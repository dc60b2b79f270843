//! Uploads batches to a GPU: reserves the staging buffers, copies through them, and frees them.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Tensor};

use super::BatchSpec;
use crate::base::Role;
use crate::base::features::PixelLut;
use crate::data::{self, BatchValues};
use crate::graph::network::{DeviceBatch, StepError};
use crate::kernels::cuda::staging_buffer::{self, BATCH_TENSORS, HostView, StagingBuffer};
use crate::kernels::update::cast_into;
use crate::kernels::{cuda, pixel_lut, sample_keys};
use crate::memory::Reservation;
use crate::planner::estimate::STAGED_BATCH;
use crate::train::engine::Ledgers;

pub struct GpuStaging {
    device: CudaDevice,
    ledgers: Ledgers,
    /// The buffers, with their reservations on the device and on the host.
    buffers: RefCell<Option<(StagingBuffer, [Reservation; 2])>>,
    pixel_lut: RefCell<Option<(Arc<PixelLut>, Tensor)>>,
}

impl GpuStaging {
    /// `None` on the CPU.
    pub fn new(device: &Device, ledgers: &Ledgers) -> Option<Self> {
        let Device::Cuda(device) = device else { return None };
        Some(Self {
            device: device.clone(),
            ledgers: ledgers.clone(),
            buffers: RefCell::default(),
            pixel_lut: RefCell::default(),
        })
    }

    pub fn clear(&self) {
        self.buffers.take();
    }

    /// As [`BatchStaging::reserve_buffers`](super::BatchStaging::reserve_buffers).
    pub fn reserve_buffers(&self, batch: &data::HostBatch, spec: BatchSpec) -> Result<(), StepError> {
        self.with_parts(batch, &spec, |parts| {
            let held_buffers = self.buffers.take().filter(|(buffers, _)| buffers.fits(parts));
            self.buffers.replace(Some(held_buffers.map_or_else(|| self.allocate_buffers(parts), Ok)?));
            Ok(())
        })
    }

    /// As [`BatchStaging::to_tensors`](super::BatchStaging::to_tensors).
    pub fn to_tensors(&self, batch: &data::HostBatch, spec: BatchSpec) -> Result<DeviceBatch, StepError> {
        self.with_parts(batch, &spec, |parts| {
            let held_buffers = self.buffers.take().filter(|(buffers, _)| buffers.fits(parts));
            let (mut buffers, reservations) =
                held_buffers.map_or_else(|| self.allocate_buffers(parts), Ok)?;
            let tensors = buffers.upload(parts, |arrived| {
                let uninit = |dtype, like: &Tensor| cuda::uninit(&self.device, dtype, like.shape());
                let [inputs, targets, staged] = arrived else { candle_core::bail!("three parts arrive") };
                let tensors = DeviceBatch {
                    inputs: uninit(spec.dtype, inputs)?,
                    targets: uninit(targets.dtype(), targets)?,
                    sample_info: Some(uninit(DType::U32, staged)?),
                };
                match &batch.inputs {
                    BatchValues::U8(_, lut) => {
                        pixel_lut::expand(inputs, &self.upload_pixel_lut(lut)?, &tensors.inputs)?
                    }
                    BatchValues::F32(_) => cast_into(inputs, &tensors.inputs)?,
                    BatchValues::U32(_) => cuda::copy_into(&self.device, inputs, &tensors.inputs)?,
                }
                cuda::copy_into(&self.device, targets, &tensors.targets)?;
                tensors.sample_info.iter().try_for_each(|to| cuda::copy_into(&self.device, staged, to))?;
                Ok(tensors)
            });
            self.buffers.replace(Some((buffers, reservations)));
            Ok(tensors?)
        })
    }

    fn with_parts<R>(
        &self,
        batch: &data::HostBatch,
        spec: &BatchSpec,
        body: impl FnOnce(&[HostView; BATCH_TENSORS]) -> R,
    ) -> R {
        let sample_keys = sample_keys::pack_sample_info(batch.epoch, &batch.ids, &batch.lengths);
        let keys_part = HostView {
            bytes: bytemuck::cast_slice(&sample_keys),
            pitch_bytes: 4 * sample_keys.len(),
            width_bytes: 4 * sample_keys.len(),
            dtype: DType::U32,
            shape: vec![sample_keys.len()],
        };
        body(&[
            part(&batch.inputs, spec.inputs.clone()),
            part(&batch.targets, spec.targets.clone()),
            keys_part,
        ])
    }

    /// The pixel lookup table on the GPU, (channels, 256); uploaded when it changes.
    fn upload_pixel_lut(&self, lut: &Arc<PixelLut>) -> candle_core::Result<Tensor> {
        let held = self.pixel_lut.take().filter(|(held, _)| held == lut);
        let upload = || {
            let tables = lut.tables.as_flattened();
            Tensor::from_slice(tables, (lut.tables.len(), 256), &Device::Cuda(self.device.clone()))
        };
        let tables = held.map_or_else(upload, |(_, tables)| Ok(tables))?;
        self.pixel_lut.replace(Some((lut.clone(), tables.clone())));
        Ok(tables)
    }

    fn allocate_buffers(
        &self,
        parts: &[HostView; BATCH_TENSORS],
    ) -> Result<(StagingBuffer, [Reservation; 2]), StepError> {
        let bytes = staging_buffer::batch_bytes(parts) as u64;
        let device_reservation = self.ledgers.tensors.reserve(Role::Batch, STAGED_BATCH, bytes)?;
        let host_reservation = self.ledgers.host.reserve(Role::DataPipeline, STAGED_BATCH, bytes)?;
        Ok((StagingBuffer::new(&self.device, parts)?, [device_reservation, host_reservation]))
    }
}

fn part(values: &BatchValues, shape: Vec<usize>) -> HostView<'_> {
    let (bytes, dtype) = match values {
        BatchValues::U8(values, _) => (values.as_slice(), DType::U8),
        BatchValues::F32(values) => (bytemuck::cast_slice(values), DType::F32),
        BatchValues::U32(values) => (bytemuck::cast_slice(values), DType::U32),
    };
    let (rows, size) = (shape[0].max(1), dtype.size_in_bytes());
    let kept = shape[1..].iter().product::<usize>() * size;
    HostView { bytes, pitch_bytes: bytes.len() / rows, width_bytes: kept, dtype, shape }
}
