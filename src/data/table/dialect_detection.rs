//! Finds the dialect of a text table in its first rows, where the job leaves it open.
//!
//! A delimiter is plausible if nearly all rows have as many fields as the first. If several are, and decimal commas do
//! not explain it, the file is refused: the key `delimiter` decides.

use std::io::{self, Read};
use std::path::Path;

use super::dialect::{Dialect, FieldDelimiter, RowEnds, RowFields, RowFormat};
use super::notation::WrittenNumber;
use super::text_encoding::TextEncoding;
use crate::DataError;
use crate::files::{self, read_error};

/// Bytes that are looked at.
const SAMPLE_BYTES: u64 = 256 << 10;
/// Rows that are split.
const SAMPLE_ROWS: usize = 200;
/// Fraction of the rows that must have as many fields as the first, so that a few bad rows do not hide the delimiter.
const MIN_AGREEMENT: f64 = 0.9;
const COMMENT: u8 = b'#';
const DELIMITERS: [FieldDelimiter; 4] = [
    FieldDelimiter::Byte(b','),
    FieldDelimiter::Byte(b';'),
    FieldDelimiter::Byte(b'\t'),
    FieldDelimiter::Byte(b'|'),
];

/// A declared dialect; `None` is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialectSettings {
    pub delimiter: Option<FieldDelimiter>,
    pub header: bool,
    pub skip_lines: u64,
    pub quote: Option<u8>,
    pub comment: CommentSetting,
    pub encoding: Option<TextEncoding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommentSetting {
    Auto,
    None,
    Byte(u8),
}

impl From<Dialect> for DialectSettings {
    fn from(dialect: Dialect) -> Self {
        Self {
            delimiter: Some(dialect.delimiter),
            header: dialect.header,
            skip_lines: dialect.skip_lines,
            quote: Some(dialect.quote),
            comment: dialect.comment.map_or(CommentSetting::None, CommentSetting::Byte),
            encoding: Some(dialect.encoding),
        }
    }
}

impl Default for DialectSettings {
    fn default() -> Self {
        Self {
            delimiter: None,
            header: true,
            skip_lines: 0,
            quote: None,
            comment: CommentSetting::Auto,
            encoding: None,
        }
    }
}

