//! The products `X'X` of a linear layer's inputs, over the samples of a calibration.
//!
//! A layer before every linear layer adds up its input's while that layer is selected: one at a time, since products
//! take the square of the inputs.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Error, Result, Tensor};

use crate::base::MicroBatchSpec;
use crate::graph::network::{Network, Node};
use crate::kernels::host;
use crate::kernels::matmul::{MatView, Threading, Transposed, gemm, gemm_workspace};
use crate::layers::linear::Linear;
use crate::layers::packed_linear::PackedLinear;
use crate::layers::{Cost, Layer, PassContext, SavedTensors};

/// What is added up.
struct SelectedLayer {
    layer: String,
    inputs: usize,
    /// (inputs, inputs)
    products: Vec<f32>,
}

/// The products of the selected layer.
#[derive(Default)]
pub struct InputProducts(Mutex<Option<SelectedLayer>>);

impl InputProducts {
    /// Host bytes for a layer of this many inputs.
    pub fn bytes(inputs: usize) -> u64 {
        (inputs * inputs * size_of::<f32>()) as u64
    }

    fn selection(&self) -> MutexGuard<'_, Option<SelectedLayer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds up the inputs of `layer` from now on.
    pub fn select(&self, layer: &str, inputs: usize) {
        let products = vec![0.0; inputs * inputs];
        *self.selection() = Some(SelectedLayer { layer: layer.to_owned(), inputs, products });
    }

    /// Adds the inputs of a layer, (samples, ..., inputs), if it is selected. Of a sample, its first `lengths`
    /// positions count.
    pub fn add(&self, layer: &str, x: &Tensor, lengths: Option<&[u32]>) -> Result<()> {
        let mut selection = self.selection();
        let Some(selection) = selection.as_mut().filter(|selection| selection.layer == layer) else {
            return Ok(());
        };
        let (inputs, values) = (selection.inputs, host::read::<f32>(x)?);
        let mut add = |values: &[f32]| {
            let rows = MatView::new(values, values.len() / inputs, inputs);
            gemm(&mut selection.products, inputs, rows.t(), rows, true, Threading::Parallel);
        };
        match lengths.filter(|_| x.rank() > 2) {
            None => add(&values),
            Some(lengths) => {
                let samples = values.chunks_exact(values.len() / lengths.len().max(1));
                for (sample, length) in samples.zip(lengths) {
                    add(&sample[..(*length as usize * inputs).min(sample.len())]);
                }
            }
        }
        Ok(())
    }

    /// The products of the selected layer; refuses those that are not finite.
    pub fn take(&self) -> Result<Vec<f32>> {
        let Some(SelectedLayer { layer, products, .. }) = self.selection().take() else {
            return Ok(Vec::new());
        };
        match products.iter().all(|value| value.is_finite()) {
            true => Ok(products),
            false => Err(Error::Msg(format!("the inputs of `{layer}` are not finite, or their products"))),
        }
    }
}

/// Hands on the input of a linear layer.
struct InputTap {
    layer: String,
    /// Shape of one sample.
    shape: Vec<usize>,
    products: Arc<InputProducts>,
}

impl Layer for InputTap {
    fn name(&self) -> &str {
        &self.layer
    }

    fn output_shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn forward(&self, x: &Tensor, pass: &PassContext) -> Result<(Tensor, SavedTensors)> {
        self.products.add(&self.layer, x, pass.lengths)?;
        Ok((x.clone(), SavedTensors::default()))
    }

    fn backward(&self, _: SavedTensors, _: Tensor, _: &PassContext, _: bool) -> Result<Option<Tensor>> {
        Err(Error::Msg(format!("the inputs of `{}` are observed, which computes no gradient", self.layer)))
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let inputs = self.shape.last().copied().unwrap_or(1);
        let rows = spec.batch * self.shape.iter().product::<usize>() / inputs.max(1);
        let workspace =
            gemm_workspace(spec.dtype, (inputs, rows, inputs), Transposed::A, Threading::Parallel);
        Cost { output_is_view: true, forward_workspace: workspace, ..Cost::default() }
    }
}

/// Observes the input of every linear layer of `network`.
pub fn insert(network: &mut Network, products: &Arc<InputProducts>) {
    for block in &mut network.blocks {
        block.nodes = with_taps(std::mem::take(&mut block.nodes), products);
    }
}

fn with_taps(nodes: Vec<Node>, products: &Arc<InputProducts>) -> Vec<Node> {
    let mut inserted = Vec::new();
    for node in nodes {
        match node {
            Node::Residual(mut residual) => {
                residual.branch = with_taps(residual.branch, products);
                residual.shortcut = with_taps(residual.shortcut, products);
                inserted.push(Node::Residual(residual));
            }
            Node::Layer(layer) => {
                if let Some(shape) = linear_input(layer.as_ref()) {
                    let (layer, products) = (layer.name().to_owned(), products.clone());
                    inserted.push(Node::Layer(Box::new(InputTap { layer, shape, products })));
                }
                inserted.push(Node::Layer(layer));
            }
            Node::Fused(_) => inserted.push(node),
        }
    }
    inserted
}

/// The shape of an input sample, of a linear layer.
fn linear_input(layer: &dyn Layer) -> Option<Vec<usize>> {
    let any: &dyn Any = layer;
    let one = any.downcast_ref::<Linear>().map(Linear::input_shape);
    one.or_else(|| any.downcast_ref::<PackedLinear>().map(PackedLinear::input_shape))
}
