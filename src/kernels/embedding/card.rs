//! The body for cards. A token outside of the vocabulary cannot be named from there: its row is not a number,
//! and its gradient is left out.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{Embedding, Grads, card_ends, card_sorting};
use crate::kernels::cuda::columns::add_sums;
use crate::kernels::cuda::product::Mat;
use crate::kernels::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream};

impl Embedding<'_> {
    pub(super) fn forward_card(&self, device: &CudaDevice, ids: &Tensor) -> Result<Tensor> {
        let ((batch, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let y = fresh(device, self.tokens.dtype(), (batch, length, n))?;
        // SAFETY: `positions` has a row for each of `length`, and `y` one for each id.
        checked("embedding_forward", unsafe {
            embedding_forward(
                code(y.dtype())?,
                pointer(ids)?,
                pointer(self.tokens)?,
                pointer_or_null(self.positions)?,
                pointer_or_null(self.kinds)?,
                pointer(&y)?,
                (batch * length) as i64,
                length as c_int,
                n as c_int,
                vocab as i64,
                stream(device),
            )
        })?;
        Ok(y)
    }

    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        ids: &Tensor,
        dy: &Tensor,
        grads: &Grads,
    ) -> Result<()> {
        let ((batch, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let (rows, dtype, d, stream) = (batch * length, code(dy.dtype())?, pointer(dy)?, stream(device));
        let sorting = scratch(device, card_sorting(rows, vocab) as usize)?;
        let ends = scratch(device, card_ends(dy.dtype(), rows, n) as usize)?;
        // SAFETY: the gradients have the shapes of their tables, and the scratch the room that is asked for.
        checked("embedding_backward_tokens", unsafe {
            embedding_backward_tokens(
                dtype,
                pointer(ids)?,
                d,
                pointer(grads.tokens)?,
                pointer(&sorting)?,
                pointer(&ends)?,
                rows as i64,
                n as c_int,
                vocab as i64,
                stream,
            )
        })?;
        drop((sorting, ends));
        if let Some(positions) = grads.positions {
            let (samples, length, n) = (batch as c_int, length as c_int, n as c_int);
            // SAFETY: as above.
            checked("embedding_backward_positions", unsafe {
                embedding_backward_positions(dtype, d, pointer(positions)?, samples, length, n, stream)
            })?;
        }
        if let Some(kinds) = grads.kinds {
            add_sums(device, &kinds.narrow(0, 0, 1)?, Mat::new(dy, rows, n))?;
        }
        Ok(())
    }
}

unsafe extern "C" {
    fn embedding_forward(
        dtype: c_int,
        ids: *const c_void,
        tokens: *const c_void,
        positions: *const c_void,
        kinds: *const c_void,
        y: *mut c_void,
        rows: i64,
        length: c_int,
        n: c_int,
        vocab: i64,
        stream: Stream,
    ) -> c_int;
    fn embedding_backward_tokens(
        dtype: c_int,
        ids: *const c_void,
        dy: *const c_void,
        table: *mut c_void,
        sorting: *mut c_void,
        ends: *mut c_void,
        rows: i64,
        n: c_int,
        vocab: i64,
        stream: Stream,
    ) -> c_int;
    fn embedding_backward_positions(
        dtype: c_int,
        dy: *const c_void,
        table: *mut c_void,
        samples: c_int,
        length: c_int,
        n: c_int,
        stream: Stream,
    ) -> c_int;
}
