//! The operators of a TFLite graph. Images are (batch, height, width, channels), as they are here.

use super::super::error::ExportError;
use super::super::folded::{FoldedNetwork, FoldedWeights, Op, Operator};
use super::super::weights::{TensorMapping, Transform, WeightFiles};
use super::schema::{
    ADD, Builtin, CAST, CONCATENATION, CONV_2D, DEPTHWISE_CONV_2D, FLOAT32, FULLY_CONNECTED, Field, GATHER,
    GELU, INT32, LOGISTIC, MAX_POOL_2D, MEAN, MUL, OperatorInfo, Options, PAD, PADV2, RELU, RELU6, RESHAPE,
    RSQRT, SPLIT_V, SUB, TANH, TRANSPOSE, TensorInfo,
};
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::pool::PoolGeometry;
use crate::kernels::{Activation, ClampActivation};
use crate::layers::group_norm;

/// A padding of the runtime.
const SAME: i8 = 0;
const VALID: i8 = 1;

/// Where the values of a tensor come from when the file is written.
pub(super) enum TensorValues {
    /// They are computed.
    Computed,
    Constant(Vec<u8>),
    /// The weight or the bias of an operator of the folded network.
    Weight(usize),
    Bias(usize),
    Parameter(TensorMapping),
}

/// A graph under construction.
pub(super) struct GraphBuilder {
    pub tensors: Vec<TensorInfo>,
    /// The values of each tensor.
    pub values: Vec<TensorValues>,
    pub operators: Vec<OperatorInfo>,
    /// The tensor of each value of the folded network.
    of_value: Vec<usize>,
}

/// What becomes of the weight of an operator.
pub(in super::super) fn weight_transform(op: &Op) -> Transform {
    match op {
        Op::Conv(geometry, _) if is_depthwise(geometry) => Transform::Permute([1, 2, 3, 0]),
        Op::Conv(..) => Transform::Permute([0, 2, 3, 1]),
        _ => Transform::Copy,
    }
}

fn is_depthwise(geometry: &ConvGeometry) -> bool {
    geometry.groups > 1 && geometry.groups == geometry.in_channels
}

fn fused(clamp: ClampActivation) -> Field {
    Field::Byte(match clamp {
        ClampActivation::Identity => 0,
        ClampActivation::Relu => 1,
        ClampActivation::Relu6 => 3,
    })
}

/// Where a window of `extent` pixels, moved by `stride` over `size` pixels with `padding` on each side, is the runtime's
/// SAME.
fn is_same(size: usize, extent: usize, stride: usize, padding: usize) -> bool {
    let total = ((size.div_ceil(stride) - 1) * stride + extent).saturating_sub(size);
    total == 2 * padding
}

/// The first dimension of a value, which is dynamic, as 1.
fn batched(shape: &[usize]) -> Vec<i32> {
    [1].into_iter().chain(shape.iter().map(|dim| *dim as i32)).collect()
}

impl GraphBuilder {
    /// The operators of a network; its input is tensor 0.
    pub(super) fn new(network: &FoldedNetwork, input: &str) -> Self {
        let mut graph =
            Self { tensors: Vec::new(), values: Vec::new(), operators: Vec::new(), of_value: Vec::new() };
        let input = graph.computed(input, &network.values[0].shape, FLOAT32);
        graph.of_value.push(input);
        for (at, operator) in network.operators.iter().enumerate() {
            let value = &network.values[operator.output];
            let output = graph.operator(network, at, operator, &value.name, &value.shape);
            graph.of_value.push(output);
        }
        graph
    }

    /// The tensor of the output.
    pub(super) fn output(&self) -> usize {
        self.of_value[self.of_value.len() - 1]
    }

    fn tensor(&mut self, info: TensorInfo, values: TensorValues) -> usize {
        self.tensors.push(info);
        self.values.push(values);
        self.tensors.len() - 1
    }

    /// A tensor with a dynamic batch; `shape` is that of one sample.
    fn computed(&mut self, name: &str, shape: &[usize], element_type: i8) -> usize {
        let info = TensorInfo {
            name: name.into(),
            element_type,
            shape: batched(shape),
            dynamic_batch: true,
            quantization: None,
            buffer: 0,
        };
        self.tensor(info, TensorValues::Computed)
    }

    fn stored(&mut self, name: String, element_type: i8, shape: &[usize], values: TensorValues) -> usize {
        let shape = shape.iter().map(|dim| *dim as i32).collect();
        let info =
            TensorInfo { name, element_type, shape, dynamic_batch: false, quantization: None, buffer: 0 };
        self.tensor(info, values)
    }

