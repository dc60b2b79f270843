//! Turns tokens into text as they come: whole characters only, and nothing of a stop string.
//!
//! A token may hold part of a character, and the text of a token may depend on the one before it (a leading space). So
//! text is the difference between decoding the last tokens with and without the new one, once that ends in a whole
//! character. Text that may be the beginning of a stop string is held back until it is or is not.

use crate::data::language::tokenizer::Tokenizer;

/// Bytes of a character in UTF-8 at most. A token has at least one, so more tokens than this that end in no whole
/// character never will.
const MAX_CHAR_TOKENS: usize = 4;

/// The text of one sequence.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    stops: &'a [String],
    /// Tokens from which text is decoded; the first `decoded` of them are context whose text was returned.
    tokens: Vec<u32>,
    decoded: usize,
    /// Text that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl<'a> TextStream<'a> {
    /// The text ends before the first of `stops`.
    pub fn new(tokenizer: &'a Tokenizer, stops: &'a [String]) -> Self {
        Self { tokenizer, stops, tokens: Vec::new(), decoded: 0, held: String::new(), stopped: false }
    }

    /// Whether a stop string came.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The text that the token completes.
    pub fn push(&mut self, token: u32) -> String {
        if self.stopped {
            return String::new();
        }
        self.tokens.push(token);
        let pending = self.tokens.len() - self.decoded;
        match self.new_text(self.tokens.len()) {
            Some(new) if !new.ends_with(char::REPLACEMENT_CHARACTER) => self.accept(&new, pending),
            // Half a character, or the new token changes text that was already returned: more tokens may resolve it.
            _ if pending < MAX_CHAR_TOKENS => String::new(),
            // Bytes before the last character that are no text never become text.
            Some(new) => {
                let (settled, count) = self.without_last_character(new);
                self.accept(&settled, count)
            }
            None => {
                let new = self.tokenizer.decode(&self.tokens[self.decoded..]);
                self.accept(&new, pending)
            }
        }
    }

    /// The text of the new tokens without an incomplete character at its end, and how many tokens it takes.
    fn without_last_character(&self, new: String) -> (String, usize) {
        for incomplete in 1..MAX_CHAR_TOKENS {
            let end = self.tokens.len().saturating_sub(incomplete).max(self.decoded);
            // An incomplete character is one replacement character.
            if let Some(before) = self.new_text(end)
                && new.strip_prefix(before.as_str()) == Some("\u{fffd}")
            {
                return (before, end - self.decoded);
            }
        }
        (new, self.tokens.len() - self.decoded)
    }

    /// The rest of the text, at the end of the sequence.
    pub fn finish(&mut self) -> String {
        if !self.stopped && self.decoded < self.tokens.len() {
            let new = self.new_text(self.tokens.len());
            let new = new.unwrap_or_else(|| self.tokenizer.decode(&self.tokens[self.decoded..]));
            self.held.push_str(&new);
            self.decoded = self.tokens.len();
        }
        self.release(true)
    }

    /// What the new tokens up to `end` add to the text of those before them; `None` if they change that.
    fn new_text(&self, end: usize) -> Option<String> {
        let before = self.tokenizer.decode(&self.tokens[..self.decoded]);
        let mut after = self.tokenizer.decode(&self.tokens[..end]);
        after.starts_with(&before).then(|| after.split_off(before.len()))
    }

    /// Takes `new` as the text of the first `count` new tokens, which become the context of the next.
    fn accept(&mut self, new: &str, count: usize) -> String {
        self.held.push_str(new);
        if count > 0 {
            self.tokens.drain(..self.decoded);
            self.decoded = count;
        }
        self.release(false)
    }

    /// Takes what is held, up to a stop string or, unless `all`, up to what may become one.
    fn release(&mut self, all: bool) -> String {
        let stops = self.stops.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stops.clone().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let start = match all {
            true => self.held.len(),
            false => {
                let starts = stops.filter_map(|stop| partial_start(&self.held, stop));
                starts.min().unwrap_or(self.held.len())
            }
        };
        let rest = self.held.split_off(start);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Where `text` ends in a beginning of `stop`.
fn partial_start(text: &str, stop: &str) -> Option<usize> {
    let from = text.len().saturating_sub(stop.len() - 1);
    (from..text.len()).find(|at| text.is_char_boundary(*at) && stop.starts_with(&text[*at..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::language::tokenizer::CharTokenizer;

    fn stream(tokenizer: &Tokenizer, tokens: &[u32], stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::new(tokenizer, &stops);
        let mut parts: Vec<String> = tokens.iter().map(|token| stream.push(*token)).collect();
        parts.push(stream.finish());
        (parts, stream.is_stopped())
    }

    fn bytes(text: &[u8]) -> Vec<u32> {
        text.iter().map(|byte| u32::from(*byte)).collect()
    }

    #[test]
    fn half_a_character_waits_for_the_other_half() {
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes("aé€😀z".as_bytes()), &[]);
        assert_eq!(parts, ["a", "", "é", "", "", "€", "", "", "", "😀", "z", ""]);
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes(b"a\xc3"), &[]);
        assert_eq!(parts, ["a", "", "\u{fffd}"], "what stays half is a replacement character");
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes(b"\xff\xff\xff\xff\xff\xffok"), &[]);
        assert_eq!(
            parts.concat(),
            format!("{}ok", "\u{fffd}".repeat(6)),
            "what is no text does not hold it up"
        );
        assert!(parts[..6].iter().any(|part| !part.is_empty()));
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes("\u{fffd}\u{fffd}é\u{fffd}".as_bytes()), &[]);
        assert_eq!(parts.concat(), "\u{fffd}\u{fffd}é\u{fffd}", "a text may have that character");
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes(b"\xff\xff\xe0\xac\xaa"), &[]);
        assert_eq!(parts.concat(), "\u{fffd}\u{fffd}\u{b2a}");
    }

    #[test]
    fn a_stop_string_is_found_across_tokens_and_never_shown() {
        let (parts, stopped) = stream(&Tokenizer::Bytes, &bytes(b"one\n\nUser: two"), &["\n\nUser:"]);
        assert_eq!((parts.concat().as_str(), stopped), ("one", true));
        let (parts, stopped) = stream(&Tokenizer::Bytes, &bytes(b"one\n\nUse"), &["\n\nUser:"]);
        assert_eq!((parts.concat().as_str(), stopped), ("one\n\nUse", false));
        assert!(parts[3..8].iter().all(|part| part.is_empty()), "held back: {parts:?}");
        let (parts, _) = stream(&Tokenizer::Bytes, &bytes(b"aaab"), &["aab"]);
        assert_eq!(parts.concat(), "a", "a beginning that fails may contain another");
        let (parts, stopped) = stream(&Tokenizer::Bytes, &bytes(b"x, y. z"), &[".", ","]);
        assert_eq!((parts.concat().as_str(), stopped), ("x", true), "the first in the text");
    }

    proptest! {
        #[test]
        fn parts_make_up_the_text(text in "\\PC{0,30}", stop in "[ab]{1,3}") {
            let own = Tokenizer::Characters(CharTokenizer::new(text.chars()));
            for tokenizer in [own, Tokenizer::Bytes] {
                let mut ids = Vec::new();
                tokenizer.encode(&text, &mut ids).unwrap();
                prop_assert_eq!(stream(&tokenizer, &ids, &[]).0.concat(), &text[..]);
                let (parts, stopped) = stream(&tokenizer, &ids, &[&stop]);
                let expected = text.split(&stop).next().unwrap();
                prop_assert_eq!(parts.concat(), expected);
                prop_assert_eq!(stopped, expected.len() < text.len());
            }
        }
    }
}
