//! Dequantizes weights that a store holds as 8-bit integers, each layer's while it runs.

use std::sync::Arc;

use candle_core::Tensor;

use super::{Executor, StepResult};
use crate::base::Role;
use crate::kernels::int8_weight;
use crate::layers::{ParamCopies, PassContext};
use crate::memory::Reservation;
use crate::params::ParamId;

/// The name that its reservations carry.
const WEIGHTS: &str = "teacher's dequantized weights";

/// The dequantized weights of a layer; empty if the store holds floats.
#[derive(Default)]
pub(super) struct DequantizedWeights {
    copies: Vec<(ParamId, Tensor)>,
    _reservation: Option<Arc<Reservation>>,
}

impl DequantizedWeights {
    /// The pass for the layer that reads these copies.
    pub fn in_pass<'a>(&'a self, pass: PassContext<'a>) -> PassContext<'a> {
        match self.copies.is_empty() {
            true => pass,
            false => PassContext { copies: Some(ParamCopies::Dequantized(&self.copies)), ..pass },
        }
    }
}

impl Executor<'_> {
    /// Dequantizes the weights among these parameters, if the store holds 8-bit integers.
    pub(super) fn dequantize(&self, params: impl FnOnce() -> Vec<ParamId>) -> StepResult<DequantizedWeights> {
        let Some(int8) = self.int8 else { return Ok(DequantizedWeights::default()) };
        let params = params();
        let bytes = int8_weight::dequantized_bytes(int8.int8_grids(&params), self.spec);
        let reservation = self.reserve(Role::Workspace, WEIGHTS, bytes)?;
        let copies = self.pass.map(|pass| pass.store.dequantize(&params)).transpose()?.unwrap_or_default();
        Ok(DequantizedWeights { copies, _reservation: reservation })
    }
}
