//! Dropout from a counter-based generator: no mask is stored; the backward pass recomputes it from the same keys.

#[cfg(feature = "cuda")]
mod gpu;

use candle_core::{Result, Tensor};

use super::sample_keys::SampleKeys;
use super::{Elem, Real, cpu, reference};
use crate::with_elem;

/// The threshold below which a 16-bit draw drops a value, and the factor that scales the others.
pub fn threshold_and_scale(p: f64) -> (u64, f64) {
    let threshold = (p * 65536.0).round() as u64;
    (threshold, 65536.0 / (65536 - threshold.min(65535)) as f64)
}

/// Multiplies each value by 0 with probability `p`, else by 1 / (1 - p). Forward and backward are the same call. `p` is
/// a multiple of 2^-16.
pub fn apply(x: &Tensor, p: f64, keys: &SampleKeys) -> Result<Tensor> {
    let (threshold, scale) = threshold_and_scale(p);
    on_cuda!(x, |device| gpu::apply(device, x, threshold, scale, keys));
    if !reference::has_cpu_kernel(x) {
        return apply_reference(x, threshold, scale, keys);
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let width = values.len() / x.dim(0)?.max(1);
        let mut y = cpu::uninit::<T>(values.len());
        let scale = <T as Elem>::Acc::of_f64(scale);
        cpu::parallel_for_chunks(&mut y, width.max(1), |row, y| {
            let key = keys.for_row(row);
            let x = &values[row * width..][..width];
            for (i, (y, x)) in y.chunks_mut(4).zip(x.chunks(4)).enumerate() {
                let bits = key.bits(i as u64);
                for (lane, (y, x)) in y.iter_mut().zip(x).enumerate() {
                    let kept = (bits >> (16 * lane)) & 0xffff >= threshold;
                    *y = T::from_acc(if kept { x.to_acc() * scale } else { Real::ZERO });
                }
            }
        });
        cpu::tensor(y, x.shape())
    })
}

/// Reference implementation: the same mask, built on the host.
fn apply_reference(x: &Tensor, threshold: u64, scale: f64, keys: &SampleKeys) -> Result<Tensor> {
    let (rows, len) = (x.dim(0)?, x.elem_count());
    let width = len / rows.max(1);
    let mask: Vec<f32> = (0..len)
        .map(|at| {
            let (row, i) = (at / width, at % width);
            let kept = (keys.for_row(row).bits(i as u64 / 4) >> (16 * (i % 4))) & 0xffff >= threshold;
            if kept { scale as f32 } else { 0.0 }
        })
        .collect();
    x * Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?
}
