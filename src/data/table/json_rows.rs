//! JSON tables: objects, one after the other or in an array. Each becomes a row of quoted fields, so that the rest of
//! the table code sees text.
//!
//! The columns are the fields of the first records in alphabetical order; nested fields are joined by points, as in
//! `user.age`, and the values of a list are numbered, as in `embedding.0`. A list of texts is one
//! column, as JSON: it may be the labels of the record. A file is read once, from its beginning, in
//! memory bounded by the longest record.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::dialect::MAX_ROW_BYTES;
use super::inference::SAMPLE_ROWS;
use super::rows::{ColumnNames, RowReader};
use crate::DataError;
use crate::files::{self, read_error};

/// Bytes per read.
const READ_BYTES: usize = 256 << 10;
/// Maximum columns; a list of a million values is not a row of a table.
const MAX_COLUMNS: usize = 100_000;

/// Reads the records of a file as rows of text.
pub struct JsonRows {
    records: JsonRecords,
    /// Ascending.
    names: Vec<String>,
    /// Columns that hold lists of texts.
    text_lists: Vec<usize>,
    cells: Vec<Option<String>>,
    /// Columns that the record has.
    is_set: Vec<bool>,
    row: Vec<u8>,
    /// Bytes held at most so far.
    peak_bytes: usize,
}

impl JsonRows {
    /// Opens `file` and finds its columns.
    pub fn open(file: &Path) -> Result<Self, DataError> {
        let (mut names, mut lists, mut empty) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut sample = JsonRecords::open(file)?;
        for _ in 0..SAMPLE_ROWS {
            let Some((_, value)) = sample.next()? else { break };
            flatten(String::new(), value, &mut |name, _, kind| match kind {
                CellKind::EmptyList => drop(empty.insert(name)),
                CellKind::TextList => {
                    lists.insert(name.clone());
                    names.insert(name);
                }
                CellKind::Value => drop(names.insert(name)),
            });
            if names.len() > MAX_COLUMNS {
                return Err(DataError::Table {
                    file: file.to_owned(),
                    place: String::new(),
                    problem: format!("its records have more than {MAX_COLUMNS} fields"),
                    hint: "store long lists in Parquet or in a file of their own",
                });
            }
        }
        // An empty list is one of texts unless other records say what it holds.
        for name in empty {
            let first = format!("{name}.0");
            if !names.contains(&first) {
                lists.insert(name.clone());
                names.insert(name);
            }
        }
        drop(sample);
        let names: Vec<String> = names.into_iter().collect();
        let text_lists = (0..names.len()).filter(|i| lists.contains(&names[*i])).collect();
        let (cells, is_set) = (vec![None; names.len()], vec![false; names.len()]);
        let records = JsonRecords::open(file)?;
        Ok(Self { records, names, text_lists, cells, is_set, row: Vec::new(), peak_bytes: 0 })
    }
}

impl RowReader for JsonRows {
    fn read_names(&mut self) -> Result<ColumnNames, DataError> {
        let (names, text_lists) = (self.names.clone(), self.text_lists.clone());
        Ok(ColumnNames { names, text_lists, ..ColumnNames::default() })
    }

    fn peak_bytes(&self) -> u64 {
        let of_column = |name: &String| {
            size_of::<String>()
                + heap_bytes(name.capacity())
                + size_of::<Option<String>>()
                + size_of::<bool>()
        };
        (self.peak_bytes + self.names.iter().map(of_column).sum::<usize>()) as u64
    }

    fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        self.cells.fill(None);
        let Some((line, value)) = self.records.next()? else { return Ok(None) };
        let mut tree = ValueBytes::default();
        tree.add(&value);
        let parsing = self.records.buffer.capacity() + tree.total(self.records.has_escapes);
        let parsing = parsing.max(self.records.fill_bytes) + self.records.quoted_bytes + self.row.capacity();
        self.is_set.fill(false);
        let (mut unknown, mut twice, mut next) = (None, None, 0);
        flatten(String::new(), value, &mut |name, cell, kind| {
            let column = column_of(&self.names, next, &name);
            match column {
                Some(column) if std::mem::replace(&mut self.is_set[column], true) => twice = Some(name),
                Some(column) => self.cells[column] = cell,
                None if kind == CellKind::EmptyList => {}
                None => unknown = unknown.take().or(Some(name)),
            }
            next = column.map_or(next, |column| column + 1);
        });
        if let Some(name) = twice {
            return Err(DataError::Table {
                file: self.records.file.clone(),
                place: format!("line {line}"),
                problem: format!(
                    "two fields are named `{name}`: one has points in its own name, and one is nested"
                ),
                hint: "rename one of them",
            });
        }
        if let Some(name) = unknown {
            return Err(DataError::Table {
                file: self.records.file.clone(),
                place: format!("line {line}"),
                problem: format!("field `{name}` is in none of the first {SAMPLE_ROWS} records"),
                hint: "move a record with every field to the beginning, with null for what it lacks",
            });
        }
        self.row.clear();
        let texts = || self.cells.iter().flatten();
        let escaped = |text: &String| text.len() + memchr::memchr_iter(b'"', text.as_bytes()).count() + 2;
        let length = texts().map(escaped).sum::<usize>() + self.cells.len();
        if self.row.capacity() < length {
            // Not the old row beside the new one, and no more than the longest takes.
            self.row = Vec::new();
            self.row.reserve_exact(length);
        }
        let texts = texts().map(|text| heap_bytes(text.capacity())).sum::<usize>();
        let writing = self.records.buffer.capacity() + texts + self.row.capacity();
        self.peak_bytes = self.peak_bytes.max(parsing).max(writing);
        for (i, cell) in self.cells.iter_mut().enumerate() {
            if i > 0 {
                self.row.push(b',');
            }
            if let Some(text) = cell.take() {
                self.row.push(b'"');
                self.row.extend(
                    text.bytes().flat_map(|byte| std::iter::repeat_n(byte, if byte == b'"' { 2 } else { 1 })),
                );
                self.row.push(b'"');
            }
        }
        Ok(Some((line, &self.row)))
    }
}

/// The column called `name`; `next` is the likely one, since most records have their fields in one order.
fn column_of(names: &[String], next: usize, name: &str) -> Option<usize> {
    match names.get(next) {
        Some(expected) if expected == name => Some(next),
        _ => names.binary_search_by(|other| other.as_str().cmp(name)).ok(),
    }
}

/// Bytes of an allocation of `bytes` bytes, with what the allocator adds.
fn heap_bytes(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16).max(32) }
}

/// Memory of a parsed record.
#[derive(Default)]
struct ValueBytes {
    /// Of all values, and of the texts that they become.
    held: usize,
    /// Of the old half of the largest list or object, which is copied when it grows.
    growth: usize,
    longest_text: usize,
}

impl ValueBytes {
    fn add(&mut self, value: &Value) {
        // The text of a number.
        const NUMBER_BYTES: usize = 32;
        match value {
            Value::Null => {}
            Value::Bool(_) | Value::Number(_) => self.held += NUMBER_BYTES,
            Value::String(text) => {
                self.held += heap_bytes(text.capacity());
                self.longest_text = self.longest_text.max(text.len());
            }
            Value::Array(values) => {
                self.add_list(values.capacity() * size_of::<Value>());
                values.iter().for_each(|value| self.add(value));
                if values.iter().all(Value::is_string) {
                    // A list of texts is written as JSON to a text that doubles as it grows.
                    let texts = values.iter().filter_map(Value::as_str).map(|text| text.len() + 3);
                    self.held += 3 * texts.sum::<usize>();
                }
            }
            Value::Object(fields) => {
                // A hash table at most 7/8 full, and as many entries as it has room for.
                let slots = (fields.len() * 8).div_ceil(7).next_power_of_two();
                let entry = size_of::<u64>() + size_of::<String>() + size_of::<Value>();
                self.held += slots * (size_of::<usize>() + 1);
                self.add_list(slots * 7 / 8 * entry);
                for (name, value) in fields {
                    self.held += heap_bytes(name.capacity());
                    self.longest_text = self.longest_text.max(name.len());
                    self.add(value);
                }
            }
        }
    }

    fn add_list(&mut self, bytes: usize) {
        self.held += bytes;
        self.growth = self.growth.max(bytes / 2);
    }

