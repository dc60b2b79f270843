//! Records made into ids once: ids, where each sample ends, which ids are learned, and classes, each in a file of its
//! own in the cache, and what was found out on the way.

use std::{
    collections::HashMap,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::super::DataError;
use super::super::pieces::{Progress, in_order};
use super::super::tokens::{Ids, Joined, Stored, Width};
use super::super::windows::{Marks, name_of};
use super::lines::{Chunk, Lines};
use super::record::{Document, Reader, TooLong, record};
use crate::data::bad::{Bad, LeftOut, Set};
use crate::data::cache::Fingerprint;
use crate::data::{Lengths, Opening};

/// The records of some files.
pub struct Made {
    pub ids: Arc<Joined>,
    pub marks: Option<Arc<Marks>>,
    ends: Stored,
    labels: Option<Stored>,
    pub found: Found,
}

/// What was found out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Found {
    pub records: u64,
    pub samples: u64,
    pub tokens: u64,
    /// Tokens that are to be learned.
    pub learned: u64,
    /// Records that were longer than a sample.
    pub too_long: u64,
    /// Tokens of the longest record, and the number of its (first) sample.
    pub longest: (u64, u64),
    /// Records of up to 1, 2, 4, 8, ... tokens.
    histogram: Vec<u64>,
    /// The names of classes in the order they came, and their samples.
    pub classes: Vec<(String, u64)>,
    /// Records left out because they are bad, and what is wrong with the first of them.
    pub bad: u64,
    pub first_bad: Vec<String>,
}

/// Distinct classes, at most: with more, the field is no class.
const CLASSES: usize = 1 << 16;

impl Found {
    pub fn lengths(&self) -> Lengths {
        let histogram = self.histogram.iter().enumerate().map(|(i, &n)| (1 << i, n));
        Lengths { longest: self.longest, histogram: histogram.skip_while(|bin| bin.1 == 0).collect() }
    }
}

impl Made {
    /// Of `files`, as `reader` reads them; `how` states the settings behind it, and `from` what else it was made from.
    pub fn open(
        files: &[PathBuf],
        from: &[PathBuf],
        reader: &Reader,
        how: &str,
        opening: &Opening,
    ) -> Result<Self, DataError> {
        let of = Fingerprint::of(&[files, from].concat(), how)?;
        let names = ["jsonl-tokens", "jsonl-learned", "jsonl-ends", "jsonl-classes", "jsonl-found"];
        let [tokens, marks, ends, labels, found] =
            opening.cache.get_all(names, of, |[tokens, marks, ends, labels, found]| {
                let doing = format!("tokenising {}", name_of(files));
                let progress = Progress::new(files, &*opening.watch, &doing)?;
                let mut writer = Writer::new(reader, [tokens, marks, ends, labels]);
                let mut lines = Lines::new(files, &progress);
                let work = |chunk: &Chunk| {
                    let read = |(number, line)| (reader.read(line, chunk.file, number), number);
                    let documents: Vec<_> = chunk.lines().map(read).collect();
                    Ok((documents, chunk.file.to_owned()))
                };
                in_order(
                    &progress,
                    || lines.next(),
                    work,
                    |(documents, file)| {
                        documents
                            .into_iter()
                            .try_for_each(|(document, number)| writer.take(document, &file, number))
                    },
                )?;
                let text = serde_json::to_vec(&writer.found).unwrap_or_default();
                writer.finish()?;
                found.write_all(&text).map_err(writing)
            })?;
        let text = std::fs::read(&found).map_err(DataError::io(&found))?;
        let damaged = |why: String| DataError::Format {
            file: found.clone(),
            wanted: "what this program wrote",
            found: why,
        };
        let found: Found = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if found.samples == 0 {
            let why = "its files have no records".to_owned();
            return Err(DataError::NoSamples { set: format!("`{}`", name_of(files)), why });
        }
        let ids = Ids::plain(&tokens, reader.tokenizer.width())?;
        let there = |path: &Path| match std::fs::metadata(path).map_err(DataError::io(path))?.len() {
            0 => Ok(None),
            _ => Stored::open(path).map(Some),
        };
        let (marks, labels, ends) = (there(&marks)?, there(&labels)?, Stored::open(&ends)?);
        if ids.len() != found.tokens || ends.len() != 8 * found.samples {
            return Err(damaged("other numbers than the files beside it".into()));
        }
        Ok(Self {
            ids: Arc::new(Joined::new(vec![ids])),
            marks: marks.map(|m| Arc::new(Marks(m))),
            ends,
            labels,
            found,
        })
    }

