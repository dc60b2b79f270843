//! The sample order: a pure function of a seed and a position, with no table and no state.
//!
//! An epoch is a keyed permutation of all samples or, for a dataset that is read sequentially, a permutation of shards
//! and of the samples within windows ([`shuffle_windows`](super::shuffle_windows)). An update takes the next
//! `samples_per_update` samples; the last update of an epoch takes what is left. A checkpoint therefore only stores a
//! [`Cursor`] to resume at exactly the next sample, and seeking is free at any position.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::shuffle_windows::{ShuffleWindow, ShuffleWindows};
use super::{DataError, Dataset};
use crate::base::random::{CounterRng, RngKey, stream_id};

/// A keyed permutation of `0..n` in O(1) memory.
///
/// A Feistel network over two digits in a base of about sqrt(n) adds a hash of one digit to the other. This permutes
/// `0..base * base`, slightly more than n values. A result outside of `0..n` goes through the network again until it is
/// inside (cycle walking), which is again a permutation.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    n: u64,
    base: u64,
    key: RngKey,
}

/// With fewer rounds, the orders of very small datasets are visibly uneven.
const ROUNDS: u64 = 8;

impl Permutation {
    pub fn new(n: u64, key: RngKey) -> Self {
        let root = n.isqrt();
        let base = root + u64::from(root * root < n);
        // With an odd base every round is an even permutation, so half of the orders of a small dataset would be rare.
        Permutation { n, base: base.next_multiple_of(2), key }
    }

    /// Image of `i`, which must be below n.
    pub fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.n);
        let mut x = i;
        loop {
            let (mut high, mut low) = (x / self.base, x % self.base);
            for round in 0..ROUNDS {
                let sum = high + self.key.below(low * ROUNDS + round, self.base);
                (high, low) = (low, if sum >= self.base { sum - self.base } else { sum });
            }
            x = high * self.base + low;
            if x < self.n {
                return x;
            }
        }
    }
}

/// The sample order of a run.
#[derive(Clone, Debug)]
pub struct Order {
    samples: u64,
    samples_per_update: u64,
    seed: u64,
    shuffle: bool,
    /// Present if the dataset is read sequentially.
    windows: Option<Arc<ShuffleWindows>>,
}

const SHUFFLE: u64 = stream_id("data.shuffle");

/// Position in the order: the first `done` samples of update `update` were consumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Number of completed updates, which is the index of the current update, from 0.
    pub update: u64,
    pub done: u64,
}

/// A range of positions within one update. Positions count from 0 in each epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSpan {
    pub update: u64,
    pub epoch: u64,
    pub positions: Range<u64>,
}

impl SampleSpan {
    /// Number of samples.
    #[allow(clippy::len_without_is_empty)] // a span is never empty
    pub fn len(&self) -> u64 {
        self.positions.end - self.positions.start
    }
}

impl Order {
    /// An order of `samples` samples, at most 2^62; both counts must be positive.
    pub fn new(samples: u64, samples_per_update: u64, seed: u64, shuffle: bool) -> Result<Self, DataError> {
        let setting = |name, value: u64, expected| {
            Err(DataError::InvalidSetting { name, value: value.to_string(), expected })
        };
        if samples == 0 || samples > 1 << 62 {
            return setting("samples", samples, "a dataset has 1 to 2^62 samples");
        }
        if samples_per_update == 0 {
            return setting("samples_per_update", samples_per_update, "an update needs at least one sample");
        }
        Ok(Order { samples, samples_per_update, seed, shuffle, windows: None })
    }

