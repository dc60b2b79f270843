//! Renders a memory plan for people: the verdict, where the bytes go, what was chosen and from which candidates.

use std::collections::BTreeMap;

use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::base::units::{counted, format_count};
use crate::base::{MemorySpace, Role};
use crate::planner::plan::{
    CandidateSummary, Disk, PhasePeak, PlanAdjustment, PlanVerdict, PrunedModel, RemovedUnits,
};
use crate::planner::prediction::{PredictionCost, SmallerModel};
use crate::planner::{MemoryPlan, ladder};

const BAR_CELLS: usize = 24;

/// Candidates shown unless all are requested.
const MAX_CANDIDATES: usize = 12;

/// A plan fits easily below this fraction of the budget.
const EASY_FRACTION: f64 = 0.8;

/// The plan as a run prints it: the verdict alone if the job fits easily, unless output is verbose.
pub fn lines_of_run(plan: &MemoryPlan, display: DisplayOptions) -> Vec<String> {
    let is_easy = |peak: u64, budget: u64| peak as f64 <= EASY_FRACTION * budget as f64;
    let easily = plan.verdict == PlanVerdict::Fits
        && is_easy(plan.peak.vram_bytes, plan.budget.vram_bytes)
        && is_easy(plan.peak.ram_bytes, plan.budget.ram_bytes);
    match easily && display.verbosity < Verbosity::Verbose {
        true => vec![verdict_line(plan, AnsiStyle { color: display.color })],
        false => lines(plan, display),
    }
}

/// The plan as lines to print; verbose output adds every part by name and every candidate.
pub fn lines(plan: &MemoryPlan, display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let verbose = display.verbosity == Verbosity::Verbose;
    let mut out = vec![verdict_line(plan, paint), execution_line(plan)];
    out.extend(disk_line(plan));
    if plan.trained_parameters < plan.parameters {
        out.push(format!("       {}", parameter_counts(plan.parameters, plan.trained_parameters)));
    }
    out.extend(plan.pruned.as_deref().map(|model| format!("       {}", pruned_model(*model))));
    out.extend(
        plan.prediction.iter().flat_map(prediction_rows).map(|(name, cost)| format!("       {name}: {cost}")),
    );
    if plan.verdict != PlanVerdict::DoesNotFit {
        out.extend(adjustment_table(plan));
    }
    out.push(String::new());
    out.extend(memory_table(plan, display, verbose));
    if display.interactive && !plan.phases.is_empty() {
        out.push(String::new());
        out.extend(phase_table(plan, paint));
    }
    let measured = plan.candidates.iter().any(|candidate| candidate.measured_time.is_some());
    if !plan.candidates.is_empty() && (verbose || measured || plan.verdict != PlanVerdict::Fits) {
        out.push(String::new());
        out.extend(candidate_table(plan, paint, if verbose { usize::MAX } else { MAX_CANDIDATES }));
    }
    if let Some(advice) = &plan.advice {
        out.push(String::new());
        out.push(format!("{} {advice}", paint.cyan("hint:")));
    }
    out
}

/// The verdict, the execution plan and how it differs from the job as written.
pub fn summary_lines(plan: &MemoryPlan) -> Vec<String> {
    let mut out = vec![verdict_line(plan, AnsiStyle::default()), execution_line(plan)];
    out.extend(disk_line(plan));
    if plan.verdict != PlanVerdict::DoesNotFit {
        out.extend(adjustment_table(plan));
    }
    out.extend(plan.advice.as_ref().map(|advice| format!("hint: {advice}")));
    out
}

/// `plan   fits: 212 MiB of 22.1 GiB ram at the peak, in backward`.
fn verdict_line(plan: &MemoryPlan, paint: AnsiStyle) -> String {
    let verdict = match plan.verdict {
        PlanVerdict::Fits => paint.green("fits"),
        PlanVerdict::FitsAfterShrink => paint.yellow("fits after shrinking"),
        PlanVerdict::DoesNotFit => paint.red("does not fit"),
    };
    let peaks: Vec<String> = memory_spaces(plan)
        .into_iter()
        .map(|space| {
            let (peak, budget, name) = match space {
                MemorySpace::Vram => (plan.peak.vram_bytes, plan.budget.vram_bytes, "vram"),
                MemorySpace::Ram => (plan.peak.ram_bytes, plan.budget.ram_bytes, "ram"),
            };
            let percentage = text::percent(peak as f64, budget as f64);
            format!("{name} {} of {} ({percentage})", text::bytes(peak), text::bytes(budget))
        })
        .collect();
    let (peaks, phase, device) = (peaks.join(", "), &plan.peak.phase, &plan.device);
    format!("{} {verdict} on {device}: {peaks} at the peak, in {phase}", paint.bold("plan  "))
}

