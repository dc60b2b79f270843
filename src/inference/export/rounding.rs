//! Rounds the matrices of a model by GPTQ to the blocks that an export writes.
//!
//! The network is walked block by block with samples of the training set: the inputs of a linear layer are computed
//! with everything before it rounded as the export rounds it. Weights without a grid are rounded to the nearest value
//! first. A token table that is also the output layer is rounded with the inputs that this layer has before anything is
//! rounded. Gives a file of the rounded weights and the scales of their blocks, which the export encodes.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::Device;
use candle_core::quantized::GgmlDType;

use super::safetensors_file::TensorHeader;
use super::weights::{SavedWeights, TensorMapping, WeightDtype};
use super::{ExportError, ExportFormat, ExportOptions, ExportSource, gguf, mappings, safetensors_file};
use crate::data::Dataset;
use crate::graph::network::{Network, Node};
use crate::inference::session::{BlockInput, PassOutput, Session, SessionOptions};
use crate::inference::trained_model::TrainedModel;
use crate::job::ModelConfig;
use crate::kernels::host;
use crate::layers::embedding::Embedding;
use crate::layers::linear::Linear;
use crate::layers::packed_linear::PackedLinear;
use crate::models::BuiltModel;
use crate::params::{ParamLayout, TensorSpec, TensorUse};
use crate::quantization::ActivationPoints;
use crate::quantization::blocks::{self, BlockBits, BlockLayout};
use crate::quantization::gptq::{self, DAMPING, InverseFactor};
use crate::quantization::grid::{BlockGrid, BlockScale};
use crate::quantization::input_products::InputProducts;
use crate::train::Failure;

/// The scales of the blocks of each rounded parameter, (outputs, blocks of an output).
pub type BlockScales = BTreeMap<String, Vec<BlockScale>>;

/// Weights that are already rounded to values of the format.
pub struct RoundedWeights {
    /// Safetensors under the names of the parameters.
    pub file: tempfile::TempPath,
    pub scales: BlockScales,
    /// Bad records among the samples, which were left out.
    pub skipped: u64,
}

/// Damping of a token table that is also the output layer. Large, because a lookup returns a row as it is: there, the
/// errors of different inputs cannot compensate each other.
const TIED_DAMPING: f64 = 1.0;

/// A linear layer whose weights are rounded.
struct RoundedLayer {
    /// The block of the network that it is in; one past the last for the output layer.
    block: usize,
    /// Its weights are the token table.
    tied: bool,
    name: String,
    inputs: usize,
    /// The indices of its weights.
    weights: Vec<usize>,
}

