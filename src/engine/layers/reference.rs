//! A layer on the reference backend: its forward pass in candle's own operations, its backward pass by candle's
//! autograd on that forward pass. It has no code per layer, so it is an independent check of the kernels and backward
//! passes written here; and it runs on any device that candle supports.

use candle_core::{Result, Tensor, Var, bail};

use super::{Cost, Layer, Mode, ParamCopies, PassContext, SavedTensors, TrackedParams};
use crate::base::MicroBatchSpec;
use crate::kernels::reference::accumulate;
use crate::params::{FlatLayout, ParamId};

/// Upper bounds on what a forward pass in candle's operations takes, and on what autograd keeps of it and of the
/// gradients: in copies of the layer's input and output together, and of its parameters. What grows otherwise is in
/// the layer's own cost.
const FORWARD_COPIES: u64 = 6;
const BACKWARD_COPIES: u64 = 16;
const PARAMETER_COPIES: u64 = 6;

/// A layer whose backward pass is the gradient of `sum(y * dy)` by candle's autograd. It saves its input.
pub struct ReferenceLayer {
    layer: Box<dyn Layer>,
    /// Number of values in its parameters.
    num_parameters: usize,
}

impl ReferenceLayer {
    pub fn new(layer: Box<dyn Layer>, params: &FlatLayout) -> Self {
        let num_parameters = params.num_values(&layer.params());
        Self { layer, num_parameters }
    }
}

impl Layer for ReferenceLayer {
    fn name(&self) -> &str {
        self.layer.name()
    }

    fn output_shape(&self) -> Vec<usize> {
        self.layer.output_shape()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        Ok((self.layer.forward(x, pass)?.0.contiguous()?, SavedTensors(vec![x.clone()])))
    }

    fn backward(
        &self,
        saved: SavedTensors,
        dy: Tensor,
        pass: &PassContext,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let Some(x) = saved.0.into_iter().next() else { bail!("{}: no saved input", self.name()) };
        let x = if needs_input_grad { Var::from_tensor(&x)?.into_inner() } else { x };
        let params = TrackedParams::new(pass.store.weight_views().len());
        let copies = Some(ParamCopies::Tracked(&params));
        let tracked = PassContext { mode: Mode::Recompute, copies, ..*pass };
        let (y, _) = self.layer.forward(&x, &tracked)?;
        let mut grads = (y * dy)?.sum_all()?.backward()?;
        for (id, param) in params.read() {
            if let Some(grad) = grads.remove(param) {
                pass.grad(id).map_or(Ok(()), |into| accumulate(into, &grad))?;
            }
        }
        match grads.remove(&x) {
            Some(dx) if needs_input_grad => Ok(Some(dx.contiguous()?)),
            None if needs_input_grad => Ok(Some(x.zeros_like()?)),
            _ => Ok(None),
        }
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let cost = self.layer.cost(spec);
        let output = spec.bytes(self.output_shape().iter().product());
        let values = cost.input_grad.max(output) + output;
        let params = (self.num_parameters * spec.dtype.size_in_bytes()) as u64;
        Cost {
            input_grad: cost.input_grad,
            output: cost.output,
            output_is_view: cost.output_is_view,
            saves_input: true,
            forward_workspace: FORWARD_COPIES * values + PARAMETER_COPIES * params + cost.forward_workspace,
            backward_workspace: BACKWARD_COPIES * values
                + PARAMETER_COPIES * params
                + cost.workspace_of_backward(true),
            flops: cost.flops,
            trains: cost.trains,
            ..Cost::default()
        }
    }

    fn micro_batch_multiple(&self) -> usize {
        self.layer.micro_batch_multiple()
    }

    fn params(&self) -> Vec<ParamId> {
        self.layer.params()
    }
}
