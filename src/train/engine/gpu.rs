//! The GPU-only parts of an engine: captured passes, gradient statistics without a synchronize, evaluations without
//! cuDNN once it failed, and the mapping of failed allocations to errors.

use std::cell::Cell;

use candle_core::Tensor;

pub use crate::kernels::grad_stats::gpu::PendingGradStats;

use crate::base::Role;
use crate::events::event::Event;
use crate::graph::network::{DeviceBatch, StepError};
use crate::job::OptimizerConfig;
use crate::kernels::cuda::{cudnn, device_of, is_library_error, is_out_of_memory, launch_error};
use crate::kernels::grad_stats::GradStatsConfig;
use crate::kernels::grad_stats::gpu::DeviceGradStats;
use crate::layers::loss::PendingMetricSums;
use crate::memory::Ledger;
use crate::memory::gpu::DRIVER_RESERVE_BYTES;
use crate::optim;
use crate::param_store::ParamStore;
use crate::train::graph_cache::{CaptureOutcome, GraphCache, GraphScope};
use crate::train::pass_key::PassKey;
use crate::train::setup::Setup;

/// State of an engine that only a GPU needs; empty on the CPU.
#[derive(Default)]
pub struct GpuState {
    /// Computes gradient statistics on the GPU, if the optimizer reads them there: the host then does not
    /// synchronize.
    grad_stats: Option<DeviceGradStats>,
    /// Places passes in an arena and replays them as CUDA graphs.
    graphs: Option<GraphCache>,
    /// After the first failure of cuDNN, evaluations do not use it; the error is kept until it is reported.
    cudnn_failed: Cell<bool>,
    cudnn_failure: Cell<Option<String>>,
}

impl GpuState {
    /// `graphs` permits capturing passes as CUDA graphs.
    pub fn new(
        setup: &Setup,
        rule: &OptimizerConfig,
        store: &ParamStore,
        graphs: bool,
    ) -> candle_core::Result<Self> {
        let Some(gpu) = setup.gpu.as_ref().filter(|_| !setup.backend().is_reference()) else {
            return Ok(Self::default());
        };
        let grad_stats = match device_of(&store.master_weights) {
            Some(device) if optim::reads_device_grad_scale(rule) => Some(DeviceGradStats::new(device)?),
            _ => None,
        };
        Ok(Self { grad_stats, graphs: GraphCache::new(gpu, graphs)?, ..Self::default() })
    }

    pub fn take_capture_event(&self, step: u64) -> Option<Event> {
        self.graphs.as_ref().and_then(GraphCache::take_outcome).map(|outcome| match outcome {
            CaptureOutcome::Graph { launches, arena_bytes, lower_bound } => {
                let arena_waste_bytes = arena_bytes - lower_bound;
                Event::CudaGraphCaptured { step, launches, arena_bytes, arena_waste_bytes }
            }
            CaptureOutcome::Failed(reason) => Event::CudaGraphDisabled { step, reason: reason.to_string() },
        })
    }

    pub fn no_graph_event(&self, step: u64) -> Option<Event> {
        let reason = self.graphs.as_ref().and_then(GraphCache::why_never_captured)?;
        Some(Event::CudaGraphDisabled { step, reason: reason.to_string() })
    }

    pub fn release_graphs(&self) {
        self.graphs.iter().for_each(GraphCache::clear);
    }

    pub fn take_cudnn_failure(&self) -> Option<String> {
        self.cudnn_failure.take()
    }

    /// Runs an evaluation pass. If cuDNN fails, repeats it with our own kernels, and uses those from then on. Training
    /// never switches kernels: the same run would no longer be bitwise reproducible.
    pub fn without_failing_cudnn<R>(&self, pass: impl Fn() -> Result<R, StepError>) -> Result<R, StepError> {
        if !self.cudnn_failed.get() {
            let result = pass();
            let failure = match &result {
                Err(StepError::Tensor(error)) => launch_error(error).filter(|launch| launch.is_cudnn()),
                _ => None,
            };
            let Some(failure) = failure else { return result };
            self.cudnn_failed.set(true);
            self.cudnn_failure.set(Some(failure.to_string()));
        }
        cudnn::without(pass)
    }

    /// Starts computing gradient statistics on the GPU; `None` if the host must.
    pub fn launch_grad_stats(
        &mut self,
        pending_sums: &[PendingMetricSums],
        grads: &Tensor,
        terms: &GradStatsConfig,
    ) -> Option<candle_core::Result<PendingGradStats>> {
        self.grad_stats.as_mut().map(|stats| stats.launch(pending_sums, grads, terms))
    }

    /// Opens the scope that serves the allocations of a pass and may replay it as a CUDA graph.
    pub fn pass_scope(&self, key: PassKey) -> PassScope<'_> {
        PassScope(self.graphs.as_ref().map(|graphs| graphs.begin(key)))
    }
}

/// Scope of the current pass; empty on the CPU.
pub struct PassScope<'a>(Option<GraphScope<'a>>);

impl PassScope<'_> {
    pub fn run(
        &self,
        batch: &DeviceBatch,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> Result<PendingMetricSums, StepError> {
        match &self.0 {
            Some(scope) => scope.run(batch, forward_backward),
            None => forward_backward(batch),
        }
    }

    pub fn finish(&self) {
        self.0.iter().for_each(GraphScope::finish);
    }
}

/// Turns a failed GPU allocation into an OOM error: with the bytes requested from the heap and those available or, if
/// the driver itself ran out, with the driver's reserve and what is free of it.
pub fn map_oom(setup: &Setup, ledger: &Ledger, role: Role, error: StepError) -> StepError {
    let (StepError::Tensor(cause), Some(gpu)) = (&error, &setup.gpu) else { return error };
    let from_heap = gpu.take_last_oom();
    if is_out_of_memory(cause) {
        return StepError::Oom(match from_heap {
            Some((bytes, available)) => ledger.device_oom(role, bytes, available),
            None => ledger.driver_oom(DRIVER_RESERVE_BYTES, gpu.free_bytes()),
        });
    }
    // cuBLAS and cuDNN report a kernel that could not be loaded as an internal error.
    let free = gpu.free_bytes();
    if is_library_error(cause) && free < DRIVER_RESERVE_BYTES / 2 {
        return StepError::Oom(ledger.driver_oom(DRIVER_RESERVE_BYTES, free));
    }
    error
}
