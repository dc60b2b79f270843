//! Warnings about data that may make a run pointless without being an error: a single class, imbalance, classes without
//! samples, identifiers among the inputs, samples in both sets.
//!
//! A dataset reports what it knows as lines of [`Dataset::describe`] named [`WARNING`]; comparing the two sets reads a
//! bounded number of samples.

use std::collections::HashSet;

use crate::base::units::counted;

use super::{BatchValues, DataError, Dataset, HostBatch, InputSpec, SampleKey, TargetSpec};

/// Name of a line of [`Dataset::describe`] that is a warning.
pub const WARNING: &str = "warning";

/// Samples of the most frequent class for each of the rarest, from which on classes count as imbalanced.
const MAX_IMBALANCE: u64 = 20;
/// Samples that are compared; the hashes of those of the validation set take 16 bytes each.
const MAX_VALID_COMPARED: u64 = 20_000;
const MAX_TRAIN_COMPARED: u64 = 100_000;

/// Everything about the two sets that a user should know before training.
pub fn warnings(train: &dyn Dataset, valid: &dyn Dataset, seed: u64) -> Vec<String> {
    let own = train.describe().into_iter().filter(|(name, _)| name == WARNING).map(|(_, text)| text);
    let mut found: Vec<String> = own.collect();
    let is_table = !train.input_names().is_empty();
    // A table reports its classes itself, because it counts those of the training rows only.
    if !is_table
        && let TargetSpec::Class { names } | TargetSpec::MixedClass { names } = &train.features().target
        && let Some(counts) = train.class_counts()
    {
        found.extend(class_warnings(names, &counts));
    }
    if is_table {
        found.extend(shared_samples(train, valid, seed));
    }
    found
}

/// A single class, classes without training samples, and imbalance.
pub fn class_warnings(names: &[String], counts: &[u64]) -> Vec<String> {
    let mut found = Vec::new();
    if let [only] = names {
        found.push(format!("`{only}` is the only class: there is nothing to learn"));
    }
    let unseen: Vec<&String> =
        names.iter().zip(counts).filter(|(_, count)| **count == 0).map(|(name, _)| name).collect();
    if let Some(first) = unseen.first() {
        let more = match unseen.len() {
            1 => String::new(),
            n => format!(", nor have {} other classes", n - 1),
        };
        found.push(format!(
            "class `{first}` has no training sample{more}: the model cannot learn to predict it"
        ));
    }
    let seen = || names.iter().zip(counts).filter(|(_, count)| **count > 0);
    let (rarest, most) = (seen().min_by_key(|(_, count)| **count), seen().max_by_key(|(_, count)| **count));
    if let (Some((rare, few)), Some((common, many))) = (rarest, most)
        && *many > MAX_IMBALANCE * few
    {
        found.push(format!(
            "class `{common}` has {} times as many training samples as `{rare}` ({many} and {few}): accuracy says \
             little",
            many / few
        ));
    }
    found
}

/// Rows that [`check_rows`] reads of each set.
const MAX_ROWS_CHECKED: u64 = 2_000_000;

/// Reads the rows of a table, so that a mistake in any of them is found before training. Returns how many are bad, or
/// the first one, unless bad records are skipped.
pub fn check_rows(set: &dyn Dataset, seed: u64, skip_bad: bool) -> Result<u64, DataError> {
    if set.input_names().is_empty() {
        return Ok(0);
    }
    let reader = set.sequential_reader();
    let set = reader.as_deref().unwrap_or(set);
    let mut bad = 0;
    for index in 0..set.len().min(MAX_ROWS_CHECKED) {
        match HostBatch::single(set, index, SampleKey { seed, epoch: 0, sample: index }) {
            Ok(_) => {}
            Err(error) if skip_bad && error.is_bad_record() => bad += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(bad)
}

/// Samples of the validation set that are training samples too, among the first of each.
fn shared_samples(train: &dyn Dataset, valid: &dyn Dataset, seed: u64) -> Option<String> {
    // Tokens overlap on purpose, and decoding images takes too long.
    let comparable = match &train.features().input {
        InputSpec::Floats { shape } => shape.len() == 1,
        InputSpec::Tabular { .. } => true,
        InputSpec::Tokens { .. } => false,
    };
    if !comparable {
        return None;
    }
    let compared = (valid.len().min(MAX_VALID_COMPARED), train.len().min(MAX_TRAIN_COMPARED));
    let mut hashes: HashSet<u64> = HashSet::with_capacity(compared.0 as usize);
    let mut samples = 0u64;
    for hash in (0..compared.0).filter_map(|index| sample_hash(valid, index, seed)) {
        samples += 1;
        hashes.insert(hash);
    }
    let mut shared: HashSet<u64> = HashSet::new();
    for hash in (0..compared.1).filter_map(|index| sample_hash(train, index, seed)) {
        if hashes.contains(&hash) {
            shared.insert(hash);
        }
    }
    (!shared.is_empty()).then(|| {
        format!(
            "{} of the first {samples} of the validation set {} among the first {} training rows: the validation \
             metric will look better than it is",
            counted(shared.len() as u64, "different row"),
            if shared.len() == 1 { "is" } else { "are" },
            compared.1
        )
    })
}

/// Hash of a sample and its target; `None` for a bad record.
fn sample_hash(set: &dyn Dataset, index: u64, seed: u64) -> Option<u64> {
    let batch = HostBatch::single(set, index, SampleKey { seed, epoch: 0, sample: index }).ok()?;
    let mut bytes = Vec::new();
    for values in [&batch.inputs, &batch.targets] {
        match values {
            BatchValues::U8(values, _) => bytes.extend_from_slice(values),
            BatchValues::F32(values) => bytes.extend_from_slice(bytemuck::cast_slice(values)),
            BatchValues::U32(values) => bytes.extend_from_slice(bytemuck::cast_slice(values)),
        }
    }
    Some(twox_hash::XxHash3_128::oneshot(&bytes) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_without_samples_and_imbalance_are_named() {
        let names = ["a", "b", "c"].map(String::from);
        let found = class_warnings(&names, &[100, 0, 4]);
        assert!(found[0].contains("class `b` has no training sample"), "{found:?}");
        assert!(found[1].contains("class `a` has 25 times as many training samples as `c`"), "{found:?}");
        assert!(class_warnings(&names, &[20, 1, 4]).is_empty());
        assert_eq!(class_warnings(&names[..1], &[9]), ["`a` is the only class: there is nothing to learn"]);
    }
}
