//! What a run is doing between two events: counters that the run advances and a sink reads from another thread.
//!
//! They only serve to show progress, so they are plain atomics: a reader may see the new work with the counts of the
//! old for a moment. Advancing them allocates nothing.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// The kinds of work of a run that take time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Work {
    /// Loads or initializes the weights.
    #[default]
    Starting,
    /// The teacher computes logits to be stored; counts samples.
    Teacher,
    /// An update; counts samples.
    Update,
    /// An evaluation; counts samples.
    Evaluation,
    /// Writes a checkpoint; counts nothing.
    Checkpoint,
}

/// The current work of a run.
#[derive(Debug)]
pub struct Activity {
    created: Instant,
    work: AtomicU8,
    step: AtomicU64,
    done: AtomicU64,
    total: AtomicU64,
    /// When the work began, in milliseconds since `created`.
    began: AtomicU64,
}

/// The current work at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActivitySnapshot {
    pub work: Work,
    /// Updates applied before it.
    pub step: u64,
    /// Samples processed, of `total`; `total` is 0 for work that is not counted.
    pub done: u64,
    pub total: u64,
    /// Since it began.
    pub seconds: f64,
}

impl Default for Activity {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        let work = AtomicU8::new(Work::Starting as u8);
        Self { created: Instant::now(), work, step: zero(), done: zero(), total: zero(), began: zero() }
    }
}

impl Activity {
    pub fn begin(&self, work: Work, step: u64, total: u64) {
        self.done.store(0, Relaxed);
        self.total.store(total, Relaxed);
        self.step.store(step, Relaxed);
        self.began.store(self.created.elapsed().as_millis() as u64, Relaxed);
        self.work.store(work as u8, Relaxed);
    }

    pub fn advance(&self, samples: u64) {
        self.done.fetch_add(samples, Relaxed);
    }

    pub fn now(&self) -> ActivitySnapshot {
        let work = self.work.load(Relaxed);
        let kinds = [Work::Starting, Work::Teacher, Work::Update, Work::Evaluation, Work::Checkpoint];
        let total = self.total.load(Relaxed);
        let elapsed_ms = self.created.elapsed().as_millis() as u64;
        ActivitySnapshot {
            work: kinds.into_iter().find(|kind| *kind as u8 == work).unwrap_or_default(),
            step: self.step.load(Relaxed),
            done: self.done.load(Relaxed).min(total),
            total,
            seconds: elapsed_ms.saturating_sub(self.began.load(Relaxed)) as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_counted_from_its_beginning() {
        let activity = Activity::default();
        assert_eq!(activity.now().work, Work::Starting);
        activity.begin(Work::Update, 3, 64);
        activity.advance(16);
        activity.advance(16);
        let now = activity.now();
        assert_eq!((now.work, now.step, now.done, now.total), (Work::Update, 3, 32, 64));
        activity.begin(Work::Checkpoint, 4, 0);
        let now = activity.now();
        assert_eq!((now.work, now.step, now.done, now.total), (Work::Checkpoint, 4, 0, 0));
    }
}
