//! Image labels that look like several labels in one, as `red|round`: refused in tables unless the job says how to read
//! them.

use std::path::PathBuf;

use super::ImageFiles;
use super::source_kind::ImageSourceKind;
use crate::DataError;
use crate::labels::{self, LabelLists};

impl ImageFiles {
    /// The separator of labels that look like several in one, and an example; `None` if the job decides.
    pub(super) fn combined_labels(&self) -> Option<(&'static str, &str)> {
        if self.listing.is_multi_label() || self.options.columns.separator.is_some() {
            return None;
        }
        let names = self.names().as_slice();
        match labels::detect(names.iter().map(String::as_str))? {
            LabelLists::Separated(separator) => {
                names.iter().find(|name| name.contains(separator)).map(|name| (separator, name.as_str()))
            }
            LabelLists::Bracketed => names.first().map(|name| (",", name.as_str())),
        }
    }

    /// Refuses tables whose labels look like several in one. Folder names only get a warning.
    pub fn check_labels_of_tables(&self, files: &[PathBuf]) -> Result<(), DataError> {
        let is_table = |file: &&PathBuf| matches!(ImageSourceKind::of(file), Ok(ImageSourceKind::Table));
        match (files.iter().find(is_table), self.combined_labels()) {
            (Some(file), Some((separator, example))) => Err(DataError::Table {
                file: file.clone(),
                place: format!("column `{}`", self.options.columns.label),
                problem: format!(
                    "its values look like lists of labels, separated by `{separator}`, as in `{example}`"
                ),
                hint: "set `label_separator` to what separates them, or to \"\" if each text is one class",
            }),
            _ => Ok(()),
        }
    }
}
