//! Lists and compares runs: tables for people, JSON for programs.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::text;
use super::text::AnsiStyle;
use crate::base::units::{counted, format_count};
use crate::history::{Difference, RecordedState, RunRecord, differences};

/// Differences that a row of the list shows.
const MAX_LISTED_DIFFERENCES: usize = 4;

/// Keys that are no part of the experiment: the name is shown anyway, and what is logged changes nothing.
fn is_experiment(key: &str) -> bool {
    key != "name" && !key.starts_with("log.")
}

/// The values of each run's job that differ from those of another run of the same name; none of a job that cannot be
/// read.
fn differing_values(runs: &[RunRecord]) -> Vec<Vec<(String, String)>> {
    let mut by_name = BTreeMap::<String, Vec<usize>>::new();
    for (at, run) in runs.iter().enumerate().filter(|(_, run)| !run.job.is_empty()) {
        by_name.entry(run.name()).or_default().push(at);
    }
    let mut values = vec![Vec::new(); runs.len()];
    for group in by_name.values() {
        let jobs: Vec<_> = group.iter().map(|at| &runs[*at].job).collect();
        for difference in differences(&jobs).into_iter().filter(|row| is_experiment(&row.key)) {
            for (at, value) in group.iter().zip(difference.values) {
                values[*at].push((difference.key.clone(), value.unwrap_or_else(|| "absent".into())));
            }
        }
    }
    values
}

fn paint_state(state: RecordedState, paint: AnsiStyle) -> String {
    let text = state.to_string();
    match state {
        RecordedState::Finished | RecordedState::Running => paint.green(&text),
        RecordedState::Diverged | RecordedState::Failed | RecordedState::Killed => paint.red(&text),
        RecordedState::Interrupted | RecordedState::Stopped => paint.yellow(&text),
    }
}

/// Peak memory of a run: of the device if it used one, otherwise of the host.
fn peak_text(run: &RunRecord) -> String {
    let (peak, resident) = (run.summary.measured_peak_bytes, run.summary.resident_peak_bytes);
    match (peak.vram, peak.ram.max(resident)) {
        (0, 0) => "-".into(),
        (0, ram) => text::bytes(ram),
        (vram, _) => format!("{} vram", text::bytes(vram)),
    }
}

/// `512`, or `512 of 940` of a run that has not made all its steps.
fn steps_text(run: &RunRecord) -> String {
    let (steps, total) = (run.summary.steps, run.summary.total_steps);
    let done = format_count(steps);
    if steps < total { format!("{done} of {}", format_count(total)) } else { done }
}

/// A value of a job without the quotes of a string.
fn plain(value: &str) -> &str {
    value.trim_matches('"')
}

/// The list of runs, with a heading.
pub fn list_lines(runs: &[RunRecord], color: bool) -> Vec<String> {
    let paint = AnsiStyle { color };
    let heading = ["run", "state", "best", "steps", "time", "peak", "differs in"];
    let mut rows = vec![heading.map(|head| paint.dim(head)).to_vec()];
    for (run, values) in runs.iter().zip(differing_values(runs)) {
        let best = run.summary.best.as_ref();
        let best = best.map_or("-".into(), |best| format!("{} {}", best.metric, text::number(best.value)));
        let mut differs: Vec<String> = values
            .iter()
            .take(MAX_LISTED_DIFFERENCES)
            .map(|(key, value)| format!("{key}={}", plain(value)))
            .collect();
        if values.len() > MAX_LISTED_DIFFERENCES {
            differs.push(format!("and {} more", values.len() - MAX_LISTED_DIFFERENCES));
        }
        rows.push(vec![
            run.folder.root.display().to_string(),
            paint_state(run.state, paint),
            best,
            steps_text(run),
            text::duration(run.summary.elapsed_s),
            peak_text(run),
            differs.join(", "),
        ]);
    }
    text::table("<<<>>><", 0, &rows)
}

/// The list of runs as one document.
pub fn list_json(runs: &[RunRecord]) -> Value {
    let row = |(run, values): (&RunRecord, Vec<(String, String)>)| {
        let differs: Map<String, Value> =
            values.into_iter().map(|(key, value)| (key, job_value(Some(&value)))).collect();
        let summary = &run.summary;
        json!({
            "run": run.folder.root.display().to_string(),
            "name": run.name(),
            "state": run.state,
            "reason": summary.reason,
            "best": summary.best,
            "metrics": summary.metrics,
            "steps": summary.steps,
            "total_steps": summary.total_steps,
            "samples": summary.samples,
            "elapsed_s": summary.elapsed_s,
            "measured_peak_bytes": summary.measured_peak_bytes,
            "resident_peak_bytes": summary.resident_peak_bytes,
            "planned_peak_bytes": summary.planned_peak_bytes,
            "differs": differs,
            "skipped": run.skipped,
        })
    };
    runs.iter().zip(differing_values(runs)).map(row).collect()
}

