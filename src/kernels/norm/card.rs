//! The body for cards: a warp a row.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Also, Norm, card_parts, card_workspace};
use crate::kernels::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream, wide};
use crate::kernels::linear::Grads;

impl Norm<'_> {
    pub(super) fn forward_card(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let rows = x.elem_count() / self.weight.elem_count();
        let stats = fresh(device, wide(x.dtype()), (rows, self.kept()))?;
        Ok((self.output_card(device, x, &stats, false)?, stats))
    }

    /// The output, and the statistics with it unless they are known.
    pub(super) fn output_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        stats: &Tensor,
        known: bool,
    ) -> Result<Tensor> {
        let n = self.weight.elem_count();
        let y = fresh(device, x.dtype(), x.shape())?;
        // SAFETY: `y` is as large as `x`, and `stats` has the values of each of its rows.
        checked("norm_forward", unsafe {
            norm_forward(
                code(x.dtype())?,
                pointer(x)?,
                pointer(self.weight)?,
                pointer_or_null(self.bias)?,
                pointer(&y)?,
                pointer(stats)?,
                (x.elem_count() / n) as i64,
                n as c_int,
                self.eps,
                self.centred as c_int,
                known as c_int,
                stream(device),
            )
        })?;
        Ok(y)
    }

    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        (x, stats, dy): (&Tensor, &Tensor, &Tensor),
        grads: &Grads,
        want: bool,
        Also { onto, sums, again }: Also,
    ) -> Result<Option<Tensor>> {
        if onto.is_some_and(|onto| onto.elem_count() != x.elem_count()) {
            candle_core::bail!("a gradient of {:?} onto another shape", x.dims())
        }
        let dx = if want { Some(fresh(device, x.dtype(), x.shape())?) } else { None };
        let n = self.weight.elem_count();
        let rows = x.elem_count() / n;
        let vectors = 1 + grads.bias.is_some() as usize;
        let partial = scratch(device, card_workspace(x.dtype(), rows, n, vectors) as usize)?;
        // SAFETY: gradients have the shapes of their tensors, and the partial sums the room they need.
        checked("norm_backward", unsafe {
            norm_backward(
                code(x.dtype())?,
                pointer(x)?,
                pointer(stats)?,
                pointer(dy)?,
                pointer(self.weight)?,
                pointer_or_null(self.bias)?,
                pointer_or_null(dx.as_ref())?,
                pointer_or_null(onto)?,
                pointer(&partial)?,
                pointer(grads.weight)?,
                pointer_or_null(grads.bias)?,
                pointer_or_null(sums)?,
                rows as i64,
                n as c_int,
                card_parts(x.dtype(), rows, n) as c_int,
                self.centred as c_int,
                again as c_int,
                stream(device),
            )
        })?;
        Ok(dx)
    }
}

unsafe extern "C" {
    fn norm_forward(
        dtype: c_int,
        x: *const c_void,
        weight: *const c_void,
        bias: *const c_void,
        y: *mut c_void,
        stats: *mut c_void,
        rows: i64,
        n: c_int,
        eps: f64,
        centred: c_int,
        known: c_int,
        stream: Stream,
    ) -> c_int;
    fn norm_backward(
        dtype: c_int,
        x: *const c_void,
        stats: *const c_void,
        dy: *mut c_void,
        weight: *const c_void,
        bias: *const c_void,
        dx: *mut c_void,
        onto: *const c_void,
        partial: *mut c_void,
        dw: *mut c_void,
        db: *mut c_void,
        sums: *mut c_void,
        rows: i64,
        n: c_int,
        parts: c_int,
        centred: c_int,
        again: c_int,
        stream: Stream,
    ) -> c_int;
}
