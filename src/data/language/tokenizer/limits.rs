//! Bounds what a `tokenizer.json` can do to a text, and how long it may take.
//!
//! The file defines how text is normalized before it is split into tokens, and a malicious one can turn a letter into a
//! gigabyte. The library has no limits of its own. Files that exceed a limit are refused when they are opened, and a
//! text that the normalizer could make much longer is first normalized in small pieces. What encoding a text takes is
//! estimated from its normalized length, so that it can be compared with the memory that is left.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

/// Maximum bytes of a token, and maximum characters of a word that WordPiece searches.
const MAX_TOKEN_BYTES: usize = 4096;
const MAX_WORD_CHARS: u64 = 1000;

/// Maximum bytes of a replacement string, and the maximum growth factor of one byte over all steps.
const MAX_REPLACEMENT_BYTES: usize = 256;
const MAX_GROWTH: f64 = 1024.0;

/// Maximum special tokens added around a sample.
const MAX_TEMPLATE_TOKENS: usize = 64;

/// A text that cannot grow beyond this many bytes is not checked.
const UNCHECKED_BYTES: f64 = (1 << 20) as f64;
/// A checked text may grow by this factor, plus this many bytes.
const ALLOWED_GROWTH: usize = 4;
const ALLOWED_EXTRA_BYTES: usize = 1 << 16;
/// Bytes normalized at a time during the check.
const CHECK_PIECE_BYTES: usize = 1 << 12;

/// Bytes that the library takes to encode a text, per byte of the pre-tokenized text: alignments, words, tokens and
/// their offsets. Measured with GPT-2's tokenizer, which makes up to two bytes of one: 180 bytes per byte of text.
const BYTES_PER_BYTE: f64 = 96.0;
/// Growth by the pre-tokenizer that the measurement above includes.
const MEASURED_GROWTH: f64 = 2.0;

/// Maximum bytes that decoding ids for display may produce.
const MAX_DECODED_BYTES: f64 = (16 << 20) as f64;

/// Time limit for one text if a pattern can backtrack; no published tokenizer comes close.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Texts up to this length run without a time limit: the library stops a match after a million steps.
const UNTIMED_BYTES: usize = 1 << 10;

/// Limits of one tokenizer file.
pub struct TokenizerLimits {
    /// Maximum number of bytes that one byte can become, by the normalizer, the pre-tokenizer and the decoder.
    normalizer_growth: f64,
    pre_tokenizer_growth: f64,
    decoder_growth: f64,
    /// Whether a pattern can backtrack, which can take exponential time.
    backtracks: bool,
}

impl TokenizerLimits {
    /// Derives the limits of a file, or returns which limit it exceeds.
    pub fn of(file: &Value) -> Result<Self, String> {
        let [normalizer_growth, pre_tokenizer_growth, decoder_growth] =
            [growth(&file["normalizer"])?, growth(&file["pre_tokenizer"])?, growth(&file["decoder"])?];
        if decoder_growth.max(normalizer_growth * pre_tokenizer_growth) > MAX_GROWTH {
            return Err(format!("it can expand a byte more than {MAX_GROWTH} times"));
        }
        let model = &file["model"];
        if model["max_input_chars_per_word"].as_u64().is_some_and(|most| most > MAX_WORD_CHARS) {
            return Err(format!("its `max_input_chars_per_word` is above {MAX_WORD_CHARS}"));
        }
        let tokens = model["vocab"].as_object().into_iter().flat_map(|vocab| vocab.keys());
        let pieces = model["vocab"].as_array().into_iter().flatten().filter_map(|piece| piece[0].as_str());
        if tokens.map(String::as_str).chain(pieces).any(|token| token.len() > MAX_TOKEN_BYTES) {
            return Err(format!("it has a token of more than {MAX_TOKEN_BYTES} bytes"));
        }
        if template_len(&file["post_processor"]) > MAX_TEMPLATE_TOKENS {
            return Err(format!("it adds more than {MAX_TEMPLATE_TOKENS} tokens to a sample"));
        }
        Ok(Self {
            normalizer_growth,
            pre_tokenizer_growth,
            decoder_growth,
            backtracks: backtracks(&file["normalizer"]) || backtracks(&file["pre_tokenizer"]),
        })
    }

