//! Tensors and what is done to them: one micro-batch, one update, one evaluation batch.
//!
//! Prints nothing and decides nothing: an out of memory is a value for the caller. Everything that lives
//! as long as the run is asked of the ledger here, before it is allocated.

use candle_core::{DType, Tensor};

use super::checkpoint::Held;
use super::event::Event;
#[cfg(feature = "cuda")]
use super::passes::{self, Captured, Kind, Passes};
use super::setup::Setup;
use super::staging::Staging;
use crate::data;
use crate::features::Features;
#[cfg(feature = "cuda")]
use crate::kernels::judge::card::{Judge, Later};
use crate::kernels::judge::{Judged, Terms};
use crate::kernels::update::{blend, clear, round_into, sum_of_squares, swap};
use crate::layers::aside::Aside;
use crate::layers::loss::{Counted, Tally};
use crate::layers::network::{Batch, Network, StepError, Walk};
use crate::layers::{Along, At, Mode, Pass};
use crate::memory::estimate::{batch_bytes, permanent};
use crate::memory::plan::{Offload, Place};
use crate::memory::process::Work;
use crate::memory::{Fault, Ledger, Reservation, Role};
use crate::optim::{self, Optimizer, Step};
use crate::params::Store;

/// The accounts of a run: of tensors, and of what the host holds beside them.
#[derive(Clone)]
pub struct Ledgers {
    pub tensors: Ledger,
    pub host: Ledger,
}

impl Ledgers {
    /// One account for both where the CPU computes. `fault`: asks for tensors that fail, for tests.
    pub fn new(setup: &Setup, ram: u64, fault: Option<Fault>) -> Self {
        match &setup.card {
            Some(card) => Self { tensors: Ledger::new(card.limit, fault), host: Ledger::new(ram, None) },
            None => {
                let ledger = Ledger::new(ram, fault);
                Self { tensors: ledger.clone(), host: ledger }
            }
        }
    }
}

pub struct Engine<'a> {
    setup: &'a Setup,
    pub store: Store,
    pub optimizer: Optimizer,
    /// What tensors take, on the device.
    pub ledger: Ledger,
    /// What the host holds beside them; the very same account where the CPU computes.
    pub host: Ledger,
    /// Blocks that keep only their input and run forward again.
    pub recompute: usize,
    /// Where their inputs wait, if not on the card.
    aside: Option<Aside>,
    /// The moving average of the weights, where the job asks for one.
    pub average: Option<Tensor>,
    /// The way of batches to where tensors are.
    pub staging: Staging,
    /// The statistics as they were when the update in hand began.
    before: Tensor,
    /// Judges updates on a card, where the rule reads its findings there.
    #[cfg(feature = "cuda")]
    judge: Option<Judge>,
    /// Repeats passes on a card, where these have memory of their own.
    #[cfg(feature = "cuda")]
    passes: Option<Passes>,
    _held: Vec<Reservation>,
}

/// What is known, or will be, of an update's gradients.
pub enum Finding {
    Known(Judged),
    #[cfg(feature = "cuda")]
    Later(Later),
}

impl Finding {
    /// Waits for the card, where it has not come to it yet.
    pub fn read(&self) -> candle_core::Result<Judged> {
        match self {
            Finding::Known(judged) => Ok(*judged),
            #[cfg(feature = "cuda")]
            Finding::Later(later) => later.read(),
        }
    }

    pub fn is_known(&self) -> bool {
        matches!(self, Finding::Known(_))
    }
}

/// What lives as long as the run.
struct Made {
    store: Store,
    optimizer: Optimizer,
    aside: Option<Aside>,
    before: Tensor,
    average: Option<Tensor>,
    #[cfg(feature = "cuda")]
    judge: Option<Judge>,
    #[cfg(feature = "cuda")]
    passes: Option<Passes>,
}

