//! What a run is started with, what may observe it, and how it ends.

use std::path::PathBuf;
use std::sync::Arc;

use crate::data::DatasetContext;
use crate::data::digest::Digest;
use crate::data::fingerprint::DataFingerprint;
use crate::memory::InjectedOom;
use crate::memory::gpu::GpuDevice;
use crate::memory::pressure::PressureMonitor;
use crate::param_store::ParamStore;
use crate::train::Failure;
use crate::train::fault_injection::FaultHooks;
use crate::train::run_dir::RequestedRun;
use crate::train::signals::{Signal, Signals};
use crate::train::supervisor::RestartInfo;

/// Options of a run beyond its job.
#[derive(Default)]
pub struct RunOptions {
    pub requested: RequestedRun,
    /// Parent directory of runs without an explicit run directory.
    pub runs: PathBuf,
    /// Timestamp that names a new run.
    pub stamp: String,
    /// Stop after this many updates.
    pub max_steps: Option<u64>,
    /// Host memory budget, in bytes.
    pub ram: u64,
    /// The GPU that computes; `None` for the CPU.
    pub gpu: Option<Arc<GpuDevice>>,
    /// Computes with candle's own operations instead of the kernels of the device.
    pub reference: bool,
    /// The process serves this run alone, so its memory outside the heap is measured and planned.
    pub own_process: bool,
    /// Context for opening the data.
    pub opening: DatasetContext,
    /// Reservations to fail, for tests of recovery.
    pub injected_oom: Option<InjectedOom>,
    pub signals: Signals,
    /// Watches the host memory that other processes leave.
    pub pressure_monitor: PressureMonitor,
    /// Set if a previous worker process of this run died.
    pub restart: Option<RestartInfo>,
    pub fault_hooks: FaultHooks,
    /// Fingerprint of the data, if it was computed.
    pub data: Option<DataFingerprint>,
    /// Permits resuming on data that differs from what the run was trained on.
    pub allow_changed_data: bool,
    /// Observes the run from inside. An observed run skips evaluation.
    pub observer: Option<Arc<dyn Observer>>,
}

/// Sees every update of a run: gives `verify` gradients and weights, which events do not carry.
pub trait Observer: Send + Sync {
    /// Called with the weights that a new run starts from, which it may change.
    fn on_start(&self, store: &ParamStore) -> Result<(), Failure> {
        let _ = store;
        Ok(())
    }

    /// Called when the gradients of update `step` (from 1) are complete and the weights have not moved. `loss` is the
    /// mean; the stored gradients times `factor` are the gradient of that mean; `requests` counts the ledger's
    /// reservations so far.
    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        requests: u64,
    ) -> Result<(), Failure>;

    /// Called after update `step`. `digest` covers the ids of all samples so far.
    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure>;
}

/// How a run ended, other than by failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    Done,
    Stopped(Signal),
}
