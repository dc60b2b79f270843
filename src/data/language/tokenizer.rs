//! Converts text to token ids and back: characters, bytes, or a Hugging Face `tokenizer.json`.

mod huggingface;
mod limits;
mod pre_tokenizer;
mod settings;

use std::path::PathBuf;

use serde_json::json;

use super::DataError;
use super::text_memory::{TextError, check_bytes};
use super::token_storage::TokenWidth;
use crate::DatasetContext;

pub use huggingface::{HfTokenizer, MAX_TOKENIZER_BYTES};
pub use settings::{MAX_SETTINGS_BYTES, SETTINGS_FILES, settings_beside, settings_files};

/// Memory estimates: bytes per byte of the tokenizer file while loading, and bytes per thread while tokenizing (cached
/// words, texts, ids). GPT-2's tokenizer takes 54 MiB in total with two threads, from a 2 MiB file.
const BYTES_PER_FILE_BYTE: u64 = 20;
const BYTES_PER_THREAD: u64 = 8 << 20;

/// Bytes per byte of text that is encoded as characters or bytes, with offsets.
const BYTES_PER_TEXT_BYTE: u64 = 32;

fn thread_bytes() -> u64 {
    BYTES_PER_THREAD * rayon::current_num_threads() as u64
}

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSpec {
    /// Each distinct character of the dataset.
    Characters,
    /// Each byte.
    Bytes,
    /// Defined by this `tokenizer.json`.
    File(PathBuf),
}

impl TokenizerSpec {
    /// As [`TokenizerSpec::load`], if the memory budget covers the tokenizer and the text it works on.
    pub fn load_within_memory(&self, ctx: &DatasetContext) -> Result<Option<Tokenizer>, DataError> {
        if let TokenizerSpec::File(file) = self {
            let about = std::fs::metadata(file).map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => DataError::Tokenizer {
                    file: file.clone(),
                    problem: "there is no such file, and names of models are not looked up".into(),
                },
                _ => DataError::io(file)(error),
            })?;
            let bytes = about.len().min(MAX_TOKENIZER_BYTES);
            ctx.check_memory(file, BYTES_PER_FILE_BYTE * bytes + thread_bytes())?;
            let tokenizer = HfTokenizer::open_within(file, ctx.available_bytes())?;
            return Ok(Some(Tokenizer::HuggingFace(Box::new(tokenizer))));
        }
        self.load()
    }

    /// Loads the tokenizer; `None` for characters, whose vocabulary depends on the text.
    pub fn load(&self) -> Result<Option<Tokenizer>, DataError> {
        match self {
            TokenizerSpec::Characters => Ok(None),
            TokenizerSpec::Bytes => Ok(Some(Tokenizer::Bytes)),
            TokenizerSpec::File(file) => Ok(Some(Tokenizer::HuggingFace(Box::new(HfTokenizer::open(file)?)))),
        }
    }

    /// The part of the cache key that identifies the tokenizer.
    pub fn cache_settings(&self) -> String {
        format!("{self:?}")
    }
}

/// Which token separates documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Separator {
    /// The tokenizer's end-of-text token, if it has one.
    Auto,
    None,
    Token(String),
}

/// Converts text to ids.
pub enum Tokenizer {
    Characters(CharTokenizer),
    Bytes,
    HuggingFace(Box<HfTokenizer>),
}

/// Where a long text may be split such that the ids of the parts are the ids of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitRule {
    /// Between any two characters.
    Anywhere,
    /// Before a single space between two words, or after a single newline between two words.
    BeforeSpace,
    /// At a single space between two words. The space is dropped, because the tokenizer prepends one to the second
    /// part.
    AtSpace,
}

