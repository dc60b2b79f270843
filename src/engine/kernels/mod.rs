//! Tensor operations, one file each: a reference implementation in plain candle ops, and optimized CPU and CUDA
//! kernels.
//!
//! The reference runs on every candle device and is the test oracle for the kernels. A kernel takes contiguous tensors.
//! It returns newly allocated tensors or accumulates into the tensor it receives. It records no autograd graph, and its
//! result is bitwise reproducible whatever the thread timing. Only layers call kernels.

/// The first statement of a kernel: times the rest of the block for a profile and returns what the closure makes if the
/// CUDA kernels apply to the tensor, which they never do in builds without CUDA.
macro_rules! on_cuda {
    ($tensor:expr, |$device:ident| $launch:expr) => {
        let _scope = $crate::kernels::kernel_timer::enter(module_path!());
        #[cfg(feature = "cuda")]
        if let Some($device) = $crate::kernels::cuda::device_of($tensor) {
            return $launch;
        }
    };
}
pub(crate) use on_cuda;

pub mod activation;
pub mod adafactor;
pub mod adamw8bit;
pub mod add;
pub mod attention;
pub mod avg_pool;
pub mod batch_norm;
pub mod categorical_embedding;
pub mod channels;
pub mod clamp;
pub mod class_token;
pub mod conv;
pub mod cpu;
pub mod cross_entropy;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
pub mod cuda;
pub mod depthwise;
pub mod dispatch;
pub mod distillation;
pub mod dropout;
pub mod elem;
pub mod embedding;
pub mod fake_quantize;
pub mod feature_error;
pub mod grad_stats;
pub mod grid;
pub mod group_norm;
pub mod host;
pub mod im2col;
pub mod int8_weight;
pub mod kernel_timer;
pub mod lanes;
pub mod linear;
pub mod lion;
pub mod low_rank;
pub mod mask;
pub mod matmul;
pub mod metric_sums;
pub mod norm;
pub mod packed_linear;
pub mod parallel;
pub mod partial_sums;
pub mod pixel_lut;
pub mod pointwise_loss;
pub mod pool;
pub mod reference;
pub mod rotary;
pub mod sample_keys;
pub mod scale;
pub mod swiglu;
mod symmetric_eigen;
pub mod timestamp;
pub mod transpose;
pub mod update;

pub use activation::{Activation, SavedForBackward};
pub use clamp::ClampActivation;
pub use elem::{Elem, Real};

/// Copies a contiguous tensor into newly allocated memory.
pub fn copy(tensor: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
    on_cuda!(tensor, |device| cuda::copy(device, tensor));
    tensor.copy()
}
