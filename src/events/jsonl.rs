//! JSON lines: `events.jsonl` (the source of truth), `metrics.jsonl` (flat rows for plotting) and the stream on
//! stdout.
//!
//! A line is complete once its newline is written. Bytes after the last newline are a write that a kill or a full
//! disk cut short; opening the file for appending truncates them.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{ReportError, Sink};
use crate::base::regular_file;
use crate::events::event::{Event, EventRecord};

/// An append-only file of complete lines.
pub struct LineFile {
    path: PathBuf,
    file: File,
    /// Bytes of complete lines.
    len: u64,
}

impl LineFile {
    /// Opens `path` for appending, creating it if absent; truncates a torn last line.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let len = complete_lines_len(&mut file)?;
        if file.metadata()?.len() > len {
            file.set_len(len)?;
        }
        Ok(Self { path: path.to_owned(), file, len })
    }

    /// Appends a line in one write. A failed append leaves the file unchanged.
    pub fn append(&mut self, value: &impl serde::Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        match self.file.write_all(&line) {
            Ok(()) => {
                self.len += line.len() as u64;
                Ok(())
            }
            Err(error) => {
                // Best effort: if this fails too, the next open truncates the torn line.
                let _ = self.file.set_len(self.len);
                Err(error)
            }
        }
    }

    /// Writes it to the disk.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Length up to and including the last newline.
