//! The backward pass: gradients from the last node to the first, with what lies on their way done in the same passes.
//!
//! An output that was not kept is made again where a pass reads what it is made of anyway: the layer that needs it for its
//! weights' gradient waits for it.

use std::sync::Arc;

use candle_core::Tensor;

use super::{Act, Node, Residual, Step, Trace, Walk};
use crate::kernels::{self, Activation, add};
use crate::layers::{Along, Early, Layer, Mode, Pass, Saved};
use crate::memory::{Reservation, Role};
use crate::params::ParamId;

/// What a gradient meets on its way back through nodes.
#[derive(Default)]
pub(super) struct Way<'a> {
    /// The gradient of their input by another way, which is added to theirs.
    pub onto: Option<&'a Act>,
    /// An activation that came after them, and its output.
    pub through: Option<(Act, Activation)>,
    /// To whose gradient the sums over all rows of their input's gradient may be added.
    pub sums: Option<ParamId>,
}

/// A layer whose input is made again while the gradient goes through the layer before, and the gradient it was given.
struct Late<'a> {
    layer: &'a dyn Layer,
    dy: Act,
}

impl Walk<'_> {
    /// The gradient of the nodes' input, where wanted. Traces are given back as they are used.
    pub(super) fn backward(
        &self,
        nodes: &[Node],
        mut traces: Vec<Trace>,
        mut dy: Act,
        want: bool,
        mut way: Way,
    ) -> Step<Option<Act>> {
        let mut late: Option<Late> = None;
        for (i, node) in nodes.iter().enumerate().rev() {
            // The last node alone is given it, and lets it go.
            let (through, awaited) = (way.through.take(), late.take());
            let onto = way.onto.filter(|_| want && i == 0).and_then(|onto| onto.value.as_ref());
            let (want, trace) = (want || i > 0, traces.pop());
            let sums = if i == 0 { way.sums } else { adds_rows(&nodes[..i]) }.filter(|_| want);
            let dx = match (node, trace) {
                (Node::Layer(layer), Some(Trace::Layer { mut saved, remade, _holds })) => {
                    let (cost, sums) = (layer.cost(self.at), sums.filter(|_| layer.sums(self.at.on)));
                    let waits = remade && self.waits(layer.as_ref(), &nodes[..i]);
                    let _input = match remade && !waits {
                        true => self.make_again(&nodes[..i], &traces, &mut saved)?,
                        false => None,
                    };
                    let own = match want && !cost.view {
                        true => self.hold(Role::Activations, layer.name(), cost.input)?,
                        false => None,
                    };
                    let _work = self.hold(Role::Workspace, layer.name(), cost.backward)?;
                    let hold = if cost.view { dy.hold.clone() } else { own };
                    let through = through.as_ref().and_then(|(y, act)| Some((y.value.as_ref()?, *act)));
                    let pass = self.pass(Mode::Train);
                    let before = match (&pass, nodes[..i].last(), traces.last()) {
                        (Some(pass), Some(Node::Layer(layer)), Some(Trace::Layer { saved, .. })) if waits => {
                            saved.as_ref().and_then(|saved| layer.met(saved, pass))
                        }
                        _ => None,
                    };
                    let along = Along { sums, summed: dy.summed, before, through: dy.through };
                    let pass = pass.as_ref().map(|pass| Pass { along, ..*pass });
                    let (mut made, mut went) = (None, false);
                    let value = match (&pass, saved, &mut dy.value) {
                        (Some(pass), Some(saved), Some(dy)) if waits || awaited.is_some() => {
                            if let Some((y, act)) = through {
                                add::through(y, dy, act)?;
                            }
                            let again = awaited.is_some();
                            let Early { dx, y, through } =
                                layer.backward_early(saved, dy, pass, (want, onto), again)?;
                            (made, went) = (y, through);
                            dx
                        }
                        (Some(pass), Some(saved), given) => {
                            let Some(dy) = given.take() else { return Ok(None) };
                            match (through, onto) {
                                (Some(through), None) => {
                                    layer.backward_through(saved, dy, through, pass, want)?
                                }
                                (None, Some(onto)) => layer.backward_onto(saved, dy, pass, onto)?,
                                (Some((y, act)), Some(onto)) => {
                                    add::through(y, &dy, act)?;
                                    layer.backward_onto(saved, dy, pass, onto)?
                                }
                                (None, None) => layer.backward(saved, dy, pass, want)?,
                            }
                        }
                        _ => None,
                    };
                    if let (Some(late), Some(pass)) = (awaited, &pass) {
                        late.make(made, pass)?;
                    }
                    if waits {
                        late = Some(Late { layer: layer.as_ref(), dy: std::mem::take(&mut dy) });
                    }
                    want.then_some(Act { value, hold, summed: went || sums.is_some(), through: went })
                }
                (Node::Residual(residual), Some(Trace::Residual { branch, shortcut, output })) => {
                    // What is added afterwards would not be in the sums.
                    let sums = sums.filter(|_| onto.is_none());
                    let kept = (branch, shortcut, output);
                    let dx = self.residual_backward(residual, kept, dy, want, sums)?;
                    if let (Some(Act { value: Some(dx), .. }), Some(onto)) = (&dx, onto) {
                        add::into(dx, onto, Activation::Identity)?;
                    }
                    dx
                }
                _ => None,
            };
            match dx {
                Some(dx) => dy = dx,
                None => return Ok(None),
            }
        }
        Ok(Some(dy))
    }

    /// Whether a layer's input is made again on the way of the last of these nodes, after the layer's own gradient.
    fn waits(&self, layer: &dyn Layer, before: &[Node]) -> bool {
        let makes = matches!(before.last(), Some(Node::Layer(l)) if l.remakes_on_the_way(self.at.on));
        makes && layer.waits(self.at.on)
    }

    /// Puts the output of the last of `nodes`, made again, in front of what the layer after it saved.
    fn make_again(
        &self,
        nodes: &[Node],
        traces: &[Trace],
        into: &mut Option<Saved>,
    ) -> Step<Option<Arc<Reservation>>> {
        let (Some(Node::Layer(layer)), Some(Trace::Layer { saved, .. })) = (nodes.last(), traces.last())
        else {
            return Ok(None);
        };
        let hold = self.hold(Role::Activations, layer.name(), layer.cost(self.at).output)?;
        if let (Some(pass), Some(saved), Some(into)) = (self.pass(Mode::Again), saved, into)
            && let Some(x) = layer.again(saved, &pass)?
        {
            into.0.insert(0, x);
        }
        Ok(hold)
    }

    fn residual_backward(
        &self,
        residual: &Residual,
        (branch, shortcut, output): (Vec<Trace>, Vec<Trace>, Option<Act>),
        mut dy: Act,
        want: bool,
        sums: Option<ParamId>,
    ) -> Step<Option<Act>> {
        let overwrites = overwrites(&residual.branch);
        let mut through = output.map(|y| (y, residual.act));
        if overwrites || !self.joins(residual) {
            if let (Some((Act { value: Some(y), .. }, act)), Some(dy)) = (&through, &dy.value) {
                add::through(y, dy, *act)?;
            }
            through = None;
        }
        let for_branch = match overwrites {
            true => {
                let bytes = self.at.bytes(residual.output.iter().product());
                let hold = self.hold(Role::Activations, &residual.name, bytes)?;
                let value = dy.value.as_ref().map(kernels::copy).transpose()?;
                Act { value, hold, summed: dy.summed, ..Act::default() }
            }
            false => dy.clone(),
        };
        if residual.shortcut.is_empty() {
            let way = Way { onto: Some(&dy), through, sums };
            return self.backward(&residual.branch, branch, for_branch, want, way);
        }
        let way = Way { through, ..Way::default() };
        let by_branch = self.backward(&residual.branch, branch, for_branch, want, way)?;
        dy.summed = false; // of the branch's alone
        let way = Way { onto: by_branch.as_ref(), sums, ..Way::default() };
        self.backward(&residual.shortcut, shortcut, dy, want, way)
    }
}

impl Late<'_> {
    /// The gradients that waited for the input `x`.
    fn make(self, x: Option<Tensor>, pass: &Pass) -> candle_core::Result<()> {
        match (x, self.dy.value) {
            (Some(x), Some(dy)) => self.layer.backward_late(&x, &dy, pass),
            _ => candle_core::bail!("the input of {} was not made again", self.layer.name()),
        }
    }
}

/// The parameter whose gradient is the sum over all rows of the gradient that the last of these nodes is given.
pub(super) fn adds_rows(nodes: &[Node]) -> Option<ParamId> {
    match nodes.last()? {
        Node::Layer(layer) => layer.adds_rows(),
        Node::Residual(residual) if residual.act == Activation::Identity => adds_rows(&residual.branch),
        Node::Residual(_) => None,
    }
}

/// Whether the backward pass of these nodes writes to the gradient it is given.
fn overwrites(nodes: &[Node]) -> bool {
    match nodes.last() {
        None => false,
        Some(Node::Layer(layer)) => layer.overwrites(),
        Some(Node::Residual(residual)) => {
            residual.act != Activation::Identity || overwrites(&residual.branch)
        }
    }
}
