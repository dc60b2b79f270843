//! Selects some of a sequence of samples, computed on the fly: no index table, and both parts keep the order of the
//! samples.

use std::ops::Range;

use super::FoldIndex;
use crate::base::random::RngKey;

/// Which of `samples` samples are selected; the others are the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Division {
    /// As many strata of consecutive samples as the smaller part (the minority) has samples: one sample of each, drawn
    /// by the key, belongs to it. A part that is read sequentially stays cheap to read, and a dataset that is sorted by
    /// class is divided evenly.
    Strata { strata: Strata, minority_is_selected: bool },
    /// One of several folds.
    Fold(FoldStrata),
    /// Consecutive samples.
    Range { samples: u64, selected: Range<u64> },
}

impl Division {
    /// Selects nothing.
    pub fn none(samples: u64) -> Self {
        Division::Range { samples, selected: 0..0 }
    }

    /// Selects `selected` of the samples at random.
    pub fn random(samples: u64, selected: u64, key: RngKey) -> Self {
        match selected {
            0 => Self::none(samples),
            all if all >= samples => Division::Range { samples, selected: 0..samples },
            _ => {
                let minority = selected.min(samples - selected);
                let strata = Strata { samples, minority, key };
                Division::Strata { strata, minority_is_selected: selected == minority }
            }
        }
    }

    /// Selects the last `selected` samples.
    pub fn last(samples: u64, selected: u64) -> Self {
        Division::Range { samples, selected: samples - selected.min(samples)..samples }
    }

    /// Selects a fold at random. The folds that have one sample more than others start with `first_larger`.
    pub fn fold(samples: u64, fold: FoldIndex, first_larger: u64, key: RngKey) -> Self {
        Division::Fold(FoldStrata { samples, fold, first_larger, key })
    }

    /// Selects a fold of consecutive samples.
    pub fn consecutive_fold(samples: u64, fold: FoldIndex) -> Self {
        Division::Range { samples, selected: fold.consecutive(samples) }
    }

    pub fn samples(&self) -> u64 {
        match self {
            Division::Strata { strata, .. } => strata.samples,
            Division::Fold(fold) => fold.samples,
            Division::Range { samples, .. } => *samples,
        }
    }

    pub fn is_selected(&self, index: u64) -> bool {
        match self {
            Division::Strata { strata, minority_is_selected } => {
                (strata.drawn(strata.stratum_of(index)) == index) == *minority_is_selected
            }
            Division::Fold(fold) => fold.drawn(index / fold.fold.folds) == Some(index),
            Division::Range { selected, .. } => selected.contains(&index),
        }
    }

    /// Number of selected samples below `index`.
    pub fn selected_before(&self, index: u64) -> u64 {
        match self {
            Division::Strata { strata, minority_is_selected } => {
                let drawn = strata.drawn_before(index);
                if *minority_is_selected { drawn } else { index - drawn }
            }
            Division::Fold(fold) => {
                let stratum = index / fold.fold.folds;
                stratum + u64::from(fold.drawn(stratum).is_some_and(|drawn| drawn < index))
            }
            Division::Range { selected, .. } => index.clamp(selected.start, selected.end) - selected.start,
        }
    }

    /// Index of selected sample `i`.
    pub fn selected_index(&self, i: u64) -> u64 {
        match self {
            Division::Strata { strata, minority_is_selected: true } => strata.drawn(i),
            Division::Strata { strata, minority_is_selected: false } => strata.other(i),
            // Each stratum before the last has one.
            Division::Fold(fold) => fold.drawn(i).unwrap_or(fold.samples),
            Division::Range { selected, .. } => selected.start + i,
        }
    }

    /// Index of sample `i` of the rest.
    pub fn rest_index(&self, i: u64) -> u64 {
        match self {
            Division::Strata { strata, minority_is_selected: true } => strata.other(i),
            Division::Strata { strata, minority_is_selected: false } => strata.drawn(i),
            Division::Fold(fold) => fold.other(i),
            Division::Range { selected, .. } if i < selected.start => i,
            Division::Range { selected, .. } => i + (selected.end - selected.start),
        }
    }
}

/// Strata of consecutive samples, of which one sample each is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strata {
    samples: u64,
    /// Number of strata.
    minority: u64,
    key: RngKey,
}

impl Strata {
    /// First sample of a stratum.
    fn start(&self, stratum: u64) -> u64 {
        (stratum as u128 * self.samples as u128 / self.minority as u128) as u64
    }

    /// The drawn sample of a stratum.
    fn drawn(&self, stratum: u64) -> u64 {
        let (start, end) = (self.start(stratum), self.start(stratum + 1));
        start + self.key.below(stratum, end - start)
    }

