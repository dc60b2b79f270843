//! The folder of a sweep: `tune.json`, what is run; `trials.jsonl`, what has ended; a job and a run per trial.
//!
//! `tune.json` is written once, when every trial has been planned. A result is a complete line of `trials.jsonl` or
//! does not exist; a trial without the result of its rung is resumed from its own checkpoint. So a sweep continues
//! after any death, and nothing runs twice.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::search_space::Assignment;
use super::slots::MemoryNeed;
use crate::events::jsonl::{LineFile, complete_lines};
use crate::job::{BestMetric, Job};
use crate::planner::plan::PlanVerdict;
use crate::train::Failure;
use crate::train::run_dir::{RunDir, write_atomic};

/// What a sweep runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// The job file.
    pub job: PathBuf,
    /// `--set` as typed.
    pub set: Vec<String>,
    /// Those of them that give a key one value.
    pub fixed: Vec<String>,
    /// The resolved job with the fixed settings.
    pub base: serde_json::Value,
    /// What ranks the trials.
    pub metric: BestMetric,
    /// One of this many trials goes on to the next rung.
    pub halving: u64,
    /// Host and device bytes that all trials share, when they were planned.
    pub memory: MemoryNeed,
    pub trials: Vec<PlannedTrial>,
}

/// A trial before it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedTrial {
    pub set: Vec<Assignment>,
    pub verdict: PlanVerdict,
    /// The peak of its plan.
    pub peak: MemoryNeed,
    /// The budget of its process.
    pub budget: MemoryNeed,
    /// Updates of the whole run.
    pub total_steps: u64,
}

impl PlannedTrial {
    pub fn fits(&self) -> bool {
        self.verdict != PlanVerdict::DoesNotFit
    }

    /// Its settings, for people: `optimizer.lr=0.01 model.hidden=[64]`.
    pub fn label(&self) -> String {
        self.set.iter().map(Assignment::to_set).collect::<Vec<_>>().join(" ")
    }
}

/// How a trial left a rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialOutcome {
    /// At the end of a rung before the last; it can be resumed.
    Paused,
    Finished,
    Diverged,
    /// Out of memory, or another error; a resumed sweep tries it again.
    Failed,
}

/// A line of `trials.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialResult {
    /// Number of the trial, from 0.
    pub trial: usize,
    /// The rung, from 0.
    pub rung: u32,
    pub outcome: TrialOutcome,
    /// Best value of the metric so far; `null` if there is none.
    pub score: Option<f64>,
    /// The step of that value.
    pub best_step: Option<u64>,
    /// Updates so far.
    pub steps: u64,
    /// Seconds of the run so far.
    pub elapsed_s: f64,
    /// Measured peak: resident memory of the process, device memory.
    pub peak: MemoryNeed,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Paths of a sweep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TuneFolder {
    pub root: PathBuf,
}

/// Prefix of the names of these folders, followed by a timestamp.
pub const PREFIX: &str = "tune-";

impl TuneFolder {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn sweep_file(&self) -> PathBuf {
        self.root.join("tune.json")
    }

    pub fn results_file(&self) -> PathBuf {
        self.root.join("trials.jsonl")
    }

    /// The job of a trial, resolved.
    pub fn trial_job(&self, trial: usize) -> PathBuf {
        self.root.join(format!("trial-{trial:03}.toml"))
    }

    /// The run of a trial.
    pub fn trial_run(&self, trial: usize) -> RunDir {
        RunDir::new(self.root.join(format!("trial-{trial:03}")))
    }

    /// What the process of a trial printed.
    pub fn trial_log(&self, trial: usize) -> PathBuf {
        self.root.join(format!("trial-{trial:03}.log"))
    }

    /// Writes the jobs of the trials that fit, then the sweep.
    pub fn write(&self, sweep: &Sweep, jobs: &[Job]) -> Result<(), Failure> {
        fs::create_dir_all(&self.root).map_err(Failure::io("create the folder", &self.root))?;
        for (trial, job) in jobs.iter().enumerate().filter(|(trial, _)| sweep.trials[*trial].fits()) {
            write_atomic(&self.trial_job(trial), job.to_toml().as_bytes())?;
        }
        let text = serde_json::to_vec_pretty(sweep)
            .map_err(|error| Failure::io("write", self.sweep_file())(error.into()))?;
        write_atomic(&self.sweep_file(), &text)
    }

    pub fn read(&self) -> Result<Sweep, Failure> {
        let read = || Ok(serde_json::from_slice(&fs::read(self.sweep_file())?)?);
        read().map_err(Failure::io("read", self.sweep_file()))
    }

