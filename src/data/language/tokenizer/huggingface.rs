//! Loads a `tokenizer.json` saved by Hugging Face's `tokenizers`.

use std::{collections::BTreeMap, fmt::Display, path::Path, sync::Arc};

use serde_json::{Value, json};
use tokenizers::utils::SysRegex;
use tokenizers::{Model, Tokenizer};

use super::SplitRule;
use super::limits::TokenizerLimits;
use super::pre_tokenizer::{PreTokenizer, WordCache, encode_cached};
use crate::base::panics::catch_panic;
use crate::base::regular_file;
use crate::data::DataError;

/// Maximum file size. No published tokenizer comes close; a larger file is something else.
pub const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// End-of-text tokens of well-known vocabularies, and beginning-of-text tokens.
const EOS_TOKENS: [&str; 6] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]"];
const BOS_TOKENS: [&str; 4] = ["<s>", "<|begin_of_text|>", "<bos>", "<|startoftext|>"];

pub struct HfTokenizer {
    inner: Arc<Tokenizer>,
    limits: TokenizerLimits,
    vocab: usize,
    split_rule: SplitRule,
    /// Present if text can be encoded word by word.
    word_encoder: Option<(PreTokenizer, WordCache)>,
    /// Special tokens as text, keyed by their first byte, longest first.
    special_tokens: BTreeMap<u8, Vec<(String, u32)>>,
    /// `tokenizer_config.json` beside it, or null.
    config: Value,
}