/// `206,922 parameters, 1,290 trained`; without the second part if all are.
pub fn parameter_counts(parameters: u64, trained: u64) -> String {
    let all = format!("{} parameters", format_count(parameters));
    if trained < parameters { format!("{all}, {} trained", format_count(trained)) } else { all }
}

/// `80.0 % of 1,199,648 weights pruned: 4.58 MiB, about 1.11 MiB gzipped`, or with channels or heads
/// `40 of 80 channels removed, 61.2 % of 14,144 weights: ...`.
pub fn pruned_model(model: PrunedModel) -> String {
    let PrunedModel { weights, sparsity, bytes, compressed_bytes, units } = model;
    let weights = format!("{} of {} weights", text::percent(sparsity, 1.0), format_count(weights));
    let pruned = match units {
        None => format!("{weights} pruned"),
        Some(RemovedUnits { structure, removed, units }) => {
            let (removed, units) = (format_count(removed), format_count(units));
            format!("{removed} of {units} {} removed, {weights}", structure.noun())
        }
    };
    format!("{pruned}: {}, about {} gzipped", text::bytes(bytes), text::bytes(compressed_bytes))
}

/// What the trained model takes per sample, and its teacher, which is compared with it:
/// `38,282 parameters, 722,944 operations and 182 KiB per sample`.
pub fn prediction_rows(smaller: &SmallerModel) -> Vec<(&'static str, String)> {
    let line = |cost: &PredictionCost, ratio: &dyn Fn(fn(&PredictionCost) -> u64) -> String| {
        let PredictionCost { parameters, operations, memory_bytes } = *cost;
        format!(
            "{} parameters{}, {} operations{} and {}{} per sample",
            format_count(parameters),
            ratio(|cost| cost.parameters),
            format_count(operations),
            ratio(|cost| cost.operations),
            text::bytes(memory_bytes),
            ratio(|cost| cost.memory_bytes),
        )
    };
    let SmallerModel { model, teacher } = smaller;
    let teacher = teacher.as_ref().map(|teacher| {
        let ratio = |of: fn(&PredictionCost) -> u64| {
            format!(" (x {:.1})", of(teacher) as f64 / of(model).max(1) as f64)
        };
        ("teacher", line(teacher, &ratio))
    });
    std::iter::once(("prediction", line(model, &|_| String::new()))).chain(teacher).collect()
}

/// The execution plan: `micro-batch 50 x 2 = 100 samples per update (requested: 100 x 1), ...`.
fn execution_line(plan: &MemoryPlan) -> String {
    let chosen = &plan.chosen;
    let mut line = format!("       micro-batch {}", split_text(plan));
    if plan.requested != chosen.split() {
        let requested = plan.requested;
        line += &format!(" (requested: {} x {})", requested.micro_batch, requested.accumulation_steps);
    }
    line += &format!(", {}, evaluation micro-batch {}", chosen.optimizer, chosen.eval_micro_batch);
    if chosen.recompute > 0 {
        line += &format!(", {} recomputed", counted(chosen.recompute as u64, "block"));
    }
    if !chosen.offload.is_empty() {
        line += &format!(", {} in ram", chosen.offload_names());
    }
    line
}

/// `50 x 2 = 100 samples per update`. The last micro-batch of an update may be smaller, and all of them if the training
/// set is smaller than an update.
pub(super) fn split_text(plan: &MemoryPlan) -> String {
    let (update, steps) = (plan.samples_per_update, plan.chosen.accumulation_steps);
    let micro_batch = plan.chosen.micro_batch.min(update);
    let samples = counted(update as u64, "sample");
    match micro_batch * steps == update {
        true => format!("{micro_batch} x {steps} = {samples} per update"),
        false => format!("{micro_batch} x {steps}, the last one smaller: {samples} per update"),
    }
}

