//! Multi-threaded data loader: worker threads prefetch batches in order, within a byte limit.
//!
//! Every buffer the loader allocated counts against the limit, whether it waits, is being filled or is held by the
//! consumer; [`max_held_bytes`] predicts the maximum. A worker claims the next span of the sample order only if it has
//! a buffer, so the span that is delivered next always has one. `prefetch_depth` adapts the number of buffers.
//!
//! What is delivered depends only on the dataset, the order and the cursor. For a dataset that is read sequentially, no
//! worker runs further ahead than the window after that of the slowest worker. Two windows in memory are therefore
//! enough, and the loader announces them to the dataset.

use std::{
    collections::VecDeque,
    ops::{Deref, Range},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    DataError, Dataset, Features, HostBatch, SampleKey,
    bad_records::BadRecord,
    order::{Cursor, Order, SampleSpan},
    prefetch_depth::PrefetchDepth,
    shuffle_windows::ShuffleWindow,
};
use crate::base::panics::catch_panic;

/// How a dataset is read. Only `skip_bad` affects what is delivered.
#[derive(Clone, Copy, Debug)]
pub struct LoaderOptions {
    /// Maximum samples per batch.
    pub micro_batch: usize,
    /// Byte limit of the buffers; [`max_held_bytes`] says how much of it is useful.
    pub max_bytes: u64,
    pub workers: usize,
    /// Skip bad records instead of failing.
    pub skip_bad: bool,
}

/// Time the consumer waited, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WaitTimes {
    /// All workers were busy.
    pub for_workers: Duration,
    /// A worker had no free buffer: all allowed buffers were ready or in use.
    pub for_buffers: Duration,
}

/// Maximum bytes a loader holds at once that delivers `batches`: as many batches of `micro_batch` samples as fit into
/// `limit`, but at least one, and at most what is useful: per worker one batch being filled and one ready, plus two for
/// the consumer.
pub fn max_held_bytes(
    features: &Features,
    micro_batch: usize,
    limit: u64,
    workers: usize,
    batches: u64,
) -> u64 {
    let size = buffer_bytes(features, micro_batch);
    let useful = (2 * workers.max(1) as u64 + 2).min(batches.max(1));
    (limit / size).clamp(1, useful).saturating_mul(size)
}

/// Batches of so many updates, if each has `samples`.
pub fn num_batches(updates: u64, samples: u64, micro_batch: usize) -> u64 {
    updates.saturating_mul(samples.div_ceil(micro_batch.max(1) as u64))
}

/// Batches of a loader from this cursor on, at most.
fn remaining_batches(order: &Order, from: Cursor, end_update: u64, micro_batch: usize) -> u64 {
    let samples = order.samples_per_update().min(order.samples());
    num_batches(end_update.saturating_sub(from.update), samples, micro_batch)
}

fn buffer_bytes(features: &Features, micro_batch: usize) -> u64 {
    features.sample_bytes().saturating_mul(micro_batch.max(1) as u64)
}

/// Reads a dataset in order, ahead of its consumer. Dropping it stops and joins its threads.
pub struct Loader {
    shared: Arc<LoaderShared>,
    threads: Vec<JoinHandle<()>>,
    max_bytes: u64,
    last_wait: Duration,
    waits: WaitTimes,
}

/// A batch borrowed from a [`Loader`]; dropping it returns the buffer.
pub struct BatchGuard {
    /// `Some` until dropped.
    batch: Option<HostBatch>,
    shared: Arc<LoaderShared>,
}

struct LoaderShared {
    dataset: Arc<dyn Dataset>,
    order: Order,
    /// Exclusive end of the updates to read.
    end_update: u64,
    micro_batch: usize,
    skip_bad: bool,
    state: Mutex<LoaderState>,
    /// Wakes workers: there may be a span to claim, or they must stop.
    work_available: Condvar,
    /// Wakes the consumer.
    batch_ready: Condvar,
    /// Wakes workers that wait to enter the next window.
    window_advanced: Condvar,
    /// Workers check it between samples, without taking the lock.
    stop: AtomicBool,
}

