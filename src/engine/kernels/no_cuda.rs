//! In place of `cuda` in a build without it: the same names with no values, so that the code of offload is compiled in
//! every build.

use std::convert::Infallible;

use candle_core::{CudaDevice, DType, Error, Result, Shape, Tensor};

/// The GPU that holds a tensor: none.
pub fn device_of(_: &Tensor) -> Option<&CudaDevice> {
    None
}

pub fn uninit(_: &CudaDevice, _: DType, _: impl Into<Shape>) -> Result<Tensor> {
    Err(Error::NotCompiledWithCudaSupport)
}

pub mod copy_streams {
    use super::*;

    pub enum StreamEvent {}

    pub struct CopyStreams(Infallible);

    impl CopyStreams {
        pub fn new(_: &CudaDevice) -> Result<Self> {
            Err(Error::NotCompiledWithCudaSupport)
        }

        pub fn record_compute(&self) -> Result<StreamEvent> {
            match self.0 {}
        }

        pub fn compute_wait(&self, _: &StreamEvent) -> Result<()> {
            match self.0 {}
        }

        pub fn copy_to_device(
            &self,
            _: &PinnedBuffer,
            _: usize,
            _: &Tensor,
            _: &StreamEvent,
        ) -> Result<StreamEvent> {
            match self.0 {}
        }

        pub fn copy_to_host(&self, _: &Tensor, _: &PinnedBuffer, _: usize) -> Result<StreamEvent> {
            match self.0 {}
        }

        pub fn synchronize(&self) -> Result<()> {
            match self.0 {}
        }
    }

    pub struct PinnedBuffer(Infallible);

    impl PinnedBuffer {
        pub fn new(_: &CudaDevice, _: DType, _: usize) -> Result<Self> {
            Err(Error::NotCompiledWithCudaSupport)
        }

        pub fn tensor(&self) -> &Tensor {
            match self.0 {}
        }

        pub fn bytes(&self) -> usize {
            match self.0 {}
        }
    }
}
