//! Short decimals read exactly, sixteen bytes at once: what nearly every cell of a table is.
//!
//! All bytes are looked at together in one wide word, without a loop and without a branch on a byte, because
//! what the next digit is cannot be foreseen and a wrong guess costs more than all the arithmetic.

/// Bytes looked at; longer texts are left to the standard library.
const MAX_BYTES: usize = 16;
/// All powers of ten up to this are whole numbers of f64.
const POWERS: [f64; MAX_BYTES] =
    [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15];
/// Digits of a number that is a whole number of f64 whatever they are.
const MAX_EXACT_DIGITS: usize = 15;

/// The number that an optional `-`, digits and at most one point write, to the bit as the standard library reads
/// it; `None` for every other text, and for more than 15 digits. The digits are a whole number of f64, and so is
/// the power of ten it is divided by, so that it is rounded once.
#[inline]
pub fn parse_decimal(text: &[u8]) -> Option<f64> {
    let negative = text.first() == Some(&b'-');
    let digits = &text[usize::from(negative)..];
    let bytes = load_bytes(digits)?;
    let points = zero_byte_mask(bytes ^ splat(b'.'));
    if points & points.wrapping_sub(1) != 0 {
        return None;
    }
    // Of what lies before the point; of everything where there is none.
    let before = (points >> 7).wrapping_sub(1);
    let bytes = bytes & before | bytes >> 8 & !before;
    let count = digits.len() - usize::from(points != 0);
    if count == 0 || count > MAX_EXACT_DIGITS {
        return None;
    }
    let behind = if points == 0 { 0 } else { count - points.trailing_zeros() as usize / 8 };
    // The last digit becomes the last byte; no digit, or 0, stands before the first one.
    let values = (bytes ^ splat(b'0')) << (8 * (MAX_BYTES - count));
    if (values | values.wrapping_add(splat(0x76))) & splat(0x80) != 0 {
        return None;
    }
    let whole = parse_eight_digits(values as u64) * 100_000_000 + parse_eight_digits((values >> 64) as u64);
    // Signed, because that is one instruction to convert.
    let value = whole as i64 as f64 / POWERS[behind];
    Some(f64::from_bits(value.to_bits() | u64::from(negative) << 63))
}

/// Up to 16 bytes, the first in the lowest place, and zeros behind them.
#[inline]
fn load_bytes(text: &[u8]) -> Option<u128> {
    let length = text.len();
    if length > MAX_BYTES {
        return None;
    }
    // Two reads that may overlap, instead of one for each length.
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

/// The number that eight digits write, each a byte of 0 to 9, the first in the lowest place.
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

/// The highest bit of every byte that is 0, and no other.
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
        /// Every text is either left to the standard library or the number that it reads, to the bit.
        #[test]
        fn it_agrees_with_the_standard_library(text in "-?[0-9]{0,10}\\.?[0-9]{0,10}|[-+.,e0-9 ]{0,18}", x: f64, y: f32) {
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
            prop_assert_eq!(parse_decimal(text.as_bytes()).map(f64::to_bits), text.parse().ok().map(f64::to_bits), "{}", text);
        }

        /// Bytes that are no number are none, wherever they stand.
        #[test]
        fn any_bytes_are_refused_or_read(text in prop::collection::vec(any::<u8>(), 0..18), at in 0usize..18, byte: u8) {
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
