//! Rows that leave their share of the tally on a card, and the sum of all.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::Counted;
use crate::kernels::cuda::{Stream, checked, fresh, pointer, scratch, stream};

/// A loss, a weight and the hits of each row: bits that say that it was judged, right, and among the first five.
pub struct Rows {
    room: Tensor,
    rows: usize,
}

impl Rows {
    pub fn new(device: &CudaDevice, rows: usize) -> Result<Self> {
        Ok(Self { room: scratch(device, rows * (2 * size_of::<f64>() + size_of::<u32>()))?, rows })
    }

    /// Where those of the row `first` are: loss, weight, hits.
    pub fn from(&self, first: usize) -> Result<(*mut f64, *mut f64, *mut u32)> {
        let room: *mut f64 = pointer(&self.room)?.cast();
        let (loss, weight) = (room.wrapping_add(first), room.wrapping_add(self.rows + first));
        Ok((loss, weight, room.wrapping_add(2 * self.rows).cast::<u32>().wrapping_add(first)))
    }

    /// The sum of all, which nobody has waited for.
    pub fn add(self, device: &CudaDevice) -> Result<Counted> {
        let sums = fresh(device, DType::F64, 5)?;
        let (loss, weight, hits) = self.from(0)?;
        // SAFETY: there is room for each of the rows.
        checked("tally_add", unsafe {
            tally_add(
                loss.cast(),
                weight.cast(),
                hits.cast(),
                pointer(&sums)?,
                self.rows as i64,
                stream(device),
            )
        })?;
        Ok(Counted::Later(sums))
    }
}

unsafe extern "C" {
    fn tally_add(
        loss: *const c_void,
        weight: *const c_void,
        hits: *const c_void,
        tally: *mut c_void,
        rows: i64,
        stream: Stream,
    ) -> c_int;
}
