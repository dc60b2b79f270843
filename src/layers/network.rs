//! A network: blocks of layers and a loss, run forward and backward under a ledger.
//!
//! Every byte a layer says it needs is asked of the ledger before the layer runs, and given back when
//! the last holder lets go. Without tensors the same walk is the memory plan: it asks for exactly what
//! the real one will, in the same order, so the plan cannot drift from the code.

mod backward;
mod forward;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::Tensor;

use self::backward::{Way, adds_rows};
use super::aside::{Aside, Gone, Moving};
use super::loss::{Counted, Loss, Tally};
use super::{At, Layer, Mode, Pass, Saved};
use crate::kernels::Activation;
use crate::memory::{Ledger, Oom, Reservation, Role};

/// A part of a block.
pub enum Node {
    Layer(Box<dyn Layer>),
    /// `act(branch(x) + shortcut(x))`; an empty shortcut is `x` itself. A branch has a layer at least.
    Residual(Residual),
}

pub struct Residual {
    pub name: String,
    pub branch: Vec<Node>,
    pub shortcut: Vec<Node>,
    pub act: Activation,
    /// Shape of a sample's output.
    pub output: Vec<usize>,
}

/// The unit of recomputation: it keeps what its layers saved, or its input alone.
pub struct Block {
    pub name: String,
    pub nodes: Vec<Node>,
    /// Its place among the blocks when some are to run forward again: the lowest first.
    pub rank: usize,
}

pub struct Network {
    pub blocks: Vec<Block>,
    pub loss: Box<dyn Loss>,
}

/// Why a step stopped.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Oom(#[from] Oom),
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// What a walk over the network is given.
pub struct Walk<'a> {
    /// Absent where the walk only plans.
    pub pass: Option<Pass<'a>>,
    pub at: At,
    pub ledger: &'a Ledger,
    /// How many blocks, those of the lowest ranks, keep only their input and run forward again.
    pub recompute: usize,
    /// Where such inputs wait, if not where they were made.
    pub aside: Option<&'a Aside>,
}

/// A micro-batch on the device.
#[derive(Clone)]
pub struct Batch {
    pub inputs: Tensor,
    pub targets: Tensor,
    /// The epoch, sample ids and lengths, where a GPU reads them.
    pub staged: Option<Tensor>,
}

/// An activation and the right to hold it.
#[derive(Clone, Default)]
struct Act {
    value: Option<Tensor>,
    hold: Option<Arc<Reservation>>,
    /// Of a gradient: its sums over all rows were added to the gradient of who [`adds`](Layer::adds_rows) them.
    summed: bool,
    /// Of a gradient: the layer after went through what this one [`met`](Layer::met).
    through: bool,
}

impl Act {
    fn new(value: Option<Tensor>, hold: Option<Arc<Reservation>>) -> Self {
        Self { value, hold, ..Self::default() }
    }
}

/// What is kept of a node between the passes; dropped, it gives everything back.
enum Trace {
    Layer {
        saved: Option<Saved>,
        /// The layer's input was not kept: the layer before makes it again.
        remade: bool,
        _holds: [Option<Arc<Reservation>>; 3],
    },
    Residual {
        branch: Vec<Trace>,
        shortcut: Vec<Trace>,
        output: Option<Act>,
    },
}

/// What is kept of a block between the passes.
enum BlockTrace<'a> {
    Near(Near),
    /// The input alone, of so many bytes, which waits in host memory.
    Away(&'a Aside, Gone, u64),
}

/// What the backward pass of a block begins with.
enum Near {
    Kept(Vec<Trace>),
    /// The input alone, which may be on its way back.
    Input(Moving, Act),
}

type Step<T> = Result<T, StepError>;