    /// With the buffer that texts with escapes are decoded in, which doubles as it grows.
    fn total(&self, has_escapes: bool) -> usize {
        self.held + self.growth + if has_escapes { 2 * self.longest_text } else { 0 }
    }
}

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CellKind {
    Value,
    /// A list of texts, as JSON.
    TextList,
    EmptyList,
}

/// Calls `visit` with the name, the text and the kind of each value; null has no text.
fn flatten(name: String, value: Value, visit: &mut dyn FnMut(String, Option<String>, CellKind)) {
    let inner = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Null => visit(name, None, CellKind::Value),
        Value::Bool(value) => visit(name, Some(value.to_string()), CellKind::Value),
        Value::Number(number) => visit(name, Some(number.to_string()), CellKind::Value),
        Value::String(text) => visit(name, Some(text), CellKind::Value),
        Value::Array(values) if values.is_empty() => visit(name, Some("[]".into()), CellKind::EmptyList),
        Value::Array(values) if values.iter().all(Value::is_string) => {
            visit(name, Some(Value::from(values).to_string()), CellKind::TextList);
        }
        Value::Array(values) => {
            values
                .into_iter()
                .enumerate()
                .for_each(|(i, value)| flatten(inner(&i.to_string()), value, visit));
        }
        Value::Object(fields) => {
            fields.into_iter().for_each(|(key, value)| flatten(inner(&key), value, visit))
        }
    }
}

/// A record whose numbers are not finite, as Python writes them, with these in quotes; `None` if there are none.
#[cold]
fn quote_non_finite(record: &[u8]) -> Option<Vec<u8>> {
    const NAMES: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
    let (mut quoted, mut at, mut in_string, mut found) = (Vec::with_capacity(record.len()), 0, false, false);
    while at < record.len() {
        let name = NAMES.into_iter().find(|name| !in_string && record[at..].starts_with(name));
        let (part, len) = match (name, record[at]) {
            (Some(name), _) => ([b"\"", name, b"\""].concat(), name.len()),
            (None, b'\\') if in_string => (record[at..record.len().min(at + 2)].to_vec(), 2),
            (None, byte) => (vec![byte], 1),
        };
        in_string ^= name.is_none() && part == b"\"";
        found |= name.is_some();
        quoted.extend(part);
        at += len;
    }
    found.then_some(quoted)
}

/// Reads the objects of a file, one at a time.
struct JsonRecords {
    file: PathBuf,
    body: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    position: usize,
    eof: bool,
    /// Line feeds before `position`.
    line_feeds: u64,
    started: bool,
    in_array: bool,
    /// Bytes at most so far of the buffer while it grows: the old one and the new one.
    fill_bytes: usize,
    /// The last record has escapes, and the bytes of its copy with quoted numbers, if there was one.
    has_escapes: bool,
    quoted_bytes: usize,
}

impl JsonRecords {
    fn open(file: &Path) -> Result<Self, DataError> {
        Ok(Self {
            file: file.to_owned(),
            body: files::open(file)?,
            buffer: Vec::new(),
            position: 0,
            eof: false,
            line_feeds: 0,
            started: false,
            in_array: false,
            fill_bytes: 0,
            has_escapes: false,
            quoted_bytes: 0,
        })
    }

    fn wrong(&self, problem: String) -> DataError {
        DataError::Table {
            file: self.file.clone(),
            place: format!("line {}", self.line_feeds + 1),
            problem,
            hint: "a table in JSON is an array of objects, or one object per line",
        }
    }