impl<'a> Engine<'a> {
    /// `graphs`: passes on a GPU may be captured as CUDA graphs.
    pub fn new(
        setup: &'a Setup,
        ledgers: Ledgers,
        recompute: usize,
        graphs: bool,
    ) -> Result<Self, StepError> {
        let staging = Staging::new(setup, &ledgers);
        let Ledgers { tensors: ledger, host } = ledgers;
        let asked = setup.with_subject(|subject| {
            permanent(subject, setup.offload)
                .into_iter()
                .map(|(role, name, bytes, place)| match place {
                    Place::Ram => host.reserve(role, name, bytes),
                    Place::Vram => ledger.reserve(role, name, bytes),
                })
                .collect()
        });
        let held: Result<Vec<Reservation>, _> = asked;
        let held = held?;
        let made = Self::make(setup, &host, graphs);
        let made = made.map_err(|error| lacking(setup, &ledger, Role::Weights, error.into()));
        let made = made?;
        Ok(Self {
            setup,
            store: made.store,
            optimizer: made.optimizer,
            ledger,
            host,
            recompute,
            aside: made.aside,
            average: made.average,
            staging,
            before: made.before,
            #[cfg(feature = "cuda")]
            judge: made.judge,
            #[cfg(feature = "cuda")]
            passes: made.passes,
            _held: held,
        })
    }

    /// Allocates what lives as long as the run.
    fn make(setup: &Setup, host: &Ledger, graphs: bool) -> candle_core::Result<Made> {
        let _ = graphs;
        let store = Store::new(setup.layout.clone(), setup.job.seed, setup.dtype, &setup.device())?;
        let moves = |what| setup.offload.contains(&what);
        let optimizer = Optimizer::new(&setup.optimizer, &store, moves(Offload::OptimizerState))?;
        let aside = moves(Offload::Activations).then(|| Aside::new(host.clone(), &setup.device()));
        let aside = aside.transpose()?;
        let before = store.stats.copy()?;
        let average = setup.job.train.ema.map(|_| store.master.copy()).transpose()?;
        #[cfg(feature = "cuda")]
        let judge = match crate::kernels::cuda::of(&store.master) {
            Some(card) if optim::judged_there(&setup.optimizer) => Some(Judge::new(card)?),
            _ => None,
        };
        Ok(Made {
            store,
            optimizer,
            aside,
            before,
            average,
            #[cfg(feature = "cuda")]
            judge,
            #[cfg(feature = "cuda")]
            passes: setup.card.as_ref().map(|card| Passes::new(card, graphs)).transpose()?.flatten(),
        })
    }

    /// What a sample's gradient is multiplied with, so that their sum is near their mean. The update
    /// divides by the weight that was really there.
    fn nominal(&self) -> f64 {
        let samples = self.setup.job.train.samples_per_update();
        (samples * self.setup.features().targets()) as f64
    }

    /// Adds the gradients of a micro-batch, times `scale`. A card is not waited for.
    pub fn learn(&self, batch: &data::Batch, scale: f64) -> Result<Counted, StepError> {
        self.walk(batch, Mode::Train, scale, |network, walk, batch, scope| {
            scope.run(batch, |batch| network.learn(walk, Some(batch)))
        })
    }

    /// What came of the first capture of a CUDA graph, once; `step` updates were made before it.
    pub fn captured(&self, step: u64) -> Option<Event> {
        #[cfg(feature = "cuda")]
        return self.passes.as_ref().and_then(Passes::news).map(|captured| match captured {
            Captured::Graph { launches, arena: arena_bytes, bound } => {
                let arena_waste_bytes = arena_bytes - bound;
                Event::CudaGraphCaptured { step, launches, arena_bytes, arena_waste_bytes }
            }
            Captured::Not { reason } => Event::CudaGraphDisabled { step, reason },
        });
        #[cfg(not(feature = "cuda"))]
        {
            let _ = step;
            None
        }
    }

    /// Lets go of what makes passes faster and takes memory.
    pub fn release(&self) {
        #[cfg(feature = "cuda")]
        self.passes.iter().for_each(Passes::clear);
    }

