//! Splits a dataset into a training, a validation and a test set: at random, by class, by group or by position.
//!
//! A [`SplitPlan`] maps samples to sets. It depends on the number of samples, their classes or groups and the seed, so
//! that it is the same on every machine and after every resume. The test set is drawn first and independently of the
//! validation set: all folds share it. All sets keep the order of the dataset: one that is read sequentially stays
//! cheap to read.
//!
//! A split at random or by position is computed on the fly ([`division`]) and takes no memory. By class or by group it
//! takes a pass over the keys of the samples ([`keys`]) and two bits per sample ([`membership`]).

mod division;
mod keys;
mod membership;
mod quotas;
mod subset;

use serde::{Deserialize, Serialize};

use self::division::Division;
use self::membership::Membership;
use super::warnings::WARNING;
use super::{DataError, DatasetContext};
use crate::base::random::{RngKey, stream_id};

pub use keys::{KeyFile, SplitKeys, key_of};
pub use subset::{Subset, TrainFiles, job_datasets, random_split};

/// A set of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetSplit {
    Train,
    Valid,
    Test,
}

impl DatasetSplit {
    pub const ALL: [Self; 3] = [Self::Train, Self::Valid, Self::Test];

    /// For messages.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Train => "training set",
            Self::Valid => "validation set",
            Self::Test => "test set",
        }
    }
}

/// One of several folds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldIndex {
    /// From 0.
    pub index: u64,
    /// At least 2.
    pub folds: u64,
}

impl FoldIndex {
    /// The fold of `samples` samples if the folds are consecutive.
    pub fn consecutive(self, samples: u64) -> std::ops::Range<u64> {
        let start = |fold: u64| (samples as u128 * fold as u128 / self.folds as u128) as u64;
        start(self.index)..start(self.index + 1)
    }
}

/// How the samples of the training files are split.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitSettings {
    /// Fraction of the samples for testing; 0 for no test set.
    pub test_fraction: f64,
    pub valid: ValidSet,
    pub method: SplitMethod,
}

/// Which samples of the training files are for validation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValidSet {
    /// None: validation has its own files.
    OwnFiles,
    /// This fraction.
    Fraction(f64),
    /// This fold of those that are not for testing.
    Fold(FoldIndex),
}

/// How samples are assigned to sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SplitMethod {
    Random,
    /// At random, with the same fraction of each class in every set.
    Stratified,
    /// Samples with the same value of this column or field stay together.
    Grouped(String),
    /// The last samples are for testing, those before them for validation; folds are consecutive.
    Last,
}

impl SplitSettings {
    /// `fraction` of the samples at random for validation, no test set.
    pub fn random(fraction: f64) -> Self {
        let (valid, method) = (ValidSet::Fraction(fraction), SplitMethod::Random);
        Self { test_fraction: 0.0, valid, method }
    }

    /// All samples are for training.
    pub fn is_whole(&self) -> bool {
        self.test_fraction == 0.0 && self.valid == ValidSet::OwnFiles
    }

    /// Whether a plan needs the class or the group of each sample.
    pub fn needs_keys(&self) -> bool {
        !self.is_whole() && matches!(self.method, SplitMethod::Stratified | SplitMethod::Grouped(_))
    }

    /// The sets that the samples are split into.
    pub fn sets(&self) -> Vec<DatasetSplit> {
        let test = (self.test_fraction > 0.0).then_some(DatasetSplit::Test);
        let valid = (self.valid != ValidSet::OwnFiles).then_some(DatasetSplit::Valid);
        [DatasetSplit::Train].into_iter().chain(valid).chain(test).collect()
    }

    /// The least number of samples, or of groups: one for each set, and for each fold.
    fn least(&self) -> u64 {
        let test = u64::from(self.test_fraction > 0.0);
        test + match self.valid {
            ValidSet::OwnFiles => 1,
            ValidSet::Fraction(_) => 2,
            ValidSet::Fold(fold) => fold.folds,
        }
    }

    /// Samples that the test and the validation set should have; with folds, the validation set has what the fold has.
    fn sizes(&self, samples: u64) -> SetSizes {
        let part = |fraction: f64| (samples as f64 * fraction).round() as u64;
        let others = self.least() - u64::from(self.test_fraction > 0.0);
        let test = match self.test_fraction > 0.0 {
            true => part(self.test_fraction).clamp(1, samples.saturating_sub(others).max(1)),
            false => 0,
        };
        let valid = match self.valid {
            ValidSet::OwnFiles => 0,
            ValidSet::Fraction(fraction) => {
                part(fraction).clamp(1, (samples - test).saturating_sub(1).max(1))
            }
            ValidSet::Fold(fold) => (samples - test) / fold.folds,
        };
        SetSizes { test, valid }
    }