    /// Refuses a text that the normalizer makes too long.
    pub fn check(&self, tokenizer: &Tokenizer, text: &str) -> Result<(), String> {
        if text.len() as f64 * self.normalizer_growth * self.pre_tokenizer_growth <= UNCHECKED_BYTES {
            return Ok(());
        }
        normalized_len(tokenizer, text).map(drop)
    }

    /// Bytes that the library takes at most to encode `text`. Normalizes it, in pieces, only if the estimate without
    /// that is above `limit`.
    pub fn encoding_bytes(&self, tokenizer: &Tokenizer, text: &str, limit: u64) -> u64 {
        let growth = self.pre_tokenizer_growth.max(MEASURED_GROWTH);
        let bytes = |normalized: f64| (BYTES_PER_BYTE * growth * normalized.max(text.len() as f64)) as u64;
        match bytes(text.len() as f64 * self.normalizer_growth) {
            most if most <= limit => most,
            most => normalized_len(tokenizer, text).map_or(most, |normalized| bytes(normalized as f64)),
        }
    }

    /// How many of the first ids, whose tokens have these lengths, can be decoded for display.
    pub fn decodable(&self, token_lens: impl Iterator<Item = usize>) -> usize {
        let mut bytes = 0.0;
        let fits = |len: &usize| {
            bytes += *len as f64 * self.decoder_growth;
            bytes <= MAX_DECODED_BYTES
        };
        token_lens.take_while(fits).count()
    }

    /// Time limit for splitting a text by the file's pattern.
    pub fn deadline(&self) -> Deadline {
        Deadline(self.backtracks.then(|| Instant::now() + TIMEOUT))
    }

    /// Runs `body` with a time limit. A thread that exceeds it cannot be stopped; it is left running and the caller
    /// gets an error.
    pub fn run_with_timeout<T: Send + 'static>(
        &self,
        tokenizer: &Arc<Tokenizer>,
        text: &str,
        body: fn(&Tokenizer, &str) -> Result<T, String>,
    ) -> Result<T, String> {
        self.check(tokenizer, text)?;
        if !self.backtracks || text.len() <= UNTIMED_BYTES {
            return body(tokenizer, text);
        }
        let (sender, receiver) = channel();
        let (tokenizer, text) = (tokenizer.clone(), text.to_owned());
        // `send` fails only after the timeout, when the receiver is gone.
        let run = move || drop(sender.send(body(&tokenizer, &text)));
        let started = std::thread::Builder::new().name("tokenizer".into()).spawn(run);
        started.map_err(|error| format!("cannot start a thread: {error}"))?;
        match receiver.recv_timeout(TIMEOUT) {
            Ok(done) => done,
            Err(RecvTimeoutError::Timeout) => Err(timeout_message()),
            Err(RecvTimeoutError::Disconnected) => Err("it is inconsistent: the library panicked".into()),
        }
    }
}

/// Length of `text` after the normalizer, which works on small pieces; refuses a text that it makes too long.
fn normalized_len(tokenizer: &Tokenizer, text: &str) -> Result<usize, String> {
    let Some(normalizer) = tokenizer.get_normalizer() else { return Ok(text.len()) };
    let mut steps = Vec::new();
    flatten(normalizer, &mut steps);
    let (mut rest, mut all) = (text, 0);
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(CHECK_PIECE_BYTES.min(rest.len())));
        rest = after;
        let mut piece = NormalizedString::from(piece);
        for step in &steps {
            step.normalize(&mut piece).map_err(|error| error.to_string())?;
            if all + piece.get().len() > ALLOWED_GROWTH * text.len() + ALLOWED_EXTRA_BYTES {
                return Err(format!("its normalizer expands it more than {ALLOWED_GROWTH} times"));
            }
        }
        all += piece.get().len();
    }
    Ok(all)
}

