//! The operators of a TFLite graph. Images are (batch, height, width, channels), as they are here.
//!
//! A value that is quantized is stored as 8-bit integers. Convolutions, linear layers, pooling, sums and operators that
//! only move values have integer inputs and outputs; the others compute in floats, between a DEQUANTIZE and a QUANTIZE.

use super::super::error::ExportError;
use super::super::folded::{FoldedNetwork, FoldedValue, FoldedWeights, Op, Operator};
use super::super::weights::{SavedWeights, TensorMapping, Transform};
use super::schema::{
    ADD, Builtin, CAST, CONCATENATION, CONV_2D, DEPTHWISE_CONV_2D, DEQUANTIZE, FLOAT32, FULLY_CONNECTED,
    GATHER, GELU, INT8, INT32, LOGISTIC, MAX_POOL_2D, MEAN, MUL, OperatorInfo, OptionValue, Options, PAD,
    PADV2, QUANTIZE, RELU, RELU6, RESHAPE, RSQRT, SPLIT_V, SUB, TANH, TRANSPOSE, TensorInfo,
    TensorQuantization,
};
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::pool::PoolGeometry;
use crate::kernels::{Activation, ClampActivation};
use crate::layers::group_norm;
use crate::quantization::AffineQuantization;

/// A padding of the runtime.
const SAME: i8 = 0;
const VALID: i8 = 1;

/// Where the values of a tensor come from when the file is written.
pub(super) enum TensorValues {
    /// They are computed.
    Computed,
    Constant(Vec<u8>),
    /// The weight or the bias of an operator of the folded network; as integers, if its input has this scale.
    Weight(usize, Option<f32>),
    Bias(usize, Option<f32>),
    Parameter(TensorMapping),
}

/// The tensors of a value, which may be there as floats, as integers or as both.
#[derive(Clone, Copy, Default)]
struct ValueTensors {
    float: Option<usize>,
    int8: Option<usize>,
}

/// A tensor that an operator gives.
#[derive(Clone, Copy)]
struct Output<'a> {
    name: &'a str,
    /// Shape of one sample.
    shape: &'a [usize],
    /// Integers, if it has one.
    quantization: Option<AffineQuantization>,
}

impl<'a> Output<'a> {
    fn float(name: &'a str, shape: &'a [usize]) -> Self {
        Self { name, shape, quantization: None }
    }
}

/// A graph under construction.
pub(super) struct TfliteGraphBuilder {
    pub tensors: Vec<TensorInfo>,
    /// The values of each tensor.
    pub values: Vec<TensorValues>,
    pub operators: Vec<OperatorInfo>,
    /// The tensors of each value of the folded network.
    of_value: Vec<ValueTensors>,
}

/// (outputs, 1, height, width) to (1, height, width, outputs).
const DEPTHWISE: Transform = Transform::Permute([1, 2, 3, 0]);

/// What becomes of the weight of an operator.
pub(in super::super) fn weight_transform(op: &Op) -> Transform {
    match op {
        Op::Conv(geometry, _) if is_depthwise(geometry) => DEPTHWISE,
        Op::Conv(..) => Transform::Permute([0, 2, 3, 1]),
        _ => Transform::Copy,
    }
}

fn is_depthwise(geometry: &ConvGeometry) -> bool {
    geometry.groups > 1 && geometry.groups == geometry.in_channels
}

fn fused(clamp: ClampActivation) -> OptionValue {
    OptionValue::Byte(match clamp {
        ClampActivation::Identity => 0,
        ClampActivation::Relu => 1,
        ClampActivation::Relu6 => 3,
    })
}

/// Where a window of `extent` pixels, moved by `stride` over `size` pixels with `padding` on each side, is the
/// runtime's SAME.
fn is_same(size: usize, extent: usize, stride: usize, padding: usize) -> bool {
    let total = ((size.div_ceil(stride) - 1) * stride + extent).saturating_sub(size);
    total == 2 * padding
}

/// The first dimension of a value, which is dynamic, as 1.
fn batched(shape: &[usize]) -> Vec<i32> {
    [1].into_iter().chain(shape.iter().map(|dim| *dim as i32)).collect()
}

impl TfliteGraphBuilder {
    /// The operators of a network; its input is tensor 0.
    pub(super) fn new(network: &FoldedNetwork, input: &str) -> Self {
        let mut graph =
            Self { tensors: Vec::new(), values: Vec::new(), operators: Vec::new(), of_value: Vec::new() };
        let input = graph.computed(Output::float(input, &network.values[0].shape), FLOAT32);
        graph.of_value.push(ValueTensors { float: Some(input), int8: None });
        graph.quantize(0, &network.values[0]);
        for (at, operator) in network.operators.iter().enumerate() {
            graph.value(network, at, operator);
        }
        graph
    }

