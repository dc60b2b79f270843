//! The body for cards: parameter by parameter, without waiting for the lengths of steps.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor, bail};

use super::{Adafactor, CARD_BLOCKS, CARD_SUMS, Part, card_columns, parts, state_len};
use crate::kernels::cuda::{Stream, checked, code, pointer, scratch, stream};
use crate::kernels::linear::card_ranges;
use crate::kernels::update::Common;
use crate::params::Flat;

impl Adafactor {
    pub(super) fn card(
        &self,
        device: &CudaDevice,
        c: &Common,
        params: &Flat,
        (weights, grads, state): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        let lengths = [weights, grads, state].map(Tensor::elem_count);
        if lengths != [params.len, params.len, state_len(params)]
            || [grads.dtype(), state.dtype()] != [weights.dtype(); 2]
        {
            bail!("buffers of {lengths:?} values for {} parameters", params.len)
        }
        let columns = scratch(device, card_columns(params, weights.dtype()) as usize)?;
        let sums = scratch(device, CARD_SUMS as usize)?;
        let (sums, size) = (pointer(&sums)?.cast::<f64>(), weights.dtype().size_in_bytes());
        let of = |tensor: &Tensor, at: usize| {
            Ok::<_, candle_core::Error>(pointer(tensor)?.wrapping_byte_add(at * size))
        };
        for Part { start, rows, cols, state: at } in parts(params) {
            let asked = Asked {
                dtype: code(weights.dtype())?,
                weights: of(weights, start)?,
                grads: of(grads, start)?,
                state: of(state, at)?,
                partial: pointer(&columns)?,
                sums,
                found: sums.wrapping_add(CARD_BLOCKS),
                rows: rows as i64,
                cols: cols as i64,
                parts: card_ranges(rows, cols) as c_int,
                blocks: CARD_BLOCKS as c_int,
                grad_scale: c.grad_scale,
                fresh: (self.step as f64).powf(self.decay),
                keep: if start < c.decayed { 1.0 - c.lr * c.weight_decay } else { 1.0 },
                rate: c.lr.min(1.0 / (self.step as f64).sqrt()),
                eps: self.eps,
                clip: self.clip,
            };
            // SAFETY: the parameter and its state lie within their buffers, and the sums have the room they need.
            checked("adafactor_update", unsafe { adafactor_update(&asked, stream(device)) })?;
        }
        Ok(())
    }
}

/// `Asked` in adafactor.cu.
#[repr(C)]
struct Asked {
    dtype: c_int,
    weights: *mut c_void,
    grads: *mut c_void,
    state: *mut c_void,
    partial: *mut c_void,
    sums: *mut f64,
    found: *mut f64,
    rows: i64,
    cols: i64,
    parts: c_int,
    blocks: c_int,
    grad_scale: f64,
    fresh: f64,
    keep: f64,
    rate: f64,
    eps: f64,
    clip: f64,
}

unsafe extern "C" {
    fn adafactor_update(asked: *const Asked, stream: Stream) -> c_int;
}
