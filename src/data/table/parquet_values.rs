//! Values of a Parquet column as cells: numbers, texts, points in time, and lists of equal length.

use half::f16;
use parquet::basic::{ConvertedType, LogicalType, Repetition, TimeUnit, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType, FixedLenByteArray, Int96};
use parquet::errors::ParquetError;
use parquet::schema::types::ColumnDescriptor;

use super::CellValue;
use super::dates::StampKind;

/// Maximum values of a list.
const MAX_LIST_LENGTH: usize = 1 << 16;
const SECONDS_PER_DAY: f64 = 86_400.0;

/// How the values of a column convert to cells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueFormat {
    conversion: Conversion,
    /// Definition level of a value that is not null.
    present_level: i16,
    /// Definition level from which on a list is not empty.
    element_level: i16,
    /// Values of a row; `None` if the column is no list of numbers.
    list: Option<usize>,
    /// The column holds lists of texts.
    text_list: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Conversion {
    Signed,
    Unsigned,
    /// Whole numbers in this unit: decimals, and seconds of dates and times.
    Scaled(f64),
    /// Big-endian two's complement.
    Decimal(i32),
    Float16,
    Text,
}

impl ValueFormat {
    /// `list` is the length of the column's lists.
    pub fn of(column: &ColumnDescriptor, list: Option<usize>) -> Self {
        let unsigned =
            [ConvertedType::UINT_8, ConvertedType::UINT_16, ConvertedType::UINT_32, ConvertedType::UINT_64];
        let is_decimal = column.converted_type() == ConvertedType::DECIMAL;
        let bytes = matches!(column.physical_type(), Type::BYTE_ARRAY | Type::FIXED_LEN_BYTE_ARRAY);
        let conversion = match unit_seconds(column) {
            Some(unit) => Conversion::Scaled(unit),
            None if is_decimal && bytes => Conversion::Decimal(column.type_scale()),
            None if is_decimal => Conversion::Scaled(10f64.powi(-column.type_scale())),
            None if column.logical_type_ref() == Some(&LogicalType::Float16) => Conversion::Float16,
            None if bytes => Conversion::Text,
            None if unsigned.contains(&column.converted_type()) => Conversion::Unsigned,
            None => Conversion::Signed,
        };
        let present_level = column.max_def_level();
        let about = column.self_type().get_basic_info();
        let optional_element =
            i16::from(about.has_repetition() && about.repetition() == Repetition::OPTIONAL);
        let (element_level, text_list) = (present_level - optional_element, is_text_list(column));
        Self { conversion, present_level, element_level, list, text_list }
    }

    /// Whether cells are texts.
    pub fn is_text(&self) -> bool {
        self.conversion == Conversion::Text
    }

    /// Whether cells are lists of texts.
    pub fn is_text_list(&self) -> bool {
        self.text_list
    }

    /// Values of a row.
    pub fn values_per_row(&self) -> usize {
        self.list.unwrap_or(1)
    }

    fn int(&self, value: i64, unsigned: u64) -> f64 {
        match self.conversion {
            Conversion::Unsigned => unsigned as f64,
            Conversion::Scaled(unit) => value as f64 * unit,
            _ => value as f64,
        }
    }

    fn bytes(&self, value: &[u8]) -> f64 {
        match (self.conversion, value) {
            (Conversion::Float16, [low, high]) => f16::from_le_bytes([*low, *high]).to_f64(),
            (Conversion::Decimal(scale), _) => decimal(value, scale),
            _ => f64::NAN,
        }
    }
}

/// Seconds of one unit of a date or time.
fn unit_seconds(column: &ColumnDescriptor) -> Option<f64> {
    let of_unit = |unit: &TimeUnit| match unit {
        TimeUnit::MILLIS => 1e-3,
        TimeUnit::MICROS => 1e-6,
        TimeUnit::NANOS => 1e-9,
    };
    match (column.logical_type_ref(), column.converted_type()) {
        (Some(LogicalType::Timestamp(time) | LogicalType::Time(time)), _) => Some(of_unit(&time.unit)),
        (Some(LogicalType::Date), _) | (_, ConvertedType::DATE) => Some(SECONDS_PER_DAY),
        (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIME_MILLIS) => Some(1e-3),
        (_, ConvertedType::TIMESTAMP_MICROS | ConvertedType::TIME_MICROS) => Some(1e-6),
        _ => None,
    }
}

