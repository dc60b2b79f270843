//! ONNX graphs, for ONNX Runtime and others: opset 17, or 21 for matrices in blocks, with a dynamic batch, and a
//! dynamic sequence for language models.
//!
//! The graph is generated from the layers of the network that training builds, so that every kind of model has one.
//! Weights may be stored in f16 or bf16; the graph converts them and computes in f32. Images are (batch, channels,
//! height, width), as users of ONNX expect, although the network here has channels last. Metadata documents how a raw
//! input becomes the graph's input.

mod attention;
mod blocks;
mod file;
mod graph;
mod layers;
mod proto;
mod quantized;

use serde_json::{Value, json};

pub(super) use self::file::OnnxReader;

use self::blocks::BlockTensor;
use self::file::{Initializer, ModelHead};
use self::graph::OnnxGraphBuilder;
use self::layers::NetworkExport;
use self::proto::{Dim, Entry, FLOAT, GraphProto, INT64, ModelProto, OperatorSet, ValueInfoProto};
use self::quantized::QuantizedGraph;
use super::error::ExportError;
use super::folded::FoldedNetwork;
use super::folder::ExportFolder;
use super::weights::{SavedWeights, TensorMapping};
use super::{ExportOptions, ExportProgress, ExportSource, description};
use crate::base::features::{InputSpec, TargetSpec};
use crate::job::ModelConfig;
use crate::models::BuiltModel;
use crate::quantization::blocks::BLOCK;

/// Names of the graph's inputs and outputs.
const TOKENS: &str = "input_ids";
const MASK: &str = "attention_mask";
const PIXELS: &str = "pixel_values";
const FEATURES: &str = "features";
const LOGITS: &str = "logits";
const VALUES: &str = "values";

const BATCH: Dim = Dim::Dynamic("batch");
const SEQUENCE: Dim = Dim::Dynamic("sequence");

/// Writes `model.onnx`. Returns notes.
pub(super) fn write(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
    folder: &ExportFolder,
    progress: &mut dyn ExportProgress,
) -> Result<Vec<String>, ExportError> {
    let files = SavedWeights::open(source.weights, source.statistics)?;
    let (dtype, kind) = (options.dtype(), source.model.kind());
    let limit = file::MAX_MESSAGE_BYTES;
    let float = |mapping: &TensorMapping| {
        Initializer::new(mapping.target.clone(), &mapping.shape, file::element_type(dtype))
    };
    let encode = |mapping: &TensorMapping| dtype.encode(&mapping.param, &mapping.read(&files)?);
    if let Some(bits) = options.block_bits(kind) {
        let (graph, logits) = float_graph(source, built, options)?;
        let (head, weights) = head(source, graph, &logits);
        let tensors: Vec<BlockTensor> =
            weights.iter().flat_map(|weight| BlockTensor::of(weight, bits)).collect();
        let initializers: Vec<Initializer> = tensors.iter().map(BlockTensor::initializer).collect();
        let mut encode = |at: usize| tensors[at].encode(source, &files);
        file::write(head, &initializers, &mut encode, limit, folder, progress)?;
        return Ok(vec![format!("matrices are quantized in blocks of {BLOCK}; the graph computes in f32")]);
    }
    if !options.quantizes_activations(kind) {
        let (graph, logits) = float_graph(source, built, options)?;
        let (head, weights) = head(source, graph, &logits);
        let initializers: Vec<Initializer> = weights.iter().map(float).collect();
        let mut encode = |at: usize| encode(&weights[at]);
        file::write(head, &initializers, &mut encode, limit, folder, progress)?;
        return Ok(Vec::new());
    }
    let network = FoldedNetwork::new(source, &built.layout, &built.network)?;
    let quantized = QuantizedGraph::new(&network, OnnxGraphBuilder::new(dtype, None), input_name(source))?;
    let (head, weights) = head(source, quantized.graph, &quantized.output);
    let mut initializers: Vec<Initializer> = weights.iter().map(float).collect();
    initializers.extend(quantized.initializers);
    let mut encode = |at: usize| match weights.get(at) {
        Some(weight) => encode(weight),
        None => quantized.weights[at - weights.len()].encode(&network, &files),
    };
    file::write(head, &initializers, &mut encode, limit, folder, progress)?;
    Ok(Vec::new())
}

/// The weights in the order of the file.
pub(super) fn mappings(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
) -> Result<Vec<TensorMapping>, ExportError> {
    Ok(float_graph(source, built, options)?.0.weights)
}

/// The graph of all layers, and the name of its output.
fn float_graph(
    source: &ExportSource,
    built: &BuiltModel,
    options: &ExportOptions,
) -> Result<(OnnxGraphBuilder, String), ExportError> {
    let inputs = inputs(source);
    let mut export = NetworkExport::new(
        OnnxGraphBuilder::new(options.dtype(), options.block_bits(source.model.kind())),
        &built.layout,
        source.model,
        source.features,
        &inputs[0].name,
    );
    if inputs.iter().any(|input| input.name == MASK) {
        export.set_padding_mask(MASK);
    }
    let logits = export.network(&built.network)?;
    Ok((export.into_graph(), logits))
}

