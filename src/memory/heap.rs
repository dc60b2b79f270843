//! The device heap: tensors in virtual addresses that physical chunks are mapped to.
//!
//! All kernels run on one stream, so memory that the host frees may be given out at once: whatever uses it next is
//! queued behind whatever used it last. Placement therefore depends on the order of calls alone, never on how far the device
//! has come. Where no free range is long enough, chunks are added up to the capacity; at the capacity, whole free chunks are
//! moved together, which takes a synchronize and is counted. A pass whose allocations are known is served from an arena.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::placement::{Placement, Trace};

/// Tensors begin at multiples of this: what the driver's own allocator aligns to.
pub const ALIGNMENT: u64 = 512;

/// Physical memory in chunks of one size, mapped to virtual addresses.
pub trait Backing {
    /// Maps new chunks to the addresses from `at` on; says how many the driver gave.
    fn map(&mut self, at: u64, chunks: u64) -> u64;

    /// Waits for the device, then moves the chunks mapped at `from` to the addresses from `to` on; false where that
    /// cannot be done now.
    fn remap(&mut self, from: &[u64], to: u64) -> bool;
}

/// An allocation that could not be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub bytes: u64,
    /// Bytes of no tensor, below the capacity.
    pub left: u64,
}

/// What it took to serve all allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// How often the device was waited for to move free chunks together.
    pub synchronizes: u64,
    /// Passes served from an arena.
    pub arena_passes: u64,
    /// Passes whose allocations were not those of their trace.
    pub diverged: u64,
    /// Bytes of the largest arena, and the most bytes its tensors have at once.
    pub arena: u64,
    pub arena_bound: u64,
}

pub struct Heap<B> {
    backing: B,
    chunk: u64,
    /// Addresses that can be mapped.
    addresses: Range<u64>,
    /// Where mapped addresses end.
    end: u64,
    mapped: u64,
    /// The most bytes that may be mapped.
    capacity: u64,
    /// Mapped and free, by address and by length.
    free: BTreeMap<u64, u64>,
    lengths: BTreeSet<(u64, u64)>,
    /// Tensors, and the arena while a pass runs.
    taken: BTreeMap<u64, u64>,
    /// Bytes of tensors now, and at most since this was last asked.
    used: u64,
    peak: u64,
    /// Where CUDA graphs expect their arenas: moved only when nothing else helps.
    kept: Vec<Range<u64>>,
    pass: Pass,
    pub stats: Stats,
}

/// How the allocations of the pass in hand are served.
#[derive(Default)]
enum Pass {
    #[default]
    None,
    Traced {
        trace: Trace,
        alive: BTreeMap<u64, usize>,
    },
    Placed {
        placement: Arc<Placement>,
        base: u64,
        next: usize,
        /// Tensors in the arena.
        alive: BTreeMap<u64, u64>,
        /// An allocation was not the one expected: the rest is served as without a placement.
        diverged: bool,
        /// A CUDA graph has the arena: what is allocated now is not of the pass.
        replayed: bool,
    },
}

impl<B: Backing> Heap<B> {
    /// `addresses` begin at a multiple of `chunk`.
    pub fn new(backing: B, chunk: u64, addresses: Range<u64>, capacity: u64) -> Self {
        Self {
            backing,
            chunk,
            end: addresses.start,
            addresses,
            mapped: 0,
            capacity: capacity.next_multiple_of(chunk),
            free: BTreeMap::new(),
            lengths: BTreeSet::new(),
            taken: BTreeMap::new(),
            used: 0,
            peak: 0,
            kept: Vec::new(),
            pass: Pass::None,
            stats: Stats::default(),
        }
    }

    /// Maps chunks until so many bytes are, as far as the driver gives them.
    pub fn claim(&mut self, bytes: u64) {
        let bytes = bytes.min(self.capacity).saturating_sub(self.mapped).next_multiple_of(self.chunk);
        self.extend(bytes / self.chunk);
    }

