//! Progress of a run: rates over its recent updates, remaining time, and the progress line.
//!
//! A pure function of the records so far; their timestamps are the only clock.

use std::collections::VecDeque;

use super::text::{self, AnsiStyle};
use crate::base::units::format_count;
use crate::events::event::{Event, EventRecord, MemoryBytes};

/// Rates cover the last `WINDOW_S` seconds and at most `WINDOW_STEPS` updates.
const WINDOW_S: f64 = 10.0;
const WINDOW_STEPS: usize = 512;

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

    /// Seconds to the end: the remaining updates, plus evaluations at the rate so far.
    pub fn eta(&self) -> Option<f64> {
        let left = self.total_steps.saturating_sub(self.step()) as f64;
        let done = self.step().saturating_sub(self.start_step) as f64;
        let evals = if done > 0.0 { left * self.evals as f64 / done } else { 0.0 };
        Some(left * self.step_s()? + evals * self.eval_s)
    }

    /// The progress line. With a width, drops the least important fields until it fits.
    pub fn line(&self, width: Option<usize>, bar: bool, paint: AnsiStyle) -> String {
        let Some(last) = self.recent.back() else { return "starting".into() };
        let (total, epochs) = (format_count(self.total_steps), self.epochs().to_string());
        let (of_total, of_epochs) = (total.len(), epochs.len());
        let (space, used, budget) = match self.budget.vram {
            0 => ("ram", last.used.ram, self.budget.ram),
            vram => ("vram", last.used.vram, vram),
        };
        // (priority, text): the lowest priority is dropped first
        let mut fields = vec![
            (5, format!("epoch {:>of_epochs$}/{epochs}", self.epoch(last.step))),
            (8, format!("step {:>of_total$}/{total}", format_count(last.step))),
        ];
        if bar {
            let cells = if width.is_some_and(|width| width < 100) { 10 } else { 20 };
            let full = (cells as f64 * last.step as f64 / self.total_steps.max(1) as f64) as usize;
            fields.push((4, "━".repeat(full.min(cells)) + &"─".repeat(cells.saturating_sub(full))));
        }
        fields.push((9, format!("loss {}", text::number(last.loss))));
        fields.push((1, format!("lr {:.1e}", last.lr)));
        if let Some(rate) = self.samples_per_second() {
            fields.push((6, format!("{} samples/s", format_count(rate.round() as u64))));
        }
        fields.push((3, format!("{space} {} of {}", text::bytes(used), text::bytes(budget))));
        if let Some(wait) = self.data_wait() {
            fields.push((2, format!("wait {}", text::percent(wait, 1.0))));
        }
        if let Some(eta) = self.eta() {
            fields.push((7, format!("eta {}", text::duration(eta))));
        }
        let line_width = |fields: &[(u8, String)]| {
            fields.iter().map(|(_, text)| text.chars().count() + 2).sum::<usize>().saturating_sub(2)
        };
        while width.is_some_and(|width| line_width(&fields) > width) && fields.len() > 1 {
            let Some(least) = fields.iter().map(|(rank, _)| *rank).min() else { break };
            fields.retain(|(rank, _)| *rank != least);
        }
        let painted: Vec<String> = fields
            .iter()
            .map(|(_, text)| match text.find(['━', '─']) {
                Some(_) => {
                    let (full, empty) = text.split_at(text.find('─').unwrap_or(text.len()));
                    paint.cyan(full) + &paint.dim(empty)
                }
                None => text.clone(),
            })
            .collect();
        painted.join("  ")
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

    #[test]
    fn the_line_says_all_and_gives_way_by_rank() {
        let progress = after(&fixtures::run()[..9]); // 2 updates of 1 s and half an evaluation remain
        let line = |width, bar| progress.line(width, bar, AnsiStyle::default());
        assert_eq!(
            line(None, false),
            "epoch 2/3  step 4/6  loss 0.2500  lr 1.0e-3  67 samples/s  \
             ram 206 MiB of 256 MiB  wait 1.0 %  eta 2.2 s"
        );
        assert_eq!(
            line(Some(80), true),
            "epoch 2/3  step 4/6  ━━━━━━────  loss 0.2500  67 samples/s  eta 2.2 s"
        );
        assert_eq!(line(Some(40), true), "step 4/6  loss 0.2500  eta 2.2 s");
        assert_eq!(line(Some(1), true), "loss 0.2500");
        let painted = progress.line(Some(80), true, AnsiStyle { color: true });
        assert!(painted.contains("\x1b[36m━━━━━━\x1b[0m\x1b[2m────\x1b[0m"), "{painted:?}");
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
        assert_eq!((progress.samples_per_second(), progress.eta()), (None, None));
        assert_eq!(progress.line(None, true, AnsiStyle::default()), "starting");
        progress.add(&fixtures::resumed(0.0, 4));
        progress.add(&fixtures::step(1.0, 5));
        // The first update of a resumed run does not show how many of the samples are its own.
        assert_eq!((progress.samples_per_second(), progress.eta()), (None, Some(1.0)));
    }
}
