//! Progress of a run: rates over its recent updates, remaining time, and the progress line.
//!
//! A pure function of the records so far; their timestamps are the only clock.

use std::collections::VecDeque;

use super::text::{self, AnsiStyle};
use crate::base::units::format_count;
use crate::events::activity::{ActivitySnapshot, Work};
use crate::events::event::{Event, EventRecord, MemoryBytes};

/// Rates cover the last `WINDOW_S` seconds and at most `WINDOW_STEPS` updates.
const WINDOW_S: f64 = 10.0;
const WINDOW_STEPS: usize = 512;
/// An update that takes longer than this many seconds shows how far it is.
const LONG_STEP_S: f64 = 1.0;

#[derive(Clone, Copy, Debug)]
struct StepSample {
    t: f64,
    step: u64,
    samples: u64,
    step_s: f64,
    wait_s: f64,
    loss: f64,
    lr: f64,
    used: MemoryBytes,
}

/// State behind the progress line.
#[derive(Debug, Default)]
pub struct RunProgress {
    total_steps: u64,
    steps_per_epoch: u64,
    budget: MemoryBytes,
    /// Updates before this session.
    start_step: u64,
    /// Newest last. Not every update is logged.
    recent: VecDeque<StepSample>,
    evals: u64,
    eval_s: f64,
    /// The run was asked to stop.
    stopping: bool,
}

impl RunProgress {
    pub fn add(&mut self, record: &EventRecord) {
        match &record.event {
            Event::Started { total_steps, steps_per_epoch, .. } => {
                (self.total_steps, self.steps_per_epoch) = (*total_steps, *steps_per_epoch);
            }
            Event::Planned { plan } => {
                self.budget = MemoryBytes { ram: plan.budget.ram_bytes, vram: plan.budget.vram_bytes };
            }
            Event::Resumed { step, .. } => {
                self.start_step = *step;
                self.recent.clear();
            }
            Event::Step { step, loss, lr, samples, step_s, data_wait_s, ram_bytes, vram_bytes, .. } => {
                self.recent.push_back(StepSample {
                    t: record.t,
                    step: *step,
                    samples: *samples,
                    step_s: *step_s,
                    wait_s: *data_wait_s,
                    loss: *loss,
                    lr: *lr,
                    used: MemoryBytes { ram: *ram_bytes, vram: *vram_bytes },
                });
                // Keep two: one alone does not show how many samples an update has.
                while self.recent.len() > 2
                    && (self.recent.len() > WINDOW_STEPS || record.t - self.recent[0].t > WINDOW_S)
                {
                    self.recent.pop_front();
                }
            }
            Event::Eval { eval_s, .. } => {
                self.evals += 1;
                self.eval_s = *eval_s;
            }
            _ => {}
        }
    }

    /// Updates so far.
    pub fn step(&self) -> u64 {
        self.recent.back().map_or(self.start_step, |sample| sample.step)
    }

    /// The epoch, from 1, of update `step`.
    pub fn epoch(&self, step: u64) -> u64 {
        step.div_ceil(self.steps_per_epoch.max(1)).max(1)
    }

    fn epochs(&self) -> u64 {
        self.epoch(self.total_steps)
    }

    /// Mean seconds per recent update.
    fn step_s(&self) -> Option<f64> {
        let mean = self.recent.iter().map(|sample| sample.step_s).sum::<f64>() / self.recent.len() as f64;
        (mean > 0.0).then_some(mean)
    }

    /// Samples per second of training; excludes evaluations and checkpoints.
    pub fn samples_per_second(&self) -> Option<f64> {
        let (first, last) = (self.recent.front()?, self.recent.back()?);
        let samples = if last.step > first.step {
            (last.samples - first.samples) as f64 / (last.step - first.step) as f64
        } else if self.start_step == 0 {
            last.samples as f64 / last.step as f64
        } else {
            return None;
        };
        Some(samples / self.step_s()?)
    }

    /// Fraction of recent time spent waiting for data, 0 to 1.
    pub fn data_wait(&self) -> Option<f64> {
        let wait: f64 = self.recent.iter().map(|sample| sample.wait_s).sum();
        Some(wait / self.recent.len() as f64 / self.step_s()?)
    }

    /// The run stops after this update: what its other updates would take no longer matters.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Seconds to the end after update `step`: the remaining updates, plus evaluations at the rate so far.
    pub fn eta(&self, step: u64) -> Option<f64> {
        if self.stopping {
            return None;
        }
        let left = self.total_steps.saturating_sub(step) as f64;
        let done = self.step().saturating_sub(self.start_step) as f64;
        let evals = if done > 0.0 { left * self.evals as f64 / done } else { 0.0 };
        Some(left * self.step_s()? + evals * self.eval_s)
    }

    /// The progress line after the last logged update.
    pub fn line(&self, paint: AnsiStyle) -> String {
        let Some(last) = self.recent.back() else { return "starting".into() };
        self.fields(last.step, None).render(None, paint)
    }

