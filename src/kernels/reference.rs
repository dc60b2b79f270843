//! What makes a kernel's reference enough for a new device: its backward pass, by candle's autograd.
//!
//! Slow, and it keeps every intermediate; a device that has bodies of its own never comes here.

use candle_core::{Device, Result, Tensor, Var, bail};

/// Whether the CPU bodies apply.
pub fn has_body(tensor: &Tensor) -> bool {
    matches!(tensor.device(), Device::Cpu)
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

/// `into += what`, in place, on any device.
pub fn accumulate(into: &Tensor, what: &Tensor) -> Result<()> {
    let sum = (into + what.to_dtype(into.dtype())?)?;
    if has_body(into) {
        return crate::with_elem!(into.dtype(), T => {
            let sum = super::cpu::view::<T>(&sum)?;
            super::cpu::update::<T, _>(into, |into| into.copy_from_slice(&sum))
        });
    }
    into.slice_set(&sum, 0, 0)
}

/// Adds the gradients of a weight and a bias, which follow the input's in `found`, and gives the input's.
pub fn share_out(found: Vec<Tensor>, grads: &super::linear::Grads, want: bool) -> Result<Option<Tensor>> {
    let mut found = found.into_iter();
    let dx = found.next();
    for (into, g) in std::iter::once(grads.weight).chain(grads.bias).zip(found) {
        accumulate(into, &g)?;
    }
    Ok(dx.filter(|_| want))
}

/// The pixels `first + i * stride` along both sides of (batch, height, width, channels) pictures: what
/// one cell of a moving window sees.
pub fn seen_by_cell(
    x: &Tensor,
    first: (usize, usize),
    stride: usize,
    output: (usize, usize),
) -> Result<Tensor> {
    let along = |first: usize, n: usize| {
        Tensor::from_vec((0..n).map(|i| (first + i * stride) as u32).collect(), n, x.device())
    };
    x.index_select(&along(first.0, output.0)?, 1)?.index_select(&along(first.1, output.1)?, 2)
}
