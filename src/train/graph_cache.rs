//! GPU passes over micro-batches: launched kernel by kernel at first, then from an arena, then as a CUDA graph.
//!
//! A pass with a given [`PassKey`] allocates the same sizes in the same order every time. The cache traces its second
//! pass and places its tensors in an arena; from the third on the pass runs there, and is captured and replayed if it
//! can be. A pass holds its arena only while it runs: evaluations and passes with other keys use the memory in between,
//! and a graph whose arena is free is replayed. Any failure falls back to plain launches.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::CudaDevice;

use super::no_graph::NoGraph;
use super::pass_key::PassKey;
use crate::graph::network::{DeviceBatch, StepError};
use crate::kernels::cuda::graph::Graph;
use crate::kernels::cuda::{copy, cublaslt, pointer};
use crate::layers::Mode;
use crate::layers::loss::PendingMetricSums;
use crate::memory::gpu::GpuDevice;
use crate::memory::placement::ArenaPlacement;

/// Passes before the trace. In the first, cuBLASLt and cuDNN choose their kernels.
const WARMUP_PASSES: u32 = 1;
/// Pass keys kept. Each graph takes some device memory outside the heap.
const MAX_ENTRIES: usize = 12;
/// Times in a row that a graph may find its arena in use, or that a pass may allocate differently from its trace.
const MAX_MISSES: u32 = 3;

/// Outcome of the first capture, the only one that is reported.
#[derive(Clone, Debug, PartialEq)]
pub enum CaptureOutcome {
    /// The graph was captured. No placement could be smaller than `lower_bound` bytes.
    Graph {
        launches: usize,
        arena_bytes: u64,
        lower_bound: u64,
    },
    Failed(NoGraph),
}

pub struct GraphCache {
    gpu: Arc<GpuDevice>,
    device: CudaDevice,
    /// Whether passes may be captured.
    graphs: bool,
    entries: RefCell<Vec<PassEntry>>,
    outcome: RefCell<Option<CaptureOutcome>>,
    reported: Cell<bool>,
    /// Why the last training pass without a capture was not captured.
    no_graph: RefCell<NoGraph>,
}

struct PassEntry {
    key: PassKey,
    state: PassState,
    /// Consecutive misses: see [`MAX_MISSES`].
    misses: u32,
}

enum PassState {
    /// Passes made so far.
    Warmup(u32),
    Placed {
        placement: Arc<ArenaPlacement>,
        /// Base address of the arena in the last pass.
        base: Option<u64>,
        capture: bool,
    },
    Captured {
        placement: Arc<ArenaPlacement>,
        base: u64,
        graph: CapturedGraph,
    },
    /// Allocations differ from pass to pass: no arena, no capture.
    Dynamic,
}

/// A graph, the device addresses of the micro-batch it reads, and the tensor it writes its metric sums to.
struct CapturedGraph {
    graph: Graph,
    batch_addresses: [u64; 3],
    sums: candle_core::Tensor,
}

/// How the heap serves the allocations of the current pass.
#[derive(Clone, Copy, Debug, PartialEq)]
enum AllocMode {
    Plain,
    Traced,
    Arena(u64),
    /// From the arena at the address the graph was captured with.
    Replayable,
}

/// Scope of a pass: from before the micro-batch is allocated until every tensor of the pass is freed.
pub struct GraphScope<'a> {
    cache: &'a GraphCache,
    key: PassKey,
    alloc_mode: AllocMode,
    finished: Cell<bool>,
}

impl GraphCache {
    /// `None` on the CPU.
    pub fn new(gpu: &Arc<GpuDevice>, graphs: bool) -> candle_core::Result<Option<Self>> {
        let Device::Cuda(device) = &gpu.device else { return Ok(None) };
        // Library handles and workspaces outlive passes; create them before any pass is traced.
        cublaslt::prepare(device)?;
        Ok(Some(Self {
            gpu: gpu.clone(),
            device: device.clone(),
            graphs,
            entries: RefCell::default(),
            outcome: RefCell::default(),
            reported: Cell::new(false),
            no_graph: RefCell::new(NoGraph::TooFewPasses(WARMUP_PASSES + 2)),
        }))
    }

    /// The outcome of the first capture, once.
    pub fn take_outcome(&self) -> Option<CaptureOutcome> {
        self.outcome.take()
    }

    /// Why there was no capture to report; `None` if there was, or if graphs are not permitted.
    pub fn why_never_captured(&self) -> Option<NoGraph> {
        (self.graphs && !self.reported.get()).then(|| self.no_graph.borrow().clone())
    }

    /// Frees every graph and arena, when memory is short.
    pub fn clear(&self) {
        *self.no_graph.borrow_mut() = NoGraph::Released;
        self.entries.borrow_mut().clear();
        self.gpu.heap().set_graph_arenas(Vec::new());
    }

