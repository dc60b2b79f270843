//! The interface of `gpu.rs` in builds without CUDA: batches need no staging.

use std::convert::Infallible;

use candle_core::Device;

use super::BatchSpec;
use crate::data::HostBatch;
use crate::graph::network::{DeviceBatch, StepError};
use crate::train::engine::Ledgers;

pub struct GpuStaging(Infallible);

impl GpuStaging {
    pub fn new(_: &Device, _: &Ledgers) -> Option<Self> {
        None
    }

    pub fn clear(&self) {
        match self.0 {}
    }

    pub fn reserve_buffers(&self, _: &HostBatch, _: BatchSpec) -> Result<(), StepError> {
        match self.0 {}
    }

    pub fn to_tensors(&self, _: &HostBatch, _: BatchSpec) -> Result<DeviceBatch, StepError> {
        match self.0 {}
    }
}
