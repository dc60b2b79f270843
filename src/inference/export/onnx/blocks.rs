//! Weights of a graph whose matrices are quantized in blocks: a matrix is two initializers, its integers and their
//! scales.

use super::super::ExportSource;
use super::super::error::ExportError;
use super::super::weights::{SavedWeights, TensorMapping, WeightDtype};
use super::file::{Initializer, scale_name};
use super::proto::{FLOAT, INT4, INT8};
use crate::quantization::blocks::{self, BlockBits, BlockLayout};
use crate::quantization::grid::BlockScale;

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
    pub(super) fn encode(&self, source: &ExportSource, files: &SavedWeights) -> Result<Vec<u8>, ExportError> {
        let (weight, layout, bits) = match self {
            Self::Float(weight) => return WeightDtype::F32.encode(&weight.param, &weight.read(files)?),
            Self::Integers(weight, layout, bits) | Self::Scales(weight, layout, bits) => {
                (weight, layout, *bits)
            }
        };
        let values = weight.read(files)?;
        let (integers, scales) = match source.scales(&weight.param) {
            Some(scales) => {
                let scales = exported_scales(scales, *layout);
                (blocks::integers(&values, &scales, *layout, bits), scales)
            }
            None => blocks::quantize(&values, *layout, bits),
        };
        match (self, bits) {
            (Self::Scales(..), _) => WeightDtype::F32.encode(&weight.param, &scales),
            (_, BlockBits::Four) => Ok(blocks::pack(&integers)),
            (_, BlockBits::Eight) => Ok(integers.iter().map(|integer| *integer as u8).collect()),
        }
    }
}

/// Scales (outputs, blocks) in the order of the exported matrix, whose blocks run along one of its dimensions.
fn exported_scales(scales: &[BlockScale], layout: BlockLayout) -> Vec<f32> {
    let [rows, cols] = layout.scale_shape();
    let at = |row: usize, col: usize| if layout.axis == 0 { col * rows + row } else { row * cols + col };
    (0..rows * cols).map(|i| scales[at(i / cols, i % cols)].scale).collect()
}
