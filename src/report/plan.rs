//! Renders a memory plan for people: the verdict, where the bytes go, what was chosen and from which candidates.

use std::collections::BTreeMap;

use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::base::Role;
use crate::base::units::format_count;
use crate::planner::plan::{CandidateSummary, Disk, MemorySpace, PhasePeak, PlanVerdict};
use crate::planner::{MemoryPlan, ladder};

const BAR_CELLS: usize = 24;

/// Candidates shown unless all are requested.
const MAX_CANDIDATES: usize = 12;

/// The plan as lines to print; verbose output adds every part by name and every candidate.
pub fn lines(plan: &MemoryPlan, look: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: look.color };
    let verbose = look.verbosity == Verbosity::Verbose;
    let mut out = vec![verdict_line(plan, paint), execution_line(plan)];
    out.extend(disk_line(plan));
    if plan.verdict != PlanVerdict::DoesNotFit {
        out.extend(adjustment_table(plan));
    }
    out.push(String::new());
    out.extend(memory_table(plan, look, verbose));
    if look.interactive && !plan.phases.is_empty() {
        out.push(String::new());
        out.extend(phase_table(plan, paint));
    }
    let measured = plan.rungs.iter().any(|rung| rung.measured_time.is_some());
    if !plan.rungs.is_empty() && (verbose || measured || plan.verdict != PlanVerdict::Fits) {
        out.push(String::new());
        out.extend(candidate_table(plan, paint, if verbose { usize::MAX } else { MAX_CANDIDATES }));
    }
    if let Some(advice) = &plan.advice {
        out.push(String::new());
        out.push(format!("{} {advice}", paint.cyan("hint:")));
    }
    out
}

/// `plan   fits: 212 MiB of 22.1 GiB ram at the peak, in backward`.
fn verdict_line(plan: &MemoryPlan, paint: AnsiStyle) -> String {
    let word = match plan.verdict {
        PlanVerdict::Fits => paint.green("fits"),
        PlanVerdict::FitsAfterShrink => paint.yellow("fits after shrinking"),
        PlanVerdict::DoesNotFit => paint.red("does not fit"),
    };
    let peaks: Vec<String> = memory_places(plan)
        .into_iter()
        .map(|place| {
            let (peak, budget, name) = match place {
                MemorySpace::Vram => (plan.peak.vram_bytes, plan.budget.vram_bytes, "vram"),
                MemorySpace::Ram => (plan.peak.ram_bytes, plan.budget.ram_bytes, "ram"),
            };
            let share = text::percent(peak as f64, budget as f64);
            format!("{name} {} of {} ({share})", text::bytes(peak), text::bytes(budget))
        })
        .collect();
    let (peaks, phase, device) = (peaks.join(", "), &plan.peak.phase, &plan.device);
    format!("{} {word} on {device}: {peaks} at the peak, in {phase}", paint.bold("plan  "))
}

/// The execution plan: `micro-batch 50 x 2 = 100 samples an update (asked: 100 x 1), ...`.
fn execution_line(plan: &MemoryPlan) -> String {
    let (requested, chosen) = (plan.requested, &plan.chosen);
    let mut line = format!(
        "       micro-batch {} x {} = {} samples an update",
        chosen.micro_batch,
        chosen.accumulation_steps,
        format_count(plan.samples_per_update as u64)
    );
    if (requested.micro_batch, requested.accumulation_steps)
        != (chosen.micro_batch, chosen.accumulation_steps)
    {
        line += &format!(" (asked: {} x {})", requested.micro_batch, requested.accumulation_steps);
    }
    line += &format!(", {}, evaluation by {}", chosen.optimizer, chosen.eval_micro_batch);
    match chosen.recompute {
        0 => {}
        1 => line += ", 1 block recomputed",
        n => line += &format!(", {n} blocks recomputed"),
    }
    if !chosen.offload.is_empty() {
        line += &format!(", {} in ram", chosen.offload_names());
    }
    line
}

/// `disk 12.3 MiB: 4 checkpoints of 3.08 MiB at most`.
fn disk_line(plan: &MemoryPlan) -> Option<String> {
    let Disk { checkpoint_bytes, checkpoints, checkpoints_bytes, data_cache_bytes } = plan.disk;
    let whole = text::bytes(checkpoints_bytes.saturating_add(data_cache_bytes));
    let plural = if checkpoints == 1 { "" } else { "s" };
    let cache = match data_cache_bytes {
        0 => String::new(),
        bytes => format!(", {} of prepared data", text::bytes(bytes)),
    };
    let each = text::bytes(checkpoint_bytes);
    (checkpoints > 0)
        .then(|| format!("       disk {whole}: {checkpoints} checkpoint{plural} of {each} at most{cache}"))
}

