//! `report.html`: one or several runs as a page that needs no network and, but for hovering and zooming, no script.
//!
//! Takes thinned histories and writes the page chart by chart, so that only one is in memory at a time.

pub(super) mod chart;
pub(super) mod charts;
mod evaluation;
mod icicle;
mod memory_snapshots;
mod plot;
mod stacked_area;

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::runs::{job_differences, result_differences};
use super::text;
use crate::base::MemorySpace;
use crate::base::units::{counted, format_count};
use crate::history::{HistoryError, RunHistory, RunRecord};
use crate::inference::generate::FinishReason;
use crate::inference::generate::job_prompts::{GeneratedText, GeneratedTexts};
use crate::planner::plan::{CandidateSummary, PlanVerdict};
use crate::planner::{MemoryPlan, ladder};
use crate::train::evaluation_file::EvaluationFile;

/// Buckets of all curves of a quantity together, and of one at least: what keeps a page small.
const MAX_BUCKETS: usize = 300;
const MIN_BUCKETS: usize = 40;
/// Rows of the tables of execution plans and of allocations.
const MAX_ROWS: usize = 100;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Reads the runs of a page. `None` if that takes longer than `limit`.
pub fn read(
    roots: &[impl AsRef<Path>],
    limit: Option<Duration>,
) -> Result<Option<Vec<RunHistory>>, HistoryError> {
    let buckets = (MAX_BUCKETS / roots.len().max(1)).max(MIN_BUCKETS);
    roots.iter().map(|root| RunHistory::read(root.as_ref(), buckets, limit)).collect()
}

/// Writes the page completely or not at all, and returns its size in bytes.
pub fn write_file(path: &Path, runs: &[RunHistory]) -> io::Result<u64> {
    let temporary = path.with_added_extension("tmp");
    let write_page = || {
        let mut out = BufWriter::new(fs::File::create(&temporary)?);
        write(&mut out, runs)?;
        let file = out.into_inner()?;
        fs::rename(&temporary, path)?;
        Ok(file.metadata()?.len())
    };
    write_page().inspect_err(|_| drop(fs::remove_file(&temporary)))
}

fn write(out: &mut impl Write, runs: &[RunHistory]) -> io::Result<()> {
    let names: Vec<String> = runs.iter().map(|run| run.record.name()).collect();
    let mut distinct = names.clone();
    distinct.dedup();
    let title = escape(&distinct.join(", "));
    write!(
        out,
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\
         <meta name=viewport content=\"width=device-width,initial-scale=1\">\
         <meta name=generator content=\"trainer {}\"><title>{title}</title>\n<style>\n{STYLE}</style></head>\n<body>\n\
         {}<header><h1>{title}</h1>\n",
        env!("CARGO_PKG_VERSION"),
        markers(runs.len())
    )?;
    for (at, run) in runs.iter().enumerate() {
        out.write_all(run_header(at, runs.len(), run).as_bytes())?;
    }
    out.write_all(b"</header>\n")?;
    out.write_all(CONTROLS.as_bytes())?;
    section(out, "Loss and metrics", charts::metrics(runs))?;
    for (at, run) in runs.iter().enumerate() {
        let file = EvaluationFile::read(&run.record.folder.evaluation()).unwrap_or_default();
        out.write_all(evaluation::html(&of_run("Evaluation", at, runs.len()), &file)?.as_bytes())?;
    }
    for (at, run) in runs.iter().enumerate() {
        if let Some(generated) = &run.generated {
            let title = of_run("Generated text", at, runs.len());
            out.write_all(generated_section(&title, generated).as_bytes())?;
        }
    }
    section(out, "Memory", charts::memory(runs))?;
    section(out, "Training", charts::training(runs))?;
    if runs.len() > 1 {
        writeln!(out, "<section><h2>What differs</h2>{}</section>", differences_table(runs))?;
    }
    for (at, run) in runs.iter().enumerate() {
        out.write_all(plan_section(at, runs.len(), run).as_bytes())?;
        out.write_all(post_mortem(at, runs.len(), &run.record).as_bytes())?;
        let snapshots = memory_snapshots::html(&run.record.folder)?;
        if !snapshots.is_empty() {
            let title = escape(&of_run("Who held the memory", at, runs.len()));
            writeln!(out, "<section><h2>{title}</h2>{snapshots}</section>")?;
        }
    }
    for (at, run) in runs.iter().enumerate() {
        let job = fs::read_to_string(run.record.folder.job()).unwrap_or_default();
        if !job.is_empty() {
            let open = if runs.len() == 1 { " open" } else { "" };
            writeln!(
                out,
                "<details{open}><summary>{}</summary><pre>{}</pre></details>",
                escape(&of_run("Resolved job", at, runs.len())),
                escape(&job)
            )?;
        }
    }
    write!(out, "<div id=tip role=status hidden></div>\n<script>\n{SCRIPT}</script></body></html>\n")
}

