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
use crate::kernels::cuda::{copy, pointer, product};
use crate::layers::Mode;
use crate::layers::loss::Counted;
use crate::layers::network::{Batch, StepError};
use crate::memory::card::Card;
use crate::memory::placement::Placement;

/// Passes of a kind before one is traced: in the first of them libraries choose their kernels.
const BEFORE: u32 = 1;
/// Kinds of passes that are remembered: each graph takes some of the device's memory beside the heap.
const KINDS: usize = 12;
/// Times in a row that a graph may find its arena taken, or a pass may allocate otherwise than when it was traced.
const MISSES: u32 = 3;

/// What launches and allocations depend on, beside the values of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
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
pub enum Captured {
    /// So many launches, in an arena of so many bytes that could have been no smaller than `bound`.
    Graph {
        launches: usize,
        arena: u64,
        bound: u64,
    },
    Not {
        reason: String,
    },
}

pub struct Passes {
    card: Arc<Card>,
    device: CudaDevice,
    /// Whether passes may be captured.
    graphs: bool,
    kinds: RefCell<Vec<Known>>,
    news: RefCell<Option<Captured>>,
    told: Cell<bool>,
}

struct Known {
    kind: Kind,
    state: State,
    /// In a row: see [`MISSES`].
    misses: u32,
}

enum State {
    /// So many passes were made.
    Seen(u32),
    Placed {
        placement: Arc<Placement>,
        /// Where its arena was last.
        base: Option<u64>,
        capture: bool,
    },
    Captured {
        placement: Arc<Placement>,
        base: u64,
        graph: Replay,
    },
    /// Its allocations differ from pass to pass.
    Unplaced,
}

/// A graph, the addresses of the micro-batch it reads, and where it leaves its sums.
struct Replay {
    graph: Graph,
    reads: [u64; 3],
    sums: candle_core::Tensor,
}

/// How the pass in hand is served.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Served {
    Plain,
    Traced,
    Arena(u64),
    /// The arena at the address a graph has it.
    Replayable,
}

/// From before the micro-batch is allocated until everything of its pass is freed.
pub struct Scope<'a> {
    passes: &'a Passes,
    kind: Kind,
    served: Served,
    finished: Cell<bool>,
}

impl Passes {
    /// None where the CPU computes.
    pub fn new(card: &Arc<Card>, graphs: bool) -> candle_core::Result<Option<Self>> {
        let Device::Cuda(device) = &card.device else { return Ok(None) };
        // What lasts is no pass's.
        product::prepare(device)?;
        Ok(Some(Self {
            card: card.clone(),
            device: device.clone(),
            graphs,
            kinds: RefCell::default(),
            news: RefCell::default(),
            told: Cell::new(false),
        }))
    }

    /// What came of the first capture, once.
    pub fn news(&self) -> Option<Captured> {
        self.news.take()
    }

    /// Lets go of every graph and arena: somebody needs the memory.
    pub fn clear(&self) {
        self.kinds.borrow_mut().clear();
        self.card.heap().keep(Vec::new());
    }

    /// A pass of this kind begins.
    pub fn begin(&self, kind: Kind) -> Scope<'_> {
        let mut kinds = self.kinds.borrow_mut();
        // The kind used last is the last.
        let known = match kinds.iter().position(|known| known.kind == kind) {
            Some(at) => kinds.remove(at),
            None => Known { kind: kind.clone(), state: State::Seen(0), misses: 0 },
        };
        if kinds.len() == KINDS {
            kinds.remove(0);
        }
        kinds.push(known);
        let homes: Vec<u64> = kinds.iter().filter_map(|known| known.state.base()).collect();
        let known = kinds.last_mut().expect("just pushed");
        // A graph frees its sums: after the heap, which is locked once, is let go of.
        let mut ended = None;
        let mut heap = self.card.heap();
        let served = match &mut known.state {
            State::Seen(BEFORE) => {
                heap.trace();
                Served::Traced
            }
            State::Seen(_) | State::Unplaced => Served::Plain,
            State::Placed { placement, base, .. } => {
                // One arena for all kinds, where it is large enough.
                let at = base.iter().chain(&homes).find_map(|base| heap.enter(placement, Some(*base)));
                *base = at.or_else(|| heap.enter(placement, None));
                base.map_or(Served::Plain, Served::Arena)
            }
            State::Captured { placement, base, .. } => match heap.enter(placement, Some(*base)) {
                Some(_) => {
                    known.misses = 0;
                    Served::Replayable
                }
                None => {
                    known.misses += 1;
                    if known.misses == MISSES {
                        known.misses = 0;
                        let again = State::Placed { placement: placement.clone(), base: None, capture: true };
                        ended = Some(std::mem::replace(&mut known.state, again));
                    }
                    Served::Plain
                }
            },
        };
        drop(heap);
        drop(ended);
        Scope { passes: self, kind, served, finished: Cell::new(false) }
    }

    fn report(&self, captured: Captured) {
        if !self.told.replace(true) {
            *self.news.borrow_mut() = Some(captured);
        }
    }

    /// Keeps the arenas of all graphs where they are, as far as that can be done.
    fn keep_arenas(&self) {
        let kinds = self.kinds.borrow();
        let arenas = kinds.iter().filter_map(|known| match &known.state {
            State::Captured { placement, base, .. } => Some(*base..*base + placement.arena),
            _ => None,
        });
        self.card.heap().keep(arenas.collect());
    }
}

