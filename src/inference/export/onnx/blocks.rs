//! Weights of a graph whose matrices are quantized in blocks: a matrix is two initializers, its integers and their
//! scales.

use super::super::error::ExportError;
use super::super::weights::{TensorMapping, WeightDtype, WeightFiles};
use super::file::{Initializer, scale_name};
use super::proto::{FLOAT, INT4, INT8};
use crate::inference::quantization::blocks::{self, BlockBits, BlockLayout};

/// An initializer, and the weight it comes from.
pub(super) enum BlockTensor<'a> {
    Float(&'a TensorMapping),
    Integers(&'a TensorMapping, BlockLayout, BlockBits),
    Scales(&'a TensorMapping, BlockLayout, BlockBits),
}

impl<'a> BlockTensor<'a> {
    /// The initializers of a weight.
    pub(super) fn of(weight: &'a TensorMapping, bits: BlockBits) -> Vec<Self> {
        match weight.blocks() {
            None => vec![Self::Float(weight)],
            Some(layout) => vec![Self::Integers(weight, layout, bits), Self::Scales(weight, layout, bits)],
        }
    }

    pub(super) fn initializer(&self) -> Initializer {
        match self {
            Self::Float(weight) => Initializer::new(weight.target.clone(), &weight.shape, FLOAT),
            Self::Integers(weight, _, bits) => {
                let data_type = if *bits == BlockBits::Four { INT4 } else { INT8 };
                Initializer::new(weight.target.clone(), &weight.shape, data_type)
            }
            Self::Scales(weight, layout, _) => {
                Initializer::new(scale_name(&weight.target), &layout.scale_shape(), FLOAT)
            }
        }
    }

    /// The bytes of its values.
    pub(super) fn encode(&self, files: &WeightFiles) -> Result<Vec<u8>, ExportError> {
        let (Self::Float(weight) | Self::Integers(weight, ..) | Self::Scales(weight, ..)) = self;
        let values = weight.read(files)?;
        match self {
            Self::Float(_) => WeightDtype::F32.encode(&weight.param, &values),
            Self::Integers(_, layout, bits) => {
                let integers = blocks::quantize(&values, *layout, *bits).0;
                Ok(match bits {
                    BlockBits::Four => blocks::pack(&integers),
                    BlockBits::Eight => integers.iter().map(|integer| *integer as u8).collect(),
                })
            }
            Self::Scales(_, layout, bits) => {
                WeightDtype::F32.encode(&weight.param, &blocks::quantize(&values, *layout, *bits).1)
            }
        }
    }
}
