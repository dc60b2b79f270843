//! `trainer verify`: checks the second law (memory changes how a job runs, never its result) on a given job. Runs a
//! few updates as planned, then again under other run variants, and compares losses, gradients, weights and samples.
//! The last variant computes with candle's own operations and autograd instead of our kernels.
//!
//! Every variant goes through the real training loop, in a folder that is removed afterwards. The reference values
//! stay in files there, so verification takes no more memory than the run. Accepts every job that runs; returns a
//! [`VerifyReport`] whose `passed` is the verdict.

mod compare;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use schemars::JsonSchema;
use serde::Serialize;

use super::Failure;
use super::run::{self, Observer, RunOptions, RunOutcome};
use super::run_dir::{RequestedRun, RunDir};
use super::setup::Setup;
use super::signals::Signals;
use crate::base::units::{Bytes, counted};
use crate::data::digest::Digest;
use crate::events::{EventLog, Reporter};
use crate::job::OomAction;
use crate::memory::InjectedOom;
use crate::param_store::ParamStore;
use crate::planner::execution_plan::{BatchSplit, ExecutionPlan};
use crate::planner::plan::{MemoryPlan, PlanVerdict};
use crate::planner::search;
use compare::{ComparisonObserver, ReferenceRecorder};

/// How to verify a job.
pub struct VerifyOptions {
    /// Updates per variant, at least 2.
    pub updates: u64,
    /// Host memory budget of each run, in bytes.
    pub ram: u64,
    /// Folder for the runs; created and removed.
    pub folder: PathBuf,
    pub signals: Signals,
}

/// The largest allowed relative differences between two execution plans.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Tolerance {
    pub losses: f64,
    pub gradients: f64,
    pub weights: f64,
}

impl Tolerance {
    /// Tolerance for a different order of additions. In a narrow dtype, sums in another order round to other
    /// neighbours.
    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::F64 => Self { losses: 1e-5, gradients: 1e-3, weights: 1e-3 },
            DType::F16 => Self { losses: 2e-3, gradients: 5e-2, weights: 1e-2 },
            _ => Self { losses: 1e-2, gradients: 2e-1, weights: 1e-2 },
        }
    }

    /// The looser of two, for each kind of value.
    fn or_looser(self, other: Self) -> Self {
        Self {
            losses: self.losses.max(other.losses),
            gradients: self.gradients.max(other.gradients),
            weights: self.weights.max(other.weights),
        }
    }

    /// Tolerance for other kernels in a job whose first update is moved this far by a change of the weights.
    fn of_sensitivity(moved: &VariantResult) -> Self {
        let times = |max: &MaxDifference| (SENSITIVITY_FACTOR * max.difference).min(MAX_TOLERANCE);
        Self {
            losses: times(&moved.losses),
            gradients: times(&moved.gradients),
            weights: times(&moved.weights),
        }
    }

    /// For variants that must be bitwise identical.
    const NONE: Self = Self { losses: 0.0, gradients: 0.0, weights: 0.0 };
}

/// Other kernels round every sum of a pass differently, which is about as much as a change of the weights by
/// [`compare::WEIGHT_CHANGE`]. They may differ by this many times the effect of that change on the first update.
const SENSITIVITY_FACTOR: f64 = 4.0;

/// Upper bound on that tolerance, however sensitive a job is: a missing gradient differs by 1, one of the wrong sign by
/// 2.
const MAX_TOLERANCE: f64 = 0.5;

/// The largest difference of one kind of value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct MaxDifference {
    /// Relative; 0 where every bit is equal.
    pub difference: f64,
    /// The update it was seen at, from 1; 0 where there was none.
    pub update: u64,
    /// The parameter it was seen in.
    pub parameter: Option<String>,
}

/// One variant of the run, compared with the planned run.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct VariantResult {
    pub name: String,
    pub micro_batch: usize,
    pub accumulation_steps: usize,
    pub recompute: usize,
    /// Must be bitwise equal, since the split is the same.
    pub exact: bool,
    pub losses: MaxDifference,
    pub gradients: MaxDifference,
    pub weights: MaxDifference,
    /// The most that each may be.
    pub tolerance: Tolerance,
    /// Of the samples of all updates, in order.
    pub samples_digest: String,
    pub passed: bool,
}

