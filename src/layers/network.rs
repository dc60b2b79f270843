//! A network: blocks of layers and a loss, run forward and backward under a ledger.
//!
//! Every byte a layer says it needs is asked of the ledger before the layer runs, and given back when
//! the last holder lets go. Without tensors the same walk is the memory plan: it asks for exactly what
//! the real one will, in the same order, so the plan cannot drift from the code.

use std::sync::Arc;

use candle_core::Tensor;

use super::aside::{Aside, Gone, Moving};
use super::loss::{Counted, Loss, Tally};
use super::{At, Early, Layer, Mode, On, Pass, Remakes, Saved};
use crate::kernels::{Activation, Reads, add};
use crate::memory::{Ledger, Oom, Reservation, Role};
use crate::params::ParamId;

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
pub struct Batch {
    pub inputs: Tensor,
    pub targets: Tensor,
}

/// An activation and the right to hold it.
#[derive(Clone, Default)]
struct Act {
    value: Option<Tensor>,
    hold: Option<Arc<Reservation>>,
    /// Of a gradient: its sums over all rows were added to the gradient of who [`adds`](Layer::adds_rows) them.
    summed: bool,
}

impl Act {
    fn new(value: Option<Tensor>, hold: Option<Arc<Reservation>>) -> Self {
        Self { value, hold, summed: false }
    }
}

/// What a gradient meets on its way back through nodes.
#[derive(Default)]
struct Way<'a> {
    /// The gradient of their input by another way, which is added to theirs.
    onto: Option<&'a Act>,
    /// An activation that came after them, and its output.
    through: Option<(Act, Activation)>,
    /// To whose gradient the sums over all rows of their input's gradient may be added.
    sums: Option<ParamId>,
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

