//! Reads `events.jsonl` as far as its lines are complete; continues there when the run has written more.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::ops::ControlFlow;
use std::path::Path;

use serde::Serialize;

use crate::base::regular_file;
use crate::base::units::counted;
use crate::events::EventRecord;

/// Lines of `events.jsonl` that were not used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SkippedLines {
    /// Numbers, from 1, of the lines that are no events.
    pub damaged_lines: Vec<usize>,
    /// How many events of each kind that this version does not know: a newer one wrote them.
    pub unknown_events: BTreeMap<String, u64>,
}

impl SkippedLines {
    /// What was skipped, for people.
    pub fn describe(&self) -> Option<String> {
        let damaged = self.damaged_lines.first().map(|first| {
            let lines = counted(self.damaged_lines.len() as u64, "damaged line");
            format!("{lines} of `events.jsonl` skipped, the first is line {first}")
        });
        let kinds: Vec<String> = self.unknown_events.keys().map(|kind| format!("`{kind}`")).collect();
        let unknown = (!kinds.is_empty()).then(|| {
            let events = counted(self.unknown_events.values().sum(), "event");
            format!("{events} of a newer version skipped: {}", kinds.join(", "))
        });
        let parts: Vec<String> = damaged.into_iter().chain(unknown).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// A position in `events.jsonl`.
pub struct EventReader {
    file: BufReader<File>,
    /// Bytes and lines read.
    offset: u64,
    lines: usize,
    pub skipped: SkippedLines,
}

impl EventReader {
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = BufReader::new(regular_file::open(path)?);
        Ok(Self { file, offset: 0, lines: 0, skipped: SkippedLines::default() })
    }

    /// Passes on every event since the last call, one at a time, until the end of the file or a `Break`.
    pub fn read(&mut self, mut each: impl FnMut(&EventRecord) -> ControlFlow<()>) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.offset))?;
        let mut line = Vec::new();
        loop {
            line.clear();
            self.file.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                return Ok(());
            }
            self.offset += line.len() as u64;
            self.lines += 1;
            match serde_json::from_slice(&line) {
                Ok(record) if each(&record).is_break() => return Ok(()),
                Ok(_) => {}
                Err(error) => self.skip(&line, &error),
            }
        }
    }

    fn skip(&mut self, line: &[u8], error: &serde_json::Error) {
        let event: Option<serde_json::Value> = serde_json::from_slice(line).ok();
        let kind = event.as_ref().and_then(|event| event["event"].as_str());
        match kind.filter(|_| error.to_string().starts_with("unknown variant")) {
            Some(kind) => *self.skipped.unknown_events.entry(kind.into()).or_default() += 1,
            None => self.skipped.damaged_lines.push(self.lines),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::report::fixtures;

    #[test]
    fn a_growing_file_is_read_once_and_what_is_skipped_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut file = File::create(&path).unwrap();
        let step = |n| serde_json::to_string(&fixtures::step(n as f64, n)).unwrap();
        let newer = r#"{"t":2.0,"event":"teleported","step":2,"to":"mars"}"#;
        write!(file, "{}\n{newer}\n{{\"t\":3\n{}\n{}", step(1), step(2), &step(3)[..20]).unwrap();
        let mut reader = EventReader::open(&path).unwrap();
        let mut times = Vec::new();
        let mut read = |reader: &mut EventReader| {
            reader.read(|record| {
                times.push(record.t);
                ControlFlow::Continue(())
            })
        };
        read(&mut reader).unwrap();
        read(&mut reader).unwrap();
        writeln!(file, "{}", &step(3)[20..]).unwrap();
        read(&mut reader).unwrap();
        assert_eq!(times, [1.0, 2.0, 3.0]);
        assert_eq!(reader.skipped.damaged_lines, [3]);
        assert_eq!(
            reader.skipped.describe().unwrap(),
            "1 damaged line of `events.jsonl` skipped, the first is line 3; \
             1 event of a newer version skipped: `teleported`"
        );
        assert_eq!(SkippedLines::default().describe(), None);
    }
}
