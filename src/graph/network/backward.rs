//! The backward pass: propagates gradients from the last node to the first, and fuses neighbouring work into the same
//! passes.
//!
//! An output that was not saved is recomputed inside a backward pass that reads its operands anyway. The layer that
//! needs it defers its weight gradient until then.

use std::sync::Arc;

use candle_core::Tensor;

use super::{Executor, Node, ReservedTensor, ResidualNode, SavedNode, StepResult};
use crate::base::Role;
use crate::kernels::{self, Activation, add};
use crate::layers::{FusionContext, InputGrad, Layer, Mode, PassContext, SavedTensors};
use crate::memory::Reservation;
use crate::params::ParamId;

/// What the caller wants fused into the backward pass of some nodes.
#[derive(Default)]
pub(super) struct BackwardContext<'a> {
    /// The gradient that reaches the nodes' input along another branch; it is added to theirs.
    pub residual_grad: Option<&'a ReservedTensor>,
    /// The activation applied after the nodes, with its output.
    pub output_act: Option<(ReservedTensor, Activation)>,
    /// The bias whose gradient is the sum of the nodes' input gradient over all rows.
    pub input_bias_grad: Option<ParamId>,
}

/// A layer whose input the preceding layer recomputes during its own backward, with the layer's `dy`.
struct DeferredWeightGrad<'a> {
    layer: &'a dyn Layer,
    dy: ReservedTensor,
}

