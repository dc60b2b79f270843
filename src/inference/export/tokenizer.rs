//! The tokenizer of a model as a `tokenizer.json`, with its beginning- and end-of-text tokens.

use serde_json::{Map, Value, json};

use super::error::ExportError;
use super::{ExportSource, TokenizerSource};
use crate::base::regular_file;
use crate::data::language::tokenizer::{HfTokenizer, MAX_TOKENIZER_BYTES};

/// A tokenizer and the tokens that other tools want by name.
pub(super) struct ExportedTokenizer {
    pub json: Value,
    /// Text and id.
    pub bos: Option<(String, u32)>,
    pub eos: Option<(String, u32)>,
}

impl ExportedTokenizer {
    /// `None` if the model has none.
    pub(super) fn load(source: &ExportSource) -> Result<Option<Self>, ExportError> {
        let path = match &source.tokenizer {
            TokenizerSource::None => return Ok(None),
            TokenizerSource::Bytes => return Ok(Some(Self { json: byte_tokenizer(), bos: None, eos: None })),
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
        Ok(Some(Self { json, bos: special("bos_token"), eos: special("eos_token") }))
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