impl HfTokenizer {
    pub fn open(file: &Path) -> Result<Self, DataError> {
        let wrong = |problem: String| DataError::Tokenizer { file: file.to_owned(), problem };
        let text = regular_file::read(file, MAX_TOKENIZER_BYTES).map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge => {
                wrong(format!("it has over {MAX_TOKENIZER_BYTES} bytes, and no tokenizer has as many"))
            }
            _ => DataError::io(file)(error),
        })?;
        let mut value: Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if !value["model"].is_object() {
            return Err(wrong("it has no `model`".into()));
        }
        // The dataset is tokenized once and whole: disable truncation, padding and dropout.
        for key in ["truncation", "padding"] {
            value[key] = Value::Null;
        }
        if value["model"].get("dropout").is_some() {
            value["model"]["dropout"] = Value::Null;
        }
        let limits = TokenizerLimits::of(&value).map_err(wrong)?;
        let rule = detect_pre_tokenizer(&value);
        let text = serde_json::to_vec(&value).map_err(|error| wrong(error.to_string()))?;
        drop(value);
        let inner = catch_library_error(|| Tokenizer::from_bytes(&text)).map_err(wrong)?;
        let ids = inner.get_vocab(true);
        let Some(last) = ids.values().max() else { return Err(wrong("its vocabulary is empty".into())) };
        let no_token_spans_words = || ids.keys().all(|token| begins_words(token));
        let rule = rule.filter(|rule| !matches!(rule, PreTokenizer::Metaspace) || no_token_spans_words());
        let vocab = *last as usize + 1;
        if vocab > 1 << 24 {
            return Err(wrong(format!("it has a token with the number {last}")));
        }
        let mut json = Self {
            special_tokens: BTreeMap::new(),
            config: load_config(file),
            vocab,
            split_rule: SplitRule::BeforeSpace,
            word_encoder: None,
            inner: Arc::new(inner),
            limits,
        };
        json.word_encoder = json.collect_special_tokens().and(rule).map(|rule| (rule, WordCache::new()));
        json.split_rule = json.detect_split_rule();
        Ok(json)
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub fn split_rule(&self) -> SplitRule {
        self.split_rule
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Id of the end-of-text token: from `tokenizer_config.json`, or a well-known token.
    pub fn eos_id(&self) -> Option<u32> {
        self.special_token("eos_token").and_then(|token| self.id(&token))
    }

    /// Text of "bos_token" or "eos_token".
    pub fn special_token(&self, name: &str) -> Option<String> {
        let configured = &self.config[name];
        let configured = configured
            .as_str()
            .or_else(|| configured["content"].as_str())
            .filter(|token| self.id(token).is_some());
        let known: &[&str] = if name == "bos_token" { &BOS_TOKENS } else { &EOS_TOKENS };
        configured.or_else(|| known.iter().copied().find(|token| self.id(token).is_some())).map(str::to_owned)
    }

    /// Chat template published with the tokenizer.
    pub fn chat_template(&self) -> Option<String> {
        self.config["chat_template"].as_str().map(str::to_owned)
    }

    pub fn encode(&self, text: &str, into: &mut Vec<u32>) -> Result<(), String> {
        let Some((rule, memory)) = &self.word_encoder else {
            let encode =
                |inner: &Tokenizer, text: &str| catch_library_error(|| inner.encode_fast(text, false));
            into.extend_from_slice(self.limits.run_with_timeout(&self.inner, text, encode)?.get_ids());
            return Ok(());
        };
        let deadline = self.limits.deadline();
        memory.with(|known| {
            let make = |word: &str| {
                deadline.check()?;
                let tokens =
                    catch_library_error(|| self.inner.get_model().tokenize(&rule.model_input(word)))?;
                Ok::<_, String>(tokens.into_iter().map(|token| token.id).collect())
            };
            let mut rest = text;
            loop {
                let special = self.next_special_token(rest);
                let plain = special.map_or(rest, |(at, ..)| &rest[..at]);
                rule.split_words(plain, |word| encode_cached(known, word, into, make))?;
                let Some((at, len, id)) = special else { return Ok(()) };
                into.push(id);
                rest = &rest[at + len..];
            }
        })
    }

    pub fn encode_with_offsets(&self, text: &str, into: &mut Vec<(u32, usize)>) -> Result<(), String> {
        let encode = |inner: &Tokenizer, text: &str| catch_library_error(|| inner.encode(text, false));
        let encoding = self.limits.run_with_timeout(&self.inner, text, encode)?;
        let offsets = encoding.get_offsets().iter().map(|(start, _)| *start);
        into.extend(encoding.get_ids().iter().copied().zip(offsets));
        Ok(())
    }

    pub fn encode_with_special_tokens(&self, text: &str) -> Result<(Vec<u32>, usize), String> {
        let encode = |inner: &Tokenizer, text: &str| catch_library_error(|| inner.encode_fast(text, true));
        let encoding = self.limits.run_with_timeout(&self.inner, text, encode)?;
        let mask = encoding.get_special_tokens_mask();
        let after = mask.iter().rev().take_while(|&&special| special == 1).count();
        Ok((encoding.get_ids().to_vec(), after))
    }

    pub fn decode(&self, ids: &[u32]) -> String {
        catch_library_error(|| self.inner.decode(ids, false)).unwrap_or_default()
    }

    /// First special token in `text`: (offset, length, id).
    fn next_special_token(&self, text: &str) -> Option<(usize, usize, u32)> {
        let bytes = text.as_bytes();
        let here = |at: usize| {
            let tokens = self.special_tokens.get(&bytes[at])?;
            let found = tokens.iter().find(|(token, _)| bytes[at..].starts_with(token.as_bytes()))?;
            Some((at, found.0.len(), found.1))
        };
        // Search lazily: a text may be full of special tokens, and the caller wants only the first.
        let firsts: Vec<u8> = self.special_tokens.keys().copied().collect();
        match firsts[..] {
            [] => None,
            [a] => memchr::memchr_iter(a, bytes).find_map(here),
            [a, b] => memchr::memchr2_iter(a, b, bytes).find_map(here),
            [a, b, c] => memchr::memchr3_iter(a, b, c, bytes).find_map(here),
            _ => (0..bytes.len()).find_map(here),
        }
    }

    /// Collects the special tokens; `None` if one does more than match its literal text.
    fn collect_special_tokens(&mut self) -> Option<()> {
        /// With more special tokens, the library's multi-pattern search is the better choice.
        const MAX_SPECIAL_TOKENS: usize = 4096;
        let added = self.inner.get_added_tokens_decoder();
        if added.len() > MAX_SPECIAL_TOKENS {
            return None;
        }
        for (id, token) in added {
            if token.single_word || token.lstrip || token.rstrip || token.normalized {
                return None;
            }
            let first = *token.content.as_bytes().first()?;
            self.special_tokens.entry(first).or_default().push((token.content, id));
        }
        for tokens in self.special_tokens.values_mut() {
            tokens.sort_by_key(|(token, _)| std::cmp::Reverse(token.len()));
        }
        Some(())
    }

    /// Detects by experiment where text can be split.
    fn detect_split_rule(&self) -> SplitRule {
        const PROBES: [[&str; 2]; 4] =
            [["alpha", "beta"], ["One.", "Two"], ["x, y", "(z) 12"], ["über", "3 + \"four\""]];
        let ids = |text: &str| {
            let mut ids = Vec::new();
            // `None`, an encoding failure, equals no list of ids.
            self.encode(text, &mut ids).is_ok().then_some(ids)
        };
        let agrees = |second: fn(&str) -> String| {
            PROBES.iter().all(|[a, b]| {
                let parts = ids(a).zip(ids(&second(b)));
                parts.map(|(a, b)| [a, b].concat()) == ids(&format!("{a} {b}"))
            })
        };
        match agrees(|b| format!(" {b}")) {
            true => SplitRule::BeforeSpace,
            false if agrees(str::to_owned) => SplitRule::AtSpace,
            false => SplitRule::BeforeSpace,
        }
    }
}

