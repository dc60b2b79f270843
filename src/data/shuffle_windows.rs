//! The sample order of a sequentially read dataset: shards in permuted order, samples shuffled within windows.
//!
//! An epoch concatenates the blocks of its shards, groups adjacent blocks into windows of a bounded size in bytes, and
//! permutes the samples of each window. All of it is derived from a key and the block sizes. The tables of an epoch are
//! built on first use, and the last two epochs are cached.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::order::Permutation;
use super::streaming::RecordBlock;
use crate::base::random::RngKey;

/// A range of an epoch whose blocks are in memory together. Ordered by read position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShuffleWindow {
    pub epoch: u64,
    /// Index within the epoch, from 0.
    pub index: u64,
}

/// The blocks of a dataset and their layout in each epoch.
#[derive(Debug)]
pub(super) struct ShuffleWindows {
    blocks: Vec<RecordBlock>,
    /// First sample of each block.
    first_samples: Vec<u64>,
    /// Blocks of each shard, as a range of `blocks`.
    shards: Vec<Range<u32>>,
    window_bytes: u64,
    /// `None` if the dataset is read in file order.
    key: Option<RngKey>,
    epoch_layouts: Mutex<VecDeque<Arc<EpochLayout>>>,
}

/// Epochs whose layout is cached: prefetching workers may already be in the next epoch.
const CACHED_EPOCHS: usize = 2;

/// Layout of one epoch.
#[derive(Debug)]
struct EpochLayout {
    epoch: u64,
    /// Blocks in read order.
    blocks: Vec<u32>,
    /// Position of the first sample of each block, plus the end of the epoch.
    starts: Vec<u64>,
    /// Index in `blocks` of the first block of each window, plus the end.
    window_starts: Vec<u32>,
    /// Index in `blocks` of each block of the dataset; that of an empty one is unspecified.
    read_index: Vec<u32>,
}

impl EpochLayout {
    /// Positions of window `number`.
    fn window_positions(&self, number: usize) -> Range<u64> {
        let at = |window: usize| self.starts[self.window_starts[window] as usize];
        at(number)..at(number + 1)
    }

    fn window_of(&self, position: u64) -> usize {
        self.window_starts.partition_point(|first| self.starts[*first as usize] <= position) - 1
    }

    fn blocks(&self, number: usize) -> &[u32] {
        &self.blocks[self.window_starts[number] as usize..self.window_starts[number + 1] as usize]
    }
}

impl ShuffleWindows {
    /// `key` shuffles; without it, blocks and samples keep their order. A window takes at most `buffer` bytes.
    pub fn new(blocks: Vec<RecordBlock>, buffer: u64, key: Option<RngKey>) -> Self {
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
        Self {
            blocks,
            first_samples: firsts,
            shards,
            window_bytes: buffer,
            key,
            epoch_layouts: Mutex::default(),
        }
    }

    /// Bytes of its tables, including the cached epochs.
    pub fn resident_bytes(&self) -> u64 {
        let bytes_per_block = size_of::<RecordBlock>()
            + size_of::<u64>()
            + CACHED_EPOCHS * (2 * (size_of::<u32>() + size_of::<u64>()) + size_of::<u32>());
        (self.blocks.len() * bytes_per_block + self.shards.len() * size_of::<Range<u32>>()) as u64
    }

    fn epoch_layout(&self, epoch: u64) -> Arc<EpochLayout> {
        // Layouts are immutable once stored, so a poisoned lock still guards a consistent queue.
        let mut layouts = self.epoch_layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = layouts.iter().find(|layout| layout.epoch == epoch) {
            return found.clone();
        }
        if layouts.len() == CACHED_EPOCHS {
            layouts.pop_front();
        }
        let new = Arc::new(self.build_layout(epoch));
        layouts.push_back(new.clone());
        new
    }

