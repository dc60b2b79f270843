//! The summary of a run as people read it.

use std::collections::BTreeMap;

use super::DisplayOptions;
use super::text::{self, AnsiStyle};
use crate::base::units::{counted, format_count};
use crate::events::summary::{RunState, Summary};

impl Summary {
    /// The closing lines of a run; `resume` is the command that resumes it.
    pub fn lines(&self, display: DisplayOptions, resume: Option<&str>) -> Vec<String> {
        let paint = AnsiStyle { color: display.color };
        let mut rows = Vec::new();
        let mut row =
            |label: &str, text: String| rows.push(format!("{}{text}", paint.dim(&format!("{label:<9}"))));
        let state = match self.state {
            RunState::Unfinished => paint.yellow("unfinished"),
            RunState::Interrupted => paint.yellow("interrupted"),
            RunState::Diverged => paint.red("diverged"),
            RunState::Failed => paint.red("failed"),
            RunState::Stopped => paint.yellow("stopped"),
            RunState::Finished => paint.green("finished"),
        };
        let steps = match (self.state, &self.reason) {
            (RunState::Finished, None) => format!(": {}", counted(self.steps, "step")),
            // `--max-steps 40 of 940` says how many.
            (RunState::Stopped, Some(reason)) => format!(": {reason}"),
            (_, reason) => {
                let reason = reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
                let total = counted(self.total_steps, "step");
                format!("{reason}: {} of {total}", format_count(self.steps))
            }
        };
        let (name, epochs, samples) =
            (&self.name, text::epochs(self.epochs), counted(self.samples, "sample"));
        row("run", format!("{name} {state}{steps}, {epochs}, {samples}"));
        let mut time = text::duration(self.elapsed_s);
        if self.elapsed_s > 0.0 && self.samples > 0 {
            let rate = format_count((self.samples as f64 / self.elapsed_s).round() as u64);
            time +=
                &format!("  {rate} samples/s  data wait {}", text::percent(self.data_wait_s, self.elapsed_s));
        }
        row("time", time);
        if let Some(advice) = &self.slow_data {
            row("data", advice.clone());
        }
        if self.bad_records > 0 {
            row("bad", format!("{} skipped", counted(self.bad_records, "record")));
        }
        if !self.metrics.is_empty() {
            row("last", format_metrics(&self.metrics));
        }
        if let Some(best) = &self.best {
            let value = paint.bold(&format!("{} {}", best.metric, text::number(best.value)));
            row("best", format!("{value}  at step {}", format_count(best.step)));
        }
        if let Some(sparsity) = self.sparsity {
            row("pruned", format!("{} of the weights are zero", text::percent(sparsity, 1.0)));
        }
        let (planned, measured, budget) =
            (self.planned_peak_bytes, self.measured_peak_bytes, self.budget_bytes);
        for (space, planned, measured, resident, budget) in [
            ("ram", planned.ram, measured.ram, self.resident_peak_bytes, budget.ram),
            ("vram", planned.vram, measured.vram, 0, budget.vram),
        ] {
            if planned.max(measured) > 0 {
                let measured_text = match resident {
                    0 => format!("{} measured", text::bytes(measured)),
                    resident => {
                        format!("{} heap, {} resident", text::bytes(measured), text::bytes(resident))
                    }
                };
                row(
                    space,
                    format!(
                        "peak {measured_text}, {} planned{}, {} budget",
                        text::bytes(planned),
                        plan_error(measured.max(resident), planned),
                        text::bytes(budget)
                    ),
                );
            }
        }
        let event_counts: Vec<String> = [
            (self.restarts, "restarted"),
            (self.resumes, "resumed"),
            (self.ooms, "out of memory"),
            (self.shrunk, "shrunk"),
            (self.grown, "grown"),
        ]
        .iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, what)| format!("{what} {n} x"))
        .collect();
        if !event_counts.is_empty() {
            row("events", event_counts.join(", "));
        }
        if let Some(checkpoint) = &self.checkpoint {
            row("saved", checkpoint.clone());
        }
        row("folder", self.run.clone());
        if let Some(command) =
            resume.filter(|_| self.state != RunState::Finished && self.checkpoint.is_some())
        {
            row("resume", command.to_owned());
        }
        rows
    }
}

