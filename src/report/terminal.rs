//! A run on stderr: a live bar on a terminal, occasional plain lines elsewhere.
//!
//! Lines are a pure function of the records; their timestamps are the clock. Errors of the run are reported by the
//! caller that receives them, so that none appears twice.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::progress::RunProgress;
use super::summary;
use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity, plan};
use crate::base::units::{Bytes, format_count};
use crate::events::Sink;
use crate::events::Summary;
use crate::events::event::{Event, EventRecord};

/// Minimum seconds between plain progress lines.
const PLAIN_EVERY_S: f64 = 5.0;
/// Minimum seconds between redraws of the bar.
const DRAW_EVERY_S: f64 = 0.05;

/// What people see of a run.
pub struct Terminal<W> {
    out: W,
    display: DisplayOptions,
    bar: Option<ProgressBar>,
    progress: RunProgress,
    summary: Summary,
    /// Step of the last progress line, and when it was shown.
    last_line: Option<(u64, f64)>,
}

impl<W: Write + Send> Terminal<W> {
    /// `history` summarizes a resumed run's events so far; the default for a new run. With `display.interactive` the
    /// bar is drawn on stderr, and `out` should be stderr too.
    pub fn new(out: W, display: DisplayOptions, history: Summary) -> Self {
        Self { out, display, bar: None, progress: RunProgress::default(), summary: history, last_line: None }
    }

    fn paint(&self) -> AnsiStyle {
        AnsiStyle { color: self.display.color }
    }

