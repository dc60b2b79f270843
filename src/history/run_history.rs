//! The course of a run: its curves, thinned, its plans and what happened to its memory. Bounded in size, however long
//! the run is.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use super::run_record::{check_run, read_job};
use super::{Curve, EventReader, HistoryError, Point, RunRecord};
use crate::events::Summary;
use crate::events::event::{Event, EventRecord, MemoryBytes};
use crate::inference::generate::job_prompts::GeneratedTexts;
use crate::planner::MemoryPlan;

/// Moments kept; a run with more of them keeps the first.
const MAX_MARKS: usize = 300;
const MAX_PLANS: usize = 300;
/// Newest events kept for people who watch.
const MAX_MESSAGES: usize = 100;
/// Events between two looks at the clock.
const CLOCK_INTERVAL: u64 = 256;

/// A curve of every update, by the name of its quantity. Curves of evaluations have the name of their metric.
pub mod quantity {
    pub const LOSS: &str = "loss";
    pub const LEARNING_RATE: &str = "lr";
    pub const GRADIENT_NORM: &str = "grad_norm";
    /// Samples per second.
    pub const THROUGHPUT: &str = "samples_per_s";
    /// Percentage of the update.
    pub const DATA_WAIT: &str = "data_wait";
    pub const RAM: &str = "ram_bytes";
    pub const RESIDENT: &str = "resident_bytes";
    pub const VRAM: &str = "vram_bytes";
    pub const LOSS_SCALE: &str = "loss_scale";
}

/// Something that happened to the memory of a run, and when; the point's value is 0.
#[derive(Clone, Debug)]
pub struct MemoryMark {
    pub at: Point,
    pub event: Event,
}

/// A plan that came into force.
#[derive(Clone, Copy, Debug)]
pub struct PlannedPeak {
    pub at: Point,
    pub peak: MemoryBytes,
    pub budget: MemoryBytes,
}

/// A run and its course.
pub struct RunHistory {
    pub record: RunRecord,
    /// Version of the program that wrote the newest events.
    pub version: String,
    /// By name: see [`quantity`], and `valid.loss`, `train.accuracy`, ...
    pub curves: BTreeMap<String, Curve>,
    /// Names of the curves that were measured in evaluations.
    pub metrics: Vec<String>,
    /// The last plan.
    pub plan: Option<MemoryPlan>,
    pub plans: Vec<PlannedPeak>,
    pub marks: Vec<MemoryMark>,
    /// Moments beyond those kept.
    pub more_marks: u64,
    /// The newest events but steps, oldest first.
    pub messages: VecDeque<EventRecord>,
    /// How the model continues the prompts of the job, once the run has ended.
    pub generated: Option<GeneratedTexts>,
    max_buckets: usize,
    /// Step and samples of the last `step` event.
    last_step: (u64, u64),
}

impl RunHistory {
    fn new(record: RunRecord, max_buckets: usize) -> Self {
        Self {
            record,
            version: String::new(),
            curves: BTreeMap::new(),
            metrics: Vec::new(),
            plan: None,
            plans: Vec::new(),
            marks: Vec::new(),
            more_marks: 0,
            messages: VecDeque::new(),
            generated: None,
            max_buckets,
            last_step: (0, 0),
        }
    }

    /// Opens a run that has events; nothing is read yet.
    pub fn open(root: &Path, max_buckets: usize) -> Result<(Self, EventReader), HistoryError> {
        let folder = check_run(root)?;
        if !folder.events().exists() {
            return Err(HistoryError::NoEvents(root.into()));
        }
        let reader = EventReader::open(&folder.events())
            .map_err(|source| HistoryError::Read { path: folder.events(), source })?;
        let job = read_job(&folder);
        let record = RunRecord { job, ..RunRecord::new(folder.root, Summary::default()) };
        Ok((Self::new(record, max_buckets), reader))
    }

    /// Reads a run, with curves of at most twice `max_buckets` points. `None` if that takes longer than `limit`.
    pub fn read(
        root: &Path,
        max_buckets: usize,
        limit: Option<Duration>,
    ) -> Result<Option<Self>, HistoryError> {
        let (mut history, mut reader) = Self::open(root, max_buckets)?;
        let is_whole = history.update(&mut reader, limit)?;
        if history.plans.is_empty() && history.curves.is_empty() && history.marks.is_empty() {
            return Err(HistoryError::NoEvents(root.to_owned()));
        }
        history.generated = GeneratedTexts::read(&history.record.folder.generated());
        Ok(is_whole.then_some(history))
    }

