//! What a run would hold, without running it: the network is walked with no tensors, and the ledger it
//! asks says what is live at every moment. Not a factor, not a sum: lifetimes.
//!
//! A walk depends on the micro-batch and on what is recomputed alone, so each is made once however many ways
//! of running are asked about.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use candle_core::DType;

use super::ledger::{Entry, Ledger};
use super::plan::{Offload, Part, Phase, Place, Role};
use super::process::Process;
use super::trail::{self, Blocks};
use crate::features::{Features, Input};
use crate::kernels::{keys, product};
use crate::layers::aside::Aside;
use crate::layers::network::{Network, Walk};
use crate::layers::{At, On};
use crate::params::{Flat, Layout, Lies};

/// Heap bytes the program holds beside what it asks for: the measured size of argument parsing, the
/// job, the network's description, thread pools and the reports, with room to spare.
pub const PROGRAM: u64 = 3 << 19;

/// Device bytes of what is too small to be counted one by one: sums that are read, and the driver's rounding.
pub const ROUNDING: u64 = 256 << 10;

/// Device bytes that all matrix products of a card share as their workspace.
pub const PRODUCTS: u64 = 32 << 20;

/// What batches on their way to a card are held as.
pub const STAGED: &str = "micro-batch on its way";

/// The phase before the first step: data is found, counted, tokenized.
pub const PREPARATION: &str = "preparation";

const MASTER: &str = "master weights";
const GRADIENTS: &str = "gradients";

/// A job, as far as its memory is concerned.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub network: &'a Network,
    pub layout: &'a Layout,
    pub features: &'a Features,
    pub dtype: DType,
    /// Where layers compute, and tensors are.
    pub on: On,
    pub optimizer_state: u64,
    /// Optimizer state in bytes instead of floats, where the optimizer has such.
    pub optimizer_state_8bit: u64,
    /// Device bytes through which optimizer state passes that waits in host memory.
    pub state_window: u64,
    /// Bytes an update takes while it runs.
    pub update_workspace: u64,
    /// A moving average of the weights is kept.
    pub average: bool,
    /// Bytes the data holds whatever the batch.
    pub resident_data: u64,
    /// What the process takes beside its heap, and took to prepare the data.
    pub process: Process,
    /// Host bytes the run may use.
    pub ram: u64,
    /// Bytes the loader holds for a micro-batch of this size, within so many host bytes.
    pub pipeline: &'a dyn Fn(usize, u64) -> u64,
    /// The most samples of an update: a micro-batch of whole normalization groups may be larger.
    pub update_samples: u64,
    pub valid_samples: u64,
}

impl Subject<'_> {
    /// Tensors are in the memory of a device that is not the host.
    fn on_device(&self) -> bool {
        self.on.is_cuda()
    }
}

/// How a step is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    pub micro_batch: usize,
    /// Blocks that run forward again.
    pub recompute: usize,
    pub eval_micro_batch: usize,
    /// Optimizer state in bytes.
    pub eight_bit: bool,
    pub offload: &'static [Offload],
}

impl Way {
    pub fn offloads(&self, what: Offload) -> bool {
        self.offload.contains(&what)
    }
}

/// What a way of running takes at most.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub vram: u64,
    pub ram: u64,
    /// The phase of the device's peak, or of the host's where that is the device.
    pub phase: &'static str,
    pub phases: Vec<(&'static str, Held)>,
    /// Bytes of activations that a micro-batch moves to the host and back.
    pub moved: u64,
}

/// Bytes held at a moment, on the device and on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub vram: u64,
    pub ram: u64,
}

/// Foretells memory.
pub trait Predict {
    fn estimate(&self, way: Way) -> Estimate;

    /// The same with so many host bytes, which some buffers follow.
    fn within(&self, way: Way, ram: u64) -> Estimate {
        let _ = ram;
        self.estimate(way)
    }

    /// What is live at the peak, by role, largest first.
    fn parts(&self, way: Way) -> Vec<Part>;
}

