//! The fusion pass: rewrites a network into fused nodes, in which neighbouring layers share kernels.
//!
//! It runs once, before the network is planned, so the plan and the run walk the same nodes. Without it the network
//! computes the same gradients: every fusion saves memory or a pass over a tensor, and changes no arithmetic but the
//! rounding of a recomputed activation and the order of a sum.
//!
//! | fusion | where | saves |
//! |---|---|---|
//! | `BatchNorm + X` | everywhere | the normalized tensor: recomputed from the input before X's backward |
//! | `Norm + X` | GPU | the same; if X is linear, within the norm's own backward |
//! | `Linear + act + X` | GPU | the activation's output, likewise; and the pass of the activation's backward |
//! | `Linear + residual` | everywhere | a pass over the sum: the GEMM adds it |
//! | `BatchNorm + residual + act` | GPU | the passes over the sum, forward and backward |
//! | first layer of a branch `+ residual gradient` | norm, conv | a pass over the sum of both branches' gradients |
//! | `bias + Norm` | GPU | a pass: the norm sums its input gradient, which is that bias's gradient |

use std::any::Any;

use super::network::{Network, Node, ResidualNode};
use crate::base::MicroBatchSpec;
use crate::kernels::{Activation, SavedForBackward};
use crate::layers::Layer;
use crate::layers::batch_norm::BatchNorm;
use crate::layers::conv::Conv2d;
use crate::layers::linear::Linear;
use crate::layers::norm::NormLayer;
use crate::params::ParamId;

/// Layers that run as one node, and what their kernels do for the nodes around them.
#[derive(Default)]
pub struct FusedNode {
    /// In order. No output but the last is saved: the backward pass recomputes it.
    pub layers: Vec<Box<dyn Layer>>,
    /// How the output of layer `i` is recomputed for the backward pass of layer `i + 1`.
    pub recompute: Vec<Recompute>,
    /// The last layer adds the residual node's shortcut and applies its activation.
    pub adds_residual: bool,
    /// The first layer adds the gradient of the residual node's other branch to its input gradient.
    pub adds_residual_grad: bool,
    /// The first layer, a norm, accumulates the gradient of this bias of the preceding node.
    pub input_bias_grad: Option<ParamId>,
    /// The next node accumulates the bias gradient of the last layer.
    pub bias_grad_by_next: bool,
}

/// When a layer's output is recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Before the backward pass of the layer that reads it.
    BeforeBackward,
    /// Within the backward pass of the layer that computed it. The layer that reads it, a linear layer, computes its
    /// weight gradient after that.
    DuringBackward,
}

