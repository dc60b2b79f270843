//! `trainer profile`: where the time and the memory of an update go, measured on updates of the job itself, beside what
//! was planned.

use std::collections::BTreeMap;
use std::time::Instant;

use candle_core::DType;
use serde::Serialize;

use super::Failure;
use super::engine::Ledgers;
use super::setup::Setup;
use super::trial_updates::{TrialUpdates, UpdatePart};
use crate::graph::network::{LayerBlock, Node};
use crate::graph::node_timer::{self, NodePass, NodeSpan, Spans};
use crate::kernels::dispatch::{Dispatch, dispatch};
use crate::kernels::kernel_timer::KernelSpan;
use crate::planner::budget::TargetMachine;
use crate::planner::plan::{MemoryPlan, PlanVerdict};

/// Seconds are means over the profiled updates, per update.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    pub updates: u64,
    pub update_s: f64,
    /// An update without a profile; the difference is the overhead.
    pub unprofiled_update_s: f64,
    /// Everything that an update does, in order: these add up to `update_s`.
    pub parts: Vec<PartTime>,
    /// In the order of the network.
    pub nodes: Vec<NodeProfile>,
    /// Whether matmuls in bf16 would be faster: they are in f32, and the processor multiplies bf16 (AMX).
    pub bf16_is_faster: bool,
    /// Within nodes and parts; empty on a GPU.
    pub kernels: Vec<KernelProfile>,
    pub blocks: Vec<BlockProfile>,
    pub plan: MemoryPlan,
    /// When each part, node and kernel ran.
    #[serde(skip)]
    pub timeline: Vec<TimelineSpan>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PartTime {
    pub name: &'static str,
    pub seconds: f64,
}

/// A layer, layers that the fusion pass joined, the sum of a residual block, or the loss.
#[derive(Clone, Debug, Default, Serialize)]
pub struct NodeProfile {
    pub name: String,
    /// Index in [`Profile::blocks`].
    pub block: usize,
    pub forward_s: f64,
    pub recompute_s: f64,
    pub backward_s: f64,
    /// The most that a pass over the node took beyond what was held before it: as planned, and as the allocator counted
    /// it on the host; 0 on a GPU.
    pub planned_bytes: u64,
    pub measured_bytes: u64,
}

impl NodeProfile {
    pub fn seconds(&self) -> f64 {
        self.forward_s + self.recompute_s + self.backward_s
    }
}

/// A kernel of a node in one of its passes, or of a part that has no nodes: its own time, without the kernels that it
/// calls. Those of a node never add up to more than its pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelProfile {
    /// Its file in `src/kernels`.
    pub kernel: &'static str,
    /// Name of a part.
    pub part: &'static str,
    /// Index in [`Profile::nodes`].
    pub node: Option<usize>,
    pub seconds: f64,
    /// Calls per update.
    pub calls: f64,
}

/// A block: what recomputing it would free, and cost.
#[derive(Clone, Debug, Serialize)]
pub struct BlockProfile {
    pub name: String,
    pub forward_s: f64,
    pub backward_s: f64,
    /// Bytes of saved activations that it frees if it saves only its input; 0 if it is recomputed already.
    pub freed_by_recompute_bytes: u64,
    pub is_recomputed: bool,
}

/// A part of an update, a node or a kernel, on the time axis of the profile.
#[derive(Clone, Debug)]
pub struct TimelineSpan {
    pub name: String,
    pub category: &'static str,
    /// Seconds since the first profiled update.
    pub start_s: f64,
    pub seconds: f64,
    pub reserved_bytes: u64,
    pub heap_bytes: u64,
}

