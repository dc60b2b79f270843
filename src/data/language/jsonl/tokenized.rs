//! Tokenizes records once into the cache: ids, sample ends, loss mask and labels in one file each, plus a summary.

use std::{
    collections::HashMap,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::super::DataError;
use super::super::pieces::FileProgress;
use super::super::text_memory::TextMemory;
use super::super::token_storage::{RandomAccessFile, TokenFiles, TokenIdFile, TokenWidth};
use super::super::token_windows::{LossMask, display_name};
use super::lines::{LineContext, convert_lines};
use super::record::{Document, Label, OverlongPolicy, RecordReader};
use crate::bad_records::{BadRecord, SkippedRecords};
use crate::cache::CacheKey;
use crate::split::DatasetSplit;
use crate::{DatasetContext, LengthStats};

/// The tokenized records of a set of files.
pub struct TokenizedRecords {
    pub ids: Arc<TokenFiles>,
    pub loss_mask: Option<Arc<LossMask>>,
    sample_ends: RandomAccessFile,
    label_sets: Option<RandomAccessFile>,
    /// File with the key of the group of each sample, if records have groups.
    pub groups: Option<PathBuf>,
    pub summary: TokenizedSummary,
}

/// Statistics gathered while tokenizing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TokenizedSummary {
    pub records: u64,
    pub samples: u64,
    pub tokens: u64,
    /// Tokens that contribute to the loss.
    pub learned: u64,
    /// Records that exceeded the maximum sample length.
    pub too_long: u64,
    /// Token count of the longest record, and the index of its first sample.
    pub longest: (u64, u64),
    /// Number of records of up to 1, 2, 4, 8, ... tokens.
    histogram: Vec<u64>,
    /// Class names in order of first appearance, with their sample counts.
    pub classes: Vec<(String, u64)>,
    /// The distinct sets of labels in order of first appearance, each as indices of `classes`. A class is a set of one.
    pub label_sets: Vec<Vec<u32>>,
    /// Whether any record has a list of labels.
    pub multi_label: bool,
    /// Number of bad records skipped, and the messages of the first few.
    pub bad: u64,
    pub first_bad: Vec<String>,
}

/// Maximum distinct classes; a field with more is not a class label.
const MAX_CLASSES: usize = 1 << 16;

/// Maximum distinct sets of labels: each takes memory.
const MAX_LABEL_SETS: usize = 1 << 18;

impl TokenizedSummary {
    pub fn lengths(&self) -> LengthStats {
        let histogram = self.histogram.iter().enumerate().map(|(i, &n)| (1 << i, n));
        LengthStats { longest: self.longest, histogram: histogram.skip_while(|bin| bin.1 == 0).collect() }
    }
}