    /// Prints above the bar, if there is one.
    fn print(&mut self, lines: &[String]) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        let text = lines.join("\n") + "\n";
        let out = &mut self.out;
        let mut write = || out.write_all(text.as_bytes()).and_then(|()| out.flush());
        match &self.bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    /// If a progress line is due: redraws the bar, or returns a plain line.
    fn draw_progress(&mut self, t: f64, every: f64) -> Option<String> {
        let step = self.progress.step();
        if self.last_line.is_some_and(|(shown, at)| shown == step || t - at < every) {
            return None;
        }
        self.last_line = Some((step, t));
        if !self.display.interactive {
            return Some(self.progress.line(None, false, self.paint()));
        }
        let width = console::Term::stderr().size_checked().map(|(_, columns)| columns as usize);
        let line = self.progress.line(width, true, self.paint());
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.with_style(ProgressStyle::with_template("{wide_msg}").unwrap_or(ProgressStyle::default_bar()))
        });
        bar.set_message(line);
        bar.tick();
        None
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// The lines for a record, except progress.
    fn event_lines(&self, record: &EventRecord) -> Vec<String> {
        let paint = self.paint();
        let line = |label: String, text: String| vec![format!("{label} {text}")];
        let label = |text: &str| format!("{text:<6}");
        match &record.event {
            Event::Started {
                name,
                run,
                device,
                threads,
                parameters,
                trained_parameters,
                train_samples,
                valid_samples,
                total_steps,
                seed,
                ..
            } => {
                let epochs = self.progress.epoch(*total_steps);
                let plural = if epochs == 1 { "" } else { "s" };
                let trained = trained_parameters.unwrap_or(*parameters);
                let (parameters, steps) =
                    (plan::parameter_counts(*parameters, trained), format_count(*total_steps));
                let (train, valid) = (format_count(*train_samples), format_count(*valid_samples));
                vec![
                    format!(
                        "{} {name}  {parameters}  {device}, {threads} threads  seed {seed}",
                        paint.bold(&label("run"))
                    ),
                    format!(
                        "       {train} training and {valid} validation samples  {steps} steps, {epochs} epoch{plural}"
                    ),
                    format!("       {run}"),
                ]
            }
            Event::Planned { plan } => {
                plan::lines(plan, self.display).into_iter().chain([String::new()]).collect()
            }
            Event::Resumed { step, checkpoint, skipped } => {
                let from = match checkpoint {
                    Some(path) => format!("at step {} from {path}", format_count(*step)),
                    None => "no checkpoint yet: starting over".into(),
                };
                let skipped = skipped.iter().map(|reason| format!("       skipped {reason}"));
                line(paint.bold(&label("resume")), from).into_iter().chain(skipped).collect()
            }
            Event::Eval { step, metrics, .. } => {
                let epoch = self.progress.epoch(*step);
                line(
                    paint.green(&label("eval")),
                    format!("epoch {epoch}  {}", summary::format_metrics(metrics)),
                )
            }
            Event::Checkpoint { step, path, bytes, write_s }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                let (bytes, time) = (text::bytes(*bytes), text::duration(*write_s));
                line(
                    paint.dim(&label("saved")),
                    format!("step {}  {path}  {bytes} in {time}", format_count(*step)),
                )
            }
            Event::Best { step, metric, value, .. } if self.display.verbosity == Verbosity::Verbose => {
                let text = format!("step {}  {metric} {} so far", format_count(*step), text::number(*value));
                line(paint.dim(&label("best")), text)
            }
            Event::Oom { step, phase, requester, bytes, left } => {
                let (bytes, left) = (text::bytes(*bytes), text::bytes(*left));
                let text = format!(
                    "step {}  {phase}: {requester} requested {bytes}, {left} left",
                    format_count(*step)
                );
                line(paint.yellow(&label("memory")), text)
            }
            Event::Pressure { step, left, low, stalled } => {
                let (left, low) = (text::bytes(*left), text::bytes(*low));
                let stalled = stalled.map(|s| format!(", {:.0} % stalled", 100.0 * s)).unwrap_or_default();
                let text = format!(
                    "step {}  {left} left on the host, less than {low}{stalled}",
                    format_count(*step)
                );
                line(paint.yellow(&label("memory")), text)
            }
            Event::Corrected { step, reserved, measured, budget } => {
                let (reserved, measured) = (text::bytes(*reserved), text::bytes(*measured));
                let text = format!(
                    "step {}  {measured} measured, {reserved} reserved: the budget is now {}",
                    format_count(*step),
                    text::bytes(*budget)
                );
                line(paint.yellow(&label("memory")), text)
            }
            Event::Restarted { cause, budget, .. } => {
                let text = format!("{cause}; restarted with {}", text::bytes(*budget));
                line(paint.yellow(&label("worker")), text)
            }
            Event::Shrunk { step, change, micro_batch, accumulation_steps } => {
                let text = format!(
                    "step {}  {change}  now {micro_batch} x {accumulation_steps}",
                    format_count(*step)
                );
                line(paint.yellow(&label("shrunk")), text)
            }
            Event::Grown { step, change, micro_batch, accumulation_steps } => {
                let text = format!(
                    "step {}  {change}  now {micro_batch} x {accumulation_steps}",
                    format_count(*step)
                );
                line(paint.green(&label("grown")), text)
            }
            Event::BadRecords { step, records, .. } => {
                let bad = |why: &String| {
                    format!("{} step {}  skipped {why}", paint.yellow(&label("bad")), format_count(*step))
                };
                records.iter().map(bad).collect()
            }
            Event::SlowData { step, fraction, cause, advice } => {
                let waiting = text::percent(*fraction, 1.0);
                let text = format!(
                    "step {}  {waiting} of the time is spent waiting for data: {cause}",
                    format_count(*step)
                );
                let advice = format!("       {advice}");
                line(paint.yellow(&label("data")), text).into_iter().chain([advice]).collect()
            }
            Event::Initialized { matched, new, resized, left_over } => {
                let list = |what: &str, names: &[String]| match names {
                    [] => String::new(),
                    [.., last] if names.len() <= 4 => {
                        let first = names[..names.len() - 1].iter().map(|name| format!("{name}, "));
                        format!("; {what} {}{last}", first.collect::<String>())
                    }
                    [first, ..] => format!("; {what} {first} and {} more", names.len() - 1),
                };
                let rest = list("new", new) + &list("resized", resized) + &list("left over", left_over);
                line(paint.bold(&label("init")), format!("{matched} tensors matched{rest}"))
            }
            Event::StoppedEarly { step, reason } => {
                line(paint.bold(&label("stop")), format!("step {}  {reason}", format_count(*step)))
            }
            Event::Finished { .. } | Event::Interrupted { .. } => {
                [String::new()].into_iter().chain(self.summary.lines(self.display)).collect()
            }
            Event::CudaGraphCaptured { step, launches, arena_bytes, arena_waste_bytes }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                let (arena, waste) = (Bytes(*arena_bytes), Bytes(*arena_waste_bytes));
                let text = format!(
                    "step {}  {launches} launches captured, arena {arena}, {waste} of it unused",
                    format_count(*step)
                );
                line(paint.green(&label("graph")), text)
            }
            Event::CudaGraphDisabled { step, reason } if self.display.verbosity == Verbosity::Verbose => {
                line(label("graph"), format!("step {}  no CUDA graph: {reason}", format_count(*step)))
            }
            Event::CudnnDisabled { step, reason } => line(
                paint.yellow(&label("cudnn")),
                format!("step {}  evaluations continue without cuDNN: {reason}", format_count(*step)),
            ),
            Event::DeviceHeap { synchronizes, arena_passes, .. }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                let text = format!(
                    "{} passes from an arena, {synchronizes} synchronizes to remap memory",
                    format_count(*arena_passes)
                );
                line(label("heap"), text)
            }
            Event::Step { .. }
            | Event::Checkpoint { .. }
            | Event::Best { .. }
            | Event::CudaGraphCaptured { .. }
            | Event::CudaGraphDisabled { .. }
            | Event::DeviceHeap { .. }
            | Event::Diverged { .. }
            | Event::Failed { .. } => vec![],
        }
    }
}

