//! Where a run is in its data.

use crate::data::digest::Digest;
use crate::data::order::{Cursor, Order};
use crate::train::checkpoint::CheckpointState;

/// The updates made, and the samples seen.
pub(super) struct Position {
    pub step: u64,
    /// The last update of the run, or of `--max-steps`.
    pub last_step: u64,
    pub cursor: Cursor,
    pub samples: u64,
    /// Digest of the ids of all samples, in order.
    pub digest: Digest,
}

impl Position {
    pub fn start(last_step: u64) -> Self {
        Self { step: 0, last_step, cursor: Cursor::default(), samples: 0, digest: Digest::default() }
    }

    pub fn resume(&mut self, state: &CheckpointState) {
        (self.step, self.cursor, self.samples, self.digest) =
            (state.step, state.cursor, state.samples, state.digest);
    }

    pub fn is_at_end(&self) -> bool {
        self.step >= self.last_step
    }

    /// The epoch of the last update, from 1; 0 before the first.
    pub fn epoch(&self, order: &Order) -> u64 {
        self.step.checked_sub(1).map_or(0, |last| order.update(last).epoch + 1)
    }

    /// Moves past an update of these samples.
    pub fn advance(&mut self, ids: &[u64]) {
        self.step += 1;
        self.samples += ids.len() as u64;
        self.digest.extend(ids.iter().copied());
        self.cursor = Cursor { update: self.cursor.update + 1, done: 0 };
    }
}
