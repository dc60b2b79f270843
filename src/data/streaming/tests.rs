//! Compares streaming datasets with a plain list of their records, in any access order and under every disturbance.

use std::io::{Cursor, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;

use flate2::read::GzDecoder;
use proptest::prelude::*;

use super::*;
use crate::base::random::RngKey;
use crate::loader::{Loader, LoaderOptions};
use crate::order::{self, Order};
use crate::split::random_split;
use crate::{BatchValues, Dataset, HostBatch, InputSpec, TargetSpec};

/// Shards in memory, compressed or not: a record is one length byte, then that many bytes that encode its index.
pub struct ToyShards {
    features: Features,
    blocks: Vec<RecordBlock>,
    shards: Vec<Vec<u8>>,
    packed: bool,
    /// Shards opened, in order, and records read or skipped.
    opens: std::sync::Mutex<Vec<u32>>,
    records: Arc<AtomicU64>,
    /// Records that fail to be read, and records that fail to decode.
    bad: (Vec<u64>, Vec<u64>),
    /// Called before a shard is opened.
    on_open: Box<dyn Fn(u32) + Send + Sync>,
}

/// Shards of the given record counts, cut into blocks of at most `most` bytes.
pub fn toy_shards(records: &[u64], most: u64, packed: bool) -> ToyShards {
    let (mut blocks, mut shards, mut index) = (Vec::new(), Vec::new(), 0u64);
    for (shard, records) in records.iter().enumerate() {
        let (mut bytes, mut sizes) = (Vec::new(), Vec::new());
        for _ in 0..*records {
            let size = 8 + RngKey::new(index, 1).below(0, 20) as usize;
            bytes.push(size as u8);
            bytes.extend(index.to_le_bytes());
            bytes.resize(bytes.len() + size - 8, index as u8);
            sizes.push(size as u64);
            index += 1;
        }
        blocks.extend(cut_into_blocks(shard as u32, sizes, most));
        if packed {
            let mut pack = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            pack.write_all(&bytes).unwrap();
            bytes = pack.finish().unwrap();
        }
        shards.push(bytes);
    }
    let features = Features::new(InputSpec::Floats { shape: vec![2] }, TargetSpec::Values { len: 1 });
    let (opens, records, bad) = Default::default();
    ToyShards { features, blocks, shards, packed, opens, records, bad, on_open: Box::new(|_| ()) }
}

struct ToyShardReader {
    bytes: Box<dyn Read + Send>,
    records: Arc<AtomicU64>,
    bad: Vec<u64>,
}

impl ShardReader for ToyShardReader {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let mut size = [0];
        if self.bytes.read(&mut size).unwrap() == 0 {
            return Ok(false);
        }
        self.records.fetch_add(1, Ordering::Relaxed);
        let before = into.len();
        into.resize(before + size[0] as usize, 0);
        self.bytes.read_exact(&mut into[before..]).unwrap();
        match self.bad.contains(&index_of(&into[before..])) {
            true => Err(bad_record(index_of(&into[before..]))),
            false => Ok(true),
        }
    }
}

fn index_of(record: &[u8]) -> u64 {
    u64::from_le_bytes(record[..8].try_into().unwrap())
}

fn bad_record(index: u64) -> DataError {
    DataError::Record { file: "toy".into(), place: format!("record {index}"), problem: "is bad".into() }
}

impl ShardedDataset for ToyShards {
    fn features(&self) -> &Features {
        &self.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        (self.on_open)(shard);
        self.opens.lock().unwrap().push(shard);
        let bytes = Cursor::new(self.shards[shard as usize].clone());
        let bytes: Box<dyn Read + Send> =
            if self.packed { Box::new(GzDecoder::new(bytes)) } else { Box::new(bytes) };
        Ok(Box::new(ToyShardReader { bytes, records: self.records.clone(), bad: self.bad.0.clone() }))
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        key: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        assert_eq!(index_of(record), index);
        assert!(record[8..].iter().all(|byte| *byte == index as u8));
        if self.bad.1.contains(&index) {
            return Err(bad_record(index));
        }
        let random = RngKey::new(key.seed, key.epoch).fold_in(key.sample);
        into.input.as_f32_mut().copy_from_slice(&[index as f32, random.f32(0)]);
        into.target.as_f32_mut().fill(record.len() as f32);
        Ok(())
    }
}

