//! The network as mobile runtimes compute it: operators in order, with batch norm folded into the layer before it.
//!
//! A folded weight is `W g / sqrt(v + eps)` and its bias `b + (c - m) g / sqrt(v + eps)`, for a norm with the weight g,
//! the bias b and the statistics m and v over a layer with the bias c. Reading a folded file back gives parameters that
//! compute the same: the folded ones, with a norm that is the identity.

mod rescaling;

use std::any::Any;
use std::collections::BTreeMap;

use super::ExportSource;
use super::error::ExportError;
use super::weights::{SavedWeights, TensorMapping, Transform};
use crate::graph::network::{Network, Node};
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::linear::WeightLayout;
use crate::kernels::pool::PoolGeometry;
use crate::kernels::{Activation, ClampActivation};
use crate::layers::Layer;
use crate::layers::activation::ActivationLayer;
use crate::layers::batch_norm::{self, BatchNorm};
use crate::layers::categorical_embedding::CategoricalEmbedding;
use crate::layers::conv::Conv2d;
use crate::layers::dropout::Dropout;
use crate::layers::flatten::Flatten;
use crate::layers::global_pool::GlobalAvgPool;
use crate::layers::group_norm::GroupNorm;
use crate::layers::linear::Linear;
use crate::layers::max_pool::MaxPool;
use crate::params::{ParamId, ParamLayout, StatId, TensorSpec};
use crate::quantization::points::{INPUT, QuantizationPoint};
use crate::quantization::{AffineQuantization, QuantizedLayer};

/// What an operator computes.
pub(super) enum Op<'a> {
    Conv(ConvGeometry, FoldedWeights<'a>),
    Linear(FoldedWeights<'a>),
    MaxPool(PoolGeometry),
    /// The mean per channel.
    GlobalPool,
    /// In (channel, row, column) order.
    Flatten,
    Add,
    Activation(Activation),
    GroupNorm {
        groups: usize,
        weight: &'a TensorSpec,
        bias: &'a TensorSpec,
    },
    /// Numeric columns, and an embedding of each category after them.
    Embedding {
        num_numeric: usize,
        tables: Vec<&'a TensorSpec>,
    },
}

/// An operator; values are indices of [`FoldedNetwork::values`].
pub(super) struct Operator<'a> {
    pub op: Op<'a>,
    pub inputs: Vec<usize>,
    pub output: usize,
    /// Applied to what it computes.
    pub clamp: ClampActivation,
}

/// What an operator takes or gives.
pub(super) struct FoldedValue {
    pub name: String,
    /// Shape of one sample; images are (height, width, channels).
    pub shape: Vec<usize>,
    /// Scale and zero point, if it is stored as 8-bit integers.
    pub quantization: Option<AffineQuantization>,
}

/// The weight and the bias of a convolution or linear layer, with the norm that follows it.
pub(super) struct FoldedWeights<'a> {
    /// Outputs first.
    pub weight: &'a TensorSpec,
    bias: Option<&'a TensorSpec>,
    norm: Option<FoldedNorm<'a>>,
}

struct FoldedNorm<'a> {
    weight: &'a TensorSpec,
    bias: &'a TensorSpec,
    mean: &'a TensorSpec,
    var: &'a TensorSpec,
}

impl FoldedWeights<'_> {
    pub(super) fn outputs(&self) -> usize {
        self.weight.shape[0]
    }

    /// The name of the bias in a file: that of the parameter that is restored from it.
    pub(super) fn bias_name(&self) -> String {
        let bias = self.norm.as_ref().map(|norm| norm.bias).or(self.bias);
        bias.map_or_else(|| format!("{}/bias", self.weight.name), |bias| bias.name.clone())
    }

    /// The weight, in the parameter's shape, and the bias.
    pub(super) fn read(&self, files: &SavedWeights) -> Result<(Vec<f32>, Vec<f32>), ExportError> {
        let read = |spec: &TensorSpec| files.read(&spec.name, &spec.shape);
        let mut weight = read(self.weight)?;
        let mut bias = self.bias.map_or_else(|| Ok(vec![0.0; self.outputs()]), read)?;
        if let Some(norm) = &self.norm {
            let (scale, shift) = (read(norm.weight)?, read(norm.bias)?);
            let (mean, var) = (read(norm.mean)?, read(norm.var)?);
            for (at, row) in weight.chunks_exact_mut(self.weight.len() / self.outputs()).enumerate() {
                let factor = f64::from(scale[at]) / (f64::from(var[at]) + batch_norm::EPS).sqrt();
                row.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
                let centered = f64::from(bias[at]) - f64::from(mean[at]);
                bias[at] = (f64::from(shift[at]) + centered * factor) as f32;
            }
        }
        Ok((weight, bias))
    }

    /// The weight, in the parameter's shape, and the bias as integers, for inputs of this scale.
    pub(super) fn quantize(
        &self,
        files: &SavedWeights,
        input_scale: f32,
    ) -> Result<QuantizedLayer, ExportError> {
        let (weight, bias) = self.read(files)?;
        let layer = QuantizedLayer::new(&weight, &bias, input_scale);
        let overflows = layer.bias_scales.iter().position(|scale| !scale.is_finite());
        match overflows {
            None => Ok(layer),
            Some(at) => {
                let (tensor, value) = (self.bias_name(), bias[at]);
                Err(ExportError::Overflow { tensor, value, dtype: "int8" })
            }
        }
    }
}

