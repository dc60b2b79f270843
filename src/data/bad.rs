//! Records that cannot be used: whether they end a run or are left out, how many there are, and the first few.
//!
//! A pass over a set, an epoch or an evaluation, meets each record once, so a pass's count is that of distinct
//! records, and the highest count of a pass that of the set. What is counted is what the run consumed, not what was
//! read ahead: a retry counts nothing twice, and the count is part of a checkpoint.

use serde::{Deserialize, Serialize};

use super::DataError;

/// Bad records that are told one by one.
const TOLD: usize = 5;

/// What happens to a bad record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBad {
    /// It is the end.
    Fail,
    /// It is left out, up to so many of them.
    Skip { most: u64 },
}

impl OnBad {
    pub fn skips(self) -> bool {
        self != OnBad::Fail
    }
}

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bad {
    /// The sample it would have been.
    pub id: u64,
    /// What is wrong with it, and where it lies.
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Set {
    Train,
    Valid,
}

/// Passes over one set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Passes {
    /// The pass that is counted, and its count so far.
    pass: u64,
    now: u64,
    /// The highest count of a pass.
    most: u64,
}

/// The records left out of a run so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    train: Passes,
    valid: Passes,
    told: Vec<(Set, Bad)>,
}

impl LeftOut {
    /// Counts records left out in a pass (numbered upwards) over `set`; gives those that are worth telling, or
    /// the error that there are too many.
    pub fn add(&mut self, set: Set, pass: u64, bad: &[Bad], on_bad: OnBad) -> Result<Vec<String>, DataError> {
        let passes = match set {
            Set::Train => &mut self.train,
            Set::Valid => &mut self.valid,
        };
        if pass != passes.pass {
            (passes.pass, passes.now) = (pass, 0);
        }
        passes.now += bad.len() as u64;
        passes.most = passes.most.max(passes.now);
        let before = self.told.len();
        for bad in bad {
            let known = self.told.iter().any(|(of, told)| (*of, told.id) == (set, bad.id));
            if self.told.len() < TOLD && !known {
                self.told.push((set, bad.clone()));
            }
        }
        match on_bad {
            OnBad::Skip { most } if self.count() > most => {
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

    fn bad(id: u64) -> Bad {
        Bad { id, why: format!("record {id}") }
    }

    proptest! {
        /// However passes are cut, a record counts once and is told once, the first ones in order; the limit ends
        /// the run at the same record.
        #[test]
        fn each_counts_once(ids in prop::collection::btree_set(0u64..1000, 0..20), cuts in prop::collection::vec(1usize..6, 1..8), most in 0u64..25) {
            let all: Vec<Bad> = ids.into_iter().map(bad).collect();
            let on_bad = OnBad::Skip { most };
            let (mut left, mut told, mut over) = (LeftOut::default(), Vec::new(), None);
            'passes: for pass in 0..3 {
                let (mut rest, mut cuts) = (&all[..], cuts.iter().cycle());
                while !rest.is_empty() {
                    let (some, more) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                    match left.add(Set::Train, pass, some, on_bad) {
                        Ok(new) => told.extend(new),
                        Err(error) => { over = Some(error); break 'passes }
                    }
                    rest = more;
                }
            }
            match over {
                None => {
                    prop_assert!(all.len() as u64 <= most);
                    prop_assert_eq!(left.count(), all.len() as u64);
                    prop_assert!(told.iter().eq(all.iter().take(TOLD).map(|bad| &bad.why)));
                }
                Some(error) => {
                    prop_assert!(all.len() as u64 > most);
                    let text = error.to_string();
                    prop_assert!(text.contains(&all[0].why) && text.contains(&most.to_string()), "{}", text);
                }
            }
            let kept: LeftOut = serde_json::from_str(&serde_json::to_string(&left).unwrap()).unwrap();
            prop_assert_eq!(kept, left);
        }
    }

    #[test]
    fn the_sets_add_up() {
        let (mut left, on_bad) = (LeftOut::default(), OnBad::Skip { most: 3 });
        assert_eq!(left.add(Set::Train, 0, &[bad(1), bad(2)], on_bad).unwrap().len(), 2);
        assert_eq!(left.add(Set::Valid, 7, &[bad(1)], on_bad).unwrap(), ["record 1"]);
        assert!(left.add(Set::Valid, 9, &[bad(1)], on_bad).unwrap().is_empty());
        assert_eq!(left.count(), 3);
        assert!(left.add(Set::Train, 1, &[bad(1), bad(2), bad(3)], on_bad).is_err());
    }
}
