//! Text and token files, for language models.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::files::FilesConfig;

/// Text files, for a language model: one text, of which a sample is a window of the model's `context`. The share
/// measured on is its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TextConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// What a token is: each distinct character, each byte, or what a `tokenizer.json` of Hugging Face says.
    #[serde(default = "characters")]
    #[schemars(extend("format" = "path", "x-words" = ["characters", "bytes"]))]
    pub tokens: String,
    /// The token between two files: the tokenizer's end of text (`auto`; characters and bytes have none), `none`,
    /// or a token by its text.
    #[serde(default = "auto")]
    pub separator: String,
    /// Where the training windows lie.
    #[serde(default)]
    pub windows: WindowMode,
}

/// Files of token ids, as nanoGPT's and llm.c's scripts write them, read where they are wanted and never as a whole; a sample is a
/// window of the model's `context` that stays within a file. The share measured on is the end of the last files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Type of an id; `auto` is as llm.c's header says and, without one, `u16`, or `u32` where every second `u16` is 0.
    #[serde(default)]
    pub dtype: TokenDtype,
    /// Different tokens; where absent, those of `tokenizer` or else as many as the largest id in the files says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vocab: Option<usize>,
    /// The `tokenizer.json` that the ids are of, to show them as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "path"))]
    pub tokenizer: Option<PathBuf>,
    /// Where the training windows lie.
    #[serde(default)]
    pub windows: WindowMode,
}

/// Records of JSON, a line each, plain, gzip or zstd: texts or chats for a language model, or texts to tell apart. They
/// are tokenised once and kept in `runs/.data`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JsonlConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// What a token is: each distinct character, each byte, or what a `tokenizer.json` of Hugging Face says.
    #[serde(default = "characters")]
    #[schemars(extend("format" = "path", "x-words" = ["characters", "bytes"]))]
    pub tokens: String,
    /// The field that holds the text; unused with `messages`.
    #[serde(default = "text")]
    pub field: String,
    /// The field that holds a chat: a list of messages, each with `role` (system, user, assistant or tool) and `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<String>,
    /// How messages become a text: `chatml`, `llama2`, `llama3`, `gemma`, `plain`, the one published with the tokenizer
    /// (`auto`), a Jinja text, or the path of a file that holds one.
    #[serde(default = "chatml")]
    #[schemars(extend("format" = "path", "x-words" = ["chatml", "llama2", "llama3", "gemma", "plain", "auto"], "x-text" = "{"))]
    pub template: String,
    /// Which tokens of a chat are learned.
    #[serde(default)]
    pub loss: ChatLoss,
    /// The field that holds the class of a text, for a model that tells texts apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Join the records, each with `separator` after it, into whole windows without padding; a share measured on is
    /// then the end of the records.
    #[serde(default)]
    pub pack: bool,
    /// Lengths that samples are padded to: a micro-batch is as long as the smallest that holds its longest sample.
    /// Empty means powers of two from 32 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(range(min = 1, max = 1_048_576)))]
    pub buckets: Vec<usize>,
    /// What happens to a record with more tokens than the model's `context` or the last bucket.
    #[serde(default)]
    pub too_long: TooLong,
    /// The token after a record: the tokenizer's end of text (`auto`; characters and bytes have none), `none`, or a
    /// token by its text. A chat that is not packed ends as its template says.
    #[serde(default = "auto")]
    pub separator: String,
}

/// Which tokens of a chat are learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatLoss {
    /// Those of the assistant's messages.
    #[default]
    Answers,
    /// All.
    All,
}

/// What happens to a record that has too many tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// Its end is left out; `trainer check` says how many records were cut.
    #[default]
    Cut,
    /// It becomes several samples.
    Split,
    /// It is a bad record.
    Refuse,
}

/// Type of a token id in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenDtype {
    #[default]
    Auto,
    U16,
    U32,
}

/// Where the training windows of a text lie; those measured on lie end to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WindowMode {
    /// End to end: an epoch predicts each token once.
    Fixed,
    /// Anywhere, drawn anew for each sample of each epoch.
    #[default]
    Random,
}

fn characters() -> String {
    "characters".into()
}

fn auto() -> String {
    "auto".into()
}

fn text() -> String {
    "text".into()
}

fn chatml() -> String {
    "chatml".into()
}
