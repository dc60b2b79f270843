//! Which backend computes a micro-batch, at which size and dtype: what costs depend on.

use candle_core::DType;

/// What the cost of a layer depends on.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatchSpec {
    /// Samples in the micro-batch.
    pub batch: usize,
    /// Activation dtype.
    pub dtype: DType,
    /// Which kernels run.
    pub backend: Backend,
}

/// Where layers compute. Kernels have one implementation per backend, each with its own workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The CPU, with one workspace per thread.
    Cpu { threads: usize },
    /// A GPU; its compute capability selects the kernels.
    Cuda { capability: ComputeCapability },
    /// Candle's own operations and autograd, in host or device memory.
    Reference { on_gpu: bool },
}

/// Compute capability of a GPU: major, minor.
pub type ComputeCapability = (u32, u32);

/// Hopper, whose kernels need the most memory. Plans assume it if no GPU is named.
pub const HOPPER: ComputeCapability = (9, 0);

impl Backend {
    /// Whether the CUDA kernels run.
    pub fn is_cuda(self) -> bool {
        matches!(self, Backend::Cuda { .. })
    }

    pub fn is_reference(self) -> bool {
        matches!(self, Backend::Reference { .. })
    }

    /// Whether tensors are in device memory.
    pub fn on_gpu(self) -> bool {
        matches!(self, Backend::Cuda { .. } | Backend::Reference { on_gpu: true })
    }

    /// Whether the Hopper kernels run. They use instructions that no other GPU has.
    pub fn is_hopper(self) -> bool {
        matches!(self, Backend::Cuda { capability: HOPPER })
    }
}

impl MicroBatchSpec {
    /// Number of threads of the CPU kernels; 0 on other backends.
    pub fn threads(&self) -> usize {
        match self.backend {
            Backend::Cpu { threads } => threads,
            Backend::Cuda { .. } | Backend::Reference { .. } => 0,
        }
    }

    /// Bytes of `per_sample` values for every sample.
    pub fn bytes(&self, per_sample: usize) -> u64 {
        (self.batch * per_sample * self.dtype.size_in_bytes()) as u64
    }
}
