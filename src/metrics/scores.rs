//! The scores of all samples for every class, for metrics that need their ranks. Kept in memory up to a limit, beyond it
//! in a temporary file that disappears with the process.

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
    /// `bytes`: memory for scores.
    pub fn new(classes: usize, bytes: usize) -> Self {
        let block = (bytes / (4 * (classes + 1))).max(1);
        Self { classes, block, rows: Vec::new(), truths: Vec::new(), spilled: None, blocks: 0 }
    }

    pub fn push(&mut self, scores: &[f64], truth: u32) -> io::Result<()> {
        if self.truths.len() == self.block {
            self.spill()?;
        }
        self.rows.extend(scores.iter().map(|score| *score as f32));
        self.truths.push(truth);
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
                all.extend(
                    scores.iter().zip(&truths).map(|(score, truth)| (*score, *truth as usize == class)),
                );
            }
        }
        let rows = self.rows.chunks_exact(self.classes.max(1)).zip(&self.truths);
        all.extend(rows.map(|(row, truth)| (row[class], *truth as usize == class)));
        Ok(all)
    }
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