    /// The next object and its first line.
    fn next(&mut self) -> Result<Option<(u64, Value)>, DataError> {
        if !self.started {
            self.fill()?;
            if self.buffer.starts_with(b"\xef\xbb\xbf") {
                self.position = 3;
            }
            self.started = true;
            if self.skip_space()? == Some(b'[') {
                self.position += 1;
                self.in_array = true;
            }
        }
        loop {
            match self.skip_space()? {
                None if self.in_array => {
                    return Err(self.wrong("the array is not closed: the file is truncated".into()));
                }
                None => return Ok(None),
                Some(b',') if self.in_array => self.position += 1,
                Some(b']') if self.in_array => {
                    self.position += 1;
                    return match self.skip_space()? {
                        None => Ok(None),
                        Some(_) => Err(self.wrong("there is more after the end of the array".into())),
                    };
                }
                Some(b'{') => break,
                Some(byte) => {
                    return Err(self.wrong(format!("expected an object, found `{}`", byte.escape_ascii())));
                }
            }
        }
        let length = self.object_length()?;
        let record = &self.buffer[self.position..self.position + length];
        self.has_escapes = memchr::memchr(b'\\', record).is_some();
        self.quoted_bytes = 0;
        let parsed = serde_json::from_slice(record);
        let parsed = parsed.or_else(|error| match quote_non_finite(record) {
            Some(quoted) => {
                self.quoted_bytes = quoted.capacity();
                serde_json::from_slice(&quoted)
            }
            None => Err(error),
        });
        let value = parsed.map_err(|error| {
            // The position that the library reports is within the record.
            let text = error.to_string();
            let what = text.split(" at line ").next().unwrap_or_default();
            self.wrong(format!("the record is not valid JSON: {what}"))
        })?;
        let line = self.line_feeds + 1;
        self.line_feeds += memchr::memchr_iter(b'\n', record).count() as u64;
        self.position += length;
        Ok(Some((line, value)))
    }

    /// Length of the object at `position`: up to the brace that closes it.
    fn object_length(&mut self) -> Result<usize, DataError> {
        let (mut at, mut depth, mut quoted, mut escaped) = (0, 0usize, false, false);
        loop {
            while let Some(byte) = self.buffer.get(self.position + at) {
                at += 1;
                match byte {
                    _ if escaped => escaped = false,
                    b'\\' if quoted => escaped = true,
                    b'"' => quoted = !quoted,
                    _ if quoted => {}
                    b'{' | b'[' => depth += 1,
                    b'}' | b']' => {
                        depth -= 1;
                        if depth == 0 {
                            return Ok(at);
                        }
                    }
                    _ => {}
                }
            }
            if self.eof {
                return Err(self.wrong("the record is not closed: the file is truncated".into()));
            }
            if at > MAX_ROW_BYTES {
                return Err(super::row_too_long(&self.file, self.line_feeds + 1));
            }
            self.fill()?;
        }
    }

