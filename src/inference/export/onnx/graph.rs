//! A graph under construction: nodes, constants, and the weights to be written as initializers.

use super::super::weights::{TensorMapping, Transform, WeightDtype};
use super::file::{scale_name, zero_point_name};
use super::proto::{AttributeProto, FLOAT, INT8, INT64, NodeProto, TensorProto};
use crate::kernels::Activation;
use crate::layers::group_norm;
use crate::params::TensorSpec;
use crate::quantization::AffineQuantization;
use crate::quantization::blocks::{self, BlockBits};

/// Nodes are named after the layer that they belong to.
pub(super) struct OnnxGraphBuilder {
    pub nodes: Vec<NodeProto>,
    pub constants: Vec<TensorProto>,
    /// Initializers that are read from the checkpoint.
    pub weights: Vec<TensorMapping>,
    dtype: WeightDtype,
    /// Bits of matrices, if they are quantized in blocks.
    blocks: Option<BlockBits>,
    layer: String,
    /// Nodes of the current layer so far.
    count: usize,
}

impl OnnxGraphBuilder {
    pub(super) fn new(dtype: WeightDtype, blocks: Option<BlockBits>) -> Self {
        Self {
            nodes: Vec::new(),
            constants: Vec::new(),
            weights: Vec::new(),
            dtype,
            blocks,
            layer: String::new(),
            count: 0,
        }
    }

    /// The version of the operators, and that of the file format that came with it. Blocks came with 21.
    pub(super) fn opset(&self) -> (i64, i64) {
        if self.blocks.is_some() { (21, 10) } else { (17, 8) }
    }

    /// The nodes that follow belong to this layer.
    pub(super) fn begin_layer(&mut self, name: &str) {
        if self.layer != name {
            self.layer = name.to_owned();
            // A layer that is named twice, as an attention and its packed projection are, continues its numbers.
            let prefix = format!("{name}/");
            self.count = self.nodes.iter().filter(|node| node.name.starts_with(&prefix)).count();
        }
    }

    /// Adds a node and returns the names of its outputs.
    pub(super) fn node_with_outputs(
        &mut self,
        op: &str,
        inputs: &[&str],
        outputs: usize,
        attributes: Vec<AttributeProto>,
    ) -> Vec<String> {
        let name = format!("{}/{op}_{}", self.layer, self.count);
        self.count += 1;
        let output: Vec<String> = match outputs {
            1 => vec![name.clone()],
            _ => (0..outputs).map(|i| format!("{name}:{i}")).collect(),
        };
        self.nodes.push(NodeProto {
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output: output.clone(),
            name,
            op_type: op.into(),
            attribute: attributes,
        });
        output
    }

    /// Adds a node with one output and returns its name.
    pub(super) fn node_with(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        self.node_with_outputs(op, inputs, 1, attributes).swap_remove(0)
    }

    pub(super) fn node(&mut self, op: &str, inputs: &[&str]) -> String {
        self.node_with(op, inputs, Vec::new())
    }

    /// A parameter or running statistic in f32, converted from the type it is stored in.
    pub(super) fn weight(&mut self, spec: &TensorSpec, transform: Transform) -> String {
        let cast = |name: &str| format!("{name}/f32");
        let known = self.weights.iter().any(|known| known.target == spec.name);
        if !known {
            self.weights.push(TensorMapping::new(spec.name.clone(), spec, transform));
        }
        let in_blocks =
            self.weights.iter().any(|known| known.target == spec.name && known.block_axis.is_some());
        if self.dtype == WeightDtype::F32 && !in_blocks {
            return spec.name.clone();
        }
        let output = cast(&spec.name);
        if !known {
            self.nodes.push(NodeProto {
                input: vec![spec.name.clone()],
                output: vec![output.clone()],
                name: output.clone(),
                op_type: "Cast".into(),
                attribute: vec![AttributeProto::int("to", FLOAT.into())],
            });
        }
        output
    }

