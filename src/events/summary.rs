//! Summary of a run, rebuilt from its events alone: finished, interrupted, killed or resumed.
//!
//! A step repeated after a resume counts once. Elapsed time includes repeated work, but not the time between a stop
//! and its resume.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ReportError;
use super::event::{BestCheckpoint, Event, EventRecord, MemoryBytes};
use super::jsonl::complete_lines;
use super::nullable;

/// How a run ended, or that it has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// No final event: running, or killed.
    #[default]
    Unfinished,
    Interrupted,
    Diverged,
    Failed,
    /// Ended by `--max-steps`, before the last update of the job.
    Stopped,
    /// Complete, or ended by the job's `[stop]`.
    Finished,
}

/// A run in numbers: the contents of `summary.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub state: RunState,
    /// Why it stopped before its last update.
    pub reason: Option<String>,
    pub name: String,
    /// Run directory.
    pub run: String,
    pub device: String,
    pub parameters: u64,
    pub steps: u64,
    pub total_steps: u64,
    /// Epochs trained: 1.25 is one and a quarter.
    pub epochs: f64,
    pub samples: u64,
    /// Last value of each metric: `train.loss`, `valid.loss`, ...
    #[serde(deserialize_with = "nullable::numbers")]
    pub metrics: BTreeMap<String, f64>,
    /// The best checkpoint so far.
    pub best: Option<BestCheckpoint>,
    /// Fraction of the weights that `[prune]` has set to zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsity: Option<f64>,
    /// Path of the newest checkpoint.
    pub checkpoint: Option<String>,
    pub planned_peak_bytes: MemoryBytes,
    /// Host heap and device allocations.
    pub measured_peak_bytes: MemoryBytes,
    /// Peak resident host memory of the worker process (`VmHWM`), the highest over all sessions.
    #[serde(default)]
    pub resident_peak_bytes: u64,
    pub budget_bytes: MemoryBytes,
    pub elapsed_s: f64,
    pub data_wait_s: f64,
    pub resumes: u64,
    pub ooms: u64,
    pub shrunk: u64,
    pub grown: u64,
    /// Worker processes that died and were replaced.
    #[serde(default)]
    pub restarts: u64,
    pub samples_digest: String,
    /// Bad records skipped.
    #[serde(default)]
    pub bad_records: u64,
    /// Lines of `events.jsonl`, from 1, that do not parse and were skipped.
    #[serde(default)]
    pub damaged_lines: Vec<usize>,
    /// What to change, if updates waited too long for data.
    #[serde(default)]
    pub slow_data: Option<String>,
    #[serde(skip)]
    fold: FoldState,
}

/// Internal state of the fold.
#[derive(Clone, Debug, Default, PartialEq)]
struct FoldState {
    last_t: Option<f64>,
    /// A session has started and not yet made a step.
    before_first_step: bool,
    /// Why the run is about to end early.
    stopped_early: Option<String>,
    train_samples: u64,
    steps_per_epoch: u64,
    samples_per_update: u64,
    evals: BTreeMap<u64, BTreeMap<String, f64>>,
    /// Sparsity by step.
    sparsities: BTreeMap<u64, f64>,
    /// The best checkpoints, each better than the one before.
    bests: Vec<BestCheckpoint>,
    /// Checkpoint paths by step.
    checkpoints: BTreeMap<u64, String>,
}

impl Summary {
    /// Folds an `events.jsonl`. Skips lines that do not parse and remembers their numbers: events are for people, and
    /// no checkpoint depends on them. Ignores a torn last line.
    pub fn from_events(path: &Path) -> Result<Summary, ReportError> {
        let read = |source| ReportError::Read { path: path.to_owned(), source };
        let mut summary = Summary::default();
        for (i, line) in complete_lines(path).map_err(read)?.enumerate() {
            match serde_json::from_str(&line.map_err(read)?) {
                Ok(record) => summary.add(&record),
                Err(_) => summary.damaged_lines.push(i + 1),
            }
        }
        Ok(summary)
    }

