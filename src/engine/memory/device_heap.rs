//! The device heap: a tensor allocator over virtual addresses to which physical chunks are mapped.
//!
//! All kernels run on one stream, so memory that the host frees can be reused at once: stream order puts its next user
//! behind its last. Placement therefore depends only on the order of calls, never on the progress of the device. If no
//! free range is long enough, the heap maps more chunks, up to its capacity. At the capacity it compacts: it remaps
//! whole free chunks to one contiguous range, which costs a synchronize and is counted. A pass whose allocations are
//! known is served from an [`arena`].

mod arena;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use arena::PassMode;

/// Alignment of tensors, the same as that of the driver's allocator.
pub const ALIGNMENT: u64 = 512;

/// Physical memory in chunks of one size, mapped to virtual addresses.
pub trait Backing {
    /// Maps new chunks at consecutive addresses from `at`; returns how many the driver granted.
    fn map(&mut self, at: u64, chunks: u64) -> u64;

    /// Synchronizes with the device, then remaps the chunks at `from` to consecutive addresses from `to`. Returns false
    /// if that is not possible now.
    fn remap(&mut self, from: &[u64], to: u64) -> bool;

    /// Synchronizes with the device, then returns the chunks at these addresses to the driver. Returns false if that
    /// is not possible now.
    fn release(&mut self, chunks: &[u64]) -> bool;
}

/// An allocation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapOom {
    pub bytes: u64,
    /// Bytes that no tensor uses, below the capacity, or below what the driver granted if that is less.
    pub available: u64,
}

/// What serving the allocations cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapStats {
    /// Synchronizes caused by compaction.
    pub synchronizes: u64,
    /// Passes served from an arena.
    pub arena_passes: u64,
    /// Passes whose allocations diverged from their trace.
    pub diverged: u64,
    /// Bytes of the largest arena, and the peak of its live tensors, which no arena can go below.
    pub arena_bytes: u64,
    pub arena_lower_bound: u64,
}

pub struct DeviceHeap<B> {
    backing: B,
    chunk_bytes: u64,
    /// Reserved virtual addresses.
    address_range: Range<u64>,
    /// End of the mapped addresses.
    mapped_end: u64,
    mapped_bytes: u64,
    /// Maximum bytes that may be mapped.
    capacity: u64,
    /// Free mapped ranges, by address and by length.
    free_by_address: BTreeMap<u64, u64>,
    free_by_length: BTreeSet<(u64, u64)>,
    /// Tensors, and the arena while a pass runs.
    allocated: BTreeMap<u64, u64>,
    /// Bytes of live tensors, and their peak since `take_peak`.
    used_bytes: u64,
    peak_bytes: u64,
    /// Arenas whose addresses CUDA graphs captured: compacted only as a last resort.
    graph_arenas: Vec<Range<u64>>,
    pass_mode: PassMode,
    pub stats: HeapStats,
}

impl<B: Backing> DeviceHeap<B> {
    /// `address_range` starts at a multiple of `chunk_bytes`.
    pub fn new(backing: B, chunk_bytes: u64, address_range: Range<u64>, capacity: u64) -> Self {
        Self {
            backing,
            chunk_bytes,
            mapped_end: address_range.start,
            address_range,
            mapped_bytes: 0,
            capacity: capacity.next_multiple_of(chunk_bytes),
            free_by_address: BTreeMap::new(),
            free_by_length: BTreeSet::new(),
            allocated: BTreeMap::new(),
            used_bytes: 0,
            peak_bytes: 0,
            graph_arenas: Vec::new(),
            pass_mode: PassMode::None,
            stats: HeapStats::default(),
        }
    }

    /// Maps chunks until this many bytes are mapped, as far as the driver grants them.
    pub fn preallocate(&mut self, bytes: u64) {
        let bytes =
            bytes.min(self.capacity).saturating_sub(self.mapped_bytes).next_multiple_of(self.chunk_bytes);
        self.map_chunks(bytes / self.chunk_bytes);
    }

