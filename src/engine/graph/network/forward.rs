//! The forward pass: runs nodes and decides what they save.

use candle_core::Tensor;

use super::{Executor, Node, ReservedTensor, ResidualNode, SavedLayer, SavedNode, SavedResidual, StepResult};
use crate::base::Role;
use crate::graph::node_timer;
use crate::kernels::{Activation, SavedForBackward, add};
use crate::layers::{Layer, Mode, PassContext, SavedTensors};

/// The end of a residual node, `act(branch + shortcut)`, that the branch's last node fuses.
#[derive(Clone, Copy)]
pub(super) struct ResidualEnd<'a> {
    pub shortcut: &'a ReservedTensor,
    pub act: Activation,
}

impl Executor<'_> {
    /// Runs the nodes on `x`; the last one fuses `end`.
    pub(super) fn forward(
        &self,
        nodes: &[Node],
        mut x: ReservedTensor,
        save: bool,
        mode: Mode,
        end: Option<ResidualEnd>,
    ) -> StepResult<(ReservedTensor, Vec<SavedNode>)> {
        let mut saved_nodes = Vec::with_capacity(if save { nodes.len() } else { 0 });
        for (i, node) in nodes.iter().enumerate() {
            let (y, saved) = match node {
                Node::Layer(layer) => {
                    let (y, saved) = self.timed(node, mode.into(), || {
                        self.layer_forward(layer.as_ref(), x, mode, |x, pass| layer.forward(x, pass))
                    })?;
                    (y, SavedNode::Layer(saved))
                }
                Node::Fused(fused) => {
                    let end = end.filter(|_| i + 1 == nodes.len());
                    let (y, saved) =
                        self.timed(node, mode.into(), || self.fused_forward(fused, x, save, mode, end))?;
                    (y, SavedNode::Fused(saved))
                }
                Node::Residual(residual) => {
                    let (y, saved) = self.residual_forward(residual, x, save, mode)?;
                    (y, SavedNode::Residual(saved))
                }
            };
            x = y;
            if save && x.requires_grad {
                saved_nodes.push(saved);
            }
        }
        Ok((x, saved_nodes))
    }

    /// Runs `forward` on `x` with the memory that the layer's cost states.
    pub(super) fn layer_forward(
        &self,
        layer: &dyn Layer,
        x: ReservedTensor,
        mode: Mode,
        forward: impl FnOnce(&Tensor, &PassContext) -> candle_core::Result<(Tensor, SavedTensors)>,
    ) -> StepResult<(ReservedTensor, SavedLayer)> {
        let cost = layer.cost(self.spec);
        let output_reservation = self.reserve(Role::Activations, layer.name(), cost.output)?;
        let saved_reservation = self.reserve(Role::Activations, layer.name(), cost.saved)?;
        let _work = self.reserve(Role::Workspace, layer.name(), cost.forward_workspace)?;
        let weights = self.dequantize(|| layer.params())?;
        let pass = self.pass_in_mode(mode).map(|pass| weights.in_pass(pass));
        let (value, saved) = match (pass, &x.value) {
            (Some(pass), Some(x)) => forward(x, &pass).map(|(y, saved)| (Some(y), Some(saved)))?,
            _ => (None, None),
        };
        let reservation = if cost.output_is_view { x.reservation.clone() } else { output_reservation };
        let requires_grad = x.requires_grad || cost.trains;
        let saved = SavedLayer {
            saved,
            needs_input_grad: x.requires_grad,
            _reservations: [
                saved_reservation,
                x.reservation.filter(|_| cost.saves_input),
                reservation.clone().filter(|_| cost.saves_output),
            ],
        };
        Ok((ReservedTensor { value, reservation, requires_grad }, saved))
    }

    fn residual_forward(
        &self,
        residual: &ResidualNode,
        x: ReservedTensor,
        save: bool,
        mode: Mode,
    ) -> StepResult<(ReservedTensor, SavedResidual)> {
        let needs_input_grad = x.requires_grad;
        let (y, branch, shortcut) = match residual.is_fused() {
            true => {
                let (s, shortcut) = self.forward(&residual.shortcut, x.clone(), save, mode, None)?;
                let end = ResidualEnd { shortcut: &s, act: residual.act };
                let (mut y, branch) = self.forward(&residual.branch, x, save, mode, Some(end))?;
                y.requires_grad |= s.requires_grad;
                (y, branch, shortcut)
            }
            false => {
                let (b, branch) = self.forward(&residual.branch, x.clone(), save, mode, None)?;
                let (s, shortcut) = self.forward(&residual.shortcut, x, save, mode, None)?;
                let name = || residual.name.clone();
                let y = node_timer::time(name, mode.into(), self.ledger, || self.add(residual, b, s))?;
                (y, branch, shortcut)
            }
        };
        let output = (y.requires_grad && residual.act != Activation::Identity).then(|| y.clone());
        Ok((y, SavedResidual { branch, shortcut, output, needs_input_grad }))
    }

    /// `act(branch + shortcut)`. The sum overwrites the branch's output, unless that is saved.
    fn add(
        &self,
        residual: &ResidualNode,
        branch: ReservedTensor,
        shortcut: ReservedTensor,
    ) -> StepResult<ReservedTensor> {
        let requires_grad = branch.requires_grad || shortcut.requires_grad;
        let in_place = !self.saves_output(&residual.branch);
        let reservation = match in_place {
            true => branch.reservation,
            false => {
                let bytes = self.spec.bytes(residual.output_shape.iter().product());
                self.reserve(Role::Activations, &residual.name, bytes)?
            }
        };
        let _work = self.reserve_pointwise(&residual.name, &residual.output_shape)?;
        let value = match (&branch.value, &shortcut.value) {
            (Some(b), Some(s)) if in_place => Some(add::inplace(b, s, residual.act)?),
            (Some(b), Some(s)) => Some(add::forward(b, s, residual.act)?),
            _ => None,
        };
        Ok(ReservedTensor { value, reservation, requires_grad })
    }

    /// Whether the output of these nodes is saved by the node that computed it, or is their input.
    fn saves_output(&self, nodes: &[Node]) -> bool {
        let Some((last, before)) = nodes.split_last() else { return true };
        let layer = match last {
            Node::Layer(layer) => layer,
            Node::Fused(fused) => match fused.layers.last() {
                Some(layer) => layer,
                None => return true,
            },
            Node::Residual(residual) => {
                return residual.act.saved_for_backward() == SavedForBackward::Output;
            }
        };
        let cost = layer.cost(self.spec);
        cost.saves_output || (cost.output_is_view && self.saves_output(before))
    }
}
