//! Embedding on a GPU. A kernel cannot report a token outside of the vocabulary: its row becomes NaN, and its gradient
//! is dropped.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Result, Tensor};

use super::{EmbeddingGrads, EmbeddingKernel, cuda_boundary_bytes, cuda_sort_bytes};
use crate::kernels::cuda::column_sums::add_column_sums;
use crate::kernels::cuda::cublaslt::GpuMat;
use crate::kernels::cuda::{
    RawStream, check_status, dtype_code, pointer, pointer_or_null, scratch, stream, uninit,
};

impl EmbeddingKernel<'_> {
    pub(super) fn forward_cuda(&self, device: &CudaDevice, ids: &Tensor) -> Result<Tensor> {
        let ((batch, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let y = uninit(device, self.tokens.dtype(), (batch, length, n))?;
        // SAFETY: `positions` has at least `length` rows, and `y` one row per id.
        check_status("embedding_forward", unsafe {
            embedding_forward(
                dtype_code(y.dtype())?,
                pointer(ids)?,
                pointer(self.tokens)?,
                pointer_or_null(self.positions)?,
                pointer_or_null(self.token_types)?,
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

    pub(super) fn backward_cuda(
        &self,
        device: &CudaDevice,
        ids: &Tensor,
        dy: &Tensor,
        grads: &EmbeddingGrads,
    ) -> Result<()> {
        let ((batch, length), (vocab, n)) = (ids.dims2()?, self.tokens.dims2()?);
        let (rows, dtype, d, stream) =
            (batch * length, dtype_code(dy.dtype())?, pointer(dy)?, stream(device));
        if let Some(tokens) = grads.tokens {
            let sort_buffer = scratch(device, cuda_sort_bytes(rows, vocab) as usize)?;
            let boundaries = scratch(device, cuda_boundary_bytes(dy.dtype(), rows, n) as usize)?;
            // SAFETY: the gradients have the shapes of their tables, and the scratch buffers have the sizes that the
            // kernel needs.
            check_status("embedding_backward_tokens", unsafe {
                embedding_backward_tokens(
                    dtype,
                    pointer(ids)?,
                    d,
                    pointer(tokens)?,
                    pointer(&sort_buffer)?,
                    pointer(&boundaries)?,
                    rows as i64,
                    n as c_int,
                    vocab as i64,
                    stream,
                )
            })?;
        }
        if let Some(positions) = grads.positions {
            let (samples, length, n) = (batch as c_int, length as c_int, n as c_int);
            // SAFETY: as above.
            check_status("embedding_backward_positions", unsafe {
                embedding_backward_positions(dtype, d, pointer(positions)?, samples, length, n, stream)
            })?;
        }
        if let Some(token_types) = grads.token_types {
            add_column_sums(device, &token_types.narrow(0, 0, 1)?, GpuMat::new(dy, rows, n))?;
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
        token_types: *const c_void,
        y: *mut c_void,
        rows: i64,
        length: c_int,
        n: c_int,
        vocab: i64,
        stream: RawStream,
    ) -> c_int;
    fn embedding_backward_tokens(
        dtype: c_int,
        ids: *const c_void,
        dy: *const c_void,
        table: *mut c_void,
        sort_buffer: *mut c_void,
        boundaries: *mut c_void,
        rows: i64,
        n: c_int,
        vocab: i64,
        stream: RawStream,
    ) -> c_int;
    fn embedding_backward_positions(
        dtype: c_int,
        dy: *const c_void,
        table: *mut c_void,
        samples: c_int,
        length: c_int,
        n: c_int,
        stream: RawStream,
    ) -> c_int;
}
