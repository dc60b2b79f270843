//! Runs a planned sweep: rung after rung, the trials of a rung side by side, each in a process of its own.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::child::{ChildOptions, FitProcess};
use super::folder::{Results, Sweep, TrialOutcome, TrialResult, TuneFolder};
use super::halving::{Halving, ranked};
use super::slots::{Capacity, MemoryNeed};
use crate::events::Summary;
use crate::events::jsonl::LineFile;
use crate::events::summary::RunState;
use crate::train::Failure;
use crate::train::signals::{Signal, Signals};

/// How a sweep is run, beyond what it runs.
pub struct SweepOptions {
    pub child: ChildOptions,
    /// What its trials share.
    pub capacity: Capacity,
    /// Device bytes that each process takes beside its budget.
    pub context_bytes: u64,
    /// When to stop the trials, which can then be resumed.
    pub deadline: Option<Instant>,
    pub signals: Signals,
}

/// What happens while a sweep runs.
pub enum SweepEvent<'a> {
    /// A rung begins, or continues: so many of its trials are left to run.
    Rung {
        rung: u32,
        left: usize,
    },
    Started {
        trial: usize,
        steps: u64,
    },
    Ended(&'a TrialResult),
}

/// Why a sweep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepEnd {
    Complete,
    OutOfTime,
    Stopped(Signal),
    /// The memory left now does not hold this trial, which fitted when it was planned.
    NoMemory {
        trial: usize,
    },
}

/// Where a trial stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialState {
    DoesNotFit,
    /// Not started, or not at the end of its first rung.
    Unfinished,
    /// At the end of a rung; whether it goes on is not decided, or it has not yet.
    Paused,
    /// Others were better at the end of a rung.
    StoppedEarly,
    Finished,
    Diverged,
    Failed,
}

/// Exit codes of `trainer fit` that the sweep interprets.
const DONE: i32 = 0;
const DIVERGED: i32 = 5;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Keeps a result, and tells of it.
type RecordResult<'a> = dyn FnMut(TrialResult, &mut dyn FnMut(SweepEvent)) -> Result<(), Failure> + 'a;

impl Sweep {
    /// The rungs of this sweep.
    pub fn rungs(&self) -> Halving {
        let fitting = || self.trials.iter().filter(|trial| trial.fits());
        let shortest = fitting().map(|trial| trial.total_steps).min().unwrap_or(0);
        Halving::new(self.halving, fitting().count(), shortest)
    }

    /// The trials that take part in a rung, given the results of the one before. `None` while that is not complete.
    fn entrants(&self, rung: u32, results: &Results) -> Option<Vec<usize>> {
        let Some(before) = rung.checked_sub(1) else {
            return Some((0..self.trials.len()).filter(|trial| self.trials[*trial].fits()).collect());
        };
        let scores = self.entrants(before, results)?.into_iter().map(|trial| {
            let result = results.at(trial, before)?;
            let goes_on = matches!(result.outcome, TrialOutcome::Paused | TrialOutcome::Finished);
            Some((trial, result.score.filter(|_| goes_on)))
        });
        let scores: Vec<(usize, Option<f64>)> = scores.collect::<Option<_>>()?;
        Some(self.rungs().promoted(&scores, self.metric.is_lower_better()))
    }

    pub fn state(&self, trial: usize, results: &Results) -> TrialState {
        let Some(result) = results.last(trial) else {
            return if self.trials[trial].fits() { TrialState::Unfinished } else { TrialState::DoesNotFit };
        };
        match result.outcome {
            TrialOutcome::Finished => TrialState::Finished,
            TrialOutcome::Diverged => TrialState::Diverged,
            TrialOutcome::Failed => TrialState::Failed,
            TrialOutcome::Paused => match self.entrants(result.rung + 1, results) {
                Some(entrants) if !entrants.contains(&trial) => TrialState::StoppedEarly,
                _ => TrialState::Paused,
            },
        }
    }