/// Profiles `updates` updates under the plan of the job. `progress` is called with the updates done, of twice as many
/// and a warm-up.
pub fn profile(
    setup: &Setup,
    machine: &TargetMachine,
    updates: u64,
    mut progress: impl FnMut(u64),
) -> Result<Profile, Failure> {
    let plan = setup.plan_for(machine);
    if plan.verdict == PlanVerdict::DoesNotFit {
        return Err(Failure::DoesNotFit(Box::new(plan)));
    }
    // A graph runs as a whole, so none is captured; both halves are measured alike.
    let ledgers = Ledgers::new(setup, machine.ram, None);
    let mut trial = TrialUpdates::start(setup, ledgers, plan.chosen, false, 2 * updates + 1)?;
    trial.next_update(|_, _| {})?;
    let mut unprofiled = 0.0;
    for _ in 0..updates {
        unprofiled += trial.next_update(|_, _| {})?;
        progress(trial.count);
    }
    let origin = Instant::now();
    let (mut spans, mut recorded, mut seconds) = (Vec::new(), Spans::default(), 0.0);
    for _ in 0..updates {
        node_timer::start(setup.device());
        let update = trial.next_update(|part, begun| {
            spans.push((part, begun, begun.elapsed().as_secs_f64()));
        });
        recorded.append(node_timer::take());
        seconds += update?;
        progress(trial.count);
    }
    let per_update = 1.0 / updates as f64;
    let blocks = blocks(setup, machine, &plan);
    let mut profile = Profile {
        updates,
        update_s: seconds * per_update,
        unprofiled_update_s: unprofiled * per_update,
        parts: Vec::new(),
        nodes: node_profiles(setup, &recorded.nodes, per_update),
        bf16_is_faster: setup.gpu.is_none() && setup.dtype == DType::F32 && dispatch() == Dispatch::Amx,
        kernels: Vec::new(),
        blocks,
        plan,
        timeline: timeline(&spans, &recorded, origin),
    };
    profile.kernels = kernel_profiles(&profile.nodes, &spans, &recorded, per_update);
    profile.add_blocks();
    profile.add_parts(&spans, per_update);
    Ok(profile)
}

impl Profile {
    fn add_blocks(&mut self) {
        for node in &self.nodes {
            if let Some(block) = self.blocks.get_mut(node.block) {
                block.forward_s += node.forward_s;
                block.backward_s += node.backward_s + node.recompute_s;
            }
        }
    }

    fn add_parts(&mut self, spans: &[(UpdatePart, Instant, f64)], per_update: f64) {
        let spent =
            |part| spans.iter().filter(|(of, ..)| *of == part).map(|(.., s)| s).sum::<f64>() * per_update;
        let total = |of: fn(&NodeProfile) -> f64| self.nodes.iter().map(of).sum::<f64>();
        let (forward, recompute, backward) =
            (total(|node| node.forward_s), total(|node| node.recompute_s), total(|node| node.backward_s));
        let passes = spent(UpdatePart::ForwardBackward);
        let measured = [UpdatePart::Data, UpdatePart::GradStats, UpdatePart::Update].map(spent);
        let between = passes - forward - recompute - backward;
        let outside = self.update_s - passes - measured.iter().sum::<f64>();
        self.parts = vec![
            PartTime { name: "wait for data", seconds: measured[0] },
            PartTime { name: "forward", seconds: forward },
            PartTime { name: "recompute", seconds: recompute },
            PartTime { name: "backward", seconds: backward },
            PartTime { name: "gradient norm", seconds: measured[1] },
            PartTime { name: "optimizer", seconds: measured[2] },
            PartTime { name: "other", seconds: between + outside },
        ];
    }
}

/// The blocks of the network, and what recomputing each would free under `plan`.
fn blocks(setup: &Setup, machine: &TargetMachine, plan: &MemoryPlan) -> Vec<BlockProfile> {
    let freed = setup.estimator_for(machine).freed_by_recompute();
    let network = &setup.network;
    let of_block = |(block, freed): (&LayerBlock, u64)| {
        let is_recomputed = block.recompute_rank < plan.chosen.recompute;
        let bytes = freed * plan.chosen.micro_batch as u64;
        BlockProfile {
            name: block.name.clone(),
            forward_s: 0.0,
            backward_s: 0.0,
            freed_by_recompute_bytes: if is_recomputed { 0 } else { bytes },
            is_recomputed,
        }
    };
    let loss = BlockProfile {
        name: network.loss.name().to_owned(),
        forward_s: 0.0,
        backward_s: 0.0,
        freed_by_recompute_bytes: 0,
        is_recomputed: false,
    };
    network.blocks.iter().zip(freed).map(of_block).chain([loss]).collect()
}

