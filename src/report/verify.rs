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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::plan::Split;
    use crate::train::verify::Tolerance;

    fn report() -> Report {
        let apart = |difference: f64| Apart { difference, update: 2, parameter: Some("fc.weight".into()) };
        let way = |name: &str, exact, difference: f64, digest: &str| Checked {
            name: name.into(),
            micro_batch: 4,
            accumulation_steps: 2,
            recompute: 0,
            exact,
            losses: Apart::default(),
            gradients: apart(difference),
            weights: Apart::default(),
            samples_digest: digest.into(),
            passed: digest == "00" && difference <= if exact { 0.0 } else { 1e-3 },
        };
        Report {
            passed: false,
            updates: 4,
            samples_per_update: 8,
            reference: Split { micro_batch: 8, accumulation_steps: 1 },
            losses: vec![1.0; 4],
            samples_digest: "00".into(),
            tolerance: Tolerance { losses: 1e-5, gradients: 1e-3, weights: 1e-3 },
            notes: Vec::new(),
            ways: vec![
                way("resumed", true, 0.0, "00"),
                way("4 x 2", false, 2.5e-7, "00"),
                way("2 x 4", false, 0.25, "00"),
                way("recomputed", true, 1e-9, "00"),
                way("one reader", true, 0.0, "01"),
            ],
        }
    }

    #[test]
    fn the_way_the_parameter_and_the_update_are_named() {
        let mut report = report();
        let complaints = std::iter::from_fn(|| {
            let said = complaint(&report)?;
            let failed = report.ways.iter().position(|way| !way.passed)?;
            report.ways.remove(failed);
            Some(said)
        });
        assert_eq!(
            complaints.collect::<Vec<_>>(),
            [
                "`2 x 4` is not the same experiment: the gradients of `fc.weight` differ by 2.5e-1 at update 2, more than 1e-3",
                "`recomputed` is not the same experiment: the gradients of `fc.weight` differ by 1.0e-9 at update 2, more than 0e0",
                "`one reader` is not the same experiment: it saw other samples (01 and not 00)",
            ]
        );
    }

    #[test]
    fn a_line_a_way() {
        let shown = lines(&report(), Look::default());
        assert_eq!(shown[0], "way         losses  gradients  weights  samples");
        assert_eq!(shown[2], "4 x 2        equal     2.5e-7    equal  same     within tolerance");
        assert_eq!(shown[3], "2 x 4        equal     2.5e-1    equal  same     DIFFERS");
        assert_eq!(shown[5], "one reader   equal      equal    equal  OTHERS   DIFFERS");
        let named = lines(&report(), Look { verbosity: Verbosity::Verbose, ..Look::default() });
        assert!(named[3].contains("2.5e-1 fc.weight"), "{}", named[3]);
    }
}
