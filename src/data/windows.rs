//! The order of a set that is read forward: shards in a permuted order, and samples mixed within windows.
//!
//! An epoch lays the blocks of its shards one after the other, groups neighbours into windows of at most
//! so many bytes, and permutes the samples of each window. All of it is arithmetic from a key and the blocks; the
//! tables of an epoch are made when it is first asked for, and the last two are kept.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::order::Permutation;
use super::stream::Block;
use crate::random::Random;

/// A stretch of an epoch whose blocks are held together. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Window {
    pub epoch: u64,
    /// From 0 in each epoch.
    pub number: u64,
}

/// The blocks of a set and how they are laid out in each epoch.
#[derive(Debug)]
pub(super) struct Windows {
    blocks: Vec<Block>,
    /// The first sample of each block.
    firsts: Vec<u64>,
    /// The blocks of each shard, as a range of `blocks`.
    shards: Vec<Range<u32>>,
    buffer: u64,
    /// Absent where the order is that of the files.
    key: Option<Random>,
    made: Mutex<VecDeque<Arc<Epoch>>>,
}

/// Epochs whose tables are kept: readers ahead of the step may be in the next one.
const KEPT: usize = 2;

/// Where the blocks lie in one epoch.
#[derive(Debug)]
struct Epoch {
    epoch: u64,
    /// Blocks in the order they are read.
    blocks: Vec<u32>,
    /// The position of each one's first sample, and the epoch's end.
    starts: Vec<u64>,
    /// The first place in `blocks` of each window, and the end.
    windows: Vec<u32>,
}

impl Epoch {
    /// Positions of window `number`.
    fn span(&self, number: usize) -> Range<u64> {
        let at = |window: usize| self.starts[self.windows[window] as usize];
        at(number)..at(number + 1)
    }

    fn window_of(&self, position: u64) -> usize {
        self.windows.partition_point(|first| self.starts[*first as usize] <= position) - 1
    }

    fn blocks(&self, number: usize) -> &[u32] {
        &self.blocks[self.windows[number] as usize..self.windows[number + 1] as usize]
    }
}

impl Windows {
    /// `key` permutes; without it, blocks and samples keep their order.
    pub fn new(blocks: Vec<Block>, buffer: u64, key: Option<Random>) -> Self {
        let (mut firsts, mut shards, mut first) = (Vec::with_capacity(blocks.len()), Vec::new(), 0);
        let mut last = None;
        for (i, block) in blocks.iter().enumerate() {
            firsts.push(first);
            first += block.records;
            let i = i as u32;
            if last.replace(block.shard) != Some(block.shard) {
                shards.push(i..i);
            }
            if let Some(shard) = shards.last_mut() {
                shard.end = i + 1;
            }
        }
        Self { blocks, firsts, shards, buffer, key, made: Mutex::default() }
    }

    /// Bytes of its tables, those of the epochs it keeps included.
    pub fn resident_bytes(&self) -> u64 {
        let a_block =
            size_of::<Block>() + size_of::<u64>() + KEPT * 2 * (size_of::<u32>() + size_of::<u64>());
        (self.blocks.len() * a_block + self.shards.len() * size_of::<Range<u32>>()) as u64
    }

