//! Compares the loader with a plain loop over the order, under every disturbance.

use std::{collections::BTreeSet, sync::atomic::AtomicUsize};

use proptest::prelude::*;

use super::*;
use crate::base::random::RngKey;
use crate::{BatchRow, BatchValues, InputSpec, TargetSpec};

/// Samples whose content is a function of index and key, read at an uneven speed.
struct ToyDataset {
    samples: u64,
    features: Features,
    reads: AtomicUsize,
    failing: Option<u64>,
    panics: bool,
    /// Indices of bad records.
    bad_records: Vec<u64>,
}

fn toy_dataset(samples: u64) -> ToyDataset {
    let features = Features::new(InputSpec::Floats { shape: vec![3] }, TargetSpec::Values { len: 2 });
    ToyDataset {
        samples,
        features,
        reads: AtomicUsize::new(0),
        failing: None,
        panics: false,
        bad_records: vec![],
    }
}

impl Dataset for ToyDataset {
    fn len(&self) -> u64 {
        self.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let turn = self.reads.fetch_add(1, Ordering::Relaxed) as u64;
        (0..RngKey::new(turn, 0).below(0, 4)).for_each(|_| thread::yield_now());
        if self.failing == Some(index) {
            assert!(!self.panics, "the toy broke at {index}");
            return Err(DataError::OutOfMemory { bytes: index });
        }
        if self.bad_records.contains(&index) {
            let (file, place) = ("toy".into(), format!("record {index}"));
            return Err(DataError::Record { file, place, problem: "is bad".into() });
        }
        let random = RngKey::new(key.seed, key.epoch).fold_in(key.sample);
        into.input.as_f32_mut().iter_mut().enumerate().for_each(|(i, x)| *x = random.f32(i as u64));
        into.target.as_f32_mut().fill(index as f32);
        Ok(())
    }
}

/// What any loader must deliver from `from` on: ids, each with its row.
fn expected_samples(
    source: &ToyDataset,
    order: &Order,
    from: Cursor,
    until: u64,
) -> Vec<(u64, u64, [f32; 5])> {
    let (mut all, mut cursor) = (Vec::new(), from);
    while cursor.update < until {
        let (span, next) = order.take(cursor, 1);
        let id = order.ids(span.epoch, span.positions).next().unwrap();
        let mut batch = HostBatch::with_capacity(&source.features, 1).unwrap();
        batch.resize(&source.features, 1);
        let key = SampleKey { seed: order.seed(), epoch: span.epoch, sample: id };
        source.read(id, key, &mut batch.row(&source.features, 0)).unwrap();
        all.push((span.update, id, rows(&batch)[0]));
        cursor = next;
    }
    all
}

fn rows(batch: &HostBatch) -> Vec<[f32; 5]> {
    let (BatchValues::F32(inputs), BatchValues::F32(targets)) = (&batch.inputs, &batch.targets) else {
        panic!("the toy gives floats");
    };
    let row = |i: usize| [&inputs[3 * i..3 * i + 3], &targets[2 * i..2 * i + 2]].concat();
    (0..batch.ids.len()).map(|i| row(i).try_into().unwrap()).collect()
}

fn contents(batch: &HostBatch) -> Vec<(u64, u64, [f32; 5])> {
    batch.ids.iter().zip(rows(batch)).map(|(&id, row)| (batch.update, id, row)).collect()
}

fn options(micro_batch: usize, limit: u64, workers: usize) -> LoaderOptions {
    LoaderOptions { micro_batch, max_bytes: limit, workers, skip_bad: true }
}

