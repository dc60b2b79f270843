//! Passes served from an arena: the first one is traced, later ones get the places computed from its trace, as long as
//! they allocate the same.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::{ALIGNMENT, Backing, DeviceHeap};
use crate::memory::placement::{AllocTrace, ArenaPlacement};

/// How the current pass is served.
#[derive(Default)]
pub(super) enum PassMode {
    #[default]
    None,
    Traced {
        trace: AllocTrace,
        alive: BTreeMap<u64, usize>,
    },
    Placed {
        placement: Arc<ArenaPlacement>,
        base: u64,
        next: usize,
        /// Live tensors in the arena.
        alive: BTreeMap<u64, u64>,
        /// An allocation differed from the placement; the rest of the pass is served by the heap.
        diverged: bool,
        /// A replayed CUDA graph owns the arena: allocations made now are not part of the pass.
        replayed: bool,
    },
}

impl PassMode {
    /// Places the next tensor of a placed pass; `None` if the heap serves it.
    pub fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let PassMode::Placed { placement, base, next, alive, diverged, replayed: false } = self else {
            return None;
        };
        let expected = placement.tensors.get(*next).copied();
        *next += 1;
        *diverged |= expected.is_none_or(|(size, _)| size != bytes);
        if *diverged {
            return None;
        }
        let at = *base + expected?.1?;
        // A tensor that outlives its traced lifetime may still occupy the range.
        let before = alive.range(..at + bytes).next_back();
        *diverged |= before.is_some_and(|(other, size)| other + size > at);
        if *diverged {
            return None;
        }
        alive.insert(at, bytes);
        Some(at)
    }

    /// Records an allocation that the heap served during a traced pass.
    pub fn trace_allocate(&mut self, at: u64, bytes: u64) {
        if let PassMode::Traced { trace, alive } = self {
            alive.insert(at, trace.allocate(bytes));
        }
    }

    /// Frees a tensor of a placed pass and returns its bytes; in a traced pass, records that it is freed.
    pub fn free(&mut self, at: u64) -> Option<u64> {
        match self {
            PassMode::None => None,
            PassMode::Placed { alive, .. } => alive.remove(&at),
            PassMode::Traced { trace, alive } => {
                if let Some(tensor) = alive.remove(&at) {
                    trace.free(tensor);
                }
                None
            }
        }
    }
}

impl<B: Backing> DeviceHeap<B> {
    /// Records allocations until [`end_trace`](Self::end_trace).
    pub fn begin_trace(&mut self) {
        self.pass_mode = PassMode::Traced { trace: AllocTrace::default(), alive: BTreeMap::new() };
    }

    pub fn end_trace(&mut self) -> AllocTrace {
        match std::mem::take(&mut self.pass_mode) {
            PassMode::Traced { trace, .. } => trace,
            _ => AllocTrace::default(),
        }
    }

    /// Serves the pass that starts now from an arena: at `base` if given, else wherever it fits. Changes nothing if
    /// that would need compaction.
    pub fn enter_arena(&mut self, placement: &Arc<ArenaPlacement>, base: Option<u64>) -> Option<u64> {
        let bytes = placement.arena_bytes.max(1).next_multiple_of(ALIGNMENT);
        let base = match base {
            Some(base) => self.take_at(base, bytes).then_some(base)?,
            None => {
                let more = bytes
                    .saturating_sub(self.tail_free_bytes())
                    .min(self.capacity.saturating_sub(self.mapped_bytes));
                match self.best_fit(bytes) {
                    Some(base) => base,
                    None => {
                        self.map_chunks(more.div_ceil(self.chunk_bytes));
                        self.best_fit(bytes)?
                    }
                }
            }
        };
        let placement = placement.clone();
        self.pass_mode = PassMode::Placed {
            placement,
            base,
            next: 0,
            alive: BTreeMap::new(),
            diverged: false,
            replayed: false,
        };
        Some(base)
    }

    /// Ends the pass and frees its arena, except for tensors that are still alive. Returns whether the pass matched its
    /// placement.
    pub fn leave_arena(&mut self) -> bool {
        let PassMode::Placed { placement, base, alive, diverged, .. } = std::mem::take(&mut self.pass_mode)
        else {
            return true;
        };
        self.stats.arena_passes += 1;
        self.stats.diverged += u64::from(diverged);
        if placement.arena_bytes > self.stats.arena_bytes {
            (self.stats.arena_bytes, self.stats.arena_lower_bound) =
                (placement.arena_bytes, placement.lower_bound);
        }
        let Some(bytes) = self.allocated.remove(&base) else { return false };
        let mut at = base;
        for (tensor, bytes) in &alive {
            if *tensor > at {
                self.release_range(at, tensor - at);
            }
            self.allocated.insert(*tensor, *bytes);
            at = tensor + bytes;
        }
        if base + bytes > at {
            self.release_range(at, base + bytes - at);
        }
        !diverged && alive.is_empty()
    }

    /// Position in the placed pass: how many of its tensors were allocated.
    pub fn position(&self) -> usize {
        if let PassMode::Placed { next, .. } = &self.pass_mode { *next } else { 0 }
    }

    /// Rewinds a placed pass to an earlier position. Whatever it allocated since then has been freed.
    pub fn rewind(&mut self, position: usize) {
        if let PassMode::Placed { next, .. } = &mut self.pass_mode {
            *next = position;
        }
    }

    /// Whether every allocation of the placed pass matched the placement so far.
    pub fn matches_placement(&self) -> bool {
        matches!(&self.pass_mode, PassMode::Placed { diverged: false, .. })
    }

