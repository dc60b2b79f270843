//! Arrow IPC files (Feather version 2) and streams: the schema, and record batches one at a time, uncompressed or
//! by LZ4 or zstd.
//!
//! The metadata is untrusted: every length is checked against the file before anything is allocated for it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use jiff::tz::TimeZone;

use super::flatbuffer::Table;
use super::time_zone;
use crate::base::regular_file;
use crate::{DataError, files};

/// First bytes of the file, and its last.
pub const MAGIC: &[u8; 6] = b"ARROW1";

/// First bytes of every message, and so of a stream.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// Whether a file with these first bytes is an Arrow file or a stream, whose first message has a length of less
/// than 16 MiB.
pub fn is_arrow(start: &[u8]) -> bool {
    start.starts_with(MAGIC) || start.len() >= 8 && start.starts_with(&CONTINUATION) && start[7] == 0
}

/// Bytes of metadata at most: a schema of many thousand columns takes a few megabytes.
const MAX_METADATA_BYTES: u64 = 256 << 20;

/// A column that can become text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowColumn {
    pub name: String,
    pub kind: ArrowType,
    /// Values are indices into the dictionary of this id.
    pub dictionary: Option<(i64, ArrowType)>,
    /// Of points in time, which are then read as its clock shows them.
    pub zone: Option<TimeZone>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrowType {
    Null,
    Bool,
    Int {
        bytes: usize,
        signed: bool,
    },
    Float {
        bytes: usize,
    },
    /// Text with offsets of 4 or 8 bytes.
    Text {
        offset_bytes: usize,
    },
    /// Text in views of 16 bytes, as polars writes it.
    TextView,
    /// A number of `10^-scale`.
    Decimal {
        bytes: usize,
        scale: i32,
    },
    /// Days, or milliseconds since 1970.
    Date {
        bytes: usize,
    },
    /// Time of day, of `per_second` units.
    Time {
        bytes: usize,
        per_second: i64,
    },
    Timestamp {
        per_second: i64,
    },
}

impl ArrowType {
    /// Buffers of a column of this type, with the one of validity.
    fn buffers(self) -> usize {
        match self {
            Self::Null => 0,
            Self::Text { .. } => 3,
            // Further buffers of a view are counted by the batch.
            _ => 2,
        }
    }

    /// Bytes of the values buffer for `rows` values, as far as the type determines them.
    fn value_bytes(self, rows: usize) -> usize {
        match self {
            Self::Null => 0,
            Self::Bool => rows.div_ceil(8),
            Self::Int { bytes, .. }
            | Self::Float { bytes }
            | Self::Decimal { bytes, .. }
            | Self::Date { bytes }
            | Self::Time { bytes, .. } => bytes.saturating_mul(rows),
            Self::Timestamp { .. } => rows.saturating_mul(8),
            Self::Text { offset_bytes } => offset_bytes.saturating_mul(rows + 1),
            Self::TextView => rows.saturating_mul(16),
        }
    }
}

/// The values of a column in a batch: its buffers, decompressed. The first says which rows have a value; if it is
/// empty, all have.
#[derive(Clone, Debug, Default)]
pub struct ArrowArray {
    pub rows: usize,
    pub buffers: Vec<Vec<u8>>,
}

/// An open file.
pub struct ArrowFile {
    path: PathBuf,
    file: File,
    pub columns: Vec<ArrowColumn>,
    dictionaries: Vec<Block>,
    batches: Vec<Block>,
}

/// Where a message is: its metadata, then its body.
#[derive(Clone, Copy, Debug)]
struct Block {
    offset: u64,
    metadata_bytes: u64,
    body_bytes: u64,
}

