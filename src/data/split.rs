//! A set parted in two, by share and seed, in arithmetic alone: no table, and neighbours stay neighbours.
//!
//! The samples are cut into as many runs as the smaller part is to have samples; of each run, one is drawn by
//! the seed and goes to the smaller part, the rest to the larger one. Both parts keep the set's order, so a set
//! that is read forward stays cheap to read, and one that is sorted by class is parted evenly.

use std::sync::Arc;

use super::streaming::RecordBlock;
use super::{BatchRow, DataError, Dataset, Features, LengthStats, SampleKey, TargetSpec};
use crate::random::{RngKey, stream_id};

/// Which samples of a set go where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitIndex {
    samples: u64,
    /// Samples of the smaller part: runs that the set is cut into.
    minority: u64,
    key: RngKey,
}

impl SplitIndex {
    /// The first sample of run `run`.
    fn stratum_start(&self, stratum: u64) -> u64 {
        (stratum as u128 * self.samples as u128 / self.minority as u128) as u64
    }

    /// The sample of run `run` that goes to the smaller part.
    fn minority_index(&self, stratum: u64) -> u64 {
        let (start, end) = (self.stratum_start(stratum), self.stratum_start(stratum + 1));
        start + self.key.below(stratum, end - start)
    }

    /// The run that sample `dataset_index` is in.
    fn stratum_of(&self, index: u64) -> u64 {
        (((index + 1) as u128 * self.minority as u128 - 1) / self.samples as u128) as u64
    }

    /// Sample `i` of the larger part.
    fn majority_index(&self, i: u64) -> u64 {
        // Run r begins with start(r) - r kept samples before it: find the last such run that is not beyond i.
        let (mut low, mut high) = (0, self.minority);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.stratum_start(middle) - middle <= i { low = middle } else { high = middle }
        }
        let index = i + low;
        index + u64::from(index >= self.minority_index(low))
    }

    /// How many samples below `dataset_index` go to the smaller part.
    fn minority_before(&self, index: u64) -> u64 {
        if index == 0 {
            return 0;
        }
        let stratum = self.stratum_of(index - 1);
        stratum + u64::from(self.minority_index(stratum) < index)
    }
}

/// One part of a set.
pub struct Subset {
    dataset: Arc<dyn Dataset>,
    split_index: SplitIndex,
    is_minority: bool,
    /// The other part reads the same `whole`.
    shares_dataset: bool,
}

/// Which samples go where, known before the set itself is made: for statistics of the training part alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPlan {
    split_index: SplitIndex,
    /// Whether the smaller part is the one that is measured on.
    valid_is_minority: bool,
}

impl SplitPlan {
    /// Of a set of `samples`, `valid_fraction` of them to measure on; at least one of each.
    pub fn new(samples: u64, valid_fraction: f64, seed: u64) -> Result<Self, DataError> {
        const SPLIT: u64 = stream_id("data.split");
        if samples < 2 {
            let why = format!("it has {samples} and both the training and the validation set need one");
            return Err(DataError::NoSamples { set: "the set".into(), why });
        }
        let valid = ((samples as f64 * valid_fraction).round() as u64).clamp(1, samples - 1);
        let minority = valid.min(samples - valid);
        let split_index = SplitIndex { samples, minority, key: RngKey::new(seed, SPLIT) };
        Ok(Self { split_index, valid_is_minority: valid == minority })
    }

    /// Whether sample `dataset_index` of the whole set is trained on.
    pub fn is_train(&self, index: u64) -> bool {
        let in_minority = self.split_index.minority_index(self.split_index.stratum_of(index)) == index;
        in_minority != self.valid_is_minority
    }
}

/// The samples of `whole` to train on, and `valid_fraction` of them to measure on; at least one of each.
pub fn random_split(
    dataset: Arc<dyn Dataset>,
    valid_fraction: f64,
    seed: u64,
) -> Result<(Subset, Subset), DataError> {
    let SplitPlan { split_index, valid_is_minority } = SplitPlan::new(dataset.len(), valid_fraction, seed)?;
    let valid_dataset = dataset.sequential_reader();
    let subset = |dataset: &Arc<dyn Dataset>, is_minority| Subset {
        dataset: dataset.clone(),
        split_index,
        is_minority,
        shares_dataset: valid_dataset.is_none(),
    };
    Ok((
        subset(&dataset, !valid_is_minority),
        subset(valid_dataset.as_ref().unwrap_or(&dataset), valid_is_minority),
    ))
}

impl Subset {
    /// The sample's index in the whole set.
    fn dataset_index(&self, i: u64) -> u64 {
        if self.is_minority { self.split_index.minority_index(i) } else { self.split_index.majority_index(i) }
    }