    /// A CUDA graph replays the placed pass: its tensors count towards the peak, though nobody allocates them.
    pub fn mark_replayed(&mut self) {
        if let PassMode::Placed { placement, replayed, alive, .. } = &mut self.pass_mode {
            *replayed = true;
            // The micro-batch is allocated already and is one of the placed tensors: do not count it twice.
            let others = self.used_bytes - alive.values().sum::<u64>();
            self.peak_bytes = self.peak_bytes.max(others + placement.lower_bound);
        }
    }

    /// Declares the arenas whose addresses CUDA graphs captured.
    pub fn set_graph_arenas(&mut self, arenas: Vec<Range<u64>>) {
        self.graph_arenas = arenas;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{CHUNK, FakeBacking, check_invariants, heap};
    use super::*;

    proptest! {
        /// A traced pass runs from its arena at the same addresses every time and stays within it; tensors that outlive
        /// the pass are not placed in the arena.
        #[test]
        fn passes_are_served_from_their_arena(
            sizes in prop::collection::vec((1u64..20_000, any::<bool>()), 1..40),
            others in prop::collection::vec(1u64..9000, 0..10),
        ) {
            let mut heap = heap(4096);
            let run = |heap: &mut DeviceHeap<FakeBacking>| -> Vec<u64> {
                let mut kept = Vec::new();
                for (bytes, keep) in &sizes {
                    let at = heap.allocate(*bytes).unwrap();
                    if *keep { kept.push(at) } else { heap.free(at); }
                }
                kept.drain(..).rev().for_each(|at| { heap.free(at); });
                vec![heap.allocate(24).unwrap()]
            };
            heap.begin_trace();
            let mut lasting = run(&mut heap);
            let placement = Arc::new(ArenaPlacement::new(&heap.end_trace()));
            prop_assert_eq!(placement.tensors.last().unwrap().1, None, "the result outlives the pass");
            let mut base = None;
            for _ in 0..3 {
                let at = heap.enter_arena(&placement, base);
                prop_assert!(at.is_some());
                lasting.extend(run(&mut heap));
                prop_assert!(heap.leave_arena());
                // An evaluation uses the arena's memory in between.
                let between: Vec<_> = others.iter().map(|bytes| heap.allocate(*bytes).unwrap()).collect();
                between.into_iter().for_each(|at| { heap.free(at); });
                prop_assert!(base.is_none() || base == at);
                base = at;
            }
            prop_assert_eq!(heap.used_bytes(), lasting.len() as u64 * ALIGNMENT);
            prop_assert_eq!(heap.stats.diverged, 0);
            prop_assert_eq!(heap.stats.synchronizes, 0);
            // A graph replay allocates nothing of the pass, and allocations made meanwhile go elsewhere.
            let base = heap.enter_arena(&placement, base).unwrap();
            heap.take_peak();
            let used = heap.used_bytes();
            let first = heap.allocate(sizes[0].0).unwrap();
            heap.mark_replayed();
            prop_assert_eq!(heap.take_peak(), used + placement.lower_bound, "the first tensor counts once");
            let sums = heap.allocate(24).unwrap();
            prop_assert!(!(base..base + placement.arena_bytes).contains(&sums) || placement.arena_bytes == 0);
            prop_assert!(heap.free(first));
            prop_assert!(heap.leave_arena());
        }
    }

    #[test]
    fn another_pass_than_the_traced_one_is_served_all_the_same() {
        let mut heap = heap(64);
        heap.begin_trace();
        let tensors = [1000, 2000, 3000].map(|bytes| heap.allocate(bytes).unwrap());
        tensors.iter().for_each(|at| assert!(heap.free(*at)));
        let placement = Arc::new(ArenaPlacement::new(&heap.end_trace()));
        heap.enter_arena(&placement, None).unwrap();
        let longer = [1000, 2000, 9000, 3000].map(|bytes| heap.allocate(bytes).unwrap());
        assert!(!heap.leave_arena(), "it says so");
        let bytes = [1024, 2048, 9216, 3072];
        check_invariants(&heap, &longer.into_iter().zip(bytes).collect());
        longer.iter().for_each(|at| assert!(heap.free(*at)));
        assert_eq!((heap.used_bytes(), heap.stats.diverged), (0, 1));
        // One tensor outlives its traced lifetime.
        heap.begin_trace();
        let first = heap.allocate(1000).unwrap();
        heap.free(first);
        let second = heap.allocate(1000).unwrap();
        heap.free(second);
        let placement = Arc::new(ArenaPlacement::new(&heap.end_trace()));
        assert_eq!(placement.arena_bytes, 1024);
        heap.enter_arena(&placement, None).unwrap();
        let (a, b) = (heap.allocate(1000).unwrap(), heap.allocate(1000).unwrap());
        assert_ne!(a, b);
        assert!(!heap.leave_arena());
        assert!(heap.free(a) && heap.free(b));
    }

    #[test]
    fn an_arena_in_use_is_not_entered() {
        let mut heap = heap(4);
        heap.begin_trace();
        let tensor = heap.allocate(2 * CHUNK).unwrap();
        heap.free(tensor);
        let placement = Arc::new(ArenaPlacement::new(&heap.end_trace()));
        let base = heap.enter_arena(&placement, None).unwrap();
        heap.leave_arena();
        let other = heap.allocate(CHUNK).unwrap();
        assert_eq!(other, base);
        assert_eq!(heap.enter_arena(&placement, Some(base)), None);
        heap.free(other);
        assert_eq!(heap.enter_arena(&placement, Some(base)), Some(base));
    }
}
