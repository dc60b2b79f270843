//! A set that can only be read forward, as a [`Source`]: blocks are held in a bounded memory while they are
//! needed.
//!
//! One thread at a time goes forward in one open shard; whoever needs the block it reads waits for it. Told
//! what is needed next ([`Source::expect`]), a thread of its own reads ahead. When room is needed, the block
//! that is needed last goes: those not expected first, the longest unused of them first, then the
//! expected ones from the last. Any order of access gives the same samples; that of
//! [`Order`](crate::data::order::Order) reads each shard once an epoch.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::{RecordBlock, SEQUENTIAL_WINDOW_BYTES, ShardReader, ShardedDataset};
use crate::data::{BatchRow, DataError, Dataset, Features, LengthStats, SampleKey};
use crate::panics::catch_panic;

/// Records in shards, readable in any order.
pub struct StreamingDataset {
    cache: Arc<BlockCache>,
    /// Reads ahead; started when something is expected.
    prefetch_thread: Mutex<Option<JoinHandle<()>>>,
}

struct BlockCache {
    shards: Arc<dyn ShardedDataset>,
    /// Records before each block, and all of them.
    block_starts: Vec<u64>,
    buffer_bytes: u64,
    /// Bytes of blocks that may be held: two windows of the order.
    max_bytes: u64,
    /// Bytes of the largest block, which is what a record that is passed over can take.
    largest_block_bytes: u64,
    /// Another reader counts what the shards themselves keep.
    is_secondary: bool,
    state: Mutex<BlockCacheState>,
    /// A block came or went, a reader is free, or something else is expected.
    changed: Condvar,
    /// Threads that wait for a block to be let go of.
    waiting_for_memory: AtomicU64,
}

#[derive(Default)]
struct BlockCacheState {
    blocks: BTreeMap<u32, CachedBlock>,
    /// Bytes of the blocks held or being read.
    held_bytes: u64,
    /// The blocks that are needed next, in order, and the place of each.
    expected: Vec<u32>,
    rank: BTreeMap<u32, usize>,
    /// Counts uses.
    use_clock: u64,
    /// A thread goes forward; it has the open shard.
    reader_active: bool,
    open_shard: Option<OpenShard>,
    /// Threads that wait for a block, and so go before what reads ahead.
    waiting_readers: usize,
    /// Reading ahead failed: whoever needs the block finds out why.
    prefetch_failed: bool,
    stop: bool,
}

struct CachedBlock {
    content: Arc<BlockContents>,
    last_used: u64,
}

/// A shard that is read forward, and the block it is at the beginning of.
struct OpenShard {
    next_block: u32,
    reader: Box<dyn ShardReader>,
}

/// The records of a block.
struct BlockContents {
    bytes: Vec<u8>,
    /// Where each record ends.
    record_ends: Vec<u32>,
    /// Those that could not be read, by their number in the block.
    bad: Vec<(u64, DataError)>,
}

impl BlockContents {
    fn record(&self, i: u64) -> Result<&[u8], DataError> {
        if let Ok(bad) = self.bad.binary_search_by_key(&i, |(bad, _)| *bad) {
            return Err(self.bad[bad].1.clone());
        }
        let end = |i: usize| self.record_ends[i] as usize;
        let start = if i == 0 { 0 } else { end(i as usize - 1) };
        Ok(&self.bytes[start..end(i as usize)])
    }
}

impl StreamingDataset {
    /// Holds at most twice `buffer_bytes` bytes of blocks, or two of the largest block where that is more.
    pub fn new(shards: Arc<dyn ShardedDataset>, buffer: u64) -> Self {
        Self::build(shards, buffer, false)
    }

    /// As [`StreamingDataset::new`], for a set that is read in its own order only.
    pub fn sequential(shards: Arc<dyn ShardedDataset>) -> Self {
        Self::build(shards, SEQUENTIAL_WINDOW_BYTES, false)
    }

    /// Bytes of blocks held or being read now, and the most that may be.
    pub fn held_bytes(&self) -> (u64, u64) {
        (self.cache.lock().held_bytes, self.cache.max_bytes)
    }

    fn build(shards: Arc<dyn ShardedDataset>, buffer: u64, is_secondary: bool) -> Self {
        let (mut starts, mut all, mut held, mut largest) = (vec![0], 0, 0u64, 0);
        for block in shards.blocks() {
            all += block.records;
            starts.push(all);
            held = held.saturating_add(block.held_bytes());
            largest = largest.max(block.held_bytes());
        }
        let most = buffer.max(largest).saturating_mul(2).min(held);
        let (state, changed, short) = Default::default();
        let held = BlockCache {
            shards,
            block_starts: starts,
            buffer_bytes: buffer,
            max_bytes: most,
            largest_block_bytes: largest,
            is_secondary,
            state,
            changed,
            waiting_for_memory: short,
        };
        Self { cache: Arc::new(held), prefetch_thread: Mutex::default() }
    }
}

