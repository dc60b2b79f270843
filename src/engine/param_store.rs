//! The flat buffers behind a `ParamLayout`, and their views.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use crate::base::random::{RngKey, stream_id};
use crate::kernels::fake_quantize::round_rows;
use crate::kernels::int8_weight;
use crate::kernels::update::cast_into;
use crate::params::{
    FlatLayout, Int8Layout, Int8Slot, ParamId, ParamInit, ParamLayout, ScaleGrid, TensorSpec,
};

const INIT_STREAM: u64 = stream_id("init");

/// Master weights, the compute copy, gradients and statistics, with one view per name.
pub struct ParamStore {
    pub layout: ParamLayout,
    /// Master weights of the trained parameters, flat: f32 (f64 in tests that use finite differences).
    pub master_weights: Tensor,
    /// All parameters in the compute dtype. Begins with the values of the master weights: a view of this buffer if that
    /// is their dtype and nothing is rounded.
    pub compute_weights: Tensor,
    /// Gradients of the trained parameters, flat, in the master dtype.
    pub grads: Tensor,
    /// Running statistics, flat, in the master dtype.
    pub stats: Tensor,
    /// The compute weights are a buffer of their own: they have another dtype, or are rounded.
    has_compute_copy: bool,
    /// Whether the compute weights are rounded to 8-bit integers, as `[quantize]` says.
    rounds: AtomicBool,
    weight_views: Vec<Tensor>,
    /// `None` for a frozen parameter.
    grad_views: Vec<Option<Tensor>>,
    stat_views: Vec<Tensor>,
    /// For parameters whose view is of 8-bit integers; empty in a store of floats.
    int8_scales: Vec<Option<Int8Scales>>,
}

/// What 8-bit integers stand for.
pub struct Int8Scales {
    /// Flat, in f32.
    pub scales: Tensor,
    pub grid: ScaleGrid,
}

impl ParamStore {
    /// Allocates everything and initializes it from the seed alone.
    pub fn new(layout: ParamLayout, seed: u64, compute_dtype: DType, device: &Device) -> Result<Self> {
        let master_dtype = if compute_dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let (params, trained_len) = (&layout.params, layout.params.trained_len);
        let stats = init_values(layout.stats.iter(), layout.stats.len, seed, master_dtype, device)?;
        let has_compute_copy = compute_dtype != master_dtype || layout.params.quantized().next().is_some();
        let (master_weights, compute_weights) = if !has_compute_copy {
            let all = init_values(params.iter(), params.len, seed, master_dtype, device)?;
            (all.narrow(0, 0, trained_len)?, all)
        } else {
            let master = init_values(params.trained(), trained_len, seed, master_dtype, device)?;
            let compute = zeros(params.len, compute_dtype, device)?;
            // One at a time: frozen parameters may be most of the model, and have no master weights.
            for (spec, range) in params.frozen().filter(|(_, range)| !range.is_empty()) {
                let into = compute.narrow(0, trained_len + range.start, range.len())?;
                let alone = std::iter::once((spec, 0..range.len()));
                cast_into(&init_values(alone, range.len(), seed, master_dtype, device)?, &into)?;
            }
            (master, compute)
        };
        let grads = zeros(trained_len, master_dtype, device)?;
        let weight_views = views(params, &compute_weights)?;
        let grad_views = trained_views(params, &grads)?;
        let stat_views = views(&layout.stats, &stats)?;
        let store = Self {
            layout,
            master_weights,
            compute_weights,
            grads,
            stats,
            has_compute_copy,
            rounds: AtomicBool::new(false),
            weight_views,
            grad_views,
            stat_views,
            int8_scales: Vec::new(),
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
            has_compute_copy: false,
            rounds: AtomicBool::new(false),
            int8_scales: Vec::new(),
        })
    }

    /// As [`for_inference`](Self::for_inference), with 8-bit integers and their scales in place of the weights that
    /// [`Int8Layout`] names. Layers read what [`dequantize`](Self::dequantize) returns.
    pub fn for_int8_inference(layout: ParamLayout, compute_dtype: DType, device: &Device) -> Result<Self> {
        let int8 = Int8Layout::new(&layout.params);
        let stored = zeros(int8.num_int8, DType::U8, device)?;
        let scales = zeros(int8.num_scales, DType::F32, device)?;
        let floats = zeros(int8.num_floats, compute_dtype, device)?;
        let (grads, stats) = (zeros(0, DType::F32, device)?, zeros(layout.stats.len, DType::F32, device)?);
        let slice = |buffer: &Tensor, range: &Range<usize>| buffer.narrow(0, range.start, range.len());
        let (mut weight_views, mut int8_scales) = (Vec::new(), Vec::new());
        for ((spec, _), slot) in layout.params.in_declaration_order().zip(int8.slots()) {
            let (view, scales) = match slot {
                Int8Slot::Float(range) => (slice(&floats, range)?, None),
                Int8Slot::Int8 { range, scales: of, grid } => {
                    (slice(&stored, range)?, Some(Int8Scales { scales: slice(&scales, of)?, grid: *grid }))
                }
            };
            weight_views.push(view.reshape(spec.stored_shape())?);
            int8_scales.push(scales);
        }
        Ok(Self {
            weight_views,
            grad_views: Vec::new(),
            stat_views: views(&layout.stats, &stats)?,
            master_weights: floats.clone(),
            layout,
            compute_weights: floats,
            grads,
            stats,
            has_compute_copy: false,
            rounds: AtomicBool::new(false),
            int8_scales,
        })
    }

    /// The floats of those of these parameters that are 8-bit integers.
    pub fn dequantize(&self, params: &[ParamId]) -> Result<Vec<(ParamId, Tensor)>> {
        let int8 = params.iter().filter_map(|id| Some((*id, self.int8_scales(*id)?)));
        int8.map(|(id, Int8Scales { scales, grid })| {
            let (stored, dtype) = (&self.weight_views[id.index], self.compute_weights.dtype());
            Ok((id, int8_weight::dequantize(stored, scales, *grid, dtype)?))
        })
        .collect()
    }

    /// `None` for a parameter of floats.
    fn int8_scales(&self, id: ParamId) -> Option<&Int8Scales> {
        self.int8_scales.get(id.index)?.as_ref()
    }

    /// Those of all parameters, in declaration order; empty in a store of floats.
    pub fn all_int8_scales(&self) -> &[Option<Int8Scales>] {
        &self.int8_scales
    }

    /// Copies the master weights to the compute weights, rounded if they are to be.
    pub fn sync_compute_weights(&self) -> Result<()> {
        if self.has_compute_copy {
            let trained = self.compute_weights.narrow(0, 0, self.layout.params.trained_len)?;
            cast_into(&self.master_weights, &trained)?;
        }
        if self.rounds.load(Ordering::Relaxed) { self.round_compute_weights() } else { Ok(()) }
    }

    /// Whether weights that layers compute with are rounded to 8-bit integers from the next
    /// [`sync_compute_weights`](Self::sync_compute_weights) on. Frozen weights, which have no master weights, stay as
    /// they were rounded.
    pub fn set_rounding(&self, rounds: bool) {
        self.rounds.store(rounds, Ordering::Relaxed);
    }

    fn round_compute_weights(&self) -> Result<()> {
        let is_exact = self.compute_weights.dtype() == self.master_weights.dtype();
        for (spec, range) in self.layout.params.quantized() {
            let slice = |buffer: &Tensor| buffer.narrow(0, range.start, range.len());
            let has_master = !is_exact && range.end <= self.layout.params.trained_len;
            let master = has_master.then(|| slice(&self.master_weights)).transpose()?;
            round_rows(master.as_ref(), &slice(&self.compute_weights)?, spec.shape[0])?;
        }
        Ok(())
    }

    /// A copy of the master weights in a buffer of its own. `Tensor::copy` would copy the buffer that they are a view
    /// of, with all frozen parameters.
    pub fn copy_master_weights(&self) -> Result<Tensor> {
        let copy = zeros(
            self.master_weights.elem_count(),
            self.master_weights.dtype(),
            self.master_weights.device(),
        )?;
        cast_into(&self.master_weights, &copy)?;
        Ok(copy)
    }

    /// The frozen parameters, flat, in the compute dtype.
    pub fn frozen_weights(&self) -> Result<Tensor> {
        let (len, trained_len) = (self.layout.params.len, self.layout.params.trained_len);
        self.compute_weights.narrow(0, trained_len, len - trained_len)
    }

    pub fn weight_views(&self) -> &[Tensor] {
        &self.weight_views
    }

    /// The gradient of a parameter; `None` if it is frozen.
    pub fn grad(&self, id: ParamId) -> Option<&Tensor> {
        self.grad_views.get(id.index)?.as_ref()
    }

    /// The gradients of trained parameters, in declaration order.
    #[cfg(any(test, feature = "testing"))]
    pub fn grad_views(&self) -> Vec<&Tensor> {
        self.grad_views.iter().flatten().collect()
    }

    pub fn stat_views(&self) -> &[Tensor] {
        &self.stat_views
    }
}

