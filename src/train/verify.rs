//! The second law, proved for a job at hand: a few updates are made as planned, then again in other ways, and
//! losses, gradients, weights and samples are compared.
//!
//! Every way goes through the run itself, in a folder that is removed afterwards. What the first one computed
//! waits in files there, so that a proof takes no more memory than the run. Refuses nothing that runs; gives a
//! [`Report`] whose `passed` decides.

mod compare;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use schemars::JsonSchema;
use serde::Serialize;

use super::Failure;
use super::folder::{Folder, Wish};
use super::run::{self, Ended, Observer, Options};
use super::setup::Setup;
use super::signals::Signals;
use crate::data::digest::Digest;
use crate::job::Rung;
use crate::memory::plan::{Plan, Split, Verdict};
use crate::memory::{Fault, search};
use crate::params::Store;
use crate::report::{Events, Reporter};
use compare::{Against, Kept};

/// How a job is to be proved.
pub struct Proof {
    /// Updates of every way, at least 2.
    pub updates: u64,
    /// Host bytes a run may use.
    pub ram: u64,
    /// Made for the runs, and removed.
    pub folder: PathBuf,
    pub signals: Signals,
}

/// The most that two ways may differ, relative to what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Tolerance {
    pub losses: f64,
    pub gradients: f64,
    pub weights: f64,
}

impl Tolerance {
    /// For the order of additions alone. A type of few digits rounds what is added in another order to other
    /// neighbours.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F64 => Self { losses: 1e-5, gradients: 1e-3, weights: 1e-3 },
            DType::F16 => Self { losses: 2e-3, gradients: 5e-2, weights: 1e-2 },
            _ => Self { losses: 1e-2, gradients: 2e-1, weights: 1e-2 },
        }
    }

    /// For ways that have to be equal to the bit.
    const NONE: Self = Self { losses: 0.0, gradients: 0.0, weights: 0.0 };
}

/// The largest difference of a kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Apart {
    /// Relative; 0 where every bit is equal.
    pub difference: f64,
    /// The update it was seen at, from 1; 0 where there was none.
    pub update: u64,
    /// The parameter it was seen in.
    pub parameter: Option<String>,
}

/// One way of running, held against the way that was planned.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Checked {
    pub name: String,
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    pub recompute: usize,
    /// Has to be equal to the bit: the split is the same.
    pub exact: bool,
    pub losses: Apart,
    pub gradients: Apart,
    pub weights: Apart,
    /// Of the samples of all updates, in order.
    pub samples_digest: String,
    pub passed: bool,
}

/// What `trainer verify --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Report {
    pub passed: bool,
    pub updates: u64,
    pub samples_per_update: usize,
    /// The way that was planned, which all others are held against.
    pub reference: Split,
    pub losses: Vec<f64>,
    pub samples_digest: String,
    pub tolerance: Tolerance,
    /// What limits the proof: said before it begins.
    pub notes: Vec<String>,
    pub ways: Vec<Checked>,
}

/// What a caller is told while it goes on.
pub enum Told<'a> {
    /// What limits the proof, and how many updates will be made in all.
    Begun {
        plan: &'a Plan,
        notes: &'a [String],
        updates: u64,
    },
    /// An update of a way was made.
    Updated {
        way: &'a str,
    },
    Checked(&'a Checked),
}

/// A way to run the job.
struct Way {
    name: String,
    split: Split,
    recompute: usize,
    exact: bool,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Plain,
    /// One thread reads the data, one batch at a time.
    OneReader,
    /// An ask for memory in the middle of the second update is refused.
    OutOfMemory,
    /// Stopped after half of the updates and gone on with.
    Resumed,
}

/// Hears how a proof goes on.
pub type Tell = Arc<dyn Fn(Told) + Send + Sync>;

/// Runs the proof. `None` where a signal stopped it.
pub fn verify(setup: Setup, proof: &Proof, tell: Tell) -> Result<Option<Report>, Failure> {
    prove(setup, proof, tell, &|_, watch| watch)
}

/// May put something of its own between a way, by name, and who watches it: how a test makes one go wrong.
type Spoil = dyn Fn(&str, Arc<dyn Observer>) -> Arc<dyn Observer>;

