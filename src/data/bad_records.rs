//! Bad-record accounting: the fail-or-skip policy, how many records were skipped, and the first few of them.
//!
//! A pass over a dataset (an epoch or an evaluation) visits each record once, so the count of a pass is a count of
//! distinct records, and the maximum over passes is the count for the dataset. Only records that the run consumed
//! count, not those that were prefetched: a retry counts nothing twice, and the counts are part of the checkpoint.

use serde::{Deserialize, Serialize};

use super::DataError;
use super::split::DatasetSplit;

/// Bad records that are reported individually.
const MAX_REPORTED: usize = 5;

/// What to do with a bad record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadRecordPolicy {
    /// Fail the run.
    Fail,
    /// Skip it; fail once more than `limit` were skipped.
    Skip { limit: u64 },
}

impl BadRecordPolicy {
    pub fn skips(self) -> bool {
        self != BadRecordPolicy::Fail
    }
}

/// A record that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRecord {
    /// Index of the sample it would have been.
    pub id: u64,
    /// What is wrong with the record, and its location in the file.
    pub why: String,
}

/// Pass counters of one dataset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PassCounts {
    /// The current pass, and the bad records counted in it so far.
    pass: u64,
    now: u64,
    /// Maximum count over all passes.
    most: u64,
}

/// Records skipped in this run so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecords {
    train: PassCounts,
    valid: PassCounts,
    #[serde(alias = "told")]
    reported: Vec<(DatasetSplit, BadRecord)>,
}

impl SkippedRecords {
    /// Counts the records skipped in a pass over `set`. Pass numbers ascend. Returns messages for the records that were
    /// not reported yet (the first few only), or an error if the limit is exceeded.
    pub fn record(
        &mut self,
        set: DatasetSplit,
        pass: u64,
        bad: &[BadRecord],
        on_bad: BadRecordPolicy,
    ) -> Result<Vec<String>, DataError> {
        let passes = match set {
            DatasetSplit::Train => &mut self.train,
            // No run reads its test set.
            DatasetSplit::Valid | DatasetSplit::Test => &mut self.valid,
        };
        if pass != passes.pass {
            (passes.pass, passes.now) = (pass, 0);
        }
        passes.now += bad.len() as u64;
        passes.most = passes.most.max(passes.now);
        let before = self.reported.len();
        for bad in bad {
            let known = self.reported.iter().any(|(of, known)| (*of, known.id) == (set, bad.id));
            if self.reported.len() < MAX_REPORTED && !known {
                self.reported.push((set, bad.clone()));
            }
        }
        match on_bad {
            BadRecordPolicy::Skip { limit } if self.count() > limit => {
                let first = self.reported.iter().map(|(_, bad)| bad.why.clone()).collect();
                Err(DataError::TooManyBad { count: self.count(), limit, first })
            }
            _ => Ok(self.reported[before..].iter().map(|(_, bad)| bad.why.clone()).collect()),
        }
    }

    /// Bad records found so far in both datasets.
    pub fn count(&self) -> u64 {
        self.train.most + self.valid.most
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bad(id: u64) -> BadRecord {
        BadRecord { id, why: format!("record {id}") }
    }

    proptest! {
        /// However a pass is divided into calls, each record is counted once and reported once, the first ones in
        /// order, and the limit fails the run at the same record.
        #[test]
        fn each_counts_once(
            ids in prop::collection::btree_set(0u64..1000, 0..20),
            cuts in prop::collection::vec(1usize..6, 1..8),
            most in 0u64..25,
        ) {
            let all: Vec<BadRecord> = ids.into_iter().map(bad).collect();
            let on_bad = BadRecordPolicy::Skip { limit: most };
            let (mut skipped, mut reported, mut over) = (SkippedRecords::default(), Vec::new(), None);
            'passes: for pass in 0..3 {
                let (mut rest, mut cuts) = (&all[..], cuts.iter().cycle());
                while !rest.is_empty() {
                    let (some, more) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                    match skipped.record(DatasetSplit::Train, pass, some, on_bad) {
                        Ok(new) => reported.extend(new),
                        Err(error) => { over = Some(error); break 'passes }
                    }
                    rest = more;
                }
            }
            match over {
                None => {
                    prop_assert!(all.len() as u64 <= most);
                    prop_assert_eq!(skipped.count(), all.len() as u64);
                    prop_assert!(reported.iter().eq(all.iter().take(MAX_REPORTED).map(|bad| &bad.why)));
                }
                Some(error) => {
                    prop_assert!(all.len() as u64 > most);
                    let text = error.to_string();
                    prop_assert!(text.contains(&all[0].why) && text.contains(&most.to_string()), "{}", text);
                }
            }
            let kept: SkippedRecords = serde_json::from_str(&serde_json::to_string(&skipped).unwrap()).unwrap();
            prop_assert_eq!(kept, skipped);
        }
    }

    #[test]
    fn the_sets_add_up() {
        let (mut left, on_bad) = (SkippedRecords::default(), BadRecordPolicy::Skip { limit: 3 });
        assert_eq!(left.record(DatasetSplit::Train, 0, &[bad(1), bad(2)], on_bad).unwrap().len(), 2);
        assert_eq!(left.record(DatasetSplit::Valid, 7, &[bad(1)], on_bad).unwrap(), ["record 1"]);
        assert!(left.record(DatasetSplit::Valid, 9, &[bad(1)], on_bad).unwrap().is_empty());
        assert_eq!(left.count(), 3);
        assert!(left.record(DatasetSplit::Train, 1, &[bad(1), bad(2), bad(3)], on_bad).is_err());
    }
}