/// What points in time the column declares to hold; their cells are seconds since 1970, or since midnight.
pub fn stamp_kind(column: &ColumnDescriptor) -> Option<StampKind> {
    match (column.physical_type(), column.logical_type_ref(), column.converted_type()) {
        _ if column.max_rep_level() > 0 => None,
        (Type::INT96, ..) => Some(StampKind::DateTime),
        (_, Some(LogicalType::Date), _) | (.., ConvertedType::DATE) => Some(StampKind::Date),
        (_, Some(LogicalType::Time(_)), _)
        | (.., ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS) => Some(StampKind::Time),
        (_, Some(LogicalType::Timestamp(_)), _)
        | (.., ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS) => {
            Some(StampKind::DateTime)
        }
        _ => None,
    }
}

/// Whether the column holds lists of texts: labels, if it is the target.
pub fn is_text_list(column: &ColumnDescriptor) -> bool {
    let is_decimal = column.converted_type() == ConvertedType::DECIMAL;
    column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 1 && !is_decimal
}

/// Why a column cannot be converted to numbers or categories.
pub fn unsupported_reason(column: &ColumnDescriptor) -> Option<&'static str> {
    let is_decimal = column.converted_type() == ConvertedType::DECIMAL;
    match column.physical_type() {
        _ if column.max_rep_level() > 1 => Some("lists of lists"),
        _ if is_text_list(column) => Some("lists of texts"),
        Type::FIXED_LEN_BYTE_ARRAY
            if !is_decimal && column.logical_type_ref() != Some(&LogicalType::Float16) =>
        {
            Some("byte arrays of fixed length")
        }
        _ => None,
    }
}

/// The value of a decimal: a big-endian two's complement number times a power of ten.
fn decimal(bytes: &[u8], scale: i32) -> f64 {
    let negative = bytes.first().is_some_and(|byte| byte & 0x80 != 0);
    match bytes.len() {
        0 => f64::NAN,
        1..=16 => {
            let fill = if negative { -1i128 } else { 0 };
            let whole = bytes.iter().fold(fill, |whole, byte| whole << 8 | i128::from(*byte));
            // Dividing by an exact power rounds once where both fit 53 bits, as parsing the decimal does.
            match scale {
                0..=22 => whole as f64 / 10f64.powi(scale),
                _ => whole as f64 * 10f64.powi(-scale),
            }
        }
        // 256 bits: rounded at each byte, which is far below the precision of f32.
        _ => {
            // The complement of a negative number, so that no leading ones have to cancel out.
            let flip = if negative { 0xff } else { 0 };
            let whole = bytes.iter().fold(0.0, |whole, byte| whole * 256.0 + f64::from(byte ^ flip));
            let whole = if negative { -whole - 1.0 } else { whole };
            whole * 10f64.powi(-scale)
        }
    }
}

/// The values of a column that were decoded last.
pub enum ColumnValues {
    /// NaN for null.
    Numbers(Vec<f64>),
    Texts(Vec<Option<ByteArray>>),
    /// The texts of each row; `None` for null.
    TextLists(Vec<Option<Vec<ByteArray>>>),
    Lists {
        values: Vec<f64>,
        length: usize,
        wrong: Vec<(usize, String)>,
    },
}

