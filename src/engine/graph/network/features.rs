//! Feature distillation: the outputs of blocks of the student, through a learned linear map over their last dimension,
//! are compared with outputs of blocks of its teacher.
//!
//! A match runs right after the student's block: it accumulates the gradient of the map and keeps that of the block's
//! output, which the backward pass adds when it reaches the block. The teacher's features are free from then on.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use candle_core::{Result, Tensor};

use super::{DeviceBatch, Executor, LayerBlock, Node, ReservedTensor, StepResult};
use crate::base::{Backend, MicroBatchSpec, Role};
use crate::kernels::cross_entropy::reference_workspace;
use crate::kernels::linear::{self, LinearKernel, TrainedParts, WeightLayout};
use crate::kernels::{Activation, add, distillation, feature_error};
use crate::layers::PassContext;
use crate::params::ParamId;

/// A block of the student, and the block of the teacher whose output it should predict.
#[derive(Clone, Debug)]
pub struct FeatureMatch {
    /// Also the prefix of its parameter.
    pub name: String,
    /// Indices of the blocks.
    pub student: usize,
    pub teacher: usize,
    /// (outputs, inputs), without a bias.
    pub map: ParamId,
    /// Last dimensions of the student's features and of the teacher's.
    pub inputs: usize,
    pub outputs: usize,
    /// Rows of the features of one sample, and of its targets.
    pub rows: usize,
    pub target_rows: usize,
    /// Factor on the mean squared error.
    pub weight: f64,
}

/// The gradients of matched features, kept until the backward pass reaches their blocks.
#[derive(Default)]
pub(super) struct FeatureGradients {
    /// All losses so far, times their weights; `None` in a dry run.
    pub loss: Option<Tensor>,
    by_block: BTreeMap<usize, ReservedTensor>,
}

impl FeatureGradients {
    /// Adds the loss and the gradient of a match at this block.
    pub fn add(&mut self, exec: &Executor, block: usize, matched: MatchedFeature) -> StepResult<()> {
        self.loss = match (self.loss.take(), matched.loss) {
            (Some(all), Some(one)) => Some((all + one)?),
            (all, one) => all.or(one),
        };
        match (self.by_block.entry(block), matched.gradient) {
            (Entry::Occupied(held), Some(gradient)) => exec.add_gradient(held.get(), &gradient)?,
            (Entry::Vacant(free), Some(gradient)) => drop(free.insert(gradient)),
            (_, None) => {}
        }
        Ok(())
    }

    /// Adds the gradients of this block's features to that of its output.
    pub fn add_to(
        &mut self,
        exec: &Executor,
        index: usize,
        block: &LayerBlock,
        dy: &ReservedTensor,
    ) -> StepResult<()> {
        let Some(gradient) = self.by_block.remove(&index) else { return Ok(()) };
        let _work = exec.reserve_pointwise(&block.name, &block.output_shape())?;
        exec.add_gradient(dy, &gradient)
    }
}

/// The loss and the gradient of one match.
pub(super) struct MatchedFeature {
    /// Times its weight; `None` in a dry run.
    pub loss: Option<Tensor>,
    /// Of the output of the student's block, if that requires one.
    pub gradient: Option<ReservedTensor>,
}

