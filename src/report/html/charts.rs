//! Which charts a page has, and the curves of each.

use std::collections::BTreeSet;

use super::chart::{Chart, Mark, Series, Style};
use crate::base::units::format_count;
use crate::events::event::{Event, MemoryBytes};
use crate::history::run_history::quantity;
use crate::history::{MemoryMark, PlannedPeak, Point, RunHistory};
use crate::report::axes::Unit;
use crate::report::{event_lines, text};

/// A budget above this multiple of everything else would flatten the curves; it is written as text instead.
const MAX_BUDGET_RATIO: f64 = 3.0;

/// `A`, `B`, ... for several runs; nothing for one.
pub fn letter(run: usize, runs: usize) -> String {
    let letter = char::from(b'A' + (run % 26) as u8);
    match runs {
        0 | 1 => String::new(),
        _ if run < 26 => letter.to_string(),
        _ => format!("{letter}{}", run / 26),
    }
}

/// The label of a curve: what it is, and of which run.
fn label(run: usize, runs: &[RunHistory], what: &str) -> String {
    format!("{} {what}", letter(run, runs.len())).trim().to_owned()
}

/// The curves of all runs by one name.
fn curves(runs: &[RunHistory], name: &str, what: &str, style: Style) -> Vec<Series> {
    let one = |(run, history): (usize, &RunHistory)| {
        let points = history.curves.get(name)?.points();
        (!points.is_empty()).then(|| Series { run, label: label(run, runs, what), style, points })
    };
    runs.iter().enumerate().filter_map(one).collect()
}

fn chart(title: &str, unit: Unit, from_zero: bool, series: Vec<Series>) -> Chart {
    Chart { title: title.into(), unit, from_zero, series, marks: Vec::new(), note: None }
}

/// Loss first, then the other metrics by name.
pub fn metrics(runs: &[RunHistory]) -> Vec<Chart> {
    let suffix = |name: &String| name.split_once('.').map_or(name.clone(), |(_, metric)| metric.to_owned());
    let mut names: BTreeSet<String> = runs.iter().flat_map(|run| run.metrics.iter().map(suffix)).collect();
    names.remove("loss");
    let measured = |name: &str| {
        let mut series = curves(runs, &format!("train.{name}"), "train", Style::TrainEvaluations);
        series.extend(curves(runs, &format!("valid.{name}"), "valid", Style::Evaluations));
        series
    };
    let mut loss = curves(runs, quantity::LOSS, "update", Style::Updates);
    loss.extend(measured("loss"));
    let mut first = chart("Loss", Unit::Number, false, loss);
    let not_finite: u64 = runs.iter().flat_map(|run| run.curves.values()).map(|curve| curve.not_finite).sum();
    if not_finite > 0 {
        first.note = Some(format!("{} values that are not finite are not drawn.", format_count(not_finite)));
    }
    let others = names.iter().map(|name| chart(&heading(name), Unit::Number, false, measured(name)));
    std::iter::once(first).chain(others).filter(|chart| !chart.series.is_empty()).collect()
}

/// The name of a metric as a title: `Balanced accuracy`, `ROC AUC`.
fn heading(name: &str) -> String {
    let title = |(at, word): (usize, &str)| {
        let mut chars = word.chars();
        match (word, chars.next()) {
            ("rmse" | "mae" | "roc" | "auc", _) => word.to_uppercase(),
            (_, Some(first)) if at == 0 => first.to_uppercase().chain(chars).collect(),
            _ => word.to_owned(),
        }
    };
    name.split('_').enumerate().map(title).collect::<Vec<_>>().join(" ")
}

/// How training went: learning rate, gradients, speed.
pub fn training(runs: &[RunHistory]) -> Vec<Chart> {
    let of = |name: &str| curves(runs, name, "", Style::Updates);
    let varies = |series: &Series| series.points.iter().any(|point| point.value != 1.0);
    let scale = of(quantity::LOSS_SCALE);
    let scale = if scale.iter().any(varies) { scale } else { Vec::new() };
    [
        chart("Learning rate", Unit::Number, true, of(quantity::LEARNING_RATE)),
        chart("Gradient norm, before clipping", Unit::Number, true, of(quantity::GRADIENT_NORM)),
        chart("Samples per second", Unit::PerSecond, true, of(quantity::THROUGHPUT)),
        chart("Wait for data, of the time of an update", Unit::Percent, true, of(quantity::DATA_WAIT)),
        chart("Loss scale", Unit::Number, true, scale),
    ]
    .into_iter()
    .filter(|chart| !chart.series.is_empty())
    .collect()
}

/// Host and device memory: measured, planned and allowed, with everything that happened to it.
pub fn memory(runs: &[RunHistory]) -> Vec<Chart> {
    let host = [(quantity::RAM, "heap"), (quantity::RESIDENT, "resident")];
    let mut charts = vec![memory_chart(runs, "Host memory", &host, |bytes| bytes.ram)];
    let uses_device = |run: &RunHistory| {
        run.record.summary.measured_peak_bytes.vram > 0 || run.plans.iter().any(|plan| plan.peak.vram > 0)
    };
    if runs.iter().any(uses_device) {
        let device = [(quantity::VRAM, "allocated")];
        charts.insert(0, memory_chart(runs, "Device memory", &device, |bytes| bytes.vram));
    }
    charts.retain(|chart| !chart.series.is_empty());
    charts
}

