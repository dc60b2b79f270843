//! Properties of splits: they partition the samples, have the requested sizes, keep classes and groups, and depend on
//! nothing but the samples and the seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::Dataset;
use crate::shapes::ShapesDataset;

/// Keys in memory.
struct Keys(Vec<u64>);

impl SplitKeys for Keys {
    fn for_each(&self, visit: &mut dyn FnMut(u64) -> Result<(), DataError>) -> Result<(), DataError> {
        self.0.iter().try_for_each(|key| visit(*key))
    }

    fn name(&self, key: u64, first: u64) -> String {
        format!("{key} of {first}")
    }
}

fn context(seed: u64) -> DatasetContext {
    DatasetContext { seed, ..DatasetContext::default() }
}

fn plan(keys: &[u64], settings: &SplitSettings, seed: u64) -> Result<SplitPlan, DataError> {
    let keys = Keys(keys.to_vec());
    SplitPlan::new(keys.0.len() as u64, settings, Some(&keys), &context(seed))
}

fn sets(plan: &SplitPlan) -> Vec<DatasetSplit> {
    (0..plan.samples()).map(|index| plan.set_of(index)).collect()
}

fn method(i: usize) -> SplitMethod {
    [SplitMethod::Random, SplitMethod::Stratified, SplitMethod::Grouped("g".into()), SplitMethod::Last][i]
        .clone()
}

fn folds(number: u64, folds: u64, test_fraction: f64, method: SplitMethod) -> SplitSettings {
    SplitSettings { test_fraction, valid: ValidSet::Fold(FoldIndex { index: number, folds }), method }
}

/// (samples of class, samples of class in set) by class.
fn class_counts(keys: &[u64], plan: &SplitPlan, set: DatasetSplit) -> BTreeMap<u64, (u64, u64)> {
    let mut counts = BTreeMap::new();
    for (index, key) in keys.iter().enumerate() {
        let count: &mut (u64, u64) = counts.entry(*key).or_default();
        count.0 += 1;
        count.1 += u64::from(plan.set_of(index as u64) == set);
    }
    counts
}

