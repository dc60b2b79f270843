//! Image datasets from files: idx, folders, tables and tar archives.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::inference::{Samples, TrainedModelData};
use super::{Datasets, Failure, Source, readers, split_settings};
use crate::base::features::{InputSpec, TargetSpec};
use crate::base::units::counted;
use crate::data::fingerprint::FingerprintInput;
use crate::data::idx::{self, IdxDataset, TrainedShape};
use crate::data::images::{
    self, ClassNames, ImageDataset, ImageFiles, ImageOptions, LabelColumns, TarShards,
};
use crate::data::split::{self, SplitPlan, Subset, TrainFiles};
use crate::data::streaming::{SEQUENTIAL_WINDOW_BYTES, StreamingDataset};
use crate::data::transforms::mix::{MixOptions, MixedDataset};
use crate::data::transforms::{
    self, Augmentation, ColorJitter, Normalise, Pipeline, RandAugment, RandomAffine, RandomBlur,
    RandomErasing, RandomResizedCrop, ResizeMode,
};
use crate::data::{DataError, Dataset, DatasetContext, TestSet};
use crate::job::{self, Job, NormalizePreset, OneOrMany};

impl Source for job::IdxConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let readers = readers(job);
        let trained_on = TrainedShape::of(&self.train_images)?;
        let other = |images: &Path, labels: &Path| {
            let trained_on = Some(trained_on.clone());
            open_idx(self, (images, labels), trained_on, Augmentation::default(), readers, opening)
        };
        // First and not at the same time as the others: compressed images are read into memory.
        let test = match (&self.test_images, &self.test_labels) {
            (Some(images), Some(labels)) => Some(TestSet::Closed { samples: other(images, labels)?.len() }),
            _ => None,
        };
        let augmentation = augment(&self.augment);
        let train = (self.train_images.as_path(), self.train_labels.as_path());
        let train = open_idx(self, train, None, augmentation, readers, opening)?;
        let valid = other(&self.valid_images, &self.valid_labels)?;
        let sets = Datasets { train: Arc::new(train), valid: Arc::new(valid), test };
        with_mixing(sets, &self.augment, readers, opening)
    }

    fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        let train = [("data.train_images", &self.train_images), ("data.train_labels", &self.train_labels)];
        let valid = [("data.valid_images", &self.valid_images), ("data.valid_labels", &self.valid_labels)];
        let test = self.test_images.iter().map(|file| ("data.test_images", file));
        let test = test.chain(self.test_labels.iter().map(|file| ("data.test_labels", file)));
        let files = train.into_iter().chain(valid).chain(test);
        Ok(files.map(|(key, file)| FingerprintInput::file(key, file)).collect())
    }

    /// Images and labels in idx files: pairs of files, images first.
    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let files = match samples {
            Samples::Set(_) => unreachable!("every set of idx files has files of its own"),
            Samples::Labelled(files) | Samples::Unlabelled(files) => files,
        };
        let [images, labels] = files else {
            return Err(DataError::InvalidSetting {
                name: "data",
                value: counted(files.len() as u64, "file"),
                expected: "an idx file of images and one of their labels",
            }
            .into());
        };
        let trained_on = match &trained.preprocessing.features.input {
            InputSpec::Floats { shape } => {
                Some(TrainedShape { images: self.train_images.clone(), shape: shape.clone() })
            }
            _ => None,
        };
        let readers = readers(trained.job);
        Ok(Arc::new(open_idx(self, (images, labels), trained_on, augmentation, readers, opening)?))
    }
}

fn open_idx(
    s: &job::IdxConfig,
    (images, labels): (&Path, &Path),
    trained_on: Option<TrainedShape>,
    augmentation: Augmentation,
    readers: usize,
    opening: &DatasetContext,
) -> Result<IdxDataset, DataError> {
    IdxDataset::open(&idx::IdxFiles {
        images: images.to_owned(),
        labels: labels.to_owned(),
        classes: (0..s.classes).map(|class| class.to_string()).collect(),
        trained_on,
        normalise: Normalise { mean: floats(&s.mean), std: floats(&s.std) },
        augmentation,
        readers,
        max_bytes: opening.max_bytes,
    })
}

