//! The buffers themselves.

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use super::{Flat, Init, Layout};
use crate::kernels::update::round_into;
use crate::random::{Random, stream};

const INIT: u64 = stream("init");

/// Master weights, the copy kernels compute with, gradients and statistics, with a view a name.
pub struct Store {
    pub layout: Layout,
    /// Master weights, flat: f32 (f64 in tests that want differences).
    pub master: Tensor,
    /// The same values in the type of computation; the very same buffer where that is the master's.
    pub compute: Tensor,
    /// Gradients, flat, of the master's type.
    pub grads: Tensor,
    /// Running statistics, flat, of the master's type.
    pub stats: Tensor,
    weights: Vec<Tensor>,
    grad_views: Vec<Tensor>,
    stat_views: Vec<Tensor>,
}

impl Store {
    /// Allocates and initialises everything from the seed alone.
    pub fn new(layout: Layout, seed: u64, compute: DType, device: &Device) -> Result<Self> {
        let wide = if compute == DType::F64 { DType::F64 } else { DType::F32 };
        let buffer = |flat: &Flat| initial(flat, seed, wide, device);
        let (master, stats) = (buffer(&layout.params)?, buffer(&layout.stats)?);
        let copy = if compute == wide { master.clone() } else { zeros(layout.params.len, compute, device)? };
        let grads = zeros(layout.params.len, wide, device)?;
        let weights = views(&layout.params, &copy)?;
        let grad_views = views(&layout.params, &grads)?;
        let stat_views = views(&layout.stats, &stats)?;
        let store = Self { layout, master, compute: copy, grads, stats, weights, grad_views, stat_views };
        store.round()?;
        Ok(store)
    }

    /// Brings the copy kernels compute with up to the master weights.
    pub fn round(&self) -> Result<()> {
        match self.compute.dtype() == self.master.dtype() {
            true => Ok(()),
            false => round_into(&self.master, &self.compute),
        }
    }

    pub fn weights(&self) -> &[Tensor] {
        &self.weights
    }

    pub fn grad_views(&self) -> &[Tensor] {
        &self.grad_views
    }

    pub fn stat_views(&self) -> &[Tensor] {
        &self.stat_views
    }
}

fn initial(flat: &Flat, seed: u64, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut values = vec![0f32; flat.len];
    for (spec, range) in flat.iter() {
        let random = Random::new(seed, INIT).at(stream(&spec.name));
        let draw = |i: usize| match spec.init {
            Init::Constant(value) => value as f32,
            Init::Uniform(bound) => ((2.0 * random.f64(i as u64) - 1.0) * bound) as f32,
            Init::Normal(std) => (random.normal(i as u64) * std) as f32,
        };
        values[range].par_iter_mut().enumerate().for_each(|(i, v)| *v = draw(i));
    }
    if values.is_empty() {
        return zeros(0, dtype, device);
    }
    Tensor::from_vec(values, flat.len, device)?.to_dtype(dtype)
}

/// A card has no memory of no bytes: there, nothing is the beginning of something.
fn zeros(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let room = if device.is_cpu() { len } else { len.max(1) };
    Tensor::zeros(room, dtype, device)?.narrow(0, 0, len)
}

fn views(flat: &Flat, buffer: &Tensor) -> Result<Vec<Tensor>> {
    flat.declared()
        .map(|(spec, offset)| buffer.narrow(0, offset, spec.len())?.reshape(spec.stored_shape()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::check::device;
    use crate::params::Declared;

    fn store(names: &[&str], seed: u64) -> Store {
        let mut declared = Declared::default();
        for name in names {
            declared.param(*name, [64, 64], Init::Normal(0.02));
        }
        Store::new(declared.layout().unwrap(), seed, DType::F32, &device()).unwrap()
    }

    #[test]
    fn a_parameter_begins_the_same_whatever_stands_around_it() {
        let (one, two) = (store(&["b"], 1), store(&["c", "b", "a"], 1));
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&one.weights()[0]), values(&two.weights()[1]));
        assert_ne!(values(&one.weights()[0]), values(&two.weights()[0]));
        assert_ne!(values(&one.weights()[0]), values(&store(&["b"], 2).weights()[0]));
    }

    #[test]
    fn views_share_the_flat_buffer() {
        let store = store(&["a", "b"], 1);
        let seven = Tensor::new(&[7f32], &device()).unwrap();
        round_into(&seven, &store.master.narrow(0, 64 * 64, 1).unwrap()).unwrap();
        assert_eq!(store.weights()[1].get(0).unwrap().get(0).unwrap().to_scalar::<f32>().unwrap(), 7.0);
    }
}
