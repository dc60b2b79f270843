//! Training and validation files: the keys that every file-based source shares.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::one_or_many::{list_of_one_or_many, one_or_list};

/// The files of a set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FilesConfig {
    /// Training files, one or a list; a name may be a pattern such as `data/*.csv`.
    #[serde(deserialize_with = "list_of_one_or_many")]
    #[schemars(length(min = 1), transform = each_a_path, transform = one_or_list)]
    pub train: Vec<PathBuf>,
    /// Validation files; without them, `valid_fraction` of the samples of `train` is the validation set.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = each_a_path, transform = one_or_list)]
    pub valid: Vec<PathBuf>,
    /// Fraction of the samples of `train` that is the validation set; unused if `valid` is given.
    #[serde(default = "tenth")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub valid_fraction: f64,
}

pub(super) fn each_a_path(schema: &mut schemars::Schema) {
    if let Some(items) = schema.get_mut("items").and_then(serde_json::Value::as_object_mut) {
        items.insert("format".into(), "path".into());
    }
}

pub(super) fn tenth() -> f64 {
    0.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_needs_no_list() {
        let read = |text: &str| toml::from_str::<FilesConfig>(text).unwrap();
        let one = read("train = \"a.csv\"\nvalid = \"b.csv\"");
        assert_eq!(one, read("train = [\"a.csv\"]\nvalid = [\"b.csv\"]"));
        assert!(toml::from_str::<FilesConfig>("train = 3").is_err());
    }
}