impl TokenizedRecords {
    /// Opens the tokenized form of `files`, as `reader` reads them. The cache key covers `how`, the settings behind
    /// `reader`, and `sources`, the other files the result depends on.
    pub fn open(
        files: &[PathBuf],
        sources: &[PathBuf],
        reader: &RecordReader,
        how: &str,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let cache_key = CacheKey::new(&[files, sources].concat(), how)?;
        let names =
            ["jsonl-tokens", "jsonl-learned", "jsonl-ends", "jsonl-labels", "jsonl-groups", "jsonl-found"];
        let [tokens, marks, ends, labels, groups, found] = ctx.cache.get_or_create_all(
            names,
            cache_key,
            |[tokens, marks, ends, labels, groups, found]| {
                let activity = format!("tokenising {}", display_name(files));
                let progress = FileProgress::new(files, &*ctx.observer, &activity)?;
                let mut writer = RecordWriter::new(reader, [tokens, marks, ends, labels, groups]);
                let memory = TextMemory::of(reader.tokenizer, ctx);
                convert_lines(
                    files,
                    &progress,
                    memory,
                    |line, at| reader.read(line, at),
                    Document::held_bytes,
                    |document, at| writer.write_record(document, at),
                )?;
                let text = serde_json::to_vec(&writer.summary).unwrap_or_default();
                writer.finish()?;
                found.write_all(&text).map_err(write_error)
            },
        )?;
        let text = std::fs::read(&found).map_err(DataError::io(&found))?;
        let damaged = |why: String| DataError::WrongFormat {
            file: found.clone(),
            expected: "a cache file of this program",
            found: why,
        };
        let found: TokenizedSummary =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if found.samples == 0 {
            let why = "the files have no records".to_owned();
            return Err(DataError::NoSamples { set: format!("`{}`", display_name(files)), why });
        }
        let ids = TokenIdFile::open_headerless(&tokens, reader.tokenizer.width())?;
        let there = |path: &Path| match std::fs::metadata(path).map_err(DataError::io(path))?.len() {
            0 => Ok(None),
            _ => RandomAccessFile::open(path).map(Some),
        };
        let (marks, labels, ends) = (there(&marks)?, there(&labels)?, RandomAccessFile::open(&ends)?);
        if ids.len() != found.tokens || ends.len() != 8 * found.samples {
            return Err(damaged("counts that differ from the files beside it".into()));
        }
        Ok(Self {
            ids: Arc::new(TokenFiles::new(vec![ids])),
            loss_mask: marks.map(|m| Arc::new(LossMask(m))),
            sample_ends: ends,
            label_sets: labels,
            groups: reader.group.map(|_| groups),
            summary: found,
        })
    }

    /// Range of token ids of a sample.
    pub fn sample_range(&self, index: u64) -> Result<std::ops::Range<u64>, DataError> {
        // Read the end of the previous sample and the end of this one; the first sample starts at 0.
        let mut ends = [[0; 8]; 2];
        let before = usize::from(index == 0);
        self.sample_ends.read(8 * index.saturating_sub(1), ends[before..].as_flattened_mut())?;
        let [start, end] = ends.map(u64::from_le_bytes);
        Ok(start..end)
    }

    /// Labels of a sample, as an index into [`TokenizedSummary::label_sets`].
    pub fn label_set(&self, index: u64) -> Result<usize, DataError> {
        let mut bytes = [0; 4];
        if let Some(labels) = &self.label_sets {
            labels.read(4 * index, &mut bytes)?;
        }
        Ok(u32::from_le_bytes(bytes) as usize)
    }
}

fn write_error(error: std::io::Error) -> DataError {
    DataError::write(Path::new("the tokens of the records"))(error)
}