/// The initial values of these parameters, `len` in all.
fn init_values<'a>(
    params: impl Iterator<Item = (&'a TensorSpec, Range<usize>)>,
    len: usize,
    seed: u64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let mut values = vec![0f32; len];
    for (spec, range) in params {
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
    Tensor::from_vec(values, len, device)?.to_dtype(dtype)
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

/// Views of a buffer that begins with the trained parameters and may end there.
fn trained_views(flat: &FlatLayout, buffer: &Tensor) -> Result<Vec<Option<Tensor>>> {
    let view = |(spec, offset): (&TensorSpec, usize)| match offset < flat.trained_len {
        true => buffer.narrow(0, offset, spec.len())?.reshape(spec.stored_shape()).map(Some),
        false => Ok(None),
    };
    flat.in_declaration_order().map(view).collect()
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
    fn a_copy_of_the_master_weights_has_no_frozen_parameters() {
        let rules = crate::params::ParamRules::new(&toml::from_str("epochs = 1\nfreeze = 'frozen'").unwrap());
        let mut registry = ParamRegistry::with_rules(rules);
        registry.param("frozen.weight", [64, 64], ParamInit::Normal(0.02));
        registry.param("head.weight", [4, 2], ParamInit::Normal(0.02));
        let layout = registry.into_layout().unwrap();
        let store = ParamStore::new(layout, 1, DType::F32, &test_device()).unwrap();
        let copy = store.copy_master_weights().unwrap();
        let values = |t: &Tensor| t.to_vec1::<f32>().unwrap();
        assert_eq!(values(&copy), values(&store.master_weights));
        // A slice of the storage, not of the view, so that what is behind the view counts.
        let (storage, _) = copy.storage_and_layout();
        if let candle_core::Storage::Cpu(storage) = &*storage {
            assert_eq!(storage.as_slice::<f32>().unwrap().len(), 8);
        }
    }

    #[test]
    fn views_share_the_flat_buffer() {
        let store = store(&["a", "b"], 1);
        let seven = Tensor::new(&[7f32], &test_device()).unwrap();
        cast_into(&seven, &store.master_weights.narrow(0, 64 * 64, 1).unwrap()).unwrap();
        assert_eq!(store.weight_views()[1].get(0).unwrap().get(0).unwrap().to_scalar::<f32>().unwrap(), 7.0);
    }
}