impl DialectSettings {
    /// The dialect of `file`.
    pub fn detect(&self, file: &Path) -> Result<Dialect, DataError> {
        let (encoding, start) = self.read_start(file)?;
        if let (0, None, Some(delimiter)) = (self.skip_lines, self.delimiter, stated_delimiter(&start.text)) {
            return Self { skip_lines: 1, delimiter: Some(delimiter), ..*self }.detect(file);
        }
        let text = after_lines(&start.text, self.skip_lines);
        if ends_lines_with_returns(text) {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem:
                    "its lines, or many of them, end with a carriage return alone, as those of old Macs did"
                        .into(),
                hint: "save it as \"CSV UTF-8\", or convert it: tr '\\r' '\\n' < old.csv > new.csv",
            });
        }
        let dialect = Dialect {
            delimiter: self.delimiter.unwrap_or(DELIMITERS[0]),
            header: self.header,
            skip_lines: self.skip_lines,
            quote: self.quote.unwrap_or(b'"'),
            comment: match self.comment {
                CommentSetting::Byte(byte) => Some(byte),
                CommentSetting::None => None,
                CommentSetting::Auto => has_comments(text).then_some(COMMENT),
            },
            blank_rows: false,
            encoding,
            rows: RowFormat::Delimited,
        };
        let double = self.choose_delimiter(file, text, start.whole, dialect)?;
        let found = match self.quote {
            Some(_) => double,
            None => self.choose_quote(file, text, start.whole, double)?,
        };
        let has_comments = found.dialect.comment.is_some()
            && (self.comment != CommentSetting::Auto || check_comments(file, text, self.skip_lines, &found)?);
        let comment = found.dialect.comment.filter(|_| has_comments);
        let blank_rows = found.width == 1
            && match start.whole {
                true => has_blank_line(text),
                false => has_blank_line(encoding.reader(files::open(file)?)),
            }
            .map_err(|error| read_error(file, error))?;
        Ok(Dialect { comment, blank_rows, ..found.dialect })
    }

    /// The encoding, and the first text as UTF-8 or Latin-1.
    fn read_start(&self, file: &Path) -> Result<(TextEncoding, TextStart), DataError> {
        let read = |encoding: TextEncoding| {
            let mut text = Vec::new();
            let mut body = encoding.reader(files::open(file)?).take(SAMPLE_BYTES);
            body.read_to_end(&mut text).map_err(|error| read_error(file, error))?;
            Ok(TextStart { whole: (text.len() as u64) < SAMPLE_BYTES, text })
        };
        let start = read(TextEncoding::Utf8)?;
        let encoding = match (self.encoding, TextEncoding::of_mark(&start.text)) {
            // A byte order mark says which UTF-16 it is.
            (Some(TextEncoding::Utf16 { .. }) | None, Some(encoding)) => encoding,
            (Some(encoding), _) => encoding,
            (None, None) => TextEncoding::Utf8,
        };
        match encoding {
            TextEncoding::Utf16 { .. } => Ok((encoding, read(encoding)?)),
            TextEncoding::Utf8 | TextEncoding::Latin1 => Ok((encoding, start)),
        }
    }

    fn choose_delimiter(
        &self,
        file: &Path,
        text: &[u8],
        whole: bool,
        dialect: Dialect,
    ) -> Result<SplitSample, DataError> {
        let split = |delimiter| SplitSample::new(text, whole, Dialect { delimiter, ..dialect });
        if self.delimiter.is_some() {
            return Ok(split(dialect.delimiter));
        }
        let mut plausible: Vec<SplitSample> =
            DELIMITERS.into_iter().map(split).filter(SplitSample::is_plausible).collect();
        if plausible.iter().any(|sample| sample.agreement == 1.0) {
            plausible.retain(|sample| sample.agreement == 1.0);
        }
        let is_comma = |sample: &SplitSample| sample.dialect.delimiter == DELIMITERS[0];
        if plausible.len() == 2 && plausible.iter().any(is_comma) {
            let commas_are_decimal =
                |sample: &SplitSample| is_comma(sample) || sample.commas_are_decimal(text, whole);
            if plausible.iter().all(commas_are_decimal) {
                plausible.retain(|sample| !is_comma(sample));
            }
        }
        match plausible.len() {
            0 => {
                let spaces = split(FieldDelimiter::Whitespace);
                if spaces.is_plausible() {
                    return Ok(spaces);
                }
                // One column, whose values may contain some of the delimiters. If they contain all, the table is
                // refused with what the column contains.
                let single = |sample: &SplitSample| sample.width == 1;
                let mut samples: Vec<SplitSample> = DELIMITERS.into_iter().map(split).collect();
                let is_one_column = samples.iter().all(single);
                let at = samples.iter().position(|sample| is_one_column && sample.agreement == 1.0);
                Ok(samples.swap_remove(at.unwrap_or(0)))
            }
            1 => Ok(plausible.swap_remove(0)),
            _ => {
                let names: Vec<&str> =
                    plausible.iter().map(|sample| sample.dialect.delimiter.name()).collect();
                Err(DataError::Table {
                    file: file.to_owned(),
                    place: format!("line {}", self.skip_lines + 1),
                    problem: format!("the delimiter may be {}", names.join(" or ")),
                    hint: "set `delimiter`",
                })
            }
        }
    }

    /// Single quotes, if they are all closed where a field ends and there are no double quotes.
    fn choose_quote(
        &self,
        file: &Path,
        text: &[u8],
        whole: bool,
        double: SplitSample,
    ) -> Result<SplitSample, DataError> {
        if double.quoted > 0 || memchr::memchr(b'\'', text).is_none() {
            return Ok(double);
        }
        let single = self.choose_delimiter(file, text, whole, Dialect { quote: b'\'', ..double.dialect });
        match single {
            Ok(single)
                if single.quoted > 0
                    && single.loose == 0
                    && single.is_plausible()
                    && single.agreement >= double.agreement =>
            {
                Ok(single)
            }
            _ => Ok(double),
        }
    }
}

impl FieldDelimiter {
    fn name(self) -> &'static str {
        match self {
            Self::Byte(b',') => "`,`",
            Self::Byte(b';') => "`;`",
            Self::Byte(b'\t') => "a tab",
            Self::Byte(b'|') => "`|`",
            Self::Byte(_) => "a character",
            Self::Whitespace => "spaces",
        }
    }
}

/// The start of a file.
struct TextStart {
    text: Vec<u8>,
    /// Whether it is the whole file.
    whole: bool,
}

/// The first rows, split by a dialect.
struct SplitSample {
    dialect: Dialect,
    /// Fields of the first row.
    width: usize,
    /// Fraction of the rows with as many fields.
    agreement: f64,
    /// Quoted fields, and those that do not end with their closing quote.
    quoted: usize,
    loose: usize,
}

impl SplitSample {
    fn new(text: &[u8], whole: bool, dialect: Dialect) -> Self {
        let mut sample = Self { dialect, width: 0, agreement: 0.0, quoted: 0, loose: 0 };
        let (mut rows, mut agreeing) = (0, 0);
        let mut fields = RowFields::default();
        for row in sample_rows(text, whole, dialect) {
            fields.split(row, dialect);
            if rows == 0 {
                sample.width = fields.len();
            }
            rows += 1;
            agreeing += usize::from(fields.len() == sample.width);
            let (quoted, loose) = fields.quotes();
            sample.quoted += quoted;
            sample.loose += loose;
        }
        sample.agreement = agreeing as f64 / rows.max(1) as f64;
        sample
    }

