//! Runs over sequential datasets: in bounded memory, unchanged by any interruption, and without bad records.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use trainer::base::random::RngKey;
use trainer::data::split::random_split;
use trainer::data::streaming::{
    BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset, StreamingDataset, cut_into_blocks,
};
use trainer::data::{BatchRow, DataError, Datasets, Features, InputSpec, SampleKey, TargetSpec};
use trainer::events::{EventLog, Reporter};
use trainer::job::Job;
use trainer::memory::measure;
use trainer::train::Failure;
use trainer::train::run::{self, RunOptions, RunOutcome};
use trainer::train::run_dir::{RequestedRun, RunDir};
use trainer::train::setup::Setup;

use crate::harness::{events, gzip, last, named, ran_in_own_process, tensors, trainer};

/// The allocator also counts what other tests hold at the same time: a budget that this cannot exhaust.
const AMPLE_RAM: u64 = 1 << 40;

/// Files of byte rows, each with its class in the first byte.
struct ByteRowShards {
    features: Features,
    files: Vec<PathBuf>,
    blocks: Vec<RecordBlock>,
    width: usize,
    /// Bad records.
    bad: Vec<u64>,
}

impl ByteRowShards {
    /// Writes `files` files of `rows` rows.
    fn new(folder: &Path, files: usize, rows: usize, width: usize, block: u64) -> Self {
        let names: Vec<PathBuf> = (0..files).map(|i| folder.join(format!("{i}.rows"))).collect();
        let mut row = vec![0; width];
        for (i, name) in names.iter().enumerate() {
            let mut out = BufWriter::new(File::create(name).unwrap());
            for r in 0..rows {
                let random = RngKey::new((i * rows + r) as u64, 0);
                row.chunks_mut(8).enumerate().for_each(|(i, some)| {
                    some.copy_from_slice(&random.bits(i as u64).to_le_bytes()[..some.len()]);
                });
                row[0] = (row[1] > 127) as u8;
                out.write_all(&row).unwrap();
            }
            out.flush().unwrap();
        }
        let blocks = (0..files as u32)
            .flat_map(|shard| cut_into_blocks(shard, vec![width as u64; rows], block))
            .collect();
        let names_of_classes = vec!["low".into(), "high".into()];
        let features = Features::new(
            InputSpec::Floats { shape: vec![width - 1] },
            TargetSpec::Class { names: names_of_classes },
        );
        Self { features, files: names, blocks, width, bad: Vec::new() }
    }
}

struct ByteRowReader(BufReader<File>, usize);

impl ShardReader for ByteRowReader {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let before = into.len();
        into.resize(before + self.1, 0);
        let read = self.0.read_exact(&mut into[before..]);
        if read.is_err() {
            into.truncate(before);
        }
        Ok(read.is_ok())
    }
}

impl ShardedDataset for ByteRowShards {
    fn features(&self) -> &Features {
        &self.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        let file = File::open(&self.files[shard as usize]).unwrap();
        Ok(Box::new(ByteRowReader(BufReader::new(file), self.width)))
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        _: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        if self.bad.contains(&index) {
            let (file, place) = (self.files[0].clone(), format!("record {index}"));
            return Err(DataError::Record { file, place, problem: "it is torn".into() });
        }
        let values = into.input.as_f32_mut().iter_mut().zip(&record[1..]);
        values.for_each(|(value, byte)| *value = f32::from(*byte) / 128.0 - 1.0);
        into.target.as_u32_mut()[0] = u32::from(record[0]);
        Ok(())
    }
}

/// A job requires `[data]`; only its loader keys matter here.
const JOB: &str = "
seed = 3
[model]
kind = 'mlp'
hidden = [8]
dropout = 0.1
[data]
kind = 'shapes'
workers = 2
shuffle_buffer = '2KiB'
[train]
batch_size = 8
accumulation_steps = 2
epochs = 3
[optimizer]
kind = 'adamw'
[checkpoint]
every_steps = 4
keep = 2
[log]
every_steps = 1
";

fn job(sets: &[&str]) -> Job {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    Job::parse(JOB, "job.toml".as_ref(), &sets).unwrap_or_else(|e| panic!("{e}"))
}

fn shuffle_buffer_bytes(job: &Job) -> u64 {
    job.data.loader.shuffle_buffer.resolve(trainer::base::units::Bytes(0)).0
}

/// Trains on nine tenths of the rows, in `folder`; resumes a run that is there.
fn train(
    rows: ByteRowShards,
    job: Job,
    folder: &Path,
    ram: u64,
    max_steps: Option<u64>,
) -> Result<RunOutcome, Failure> {
    let whole = Arc::new(StreamingDataset::new(Arc::new(rows), shuffle_buffer_bytes(&job)));
    let (train, valid) = random_split(whole, 0.1, job.seed)?;
    let setup = Setup::from_datasets(
        Datasets { train: Arc::new(train), valid: Arc::new(valid), test: None },
        job,
        ram,
    )?;
    let plan = setup.plan(ram);
    assert!(plan.peak.ram_bytes <= ram, "{plan:?}");
    let requested = RequestedRun { run_dir: Some(folder.to_owned()), resume: Some(None) };
    let report =
        |folder: &RunDir, _| Ok(Reporter::default().with_required(EventLog::open(&folder.events())?));
    run::run_plan(&setup, plan, RunOptions { requested, ram, max_steps, ..RunOptions::default() }, report)
}

