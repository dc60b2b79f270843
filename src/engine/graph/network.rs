//! A network, blocks of layers and a loss, executed forward and backward under a memory ledger.
//!
//! The executor reserves every byte that a layer's `cost` states before the layer runs, and releases it when the last
//! holder drops. A dry run without tensors makes the same reservations in the same order. That is the memory plan, so
//! the plan cannot diverge from the execution.

mod backward;
mod dequantized;
mod features;
mod forward;
mod fused;
mod teacher;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::{DType, Tensor};

use self::backward::BackwardContext;
use self::features::FeatureGradients;
pub use self::features::FeatureMatch;
pub use self::teacher::TeacherNetwork;
use self::teacher::TeacherOutput;
use super::fusion::FusedNode;
use super::node_timer::{self, NodePass};
use super::offload::{ActivationOffload, OffloadedTensor, PendingCopy};
use crate::base::{Backend, MicroBatchSpec, Phase, Role};
use crate::kernels::distillation::TeacherLogits;
use crate::kernels::linear::{self, TrainedParts, WeightLayout};
use crate::kernels::matmul::GemvScope;
use crate::kernels::reference::ReferenceScope;
use crate::kernels::{Activation, host};
use crate::layers::loss::{Loss, MetricSums, PendingMetricSums};
use crate::layers::{Layer, Mode, PassContext, SavedTensors};
use crate::memory::{Ledger, Oom, Reservation};
use crate::params::Int8Layout;

/// A node of a block.
pub enum Node {
    Layer(Box<dyn Layer>),
    /// Neighbouring layers, joined by the fusion pass.
    Fused(FusedNode),
    /// `act(branch(x) + shortcut(x))`; an empty shortcut is the identity. A branch has at least one layer.
    Residual(ResidualNode),
}

pub struct ResidualNode {
    pub name: String,
    pub branch: Vec<Node>,
    pub shortcut: Vec<Node>,
    pub act: Activation,
    /// Output shape of one sample.
    pub output_shape: Vec<usize>,
}

/// The unit of recompute: it saves either what its layers save, or only its input.
pub struct LayerBlock {
    pub name: String,
    pub nodes: Vec<Node>,
    /// Order in which blocks are chosen for recompute, lowest first.
    pub recompute_rank: usize,
}

pub struct Network {
    pub blocks: Vec<LayerBlock>,
    pub loss: Box<dyn Loss>,
    /// A trained network whose logits the loss reads in training.
    pub teacher: Option<Box<TeacherNetwork>>,
    /// Blocks whose outputs are compared with those of the teacher in training.
    pub features: Vec<FeatureMatch>,
}

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Oom(#[from] Oom),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// What executing a network needs besides the batch.
pub struct Executor<'a> {
    /// `None` for a dry run, which only plans.
    pub pass: Option<PassContext<'a>>,
    pub spec: MicroBatchSpec,
    pub ledger: &'a Ledger,
    /// How many blocks, those of the lowest ranks, save only their input and are recomputed.
    pub recompute_blocks: usize,
    /// Where the inputs of these blocks are offloaded to, if they are.
    pub offload: Option<&'a ActivationOffload>,
    /// If given, the store holds weights as 8-bit integers, and those of a layer are dequantized while it runs.
    pub int8: Option<&'a Int8Layout>,
}

/// A micro-batch on the device.
#[derive(Clone)]
pub struct DeviceBatch {
    pub inputs: Tensor,
    pub targets: Tensor,
    /// Epoch, sample ids and lengths, on a GPU only.
    pub sample_info: Option<Tensor>,
}

/// A tensor and the reservation that covers its memory.
#[derive(Clone, Default)]
struct ReservedTensor {
    value: Option<Tensor>,
    reservation: Option<Arc<Reservation>>,
    /// The backward pass must compute its gradient, since it depends on a trained parameter. A node whose output does
    /// not require a gradient saves nothing and has no backward pass.
    requires_grad: bool,
}

/// What a node keeps between the passes; dropping it releases everything. A list of nodes has one for each node from
/// the first whose output requires a gradient to the last.
enum SavedNode {
    Layer(SavedLayer),
    Fused(Vec<SavedLayer>),
    Residual(SavedResidual),
}

struct SavedLayer {
    /// `None` in a dry run.
    saved: Option<SavedTensors>,
    needs_input_grad: bool,
    _reservations: [Option<Arc<Reservation>>; 3],
}

