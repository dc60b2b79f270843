//! The way of micro-batches to a card, on which neither the host nor the card waits for the other.
//!
//! A batch is put into page-locked host memory, copied from there on a stream of its own while the card still
//! computes what came before, and taken out of the buffer it arrived in by the computing stream, at whose start the
//! buffer is free for the next one. Two events keep the order: what was not copied is not taken, and what was not
//! taken is not overwritten. Where the system refuses to lock the memory, copies are only slower.

use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::{pointer, uninit};

/// Bytes that a thread copies at once.
const CHUNK: usize = 1 << 20;

/// Values of a batch on the host: rows of `pitch_bytes` bytes, the first `width_bytes` of each of which are wanted.
pub struct HostView<'a> {
    pub bytes: &'a [u8],
    pub pitch_bytes: usize,
    pub width_bytes: usize,
    /// What they are, and in which shape they arrive.
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

/// Inputs, targets, and what is known of the samples.
pub const BATCH_TENSORS: usize = 3;

/// Bytes of a batch on its way.
pub fn batch_bytes(parts: &[HostView; BATCH_TENSORS]) -> usize {
    parts.iter().map(HostView::size_in_bytes).sum()
}

/// Room for the parts of a micro-batch, here and on the device.
pub struct StagingBuffer {
    compute_stream: Arc<CudaStream>,
    copy_stream: Arc<CudaStream>,
    /// The last batch has left the host's memory.
    copy_done: CudaEvent,
    /// The last batch was taken out of the card's buffers.
    consumed: CudaEvent,
    /// Bytes that there is room for of each part: one is behind the other.
    capacity: [usize; BATCH_TENSORS],
    host: PinnedVec,
    /// Flat.
    device_buffers: Vec<Tensor>,
}

impl StagingBuffer {
    /// Room for batches no larger than this one.
    pub fn new(device: &CudaDevice, parts: &[HostView; BATCH_TENSORS]) -> Result<Self> {
        let allocate = |part: &HostView| uninit(device, part.dtype, part.shape.iter().product::<usize>());
        let device_buffers = parts.iter().map(allocate).collect::<Result<Vec<_>>>()?;
        let compute_stream = device.cuda_stream();
        let copy_stream = compute_stream.context().new_stream().w()?;
        let event = || compute_stream.context().new_event(None).w();
        let (copy_done, consumed) = (event()?, event()?);
        // The buffers are there once the computing stream has come to where they were asked for.
        consumed.record(&compute_stream).w()?;
        let (capacity, host) =
            (parts.each_ref().map(HostView::size_in_bytes), PinnedVec::new(batch_bytes(parts)));
        Ok(Self { compute_stream, copy_stream, copy_done, consumed, capacity, host, device_buffers })
    }

    /// Whether there is room for such a batch.
    pub fn fits(&self, parts: &[HostView; BATCH_TENSORS]) -> bool {
        let has_capacity = |buffer: &Tensor, part: &HostView| {
            buffer.dtype() == part.dtype && part.shape.iter().product::<usize>() <= buffer.elem_count()
        };
        self.device_buffers.iter().zip(parts).all(|(buffer, part)| has_capacity(buffer, part))
    }

    /// Carries a batch that [fits](Self::fits), and lets `consume` read the parts that arrive. What it makes of them must not
    /// share their memory, which the next batch overwrites.
    pub fn upload<R>(
        &mut self,
        parts: &[HostView; BATCH_TENSORS],
        consume: impl FnOnce(&[Tensor]) -> Result<R>,
    ) -> Result<R> {
        // Long done, unless the host is two micro-batches ahead of the card.
        self.copy_done.synchronize().w()?;
        self.copy_stream.wait(&self.consumed).w()?;
        let mut host = self.host.bytes.as_mut_slice();
        for ((part, capacity), buffer) in parts.iter().zip(self.capacity).zip(&self.device_buffers) {
            let (own, rest) = host.split_at_mut(capacity);
            host = rest;
            let own = &mut own[..part.size_in_bytes()];
            part.write(own);
            // SAFETY: the card's buffer is no shorter than the host's, whose bytes stay as they are until `copy_done`.
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
    /// What is on its way arrives before either end is given back. A failure is the stream's, and told by its next use.
    fn drop(&mut self) {
        let _ = self.copy_stream.synchronize();
    }
}

/// Host memory that the card reads by itself, where the system allows it to be locked.
struct PinnedVec {
    bytes: Vec<u8>,
    registered: bool,
}

impl PinnedVec {
    fn new(len: usize) -> Self {
        let mut bytes = vec![0; len];
        // SAFETY: the memory is there until `drop`, and never moves: it is not grown.
        let code = unsafe { sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast::<c_void>(), len, 0) };
        Self { bytes, registered: code == sys::CUresult::CUDA_SUCCESS }
    }
}

impl Drop for PinnedVec {
    fn drop(&mut self) {
        if self.registered {
            // SAFETY: it was locked, and nothing is on its way from it any more. It fails with the context alone.
            unsafe { sys::cuMemHostUnregister(self.bytes.as_mut_ptr().cast::<c_void>()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernels::cuda::copy;
    use crate::layers::gradcheck;
    use crate::random::{RngKey, stream_id};

    /// Batches of all sizes arrive as they were sent while the card is behind by several of them, cut rows too, and
    /// what was made of one is not touched by the next.
    #[test]
    fn batches_arrive_as_they_were_sent() {
        let Device::Cuda(device) = gradcheck::test_device() else {
            return eprintln!("skipped: no card is asked for");
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
