//! The values of a sweep: `key=a,b,c` is a list, `key=1e-5..1e-2:log` a range.
//!
//! Lists alone form a grid. With a range, or where fewer trials than the grid has are requested, values are drawn: each
//! is a function of the seed, the trial and the key, so that a trial has the same values in any order and after any
//! resume.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::base::random::{RngKey, stream_id};

/// Trials of a sweep with ranges that states no number.
pub const DEFAULT_TRIALS: usize = 20;

/// Most trials of a sweep.
pub const MAX_TRIALS: usize = 10_000;

const STREAM: u64 = stream_id("tune");

/// One `--set` of a sweep.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    pub key: String,
    pub values: Values,
}

/// The values that a key takes. A list of one value is a fixed setting.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    List(Vec<String>),
    Range(Range),
}

/// Numbers from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
    /// Uniform in the logarithm.
    pub log: bool,
    /// Both ends were written as integers: integers are drawn, the ends included.
    pub integer: bool,
}

/// A key and the value that a trial gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    pub key: String,
    pub value: String,
}

impl Assignment {
    /// As `--set` takes it.
    pub fn to_set(&self) -> String {
        format!("{}={}", self.key, self.value)
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpaceError {
    #[error("`--set {0}` has no `=`")]
    NoValue(String),
    #[error("the range `{range}` of `{key}` is empty: its first number must be below its second")]
    EmptyRange { key: String, range: String },
    #[error("the range `{range}` of `{key}` cannot be logarithmic: it must begin above 0")]
    LogOfZero { key: String, range: String },
    #[error("`{range}` of `{key}` is not a range of two numbers")]
    NotARange { key: String, range: String },
    #[error("`{key}` has an empty value in `{list}`")]
    EmptyValue { key: String, list: String },
    #[error("`{key}` has the value `{value}` twice")]
    RepeatedValue { key: String, value: String },
    #[error("`{0}` is set twice")]
    RepeatedKey(String),
    #[error("no key has several values")]
    NothingToVary,
    #[error("the grid has more than {MAX_TRIALS} trials")]
    TooManyTrials,
}

impl SpaceError {
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NoValue(_) | Self::NothingToVary => {
                "give a key several values: `--set optimizer.lr=1e-4,1e-3`, or a range: \
                 `--set optimizer.lr=1e-5..1e-2:log`"
            }
            Self::EmptyRange { .. } | Self::NotARange { .. } => {
                "a range is LOW..HIGH, or LOW..HIGH:log; quote a value that contains `..`"
            }
            Self::LogOfZero { .. } => "begin it at a small number, such as 1e-6, or remove `:log`",
            Self::EmptyValue { .. } => "quote a value that contains a comma: `--set 'key=\"a,b\"'`",
            Self::RepeatedValue { .. } => "list every value once",
            Self::RepeatedKey(_) => "write all its values in one `--set`",
            Self::TooManyTrials => "`--trials N` draws N of them",
        }
    }
}

impl Parameter {
    /// Parses `key=a,b,c`, `key=LOW..HIGH` or `key=LOW..HIGH:log`. Commas within brackets and quotes do not separate.
    pub fn parse(set: &str) -> Result<Self, SpaceError> {
        let (key, text) = set.split_once('=').ok_or_else(|| SpaceError::NoValue(set.to_owned()))?;
        let (key, text) = (key.trim().to_owned(), text.trim());
        if let Some(range) = parse_range(&key, text)? {
            return Ok(Self { key, values: Values::Range(range) });
        }
        let values: Vec<String> = split_list(text).into_iter().map(|value| value.trim().to_owned()).collect();
        if values.len() > 1 {
            let mut seen = BTreeSet::new();
            for value in &values {
                if value.is_empty() {
                    return Err(SpaceError::EmptyValue { key, list: text.to_owned() });
                }
                if parse_range(&key, value)?.is_some() {
                    return Err(SpaceError::NotARange { key, range: text.to_owned() });
                }
                if !seen.insert(value) {
                    return Err(SpaceError::RepeatedValue { key, value: value.clone() });
                }
            }
        }
        Ok(Self { key, values: Values::List(values) })
    }

    /// Whether trials differ in it.
    pub fn varies(&self) -> bool {
        !matches!(&self.values, Values::List(values) if values.len() == 1)
    }

    fn is_range(&self) -> bool {
        matches!(self.values, Values::Range(_))
    }
}

