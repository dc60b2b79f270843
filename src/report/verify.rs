//! A proof of a job, for people.

use super::text::{self, Paint};
use super::{Look, Verbosity};
use crate::memory::Plan;
use crate::train::verify::{Apart, Checked, Report};

/// What is said before a proof begins: how the job is run, and what cannot be varied.
pub fn before(plan: &Plan, notes: &[String], look: Look) -> Vec<String> {
    let paint = Paint { color: look.color };
    let chosen = &plan.chosen;
    let first = format!(
        "{} as planned: {} x {} = {} samples an update{}",
        paint.bold("verify"),
        chosen.micro_batch,
        chosen.accumulation_steps,
        plan.samples_per_update,
        if chosen.recompute > 0 {
            format!(", {} blocks recomputed", chosen.recompute)
        } else {
            String::new()
        },
    );
    std::iter::once(first)
        .chain(notes.iter().map(|note| format!("{} {note}", paint.yellow("note  "))))
        .collect()
}

/// The table of all ways, and the verdict.
pub fn lines(report: &Report, look: Look) -> Vec<String> {
    let paint = Paint { color: look.color };
    let t = &report.tolerance;
    let mut rows = vec![["way", "losses", "gradients", "weights", "samples", ""].map(String::from).to_vec()];
    let cell = |apart: &Apart| match apart.difference {
        0.0 => "equal".to_owned(),
        difference => match (&apart.parameter, look.verbosity >= Verbosity::Verbose) {
            (Some(parameter), true) => format!("{difference:.1e} {parameter}"),
            _ => format!("{difference:.1e}"),
        },
    };
    for way in &report.ways {
        let verdict = match (way.passed, way.exact) {
            (true, true) => paint.green("equal to the bit"),
            (true, false) => paint.green("within tolerance"),
            (false, _) => paint.red("DIFFERS"),
        };
        let samples = if way.samples_digest == report.samples_digest { "same" } else { "OTHERS" };
        let cells = [&way.losses, &way.gradients, &way.weights].map(cell);
        rows.push([&[way.name.clone()][..], &cells, &[samples.to_owned(), verdict]].concat());
    }
    let mut lines = text::table("<>>><<", 0, &rows);
    lines.push(String::new());
    lines.push(format!(
        "{} updates of {} samples, digest {}; tolerance: losses {:.0e}, gradients {:.0e}, weights {:.0e}",
        report.updates, report.samples_per_update, report.samples_digest, t.losses, t.gradients, t.weights
    ));
    lines
}

/// What failed, as an error says it.
pub fn complaint(report: &Report) -> Option<String> {
    let way = report.ways.iter().find(|way| !way.passed)?;
    Some(format!("`{}` is not the same experiment: {}", way.name, what(way, report)))
}

fn what(way: &Checked, report: &Report) -> String {
    if way.samples_digest != report.samples_digest {
        return format!("it saw other samples ({} and not {})", way.samples_digest, report.samples_digest);
    }
    let t = &report.tolerance;
    let most = |loose: f64| if way.exact { 0.0 } else { loose };
    let kinds = [
        ("weights", &way.weights, most(t.weights)),
        ("gradients", &way.gradients, most(t.gradients)),
        ("losses", &way.losses, most(t.losses)),
    ];
    let told = |(kind, apart, most): &(&str, &Apart, f64)| {
        (apart.difference > *most).then(|| {
            let of = apart.parameter.as_ref().map_or(String::new(), |name| format!(" of `{name}`"));
            let difference = apart.difference;
            format!(
                "the {kind}{of} differ by {difference:.1e} at update {}, more than {most:.0e}",
                apart.update
            )
        })
    };
    kinds.iter().filter_map(told).collect::<Vec<_>>().join("; ")
}
