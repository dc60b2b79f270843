//! Names and sizes of what the estimate reserves besides the passes of the network.

use std::ops::Range;

use candle_core::DType;

use crate::base::features::{Features, InputSpec};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::{fake_quantize, sample_keys};
use crate::params::{FlatLayout, MemoryFormat, ParamLayout};

/// Heap bytes the program holds besides its reservations: the measured size of argument parsing, the job, the network
/// description, thread pools and reports, with a margin.
pub const PROGRAM_HEAP_BYTES: u64 = 3 << 19;

/// Device bytes for allocations too small to count one by one: reductions that are read back, and the driver's
/// rounding.
pub const SMALL_ALLOCATION_BYTES: u64 = 256 << 10;

/// Device bytes of the workspace that all GEMMs on a GPU share.
pub const GEMM_WORKSPACE_BYTES: u64 = 32 << 20;

/// The name that reservations for batches in transfer to the GPU carry.
pub const STAGED_BATCH: &str = "micro-batch in staging";

/// The name that the reservation for the metrics of an evaluation carries.
pub const EVALUATION_METRICS: &str = "evaluation metrics";

/// The name that the reservations of rounding weights carry.
pub const QUANTIZATION: &str = "quantization";

/// Bytes of temporaries where tensors reside while weights are rounded.
pub fn rounding_bytes(params: &FlatLayout, backend: Backend) -> u64 {
    let bytes = |(_, range): (_, Range<usize>)| fake_quantize::rows_workspace(range.len(), backend);
    params.quantized().map(bytes).max().unwrap_or(0)
}

/// The name that the reservations of pruning carry.
pub const PRUNING: &str = "pruning";

/// The name that the reservation for the decomposition of initial weights carries.
pub const FACTORIZATION: &str = "low-rank factorization";

/// The name that reservations for the teacher's stored logits carry.
pub const STORED_LOGITS: &str = "teacher's logits";

/// Buffers of a file that is written, and read again for its checksum.
pub(super) const FILE_BUFFER_BYTES: u64 = 2 << 18;

/// The weights of the teacher.
pub(super) const TEACHER: &str = "teacher";

pub(super) const MASTER_WEIGHTS: &str = "master weights";
pub(super) const RECORDER: &str = "memory recorder";
pub(super) const GEMM_WORKSPACE: &str = "matrix products";
pub(super) const ROUNDING: &str = "rounding";
pub(super) const GRADIENTS: &str = "gradients";

/// Bytes per value of the master weights.
pub(super) fn master_dtype_bytes(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Bytes of a micro-batch as tensors.
pub fn batch_bytes(features: &Features, spec: MicroBatchSpec) -> u64 {
    let value = match &features.input {
        InputSpec::Floats { .. } => spec.dtype.size_in_bytes(),
        InputSpec::Tabular { .. } | InputSpec::Tokens { .. } => 4,
    };
    let sample_key_bytes = if spec.backend.on_gpu() { sample_keys::sample_info_bytes(spec.batch) } else { 0 };
    (spec.batch * (value * features.input_len() + 4 * features.target_len()) + sample_key_bytes) as u64
}

/// Bytes of a micro-batch in transfer to a GPU: this many in pinned host memory, and as many on the device.
pub fn staging_bytes(features: &Features, samples: usize) -> u64 {
    (samples * features.value_bytes() + sample_keys::sample_info_bytes(samples)) as u64
}

/// Bytes needed to write a checkpoint: a copy of the largest parameter that must be permuted from channels-last, or two
/// of the largest frozen one that is converted from the compute dtype, and the file buffer.
pub fn checkpoint_write_bytes(layout: &ParamLayout, dtype: DType) -> u64 {
    let permuted = largest_param_len(layout, |memory_format| memory_format == MemoryFormat::ChannelsLast);
    let frozen = layout.params.frozen().map(|(spec, _)| spec.len() as u64).max().unwrap_or(0);
    let converted = if dtype.size_in_bytes() as u64 == master_dtype_bytes(dtype) { 0 } else { 2 * frozen };
    permuted.max(converted) * master_dtype_bytes(dtype) + (1 << 20)
}

/// Number of values in the largest parameter of such a memory format.
pub(super) fn largest_param_len(layout: &ParamLayout, matches: impl Fn(MemoryFormat) -> bool) -> u64 {
    let sizes = layout
        .params
        .iter()
        .filter(|(spec, _)| matches(spec.memory_format))
        .map(|(spec, _)| spec.len() as u64);
    sizes.max().unwrap_or(0)
}
