//! Passes of micro-batches on a GPU: launched kernel by kernel at first, then from an arena, then as a CUDA graph.
//!
//! A kind of pass allocates the same sizes in the same order every time. Its second pass is traced and its tensors are placed
//! in an arena; from the third on it runs there, and is captured and replayed where that can be done. An arena is
//! taken only while a pass runs: evaluations and other kinds of passes have its memory in between, and a graph that
//! finds it free replays. Whatever of this cannot be done leaves a pass that runs as without.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::CudaDevice;

use crate::kernels::cuda::graph::Graph;
use crate::kernels::cuda::{copy, cublaslt, pointer};
use crate::layers::Mode;
use crate::layers::loss::PendingMetricSums;
use crate::layers::network::{DeviceBatch, StepError};
use crate::memory::gpu::GpuDevice;
use crate::memory::placement::ArenaPlacement;

/// Passes of a kind before one is traced: in the first of them libraries choose their kernels.
const WARMUP_PASSES: u32 = 1;
/// Kinds of passes that are remembered: each graph takes some of the device's memory beside the heap.
const MAX_ENTRIES: usize = 12;
/// Times in a row that a graph may find its arena taken, or a pass may allocate otherwise than when it was traced.
const MAX_MISSES: u32 = 3;

/// What launches and allocations depend on, beside the values of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct PassKey {
    pub mode: Mode,
    pub samples: usize,
    /// Values of a sample's input and of all targets.
    pub input: usize,
    pub targets: usize,
    pub padded: bool,
    pub scale: f64,
    pub recompute: usize,
}

/// Of the first graph, which alone is reported.
#[derive(Clone, Debug, PartialEq)]
pub enum CaptureOutcome {
    /// So many launches, in an arena of so many bytes that could have been no smaller than `lower_bound`.
    Graph {
        launches: usize,
        arena_bytes: u64,
        lower_bound: u64,
    },
    Failed {
        reason: String,
    },
}

pub struct GraphCache {
    gpu: Arc<GpuDevice>,
    device: CudaDevice,
    /// Whether passes may be captured.
    graphs: bool,
    entries: RefCell<Vec<PassEntry>>,
    outcome: RefCell<Option<CaptureOutcome>>,
    reported: Cell<bool>,
}

struct PassEntry {
    key: PassKey,
    state: PassState,
    /// In a row: see [`MAX_MISSES`].
    misses: u32,
}

enum PassState {
    /// So many passes were made.
    Warmup(u32),
    Placed {
        placement: Arc<ArenaPlacement>,
        /// Where its arena was last.
        base: Option<u64>,
        capture: bool,
    },
    Captured {
        placement: Arc<ArenaPlacement>,
        base: u64,
        graph: CapturedGraph,
    },
    /// Its allocations differ from pass to pass.
    Dynamic,
}

/// A graph, the addresses of the micro-batch it reads, and where it leaves its sums.
struct CapturedGraph {
    graph: Graph,
    batch_addresses: [u64; 3],
    sums: candle_core::Tensor,
}

/// How the pass in hand is served.
#[derive(Clone, Copy, Debug, PartialEq)]
enum AllocMode {
    Plain,
    Traced,
    Arena(u64),
    /// The arena at the address a graph has it.
    Replayable,
}

/// From before the micro-batch is allocated until everything of its pass is freed.
pub struct GraphScope<'a> {
    cache: &'a GraphCache,
    key: PassKey,
    alloc_mode: AllocMode,
    finished: Cell<bool>,
}

impl GraphCache {
    /// None where the CPU computes.
    pub fn new(gpu: &Arc<GpuDevice>, graphs: bool) -> candle_core::Result<Option<Self>> {
        let Device::Cuda(device) = &gpu.device else { return Ok(None) };
        // What lasts is no pass's.
        cublaslt::prepare(device)?;
        Ok(Some(Self {
            gpu: gpu.clone(),
            device: device.clone(),
            graphs,
            entries: RefCell::default(),
            outcome: RefCell::default(),
            reported: Cell::new(false),
        }))
    }

