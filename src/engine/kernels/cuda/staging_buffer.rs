//! Uploads micro-batches to a GPU asynchronously: neither the host nor the GPU waits for the other.
//!
//! The host writes a batch into page-locked memory. A copy stream transfers it while the GPU still computes the
//! previous batch. The compute stream then consumes the device buffer, which frees it for the next batch. Two events
//! keep the order: nothing is consumed before its copy is done, and nothing is overwritten before it is consumed. If
//! the system refuses to pin the memory, copies still work but are slower.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::{pointer, uninit};

/// Bytes that a thread copies at a time.
const CHUNK: usize = 1 << 20;

/// A tensor of a batch on the host: rows `pitch_bytes` apart, of which the first `width_bytes` bytes are uploaded.
pub struct HostView<'a> {
    pub bytes: &'a [u8],
    pub pitch_bytes: usize,
    pub width_bytes: usize,
    /// Dtype and shape on the device.
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl HostView<'_> {
    fn size_in_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    fn write(&self, into: &mut [u8]) {
        if self.pitch_bytes == self.width_bytes {
            return into
                .par_chunks_mut(CHUNK)
                .zip(self.bytes.par_chunks(CHUNK))
                .for_each(|(to, from)| to.copy_from_slice(from));
        }
        let rows = into
            .chunks_exact_mut(self.width_bytes.max(1))
            .zip(self.bytes.chunks_exact(self.pitch_bytes.max(1)));
        rows.for_each(|(to, from)| to.copy_from_slice(&from[..self.width_bytes]));
    }
}

/// Inputs, targets and sample info.
pub const BATCH_TENSORS: usize = 3;

/// Size of a batch in bytes as uploaded.
pub fn batch_bytes(parts: &[HostView; BATCH_TENSORS]) -> usize {
    parts.iter().map(HostView::size_in_bytes).sum()
}

/// Pinned host memory and device buffers for the tensors of one micro-batch.
pub struct StagingBuffer {
    compute_stream: Arc<CudaStream>,
    copy_stream: Arc<CudaStream>,
    /// The last batch has been copied out of host memory.
    copy_done: CudaEvent,
    /// The compute stream has consumed the last batch.
    consumed: CudaEvent,
    /// Capacity per tensor in bytes; the tensors lie back to back in `host`.
    capacity: [usize; BATCH_TENSORS],
    host: PinnedVec,
    /// One-dimensional, one per tensor.
    device_buffers: Vec<Tensor>,
}

impl StagingBuffer {
    /// Allocates buffers for batches no larger than this one.
    pub fn new(device: &CudaDevice, parts: &[HostView; BATCH_TENSORS]) -> Result<Self> {
        let allocate = |part: &HostView| uninit(device, part.dtype, part.shape.iter().product::<usize>());
        let device_buffers = parts.iter().map(allocate).collect::<Result<Vec<_>>>()?;
        let compute_stream = device.cuda_stream();
        let copy_stream = compute_stream.context().new_stream().w()?;
        let event = || compute_stream.context().new_event(None).w();
        let (copy_done, consumed) = (event()?, event()?);
        // The copy stream may write the device buffers only once the compute stream has passed their allocation.
        consumed.record(&compute_stream).w()?;
        let (capacity, host) =
            (parts.each_ref().map(HostView::size_in_bytes), PinnedVec::new(batch_bytes(parts)));
        Ok(Self { compute_stream, copy_stream, copy_done, consumed, capacity, host, device_buffers })
    }

    /// Whether the buffers can hold this batch.
    pub fn fits(&self, parts: &[HostView; BATCH_TENSORS]) -> bool {
        let has_capacity = |buffer: &Tensor, part: &HostView| {
            buffer.dtype() == part.dtype && part.shape.iter().product::<usize>() <= buffer.elem_count()
        };
        self.device_buffers.iter().zip(parts).all(|(buffer, part)| has_capacity(buffer, part))
    }

    /// Uploads a batch that [fits](Self::fits) and passes the device tensors to `consume`. Its result must not share
    /// their memory, because the next batch overwrites it.
    pub fn upload<R>(
        &mut self,
        parts: &[HostView; BATCH_TENSORS],
        consume: impl FnOnce(&[Tensor]) -> Result<R>,
    ) -> Result<R> {
        // Blocks only if the host is two micro-batches ahead of the GPU.
        self.copy_done.synchronize().w()?;
        self.copy_stream.wait(&self.consumed).w()?;
        let mut host = self.host.bytes.as_mut_slice();
        for ((part, capacity), buffer) in parts.iter().zip(self.capacity).zip(&self.device_buffers) {
            let (own, rest) = host.split_at_mut(capacity);
            host = rest;
            let own = &mut own[..part.size_in_bytes()];
            part.write(own);
            // SAFETY: the device buffer is at least as long as `own`, and the host bytes stay unchanged until
            // `copy_done`.
            unsafe { result::memcpy_htod_async(pointer(buffer)? as u64, own, self.copy_stream.cu_stream()) }
                .w()?;
        }
        self.copy_done.record(&self.copy_stream).w()?;
        self.compute_stream.wait(&self.copy_done).w()?;
        let arrived = parts.iter().zip(&self.device_buffers).map(|(part, buffer)| {
            let shape = part.shape.as_slice();
            buffer.narrow(0, 0, shape.iter().product())?.reshape(shape)
        });
        let output = arrived.collect::<Result<Vec<_>>>().and_then(|arrived| consume(&arrived));
        self.consumed.record(&self.compute_stream).w()?;
        output
    }
}

