//! Arrow tables as rows of quoted fields, so that the rest of the table code sees text, as for JSON.
//!
//! A batch is in memory at a time. Numbers keep all their digits; dates and times are written as ISO 8601.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use jiff::civil;
use jiff::tz::TimeZone;

use super::arrow_file::{ArrowArray, ArrowColumn, ArrowFile, ArrowType};
use super::rows::{ColumnNames, RowReader};
use super::time_zone;
use crate::DataError;

/// Reads the rows of a file.
pub struct ArrowRows {
    file: ArrowFile,
    names: Vec<String>,
    dictionaries: BTreeMap<i64, Vec<ArrowArray>>,
    next_batch: usize,
    batch: Vec<ArrowArray>,
    /// Rows of the batch, the next of them, and the rows of all batches before.
    rows: usize,
    next_row: usize,
    rows_before: u64,
    cell: String,
    row: Vec<u8>,
}

impl ArrowRows {
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = ArrowFile::open(path)?;
        let mut dictionaries = BTreeMap::new();
        for (id, kind) in file.columns.iter().filter_map(|column| column.dictionary) {
            dictionaries.insert(id, file.read_dictionary(id, kind)?);
        }
        let names = file.columns.iter().map(|column| column.name.clone()).collect();
        Ok(Self {
            file,
            names,
            dictionaries,
            next_batch: 0,
            batch: Vec::new(),
            rows: 0,
            next_row: 0,
            rows_before: 0,
            cell: String::new(),
            row: Vec::new(),
        })
    }
}

impl RowReader for ArrowRows {
    fn read_names(&mut self) -> Result<ColumnNames, DataError> {
        Ok(ColumnNames { names: self.names.clone(), ..ColumnNames::default() })
    }

    /// The file declares what its batches take.
    fn peak_bytes(&self) -> u64 {
        0
    }

    fn next(&mut self) -> Result<Option<(u64, &[u8])>, DataError> {
        while self.next_row == self.rows {
            if self.next_batch == self.file.batches() {
                return Ok(None);
            }
            self.rows_before += self.rows as u64;
            // The last batch is freed first.
            self.batch = Vec::new();
            self.batch = self.file.read_batch(self.next_batch)?;
            (self.rows, self.next_row) = (self.batch.first().map_or(0, |array| array.rows), 0);
            self.next_batch += 1;
            if self.batch.iter().any(|array| array.rows != self.rows) {
                return Err(self.file.damaged("the columns of a batch differ in length"));
            }
        }
        let i = self.next_row;
        self.next_row += 1;
        self.row.clear();
        for (column, array) in self.file.columns.iter().zip(&self.batch) {
            self.cell.clear();
            if write_cell(column, array, i, &self.dictionaries, &mut self.cell).is_none() {
                return Err(self.file.damaged("a value is outside of its buffer"));
            }
            if !self.row.is_empty() {
                self.row.push(b',');
            }
            // An empty text is missing, as in csv.
            self.row.push(b'"');
            for byte in self.cell.bytes() {
                self.row.extend(std::iter::repeat_n(byte, if byte == b'"' { 2 } else { 1 }));
            }
            self.row.push(b'"');
        }
        Ok(Some((self.rows_before + i as u64 + 1, &self.row)))
    }
}

/// Writes value `i` of a column; nothing if it is missing. `None` if the file is damaged.
fn write_cell(
    column: &ArrowColumn,
    array: &ArrowArray,
    i: usize,
    dictionaries: &BTreeMap<i64, Vec<ArrowArray>>,
    into: &mut String,
) -> Option<()> {
    let zone = column.zone.as_ref();
    let Some((id, kind)) = column.dictionary else { return write_value(column.kind, zone, array, i, into) };
    if !is_valid(array, i) {
        return Some(());
    }
    let mut index = usize::try_from(integer(column.kind, array, i)?).ok()?;
    for part in dictionaries.get(&id)? {
        if index < part.rows {
            return write_value(kind, zone, part, index, into);
        }
        index -= part.rows;
    }
    None
}

fn is_valid(array: &ArrowArray, i: usize) -> bool {
    match array.buffers.first() {
        Some(bits) if !bits.is_empty() => bits.get(i / 8).is_some_and(|byte| byte >> (i % 8) & 1 == 1),
        Some(_) => true,
        // A column of the null type has no buffers.
        None => false,
    }
}

/// `bytes` bytes of value `i` of a buffer of fixed-width values.
fn fixed(array: &ArrowArray, i: usize, bytes: usize) -> Option<&[u8]> {
    array.buffers.get(1)?.get(i.checked_mul(bytes)?..(i + 1).checked_mul(bytes)?)
}

