//! Checks the promises against what a run reported and the system measured.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::bounds::max_planned;
use crate::harness::MIB;
use crate::random::generate::{GeneratedJob, KillMode};
use crate::random::run::{FitOptions, JobDir, ProcessResult, Runner};

pub const NO_PANIC: &str = "no panic";
pub const EXIT_CODE: &str = "exit code";
pub const PLAN_HEAP: &str = "plan at least heap";
pub const PLAN_RESIDENT: &str = "plan at least resident";
pub const PLAN_BOUND: &str = "plan within its bound";
pub const NO_OOM: &str = "no OOM below the plan";
pub const BUDGET_CODE: &str = "budget: exit code";
pub const KILL_CODE: &str = "kill: exit code";
pub const LEFTOVERS: &str = "kill: no leftovers";
pub const SAME_SAMPLES: &str = "same samples";
pub const SAME_LOSSES: &str = "same losses";
pub const SAME_BITS: &str = "same bits";

pub const PROMISES: [&str; 12] = [
    NO_PANIC,
    EXIT_CODE,
    PLAN_HEAP,
    PLAN_RESIDENT,
    PLAN_BOUND,
    NO_OOM,
    BUDGET_CODE,
    KILL_CODE,
    LEFTOVERS,
    SAME_SAMPLES,
    SAME_LOSSES,
    SAME_BITS,
];

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Violation {
    pub promise: &'static str,
    pub what: String,
}

/// Result of a case.
#[derive(Clone, Debug, Default)]
pub struct CaseReport {
    pub violations: Vec<Violation>,
    pub runs: usize,
    pub seconds: f64,
    /// Planned peak, heap peak and resident peak of the run as written; on a GPU the first two are of device memory.
    pub planned: u64,
    pub heap: u64,
    pub resident: u64,
    /// Verdict of the budget run: `fits`, `fits_after_shrink`, `does_not_fit`.
    pub budget: Option<String>,
    /// The job diverges with candle's own operations too, or its gradients explode: rounding decides whether what it
    /// computes has a finite result.
    pub diverges: bool,
    /// On a GPU: `captured`, or why the graph was not.
    pub graph: Option<String>,
}

impl CaseReport {
    fn add_violation(&mut self, promise: &'static str, what: impl Into<String>) {
        self.violations.push(Violation { promise, what: what.into() });
    }
}

/// The exit code of a run whose loss, or a weight, is not finite.
const DIVERGED: Option<i32> = Some(5);

/// Runs a case, whose job and data are in `folder`, with every disturbance drawn for it.
pub fn check_case(machine: &Runner, case: &GeneratedJob, folder: &Path) -> CaseReport {
    let mut seen = CaseReport::default();
    let mut job = JobDir { folder: folder.to_owned(), overrides: Vec::new(), threads: case.threads };
    if case.needs_initial_weights && !write_initial_weights(machine, &job, &mut seen) {
        return seen;
    }
    if case.needs_teacher && first_run(machine, &job, "teacher", &mut seen).finished().is_none() {
        return seen;
    }
    if machine.on_gpu() {
        match machine.plan(&job) {
            Ok(plan) => job = job.set(format!("memory.vram={}B", vram_budget(case.seed, machine, &plan))),
            Err((code, said)) => seen.add_violation(EXIT_CODE, format!("plan: {code:?}: {said}")),
        }
    }
    let written = fit(machine, &job, "written", &FitOptions::default(), &mut seen);
    if written.ended.code == DIVERGED {
        let how = FitOptions { reference: true, ..FitOptions::default() };
        let reference = JobDir { overrides: Vec::new(), ..job.clone() };
        let reference = fit(machine, &reference, "reference", &how, &mut seen);
        seen.diverges = reference.ended.code == DIVERGED || reference.explodes();
        if seen.diverges {
            return seen;
        }
    }
    written.expect(Some(0), EXIT_CODE, &mut seen);
    if written.finished().is_none() {
        return seen;
    }
    check_peaks(machine, &written, job.threads, true, &mut seen);
    written.check_no_oom(&mut seen);
    seen.graph = machine.on_gpu().then(|| written.graph());
    if let Some(trial) = &case.disturbance {
        check_budget(machine, &job, &written, trial.budget_fraction, &mut seen);
        let steps = written.finished().and_then(|f| f["steps"].as_u64()).unwrap_or(1);
        check_kill(machine, &job, &written, trial.kill, (trial.kill_at * steps as f64) as u64, &mut seen);
    }
    seen
}