/// Sums the spans of each node, in the order of the network.
fn node_profiles(setup: &Setup, spans: &[NodeSpan], per_update: f64) -> Vec<NodeProfile> {
    fn places(nodes: &[Node], block: usize, into: &mut BTreeMap<String, (usize, usize)>) {
        for node in nodes {
            if let Node::Residual(residual) = node {
                places(&residual.branch, block, into);
                places(&residual.shortcut, block, into);
            }
            let next = into.len();
            into.entry(node.describe()).or_insert((next, block));
        }
    }
    // Buckets of other lengths have networks of their own, with the same names.
    let mut place = BTreeMap::new();
    let network = &setup.network;
    network.blocks.iter().enumerate().for_each(|(i, block)| places(&block.nodes, i, &mut place));
    let next = place.len();
    place.insert(network.loss.name().to_owned(), (next, network.blocks.len()));
    let mut profiles = BTreeMap::<usize, NodeProfile>::new();
    for span in spans {
        let (at, block) = place.get(&span.name).copied().unwrap_or((next + 1, network.blocks.len()));
        let node = profiles.entry(at).or_insert_with(|| NodeProfile {
            name: span.name.clone(),
            block,
            ..NodeProfile::default()
        });
        let seconds = match span.pass {
            NodePass::Forward => &mut node.forward_s,
            NodePass::Recompute => &mut node.recompute_s,
            NodePass::Backward => &mut node.backward_s,
        };
        *seconds += span.seconds * per_update;
        node.planned_bytes = node.planned_bytes.max(span.reserved_bytes);
        node.measured_bytes = node.measured_bytes.max(span.heap_bytes);
    }
    profiles.into_values().collect()
}

fn pass_name(pass: NodePass) -> &'static str {
    match pass {
        NodePass::Forward => "forward",
        NodePass::Recompute => "recompute",
        NodePass::Backward => "backward",
    }
}

/// Sums the spans of each kernel within its node and pass, or within its part; those of a micro-batch outside of all
/// nodes belong to the part `other`.
fn kernel_profiles(
    nodes: &[NodeProfile],
    parts: &[(UpdatePart, Instant, f64)],
    recorded: &Spans,
    per_update: f64,
) -> Vec<KernelProfile> {
    let place: BTreeMap<&str, usize> =
        nodes.iter().enumerate().map(|(i, node)| (node.name.as_str(), i)).collect();
    let mut owners: Vec<Option<(&'static str, Option<usize>)>> = vec![None; recorded.kernels.len()];
    for span in &recorded.nodes {
        let node = place.get(span.name.as_str()).copied();
        owners[span.kernels.clone()].fill(Some((pass_name(span.pass), node)));
    }
    let mut sums: BTreeMap<(Option<usize>, &'static str, &'static str), (f64, f64)> = BTreeMap::new();
    for (span, owner) in recorded.kernels.iter().zip(owners) {
        let (part, node) = owner.unwrap_or_else(|| {
            let begun = parts.partition_point(|(_, begun, _)| *begun <= span.start);
            match parts[..begun].last() {
                Some((UpdatePart::GradStats, ..)) => ("gradient norm", None),
                Some((UpdatePart::Update, ..)) => ("optimizer", None),
                _ => ("other", None),
            }
        });
        let (seconds, calls) = sums.entry((node, part, span.kernel)).or_default();
        *seconds += span.self_seconds * per_update;
        *calls += per_update;
    }
    let profile =
        |((node, part, kernel), (seconds, calls))| KernelProfile { kernel, part, node, seconds, calls };
    let mut profiles: Vec<KernelProfile> = sums.into_iter().map(profile).collect();
    profiles.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    profiles
}

fn timeline(parts: &[(UpdatePart, Instant, f64)], recorded: &Spans, origin: Instant) -> Vec<TimelineSpan> {
    let of_part = |&(part, begun, seconds): &(UpdatePart, Instant, f64)| TimelineSpan {
        name: match part {
            UpdatePart::Data => "wait for data",
            UpdatePart::ForwardBackward => "micro-batch",
            UpdatePart::GradStats => "gradient norm",
            UpdatePart::Update => "optimizer",
        }
        .into(),
        category: "update",
        start_s: (begun - origin).as_secs_f64(),
        seconds,
        reserved_bytes: 0,
        heap_bytes: 0,
    };
    let of_node = |span: &NodeSpan| TimelineSpan {
        name: span.name.clone(),
        category: pass_name(span.pass),
        start_s: (span.start - origin).as_secs_f64(),
        seconds: span.seconds,
        reserved_bytes: span.reserved_bytes,
        heap_bytes: span.heap_bytes,
    };
    let of_kernel = |span: &KernelSpan| TimelineSpan {
        name: span.kernel.into(),
        category: "kernel",
        start_s: (span.start - origin).as_secs_f64(),
        seconds: span.seconds,
        reserved_bytes: 0,
        heap_bytes: 0,
    };
    let (nodes, kernels) = (recorded.nodes.iter().map(of_node), recorded.kernels.iter().map(of_kernel));
    parts.iter().map(of_part).chain(nodes).chain(kernels).collect()
}