fn start(source: ToyDataset, micro_batch: usize, limit: u64, workers: usize) -> Loader {
    let order = Order::new(source.samples, 8, 1, false).unwrap();
    Loader::start(Arc::new(source), order, Cursor::default(), 10, options(micro_batch, limit, workers))
        .unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Workers, limit, micro-batch and interruptions change neither the sequence nor any value, and the loader never
    /// holds more than predicted.
    #[test]
    fn nothing_changes_what_is_delivered(
        samples in 1u64..60, per_update in 1u64..24, seed: u64, workers in 1usize..5, limit in 0u64..3000,
        splits in prop::collection::vec((1usize..20, 0usize..12), 1..5), done in 0u64..70, kept in 0usize..2,
    ) {
        let order = Order::new(samples, per_update, seed, true).unwrap();
        let until = 2 * order.updates_per_epoch() + 2;
        let source = Arc::new(toy_dataset(samples));
        let mut cursor = order.canonicalize(Cursor { update: 1, done });
        let mut expected = expected_samples(&source, &order, cursor, until).into_iter();
        let size = |from: Cursor, rows: usize| {
            let batches = remaining_batches(&order, from, until, rows);
            max_held_bytes(&source.features, rows, limit, workers, batches)
        };
        for (i, &(rows, batches)) in splits.iter().enumerate() {
            let (bound, options) = (size(cursor, rows), options(rows, limit, workers));
            let mut loader = Loader::start(source.clone(), order.clone(), cursor, until, options).unwrap();
            // The last split reads to the end; the others are interrupted.
            let batches = if i + 1 == splits.len() { usize::MAX } else { batches };
            let mut held = VecDeque::new();
            for _ in 0..batches {
                let Some(batch) = loader.next().unwrap() else { break };
                let (span, next) = order.take(cursor, rows as u64);
                cursor = next;
                prop_assert_eq!(batch.epoch, span.epoch);
                prop_assert_eq!(batch.bytes(), batch.ids.len() as u64 * source.features.sample_bytes());
                let got = contents(&batch);
                prop_assert_eq!(&got, &expected.by_ref().take(got.len()).collect::<Vec<_>>());
                prop_assert_eq!(got.len() as u64, span.len());
                // The consumer may keep a batch across the next call if two fit into the limit.
                held.push_back(batch);
                while held.len() > if bound > buffer_bytes(&source.features, rows) { kept } else { 0 } {
                    held.pop_front();
                }
            }
            held.clear();
            prop_assert!(i + 1 < splits.len() || loader.next().unwrap().is_none());
            prop_assert!(loader.peak_bytes() <= bound, "{} > {}", loader.peak_bytes(), bound);
        }
        prop_assert_eq!(expected.next(), None);
    }
}

/// Bytes of a batch of four toy samples.
const BATCH_BYTES: u64 = 4 * (5 * 4 + 8);

#[test]
fn a_slow_consumer_needs_few_buffers_and_they_are_reused() {
    let source = toy_dataset(1000);
    assert_eq!(
        max_held_bytes(&source.features, 4, 600, 3, 9),
        5 * BATCH_BYTES,
        "as many batches of 112 bytes as 600 bytes allow"
    );
    assert_eq!(max_held_bytes(&source.features, 4, 0, 3, 9), BATCH_BYTES, "one is always allowed");
    assert_eq!(
        max_held_bytes(&source.features, 4, u64::MAX, 3, 9),
        8 * BATCH_BYTES,
        "no more than is useful"
    );
    assert_eq!(max_held_bytes(&source.features, 4, u64::MAX, 3, 2), 2 * BATCH_BYTES, "no more than are read");
    let mut loader = start(source, 4, u64::MAX, 3);
    let mut places = BTreeSet::new();
    loop {
        // Wait until every allowed buffer is filled before taking the next batch.
        while !loader.shared.lock().is_idle(10) {
            thread::yield_now();
        }
        let Some(batch) = loader.next().unwrap() else { break };
        assert_eq!(batch.capacity_bytes(), BATCH_BYTES);
        places.insert(batch.ids.as_ptr());
    }
    assert_eq!(
        (loader.peak_bytes(), places.len()),
        (4 * BATCH_BYTES, 4),
        "one for each worker and one to consume"
    );
    assert_eq!(loader.waits(), WaitTimes::default());
}

impl LoaderState {
    /// No worker is filling a batch, and none could claim one.
    fn is_idle(&mut self, until: u64) -> bool {
        self.in_flight == 0 && !self.may_claim(until)
    }
}

/// The loader adds buffers for the batches that the consumer keeps, up to the limit.
#[test]
fn buffers_are_added_when_starved_up_to_the_limit() {
    let mut loader = start(toy_dataset(1000), 4, 600, 1);
    assert_eq!(loader.shared.lock().depth.current(), 2);
    let mut kept = Vec::new();
    for _ in 0..4 {
        kept.push(loader.next().unwrap().unwrap());
    }
    assert!(matches!(loader.next(), Err(DataError::BuffersExhausted { bytes }) if bytes == 4 * BATCH_BYTES));
    assert_eq!(loader.peak_bytes(), 4 * BATCH_BYTES);
}

