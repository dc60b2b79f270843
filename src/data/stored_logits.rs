//! A file with a teacher's logits for every sample, compressed. For each row of logits (that of a sample, or of one of
//! its positions) it holds the largest, as class and 16-bit logit, and the log-sum-exp of the others.
//!
//! Samples have the same size and are in order, so that a sample is one positioned read.

use std::fs::File;
use std::path::{Path, PathBuf};

use half::f16;
use rayon::prelude::*;

use super::{DataError, files};

/// Below every log-sum-exp that matters; its exponential is 0.
const LEAST_REST: f64 = -1e4;

/// How rows are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitFormat {
    /// Logits per row, and how many of them are kept.
    pub classes: usize,
    pub top_k: usize,
    /// Rows per sample.
    pub positions: usize,
    /// Temperature of the log-sum-exp of the others.
    pub temperature: f64,
}

/// Rows of several samples, flat.
#[derive(Debug, Default, PartialEq)]
pub struct TopRows {
    /// The classes kept, ascending in each row.
    pub classes: Vec<u32>,
    /// Their logits, minus the largest of the row.
    pub logits: Vec<f32>,
    /// Log-sum-exp of the other logits over the temperature, minus the largest over the temperature: one per row.
    pub rest: Vec<f32>,
}

impl LogitFormat {
    fn class_bytes(&self) -> usize {
        if self.classes <= 1 << 16 { 2 } else { 4 }
    }

    fn row_bytes(&self) -> usize {
        self.top_k * (self.class_bytes() + 2) + 4
    }

    fn sample_bytes(&self) -> usize {
        self.positions * self.row_bytes()
    }

    /// Bytes of this many samples in the file.
    pub fn file_bytes(&self, samples: u64) -> u64 {
        samples.saturating_mul(self.sample_bytes() as u64)
    }

    /// Bytes of the rows of this many samples in memory, and of one sample as it is read.
    pub fn batch_bytes(&self, samples: usize) -> u64 {
        (samples * self.positions * (8 * self.top_k + 4) + self.sample_bytes()) as u64
    }

    /// Appends the rows of some samples to `out`. `logits` has `classes` values per row, and of each sample the first
    /// rows, `positions` at most.
    pub fn encode(&self, logits: &[f32], samples: usize, out: &mut Vec<u8>) {
        let given = logits.len() / (samples * self.classes).max(1);
        let start = out.len();
        (0..samples).for_each(|_| self.encode_missing(out));
        let rows = logits.par_chunks(self.classes * given);
        rows.zip(out[start..].par_chunks_mut(self.sample_bytes())).for_each(|(logits, sample)| {
            let rows = logits.chunks(self.classes).zip(sample.chunks_mut(self.row_bytes()));
            rows.for_each(|(logits, row)| self.encode_row(logits, row));
        });
    }

    /// Appends a sample that has no logits: a bad record, which is never read.
    pub fn encode_missing(&self, out: &mut Vec<u8>) {
        for _ in 0..self.positions {
            let classes = (0..self.top_k)
                .flat_map(|class| (class as u32).to_le_bytes().into_iter().take(self.class_bytes()));
            out.extend(classes);
            out.resize(out.len() + 2 * self.top_k + 4, 0);
        }
    }

