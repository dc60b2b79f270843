//! CSV dialect: where rows end, and how a row splits into fields.
//!
//! A row ends with a line feed outside of quotes; a carriage return before it is dropped. A field is quoted if its
//! first non-space character is the quote; a doubled quote inside quotes stands for one. Elsewhere the quote is an
//! ordinary character. Spaces around unquoted fields are ignored. Comments are not rows, nor are blank lines unless
//! the table has one column.

use memchr::{memchr, memchr2};

use super::text_encoding::TextEncoding;

/// Maximum bytes of a row; a longer row is taken for an unterminated quote.
pub const MAX_ROW_BYTES: usize = 16 << 20;

/// How a text file is parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    pub delimiter: FieldDelimiter,
    /// Whether the first row holds the column names.
    pub header: bool,
    /// Lines to skip before the first row or header.
    pub skip_lines: u64,
    /// The character around quoted fields.
    pub quote: u8,
    /// The first character of lines that are not rows.
    pub comment: Option<u8>,
    /// Whether a blank line is a row: a missing value, in a table of one column.
    pub blank_rows: bool,
    pub encoding: TextEncoding,
    pub rows: RowFormat,
}

/// What a row is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RowFormat {
    /// Fields between delimiters.
    #[default]
    Delimited,
    /// A JSON object, read as a row of quoted fields.
    Json,
    /// A row of an Arrow table, read as a row of quoted fields.
    Arrow,
}

/// The field delimiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldDelimiter {
    Byte(u8),
    /// Any run of spaces and tabs.
    Whitespace,
}

impl Default for Dialect {
    fn default() -> Self {
        Self {
            delimiter: FieldDelimiter::Byte(b','),
            header: true,
            skip_lines: 0,
            quote: b'"',
            comment: None,
            blank_rows: false,
            encoding: TextEncoding::Utf8,
            rows: RowFormat::Delimited,
        }
    }
}

impl Dialect {
    /// The dialect of the rows that records become: fields in quotes, without a header.
    pub fn of_records(rows: RowFormat) -> Self {
        Self { header: false, rows, ..Self::default() }
    }

    /// Whether a file of this dialect can only be read from its beginning, however it is stored.
    pub fn is_sequential(self) -> bool {
        self.rows != RowFormat::Delimited || matches!(self.encoding, TextEncoding::Utf16 { .. })
    }

    /// Whether the line is blank or a comment.
    pub fn skips_line(self, line: &[u8]) -> bool {
        match line.first() {
            // What follows the last line feed.
            None => true,
            Some(first) if self.comment == Some(*first) => true,
            _ => !self.blank_rows && self.delimiter.is_blank_line(line),
        }
    }
}

impl FieldDelimiter {
    fn matches(self, byte: u8) -> bool {
        match self {
            Self::Byte(delimiter) => byte == delimiter,
            Self::Whitespace => byte == b' ' || byte == b'\t',
        }
    }

    /// Whether `byte` is whitespace that is ignored around a field.
    fn is_padding(self, byte: u8) -> bool {
        matches!(byte, b' ' | b'\t' | b'\r') && !self.matches(byte)
    }

    /// Whether the line is blank.
    fn is_blank_line(self, line: &[u8]) -> bool {
        let nothing = |byte: &u8| matches!(byte, b' ' | b'\r' | b'\n') || *byte == b'\t';
        match self {
            Self::Byte(b'\t') => line.iter().all(|byte| nothing(byte) && *byte != b'\t'),
            _ => line.iter().all(nothing),
        }
    }
}

/// Iterator over the ends of rows, each the offset after the line feed. After the last one, `quoted` says whether the
/// text ends inside quotes.
pub struct RowEnds<'a> {
    text: &'a [u8],
    position: usize,
    pub quoted: bool,
    /// Whether a line starts at `position`, outside of quotes.
    at_line: bool,
    dialect: Dialect,
}

impl<'a> RowEnds<'a> {
    /// `text` starts with a row or, with `quoted`, inside quotes right after a line feed.
    pub fn new(text: &'a [u8], quoted: bool, dialect: Dialect) -> Self {
        Self { text, position: 0, quoted, at_line: !quoted, dialect }
    }

    /// Whether the quote at `at`, outside of quotes, opens a quoted field.
    fn opens_quote(&self, at: usize) -> bool {
        let before = self.text[..at].iter().rev().find(|byte| !self.dialect.delimiter.is_padding(**byte));
        before.is_none_or(|byte| *byte == b'\n' || self.dialect.delimiter.matches(*byte))
    }
}

