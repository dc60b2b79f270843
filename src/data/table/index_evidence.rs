//! Whether a column holds the numbers or names of rows, as pandas and R write them beside a table.

use std::collections::{BTreeMap, HashSet};

/// Distinct numbers from which on a shuffled column is taken for row numbers and not for codes.
const MIN_SHUFFLED: usize = 8;

/// Whether this is the name that pandas gives to an index without one, in Parquet.
pub fn is_index_name(name: &str) -> bool {
    name.strip_prefix("__index_level_")
        .and_then(|rest| rest.strip_suffix("__"))
        .is_some_and(|level| !level.is_empty() && level.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether pandas calls a column so that it read without a name: `Unnamed: 0`, `Unnamed: 0.1`.
pub fn is_unnamed(name: &str) -> bool {
    let rest = name.strip_prefix("Unnamed: ");
    rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && rest.parse::<f64>().is_ok())
}

/// Whether a column is named as pandas' `reset_index` and R name row numbers. It may be an input all the same.
pub fn names_rows(name: &str) -> bool {
    ["index", "level_0", "rownames"].iter().any(|known| known.eq_ignore_ascii_case(name))
}

/// What the first rows show.
#[derive(Clone, Debug)]
pub struct IndexEvidence {
    values: usize,
    /// `None` once one repeats.
    distinct: Option<HashSet<Vec<u8>>>,
    /// `None` once a value does not follow.
    sequence: Option<RowNumbers>,
    /// Occurrences of each whole number; `None` once a value is none.
    whole: Option<BTreeMap<u64, u32>>,
}

impl Default for IndexEvidence {
    fn default() -> Self {
        Self {
            values: 0,
            distinct: Some(HashSet::new()),
            sequence: Some(RowNumbers::default()),
            whole: Some(BTreeMap::new()),
        }
    }
}

impl IndexEvidence {
    /// Adds a value, and the number that it is.
    pub fn observe(&mut self, value: &[u8], number: Option<f64>) {
        self.values += 1;
        if self.distinct.as_mut().is_some_and(|seen| !seen.insert(value.to_vec())) {
            self.distinct = None;
        }
        self.sequence = number.and_then(|x| self.sequence?.next(x));
        match number.filter(|x| x.fract() == 0.0 && (0.0..1e15).contains(x)) {
            Some(x) => self.whole.iter_mut().for_each(|seen| *seen.entry(x as u64).or_default() += 1),
            None => self.whole = None,
        }
    }

    /// Whether the values are numbers or names of rows. Distinct fractions are measurements that lack a name.
    pub fn is_index(&self, has_fraction: bool) -> bool {
        let distinct = self.distinct.is_some() && !has_fraction;
        self.values > 1 && (distinct || self.are_row_numbers())
    }

    /// Whether the values are row numbers, in order or shuffled, also of several tables that were joined.
    pub fn are_row_numbers(&self) -> bool {
        self.values > 1
            && (self.sequence.is_some() || self.whole.as_ref().is_some_and(|seen| self.is_shuffled(seen)))
    }

    /// Row numbers of whole tables have no gaps, and of joined tables higher numbers occur less often, since only the
    /// longest has the last ones. The first rows of a long table have gaps, but few repeated numbers.
    fn is_shuffled(&self, seen: &BTreeMap<u64, u32>) -> bool {
        let first = seen.keys().next().copied().unwrap_or(0);
        let is_gapless = first <= 1 && seen.keys().zip(first..).all(|(number, expected)| *number == expected);
        let falls = seen.values().zip(seen.values().skip(1)).all(|(count, next)| next <= count);
        seen.len() >= MIN_SHUFFLED && (is_gapless && falls || 4 * seen.len() >= 3 * self.values)
    }
}

/// Row numbers: each value is one more than the last, or the first again, as where files were joined.
#[derive(Clone, Copy, Debug, Default)]
struct RowNumbers {
    first_and_last: Option<(f64, f64)>,
}

impl RowNumbers {
    /// `None` if `x` is no row number after these.
    fn next(self, x: f64) -> Option<Self> {
        let first_and_last = match self.first_and_last {
            None if x == 0.0 || x == 1.0 => (x, x),
            Some((first, last)) if x == last + 1.0 || x == first && last > first => (first, x),
            _ => return None,
        };
        Some(Self { first_and_last: Some(first_and_last) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(numbers: impl IntoIterator<Item = f64>) -> IndexEvidence {
        let mut evidence = IndexEvidence::default();
        numbers.into_iter().for_each(|x| evidence.observe(x.to_string().as_bytes(), Some(x)));
        evidence
    }

    #[test]
    fn shuffled_row_numbers_are_found_and_codes_are_not() {
        let shuffled = |rows: &[u64]| {
            let mut all: Vec<u64> = rows.iter().flat_map(|rows| 0..*rows).collect();
            all.sort_by_key(|x| x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            evidence(all.into_iter().map(|x| x as f64)).are_row_numbers()
        };
        assert!(shuffled(&[30, 30]) && shuffled(&[30, 30, 7]) && shuffled(&[60]));
        assert!(evidence((0..30).chain(0..30).map(f64::from)).are_row_numbers());
        // The first rows of tables that are longer.
        assert!(evidence((0..900).map(|i| f64::from(i * 7919 % 100_003))).are_row_numbers());
        assert!(!evidence((0..60).map(|i| f64::from(7 * i % 4))).are_row_numbers());
        assert!(!evidence((0..60).map(|i| f64::from(i % 30 * 2))).are_row_numbers());
        assert!(!evidence((0..60).map(|i| f64::from(i) + 0.5)).is_index(true));
    }

    #[test]
    fn names_of_an_index_are_known() {
        assert!(is_unnamed("Unnamed: 0") && is_unnamed("Unnamed: 0.1") && !is_unnamed("Unnamed: x"));
        assert!(is_index_name("__index_level_0__") && !is_index_name("__index_level___"));
        assert!(names_rows("index") && names_rows("Index") && !names_rows("index2"));
    }
}