struct LoaderState {
    /// The next sample to claim.
    cursor: Cursor,
    /// Bytes of one buffer, and the limit for all of them.
    batch_bytes: u64,
    max_bytes: u64,
    /// Number of buffers allowed now, and whether a worker lacked one since the consumer last waited.
    depth: PrefetchDepth,
    buffer_starved: bool,
    held_bytes: u64,
    peak_bytes: u64,
    free_buffers: Vec<HostBatch>,
    /// Spans claimed but not delivered, oldest first; `None` while a span is being filled.
    queue: VecDeque<Option<Result<HostBatch, DataError>>>,
    /// Spans delivered, which is also the sequence number of the front of the queue.
    delivered: u64,
    in_flight: usize,
    /// The window each worker reads in, and the window last announced to the dataset.
    worker_windows: Vec<Option<ShuffleWindow>>,
    announced_window: Option<ShuffleWindow>,
    /// Workers claim nothing after an error.
    failed: bool,
}

impl Loader {
    /// Starts reading `dataset` at `from`, up to the start of update `end_update`. Batches never cross the end of an
    /// update, and at most [`max_held_bytes`] bytes are held.
    pub fn start(
        dataset: Arc<dyn Dataset>,
        order: Order,
        from: Cursor,
        end_update: u64,
        options: LoaderOptions,
    ) -> Result<Self, DataError> {
        if order.samples() > dataset.len() {
            let value = order.samples().to_string();
            return Err(DataError::InvalidSetting {
                name: "samples",
                value,
                expected: "the dataset has fewer samples",
            });
        }
        let LoaderOptions { micro_batch, max_bytes: limit, workers, skip_bad } = options;
        let workers = workers.max(1);
        let features = dataset.features();
        let batches = remaining_batches(&order, from, end_update, micro_batch);
        let batch_bytes = buffer_bytes(features, micro_batch);
        let max_bytes = max_held_bytes(features, micro_batch, limit, workers, batches);
        let state = LoaderState {
            cursor: order.canonicalize(from),
            batch_bytes,
            max_bytes,
            depth: PrefetchDepth::new(workers as u64, max_bytes / batch_bytes),
            buffer_starved: false,
            held_bytes: 0,
            peak_bytes: 0,
            free_buffers: Vec::new(),
            queue: VecDeque::new(),
            delivered: 0,
            in_flight: 0,
            worker_windows: vec![None; workers],
            announced_window: None,
            failed: false,
        };
        let shared = Arc::new(LoaderShared {
            dataset,
            order,
            end_update,
            micro_batch: micro_batch.max(1),
            skip_bad,
            state: Mutex::new(state),
            work_available: Condvar::new(),
            batch_ready: Condvar::new(),
            window_advanced: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let (last_wait, waits) = (Duration::ZERO, WaitTimes::default());
        let mut loader = Loader { shared, threads: Vec::new(), max_bytes: limit, last_wait, waits };
        for i in 0..workers {
            let shared = Arc::clone(&loader.shared);
            let thread = thread::Builder::new().name(format!("data-{i}")).spawn(move || shared.run_worker(i));
            loader.threads.push(thread.map_err(|e| DataError::ThreadSpawn { source: Arc::new(e) })?);
        }
        Ok(loader)
    }

    /// Returns the next batch, or `None` after the last one; blocks until it is ready. An error is returned at its
    /// position in the order, and again by every later call.
    #[allow(clippy::should_implement_trait)] // fallible
    pub fn next(&mut self) -> Result<Option<BatchGuard>, DataError> {
        let start = Instant::now();
        let shared = &self.shared;
        let mut state = shared.lock();
        let (mut waited, mut buffer_starved) = (false, false);
        let result = loop {
            match state.queue.front() {
                Some(Some(Err(error))) => break Err(error.clone()),
                Some(Some(Ok(_))) => {
                    let batch = state.queue.pop_front().flatten().and_then(Result::ok);
                    state.delivered += 1;
                    if !waited {
                        let ready = state.queue.iter().take_while(|done| matches!(done, Some(Ok(_)))).count();
                        state.depth.on_ready_delivery(ready as u64);
                    }
                    break Ok(Some(BatchGuard { batch, shared: Arc::clone(shared) }));
                }
                Some(None) => {}
                None if state.cursor.update >= shared.end_update => break Ok(None),
                // The consumer holds every buffer that is allowed now.
                None if !state.has_free_buffer() => match state.depth.on_wait(true) {
                    true => {}
                    false => break Err(DataError::BuffersExhausted { bytes: state.max_bytes }),
                },
                None => {}
            }
            if !waited {
                (waited, buffer_starved) = (true, std::mem::take(&mut state.buffer_starved));
                state.depth.on_wait(buffer_starved);
            }
            shared.work_available.notify_all();
            state = shared.batch_ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.last_wait = start.elapsed();
        match (waited, buffer_starved) {
            (false, _) => {}
            (true, false) => self.waits.for_workers += self.last_wait,
            (true, true) => self.waits.for_buffers += self.last_wait,
        }
        result
    }

    /// Duration of the last call to `next`.
    pub fn last_wait(&self) -> Duration {
        self.last_wait
    }

    /// Wait times since the start.
    pub fn waits(&self) -> WaitTimes {
        self.waits
    }

    /// Lowers the limit to `limit` bytes for good. Unused buffers are freed at once, the others once they were
    /// consumed. Returns the bytes that are still held or may be.
    pub fn shrink(&mut self, limit: u64) -> u64 {
        let shared = &self.shared;
        self.max_bytes = self.max_bytes.min(limit);
        let mut state = shared.lock();
        let allowed = (self.max_bytes / state.batch_bytes).max(1).saturating_mul(state.batch_bytes);
        state.max_bytes = state.max_bytes.min(allowed);
        let depth_limit = state.max_bytes / state.batch_bytes;
        state.depth.lower_max(depth_limit);
        state.trim();
        state.held_bytes.max(state.max_bytes)
    }

    /// Maximum bytes held at once so far.
    pub fn peak_bytes(&self) -> u64 {
        self.shared.lock().peak_bytes
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // Under the lock, so that no worker is between its check and its wait.
        let state = self.shared.lock();
        self.shared.stop.store(true, Ordering::Relaxed);
        drop(state);
        self.shared.work_available.notify_all();
        self.shared.window_advanced.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches panics of the dataset, so a failed join carries no information.
            let _ = thread.join();
        }
        self.shared.dataset.prefetch(Vec::new());
    }
}

impl Deref for BatchGuard {
    type Target = HostBatch;

    fn deref(&self) -> &HostBatch {
        match &self.batch {
            Some(batch) => batch,
            None => unreachable!("`batch` is taken only by drop"),
        }
    }
}

impl Drop for BatchGuard {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.free_buffers.extend(self.batch.take());
        state.trim();
        drop(state);
        self.shared.work_available.notify_one();
    }
}

impl LoaderState {
    /// Byte limit at the current depth.
    fn allowed_bytes(&self) -> u64 {
        self.max_bytes.min(self.depth.current().saturating_mul(self.batch_bytes))
    }

