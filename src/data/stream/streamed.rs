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

use super::{Block, IN_ORDER, Records, Shards};
use crate::caught::caught;
use crate::data::{DataError, Features, Key, Lengths, Row, Source};

/// Records in shards, readable in any order.
pub struct Streamed {
    held: Arc<Held>,
    /// Reads ahead; started when something is expected.
    ahead: Mutex<Option<JoinHandle<()>>>,
}

struct Held {
    shards: Arc<dyn Shards>,
    /// Records before each block, and all of them.
    starts: Vec<u64>,
    buffer: u64,
    /// Bytes of blocks that may be held: two windows of the order.
    most: u64,
    /// Bytes of the largest block, which is what a record that is passed over can take.
    largest: u64,
    /// Another reader counts what the shards themselves keep.
    beside: bool,
    state: Mutex<State>,
    /// A block came or went, a reader is free, or something else is expected.
    changed: Condvar,
    /// Threads that wait for a block to be let go of.
    short: AtomicU64,
}

#[derive(Default)]
struct State {
    blocks: BTreeMap<u32, Kept>,
    /// Bytes of the blocks held or being read.
    bytes: u64,
    /// The blocks that are needed next, in order, and the place of each.
    expected: Vec<u32>,
    rank: BTreeMap<u32, usize>,
    /// Counts uses.
    now: u64,
    /// A thread goes forward; it has the open shard.
    reading: bool,
    open: Option<Open>,
    /// Threads that wait for a block, and so go before what reads ahead.
    waiting: usize,
    /// Reading ahead failed: whoever needs the block finds out why.
    failed: bool,
    stop: bool,
}

struct Kept {
    content: Arc<Content>,
    used: u64,
}

/// A shard that is read forward, and the block it is at the beginning of.
struct Open {
    next: u32,
    records: Box<dyn Records>,
}

/// The records of a block.
struct Content {
    bytes: Vec<u8>,
    /// Where each record ends.
    ends: Vec<u32>,
    /// Those that could not be read, by their number in the block.
    bad: Vec<(u64, DataError)>,
}

impl Content {
    fn record(&self, i: u64) -> Result<&[u8], DataError> {
        if let Ok(bad) = self.bad.binary_search_by_key(&i, |(bad, _)| *bad) {
            return Err(self.bad[bad].1.clone());
        }
        let end = |i: usize| self.ends[i] as usize;
        let start = if i == 0 { 0 } else { end(i as usize - 1) };
        Ok(&self.bytes[start..end(i as usize)])
    }
}

impl Streamed {
    /// Holds at most twice `buffer` bytes of blocks, or two of the largest block where that is more.
    pub fn new(shards: Arc<dyn Shards>, buffer: u64) -> Self {
        Self::reading(shards, buffer, false)
    }

    /// As [`Streamed::new`], for a set that is read in its own order only.
    pub fn in_order(shards: Arc<dyn Shards>) -> Self {
        Self::reading(shards, IN_ORDER, false)
    }

    /// Bytes of blocks held or being read now, and the most that may be.
    pub fn held_bytes(&self) -> (u64, u64) {
        (self.held.lock().bytes, self.held.most)
    }

    fn reading(shards: Arc<dyn Shards>, buffer: u64, beside: bool) -> Self {
        let (mut starts, mut all, mut held, mut largest) = (vec![0], 0, 0u64, 0);
        for block in shards.blocks() {
            all += block.records;
            starts.push(all);
            held = held.saturating_add(block.held_bytes());
            largest = largest.max(block.held_bytes());
        }
        let most = buffer.max(largest).saturating_mul(2).min(held);
        let (state, changed, short) = Default::default();
        let held = Held { shards, starts, buffer, most, largest, beside, state, changed, short };
        Self { held: Arc::new(held), ahead: Mutex::default() }
    }
}