    /// The order for `dataset`. A dataset that is read sequentially is shuffled within `buffer_bytes` bytes.
    pub fn for_dataset(
        dataset: &dyn Dataset,
        samples_per_update: u64,
        seed: u64,
        shuffle: bool,
        buffer_bytes: u64,
    ) -> Result<Self, DataError> {
        let order = Self::new(dataset.len(), samples_per_update, seed, shuffle)?;
        let key = shuffle.then(|| RngKey::new(seed, SHUFFLE));
        let windows = dataset.blocks().map(|blocks| Arc::new(ShuffleWindows::new(blocks, buffer_bytes, key)));
        Ok(Order { windows, ..order })
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    pub fn samples_per_update(&self) -> u64 {
        self.samples_per_update
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn updates_per_epoch(&self) -> u64 {
        self.samples.div_ceil(self.samples_per_update)
    }

    /// The samples of update `k`, counted from 0 over the whole run.
    pub fn update(&self, k: u64) -> SampleSpan {
        let start = k % self.updates_per_epoch() * self.samples_per_update;
        let end = start.saturating_add(self.samples_per_update).min(self.samples);
        SampleSpan { update: k, epoch: k / self.updates_per_epoch(), positions: start..end }
    }

    /// Canonical form of a cursor: the end of an update becomes the start of the next.
    pub fn canonicalize(&self, cursor: Cursor) -> Cursor {
        match cursor.done < self.update(cursor.update).len() {
            true => cursor,
            false => Cursor { update: cursor.update + 1, done: 0 },
        }
    }

    /// The next samples at `cursor`, at most `count` and never past the end of the update, and the canonical cursor
    /// after them. A `count` of 0 counts as 1.
    pub fn take(&self, cursor: Cursor, count: u64) -> (SampleSpan, Cursor) {
        let Cursor { update, done: from } = self.canonicalize(cursor);
        let mut span = self.update(update);
        let done = from.saturating_add(count.max(1)).min(span.len());
        span.positions = span.positions.start + from..span.positions.start + done;
        (span, self.canonicalize(Cursor { update, done }))
    }

    /// Samples consumed from the start of the run to `cursor`.
    pub fn consumed(&self, cursor: Cursor) -> u64 {
        let span = self.update(cursor.update);
        span.epoch * self.samples + span.positions.start + cursor.done.min(span.len())
    }

    /// Global ids of the samples at `positions` of `epoch`, in order.
    pub fn ids(&self, epoch: u64, positions: Range<u64>) -> SampleIds {
        SampleIds(match &self.windows {
            Some(windows) => SampleIdsKind::Windowed(windows.ids(epoch, positions).into_iter()),
            None => {
                let key = RngKey::new(self.seed, SHUFFLE).fold_in(epoch);
                SampleIdsKind::Permuted(self.shuffle.then(|| Permutation::new(self.samples, key)), positions)
            }
        })
    }

    /// Draws a sample from those that are in memory at the same time as sample `id` of `epoch`: any of a random-access
    /// dataset, one of the same window of a dataset that is read sequentially.
    pub fn draw_neighbor(&self, epoch: u64, id: u64, draws: &mut CounterRng) -> u64 {
        match &self.windows {
            Some(windows) => windows.pick_from_window(epoch, id, |samples| draws.below(samples)),
            None => draws.below(self.samples),
        }
    }

    /// Whether the dataset is read sequentially, window by window.
    pub fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    /// The windows that contain `positions`, in order, with the positions in each; a random-access dataset is one
    /// window.
    pub fn window_ranges(&self, epoch: u64, positions: Range<u64>) -> Vec<(ShuffleWindow, Range<u64>)> {
        match &self.windows {
            Some(windows) => windows.window_ranges(epoch, positions),
            None => vec![(ShuffleWindow { epoch, index: 0 }, positions)],
        }
    }

    /// The window that is read after `window`.
    pub fn next_window(&self, window: ShuffleWindow) -> ShuffleWindow {
        match &self.windows {
            Some(windows) => windows.next_window(window),
            None => ShuffleWindow { epoch: window.epoch + 1, index: 0 },
        }
    }

    /// The blocks of `window` and of the next window, in read order; empty for a random-access dataset.
    pub fn prefetch_blocks(&self, window: ShuffleWindow) -> Vec<u32> {
        self.windows.as_ref().map_or_else(Vec::new, |windows| windows.prefetch_blocks(window))
    }

    /// Bytes it keeps in memory: 0 unless the dataset is read sequentially.
    pub fn resident_bytes(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.resident_bytes())
    }
}

/// Iterator over global sample ids.
pub struct SampleIds(SampleIdsKind);

enum SampleIdsKind {
    Permuted(Option<Permutation>, Range<u64>),
    Windowed(std::vec::IntoIter<u64>),
}

impl Iterator for SampleIds {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        match &mut self.0 {
            SampleIdsKind::Permuted(permutation, positions) => {
                positions.next().map(|i| permutation.map_or(i, |permutation| permutation.at(i)))
            }
            SampleIdsKind::Windowed(ids) => ids.next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn permuted(n: u64, seed: u64) -> Vec<u64> {
        let permutation = Permutation::new(n, RngKey::new(seed, 0));
        (0..n).map(|i| permutation.at(i)).collect()
    }

