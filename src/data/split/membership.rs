//! The set of each sample as a table of two bits per sample, with counts that make both directions cheap to look up.

use super::DatasetSplit;

/// Samples between two entries of the counts: 32 words of codes, counted in a few nanoseconds.
const BLOCK: u64 = 1024;
/// Samples in a word.
const WORD: u64 = 32;
/// The low bit of each code.
const LOW: u64 = 0x5555_5555_5555_5555;

/// Two bits per sample, and 16 bytes per 1024 samples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    samples: u64,
    codes: Vec<u64>,
    /// Training and validation samples before each block.
    before: Vec<[u64; 2]>,
    totals: [u64; 2],
}

impl Membership {
    /// Bytes of a table of this many samples.
    pub fn table_bytes(samples: u64) -> u64 {
        8 * samples.div_ceil(WORD) + 16 * samples.div_ceil(BLOCK)
    }

    pub fn with_capacity(samples: u64) -> Self {
        let codes = Vec::with_capacity(samples.div_ceil(WORD) as usize);
        Self { codes, before: Vec::with_capacity(samples.div_ceil(BLOCK) as usize), ..Self::default() }
    }

    /// Appends a sample.
    pub fn push(&mut self, set: DatasetSplit) {
        if self.samples.is_multiple_of(BLOCK) {
            self.before.push(self.totals);
        }
        if self.samples.is_multiple_of(WORD) {
            self.codes.push(0);
        }
        if let Some(word) = self.codes.last_mut() {
            *word |= (set as u64) << (2 * (self.samples % WORD));
        }
        if let Some(total) = self.totals.get_mut(set as usize) {
            *total += 1;
        }
        self.samples += 1;
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    pub fn resident_bytes(&self) -> u64 {
        (8 * self.codes.capacity() + 16 * self.before.capacity()) as u64
    }

    pub fn set_of(&self, index: u64) -> DatasetSplit {
        DatasetSplit::ALL[(self.codes[(index / WORD) as usize] >> (2 * (index % WORD)) & 3) as usize]
    }

    /// Samples of `set` before block `block`.
    fn before_block(&self, set: DatasetSplit, block: u64) -> u64 {
        let [train, valid] = self.before.get(block as usize).copied().unwrap_or(self.totals);
        match set {
            DatasetSplit::Train => train,
            DatasetSplit::Valid => valid,
            DatasetSplit::Test => (block * BLOCK).min(self.samples) - train - valid,
        }
    }

    /// A bit for each of the first `len` samples of a word that are of `set`, at their low bits.
    fn matches(&self, word: u64, len: u64, set: DatasetSplit) -> u64 {
        let code = self.codes[word as usize] ^ (set as u64 * LOW);
        let within = if len == WORD { u64::MAX } else { (1 << (2 * len)) - 1 };
        !(code | code >> 1) & LOW & within
    }

    /// Number of samples of `set` below `index`.
    pub fn count_before(&self, set: DatasetSplit, index: u64) -> u64 {
        let block = index / BLOCK;
        let words = block * (BLOCK / WORD)..index.div_ceil(WORD);
        let count = |word: u64| {
            let len = WORD.min(index - word * WORD);
            u64::from(self.matches(word, len, set).count_ones())
        };
        self.before_block(set, block) + words.map(count).sum::<u64>()
    }

    /// Index of sample `i` of `set`, which has more than `i`.
    pub fn index(&self, set: DatasetSplit, i: u64) -> u64 {
        // The last block before which there are at most `i`.
        let (mut low, mut high) = (0, self.before.len() as u64);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.before_block(set, middle) <= i { low = middle } else { high = middle }
        }
        let (mut left, mut word) = (i - self.before_block(set, low), low * (BLOCK / WORD));
        loop {
            let mut found = self.matches(word, WORD.min(self.samples - word * WORD), set);
            let count = u64::from(found.count_ones());
            if left < count {
                for _ in 0..left {
                    found &= found - 1;
                }
                return word * WORD + u64::from(found.trailing_zeros() / 2);
            }
            (left, word) = (left - count, word + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Ranks and indices are those of a list of the samples of each set.
        #[test]
        fn ranks_and_indices_are_those_of_lists(sets in prop::collection::vec(0usize..3, 1..5000)) {
            let mut table = Membership::with_capacity(sets.len() as u64);
            sets.iter().for_each(|set| table.push(DatasetSplit::ALL[*set]));
            prop_assert!(table.resident_bytes() <= Membership::table_bytes(sets.len() as u64) + 64);
            for set in DatasetSplit::ALL {
                let mut before = 0;
                for (index, other) in sets.iter().enumerate() {
                    prop_assert_eq!(table.count_before(set, index as u64), before);
                    if *other == set as usize {
                        prop_assert_eq!(table.index(set, before), index as u64);
                        prop_assert_eq!(table.set_of(index as u64), set);
                        before += 1;
                    }
                }
                prop_assert_eq!(table.count_before(set, sets.len() as u64), before);
            }
        }
    }
}