    /// Assigns samples to sets of these sizes by their position.
    fn position_split(&self, samples: u64, sizes: SetSizes, draw: FoldDraw) -> PositionSplit {
        let (rest, is_last) = (samples - sizes.test, self.method == SplitMethod::Last);
        PositionSplit {
            test: match is_last {
                true => Division::last(samples, sizes.test),
                false => Division::random(samples, sizes.test, draw.test),
            },
            valid: match self.valid {
                ValidSet::OwnFiles => Division::none(rest),
                ValidSet::Fraction(_) if is_last => Division::last(rest, sizes.valid),
                ValidSet::Fraction(_) => Division::random(rest, sizes.valid, draw.valid),
                ValidSet::Fold(fold) if is_last => Division::consecutive_fold(rest, fold),
                ValidSet::Fold(fold) => Division::fold(rest, fold, draw.first_larger, draw.valid),
            },
        }
    }

    fn describe(&self) -> String {
        let how = match &self.method {
            SplitMethod::Random => "random".to_owned(),
            SplitMethod::Stratified => "stratified by class".to_owned(),
            SplitMethod::Grouped(by) => format!("grouped by `{by}`"),
            SplitMethod::Last => "by position".to_owned(),
        };
        let valid = match self.valid {
            ValidSet::OwnFiles => String::new(),
            ValidSet::Fraction(fraction) => format!(", {} for validation", percent(fraction)),
            ValidSet::Fold(FoldIndex { index, folds }) => {
                format!(", fold {} of {folds} for validation", index + 1)
            }
        };
        let test = match self.test_fraction > 0.0 {
            true => format!(", {} for testing", percent(self.test_fraction)),
            false => String::new(),
        };
        how + &valid + &test
    }
}

fn percent(fraction: f64) -> String {
    format!("{} %", (fraction * 10_000.0).round() / 100.0)
}

/// Numbers of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SetSizes {
    test: u64,
    valid: u64,
}

/// The randomness of a split by position.
#[derive(Clone, Copy, Debug)]
struct FoldDraw {
    test: RngKey,
    valid: RngKey,
    /// The first of the folds that have one sample more.
    first_larger: u64,
}

impl FoldDraw {
    fn new(seed: u64) -> Self {
        const VALID: u64 = stream_id("data.split");
        const TEST: u64 = stream_id("data.split.test");
        Self { test: RngKey::new(seed, TEST), valid: RngKey::new(seed, VALID), first_larger: 0 }
    }

    /// The randomness of one class.
    fn of_class(self, key: u64, first_larger: u64) -> Self {
        Self { test: self.test.fold_in(key), valid: self.valid.fold_in(key), first_larger }
    }
}

/// Assigns samples to sets by their position.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PositionSplit {
    test: Division,
    /// Of those that are not for testing.
    valid: Division,
}

impl PositionSplit {
    fn set_of(&self, index: u64) -> DatasetSplit {
        if self.test.is_selected(index) {
            return DatasetSplit::Test;
        }
        match self.valid.is_selected(index - self.test.selected_before(index)) {
            true => DatasetSplit::Valid,
            false => DatasetSplit::Train,
        }
    }

    fn count_before(&self, set: DatasetSplit, index: u64) -> u64 {
        let test = self.test.selected_before(index);
        let valid = self.valid.selected_before(index - test);
        match set {
            DatasetSplit::Train => index - test - valid,
            DatasetSplit::Valid => valid,
            DatasetSplit::Test => test,
        }
    }

    fn index(&self, set: DatasetSplit, i: u64) -> u64 {
        match set {
            DatasetSplit::Train => self.test.rest_index(self.valid.rest_index(i)),
            DatasetSplit::Valid => self.test.rest_index(self.valid.selected_index(i)),
            DatasetSplit::Test => self.test.selected_index(i),
        }
    }
}

/// The set of each sample, available before the dataset exists: for statistics over the training set only.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitPlan {
    samples: u64,
    assignment: SplitAssignment,
    settings: SplitSettings,
    seed: u64,
    warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum SplitAssignment {
    Position(PositionSplit),
    Table(Membership),
}