/// Random keys: a few classes of very different sizes, in any order.
fn keys() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec((0u64..8, 0u64..3), 30..300)
        .prop_map(|drawn| drawn.into_iter().map(|(key, power)| key >> power).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Every method: each sample is in one set, in order, no set is empty, and ranks and indices agree.
    #[test]
    fn the_sets_partition_the_dataset(
        keys in keys(), i in 0usize..4, valid in 0.01..0.6f64, test in 0.0..0.39f64, has_test: bool, seed: u64,
    ) {
        let test_fraction = if has_test { test } else { 0.0 };
        let settings =
            SplitSettings { test_fraction, valid: ValidSet::Fraction(valid), method: method(i) };
        let groups = keys.iter().collect::<BTreeSet<_>>().len() as u64;
        prop_assume!(i != 2 || groups >= settings.least());
        let plan = plan(&keys, &settings, seed).unwrap();
        let of = sets(&plan);
        for set in DatasetSplit::ALL {
            let indices: Vec<u64> = (0..of.len() as u64).filter(|i| of[*i as usize] == set).collect();
            prop_assert_eq!(plan.count(set), indices.len() as u64);
            prop_assert_eq!(!indices.is_empty(), settings.sets().contains(&set), "{:?}", set);
            for (i, index) in indices.iter().enumerate() {
                prop_assert_eq!(plan.index(set, i as u64), *index);
                prop_assert_eq!(plan.count_before(set, *index), i as u64);
            }
        }
        if i != 2 {
            let wanted = |f: f64| (keys.len() as f64 * f).round() as i64;
            let lost = |set, f| (plan.count(set) as i64 - wanted(f).max(1)).abs();
            // By class, a class keeps its last sample for training.
            let slack = if i == 1 { groups as i64 } else { 0 };
            prop_assert!(lost(DatasetSplit::Valid, valid) <= slack, "{}", plan.count(DatasetSplit::Valid));
            prop_assert!(test_fraction == 0.0 || lost(DatasetSplit::Test, test) <= slack);
        }
    }

    /// Every method: each sample is in the validation set of exactly one fold, or in the test set of all.
    #[test]
    fn folds_partition_the_dataset(
        keys in keys(), i in 0usize..4, n in 2u64..6, test in 0.05..0.5f64, has_test: bool, seed: u64,
    ) {
        let test_fraction = if has_test { test } else { 0.0 };
        let settings = |number| folds(number, n, test_fraction, method(i));
        let groups = keys.iter().collect::<BTreeSet<_>>().len() as u64;
        prop_assume!(i != 2 || groups >= settings(0).least());
        let plans: Vec<SplitPlan> = (0..n).map(|number| plan(&keys, &settings(number), seed).unwrap()).collect();
        for index in 0..keys.len() as u64 {
            let of: Vec<DatasetSplit> = plans.iter().map(|plan| plan.set_of(index)).collect();
            let validates = of.iter().filter(|set| **set == DatasetSplit::Valid).count();
            let tests = of.iter().filter(|set| **set == DatasetSplit::Test).count();
            prop_assert!((validates, tests) == (1, 0) || (validates, tests) == (0, n as usize), "{:?}", of);
        }
        let sizes: Vec<u64> = plans.iter().map(|plan| plan.count(DatasetSplit::Valid)).collect();
        let (most, least) = (sizes.iter().max().unwrap(), sizes.iter().min().unwrap());
        prop_assert!(*least > 0);
        prop_assert!(i == 2 || most - least <= 1, "{:?}", sizes);
    }

    /// Each class has its fraction of every set to within one sample, and its folds differ by at most one sample.
    #[test]
    fn classes_are_split_evenly(keys in keys(), valid in 0.05..0.5f64, n in 2u64..6, seed: u64) {
        let settings = SplitSettings { method: SplitMethod::Stratified, ..SplitSettings::random(valid) };
        let fraction = plan(&keys, &settings, seed).unwrap();
        for (class, (all, found)) in class_counts(&keys, &fraction, DatasetSplit::Valid) {
            prop_assert!((found as f64 - all as f64 * valid).abs() < 1.0, "class {}: {} of {}", class, found, all);
            prop_assert!(found < all, "class {} is in the training set", class);
        }
        let counts: Vec<BTreeMap<u64, (u64, u64)>> = (0..n)
            .map(|number| plan(&keys, &folds(number, n, 0.0, SplitMethod::Stratified), seed).unwrap())
            .map(|plan| class_counts(&keys, &plan, DatasetSplit::Valid))
            .collect();
        for class in keys.iter().collect::<BTreeSet<_>>() {
            let found = counts.iter().map(|counts| counts[class].1);
            prop_assert!(found.clone().max().unwrap() - found.min().unwrap() <= 1);
        }
    }

    /// No group is in two sets.
    #[test]
    fn groups_stay_together(keys in keys(), valid in 0.05..0.5f64, test in 0.05..0.4f64, seed: u64) {
        let method = SplitMethod::Grouped("g".into());
        let settings = SplitSettings { test_fraction: test, valid: ValidSet::Fraction(valid), method };
        prop_assume!(keys.iter().collect::<BTreeSet<_>>().len() >= 3);
        let plan = plan(&keys, &settings, seed).unwrap();
        for set in DatasetSplit::ALL {
            for (group, (all, found)) in class_counts(&keys, &plan, set) {
                prop_assert!(found == 0 || found == all, "group {}: {} of {}", group, found, all);
            }
        }
    }
}

/// What `StratifiedKFold(n).split` of scikit-learn 1.9.1 gives for these classes: every fold has this many of each
/// class.
/// ```python
/// y = np.array([0] * 50 + [1] * 31 + [2] * 7 + [3] * 3)
/// [np.bincount(y[test], minlength=4).tolist() for _, test in StratifiedKFold(5).split(y, y)]
/// ```
#[test]
fn folds_have_the_class_counts_of_scikit_learn() {
    let keys: Vec<u64> = [(0, 50), (1, 31), (2, 7), (3, 3)]
        .into_iter()
        .flat_map(|(class, n)| std::iter::repeat_n(class, n))
        .collect();
    let sklearn = [[10, 7, 1, 1], [10, 6, 2, 0], [10, 6, 2, 0], [10, 6, 1, 1], [10, 6, 1, 1]];
    let counts = |number| {
        let plan = plan(&keys, &folds(number, 5, 0.0, SplitMethod::Stratified), 7).unwrap();
        class_counts(&keys, &plan, DatasetSplit::Valid)
            .into_values()
            .map(|(_, found)| found)
            .collect::<Vec<_>>()
    };
    let ours: Vec<Vec<u64>> = (0..5).map(counts).collect();
    // The same counts, whichever fold has them.
    for class in 0..4 {
        let sorted = |folds: &[Vec<u64>]| {
            let mut counts: Vec<u64> = folds.iter().map(|fold| fold[class]).collect();
            counts.sort_unstable();
            counts
        };
        assert_eq!(sorted(&ours), sorted(&sklearn.map(|fold| fold.to_vec())));
    }
    for fold in ours {
        assert!((18..=19).contains(&fold.iter().sum::<u64>()), "{fold:?}");
    }
}