    /// Where the ids of a sample lie.
    pub fn sample(&self, index: u64) -> Result<std::ops::Range<u64>, DataError> {
        // Where the sample before it ends, and where it ends itself; the first begins at 0.
        let mut ends = [[0; 8]; 2];
        let before = usize::from(index == 0);
        self.ends.read(8 * index.saturating_sub(1), ends[before..].as_flattened_mut())?;
        let [start, end] = ends.map(u64::from_le_bytes);
        Ok(start..end)
    }

    /// The class of a sample, as a place in [`Found::classes`].
    pub fn class(&self, index: u64) -> Result<usize, DataError> {
        let mut bytes = [0; 4];
        if let Some(labels) = &self.labels {
            labels.read(4 * index, &mut bytes)?;
        }
        Ok(u32::from_le_bytes(bytes) as usize)
    }
}

fn writing(error: std::io::Error) -> DataError {
    DataError::writing(Path::new("the tokens of the records"))(error)
}

/// Writes documents one after the other.
struct Writer<'a, 'o> {
    reader: &'a Reader<'a>,
    width: Width,
    out: [&'o mut BufWriter<File>; 4],
    found: Found,
    left_out: LeftOut,
    classes: HashMap<String, u32>,
    /// Bits of marks that do not make a byte yet.
    bits: (u8, u32),
    bytes: Vec<u8>,
}

impl<'a, 'o> Writer<'a, 'o> {
    fn new(reader: &'a Reader<'a>, out: [&'o mut BufWriter<File>; 4]) -> Self {
        let width = reader.tokenizer.width();
        Self {
            reader,
            width,
            out,
            found: Found::default(),
            left_out: LeftOut::default(),
            classes: HashMap::new(),
            bits: (0, 0),
            bytes: Vec::new(),
        }
    }

    fn take(&mut self, read: Result<Document, DataError>, file: &Path, line: u64) -> Result<(), DataError> {
        let document = match read {
            Ok(document) => document,
            Err(error) if error.is_record() && self.reader.on_bad.skips() => {
                let bad = Bad { id: self.found.bad, why: error.to_string() };
                self.found.bad += 1;
                self.found.first_bad.extend(self.left_out.add(Set::Train, 0, &[bad], self.reader.on_bad)?);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let room = self.reader.room;
        let found = &mut self.found;
        found.records += 1;
        found.too_long += u64::from(document.whole > room as u64);
        if document.whole > found.longest.0 {
            found.longest = (document.whole, found.samples);
        }
        let bin = document.whole.next_power_of_two().trailing_zeros() as usize;
        found.histogram.resize(found.histogram.len().max(bin + 1), 0);
        found.histogram[bin] += 1;
        let class = match document.label {
            None => None,
            Some(name) => {
                let next = self.classes.len() as u32;
                let class = *self.classes.entry(name).or_insert_with_key(|name| {
                    found.classes.push((name.clone(), 0));
                    next
                });
                if self.classes.len() > CLASSES {
                    let problem =
                        format!("it has the class number {}, more than can be told apart", CLASSES + 1);
                    return Err(record(file, line, problem));
                }
                Some(class)
            }
        };
        let mut start = 0;
        loop {
            let end = document.ids.len().min(start + room);
            self.sample(
                &document.ids[start..end],
                document.learned.get(start..end).unwrap_or_default(),
                class,
            )?;
            if end == document.ids.len() || self.reader.too_long != TooLong::Split {
                return Ok(());
            }
            // The last token of a sample is a target only: the next one begins with it. A class is of all tokens.
            start = if class.is_some() { end } else { end - 1 };
        }
    }

    fn sample(&mut self, ids: &[u32], learned: &[bool], class: Option<u32>) -> Result<(), DataError> {
        let [tokens, marks, ends, labels] = &mut self.out;
        self.bytes.clear();
        self.width.put(ids, &mut self.bytes);
        tokens.write_all(&self.bytes).map_err(writing)?;
        for &learned in learned {
            let (byte, count) = &mut self.bits;
            *byte |= u8::from(learned) << *count;
            *count += 1;
            if *count == 8 {
                marks.write_all(&[*byte]).map_err(writing)?;
                self.bits = (0, 0);
            }
        }
        let found = &mut self.found;
        found.samples += 1;
        found.tokens += ids.len() as u64;
        let all = if learned.is_empty() { ids.len() } else { learned.iter().filter(|l| **l).count() };
        found.learned += all as u64;
        ends.write_all(&found.tokens.to_le_bytes()).map_err(writing)?;
        if let Some(class) = class {
            found.classes[class as usize].1 += 1;
            labels.write_all(&class.to_le_bytes()).map_err(writing)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<(), DataError> {
        let [_, marks, ..] = self.out;
        if self.bits.1 > 0 { marks.write_all(&[self.bits.0]).map_err(writing) } else { Ok(()) }
    }
}