    /// Adds the next record.
    pub fn add(&mut self, record: &EventRecord) {
        let event = &record.event;
        let gap = match event {
            Event::Started { .. } => true,
            Event::Resumed { .. } => !self.fold.before_first_step,
            _ => false,
        };
        if let Some(last) = self.fold.last_t.replace(record.t)
            && !gap
        {
            self.elapsed_s += (record.t - last).max(0.0);
        }
        match event {
            Event::Started { .. } | Event::Resumed { .. } => self.fold.before_first_step = true,
            Event::Planned { .. } | Event::Restarted { .. } => {}
            _ => self.fold.before_first_step = false,
        }
        match event {
            Event::Started {
                name,
                run,
                device,
                parameters,
                train_samples,
                total_steps,
                steps_per_epoch,
                ..
            } => {
                (self.name, self.run, self.device) = (name.clone(), run.clone(), device.clone());
                (self.parameters, self.total_steps) = (*parameters, *total_steps);
                (self.fold.train_samples, self.fold.steps_per_epoch) = (*train_samples, *steps_per_epoch);
                (self.state, self.reason) = (RunState::Unfinished, None);
            }
            Event::Planned { plan } => {
                self.planned_peak_bytes =
                    MemoryBytes { ram: plan.peak.ram_bytes, vram: plan.peak.vram_bytes };
                self.budget_bytes = MemoryBytes { ram: plan.budget.ram_bytes, vram: plan.budget.vram_bytes };
                self.fold.samples_per_update = plan.samples_per_update as u64;
            }
            Event::Resumed { step, .. } => self.rewind(*step),
            Event::Step {
                step,
                loss,
                samples,
                data_wait_s,
                ram_bytes,
                vram_bytes,
                resident_bytes,
                samples_digest,
                ..
            } => {
                self.resident_peak_bytes = self.resident_peak_bytes.max(*resident_bytes);
                (self.steps, self.samples) = (*step, *samples);
                self.samples_digest.clone_from(samples_digest);
                self.epochs = self.fold.epochs(*step);
                self.data_wait_s += data_wait_s;
                self.metrics.insert("train.loss".into(), *loss);
                let peak = &mut self.measured_peak_bytes;
                (peak.ram, peak.vram) = (peak.ram.max(*ram_bytes), peak.vram.max(*vram_bytes));
            }
            Event::Eval { step, metrics, .. } => {
                self.metrics.extend(metrics.clone());
                self.fold.evals.insert(*step, metrics.clone());
            }
            Event::Pruned { step, sparsity, .. } => {
                self.sparsity = Some(*sparsity);
                self.fold.sparsities.insert(*step, *sparsity);
            }
            Event::Checkpoint { step, path, .. } => {
                self.checkpoint = Some(path.clone());
                self.fold.checkpoints.insert(*step, path.clone());
            }
            Event::Best { step, path, metric, value } => {
                let (path, metric) = (path.clone(), metric.clone());
                self.fold.bests.push(BestCheckpoint { step: *step, path, metric, value: *value });
                self.best = self.fold.bests.last().cloned();
            }
            Event::Oom { .. } => self.ooms += 1,
            Event::Shrunk { .. } => self.shrunk += 1,
            Event::Grown { .. } => self.grown += 1,
            Event::Restarted { .. } => self.restarts += 1,
            // A session that trains nothing is no resume.
            Event::NothingLeft { .. } => self.resumes = self.resumes.saturating_sub(1),
            Event::Initialized { .. }
            | Event::Quantized { .. }
            | Event::TeacherLogits { .. }
            | Event::MemorySnapshot { .. }
            | Event::Pressure { .. }
            | Event::Corrected { .. }
            | Event::CudaGraphCaptured { .. }
            | Event::CudaGraphDisabled { .. }
            | Event::CudnnDisabled { .. }
            | Event::DeviceHeap { .. } => {}
            Event::StoppedEarly { reason, .. } => self.fold.stopped_early = Some(reason.clone()),
            Event::BadRecords { count, .. } => self.bad_records = *count,
            Event::SlowData { cause, advice, .. } => self.slow_data = Some(format!("{cause}: {advice}")),
            Event::Interrupted { step, signal, checkpoint } => {
                // Steps since the last logged one.
                (self.steps, self.samples) = (*step, self.fold.samples(*step));
                self.epochs = self.fold.epochs(*step);
                (self.state, self.reason) = (RunState::Interrupted, Some(signal.clone()));
                self.checkpoint = checkpoint.clone().or(self.checkpoint.take());
            }
            Event::Diverged { step, loss, .. } => {
                (self.state, self.reason) = (RunState::Diverged, Some(format!("loss {loss} at step {step}")));
            }
            Event::Failed { error, .. } => {
                (self.state, self.reason) = (RunState::Failed, Some(error.clone()));
            }
            Event::Finished {
                steps,
                epochs,
                samples,
                metrics,
                stopped,
                best,
                planned_peak_bytes,
                measured_peak_bytes,
                resident_peak_bytes,
                budget_bytes,
                elapsed_s,
                data_wait_s,
                samples_digest,
                bad_records,
            } => {
                self.bad_records = *bad_records;
                let early = self.fold.stopped_early.take();
                self.state = match (stopped, &early) {
                    (Some(_), None) => RunState::Stopped,
                    _ => RunState::Finished,
                };
                self.reason = early.or_else(|| stopped.clone());
                (self.steps, self.epochs, self.samples) = (*steps, *epochs, *samples);
                (self.elapsed_s, self.data_wait_s) = (*elapsed_s, *data_wait_s);
                self.planned_peak_bytes = *planned_peak_bytes;
                // The highest over all sessions of the run.
                self.resident_peak_bytes = self.resident_peak_bytes.max(*resident_peak_bytes);
                let peak = &mut self.measured_peak_bytes;
                peak.ram = peak.ram.max(measured_peak_bytes.ram);
                peak.vram = peak.vram.max(measured_peak_bytes.vram);
                self.budget_bytes = *budget_bytes;
                self.samples_digest.clone_from(samples_digest);
                // Runs of older versions listed the best value here.
                let last = metrics.clone().into_iter().filter(|(name, _)| !name.starts_with("best."));
                self.metrics.extend(last);
                self.best = best.clone().or(self.best.take());
            }
        }
    }