/// Rounds `model` for an export by `options`, with `samples` drawn of `dataset`. `progress` is called with the
/// matrices done and their number.
pub fn round_matrices(
    model: &mut TrainedModel,
    options: &ExportOptions,
    dataset: &Arc<dyn Dataset>,
    samples: u64,
    session: &SessionOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<RoundedWeights, ExportError> {
    let built = ExportSource::new(model).build()?;
    let mappings = mappings(&ExportSource::new(model), &built, options)?;
    let formats = TensorFormat::all(&model.job.model, options, &mappings);
    let grids: BTreeMap<String, BlockGrid> = mappings
        .iter()
        .zip(&formats)
        .filter_map(|(mapping, format)| Some((mapping.param.clone(), format.grid()?)))
        .collect();
    let layers = rounded_layers(&built, &grids);
    let products = Arc::new(InputProducts::default());
    let held_bytes = session.held_bytes + held_bytes(&built, &layers, &grids, samples);
    let own = std::mem::replace(&mut model.points, ActivationPoints::Inputs(products.clone()));
    let loaded = Session::load(
        model,
        dataset.as_ref(),
        PassOutput::Metrics,
        &SessionOptions { held_bytes, ..session.clone() },
    );
    model.points = own;
    let session = loaded?;
    round_remaining_to_nearest(&ExportSource::new(model), &mappings, &formats, &layers, &session)?;
    let mut batches: Vec<BlockInput> = Vec::new();
    let loading = &model.job.data.loader;
    let skipped = session.for_some_batches(dataset.clone(), samples, loading, |batch| {
        if !batch.ids.is_empty() {
            batches.push(session.block_input(batch)?);
        }
        Ok(())
    })?;
    let mut scales = BlockScales::new();
    let (blocks, total) =
        (built.network.blocks.len(), layers.iter().map(|layer| layer.weights.len() as u64).sum());
    let mut round = |layer: &RoundedLayer, damping: f64| -> Result<(), ExportError> {
        let factor = InverseFactor::new(&products.take()?, layer.inputs, damping);
        for weight in &layer.weights {
            let spec = built.layout.params.spec(*weight);
            let found = round_weight(&session, *weight, spec, &factor, grids[&spec.name])?;
            scales.insert(spec.name.clone(), found);
        }
        progress(scales.len() as u64, total);
        Ok(())
    };
    for layer in layers.iter().filter(|layer| layer.tied) {
        products.select(&layer.name, layer.inputs);
        for batch in &batches {
            let mut at = batch.clone();
            for block in 0..blocks {
                at.x = session.run_block(block, &at)?;
            }
            products.add(&layer.name, &at.x, at.lengths())?;
        }
        round(layer, TIED_DAMPING)?;
    }
    for block in 0..=blocks {
        for layer in layers.iter().filter(|layer| layer.block == block && !layer.tied) {
            products.select(&layer.name, layer.inputs);
            for batch in &batches {
                match block < blocks {
                    true => drop(session.run_block(block, batch)?),
                    false => products.add(&layer.name, &batch.x, batch.lengths())?,
                }
            }
            round(layer, DAMPING)?;
        }
        if block < blocks {
            for batch in &mut batches {
                batch.x = session.run_block(block, batch)?;
            }
        }
    }
    Ok(RoundedWeights { file: write(&session, &built.layout)?, scales, skipped })
}

/// How an export stores a tensor.
#[derive(Clone, Copy)]
enum TensorFormat {
    Float,
    Ggml(GgmlDType),
    Blocks(BlockLayout, BlockBits),
}

impl TensorFormat {
    /// Those of all tensors.
    fn all(model: &ModelConfig, options: &ExportOptions, mappings: &[TensorMapping]) -> Vec<Self> {
        if options.format == ExportFormat::Gguf {
            return gguf::dtypes(model, options, mappings).into_iter().map(Self::Ggml).collect();
        }
        let bits = options.block_bits(model.kind());
        let of = |mapping: &TensorMapping| match (mapping.blocks(), bits) {
            (Some(layout), Some(bits)) => Self::Blocks(layout, bits),
            _ => Self::Float,
        };
        mappings.iter().map(of).collect()
    }

    fn grid(self) -> Option<BlockGrid> {
        match self {
            Self::Float => None,
            Self::Ggml(dtype) => gguf::grid(dtype),
            Self::Blocks(_, bits) => Some(BlockGrid::of_bits(bits)),
        }
    }

    /// Values as the export rounds them.
    fn nearest(self, mapping: &TensorMapping, values: Vec<f32>) -> Result<Vec<f32>, ExportError> {
        Ok(match self {
            Self::Float => values,
            Self::Ggml(dtype) => {
                let blocks = gguf::quantize(&mapping.param, values, &mapping.shape, dtype)?;
                host::to_vec(&blocks.dequantize(&Device::Cpu)?)?
            }
            Self::Blocks(layout, bits) => {
                let (integers, scales) = blocks::quantize(&values, layout, bits);
                let integers = integers.iter().map(|integer| f32::from(*integer)).collect();
                blocks::dequantize(integers, &scales, layout)
            }
        })
    }
}

/// The linear layers whose weights have a grid, in order. The output layer is the last.
fn rounded_layers(built: &BuiltModel, grids: &BTreeMap<String, BlockGrid>) -> Vec<RoundedLayer> {
    let params = &built.layout.params;
    let mut layers = Vec::new();
    let mut token_table = None;
    let mut push = |block: usize, tied: bool, name: &str, weights: Vec<usize>| {
        let weights: Vec<usize> =
            weights.into_iter().filter(|weight| grids.contains_key(&params.spec(*weight).name)).collect();
        if let Some(first) = weights.first() {
            layers.push(RoundedLayer {
                block,
                tied,
                name: name.to_owned(),
                inputs: sizes(params.spec(*first)).1,
                weights,
            });
        }
    };
    let all = built.network.blocks.iter().enumerate();
    for (block, layer) in all.flat_map(|(at, block)| block.layers().into_iter().map(move |layer| (at, layer)))
    {
        let any: &dyn Any = layer;
        if let Some(linear) = any.downcast_ref::<Linear>() {
            push(block, false, layer.name(), vec![linear.weight.index]);
        } else if let Some(packed) = any.downcast_ref::<PackedLinear>() {
            let weights = packed.projections.iter().map(|(weight, _)| weight.index).collect();
            push(block, false, layer.name(), weights);
        } else if let Some(embedding) = any.downcast_ref::<Embedding>() {
            token_table = Some(embedding.token_table.index);
        }
    }
    let loss = built.network.loss.name();
    let weight = format!("{loss}.weight");
    let own = params.in_declaration_order().position(|(spec, _)| spec.name == weight);
    let weight = own.or(token_table);
    push(built.network.blocks.len(), own.is_none(), loss, weight.into_iter().collect());
    layers
}

/// (outputs, inputs) of a weight.
fn sizes(spec: &TensorSpec) -> (usize, usize) {
    match (spec.usage, spec.shape.as_slice()) {
        (TensorUse::TransposedWeight, &[inputs, outputs]) => (outputs, inputs),
        (_, &[outputs, inputs]) => (outputs, inputs),
        _ => (1, spec.len()),
    }
}

/// Host bytes besides those of a session: the activations between two blocks, the products and their factor, the
/// weights of a layer in both layouts, and all scales.
fn held_bytes(
    built: &BuiltModel,
    layers: &[RoundedLayer],
    grids: &BTreeMap<String, BlockGrid>,
    samples: u64,
) -> u64 {
    let params = &built.layout.params;
    let bytes = |values: usize| (values * size_of::<f32>()) as u64;
    let work = |layer: &RoundedLayer| {
        let largest = layer.weights.iter().map(|weight| params.spec(*weight).len()).max().unwrap_or(0);
        let products = InputProducts::bytes(layer.inputs) + InverseFactor::bytes(layer.inputs);
        products + 4 * bytes(largest)
    };
    let weights = layers.iter().flat_map(|layer| &layer.weights).map(|weight| params.spec(*weight));
    let scales = weights.map(|spec| {
        let (outputs, inputs) = sizes(spec);
        (outputs * inputs.div_ceil(grids[&spec.name].block) * size_of::<BlockScale>()) as u64
    });
    let between = largest_between_blocks(&built.network);
    samples * bytes(between) + layers.iter().map(work).max().unwrap_or(0) + scales.sum::<u64>()
}

/// Values of a sample between two blocks at most.
fn largest_between_blocks(network: &Network) -> usize {
    let output = |node: &Node| match node {
        Node::Layer(layer) => layer.output_shape().iter().product(),
        Node::Residual(residual) => residual.output_shape.iter().product(),
        Node::Fused(fused) => fused.layers.last().map_or(0, |layer| layer.output_shape().iter().product()),
    };
    network.blocks.iter().filter_map(|block| block.nodes.last()).map(output).max().unwrap_or(0)
}

/// Rounds the weights that GPTQ does not round, as the export will, so that GPTQ compensates for their error too.
fn round_remaining_to_nearest(
    source: &ExportSource,
    mappings: &[TensorMapping],
    formats: &[TensorFormat],
    layers: &[RoundedLayer],
    session: &Session,
) -> Result<(), ExportError> {
    let params = &session.store().layout.params;
    let files = SavedWeights::open(source.weights, source.statistics)?;
    let by_gptq = |index: usize| layers.iter().any(|layer| layer.weights.contains(&index));
    for (mapping, format) in mappings.iter().zip(formats) {
        let found = params.in_declaration_order().position(|(spec, _)| spec.name == mapping.param);
        let Some(index) = found.filter(|index| !by_gptq(*index)) else { continue };
        let values = mapping.restore(format.nearest(mapping, mapping.read(&files)?)?);
        host::write::<f32, _>(&session.store().weight_views()[index], |into| into.copy_from_slice(&values))?;
    }
    Ok(())
}

/// Rounds a weight of the session in place.
fn round_weight(
    session: &Session,
    index: usize,
    spec: &TensorSpec,
    factor: &InverseFactor,
    grid: BlockGrid,
) -> Result<Vec<BlockScale>, ExportError> {
    let view = &session.store().weight_views()[index];
    let transposed = spec.usage == TensorUse::TransposedWeight;
    let by_output = if transposed { view.t()?.contiguous()? } else { view.clone() };
    let mut values = host::to_vec::<f32>(&by_output)?;
    let largest =
        values.iter().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most });
    let scales = gptq::round(&mut values, factor, grid);
    if scales.iter().any(|block| block.scale.is_infinite()) {
        let tensor = spec.name.clone();
        return Err(ExportError::Overflow { tensor, value: largest, dtype: "the f16 scale of its block" });
    }
    let (outputs, inputs) = sizes(spec);
    host::write::<f32, _>(view, |into| match transposed {
        false => into.copy_from_slice(&values),
        true => into.iter_mut().enumerate().for_each(|(at, value)| {
            *value = values[at % outputs * inputs + at / outputs];
        }),
    })?;
    Ok(scales)
}

/// Writes the weights of the session to a temporary file.
fn write(session: &Session, layout: &ParamLayout) -> Result<tempfile::TempPath, ExportError> {
    let file = tempfile::Builder::new()
        .prefix("trainer-weights-")
        .tempfile()
        .map_err(Failure::io("create a temporary file in", std::env::temp_dir()))?
        .into_temp_path();
    let specs: Vec<&TensorSpec> = layout.params.in_declaration_order().map(|(spec, _)| spec).collect();
    let headers: Vec<TensorHeader> =
        specs.iter().map(|spec| TensorHeader { name: &spec.name, shape: &spec.shape }).collect();
    let mut values = |at: usize| Ok(host::to_vec::<f32>(&session.store().weight_views()[at])?);
    safetensors_file::write(&file, &headers, WeightDtype::F32, &mut values)?;
    Ok(file)
}
