//! What a model needs to know about its data to be used without it: the shape of a sample, the columns of a table, the
//! chat template. Checkpoints keep it, beside the job and the tokenizer.

use std::io;

use serde::{Deserialize, Serialize};

use super::Dataset;
use super::table::TableSchema;
use crate::base::byte_count::ByteCount;
use crate::base::features::Features;

/// Version of the file.
const FORMAT: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preprocessing {
    pub format: u32,
    /// Input and target of a sample, with the names of the classes.
    pub features: Features,
    /// How the cells of a table become inputs and targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<TableSchema>,
    /// Source of the chat template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
}

impl Preprocessing {
    /// Of a language model.
    pub fn new(features: Features, template: Option<String>) -> Self {
        Self { format: FORMAT, features, table: None, template }
    }

    pub fn of(dataset: &dyn Dataset, template: Option<String>) -> Self {
        Self {
            format: FORMAT,
            features: dataset.features().clone(),
            table: dataset.table_schema().cloned(),
            template,
        }
    }

    /// Reads the file, or says why it cannot.
    pub fn from_json(text: &[u8]) -> Result<Self, String> {
        // Tables of many columns have long files: only this of it is kept.
        #[derive(Deserialize)]
        struct Header {
            #[serde(default)]
            format: serde_json::Value,
        }
        let Header { format } = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        match format.as_u64() {
            Some(known) if known == u64::from(FORMAT) => {
                serde_json::from_slice(text).map_err(|error| error.to_string())
            }
            _ => Err(format!("it has format {format} and this program reads {FORMAT}")),
        }
    }

    /// Writes the file.
    pub fn write(&self, out: &mut dyn io::Write) -> io::Result<()> {
        Ok(serde_json::to_writer(out, self)?)
    }

    pub fn file_bytes(&self) -> u64 {
        let mut count = ByteCount::default();
        // Infallible: names are strings, and counting does not fail.
        let _ = self.write(&mut count);
        count.0
    }

    pub fn to_json(&self) -> Vec<u8> {
        let mut text = Vec::new();
        // Infallible, as above.
        let _ = self.write(&mut text);
        text
    }
}
