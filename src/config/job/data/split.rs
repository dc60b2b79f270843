//! How the samples of the training files are split into sets.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Most folds.
const MAX_FOLDS: u64 = 1000;

/// How samples are assigned to sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SplitKind {
    /// At random, determined by the seed.
    #[default]
    Random,
    /// At random, with the same fraction of each class in every set, to within one sample.
    Stratified,
    /// By position, as for time series: the last samples are the test set, those before them the validation set, and
    /// folds are consecutive.
    Last,
}

impl SplitKind {
    pub fn is_random(&self) -> bool {
        *self == Self::Random
    }
}

/// A fold of several, written `"2/5"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fold {
    /// From 1.
    pub number: u64,
    pub of: u64,
}

impl fmt::Display for Fold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl From<Fold> for String {
    fn from(fold: Fold) -> String {
        fold.to_string()
    }
}

impl TryFrom<String> for Fold {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for Fold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(number, of)| {
            Some((number.trim().parse::<u64>().ok()?, of.trim().parse::<u64>().ok()?))
        });
        match numbers {
            Some((number, of)) if (1..=of).contains(&number) && (2..=MAX_FOLDS).contains(&of) => {
                Ok(Self { number, of })
            }
            _ => Err(format!("`{text}` is no fold")),
        }
    }
}

impl JsonSchema for Fold {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Fold".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "fold", "pattern": "^[0-9]+/[0-9]+$" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fold_is_one_of_at_least_two() {
        assert_eq!("2/5".parse(), Ok(Fold { number: 2, of: 5 }));
        assert_eq!("1000/1000".parse::<Fold>().unwrap().to_string(), "1000/1000");
        for wrong in ["", "2", "0/5", "6/5", "1/1", "-1/5", "2/5/7", "a/b", "1/1001", "1.5/3"] {
            assert!(wrong.parse::<Fold>().is_err(), "{wrong}");
        }
    }
}
