//! Generated datasets: shapes and synthetic token sequences.

use std::sync::Arc;

use super::images::augment;
use super::{Datasets, Failure};
use crate::data::shapes::ShapesDataset;
use crate::data::split::DatasetSplit;
use crate::data::transforms::Augmentation;
use crate::data::{Dataset, DatasetContext, sequences};
use crate::job;

pub(super) fn shapes(
    s: &job::ShapesConfig,
    readers: usize,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let part = |samples: usize, part| ShapesDataset::new(s.image_size, samples as u64, opening.seed, part);
    let train = part(s.train_samples, DatasetSplit::Train)?.augmented(augment(&s.augment), readers)?;
    let test = (s.test_samples > 0).then(|| part(s.test_samples, DatasetSplit::Test)).transpose()?;
    let valid = part(s.valid_samples, DatasetSplit::Valid)?;
    Datasets::new(train, valid, test).with_mixing(&s.augment, readers, opening)
}

/// One set, augmented for test time.
pub(super) fn shapes_set(
    s: &job::ShapesConfig,
    set: DatasetSplit,
    readers: usize,
    augmentation: Augmentation,
    opening: &DatasetContext,
) -> Result<Arc<dyn Dataset>, Failure> {
    let samples = match set {
        DatasetSplit::Train => s.train_samples,
        DatasetSplit::Valid => s.valid_samples,
        DatasetSplit::Test => s.test_samples,
    };
    let images = ShapesDataset::new(s.image_size, samples as u64, opening.seed, set)?;
    Ok(Arc::new(images.augmented(augmentation, readers)?))
}

pub(super) fn sequences(s: &job::TextSyntheticConfig, context: usize, opening: &DatasetContext) -> Datasets {
    let part = |samples: usize, part| {
        sequences::SequenceDataset::new(samples as u64, context, s.vocab, s.classes, opening.seed, part)
    };
    Datasets::new(
        part(s.train_samples, DatasetSplit::Train),
        part(s.valid_samples, DatasetSplit::Valid),
        (s.test_samples > 0).then(|| part(s.test_samples, DatasetSplit::Test)),
    )
}