impl Drop for Streamed {
    fn drop(&mut self) {
        self.held.lock().stop = true;
        self.held.changed.notify_all();
        let thread = self.ahead.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // It catches panics, so there is nothing to learn from a failed join.
        drop(thread.map(JoinHandle::join));
    }
}

impl Source for Streamed {
    fn len(&self) -> u64 {
        self.held.starts.last().copied().unwrap_or(0)
    }

    fn features(&self) -> &Features {
        self.held.shards.features()
    }

    fn read(&self, index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let held = &self.held;
        let block = held.starts.partition_point(|start| *start <= index) - 1;
        let content = held.get(block as u32)?;
        let record = content.record(index - held.starts[block])?;
        held.shards.decode(record, index, key, into)
    }

    /// The blocks, a record that is passed over, the tables, and what the shards keep.
    fn resident_bytes(&self) -> u64 {
        let held = &self.held;
        let tables = (held.starts.len() * (size_of::<u64>() + size_of::<Block>())) as u64;
        let shards = if held.beside { 0 } else { held.shards.resident_bytes() };
        (held.most + tables + shards).saturating_add(held.largest)
    }

    fn blocks(&self) -> Option<Vec<Block>> {
        let held = |block: &Block| Block { bytes: block.held_bytes(), ..*block };
        Some(self.held.shards.blocks().iter().map(held).collect())
    }

    fn expect(&self, blocks: Vec<u32>) {
        let mut state = self.held.lock();
        if state.expected == blocks {
            return;
        }
        // A block may be expected twice, where an epoch ends: it is needed first when it is first needed.
        state.rank = blocks.iter().enumerate().rev().map(|(rank, block)| (*block, rank)).collect();
        (state.expected, state.failed) = (blocks, false);
        drop(state);
        self.held.changed.notify_all();
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.is_none() {
            let held = self.held.clone();
            // Without it, blocks are read when they are needed.
            *ahead = thread::Builder::new().name("data-ahead".into()).spawn(move || held.read_ahead()).ok();
        }
    }

    fn apart(&self) -> Option<Arc<dyn Source>> {
        let buffer = self.held.buffer.min(IN_ORDER);
        Some(Arc::new(Self::reading(self.held.shards.clone(), buffer, true)))
    }

    fn balance(&self) -> Option<Vec<u64>> {
        self.held.shards.balance()
    }

    fn lengths(&self) -> Option<Lengths> {
        self.held.shards.lengths()
    }

    fn text(&self, tokens: &[u32]) -> Option<String> {
        self.held.shards.text(tokens)
    }

    fn columns(&self) -> Vec<String> {
        self.held.shards.columns()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.held.shards.about()
    }
}

impl State {
    /// The first expected block that is not held, of a rank below `below`, and its rank.
    fn missing(&self, below: usize) -> Option<(usize, u32)> {
        let mut expected = self.expected.iter().copied().enumerate().take(below);
        expected.find(|(_, block)| !self.blocks.contains_key(block))
    }

    /// The block, of those not in use, that is needed last; `None` where it is needed before the one of this rank.
    fn victim(&self, before: Option<usize>) -> Option<u32> {
        let last = |block: &u32| self.rank.get(block).copied().unwrap_or(usize::MAX);
        let free = self.blocks.iter().filter(|(_, kept)| Arc::strong_count(&kept.content) == 1);
        let order = free.map(|(block, kept)| (last(block), std::cmp::Reverse(kept.used), *block));
        order.max().filter(|(last, ..)| before.is_none_or(|rank| *last > rank)).map(|(_, _, block)| block)
    }
}

/// A content in use, which cannot be let go of.
struct Use<'a> {
    held: &'a Held,
    /// Present until dropped.
    content: Option<Arc<Content>>,
}