    /// A matrix, which may be quantized in blocks along dimension `axis` of what is exported.
    pub(super) fn matrix(&mut self, spec: &TensorSpec, transform: Transform, axis: usize) -> String {
        let known = self.weights.iter().any(|known| known.target == spec.name);
        if self.blocks.is_none() || known {
            return self.weight(spec, transform);
        }
        let mapping = TensorMapping::new(spec.name.clone(), spec, transform);
        self.weights.push(TensorMapping { block_axis: Some(axis), ..mapping });
        let output = format!("{}/f32", spec.name);
        self.nodes.push(NodeProto {
            input: vec![spec.name.clone(), scale_name(&spec.name)],
            output: vec![output.clone()],
            name: output.clone(),
            op_type: "DequantizeLinear".into(),
            attribute: vec![
                AttributeProto::int("axis", axis as i64),
                AttributeProto::int("block_size", blocks::BLOCK as i64),
            ],
        });
        output
    }

    fn constant(&mut self, dims: &[usize], data_type: i32, raw_data: Vec<u8>) -> String {
        let dims: Vec<i64> = dims.iter().map(|dim| *dim as i64).collect();
        let same = |known: &&TensorProto| {
            known.dims == dims && known.data_type == data_type && known.raw_data.as_ref() == Some(&raw_data)
        };
        if let Some(known) = self.constants.iter().find(same) {
            return known.name.clone();
        }
        let name = format!("constant_{}", self.constants.len());
        let raw_data = Some(raw_data);
        self.constants.push(TensorProto {
            dims,
            data_type,
            name: name.clone(),
            raw_data,
            ..TensorProto::default()
        });
        name
    }