/// Writes the weights that `train.init` names, by a run of the same model with another seed.
fn write_initial_weights(machine: &Runner, job: &JobDir, seen: &mut CaseReport) -> bool {
    let first = first_run(machine, &job.set("seed=1".into()), "weights", seen);
    let tensors = first.ended.tensors();
    let Some((_, model)) = tensors.iter().find(|(name, _)| name == "model.safetensors") else {
        seen.add_violation(EXIT_CODE, "no weights to begin with");
        return false;
    };
    fs::write(job.folder.join("weights.safetensors"), model).unwrap();
    true
}

/// An update of the job without what needs another run, or more than one update.
fn first_run(machine: &Runner, job: &JobDir, name: &'static str, seen: &mut CaseReport) -> RecordedRun {
    let path = job.folder.join("job.toml");
    let text = fs::read_to_string(&path).unwrap();
    let mut table: toml::Table = text.parse().unwrap();
    ["prune", "lowrank", "distill", "quantize"].iter().for_each(|key| drop(table.remove(*key)));
    for (key, inner) in [("train", "init"), ("schedule", "warmup_steps")] {
        table.get_mut(key).and_then(|table| table.as_table_mut()).map(|table| table.remove(inner));
    }
    fs::write(&path, table.to_string()).unwrap();
    let first = fit(machine, &job.set("train.steps=1".into()), name, &FitOptions::default(), seen);
    fs::write(&path, text).unwrap();
    first.expect(Some(0), EXIT_CODE, seen);
    first
}

/// Device memory budget of a job: rarely much more than its plan, never more than its part of the GPU.
fn vram_budget(seed: u64, machine: &Runner, plan: &Value) -> u64 {
    let peak = plan["peak"]["vram_bytes"].as_u64().unwrap_or(0) as f64;
    // The headroom of 5 % comes out of it.
    let slack = [1.07, 1.3, 2.0, 4.0][(seed % 4) as usize];
    ((peak * slack) as u64 + 2 * MIB).min(machine.vram)
}

/// A run and its events.
struct RecordedRun {
    ended: ProcessResult,
    events: Vec<Value>,
    name: &'static str,
}

fn fit(
    machine: &Runner,
    job: &JobDir,
    name: &'static str,
    how: &FitOptions,
    seen: &mut CaseReport,
) -> RecordedRun {
    let ended = machine.fit(job, name, how);
    seen.runs += 1;
    seen.seconds += ended.seconds;
    let run = RecordedRun { events: ended.events(), ended, name };
    if run.ended.code == Some(101) || run.ended.stderr.contains("panicked") {
        seen.add_violation(NO_PANIC, run.describe());
    }
    if run.ended.timed_out {
        seen.add_violation(EXIT_CODE, format!("{name}: hung"));
    }
    run
}

/// An update as reported; if it was reported twice, the later report.
#[derive(Clone, Debug, PartialEq)]
struct StepRecord {
    step: u64,
    loss: Option<f64>,
    digest: String,
    split: (u64, u64),
}

