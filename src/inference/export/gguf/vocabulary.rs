//! The tokenizer in a GGUF file's metadata, from a `tokenizer.json`.
//!
//! llama.cpp has its own implementations of byte-level BPE (`gpt2`) and of SentencePiece's BPE with byte fallback
//! (`llama`), selected by name. A vocabulary of characters becomes byte-level: a character of several bytes is merged
//! from them. Refuses a tokenizer that llama.cpp would not reproduce exactly.

use std::collections::HashMap;

use serde_json::Value;

use super::super::error::ExportError;
use super::super::tokenizer::{ExportedTokenizer, byte_text};
use super::super::{ExportSource, TokenizerSource};
use super::Metadata;
use super::container::MetadataValue;

/// Codes of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The score of a token that is no result of a merge: below the scores of all merges.
const NO_MERGE: f32 = -1e6;

/// Patterns that split text into words before BPE, and llama.cpp's names of them.
const PATTERNS: [(&str, &str); 2] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
    ),
];

/// Symbols, those that texts need least first.
const SELDOM_USED: &str = "\0\u{7f}\u{fffd}\u{feff}`~^|\\{}@#$%&<>=_+*[]/";

/// How the tokenizer works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// BPE over bytes, after a split that llama.cpp knows by this name.
    ByteLevel(&'static str),
    /// SentencePiece's BPE; whether it prepends a space.
    SentencePiece { add_space_prefix: bool },
    /// A token per character.
    Characters,
}

struct Token {
    text: String,
    kind: i32,
    score: f32,
}

/// The metadata of a model of `vocab` tokens, and a note on what the user should know.
pub(super) fn metadata(
    source: &ExportSource,
    vocab: usize,
) -> Result<(Metadata, Option<String>), ExportError> {
    let mut entries: Metadata = Vec::new();
    let mut push = |key: &str, value: MetadataValue| entries.push((format!("tokenizer.{key}"), value));
    let Some(tokenizer) = ExportedTokenizer::load(source)? else {
        push("ggml.model", "no_vocab".into());
        let note = "the run has no tokenizer: llama.cpp takes and gives token ids";
        return Ok((entries, Some(note.into())));
    };
    let family = family(&tokenizer.json)?;
    let merges = merges(&tokenizer.json);
    let tokens = tokens(&tokenizer.json, family, &merges, vocab)?;
    let merges: Vec<String> = match family {
        Family::Characters => tokens.iter().flat_map(|token| character_merges(&token.text)).collect(),
        _ => merges.into_iter().map(|(left, right)| format!("{left} {right}")).collect(),
    };
    match family {
        Family::ByteLevel(pre) => {
            push("ggml.model", "gpt2".into());
            push("ggml.pre", pre.into());
        }
        Family::Characters => {
            push("ggml.model", "gpt2".into());
            push("ggml.pre", "gpt-2".into());
        }
        Family::SentencePiece { add_space_prefix } => {
            push("ggml.model", "llama".into());
            push("ggml.pre", "default".into());
            push("ggml.add_space_prefix", MetadataValue::Bool(add_space_prefix));
            push("ggml.scores", MetadataValue::F32s(tokens.iter().map(|token| token.score).collect()));
            if let Some(unknown) = tokens.iter().position(|token| token.kind == UNKNOWN) {
                push("ggml.unknown_token_id", MetadataValue::U32(unknown as u32));
            }
        }
    }
    push("ggml.token_type", MetadataValue::I32s(tokens.iter().map(|token| token.kind).collect()));
    if !matches!(family, Family::SentencePiece { .. }) {
        push("ggml.merges", MetadataValue::Texts(merges));
    }
    let stop = stop_token(source, &tokenizer, &tokens);
    if let Some(id) = tokenizer.bos.as_ref().map(|(_, id)| *id).or(stop.as_ref().map(|stop| stop.id)) {
        push("ggml.bos_token_id", MetadataValue::U32(id));
    }
    if let Some(id) = tokenizer.eos.as_ref().map(|(_, id)| *id).or(stop.as_ref().map(|stop| stop.id)) {
        push("ggml.eos_token_id", MetadataValue::U32(id));
    }
    // Samples were cut from text without these tokens around it; a template writes its own.
    push("ggml.add_bos_token", MetadataValue::Bool(false));
    push("ggml.add_eos_token", MetadataValue::Bool(false));
    if let Some(template) = source.chat_template {
        push("chat_template", template.into());
    }
    push("ggml.tokens", MetadataValue::Texts(tokens.into_iter().map(|token| token.text).collect()));
    Ok((entries, stop.and_then(|stop| stop.note)))
}