impl Deref for Use<'_> {
    type Target = Content;

    fn deref(&self) -> &Content {
        match &self.content {
            Some(content) => content,
            None => unreachable!("the content leaves only when it is dropped"),
        }
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.content = None;
        // With `Held::make_room`: either this sees that somebody waits, or that one sees the content let go.
        fence(Ordering::SeqCst);
        if self.held.short.load(Ordering::Relaxed) > 0 {
            drop(self.held.lock());
            self.held.changed.notify_all();
        }
    }
}

/// The right to go forward; given back when dropped, whatever happened.
struct Turn<'a>(&'a Held, Option<Open>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        (state.reading, state.open) = (false, self.1.take());
        drop(state);
        self.0.changed.notify_all();
    }
}

/// Room taken for a block; given back when dropped unless the block came.
struct Room<'a>(&'a Held, u64);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.lock().bytes -= self.1;
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No reader or decoder runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The content of a block, read if it is not held.
    fn get(&self, block: u32) -> Result<Use<'_>, DataError> {
        let mut state = self.lock();
        loop {
            state.now += 1;
            let now = state.now;
            if let Some(kept) = state.blocks.get_mut(&block) {
                kept.used = now;
                return Ok(self.lend(kept.content.clone()));
            }
            if state.reading {
                state.waiting += 1;
                state = self.wait(state);
                state.waiting -= 1;
                if state.waiting == 0 {
                    self.changed.notify_all();
                }
                continue;
            }
            // What is expected before it is read first, so that no shard is left and opened again; what is wrong
            // with that is for others to find out.
            let Some((_, earlier)) = state.rank.get(&block).and_then(|rank| state.missing(*rank)) else {
                return self.fetch_now(state, block);
            };
            let read = self.fetch(state, earlier, false);
            if !matches!(read, Ok(Some(_))) {
                return self.fetch_now(self.lock(), block);
            }
            drop(read);
            state = self.lock();
        }
    }

    /// Reads a block that must be had, as soon as no other thread reads.
    fn fetch_now<'a>(&'a self, mut state: MutexGuard<'a, State>, block: u32) -> Result<Use<'a>, DataError> {
        while state.reading {
            state = self.wait(state);
        }
        if let Some(kept) = state.blocks.get(&block) {
            return Ok(self.lend(kept.content.clone()));
        }
        match self.fetch(state, block, true)? {
            Some(content) => Ok(content),
            None => unreachable!("room is made for a block that must be had"),
        }
    }

    /// Reads what is expected as far as there is room, until the set is dropped.
    fn read_ahead(&self) {
        let mut state = self.lock();
        while !state.stop {
            let idle = state.reading || state.waiting > 0 || state.failed;
            let next = state.missing(usize::MAX).filter(|_| !idle);
            let block = next.filter(|(rank, block)| {
                let fits = state.bytes + self.shards.blocks()[*block as usize].held_bytes() <= self.most;
                fits || state.victim(Some(*rank)).is_some()
            });
            let Some((_, block)) = block else {
                state = self.wait(state);
                continue;
            };
            let read = caught(|| self.fetch(state, block, false).map(drop));
            state = self.lock();
            state.failed |= !matches!(read, Ok(Ok(())));
        }
    }

    /// Goes forward to a block, keeping the expected ones on the way where there is room. `None` where there is
    /// none for the block itself, unless it `must` be had.
    fn fetch(
        &self,
        mut state: MutexGuard<'_, State>,
        block: u32,
        must: bool,
    ) -> Result<Option<Use<'_>>, DataError> {
        state.reading = true;
        let open = state.open.take();
        drop(state);
        let blocks = self.shards.blocks();
        let shard = blocks[block as usize].shard;
        let on_the_way = |open: &Open| open.next <= block && blocks[open.next as usize].shard == shard;
        let mut turn = Turn(self, None);
        let mut open = match open.filter(on_the_way) {
            Some(open) => open,
            None => {
                let next = blocks.partition_point(|b| b.shard < shard) as u32;
                Open { next, records: self.shards.open(shard)? }
            }
        };
        while open.next < block {
            match self.make_room(open.next, false) {
                Some(room) => drop(self.keep(&mut open, room)?),
                None => self.pass(&mut open)?,
            }
        }
        let content = match self.make_room(block, must) {
            Some(room) => Some(self.keep(&mut open, room)?),
            None => None,
        };
        turn.1 =
            (open.next < blocks.len() as u32 && blocks[open.next as usize].shard == shard).then_some(open);
        Ok(content)
    }

    /// Takes room for a block that is expected or `must` be had, letting go of others.
    fn make_room(&self, block: u32, must: bool) -> Option<Room<'_>> {
        let bytes = self.shards.blocks()[block as usize].held_bytes();
        let mut state = self.lock();
        let rank = state.rank.get(&block).copied();
        if state.blocks.contains_key(&block) || !(must || rank.is_some()) {
            return None;
        }
        self.short.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let room = loop {
            if state.bytes + bytes <= self.most {
                state.bytes += bytes;
                break Some(Room(self, bytes));
            }
            match state.victim(rank.filter(|_| !must)) {
                Some(victim) => {
                    state.blocks.remove(&victim);
                    state.bytes -= self.shards.blocks()[victim as usize].held_bytes();
                }
                // All are in use, by threads that wait for nothing.
                None if must => state = self.wait(state),
                None => break None,
            }
        };
        self.short.fetch_sub(1, Ordering::SeqCst);
        room
    }

    /// Reads the block that `open` is at, and holds it.
    fn keep(&self, open: &mut Open, room: Room<'_>) -> Result<Use<'_>, DataError> {
        let (at, block) = (open.next, self.shards.blocks()[open.next as usize]);
        let none = || DataError::OutOfMemory { bytes: block.held_bytes() };
        let mut content = Content { bytes: Vec::new(), ends: Vec::new(), bad: Vec::new() };
        let reserved = content.bytes.try_reserve_exact(block.bytes as usize);
        reserved.and_then(|()| content.ends.try_reserve_exact(block.records as usize)).map_err(|_| none())?;
        for i in 0..block.records {
            let before = content.bytes.len();
            match open.records.next(&mut content.bytes) {
                Ok(true) => {}
                Ok(false) => return Err(self.changed_since(block.shard, at, i)),
                Err(error) if error.is_record() => {
                    content.bytes.truncate(before);
                    content.bad.push((i, error));
                }
                Err(error) => return Err(error),
            }
            match u32::try_from(content.bytes.len()) {
                Ok(end) if u64::from(end) <= block.bytes => content.ends.push(end),
                _ => return Err(self.changed_since(block.shard, at, i)),
            }
        }
        open.next += 1;
        let content = Arc::new(content);
        let mut state = self.lock();
        state.now += 1;
        let kept = Kept { content: content.clone(), used: state.now };
        state.blocks.insert(at, kept);
        drop(state);
        std::mem::forget(room);
        self.changed.notify_all();
        Ok(self.lend(content))
    }

    fn lend(&self, content: Arc<Content>) -> Use<'_> {
        Use { held: self, content: Some(content) }
    }

    /// Goes past the block that `open` is at.
    fn pass(&self, open: &mut Open) -> Result<(), DataError> {
        let (block, mut spare) = (self.shards.blocks()[open.next as usize], Vec::new());
        for i in 0..block.records {
            spare.clear();
            if !open.records.skip(&mut spare)? {
                return Err(self.changed_since(block.shard, open.next, i));
            }
        }
        open.next += 1;
        Ok(())
    }

    /// The shard does not have what was counted when the set was opened, found at record `i` of block `at`.
    fn changed_since(&self, shard: u32, at: u32, i: u64) -> DataError {
        let first = self.shards.blocks().partition_point(|block| block.shard < shard);
        let record = self.starts[at as usize] - self.starts[first] + i;
        DataError::Changed {
            what: self.shards.name(shard),
            found: format!("record {record} is missing or longer than it was"),
        }
    }
}
