//! Updates of a job outside of a run, to measure them: on the job's own data, under a ledger with the job's budget,
//! and with a learning rate of 0, so that every update does the same work.

use super::Failure;
use super::engine::{Engine, Ledgers};
use super::setup::Setup;
use crate::base::Role;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::graph::network::StepError;
use crate::memory::Reservation;
use crate::planner::ExecutionPlan;

/// What an update spends its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdatePart {
    /// Waiting for a micro-batch.
    Data,
    /// The forward and backward pass of a micro-batch, with its copy to the device.
    ForwardBackward,
    /// The norm of the gradient.
    GradStats,
    /// The optimizer.
    Update,
}

pub struct TrialUpdates<'a> {
    setup: &'a Setup,
    engine: Engine<'a>,
    loader: Loader,
    /// Updates so far.
    pub count: u64,
    _prefetch: Reservation,
}

impl<'a> TrialUpdates<'a> {
    /// `most` updates at most under `plan`; `graphs` permits CUDA graphs.
    pub fn start(
        setup: &'a Setup,
        ledgers: Ledgers,
        plan: ExecutionPlan,
        graphs: bool,
        most: u64,
    ) -> Result<Self, Failure> {
        let engine = Engine::new(setup, ledgers.clone(), plan, graphs && plan.offload.is_empty())?;
        let micro_batch = setup.loaded_batch(plan);
        let prefetch_bytes = setup.loader_bytes(micro_batch, plan.prefetch, most);
        let prefetch = ledgers.host.reserve(Role::DataPipeline, "prefetch", prefetch_bytes);
        let loader = Loader::start(
            setup.datasets.train.clone(),
            setup.order.clone(),
            Cursor::default(),
            most,
            setup.loader_options(micro_batch, plan.prefetch),
        )?;
        Ok(Self { setup, engine, loader, count: 0, _prefetch: prefetch.map_err(StepError::Oom)? })
    }

    /// Makes the next update without waiting for the device. Calls `ended` at the end of each part, which is where the
    /// next one begins.
    pub fn next_update(&mut self, mut ended: impl FnMut(UpdatePart)) -> Result<(), Failure> {
        let (mut pending_sums, mut samples) = (Vec::new(), 0);
        while samples < self.setup.order.update(self.count).len() {
            let Some(batch) = self.loader.next()? else { break };
            ended(UpdatePart::Data);
            samples += batch.consumed;
            if !batch.ids.is_empty() {
                pending_sums.push(self.engine.forward_backward(&batch, 1.0)?);
                ended(UpdatePart::ForwardBackward);
            }
        }
        let grad_stats = self.engine.compute_grad_stats(&pending_sums, 1.0, false)?;
        ended(UpdatePart::GradStats);
        self.count += 1;
        self.engine.update(&grad_stats, 0.0, self.count)?;
        ended(UpdatePart::Update);
        Ok(())
    }
}