/// A token at which llama.cpp stops.
struct StopToken {
    id: u32,
    note: Option<String>,
}

/// Stands in for a missing end-of-text token. Without one, llama.cpp takes token 11, whatever it is.
fn stop_token(source: &ExportSource, tokenizer: &ExportedTokenizer, tokens: &[Token]) -> Option<StopToken> {
    match (&tokenizer.eos, &source.tokenizer) {
        (Some(_), _) | (None, TokenizerSource::None) => None,
        // No text has the byte 0.
        (None, TokenizerSource::Bytes) => Some(StopToken { id: 0, note: None }),
        (None, TokenizerSource::File(_)) => {
            let id = rarest_token(tokens)?;
            let note = format!(
                "the tokenizer has no end-of-text token, and llama.cpp wants one: it stops at `{}`, or never gives it \
                 with `--ignore-eos`",
                tokens[id].text
            );
            Some(StopToken { id: id as u32, note: Some(note) })
        }
    }
}

/// A guess: a symbol that texts seldom have, or else the character with the largest code point.
fn rarest_token(tokens: &[Token]) -> Option<usize> {
    let place = |symbol: char| {
        let text = byte_text(symbol.to_string().as_bytes());
        tokens.iter().position(|token| token.text == text)
    };
    SELDOM_USED.chars().find_map(place).or_else(|| {
        let normal = tokens.iter().enumerate().filter(|(_, token)| token.kind == NORMAL);
        normal.max_by_key(|(_, token)| token.text.len()).map(|(id, _)| id)
    })
}

fn family(json: &Value) -> Result<Family, ExportError> {
    let refuse = |problem: String, needs| Err(ExportError::Tokenizer { problem, needs });
    let (model, split) = (&json["model"], &json["pre_tokenizer"]);
    // Files of older versions have no type.
    if model["type"].as_str().is_some_and(|kind| kind != "BPE") {
        return refuse(format!("a {} model", model["type"]), "byte-pair encoding (BPE)");
    }
    let no_merges = model["merges"].as_array().is_none_or(Vec::is_empty);
    if model["byte_fallback"] == true {
        if (0..=255u8).any(|byte| model["vocab"].get(byte_token(byte)).is_none()) {
            return refuse("byte fallback without a token for each byte".into(), "all 256 byte tokens");
        }
        return Ok(Family::SentencePiece { add_space_prefix: prepends_space(json) });
    }
    let parts = match split["type"].as_str() {
        None if no_merges && json["normalizer"].is_null() => return Ok(Family::Characters),
        Some("Sequence") => split["pretokenizers"].as_array().cloned().unwrap_or_default(),
        _ => vec![split.clone()],
    };
    let kinds: Vec<&str> = parts.iter().filter_map(|part| part["type"].as_str()).collect();
    let splits = || match kinds.is_empty() {
        true => "no pre-tokenizer".to_owned(),
        false => format!("the pre-tokenizer {}", kinds.join(" + ")),
    };
    let unknown = "a split into words that llama.cpp has under a name (GPT-2, Llama 3, Qwen 2, SmolLM)";
    let Some(byte_level) = parts.last().filter(|part| part["type"] == "ByteLevel") else {
        return refuse(splits(), unknown);
    };
    if !json["normalizer"].is_null() && json["normalizer"]["type"] != "NFC" {
        return refuse(format!("the normalizer {}", json["normalizer"]["type"]), "text as it is");
    }
    if byte_level["add_prefix_space"] == true {
        return refuse("a space added before the first word".into(), "text as it is");
    }
    let own_pattern = byte_level["use_regex"].as_bool().unwrap_or(true);
    let name = match (&kinds[..], own_pattern) {
        (["ByteLevel"], true) => Some("gpt-2"),
        // Without merges, a split changes nothing.
        (["ByteLevel"], false) if no_merges => Some("gpt-2"),
        (["Digits", "ByteLevel"], true) if parts[0]["individual_digits"] == true => Some("smollm"),
        (["Split", "ByteLevel"], false) => {
            let pattern = parts[0]["pattern"]["Regex"].as_str().unwrap_or_default();
            PATTERNS.iter().find(|(known, _)| *known == pattern).map(|(_, name)| *name)
        }
        _ => None,
    };
    match name {
        Some(name) => Ok(Family::ByteLevel(name)),
        None => refuse(splits(), unknown),
    }
}

