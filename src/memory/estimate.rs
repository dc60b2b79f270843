//! What a run would hold, without running it: the network is walked with no tensors, and the ledger it
//! asks says what is live at every moment. Not a factor, not a sum: lifetimes.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::DType;

use super::ledger::{Entry, Ledger};
use super::plan::Role;
use crate::features::Features;
use crate::layers::At;
use crate::layers::network::{Network, Walk};
use crate::params::Layout;

/// Heap bytes the program holds beside what it asks for: the measured size of argument parsing, the
/// job, the network's description, thread pools and the reports, with room to spare.
pub const PROGRAM: u64 = 3 << 19;

/// Heap bytes a thread of the matrix product keeps for packing: with `gemm` 0.19 as much as the second-level
/// cache of a core. What a product packs beside it is in the workspaces of kernels.
pub const PACKING: u64 = 2 << 20;

/// A job, as far as its memory is concerned.
pub struct Subject<'a> {
    pub network: &'a Network,
    pub layout: &'a Layout,
    pub features: &'a Features,
    pub dtype: DType,
    pub threads: usize,
    pub optimizer_state: u64,
    /// Bytes an update takes while it runs.
    pub update_workspace: u64,
    /// A moving average of the weights is kept.
    pub average: bool,
    /// Bytes the data holds whatever the batch.
    pub resident_data: u64,
    /// Bytes the loader holds for a micro-batch of this size.
    pub pipeline: &'a dyn Fn(usize) -> u64,
    pub train_samples: u64,
    pub valid_samples: u64,
}

/// How a step is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub micro_batch: usize,
    pub recompute: usize,
    pub eval_micro_batch: usize,
}

/// What is live at the worst moment of each phase.
#[derive(Clone, Debug)]
pub struct Estimate {
    pub peak: u64,
    pub phase: &'static str,
    /// The highest moment of every phase, in order.
    pub phases: Vec<(&'static str, u64)>,
    /// What is live at the peak, largest first within a role.
    pub parts: Vec<(Role, Arc<str>, u64)>,
}

/// Bytes of the type parameters are kept in.
fn wide(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// What a run holds from its start to its end, in the order it asks for it.
pub fn permanent(s: &Subject) -> Vec<(Role, &'static str, u64)> {
    let (params, stats, wide) = (s.layout.params.len as u64, s.layout.stats.len as u64, wide(s.dtype));
    let copy =
        if s.dtype.size_in_bytes() as u64 == wide { 0 } else { params * s.dtype.size_in_bytes() as u64 };
    vec![
        (Role::Reserve, "program", PROGRAM + s.threads as u64 * PACKING),
        (Role::Weights, "master weights", (params + stats) * wide),
        (Role::Weights, "computed copy", copy),
        (Role::Weights, "moving average", if s.average { params * wide } else { 0 }),
        (Role::Weights, "statistics before an update", stats * wide),
        (Role::Gradients, "gradients", params * wide),
        (Role::OptimizerState, "optimizer state", s.optimizer_state),
        (Role::DataPipeline, "data in memory", s.resident_data),
    ]
}

/// Bytes of a micro-batch as tensors.
pub fn batch_bytes(features: &Features, samples: usize) -> u64 {
    4 * (samples * (features.input_len() + features.target_len())) as u64
}

/// Bytes a checkpoint is written with: the largest parameter whose order other tools have otherwise, and
/// the file's buffer.
pub fn checkpoint_bytes(layout: &Layout, dtype: DType) -> u64 {
    let turned = layout.params.iter().filter(|(spec, _)| spec.lies == crate::params::Lies::ChannelsLast);
    turned.map(|(spec, _)| spec.len() as u64).max().unwrap_or(0) * wide(dtype) + (1 << 20)
}

impl Estimate {
    pub fn new(s: &Subject, way: Way) -> Self {
        let ledger = Ledger::planning();
        // A planning ledger has no limit, so no ask fails.
        let ask = |role, name: &str, bytes| ledger.reserve(role, name, bytes).ok();
        let _held: Vec<_> =
            permanent(s).into_iter().map(|(role, name, bytes)| ask(role, name, bytes)).collect();
        let at = |batch: usize| At { batch, dtype: s.dtype, threads: s.threads };
        let _pipeline = ask(Role::DataPipeline, "prefetch", (s.pipeline)(way.micro_batch));
        {
            ledger.phase("forward");
            let batch = way.micro_batch.min(s.train_samples as usize);
            let _batch = ask(Role::Batch, "micro-batch", batch_bytes(s.features, batch));
            let walk = Walk { pass: None, at: at(batch), ledger: &ledger, recompute: way.recompute };
            let _ = s.network.learn(&walk, None);
        }
        ledger.phase("update");
        drop(ask(Role::Workspace, "optimizer", s.update_workspace));
        if s.valid_samples > 0 {
            ledger.phase("eval");
            let batch = way.eval_micro_batch.min(s.valid_samples as usize);
            let _pipeline = ask(Role::DataPipeline, "evaluation prefetch", (s.pipeline)(batch));
            let _batch = ask(Role::Batch, "micro-batch", batch_bytes(s.features, batch));
            let walk = Walk { pass: None, at: at(batch), ledger: &ledger, recompute: 0 };
            let _ = s.network.judge(&walk, None);
        }
        ledger.phase("checkpoint");
        drop(ask(Role::CheckpointWriting, "checkpoint", checkpoint_bytes(s.layout, s.dtype)));
        Self::from_log(&ledger.log())
    }

    fn from_log(log: &[Entry]) -> Self {
        let (mut live, mut peak, mut peak_at) = (0i64, 0i64, 0);
        let mut phases: Vec<(&'static str, u64)> = Vec::new();
        for (i, entry) in log.iter().enumerate() {
            live += entry.change;
            if live > peak {
                (peak, peak_at) = (live, i);
            }
            match phases.iter_mut().find(|(name, _)| *name == entry.phase) {
                Some((_, highest)) => *highest = (*highest).max(live as u64),
                None => phases.push((entry.phase, live as u64)),
            }
        }
        let mut held: BTreeMap<(Role, &Arc<str>), i64> = BTreeMap::new();
        for entry in &log[..(peak_at + 1).min(log.len())] {
            *held.entry((entry.role, &entry.name)).or_default() += entry.change;
        }
        let mut parts: Vec<(Role, Arc<str>, u64)> =
            held.into_iter().filter(|(_, n)| *n > 0).map(|((r, n), b)| (r, n.clone(), b as u64)).collect();
        parts.sort_by_key(|(role, _, bytes)| (*role, std::cmp::Reverse(*bytes)));
        let phase = log.get(peak_at).map_or("start", |entry| entry.phase);
        Self { peak: peak as u64, phase, phases, parts }
    }
}