impl Tokenizer {
    /// Vocabulary size.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Characters(characters) => characters.vocabulary.len(),
            Tokenizer::Bytes => 256,
            Tokenizer::HuggingFace(json) => json.vocab(),
        }
    }

    pub fn width(&self) -> TokenWidth {
        TokenWidth::for_vocab(self.vocab())
    }

    pub fn split_rule(&self) -> SplitRule {
        match self {
            Tokenizer::Characters(_) | Tokenizer::Bytes => SplitRule::Anywhere,
            Tokenizer::HuggingFace(json) => json.split_rule(),
        }
    }

    /// Bytes of words that it may cache.
    pub fn cache_bytes(&self) -> u64 {
        if let Tokenizer::HuggingFace(_) = self { thread_bytes() } else { 0 }
    }

    /// Checks that encoding `text` takes at most `limit` bytes; `bypasses_word_encoder` if it is encoded with offsets
    /// or special tokens.
    pub fn check_memory(&self, text: &str, bypasses_word_encoder: bool, limit: u64) -> Result<(), TextError> {
        match self {
            Tokenizer::HuggingFace(json) => json.check_memory(text, bypasses_word_encoder, limit),
            _ => check_bytes("tokenizing it", BYTES_PER_TEXT_BYTE * text.len() as u64, limit),
        }
    }

    /// Appends the ids of `text`, or returns what cannot be encoded.
    pub fn encode(&self, text: &str, into: &mut Vec<u32>) -> Result<(), String> {
        match self {
            Tokenizer::Characters(characters) => characters.encode(text, into),
            Tokenizer::Bytes => {
                into.extend(text.bytes().map(u32::from));
                Ok(())
            }
            Tokenizer::HuggingFace(json) => json.encode(text, into),
        }
    }

    /// Appends the ids of `text`, each with its byte offset.
    pub fn encode_with_offsets(&self, text: &str, into: &mut Vec<(u32, usize)>) -> Result<(), String> {
        match self {
            Tokenizer::HuggingFace(json) => json.encode_with_offsets(text, into),
            Tokenizer::Bytes => {
                into.extend(text.bytes().enumerate().map(|(at, byte)| (byte.into(), at)));
                Ok(())
            }
            Tokenizer::Characters(characters) => {
                let mut ids = Vec::new();
                characters.encode(text, &mut ids)?;
                into.extend(ids.into_iter().zip(text.char_indices().map(|(at, _)| at)));
                Ok(())
            }
        }
    }

    /// The ids of `text` with the special tokens of a whole sample (such as `[CLS]` and `[SEP]`), and how many special
    /// tokens are at the end.
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<(Vec<u32>, usize), String> {
        match self {
            Tokenizer::HuggingFace(json) => json.encode_with_special_tokens(text),
            _ => {
                let mut ids = Vec::new();
                self.encode(text, &mut ids)?;
                Ok((ids, 0))
            }
        }
    }

    /// Decodes ids to text; incomplete characters become replacement characters.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Tokenizer::Characters(characters) => characters.decode(ids),
            Tokenizer::Bytes => {
                let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::HuggingFace(json) => json.decode(ids),
        }
    }

    /// Id of the separator token.
    pub fn separator(&self, requested: &Separator) -> Result<Option<u32>, DataError> {
        match (requested, self) {
            (Separator::None, _) | (Separator::Auto, Tokenizer::Characters(_) | Tokenizer::Bytes) => Ok(None),
            (Separator::Auto, Tokenizer::HuggingFace(json)) => Ok(json.eos_id()),
            (Separator::Token(text), _) => {
                let mut ids = Vec::new();
                let id = self.encode(text, &mut ids).ok().and_then(|()| match (self, &ids[..]) {
                    (Tokenizer::HuggingFace(json), _) => json.id(text),
                    (_, &[id]) => Some(id),
                    _ => None,
                });
                let wrong = || DataError::InvalidSetting {
                    name: "separator",
                    value: format!("`{text}`"),
                    expected: "expected a token of the vocabulary, \"auto\" or \"none\"",
                };
                id.map(Some).ok_or_else(wrong)
            }
        }
    }

    /// Text of the special token called "bos_token" or "eos_token" in templates; empty if there is none.
    pub fn special_token(&self, name: &str) -> String {
        match self {
            Tokenizer::HuggingFace(json) => json.special_token(name).unwrap_or_default(),
            _ => String::new(),
        }
    }
}

/// Character-level tokenizer: an id is an index into the sorted vocabulary.
#[derive(Clone, Debug)]
pub struct CharTokenizer {
    vocabulary: Vec<char>,
    ascii: Box<[u32; 128]>,
}

impl CharTokenizer {
    pub fn new(vocabulary: impl IntoIterator<Item = char>) -> Self {
        let mut vocabulary: Vec<char> = vocabulary.into_iter().collect();
        vocabulary.sort_unstable();
        vocabulary.dedup();
        let place = |c: usize| vocabulary.binary_search(&(c as u8 as char)).map_or(u32::MAX, |i| i as u32);
        Self { ascii: Box::new(std::array::from_fn(place)), vocabulary }
    }

    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    fn id(&self, character: char) -> Option<u32> {
        match self.ascii.get(character as usize) {
            Some(&id) => (id != u32::MAX).then_some(id),
            None => self.vocabulary.binary_search(&character).ok().map(|id| id as u32),
        }
    }

