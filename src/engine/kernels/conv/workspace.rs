//! Temporaries of a convolution, for the plan and for the kernels that allocate them.

use candle_core::DType;

use super::super::channels::{ChannelLayout, GridPartition};
use super::super::clamp::ClampActivation;
use super::super::im2col::{ConvGeometry, PixelBlock};
use super::super::matmul::{
    Threading, Transposed, conv_weight_gradient_workspace, conv_workspace, gemm_workspace,
};
use super::super::{Activation, SavedForBackward, cpu, depthwise};
use super::{chunk_images, weight_gradient_chunks};
use crate::base::{Backend, MicroBatchSpec};

/// Bytes of temporaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvWorkspace {
    pub forward: u64,
    /// Of a backward pass without the gradient of the input.
    pub backward: u64,
    /// Of the gradient of the input, after the others.
    pub input_grad: u64,
}

/// Temporaries of a convolution whose backward pass computes these gradients besides that of the input.
pub fn workspace(
    geometry: &ConvGeometry,
    (weight_grad, bias_grad): (bool, bool),
    act: Activation,
    at: MicroBatchSpec,
) -> ConvWorkspace {
    let g = geometry;
    match at.backend {
        Backend::Cuda { .. } => return cuda_workspace(g, weight_grad, bias_grad, at),
        // For every tap of the window its inputs, their product and the sum so far, and the gradients of all.
        Backend::Reference { .. } => {
            let (h, w) = g.output();
            let tap = at.bytes(h * w * (g.in_channels + 2 * g.out_channels));
            let padded = at.bytes((g.height + 2 * g.padding) * (g.width + 2 * g.padding) * g.in_channels);
            let backward = g.kernel_area() as u64 * 2 * tap + 6 * padded;
            return ConvWorkspace { forward: 4 * tap + 2 * padded, backward, input_grad: 0 };
        }
        Backend::Cpu { .. } => {}
    }
    if g.is_depthwise() {
        let (forward, backward) = g.depthwise_workspace(at, weight_grad);
        return ConvWorkspace { forward, backward, input_grad: 0 };
    }
    let (elem, acc) = (at.dtype.size_in_bytes(), cpu::acc_bytes(at.dtype));
    // The accumulator type, and copies of operands in it where they are stored in another.
    let acc_dtype = if acc == 8 { DType::F64 } else { DType::F32 };
    let copies = |values: usize| if elem == acc { 0 } else { values * acc };
    let packed =
        |m, k, n, transposed| gemm_workspace(acc_dtype, (m, k, n), transposed, Threading::Serial) as usize;
    let blocking = g.blocking(g.kernel_area(), at.batch, at.threads());
    let (rows, k, n, ng) = (blocking.max_rows(), g.patch_len(), g.out_channels, g.out_channels / g.groups);
    let block_list = at.batch.div_ceil(blocking.block_images)
        * blocking.image_pixels.div_ceil(blocking.block_pixels)
        * size_of::<PixelBlock>();
    let direct = elem == acc && act.saved_for_backward() != SavedForBackward::Input;
    let forward = match conv_workspace(at.dtype, g, at.batch)
        .filter(|_| ClampActivation::from_activation(act).is_some())
    {
        Some(packed) => packed as usize,
        None => {
            let outputs = if direct { 0 } else { rows * n * acc };
            let transposed_weight = n * k * acc + g.groups * size_of::<Vec<f32>>();
            let per_thread = g.im2col_bytes(at.dtype, rows, g.kernel_area())
                + outputs
                + packed(rows, k, ng, Transposed::B);
            at.threads() * per_thread + block_list + transposed_weight + copies(n * k)
        }
    };
    let cells = g.taps_per_panel();
    let panel_rows = g.blocking(cells, at.batch, at.threads()).max_rows();
    let chunk_workspace = |batch: usize| match conv_weight_gradient_workspace(at.dtype, g, batch) {
        Some(packed) => packed as usize,
        None => {
            let gemm_bytes =
                copies(panel_rows * n) + packed(ng, panel_rows, cells * g.group_channels(), Transposed::A);
            g.im2col_bytes(at.dtype, panel_rows, cells) + gemm_bytes
        }
    };
    let chunks = weight_gradient_chunks(at.batch, at.threads());
    let weight = match weight_grad {
        true => {
            let images = |chunk: usize| chunk_images(chunk, chunks, at.batch).len();
            (0..chunks).map(|chunk| chunk_workspace(images(chunk))).sum::<usize>()
                + (chunks - 1) * n * k * acc
        }
        false => 0,
    };
    let input = match g.input_gradient_geometry().and_then(|back| conv_workspace(at.dtype, &back, at.batch)) {
        Some(packed) => packed as usize,
        None => {
            let acc_bytes = copies(blocking.block_images * g.height * g.width * g.in_channels);
            let gemm_bytes = copies(rows * n) + packed(rows, ng, k, Transposed::NONE);
            at.threads() * (rows * k * acc + acc_bytes + gemm_bytes) + copies(n * k)
        }
    };
    ConvWorkspace { forward: forward as u64, backward: weight as u64, input_grad: input as u64 }
}

