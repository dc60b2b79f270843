//! What the pages of a Parquet column promise, looked at before they are decoded: the library that decodes them
//! allocates what a page's header says, so a damaged header must be found first.
//!
//! A header is a struct in Thrift's compact protocol; only the few fields that decide about memory are taken.

use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};

/// The most bytes a page may unpack to; writers keep to 1 MB, the largest known to 100 MB.
const MAX_PAGE_BYTES: i64 = 128 << 20;
/// The most bytes of a header, which may hold the page's least and largest value.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Structs within structs; Parquet has three.
const MAX_STRUCT_DEPTH: u32 = 8;
/// Columns within columns, at most.
const MAX_SCHEMA_DEPTH: usize = 64;
/// Delta encodings of text, whose own counts the library believes.
const DELTA_TEXT: [i64; 2] = [6, 7];

/// Looks at every page between bytes `start` and `start + length`, which hold one column of one row group.
pub fn check_pages(file: &mut (impl Read + Seek), start: u64, length: u64) -> Result<()> {
    let end = start.checked_add(length).ok_or_else(|| corrupt("a column lies behind the end of the file"))?;
    let mut at = start;
    while at < end {
        file.seek(SeekFrom::Start(at))?;
        let mut header = ThriftReader {
            input: LimitedReader { inner: file, read: 0, limit: MAX_HEADER_BYTES.min(end - at) },
        };
        let page = header.read_page_header()?;
        if page.compressed < 0 || page.uncompressed < 0 || page.uncompressed > MAX_PAGE_BYTES {
            return Err(corrupt(&format!(
                "a page of {} bytes, {} unpacked",
                page.compressed, page.uncompressed
            )));
        }
        // No value of a dictionary takes less than four bytes.
        if page.dictionary_values.is_some_and(|values| values < 0 || values > page.uncompressed / 4) {
            return Err(corrupt("a dictionary with more values than its page can hold"));
        }
        if page.encoding.is_some_and(|encoding| DELTA_TEXT.contains(&encoding)) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "text in delta encoding cannot be read; write the column plain or with a dictionary",
            ));
        }
        at += header.input.read + page.compressed as u64;
    }
    if at == end { Ok(()) } else { Err(corrupt("a page goes on behind the end of its column")) }
}

/// Looks at how deep the columns of a file lie in one another: the library that reads the schema goes as deep, and a stack
/// that overflows ends the process. What else is wrong with the file is told by that library.
pub fn check_schema(file: &mut (impl Read + Seek)) -> Result<()> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = [0; 8];
    if length < 12 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(length - 8))?;
    file.read_exact(&mut end)?;
    let [size @ .., b'P', b'A', b'R', b'1'] = end else { return Ok(()) };
    let size = u64::from(u32::from_le_bytes(size));
    let Some(start) = (length - 8).checked_sub(size) else { return Ok(()) };
    file.seek(SeekFrom::Start(start))?;
    ThriftReader { input: LimitedReader { inner: file, read: 0, limit: size } }.check_schema_depth()
}

fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Of a page's header.
#[derive(Default)]
struct PageHeader {
    uncompressed: i64,
    compressed: i64,
    /// Values of a dictionary page.
    dictionary_values: Option<i64>,
    /// Of a data page.
    encoding: Option<i64>,
}

/// Bytes of a header, no more than one can have.
struct LimitedReader<'a, R> {
    inner: &'a mut R,
    read: u64,
    limit: u64,
}

struct ThriftReader<'a, R> {
    input: LimitedReader<'a, R>,
}