impl Estimate {
    pub fn new(phases: Vec<(&'static str, Held)>, moved: u64) -> Self {
        let highest =
            |of: fn(&Held) -> u64| {
                let first = phases.iter().fold(("start", 0), |best, (phase, held)| {
                    if of(held) > best.1 { (*phase, of(held)) } else { best }
                });
                (first.0, first.1)
            };
        let (vram, ram) = (highest(|held| held.vram), highest(|held| held.ram));
        let phase = if vram.1 > 0 { vram.0 } else { ram.0 };
        Self { vram: vram.1, ram: ram.1, phase, phases, moved }
    }

    pub fn phases(&self) -> Vec<Phase> {
        let one = |(name, held): &(&str, Held)| Phase {
            name: (*name).into(),
            vram_bytes: held.vram,
            ram_bytes: held.ram,
        };
        self.phases.iter().map(one).collect()
    }
}

/// Bytes of the type parameters are kept in.
fn wide(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
}

/// Where something of this role is, when nothing is offloaded.
pub fn place(role: Role, on: On) -> Place {
    match (role, on) {
        (Role::DataPipeline | Role::CheckpointWriting | Role::Reserve | Role::Process, _)
        | (_, On::Cpu { .. }) => Place::Ram,
        (_, On::Cuda { .. }) => Place::Vram,
    }
}

/// What a run holds from its start to its end, in the order it asks for it, and where.
pub fn permanent(s: &Subject, offload: &[Offload]) -> Vec<(Role, &'static str, u64, Place)> {
    let (params, stats, wide) = (s.layout.params.len as u64, s.layout.stats.len as u64, wide(s.dtype));
    let copy =
        if s.dtype.size_in_bytes() as u64 == wide { 0 } else { params * s.dtype.size_in_bytes() as u64 };
    let packing =
        if let On::Cpu { threads } = s.on { threads as u64 * product::kept_by_thread(s.dtype) } else { 0 };
    let mut all = vec![
        (Role::Reserve, "program", PROGRAM + packing),
        (Role::Weights, MASTER, (params + stats) * wide),
        (Role::Weights, "computed copy", copy),
        (Role::Weights, "moving average", if s.average { params * wide } else { 0 }),
        (Role::Weights, "statistics before an update", stats * wide),
        (Role::Gradients, GRADIENTS, params * wide),
        (Role::OptimizerState, "optimizer state", s.optimizer_state),
        (Role::DataPipeline, "data in memory", s.resident_data),
    ];
    // Asks are counted: what was not measured is not asked for.
    let measured = [
        (Role::Process, "process", s.process.beside_heap),
        (Role::DataPipeline, "left by preparation", s.process.left_behind),
    ];
    all.extend(measured.into_iter().filter(|(_, _, bytes)| *bytes > 0));
    if s.on_device() {
        all.push((Role::Workspace, "matrix products", PRODUCTS));
        all.push((Role::Workspace, "rounding", ROUNDING));
    }
    let away = offload.contains(&Offload::OptimizerState);
    if away {
        all.push((Role::Workspace, "optimizer state on its way", s.state_window));
    }
    let placed = |role| match role {
        Role::OptimizerState if away => Place::Ram,
        role => place(role, s.on),
    };
    all.into_iter().map(|(role, name, bytes)| (role, name, bytes, placed(role))).collect()
}

/// Bytes of a micro-batch as tensors. The CPU's floats are f32 before they are rounded.
pub fn batch_bytes(features: &Features, at: At) -> u64 {
    let value = match (&features.input, at.on) {
        (Input::Floats { .. }, On::Cuda { .. }) => at.dtype.size_in_bytes(),
        (Input::Floats { .. } | Input::Row { .. } | Input::Tokens { .. }, _) => 4,
    };
    let known = if at.on.is_cuda() { keys::staged_bytes(at.batch) } else { 0 };
    (at.batch * (value * features.input_len() + 4 * features.target_len()) + known) as u64
}

/// Bytes of a micro-batch on its way to a card: in page-locked host memory, and as many where it arrives.
pub fn staged_bytes(features: &Features, samples: usize) -> u64 {
    (samples * features.value_bytes() + keys::staged_bytes(samples)) as u64
}

/// Bytes a checkpoint is written with: the largest parameter whose order other tools have otherwise, and
/// the file's buffer.
pub fn checkpoint_bytes(layout: &Layout, dtype: DType) -> u64 {
    largest(layout, |lies| lies == Lies::ChannelsLast) * wide(dtype) + (1 << 20)
}

/// Values of the largest parameter that lies so.
fn largest(layout: &Layout, lies: impl Fn(Lies) -> bool) -> u64 {
    let sizes = layout.params.iter().filter(|(spec, _)| lies(spec.lies)).map(|(spec, _)| spec.len() as u64);
    sizes.max().unwrap_or(0)
}

/// The order in which blocks are recomputed: the least time for the bytes it frees first; among equals the
/// earlier, whose activations wait longest; last those that free nothing. Gives the rank of each block.
pub fn ranks(flops: &[u64], freed: &[u64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..flops.len()).collect();
    // flops / freed, compared without division; a block that frees nothing costs infinitely much a byte.
    order.sort_by(|&a, &b| {
        let cost = |x: usize, y: usize| u128::from(flops[x].max(1)) * u128::from(freed[y]);
        match (freed[a], freed[b]) {
            (0, 0) => std::cmp::Ordering::Equal,
            (0, _) => std::cmp::Ordering::Greater,
            (_, 0) => std::cmp::Ordering::Less,
            _ => cost(a, b).cmp(&cost(b, a)),
        }
    });
    let mut ranks = vec![0; order.len()];
    order.into_iter().enumerate().for_each(|(rank, block)| ranks[block] = rank);
    ranks
}

/// Foretells the memory of a job.
pub struct Estimator<'a> {
    subject: Subject<'a>,
    blocks: Blocks,
    trained: RefCell<BTreeMap<(usize, usize, bool), Rc<Walked>>>,
    judged: RefCell<BTreeMap<usize, Rc<Walked>>>,
}

