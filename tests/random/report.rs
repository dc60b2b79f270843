//! Runs many cases in parallel, and tabulates the results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::harness::in_parallel;
use crate::random::check::{self, CaseReport, PROMISES};
use crate::random::generate::{self, GeneratedJob};
use crate::random::run::Runner;

/// Which seeds, how many in parallel, for how long, and where failures are kept.
pub struct TrialOptions {
    pub seeds: Vec<u64>,
    pub parallel: usize,
    pub limit: Option<Duration>,
    pub folder: PathBuf,
    /// Keeps every case's folder, not only failed ones.
    pub keep: bool,
}

/// Writes a case's job and data.
pub fn write(case: &GeneratedJob, folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("job.toml"), toml::to_string(&case.job).map_err(std::io::Error::other)?)?;
    case.files.write(folder, case.seed)
}

/// Runs all cases until the time is up; returns their results in the order of seeds.
pub fn run(machine: &Runner, trials: &TrialOptions) -> Vec<(GeneratedJob, CaseReport)> {
    let begun = Instant::now();
    let in_time = || trials.limit.is_none_or(|limit| begun.elapsed() <= limit);
    let done = in_parallel(trials.parallel, &trials.seeds, |seed| {
        in_time().then(|| run_seed(machine, trials, *seed))
    });
    done.into_iter().flatten().collect()
}

fn run_seed(machine: &Runner, trials: &TrialOptions, seed: u64) -> (GeneratedJob, CaseReport) {
    let case = generate::case(seed, machine.scale);
    let folder = trials.folder.join(seed.to_string());
    // Left by an earlier trial of this seed.
    drop(fs::remove_dir_all(&folder));
    write(&case, &folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let seen = check::check_case(machine, &case, &folder);
    if seen.violations.is_empty() && !trials.keep {
        fs::remove_dir_all(&folder).unwrap();
    } else {
        let text: String = seen.violations.iter().map(|b| format!("{}: {}\n", b.promise, b.what)).collect();
        fs::write(folder.join("broken.txt"), text).unwrap();
        if !trials.keep {
            remove_checkpoints(&folder);
        }
    }
    for broken in &seen.violations {
        println!("seed {seed}: {}: {}", broken.promise, first_lines(&broken.what));
    }
    (case, seen)
}

/// Checkpoints are the bulk of a run, and its seed reproduces them.
fn remove_checkpoints(folder: &Path) {
    for run in ["weights", "written", "reference", "budget", "killed"] {
        drop(fs::remove_dir_all(folder.join(run).join("checkpoints")));
    }
}

fn first_lines(text: &str) -> String {
    let mut lines: Vec<&str> = text.lines().take(4).collect();
    if text.lines().count() > 4 {
        lines.push("...");
    }
    lines.join(" | ")
}

/// The table: jobs by kind, planned against measured memory, and every promise with the seeds that broke it.
pub fn table(machine: &Runner, trials: &TrialOptions, done: &[(GeneratedJob, CaseReport)]) -> String {
    let mut text = String::new();
    let kind = |case: &GeneratedJob, table: &str| {
        let kind =
            case.job.get(table).and_then(|t| t.get("kind")).and_then(|k| k.as_str()).unwrap_or("default");
        kind.to_owned()
    };
    let mut count = |title: &str, of: &dyn Fn(&(GeneratedJob, CaseReport)) -> Vec<String>| {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        done.iter().flat_map(of).for_each(|name| *counts.entry(name).or_default() += 1);
        let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        if !counts.is_empty() {
            text += &format!("| {title} | {} |\n", counts.join(", "));
        }
    };
    count("models", &|(case, _)| vec![kind(case, "model")]);
    count("data", &|(case, _)| vec![kind(case, "data")]);
    count("optimizers", &|(case, _)| vec![kind(case, "optimizer")]);
    count("budgets", &|(_, seen)| seen.budget.iter().cloned().collect());
    count("kills", &|(case, _)| {
        case.disturbance.iter().map(|t| format!("{:?}", t.kill).to_lowercase()).collect()
    });
    count("diverges with candle's operations too", &|(case, seen)| {
        seen.diverges.then(|| format!("seed {}", case.seed)).into_iter().collect()
    });
    count("CUDA graphs", &|(_, seen)| seen.graph.iter().cloned().collect());
    let above = |f: fn(&CaseReport) -> u64| {
        let mut all: Vec<(f64, u64)> = done
            .iter()
            .filter(|(_, seen)| f(seen) > 0)
            .map(|(case, seen)| (100.0 * (seen.planned as f64 / f(seen) as f64 - 1.0), case.seed))
            .collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let of = |i: usize| format!("{:+.1} % (seed {})", all[i].0, all[i].1);
        match all.len() {
            0 => "none".into(),
            n => format!("lowest {}, median {}, highest {}", of(0), of(n / 2), of(n - 1)),
        }
    };
    text += &format!("| plan over heap or pool | {} |\n", above(|seen| seen.heap));
    if !machine.on_gpu() {
        text += &format!("| plan over resident | {} |\n", above(|seen| seen.resident));
    }
    for promise in PROMISES {
        let broken = done.iter().filter(|(_, seen)| seen.violations.iter().any(|b| b.promise == promise));
        let seeds: Vec<String> = broken.map(|(case, _)| case.seed.to_string()).collect();
        text += &format!(
            "| {promise} | {} broken{}{} |\n",
            seeds.len(),
            if seeds.is_empty() { "" } else { ": " },
            seeds.join(" ")
        );
    }
    let runs: usize = done.iter().map(|(_, seen)| seen.runs).sum();
    let seconds: f64 = done.iter().map(|(_, seen)| seen.seconds).sum();
    let (first, last) = (trials.seeds.first().unwrap_or(&0), trials.seeds.last().unwrap_or(&0));
    let broken = done.iter().filter(|(_, seen)| !seen.violations.is_empty()).count();
    let head = format!(
        "{} of {} jobs on {} (seeds {first} to {last}), {runs} runs, {:.2} s a run: {broken} jobs broke a promise",
        done.len(),
        trials.seeds.len(),
        machine.device,
        seconds / runs.max(1) as f64,
    );
    format!("{head}\n\n| what | count |\n|---|---|\n{text}")
}