/// Whether SentencePiece's space before the first word is part of the tokenizer.
fn prepends_space(json: &Value) -> bool {
    let (normalizer, split) = (&json["normalizer"], &json["pre_tokenizer"]);
    let parts = normalizer["normalizers"].as_array().map_or(std::slice::from_ref(normalizer), Vec::as_slice);
    parts.iter().any(|part| part["type"] == "Prepend")
        || split["type"] == "Metaspace"
            && split["prepend_scheme"] != "never"
            && split["add_prefix_space"] != false
}

/// The pairs that are merged, first to last.
fn merges(json: &Value) -> Vec<(String, String)> {
    let pair = |merge: &Value| match merge {
        Value::String(text) => text.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned())),
        _ => Some((merge[0].as_str()?.to_owned(), merge[1].as_str()?.to_owned())),
    };
    json["model"]["merges"].as_array().map_or_else(Vec::new, |all| all.iter().filter_map(pair).collect())
}

/// Merges that make the character `text`, given as byte-level text, from its bytes.
fn character_merges(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let merge = |at: usize| format!("{} {}", chars[..at].iter().collect::<String>(), chars[at]);
    (1..chars.len()).map(merge).collect()
}

fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// Every token by id. Ids without a token, as in a vocabulary that was padded, are marked unused.
fn tokens(
    json: &Value,
    family: Family,
    merges: &[(String, String)],
    vocab: usize,
) -> Result<Vec<Token>, ExportError> {
    let unused = |id: usize| Token { text: format!("[PAD{id}]"), kind: UNUSED, score: NO_MERGE };
    let mut tokens: Vec<Token> = (0..vocab).map(unused).collect();
    let sentence_piece = matches!(family, Family::SentencePiece { .. });
    let ranks: HashMap<String, usize> = match sentence_piece {
        // In reverse, so that the first of several merges to the same token wins.
        true => merges.iter().enumerate().rev().map(|(rank, (a, b))| (format!("{a}{b}"), rank)).collect(),
        false => HashMap::new(),
    };
    let no_tokens = serde_json::Map::new();
    let place = |id: Option<u64>| {
        let id = id.unwrap_or_default() as usize;
        if id < vocab { Ok(id) } else { Err(ExportError::VocabularySize { tokens: id + 1, vocab }) }
    };
    for (text, id) in json["model"]["vocab"].as_object().unwrap_or(&no_tokens) {
        let kind = if json["model"]["unk_token"].as_str() == Some(text) {
            UNKNOWN
        } else if sentence_piece && is_byte_token(text) {
            BYTE
        } else {
            NORMAL
        };
        let score = ranks.get(text).map_or(NO_MERGE, |rank| -(*rank as f32));
        let text = if family == Family::Characters { byte_text(text.as_bytes()) } else { text.clone() };
        tokens[place(id.as_u64())?] = Token { text, kind, score };
    }
    for added in json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice) {
        let id = place(added["id"].as_u64())?;
        let kind = match tokens[id].kind {
            kind @ (UNKNOWN | BYTE) => kind,
            _ if added["special"] == true => CONTROL,
            _ => USER_DEFINED,
        };
        let text = added["content"].as_str().unwrap_or_default().to_owned();
        tokens[id] = Token { text, kind, score: 0.0 };
    }
    Ok(tokens)
}