/// As [`verify`], with a way to spoil it.
fn prove(mut setup: Setup, proof: &Proof, tell: Tell, spoil: &Spoil) -> Result<Option<Report>, Failure> {
    let plan = setup.settle(proof.ram, None);
    if plan.verdict == Verdict::DoesNotFit {
        return Err(Failure::DoesNotFit(Box::new(plan)));
    }
    let (ways, notes) = ways(&plan, &setup);
    tell(Told::Begun { plan: &plan, notes: &notes, updates: proof.updates * (ways.len() as u64 + 1) });
    let _gone = Gone(&proof.folder);
    let kept = Arc::new(Kept::new(proof.folder.join("kept"))?);
    let reference = Way {
        name: "as planned".into(),
        split: Split {
            micro_batch: plan.chosen.micro_batch,
            accumulation_steps: plan.chosen.accumulation_steps,
        },
        recompute: plan.chosen.recompute,
        exact: true,
        how: How::Plain,
    };
    let telling = |inner: Arc<dyn Observer>, way: &Way| -> Arc<dyn Observer> {
        Arc::new(Telling { inner, way: way.name.clone(), tell: tell.clone() })
    };
    if !go(&mut setup, &plan, &reference, proof, None, telling(kept.clone(), &reference))? {
        return Ok(None);
    }
    let first = kept.done();
    let loose = Tolerance::of(setup.dtype);
    let mut checked = Vec::new();
    for way in ways {
        let against = Arc::new(Against::new(kept.clone(), loose));
        let fault = (way.how == How::OutOfMemory).then_some(first.middle_of_second);
        let watch = spoil(&way.name, telling(against.clone(), &way));
        if !go(&mut setup, &plan, &way, proof, fault, watch)? {
            return Ok(None);
        }
        let tolerance = if way.exact { Tolerance::NONE } else { loose };
        let one = against.judge(&way, tolerance, &first.digest);
        tell(Told::Checked(&one));
        checked.push(one);
    }
    Ok(Some(Report {
        passed: checked.iter().all(|way| way.passed),
        updates: proof.updates,
        samples_per_update: plan.samples_per_update,
        reference: reference.split,
        losses: first.losses,
        samples_digest: first.digest,
        tolerance: loose,
        notes,
        ways: checked,
    }))
}

/// The ways a job can be run beside the planned one, and what stands in the way of others.
fn ways(plan: &Plan, setup: &Setup) -> (Vec<Way>, Vec<String>) {
    let (samples, group) = (plan.samples_per_update, setup.network.group());
    let split =
        Split { micro_batch: plan.chosen.micro_batch, accumulation_steps: plan.chosen.accumulation_steps };
    let (recompute, blocks) = (plan.chosen.recompute, setup.network.blocks.len());
    let mut notes = Vec::new();
    let mut ways =
        vec![Way { name: "one reader".into(), split, recompute, exact: true, how: How::OneReader }];
    if group > 1 {
        notes.push(format!(
            "batch norm looks at {group} samples together, so a micro-batch is a multiple of {group}: with another \
             group it would be another experiment"
        ));
    }
    let mut splits: Vec<Split> = [2, 3, 8]
        .map(|times| search::split(samples, (split.accumulation_steps * times).min(samples), group))
        .into_iter()
        .filter(|one| one.micro_batch < split.micro_batch)
        .collect();
    splits.dedup();
    if splits.is_empty() {
        notes.push(format!("an update of {samples} samples cannot be split further"));
    }
    for split in &splits {
        let name = format!("{} x {}", split.micro_batch, split.accumulation_steps);
        ways.push(Way { name, split: *split, recompute, exact: false, how: How::Plain });
    }
    if recompute < blocks {
        let name = "recomputed".into();
        ways.push(Way { name, split, recompute: blocks, exact: true, how: How::Plain });
    }
    let can_shrink = setup.may(Rung::Shrink) && !splits.is_empty();
    match can_shrink || setup.may(Rung::Recompute) && recompute < blocks {
        true => {
            let name = "out of memory".into();
            ways.push(Way { name, split, recompute, exact: !can_shrink, how: How::OutOfMemory });
        }
        false => {
            notes.push("an out of memory would end the run: `memory.on_oom` leaves nothing to do".into())
        }
    }
    ways.push(Way { name: "resumed".into(), split, recompute, exact: true, how: How::Resumed });
    (ways, notes)
}

/// Runs one way; false where a signal stopped it.
fn go(
    setup: &mut Setup,
    plan: &Plan,
    way: &Way,
    proof: &Proof,
    fault: Option<u64>,
    watch: Arc<dyn Observer>,
) -> Result<bool, Failure> {
    let mut plan = plan.clone();
    (plan.chosen.micro_batch, plan.chosen.accumulation_steps) =
        (way.split.micro_batch, way.split.accumulation_steps);
    plan.chosen.recompute = way.recompute;
    let (workers, prefetch) = (setup.workers, setup.prefetch);
    if way.how == How::OneReader {
        (setup.workers, setup.prefetch) = (1, 1);
    }
    let dir = proof.folder.join("run");
    let half = (way.how == How::Resumed).then_some(proof.updates / 2);
    let mut whole = true;
    for until in half.into_iter().chain([proof.updates]) {
        let options = Options {
            wish: Wish { run_dir: Some(dir.clone()), resume: Some(None) },
            runs: proof.folder.clone(),
            stamp: String::new(),
            max_steps: Some(until),
            ram: proof.ram,
            fault: fault.map(|ask| Fault::At(vec![ask])),
            signals: proof.signals.clone(),
            observer: Some(watch.clone()),
            ..Options::default()
        };
        let report =
            |folder: &Folder, _: bool| Ok(Reporter::default().truth(Events::open(&folder.events())?));
        whole &= run::follow(setup, plan.clone(), options, report)? == Ended::Done;
    }
    (setup.workers, setup.prefetch) = (workers, prefetch);
    fs::remove_dir_all(&dir).map_err(Failure::io("remove", dir))?;
    Ok(whole)
}

