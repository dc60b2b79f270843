//! The nodes of each layer. Images have channels first: (batch, channels, height, width).

use std::any::Any;

use super::super::error::ExportError;
use super::super::weights::Transform;
use super::attention::{AttentionInputs, AttentionNode, Rope};
use super::graph::OnnxGraphBuilder;
use super::proto::AttributeProto;
use crate::base::features::Features;
use crate::graph::network::{Network, Node};
use crate::job::ModelConfig;
use crate::kernels::im2col::ConvGeometry;
use crate::kernels::linear::WeightLayout;
use crate::kernels::pool::PoolGeometry;
use crate::kernels::{Activation, ClampActivation};
use crate::layers::Layer;
use crate::layers::activation::ActivationLayer;
use crate::layers::attention::Attention;
use crate::layers::avg_pool::AvgPool;
use crate::layers::batch_norm::{self, BatchNorm};
use crate::layers::categorical_embedding::CategoricalEmbedding;
use crate::layers::class_token::ClassToken;
use crate::layers::conv::Conv2d;
use crate::layers::dropout::Dropout;
use crate::layers::embedding::Embedding;
use crate::layers::first_token::FirstToken;
use crate::layers::flatten::Flatten;
use crate::layers::global_pool::GlobalAvgPool;
use crate::layers::group_norm::GroupNorm;
use crate::layers::linear::Linear;
use crate::layers::max_pool::MaxPool;
use crate::layers::norm::NormLayer;
use crate::layers::packed_linear::PackedLinear;
use crate::layers::squeeze_excite::SqueezeExcite;
use crate::layers::swiglu::Swiglu;
use crate::params::{ParamId, ParamLayout, StatId, TensorSpec};

/// A value of the graph. The outputs of packed projections stay separate until a layer needs them as one tensor.
#[derive(Clone)]
pub(super) struct Activations {
    parts: Vec<String>,
    /// Shape of one sample, as the network has it: images are (height, width, channels).
    shape: Vec<usize>,
}

/// Walks over a network and adds the nodes of its layers to a graph.
pub(super) struct NetworkExport<'a> {
    graph: OnnxGraphBuilder,
    layout: &'a ParamLayout,
    input: String,
    /// Shape of an input sample.
    input_shape: Vec<usize>,
    context: usize,
    attention: AttentionInputs,
    /// The token embedding, which a tied output layer shares.
    token_table: Option<ParamId>,
}

impl<'a> NetworkExport<'a> {
    /// `input` is the name of the graph's input.
    pub(super) fn new(
        graph: OnnxGraphBuilder,
        layout: &'a ParamLayout,
        model: &ModelConfig,
        features: &Features,
        input: &str,
    ) -> Self {
        Self {
            graph,
            layout,
            input: input.into(),
            input_shape: features.input_shape(),
            context: model.context().unwrap_or_default(),
            attention: AttentionInputs::default(),
            token_table: None,
        }
    }

    /// Attends only to positions where the input `mask` is 1.
    pub(super) fn set_padding_mask(&mut self, mask: &str) {
        self.graph.begin_layer("padding");
        self.attention.set_padding(&mut self.graph, mask);
    }

    pub(super) fn into_graph(self) -> OnnxGraphBuilder {
        self.graph
    }

    /// Adds all layers and the output layer; returns the name of the logits.
    pub(super) fn network(&mut self, network: &Network) -> Result<String, ExportError> {
        let mut x = Activations { parts: vec![self.input.clone()], shape: self.input_shape.clone() };
        for block in &network.blocks {
            x = self.nodes(&block.nodes, x)?;
        }
        self.graph.begin_layer(network.loss.name());
        let weight = format!("{}.weight", network.loss.name());
        let bias = format!("{}.bias", network.loss.name());
        let own = self.layout.params.iter().find(|(spec, _)| spec.name == weight).map(|(spec, _)| spec);
        let bias = self.layout.params.iter().find(|(spec, _)| spec.name == bias).map(|(spec, _)| spec);
        let layer = || network.loss.name().to_owned();
        match (own, self.token_table) {
            (Some(weight), _) => Ok(self.linear(x, weight, WeightLayout::OutIn, bias)),
            (None, Some(table)) => {
                let table = self.weight(table, Transform::Copy);
                let table = self.graph.transpose(&table, &[1, 0]);
                let x = self.joined(&x);
                Ok(self.graph.node("MatMul", &[&x, &table]))
            }
            (None, None) => Err(ExportError::UnsupportedLayer { layer: layer() }),
        }
    }

