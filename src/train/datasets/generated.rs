//! Generated datasets: shapes and synthetic token sequences.

use std::sync::Arc;

use super::images::augment;
use super::{Datasets, Failure};
use crate::data::shapes::{self, ShapesDataset};
use crate::data::transforms::Augmentation;
use crate::data::{Dataset, DatasetContext, sequences};
use crate::job;

pub(super) fn shapes(
    s: &job::ShapesConfig,
    readers: usize,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let part = |samples: usize, part| ShapesDataset::new(s.image_size, samples as u64, opening.seed, part);
    let train = part(s.train_samples, shapes::ShapesSplit::Train)?.augmented(augment(&s.augment), readers)?;
    let valid = part(s.valid_samples, shapes::ShapesSplit::Valid)?;
    Datasets::new(train, valid).with_mixing(&s.augment, readers, opening)
}

/// The validation set, augmented for test time.
pub(super) fn valid_shapes(
    s: &job::ShapesConfig,
    readers: usize,
    augmentation: Augmentation,
    opening: &DatasetContext,
) -> Result<Arc<dyn Dataset>, Failure> {
    let (samples, part) = (s.valid_samples as u64, shapes::ShapesSplit::Valid);
    let valid = ShapesDataset::new(s.image_size, samples, opening.seed, part)?;
    Ok(Arc::new(valid.augmented(augmentation, readers)?))
}

pub(super) fn sequences(s: &job::TextSyntheticConfig, context: usize, opening: &DatasetContext) -> Datasets {
    let part = |samples: usize, part| {
        sequences::SequenceDataset::new(samples as u64, context, s.vocab, s.classes, opening.seed, part)
    };
    Datasets::new(
        part(s.train_samples, sequences::SequencesSplit::Train),
        part(s.valid_samples, sequences::SequencesSplit::Valid),
    )
}