    fn encode(&self, text: &str, into: &mut Vec<u32>) -> Result<(), String> {
        into.reserve(text.len());
        for character in text.chars() {
            into.push(self.id(character).ok_or_else(|| format!("`{character}` has no token"))?);
        }
        Ok(())
    }

    fn decode(&self, ids: &[u32]) -> String {
        let character = |&id: &u32| self.vocabulary.get(id as usize).copied().unwrap_or('\u{fffd}');
        ids.iter().map(character).collect()
    }

    /// The vocabulary as a `tokenizer.json` for other tools and later jobs. It has no merges, so each character stays a
    /// token.
    pub fn to_json(&self) -> Vec<u8> {
        let places = self.vocabulary.iter().enumerate();
        let vocab: serde_json::Map<_, _> = places.map(|(id, c)| (c.to_string(), json!(id))).collect();
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "Fuse" },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": false, "vocab": vocab, "merges": [],
            },
        });
        file.to_string().into_bytes()
    }

    /// Reads what [`CharTokenizer::to_json`] wrote; `None` if it is something else. Unlike the library, it refuses
    /// characters that have no token.
    pub fn from_json(text: &[u8]) -> Option<Self> {
        let file: serde_json::Value = serde_json::from_slice(text).ok()?;
        let vocab = file["model"]["vocab"].as_object()?;
        let mut characters = Vec::with_capacity(vocab.len());
        for token in vocab.keys() {
            let mut all = token.chars();
            characters.push(all.next().filter(|_| all.next().is_none())?);
        }
        let own = Self::new(characters);
        let same = |(id, c): (usize, &char)| vocab.get(c.to_string().as_str()) == Some(&json!(id));
        own.vocabulary.iter().enumerate().all(same).then_some(own)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_tokenizer_that_is_no_file_is_named() {
        let error =
            TokenizerSpec::File("gpt2".into()).load_within_memory(&DatasetContext::default()).err().unwrap();
        assert!(error.to_string().starts_with("`gpt2` cannot be used as a tokenizer: there is no such file"));
        assert!(error.hint().unwrap().contains("tokenizer.json"));
    }

    #[test]
    fn characters_are_their_places_and_other_tools_can_read_them() {
        let characters = CharTokenizer::new("hello wörld".chars());
        assert_eq!(characters.vocabulary().iter().collect::<String>(), " dehlorwö");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, characters.to_json()).unwrap();
        let json = Tokenizer::HuggingFace(Box::new(HfTokenizer::open(&file).unwrap()));
        let own = Tokenizer::Characters(characters);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        own.encode("höwrld oe", &mut a).unwrap();
        json.encode("höwrld oe", &mut b).unwrap();
        assert_eq!((&a, json.vocab()), (&b, 9));
        assert_eq!((own.decode(&a), json.decode(&a)), ("höwrld oe".into(), "höwrld oe".into()));
        let text = std::fs::read(&file).unwrap();
        assert_eq!(
            CharTokenizer::from_json(&text).unwrap().vocabulary().iter().collect::<String>(),
            " dehlorwö"
        );
        let merged = String::from_utf8(text).unwrap().replace("\"h\":3", "\"hi\":3");
        assert!(CharTokenizer::from_json(merged.as_bytes()).is_none(), "a token of two characters");
        assert!(CharTokenizer::from_json(b"{}").is_none());
        assert_eq!(own.encode("x", &mut a).unwrap_err(), "`x` has no token");
        assert_eq!(own.separator(&Separator::Token("h".into())).unwrap(), Some(3));
        assert!(own.separator(&Separator::Token("he".into())).is_err());
        assert_eq!(Tokenizer::Bytes.separator(&Separator::Auto).unwrap(), None);
    }

    proptest! {
        #[test]
        fn text_comes_back(text in "\\PC{0,40}") {
            let own = CharTokenizer::new(text.chars());
            for tokenizer in [Tokenizer::Characters(own), Tokenizer::Bytes] {
                let (mut ids, mut places) = (Vec::new(), Vec::new());
                tokenizer.encode(&text, &mut ids).unwrap();
                tokenizer.encode_with_offsets(&text, &mut places).unwrap();
                prop_assert_eq!(tokenizer.decode(&ids), &text[..]);
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab()));
                prop_assert!(places.iter().map(|p| p.0).eq(ids));
                prop_assert!(places.iter().map(|p| p.1).is_sorted());
            }
        }
    }
}
