//! The hash of every file of one source, as cached by the run that last hashed it. Records are in the order in which
//! files are visited, so reading them is a forward pass.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Split, Write};
use std::path::{Path, is_separator};

use super::FileStat;

/// Ends a record. The only byte that no file name has.
const END: u8 = 0;

/// Records that an unsorted list is searched ahead for a file, to pass over those of files that are gone.
const LOOKAHEAD: usize = 256;

/// Writes the record of one file.
pub fn write_record(out: &mut dyn Write, name: &Path, stat: FileStat, hash: u128) -> io::Result<()> {
    let FileStat { size, modified } = stat;
    write!(out, "{size} {modified} {hash:032x} ")?;
    out.write_all(name.as_os_str().as_encoded_bytes())?;
    out.write_all(&[END])
}

struct Record {
    name: Vec<u8>,
    stat: FileStat,
    hash: u128,
}

impl Record {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut fields = bytes.splitn(4, |byte| *byte == b' ');
        let mut field = || std::str::from_utf8(fields.next()?).ok();
        let (size, modified) = (field()?.parse().ok()?, field()?.parse().ok()?);
        let hash = u128::from_str_radix(field()?, 16).ok()?;
        Some(Self { name: fields.next()?.to_vec(), stat: FileStat { size, modified }, hash })
    }
}

/// Reads records, forward only.
pub struct FileRecords {
    records: Split<BufReader<File>>,
    ahead: VecDeque<Record>,
}

impl FileRecords {
    pub fn open(path: &Path) -> io::Result<Self> {
        let records = BufReader::new(File::open(path)?).split(END);
        Ok(Self { records, ahead: VecDeque::new() })
    }

    /// The record after `count` others that were not taken.
    fn peek(&mut self, count: usize) -> Option<&Record> {
        while self.ahead.len() <= count {
            self.ahead.push_back(Record::parse(&self.records.next()?.ok()?)?);
        }
        self.ahead.get(count)
    }

    fn next(&mut self) -> Option<Record> {
        self.peek(0)?;
        self.ahead.pop_front()
    }

    /// The recorded state and hash of the file `name`. Call it in the order in which files are visited; `gone` gets the
    /// names of recorded files before it that no longer exist.
    pub fn take(
        &mut self,
        name: &Path,
        sorted: bool,
        gone: &mut dyn FnMut(&[u8]),
    ) -> Option<(FileStat, u128)> {
        let name = name.as_os_str().as_encoded_bytes();
        let passed = match sorted {
            true => {
                while self.peek(0).is_some_and(|record| is_before(&record.name, name)) {
                    gone(&self.next()?.name);
                }
                self.peek(0).is_some_and(|record| record.name == name).then_some(0)
            }
            false => (0..LOOKAHEAD).find(|at| self.peek(*at).is_some_and(|record| record.name == name)),
        }?;
        self.ahead.drain(..passed).for_each(|record| gone(&record.name));
        self.next().map(|record| (record.stat, record.hash))
    }

    /// Calls `gone` with the names of all recorded files after the last one that was taken.
    pub fn finish(mut self, gone: &mut dyn FnMut(&[u8])) {
        while let Some(record) = self.next() {
            gone(&record.name);
        }
    }
}

/// Whether a sorted folder has `a` before `b`: the names are compared folder by folder.
fn is_before(a: &[u8], b: &[u8]) -> bool {
    let parts = |name| <[u8]>::split(name, |byte| is_separator(char::from(*byte)));
    parts(a).lt(parts(b))
}

/// A file name for a message: one line, whatever bytes it has.
pub fn printable(name: &[u8]) -> String {
    let character = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.into(),
    };
    name.utf8_chunks()
        .flat_map(|chunk| {
            let invalid = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
            chunk.valid().chars().map(character).chain(invalid)
        })
        .collect()
}