    /// Whether the process has nothing more to do for the run.
    pub fn has_ended(&self) -> bool {
        self.state != RunState::Unfinished
    }

    /// Forgets everything after `step`, which is about to be repeated.
    fn rewind(&mut self, step: u64) {
        let fold = &mut self.fold;
        (self.state, self.reason) = (RunState::Unfinished, None);
        self.resumes += 1;
        if self.steps > step {
            (self.steps, self.samples, self.epochs) = (step, fold.samples(step), fold.epochs(step));
            self.samples_digest.clear();
            self.metrics.remove("train.loss");
        }
        fold.evals.retain(|s, _| *s <= step);
        fold.sparsities.retain(|s, _| *s <= step);
        fold.bests.retain(|best| best.step <= step);
        fold.checkpoints.retain(|s, _| *s <= step);
        let train = self.metrics.remove_entry("train.loss");
        self.metrics = fold.evals.values().next_back().cloned().unwrap_or_default();
        self.metrics.extend(train);
        self.sparsity = fold.sparsities.values().next_back().copied();
        self.best = fold.bests.last().cloned();
        self.checkpoint = fold.checkpoints.values().next_back().cloned();
    }

    /// Writes `path` completely or not at all.
    pub fn write(&self, path: &Path) -> Result<(), ReportError> {
        let write = || -> io::Result<()> {
            let temporary = path.with_extension("json.tmp");
            let mut text = serde_json::to_vec_pretty(self)?;
            text.push(b'\n');
            let mut file = File::create(&temporary)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        };
        write().map_err(|source| ReportError::Write { name: path.display().to_string(), source })
    }
}

impl FoldState {
    fn epochs(&self, step: u64) -> f64 {
        step as f64 / self.steps_per_epoch.max(1) as f64
    }

    /// Samples seen after `step` updates: all updates have one size, except the last of an epoch.
    fn samples(&self, step: u64) -> u64 {
        let per_epoch = self.steps_per_epoch.max(1);
        let whole = step / per_epoch * self.train_samples;
        whole + (step % per_epoch * self.samples_per_update).min(self.train_samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    fn folded(records: &[EventRecord]) -> Summary {
        let mut summary = Summary::default();
        records.iter().for_each(|record| summary.add(record));
        summary
    }

    /// Killed at step 5 with a torn last line, resumed from step 2, killed at 3: as if steps 4 and 5, and the best of
    /// step 4, had never happened.
    #[test]
    fn steps_repeated_after_a_resume_count_once() {
        let run = fixtures::run();
        let mut records = run[..13].to_vec();
        records.extend([fixtures::started(100.0), fixtures::planned(100.1), fixtures::resumed(100.2, 2)]);
        let at_resume = folded(&records);
        assert_eq!((at_resume.steps, at_resume.epochs, at_resume.samples), (2, 1.0, 150));
        assert_eq!(at_resume.best.as_ref().map(|best| best.step), Some(2));
        records.push(fixtures::step(101.2, 3));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let lines: Vec<String> = records.iter().map(|r| serde_json::to_string(r).unwrap()).collect();
        std::fs::write(&path, lines.join("\n") + "\n{\"t\":102.2,\"event\":\"st").unwrap();
        let summary = Summary::from_events(&path).unwrap();
        assert_eq!(summary, folded(&records));
        assert_eq!((summary.state, summary.steps, summary.samples), (RunState::Unfinished, 3, 250));
        assert_eq!((summary.epochs, summary.resumes), (1.5, 1));
        assert_eq!(summary.checkpoint.as_deref(), Some("c/2"));
        assert_eq!(summary.metrics["valid.loss"], 0.5);
        assert!((summary.elapsed_s - (6.2 + 1.2)).abs() < 1e-9, "{}", summary.elapsed_s);

        let out = folder.path().join("summary.json");
        summary.write(&out).unwrap();
        let read: Summary = serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
        assert_eq!(read, Summary { fold: FoldState::default(), ..summary });
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn a_line_that_is_no_event_is_skipped_and_reported_by_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let good = serde_json::to_string(&fixtures::step(1.0, 1)).unwrap();
        std::fs::write(&path, format!("{good}\nnonsense\n{good}\n")).unwrap();
        let summary = Summary::from_events(&path).unwrap();
        assert_eq!((summary.steps, summary.damaged_lines), (1, vec![2]));
    }
}
