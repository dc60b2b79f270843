//! Why a run ends without being done. The command line decides the exit code from the variant.

use std::path::PathBuf;

use super::postmortem::Attempt;
use crate::data::DataError;
use crate::job::Change;
use crate::layers::network::StepError;
use crate::memory::{Oom, Plan};
use crate::models::ModelError;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the job does not fit in the memory it may use")]
    DoesNotFit(Box<Plan>),
    #[error("out of memory{}", after(tried))]
    OutOfMemory {
        #[source]
        first: Box<Oom>,
        /// All that failed, the first included, and what was tried then.
        tried: Vec<Attempt>,
    },
    #[error("the run's process ended {} times for lack of memory: {}", deaths.len(), deaths.join("; "))]
    Killed {
        /// What happened each time.
        deaths: Vec<String>,
    },
    #[error("the run's process was ended by signal {0}")]
    Signal(i32),
    #[error("the loss is not finite at step {step}: {loss}")]
    Diverged { step: u64, loss: String, checkpoint: Option<String> },
    #[error("cannot {what} `{}`", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Report(#[from] crate::report::Error),
    #[error("the computation failed")]
    Tensor(#[from] candle_core::Error),
    #[error("`{}` holds a run already", .0.display())]
    FolderTaken(PathBuf),
    #[error("`{}` is not a run: it has no job.toml", .0.display())]
    NotARun(PathBuf),
    #[error("the job is another experiment than the run it would go on from: {}", changes(.0))]
    Changed(Vec<Change>),
    #[error("no whole checkpoint is left in `{}`: {}", folder.display(), skipped.join("; "))]
    NoWholeCheckpoint { folder: PathBuf, skipped: Vec<String> },
    #[error("`{}` does not belong to this model: {reason}", path.display())]
    ForeignCheckpoint { path: PathBuf, reason: String },
}

fn after(tried: &[Attempt]) -> String {
    let plans: Vec<&str> = tried.iter().filter_map(|attempt| attempt.then.as_deref()).collect();
    match plans.len() {
        0 => String::new(),
        1 => format!(" after a smaller plan: {}", plans[0]),
        n => format!(" after {n} smaller plans: {}", plans.join("; ")),
    }
}

fn changes(changes: &[Change]) -> String {
    let each: Vec<String> =
        changes.iter().map(|c| format!("`{}` was {} and is {}", c.key, c.was, c.now)).collect();
    each.join(", ")
}

impl Failure {
    /// For use with `map_err`: what was being done to which path.
    pub fn io(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Failure {
        let path = path.into();
        move |source| Failure::Io { what, path, source }
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
            Failure::Diverged { checkpoint, .. } => Some(match checkpoint {
                Some(path) => format!(
                    "try a lower `optimizer.lr` or `train.clip_norm`; the last finite checkpoint is `{path}`"
                ),
                None => {
                    "try a lower `optimizer.lr` or `train.clip_norm`; no checkpoint had been written".into()
                }
            }),
            Failure::FolderTaken(_) => {
                Some("add `--resume` to go on with it, or choose another `--run-dir`".into())
            }
            Failure::Changed(_) => Some("start a new run, or set these keys back".into()),
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
