//! Measures how fast a csv file is read into samples: `cargo run --release --example rows -- FILE TARGET [first]`.
//!
//! Opens the file without standardising and with an empty cache, and reads all rows in batches of 256 on rayon's
//! threads; with `first`, only the first batch. Prints JSON: rows, seconds from the start of the process to the first
//! batch and to the last, and the sum of all inputs. `bench/tables.py` compares it with pandas.

use std::time::Instant;

use rayon::prelude::*;
use trainer::data::cache::Cache;
use trainer::data::split::SplitSettings;
use trainer::data::table::{self, DialectSettings, TableFileFormat, TableFiles, TableSettings, TableTask};
use trainer::data::{BatchRow, Dataset, DatasetContext, SampleKey, SliceMut};

const BATCH: u64 = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let begun = Instant::now();
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: rows FILE TARGET [first]";
    let (file, target) = (arguments.next().ok_or(usage)?, arguments.next().ok_or(usage)?);
    let first_only = arguments.next().as_deref() == Some("first");
    let cache = std::env::temp_dir().join(format!("rows-{}", std::process::id()));
    let files = TableFiles {
        train: vec![file.into()],
        valid: Vec::new(),
        test: Vec::new(),
        split: SplitSettings::random(1e-6),
    };
    let settings = TableSettings {
        target: vec![target],
        task: TableTask::Regression,
        standardise: false,
        ..TableSettings::default()
    };
    let ctx = DatasetContext { cache: Cache::at(&cache), ..DatasetContext::default() };
    let format = TableFileFormat::Csv(DialectSettings::default());
    let set = table::open(&files, format, &settings, &ctx)?.train;
    let rows = set.len();
    batch(&*set, 0)?;
    let first = begun.elapsed().as_secs_f64();
    let sum: f64 = if first_only {
        0.0
    } else {
        let batches = (0..rows.div_ceil(BATCH)).into_par_iter();
        batches.map(|i| batch(&*set, i * BATCH)).sum::<Result<f64, _>>()?
    };
    let all = begun.elapsed().as_secs_f64();
    println!("{{\"rows\": {rows}, \"first_s\": {first:.3}, \"all_s\": {all:.3}, \"sum\": {sum}}}");
    drop(std::fs::remove_dir_all(cache));
    Ok(())
}

/// The sum of the inputs of one batch.
fn batch(set: &dyn Dataset, start: u64) -> Result<f64, trainer::data::DataError> {
    let features = set.features();
    let rows = BATCH.min(set.len() - start);
    let mut inputs = vec![0f32; features.input_len() * rows as usize];
    let mut targets = vec![0f32; features.target_len() * rows as usize];
    let samples = inputs.chunks_mut(features.input_len()).zip(targets.chunks_mut(features.target_len()));
    for (index, (input, target)) in (start..).zip(samples) {
        let key = SampleKey { seed: 0, epoch: 0, sample: index };
        let mut row = BatchRow { input: SliceMut::F32(input), target: SliceMut::F32(target), length: 0 };
        set.read(index, key, &mut row)?;
    }
    Ok(inputs.iter().map(|x| f64::from(*x)).sum())
}
