//! TFLite files, for LiteRT on phones and small boards: in floats or 8-bit integers, a dynamic batch, batch norm
//! folded.
//!
//! Takes the operators of a [`FoldedNetwork`](super::folded::FoldedNetwork). The format has the whole file in memory
//! while it is written, and no more than 2 GB of it.

mod operators;
mod reader;
mod schema;

pub(super) use self::operators::weight_transform;
pub(super) use self::reader::TfliteReader;

use self::operators::TfliteGraphBuilder;
use self::schema::FileBuilder;
use super::error::ExportError;
use super::folded::FoldedNetwork;
use super::folder::ExportFolder;
use super::onnx::{input_name, output_name};
use super::weights::{SavedWeights, all_specs};
use super::{ExportProgress, ExportSource, description};
use crate::models::BuiltModel;

pub(super) const FILE: &str = "model.tflite";

/// The name of the description among the metadata.
const DESCRIPTION: &str = "trainer";

/// Bytes of a file besides its weights and its description, per tensor.
const BYTES_PER_TENSOR: u64 = 1 << 10;

/// Bytes that the file takes at most, which are in memory while it is written or read.
pub(super) fn file_bytes(source: &ExportSource, built: &BuiltModel) -> u64 {
    let specs = || all_specs(&built.layout);
    let weights: u64 = specs().map(|spec| 4 * spec.len() as u64).sum();
    weights
        + BYTES_PER_TENSOR * (specs().count() as u64 + 64)
        + description::pretty(source, None).len() as u64
}

/// Writes `model.tflite`.
pub(super) fn write(
    source: &ExportSource,
    built: &BuiltModel,
    folder: &ExportFolder,
    progress: &mut dyn ExportProgress,
) -> Result<(), ExportError> {
    let bytes = file_bytes(source, built);
    if bytes > reader::MAX_BYTES {
        return Err(ExportError::TooLarge { file: FILE, bytes, most: reader::MAX_BYTES });
    }
    let mut network = FoldedNetwork::new(source, &built.layout, &built.network)?;
    let files = SavedWeights::open(source.weights, source.statistics)?;
    network.bound_rescaling(&files)?;
    let mut graph = TfliteGraphBuilder::new(&network, input_name(source));
    let output = graph.output(&network);
    progress.started(all_specs(&built.layout).map(|spec| 4 * spec.len() as u64).sum());
    let mut file = FileBuilder::new(bytes as usize);
    for (tensor, values) in graph.tensors.iter_mut().zip(&graph.values) {
        if let Some(encoded) = values.read(&network, &files)? {
            tensor.buffer = file.buffer(&encoded.bytes);
            tensor.quantization = encoded.quantization.or(tensor.quantization.take());
            progress.tensor_written(&tensor.name, encoded.bytes.len() as u64);
        }
    }
    let ends = [(input_name(source), 0), (output_name(source), output as u32)];
    let text = description::pretty(source, None);
    let file = file.finish(source.name, &graph.tensors, &graph.operators, ends, (DESCRIPTION, &text));
    folder.write(FILE, file.finished_data())
}