    fn is_plausible(&self) -> bool {
        self.width >= 2 && self.agreement >= MIN_AGREEMENT
    }

    /// Whether every field with a comma is a number, below the first row.
    fn commas_are_decimal(&self, text: &[u8], whole: bool) -> bool {
        let mut fields = RowFields::default();
        sample_rows(text, whole, self.dialect).skip(usize::from(self.dialect.header)).all(|row| {
            fields.split(row, self.dialect);
            (0..fields.len()).map(|i| fields.get(row, i)).all(|field| {
                !field.contains(&b',')
                    || WrittenNumber::parse(field).is_some_and(|number| number.comma.is_some())
            })
        })
    }
}

/// The complete rows of `text`; its last line is one if the file ends there.
fn sample_rows(text: &[u8], whole: bool, dialect: Dialect) -> impl Iterator<Item = &[u8]> {
    let mut start = 0;
    let last = whole.then_some(text.len());
    RowEnds::new(text, false, dialect)
        .chain(last)
        .map(move |end| &text[std::mem::replace(&mut start, end)..end])
        .filter(move |row| !dialect.skips_line(row))
        .take(SAMPLE_ROWS)
}

/// `text` without its byte order mark and its first `count` lines.
fn after_lines(text: &[u8], count: u64) -> &[u8] {
    let mut rest = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    for _ in 0..count {
        rest = memchr::memchr(b'\n', rest).map_or(&[][..], |end| &rest[end + 1..]);
    }
    rest
}

/// Whether lines end with a carriage return alone, as those of old Macs did, outside of quotes; others may end with a
/// line feed, where files were joined.
fn ends_lines_with_returns(text: &[u8]) -> bool {
    let (mut returns, mut line_feeds, mut quoted) = (0, 0, false);
    for (i, byte) in text.iter().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'\r' if !quoted && text.get(i + 1) != Some(&b'\n') => returns += 1,
            b'\n' if !quoted => line_feeds += 1,
            _ => {}
        }
    }
    returns > 1 && 2 * returns > line_feeds
}

/// Whether a blank line stands between others. Those at the end are none: editors leave them.
fn has_blank_line(mut text: impl Read) -> io::Result<bool> {
    let (mut bytes, mut is_blank, mut found) = (vec![0; 1 << 16], true, false);
    loop {
        let count = match text.read(&mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            return Ok(false);
        }
        for byte in &bytes[..count] {
            match byte {
                b'\n' => (found, is_blank) = (found || is_blank, true),
                byte if byte.is_ascii_whitespace() => {}
                _ if found => return Ok(true),
                _ => is_blank = false,
            }
        }
    }
}

/// The delimiter that a first line `sep=;` states, for Excel.
fn stated_delimiter(text: &[u8]) -> Option<FieldDelimiter> {
    let line = after_lines(text, 0).split(|byte| *byte == b'\n').next()?;
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let bare = line.strip_prefix(b"\"").and_then(|line| line.strip_suffix(b"\"")).unwrap_or(line);
    match bare.strip_prefix(b"sep=")? {
        [byte] => Some(FieldDelimiter::Byte(*byte)),
        _ => None,
    }
}

/// Whether some lines start with `#`, but fewer than half of them: otherwise it starts the values of a column.
fn has_comments(text: &[u8]) -> bool {
    let lines = || text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).take(SAMPLE_ROWS);
    let comments = lines().filter(|line| line[0] == COMMENT).count();
    comments > 0 && 2 * comments < lines().count()
}

