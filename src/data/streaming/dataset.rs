//! Random access to a sequentially read dataset, through a bounded block cache.
//!
//! One thread at a time advances one open shard; threads that need the block it reads wait for it. Given the blocks
//! that are needed next ([`Dataset::prefetch`]), a background thread reads ahead. Eviction removes the block that is
//! needed last: first the unexpected blocks, least recently used first, then the expected ones from the end. Any access
//! order gives the same samples; the access order of [`Order`](crate::order::Order) reads each shard once per
//! epoch.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::{RecordBlock, SEQUENTIAL_WINDOW_BYTES, ShardReader, ShardedDataset};
use crate::base::panics::catch_panic;
use crate::table::TableSchema;
use crate::{BatchRow, DataError, Dataset, Features, LengthStats, SampleKey};

/// Records in shards, with random access.
pub struct StreamingDataset {
    cache: Arc<BlockCache>,
    /// Background reader; started by the first prefetch hint.
    prefetch_thread: Mutex<Option<JoinHandle<()>>>,
}

struct BlockCache {
    shards: Arc<dyn ShardedDataset>,
    /// Number of records before each block, plus the total.
    block_starts: Vec<u64>,
    buffer_bytes: u64,
    /// Byte limit of the cached blocks: two windows of the order.
    max_bytes: u64,
    /// Bytes of the largest block, which bounds what a skipped record can take.
    largest_block_bytes: u64,
    /// The primary reader already counts the memory of the shards.
    is_secondary: bool,
    state: Mutex<BlockCacheState>,
    /// Signals that a block was added or evicted, the reader became free, or the expected blocks changed.
    changed: Condvar,
    /// Threads that wait for a block to be released.
    waiting_for_memory: AtomicU64,
}

#[derive(Default)]
struct BlockCacheState {
    blocks: BTreeMap<u32, CachedBlock>,
    /// Bytes of the blocks in memory or being read.
    held_bytes: u64,
    /// Blocks needed next, in order, and the rank of each.
    expected: Vec<u32>,
    rank: BTreeMap<u32, usize>,
    /// Logical clock for least-recently-used eviction.
    use_clock: u64,
    /// A thread is reading; it owns the open shard.
    reader_active: bool,
    open_shard: Option<OpenShard>,
    /// Threads that wait for a block; they take priority over prefetching.
    waiting_readers: usize,
    /// Prefetching failed. A thread that needs the block retries and returns the error.
    prefetch_failed: bool,
    stop: bool,
}

struct CachedBlock {
    content: Arc<BlockContents>,
    last_used: u64,
}

/// A shard being read, and the block at its current position.
struct OpenShard {
    next_block: u32,
    reader: Box<dyn ShardReader>,
}

/// The records of a block.
struct BlockContents {
    bytes: Vec<u8>,
    /// End offset of each record.
    record_ends: Vec<u32>,
    /// Records that could not be read, by index in the block.
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
    /// Caches at most twice `buffer` bytes of blocks, or two of the largest block if that is more.
    pub fn new(shards: Arc<dyn ShardedDataset>, buffer: u64) -> Self {
        Self::build(shards, buffer, false)
    }

    /// As [`StreamingDataset::new`], for a dataset that is only read in file order.
    pub fn sequential(shards: Arc<dyn ShardedDataset>) -> Self {
        Self::build(shards, SEQUENTIAL_WINDOW_BYTES, false)
    }

    /// Bytes of blocks in memory or being read now, and the limit.
    pub fn held_bytes(&self) -> (u64, u64) {
        (self.cache.lock().held_bytes, self.cache.max_bytes)
    }

    fn build(shards: Arc<dyn ShardedDataset>, buffer: u64, is_secondary: bool) -> Self {
        let (mut block_starts, mut records, mut held_bytes, mut largest) = (vec![0], 0, 0u64, 0);
        for block in shards.blocks() {
            records += block.records;
            block_starts.push(records);
            held_bytes = held_bytes.saturating_add(block.held_bytes());
            largest = largest.max(block.held_bytes());
        }
        let max_bytes = buffer.max(largest).saturating_mul(2).min(held_bytes);
        let (state, changed, waiting_for_memory) = Default::default();
        let cache = BlockCache {
            shards,
            block_starts,
            buffer_bytes: buffer,
            max_bytes,
            largest_block_bytes: largest,
            is_secondary,
            state,
            changed,
            waiting_for_memory,
        };
        Self { cache: Arc::new(cache), prefetch_thread: Mutex::default() }
    }
}