    /// The tensor of the output, in floats.
    pub(super) fn output(&mut self, network: &FoldedNetwork) -> usize {
        let last = network.values.len() - 1;
        self.float_of(last, &network.values[last])
    }

    /// Adds an operator, in integers if the runtime supports that and all its values are quantized.
    fn value(&mut self, network: &FoldedNetwork, at: usize, operator: &Operator) {
        let value = &network.values[operator.output];
        let takes_integers =
            !matches!(operator.op, Op::Activation(_) | Op::GroupNorm { .. } | Op::Embedding { .. });
        let mut values = operator.inputs.iter().chain([&operator.output]);
        let is_integer = takes_integers && values.all(|at| network.values[*at].quantization.is_some());
        let inputs: Vec<usize> = operator
            .inputs
            .iter()
            .map(|&input| match self.of_value[input].int8 {
                Some(int8) if is_integer => int8,
                _ => self.float_of(input, &network.values[input]),
            })
            .collect();
        let float_name = format!("{}/float", value.name);
        let output = match (is_integer, value.quantization) {
            (true, quantization) => Output { name: &value.name, shape: &value.shape, quantization },
            (false, Some(_)) => Output::float(&float_name, &value.shape),
            (false, None) => Output::float(&value.name, &value.shape),
        };
        let tensor = self.operator(network, at, operator, &inputs, output);
        self.of_value.push(match is_integer {
            true => ValueTensors { float: None, int8: Some(tensor) },
            false => ValueTensors { float: Some(tensor), int8: None },
        });
        self.quantize(operator.output, value);
    }

    /// Stores a value as integers if it is quantized. Operators that need floats then read the dequantized integers.
    fn quantize(&mut self, at: usize, value: &FoldedValue) {
        if let (Some(quantization), Some(float), None) =
            (value.quantization, self.of_value[at].float, self.of_value[at].int8)
        {
            let output = Output { name: &value.name, shape: &value.shape, quantization: Some(quantization) };
            let int8 = self.node(QUANTIZE, &[float], output, Options::new(89, &[]));
            self.of_value[at] = ValueTensors { float: None, int8: Some(int8) };
        }
    }

    fn float_of(&mut self, at: usize, value: &FoldedValue) -> usize {
        match (self.of_value[at].float, self.of_value[at].int8) {
            (None, Some(int8)) => {
                let name = format!("{}/dequantized", value.name);
                let float =
                    self.node(DEQUANTIZE, &[int8], Output::float(&name, &value.shape), Options::new(38, &[]));
                self.of_value[at].float = Some(float);
                float
            }
            (float, _) => float.unwrap_or_default(),
        }
    }

    fn tensor(&mut self, info: TensorInfo, values: TensorValues) -> usize {
        self.tensors.push(info);
        self.values.push(values);
        self.tensors.len() - 1
    }

