//! The size of CUDA grids.

/// Streaming multiprocessors that grids are sized for, whatever the GPU has: how a sum is split, and with it every bit
/// of the result and every byte of its workspace, depends on the sizes of the tensors alone. As many as large GPUs
/// have. `kernels/cuda/device.cuh` has it too.
pub const GRID_SMS: usize = 132;
