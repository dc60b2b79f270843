//! The reference backend: a pass that wraps every layer of a network in a [`ReferenceLayer`].

use super::network::{LayerBlock, Network, Node, ResidualNode};
use crate::base::MicroBatchSpec;
use crate::layers::Layer;
use crate::layers::reference::ReferenceLayer;
use crate::params::FlatLayout;

impl Network {
    /// The network as `spec.backend` runs it: on the reference backend, or fused.
    pub fn for_backend(self, spec: MicroBatchSpec, params: &FlatLayout) -> Self {
        match spec.backend.is_reference() {
            true => self.on_reference(params),
            false => self.fuse(spec),
        }
    }

    /// The network on the reference backend; takes the place of the fusion pass.
    pub fn on_reference(self, params: &FlatLayout) -> Self {
        let wrap_block = |block: LayerBlock| LayerBlock { nodes: wrap(block.nodes, params), ..block };
        Self { blocks: self.blocks.into_iter().map(wrap_block).collect(), ..self }
    }
}

fn wrap(nodes: Vec<Node>, params: &FlatLayout) -> Vec<Node> {
    let wrap_node = |node| match node {
        Node::Layer(layer) => Node::Layer(Box::new(ReferenceLayer::new(layer, params)) as Box<dyn Layer>),
        Node::Residual(ResidualNode { name, branch, shortcut, act, output_shape }) => {
            let (branch, shortcut) = (wrap(branch, params), wrap(shortcut, params));
            Node::Residual(ResidualNode { name, branch, shortcut, act, output_shape })
        }
        Node::Fused(fused) => unreachable!("{}: the fusion pass ran first", fused.describe()),
    };
    nodes.into_iter().map(wrap_node).collect()
}
