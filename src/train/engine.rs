//! Tensors and what is done to them: one micro-batch, one update, one evaluation batch.
//!
//! Prints nothing and decides nothing: an out of memory is a value for the caller. Everything that lives
//! as long as the run is asked of the ledger here, before it is allocated.

use candle_core::{DType, Device, Tensor};

use super::checkpoint::Held;
use super::setup::Setup;
use crate::data::{self, Values};
use crate::features::{Features, Input, Target};
use crate::kernels::update::{blend, clear, round_into, sum_of_squares, swap};
use crate::layers::aside::Aside;
use crate::layers::loss::{Counted, Tally};
use crate::layers::network::{Batch, Network, StepError, Walk};
use crate::layers::{At, Mode, Pass};
use crate::memory::estimate::{batch_bytes, permanent};
use crate::memory::plan::{Offload, Place};
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
    /// The statistics as they were when the update in hand began.
    before: Tensor,
    _held: Vec<Reservation>,
}

/// What lives as long as the run.
struct Made {
    store: Store,
    optimizer: Optimizer,
    aside: Option<Aside>,
    before: Tensor,
    average: Option<Tensor>,
}

impl<'a> Engine<'a> {
    pub fn new(setup: &'a Setup, ledgers: Ledgers, recompute: usize) -> Result<Self, StepError> {
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
        let made = Self::make(setup, &host);
        let made = made.map_err(|error| lacking(&setup.device(), &ledger, Role::Weights, error.into()));
        let Made { store, optimizer, aside, before, average } = made?;
        Ok(Self { setup, store, optimizer, ledger, host, recompute, aside, average, before, _held: held })
    }

    /// Allocates what lives as long as the run.
    fn make(setup: &Setup, host: &Ledger) -> candle_core::Result<Made> {
        let store = Store::new(setup.layout.clone(), setup.job.seed, setup.dtype, &setup.device())?;
        let moves = |what| setup.offload.contains(&what);
        let optimizer = Optimizer::new(&setup.optimizer, &store, moves(Offload::OptimizerState))?;
        let aside = moves(Offload::Activations).then(|| Aside::new(host.clone(), &setup.device()));
        let aside = aside.transpose()?;
        let before = store.stats.copy()?;
        let average = setup.job.train.ema.map(|_| store.master.copy()).transpose()?;
        Ok(Made { store, optimizer, aside, before, average })
    }

    /// What a sample's gradient is multiplied with, so that their sum is near their mean. The update
    /// divides by the weight that was really there.
    fn nominal(&self) -> f64 {
        let samples = self.setup.job.train.samples_per_update();
        (samples * self.setup.features().targets()) as f64
    }

    /// Adds the gradients of a micro-batch, times `scale`. A card is not waited for.
    pub fn learn(&self, batch: &data::Batch, scale: f64) -> Result<Counted, StepError> {
        self.walk(batch, Mode::Train, scale, |network, walk, batch| network.learn(walk, Some(batch)))
    }

    /// The sum of what was counted; here a card is waited for.
    pub fn total(&self, counted: &[Counted]) -> Result<Tally, StepError> {
        let mut total = Tally::default();
        for part in counted {
            total += part.read().map_err(|error| self.lacking(error.into()))?;
        }
        Ok(total)
    }

    /// Judges a micro-batch.
    pub fn judge(&self, batch: &data::Batch) -> Result<Tally, StepError> {
        let counted =
            self.walk(batch, Mode::Eval, 1.0, |network, walk, batch| network.judge(walk, Some(batch)))?;
        Ok(counted.read()?)
    }

    /// What the loss judges of a micro-batch, in f32: (samples, outputs) or (samples, positions, outputs).
    pub fn scores(&self, batch: &data::Batch) -> Result<Tensor, StepError> {
        let scores =
            self.walk(batch, Mode::Eval, 1.0, |network, walk, batch| network.scores(walk, &batch.inputs))?;
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
        run: impl FnOnce(&Network, &Walk, &Batch) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        let longest = batch.lengths.iter().max().map_or(usize::MAX, |&longest| longest as usize);
        let (features, network) = self.setup.fitting(longest);
        self.ledger.phase(if mode == Mode::Eval { "eval" } else { "forward" });
        let _hold =
            self.ledger.reserve(Role::Batch, "micro-batch", batch_bytes(features, batch.ids.len()))?;
        let tensors = self.tensors(batch, features).map_err(|error| self.lacking(error.into()))?;
        let pass = Pass {
            store: &self.store,
            mode,
            seed: self.setup.job.seed,
            epoch: batch.epoch,
            ids: &batch.ids,
            lengths: (!batch.lengths.is_empty()).then_some(&batch.lengths),
            scale: scale / self.nominal(),
        };
        let at = At { batch: batch.ids.len(), dtype: self.setup.dtype, on: self.setup.on() };
        let (ledger, recompute, aside) = (&self.ledger, self.recompute, self.aside.as_ref());
        let walk = Walk { pass: Some(pass), at, ledger, recompute, aside };
        run(network, &walk, &tensors).map_err(|error| self.lacking(error))
    }