/// A layer whose input is made again while the gradient goes through the layer before, and the gradient it was given.
struct Late<'a> {
    layer: &'a dyn Layer,
    dy: Act,
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

    /// What the nodes make of `x`; with something `onto` it, an activation of the sum.
    fn forward(
        &self,
        nodes: &[Node],
        mut x: Act,
        keep: bool,
        mode: Mode,
        onto: Option<(&Act, Activation)>,
    ) -> Step<(Act, Vec<Trace>)> {
        let mut traces = Vec::with_capacity(if keep { nodes.len() } else { 0 });
        for (i, node) in nodes.iter().enumerate() {
            let onto = onto.filter(|_| i + 1 == nodes.len());
            let onto = onto.and_then(|(onto, act)| onto.value.as_ref().map(|onto| (onto, act)));
            let (y, trace) = match node {
                Node::Layer(layer) => {
                    let remade = made_again(&nodes[..i], &traces, self.at.on);
                    self.layer_forward(layer.as_ref(), x, (keep, remade), mode, onto)?
                }
                Node::Residual(residual) => {
                    let (y, trace) = self.residual_forward(residual, x, keep, mode)?;
                    if let (Some(y), Some((onto, act))) = (&y.value, onto) {
                        add::into(y, onto, act)?;
                    }
                    (y, trace)
                }
            };
            traces.extend(trace);
            x = y;
        }
        Ok((x, traces))
    }

    fn layer_forward(
        &self,
        layer: &dyn Layer,
        x: Act,
        (keep, remade): (bool, bool),
        mode: Mode,
        onto: Option<(&Tensor, Activation)>,
    ) -> Step<(Act, Option<Trace>)> {
        let cost = layer.cost(self.at);
        let remade = remade && cost.keeps_input;
        let own = self.hold(Role::Activations, layer.name(), cost.output)?;
        let saved_hold = self.hold(Role::Activations, layer.name(), cost.saved)?;
        let _work = self.hold(Role::Workspace, layer.name(), cost.forward)?;
        let (value, saved) = match (self.pass(mode), &x.value) {
            (Some(pass), Some(x)) => {
                let (y, mut saved) = match onto {
                    Some((onto, act)) => layer.forward_onto(x, onto, act, &pass)?,
                    None => layer.forward(x, &pass)?,
                };
                if remade {
                    saved.0.remove(0);
                }
                (Some(y), Some(saved))
            }
            _ => (None, None),
        };
        let y = Act::new(value, if cost.view { x.hold.clone() } else { own });
        let trace = keep.then(|| Trace::Layer {
            saved,
            remade,
            _holds: [
                saved_hold,
                x.hold.clone().filter(|_| cost.keeps_input && !remade),
                y.hold.clone().filter(|_| cost.keeps_output),
            ],
        });
        Ok((y, trace))
    }

    fn residual_forward(
        &self,
        residual: &Residual,
        x: Act,
        keep: bool,
        mode: Mode,
    ) -> Step<(Act, Option<Trace>)> {
        // The branch's output is nobody else's unless its last layer keeps it: the sum goes there.
        let in_place = !self.keeps_output(&residual.branch);
        let plain = residual.shortcut.is_empty() && residual.act == Activation::Identity;
        if in_place && (plain || self.joins(residual)) {
            let (s, shortcut) = self.forward(&residual.shortcut, x.clone(), keep, mode, None)?;
            let onto = Some((&s, residual.act));
            let (y, branch) = self.forward(&residual.branch, x, keep, mode, onto)?;
            let output = (residual.act != Activation::Identity).then(|| y.clone());
            return Ok((y, keep.then_some(Trace::Residual { branch, shortcut, output })));
        }
        let (b, branch) = self.forward(&residual.branch, x.clone(), keep, mode, None)?;
        let (s, shortcut) = self.forward(&residual.shortcut, x, keep, mode, None)?;
        let hold = match in_place {
            true => b.hold.clone(),
            false => {
                self.hold(Role::Activations, &residual.name, self.at.bytes(residual.output.iter().product()))?
            }
        };
        let value = match (&b.value, &s.value) {
            (Some(b), Some(s)) if in_place => Some(add::into(b, s, residual.act)?),
            (Some(b), Some(s)) => Some(add::forward(b, s, residual.act)?),
            _ => None,
        };
        let y = Act::new(value, hold);
        let output = (residual.act != Activation::Identity).then(|| y.clone());
        Ok((y, keep.then_some(Trace::Residual { branch, shortcut, output })))
    }

    /// Whether the branch's last layer makes the sum and its activation in passes of its own.
    fn joins(&self, residual: &Residual) -> bool {
        match residual.branch.last() {
            Some(Node::Layer(layer)) => layer.joins(residual.act, self.at.on),
            _ => false,
        }
    }

    /// Whether the output of these nodes is kept by the one that made it, or is their input.
    fn keeps_output(&self, nodes: &[Node]) -> bool {
        match nodes.last() {
            None => true,
            Some(Node::Layer(layer)) => {
                let cost = layer.cost(self.at);
                cost.keeps_output || (cost.view && self.keeps_output(&nodes[..nodes.len() - 1]))
            }
            Some(Node::Residual(residual)) => residual.act.reads() == Reads::Output,
        }
    }

    /// The gradient of the nodes' input, where wanted. Traces are given back as they are used.
    fn backward(
        &self,
        nodes: &[Node],
        mut traces: Vec<Trace>,
        mut dy: Act,
        want: bool,
        mut way: Way,
    ) -> Step<Option<Act>> {
        let mut late = None;
        for (i, node) in nodes.iter().enumerate().rev() {
            // The last node alone is given it, and lets it go.
            let (through, awaited) = (way.through.take(), late.take());
            let onto = way.onto.filter(|_| want && i == 0).and_then(|onto| onto.value.as_ref());
            let (want, trace) = (want || i > 0, traces.pop());
            let sums = if i == 0 { way.sums } else { adds_rows(&nodes[..i]) }.filter(|_| want);
            let dx = match (node, trace) {
                (Node::Layer(layer), Some(Trace::Layer { mut saved, remade, _holds })) => {
                    let (cost, sums) = (layer.cost(self.at), sums.filter(|_| layer.sums(self.at.on)));
                    let waits = remade && self.waits(layer.as_ref(), &nodes[..i]);
                    let _input = match remade && !waits {
                        true => self.make_again(&nodes[..i], &traces, &mut saved)?,
                        false => None,
                    };
                    let own = match want && !cost.view {
                        true => self.hold(Role::Activations, layer.name(), cost.input)?,
                        false => None,
                    };
                    let _work = self.hold(Role::Workspace, layer.name(), cost.backward)?;
                    let hold = if cost.view { dy.hold.clone() } else { own };
                    let through = through.as_ref().and_then(|(y, act)| Some((y.value.as_ref()?, *act)));
                    let pass = self.pass(Mode::Train).map(|pass| Pass { sums, summed: dy.summed, ..pass });
                    let value = match (pass, saved, &mut dy.value) {
                        (Some(pass), Some(saved), Some(dy)) if waits || awaited.is_some() => {
                            if let Some((y, act)) = through {
                                add::through(y, dy, act)?;
                            }
                            let made =
                                layer.backward_early(saved, dy, &pass, (want, onto), awaited.is_some())?;
                            made_late(awaited, &made, &pass)?;
                            made.dx
                        }
                        (Some(pass), Some(saved), given) => {
                            let Some(dy) = given.take() else { return Ok(None) };
                            match (through, onto) {
                                (Some(through), None) => {
                                    layer.backward_through(saved, dy, through, &pass, want)?
                                }
                                (None, Some(onto)) => layer.backward_onto(saved, dy, &pass, onto)?,
                                (Some((y, act)), Some(onto)) => {
                                    add::through(y, &dy, act)?;
                                    layer.backward_onto(saved, dy, &pass, onto)?
                                }
                                (None, None) => layer.backward(saved, dy, &pass, want)?,
                            }
                        }
                        _ => None,
                    };
                    if waits {
                        late = Some(Late { layer: layer.as_ref(), dy: std::mem::take(&mut dy) });
                    }
                    want.then_some(Act { value, hold, summed: sums.is_some() })
                }
                (Node::Residual(residual), Some(Trace::Residual { branch, shortcut, output })) => {
                    // What is added afterwards would not be in the sums.
                    let sums = sums.filter(|_| onto.is_none());
                    let kept = (branch, shortcut, output);
                    let dx = self.residual_backward(residual, kept, dy, want, sums)?;
                    if let (Some(Act { value: Some(dx), .. }), Some(onto)) = (&dx, onto) {
                        add::into(dx, onto, Activation::Identity)?;
                    }
                    dx
                }
                _ => None,
            };
            match dx {
                Some(dx) => dy = dx,
                None => return Ok(None),
            }
        }
        Ok(Some(dy))
    }

    /// Whether a layer's input is made again on the way of the last of these nodes, after the layer's own gradient.
    fn waits(&self, layer: &dyn Layer, before: &[Node]) -> bool {
        let makes = matches!(before.last(), Some(Node::Layer(l)) if l.remakes_on_the_way(self.at.on));
        makes && layer.waits(self.at.on)
    }

    /// Puts the output of the last of `nodes`, made again, in front of what the layer after it saved.
    fn make_again(
        &self,
        nodes: &[Node],
        traces: &[Trace],
        into: &mut Option<Saved>,
    ) -> Step<Option<Arc<Reservation>>> {
        let (Some(Node::Layer(layer)), Some(Trace::Layer { saved, .. })) = (nodes.last(), traces.last())
        else {
            return Ok(None);
        };
        let hold = self.hold(Role::Activations, layer.name(), layer.cost(self.at).output)?;
        if let (Some(pass), Some(saved), Some(into)) = (self.pass(Mode::Again), saved, into)
            && let Some(x) = layer.again(saved, &pass)?
        {
            into.0.insert(0, x);
        }
        Ok(hold)
    }

    fn residual_backward(
        &self,
        residual: &Residual,
        (branch, shortcut, output): (Vec<Trace>, Vec<Trace>, Option<Act>),
        mut dy: Act,
        want: bool,
        sums: Option<ParamId>,
    ) -> Step<Option<Act>> {
        let overwrites = overwrites(&residual.branch);
        let mut through = output.map(|y| (y, residual.act));
        if overwrites || !self.joins(residual) {
            if let (Some((Act { value: Some(y), .. }, act)), Some(dy)) = (&through, &dy.value) {
                add::through(y, dy, *act)?;
            }
            through = None;
        }
        let for_branch = match overwrites {
            true => {
                let bytes = self.at.bytes(residual.output.iter().product());
                let hold = self.hold(Role::Activations, &residual.name, bytes)?;
                Act { value: dy.value.as_ref().map(Tensor::copy).transpose()?, hold, ..dy }
            }
            false => dy.clone(),
        };
        if residual.shortcut.is_empty() {
            let way = Way { onto: Some(&dy), through, sums };
            return self.backward(&residual.branch, branch, for_branch, want, way);
        }
        let way = Way { through, ..Way::default() };
        let by_branch = self.backward(&residual.branch, branch, for_branch, want, way)?;
        dy.summed = false; // of the branch's alone
        let way = Way { onto: by_branch.as_ref(), sums, ..Way::default() };
        self.backward(&residual.shortcut, shortcut, dy, want, way)
    }
}

