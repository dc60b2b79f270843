//! The categories of a column: their names in order, and the id of each spelling.
//!
//! Programs write the same whole number as `1` and `1.0`, and the same truth value as `True`, `true` and `TRUE`. In
//! a column of whole numbers or of truth values alone, such spellings are one category.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use super::TableSettings;
use super::statistics::CategoryCounts;

/// Category ids by name.
pub struct CategoryIndex {
    names: Vec<String>,
    ids: HashMap<String, u32>,
    /// Ids by the common spelling, if the names have one.
    common: Option<HashMap<String, u32>>,
}

impl CategoryIndex {
    pub fn of(names: &[String]) -> Self {
        let common = spelling(names.iter().map(String::as_str)).map(|spelling| {
            names.iter().filter_map(|name| Some(spelling(name)?.into_owned())).zip(0..).collect()
        });
        Self { names: names.to_vec(), ids: names.iter().cloned().zip(0..).collect(), common }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// In the order of their ids.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    pub fn id(&self, name: &str) -> Option<u32> {
        let other = || self.common.as_ref()?.get(whole_number(name).or_else(|| truth_value(name))?.as_ref());
        self.ids.get(name).or_else(other).copied()
    }

    /// Occurrences of each category.
    pub fn counts(&self, counted: &CategoryCounts) -> Vec<u64> {
        let mut counts = vec![0; self.names.len()];
        for (name, count) in &counted.values {
            if let Some(id) = self.id(name) {
                counts[id as usize] += count;
            }
        }
        counts
    }

    /// Approximate bytes in memory.
    pub fn resident_bytes(&self) -> u64 {
        let copies = if self.common.is_some() { 3 } else { 2 };
        self.names.iter().map(|name| copies * (name.len() as u64 + 48)).sum()
    }
}

/// A whole number without the fraction of 0 that programs add: `1` of `1.0`. A number with leading zeros is a code.
fn whole_number(text: &str) -> Option<Cow<'_, str>> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = whole.strip_prefix('-').unwrap_or(whole);
    let is_code = digits.is_empty() || digits.len() > 1 && digits.starts_with('0');
    let is_whole =
        digits.bytes().all(|byte| byte.is_ascii_digit()) && fraction.bytes().all(|byte| byte == b'0');
    (!is_code && is_whole && !fraction.is_empty())
        .then(|| if whole == "-0" { "0".into() } else { whole.into() })
}

fn truth_value(text: &str) -> Option<Cow<'_, str>> {
    let lower = text.to_ascii_lowercase();
    matches!(lower.as_str(), "true" | "false").then_some(lower.into())
}

/// The common spelling of a name, if it has one.
type Spelling = fn(&str) -> Option<Cow<'_, str>>;

/// What gives the common spelling of each of these names, if they have one.
fn spelling<'a>(mut names: impl Iterator<Item = &'a str> + Clone) -> Option<Spelling> {
    if names.clone().all(|name| whole_number(name).is_some()) {
        return Some(whole_number);
    }
    names.all(|name| truth_value(name).is_some()).then_some(truth_value)
}

/// Declared classes; otherwise those found, sorted.
pub fn class_names(settings: &TableSettings, counts: &CategoryCounts) -> Vec<String> {
    if settings.classes.is_empty() { sorted_names(counts) } else { settings.classes.clone() }
}

/// Sorted numerically if all names are numbers, otherwise as text. Of several spellings of one category, the first.
pub fn sorted_names(counts: &CategoryCounts) -> Vec<String> {
    let mut names: Vec<String> = counts.values.keys().cloned().collect();
    if let Some(spelling) = spelling(counts.values.keys().map(String::as_str)) {
        let mut first: BTreeMap<Cow<'_, str>, &String> = BTreeMap::new();
        for name in counts.values.keys() {
            first.entry(spelling(name).unwrap_or_default()).or_insert(name);
        }
        names = first.into_values().cloned().collect();
        names.sort_unstable();
    }
    let numbers: Option<Vec<f64>> = names.iter().map(|name| name.parse().ok()).collect();
    if numbers.is_some_and(|numbers| numbers.iter().all(|x| x.is_finite())) {
        // The sort is stable: names of equal value keep their text order.
        let value = |name: &String| name.parse().unwrap_or(0.0f64);
        names.sort_by(|a, b| value(a).total_cmp(&value(b)));
    }
    names
}

/// A warning about two classes whose names differ only in case.
pub fn case_warning(names: &[String]) -> Option<String> {
    let mut seen: BTreeMap<String, &String> = BTreeMap::new();
    let twice = names.iter().find_map(|name| Some((seen.insert(name.to_lowercase(), name)?, name)));
    twice.map(|(a, b)| {
        format!("the classes `{a}` and `{b}` differ only in case: write them alike if they are one")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(names: &[(&str, u64)]) -> CategoryCounts {
        let values = names.iter().map(|(name, count)| (name.to_string(), *count)).collect();
        CategoryCounts { values, ..CategoryCounts::default() }
    }

    #[test]
    fn spellings_of_one_number_or_truth_value_are_one_category() {
        let found = counts(&[("0", 3), ("0.0", 1), ("1.0", 2), ("10", 1), ("2", 5)]);
        let names = sorted_names(&found);
        assert_eq!(names, ["0", "1.0", "2", "10"]);
        let index = CategoryIndex::of(&names);
        assert_eq!(index.counts(&found), [4, 2, 5, 1]);
        assert_eq!(
            ["1", "1.00", "10.0", "3", "x", "-0"].map(|name| index.id(name)),
            [Some(1), Some(1), Some(3), None, None, Some(0)]
        );
        let found = counts(&[("FALSE", 1), ("TRUE", 2), ("True", 3), ("false", 4), ("true", 5)]);
        let names = sorted_names(&found);
        assert_eq!(names, ["FALSE", "TRUE"]);
        assert_eq!(CategoryIndex::of(&names).counts(&found), [5, 10]);
    }

    #[test]
    fn codes_versions_and_words_keep_their_spellings() {
        for names in [&["01", "1"][..], &["1.1", "1.10"], &["1", "1.0", "x"], &["True", "no", "true"]] {
            let found = counts(&names.iter().map(|name| (*name, 1)).collect::<Vec<_>>());
            assert_eq!(sorted_names(&found).len(), names.len(), "{names:?}");
        }
        let names = ["Cat", "cat", "dog"].map(String::from);
        assert!(case_warning(&names).unwrap().contains("`Cat` and `cat` differ only in case"));
        assert_eq!(case_warning(&names[1..]), None);
    }
}