/// What `trainer verify --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct VerifyReport {
    pub passed: bool,
    pub updates: u64,
    pub samples_per_update: usize,
    /// The split of the planned run, with which all variants are compared.
    pub reference: BatchSplit,
    pub losses: Vec<f64>,
    pub samples_digest: String,
    pub tolerance: Tolerance,
    /// What the comparison cannot cover; stated before it begins.
    pub notes: Vec<String>,
    pub variants: Vec<VariantResult>,
}

/// Progress reported to the caller.
pub enum VerifyEvent<'a> {
    /// What limits the verification, and the total number of updates.
    Started {
        plan: &'a MemoryPlan,
        notes: &'a [String],
        updates: u64,
    },
    /// A variant made an update.
    Updated {
        variant: &'a str,
    },
    VariantDone(&'a VariantResult),
}

/// One variant of the run: how it executes, and how it is disturbed.
struct RunVariant {
    name: String,
    plan: ExecutionPlan,
    exact: bool,
    kind: VariantKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum VariantKind {
    Plain,
    /// One reader thread, one batch at a time.
    SingleReader,
    /// A reservation in the middle of the second update fails.
    OutOfMemory,
    /// Stopped after half of the updates, then resumed.
    Resumed,
    /// On the reference backend.
    Candle,
    /// The first update, from weights that were changed a little.
    Perturbed,
}

impl VariantKind {
    /// Whether values are computed differently, so that the runs drift apart with every update: only the first is
    /// compared.
    fn diverges(self) -> bool {
        matches!(self, Self::Candle | Self::Perturbed)
    }
}

/// Receives the progress of a verification.
pub type VerifyCallback = Arc<dyn Fn(VerifyEvent) + Send + Sync>;

/// Verifies a job. `None` if a signal stopped it.
pub fn verify(
    setup: Setup,
    settings: &VerifyOptions,
    callback: VerifyCallback,
) -> Result<Option<VerifyReport>, Failure> {
    verify_with(setup, settings, callback, &|_, watch| watch)
}

/// Wraps the observer of a variant, by name: lets a test make that variant go wrong.
type WrapObserver = dyn Fn(&str, Arc<dyn Observer>) -> Arc<dyn Observer>;

/// As [`verify`], with wrapped observers.
fn verify_with(
    mut setup: Setup,
    settings: &VerifyOptions,
    callback: VerifyCallback,
    wrap: &WrapObserver,
) -> Result<Option<VerifyReport>, Failure> {
    let plan = setup.plan(settings.ram);
    if plan.verdict == PlanVerdict::DoesNotFit {
        return Err(Failure::DoesNotFit(Box::new(plan)));
    }
    let (mut variants, mut notes) = variants(&plan, &setup);
    let has_candle = match candle_variant(&plan, &mut setup, settings.ram) {
        Ok(variant) => {
            variants.push(variant);
            true
        }
        Err(note) => {
            notes.push(note);
            false
        }
    };
    callback(VerifyEvent::Started {
        plan: &plan,
        notes: &notes,
        // The candle variant comes with a perturbed one.
        updates: settings.updates * (variants.len() as u64 + 1) + u64::from(has_candle),
    });
    let _cleanup = RemoveDirOnDrop(&settings.folder);
    let recorder = Arc::new(ReferenceRecorder::new(settings.folder.join("kept"))?);
    let reference =
        RunVariant { name: "as planned".into(), plan: plan.chosen, exact: true, kind: VariantKind::Plain };
    let reporting = |inner: Arc<dyn Observer>, variant: &RunVariant| -> Arc<dyn Observer> {
        Arc::new(ReportingObserver { inner, variant: variant.name.clone(), callback: callback.clone() })
    };
    if !run_variant(&mut setup, &plan, &reference, settings, None, reporting(recorder.clone(), &reference))? {
        return Ok(None);
    }
    let summary = recorder.summary();
    let loose = tolerance(&setup, settings.updates);
    let mut of_candle = loose;
    if has_candle {
        let perturbed = RunVariant {
            name: "perturbed".into(),
            plan: plan.chosen,
            exact: false,
            kind: VariantKind::Perturbed,
        };
        let comparison = Arc::new(ComparisonObserver::new(recorder.clone(), loose, perturbed.kind));
        let observer = reporting(comparison.clone(), &perturbed);
        if !run_variant(&mut setup, &plan, &perturbed, settings, None, observer)? {
            return Ok(None);
        }
        let moved = comparison.result(&perturbed, loose, &summary.digest);
        of_candle = loose.or_looser(Tolerance::of_sensitivity(&moved));
    }
    let mut results = Vec::new();
    for variant in variants {
        let comparison = Arc::new(ComparisonObserver::new(recorder.clone(), loose, variant.kind));
        let fault = (variant.kind == VariantKind::OutOfMemory).then_some(summary.request_in_second_update);
        let observer = wrap(&variant.name, reporting(comparison.clone(), &variant));
        if !run_variant(&mut setup, &plan, &variant, settings, fault, observer)? {
            return Ok(None);
        }
        let tolerance = match variant.kind {
            _ if variant.exact => Tolerance::NONE,
            VariantKind::Candle => of_candle,
            _ => loose,
        };
        let result = comparison.result(&variant, tolerance, &summary.digest);
        callback(VerifyEvent::VariantDone(&result));
        results.push(result);
    }
    Ok(Some(VerifyReport {
        passed: results.iter().all(|variant| variant.passed),
        updates: settings.updates,
        samples_per_update: plan.samples_per_update,
        reference: reference.plan.split(),
        losses: summary.losses,
        samples_digest: summary.digest,
        tolerance: loose,
        notes,
        variants: results,
    }))
}

/// The tolerance for this many updates: that of the narrowest type that the model, its teacher or their rounding has.
fn tolerance(setup: &Setup, updates: u64) -> Tolerance {
    let teacher = setup.network.teacher.as_ref().map(|teacher| teacher.dtype);
    // A value that rounds to another neighbour differs by a step of 8 bits, about as much as in bf16.
    let rounds = setup.job.quantize.as_ref().is_some_and(|config| config.rounds_after(updates));
    let narrower = teacher.into_iter().chain(rounds.then_some(DType::BF16)).map(Tolerance::of);
    narrower.fold(Tolerance::of(setup.dtype), Tolerance::or_looser)
}

/// The variants to compare with the planned run, and notes on those that are impossible.
fn variants(plan: &MemoryPlan, setup: &Setup) -> (Vec<RunVariant>, Vec<String>) {
    let (samples, group) = (plan.samples_per_update, setup.network.micro_batch_multiple());
    let (plan, blocks) = (plan.chosen, setup.network.blocks.len());
    let (mut notes, mut variants) = (Vec::new(), Vec::new());
    let mut add = |name: &str, plan, exact, kind| {
        variants.push(RunVariant { name: name.into(), plan, exact, kind });
    };
    add("one reader", ExecutionPlan { prefetch: 1, ..plan }, true, VariantKind::SingleReader);
    if group > 1 {
        notes.push(format!(
            "batch norm normalizes {group} samples together, so micro-batches are multiples of {group}: another \
             group size is another experiment"
        ));
    }
    let mut splits: Vec<BatchSplit> = [2, 3, 8]
        .map(|times| search::split(samples, (plan.accumulation_steps * times).min(samples), group))
        .into_iter()
        .filter(|one| one.micro_batch < plan.micro_batch)
        .collect();
    splits.dedup();
    if splits.is_empty() {
        notes.push(format!("an update of {} cannot be split further", counted(samples as u64, "sample")));
    }
    for split in &splits {
        let name = format!("{} x {}", split.micro_batch, split.accumulation_steps);
        add(&name, plan.with_split(*split), false, VariantKind::Plain);
    }
    if plan.recompute < blocks {
        add("recomputed", ExecutionPlan { recompute: blocks, ..plan }, true, VariantKind::Plain);
    }
    let can_shrink = setup.allows(OomAction::Shrink) && !splits.is_empty();
    match can_shrink || setup.allows(OomAction::Recompute) && plan.recompute < blocks {
        true => add("out of memory", plan, !can_shrink, VariantKind::OutOfMemory),
        false => {
            notes.push("an OOM would end the run: `memory.on_oom` allows no measure that is left".into())
        }
    }
    add("resumed", plan, true, VariantKind::Resumed);
    (variants, notes)
}

/// The variant that computes with candle's own operations, or why there is none.
fn candle_variant(plan: &MemoryPlan, setup: &mut Setup, ram: u64) -> Result<RunVariant, String> {
    if setup.backend().is_reference() {
        return Err("the run as planned computes with candle's own operations".into());
    }
    setup.set_reference(true);
    let candle = setup.plan(ram);
    setup.set_reference(false);
    if candle.verdict == PlanVerdict::DoesNotFit || candle.chosen.optimizer != plan.chosen.optimizer {
        let bytes = Bytes(candle.peak.ram_bytes.max(candle.peak.vram_bytes));
        return Err(format!(
            "not compared with candle's own operations and autograd: they take {bytes}, more than the budget"
        ));
    }
    Ok(RunVariant { name: "candle".into(), plan: candle.chosen, exact: false, kind: VariantKind::Candle })
}

/// Runs one variant; false if a signal stopped it.
fn run_variant(
    setup: &mut Setup,
    plan: &MemoryPlan,
    variant: &RunVariant,
    settings: &VerifyOptions,
    fault: Option<u64>,
    observer: Arc<dyn Observer>,
) -> Result<bool, Failure> {
    let was_reference = setup.backend().is_reference();
    let plan = match variant.kind {
        VariantKind::Candle => {
            setup.set_reference(true);
            setup.plan(settings.ram)
        }
        _ => MemoryPlan { chosen: variant.plan, ..plan.clone() },
    };
    let workers = setup.workers;
    if variant.kind == VariantKind::SingleReader {
        setup.workers = 1;
    }
    let dir = settings.folder.join("run");
    let half = (variant.kind == VariantKind::Resumed).then_some(settings.updates / 2);
    let mut completed = true;
    let updates = if variant.kind == VariantKind::Perturbed { 1 } else { settings.updates };
    for until in half.into_iter().chain([updates]) {
        let options = RunOptions {
            requested: RequestedRun { run_dir: Some(dir.clone()), resume: Some(None) },
            runs: settings.folder.clone(),
            stamp: String::new(),
            max_steps: Some(until),
            ram: settings.ram,
            injected_oom: fault.map(|ask| InjectedOom::At(vec![ask])),
            signals: settings.signals.clone(),
            observer: Some(observer.clone()),
            ..RunOptions::default()
        };
        let report = |folder: &RunDir, _: bool| {
            Ok(Reporter::default().with_required(EventLog::open(&folder.events())?))
        };
        completed &= run::run_plan(setup, plan.clone(), options, report)? == RunOutcome::Done;
    }
    setup.workers = workers;
    setup.set_reference(was_reference);
    fs::remove_dir_all(&dir).map_err(Failure::io("remove", dir))?;
    Ok(completed)
}

/// Reports every update and forwards all calls to the inner observer.
struct ReportingObserver {
    inner: Arc<dyn Observer>,
    variant: String,
    callback: VerifyCallback,
}

impl Observer for ReportingObserver {
    fn on_start(&self, store: &ParamStore) -> Result<(), Failure> {
        self.inner.on_start(store)
    }

