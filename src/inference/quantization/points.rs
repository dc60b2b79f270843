//! Where a network is quantized: at its input, and after every layer that computes new values. Pooling by the maximum,
//! flattening and dropout hand on what they take. The logits have a point too, which the session applies.
//!
//! A layer with batch norm has one point, after the norm, which is folded into it. An activation that does more than
//! clamp becomes a layer with a point before and after it, since a runtime computes the two apart.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Error, Result, Tensor};
use rayon::prelude::*;

use super::histogram::{ClipMethod, Histogram};
use super::{ActivationPoints, ActivationQuantization, AffineQuantization};
use crate::base::MicroBatchSpec;
use crate::graph::network::{Network, Node};
use crate::kernels::{Activation, ClampActivation, cpu, host};
use crate::layers::activation::ActivationLayer;
use crate::layers::batch_norm::BatchNorm;
use crate::layers::categorical_embedding::CategoricalEmbedding;
use crate::layers::conv::Conv2d;
use crate::layers::dropout::Dropout;
use crate::layers::flatten::Flatten;
use crate::layers::linear::Linear;
use crate::layers::max_pool::MaxPool;
use crate::layers::{Cost, Layer, PassContext, SavedTensors};

/// The point of what the network takes.
pub const INPUT: &str = "input";

/// The histograms of the points of a network.
#[derive(Default)]
pub struct Observers(Mutex<BTreeMap<String, Histogram>>);

impl Observers {
    /// Bytes of a point.
    pub const BYTES: u64 = Histogram::BYTES;

    /// Counts the values of a point; refuses those that are not finite.
    pub fn add(&self, point: &str, values: &[f32]) -> Result<()> {
        let mut histograms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let histogram = histograms.entry(point.to_owned()).or_insert_with(Histogram::new);
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

    fn num_parameters(&self) -> usize {
        0
    }
}

/// A network that is quantized, and the names of its points so far.
struct PointInsertion<'a> {
    points: &'a ActivationPoints,
    names: Vec<String>,
    /// A point that has no quantization.
    missing: Option<String>,
}

/// Inserts the points of `network`, whose samples have this shape. Returns their names; that of the logits, for which
/// the network has no layer, is the last. `Err` is a point without a quantization.
pub fn insert(
    network: &mut Network,
    input: &[usize],
    points: &ActivationPoints,
) -> std::result::Result<Vec<String>, String> {
    let mut insertion = PointInsertion { points, names: Vec::new(), missing: None };
    let embeds =
        network.layers().first().is_some_and(|layer| (*layer as &dyn Any).is::<CategoricalEmbedding>());
    for (at, block) in network.blocks.iter_mut().enumerate() {
        let mut nodes = Vec::new();
        // Categories are indices, which do not round.
        if at == 0 && !embeds {
            nodes.extend(insertion.point(INPUT, input.to_vec()));
        }
        nodes.extend(insertion.nodes(std::mem::take(&mut block.nodes)));
        block.nodes = nodes;
    }
    let logits = network.loss.name().to_owned();
    // Only whether the logits have a quantization is of interest.
    drop(insertion.point(&logits, Vec::new()));
    match insertion.missing {
        Some(missing) => Err(missing),
        None => Ok(insertion.names),
    }
}

impl PointInsertion<'_> {
    fn point(&mut self, name: &str, shape: Vec<usize>) -> Option<Node> {
        self.names.push(name.to_owned());
        let action = match self.points {
            ActivationPoints::None | ActivationPoints::Inputs(_) => return None,
            ActivationPoints::Observe(observers) => PointAction::Observe(observers.clone()),
            ActivationPoints::Quantize(all) => match all.get(name) {
                Some(quantization) => PointAction::Quantize(*quantization),
                None => {
                    self.missing.get_or_insert_with(|| name.to_owned());
                    return None;
                }
            },
        };
        Some(Node::Layer(Box::new(QuantizationPoint { name: name.to_owned(), shape, action })))
    }

    fn nodes(&mut self, nodes: Vec<Node>) -> Vec<Node> {
        let mut inserted = Vec::new();
        let mut nodes = nodes.into_iter().peekable();
        while let Some(node) = nodes.next() {
            match node {
                Node::Layer(mut layer) => {
                    let (name, shape) = (layer.name().to_owned(), layer.output_shape());
                    let any: &mut dyn Any = layer.as_mut();
                    let hands_on = any.is::<MaxPool>() || any.is::<Flatten>() || any.is::<Dropout>();
                    let is_conv = any.is::<Conv2d>();
                    let act = match is_conv {
                        true => any.downcast_mut::<Conv2d>().map(|conv| &mut conv.act),
                        false => any.downcast_mut::<Linear>().map(Linear::act_mut),
                    };
                    let act = act.and_then(split_activation);
                    inserted.push(Node::Layer(layer));
                    let folds =
                        is_conv && matches!(nodes.peek(), Some(Node::Layer(next)) if is_norm(next.as_ref()));
                    if hands_on || (folds && act.is_none()) {
                        continue;
                    }
                    inserted.extend(self.point(&name, shape.clone()));
                    if let Some(act) = act {
                        let name = format!("{name}.activation");
                        let layer = ActivationLayer { name: name.clone(), shape: shape.clone(), act };
                        inserted.push(Node::Layer(Box::new(layer)));
                        inserted.extend(self.point(&name, shape));
                    }
                }
                Node::Residual(mut residual) => {
                    residual.branch = self.nodes(residual.branch);
                    residual.shortcut = self.nodes(residual.shortcut);
                    let (name, shape) = (residual.name.clone(), residual.output_shape.clone());
                    inserted.push(Node::Residual(residual));
                    inserted.extend(self.point(&name, shape));
                }
                Node::Fused(_) => inserted.push(node),
            }
        }
        inserted
    }
}

fn is_norm(layer: &dyn Layer) -> bool {
    (layer as &dyn Any).is::<BatchNorm>()
}

/// Takes an activation that does more than clamp out of its layer.
fn split_activation(act: &mut Activation) -> Option<Activation> {
    match ClampActivation::from_activation(*act) {
        Some(_) => None,
        None => Some(std::mem::replace(act, Activation::Identity)),
    }
}