    pub fn allocate(&mut self, bytes: u64) -> Result<u64, Refusal> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let at = match self.take_from_arena(bytes) {
            Some(at) => at,
            None => {
                let at = self.find(bytes)?;
                if let Pass::Traced { trace, alive } = &mut self.pass {
                    alive.insert(at, trace.allocate(bytes));
                }
                at
            }
        };
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(at)
    }

    /// Whether the address is one that was allocated here.
    pub fn free(&mut self, at: u64) -> bool {
        if let Pass::Placed { alive, .. } = &mut self.pass
            && let Some(bytes) = alive.remove(&at)
        {
            self.used -= bytes;
            return true;
        }
        if let Pass::Traced { trace, alive } = &mut self.pass
            && let Some(tensor) = alive.remove(&at)
        {
            trace.free(tensor);
        }
        let Some(bytes) = self.taken.remove(&at) else { return false };
        self.used -= bytes;
        self.release(at, bytes);
        true
    }

    /// Bytes of tensors.
    pub fn used(&self) -> u64 {
        self.used
    }

    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// The most bytes of tensors since this was last asked.
    pub fn take_peak(&mut self) -> u64 {
        std::mem::replace(&mut self.peak, self.used)
    }

    /// From here on allocations are noted, until [`traced`](Self::traced).
    pub fn trace(&mut self) {
        self.pass = Pass::Traced { trace: Trace::default(), alive: BTreeMap::new() };
    }

    pub fn traced(&mut self) -> Trace {
        match std::mem::take(&mut self.pass) {
            Pass::Traced { trace, .. } => trace,
            _ => Trace::default(),
        }
    }

    /// Serves the pass that begins from an arena: at `base`, where that is stated, else where there is room. Nothing changes
    /// where it cannot be had without moving anything.
    pub fn enter(&mut self, placement: &Arc<Placement>, base: Option<u64>) -> Option<u64> {
        let bytes = placement.arena.max(1).next_multiple_of(ALIGNMENT);
        let base = match base {
            Some(base) => self.take_at(base, bytes).then_some(base)?,
            None => {
                let more =
                    bytes.saturating_sub(self.last_free()).min(self.capacity.saturating_sub(self.mapped));
                match self.best_fit(bytes) {
                    Some(base) => base,
                    None => {
                        self.extend(more.div_ceil(self.chunk));
                        self.best_fit(bytes)?
                    }
                }
            }
        };
        let placement = placement.clone();
        self.pass = Pass::Placed {
            placement,
            base,
            next: 0,
            alive: BTreeMap::new(),
            diverged: false,
            replayed: false,
        };
        Some(base)
    }

    /// Ends the pass and frees its arena, but for tensors of it that are still alive. Says whether all went as placed.
    pub fn leave(&mut self) -> bool {
        let Pass::Placed { placement, base, alive, diverged, .. } = std::mem::take(&mut self.pass) else {
            return true;
        };
        self.stats.arena_passes += 1;
        self.stats.diverged += u64::from(diverged);
        if placement.arena > self.stats.arena {
            (self.stats.arena, self.stats.arena_bound) = (placement.arena, placement.bound);
        }
        let Some(bytes) = self.taken.remove(&base) else { return false };
        let mut at = base;
        for (tensor, bytes) in &alive {
            if *tensor > at {
                self.release(at, tensor - at);
            }
            self.taken.insert(*tensor, *bytes);
            at = tensor + bytes;
        }
        if base + bytes > at {
            self.release(at, base + bytes - at);
        }
        !diverged && alive.is_empty()
    }

    /// Where the placed pass is: how many of its tensors were allocated.
    pub fn position(&self) -> usize {
        if let Pass::Placed { next, .. } = &self.pass { *next } else { 0 }
    }

    /// Takes a placed pass back to where it was; what it allocated since then is freed.
    pub fn rewind(&mut self, position: usize) {
        if let Pass::Placed { next, .. } = &mut self.pass {
            *next = position;
        }
    }

    /// Whether every allocation of the placed pass was the one expected so far.
    pub fn as_placed(&self) -> bool {
        matches!(&self.pass, Pass::Placed { diverged: false, .. })
    }

    /// A CUDA graph runs the placed pass in hand: its tensors count, and nobody allocates them.
    pub fn replay(&mut self) {
        if let Pass::Placed { placement, replayed, alive, .. } = &mut self.pass {
            *replayed = true;
            // The micro-batch, which is there already, is one of its tensors.
            let others = self.used - alive.values().sum::<u64>();
            self.peak = self.peak.max(others + placement.bound);
        }
    }

    /// Arenas that CUDA graphs expect where they are.
    pub fn keep(&mut self, arenas: Vec<Range<u64>>) {
        self.kept = arenas;
    }

    fn take_from_arena(&mut self, bytes: u64) -> Option<u64> {
        let Pass::Placed { placement, base, next, alive, diverged, replayed: false } = &mut self.pass else {
            return None;
        };
        let expected = placement.tensors.get(*next).copied();
        *next += 1;
        *diverged |= expected.is_none_or(|(size, _)| size != bytes);
        if *diverged {
            return None;
        }
        let at = *base + expected?.1?;
        // A tensor that lives longer than it did when the pass was traced is in the way.
        let before = alive.range(..at + bytes).next_back();
        *diverged |= before.is_some_and(|(other, size)| other + size > at);
        if *diverged {
            return None;
        }
        alive.insert(at, bytes);
        Some(at)
    }

    fn find(&mut self, bytes: u64) -> Result<u64, Refusal> {
        if let Some(at) = self.best_fit(bytes) {
            return Ok(at);
        }
        let last = self.last_free();
        let chunks = (bytes - last.min(bytes)).div_ceil(self.chunk);
        let more = self.capacity.saturating_sub(self.mapped) / self.chunk;
        let refusal = Refusal { bytes, left: self.capacity.saturating_sub(self.used) };
        self.extend(chunks.min(more));
        if !self.compact(bytes) {
            return Err(refusal);
        }
        self.best_fit(bytes).ok_or(refusal)
    }

    /// Takes the shortest free range that is long enough, the lowest of several.
    fn best_fit(&mut self, bytes: u64) -> Option<u64> {
        let (_, at) = *self.lengths.range((bytes, 0)..).next()?;
        self.take_at(at, bytes).then_some(at)
    }

    /// Takes these addresses, where all of them are free.
    fn take_at(&mut self, at: u64, bytes: u64) -> bool {
        let Some((start, length)) =
            self.free.range(..=at).next_back().map(|(start, length)| (*start, *length))
        else {
            return false;
        };
        if start + length < at + bytes {
            return false;
        }
        self.unlist(start, length);
        if start < at {
            self.list(start, at - start);
        }
        if start + length > at + bytes {
            self.list(at + bytes, start + length - at - bytes);
        }
        self.taken.insert(at, bytes);
        true
    }

    /// Bytes of the free range that mapped addresses end with.
    fn last_free(&self) -> u64 {
        self.free
            .iter()
            .next_back()
            .filter(|(at, length)| *at + *length == self.end)
            .map_or(0, |(_, length)| *length)
    }

    /// Maps so many chunks more at the end; says how many there were to be had.
    fn extend(&mut self, chunks: u64) -> u64 {
        let room = (self.addresses.end - self.end) / self.chunk;
        let mapped = if chunks == 0 { 0 } else { self.backing.map(self.end, chunks.min(room)) };
        self.add(mapped);
        self.mapped += mapped * self.chunk;
        mapped
    }

    /// Adds chunks that were mapped at the end.
    fn add(&mut self, chunks: u64) {
        let (at, bytes) = (self.end, chunks * self.chunk);
        self.end += bytes;
        if bytes > 0 {
            self.release(at, bytes);
        }
    }

    /// Moves whole free chunks to the end, until the free range there has so many bytes.
    fn compact(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.last_free()).div_ceil(self.chunk);
        if missing == 0 {
            return true;
        }
        if missing > (self.addresses.end - self.end) / self.chunk {
            return false;
        }
        let kept = |at: u64| self.kept.iter().any(|arena| arena.start < at + self.chunk && at < arena.end);
        // The shortest ranges first, so that long ones stay long; what graphs expect in place last.
        let mut chunks: Vec<u64> = Vec::new();
        for (length, start) in &self.lengths {
            if start + length < self.end {
                let whole = start.next_multiple_of(self.chunk)..(start + length) / self.chunk * self.chunk;
                chunks.extend(whole.step_by(self.chunk as usize));
            }
        }
        chunks.sort_by_key(|at| kept(*at));
        if (chunks.len() as u64) < missing {
            return false;
        }
        chunks.truncate(missing as usize);
        if !self.backing.remap(&chunks, self.end) {
            return false;
        }
        self.stats.synchronizes += 1;
        for at in &chunks {
            self.take_at(*at, self.chunk);
            self.taken.remove(at);
        }
        self.add(missing);
        true
    }

    /// Gives addresses back, joined with the free ranges beside them.
    fn release(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, length)) = self.free.range(..at).next_back().map(|(a, l)| (*a, *l))
            && before + length == at
        {
            self.unlist(before, length);
            (at, bytes) = (before, bytes + length);
        }
        if let Some(length) = self.free.get(&(at + bytes)).copied() {
            self.unlist(at + bytes, length);
            bytes += length;
        }
        self.list(at, bytes);
    }

    fn list(&mut self, at: u64, bytes: u64) {
        self.free.insert(at, bytes);
        self.lengths.insert((bytes, at));
    }

    fn unlist(&mut self, at: u64, bytes: u64) {
        self.free.remove(&at);
        self.lengths.remove(&(bytes, at));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const CHUNK: u64 = 4096;
    const BASE: u64 = 1 << 20;

    /// Chunks that there are, of those the driver has.
    #[derive(Default)]
    struct Chunks {
        mapped: HashSet<u64>,
        most: u64,
    }

    impl Backing for Chunks {
        fn map(&mut self, at: u64, chunks: u64) -> u64 {
            let more = chunks.min(self.most - self.mapped.len() as u64);
            (0..more).for_each(|i| assert!(self.mapped.insert(at + i * CHUNK), "mapped twice"));
            more
        }

        fn remap(&mut self, from: &[u64], to: u64) -> bool {
            from.iter().for_each(|at| assert!(self.mapped.remove(at), "not mapped"));
            (0..from.len() as u64).for_each(|i| assert!(self.mapped.insert(to + i * CHUNK), "mapped twice"));
            true
        }
    }

    fn heap(chunks: u64) -> Heap<Chunks> {
        let backing = Chunks { most: chunks, ..Chunks::default() };
        Heap::new(backing, CHUNK, BASE..BASE + 1000 * chunks * CHUNK, chunks * CHUNK)
    }

    /// Tensors lie in mapped chunks, and none in another.
    fn sound(heap: &Heap<Chunks>, tensors: &BTreeMap<u64, u64>) {
        let mut end = 0;
        for (at, bytes) in tensors {
            assert!(*at >= end, "tensors overlap");
            end = at + bytes;
            let first = at / CHUNK * CHUNK;
            assert!(
                (first..end).step_by(CHUNK as usize).all(|chunk| heap.backing.mapped.contains(&chunk)),
                "unmapped"
            );
        }
        let free: u64 = heap.free.values().sum();
        assert_eq!(
            free + tensors.values().sum::<u64>(),
            heap.mapped,
            "every mapped byte is free or a tensor's"
        );
        assert_eq!(heap.free.len(), heap.lengths.len());
        assert_eq!(heap.backing.mapped.len() as u64 * CHUNK, heap.mapped);
    }

    proptest! {
        /// Whatever comes and goes, tensors do not overlap, and while whole chunks for it are free none is refused.
        #[test]
        fn tensors_have_memory_of_their_own(steps in prop::collection::vec((1u64..40_000, any::<prop::sample::Index>(), any::<bool>()), 1..200)) {
            let mut heap = heap(64);
            let mut tensors = BTreeMap::new();
            for (bytes, which, gone) in steps {
                if gone && !tensors.is_empty() {
                    let at = *which.get(&tensors.keys().copied().collect::<Vec<_>>());
                    tensors.remove(&at);
                    prop_assert!(heap.free(at));
                    prop_assert!(!heap.free(at), "freed twice");
                } else {
                    let bytes = bytes.next_multiple_of(ALIGNMENT);
                    let whole: u64 = heap.free.iter().map(|(at, length)| {
                        ((at + length) / CHUNK).saturating_sub(at.div_ceil(CHUNK))
                    }).sum::<u64>() + 64 - heap.mapped / CHUNK;
                    match heap.allocate(bytes) {
                        Ok(at) => prop_assert!(tensors.insert(at, bytes).is_none()),
                        Err(refusal) => {
                            prop_assert!(whole < bytes.div_ceil(CHUNK), "{whole} whole chunks are free");
                            prop_assert_eq!(refusal.bytes, bytes);
                            prop_assert_eq!(refusal.left, 64 * CHUNK - heap.used());
                        }
                    }
                }
                sound(&heap, &tensors);
                prop_assert_eq!(heap.used(), tensors.values().sum::<u64>());
            }
        }

        /// A pass that was traced runs from its arena at the same addresses every time, and needs no more of it than was
        /// placed; what it leaves behind is not part of it.
        #[test]
        fn passes_are_served_from_their_arena(sizes in prop::collection::vec((1u64..20_000, any::<bool>()), 1..40), others in prop::collection::vec(1u64..9000, 0..10)) {
            let mut heap = heap(4096);
            let run = |heap: &mut Heap<Chunks>| -> Vec<u64> {
                let mut kept = Vec::new();
                for (bytes, keep) in &sizes {
                    let at = heap.allocate(*bytes).unwrap();
                    if *keep { kept.push(at) } else { heap.free(at); }
                }
                kept.drain(..).rev().for_each(|at| { heap.free(at); });
                vec![heap.allocate(24).unwrap()]
            };
            heap.trace();
            let mut lasting = run(&mut heap);
            let placement = Arc::new(Placement::new(&heap.traced()));
            prop_assert_eq!(placement.tensors.last().unwrap().1, None, "the result outlives the pass");
            let mut base = None;
            for _ in 0..3 {
                let at = heap.enter(&placement, base);
                prop_assert!(at.is_some());
                lasting.extend(run(&mut heap));
                prop_assert!(heap.leave());
                // An evaluation has the arena's memory in between.
                let between: Vec<_> = others.iter().map(|bytes| heap.allocate(*bytes).unwrap()).collect();
                between.into_iter().for_each(|at| { heap.free(at); });
                prop_assert!(base.is_none() || base == at);
                base = at;
            }
            prop_assert_eq!(heap.used(), lasting.len() as u64 * ALIGNMENT);
            prop_assert_eq!(heap.stats.diverged, 0);
            prop_assert_eq!(heap.stats.synchronizes, 0);
            // A graph that replays the pass allocates nothing of it, and what is allocated meanwhile is elsewhere.
            let base = heap.enter(&placement, base).unwrap();
            heap.take_peak();
            let used = heap.used();
            let first = heap.allocate(sizes[0].0).unwrap();
            heap.replay();
            prop_assert_eq!(heap.take_peak(), used + placement.bound, "the first tensor counts once");
            let sums = heap.allocate(24).unwrap();
            prop_assert!(!(base..base + placement.arena).contains(&sums) || placement.arena == 0);
            prop_assert!(heap.free(first));
            prop_assert!(heap.leave());
        }
    }

    #[test]
    fn another_pass_than_the_traced_one_is_served_all_the_same() {
        let mut heap = heap(64);
        heap.trace();
        let tensors = [1000, 2000, 3000].map(|bytes| heap.allocate(bytes).unwrap());
        tensors.iter().for_each(|at| assert!(heap.free(*at)));
        let placement = Arc::new(Placement::new(&heap.traced()));
        heap.enter(&placement, None).unwrap();
        let longer = [1000, 2000, 9000, 3000].map(|bytes| heap.allocate(bytes).unwrap());
        assert!(!heap.leave(), "it says so");
        let bytes = [1024, 2048, 9216, 3072];
        sound(&heap, &longer.into_iter().zip(bytes).collect());
        longer.iter().for_each(|at| assert!(heap.free(*at)));
        assert_eq!((heap.used(), heap.stats.diverged), (0, 1));
        // One tensor that lives longer than the trace says.
        heap.trace();
        let first = heap.allocate(1000).unwrap();
        heap.free(first);
        let second = heap.allocate(1000).unwrap();
        heap.free(second);
        let placement = Arc::new(Placement::new(&heap.traced()));
        assert_eq!(placement.arena, 1024);
        heap.enter(&placement, None).unwrap();
        let (a, b) = (heap.allocate(1000).unwrap(), heap.allocate(1000).unwrap());
        assert_ne!(a, b);
        assert!(!heap.leave());
        assert!(heap.free(a) && heap.free(b));
    }

    #[test]
    fn an_arena_that_somebody_has_is_not_entered() {
        let mut heap = heap(4);
        heap.trace();
        let tensor = heap.allocate(2 * CHUNK).unwrap();
        heap.free(tensor);
        let placement = Arc::new(Placement::new(&heap.traced()));
        let base = heap.enter(&placement, None).unwrap();
        heap.leave();
        let other = heap.allocate(CHUNK).unwrap();
        assert_eq!(other, base);
        assert_eq!(heap.enter(&placement, Some(base)), None);
        heap.free(other);
        assert_eq!(heap.enter(&placement, Some(base)), Some(base));
    }

    /// Chunks that a graph expects in place are moved only where nothing else helps.
    #[test]
    fn arenas_of_graphs_are_moved_last() {
        let mut heap = heap(6);
        let tensors: Vec<u64> = (0..6).map(|_| heap.allocate(CHUNK).unwrap()).collect();
        let arena = tensors[0]..tensors[0] + CHUNK;
        heap.keep(std::iter::once(arena).collect());
        [0, 2, 4].iter().for_each(|i| assert!(heap.free(tensors[*i])));
        let two = heap.allocate(2 * CHUNK).unwrap();
        assert_eq!(heap.stats.synchronizes, 1);
        assert!(heap.take_at(tensors[0], CHUNK), "it is where it was");
        heap.taken.remove(&tensors[0]);
        heap.release(tensors[0], CHUNK);
        heap.free(two);
        heap.allocate(3 * CHUNK).unwrap();
        assert!(!heap.take_at(tensors[0], CHUNK));
    }

    #[test]
    fn memory_that_others_have_is_a_refusal() {
        let mut heap = heap(8);
        heap.backing.most = 3;
        heap.claim(8 * CHUNK);
        assert_eq!(heap.mapped(), 3 * CHUNK);
        let refusal = heap.allocate(4 * CHUNK).unwrap_err();
        assert_eq!(refusal, Refusal { bytes: 4 * CHUNK, left: 8 * CHUNK });
        assert!(heap.allocate(3 * CHUNK).is_ok());
    }
}