/// The parameter whose gradient is the sum over all rows of the gradient that the last of these nodes is given.
fn adds_rows(nodes: &[Node]) -> Option<ParamId> {
    match nodes.last()? {
        Node::Layer(layer) => layer.adds_rows(),
        Node::Residual(residual) if residual.act == Activation::Identity => adds_rows(&residual.branch),
        Node::Residual(_) => None,
    }
}

/// The gradients that waited for what was made.
fn made_late(awaited: Option<Late>, made: &Early, pass: &Pass) -> candle_core::Result<()> {
    match (awaited, &made.y) {
        (Some(Late { layer, dy: Act { value: Some(dy), .. } }), Some(x)) => layer.backward_late(x, &dy, pass),
        (None, _) => Ok(()),
        (Some(late), _) => candle_core::bail!("the input of {} was not made again", late.layer.name()),
    }
}

/// Whether the output of the last of these nodes can be made again from what it kept.
fn made_again(nodes: &[Node], traces: &[Trace], on: On) -> bool {
    match (nodes.last(), traces.last()) {
        (Some(Node::Layer(layer)), Some(Trace::Layer { remade, .. })) => match layer.remakes(on) {
            Remakes::Never => false,
            Remakes::WithInput => !remade,
            Remakes::Alone => true,
        },
        _ => false,
    }
}

/// Whether the backward pass of these nodes writes to the gradient it is given.
fn overwrites(nodes: &[Node]) -> bool {
    match nodes.last() {
        None => false,
        Some(Node::Layer(layer)) => layer.overwrites(),
        Some(Node::Residual(residual)) => {
            residual.act != Activation::Identity || overwrites(&residual.branch)
        }
    }
}