/// The adjustments from the job as written to what runs, one by one, with reasons.
fn adjustment_table(plan: &MemoryPlan) -> Vec<String> {
    let row = |rung: &crate::planner::plan::PlanAdjustment| {
        vec![rung.rung.to_string(), format!("{} -> {}", rung.from, rung.to), rung.why.clone()]
    };
    text::table("<<<", 7, &plan.shrunk.iter().map(row).collect::<Vec<_>>())
}

/// The peak of each phase, as bars.
fn phase_table(plan: &MemoryPlan, paint: AnsiStyle) -> Vec<String> {
    let places = memory_places(plan);
    let highest = plan.phases.iter().map(|phase| phase.bytes_in(places[0])).max().unwrap_or(1).max(1);
    let mut head = vec![paint.dim("phase")];
    head.extend(places.iter().map(|place| paint.dim(memory_name(*place))));
    let row = |phase: &PhasePeak| {
        let mut row = vec![phase.name.to_string()];
        row.extend(places.iter().map(|place| text::bytes(phase.bytes_in(*place))));
        row.push(paint.cyan(&text::bar(phase.bytes_in(places[0]) as f64 / highest as f64, BAR_CELLS)));
        row
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(plan.phases.iter().map(row)).collect();
    text::table(&("<".to_owned() + &">".repeat(places.len()) + "<"), 7, &rows)
}

fn memory_name(place: MemorySpace) -> &'static str {
    if place == MemorySpace::Vram { "vram" } else { "ram" }
}