    fn on_gradients(
        &self,
        step: u64,
        loss: f64,
        store: &ParamStore,
        factor: f64,
        requests: u64,
    ) -> Result<(), Failure> {
        self.inner.on_gradients(step, loss, store, factor, requests)
    }

    fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure> {
        self.inner.on_update(step, store, digest)?;
        (self.callback)(VerifyEvent::Updated { variant: &self.variant });
        Ok(())
    }
}

/// Removes the verification folder, and its parent if that is empty.
struct RemoveDirOnDrop<'a>(&'a Path);

impl Drop for RemoveDirOnDrop<'_> {
    fn drop(&mut self) {
        // Best effort: the verification itself is done, and the user can remove what is left.
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

    fn verify_job(wrap: &WrapObserver) -> VerifyReport {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.toml");
        fs::write(&path, JOB).unwrap();
        let ram = 1 << 30;
        let setup = Setup::new(Job::load(&path, &[]).unwrap(), ram).unwrap();
        let folder = folder.path().join("proof");
        let settings = VerifyOptions { updates: 3, ram, folder: folder.clone(), signals: Signals::default() };
        let report = verify_with(setup, &settings, Arc::new(|_: VerifyEvent| {}), wrap).unwrap().unwrap();
        assert!(!folder.exists(), "the folder is removed");
        report
    }

    #[test]
    fn a_job_that_keeps_the_law_passes_in_every_variant() {
        let report = verify_job(&|_, watch| watch);
        assert!(report.passed, "{report:#?}");
        let names: Vec<&str> = report.variants.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!(
            names,
            ["one reader", "6 x 2", "4 x 3", "2 x 6", "recomputed", "out of memory", "resumed", "candle"]
        );
        assert_eq!(report.losses.len(), 3);
        assert!(report.variants.iter().all(|variant| variant.samples_digest == report.samples_digest));
        let splits = report.variants.iter().filter(|variant| !variant.exact);
        assert!(
            splits.clone().all(|variant| variant.gradients.difference > 0.0),
            "another order of additions is seen"
        );
        assert_eq!(splits.count(), 5);
    }

    /// Perturbs one weight after this update of the variant it observes.
    struct PerturbingObserver(Arc<dyn Observer>, u64);

    impl Observer for PerturbingObserver {
        fn on_gradients(
            &self,
            step: u64,
            loss: f64,
            store: &ParamStore,
            factor: f64,
            requests: u64,
        ) -> Result<(), Failure> {
            self.0.on_gradients(step, loss, store, factor, requests)
        }

        fn on_update(&self, step: u64, store: &ParamStore, digest: Digest) -> Result<(), Failure> {
            let bias = store.layout.params.iter().find(|(spec, _)| spec.name.ends_with("bias")).unwrap().1;
            if step == self.1 {
                cpu::with_slice_mut::<f32, _>(&store.master_weights, |all| all[bias.start] += 0.05)?;
            }
            self.0.on_update(step, store, digest)
        }
    }

    /// However much a job amplifies rounding, a missing gradient is not within the tolerance.
    #[test]
    fn the_tolerance_for_other_kernels_has_a_limit() {
        let mut variant = verify_job(&|_, watch| watch).variants.remove(0);
        let mut moved = |difference: f64| {
            for max in [&mut variant.losses, &mut variant.gradients, &mut variant.weights] {
                max.difference = difference;
            }
            Tolerance::of_sensitivity(&variant)
        };
        assert_eq!(moved(0.01).gradients, 0.04);
        for difference in [0.5, 1e9, f64::INFINITY] {
            let Tolerance { losses, gradients, weights } = moved(difference);
            assert!([losses, gradients, weights].iter().all(|tolerance| *tolerance < 1.0), "{difference}");
        }
    }

    #[test]
    fn a_variant_that_goes_wrong_fails_alone_and_the_parameter_is_named() {
        for (wrong, step) in [("4 x 3", 2), ("recomputed", 2), ("resumed", 2), ("candle", 1)] {
            let report = verify_job(&move |name, watch| {
                if name == wrong { Arc::new(PerturbingObserver(watch, step)) } else { watch }
            });
            assert!(!report.passed);
            for variant in &report.variants {
                assert_eq!(variant.passed, variant.name != wrong, "{variant:#?}");
            }
            let variant = report.variants.iter().find(|variant| variant.name == wrong).unwrap();
            assert!(variant.weights.difference > 1e-3 && variant.weights.update == step, "{variant:#?}");
            let named = variant.weights.parameter.as_deref().unwrap();
            assert!(named.ends_with("bias"), "{named}");
        }
    }
}