    /// Returns whole free chunks to the driver, except those of graph arenas.
    pub fn release_free_chunks(&mut self) {
        let chunks: Vec<u64> =
            self.free_chunks().filter(|at| !in_any(&self.graph_arenas, *at, self.chunk_bytes)).collect();
        if chunks.is_empty() || !self.backing.release(&chunks) {
            return;
        }
        for at in &chunks {
            self.take_at(*at, self.chunk_bytes);
            self.allocated.remove(at);
        }
        self.mapped_bytes -= chunks.len() as u64 * self.chunk_bytes;
    }

    pub fn allocate(&mut self, bytes: u64) -> Result<u64, HeapOom> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let at = match self.pass_mode.allocate(bytes) {
            Some(at) => at,
            None => {
                let at = self.allocate_range(bytes)?;
                self.pass_mode.trace_allocate(at, bytes);
                at
            }
        };
        self.used_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
        Ok(at)
    }

    /// Frees a tensor; returns false if the address is not from this heap.
    pub fn free(&mut self, at: u64) -> bool {
        if let Some(bytes) = self.pass_mode.free(at) {
            self.used_bytes -= bytes;
            return true;
        }
        let Some(bytes) = self.allocated.remove(&at) else { return false };
        self.used_bytes -= bytes;
        self.release_range(at, bytes);
        true
    }

    /// Bytes of live tensors.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// Peak bytes of live tensors since the last call.
    pub fn take_peak(&mut self) -> u64 {
        std::mem::replace(&mut self.peak_bytes, self.used_bytes)
    }

    fn allocate_range(&mut self, bytes: u64) -> Result<u64, HeapOom> {
        if let Some(at) = self.best_fit(bytes) {
            return Ok(at);
        }
        let last = self.tail_free_bytes();
        let chunks = (bytes - last.min(bytes)).div_ceil(self.chunk_bytes);
        let more = self.capacity.saturating_sub(self.mapped_bytes) / self.chunk_bytes;
        let granted = self.map_chunks(chunks.min(more)) == chunks.min(more);
        let limit = if granted { self.capacity } else { self.mapped_bytes };
        let oom = HeapOom { bytes, available: limit.saturating_sub(self.used_bytes) };
        if !self.compact(bytes) {
            return Err(oom);
        }
        self.best_fit(bytes).ok_or(oom)
    }

    /// Takes the shortest free range that fits; the lowest address on ties.
    fn best_fit(&mut self, bytes: u64) -> Option<u64> {
        let (_, at) = *self.free_by_length.range((bytes, 0)..).next()?;
        self.take_at(at, bytes).then_some(at)
    }

    /// Takes exactly this range, if all of it is free.
    fn take_at(&mut self, at: u64, bytes: u64) -> bool {
        let Some((start, length)) =
            self.free_by_address.range(..=at).next_back().map(|(start, length)| (*start, *length))
        else {
            return false;
        };
        if start + length < at + bytes {
            return false;
        }
        self.remove_free(start, length);
        if start < at {
            self.insert_free(start, at - start);
        }
        if start + length > at + bytes {
            self.insert_free(at + bytes, start + length - at - bytes);
        }
        self.allocated.insert(at, bytes);
        true
    }

    /// Bytes of the free range at the end of the mapped addresses.
    fn tail_free_bytes(&self) -> u64 {
        self.free_by_address
            .iter()
            .next_back()
            .filter(|(at, length)| *at + *length == self.mapped_end)
            .map_or(0, |(_, length)| *length)
    }

    /// Maps this many more chunks at the end; returns how many were available.
    fn map_chunks(&mut self, chunks: u64) -> u64 {
        let remaining_chunks = (self.address_range.end - self.mapped_end) / self.chunk_bytes;
        let mapped =
            if chunks == 0 { 0 } else { self.backing.map(self.mapped_end, chunks.min(remaining_chunks)) };
        self.append_mapped(mapped);
        self.mapped_bytes += mapped * self.chunk_bytes;
        mapped
    }

    /// Adds chunks that were just mapped at the end.
    fn append_mapped(&mut self, chunks: u64) {
        let (at, bytes) = (self.mapped_end, chunks * self.chunk_bytes);
        self.mapped_end += bytes;
        if bytes > 0 {
            self.release_range(at, bytes);
        }
    }

    /// Remaps whole free chunks to the end, until the free range there has this many bytes.
    fn compact(&mut self, bytes: u64) -> bool {
        let missing = bytes.saturating_sub(self.tail_free_bytes()).div_ceil(self.chunk_bytes);
        if missing == 0 {
            return true;
        }
        if missing > (self.address_range.end - self.mapped_end) / self.chunk_bytes {
            return false;
        }
        // Take chunks from the shortest ranges first to keep the long ones intact, and from graph arenas last.
        let tail = self.mapped_end - self.tail_free_bytes();
        let mut chunks: Vec<u64> = self.free_chunks().filter(|at| *at < tail).collect();
        chunks.sort_by_key(|at| in_any(&self.graph_arenas, *at, self.chunk_bytes));
        if (chunks.len() as u64) < missing {
            return false;
        }
        chunks.truncate(missing as usize);
        if !self.backing.remap(&chunks, self.mapped_end) {
            return false;
        }
        self.stats.synchronizes += 1;
        for at in &chunks {
            self.take_at(*at, self.chunk_bytes);
            self.allocated.remove(at);
        }
        self.append_mapped(missing);
        true
    }

    /// Chunks without any tensor, those of the shortest free ranges first.
    fn free_chunks(&self) -> impl Iterator<Item = u64> {
        self.free_by_length.iter().flat_map(move |(length, start)| {
            let whole = start.next_multiple_of(self.chunk_bytes)
                ..(start + length) / self.chunk_bytes * self.chunk_bytes;
            whole.step_by(self.chunk_bytes as usize)
        })
    }

    /// Frees a range and coalesces it with its free neighbours.
    fn release_range(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((before, length)) = self.free_by_address.range(..at).next_back().map(|(a, l)| (*a, *l))
            && before + length == at
        {
            self.remove_free(before, length);
            (at, bytes) = (before, bytes + length);
        }
        if let Some(length) = self.free_by_address.get(&(at + bytes)).copied() {
            self.remove_free(at + bytes, length);
            bytes += length;
        }
        self.insert_free(at, bytes);
    }

    fn insert_free(&mut self, at: u64, bytes: u64) {
        self.free_by_address.insert(at, bytes);
        self.free_by_length.insert((bytes, at));
    }

    fn remove_free(&mut self, at: u64, bytes: u64) {
        self.free_by_address.remove(&at);
        self.free_by_length.remove(&(bytes, at));
    }
}

