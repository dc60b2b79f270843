//! The backward pass: propagates gradients from the last node to the first.

use super::{Executor, Node, ReservedTensor, ResidualNode, SavedLayer, SavedNode, SavedResidual, StepResult};
use crate::base::Role;
use crate::graph::node_timer::NodePass;
use crate::kernels::{self, Activation, add};
use crate::layers::{Layer, Mode};

/// What surrounds some nodes in a residual node.
#[derive(Default)]
pub(super) struct BackwardContext<'a> {
    /// The gradient that reaches the nodes' input along another branch; it is added to theirs.
    pub residual_grad: Option<&'a ReservedTensor>,
    /// The activation after the sum, with its output, if the last node fuses it.
    pub output_act: Option<(ReservedTensor, Activation)>,
}

impl Executor<'_> {
    /// Returns the gradient of the nodes' input, if it requires one. Drops each saved node as soon as it is used.
    pub(super) fn backward(
        &self,
        nodes: &[Node],
        mut saved_nodes: Vec<SavedNode>,
        mut dy: ReservedTensor,
        mut ctx: BackwardContext,
    ) -> StepResult<Option<ReservedTensor>> {
        for (i, node) in nodes.iter().enumerate().rev() {
            let residual_grad = ctx.residual_grad.filter(|_| i == 0);
            // Only the last node needs `output_act`; taking it here releases it early.
            let node_ctx = BackwardContext { residual_grad, output_act: ctx.output_act.take() };
            let dx = match (node, saved_nodes.pop()) {
                (Node::Layer(layer), Some(SavedNode::Layer(saved))) => {
                    self.timed(node, NodePass::Backward, || self.layer_backward(layer.as_ref(), saved, dy))?
                }
                (Node::Fused(fused), Some(SavedNode::Fused(saved))) => {
                    self.timed(node, NodePass::Backward, || self.fused_backward(fused, saved, dy, node_ctx))?
                }
                (Node::Residual(residual), Some(SavedNode::Residual(saved))) => {
                    self.residual_backward(residual, saved, dy)?
                }
                // Neither this node nor any before it has a trained parameter.
                _ => None,
            };
            let Some(dx) = dx else { return Ok(None) };
            let adds_residual_grad = matches!(node, Node::Fused(fused) if fused.adds_residual_grad);
            if let (Some(dx), Some(ReservedTensor { value: Some(other), .. }), false) =
                (&dx.value, residual_grad, adds_residual_grad)
            {
                add::inplace(dx, other, Activation::Identity)?;
            }
            dy = dx;
        }
        Ok(Some(dy))
    }

    fn layer_backward(
        &self,
        layer: &dyn Layer,
        SavedLayer { saved, needs_input_grad, _reservations }: SavedLayer,
        dy: ReservedTensor,
    ) -> StepResult<Option<ReservedTensor>> {
        let cost = layer.cost(self.spec);
        let reservation = match needs_input_grad && !cost.output_is_view {
            true => self.reserve(Role::Activations, layer.name(), cost.input_grad)?,
            false => dy.reservation.clone(),
        };
        let workspace = cost.workspace_of_backward(needs_input_grad);
        let _work = self.reserve(Role::Workspace, layer.name(), workspace)?;
        let value = match (self.pass_in_mode(Mode::Train), saved, dy.value) {
            (Some(pass), Some(saved), Some(dy)) => layer.backward(saved, dy, &pass, needs_input_grad)?,
            _ => None,
        };
        Ok(needs_input_grad.then_some(ReservedTensor { value, reservation, requires_grad: true }))
    }

    fn residual_backward(
        &self,
        residual: &ResidualNode,
        SavedResidual { branch, shortcut, output, needs_input_grad }: SavedResidual,
        dy: ReservedTensor,
    ) -> StepResult<Option<ReservedTensor>> {
        let _work = self.reserve_pointwise(&residual.name, &residual.output_shape)?;
        let mut output_act = output.map(|y| (y, residual.act));
        if !residual.is_fused() {
            if let (Some((ReservedTensor { value: Some(y), .. }, act)), Some(dy)) = (&output_act, &dy.value) {
                add::activation_backward_inplace(y, dy, *act)?;
            }
            output_act = None;
        }
        let dy_branch = match !branch.is_empty() && self.overwrites_dy(&residual.branch) {
            true => {
                let bytes = self.spec.bytes(residual.output_shape.iter().product());
                let reservation = self.reserve(Role::Activations, &residual.name, bytes)?;
                let value = dy.value.as_ref().map(kernels::copy).transpose()?;
                ReservedTensor { value, reservation, requires_grad: true }
            }
            false => dy.clone(),
        };
        if residual.shortcut.is_empty() {
            let ctx = BackwardContext { residual_grad: Some(&dy).filter(|_| needs_input_grad), output_act };
            return self.backward(&residual.branch, branch, dy_branch, ctx);
        }
        let ctx = BackwardContext { residual_grad: None, output_act };
        let dx_branch = self.backward(&residual.branch, branch, dy_branch, ctx)?;
        let ctx = BackwardContext { residual_grad: dx_branch.as_ref(), output_act: None };
        self.backward(&residual.shortcut, shortcut, dy, ctx)
    }

    /// Whether the backward pass of these nodes overwrites the gradient it takes.
    fn overwrites_dy(&self, nodes: &[Node]) -> bool {
        let layer = match nodes.last() {
            None => return false,
            Some(Node::Layer(layer)) => Some(layer),
            Some(Node::Fused(fused)) => fused.layers.last(),
            Some(Node::Residual(residual)) => {
                return residual.act != Activation::Identity || self.overwrites_dy(&residual.branch);
            }
        };
        layer.is_some_and(|layer| layer.cost(self.spec).overwrites_dy)
    }
}