impl Iterator for RowEnds<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let quote = self.dialect.quote;
        loop {
            let rest = &self.text[self.position..];
            if self.quoted {
                let Some(found) = memchr(quote, rest) else {
                    self.position = self.text.len();
                    return None;
                };
                self.position += found + 1;
                if self.text.get(self.position) == Some(&quote) {
                    self.position += 1;
                } else {
                    self.quoted = false;
                }
                continue;
            }
            // Quotes in a comment have no meaning.
            let comment = std::mem::take(&mut self.at_line)
                && self.dialect.comment.is_some_and(|comment| rest.first() == Some(&comment));
            let found = if comment { memchr(b'\n', rest) } else { memchr2(quote, b'\n', rest) };
            let Some(found) = found else {
                self.position = self.text.len();
                return None;
            };
            let at = self.position + found;
            self.position = at + 1;
            if self.text[at] == b'\n' {
                self.at_line = true;
                return Some(self.position);
            }
            self.quoted = self.opens_quote(at);
        }
    }
}

/// The fields of one row; reused for the next.
#[derive(Default)]
pub struct RowFields {
    /// Location of each field: in the row, or in `unquoted` if quotes had to be removed.
    spans: Vec<(FieldBuffer, u32, u32)>,
    unquoted: Vec<u8>,
    /// Quoted fields whose closing quote is missing or not the end of the field.
    loose_quotes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FieldBuffer {
    Row,
    Unquoted,
}

impl RowFields {
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Bytes that splitting rows of `width` fields and at most `row_bytes` bytes takes.
    pub fn max_bytes(width: usize, row_bytes: u64, quoted: bool) -> u64 {
        // The list doubles as it grows, and its old half is copied.
        let spans = width.next_power_of_two() * size_of::<(FieldBuffer, u32, u32)>() * 3 / 2;
        spans as u64 + if quoted { row_bytes.next_multiple_of(1 << 12) } else { 0 }
    }

    /// Field `index` of `row`, which must be the row split last.
    pub fn get<'a>(&'a self, row: &'a [u8], index: usize) -> &'a [u8] {
        let (buffer, start, end) = self.spans[index];
        let text = if buffer == FieldBuffer::Row { row } else { &self.unquoted };
        &text[start as usize..end as usize]
    }

    /// Number of quoted fields, and how many of them do not end with their closing quote.
    pub fn quotes(&self) -> (usize, usize) {
        let quoted = self.spans.iter().filter(|(buffer, ..)| *buffer == FieldBuffer::Unquoted).count();
        (quoted, self.loose_quotes)
    }

    /// Splits `row`, at most [`MAX_ROW_BYTES`] bytes, with or without its line break.
    pub fn split(&mut self, row: &[u8], dialect: Dialect) {
        let Dialect { delimiter, quote, .. } = dialect;
        self.spans.clear();
        self.unquoted.clear();
        self.loose_quotes = 0;
        let row = row.strip_suffix(b"\n").unwrap_or(row);
        let row = row.strip_suffix(b"\r").unwrap_or(row);
        match delimiter {
            FieldDelimiter::Byte(byte) if memchr(quote, row).is_none() => {
                let mut start = 0;
                for (piece, from) in row.chunks(MASK_BYTES).zip((0..).step_by(MASK_BYTES)) {
                    let mut mask = byte_mask(byte, piece);
                    while mask != 0 {
                        let end = from + mask.trailing_zeros() as usize;
                        self.push(row, start, end, delimiter);
                        start = end + 1;
                        mask &= mask - 1;
                    }
                }
                self.push(row, start, row.len(), delimiter);
            }
            _ => self.split_quoted(row, delimiter, quote),
        }
    }

    /// Adds the text between `start` and `end`, without surrounding whitespace.
    #[inline]
    fn push(&mut self, row: &[u8], mut start: usize, mut end: usize, delimiter: FieldDelimiter) {
        while start < end && delimiter.is_padding(row[start]) {
            start += 1;
        }
        while start < end && delimiter.is_padding(row[end - 1]) {
            end -= 1;
        }
        self.spans.push((FieldBuffer::Row, start as u32, end as u32));
    }

    fn split_quoted(&mut self, row: &[u8], delimiter: FieldDelimiter, quote: u8) {
        let mut at = 0;
        loop {
            let skip = |byte: &u8| {
                delimiter.is_padding(*byte)
                    || (delimiter == FieldDelimiter::Whitespace && delimiter.matches(*byte))
            };
            let start = at + row[at..].iter().take_while(|byte| skip(byte)).count();
            if start == row.len() && delimiter == FieldDelimiter::Whitespace && !self.spans.is_empty() {
                return;
            }
            let end_of = |from: usize| {
                row[from..].iter().position(|byte| delimiter.matches(*byte)).map_or(row.len(), |i| from + i)
            };
            if row.get(start) == Some(&quote) {
                let closed = self.unquote(row, start + 1, quote);
                at = end_of(closed);
                // Text after the closing quote belongs to the field, as in spreadsheets.
                let rest = row[closed..at].trim_ascii();
                self.loose_quotes += usize::from(!rest.is_empty());
                if !rest.is_empty()
                    && let Some(field) = self.spans.last_mut()
                {
                    self.unquoted.truncate(field.2 as usize);
                    self.unquoted.extend_from_slice(rest);
                    field.2 = self.unquoted.len() as u32;
                }
            } else {
                at = end_of(start);
                self.push(row, start, at, delimiter);
            }
            if at == row.len() {
                return;
            }
            at += 1;
        }
    }