    /// The trials with a score, best first: those that got further come first, since scores are comparable within a
    /// rung.
    pub fn ranking(&self, results: &Results) -> Vec<usize> {
        let mut order = Vec::new();
        for rung in (0..self.rungs().rungs()).rev() {
            let scores: Vec<(usize, Option<f64>)> = (0..self.trials.len())
                .filter_map(|trial| results.last(trial).filter(|result| result.rung == rung))
                .filter(|result| matches!(result.outcome, TrialOutcome::Paused | TrialOutcome::Finished))
                .map(|result| (result.trial, result.score))
                .collect();
            order.extend(ranked(&scores, self.metric.is_lower_better()));
        }
        order
    }

    /// Runs what has no result yet. Returns why it ended, and all results.
    pub fn run(
        &self,
        folder: &TuneFolder,
        options: &SweepOptions,
        mut on_event: impl FnMut(SweepEvent),
    ) -> Result<(SweepEnd, Results), Failure> {
        let mut results = folder.results()?.without_failures();
        let mut file = folder.open_results()?;
        for rung in 0..self.rungs().rungs() {
            let Some(entrants) = self.entrants(rung, &results) else { break };
            let mut waiting: Vec<usize> =
                entrants.into_iter().filter(|trial| results.at(*trial, rung).is_none()).collect();
            on_event(SweepEvent::Rung { rung, left: waiting.len() });
            let mut record = |result: TrialResult, on_event: &mut dyn FnMut(SweepEvent)| {
                append(&mut file, &result, folder)?;
                on_event(SweepEvent::Ended(&result));
                results.add(result);
                Ok(())
            };
            let end = self.run_rung(rung, &mut waiting, folder, options, &mut record, &mut on_event)?;
            if end != SweepEnd::Complete {
                return Ok((end, results));
            }
        }
        Ok((SweepEnd::Complete, results))
    }

