//! Sets that the program draws.

use super::pictures::augment;
use super::{Failure, Sets};
use crate::data::shapes::{self, Shapes};
use crate::data::{Opening, sequences};
use crate::job;

pub(super) fn shapes(s: &job::Shapes, readers: usize, opening: &Opening) -> Result<Sets, Failure> {
    let part = |samples: usize, part| Shapes::new(s.image_size, samples as u64, opening.seed, part);
    let train = part(s.train_samples, shapes::Part::Train)?.augmented(augment(&s.augment), readers)?;
    Sets::of(train, part(s.valid_samples, shapes::Part::Valid)?).mixed(&s.augment, readers)
}

pub(super) fn sequences(s: &job::TextSynthetic, context: usize, opening: &Opening) -> Sets {
    let part = |samples: usize, part| {
        sequences::Set::new(samples as u64, context, s.vocab, s.classes, opening.seed, part)
    };
    Sets::of(part(s.train_samples, sequences::Part::Train), part(s.valid_samples, sequences::Part::Valid))
}