impl ColumnValues {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Numbers(values) => values.len(),
            Self::Texts(values) => values.len(),
            Self::TextLists(values) => values.len(),
            Self::Lists { values, length, .. } => values.len() / (*length).max(1),
        }
    }

    pub fn cell(&self, row: usize, element: usize) -> CellValue<'_> {
        match self {
            Self::Numbers(values) => CellValue::Number(values[row]),
            Self::Texts(values) => {
                values[row].as_ref().map_or(CellValue::Missing, |text| CellValue::Text(text.data()))
            }
            Self::TextLists(values) => {
                values[row].as_ref().map_or(CellValue::Missing, |texts| CellValue::Texts(texts))
            }
            Self::Lists { values, length, wrong } => {
                match wrong.binary_search_by_key(&row, |(row, _)| *row) {
                    Ok(i) => CellValue::Text(wrong[i].1.as_bytes()),
                    Err(_) => CellValue::Number(values[row * length + element]),
                }
            }
        }
    }

    /// Decodes the next `count` rows of a column.
    pub fn decode(
        reader: &mut ColumnReader,
        format: ValueFormat,
        count: usize,
    ) -> Result<Self, ParquetError> {
        use ColumnReader::*;
        match reader {
            ByteArrayColumnReader(reader) if format.is_text_list() => {
                decode_text_lists(reader, format, count)
            }
            ByteArrayColumnReader(reader) if format.is_text() => {
                let make = |value: Option<&ByteArray>| value.cloned();
                Ok(Self::Texts(decode_rows(reader, format, count, make)?))
            }
            ByteArrayColumnReader(reader) => {
                Self::numbers(reader, format, count, |v: &ByteArray| format.bytes(v.data()))
            }
            FixedLenByteArrayColumnReader(reader) => {
                Self::numbers(reader, format, count, |v: &FixedLenByteArray| format.bytes(v.data()))
            }
            BoolColumnReader(reader) => Self::numbers(reader, format, count, |v| f64::from(*v)),
            Int32ColumnReader(reader) => {
                Self::numbers(reader, format, count, |v| format.int((*v).into(), (*v as u32).into()))
            }
            Int64ColumnReader(reader) => Self::numbers(reader, format, count, |v| format.int(*v, *v as u64)),
            Int96ColumnReader(reader) => Self::numbers(reader, format, count, int96_seconds),
            FloatColumnReader(reader) => Self::numbers(reader, format, count, |v| f64::from(*v)),
            DoubleColumnReader(reader) => Self::numbers(reader, format, count, |v| *v),
        }
    }

    fn numbers<T: DataType>(
        reader: &mut ColumnReaderImpl<T>,
        format: ValueFormat,
        count: usize,
        make: impl Fn(&T::T) -> f64,
    ) -> Result<Self, ParquetError> {
        let make = |value: Option<&T::T>| value.map_or(f64::NAN, &make);
        match format.list {
            None => Ok(Self::Numbers(decode_rows(reader, format, count, make)?)),
            Some(length) => decode_lists(reader, format, count, length, make),
        }
    }
}

/// Days since the Julian epoch and nanoseconds, as Spark and Hive store time stamps.
fn int96_seconds(value: &Int96) -> f64 {
    const UNIX_EPOCH_JULIAN_DAY: f64 = 2_440_588.0;
    let [low, high, day] = [value.data()[0], value.data()[1], value.data()[2]];
    let nanos = u64::from(high) << 32 | u64::from(low);
    (f64::from(day as i32) - UNIX_EPOCH_JULIAN_DAY) * SECONDS_PER_DAY + nanos as f64 * 1e-9
}

/// Reads `count` records with their levels.
fn read_levels<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    count: usize,
    lists: bool,
) -> Result<Levels<T::T>, ParquetError> {
    let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
    let mut found = 0;
    while found < count {
        let repeated = lists.then_some(&mut repeated);
        let (rows, ..) = reader.read_records(count - found, Some(&mut defined), repeated, &mut values)?;
        if rows == 0 {
            return Err(ParquetError::EOF("a column has fewer values than its row group has rows".into()));
        }
        found += rows;
    }
    Ok(Levels { values, defined, repeated })
}

struct Levels<V> {
    values: Vec<V>,
    defined: Vec<i16>,
    repeated: Vec<i16>,
}

/// Decodes the next `count` values of a column and converts each with `make`; `None` is null. The result has no spare
/// capacity, which very many columns would add up.
fn decode_rows<T: DataType, V>(
    reader: &mut ColumnReaderImpl<T>,
    format: ValueFormat,
    count: usize,
    make: impl Fn(Option<&T::T>) -> V,
) -> Result<Vec<V>, ParquetError> {
    let Levels { values, defined, .. } = read_levels(reader, count, false)?;
    if format.present_level == 0 {
        return Ok(values.iter().map(|value| make(Some(value))).collect());
    }
    let mut values = values.iter();
    let make = |level: &i16| make(if *level == format.present_level { values.next() } else { None });
    Ok(defined.iter().map(make).collect())
}

