//! How many bytes an id takes in a file of token ids, declared or guessed from the first ids.

use std::collections::BTreeSet;

/// Bytes per id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    U8 = 1,
    U16 = 2,
    U32 = 4,
    /// NumPy's int64. An id still has to fit 32 bits.
    U64 = 8,
}

impl TokenWidth {
    /// The narrowest width for ids below `vocab`.
    pub fn for_vocab(vocab: usize) -> Self {
        match vocab {
            0..=0x100 => TokenWidth::U8,
            0x101..=0x1_0000 => TokenWidth::U16,
            _ => TokenWidth::U32,
        }
    }

    pub fn bytes(self) -> usize {
        self as usize
    }

    /// Appends `ids`, which must fit the width.
    pub fn write_ids(self, ids: &[u32], into: &mut Vec<u8>) {
        match self {
            TokenWidth::U8 => into.extend(ids.iter().map(|&id| id as u8)),
            TokenWidth::U16 => ids.iter().for_each(|&id| into.extend((id as u16).to_le_bytes())),
            TokenWidth::U32 => ids.iter().for_each(|&id| into.extend(id.to_le_bytes())),
            TokenWidth::U64 => ids.iter().for_each(|&id| into.extend(u64::from(id).to_le_bytes())),
        }
    }
}

/// Guesses the width from the start of a file of `len` bytes.
pub fn guess_width(beginning: &[u8], len: u64) -> TokenWidth {
    /// With only a few ids, the pattern could be a coincidence.
    const MIN_IDS: usize = 16;
    let zero_above = |bytes: usize| {
        let words = || beginning.chunks_exact(bytes);
        let some = words().any(|word| word[..bytes / 2].iter().any(|byte| *byte != 0));
        let all = words().all(|word| word[bytes / 2..].iter().all(|byte| *byte == 0));
        words().len() >= MIN_IDS && some && all
    };
    if len.is_multiple_of(8) && zero_above(8) {
        TokenWidth::U64
    } else if len.is_multiple_of(4) && zero_above(4) {
        TokenWidth::U32
    } else {
        TokenWidth::U16
    }
}

/// The type that a file of ids without a header seems to have, if it is none that is read.
pub fn foreign_type(beginning: &[u8], len: u64) -> Option<&'static str> {
    const MIN_BYTES: usize = 64;
    if beginning.len() < MIN_BYTES {
        return None;
    }
    let some = beginning.iter().any(|byte| *byte != 0);
    // Ids of two bytes that are whole numbers as floats, all of them, are not a coincidence.
    let is_id = |value: f64| value >= 0.0 && value.fract() == 0.0 && value < f64::from(1 << 24);
    let floats = beginning.as_chunks::<4>().0.iter().all(|word| is_id(f32::from_le_bytes(*word).into()));
    let doubles = beginning.as_chunks::<8>().0.iter().all(|word| is_id(f64::from_le_bytes(*word)));
    if some && len.is_multiple_of(4) && floats {
        return Some("floats of 32 bits");
    }
    if some && len.is_multiple_of(8) && doubles {
        return Some("floats of 64 bits");
    }
    // The upper halves are 0 and come first, and the last byte has the most values; or the first byte of two is mostly
    // small and the second is not.
    let upper_first = |bytes: usize| {
        let words = || beginning.chunks_exact(bytes);
        let values = |at: usize| words().map(|word| word[at]).collect::<BTreeSet<u8>>().len();
        len.is_multiple_of(bytes as u64)
            && words().all(|word| word[..bytes / 2].iter().all(|byte| *byte == 0))
            && values(bytes - 1) > values(bytes - 2)
    };
    let small = |parity: usize| beginning.iter().skip(parity).step_by(2).filter(|byte| **byte < 16).count();
    let (even, odd) = (small(0), small(1));
    let skewed = beginning.len() >= 1024 && 4 * even > beginning.len() && 2 * odd < even;
    (upper_first(2) || upper_first(4) || upper_first(8) || skewed).then_some("big-endian")
}

/// Whether the file looks like ids of one byte: even and odd bytes have the same values, all of them small. The upper
/// bytes of wider ids have few values, and the lower ones have nearly all.
pub fn has_single_bytes(beginning: &[u8]) -> bool {
    const MIN_BYTES: usize = 1024;
    let mut seen = [[false; 256]; 2];
    beginning.iter().enumerate().for_each(|(i, byte)| seen[i % 2][usize::from(*byte)] = true);
    let [even, odd] = seen;
    let both = even.iter().zip(&odd).filter(|(even, odd)| **even && **odd).count();
    let either = even.iter().zip(&odd).filter(|(even, odd)| **even || **odd).count();
    let small = either > 2 && even[128..].iter().chain(&odd[128..]).all(|seen| !seen);
    beginning.len() >= MIN_BYTES && small && 10 * both >= 8 * either
}