/// `disk 12.3 MiB: 4 checkpoints of 3.08 MiB at most`.
fn disk_line(plan: &MemoryPlan) -> Option<String> {
    let Disk { checkpoint_bytes, checkpoints, checkpoints_bytes, data_cache_bytes, stored_logits_bytes } =
        plan.disk;
    let total = checkpoints_bytes.saturating_add(data_cache_bytes).saturating_add(stored_logits_bytes);
    let total = text::bytes(total);
    let part = |bytes: u64, what: &str| match bytes {
        0 => String::new(),
        bytes => format!(", {} of {what}", text::bytes(bytes)),
    };
    let cache = part(data_cache_bytes, "prepared data") + &part(stored_logits_bytes, "the teacher's logits");
    let each = text::bytes(checkpoint_bytes);
    (checkpoints > 0).then(|| {
        format!("       disk {total}: {} of {each} at most{cache}", counted(checkpoints, "checkpoint"))
    })
}

/// The adjustments from the job as written to what runs, one by one, with reasons.
fn adjustment_table(plan: &MemoryPlan) -> Vec<String> {
    let row = |change: &PlanAdjustment| {
        vec![
            change.key.to_string().replace('_', "-"),
            format!("{} -> {}", change.from, change.to),
            change.why.clone(),
        ]
    };
    text::table("<<<", 7, &plan.shrunk.iter().map(row).collect::<Vec<_>>())
}

/// The peak of each phase, as bars.
fn phase_table(plan: &MemoryPlan, paint: AnsiStyle) -> Vec<String> {
    let spaces = memory_spaces(plan);
    let highest = plan.phases.iter().map(|phase| phase.bytes_in(spaces[0])).max().unwrap_or(1).max(1);
    let mut head = vec![paint.dim("phase")];
    head.extend(spaces.iter().map(|space| paint.dim(memory_name(*space))));
    let row = |phase: &PhasePeak| {
        let mut row = vec![phase.name.to_string()];
        row.extend(spaces.iter().map(|space| text::bytes(phase.bytes_in(*space))));
        row.push(paint.cyan(&text::bar(phase.bytes_in(spaces[0]) as f64 / highest as f64, BAR_CELLS)));
        row
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(plan.phases.iter().map(row)).collect();
    text::table(&("<".to_owned() + &">".repeat(spaces.len()) + "<"), 7, &rows)
}

fn memory_name(space: MemorySpace) -> &'static str {
    if space == MemorySpace::Vram { "vram" } else { "ram" }
}

