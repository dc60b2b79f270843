//! Where a network is quantized: at its input, and after every layer that computes new values. Max pooling, flattening
//! and dropout only pass values on.
//!
//! A layer with batch norm has one point, after the norm, which is folded into it. An activation that does more than
//! clamp becomes a layer with a point before and after it, since a runtime computes it as an operator of its own.

use std::any::Any;

use super::network::{LayerBlock, Network, Node};
use crate::kernels::{Activation, ClampActivation};
use crate::layers::Layer;
use crate::layers::activation::ActivationLayer;
use crate::layers::batch_norm::BatchNorm;
use crate::layers::categorical_embedding::CategoricalEmbedding;
use crate::layers::conv::Conv2d;
use crate::layers::dropout::Dropout;
use crate::layers::flatten::Flatten;
use crate::layers::linear::Linear;
use crate::layers::max_pool::MaxPool;

/// The point of the network's input.
pub const INPUT: &str = "input";

/// Builds the layer of a point, from its name and the shape of one sample; `None` leaves the point out.
pub type MakePoint<'a> = dyn FnMut(&str, &[usize]) -> Option<Box<dyn Layer>> + 'a;

impl Network {
    /// Inserts a layer at every point of a network whose samples have this shape, before it is fused. The logits, which
    /// the loss computes, have none.
    pub fn insert_points(&mut self, input: &[usize], make: &mut MakePoint) {
        if self.blocks.is_empty() {
            // The only layer is that of the loss, which reads the network's input.
            let nodes: Vec<Node> = make(INPUT, input).into_iter().map(Node::Layer).collect();
            if !nodes.is_empty() {
                self.blocks.push(LayerBlock { name: INPUT.to_owned(), nodes, recompute_rank: 0 });
            }
            return;
        }
        let embeds =
            self.layers().first().is_some_and(|layer| (*layer as &dyn Any).is::<CategoricalEmbedding>());
        for (at, block) in self.blocks.iter_mut().enumerate() {
            let mut nodes = Vec::new();
            // Categories are indices, which do not round.
            if at == 0 && !embeds {
                nodes.extend(make(INPUT, input).map(Node::Layer));
            }
            nodes.extend(with_points(std::mem::take(&mut block.nodes), make));
            block.nodes = nodes;
        }
    }
}

fn with_points(nodes: Vec<Node>, make: &mut MakePoint) -> Vec<Node> {
    let mut inserted = Vec::new();
    let mut nodes = nodes.into_iter().peekable();
    while let Some(node) = nodes.next() {
        match node {
            Node::Layer(mut layer) => {
                let (name, shape) = (layer.name().to_owned(), layer.output_shape());
                let any: &mut dyn Any = layer.as_mut();
                let hands_on = any.is::<MaxPool>() || any.is::<Flatten>() || any.is::<Dropout>();
                let is_conv = any.is::<Conv2d>();
                let act = match is_conv {
                    true => any.downcast_mut::<Conv2d>().map(|conv| &mut conv.act),
                    false => any.downcast_mut::<Linear>().map(Linear::act_mut),
                };
                let act = act.and_then(split_activation);
                inserted.push(Node::Layer(layer));
                let folds =
                    is_conv && matches!(nodes.peek(), Some(Node::Layer(next)) if is_norm(next.as_ref()));
                if hands_on || (folds && act.is_none()) {
                    continue;
                }
                inserted.extend(make(&name, &shape).map(Node::Layer));
                if let Some(act) = act {
                    let name = format!("{name}.activation");
                    let layer = ActivationLayer { name: name.clone(), shape: shape.clone(), act };
                    inserted.push(Node::Layer(Box::new(layer)));
                    inserted.extend(make(&name, &shape).map(Node::Layer));
                }
            }
            Node::Residual(mut residual) => {
                residual.branch = with_points(residual.branch, make);
                residual.shortcut = with_points(residual.shortcut, make);
                let point = make(&residual.name, &residual.output_shape);
                inserted.push(Node::Residual(residual));
                inserted.extend(point.map(Node::Layer));
            }
            Node::Fused(_) => inserted.push(node),
        }
    }
    inserted
}

fn is_norm(layer: &dyn Layer) -> bool {
    (layer as &dyn Any).is::<BatchNorm>()
}

/// Takes an activation that does more than clamp out of its layer.
fn split_activation(act: &mut Activation) -> Option<Activation> {
    match ClampActivation::from_activation(*act) {
        Some(_) => None,
        None => Some(std::mem::replace(act, Activation::Identity)),
    }
}
