//! A trained model on disk: which checkpoint of a run, its job, what turns inputs into samples, and its weights.
//!
//! Everything comes from the checkpoint folder, so that a run can be moved and its training data deleted. Exports, and
//! language models that transformers saved, are opened by [`exported_model`](super::exported_model).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::exported_model;
use crate::base::features::Features;
use crate::base::regular_file;
use crate::data::preprocessing::Preprocessing;
use crate::job::{Job, SourceConfig};
use crate::quantization::ActivationPoints;
use crate::train::Failure;
use crate::train::checkpoint::{self, CheckpointState, Checkpoints};
use crate::train::run_dir::RunDir;

/// Which checkpoint of a run to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointChoice {
    /// The best by the job's `checkpoint.best`; the newest if none was evaluated.
    #[default]
    Best,
    Last,
    Step(u64),
}

impl FromStr for CheckpointChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "best" => Ok(Self::Best),
            "last" => Ok(Self::Last),
            _ => {
                let step = text.strip_prefix("step-").and_then(|step| step.parse().ok());
                step.map(Self::Step).ok_or_else(|| "expected best, last or step-N".into())
            }
        }
    }
}

impl fmt::Display for CheckpointChoice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Best => f.write_str("best"),
            Self::Last => f.write_str("last"),
            Self::Step(step) => write!(f, "step-{step}"),
        }
    }
}

/// Where a model comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Checkpoint,
    /// What `trainer export` wrote.
    Export,
    /// What transformers saved.
    Published,
}

/// A model that can be used.
pub struct TrainedModel {
    /// The resolved job.
    pub job: Job,
    pub preprocessing: Preprocessing,
    pub origin: Origin,
    /// The folder of the checkpoint or of the export.
    pub folder: PathBuf,
    /// Weights and running statistics: the file with the EMA of the weights if the run kept one.
    pub weights: PathBuf,
    /// Running statistics, if `weights` has none.
    pub statistics: PathBuf,
    pub step: u64,
    /// Whether the run evaluated it as its best.
    pub is_best: bool,
    pub uses_ema: bool,
    /// What happens to its activations: those of an 8-bit export are quantized.
    pub(super) points: ActivationPoints,
    /// Holds `weights` if those of an export had to be converted.
    pub(super) converted: Option<tempfile::TempPath>,
}

/// Upper bound on the size of `preprocessing.json`.
const MAX_PREPROCESSING_BYTES: u64 = 1 << 30;

impl TrainedModel {
    /// Opens the run, checkpoint or export at `path`; `sets` override keys of its job.
    pub fn open(path: &Path, choice: CheckpointChoice, sets: &[String]) -> Result<Self, Failure> {
        if !is_run_or_checkpoint(path)
            && let Some(exported) = exported_model::open(path, sets)?
        {
            return Ok(exported);
        }
        let (state, folder) = find(path, choice)?;
        let unusable = |problem: String| Failure::UnusableCheckpoint { folder: folder.clone(), problem };
        let file = folder.join(checkpoint::PREPROCESSING);
        let text = regular_file::read(&file, MAX_PREPROCESSING_BYTES).map_err(|error| {
            unusable(format!(
                "`{}` cannot be read: {error}; runs of earlier versions have none until they are resumed",
                checkpoint::PREPROCESSING
            ))
        })?;
        let preprocessing = Preprocessing::from_json(&text)
            .map_err(|problem| unusable(format!("`{}`: {problem}", checkpoint::PREPROCESSING)))?;
        let job: Job = serde_json::from_value(state.job.clone())
            .map_err(|error| unusable(format!("its job cannot be read: {error}")))?;
        let job = with_sets(job, &folder, sets)?;
        let average = folder.join(checkpoint::AVERAGE);
        let uses_ema = average.exists();
        let model = folder.join(checkpoint::MODEL);
        Ok(Self {
            job,
            preprocessing,
            weights: if uses_ema { average } else { model.clone() },
            statistics: model,
            step: state.step,
            is_best: best_step(&folder, &state) == Some(state.step),
            origin: Origin::Checkpoint,
            folder,
            uses_ema,
            points: ActivationPoints::None,
            converted: None,
        })
    }

    /// Input and target of a sample.
    pub fn features(&self) -> &Features {
        &self.preprocessing.features
    }

