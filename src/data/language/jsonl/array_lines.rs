//! Reads a JSON array as JSON Lines: one value per line, as the files of Alpaca and ShareGPT are published.
//!
//! Values are not parsed, only delimited, in constant memory: invalid JSON is reported when its line is read.

use std::io::{self, BufRead, Read};

/// Whether a text that starts with these bytes is an array, and not an object per line.
pub fn is_array(start: &[u8]) -> bool {
    start.trim_ascii_start().starts_with(b"[")
}

/// The values of an array as lines. Line breaks within a value become spaces.
pub struct ArrayLines<R> {
    inner: R,
    state: ArrayState,
    /// Bytes to return at the end.
    end: &'static [u8],
}

/// Where in the array the last byte was.
#[derive(Default)]
struct ArrayState {
    /// Brackets and braces that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl<R: BufRead> ArrayLines<R> {
    pub fn new(inner: R) -> Self {
        Self { inner, state: ArrayState::default(), end: b"" }
    }
}

impl<R: BufRead> Read for ArrayLines<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let bytes = self.inner.fill_buf()?;
            if bytes.is_empty() {
                // An array that is not closed ends with a line that is no JSON, so that the missing records are
                // noticed.
                if std::mem::take(&mut self.state.depth) > 0 {
                    self.end = b"\n[";
                }
                return self.end.read(into);
            }
            let (count, mut written) = (bytes.len().min(into.len()), 0);
            for byte in &bytes[..count] {
                if let Some(byte) = self.state.next(*byte) {
                    into[written] = byte;
                    written += 1;
                }
            }
            self.inner.consume(count);
            if written > 0 || into.is_empty() {
                return Ok(written);
            }
        }
    }
}

impl ArrayState {
    /// The byte that takes the place of `byte`, if any.
    fn next(&mut self, byte: u8) -> Option<u8> {
        if self.in_string {
            self.in_string = self.escaped || byte != b'"';
            self.escaped = byte == b'\\' && !self.escaped;
            return Some(byte);
        }
        match byte {
            b'"' => self.in_string = true,
            b'[' | b'{' => {
                self.depth += 1;
                if self.depth == 1 {
                    return None;
                }
            }
            b']' | b'}' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Some(b'\n');
                }
            }
            b',' if self.depth == 1 => return Some(b'\n'),
            _ if byte.is_ascii_whitespace() => return (self.depth > 1).then_some(b' '),
            _ => {}
        }
        Some(byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, buffer: usize) -> Vec<String> {
        let mut read = String::new();
        let reader = io::BufReader::with_capacity(buffer, text.as_bytes());
        ArrayLines::new(reader).read_to_string(&mut read).unwrap();
        read.lines().map(str::to_owned).collect()
    }

    #[test]
    fn values_become_lines() {
        let text =
            "\n[\n  {\"a\": [1, {\"b\": 2}],\n   \"c\": \"]}, \\\\\\\" [\"\n  },\n  {\"d\": \"\\\\\"}, 3]\n";
        let expected =
            ["{\"a\": [1, {\"b\": 2}],    \"c\": \"]}, \\\\\\\" [\"   }", "{\"d\": \"\\\\\"}", "3"];
        for buffer in [1, 7, 1000] {
            assert_eq!(lines(text, buffer), expected);
            assert_eq!(lines("[]", buffer), [""]);
        }
    }

    #[test]
    fn an_array_that_is_not_closed_has_a_last_line() {
        assert_eq!(lines("[{\"a\": 1},", 5), ["{\"a\": 1}", "", "["]);
        assert_eq!(lines("[{\"a\":", 5), ["{\"a\":", "["]);
        assert!(is_array(b" \n[{") && !is_array(b"{\"a\": []}") && !is_array(b""));
    }
}
