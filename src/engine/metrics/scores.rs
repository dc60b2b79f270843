//! The scores of all samples for every class, for metrics that need their ranks. Kept in memory up to a limit, beyond
//! it in a temporary file that disappears with the process.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

use rayon::prelude::*;

/// Scores by sample and class. A block of samples is stored class by class, so that the scores of one class are read
/// without those of the others.
pub struct ClassScores {
    classes: usize,
    /// Samples per block.
    block: usize,
    /// The last block: scores row by row, and true classes.
    rows: Vec<f32>,
    truths: Vec<u32>,
    /// Full blocks: true classes, then the scores of each class.
    spilled: Option<File>,
    blocks: u64,
}

impl ClassScores {
    /// `bytes`: memory for scores, of `samples` samples at most.
    pub fn new(classes: usize, samples: u64, bytes: usize) -> Self {
        let block = block_samples(classes, samples, bytes);
        let (rows, truths) = (Vec::with_capacity(block * classes), Vec::with_capacity(block));
        Self { classes, block, rows, truths, spilled: None, blocks: 0 }
    }

    pub fn push(&mut self, scores: &[f64], truth: u32) -> io::Result<()> {
        if self.truths.len() == self.block {
            self.spill()?;
        }
        self.rows.extend(scores.iter().map(|score| *score as f32));
        self.truths.push(truth);
        Ok(())
    }

    /// Adds a sample that has any number of classes: `truths` are 1 for those it has, else 0.
    pub fn push_labels(&mut self, scores: &[f64], truths: &[f32]) -> io::Result<()> {
        self.push(scores, SIGNED)?;
        let (start, truths) = (self.rows.len() - self.classes, truths.iter());
        // The sign of a score, which is not negative, says whether the sample has the class.
        let signed = |(score, truth): (&mut f32, &f32)| *score = score.copysign(truth - 0.5);
        self.rows[start..].iter_mut().zip(truths).for_each(signed);
        Ok(())
    }

    fn spill(&mut self) -> io::Result<()> {
        let file = match &mut self.spilled {
            Some(file) => file,
            none => none.insert(tempfile::tempfile()?),
        };
        let mut out = io::BufWriter::new(file);
        out.write_all(bytemuck::cast_slice(&self.truths))?;
        for class in 0..self.classes {
            for row in self.rows.chunks_exact(self.classes) {
                out.write_all(&row[class].to_ne_bytes())?;
            }
        }
        out.flush()?;
        self.blocks += 1;
        self.rows.clear();
        self.truths.clear();
        Ok(())
    }

    /// Area under the ROC curve of every class against the rest; `None` for a class of all samples or of none.
    pub fn roc_aucs(mut self) -> io::Result<Vec<Option<f64>>> {
        (0..self.classes).map(|class| Ok(roc_auc(self.of_class(class)?))).collect()
    }

    /// Average precision of every class; 0 for one without samples.
    pub fn average_precisions(mut self) -> io::Result<Vec<f64>> {
        (0..self.classes).map(|class| Ok(average_precision(self.of_class(class)?))).collect()
    }

    /// Score of every sample for `class`, and whether the sample is of it.
    fn of_class(&mut self, class: usize) -> io::Result<Vec<(f32, bool)>> {
        let mut all = Vec::with_capacity(self.blocks as usize * self.block + self.truths.len());
        if let Some(file) = &mut self.spilled {
            let (mut truths, mut scores) = (vec![0u32; self.block], vec![0f32; self.block]);
            let block_bytes = 4 * (self.classes as u64 + 1) * self.block as u64;
            for block in 0..self.blocks {
                file.seek(SeekFrom::Start(block * block_bytes))?;
                file.read_exact(bytemuck::cast_slice_mut(&mut truths))?;
                file.seek(SeekFrom::Start(block * block_bytes + 4 * (class as u64 + 1) * self.block as u64))?;
                file.read_exact(bytemuck::cast_slice_mut(&mut scores))?;
                all.extend(scores.iter().zip(&truths).map(|(score, truth)| scored(*score, *truth, class)));
            }
        }
        let rows = self.rows.chunks_exact(self.classes.max(1)).zip(&self.truths);
        all.extend(rows.map(|(row, truth)| scored(row[class], *truth, class)));
        Ok(all)
    }
}

/// The true class of a sample whose scores have signs.
const SIGNED: u32 = u32::MAX;

/// A score, and whether the sample is of the class.
fn scored(score: f32, truth: u32, class: usize) -> (f32, bool) {
    match truth {
        SIGNED => (score.abs(), score.is_sign_positive()),
        truth => (score, truth as usize == class),
    }
}

/// Samples of a block.
fn block_samples(classes: usize, samples: u64, bytes: usize) -> usize {
    let most = (bytes / (4 * (classes + 1))).max(1);
    most.min(usize::try_from(samples).unwrap_or(usize::MAX)).max(1)
}

/// Bytes that the scores take at most: those in memory, and one class of all samples with the block it is read from.
pub fn held_bytes(classes: usize, samples: u64, bytes: usize) -> u64 {
    let block = block_samples(classes, samples, bytes) as u64;
    let one_class = samples.saturating_mul(size_of::<(f32, bool)>() as u64);
    4 * (classes as u64 + 1) * block + one_class + 8 * block + (16 << 10)
}

/// Mean of the precisions at the ranks of the positives, where equal scores share a rank.
pub fn average_precision(mut scored: Vec<(f32, bool)>) -> f64 {
    scored.par_sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    let positives = scored.iter().filter(|(_, positive)| *positive).count() as f64;
    let (mut above, mut hits_above, mut sum) = (0.0, 0.0, 0.0);
    for equal in scored.chunk_by(|a, b| a.0 == b.0) {
        let hits = equal.iter().filter(|(_, positive)| *positive).count() as f64;
        above += equal.len() as f64;
        hits_above += hits;
        sum += hits * hits_above / above;
    }
    if positives == 0.0 { 0.0 } else { sum / positives }
}

/// Probability that a positive has a larger score than a negative; equal scores count half.
pub fn roc_auc(mut scored: Vec<(f32, bool)>) -> Option<f64> {
    scored.par_sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let positives = scored.iter().filter(|(_, positive)| *positive).count() as f64;
    let negatives = scored.len() as f64 - positives;
    if positives == 0.0 || negatives == 0.0 {
        return None;
    }
    let (mut below, mut wins) = (0.0, 0.0);
    for equal in scored.chunk_by(|a, b| a.0 == b.0) {
        let hits = equal.iter().filter(|(_, positive)| *positive).count() as f64;
        let misses = equal.len() as f64 - hits;
        wins += hits * (below + misses / 2.0);
        below += misses;
    }
    Some(wins / (positives * negatives))
}