    /// What is to be done with gradients learned with `scale`, by micro-batches that counted this. A card is waited
    /// for only where its findings are wanted `now`, or the rule of updates cannot do without.
    pub fn weigh(&mut self, counted: &[Counted], scale: f64, now: bool) -> Result<Finding, StepError> {
        let terms = self.terms(scale);
        #[cfg(feature = "cuda")]
        if let Some(judge) = self.judge.as_mut().filter(|_| !now) {
            let later = judge.judge(counted, &self.store.grads, &terms);
            return Ok(Finding::Later(later.map_err(|error| self.lacking(error.into()))?));
        }
        let _ = now;
        let mut total = Tally::default();
        for part in counted {
            total += part.read().map_err(|error| self.lacking(error.into()))?;
        }
        // Where all records were left out there is nothing to measure.
        let squares = if total.weight == 0.0 { 0.0 } else { sum_of_squares(&self.store.grads)? };
        Ok(Finding::Known(terms.judge(total, squares)))
    }

    /// What gradients learned with `scale` are judged by.
    pub fn terms(&self, scale: f64) -> Terms {
        Terms { nominal: self.nominal(), scale, clip: self.setup.job.train.clip_norm }
    }

    /// Judges a micro-batch.
    pub fn judge(&self, batch: &data::Batch) -> Result<Tally, StepError> {
        let counted =
            self.walk(batch, Mode::Eval, 1.0, |network, walk, batch, _| network.judge(walk, Some(batch)))?;
        Ok(counted.read()?)
    }

    /// What the loss judges of a micro-batch, in f32: (samples, outputs) or (samples, positions, outputs).
    pub fn scores(&self, batch: &data::Batch) -> Result<Tensor, StepError> {
        let scores =
            self.walk(batch, Mode::Eval, 1.0, |network, walk, batch, _| network.scores(walk, &batch.inputs))?;
        Ok(scores.to_dtype(DType::F32)?)
    }

    /// Puts the moving average in the place of the weights, or back; nothing where there is none.
    pub fn swap_average(&self) -> candle_core::Result<()> {
        match &self.average {
            Some(average) => swap(average, &self.store.master).and_then(|()| self.store.round()),
            None => Ok(()),
        }
    }