    fn nodes(&mut self, nodes: &[Node], mut x: Activations) -> Result<Activations, ExportError> {
        for node in nodes {
            x = match node {
                Node::Layer(layer) => self.layer(layer.as_ref(), x)?,
                Node::Residual(residual) => {
                    let branch = self.nodes(&residual.branch, x.clone())?;
                    let shortcut = self.nodes(&residual.shortcut, x)?;
                    let (a, b) = (self.joined(&branch), self.joined(&shortcut));
                    self.graph.begin_layer(&residual.name);
                    let sum = self.graph.node("Add", &[&a, &b]);
                    let sum = self.graph.activation(sum, residual.act);
                    Activations { parts: vec![sum], shape: residual.output_shape.clone() }
                }
                Node::Fused(fused) => {
                    return Err(ExportError::UnsupportedLayer { layer: fused.describe() });
                }
            };
        }
        Ok(x)
    }

    /// The value as one tensor.
    fn joined(&mut self, x: &Activations) -> String {
        match x.parts.as_slice() {
            [one] => one.clone(),
            parts => {
                let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
                self.graph.concat(&parts, -1)
            }
        }
    }

    fn spec(&self, id: ParamId) -> &'a TensorSpec {
        self.layout.params.spec(id.index)
    }

    fn weight(&mut self, id: ParamId, transform: Transform) -> String {
        self.graph.weight(self.spec(id), transform)
    }

    fn stat(&mut self, id: StatId) -> String {
        self.graph.weight(self.layout.stats.spec(id.0), Transform::Copy)
    }

    fn layer(&mut self, layer: &dyn Layer, x: Activations) -> Result<Activations, ExportError> {
        self.graph.begin_layer(layer.name());
        let shape = layer.output_shape();
        let any: &dyn Any = layer;
        if let Some(packed) = any.downcast_ref::<PackedLinear>() {
            return Ok(Activations { parts: self.packed_linear(packed, &x), shape });
        }
        let y = if let Some(attention) = any.downcast_ref::<Attention>() {
            self.attention(attention, &x)
        } else if let Some(swiglu) = any.downcast_ref::<Swiglu>() {
            self.swiglu(swiglu, &x)
        } else if let Some(linear) = any.downcast_ref::<Linear>() {
            let y = self.linear(
                x,
                self.spec(linear.weight),
                linear.weight_layout,
                linear.bias().map(|bias| self.spec(bias)),
            );
            self.graph.activation(y, linear.act())
        } else {
            let input_shape = x.shape.clone();
            let x = self.joined(&x);
            self.plain_layer(layer, &input_shape, x)?
        };
        Ok(Activations { parts: vec![y], shape })
    }

    /// A layer that takes one tensor. `shape` is the shape of an input sample.
    fn plain_layer(&mut self, layer: &dyn Layer, shape: &[usize], x: String) -> Result<String, ExportError> {
        let any: &dyn Any = layer;
        Ok(if let Some(act) = any.downcast_ref::<ActivationLayer>() {
            self.graph.activation(x, act.act)
        } else if any.is::<Dropout>() {
            x
        } else if let Some(flatten) = any.downcast_ref::<Flatten>() {
            match flatten.shape.len() {
                0 | 1 => x,
                _ => self.graph.node_with("Flatten", &[&x], vec![AttributeProto::int("axis", 1)]),
            }
        } else if let Some(embedding) = any.downcast_ref::<Embedding>() {
            self.embedding(embedding, &x)
        } else if let Some(embedding) = any.downcast_ref::<CategoricalEmbedding>() {
            let tables: Vec<&TensorSpec> = embedding.tables.iter().map(|id| self.spec(*id)).collect();
            self.graph.categorical_embedding(embedding.num_numeric, &tables, &x)
        } else if let Some(norm) = any.downcast_ref::<NormLayer>() {
            self.norm(norm, &x)
        } else if let Some(conv) = any.downcast_ref::<Conv2d>() {
            let y = self.conv(&x, conv.weight, conv.bias, conv_attributes(&conv.geometry));
            self.graph.activation(y, conv.act)
        } else if let Some(norm) = any.downcast_ref::<BatchNorm>() {
            self.batch_norm(norm, x)
        } else if let Some(norm) = any.downcast_ref::<GroupNorm>() {
            self.group_norm(norm, x)
        } else if let Some(pool) = any.downcast_ref::<MaxPool>() {
            self.graph.node_with("MaxPool", &[&x], window(&pool.window))
        } else if let Some(pool) = any.downcast_ref::<AvgPool>() {
            let mut attributes = window(&pool.window);
            attributes.push(AttributeProto::int("count_include_pad", 1));
            self.graph.node_with("AveragePool", &[&x], attributes)
        } else if any.is::<GlobalAvgPool>() {
            let mean = self.graph.node("GlobalAveragePool", &[&x]);
            self.graph.node_with("Flatten", &[&mean], vec![AttributeProto::int("axis", 1)])
        } else if let Some(gate) = any.downcast_ref::<SqueezeExcite>() {
            let hidden = self.graph.node("GlobalAveragePool", &[&x]);
            let hidden = self.conv(&hidden, gate.fc1[0], Some(gate.fc1[1]), Vec::new());
            let hidden = self.graph.activation(hidden, gate.act);
            let scale = self.conv(&hidden, gate.fc2[0], Some(gate.fc2[1]), Vec::new());
            let scale = self.graph.activation(scale, Activation::Sigmoid);
            self.graph.node("Mul", &[&x, &scale])
        } else if let Some(token) = any.downcast_ref::<ClassToken>() {
            self.class_token(token, shape, &x)
        } else if any.is::<FirstToken>() {
            let first = self.graph.int(0);
            self.graph.node_with("Gather", &[&x, &first], vec![AttributeProto::int("axis", 1)])
        } else {
            return Err(ExportError::UnsupportedLayer { layer: layer.name().to_owned() });
        })
    }

    /// `x W' + b` over the last dimension.
    fn linear(
        &mut self,
        x: Activations,
        weight: &TensorSpec,
        layout: WeightLayout,
        bias: Option<&TensorSpec>,
    ) -> String {
        let is_sequence = x.shape.len() > 1;
        let x = self.joined(&x);
        let bias = bias.map(|bias| self.graph.weight(bias, Transform::Copy));
        if !is_sequence {
            let transposed = matches!(layout, WeightLayout::OutIn) as i64;
            let weight = self.graph.matrix(weight, Transform::Copy, transposed as usize);
            let inputs: Vec<&str> = [x.as_str(), &weight].into_iter().chain(bias.as_deref()).collect();
            return self.graph.node_with("Gemm", &inputs, vec![AttributeProto::int("transB", transposed)]);
        }
        // A matmul over a sequence takes the weight as (inputs, outputs).
        let transform = match layout {
            WeightLayout::OutIn => Transform::Transpose,
            WeightLayout::InOut => Transform::Copy,
        };
        let weight = self.graph.matrix(weight, transform, 0);
        let y = self.graph.node("MatMul", &[&x, &weight]);
        match bias {
            Some(bias) => self.graph.node("Add", &[&y, &bias]),
            None => y,
        }
    }

    fn packed_linear(&mut self, packed: &PackedLinear, x: &Activations) -> Vec<String> {
        let x = Activations { parts: vec![self.joined(x)], shape: x.shape.clone() };
        let projections = packed.projections.iter();
        projections
            .map(|(weight, bias)| {
                let (weight, bias) = (self.spec(*weight), bias.map(|bias| self.spec(bias)));
                self.linear(x.clone(), weight, WeightLayout::OutIn, bias)
            })
            .collect()
    }

    fn attention(&mut self, attention: &Attention, x: &Activations) -> String {
        let dims = attention.sizes;
        let parts = match x.parts.as_slice() {
            [packed] => {
                let kv = dims.kv_heads * dims.head_dim;
                self.graph.split_last(packed, &[dims.width(), kv, kv])
            }
            parts => parts.to_vec(),
        };
        let rope =
            attention.rotary.as_ref().map(|rotary| Rope { head_dim: dims.head_dim, theta: rotary.theta() });
        let node = AttentionNode {
            dims,
            causal: attention.causal,
            rope,
            tokens: &self.input,
            context: self.context,
        };
        let [q, k, v] = [&parts[0], &parts[1], &parts[2]];
        node.add(&mut self.graph, &mut self.attention, [q, k, v])
    }

    fn swiglu(&mut self, swiglu: &Swiglu, x: &Activations) -> String {
        let parts = match x.parts.as_slice() {
            [packed] => {
                let width = swiglu.shape.last().copied().unwrap_or(1);
                self.graph.split_last(packed, &[width, width])
            }
            parts => parts.to_vec(),
        };
        let gate = self.graph.activation(parts[0].clone(), Activation::Silu);
        self.graph.node("Mul", &[&gate, &parts[1]])
    }

    fn embedding(&mut self, embedding: &Embedding, tokens: &str) -> String {
        self.token_table = Some(embedding.token_weight());
        let table = self.graph.matrix(self.spec(embedding.token_weight()), Transform::Copy, 1);
        let mut y = self.graph.node("Gather", &[&table, tokens]);
        if let Some(positions) = embedding.position_table {
            let (table, length) = (self.weight(positions, Transform::Copy), self.graph.dim(tokens, 1));
            let rows = self.graph.first_rows(&table, &length);
            y = self.graph.node("Add", &[&y, &rows]);
        }
        if let Some(types) = embedding.token_type_table {
            let (table, one) = (self.weight(types, Transform::Copy), self.graph.ints(&[1]));
            let first = self.graph.first_rows(&table, &one);
            y = self.graph.node("Add", &[&y, &first]);
        }
        y
    }

    /// Layer norm, or RMS norm, which has no bias.
    fn norm(&mut self, norm: &NormLayer, x: &str) -> String {
        let weight = self.weight(norm.weight, Transform::Copy);
        if let (true, Some(bias)) = (norm.centred, norm.bias) {
            let bias = self.weight(bias, Transform::Copy);
            let attributes =
                vec![AttributeProto::int("axis", -1), AttributeProto::float("epsilon", norm.eps as f32)];
            return self.graph.node_with("LayerNormalization", &[x, &weight, &bias], attributes);
        }
        let square = self.graph.node("Mul", &[x, x]);
        let keep = AttributeProto::int("keepdims", 1);
        // The axes are an input from version 18 on.
        let mean = match self.graph.opset() {
            (18.., _) => {
                let axes = self.graph.ints(&[-1]);
                self.graph.node_with("ReduceMean", &[&square, &axes], vec![keep])
            }
            _ => {
                self.graph.node_with("ReduceMean", &[&square], vec![AttributeProto::ints("axes", [-1]), keep])
            }
        };
        let eps = self.graph.float(norm.eps as f32);
        let sum = self.graph.node("Add", &[&mean, &eps]);
        let root = self.graph.node("Sqrt", &[&sum]);
        let scaled = self.graph.node("Div", &[x, &root]);
        self.graph.node("Mul", &[&scaled, &weight])
    }

    fn conv(
        &mut self,
        x: &str,
        weight: ParamId,
        bias: Option<ParamId>,
        attributes: Vec<AttributeProto>,
    ) -> String {
        let weight = self.weight(weight, Transform::Copy);
        let bias = bias.map(|bias| self.weight(bias, Transform::Copy));
        let inputs: Vec<&str> = [x, weight.as_str()].into_iter().chain(bias.as_deref()).collect();
        self.graph.node_with("Conv", &inputs, attributes)
    }

    /// Runs `body` on a value whose channels come second. Sequences have them last, images and vectors do not.
    fn with_channels_second(
        &mut self,
        x: String,
        shape: &[usize],
        body: impl FnOnce(&mut Self, String) -> String,
    ) -> String {
        if shape.len() != 2 {
            return body(self, x);
        }
        let x = self.graph.transpose(&x, &[0, 2, 1]);
        let y = body(self, x);
        self.graph.transpose(&y, &[0, 2, 1])
    }

    fn batch_norm(&mut self, norm: &BatchNorm, x: String) -> String {
        let y = self.with_channels_second(x, &norm.shape, |export, x| {
            let (weight, bias) =
                (export.weight(norm.weight, Transform::Copy), export.weight(norm.bias, Transform::Copy));
            let (mean, var) = (export.stat(norm.running_mean), export.stat(norm.running_var));
            let attributes = vec![AttributeProto::float("epsilon", batch_norm::EPS as f32)];
            export.graph.node_with("BatchNormalization", &[&x, &weight, &bias, &mean, &var], attributes)
        });
        self.clamp(y, norm.act)
    }

    fn group_norm(&mut self, norm: &GroupNorm, x: String) -> String {
        let y = self.with_channels_second(x, &norm.shape, |export, x| {
            let [weight, bias] = [norm.weight, norm.bias].map(|id| export.spec(id));
            export.graph.group_norm(&x, &norm.shape, norm.groups, [weight, bias])
        });
        self.clamp(y, norm.act)
    }

    fn clamp(&mut self, x: String, act: ClampActivation) -> String {
        self.graph.activation(x, act.activation())
    }

    /// Patches become a sequence behind the class token; positions are added.
    fn class_token(&mut self, token: &ClassToken, shape: &[usize], x: &str) -> String {
        let (class, positions) =
            (self.weight(token.class, Transform::Copy), self.weight(token.positions, Transform::Copy));
        let graph = &mut self.graph;
        let patches = match shape.len() {
            3 => {
                let patches = graph.reshape(x, &[0, token.width as i64, -1]);
                graph.transpose(&patches, &[0, 2, 1])
            }
            _ => x.to_owned(),
        };
        let (batch, rest) = (graph.dim(x, 0), graph.ints(&[1, token.width as i64]));
        let dims = graph.concat(&[&batch, &rest], 0);
        let class = graph.node("Expand", &[&class, &dims]);
        let sequence = graph.concat(&[&class, &patches], 1);
        graph.node("Add", &[&sequence, &positions])
    }
}

pub(super) fn conv_attributes(geometry: &ConvGeometry) -> Vec<AttributeProto> {
    let both = |value: usize| [value as i64; 2];
    vec![
        AttributeProto::ints("kernel_shape", both(geometry.kernel)),
        AttributeProto::ints("strides", both(geometry.stride)),
        AttributeProto::ints("pads", [geometry.padding as i64; 4]),
        AttributeProto::ints("dilations", both(geometry.dilation)),
        AttributeProto::int("group", geometry.groups as i64),
    ]
}

pub(super) fn window(window: &PoolGeometry) -> Vec<AttributeProto> {
    vec![
        AttributeProto::ints("kernel_shape", [window.size as i64; 2]),
        AttributeProto::ints("strides", [window.stride as i64; 2]),
        AttributeProto::ints("pads", [window.padding as i64; 4]),
    ]
}