    fn run_rung(
        &self,
        rung: u32,
        waiting: &mut Vec<usize>,
        folder: &TuneFolder,
        options: &SweepOptions,
        record: &mut RecordResult,
        on_event: &mut dyn FnMut(SweepEvent),
    ) -> Result<SweepEnd, Failure> {
        let need = |trial: usize| {
            let budget = self.trials[trial].budget;
            MemoryNeed { vram: budget.vram + options.context_bytes, ..budget }
        };
        let needs = |trials: &mut dyn Iterator<Item = usize>| trials.map(need).collect::<Vec<_>>();
        let mut running: Vec<(usize, FitProcess)> = Vec::new();
        let mut stopping = None;
        loop {
            if stopping.is_none() {
                let signal = options.signals.stop_requested();
                let late = options.deadline.is_some_and(|deadline| Instant::now() >= deadline);
                stopping = signal.map(SweepEnd::Stopped).or(late.then_some(SweepEnd::OutOfTime));
                if stopping.is_some() {
                    running
                        .iter_mut()
                        .for_each(|(_, process)| process.stop(signal.unwrap_or(Signal::Terminate)));
                }
            }
            while stopping.is_none() {
                let used = needs(&mut running.iter().map(|(trial, _)| *trial));
                let next = options.capacity.next(&needs(&mut waiting.iter().copied()), &used);
                let Some(at) = next else { break };
                let trial = waiting.remove(at);
                let steps = self.rungs().steps(rung, self.trials[trial].total_steps);
                let (job, log) = (folder.trial_job(trial), folder.trial_log(trial));
                running.push((trial, options.child.start(&job, &folder.trial_run(trial), steps, &log)?));
                on_event(SweepEvent::Started { trial, steps });
            }
            let mut at = 0;
            while at < running.len() {
                let (trial, process) = &mut running[at];
                let trial = *trial;
                match process.exit_code()? {
                    None => at += 1,
                    Some(code) => {
                        drop(running.remove(at));
                        if stopping.is_none() || code == DONE || code == DIVERGED {
                            record(self.result(trial, rung, code, folder)?, on_event)?;
                        }
                    }
                }
            }
            match (running.is_empty(), stopping, waiting.first()) {
                (true, Some(end), _) => return Ok(end),
                (true, None, None) => return Ok(SweepEnd::Complete),
                (true, None, Some(_)) => {
                    if let Some(trial) = waiting.iter().find(|trial| !options.capacity.holds(need(**trial))) {
                        return Ok(SweepEnd::NoMemory { trial: *trial });
                    }
                }
                _ => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// The result of a trial whose process ended with this code.
    fn result(
        &self,
        trial: usize,
        rung: u32,
        code: i32,
        folder: &TuneFolder,
    ) -> Result<TrialResult, Failure> {
        let events = folder.trial_run(trial).events();
        let summary = if events.exists() { Summary::from_events(&events)? } else { Summary::default() };
        let outcome = match (code, summary.state) {
            (DONE, RunState::Stopped) => TrialOutcome::Paused,
            (DONE, _) => TrialOutcome::Finished,
            (DIVERGED, _) => TrialOutcome::Diverged,
            _ => TrialOutcome::Failed,
        };
        let best = summary.best.filter(|best| best.metric == self.metric.name());
        let failed = outcome == TrialOutcome::Failed;
        Ok(TrialResult {
            trial,
            rung,
            outcome,
            score: best.as_ref().map(|best| best.value).filter(|value| value.is_finite()),
            best_step: best.map(|best| best.step),
            steps: summary.steps,
            elapsed_s: summary.elapsed_s,
            peak: MemoryNeed { ram: summary.resident_peak_bytes, vram: summary.measured_peak_bytes.vram },
            error: failed.then(|| last_error(&folder.trial_log(trial), code)),
        })
    }
}

fn append(file: &mut LineFile, result: &TrialResult, folder: &TuneFolder) -> Result<(), Failure> {
    file.append(result).and_then(|()| file.sync()).map_err(Failure::io("write", folder.results_file()))
}

/// The last error that a process printed.
pub(super) fn last_error(log: &Path, code: i32) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let error = text.lines().rev().find_map(|line| line.strip_prefix("error: "));
    error.map_or_else(|| format!("it ended with exit code {code}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::BestMetric;
    use crate::planner::plan::PlanVerdict;
    use crate::tune::PlannedTrial;

    fn sweep(verdicts: &[PlanVerdict]) -> Sweep {
        let trial = |verdict: &PlanVerdict| PlannedTrial {
            set: Vec::new(),
            verdict: *verdict,
            peak: MemoryNeed::default(),
            budget: MemoryNeed::default(),
            total_steps: 900,
        };
        Sweep {
            job: "job.toml".into(),
            set: Vec::new(),
            fixed: Vec::new(),
            base: serde_json::Value::Null,
            metric: BestMetric::LOSS,
            halving: 3,
            memory: MemoryNeed::default(),
            trials: verdicts.iter().map(trial).collect(),
        }
    }

    fn result(trial: usize, rung: u32, score: f64) -> TrialResult {
        let outcome = if score.is_nan() { TrialOutcome::Diverged } else { TrialOutcome::Paused };
        TrialResult {
            trial,
            rung,
            outcome,
            score: Some(score),
            best_step: None,
            steps: 1,
            elapsed_s: 0.0,
            peak: MemoryNeed::default(),
            error: None,
        }
    }

    #[test]
    fn a_rung_waits_for_the_one_before_and_takes_its_best() {
        use PlanVerdict::{DoesNotFit, Fits};
        let sweep = sweep(&[Fits, DoesNotFit, Fits, Fits, Fits]);
        assert_eq!(sweep.rungs().rungs(), 2);
        let mut results = Results::default();
        assert_eq!(sweep.entrants(0, &results), Some(vec![0, 2, 3, 4]));
        for (trial, score) in [(0, 0.4), (2, 0.2), (4, 0.3)] {
            assert_eq!(sweep.entrants(1, &results), None);
            results.add(result(trial, 0, score));
        }
        results.add(result(3, 0, f64::NAN));
        assert_eq!(sweep.entrants(1, &results), Some(vec![2, 4]));
        results.add(result(4, 1, 0.25));
        assert_eq!(sweep.ranking(&results), [4, 2, 0], "scores of one rung are comparable");
    }
}
