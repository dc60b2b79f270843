//! Renders a sweep for people and programs: its beginning, what ends, and the comparison of its trials, best first.

use serde_json::{Value, json};

use super::DisplayOptions;
use super::text::{self, AnsiStyle};
use crate::base::units::counted;
use crate::tune::folder::Results;
use crate::tune::{MemoryNeed, Sweep, TrialOutcome, TrialResult, TrialState, TuneFolder};

/// The lines before a sweep starts. `slots` trials run side by side with `threads` each.
pub fn header_lines(
    sweep: &Sweep,
    folder: &TuneFolder,
    slots: usize,
    threads: usize,
    display: DisplayOptions,
) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let direction = if sweep.metric.is_lower_better() { "lowest" } else { "highest" };
    let rungs = sweep.rungs();
    let mut lines = vec![
        format!(
            "{}   {}, {} {} is best",
            paint.bold("tune"),
            counted(sweep.trials.len() as u64, "trial"),
            direction,
            sweep.metric.name()
        ),
        format!(
            "       {slots} side by side with {} each, in {}",
            counted(threads as u64, "thread"),
            memory(sweep.memory)
        ),
    ];
    if rungs.rungs() > 1 {
        let parts: Vec<String> = (0..rungs.rungs() - 1)
            .map(|rung| format!("1/{}", sweep.halving.pow(rungs.rungs() - 1 - rung)))
            .collect();
        lines.push(format!(
            "       after {} of the updates the best 1/{} of the trials go on",
            parts.join(" and "),
            sweep.halving
        ));
    }
    lines.push(format!("       {}", folder.root.display()));
    for (number, trial) in sweep.trials.iter().enumerate().filter(|(_, trial)| !trial.fits()) {
        let need = format!("{} of {}", memory(trial.peak), memory(sweep.memory));
        lines.push(format!(
            "trial  {number:03}  {}  {}: {need}",
            trial.label(),
            paint.yellow("does not fit")
        ));
    }
    lines
}

fn memory(bytes: MemoryNeed) -> String {
    let ram = format!("ram {}", text::bytes(bytes.ram));
    if bytes.vram > 0 { format!("{ram}, vram {}", text::bytes(bytes.vram)) } else { ram }
}

/// A trial that left its rung.
pub fn result_line(sweep: &Sweep, result: &TrialResult, display: DisplayOptions) -> String {
    let paint = AnsiStyle { color: display.color };
    let trial = &sweep.trials[result.trial];
    let said = match (result.outcome, result.score) {
        (TrialOutcome::Failed, _) => {
            format!("{}: {}", paint.red("failed"), result.error.as_deref().unwrap_or("unknown"))
        }
        (TrialOutcome::Diverged, _) => paint.yellow("diverged"),
        (_, Some(score)) => format!("{} {}", sweep.metric.name(), text::number(score)),
        (_, None) => format!("no {}", sweep.metric.name()),
    };
    format!(
        "trial  {:03}  {}  step {} of {}  {said}",
        result.trial,
        trial.label(),
        result.steps,
        trial.total_steps
    )
}

/// Every trial: those with a score, best first, then the others.
fn order(sweep: &Sweep, results: &Results) -> Vec<usize> {
    let mut order = sweep.ranking(results);
    let rest: Vec<usize> = (0..sweep.trials.len()).filter(|trial| !order.contains(trial)).collect();
    order.extend(rest);
    order
}

fn state_name(state: TrialState) -> &'static str {
    match state {
        TrialState::DoesNotFit => "does not fit",
        TrialState::Unfinished => "not finished",
        TrialState::Paused => "paused",
        TrialState::StoppedEarly => "stopped early",
        TrialState::Finished => "finished",
        TrialState::Diverged => "diverged",
        TrialState::Failed => "failed",
    }
}

/// The comparison: a row per trial, best first.
pub fn table(sweep: &Sweep, results: &Results, display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let keys = || sweep.trials.first().into_iter().flat_map(|trial| &trial.set).map(|a| a.key.clone());
    let metric = sweep.metric.name();
    let mut rows: Vec<Vec<String>> = vec![
        std::iter::once("trial".to_owned())
            .chain(keys())
            .chain([&metric, "at step", "steps", "time", "peak", ""].map(str::to_owned))
            .collect(),
    ];
    for (rank, number) in order(sweep, results).into_iter().enumerate() {
        let (trial, result) = (&sweep.trials[number], results.last(number));
        let of = |cell: &dyn Fn(&TrialResult) -> Option<String>| result.and_then(cell).unwrap_or_default();
        let peak = match result.map(|result| result.peak).filter(|peak| peak.ram > 0) {
            Some(peak) => text::bytes(if peak.vram > 0 { peak.vram } else { peak.ram }),
            None => text::bytes(if trial.peak.vram > 0 { trial.peak.vram } else { trial.peak.ram }),
        };
        let state = state_name(sweep.state(number, results));
        let is_best = rank == 0 && result.is_some_and(|result| result.score.is_some());
        let mut row = vec![format!("{number:03}")];
        row.extend(trial.set.iter().map(|assignment| assignment.value.clone()));
        row.extend([
            of(&|result| result.score.map(text::number)),
            of(&|result| result.best_step.map(|step| step.to_string())),
            of(&|result| Some(result.steps.to_string())),
            of(&|result| Some(text::duration(result.elapsed_s))),
            peak,
            if is_best { paint.green(state) } else { state.to_owned() },
        ]);
        rows.push(row);
    }
    let align = format!("<{}>>>>><", "<".repeat(keys().count()));
    text::table(&align, 0, &rows)
}

/// The comparison as one document.
pub fn document(
    sweep: &Sweep,
    results: &Results,
    folder: &TuneFolder,
    is_complete: bool,
    retrain: Option<String>,
) -> Value {
    let trials: Vec<Value> = order(sweep, results)
        .into_iter()
        .map(|number| {
            let (trial, result) = (&sweep.trials[number], results.last(number));
            let set: serde_json::Map<String, Value> =
                trial.set.iter().map(|a| (a.key.clone(), a.value.clone().into())).collect();
            json!({
                "trial": number,
                "set": set,
                "state": sweep.state(number, results),
                "verdict": trial.verdict,
                "planned_peak_bytes": trial.peak,
                "total_steps": trial.total_steps,
                "run": trial.fits().then(|| folder.trial_run(number).root),
                "result": result,
            })
        })
        .collect();
    let best = sweep.ranking(results).first().copied();
    json!({
        "folder": folder.root,
        "metric": sweep.metric,
        "complete": is_complete,
        "budget_bytes": sweep.memory,
        "best": best.map(|trial| json!({ "trial": trial, "run": folder.trial_run(trial).root, "retrain": retrain })),
        "trials": trials,
    })
}
