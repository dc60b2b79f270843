//! Generated sequences of tokens: a hidden rule says which token follows which two, with some noise.
//!
//! Nothing to download for a language model (predict the next token) or for a classifier of sequences
//! (tell which of several rules made one). Everything is a function of the seed and the sample's index.

use super::{DataError, Features, Input, Key, Row, Source, Target};
use crate::random::{Random, stream};

/// Share of tokens that do not follow the rule.
const NOISE: f32 = 0.1;

/// What is generated.
#[derive(Clone, Copy, Debug)]
pub struct Sequences {
    samples: u64,
    length: usize,
    vocab: u64,
    /// 0 where the target is the next token.
    classes: u64,
    rule: Random,
    draws: Random,
}

/// A set of [`Sequences`] and what its samples look like.
pub struct Set {
    sequences: Sequences,
    features: Features,
}

/// Which of two sets that share a rule and no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Train,
    Valid,
}

impl Set {
    /// Sequences of `length` tokens below `vocab`; with `classes` the target is the rule that made one, and
    /// without, at each position, the next token.
    pub fn new(samples: u64, length: usize, vocab: usize, classes: usize, seed: u64, part: Part) -> Self {
        let set = match part {
            Part::Train => const { stream("sequences.train") },
            Part::Valid => const { stream("sequences.valid") },
        };
        let target = match classes {
            0 => Target::Tokens,
            n => Target::Class { names: (0..n).map(|i| format!("rule {i}")).collect() },
        };
        let sequences = Sequences {
            samples,
            length,
            vocab: vocab as u64,
            classes: classes as u64,
            rule: Random::new(seed, const { stream("sequences.rule") }),
            draws: Random::new(seed, set),
        };
        Self { sequences, features: Features::new(Input::Tokens { length, vocab }, target) }
    }
}

impl Sequences {
    /// Writes `length + 1` tokens of a sample, one at a time.
    fn generate(&self, index: u64, mut put: impl FnMut(usize, u32)) {
        let draws = self.draws.at(index);
        let rule = self.rule.at(if self.classes == 0 { 0 } else { index % self.classes });
        let (mut a, mut b) = (draws.below(0, self.vocab), draws.below(1, self.vocab));
        for i in 0..=self.length {
            put(i, a as u32);
            let at = 2 + 2 * i as u64;
            let free = draws.f32(at) < NOISE;
            let next = if free {
                draws.below(at + 1, self.vocab)
            } else {
                rule.below(a * self.vocab + b, self.vocab)
            };
            (a, b) = (b, next);
        }
    }
}

impl Source for Set {
    fn len(&self) -> u64 {
        self.sequences.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, _: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        let s = &self.sequences;
        let input = into.input.u32();
        if s.classes > 0 {
            s.generate(index, |i, token| input.get_mut(i).into_iter().for_each(|slot| *slot = token));
            into.target.u32()[0] = (index % s.classes) as u32;
            return Ok(());
        }
        let target = into.target.u32();
        s.generate(index, |i, token| {
            input.get_mut(i).into_iter().for_each(|slot| *slot = token);
            // The target of a position is the token after it.
            i.checked_sub(1).and_then(|i| target.get_mut(i)).into_iter().for_each(|slot| *slot = token);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Batch, Slice};

    fn sample(set: &Set, index: u64) -> (Vec<u32>, Vec<u32>) {
        let features = set.features();
        let (mut input, mut target) = (vec![0; features.input_len()], vec![0; features.target_len()]);
        let mut row = Row { input: Slice::U32(&mut input), target: Slice::U32(&mut target), length: 0 };
        set.read(index, Key { seed: 1, epoch: 0, sample: index }, &mut row).unwrap();
        (input, target)
    }

    #[test]
    fn a_target_is_the_next_token_and_most_follow_the_rule() {
        let set = Set::new(100, 64, 16, 0, 5, Part::Train);
        let (mut followed, mut all) = (0, 0);
        for index in 0..100 {
            let (input, target) = sample(&set, index);
            assert_eq!(input[1..], target[..63]);
            for w in input.windows(3) {
                let wanted = set.sequences.rule.at(0).below(w[0] as u64 * 16 + w[1] as u64, 16);
                followed += usize::from(wanted == w[2] as u64);
                all += 1;
            }
        }
        let share = followed as f64 / all as f64;
        assert!((0.87..0.95).contains(&share), "{share}");
    }

    #[test]
    fn the_sets_differ_and_classes_take_turns() {
        let set = |part| Set::new(10, 32, 16, 4, 5, part);
        assert_ne!(sample(&set(Part::Train), 3).0, sample(&set(Part::Valid), 3).0);
        assert_eq!(sample(&set(Part::Train), 3).0, sample(&set(Part::Train), 3).0);
        let labels: Vec<u32> = (0..5).map(|i| sample(&set(Part::Train), i).1[0]).collect();
        assert_eq!(labels, [0, 1, 2, 3, 0]);
        assert!(Batch::with_room(set(Part::Train).features(), 4).is_ok());
    }
}