impl FeatureMatch {
    fn kernel<'a>(&self, pass: &'a PassContext) -> LinearKernel<'a> {
        let (weight, act) = (pass.weight(self.map), Activation::Identity);
        LinearKernel { weight, weight_layout: WeightLayout::OutIn, bias: None, act }
    }

    /// Bytes of the mapped features and of temporaries.
    fn workspace(&self, spec: MicroBatchSpec) -> u64 {
        let (rows, sizes) = (spec.batch * self.rows, (self.inputs, self.outputs));
        let products = match spec.backend {
            Backend::Cpu { .. } => {
                let trained = TrainedParts { weight: self.map.trained, bias: false };
                let (forward, backward) =
                    linear::workspace(spec.dtype, WeightLayout::OutIn, rows, sizes, trained);
                forward.max(backward)
            }
            Backend::Reference { .. } => reference_workspace(spec.dtype, rows, self.outputs, self.inputs).1,
            Backend::Cuda { .. }
                if spec.backend.is_hopper()
                    && linear::hopper_supports(spec.dtype, rows, self.inputs, self.outputs) =>
            {
                linear::hopper_column_sums_bytes(rows, self.inputs) as u64
            }
            Backend::Cuda { .. } => 0,
        };
        let on_cpu = matches!(spec.backend, Backend::Cpu { .. });
        spec.bytes(self.rows * self.outputs)
            + products
            + feature_error::workspace(spec.dtype, rows, self.outputs, on_cpu)
    }

    /// The weight of each row in the loss: rows are averaged within a sample or, if it has several targets, within
    /// each; padding has weight 0.
    fn row_weights(&self, targets: &Tensor, lengths: Option<&[u32]>) -> Result<Vec<f32>> {
        let samples = targets.dim(0)?;
        let of_targets = distillation::row_weights(targets, samples * self.target_rows)?;
        let per_target = self.rows / self.target_rows;
        let mut weights = Vec::with_capacity(samples * self.rows);
        for (i, weight) in of_targets.iter().enumerate() {
            let length = lengths.map(|lengths| lengths[i / self.target_rows] as usize);
            // One target for a whole sequence.
            let counted = length.filter(|_| self.target_rows == 1 && per_target > 1).unwrap_or(per_target);
            let each = weight / counted.clamp(1, per_target) as f32;
            weights.extend((0..per_target).map(|row| if row < counted { each } else { 0.0 }));
        }
        Ok(weights)
    }
}

impl LayerBlock {
    /// Shape of one sample of its output.
    pub fn output_shape(&self) -> Vec<usize> {
        match self.nodes.last() {
            Some(Node::Layer(layer)) => layer.output_shape(),
            Some(Node::Fused(fused)) => {
                fused.layers.last().map(|layer| layer.output_shape()).unwrap_or_default()
            }
            Some(Node::Residual(residual)) => residual.output_shape.clone(),
            None => Vec::new(),
        }
    }
}

impl Executor<'_> {
    /// `into += gradient`
    fn add_gradient(&self, into: &ReservedTensor, gradient: &ReservedTensor) -> StepResult<()> {
        if let (Some(into), Some(gradient)) = (&into.value, &gradient.value) {
            add::inplace(into, &gradient.reshape(into.shape())?, Activation::Identity)?;
        }
        Ok(())
    }

    /// Compares the output `x` of a block with the features of the teacher.
    pub(super) fn match_features(
        &self,
        feature: &FeatureMatch,
        x: &ReservedTensor,
        teacher: ReservedTensor,
        batch: Option<&DeviceBatch>,
    ) -> StepResult<MatchedFeature> {
        let bytes = if x.requires_grad { self.spec.bytes(feature.rows * feature.inputs) } else { 0 };
        let reservation = self.reserve(Role::Activations, &feature.name, bytes)?;
        let _work = self.reserve(Role::Workspace, &feature.name, feature.workspace(self.spec))?;
        let (loss, value) = match (&self.pass, batch, &x.value, &teacher.value) {
            (Some(pass), Some(batch), Some(x), Some(teacher)) => {
                let kernel = feature.kernel(pass);
                let mapped = kernel.forward(x)?.0;
                let weights = feature.row_weights(&batch.targets, pass.lengths)?;
                let scale = feature.weight * pass.loss_scale;
                let error = feature_error::forward_backward(&mapped, teacher, weights, scale)?;
                let grads = pass.weight_bias_grads(feature.map, None);
                let dx = kernel.backward(Some(x), None, mapped, &grads, bytes > 0)?;
                (Some((error * feature.weight)?), dx)
            }
            _ => (None, None),
        };
        let gradient = (bytes > 0).then_some(ReservedTensor { value, reservation, requires_grad: true });
        Ok(MatchedFeature { loss, gradient })
    }
}
