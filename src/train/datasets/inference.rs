//! Opens samples for a trained model: encoded as the training samples were, by what its checkpoint kept, so that the
//! training data is needed only if the validation set is a part of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Datasets, Failure, generated, images, language, readers, split_settings, tables};
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
    fn set(self) -> DatasetSplit {
        match self {
            Samples::Set(set) => set,
            Samples::Labelled(_) | Samples::Unlabelled(_) => DatasetSplit::Valid,
        }
    }
}

impl Datasets {
    fn into_set(self, set: DatasetSplit) -> Arc<dyn Dataset> {
        match (set, self.test) {
            (DatasetSplit::Train, _) => self.train,
            (DatasetSplit::Test, Some(TestSet::Open(test))) => test,
            (DatasetSplit::Test, _) => {
                unreachable!("files were opened, and a job without a test set refused, before")
            }
            (DatasetSplit::Valid, _) => self.valid,
        }
    }
}

/// A trained model, as far as its data is concerned.
pub struct TrainedOn<'a> {
    pub job: &'a Job,
    pub preprocessing: &'a Preprocessing,
    /// The checkpoint's tokenizer, if the data is text.
    pub tokenizer: Option<&'a Path>,
    pub test_time: TestTimeAugmentation,
}

impl TrainedOn<'_> {
    /// Opens the samples; each is there as often as it has views, one after the other.
    pub fn open(&self, samples: Samples, opening: &DatasetContext) -> Result<Arc<dyn Dataset>, Failure> {
        let (views, augmentation) = self.views()?;
        let dataset = self.open_augmented(samples, augmentation, opening)?;
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

    fn open_augmented(
        &self,
        samples: Samples,
        augmentation: Augmentation,
        opening: &DatasetContext,
    ) -> Result<Arc<dyn Dataset>, Failure> {
        let job = self.job;
        let own_files = self.own_files(samples)?;
        let samples = own_files.as_deref().map_or(samples, Samples::Labelled);
        if let Some(table) = tables::TableSource::of(job) {
            return table.open_trained(self.schema()?, samples, opening);
        }
        match &job.data.source {
            SourceConfig::Csv(_) | SourceConfig::Json(_) | SourceConfig::Parquet(_) => {
                unreachable!("a table was opened above")
            }
            SourceConfig::Images(s) => {
                let split = split_settings(&job.data.source, &s.files);
                let target = &self.preprocessing.features.target;
                images::open_trained(s, (target, &split), readers(job), (samples, augmentation), opening)
            }
            SourceConfig::Idx(s) => match samples {
                Samples::Set(_) => unreachable!("every set of idx files has files of its own"),
                Samples::Labelled(files) | Samples::Unlabelled(files) => {
                    images::open_trained_idx(s, readers(job), (files, augmentation), opening)
                }
            },
            SourceConfig::Text(_) | SourceConfig::Tokens(_) | SourceConfig::Jsonl(_) => {
                let job = self.language_job(samples);
                let sets = match &job.data.source {
                    SourceConfig::Jsonl(s) => {
                        let (loading, context) = (&job.data.loader, super::context(&job)?);
                        let target = Some(&self.preprocessing.features.target);
                        let target = (target, matches!(samples, Samples::Unlabelled(_)));
                        let split = split_settings(&job.data.source, &s.files);
                        language::jsonl_with_target(s, split, loading, context, target, opening)?
                    }
                    _ => Datasets::open(&job, opening)?,
                };
                Ok(sets.into_set(samples.set()))
            }
            SourceConfig::Shapes(s) => {
                generated::shapes_set(s, samples.set(), readers(job), augmentation, opening)
            }
            SourceConfig::TextSynthetic(_) => Ok(Datasets::open(job, opening)?.into_set(samples.set())),
        }
    }

    /// The files of a set, if the set is all of their samples. An error if the job has no such set.
    fn own_files(&self, samples: Samples) -> Result<Option<Vec<PathBuf>>, Failure> {
        let Samples::Set(set) = samples else { return Ok(None) };
        let no_test = |expected| {
            Err(DataError::InvalidSetting { name: "--split", value: "test".into(), expected }.into())
        };
        let source = &self.job.data.source;
        Ok(match (source, source.files(), set) {
            (_, Some(files), DatasetSplit::Test) if !files.test.is_empty() => Some(files.test.clone()),
            (_, Some(files), DatasetSplit::Test) if files.test_fraction.is_none() => {
                return no_test(
                    "the run has no test set: its job has neither `data.test` nor `data.test_fraction`",
                );
            }
            (_, Some(files), DatasetSplit::Valid) if !files.valid.is_empty() => Some(files.valid.clone()),
            (_, Some(files), DatasetSplit::Train) if split_settings(source, files).is_whole() => {
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

    fn schema(&self) -> Result<&crate::data::table::TableSchema, Failure> {
        self.preprocessing.table.as_ref().ok_or_else(|| Failure::UnusableCheckpoint {
            folder: PathBuf::new(),
            problem: "it does not say how its table is encoded".into(),
        })
    }

    /// The job with the tokenizer of the checkpoint, on these files.
    fn language_job(&self, samples: Samples) -> Job {
        let mut job = self.job.clone();
        let tokenizer = self.tokenizer.map(|file| file.to_string_lossy().into_owned());
        // The training files are needed only if the set is a part of them.
        let put_files = |of: &mut job::FilesConfig| match samples {
            Samples::Labelled(files) | Samples::Unlabelled(files) => *of = job::FilesConfig::only(files),
            Samples::Set(_) => {}
        };
        let put_tokenizer = |tokens: &mut String| match tokenizer {
            Some(file) if tokens != "bytes" => *tokens = file,
            _ => {}
        };
        match &mut job.data.source {
            SourceConfig::Text(s) => {
                put_files(&mut s.files);
                put_tokenizer(&mut s.tokens);
                s.windows = job::WindowMode::Fixed;
            }
            SourceConfig::Jsonl(s) => {
                put_files(&mut s.files);
                put_tokenizer(&mut s.tokens);
                if let Some(template) = &self.preprocessing.template {
                    s.template.clone_from(template);
                }
            }
            SourceConfig::Tokens(s) => {
                put_files(&mut s.files);
                s.windows = job::WindowMode::Fixed;
            }
            _ => {}
        }
        job
    }
}