impl SplitPlan {
    /// Splits `samples` samples; `keys` are their classes or groups, if the settings need them. Every set has at least
    /// one sample.
    pub fn new(
        samples: u64,
        settings: &SplitSettings,
        keys: Option<&dyn SplitKeys>,
        ctx: &DatasetContext,
    ) -> Result<Self, DataError> {
        let least = settings.least();
        if samples < least {
            let why = match settings.valid {
                ValidSet::Fold(FoldIndex { folds, .. }) => {
                    let test = if settings.test_fraction > 0.0 { " and the test set" } else { "" };
                    format!("it has {samples}, and each of {folds} folds{test} needs at least one")
                }
                _ if settings.test_fraction > 0.0 => {
                    format!("it has {samples}, and each of {least} sets needs at least one")
                }
                _ => format!(
                    "it has {samples}, and both the training and the validation set need at least one"
                ),
            };
            return Err(DataError::TooSmall { set: "the dataset".into(), why });
        }
        let draw = FoldDraw::new(ctx.seed);
        let (assignment, warnings) = match (&settings.method, keys) {
            (SplitMethod::Random | SplitMethod::Last, _) => {
                let split = settings.position_split(samples, settings.sizes(samples), draw);
                (SplitAssignment::Position(split), Vec::new())
            }
            (SplitMethod::Stratified, Some(keys)) => {
                let (table, warnings) = quotas::stratified(samples, settings, keys, draw, ctx)?;
                (SplitAssignment::Table(table), warnings)
            }
            (SplitMethod::Grouped(by), Some(keys)) => {
                let (table, warnings) = quotas::grouped(samples, settings, by, keys, draw, ctx)?;
                (SplitAssignment::Table(table), warnings)
            }
            (SplitMethod::Stratified | SplitMethod::Grouped(_), None) => {
                let expected = "the target is not a class";
                return Err(DataError::InvalidSetting {
                    name: "split",
                    value: "stratified".into(),
                    expected,
                });
            }
        };
        Ok(Self { samples, assignment, settings: settings.clone(), seed: ctx.seed, warnings })
    }

    /// `fraction` of the samples at random for validation, no test set.
    pub fn random(samples: u64, fraction: f64, seed: u64) -> Result<Self, DataError> {
        let ctx = DatasetContext { seed, ..DatasetContext::default() };
        Self::new(samples, &SplitSettings::random(fraction), None, &ctx)
    }

    /// Number of samples that are split.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Number of samples of a set.
    pub fn count(&self, set: DatasetSplit) -> u64 {
        self.count_before(set, self.samples)
    }

    pub fn set_of(&self, index: u64) -> DatasetSplit {
        match &self.assignment {
            SplitAssignment::Position(split) => split.set_of(index),
            SplitAssignment::Table(table) => table.set_of(index),
        }
    }

    /// Whether sample `index` of the dataset is in the training set.
    pub fn is_train(&self, index: u64) -> bool {
        self.set_of(index) == DatasetSplit::Train
    }

    /// Number of samples of `set` below `index`.
    pub fn count_before(&self, set: DatasetSplit, index: u64) -> u64 {
        match &self.assignment {
            SplitAssignment::Position(split) => split.count_before(set, index),
            SplitAssignment::Table(table) => table.count_before(set, index),
        }
    }

    /// Index in the dataset of sample `i` of a set.
    pub fn index(&self, set: DatasetSplit, i: u64) -> u64 {
        match &self.assignment {
            SplitAssignment::Position(split) => split.index(set, i),
            SplitAssignment::Table(table) => table.index(set, i),
        }
    }

    /// Bytes of memory that the plan takes.
    pub fn resident_bytes(&self) -> u64 {
        match &self.assignment {
            SplitAssignment::Position(_) => 0,
            SplitAssignment::Table(table) => table.resident_bytes(),
        }
    }

    /// What distinguishes it from other splits of the same files, for cache keys.
    pub fn cache_settings(&self) -> String {
        format!("{} {:?} {}", self.samples, self.settings, self.seed)
    }

    /// Lines of [`Dataset::describe`](super::Dataset::describe); a plain fraction for validation needs none.
    fn describe(&self) -> Vec<(String, String)> {
        let is_plain = self.settings.method == SplitMethod::Random
            && self.settings.test_fraction == 0.0
            && !matches!(self.settings.valid, ValidSet::Fold(_));
        let line = (!is_plain).then(|| ("split".to_owned(), self.settings.describe()));
        let warnings = self.warnings.iter().map(|text| (WARNING.to_owned(), text.clone()));
        line.into_iter().chain(warnings).collect()
    }
}

#[cfg(test)]
mod tests;
