//! Records that cannot be used: whether they end a run or are left out, how many there are, and the first few.
//!
//! A pass over a set, an epoch or an evaluation, meets each record once, so a pass's count is that of distinct
//! records, and the highest count of a pass that of the set. What is counted is what the run consumed, not what was
//! read ahead: a retry counts nothing twice, and the count is part of a checkpoint.

use serde::{Deserialize, Serialize};

use super::DataError;

/// Bad records that are told one by one.
const MAX_REPORTED: usize = 5;

/// What happens to a bad record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadRecordPolicy {
    /// It is the end.
    Fail,
    /// It is left out, up to so many of them.
    Skip { limit: u64 },
}

impl BadRecordPolicy {
    pub fn skips(self) -> bool {
        self != BadRecordPolicy::Fail
    }
}

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRecord {
    /// The sample it would have been.
    pub id: u64,
    /// What is wrong with it, and where it lies.
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetSplit {
    Train,
    Valid,
}

/// Passes over one set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct PassCounts {
    /// The pass that is counted, and its count so far.
    pass: u64,
    now: u64,
    /// The highest count of a pass.
    most: u64,
}

/// The records left out of a run so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecords {
    train: PassCounts,
    valid: PassCounts,
    told: Vec<(DatasetSplit, BadRecord)>,
}

impl SkippedRecords {
    /// Counts records left out in a pass (numbered upwards) over `set`; gives those that are worth telling, or
    /// the error that there are too many.
    pub fn record(
        &mut self,
        set: DatasetSplit,
        pass: u64,
        bad: &[BadRecord],
        on_bad: BadRecordPolicy,
    ) -> Result<Vec<String>, DataError> {
        let passes = match set {
            DatasetSplit::Train => &mut self.train,
            DatasetSplit::Valid => &mut self.valid,
        };
        if pass != passes.pass {
            (passes.pass, passes.now) = (pass, 0);
        }
        passes.now += bad.len() as u64;
        passes.most = passes.most.max(passes.now);
        let before = self.told.len();
        for bad in bad {
            let known = self.told.iter().any(|(of, told)| (*of, told.id) == (set, bad.id));
            if self.told.len() < MAX_REPORTED && !known {
                self.told.push((set, bad.clone()));
            }
        }
        match on_bad {
            BadRecordPolicy::Skip { limit: most } if self.count() > most => {
                let first = self.told.iter().map(|(_, bad)| bad.why.clone()).collect();
                Err(DataError::TooManyBad { count: self.count(), most, first })
            }
            _ => Ok(self.told[before..].iter().map(|(_, bad)| bad.why.clone()).collect()),
        }
    }

    /// Bad records found so far in both sets.
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
        /// However passes are cut, a record counts once and is told once, the first ones in order; the limit ends
        /// the run at the same record.
        #[test]
        fn each_counts_once(ids in prop::collection::btree_set(0u64..1000, 0..20), cuts in prop::collection::vec(1usize..6, 1..8), most in 0u64..25) {
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