/// `valid.accuracy 0.9621  valid.loss 0.1290`.
pub(super) fn format_metrics(metrics: &BTreeMap<String, f64>) -> String {
    let shown: Vec<String> =
        metrics.iter().map(|(name, value)| format!("{name} {}", text::number(*value))).collect();
    shown.join("  ")
}

/// The planned peak relative to the measured one: ` (+3.1 %)`.
fn plan_error(measured: u64, planned: u64) -> String {
    if measured == 0 || planned == 0 {
        return String::new();
    }
    let off = 100.0 * (planned as f64 / measured as f64 - 1.0);
    format!(" ({off:+.1} %)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Event, EventRecord};
    use crate::report::fixtures;

    fn folded(records: &[EventRecord]) -> Summary {
        let mut summary = Summary::default();
        records.iter().for_each(|record| summary.add(record));
        summary
    }

    #[test]
    fn a_finished_run_reads_at_a_glance() {
        let text = folded(&fixtures::run()).lines(DisplayOptions::default(), None).join("\n");
        assert_eq!(
            text,
            "\
run      shapes finished: 6 steps, 3 epochs, 450 samples
time     9.0 s  50 samples/s  data wait 0.9 %
last     train.loss 0.1667  valid.accuracy 0.7000  valid.loss 0.3000
best     valid.loss 0.2500  at step 4
ram      peak 206 MiB heap, 209 MiB resident, 212 MiB planned (+1.4 %), 256 MiB budget
saved    c/6
folder   runs/shapes/1"
        );
    }

    #[test]
    fn a_part_of_a_run_is_not_called_finished() {
        let mut records = fixtures::run();
        if let Some(Event::Finished { steps, stopped, samples, epochs, .. }) =
            records.last_mut().map(|record| &mut record.event)
        {
            (*steps, *epochs, *samples) = (4, 2.0, 300);
            *stopped = Some("--max-steps 4 of 6".into());
        }
        let summary = folded(&records);
        assert_eq!(
            (summary.state, summary.reason.as_deref()),
            (RunState::Stopped, Some("--max-steps 4 of 6"))
        );
        let lines =
            summary.lines(DisplayOptions::default(), Some("trainer fit job.toml --resume runs/shapes/1"));
        assert_eq!(lines[0], "run      shapes stopped: --max-steps 4 of 6, 2 epochs, 300 samples");
        assert_eq!(lines.last().unwrap(), "resume   trainer fit job.toml --resume runs/shapes/1");
    }

    /// Steps that a resumed run repeats have pruned nothing yet.
    #[test]
    fn a_pruned_run_says_how_sparse_it_is() {
        let pruned = |t, step, sparsity| EventRecord {
            t,
            event: Event::Pruned {
                step,
                sparsity,
                pruned: (1000.0 * sparsity) as u64,
                weights: 1000,
                pruned_units: None,
                units: None,
            },
        };
        let mut records = fixtures::run()[..4].to_vec();
        records.extend([pruned(3.0, 1, 0.25), pruned(4.0, 3, 0.8)]);
        let lines = |records: &[EventRecord]| folded(records).lines(DisplayOptions::default(), None);
        assert!(lines(&records).contains(&"pruned   80.0 % of the weights are zero".to_owned()));
        records.push(fixtures::resumed(5.0, 2));
        assert!(lines(&records).contains(&"pruned   25.0 % of the weights are zero".to_owned()));
    }

    #[test]
    fn a_run_that_stopped_says_why() {
        let mut records = fixtures::run()[..4].to_vec();
        let event = Event::Interrupted { step: 2, signal: "SIGTERM".into(), checkpoint: Some("c/2".into()) };
        records.push(EventRecord { t: 3.0, event });
        let resume = "trainer fit job.toml --resume runs/shapes/1";
        let lines = folded(&records).lines(DisplayOptions::default(), Some(resume));
        assert_eq!(lines[0], "run      shapes interrupted (SIGTERM): 2 of 6 steps, 1 epoch, 150 samples");
        let end = [
            "saved    c/2",
            "folder   runs/shapes/1",
            "resume   trainer fit job.toml --resume runs/shapes/1",
        ];
        assert_eq!(lines[lines.len() - 3..], end);
    }
}
