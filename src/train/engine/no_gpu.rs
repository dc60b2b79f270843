//! The interface of `gpu.rs` in builds without CUDA; it does nothing.

use std::marker::PhantomData;

use candle_core::Tensor;

use crate::base::Role;
use crate::events::event::Event;
use crate::graph::network::{DeviceBatch, StepError};
use crate::job::OptimizerConfig;
use crate::kernels::grad_stats::{GradStats, GradStatsConfig};
use crate::layers::loss::PendingMetricSums;
use crate::memory::Ledger;
use crate::param_store::ParamStore;
use crate::train::pass_key::PassKey;
use crate::train::setup::Setup;

pub struct GpuState;

impl GpuState {
    pub fn new(_: &Setup, _: &OptimizerConfig, _: &ParamStore, _: bool) -> candle_core::Result<Self> {
        Ok(Self)
    }

    pub fn take_capture_event(&self, _: u64) -> Option<Event> {
        None
    }

    pub fn no_graph_event(&self, _: u64) -> Option<Event> {
        None
    }

    pub fn release_graphs(&self) {}

    pub fn take_cudnn_failure(&self) -> Option<String> {
        None
    }

    pub fn without_failing_cudnn<R>(&self, pass: impl Fn() -> Result<R, StepError>) -> Result<R, StepError> {
        pass()
    }

    pub fn launch_grad_stats(
        &mut self,
        _: &[PendingMetricSums],
        _: &Tensor,
        _: &GradStatsConfig,
    ) -> Option<candle_core::Result<PendingGradStats>> {
        None
    }

    pub fn pass_scope(&self, _: PassKey) -> PassScope<'_> {
        PassScope(PhantomData)
    }
}

/// There is none without a GPU.
pub enum PendingGradStats {}

impl PendingGradStats {
    pub fn read(&self) -> candle_core::Result<GradStats> {
        match *self {}
    }

    pub fn grad_scale(&self) -> candle_core::Result<Tensor> {
        match *self {}
    }
}

pub struct PassScope<'a>(PhantomData<&'a ()>);

impl PassScope<'_> {
    pub fn run(
        &self,
        batch: &DeviceBatch,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> Result<PendingMetricSums, StepError> {
        forward_backward(batch)
    }

    pub fn finish(&self) {}
}

pub fn map_oom(_: &Setup, _: &Ledger, _: Role, error: StepError) -> StepError {
    error
}
