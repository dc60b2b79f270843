//! Batches decoded ahead of the step by worker threads, in order, within a bound in bytes.
//!
//! Every buffer the loader made counts, whether it waits, is being filled or is in the consumer's
//! hands; [`holds`] says beforehand how much that can be. Workers claim spans of the order one after the
//! other and only with a buffer in hand, so the span delivered next never lacks one. How many buffers there are is
//! found by itself ([`depth`](super::depth)). What is delivered
//! depends on the source, the order and the cursor alone. Where the set is read forward, no worker goes further than
//! the window after that of the slowest, so that two windows suffice, and the source is told which.

use std::{
    collections::VecDeque,
    ops::{Deref, Range},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Batch, DataError, Features, Key, Source,
    bad::Bad,
    depth::Depth,
    order::{Cursor, Order, Span},
    windows::Window,
};
use crate::caught::caught;

/// How a set is read. None of it but `skip_bad` changes what is delivered.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Samples in a batch, at most.
    pub micro_batch: usize,
    /// Bytes that may be held, as far as [`holds`] finds them useful.
    pub limit: u64,
    pub workers: usize,
    /// Leave out records that are bad, rather than fail.
    pub skip_bad: bool,
}

/// Where the time went that the consumer waited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    /// All workers were busy.
    pub for_workers: Duration,
    /// A worker had no buffer to fill: those allowed were all ready or in use.
    pub for_buffers: Duration,
}

/// The most bytes a loader holds at once: as many batches of `micro_batch` samples as `limit` bytes allow,
/// but at least one, and no more than keep `workers` busy while a batch each is ready and the consumer
/// has two.
pub fn holds(features: &Features, micro_batch: usize, limit: u64, workers: usize) -> u64 {
    let size = buffer_bytes(features, micro_batch);
    let useful = 2 * workers.max(1) as u64 + 2;
    (limit / size).clamp(1, useful).saturating_mul(size)
}

/// How many buffers a loader begins with and may have.
fn buffers(features: &Features, micro_batch: usize, limit: u64, workers: usize) -> Depth {
    let most = holds(features, micro_batch, limit, workers) / buffer_bytes(features, micro_batch);
    Depth::new(workers as u64, most)
}

fn buffer_bytes(features: &Features, micro_batch: usize) -> u64 {
    features.sample_bytes().saturating_mul(micro_batch.max(1) as u64)
}

/// Reads a set in order, ahead of its consumer. Dropping it stops and joins its threads.
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    limit: u64,
    last_wait: Duration,
    waits: Waits,
}

/// A batch lent by a [`Loader`]; dropping it gives the buffer back.
pub struct Lent {
    /// Present until dropped.
    batch: Option<Batch>,
    size: u64,
    generation: u64,
    shared: Arc<Shared>,
}

struct Shared {
    source: Arc<dyn Source>,
    order: Order,
    /// The first update that is not read.
    until: u64,
    skip_bad: bool,
    state: Mutex<State>,
    /// A worker may find something to claim, or has to stop.
    work: Condvar,
    /// The consumer may find what it waits for.
    done: Condvar,
    /// A worker may find that it can go on to the next window.
    moved: Condvar,
    /// Equals the generation in force. A worker looks at it between samples to give up early.
    generation: AtomicU64,
}

struct State {
    /// Changes at every restart: results of an older generation are thrown away.
    generation: u64,
    /// The next sample to claim.
    cursor: Cursor,
    micro_batch: usize,
    /// Bytes of one buffer, and of all that may exist.
    size: u64,
    cap: u64,
    /// How many may exist now, and whether a worker lacked one since the consumer last waited.
    depth: Depth,
    lacked: bool,
    held: u64,
    peak: u64,
    free: Vec<Batch>,
    /// The spans claimed and not delivered, oldest first; `None` is being filled.
    queue: VecDeque<Option<Result<Batch, DataError>>>,
    /// Spans delivered in this generation: the number of the queue's front.
    delivered: u64,
    filling: usize,
    /// The window each worker reads in, and the one the source was told of.
    at: Vec<Option<Window>>,
    told: Option<Window>,
    /// Nothing is claimed after an error.
    failed: bool,
    stop: bool,
}

