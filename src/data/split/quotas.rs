//! Splits by class and by group: counts the samples of each key in a pass, decides what each set gets of them, and
//! assigns the samples in a second pass.

use std::collections::HashMap;
use std::path::Path;

use super::keys::SplitKeys;
use super::membership::Membership;
use super::{DatasetSplit, FoldDraw, PositionSplit, SetSizes, SplitSettings, ValidSet};
use crate::{DataError, DatasetContext};

/// Bytes that a key takes during the passes, with the empty slots of its table.
const KEY_BYTES: u64 = 2 * (size_of::<Stratum>() + size_of::<KeyCount>() + size_of::<u64>()) as u64;

/// A class or a group.
#[derive(Clone, Copy, Debug)]
struct KeyCount {
    key: u64,
    samples: u64,
    /// Its first sample.
    first: u64,
}

/// A class and how many of its samples have been assigned.
struct Stratum {
    split: PositionSplit,
    assigned: u64,
}

/// The distinct keys in ascending order. Takes memory for each of them, which must fit the budget.
fn count_keys(keys: &dyn SplitKeys, ctx: &DatasetContext) -> Result<Vec<KeyCount>, DataError> {
    // Lookup only: the result is sorted, so nothing depends on hash order.
    let mut counts: HashMap<u64, KeyCount> = HashMap::new();
    let mut index = 0;
    keys.for_each(&mut |key| {
        counts.entry(key).or_insert(KeyCount { key, samples: 0, first: index }).samples += 1;
        if counts.len() == counts.capacity() {
            ctx.check_memory(Path::new("data.split"), 2 * counts.len() as u64 * KEY_BYTES)?;
        }
        index += 1;
        Ok(())
    })?;
    let mut counts: Vec<KeyCount> = counts.into_values().collect();
    counts.sort_unstable_by_key(|count| count.key);
    Ok(counts)
}

/// Assigns each sample to the set that `set_of` chooses for its key.
fn assign(
    samples: u64,
    keys: &dyn SplitKeys,
    ctx: &DatasetContext,
    mut set_of: impl FnMut(u64) -> Option<DatasetSplit>,
) -> Result<Membership, DataError> {
    ctx.check_memory(Path::new("data.split"), Membership::table_bytes(samples))?;
    let mut table = Membership::with_capacity(samples);
    let changed = |found: String| DataError::ChangedSinceOpen { what: "the dataset".into(), found };
    keys.for_each(&mut |key| {
        let set =
            set_of(key).ok_or_else(|| changed("it has a class or group that it did not have".into()))?;
        table.push(set);
        Ok(())
    })?;
    match table.samples() == samples {
        true => Ok(table),
        false => Err(changed(format!("it had {samples} samples and has {}", table.samples()))),
    }
}

/// The same fraction of each class in every set, to within one sample.
pub fn stratified(
    samples: u64,
    settings: &SplitSettings,
    keys: &dyn SplitKeys,
    draw: FoldDraw,
    ctx: &DatasetContext,
) -> Result<(Membership, Vec<String>), DataError> {
    let counts = count_keys(keys, ctx)?;
    let sizes = settings.sizes(samples);
    let test = quotas(&counts, settings.test_fraction, sizes.test, &vec![0; counts.len()]);
    let valid = match settings.valid {
        ValidSet::Fraction(fraction) => quotas(&counts, fraction, sizes.valid, &test),
        ValidSet::OwnFiles | ValidSet::Fold(_) => vec![0; counts.len()],
    };
    let (mut strata, mut larger): (HashMap<u64, Stratum>, u64) = (HashMap::new(), 0);
    // Samples of each class in each set, to warn of what is missing.
    let mut found: Vec<[u64; 3]> = Vec::new();
    for (i, count) in counts.iter().enumerate() {
        let sizes = SetSizes { test: test[i], valid: valid[i] };
        let split = settings.position_split(count.samples, sizes, draw.of_class(count.key, larger));
        if let ValidSet::Fold(fold) = settings.valid {
            // The remainders of the classes fill the folds in turn, so that these differ by at most one sample too.
            larger = (larger + (count.samples - test[i]) % fold.folds) % fold.folds;
        }
        found.push(DatasetSplit::ALL.map(|set| split.count_before(set, count.samples)));
        strata.insert(count.key, Stratum { split, assigned: 0 });
    }
    let table = assign(samples, keys, ctx, |key| {
        let stratum =
            strata.get_mut(&key).filter(|stratum| stratum.assigned < stratum.split.test.samples())?;
        stratum.assigned += 1;
        Some(stratum.split.set_of(stratum.assigned - 1))
    })?;
    let mut warnings = Vec::new();
    for set in settings.sets() {
        let mut missing = counts.iter().zip(&found).filter(|(_, found)| found[set as usize] == 0);
        if let Some((first, _)) = missing.next() {
            let name = keys.name(first.key, first.first);
            let more = match missing.count() {
                0 => String::new(),
                n => format!(", nor of {n} other classes"),
            };
            warnings.push(format!(
                "the {} has no sample of class {name}, which has {} in all{more}",
                set.describe(),
                first.samples
            ));
        }
    }
    Ok((table, warnings))
}

