//! Causal attention of new positions over the key-value cache. The decoding pass puts it in the place of every
//! [`Attention`](super::attention::Attention) of a network that generates.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::{Backend, MicroBatchSpec};
use crate::kernels::attention::{AttentionDims, DecodeKernel};
use crate::kernels::rotary::Rotary;

pub struct CachedAttention {
    pub name: String,
    /// `length` is the number of new positions per pass.
    pub sizes: AttentionDims,
    /// Tables of every position that the cache can hold, shared by all layers of the model.
    pub rotary: Option<Arc<Rotary>>,
    /// Which layer of the cache is its own.
    pub cache_layer: usize,
    /// Positions per sequence that the cache holds at most.
    pub capacity: usize,
}

impl Layer for CachedAttention {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        vec![self.sizes.length, self.sizes.width()]
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let Some(pass) = pass.cache else { bail!("{}: the pass has no key-value cache", self.name) };
        let (keys, values) = pass.cache.layer(self.cache_layer)?;
        let kernel = DecodeKernel { dims: self.sizes, rotary: self.rotary.as_deref(), rows: pass.rows };
        Ok((kernel.forward(x, keys, values)?, SavedTensors::default()))
    }

    fn backward(&self, _: SavedTensors, _: Tensor, _: &PassContext, _: bool) -> Result<Option<Tensor>> {
        bail!("{}: generation has no backward pass", self.name)
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let s = &self.sizes;
        let workspace = match spec.backend {
            Backend::Cpu { threads } => DecodeKernel::workspace(s, spec.dtype, spec.batch, threads),
            // No CUDA kernel yet: candle's operations on views of the cache.
            Backend::Cuda { .. } | Backend::Reference { .. } => {
                DecodeKernel::reference_workspace(s, spec.dtype, spec.batch, self.capacity)
            }
        };
        Cost {
            input_grad: spec.bytes(s.length * s.qkv_width()),
            output: spec.bytes(s.length * s.width()),
            forward_workspace: workspace,
            flops: (4 * spec.batch * s.width() * s.length * self.capacity) as u64,
            ..Cost::default()
        }
    }
}
