//! Generated token sequences: a hidden rule maps every two tokens to the next one, with some noise.
//!
//! Gives a language model (next-token prediction) or a sequence classifier (which of several rules generated the
//! sequence) something to train on without a download. Everything is a function of the seed and the sample index.

use super::split::DatasetSplit;
use super::{BatchRow, DataError, Dataset, Features, InputSpec, SampleKey, TargetSpec};
use crate::base::random::{RngKey, stream_id};

/// Fraction of tokens that do not follow the rule.
const NOISE: f32 = 0.1;

/// Generates sequences.
#[derive(Clone, Copy, Debug)]
pub struct SequenceGenerator {
    samples: u64,
    length: usize,
    vocab: u64,
    /// Number of classes; 0 for next-token prediction.
    classes: u64,
    rule: RngKey,
    draws: RngKey,
}

/// A [`SequenceGenerator`] with the features of its samples.
pub struct SequenceDataset {
    generator: SequenceGenerator,
    features: Features,
}

impl SequenceDataset {
    /// Sequences of `length` tokens below `vocab`. With `classes`, the target is the rule that generated the sequence;
    /// otherwise the targets are the next tokens.
    pub fn new(
        samples: u64,
        length: usize,
        vocab: usize,
        classes: usize,
        seed: u64,
        part: DatasetSplit,
    ) -> Self {
        let set = match part {
            DatasetSplit::Train => const { stream_id("sequences.train") },
            DatasetSplit::Valid => const { stream_id("sequences.valid") },
            DatasetSplit::Test => const { stream_id("sequences.test") },
        };
        let target = match classes {
            0 => TargetSpec::Tokens,
            n => TargetSpec::Class { names: (0..n).map(|i| format!("rule {i}")).collect() },
        };
        let sequences = SequenceGenerator {
            samples,
            length,
            vocab: vocab as u64,
            classes: classes as u64,
            rule: RngKey::new(seed, const { stream_id("sequences.rule") }),
            draws: RngKey::new(seed, set),
        };
        Self { generator: sequences, features: Features::new(InputSpec::Tokens { length, vocab }, target) }
    }
}

impl SequenceGenerator {
    /// Generates the `length + 1` tokens of a sample, one at a time.
    fn generate(&self, index: u64, mut put: impl FnMut(usize, u32)) {
        let draws = self.draws.fold_in(index);
        let rule = self.rule.fold_in(if self.classes == 0 { 0 } else { index % self.classes });
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

impl Dataset for SequenceDataset {
    fn len(&self) -> u64 {
        self.generator.samples
    }

    fn features(&self) -> &Features {
        &self.features
    }

    fn read(&self, index: u64, _: SampleKey, into: &mut BatchRow<'_>) -> Result<(), DataError> {
        let s = &self.generator;
        let input = into.input.as_u32_mut();
        if s.classes > 0 {
            s.generate(index, |i, token| input.get_mut(i).into_iter().for_each(|slot| *slot = token));
            into.target.as_u32_mut()[0] = (index % s.classes) as u32;
            return Ok(());
        }
        let target = into.target.as_u32_mut();
        s.generate(index, |i, token| {
            input.get_mut(i).into_iter().for_each(|slot| *slot = token);
            // The target of a position is the next token.
            i.checked_sub(1).and_then(|i| target.get_mut(i)).into_iter().for_each(|slot| *slot = token);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostBatch, SliceMut};

    fn sample(set: &SequenceDataset, index: u64) -> (Vec<u32>, Vec<u32>) {
        let features = set.features();
        let (mut input, mut target) = (vec![0; features.input_len()], vec![0; features.target_len()]);
        let mut row =
            BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::U32(&mut target), length: 0 };
        set.read(index, SampleKey { seed: 1, epoch: 0, sample: index }, &mut row).unwrap();
        (input, target)
    }

    #[test]
    fn a_target_is_the_next_token_and_most_follow_the_rule() {
        let set = SequenceDataset::new(100, 64, 16, 0, 5, DatasetSplit::Train);
        let (mut followed, mut all) = (0, 0);
        for index in 0..100 {
            let (input, target) = sample(&set, index);
            assert_eq!(input[1..], target[..63]);
            for w in input.windows(3) {
                let expected = set.generator.rule.fold_in(0).below(w[0] as u64 * 16 + w[1] as u64, 16);
                followed += usize::from(expected == w[2] as u64);
                all += 1;
            }
        }
        let fraction = followed as f64 / all as f64;
        assert!((0.87..0.95).contains(&fraction), "{fraction}");
    }

    #[test]
    fn the_sets_differ_and_classes_take_turns() {
        let set = |part| SequenceDataset::new(10, 32, 16, 4, 5, part);
        assert_ne!(sample(&set(DatasetSplit::Train), 3).0, sample(&set(DatasetSplit::Valid), 3).0);
        assert_eq!(sample(&set(DatasetSplit::Train), 3).0, sample(&set(DatasetSplit::Train), 3).0);
        let labels: Vec<u32> = (0..5).map(|i| sample(&set(DatasetSplit::Train), i).1[0]).collect();
        assert_eq!(labels, [0, 1, 2, 3, 0]);
        assert!(HostBatch::with_capacity(set(DatasetSplit::Train).features(), 4).is_ok());
    }
}