/// Where the values of a parameter come from when a file with folded weights is read back.
pub(super) enum Restored {
    Tensor(TensorMapping),
    Constant(f32),
}

/// The operators of a network.
pub(super) struct FoldedNetwork<'a> {
    layout: &'a ParamLayout,
    pub values: Vec<FoldedValue>,
    pub operators: Vec<Operator<'a>>,
}

impl<'a> FoldedNetwork<'a> {
    /// The last value is the output, with the name of the output layer.
    pub(super) fn new(
        source: &ExportSource,
        layout: &'a ParamLayout,
        network: &Network,
    ) -> Result<Self, ExportError> {
        let shape = source.features.input_shape();
        let mut folded = Self {
            layout,
            values: vec![FoldedValue { name: INPUT.into(), shape, quantization: None }],
            operators: Vec::new(),
        };
        let mut x = 0;
        for block in &network.blocks {
            x = folded.nodes(&block.nodes, x)?;
        }
        let head = network.loss.name();
        let param = |part: &str| {
            let name = format!("{head}.{part}");
            layout.params.iter().find(|(spec, _)| spec.name == name).map(|(spec, _)| spec)
        };
        let weight = param("weight").ok_or_else(|| ExportError::UnsupportedLayer { layer: head.into() })?;
        let weights = FoldedWeights { weight, bias: param("bias"), norm: None };
        let shape = vec![weights.outputs()];
        let logits = folded.push(head, Op::Linear(weights), &[x], shape, ClampActivation::Identity);
        // The network has no point for its logits: they are quantized where the rest is.
        let is_quantized = folded.values.iter().any(|value| value.quantization.is_some());
        let activations = source.activations.filter(|_| is_quantized);
        folded.values[logits].quantization = activations.and_then(|all| all.get(head)).copied();
        Ok(folded)
    }

    fn push(
        &mut self,
        name: &str,
        op: Op<'a>,
        inputs: &[usize],
        shape: Vec<usize>,
        clamp: ClampActivation,
    ) -> usize {
        // Integers that are only moved keep their scale.
        let quantization = match op {
            Op::MaxPool(_) | Op::Flatten => self.values[inputs[0]].quantization,
            _ => None,
        };
        let output = self.values.len();
        self.values.push(FoldedValue { name: name.into(), shape, quantization });
        self.operators.push(Operator { op, inputs: inputs.into(), output, clamp });
        output
    }