/// Decodes the next `count` lists, each of which has `length` values. A list that is null has only missing values.
fn decode_lists<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    format: ValueFormat,
    count: usize,
    length: usize,
    make: impl Fn(Option<&T::T>) -> f64,
) -> Result<ColumnValues, ParquetError> {
    let levels = read_levels(reader, count, true)?;
    let mut present = levels.values.iter();
    let (mut values, mut wrong) = (Vec::with_capacity(count * length), Vec::new());
    for (row, (defined, is_null)) in levels.rows(format).enumerate() {
        let start = values.len();
        let found = if is_null { 0 } else { defined.len() };
        for level in defined {
            let value = make(if *level == format.present_level { present.next() } else { None });
            if values.len() < start + length && !is_null {
                values.push(value);
            }
        }
        values.resize(start + length, f64::NAN);
        if found != length && !is_null {
            wrong.push((row, format!("a list of {found} values")));
        }
    }
    Ok(ColumnValues::Lists { values, length, wrong })
}

/// Decodes the next `count` lists of texts. Nulls in a list are no labels.
fn decode_text_lists<T: DataType<T = ByteArray>>(
    reader: &mut ColumnReaderImpl<T>,
    format: ValueFormat,
    count: usize,
) -> Result<ColumnValues, ParquetError> {
    let levels = read_levels(reader, count, true)?;
    let mut present = levels.values.iter();
    let lists = levels.rows(format).map(|(defined, is_null)| {
        let filled = defined.iter().filter(|level| **level == format.present_level).count();
        let texts: Vec<ByteArray> = present.by_ref().take(filled).cloned().collect();
        (!is_null || filled > 0).then_some(texts)
    });
    Ok(ColumnValues::TextLists(lists.collect()))
}

impl<V> Levels<V> {
    /// The definition levels of each row, and whether its list is null or empty.
    fn rows(&self, format: ValueFormat) -> impl Iterator<Item = (&[i16], bool)> {
        let starts = (0..self.repeated.len()).filter(|i| self.repeated[*i] == 0);
        let ends =
            (1..=self.repeated.len()).filter(|i| self.repeated.get(*i).is_none_or(|level| *level == 0));
        starts.zip(ends).map(move |(start, end)| {
            let row = &self.defined[start..end];
            (row, row.len() == 1 && row[0] < format.element_level)
        })
    }
}

/// The length of the lists among the next `count` rows, if it is the same for all of them.
pub fn list_length(
    reader: &mut ColumnReader,
    column: &ColumnDescriptor,
    count: usize,
) -> Result<Option<usize>, ParquetError> {
    use ColumnReader::*;
    fn common<T: DataType>(
        reader: &mut ColumnReaderImpl<T>,
        format: ValueFormat,
        count: usize,
    ) -> Result<Option<usize>, ParquetError> {
        let levels = read_levels(reader, count, true)?;
        let mut lengths = levels.rows(format).filter(|(_, is_null)| !is_null).map(|(row, _)| row.len());
        let first = lengths.next().filter(|first| *first <= MAX_LIST_LENGTH);
        Ok(first.filter(|first| lengths.all(|length| length == *first)))
    }
    let format = ValueFormat::of(column, None);
    match reader {
        BoolColumnReader(reader) => common(reader, format, count),
        Int32ColumnReader(reader) => common(reader, format, count),
        Int64ColumnReader(reader) => common(reader, format, count),
        Int96ColumnReader(reader) => common(reader, format, count),
        FloatColumnReader(reader) => common(reader, format, count),
        DoubleColumnReader(reader) => common(reader, format, count),
        ByteArrayColumnReader(reader) => common(reader, format, count),
        FixedLenByteArrayColumnReader(reader) => common(reader, format, count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_of_any_width() {
        let bytes = |x: i128, width: usize| x.to_be_bytes()[16 - width..].to_vec();
        assert_eq!(decimal(&bytes(-12_345, 4), 2), -123.45);
        assert_eq!(decimal(&bytes(12_345, 16), 3), 12.345);
        assert_eq!(decimal(&bytes(-1, 1), 0), -1.0);
        let wide = [vec![0xff; 16], bytes(-12_345, 16)].concat();
        assert!((decimal(&wide, 2) + 123.45).abs() < 1e-9);
    }

    #[test]
    fn spark_time_stamps_are_seconds() {
        let mut value = Int96::new();
        let nanos = 3_600_000_000_000u64;
        value.set_data(nanos as u32, (nanos >> 32) as u32, 2_440_589);
        assert_eq!(int96_seconds(&value), 86_400.0 + 3600.0);
    }
}