#[test]
fn the_seed_decides_and_huge_sets_cost_nothing() {
    let valid = |seed| {
        let plan = SplitPlan::random(1000, 0.1, seed).unwrap();
        (0..100).map(|i| plan.index(DatasetSplit::Valid, i)).collect::<Vec<_>>()
    };
    assert_eq!(valid(1), valid(1));
    assert_ne!(valid(1), valid(2));
    // As every version has split: resumed runs depend on it.
    assert_eq!(valid(1)[..5], [5, 17, 24, 32, 49]);
    let plan = SplitPlan::random(1 << 60, 0.01, 3).unwrap();
    assert_eq!(plan.count(DatasetSplit::Train) + plan.count(DatasetSplit::Valid), 1 << 60);
    assert!(plan.index(DatasetSplit::Train, plan.count(DatasetSplit::Train) - 1) < 1 << 60);
    assert_eq!(plan.resident_bytes(), 0);
    let keys: Vec<u64> = (0..900).map(|i| i % 9).collect();
    for i in 0..4 {
        let of = |seed| sets(&super::tests::plan(&keys, &folds(1, 3, 0.2, method(i)), seed).unwrap());
        assert_eq!(of(5), of(5));
        assert_eq!(of(5) == of(6), i == 3, "{i}");
    }
}

#[test]
fn a_random_split_is_two_datasets() {
    let dataset = Arc::new(ShapesDataset::new(16, 100, 1, DatasetSplit::Train).unwrap());
    let (train, valid) = random_split(dataset, 0.25, 3).unwrap();
    assert_eq!((train.len(), valid.len()), (75, 25));
    assert_eq!(train.count_before(100) + valid.count_before(100), 100);
    assert!(valid.dataset_index(24) < 100);
}

#[test]
fn what_cannot_be_split_is_refused() {
    let error = |keys: &[u64], settings: &SplitSettings| plan(keys, settings, 1).unwrap_err().to_string();
    let group =
        |valid| SplitSettings { test_fraction: 0.2, valid, method: SplitMethod::Grouped("who".into()) };
    assert!(error(&[1], &SplitSettings::random(0.5)).contains("both the training and the validation set"));
    let found = error(&[1, 1, 2, 2], &group(ValidSet::Fraction(0.2)));
    assert!(found.contains("`who` has 2 different values, and 3 sets need one each"), "{found}");
    let found = error(&[1, 2, 3], &folds(0, 5, 0.0, SplitMethod::Random));
    assert!(found.contains("it has 3, and each of 5 folds needs at least one"), "{found}");
    let settings = SplitSettings { method: SplitMethod::Stratified, ..SplitSettings::random(0.5) };
    assert!(SplitPlan::new(9, &settings, None, &context(1)).is_err());
    let small = DatasetContext { max_bytes: 0, ..context(1) };
    let keys: Vec<u64> = (0..1000).collect();
    let refused =
        SplitPlan::new(1000, &group(ValidSet::Fraction(0.2)), Some(&Keys(keys)), &small).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
}

#[test]
fn small_classes_and_large_groups_are_reported() {
    let keys: Vec<u64> = (0..100).map(|i| u64::from(i >= 99)).collect();
    let settings = SplitSettings { method: SplitMethod::Stratified, ..SplitSettings::random(0.1) };
    let found = plan(&keys, &settings, 1).unwrap().describe();
    assert_eq!(found[0], ("split".into(), "stratified by class, 10 % for validation".into()));
    assert_eq!(found[1].1, "the validation set has no sample of class 1 of 99, which has 1 in all");
    let keys: Vec<u64> = (0..100).map(|i| if i < 60 { 7 } else { i }).collect();
    let settings = SplitSettings { method: SplitMethod::Grouped("who".into()), ..SplitSettings::random(0.2) };
    let plan = plan(&keys, &settings, 1).unwrap();
    assert_eq!(plan.count(DatasetSplit::Valid), 20);
    let found = plan.describe();
    assert!(
        found[1].1.contains("the largest group of `who`, 7 of 0, has 60 of 100 samples, more than the 20"),
        "{found:?}"
    );
}