    /// A tensor with a dynamic batch.
    fn computed(&mut self, output: Output, element_type: i8) -> usize {
        let info = TensorInfo {
            name: output.name.into(),
            element_type,
            shape: batched(output.shape),
            dynamic_batch: true,
            quantization: output.quantization.map(tensor_quantization),
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

    /// Adds an operator with one output.
    fn node(&mut self, builtin: Builtin, inputs: &[usize], output: Output, options: Options) -> usize {
        let element_type = if output.quantization.is_some() { INT8 } else { FLOAT32 };
        let output = self.computed(output, element_type);
        self.emit(builtin, inputs, &[output], options);
        output
    }

    /// Adds the operator `at` of the network.
    fn operator(
        &mut self,
        network: &FoldedNetwork,
        at: usize,
        operator: &Operator,
        inputs: &[usize],
        output: Output,
    ) -> usize {
        let (x, input) = (inputs[0], &network.values[operator.inputs[0]]);
        let input_shape = input.shape.as_slice();
        // An operator that only moves values keeps the scale of its input.
        let moved = input.quantization.filter(|_| output.quantization.is_some());
        let act = fused(operator.clamp);
        match &operator.op {
            Op::Conv(geometry, weights) => {
                let extent = geometry.dilation * (geometry.kernel - 1) + 1;
                let window = [extent, geometry.stride, geometry.padding];
                let name = format!("{}/padded", output.name);
                let image = Output { name: &name, shape: input_shape, quantization: moved };
                let (padding, x) = self.padded(PAD, x, image, window);
                let [weight, bias] = self.weights(at, &operator.op, weights, moved);
                let (builtin, options) = conv_options(geometry, padding, act);
                self.node(builtin, &[x, weight, bias], output, options)
            }
            Op::Linear(weights) => {
                let [weight, bias] = self.weights(at, &operator.op, weights, moved);
                self.node(FULLY_CONNECTED, &[x, weight, bias], output, Options::new(8, &[act]))
            }
            Op::MaxPool(window) => {
                let name = format!("{}/padded", output.name);
                let image = Output { name: &name, shape: input_shape, quantization: moved };
                let (padding, x) = self.padded(PADV2, x, image, [window.size, window.stride, window.padding]);
                self.node(MAX_POOL_2D, &[x], output, pool_options(window, padding, act))
            }
            Op::GlobalPool => {
                let axes = self.ints(&[2], &[1, 2]);
                self.node(MEAN, &[x, axes], output, Options::new(27, &[OptionValue::Bool(false)]))
            }
            Op::Flatten => {
                let x = match *input_shape {
                    [h, w, c] if h * w > 1 && c > 1 => {
                        let order = self.ints(&[4], &[0, 3, 1, 2]);
                        let name = format!("{}/channels_first", output.name);
                        let first = Output { name: &name, shape: &[c, h, w], quantization: moved };
                        self.node(TRANSPOSE, &[x, order], first, Options::new(26, &[]))
                    }
                    _ => x,
                };
                self.reshape(x, output)
            }
            Op::Add => self.node(ADD, inputs, output, Options::new(11, &[act])),
            Op::Activation(act) => self.activation(x, *act, output),
            Op::GroupNorm { groups, weight, bias } => {
                let params = [weight, bias].map(|spec| TensorMapping::copy(spec));
                self.group_norm(x, *groups, params, act, output)
            }
            Op::Embedding { num_numeric, tables } => {
                let tables: Vec<TensorMapping> =
                    tables.iter().map(|table| TensorMapping::copy(table)).collect();
                self.embedding(x, *num_numeric, tables, output)
            }
        }
    }

    /// The weight and the bias of operator `at`, as integers if its input is quantized.
    fn weights(
        &mut self,
        at: usize,
        op: &Op,
        weights: &FoldedWeights,
        input: Option<AffineQuantization>,
    ) -> [usize; 2] {
        let mapping = TensorMapping::new(weights.weight.name.clone(), weights.weight, weight_transform(op));
        let scale = input.map(|input| input.scale);
        let (weight, bias) = if scale.is_some() { (INT8, INT32) } else { (FLOAT32, FLOAT32) };
        let weight = self.stored(mapping.target, weight, &mapping.shape, TensorValues::Weight(at, scale));
        let bias =
            self.stored(weights.bias_name(), bias, &[weights.outputs()], TensorValues::Bias(at, scale));
        [weight, bias]
    }

    /// The padding of a window over an image and the image, with an operator that pads it where the runtime's own
    /// padding is another. `image` is the image before that.
    fn padded(
        &mut self,
        builtin: Builtin,
        x: usize,
        image: Output,
        [extent, stride, padding]: [usize; 3],
    ) -> (i8, usize) {
        if padding == 0 {
            return (VALID, x);
        }
        let &[height, width, channels] = image.shape else { return (SAME, x) };
        if [height, width].iter().all(|size| is_same(*size, extent, stride, padding)) {
            return (SAME, x);
        }
        let pixels = padding as i32;
        let amounts = self.ints(&[4, 2], &[0, 0, pixels, pixels, pixels, pixels, 0, 0]);
        let mut inputs = vec![x, amounts];
        // The maximum of a window is never that of the padding.
        if builtin == PADV2 {
            inputs.push(match image.quantization {
                Some(quantization) => {
                    let lowest = self.constant(INT8, &[], i8::MIN.to_le_bytes().into());
                    self.tensors[lowest].quantization = Some(tensor_quantization(quantization));
                    lowest
                }
                None => self.float(f32::MIN),
            });
        }
        let options = Options::new(if builtin == PADV2 { 43 } else { 22 }, &[]);
        let shape = [height + 2 * padding, width + 2 * padding, channels];
        (VALID, self.node(builtin, &inputs, Output { shape: &shape, ..image }, options))
    }

    fn reshape(&mut self, x: usize, output: Output) -> usize {
        let dims: Vec<i32> = [-1].into_iter().chain(output.shape.iter().map(|dim| *dim as i32)).collect();
        let dims = self.ints(&[dims.len()], &dims);
        self.node(RESHAPE, &[x, dims], output, Options::new(17, &[]))
    }

    fn activation(&mut self, x: usize, act: Activation, output: Output) -> usize {
        let none = Options::default;
        let gelu = |approximate| Options::new(116, &[OptionValue::Bool(approximate)]);
        match act {
            Activation::Identity => x,
            Activation::Relu => self.node(RELU, &[x], output, none()),
            Activation::Relu6 => self.node(RELU6, &[x], output, none()),
            Activation::Sigmoid => self.node(LOGISTIC, &[x], output, none()),
            Activation::Tanh => self.node(TANH, &[x], output, none()),
            Activation::Silu => {
                let name = format!("{}/gate", output.name);
                let gate = self.node(LOGISTIC, &[x], Output { name: &name, ..output }, none());
                self.node(MUL, &[x, gate], output, Options::new(21, &[]))
            }
            Activation::Gelu => self.node(GELU, &[x], output, gelu(false)),
            Activation::GeluTanh => self.node(GELU, &[x], output, gelu(true)),
        }
    }

    fn group_norm(
        &mut self,
        x: usize,
        groups: usize,
        [weight, bias]: [TensorMapping; 2],
        act: OptionValue,
        output: Output,
    ) -> usize {
        let shape = output.shape;
        let (values, channels): (usize, _) = (shape.iter().product(), shape[shape.len() - 1]);
        let (grouped, mean_shape) = ([values / channels, groups, channels / groups], [1, groups, 1]);
        let (add, mul, sub) = (Options::new(11, &[]), Options::new(21, &[]), Options::new(28, &[]));
        let keep = Options::new(27, &[OptionValue::Bool(true)]);
        let (axes, eps) = (self.ints(&[2], &[1, 3]), self.float(group_norm::EPS as f32));
        let mut step =
            |builtin: Builtin, inputs: &[usize], part: &str, shape: &[usize], options: &Options| {
                let name = format!("{}/{part}", output.name);
                match builtin {
                    RESHAPE => self.reshape(inputs[0], Output::float(&name, shape)),
                    _ => self.node(builtin, inputs, Output::float(&name, shape), options.clone()),
                }
            };
        let x = step(RESHAPE, &[x], "groups", &grouped, &keep);
        let mean = step(MEAN, &[x, axes], "mean", &mean_shape, &keep);
        let x = step(SUB, &[x, mean], "centered", &grouped, &sub);
        let squares = step(MUL, &[x, x], "squares", &grouped, &mul);
        let var = step(MEAN, &[squares, axes], "variance", &mean_shape, &keep);
        let var = step(ADD, &[var, eps], "variance_eps", &mean_shape, &add);
        let scale = step(RSQRT, &[var], "scale", &mean_shape, &Options::default());
        let x = step(MUL, &[x, scale], "normalized", &grouped, &mul);
        let x = step(RESHAPE, &[x], "channels", shape, &keep);
        let (weight, bias) = (self.parameter(weight), self.parameter(bias));
        let name = format!("{}/scaled", output.name);
        let x = self.node(MUL, &[x, weight], Output::float(&name, shape), mul);
        self.node(ADD, &[x, bias], output, Options::new(11, &[act]))
    }

    /// An unknown category has the index after the last one, and a vector of zeros.
    fn embedding(
        &mut self,
        x: usize,
        num_numeric: usize,
        tables: Vec<TensorMapping>,
        output: Output,
    ) -> usize {
        let concatenation = |axis| Options::new(10, &[OptionValue::Int(axis)]);
        let numeric = (num_numeric > 0).then_some(num_numeric);
        let widths: Vec<usize> = numeric.into_iter().chain(vec![1; tables.len()]).collect();
        let sizes: Vec<i32> = widths.iter().map(|width| *width as i32).collect();
        let columns: Vec<usize> = widths
            .iter()
            .enumerate()
            .map(|(at, width)| {
                self.computed(Output::float(&format!("{}/column_{at}", output.name), &[*width]), FLOAT32)
            })
            .collect();
        let (sizes, axis) = (self.ints(&[sizes.len()], &sizes), self.ints(&[], &[1]));
        let splits = Options::new(79, &[OptionValue::Int(columns.len() as i32)]);
        self.emit(SPLIT_V, &[x, sizes, axis], &columns, splits);
        let (numbers, categories) = columns.split_at(numeric.map_or(0, |_| 1));
        let mut parts = numbers.to_vec();
        for (column, table) in categories.iter().zip(tables) {
            let (rows, width) = (table.shape[0], table.shape[1]);
            let names = ["all", "index", "vectors", "vector"].map(|part| format!("{}/{part}", table.target));
            let [all_rows, index, vectors, vector] = names;
            let zeros = self.constant(FLOAT32, &[1, width], vec![0; 4 * width]);
            let table = self.parameter(table);
            let all = self.stored(all_rows, FLOAT32, &[rows + 1, width], TensorValues::Computed);
            self.emit(CONCATENATION, &[table, zeros], &[all], concatenation(0));
            let indices = self.computed(Output::float(&index, &[1]), INT32);
            let cast = Options::new(37, &[OptionValue::Byte(FLOAT32), OptionValue::Byte(INT32)]);
            self.emit(CAST, &[*column], &[indices], cast);
            let gather = Options::new(23, &[OptionValue::Int(0)]);
            let found = self.node(GATHER, &[all, indices], Output::float(&vectors, &[1, width]), gather);
            parts.push(self.reshape(found, Output::float(&vector, &[width])));
        }
        self.node(CONCATENATION, &parts, output, concatenation(1))
    }
}

/// One scale for a whole tensor.
fn tensor_quantization(quantization: AffineQuantization) -> TensorQuantization {
    TensorQuantization {
        scales: vec![quantization.scale],
        zero_points: vec![quantization.zero_point.into()],
        dimension: 0,
    }
}

fn conv_options(geometry: &ConvGeometry, padding: i8, act: OptionValue) -> (Builtin, Options) {
    let (stride, dilation) =
        (OptionValue::Int(geometry.stride as i32), OptionValue::Int(geometry.dilation as i32));
    let padding = OptionValue::Byte(padding);
    match is_depthwise(geometry) {
        true => {
            let multiplier = OptionValue::Int((geometry.out_channels / geometry.in_channels) as i32);
            let fields = [padding, stride, stride, multiplier, act, dilation, dilation];
            (DEPTHWISE_CONV_2D, Options::new(2, &fields))
        }
        false => (CONV_2D, Options::new(1, &[padding, stride, stride, act, dilation, dilation])),
    }
}

fn pool_options(window: &PoolGeometry, padding: i8, act: OptionValue) -> Options {
    let (stride, size) = (OptionValue::Int(window.stride as i32), OptionValue::Int(window.size as i32));
    Options::new(5, &[OptionValue::Byte(padding), stride, stride, size, size, act])
}

/// The values of a tensor as the file has them.
pub(super) struct Encoded {
    pub bytes: Vec<u8>,
    /// If they are integers.
    pub quantization: Option<TensorQuantization>,
}

impl TensorValues {
    /// `None` for values that are computed.
    pub(super) fn read(
        &self,
        network: &FoldedNetwork,
        files: &SavedWeights,
    ) -> Result<Option<Encoded>, ExportError> {
        let floats = |values: Vec<f32>| {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            Some(Encoded { bytes, quantization: None })
        };
        let (at, input_scale) = match self {
            Self::Computed => return Ok(None),
            Self::Constant(bytes) => return Ok(Some(Encoded { bytes: bytes.clone(), quantization: None })),
            Self::Parameter(mapping) => return Ok(floats(mapping.read(files)?)),
            Self::Weight(at, input_scale) | Self::Bias(at, input_scale) => (*at, *input_scale),
        };
        let op = &network.operators[at].op;
        let (Op::Conv(_, weights) | Op::Linear(weights)) = op else { return Ok(None) };
        let mapping = TensorMapping::new("", weights.weight, weight_transform(op));
        let Some(input_scale) = input_scale else {
            let (weight, bias) = weights.read(files)?;
            return Ok(floats(match self {
                Self::Bias(..) => bias,
                _ => mapping.apply(weight),
            }));
        };
        let layer = weights.quantize(files, input_scale)?;
        let quantization = |scales: Vec<f32>, dimension: i32| {
            let zero_points = vec![0; scales.len()];
            Some(TensorQuantization { scales, zero_points, dimension })
        };
        Ok(Some(match self {
            Self::Bias(..) => Encoded {
                bytes: layer.bias.iter().flat_map(|value| value.to_le_bytes()).collect(),
                quantization: quantization(layer.bias_scales, 0),
            },
            _ => {
                let floats = layer.weight.iter().map(|value| f32::from(*value)).collect();
                // A depthwise weight has its outputs last.
                let dimension = if mapping.transform == DEPTHWISE { 3 } else { 0 };
                Encoded {
                    bytes: mapping.apply(floats).iter().map(|value| *value as i8 as u8).collect(),
                    quantization: quantization(layer.weight_scales, dimension),
                }
            }
        }))
    }
}