fn read(source: &dyn Dataset, index: u64) -> Result<Vec<f32>, DataError> {
    match HostBatch::single(source, index, SampleKey { seed: 3, epoch: 0, sample: index })?.inputs {
        BatchValues::F32(values) => Ok(values),
        BatchValues::U8(..) | BatchValues::U32(_) => panic!("the toy gives floats"),
    }
}

/// Ids and inputs of everything from `from` on.
fn load(
    source: Arc<dyn Dataset>,
    order: &Order,
    from: order::Cursor,
    until: u64,
    (micro_batch, limit, workers): (usize, u64, usize),
) -> Vec<(u64, Vec<f32>)> {
    let reading = LoaderOptions { micro_batch, max_bytes: limit, workers, skip_bad: false };
    let mut loader = Loader::start(source, order.clone(), from, until, reading).unwrap();
    let mut all = Vec::new();
    while let Some(batch) = loader.next().unwrap() {
        let BatchValues::F32(inputs) = &batch.inputs else { panic!("the toy gives floats") };
        all.extend(batch.ids.iter().copied().zip(inputs.chunks(2).map(<[f32]>::to_vec)));
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any access order, from several threads at once, returns every record intact.
    #[test]
    fn any_access_is_right(
        records in prop::collection::vec(1u64..40, 1..5), most in 1u64..200, buffer in 0u64..600, packed: bool,
        seed: u64, threads in 1u64..4, expecting: bool,
    ) {
        let source = StreamingDataset::new(Arc::new(toy_shards(&records, most, packed)), buffer);
        let (blocks, samples) = (source.blocks().unwrap().len() as u64, source.len());
        thread::scope(|scope| {
            for t in 0..threads {
                let source = &source;
                scope.spawn(move || {
                    let random = RngKey::new(seed, t);
                    for i in 0..60 {
                        if expecting && random.below(3 * i, 8) == 0 {
                            let start = random.below(3 * i + 1, blocks) as u32;
                            source.prefetch((start..blocks as u32).take(4).collect());
                        }
                        let index = random.below(3 * i + 2, samples);
                        assert_eq!(read(source, index).unwrap()[0], index as f32);
                        let (held, most) = source.held_bytes();
                        assert!(held <= most, "{held} > {most}");
                    }
                });
            }
        });
    }

    /// Workers, prefetching, micro-batches, compression and interruptions do not change what is delivered; each epoch
    /// has each sample once; a subset behaves like a dataset of its own.
    #[test]
    fn nothing_changes_what_is_delivered(
        records in prop::collection::vec(1u64..40, 1..6), most in 1u64..200, buffer in 0u64..600, seed: u64,
        shuffle: bool, per_update in 1u64..30, loaders in prop::collection::vec((1usize..20, 0u64..2000, 1usize..5), 2),
        cut in 0.0..1.0f64, parted in prop::option::of(0.1..0.9f64),
    ) {
        let open = |packed| -> Option<Vec<Arc<dyn Dataset>>> {
            let shards = Arc::new(toy_shards(&records, most, packed));
                let whole: Arc<dyn Dataset> = Arc::new(StreamingDataset::new(shards, buffer));
            Some(match parted {
                Some(_) if whole.len() < 2 => return None,
                Some(fraction) => {
                    let (train, valid) = random_split(whole, fraction, seed).unwrap();
                    vec![Arc::new(train), Arc::new(valid)]
                }
                None => vec![whole],
            })
        };
        let (Some(plain), Some(packed)) = (open(false), open(true)) else { return Ok(()) };
        for (plain, packed) in plain.into_iter().zip(packed) {
            let samples = plain.len();
            let order = Order::for_dataset(plain.as_ref(), per_update, seed, shuffle, buffer).unwrap();
            let until = 2 * order.updates_per_epoch();
            let whole = load(plain.clone(), &order, Default::default(), until, loaders[0]);
            let cut = (cut * until as f64) as u64;
            let before = load(packed.clone(), &order, Default::default(), cut, loaders[1]);
            let from = order::Cursor { update: cut, done: 0 };
            let reopened = Order::for_dataset(packed.as_ref(), per_update, seed, shuffle, buffer).unwrap();
            let after = load(packed.clone(), &reopened, from, until, loaders[0]);
            prop_assert_eq!(&[before, after].concat(), &whole);
            for epoch in whole.chunks(samples as usize) {
                let mut ids: Vec<u64> = epoch.iter().map(|(id, _)| *id).collect();
                ids.sort_unstable();
                prop_assert!(ids.into_iter().eq(0..samples));
            }
        }
    }

    /// A resumed run reads only the shards of the current and the next window, and reads no shard twice.
    #[test]
    fn resuming_reads_only_what_is_needed(
        records in prop::collection::vec(1u64..40, 1..8), most in 1u64..200, buffer in 0u64..600, packed: bool,
        seed: u64, shuffle: bool, cut in 0.0..1.0f64, workers in 1usize..4,
    ) {
        let shards = Arc::new(toy_shards(&records, most, packed));
        let source: Arc<dyn Dataset> = Arc::new(StreamingDataset::new(shards.clone(), buffer));
        let order = Order::for_dataset(source.as_ref(), 1, seed, shuffle, buffer).unwrap();
        let samples = source.len();
        let cut = (cut * samples as f64) as u64;
        let ids: Vec<u64> = order.ids(0, 0..samples).collect();
        let from = order::Cursor { update: cut, done: 0 };
        let got = load(source.clone(), &order, from, samples, (1, 100, workers));
        prop_assert!(got.iter().map(|(id, _)| *id).eq(ids[cut as usize..].iter().copied()));
        let (first, _) = order.window_ranges(0, cut..samples).remove(0);
        let mut needed: Vec<u32> = Vec::new();
        let mut window = first;
        while window.epoch == 0 {
            needed.extend(order.prefetch_blocks(window).iter().map(|b| shards.blocks[*b as usize].shard));
            window = order.next_window(window);
        }
        drop(source);
        // The window after the last of an epoch is the first of the next one: its shards may be opened ahead, once
        // more.
        let next: Vec<u32> = order.prefetch_blocks(window).iter().map(|b| shards.blocks[*b as usize].shard).collect();
        let opens = shards.opens.lock().unwrap().clone();
        prop_assert!(
            opens.iter().all(|shard| needed.contains(shard) || next.contains(shard)), "{:?} of {:?}", opens, needed
        );
        let read: u64 = opens.iter().map(|shard| records[*shard as usize]).sum();
        prop_assert!(shards.records.load(Ordering::Relaxed) <= read);
        for shard in 0..records.len() as u32 {
            let times = opens.iter().filter(|open| **open == shard).count();
            prop_assert!(times <= 1 + usize::from(next.contains(&shard)), "{:?}", opens);
        }
    }
}

#[test]
fn held_bytes_are_bounded_and_reported() {
    let shards = Arc::new(toy_shards(&[100, 100], 64, false));
    let limit = |buffer| StreamingDataset::new(shards.clone(), buffer).held_bytes().1;
    let all: u64 = shards.blocks.iter().map(RecordBlock::held_bytes).sum();
    let largest = shards.blocks.iter().map(RecordBlock::held_bytes).max().unwrap();
    assert_eq!((limit(0), limit(1000), limit(1 << 40)), (2 * largest, 2000, all));
    let tables = 32 * (shards.blocks.len() as u64 + 1);
    let source = StreamingDataset::new(shards, 1000);
    assert_eq!(source.resident_bytes(), 2000 + largest + tables);
    // Reads twenty times the capacity of the cache.
    for index in 0..source.len() {
        read(&source, index).unwrap();
    }
    assert!(source.held_bytes().0 <= 2000);
}

#[test]
fn a_bad_record_is_its_own_error_and_no_other() {
    let mut shards = toy_shards(&[30], 100, false);
    shards.bad = (vec![3, 4, 29], vec![7]);
    let source = StreamingDataset::new(Arc::new(shards), 1000);
    for index in 0..30 {
        match read(&source, index) {
            Ok(_) => assert!(![3, 4, 7, 29].contains(&index)),
            Err(error) => {
                assert!(
                    error.is_bad_record() && error.to_string().contains(&format!("record {index}:")),
                    "{error}"
                );
            }
        }
    }
}

/// A shard that lost records after it was indexed, or whose records grew.
#[test]
fn a_shard_that_changed_is_reported() {
    let mut shards = toy_shards(&[10, 10], 60, false);
    // Cut at a record boundary, so that the toy reader itself does not fail.
    let (mut at, mut end) = (0, 0);
    while at < 40 {
        end = at;
        at += 1 + shards.shards[1][at] as usize;
    }
    shards.shards[1].truncate(end);
    let source = StreamingDataset::new(Arc::new(shards), 100);
    assert!(read(&source, 9).is_ok());
    let error = read(&source, 19).unwrap_err();
    assert!(matches!(&error, DataError::ChangedSinceOpen { what, .. } if what == "shard 1"), "{error}");
    assert!(!error.is_bad_record() && error.hint().is_some());
    let mut shards = toy_shards(&[10], 60, false);
    shards.blocks[0].bytes -= 1;
    let error = read(&StreamingDataset::new(Arc::new(shards), 100), 0).unwrap_err();
    assert!(error.to_string().contains("record 2 is missing or longer than before"), "{error}");
}

#[test]
fn a_reader_that_panics_ends_nobody_else() {
    let mut shards = toy_shards(&[20, 20], 60, false);
    shards.on_open = Box::new(|shard| assert!(shard != 1, "shard 1 is broken"));
    let source: Arc<dyn Dataset> = Arc::new(StreamingDataset::new(Arc::new(shards), 100));
    let order = Order::for_dataset(source.as_ref(), 5, 1, false, 100).unwrap();
    let reading = LoaderOptions { micro_batch: 5, max_bytes: 1000, workers: 3, skip_bad: false };
    let mut loader = Loader::start(source.clone(), order, Default::default(), 8, reading).unwrap();
    for _ in 0..4 {
        assert_eq!(loader.next().unwrap().unwrap().ids.len(), 5);
    }
    assert!(loader.next().err().unwrap().to_string().contains("shard 1 is broken"));
    drop(loader);
    assert!(read(source.as_ref(), 3).is_ok());
}

/// The window moves on while a thread that needs a later block reads an earlier one: no shard is left half read.
#[test]
fn a_moving_window_keeps_the_shards_in_order() {
    let reader: Arc<OnceLock<Weak<StreamingDataset>>> = Arc::default();
    let (opened_by, mut shards) = (reader.clone(), toy_shards(&[4, 4], 1, false));
    shards.on_open = Box::new(move |shard| {
        assert!(thread::current().name() != Some("data-ahead"), "only the test reads");
        if shard == 0 {
            opened_by.get().and_then(Weak::upgrade).unwrap().prefetch((1..8).collect());
        }
    });
    let shards = Arc::new(shards);
    let source = Arc::new(StreamingDataset::new(shards.clone(), 1000));
    reader.set(Arc::downgrade(&source)).unwrap();
    source.prefetch((0..8).collect());
    for index in [6, 2] {
        assert_eq!(read(source.as_ref(), index).unwrap()[0], index as f32);
    }
    assert_eq!(*shards.opens.lock().unwrap(), [0, 1]);
}