/// Appends documents to the cache files.
struct RecordWriter<'a, 'o> {
    reader: &'a RecordReader<'a>,
    width: TokenWidth,
    out: [&'o mut BufWriter<File>; 5],
    summary: TokenizedSummary,
    skipped: SkippedRecords,
    classes: HashMap<String, u32>,
    label_sets: HashMap<Vec<u32>, u32>,
    /// Loss-mask bits that do not fill a byte yet.
    pending_bits: (u8, u32),
    bytes: Vec<u8>,
}

impl<'a, 'o> RecordWriter<'a, 'o> {
    fn new(reader: &'a RecordReader<'a>, out: [&'o mut BufWriter<File>; 5]) -> Self {
        let width = reader.tokenizer.width();
        Self {
            reader,
            width,
            out,
            summary: TokenizedSummary::default(),
            skipped: SkippedRecords::default(),
            classes: HashMap::new(),
            label_sets: HashMap::new(),
            pending_bits: (0, 0),
            bytes: Vec::new(),
        }
    }

    fn write_record(&mut self, read: Result<Document, DataError>, at: LineContext) -> Result<(), DataError> {
        let document = match read {
            Ok(document) => document,
            Err(error) if error.is_bad_record() && self.reader.on_bad.skips() => {
                let bad = BadRecord { id: self.summary.bad, why: error.to_string() };
                self.summary.bad += 1;
                self.summary.first_bad.extend(self.skipped.record(
                    DatasetSplit::Train,
                    0,
                    &[bad],
                    self.reader.on_bad,
                )?);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let max_tokens = self.reader.max_tokens;
        let found = &mut self.summary;
        found.records += 1;
        found.too_long += u64::from(document.full_len > max_tokens as u64);
        if document.full_len > found.longest.0 {
            found.longest = (document.full_len, found.samples);
        }
        let bin = document.full_len.next_power_of_two().trailing_zeros() as usize;
        found.histogram.resize(found.histogram.len().max(bin + 1), 0);
        found.histogram[bin] += 1;
        let label_set = match document.label {
            None => None,
            Some(label) => Some(self.label_set(label).map_err(|problem| at.error(problem.into()))?),
        };
        let mut start = 0;
        loop {
            let end = document.ids.len().min(start + max_tokens);
            self.write_sample(
                &document.ids[start..end],
                document.loss_mask.get(start..end).unwrap_or_default(),
                label_set,
                document.group,
            )?;
            if end == document.ids.len() || self.reader.too_long != OverlongPolicy::Split {
                return Ok(());
            }
            // For next-token prediction the last token of a sample is only a target, so the next sample starts with it.
            // Classification has no targets among the tokens, so samples do not overlap.
            start = if label_set.is_some() { end } else { end - 1 };
        }
    }

    /// The index of a set of labels.
    fn label_set(&mut self, label: Label) -> Result<u32, String> {
        let found = &mut self.summary;
        let names = match label {
            Label::Class(name) => vec![name],
            Label::List(names) => {
                found.multi_label = true;
                names
            }
        };
        let mut set = Vec::with_capacity(names.len());
        for name in names {
            let next = self.classes.len() as u32;
            set.push(*self.classes.entry(name).or_insert_with_key(|name| {
                found.classes.push((name.clone(), 0));
                next
            }));
        }
        let next = self.label_sets.len() as u32;
        let index = *self.label_sets.entry(set).or_insert_with_key(|set| {
            found.label_sets.push(set.clone());
            next
        });
        match (self.classes.len(), self.label_sets.len()) {
            (classes, _) if classes > MAX_CLASSES => {
                Err(format!("more than the limit of {MAX_CLASSES} classes"))
            }
            (_, sets) if sets > MAX_LABEL_SETS => {
                Err(format!("more than the limit of {MAX_LABEL_SETS} different lists of labels"))
            }
            _ => Ok(index),
        }
    }

    fn write_sample(
        &mut self,
        ids: &[u32],
        loss_mask: &[bool],
        label_set: Option<u32>,
        group: Option<u64>,
    ) -> Result<(), DataError> {
        let [tokens, marks, ends, labels, groups] = &mut self.out;
        self.bytes.clear();
        self.width.write_ids(ids, &mut self.bytes);
        tokens.write_all(&self.bytes).map_err(write_error)?;
        for &learned in loss_mask {
            let (byte, count) = &mut self.pending_bits;
            *byte |= u8::from(learned) << *count;
            *count += 1;
            if *count == 8 {
                marks.write_all(&[*byte]).map_err(write_error)?;
                self.pending_bits = (0, 0);
            }
        }
        let found = &mut self.summary;
        found.samples += 1;
        found.tokens += ids.len() as u64;
        let all = if loss_mask.is_empty() { ids.len() } else { loss_mask.iter().filter(|l| **l).count() };
        found.learned += all as u64;
        ends.write_all(&found.tokens.to_le_bytes()).map_err(write_error)?;
        if let Some(set) = label_set {
            for &class in &found.label_sets[set as usize] {
                found.classes[class as usize].1 += 1;
            }
            labels.write_all(&set.to_le_bytes()).map_err(write_error)?;
        }
        if let Some(group) = group {
            groups.write_all(&group.to_le_bytes()).map_err(write_error)?;
        }
        Ok(())
    }

    fn finish(self) -> Result<(), DataError> {
        let [_, marks, ..] = self.out;
        if self.pending_bits.1 > 0 {
            marks.write_all(&[self.pending_bits.0]).map_err(write_error)
        } else {
            Ok(())
        }
    }
}