fn integer(kind: ArrowType, array: &ArrowArray, i: usize) -> Option<i128> {
    let (bytes, signed) = match kind {
        ArrowType::Int { bytes, signed } => (bytes, signed),
        ArrowType::Decimal { bytes, .. } | ArrowType::Date { bytes } | ArrowType::Time { bytes, .. } => {
            (bytes, true)
        }
        ArrowType::Timestamp { .. } => (8, true),
        _ => return None,
    };
    let value = fixed(array, i, bytes)?;
    let fill = if signed && value.last()? & 0x80 != 0 { 0xff } else { 0 };
    let mut wide = [fill; 16];
    wide[..bytes].copy_from_slice(value);
    Some(i128::from_le_bytes(wide))
}

fn write_value(
    kind: ArrowType,
    zone: Option<&TimeZone>,
    array: &ArrowArray,
    i: usize,
    into: &mut String,
) -> Option<()> {
    if !is_valid(array, i) {
        return Some(());
    }
    // Writing to a string cannot fail.
    let mut write = |value: std::fmt::Arguments<'_>| into.write_fmt(value).ok();
    match kind {
        ArrowType::Null => Some(()),
        ArrowType::Bool => {
            let byte = array.buffers.get(1)?.get(i / 8)?;
            // A number, as of Parquet.
            write(format_args!("{}", byte >> (i % 8) & 1))
        }
        ArrowType::Int { .. } => write(format_args!("{}", integer(kind, array, i)?)),
        ArrowType::Float { bytes } => match *fixed(array, i, bytes)? {
            [a, b] => write(format_args!("{}", half::f16::from_le_bytes([a, b]))),
            [a, b, c, d] => write(format_args!("{}", f32::from_le_bytes([a, b, c, d]))),
            ref double => write(format_args!("{}", f64::from_le_bytes(double.try_into().ok()?))),
        },
        ArrowType::Text { offset_bytes } => {
            let offset = |i: usize| -> Option<usize> {
                let mut wide = [0; 8];
                wide[..offset_bytes].copy_from_slice(fixed(array, i, offset_bytes)?);
                usize::try_from(i64::from_le_bytes(wide)).ok()
            };
            into.push_str(std::str::from_utf8(array.buffers.get(2)?.get(offset(i)?..offset(i + 1)?)?).ok()?);
            Some(())
        }
        ArrowType::TextView => {
            let view = fixed(array, i, 16)?;
            let word =
                |at: usize| u32::from_le_bytes([view[at], view[at + 1], view[at + 2], view[at + 3]]) as usize;
            let len = word(0);
            let text = match len {
                ..=12 => &view[4..4 + len],
                _ => array.buffers.get(2 + word(8))?.get(word(12)..word(12).checked_add(len)?)?,
            };
            into.push_str(std::str::from_utf8(text).ok()?);
            Some(())
        }
        ArrowType::Decimal { scale, .. } => {
            let value = integer(kind, array, i)?;
            let digits = format!("{:0>width$}", value.unsigned_abs(), width = scale.max(0) as usize + 1);
            let (whole, fraction) = digits.split_at(digits.len() - scale.max(0) as usize);
            let sign = if value < 0 { "-" } else { "" };
            write(format_args!("{sign}{whole}"))?;
            if !fraction.is_empty() {
                write(format_args!(".{fraction}"))?;
            }
            write(format_args!("{}", "0".repeat(scale.min(0).unsigned_abs() as usize)))
        }
        ArrowType::Date { bytes } => {
            let value = integer(kind, array, i)?;
            let days = if bytes == 4 { value } else { value.div_euclid(86_400_000) };
            write(format_args!("{}", date(days)?))
        }
        ArrowType::Time { per_second, .. } => {
            let (seconds, rest) = split_seconds(integer(kind, array, i)?, per_second);
            write(format_args!("{}", time(seconds, rest, per_second)?))
        }
        ArrowType::Timestamp { per_second } => {
            let (seconds, rest) = split_seconds(integer(kind, array, i)?, per_second);
            let ahead =
                zone.map_or(0, |zone| time_zone::offset_seconds(zone, i64::try_from(seconds).unwrap_or(0)));
            let seconds = seconds + i128::from(ahead);
            let (days, seconds) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
            write(format_args!("{} {}", date(days)?, time(seconds, rest, per_second)?))
        }
    }
}

/// Whole seconds, and the units that are left.
fn split_seconds(value: i128, per_second: i64) -> (i128, i128) {
    (value.div_euclid(per_second.into()), value.rem_euclid(per_second.into()))
}

fn date(days: i128) -> Option<civil::Date> {
    let span = jiff::Span::new().try_days(i64::try_from(days).ok()?).ok()?;
    civil::date(1970, 1, 1).checked_add(span).ok()
}

fn time(seconds: i128, rest: i128, per_second: i64) -> Option<civil::Time> {
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let nanoseconds = rest * i128::from(1_000_000_000 / per_second);
    let part = |value: i128| i8::try_from(value).ok();
    civil::Time::new(part(hour)?, part(minute)?, part(second)?, i32::try_from(nanoseconds).ok()?).ok()
}
