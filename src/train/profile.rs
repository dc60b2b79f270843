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
use crate::graph::network::{LayerBlock, Node, StepError};
use crate::graph::node_timer::{self, NodePass, NodeSpan, Recorded, Spans};
use crate::graph::offload::{ActivationOffload, CopySpeed};
use crate::kernels::dispatch::{Dispatch, dispatch};
use crate::kernels::kernel_timer::KernelSpan;
use crate::kernels::timestamp::{Clock, TimeAxis, Timestamp};
use crate::planner::budget::TargetMachine;
use crate::planner::execution_plan::Offload;
use crate::planner::plan::{MemoryPlan, PlanVerdict};

/// Seconds are means over the profiled updates, per update, without `overhead_s`.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    pub updates: u64,
    pub update_s: f64,
    /// An update without a profile.
    pub unprofiled_update_s: f64,
    /// Whether those updates may run as CUDA graphs, as in a run. Profiled ones never do: a graph runs as a whole.
    pub graphs: bool,
    /// What a profiled update takes beyond an unprofiled one: the time of taking timestamps, and of launches that a
    /// graph would save. It is subtracted from each time in the profile, in proportion to the timestamps taken in it.
    pub overhead_s: f64,
    /// Timestamps per update.
    pub timestamps: u64,
    /// On a GPU, what the host takes to enqueue an update: without CUDA graphs, no update of a run takes less.
    pub enqueue_s: Option<f64>,
    /// Everything that an update does, in order: these add up to `update_s`.
    pub parts: Vec<PartTime>,
    /// In the order of the network.
    pub nodes: Vec<NodeProfile>,
    /// Whether matmuls in bf16 would be faster: they are in f32, and the processor multiplies bf16 (AMX).
    pub bf16_is_faster: bool,
    /// Within nodes and parts.
    pub kernels: Vec<KernelProfile>,
    pub blocks: Vec<BlockProfile>,
    /// What the costs of offloading are computed with; `None` on the CPU, and where no block has an input to offload.
    pub copy_speed: Option<CopySpeed>,
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
    /// The most that a pass over the node took beyond what was held before it: as planned, and as the allocator of its
    /// tensors counted it.
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

/// A block: what recomputing it and offloading its input would free, and cost.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BlockProfile {
    pub name: String,
    /// Recomputing it costs this time once more.
    pub forward_s: f64,
    pub backward_s: f64,
    /// Bytes of saved activations that it frees if it saves only its input; 0 if it is recomputed already.
    pub freed_by_recompute_bytes: u64,
    pub is_recomputed: bool,
    /// `None` on the CPU, where activations are in host memory already.
    pub offload: Option<BlockOffload>,
}

/// What a recomputed block frees and costs besides if its input is offloaded to the host until the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct BlockOffload {
    /// Bytes of the input; 0 if it is offloaded already, and for the first block: the micro-batch stays.
    pub freed_bytes: u64,
    /// Copying it to the host and back, at the measured speed.
    pub copy_s: f64,
    /// The part of `copy_s` that an update takes longer: the copies overlap the forward pass of the block, and the
    /// backward pass of the block after it.
    pub exposed_s: f64,
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