fn columns(s: &job::ImagesConfig) -> LabelColumns {
    LabelColumns {
        path: s.path_column.clone(),
        label: s.label_column.clone(),
        separator: s.label_separator.clone(),
    }
}

impl Source for job::ImagesConfig {
    fn open(&self, job: &Job, opening: &DatasetContext) -> Result<Datasets, Failure> {
        let (files, readers) = (&self.files, readers(job));
        let split = &split_settings(job, files);
        let eval_pipeline = eval_pipeline(self)?;
        let train_pipeline = eval_pipeline.clone().augmented(augment(&self.augment))?;
        let open = |files: &[PathBuf], classes: Option<&ClassNames>| {
            ImageFiles::open(files, image_options(self, readers), classes, opening).map(Arc::new)
        };
        let train_files = open(&files.train, None)?;
        train_files.check_labels_of_tables(&files.train)?;
        let own = |files: &[PathBuf]| match files {
            [] => Ok::<_, DataError>(None),
            files => {
                let files = open(files, Some(train_files.names()))?;
                Ok(Some(dataset(files, &eval_pipeline, SEQUENTIAL_WINDOW_BYTES)))
            }
        };
        let (valid, test) = (own(&files.valid)?, own(&files.test)?);
        let plan = match split.is_whole() {
            true => None,
            false => Some(SplitPlan::new(train_files.len(), split, Some(train_files.as_ref()), opening)?),
        };
        // Only the training set is augmented.
        let files = TrainFiles {
            train: dataset(train_files.clone(), &train_pipeline, opening.shuffle_buffer),
            others: dataset(train_files, &eval_pipeline, SEQUENTIAL_WINDOW_BYTES),
        };
        with_mixing(split::job_datasets(files, plan, valid, test), &self.augment, readers, opening)
    }

    fn inputs(&self, _job: &Job) -> Result<Vec<FingerprintInput>, Failure> {
        let columns = columns(self);
        let files = &self.files;
        let mut inputs = Vec::new();
        for (key, files) in
            [(super::TRAIN, &files.train), (super::VALID, &files.valid), (super::TEST, &files.test)]
        {
            inputs.extend(images::fingerprint_inputs(key, files, &columns)?);
        }
        Ok(inputs)
    }

    /// Images of the model's classes.
    fn open_trained(
        &self,
        trained: &TrainedModelData,
        samples: Samples,
        augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let target = &trained.preprocessing.features.target;
        let multi_label = matches!(target, TargetSpec::MultiLabel { .. });
        let options = ImageOptions { multi_label, ..image_options(self, readers(trained.job)) };
        let pipeline = eval_pipeline(self)?.augmented(augmentation)?;
        let classes = ClassNames::from_names(target.names());
        let labelled = |files: &[PathBuf]| {
            ImageFiles::open(files, options.clone(), Some(&classes), opening).map(Arc::new)
        };
        let set = |files: Arc<ImageFiles>| dataset(files, &pipeline, SEQUENTIAL_WINDOW_BYTES);
        match samples {
            Samples::Labelled(files) => Ok(set(labelled(files)?)),
            Samples::Set(part) => {
                let files = labelled(&self.files.train)?;
                let split = split_settings(trained.job, &self.files);
                let plan = SplitPlan::new(files.len(), &split, Some(files.as_ref()), opening)?;
                Ok(Arc::new(Subset::alone(set(files), plan, part)))
            }
            Samples::Unlabelled(files) => {
                let files = ImageFiles::open_unlabelled(files, options.clone(), &classes, opening)?;
                Ok(dataset(Arc::new(files), &pipeline, SEQUENTIAL_WINDOW_BYTES))
            }
        }
    }
}

/// The normalization of images from files.
pub fn normalization(source: &job::SourceConfig) -> Option<Normalise> {
    match source {
        job::SourceConfig::Idx(s) => Some(Normalise { mean: floats(&s.mean), std: floats(&s.std) }),
        job::SourceConfig::Images(s) => Some(normalise(s)),
        _ => None,
    }
}