    fn epoch(&self, epoch: u64) -> Arc<Epoch> {
        // What is made under the lock is whole, whatever panics elsewhere.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = made.iter().find(|made| made.epoch == epoch) {
            return found.clone();
        }
        if made.len() == KEPT {
            made.pop_front();
        }
        let new = Arc::new(self.lay_out(epoch));
        made.push_back(new.clone());
        new
    }

    fn lay_out(&self, epoch: u64) -> Epoch {
        const FIRST: u64 = 0;
        let key = self.key.map(|key| key.at(epoch));
        let permutation = key.map(|key| Permutation::new(self.shards.len() as u64, key));
        let mut laid =
            Epoch { epoch, blocks: Vec::with_capacity(self.blocks.len()), starts: vec![], windows: vec![] };
        let (mut position, mut room) = (0, 0);
        for i in 0..self.shards.len() {
            let shard = &self.shards[permutation.map_or(i, |p| p.at(i as u64) as usize)];
            for at in shard.clone() {
                let block = self.blocks[at as usize];
                if block.records == 0 {
                    continue;
                }
                if laid.windows.is_empty() || block.bytes > room {
                    // The first window is smaller by a draw, so that windows of one shard begin elsewhere in
                    // each epoch and its samples meet others.
                    room = match key {
                        Some(key) if laid.windows.is_empty() => 1 + key.at(FIRST).below(0, self.buffer),
                        _ => self.buffer,
                    };
                    laid.windows.push(laid.blocks.len() as u32);
                }
                room = room.saturating_sub(block.bytes);
                laid.blocks.push(at);
                laid.starts.push(position);
                position += block.records;
            }
        }
        laid.windows.push(laid.blocks.len() as u32);
        laid.starts.push(position);
        laid
    }

    /// The windows that `positions` lie in, in order, with the positions in each.
    pub fn pieces(&self, epoch: u64, positions: Range<u64>) -> Vec<(Window, Range<u64>)> {
        let laid = self.epoch(epoch);
        let (mut pieces, mut from) = (Vec::new(), positions.start);
        while from < positions.end {
            let number = laid.window_of(from);
            let to = laid.span(number).end.min(positions.end);
            pieces.push((Window { epoch, number: number as u64 }, from..to));
            from = to;
        }
        pieces
    }

    /// The samples at `positions` of `epoch`, in order.
    pub fn ids(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let laid = self.epoch(epoch);
        let mut ids = Vec::with_capacity((positions.end - positions.start) as usize);
        for (window, piece) in self.pieces(epoch, positions) {
            let number = window.number as usize;
            let span = laid.span(number);
            let blocks = laid.windows[number] as usize..laid.windows[number + 1] as usize;
            let mix =
                |key: Random| Permutation::new(span.end - span.start, key.at(epoch).at(1).at(window.number));
            let permutation = self.key.map(mix);
            ids.extend(piece.map(|position| {
                let inside = position - span.start;
                let position = span.start + permutation.map_or(inside, |p| p.at(inside));
                let among = &laid.starts[blocks.clone()];
                let at = blocks.start + among.partition_point(|start| *start <= position) - 1;
                self.firsts[laid.blocks[at] as usize] + (position - laid.starts[at])
            }));
        }
        ids
    }

    /// The window after this one.
    pub fn after(&self, window: Window) -> Window {
        match window.number + 2 < self.epoch(window.epoch).windows.len() as u64 {
            true => Window { number: window.number + 1, ..window },
            false => Window { epoch: window.epoch + 1, number: 0 },
        }
    }

    /// The blocks of a window and of the one after it, in the order they are read.
    pub fn needs(&self, window: Window) -> Vec<u32> {
        let blocks = |w: Window| self.epoch(w.epoch).blocks(w.number as usize).to_vec();
        [blocks(window), blocks(self.after(window))].concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks() -> impl Strategy<Value = Vec<Block>> {
        let shard = prop::collection::vec((0u64..6, 1u64..50), 1..6);
        prop::collection::vec(shard, 1..6).prop_map(|shards| {
            let block = |(shard, (records, bytes)): (usize, (u64, u64))| Block {
                shard: shard as u32,
                records,
                bytes,
            };
            let all = shards.into_iter().enumerate();
            let mut blocks: Vec<Block> =
                all.flat_map(|(s, b)| b.into_iter().map(move |b| block((s, b)))).collect();
            blocks[0].records += 1;
            blocks
        })
    }

    proptest! {
        /// Each epoch has each sample once, a window holds no more than it may, those of a shard are
        /// neighbours, and any cut of the positions gives the same ids.
        #[test]
        fn windows_hold_what_they_may_and_lose_nothing(
            blocks in blocks(), buffer in 1u64..200, seed: u64, shuffle: bool, cut in 0.0..1.0f64,
        ) {
            let key = shuffle.then(|| Random::new(seed, 0));
            let samples: u64 = blocks.iter().map(|block| block.records).sum();
            let windows = Windows::new(blocks.clone(), buffer, key);
            for epoch in 0..3 {
                let ids = windows.ids(epoch, 0..samples);
                let cut = (cut * samples as f64) as u64;
                prop_assert_eq!(&[windows.ids(epoch, 0..cut), windows.ids(epoch, cut..samples)].concat(), &ids);
                prop_assert_eq!(&Windows::new(blocks.clone(), buffer, key).ids(epoch, 0..samples), &ids);
                if !shuffle {
                    prop_assert!(ids.iter().copied().eq(0..samples));
                }
                let (mut seen, mut shards) = (Vec::new(), Vec::new());
                for (window, positions) in windows.pieces(epoch, 0..samples) {
                    let laid = windows.epoch(epoch);
                    let mut own = laid.blocks(window.number as usize).to_vec();
                    let bytes: u64 = own.iter().map(|b| blocks[*b as usize].bytes).sum();
                    prop_assert!(bytes <= buffer || own.len() == 1, "{} bytes", bytes);
                    shards.extend(own.iter().map(|b| blocks[*b as usize].shard));
                    own.sort_unstable();
                    for id in &ids[positions.start as usize..positions.end as usize] {
                        let block = windows.firsts.partition_point(|first| first <= id) - 1;
                        let block = (0..=block).rev().find(|b| blocks[*b].records > 0).unwrap();
                        prop_assert!(own.binary_search(&(block as u32)).is_ok(), "{} is not of the window", id);
                    }
                    let needs = windows.needs(window);
                    prop_assert!(needs.starts_with(laid.blocks(window.number as usize)));
                    seen.extend(own);
                }
                let mut once = ids;
                once.sort_unstable();
                prop_assert!(once.into_iter().eq(0..samples));
                shards.dedup();
                let all = shards.len();
                shards.sort_unstable();
                shards.dedup();
                prop_assert_eq!(shards.len(), all, "a shard is read twice");
                seen.sort_unstable();
                let full = (0..blocks.len() as u32).filter(|b| blocks[*b as usize].records > 0);
                prop_assert!(seen.into_iter().eq(full));
            }
        }
    }

    #[test]
    fn epochs_differ_and_windows_of_one_shard_begin_elsewhere() {
        let blocks = vec![Block { shard: 0, records: 10, bytes: 100 }; 40];
        let windows = Windows::new(blocks, 1000, Some(Random::new(5, 0)));
        let starts = |epoch| windows.epoch(epoch).windows.clone();
        assert!((1..9).any(|epoch| starts(epoch)[1] != starts(0)[1]));
        assert_ne!(windows.ids(0, 0..400), windows.ids(1, 0..400));
        let last = Window { epoch: 0, number: starts(0).len() as u64 - 2 };
        assert_eq!(windows.after(last), Window { epoch: 1, number: 0 });
    }
}