/// Profiles `updates` updates under the plan of the job. `progress` is called with the number done.
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
    let ledgers = Ledgers::new(setup, machine.ram, None);
    let graphs = setup.gpu.is_some() && setup.job.memory.graphs && plan.chosen.offload.is_empty();
    let start =
        |graphs| TrialUpdates::start(setup, ledgers.clone(), plan.chosen, graphs, WARM_UPS + 2 * updates);
    let mut trial = start(false)?;
    let device = setup.device();
    // A device failure surfaces when the next tensor is read.
    let wait_for_device = || drop(device.synchronize());
    let clock = Clock::of(&device);
    // The time that the host takes to enqueue an update, without waiting for data. Before a measured update the device
    // is kept busy for that long, so that the host is ahead of it.
    let warm_up = |trial: &mut TrialUpdates| -> Result<f64, Failure> {
        let mut head_start_s = f64::INFINITY;
        for _ in 0..WARM_UPS {
            wait_for_device();
            let (mut seconds, mut from) = (0.0, Instant::now());
            trial.next_update(|part| {
                seconds += if part == UpdatePart::Data { 0.0 } else { from.elapsed().as_secs_f64() };
                from = Instant::now();
            })?;
            head_start_s = f64::min(head_start_s, seconds);
        }
        Ok(head_start_s)
    };
    let unprofiled_update = |trial: &mut TrialUpdates, head_start_s| -> Result<f64, Failure> {
        wait_for_device();
        clock.occupy(head_start_s);
        let origin = clock.now();
        trial.next_update(|_| {})?;
        Ok(origin.seconds_to(&clock.now()))
    };
    let head_start_s = warm_up(&mut trial)?;
    let (mut recorded, mut unprofiled) = (Vec::new(), 0.0);
    for done in 0..updates {
        // Alternate the two, so that changes of the clock frequency affect both.
        if !graphs {
            unprofiled += unprofiled_update(&mut trial, head_start_s)?;
        }
        wait_for_device();
        clock.occupy(PROFILED_HEAD_START * head_start_s);
        let origin = clock.now();
        node_timer::start(clock.clone(), setup.gpu.clone());
        let mut ends = Vec::new();
        let update = trial.next_update(|part| ends.push((part, clock.now())));
        let (end, nodes) = (clock.now(), node_timer::take());
        update?;
        recorded.push(RecordedUpdate { origin, ends, end, nodes });
        progress(done + 1);
    }
    drop(trial);
    if graphs {
        let mut trial = start(true)?;
        let head_start_s = warm_up(&mut trial)?;
        for _ in 0..updates {
            unprofiled += unprofiled_update(&mut trial, head_start_s)?;
        }
    }
    let per_update = 1.0 / updates as f64;
    let profiled: f64 = recorded.iter().map(|update| update.origin.seconds_to(&update.end)).sum();
    let timestamps: u64 = recorded.iter().map(|update| update.origin.timestamps_to(&update.end)).sum();
    let timestamp_s = (profiled - unprofiled).max(0.0) / timestamps as f64;
    let timestamp_s = if setup.gpu.is_some() { timestamp_s } else { timestamp_s.min(max_timestamp_s()) };
    let overhead = timestamp_s * timestamps as f64;
    let (mut parts, mut spans, mut seconds) = (Vec::new(), Spans::default(), 0.0);
    // On the time axis of the profile, each update begins where the one before ends.
    for update in recorded {
        let axis = update.time_axis(timestamp_s);
        let mut from = 0.0;
        parts.extend(update.ends.iter().map(|(part, end)| {
            let start_s = seconds + from;
            let seconds = axis.seconds(end) - std::mem::replace(&mut from, axis.seconds(end));
            PartSpan { part: *part, start_s, seconds }
        }));
        let end_s = seconds + axis.seconds(&update.end);
        spans.append(update.nodes.spans(&axis), std::mem::replace(&mut seconds, end_s));
    }
    let (blocks, copy_speed) = blocks(setup, machine, &plan, &ledgers)?;
    let mut profile = Profile {
        updates,
        update_s: seconds * per_update,
        unprofiled_update_s: unprofiled * per_update,
        graphs,
        overhead_s: overhead * per_update,
        timestamps: timestamps / updates,
        enqueue_s: setup.gpu.is_some().then_some(head_start_s),
        parts: Vec::new(),
        nodes: node_profiles(setup, &spans.nodes, per_update),
        bf16_is_faster: setup.gpu.is_none() && setup.dtype == DType::F32 && dispatch() == Dispatch::Amx,
        kernels: Vec::new(),
        blocks,
        copy_speed,
        plan,
        timeline: timeline(&parts, &spans),
    };
    profile.kernels = kernel_profiles(&profile.nodes, &parts, &spans, per_update);
    profile.add_blocks();
    profile.add_parts(&parts, per_update);
    Ok(profile)
}

