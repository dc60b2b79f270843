//! Splits text into words whose ids do not depend on each other, and caches the ids per word.
//!
//! Encoding word by word is many times faster than encoding a whole text. Three common tokenizer families are
//! supported: GPT-2, whose pattern is hand-written here; tokenizers with a pattern of their own, such as Llama 3; and
//! Llama 2, none of whose tokens spans the start of a word. Tests compare all three with the library's general path.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{LazyLock, Mutex, PoisonError},
};

use tokenizers::utils::SysRegex;

/// How text is split into words.
#[derive(Debug)]
pub enum PreTokenizer {
    /// GPT-2's pattern: contractions after an apostrophe; runs of letters, digits or other symbols, each with an
    /// optional leading space; whitespace, except for its last character if something follows.
    Gpt2,
    /// Matches of this pattern, and the text between them.
    Pattern(SysRegex),
    /// Spaces and what follows them; a space is prepended to the first word.
    Metaspace,
}

impl PreTokenizer {
    /// Calls `take` with each word of `text`, in order.
    pub fn split_words<E>(&self, text: &str, mut take: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        match self {
            PreTokenizer::Pattern(regex) => {
                let mut done = 0;
                for (start, end) in regex.find_iter(text) {
                    for word in [&text[done..start], &text[start..end]] {
                        if !word.is_empty() {
                            take(word)?;
                        }
                    }
                    done = end;
                }
                if done < text.len() { take(&text[done..]) } else { Ok(()) }
            }
            PreTokenizer::Gpt2 => {
                let mut rest = text;
                while !rest.is_empty() {
                    let (word, after) = rest.split_at(gpt2_word_len(rest));
                    take(word)?;
                    rest = after;
                }
                Ok(())
            }
            PreTokenizer::Metaspace => {
                if text.is_empty() {
                    return Ok(());
                }
                let end = metaspace_word_len(text);
                take(&format!(" {}", &text[..end]))?;
                let mut rest = &text[end..];
                while !rest.is_empty() {
                    let (word, after) = rest.split_at(metaspace_word_len(rest));
                    take(word)?;
                    rest = after;
                }
                Ok(())
            }
        }
    }

    /// The word in the form that the tokenizer's model expects.
    pub fn model_input(&self, word: &str) -> String {
        match self {
            PreTokenizer::Gpt2 | PreTokenizer::Pattern(_) => {
                word.bytes().map(|byte| BYTES_TO_UNICODE[byte as usize]).collect()
            }
            PreTokenizer::Metaspace => word.replace(' ', "\u{2581}"),
        }
    }
}

/// Length in bytes of the first word of a non-empty text: spaces, then everything up to the next space.
fn metaspace_word_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let start = bytes.iter().position(|&b| b != b' ').unwrap_or(bytes.len());
    memchr::memchr(b' ', &bytes[start..]).map_or(bytes.len(), |end| start + end)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CharClass {
    Space,
    Letter,
    Number,
    Other,
}

/// One bit per character: whether its Unicode general category is a letter (`\p{L}`), which the standard library does
/// not expose.
static LETTER_BITS: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let mut bits = vec![0u64; 0x11_0000 / 64];
    let all: String = (128..0x11_0000).filter_map(char::from_u32).collect();
    // The pattern is a valid constant. If it failed to compile, only ASCII letters would count as letters.
    if let Ok(letters) = SysRegex::new(r"\p{L}+") {
        for (start, end) in letters.find_iter(&all) {
            all[start..end].chars().for_each(|c| bits[c as usize / 64] |= 1 << (c as usize % 64));
        }
    }
    bits
});

fn char_class(c: char) -> CharClass {
    match c {
        'a'..='z' | 'A'..='Z' => CharClass::Letter,
        '0'..='9' => CharClass::Number,
        _ if c.is_whitespace() => CharClass::Space,
        _ if c.is_ascii() => CharClass::Other,
        _ if LETTER_BITS[c as usize / 64] >> (c as usize % 64) & 1 == 1 => CharClass::Letter,
        _ if c.is_numeric() => CharClass::Number,
        _ => CharClass::Other,
    }
}

/// Length in bytes of the first word of a non-empty text under GPT-2's pattern.
fn gpt2_word_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    if bytes[0] == b'\'' {
        match bytes.get(1..) {
            Some([b's' | b't' | b'm' | b'd', ..]) => return 2,
            Some([b'r' | b'v', b'e', ..] | [b'l', b'l', ..]) => return 3,
            _ => {}
        }
    }
    let start = usize::from(bytes[0] == b' ');
    let mut rest = text[start..].chars();
    match rest.next().map(char_class) {
        None | Some(CharClass::Space) => {}
        Some(first) => return start + run_len(&text[start..], first),
    }
    let end = run_len(text, CharClass::Space);
    match text[..end].char_indices().next_back() {
        // The last whitespace character belongs to the next word.
        Some((last, _)) if end < text.len() && last > 0 => last,
        _ => end,
    }
}

