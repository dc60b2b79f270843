//! Measures the nodes of a network while it runs, on request: time, and memory beside what was planned for it.
//!
//! A thread that has no recording pays one check per node.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use candle_core::Device;

use crate::kernels::kernel_timer::{self, KernelSpan};
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
    pub start: Instant,
    pub seconds: f64,
    /// Bytes beyond those held before: as reserved in the ledger, and as the allocator of the host counted them.
    pub reserved_bytes: u64,
    pub heap_bytes: u64,
    /// The kernels that it ran, as indices of [`Spans::kernels`].
    pub kernels: Range<usize>,
}

/// What was recorded, in the order in which it ended.
#[derive(Default)]
pub struct Spans {
    pub nodes: Vec<NodeSpan>,
    /// Of nodes, and of what runs outside of them; empty on a GPU, where a call does not wait for its kernel.
    pub kernels: Vec<KernelSpan>,
}

impl Spans {
    /// Adds what was recorded later.
    pub fn append(&mut self, later: Spans) {
        let before = self.kernels.len();
        self.nodes.extend(later.nodes.into_iter().map(|mut node| {
            node.kernels = before + node.kernels.start..before + node.kernels.end;
            node
        }));
        self.kernels.extend(later.kernels);
    }
}

struct Recording {
    device: Device,
    spans: Vec<NodeSpan>,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Records the nodes that this thread runs on `device` until [`take`]. On a GPU every node is waited for.
pub fn start(device: Device) {
    if device.is_cpu() {
        kernel_timer::start();
    }
    RECORDING.set(Some(Recording { device, spans: Vec::new() }));
}

/// Ends the recording and returns it.
pub fn take() -> Spans {
    let nodes = RECORDING.take().map(|recording| recording.spans).unwrap_or_default();
    Spans { nodes, kernels: kernel_timer::take() }
}

/// Runs a node, and records it if this thread has a recording.
pub(super) fn time<T>(
    name: impl FnOnce() -> String,
    pass: NodePass,
    ledger: &Ledger,
    run: impl FnOnce() -> T,
) -> T {
    if RECORDING.with_borrow(Option::is_none) {
        return run();
    }
    let (reserved, heap) = (ledger.take_recent_peak().now, measure::live_bytes());
    measure::take_recent_peak();
    let first_kernel = kernel_timer::count();
    let start = Instant::now();
    let result = run();
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        // A failure shows where the next tensor is read.
        let _ = recording.device.synchronize();
        let seconds = start.elapsed().as_secs_f64();
        recording.spans.push(NodeSpan {
            name: name(),
            pass,
            start,
            seconds,
            reserved_bytes: ledger.take_recent_peak().peak.saturating_sub(reserved),
            heap_bytes: measure::take_recent_peak().saturating_sub(heap),
            kernels: first_kernel..kernel_timer::count(),
        });
    });
    result
}
