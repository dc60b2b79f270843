//! Validates the page headers of a Parquet column before decoding: the decoder allocates whatever a header declares, so
//! a corrupt header must be found first.
//!
//! A header is a struct in Thrift's compact protocol; only the few fields that affect memory are parsed.

use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom};

/// Maximum uncompressed bytes of a page; writers typically use 1 MB, the largest known 100 MB.
const MAX_PAGE_BYTES: i64 = 128 << 20;
/// Maximum bytes of a header, which may include the minimum and maximum value of the page.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Maximum nesting of structs; Parquet uses three levels.
const MAX_STRUCT_DEPTH: u32 = 8;
/// Maximum nesting of columns.
const MAX_SCHEMA_DEPTH: usize = 64;
/// Delta encodings of text.
const DELTA_TEXT: [i64; 2] = [6, 7];

/// Sizes of the pages of one column of one row group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSizes {
    /// Of the largest data page, and of all of them.
    pub largest: u64,
    pub total: u64,
    /// Of the dictionary, and the number of its values.
    pub dictionary: u64,
    pub dictionary_values: u64,
    /// Of the largest page in the file.
    pub compressed: u64,
    /// Whether a page has delta-encoded text, which may decode to more bytes than the page has.
    pub delta_text: bool,
}

/// Checks every page between bytes `start` and `start + length`, which hold one column of one row group.
pub fn check_pages(file: &mut (impl Read + Seek), start: u64, length: u64) -> Result<PageSizes> {
    let end =
        start.checked_add(length).ok_or_else(|| corrupt("a column extends beyond the end of the file"))?;
    let (mut at, mut sizes) = (start, PageSizes::default());
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
        // Every dictionary value takes at least one byte, that of a decimal of two digits.
        if page.dictionary_values.is_some_and(|values| values < 0 || values > page.uncompressed) {
            return Err(corrupt("a dictionary with more values than its page has bytes for"));
        }
        sizes.delta_text |= page.encoding.is_some_and(|encoding| DELTA_TEXT.contains(&encoding));
        let bytes = page.uncompressed as u64;
        match page.dictionary_values {
            Some(values) => (sizes.dictionary, sizes.dictionary_values) = (bytes, values as u64),
            None => (sizes.largest, sizes.total) = (sizes.largest.max(bytes), sizes.total + bytes),
        }
        sizes.compressed = sizes.compressed.max(page.compressed as u64);
        at += header.input.read + page.compressed as u64;
    }
    if at == end { Ok(sizes) } else { Err(corrupt("a page extends beyond the end of its column")) }
}

/// Checks how deep the columns of a file are nested: the library recurses over the schema, and a stack overflow aborts
/// the process. The library itself reports other errors in the file. Returns the bytes of the file's metadata.
pub fn check_schema(file: &mut (impl Read + Seek)) -> Result<u64> {
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = [0; 8];
    if length < 12 {
        return Ok(0);
    }
    file.seek(SeekFrom::Start(length - 8))?;
    file.read_exact(&mut end)?;
    let [size @ .., b'P', b'A', b'R', b'1'] = end else { return Ok(0) };
    let size = u64::from(u32::from_le_bytes(size));
    let Some(start) = (length - 8).checked_sub(size) else { return Ok(0) };
    file.seek(SeekFrom::Start(start))?;
    ThriftReader { input: LimitedReader { inner: file, read: 0, limit: size } }.check_schema_depth()?;
    Ok(size)
}

fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Fields of a page header.
#[derive(Default)]
struct PageHeader {
    uncompressed: i64,
    compressed: i64,
    /// Number of values in a dictionary page.
    dictionary_values: Option<i64>,
    /// Encoding of a data page.
    encoding: Option<i64>,
}

/// Reads a header with a limit on its length.
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
                // Headers of data pages, dictionary pages and version 2 data pages.
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

    /// Walks the schema, field 2 of the footer: a list that has each column before its children.
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
        // Children still to come, for each ancestor of the next column.
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
                return Err(corrupt(&format!("columns nested more than {MAX_SCHEMA_DEPTH} deep")));
            }
        }
        Ok(())
    }

    /// Calls `visit` with each field of a struct: its id and type.
    fn fields(&mut self, depth: u32, visit: &mut dyn FnMut(&mut Self, i64, u8) -> Result<()>) -> Result<()> {
        if depth > MAX_STRUCT_DEPTH {
            return Err(corrupt("a page header with structs nested too deep"));
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
            return Err(corrupt("a page header with lists nested too deep"));
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
                // In a list, a boolean takes one byte.
                let kind = if matches!(head & 15, 1 | 2) { 3 } else { head & 15 };
                // An element takes at least one byte, so the header length bounds the count.
                (0..count).try_for_each(|_| self.skip(kind, depth + 1))
            }
            12 => self.fields(depth, &mut |header, _, kind| header.skip(kind, depth + 1)),
            _ => Err(corrupt("a page header with a field of an unknown type")),
        }
    }

    fn int(&mut self, kind: u8) -> Result<i64> {
        if matches!(kind, 4..=6) {
            self.read_zigzag()
        } else {
            Err(corrupt("a page header with a field of the wrong type"))
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