fn is_byte_token(text: &str) -> bool {
    text.len() == 6 && text.starts_with("<0x") && text.ends_with('>')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::language::tokenizer::CharTokenizer;

    fn characters(text: &str) -> Value {
        serde_json::from_slice(&CharTokenizer::new(text.chars()).to_json()).unwrap()
    }

    #[test]
    fn a_character_of_several_bytes_is_merged_from_them() {
        let json = characters("a€");
        assert_eq!(family(&json).unwrap(), Family::Characters);
        let tokens = tokens(&json, Family::Characters, &[], 2).unwrap();
        assert_eq!(tokens.iter().map(|t| t.text.as_str()).collect::<Vec<_>>(), ["a", "âĤ¬"]);
        assert_eq!(character_merges(&tokens[1].text), ["â Ĥ", "âĤ ¬"]);
    }

    #[test]
    fn a_seldom_used_symbol_stands_in_for_the_end_of_text() {
        let stand_in = |text: &str| {
            let vocab = text.chars().count();
            let tokens = tokens(&characters(text), Family::Characters, &[], vocab).unwrap();
            tokens[rarest_token(&tokens).unwrap()].text.clone()
        };
        assert_eq!(stand_in("\n !$&abc"), "$");
        assert_eq!(stand_in("abcé"), "Ã©");
    }

    #[test]
    fn sentence_piece_scores_follow_the_merges() {
        let mut vocab: serde_json::Map<String, Value> =
            (0..=255u8).map(|byte| (byte_token(byte), json!(byte as u64 + 1))).collect();
        for (id, token) in ["<unk>"].iter().enumerate() {
            vocab.insert((*token).into(), json!(id));
        }
        for (id, token) in ["\u{2581}", "a", "b", "ab", "\u{2581}ab"].iter().enumerate() {
            vocab.insert((*token).into(), json!(257 + id));
        }
        let json = json!({
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "Prepend", "prepend": "\u{2581}" }] },
            "pre_tokenizer": null,
            "added_tokens": [{ "id": 0, "content": "<unk>", "special": true }],
            "model": {
                "type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab,
                "merges": ["a b", ["\u{2581}", "ab"]],
            },
        });
        assert_eq!(family(&json).unwrap(), Family::SentencePiece { add_space_prefix: true });
        let family = Family::SentencePiece { add_space_prefix: true };
        let tokens = tokens(&json, family, &merges(&json), 264).unwrap();
        assert_eq!((tokens[0].kind, tokens[66].kind, tokens[258].kind), (UNKNOWN, BYTE, NORMAL));
        assert_eq!((tokens[260].score, tokens[261].score, tokens[258].score), (0.0, -1.0, NO_MERGE));
        assert_eq!((tokens[263].kind, tokens[263].text.as_str()), (UNUSED, "[PAD263]"));
    }

    #[test]
    fn tokenizers_that_llama_cpp_lacks_are_refused() {
        let error = family(&json!({ "model": { "type": "WordPiece" } })).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the tokenizer has a \"WordPiece\" model, and llama.cpp needs byte-pair encoding (BPE)"
        );
        assert!(error.hint().is_some() && error.is_usage());
        let split = json!({ "model": { "type": "BPE", "merges": ["a b"] }, "pre_tokenizer": { "type": "Whitespace" } });
        assert!(family(&split).unwrap_err().to_string().contains("the pre-tokenizer Whitespace"));
        let gpt2 = json!({
            "model": { "type": "BPE", "merges": ["a b"] },
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false }
        });
        assert_eq!(family(&gpt2).unwrap(), Family::ByteLevel("gpt-2"));
        let error = tokens(&characters("abc"), Family::Characters, &[], 2).err().unwrap();
        assert_eq!(error.to_string(), "the tokenizer has 3 tokens, and the model has embeddings for 2");
    }
}
