//! The body for cards: cuBLASLt's products, with the bias, GELU and accumulation inside them.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Before, Grads, Lies, Linear, card_ranges, card_workspace, hopper};
use crate::kernels::cuda::product::{Mat, Onto, Then, gelu_is_fused, multiply};
use crate::kernels::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream};
use crate::kernels::{Activation, Reads, activation};

impl Linear<'_> {
    /// `W` as the (in, out) matrix that rows are multiplied with.
    fn on_card(&self) -> Result<Mat<'_>> {
        let (a, b) = self.weight.dims2()?;
        let w = Mat::new(self.weight, a, b);
        Ok(if self.lies == Lies::OutIn { w.t() } else { w })
    }

    /// As `forward`; the product is added to `onto` before the activation where there is such.
    pub(super) fn forward_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        onto: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let ((k, n), shape) = (self.sizes()?, self.output_shape(x)?);
        let rows = x.elem_count() / k;
        let (values, w) = (Mat::new(x, rows, k), self.on_card()?);
        let onto = onto.map_or(Onto::Nothing, Onto::Other);
        let y = fresh(device, x.dtype(), shape.clone())?;
        let out = Mat::new(&y, rows, n);
        match (self.act, self.bias) {
            (Activation::GeluTanh, Some(bias)) if gelu_is_fused(x.dtype(), n) => {
                let pre = fresh(device, x.dtype(), shape)?;
                match hopper::takes(x, w, rows, bias)? {
                    true => hopper::gelu(device, (x, w, rows), bias, (&y, &pre))?,
                    false => multiply(&out, values, w, onto, Then::GeluBias(bias, Some(&pre)))?,
                }
                Ok((y, Some(pre)))
            }
            (Activation::Relu, Some(bias)) => {
                multiply(&out, values, w, onto, Then::ReluBias(bias))?;
                Ok((y, None))
            }
            (act, bias) => {
                multiply(&out, values, w, onto, bias.map_or(Then::Nothing, Then::Bias))?;
                match act.reads() {
                    Reads::Nothing => Ok((y, None)),
                    Reads::Input => Ok((activation::forward(&y, act)?, Some(y))),
                    Reads::Output => {
                        activation::card::forward_into(device, &y, &y, act)?;
                        Ok((y, None))
                    }
                }
            }
        }
    }

    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let (dx, _) = self.input_card(device, v, &dy, grads.bias, (want, None), (false, None))?;
        self.weight_card(x, &dy, grads.weight)?;
        Ok(dx)
    }

    pub(super) fn input_card(
        &self,
        device: &CudaDevice,
        v: Option<&Tensor>,
        dy: &Tensor,
        bias: Option<&Tensor>,
        (want, onto): (bool, Option<&Tensor>),
        (again, before): (bool, Option<Before>),
    ) -> Result<(Option<Tensor>, bool)> {
        let (k, n) = self.sizes()?;
        let rows = dy.elem_count() / n;
        through(device, dy, v, (self.act, again), bias, rows, n)?;
        if !want {
            return Ok((None, false));
        }
        let mut shape = dy.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = k;
        }
        let (dx, w) = (fresh(device, dy.dtype(), shape)?, self.on_card()?.t());
        if let (Some(before), None) = (before.filter(|before| before.act == Activation::GeluTanh), onto)
            && hopper::takes(dy, w, rows, before.v)?
        {
            hopper::slope(device, (dy, w, rows), before, &dx)?;
            return Ok((Some(dx), true));
        }
        let onto = onto.map_or(Onto::Nothing, Onto::Other);
        multiply(&Mat::new(&dx, rows, k), Mat::new(dy, rows, n), w, onto, Then::Nothing)?;
        Ok((Some(dx), false))
    }

    pub(super) fn weight_card(&self, x: &Tensor, dy: &Tensor, into: &Tensor) -> Result<()> {
        let (k, n) = self.sizes()?;
        let rows = dy.elem_count() / n;
        let (d, values) = (Mat::new(dy, rows, n), Mat::new(x, rows, k));
        match self.lies {
            Lies::OutIn => multiply(&Mat::new(into, n, k), d.t(), values, Onto::Itself, Then::Nothing),
            Lies::InOut => multiply(&Mat::new(into, k, n), values.t(), d, Onto::Itself, Then::Nothing),
        }
    }
}

/// Turns the (rows, n) gradient `d` into the one before the activation, in place, and adds its column sums to that of the
/// bias. With `again`, `v`, which the activation read, becomes the activation's output.
pub fn through(
    device: &CudaDevice,
    d: &Tensor,
    v: Option<&Tensor>,
    (act, again): (Activation, bool),
    bias: Option<&Tensor>,
    rows: usize,
    n: usize,
) -> Result<()> {
    let (dtype, stream) = (code(d.dtype())?, stream(device));
    let (at, values) = (pointer(d)?, pointer_or_null(v)?);
    let act = if v.is_some() { act } else { Activation::Identity };
    // SAFETY: `v` has the shape of `d`, and the partial sums have the room that `card_ranges` says.
    match bias {
        Some(bias) => {
            let partial = scratch(device, card_workspace(d.dtype(), rows, n) as usize)?;
            let (partial, bias) = (pointer(&partial)?, pointer(bias)?);
            checked("linear_through", unsafe {
                let ranges = card_ranges(rows, n) as c_int;
                linear_through(
                    dtype,
                    act as c_int,
                    values,
                    at,
                    partial,
                    bias,
                    rows as i64,
                    n as c_int,
                    ranges,
                    again as c_int,
                    stream,
                )
            })
        }
        None => {
            let Some(v) = v else { return Ok(()) };
            activation::card::backward(device, v, d, d, act)?;
            if again { activation::card::forward_into(device, v, v, act) } else { Ok(()) }
        }
    }
}

unsafe extern "C" {
    fn linear_through(
        dtype: c_int,
        act: c_int,
        v: *mut c_void,
        d: *mut c_void,
        partial: *mut c_void,
        bias: *mut c_void,
        rows: i64,
        n: c_int,
        ranges: c_int,
        again: c_int,
        stream: Stream,
    ) -> c_int;
}