impl Network {
    /// Adds the gradients of a micro-batch's summed loss (times the pass's scale) to the store.
    pub fn learn(&self, walk: &Walk, batch: Option<&Batch>) -> Step<Counted> {
        walk.ledger.phase("forward");
        let mut x = Act::new(batch.map(|b| b.inputs.clone()), None);
        let mut traces = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let input = (block.rank < walk.recompute).then(|| x.clone());
            // It leaves while the block computes; both are let go of below, the copy first.
            let away = input.as_ref().map_or(Ok(None), |input| walk.send(input))?;
            let (y, trace) = walk.forward(&block.nodes, x, input.is_none(), Mode::Train, None)?;
            x = y;
            traces.push(match (away, input) {
                (Some((away, moving)), _) => {
                    moving.end();
                    away
                }
                (None, Some(input)) => BlockTrace::Near(Near::Input(Moving::default(), input)),
                (None, None) => BlockTrace::Near(Near::Kept(trace)),
            });
        }
        walk.ledger.phase("backward");
        let cost = self.loss.cost(walk.at);
        let (tally, mut dy) = {
            let hold = walk.hold(Role::Activations, self.loss.name(), cost.input)?;
            let _work = walk.hold(Role::Workspace, self.loss.name(), cost.backward)?;
            match (&walk.pass, batch, &x.value) {
                (Some(pass), Some(batch), Some(x)) => {
                    let (tally, dx) = self.loss.learn(x, &batch.targets, pass)?;
                    (tally, Act::new(Some(dx), hold))
                }
                _ => (Tally::default().into(), Act::new(None, hold)),
            }
        };
        drop(x);
        let mut fetch =
            || traces.pop().map(|trace| walk.fetch(&self.blocks[traces.len()].name, trace)).transpose();
        let mut next = fetch()?;
        for (i, block) in self.blocks.iter().enumerate().rev() {
            let Some(trace) = next else { break };
            // What the block before needs comes while this one computes.
            next = fetch()?;
            let trace = match trace {
                Near::Kept(trace) => trace,
                Near::Input(moving, input) => {
                    moving.end();
                    walk.forward(&block.nodes, input, true, Mode::Again, None)?.1
                }
            };
            let sums = i.checked_sub(1).and_then(|i| adds_rows(&self.blocks[i].nodes));
            match walk.backward(&block.nodes, trace, dy, i > 0, Way { sums, ..Way::default() })? {
                Some(dx) => dy = dx,
                None => break,
            }
        }
        Ok(tally)
    }

    /// The summed loss and the counts behind the metrics of a micro-batch.
    pub fn judge(&self, walk: &Walk, batch: Option<&Batch>) -> Step<Counted> {
        let x = self.features(walk, batch.map(|b| &b.inputs))?;
        let _work = walk.hold(Role::Workspace, self.loss.name(), self.loss.cost(walk.at).forward)?;
        match (&walk.pass, batch, &x.value) {
            (Some(pass), Some(batch), Some(x)) => Ok(self.loss.judge(x, &batch.targets, pass)?),
            _ => Ok(Tally::default().into()),
        }
    }

    /// What the loss judges of a micro-batch: the outputs of the last linear map, (samples, outputs) or
    /// (samples, positions, outputs). Whole in memory, which learning and judging never need.
    pub fn scores(&self, walk: &Walk, inputs: &Tensor) -> Step<Tensor> {
        let x = self.features(walk, Some(inputs))?;
        let (Some(pass), Some(x)) = (&walk.pass, &x.value) else {
            return Err(candle_core::Error::Msg("a walk that only plans has no scores".into()).into());
        };
        let map = self.loss.map(pass);
        let (outputs, width) = map.weight.dims2()?;
        let bytes = x.elem_count() / width * outputs * x.dtype().size_in_bytes();
        let _hold = walk.hold(Role::Activations, self.loss.name(), bytes as u64)?;
        Ok(map.forward(x)?.0)
    }

    /// What the blocks make of a micro-batch.
    fn features(&self, walk: &Walk, inputs: Option<&Tensor>) -> Step<Act> {
        walk.ledger.phase("eval");
        let mut x = Act::new(inputs.cloned(), None);
        for block in &self.blocks {
            x = walk.forward(&block.nodes, x, false, Mode::Eval, None)?.0;
        }
        Ok(x)
    }

    /// A micro-batch is a multiple of so many samples, but for the last: the least common multiple of
    /// the layers' own.
    pub fn group(&self) -> usize {
        fn divisor(a: usize, b: usize) -> usize {
            if b == 0 { a } else { divisor(b, a % b) }
        }
        self.layers()
            .iter()
            .map(|layer| layer.group().max(1))
            .fold(1, |all, one| all / divisor(all, one) * one)
    }

    /// Every layer, in order.
    pub fn layers(&self) -> Vec<&dyn Layer> {
        self.blocks.iter().flat_map(Block::layers).collect()
    }
}

impl Block {
    /// Every layer, in order.
    pub fn layers(&self) -> Vec<&dyn Layer> {
        fn collect<'a>(nodes: &'a [Node], into: &mut Vec<&'a dyn Layer>) {
            for node in nodes {
                match node {
                    Node::Layer(layer) => into.push(layer.as_ref()),
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

impl Walk<'_> {
    /// Nothing is asked for nothing.
    fn hold(&self, role: Role, asker: &str, bytes: u64) -> Result<Option<Arc<Reservation>>, Oom> {
        if bytes == 0 {
            return Ok(None);
        }
        Ok(Some(Arc::new(self.ledger.reserve(role, asker, bytes)?)))
    }

    /// Begins to move the input of a block to where it waits, if there is such a place. What holds no memory of its
    /// own, as the micro-batch itself, stays.
    fn send(&self, input: &Act) -> Step<Option<(BlockTrace<'_>, Moving)>> {
        let (Some(aside), Some(hold)) = (self.aside, &input.hold) else { return Ok(None) };
        let bytes = hold.bytes();
        let (gone, moving) = aside.send(input.value.as_ref(), bytes)?;
        Ok(Some((BlockTrace::Away(aside, gone, bytes), moving)))
    }

    /// What the backward pass of the block `name` begins with; from host memory it begins to move.
    fn fetch(&self, name: &str, trace: BlockTrace) -> Step<Near> {
        match trace {
            BlockTrace::Near(near) => Ok(near),
            BlockTrace::Away(aside, gone, bytes) => {
                let hold = self.hold(Role::Activations, name, bytes)?;
                let (value, moving) = aside.fetch(gone)?;
                Ok(Near::Input(moving, Act::new(value, hold)))
            }
        }
    }

    fn pass(&self, mode: Mode) -> Option<Pass<'_>> {
        self.pass.as_ref().map(|pass| Pass { mode, ..*pass })
    }
}