    /// Whether it was trained with `quantize.training` and has the ranges of its activations. An export does not count:
    /// it is a model in floats, or brings its own points.
    pub fn has_trained_ranges(&self) -> bool {
        self.origin == Origin::Checkpoint && self.job.quantizes()
    }

    /// Whether its values are rounded to 8-bit integers.
    pub fn rounds_to_int8(&self) -> bool {
        let rounds_after = |step| self.job.quantize.as_ref().is_some_and(|config| config.rounds_after(step));
        self.has_trained_ranges() && rounds_after(self.step)
    }

    /// The tokenizer, if the data is text.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.folder.join(checkpoint::TOKENIZER)).filter(|file| file.exists())
    }

    /// What a token is, as the job says: `characters`, `bytes`, a file, or nothing if the data is not text.
    pub fn tokens(&self) -> &str {
        match &self.job.data.source {
            SourceConfig::Text(text) => &text.tokens,
            SourceConfig::Jsonl(jsonl) => &jsonl.tokens,
            _ => "",
        }
    }

    /// One line that says which weights are used.
    pub fn describe(&self) -> String {
        let folder = self.folder.display();
        match self.origin {
            Origin::Checkpoint => {
                let best = if self.is_best { ", the best" } else { "" };
                let ema = if self.uses_ema { ", EMA weights" } else { "" };
                format!("{folder} (step {}{best}{ema})", self.step)
            }
            Origin::Export => format!("{folder} (an export of step {})", self.step),
            Origin::Published => format!("{folder} (a published model)"),
        }
    }
}

/// The job with what the command line overrides.
pub(super) fn with_sets(job: Job, folder: &Path, sets: &[String]) -> Result<Job, Failure> {
    match sets {
        [] => Ok(job),
        sets => Job::parse(&job.to_toml(), folder, sets)
            .map_err(|errors| Failure::BadOverride(errors.to_string())),
    }
}

fn is_run_or_checkpoint(path: &Path) -> bool {
    let run = RunDir::new(path);
    checkpoint::is_checkpoint(path) || run.job().exists() || run.checkpoints().exists()
}

/// The state and the folder of the checkpoint that is meant, with every file intact.
fn find(path: &Path, choice: CheckpointChoice) -> Result<(CheckpointState, PathBuf), Failure> {
    if checkpoint::is_checkpoint(path) {
        return verified(path);
    }
    let folder = RunDir::new(path).checkpoints();
    let checkpoints = Checkpoints::new(&folder);
    let steps = checkpoints.steps();
    if steps.is_empty() {
        return Err(match RunDir::new(path).job().exists() {
            true => Failure::NoCheckpoint(path.to_owned()),
            false => Failure::NotARun(path.to_owned()),
        });
    }
    let step = match choice {
        CheckpointChoice::Step(step) => Some(step),
        CheckpointChoice::Last => None,
        CheckpointChoice::Best => {
            let best = checkpoints.newest_state().and_then(|state| state.best).map(|(_, step)| step);
            best.filter(|step| steps.contains(step))
        }
    };
    match step {
        Some(step) if steps.contains(&step) => verified(&checkpoints.path(step)),
        Some(step) => {
            let kept = steps.iter().map(|step| format!("step-{step}")).collect();
            Err(Failure::NoSuchCheckpoint { run: path.to_owned(), step, kept })
        }
        // One that is damaged is an error, not a reason to take another; one that diverged is passed over.
        None if !checkpoints.is_diverged(steps[0]) => verified(&checkpoints.path(steps[0])),
        None => {
            let newest = checkpoints.newest();
            newest.found.ok_or(Failure::NoWholeCheckpoint { folder, skipped: newest.skipped })
        }
    }
}

/// The best step of the run of a checkpoint: an older checkpoint knows only what was the best until then.
fn best_step(folder: &Path, state: &CheckpointState) -> Option<u64> {
    let newest = folder.parent().and_then(|all| Checkpoints::new(all).newest_state());
    let newest = newest.filter(|newest| newest.step >= state.step);
    newest.as_ref().unwrap_or(state).best.map(|(_, step)| step)
}

fn verified(folder: &Path) -> Result<(CheckpointState, PathBuf), Failure> {
    match checkpoint::verify_files(folder) {
        Ok(state) => Ok((state, folder.to_owned())),
        Err(problem) => Err(Failure::UnusableCheckpoint { folder: folder.to_owned(), problem }),
    }
}
