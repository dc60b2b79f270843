//! Adapts the number of buffers of a loader: enough that the consumer does not wait, and no more.
//!
//! A deterministic controller driven by deliveries. It adds a buffer if the consumer waited while a worker lacked one;
//! if all workers were busy, another buffer would not help. It removes a buffer after `patience` consecutive deliveries
//! with surplus batches ready. If a removal turns out to be premature, patience doubles, so the depth converges.

/// Ready batches behind the delivered one that count as a surplus.
const READY_SURPLUS: u64 = 2;
/// Initial and maximum patience, in deliveries.
const INITIAL_PATIENCE: u64 = 32;
const MAX_PATIENCE: u64 = 1 << 20;
/// One buffer for the consumer, one being filled.
const MIN_DEPTH: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchDepth {
    current: u64,
    max: u64,
    /// Consecutive deliveries with a surplus.
    surplus_streak: u64,
    patience: u64,
    /// Whether the last change removed a buffer.
    last_change_lowered: bool,
}

impl PrefetchDepth {
    /// Starts with one buffer per worker and one for the consumer, at most `max`.
    pub fn new(workers: u64, max: u64) -> Self {
        Self {
            current: (workers + 1).min(max),
            max,
            surplus_streak: 0,
            patience: INITIAL_PATIENCE,
            last_change_lowered: false,
        }
    }

    /// Number of buffers allowed now.
    pub fn current(&self) -> u64 {
        self.current
    }

    /// Call when the consumer has to wait for a batch; `starved` says whether a worker lacked a buffer since the last
    /// wait. Returns whether a buffer was added.
    pub fn on_wait(&mut self, starved: bool) -> bool {
        self.surplus_streak = 0;
        let grow = starved && self.current < self.max;
        if grow {
            self.current += 1;
            if self.last_change_lowered {
                self.patience = (2 * self.patience).min(MAX_PATIENCE);
            }
            self.last_change_lowered = false;
        }
        grow
    }

    /// Call when the consumer takes a batch without waiting; `ready` more are ready behind it.
    pub fn on_ready_delivery(&mut self, ready: u64) {
        self.surplus_streak = if ready >= READY_SURPLUS { self.surplus_streak + 1 } else { 0 };
        if self.surplus_streak >= self.patience && self.current > MIN_DEPTH {
            (self.current, self.surplus_streak, self.last_change_lowered) = (self.current - 1, 0, true);
        }
    }

