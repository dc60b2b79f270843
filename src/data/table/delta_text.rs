//! Checks delta-encoded text before the Parquet library decodes it: the library allocates what the counts inside a page
//! declare, and a text may share its beginning with the one before it, so that a small page holds much text.

use std::io::{Error, ErrorKind, Result};

/// Maximum bytes of text in a page.
const MAX_TEXT_BYTES: u64 = 128 << 20;
/// Maximum values that a block declares; writers use 128.
const MAX_BLOCK_VALUES: u64 = 1 << 16;

fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

/// Bytes of all texts of a page of `DELTA_LENGTH_BYTE_ARRAY`, which has at most `count` values.
pub fn length_encoded_bytes(page: &[u8], count: u64) -> Result<u64> {
    let mut total = 0u64;
    DeltaReader::new(page, count)?.for_each(|length| add(&mut total, length))?;
    check_total(total)
}

/// As [`length_encoded_bytes`], for `DELTA_BYTE_ARRAY`: lengths of shared beginnings, then the rest of each text.
pub fn prefix_encoded_bytes(page: &[u8], count: u64) -> Result<u64> {
    let mut total = 0u64;
    let prefixes = DeltaReader::new(page, count)?.for_each(|length| add(&mut total, length))?;
    DeltaReader::new(&page[prefixes..], count)?.for_each(|length| add(&mut total, length))?;
    check_total(total)
}

fn add(total: &mut u64, length: i64) -> Result<()> {
    let length = u64::try_from(length).map_err(|_| corrupt("a text of negative length"))?;
    *total = total.saturating_add(length);
    Ok(())
}

fn check_total(total: u64) -> Result<u64> {
    match total <= MAX_TEXT_BYTES {
        true => Ok(total),
        false => Err(corrupt(&format!("a page with {total} bytes of text"))),
    }
}

/// Reads `DELTA_BINARY_PACKED` numbers.
struct DeltaReader<'a> {
    bytes: &'a [u8],
    at: usize,
    miniblocks: u64,
    miniblock_values: u64,
    values: u64,
    first: i64,
}

impl<'a> DeltaReader<'a> {
    fn new(bytes: &'a [u8], most: u64) -> Result<Self> {
        let mut reader = Self { bytes, at: 0, miniblocks: 0, miniblock_values: 0, values: 0, first: 0 };
        let block_values = reader.varint()?;
        reader.miniblocks = reader.varint()?;
        reader.values = reader.varint()?;
        reader.first = zigzag(reader.varint()?);
        if reader.values > most {
            return Err(corrupt(&format!("{} delta-encoded texts in a page of {most}", reader.values)));
        }
        let whole = reader.miniblocks > 0 && block_values.is_multiple_of(reader.miniblocks);
        if !whole || block_values == 0 || block_values > MAX_BLOCK_VALUES {
            return Err(corrupt(&format!(
                "delta blocks of {block_values} values in {} parts",
                reader.miniblocks
            )));
        }
        reader.miniblock_values = block_values / reader.miniblocks;
        Ok(reader)
    }

    /// Calls `visit` with each number; returns the bytes that they take.
    fn for_each(mut self, mut visit: impl FnMut(i64) -> Result<()>) -> Result<usize> {
        if self.values == 0 {
            return Ok(self.at);
        }
        let (mut last, mut left) = (self.first, self.values - 1);
        visit(last)?;
        while left > 0 {
            let least = zigzag(self.varint()?);
            let widths = self.take(self.miniblocks as usize)?;
            for width in widths {
                if left == 0 {
                    break;
                }
                if *width > 64 {
                    return Err(corrupt(&format!("delta-encoded numbers of {width} bits")));
                }
                let packed = self.take((self.miniblock_values * u64::from(*width)).div_ceil(8) as usize)?;
                for i in 0..self.miniblock_values.min(left) {
                    last = last.wrapping_add(least).wrapping_add(unpack(packed, i, *width) as i64);
                    visit(last)?;
                }
                left -= self.miniblock_values.min(left);
            }
        }
        Ok(self.at)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let found = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        self.at += count;
        found.ok_or_else(|| corrupt("delta-encoded numbers extend beyond their page"))
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(value);
            }
        }
        Err(corrupt("a number too long"))
    }
}

fn zigzag(coded: u64) -> i64 {
    (coded >> 1) as i64 ^ -((coded & 1) as i64)
}

/// Number `i` of `width` bits each, least significant bit first.
fn unpack(packed: &[u8], i: u64, width: u8) -> u64 {
    (0..u64::from(width)).fold(0, |value, bit| {
        let at = i * u64::from(width) + bit;
        let byte = packed.get((at / 8) as usize).copied().unwrap_or(0);
        value | u64::from(byte >> (at % 8) & 1) << bit
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of 128 values in 4 parts, 8 values, the first 5 and no deltas, then what is given.
    fn header(values: u8) -> Vec<u8> {
        vec![0x80, 0x01, 4, values, 10]
    }

    #[test]
    fn lengths_are_added_up() {
        // Deltas of 1: least 1, widths 0.
        let page = [header(3), vec![2, 0, 0, 0, 0]].concat();
        assert_eq!(length_encoded_bytes(&page, 3).unwrap(), 5 + 6 + 7);
        assert_eq!(length_encoded_bytes(&header(1), 1).unwrap(), 5);
        let both = [page.clone(), header(1)].concat();
        assert_eq!(prefix_encoded_bytes(&both, 3).unwrap(), 18 + 5);
    }

    #[test]
    fn counts_and_lengths_beyond_the_page_are_refused() {
        assert!(
            length_encoded_bytes(&header(9), 3).unwrap_err().to_string().contains("9 delta-encoded texts")
        );
        assert!(length_encoded_bytes(&header(3), 3).is_err());
        assert!(length_encoded_bytes(&[0x80, 1, 3, 1, 0], 3).is_err());
        // A least delta of -2^62 makes the second text negative.
        let page =
            [header(2), vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0]].concat();
        assert!(length_encoded_bytes(&page, 2).unwrap_err().to_string().contains("negative"));
    }
}
