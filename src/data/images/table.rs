//! A table of image paths and labels: a header line, one image per line, separated by commas, tabs, semicolons or
//! bars.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

use super::listing::ImageListing;
use crate::{DataError, files};

/// Names of the columns that hold the image path, relative to the table, and the label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelColumns {
    pub path: String,
    pub label: String,
    /// What separates the labels of an image; `None` if it has one, and empty if it has one whatever the labels look
    /// like.
    pub separator: Option<String>,
}

impl LabelColumns {
    fn allows_no_label(&self) -> bool {
        self.separator.as_ref().is_some_and(|separator| !separator.is_empty())
    }
}

/// Maximum line length in bytes; a longer line means the file is not a table.
const MAX_LINE_BYTES: usize = 1 << 20;

impl ImageListing {
    /// Adds the images listed in the table `file`.
    pub fn add_table(&mut self, file: &Path, columns: &LabelColumns) -> Result<(), DataError> {
        let (before, mut opened) = (self.len(), false);
        for_each_row(file, columns, &mut |path, label| {
            if !std::mem::replace(&mut opened, true) {
                self.add_container(file.parent().unwrap_or(Path::new("")));
            }
            let class = self.class_names.intern(label);
            self.add(OsStr::new(path), class);
            Ok(())
        })?;
        if self.len() == before {
            return Err(DataError::Table {
                file: file.to_owned(),
                place: String::new(),
                problem: "it has a header but no rows".into(),
                hint: "add a row for each image",
            });
        }
        Ok(())
    }
}

/// Calls `visit` with the path of every image that a table lists.
pub fn walk_image_table(
    file: &Path,
    columns: &LabelColumns,
    visit: &mut dyn FnMut(&Path) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for_each_row(file, columns, &mut |path, _| visit(Path::new(path)))
}

/// Calls `visit` with the path and the label of every row.
fn for_each_row(
    file: &Path,
    columns: &LabelColumns,
    visit: &mut dyn FnMut(&str, &str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut rows = LabelTableReader::open(file, columns)?;
    let header = match rows.next()? {
        true => rows.fields().map(|f| f.to_vec()).collect::<Vec<_>>(),
        false => return Err(DataError::EmptyFile { file: file.to_owned() }),
    };
    let column = |name: &str| {
        let found = header.iter().position(|h| h.trim_ascii().eq_ignore_ascii_case(name.as_bytes()));
        found.ok_or_else(|| {
            let shown: Vec<_> = header.iter().map(|h| format!("`{}`", String::from_utf8_lossy(h))).collect();
            let problem = format!("no column `{name}`; the columns are {}", shown.join(", "));
            DataError::Table {
                file: file.to_owned(),
                place: "line 1".into(),
                problem,
                hint: "set `path_column` and `label_column` to the columns of the paths and the labels",
            }
        })
    };
    let (path, label) = (column(&columns.path)?, column(&columns.label)?);
    while rows.next()? {
        let wrong = |problem: String| DataError::Record {
            file: file.to_owned(),
            place: format!("line {}", rows.line),
            problem,
        };
        let field = |column: usize, name: &str| match rows.fields().nth(column) {
            Some(text) => match str::from_utf8(text) {
                Ok(text) if !text.trim().is_empty() => Ok(text.trim()),
                // An image without labels.
                Ok(_) if column == label && columns.allows_no_label() => Ok(""),
                Ok(_) => Err(wrong(format!("column `{name}` is blank"))),
                Err(_) => Err(wrong(format!("column `{name}` is not UTF-8 text"))),
            },
            None => Err(wrong(format!("column `{name}` is missing"))),
        };
        visit(field(path, &columns.path)?, field(label, &columns.label)?)?;
    }
    Ok(())
}

/// Reads a table row by row.
struct LabelTableReader<'a> {
    file: &'a Path,
    input: Box<dyn Read + Send>,
    reader: Reader,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were read but not parsed yet.
    ready: std::ops::Range<usize>,
    output: Vec<u8>,
    ends: Vec<usize>,
    field_count: usize,
    /// Line on which the last row began, from 1.
    line: u64,
}

impl<'a> LabelTableReader<'a> {
    fn open(file: &'a Path, columns: &LabelColumns) -> Result<Self, DataError> {
        let mut input = files::open(file)?;
        let mut buffer = vec![0; 1 << 16];
        let ready = 0..fill(&mut *input, &mut buffer, file)?;
        let text = &buffer[ready.clone()];
        let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        let first = text.split(|b| *b == b'\n').next().unwrap_or_default();
        // The one between the names in use or, for a message that lists the columns, the most frequent.
        let has_columns = |delimiter: &u8| {
            let names = || first.split(|b| b == delimiter).map(<[u8]>::trim_ascii);
            let has = |wanted: &str| names().any(|name| bare(name).eq_ignore_ascii_case(wanted.as_bytes()));
            has(&columns.path) && has(&columns.label)
        };
        let frequent = || {
            let count = |delimiter: &u8| first.iter().filter(|b| *b == delimiter).count();
            b"|;\t,".iter().copied().max_by_key(count).unwrap_or(b',')
        };
        let delimiter = b"|;\t,".iter().copied().find(has_columns).unwrap_or_else(frequent);
        let reader = ReaderBuilder::new().delimiter(delimiter).build();
        // Skip a byte order mark, which would become part of the first column name.
        let start = if buffer[ready.clone()].starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
        let (output, ends) = (vec![0; 1 << 10], vec![0; 16]);
        Ok(Self {
            file,
            input,
            reader,
            buffer,
            ready: start..ready.end,
            output,
            ends,
            field_count: 0,
            line: 1,
        })
    }

