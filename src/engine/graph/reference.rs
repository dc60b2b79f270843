//! The reference backend: a pass that wraps every layer of a network in a [`ReferenceLayer`].

use super::network::{LayerBlock, Network, Node, ResidualNode};
use crate::layers::Layer;
use crate::layers::reference::ReferenceLayer;

impl Network {
    /// The network on the reference backend; takes the place of the fusion pass.
    pub fn on_reference(self) -> Self {
        let wrap_block = |block: LayerBlock| LayerBlock { nodes: wrap(block.nodes), ..block };
        Self { blocks: self.blocks.into_iter().map(wrap_block).collect(), ..self }
    }
}

fn wrap(nodes: Vec<Node>) -> Vec<Node> {
    let wrap_node = |node| match node {
        Node::Layer(layer) => Node::Layer(Box::new(ReferenceLayer(layer)) as Box<dyn Layer>),
        Node::Residual(ResidualNode { name, branch, shortcut, act, output_shape }) => {
            let (branch, shortcut) = (wrap(branch), wrap(shortcut));
            Node::Residual(ResidualNode { name, branch, shortcut, act, output_shape })
        }
        Node::Fused(fused) => unreachable!("{}: the fusion pass ran first", fused.describe()),
    };
    nodes.into_iter().map(wrap_node).collect()
}