impl Drop for StreamingDataset {
    fn drop(&mut self) {
        self.cache.lock().stop = true;
        self.cache.changed.notify_all();
        let thread = self.prefetch_thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // It catches panics, so there is nothing to learn from a failed join.
        drop(thread.map(JoinHandle::join));
    }
}

impl Dataset for StreamingDataset {
    fn len(&self) -> u64 {
        self.cache.block_starts.last().copied().unwrap_or(0)
    }

    fn features(&self) -> &Features {
        self.cache.shards.features()
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let cache = &self.cache;
        let block = cache.block_starts.partition_point(|start| *start <= index) - 1;
        let content = cache.get(block as u32)?;
        let record = content.record(index - cache.block_starts[block])?;
        cache.shards.decode(record, index, key, into)
    }

    /// The blocks, a record that is passed over, the tables, and what the shards keep.
    fn resident_bytes(&self) -> u64 {
        let cache = &self.cache;
        let tables = (cache.block_starts.len() * (size_of::<u64>() + size_of::<RecordBlock>())) as u64;
        let shards = if cache.is_secondary { 0 } else { cache.shards.resident_bytes() };
        (cache.max_bytes + tables + shards).saturating_add(cache.largest_block_bytes)
    }

    fn blocks(&self) -> Option<Vec<RecordBlock>> {
        let held = |block: &RecordBlock| RecordBlock { bytes: block.held_bytes(), ..*block };
        Some(self.cache.shards.blocks().iter().map(held).collect())
    }

    fn prefetch(&self, blocks: Vec<u32>) {
        let mut state = self.cache.lock();
        if state.expected == blocks {
            return;
        }
        // A block may be expected twice, where an epoch ends: it is needed first when it is first needed.
        state.rank = blocks.iter().enumerate().rev().map(|(rank, block)| (*block, rank)).collect();
        (state.expected, state.prefetch_failed) = (blocks, false);
        drop(state);
        self.cache.changed.notify_all();
        let mut prefetch_handle = self.prefetch_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if prefetch_handle.is_none() {
            let cache = self.cache.clone();
            // Without it, blocks are read when they are needed.
            *prefetch_handle =
                thread::Builder::new().name("data-ahead".into()).spawn(move || cache.prefetch_loop()).ok();
        }
    }

    fn sequential_reader(&self) -> Option<Arc<dyn Dataset>> {
        let buffer = self.cache.buffer_bytes.min(SEQUENTIAL_WINDOW_BYTES);
        Some(Arc::new(Self::build(self.cache.shards.clone(), buffer, true)))
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        self.cache.shards.class_counts()
    }

    fn length_stats(&self) -> Option<LengthStats> {
        self.cache.shards.length_stats()
    }

    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        self.cache.shards.decode_tokens(tokens)
    }

    fn input_names(&self) -> Vec<String> {
        self.cache.shards.input_names()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.cache.shards.describe()
    }
}

impl BlockCacheState {
    /// The first expected block that is not held, of a rank below `below`, and its rank.
    fn next_missing(&self, below: usize) -> Option<(usize, u32)> {
        let mut expected = self.expected.iter().copied().enumerate().take(below);
        expected.find(|(_, block)| !self.blocks.contains_key(block))
    }

    /// The block, of those not in use, that is needed last; `None` where it is needed before the one of this rank.
    fn victim(&self, before: Option<usize>) -> Option<u32> {
        let last = |block: &u32| self.rank.get(block).copied().unwrap_or(usize::MAX);
        let free = self.blocks.iter().filter(|(_, kept)| Arc::strong_count(&kept.content) == 1);
        let order = free.map(|(block, kept)| (last(block), std::cmp::Reverse(kept.last_used), *block));
        order.max().filter(|(last, ..)| before.is_none_or(|rank| *last > rank)).map(|(_, _, block)| block)
    }
}

/// A content in use, which cannot be let go of.
struct BlockGuard<'a> {
    cache: &'a BlockCache,
    /// Present until dropped.
    content: Option<Arc<BlockContents>>,
}

