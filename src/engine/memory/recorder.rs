//! The changes of a ledger over the last two updates, in bounded memory, and what they say: who held what at every
//! moment.
//!
//! [`Recorder`] is part of a ledger that is asked to record; [`LedgerSnapshot`] is what it and the holders of that
//! moment amount to, as files keep it.

use std::collections::VecDeque;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::ledger::Holder;
use crate::base::{MemorySpace, Phase, Role};

/// Changes kept at most. Of two updates with more, the first ones are dropped.
pub const MAX_CHANGES: usize = 8192;

/// Heap bytes of a recorder and of a snapshot of it, at most, besides a few per holder.
pub const RECORDER_BYTES: u64 =
    (MAX_CHANGES * (size_of::<RecordedChange>() + size_of::<HolderChange>())) as u64;

#[derive(Clone, Copy, Debug)]
struct RecordedChange {
    seconds: f64,
    bytes: i64,
    holder: u32,
    phase: Phase,
}

/// The last changes of a ledger. Changes are numbered from 0 in the order they happened.
#[derive(Debug)]
pub(super) struct Recorder {
    begun: Instant,
    changes: VecDeque<RecordedChange>,
    /// Number of the first change kept.
    first: u64,
    /// Changes before each of the last two updates.
    updates: [u64; 2],
    /// Changes before the last refused request.
    refused: u64,
}

impl Recorder {
    pub fn new() -> Self {
        let changes = VecDeque::with_capacity(MAX_CHANGES);
        Self { begun: Instant::now(), changes, first: 0, updates: [0; 2], refused: 0 }
    }

    fn count(&self) -> u64 {
        self.first + self.changes.len() as u64
    }

    pub fn push(&mut self, holder: usize, bytes: i64, phase: Phase) {
        if self.changes.len() == MAX_CHANGES {
            self.changes.pop_front();
            self.first += 1;
        }
        let seconds = self.begun.elapsed().as_secs_f64();
        self.changes.push_back(RecordedChange { seconds, bytes, holder: holder as u32, phase });
    }

    /// An update begins: what was before the previous one is dropped.
    pub fn begin_update(&mut self) {
        self.updates = [self.updates[1], self.count()];
        let old = self.updates[0].saturating_sub(self.first);
        self.changes.drain(..old as usize);
        self.first += old;
    }

    /// A request is refused here: what follows is the release of what its requester held.
    pub fn record_refusal(&mut self) {
        self.refused = self.count();
    }

    /// The changes up to now, or up to the last refusal.
    fn changes(&self, until_refusal: bool) -> impl DoubleEndedIterator<Item = &RecordedChange> {
        let last = if until_refusal { self.refused } else { self.count() };
        self.changes.range(..last.saturating_sub(self.first) as usize)
    }
}

/// What a ledger holds at a moment, how it came to it over the last two updates, and the peak of that time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LedgerSnapshot {
    pub space: MemorySpace,
    pub budget_bytes: u64,
    /// Bytes held at the moment of the snapshot.
    pub reserved_bytes: u64,
    /// Bytes held at the peak of the recorded time, and its phase; those of the moment if nothing was recorded.
    pub peak_bytes: u64,
    pub peak_phase: Phase,
    /// Everyone who held memory, the largest at the peak first.
    pub holders: Vec<HolderHistory>,
    /// Every reservation and release in order of time; empty unless the ledger records.
    pub changes: Vec<HolderChange>,
    /// Changes of the two updates that are missing before the first one, for lack of room.
    pub dropped_changes: u64,
}

/// The bytes of a holder before the first change, at the peak, and at the moment of the snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HolderHistory {
    pub role: Role,
    pub name: String,
    pub first_bytes: u64,
    pub peak_bytes: u64,
    pub bytes: u64,
}

/// Bytes reserved, or released if negative.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HolderChange {
    /// Seconds since the first change.
    pub seconds: f64,
    /// Index in the list of holders.
    pub holder: u32,
    pub bytes: i64,
    pub phase: Phase,
}