impl Drop for StagingBuffer {
    /// Waits for the copy in flight before either side is freed. An error belongs to the stream, and its next use
    /// reports it.
    fn drop(&mut self) {
        let _ = self.copy_stream.synchronize();
    }
}

/// Host memory, page-locked if the system permits it.
struct PinnedVec {
    bytes: Vec<u8>,
    registered: bool,
}

impl PinnedVec {
    fn new(len: usize) -> Self {
        let mut bytes = vec![0; len];
        // SAFETY: the memory lives until `drop` and never moves, because the vector never grows.
        let code = unsafe { sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast::<c_void>(), len, 0) };
        Self { bytes, registered: code == sys::CUresult::CUDA_SUCCESS }
    }
}

impl Drop for PinnedVec {
    fn drop(&mut self) {
        if self.registered {
            // SAFETY: the memory was registered, and no copy from it is in flight. The call fails only if the context
            // is gone.
            unsafe { sys::cuMemHostUnregister(self.bytes.as_mut_ptr().cast::<c_void>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::base::random::{RngKey, stream_id};
    use crate::kernels::cuda::copy;
    use crate::layers::gradcheck;

    /// Batches of varying sizes and with narrowed rows arrive intact while the GPU lags several batches behind, and a
    /// later batch does not change what was copied out of an earlier one.
    #[test]
    fn batches_arrive_as_they_were_sent() {
        let Device::Cuda(device) = gradcheck::test_device() else {
            return eprintln!("skipped: no GPU requested");
        };
        let random = |batch: u64, i: usize| RngKey::new(batch, stream_id("carrier")).bits(i as u64) as u32;
        const WIDTH: usize = 70_000;
        let busy = gradcheck::random_tensor(&[2048, 2048], 1).to_dtype(DType::F32).unwrap();
        let mut staging = None;
        let (mut sent, mut made) = (Vec::new(), Vec::new());
        for batch in 0..40u64 {
            let rows = [8, 3, 8, 1, 7][batch as usize % 5];
            let inputs: Vec<u32> = (0..rows * WIDTH).map(|i| random(batch, i)).collect();
            let targets: Vec<u32> = (0..rows * 5).map(|i| random(batch, i)).collect();
            let part = |values, row: usize, kept: usize| HostView {
                bytes: bytemuck::cast_slice::<u32, u8>(values),
                pitch_bytes: 4 * row,
                width_bytes: 4 * kept,
                dtype: DType::U32,
                shape: vec![rows, kept],
            };
            let ids: Vec<u32> = (0..rows as u32).collect();
            let parts = [part(&inputs, WIDTH, WIDTH), part(&targets, 5, 2), part(&ids, 1, 1)];
            let staging: &mut StagingBuffer =
                staging.get_or_insert_with(|| StagingBuffer::new(&device, &parts).unwrap());
            assert!(staging.fits(&parts));
            let take = |arrived: &[Tensor]| {
                arrived.iter().map(|part| copy(&device, part)).collect::<Result<Vec<_>>>()
            };
            made.push(staging.upload(&parts, take).unwrap());
            (0..4).for_each(|_| drop(busy.matmul(&busy).unwrap()));
            let cut: Vec<u32> = targets.chunks(5).flat_map(|row| row[..2].to_vec()).collect();
            sent.push([inputs, cut, ids]);
        }
        for (i, (sent, made)) in sent.iter().zip(&made).enumerate() {
            for (sent, made) in sent.iter().zip(made) {
                assert!(*sent == made.flatten_all().unwrap().to_vec1::<u32>().unwrap(), "batch {i}");
            }
        }
        let (large, small) = (vec![0; 4 * 9 * WIDTH], [0; 4 * 9]);
        let staging = staging.unwrap();
        let fits = |rows: usize, dtype: DType| {
            let part = |bytes, width: usize, dtype| HostView {
                bytes,
                pitch_bytes: 4 * width,
                width_bytes: 4 * width,
                dtype,
                shape: vec![rows, width],
            };
            staging.fits(&[
                part(&large, WIDTH, dtype),
                part(&small, 1, DType::U32),
                part(&small, 1, DType::U32),
            ])
        };
        assert!(!fits(9, DType::U32), "too many rows");
        assert!(!fits(1, DType::F32), "of another type");
    }
}