#[test]
fn shrinking_frees_buffers_and_keeps_the_order() {
    let mut loader = start(toy_dataset(80), 4, u64::MAX, 3);
    let first = loader.next().unwrap().unwrap();
    while !loader.shared.lock().is_idle(10) {
        thread::yield_now();
    }
    let held = loader.shared.lock().held_bytes;
    assert_eq!(loader.shrink(0), held, "ready batches are still to be consumed");
    drop(first);
    let mut ids = vec![0, 1, 2, 3];
    while let Some(batch) = loader.next().unwrap() {
        ids.extend(&batch.ids);
        assert!(loader.shared.lock().held_bytes <= held.max(BATCH_BYTES));
    }
    assert!(ids.into_iter().eq(0..80));
    assert_eq!(loader.shared.lock().held_bytes, BATCH_BYTES);
    assert_eq!(loader.shrink(u64::MAX), BATCH_BYTES, "it is never more again");
}

/// Bad records are skipped, reported in their batch and counted as consumed; a batch of only bad records is delivered
/// empty.
#[test]
fn bad_records_are_left_out_of_their_batch() {
    let bad: Vec<u64> = vec![1, 6, 8, 9, 10, 11, 79];
    let mut loader = start(ToyDataset { bad_records: bad.clone(), ..toy_dataset(80) }, 4, 600, 3);
    let (mut reported, mut ids, mut consumed) = (Vec::new(), Vec::new(), 0);
    while let Some(batch) = loader.next().unwrap() {
        assert_eq!(batch.ids.len() as u64 + batch.bad_records.len() as u64, batch.consumed);
        assert_eq!(batch.bytes(), batch.ids.len() as u64 * BATCH_BYTES / 4);
        assert!(rows(&batch).iter().zip(&batch.ids).all(|(row, id)| row[3] == *id as f32));
        consumed += batch.consumed;
        ids.extend_from_slice(&batch.ids);
        reported.extend(batch.bad_records.iter().map(|bad| bad.id));
    }
    assert_eq!((consumed, &reported), (80, &bad));
    assert!(ids.into_iter().eq((0..80).filter(|id| !bad.contains(id))));
    let order = Order::new(80, 8, 1, false).unwrap();
    let fail = LoaderOptions { skip_bad: false, ..options(4, 600, 3) };
    let source = Arc::new(ToyDataset { bad_records: bad, ..toy_dataset(80) });
    let error = Loader::start(source, order, Cursor::default(), 10, fail).unwrap().next().err().unwrap();
    assert!(error.is_bad_record(), "{error}");
}

#[test]
fn an_error_comes_in_its_place_and_stays() {
    for panics in [false, true] {
        let mut loader = start(ToyDataset { failing: Some(21), panics, ..toy_dataset(80) }, 4, 1 << 20, 4);
        for batch in 0..5 {
            assert_eq!(loader.next().unwrap().unwrap().ids[0], 4 * batch);
        }
        for _ in 0..2 {
            let error = loader.next().err().unwrap();
            match panics {
                false => assert!(matches!(error, DataError::OutOfMemory { bytes: 21 })),
                true => assert!(error.to_string().contains("sample 21 panicked: the toy broke at 21")),
            }
        }
    }
}

#[test]
fn holding_all_buffers_is_an_error_and_not_a_hang() {
    let mut loader = start(toy_dataset(80), 4, 0, 2);
    let batch = loader.next().unwrap().unwrap();
    assert!(matches!(loader.next(), Err(DataError::BuffersExhausted { bytes: 112 })));
    drop(batch);
    let batch = loader.next().unwrap().unwrap();
    assert_eq!(batch.ids, [4, 5, 6, 7]);
}

#[test]
fn dropping_the_loader_stops_it_and_leaves_lent_batches_whole() {
    let source = Arc::new(toy_dataset(1 << 40));
    let order = Order::new(1 << 40, 1 << 20, 1, true).unwrap();
    let mut loader =
        Loader::start(source.clone(), order, Cursor::default(), 9, options(1 << 10, 1 << 30, 2)).unwrap();
    let batch = loader.next().unwrap().unwrap();
    let ids = batch.ids.clone();
    drop(loader);
    let reads = source.reads.load(Ordering::Relaxed);
    assert!(reads < 1 << 17, "{reads}");
    assert_eq!(Arc::strong_count(&source), 2, "the threads are gone; the batch keeps the rest alive");
    assert_eq!(batch.ids, ids);
    drop(batch);
    assert_eq!(Arc::strong_count(&source), 1);
}

#[test]
fn more_samples_than_the_set_has_are_refused() {
    let order = Order::new(11, 4, 0, true).unwrap();
    let loader = Loader::start(Arc::new(toy_dataset(10)), order, Cursor::default(), 1, options(4, 0, 1));
    assert!(loader.err().unwrap().to_string().contains("`samples` cannot be 11"));
}
