//! How long an update would take: what ways of running are compared by. The ratios matter, not their truth;
//! `trainer plan --measure` asks the clock.

use super::estimate::{Estimate, ExecutionPlan};
use super::plan::Offload;

/// What is known of a job's speed on a machine, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// An update's forward pass, block by block in the order in which blocks are recomputed; the backward
    /// pass takes twice that.
    pub block_forward: Vec<f64>,
    /// The same of the loss.
    pub loss_forward: f64,
    /// The fixed work of one micro-batch.
    pub micro_batch_overhead: f64,
    /// Moving the weights, with the optimizer's state as stated and in bytes.
    pub update: f64,
    pub update_8bit: f64,
    /// Moving that state to the host and back, both at once.
    pub state_transfer: f64,
    pub state_transfer_8bit: f64,
    /// Bytes a second between the device and the host.
    pub host_bandwidth: f64,
    /// Samples in an update.
    pub samples: f64,
}

impl CostModel {
    /// Seconds of an update if no activations are moved between device and host: never more than [`Self::update_seconds`],
    /// and known without an estimate.
    pub fn lower_bound(&self, accumulation_steps: usize, exec_plan: ExecutionPlan) -> f64 {
        let (update, state) = match exec_plan.state_8bit {
            true => (self.update_8bit, self.state_transfer_8bit),
            false => (self.update, self.state_transfer),
        };
        let transfer = if exec_plan.offloads(Offload::OptimizerState) { state } else { 0.0 };
        self.pass_seconds(accumulation_steps, exec_plan) + update + transfer
    }

    /// Seconds of an update; more micro-batches of the same samples never take less. Activations move while
    /// blocks compute; optimizer state is waited for.
    pub fn update_seconds(
        &self,
        accumulation_steps: usize,
        exec_plan: ExecutionPlan,
        estimate: &Estimate,
    ) -> f64 {
        let passes = self.pass_seconds(accumulation_steps, exec_plan);
        let transfer = estimate.transfer_bytes as f64 * self.samples
            / exec_plan.micro_batch as f64
            / self.host_bandwidth;
        self.lower_bound(accumulation_steps, exec_plan) + (transfer - passes).max(0.0)
    }

    fn pass_seconds(&self, accumulation_steps: usize, exec_plan: ExecutionPlan) -> f64 {
        let recomputed: f64 = self.block_forward.iter().take(exec_plan.recompute).sum();
        let forward = self.block_forward.iter().sum::<f64>() + self.loss_forward;
        3.0 * forward + recomputed + accumulation_steps as f64 * self.micro_batch_overhead
    }
}