/// A layer as its concrete type, if the pass knows it.
pub enum Fusible<'a> {
    Linear(&'a Linear),
    Norm(&'a NormLayer),
    BatchNorm(&'a BatchNorm),
    Conv(&'a Conv2d),
    Other,
}

impl<'a> Fusible<'a> {
    pub fn of(layer: &'a dyn Layer) -> Self {
        let any: &dyn Any = layer;
        if let Some(linear) = any.downcast_ref() {
            return Self::Linear(linear);
        }
        if let Some(norm) = any.downcast_ref() {
            return Self::Norm(norm);
        }
        if let Some(norm) = any.downcast_ref() {
            return Self::BatchNorm(norm);
        }
        any.downcast_ref().map_or(Self::Other, Self::Conv)
    }
}

impl Network {
    /// Rewrites the network into fused nodes, for the backend and dtype of `spec`.
    pub fn fuse(mut self, spec: MicroBatchSpec) -> Self {
        let spec = MicroBatchSpec { batch: 1, ..spec };
        let mut requires_grad = false;
        for block in &mut self.blocks {
            block.nodes = fuse_nodes(std::mem::take(&mut block.nodes), spec, &mut requires_grad);
        }
        if spec.backend.is_cuda() {
            let mut nodes: Vec<&mut Node> = Vec::new();
            for (index, block) in self.blocks.iter_mut().enumerate() {
                nodes.extend(&mut block.nodes);
                // Before the backward pass of this block, the gradient of a feature is added to that of its output: no
                // fusion across.
                if self.features.iter().any(|feature| feature.student == index) {
                    fuse_bias_grads(&mut nodes);
                    nodes.clear();
                }
            }
            fuse_bias_grads(&mut nodes);
        }
        self
    }
}

/// `requires_grad` says whether the input of the nodes requires a gradient, and then whether their output does.
fn fuse_nodes(nodes: Vec<Node>, spec: MicroBatchSpec, requires_grad: &mut bool) -> Vec<Node> {
    let mut fused: Vec<Node> = Vec::with_capacity(nodes.len());
    for node in nodes {
        match (fused.last_mut(), node) {
            (_, Node::Residual(residual)) => {
                fused.push(Node::Residual(fuse_residual(residual, spec, requires_grad)));
            }
            (last, Node::Layer(layer)) => {
                // A layer without a backward pass saves nothing to recompute its output from.
                let recompute = last.as_ref().filter(|_| *requires_grad);
                let recompute = recompute.and_then(|last| last.recompute_for(layer.as_ref(), spec));
                *requires_grad |= layer.cost(spec).trains;
                match (last, recompute) {
                    (Some(last), Some(recompute)) => {
                        let last = last.as_fused();
                        last.recompute.push(recompute);
                        last.layers.push(layer);
                    }
                    _ => fused.push(Node::Layer(layer)),
                }
            }
            (_, node) => fused.push(node),
        }
    }
    fused
}

fn fuse_residual(mut residual: ResidualNode, spec: MicroBatchSpec, requires_grad: &mut bool) -> ResidualNode {
    let mut of_shortcut = *requires_grad;
    residual.branch = fuse_nodes(residual.branch, spec, requires_grad);
    residual.shortcut = fuse_nodes(residual.shortcut, spec, &mut of_shortcut);
    *requires_grad |= of_shortcut;
    let plain = residual.shortcut.is_empty() && residual.act == Activation::Identity;
    if let Some(node) = residual.branch.last_mut() {
        let adds_residual = match node.last_layer().map(Fusible::of) {
            Some(Fusible::Linear(linear)) => plain && linear.act() == Activation::Identity,
            Some(Fusible::BatchNorm(norm)) => spec.backend.is_cuda() && norm.can_add_act(residual.act),
            _ => false,
        };
        if adds_residual {
            node.as_fused().adds_residual = true;
        }
    }
    // The shortcut runs last in the backward pass; an empty one has no layer.
    let last_run = if residual.shortcut.is_empty() { &mut residual.branch } else { &mut residual.shortcut };
    if let Some(node) = last_run.first_mut() {
        let adds_residual_grad = match (node.first_layer().map(Fusible::of), &node) {
            (Some(Fusible::Norm(_) | Fusible::Conv(_)), _) => true,
            (Some(Fusible::Linear(_)), Node::Fused(fused)) => {
                fused.recompute.first() == Some(&Recompute::DuringBackward)
            }
            _ => false,
        };
        if adds_residual_grad {
            node.as_fused().adds_residual_grad = true;
        }
    }
    residual
}

/// Lets a norm accumulate the bias gradient of the node before it.
fn fuse_bias_grads(nodes: &mut [&mut Node]) {
    for node in nodes.iter_mut() {
        if let Node::Residual(residual) = node {
            for nodes in [&mut residual.branch, &mut residual.shortcut] {
                fuse_bias_grads(&mut nodes.iter_mut().collect::<Vec<_>>());
            }
        }
    }
    for i in 1..nodes.len() {
        let (before, after) = nodes.split_at_mut(i);
        if let (Some(linear), Some(norm)) = (ends_in_bias(before[i - 1]), starts_with_norm(after[0])) {
            norm.input_bias_grad = ends_in_linear(linear).and_then(Linear::bias);
            linear.as_fused().bias_grad_by_next = true;
        }
    }
}

/// The node of layers at the end of `node`, if its output gradient summed over all rows is the gradient of a bias.
fn ends_in_bias(node: &mut Node) -> Option<&mut Node> {
    if let Node::Residual(ResidualNode { branch, act, .. }) = node {
        return if *act == Activation::Identity { ends_in_bias(branch.last_mut()?) } else { None };
    }
    let linear = ends_in_linear(node)?;
    let trained = linear.bias().is_some_and(|bias| bias.trained);
    (linear.act() == Activation::Identity && trained).then_some(node)
}

fn ends_in_linear(node: &Node) -> Option<&Linear> {
    match Fusible::of(node.last_layer()?) {
        Fusible::Linear(linear) => Some(linear),
        _ => None,
    }
}

/// The node of layers at the start of `node` that computes all of its input gradient, if it starts with a norm.
fn starts_with_norm(mut node: &mut Node) -> Option<&mut FusedNode> {
    if let Node::Residual(ResidualNode { branch, shortcut, .. }) = node {
        node = if shortcut.is_empty() { branch.first_mut()? } else { shortcut.first_mut()? };
    }
    match Fusible::of(node.first_layer()?) {
        Fusible::Norm(_) => Some(node.as_fused()),
        _ => None,
    }
}

impl Node {
    fn first_layer(&self) -> Option<&dyn Layer> {
        match self {
            Self::Layer(layer) => Some(layer.as_ref()),
            Self::Fused(fused) => Some(fused.layers.first()?.as_ref()),
            Self::Residual(_) => None,
        }
    }

    fn last_layer(&self) -> Option<&dyn Layer> {
        match self {
            Self::Layer(layer) => Some(layer.as_ref()),
            Self::Fused(fused) => Some(fused.layers.last()?.as_ref()),
            Self::Residual(_) => None,
        }
    }

    /// Turns a layer into a fused node of one layer.
    fn as_fused(&mut self) -> &mut FusedNode {
        if !matches!(self, Self::Fused(_)) {
            let layers = match std::mem::replace(self, Self::Fused(FusedNode::default())) {
                Self::Layer(layer) => vec![layer],
                Self::Fused(_) | Self::Residual(_) => unreachable!("only a layer becomes a fused node"),
            };
            *self = Self::Fused(FusedNode { layers, ..FusedNode::default() });
        }
        match self {
            Self::Fused(fused) => fused,
            Self::Layer(_) | Self::Residual(_) => unreachable!("it is a fused node"),
        }
    }

    /// How the last layer of this node recomputes its output for the backward pass of `next`, if it can.
    fn recompute_for(&self, next: &dyn Layer, spec: MicroBatchSpec) -> Option<Recompute> {
        let input_saved = match self {
            Self::Fused(fused) => fused.recompute.is_empty(),
            Self::Layer(_) | Self::Residual(_) => true,
        };
        let on_gpu = spec.backend.is_cuda();
        let during = match Fusible::of(self.last_layer()?) {
            // From their input.
            Fusible::BatchNorm(norm) if input_saved && !norm.is_frozen() => false,
            Fusible::Norm(_) if on_gpu && input_saved => true,
            // From the pre-activation.
            Fusible::Linear(linear) => {
                if !on_gpu || linear.act().saved_for_backward() != SavedForBackward::Input {
                    return None;
                }
                true
            }
            _ => return None,
        };
        if !next.cost(spec).saves_input {
            return None;
        }
        Some(match Fusible::of(next) {
            Fusible::Linear(_) if during => Recompute::DuringBackward,
            _ => Recompute::BeforeBackward,
        })
    }
}

impl FusedNode {
    /// One line for a reader: the layers, and what is fused.
    pub fn describe(&self) -> String {
        let names: Vec<&str> = self.layers.iter().map(|layer| layer.name()).collect();
        let mut line = names.join(" + ");
        for (fused, what) in [
            (self.adds_residual, "residual"),
            (self.adds_residual_grad, "residual gradient"),
            (self.input_bias_grad.is_some(), "bias gradient of the layer before"),
        ] {
            if fused {
                line += " + ";
                line += what;
            }
        }
        line
    }
}
