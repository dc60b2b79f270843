//! `trainer tune --lr`: the learning-rate range test.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::str::FromStr;

use serde_json::json;

use super::{Progress, child_arguments, command_line, new_folder};
use crate::cli::fit::RUNS_DIR;
use crate::cli::{CliError, CommonArgs, Exit, print_line, start_threads};
use crate::report;
use crate::train::Failure;
use crate::train::signals::{ExitMessages, Signal, SignalSource, Signals};
use crate::tune::lr_range::{LrCurve, Suggestion, suggest};
use crate::tune::lr_test::{LrEnd, LrFolder, LrTest};
use crate::tune::{ChildOptions, Parameter};

/// The `--lr` argument: the lowest and the highest rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrBounds {
    low: f64,
    high: f64,
}

impl FromStr for LrBounds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let ends =
            text.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        match ends {
            Some((low, high)) if 0.0 < low && low < high && f64::is_finite(high) => Ok(Self { low, high }),
            _ => Err("expected LOW..HIGH, two rates above 0 of which the first is lower".into()),
        }
    }
}

const CHART_COLUMNS: usize = 60;
const CHART_ROWS: usize = 12;

/// Finds a learning rate for the job at `path`.
pub fn run(path: &Path, bounds: LrBounds, updates: u64, common: &CommonArgs) -> anyhow::Result<Exit> {
    if let Some(set) = common.set.iter().find(|set| Parameter::parse(set).is_ok_and(|p| p.varies())) {
        let message = format!("`--lr` tests one job, and `--set {set}` has several values");
        return Err(CliError::usage(message, "give the key one value").into());
    }
    let test = LrTest { low: bounds.low, high: bounds.high, updates };
    // The job as written is checked first, so that its mistakes are reported as everywhere.
    common.load_job(path)?;
    let job = test.job(path, &common.set)?;
    start_threads()?;
    let signals = Signals::watch(SignalSource::Anyone, ExitMessages::default())?;
    signals.begin();
    let folder = LrFolder { root: new_folder(&Path::new(RUNS_DIR).join(&job.name), "lr-")? };
    let child = ChildOptions { arguments: child_arguments(common), threads: rayon::current_num_threads() };
    let progress = Progress::new(common.display_options(io::stderr().is_terminal()), "updates");
    progress.begin("lr", updates as usize);
    let end = test.run(&job, &folder, &child, &signals, |curve| {
        if let Some(last) = curve.points.last() {
            progress.bar.set_position(last.step);
            progress.bar.set_message(format!("lr {:.2e}  loss {}", last.lr, report::number(last.smoothed)));
        }
    });
    progress.bar.finish_and_clear();
    let curve = match end? {
        LrEnd::Curve(curve) => curve,
        LrEnd::Stopped(Signal::Interrupt) => return Ok(Exit::Sigint),
        LrEnd::Stopped(Signal::Terminate) => return Ok(Exit::Sigterm),
        LrEnd::Failed { code, error } => {
            let exit = Exit::Worker(code.clamp(0, 255) as u8);
            return Err(CliError { exit, message: error, hint: None }.into());
        }
    };
    let lines = chart(&curve);
    let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    std::fs::write(folder.chart_file(), text).map_err(Failure::io("write", folder.chart_file()))?;
    let suggestion = suggest(&curve.points);
    let svg = report::lr_curve::svg(&curve.points, suggestion);
    let svg = svg.and_then(|svg| svg.map(|svg| std::fs::write(folder.svg_file(), svg)).transpose());
    let svg = svg.map_err(Failure::io("write", folder.svg_file()))?.map(|()| folder.svg_file());
    if common.json {
        let document = json!({
            "folder": folder.root, "curve": folder.curve_file(), "svg": svg, "updates": curve.points.len(),
            "diverged": curve.diverged, "suggestion": suggestion,
        });
        print_line(serde_json::to_string_pretty(&document)?)?;
    } else if !common.quiet {
        lines.iter().try_for_each(print_line)?;
        print_line("")?;
        summary(&curve, suggestion, path, common).iter().try_for_each(print_line)?;
        print_line(format!("curve    {}", folder.curve_file().display()))?;
        svg.iter().try_for_each(|svg| print_line(format!("         {}", svg.display())))?;
    }
    match suggestion {
        Some(_) => Ok(Exit::Done),
        None => Err(CliError {
            exit: Exit::Failure,
            message: format!("no rate from {:e} to {:e} lowered the loss", test.low, test.high),
            hint: Some("more updates (`--updates`) or other rates (`--lr=1e-8..10`) may show one".into()),
        }
        .into()),
    }
}

/// The smoothed loss over the logarithm of the rate.
fn chart(curve: &LrCurve) -> Vec<String> {
    let (Some(first), Some(last)) = (curve.points.first(), curve.points.last()) else { return Vec::new() };
    let losses: Vec<f64> = curve.points.iter().map(|point| point.smoothed).collect();
    let ends = (format!("{:.1e}", first.lr), format!("{:.1e}", last.lr));
    report::chart::lines(&losses, (&ends.0, &ends.1), CHART_COLUMNS, CHART_ROWS)
}

fn summary(curve: &LrCurve, suggestion: Option<Suggestion>, path: &Path, common: &CommonArgs) -> Vec<String> {
    let last = curve.points.last().map_or(0.0, |point| point.lr);
    let mut lines = vec![match curve.diverged {
        true => format!("lr       the loss diverges at {last:.2e}, after {} updates", curve.points.len()),
        false => format!("lr       the loss does not diverge up to {last:.2e}"),
    }];
    if let Some(found) = suggestion {
        lines.push(format!(
            "         it is lowest at {:.2e}: {}",
            found.lr_at_minimum,
            report::number(found.loss_at_minimum)
        ));
        lines.push(format!("suggest  {:.2e}, where the smoothed loss falls fastest", found.lr));
        let sets = common.set.iter().flat_map(|set| ["--set".to_owned(), set.clone()]);
        let rate = ["--set".to_owned(), format!("optimizer.lr={:.1e}", found.lr)];
        let words: Vec<String> =
            ["fit".to_owned(), path.display().to_string()].into_iter().chain(sets).chain(rate).collect();
        lines.push(format!("train    {}", command_line(&words)));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_parse() {
        assert_eq!("1e-6..1".parse(), Ok(LrBounds { low: 1e-6, high: 1.0 }));
        for bad in ["1", "1..", "1..1", "0..1", "2..1", "1e-6..inf", "a..b"] {
            assert!(bad.parse::<LrBounds>().is_err(), "{bad}");
        }
    }
}