impl Executor<'_> {
    /// Returns the gradient of the nodes' input, if needed. Drops each saved node as soon as it is used.
    pub(super) fn backward(
        &self,
        nodes: &[Node],
        mut saved_nodes: Vec<SavedNode>,
        mut dy: ReservedTensor,
        needs_input_grad: bool,
        mut ctx: BackwardContext,
    ) -> StepResult<Option<ReservedTensor>> {
        let mut deferred: Option<DeferredWeightGrad> = None;
        for (i, node) in nodes.iter().enumerate().rev() {
            // Only the last node needs `output_act`; taking it here releases it early.
            let (output_act, pending) = (ctx.output_act.take(), deferred.take());
            let residual_grad =
                ctx.residual_grad.filter(|_| needs_input_grad && i == 0).and_then(|onto| onto.value.as_ref());
            let (needs_input_grad, saved_node) = (needs_input_grad || i > 0, saved_nodes.pop());
            let input_bias_grad = if i == 0 { ctx.input_bias_grad } else { fusible_bias_grad(&nodes[..i]) }
                .filter(|_| needs_input_grad);
            let dx = match (node, saved_node) {
                (
                    Node::Layer(layer),
                    Some(SavedNode::Layer { mut saved, input_recomputed, _reservations }),
                ) => {
                    let (cost, input_bias_grad) = (
                        layer.cost(self.spec),
                        input_bias_grad.filter(|_| layer.fuses_bias_grad(self.spec.backend)),
                    );
                    let defers_weight_grad =
                        input_recomputed && self.defers_weight_grad(layer.as_ref(), &nodes[..i]);
                    let _input = match input_recomputed && !defers_weight_grad {
                        true => self.recompute_input(&nodes[..i], &saved_nodes, &mut saved)?,
                        false => None,
                    };
                    let dx_reservation = match needs_input_grad && !cost.output_is_view {
                        true => self.reserve(Role::Activations, layer.name(), cost.input_grad)?,
                        false => None,
                    };
                    let _work = self.reserve(Role::Workspace, layer.name(), cost.backward_workspace)?;
                    let reservation =
                        if cost.output_is_view { dy.reservation.clone() } else { dx_reservation };
                    let output_act = output_act.as_ref().and_then(|(y, act)| Some((y.value.as_ref()?, *act)));
                    let pass = self.pass_in_mode(Mode::Train);
                    let input_act_backward = match (&pass, nodes[..i].last(), saved_nodes.last()) {
                        (Some(pass), Some(Node::Layer(layer)), Some(SavedNode::Layer { saved, .. }))
                            if defers_weight_grad =>
                        {
                            saved.as_ref().and_then(|saved| layer.fusible_act_backward(saved, pass))
                        }
                        _ => None,
                    };
                    let fusion = FusionContext {
                        input_bias_grad,
                        bias_grad_done: dy.bias_grad_done,
                        input_act_backward,
                        act_backward_done: dy.act_backward_done,
                    };
                    let pass = pass.as_ref().map(|pass| PassContext { fusion, ..*pass });
                    let (mut recomputed, mut fused_act_backward) = (None, false);
                    let value = match (&pass, saved, &mut dy.value) {
                        (Some(pass), Some(saved), Some(dy)) if defers_weight_grad || pending.is_some() => {
                            if let Some((y, act)) = output_act {
                                add::activation_backward_inplace(y, dy, act)?;
                            }
                            let recompute = pending.is_some();
                            let InputGrad { dx, recomputed_output, input_act_backward_done } = layer
                                .backward_input(
                                    saved,
                                    dy,
                                    pass,
                                    (needs_input_grad, residual_grad),
                                    recompute,
                                )?;
                            (recomputed, fused_act_backward) = (recomputed_output, input_act_backward_done);
                            dx
                        }
                        (Some(pass), Some(saved), dy_slot) => {
                            let Some(dy) = dy_slot.take() else { return Ok(None) };
                            match (output_act, residual_grad) {
                                (Some(output_act), None) => {
                                    layer.backward_add_act(saved, dy, output_act, pass, needs_input_grad)?
                                }
                                (None, Some(residual_grad)) => {
                                    layer.backward_accumulate(saved, dy, pass, residual_grad)?
                                }
                                (Some((y, act)), Some(residual_grad)) => {
                                    add::activation_backward_inplace(y, &dy, act)?;
                                    layer.backward_accumulate(saved, dy, pass, residual_grad)?
                                }
                                (None, None) => layer.backward(saved, dy, pass, needs_input_grad)?,
                            }
                        }
                        _ => None,
                    };
                    if let (Some(pending), Some(pass)) = (pending, &pass) {
                        pending.run(recomputed, pass)?;
                    }
                    if defers_weight_grad {
                        deferred =
                            Some(DeferredWeightGrad { layer: layer.as_ref(), dy: std::mem::take(&mut dy) });
                    }
                    needs_input_grad.then_some(ReservedTensor {
                        value,
                        reservation,
                        bias_grad_done: fused_act_backward || input_bias_grad.is_some(),
                        act_backward_done: fused_act_backward,
                    })
                }
                (Node::Residual(residual), Some(SavedNode::Residual { branch, shortcut, output })) => {
                    // The row sums must include `residual_grad`, which is only added afterwards: do not fuse them.
                    let sums = input_bias_grad.filter(|_| residual_grad.is_none());
                    let saved = (branch, shortcut, output);
                    let dx = self.residual_backward(residual, saved, dy, needs_input_grad, sums)?;
                    if let (Some(ReservedTensor { value: Some(dx), .. }), Some(residual_grad)) =
                        (&dx, residual_grad)
                    {
                        add::inplace(dx, residual_grad, Activation::Identity)?;
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

    /// Whether the last of the `preceding` nodes recomputes the layer's input, after the layer's own input gradient.
    fn defers_weight_grad(&self, layer: &dyn Layer, preceding: &[Node]) -> bool {
        let recomputes =
            matches!(preceding.last(), Some(Node::Layer(l)) if l.recomputes_in_backward(self.spec.backend));
        recomputes && layer.can_defer_weight_grad(self.spec.backend)
    }

    /// Recomputes the output of the last of `nodes` and puts it first in `consumer_saved`.
    fn recompute_input(
        &self,
        nodes: &[Node],
        saved_nodes: &[SavedNode],
        consumer_saved: &mut Option<SavedTensors>,
    ) -> StepResult<Option<Arc<Reservation>>> {
        let (Some(Node::Layer(layer)), Some(SavedNode::Layer { saved, .. })) =
            (nodes.last(), saved_nodes.last())
        else {
            return Ok(None);
        };
        let reservation = self.reserve(Role::Activations, layer.name(), layer.cost(self.spec).output)?;
        if let (Some(pass), Some(saved), Some(consumer_saved)) =
            (self.pass_in_mode(Mode::Recompute), saved, consumer_saved)
            && let Some(x) = layer.recompute_output(saved, &pass)?
        {
            consumer_saved.0.insert(0, x);
        }
        Ok(reservation)
    }

    fn residual_backward(
        &self,
        residual: &ResidualNode,
        (branch, shortcut, output): (Vec<SavedNode>, Vec<SavedNode>, Option<ReservedTensor>),
        mut dy: ReservedTensor,
        needs_input_grad: bool,
        input_bias_grad: Option<ParamId>,
    ) -> StepResult<Option<ReservedTensor>> {
        let overwrites_dy = overwrites_dy(&residual.branch);
        let mut output_act = output.map(|y| (y, residual.act));
        if overwrites_dy || !self.fuses_add_act(residual) {
            if let (Some((ReservedTensor { value: Some(y), .. }, act)), Some(dy)) = (&output_act, &dy.value) {
                add::activation_backward_inplace(y, dy, *act)?;
            }
            output_act = None;
        }
        let dy_branch = match overwrites_dy {
            true => {
                let bytes = self.spec.bytes(residual.output_shape.iter().product());
                let reservation = self.reserve(Role::Activations, &residual.name, bytes)?;
                let value = dy.value.as_ref().map(kernels::copy).transpose()?;
                ReservedTensor {
                    value,
                    reservation,
                    bias_grad_done: dy.bias_grad_done,
                    ..ReservedTensor::default()
                }
            }
            false => dy.clone(),
        };
        if residual.shortcut.is_empty() {
            let ctx = BackwardContext { residual_grad: Some(&dy), output_act, input_bias_grad };
            return self.backward(&residual.branch, branch, dy_branch, needs_input_grad, ctx);
        }
        let ctx = BackwardContext { output_act, ..BackwardContext::default() };
        let dx_branch = self.backward(&residual.branch, branch, dy_branch, needs_input_grad, ctx)?;
        dy.bias_grad_done = false; // only the branch's bias gradient was done
        let ctx = BackwardContext {
            residual_grad: dx_branch.as_ref(),
            input_bias_grad,
            ..BackwardContext::default()
        };
        self.backward(&residual.shortcut, shortcut, dy, needs_input_grad, ctx)
    }
}

impl DeferredWeightGrad<'_> {
    /// Computes the weight gradient, now that the input `x` exists.
    fn run(self, x: Option<Tensor>, pass: &PassContext) -> candle_core::Result<()> {
        match (x, self.dy.value) {
            (Some(x), Some(dy)) => self.layer.backward_weight(&x, &dy, pass),
            _ => candle_core::bail!("the input of {} was not recomputed", self.layer.name()),
        }
    }
}

/// The bias whose gradient is the sum, over all rows, of the gradient that the last of these nodes takes.
pub(super) fn fusible_bias_grad(nodes: &[Node]) -> Option<ParamId> {
    match nodes.last()? {
        Node::Layer(layer) => layer.fusible_bias_grad(),
        Node::Residual(residual) if residual.act == Activation::Identity => {
            fusible_bias_grad(&residual.branch)
        }
        Node::Residual(_) => None,
    }
}

/// Whether the backward pass of these nodes overwrites the gradient it takes.
fn overwrites_dy(nodes: &[Node]) -> bool {
    match nodes.last() {
        None => false,
        Some(Node::Layer(layer)) => layer.overwrites_dy(),
        Some(Node::Residual(residual)) => {
            residual.act != Activation::Identity || overwrites_dy(&residual.branch)
        }
    }
}
