//! `evaluation.json` of a run: the detail of its best evaluation so far, and of its last.
//!
//! Replaced as a whole after every evaluation. The best is kept by its step: a run that resumes from an earlier
//! checkpoint drops the detail of an evaluation that it has not repeated.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Failure;
use super::run_dir::write_atomic;
use crate::base::regular_file;
use crate::metrics::detail::TaskDetail;

/// Upper bound on the size of the file: names of classes are part of it.
const MAX_BYTES: u64 = 16 << 20;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationFile {
    /// By the job's `checkpoint.best`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<StepDetail>,
    /// Absent if the last evaluation is the best.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<StepDetail>,
}

/// The detail of the evaluation after an update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepDetail {
    pub step: u64,
    #[serde(flatten)]
    pub detail: TaskDetail,
}

impl EvaluationFile {
    /// `None` if there is none that can be read.
    pub fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&regular_file::read(path, MAX_BYTES).ok()?).ok()
    }

    /// Adds the evaluation of a step, where `best` is the step of the best so far.
    pub fn update(path: &Path, step: u64, detail: TaskDetail, best: Option<u64>) -> Result<(), Failure> {
        let evaluation = StepDetail { step, detail };
        let file = match best == Some(step) {
            true => Self { best: Some(evaluation), last: None },
            false => {
                let kept = Self::read(path).and_then(|file| file.best);
                Self { best: kept.filter(|kept| best == Some(kept.step)), last: Some(evaluation) }
            }
        };
        let mut text =
            serde_json::to_vec(&file).map_err(std::io::Error::from).map_err(Failure::io("write", path))?;
        text.push(b'\n');
        write_atomic(path, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::detail::RegressionDetail;

    fn detail(targets: usize) -> TaskDetail {
        TaskDetail::Regression(RegressionDetail { num_targets: targets, targets: Vec::new() })
    }

    fn steps(path: &Path) -> (Option<u64>, Option<u64>) {
        let file = EvaluationFile::read(path).unwrap();
        (file.best.map(|best| best.step), file.last.map(|last| last.step))
    }

    #[test]
    fn the_best_stays_until_a_better_one_or_until_it_no_longer_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("evaluation.json");
        let update = |step, best| EvaluationFile::update(&path, step, detail(1), best).unwrap();
        update(1, None);
        assert_eq!(steps(&path), (None, Some(1)), "a loss that is not a number is not the best");
        update(2, Some(2));
        assert_eq!(steps(&path), (Some(2), None));
        update(3, Some(2));
        assert_eq!(steps(&path), (Some(2), Some(3)));
        // Resumed from before step 2, whose evaluation was not repeated yet.
        update(1, Some(0));
        assert_eq!(steps(&path), (None, Some(1)));
        std::fs::write(&path, "{ torn").unwrap();
        assert_eq!(EvaluationFile::read(&path), None);
        update(4, Some(2));
        assert_eq!(steps(&path), (None, Some(4)));
    }
}