/// How a run ended last.
fn finished(run: &Path) -> Value {
    last(&events(run), "finished").clone()
}

fn small_shards(folder: &Path) -> ByteRowShards {
    ByteRowShards::new(folder, 5, 40, 24, 200)
}

/// A run cut at any update, then resumed with other workers and another read-ahead, is bitwise identical to the
/// uninterrupted one.
#[test]
fn a_resumed_run_is_the_same() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    train(small_shards(home.path()), job(&[]), &path("whole"), AMPLE_RAM, None).unwrap();
    let whole = finished(&path("whole"));
    assert_eq!(whole["steps"], 36, "180 samples, 16 an update, 3 epochs");
    for cut in [1, 11, 12, 13, 29] {
        let name = path(&format!("cut-{cut}"));
        train(small_shards(home.path()), job(&["data.workers=1"]), &name, AMPLE_RAM, Some(cut)).unwrap();
        let other = job(&["data.workers=3", "data.prefetch=1KiB"]);
        train(small_shards(home.path()), other, &name, AMPLE_RAM, None).unwrap();
        let end = finished(&name);
        assert_eq!((&end["samples_digest"], &end["metrics"]), (&whole["samples_digest"], &whole["metrics"]));
        assert!(tensors(&name) == tensors(&path("whole")), "cut at {cut}");
    }
    let mut unlike = job(&["data.shuffle_buffer=1KiB"]);
    unlike.name = "unlike".into();
    train(small_shards(home.path()), unlike, &path("unlike"), AMPLE_RAM, None).unwrap();
    assert_ne!(finished(&path("unlike"))["samples_digest"], whole["samples_digest"]);
}

/// Bad records are skipped, reported once, counted once whatever happens, and do not shift the others. An update with
/// only bad records changes no weights.
#[test]
fn bad_records_are_left_out_and_counted_once() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    // In file order, one update has these and nothing else.
    let sets = ["data.shuffle=false", "data.on_bad_record=skip", "data.max_bad_records=30"];
    let bad = || ByteRowShards { bad: (16..42).collect(), ..small_shards(home.path()) };
    train(bad(), job(&sets), &path("whole"), AMPLE_RAM, None).unwrap();
    let whole = finished(&path("whole"));
    assert_eq!((&whole["bad_records"], &whole["steps"]), (&26.into(), &36.into()));
    assert!(whole["samples"].as_u64().unwrap() < 3 * 160, "{whole}");
    let events = events(&path("whole"));
    let steps = named(&events, "step");
    assert!(steps[1]["loss"].is_null(), "the second update has nothing to learn from: {}", steps[1]);
    assert_eq!(steps[1]["samples"], steps[0]["samples"]);
    let reported: Vec<String> = named(&events, "bad_records")
        .iter()
        .flat_map(|event| event["records"].as_array().unwrap().clone())
        .map(|text| text.as_str().unwrap().to_owned())
        .collect();
    assert_eq!(reported.len(), 5, "{reported:?}");
    assert!(reported[0].contains("0.rows`, record 1") && reported[0].ends_with("it is torn"), "{reported:?}");
    for cut in [1, 2, 14] {
        let name = path(&format!("cut-{cut}"));
        train(bad(), job(&sets), &name, AMPLE_RAM, Some(cut)).unwrap();
        train(bad(), job(&sets), &name, AMPLE_RAM, None).unwrap();
        let end = finished(&name);
        assert_eq!(end["bad_records"], 26);
        assert_eq!(end["samples_digest"], whole["samples_digest"]);
        assert!(tensors(&name) == tensors(&path("whole")), "cut at {cut}");
    }
    let few = job(&["data.on_bad_record=skip", "data.max_bad_records=7"]);
    let Err(Failure::Data(error)) = train(bad(), few, &path("few"), AMPLE_RAM, None) else {
        panic!("there are more than 7")
    };
    let text = error.to_string();
    assert!(text.contains("bad records, more than the limit of 7") && text.contains("it is torn"), "{text}");
    let fail = train(bad(), job(&[]), &path("fail"), AMPLE_RAM, None);
    assert!(matches!(&fail, Err(Failure::Data(error)) if error.is_bad_record()), "{:?}", fail.err());
}

