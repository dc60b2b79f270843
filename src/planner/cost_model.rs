//! Predicts the time of an update, to compare execution plans. Only the ratios matter, not the absolute values;
//! `trainer plan --measure` measures them.

use super::estimate::Estimate;
use super::execution_plan::{ExecutionPlan, Offload};
use crate::job::OptimizerKind;

/// Time estimates for a job on a machine, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct CostModel {
    /// Forward pass of an update per block, in the order in which blocks are recomputed. The backward pass takes twice
    /// as long.
    pub block_forward: Vec<f64>,
    /// Forward pass of the loss.
    pub loss_forward: f64,
    /// Fixed overhead per micro-batch.
    pub micro_batch_overhead: f64,
    /// The optimizer step, with the stated optimizer state and with 8-bit state, if there is such a variant.
    pub update: f64,
    pub update_8bit: f64,
    /// Copying the optimizer state to the host and back, with both directions overlapped.
    pub state_transfer: f64,
    pub state_transfer_8bit: f64,
    /// Bytes per second between device and host.
    pub host_bandwidth: f64,
    /// Samples in an update.
    pub samples: f64,
}

impl CostModel {
    /// Seconds per update without activation transfers: at most [`Self::update_seconds`], and known without an
    /// estimate.
    pub fn lower_bound(&self, exec_plan: ExecutionPlan) -> f64 {
        let (update, state) = match exec_plan.optimizer == OptimizerKind::Adamw8bit {
            true => (self.update_8bit, self.state_transfer_8bit),
            false => (self.update, self.state_transfer),
        };
        let transfer = if exec_plan.offloads(Offload::OptimizerState) { state } else { 0.0 };
        self.pass_seconds(exec_plan) + update + transfer
    }

    /// Seconds per update; splitting the same samples into more micro-batches never takes less. Activation transfers
    /// overlap compute; optimizer state transfers do not.
    pub fn update_seconds(&self, exec_plan: ExecutionPlan, estimate: &Estimate) -> f64 {
        let passes = self.pass_seconds(exec_plan);
        let transfer = estimate.transfer_bytes as f64 * self.samples
            / exec_plan.micro_batch as f64
            / self.host_bandwidth;
        self.lower_bound(exec_plan) + (transfer - passes).max(0.0)
    }

    fn pass_seconds(&self, exec_plan: ExecutionPlan) -> f64 {
        let recomputed: f64 = self.block_forward.iter().take(exec_plan.recompute).sum();
        let forward = self.block_forward.iter().sum::<f64>() + self.loss_forward;
        3.0 * forward + recomputed + exec_plan.accumulation_steps as f64 * self.micro_batch_overhead
    }
}

/// Ranks blocks for recompute: least time per freed byte first; on ties the earlier block, whose activations live
/// longest; blocks that free nothing last. Returns the rank of each block.
pub fn recompute_ranks(flops: &[u64], freed: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..flops.len()).collect();
    // Compares flops / freed without division; a block that frees nothing has infinite cost per byte.
    order.sort_by(|&a, &b| {
        let cost = |x: usize, y: usize| u128::from(flops[x].max(1)) * u128::from(freed[y]);
        match (freed[a], freed[b]) {
            (0, 0) => std::cmp::Ordering::Equal,
            (0, _) => std::cmp::Ordering::Greater,
            (_, 0) => std::cmp::Ordering::Less,
            _ => cost(a, b).cmp(&cost(b, a)),
        }
    });
    let mut ranks = vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(rank, block)| ranks[block] = rank);
    ranks
}
