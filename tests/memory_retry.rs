//! OOM recovery through the library, fast enough to fail every single reservation: the same samples, the same
//! weights, and the larger plan again once memory returns.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trainer::events::event::EventRecord;
use trainer::events::{EventLog, Reporter, Sink};
use trainer::job::Job;
use trainer::memory::InjectedOom;
use trainer::memory::pressure::PressureMonitor;
use trainer::train::Failure;
use trainer::train::run::{self, RunOptions, RunOutcome};
use trainer::train::run_dir::{RequestedRun, RunDir};

use crate::harness::{events, named, newest_checkpoint, read_json, tensors};

/// Two updates of four samples, with dropout that a retry must not redraw and an EMA it must not update twice.
const MLP: &str = "
[model]
kind = 'mlp'
hidden = [6]
dropout = 0.2
[data]
kind = 'shapes'
train_samples = 12
valid_samples = 5
image_size = 16
workers = 1
[train]
batch_size = 4
steps = 2
ema = 0.9
[eval]
every_steps = 1
[log]
every_steps = 1
[memory]
ram = '64MiB'
";

/// Running statistics that a retry must restore.
const CNN: &str = "
[model]
kind = 'cnn'
norm_group = 2
stages = [{ channels = 4, norm = 'batch' }]
hidden = []
[data]
kind = 'shapes'
train_samples = 16
valid_samples = 4
image_size = 16
workers = 1
[train]
batch_size = 8
steps = 2
[log]
every_steps = 1
";

struct FinishedRun {
    folder: PathBuf,
    result: Result<RunOutcome, Failure>,
}

fn train(text: &str, sets: &[&str], folder: &Path, options: RunOptions) -> FinishedRun {
    train_observed(text, sets, folder, options, None)
}

/// `seen` receives every event as it happens.
fn train_observed(
    text: &str,
    sets: &[&str],
    folder: &Path,
    options: RunOptions,
    seen: Option<RecordCallback>,
) -> FinishedRun {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let job = Job::parse(text, "job.toml".as_ref(), &sets).unwrap_or_else(|e| panic!("{e}"));
    let requested = RequestedRun { run_dir: Some(folder.to_owned()), resume: Some(None) };
    // The allocator also counts what other tests hold at the same time: a budget that this cannot exhaust.
    let ram = 1 << 40;
    let report = |folder: &RunDir, _| {
        let reporter = Reporter::default().with_required(EventLog::open(&folder.events())?);
        Ok(match seen {
            Some(seen) => reporter.with_optional(CallbackSink(seen)),
            None => reporter,
        })
    };
    let result = run::fit(job, RunOptions { requested, ram, ..options }, report);
    FinishedRun { folder: folder.to_owned(), result }
}

type RecordCallback = Box<dyn FnMut(&EventRecord) + Send>;

struct CallbackSink(RecordCallback);

impl Sink for CallbackSink {
    fn name(&self) -> String {
        "seen".into()
    }
    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        (self.0)(record);
        Ok(())
    }
}

fn fail_requests(requests: &[u64]) -> RunOptions {
    RunOptions { injected_oom: Some(InjectedOom::At(requests.to_vec())), ..RunOptions::default() }
}

impl FinishedRun {
    #[track_caller]
    fn done(self) -> Self {
        assert!(
            matches!(self.result, Ok(RunOutcome::Done)),
            "{}: {:?}",
            self.folder.display(),
            self.result.err()
        );
        self
    }

    fn named(&self, name: &str) -> Vec<Value> {
        named(&events(&self.folder), name).into_iter().cloned().collect()
    }

    /// The micro-batch of every update.
    fn splits(&self) -> Vec<u64> {
        self.named("step").iter().map(|step| step["micro_batch"].as_u64().unwrap()).collect()
    }

    fn digest(&self) -> Value {
        self.named("finished")[0]["samples_digest"].clone()
    }

    fn weights(&self) -> BTreeMap<String, Vec<f32>> {
        let file = newest_checkpoint(&self.folder).join("model.safetensors");
        let tensors = candle_core::safetensors::load(file, &candle_core::Device::Cpu);
        let flat = |t: candle_core::Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        tensors.unwrap().into_iter().map(|(name, tensor)| (name, flat(tensor))).collect()
    }

    fn tensors(&self) -> Vec<(String, Vec<u8>)> {
        tensors(&self.folder)
    }
}

/// Sums in another order differ in the last bits. AdamW divides a first gradient by its own magnitude, so where a
/// gradient is nearly zero those bits can weigh as much as its learning rate of 1e-3 allows.
#[track_caller]
fn assert_near(a: &FinishedRun, b: &FinishedRun) {
    for ((name, a), (_, b)) in a.weights().iter().zip(&b.weights()) {
        let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far <= 2e-5, "{name} differs by {far}");
    }
}

