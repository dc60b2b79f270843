//! One set of a split, as a dataset.

use std::sync::Arc;

use super::{DatasetSplit, SplitPlan};
use crate::streaming::RecordBlock;
use crate::table::TableSchema;
use crate::{BatchRow, DataError, Dataset, Datasets, Features, LengthStats, SampleKey, TargetSpec, TestSet};

/// One set of a split.
pub struct Subset {
    dataset: Arc<dyn Dataset>,
    plan: Arc<SplitPlan>,
    set: DatasetSplit,
    counted: CountedMemory,
}

/// Which memory a subset counts as its own, so that the sets of a job count everything once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CountedMemory {
    /// The dataset and the split plan.
    All,
    /// Its own reader. The training set counts the split plan.
    Reader,
    /// A part of the dataset, so that the training and the validation set add up to it.
    Part,
}

/// The sets of a split.
struct Subsets {
    train: Subset,
    /// `None` if validation has its own files.
    valid: Option<Subset>,
    /// `None` if the split has none.
    test: Option<Subset>,
}

/// A job's training files, as its training set reads them, and as the other sets do: those are not augmented.
pub struct TrainFiles {
    pub train: Arc<dyn Dataset>,
    pub others: Arc<dyn Dataset>,
}

/// The sets of a job: `files` split by `plan`, if there is one, and the sets that have files of their own.
pub fn job_datasets(
    files: TrainFiles,
    plan: Option<SplitPlan>,
    own_valid: Option<Arc<dyn Dataset>>,
    own_test: Option<Arc<dyn Dataset>>,
) -> Datasets {
    let shared = |set: Option<Subset>| set.map(|set| Arc::new(set) as Arc<dyn Dataset>);
    let (train, valid, test): (Arc<dyn Dataset>, _, _) = match plan {
        Some(plan) => {
            let Subsets { train, valid, test } = split_dataset(files, plan);
            (Arc::new(train), shared(valid), shared(test))
        }
        None => (files.train, None, None),
    };
    match own_valid.or(valid) {
        Some(valid) => Datasets { train, valid, test: own_test.or(test).map(TestSet::Open) },
        None => unreachable!("a job without validation files has a plan with a validation set"),
    }
}

fn split_dataset(TrainFiles { train, others }: TrainFiles, plan: SplitPlan) -> Subsets {
    let (sets, plan) = (plan.settings.sets(), Arc::new(plan));
    let subset = |set, dataset: &Arc<dyn Dataset>, reader: Option<Arc<dyn Dataset>>| {
        let counted = if reader.is_some() { CountedMemory::Reader } else { CountedMemory::Part };
        Subset { dataset: reader.unwrap_or_else(|| dataset.clone()), plan: plan.clone(), set, counted }
    };
    let other = |set| sets.contains(&set).then(|| subset(set, &others, others.sequential_reader()));
    let (valid, test) = (other(DatasetSplit::Valid), other(DatasetSplit::Test));
    // If the validation set has a reader of its own, the training set counts all of this one.
    let shares = valid.as_ref().is_some_and(|valid| valid.counted == CountedMemory::Part);
    let mut train = subset(DatasetSplit::Train, &train, None);
    if !shares {
        train.counted = CountedMemory::All;
    }
    Subsets { train, valid, test }
}

/// Splits `dataset` into (train, valid), `fraction` of the samples for validation; at least one in each subset.
pub fn random_split(
    dataset: Arc<dyn Dataset>,
    fraction: f64,
    seed: u64,
) -> Result<(Subset, Subset), DataError> {
    let plan = SplitPlan::random(dataset.len(), fraction, seed)?;
    match split_dataset(TrainFiles { train: dataset.clone(), others: dataset }, plan) {
        Subsets { train, valid: Some(valid), .. } => Ok((train, valid)),
        Subsets { valid: None, .. } => unreachable!("the plan has a validation set"),
    }
}

impl Subset {
    /// One set of a dataset that nothing else uses.
    pub fn alone(dataset: Arc<dyn Dataset>, plan: SplitPlan, set: DatasetSplit) -> Self {
        Self { dataset, plan: Arc::new(plan), set, counted: CountedMemory::All }
    }

    /// Index of sample `i` in the whole dataset.
    pub(super) fn dataset_index(&self, i: u64) -> u64 {
        self.plan.index(self.set, i)
    }

    /// Number of samples of this subset below `index` of the whole dataset.
    pub fn count_before(&self, index: u64) -> u64 {
        self.plan.count_before(self.set, index)
    }
}

impl Dataset for Subset {
    fn len(&self) -> u64 {
        self.plan.count(self.set)
    }

    fn features(&self) -> &Features {
        self.dataset.features()
    }

    fn read(&self, index: u64, key: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        self.dataset.read(self.dataset_index(index), key, into)
    }

    fn resident_bytes(&self) -> u64 {
        let (dataset, plan) = (self.dataset.resident_bytes(), self.plan.resident_bytes());
        let part = |set| {
            (dataset as u128 * self.plan.count(set) as u128 / self.plan.samples().max(1) as u128) as u64
        };
        match (self.counted, self.set) {
            (CountedMemory::All, _) => dataset + plan,
            (CountedMemory::Reader, _) => dataset,
            (CountedMemory::Part, DatasetSplit::Train) => dataset - part(DatasetSplit::Valid) + plan,
            (CountedMemory::Part, set) => part(set),
        }
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

    fn unseen_categories(&self) -> Vec<(String, u64)> {
        self.dataset.unseen_categories()
    }

    fn describe(&self) -> Vec<(String, String)> {
        [self.dataset.describe(), self.plan.describe()].concat()
    }
}