    fn encode_row(&self, logits: &[f32], row: &mut [u8]) {
        let mut top: Vec<u32> = Vec::with_capacity(self.top_k);
        // Index in `top` of its smallest logit; the highest class on ties.
        let mut least = 0;
        for (class, logit) in logits.iter().enumerate() {
            if top.len() < self.top_k {
                top.push(class as u32);
            } else if *logit > logits[top[least] as usize] {
                top[least] = class as u32;
            } else {
                continue;
            }
            let value = |place: usize| logits[top[place] as usize];
            least = (0..top.len()).fold(0, |least, place| {
                let (a, b) = (value(place), value(least));
                if a < b || a == b && top[place] > top[least] { place } else { least }
            });
        }
        top.sort_unstable();
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut next = top.iter().peekable();
        let mut others = 0.0;
        for (class, logit) in logits.iter().enumerate() {
            match next.next_if_eq(&&(class as u32)) {
                Some(_) => {}
                None => others += ((logit - most) as f64 / self.temperature).exp(),
            }
        }
        let rest = match logits.iter().any(|logit| logit.is_nan()) {
            // NaN, so that the loss becomes NaN too.
            true => f64::NAN,
            false => others.ln().max(LEAST_REST),
        };
        let (classes, row) = row.split_at_mut(self.top_k * self.class_bytes());
        let (values, end) = row.split_at_mut(2 * self.top_k);
        for (class, into) in top.iter().zip(classes.chunks_mut(self.class_bytes())) {
            into.copy_from_slice(&class.to_le_bytes()[..into.len()]);
        }
        for (class, into) in top.iter().zip(values.chunks_mut(2)) {
            let logit = logits[*class as usize] - most;
            // NaN stays NaN.
            let logit = if logit < f16::MIN.to_f32() { f16::MIN } else { f16::from_f32(logit) };
            into.copy_from_slice(&logit.to_le_bytes());
        }
        end.copy_from_slice(&(rest as f32).to_le_bytes());
    }

    fn decode_row(&self, row: &[u8], into: &mut TopRows) {
        let (classes, row) = row.split_at(self.top_k * self.class_bytes());
        let (values, end) = row.split_at(2 * self.top_k);
        into.classes.extend(
            classes
                .chunks(self.class_bytes())
                .map(|bytes| bytes.iter().rev().fold(0, |class, byte| class << 8 | *byte as u32)),
        );
        into.logits.extend(values.chunks(2).map(|bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()));
        into.rest.push(f32::from_le_bytes([end[0], end[1], end[2], end[3]]));
    }
}

/// An open file of logits. Without a file, all logits are 0: for updates that are only measured.
pub struct StoredLogits {
    pub format: LogitFormat,
    file: Option<(File, PathBuf)>,
}

impl StoredLogits {
    pub fn blank(format: LogitFormat) -> Self {
        Self { format, file: None }
    }

