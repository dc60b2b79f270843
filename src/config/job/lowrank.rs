//! `[lowrank]`: layers whose weight is a product of two smaller matrices.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::data::one_or_many::{list_of_one_or_many, one_or_list};

/// The rank of each factorized layer, by its name.
pub type Ranks = BTreeMap<String, usize>;

/// Low-rank factorization: linear layers and convolutions become two layers each, `NAME.0` with `rank` outputs and
/// `NAME.1`, whose product is the closest to the weight that `train.init` has; without `train.init` they start at
/// random. A convolution of k x k becomes one of k x k with `rank` channels and one of 1 x 1. The last linear
/// layer, convolutions in groups and the projections that `bert` and `llama` compute together (queries, keys and
/// values; gate and up) stay whole, and so does a layer that would not become smaller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(extend("x-one-of" = ["rank", "energy", "target"]))]
pub struct LowRankConfig {
    /// Rank of every layer. One of this, `energy`, `target` and `ranks` is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub rank: Option<usize>,
    /// The fraction of each weight's energy, the sum of the squares of its singular values, that its rank keeps at
    /// least. Needs `train.init`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub energy: Option<f64>,
    /// How many times fewer parameters the model has, such as "2x": the largest `energy` that is small enough. Needs
    /// `train.init`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<SizeRatio>,
    /// The layers that may be factorized: patterns as in `train.freeze`, without exceptions; all if absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = one_or_list)]
    pub layers: Vec<String>,
    /// The rank of each layer by its name. A run keeps here what `rank`, `energy` or `target` came to.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: Ranks,
}

/// How many times smaller; above 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SizeRatio(f64);

impl SizeRatio {
    pub fn value(self) -> f64 {
        self.0
    }
}

impl fmt::Display for SizeRatio {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}x", self.0)
    }
}

impl From<SizeRatio> for String {
    fn from(ratio: SizeRatio) -> String {
        ratio.to_string()
    }
}

impl TryFrom<String> for SizeRatio {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for SizeRatio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.strip_suffix('x').filter(|digits| digits.starts_with(|c: char| c.is_ascii_digit()));
        let ratio = digits.and_then(|digits| digits.parse::<f64>().ok());
        let ratio = ratio.filter(|ratio| *ratio > 1.0 && *ratio <= 1e6);
        ratio.map(Self).ok_or_else(|| format!("expected a factor above 1, such as \"2x\", not \"{text}\""))
    }
}

impl JsonSchema for SizeRatio {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "SizeRatio".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "ratio", "pattern": "^[0-9]+(\\.[0-9]+)?x$" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_written_with_an_x() {
        assert_eq!("2x".parse(), Ok(SizeRatio(2.0)));
        assert_eq!("1.5x".parse::<SizeRatio>().unwrap().to_string(), "1.5x");
        for wrong in ["2", "x", "1x", "0.5x", "-2x", "infx", "2 x", "1e9x"] {
            assert!(wrong.parse::<SizeRatio>().is_err(), "{wrong}");
        }
    }
}