impl Drop for StreamingDataset {
    fn drop(&mut self) {
        self.cache.lock().stop = true;
        self.cache.changed.notify_all();
        let thread = self.prefetch_thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The thread catches panics, so a failed join carries no information.
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

    /// The blocks, one skipped record, the tables, the reader of the open shard, and what the shards keep.
    fn resident_bytes(&self) -> u64 {
        let cache = &self.cache;
        let tables = (cache.block_starts.len() * (size_of::<u64>() + size_of::<RecordBlock>())) as u64;
        let shards = if cache.is_secondary { 0 } else { cache.shards.resident_bytes() };
        (cache.max_bytes + tables + shards)
            .saturating_add(cache.largest_block_bytes)
            .saturating_add(cache.shards.reader_bytes())
    }

    fn blocks(&self) -> Option<Vec<RecordBlock>> {
        let resident = |block: &RecordBlock| RecordBlock { bytes: block.held_bytes(), ..*block };
        Some(self.cache.shards.blocks().iter().map(resident).collect())
    }

    fn prefetch(&self, blocks: Vec<u32>) {
        let mut state = self.cache.lock();
        if state.expected == blocks {
            return;
        }
        // Around the end of an epoch a block may be expected twice; its rank is the first occurrence.
        state.rank = blocks.iter().enumerate().rev().map(|(rank, block)| (*block, rank)).collect();
        (state.expected, state.prefetch_failed) = (blocks, false);
        drop(state);
        self.cache.changed.notify_all();
        let mut prefetch_handle = self.prefetch_thread.lock().unwrap_or_else(PoisonError::into_inner);
        if prefetch_handle.is_none() {
            let cache = self.cache.clone();
            // If the thread cannot be started, blocks are read on demand.
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

    fn table_schema(&self) -> Option<&TableSchema> {
        self.cache.shards.table_schema()
    }

    fn unseen_categories(&self) -> Vec<(String, u64)> {
        self.cache.shards.unseen_categories()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.cache.shards.describe()
    }
}

impl BlockCacheState {
    /// The first expected block of a rank below `below` that is not in memory, and its rank.
    fn next_missing(&self, below: usize) -> Option<(usize, u32)> {
        let mut expected = self.expected.iter().copied().enumerate().take(below);
        expected.find(|(_, block)| !self.blocks.contains_key(block))
    }

    /// The unused block that is needed last; `None` if even that one is needed before the block of rank `before`.
    fn victim(&self, before: Option<usize>) -> Option<u32> {
        let last = |block: &u32| self.rank.get(block).copied().unwrap_or(usize::MAX);
        let free = self.blocks.iter().filter(|(_, kept)| Arc::strong_count(&kept.content) == 1);
        let order = free.map(|(block, kept)| (last(block), std::cmp::Reverse(kept.last_used), *block));
        order.max().filter(|(last, ..)| before.is_none_or(|rank| *last > rank)).map(|(_, _, block)| block)
    }
}

/// A block in use, which cannot be evicted.
struct BlockGuard<'a> {
    cache: &'a BlockCache,
    /// `Some` until dropped.
    content: Option<Arc<BlockContents>>,
}

impl Deref for BlockGuard<'_> {
    type Target = BlockContents;

    fn deref(&self) -> &BlockContents {
        match &self.content {
            Some(content) => content,
            None => unreachable!("`content` is taken only by drop"),
        }
    }
}

impl Drop for BlockGuard<'_> {
    fn drop(&mut self) {
        self.content = None;
        // Pairs with the fence in `BlockCache::reserve`: either this thread sees the waiter, or the waiter sees that
        // the content was released.
        fence(Ordering::SeqCst);
        if self.cache.waiting_for_memory.load(Ordering::Relaxed) > 0 {
            drop(self.cache.lock());
            self.cache.changed.notify_all();
        }
    }
}

/// Exclusive right to read; released on drop, even after a panic.
struct ReaderGuard<'a>(&'a BlockCache, Option<OpenShard>);

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.reader_active, state.open_shard) = (false, self.1.take());
        drop(state);
        self.0.changed.notify_all();
    }
}

/// Memory reserved for a block; released on drop unless the block was stored.
struct BlockReservation<'a>(&'a BlockCache, u64);

impl Drop for BlockReservation<'_> {
    fn drop(&mut self) {
        self.0.lock().held_bytes -= self.1;
    }
}

impl BlockCache {
    fn lock(&self) -> MutexGuard<'_, BlockCacheState> {
        // No reader or decoder runs under the lock, so a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, BlockCacheState>) -> MutexGuard<'a, BlockCacheState> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of a block; reads it if it is not in memory.
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
            // Read the blocks that are expected earlier first, so that no shard has to be reopened. Their errors are
            // ignored here: the threads that need those blocks will get them.
            let Some((_, earlier)) = state.rank.get(&block).and_then(|rank| state.next_missing(*rank)) else {
                return self.fetch_required(state, block);
            };
            let kept = matches!(self.fetch(state, earlier, false), Ok(Some(_)));
            state = self.lock();
            // Without memory for it or with an error, `earlier` is still expected; else the window has moved on, and
            // other blocks may come first.
            if !kept && state.rank.contains_key(&earlier) {
                return self.fetch_required(state, block);
            }
        }
    }

    /// Reads `block` as soon as no other thread reads, evicting others if necessary.
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
            None => unreachable!("a required block always gets a reservation"),
        }
    }

    /// Reads expected blocks while memory permits, until the dataset is dropped.
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

    /// Advances to `block` and keeps expected blocks on the way if memory permits. Returns `None` if there is no memory
    /// for `block` itself, unless it is `required`.
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

    /// Reserves memory for a block that is expected or `required`, evicting others.
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
                // Every block is in use. Their users wait for nothing, so one will be released.
                None if required => state = self.wait(state),
                None => break None,
            }
        };
        self.waiting_for_memory.fetch_sub(1, Ordering::SeqCst);
        reservation
    }

    /// Reads the block at the position of `open` into the cache.
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

    /// Skips the block at the position of `open`.
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

    /// Error for a shard that no longer matches its index, detected at record `i` of block `at`.
    fn changed_error(&self, shard: u32, at: u32, i: u64) -> DataError {
        let first = self.shards.blocks().partition_point(|block| block.shard < shard);
        let record = self.block_starts[at as usize] - self.block_starts[first] + i;
        DataError::ChangedSinceOpen {
            what: self.shards.name(shard),
            found: format!("record {record} is missing or longer than before"),
        }
    }
}