impl State {
    fn base(&self) -> Option<u64> {
        match self {
            State::Captured { base, .. } => Some(*base),
            State::Placed { base, .. } => *base,
            State::Seen(_) | State::Unplaced => None,
        }
    }
}

impl Scope<'_> {
    /// What `learn` makes of the micro-batch: by a graph, where there is one or can be.
    pub fn run(
        &self,
        batch: &Batch,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> Result<Counted, StepError> {
        if self.served == Served::Replayable
            && let Some(sums) = self.replay(batch)?
        {
            return Ok(Counted::Later(sums));
        }
        if let Served::Arena(base) = self.served
            && self.may_capture()
            && let Some(sums) = self.capture(batch, base, &learn)?
        {
            return Ok(Counted::Later(sums));
        }
        learn(batch)
    }

    /// All was computed that the pass is for.
    pub fn finish(&self) {
        self.finished.set(true);
    }

    fn may_capture(&self) -> bool {
        let kinds = self.passes.kinds.borrow();
        let capture = |known: &Known| match &known.state {
            // The sums alone outlive a pass.
            State::Placed { placement, capture, .. } => *capture && placement.outliving() == 1,
            _ => false,
        };
        self.passes.graphs && self.kind.mode == Mode::Train && kinds.last().is_some_and(capture)
    }

    /// The sums of a replay; none where the micro-batch is not where the graph reads it.
    fn replay(&self, batch: &Batch) -> candle_core::Result<Option<candle_core::Tensor>> {
        let kinds = self.passes.kinds.borrow();
        let Some(Known { state: State::Captured { graph, .. }, .. }) = kinds.last() else {
            return Ok(None);
        };
        if graph.reads != addresses(batch)? {
            return Ok(None);
        }
        graph.graph.replay()?;
        self.passes.card.heap().replay();
        copy(&self.passes.device, &graph.sums).map(Some)
    }

    /// Captures the pass into its arena and runs it; none where it cannot be captured.
    fn capture(
        &self,
        batch: &Batch,
        base: u64,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> candle_core::Result<Option<candle_core::Tensor>> {
        let passes = self.passes;
        let begun = passes.card.heap().position();
        let captured = Graph::capture(&passes.device, || learn(batch))?;
        // Memory outside of the arena is others' after the pass, but for the sums, which are kept.
        let as_placed = passes.card.heap().as_placed();
        let captured = match captured {
            Ok(_) if !as_placed => Err("its allocations differ from pass to pass".to_owned()),
            Ok((_, Counted::Known(_))) => Err("the host waits for what it computes".to_owned()),
            Ok((graph, Counted::Later(sums))) => Ok(Replay { graph, reads: addresses(batch)?, sums }),
            Err(reason) => Err(reason),
        };
        let mut kinds = passes.kinds.borrow_mut();
        let Some(Known { state, .. }) = kinds.last_mut() else { return Ok(None) };
        let State::Placed { placement, .. } = state else { return Ok(None) };
        let placement = placement.clone();
        match captured {
            Ok(graph) => {
                let launches = graph.graph.launches;
                passes.report(Captured::Graph { launches, arena: placement.arena, bound: placement.bound });
                *state = State::Captured { placement, base, graph };
                drop(kinds);
                passes.keep_arenas();
                self.replay(batch)
            }
            Err(reason) => {
                passes.report(Captured::Not { reason });
                *state = State::Placed { placement, base: Some(base), capture: false };
                passes.card.heap().rewind(begun);
                Ok(None)
            }
        }
    }
}

/// Where a micro-batch is on the device.
fn addresses(batch: &Batch) -> candle_core::Result<[u64; 3]> {
    let staged = batch.staged.as_ref().map_or(Ok(std::ptr::null_mut()), pointer)?;
    Ok([pointer(&batch.inputs)? as u64, pointer(&batch.targets)? as u64, staged as u64])
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let mut kinds = self.passes.kinds.borrow_mut();
        // Declared before the heap, and so dropped after it: a graph frees its sums, and the heap is locked once.
        let _ended;
        let mut heap = self.passes.card.heap();
        // Of a pass that failed nothing is learned.
        let finished = self.finished.get();
        let known = kinds.iter_mut().find(|known| known.kind == self.kind);
        match self.served {
            Served::Plain => {
                if let Some(Known { state: State::Seen(passes), .. }) = known
                    && finished
                {
                    *passes += 1;
                }
            }
            Served::Traced => {
                let trace = heap.traced();
                if let Some(known) = known
                    && finished
                {
                    let placement = Arc::new(Placement::new(&trace));
                    known.state = State::Placed { placement, base: None, capture: true };
                }
            }
            Served::Arena(_) | Served::Replayable => {
                let as_placed = heap.leave();
                let Some(known) = known else { return };
                if as_placed || !finished {
                    return;
                }
                known.misses += 1;
                let next = if known.misses < MISSES { State::Seen(BEFORE) } else { State::Unplaced };
                _ended = std::mem::replace(&mut known.state, next);
            }
        }
    }
}
