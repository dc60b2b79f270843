//! Passes of micro-batches on a card: launched kernel by kernel at first, then recorded and repeated.
//!
//! A recording is of one kind of micro-batch, in one way of running it. Any other pass takes memory that the recorded one
//! had, so it is forgotten then, and made anew when its kind has come again for a while.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Device, Tensor};

use crate::kernels::cuda::recording::Recording;
use crate::kernels::cuda::{copy, copy_into, pointer, product};
use crate::layers::loss::Counted;
use crate::layers::network::{Batch, StepError};
use crate::memory::card::Card;

/// Passes of a kind before it is recorded: in the first of them libraries choose their kernels.
const BEFORE: u32 = 2;

/// What launches depend on, beside the values of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    inputs: Vec<usize>,
    targets: Vec<usize>,
    scale: f64,
    recompute: usize,
}

impl Kind {
    pub fn new(batch: &Batch, scale: f64, recompute: usize) -> Self {
        let (inputs, targets) = (batch.inputs.dims().to_vec(), batch.targets.dims().to_vec());
        Self { inputs, targets, scale, recompute }
    }
}

pub struct Passes {
    card: Arc<Card>,
    device: CudaDevice,
    state: RefCell<State>,
    /// Launches of the first recording, until they are told.
    news: Cell<Option<usize>>,
}

enum State {
    /// So many passes of this kind, one after the other.
    Seen(Option<Kind>, u32),
    Recorded(Kind, Recorded),
    /// They cannot be recorded, or not be repeated.
    Unlike,
}

struct Recorded {
    recording: Recording,
    /// Where it reads its micro-batch, and leaves what it counted.
    batch: Batch,
    counted: Tensor,
}

impl Passes {
    /// None where the CPU computes, or passes have no memory of their own.
    pub fn new(card: &Arc<Card>) -> candle_core::Result<Option<Self>> {
        let (Device::Cuda(device), Some(_)) = (&card.device, card.passes()) else { return Ok(None) };
        // What lasts is not the passes'.
        product::prepare(device)?;
        let state = RefCell::new(State::Seen(None, 0));
        Ok(Some(Self { card: card.clone(), device: device.clone(), state, news: Cell::new(Some(0)) }))
    }

    /// How many launches were recorded, once.
    pub fn news(&self) -> Option<usize> {
        let launches = self.news.get().filter(|&launches| launches > 0);
        launches.inspect(|_| self.news.set(None))
    }

    /// Where the next micro-batch is read, if it is of the kind that is recorded.
    pub fn reads(&self) -> Option<Batch> {
        match &*self.state.borrow() {
            State::Recorded(_, recorded) => Some(recorded.batch.clone()),
            _ => None,
        }
    }

    /// Lets go of what is recorded, and of the micro-batch it reads, which an evaluation has not planned for.
    pub fn forget(&self) {
        let mut state = self.state.borrow_mut();
        if let State::Recorded(kind, _) = &*state {
            *state = State::Seen(Some(kind.clone()), 0);
        }
    }

    /// What `learn` makes of a micro-batch of this kind.
    pub fn run(
        &self,
        kind: Kind,
        batch: &Batch,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> Result<Counted, StepError> {
        let mut state = self.state.borrow_mut();
        if matches!(&*state, State::Seen(Some(seen), BEFORE..) if *seen == kind) {
            *state = match self.record(batch, &learn)? {
                Some(recorded) => {
                    self.news.set(self.news.get().map(|_| recorded.recording.launches));
                    State::Recorded(kind.clone(), recorded)
                }
                None => State::Unlike,
            };
        }
        match &mut *state {
            State::Recorded(recorded, passes) if *recorded == kind => {
                return Ok(Counted::Later(passes.again(&self.device, batch)?));
            }
            State::Seen(Some(seen), times) if *seen == kind => *times += 1,
            State::Unlike => {}
            _ => *state = State::Seen(Some(kind), 1),
        }
        let _memory = self.card.passes();
        learn(batch)
    }

    fn record(
        &self,
        batch: &Batch,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> candle_core::Result<Option<Recorded>> {
        let made = {
            let _memory = self.card.passes();
            Recording::of(&self.device, || learn(batch))?
        };
        Ok(match made {
            Some((recording, Counted::Later(counted))) if self.card.passes_stay() => {
                Some(Recorded { recording, batch: batch.clone(), counted })
            }
            _ => None,
        })
    }
}

impl Recorded {
    /// What the recorded pass counts of another micro-batch.
    fn again(&self, device: &CudaDevice, batch: &Batch) -> candle_core::Result<Tensor> {
        for (from, to) in [(&batch.inputs, &self.batch.inputs), (&batch.targets, &self.batch.targets)] {
            if pointer(from)? != pointer(to)? {
                copy_into(device, from, to)?;
            }
        }
        self.recording.repeat()?;
        copy(device, &self.counted)
    }
}