/// What a walk over the network holds at the highest moments of its phases, and the inputs of blocks that wait in
/// host memory meanwhile, in bytes.
#[derive(Default)]
struct Walked {
    highs: Vec<(&'static str, u64)>,
    away: u64,
}

impl<'a> Estimator<'a> {
    pub fn new(subject: Subject<'a>) -> Self {
        let blocks = Blocks::new(subject.network);
        Self { subject, blocks, trained: RefCell::default(), judged: RefCell::default() }
    }

    /// Bytes that each block would free if it kept only its input, for one sample.
    pub fn freed(&self) -> Vec<u64> {
        let kept = |recompute| trail::kept(&self.learn(1, recompute, false).0, &self.blocks);
        let all = self.subject.network.blocks.len();
        kept(0).into_iter().zip(kept(all)).map(|(whole, input)| whole.saturating_sub(input)).collect()
    }

    /// The changes of a walk that learns, and the most bytes that wait in host memory.
    fn learn(&self, batch: usize, recompute: usize, aside: bool) -> (Vec<Entry>, u64) {
        let host = Ledger::planning();
        let aside = aside.then(|| Aside::planned(host.clone()));
        let body = |network: &Network, walk: &Walk| {
            drop(network.learn(&Walk { pass: None, recompute, aside: aside.as_ref(), ..*walk }, None));
        };
        (self.walk("forward", batch, body), host.peak())
    }

    fn judge(&self, batch: usize) -> Vec<Entry> {
        self.walk("eval", batch, |network, walk| drop(network.judge(walk, None)))
    }

    fn walk(&self, phase: &'static str, batch: usize, body: impl Fn(&Network, &Walk)) -> Vec<Entry> {
        let s = &self.subject;
        let ledger = Ledger::planning();
        ledger.phase(phase);
        {
            let at = At { batch, dtype: s.dtype, on: s.on };
            // A planning ledger has no limit, so no ask fails.
            let _batch = ledger.reserve(Role::Batch, "micro-batch", batch_bytes(s.features, at)).ok();
            body(s.network, &Walk { pass: None, at, ledger: &ledger, recompute: 0, aside: None });
        }
        ledger.log()
    }