/// Fails every reservation of a run in turn. The run ends with the same samples and the same weights: bitwise
/// identical if the updates were split alike, equal up to rounding otherwise.
fn fail_every_request(text: &str, whole: u64) {
    let home = tempfile::tempdir().unwrap();
    let with = |split: u64| {
        let sets =
            [format!("train.batch_size={split}"), format!("train.accumulation_steps={}", whole / split)];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        train(text, &sets, &home.path().join(format!("split-{split}")), RunOptions::default()).done()
    };
    let reference = with(whole);
    let halves = with(whole / 2);
    let mut phases: BTreeMap<String, u64> = BTreeMap::new();
    let (mut exact, mut request) = (0, 0);
    loop {
        request += 1;
        let run =
            train(text, &[], &home.path().join(format!("ask-{request}")), fail_requests(&[request])).done();
        let ooms = run.named("oom");
        let Some(oom) = ooms.first() else { break };
        assert_eq!(ooms.len(), 1, "ask {request}");
        *phases.entry(oom["phase"].as_str().unwrap().to_owned()).or_default() += 1;
        assert_eq!(run.digest(), reference.digest(), "ask {request}: the same samples");
        let splits = run.splits();
        let same = [&reference, &halves].into_iter().find(|r| r.splits() == splits);
        match same {
            Some(same) => {
                assert!(same.tensors() == run.tensors(), "ask {request}: the same to the bit as {splits:?}");
                exact += 1;
            }
            None => assert_near(&run, &reference),
        }
        fs::remove_dir_all(&run.folder).unwrap();
    }
    println!("{} asks failed in turn, {exact} ended the same to the bit: {phases:?}", request - 1);
    for phase in ["start", "forward", "backward", "update", "eval", "checkpoint"] {
        assert!(phases.contains_key(phase), "{phase} reserved nothing: {phases:?}");
    }
    assert!(exact > 0 && exact < request - 1);
}

#[test]
fn an_oom_at_any_reservation_ends_with_the_same_weights() {
    fail_every_request(MLP, 4);
}

#[test]
fn an_oom_at_any_reservation_leaves_running_statistics_unchanged() {
    fail_every_request(CNN, 8);
}

/// A long run that lost memory once: it returns to the plan's micro-batch after sixteen quiet updates.
const LONG: [&str; 3] = ["train.steps=40", "eval.every_steps=100", "checkpoint.every_steps=7"];

#[test]
fn memory_that_comes_back_is_used_again_also_after_a_resume() {
    let home = tempfile::tempdir().unwrap();
    let run = |name: &str, sets: &[&str], options: RunOptions| {
        train(MLP, &[&LONG, sets].concat(), &home.path().join(name), options).done()
    };
    let reference = run("reference", &[], RunOptions::default());
    let disturbed = run("disturbed", &[], fail_requests(&[40]));
    let (shrunk, grown) = (disturbed.named("shrunk"), disturbed.named("grown"));
    assert_eq!((shrunk.len(), grown.len()), (1, 1));
    let (down, up) = (shrunk[0]["step"].as_u64().unwrap(), grown[0]["step"].as_u64().unwrap());
    assert_eq!(up - down, 16);
    assert_eq!(grown[0]["micro_batch"], 4);
    let splits = disturbed.splits();
    let small = splits.iter().filter(|split| **split == 2).count();
    assert_eq!((small, splits.iter().filter(|split| **split == 4).count()), (16, 24));
    assert_eq!(disturbed.digest(), reference.digest());
    assert_near(&disturbed, &reference);
    // Stopped while shrunk, the run resumes as if it had not stopped: it grows at the same update, to the same bits.
    let stop = RunOptions { max_steps: Some(down + 7), ..fail_requests(&[40]) };
    run("resumed", &[], stop);
    let resumed = run("resumed", &[], RunOptions::default());
    assert_eq!(resumed.named("grown")[0]["step"], up);
    assert!(resumed.tensors() == disturbed.tensors(), "a resumed run equals the undisturbed one");
    assert_eq!(resumed.named("finished")[1]["samples_digest"], disturbed.digest());
}

#[test]
fn a_larger_plan_tried_in_vain_costs_an_update_and_longer_patience() {
    let home = tempfile::tempdir().unwrap();
    let reference = train(MLP, &LONG, &home.path().join("reference"), RunOptions::default()).done();
    // The update of a reservation rises with its index: search for one in the update after the growth.
    let (mut low, mut high, mut tries) = (40, 4000, 0);
    let found = loop {
        let middle = (low + high) / 2;
        let run =
            train(MLP, &LONG, &home.path().join(format!("{middle}")), fail_requests(&[40, middle])).done();
        let (grown, ooms) = (run.named("grown"), run.named("oom"));
        let up = grown.first().map_or(u64::MAX, |grown| grown["step"].as_u64().unwrap());
        let late = ooms.get(1).map_or(u64::MAX, |oom| oom["step"].as_u64().unwrap());
        tries += 1;
        assert!(tries < 20, "no ask falls into the update after the growth");
        match late.cmp(&up) {
            std::cmp::Ordering::Equal => break run,
            std::cmp::Ordering::Less => low = middle,
            std::cmp::Ordering::Greater => high = middle,
        }
    };
    let of = |name: &str| -> Vec<u64> {
        found.named(name).iter().map(|event| event["step"].as_u64().unwrap()).collect()
    };
    let up = of("grown")[0];
    assert_eq!(
        (of("grown"), of("shrunk")),
        (vec![up], vec![up - 16, up]),
        "the next try comes after 32 more"
    );
    assert_eq!(found.splits().iter().filter(|split| **split == 4).count() as u64, up - 16);
    assert_eq!(found.digest(), reference.digest());
    assert_near(&found, &reference);
}