fn memory_chart(
    runs: &[RunHistory],
    title: &str,
    measured: &[(&str, &str)],
    space: fn(&MemoryBytes) -> u64,
) -> Chart {
    let mut series: Vec<Series> = measured
        .iter()
        .flat_map(|(name, what)| curves(runs, name, what, Style::Updates))
        .filter(|series| series.points.iter().any(|point| point.value > 0.0))
        .collect();
    let limits = |what: &str, of: &dyn Fn(&PlannedPeak) -> u64| -> Vec<Series> {
        let one = |(run, history): (usize, &RunHistory)| {
            let points = staircase(history, of);
            let is_set = points.iter().any(|point| point.value > 0.0);
            is_set.then(|| Series { run, label: label(run, runs, what), style: Style::Limit, points })
        };
        runs.iter().enumerate().filter_map(one).collect()
    };
    series.extend(limits("planned", &|plan| space(&plan.peak)));
    let highest = |series: &[Series]| {
        series.iter().flat_map(|series| &series.points).map(|point| point.value).fold(0.0, f64::max)
    };
    let limit = MAX_BUDGET_RATIO * highest(&series);
    let (drawn, above): (Vec<Series>, Vec<Series>) = limits("budget", &|plan| space(&plan.budget))
        .into_iter()
        .partition(|budget| highest(std::slice::from_ref(budget)) <= limit);
    let mut notes: Vec<String> = above
        .iter()
        .map(|budget| {
            format!(
                "{} {}, above the chart.",
                budget.label,
                text::bytes(highest(std::slice::from_ref(budget)) as u64)
            )
        })
        .collect();
    series.extend(drawn);
    let more: u64 = runs.iter().map(|run| run.more_marks).sum();
    if more > 0 {
        notes.push(format!("{} more events are not marked.", format_count(more)));
    }
    let mark = |run, at: &MemoryMark| Mark {
        run,
        at: at.at,
        symbol: symbol(&at.event),
        text: label(run, runs, &event_lines::explain(&at.event)),
    };
    let marks = runs.iter().enumerate().flat_map(|(run, history)| {
        history.marks.iter().map(move |mark_at| mark(run, mark_at)).collect::<Vec<_>>()
    });
    let marks: Vec<Mark> = if series.is_empty() { Vec::new() } else { marks.collect() };
    let is_marked = |symbol: &str| marks.iter().any(|mark| mark.symbol == symbol);
    let meanings: Vec<String> = SYMBOLS
        .into_iter()
        .filter(|(symbol, _)| is_marked(symbol))
        .map(|(symbol, meaning)| format!("{symbol} {meaning}"))
        .collect();
    if !meanings.is_empty() {
        notes.push(format!("{}.", meanings.join(", ")));
    }
    let note = (!notes.is_empty()).then(|| heading(&notes.join(" ")));
    Chart { marks, note, ..chart(title, Unit::Bytes, true, series) }
}

/// What the symbols mean.
const SYMBOLS: [(&str, &str); 7] = [
    ("✕", "out of memory"),
    ("!", "memory pressure"),
    ("±", "budget corrected"),
    ("↻", "restarted"),
    ("▼", "smaller micro-batch"),
    ("▲", "larger micro-batch"),
    ("•", "other"),
];

/// A symbol per kind of event, so that none needs a colour.
fn symbol(event: &Event) -> &'static str {
    match event {
        Event::Oom { .. } => "✕",
        Event::Pressure { .. } => "!",
        Event::Corrected { .. } => "±",
        Event::Restarted { .. } => "↻",
        Event::Shrunk { .. } => "▼",
        Event::Grown { .. } => "▲",
        _ => "•",
    }
}

/// The value of the plan in force over the steps of a run.
fn staircase(history: &RunHistory, of: &dyn Fn(&PlannedPeak) -> u64) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for plan in &history.plans {
        let value = of(plan) as f64;
        match points.last().copied() {
            Some(last) if last.value == value => continue,
            Some(last) => points.push(Point { value: last.value, ..plan.at }),
            None => {}
        }
        points.push(Point { value, ..plan.at });
    }
    let end = history.curves.get(quantity::RAM).and_then(|curve| curve.last());
    if let (Some(end), Some(last)) = (end, points.last().copied()) {
        points.push(Point { value: last.value, ..end });
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_titles() {
        let titles = ["accuracy", "balanced_accuracy", "f1_macro", "rmse", "roc_auc", ""].map(heading);
        assert_eq!(titles, ["Accuracy", "Balanced accuracy", "F1 macro", "RMSE", "ROC AUC", ""]);
    }
}
