//! Splits a dataset into training and validation sets by fraction and seed, computed on the fly: no index table, and
//! the order of the samples is kept.
//!
//! The dataset is divided into as many strata of consecutive samples as the smaller subset has samples. One sample of
//! each stratum, drawn by the seed, goes to the smaller subset (the minority), the rest to the larger one (the
//! majority). Both subsets keep the order of the dataset: one that is read sequentially stays cheap to read, and one
//! that is sorted by class is split evenly.

use std::sync::Arc;

use super::streaming::RecordBlock;
use super::table::TableSchema;
use super::{BatchRow, DataError, Dataset, Features, LengthStats, SampleKey, TargetSpec};
use crate::base::random::{RngKey, stream_id};

/// Maps samples to subsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitIndex {
    samples: u64,
    /// Size of the smaller subset, which is the number of strata.
    minority: u64,
    key: RngKey,
}

impl SplitIndex {
    /// First sample of a stratum.
    fn stratum_start(&self, stratum: u64) -> u64 {
        (stratum as u128 * self.samples as u128 / self.minority as u128) as u64
    }

    /// The sample of a stratum that goes to the minority.
    fn minority_index(&self, stratum: u64) -> u64 {
        let (start, end) = (self.stratum_start(stratum), self.stratum_start(stratum + 1));
        start + self.key.below(stratum, end - start)
    }

    /// Stratum that contains sample `index`.
    fn stratum_of(&self, index: u64) -> u64 {
        (((index + 1) as u128 * self.minority as u128 - 1) / self.samples as u128) as u64
    }

    /// Dataset index of majority sample `i`.
    fn majority_index(&self, i: u64) -> u64 {
        // stratum_start(r) - r majority samples precede stratum r: binary search for the last stratum where that is at
        // most i.
        let (mut low, mut high) = (0, self.minority);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.stratum_start(middle) - middle <= i { low = middle } else { high = middle }
        }
        let index = i + low;
        index + u64::from(index >= self.minority_index(low))
    }

    /// Number of samples below `index` that go to the minority.
    fn minority_before(&self, index: u64) -> u64 {
        if index == 0 {
            return 0;
        }
        let stratum = self.stratum_of(index - 1);
        stratum + u64::from(self.minority_index(stratum) < index)
    }
}

/// One subset of a split.
pub struct Subset {
    dataset: Arc<dyn Dataset>,
    split_index: SplitIndex,
    is_minority: bool,
    /// Whether the other subset reads through the same `dataset`.
    shares_dataset: bool,
}

/// The assignment of samples to subsets, available before the dataset exists: for statistics over the training set
/// only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPlan {
    split_index: SplitIndex,
    /// Whether the validation set is the smaller subset.
    valid_is_minority: bool,
}

impl SplitPlan {
    /// Splits `samples` samples, `valid_fraction` of them for validation; at least one in each subset.
    pub fn new(samples: u64, valid_fraction: f64, seed: u64) -> Result<Self, DataError> {
        const SPLIT: u64 = stream_id("data.split");
        if samples < 2 {
            let why =
                format!("it has {samples}, and both the training and the validation set need at least one");
            return Err(DataError::NoSamples { set: "the dataset".into(), why });
        }
        let valid = ((samples as f64 * valid_fraction).round() as u64).clamp(1, samples - 1);
        let minority = valid.min(samples - valid);
        let split_index = SplitIndex { samples, minority, key: RngKey::new(seed, SPLIT) };
        Ok(Self { split_index, valid_is_minority: valid == minority })
    }

    /// Whether sample `index` of the dataset is in the training set.
    pub fn is_train(&self, index: u64) -> bool {
        let in_minority = self.split_index.minority_index(self.split_index.stratum_of(index)) == index;
        in_minority != self.valid_is_minority
    }
}

/// Splits `dataset` into (train, valid), `valid_fraction` of the samples for validation; at least one in each subset.
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
    /// Index of sample `i` in the whole dataset.
    fn dataset_index(&self, i: u64) -> u64 {
        if self.is_minority { self.split_index.minority_index(i) } else { self.split_index.majority_index(i) }
    }

    /// Number of samples of this subset below `index` of the whole dataset.
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

    /// If both subsets share one dataset, its bytes are prorated, so that the two add up to it.
    fn resident_bytes(&self) -> u64 {
        let dataset_bytes = self.dataset.resident_bytes();
        if !self.shares_dataset {
            return dataset_bytes;
        }
        let minority_bytes = (dataset_bytes as u128 * self.split_index.minority as u128
            / self.split_index.samples as u128) as u64;
        if self.is_minority { minority_bytes } else { dataset_bytes - minority_bytes }
    }

    /// The blocks of the whole dataset, with the same indices, each with the number of its samples in this subset.
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
            TargetSpec::MultiLabel { .. } | TargetSpec::Values { .. } | TargetSpec::Tokens => return None,
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

    fn table_schema(&self) -> Option<&TableSchema> {
        self.dataset.table_schema()
    }

    fn sample_name(&self, index: u64) -> Option<String> {
        self.dataset.sample_name(self.dataset_index(index))
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
        /// Each sample is in exactly one subset, in order, and the subsets have the requested sizes.
        #[test]
        fn the_subsets_partition_the_dataset(samples in 2u64..400, fraction in 0.0..1.0f64, seed: u64) {
            let (train, valid) = subsets(samples, fraction, seed);
            let (a, b) = (indices(&train), indices(&valid));
            prop_assert_eq!(b.len() as u64, ((samples as f64 * fraction).round() as u64).clamp(1, samples - 1));
            prop_assert!(a.is_sorted() && b.is_sorted());
            for (part, of) in [(&train, &a), (&valid, &b)] {
                for index in 0..=samples {
                    prop_assert_eq!(part.count_before(index), of.iter().filter(|i| **i < index).count() as u64);
                }
            }
            let plan = SplitPlan::new(samples, fraction, seed).unwrap();
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