/// Tells of every update, and passes on what is seen.
struct Telling {
    inner: Arc<dyn Observer>,
    way: String,
    tell: Tell,
}

impl Observer for Telling {
    fn gradients(&self, step: u64, loss: f64, store: &Store, factor: f64, asks: u64) -> Result<(), Failure> {
        self.inner.gradients(step, loss, store, factor, asks)
    }

    fn updated(&self, step: u64, store: &Store, digest: Digest) -> Result<(), Failure> {
        self.inner.updated(step, store, digest)?;
        (self.tell)(Told::Updated { way: &self.way });
        Ok(())
    }
}

/// Removes the folder of the proof, and the one it lies in where nothing else does.
struct Gone<'a>(&'a Path);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        // What cannot be removed is left to the user: the proof itself is done.
        let _ = fs::remove_dir_all(self.0);
        let _ = self.0.parent().map(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::kernels::cpu;

    const JOB: &str = "
        [model]
        kind = 'cnn'
        stages = [{ channels = 4 }]
        hidden = [8]
        dropout = 0.2
        [data]
        kind = 'shapes'
        train_samples = 48
        valid_samples = 8
        image_size = 16
        [train]
        batch_size = 12
        epochs = 2
    ";

    fn prove_with(spoil: &Spoil) -> Report {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        fs::write(&path, JOB).unwrap();
        let ram = 1 << 30;
        let setup = Setup::new(Job::load(&path, &[]).unwrap(), ram).unwrap();
        let folder = folder.path().join("proof");
        let proof = Proof { updates: 3, ram, folder: folder.clone(), signals: Signals::default() };
        let report = prove(setup, &proof, Arc::new(|_: Told| {}), spoil).unwrap().unwrap();
        assert!(!folder.exists(), "the folder is removed");
        report
    }

    #[test]
    fn a_job_that_keeps_the_law_passes_in_every_way() {
        let report = prove_with(&|_, watch| watch);
        assert!(report.passed, "{report:#?}");
        let names: Vec<&str> = report.ways.iter().map(|way| way.name.as_str()).collect();
        assert_eq!(
            names,
            ["one reader", "6 x 2", "4 x 3", "2 x 6", "recomputed", "out of memory", "resumed"]
        );
        assert_eq!(report.losses.len(), 3);
        assert!(report.ways.iter().all(|way| way.samples_digest == report.samples_digest));
        let splits = report.ways.iter().filter(|way| !way.exact);
        assert!(
            splits.clone().all(|way| way.gradients.difference > 0.0),
            "another order of additions is seen"
        );
        assert_eq!(splits.count(), 4);
    }

    /// Adds to one weight after the second update of the way it watches.
    struct Nudge(Arc<dyn Observer>);

    impl Observer for Nudge {
        fn gradients(
            &self,
            step: u64,
            loss: f64,
            store: &Store,
            factor: f64,
            asks: u64,
        ) -> Result<(), Failure> {
            self.0.gradients(step, loss, store, factor, asks)
        }

        fn updated(&self, step: u64, store: &Store, digest: Digest) -> Result<(), Failure> {
            let bias = store.layout.params.iter().find(|(spec, _)| spec.name.ends_with("bias")).unwrap().1;
            if step == 2 {
                cpu::update::<f32, _>(&store.master, |all| all[bias.start] += 0.05)?;
            }
            self.0.updated(step, store, digest)
        }
    }

    #[test]
    fn a_way_that_goes_wrong_fails_alone_and_the_parameter_is_named() {
        for wrong in ["4 x 3", "recomputed", "resumed"] {
            let report =
                prove_with(&move |name, watch| if name == wrong { Arc::new(Nudge(watch)) } else { watch });
            assert!(!report.passed);
            for way in &report.ways {
                assert_eq!(way.passed, way.name != wrong, "{way:#?}");
            }
            let way = report.ways.iter().find(|way| way.name == wrong).unwrap();
            assert!(way.weights.difference > 1e-3 && way.weights.update == 2, "{way:#?}");
            let named = way.weights.parameter.as_deref().unwrap();
            assert!(named.ends_with("bias"), "{named}");
        }
    }
}
