//! The tokenizer of a model as a `tokenizer.json`, with its beginning- and end-of-text tokens.

use serde_json::{Map, Value, json};

use super::error::ExportError;
use super::folder::ExportFolder;
use super::{ExportSource, TokenizerSource};
use crate::base::regular_file;
use crate::data::language::tokenizer::{HfTokenizer, MAX_TOKENIZER_BYTES, settings_beside};

/// A tokenizer and the tokens that other tools want by name.
pub(super) struct ExportedTokenizer {
    pub json: Value,
    /// Text and id.
    pub bos: Option<(String, u32)>,
    pub eos: Option<(String, u32)>,
    /// What was published beside it, or null.
    pub settings: Value,
}

/// Keys of a `tokenizer_config.json` that name files or code of where the tokenizer came from.
const FOREIGN_KEYS: [&str; 5] =
    ["auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file"];

impl ExportedTokenizer {
    /// `None` if the model has none.
    pub(super) fn load(source: &ExportSource) -> Result<Option<Self>, ExportError> {
        let path = match &source.tokenizer {
            TokenizerSource::None => return Ok(None),
            TokenizerSource::Bytes => {
                return Ok(Some(Self {
                    json: byte_tokenizer(),
                    bos: None,
                    eos: None,
                    settings: Value::Null,
                }));
            }
            TokenizerSource::File(path) => path,
        };
        let wrong = |reason: String| ExportError::Weights { path: path.to_owned(), reason };
        let text = regular_file::read(path, MAX_TOKENIZER_BYTES).map_err(ExportError::io("read", path))?;
        let json = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        let tokenizer = HfTokenizer::open(path).map_err(|error| wrong(error.to_string()))?;
        let special = |name: &str| {
            let token = tokenizer.special_token(name)?;
            tokenizer.id(&token).map(|id| (token, id))
        };
        let (bos, eos) = (special("bos_token"), special("eos_token"));
        Ok(Some(Self { json, bos, eos, settings: settings_beside(path) }))
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json`.
    pub(super) fn write(&self, source: &ExportSource, folder: &ExportFolder) -> Result<(), ExportError> {
        let config = Value::from(self.config(source));
        folder.write("tokenizer.json", format!("{:#}\n", self.json).as_bytes())?;
        folder.write("tokenizer_config.json", format!("{config:#}\n").as_bytes())
    }

    /// What was published beside the tokenizer, with what `tokenizer.json` alone needs and the model's chat template.
    fn config(&self, source: &ExportSource) -> Map<String, Value> {
        let mut config = self.settings.as_object().cloned().unwrap_or_default();
        FOREIGN_KEYS.iter().for_each(|key| drop(config.remove(*key)));
        let text = |token: &Option<(String, u32)>| json!(token.as_ref().map(|(text, _)| text));
        config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        config.insert("model_max_length".into(), json!(source.model.context()));
        config.insert("bos_token".into(), text(&self.bos));
        config.insert("eos_token".into(), text(&self.eos));
        config.entry("clean_up_tokenization_spaces").or_insert(false.into());
        if let Some((pad, _)) = self.pad() {
            config.entry("pad_token").or_insert(pad.into());
        }
        if let Some(template) = source.chat_template {
            config.insert("chat_template".into(), template.into());
        }
        config
    }

    /// Text and id of the first added token called like a padding token.
    pub(super) fn pad(&self) -> Option<(&str, u64)> {
        let added = self.json["added_tokens"].as_array()?;
        added.iter().find_map(|token| {
            let text = token["content"].as_str()?;
            ["[PAD]", "<pad>", "<|pad|>"].contains(&text).then_some((text, token["id"].as_u64()?))
        })
    }
}

/// One token per byte, as byte-level BPE without merges.
fn byte_tokenizer() -> Value {
    let vocab: Map<String, Value> =
        (0..=255).map(|byte| (byte_char(byte).to_string(), json!(byte))).collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

/// The character that stands for a byte in byte-level vocabularies, GPT-2's: itself if it is visible in Latin-1, or
/// else one from U+0100 on.
pub(super) fn byte_char(byte: u8) -> char {
    let is_visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_visible(byte) {
        return byte.into();
    }
    let place = (0..byte).filter(|byte| !is_visible(*byte)).count() as u32;
    char::from_u32(256 + place).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The text of bytes in a byte-level vocabulary.
pub(super) fn byte_text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| byte_char(*byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_gpt2s_characters() {
        // From the published vocabulary: a space, a newline, `é` and the last byte that is not visible.
        assert_eq!(byte_text(b" \n"), "\u{120}\u{10a}");
        assert_eq!(byte_text("é".as_bytes()), "Ã©");
        assert_eq!(byte_char(0xad), '\u{143}');
        let all: std::collections::BTreeSet<char> = (0..=255).map(byte_char).collect();
        assert_eq!(all.len(), 256);
    }

    #[test]
    fn the_byte_tokenizer_gives_the_bytes_of_a_text() {
        let text = byte_tokenizer().to_string();
        let tokenizer = tokenizers::Tokenizer::from_bytes(text.as_bytes()).unwrap();
        let encoding = tokenizer.encode("a é\n", false).unwrap();
        let bytes: Vec<u32> = "a é\n".bytes().map(u32::from).collect();
        assert_eq!(encoding.get_ids(), bytes);
        assert_eq!(tokenizer.decode(&bytes, false).unwrap(), "a é\n");
    }
}
