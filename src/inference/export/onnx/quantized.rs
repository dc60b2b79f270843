//! A graph in 8-bit integers, in QDQ form: every value passes a QuantizeLinear and a DequantizeLinear, and weights are
//! integers with a DequantizeLinear. A runtime that has an integer version of an operator fuses it with the nodes
//! around it.

use super::super::error::ExportError;
use super::super::folded::{FoldedNetwork, FoldedWeights, Op};
use super::super::weights::SavedWeights;
use super::file::{Initializer, scale_name};
use super::graph::OnnxGraphBuilder;
use super::layers::{conv_attributes, window};
use super::proto::{AttributeProto, FLOAT, INT8, INT32};

/// A tensor of quantized weights.
pub(super) struct QuantizedWeight {
    /// The operator that it belongs to.
    operator: usize,
    part: WeightPart,
    /// The scale of the operator's input.
    input_scale: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WeightPart {
    Weight,
    WeightScale,
    Bias,
    BiasScale,
}

/// The graph of a network, the initializers of its quantized weights, and the name of its output.
pub(super) struct QuantizedGraph {
    pub graph: OnnxGraphBuilder,
    pub initializers: Vec<Initializer>,
    pub weights: Vec<QuantizedWeight>,
    pub output: String,
}

impl QuantizedGraph {
    pub(super) fn new(
        network: &FoldedNetwork,
        graph: OnnxGraphBuilder,
        input: &str,
    ) -> Result<Self, ExportError> {
        let mut this = Self { graph, initializers: Vec::new(), weights: Vec::new(), output: input.into() };
        let mut values: Vec<String> = Vec::new();
        this.graph.begin_layer(&network.values[0].name);
        let first = this.point(network, 0, input.into());
        values.push(first);
        for (at, operator) in network.operators.iter().enumerate() {
            let value = &network.values[operator.output];
            this.graph.begin_layer(&value.name);
            let inputs: Vec<&str> = operator.inputs.iter().map(|input| values[*input].as_str()).collect();
            let y = this.operator(network, at, &inputs)?;
            let y = this.graph.activation(y, operator.clamp.activation());
            let y = this.point(network, operator.output, y);
            values.push(y);
        }
        this.output = values.swap_remove(values.len() - 1);
        Ok(this)
    }

    /// The value as it is after its quantization, if it has one.
    fn point(&mut self, network: &FoldedNetwork, value: usize, x: String) -> String {
        let value = &network.values[value];
        match value.quantization {
            Some(quantization) => self.graph.quantized(&value.name, quantization, &x),
            None => x,
        }
    }

    fn operator(
        &mut self,
        network: &FoldedNetwork,
        at: usize,
        inputs: &[&str],
    ) -> Result<String, ExportError> {
        let operator = &network.operators[at];
        let (x, input) = (inputs[0], &network.values[operator.inputs[0]]);
        let flatten = || vec![AttributeProto::int("axis", 1)];
        Ok(match &operator.op {
            Op::Conv(_, weights) | Op::Linear(weights) => {
                let Some(quantization) = input.quantization else {
                    return Err(ExportError::Uncalibrated { point: input.name.clone() });
                };
                let [weight, bias] = self.weights(at, weights, quantization.scale);
                match &operator.op {
                    Op::Conv(geometry, _) => {
                        self.graph.node_with("Conv", &[x, &weight, &bias], conv_attributes(geometry))
                    }
                    _ => self.graph.node_with(
                        "Gemm",
                        &[x, &weight, &bias],
                        vec![AttributeProto::int("transB", 1)],
                    ),
                }
            }
            Op::MaxPool(geometry) => self.graph.node_with("MaxPool", &[x], window(geometry)),
            Op::GlobalPool => {
                let mean = self.graph.node("GlobalAveragePool", &[x]);
                self.graph.node_with("Flatten", &[&mean], flatten())
            }
            Op::Flatten => self.graph.node_with("Flatten", &[x], flatten()),
            Op::Add => self.graph.node("Add", inputs),
            Op::Activation(act) => self.graph.activation(x.to_owned(), *act),
            Op::GroupNorm { groups, weight, bias } => {
                self.graph.group_norm(x, &input.shape, *groups, [weight, bias])
            }
            Op::Embedding { num_numeric, tables } => {
                self.graph.categorical_embedding(*num_numeric, tables, x)
            }
        })
    }

    /// The weight and the bias of an operator, dequantized.
    fn weights(&mut self, operator: usize, weights: &FoldedWeights, input_scale: f32) -> [String; 2] {
        let outputs = [weights.outputs()];
        let (weight, bias) = (weights.weight.name.clone(), weights.bias_name());
        let parts: [(_, &str, &[usize], _, _); 2] = [
            (WeightPart::Weight, &weight, &weights.weight.shape, INT8, WeightPart::WeightScale),
            (WeightPart::Bias, &bias, &outputs, INT32, WeightPart::BiasScale),
        ];
        parts.map(|(part, name, shape, data_type, scale_part)| {
            let scale = scale_name(name);
            self.initializers.push(Initializer::new(name, shape, data_type));
            self.weights.push(QuantizedWeight { operator, part, input_scale });
            self.initializers.push(Initializer::new(&scale, &outputs, FLOAT));
            self.weights.push(QuantizedWeight { operator, part: scale_part, input_scale });
            self.graph.node_with("DequantizeLinear", &[name, &scale], vec![AttributeProto::int("axis", 0)])
        })
    }
}

impl QuantizedWeight {
    /// The bytes of its initializer.
    pub(super) fn encode(
        &self,
        network: &FoldedNetwork,
        files: &SavedWeights,
    ) -> Result<Vec<u8>, ExportError> {
        let (Op::Conv(_, weights) | Op::Linear(weights)) = &network.operators[self.operator].op else {
            return Ok(Vec::new());
        };
        let layer = weights.quantize(files, self.input_scale)?;
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Ok(match self.part {
            WeightPart::Weight => layer.weight.iter().map(|value| *value as u8).collect(),
            WeightPart::WeightScale => bytes(&layer.weight_scales),
            WeightPart::Bias => layer.bias.iter().flat_map(|value| value.to_le_bytes()).collect(),
            WeightPart::BiasScale => bytes(&layer.bias_scales),
        })
    }
}
