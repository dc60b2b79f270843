//! `[data]`: where samples come from, and how the loader delivers them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod augment;
mod files;
mod generated;
mod images;
mod language;
mod loader;
pub(super) mod one_or_many;
mod split;
mod tables;

pub use augment::AugmentConfig;
pub use files::FilesConfig;
pub use generated::{ShapesConfig, TextSyntheticConfig};
pub use images::{IdxConfig, ImageFit, ImagesConfig, NormalizePreset};
pub use language::{
    ChatFormat, ChatLoss, JsonlConfig, TextConfig, TokenDtype, TokensConfig, TooLong, WindowMode,
};
pub use loader::{LoaderConfig, OnBadRecord};
pub use one_or_many::OneOrMany;
pub use split::{Fold, SplitKind};
pub use tables::{
    CategoryEncoding, ColumnsConfig, Comment, CsvConfig, Dates, Decimal, Delimiter, Encoding, JsonConfig,
    OnMissing, OnUnknown, ParquetConfig, Quote, Task,
};

/// Where samples come from. `kind` decides the other keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DataConfig {
    #[serde(flatten)]
    pub source: SourceConfig,
    #[serde(flatten)]
    pub loader: LoaderConfig,
}

/// The samples themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum SourceConfig {
    Shapes(ShapesConfig),
    Idx(IdxConfig),
    Images(ImagesConfig),
    Csv(CsvConfig),
    Json(JsonConfig),
    Parquet(ParquetConfig),
    Text(TextConfig),
    Tokens(TokensConfig),
    Jsonl(JsonlConfig),
    #[serde(rename = "text-synthetic")]
    TextSynthetic(TextSyntheticConfig),
}

impl SourceConfig {
    /// The name of its `kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Shapes(_) => "shapes",
            Self::Idx(_) => "idx",
            Self::Images(_) => "images",
            Self::Csv(_) => "csv",
            Self::Json(_) => "json",
            Self::Parquet(_) => "parquet",
            Self::Text(_) => "text",
            Self::Tokens(_) => "tokens",
            Self::Jsonl(_) => "jsonl",
            Self::TextSynthetic(_) => "text-synthetic",
        }
    }

    /// What the job says of the columns, if the samples are rows of a table.
    pub fn columns(&self) -> Option<&ColumnsConfig> {
        match self {
            Self::Csv(CsvConfig { columns, .. })
            | Self::Json(JsonConfig { columns, .. })
            | Self::Parquet(ParquetConfig { columns, .. }) => Some(columns),
            Self::Shapes(_) | Self::Idx(_) | Self::Images(_) | Self::Text(_) | Self::Tokens(_) => None,
            Self::Jsonl(_) | Self::TextSynthetic(_) => None,
        }
    }

    /// What separates the labels of a sample, if the job says it.
    pub fn label_separator(&self) -> Option<&str> {
        match self {
            // An empty one says that each text is one class.
            Self::Images(s) => s.label_separator.as_deref().filter(|separator| !separator.is_empty()),
            _ => self.columns()?.label_separator.as_deref(),
        }
    }

    /// The files of the sets, if they are listed as for most kinds.
    pub fn files(&self) -> Option<&FilesConfig> {
        match self {
            Self::Images(ImagesConfig { files, .. })
            | Self::Csv(CsvConfig { files, .. })
            | Self::Json(JsonConfig { files, .. })
            | Self::Parquet(ParquetConfig { files, .. })
            | Self::Text(TextConfig { files, .. })
            | Self::Tokens(TokensConfig { files, .. })
            | Self::Jsonl(JsonlConfig { files, .. }) => Some(files),
            Self::Shapes(_) | Self::Idx(_) | Self::TextSynthetic(_) => None,
        }
    }

    /// As [`files`](Self::files), to change them.
    pub fn files_mut(&mut self) -> Option<&mut FilesConfig> {
        match self {
            Self::Images(ImagesConfig { files, .. })
            | Self::Csv(CsvConfig { files, .. })
            | Self::Json(JsonConfig { files, .. })
            | Self::Parquet(ParquetConfig { files, .. })
            | Self::Text(TextConfig { files, .. })
            | Self::Tokens(TokensConfig { files, .. })
            | Self::Jsonl(JsonlConfig { files, .. }) => Some(files),
            Self::Shapes(_) | Self::Idx(_) | Self::TextSynthetic(_) => None,
        }
    }

    /// How samples are assigned to sets, and the column or field that groups them.
    pub fn split(&self) -> (SplitKind, Option<&str>) {
        match self {
            Self::Images(s) => (s.split, None),
            Self::Jsonl(s) => (s.split, s.group.as_deref()),
            Self::Text(_) | Self::Tokens(_) => (SplitKind::Last, None),
            _ => self.columns().map_or((SplitKind::Random, None), |c| (c.split, c.group.as_deref())),
        }
    }

    /// Augmentation, if the samples are images.
    pub fn augment(&self) -> Option<&AugmentConfig> {
        match self {
            Self::Shapes(ShapesConfig { augment, .. })
            | Self::Idx(IdxConfig { augment, .. })
            | Self::Images(ImagesConfig { augment, .. }) => Some(augment),
            _ => None,
        }
    }
}