/// Whether there are comments: a quoted field may have lines that start with `#` too. Refuses a comment that would
/// be a row of the table.
fn check_comments(file: &Path, text: &[u8], skipped: u64, found: &SplitSample) -> Result<bool, DataError> {
    let mut fields = RowFields::default();
    let (mut start, mut line, mut any) = (0, skipped + 1, false);
    for end in RowEnds::new(text, false, found.dialect).chain([text.len()]).take(SAMPLE_ROWS) {
        let row = &text[std::mem::replace(&mut start, end)..end];
        if row.first() == Some(&COMMENT) {
            any = true;
            fields.split(row, found.dialect);
            if fields.len() == found.width {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: format!("line {line}"),
                    problem: format!(
                        "`{}` starts with `#` and has as many fields as the table: it may be a comment or a row",
                        super::display_value(row.trim_ascii_end())
                    ),
                    hint: "set `comment = \"#\"` to skip such lines, or `comment = \"none\"` to read them",
                });
            }
        }
        line += memchr::memchr_iter(b'\n', row).count() as u64;
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(text: &str, settings: DialectSettings) -> Result<Dialect, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.csv");
        std::fs::write(&path, text).unwrap();
        settings.detect(&path).map_err(|error| error.to_string())
    }

    fn delimiter(text: &str) -> FieldDelimiter {
        detect(text, DialectSettings::default()).unwrap().delimiter
    }

    #[test]
    fn the_first_rows_show_the_delimiter() {
        let byte = FieldDelimiter::Byte;
        assert_eq!(delimiter("a,b\n1,2\n"), byte(b','));
        assert_eq!(delimiter("a;b\n1,5;2,5\n"), byte(b';'));
        assert_eq!(delimiter("a\tb c\n1\t2 3\n"), byte(b'\t'));
        assert_eq!(delimiter("a|b\n1|x, y\n"), byte(b'|'));
        assert_eq!(delimiter("a b  c\n1 2  3\n"), FieldDelimiter::Whitespace);
        assert_eq!(delimiter("text,labels\nx,a|b\ny,c|d\n"), byte(b','));
        assert_eq!(delimiter("name,y\n\"a;b\",1\n\"c;d\",2\n"), byte(b','));
        // Without a header, decimal commas make two delimiters plausible.
        let headless = DialectSettings { header: false, ..DialectSettings::default() };
        assert_eq!(detect("1,5;2,5\n3,25;4,0\n", headless).unwrap().delimiter, byte(b';'));
        let error = detect("a,b;c\nx,y;z\n", headless).unwrap_err();
        assert!(error.contains("the delimiter may be `,` or `;`"), "{error}");
        // One bad row of many, and what is not a table.
        let rows: String = (0..50).map(|i| format!("{i};x\n")).collect();
        assert_eq!(delimiter(&format!("a;b\n{rows}1;2;3\n")), byte(b';'));
        assert_eq!(delimiter("a\n1\n2\n"), byte(b','));
        // One column of decimal commas, or of texts.
        assert_eq!(delimiter("a\n1,5\n2,5\n3\n"), byte(b';'));
        assert_eq!(delimiter("a\nx, y; z\nw\n"), byte(b'\t'));
    }

    #[test]
    fn a_blank_line_is_a_row_of_one_column() {
        let found = |text: &str| detect(text, DialectSettings::default()).unwrap().blank_rows;
        assert!(found("a\n1\n\n2\n") && found("a\r\n1\r\n\r\n2\r\n"));
        assert!(!found("a\n1\n2\n\n") && !found("a,b\n1,2\n\n3,4\n"));
    }

    #[test]
    fn returns_that_end_lines_are_refused() {
        let rows = |end: &str| ["x,y", "1,a", "2,b", "3,c"].join(end) + end;
        for text in [rows("\r"), rows("\r") + "\n", format!("\n{}", rows("\r")), rows("\r") + "4,d\n5,e\r\n"]
        {
            let error = detect(&text, DialectSettings::default()).unwrap_err();
            assert!(error.contains("carriage return"), "{error}");
        }
        let quoted = "x,y\n\"a\rb\rc\rd\re\",1\n\"f\",2\n";
        assert!(
            detect(quoted, DialectSettings::default()).is_ok()
                && detect(&rows("\r\n"), DialectSettings::default()).is_ok()
        );
    }

    #[test]
    fn quotes_and_comments_are_found() {
        let found = |text: &str| detect(text, DialectSettings::default()).unwrap();
        assert_eq!(found("a,b\n'x, y',1\n'z',2\n").quote, b'\'');
        assert_eq!(found("a,b\nit's,1\nx,2\n").quote, b'"');
        assert_eq!(found("a,b\n'tis,1\nx,2\n").quote, b'"');
        assert_eq!(found("a,b\n\"x, 'y\",1\nx,2\n").quote, b'"');
        assert_eq!(found("# made by hand\na,b\n1,2\n").comment, Some(b'#'));
        assert_eq!(found("# \"made, by, hand\na,b\n1,2\n").comment, Some(b'#'));
        assert_eq!(found("a,b\n\"x\n# y, z\nw\",1\nx,2\ny,3\n").comment, None);
        assert_eq!(found("colour,b\n#ff0000,2\n#00ff00,3\n").comment, None);
        let error = detect("#a,b\n1,2\n3,4\n", DialectSettings::default()).unwrap_err();
        assert!(error.contains("line 1: `#a,b` starts with `#`"), "{error}");
        let stated = DialectSettings { comment: CommentSetting::None, ..DialectSettings::default() };
        assert_eq!(detect("#a,b\n1,2\n3,4\n", stated).unwrap().comment, None);
    }
}