    /// Begins a pass.
    pub fn begin(&self, key: PassKey) -> GraphScope<'_> {
        let mut entries = self.entries.borrow_mut();
        // Entries are in least-recently-used order, the most recent last.
        let entry = match entries.iter().position(|entry| entry.key == key) {
            Some(at) => entries.remove(at),
            None => PassEntry { key: key.clone(), state: PassState::Warmup(0), misses: 0 },
        };
        if entries.len() == MAX_ENTRIES {
            entries.remove(0);
        }
        entries.push(entry);
        let arena_bases: Vec<u64> = entries.iter().filter_map(|entry| entry.state.base()).collect();
        let entry = entries.last_mut().expect("just pushed");
        // Dropping a graph frees its sums tensor, which locks the heap: drop it after the guard below, or it
        // deadlocks.
        let mut ended = None;
        let mut heap = self.gpu.heap();
        let alloc_mode = match &mut entry.state {
            PassState::Warmup(WARMUP_PASSES) => {
                heap.begin_trace();
                AllocMode::Traced
            }
            PassState::Warmup(_) | PassState::Dynamic => AllocMode::Plain,
            PassState::Placed { placement, base, .. } => {
                // Passes with different keys share an arena if it is large enough.
                let at =
                    base.iter().chain(&arena_bases).find_map(|base| heap.enter_arena(placement, Some(*base)));
                *base = at.or_else(|| heap.enter_arena(placement, None));
                if base.is_none() && key.mode == Mode::Train {
                    *self.no_graph.borrow_mut() = NoGraph::ArenaDoesNotFit(placement.arena_bytes);
                }
                base.map_or(AllocMode::Plain, AllocMode::Arena)
            }
            PassState::Captured { placement, base, .. } => match heap.enter_arena(placement, Some(*base)) {
                Some(_) => {
                    entry.misses = 0;
                    AllocMode::Replayable
                }
                None => {
                    entry.misses += 1;
                    if entry.misses == MAX_MISSES {
                        entry.misses = 0;
                        let placed =
                            PassState::Placed { placement: placement.clone(), base: None, capture: true };
                        ended = Some(std::mem::replace(&mut entry.state, placed));
                    }
                    AllocMode::Plain
                }
            },
        };
        drop(heap);
        drop(ended);
        GraphScope { cache: self, key, alloc_mode, finished: Cell::new(false) }
    }

    fn set_outcome(&self, outcome: CaptureOutcome) {
        if !self.reported.replace(true) {
            *self.outcome.borrow_mut() = Some(outcome);
        }
    }

    /// Tells the heap to leave the arenas of all graphs where they are, as far as it can.
    fn protect_arenas(&self) {
        let entries = self.entries.borrow();
        let arenas = entries.iter().filter_map(|entry| match &entry.state {
            PassState::Captured { placement, base, .. } => Some(*base..*base + placement.arena_bytes),
            _ => None,
        });
        self.gpu.heap().set_graph_arenas(arenas.collect());
    }
}

impl PassState {
    fn base(&self) -> Option<u64> {
        match self {
            PassState::Captured { base, .. } => Some(*base),
            PassState::Placed { base, .. } => *base,
            PassState::Warmup(_) | PassState::Dynamic => None,
        }
    }
}