    #[test]
    fn every_size_is_permuted() {
        for n in (1..300).chain([1000, 1023, 1024, 1025, 4096, 60_000, 65_537]) {
            let mut seen = permuted(n, n);
            seen.sort_unstable();
            assert!(seen.iter().copied().eq(0..n), "{n}");
        }
    }

    #[test]
    fn the_orders_of_a_small_set_are_all_likely() {
        for (n, orders) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
            let mut counts = std::collections::BTreeMap::new();
            let trials = 1000 * orders;
            (0..trials).for_each(|seed| *counts.entry(permuted(n, seed)).or_insert(0u64) += 1);
            assert_eq!(counts.len() as u64, orders);
            let spread = counts.values().map(|&c| (c as f64 - 1000.0).powi(2) / 1000.0).sum::<f64>();
            let free = orders as f64 - 1.0;
            assert!((spread - free) / (2.0 * free).sqrt() < 5.0, "{n}: {spread}");
        }
    }

    #[test]
    fn neighbours_do_not_stay_neighbours() {
        let order = permuted(10_000, 7);
        // In a uniform order, two neighbors are at most 100 apart with a probability of about 2 %.
        let near = order.windows(2).filter(|w| w[0].abs_diff(w[1]) <= 100).count();
        assert!((130..270).contains(&near), "{near}");
        let fixed = order.iter().enumerate().filter(|(i, x)| *i as u64 == **x).count();
        assert!(fixed < 8, "{fixed}");
        assert_ne!(order, permuted(10_000, 8));
    }

    #[test]
    fn huge_sets_cost_nothing() {
        let order = Order::new(1 << 62, 1 << 61, 3, true).unwrap();
        let cursor = Cursor { update: 3, done: (1 << 61) - 2 };
        let (span, next) = order.take(cursor, 10);
        assert_eq!((span.epoch, span.positions.clone()), (1, (1 << 62) - 2..1 << 62));
        assert_eq!(next, Cursor { update: 4, done: 0 });
        assert!(order.ids(1, span.positions).all(|id| id < 1 << 62));
    }

    #[test]
    fn nothing_is_refused_by_name() {
        assert!(Order::new(0, 1, 0, true).unwrap_err().to_string().contains("`samples` cannot be 0"));
        assert!(Order::new(1, 0, 0, true).is_err());
    }

    proptest! {
        /// However an epoch is cut, it yields each sample once, in an order that does not depend on the cuts.
        #[test]
        fn cuts_lose_and_repeat_nothing(
            samples in 1u64..200, per_update in 1u64..250, cuts in prop::collection::vec(0u64..40, 1..9), seed: u64,
        ) {
            let order = Order::new(samples, per_update, seed, true).unwrap();
            let (mut cursor, mut cuts) = (Cursor::default(), cuts.into_iter().cycle());
            for epoch in 0..3 {
                let mut ids = Vec::new();
                while cursor.update < (epoch + 1) * order.updates_per_epoch() {
                    prop_assert_eq!(order.consumed(cursor), epoch * samples + ids.len() as u64);
                    let (span, next) = order.take(cursor, cuts.next().unwrap());
                    prop_assert_eq!((span.epoch, span.update), (epoch, cursor.update));
                    ids.extend(order.ids(epoch, span.positions));
                    cursor = next;
                }
                prop_assert!(ids.iter().copied().eq(order.ids(epoch, 0..samples)));
                ids.sort_unstable();
                prop_assert!(ids.into_iter().eq(0..samples));
            }
        }
    }
}