impl Range {
    /// The value at `u` in [0, 1), with four significant digits.
    fn at(&self, u: f64) -> String {
        // The end of an integer range is part of it.
        let high = if self.integer { self.high + 1.0 } else { self.high };
        let x = match self.log {
            true => (self.low.ln() + (high.ln() - self.low.ln()) * u).exp(),
            false => self.low + (high - self.low) * u,
        };
        if self.integer {
            return format!("{}", x.floor().clamp(self.low, self.high) as i64);
        }
        let rounded: f64 = format!("{x:.3e}").parse().unwrap_or(x);
        format!("{:?}", rounded.clamp(self.low, self.high))
    }
}

/// `LOW..HIGH` or `LOW..HIGH:log`; `None` for text that is no range.
fn parse_range(key: &str, text: &str) -> Result<Option<Range>, SpaceError> {
    let (ends, log) = match text.strip_suffix(":log") {
        Some(ends) => (ends, true),
        None => (text, false),
    };
    let parsed = ends.split_once("..").and_then(|(low, high)| {
        let (low, high) = (low.trim(), high.trim());
        let integer = low.parse::<i64>().is_ok() && high.parse::<i64>().is_ok();
        Some(Range { low: low.parse().ok()?, high: high.parse().ok()?, log, integer })
    });
    let range = || text.to_owned();
    match parsed {
        None if log => Err(SpaceError::NotARange { key: key.into(), range: range() }),
        None => Ok(None),
        Some(r) if !(r.low.is_finite() && r.high.is_finite()) => {
            Err(SpaceError::NotARange { key: key.into(), range: range() })
        }
        Some(r) if r.low >= r.high => Err(SpaceError::EmptyRange { key: key.into(), range: range() }),
        Some(r) if log && r.low <= 0.0 => Err(SpaceError::LogOfZero { key: key.into(), range: range() }),
        Some(r) => Ok(Some(r)),
    }
}

/// Splits at commas outside brackets and quotes.
fn split_list(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut depth, mut quote) = (Vec::new(), 0, 0i32, None);
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '{') => depth += 1,
            (None, ']' | '}') => depth -= 1,
            (None, ',') if depth <= 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// The values of every trial, one for each parameter that varies. `trials`: how many; by default the whole grid, or
/// [`DEFAULT_TRIALS`] if there is a range.
pub fn trials(
    space: &[Parameter],
    trials: Option<usize>,
    seed: u64,
) -> Result<Vec<Vec<Assignment>>, SpaceError> {
    let mut keys = BTreeSet::new();
    if let Some(twice) = space.iter().find(|parameter| !keys.insert(&parameter.key)) {
        return Err(SpaceError::RepeatedKey(twice.key.clone()));
    }
    let varied: Vec<&Parameter> = space.iter().filter(|parameter| parameter.varies()).collect();
    if varied.is_empty() {
        return Err(SpaceError::NothingToVary);
    }
    let key = RngKey::new(seed, STREAM);
    if varied.iter().any(|parameter| parameter.is_range()) {
        let count = trials.unwrap_or(DEFAULT_TRIALS);
        return if count <= MAX_TRIALS {
            Ok((0..count as u64).map(|trial| drawn(&varied, key.fold_in(trial))).collect())
        } else {
            Err(SpaceError::TooManyTrials)
        };
    }
    let lists: Vec<&[String]> = varied
        .iter()
        .map(|parameter| match &parameter.values {
            Values::List(values) => &values[..],
            Values::Range(_) => &[],
        })
        .collect();
    let points = lists.iter().fold(1usize, |points, list| points.saturating_mul(list.len()));
    let count = trials.unwrap_or(points).min(points);
    if count > MAX_TRIALS {
        return Err(SpaceError::TooManyTrials);
    }
    Ok(subset(points, count, key).into_iter().map(|point| grid_point(&varied, &lists, point)).collect())
}

/// One value of each parameter, at random.
fn drawn(varied: &[&Parameter], key: RngKey) -> Vec<Assignment> {
    let value = |(counter, parameter): (usize, &&Parameter)| {
        let value = match &parameter.values {
            Values::List(values) => values[key.below(counter as u64, values.len() as u64) as usize].clone(),
            Values::Range(range) => range.at(key.f64(counter as u64)),
        };
        Assignment { key: parameter.key.clone(), value }
    };
    varied.iter().enumerate().map(value).collect()
}

/// Point number `point` of the grid; the last key varies fastest.
fn grid_point(varied: &[&Parameter], lists: &[&[String]], mut point: usize) -> Vec<Assignment> {
    let mut chosen: Vec<Assignment> = varied
        .iter()
        .zip(lists)
        .rev()
        .map(|(parameter, list)| {
            let value = list[point % list.len()].clone();
            point /= list.len();
            Assignment { key: parameter.key.clone(), value }
        })
        .collect();
    chosen.reverse();
    chosen
}

