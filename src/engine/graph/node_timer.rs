//! Measures the nodes of a network while it runs, on request: time, and memory beside what was planned for it.
//!
//! A thread that has no recording pays one check per node.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use crate::kernels::kernel_timer::{self, KernelCall, KernelSpan};
use crate::kernels::timestamp::{Clock, TimeAxis, Timestamp};
use crate::memory::gpu::GpuDevice;
use crate::memory::{Ledger, measure};

/// A pass over a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodePass {
    Forward,
    /// The forward pass of a block once more, before its backward pass.
    Recompute,
    Backward,
}

/// One pass over one node.
#[derive(Clone, Debug)]
pub struct NodeSpan {
    pub name: String,
    pub pass: NodePass,
    /// Since the origin of the recording.
    pub start_s: f64,
    pub seconds: f64,
    /// Bytes beyond those held before: as reserved in the ledger, and as the allocator of its tensors counted them.
    pub reserved_bytes: u64,
    pub heap_bytes: u64,
    /// The kernels that it ran, as indices of [`Spans::kernels`].
    pub kernels: Range<usize>,
}

/// What was recorded, in the order in which it ended.
#[derive(Default)]
pub struct Spans {
    pub nodes: Vec<NodeSpan>,
    /// Of nodes, and of what runs outside of them.
    pub kernels: Vec<KernelSpan>,
}

impl Spans {
    /// Adds what was recorded later, with an origin this many seconds after that of `self`.
    pub fn append(&mut self, later: Spans, seconds: f64) {
        let before = self.kernels.len();
        self.nodes.extend(later.nodes.into_iter().map(|mut node| {
            node.kernels = before + node.kernels.start..before + node.kernels.end;
            node.start_s += seconds;
            node
        }));
        self.kernels.extend(later.kernels.into_iter().map(|mut kernel| {
            kernel.start_s += seconds;
            kernel
        }));
    }
}

struct NodeRecording {
    clock: Clock,
    gpu: Option<Arc<GpuDevice>>,
    /// Their times are known when the recording ends.
    spans: Vec<(NodeSpan, Timestamp, Timestamp)>,
}

impl NodeRecording {
    /// Bytes of the live tensors, and their peak since the last call, where they are.
    fn take_heap_peak(&self) -> (u64, u64) {
        match &self.gpu {
            Some(gpu) => (gpu.used_bytes(), gpu.take_recent_peak()),
            None => (measure::live_bytes(), measure::take_recent_peak()),
        }
    }
}

thread_local! {
    static RECORDING: RefCell<Option<NodeRecording>> = const { RefCell::new(None) };
}

/// Passes that a recording has room for from the start, so that its growth is not measured as memory of a node.
const EXPECTED_SPANS: usize = 1024;

/// Records the nodes and the kernels that this thread runs, on `gpu` or on the CPU, until [`take`].
pub fn start(clock: Clock, gpu: Option<Arc<GpuDevice>>) {
    kernel_timer::start(clock.clone());
    RECORDING.set(Some(NodeRecording { clock, gpu, spans: Vec::with_capacity(EXPECTED_SPANS) }));
}

/// A recording that has ended. Its times are known once the device has run it.
pub struct Recorded {
    nodes: Vec<(NodeSpan, Timestamp, Timestamp)>,
    kernels: Vec<KernelCall>,
}

/// Ends the recording and returns it.
pub fn take() -> Recorded {
    let nodes = RECORDING.take().map(|recording| recording.spans).unwrap_or_default();
    Recorded { nodes, kernels: kernel_timer::take() }
}

impl Recorded {
    /// All that were taken.
    pub fn timestamps(&self) -> impl Iterator<Item = &Timestamp> {
        let of_nodes = self.nodes.iter().flat_map(|(_, start, end)| [start, end]);
        of_nodes.chain(self.kernels.iter().flat_map(KernelCall::timestamps))
    }

    pub fn spans(self, axis: &TimeAxis) -> Spans {
        let with_times = |(span, start, end): (NodeSpan, Timestamp, Timestamp)| {
            let start_s = axis.seconds(&start);
            NodeSpan { start_s, seconds: axis.seconds(&end) - start_s, ..span }
        };
        Spans {
            nodes: self.nodes.into_iter().map(with_times).collect(),
            kernels: kernel_timer::spans(self.kernels, axis),
        }
    }
}

/// Runs a node, and records it if this thread has a recording.
pub(super) fn time<T>(
    name: impl FnOnce() -> String,
    pass: NodePass,
    ledger: &Ledger,
    run: impl FnOnce() -> T,
) -> T {
    let begun = RECORDING.with_borrow(|recording| {
        let recording = recording.as_ref()?;
        let (reserved, heap) = (ledger.take_recent_peak().now, recording.take_heap_peak().0);
        Some((reserved, heap, kernel_timer::count(), recording.clock.now()))
    });
    let result = run();
    let Some((reserved, heap, first_kernel, start)) = begun else { return result };
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        let end = recording.clock.now();
        let span = NodeSpan {
            name: name(),
            pass,
            start_s: 0.0,
            seconds: 0.0,
            reserved_bytes: ledger.take_recent_peak().peak.saturating_sub(reserved),
            heap_bytes: recording.take_heap_peak().1.saturating_sub(heap),
            kernels: first_kernel..kernel_timer::count(),
        };
        recording.spans.push((span, start, end));
    });
    result
}
