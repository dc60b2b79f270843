//! Why an update was not made: for lack of memory, which is retried, or for another reason.

use crate::layers::network::StepError;
use crate::memory::Oom;
use crate::train::Failure;

pub(super) enum Tried {
    Oom(Oom),
    Failed(Failure),
}

impl From<StepError> for Tried {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Oom(oom) => Tried::Oom(oom),
            StepError::Tensor(error) => Tried::Failed(error.into()),
        }
    }
}

impl From<candle_core::Error> for Tried {
    fn from(error: candle_core::Error) -> Self {
        Tried::Failed(error.into())
    }
}

impl From<Failure> for Tried {
    fn from(failure: Failure) -> Self {
        Tried::Failed(failure)
    }
}