/// Upper bound of a convolution's CUDA workspace. It is the most that cuDNN's engines want for the weight gradients of
/// large filters, and small enough that part of the gathered patches stays in the L2 cache.
const MAX_WORKSPACE: usize = 64 << 20;

/// Bytes of workspace of a convolution that is not pointwise, the same for cuDNN and im2col. At most what all its
/// patches take, what its operands take, and [`MAX_WORKSPACE`]; at least one patch.
pub(super) fn cuda_patch_workspace(g: &ConvGeometry, batch: usize, dtype: DType) -> usize {
    let acc = dtype.size_in_bytes().max(4);
    let all_patches = batch * g.output_pixels() * padded_patch_len(g) * acc;
    let activations = batch
        * (g.height * g.width * g.in_channels + g.output_pixels() * g.out_channels)
        * dtype.size_in_bytes();
    let bytes = all_patches.min(activations + 8 * g.out_channels * padded_patch_len(g)).min(MAX_WORKSPACE);
    bytes.max(padded_patch_len(g) * acc).next_multiple_of(256)
}

/// Values of a gathered patch in the CUDA kernels, zero-padded to a multiple of 8: the GEMM's vector load.
pub(super) fn padded_patch_len(g: &ConvGeometry) -> usize {
    g.patch_len().next_multiple_of(8)
}

/// Bytes of a weight of type `dtype` with rows padded to `padded_patch_len`.
fn padded_weight_bytes(g: &ConvGeometry, dtype: DType) -> usize {
    (g.out_channels * padded_patch_len(g) * dtype.size_in_bytes()).next_multiple_of(256)
}

/// Bytes of the padded copy of the weight that im2col needs where a row is not a multiple of the vector load.
pub(super) fn weight_copy_bytes(g: &ConvGeometry, dtype: DType) -> usize {
    if padded_patch_len(g) == g.patch_len() { 0 } else { padded_weight_bytes(g, dtype) }
}

/// Bytes of the buffer that holds a weight gradient before it is accumulated.
pub(super) fn weight_gradient_bytes(g: &ConvGeometry, dtype: DType) -> usize {
    padded_weight_bytes(g, if dtype == DType::F64 { DType::F64 } else { DType::F32 })
}

fn cuda_workspace(g: &ConvGeometry, weight_grad: bool, bias_grad: bool, at: MicroBatchSpec) -> ConvWorkspace {
    let (batch, dtype) = (at.batch, at.dtype);
    let rows = batch * g.output_pixels();
    let layout = ChannelLayout { channels: g.out_channels, rows, rows_per_unit: rows };
    let sums = match bias_grad {
        true => GridPartition::new(dtype, &layout).parts * g.out_channels * dtype.size_in_bytes().max(4),
        false => 0,
    };
    let (forward, weight, input_grad) = match (g.is_depthwise(), g.is_pointwise()) {
        (true, _) => (0, depthwise::cuda_workspace(g, batch, dtype), 0),
        (_, true) => (0, 0, 0),
        _ => {
            let bytes = cuda_patch_workspace(g, batch, dtype);
            (bytes + weight_copy_bytes(g, dtype), bytes + weight_gradient_bytes(g, dtype), bytes)
        }
    };
    let backward = sums.max(if weight_grad { weight } else { 0 });
    ConvWorkspace { forward: forward as u64, backward: backward as u64, input_grad: input_grad as u64 }
}