/// Updates before the measured ones: algorithms are chosen and memory is mapped in the first, and graphs are captured
/// in the third.
const WARM_UPS: u64 = 3;

/// Upper bound on the seconds that taking and recording a timestamp costs the host. On a busy machine, profiled updates
/// may be slower for other reasons, which is no overhead of timestamps.
fn max_timestamp_s() -> f64 {
    const TIMESTAMP_SAMPLES: usize = 64;
    const RECORD_FACTOR: f64 = 40.0;
    let of_one = |_| {
        let start = Instant::now();
        for _ in 0..TIMESTAMP_SAMPLES {
            let _ = std::hint::black_box(Clock::Host.now());
        }
        start.elapsed().as_secs_f64() / TIMESTAMP_SAMPLES as f64
    };
    RECORD_FACTOR * (0..TIMESTAMP_SAMPLES).map(of_one).fold(f64::INFINITY, f64::min)
}

/// Factor on the head start of a profiled update, in which the host also enqueues timestamps.
const PROFILED_HEAD_START: f64 = 2.0;

/// A profiled update, before its times are known.
struct RecordedUpdate {
    origin: Timestamp,
    ends: Vec<(UpdatePart, Timestamp)>,
    end: Timestamp,
    nodes: Recorded,
}

/// A part of an update, on the time axis of the profile.
struct PartSpan {
    part: UpdatePart,
    start_s: f64,
    seconds: f64,
}

impl RecordedUpdate {
    /// The time axis without the cost of timestamps, if each took `timestamp_s`.
    fn time_axis(&self, timestamp_s: f64) -> TimeAxis {
        let ends = self.ends.iter().map(|(_, end)| end).chain([&self.end]);
        TimeAxis::new(&self.origin, ends.chain(self.nodes.timestamps()), timestamp_s)
    }
}

impl Profile {
    fn add_blocks(&mut self) {
        for node in &self.nodes {
            if let Some(block) = self.blocks.get_mut(node.block) {
                block.forward_s += node.forward_s;
                block.backward_s += node.backward_s + node.recompute_s;
            }
        }
        if let Some(speed) = self.copy_speed {
            add_copies(&mut self.blocks, speed, self.plan.chosen.accumulation_steps as f64);
        }
    }

