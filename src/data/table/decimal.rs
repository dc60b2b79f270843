//! Exact parsing of short decimals, sixteen bytes at once: nearly every cell of a table is one.
//!
//! SIMD within a register: all bytes are processed in one u128, without a loop and without branches on their values.
//! Digits are unpredictable, and one branch misprediction costs more than all of the arithmetic.

/// Maximum length in bytes; longer strings are left to the standard library.
const MAX_BYTES: usize = 16;
/// These powers of ten are exact in f64.
const POWERS: [f64; MAX_BYTES] =
    [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15];
/// Integers of this many digits are exact in f64.
const MAX_EXACT_DIGITS: usize = 15;

/// Parses an optional `-`, digits and at most one decimal point, to the same bits as the standard library. `None` for
/// any other text, and for more than 15 digits. Both the integer of all digits and the power of ten that divides it are
/// exact in f64, so the result is rounded only once.
#[inline]
pub fn parse_decimal(text: &[u8]) -> Option<f64> {
    let negative = text.first() == Some(&b'-');
    let digits = &text[usize::from(negative)..];
    let bytes = load_bytes(digits)?;
    let points = zero_byte_mask(bytes ^ splat(b'.'));
    if points & points.wrapping_sub(1) != 0 {
        return None;
    }
    // Mask of the bytes before the decimal point; all bytes if there is none.
    let before = (points >> 7).wrapping_sub(1);
    let bytes = bytes & before | bytes >> 8 & !before;
    let count = digits.len() - usize::from(points != 0);
    if count == 0 || count > MAX_EXACT_DIGITS {
        return None;
    }
    let behind = if points == 0 { 0 } else { count - points.trailing_zeros() as usize / 8 };
    // Align the last digit with the last byte, so that zeros precede the first digit.
    let values = (bytes ^ splat(b'0')) << (8 * (MAX_BYTES - count));
    if (values | values.wrapping_add(splat(0x76))) & splat(0x80) != 0 {
        return None;
    }
    let whole = parse_eight_digits(values as u64) * 100_000_000 + parse_eight_digits((values >> 64) as u64);
    // Converting a signed integer takes one instruction.
    let value = whole as i64 as f64 / POWERS[behind];
    Some(f64::from_bits(value.to_bits() | u64::from(negative) << 63))
}

/// Loads up to 16 bytes, little endian, zero-padded.
#[inline]
fn load_bytes(text: &[u8]) -> Option<u128> {
    let length = text.len();
    if length > MAX_BYTES {
        return None;
    }
    // Two overlapping loads instead of one case per length.
    if let (Some(first), Some(last)) = (text.first_chunk::<8>(), text.last_chunk::<8>()) {
        let (first, last) = (u64::from_le_bytes(*first), u64::from_le_bytes(*last));
        return Some(u128::from(first) | u128::from(last) << (8 * (length - 8)));
    }
    if let (Some(first), Some(last)) = (text.first_chunk::<4>(), text.last_chunk::<4>()) {
        let (first, last) = (u32::from_le_bytes(*first), u32::from_le_bytes(*last));
        return Some((u64::from(first) | u64::from(last) << (8 * (length - 4))).into());
    }
    Some(text.iter().rev().fold(0, |word, byte| word << 8 | u128::from(*byte)))
}

/// Value of eight digits, one byte of 0 to 9 each, the first in the lowest byte.
#[inline]
fn parse_eight_digits(digits: u64) -> u64 {
    let pairs = (digits & 0x00ff_00ff_00ff_00ff) * 10 + (digits >> 8 & 0x00ff_00ff_00ff_00ff);
    let fours = (pairs & 0x0000_ffff_0000_ffff) * 100 + (pairs >> 16 & 0x0000_ffff_0000_ffff);
    (fours & 0xffff_ffff) * 10_000 + (fours >> 32)
}

#[inline]
fn splat(byte: u8) -> u128 {
    u128::from_ne_bytes([byte; MAX_BYTES])
}

/// Sets the top bit of every zero byte, and no other bit.
#[inline]
fn zero_byte_mask(word: u128) -> u128 {
    let low = splat(0x7f);
    !((word & low).wrapping_add(low) | word | low)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every string is either left to the standard library or parsed to the same bits.
        #[test]
        fn it_agrees_with_the_standard_library(
            text in "-?[0-9]{0,10}\\.?[0-9]{0,10}|[-+.,e0-9 ]{0,18}", x: f64, y: f32,
        ) {
            for text in [text, x.to_string(), format!("{x:.3}"), format!("{x:e}"), y.to_string(), format!("{y:.1}")] {
                let expected = text.parse().ok().map(f64::to_bits);
                let found = parse_decimal(text.as_bytes()).map(f64::to_bits);
                prop_assert!(found.is_none() || found == expected, "{text}");
            }
        }

        /// A decimal of up to 15 digits is never left to the standard library.
        #[test]
        fn short_ones_are_read(whole in "[0-9]{0,7}", behind in "[0-9]{1,8}", negative: bool) {
            let text = format!("{}{whole}.{behind}", if negative { "-" } else { "" });
            let expected = text.parse().ok().map(f64::to_bits);
                prop_assert_eq!(parse_decimal(text.as_bytes()).map(f64::to_bits), expected, "{}", text);
        }

        /// Bytes that do not form a number are refused, at any position.
        #[test]
        fn any_bytes_are_refused_or_read(
            text in prop::collection::vec(any::<u8>(), 0..18), at in 0usize..18, byte: u8,
        ) {
            let mut digits = vec![b'7'; text.len()];
            if let Some(place) = digits.get_mut(at) {
                *place = byte;
            }
            for text in [text, digits] {
                let expected = str::from_utf8(&text).ok().and_then(|text| text.parse().ok());
                let found = parse_decimal(&text);
                prop_assert!(found.is_none() || found.map(f64::to_bits) == expected.map(f64::to_bits), "{text:?}");
            }
        }
    }
}
