//! Text and token files, for language models.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::files::FilesConfig;
use super::split::SplitKind;

/// Text files, for a language model: one text, of which a sample is a window of the model's `context`. With
/// `valid_fraction`, the validation set is the end of the text; with `test_fraction`, the test set is, and the
/// validation set is before it. Folds are consecutive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TextConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// The tokenizer: `characters` (one token per distinct character), `bytes`, or the path of a `tokenizer.json` in
    /// Hugging Face's format.
    #[serde(default = "characters")]
    #[schemars(extend("format" = "path", "x-words" = ["characters", "bytes"]))]
    pub tokens: String,
    /// The token between two files: the tokenizer's end-of-text token (`auto`; characters and bytes have none), `none`,
    /// or the text of a token.
    #[serde(default = "auto")]
    pub separator: String,
    /// How the training windows are placed.
    #[serde(default)]
    pub windows: WindowMode,
}

/// Files of token ids, as nanoGPT's and llm.c's scripts write them, with random access; a sample is a window of the
/// model's `context` within one file. With `valid_fraction` and `test_fraction`, the validation and the test set are
/// the end of the last files; folds are consecutive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// Type of an id; `auto` follows the header of llm.c or NumPy (`.npy`); without a header it is `u16`, or `u32` or
    /// `u64` if the upper halves of the first ids are 0. Files that seem to have ids of one byte, floats or
    /// big-endian ids are refused.
    #[serde(default)]
    pub dtype: TokenDtype,
    /// Vocabulary size; if absent, that of `tokenizer`, or else the largest id in the files plus one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub vocab: Option<usize>,
    /// The `tokenizer.json` that produced the ids, to decode them to text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "path"))]
    pub tokenizer: Option<PathBuf>,
    /// How the training windows are placed.
    #[serde(default)]
    pub windows: WindowMode,
}

/// JSON lines or a JSON array of records, plain, gzip or zstd: texts or chats for a language model, or texts to
/// classify. They are tokenized once and cached in `runs/.data`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JsonlConfig {
    #[serde(flatten)]
    pub files: FilesConfig,
    /// The tokenizer: `characters` (one token per distinct character), `bytes`, or the path of a `tokenizer.json` in
    /// Hugging Face's format.
    #[serde(default = "characters")]
    #[schemars(extend("format" = "path", "x-words" = ["characters", "bytes"]))]
    pub tokens: String,
    /// The field with the text; unused with `messages` and `chat`. Here and below, `a.b` is field `b` of the object
    /// `a`.
    #[serde(default = "text")]
    pub field: String,
    /// How a chat is stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat: Option<ChatFormat>,
    /// The field with the messages of a chat; by default `messages`, or `conversations` with `chat = "sharegpt"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages: Option<String>,
    /// The chat template: `chatml`, `llama2`, `llama3`, `gemma`, `plain`, the one published with the tokenizer
    /// (`auto`), a Jinja template, or the path of a file with one.
    #[serde(default = "chatml")]
    #[schemars(extend(
        "format" = "path",
        "x-words" = ["chatml", "llama2", "llama3", "gemma", "plain", "auto"],
        "x-text" = "{",
    ))]
    pub template: String,
    /// Which tokens of a chat contribute to the loss.
    #[serde(default)]
    pub loss: ChatLoss,
    /// The field with the class of a text, for a classifier. A field that holds lists has any number of labels per
    /// text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// How samples of `train` are assigned to the validation and the test set; packed records always by position.
    #[serde(default, skip_serializing_if = "SplitKind::is_random")]
    pub split: SplitKind,
    /// A field whose values group the records, such as a user: all records of a group are in the same set, and records
    /// without the field are one group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Pack the records, each followed by `separator`, into full windows without padding. With `valid_fraction`, the
    /// validation set is then the last records.
    #[serde(default)]
    pub pack: bool,
    /// Lengths that samples are padded to: a micro-batch has the smallest that fits its longest sample. By default
    /// powers of two from 32 on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(range(min = 1, max = 1_048_576)))]
    pub buckets: Vec<usize>,
    /// What to do with a record of more tokens than the model's `context` or the last bucket.
    #[serde(default)]
    pub too_long: TooLong,
    /// The token after a record: the tokenizer's end-of-text token (`auto`; characters and bytes have none), `none`, or
    /// the text of a token. A chat that is not packed ends as its template says.
    #[serde(default = "auto")]
    pub separator: String,
}

/// How a chat is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatFormat {
    /// A list of messages with `role` (system, developer, user, assistant or tool) and `content`: a text, a list of
    /// parts that are texts, or null beside `tool_calls`. `messages = "FIELD"` alone means this too.
    Messages,
    /// A list of messages with `from` (human, gpt, system and so on) and `value`.
    Sharegpt,
    /// The fields `instruction` and `output`, and optionally `input`, `system` and `history`, pairs of a request
    /// and its answer.
    Alpaca,
    /// The fields `prompt` and `completion`, each a text or a list of messages.
    PromptCompletion,
}

/// Which tokens of a chat contribute to the loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatLoss {
    /// The tokens of the assistant's messages, except those with `"weight": 0` or `"train": false`.
    #[default]
    Answers,
    /// All tokens.
    All,
}

/// What to do with a record of too many tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// Truncate it; `trainer check` reports how many records were truncated.
    #[default]
    Cut,
    /// Split it into several samples.
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
    U8,
    U16,
    U32,
    /// Or `i64`: each id must fit 32 bits.
    #[serde(alias = "i64")]
    U64,
}

/// How the training windows of a text are placed; those of the validation set are contiguous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WindowMode {
    /// Contiguous: an epoch predicts each token once.
    Fixed,
    /// At random offsets, different for each sample of each epoch.
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
