//! Training, validation and test files: the keys that every file-based source shares.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::one_or_many::{list_of_one_or_many, one_or_list};
use super::split::Fold;

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
    /// Fraction of the samples of `train` that is the validation set, 0.1 if absent; unused if `valid` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub valid_fraction: Option<f64>,
    /// Test files, which training never reads: `trainer eval --split test` evaluates them.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "list_of_one_or_many")]
    #[schemars(transform = each_a_path, transform = one_or_list)]
    pub test: Vec<PathBuf>,
    /// Fraction of the samples of `train` that is the test set; none if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0.0, "exclusiveMaximum" = 1.0))]
    pub test_fraction: Option<f64>,
    /// Cross-validation: `"2/5"` makes the second of five folds of the samples of `train` the validation set, after
    /// those of `test_fraction` are set aside. A job for each fold validates every sample once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<Fold>,
}

impl FilesConfig {
    /// Fraction of the samples of `train` for validation, if it has no files of its own and is no fold.
    pub fn valid_fraction(&self) -> f64 {
        self.valid_fraction.unwrap_or(0.1)
    }

    /// Writes the default of the fraction, unless a fold takes its place, so that the resolved job states it.
    pub(in crate::job) fn resolve(&mut self) {
        if self.fold.is_none() {
            self.valid_fraction.get_or_insert(0.1);
        }
    }

    /// Only these files, all of them for validation.
    pub fn only(files: &[PathBuf]) -> Self {
        Self {
            train: files.to_vec(),
            valid: files.to_vec(),
            valid_fraction: None,
            test: Vec::new(),
            test_fraction: None,
            fold: None,
        }
    }
}

pub(super) fn each_a_path(schema: &mut schemars::Schema) {
    if let Some(items) = schema.get_mut("items").and_then(serde_json::Value::as_object_mut) {
        items.insert("format".into(), "path".into());
    }
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