    /// Lowers the maximum for good.
    pub fn lower_max(&mut self, max: u64) {
        self.max = self.max.min(max);
        self.current = self.current.min(self.max);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::base::random::RngKey;

    /// A single-threaded simulation of a loader; the given times determine every event.
    struct SimulatedLoader {
        clock: f64,
        depth: PrefetchDepth,
        /// When each worker becomes free, and when each claimed batch is ready.
        workers: Vec<f64>,
        ready: VecDeque<f64>,
        claims: u64,
        starved: bool,
        changes: u64,
    }

    impl SimulatedLoader {
        fn new(workers: usize, max: u64) -> Self {
            let depth = PrefetchDepth::new(workers as u64, max);
            let (clock, claims, changes) = (0.0, 0, 0);
            let workers = vec![0.0; workers];
            Self { clock, depth, workers, ready: VecDeque::new(), claims, starved: false, changes }
        }

        /// Lets workers claim batches while the consumer holds `lent` batches.
        fn claim(&mut self, lent: u64, batch_seconds: &dyn Fn(u64) -> f64) {
            loop {
                let free = self.workers.iter_mut().min_by(|a, b| a.total_cmp(b)).unwrap();
                if self.ready.len() as u64 + lent >= self.depth.current() {
                    self.starved |= *free <= self.clock;
                    return;
                }
                *free = free.max(self.clock) + batch_seconds(self.claims);
                self.claims += 1;
                self.ready.push_back(*free);
            }
        }

        /// Seconds the consumer waited for the next batch, which it then holds for `consumer` seconds.
        fn next(&mut self, batch_seconds: &dyn Fn(u64) -> f64, consumer: f64) -> f64 {
            let before = self.depth.current();
            self.claim(0, batch_seconds);
            let wait = (self.ready[0] - self.clock).max(0.0);
            if wait > 0.0 {
                self.depth.on_wait(self.starved);
                self.starved = false;
                self.claim(0, batch_seconds);
            }
            self.clock += wait;
            self.ready.pop_front();
            if wait == 0.0 {
                self.depth
                    .on_ready_delivery(self.ready.iter().filter(|at| **at <= self.clock).count() as u64);
            }
            self.changes += u64::from(self.depth.current() != before);
            self.claim(1, batch_seconds);
            self.clock += consumer;
            wait
        }
    }

    proptest! {
        /// If the workers together are faster than the consumer, it soon stops waiting, the depth converges and barely
        /// exceeds what is needed. Otherwise no useless buffers are added.
        #[test]
        fn the_depth_becomes_what_is_needed(
            workers in 1usize..9, load in 0.05..3.0f64, uneven in 0.0..0.3f64, seed: u64,
        ) {
            // Seconds per batch such that all workers together are busy for `load` of each consumer second.
            let mean = load * workers as f64;
            let takes = |i| mean * (1.0 + uneven * (2.0 * RngKey::new(seed, 0).f64(i) - 1.0));
            let most = 4 * workers as u64 + 8;
            let mut loader = SimulatedLoader::new(workers, most);
            (0..4000).for_each(|_| { loader.next(&takes, 1.0); });
            let (waits, changes) = (0..4000).fold((0, loader.changes), |(waits, changes), _| {
                (waits + u32::from(loader.next(&takes, 1.0) > 0.0), changes)
            });
            prop_assert!(loader.changes - changes <= 2 + 4000u64.ilog2() as u64, "{} changes", loader.changes);
            let needed = mean * (1.0 + uneven);
            if load * (1.0 + uneven) < 0.95 {
                prop_assert!(waits <= 2 + 4000u32.ilog2(), "{} waits at {}", waits, loader.depth.current());
                let depth = loader.depth.current();
                let limit = (needed + 2.0).ceil() + 2.0 + READY_SURPLUS as f64;
                prop_assert!(depth as f64 <= limit, "{} for {}", depth, needed);
            } else if load * (1.0 - uneven) > 1.05 {
                // Batches are delivered in order, so up to one more per worker may wait behind a late one.
                let depth = loader.depth.current();
                prop_assert!(depth <= 2 * workers as u64 + 2, "{} for {} workers", depth, workers);
            }
        }

        #[test]
        fn it_stays_within_what_the_plan_gave(
            workers in 0u64..20, most in 1u64..30,
            happened in prop::collection::vec((any::<bool>(), any::<bool>(), 0u64..5), 0..200),
            later in 1u64..30,
        ) {
            let mut depth = PrefetchDepth::new(workers, most);
            for (i, (waited, lacked, ready)) in happened.into_iter().enumerate() {
                if i == 100 {
                    depth.lower_max(later);
                }
                if waited { depth.on_wait(lacked); } else { depth.on_ready_delivery(ready); }
                prop_assert!((1..=most).contains(&depth.current()));
                prop_assert!(i < 100 || depth.current() <= later);
            }
        }
    }

    #[test]
    fn a_burst_is_bridged_by_more_and_ample_buffers_are_given_back() {
        let mut depth = PrefetchDepth::new(2, 8);
        assert_eq!(depth.current(), 3);
        assert!(!depth.on_wait(false), "busy workers need no more buffers");
        assert!(depth.on_wait(true));
        assert_eq!(depth.current(), 4);
        (0..INITIAL_PATIENCE).for_each(|_| depth.on_ready_delivery(READY_SURPLUS));
        assert_eq!(depth.current(), 3);
        assert!(depth.on_wait(true));
        (0..INITIAL_PATIENCE).for_each(|_| depth.on_ready_delivery(READY_SURPLUS));
        assert_eq!(depth.current(), 4, "it was given back too early before");
        (0..INITIAL_PATIENCE).for_each(|_| depth.on_ready_delivery(READY_SURPLUS));
        assert_eq!(depth.current(), 3);
    }
}
