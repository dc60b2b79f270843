//! Guesses what a file without a header holds: ids of one to eight bytes, or something other than token ids.
//!
//! The evidence is the distribution of bytes at each position of a value: the upper bytes of an id have fewer distinct
//! values than the lower ones, and the pattern repeats with the width of an id.

use half::{bf16, f16};

use super::token_width::TokenWidth;

/// With only a few ids, a pattern could be a coincidence.
const MIN_IDS: usize = 16;
const MIN_BYTES: usize = 64;
/// Ids are below 2^18: the largest vocabularies have some 260,000 tokens.
const MAX_THIRD_BYTE: u8 = 3;

/// Guesses the width from the start of a file of `len` bytes.
pub fn guess_width(beginning: &[u8], len: u64) -> TokenWidth {
    let is_wide = |bytes: usize| {
        let words = || beginning.chunks_exact(bytes);
        let some = words().any(|word| word[..3].iter().any(|byte| *byte != 0));
        let is_id = |word: &[u8]| word[2] <= MAX_THIRD_BYTE && word[3..].iter().all(|byte| *byte == 0);
        // If both halves were ids, their bytes would have the same distribution.
        let halves_differ =
            bytes == 8 || words().all(|word| word[2] == 0) || distance(beginning, [1, 3], 4) > 0.1;
        len.is_multiple_of(bytes as u64)
            && words().len() >= MIN_IDS
            && some
            && halves_differ
            && words().all(is_id)
    };
    match () {
        () if is_wide(8) => TokenWidth::U64,
        () if is_wide(4) => TokenWidth::U32,
        () => TokenWidth::U16,
    }
}

/// Occurrences of each byte at `position` of words of `bytes` bytes.
fn histogram(beginning: &[u8], position: usize, bytes: usize) -> [usize; 256] {
    let mut counts = [0; 256];
    beginning.chunks_exact(bytes).for_each(|word| counts[usize::from(word[position])] += 1);
    counts
}

/// Total variation distance of the bytes at two positions: 0 if they have the same values, 1 if they share none.
fn distance(beginning: &[u8], positions: [usize; 2], bytes: usize) -> f64 {
    let [a, b] = positions.map(|position| histogram(beginning, position, bytes));
    let differing: usize = a.iter().zip(&b).map(|(a, b)| a.abs_diff(*b)).sum();
    differing as f64 / (2 * (beginning.len() / bytes).max(1)) as f64
}

/// Entropy in bits, and the number of distinct values.
fn entropy(counts: &[usize; 256]) -> (f64, usize) {
    let total = counts.iter().sum::<usize>().max(1) as f64;
    let seen = counts.iter().filter(|count| **count > 0);
    let bits = seen.clone().map(|count| *count as f64 / total).map(|p| -p * p.log2()).sum();
    (bits, seen.count())
}

/// The type that a file of ids without a header seems to have, if it is not supported.
pub fn unsupported_type(beginning: &[u8], len: u64) -> Option<&'static str> {
    if beginning.len() < MIN_BYTES || beginning.iter().all(|byte| *byte == 0) {
        return None;
    }
    if let Some(floats) = float_type(beginning, len) {
        return Some(floats);
    }
    if is_big_endian(beginning, len) {
        return Some("big-endian");
    }
    // The upper bytes of consecutive ids have the same distribution. Those of the two halves of a wider value do not:
    // there, the lower bytes have nearly all values.
    let is_wider = guess_width(beginning, len) == TokenWidth::U16
        && beginning.len() >= 2048
        && len.is_multiple_of(4)
        && entropy(&histogram(beginning, 0, 4)).1 >= 128
        && distance(beginning, [1, 3], 4) > 0.3;
    is_wider.then_some("values of more than two bytes, and no ids")
}