    fn constant(&mut self, element_type: i8, shape: &[usize], bytes: Vec<u8>) -> usize {
        let name = format!("constant_{}", self.tensors.len());
        self.stored(name, element_type, shape, TensorValues::Constant(bytes))
    }

    fn ints(&mut self, shape: &[usize], values: &[i32]) -> usize {
        self.constant(INT32, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    fn float(&mut self, value: f32) -> usize {
        self.constant(FLOAT32, &[], value.to_le_bytes().into())
    }

    fn parameter(&mut self, mapping: TensorMapping) -> usize {
        let (name, shape) = (mapping.target.clone(), mapping.shape.clone());
        self.stored(name, FLOAT32, &shape, TensorValues::Parameter(mapping))
    }

    fn emit(&mut self, builtin: Builtin, inputs: &[usize], outputs: &[usize], options: Options) {
        let indices = |tensors: &[usize]| tensors.iter().map(|tensor| *tensor as i32).collect();
        self.operators.push(OperatorInfo {
            builtin,
            inputs: indices(inputs),
            outputs: indices(outputs),
            options,
        });
    }

    /// Adds an operator with one output, a float tensor with samples of this shape.
    fn node(
        &mut self,
        builtin: Builtin,
        inputs: &[usize],
        name: &str,
        shape: &[usize],
        options: Options,
    ) -> usize {
        let output = self.computed(name, shape, FLOAT32);
        self.emit(builtin, inputs, &[output], options);
        output
    }

    /// Adds the operator `at` of the network; `name` and `shape` are those of its output.
    fn operator(
        &mut self,
        network: &FoldedNetwork,
        at: usize,
        operator: &Operator,
        name: &str,
        shape: &[usize],
    ) -> usize {
        let inputs: Vec<usize> = operator.inputs.iter().map(|value| self.of_value[*value]).collect();
        let (x, input_shape) = (inputs[0], network.values[operator.inputs[0]].shape.as_slice());
        let act = fused(operator.clamp);
        match &operator.op {
            Op::Conv(geometry, weights) => {
                let extent = geometry.dilation * (geometry.kernel - 1) + 1;
                let (padding, x) =
                    self.padded(PAD, x, name, input_shape, [extent, geometry.stride, geometry.padding]);
                let [weight, bias] = self.weights(at, &operator.op, weights);
                let (builtin, options) = conv_options(geometry, padding, act);
                self.node(builtin, &[x, weight, bias], name, shape, options)
            }
            Op::Linear(weights) => {
                let [weight, bias] = self.weights(at, &operator.op, weights);
                self.node(FULLY_CONNECTED, &[x, weight, bias], name, shape, Options::new(8, &[act]))
            }
            Op::MaxPool(window) => {
                let (padding, x) =
                    self.padded(PADV2, x, name, input_shape, [window.size, window.stride, window.padding]);
                self.node(MAX_POOL_2D, &[x], name, shape, pool_options(window, padding, act))
            }
            Op::GlobalPool => {
                let axes = self.ints(&[2], &[1, 2]);
                self.node(MEAN, &[x, axes], name, shape, Options::new(27, &[Field::Bool(false)]))
            }
            Op::Flatten => {
                let x = match *input_shape {
                    [h, w, c] if h * w > 1 && c > 1 => {
                        let order = self.ints(&[4], &[0, 3, 1, 2]);
                        let first = format!("{name}/channels_first");
                        self.node(TRANSPOSE, &[x, order], &first, &[c, h, w], Options::new(26, &[]))
                    }
                    _ => x,
                };
                self.reshape(x, name, shape)
            }
            Op::Add => self.node(ADD, &inputs, name, shape, Options::new(11, &[act])),
            Op::Activation(act) => self.activation(x, *act, name, shape),
            Op::GroupNorm { groups, weight, bias } => {
                let params = [weight, bias].map(|spec| TensorMapping::copy(spec));
                self.group_norm(x, *groups, params, act, name, shape)
            }
            Op::Embedding { num_numeric, tables } => {
                let tables: Vec<TensorMapping> =
                    tables.iter().map(|table| TensorMapping::copy(table)).collect();
                self.embedding(x, *num_numeric, tables, name, shape)
            }
        }
    }

    fn weights(&mut self, at: usize, op: &Op, weights: &FoldedWeights) -> [usize; 2] {
        let mapping = TensorMapping::new(weights.weight.name.clone(), weights.weight, weight_transform(op));
        let weight = self.stored(mapping.target, FLOAT32, &mapping.shape, TensorValues::Weight(at));
        let bias = self.stored(weights.bias_name(), FLOAT32, &[weights.outputs()], TensorValues::Bias(at));
        [weight, bias]
    }

    /// The padding of a window over an image and the image, with an operator that pads it where the runtime's own
    /// padding is another.
    fn padded(
        &mut self,
        builtin: Builtin,
        x: usize,
        name: &str,
        shape: &[usize],
        [extent, stride, padding]: [usize; 3],
    ) -> (i8, usize) {
        if padding == 0 {
            return (VALID, x);
        }
        if shape[..2].iter().all(|size| is_same(*size, extent, stride, padding)) {
            return (SAME, x);
        }
        let pixels = padding as i32;
        let amounts = self.ints(&[4, 2], &[0, 0, pixels, pixels, pixels, pixels, 0, 0]);
        let padded = [shape[0] + 2 * padding, shape[1] + 2 * padding, shape[2]];
        let mut inputs = vec![x, amounts];
        // The maximum of a window is never that of the padding.
        if builtin == PADV2 {
            inputs.push(self.float(f32::MIN));
        }
        let options = Options::new(if builtin == PADV2 { 43 } else { 22 }, &[]);
        (VALID, self.node(builtin, &inputs, &format!("{name}/padded"), &padded, options))
    }

    fn reshape(&mut self, x: usize, name: &str, shape: &[usize]) -> usize {
        let dims: Vec<i32> = [-1].into_iter().chain(shape.iter().map(|dim| *dim as i32)).collect();
        let dims = self.ints(&[dims.len()], &dims);
        self.node(RESHAPE, &[x, dims], name, shape, Options::new(17, &[]))
    }

    fn activation(&mut self, x: usize, act: Activation, name: &str, shape: &[usize]) -> usize {
        let none = Options::default;
        let gelu = |approximate| Options::new(116, &[Field::Bool(approximate)]);
        match act {
            Activation::Identity => x,
            Activation::Relu => self.node(RELU, &[x], name, shape, none()),
            Activation::Relu6 => self.node(RELU6, &[x], name, shape, none()),
            Activation::Sigmoid => self.node(LOGISTIC, &[x], name, shape, none()),
            Activation::Tanh => self.node(TANH, &[x], name, shape, none()),
            Activation::Silu => {
                let gate = self.node(LOGISTIC, &[x], &format!("{name}/gate"), shape, none());
                self.node(MUL, &[x, gate], name, shape, Options::new(21, &[]))
            }
            Activation::Gelu => self.node(GELU, &[x], name, shape, gelu(false)),
            Activation::GeluTanh => self.node(GELU, &[x], name, shape, gelu(true)),
        }
    }

    fn group_norm(
        &mut self,
        x: usize,
        groups: usize,
        [weight, bias]: [TensorMapping; 2],
        act: Field,
        name: &str,
        shape: &[usize],
    ) -> usize {
        let (values, channels): (usize, _) = (shape.iter().product(), shape[shape.len() - 1]);
        let (grouped, mean_shape) = ([values / channels, groups, channels / groups], [1, groups, 1]);
        let part = |part: &str| format!("{name}/{part}");
        let (add, mul, sub) = (Options::new(11, &[]), Options::new(21, &[]), Options::new(28, &[]));
        let keep = Options::new(27, &[Field::Bool(true)]);
        let (axes, eps) = (self.ints(&[2], &[1, 3]), self.float(group_norm::EPS as f32));
        let x = self.reshape(x, &part("groups"), &grouped);
        let mean = self.node(MEAN, &[x, axes], &part("mean"), &mean_shape, keep.clone());
        let x = self.node(SUB, &[x, mean], &part("centered"), &grouped, sub);
        let squares = self.node(MUL, &[x, x], &part("squares"), &grouped, mul.clone());
        let var = self.node(MEAN, &[squares, axes], &part("variance"), &mean_shape, keep);
        let var = self.node(ADD, &[var, eps], &part("variance_eps"), &mean_shape, add);
        let scale = self.node(RSQRT, &[var], &part("scale"), &mean_shape, Options::default());
        let x = self.node(MUL, &[x, scale], &part("normalized"), &grouped, mul.clone());
        let x = self.reshape(x, &part("channels"), shape);
        let (weight, bias) = (self.parameter(weight), self.parameter(bias));
        let x = self.node(MUL, &[x, weight], &part("scaled"), shape, mul);
        self.node(ADD, &[x, bias], name, shape, Options::new(11, &[act]))
    }

    /// An unknown category has the index after the last one, and a vector of zeros.
    fn embedding(
        &mut self,
        x: usize,
        num_numeric: usize,
        tables: Vec<TensorMapping>,
        name: &str,
        shape: &[usize],
    ) -> usize {
        let concatenation = |axis| Options::new(10, &[Field::Int(axis)]);
        let numeric = (num_numeric > 0).then_some(num_numeric);
        let widths: Vec<usize> = numeric.into_iter().chain(vec![1; tables.len()]).collect();
        let sizes: Vec<i32> = widths.iter().map(|width| *width as i32).collect();
        let columns: Vec<usize> = widths
            .iter()
            .enumerate()
            .map(|(at, width)| self.computed(&format!("{name}/column_{at}"), &[*width], FLOAT32))
            .collect();
        let (sizes, axis) = (self.ints(&[sizes.len()], &sizes), self.ints(&[], &[1]));
        let splits = Options::new(79, &[Field::Int(columns.len() as i32)]);
        self.emit(SPLIT_V, &[x, sizes, axis], &columns, splits);
        let (numbers, categories) = columns.split_at(numeric.map_or(0, |_| 1));
        let mut parts = numbers.to_vec();
        for (column, table) in categories.iter().zip(tables) {
            let (rows, width) = (table.shape[0], table.shape[1]);
            let part = |part: &str| format!("{}/{part}", table.target);
            let zeros = self.constant(FLOAT32, &[1, width], vec![0; 4 * width]);
            let (all_rows, index) = (part("all"), part("index"));
            let (vectors, vector) = (part("vectors"), part("vector"));
            let table = self.parameter(table);
            let all = self.stored(all_rows, FLOAT32, &[rows + 1, width], TensorValues::Computed);
            self.emit(CONCATENATION, &[table, zeros], &[all], concatenation(0));
            let indices = self.computed(&index, &[1], INT32);
            let cast = Options::new(37, &[Field::Byte(FLOAT32), Field::Byte(INT32)]);
            self.emit(CAST, &[*column], &[indices], cast);
            let gather = Options::new(23, &[Field::Int(0)]);
            let found = self.node(GATHER, &[all, indices], &vectors, &[1, width], gather);
            parts.push(self.reshape(found, &vector, &[width]));
        }
        self.node(CONCATENATION, &parts, name, shape, concatenation(1))
    }
}

fn conv_options(geometry: &ConvGeometry, padding: i8, act: Field) -> (Builtin, Options) {
    let (stride, dilation) = (Field::Int(geometry.stride as i32), Field::Int(geometry.dilation as i32));
    let padding = Field::Byte(padding);
    match is_depthwise(geometry) {
        true => {
            let multiplier = Field::Int((geometry.out_channels / geometry.in_channels) as i32);
            let fields = [padding, stride, stride, multiplier, act, dilation, dilation];
            (DEPTHWISE_CONV_2D, Options::new(2, &fields))
        }
        false => (CONV_2D, Options::new(1, &[padding, stride, stride, act, dilation, dilation])),
    }
}

fn pool_options(window: &PoolGeometry, padding: i8, act: Field) -> Options {
    let (stride, size) = (Field::Int(window.stride as i32), Field::Int(window.size as i32));
    Options::new(5, &[Field::Byte(padding), stride, stride, size, size, act])
}

impl TensorValues {
    /// The values as the file has them; `None` for those that are computed.
    pub(super) fn read(
        &self,
        network: &FoldedNetwork,
        files: &WeightFiles,
    ) -> Result<Option<Vec<u8>>, ExportError> {
        let bytes = |values: Vec<f32>| Some(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        Ok(match self {
            Self::Computed => None,
            Self::Constant(bytes) => Some(bytes.clone()),
            Self::Parameter(mapping) => bytes(mapping.read(files)?),
            Self::Weight(at) | Self::Bias(at) => {
                let op = &network.operators[*at].op;
                let (Op::Conv(_, weights) | Op::Linear(weights)) = op else { return Ok(None) };
                let (weight, bias) = weights.read(files)?;
                match self {
                    Self::Bias(_) => bytes(bias),
                    _ => {
                        let spec = weights.weight;
                        bytes(TensorMapping::new("", spec, weight_transform(op)).apply(weight))
                    }
                }
            }
        })
    }
}