    /// The next byte that is not white space, not consumed.
    fn skip_space(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            while let Some(byte) = self.buffer.get(self.position) {
                match byte {
                    b'\n' => self.line_feeds += 1,
                    b' ' | b'\t' | b'\r' => {}
                    _ => return Ok(Some(*byte)),
                }
                self.position += 1;
            }
            if self.eof {
                return Ok(None);
            }
            self.fill()?;
        }
    }

    /// Reads more: `READ_BYTES`, or a quarter of what is buffered already, which keeps the copies of a long record
    /// linear in its length.
    fn fill(&mut self) -> Result<(), DataError> {
        self.buffer.drain(..std::mem::take(&mut self.position));
        let more = (self.buffer.len() / 4).max(READ_BYTES);
        if self.buffer.capacity() - self.buffer.len() < more {
            let before = self.buffer.capacity();
            self.buffer.reserve_exact(more);
            self.fill_bytes = self.fill_bytes.max(before + self.buffer.capacity());
        }
        let more = more as u64;
        let read = (&mut self.body).take(more).read_to_end(&mut self.buffer);
        let read = read.map_err(|error| read_error(&self.file, error))?;
        self.eof = (read as u64) < more;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_not_finite_are_read_as_python_writes_them() {
        let quoted =
            |text: &str| quote_non_finite(text.as_bytes()).map(|text| String::from_utf8(text).unwrap());
        let record = r#"{"a": NaN, "NaN": [-Infinity, Infinity], "b": "a \" NaN"}"#;
        let expected = r#"{"a": "NaN", "NaN": ["-Infinity", "Infinity"], "b": "a \" NaN"}"#;
        assert_eq!(quoted(record).unwrap(), expected);
        assert_eq!(quoted(r#"{"a": "NaN"}"#), None);
    }

    /// The plan of a table has what reading its longest record takes: the buffer, the parsed record and the row.
    #[test]
    fn a_long_record_is_part_of_the_peak() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let peak = |records: &[String]| {
            std::fs::write(&path, records.concat()).unwrap();
            let mut reader = JsonRows::open(&path).unwrap();
            let mut longest = 0;
            while let Some((_, row)) = reader.next().unwrap() {
                longest = longest.max(row.len());
                assert!(reader.row.capacity() <= longest.max(reader.names.len()) + 1);
            }
            (reader.peak_bytes() as usize, longest)
        };
        let short = || "{\"a\": 1, \"s\": \"x\"}\n".to_owned();
        let (few, _) = peak(&[short(), short()]);
        assert!((READ_BYTES..2 * READ_BYTES).contains(&few), "{few}");
        // A text of 3 MiB, which is 6 MiB as it is escaped.
        let text = 3 << 20;
        let long = format!("{{\"a\": 1, \"s\": \"{}\"}}\n", "\\n".repeat(text));
        let (peak_bytes, row) = peak(&[short(), long.clone(), short()]);
        assert!(row >= text);
        let (least, most) = (long.len() + 2 * text, 3 * long.len() + 2 * text);
        assert!((least..most).contains(&peak_bytes), "{peak_bytes} of {least} to {most}");
        // 20,000 fields, each with a name, an entry and a cell.
        let fields: Vec<String> = (0..20_000).map(|i| format!("\"name{i}\": {i}.5")).collect();
        let (peak_bytes, _) = peak(&[format!("{{{}}}\n", fields.join(", "))]);
        assert!((20_000 * 200..20_000 * 600).contains(&peak_bytes), "{peak_bytes}");
    }

    /// Column names, and rows by their line.
    type NamedRows = (Vec<String>, Vec<(u64, String)>);

    fn rows(text: &str) -> Result<NamedRows, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        std::fs::write(&path, text).unwrap();
        let mut reader = JsonRows::open(&path).map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        while let Some((line, row)) = reader.next().map_err(|error| error.to_string())? {
            found.push((line, String::from_utf8_lossy(row).into_owned()));
        }
        Ok((reader.names, found))
    }

    #[test]
    fn lines_and_arrays_are_the_same_rows() {
        let a = r#"{"b": 1, "a": "x \"y\"\n{", "c": {"d": [1.5, null]}}"#;
        let b = r#"{"a": null, "b": true}"#;
        let expected = [
            r#""x ""y""
{","1","1.5","#,
            r#","true",,"#,
        ];
        for (text, second) in
            [(format!("\u{feff}{a}\n\n{b}\n"), 3), (format!("[{a},\n {b}]\n"), 2), (format!("{a}{b}"), 1)]
        {
            let (names, found) = rows(&text).unwrap();
            assert_eq!(names, ["a", "b", "c.d.0", "c.d.1"]);
            assert_eq!(found, [(1, expected[0].to_owned()), (second, expected[1].to_owned())], "{text}");
        }
    }

    /// Records have as many labels as they like, and the files of a table the same columns.
    #[test]
    fn a_list_of_texts_is_one_column() {
        let text = r#"{"a": 1, "tags": ["x", "y \"z\""], "v": [1, 2]}
{"a": 2, "tags": [], "v": []}
{"a": 3, "tags": ["x", "y", "z"], "v": [3, 4]}
"#;
        let (names, found) = rows(text).unwrap();
        assert_eq!(names, ["a", "tags", "v.0", "v.1"]);
        assert_eq!(found[0].1, r#""1","[""x"",""y \""z\""""]","1","2""#);
        assert_eq!(found[1].1, r#""2","[]",,"#);
        assert_eq!(rows(r#"{"tags": []}"#).unwrap().0, ["tags"]);
    }

    #[test]
    fn what_is_no_table_is_refused_with_its_line() {
        for (text, expected) in [
            ("{\"a\": 1}\n[1]\n", "line 2: expected an object, found `[`"),
            ("[{\"a\": 1}\n", "line 2: the array is not closed"),
            ("[{\"a\": 1}] 5", "line 1: there is more after the end of the array"),
            ("{\"a\": 1}\n{\"a\": }\n", "line 2: the record is not valid JSON: expected value"),
            ("{\"a\": 1}\n{\"a\": {", "line 2: the record is not closed"),
            ("a,b\n1,2\n", "line 1: expected an object, found `a`"),
        ] {
            let error = rows(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