impl Deref for BlockGuard<'_> {
    type Target = BlockContents;

    fn deref(&self) -> &BlockContents {
        match &self.content {
            Some(content) => content,
            None => unreachable!("the content leaves only when it is dropped"),
        }
    }
}

impl Drop for BlockGuard<'_> {
    fn drop(&mut self) {
        self.content = None;
        // With `BlockCache::reserve`: either this sees that somebody waits, or that one sees the content let go.
        fence(Ordering::SeqCst);
        if self.cache.waiting_for_memory.load(Ordering::Relaxed) > 0 {
            drop(self.cache.lock());
            self.cache.changed.notify_all();
        }
    }
}

/// The right to go forward; given back when dropped, whatever happened.
struct ReaderGuard<'a>(&'a BlockCache, Option<OpenShard>);

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.reader_active, state.open_shard) = (false, self.1.take());
        drop(state);
        self.0.changed.notify_all();
    }
}

/// Room taken for a block; given back when dropped unless the block came.
struct BlockReservation<'a>(&'a BlockCache, u64);

impl Drop for BlockReservation<'_> {
    fn drop(&mut self) {
        self.0.lock().held_bytes -= self.1;
    }
}

impl BlockCache {
    fn lock(&self) -> MutexGuard<'_, BlockCacheState> {
        // No reader or decoder runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, BlockCacheState>) -> MutexGuard<'a, BlockCacheState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of a block, read if it is not held.
    fn get(&self, block: u32) -> Result<BlockGuard<'_>, DataError> {
        let mut state = self.lock();
        loop {
            state.use_clock += 1;
            let now = state.use_clock;
            if let Some(kept) = state.blocks.get_mut(&block) {
                kept.last_used = now;
                return Ok(self.guard(kept.content.clone()));
            }
            if state.reader_active {
                state.waiting_readers += 1;
                state = self.wait(state);
                state.waiting_readers -= 1;
                if state.waiting_readers == 0 {
                    self.changed.notify_all();
                }
                continue;
            }
            // What is expected before it is read first, so that no shard is left and opened again; what is wrong
            // with that is for others to find out.
            let Some((_, earlier)) = state.rank.get(&block).and_then(|rank| state.next_missing(*rank)) else {
                return self.fetch_required(state, block);
            };
            let read = self.fetch(state, earlier, false);
            if !matches!(read, Ok(Some(_))) {
                return self.fetch_required(self.lock(), block);
            }
            drop(read);
            state = self.lock();
        }
    }

    /// Reads a block that must be had, as soon as no other thread reads.
    fn fetch_required<'a>(
        &'a self,
        mut state: MutexGuard<'a, BlockCacheState>,
        block: u32,
    ) -> Result<BlockGuard<'a>, DataError> {
        while state.reader_active {
            state = self.wait(state);
        }
        if let Some(kept) = state.blocks.get(&block) {
            return Ok(self.guard(kept.content.clone()));
        }
        match self.fetch(state, block, true)? {
            Some(content) => Ok(content),
            None => unreachable!("room is made for a block that must be had"),
        }
    }

    /// Reads what is expected as far as there is room, until the set is dropped.
    fn prefetch_loop(&self) {
        let mut state = self.lock();
        while !state.stop {
            let idle = state.reader_active || state.waiting_readers > 0 || state.prefetch_failed;
            let next = state.next_missing(usize::MAX).filter(|_| !idle);
            let block = next.filter(|(rank, block)| {
                let fits =
                    state.held_bytes + self.shards.blocks()[*block as usize].held_bytes() <= self.max_bytes;
                fits || state.victim(Some(*rank)).is_some()
            });
            let Some((_, block)) = block else {
                state = self.wait(state);
                continue;
            };
            let read = catch_panic(|| self.fetch(state, block, false).map(drop));
            state = self.lock();
            state.prefetch_failed |= !matches!(read, Ok(Ok(())));
        }
    }

    /// Goes forward to a block, keeping the expected ones on the way where there is room. `None` where there is
    /// none for the block itself, unless it `required` be had.
    fn fetch(
        &self,
        mut state: MutexGuard<'_, BlockCacheState>,
        block: u32,
        required: bool,
    ) -> Result<Option<BlockGuard<'_>>, DataError> {
        state.reader_active = true;
        let open = state.open_shard.take();
        drop(state);
        let blocks = self.shards.blocks();
        let shard = blocks[block as usize].shard;
        let on_the_way =
            |open: &OpenShard| open.next_block <= block && blocks[open.next_block as usize].shard == shard;
        let mut reader_guard = ReaderGuard(self, None);
        let mut open = match open.filter(on_the_way) {
            Some(open) => open,
            None => {
                let next = blocks.partition_point(|b| b.shard < shard) as u32;
                OpenShard { next_block: next, reader: self.shards.open(shard)? }
            }
        };
        while open.next_block < block {
            match self.reserve(open.next_block, false) {
                Some(room) => drop(self.read_block(&mut open, room)?),
                None => self.skip_block(&mut open)?,
            }
        }
        let content = match self.reserve(block, required) {
            Some(room) => Some(self.read_block(&mut open, room)?),
            None => None,
        };
        reader_guard.1 = (open.next_block < blocks.len() as u32
            && blocks[open.next_block as usize].shard == shard)
            .then_some(open);
        Ok(content)
    }

    /// Takes room for a block that is expected or `required` be had, letting go of others.
    fn reserve(&self, block: u32, required: bool) -> Option<BlockReservation<'_>> {
        let bytes = self.shards.blocks()[block as usize].held_bytes();
        let mut state = self.lock();
        let rank = state.rank.get(&block).copied();
        if state.blocks.contains_key(&block) || !(required || rank.is_some()) {
            return None;
        }
        self.waiting_for_memory.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let reservation = loop {
            if state.held_bytes + bytes <= self.max_bytes {
                state.held_bytes += bytes;
                break Some(BlockReservation(self, bytes));
            }
            match state.victim(rank.filter(|_| !required)) {
                Some(victim) => {
                    state.blocks.remove(&victim);
                    state.held_bytes -= self.shards.blocks()[victim as usize].held_bytes();
                }
                // All are in use, by threads that wait for nothing.
                None if required => state = self.wait(state),
                None => break None,
            }
        };
        self.waiting_for_memory.fetch_sub(1, Ordering::SeqCst);
        reservation
    }

    /// Reads the block that `open_shard` is at, and holds it.
    fn read_block(
        &self,
        open: &mut OpenShard,
        reservation: BlockReservation<'_>,
    ) -> Result<BlockGuard<'_>, DataError> {
        let (at, block) = (open.next_block, self.shards.blocks()[open.next_block as usize]);
        let none = || DataError::OutOfMemory { bytes: block.held_bytes() };
        let mut content = BlockContents { bytes: Vec::new(), record_ends: Vec::new(), bad: Vec::new() };
        let reserved = content.bytes.try_reserve_exact(block.bytes as usize);
        reserved
            .and_then(|()| content.record_ends.try_reserve_exact(block.records as usize))
            .map_err(|_| none())?;
        for i in 0..block.records {
            let before = content.bytes.len();
            match open.reader.next(&mut content.bytes) {
                Ok(true) => {}
                Ok(false) => return Err(self.changed_error(block.shard, at, i)),
                Err(error) if error.is_bad_record() => {
                    content.bytes.truncate(before);
                    content.bad.push((i, error));
                }
                Err(error) => return Err(error),
            }
            match u32::try_from(content.bytes.len()) {
                Ok(end) if u64::from(end) <= block.bytes => content.record_ends.push(end),
                _ => return Err(self.changed_error(block.shard, at, i)),
            }
        }
        open.next_block += 1;
        let content = Arc::new(content);
        let mut state = self.lock();
        state.use_clock += 1;
        let kept = CachedBlock { content: content.clone(), last_used: state.use_clock };
        state.blocks.insert(at, kept);
        drop(state);
        std::mem::forget(reservation);
        self.changed.notify_all();
        Ok(self.guard(content))
    }

    fn guard(&self, content: Arc<BlockContents>) -> BlockGuard<'_> {
        BlockGuard { cache: self, content: Some(content) }
    }

    /// Goes past the block that `open_shard` is at.
    fn skip_block(&self, open: &mut OpenShard) -> Result<(), DataError> {
        let (block, mut scratch) = (self.shards.blocks()[open.next_block as usize], Vec::new());
        for i in 0..block.records {
            scratch.clear();
            if !open.reader.skip(&mut scratch)? {
                return Err(self.changed_error(block.shard, open.next_block, i));
            }
        }
        open.next_block += 1;
        Ok(())
    }

    /// The shard does not have what was counted when the set was opened, found at record `i` of block `at`.
    fn changed_error(&self, shard: u32, at: u32, i: u64) -> DataError {
        let first = self.shards.blocks().partition_point(|block| block.shard < shard);
        let record = self.block_starts[at as usize] - self.block_starts[first] + i;
        DataError::ChangedSinceOpen {
            what: self.shards.name(shard),
            found: format!("record {record} is missing or longer than it was"),
        }
    }
}
