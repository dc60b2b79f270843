//! The body for cards, and how the host is told of its findings.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, Tensor};

use super::{Judged, Terms};
use crate::kernels::cuda::{Stream, checked, fresh, pointer, stream};
use crate::kernels::tally::{Counted, Tally};
use crate::kernels::update::card::squares;

/// Numbers that are told: the tally's five, the norm and what gradients are multiplied with.
const NUMBERS: usize = 7;
const GRAD_SCALE: usize = 6;

/// Judges one update after the other; that of the one before is kept.
pub struct Judge {
    slots: [Arc<Slot>; 2],
    next: usize,
}

/// Findings there and, after an event, here.
struct Slot {
    there: Tensor,
    here: *mut f64,
    told: CudaEvent,
}

// SAFETY: the memory is the slot's own; it is written by the card before the event and read after it.
unsafe impl Send for Slot {}
unsafe impl Sync for Slot {}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: it was allocated so, and the card is done with it. It fails with the context alone.
        let _ = self.told.synchronize().and_then(|()| unsafe { result::free_host(self.here.cast()) });
    }
}

/// What a card will have found out; good until the update after the next is judged.
#[derive(Clone)]
pub struct Later(Arc<Slot>);

impl Judge {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let slot = || -> Result<Arc<Slot>> {
            let told = device.cuda_stream().context().new_event(None).w()?;
            // SAFETY: the bytes are written before they are read, and freed with the slot.
            let here = unsafe { result::malloc_host(NUMBERS * size_of::<f64>(), 0) }.w()?.cast();
            Ok(Arc::new(Slot { there: fresh(device, DType::F64, NUMBERS)?, here, told }))
        };
        Ok(Self { slots: [slot()?, slot()?], next: 0 })
    }

    /// Judges the gradients `grads` of micro-batches that counted this. Nobody waits.
    pub fn judge(&mut self, counted: &[Counted], grads: &Tensor, terms: &Terms) -> Result<Later> {
        let slot = &self.slots[self.next];
        self.next ^= 1;
        let Some(device) = crate::kernels::cuda::of(grads) else {
            candle_core::bail!("gradients on no card")
        };
        let (computing, there) = (device.cuda_stream(), pointer(&slot.there)?);
        let squares = squares(device, grads)?;
        let nothing = [Counted::Known(Tally::default())];
        let counted = if counted.is_empty() { &nothing } else { counted };
        for (i, part) in counted.iter().enumerate() {
            let sums = match part {
                Counted::Later(sums) => sums.clone(),
                Counted::Known(t) => {
                    let numbers = [t.loss, t.weight, t.count as f64, t.top1 as f64, t.top5 as f64];
                    Tensor::new(&numbers, grads.device())?
                }
            };
            // SAFETY: both have the five sums of a tally.
            checked("judge_add", unsafe {
                judge_add(pointer(&sums)?, there, (i == 0) as c_int, stream(device))
            })?;
        }
        let clip = terms.clip.unwrap_or(f64::INFINITY);
        // SAFETY: there is room for all numbers.
        checked("judge", unsafe {
            judge(pointer(&squares)?, there, terms.nominal, terms.scale, clip, stream(device))
        })?;
        // SAFETY: both sides have so many numbers, and live as long as the slot.
        unsafe {
            let here = std::slice::from_raw_parts_mut(slot.here, NUMBERS);
            result::memcpy_dtoh_async(here, there as u64, computing.cu_stream()).w()?;
        }
        slot.told.record(&computing).w()?;
        Ok(Later(slot.clone()))
    }
}

impl Later {
    /// Where what gradients are multiplied with will be: one f64.
    pub fn grad_scale(&self) -> Result<Tensor> {
        self.0.there.narrow(0, GRAD_SCALE, 1)
    }

    /// Waits for the card to have come to it, not for what was asked of it since.
    pub fn read(&self) -> Result<Judged> {
        self.0.told.synchronize().w()?;
        // SAFETY: the card has written them, and writes no others until the slot's turn comes again.
        let n = unsafe { std::slice::from_raw_parts(self.0.here, NUMBERS) };
        let tally =
            Tally { loss: n[0], weight: n[1], count: n[2] as u64, top1: n[3] as u64, top5: n[4] as u64 };
        Ok(Judged { tally, norm: n[5], grad_scale: n[GRAD_SCALE] })
    }
}

unsafe extern "C" {
    fn judge_add(sums: *const c_void, judged: *mut c_void, first: c_int, stream: Stream) -> c_int;
    fn judge(
        squares: *const c_void,
        judged: *mut c_void,
        nominal: f64,
        scale: f64,
        clip: f64,
        stream: Stream,
    ) -> c_int;
}