impl RecordedRun {
    fn events_named<'a>(&'a self, name: &'a str) -> impl DoubleEndedIterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["event"] == name)
    }

    fn finished(&self) -> Option<&Value> {
        self.events_named("finished").next_back()
    }

    /// A gradient so large that rounding decides what becomes of the weights.
    fn explodes(&self) -> bool {
        const EXPLODED: f64 = 1e9;
        self.events_named("step").any(|step| step["grad_norm"].as_f64().is_none_or(|norm| norm > EXPLODED))
    }

    fn describe(&self) -> String {
        format!("{}: exit code {:?}: {}", self.name, self.ended.code, self.ended.stderr.trim())
    }

    fn expect(&self, code: Option<i32>, promise: &'static str, seen: &mut CaseReport) -> bool {
        if self.ended.code != code {
            seen.add_violation(promise, self.describe());
        }
        self.ended.code == code
    }

    fn steps(&self) -> Vec<StepRecord> {
        let mut steps: Vec<StepRecord> = Vec::new();
        for event in self.events_named("step") {
            let number = |key: &str| event[key].as_u64().unwrap_or(0);
            let step = StepRecord {
                step: number("step"),
                loss: event["loss"].as_f64(),
                digest: event["samples_digest"].as_str().unwrap_or_default().into(),
                split: (number("micro_batch"), number("accumulation_steps")),
            };
            steps.retain(|before| before.step != step.step);
            steps.push(step);
        }
        steps
    }

    /// No retry and no correction while the plan fits, unless other processes took the memory.
    fn check_no_oom(&self, seen: &mut CaseReport) {
        if self.events_named("pressure").next().is_some() {
            return;
        }
        for event in ["oom", "shrunk", "corrected"] {
            if let Some(event) = self.events_named(event).next() {
                seen.add_violation(NO_OOM, format!("{}: {event}", self.name));
            }
        }
    }

    fn graph(&self) -> String {
        let captured = self.events_named("cuda_graph_captured").next().is_some();
        let reason = |event: &Value| event["reason"].as_str().unwrap_or("?").to_owned();
        match (captured, self.events_named("cuda_graph_disabled").next()) {
            (true, None) => "captured".into(),
            (true, Some(event)) => format!("captured, then: {}", reason(event)),
            (false, Some(event)) => reason(event),
            (false, None) => "not, and no reason given".into(),
        }
    }

    fn planned(&self) -> Option<&Value> {
        self.events_named("planned").next().map(|event| &event["plan"])
    }
}

/// Checks the plan against the heap, resident memory and, on a GPU, the device heap. `above`: nor may it be too high.
fn check_peaks(machine: &Runner, run: &RecordedRun, threads: usize, above: bool, seen: &mut CaseReport) {
    let Some(finished) = run.finished() else { return };
    let bytes = |key: &str, of: &str| finished[key][of].as_u64().unwrap_or(0);
    let place = if machine.on_gpu() { "vram" } else { "ram" };
    let (planned, heap) = (bytes("planned_peak_bytes", place), bytes("measured_peak_bytes", place));
    // As the run reports it, if it does; sampling from outside may miss the last milliseconds.
    let resident = finished["resident_peak_bytes"].as_u64().unwrap_or(0).max(run.ended.resident);
    if above {
        (seen.planned, seen.heap, seen.resident) = (planned, heap, resident);
    }
    let name = run.name;
    if planned < heap {
        seen.add_violation(
            PLAN_HEAP,
            format!("{name}: {} above the plan of {}", mib(heap - planned), mib(planned)),
        );
    }
    let (ram, ram_heap) = (bytes("planned_peak_bytes", "ram"), bytes("measured_peak_bytes", "ram"));
    if machine.on_gpu() && ram < ram_heap {
        seen.add_violation(
            PLAN_HEAP,
            format!("{name}: host: {} above the plan of {}", mib(ram_heap - ram), mib(ram)),
        );
    }
    // The CUDA driver's own host memory is not in the plan.
    if !machine.on_gpu() && planned < resident {
        seen.add_violation(
            PLAN_RESIDENT,
            format!("{name}: {} above the plan of {}", mib(resident - planned), mib(planned)),
        );
    }
    // Threads that share a layer's work hold their memory at the same time only if each has a processor. Optimizer
    // state that no update wrote, because all of them overflowed in f16 or the run ended before, is planned and never
    // resident.
    let skipped = run.events_named("step").map(|step| step["skipped_updates"].as_u64().unwrap_or(0)).max();
    let updated = skipped.unwrap_or(0) < finished["steps"].as_u64().unwrap_or(0);
    let above = above && updated && (machine.on_gpu() || threads <= machine.processors());
    let measured = if machine.on_gpu() { heap } else { heap.max(resident) };
    if above && planned > max_planned(measured) {
        let share = 100.0 * (planned as f64 / measured as f64 - 1.0);
        let message = format!("{name}: planned {}, measured {} ({share:+.1} %)", mib(planned), mib(measured));
        seen.add_violation(PLAN_BOUND, message);
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB as f64)
}

