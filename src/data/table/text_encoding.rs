//! Character encodings of text tables.
//!
//! Latin-1 has one byte per character and ASCII in its lower half, so rows and fields are found in the raw bytes and
//! only texts are decoded. UTF-16 is transcoded to UTF-8 while it is read.

use std::borrow::Cow;
use std::io::{self, Read};

/// How the characters of a file are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextEncoding {
    #[default]
    Utf8,
    /// Windows-1252, which Excel writes and which extends ISO 8859-1.
    Latin1,
    Utf16 {
        big_endian: bool,
    },
}

/// Characters of the bytes 0x80 to 0x9f in Windows-1252; unassigned bytes are control characters, as in browsers.
const WINDOWS_1252: [char; 32] = [
    '\u{20ac}', '\u{81}', '\u{201a}', '\u{192}', '\u{201e}', '\u{2026}', '\u{2020}', '\u{2021}', '\u{2c6}',
    '\u{2030}', '\u{160}', '\u{2039}', '\u{152}', '\u{8d}', '\u{17d}', '\u{8f}', '\u{90}', '\u{2018}',
    '\u{2019}', '\u{201c}', '\u{201d}', '\u{2022}', '\u{2013}', '\u{2014}', '\u{2dc}', '\u{2122}', '\u{161}',
    '\u{203a}', '\u{153}', '\u{9d}', '\u{17e}', '\u{178}',
];

impl TextEncoding {
    /// The encoding that a byte order mark at the start of a file declares.
    pub fn of_mark(start: &[u8]) -> Option<Self> {
        match start {
            [0xef, 0xbb, 0xbf, ..] => Some(Self::Utf8),
            [0xff, 0xfe, ..] => Some(Self::Utf16 { big_endian: false }),
            [0xfe, 0xff, ..] => Some(Self::Utf16 { big_endian: true }),
            _ => None,
        }
    }

    /// The text of a field as [`TextEncoding::reader`] gives it; `None` if it is not valid.
    pub fn decode(self, bytes: &[u8]) -> Option<Cow<'_, str>> {
        match (self, str::from_utf8(bytes)) {
            (Self::Latin1, _) if !bytes.is_ascii() => {
                Some(bytes.iter().map(|byte| windows_1252(*byte)).collect())
            }
            (_, Ok(text)) => Some(text.into()),
            (_, Err(_)) => None,
        }
    }

    /// The bytes that a text has in a field.
    pub fn encode(self, text: &str) -> Vec<u8> {
        let byte = |c: char| (0..=u8::MAX).find(|byte| windows_1252(*byte) == c);
        match self {
            Self::Latin1 => text.chars().map(|c| byte(c).unwrap_or(b'?')).collect(),
            Self::Utf8 | Self::Utf16 { .. } => text.as_bytes().to_vec(),
        }
    }

    /// The bytes that rows are found in: UTF-8, or Latin-1 unchanged.
    pub fn reader(self, body: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        match self {
            Self::Utf16 { big_endian } => Box::new(Utf16Reader::new(body, big_endian)),
            Self::Utf8 | Self::Latin1 => body,
        }
    }
}

fn windows_1252(byte: u8) -> char {
    match byte {
        0x80..=0x9f => WINDOWS_1252[usize::from(byte - 0x80)],
        _ => char::from(byte),
    }
}

/// Transcodes UTF-16 to UTF-8; an unpaired surrogate or half a unit is invalid data.
struct Utf16Reader {
    body: Box<dyn Read + Send>,
    big_endian: bool,
    /// Bytes not decoded yet: half a unit, or the first unit of a pair.
    raw: Vec<u8>,
    /// UTF-8 that was not handed out yet, from `position` on.
    text: Vec<u8>,
    position: usize,
    eof: bool,
}

/// Bytes read at once.
const UTF16_CHUNK_BYTES: usize = 64 << 10;

impl Utf16Reader {
    fn new(body: Box<dyn Read + Send>, big_endian: bool) -> Self {
        Self { body, big_endian, raw: Vec::new(), text: Vec::new(), position: 0, eof: false }
    }

    fn decode_chunk(&mut self) -> io::Result<()> {
        let before = self.raw.len();
        let read = (&mut self.body).take(UTF16_CHUNK_BYTES as u64).read_to_end(&mut self.raw)?;
        self.eof = read < UTF16_CHUNK_BYTES;
        debug_assert!(before < 4);
        let units: Vec<u16> = self
            .raw
            .as_chunks::<2>()
            .0
            .iter()
            .map(|unit| if self.big_endian { u16::from_be_bytes(*unit) } else { u16::from_le_bytes(*unit) })
            .collect();
        // The first unit of a pair waits for the second.
        let whole = match units.last() {
            Some(0xd800..=0xdbff) if !self.eof => units.len() - 1,
            _ => units.len(),
        };
        let invalid = |problem: &str| io::Error::new(io::ErrorKind::InvalidData, problem.to_owned());
        (self.position, self.text) = (0, Vec::with_capacity(units.len()));
        for c in char::decode_utf16(units[..whole].iter().copied()) {
            let c = c.map_err(|_| invalid("it is not valid UTF-16: an unpaired surrogate"))?;
            self.text.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        self.raw.drain(..2 * whole);
        if self.eof && !self.raw.is_empty() {
            return Err(invalid("it is not valid UTF-16: its number of bytes is odd"));
        }
        Ok(())
    }
}

impl Read for Utf16Reader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.position == self.text.len() && !self.eof {
            self.decode_chunk()?;
        }
        let length = into.len().min(self.text.len() - self.position);
        into[..length].copy_from_slice(&self.text[self.position..self.position + length]);
        self.position += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcoded(bytes: Vec<u8>, big_endian: bool) -> io::Result<String> {
        let mut text = String::new();
        let encoding = TextEncoding::Utf16 { big_endian };
        encoding.reader(Box::new(io::Cursor::new(bytes))).read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn utf16_is_transcoded_across_chunks() {
        // An odd number of units before the pairs, so that one of them spans two chunks.
        let text = format!("a{}", "\u{1f600}é,".repeat(20_000));
        let little: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let big: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
        assert_eq!(transcoded(little.clone(), false).unwrap(), text);
        assert_eq!(transcoded(big, true).unwrap(), text);
        assert!(transcoded(little[..little.len() - 1].to_vec(), false).is_err());
        assert!(transcoded(vec![0x00, 0xd8, b'a', 0], false).is_err());
    }

    #[test]
    fn latin1_is_what_excel_writes() {
        let latin = TextEncoding::Latin1;
        assert_eq!(latin.decode(b"M\xfcller \x80 5").unwrap(), "Müller € 5");
        assert_eq!(latin.encode("Müller € 5"), b"M\xfcller \x80 5");
        assert_eq!(TextEncoding::Utf8.decode(b"M\xfcller"), None);
        assert_eq!(TextEncoding::of_mark(b"\xff\xfea\0"), Some(TextEncoding::Utf16 { big_endian: false }));
    }
}