    /// A constant vector of integers.
    pub(super) fn ints(&mut self, values: &[i64]) -> String {
        self.constant(&[values.len()], INT64, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// A constant integer without dimensions.
    pub(super) fn int(&mut self, value: i64) -> String {
        self.constant(&[], INT64, value.to_le_bytes().into())
    }

    pub(super) fn floats(&mut self, dims: &[usize], values: &[f32]) -> String {
        self.constant(dims, FLOAT, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    pub(super) fn float(&mut self, value: f32) -> String {
        self.floats(&[], &[value])
    }

    pub(super) fn reshape(&mut self, x: &str, shape: &[i64]) -> String {
        let shape = self.ints(shape);
        self.node("Reshape", &[x, &shape])
    }

    pub(super) fn transpose(&mut self, x: &str, permutation: &[i64]) -> String {
        self.node_with("Transpose", &[x], vec![AttributeProto::ints("perm", permutation)])
    }

    pub(super) fn concat(&mut self, parts: &[&str], axis: i64) -> String {
        self.node_with("Concat", parts, vec![AttributeProto::int("axis", axis)])
    }

    /// The dimension `axis` of a value, as a vector of one integer.
    pub(super) fn dim(&mut self, x: &str, axis: i64) -> String {
        self.node_with(
            "Shape",
            &[x],
            vec![AttributeProto::int("start", axis), AttributeProto::int("end", axis + 1)],
        )
    }

    /// The first `end` rows of a table; `end` is a vector of one integer.
    pub(super) fn first_rows(&mut self, table: &str, end: &str) -> String {
        let start = self.ints(&[0]);
        self.node("Slice", &[table, &start, end, &start])
    }

    /// Splits the last dimension.
    pub(super) fn split_last(&mut self, x: &str, widths: &[usize]) -> Vec<String> {
        let widths: Vec<i64> = widths.iter().map(|width| *width as i64).collect();
        let sizes = self.ints(&widths);
        self.node_with_outputs("Split", &[x, &sizes], widths.len(), vec![AttributeProto::int("axis", -1)])
    }

    /// As instance norm over groups, then the weights per channel: opset 17 has no group norm. `shape` is that of a
    /// sample, with its channels last; `x` has them second.
    pub(super) fn group_norm(
        &mut self,
        x: &str,
        shape: &[usize],
        groups: usize,
        params: [&TensorSpec; 2],
    ) -> String {
        let [weight, bias] = params.map(|spec| self.weight(spec, Transform::Copy));
        let channels = shape.last().copied().unwrap_or(1);
        let (ones, zeros) =
            (self.floats(&[groups], &vec![1.0; groups]), self.floats(&[groups], &vec![0.0; groups]));
        let grouped = self.reshape(x, &[0, groups as i64, -1]);
        let attributes = vec![AttributeProto::float("epsilon", group_norm::EPS as f32)];
        let normalized = self.node_with("InstanceNormalization", &[&grouped, &ones, &zeros], attributes);
        let inner = shape.iter().take(shape.len() - 1).map(|dim| *dim as i64);
        let shape: Vec<i64> = [0, channels as i64].into_iter().chain(inner).collect();
        let normalized = self.reshape(&normalized, &shape);
        let per_channel: Vec<i64> = match shape.len() {
            2 => vec![channels as i64],
            rank => [vec![channels as i64], vec![1; rank - 2]].concat(),
        };
        let (weight, bias) = (self.reshape(&weight, &per_channel), self.reshape(&bias, &per_channel));
        let scaled = self.node("Mul", &[&normalized, &weight]);
        self.node("Add", &[&scaled, &bias])
    }

    /// An unknown category has the index after the last one, and a vector of zeros.
    pub(super) fn categorical_embedding(
        &mut self,
        num_numeric: usize,
        tables: &[&TensorSpec],
        x: &str,
    ) -> String {
        let widths: Vec<usize> = match num_numeric {
            0 => vec![1; tables.len()],
            numeric => [vec![numeric], vec![1; tables.len()]].concat(),
        };
        let mut columns = self.split_last(x, &widths);
        let mut parts: Vec<String> = match num_numeric {
            0 => Vec::new(),
            _ => vec![columns.remove(0)],
        };
        for (column, table) in columns.iter().zip(tables) {
            let width = table.shape[1];
            let (table, zeros) =
                (self.weight(table, Transform::Copy), self.floats(&[1, width], &vec![0.0; width]));
            let table = self.concat(&[&table, &zeros], 0);
            let axis = self.ints(&[1]);
            let column = self.node("Squeeze", &[column, &axis]);
            let index = self.node_with("Cast", &[&column], vec![AttributeProto::int("to", INT64.into())]);
            parts.push(self.node("Gather", &[&table, &index]));
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        self.concat(&parts, 1)
    }

    /// `x` to 8-bit integers and back, from which runtimes infer that they may compute in integers. The initializers of
    /// scale and zero point are named after the point.
    pub(super) fn quantized(&mut self, point: &str, quantization: AffineQuantization, x: &str) -> String {
        let mut scalar = |name: String, data_type: i32, bytes: Vec<u8>| {
            let raw_data = Some(bytes);
            self.constants.push(TensorProto {
                data_type,
                name: name.clone(),
                raw_data,
                ..TensorProto::default()
            });
            name
        };
        let scale = scalar(scale_name(point), FLOAT, quantization.scale.to_le_bytes().into());
        let zero_point = scalar(zero_point_name(point), INT8, quantization.zero_point.to_le_bytes().into());
        let stored = self.node("QuantizeLinear", &[x, &scale, &zero_point]);
        self.node("DequantizeLinear", &[&stored, &scale, &zero_point])
    }

    pub(super) fn activation(&mut self, x: String, act: Activation) -> String {
        match act {
            Activation::Identity => x,
            Activation::Relu => self.node("Relu", &[&x]),
            Activation::Relu6 => {
                let (low, high) = (self.float(0.0), self.float(6.0));
                self.node("Clip", &[&x, &low, &high])
            }
            Activation::Sigmoid => self.node("Sigmoid", &[&x]),
            Activation::Tanh => self.node("Tanh", &[&x]),
            Activation::Silu => {
                let gate = self.node("Sigmoid", &[&x]);
                self.node("Mul", &[&x, &gate])
            }
            // x (1 + erf(x / sqrt(2))) / 2
            Activation::Gelu => {
                let (root, one, half) =
                    (self.float(std::f32::consts::SQRT_2), self.float(1.0), self.float(0.5));
                let scaled = self.node("Div", &[&x, &root]);
                let erf = self.node("Erf", &[&scaled]);
                let sum = self.node("Add", &[&erf, &one]);
                let product = self.node("Mul", &[&x, &sum]);
                self.node("Mul", &[&product, &half])
            }
            // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
            Activation::GeluTanh => {
                let scale = self.float((2.0 / std::f64::consts::PI).sqrt() as f32);
                let (cubic, one, half) = (self.float(0.044_715), self.float(1.0), self.float(0.5));
                let square = self.node("Mul", &[&x, &x]);
                let cube = self.node("Mul", &[&square, &x]);
                let cube = self.node("Mul", &[&cube, &cubic]);
                let inner = self.node("Add", &[&x, &cube]);
                let inner = self.node("Mul", &[&inner, &scale]);
                let tanh = self.node("Tanh", &[&inner]);
                let sum = self.node("Add", &[&tanh, &one]);
                let product = self.node("Mul", &[&x, &sum]);
                self.node("Mul", &[&product, &half])
            }
        }
    }
}
