//! Loads a `tokenizer.json` saved by Hugging Face's `tokenizers`.

use std::{collections::BTreeMap, fmt::Display, path::Path, sync::Arc};

use serde_json::{Value, json};
use tokenizers::utils::SysRegex;
use tokenizers::{Model, Tokenizer};

use super::SplitRule;
use super::limits::TokenizerLimits;
use super::pre_tokenizer::{PreTokenizer, WordCache, encode_cached};
use super::settings::settings_beside;
use crate::DataError;
use crate::base::panics::catch_panic;
use crate::base::regular_file;
use crate::language::text_memory::{TextError, check_bytes, json_bytes};

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
    /// What the files beside it say, or null.
    config: Value,
}

/// Bytes per byte of text that is encoded word by word: its ids; and per byte of its longest word: symbols, merges and
/// tokens. Measured with GPT-2's tokenizer on a text without spaces: 109 bytes per byte.
const BYTES_PER_BYTE: u64 = 16;
const BYTES_PER_WORD_BYTE: u64 = 128;

impl HfTokenizer {
    /// Opens a file of any size up to [`MAX_TOKENIZER_BYTES`].
    pub fn open(file: &Path) -> Result<Self, DataError> {
        Self::open_within(file, u64::MAX)
    }

    /// Opens a file whose parsed form takes at most `limit` bytes.
    pub fn open_within(file: &Path, limit: u64) -> Result<Self, DataError> {
        let wrong = |problem: String| DataError::Tokenizer { file: file.to_owned(), problem };
        let text = regular_file::read(file, MAX_TOKENIZER_BYTES).map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge => {
                wrong(format!("it has more than {MAX_TOKENIZER_BYTES} bytes"))
            }
            _ => DataError::io(file)(error),
        })?;
        let bytes = json_bytes(&text);
        if bytes > limit {
            return Err(DataError::PrepareMemory { what: file.to_owned(), bytes, limit });
        }
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
        let text = serde_json::to_string(&value).map_err(|error| wrong(error.to_string()))?;
        drop(value);
        // `parse` is compiled in the library; `from_bytes` would be instantiated here, with all that it reads.
        let inner = catch_library_error(|| text.parse::<Tokenizer>()).map_err(wrong)?;
        let ids = inner.get_vocab(true);
        let Some(last) = ids.values().max() else { return Err(wrong("its vocabulary is empty".into())) };
        let no_token_spans_words = || ids.keys().all(|token| begins_words(token));
        let rule = rule.filter(|rule| !matches!(rule, PreTokenizer::Metaspace) || no_token_spans_words());
        let vocab = *last as usize + 1;
        if vocab > 1 << 24 {
            return Err(wrong(format!("the token id {last} is too large")));
        }
        let mut json = Self {
            special_tokens: BTreeMap::new(),
            config: settings_beside(file),
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

    /// Checks that encoding `text` takes at most `limit` bytes; `bypasses_word_encoder` if it is encoded with offsets
    /// or special tokens.
    pub fn check_memory(&self, text: &str, bypasses_word_encoder: bool, limit: u64) -> Result<(), TextError> {
        let bytes = match &self.word_encoder {
            Some((rule, _)) if !bypasses_word_encoder => {
                let len = text.len() as u64;
                // Splitting the text to find its longest word takes time, and nearly every text is short enough.
                if len * (BYTES_PER_BYTE + BYTES_PER_WORD_BYTE) <= limit {
                    return Ok(());
                }
                let mut longest = 0;
                let measure = |word: &str| {
                    longest = longest.max(word.len() as u64);
                    Ok::<_, String>(())
                };
                rule.split_words(text, measure)?;
                BYTES_PER_BYTE * len + BYTES_PER_WORD_BYTE * longest
            }
            _ => {
                catch_library_error(|| Ok::<_, String>(self.limits.encoding_bytes(&self.inner, text, limit)))?
            }
        };
        check_bytes("tokenizing it", bytes, limit)
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

    /// The text of `ids`; a text that is too long to be shown ends early.
    pub fn decode(&self, ids: &[u32]) -> String {
        let lens = ids.iter().map(|id| self.inner.id_to_token(*id).map_or(0, |token| token.len()));
        let ids = &ids[..self.limits.decodable(lens)];
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
        Err(_) => Err("it is inconsistent: the library panicked".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;
    use crate::published_dataset;

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
        let regex = concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
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
        for (text, expected) in [("[1, 2]", "no `model`"), ("{", "EOF"), ("{\"model\": {}}", "")] {
            let error = opened(text.as_bytes()).err().unwrap().to_string();
            assert!(error.contains("cannot be used as a tokenizer") && error.contains(expected), "{error}");
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
        for (key, part, expected) in [
            ("normalizer", doubling(40), "more than 1024 times"),
            ("normalizer", replace(&"a".repeat(10_000)), "a replacement of 10000 bytes"),
            ("decoder", json!({ "type": "Sequence", "decoders": vec![replace("aa"); 40] }), "1024 times"),
            (
                "post_processor",
                json!({ "type": "TemplateProcessing", "pair": [], "special_tokens": {},
                        "single": vec![json!({ "Sequence": { "id": "A", "type_id": 0 } }); 1000] }),
                "tokens to a sample",
            ),
            (
                "model",
                json!({ "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                        "max_input_chars_per_word": 1_000_000_000, "vocab": { "a": 0 } }),
                "`max_input_chars_per_word` is above 1000",
            ),
        ] {
            let error = with(key, part).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
        // A text that could grow by a factor of 256 is checked before it is encoded; a text that does not grow passes.
        let grows = with("normalizer", doubling(8)).unwrap();
        let error = grows.encode_with_special_tokens(&"a".repeat(100_000)).unwrap_err();
        assert!(error.contains("expands it more than 4 times"), "{error}");
        assert_eq!(grows.encode_with_special_tokens(&"b".repeat(100_000)).unwrap().0.len(), 100_000);
        assert_eq!(grows.encode_with_special_tokens("ab").unwrap().0.len(), 256);
    }

    /// The limit is of memory, so that a text is refused for what encoding it takes: long words, or normalization.
    #[test]
    fn a_text_is_encoded_within_the_memory_that_is_left() {
        let json = opened(tiny().to_string().as_bytes()).unwrap();
        assert!(json.word_encoder.is_some());
        let (words, word) = ("ab ".repeat(100_000), "ab".repeat(150_000));
        let limit = 20 * words.len() as u64;
        let refused = Err(TextError::Memory { what: "tokenizing it", limit });
        assert_eq!(json.check_memory(&words, false, limit), Ok(()));
        assert_eq!(json.check_memory(&word, false, limit), refused);
        assert_eq!(json.check_memory(&words, true, limit), refused, "offsets take more than ids");
        assert_eq!(json.check_memory(&word, true, 200 * word.len() as u64), Ok(()));
        // The normalizer may make twelve bytes of one, but does not here.
        let mut file = tiny();
        file["normalizer"] = json!({ "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                                     "strip_accents": null, "lowercase": true });
        let json = opened(file.to_string().as_bytes()).unwrap();
        assert_eq!(json.check_memory(&words, false, 200 * words.len() as u64), Ok(()));
        assert!(json.check_memory(&words, false, 100 * words.len() as u64).is_err());
        // Parsing the file takes memory, too.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut file = tiny();
        // A key that is not used: the library gets the file without it.
        file["truncation"] = json!(vec![0; 100_000]);
        fs::write(&path, file.to_string()).unwrap();
        assert!(HfTokenizer::open_within(&path, 100 << 20).is_ok());
        assert!(HfTokenizer::open_within(&path, 4 << 20).is_err_and(|error| error.is_out_of_memory()));
    }

    /// Shown texts have a bound, however long tokens are and whatever the decoder makes of them.
    #[test]
    fn decoding_is_bounded() {
        let mut file = tiny();
        let replace = json!({ "type": "Replace", "pattern": { "String": "a" }, "content": "a".repeat(200) });
        file["decoder"] = replace;
        let json = opened(file.to_string().as_bytes()).unwrap();
        assert_eq!(json.decode(&[0, 0]).trim(), "a".repeat(400));
        assert!(json.decode(&vec![0; 1 << 20]).len() <= 16 << 20);
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