    /// What came of the first capture, once.
    pub fn take_outcome(&self) -> Option<CaptureOutcome> {
        self.outcome.take()
    }

    /// Lets go of every graph and arena: somebody needs the memory.
    pub fn clear(&self) {
        self.entries.borrow_mut().clear();
        self.gpu.heap().set_graph_arenas(Vec::new());
    }

    /// A pass of this kind begins.
    pub fn begin(&self, key: PassKey) -> GraphScope<'_> {
        let mut entries = self.entries.borrow_mut();
        // The kind used last is the last.
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
        // A graph frees its sums: after the heap, which is locked once, is let go of.
        let mut ended = None;
        let mut heap = self.gpu.heap();
        let alloc_mode = match &mut entry.state {
            PassState::Warmup(WARMUP_PASSES) => {
                heap.begin_trace();
                AllocMode::Traced
            }
            PassState::Warmup(_) | PassState::Dynamic => AllocMode::Plain,
            PassState::Placed { placement, base, .. } => {
                // One arena for all kinds, where it is large enough.
                let at =
                    base.iter().chain(&arena_bases).find_map(|base| heap.enter_arena(placement, Some(*base)));
                *base = at.or_else(|| heap.enter_arena(placement, None));
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

    /// Keeps the arenas of all graphs where they are, as far as that can be done.
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
    /// What `forward_backward` makes of the micro-batch: by a graph, where there is one or can be.
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

    /// All was computed that the pass is for.
    pub fn finish(&self) {
        self.finished.set(true);
    }

    fn can_capture(&self) -> bool {
        let entries = self.cache.entries.borrow();
        let capture = |entry: &PassEntry| match &entry.state {
            // The sums alone outlive a pass.
            PassState::Placed { placement, capture, .. } => *capture && placement.outliving_count() == 1,
            _ => false,
        };
        self.cache.graphs && self.key.mode == Mode::Train && entries.last().is_some_and(capture)
    }

    /// The sums of a replay; none where the micro-batch is not where the graph reads it.
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

    /// Captures the pass into its arena and runs it; none where it cannot be captured.
    fn capture(
        &self,
        batch: &DeviceBatch,
        base: u64,
        forward_backward: impl Fn(&DeviceBatch) -> Result<PendingMetricSums, StepError>,
    ) -> candle_core::Result<Option<candle_core::Tensor>> {
        let cache = self.cache;
        let start = cache.gpu.heap().position();
        let captured = Graph::capture(&cache.device, || forward_backward(batch))?;
        // Memory outside of the arena is others' after the pass, but for the sums, which are kept.
        let as_placed = cache.gpu.heap().matches_placement();
        let captured = match captured {
            Ok(_) if !as_placed => Err("its allocations differ from pass to pass".to_owned()),
            Ok((_, PendingMetricSums::Ready(_))) => Err("the host waits for what it computes".to_owned()),
            Ok((graph, PendingMetricSums::OnDevice(sums))) => {
                Ok(CapturedGraph { graph, batch_addresses: batch_addresses(batch)?, sums })
            }
            Err(reason) => Err(reason),
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
                cache.set_outcome(CaptureOutcome::Failed { reason });
                *state = PassState::Placed { placement, base: Some(base), capture: false };
                cache.gpu.heap().rewind(start);
                Ok(None)
            }
        }
    }
}

/// Where a micro-batch is on the device.
fn batch_addresses(batch: &DeviceBatch) -> candle_core::Result<[u64; 3]> {
    let staged = batch.sample_info.as_ref().map_or(Ok(std::ptr::null_mut()), pointer)?;
    Ok([pointer(&batch.inputs)? as u64, pointer(&batch.targets)? as u64, staged as u64])
}

impl Drop for GraphScope<'_> {
    fn drop(&mut self) {
        let mut entries = self.cache.entries.borrow_mut();
        // Declared before the heap, and so dropped after it: a graph frees its sums, and the heap is locked once.
        let _ended;
        let mut heap = self.cache.gpu.heap();
        // Of a pass that failed nothing is learned.
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
                    PassState::Dynamic
                };
                _ended = std::mem::replace(&mut entry.state, next);
            }
        }
    }
}