impl GraphScope<'_> {
    /// Runs `forward_backward` on the micro-batch: by replaying its graph, by capturing one, or directly.
    pub fn run(
        &self,
        batch: &DeviceBatch,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> Result<PendingMetricSums, StepError> {
        if self.alloc_mode == AllocMode::Replayable
            && let Some(sums) = self.replay(batch)?
        {
            return Ok(PendingMetricSums::OnDevice(sums));
        }
        if let AllocMode::Arena(base) = self.alloc_mode
            && self.can_capture()
            && let Some(sums) = self.capture(batch, base, &forward_backward)?
        {
            return Ok(PendingMetricSums::OnDevice(sums));
        }
        forward_backward(batch)
    }

    /// Marks the pass as complete; an incomplete pass leaves no trace or placement.
    pub fn finish(&self) {
        self.finished.set(true);
    }

    fn can_capture(&self) -> bool {
        let entries = self.cache.entries.borrow();
        let capture = |entry: &PassEntry| match &entry.state {
            PassState::Placed { placement, capture, .. } => *capture && self.only_sums_outlive(placement),
            _ => false,
        };
        self.cache.graphs && self.key.mode == Mode::Train && entries.last().is_some_and(capture)
    }

    /// Only the metric sums may outlive a captured pass.
    fn only_sums_outlive(&self, placement: &ArenaPlacement) -> bool {
        let outliving = placement.outliving_count();
        if outliving != 1 {
            *self.cache.no_graph.borrow_mut() = NoGraph::TensorsOutlive(outliving);
        }
        outliving == 1
    }

    /// Replays the graph and returns a copy of its sums; `None` if the micro-batch is not at the captured addresses.
    fn replay(&self, batch: &DeviceBatch) -> candle_core::Result<Option<candle_core::Tensor>> {
        let entries = self.cache.entries.borrow();
        let Some(PassEntry { state: PassState::Captured { graph, .. }, .. }) = entries.last() else {
            return Ok(None);
        };
        if graph.batch_addresses != batch_addresses(batch)? {
            return Ok(None);
        }
        graph.graph.replay()?;
        self.cache.gpu.heap().mark_replayed();
        copy(&self.cache.device, &graph.sums).map(Some)
    }

    /// Captures the pass in its arena and replays it; `None` if it cannot be captured.
    fn capture(
        &self,
        batch: &DeviceBatch,
        base: u64,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> candle_core::Result<Option<candle_core::Tensor>> {
        let cache = self.cache;
        let start = cache.gpu.heap().position();
        let captured = Graph::capture(&cache.device, || forward_backward(batch))?;
        // Memory outside the arena is reused after the pass, so the graph must not touch it. The sums are the
        // exception: they stay allocated.
        let as_placed = cache.gpu.heap().matches_placement();
        let captured = match captured {
            Ok(_) if !as_placed => Err(NoGraph::AllocationsDiffer),
            Ok((_, PendingMetricSums::Ready(_))) => Err(NoGraph::HostReads),
            Ok((graph, PendingMetricSums::OnDevice(sums))) => {
                Ok(CapturedGraph { graph, batch_addresses: batch_addresses(batch)?, sums })
            }
            Err(reason) => Err(NoGraph::NotCapturable(reason)),
        };
        let mut entries = cache.entries.borrow_mut();
        let Some(PassEntry { state, .. }) = entries.last_mut() else { return Ok(None) };
        let PassState::Placed { placement, .. } = state else { return Ok(None) };
        let placement = placement.clone();
        match captured {
            Ok(graph) => {
                let launches = graph.graph.launches;
                cache.set_outcome(CaptureOutcome::Graph {
                    launches,
                    arena_bytes: placement.arena_bytes,
                    lower_bound: placement.lower_bound,
                });
                *state = PassState::Captured { placement, base, graph };
                drop(entries);
                cache.protect_arenas();
                self.replay(batch)
            }
            Err(reason) => {
                // An OOM during the capture is not that of a later allocation.
                cache.gpu.take_last_oom();
                cache.set_outcome(CaptureOutcome::Failed(reason));
                *state = PassState::Placed { placement, base: Some(base), capture: false };
                cache.gpu.heap().rewind(start);
                Ok(None)
            }
        }
    }
}

/// Device addresses of a micro-batch.
fn batch_addresses(batch: &DeviceBatch) -> candle_core::Result<[u64; 3]> {
    let staged = batch.sample_info.as_ref().map_or(Ok(std::ptr::null_mut()), pointer)?;
    Ok([pointer(&batch.inputs)? as u64, pointer(&batch.targets)? as u64, staged as u64])
}

impl Drop for GraphScope<'_> {
    fn drop(&mut self) {
        let mut entries = self.cache.entries.borrow_mut();
        // Declared before the heap guard and so dropped after it: dropping a graph frees its sums, which locks the
        // heap.
        let _ended;
        let mut heap = self.cache.gpu.heap();
        // A failed pass says nothing about the allocations of a complete one.
        let finished = self.finished.get();
        let entry = entries.iter_mut().find(|entry| entry.key == self.key);
        match self.alloc_mode {
            AllocMode::Plain => {
                if let Some(PassEntry { state: PassState::Warmup(count), .. }) = entry
                    && finished
                {
                    *count += 1;
                }
            }
            AllocMode::Traced => {
                let trace = heap.end_trace();
                if let Some(entry) = entry
                    && finished
                {
                    let placement = Arc::new(ArenaPlacement::new(&trace));
                    entry.state = PassState::Placed { placement, base: None, capture: true };
                }
            }
            AllocMode::Arena(_) | AllocMode::Replayable => {
                let as_placed = heap.leave_arena();
                let Some(entry) = entry else { return };
                if as_placed || !finished {
                    return;
                }
                entry.misses += 1;
                let next = if entry.misses < MAX_MISSES {
                    PassState::Warmup(WARMUP_PASSES)
                } else {
                    if self.key.mode == Mode::Train {
                        *self.cache.no_graph.borrow_mut() = NoGraph::AllocationsDiffer;
                    }
                    PassState::Dynamic
                };
                _ended = std::mem::replace(&mut entry.state, next);
            }
        }
    }
}
