//! The texts a job is made of: its file and every `--set`, concatenated in one address space, so that a byte range
//! anywhere in the parsed tree identifies its text.

use std::ops::Range;

use serde::Serialize;
use unicode_width::UnicodeWidthChar;

/// Maximum columns of a line shown; a longer one is truncated around the location.
const MAX_COLUMNS: usize = 110;

/// The span of an error about the whole file, such as a missing table.
pub(super) const WHOLE_FILE: Range<usize> = 0..0;

struct SourceFile {
    name: String,
    start: usize,
    text: String,
}

#[derive(Default)]
pub(super) struct SourceMap {
    files: Vec<SourceFile>,
    end: usize,
}

impl SourceMap {
    /// Adds a text and returns the address of its first byte.
    pub fn add(&mut self, name: &str, text: &str) -> usize {
        let start = self.end;
        // A gap of one byte, so that the end of a text is not the start of the next.
        self.end += text.len() + 1;
        self.files.push(SourceFile { name: name.to_owned(), start, text: text.to_owned() });
        start
    }

    /// The location of `span`; the whole file for [`WHOLE_FILE`]. One past the end is the end.
    pub fn locate(&self, span: Range<usize>) -> Option<SourceLocation> {
        let source = self.files.iter().rev().find(|t| t.start <= span.start)?;
        let spot = (span != WHOLE_FILE).then(|| source.snippet(span));
        Some(SourceLocation { file: source.name.clone(), snippet: spot })
    }
}

impl SourceFile {
    fn snippet(&self, span: Range<usize>) -> Snippet {
        let (source, text) = (self, &self.text);
        let start = floor_char_boundary(text, span.start - source.start);
        let end = floor_char_boundary(text, span.end.saturating_sub(source.start)).max(start);
        let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
        let line = text[line_start..line_end].trim_end_matches('\r');
        let (from, to) = (start - line_start, (end - line_start).min(line.len()));
        let before = &line[..from.min(line.len())];
        let marked = &line[before.len()..to.max(before.len())];
        let (excerpt, indent, width) = excerpt(before, marked, &line[before.len() + marked.len()..]);
        Snippet {
            line: text[..start].matches('\n').count() + 1,
            column: before.chars().count() + 1,
            excerpt,
            indent,
            width,
        }
    }
}

fn floor_char_boundary(text: &str, mut at: usize) -> usize {
    at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// The line as shown, and where on it the mark starts and how wide it is, in terminal columns.
fn excerpt(before: &str, marked: &str, after: &str) -> (String, usize, usize) {
    let (mut before, marked, after) = (printable(before), printable(marked), printable(after));
    let over = width(&before).saturating_sub(MAX_COLUMNS / 2);
    if over > 0 && width(&before) + width(&marked) + width(&after) > MAX_COLUMNS {
        let mut cut = 0;
        before = before.chars().skip_while(|c| (cut < over, cut += c.width().unwrap_or(0)).0).collect();
        before.insert_str(0, "...");
    }
    let (indent, mark) = (width(&before), width(&marked).max(1));
    let mut left = MAX_COLUMNS.saturating_sub(indent);
    let whole = marked + &after;
    let rest: String = whole
        .chars()
        .take_while(|c| {
            let w = c.width().unwrap_or(0);
            let fits = w <= left;
            left = left.saturating_sub(w);
            fits
        })
        .collect();
    let cut = if rest.len() < whole.len() { "..." } else { "" };
    (format!("{before}{rest}{cut}").trim_end().to_owned(), indent, mark.min(width(&rest).max(1)))
}

/// Tabs as spaces and control characters as a visible mark: a job cannot write to the terminal.
fn printable(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        match c {
            '\t' => out.push_str("    "),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
        out
    })
}

fn width(text: &str) -> usize {
    text.chars().map(|c| c.width().unwrap_or(0)).sum()
}

/// A location in a job file or in a `--set`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceLocation {
    /// The file's path as given, or `--set`.
    pub file: String,
    /// Absent when it is about the whole file.
    #[serde(flatten)]
    pub snippet: Option<Snippet>,
}

/// A location on a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snippet {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// The line, tabs as spaces.
    pub excerpt: String,
    /// Terminal columns before the mark under the excerpt.
    #[serde(skip)]
    pub indent: usize,
    /// Terminal columns of the mark.
    #[serde(skip)]
    pub width: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn snippet_of(text: &str, span: Range<usize>) -> Snippet {
        let mut sources = SourceMap::default();
        sources.add("job.toml", text);
        sources.files[0].snippet(span)
    }

    #[test]
    fn tabs_wide_characters_and_crlf_keep_the_mark_in_place() {
        let p = snippet_of("a = 1\r\n\tb = \"\u{4f60}\u{597d}\" # x\r\n", 12..20);
        assert_eq!((p.line, p.column), (2, 6));
        assert_eq!(p.excerpt, "    b = \"\u{4f60}\u{597d}\" # x");
        assert_eq!((p.indent, p.width), (8, 6));
    }

    #[test]
    fn the_end_of_a_text_is_a_place() {
        for text in ["", "a = ", "a = \n", "a\r\n"] {
            let p = snippet_of(text, text.len()..text.len());
            assert_eq!(p.width, 1, "{text:?}");
        }
        assert_eq!(snippet_of("a = \n", 5..5).line, 2);
    }

    #[test]
    fn a_long_line_is_cut_around_the_mark() {
        let text = format!("{} = 1 # {}", "k".repeat(300), "c".repeat(300));
        let p = snippet_of(&text, 303..304);
        assert!(p.excerpt.len() <= MAX_COLUMNS + 6, "{}", p.excerpt);
        assert_eq!(&p.excerpt[p.indent..p.indent + p.width], "1");
    }

    #[test]
    fn a_second_text_has_its_own_lines() {
        let mut sources = SourceMap::default();
        sources.add("job.toml", "a = 1\n");
        let start = sources.add("--set", "b=2");
        let place = sources.locate(start..start + 1).unwrap();
        let spot = place.snippet.unwrap();
        assert_eq!((place.file.as_str(), spot.line, spot.column), ("--set", 1, 1));
        assert_eq!(spot.excerpt, "b=2");
        assert_eq!(
            sources.locate(WHOLE_FILE),
            Some(SourceLocation { file: "job.toml".into(), snippet: None })
        );
    }

    proptest! {
        #[test]
        fn any_span_of_any_text_is_a_place(text in "(\\PC|\n|\r|\t){0,200}", a in 0usize..250, n in 0usize..250) {
            let p = snippet_of(&text, a..a + n);
            prop_assert!(p.line >= 1 && p.column >= 1 && p.width >= 1);
        }
    }
}
