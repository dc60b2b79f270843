//! Batches decoded ahead of the step by worker threads, in order, within a bound in bytes.
//!
//! Every buffer the loader made counts, whether it waits, is being filled or is in the consumer's
//! hands; [`holds`] says beforehand how much that can be. Workers claim spans of the order one after the
//! other and only with a buffer in hand, so the span delivered next never lacks one. What is delivered
//! depends on the source, the order and the cursor alone.

use std::{
    any::Any,
    collections::VecDeque,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    Batch, DataError, Features, Key, Source,
    order::{Cursor, Order, Span},
};

/// The most bytes a loader holds at once: as many batches of `micro_batch` samples as `limit` bytes allow,
/// but at least one, and no more than keep `workers` busy while a batch each is ready and the consumer
/// has two.
pub fn holds(features: &Features, micro_batch: usize, limit: u64, workers: usize) -> u64 {
    let size = buffer_bytes(features, micro_batch);
    let useful = 2 * workers.max(1) as u64 + 2;
    (limit / size).clamp(1, useful).saturating_mul(size)
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
    state: Mutex<State>,
    /// A worker may find something to claim, or has to stop.
    work: Condvar,
    /// The consumer may find what it waits for.
    done: Condvar,
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
    held: u64,
    peak: u64,
    free: Vec<Batch>,
    /// The spans claimed and not delivered, oldest first; `None` is being filled.
    queue: VecDeque<Option<Result<Batch, DataError>>>,
    /// Spans delivered in this generation: the number of the queue's front.
    delivered: u64,
    filling: usize,
    /// Nothing is claimed after an error.
    failed: bool,
    stop: bool,
}

impl Loader {
    /// Starts to read `source` at `from`, up to the beginning of update `until_update`, in batches of
    /// at most `micro_batch` samples that never cross an update's end, holding at most
    /// [`holds`]`(source.features(), micro_batch, limit_bytes, workers)` bytes.
    pub fn start(
        source: Arc<dyn Source>,
        order: Order,
        from: Cursor,
        until_update: u64,
        micro_batch: usize,
        limit_bytes: u64,
        workers: usize,
    ) -> Result<Self, DataError> {
        if order.samples() > source.len() {
            let value = order.samples().to_string();
            return Err(DataError::Setting { name: "samples", value, wanted: "the set has fewer" });
        }
        let workers = workers.max(1);
        let state = State {
            generation: 0,
            cursor: order.settle(from),
            micro_batch: micro_batch.max(1),
            size: buffer_bytes(source.features(), micro_batch),
            cap: holds(source.features(), micro_batch, limit_bytes, workers),
            held: 0,
            peak: 0,
            free: Vec::new(),
            queue: VecDeque::new(),
            delivered: 0,
            filling: 0,
            failed: false,
            stop: false,
        };
        let shared = Arc::new(Shared {
            source,
            order,
            until: until_update,
            state: Mutex::new(state),
            work: Condvar::new(),
            done: Condvar::new(),
            generation: AtomicU64::new(0),
        });
        let mut loader =
            Loader { shared, threads: Vec::new(), limit: limit_bytes, last_wait: Duration::ZERO };
        for i in 0..workers {
            let shared = Arc::clone(&loader.shared);
            let thread = thread::Builder::new().name(format!("data-{i}")).spawn(move || shared.work());
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
        let result = loop {
            match state.queue.front() {
                Some(Some(Err(error))) => break Err(error.clone()),
                Some(Some(Ok(_))) => {
                    let batch = state.queue.pop_front().flatten().and_then(Result::ok);
                    state.delivered += 1;
                    let (size, generation) = (state.size, state.generation);
                    break Ok(Some(Lent { batch, size, generation, shared: Arc::clone(shared) }));
                }
                Some(None) => {}
                None if state.cursor.update >= shared.until => break Ok(None),
                None if !state.has_room() => break Err(DataError::AllHeld { bytes: state.cap }),
                None => {}
            }
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.last_wait = start.elapsed();
        result
    }

    /// How long the last `next` took.
    pub fn last_wait(&self) -> Duration {
        self.last_wait
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
        while state.filling > 0 {
            state = shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let unused = state.free.len() + state.queue.iter().filter(|done| matches!(done, Some(Ok(_)))).count();
        state.held -= unused as u64 * state.size;
        state.free.clear();
        state.queue.clear();
        state.delivered = 0;
        state.cursor = shared.order.settle(from);
        state.micro_batch = micro_batch.max(1);
        state.size = buffer_bytes(features, micro_batch);
        state.cap = holds(features, micro_batch, self.limit, self.threads.len());
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
        for thread in self.threads.drain(..) {
            // A worker catches its source's panics, so there is nothing to learn from a failed join.
            let _ = thread.join();
        }
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
            Some(batch) if self.generation == state.generation => state.free.push(batch),
            _ => state.held -= self.size,
        }
        drop(state);
        self.shared.work.notify_one();
    }
}

impl State {
    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.held + self.size <= self.cap
    }

    fn may_claim(&self, until: u64) -> bool {
        !self.failed && self.cursor.update < until && self.has_room()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The life of a worker: claim a span with a buffer, fill it, put it in its place.
    fn work(&self) {
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
            drop(state);

            let filled = buffer
                .map_or_else(|| Batch::with_room(self.source.features(), rows), Ok)
                .and_then(|batch| self.fill(batch, span, generation));

            state = self.lock();
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

    /// Reads the samples of `span`. Given up early, with any content, once `generation` is over.
    fn fill(&self, mut batch: Batch, span: Span, generation: u64) -> Result<Batch, DataError> {
        let features = self.source.features();
        let rows = span.len() as usize;
        (batch.update, batch.epoch) = (span.update, span.epoch);
        batch.resize(features, rows);
        for (row, id) in self.order.ids(span.epoch, span.positions).enumerate() {
            if self.generation.load(Ordering::Relaxed) != generation {
                break;
            }
            batch.ids[row] = id;
            let key = Key { seed: self.order.seed(), epoch: span.epoch, sample: id };
            let mut into = batch.row(features, row);
            catch_unwind(AssertUnwindSafe(|| self.source.read(id, key, &mut into))).unwrap_or_else(
                |cause| Err(DataError::Panicked { sample: id, message: message(cause.as_ref()) }),
            )?;
            let length = into.length;
            if let Some(slot) = batch.lengths.get_mut(row) {
                *slot = length;
            }
        }
        Ok(batch)
    }
}

fn message(cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests;