impl Loader {
    /// Starts to read `source` at `from`, up to the beginning of update `until_update`, in batches that never cross
    /// an update's end, holding at most [`holds`] bytes.
    pub fn start(
        source: Arc<dyn Source>,
        order: Order,
        from: Cursor,
        until_update: u64,
        reading: Reading,
    ) -> Result<Self, DataError> {
        if order.samples() > source.len() {
            let value = order.samples().to_string();
            return Err(DataError::Setting { name: "samples", value, wanted: "the set has fewer" });
        }
        let Reading { micro_batch, limit, workers, skip_bad } = reading;
        let workers = workers.max(1);
        let state = State {
            generation: 0,
            cursor: order.settle(from),
            micro_batch: micro_batch.max(1),
            size: buffer_bytes(source.features(), micro_batch),
            cap: holds(source.features(), micro_batch, limit, workers),
            depth: buffers(source.features(), micro_batch, limit, workers),
            lacked: false,
            held: 0,
            peak: 0,
            free: Vec::new(),
            queue: VecDeque::new(),
            delivered: 0,
            filling: 0,
            at: vec![None; workers],
            told: None,
            failed: false,
            stop: false,
        };
        let shared = Arc::new(Shared {
            source,
            order,
            until: until_update,
            skip_bad,
            state: Mutex::new(state),
            work: Condvar::new(),
            done: Condvar::new(),
            moved: Condvar::new(),
            generation: AtomicU64::new(0),
        });
        let (last_wait, waits) = (Duration::ZERO, Waits::default());
        let mut loader = Loader { shared, threads: Vec::new(), limit, last_wait, waits };
        for i in 0..workers {
            let shared = Arc::clone(&loader.shared);
            let thread = thread::Builder::new().name(format!("data-{i}")).spawn(move || shared.work(i));
            loader.threads.push(thread.map_err(|e| DataError::Thread { source: Arc::new(e) })?);
        }
        Ok(loader)
    }

    /// The next batch, or `None` after the last one; waits for it where necessary. An error comes in its
    /// place in the order and again at every later call, until a restart.
    #[allow(clippy::should_implement_trait)] // it can fail, and goes on after a restart
    pub fn next(&mut self) -> Result<Option<Lent>, DataError> {
        let start = Instant::now();
        let shared = &self.shared;
        let mut state = shared.lock();
        let (mut waited, mut lacked) = (false, false);
        let result = loop {
            match state.queue.front() {
                Some(Some(Err(error))) => break Err(error.clone()),
                Some(Some(Ok(_))) => {
                    let batch = state.queue.pop_front().flatten().and_then(Result::ok);
                    state.delivered += 1;
                    if !waited {
                        let ready = state.queue.iter().take_while(|done| matches!(done, Some(Ok(_)))).count();
                        state.depth.taken(ready as u64);
                    }
                    let (size, generation) = (state.size, state.generation);
                    break Ok(Some(Lent { batch, size, generation, shared: Arc::clone(shared) }));
                }
                Some(None) => {}
                None if state.cursor.update >= shared.until => break Ok(None),
                // All there may be now are with the consumer.
                None if !state.has_room() => match state.depth.waited(true) {
                    true => {}
                    false => break Err(DataError::AllHeld { bytes: state.cap }),
                },
                None => {}
            }
            if !waited {
                (waited, lacked) = (true, std::mem::take(&mut state.lacked));
                state.depth.waited(lacked);
            }
            shared.work.notify_all();
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.last_wait = start.elapsed();
        match (waited, lacked) {
            (false, _) => {}
            (true, false) => self.waits.for_workers += self.last_wait,
            (true, true) => self.waits.for_buffers += self.last_wait,
        }
        result
    }

    /// How long the last `next` took.
    pub fn last_wait(&self) -> Duration {
        self.last_wait
    }

    /// What was waited for, since the start.
    pub fn waits(&self) -> Waits {
        self.waits
    }

    /// Holds no more than `limit` bytes allow from here on, and never more again: buffers that are not in use are
    /// freed at once, the others when they were consumed. Gives the bytes that are still held, or may be.
    pub fn give_back(&mut self, limit: u64) -> u64 {
        let shared = &self.shared;
        self.limit = self.limit.min(limit);
        let mut state = shared.lock();
        state.cap = holds(shared.source.features(), state.micro_batch, self.limit, self.threads.len());
        let most = state.cap / state.size;
        state.depth.limit(most);
        state.trim();
        state.held.max(state.cap)
    }

    /// Goes on at `from` with another micro-batch; what was read ahead is thrown away and its memory
    /// freed before anything new is made. Batches still lent count until they are dropped.
    pub fn restart(&mut self, from: Cursor, micro_batch: usize) {
        let shared = &self.shared;
        let features = shared.source.features();
        let mut state = shared.lock();
        state.generation += 1;
        shared.generation.store(state.generation, Ordering::Relaxed);
        // Claims wait for the lock meanwhile released: `failed` keeps them from starting.
        state.failed = true;
        shared.moved.notify_all();
        while state.filling > 0 {
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let unused = state.free.len() + state.queue.iter().filter(|done| matches!(done, Some(Ok(_)))).count();
        state.held -= unused as u64 * state.size;
        state.free.clear();
        state.queue.clear();
        state.delivered = 0;
        state.told = None;
        state.cursor = shared.order.settle(from);
        state.micro_batch = micro_batch.max(1);
        state.size = buffer_bytes(features, micro_batch);
        state.cap = holds(features, micro_batch, self.limit, self.threads.len());
        state.depth = buffers(features, micro_batch, self.limit, self.threads.len());
        state.failed = false;
        shared.work.notify_all();
    }

    /// The most bytes held at once so far.
    pub fn peak_bytes(&self) -> u64 {
        self.shared.lock().peak
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.generation.store(u64::MAX, Ordering::Relaxed);
        self.shared.work.notify_all();
        self.shared.moved.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches its source's panics, so there is nothing to learn from a failed join.
            let _ = thread.join();
        }
        self.shared.source.expect(Vec::new());
    }
}

impl Deref for Lent {
    type Target = Batch;

