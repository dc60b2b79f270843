//! What a page shows of the best evaluation of a run: confusion and calibration of classes, F1 of labels, residuals of
//! a regression. Numbers are in the text; colours repeat them.

use std::fmt::Write;
use std::io;

use serde_json::json;

use super::plot::{Axis, Bar, Plot};
use super::{escape, json_text, table};
use crate::base::units::{counted, format_count};
use crate::metrics::detail::{
    ClassificationDetail, ConfusedPair, MultiLabelDetail, Named, RegressionDetail, TargetDetail, TaskDetail,
};
use crate::report::text;
use crate::train::evaluation_file::{EvaluationFile, StepDetail};

/// Classes above which the cells of a matrix are small.
const DENSE: usize = 20;
/// Confused pairs that are listed beside a whole matrix.
const PAIRS_BESIDE_MATRIX: usize = 10;

/// The sections of a run, under a heading that begins with `title`.
pub fn html(title: &str, file: &EvaluationFile) -> io::Result<String> {
    let mut out = String::new();
    if let Some(best) = &file.best {
        let heading = format!("{title}: the best, after step {}", format_count(best.step));
        let _ = write!(out, "<section><h2>{}</h2>\n{}</section>\n", escape(&heading), detail(best)?);
    }
    if let Some(last) = &file.last {
        let heading = format!("{title}: the last, after step {}", format_count(last.step));
        // Not printed beside the best.
        let attribute = if file.best.is_none() { "open" } else { "class=last" };
        let heading = escape(&heading);
        let _ =
            write!(out, "<details {attribute}><summary>{heading}</summary>\n{}</details>\n", detail(last)?);
    }
    Ok(out)
}

fn detail(evaluation: &StepDetail) -> io::Result<String> {
    match &evaluation.detail {
        TaskDetail::Classification(detail) => classification(detail),
        TaskDetail::MultiLabel(detail) => Ok(multi_label(detail)),
        TaskDetail::Regression(detail) => regression(detail),
    }
}

fn classification(detail: &ClassificationDetail) -> io::Result<String> {
    let summary = format!(
        "{} of the validation set, accuracy {}, expected calibration error {}.",
        counted(detail.samples, "sample"),
        text::percent(detail.accuracy, 1.0),
        text::number(detail.calibration_error)
    );
    let confusion = match &detail.confusion {
        Some(matrix) => confusion_matrix(detail, matrix),
        None => format!(
            "<p class=note>A matrix of {} is not drawn.</p>",
            counted(detail.num_classes as u64, "class")
        ),
    };
    let listed = if detail.confusion.is_some() { PAIRS_BESIDE_MATRIX } else { detail.confused.len() };
    let listed = &detail.confused[..listed.min(detail.confused.len())];
    let mut pairs = vec![["true class", "predicted as", "samples"].map(str::to_owned).to_vec()];
    let row =
        |pair: &ConfusedPair| vec![pair.truth.clone(), pair.predicted.clone(), format_count(pair.samples)];
    pairs.extend(listed.iter().map(row));
    let pairs = match listed.is_empty() {
        true => "<p>No sample is confused with another class.</p>".to_owned(),
        false => {
            let open = if detail.confusion.is_none() { " open" } else { "" };
            let count = counted(listed.len() as u64, "most confused pair");
            format!("<details{open}><summary>The {count}</summary>{}</details>", table(&pairs))
        }
    };
    Ok(format!(
        "<p>{}</p>\n<h3>Confusion</h3>{confusion}{pairs}<h3>Calibration</h3><div class=charts>{}{}</div>\
         <h3>Classes</h3>{}{}",
        escape(&summary),
        reliability(detail)?,
        bins(detail),
        cut_note(detail.classes.len(), detail.num_classes, "class"),
        scores(
            "class",
            &detail.classes,
            |class| [class.precision, class.recall, class.f1],
            |class| class.samples
        )
    ))
}

