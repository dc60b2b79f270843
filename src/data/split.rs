//! A set parted in two, by share and seed, in arithmetic alone: no table, and neighbours stay neighbours.
//!
//! The samples are cut into as many runs as the smaller part is to have samples; of each run, one is drawn by
//! the seed and goes to the smaller part, the rest to the larger one. Both parts keep the set's order, so a set
//! that is read forward stays cheap to read, and one that is sorted by class is parted evenly.

use std::sync::Arc;

use super::stream::Block;
use super::{DataError, Features, Key, Lengths, Row, Source, Target};
use crate::random::{Random, stream};

/// Which samples of a set go where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parting {
    samples: u64,
    /// Samples of the smaller part: runs that the set is cut into.
    few: u64,
    key: Random,
}

impl Parting {
    /// The first sample of run `run`.
    fn start(&self, run: u64) -> u64 {
        (run as u128 * self.samples as u128 / self.few as u128) as u64
    }

    /// The sample of run `run` that goes to the smaller part.
    fn drawn(&self, run: u64) -> u64 {
        let (start, end) = (self.start(run), self.start(run + 1));
        start + self.key.below(run, end - start)
    }

    /// The run that sample `index` is in.
    fn run(&self, index: u64) -> u64 {
        (((index + 1) as u128 * self.few as u128 - 1) / self.samples as u128) as u64
    }

    /// Sample `i` of the larger part.
    fn kept(&self, i: u64) -> u64 {
        // Run r begins with start(r) - r kept samples before it: find the last such run that is not beyond i.
        let (mut low, mut high) = (0, self.few);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.start(middle) - middle <= i { low = middle } else { high = middle }
        }
        let index = i + low;
        index + u64::from(index >= self.drawn(low))
    }

    /// How many samples below `index` go to the smaller part.
    fn drawn_below(&self, index: u64) -> u64 {
        if index == 0 {
            return 0;
        }
        let run = self.run(index - 1);
        run + u64::from(self.drawn(run) < index)
    }
}

/// One part of a set.
pub struct Part {
    whole: Arc<dyn Source>,
    parting: Parting,
    smaller: bool,
    /// The other part reads the same `whole`.
    shared: bool,
}

/// Which samples go where, known before the set itself is made: for statistics of the training part alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    parting: Parting,
    /// Whether the smaller part is the one that is measured on.
    valid_is_smaller: bool,
}

impl Plan {
    /// Of a set of `samples`, `valid_share` of them to measure on; at least one of each.
    pub fn new(samples: u64, valid_share: f64, seed: u64) -> Result<Self, DataError> {
        const SPLIT: u64 = stream("data.split");
        if samples < 2 {
            let why = format!("it has {samples} and both the training and the validation set need one");
            return Err(DataError::NoSamples { set: "the set".into(), why });
        }
        let valid = ((samples as f64 * valid_share).round() as u64).clamp(1, samples - 1);
        let few = valid.min(samples - valid);
        let parting = Parting { samples, few, key: Random::new(seed, SPLIT) };
        Ok(Self { parting, valid_is_smaller: valid == few })
    }

    /// Whether sample `index` of the whole set is trained on.
    pub fn trained(&self, index: u64) -> bool {
        let drawn = self.parting.drawn(self.parting.run(index)) == index;
        drawn != self.valid_is_smaller
    }
}

/// The samples of `whole` to train on, and `valid_share` of them to measure on; at least one of each.
pub fn split(whole: Arc<dyn Source>, valid_share: f64, seed: u64) -> Result<(Part, Part), DataError> {
    let Plan { parting, valid_is_smaller } = Plan::new(whole.len(), valid_share, seed)?;
    let apart = whole.apart();
    let part = |whole: &Arc<dyn Source>, smaller| Part {
        whole: whole.clone(),
        parting,
        smaller,
        shared: apart.is_none(),
    };
    Ok((part(&whole, !valid_is_smaller), part(apart.as_ref().unwrap_or(&whole), valid_is_smaller)))
}

impl Part {
    /// The sample's index in the whole set.
    fn index(&self, i: u64) -> u64 {
        if self.smaller { self.parting.drawn(i) } else { self.parting.kept(i) }
    }