/// The JSON of a job's value; `null` where a run lacks the key.
fn job_value(value: Option<&String>) -> Value {
    let absent = value.is_none_or(|value| value == "absent");
    if absent { Value::Null } else { value.and_then(|v| serde_json::from_str(v).ok()).unwrap_or_default() }
}

/// The keys of the jobs that differ.
pub fn job_differences(runs: &[RunRecord]) -> Vec<Difference> {
    differences(&runs.iter().map(|run| &run.job).collect::<Vec<_>>())
}

/// One result of several runs.
#[derive(Clone, Debug)]
pub struct ResultRow {
    pub name: String,
    /// One per run; `null` where it has none.
    pub values: Vec<Value>,
    /// The values for people.
    pub texts: Vec<String>,
}

/// The results that differ, in the order people read them.
pub fn result_differences(runs: &[RunRecord]) -> Vec<ResultRow> {
    let results: Vec<Vec<(String, Value, String)>> = runs.iter().map(results).collect();
    let mut names: Vec<&String> = Vec::new();
    for (name, ..) in results.iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let row = |name: &String| {
        let of = |run: &Vec<(String, Value, String)>| {
            let found = run.iter().find(|(known, ..)| known == name);
            found.map_or((Value::Null, "-".to_owned()), |(_, value, text)| (value.clone(), text.clone()))
        };
        let (values, texts) = results.iter().map(of).unzip();
        ResultRow { name: name.clone(), values, texts }
    };
    let differs = |row: &ResultRow| row.values.iter().any(|value| *value != row.values[0]);
    names.into_iter().map(row).filter(differs).collect()
}

/// Name, value and text of every result of a run.
fn results(run: &RunRecord) -> Vec<(String, Value, String)> {
    let summary = &run.summary;
    let mut out = vec![("state".to_owned(), json!(run.state), run.state.to_string())];
    if let Some(best) = &summary.best {
        let text = format!("{} at step {}", text::number(best.value), format_count(best.step));
        out.push((format!("best {}", best.metric), json!(best.value), text));
    }
    out.extend(summary.metrics.iter().map(|(name, x)| (name.clone(), json!(x), text::number(*x))));
    let rate = summary.samples as f64 / summary.elapsed_s;
    let (measured, planned) = (summary.measured_peak_bytes, summary.planned_peak_bytes);
    for (name, count) in
        [("steps", summary.steps), ("samples", summary.samples), ("parameters", summary.parameters)]
    {
        out.push((name.into(), json!(count), format_count(count)));
    }
    out.push(("time".into(), json!(summary.elapsed_s), text::duration(summary.elapsed_s)));
    if rate.is_finite() {
        out.push(("samples/s".into(), json!(rate), format_count(rate.round() as u64)));
    }
    let wait = text::percent(summary.data_wait_s, summary.elapsed_s);
    out.push(("data wait".into(), json!(summary.data_wait_s), wait));
    for (name, bytes) in [
        ("peak ram (heap)", measured.ram),
        ("peak ram (resident)", summary.resident_peak_bytes),
        ("planned ram", planned.ram),
        ("peak vram", measured.vram),
        ("planned vram", planned.vram),
    ] {
        out.push((name.into(), json!(bytes), text::bytes(bytes)));
    }
    for (name, count) in [
        ("out of memory", summary.ooms),
        ("shrunk", summary.shrunk),
        ("grown", summary.grown),
        ("restarted", summary.restarts),
        ("resumed", summary.resumes),
        ("bad records", summary.bad_records),
    ] {
        out.push((name.into(), json!(count), format_count(count)));
    }
    out
}

/// The comparison of several runs: a column each.
pub fn comparison_lines(runs: &[RunRecord], color: bool) -> Vec<String> {
    let paint = AnsiStyle { color };
    let folders = runs.iter().map(|run| paint.bold(&run.folder.root.display().to_string()));
    let mut rows = vec![std::iter::once(String::new()).chain(folders).collect::<Vec<_>>()];
    let (jobs, results) = (job_differences(runs), result_differences(runs));
    let no_difference = |is_empty: bool| is_empty.then(|| vec!["no difference".to_owned()]);
    rows.push(vec![paint.dim("job")]);
    rows.extend(no_difference(jobs.is_empty()));
    for Difference { key, values } in jobs {
        let text = |value: &Option<String>| value.as_deref().map_or("-", plain).to_owned();
        rows.push(std::iter::once(key).chain(values.iter().map(text)).collect());
    }
    rows.extend([vec![], vec![paint.dim("result")]]);
    rows.extend(no_difference(results.is_empty()));
    rows.extend(results.into_iter().map(|row| std::iter::once(row.name).chain(row.texts).collect()));
    text::table(&"<".repeat(runs.len() + 1), 0, &rows)
}