    /// The progress line between two records: that of the update, the evaluation or the checkpoint in progress. With a
    /// width, drops the least important fields until it fits.
    pub fn live_line(&self, now: &ActivitySnapshot, width: Option<usize>, paint: AnsiStyle) -> String {
        let fraction = if now.total > 0 { now.done as f64 / now.total as f64 } else { 0.0 };
        let seconds = text::duration(now.seconds);
        let counts = format!("{}/{} samples", format_count(now.done), format_count(now.total));
        let step = format!("step {}", format_count(now.step));
        let work = |verb: &str| Field(9, paint.bold(&format!("{verb:<6}")));
        let fields = match now.work {
            Work::Starting => vec![Field(9, "starting".into()), Field(8, seconds)],
            Work::Checkpoint => {
                vec![work("saving"), Field(8, step), Field(7, "a checkpoint".into()), Field(8, seconds)]
            }
            Work::Evaluation | Work::Teacher => {
                let is_evaluation = now.work == Work::Evaluation;
                let of = if is_evaluation { step } else { "the teacher's logits".into() };
                vec![
                    work(if is_evaluation { "eval" } else { "stores" }),
                    Field(8, of),
                    bar_field(5, fraction, width),
                    Field(7, counts),
                    Field(6, seconds),
                    Field(3, remaining(now, fraction).unwrap_or_default()),
                ]
            }
            Work::Update => {
                let done = (now.step as f64 + fraction) / self.total_steps.max(1) as f64;
                let mut fields = self.fields(now.step + 1, Some(bar_field(4, done, width))).0;
                // What a short update has done would only flicker.
                if now.seconds.max(self.step_s().unwrap_or(0.0)) >= LONG_STEP_S {
                    let at = fields.len().min(3);
                    fields.insert(at, Field(9, format!("{counts} {seconds}")));
                }
                fields
            }
        };
        Fields(fields).render(width, paint)
    }

    /// The fields of the line for update `step`.
    fn fields(&self, step: u64, bar: Option<Field>) -> Fields {
        let (total, epochs) = (format_count(self.total_steps), self.epochs().to_string());
        let (of_total, of_epochs) = (total.len(), epochs.len());
        let step = step.min(self.total_steps);
        let mut fields = vec![
            Field(5, format!("epoch {:>of_epochs$}/{epochs}", self.epoch(step))),
            Field(10, format!("step {:>of_total$}/{total}", format_count(step))),
        ];
        fields.extend(bar);
        let Some(last) = self.recent.back() else { return Fields(fields) };
        let (space, used, budget) = match self.budget.vram {
            0 => ("ram", last.used.ram, self.budget.ram),
            vram => ("vram", last.used.vram, vram),
        };
        fields.push(Field(8, format!("loss {}", text::number(last.loss))));
        fields.push(Field(1, format!("lr {:.1e}", last.lr)));
        if let Some(rate) = self.samples_per_second() {
            fields.push(Field(6, format!("{} samples/s", format_count(rate.round() as u64))));
        }
        fields.push(Field(3, format!("{space} {} of {}", text::bytes(used), text::bytes(budget))));
        if let Some(wait) = self.data_wait() {
            fields.push(Field(2, format!("wait {}", text::percent(wait, 1.0))));
        }
        if let Some(eta) = self.eta(step) {
            fields.push(Field(7, format!("eta {}", text::duration(eta))));
        }
        Fields(fields)
    }
}

/// A field of the progress line, with its priority: the lowest is dropped first.
struct Field(u8, String);

struct Fields(Vec<Field>);

fn bar_field(priority: u8, fraction: f64, width: Option<usize>) -> Field {
    let cells = if width.is_some_and(|width| width < 100) { 10 } else { 20 };
    let full = (cells as f64 * fraction.clamp(0.0, 1.0)) as usize;
    Field(priority, "━".repeat(full) + &"─".repeat(cells - full))
}

/// `eta 12 s`, once the work has begun to advance.
fn remaining(now: &ActivitySnapshot, fraction: f64) -> Option<String> {
    (fraction > 0.0).then(|| format!("eta {}", text::duration(now.seconds / fraction - now.seconds)))
}