    /// Every result so far, by trial and rung; of several, the last. Lines that are no results are skipped.
    pub fn results(&self) -> Result<Results, Failure> {
        if !self.results_file().exists() {
            return Ok(Results::default());
        }
        let mut results = Results::default();
        for line in complete_lines(&self.results_file()).map_err(Failure::io("read", self.results_file()))? {
            let line = line.map_err(Failure::io("read", self.results_file()))?;
            if let Ok(result) = serde_json::from_str(&line) {
                results.add(result);
            }
        }
        Ok(results)
    }

    /// Opens `trials.jsonl` for appending; truncates a torn last line.
    pub fn open_results(&self) -> Result<LineFile, Failure> {
        LineFile::open(&self.results_file()).map_err(Failure::io("open", self.results_file()))
    }
}

/// The results of a sweep.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results(BTreeMap<(usize, u32), TrialResult>);

impl Results {
    pub fn add(&mut self, result: TrialResult) {
        self.0.insert((result.trial, result.rung), result);
    }

    pub fn at(&self, trial: usize, rung: u32) -> Option<&TrialResult> {
        self.0.get(&(trial, rung))
    }

    /// The result of the highest rung of a trial.
    pub fn last(&self, trial: usize) -> Option<&TrialResult> {
        self.0.range((trial, 0)..=(trial, u32::MAX)).next_back().map(|(_, result)| result)
    }

    /// Forgets failures, which a resumed sweep tries again.
    pub fn without_failures(mut self) -> Self {
        self.0.retain(|_, result| result.outcome != TrialOutcome::Failed);
        self
    }
}

/// The newest sweep of a job, by its timestamp; of any job if `name` is `None`.
pub fn newest(runs: &Path, name: Option<&str>) -> Option<TuneFolder> {
    let folders = |path: &Path| -> Vec<PathBuf> {
        fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let homes = match name {
        Some(name) => vec![runs.join(name)],
        None => folders(runs),
    };
    let file_name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let sweeps = homes.iter().flat_map(|home| folders(home)).filter(|path| {
        file_name(path).is_some_and(|name| name.starts_with(PREFIX)) && path.join("tune.json").exists()
    });
    sweeps.max_by_key(file_name).map(TuneFolder::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(trial: usize, rung: u32, outcome: TrialOutcome) -> TrialResult {
        TrialResult {
            trial,
            rung,
            outcome,
            score: Some(0.5),
            best_step: Some(3),
            steps: 9,
            elapsed_s: 1.0,
            peak: MemoryNeed::default(),
            error: None,
        }
    }

    /// A line that a kill cut short is as if the rung had not ended; a failure is tried again.
    #[test]
    fn results_are_complete_lines() {
        let home = tempfile::tempdir().unwrap();
        let folder = TuneFolder::new(home.path());
        assert_eq!(folder.results().unwrap(), Results::default());
        let mut file = folder.open_results().unwrap();
        file.append(&result(0, 0, TrialOutcome::Paused)).unwrap();
        file.append(&result(0, 1, TrialOutcome::Finished)).unwrap();
        file.append(&result(1, 0, TrialOutcome::Failed)).unwrap();
        let whole = fs::read_to_string(folder.results_file()).unwrap();
        fs::write(folder.results_file(), format!("{whole}{{\"trial\":2,\"ru")).unwrap();
        let results = folder.results().unwrap();
        assert_eq!(results.last(0).map(|result| result.rung), Some(1));
        assert!(results.at(1, 0).is_some() && results.last(2).is_none());
        assert!(results.without_failures().last(1).is_none());
        folder.open_results().unwrap().append(&result(2, 0, TrialOutcome::Paused)).unwrap();
        assert!(folder.results().unwrap().at(2, 0).is_some());
    }

    #[test]
    fn the_newest_sweep_is_found_by_its_timestamp() {
        let runs = tempfile::tempdir().unwrap();
        for path in
            ["a/tune-20260101-000000", "a/tune-20260301-000000", "b/tune-20260201-000000", "b/tune-2027"]
        {
            fs::create_dir_all(runs.path().join(path)).unwrap();
            if !path.ends_with("2027") {
                fs::write(runs.path().join(path).join("tune.json"), "{}").unwrap();
            }
        }
        let root = |name| {
            newest(runs.path(), name).map(|folder| folder.root.strip_prefix(runs.path()).unwrap().to_owned())
        };
        assert_eq!(root(None), Some("a/tune-20260301-000000".into()));
        assert_eq!(root(Some("b")), Some("b/tune-20260201-000000".into()));
        assert_eq!(root(Some("c")), None);
    }
}