    /// Adds what the run has written since. Returns false if `limit` was reached before the end.
    pub fn update(
        &mut self,
        reader: &mut EventReader,
        limit: Option<Duration>,
    ) -> Result<bool, HistoryError> {
        let (begun, mut read, mut in_time) = (Instant::now(), 0, true);
        let result = reader.read(|record| {
            self.add(record);
            read += 1;
            in_time = read % CLOCK_INTERVAL != 0 || limit.is_none_or(|limit| begun.elapsed() < limit);
            if in_time { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        result.map_err(|source| HistoryError::Read { path: self.record.folder.events(), source })?;
        self.record.skipped.clone_from(&reader.skipped);
        self.record.update_state();
        Ok(in_time)
    }

    fn curve(&mut self, name: &str, point: Point) {
        if !self.curves.contains_key(name) {
            self.curves.insert(name.into(), Curve::new(self.max_buckets));
        }
        if let Some(curve) = self.curves.get_mut(name) {
            curve.add(point);
        }
    }

    fn add_mark(&mut self, at: Point, event: &Event) {
        match self.marks.len() < MAX_MARKS {
            true => self.marks.push(MemoryMark { at, event: event.clone() }),
            false => self.more_marks += 1,
        }
    }

    fn add(&mut self, record: &EventRecord) {
        self.record.summary.add(record);
        let summary = &self.record.summary;
        let at = |step, value| Point { step, samples: summary.samples, time: summary.elapsed_s, value };
        let here = at(summary.steps, 0.0);
        match &record.event {
            Event::Started { version, .. } => self.version.clone_from(version),
            Event::Planned { plan } => {
                self.plan = Some(plan.clone());
                if self.plans.len() < MAX_PLANS {
                    let peak = MemoryBytes { ram: plan.peak.ram_bytes, vram: plan.peak.vram_bytes };
                    let budget = MemoryBytes { ram: plan.budget.ram_bytes, vram: plan.budget.vram_bytes };
                    self.plans.push(PlannedPeak { at: here, peak, budget });
                }
            }
            Event::Resumed { step, .. } => {
                self.curves.values_mut().for_each(|curve| curve.rewind(*step));
                self.last_step = (*step, self.record.summary.samples);
            }
            Event::Step {
                step,
                loss,
                lr,
                grad_norm,
                samples,
                micro_batch,
                accumulation_steps,
                step_s,
                data_wait_s,
                ram_bytes,
                vram_bytes,
                resident_bytes,
                loss_scale,
                ..
            } => {
                // Not every update is logged; the last of an epoch may be smaller.
                let since = samples.saturating_sub(self.last_step.1);
                let of_update = match step.saturating_sub(self.last_step.0) {
                    1 => since,
                    _ => since.min((micro_batch * accumulation_steps) as u64),
                };
                self.last_step = (*step, *samples);
                let here = at(*step, 0.0);
                for (name, value) in [
                    (quantity::LOSS, *loss),
                    (quantity::LEARNING_RATE, *lr),
                    (quantity::GRADIENT_NORM, *grad_norm),
                    (quantity::THROUGHPUT, of_update as f64 / step_s),
                    (quantity::DATA_WAIT, 100.0 * data_wait_s / step_s),
                    (quantity::RAM, *ram_bytes as f64),
                    (quantity::RESIDENT, *resident_bytes as f64),
                    (quantity::VRAM, *vram_bytes as f64),
                    (quantity::LOSS_SCALE, *loss_scale),
                ] {
                    self.curve(name, Point { value, ..here });
                }
            }
            Event::Eval { step, metrics, .. } => {
                for (name, value) in metrics {
                    if !self.metrics.contains(name) {
                        self.metrics.push(name.clone());
                    }
                    self.curve(name, Point { step: *step, value: *value, ..here });
                }
            }
            Event::Oom { step, .. }
            | Event::Pressure { step, .. }
            | Event::Corrected { step, .. }
            | Event::Shrunk { step, .. }
            | Event::Grown { step, .. } => self.add_mark(Point { step: *step, ..here }, &record.event),
            Event::Restarted { .. } => self.add_mark(here, &record.event),
            _ => {}
        }
        if !matches!(record.event, Event::Step { .. } | Event::Planned { .. } | Event::Checkpoint { .. }) {
            if self.messages.len() == MAX_MESSAGES {
                self.messages.pop_front();
            }
            self.messages.push_back(record.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    #[test]
    fn curves_have_the_values_of_the_events() {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> =
            fixtures::run().iter().map(|record| serde_json::to_string(record).unwrap() + "\n").collect();
        std::fs::write(folder.path().join("events.jsonl"), lines.concat()).unwrap();
        let history = RunHistory::read(folder.path(), 100, None).unwrap().unwrap();
        let values = |name: &str| -> Vec<(u64, f64)> {
            history.curves[name].points().iter().map(|point| (point.step, point.value)).collect()
        };
        assert_eq!(values("valid.loss"), [(2, 0.5), (4, 0.25), (6, 0.3)]);
        assert_eq!(values(quantity::LOSS)[3], (4, 0.25));
        // The last update of an epoch has 50 samples.
        assert_eq!(values(quantity::THROUGHPUT)[..2], [(1, 100.0), (2, 50.0)]);
        assert_eq!(history.metrics, ["valid.accuracy", "valid.loss"]);
        assert_eq!((history.plans.len(), history.plan), (1, Some(fixtures::plan())));
        assert_eq!(history.curves[quantity::RAM].last().map(|point| point.time), Some(7.2));
        assert!(RunHistory::read(folder.path(), 100, Some(Duration::ZERO)).unwrap().is_some(), "few events");
    }
}
