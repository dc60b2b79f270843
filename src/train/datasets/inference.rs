//! Opens samples for a trained model: encoded as the training samples were, by what its checkpoint kept, so that the
//! training data is needed only if the validation set is a part of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Datasets, Failure, generated, images, language, readers, tables};
use crate::data::preprocessing::Preprocessing;
use crate::data::transforms::Augmentation;
use crate::data::views::TestTimeViews;
use crate::data::{Dataset, DatasetContext};
use crate::job::{self, Job, SourceConfig};

/// Which samples to open.
#[derive(Clone, Copy, Debug)]
pub enum Samples<'a> {
    /// The validation set of the job.
    Valid,
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
        if let Some(table) = tables::TableSource::of(job) {
            return table.open_trained(self.schema()?, samples, opening);
        }
        match &job.data.source {
            SourceConfig::Csv(_) | SourceConfig::Json(_) | SourceConfig::Parquet(_) => {
                unreachable!("a table was opened above")
            }
            SourceConfig::Images(s) => {
                let target = &self.preprocessing.features.target;
                images::open_trained(s, target, readers(job), (samples, augmentation), opening)
            }
            SourceConfig::Idx(s) => {
                images::open_trained_idx(s, readers(job), (samples, augmentation), opening)
            }
            SourceConfig::Text(_) | SourceConfig::Tokens(_) | SourceConfig::Jsonl(_) => {
                let job = self.language_job(samples);
                let sets = match &job.data.source {
                    SourceConfig::Jsonl(s) => {
                        let (loading, context) = (&job.data.loader, super::context(&job)?);
                        let classes = (self.class_names(), matches!(samples, Samples::Unlabelled(_)));
                        language::jsonl_of_classes(s, loading, context, classes, opening)?
                    }
                    _ => Datasets::open(&job, opening)?,
                };
                Ok(sets.valid)
            }
            SourceConfig::Shapes(s) => generated::valid_shapes(s, readers(job), augmentation, opening),
            SourceConfig::TextSynthetic(_) => Ok(Datasets::open(job, opening)?.valid),
        }
    }

    fn schema(&self) -> Result<&crate::data::table::TableSchema, Failure> {
        self.preprocessing.table.as_ref().ok_or_else(|| Failure::UnusableCheckpoint {
            folder: PathBuf::new(),
            problem: "it does not say how its table is encoded".into(),
        })
    }

    fn class_names(&self) -> &[String] {
        self.preprocessing.features.target.names()
    }

    /// The job with the tokenizer of the checkpoint, on these files.
    fn language_job(&self, samples: Samples) -> Job {
        let mut job = self.job.clone();
        let tokenizer = self.tokenizer.map(|file| file.to_string_lossy().into_owned());
        let files = match samples {
            Samples::Valid => None,
            Samples::Labelled(files) | Samples::Unlabelled(files) => Some(files),
        };
        let put_files = |of: &mut job::FilesConfig| match files {
            Some(files) => (of.train, of.valid) = (files.to_vec(), files.to_vec()),
            // The training files are needed only if the validation set is a part of them.
            None if !of.valid.is_empty() => of.train.clone_from(&of.valid),
            None => {}
        };
        let put_tokenizer = |tokens: &mut String| match tokenizer {
            Some(file) if tokens != "bytes" => *tokens = file,
            _ => {}
        };
        match &mut job.data.source {
            SourceConfig::Text(s) => {
                put_files(&mut s.files);
                put_tokenizer(&mut s.tokens);
            }
            SourceConfig::Jsonl(s) => {
                put_files(&mut s.files);
                put_tokenizer(&mut s.tokens);
                if let Some(template) = &self.preprocessing.template {
                    s.template.clone_from(template);
                }
            }
            SourceConfig::Tokens(s) => put_files(&mut s.files),
            _ => {}
        }
        job
    }
}
