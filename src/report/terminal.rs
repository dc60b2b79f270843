//! A run on stderr: a live progress line on a terminal, occasional plain lines elsewhere.
//!
//! Lines are a pure function of the records, whose timestamps are the clock; between two records a thread redraws the
//! progress line from the run's [`Activity`], and answers a signal as soon as it comes. Errors of the run are reported
//! by the caller that receives them, so that none appears twice.

use std::io::{self, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::event_lines::{RunView, stop_line};
use super::progress::RunProgress;
use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::events::activity::{Activity, ActivitySnapshot};
use crate::events::event::{Event, EventRecord};
use crate::events::{Sink, Summary};
use crate::train::signals::Signals;

/// Minimum seconds between plain progress lines.
const PLAIN_EVERY_S: f64 = 5.0;
/// Between redraws of the progress line, and between looks for a signal.
const TICK: Duration = Duration::from_millis(100);
/// Columns kept free at the end of the progress line, where a terminal echoes `^C`.
const ECHO_COLUMNS: usize = 3;

/// What people see of a run.
pub struct Terminal<W: Write> {
    screen: Arc<Mutex<Screen<W>>>,
    ticker: Option<Ticker>,
}

/// The thread that redraws the progress line; it ends when the sender is dropped.
struct Ticker {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

struct Screen<W> {
    out: W,
    display: DisplayOptions,
    progress: RunProgress,
    summary: Summary,
    /// The command that resumes the run.
    resume: Option<String>,
    /// Columns of the progress line, if it is on the screen, with the cursor at its end.
    drawn: Option<usize>,
    /// Step of the last plain progress line, and when it was shown.
    last_line: Option<(u64, f64)>,
    /// Whether the line that answers a signal was printed.
    answered: bool,
}

impl<W: Write + Send> Terminal<W> {
    /// `history` summarizes a resumed run's events so far; the default for a new run. With `display.interactive`,
    /// `out` should be stderr.
    pub fn new(out: W, display: DisplayOptions, history: Summary) -> Self {
        let screen = Screen {
            out,
            display,
            progress: RunProgress::default(),
            summary: history,
            resume: None,
            drawn: None,
            last_line: None,
            answered: false,
        };
        Self { screen: Arc::new(Mutex::new(screen)), ticker: None }
    }

    /// Ends the closing lines of a run that can be resumed with this command.
    pub fn with_resume_command(self, command: String) -> Self {
        self.screen().resume = Some(command);
        self
    }

    /// Starts the thread that redraws the progress line on a terminal, and answers signals.
    pub fn live(mut self, activity: Arc<Activity>, signals: Signals) -> io::Result<Self>
    where
        W: 'static,
    {
        if self.screen().display.verbosity == Verbosity::Quiet {
            return Ok(self);
        }
        let (stop, stopped) = mpsc::channel();
        let screen = self.screen.clone();
        let ticks = move || {
            while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                // A terminal that cannot be written is found by the next record.
                let _ = lock(&screen).tick(&activity, &signals);
            }
        };
        let thread =
            std::thread::Builder::new().name("terminal".into()).stack_size(128 << 10).spawn(ticks)?;
        self.ticker = Some(Ticker { stop, thread });
        Ok(self)
    }

    fn screen(&self) -> MutexGuard<'_, Screen<W>> {
        lock(&self.screen)
    }
}

