//! What differs between several sets of named values.

use std::collections::{BTreeMap, BTreeSet};

/// A key whose values differ, with that of each set; `None` where a set lacks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub key: String,
    pub values: Vec<Option<String>>,
}

/// The keys that not all sets have with the same value, by name.
pub fn differences(sets: &[&BTreeMap<String, String>]) -> Vec<Difference> {
    let keys: BTreeSet<&String> = sets.iter().flat_map(|set| set.keys()).collect();
    let row = |key: &String| Difference {
        key: key.clone(),
        values: sets.iter().map(|set| set.get(key).cloned()).collect(),
    };
    let differs = |row: &Difference| row.values.iter().any(|value| *value != row.values[0]);
    keys.into_iter().map(row).filter(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_differ_or_are_missing_are_listed_by_name() {
        let set = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let (a, b) = (set(&[("lr", "1"), ("seed", "7"), ("x", "0")]), set(&[("lr", "2"), ("seed", "7")]));
        let some = |value: &str| Some(value.to_owned());
        assert_eq!(
            differences(&[&a, &b, &a]),
            [
                Difference { key: "lr".into(), values: vec![some("1"), some("2"), some("1")] },
                Difference { key: "x".into(), values: vec![some("0"), None, some("0")] },
            ]
        );
        assert_eq!(differences(&[&a]), []);
        assert_eq!(differences(&[]), []);
    }
}
