//! What a run reports: [`Event`], the [`Sink`]s that render it, and the [`Reporter`] between them.
//!
//! The reporter timestamps an event and passes it to every sink. `events.jsonl` is the source of truth: failing to
//! write it is an error of the run. Every other sink is optional and dropped when it fails: its output can be rebuilt
//! from the events.

pub mod activity;
pub mod event;
pub mod jsonl;
pub(crate) mod nullable;
pub mod summary;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::memory::resident_limit;
use crate::metrics::histogram::Histogram;

pub use activity::Activity;
pub use event::{Event, EventRecord};
pub use jsonl::{EventLog, JsonStream, MetricsLog};
pub use summary::Summary;

/// Renders the records of a run, in order.
pub trait Sink: Send {
    /// The destination as an error message names it: a path, `stderr`.
    fn name(&self) -> String;

    fn record(&mut self, record: &EventRecord) -> io::Result<()>;

    /// The distribution of a tensor's values after update `step`, at time `t`. Not an event: it is too large for a log.
    fn histogram(&mut self, _t: f64, _step: u64, _name: &str, _histogram: &Histogram) -> io::Result<()> {
        Ok(())
    }

    /// A message to people that is not an event: another sink failed.
    fn warn(&mut self, _text: &str) -> io::Result<()> {
        Ok(())
    }

    /// Something that went wrong since the last record and does not end the sink, for the other sinks to show.
    fn take_warning(&mut self) -> Option<String> {
        None
    }

    /// No record follows.
    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot write `{name}`")]
    Write { name: String, source: io::Error },
    #[error("cannot read `{}`", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// Timestamps events and passes them to all sinks.
pub struct Reporter {
    clock: Box<dyn FnMut() -> f64 + Send>,
    required: Vec<Box<dyn Sink>>,
    optional: Vec<Box<dyn Sink>>,
    /// What the run is doing between two events; sinks may read a clone of it.
    pub activity: Arc<Activity>,
}

impl Default for Reporter {
    fn default() -> Self {
        Self::with_clock(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()))
    }
}

impl Reporter {
    /// `clock` returns seconds since the Unix epoch.
    pub fn with_clock(clock: impl FnMut() -> f64 + Send + 'static) -> Self {
        let activity = Arc::default();
        Self { clock: Box::new(clock), required: Vec::new(), optional: Vec::new(), activity }
    }

    /// Adds a sink whose failure is an error of the run.
    pub fn with_required(mut self, sink: impl Sink + 'static) -> Self {
        self.required.push(Box::new(sink));
        self
    }

    /// Adds a sink that is dropped when it fails: with a warning, or silently if its reader is gone (a broken pipe).
    pub fn with_optional(mut self, sink: impl Sink + 'static) -> Self {
        self.optional.push(Box::new(sink));
        self
    }

    /// Passes the event to every sink. Optional sinks get it even if a required sink failed, so that people see the
    /// last event.
    pub fn record(&mut self, event: Event) -> Result<(), ReportError> {
        let record = EventRecord { t: (self.clock)(), event };
        self.for_each_sink(|sink| sink.record(&record))
    }

    /// Passes the distribution of a tensor's values after update `step` to every sink.
    pub fn record_histogram(
        &mut self,
        step: u64,
        name: &str,
        histogram: &Histogram,
    ) -> Result<(), ReportError> {
        let t = (self.clock)();
        self.for_each_sink(|sink| sink.histogram(t, step, name, histogram))
    }

    /// Finishes every sink: clears progress bars, syncs files.
    pub fn finish(&mut self) -> Result<(), ReportError> {
        self.for_each_sink(|sink| sink.finish())
    }

    fn for_each_sink(
        &mut self,
        mut call: impl FnMut(&mut dyn Sink) -> io::Result<()>,
    ) -> Result<(), ReportError> {
        let mut outcome = Ok(());
        // Every sink runs code of its own.
        let mut call = |sink: &mut dyn Sink| {
            resident_limit::limit_code_now();
            call(sink)
        };
        for sink in &mut self.required {
            if let Err(source) = call(sink.as_mut())
                && outcome.is_ok()
            {
                outcome = Err(ReportError::Write { name: sink.name(), source });
            }
        }
        let mut warnings = Vec::new();
        self.optional.retain_mut(|sink| match call(sink.as_mut()) {
            Ok(()) => {
                warnings.extend(sink.take_warning());
                true
            }
            Err(error) => {
                if error.kind() != io::ErrorKind::BrokenPipe {
                    warnings.push(format!("`{}` is no longer written: {error}", sink.name()));
                }
                false
            }
        });
        for warning in warnings {
            self.optional.retain_mut(|sink| sink.warn(&warning).is_ok());
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    type RecordedLines = Arc<Mutex<Vec<String>>>;

    struct RecordingSink {
        lines: RecordedLines,
        /// The record that fails, by number, and how.
        fails_at: Option<(usize, io::ErrorKind)>,
        records: usize,
    }

    impl Sink for RecordingSink {
        fn name(&self) -> String {
            "probe".into()
        }
        fn record(&mut self, record: &EventRecord) -> io::Result<()> {
            self.records += 1;
            match self.fails_at {
                Some((n, kind)) if n == self.records => Err(kind.into()),
                _ => {
                    self.lines.lock().unwrap().push(format!("{}", record.t));
                    Ok(())
                }
            }
        }
        fn warn(&mut self, text: &str) -> io::Result<()> {
            self.lines.lock().unwrap().push(text.into());
            Ok(())
        }
    }

    fn recording_sink(fails: Option<(usize, io::ErrorKind)>) -> (RecordingSink, RecordedLines) {
        let lines = RecordedLines::default();
        (RecordingSink { lines: lines.clone(), fails_at: fails, records: 0 }, lines)
    }

    fn reporter() -> Reporter {
        let mut t = 0.0;
        Reporter::with_clock(move || {
            t += 1.0;
            t
        })
    }

    fn event() -> Event {
        Event::Interrupted { step: 0, signal: "SIGINT".into(), checkpoint: None }
    }

    #[test]
    fn a_failing_optional_sink_is_dropped_and_the_others_are_warned() {
        let ((required, required_lines), (bad, bad_lines)) =
            (recording_sink(None), recording_sink(Some((2, io::ErrorKind::StorageFull))));
        let ((closed, closed_lines), (good, good_lines)) =
            (recording_sink(Some((1, io::ErrorKind::BrokenPipe))), recording_sink(None));
        let mut reporter =
            reporter().with_required(required).with_optional(bad).with_optional(closed).with_optional(good);
        for _ in 0..3 {
            reporter.record(event()).unwrap();
        }
        assert_eq!(*required_lines.lock().unwrap(), ["1", "2", "3"]);
        assert_eq!(*bad_lines.lock().unwrap(), ["1"]);
        assert_eq!(*closed_lines.lock().unwrap(), [""; 0]);
        let warning = "`probe` is no longer written: no storage space";
        assert_eq!(*good_lines.lock().unwrap(), ["1", "2", warning, "3"]);
    }

    #[test]
    fn a_failing_required_sink_is_an_error_and_optional_ones_get_the_event() {
        let ((required, _), (view, lines)) =
            (recording_sink(Some((1, io::ErrorKind::StorageFull))), recording_sink(None));
        let mut reporter = reporter().with_required(required).with_optional(view);
        let error = reporter.record(event()).unwrap_err();
        assert_eq!(error.to_string(), "cannot write `probe`");
        assert_eq!(*lines.lock().unwrap(), ["1"]);
    }
}