    fn param(&self, id: ParamId) -> &'a TensorSpec {
        self.layout.params.spec(id.index)
    }

    fn stat(&self, id: StatId) -> &'a TensorSpec {
        self.layout.stats.spec(id.0)
    }

    fn nodes(&mut self, nodes: &[Node], mut x: usize) -> Result<usize, ExportError> {
        let mut rest = nodes;
        while let [node, after @ ..] = rest {
            rest = after;
            x = match node {
                Node::Layer(layer) => {
                    let norm = match after {
                        [Node::Layer(next), ..] => (next.as_ref() as &dyn Any).downcast_ref::<BatchNorm>(),
                        _ => None,
                    };
                    let (y, folds_norm) = self.layer(layer.as_ref(), x, norm)?;
                    if folds_norm {
                        rest = &after[1..];
                    }
                    y
                }
                Node::Residual(residual) => {
                    let branch = self.nodes(&residual.branch, x)?;
                    let shortcut = self.nodes(&residual.shortcut, x)?;
                    let shape = residual.output_shape.clone();
                    self.with_activation(&residual.name, Op::Add, &[branch, shortcut], shape, residual.act)
                }
                Node::Fused(fused) => return Err(ExportError::UnsupportedLayer { layer: fused.describe() }),
            };
        }
        Ok(x)
    }

    /// An operator and its activation, which is one of its own if it does more than clamp.
    fn with_activation(
        &mut self,
        name: &str,
        op: Op<'a>,
        inputs: &[usize],
        shape: Vec<usize>,
        act: Activation,
    ) -> usize {
        if let Some(clamp) = ClampActivation::from_activation(act) {
            return self.push(name, op, inputs, shape, clamp);
        }
        let before = self.push(name, op, inputs, shape.clone(), ClampActivation::Identity);
        self.push(
            &format!("{name}.activation"),
            Op::Activation(act),
            &[before],
            shape,
            ClampActivation::Identity,
        )
    }

    /// Adds a layer and folds `norm`, which follows it, into it if possible. Returns the layer's value and whether
    /// `norm` was folded.
    fn layer(
        &mut self,
        layer: &dyn Layer,
        x: usize,
        norm: Option<&BatchNorm>,
    ) -> Result<(usize, bool), ExportError> {
        let (any, name, shape): (&dyn Any, _, _) = (layer, layer.name(), layer.output_shape());
        let identity = ClampActivation::Identity;
        let (y, folds_norm) = if let Some(conv) = any.downcast_ref::<Conv2d>() {
            let weights = |norm| self.weights(conv.weight, conv.bias, norm);
            match norm.filter(|_| conv.act == Activation::Identity) {
                Some(norm) => {
                    let op = Op::Conv(conv.geometry, weights(Some(norm)));
                    (self.push(norm.name(), op, &[x], shape, norm.act), true)
                }
                None => {
                    let op = Op::Conv(conv.geometry, weights(None));
                    (self.with_activation(name, op, &[x], shape, conv.act), false)
                }
            }
        } else if let Some(linear) = any.downcast_ref::<Linear>() {
            if linear.weight_layout != WeightLayout::OutIn || shape.len() != 1 {
                return Err(ExportError::UnsupportedLayer { layer: name.into() });
            }
            let op = Op::Linear(self.weights(linear.weight, linear.bias(), None));
            (self.with_activation(name, op, &[x], shape, linear.act()), false)
        } else if let Some(act) = any.downcast_ref::<ActivationLayer>() {
            (self.push(name, Op::Activation(act.act), &[x], shape, identity), false)
        } else if let Some(point) = any.downcast_ref::<QuantizationPoint>() {
            self.values[x].quantization = point.quantization();
            (x, false)
        } else if any.is::<Dropout>() {
            (x, false)
        } else if any.is::<Flatten>() {
            (self.push(name, Op::Flatten, &[x], shape, identity), false)
        } else if let Some(pool) = any.downcast_ref::<MaxPool>() {
            (self.push(name, Op::MaxPool(pool.window), &[x], shape, identity), false)
        } else if any.is::<GlobalAvgPool>() {
            (self.push(name, Op::GlobalPool, &[x], shape, identity), false)
        } else if let Some(norm) = any.downcast_ref::<GroupNorm>() {
            let (weight, bias) = (self.param(norm.weight), self.param(norm.bias));
            let op = Op::GroupNorm { groups: norm.groups, weight, bias };
            (self.push(name, op, &[x], shape, norm.act), false)
        } else if let Some(embedding) = any.downcast_ref::<CategoricalEmbedding>() {
            let tables = embedding.tables.iter().map(|id| self.param(*id)).collect();
            let op = Op::Embedding { num_numeric: embedding.num_numeric, tables };
            (self.push(name, op, &[x], shape, identity), false)
        } else {
            return Err(ExportError::UnsupportedLayer { layer: name.into() });
        };
        Ok((y, folds_norm))
    }

    fn weights(&self, weight: ParamId, bias: Option<ParamId>, norm: Option<&BatchNorm>) -> FoldedWeights<'a> {
        let folded = |norm: &BatchNorm| FoldedNorm {
            weight: self.param(norm.weight),
            bias: self.param(norm.bias),
            mean: self.stat(norm.running_mean),
            var: self.stat(norm.running_var),
        };
        FoldedWeights {
            weight: self.param(weight),
            bias: bias.map(|id| self.param(id)),
            norm: norm.map(folded),
        }
    }

    /// Where each parameter comes from in a file, whose weights are transformed by `transform`.
    pub(super) fn restored(&self, transform: impl Fn(&Op) -> Transform) -> BTreeMap<String, Restored> {
        let mut restored = BTreeMap::new();
        for operator in &self.operators {
            let mut put = |spec: &TensorSpec, from: Restored| restored.insert(spec.name.clone(), from);
            let tensor = |name: String, spec: &TensorSpec, transform: Transform| {
                Restored::Tensor(TensorMapping::new(name, spec, transform))
            };
            let copy = |spec: &TensorSpec| Restored::Tensor(TensorMapping::copy(spec));
            match &operator.op {
                Op::Conv(_, weights) | Op::Linear(weights) => {
                    let weight = weights.weight;
                    put(weight, tensor(weight.name.clone(), weight, transform(&operator.op)));
                    match (&weights.norm, weights.bias) {
                        (None, bias) => bias.into_iter().for_each(|bias| drop(put(bias, copy(bias)))),
                        (Some(norm), bias) => {
                            bias.into_iter().for_each(|bias| drop(put(bias, Restored::Constant(0.0))));
                            put(norm.bias, copy(norm.bias));
                            put(norm.weight, Restored::Constant((1.0 + batch_norm::EPS).sqrt() as f32));
                            put(norm.mean, Restored::Constant(0.0));
                            put(norm.var, Restored::Constant(1.0));
                        }
                    }
                }
                Op::GroupNorm { weight, bias, .. } => {
                    put(weight, copy(weight));
                    put(bias, copy(bias));
                }
                Op::Embedding { tables, .. } => tables.iter().for_each(|table| drop(put(table, copy(table)))),
                Op::MaxPool(_) | Op::GlobalPool | Op::Flatten | Op::Add | Op::Activation(_) => {}
            }
        }
        restored
    }
}