/// Whether the chunk at `at` overlaps one of these ranges.
fn in_any(ranges: &[Range<u64>], at: u64, chunk_bytes: u64) -> bool {
    ranges.iter().any(|range| range.start < at + chunk_bytes && at < range.end)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    pub(super) const CHUNK: u64 = 4096;
    const BASE: u64 = 1 << 20;

    /// Mapped chunks, out of `max_chunks` that the fake driver has.
    #[derive(Default)]
    pub(super) struct FakeBacking {
        mapped: HashSet<u64>,
        max_chunks: u64,
    }

    impl Backing for FakeBacking {
        fn map(&mut self, at: u64, chunks: u64) -> u64 {
            let more = chunks.min(self.max_chunks - self.mapped.len() as u64);
            (0..more).for_each(|i| assert!(self.mapped.insert(at + i * CHUNK), "mapped twice"));
            more
        }

        fn remap(&mut self, from: &[u64], to: u64) -> bool {
            from.iter().for_each(|at| assert!(self.mapped.remove(at), "not mapped"));
            (0..from.len() as u64).for_each(|i| assert!(self.mapped.insert(to + i * CHUNK), "mapped twice"));
            true
        }

        fn release(&mut self, chunks: &[u64]) -> bool {
            chunks.iter().for_each(|at| assert!(self.mapped.remove(at), "not mapped"));
            true
        }
    }

    pub(super) fn heap(chunks: u64) -> DeviceHeap<FakeBacking> {
        let backing = FakeBacking { max_chunks: chunks, ..FakeBacking::default() };
        DeviceHeap::new(backing, CHUNK, BASE..BASE + 1000 * chunks * CHUNK, chunks * CHUNK)
    }

    /// Tensors lie within mapped chunks and do not overlap.
    pub(super) fn check_invariants(heap: &DeviceHeap<FakeBacking>, tensors: &BTreeMap<u64, u64>) {
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
        let free: u64 = heap.free_by_address.values().sum();
        assert_eq!(
            free + tensors.values().sum::<u64>(),
            heap.mapped_bytes,
            "every mapped byte is free or a tensor's"
        );
        assert_eq!(heap.free_by_address.len(), heap.free_by_length.len());
        assert_eq!(heap.backing.mapped.len() as u64 * CHUNK, heap.mapped_bytes);
    }

    proptest! {
        /// Whatever the order of allocations and frees, tensors never overlap, and no allocation fails while enough
        /// whole chunks are free.
        #[test]
        fn tensors_have_memory_of_their_own(
            steps in prop::collection::vec((1u64..40_000, any::<prop::sample::Index>(), any::<bool>()), 1..200),
        ) {
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
                    let whole: u64 = heap.free_by_address.iter().map(|(at, length)| {
                        ((at + length) / CHUNK).saturating_sub(at.div_ceil(CHUNK))
                    }).sum::<u64>() + 64 - heap.mapped_bytes / CHUNK;
                    match heap.allocate(bytes) {
                        Ok(at) => prop_assert!(tensors.insert(at, bytes).is_none()),
                        Err(refusal) => {
                            prop_assert!(whole < bytes.div_ceil(CHUNK), "{whole} whole chunks are free");
                            prop_assert_eq!(refusal.bytes, bytes);
                            prop_assert_eq!(refusal.available, 64 * CHUNK - heap.used_bytes());
                        }
                    }
                }
                check_invariants(&heap, &tensors);
                prop_assert_eq!(heap.used_bytes(), tensors.values().sum::<u64>());
            }
        }

    }

    /// Chunks in arenas that graphs captured are remapped only as a last resort.
    #[test]
    fn arenas_of_graphs_are_moved_last() {
        let mut heap = heap(6);
        let tensors: Vec<u64> = (0..6).map(|_| heap.allocate(CHUNK).unwrap()).collect();
        let arena = tensors[0]..tensors[0] + CHUNK;
        heap.set_graph_arenas(std::iter::once(arena).collect());
        [0, 2, 4].iter().for_each(|i| assert!(heap.free(tensors[*i])));
        let two = heap.allocate(2 * CHUNK).unwrap();
        assert_eq!(heap.stats.synchronizes, 1);
        assert!(heap.take_at(tensors[0], CHUNK), "it is where it was");
        heap.allocated.remove(&tensors[0]);
        heap.release_range(tensors[0], CHUNK);
        heap.free(two);
        heap.allocate(3 * CHUNK).unwrap();
        assert!(!heap.take_at(tensors[0], CHUNK));
    }

    #[test]
    fn memory_used_by_others_is_an_oom() {
        let mut heap = heap(8);
        heap.backing.max_chunks = 3;
        heap.preallocate(8 * CHUNK);
        assert_eq!(heap.mapped_bytes(), 3 * CHUNK);
        let oom = heap.allocate(4 * CHUNK).unwrap_err();
        assert_eq!(oom, HeapOom { bytes: 4 * CHUNK, available: 3 * CHUNK });
        assert!(heap.allocate(3 * CHUNK).is_ok());
    }

    /// The driver gets back what no tensor and no graph uses, and the heap maps it again when it needs it.
    #[test]
    fn free_chunks_are_released_and_mapped_again() {
        let mut heap = heap(8);
        let tensors: Vec<u64> = (0..4).map(|_| heap.allocate(CHUNK).unwrap()).collect();
        heap.preallocate(8 * CHUNK);
        [0, 2].iter().for_each(|i| assert!(heap.free(tensors[*i])));
        heap.set_graph_arenas(std::iter::once(tensors[0]..tensors[0] + CHUNK).collect());
        heap.release_free_chunks();
        assert_eq!((heap.mapped_bytes(), heap.backing.mapped.len()), (3 * CHUNK, 3));
        assert!(heap.backing.mapped.contains(&tensors[0]), "the arena of a graph");
        let kept = [(tensors[1], CHUNK), (tensors[3], CHUNK)];
        check_invariants(&heap, &kept.into_iter().collect());
        let long = heap.allocate(5 * CHUNK).unwrap();
        check_invariants(&heap, &kept.into_iter().chain([(long, 5 * CHUNK)]).collect());
        assert_eq!(heap.mapped_bytes(), 8 * CHUNK);
    }
}