/// Settings published beside the tokenizer; an unreadable file is treated as absent.
fn load_config(file: &Path) -> Value {
    let text = regular_file::read(&file.with_file_name("tokenizer_config.json"), 16 << 20);
    text.ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or(Value::Null)
}

/// Whether the token, in a vocabulary that marks word starts with `▁`, stays within one word.
fn begins_words(token: &str) -> bool {
    !token.trim_start_matches('\u{2581}').contains('\u{2581}')
}

/// Pre-tokenizer for word-by-word encoding, if the tokenizer belongs to a supported family.
fn detect_pre_tokenizer(file: &Value) -> Option<PreTokenizer> {
    let (model, before, normal) = (&file["model"], &file["pre_tokenizer"], &file["normalizer"]);
    let plain = |key: &str| model[key].as_str().unwrap_or("").is_empty();
    if model["type"] != "BPE" || !plain("continuing_subword_prefix") || !plain("end_of_word_suffix") {
        return None;
    }
    let bytes = |part: &Value, by_pattern: bool| {
        part["type"] == "ByteLevel"
            && part["add_prefix_space"] == false
            && part["use_regex"].as_bool().unwrap_or(true) == by_pattern
    };
    if normal.is_null() && bytes(before, true) {
        return Some(PreTokenizer::Gpt2);
    }
    if let Some([split, then]) = before["pretokenizers"].as_array().map(Vec::as_slice)
        && normal.is_null()
        && bytes(then, false)
        && split["type"] == "Split"
        && split["behavior"] == "Isolated"
        && split["invert"] == false
    {
        return split["pattern"]["Regex"]
            .as_str()
            .and_then(|regex| SysRegex::new(regex).ok())
            .map(PreTokenizer::Pattern);
    }
    let spaces = json!({ "type": "Sequence", "normalizers": [
        { "type": "Prepend", "prepend": "\u{2581}" },
        { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
    ] });
    (before.is_null() && *normal == spaces).then_some(PreTokenizer::Metaspace)
}

/// Calls the library on untrusted input; turns an error or a panic into a message.
fn catch_library_error<T, E: Display>(body: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_panic(body) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("it contradicts itself".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::data::published_dataset;

    fn open(name: &str) -> Option<HfTokenizer> {
        Some(HfTokenizer::open(&published_dataset("tokenizers")?.join(name).join("tokenizer.json")).unwrap())
    }

    fn ids(json: &HfTokenizer, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        json.encode(text, &mut ids).unwrap();
        ids
    }

    #[test]
    fn published_tokenizers_are_read_as_published() {
        let (Some(gpt2), Some(llama)) = (open("gpt2"), open("llama2")) else { return };
        assert_eq!(
            (gpt2.vocab(), gpt2.eos_id(), gpt2.split_rule()),
            (50_257, Some(50_256), SplitRule::BeforeSpace)
        );
        assert_eq!(
            (llama.vocab(), llama.eos_id(), llama.split_rule()),
            (32_000, Some(2), SplitRule::AtSpace)
        );
        assert!(gpt2.word_encoder.is_some() && llama.word_encoder.is_some());
        assert_eq!(ids(&gpt2, "Hello world<|endoftext|>!"), [15496, 995, 50256, 0]);
        assert_eq!(ids(&llama, "Hello world"), [15043, 3186]);
        assert_eq!(llama.special_token("bos_token").as_deref(), Some("<s>"));
    }

    /// GPT-2's vocabulary with Llama 3's pre-tokenizer pattern.
    fn by_a_pattern_of_its_own() -> Option<HfTokenizer> {
        let file = published_dataset("tokenizers")?.join("gpt2/tokenizer.json");
        let mut value: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        value["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
        ] });
        Some(opened(value.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn words_one_by_one_are_the_text_as_a_whole() {
        let (Some(gpt2), Some(llama)) = (open("gpt2"), open("llama2")) else { return };
        let third = by_a_pattern_of_its_own().unwrap();
        assert!(matches!(&third.word_encoder, Some((PreTokenizer::Pattern(_), _))));
        let texts = "[a-zA-Z0-9 \n\t.,'!éßжя中文½\u{300}\u{a0}\u{1f600}]{0,80}";
        let strategy = (texts, prop_oneof![Just(""), Just("<|endoftext|>"), Just("</s>"), Just("<s")], texts);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(200));
        runner
            .run(&strategy, |(a, special, b)| {
                let text = format!("{a}{special}{b}");
                for json in [&gpt2, &llama, &third] {
                    let whole = json.inner.encode(&*text, false).unwrap();
                    prop_assert_eq!(ids(json, &text), whole.get_ids(), "{:?}", text);
                    let (mut places, mut last) = (Vec::new(), 0);
                    json.encode_with_offsets(&text, &mut places).unwrap();
                    prop_assert!(places.iter().map(|p| p.0).eq(ids(json, &text)));
                    for (_, at) in places {
                        prop_assert!(at >= last && at <= text.len());
                        last = at;
                    }
                }
                prop_assert_eq!(gpt2.decode(&ids(&gpt2, &text)), &*text);
                if special.is_empty() {
                    prop_assert_eq!(llama.decode(&ids(&llama, &text)), &*text);
                }
                Ok(())
            })
            .unwrap();
    }

    fn tiny() -> Value {
        json!({
            "version": "1.0", "truncation": null, "padding": { "strategy": { "Fixed": 9 }, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a" },
            "added_tokens": [{ "id": 3, "content": "<eos>", "single_word": false, "lstrip": false,
                               "rstrip": false, "normalized": false, "special": true }],
            "normalizer": null, "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false,
            "trim_offsets": true, "use_regex": true }, "post_processor": null, "decoder": { "type": "ByteLevel",
            "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "BPE", "dropout": 0.5, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": { "a": 0, "b": 1, "ab": 2 }, "merges": [["a", "b"]] },
        })
    }

    fn opened(text: &[u8]) -> Result<HfTokenizer, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        fs::write(&file, text).unwrap();
        HfTokenizer::open(&file)
    }

    #[test]
    fn encoding_is_deterministic_and_invalid_files_say_why() {
        let json = opened(tiny().to_string().as_bytes()).unwrap();
        for _ in 0..20 {
            assert_eq!(ids(&json, "abba<eos>"), [2, 1, 0, 3], "no dropout, no padding");
        }
        assert_eq!(json.eos_id(), Some(3));
        for (text, wanted) in [("[1, 2]", "no `model`"), ("{", "EOF"), ("{\"model\": {}}", "")] {
            let error = opened(text.as_bytes()).err().unwrap().to_string();
            assert!(error.contains("cannot be used as a tokenizer") && error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn files_that_ask_for_too_much_are_refused() {
        let with = |key: &str, part: Value| {
            let mut file = tiny();
            file[key] = part;
            opened(file.to_string().as_bytes())
        };
        let replace = |by: &str| json!({ "type": "Replace", "pattern": { "String": "a" }, "content": by });
        let doubling = |n: usize| json!({ "type": "Sequence", "normalizers": vec![replace("aa"); n] });
        for (key, part, wanted) in [
            ("normalizer", doubling(40), "1024 times as long"),
            ("normalizer", replace(&"a".repeat(10_000)), "10000 bytes in the place of others"),
            ("decoder", json!({ "type": "Sequence", "decoders": vec![replace("aa"); 40] }), "1024 times"),
            (
                "post_processor",
                json!({ "type": "TemplateProcessing", "pair": [], "special_tokens": {},
                        "single": vec![json!({ "Sequence": { "id": "A", "type_id": 0 } }); 1000] }),
                "around a sample",
            ),
            (
                "model",
                json!({ "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                        "max_input_chars_per_word": 1_000_000_000, "vocab": { "a": 0 } }),
                "`max_input_chars_per_word` is above 1000",
            ),
        ] {
            let error = with(key, part).err().unwrap().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        // A text that could grow by a factor of 256 is checked before it is encoded; a text that does not grow passes.
        let grows = with("normalizer", doubling(8)).unwrap();
        let error = grows.encode_with_special_tokens(&"a".repeat(100_000)).unwrap_err();
        assert!(error.contains("more than 4 times as long"), "{error}");
        assert_eq!(grows.encode_with_special_tokens(&"b".repeat(100_000)).unwrap().0.len(), 100_000);
        assert_eq!(grows.encode_with_special_tokens("ab").unwrap().0.len(), 256);
    }

    #[test]
    fn patterns_that_may_take_long_run_on_a_thread_that_can_be_left() {
        let mut file = tiny();
        file["normalizer"] =
            json!({ "type": "Replace", "pattern": { "Regex": "(a+)+(?=c)" }, "content": "b" });
        let json = opened(file.to_string().as_bytes()).unwrap();
        assert_eq!(ids(&json, &"b".repeat(5000)), vec![1; 5000]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// A corrupt file is refused or works; it never aborts the program.
        #[test]
        fn corrupt_files_are_refused(at in 0.0..1.0f64, byte: u8, cut in 0.0..1.0f64, how in 0..3) {
            let mut text = tiny().to_string().into_bytes();
            let place = (at * text.len() as f64) as usize;
            match how {
                0 => text[place] = byte,
                1 => text.truncate((cut * text.len() as f64) as usize),
                _ => drop(text.drain(place..(place + 7).min(text.len()))),
            }
            if let Ok(json) = opened(&text) {
                let mut ids = Vec::new();
                drop(json.encode("ab ba<eos>", &mut ids));
                json.decode(&[0, 1, 2, 3, 4, u32::MAX]);
                drop(json.encode_with_special_tokens("ab"));
            }
        }
    }
}