impl Fields {
    fn render(mut self, width: Option<usize>, paint: AnsiStyle) -> String {
        let fields = &mut self.0;
        fields.retain(|Field(_, text)| !text.is_empty());
        let line_width = |fields: &[Field]| {
            let widths = fields.iter().map(|Field(_, text)| console::measure_text_width(text) + 2);
            widths.sum::<usize>().saturating_sub(2)
        };
        while width.is_some_and(|width| line_width(fields) > width) && fields.len() > 1 {
            let Some(least) = fields.iter().map(|Field(rank, _)| *rank).min() else { break };
            fields.retain(|Field(rank, _)| *rank != least);
        }
        let painted: Vec<String> = fields
            .iter()
            .map(|Field(_, text)| match text.starts_with(['━', '─']) {
                true => {
                    let (full, empty) = text.split_at(text.find('─').unwrap_or(text.len()));
                    paint.cyan(full) + &paint.dim(empty)
                }
                false => text.clone(),
            })
            .collect();
        let line = painted.join("  ");
        // A single field that is still too wide.
        width.map_or(line.clone(), |width| console::truncate_str(&line, width, "").into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    fn after(records: &[EventRecord]) -> RunProgress {
        let mut progress = RunProgress::default();
        records.iter().for_each(|record| progress.add(record));
        progress
    }

    const UPDATE: ActivitySnapshot =
        ActivitySnapshot { work: Work::Update, step: 4, done: 30, total: 100, seconds: 0.3 };

    #[test]
    fn the_line_says_all_and_gives_way_by_rank() {
        let progress = after(&fixtures::run()[..9]); // 2 updates of 1 s and half an evaluation remain
        let all = "epoch 2/3  step 4/6  loss 0.2500  lr 1.0e-3  67 samples/s  \
                   ram 206 MiB of 256 MiB  wait 1.0 %  eta 2.2 s";
        assert_eq!(progress.line(AnsiStyle::default()), all);
        let short = ActivitySnapshot { done: 0, total: 0, ..UPDATE };
        let line = |width| progress.live_line(&short, width, AnsiStyle::default());
        let samples = "0/0 samples 0.3 s";
        assert_eq!(
            line(Some(100)),
            format!(
                "epoch 3/3  step 5/6  ━━━━━━━━━━━━━───────  {samples}  loss 0.2500  67 samples/s  eta 1.1 s"
            )
        );
        assert_eq!(line(Some(60)), format!("step 5/6  {samples}  loss 0.2500  eta 1.1 s"));
        assert_eq!(line(Some(28)), format!("step 5/6  {samples}"));
        assert_eq!(line(Some(11)), "step 5/6");
        assert_eq!(line(Some(4)), "step");
    }

    /// Updates of a second and more show their samples and time, which move within the update.
    #[test]
    fn the_line_moves_within_an_update_an_evaluation_and_a_checkpoint() {
        let progress = after(&fixtures::run()[..9]);
        let line = |now: &ActivitySnapshot| progress.live_line(now, Some(80), AnsiStyle::default());
        assert_eq!(
            line(&UPDATE),
            "epoch 3/3  step 5/6  30/100 samples 0.3 s  loss 0.2500  67 samples/s  eta 1.1 s"
        );
        let later = ActivitySnapshot { done: 60, seconds: 0.7, ..UPDATE };
        assert_eq!(
            line(&later),
            "epoch 3/3  step 5/6  60/100 samples 0.7 s  loss 0.2500  67 samples/s  eta 1.1 s"
        );
        // In a narrow terminal too.
        let many = ActivitySnapshot { done: 38_000, total: 40_000, seconds: 12.0, ..UPDATE };
        for width in 40..=180 {
            let [now, next] = [many, ActivitySnapshot { done: 38_200, ..many }]
                .map(|now| progress.live_line(&now, Some(width), AnsiStyle::default()));
            assert_ne!(now, next, "{width} columns");
        }
        let eval = ActivitySnapshot { work: Work::Evaluation, done: 10, total: 40, seconds: 2.0, ..UPDATE };
        assert_eq!(line(&eval), "eval    step 4  ━━────────  10/40 samples  2.0 s  eta 6.0 s");
        let saving = ActivitySnapshot { work: Work::Checkpoint, total: 0, seconds: 1.5, ..UPDATE };
        assert_eq!(line(&saving), "saving  step 4  a checkpoint  1.5 s");
        let starting = ActivitySnapshot { seconds: 3.0, ..ActivitySnapshot::default() };
        assert_eq!(line(&starting), "starting  3.0 s");
    }

    /// 100 slow updates leave the window; only the last eleven, ten times as fast, count.
    #[test]
    fn rates_are_those_of_the_recent_window() {
        let mut progress = after(&[fixtures::started(0.0)]);
        let mut t = 0.0;
        for step in 1..=120 {
            let seconds = if step <= 100 { 10.0 } else { 1.0 };
            t += seconds;
            let mut record = fixtures::step(t, step);
            if let Event::Step { step_s, samples, .. } = &mut record.event {
                (*step_s, *samples) = (seconds, step * 100);
            }
            progress.add(&record);
        }
        assert_eq!(progress.recent.len(), 11);
        assert!((progress.samples_per_second().unwrap() - 100.0).abs() < 1e-9);
        assert!((progress.data_wait().unwrap() - 0.01).abs() < 1e-9);
    }

    #[test]
    fn nothing_is_claimed_before_it_is_known() {
        let mut progress = after(&[fixtures::started(0.0), fixtures::planned(0.0)]);
        assert_eq!((progress.samples_per_second(), progress.eta(0)), (None, None));
        assert_eq!(progress.line(AnsiStyle::default()), "starting");
        progress.add(&fixtures::resumed(0.0, 4));
        progress.add(&fixtures::step(1.0, 5));
        // The first update of a resumed run does not show how many of the samples are its own.
        assert_eq!((progress.samples_per_second(), progress.eta(5)), (None, Some(1.0)));
    }
}