struct SavedResidual {
    branch: Vec<SavedNode>,
    shortcut: Vec<SavedNode>,
    /// The output, if the activation's backward reads it.
    output: Option<ReservedTensor>,
    needs_input_grad: bool,
}

/// What a block keeps between the passes.
enum SavedBlock<'a> {
    Resident(ResidentBlock),
    /// Only its input, offloaded to host memory.
    Offloaded {
        offload: &'a ActivationOffload,
        input: OffloadedTensor,
        bytes: u64,
        requires_grad: bool,
    },
}

/// What the backward pass of a block starts from.
enum ResidentBlock {
    Saved(Vec<SavedNode>),
    /// Only its input, whose copy from the host may still be in flight.
    InputOnly(PendingCopy, ReservedTensor),
}

type StepResult<T> = Result<T, StepError>;

impl Node {
    /// One line for a reader.
    pub fn describe(&self) -> String {
        match self {
            Self::Layer(layer) => layer.name().to_owned(),
            Self::Fused(fused) => fused.describe(),
            Self::Residual(residual) => residual.name.clone(),
        }
    }
}

impl From<Mode> for NodePass {
    fn from(mode: Mode) -> Self {
        if mode == Mode::Recompute { Self::Recompute } else { Self::Forward }
    }
}

impl Network {
    /// Accumulates the gradients of a micro-batch's summed loss, times `PassContext::loss_scale`, in the store.
    pub fn forward_backward(
        &self,
        exec: &Executor,
        batch: Option<&DeviceBatch>,
    ) -> StepResult<PendingMetricSums> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        exec.ledger.set_phase(Phase::Forward);
        let teacher = self.teacher.as_ref().filter(|teacher| teacher.every_step);
        let taught = teacher.map(|teacher| teacher.run(exec, batch, &self.features)).transpose()?;
        let TeacherOutput { logits: teacher_logits, mut features } = taught.unwrap_or_default();
        let mut feature_gradients = FeatureGradients::default();
        let mut x = ReservedTensor { value: batch.map(|b| b.inputs.clone()), ..ReservedTensor::default() };
        let mut saved_blocks = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let has_backward = x.requires_grad || block.trains(exec.spec);
            let input = (has_backward && block.recompute_rank < exec.recompute_blocks).then(|| x.clone());
            // The copy to the host overlaps the block's forward. Below, the copy is dropped before the input.
            let offloaded = input.as_ref().map_or(Ok(None), |input| exec.offload_input(input))?;
            let (y, saved_nodes) = exec.forward(&block.nodes, x, input.is_none(), Mode::Train, None)?;
            x = y;
            let matches = self.features.iter().zip(&mut features);
            for (feature, taught) in matches.filter(|(feature, _)| feature.student == index) {
                let taught = std::mem::take(taught);
                feature_gradients.add(exec, index, exec.match_features(feature, &x, taught, batch)?)?;
            }
            saved_blocks.push(match (offloaded, input) {
                (Some((offloaded, copy)), _) => {
                    copy.wait();
                    offloaded
                }
                (None, Some(input)) => {
                    SavedBlock::Resident(ResidentBlock::InputOnly(PendingCopy::default(), input))
                }
                (None, None) => SavedBlock::Resident(ResidentBlock::Saved(saved_nodes)),
            });
        }
        exec.ledger.set_phase(Phase::Backward);
        let cost = self.loss.cost(exec.spec);
        let needs_input_grad = x.requires_grad;
        let name = || self.loss.name().to_owned();
        let loss = || -> StepResult<_> {
            let input_grad = if needs_input_grad { cost.input_grad } else { 0 };
            let reservation = exec.reserve(Role::Activations, self.loss.name(), input_grad)?;
            let _work = exec.reserve(Role::Workspace, self.loss.name(), cost.backward_workspace)?;
            let (metrics, value) = match (&exec.pass, batch, &x.value) {
                (Some(pass), Some(batch), Some(x)) => {
                    let computed = teacher_logits.value.as_ref().map(TeacherLogits::All);
                    let pass = &PassContext { teacher_logits: computed.or(pass.teacher_logits), ..*pass };
                    self.loss.forward_backward(x, &batch.targets, pass, needs_input_grad)?
                }
                _ => (MetricSums::default().into(), None),
            };
            Ok((metrics, ReservedTensor { value, reservation, requires_grad: needs_input_grad }))
        };
        let (metrics, mut dy) = node_timer::time(name, NodePass::Backward, exec.ledger, loss)?;
        drop((x, teacher_logits));
        let metrics = match feature_gradients.loss.take() {
            Some(loss) => metrics.with_loss(1.0, &loss)?,
            None => metrics,
        };
        if !needs_input_grad {
            return Ok(metrics);
        }
        let mut prefetch = || {
            saved_blocks
                .pop()
                .map(|saved| exec.prefetch_block(&self.blocks[saved_blocks.len()].name, saved))
                .transpose()
        };
        let mut next = prefetch()?;
        for (index, block) in self.blocks.iter().enumerate().rev() {
            let Some(saved) = next else { break };
            feature_gradients.add_to(exec, index, block, &dy)?;
            // Prefetch the preceding block's input while this block computes.
            next = prefetch()?;
            let saved_nodes = match saved {
                ResidentBlock::Saved(saved_nodes) => saved_nodes,
                ResidentBlock::InputOnly(copy, input) => {
                    copy.wait();
                    exec.forward(&block.nodes, input, true, Mode::Recompute, None)?.1
                }
            };
            match exec.backward(&block.nodes, saved_nodes, dy, BackwardContext::default())? {
                Some(dx) => dy = dx,
                None => break,
            }
        }
        Ok(metrics)
    }

    /// Computes the summed loss and the counts behind the metrics of a micro-batch and, with `outputs`, returns the
    /// outputs of the last linear layer, in f32 on the host. Without it, and in a dry run, they are empty.
    pub fn evaluate(
        &self,
        exec: &Executor,
        batch: Option<&DeviceBatch>,
        outputs: bool,
    ) -> StepResult<(PendingMetricSums, Vec<f32>)> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        let x = self.forward_blocks(exec, batch.map(|b| &b.inputs))?;
        let sums = {
            let workspace = self.loss.cost(exec.spec).forward_workspace;
            let _work = exec.reserve(Role::Workspace, self.loss.name(), workspace)?;
            match (&exec.pass, batch, &x.value) {
                (Some(pass), Some(batch), Some(x)) => self.loss.evaluate(x, &batch.targets, pass)?,
                _ => MetricSums::default().into(),
            }
        };
        if !outputs {
            return Ok((sums, Vec::new()));
        }
        // Two f32 copies: one on the device and one on the host.
        let copies = 2 * exec.spec.batch * self.loss.outputs_per_sample() * size_of::<f32>();
        let _copies = exec.reserve(Role::Workspace, self.loss.name(), copies as u64)?;
        let logits = self.output_of(exec, &x)?;
        let values = logits.map(|logits| host::to_vec(&logits.to_dtype(DType::F32)?));
        Ok((sums, values.transpose()?.unwrap_or_default()))
    }

    /// Computes the outputs of the last linear layer, (samples, outputs) or (samples, positions, outputs); `None` in a
    /// dry run. They are materialized in full, which training never does.
    pub fn logits(&self, exec: &Executor, inputs: Option<&Tensor>) -> StepResult<Option<Tensor>> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        let x = self.forward_blocks(exec, inputs)?;
        self.output_of(exec, &x)
    }

    fn output_of(&self, exec: &Executor, x: &ReservedTensor) -> StepResult<Option<Tensor>> {
        let bytes = exec.spec.bytes(self.loss.outputs_per_sample());
        let _hold = exec.reserve(Role::Activations, self.loss.name(), bytes)?;
        let _work =
            exec.reserve(Role::Workspace, self.loss.name(), self.loss.cost(exec.spec).forward_workspace)?;
        let weights = exec.dequantize(|| self.loss.params())?;
        match (exec.pass.map(|pass| weights.in_pass(pass)), &x.value) {
            (Some(pass), Some(x)) => Ok(Some(self.loss.output_layer(&pass).forward(x)?.0)),
            _ => Ok(None),
        }
    }

    /// Computes the logits of some positions, (positions, `outputs`) in f32, on the host. A position is its index among
    /// all positions of the micro-batch. A dry run makes the same reservations and returns nothing.
    pub fn logits_at(
        &self,
        exec: &Executor,
        inputs: Option<&Tensor>,
        positions: &[u32],
        outputs: usize,
    ) -> StepResult<Vec<f32>> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        let _gemv = GemvScope::enter();
        let x = self.forward_blocks(exec, inputs)?;
        let width = self.layers().last().and_then(|layer| layer.output_shape().last().copied()).unwrap_or(0);
        let (rows, spec) = (positions.len(), MicroBatchSpec { batch: positions.len(), ..exec.spec });
        let (name, values) = (self.loss.name(), rows * outputs);
        let _rows = exec.reserve(Role::Activations, name, spec.bytes(width))?;
        let _logits = exec.reserve(Role::Activations, name, spec.bytes(outputs))?;
        // Two f32 copies: one on the device and one on the host.
        let _copies = exec.reserve(Role::Workspace, name, (2 * values * size_of::<f32>()) as u64)?;
        let workspace = match spec.backend {
            Backend::Cpu { .. } => {
                let frozen = TrainedParts { weight: false, bias: false };
                linear::workspace(spec.dtype, WeightLayout::OutIn, rows, (width, outputs), frozen).0
            }
            Backend::Reference { .. } => 2 * spec.bytes(outputs),
            Backend::Cuda { .. } => 0,
        };
        let _work = exec.reserve(Role::Workspace, name, workspace)?;
        let (Some(pass), Some(x)) = (&exec.pass, &x.value) else { return Ok(Vec::new()) };
        if rows == 0 {
            return Ok(Vec::new());
        }
        let x = x.reshape(((), width))?;
        let x = match positions.iter().map(|at| *at as usize).eq(0..x.dim(0)?) {
            true => x,
            false => x.index_select(&Tensor::new(positions, x.device())?, 0)?,
        };
        let logits = self.loss.output_layer(pass).forward(&x)?.0;
        Ok(host::to_vec(&logits.to_dtype(DType::F32)?)?)
    }

    /// Runs all blocks in evaluation mode.
    fn forward_blocks(&self, exec: &Executor, inputs: Option<&Tensor>) -> StepResult<ReservedTensor> {
        exec.ledger.set_phase(Phase::Eval);
        self.run_blocks(exec, inputs)
    }

    fn run_blocks(&self, exec: &Executor, inputs: Option<&Tensor>) -> StepResult<ReservedTensor> {
        let mut x = ReservedTensor { value: inputs.cloned(), ..ReservedTensor::default() };
        for block in &self.blocks {
            x = exec.forward(&block.nodes, x, false, Mode::Eval, None)?.0;
        }
        Ok(x)
    }

    /// Runs one block in evaluation mode.
    pub fn run_block(&self, exec: &Executor, block: usize, x: &Tensor) -> StepResult<Tensor> {
        let _kernels = ReferenceScope::enter(exec.spec.backend.is_reference());
        let x = ReservedTensor { value: Some(x.clone()), ..ReservedTensor::default() };
        let (y, _) = exec.forward(&self.blocks[block].nodes, x, false, Mode::Eval, None)?;
        y.value.ok_or_else(|| candle_core::Error::Msg("a pass without tensors".into()).into())
    }

    /// Every micro-batch except the last must be a multiple of this many samples: the least common multiple over the
    /// layers.
    pub fn micro_batch_multiple(&self) -> usize {
        fn gcd(a: usize, b: usize) -> usize {
            if b == 0 { a } else { gcd(b, a % b) }
        }
        self.layers()
            .iter()
            .map(|layer| layer.micro_batch_multiple().max(1))
            .fold(1, |all, one| all / gcd(all, one) * one)
    }

    /// How many blocks have a backward pass: the first with a trained parameter and all after it. Recomputing others
    /// frees nothing.
    pub fn blocks_with_backward(&self, spec: MicroBatchSpec) -> usize {
        let first = self.blocks.iter().position(|block| block.trains(spec));
        first.map_or(0, |first| self.blocks.len() - first)
    }

    /// The nodes that the fusion pass made, in order.
    pub fn fused_nodes(&self) -> Vec<&FusedNode> {
        fn collect<'a>(nodes: &'a [Node], into: &mut Vec<&'a FusedNode>) {
            for node in nodes {
                match node {
                    Node::Layer(_) => {}
                    Node::Fused(fused) => into.push(fused),
                    Node::Residual(residual) => {
                        collect(&residual.branch, into);
                        collect(&residual.shortcut, into);
                    }
                }
            }
        }
        let mut fused = Vec::new();
        self.blocks.iter().for_each(|block| collect(&block.nodes, &mut fused));
        fused
    }

    /// Every layer, in order.
    pub fn layers(&self) -> Vec<&dyn Layer> {
        self.blocks.iter().flat_map(LayerBlock::layers).collect()
    }
}

