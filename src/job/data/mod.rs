//! `[data]`: where samples come from, and how they are brought to the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod augment;
mod files;
mod generated;
mod language;
mod loading;
mod one_or;
mod pictures;
mod tables;

pub use augment::Augment;
pub use files::Files;
pub use generated::{Shapes, TextSynthetic};
pub use language::{ChatLoss, Jsonl, Text, TokenType, Tokens, TooLong, Windows};
pub use loading::{Loading, OnBadRecord};
pub use one_or::OneOr;
pub use pictures::{Fit, Idx, Images, Preset};
pub use tables::{Columns, Csv, Delimiter, Encode, OnMissing, OnUnknown, Parquet, Task};

/// Where samples come from. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Data {
    #[serde(flatten)]
    pub source: Source,
    #[serde(flatten)]
    pub loading: Loading,
}

/// The samples themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Source {
    Shapes(Shapes),
    Idx(Idx),
    Images(Images),
    Csv(Csv),
    Parquet(Parquet),
    Text(Text),
    Tokens(Tokens),
    Jsonl(Jsonl),
    #[serde(rename = "text-synthetic")]
    TextSynthetic(TextSynthetic),
}

impl Source {
    /// The name of its `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Shapes(_) => "shapes",
            Self::Idx(_) => "idx",
            Self::Images(_) => "images",
            Self::Csv(_) => "csv",
            Self::Parquet(_) => "parquet",
            Self::Text(_) => "text",
            Self::Tokens(_) => "tokens",
            Self::Jsonl(_) => "jsonl",
            Self::TextSynthetic(_) => "text-synthetic",
        }
    }

    /// What is drawn for its samples, where they are pictures.
    pub fn augment(&self) -> Option<&Augment> {
        match self {
            Self::Shapes(Shapes { augment, .. })
            | Self::Idx(Idx { augment, .. })
            | Self::Images(Images { augment, .. }) => Some(augment),
            _ => None,
        }
    }
}