/// The job again with less memory than it needs: the same experiment, or exit code 3 with a plan that says so.
fn check_budget(machine: &Runner, job: &JobDir, written: &RecordedRun, share: f64, seen: &mut CaseReport) {
    let (key, place) = if machine.on_gpu() { ("memory.vram", "vram") } else { ("memory.ram", "ram") };
    let peak = written.finished().and_then(|f| f["planned_peak_bytes"][place].as_u64()).unwrap_or(0);
    let bytes = (peak as f64 * share) as u64;
    let tight = job.set(format!("{key}={bytes}B"));
    let plan = match machine.plan(&tight) {
        Ok(plan) => plan,
        // The data alone does not fit: refused before there is a plan.
        Err((Some(3), said)) if said.contains("memory.ram") => json!({ "verdict": "does_not_fit" }),
        Err((code, said)) => return seen.add_violation(BUDGET_CODE, format!("plan: {code:?}: {said}")),
    };
    let verdict = plan["verdict"].as_str().unwrap_or_default().to_owned();
    seen.budget = Some(verdict.clone());
    let run = fit(machine, &tight, "budget", &FitOptions::default(), seen);
    let takes = plan["peak"][format!("{place}_bytes")].as_u64().unwrap_or(0);
    let (wanted, other) = if verdict == "does_not_fit" { (3, 0) } else { (0, 3) };
    // The run measures its process memory again: a job that fits or fails by less than that varies may go either way.
    if !machine.on_gpu() && takes.abs_diff(bytes) <= MIB && run.ended.code == Some(other) {
        return;
    }
    if !run.expect(Some(wanted), BUDGET_CODE, seen) || wanted == 3 {
        return;
    }
    run.check_no_oom(seen);
    check_peaks(machine, &run, job.threads, false, seen);
    if takes > bytes {
        seen.add_violation(BUDGET_CODE, format!("the plan takes {} of {}", mib(takes), mib(bytes)));
    }
    check_same_result(written, &run, seen);
}

/// The job again, killed on the way and resumed: bitwise identical.
fn check_kill(
    machine: &Runner,
    job: &JobDir,
    written: &RecordedRun,
    kill: KillMode,
    at: u64,
    seen: &mut CaseReport,
) {
    let alone = job.set("memory.supervise=false".into());
    // The job itself may allow no restart.
    let supervised = job.set("memory.supervise=true".into()).set("memory.max_retries=8".into());
    let (job, how) = match kill {
        KillMode::Worker => (&supervised, FitOptions { kill_worker_at: Some(at), ..FitOptions::default() }),
        KillMode::Whole => (&alone, FitOptions { kill_worker_at: Some(at), ..FitOptions::default() }),
        KillMode::Signal => {
            (&supervised, FitOptions { kill_supervisor_at: Some(at), ..FitOptions::default() })
        }
    };
    let mut run = fit(machine, job, "killed", &how, seen);
    if kill != KillMode::Worker {
        // A kill from outside may come after the run was done.
        if run.ended.code != Some(0) {
            run.expect(None, KILL_CODE, seen);
        }
        run = fit(machine, job, "killed", &FitOptions { resume: true, ..FitOptions::default() }, seen);
    }
    if !run.expect(Some(0), KILL_CODE, seen) {
        return;
    }
    run.check_no_oom(seen);
    let leftovers = run.ended.leftovers();
    if !leftovers.is_empty() {
        seen.add_violation(LEFTOVERS, format!("killed: {leftovers:?}"));
    }
    let before = seen.violations.len();
    check_same_result(written, &run, seen);
    if seen.violations.len() == before && !splits_agree(written, &run) {
        seen.add_violation(SAME_BITS, "killed: another split than the run that was not killed");
    }
}