/// Rows are true classes, columns predicted ones; a box to tick turns counts into percentages of the row.
fn confusion_matrix(detail: &ClassificationDetail, matrix: &[Vec<u64>]) -> String {
    let name = |i: usize| detail.classes.get(i).map_or_else(String::new, |class| escape(&class.name));
    let dense = if matrix.len() > DENSE { " dense" } else { "" };
    let mut out = format!(
        "<div class=\"confusion{dense}\"><p class=note>Rows are true classes, columns predicted ones. \
         <label><input type=checkbox> percent of the row</label></p><div class=scroll><table><thead><tr><th></th>",
    );
    for column in 0..matrix.len() {
        let _ = write!(out, "<th><span>{}</span></th>", name(column));
    }
    out.push_str("</tr></thead><tbody>\n");
    for (truth, row) in matrix.iter().enumerate() {
        let of_class = row.iter().sum::<u64>().max(1);
        let _ = write!(out, "<tr><th>{}</th>", name(truth));
        for (predicted, count) in row.iter().enumerate() {
            let class = if predicted == truth { " class=hit" } else { "" };
            let percent = (100.0 * *count as f64 / of_class as f64).round();
            let style = if *count > 0 { format!(" style=--p:{percent}") } else { String::new() };
            let _ = write!(out, "<td{class}{style}>{count}</td>");
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div></div>\n");
    out
}

fn reliability(detail: &ClassificationDetail) -> io::Result<String> {
    let width = 1.0 / detail.calibration.len().max(1) as f64;
    let filled = || detail.calibration.iter().enumerate().filter(|(_, bin)| bin.samples > 0);
    let bar = |(i, bin): (usize, &crate::metrics::classification::CalibrationBin)| Bar {
        from: i as f64 * width,
        to: (i + 1) as f64 * width,
        height: bin.accuracy,
    };
    Plot {
        title: "Reliability".into(),
        x: Axis { name: "confidence", range: (0.0, 1.0) },
        y: Axis { name: "accuracy", range: (0.0, 1.0) },
        bars: filled().map(bar).collect(),
        points: filled().map(|(_, bin)| (bin.confidence, bin.accuracy)).collect(),
        diagonal: true,
        note: "Accuracy of the predictions in each interval of confidence; a point is at their mean confidence. On \
               the dashed line, confidence and accuracy are equal."
            .into(),
        data: json_text(&detail.calibration),
    }
    .html()
}

fn bins(detail: &ClassificationDetail) -> String {
    let count = detail.calibration.len().max(1) as f64;
    let mut rows = vec![["confidence", "samples", "mean confidence", "accuracy"].map(str::to_owned).to_vec()];
    rows.extend(detail.calibration.iter().enumerate().filter(|(_, bin)| bin.samples > 0).map(|(i, bin)| {
        vec![
            format!("{:.2} to {:.2}", i as f64 / count, (i + 1) as f64 / count),
            format_count(bin.samples),
            format!("{:.3}", bin.confidence),
            format!("{:.3}", bin.accuracy),
        ]
    }));
    table(&rows)
}

fn multi_label(detail: &MultiLabelDetail) -> String {
    format!(
        "<p>{} of the validation set.</p>{}{}",
        counted(detail.samples, "sample"),
        cut_note(detail.labels.len(), detail.num_labels, "label"),
        scores(
            "label",
            &detail.labels,
            |label| [label.precision, label.recall, label.f1],
            |label| label.samples
        )
    )
}

/// What is left out of a list, if anything.
fn cut_note(listed: usize, all: usize, noun: &str) -> String {
    match listed < all {
        true => format!(
            "<p class=note>The {} with the lowest F1, of {}.</p>",
            counted(listed as u64, noun),
            format_count(all as u64)
        ),
        false => String::new(),
    }
}

/// Precision, recall and F1 of classes or labels, with a bar of the F1.
fn scores<T>(noun: &str, all: &[Named<T>], scores: fn(&T) -> [f64; 3], samples: fn(&T) -> u64) -> String {
    let mut out = format!(
        "<div class=scroll><table class=scores><thead><tr><th>{noun}</th><th>samples</th><th>precision</th>\
         <th>recall</th><th>F1</th><th></th></tr></thead><tbody>\n"
    );
    for one in all {
        let [precision, recall, f1] = scores(&one.metrics);
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{}</td><td>{precision:.4}</td><td>{recall:.4}</td><td>{f1:.4}</td>\
             <td class=bar><i style=\"width:{:.1}%\"></i></td></tr>",
            escape(&one.name),
            format_count(samples(&one.metrics)),
            100.0 * f1
        );
    }
    out + "</tbody></table></div>"
}

fn regression(detail: &RegressionDetail) -> io::Result<String> {
    let mut out = String::new();
    for target in &detail.targets {
        let metrics = &target.metrics;
        let r2 = metrics.r2.map_or_else(String::new, |r2| format!(", R² {r2:.4}"));
        let summary = format!("RMSE {}, MAE {}{r2}.", text::number(metrics.rmse), text::number(metrics.mae));
        let _ = writeln!(
            out,
            "<h3>{}</h3><p>{summary}</p><div class=charts>{}{}</div>",
            escape(&target.name),
            residual_plot(target)?,
            scatter(target)?
        );
    }
    if detail.targets.len() < detail.num_targets {
        let _ = writeln!(
            out,
            "<p class=note>The first {} of {} targets.</p>",
            detail.targets.len(),
            format_count(detail.num_targets as u64)
        );
    }
    Ok(out)
}

fn residual_plot(target: &TargetDetail) -> io::Result<String> {
    let residuals = &target.residuals;
    let edge = |i: usize| residuals.start + i as f64 * residuals.width;
    let bars = residuals.counts.iter().enumerate();
    let bars = bars.filter(|(_, count)| **count > 0).map(|(i, count)| Bar {
        from: edge(i),
        to: edge(i + 1),
        height: *count as f64,
    });
    let highest = residuals.counts.iter().max().copied().unwrap_or(1).max(1) as f64;
    let mut note = "Prediction minus truth, in the units of the target.".to_owned();
    if residuals.not_finite > 0 {
        let _ = write!(note, " {} not finite.", counted(residuals.not_finite, "more error"));
    }
    Plot {
        title: format!("Residuals of {}", target.name),
        x: Axis { name: "prediction minus truth", range: (edge(0), edge(residuals.counts.len().max(1))) },
        y: Axis { name: "samples", range: (0.0, 1.05 * highest) },
        bars: bars.collect(),
        points: Vec::new(),
        diagonal: false,
        note,
        data: json_text(
            &json!({ "start": residuals.start, "width": residuals.width, "counts": residuals.counts }),
        ),
    }
    .html()
}

fn scatter(target: &TargetDetail) -> io::Result<String> {
    let pairs = &target.residuals.pairs;
    let points: Vec<(f64, f64)> =
        pairs.iter().map(|[truth, predicted]| (f64::from(*truth), f64::from(*predicted))).collect();
    // Both axes have the same range, so that the diagonal is one.
    let (low, high) = points
        .iter()
        .flat_map(|(truth, predicted)| [*truth, *predicted])
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    let margin = if high > low { 0.04 * (high - low) } else { (high.abs() * 0.1).max(1e-12) };
    let range = (low - margin, high + margin);
    Plot {
        title: format!("Predictions of {}", target.name),
        x: Axis { name: "truth", range },
        y: Axis { name: "prediction", range },
        bars: Vec::new(),
        note: format!(
            "{}, evenly over the validation set. On the dashed line, prediction and truth are equal.",
            counted(pairs.len() as u64, "sample")
        ),
        points,
        diagonal: true,
        data: json_text(pairs),
    }
    .html()
}