/// Deadline for one text; none if no pattern backtracks.
#[derive(Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    pub fn check(self) -> Result<(), String> {
        match self.0 {
            Some(end) if Instant::now() > end => Err(timeout_message()),
            _ => Ok(()),
        }
    }
}

fn timeout_message() -> String {
    format!("tokenizing it takes more than {} seconds", TIMEOUT.as_secs())
}

fn flatten<'a>(step: &'a NormalizerWrapper, into: &mut Vec<&'a NormalizerWrapper>) {
    match step {
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().for_each(|step| flatten(step, into)),
        step => into.push(step),
    }
}

/// Sub-steps of a sequence step.
fn sub_steps(step: &Value) -> impl Iterator<Item = &Value> {
    let lists = ["normalizers", "pretokenizers", "decoders", "processors"].map(|key| &step[key]);
    lists.into_iter().filter_map(Value::as_array).flatten()
}

/// Maximum growth factor of one byte by a step, from the Unicode tables and the step's own strings.
fn growth(step: &Value) -> Result<f64, String> {
    let text = |key: &str| step[key].as_str().unwrap_or_default();
    let long = |bytes: usize| match bytes <= MAX_REPLACEMENT_BYTES {
        true => Ok(bytes),
        false => {
            Err(format!("a replacement of {bytes} bytes is longer than the limit of {MAX_REPLACEMENT_BYTES}"))
        }
    };
    let own = match text("type") {
        "NFC" | "NFD" => 3.0,
        "NFKC" | "NFKD" => 11.0,
        "Lowercase" | "ByteLevel" => 2.0,
        "BertNormalizer" => 12.0,
        "Prepend" => 1.0 + long(text("prepend").len())? as f64,
        "Metaspace" => 1.0 + long(text("replacement").len())? as f64,
        "Precompiled" => long(longest_string(text("precompiled_charsmap")))?.max(1) as f64,
        "Replace" => {
            let by = long(text("content").len())? as f64;
            match step["pattern"]["String"].as_str() {
                Some(pattern) if !pattern.is_empty() => (by / pattern.len() as f64).max(1.0),
                // A pattern may match the empty string between any two characters.
                _ => 1.0 + by,
            }
        }
        _ => 1.0,
    };
    sub_steps(step).try_fold(own, |all, part| Ok(all * growth(part)?))
}

/// Longest string in a sentencepiece normalization table: a length, a trie of that many bytes, then null-terminated
/// strings.
fn longest_string(base64: &str) -> usize {
    let sextets = base64.bytes().filter_map(|letter| {
        let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        letters.iter().position(|known| *known == letter).map(|at| at as u32)
    });
    let sextets: Vec<u32> = sextets.collect();
    let bytes: Vec<u8> = sextets
        .chunks(4)
        .flat_map(|four| {
            let all = four.iter().fold(0, |all, sextet| all << 6 | sextet) << (6 * (4 - four.len()));
            let [_, bytes @ ..] = all.to_be_bytes();
            bytes
        })
        .collect();
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return 0 };
    let texts = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

/// Whether a step has a pattern that a finite automaton cannot match.
fn backtracks(step: &Value) -> bool {
    let hard = ["(?=", "(?!", "(?<=", "(?<!", "(?>", "\\k", "\\g", "\\K", "\\G", "++", "*+", "?+", "}+"];
    let own = step["pattern"]["Regex"].as_str().is_some_and(|pattern| {
        let refers = pattern.as_bytes().windows(2).any(|pair| pair[0] == b'\\' && pair[1].is_ascii_digit());
        refers || hard.iter().any(|part| pattern.contains(part))
    });
    own || sub_steps(step).any(backtracks)
}

/// Number of special tokens in the templates of a step.
fn template_len(step: &Value) -> usize {
    step["single"].as_array().map_or(0, Vec::len) + sub_steps(step).map(template_len).sum::<usize>()
}
