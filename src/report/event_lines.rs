//! The lines that people see for an event, without the progress line. Pure functions of the events so far.

use super::summary;
use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity, plan};
use crate::base::units::{Bytes, counted, format_count};
use crate::events::Summary;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::train::signals::Signal;

/// What the lines of an event depend on besides the event.
pub(super) struct RunView<'a> {
    pub display: DisplayOptions,
    pub summary: &'a Summary,
    /// The command that resumes the run.
    pub resume: Option<&'a str>,
}

/// One line about an event by itself.
pub(super) fn explain(event: &Event) -> String {
    let summary = Summary::default();
    let display = DisplayOptions { verbosity: Verbosity::Verbose, ..DisplayOptions::default() };
    let lines = RunView { display, summary: &summary, resume: None }.lines(event);
    let words: Vec<&str> = lines.iter().flat_map(|line| line.split_whitespace()).collect();
    words.join(" ")
}

impl RunView<'_> {
    pub fn lines(&self, event: &Event) -> Vec<String> {
        let paint = AnsiStyle { color: self.display.color };
        let line = |label: String, text: String| vec![format!("{label} {text}")];
        let label = |text: &str| format!("{text:<6}");
        match event {
            Event::Started {
                name,
                run,
                device,
                threads,
                parameters,
                trained_parameters,
                train_samples,
                valid_samples,
                test_samples,
                total_steps,
                steps_per_epoch,
                seed,
                ..
            } => {
                let epochs = text::epochs(*total_steps as f64 / (*steps_per_epoch).max(1) as f64);
                let trained = trained_parameters.unwrap_or(*parameters);
                let (parameters, steps) =
                    (plan::parameter_counts(*parameters, trained), counted(*total_steps, "step"));
                let threads = counted(*threads as u64, "thread");
                let (train, valid) = (format_count(*train_samples), *valid_samples);
                let sets = match test_samples {
                    None => format!("{train} training and {}", counted(valid, "validation sample")),
                    Some(test) => format!(
                        "{train} training, {} validation and {}",
                        format_count(valid),
                        counted(*test, "test sample")
                    ),
                };
                vec![
                    format!(
                        "{} {name}  {parameters}  {device}, {threads}  seed {seed}",
                        paint.bold(&label("run"))
                    ),
                    format!("       {sets}  {steps}, {epochs}"),
                    format!("       {run}"),
                ]
            }
            Event::Planned { plan } => {
                plan::lines_of_run(plan, self.display).into_iter().chain([String::new()]).collect()
            }
            Event::Resumed { step, checkpoint, skipped } => {
                let from = match checkpoint {
                    Some(path) => format!("at step {} from {path}", format_count(*step)),
                    None => "no checkpoint yet: starting over".into(),
                };
                let skipped = skipped.iter().map(|reason| format!("       skipped {reason}"));
                line(paint.bold(&label("resume")), from).into_iter().chain(skipped).collect()
            }
            Event::NothingLeft { reason, key, .. } => {
                let change = if key == "stop.target" { "change" } else { "raise" };
                let text = format!("nothing is left to train: {reason}; {change} `{key}` to train on");
                line(paint.bold(&label("done")), text)
            }
            Event::Pruned { step, sparsity, pruned, weights, pruned_units, units }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                let (part, of) = (text::percent(*sparsity, 1.0), format_count(*weights));
                let units = pruned_units.zip(*units).map(|(pruned, units)| {
                    format!(", {} of {} units", format_count(pruned), format_count(units))
                });
                let text = format!(
                    "step {}  {part}: {} of {of} weights are zero{}",
                    format_count(*step),
                    format_count(*pruned),
                    units.unwrap_or_default()
                );
                line(paint.dim(&label("prune")), text)
            }
            Event::Quantized { step } => line(
                paint.bold(&label("round")),
                format!("step {}  weights and activations have 8 bits from here on", format_count(*step)),
            ),
            // `train.` sorts before `valid.`.
            Event::Eval { step, epoch, metrics, eval_s, .. } => line(
                paint.green(&label("eval")),
                format!(
                    "step {}  epoch {epoch}  {}  {}",
                    format_count(*step),
                    summary::format_metrics(metrics),
                    text::duration(*eval_s)
                ),
            ),
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
            Event::TeacherLogits { path, samples, bytes, was_stored, seconds } => {
                let (samples, bytes) = (counted(*samples, "sample"), text::bytes(*bytes));
                let when = match was_stored {
                    true => "stored by an earlier run".to_owned(),
                    false => format!("stored in {}", text::duration(*seconds)),
                };
                line(
                    paint.bold(&label("logits")),
                    format!("of the teacher for {samples}, {bytes}, {when}: {path}"),
                )
            }
            Event::Initialized { matched, new, resized, left_over, factorized } => {
                let list = |what: &str, names: &[String]| match names {
                    [] => String::new(),
                    [.., last] if names.len() <= 4 => {
                        let first = names[..names.len() - 1].iter().map(|name| format!("{name}, "));
                        format!("; {what} {}{last}", first.collect::<String>())
                    }
                    [first, ..] => format!("; {what} {first} and {} more", names.len() - 1),
                };
                let rest = list("factorized", factorized) + &list("new", new) + &list("resized", resized);
                let rest = rest + &list("left over", left_over);
                line(
                    paint.bold(&label("init")),
                    format!("{} matched{rest}", counted(*matched as u64, "tensor")),
                )
            }
            Event::StoppedEarly { step, reason } => {
                line(paint.bold(&label("stop")), format!("step {}  {reason}", format_count(*step)))
            }
            Event::Finished { .. } | Event::Interrupted { .. } => {
                [String::new()].into_iter().chain(self.summary.lines(self.display, self.resume)).collect()
            }
            Event::CudaGraphCaptured { step, launches, arena_bytes, arena_waste_bytes }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                let (arena, waste) = (Bytes(*arena_bytes), Bytes(*arena_waste_bytes));
                let text = format!(
                    "step {}  {} captured, arena {arena}, {waste} of it unused",
                    format_count(*step),
                    counted(*launches as u64, "launch")
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
                    "{} from an arena, {} to remap memory",
                    counted(*arena_passes, "pass"),
                    counted(*synchronizes, "synchronize")
                );
                line(label("heap"), text)
            }
            Event::MemorySnapshot { step, error: Some(error), .. } => line(
                paint.yellow(&label("memory")),
                format!("step {}  who holds it cannot be written: {error}", format_count(*step)),
            ),
            Event::MemorySnapshot { step, path: Some(path), .. }
                if self.display.verbosity == Verbosity::Verbose =>
            {
                line(
                    paint.dim(&label("memory")),
                    format!("step {}  who holds it is in {path}", format_count(*step)),
                )
            }
            Event::Step { .. }
            | Event::Pruned { .. }
            | Event::MemorySnapshot { .. }
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

/// The answer to a signal, which depends on what the run is doing.
pub(super) fn stop_line(signal: Signal, work: Work, paint: AnsiStyle) -> String {
    let doing = match work {
        Work::Starting | Work::Update => "finishing the update, then a checkpoint",
        Work::Teacher => "leaving the teacher, whose logits are computed again when the run is resumed",
        Work::Evaluation => "leaving the evaluation, which is repeated when the run is resumed",
        Work::Checkpoint => "finishing the checkpoint",
    };
    let again = match signal {
        Signal::Interrupt => "press Ctrl-C again to leave now".to_owned(),
        Signal::Terminate => format!("a second {} leaves now", signal.name()),
    };
    format!("{} {doing}; {again}", paint.yellow("stop  "))
}