const CONTROLS: &str = "<form class=controls><fieldset><legend>Over</legend>\
    <label><input type=radio name=axis value=step checked> steps</label>\
    <label><input type=radio name=axis value=samples> samples</label>\
    <label><input type=radio name=axis value=time> time</label></fieldset>\
    <label>Smoothing <input type=range name=smooth min=0 max=0.99 step=0.01 value=0></label>\
    <span class=hint>Drag across a chart to zoom, double-click to reset.</span></form>\n";

/// Colours of the stylesheet; further runs repeat them.
const COLOURS: usize = 7;

/// A marker per colour: shapes differ, so that none needs it.
fn markers(runs: usize) -> String {
    let shapes =
        ["M1 5a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M1 1h8v8h-8z", "M5 0l5 9h-10z", "M5 0l5 5l-5 5l-5-5z"];
    let marker = |at: usize| {
        format!(
            "<marker id=m{at} class=c{at} viewBox=\"0 0 10 10\" refX=5 refY=5 markerWidth=12 markerHeight=12 \
             markerUnits=userSpaceOnUse><path d=\"{}\"/></marker>",
            shapes[at % shapes.len()]
        )
    };
    let style =
        |at: usize| format!(".c{at}{{--c:var(--colour{})}}.evals.c{at}{{marker:url(#m{at})}}", at % COLOURS);
    let colours = runs.max(COLOURS);
    let (markers, styles): (String, String) =
        ((0..colours).map(marker).collect(), (0..colours).map(style).collect());
    format!("<svg class=defs aria-hidden=true><defs>{markers}</defs></svg><style>{styles}</style>\n")
}

/// `Plan`, or `Plan of A` if there are several runs.
fn of_run(what: &str, run: usize, runs: usize) -> String {
    let letter = charts::letter(run, runs);
    if letter.is_empty() { what.into() } else { format!("{what} of {letter}") }
}

/// How a run ended, and its numbers.
fn run_header(at: usize, runs: usize, run: &RunHistory) -> String {
    let (record, summary) = (&run.record, &run.record.summary);
    let toggle = match runs {
        1 => String::new(),
        _ => format!(
            "<label class=\"run c{at}\"><input type=checkbox data-run={at} checked> <b>{}</b></label> ",
            charts::letter(at, runs)
        ),
    };
    let mut facts = vec![record.folder.root.display().to_string(), summary.device.clone()];
    if summary.parameters > 0 {
        facts.push(counted(summary.parameters, "parameter"));
    }
    if summary.elapsed_s > 0.0 && summary.samples > 0 {
        let rate = format_count((summary.samples as f64 / summary.elapsed_s).round() as u64);
        facts.push(format!(
            "{rate} samples/s, {} waiting for data",
            text::percent(summary.data_wait_s, summary.elapsed_s)
        ));
    }
    let (measured, planned) = (summary.measured_peak_bytes, summary.planned_peak_bytes);
    if measured.vram > 0 {
        facts.push(format!(
            "peak {} vram, {} planned",
            text::bytes(measured.vram),
            text::bytes(planned.vram)
        ));
    }
    let ram = measured.ram.max(summary.resident_peak_bytes);
    if ram > 0 {
        facts.push(format!("peak {} ram, {} planned", text::bytes(ram), text::bytes(planned.ram)));
    }
    if !run.version.is_empty() {
        facts.push(format!("trainer {}", run.version));
    }
    let warnings: String =
        record.warnings().iter().map(|what| format!("<p class=warning>{}.</p>", escape(what))).collect();
    let facts: Vec<String> = facts.iter().filter(|fact| !fact.is_empty()).map(|fact| escape(fact)).collect();
    format!(
        "<p class=ended>{toggle}{}</p><p class=facts>{}</p>{warnings}\n",
        escape(&record.sentence()),
        facts.join(" · "),
    )
}

fn section(out: &mut impl Write, title: &str, charts: Vec<chart::Chart>) -> io::Result<()> {
    if charts.is_empty() {
        return Ok(());
    }
    writeln!(out, "<section><h2>{title}</h2><div class=charts>")?;
    for chart in charts {
        out.write_all(chart.html()?.as_bytes())?;
    }
    out.write_all(b"</div></section>\n")
}

