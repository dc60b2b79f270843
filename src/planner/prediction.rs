//! What it takes a trained model to predict one sample: for models that a job makes smaller, and for their teachers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::estimate::batch_bytes;
use crate::base::features::Features;
use crate::base::{MicroBatchSpec, Role};
use crate::graph::network::{Executor, Network};
use crate::memory::Ledger;
use crate::params::ParamLayout;

/// What predicting one sample takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PredictionCost {
    /// Parameters of the model.
    pub parameters: u64,
    /// Floating-point operations. Weights that are pruned to zero count: most runtimes multiply by them. Channels and
    /// heads that are pruned do not: an export has none of them.
    pub operations: u64,
    /// Bytes of the weights and, at its peak, of the pass.
    pub memory_bytes: u64,
}

/// The model that a job prunes or distills, and the teacher of the latter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SmallerModel {
    pub model: PredictionCost,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<PredictionCost>,
}

impl PredictionCost {
    /// By a dry run for one sample; the batch of `spec` is ignored.
    pub fn of(network: &Network, layout: &ParamLayout, features: &Features, spec: MicroBatchSpec) -> Self {
        let (spec, ledger) = (MicroBatchSpec { batch: 1, ..spec }, Ledger::planning());
        // A planning ledger has no limit, so nothing here fails.
        let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, spec)).ok();
        let exec = Executor::new(None, spec, &ledger);
        drop(network.logits(&exec, None));
        let layers = network.layers().into_iter().map(|layer| layer.cost(spec).flops).sum::<u64>();
        let weights = layout.params.len * spec.dtype.size_in_bytes() + layout.stats.len * size_of::<f32>();
        Self {
            parameters: layout.params.len as u64,
            operations: layers + network.loss.cost(spec).flops,
            memory_bytes: weights as u64 + ledger.peak(),
        }
    }
}