    /// Runs a micro-batch; one of padded samples is cut to the smallest bucket that holds its longest.
    fn walk<R>(
        &self,
        batch: &data::Batch,
        mode: Mode,
        scale: f64,
        run: impl FnOnce(&Network, &Walk, &Batch, &Scope) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        self.setup.keep_within_plan(if mode == Mode::Eval { Work::Evaluation } else { Work::Training });
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let (features, network) = self.setup.fitting(longest);
        let at = At { batch: batch.ids.len(), dtype: self.setup.dtype, on: self.setup.on() };
        self.ledger.phase(if mode == Mode::Eval { "eval" } else { "forward" });
        let _hold = self.ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, at))?;
        self.staging.prepare(batch, features).map_err(|error| self.lacking(error))?;
        // The scope ends after everything of the pass is freed: it is dropped last.
        let scope = self.scope(batch, features, mode, scale);
        let tensors = self.staging.tensors(batch, features).map_err(|error| self.lacking(error))?;
        let pass = Pass {
            store: &self.store,
            mode,
            seed: self.setup.job.seed,
            epoch: batch.epoch,
            ids: &batch.ids,
            lengths: (!batch.lengths.is_empty()).then_some(&batch.lengths),
            staged: tensors.staged.as_ref(),
            scale: scale / self.nominal(),
            along: Along::default(),
        };
        let (ledger, recompute, aside) = (&self.ledger, self.recompute, self.aside.as_ref());
        let walk = Walk { pass: Some(pass), at, ledger, recompute, aside };
        let result = run(network, &walk, &tensors, &scope).map_err(|error| self.lacking(error))?;
        scope.finish();
        Ok(result)
    }

    /// What serves the allocations of a pass on a GPU, and may run it as a CUDA graph.
    fn scope(&self, batch: &data::Batch, features: &Features, mode: Mode, scale: f64) -> Scope<'_> {
        #[cfg(feature = "cuda")]
        return Scope(self.passes.as_ref().map(|passes| {
            passes.begin(Kind {
                mode,
                samples: batch.ids.len(),
                input: features.input_len(),
                targets: batch.targets.len(),
                padded: !batch.lengths.is_empty(),
                scale,
                recompute: self.recompute,
            })
        }));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (batch, features, mode, scale);
            Scope(std::marker::PhantomData)
        }
    }

    fn lacking(&self, error: StepError) -> StepError {
        lacking(self.setup, &self.ledger, Role::Activations, error)
    }

    /// Remembers the statistics, so that the update that begins can be begun again.
    pub fn begin(&self) -> candle_core::Result<()> {
        round_into(&self.store.stats, &self.before)
    }

    /// Takes back everything the update in hand has done.
    pub fn rewind(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)?;
        round_into(&self.before, &self.store.stats)
    }

    /// Moves the weights as was found right, and clears the gradients. What it needs is asked for before anything
    /// changes.
    pub fn update(&mut self, finding: &Finding, lr: f64, number: u64) -> Result<(), StepError> {
        self.ledger.phase("update");
        self.setup.keep_within_plan(Work::Training);
        let setup = self.setup;
        let bytes = optim::workspace_bytes(&setup.optimizer, &setup.layout.params, setup.on());
        let _work = self.ledger.reserve(Role::Workspace, "optimizer", bytes)?;
        match finding {
            Finding::Known(Judged { grad_scale, .. }) => {
                let step = Step { lr, grad_scale: *grad_scale, judged: None, number };
                self.optimizer.update(&self.store, step)?;
            }
            #[cfg(feature = "cuda")]
            Finding::Later(later) => {
                let there = later.grad_scale()?;
                let step = Step { lr, grad_scale: f64::NAN, judged: Some(&there), number };
                self.optimizer.update(&self.store, step)?;
            }
        }
        if let (Some(average), Some(keep)) = (&self.average, self.setup.job.train.ema) {
            blend(average, &self.store.master, keep)?;
        }
        Ok(())
    }

    /// All tensors that a checkpoint holds.
    pub fn held(&self) -> Held<'_> {
        Held { store: &self.store, optimizer: &self.optimizer, average: self.average.as_ref() }
    }

    /// Forgets the gradients of an update that is not made.
    pub fn skip(&self) -> candle_core::Result<()> {
        clear(&self.store.grads)
    }
}

/// The pass in hand; on the CPU there is nothing to it.
struct Scope<'a>(
    #[cfg(feature = "cuda")] Option<passes::Scope<'a>>,
    #[cfg(not(feature = "cuda"))] std::marker::PhantomData<&'a ()>,
);

impl Scope<'_> {
    fn run(
        &self,
        batch: &Batch,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> Result<Counted, StepError> {
        #[cfg(feature = "cuda")]
        if let Some(scope) = &self.0 {
            return scope.run(batch, learn);
        }
        learn(batch)
    }

    fn finish(&self) {
        #[cfg(feature = "cuda")]
        self.0.iter().for_each(passes::Scope::finish);
    }
}

/// A refused allocation of a GPU is an OOM like any other, with the heap's own figures.
fn lacking(setup: &Setup, ledger: &Ledger, role: Role, error: StepError) -> StepError {
    match error {
        StepError::Tensor(error) if is_out_of_memory(&error) => {
            let (bytes, left) = setup.card.as_ref().and_then(|card| card.refusal()).unwrap_or_default();
            StepError::Oom(ledger.refused_by_device(role, bytes, left))
        }
        error => error,
    }
}

/// Whether an error is a card's: out of memory.
fn is_out_of_memory(error: &candle_core::Error) -> bool {
    #[cfg(feature = "cuda")]
    return crate::kernels::cuda::is_out_of_memory(error);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = error;
        false
    }
}