    fn lacking(&self, error: StepError) -> StepError {
        lacking(&self.setup.device(), &self.ledger, Role::Activations, error)
    }

    fn tensors(&self, batch: &data::Batch, features: &Features) -> candle_core::Result<Batch> {
        let (rows, whole) = (batch.ids.len(), self.setup.features());
        let input = match &features.input {
            Input::Floats { shape } => [&[rows], shape.as_slice()].concat(),
            Input::Row { .. } => vec![rows, features.input_len()],
            Input::Tokens { length, .. } => vec![rows, *length],
        };
        // What is measured on has hard classes even where those trained on are mixed.
        let row = batch.targets.len() / rows.max(1);
        let target = match if features.target == Target::Tokens { features.target_len() } else { row } {
            1 => vec![rows],
            n => vec![rows, n],
        };
        let device = self.setup.device();
        let inputs = tensor(&batch.inputs, whole.input_len(), input, &device)?;
        // Places of categories are whole numbers that a shorter type would round.
        let inputs = match &features.input {
            Input::Floats { .. } => inputs.to_dtype(self.setup.dtype)?,
            Input::Row { .. } | Input::Tokens { .. } => inputs,
        };
        Ok(Batch { inputs, targets: tensor(&batch.targets, row, target, &device)? })
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

    /// Norm of the mean gradient of an update of this tally, learned with `scale`.
    pub fn gradient_norm(&self, tally: &Tally, scale: f64) -> candle_core::Result<f64> {
        Ok(sum_of_squares(&self.store.grads)?.sqrt() * self.mean_factor(tally, scale))
    }

    /// What turns the gradients of an update of this tally, learned with `scale`, into those of the mean loss.
    pub fn mean_factor(&self, tally: &Tally, scale: f64) -> f64 {
        // Where nothing was to be learned, nothing moves the weights.
        if tally.weight > 0.0 { self.nominal() / (tally.weight * scale) } else { 0.0 }
    }

    /// Moves the weights by the mean gradient, times `clip` over `scale`, and clears the gradients. What it
    /// needs is asked for before anything changes.
    pub fn update(
        &mut self,
        tally: &Tally,
        clip: f64,
        scale: f64,
        lr: f64,
        number: u64,
    ) -> Result<(), StepError> {
        self.ledger.phase("update");
        let setup = self.setup;
        let bytes = optim::workspace_bytes(&setup.optimizer, &setup.layout.params, setup.on());
        let _work = self.ledger.reserve(Role::Workspace, "optimizer", bytes)?;
        let grad_scale = clip * self.mean_factor(tally, scale);
        self.optimizer.update(&self.store, Step { lr, grad_scale, number })?;
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

/// An out of memory that the driver found is one like any other, once all that was under way is done: then what was
/// dropped can be had again.
fn lacking(device: &Device, ledger: &Ledger, role: Role, error: StepError) -> StepError {
    match error {
        StepError::Tensor(error) if is_out_of_memory(&error) => {
            drop(device.synchronize());
            StepError::Oom(ledger.refusal(role, "the driver", 0))
        }
        error => error,
    }
}

/// Rows of `row` values each, of which the first are taken that `shape` has room for.
fn tensor(values: &Values, row: usize, shape: Vec<usize>, device: &Device) -> candle_core::Result<Tensor> {
    fn firsts<T: Copy>(values: &[T], row: usize, taken: usize) -> Vec<T> {
        let mut all = Vec::with_capacity(values.len() / row.max(1) * taken);
        values.chunks_exact(row.max(1)).for_each(|row| all.extend_from_slice(&row[..taken]));
        all
    }
    let taken = shape[1..].iter().product::<usize>();
    match values {
        Values::F32(values) => Tensor::from_slice(values, shape, device),
        Values::U32(values) if taken == row => Tensor::from_slice(values, shape, device),
        Values::U32(values) => Tensor::from_vec(firsts(values, row, taken), shape, device),
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