/// The memory spaces the plan uses, device first.
fn memory_spaces(plan: &MemoryPlan) -> Vec<MemorySpace> {
    let uses = |space| plan.parts.iter().any(|part| part.r#where == space);
    let mut spaces = Vec::new();
    if plan.budget.vram_bytes > 0 || plan.peak.vram_bytes > 0 || uses(MemorySpace::Vram) {
        spaces.push(MemorySpace::Vram);
    }
    spaces.push(MemorySpace::Ram);
    spaces
}

/// Bytes by role, one table per memory space; percentages are of that space's parts.
fn memory_table(plan: &MemoryPlan, display: DisplayOptions, verbose: bool) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let spaces = memory_spaces(plan);
    let mut rows = Vec::new();
    for space in &spaces {
        let parts = || plan.parts.iter().filter(|part| part.r#where == *space);
        let total: u64 = parts().map(|part| part.bytes).sum();
        if total == 0 {
            continue;
        }
        let mut roles = BTreeMap::<Role, u64>::new();
        parts().for_each(|part| *roles.entry(part.role).or_default() += part.bytes);
        let largest = roles.values().max().copied().unwrap_or(1).max(1);
        if !rows.is_empty() {
            rows.push(vec![]);
        }
        rows.push([memory_name(*space), "bytes", "%", ""].map(|head| paint.dim(head)).to_vec());
        for (role, bytes) in roles {
            let percentage = text::percent(bytes as f64, total as f64);
            let mut bar = if display.interactive {
                text::bar(bytes as f64 / largest as f64, BAR_CELLS)
            } else {
                String::new()
            };
            bar = paint.cyan(&bar);
            rows.push(vec![role.to_string(), text::bytes(bytes), percentage, bar]);
            if verbose {
                for part in parts().filter(|part| part.role == role) {
                    rows.push(vec![paint.dim(&format!("  {}", part.name)), text::bytes(part.bytes)]);
                }
            }
        }
        rows.push(vec![paint.bold("total"), paint.bold(&text::bytes(total))]);
        if *space == MemorySpace::Vram && plan.context_bytes > 0 {
            let (bytes, note) = (text::bytes(plan.context_bytes), "not in the budget");
            rows.push(vec!["CUDA context".into(), bytes, String::new(), paint.dim(note)]);
        }
    }
    text::table("<>><", 7, &rows)
}

/// At most `limit` candidates: those closest in time to the chosen one.
fn candidate_table(plan: &MemoryPlan, paint: AnsiStyle, limit: usize) -> Vec<String> {
    let spaces = memory_spaces(plan);
    let chosen = match plan.verdict {
        PlanVerdict::DoesNotFit => None,
        _ => plan.candidates.iter().find(|candidate| candidate.change == ladder::describe_chosen(plan)),
    };
    let measured = plan.candidates.iter().any(|candidate| candidate.measured_time.is_some());
    let mut head = vec!["considered"];
    head.extend(spaces.iter().map(|space| memory_name(*space)));
    head.push(if measured { "predicted" } else { "time" });
    head.extend(measured.then_some("measured"));
    let mut rows = vec![head.into_iter().map(|head| paint.dim(head)).collect::<Vec<_>>()];
    for candidate in nearest_candidates(&plan.candidates, chosen, limit) {
        let mut row =
            vec![if candidate.change.is_empty() { "as written".into() } else { candidate.change.clone() }];
        let bytes = |space: &MemorySpace| {
            if *space == MemorySpace::Vram { candidate.vram_bytes } else { candidate.ram_bytes }
        };
        row.extend(spaces.iter().map(|space| text::bytes(bytes(space))));
        row.push(format!("x {:.2}", candidate.relative_time));
        if measured {
            row.push(candidate.measured_time.map_or_else(String::new, |time| format!("x {time:.2}")));
        }
        row.push(match candidate.fits {
            true if chosen == Some(candidate) => paint.green("chosen"),
            true => "fits".into(),
            false => paint.red("too large"),
        });
        rows.push(row);
    }
    let hidden = plan.candidates.len() + 1 - rows.len();
    let align = "<".to_owned() + &">".repeat(spaces.len() + 1 + usize::from(measured)) + "<";
    let mut out = text::table(&align, 7, &rows);
    if hidden > 0 {
        out.push(paint.dim(&format!("       and {hidden} more (-v)")));
    }
    out
}

/// The job as written, and the candidates closest in time to the chosen one, in the order given.
fn nearest_candidates<'a>(
    candidates: &'a [CandidateSummary],
    chosen: Option<&CandidateSummary>,
    limit: usize,
) -> Vec<&'a CandidateSummary> {
    let time = chosen.map_or(f64::INFINITY, |candidate| candidate.relative_time);
    let distance = |candidate: &CandidateSummary| match candidate {
        candidate if candidate.change.is_empty() || Some(candidate) == chosen => -1.0,
        candidate if time.is_finite() => (candidate.relative_time - time).abs(),
        // Nothing fits: the smallest candidate comes closest.
        candidate => (candidate.vram_bytes + candidate.ram_bytes) as f64,
    };
    let mut nearest: Vec<usize> = (0..candidates.len()).collect();
    nearest.sort_by(|a, b| distance(&candidates[*a]).total_cmp(&distance(&candidates[*b])));
    nearest.truncate(limit);
    nearest.sort_unstable();
    nearest.into_iter().map(|i| &candidates[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::PruneStructure;
    use crate::planner::plan::{CandidateSummary, MemoryPart};
    use crate::report::fixtures;

    fn text(plan: &MemoryPlan, display: DisplayOptions) -> String {
        lines(plan, display).join("\n")
    }

    #[test]
    fn a_shrunk_plan_shows_what_was_considered() {
        assert_eq!(
            text(&fixtures::plan(), DisplayOptions::default()),
            "\
plan   fits after shrinking on cpu: ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples per update (requested: 100 x 1), adamw, evaluation micro-batch 200
       micro-batch  100 x 1 -> 50 x 2  as written it takes 344.00 MiB of 256.00 MiB ram

       ram                 bytes       %
       weights          20.0 MiB   9.4 %
       gradients        20.0 MiB   9.4 %
       optimizer state  40.0 MiB  18.9 %
       activations       132 MiB  62.3 %
       total             212 MiB

       considered                                ram    time
       as written                            344 MiB  x 1.00  too large
       micro-batch 50, 2 accumulation steps  212 MiB  x 1.04  chosen"
        );
    }

    #[test]
    fn a_plan_says_how_large_the_pruned_model_will_be() {
        let model = PrunedModel {
            weights: 1_000_000,
            sparsity: 0.8,
            bytes: 4 << 20,
            compressed_bytes: 1 << 20,
            units: None,
        };
        let units = RemovedUnits { structure: PruneStructure::Channels, removed: 40, units: 80 };
        assert_eq!(
            pruned_model(PrunedModel { units: Some(units), ..model }),
            "40 of 80 channels removed, 80.0 % of 1,000,000 weights: 4.00 MiB, about 1.00 MiB gzipped"
        );
        let plan = MemoryPlan { pruned: Some(Box::new(model)), ..fixtures::plan() };
        let expected = "\n       80.0 % of 1,000,000 weights pruned: 4.00 MiB, about 1.00 MiB gzipped\n";
        assert!(text(&plan, DisplayOptions::default()).contains(expected));
    }

    #[test]
    fn a_plan_says_what_the_smaller_model_takes_beside_its_teacher() {
        let cost =
            |parameters, operations, memory_bytes| PredictionCost { parameters, operations, memory_bytes };
        let smaller = SmallerModel {
            model: cost(1_000, 20_000, 1 << 20),
            teacher: Some(cost(4_000, 100_000, 3 << 20)),
        };
        let plan = MemoryPlan { prediction: Some(smaller), ..fixtures::plan() };
        let expected = "
       prediction: 1,000 parameters, 20,000 operations and 1.00 MiB per sample
       teacher: 4,000 parameters (x 4.0), 100,000 operations (x 5.0) and 3.00 MiB (x 3.0) per sample\n";
        assert!(text(&plan, DisplayOptions::default()).contains(expected));
    }

    #[test]
    fn a_run_that_fits_easily_has_one_line_and_no_equation_is_false() {
        let mut plan = MemoryPlan { verdict: PlanVerdict::Fits, ..fixtures::plan() };
        let of_run = |plan: &MemoryPlan| lines_of_run(plan, DisplayOptions::default());
        assert!(of_run(&plan).len() > 5, "82.8 % of the budget is not easy");
        plan.budget.ram_bytes = 1 << 30;
        assert_eq!(
            of_run(&plan),
            ["plan   fits on cpu: ram 212 MiB of 1.00 GiB (20.7 %) at the peak, in backward"]
        );
        let verbose = DisplayOptions { verbosity: Verbosity::Verbose, ..DisplayOptions::default() };
        assert!(lines_of_run(&plan, verbose).len() > 5);
        let mut split = |micro_batch, accumulation_steps, samples| {
            (plan.chosen.micro_batch, plan.chosen.accumulation_steps) = (micro_batch, accumulation_steps);
            plan.samples_per_update = samples;
            split_text(&plan)
        };
        assert_eq!(split(50, 2, 100), "50 x 2 = 100 samples per update");
        assert_eq!(split(64, 1, 50), "50 x 1 = 50 samples per update");
        assert_eq!(split(34, 3, 100), "34 x 3, the last one smaller: 100 samples per update");
        assert_eq!(split(1, 1, 1), "1 x 1 = 1 sample per update");
    }

    #[test]
    fn a_terminal_gets_bars_and_the_verbose_every_part() {
        let display = DisplayOptions { verbosity: Verbosity::Verbose, color: false, interactive: true };
        let shown = text(&MemoryPlan { verdict: PlanVerdict::Fits, ..fixtures::plan() }, display);
        assert_eq!(
            shown,
            "\
plan   fits on cpu: ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples per update (requested: 100 x 1), adamw, evaluation micro-batch 200
       micro-batch  100 x 1 -> 50 x 2  as written it takes 344.00 MiB of 256.00 MiB ram

       ram                 bytes       %
       weights          20.0 MiB   9.4 %  ███▋
         weights        20.0 MiB
       gradients        20.0 MiB   9.4 %  ███▋
         gradients      20.0 MiB
       optimizer state  40.0 MiB  18.9 %  ███████▎
         adamw m        20.0 MiB
         adamw v        20.0 MiB
       activations       132 MiB  62.3 %  ████████████████████████
         conv1           100 MiB
         conv2          32.0 MiB
       total             212 MiB

       phase          ram
       forward    180 MiB  ████████████████████▍
       backward   212 MiB  ████████████████████████
       update    80.0 MiB  █████████

       considered                                ram    time
       as written                            344 MiB  x 1.00  too large
       micro-batch 50, 2 accumulation steps  212 MiB  x 1.04  chosen"
        );
    }

    #[test]
    fn measured_times_are_shown_beside_predicted_ones_and_long_lists_are_cut() {
        let mut plan = fixtures::plan();
        plan.candidates[1].measured_time = Some(0.98);
        let more = (2..30).map(|n| CandidateSummary {
            change: format!("micro-batch {n}, {n} accumulation steps"),
            relative_time: n as f64,
            ..plan.candidates[1].clone()
        });
        let more: Vec<CandidateSummary> =
            more.map(|candidate| CandidateSummary { measured_time: None, ..candidate }).collect();
        plan.candidates.extend(more);
        let shown = text(&plan, DisplayOptions::default());
        let tail: Vec<&str> = shown.lines().skip_while(|line| !line.contains("considered")).collect();
        assert_eq!(tail[0], "       considered                                 ram  predicted  measured");
        assert_eq!(
            tail[2],
            "       micro-batch 50, 2 accumulation steps   212 MiB     x 1.04    x 0.98  chosen"
        );
        assert_eq!((tail.len(), *tail.last().unwrap()), (MAX_CANDIDATES + 2, "       and 18 more (-v)"));
    }

    #[test]
    fn a_gpu_has_its_own_table_and_advice_comes_last() {
        let mut plan = fixtures::plan();
        plan.verdict = PlanVerdict::DoesNotFit;
        plan.device = "cuda:0".into();
        plan.budget.vram_bytes = 1 << 30;
        plan.peak.vram_bytes = 2 << 30;
        plan.parts = vec![
            MemoryPart { name: "w".into(), role: Role::Weights, bytes: 2 << 30, r#where: MemorySpace::Vram },
            MemoryPart {
                name: "d".into(),
                role: Role::DataPipeline,
                bytes: 1 << 20,
                r#where: MemorySpace::Ram,
            },
        ];
        plan.candidates = vec![CandidateSummary {
            change: String::new(),
            vram_bytes: 2 << 30,
            ram_bytes: 1 << 20,
            relative_time: 1.0,
            measured_time: None,
            fits: false,
        }];
        plan.advice = Some("set `model.hidden = [64]`".into());
        plan.context_bytes = 512 << 20;
        assert_eq!(
            text(&plan, DisplayOptions::default()),
            "\
plan   does not fit on cuda:0: vram 2.00 GiB of 1.00 GiB (200.0 %), \
ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples per update (requested: 100 x 1), adamw, evaluation micro-batch 200

       vram              bytes        %
       weights        2.00 GiB  100.0 %
       total          2.00 GiB
       CUDA context    512 MiB           not in the budget

       ram               bytes        %
       data pipeline  1.00 MiB  100.0 %
       total          1.00 MiB

       considered      vram       ram    time
       as written  2.00 GiB  1.00 MiB  x 1.00  too large

hint: set `model.hidden = [64]`"
        );
    }
}