    /// How many of this part's samples lie below `dataset_index` of the whole set.
    pub fn count_before(&self, index: u64) -> u64 {
        let drawn_before = self.split_index.minority_before(index);
        if self.is_minority { drawn_before } else { index - drawn_before }
    }
}

impl Dataset for Subset {
    fn len(&self) -> u64 {
        if self.is_minority {
            self.split_index.minority
        } else {
            self.split_index.samples - self.split_index.minority
        }
    }

    fn features(&self) -> &Features {
        self.dataset.features()
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        self.dataset.read(self.dataset_index(index), key, into)
    }

    /// Where the parts share the whole, this one's share, so that they add up to it.
    fn resident_bytes(&self) -> u64 {
        let dataset_bytes = self.dataset.resident_bytes();
        if !self.shares_dataset {
            return dataset_bytes;
        }
        let minority_bytes = (dataset_bytes as u128 * self.split_index.minority as u128
            / self.split_index.samples as u128) as u64;
        if self.is_minority { minority_bytes } else { dataset_bytes - minority_bytes }
    }

    /// Those of the whole set, by the same numbers, with this part's samples in each.
    fn blocks(&self) -> Option<Vec<RecordBlock>> {
        let mut index = 0;
        let own = |block: RecordBlock| {
            let before = self.count_before(index);
            index += block.records;
            RecordBlock { records: self.count_before(index) - before, ..block }
        };
        Some(self.dataset.blocks()?.into_iter().map(own).collect())
    }

    fn prefetch(&self, blocks: Vec<u32>) {
        self.dataset.prefetch(blocks);
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        let classes = match &self.features().target {
            TargetSpec::Class { names } | TargetSpec::MixedClass { names } => names.len(),
            TargetSpec::Values { .. } | TargetSpec::Tokens => return None,
        };
        let mut counts = vec![0; classes];
        for i in 0..self.len() {
            *counts.get_mut(self.class(i)? as usize)? += 1;
        }
        Some(counts)
    }

    fn class(&self, index: u64) -> Option<u32> {
        self.dataset.class(self.dataset_index(index))
    }

    fn length_stats(&self) -> Option<LengthStats> {
        self.dataset.length_stats()
    }

    fn decode_tokens(&self, tokens: &[u32]) -> Option<String> {
        self.dataset.decode_tokens(tokens)
    }

    fn input_names(&self) -> Vec<String> {
        self.dataset.input_names()
    }

    fn tokenizer_json(&self) -> Option<Vec<u8>> {
        self.dataset.tokenizer_json()
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.dataset.describe()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::shapes::{self, ShapesDataset};

    fn subsets(samples: u64, fraction: f64, seed: u64) -> (Subset, Subset) {
        random_split(
            Arc::new(ShapesDataset::new(16, samples, 1, shapes::ShapesSplit::Train).unwrap()),
            fraction,
            seed,
        )
        .unwrap()
    }

    fn indices(part: &Subset) -> Vec<u64> {
        (0..part.len()).map(|i| part.dataset_index(i)).collect()
    }

    proptest! {
        /// Each sample is in one part, in order, and the parts are as large as asked.
        #[test]
        fn the_subsets_partition_the_dataset(samples in 2u64..400, share in 0.0..1.0f64, seed: u64) {
            let (train, valid) = subsets(samples, share, seed);
            let (a, b) = (indices(&train), indices(&valid));
            prop_assert_eq!(b.len() as u64, ((samples as f64 * share).round() as u64).clamp(1, samples - 1));
            prop_assert!(a.is_sorted() && b.is_sorted());
            for (part, of) in [(&train, &a), (&valid, &b)] {
                for index in 0..=samples {
                    prop_assert_eq!(part.count_before(index), of.iter().filter(|i| **i < index).count() as u64);
                }
            }
            let plan = SplitPlan::new(samples, share, seed).unwrap();
            prop_assert!(a.iter().all(|i| plan.is_train(*i)) && !b.iter().any(|i| plan.is_train(*i)));
            let mut all = [a, b].concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..samples));
        }
    }

    #[test]
    fn the_seed_decides_and_huge_sets_cost_nothing() {
        let valid = |seed| indices(&subsets(1000, 0.1, seed).1);
        assert_eq!(valid(1), valid(1));
        assert_ne!(valid(1), valid(2));
        let (train, valid) = subsets(1 << 60, 0.01, 3);
        assert_eq!(train.len() + valid.len(), 1 << 60);
        assert!(train.dataset_index(train.len() - 1) < 1 << 60 && valid.dataset_index(12345) < 1 << 60);
        let one = Arc::new(ShapesDataset::new(16, 1, 1, shapes::ShapesSplit::Train).unwrap());
        assert!(random_split(one, 0.5, 0).is_err());
    }
}