/// The file of a graph without its weights, and the weights.
fn head(source: &ExportSource, mut graph: OnnxGraphBuilder, logits: &str) -> (ModelHead, Vec<TensorMapping>) {
    let (inputs, outputs) = (inputs(source), outputs(source));
    graph.begin_layer("output");
    let last = graph.node("Identity", &[logits]);
    // The last node gives the output its name.
    if let Some(node) = graph.nodes.iter_mut().rev().find(|node| node.output[0] == last) {
        node.output[0] = outputs.name.clone();
    }
    let metadata = metadata(source, &inputs, &outputs.name)
        .into_iter()
        .map(|(key, value)| Entry { key: key.into(), value: text(value) })
        .collect();
    let (opset, ir_version) = graph.opset();
    let model = ModelProto {
        ir_version,
        producer_name: "trainer".into(),
        producer_version: env!("CARGO_PKG_VERSION").into(),
        graph: None,
        opset_import: vec![OperatorSet { domain: String::new(), version: opset }],
        metadata_props: metadata,
    };
    let (nodes, constants, weights) = (graph.nodes, graph.constants, graph.weights);
    let graph = GraphProto {
        node: nodes,
        name: source.name.into(),
        initializer: constants,
        input: inputs,
        output: vec![outputs],
    };
    (ModelHead { model, graph }, weights)
}

/// The name of the input that the network takes.
pub(super) fn input_name(source: &ExportSource) -> &'static str {
    match &source.features.input {
        InputSpec::Tokens { .. } => TOKENS,
        InputSpec::Floats { shape } if shape.len() == 3 => PIXELS,
        InputSpec::Tabular { .. } | InputSpec::Floats { .. } => FEATURES,
    }
}

pub(super) fn output_name(source: &ExportSource) -> &'static str {
    if let TargetSpec::Values { .. } = source.features.target { VALUES } else { LOGITS }
}

/// The input that the network takes comes first.
fn inputs(source: &ExportSource) -> Vec<ValueInfoProto> {
    match &source.features.input {
        InputSpec::Tokens { .. } => {
            let tokens = ValueInfoProto::new(TOKENS, INT64, &[BATCH, SEQUENCE]);
            match source.model {
                // A causal model needs none: padding comes after the tokens, which do not attend to it.
                ModelConfig::Bert(_) => vec![tokens, ValueInfoProto::new(MASK, INT64, &[BATCH, SEQUENCE])],
                _ => vec![tokens],
            }
        }
        InputSpec::Tabular { .. } => {
            vec![ValueInfoProto::new(FEATURES, FLOAT, &[BATCH, Dim::Fixed(source.features.input_len())])]
        }
        InputSpec::Floats { shape } => match shape.as_slice() {
            &[height, width, channels] => {
                let dims = [BATCH, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)];
                vec![ValueInfoProto::new(PIXELS, FLOAT, &dims)]
            }
            shape => {
                let dims: Vec<Dim> = shape.iter().map(|dim| Dim::Fixed(*dim)).collect();
                vec![ValueInfoProto::new(FEATURES, FLOAT, &[&[BATCH], dims.as_slice()].concat())]
            }
        },
    }
}

fn outputs(source: &ExportSource) -> ValueInfoProto {
    let vocab = match source.features.input {
        InputSpec::Tokens { vocab, .. } => vocab,
        _ => 0,
    };
    match &source.features.target {
        TargetSpec::Class { names } | TargetSpec::MixedClass { names } | TargetSpec::MultiLabel { names } => {
            ValueInfoProto::new(LOGITS, FLOAT, &[BATCH, Dim::Fixed(names.len())])
        }
        TargetSpec::Values { len } => ValueInfoProto::new(VALUES, FLOAT, &[BATCH, Dim::Fixed(*len)]),
        TargetSpec::Tokens => ValueInfoProto::new(LOGITS, FLOAT, &[BATCH, SEQUENCE, Dim::Fixed(vocab)]),
    }
}

/// What a user of the graph needs to know.
fn metadata(source: &ExportSource, inputs: &[ValueInfoProto], output: &str) -> Vec<(&'static str, Value)> {
    let layout = match inputs[0].name.as_str() {
        PIXELS => "float32 (batch, channels, height, width), scaled and normalized as `normalization` says",
        TOKENS => {
            "int64 (batch, sequence); attention_mask, where there is one, is 1 for tokens and 0 for padding"
        }
        _ => "float32 (batch, columns), standardized and encoded as `preprocessing` says",
    };
    let description = description::of(source);
    let mut entries = vec![
        ("description", json!(format!("{} model, {} updates", source.model.kind(), source.step))),
        ("inputs", json!(layout)),
        ("output", json!(output)),
        ("input", description["input"].clone()),
        ("normalization", description["normalization"].clone()),
        ("preprocessing", source.preprocessing.clone()),
        ("job", source.job.clone()),
    ];
    entries.extend(description::classes(source).map(|names| ("classes", json!(names))));
    entries.extend(source.model.context().map(|context| ("context", json!(context))));
    entries.extend(source.chat_template.map(|template| ("chat_template", json!(template))));
    entries.retain(|(_, value)| !value.is_null());
    entries
}

/// Text as it is, and everything else as JSON.
fn text(value: Value) -> String {
    match value {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// A parsed file, for tests.
#[cfg(test)]
pub(super) struct ParsedGraph {
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    pub initializers: Vec<String>,
    /// Inputs and outputs of each node.
    pub nodes: Vec<(Vec<String>, Vec<String>)>,
}

#[cfg(test)]
pub(super) fn parse(file: &[u8]) -> ParsedGraph {
    let model = <ModelProto as prost::Message>::decode(file).unwrap();
    assert!(matches!((model.opset_import[0].version, model.ir_version), (17, 8) | (21, 10)));
    assert!(model.metadata_props.iter().any(|entry| entry.key == "preprocessing"));
    let graph = model.graph.unwrap();
    let names = |infos: Vec<ValueInfoProto>| infos.into_iter().map(|info| info.name).collect();
    ParsedGraph {
        inputs: names(graph.input),
        outputs: names(graph.output),
        initializers: graph.initializer.into_iter().map(|tensor| tensor.name).collect(),
        nodes: graph.node.into_iter().map(|node| (node.input, node.output)).collect(),
    }
}
