//! The forward pass: runs nodes and decides what they save.

use candle_core::Tensor;

use super::{Executor, Node, ReservedTensor, ResidualNode, SavedNode, StepResult};
use crate::base::Backend;
use crate::base::Role;
use crate::kernels::{Activation, SavedForBackward, add};
use crate::layers::{Layer, Mode, RecomputeSource};

impl Executor<'_> {
    /// Runs the nodes on `x`. With `add_act` = (residual, act), returns `act(output + residual)`.
    pub(super) fn forward(
        &self,
        nodes: &[Node],
        mut x: ReservedTensor,
        save: bool,
        mode: Mode,
        add_act: Option<(&ReservedTensor, Activation)>,
    ) -> StepResult<(ReservedTensor, Vec<SavedNode>)> {
        let mut saved_nodes = Vec::with_capacity(if save { nodes.len() } else { 0 });
        for (i, node) in nodes.iter().enumerate() {
            let add_act = add_act.filter(|_| i + 1 == nodes.len());
            let add_act = add_act.and_then(|(onto, act)| onto.value.as_ref().map(|onto| (onto, act)));
            let (y, saved_node) = match node {
                Node::Layer(layer) => {
                    let input_recomputed = is_recomputable(&nodes[..i], &saved_nodes, self.spec.backend);
                    self.layer_forward(layer.as_ref(), x, (save, input_recomputed), mode, add_act)?
                }
                Node::Residual(residual) => {
                    let (y, saved_node) = self.residual_forward(residual, x, save, mode)?;
                    if let (Some(y), Some((addend, act))) = (&y.value, add_act) {
                        add::inplace(y, addend, act)?;
                    }
                    (y, saved_node)
                }
            };
            saved_nodes.extend(saved_node);
            x = y;
        }
        Ok((x, saved_nodes))
    }

    fn layer_forward(
        &self,
        layer: &dyn Layer,
        x: ReservedTensor,
        (save, input_recomputed): (bool, bool),
        mode: Mode,
        add_act: Option<(&Tensor, Activation)>,
    ) -> StepResult<(ReservedTensor, Option<SavedNode>)> {
        let cost = layer.cost(self.spec);
        let input_recomputed = input_recomputed && cost.saves_input;
        let output_reservation = self.reserve(Role::Activations, layer.name(), cost.output)?;
        let saved_reservation = self.reserve(Role::Activations, layer.name(), cost.saved)?;
        let _work = self.reserve(Role::Workspace, layer.name(), cost.forward_workspace)?;
        let (value, saved) = match (self.pass_in_mode(mode), &x.value) {
            (Some(pass), Some(x)) => {
                let (y, mut saved) = match add_act {
                    Some((residual, act)) => layer.forward_add_act(x, residual, act, &pass)?,
                    None => layer.forward(x, &pass)?,
                };
                if input_recomputed {
                    saved.0.remove(0);
                }
                (Some(y), Some(saved))
            }
            _ => (None, None),
        };
        let y = ReservedTensor::new(
            value,
            if cost.output_is_view { x.reservation.clone() } else { output_reservation },
        );
        let saved_node = save.then(|| SavedNode::Layer {
            saved,
            input_recomputed,
            _reservations: [
                saved_reservation,
                x.reservation.clone().filter(|_| cost.saves_input && !input_recomputed),
                y.reservation.clone().filter(|_| cost.saves_output),
            ],
        });
        Ok((y, saved_node))
    }

    fn residual_forward(
        &self,
        residual: &ResidualNode,
        x: ReservedTensor,
        save: bool,
        mode: Mode,
    ) -> StepResult<(ReservedTensor, Option<SavedNode>)> {
        // Unless the branch's last layer saves its output, nobody else reads it: the sum can overwrite it.
        let in_place = !self.saves_output(&residual.branch);
        let plain = residual.shortcut.is_empty() && residual.act == Activation::Identity;
        if in_place && (plain || self.fuses_add_act(residual)) {
            let (s, shortcut) = self.forward(&residual.shortcut, x.clone(), save, mode, None)?;
            let add_act = Some((&s, residual.act));
            let (y, branch) = self.forward(&residual.branch, x, save, mode, add_act)?;
            let output = (residual.act != Activation::Identity).then(|| y.clone());
            return Ok((y, save.then_some(SavedNode::Residual { branch, shortcut, output })));
        }
        let (b, branch) = self.forward(&residual.branch, x.clone(), save, mode, None)?;
        let (s, shortcut) = self.forward(&residual.shortcut, x, save, mode, None)?;
        let reservation = match in_place {
            true => b.reservation.clone(),
            false => self.reserve(
                Role::Activations,
                &residual.name,
                self.spec.bytes(residual.output_shape.iter().product()),
            )?,
        };
        let value = match (&b.value, &s.value) {
            (Some(b), Some(s)) if in_place => Some(add::inplace(b, s, residual.act)?),
            (Some(b), Some(s)) => Some(add::forward(b, s, residual.act)?),
            _ => None,
        };
        let y = ReservedTensor::new(value, reservation);
        let output = (residual.act != Activation::Identity).then(|| y.clone());
        Ok((y, save.then_some(SavedNode::Residual { branch, shortcut, output })))
    }

    /// Whether the branch's last layer fuses the sum and its activation.
    pub(super) fn fuses_add_act(&self, residual: &ResidualNode) -> bool {
        match residual.branch.last() {
            Some(Node::Layer(layer)) => layer.fuses_add_act(residual.act, self.spec.backend),
            _ => false,
        }
    }

    /// Whether the output of these nodes is saved by the node that computed it, or is their input.
    fn saves_output(&self, nodes: &[Node]) -> bool {
        match nodes.last() {
            None => true,
            Some(Node::Layer(layer)) => {
                let cost = layer.cost(self.spec);
                cost.saves_output || (cost.output_is_view && self.saves_output(&nodes[..nodes.len() - 1]))
            }
            Some(Node::Residual(residual)) => residual.act.saved_for_backward() == SavedForBackward::Output,
        }
    }
}

/// Whether the output of the last of these nodes can be recomputed from what it saved.
fn is_recomputable(nodes: &[Node], saved_nodes: &[SavedNode], backend: Backend) -> bool {
    match (nodes.last(), saved_nodes.last()) {
        (Some(Node::Layer(layer)), Some(SavedNode::Layer { input_recomputed, .. })) => {
            match layer.recompute_source(backend) {
                RecomputeSource::Unsupported => false,
                RecomputeSource::InputAndSaved => !input_recomputed,
                RecomputeSource::SavedOnly => true,
            }
        }
        _ => false,
    }
}
