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

use super::{fresh, pointer};

/// Bytes that a thread copies at once.
const CHUNK: usize = 1 << 20;

/// Values of a batch on the host: rows of `row` bytes, the first `kept` of each of which are wanted.
pub struct Part<'a> {
    pub bytes: &'a [u8],
    pub row: usize,
    pub kept: usize,
    /// What they are, and in which shape they arrive.
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Part<'_> {
    fn bytes_kept(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    fn write(&self, into: &mut [u8]) {
        if self.row == self.kept {
            return into
                .par_chunks_mut(CHUNK)
                .zip(self.bytes.par_chunks(CHUNK))
                .for_each(|(to, from)| to.copy_from_slice(from));
        }
        let rows = into.chunks_exact_mut(self.kept.max(1)).zip(self.bytes.chunks_exact(self.row.max(1)));
        rows.for_each(|(to, from)| to.copy_from_slice(&from[..self.kept]));
    }
}

/// Inputs, targets, and what is known of the samples.
pub const PARTS: usize = 3;

/// Bytes of a batch on its way.
pub fn bytes(parts: &[Part; PARTS]) -> usize {
    parts.iter().map(Part::bytes_kept).sum()
}

/// Room for the parts of a micro-batch, here and on the device.
pub struct Carrier {
    computing: Arc<CudaStream>,
    copying: Arc<CudaStream>,
    /// The last batch has left the host's memory.
    copied: CudaEvent,
    /// The last batch was taken out of the card's buffers.
    taken: CudaEvent,
    /// Bytes that there is room for of each part: one is behind the other.
    room: [usize; PARTS],
    host: Locked,
    /// Flat.
    there: Vec<Tensor>,
}

impl Carrier {
    /// Room for batches no larger than this one.
    pub fn new(device: &CudaDevice, parts: &[Part; PARTS]) -> Result<Self> {
        let there = |part: &Part| fresh(device, part.dtype, part.shape.iter().product::<usize>());
        let there = parts.iter().map(there).collect::<Result<Vec<_>>>()?;
        let computing = device.cuda_stream();
        let copying = computing.context().new_stream().w()?;
        let event = || computing.context().new_event(None).w();
        let (copied, taken) = (event()?, event()?);
        // The buffers are there once the computing stream has come to where they were asked for.
        taken.record(&computing).w()?;
        let (room, host) = (parts.each_ref().map(Part::bytes_kept), Locked::new(bytes(parts)));
        Ok(Self { computing, copying, copied, taken, room, host, there })
    }

    /// Whether there is room for such a batch.
    pub fn fits(&self, parts: &[Part; PARTS]) -> bool {
        let room = |there: &Tensor, part: &Part| {
            there.dtype() == part.dtype && part.shape.iter().product::<usize>() <= there.elem_count()
        };
        self.there.iter().zip(parts).all(|(there, part)| room(there, part))
    }

    /// Carries a batch that [fits](Self::fits), and lets `take` read the parts that arrive. What it makes of them must not
    /// share their memory, which the next batch overwrites.
    pub fn carry<R>(
        &mut self,
        parts: &[Part; PARTS],
        take: impl FnOnce(&[Tensor]) -> Result<R>,
    ) -> Result<R> {
        // Long done, unless the host is two micro-batches ahead of the card.
        self.copied.synchronize().w()?;
        self.copying.wait(&self.taken).w()?;
        let mut host = self.host.bytes.as_mut_slice();
        for ((part, room), there) in parts.iter().zip(self.room).zip(&self.there) {
            let (own, rest) = host.split_at_mut(room);
            host = rest;
            let own = &mut own[..part.bytes_kept()];
            part.write(own);
            // SAFETY: the card's buffer is no shorter than the host's, whose bytes stay as they are until `copied`.
            unsafe { result::memcpy_htod_async(pointer(there)? as u64, own, self.copying.cu_stream()) }
                .w()?;
        }
        self.copied.record(&self.copying).w()?;
        self.computing.wait(&self.copied).w()?;
        let arrived = parts.iter().zip(&self.there).map(|(part, there)| {
            let shape = part.shape.as_slice();
            there.narrow(0, 0, shape.iter().product())?.reshape(shape)
        });
        let made = arrived.collect::<Result<Vec<_>>>().and_then(|arrived| take(&arrived));
        self.taken.record(&self.computing).w()?;
        made
    }
}

impl Drop for Carrier {
    /// What is on its way arrives before either end is given back. A failure is the stream's, and told by its next use.
    fn drop(&mut self) {
        let _ = self.copying.synchronize();
    }
}

/// Host memory that the card reads by itself, where the system allows it to be locked.
struct Locked {
    bytes: Vec<u8>,
    locked: bool,
}

impl Locked {
    fn new(len: usize) -> Self {
        let mut bytes = vec![0; len];
        // SAFETY: the memory is there until `drop`, and never moves: it is not grown.
        let code = unsafe { sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast::<c_void>(), len, 0) };
        Self { bytes, locked: code == sys::CUresult::CUDA_SUCCESS }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.locked {
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
    use crate::layers::check;
    use crate::random::{Random, stream};

    /// Batches of all sizes arrive as they were sent while the card is behind by several of them, cut rows too, and
    /// what was made of one is not touched by the next.
    #[test]
    fn batches_arrive_as_they_were_sent() {
        let Device::Cuda(device) = check::device() else {
            return eprintln!("skipped: no card is asked for");
        };
        let random = |batch: u64, i: usize| Random::new(batch, stream("carrier")).bits(i as u64) as u32;
        const WIDTH: usize = 70_000;
        let busy = check::random(&[2048, 2048], 1).to_dtype(DType::F32).unwrap();
        let mut carrier = None;
        let (mut sent, mut made) = (Vec::new(), Vec::new());
        for batch in 0..40u64 {
            let rows = [8, 3, 8, 1, 7][batch as usize % 5];
            let inputs: Vec<u32> = (0..rows * WIDTH).map(|i| random(batch, i)).collect();
            let targets: Vec<u32> = (0..rows * 5).map(|i| random(batch, i)).collect();
            let part = |values, row: usize, kept: usize| Part {
                bytes: bytemuck::cast_slice::<u32, u8>(values),
                row: 4 * row,
                kept: 4 * kept,
                dtype: DType::U32,
                shape: vec![rows, kept],
            };
            let ids: Vec<u32> = (0..rows as u32).collect();
            let parts = [part(&inputs, WIDTH, WIDTH), part(&targets, 5, 2), part(&ids, 1, 1)];
            let carrier: &mut Carrier = carrier.get_or_insert_with(|| Carrier::new(&device, &parts).unwrap());
            assert!(carrier.fits(&parts));
            let take = |arrived: &[Tensor]| {
                arrived.iter().map(|part| copy(&device, part)).collect::<Result<Vec<_>>>()
            };
            made.push(carrier.carry(&parts, take).unwrap());
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
        let carrier = carrier.unwrap();
        let fits = |rows: usize, dtype: DType| {
            let part = |bytes, width: usize, dtype| Part {
                bytes,
                row: 4 * width,
                kept: 4 * width,
                dtype,
                shape: vec![rows, width],
            };
            carrier.fits(&[
                part(&large, WIDTH, dtype),
                part(&small, 1, DType::U32),
                part(&small, 1, DType::U32),
            ])
        };
        assert!(!fits(9, DType::U32), "too many rows");
        assert!(!fits(1, DType::F32), "of another type");
    }
}