fn complete_lines_len(file: &mut File) -> io::Result<u64> {
    const CHUNK: u64 = 1 << 16;
    let mut end = file.metadata()?.len();
    while end > 0 {
        let start = end.saturating_sub(CHUNK);
        let mut chunk = vec![0; (end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut chunk)?;
        if let Some(at) = chunk.iter().rposition(|&b| b == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

/// The complete lines of a file, without a torn last one. Holds one line at a time.
pub(crate) fn complete_lines(path: &Path) -> io::Result<impl Iterator<Item = io::Result<String>> + use<>> {
    let mut reader = BufReader::new(regular_file::open(path)?);
    Ok(std::iter::from_fn(move || {
        let mut line = Vec::new();
        match reader.read_until(b'\n', &mut line) {
            Err(error) => Some(Err(error)),
            Ok(_) if line.pop() != Some(b'\n') => None,
            // Invalid UTF-8 is not JSON either: the caller that parses the line reports its number.
            Ok(_) => Some(Ok(String::from_utf8_lossy(&line).into_owned())),
        }
    }))
}

/// `events.jsonl`: every record. Written to the kernel when recorded, synced to disk with each checkpoint.
pub struct EventLog(LineFile);

impl EventLog {
    /// Opens `path` for appending, creating it if absent; truncates a torn last line.
    pub fn open(path: &Path) -> Result<Self, ReportError> {
        let named = |source| ReportError::Write { name: path.display().to_string(), source };
        LineFile::open(path).map(Self).map_err(named)
    }
}

impl Sink for EventLog {
    fn name(&self) -> String {
        self.0.path.display().to_string()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        self.0.append(record)?;
        if matches!(record.event, Event::Checkpoint { .. } | Event::Best { .. }) {
            self.0.file.sync_data()
        } else {
            Ok(())
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        self.0.file.sync_data()
    }
}

/// `metrics.jsonl`: one flat row per logged step and per evaluation, each step once.
pub struct MetricsLog {
    file: LineFile,
    /// The step a resumed run starts from, if its evaluation is in the file: the run may report it again.
    resumed_eval_step: Option<u64>,
}

impl MetricsLog {
    /// Opens `path` for appending, creating it if absent; truncates a torn last line.
    pub fn open(path: &Path) -> Result<Self, ReportError> {
        let named = |source| ReportError::Write { name: path.display().to_string(), source };
        LineFile::open(path).map(|file| Self { file, resumed_eval_step: None }).map_err(named)
    }

    /// Drops the rows of steps that a resumed run is about to repeat.
    fn rewind(&mut self, step: u64) -> io::Result<()> {
        self.resumed_eval_step = None;
        let temporary = self.file.path.with_extension("jsonl.tmp");
        let mut out = io::BufWriter::new(File::create(&temporary)?);
        for line in complete_lines(&self.file.path)? {
            let line = line?;
            let row: Value = serde_json::from_str(&line).unwrap_or_default();
            if row["step"].as_u64().is_some_and(|s| s <= step) {
                let is_last = row["step"] == step && row.get("valid.loss").is_some();
                self.resumed_eval_step = self.resumed_eval_step.or(is_last.then_some(step));
                writeln!(out, "{line}")?;
            }
        }
        out.into_inner()?.sync_data()?;
        std::fs::rename(&temporary, &self.file.path)?;
        self.file = LineFile::open(&self.file.path)?;
        Ok(())
    }
}

/// The row of `metrics.jsonl` for a record, if it has one.
fn metrics_row(record: &EventRecord) -> Option<Map<String, Value>> {
    let row = match &record.event {
        Event::Step {
            step,
            epoch,
            loss,
            lr,
            grad_norm,
            samples,
            step_s,
            data_wait_s,
            ram_bytes,
            vram_bytes,
            ..
        } => json!({
            "step": step, "epoch": epoch, "t": record.t, "train.loss": loss, "lr": lr,
            "grad_norm": grad_norm, "samples": samples, "step_s": step_s, "data_wait_s": data_wait_s,
            "ram_bytes": ram_bytes, "vram_bytes": vram_bytes,
        }),
        Event::Eval { step, epoch, metrics, .. } => {
            let mut row = json!({ "step": step, "epoch": epoch, "t": record.t });
            metrics.iter().for_each(|(name, value)| row[name] = json!(value));
            row
        }
        _ => return None,
    };
    row.as_object().cloned()
}

impl Sink for MetricsLog {
    fn name(&self) -> String {
        self.file.path.display().to_string()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        match record.event {
            Event::Resumed { step, .. } => self.rewind(step)?,
            Event::Eval { step, .. } if self.resumed_eval_step == Some(step) => return Ok(()),
            _ => {}
        }
        metrics_row(record).map_or(Ok(()), |row| self.file.append(&row))
    }
}

/// Records as JSON lines, flushed one by one: `--json` on stdout.
pub struct JsonStream<W>(pub W);

impl<W: Write + Send> Sink for JsonStream<W> {
    fn name(&self) -> String {
        "stdout".into()
    }

    fn record(&mut self, record: &EventRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.0.write_all(&line)?;
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    #[test]
    fn a_torn_last_line_is_cut_before_the_next_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let whole = "{\"a\":1}\n".repeat(20_000);
        for torn in ["", "{\"t\":1,\"ev", "\0\0\0\0", &"x".repeat(200_000)] {
            std::fs::write(&path, format!("{whole}{torn}")).unwrap();
            let mut events = EventLog::open(&path).unwrap();
            events.record(&fixtures::resumed(9.0, 3)).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let added = text.strip_prefix(&whole).unwrap();
            assert_eq!(
                added,
                "{\"t\":9.0,\"event\":\"resumed\",\"step\":3,\"checkpoint\":\"c/3\",\"skipped\":[]}\n"
            );
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut reporter = crate::events::Reporter::with_clock(|| 0.0);
        reporter = reporter.with_required(EventLog::open(Path::new("/dev/full")).unwrap());
        let error = reporter.record(fixtures::step(0.0, 1).event).unwrap_err();
        assert_eq!(error.to_string(), "cannot write `/dev/full`");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.starts_with("No space left on device"), "{cause}");
    }

    #[test]
    fn metrics_are_flat_and_a_resume_repeats_no_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let steps = || -> Vec<(u64, bool)> {
            let lines =
                complete_lines(&path).unwrap().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
            lines.map(|row: Value| (row["step"].as_u64().unwrap(), row["valid.loss"].is_number())).collect()
        };
        let mut metrics = MetricsLog::open(&path).unwrap();
        for record in [fixtures::step(1.0, 1), fixtures::step(2.0, 2), fixtures::eval(3.0, 2, 0.5)] {
            metrics.record(&record).unwrap();
        }
        let first = complete_lines(&path).unwrap().next().unwrap().unwrap();
        assert_eq!(
            first,
            concat!(
                r#"{"step":1,"epoch":1,"t":1.0,"train.loss":1.0,"lr":0.001,"grad_norm":0.5,"samples":100,"#,
                r#""step_s":1.0,"data_wait_s":0.01,"ram_bytes":216006656,"vram_bytes":0}"#
            )
        );
        assert_eq!(steps(), [(1, false), (2, false), (2, true)]);

        let mut metrics = MetricsLog::open(&path).unwrap();
        for record in [fixtures::resumed(5.0, 1), fixtures::step(6.0, 2), fixtures::step(7.0, 3)] {
            metrics.record(&record).unwrap();
        }
        assert_eq!(steps(), [(1, false), (2, false), (3, false)]);
    }

    #[test]
    fn the_stream_reads_back_as_records() {
        let mut out = Vec::new();
        JsonStream(&mut out).record(&fixtures::step(1.0, 4)).unwrap();
        let record: EventRecord = serde_json::from_slice(&out).unwrap();
        assert!(matches!(record.event, Event::Step { step: 4, .. }));
    }
}
