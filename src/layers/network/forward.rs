//! The forward pass: what nodes make, and what is kept of them.

use candle_core::Tensor;

use super::{Act, Node, Residual, Step, Trace, Walk};
use crate::kernels::{Activation, Reads, add};
use crate::layers::{Layer, Mode, On, Remakes};
use crate::memory::Role;

impl Walk<'_> {
    /// What the nodes make of `x`; with something `onto` it, an activation of the sum.
    pub(super) fn forward(
        &self,
        nodes: &[Node],
        mut x: Act,
        keep: bool,
        mode: Mode,
        onto: Option<(&Act, Activation)>,
    ) -> Step<(Act, Vec<Trace>)> {
        let mut traces = Vec::with_capacity(if keep { nodes.len() } else { 0 });
        for (i, node) in nodes.iter().enumerate() {
            let onto = onto.filter(|_| i + 1 == nodes.len());
            let onto = onto.and_then(|(onto, act)| onto.value.as_ref().map(|onto| (onto, act)));
            let (y, trace) = match node {
                Node::Layer(layer) => {
                    let remade = made_again(&nodes[..i], &traces, self.at.on);
                    self.layer_forward(layer.as_ref(), x, (keep, remade), mode, onto)?
                }
                Node::Residual(residual) => {
                    let (y, trace) = self.residual_forward(residual, x, keep, mode)?;
                    if let (Some(y), Some((onto, act))) = (&y.value, onto) {
                        add::into(y, onto, act)?;
                    }
                    (y, trace)
                }
            };
            traces.extend(trace);
            x = y;
        }
        Ok((x, traces))
    }

    fn layer_forward(
        &self,
        layer: &dyn Layer,
        x: Act,
        (keep, remade): (bool, bool),
        mode: Mode,
        onto: Option<(&Tensor, Activation)>,
    ) -> Step<(Act, Option<Trace>)> {
        let cost = layer.cost(self.at);
        let remade = remade && cost.keeps_input;
        let own = self.hold(Role::Activations, layer.name(), cost.output)?;
        let saved_hold = self.hold(Role::Activations, layer.name(), cost.saved)?;
        let _work = self.hold(Role::Workspace, layer.name(), cost.forward)?;
        let (value, saved) = match (self.pass(mode), &x.value) {
            (Some(pass), Some(x)) => {
                let (y, mut saved) = match onto {
                    Some((onto, act)) => layer.forward_onto(x, onto, act, &pass)?,
                    None => layer.forward(x, &pass)?,
                };
                if remade {
                    saved.0.remove(0);
                }
                (Some(y), Some(saved))
            }
            _ => (None, None),
        };
        let y = Act::new(value, if cost.view { x.hold.clone() } else { own });
        let trace = keep.then(|| Trace::Layer {
            saved,
            remade,
            _holds: [
                saved_hold,
                x.hold.clone().filter(|_| cost.keeps_input && !remade),
                y.hold.clone().filter(|_| cost.keeps_output),
            ],
        });
        Ok((y, trace))
    }

    fn residual_forward(
        &self,
        residual: &Residual,
        x: Act,
        keep: bool,
        mode: Mode,
    ) -> Step<(Act, Option<Trace>)> {
        // The branch's output is nobody else's unless its last layer keeps it: the sum goes there.
        let in_place = !self.keeps_output(&residual.branch);
        let plain = residual.shortcut.is_empty() && residual.act == Activation::Identity;
        if in_place && (plain || self.joins(residual)) {
            let (s, shortcut) = self.forward(&residual.shortcut, x.clone(), keep, mode, None)?;
            let onto = Some((&s, residual.act));
            let (y, branch) = self.forward(&residual.branch, x, keep, mode, onto)?;
            let output = (residual.act != Activation::Identity).then(|| y.clone());
            return Ok((y, keep.then_some(Trace::Residual { branch, shortcut, output })));
        }
        let (b, branch) = self.forward(&residual.branch, x.clone(), keep, mode, None)?;
        let (s, shortcut) = self.forward(&residual.shortcut, x, keep, mode, None)?;
        let hold = match in_place {
            true => b.hold.clone(),
            false => {
                self.hold(Role::Activations, &residual.name, self.at.bytes(residual.output.iter().product()))?
            }
        };
        let value = match (&b.value, &s.value) {
            (Some(b), Some(s)) if in_place => Some(add::into(b, s, residual.act)?),
            (Some(b), Some(s)) => Some(add::forward(b, s, residual.act)?),
            _ => None,
        };
        let y = Act::new(value, hold);
        let output = (residual.act != Activation::Identity).then(|| y.clone());
        Ok((y, keep.then_some(Trace::Residual { branch, shortcut, output })))
    }

    /// Whether the branch's last layer makes the sum and its activation in passes of its own.
    pub(super) fn joins(&self, residual: &Residual) -> bool {
        match residual.branch.last() {
            Some(Node::Layer(layer)) => layer.joins(residual.act, self.at.on),
            _ => false,
        }
    }

    /// Whether the output of these nodes is kept by the one that made it, or is their input.
    fn keeps_output(&self, nodes: &[Node]) -> bool {
        match nodes.last() {
            None => true,
            Some(Node::Layer(layer)) => {
                let cost = layer.cost(self.at);
                cost.keeps_output || (cost.view && self.keeps_output(&nodes[..nodes.len() - 1]))
            }
            Some(Node::Residual(residual)) => residual.act.reads() == Reads::Output,
        }
    }
}

/// Whether the output of the last of these nodes can be made again from what it kept.
fn made_again(nodes: &[Node], traces: &[Trace], on: On) -> bool {
    match (nodes.last(), traces.last()) {
        (Some(Node::Layer(layer)), Some(Trace::Layer { remade, .. })) => match layer.remakes(on) {
            Remakes::Never => false,
            Remakes::WithInput => !remade,
            Remakes::Alone => true,
        },
        _ => false,
    }
}