    fn build_layout(&self, epoch: u64) -> EpochLayout {
        const FIRST: u64 = 0;
        let key = self.key.map(|key| key.fold_in(epoch));
        let permutation = key.map(|key| Permutation::new(self.shards.len() as u64, key));
        let mut layout = EpochLayout {
            epoch,
            blocks: Vec::with_capacity(self.blocks.len()),
            starts: vec![],
            window_starts: vec![],
            read_index: vec![0; self.blocks.len()],
        };
        let (mut position, mut remaining_bytes) = (0, 0);
        for i in 0..self.shards.len() {
            let shard = &self.shards[permutation.map_or(i, |p| p.at(i as u64) as usize)];
            for at in shard.clone() {
                let block = self.blocks[at as usize];
                if block.records == 0 {
                    continue;
                }
                if layout.window_starts.is_empty() || block.bytes > remaining_bytes {
                    // The first window has a random size, so that the window boundaries in a shard differ between
                    // epochs and samples meet new neighbors.
                    remaining_bytes = match key {
                        Some(key) if layout.window_starts.is_empty() => {
                            1 + key.fold_in(FIRST).below(0, self.window_bytes)
                        }
                        _ => self.window_bytes,
                    };
                    layout.window_starts.push(layout.blocks.len() as u32);
                }
                remaining_bytes = remaining_bytes.saturating_sub(block.bytes);
                layout.read_index[at as usize] = layout.blocks.len() as u32;
                layout.blocks.push(at);
                layout.starts.push(position);
                position += block.records;
            }
        }
        layout.window_starts.push(layout.blocks.len() as u32);
        layout.starts.push(position);
        layout
    }

    /// The windows that contain `positions`, in order, with the positions in each.
    pub fn window_ranges(&self, epoch: u64, positions: Range<u64>) -> Vec<(ShuffleWindow, Range<u64>)> {
        let layout = self.epoch_layout(epoch);
        let (mut pieces, mut from) = (Vec::new(), positions.start);
        while from < positions.end {
            let number = layout.window_of(from);
            let to = layout.window_positions(number).end.min(positions.end);
            pieces.push((ShuffleWindow { epoch, index: number as u64 }, from..to));
            from = to;
        }
        pieces
    }

    /// Ids of the samples at `positions` of `epoch`, in order.
    pub fn ids(&self, epoch: u64, positions: Range<u64>) -> Vec<u64> {
        let layout = self.epoch_layout(epoch);
        let mut ids = Vec::with_capacity((positions.end - positions.start) as usize);
        for (window, piece) in self.window_ranges(epoch, positions) {
            let number = window.index as usize;
            let span = layout.window_positions(number);
            let blocks = layout.window_starts[number] as usize..layout.window_starts[number + 1] as usize;
            let mix = |key: RngKey| {
                Permutation::new(span.end - span.start, key.fold_in(epoch).fold_in(1).fold_in(window.index))
            };
            let permutation = self.key.map(mix);
            ids.extend(piece.map(|position| {
                let inside = position - span.start;
                let position = span.start + permutation.map_or(inside, |p| p.at(inside));
                self.id_before_shuffling(&layout, blocks.clone(), position)
            }));
        }
        ids
    }

    /// Id of the sample at `position` of an epoch whose windows are not shuffled; `blocks` has its block.
    fn id_before_shuffling(&self, layout: &EpochLayout, blocks: Range<usize>, position: u64) -> u64 {
        let among = &layout.starts[blocks.clone()];
        let at = blocks.start + among.partition_point(|start| *start <= position) - 1;
        self.first_samples[layout.blocks[at] as usize] + (position - layout.starts[at])
    }

    /// Picks a sample of the window that has sample `id` in `epoch`; `pick` gives a number below its argument.
    pub fn pick_from_window(&self, epoch: u64, id: u64, pick: impl FnOnce(u64) -> u64) -> u64 {
        let layout = self.epoch_layout(epoch);
        // The last block that starts at or before the sample; empty blocks start where the next one does.
        let block = self.first_samples.partition_point(|first| *first <= id) - 1;
        let at = layout.read_index[block];
        let window = layout.window_starts.partition_point(|first| *first <= at) - 1;
        let positions = layout.window_positions(window);
        let blocks = layout.window_starts[window] as usize..layout.window_starts[window + 1] as usize;
        let position = positions.start + pick(positions.end - positions.start);
        self.id_before_shuffling(&layout, blocks, position)
    }

    /// The window after `window`.
    pub fn next_window(&self, window: ShuffleWindow) -> ShuffleWindow {
        match window.index + 2 < self.epoch_layout(window.epoch).window_starts.len() as u64 {
            true => ShuffleWindow { index: window.index + 1, ..window },
            false => ShuffleWindow { epoch: window.epoch + 1, index: 0 },
        }
    }