#[test]
fn pressure_takes_what_is_read_ahead_then_micro_batches_and_lets_go() {
    let home = tempfile::tempdir().unwrap();
    let sets = ["train.steps=90", "eval.every_steps=100", "data.workers=2"];
    let reference = train(MLP, &sets, &home.path().join("reference"), RunOptions::default()).done();
    let file = home.path().join("reading");
    fs::write(&file, "1000 1000000").unwrap();
    let calm = file.clone();
    let seen = move |record: &EventRecord| {
        if matches!(record.event, trainer::events::event::Event::Step { step: 5, .. }) {
            fs::write(&calm, "900000 1000000000000").unwrap();
        }
    };
    let options = RunOptions { pressure_monitor: PressureMonitor::File(file), ..RunOptions::default() };
    // Calm is not enough: the larger plan needs memory.
    let run = train_observed(MLP, &sets, &home.path().join("tight"), options, Some(Box::new(seen))).done();
    assert_eq!(run.named("grown").len(), 0);
    let changes: Vec<String> =
        run.named("shrunk").iter().map(|event| event["change"].as_str().unwrap().to_owned()).collect();
    assert_eq!(
        changes[..3],
        [
            "read ahead one micro-batch",
            "micro-batch 2, 2 accumulation steps",
            "micro-batch 1, 4 accumulation steps"
        ]
    );
    assert_eq!(run.named("pressure").len(), changes.len(), "and no more when nothing is left to give");
    assert_eq!(run.digest(), reference.digest());
    assert_near(&run, &reference);

    let file = home.path().join("reading");
    fs::write(&file, "1000 1000000").unwrap();
    let free = file.clone();
    let seen = move |record: &EventRecord| {
        if matches!(record.event, trainer::events::event::Event::Step { step: 1, .. }) {
            fs::write(&free, "900000000000 1000000000000").unwrap();
        }
    };
    let options = RunOptions { pressure_monitor: PressureMonitor::File(file), ..RunOptions::default() };
    let run = train_observed(MLP, &sets, &home.path().join("free"), options, Some(Box::new(seen))).done();
    assert_eq!(run.named("shrunk").len(), 1);
    assert_eq!(run.named("grown")[0]["change"], "read ahead as planned");
    assert!(run.tensors() == reference.tensors(), "what is read ahead changes nothing");
}

#[test]
fn when_nothing_is_left_the_first_failure_and_all_attempts_are_reported() {
    let home = tempfile::tempdir().unwrap();
    // Every reservation after the persistent ones fails.
    let fault = Some(InjectedOom::At((10..2000).collect()));
    let run = train(
        MLP,
        &[],
        &home.path().join("run"),
        RunOptions { injected_oom: fault, ..RunOptions::default() },
    );
    let Err(Failure::OutOfMemory { first, tried }) = &run.result else { panic!("{:?}", run.result) };
    assert!(tried.len() > 1 && tried.last().unwrap().next_plan.is_none());
    assert!(tried[..tried.len() - 1].iter().all(|attempt| attempt.next_plan.is_some()));
    assert_eq!((&first.requester, first.bytes), (&tried[0].requester, tried[0].bytes));
    let post = read_json(&run.folder.join("oom.json"));
    assert_eq!(post["tried"].as_array().unwrap().len(), tried.len());
    assert_eq!(post["first"]["requester"], *first.requester);
    let live = post["live"].as_array().unwrap();
    assert!(live.iter().any(|held| held["role"] == "weights" && held["name"] == "master weights"), "{post}");
    let held: u64 = live.iter().map(|held| held["bytes"].as_u64().unwrap()).sum();
    assert_eq!(held + first.available, first.budget, "what is live is all that is held");
    let needs = post["would_fit"]["ram_bytes"].as_u64().unwrap();
    assert!(needs > 0 && needs < first.budget && post["budget_bytes"] == first.budget);
    assert_eq!(run.named("failed").len(), 1);
    // The job bounds the retries too.
    let fault = Some(InjectedOom::At((10..2000).collect()));
    let options = RunOptions { injected_oom: fault, ..RunOptions::default() };
    let run = train(MLP, &["memory.max_retries=1"], &home.path().join("once"), options);
    let Err(Failure::OutOfMemory { tried, .. }) = &run.result else { panic!("{:?}", run.result) };
    assert_eq!(tried.len(), 2);
}