    /// Refuses a file that has not `samples` samples.
    pub fn open(path: &Path, format: LogitFormat, samples: u64) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io(path))?;
        let bytes = file.metadata().map_err(DataError::io(path))?.len();
        if bytes != format.file_bytes(samples) {
            let why = format!("{bytes} bytes, not {}", format.file_bytes(samples));
            let source = std::io::Error::new(std::io::ErrorKind::InvalidData, why);
            return Err(DataError::io(path)(source));
        }
        Ok(Self { format, file: Some((file, path.to_owned())) })
    }

    /// The first `positions` rows of each of these samples.
    pub fn read(&self, ids: &[u64], positions: usize) -> Result<TopRows, DataError> {
        let LogitFormat { top_k, .. } = self.format;
        let rows = ids.len() * positions;
        let mut into = TopRows {
            classes: Vec::with_capacity(rows * top_k),
            logits: Vec::with_capacity(rows * top_k),
            rest: Vec::with_capacity(rows),
        };
        let row_bytes = self.format.row_bytes();
        let mut sample = Vec::new();
        self.format.encode_missing(&mut sample);
        for id in ids {
            let read = &mut sample[..positions * row_bytes];
            if let Some((file, path)) = &self.file {
                files::read_exact_at(file, read, self.format.file_bytes(*id)).map_err(DataError::io(path))?;
            }
            read.chunks(row_bytes).for_each(|row| self.format.decode_row(row, &mut into));
        }
        Ok(into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(format: LogitFormat, logits: &[f32], samples: usize) -> (tempfile::TempDir, StoredLogits) {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut bytes) = (folder.path().join("logits"), Vec::new());
        format.encode(logits, samples, &mut bytes);
        std::fs::write(&path, bytes).unwrap();
        let stored = StoredLogits::open(&path, format, samples as u64).unwrap();
        (folder, stored)
    }

    /// The softmax of the rows read equals that of the logits, with all other classes as one.
    #[test]
    fn probabilities_are_those_of_the_logits() {
        let (samples, positions, temperature) = (5usize, 3usize, 2.5);
        for (classes, top_k) in [(7, 3), (7, 7), (70_000, 2), (2, 1)] {
            let format = LogitFormat { classes, top_k, positions, temperature };
            let value = |i: usize| ((i * 7919) % 1009) as f32 / 90.0 - 4.0;
            let logits: Vec<f32> = (0..samples * positions * classes).map(value).collect();
            let (_folder, stored) = stored(format, &logits, samples);
            let ids = [4, 0, 2];
            let rows = stored.read(&ids, 2).unwrap();
            assert_eq!(rows.rest.len(), 6);
            for (i, row) in [(4, 0), (4, 1), (0, 0), (0, 1), (2, 0), (2, 1)].iter().enumerate() {
                let logits = &logits[(row.0 * positions + row.1) * classes..][..classes];
                let weights: Vec<f64> = logits.iter().map(|z| (*z as f64 / temperature).exp()).collect();
                let total: f64 = weights.iter().sum();
                let known = &rows.classes[i * top_k..(i + 1) * top_k];
                assert!(known.is_sorted_by(|a, b| a < b), "{known:?}");
                let kept = rows.logits[i * top_k..(i + 1) * top_k].iter();
                let kept: Vec<f64> = kept.map(|z| (*z as f64 / temperature).exp()).collect();
                let rest = if top_k < classes { (rows.rest[i] as f64).exp() } else { 0.0 };
                let all = kept.iter().sum::<f64>() + rest;
                let mut sum = 0.0;
                for (class, kept) in known.iter().zip(&kept) {
                    let expected = weights[*class as usize] / total;
                    sum += expected;
                    assert!((kept / all - expected).abs() < 2e-3 * expected, "{kept} {all} {expected}");
                }
                assert!((rest / all - (1.0 - sum)).abs() < 2e-3);
                let least = known.iter().map(|class| logits[*class as usize]).fold(f32::INFINITY, f32::min);
                let above = logits.iter().filter(|z| **z > least).count();
                assert!(above < top_k, "{above} logits are above the least that is kept");
            }
        }
    }

    #[test]
    fn shorter_samples_and_missing_ones_have_rows() {
        let format = LogitFormat { classes: 4, top_k: 2, positions: 3, temperature: 1.0 };
        // One position of each of two samples.
        let (_folder, stored) = stored(format, &[1.0, 5.0, 3.0, 0.0, 9.0, 1.0, 8.0, 2.0], 2);
        let rows = stored.read(&[1, 0], 1).unwrap();
        assert_eq!((rows.classes, rows.logits), (vec![0, 2, 1, 2], vec![0.0, -1.0, 0.0, -2.0]));
        let rows = stored.read(&[1], 3).unwrap();
        assert_eq!(rows.classes[2..], [0, 1, 0, 1]);
        assert!(rows.logits[2..].iter().chain(&rows.rest[1..]).all(|z| *z == 0.0));
        let blank = StoredLogits::blank(format).read(&[7], 1).unwrap();
        assert_eq!((blank.classes, blank.logits, blank.rest), (vec![0, 1], vec![0.0; 2], vec![0.0]));
    }

    #[test]
    fn extreme_logits_stay_finite_and_nan_stays_nan() {
        let format = LogitFormat { classes: 3, top_k: 2, positions: 1, temperature: 0.001 };
        let (_folder, stored) = stored(format, &[3e38, -3e38, 0.0, f32::NAN, 1.0, 2.0], 2);
        let rows = stored.read(&[0], 1).unwrap();
        assert!(rows.logits.iter().chain(&rows.rest).all(|z| z.is_finite()), "{rows:?}");
        assert!(stored.read(&[1], 1).unwrap().rest[0].is_nan());
    }

    #[test]
    fn a_file_of_another_length_is_refused() {
        let format = LogitFormat { classes: 3, top_k: 2, positions: 1, temperature: 1.0 };
        let (folder, _) = stored(format, &[1.0, 2.0, 3.0], 1);
        assert!(StoredLogits::open(&folder.path().join("logits"), format, 2).is_err());
    }
}
