//! How long an update would take: what ways of running are compared by. The ratios matter, not their truth;
//! `trainer plan --measure` asks the clock.

use super::estimate::{Estimate, Way};
use super::plan::Offload;

/// What is known of a job's speed on a machine, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Times {
    /// An update's forward pass, block by block in the order in which blocks are recomputed; the backward
    /// pass takes twice that.
    pub blocks: Vec<f64>,
    /// The same of the loss.
    pub loss: f64,
    /// The fixed work of one micro-batch.
    pub micro_batch: f64,
    /// Moving the weights, with the optimizer's state as stated and in bytes.
    pub update: f64,
    pub update_8bit: f64,
    /// Moving that state to the host and back, both at once.
    pub state: f64,
    pub state_8bit: f64,
    /// Bytes a second between the device and the host.
    pub link: f64,
    /// Samples in an update.
    pub samples: f64,
}

impl Times {
    /// Seconds of an update if no activations are moved between device and host: never more than [`Self::of`],
    /// and known without an estimate.
    pub fn floor(&self, accumulation_steps: usize, way: Way) -> f64 {
        let (update, state) = match way.eight_bit {
            true => (self.update_8bit, self.state_8bit),
            false => (self.update, self.state),
        };
        let waited = if way.offloads(Offload::OptimizerState) { state } else { 0.0 };
        self.passes(accumulation_steps, way) + update + waited
    }

    /// Seconds of an update; more micro-batches of the same samples never take less. Activations move while
    /// blocks compute; optimizer state is waited for.
    pub fn of(&self, accumulation_steps: usize, way: Way, estimate: &Estimate) -> f64 {
        let passes = self.passes(accumulation_steps, way);
        let moving = estimate.moved as f64 * self.samples / way.micro_batch as f64 / self.link;
        self.floor(accumulation_steps, way) + (moving - passes).max(0.0)
    }

    fn passes(&self, accumulation_steps: usize, way: Way) -> f64 {
        let again: f64 = self.blocks.iter().take(way.recompute).sum();
        let forward = self.blocks.iter().sum::<f64>() + self.loss;
        3.0 * forward + again + accumulation_steps as f64 * self.micro_batch
    }
}