/// A table; the first row is its heading, the first column names its rows.
fn table(rows: &[Vec<String>]) -> String {
    let cells = |row: &Vec<String>, tag: &str| -> String {
        row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
    };
    let Some((head, body)) = rows.split_first() else { return String::new() };
    let body: String = body.iter().map(|row| format!("<tr>{}</tr>\n", cells(row, "td"))).collect();
    format!(
        "<div class=scroll><table><thead><tr>{}</tr></thead><tbody>\n{body}</tbody></table></div>",
        cells(head, "th")
    )
}

/// How the model continues the prompts of its job.
fn generated_section(title: &str, generated: &GeneratedTexts) -> String {
    let step = format_count(generated.step);
    let body = match &generated.error {
        Some(error) => format!("<p class=warning>Nothing was generated: {}.</p>", escape(error)),
        None => {
            let one = |one: &GeneratedText| {
                let end = match one.finish {
                    FinishReason::MaxTokens => "…",
                    FinishReason::Context => "… (the context is full)",
                    FinishReason::EndToken | FinishReason::Stopped => "",
                };
                format!(
                    "<pre class=generated><b>{}</b>{}<i>{end}</i></pre>\n",
                    escape(&one.prompt),
                    escape(&one.text)
                )
            };
            let texts: String = generated.texts.iter().map(one).collect();
            let tokens = counted(generated.max_tokens as u64, "token");
            format!(
                "<p class=note>Prompts of <code>eval.prompts</code> in bold, each continued by the most probable \
                 tokens, {tokens} at most.</p>{texts}"
            )
        }
    };
    format!("<section><h2>{}: after step {step}</h2>{body}</section>\n", escape(title))
}

/// What differs in the jobs and in the results, a column per run.
fn differences_table(runs: &[RunHistory]) -> String {
    let records: Vec<RunRecord> = runs.iter().map(|run| run.record.clone()).collect();
    let heading = |what: &str| -> Vec<String> {
        std::iter::once(what.to_owned())
            .chain((0..runs.len()).map(|at| charts::letter(at, runs.len())))
            .collect()
    };
    let mut jobs = vec![heading("job")];
    jobs.extend(job_differences(&records).into_iter().map(|row| {
        let values = row.values.into_iter().map(|value| value.unwrap_or_else(|| "-".into()));
        std::iter::once(row.key).chain(values).collect()
    }));
    let mut results = vec![heading("result")];
    results.extend(
        result_differences(&records)
            .into_iter()
            .map(|row| std::iter::once(row.name).chain(row.texts).collect()),
    );
    let jobs = if jobs.len() > 1 { table(&jobs) } else { "<p>The jobs are the same.</p>".into() };
    format!("{}{}", table(&results), jobs)
}

/// Where the memory is at the peak, how the job is executed, and what else was considered.
fn plan_section(at: usize, runs: usize, run: &RunHistory) -> String {
    let Some(plan) = &run.plan else { return String::new() };
    let lines = super::plan::summary_lines(plan).join("\n");
    let phase = plan.peak.phase.to_string();
    format!(
        "<section><h2>{}</h2><p>What is live at the peak, in {phase}; click into a box, and on the top one to go \
         back.</p>\n{}<h3>Phases</h3>{}<h3>Execution plan</h3><pre>{}</pre>{}</section>\n",
        escape(&of_run("Memory at the planned peak", at, runs)),
        icicle::html(plan),
        phases(plan),
        escape(&lines),
        candidates(plan)
    )
}

/// The peak of each phase as bars.
fn phases(plan: &MemoryPlan) -> String {
    let space = if plan.peak.vram_bytes > 0 { MemorySpace::Vram } else { MemorySpace::Ram };
    let highest = plan.phases.iter().map(|phase| phase.bytes_in(space)).max().unwrap_or(1).max(1);
    let bar = |phase: &crate::planner::plan::PhasePeak| {
        let bytes = phase.bytes_in(space);
        format!(
            "<tr><td>{}</td><td>{}</td><td class=bar><i style=\"width:{:.1}%\"></i></td></tr>\n",
            phase.name,
            text::bytes(bytes),
            100.0 * bytes as f64 / highest as f64
        )
    };
    let rows: String = plan.phases.iter().map(bar).collect();
    format!("<table class=phases><tbody>\n{rows}</tbody></table>")
}

