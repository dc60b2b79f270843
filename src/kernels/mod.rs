//! Operations on tensors, one file each: a reference in plain candle ops and the bodies that are fast.
//!
//! The reference runs on every device candle has and is the oracle for the bodies. A body takes
//! contiguous tensors, returns fresh ones or adds to the one it is given, records no graph, and gives
//! the same bits whatever the number of threads does in time. Layers are the only callers.

pub mod activation;
pub mod adafactor;
pub mod adamw8bit;
pub mod add;
pub mod attention;
pub mod average;
pub mod batch_norm;
pub mod channels;
pub mod class_token;
pub mod clip;
pub mod conv;
pub mod cpu;
pub mod cross_entropy;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod depthwise;
pub mod dispatch;
pub mod dropout;
pub mod elem;
pub mod embedding;
pub mod group_norm;
pub mod host;
pub mod judge;
pub mod keys;
pub mod lanes;
pub mod linear;
pub mod lion;
pub mod lookup;
pub mod norm;
pub mod packed;
pub mod palette;
pub mod pointwise_loss;
pub mod pool;
pub mod product;
pub mod reference;
pub mod rotary;
pub mod scale;
pub mod swiglu;
pub mod tally;
pub mod turn;
pub mod update;
pub mod windows;

pub use activation::{Activation, Reads};
pub use clip::Clip;
pub use elem::{Elem, Real};

/// A contiguous tensor's values in memory of their own.
pub fn copy(tensor: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(device) = cuda::of(tensor) {
        return cuda::copy(device, tensor);
    }
    tensor.copy()
}