    /// Reads the next row; false at the end.
    fn next(&mut self) -> Result<bool, DataError> {
        let (mut written, mut ended) = (0, 0);
        self.line = self.reader.line();
        loop {
            if self.ready.is_empty() {
                self.ready = 0..fill(&mut *self.input, &mut self.buffer, self.file)?;
            }
            let (result, taken, wrote, ends) = self.reader.read_record(
                &self.buffer[self.ready.clone()],
                &mut self.output[written..],
                &mut self.ends[ended..],
            );
            self.ready.start += taken;
            written += wrote;
            ended += ends;
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull if self.output.len() < MAX_LINE_BYTES => {
                    self.output.resize(2 * self.output.len(), 0);
                }
                ReadRecordResult::OutputEndsFull if self.ends.len() < MAX_LINE_BYTES => {
                    self.ends.resize(2 * self.ends.len(), 0);
                }
                ReadRecordResult::OutputFull | ReadRecordResult::OutputEndsFull => {
                    let problem = format!("it has more than {MAX_LINE_BYTES} bytes or columns");
                    let place = format!("line {}", self.line);
                    return Err(DataError::Record { file: self.file.to_owned(), place, problem });
                }
                ReadRecordResult::Record => {
                    self.field_count = ended;
                    return Ok(true);
                }
                ReadRecordResult::End => return Ok(false),
            }
        }
    }

    fn fields(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.field_count).map(|i| {
            let start = i.checked_sub(1).map_or(0, |before| self.ends[before]);
            &self.output[start..self.ends[i]]
        })
    }
}

/// A name without its quotes.
fn bare(name: &[u8]) -> &[u8] {
    name.strip_prefix(b"\"").and_then(|name| name.strip_suffix(b"\"")).unwrap_or(name)
}

fn fill(input: &mut dyn Read, buffer: &mut [u8], file: &Path) -> Result<usize, DataError> {
    loop {
        match input.read(buffer) {
            Ok(read) => return Ok(read),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(files::read_error(file, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn listed(text: &[u8]) -> Result<Vec<(String, String)>, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("labels.csv");
        std::fs::write(&file, text).unwrap();
        let mut listing = ImageListing::default();
        listing.add_table(
            &file,
            &LabelColumns { path: "path".into(), label: "label".into(), separator: None },
        )?;
        assert_eq!(listing.containers, [folder.path()]);
        let name = |i| listing.class_names.as_slice()[listing.class(i) as usize].clone();
        Ok((0..listing.len()).map(|i| (listing.path(i).to_str().unwrap().to_owned(), name(i))).collect())
    }

    #[test]
    fn commas_tabs_quotes_and_other_columns_are_read() {
        let expected = [("a b.jpg", "cat"), ("sub/c,d.png", "dog")];
        let expected = expected.map(|(a, b)| (a.to_owned(), b.to_owned()));
        let comma = "\u{feff}id,Label , path\n1,cat,a b.jpg\n\n2, dog ,\"sub/c,d.png\"\n";
        assert_eq!(listed(comma.as_bytes()).unwrap(), expected);
        assert_eq!(listed(b"path\tlabel\r\na b.jpg\tcat\r\nsub/c,d.png\tdog").unwrap(), expected);
        assert_eq!(listed(b"path;label;note\na b.jpg;cat;x, y\nsub/c,d.png;dog;\n").unwrap(), expected);
        assert_eq!(
            listed(b"\xef\xbb\xbf\"path\"|\"label\"\na b.jpg|cat\nsub/c,d.png|dog\n").unwrap(),
            expected
        );
        let long: String = (0..9000).map(|i| format!("{i:090}.jpg,{}\n", i % 7)).collect();
        assert_eq!(listed(format!("path,label\n{long}").as_bytes()).unwrap().len(), 9000);
    }

    #[test]
    fn errors_name_the_line_and_the_column() {
        for (text, expected) in [
            ("", "is empty"),
            ("path,label\n", "but no rows"),
            ("file,label\na,b\n", "no column `path`; the columns are `file`, `label`"),
            ("path,label\na.jpg,x\nb.jpg\n", "line 3: column `label` is missing"),
            ("path,label\n,x\n", "line 2: column `path` is blank"),
        ] {
            let error = listed(text.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = listed(b"path,label\n\xff\xfe.jpg,x\n").unwrap_err().to_string();
        assert!(error.contains("line 2: column `path` is not UTF-8"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            edits in prop::collection::vec((0usize..80, any::<u8>()), 0..8),
            cut in 0usize..80,
        ) {
            let mut text = b"path,label\n\"a\"\"b.jpg\",cat\nsub/c.png,\"do\ng\"\nd.webp,3\n".to_vec();
            for (at, byte) in edits {
                if let Some(place) = text.get_mut(at) {
                    *place = byte;
                }
            }
            text.truncate(cut.max(1));
            drop(listed(&text));
        }
    }
}
