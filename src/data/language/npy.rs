//! The header of NumPy's `.npy` files: type, shape and where the values start.

use std::path::Path;

use super::DataError;
use super::token_storage::TokenWidth;

pub const NPY_MAGIC: &[u8] = b"\x93NUMPY";

/// Values of a `.npy` file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NpyHeader {
    pub width: TokenWidth,
    /// Number of values of all dimensions.
    pub count: u64,
    /// Byte offset of the first value.
    pub offset: u64,
}

impl NpyHeader {
    /// Parses the start of a file, which begins with [`NPY_MAGIC`]. Refuses what holds no token ids.
    pub fn parse(file: &Path, start: &[u8]) -> Result<Self, DataError> {
        let wrong = |problem: String| DataError::Table {
            file: file.to_owned(),
            place: String::new(),
            problem: format!("the NumPy file {problem}"),
            hint: "save token ids as `numpy.asarray(ids, dtype=numpy.uint16)`, or as uint32 for larger vocabularies",
        };
        let damaged = || wrong("has a damaged header".into());
        let (length, text) = match start.get(6..) {
            Some([1, _, a, b, text @ ..]) => (u16::from_le_bytes([*a, *b]) as usize, text),
            Some([2 | 3, _, a, b, c, d, text @ ..]) => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, text),
            _ => return Err(damaged()),
        };
        let header = text.get(..length).and_then(|text| str::from_utf8(text).ok()).ok_or_else(damaged)?;
        let offset = (start.len() - text.len() + length) as u64;
        let value = |key: &str| header.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
        let dtype = value("descr")
            .and_then(|rest| rest.strip_prefix('\'')?.split_once('\''))
            .map(|(dtype, _)| dtype)
            .ok_or_else(|| wrong("holds records, not numbers".into()))?;
        let width = match dtype {
            "|u1" | "|i1" => TokenWidth::U8,
            "<u2" | "<i2" => TokenWidth::U16,
            "<u4" | "<i4" => TokenWidth::U32,
            "<u8" | "<i8" => TokenWidth::U64,
            other => return Err(wrong(format!("holds values of type `{other}`, not token ids"))),
        };
        let shape = value("shape").and_then(|rest| rest.strip_prefix('(')?.split_once(')'));
        let sides = shape.ok_or_else(damaged)?.0.split(',').map(str::trim).filter(|side| !side.is_empty());
        let count = sides.map(|side| side.parse::<u64>().ok()).try_fold(1u64, |n, side| n.checked_mul(side?));
        let dimensions =
            shape.map_or(0, |(sides, _)| sides.split(',').filter(|side| !side.trim().is_empty()).count());
        if value("fortran_order").is_some_and(|rest| rest.starts_with("True")) && dimensions > 1 {
            return Err(wrong("is stored column by column; save `numpy.ascontiguousarray(ids)`".into()));
        }
        Ok(Self { width, count: count.ok_or_else(damaged)?, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(text: &str) -> Vec<u8> {
        [NPY_MAGIC, &[1, 0], &(text.len() as u16).to_le_bytes(), text.as_bytes()].concat()
    }

    #[test]
    fn type_and_shape_are_read() {
        let parse =
            |text: &str| NpyHeader::parse("a.npy".as_ref(), &header(text)).map_err(|error| error.to_string());
        let found = parse("{'descr': '<u2', 'fortran_order': False, 'shape': (3, 4), }\n").unwrap();
        assert_eq!((found.width, found.count), (TokenWidth::U16, 12));
        assert_eq!(found.offset, 10 + 60);
        let one = parse("{'descr': '<i8', 'fortran_order': True, 'shape': (5,), }").unwrap();
        assert_eq!((one.width, one.count), (TokenWidth::U64, 5));
        for (text, expected) in [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", "values of type `<f4`"),
            ("{'descr': '>u2', 'fortran_order': False, 'shape': (3,), }", "values of type `>u2`"),
            ("{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (3,), }", "holds records"),
            ("{'descr': '<u2', 'fortran_order': True, 'shape': (3, 4), }", "column by column"),
            ("{'descr': '<u2', 'shape': (x,), }", "damaged"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