    fn trained(&self, way: Way) -> Rc<Walked> {
        let (batch, recompute) = (self.train_batch(way), way.recompute);
        let aside = self.aside(way);
        let walk = || {
            let (log, away) = self.learn(batch, recompute, aside);
            Rc::new(Walked { highs: trail::highs(&log), away })
        };
        self.trained.borrow_mut().entry((batch, recompute, aside)).or_insert_with(walk).clone()
    }

    fn judged(&self, batch: usize) -> Rc<Walked> {
        let walk = || Rc::new(Walked { highs: trail::highs(&self.judge(batch)), away: 0 });
        self.judged.borrow_mut().entry(batch).or_insert_with(walk).clone()
    }

    /// Whether inputs of blocks wait in host memory.
    fn aside(&self, way: Way) -> bool {
        self.subject.on_device() && way.offloads(Offload::Activations)
    }

    fn train_batch(&self, way: Way) -> usize {
        way.micro_batch.min(self.subject.update_samples as usize)
    }

    /// Samples of an evaluation batch; none where there is nothing to judge.
    fn eval_batch(&self, way: Way) -> Option<usize> {
        let samples = self.subject.valid_samples as usize;
        (samples > 0).then(|| way.eval_micro_batch.min(samples))
    }

    /// Values of the parameters, and of these statistics, by the layer that has them.
    fn by_layer(&self, stats: Option<&'a Flat>) -> BTreeMap<&'a str, u64> {
        let mut values = BTreeMap::new();
        let flats = [Some(&self.subject.layout.params), stats];
        for (spec, range) in flats.into_iter().flatten().flat_map(Flat::iter) {
            // A layer's name is the beginning of its parameters' names.
            let mut owner = spec.name.as_str();
            while let Some((above, _)) = owner.rsplit_once('.') {
                owner = above;
                if self.blocks.has(owner) {
                    break;
                }
            }
            *values.entry(owner).or_default() += range.len() as u64;
        }
        values
    }

    fn place(&self, role: Role) -> Place {
        place(role, self.subject.on)
    }

    /// What is held from the start to the end.
    fn lasting(&self, way: Way, ram: u64) -> Vec<(Role, &'static str, u64, Place)> {
        let mut s = Subject { ram, ..self.subject };
        if way.eight_bit {
            s.optimizer_state = s.optimizer_state_8bit;
        }
        let mut lasting = permanent(&s, if s.on_device() { way.offload } else { &[] });
        let prefetch = (s.pipeline)(way.micro_batch, s.ram);
        let more = [(Role::DataPipeline, "prefetch", prefetch)].into_iter().chain(self.staged(way));
        lasting.extend(more.map(|(role, name, bytes)| (role, name, bytes, self.place(role))));
        if self.aside(way) {
            lasting.push((Role::Activations, "inputs of blocks", self.trained(way).away, Place::Ram));
        }
        lasting
    }

    /// What the larger of both micro-batches takes on its way to a card, on the card and on the host.
    fn staged(&self, way: Way) -> Vec<(Role, &'static str, u64)> {
        let samples = self.train_batch(way).max(self.eval_batch(way).unwrap_or(0));
        let bytes = staged_bytes(self.subject.features, samples);
        let both = vec![(Role::Batch, STAGED, bytes), (Role::DataPipeline, STAGED, bytes)];
        if self.subject.on_device() { both } else { Vec::new() }
    }

    /// What is held in a phase beside what lasts and what the walk holds.
    fn passing(&self, way: Way, ram: u64, phase: &str) -> Vec<(Role, &'static str, u64, Place)> {
        let s = &Subject { ram, ..self.subject };
        let mut passing = match (phase, self.eval_batch(way)) {
            ("update", _) => vec![(Role::Workspace, "optimizer", s.update_workspace)],
            ("eval", Some(batch)) => {
                vec![(Role::DataPipeline, "evaluation prefetch", (s.pipeline)(batch, s.ram))]
            }
            ("checkpoint", _) => {
                vec![(Role::CheckpointWriting, "checkpoint", checkpoint_bytes(s.layout, s.dtype))]
            }
            _ => Vec::new(),
        };
        if phase == "checkpoint" && s.on_device() {
            // Parameter by parameter and state by state, through host memory: as copied, and as written.
            let values = match way.offloads(Offload::OptimizerState) {
                true => largest(s.layout, |_| true),
                false => s.layout.params.len as u64,
            };
            let copy = 2 * values * wide(s.dtype);
            passing.push((Role::CheckpointWriting, "copy", copy));
        }
        passing.into_iter().map(|(role, name, bytes)| (role, name, bytes, self.place(role))).collect()
    }

    /// Where what a walk holds is.
    fn walks_on(&self) -> Place {
        if self.subject.on_device() { Place::Vram } else { Place::Ram }
    }
}

impl Predict for Estimator<'_> {
    fn estimate(&self, way: Way) -> Estimate {
        self.within(way, self.subject.ram)
    }

