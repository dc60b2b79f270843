//! The layers that observe or round the activations of a trained network, at the points of
//! [`quantization`](crate::graph::quantization). The logits have a point too, which the session applies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Error, Result, Tensor};
use rayon::prelude::*;

use super::histogram::{ClipMethod, RangeHistogram};
use super::{ActivationPoints, ActivationQuantization, AffineQuantization};
use crate::base::MicroBatchSpec;
use crate::graph::network::Network;
pub use crate::graph::quantization::INPUT;
use crate::kernels::{cpu, host};
use crate::layers::{Cost, Layer, PassContext, SavedTensors};

/// The histograms of the points of a network.
#[derive(Default)]
pub struct Observers(Mutex<BTreeMap<String, RangeHistogram>>);

impl Observers {
    /// Bytes of a point.
    pub const BYTES: u64 = RangeHistogram::BYTES;

    /// Counts the values of a point; refuses those that are not finite.
    pub fn add(&self, point: &str, values: &[f32]) -> Result<()> {
        let mut histograms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let histogram = histograms.entry(point.to_owned()).or_insert_with(RangeHistogram::new);
        match histogram.add(values) {
            true => Ok(()),
            false => {
                Err(Error::Msg(format!("`{point}` computes values that are not finite, which have no range")))
            }
        }
    }

    pub fn quantization(&self, method: ClipMethod) -> ActivationQuantization {
        let histograms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        histograms.iter().map(|(point, seen)| (point.clone(), seen.quantization(method))).collect()
    }
}

/// What a point does.
enum PointAction {
    Observe(Arc<Observers>),
    Quantize(AffineQuantization),
}

/// A layer that observes or rounds the values of the one before it. It computes no gradient.
pub struct QuantizationPoint {
    name: String,
    /// Shape of one sample.
    shape: Vec<usize>,
    action: PointAction,
}

impl QuantizationPoint {
    /// How it rounds; `None` if it observes.
    pub fn quantization(&self) -> Option<AffineQuantization> {
        match self.action {
            PointAction::Observe(_) => None,
            PointAction::Quantize(quantization) => Some(quantization),
        }
    }
}

impl Layer for QuantizationPoint {
    fn name(&self) -> &str {
        &self.name
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let y = match &self.action {
            PointAction::Observe(observers) => {
                observers.add(&self.name, &host::read(x)?)?;
                x.clone()
            }
            PointAction::Quantize(quantization) => {
                let values = host::read::<f32>(x)?;
                let mut rounded = cpu::uninit(values.len());
                rounded
                    .par_iter_mut()
                    .zip(values.par_iter())
                    .with_min_len(1 << 14)
                    .for_each(|(rounded, value)| *rounded = quantization.rounded(*value));
                drop(values);
                Tensor::from_vec(rounded, x.shape(), x.device())?
            }
        };
        Ok((y, SavedTensors::default()))
    }

    fn backward(&self, _: SavedTensors, _: Tensor, _: &PassContext, _: bool) -> Result<Option<Tensor>> {
        Err(Error::Msg(format!("`{}` quantizes, and computes no gradient", self.name)))
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let output = match self.action {
            PointAction::Observe(_) => 0,
            PointAction::Quantize(_) => spec.bytes(self.shape.iter().product()),
        };
        Cost { output, output_is_view: output == 0, ..Cost::default() }
    }
}

/// Inserts the points of `network`, whose samples have this shape. Returns their names; that of the logits, for which
/// the network has no layer, is the last. `Err` is a point without a quantization.
pub fn insert(
    network: &mut Network,
    input: &[usize],
    points: &ActivationPoints,
) -> std::result::Result<Vec<String>, String> {
    let (mut names, mut missing) = (Vec::new(), None);
    let mut make = |name: &str, shape: &[usize]| -> Option<Box<dyn Layer>> {
        names.push(name.to_owned());
        let action = match points {
            ActivationPoints::None | ActivationPoints::Inputs(_) => return None,
            ActivationPoints::Observe(observers) => PointAction::Observe(observers.clone()),
            ActivationPoints::Quantize(all) => match all.get(name) {
                Some(quantization) => PointAction::Quantize(*quantization),
                None => {
                    missing.get_or_insert_with(|| name.to_owned());
                    return None;
                }
            },
        };
        Some(Box::new(QuantizationPoint { name: name.to_owned(), shape: shape.to_vec(), action }))
    };
    network.insert_points(input, &mut make);
    // Only whether the logits have a quantization is of interest.
    drop(make(network.loss.name(), &[]));
    match missing {
        Some(missing) => Err(missing),
        None => Ok(names),
    }
}