    /// How many of this part's samples lie below `index` of the whole set.
    pub fn below(&self, index: u64) -> u64 {
        let drawn = self.parting.drawn_below(index);
        if self.smaller { drawn } else { index - drawn }
    }
}

impl Source for Part {
    fn len(&self) -> u64 {
        if self.smaller { self.parting.few } else { self.parting.samples - self.parting.few }
    }

    fn features(&self) -> &Features {
        self.whole.features()
    }

    fn read(&self, index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        self.whole.read(self.index(index), key, into)
    }

    /// Where the parts share the whole, this one's share, so that they add up to it.
    fn resident_bytes(&self) -> u64 {
        let whole = self.whole.resident_bytes();
        if !self.shared {
            return whole;
        }
        let share = (whole as u128 * self.parting.few as u128 / self.parting.samples as u128) as u64;
        if self.smaller { share } else { whole - share }
    }

    /// Those of the whole set, by the same numbers, with this part's samples in each.
    fn blocks(&self) -> Option<Vec<Block>> {
        let mut index = 0;
        let own = |block: Block| {
            let before = self.below(index);
            index += block.records;
            Block { records: self.below(index) - before, ..block }
        };
        Some(self.whole.blocks()?.into_iter().map(own).collect())
    }

    fn expect(&self, blocks: Vec<u32>) {
        self.whole.expect(blocks);
    }

    fn balance(&self) -> Option<Vec<u64>> {
        let classes = match &self.features().target {
            Target::Class { names } | Target::Mixed { names } => names.len(),
            Target::Values { .. } | Target::Tokens => return None,
        };
        let mut counts = vec![0; classes];
        for i in 0..self.len() {
            *counts.get_mut(self.class(i)? as usize)? += 1;
        }
        Some(counts)
    }

    fn class(&self, index: u64) -> Option<u32> {
        self.whole.class(self.index(index))
    }

    fn lengths(&self) -> Option<Lengths> {
        self.whole.lengths()
    }

    fn text(&self, tokens: &[u32]) -> Option<String> {
        self.whole.text(tokens)
    }

    fn columns(&self) -> Vec<String> {
        self.whole.columns()
    }

    fn tokenizer(&self) -> Option<Vec<u8>> {
        self.whole.tokenizer()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.whole.about()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::shapes::{self, Shapes};

    fn parts(samples: u64, share: f64, seed: u64) -> (Part, Part) {
        split(Arc::new(Shapes::new(16, samples, 1, shapes::Part::Train).unwrap()), share, seed).unwrap()
    }

    fn indices(part: &Part) -> Vec<u64> {
        (0..part.len()).map(|i| part.index(i)).collect()
    }

    proptest! {
        /// Each sample is in one part, in order, and the parts are as large as asked.
        #[test]
        fn the_parts_make_the_whole(samples in 2u64..400, share in 0.0..1.0f64, seed: u64) {
            let (train, valid) = parts(samples, share, seed);
            let (a, b) = (indices(&train), indices(&valid));
            prop_assert_eq!(b.len() as u64, ((samples as f64 * share).round() as u64).clamp(1, samples - 1));
            prop_assert!(a.is_sorted() && b.is_sorted());
            for (part, of) in [(&train, &a), (&valid, &b)] {
                for index in 0..=samples {
                    prop_assert_eq!(part.below(index), of.iter().filter(|i| **i < index).count() as u64);
                }
            }
            let plan = Plan::new(samples, share, seed).unwrap();
            prop_assert!(a.iter().all(|i| plan.trained(*i)) && !b.iter().any(|i| plan.trained(*i)));
            let mut all = [a, b].concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..samples));
        }
    }

    #[test]
    fn the_seed_decides_and_huge_sets_cost_nothing() {
        let valid = |seed| indices(&parts(1000, 0.1, seed).1);
        assert_eq!(valid(1), valid(1));
        assert_ne!(valid(1), valid(2));
        let (train, valid) = parts(1 << 60, 0.01, 3);
        assert_eq!(train.len() + valid.len(), 1 << 60);
        assert!(train.index(train.len() - 1) < 1 << 60 && valid.index(12345) < 1 << 60);
        let one = Arc::new(Shapes::new(16, 1, 1, shapes::Part::Train).unwrap());
        assert!(split(one, 0.5, 0).is_err());
    }
}