    fn deref(&self) -> &Batch {
        match &self.batch {
            Some(batch) => batch,
            None => unreachable!("the batch leaves only when it is dropped"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        match self.batch.take() {
            Some(batch) if self.generation == state.generation => {
                state.free.push(batch);
                state.trim();
            }
            _ => state.held -= self.size,
        }
        drop(state);
        self.shared.work.notify_one();
    }
}

impl State {
    /// Bytes there may be now.
    fn room(&self) -> u64 {
        self.cap.min(self.depth.now().saturating_mul(self.size))
    }

    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.held + self.size <= self.room()
    }

    /// Frees what is not in use and more than there may be.
    fn trim(&mut self) {
        while self.held > self.room() && self.free.pop().is_some() {
            self.held -= self.size;
        }
    }

    fn may_claim(&mut self, until: u64) -> bool {
        let wants = !self.failed && self.cursor.update < until;
        self.lacked |= wants && !self.has_room();
        wants && self.has_room()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a worker: claim a span with a buffer, fill it, put it in its place.
    fn work(&self, worker: usize) {
        let mut state = self.lock();
        loop {
            if state.stop {
                return;
            }
            if !state.may_claim(self.until) {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (generation, rows) = (state.generation, state.micro_batch);
            let (span, next) = self.order.take(state.cursor, rows as u64);
            state.cursor = next;
            let place = state.delivered + state.queue.len() as u64;
            state.queue.push_back(None);
            state.filling += 1;
            let buffer = state.free.pop();
            if buffer.is_none() {
                state.held += state.size;
                state.peak = state.peak.max(state.held);
            }
            let pieces = self.order.pieces(span.epoch, span.positions.clone());
            self.reach(&mut state, worker, pieces.first().map(|(window, _)| *window));
            drop(state);

            let filled = buffer
                .map_or_else(|| Batch::with_room(self.source.features(), rows), Ok)
                .and_then(|batch| self.fill(batch, span, pieces, generation, worker));

            state = self.lock();
            self.reach(&mut state, worker, None);
            state.filling -= 1;
            if filled.is_err() || state.generation != generation {
                state.held -= state.size;
            }
            if state.generation == generation {
                state.failed |= filled.is_err();
                let index = (place - state.delivered) as usize;
                state.queue[index] = Some(filled);
            }
            self.done.notify_one();
        }
    }

    /// Notes where a worker is, and tells the source what that means for it.
    fn reach(&self, state: &mut State, worker: usize, window: Option<Window>) {
        if !self.order.has_windows() {
            return;
        }
        state.at[worker] = window;
        let Some(oldest) = state.at.iter().flatten().min().copied() else { return };
        if state.told != Some(oldest) {
            state.told = Some(oldest);
            self.source.expect(self.order.needs(oldest));
            self.moved.notify_all();
        }
    }

    /// Waits until `window` is no further than next to the slowest worker's, or `generation` is over. The windows of
    /// a span follow one another, so the slowest never waits.
    fn enter(&self, worker: usize, window: Window, generation: u64) {
        let mut state = self.lock();
        let may = |state: &State| {
            let others = state.at.iter().enumerate().filter(|(other, _)| *other != worker);
            let oldest = others.filter_map(|(_, at)| *at).min();
            oldest.is_none_or(|oldest| window <= self.order.after(oldest))
        };
        while self.generation.load(Ordering::Relaxed) == generation && !may(&state) {
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.reach(&mut state, worker, Some(window));
    }

    /// Reads the samples of `span`. Given up early, with any content, once `generation` is over.
    fn fill(
        &self,
        mut batch: Batch,
        span: Span,
        pieces: Vec<(Window, Range<u64>)>,
        generation: u64,
        worker: usize,
    ) -> Result<Batch, DataError> {
        let features = self.source.features();
        (batch.update, batch.epoch) = (span.update, span.epoch);
        batch.resize(features, span.len() as usize);
        batch.taken = span.len();
        batch.bad.clear();
        let mut row = 0;
        for (window, positions) in pieces {
            if self.order.has_windows() {
                self.enter(worker, window, generation);
            }
            for id in self.order.ids(span.epoch, positions) {
                if self.generation.load(Ordering::Relaxed) != generation {
                    return Ok(batch);
                }
                batch.ids[row] = id;
                let key = Key { seed: self.order.seed(), epoch: span.epoch, sample: id };
                let mut into = batch.row(features, row);
                let read = caught(|| self.source.read(id, key, &mut into))
                    .unwrap_or_else(|message| Err(DataError::Panicked { sample: id, message }));
                match read {
                    Err(error) if self.skip_bad && error.is_record() => {
                        batch.bad.push(Bad { id, why: error.to_string() });
                        continue;
                    }
                    read => read?,
                }
                let length = into.length;
                if let Some(slot) = batch.lengths.get_mut(row) {
                    *slot = length;
                }
                row += 1;
            }
        }
        batch.resize(features, row);
        Ok(batch)
    }
}

#[cfg(test)]
mod tests;