impl LayerBlock {
    /// Whether it has a trained parameter.
    fn trains(&self, spec: MicroBatchSpec) -> bool {
        self.layers().iter().any(|layer| layer.cost(spec).trains)
    }

    /// Every layer, in order.
    pub fn layers(&self) -> Vec<&dyn Layer> {
        fn collect<'a>(nodes: &'a [Node], into: &mut Vec<&'a dyn Layer>) {
            for node in nodes {
                match node {
                    Node::Layer(layer) => into.push(layer.as_ref()),
                    Node::Fused(fused) => into.extend(fused.layers.iter().map(AsRef::as_ref)),
                    Node::Residual(residual) => {
                        collect(&residual.branch, into);
                        collect(&residual.shortcut, into);
                    }
                }
            }
        }
        let mut layers = Vec::new();
        collect(&self.nodes, &mut layers);
        layers
    }
}

impl ResidualNode {
    /// Whether the branch's last layer adds the shortcut and applies the activation. The shortcut then runs first.
    fn is_fused(&self) -> bool {
        matches!(self.branch.last(), Some(Node::Fused(fused)) if fused.adds_residual)
    }
}

impl<'a> Executor<'a> {
    /// Saves what the layers save, and keeps it where it is.
    pub fn new(pass: Option<PassContext<'a>>, spec: MicroBatchSpec, ledger: &'a Ledger) -> Self {
        Self { pass, spec, ledger, recompute_blocks: 0, offload: None, int8: None }
    }
}

