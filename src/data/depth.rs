//! How many buffers a loader should have: enough that its consumer does not wait, and no more.
//!
//! A pure function of what happens at each delivery. One buffer more where the consumer had to wait while a worker
//! lacked a buffer (where all were busy, more buffers would not help); one less after a while in which batches always
//! stood ready. A buffer that was given back too early makes the next while twice as long, so that the depth settles.

/// Ready batches behind the one delivered that show that there are more than enough.
const AMPLE: u64 = 2;
/// Deliveries that a while has at first, and at most.
const PATIENCE: u64 = 32;
const MOST_PATIENCE: u64 = 1 << 20;
/// One with the consumer, one being filled.
const LEAST: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    now: u64,
    most: u64,
    /// Deliveries with an ample number ready, one after the other.
    calm: u64,
    patience: u64,
    /// The last change was to fewer.
    lowered: bool,
}

impl Depth {
    /// At first each of the workers and the consumer have one, as far as `most` allows.
    pub fn new(workers: u64, most: u64) -> Self {
        Self { now: (workers + 1).min(most), most, calm: 0, patience: PATIENCE, lowered: false }
    }

    /// Buffers there may be now.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// The consumer has to wait for a batch; `lacked`: a worker had no buffer since it last waited. Says whether
    /// there may be one more.
    pub fn waited(&mut self, lacked: bool) -> bool {
        self.calm = 0;
        let more = lacked && self.now < self.most;
        if more {
            self.now += 1;
            if self.lowered {
                self.patience = (2 * self.patience).min(MOST_PATIENCE);
            }
            self.lowered = false;
        }
        more
    }

    /// The consumer took a batch without waiting, and `ready` more stand behind it.
    pub fn taken(&mut self, ready: u64) {
        self.calm = if ready >= AMPLE { self.calm + 1 } else { 0 };
        if self.calm >= self.patience && self.now > LEAST {
            (self.now, self.calm, self.lowered) = (self.now - 1, 0, true);
        }
    }

    /// There may never be more than `most` again.
    pub fn limit(&mut self, most: u64) {
        self.most = self.most.min(most);
        self.now = self.now.min(self.most);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::random::Random;

    /// A loader without threads: what happens follows from the times alone.
    struct Simulated {
        clock: f64,
        depth: Depth,
        /// When each worker is free, and when each batch that was claimed is ready.
        workers: Vec<f64>,
        ready: VecDeque<f64>,
        claims: u64,
        lacked: bool,
        changes: u64,
    }

    impl Simulated {
        fn new(workers: usize, most: u64) -> Self {
            let depth = Depth::new(workers as u64, most);
            let (clock, claims, changes) = (0.0, 0, 0);
            let workers = vec![0.0; workers];
            Self { clock, depth, workers, ready: VecDeque::new(), claims, lacked: false, changes }
        }

        /// Workers claim while `lent` batches are with the consumer.
        fn claim(&mut self, lent: u64, takes: &dyn Fn(u64) -> f64) {
            loop {
                let free = self.workers.iter_mut().min_by(|a, b| a.total_cmp(b)).unwrap();
                if self.ready.len() as u64 + lent >= self.depth.now() {
                    self.lacked |= *free <= self.clock;
                    return;
                }
                *free = free.max(self.clock) + takes(self.claims);
                self.claims += 1;
                self.ready.push_back(*free);
            }
        }

        /// The seconds the consumer waited for a batch, which it then keeps for `consumer` seconds.
        fn next(&mut self, takes: &dyn Fn(u64) -> f64, consumer: f64) -> f64 {
            let before = self.depth.now();
            self.claim(0, takes);
            let wait = (self.ready[0] - self.clock).max(0.0);
            if wait > 0.0 {
                self.depth.waited(self.lacked);
                self.lacked = false;
                self.claim(0, takes);
            }
            self.clock += wait;
            self.ready.pop_front();
            if wait == 0.0 {
                self.depth.taken(self.ready.iter().filter(|at| **at <= self.clock).count() as u64);
            }
            self.changes += u64::from(self.depth.now() != before);
            self.claim(1, takes);
            self.clock += consumer;
            wait
        }
    }

    proptest! {
        /// Where the workers together are faster than the consumer, it soon waits no more, with hardly more buffers
        /// than are needed, and the depth comes to rest. Where they are not, no buffers are added in vain.
        #[test]
        fn the_depth_becomes_what_is_needed(workers in 1usize..9, load in 0.05..3.0f64, uneven in 0.0..0.3f64, seed: u64) {
            // A worker takes so long that all of them together are busy for `load` of the consumer's second.
            let mean = load * workers as f64;
            let takes = |i| mean * (1.0 + uneven * (2.0 * Random::new(seed, 0).f64(i) - 1.0));
            let most = 4 * workers as u64 + 8;
            let mut loader = Simulated::new(workers, most);
            (0..4000).for_each(|_| { loader.next(&takes, 1.0); });
            let (waits, changes) = (0..4000).fold((0, loader.changes), |(waits, changes), _| {
                (waits + u32::from(loader.next(&takes, 1.0) > 0.0), changes)
            });
            prop_assert!(loader.changes - changes <= 2 + 4000u64.ilog2() as u64, "{} changes", loader.changes);
            let needed = mean * (1.0 + uneven);
            if load * (1.0 + uneven) < 0.95 {
                prop_assert!(waits <= 2 + 4000u32.ilog2(), "{} waits at {}", waits, loader.depth.now());
                prop_assert!(loader.depth.now() as f64 <= (needed + 2.0).ceil() + 2.0 + AMPLE as f64, "{} for {}", loader.depth.now(), needed);
            } else if load * (1.0 - uneven) > 1.05 {
                // Uneven batches come in order, so that up to as many again as workers wait for one that is late.
                prop_assert!(loader.depth.now() <= 2 * workers as u64 + 2, "{} for {} workers", loader.depth.now(), workers);
            }
        }

        #[test]
        fn it_stays_within_what_the_plan_gave(workers in 0u64..20, most in 1u64..30, happened in prop::collection::vec((any::<bool>(), any::<bool>(), 0u64..5), 0..200), later in 1u64..30) {
            let mut depth = Depth::new(workers, most);
            for (i, (waited, lacked, ready)) in happened.into_iter().enumerate() {
                if i == 100 {
                    depth.limit(later);
                }
                if waited { depth.waited(lacked); } else { depth.taken(ready); }
                prop_assert!((1..=most).contains(&depth.now()));
                prop_assert!(i < 100 || depth.now() <= later);
            }
        }
    }

    #[test]
    fn a_burst_is_bridged_by_more_and_ample_buffers_are_given_back() {
        let mut depth = Depth::new(2, 8);
        assert_eq!(depth.now(), 3);
        assert!(!depth.waited(false), "busy workers need no more buffers");
        assert!(depth.waited(true));
        assert_eq!(depth.now(), 4);
        (0..PATIENCE).for_each(|_| depth.taken(AMPLE));
        assert_eq!(depth.now(), 3);
        assert!(depth.waited(true));
        (0..PATIENCE).for_each(|_| depth.taken(AMPLE));
        assert_eq!(depth.now(), 4, "it was given back too early before");
        (0..PATIENCE).for_each(|_| depth.taken(AMPLE));
        assert_eq!(depth.now(), 3);
    }
}