impl<W: Write + Send> Sink for Terminal<W> {
    fn name(&self) -> String {
        "stderr".into()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        if self.display.verbosity == Verbosity::Quiet {
            return Ok(());
        }
        self.progress.add(record);
        self.summary.add(record);
        let mut lines = Vec::new();
        match &record.event {
            Event::Step { step, .. } => {
                let last = *step == self.summary.total_steps;
                let every = if self.display.interactive { DRAW_EVERY_S } else { PLAIN_EVERY_S };
                lines.extend(self.draw_progress(record.t, if last { 0.0 } else { every }));
            }
            Event::Eval { .. } => lines.extend(self.draw_progress(record.t, 0.0)),
            Event::Finished { .. }
            | Event::Interrupted { .. }
            | Event::Diverged { .. }
            | Event::Failed { .. } => self.clear(),
            _ => {}
        }
        lines.extend(self.event_lines(record));
        self.print(&lines)
    }

    fn warn(&mut self, text: &str) -> io::Result<()> {
        let line = format!("{} {text}", self.paint().yellow("warning:"));
        self.print(&[line])
    }

    fn finish(&mut self) -> io::Result<()> {
        self.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Phase;
    use crate::report::fixtures;

    fn shown(records: &[EventRecord], verbosity: Verbosity) -> String {
        let mut out = Vec::new();
        let display = DisplayOptions { verbosity, ..DisplayOptions::default() };
        let mut terminal = Terminal::new(&mut out, display, Summary::default());
        records.iter().for_each(|record| terminal.record(record).unwrap());
        terminal.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Of six updates within five seconds of each other, plain output shows the first, those at evaluations and the
    /// last.
    #[test]
    fn plain_lines_come_now_and_then_and_carry_no_control_codes() {
        let text = shown(&fixtures::run(), Verbosity::Normal);
        assert!(!text.contains('\x1b') && !text.contains('\r'), "{text:?}");
        let plan = plan::lines(&fixtures::plan(), DisplayOptions::default()).join("\n");
        let expected = format!(
            "\
run    shapes  101,770 parameters  cpu, 2 threads  seed 42
       150 training and 50 validation samples  6 steps, 3 epochs
       runs/shapes/1
{plan}

epoch 1/3  step 1/6  loss 1.0000  lr 1.0e-3  100 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 5.0 s
epoch 1/3  step 2/6  loss 0.5000  lr 1.0e-3  50 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 5.0 s
eval   epoch 1  valid.accuracy 0.5000  valid.loss 0.5000
epoch 2/3  step 4/6  loss 0.2500  lr 1.0e-3  67 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 2.5 s
eval   epoch 2  valid.accuracy 0.7500  valid.loss 0.2500
epoch 3/3  step 6/6  loss 0.1667  lr 1.0e-3  70 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 0.0 s
eval   epoch 3  valid.accuracy 0.7000  valid.loss 0.3000

run      shapes finished: 6 steps, 3 epochs, 450 samples
time     9.0 s  50 samples/s  data wait 0.9 %
last     train.loss 0.1667  valid.accuracy 0.7000  valid.loss 0.3000
best     valid.loss 0.2500  at step 4
ram      peak 206 MiB heap, 209 MiB resident, 212 MiB planned (+1.4 %), 256 MiB budget
saved    c/6
folder   runs/shapes/1
"
        );
        assert_eq!(text, expected);
    }

    #[test]
    fn a_long_run_has_a_line_every_few_seconds() {
        let mut records = vec![fixtures::started(0.0), fixtures::planned(0.0)];
        records.extend((1..=5).map(|step| fixtures::step(step as f64 * 2.0, step)));
        let text = shown(&records, Verbosity::Normal);
        let steps: Vec<&str> =
            text.lines().filter_map(|line| line.split("  ").find(|f| f.starts_with("step"))).collect();
        assert_eq!(steps, ["step 1/6", "step 4/6"]);
    }

    #[test]
    fn quiet_prints_nothing_but_warnings() {
        assert_eq!(shown(&fixtures::run(), Verbosity::Quiet), "");
        let mut out = Vec::new();
        let display = DisplayOptions { verbosity: Verbosity::Quiet, ..DisplayOptions::default() };
        Terminal::new(&mut out, display, Summary::default()).warn("the disk is slow").unwrap();
        assert_eq!(out, b"warning: the disk is slow\n");
    }

    #[test]
    fn memory_events_are_printed_and_checkpoints_only_when_verbose() {
        let at = |event| EventRecord { t: 0.0, event };
        let records = [
            at(Event::Resumed {
                step: 2,
                checkpoint: Some("c/2".into()),
                skipped: vec!["c/4: checksum".into()],
            }),
            at(Event::Resumed { step: 0, checkpoint: None, skipped: vec![] }),
            at(Event::Oom {
                step: 2,
                phase: Phase::Backward,
                requester: "conv1".into(),
                bytes: 512 << 20,
                left: 210 << 20,
            }),
            at(Event::Shrunk {
                step: 2,
                change: "micro-batch 100 to 50".into(),
                micro_batch: 50,
                accumulation_steps: 2,
            }),
            at(Event::Pressure { step: 3, left: 200 << 20, low: 512 << 20, stalled: Some(0.25) }),
            at(Event::Corrected { step: 3, reserved: 90 << 20, measured: 98 << 20, budget: 248 << 20 }),
            at(Event::Grown {
                step: 9,
                change: "micro-batch 100".into(),
                micro_batch: 100,
                accumulation_steps: 1,
            }),
            at(Event::Restarted {
                restarts: 1,
                cause: "aborted (an allocation failed)".into(),
                budget: 64 << 20,
            }),
            at(Event::CudnnDisabled { step: 2, reason: "error code 20000".into() }),
            at(Event::CudaGraphCaptured {
                step: 2,
                launches: 120,
                arena_bytes: 1 << 20,
                arena_waste_bytes: 1 << 10,
            }),
            at(Event::CudaGraphDisabled { step: 2, reason: "memory.graphs is false".into() }),
            fixtures::checkpoint(1.0, 4),
            fixtures::best(1.0, 4, 0.25),
        ];
        let text = shown(&records, Verbosity::Normal);
        assert_eq!(
            text,
            "\
resume at step 2 from c/2
       skipped c/4: checksum
resume no checkpoint yet: starting over
memory step 2  backward: conv1 requested 512 MiB, 210 MiB left
shrunk step 2  micro-batch 100 to 50  now 50 x 2
memory step 3  200 MiB left on the host, less than 512 MiB, 25 % stalled
memory step 3  98.0 MiB measured, 90.0 MiB reserved: the budget is now 248 MiB
grown  step 9  micro-batch 100  now 100 x 1
worker aborted (an allocation failed); restarted with 64.0 MiB
cudnn  step 2  evaluations continue without cuDNN: error code 20000
"
        );
        let more = "\
graph  step 2  120 launches captured, arena 1.00 MiB, 1.00 KiB of it unused
graph  step 2  no CUDA graph: memory.graphs is false
saved  step 4  c/4  1.00 MiB in 0.1 s
best   step 4  valid.loss 0.2500 so far
";
        assert_eq!(shown(&records, Verbosity::Verbose), text + more);
    }
}
