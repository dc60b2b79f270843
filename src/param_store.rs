//! The flat buffers behind a `ParamLayout`, and their views.

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use crate::base::random::{RngKey, stream_id};
use crate::kernels::update::cast_into;
use crate::params::{FlatLayout, ParamInit, ParamLayout};

const INIT_STREAM: u64 = stream_id("init");

/// Master weights, the compute copy, gradients and statistics, with one view per name.
pub struct ParamStore {
    pub layout: ParamLayout,
    /// Master weights, flat: f32 (f64 in tests that use finite differences).
    pub master_weights: Tensor,
    /// The same values in the compute dtype; the same buffer if that is the master dtype.
    pub compute_weights: Tensor,
    /// Gradients, flat, in the master dtype.
    pub grads: Tensor,
    /// Running statistics, flat, in the master dtype.
    pub stats: Tensor,
    weight_views: Vec<Tensor>,
    grad_views: Vec<Tensor>,
    stat_views: Vec<Tensor>,
}

impl ParamStore {
    /// Allocates everything and initializes it from the seed alone.
    pub fn new(layout: ParamLayout, seed: u64, compute_dtype: DType, device: &Device) -> Result<Self> {
        let master_dtype = if compute_dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let buffer = |flat: &FlatLayout| init_values(flat, seed, master_dtype, device);
        let (master_weights, stats) = (buffer(&layout.params)?, buffer(&layout.stats)?);
        let compute_weights = if compute_dtype == master_dtype {
            master_weights.clone()
        } else {
            zeros(layout.params.len, compute_dtype, device)?
        };
        let grads = zeros(layout.params.len, master_dtype, device)?;
        let weight_views = views(&layout.params, &compute_weights)?;
        let grad_views = views(&layout.params, &grads)?;
        let stat_views = views(&layout.stats, &stats)?;
        let store = Self {
            layout,
            master_weights,
            compute_weights,
            grads,
            stats,
            weight_views,
            grad_views,
            stat_views,
        };
        store.sync_compute_weights()?;
        Ok(store)
    }

    /// Allocates weights in the compute dtype and running statistics, all zero, to be loaded: no master weights where
    /// they would be another buffer, and no gradients.
    pub fn for_inference(layout: ParamLayout, compute_dtype: DType, device: &Device) -> Result<Self> {
        let compute_weights = zeros(layout.params.len, compute_dtype, device)?;
        let (grads, stats) = (zeros(0, DType::F32, device)?, zeros(layout.stats.len, DType::F32, device)?);
        Ok(Self {
            weight_views: views(&layout.params, &compute_weights)?,
            grad_views: Vec::new(),
            stat_views: views(&layout.stats, &stats)?,
            master_weights: compute_weights.clone(),
            layout,
            compute_weights,
            grads,
            stats,
        })
    }

    /// Copies the master weights to the compute weights.
    pub fn sync_compute_weights(&self) -> Result<()> {
        match self.compute_weights.dtype() == self.master_weights.dtype() {
            true => Ok(()),
            false => cast_into(&self.master_weights, &self.compute_weights),
        }
    }

    pub fn weight_views(&self) -> &[Tensor] {
        &self.weight_views
    }

    pub fn grad_views(&self) -> &[Tensor] {
        &self.grad_views
    }

    pub fn stat_views(&self) -> &[Tensor] {
        &self.stat_views
    }
}

fn init_values(flat: &FlatLayout, seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut values = vec![0f32; flat.len];
    for (spec, range) in flat.iter() {
        let random = RngKey::new(seed, INIT_STREAM).fold_in(stream_id(&spec.name));
        let draw = |i: usize| match spec.init {
            ParamInit::Constant(value) => value as f32,
            ParamInit::Uniform(bound) => ((2.0 * random.f64(i as u64) - 1.0) * bound) as f32,
            ParamInit::Normal(std) => (random.normal(i as u64) * std) as f32,
        };
        values[range].par_iter_mut().enumerate().for_each(|(i, v)| *v = draw(i));
    }
    if values.is_empty() {
        return zeros(0, dtype, device);
    }
    Tensor::from_vec(values, flat.len, device)?.to_dtype(dtype)
}

/// CUDA cannot allocate zero bytes: on a GPU, an empty tensor is a view of a longer one.
fn zeros(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let capacity = if device.is_cpu() { len } else { len.max(1) };
    Tensor::zeros(capacity, dtype, device)?.narrow(0, 0, len)
}

fn views(flat: &FlatLayout, buffer: &Tensor) -> Result<Vec<Tensor>> {
    flat.in_declaration_order()
        .map(|(spec, offset)| buffer.narrow(0, offset, spec.len())?.reshape(spec.stored_shape()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::gradcheck::test_device;
    use crate::params::ParamRegistry;

    fn store(names: &[&str], seed: u64) -> ParamStore {
        let mut registry = ParamRegistry::default();
        for name in names {
            registry.param(*name, [64, 64], ParamInit::Normal(0.02));
        }
        ParamStore::new(registry.into_layout().unwrap(), seed, DType::F32, &test_device()).unwrap()
    }

    #[test]
    fn a_parameter_begins_the_same_whatever_stands_around_it() {
        let (one, two) = (store(&["b"], 1), store(&["c", "b", "a"], 1));
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&one.weight_views()[0]), values(&two.weight_views()[1]));
        assert_ne!(values(&one.weight_views()[0]), values(&two.weight_views()[0]));
        assert_ne!(values(&one.weight_views()[0]), values(&store(&["b"], 2).weight_views()[0]));
    }

    #[test]
    fn views_share_the_flat_buffer() {
        let store = store(&["a", "b"], 1);
        let seven = Tensor::new(&[7f32], &test_device()).unwrap();
        cast_into(&seven, &store.master_weights.narrow(0, 64 * 64, 1).unwrap()).unwrap();
        assert_eq!(store.weight_views()[1].get(0).unwrap().get(0).unwrap().to_scalar::<f32>().unwrap(), 7.0);
    }
}
