//! Errors that end a run. The command line derives the exit code from the variant.

use std::path::PathBuf;

use super::initial_weights::InitError;
use super::low_rank::LowRankError;
use super::postmortem::OomAttempt;
use super::signals;
use super::teacher::TeacherError;
use crate::base::units::{Bytes, counted};
use crate::data::DataError;
use crate::graph::network::StepError;
use crate::job::{InitHead, JobChange};
use crate::memory::Oom;
use crate::models::ModelError;
use crate::planner::MemoryPlan;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Init(#[from] InitError),
    #[error(transparent)]
    Teacher(TeacherError),
    #[error(transparent)]
    LowRank(LowRankError),
    #[error("the job does not fit in its memory budget")]
    DoesNotFit(Box<MemoryPlan>),
    #[error("out of memory{}", after(tried))]
    OutOfMemory {
        #[source]
        first: Box<Oom>,
        /// Every failed attempt, including the first, and what was tried next.
        tried: Vec<OomAttempt>,
    },
    #[error(
        "the run's process ended {} for lack of memory: {}",
        counted(deaths.len() as u64, "time"),
        deaths.join("; ")
    )]
    Killed {
        /// Cause of each death.
        deaths: Vec<String>,
    },
    #[error("the run's process was ended by {}{}", signals::name(*signal), times(*deaths))]
    Signal {
        signal: i32,
        /// Deaths in a row without progress.
        deaths: usize,
    },
    #[error("the {what} is not finite at step {step}: {value}")]
    Diverged {
        step: u64,
        /// The loss or the gradient norm.
        what: &'static str,
        value: f64,
        checkpoint: Option<String>,
    },
    #[error("`{tensor}` is not finite after step {step}")]
    NotFinite { step: u64, tensor: String, checkpoint: Option<String> },
    #[error("cannot {what} `{}`", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Report(#[from] crate::events::ReportError),
    #[error("the computation failed")]
    Tensor(#[from] candle_core::Error),
    #[error("`{}` already contains a run", .0.display())]
    FolderTaken(PathBuf),
    #[error("`{}` is in use by {}", folder.display(), process(*pid))]
    Locked { folder: PathBuf, pid: Option<u32> },
    #[error("`{}` is not a run: it has neither a job.toml nor checkpoints", .0.display())]
    NotARun(PathBuf),
    #[error(
        "the model does not fit in its memory budget: it needs {needs} of RAM of {ram}{}",
        of_vram(needs_vram, vram)
    )]
    SessionDoesNotFit { needs: Bytes, ram: Bytes, needs_vram: Bytes, vram: Bytes },
    #[error("{what}")]
    WrongTask { what: &'static str, instead: &'static str },
    #[error("a bad row: {0}")]
    BadRow(String),
    #[error("the run in `{}` has no checkpoint yet", .0.display())]
    NoCheckpoint(PathBuf),
    #[error("the run in `{}` has no checkpoint of step {step}; those kept are {}", run.display(), kept.join(", "))]
    NoSuchCheckpoint { run: PathBuf, step: u64, kept: Vec<String> },
    #[error("the job of the model does not take `--set`: {0}")]
    BadOverride(String),
    #[error("the checkpoint `{}` cannot be used: {problem}", folder.display())]
    UnusableCheckpoint { folder: PathBuf, problem: String },
    #[error("`{}` cannot be used as a model: {problem}", folder.display())]
    UnusableExport { folder: PathBuf, problem: String },
    #[error("`{}` has a model that is not supported: {problem}", folder.display())]
    UnsupportedModel { folder: PathBuf, problem: String },
    #[error(
        "the job of the run in `{}` is unknown: it has no checkpoint, and its job.toml cannot be read",
        .0.display()
    )]
    UnknownExperiment(PathBuf),
    #[error("the data is not what the run was trained on: {}", .0.join("; "))]
    DataChanged(Vec<String>),
    #[error("{} of `{}` are free, and its {what} need {}", Bytes(*free), folder.display(), Bytes(*needed))]
    DiskTooSmall { folder: PathBuf, free: u64, needed: u64, what: &'static str },
    /// The job was shortened to fewer updates than the run has made.
    #[error("the run is at step {step}, and the job ends at step {total}")]
    BeyondEnd { step: u64, total: u64, key: &'static str },
    #[error("the job differs from that of the run to resume: {}", changes(.0))]
    JobChanged(Vec<JobChange>),
    #[error("no complete checkpoint is left in `{}`: {}", folder.display(), skipped.join("; "))]
    NoWholeCheckpoint { folder: PathBuf, skipped: Vec<String> },
    #[error("`{}` does not belong to this model: {reason}", path.display())]
    ForeignCheckpoint { path: PathBuf, reason: String },
}

fn of_vram(needs: &Bytes, vram: &Bytes) -> String {
    if needs.0 > 0 { format!(", and {needs} of GPU memory of {vram}") } else { String::new() }
}

fn times(deaths: usize) -> String {
    if deaths > 1 { format!(", {deaths} times without progress") } else { String::new() }
}

fn process(pid: Option<u32>) -> String {
    pid.map_or("another process".into(), |pid| format!("process {pid}"))
}

fn after(tried: &[OomAttempt]) -> String {
    let plans: Vec<&str> = tried.iter().filter_map(|attempt| attempt.next_plan.as_deref()).collect();
    match plans.len() {
        0 => String::new(),
        1 => format!(" after a smaller plan: {}", plans[0]),
        n => format!(" after {n} smaller plans: {}", plans.join("; ")),
    }
}

fn changes(changes: &[JobChange]) -> String {
    let each: Vec<String> =
        changes.iter().map(|c| format!("`{}` was {} and is {}", c.key, c.was, c.now)).collect();
    each.join(", ")
}

const DISK_FULL_HINT: &str =
    "the disk, a quota or the limit on the size of files is exhausted: free some space";

/// Whether a write failed for lack of space: disk full, quota exceeded, or file size limit.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

impl Failure {
    /// For `map_err`: names the operation and the path.
    pub fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Failure {
        let path = path.into();
        move |source| Failure::Io { what, path, source }
    }

    /// Whether a write failed for lack of space.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Failure::Io { source, .. } => is_full(source),
            Failure::Report(crate::events::ReportError::Write { source, .. }) => is_full(source),
            _ => false,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Failure::Data(error) => error.hint().map(Into::into),
            Failure::DoesNotFit(plan) => plan.advice.clone(),
            Failure::OutOfMemory { .. } | Failure::Killed { .. } => Some(
                "give the run more memory, or make the model smaller; `oom.json` in its folder has the details"
                    .into(),
            ),
            Failure::Diverged { checkpoint, .. } | Failure::NotFinite { checkpoint, .. } => Some(match checkpoint {
                Some(path) => format!(
                    "try a lower `optimizer.lr` or `train.clip_norm`; the last finite checkpoint is `{path}`"
                ),
                None => {
                    "try a lower `optimizer.lr` or `train.clip_norm`; no checkpoint had been written".into()
                }
            }),
            Failure::FolderTaken(_) => {
                Some("add `--resume` to resume it, or choose another `--run-dir`".into())
            }
            Failure::BeyondEnd { key, .. } => Some(format!("raise `{key}`, or start a new run in another folder")),
            Failure::JobChanged(_) => Some("start a new run, or restore these keys".into()),
            Failure::Locked { pid: Some(pid), .. } => {
                Some(format!("wait until it ends or stop it with `kill {pid}`, or choose another `--run-dir`"))
            }
            Failure::SessionDoesNotFit { .. } => Some(
                "raise `memory.ram` or `memory.vram` by `--set`, or choose another `--device`".into(),
            ),
            Failure::Init(InitError::Mismatch { policy: InitHead::Strict, .. }) => Some(
                "`train.init_head = \"auto\"` makes a new head where the classes differ; other parameters \
                 must be those of the same model"
                    .into(),
            ),
            Failure::Init(InitError::Mismatch { policy: InitHead::Auto, .. }) => {
                Some("`model` must be that of the weights, except for its classes, vocabulary and context".into())
            }
            Failure::Init(InitError::Unreadable { .. }) => Some(
                "`train.init` takes a run, an intact checkpoint, a safetensors file or a folder of shards".into(),
            ),
            Failure::Teacher(_) => Some(
                "the teacher is the folder of a run, of a checkpoint or of an export as safetensors, trained on the same classes \
                 and inputs"
                    .into(),
            ),
            Failure::LowRank(LowRankError::Nothing { .. }) => {
                Some("state a smaller rank or energy, or other `lowrank.layers`".into())
            }
            Failure::LowRank(LowRankError::Target { .. }) => {
                Some("state a smaller `target`, or a smaller model".into())
            }
            Failure::LowRank(LowRankError::Memory { .. }) => {
                Some("raise `memory.ram`, or leave the layer out by `lowrank.layers`".into())
            }
            Failure::WrongTask { instead, .. } => Some((*instead).into()),
            Failure::BadRow(_) => {
                Some("`--set data.on_bad_record=skip` writes the error into the row and continues".into())
            }
            Failure::NoCheckpoint(_) => {
                Some("wait for its first checkpoint, or let it run: `checkpoint.every_steps` sets when".into())
            }
            Failure::NoSuchCheckpoint { .. } | Failure::UnusableCheckpoint { .. } => {
                Some("`--checkpoint last` or `--checkpoint step-N` takes another one".into())
            }
            Failure::NotARun(_) => Some(
                "expected the folder of a run, of one of its checkpoints or of an export".into(),
            ),
            Failure::UnusableExport { .. } => {
                Some("export the model again, or give the run that it came from".into())
            }
            Failure::UnsupportedModel { .. } => Some(
                "`gpt2` and `llama` models are supported as transformers saves them, and everything that \
                 `trainer export` writes"
                    .into(),
            ),
            Failure::UnknownExperiment(_) => Some("start a new run in another folder".into()),
            Failure::DataChanged(_) => {
                let hint = "start a new run, restore the data, or add `--allow-changed-data` to resume on the \
                            changed data";
                Some(hint.into())
            }
            Failure::NoWholeCheckpoint { .. } => {
                Some("restore one from a copy, or start a new run in another folder".into())
            }
            Failure::DiskTooSmall { what: "checkpoints", .. } => Some(
                "free some space, lower `checkpoint.keep`, or choose another `--run-dir`".into(),
            ),
            Failure::DiskTooSmall { .. } => Some(
                "free some space, or lower `distill.top_k` or `checkpoint.keep`".into(),
            ),
            Failure::Signal { .. } => {
                Some("the cause is not a lack of memory; `--resume` continues from the last checkpoint".into())
            }
            failure if failure.is_disk_full() => Some(DISK_FULL_HINT.into()),
            _ => None,
        }
    }
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Oom(oom) => Failure::OutOfMemory { first: Box::new(oom), tried: Vec::new() },
            StepError::Tensor(error) => Failure::Tensor(error),
        }
    }
}