fn float_type(beginning: &[u8], len: u64) -> Option<&'static str> {
    let whole = |values: &[f64]| {
        let is_id = |value: &f64| *value >= 0.0 && value.fract() == 0.0 && *value < f64::from(1 << 24);
        values.iter().any(|value| *value != 0.0) && values.iter().all(is_id)
    };
    // One pattern of eight has a usual magnitude.
    let usual = |values: &[f64]| {
        let zeros = values.iter().filter(|value| **value == 0.0).count();
        let usual = values.iter().filter(|value| (1e-6..1e9).contains(&value.abs())).count();
        usual >= 256 && usual > zeros && 100 * (usual + zeros) >= 99 * values.len()
    };
    let (words, halves) = (beginning.as_chunks::<4>().0.iter(), beginning.as_chunks::<2>().0.iter());
    let doubles = beginning.as_chunks::<8>().0.iter().map(|word| f64::from_le_bytes(*word));
    let of_32: (&str, Vec<f64>) =
        ("floats of 32 bits", words.map(|word| f32::from_le_bytes(*word).into()).collect());
    let of_64 = ("floats of 64 bits", doubles.collect());
    let of_16 = ("floats of 16 bits", halves.clone().map(|word| f16::from_le_bytes(*word).into()).collect());
    let of_bf16 =
        ("floats of 16 bits (bfloat16)", halves.map(|word| bf16::from_le_bytes(*word).into()).collect());
    // Ids that are whole numbers as floats, all of them, are not a coincidence.
    let found = [&of_32, &of_64, &of_16, &of_bf16].into_iter().find(|(_, values)| whole(values));
    let found = found.or_else(|| [&of_32, &of_64].into_iter().find(|(_, values)| usual(values)));
    found.map(|(name, _)| *name).filter(|_| len.is_multiple_of(2))
}

fn is_big_endian(beginning: &[u8], len: u64) -> bool {
    // The upper halves are 0 and come first, and the last byte has the most values.
    let upper_first = |bytes: usize| {
        let words = || beginning.chunks_exact(bytes);
        let values = |at: usize| entropy(&histogram(beginning, at, bytes)).1;
        let zeros = if bytes == 2 { 1 } else { bytes - 3 };
        len.is_multiple_of(bytes as u64)
            && words().all(|word| word[..zeros].iter().all(|byte| *byte == 0))
            && values(bytes - 1) > values(bytes - 2)
    };
    // The first of two bytes has less entropy than the second: large ids are rarer, and a vocabulary seldom ends at
    // 65,536.
    let first_byte_has_less_entropy = || {
        const MIN_VALUES: usize = 64;
        const MIN_BITS: f64 = 0.1;
        let [(first, _), (second, values)] = [0, 1].map(|at| entropy(&histogram(beginning, at, 2)));
        // The entropy of few values is estimated too low, by about this many bits.
        let error = 256.0 / beginning.len() as f64;
        beginning.len() >= 1024 && values >= MIN_VALUES && first + MIN_BITS + error < second
    };
    upper_first(2) || upper_first(4) || upper_first(8) || first_byte_has_less_entropy()
}

/// Whether it is text: every character is printable or white space.
pub fn is_text(beginning: &[u8]) -> bool {
    let text = match str::from_utf8(beginning) {
        Ok(text) => text,
        // The last character may be cut.
        Err(error) if error.error_len().is_none() => {
            str::from_utf8(&beginning[..error.valid_up_to()]).unwrap_or("")
        }
        Err(_) => return false,
    };
    beginning.len() >= MIN_BYTES && text.chars().all(|c| !c.is_control() || "\n\r\t".contains(c))
}