/// A panic while drawing leaves nothing that the next line could not overwrite.
fn lock<W>(screen: &Mutex<Screen<W>>) -> MutexGuard<'_, Screen<W>> {
    screen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W: Write> Screen<W> {
    fn paint(&self) -> AnsiStyle {
        AnsiStyle { color: self.display.color }
    }

    /// Prints lines in place of the progress line, which the next tick draws below them.
    fn print(&mut self, lines: &[String]) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        // A command to paste stays on one line.
        let is_command = |line: &String| self.resume.as_ref().is_some_and(|command| line.ends_with(command));
        let wrap = |block: &[String], width| match is_command(&block[0]) {
            true => block.to_vec(),
            false => text::wrap(block, width),
        };
        let blocks = lines.chunk_by(|a, b| is_command(a) == is_command(b));
        let wrapped: Vec<String> = match self.display.interactive.then(terminal_width).flatten() {
            Some(width) => blocks.flat_map(|block| wrap(block, width)).collect(),
            None => lines.to_vec(),
        };
        self.clear()?;
        self.out.write_all((wrapped.join("\n") + "\n").as_bytes())?;
        self.out.flush()
    }

    /// Removes the progress line.
    fn clear(&mut self) -> io::Result<()> {
        match self.drawn.take() {
            Some(columns) => write!(self.out, "{}\x1b[K", line_start(columns, terminal_width())),
            None => Ok(()),
        }
    }

    /// Answers a signal, and redraws the progress line on a terminal.
    fn tick(&mut self, activity: &Activity, signals: &Signals) -> io::Result<()> {
        if self.display.verbosity == Verbosity::Quiet || self.summary.has_ended() {
            return Ok(());
        }
        let now = activity.now();
        if let Some(signal) = signals.stop_requested().filter(|_| !self.answered) {
            self.answered = true;
            self.progress.stop();
            // The terminal has echoed `^C`, if only on an empty line.
            self.drawn = self.display.interactive.then(|| self.drawn.unwrap_or(0));
            let line = stop_line(signal, now.work, self.paint());
            self.print(&[line])?;
        }
        if self.display.interactive {
            let width = terminal_width().map(|width| width.saturating_sub(ECHO_COLUMNS));
            self.draw(&now, width)?;
        }
        Ok(())
    }

    fn draw(&mut self, now: &ActivitySnapshot, width: Option<usize>) -> io::Result<()> {
        let line = self.progress.live_line(now, width, self.paint());
        let start = line_start(self.drawn.unwrap_or(0), terminal_width());
        self.drawn = Some(console::measure_text_width(&line));
        write!(self.out, "{start}{line}\x1b[K")?;
        self.out.flush()
    }

    /// A plain progress line, if one is due.
    fn plain_progress(&mut self, t: f64, every: f64) -> Option<String> {
        let step = self.progress.step();
        if self.display.interactive
            || self.last_line.is_some_and(|(shown, at)| shown == step || t - at < every)
        {
            return None;
        }
        self.last_line = Some((step, t));
        Some(self.progress.line(self.paint()))
    }
}

/// Moves the cursor from the end of a line of so many columns to its start. A terminal that has become narrower shows
/// the line on several rows; those below the first are erased.
fn line_start(columns: usize, width: Option<usize>) -> String {
    match width.map_or(0, |width| columns.saturating_sub(1) / width.max(1)) {
        0 => "\r".into(),
        rows => format!("\r\x1b[{rows}A\x1b[J"),
    }
}

fn terminal_width() -> Option<usize> {
    console::Term::stderr().size_checked().map(|(_, columns)| columns as usize)
}

impl<W: Write + Send> Sink for Terminal<W> {
    fn name(&self) -> String {
        "stderr".into()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        let mut screen = self.screen();
        if screen.display.verbosity == Verbosity::Quiet {
            return Ok(());
        }
        screen.progress.add(record);
        screen.summary.add(record);
        let mut lines = Vec::new();
        match &record.event {
            Event::Step { step, .. } => {
                let every = if *step == screen.summary.total_steps { 0.0 } else { PLAIN_EVERY_S };
                lines.extend(screen.plain_progress(record.t, every));
            }
            Event::Eval { .. } => lines.extend(screen.plain_progress(record.t, 0.0)),
            _ => {}
        }
        if screen.summary.has_ended() {
            screen.clear()?;
        }
        let view =
            RunView { display: screen.display, summary: &screen.summary, resume: screen.resume.as_deref() };
        lines.extend(view.lines(&record.event));
        screen.print(&lines)
    }

    fn warn(&mut self, text: &str) -> io::Result<()> {
        let mut screen = self.screen();
        let line = format!("{} {text}", screen.paint().yellow("warning:"));
        screen.print(&[line])
    }

    fn finish(&mut self) -> io::Result<()> {
        self.stop()
    }
}

impl<W: Write> Terminal<W> {
    /// Stops redrawing, and removes the progress line.
    fn stop(&mut self) -> io::Result<()> {
        if let Some(Ticker { stop, thread }) = self.ticker.take() {
            drop(stop);
            // It holds the screen only while it draws.
            drop(thread.join());
        }
        let mut screen = lock(&self.screen);
        screen.clear()?;
        screen.out.flush()
    }
}