impl ArrowFile {
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = regular_file::open(path).map_err(DataError::io(path))?;
        let length = file.metadata().map_err(DataError::io(path))?.len();
        let mut start = Vec::new();
        (&file).take(8).read_to_end(&mut start).map_err(DataError::io(path))?;
        if !is_arrow(&start) {
            let found = format!("`{}`", start.escape_ascii());
            return Err(DataError::WrongFormat { file: path.to_owned(), expected: "an Arrow file", found });
        }
        let mut opened = Self {
            path: path.to_owned(),
            file,
            columns: Vec::new(),
            dictionaries: Vec::new(),
            batches: Vec::new(),
        };
        if !start.starts_with(MAGIC) {
            opened.read_stream(length)?;
            return Ok(opened);
        }
        let tail = opened.read(length.saturating_sub(10), 10.min(length))?;
        if !tail.ends_with(MAGIC) {
            let declared = length + 1;
            return Err(DataError::Truncated { file: path.to_owned(), declared, found: length });
        }
        let footer_bytes = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
        let footer_start =
            length.checked_sub(10 + footer_bytes).ok_or_else(|| opened.damaged("its footer"))?;
        let footer = opened.read(footer_start, footer_bytes)?;
        let footer = Table::root(&footer).ok_or_else(|| opened.damaged("its footer"))?;
        let schema = footer.table(1).ok_or_else(|| opened.damaged("its schema"))?;
        opened.columns = opened.schema_columns(&schema)?;
        let blocks = |index| -> Option<Vec<Block>> {
            let block = |[offset, metadata, body]: [i64; 3]| {
                // The metadata length has 32 bits, and 32 bits of padding.
                let metadata_bytes = u64::try_from(metadata as i32).ok()?;
                let (offset, body_bytes) = (u64::try_from(offset).ok()?, u64::try_from(body).ok()?);
                let end = offset.checked_add(metadata_bytes)?.checked_add(body_bytes)?;
                (end <= length).then_some(Block { offset, metadata_bytes, body_bytes })
            };
            footer.structs::<3>(index).into_iter().map(block).collect()
        };
        (opened.dictionaries, opened.batches) = blocks(2)
            .zip(blocks(3))
            .ok_or_else(|| opened.damaged("its footer names parts outside of the file"))?;
        Ok(opened)
    }

    fn schema_columns(&self, schema: &Table<'_>) -> Result<Vec<ArrowColumn>, DataError> {
        match schema.i16(0).unwrap_or(0) {
            0 => schema.tables(1).iter().map(|field| self.column(field)).collect(),
            _ => Err(self.refused("it is big-endian", "write it on another machine")),
        }
    }

    /// Finds the messages of a stream, from its start to its end marker or to the end of the file.
    fn read_stream(&mut self, length: u64) -> Result<(), DataError> {
        let mut offset = 0;
        while offset + 8 <= length {
            let prefix = self.read(offset, 8)?;
            let bytes = u64::from(u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]));
            if !prefix.starts_with(&CONTINUATION) {
                return Err(self.damaged("a message of its stream has no marker"));
            }
            if bytes == 0 {
                break;
            }
            let mut block = Block { offset, metadata_bytes: 8 + bytes, body_bytes: 0 };
            let truncated =
                |declared| DataError::Truncated { file: self.path.clone(), declared, found: length };
            if offset + block.metadata_bytes > length {
                return Err(truncated(offset + block.metadata_bytes));
            }
            let message = self.message(block)?;
            let root = Table::root(&message).ok_or_else(|| self.damaged("a message of its stream"))?;
            let body = u64::try_from(root.i64(3).unwrap_or(0));
            block.body_bytes = body.map_err(|_| self.damaged("a message has a negative length"))?;
            let end = (offset + block.metadata_bytes).saturating_add(block.body_bytes);
            if end > length {
                return Err(truncated(end));
            }
            let header = root.table(2);
            match root.u8(1) {
                1 => {
                    let schema = header.ok_or_else(|| self.damaged("its schema"))?;
                    self.columns = self.schema_columns(&schema)?;
                }
                // Batches before it would have had other values.
                2 if !self.batches.is_empty() && !header.is_some_and(|header| header.bool(2)) => {
                    let hint = "write a file: `pyarrow.feather.write_feather(table, \"table.feather\")`";
                    return Err(self.refused("its stream replaces a dictionary after a batch", hint));
                }
                2 => self.dictionaries.push(block),
                3 => self.batches.push(block),
                _ => {}
            }
            offset = end;
        }
        Ok(())
    }

    pub fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Bytes that reading takes at most: the dictionaries, and the largest batch, compressed and not.
    pub fn reader_bytes(&self) -> Result<u64, DataError> {
        let dictionaries = self.dictionaries.iter().map(|block| self.block_bytes(*block));
        let dictionaries: u64 = dictionaries.sum::<Result<u64, _>>()?;
        let mut largest = 0;
        for block in &self.batches {
            largest = largest.max(self.block_bytes(*block)?);
        }
        Ok(dictionaries + largest)
    }

    fn block_bytes(&self, block: Block) -> Result<u64, DataError> {
        let message = self.message(block)?;
        let header = self.batch_header(&message)?;
        let mut total = block.metadata_bytes;
        for [offset, len] in header.structs::<2>(2) {
            let (at, len) = self.buffer_extent(block, offset, len)?;
            total += len;
            if header.table(3).is_some() && len >= 8 {
                total += self.declared_bytes(&self.read(at, 8)?, len)?;
            }
        }
        Ok(total)
    }

    /// The columns of batch `index`.
    pub fn read_batch(&self, index: usize) -> Result<Vec<ArrowArray>, DataError> {
        let block = self.batches[index];
        let message = self.message(block)?;
        let header = self.batch_header(&message)?;
        let stored: Vec<ArrowType> = self.columns.iter().map(|column| column.kind).collect();
        self.arrays(block, &header, &stored)
    }

    /// The dictionary `id`, whose values are of type `kind`; its parts in order.
    pub fn read_dictionary(&self, id: i64, kind: ArrowType) -> Result<Vec<ArrowArray>, DataError> {
        let mut parts = Vec::new();
        for block in &self.dictionaries {
            let message = self.message(*block)?;
            let header = Table::root(&message).and_then(|message| message.table(2));
            let header = header.ok_or_else(|| self.damaged("a dictionary"))?;
            if header.i64(0).unwrap_or(0) != id {
                continue;
            }
            let batch = header.table(1).ok_or_else(|| self.damaged("a dictionary"))?;
            if !header.bool(2) {
                parts.clear();
            }
            parts.extend(self.arrays(*block, &batch, &[kind])?);
        }
        Ok(parts)
    }

    fn arrays(
        &self,
        block: Block,
        batch: &Table<'_>,
        kinds: &[ArrowType],
    ) -> Result<Vec<ArrowArray>, DataError> {
        let (nodes, mut buffers) = (batch.structs::<2>(1), batch.structs::<2>(2).into_iter());
        let codec = batch.table(3).map(|compression| compression.u8(0));
        let mut more_buffers = batch.structs::<1>(4).into_iter();
        if nodes.len() != kinds.len() {
            return Err(self.damaged("a batch has another number of columns than the schema"));
        }
        let mut arrays = Vec::with_capacity(kinds.len());
        for (kind, [rows, _]) in kinds.iter().zip(nodes) {
            let rows = usize::try_from(rows).map_err(|_| self.damaged("a batch has a negative length"))?;
            let more = match kind {
                ArrowType::TextView => more_buffers.next().map_or(0, |[n]| usize::try_from(n).unwrap_or(0)),
                _ => 0,
            };
            let mut array = ArrowArray { rows, buffers: Vec::new() };
            for _ in 0..kind.buffers() + more {
                let [offset, len] = buffers.next().ok_or_else(|| self.damaged("a batch lacks a buffer"))?;
                let (at, len) = self.buffer_extent(block, offset, len)?;
                array.buffers.push(self.decompressed(self.read(at, len)?, codec)?);
            }
            let short = |i: usize, bytes: usize| array.buffers.get(i).is_some_and(|b| b.len() < bytes);
            let validity = array.buffers.first().map_or(0, Vec::len);
            // An empty array may leave out its only offset.
            if rows > 0 && (validity > 0 && validity < rows.div_ceil(8) || short(1, kind.value_bytes(rows))) {
                return Err(self.damaged("a buffer is shorter than its column"));
            }
            arrays.push(array);
        }
        Ok(arrays)
    }

    /// Position and length of a buffer of the body of `block`.
    fn buffer_extent(&self, block: Block, offset: i64, len: i64) -> Result<(u64, u64), DataError> {
        let inside = || {
            let (offset, len) = (u64::try_from(offset).ok()?, u64::try_from(len).ok()?);
            let fits = offset.checked_add(len)? <= block.body_bytes;
            fits.then_some((block.offset + block.metadata_bytes + offset, len))
        };
        inside().ok_or_else(|| self.damaged("a buffer is outside of its batch"))
    }

    /// Uncompressed bytes that a compressed buffer of `len` bytes declares; 0 if it is stored as it is.
    fn declared_bytes(&self, buffer: &[u8], len: u64) -> Result<u64, DataError> {
        let declared = buffer.first_chunk().map_or(0, |bytes| i64::from_le_bytes(*bytes));
        // A zstd block expands to at most 128 KiB and takes at least four bytes; LZ4 expands less.
        match u64::try_from(declared) {
            Ok(declared) if declared > len.saturating_mul(1 << 15) => {
                Err(self.damaged("a buffer declares more bytes than it can hold"))
            }
            Ok(declared) => Ok(declared),
            Err(_) => Ok(0),
        }
    }

    fn decompressed(&self, buffer: Vec<u8>, codec: Option<u8>) -> Result<Vec<u8>, DataError> {
        let (Some(codec), Some((prefix, body))) = (codec, buffer.split_first_chunk::<8>()) else {
            return Ok(buffer);
        };
        if i64::from_le_bytes(*prefix) < 0 {
            return Ok(body.to_vec());
        }
        let declared = self.declared_bytes(prefix, buffer.len() as u64)?;
        let mut out = Vec::with_capacity(declared as usize);
        let read = match codec {
            0 => lz4_flex::frame::FrameDecoder::new(body).take(declared).read_to_end(&mut out),
            1 => zstd::Decoder::new(body).and_then(|decoder| decoder.take(declared).read_to_end(&mut out)),
            _ => return Err(self.damaged("its compression is neither LZ4 nor zstd")),
        };
        match read {
            Ok(found) if found as u64 == declared => Ok(out),
            _ => Err(self.damaged("a buffer cannot be decompressed")),
        }
    }

    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, DataError> {
        let bytes = usize::try_from(len).map_err(|_| self.damaged("a part of it is too long"))?;
        let mut buffer = vec![0; bytes];
        files::read_exact_at(&self.file, &mut buffer, at).map_err(DataError::io(&self.path))?;
        Ok(buffer)
    }

    /// The flatbuffer of a message, after its prefix.
    fn message(&self, block: Block) -> Result<Vec<u8>, DataError> {
        if block.metadata_bytes > MAX_METADATA_BYTES {
            return Err(self.damaged("its metadata is too long"));
        }
        let mut bytes = self.read(block.offset, block.metadata_bytes)?;
        // A marker of four bytes, absent in old files, and the length.
        let prefix = if bytes.starts_with(&[0xff; 4]) { 8 } else { 4 };
        Ok(bytes.split_off(prefix.min(bytes.len())))
    }

    /// The record batch of a message; that of a dictionary is inside.
    fn batch_header<'a>(&self, message: &'a [u8]) -> Result<Table<'a>, DataError> {
        let root = Table::root(message);
        let header = root.and_then(|message| match message.u8(1) {
            2 => message.table(2)?.table(1),
            3 => message.table(2),
            _ => None,
        });
        header.ok_or_else(|| self.damaged("a message is no batch"))
    }

    fn column(&self, field: &Table<'_>) -> Result<ArrowColumn, DataError> {
        let name = field.text(0).unwrap_or_default().to_owned();
        let value = self.column_type(&name, field.u8(2), field.table(3))?;
        let zone = match (value, field.table(3).and_then(|about| about.text(1))) {
            (ArrowType::Timestamp { .. }, Some(zone)) if !zone.is_empty() => {
                let unknown =
                    || format!("the time zone `{}` of column `{name}` is not known", zone.escape_debug());
                Some(time_zone::find(zone).ok_or_else(|| self.refused(&unknown(), time_zone::UNKNOWN_HINT))?)
            }
            _ => None,
        };
        let Some(encoding) = field.table(4) else {
            return Ok(ArrowColumn { name, kind: value, dictionary: None, zone });
        };
        let index = match encoding.table(1) {
            Some(int) => int_type(&int).ok_or_else(|| self.damaged("a dictionary has no index type"))?,
            None => ArrowType::Int { bytes: 4, signed: true },
        };
        let dictionary = Some((encoding.i64(0).unwrap_or(0), value));
        Ok(ArrowColumn { name, kind: index, dictionary, zone })
    }

    fn column_type(&self, name: &str, kind: u8, about: Option<Table<'_>>) -> Result<ArrowType, DataError> {
        let per_second = |about: &Table<'_>, default| match about.i16(0).unwrap_or(default) {
            0 => Some(1),
            1 => Some(1_000),
            2 => Some(1_000_000),
            3 => Some(1_000_000_000),
            _ => None,
        };
        let bits = |about: &Table<'_>, index, default| about.i32(index).unwrap_or(default) as usize / 8;
        let found = about.as_ref().and_then(|about| match kind {
            1 => Some(ArrowType::Null),
            2 => int_type(about),
            3 => [2, 4, 8].get(about.i16(0).unwrap_or(0) as usize).map(|&bytes| ArrowType::Float { bytes }),
            5 => Some(ArrowType::Text { offset_bytes: 4 }),
            20 => Some(ArrowType::Text { offset_bytes: 8 }),
            24 => Some(ArrowType::TextView),
            6 => Some(ArrowType::Bool),
            7 => Some(ArrowType::Decimal { bytes: bits(about, 2, 128), scale: about.i32(1).unwrap_or(0) })
                .filter(|kind| matches!(kind, ArrowType::Decimal { bytes: 4 | 8 | 16, .. })),
            8 => Some(ArrowType::Date { bytes: if about.i16(0).unwrap_or(1) == 0 { 4 } else { 8 } }),
            9 => Some(ArrowType::Time { bytes: bits(about, 1, 32), per_second: per_second(about, 1)? })
                .filter(|kind| matches!(kind, ArrowType::Time { bytes: 4 | 8, .. })),
            10 => Some(ArrowType::Timestamp { per_second: per_second(about, 0)? }),
            // A duration is a number of its units.
            18 => Some(ArrowType::Int { bytes: 8, signed: true }),
            _ => None,
        });
        found.ok_or_else(|| {
            let problem = format!("column `{name}` is {}, which no input can be made of", type_name(kind));
            let hint = "drop it, or write Parquet: `pandas.read_feather(f).to_parquet(\"table.parquet\")`";
            self.refused(&problem, hint)
        })
    }

    pub fn damaged(&self, what: &str) -> DataError {
        self.refused(&format!("it is damaged: {what}"), "write the file again")
    }

    fn refused(&self, problem: &str, hint: &'static str) -> DataError {
        DataError::Table { file: self.path.clone(), place: String::new(), problem: problem.into(), hint }
    }
}

fn int_type(about: &Table<'_>) -> Option<ArrowType> {
    let bytes = about.i32(0)? / 8;
    let bytes = [1, 2, 4, 8].into_iter().find(|width| *width == bytes)? as usize;
    Some(ArrowType::Int { bytes, signed: about.bool(1) })
}

fn type_name(kind: u8) -> &'static str {
    match kind {
        4 | 15 | 19 | 23 => "of binary values",
        11 => "of calendar intervals",
        12 | 16 | 21 | 25 | 26 => "of lists",
        13 => "of structs",
        17 => "of maps",
        _ => "of another type",
    }
}
