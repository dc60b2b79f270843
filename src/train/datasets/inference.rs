//! Opens samples for a trained model: encoded as the training samples were, by what its checkpoint kept, so that the
//! training data is needed only if the validation set is a part of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Datasets, Failure, images, readers, source_of, split_settings};
use crate::data::preprocessing::Preprocessing;
use crate::data::split::DatasetSplit;
use crate::data::transforms::Augmentation;
use crate::data::views::TestTimeViews;
use crate::data::{DataError, Dataset, DatasetContext, TestSet};
use crate::job::{self, Job, SourceConfig};

/// Which samples to open.
#[derive(Clone, Copy, Debug)]
pub enum Samples<'a> {
    /// A set of the job.
    Set(DatasetSplit),
    /// Those of these files, with their targets.
    Labelled(&'a [PathBuf]),
    /// Those of these files, whose targets are not read.
    Unlabelled(&'a [PathBuf]),
}

/// Views of each image whose predictions are averaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TestTimeAugmentation {
    /// The image as it is.
    #[default]
    Off,
    /// The image and its mirror image.
    Flip,
    /// The image and its augmentations by the job, so many views in all.
    Views(u64),
}

impl Samples<'_> {
    /// The set of the datasets that were opened for these samples.
    pub(super) fn set(self) -> DatasetSplit {
        match self {
            Samples::Set(set) => set,
            Samples::Labelled(_) | Samples::Unlabelled(_) => DatasetSplit::Valid,
        }
    }

    /// Puts the files of these samples in place of a job's. The training files are needed only if the set is a part of
    /// them.
    pub(super) fn replace_files(self, files: &mut job::FilesConfig) {
        match self {
            Samples::Labelled(own) | Samples::Unlabelled(own) => *files = job::FilesConfig::only(own),
            Samples::Set(_) => {}
        }
    }
}

pub(super) fn one_of(sets: Datasets, set: DatasetSplit) -> Result<Arc<dyn Dataset>, Failure> {
    match (set, sets.test) {
        (DatasetSplit::Train, _) => Ok(sets.train),
        (DatasetSplit::Test, Some(TestSet::Open(test))) => Ok(test),
        (DatasetSplit::Test, _) => Err(no_test_set("the run has no test set")),
        (DatasetSplit::Valid, _) => Ok(sets.valid),
    }
}

fn no_test_set(expected: &'static str) -> Failure {
    DataError::InvalidSetting { name: "--split", value: "test".into(), expected }.into()
}

/// A trained model, as far as its data is concerned.
pub struct TrainedModelData<'a> {
    pub job: &'a Job,
    pub preprocessing: &'a Preprocessing,
    /// The checkpoint's tokenizer, if the data is text.
    pub tokenizer: Option<&'a Path>,
    pub test_time: TestTimeAugmentation,
}

impl TrainedModelData<'_> {
    /// Opens the samples; each is there as often as it has views, one after the other.
    pub fn open(&self, samples: Samples, opening: &DatasetContext) -> Result<Arc<dyn Dataset>, Failure> {
        let (views, augmentation) = self.views()?;
        let own_files = self.own_files(samples)?;
        let samples = own_files.as_deref().map_or(samples, Samples::Labelled);
        let opening = &DatasetContext { workers: readers(self.job), ..opening.clone() };
        let dataset = source_of(self.job).open_trained(self, samples, augmentation, opening)?;
        Ok(if views == 1 { dataset } else { Arc::new(TestTimeViews::new(dataset, views)) })
    }

    /// The number of views of a sample, and the augmentation of all but the first.
    fn views(&self) -> Result<(u64, Augmentation), Failure> {
        let of_job = self.job.data.source.augment();
        let (views, augmentation) = match (self.test_time, of_job) {
            (TestTimeAugmentation::Off, _) => return Ok((1, Augmentation::default())),
            (_, None) => {
                return Err(Failure::WrongTask {
                    what: "`--tta` averages over views of an image, and the data of this run are no images",
                    instead: "leave `--tta` out",
                });
            }
            (TestTimeAugmentation::Flip, _) => {
                (2, Augmentation { horizontal_flip: 1.0, ..Augmentation::default() })
            }
            (TestTimeAugmentation::Views(views), Some(of_job)) => (views, images::augment(of_job)),
        };
        if augmentation == Augmentation::default() {
            return Err(Failure::WrongTask {
                what: "`--tta N` draws views from the job's augmentations, and its `[data.augment]` has none \
                       but mixing",
                instead: "`--tta flip` averages over an image and its mirror image",
            });
        }
        Ok((views, Augmentation { plain_first_view: true, ..augmentation }))
    }

    /// The files of a set, if the set is all of their samples. An error if the job has no such set.
    fn own_files(&self, samples: Samples) -> Result<Option<Vec<PathBuf>>, Failure> {
        let Samples::Set(set) = samples else { return Ok(None) };
        let no_test = |expected| Err(no_test_set(expected));
        let source = &self.job.data.source;
        Ok(match (source, source.files(), set) {
            (_, Some(files), DatasetSplit::Test) if !files.test.is_empty() => Some(files.test.clone()),
            (_, Some(files), DatasetSplit::Test) if files.test_fraction.is_none() => {
                return no_test(
                    "the run has no test set: its job has neither `data.test` nor `data.test_fraction`",
                );
            }
            (_, Some(files), DatasetSplit::Valid) if !files.valid.is_empty() => Some(files.valid.clone()),
            (_, Some(files), DatasetSplit::Train) if split_settings(self.job, files).is_whole() => {
                Some(files.train.clone())
            }
            (SourceConfig::Idx(s), ..) => match (set, &s.test_images, &s.test_labels) {
                (DatasetSplit::Train, ..) => Some(vec![s.train_images.clone(), s.train_labels.clone()]),
                (DatasetSplit::Valid, ..) => Some(vec![s.valid_images.clone(), s.valid_labels.clone()]),
                (DatasetSplit::Test, Some(images), Some(labels)) => {
                    Some(vec![images.clone(), labels.clone()])
                }
                _ => return no_test("the run has no test set: its job has no `data.test_images`"),
            },
            (
                SourceConfig::Shapes(job::ShapesConfig { test_samples: 0, .. })
                | SourceConfig::TextSynthetic(job::TextSyntheticConfig { test_samples: 0, .. }),
                _,
                DatasetSplit::Test,
            ) => return no_test("the run has no test set: its job has no `data.test_samples`"),
            _ => None,
        })
    }

    /// How its table is encoded.
    pub(super) fn schema(&self) -> Result<&crate::data::table::TableSchema, Failure> {
        self.preprocessing.table.as_ref().ok_or_else(|| Failure::UnusableCheckpoint {
            folder: PathBuf::new(),
            problem: "it does not say how its table is encoded".into(),
        })
    }

    /// Puts the checkpoint's tokenizer in place of the one that `data.tokens` names.
    pub(super) fn replace_tokenizer(&self, tokens: &mut String) {
        if let Some(file) = self.tokenizer.filter(|_| tokens != "bytes") {
            *tokens = file.to_string_lossy().into_owned();
        }
    }
}