impl<W: Write> Drop for Terminal<W> {
    /// A sink whose run could not begin is dropped without `finish`.
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Phase;
    use crate::events::activity::Work;
    use crate::report::{fixtures, plan};
    use crate::train::signals::Signal;

    fn shown(records: &[EventRecord], verbosity: Verbosity) -> String {
        let mut out = Vec::new();
        let display = DisplayOptions { verbosity, ..DisplayOptions::default() };
        let mut terminal = Terminal::new(&mut out, display, Summary::default());
        records.iter().for_each(|record| terminal.record(record).unwrap());
        terminal.finish().unwrap();
        drop(terminal);
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
eval   step 2  epoch 1  valid.accuracy 0.5000  valid.loss 0.5000  0.5 s
epoch 2/3  step 4/6  loss 0.2500  lr 1.0e-3  67 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 2.5 s
eval   step 4  epoch 2  valid.accuracy 0.7500  valid.loss 0.2500  0.5 s
epoch 3/3  step 6/6  loss 0.1667  lr 1.0e-3  70 samples/s  ram 206 MiB of 256 MiB  wait 1.0 %  eta 0.0 s
eval   step 6  epoch 3  valid.accuracy 0.7000  valid.loss 0.3000  0.5 s

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

    /// The progress line is overwritten in place, gives way to lines, and is gone at the end.
    #[test]
    fn a_terminal_has_one_progress_line_and_signals_are_answered_once() {
        let display = DisplayOptions { interactive: true, ..DisplayOptions::default() };
        let mut terminal = Terminal::new(Vec::new(), display, Summary::default());
        let (activity, signals) = (Activity::default(), Signals::default());
        let drawn = |terminal: &Terminal<Vec<u8>>| {
            let mut screen = terminal.screen();
            screen.tick(&activity, &signals).unwrap();
            String::from_utf8(std::mem::take(&mut screen.out)).unwrap()
        };
        let records = fixtures::run();
        records[..3].iter().for_each(|record| terminal.record(record).unwrap());
        drop(drawn(&terminal));
        activity.begin(Work::Update, 1, 100);
        activity.advance(40);
        let line = drawn(&terminal);
        assert!(line.starts_with('\r') && line.ends_with("\x1b[K") && !line.contains('\n'), "{line:?}");
        assert!(line.contains("step 2/6") && line.contains("40/100 samples 0.0 s"), "{line:?}");
        assert!(line.contains("eta"), "{line:?}");
        signals.request(Signal::Interrupt);
        let answer =
            "\r\x1b[Kstop   finishing the update, then a checkpoint; press Ctrl-C again to leave now\n\r";
        let line = drawn(&terminal);
        assert!(line.starts_with(answer) && line.contains("step 2/6") && !line.contains("eta"), "{line:?}");
        assert!(!drawn(&terminal).contains("stop"));
        terminal.record(records.last().unwrap()).unwrap();
        assert_eq!(drawn(&terminal).matches("\r").count(), 1, "cleared, and not drawn again");
        terminal.finish().unwrap();
    }

    #[test]
    fn a_line_that_a_narrower_window_broke_is_erased_with_all_its_rows() {
        assert_eq!(line_start(97, Some(100)), "\r");
        assert_eq!(line_start(60, Some(60)), "\r");
        assert_eq!(line_start(97, Some(60)), "\r\x1b[1A\x1b[J");
        assert_eq!(line_start(121, Some(60)), "\r\x1b[2A\x1b[J");
        assert_eq!(line_start(97, None), "\r");
    }

    #[test]
    fn the_answer_to_a_signal_says_what_the_run_does_first() {
        let line = |signal, work| stop_line(signal, work, AnsiStyle::default());
        assert_eq!(
            line(Signal::Terminate, Work::Update),
            "stop   finishing the update, then a checkpoint; a second SIGTERM leaves now"
        );
        assert_eq!(
            line(Signal::Interrupt, Work::Checkpoint),
            "stop   finishing the checkpoint; press Ctrl-C again to leave now"
        );
        assert!(
            line(Signal::Interrupt, Work::Evaluation).contains("which is repeated when the run is resumed")
        );
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