/// What a ledger knows of the moment of a snapshot.
pub(super) struct LedgerState {
    pub space: MemorySpace,
    pub budget_bytes: u64,
    pub phase: Phase,
    /// The last request was refused, and `held` is as it was then.
    pub is_refusal: bool,
    /// Bytes of each holder, by its index.
    pub held: Vec<u64>,
}

impl LedgerSnapshot {
    /// `holders` are those of the ledger; their bytes are not used.
    pub(super) fn new(state: LedgerState, holders: &[Holder], recorder: Option<&Recorder>) -> Self {
        let LedgerState { space, budget_bytes, phase, is_refusal, held: last } = state;
        let changes = || recorder.into_iter().flat_map(|recorder| recorder.changes(is_refusal));
        let mut held = last.clone();
        let mut is_named: Vec<bool> = held.iter().map(|bytes| *bytes > 0).collect();
        for change in changes().rev() {
            let holder = change.holder as usize;
            held[holder] = held[holder].wrapping_add_signed(-change.bytes);
            is_named[holder] = true;
        }
        let first = held.clone();
        let (mut total, mut at_peak) = (first.iter().sum::<u64>(), first.clone());
        let (mut peak_bytes, mut peak_phase) = (total, changes().next().map_or(phase, |change| change.phase));
        // The holders are copied where a rise ends, not at each of its changes.
        let mut is_peak = false;
        for change in changes() {
            if is_peak && change.bytes < 0 {
                at_peak.copy_from_slice(&held);
                is_peak = false;
            }
            let holder = change.holder as usize;
            held[holder] = held[holder].wrapping_add_signed(change.bytes);
            total = total.wrapping_add_signed(change.bytes);
            if total > peak_bytes {
                (peak_bytes, peak_phase, is_peak) = (total, change.phase, true);
            }
        }
        if is_peak {
            at_peak = held;
        }
        let mut order: Vec<usize> = (0..holders.len()).filter(|at| is_named[*at]).collect();
        order.sort_by_key(|at| (std::cmp::Reverse((at_peak[*at], last[*at])), *at));
        let mut place = vec![0; holders.len()];
        order.iter().enumerate().for_each(|(to, from)| place[*from] = to as u32);
        let start = changes().next().map_or(0.0, |change| change.seconds);
        let row = |change: &RecordedChange| HolderChange {
            // Whole microseconds are exact enough, and short in a file.
            seconds: ((change.seconds - start) * 1e6).round() / 1e6,
            holder: place[change.holder as usize],
            bytes: change.bytes,
            phase: change.phase,
        };
        let history = |at: &usize| HolderHistory {
            role: holders[*at].role,
            name: holders[*at].name.to_string(),
            first_bytes: first[*at],
            peak_bytes: at_peak[*at],
            bytes: last[*at],
        };
        Self {
            space,
            budget_bytes,
            reserved_bytes: last.iter().sum(),
            peak_bytes,
            peak_phase,
            holders: order.iter().map(history).collect(),
            changes: changes().map(row).collect(),
            dropped_changes: recorder
                .map_or(0, |recorder| recorder.first.saturating_sub(recorder.updates[0])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Ledger;
    use proptest::prelude::*;

    fn held(snapshot: &LedgerSnapshot) -> Vec<(&str, u64, u64, u64)> {
        let one = |h: &'_ HolderHistory| (h.first_bytes, h.peak_bytes, h.bytes);
        snapshot.holders.iter().map(|h| (h.name.as_str(), one(h).0, one(h).1, one(h).2)).collect()
    }

    #[test]
    fn two_updates_are_kept_with_what_was_held_before_them() {
        let ledger = Ledger::new(100, None);
        ledger.record();
        let _weights = ledger.reserve(Role::Weights, "w", 10).unwrap();
        for bytes in [70, 20, 30, 5] {
            ledger.begin_update();
            ledger.set_phase(Phase::Forward);
            let _a = ledger.reserve(Role::Activations, "a", bytes).unwrap();
            ledger.set_phase(Phase::Backward);
            drop(ledger.reserve(Role::Workspace, "b", 2 * bytes / 10).unwrap());
        }
        let kept = ledger.snapshot(None);
        // The update with 70 bytes is forgotten, and so is the one with 20.
        assert_eq!((kept.peak_bytes, kept.reserved_bytes, kept.budget_bytes), (10 + 30 + 6, 10, 100));
        assert_eq!(held(&kept), [("a", 0, 30, 0), ("w", 10, 10, 10), ("b", 0, 6, 0)]);
        assert_eq!((kept.peak_phase, kept.changes.len(), kept.dropped_changes), (Phase::Backward, 8, 0));
        assert_eq!((kept.changes[0].holder, kept.changes[0].bytes, kept.changes[0].seconds), (0, 30, 0.0));
    }

    #[test]
    fn a_refusal_keeps_what_was_held_at_that_moment() {
        for records in [false, true] {
            let ledger = Ledger::new(100, None);
            if records {
                ledger.record();
            }
            let saved = ledger.reserve(Role::Activations, "a", 60).unwrap();
            drop(ledger.reserve(Role::Workspace, "b", 10).unwrap());
            let oom = ledger.reserve(Role::Activations, "c", 50).unwrap_err();
            drop(saved);
            let _other = ledger.reserve(Role::Batch, "d", 90).unwrap();
            let kept = ledger.snapshot(Some(&oom));
            assert!(kept.reserved_bytes + oom.bytes > kept.budget_bytes);
            assert_eq!(kept.holders.iter().map(|h| h.bytes).sum::<u64>(), kept.reserved_bytes);
            let expected: &[_] = match records {
                true => &[("a", 0, 60, 60), ("b", 0, 10, 0)],
                false => &[("a", 60, 60, 60)],
            };
            assert_eq!((held(&kept).as_slice(), kept.peak_bytes), (expected, 60 + 10 * u64::from(records)));
        }
    }

    #[test]
    fn a_long_update_keeps_its_last_changes() {
        let ledger = Ledger::new(u64::MAX, None);
        ledger.record();
        ledger.begin_update();
        for bytes in 1..=MAX_CHANGES as u64 {
            drop(ledger.reserve(Role::Workspace, "w", bytes).unwrap());
        }
        let kept = ledger.snapshot(None);
        assert_eq!((kept.changes.len(), kept.dropped_changes), (MAX_CHANGES, MAX_CHANGES as u64));
        assert_eq!(kept.peak_bytes, MAX_CHANGES as u64);
    }

    proptest! {
        /// Whatever happens, replaying the changes gives the bytes at the end, and the peak of the ledger.
        #[test]
        fn a_replay_ends_at_what_is_held(
            steps in prop::collection::vec((0usize..6, 1u64..1000, any::<bool>()), 1..200),
        ) {
            let ledger = Ledger::new(u64::MAX, None);
            ledger.record();
            let mut kept = Vec::new();
            for (name, bytes, releases) in steps {
                let name = ["a", "b", "c", "d", "e", "f"][name];
                kept.push(ledger.reserve(Role::Activations, name, bytes).unwrap());
                if releases {
                    kept.swap_remove(bytes as usize % kept.len());
                }
            }
            let snapshot = ledger.snapshot(None);
            prop_assert_eq!((snapshot.peak_bytes, snapshot.reserved_bytes), (ledger.peak(), ledger.reserved()));
            prop_assert_eq!(snapshot.holders.iter().map(|h| h.peak_bytes).sum::<u64>(), ledger.peak());
            let mut held: Vec<u64> = snapshot.holders.iter().map(|h| h.first_bytes).collect();
            for change in &snapshot.changes {
                held[change.holder as usize] = held[change.holder as usize].wrapping_add_signed(change.bytes);
            }
            prop_assert_eq!(held, snapshot.holders.iter().map(|h| h.bytes).collect::<Vec<_>>());
        }
    }
}
