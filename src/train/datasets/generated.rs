//! Generated datasets: shapes and synthetic token sequences.

use std::sync::Arc;

use super::images::{augment, with_mixing};
use super::inference::{Samples, TrainedModelData, one_of};
use super::{Datasets, Failure, Source, context, generated_inputs, readers};
use crate::data::fingerprint::FingerprintInput;
use crate::data::shapes::ShapesDataset;
use crate::data::split::DatasetSplit;
use crate::data::transforms::Augmentation;
use crate::data::{Dataset, DatasetContext, sequences};
use crate::job::{self, Job};

impl Source for job::ShapesConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let (size, readers) = (self.image_size, readers(job));
        let part = |samples: usize, part| ShapesDataset::new(size, samples as u64, opening.seed, part);
        let train =
            part(self.train_samples, DatasetSplit::Train)?.augmented(augment(&self.augment), readers)?;
        let test =
            (self.test_samples > 0).then(|| part(self.test_samples, DatasetSplit::Test)).transpose()?;
        let valid = part(self.valid_samples, DatasetSplit::Valid)?;
        with_mixing(Datasets::new(train, valid, test), &self.augment, readers, opening)
    }

    fn inputs(&self, job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        Ok(generated_inputs(job))
    }

    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let set = samples.set();
        let samples = match set {
            DatasetSplit::Train => self.train_samples,
            DatasetSplit::Valid => self.valid_samples,
            DatasetSplit::Test => self.test_samples,
        };
        let images = ShapesDataset::new(self.image_size, samples as u64, opening.seed, set)?;
        Ok(Arc::new(images.augmented(augmentation, readers(trained.job))?))
    }
}

impl Source for job::TextSyntheticConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let context = context(job)?;
        let part = |samples: usize, part| {
            let samples = samples as u64;
            sequences::SequenceDataset::new(samples, context, self.vocab, self.classes, opening.seed, part)
        };
        Ok(Datasets::new(
            part(self.train_samples, DatasetSplit::Train),
            part(self.valid_samples, DatasetSplit::Valid),
            (self.test_samples > 0).then(|| part(self.test_samples, DatasetSplit::Test)),
        ))
    }

    fn inputs(&self, job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        Ok(generated_inputs(job))
    }

    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        _augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        one_of(self.open(trained.job, opening)?, samples.set())
    }
}
