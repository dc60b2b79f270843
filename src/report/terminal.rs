//! A run on stderr: a bar that redraws itself on a terminal, plain lines now and then elsewhere.
//!
//! Lines are a pure function of the records; the clock is theirs. Errors of the run are left to
//! whoever returns them, so that none is said twice.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::progress::Progress;
use super::summary::{self, Summary};
use super::text::{self, Paint};
use super::{Look, Sink, Verbosity, plan};
use crate::train::event::{Event, Record};
use crate::units::count;

/// Seconds between plain progress lines, at least.
const PLAIN_EVERY_S: f64 = 5.0;
/// Seconds between redraws of the bar, at least.
const DRAW_EVERY_S: f64 = 0.05;

/// What people see of a run.
pub struct Terminal<W> {
    out: W,
    look: Look,
    bar: Option<ProgressBar>,
    progress: Progress,
    summary: Summary,
    /// Step of the last progress line and when it was shown.
    shown: Option<(u64, f64)>,
}

impl<W: Write + Send> Terminal<W> {
    /// `history` is the summary of a resumed run's events so far; the default for a new run.
    /// With `look.live` the bar is drawn on stderr, and `out` should be stderr too.
    pub fn new(out: W, look: Look, history: Summary) -> Self {
        Self { out, look, bar: None, progress: Progress::default(), summary: history, shown: None }
    }

    fn paint(&self) -> Paint {
        Paint { color: self.look.color }
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

    /// A progress line is due: the bar is redrawn, or a plain line comes back.
    fn step(&mut self, t: f64, every: f64) -> Option<String> {
        let step = self.progress.step();
        if self.shown.is_some_and(|(shown, at)| shown == step || t - at < every) {
            return None;
        }
        self.shown = Some((step, t));
        if !self.look.live {
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

    /// The lines a record is worth, apart from progress.
    fn lines(&self, record: &Record) -> Vec<String> {
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
                train_samples,
                valid_samples,
                total_steps,
                seed,
                ..
            } => vec![
                format!(
                    "{} {name}: {} parameters, {} training and {} validation samples, {} steps, {device} ({threads} threads), seed {seed}",
                    paint.bold(&label("run")),
                    count(*parameters),
                    count(*train_samples),
                    count(*valid_samples),
                    count(*total_steps),
                ),
                format!("       {run}"),
            ],
            Event::Planned { plan } => {
                plan::lines(plan, self.look).into_iter().chain([String::new()]).collect()
            }
            Event::Resumed { step, checkpoint, skipped } => {
                let from = match checkpoint {
                    Some(path) => format!("at step {} from {path}", count(*step)),
                    None => "no checkpoint yet: from the beginning".into(),
                };
                let passed = skipped.iter().map(|reason| format!("       passed over {reason}"));
                line(paint.bold(&label("resume")), from).into_iter().chain(passed).collect()
            }
            Event::Eval { step, metrics, .. } => {
                let epoch = self.progress.epoch(*step);
                line(paint.green(&label("eval")), format!("epoch {epoch}  {}", summary::values(metrics)))
            }
            Event::Checkpoint { step, path, bytes, write_s, best }
                if self.look.verbosity == Verbosity::Verbose =>
            {
                let best = if *best { "  best so far" } else { "" };
                let (bytes, time) = (text::bytes(*bytes), text::duration(*write_s));
                line(
                    paint.dim(&label("saved")),
                    format!("step {}  {path}  {bytes} in {time}{best}", count(*step)),
                )
            }
            Event::Oom { step, phase, asker, bytes, left } => {
                let (bytes, left) = (text::bytes(*bytes), text::bytes(*left));
                let text = format!("step {}  {phase}: {asker} asked for {bytes}, {left} left", count(*step));
                line(paint.yellow(&label("memory")), text)
            }
            Event::Shrunk { step, change, micro_batch, accumulation_steps } => {
                let text =
                    format!("step {}  {change}  now {micro_batch} x {accumulation_steps}", count(*step));
                line(paint.yellow(&label("shrunk")), text)
            }
            Event::Grown { step, change, micro_batch, accumulation_steps } => {
                let text =
                    format!("step {}  {change}  now {micro_batch} x {accumulation_steps}", count(*step));
                line(paint.green(&label("grown")), text)
            }
            Event::Finished { .. } | Event::Interrupted { .. } => {
                [String::new()].into_iter().chain(self.summary.lines(self.look)).collect()
            }
            Event::Step { .. } | Event::Checkpoint { .. } | Event::Diverged { .. } | Event::Failed { .. } => {
                vec![]
            }
        }
    }
}

impl<W: Write + Send> Sink for Terminal<W> {
    fn name(&self) -> String {
        "stderr".into()
    }

    fn record(&mut self, record: &Record) -> io::Result<()> {
        if self.look.verbosity == Verbosity::Quiet {
            return Ok(());
        }
        self.progress.add(record);
        self.summary.add(record);
        let mut lines = Vec::new();
        match &record.event {
            Event::Step { step, .. } => {
                let last = *step == self.summary.total_steps;
                let every = if self.look.live { DRAW_EVERY_S } else { PLAIN_EVERY_S };
                lines.extend(self.step(record.t, if last { 0.0 } else { every }));
            }
            Event::Eval { .. } => lines.extend(self.step(record.t, 0.0)),
            Event::Finished { .. }
            | Event::Interrupted { .. }
            | Event::Diverged { .. }
            | Event::Failed { .. } => self.clear(),
            _ => {}
        }
        lines.extend(self.lines(record));
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
