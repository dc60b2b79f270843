//! What the reference implementations share, and the switch that selects them: they run on devices that have no
//! kernels, and on any device within a [`ReferenceScope`].
//!
//! Slow, and autograd keeps every intermediate.

use std::cell::Cell;

use candle_core::{Device, Result, Tensor, Var, bail};

thread_local! {
    static SELECTED: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, the kernels that this thread calls run their reference implementations.
pub struct ReferenceScope {
    outer: bool,
}

impl ReferenceScope {
    /// A scope of the reference implementations, or one that changes nothing.
    pub fn enter(reference: bool) -> Self {
        let outer = SELECTED.get();
        SELECTED.set(outer || reference);
        Self { outer }
    }
}

impl Drop for ReferenceScope {
    fn drop(&mut self) {
        SELECTED.set(self.outer);
    }
}

/// Whether this thread is within a scope of the reference implementations.
pub fn is_selected() -> bool {
    SELECTED.get()
}

/// Whether the CPU kernels apply.
pub fn has_cpu_kernel(tensor: &Tensor) -> bool {
    !is_selected() && matches!(tensor.device(), Device::Cpu)
}

/// Gradients of `sum(f(inputs) * dy)` with respect to each input.
pub fn gradients(
    inputs: &[&Tensor],
    dy: &Tensor,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let vars = inputs.iter().map(|t| Var::from_tensor(t)).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let grads = (f(&tensors)? * dy)?.sum_all()?.backward()?;
    tensors
        .iter()
        .map(|t| match grads.get(t) {
            Some(g) => Ok(g.clone()),
            None => bail!("an input of shape {:?} does not reach the output", t.dims()),
        })
        .collect()
}

/// `into += grad`, in place, on any device.
pub fn accumulate(into: &Tensor, grad: &Tensor) -> Result<()> {
    let sum = (into + grad.to_dtype(into.dtype())?)?;
    if has_cpu_kernel(into) {
        return crate::with_elem!(into.dtype(), T => {
            let sum = super::cpu::view::<T>(&sum)?;
            super::cpu::with_slice_mut::<T, _>(into, |into| into.copy_from_slice(&sum))
        });
    }
    into.slice_set(&sum, 0, 0)
}

/// Accumulates the gradients of weight and bias, which follow the input gradient in `computed`, and returns the input
/// gradient if `needs_input_grad`.
pub fn accumulate_weight_bias(
    computed: Vec<Tensor>,
    grads: &super::linear::WeightBiasGrads,
    needs_input_grad: bool,
) -> Result<Option<Tensor>> {
    let mut computed = computed.into_iter();
    let dx = computed.next();
    for (into, g) in [grads.weight, grads.bias].into_iter().zip(computed) {
        into.map_or(Ok(()), |into| accumulate(into, &g))?;
    }
    Ok(dx.filter(|_| needs_input_grad))
}

/// The pixels `first + i * stride` along both sides of (batch, height, width, channels) images: the input of one tap of
/// a sliding window.
pub fn inputs_at_tap(
    x: &Tensor,
    first: (usize, usize),
    stride: usize,
    output: (usize, usize),
) -> Result<Tensor> {
    let indices = |first: usize, n: usize| {
        Tensor::from_vec((0..n).map(|i| (first + i * stride) as u32).collect(), n, x.device())
    };
    x.index_select(&indices(first.0, output.0)?, 1)?.index_select(&indices(first.1, output.1)?, 2)
}
