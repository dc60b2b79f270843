//! Which passes are the same to a GPU.

use crate::layers::Mode;

/// Everything that launches and allocations depend on, other than the values of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct PassKey {
    pub mode: Mode,
    pub samples: usize,
    /// Input values per sample, and target values per batch.
    pub input: usize,
    pub targets: usize,
    pub padded: bool,
    pub scale: f64,
    pub recompute: usize,
}