    fn add_parts(&mut self, spans: &[PartSpan], per_update: f64) {
        let spent = |part| {
            spans.iter().filter(|span| span.part == part).map(|span| span.seconds).sum::<f64>() * per_update
        };
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

/// Copies that measure the speed of the link are at most this long.
const MAX_MEASURED_COPY: u64 = 64 << 20;

/// The blocks of the network, what recomputing and offloading each would free under `plan`, and the speed of copies to
/// the host.
fn blocks(
    setup: &Setup,
    machine: &TargetMachine,
    plan: &MemoryPlan,
    ledgers: &Ledgers,
) -> Result<(Vec<BlockProfile>, Option<CopySpeed>), Failure> {
    let (network, chosen) = (&setup.network, &plan.chosen);
    let is_offloaded = chosen.offloads(Offload::Activations);
    let of_block = |(block, (freed, input)): (&LayerBlock, (u64, u64))| {
        let is_recomputed = block.recompute_rank < chosen.recompute;
        let bytes =
            |per_sample: u64, is_done| if is_done { 0 } else { per_sample * chosen.micro_batch as u64 };
        let freed_bytes = bytes(input, is_recomputed && is_offloaded);
        BlockProfile {
            name: block.name.clone(),
            freed_by_recompute_bytes: bytes(freed, is_recomputed),
            is_recomputed,
            offload: setup.gpu.is_some().then_some(BlockOffload { freed_bytes, ..BlockOffload::default() }),
            ..BlockProfile::default()
        }
    };
    let estimator = setup.estimator_for(machine);
    let savings = estimator.freed_by_recompute().into_iter().zip(estimator.offloaded_inputs());
    let mut blocks: Vec<BlockProfile> = network.blocks.iter().zip(savings).map(of_block).collect();
    blocks.push(BlockProfile { name: network.loss.name().to_owned(), ..BlockProfile::default() });
    let largest = blocks.iter().filter_map(|block| block.offload).map(|offload| offload.freed_bytes).max();
    let copy_speed = match largest.unwrap_or(0).min(MAX_MEASURED_COPY) {
        0 => None,
        bytes => ActivationOffload::new(ledgers.host.clone(), &setup.device())
            .map_err(StepError::Tensor)?
            .measure_copies(&ledgers.tensors, bytes)?,
    };
    Ok((blocks, copy_speed))
}

/// The time of offloading the input of each block, `copies` times per update. The last of `blocks` is the loss.
fn add_copies(blocks: &mut [BlockProfile], speed: CopySpeed, copies: f64) {
    // A copy back begins when the backward pass of the block after it does; that of the last block waits for the loss.
    let mut overlapped = 0.0;
    for block in blocks.iter_mut().rev().skip(1) {
        if let Some(offload) = &mut block.offload {
            let bytes = copies * offload.freed_bytes as f64;
            let (out_s, back_s) = (bytes / speed.to_host, bytes / speed.to_device);
            offload.copy_s = out_s + back_s;
            offload.exposed_s = (out_s - block.forward_s).max(0.0) + (back_s - overlapped).max(0.0);
        }
        overlapped = block.backward_s;
    }
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
    parts: &[PartSpan],
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
            let begun = parts.partition_point(|part| part.start_s <= span.start_s);
            match parts[..begun].last().map(|span| span.part) {
                Some(UpdatePart::GradStats) => ("gradient norm", None),
                Some(UpdatePart::Update) => ("optimizer", None),
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

fn timeline(parts: &[PartSpan], recorded: &Spans) -> Vec<TimelineSpan> {
    let of_part = |span: &PartSpan| TimelineSpan {
        name: match span.part {
            UpdatePart::Data => "wait for data",
            UpdatePart::ForwardBackward => "micro-batch",
            UpdatePart::GradStats => "gradient norm",
            UpdatePart::Update => "optimizer",
        }
        .into(),
        category: "update",
        start_s: span.start_s,
        seconds: span.seconds,
        reserved_bytes: 0,
        heap_bytes: 0,
    };
    let of_node = |span: &NodeSpan| TimelineSpan {
        name: span.name.clone(),
        category: pass_name(span.pass),
        start_s: span.start_s,
        seconds: span.seconds,
        reserved_bytes: span.reserved_bytes,
        heap_bytes: span.heap_bytes,
    };
    let of_kernel = |span: &KernelSpan| TimelineSpan {
        name: span.kernel.into(),
        category: "kernel",
        start_s: span.start_s,
        seconds: span.seconds,
        reserved_bytes: 0,
        heap_bytes: 0,
    };
    let (nodes, kernels) = (recorded.nodes.iter().map(of_node), recorded.kernels.iter().map(of_kernel));
    parts.iter().map(of_part).chain(nodes).chain(kernels).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The copy out overlaps the forward pass of its block, the copy back the backward pass of the block after it.
    #[test]
    fn offloading_costs_the_time_of_copies_that_nothing_overlaps() {
        let offload = Some(BlockOffload { freed_bytes: 1000, ..BlockOffload::default() });
        let block = |forward_s, backward_s, offload| BlockProfile {
            forward_s,
            backward_s,
            offload,
            ..BlockProfile::default()
        };
        let mut blocks = [block(1.0, 2.0, offload), block(5.0, 3.0, offload), block(9.0, 9.0, None)];
        add_copies(&mut blocks, CopySpeed { to_host: 500.0, to_device: 250.0 }, 2.0);
        let costs = blocks.map(|block| block.offload.map(|offload| (offload.copy_s, offload.exposed_s)));
        // Out 4 s, back 8 s. The first block hides 1 s and 3 s of that, the last hides 4 s and nothing.
        assert_eq!(costs, [Some((12.0, 3.0 + 5.0)), Some((12.0, 8.0)), None]);
    }
}