    fn has_free_buffer(&self) -> bool {
        !self.free_buffers.is_empty() || self.held_bytes + self.batch_bytes <= self.allowed_bytes()
    }

    /// Frees unused buffers above the limit.
    fn trim(&mut self) {
        while self.held_bytes > self.allowed_bytes() && self.free_buffers.pop().is_some() {
            self.held_bytes -= self.batch_bytes;
        }
    }

    fn may_claim(&mut self, end_update: u64) -> bool {
        let has_work = !self.failed && self.cursor.update < end_update;
        self.buffer_starved |= has_work && !self.has_free_buffer();
        has_work && self.has_free_buffer()
    }
}

impl LoaderShared {
    fn lock(&self) -> MutexGuard<'_, LoaderState> {
        // No code panics while it holds the lock, so a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Worker loop: claim a span and a buffer, fill it, put it into its slot of the queue.
    fn run_worker(&self, worker: usize) {
        let mut state = self.lock();
        loop {
            if self.stops() {
                return;
            }
            if !state.may_claim(self.end_update) {
                state = self.work_available.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let rows = self.micro_batch;
            let (span, next) = self.order.take(state.cursor, rows as u64);
            state.cursor = next;
            let sequence = state.delivered + state.queue.len() as u64;
            state.queue.push_back(None);
            state.in_flight += 1;
            let buffer = state.free_buffers.pop();
            if buffer.is_none() {
                state.held_bytes += state.batch_bytes;
                state.peak_bytes = state.peak_bytes.max(state.held_bytes);
            }
            let window_ranges = self.order.window_ranges(span.epoch, span.positions.clone());
            self.set_worker_window(&mut state, worker, window_ranges.first().map(|(window, _)| *window));
            drop(state);

            let filled = buffer
                .map_or_else(|| HostBatch::with_capacity(self.dataset.features(), rows), Ok)
                .and_then(|batch| self.fill(batch, span, window_ranges, worker));

            state = self.lock();
            self.set_worker_window(&mut state, worker, None);
            state.in_flight -= 1;
            if filled.is_err() {
                state.held_bytes -= state.batch_bytes;
                state.failed = true;
            }
            let index = (sequence - state.delivered) as usize;
            state.queue[index] = Some(filled);
            self.batch_ready.notify_one();
        }
    }

    /// Records the window of a worker and announces the windows to prefetch to the dataset.
    fn set_worker_window(&self, state: &mut LoaderState, worker: usize, window: Option<ShuffleWindow>) {
        if !self.order.has_windows() {
            return;
        }
        state.worker_windows[worker] = window;
        let Some(oldest) = state.worker_windows.iter().flatten().min().copied() else { return };
        if state.announced_window != Some(oldest) {
            state.announced_window = Some(oldest);
            self.dataset.prefetch(self.order.prefetch_blocks(oldest));
            self.window_advanced.notify_all();
        }
    }

    /// Waits until `window` is at most one past that of the slowest worker, or the loader stops. The windows of a span
    /// ascend, so the slowest worker never waits.
    fn wait_for_window(&self, worker: usize, window: ShuffleWindow) {
        let mut state = self.lock();
        let may = |state: &LoaderState| {
            let others = state.worker_windows.iter().enumerate().filter(|(other, _)| *other != worker);
            let oldest = others.filter_map(|(_, at)| *at).min();
            oldest.is_none_or(|oldest| window <= self.order.next_window(oldest))
        };
        while !self.stops() && !may(&state) {
            state = self.window_advanced.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.set_worker_window(&mut state, worker, Some(window));
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Reads the samples of `span`. Returns early, with arbitrary content, once the loader stops.
    fn fill(
        &self,
        mut batch: HostBatch,
        span: SampleSpan,
        window_ranges: Vec<(ShuffleWindow, Range<u64>)>,
        worker: usize,
    ) -> Result<HostBatch, DataError> {
        let features = self.dataset.features();
        (batch.update, batch.epoch) = (span.update, span.epoch);
        batch.resize(features, span.len() as usize);
        batch.consumed = span.len();
        batch.bad_records.clear();
        let mut row = 0;
        for (window, positions) in window_ranges {
            if self.order.has_windows() {
                self.wait_for_window(worker, window);
            }
            for id in self.order.ids(span.epoch, positions) {
                if self.stops() {
                    return Ok(batch);
                }
                batch.ids[row] = id;
                let key = SampleKey { seed: self.order.seed(), epoch: span.epoch, sample: id };
                let mut into = batch.row(features, row);
                let read = catch_panic(|| self.dataset.read(id, key, &mut into))
                    .unwrap_or_else(|message| Err(DataError::Panicked { sample: id, message }));
                match read {
                    Err(error) if self.skip_bad && error.is_bad_record() => {
                        batch.bad_records.push(BadRecord { id, why: error.to_string() });
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