/// Whether the file looks like ids of one byte: even and odd bytes have the same values, all of them small. The upper
/// bytes of wider ids have few values, and the lower ones have nearly all.
pub fn has_single_bytes(beginning: &[u8]) -> bool {
    const MIN_BYTES: usize = 1024;
    let [even, odd] = [0, 1].map(|at| histogram(beginning, at, 2).map(|count| count > 0));
    let both = even.iter().zip(&odd).filter(|(even, odd)| **even && **odd).count();
    let either = even.iter().zip(&odd).filter(|(even, odd)| **even || **odd).count();
    let small = either > 2 && even[128..].iter().chain(&odd[128..]).all(|seen| !seen);
    beginning.len() >= MIN_BYTES && small && 10 * both >= 8 * either
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws of a fixed generator.
    fn draws(count: u64) -> impl Iterator<Item = u64> {
        (0..count).map(|i| {
            let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x ^ (x >> 32)
        })
    }

    /// Ids below `vocab`, small ones more often if `skewed`, as the ranks of words are.
    fn ids(vocab: u64, skewed: bool) -> Vec<u32> {
        let id = |x: u64| {
            let uniform = (x >> 11) as f64 / (1u64 << 53) as f64;
            let at =
                if skewed { ((vocab as f64).ln() * uniform).exp() - 1.0 } else { uniform * vocab as f64 };
            (at as u64).min(vocab - 1) as u32
        };
        draws(8000).map(id).collect()
    }

    fn bytes<const N: usize>(ids: &[u32], write: impl Fn(u32) -> [u8; N]) -> Vec<u8> {
        ids.iter().flat_map(|id| write(*id)).collect()
    }

    fn found(bytes: &[u8]) -> Option<&'static str> {
        unsupported_type(bytes, bytes.len() as u64)
    }

    #[test]
    fn ids_of_any_vocabulary_have_their_width_and_order() {
        for (vocab, skewed) in
            [(300, false), (5000, true), (32_000, false), (32_000, true), (50_257, false), (50_257, true)]
        {
            let ids = ids(vocab, skewed);
            let little = bytes(&ids, |id| (id as u16).to_le_bytes());
            assert_eq!(
                (found(&little), guess_width(&little, little.len() as u64)),
                (None, TokenWidth::U16),
                "{vocab}"
            );
            for big in [bytes(&ids, |id| (id as u16).to_be_bytes()), bytes(&ids, u32::to_be_bytes)] {
                assert_eq!(found(&big), Some("big-endian"), "{vocab} {skewed}");
            }
        }
        for (vocab, skewed) in
            [(500, false), (50_257, true), (128_256, false), (128_256, true), (260_000, true)]
        {
            let ids = ids(vocab, skewed);
            for (bytes, width) in [
                (bytes(&ids, u32::to_le_bytes), TokenWidth::U32),
                (bytes(&ids, |id| u64::from(id).to_le_bytes()), TokenWidth::U64),
            ] {
                assert_eq!(
                    (found(&bytes), guess_width(&bytes, bytes.len() as u64)),
                    (None, width),
                    "{vocab}"
                );
            }
            assert_eq!(found(&bytes(&ids, u32::to_be_bytes)), Some("big-endian"), "{vocab} {skewed}");
        }
    }

    #[test]
    fn floats_are_named_with_their_width() {
        let ids = ids(2000, false);
        let noise = |id: u32| (f64::from(id) - 1000.0) / 317.3;
        for (bytes, expected) in [
            (bytes(&ids, |id| (id as f32).to_le_bytes()), "floats of 32 bits"),
            (bytes(&ids, |id| (noise(id) as f32).to_le_bytes()), "floats of 32 bits"),
            (bytes(&ids, |id| f64::from(id).to_le_bytes()), "floats of 64 bits"),
            (bytes(&ids, |id| noise(id).to_le_bytes()), "floats of 64 bits"),
            (bytes(&ids, |id| f16::from_f32(id as f32).to_le_bytes()), "floats of 16 bits"),
            (bytes(&ids, |id| bf16::from_f32(id as f32).to_le_bytes()), "floats of 16 bits (bfloat16)"),
        ] {
            assert_eq!(found(&bytes), Some(expected));
        }
    }

    #[test]
    fn text_is_no_file_of_ids() {
        let digits: String = ids(500, false).iter().map(|id| format!("{id} ")).collect();
        assert!(is_text(digits.as_bytes()) && is_text("Grüße aus Köln.\n".repeat(9).as_bytes()));
        assert!(!is_text(&bytes(&ids(500, false), |id| (id as u16).to_le_bytes())));
        assert!(!is_text(&[7; 100]) && !is_text(b"short"));
    }
}