/// Largest remainder method: `fraction` of each class, rounded down, and one more for the classes that lose most by
/// that, up to `total`. One sample of each class stays for training; `taken` are already assigned.
fn quotas(counts: &[KeyCount], fraction: f64, total: u64, taken: &[u64]) -> Vec<u64> {
    if total == 0 {
        return vec![0; counts.len()];
    }
    let exact = |i: usize| counts[i].samples as f64 * fraction;
    let most = |i: usize| (counts[i].samples - taken[i]).saturating_sub(1);
    let mut quotas: Vec<u64> = (0..counts.len()).map(|i| (exact(i) as u64).min(most(i))).collect();
    let mut order: Vec<usize> = (0..counts.len()).collect();
    // A stable sort: ties keep the order of the keys.
    order.sort_by(|a, b| exact(*b).fract().total_cmp(&exact(*a).fract()));
    let mut missing = total.saturating_sub(quotas.iter().sum());
    for i in order {
        if missing > 0 && quotas[i] < most(i) && exact(i).fract() > 0.0 {
            (quotas[i], missing) = (quotas[i] + 1, missing - 1);
        }
    }
    quotas
}

/// All samples of a group in one set. The test and the validation set take groups in random order as long as they fit;
/// folds take the largest group first, each into the smallest fold, as scikit-learn's `GroupKFold`.
pub fn grouped(
    samples: u64,
    settings: &SplitSettings,
    by: &str,
    keys: &dyn SplitKeys,
    draw: FoldDraw,
    ctx: &DatasetContext,
) -> Result<(Membership, Vec<String>), DataError> {
    let mut left = count_keys(keys, ctx)?;
    let (groups, least) = (left.len() as u64, settings.least());
    if groups < least {
        let unit = if matches!(settings.valid, ValidSet::Fold(_)) { "folds" } else { "sets" };
        let why = format!("`{by}` has {groups} different values, and {least} {unit} need one each");
        return Err(DataError::TooSmall { set: "the dataset".into(), why });
    }
    let largest = left.iter().max_by_key(|group| (group.samples, std::cmp::Reverse(group.first))).copied();
    left.sort_by_key(|group| (draw.test.fold_in(group.key).bits(0), group.key));
    let sizes = settings.sizes(samples);
    let mut sets: HashMap<u64, DatasetSplit> = left.iter().map(|g| (g.key, DatasetSplit::Train)).collect();
    let mut put = |groups: Vec<KeyCount>, set| sets.extend(groups.iter().map(|group| (group.key, set)));
    if settings.test_fraction > 0.0 {
        put(take(&mut left, sizes.test, least - 1), DatasetSplit::Test);
    }
    left.sort_by_key(|group| (draw.valid.fold_in(group.key).bits(0), group.key));
    match settings.valid {
        ValidSet::OwnFiles => {}
        ValidSet::Fraction(_) => put(take(&mut left, sizes.valid, 1), DatasetSplit::Valid),
        ValidSet::Fold(fold) => {
            // A stable sort: groups of the same size keep their random order.
            left.sort_by_key(|group| std::cmp::Reverse(group.samples));
            let mut folds = vec![0; fold.folds as usize];
            let mut own = Vec::new();
            for group in left {
                let smallest = (0..folds.len()).min_by_key(|i| folds[*i]).unwrap_or(0);
                folds[smallest] += group.samples;
                if smallest as u64 == fold.index {
                    own.push(group);
                }
            }
            put(own, DatasetSplit::Valid);
        }
    }
    let table = assign(samples, keys, ctx, |key| sets.get(&key).copied())?;
    let mut warnings = Vec::new();
    for (set, wanted) in [(DatasetSplit::Valid, sizes.valid), (DatasetSplit::Test, sizes.test)] {
        if let Some(group) = largest.filter(|group| wanted > 0 && group.samples > wanted) {
            let name = keys.name(group.key, group.first);
            warnings.push(format!(
                "the largest group of `{by}`, {name}, has {} of {samples} samples, more than the {wanted} that the {} \
                 should have: it has {}",
                group.samples,
                set.describe(),
                table.count_before(set, samples),
            ));
        }
    }
    Ok((table, warnings))
}

/// Removes groups of at most `wanted` samples together, but at least one group, the smallest; leaves at least `keep`.
fn take(groups: &mut Vec<KeyCount>, wanted: u64, keep: u64) -> Vec<KeyCount> {
    let (mut taken, mut samples, mut left) = (Vec::new(), 0, groups.len() as u64);
    groups.retain(|group| {
        let fits = samples + group.samples <= wanted && left > keep;
        if fits {
            taken.push(*group);
            (samples, left) = (samples + group.samples, left - 1);
        }
        !fits
    });
    if taken.is_empty()
        && let Some(smallest) = (0..groups.len()).min_by_key(|i| groups[*i].samples)
    {
        taken.push(groups.remove(smallest));
    }
    taken
}
