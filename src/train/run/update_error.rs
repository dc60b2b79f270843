//! Why an update failed: out of memory, which is retried, or another error.

use crate::graph::network::StepError;
use crate::memory::Oom;
use crate::train::Failure;

pub(super) enum UpdateError {
    Oom(Oom),
    Failed(Failure),
}

impl From<StepError> for UpdateError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Oom(oom) => UpdateError::Oom(oom),
            StepError::Tensor(error) => UpdateError::Failed(error.into()),
        }
    }
}

impl From<candle_core::Error> for UpdateError {
    fn from(error: candle_core::Error) -> Self {
        UpdateError::Failed(error.into())
    }
}

impl From<Failure> for UpdateError {
    fn from(failure: Failure) -> Self {
        UpdateError::Failed(failure)
    }
}