fn splits_agree(a: &RecordedRun, b: &RecordedRun) -> bool {
    let (a, b) = (a.steps(), b.steps());
    a.iter().all(|step| {
        b.iter().find(|other| other.step == step.step).is_none_or(|other| other.split == step.split)
    })
}

/// The same samples and losses; bitwise identical if the split is the same throughout.
fn check_same_result(written: &RecordedRun, other: &RecordedRun, seen: &mut CaseReport) {
    let name = other.name;
    let digest = |run: &RecordedRun| run.finished().map(|f| f["samples_digest"].clone());
    if digest(written) != digest(other) {
        seen.add_violation(
            SAME_SAMPLES,
            format!("{name}: digest {:?} and {:?}", digest(written), digest(other)),
        );
    }
    let optimizer = |run: &RecordedRun| run.planned().map(|plan| plan["chosen"]["optimizer"].clone());
    if optimizer(written) != optimizer(other) {
        // 8-bit optimizer state, which the job allowed: other numbers.
        return;
    }
    let (a, b) = (written.steps(), other.steps());
    let exact = splits_agree(written, other);
    let half = written.is_half_precision() || written.is_pruned() || written.is_quantized();
    for step in &a {
        let Some(other) = b.iter().find(|other| other.step == step.step) else {
            seen.add_violation(SAME_LOSSES, format!("{name}: step {} was not reported", step.step));
            break;
        };
        if step.digest != other.digest {
            seen.add_violation(SAME_SAMPLES, format!("{name}: step {}: other samples", step.step));
        }
        let agree = match (step.loss, other.loss) {
            (a, b) if exact => a.map(f64::to_bits) == b.map(f64::to_bits),
            (Some(a), Some(b)) => (a - b).abs() <= tolerance(half, step.step) * a.abs().max(0.1),
            (a, b) => a.is_none() == b.is_none(),
        };
        if !agree {
            let how = if exact { "the same split" } else { "another split" };
            let message =
                format!("{name}: step {}: {:?} and {:?} by {how}", step.step, step.loss, other.loss);
            seen.add_violation(SAME_LOSSES, message);
            break;
        }
    }
    if exact && written.ended.tensors() != other.ended.tensors() {
        seen.add_violation(SAME_BITS, format!("{name}: other tensors by the same split"));
    }
}

/// Tolerance of losses under another split: sums in another order, in the compute dtype, amplified by updates, by the
/// selection of weights to prune and by values that round to another neighbour.
fn tolerance(half: bool, step: u64) -> f64 {
    let first = if half { 1e-2 } else { 1e-5 };
    first * (1.0 + step as f64 * 10.0)
}

impl RecordedRun {
    /// Whether weights of almost the same magnitude decide which of them is pruned.
    fn is_pruned(&self) -> bool {
        self.planned().is_some_and(|plan| plan["pruned"].is_object())
    }

    fn job(&self) -> toml::Table {
        let job = fs::read_to_string(self.ended.root.join("job.toml")).unwrap_or_default();
        job.parse().unwrap_or_default()
    }

    /// Whether values are rounded to 8-bit integers.
    fn is_quantized(&self) -> bool {
        let job = self.job();
        job.get("quantize").and_then(|table| table.get("training")?.as_bool()).unwrap_or(false)
    }

    /// Whether it computes in 16 bits.
    fn is_half_precision(&self) -> bool {
        let job = self.job();
        let precision =
            job.get("train").and_then(|t| t.get("precision")).and_then(|p| p.as_str()).unwrap_or("auto");
        let gpu = self.planned().is_some_and(|plan| plan["device"] != "cpu");
        matches!(precision, "bf16" | "f16") || precision == "auto" && gpu
    }
}