fn candidates(plan: &MemoryPlan) -> String {
    if plan.candidates.is_empty() {
        return String::new();
    }
    let on_device = plan.budget.vram_bytes > 0;
    let chosen = (plan.verdict != PlanVerdict::DoesNotFit).then(|| ladder::describe_chosen(plan));
    let mut rows = vec![["considered", "ram", "time", "measured", ""].map(str::to_owned).to_vec()];
    rows[0].splice(1..1, on_device.then(|| "vram".to_owned()));
    let row = |candidate: &CandidateSummary| {
        let change = &candidate.change;
        let mut row = vec![if change.is_empty() { "as written".into() } else { change.clone() }];
        row.extend(on_device.then(|| text::bytes(candidate.vram_bytes)));
        row.push(text::bytes(candidate.ram_bytes));
        row.push(format!("x {:.2}", candidate.relative_time));
        row.push(candidate.measured_time.map_or_else(String::new, |time| format!("x {time:.2}")));
        row.push(match candidate.fits {
            true if chosen.as_ref() == Some(change) => "chosen".into(),
            true => "fits".into(),
            false => "too large".into(),
        });
        row
    };
    rows.extend(plan.candidates.iter().take(MAX_ROWS).map(row));
    let more = plan.candidates.len().saturating_sub(MAX_ROWS);
    let more = if more > 0 { format!("<p>and {more} more</p>") } else { String::new() };
    format!("<h3>Alternatives</h3>{}{more}", table(&rows))
}

/// `oom.json` of a run that ran out of memory for good.
fn post_mortem(at: usize, runs: usize, run: &RunRecord) -> String {
    let text = fs::read_to_string(run.folder.oom()).unwrap_or_default();
    let Ok(post) = serde_json::from_str::<Value>(&text) else { return String::new() };
    let field = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let bytes = |value: &Value| text::bytes(value["bytes"].as_u64().unwrap_or(0));
    let empty = Vec::new();
    let live = post["live"].as_array().unwrap_or(&empty);
    let mut rows = vec![["held by", "role", "bytes"].map(str::to_owned).to_vec()];
    rows.extend(
        live.iter().take(MAX_ROWS).map(|held| vec![field(held, "name"), field(held, "role"), bytes(held)]),
    );
    format!(
        "<section><h2>{}</h2><p>{}</p>{}</section>\n",
        escape(&of_run("Out of memory: who held what", at, runs)),
        escape(&field(&post, "error")),
        table(&rows)
    )
}

/// Text in HTML, or in a quoted attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// JSON inside a `script` element, which no `</script>` in a text can end.
fn json_text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::event::{Event, EventRecord};
    use crate::report::fixtures;

    fn write_run(root: &Path, records: &[EventRecord]) {
        fs::create_dir_all(root).unwrap();
        let lines: Vec<String> = records.iter().map(|r| serde_json::to_string(r).unwrap() + "\n").collect();
        fs::write(root.join("events.jsonl"), lines.concat()).unwrap();
    }

    fn page(roots: &[&Path]) -> String {
        let mut out = Vec::new();
        write(&mut out, &read(roots, None).unwrap().unwrap()).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_page_has_every_part_and_needs_no_network() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = fixtures::run();
        let event =
            Event::Shrunk { step: 2, change: "<micro>".into(), micro_batch: 25, accumulation_steps: 4 };
        records.insert(6, EventRecord { t: 2.55, event });
        write_run(folder.path(), &records);
        fs::write(folder.path().join("job.toml"), "name = \"shapes\"\n[a]\nb = \"</pre>\"\n").unwrap();
        let page = page(&[folder.path()]);
        for part in [
            "shapes finished after 6 steps",
            "<figcaption>Loss</figcaption>",
            "<figcaption>Accuracy</figcaption>",
            "<figcaption>Host memory</figcaption>",
            "<figcaption>Learning rate</figcaption>",
            "&lt;micro&gt;",
            "activations: 132 MiB",
            "<td>as written</td>",
            "b = &quot;&lt;/pre&gt;&quot;",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
        assert!(!page.contains("<figcaption>Device memory") && !page.contains("What differs"));
        let outside = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!outside.contains("http:") && !outside.contains("https:") && !outside.contains("src="));
    }

    #[test]
    fn several_runs_are_overlaid_and_compared() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        write_run(&a, &fixtures::run());
        write_run(&b, &fixtures::run()[..8]);
        let page = page(&[&a, &b]);
        assert!(
            page.contains("What differs") && page.contains("<td>state</td><td>finished</td><td>killed</td>")
        );
        assert!(page.contains("class=\"s c0 updates\"") && page.contains("class=\"s c1 updates\""));
        assert!(page.contains("A update") && page.contains("B valid"));
    }

    /// A page stays small however long the run was.
    #[test]
    fn a_hundred_thousand_steps_are_a_small_page() {
        let folder = tempfile::tempdir().unwrap();
        let mut records = fixtures::run()[..2].to_vec();
        records.extend((1..=100_000).map(|step| fixtures::step(step as f64, step)));
        write_run(folder.path(), &records);
        let page = page(&[folder.path()]);
        assert!(page.len() < 700_000, "{}", page.len());
    }
}