    fn within(&self, way: Way, budget: u64) -> Estimate {
        let on = |place: Place, parts: &[(Role, &str, u64, Place)]| {
            parts.iter().filter(|part| part.3 == place).map(|part| part.2).sum::<u64>()
        };
        let lasting = self.lasting(way, budget);
        let (vram, ram) = (on(Place::Vram, &lasting), on(Place::Ram, &lasting));
        let trained = self.trained(way);
        let judged = self.eval_batch(way).map(|batch| self.judged(batch)).unwrap_or_default();
        let walked =
            trained.highs.iter().chain(&[("update", 0)]).chain(&judged.highs).chain(&[("checkpoint", 0)]);
        let phases = walked.map(|(phase, high)| {
            let passing = self.passing(way, budget, phase);
            let walked = |place| if place == self.walks_on() { *high } else { 0 };
            let held = Held {
                vram: vram + on(Place::Vram, &passing) + walked(Place::Vram),
                ram: ram + on(Place::Ram, &passing) + walked(Place::Ram),
            };
            (*phase, held)
        });
        // Measured: it is over when the plan is made, and nothing a plan changes makes it smaller.
        let preparation = Held { vram: 0, ram: self.subject.process.prepared };
        let all = std::iter::once((PREPARATION, preparation)).filter(|(_, held)| held.ram > 0).chain(phases);
        Estimate::new(all.collect(), 2 * trained.away)
    }

    fn parts(&self, way: Way) -> Vec<Part> {
        let estimate = self.estimate(way);
        let mut parts = Vec::new();
        for place in [Place::Vram, Place::Ram] {
            let of = |held: &Held| if place == Place::Vram { held.vram } else { held.ram };
            // The first of the highest, as the peak's phase is.
            let peak = estimate.phases.iter().map(|(_, held)| of(held)).max().unwrap_or(0);
            let Some((phase, _)) = estimate.phases.iter().find(|(_, held)| of(held) == peak) else {
                continue;
            };
            let mut add = |name: &str, role, bytes| {
                if bytes > 0 {
                    parts.push(Part { name: name.into(), role, bytes, r#where: place });
                }
            };
            if *phase == PREPARATION {
                add(PREPARATION, Role::DataPipeline, peak);
                continue;
            }
            let budget = self.subject.ram;
            let stated = self.lasting(way, budget).into_iter().chain(self.passing(way, budget, phase));
            for (role, name, bytes, _) in stated.filter(|part| part.3 == place) {
                match name {
                    MASTER | GRADIENTS => {
                        let stats = (name == MASTER).then_some(&self.subject.layout.stats);
                        for (layer, values) in self.by_layer(stats) {
                            add(layer, role, values * wide(self.subject.dtype));
                        }
                    }
                    _ => add(name, role, bytes),
                }
            }
            if place != self.walks_on() {
                continue;
            }
            let log = match (*phase, self.eval_batch(way)) {
                ("forward" | "backward", _) => {
                    self.learn(self.train_batch(way), way.recompute, self.aside(way)).0
                }
                ("eval", Some(batch)) => self.judge(batch),
                _ => continue,
            };
            trail::moment(&log, phase).iter().for_each(|((role, name), bytes)| add(name, *role, *bytes));
        }
        parts.sort_by_key(|part| (part.r#where == Place::Ram, part.role, std::cmp::Reverse(part.bytes)));
        parts
    }
}
