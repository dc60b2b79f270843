//! The key-value cache of generation: keys, rotated, and values of every position so far, per layer and sequence.
//!
//! It is allocated once, in the compute dtype, for a number of slots that hold one sequence each. Layers append to it
//! in place during a pass; [`KvCache::advance`] makes the new positions count afterwards, so a pass that fails has
//! changed nothing. A sequence can be cut back to any length.

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::kernels::attention::CacheRows;
use crate::kernels::cpu::size_in_bytes;

/// The sizes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheDims {
    /// Attention layers.
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Sequences at once.
    pub slots: usize,
    /// Positions per sequence at most.
    pub capacity: usize,
}

impl CacheDims {
    /// Bytes of keys and values.
    pub fn bytes(&self, dtype: DType) -> u64 {
        size_in_bytes(dtype, 2 * self.layers * self.slots * self.kv_heads * self.capacity * self.head_dim)
    }
}

pub struct KvCache {
    dims: CacheDims,
    /// Per layer, (slots, kv_heads, capacity, head_dim).
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
    /// Cached positions per slot.
    lengths: Vec<usize>,
}

/// The cache during a pass, and where the rows of the micro-batch are in it.
#[derive(Clone, Copy)]
pub struct CachePass<'a> {
    pub cache: &'a KvCache,
    pub rows: CacheRows<'a>,
}

impl KvCache {
    /// Allocates [`CacheDims::bytes`], which the caller has reserved.
    pub fn new(dims: CacheDims, dtype: DType, device: &Device) -> Result<Self> {
        let layer =
            |_| Tensor::zeros((dims.slots, dims.kv_heads, dims.capacity, dims.head_dim), dtype, device);
        Ok(Self {
            keys: (0..dims.layers).map(layer).collect::<Result<_>>()?,
            values: (0..dims.layers).map(layer).collect::<Result<_>>()?,
            lengths: vec![0; dims.slots],
            dims,
        })
    }

    pub fn dims(&self) -> CacheDims {
        self.dims
    }

    /// Cached positions of a slot.
    pub fn length(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    /// Keys and values of an attention layer, (slots, kv_heads, capacity, head_dim) each.
    pub(super) fn layer(&self, index: usize) -> Result<(&Tensor, &Tensor)> {
        match (self.keys.get(index), self.values.get(index)) {
            (Some(keys), Some(values)) => Ok((keys, values)),
            _ => bail!("layer {index} of a cache of {} layers", self.dims.layers),
        }
    }

    /// Counts the positions that a pass appended.
    pub fn advance(&mut self, rows: &CacheRows) {
        for (slot, count) in rows.slots.iter().zip(rows.counts) {
            self.lengths[*slot] = (self.lengths[*slot] + count).min(self.dims.capacity);
        }
    }

    /// Forgets the positions of a slot from `length` on.
    pub fn rewind(&mut self, slot: usize, length: usize) {
        self.lengths[slot] = self.lengths[slot].min(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_advance_by_row_and_rewind_by_slot() {
        let dims = CacheDims { layers: 2, kv_heads: 3, head_dim: 4, slots: 3, capacity: 8 };
        assert_eq!(dims.bytes(DType::BF16), 2 * 2 * 3 * 3 * 8 * 4 * 2);
        let mut cache = KvCache::new(dims, DType::F32, &Device::Cpu).unwrap();
        cache.advance(&CacheRows { slots: &[2, 0], starts: &[0, 0], counts: &[5, 3] });
        cache.advance(&CacheRows { slots: &[2], starts: &[5], counts: &[1] });
        assert_eq!([0, 1, 2].map(|slot| cache.length(slot)), [3, 0, 6]);
        cache.rewind(2, 4);
        cache.rewind(0, 7);
        assert_eq!([0, 1, 2].map(|slot| cache.length(slot)), [3, 0, 4]);
        assert!(cache.layer(1).is_ok() && cache.layer(2).is_err());
    }
}
