//! From a batch in host memory to tensors where the network computes.
//!
//! On the CPU that is a copy. To a card batches are carried on a stream of their own (`card`), through buffers that
//! are asked of the ledgers when the first batch comes, or one that they have no room for.

#[cfg(feature = "cuda")]
mod card;

use candle_core::{DType, Device, Tensor};

use super::engine::Ledgers;
use super::setup::Setup;
use crate::data::{self, Values};
use crate::features::{Features, Input, Target};
use crate::kernels::palette;
use crate::layers::network::{Batch, StepError};

pub struct Staging {
    /// What the network takes floats in.
    dtype: DType,
    #[cfg(feature = "cuda")]
    card: Option<card::Staged>,
}

/// What the tensors of a batch are to be.
struct Wanted {
    dtype: DType,
    inputs: Vec<usize>,
    targets: Vec<usize>,
}

impl Staging {
    pub fn new(setup: &Setup, ledgers: &Ledgers) -> Self {
        let _ = ledgers;
        Self {
            dtype: setup.dtype,
            #[cfg(feature = "cuda")]
            card: card::Staged::new(&setup.device(), ledgers),
        }
    }

    /// Gives back what is held for batches to come.
    pub fn clear(&self) {
        #[cfg(feature = "cuda")]
        self.card.iter().for_each(card::Staged::clear);
    }

    /// Sees to it that there are buffers for a batch on its way, which are asked for when the first comes, or a larger one.
    pub fn prepare(&self, batch: &data::Batch, features: &Features) -> Result<(), StepError> {
        let _ = (batch, features);
        #[cfg(feature = "cuda")]
        self.card.iter().try_for_each(|card| card.prepare(batch, self.wanted(batch, features)))?;
        Ok(())
    }

    /// The tensors of a batch whose samples are cut to these features.
    pub fn tensors(&self, batch: &data::Batch, features: &Features) -> Result<Batch, StepError> {
        let wanted = self.wanted(batch, features);
        #[cfg(feature = "cuda")]
        if let Some(card) = &self.card {
            return card.tensors(batch, wanted);
        }
        let inputs = here(&batch.inputs, wanted.inputs)?.to_dtype(wanted.dtype)?;
        Ok(Batch { inputs, targets: here(&batch.targets, wanted.targets)?, staged: None })
    }

    fn wanted(&self, batch: &data::Batch, features: &Features) -> Wanted {
        let rows = batch.ids.len();
        // Places of categories are whole numbers that a shorter type would round.
        let (dtype, sample) = match &features.input {
            Input::Floats { shape } => (self.dtype, shape.clone()),
            Input::Row { .. } => (DType::F32, vec![features.input_len()]),
            Input::Tokens { length, .. } => (DType::U32, vec![*length]),
        };
        // What is measured on has hard classes even where those trained on are mixed.
        let row = batch.targets.len() / rows.max(1);
        let targets = match if features.target == Target::Tokens { features.target_len() } else { row } {
            1 => vec![rows],
            n => vec![rows, n],
        };
        Wanted { dtype, inputs: [vec![rows], sample].concat(), targets }
    }
}

/// A tensor of rows, of each of which the first values are taken that `shape` has room for.
fn here(values: &Values, shape: Vec<usize>) -> candle_core::Result<Tensor> {
    let (row, taken) = (values.len() / shape[0].max(1), shape[1..].iter().product::<usize>());
    match values {
        Values::U8(bytes, palette) => Tensor::from_vec(palette::values(palette, bytes), shape, &Device::Cpu),
        Values::F32(values) => Tensor::from_slice(values, shape, &Device::Cpu),
        Values::U32(values) if taken == row => Tensor::from_slice(values, shape, &Device::Cpu),
        Values::U32(values) => {
            let mut all = Vec::with_capacity(shape[0] * taken);
            values.chunks_exact(row.max(1)).for_each(|row| all.extend_from_slice(&row[..taken]));
            Tensor::from_vec(all, shape, &Device::Cpu)
        }
    }
}