/// Length in bytes of the leading run of one character class.
fn run_len(text: &str, of: CharClass) -> usize {
    text.char_indices().find(|&(_, c)| char_class(c) != of).map_or(text.len(), |(at, _)| at)
}

/// GPT-2's byte-to-character map for byte-level vocabularies: printable bytes map to themselves, the others to the code
/// points from 256, in order.
static BYTES_TO_UNICODE: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut next = 256;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        // Infallible: every code point below 512 is a character.
        char::from_u32(code).unwrap_or_default()
    })
});

/// Ids of words seen before, per thread.
pub struct WordCache {
    threads: Vec<Mutex<WordIds>>,
}

type WordIds = HashMap<Box<[u8]>, Box<[u32]>, BuildHasherDefault<WordHasher>>;

/// Maximum words cached per thread, and the maximum bytes of a cached word: about 10 MB.
const MAX_CACHED_WORDS: usize = 1 << 16;
const MAX_CACHED_WORD_BYTES: usize = 64;

impl WordCache {
    pub fn new() -> Self {
        let threads = rayon::current_num_threads().max(1);
        Self { threads: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// Runs `body` with this thread's cache.
    pub fn with<R>(&self, body: impl FnOnce(&mut WordIds) -> R) -> R {
        let thread = rayon::current_thread_index().unwrap_or(0) % self.threads.len();
        // A poisoned cache is still consistent: a panic cannot interrupt an insert.
        body(&mut self.threads[thread].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Appends the ids of `word`; calls `encode` on a cache miss.
pub fn encode_cached<E>(
    word_ids: &mut WordIds,
    word: &str,
    into: &mut Vec<u32>,
    encode: impl FnOnce(&str) -> Result<Vec<u32>, E>,
) -> Result<(), E> {
    if let Some(ids) = word_ids.get(word.as_bytes()) {
        into.extend_from_slice(ids);
        return Ok(());
    }
    let ids = encode(word)?;
    into.extend_from_slice(&ids);
    if word.len() <= MAX_CACHED_WORD_BYTES && word_ids.len() < MAX_CACHED_WORDS {
        word_ids.insert(word.as_bytes().into(), ids.into());
    }
    Ok(())
}

/// Hashes words eight bytes at a time. Not collision-resistant: no adversary chooses the words.
#[derive(Default)]
pub struct WordHasher(u64);

impl Hasher for WordHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (eights, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        for part in eights.iter().chain(std::iter::once(&last)) {
            self.0 = (self.0.rotate_left(5) ^ u64::from_le_bytes(*part)).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(rule: PreTokenizer, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        rule.split_words(text, |word| {
            words.push(word.to_owned());
            Ok::<(), ()>(())
        })
        .unwrap();
        words
    }

    #[test]
    fn words_are_split() {
        let words = split(PreTokenizer::Gpt2, "I'll say: 'stop'  \n\n now  ");
        assert_eq!(words, ["I", "'ll", " say", ":", " '", "stop", "'", "  \n\n", " now", "  "]);
        assert_eq!(split(PreTokenizer::Metaspace, "ab  c\nd "), [" ab", "  c\nd", " "]);
        assert_eq!(split(PreTokenizer::Metaspace, " a"), ["  a"]);
        assert_eq!(PreTokenizer::Gpt2.model_input(" é\n"), "ĠÃ©Ċ");
        assert_eq!(PreTokenizer::Metaspace.model_input("  a"), "▁▁a");
    }

    proptest! {
        /// The hand-written splitter agrees with the regular expression on any text.
        #[test]
        fn the_pattern_is_gpt2s(text in prop_oneof![
            "[a-z'A-Z0-9 \n\t.,!éßжя中文٣½ⅷ\u{300}\u{a0}\u{2003}\u{85}\u{1f600}ªʰ]{0,60}",
            "(\\PC|[ \n'strevmld]){0,40}",
        ]) {
            let pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
            let regex = SysRegex::new(pattern).unwrap();
            let expected: Vec<&str> = regex.find_iter(&text).map(|(start, end)| &text[start..end]).collect();
            prop_assert_eq!(split(PreTokenizer::Gpt2, &text), expected);
        }

        #[test]
        fn spaced_words_are_the_text(text in "[ab é]{0,30}") {
            let joined = split(PreTokenizer::Metaspace, &text).concat();
            prop_assert_eq!(joined, if text.is_empty() { String::new() } else { format!(" {text}") });
        }
    }
}