/// Height and width of a sample.
fn image_size(s: &job::ImagesConfig) -> [usize; 2] {
    match s.image_size.to_vec()[..] {
        [height, width, ..] => [height, width],
        ref sides => [sides[0]; 2],
    }
}

/// From a decoded image to a sample, without augmentation.
fn eval_pipeline(s: &job::ImagesConfig) -> Result<Pipeline, Failure> {
    let [height, width] = image_size(s);
    let fit = match s.fit {
        job::ImageFit::Crop => ResizeMode::CenterCrop { fraction: s.crop_fraction },
        job::ImageFit::Pad => ResizeMode::Pad,
        job::ImageFit::Stretch => ResizeMode::Stretch,
    };
    Ok(Pipeline::new([height, width, s.channels], fit, normalise(s))?)
}

fn image_options(s: &job::ImagesConfig, readers: usize) -> ImageOptions {
    let (channels, max_pixels, columns) = (s.channels, s.max_pixels, columns(s));
    let multi_label = s.label_separator.as_ref().is_some_and(|separator| !separator.is_empty());
    ImageOptions { channels, size: image_size(s), max_pixels, columns, multi_label, readers }
}

fn dataset(files: Arc<ImageFiles>, pipeline: &Pipeline, buffer: u64) -> Arc<dyn Dataset> {
    match files.compressed {
        true => Arc::new(StreamingDataset::new(Arc::new(TarShards::new(files, pipeline.clone())), buffer)),
        false => Arc::new(ImageDataset::new(files, pipeline.clone())),
    }
}

/// Wraps the training set in mixup and CutMix, if the job sets them.
pub(super) fn with_mixing(
    sets: Datasets,
    augment: &job::AugmentConfig,
    readers: usize,
    opening: &DatasetContext,
) -> Result<Datasets, Failure> {
    let mixing = MixOptions { mixup: augment.mixup, cutmix: augment.cutmix, probability: augment.mix_chance };
    if mixing.is_off() {
        return Ok(sets);
    }
    let train = MixedDataset::new(sets.train, mixing, readers, opening)?;
    Ok(Datasets { train: Arc::new(train), ..sets })
}

fn normalise(s: &job::ImagesConfig) -> Normalise {
    // ImageNet's per-channel statistics; for grayscale, their means over the channels.
    let (mean, std) = match (s.normalise, s.channels) {
        (NormalizePreset::Imagenet, 3) => (vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]),
        (NormalizePreset::Imagenet, _) => (vec![0.449], vec![0.226]),
        (NormalizePreset::Half, _) => (vec![0.5], vec![0.5]),
        (NormalizePreset::None, _) => (vec![0.0], vec![1.0]),
    };
    Normalise { mean: s.mean.as_ref().map_or(mean, floats), std: s.std.as_ref().map_or(std, floats) }
}

fn floats(values: &OneOrMany<f64>) -> Vec<f32> {
    values.to_vec().into_iter().map(|value| value as f32).collect()
}

/// Augmentations of an image, from the keys of the job.
pub(super) fn augment(a: &job::AugmentConfig) -> transforms::Augmentation {
    let erasing = RandomErasing { probability: a.erasing, area: a.erasing_area, ratio: a.erasing_ratio };
    let blur = RandomBlur { probability: a.blur, kernel: a.blur_kernel, sigma: a.blur_sigma };
    let randaugment = RandAugment { operations: a.randaugment, magnitude: a.randaugment_magnitude };
    transforms::Augmentation {
        resized_crop: a.random_resized_crop.map(|scale| RandomResizedCrop { scale, ratio: a.crop_ratio }),
        padding: a.crop_padding,
        horizontal_flip: a.horizontal_flip,
        vertical_flip: a.vertical_flip,
        affine: RandomAffine { rotation: a.rotation, translate: a.translate, scale: a.scale, shear: a.shear },
        randaugment: (a.randaugment > 0).then_some(randaugment),
        blur: (a.blur > 0.0).then_some(blur),
        jitter: ColorJitter {
            brightness: a.brightness,
            contrast: a.contrast,
            saturation: a.saturation,
            hue: a.hue,
        },
        erasing: (a.erasing > 0.0).then_some(erasing),
        plain_first_view: false,
    }
}