/// The comparison as one document.
pub fn comparison_json(runs: &[RunRecord]) -> Value {
    let job = |row: Difference| {
        let values: Vec<Value> = row.values.iter().map(|value| job_value(value.as_ref())).collect();
        json!({ "key": row.key, "values": values })
    };
    let result = |row: ResultRow| json!({ "name": row.name, "values": row.values });
    json!({
        "runs": runs.iter().map(|run| run.folder.root.display().to_string()).collect::<Vec<_>>(),
        "job": job_differences(runs).into_iter().map(job).collect::<Vec<_>>(),
        "results": result_differences(runs).into_iter().map(result).collect::<Vec<_>>(),
        "skipped": runs.iter().map(|run| &run.skipped).collect::<Vec<_>>(),
    })
}

/// What could not be read of the runs.
pub fn warnings(runs: &[RunRecord]) -> Vec<String> {
    let of_run = |run: &RunRecord| -> Vec<String> {
        let warning = |what: String| format!("warning: {}: {what}", run.folder.root.display());
        run.warnings().into_iter().map(warning).collect()
    };
    runs.iter().flat_map(of_run).collect()
}

/// `3 runs: 2 finished, 1 killed`.
pub fn count_line(runs: &[RunRecord]) -> String {
    let mut states = BTreeMap::<String, u64>::new();
    runs.iter().for_each(|run| *states.entry(run.state.to_string()).or_default() += 1);
    let states: Vec<String> =
        states.iter().map(|(state, n)| format!("{} {state}", format_count(*n))).collect();
    format!("{}: {}", counted(runs.len() as u64, "run"), states.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Summary;
    use crate::report::fixtures;

    fn run(root: &str, events: usize, job: &[(&str, &str)]) -> RunRecord {
        let mut summary = Summary::default();
        fixtures::run()[..events].iter().for_each(|record| summary.add(record));
        let mut run = RunRecord::new(root.into(), summary);
        run.job = job.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        run
    }

    fn runs() -> [RunRecord; 2] {
        [
            run("runs/a", 17, &[("optimizer.lr", "0.1"), ("seed", "7"), ("log.every_steps", "1")]),
            run("runs/b", 8, &[("optimizer.lr", "0.2"), ("seed", "7"), ("model.kind", "\"mlp\"")]),
        ]
    }

    #[test]
    fn a_list_has_a_row_per_run() {
        assert_eq!(
            list_lines(&runs(), false).join("\n"),
            "\
run     state     best                steps   time     peak  differs in
runs/a  finished  valid.loss 0.2500       6  9.0 s  209 MiB  model.kind=absent, optimizer.lr=0.1
runs/b  killed    valid.loss 0.5000  3 of 6  3.6 s  209 MiB  model.kind=mlp, optimizer.lr=0.2"
        );
        assert_eq!(count_line(&runs()), "2 runs: 1 finished, 1 killed");
        let json = list_json(&runs());
        assert_eq!(json[1]["state"], "killed");
        assert_eq!(json[1]["differs"], json!({ "model.kind": "mlp", "optimizer.lr": 0.2 }));
        assert_eq!(json[0]["best"]["value"], 0.25);
    }

    #[test]
    fn a_comparison_shows_only_what_differs() {
        let text = comparison_lines(&runs(), false).join("\n");
        assert_eq!(
            text,
            "                 runs/a            runs/b
job
log.every_steps  1                 -
model.kind       -                 mlp
optimizer.lr     0.1               0.2

result
state            finished          killed
best valid.loss  0.2500 at step 4  0.5000 at step 2
train.loss       0.1667            0.3333
valid.accuracy   0.7000            0.5000
valid.loss       0.3000            0.5000
steps            6                 3
samples          450               250
time             9.0 s             3.6 s
samples/s        50                69
data wait        0.9 %             0.8 %"
        );
        let same = || run("runs/a", 17, &[("seed", "7")]);
        let lines: Vec<String> = comparison_lines(&[same(), same()], false)
            .iter()
            .map(|line| line.trim_end().to_owned())
            .collect();
        assert_eq!(lines[1..], ["job", "no difference", "", "result", "no difference"]);
        let json = comparison_json(&runs());
        assert_eq!(json["job"][1], json!({ "key": "model.kind", "values": [null, "mlp"] }));
        assert_eq!(json["results"][0], json!({ "name": "state", "values": ["finished", "killed"] }));
    }
}