    /// Adds the quoted field whose text starts at `from`; returns the offset after its closing quote.
    fn unquote(&mut self, row: &[u8], mut from: usize, quote: u8) -> usize {
        let start = self.unquoted.len();
        if start == 0 && self.unquoted.capacity() < row.len() {
            // What is planned: no more than the longest row, and not the old buffer beside the new one.
            self.unquoted = Vec::new();
            self.unquoted.reserve_exact(row.len().next_multiple_of(1 << 12));
        }
        loop {
            let end = memchr(quote, &row[from..]).map_or(row.len(), |i| from + i);
            self.unquoted.extend_from_slice(&row[from..end]);
            if row.get(end + 1) != Some(&quote) {
                self.loose_quotes += usize::from(end == row.len());
                self.spans.push((FieldBuffer::Unquoted, start as u32, self.unquoted.len() as u32));
                return (end + 1).min(row.len());
            }
            self.unquoted.push(quote);
            from = end + 2;
        }
    }
}

/// Bytes covered by one 64-bit mask.
const MASK_BYTES: usize = 64;

/// Bit mask of the positions of `byte` in at most [`MASK_BYTES`] bytes. Fields are a few bytes long, so a separate
/// search for the end of each is slower than comparing all bytes, eight at a time.
#[inline]
fn byte_mask(byte: u8, piece: &[u8]) -> u64 {
    const LOW: u64 = u64::from_ne_bytes([0x7f; 8]);
    // Multiplying gathers the low bits of eight bytes into the top byte, in order.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let expected = u64::from_ne_bytes([byte; 8]);
    let eight = |word: &[u8; 8]| {
        let word = u64::from_le_bytes(*word) ^ expected;
        let found = !((word & LOW).wrapping_add(LOW) | word | LOW);
        (found >> 7).wrapping_mul(GATHER) >> 56
    };
    let (words, rest) = piece.as_chunks::<8>();
    let mut mask = 0;
    for (i, word) in words.iter().enumerate() {
        mask |= eight(word) << (8 * i);
    }
    if !rest.is_empty() {
        let mut word = [!byte; 8];
        word[..rest.len()].copy_from_slice(rest);
        mask |= eight(&word) << (8 * words.len());
    }
    mask
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COMMA: FieldDelimiter = FieldDelimiter::Byte(b',');

    fn by(delimiter: FieldDelimiter) -> Dialect {
        Dialect { delimiter, ..Dialect::default() }
    }

    fn split(row: &str, delimiter: FieldDelimiter) -> Vec<String> {
        let mut fields = RowFields::default();
        fields.split(row.as_bytes(), by(delimiter));
        (0..fields.len())
            .map(|i| String::from_utf8_lossy(fields.get(row.as_bytes(), i)).into_owned())
            .collect()
    }

    fn rows(text: &str) -> Vec<&str> {
        let mut start = 0;
        let ends = RowEnds::new(text.as_bytes(), false, by(COMMA)).chain([text.len()]);
        ends.map(|end| &text[std::mem::replace(&mut start, end)..end]).filter(|row| !row.is_empty()).collect()
    }

    #[test]
    fn fields_are_trimmed_unless_quoted() {
        assert_eq!(split("a, b ,,\"c, \"\"d\"\"\n\" ,e\"f\r\n", COMMA), ["a", "b", "", "c, \"d\"\n", "e\"f"]);
        assert_eq!(split("", COMMA), [""]);
        assert_eq!(split(",", COMMA), ["", ""]);
        assert_eq!(split("\" x \"y , \"", COMMA), [" x y", ""]);
        assert_eq!(split("a\t b\t\t", FieldDelimiter::Byte(b'\t')), ["a", "b", "", ""]);
        let spaces = FieldDelimiter::Whitespace;
        assert_eq!(split("  1  2\t3 \"4 5\" \n", spaces), ["1", "2", "3", "4 5"]);
        assert_eq!(split("1 2", spaces), ["1", "2"]);
    }

    #[test]
    fn rows_end_outside_of_quotes() {
        assert_eq!(rows("a,\"b\nc\"\nd,e\"\nf"), ["a,\"b\nc\"\n", "d,e\"\n", "f"]);
        assert_eq!(rows("a, \"b\n\"\"\n\"\n\"c\""), ["a, \"b\n\"\"\n\"\n", "\"c\""]);
        let mut open = RowEnds::new(b"a,\"b\nc\n", false, by(COMMA));
        assert!(open.next().is_none() && open.quoted);
        let mut inside = RowEnds::new(b"b\"\nc\n", true, by(COMMA));
        assert_eq!(
            (inside.next(), inside.next(), inside.next(), inside.quoted),
            (Some(3), Some(5), None, false)
        );
    }

    #[test]
    fn comments_and_single_quotes_are_a_dialect() {
        let dialect = Dialect { comment: Some(b'#'), quote: b'\'', ..Dialect::default() };
        let text = b"# it's, 'a\na,'b\n#c'\n#'\n";
        assert_eq!(RowEnds::new(text, false, dialect).collect::<Vec<_>>(), [11, 20, 23]);
        assert!(dialect.skips_line(b"# it's") && !dialect.skips_line(b"a,'b"));
        let row = b"'it''s, a', b";
        let mut fields = RowFields::default();
        fields.split(row, dialect);
        assert_eq!(
            (fields.get(row, 0), fields.get(row, 1), fields.quotes()),
            (&b"it's, a"[..], &b"b"[..], (1, 0))
        );
        fields.split(b"'tis,b", dialect);
        assert_eq!(fields.quotes(), (1, 1));
    }

    #[test]
    fn a_line_with_nothing_is_blank() {
        assert!(
            COMMA.is_blank_line(b" \t\r\n")
                && FieldDelimiter::Whitespace.is_blank_line(b" \t\n")
                && COMMA.is_blank_line(b"")
        );
        assert!(!COMMA.is_blank_line(b",\n") && !FieldDelimiter::Byte(b'\t').is_blank_line(b"\t\n"));
        let of_one_column = Dialect { blank_rows: true, ..Dialect::default() };
        assert!(!of_one_column.skips_line(b"\r\n") && of_one_column.skips_line(b""));
    }

    proptest! {
        /// Rows and fields agree with the `csv` crate wherever spaces do not matter.
        #[test]
        fn another_parser_agrees(text in "[ab\",\n]{0,40}") {
            // An unterminated quote is refused here.
            let mut breaks = RowEnds::new(text.as_bytes(), false, by(COMMA));
            breaks.by_ref().for_each(drop);
            prop_assume!(!breaks.quoted);
            let mut parser = csv_core::ReaderBuilder::new().terminator(csv_core::Terminator::Any(b'\n')).build();
            let (mut expected, mut rest) = (Vec::new(), text.as_bytes());
            loop {
                let (mut out, mut ends) = ([0; 128], [0; 64]);
                let (mut record, mut written, mut fields) = (Vec::new(), 0, 0);
                let result = loop {
                    let (out, ends) = (&mut out[written..], &mut ends[fields..]);
                    let (result, read, wrote, found) = parser.read_record(rest, out, ends);
                    (rest, written, fields) = (&rest[read..], written + wrote, fields + found);
                    if !matches!(result, csv_core::ReadRecordResult::InputEmpty) { break result; }
                };
                if matches!(result, csv_core::ReadRecordResult::End) { break; }
                let mut start = 0;
                for end in &ends[..fields] {
                    record.push(String::from_utf8_lossy(&out[start..*end]).into_owned());
                    start = *end;
                }
                expected.push(record);
            }
            let seen: Vec<_> = rows(&text).into_iter().filter(|row| !COMMA.is_blank_line(row.as_bytes()))
                .map(|row| split(row, COMMA)).collect();
            prop_assert_eq!(seen, expected);
        }

        /// The mask has exactly the positions of the byte.
        #[test]
        fn places_are_found(piece in prop::collection::vec(prop_oneof![Just(b','), Just(b'-'), any::<u8>()], 0..=64)) {
            let commas = piece.iter().enumerate().filter(|(_, byte)| **byte == b',');
            let expected = commas.map(|(i, _)| 1u64 << i).sum::<u64>();
            prop_assert_eq!(byte_mask(b',', &piece), expected);
        }

        /// Any bytes are split without a panic, and no field is longer than its row.
        #[test]
        fn any_bytes_are_split(row in prop::collection::vec(any::<u8>(), 0..60), kind in 0u8..4) {
            let byte = FieldDelimiter::Byte;
            let delimiter = [COMMA, FieldDelimiter::Whitespace, byte(b'\t'), byte(b';')][kind as usize];
            let mut fields = RowFields::default();
            fields.split(&row, by(delimiter));
            prop_assert!(fields.len() > 0);
            let total: usize = (0..fields.len()).map(|i| fields.get(&row, i).len()).sum();
            prop_assert!(total <= row.len());
            for end in RowEnds::new(&row, kind % 2 == 0, by(delimiter)) {
                prop_assert_eq!(row[end - 1], b'\n');
            }
        }
    }
}