/// The memory spaces the plan uses, device first.
fn memory_places(plan: &MemoryPlan) -> Vec<MemorySpace> {
    let has = |place| plan.parts.iter().any(|part| part.r#where == place);
    let mut places = Vec::new();
    if plan.budget.vram_bytes > 0 || plan.peak.vram_bytes > 0 || has(MemorySpace::Vram) {
        places.push(MemorySpace::Vram);
    }
    places.push(MemorySpace::Ram);
    places
}

/// Bytes by role, one table per memory space; percentages are of that space's parts.
fn memory_table(plan: &MemoryPlan, look: DisplayOptions, verbose: bool) -> Vec<String> {
    let paint = AnsiStyle { color: look.color };
    let places = memory_places(plan);
    let mut rows = Vec::new();
    for place in &places {
        let here = || plan.parts.iter().filter(|part| part.r#where == *place);
        let total: u64 = here().map(|part| part.bytes).sum();
        if total == 0 {
            continue;
        }
        let mut roles = BTreeMap::<Role, u64>::new();
        here().for_each(|part| *roles.entry(part.role).or_default() += part.bytes);
        let largest = roles.values().max().copied().unwrap_or(1).max(1);
        if !rows.is_empty() {
            rows.push(vec![]);
        }
        rows.push([memory_name(*place), "bytes", "share", ""].map(|head| paint.dim(head)).to_vec());
        for (role, bytes) in roles {
            let share = text::percent(bytes as f64, total as f64);
            let mut bar = if look.interactive {
                text::bar(bytes as f64 / largest as f64, BAR_CELLS)
            } else {
                String::new()
            };
            bar = paint.cyan(&bar);
            rows.push(vec![role.to_string(), text::bytes(bytes), share, bar]);
            if verbose {
                for part in here().filter(|part| part.role == role) {
                    rows.push(vec![paint.dim(&format!("  {}", part.name)), text::bytes(part.bytes)]);
                }
            }
        }
        rows.push(vec![paint.bold("total"), paint.bold(&text::bytes(total))]);
        if *place == MemorySpace::Vram && plan.context_bytes > 0 {
            let (bytes, beside) = (text::bytes(plan.context_bytes), "beside the budget");
            rows.push(vec!["CUDA context".into(), bytes, String::new(), paint.dim(beside)]);
        }
    }
    text::table("<>><", 7, &rows)
}

/// At most `most` candidates: those closest in time to the chosen one.
fn candidate_table(plan: &MemoryPlan, paint: AnsiStyle, most: usize) -> Vec<String> {
    let places = memory_places(plan);
    let chosen = match plan.verdict {
        PlanVerdict::DoesNotFit => None,
        _ => plan.rungs.iter().find(|rung| rung.change == ladder::describe_chosen(plan)),
    };
    let measured = plan.rungs.iter().any(|rung| rung.measured_time.is_some());
    let mut head = vec!["considered"];
    head.extend(places.iter().map(|place| memory_name(*place)));
    head.push(if measured { "predicted" } else { "time" });
    head.extend(measured.then_some("measured"));
    let mut rows = vec![head.into_iter().map(|head| paint.dim(head)).collect::<Vec<_>>()];
    for rung in nearest_candidates(&plan.rungs, chosen, most) {
        let mut row = vec![if rung.change.is_empty() { "as written".into() } else { rung.change.clone() }];
        let bytes =
            |place: &MemorySpace| if *place == MemorySpace::Vram { rung.vram_bytes } else { rung.ram_bytes };
        row.extend(places.iter().map(|place| text::bytes(bytes(place))));
        row.push(format!("x {:.2}", rung.relative_time));
        if measured {
            row.push(rung.measured_time.map_or_else(String::new, |time| format!("x {time:.2}")));
        }
        row.push(match rung.fits {
            true if chosen == Some(rung) => paint.green("chosen"),
            true => "fits".into(),
            false => paint.red("too large"),
        });
        rows.push(row);
    }
    let hidden = plan.rungs.len() + 1 - rows.len();
    let align = "<".to_owned() + &">".repeat(places.len() + 1 + usize::from(measured)) + "<";
    let mut out = text::table(&align, 7, &rows);
    if hidden > 0 {
        out.push(paint.dim(&format!("       and {hidden} more (-v)")));
    }
    out
}

/// The job as written, and the candidates closest in time to the chosen one, in the order given.
fn nearest_candidates<'a>(
    rungs: &'a [CandidateSummary],
    chosen: Option<&CandidateSummary>,
    most: usize,
) -> Vec<&'a CandidateSummary> {
    let time = chosen.map_or(f64::INFINITY, |rung| rung.relative_time);
    let distance = |rung: &CandidateSummary| match rung {
        rung if rung.change.is_empty() || Some(rung) == chosen => -1.0,
        rung if time.is_finite() => (rung.relative_time - time).abs(),
        // Nothing fits: the smallest candidate comes closest.
        rung => (rung.vram_bytes + rung.ram_bytes) as f64,
    };
    let mut nearest: Vec<usize> = (0..rungs.len()).collect();
    nearest.sort_by(|a, b| distance(&rungs[*a]).total_cmp(&distance(&rungs[*b])));
    nearest.truncate(most);
    nearest.sort_unstable();
    nearest.into_iter().map(|i| &rungs[i]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::plan::{CandidateSummary, MemoryPart};
    use crate::report::fixtures;

    fn text(plan: &MemoryPlan, look: DisplayOptions) -> String {
        lines(plan, look).join("\n")
    }

    #[test]
    fn a_shrunk_plan_shows_what_was_considered() {
        assert_eq!(
            text(&fixtures::plan(), DisplayOptions::default()),
            "\
plan   fits after shrinking on cpu: ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples an update (asked: 100 x 1), adamw, evaluation by 200
       micro-batch  100 x 1 -> 50 x 2  as written it takes 344.00 MiB of 256.00 MiB ram

       ram                 bytes   share
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
    fn a_terminal_gets_bars_and_the_verbose_every_part() {
        let look = DisplayOptions { verbosity: Verbosity::Verbose, color: false, interactive: true };
        let shown = text(&MemoryPlan { verdict: PlanVerdict::Fits, ..fixtures::plan() }, look);
        assert_eq!(
            shown,
            "\
plan   fits on cpu: ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples an update (asked: 100 x 1), adamw, evaluation by 200
       micro-batch  100 x 1 -> 50 x 2  as written it takes 344.00 MiB of 256.00 MiB ram

       ram                 bytes   share
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
        plan.rungs[1].measured_time = Some(0.98);
        let more = (2..30).map(|n| CandidateSummary {
            change: format!("micro-batch {n}, {n} accumulation steps"),
            relative_time: n as f64,
            ..plan.rungs[1].clone()
        });
        let more: Vec<CandidateSummary> =
            more.map(|rung| CandidateSummary { measured_time: None, ..rung }).collect();
        plan.rungs.extend(more);
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
        plan.rungs = vec![CandidateSummary {
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
plan   does not fit on cuda:0: vram 2.00 GiB of 1.00 GiB (200.0 %), ram 212 MiB of 256 MiB (82.8 %) at the peak, in backward
       micro-batch 50 x 2 = 100 samples an update (asked: 100 x 1), adamw, evaluation by 200

       vram              bytes    share
       weights        2.00 GiB  100.0 %
       total          2.00 GiB
       CUDA context    512 MiB           beside the budget

       ram               bytes    share
       data pipeline  1.00 MiB  100.0 %
       total          1.00 MiB

       considered      vram       ram    time
       as written  2.00 GiB  1.00 MiB  x 1.00  too large

hint: set `model.hidden = [64]`"
        );
    }
}