    /// Stratum that contains sample `index`.
    fn stratum_of(&self, index: u64) -> u64 {
        (((index + 1) as u128 * self.minority as u128 - 1) / self.samples as u128) as u64
    }

    /// Index of sample `i` of those that are not drawn.
    fn other(&self, i: u64) -> u64 {
        // start(r) - r of them precede stratum r: binary search for the last stratum where that is at most i.
        let (mut low, mut high) = (0, self.minority);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.start(middle) - middle <= i { low = middle } else { high = middle }
        }
        let index = i + low;
        index + u64::from(index >= self.drawn(low))
    }

    /// Number of drawn samples below `index`.
    fn drawn_before(&self, index: u64) -> u64 {
        if index == 0 {
            return 0;
        }
        let stratum = self.stratum_of(index - 1);
        stratum + u64::from(self.drawn(stratum) < index)
    }
}

/// A fold: of each stratum of as many consecutive samples as there are folds, every fold has one, in an order that the
/// key draws per stratum. The last stratum may have fewer samples, so that some folds are larger by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldStrata {
    samples: u64,
    fold: FoldIndex,
    first_larger: u64,
    key: RngKey,
}

impl FoldStrata {
    /// The sample of this fold in a stratum.
    fn drawn(&self, stratum: u64) -> Option<u64> {
        let FoldIndex { index, folds } = self.fold;
        let start = stratum * folds;
        let width = folds.min(self.samples.saturating_sub(start));
        // The place of the fold among those that have a sample in the stratum.
        let place = if width == folds { index } else { (index + folds - self.first_larger % folds) % folds };
        (place < width).then(|| start + (place + self.key.below(stratum, width)) % width)
    }

    /// Index of sample `i` of the other folds.
    fn other(&self, i: u64) -> u64 {
        let folds = self.fold.folds;
        let stratum = (i / (folds - 1)).min(self.samples / folds);
        let index = i + stratum;
        // In the last stratum, `i / (folds - 1)` may be beyond it if this fold has no sample there.
        index + u64::from(self.drawn(stratum).is_some_and(|drawn| index >= drawn))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn num_selected(division: &Division) -> u64 {
        division.selected_before(division.samples())
    }

    fn check(division: &Division) -> Result<(), TestCaseError> {
        let samples = division.samples();
        let selected: Vec<u64> = (0..samples).filter(|i| division.is_selected(*i)).collect();
        let rest: Vec<u64> = (0..samples).filter(|i| !division.is_selected(*i)).collect();
        prop_assert_eq!(selected.len() as u64, num_selected(division));
        prop_assert!((0..selected.len()).all(|i| division.selected_index(i as u64) == selected[i]));
        prop_assert!((0..rest.len()).all(|i| division.rest_index(i as u64) == rest[i]));
        for index in 0..=samples {
            let before = selected.iter().filter(|i| **i < index).count() as u64;
            prop_assert_eq!(division.selected_before(index), before);
        }
        Ok(())
    }

    proptest! {
        /// Every way to divide agrees with itself: membership, ranks and the indices of both parts, in order.
        #[test]
        fn membership_ranks_and_indices_agree(
            samples in 1u64..200,
            selected in 0u64..200,
            folds in 2u64..12,
            index in 0u64..12,
            first in 0u64..12,
            seed: u64,
        ) {
            let (key, fold) = (RngKey::new(seed, 1), FoldIndex { index: index % folds, folds });
            let selected = selected.min(samples);
            check(&Division::random(samples, selected, key))?;
            check(&Division::last(samples, selected))?;
            check(&Division::fold(samples, fold, first, key))?;
            check(&Division::consecutive_fold(samples, fold))?;
            prop_assert_eq!(num_selected(&Division::random(samples, selected, key)), selected);
        }

        /// Every sample is in exactly one fold, and the sizes of the folds differ by at most one.
        #[test]
        fn folds_partition_the_samples(samples in 1u64..200, folds in 2u64..12, first in 0u64..12, seed: u64) {
            let fold = |index| FoldIndex { index, folds };
            let random = |index| Division::fold(samples, fold(index), first, RngKey::new(seed, 1));
            let consecutive = |index| Division::consecutive_fold(samples, fold(index));
            for of in [&random as &dyn Fn(u64) -> Division, &consecutive] {
                let all: Vec<Division> = (0..folds).map(of).collect();
                for i in 0..samples {
                    prop_assert_eq!(all.iter().filter(|division| division.is_selected(i)).count(), 1);
                }
                let sizes = all.iter().map(num_selected);
                prop_assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }
}
