//! Renders the verification of a job for people.

use super::plan::split_text;
use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::base::units::counted;
use crate::planner::MemoryPlan;
use crate::train::verify::{MaxDifference, VariantResult, VerifyReport};

/// The lines before the verification: how the job runs, and what cannot be varied.
pub fn header_lines(plan: &MemoryPlan, notes: &[String], display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let recomputed = match plan.chosen.recompute {
        0 => String::new(),
        n => format!(", {} recomputed", counted(n as u64, "block")),
    };
    let first = format!("{} as planned: {}{recomputed}", paint.bold("verify"), split_text(plan));
    std::iter::once(first)
        .chain(notes.iter().map(|note| format!("{} {note}", paint.yellow("note  "))))
        .collect()
}

/// The table of all variants, and the verdict.
pub fn lines(report: &VerifyReport, display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let t = &report.tolerance;
    let mut rows =
        vec![["variant", "losses", "gradients", "weights", "samples", ""].map(String::from).to_vec()];
    let cell = |max: &MaxDifference| match max.difference {
        0.0 => "equal".to_owned(),
        difference => match (&max.parameter, display.verbosity >= Verbosity::Verbose) {
            (Some(parameter), true) => format!("{difference:.1e} {parameter}"),
            _ => format!("{difference:.1e}"),
        },
    };
    for variant in &report.variants {
        let verdict = match (variant.passed, variant.exact) {
            (true, true) => paint.green("bitwise equal"),
            (true, false) => paint.green("within tolerance"),
            (false, _) => paint.red("DIFFERS"),
        };
        let samples = if variant.samples_digest == report.samples_digest { "same" } else { "DIFFER" };
        let cells = [&variant.losses, &variant.gradients, &variant.weights].map(cell);
        rows.push([&[variant.name.clone()][..], &cells, &[samples.to_owned(), verdict]].concat());
    }
    let mut lines = text::table("<>>><<", 0, &rows);
    lines.push(String::new());
    lines.push(format!(
        "{} of {}, digest {}; tolerance: losses {:.0e}, gradients {:.0e}, weights {:.0e}",
        counted(report.updates, "update"),
        counted(report.samples_per_update as u64, "sample"),
        report.samples_digest,
        t.losses,
        t.gradients,
        t.weights
    ));
    let wider = |variant: &&VariantResult| !variant.exact && variant.tolerance != report.tolerance;
    lines.extend(report.variants.iter().filter(wider).map(|VariantResult { name, tolerance: t, .. }| {
        format!(
            "tolerance of `{name}`: losses {:.0e}, gradients {:.0e}, weights {:.0e}, as this job amplifies rounding",
            t.losses, t.gradients, t.weights
        )
    }));
    lines
}

/// The first failed variant, as an error message.
pub fn failure_message(report: &VerifyReport) -> Option<String> {
    let variant = report.variants.iter().find(|variant| !variant.passed)?;
    Some(format!("`{}` is not the same experiment: {}", variant.name, describe_differences(variant, report)))
}

fn describe_differences(variant: &VariantResult, report: &VerifyReport) -> String {
    if variant.samples_digest != report.samples_digest {
        return format!(
            "its samples differ: expected digest {1}, got {0}",
            variant.samples_digest, report.samples_digest
        );
    }
    let limits = &variant.tolerance;
    let kinds = [
        ("weights", &variant.weights, limits.weights),
        ("gradients", &variant.gradients, limits.gradients),
        ("losses", &variant.losses, limits.losses),
    ];
    let describe = |(kind, max, limit): &(&str, &MaxDifference, f64)| {
        (max.difference > *limit).then(|| {
            let of = max.parameter.as_ref().map_or(String::new(), |name| format!(" of `{name}`"));
            let difference = max.difference;
            format!(
                "the {kind}{of} differ by {difference:.1e} at update {}, more than {limit:.0e}",
                max.update
            )
        })
    };
    kinds.iter().filter_map(describe).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::execution_plan::BatchSplit;
    use crate::train::verify::Tolerance;

    const TOLERANCE: Tolerance = Tolerance { losses: 1e-5, gradients: 1e-3, weights: 1e-3 };

    fn report() -> VerifyReport {
        let max =
            |difference: f64| MaxDifference { difference, update: 2, parameter: Some("fc.weight".into()) };
        let variant = |name: &str, exact, difference: f64, digest: &str| VariantResult {
            name: name.into(),
            micro_batch: 4,
            accumulation_steps: 2,
            recompute: 0,
            exact,
            losses: MaxDifference::default(),
            gradients: max(difference),
            weights: MaxDifference::default(),
            tolerance: if exact {
                Tolerance { losses: 0.0, gradients: 0.0, weights: 0.0 }
            } else {
                TOLERANCE
            },
            samples_digest: digest.into(),
            passed: digest == "00" && difference <= if exact { 0.0 } else { 1e-3 },
        };
        VerifyReport {
            passed: false,
            updates: 4,
            samples_per_update: 8,
            reference: BatchSplit { micro_batch: 8, accumulation_steps: 1 },
            losses: vec![1.0; 4],
            samples_digest: "00".into(),
            tolerance: TOLERANCE,
            notes: Vec::new(),
            variants: vec![
                variant("resumed", true, 0.0, "00"),
                variant("4 x 2", false, 2.5e-7, "00"),
                variant("2 x 4", false, 0.25, "00"),
                variant("recomputed", true, 1e-9, "00"),
                variant("one reader", true, 0.0, "01"),
            ],
        }
    }

    #[test]
    fn the_variant_the_parameter_and_the_update_are_named() {
        let mut report = report();
        let messages = std::iter::from_fn(|| {
            let message = failure_message(&report)?;
            let failed = report.variants.iter().position(|variant| !variant.passed)?;
            report.variants.remove(failed);
            Some(message)
        });
        assert_eq!(
            messages.collect::<Vec<_>>(),
            [
                "`2 x 4` is not the same experiment: \
                 the gradients of `fc.weight` differ by 2.5e-1 at update 2, more than 1e-3",
                "`recomputed` is not the same experiment: \
                 the gradients of `fc.weight` differ by 1.0e-9 at update 2, more than 0e0",
                "`one reader` is not the same experiment: its samples differ: expected digest 00, got 01",
            ]
        );
    }

    #[test]
    fn one_line_per_variant() {
        let shown = lines(&report(), DisplayOptions::default());
        assert_eq!(shown[0], "variant     losses  gradients  weights  samples");
        assert_eq!(shown[2], "4 x 2        equal     2.5e-7    equal  same     within tolerance");
        assert_eq!(shown[3], "2 x 4        equal     2.5e-1    equal  same     DIFFERS");
        assert_eq!(shown[5], "one reader   equal      equal    equal  DIFFER   DIFFERS");
        let named =
            lines(&report(), DisplayOptions { verbosity: Verbosity::Verbose, ..DisplayOptions::default() });
        assert!(named[3].contains("2.5e-1 fc.weight"), "{}", named[3]);
    }
}
