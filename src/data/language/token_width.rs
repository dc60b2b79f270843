//! How many bytes an id takes in a file of token ids.

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