    /// The blocks of `window` and of the next window, in read order.
    pub fn prefetch_blocks(&self, window: ShuffleWindow) -> Vec<u32> {
        let blocks = |w: ShuffleWindow| self.epoch_layout(w.epoch).blocks(w.index as usize).to_vec();
        [blocks(window), blocks(self.next_window(window))].concat()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn blocks() -> impl Strategy<Value = Vec<RecordBlock>> {
        let shard = prop::collection::vec((0u64..6, 1u64..50), 1..6);
        prop::collection::vec(shard, 1..6).prop_map(|shards| {
            let block = |(shard, (records, bytes)): (usize, (u64, u64))| RecordBlock {
                shard: shard as u32,
                records,
                bytes,
            };
            let all = shards.into_iter().enumerate();
            let mut blocks: Vec<RecordBlock> =
                all.flat_map(|(s, b)| b.into_iter().map(move |b| block((s, b)))).collect();
            blocks[0].records += 1;
            blocks
        })
    }

    proptest! {
        /// Each epoch has each sample once, no window exceeds its size, the blocks of a shard stay adjacent, and any
        /// cut of the positions gives the same ids.
        #[test]
        fn windows_hold_what_they_may_and_lose_nothing(
            blocks in blocks(), buffer in 1u64..200, seed: u64, shuffle: bool, cut in 0.0..1.0f64,
        ) {
            let key = shuffle.then(|| RngKey::new(seed, 0));
            let samples: u64 = blocks.iter().map(|block| block.records).sum();
            let windows = ShuffleWindows::new(blocks.clone(), buffer, key);
            for epoch in 0..3 {
                let ids = windows.ids(epoch, 0..samples);
                let cut = (cut * samples as f64) as u64;
                prop_assert_eq!(&[windows.ids(epoch, 0..cut), windows.ids(epoch, cut..samples)].concat(), &ids);
                prop_assert_eq!(&ShuffleWindows::new(blocks.clone(), buffer, key).ids(epoch, 0..samples), &ids);
                if !shuffle {
                    prop_assert!(ids.iter().copied().eq(0..samples));
                }
                let (mut seen, mut shards) = (Vec::new(), Vec::new());
                for (window, positions) in windows.window_ranges(epoch, 0..samples) {
                    let layout = windows.epoch_layout(epoch);
                    let mut own = layout.blocks(window.index as usize).to_vec();
                    let bytes: u64 = own.iter().map(|b| blocks[*b as usize].bytes).sum();
                    prop_assert!(bytes <= buffer || own.len() == 1, "{} bytes", bytes);
                    shards.extend(own.iter().map(|b| blocks[*b as usize].shard));
                    own.sort_unstable();
                    for id in &ids[positions.start as usize..positions.end as usize] {
                        let block = windows.first_samples.partition_point(|first| first <= id) - 1;
                        let block = (0..=block).rev().find(|b| blocks[*b].records > 0).unwrap();
                        prop_assert!(own.binary_search(&(block as u32)).is_ok(), "{} is not of the window", id);
                    }
                    let members = &ids[positions.start as usize..positions.end as usize];
                    let mut picked: Vec<u64> = (0..members.len() as u64)
                        .map(|n| windows.pick_from_window(epoch, members[0], |below| {
                            assert_eq!(below, members.len() as u64);
                            n
                        }))
                        .collect();
                    picked.sort_unstable();
                    let mut sorted = members.to_vec();
                    sorted.sort_unstable();
                    prop_assert_eq!(picked, sorted, "a pick is of the window, and any of it");
                    let needs = windows.prefetch_blocks(window);
                    prop_assert!(needs.starts_with(layout.blocks(window.index as usize)));
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
        let blocks = vec![RecordBlock { shard: 0, records: 10, bytes: 100 }; 40];
        let windows = ShuffleWindows::new(blocks, 1000, Some(RngKey::new(5, 0)));
        let starts = |epoch| windows.epoch_layout(epoch).window_starts.clone();
        assert!((1..9).any(|epoch| starts(epoch)[1] != starts(0)[1]));
        assert_ne!(windows.ids(0, 0..400), windows.ids(1, 0..400));
        let last = ShuffleWindow { epoch: 0, index: starts(0).len() as u64 - 2 };
        assert_eq!(windows.next_window(last), ShuffleWindow { epoch: 1, index: 0 });
    }
}