/// `count` different numbers below `points`, ascending: Floyd's algorithm, which needs no list of all points.
fn subset(points: usize, count: usize, key: RngKey) -> BTreeSet<usize> {
    let mut chosen = BTreeSet::new();
    for at in points - count..points {
        let drawn = key.below(at as u64, at as u64 + 1) as usize;
        if !chosen.insert(drawn) {
            chosen.insert(at);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space(sets: &[&str]) -> Vec<Parameter> {
        sets.iter().map(|set| Parameter::parse(set).unwrap()).collect()
    }

    fn values(sets: &[&str], count: Option<usize>) -> Vec<Vec<String>> {
        let trials = trials(&space(sets), count, 42).unwrap();
        trials.into_iter().map(|trial| trial.into_iter().map(|a| a.value).collect()).collect()
    }

    #[test]
    fn lists_form_a_grid_and_single_values_are_fixed() {
        let grid = values(&["seed=7", "optimizer.lr=1e-3,1e-2", "model.hidden=[8],[16,8],[32]"], None);
        assert_eq!(grid.len(), 6);
        assert_eq!(grid[0], ["1e-3", "[8]"]);
        assert_eq!(grid[1], ["1e-3", "[16,8]"]);
        assert_eq!(grid[5], ["1e-2", "[32]"]);
        assert_eq!(values(&[r#"data.delimiter=",",";""#], None), [["\",\""], ["\";\""]]);
    }

    #[test]
    fn a_part_of_a_grid_has_different_points() {
        let sets = ["a=1,2,3,4,5,6,7,8,9,10", "b=1,2,3,4,5,6,7,8,9,10"];
        let some = values(&sets, Some(30));
        let different: BTreeSet<_> = some.iter().collect();
        assert_eq!((some.len(), different.len()), (30, 30));
        assert_eq!(values(&sets, Some(1000)).len(), 100, "no more than there are");
    }

    #[test]
    fn a_trial_is_the_same_however_many_there_are() {
        let sets = ["lr=1e-5..1e-1:log", "dropout=0.0..0.5", "width=8..64", "kind=a,b"];
        assert_eq!(values(&sets, None).len(), DEFAULT_TRIALS);
        assert_eq!(values(&sets, Some(50))[..5], values(&sets, Some(5))[..]);
    }

    #[test]
    fn what_cannot_be_swept_is_an_error() {
        let error = |set: &str| Parameter::parse(set).unwrap_err();
        assert!(matches!(error("lr"), SpaceError::NoValue(_)));
        assert!(matches!(error("lr=1..1"), SpaceError::EmptyRange { .. }));
        assert!(matches!(error("lr=2..1:log"), SpaceError::EmptyRange { .. }));
        assert!(matches!(error("lr=0..1:log"), SpaceError::LogOfZero { .. }));
        assert!(matches!(error("lr=a..b:log"), SpaceError::NotARange { .. }));
        assert!(matches!(error("lr=1e-4..inf"), SpaceError::NotARange { .. }));
        assert!(matches!(error("lr=1,2..3"), SpaceError::NotARange { .. }));
        assert!(matches!(error("lr=1,,3"), SpaceError::EmptyValue { .. }));
        assert!(matches!(error("lr=1,2,1"), SpaceError::RepeatedValue { .. }));
        assert_eq!(trials(&space(&["a=1,2", "a=3"]), None, 1), Err(SpaceError::RepeatedKey("a".into())));
        assert_eq!(trials(&space(&["a=1"]), None, 1), Err(SpaceError::NothingToVary));
        let big: Vec<String> = (0..5).map(|k| format!("k{k}=1,2,3,4,5,6,7,8,9")).collect();
        let big: Vec<&str> = big.iter().map(String::as_str).collect();
        assert_eq!(trials(&space(&big), None, 1), Err(SpaceError::TooManyTrials));
        assert_eq!(trials(&space(&big), Some(9), 1).unwrap().len(), 9);
        // A relative path is a value.
        assert!(matches!(Parameter::parse("data.train=../a.csv").unwrap().values, Values::List(_)));
    }

    proptest! {
        #[test]
        fn draws_stay_within_their_range(
            low in 1e-6f64..10.0, width in 1e-3f64..100.0, u in 0.0f64..1.0, log: bool,
        ) {
            let range = Range { low, high: low + width, log, integer: false };
            let x: f64 = range.at(u).parse().unwrap();
            prop_assert!((range.low..=range.high).contains(&x), "{x}");
            let whole = Range { low: 3.0, high: 9.0, log, integer: true };
            let n: i64 = whole.at(u).parse().unwrap();
            prop_assert!((3..=9).contains(&n), "{n}");
        }
    }
}