impl<R: Read> ThriftReader<'_, R> {
    fn read_page_header(&mut self) -> Result<PageHeader> {
        let mut page = PageHeader::default();
        self.fields(0, &mut |header, field, kind| {
            match field {
                2 => page.uncompressed = header.int(kind)?,
                3 => page.compressed = header.int(kind)?,
                // The headers of a data page, a dictionary page and a data page of the second version.
                5 | 7 | 8 if kind == 12 => header.fields(1, &mut |header, inner, kind| {
                    match (field, inner) {
                        (7, 1) => page.dictionary_values = Some(header.int(kind)?),
                        (5, 2) | (8, 4) => page.encoding = Some(header.int(kind)?),
                        _ => header.skip(kind, 2)?,
                    }
                    Ok(())
                })?,
                _ => header.skip(kind, 1)?,
            }
            Ok(())
        })?;
        Ok(page)
    }

    /// The schema of a file, which is the second field of its footer: a list that names each column before those in it.
    fn check_schema_depth(&mut self) -> Result<()> {
        let mut field = 0i64;
        loop {
            let byte = self.byte()?;
            if byte == 0 {
                return Ok(());
            }
            field = match byte >> 4 {
                0 => self.read_zigzag()?,
                more => field.wrapping_add(more.into()),
            };
            if (field, byte & 15) == (2, 9) {
                break;
            }
            self.skip(byte & 15, 1)?;
        }
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.read_varint()? } else { (head >> 4).into() };
        // Columns that are still to come in each of those around the next one.
        let mut open: Vec<i64> = Vec::new();
        for _ in 0..count {
            let mut inside = 0;
            self.fields(1, &mut |header, field, kind| match field {
                5 => header.int(kind).map(|children| inside = children),
                _ => header.skip(kind, 2),
            })?;
            while open.last() == Some(&0) {
                open.pop();
            }
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            if inside > 0 {
                open.push(inside);
            }
            if open.len() > MAX_SCHEMA_DEPTH {
                return Err(corrupt(&format!(
                    "columns that lie more than {MAX_SCHEMA_DEPTH} deep in one another"
                )));
            }
        }
        Ok(())
    }

    /// Shows each field of a struct: its number and its kind.
    fn fields(&mut self, depth: u32, visit: &mut dyn FnMut(&mut Self, i64, u8) -> Result<()>) -> Result<()> {
        if depth > MAX_STRUCT_DEPTH {
            return Err(corrupt("a page header with structs too deep"));
        }
        let mut field = 0i64;
        loop {
            let byte = self.byte()?;
            if byte == 0 {
                return Ok(());
            }
            field = match byte >> 4 {
                0 => self.read_zigzag()?,
                more => field.wrapping_add(more.into()),
            };
            visit(self, field, byte & 15)?;
        }
    }

    fn skip(&mut self, kind: u8, depth: u32) -> Result<()> {
        if depth > MAX_STRUCT_DEPTH {
            return Err(corrupt("a page header with lists too deep"));
        }
        match kind {
            1 | 2 => Ok(()),
            3 => self.byte().map(drop),
            4..=6 => self.read_zigzag().map(drop),
            7 => self.skip_bytes(8),
            8 => {
                let length = self.read_varint()?;
                self.skip_bytes(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = if head >> 4 == 15 { self.read_varint()? } else { (head >> 4).into() };
                // In a list, a truth value takes a byte.
                let kind = if matches!(head & 15, 1 | 2) { 3 } else { head & 15 };
                // An element takes a byte at least, so the count is bounded by the header's length.
                (0..count).try_for_each(|_| self.skip(kind, depth + 1))
            }
            12 => self.fields(depth, &mut |header, _, kind| header.skip(kind, depth + 1)),
            _ => Err(corrupt("a page header with an unknown kind of field")),
        }
    }

    fn int(&mut self, kind: u8) -> Result<i64> {
        if matches!(kind, 4..=6) {
            self.read_zigzag()
        } else {
            Err(corrupt("a page header with a field of a wrong kind"))
        }
    }

    fn read_zigzag(&mut self) -> Result<i64> {
        let coded = self.read_varint()?;
        Ok((coded >> 1) as i64 ^ -((coded & 1) as i64))
    }

    fn read_varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(value);
            }
        }
        Err(corrupt("a page header with a number too long"))
    }

    fn skip_bytes(&mut self, count: u64) -> Result<()> {
        if count > self.input.limit {
            return Err(corrupt("a page header that is too long"));
        }
        (0..count).try_for_each(|_| self.byte().map(drop))
    }

    fn byte(&mut self) -> Result<u8> {
        if self.input.read == self.input.limit {
            return Err(corrupt("a page header that is too long"));
        }
        let mut byte = [0];
        self.input.inner.read_exact(&mut byte)?;
        self.input.read += 1;
        Ok(byte[0])
    }
}