impl Executor<'_> {
    /// Runs a node that is not a residual, measured on request.
    fn timed<T>(&self, node: &Node, pass: NodePass, run: impl FnOnce() -> T) -> T {
        node_timer::time(|| node.describe(), pass, self.ledger, run)
    }

    /// Zero bytes need no reservation.
    fn reserve(&self, role: Role, requester: &str, bytes: u64) -> Result<Option<Arc<Reservation>>, Oom> {
        if bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.ledger.reserve(role, requester, bytes)?)))
    }

    /// Reserves the temporaries of pointwise operations on values of this shape, such as a sum. Only the reference
    /// backend has any.
    fn reserve_pointwise(&self, requester: &str, shape: &[usize]) -> Result<Option<Arc<Reservation>>, Oom> {
        let bytes = self.spec.bytes(shape.iter().product());
        self.reserve(Role::Workspace, requester, if self.spec.backend.is_reference() { 4 * bytes } else { 0 })
    }

    /// Starts offloading the input of a block, if offload is enabled. An input without a reservation of its own, such
    /// as the micro-batch, stays.
    fn offload_input(&self, input: &ReservedTensor) -> StepResult<Option<(SavedBlock<'_>, PendingCopy)>> {
        let (Some(offload), Some(reservation)) = (self.offload, &input.reservation) else { return Ok(None) };
        let bytes = reservation.bytes();
        let (offloaded, copy) = offload.copy_to_host(input.value.as_ref(), bytes)?;
        let requires_grad = input.requires_grad;
        Ok(Some((SavedBlock::Offloaded { offload, input: offloaded, bytes, requires_grad }, copy)))
    }

    /// What the backward pass of the block `name` starts from. Starts the copy if it was offloaded.
    fn prefetch_block(&self, name: &str, saved: SavedBlock) -> StepResult<ResidentBlock> {
        match saved {
            SavedBlock::Resident(resident) => Ok(resident),
            SavedBlock::Offloaded { offload, input, bytes, requires_grad } => {
                let reservation = self.reserve(Role::Activations, name, bytes)?;
                let (value, copy) = offload.copy_to_device(input)?;
                Ok(ResidentBlock::InputOnly(copy, ReservedTensor { value, reservation, requires_grad }))
            }
        }
    }

    fn pass_in_mode(&self, mode: Mode) -> Option<PassContext<'_>> {
        self.pass.as_ref().map(|pass| PassContext { mode, ..*pass })
    }
}