const TABLE: &str = "
name = 'table'
[model]
kind = 'mlp'
hidden = [8]
[data]
kind = 'csv'
train = ['*.csv.gz']
target = ['class']
shuffle_buffer = '1KiB'
[train]
batch_size = 8
epochs = 3
[eval]
every_steps = 20
[checkpoint]
every_steps = 5
";

/// Two gzipped tables of 60 rows; row 7 of the second lacks a number where one is required.
fn tables(folder: &Path) {
    for (name, rows) in [("a", 0..60), ("b", 60..120)] {
        let mut text = "x,y,class\n".to_owned();
        for row in rows {
            let x = if row == 67 { "three".into() } else { (row * 37 % 101).to_string() };
            let class = if row * 37 % 101 > 50 { "high" } else { "low" };
            text += &format!("{x},{}.5,{class}\n", row * 13 % 17);
        }
        fs::write(folder.join(format!("{name}.csv.gz")), gzip(text.as_bytes())).unwrap();
    }
    fs::write(folder.join("job.toml"), TABLE).unwrap();
}

/// The same through the program, over compressed tables: a bad record ends the run with its location, or is skipped;
/// an interrupted run ends like an uninterrupted one.
#[test]
fn packed_tables_through_the_program() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path();
    tables(folder);
    let numbers = ["--set", "data.numeric=['x']"];
    let fit = |args: &[&str]| trainer(folder, &[&["fit", "job.toml"], &numbers[..], args].concat());
    let said = fit(&["--run-dir", "fail"]).expect(4).stderr;
    assert!(
        said.contains("b.csv.gz") && said.contains("`three`") && said.contains("on_bad_record"),
        "{said}"
    );
    let skip = ["--set", "data.on_bad_record=skip"];
    let said = fit(&[&["--run-dir", "whole"], &skip[..]].concat()).expect(0).stderr;
    assert!(said.contains("bad    step") && said.contains("bad      1 record skipped"), "{said}");
    for cut in ["1", "9", "14", "30"] {
        let run = format!("cut-{cut}");
        let first = ["--run-dir", &run, "--max-steps", cut, "--set", "data.workers=1"];
        fit(&[&first, &skip[..]].concat()).expect(0);
        fit(&[&["--run-dir", &run, "--resume", "--set", "data.workers=3"], &skip[..]].concat()).expect(0);
        let (run, whole) = (folder.join(run), folder.join("whole"));
        assert_eq!(finished(&run)["samples_digest"], finished(&whole)["samples_digest"]);
        assert_eq!(finished(&run)["bad_records"], 1);
        assert!(tensors(&run) == tensors(&whole), "cut at {cut}");
    }
    let check = [&["check", "job.toml", "--json"], &numbers[..], &skip[..]].concat();
    let seen = trainer(folder, &check).expect(0).json();
    assert_eq!(seen["data"]["first"].as_array().unwrap().len(), 3, "{seen}");
    assert!(["low", "high"].contains(&seen["data"]["first"][0]["target"].as_str().unwrap()), "{seen}");
}

/// Streams twenty times its memory budget, three times over: `TRAINER_FLAT_MIB` of memory, 12 by default.
#[cfg(target_os = "linux")]
#[test]
fn memory_stays_flat() {
    if ran_in_own_process(memory_stays_flat) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (folder, run) = (home.path(), home.path().join("run"));
    let mib: u64 = std::env::var("TRAINER_FLAT_MIB").map_or(12, |mib| mib.parse().unwrap());
    let (ram, width) = (mib << 20, 8192);
    let rows = ByteRowShards::new(folder, 8, (20 * ram) as usize / width / 8, width, BLOCK_BYTES / 8);
    let sets = [
        "data.shuffle_buffer=512KiB",
        "train.epochs=3",
        "log.every_steps=200",
        "checkpoint.every_steps=2000",
    ];
    train(rows, job(&sets), &run, ram, None).unwrap();
    let resident = measure::resident_peak();
    let finished = finished(&run);
    let bytes = |name: &str| finished[name]["ram"].as_u64().unwrap();
    let (measured, planned) = (bytes("measured_peak_bytes"), bytes("planned_peak_bytes"));
    let budget = bytes("budget_bytes");
    let data: u64 = (0..8).map(|i| fs::metadata(folder.join(format!("{i}.rows"))).unwrap().len()).sum();
    assert!(data >= 20 * budget - (1 << 20), "{data} of {budget}");
    assert!(measured <= planned && planned <= budget, "{measured} {planned} {budget}");
    // The program's code, its stacks and the allocator's free lists are outside the plan, and far smaller than the
    // data.
    assert!(resident > 0 && resident <= planned + planned / 10 + (40 << 20), "{resident} are resident");
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    println!(
        "{:.0} MiB of data: {:.1} measured, {:.1} planned, {:.1} allowed, {:.1} resident; {:.0} s",
        mib(data),
        mib(measured),
        mib(planned),
        mib(budget),
        mib(resident),
        finished["elapsed_s"].as_f64().unwrap()
    );
}
