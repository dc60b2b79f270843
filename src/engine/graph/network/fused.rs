//! Fused nodes, forward and backward.

use candle_core::Tensor;

use super::backward::BackwardContext;
use super::forward::ResidualEnd;
use super::{Executor, ReservedTensor, SavedLayer, StepResult};
use crate::base::Role;
use crate::graph::fusion::{FusedNode, Fusible, Recompute};
use crate::kernels::norm::NormBackwardFusion;
use crate::layers::linear::{Linear, LinearBackwardFusion};
use crate::layers::{Layer, Mode, PassContext, SavedTensors};

/// A linear layer whose input is recomputed within the preceding layer's backward pass, with its output gradient.
struct DeferredWeightGrad<'a> {
    layer: &'a Linear,
    dy: ReservedTensor,
    /// Its input gradient was backpropagated through the preceding layer's activation.
    input_act_backward_done: bool,
}

/// What the backward pass of a layer gives.
#[derive(Default)]
struct LayerGrads {
    dx: Option<Tensor>,
    /// The layer's output, if it was to be recomputed.
    recomputed_output: Option<Tensor>,
    input_act_backward_done: bool,
}

impl Executor<'_> {
    /// Runs the node on `x`; its last layer fuses `end`.
    pub(super) fn fused_forward(
        &self,
        node: &FusedNode,
        mut x: ReservedTensor,
        save: bool,
        mode: Mode,
        end: Option<ResidualEnd>,
    ) -> StepResult<(ReservedTensor, Vec<SavedLayer>)> {
        let mut saved_layers = Vec::with_capacity(node.layers.len());
        for (i, layer) in node.layers.iter().enumerate() {
            let end = end.filter(|_| i + 1 == node.layers.len());
            let end = end.and_then(|end| Some((end.shortcut.value.as_ref()?, end.act)));
            let (y, mut saved) = self.layer_forward(layer.as_ref(), x, mode, |x, pass| {
                match (Fusible::of(layer.as_ref()), end) {
                    (Fusible::Linear(linear), Some((shortcut, _))) => linear.forward_add(x, shortcut, pass),
                    (Fusible::BatchNorm(norm), Some((shortcut, act))) => {
                        norm.forward_add_act(x, shortcut, act, pass)
                    }
                    _ => layer.forward(x, pass),
                }
            })?;
            if i > 0 {
                saved.drop_input();
            }
            x = y;
            if save && x.requires_grad {
                saved_layers.push(saved);
            }
        }
        Ok((x, saved_layers))
    }

    /// Returns the gradient of the node's input, if needed.
    pub(super) fn fused_backward(
        &self,
        node: &FusedNode,
        mut saved_layers: Vec<SavedLayer>,
        mut dy: ReservedTensor,
        mut ctx: BackwardContext,
    ) -> StepResult<Option<ReservedTensor>> {
        let mut deferred: Option<DeferredWeightGrad> = None;
        for (i, layer) in node.layers.iter().enumerate().rev() {
            let Some(SavedLayer { mut saved, needs_input_grad, _reservations }) = saved_layers.pop() else {
                return Ok(None);
            };
            let last = i + 1 == node.layers.len();
            let input = i.checked_sub(1).map(|before| (node.layers[before].as_ref(), node.recompute[before]));
            let _input = match input {
                Some((before, Recompute::BeforeBackward)) => {
                    let reservation =
                        self.reserve(Role::Activations, before.name(), before.cost(self.spec).output)?;
                    self.recompute_input(before, saved_layers.last(), &mut saved)?;
                    reservation
                }
                _ => None,
            };
            let cost = layer.cost(self.spec);
            let dx_reservation = match needs_input_grad && !cost.output_is_view {
                true => self.reserve(Role::Activations, layer.name(), cost.input_grad)?,
                false => None,
            };
            let workspace = cost.workspace_of_backward(needs_input_grad);
            let _work = self.reserve(Role::Workspace, layer.name(), workspace)?;
            let reservation = if cost.output_is_view { dy.reservation.clone() } else { dx_reservation };
            let (pending, output_act) = (deferred.take(), ctx.output_act.take());
            let defers = matches!(input, Some((_, Recompute::DuringBackward)));
            let mut grads = LayerGrads::default();
            // A deferred weight gradient reads `dy` later; otherwise the layer may free it.
            let dy_value = if defers || pending.is_some() { dy.value.clone() } else { dy.value.take() };
            if let (Some(pass), Some(saved), Some(dy)) = (self.pass_in_mode(Mode::Train), saved, dy_value) {
                let act_backward_done = pending.as_ref().is_some_and(|next| next.input_act_backward_done);
                let residual_grad = ctx
                    .residual_grad
                    .filter(|_| i == 0 && needs_input_grad)
                    .and_then(|grad| grad.value.as_ref());
                let before = saved_layers.last().and_then(|before| before.saved.as_ref());
                grads = match Fusible::of(layer.as_ref()) {
                    Fusible::Linear(linear) if defers || pending.is_some() => {
                        let input_act_backward = match input.map(|(before, _)| Fusible::of(before)) {
                            Some(Fusible::Linear(before_layer)) if defers => {
                                before.and_then(|saved| before_layer.act_backward(saved, &pass))
                            }
                            _ => None,
                        };
                        let fusion = LinearBackwardFusion {
                            needs_input_grad,
                            residual_grad,
                            recompute_output: pending.is_some(),
                            input_act_backward,
                            bias_grad_done: act_backward_done || (last && node.bias_grad_by_next),
                            act_backward_done,
                        };
                        let grads = linear.backward_input(saved, &dy, &pass, fusion)?;
                        LayerGrads {
                            dx: grads.dx,
                            recomputed_output: grads.recomputed_output,
                            input_act_backward_done: grads.input_act_backward_done,
                        }
                    }
                    Fusible::Linear(linear) => {
                        let bias_grad = !(last && node.bias_grad_by_next);
                        let dx = linear.backward_own_bias(saved, dy, &pass, needs_input_grad, bias_grad)?;
                        LayerGrads { dx, ..LayerGrads::default() }
                    }
                    Fusible::Norm(norm) => {
                        let bias_grad = node.input_bias_grad.filter(|_| i == 0 && needs_input_grad);
                        let fusion = NormBackwardFusion {
                            residual_grad,
                            dx_column_sums: bias_grad.and_then(|id| pass.grad(id)),
                            recompute_output: pending.is_some(),
                        };
                        let dx = norm.backward_fused(&saved, &dy, &pass, needs_input_grad, fusion)?;
                        // The norm's kernel overwrites `dy` with the output.
                        let recomputed_output = pending.is_some().then_some(dy);
                        LayerGrads { dx, recomputed_output, input_act_backward_done: false }
                    }
                    Fusible::BatchNorm(norm)
                        if let Some((ReservedTensor { value: Some(y), .. }, act)) = &output_act =>
                    {
                        let dx = norm.backward_add_act(saved, dy, (y, *act), &pass, needs_input_grad)?;
                        LayerGrads { dx, ..LayerGrads::default() }
                    }
                    Fusible::Conv(conv) if let Some(residual_grad) = residual_grad => {
                        let dx = conv.backward_accumulate(saved, dy, &pass, residual_grad)?;
                        LayerGrads { dx: Some(dx), ..LayerGrads::default() }
                    }
                    _ => {
                        let dx = layer.backward(saved, dy, &pass, needs_input_grad)?;
                        LayerGrads { dx, ..LayerGrads::default() }
                    }
                };
                if let Some(next) = pending {
                    next.run(grads.recomputed_output.take(), &pass)?;
                }
            }
            if defers && let Fusible::Linear(layer) = Fusible::of(layer.as_ref()) {
                let (dy, input_act_backward_done) = (std::mem::take(&mut dy), grads.input_act_backward_done);
                deferred = Some(DeferredWeightGrad { layer, dy, input_act_backward_done });
            }
            if !needs_input_grad {
                return Ok(None);
            }
            dy = ReservedTensor { value: grads.dx, reservation, requires_grad: true };
        }
        Ok(Some(dy))
    }

    /// Recomputes the output of the layer `before` from what it saved and puts it first in `saved`.
    fn recompute_input(
        &self,
        before: &dyn Layer,
        before_saved: Option<&SavedLayer>,
        saved: &mut Option<SavedTensors>,
    ) -> StepResult<()> {
        let before_saved = before_saved.and_then(|before| before.saved.as_ref());
        if let (Some(pass), Some(from), Some(saved)) =
            (self.pass_in_mode(Mode::Recompute), before_saved, saved)
        {
            let x = match Fusible::of(before) {
                Fusible::Linear(linear) => linear.recompute_output(from)?,
                Fusible::Norm(norm) => norm.recompute_output(from, &pass)?,
                Fusible::BatchNorm(norm) => norm.recompute_output(from, &pass)?,
                Fusible::Conv(_) | Fusible::Other => {
                    return Err(
                        candle_core::Error::Msg(format!("{} cannot be recomputed", before.name())).into()
                    );
                }
            };
            saved.0.insert(0, x);
        }
        Ok(())
    }
}

impl SavedLayer {
    /// Releases the input, which comes first: the backward pass recomputes it.
    fn drop_input(&mut self) {
        if let Some(saved) = &mut self.saved
            && !saved.0.is_empty()
        {
            saved.0.remove(0);
        }
        self._reservations[1] = None;
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
