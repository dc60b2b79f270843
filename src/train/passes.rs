//! Passes of micro-batches on a card: launched kernel by kernel at first, then recorded and repeated.
//!
//! A recording is of one kind of micro-batch, in one way of running it. Any other pass takes memory that the recorded one
//! had, so it is forgotten then, and made anew when its kind has come again for a while.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Device, Shape, Tensor};

use crate::kernels::cuda::recording::Recording;
use crate::kernels::cuda::{copy, product};
use crate::layers::loss::Counted;
use crate::layers::network::{Batch, StepError};
use crate::memory::card::Card;

/// Passes of a kind before it is recorded: in the first of them libraries choose their kernels.
const BEFORE: u32 = 2;

/// What launches depend on, beside the values of tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Kind {
    inputs: (DType, Shape),
    targets: (DType, Shape),
    scale: f64,
    recompute: usize,
}

impl Kind {
    pub fn new(batch: &Batch, scale: f64, recompute: usize) -> Self {
        let like = |tensor: &Tensor| (tensor.dtype(), tensor.shape().clone());
        Self { inputs: like(&batch.inputs), targets: like(&batch.targets), scale, recompute }
    }
}

pub struct Passes {
    card: Arc<Card>,
    device: CudaDevice,
    state: RefCell<State>,
    news: Cell<News>,
}

/// Of the first recording, which alone is told.
#[derive(Clone, Copy)]
enum News {
    Awaited,
    /// So many launches were recorded, or none, and why.
    Made(Result<usize, &'static str>),
    Told,
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
        Ok(Some(Self { card: card.clone(), device: device.clone(), state, news: Cell::new(News::Awaited) }))
    }

    /// What came of the first recording, once.
    pub fn news(&self) -> Option<Result<usize, &'static str>> {
        let News::Made(made) = self.news.get() else { return None };
        self.news.set(News::Told);
        Some(made)
    }

    /// Where the next micro-batch is to be, if it has the samples of the one that is recorded. That one is let go of if
    /// not: nothing is planned for two of them.
    pub fn reads(&self, samples: usize) -> Option<Batch> {
        match &*self.state.borrow() {
            State::Recorded(_, Recorded { batch, .. }) if batch.inputs.dims()[0] == samples => {
                return Some(batch.clone());
            }
            _ => {}
        }
        self.forget();
        None
    }

    /// Lets go of what is recorded, and of the micro-batch it reads, which an evaluation has not planned for.
    pub fn forget(&self) {
        let mut state = self.state.borrow_mut();
        if let State::Recorded(kind, _) = &*state {
            *state = State::Seen(Some(kind.clone()), 0);
        }
    }

    /// What `learn` makes of a micro-batch of this kind. One of the kind that is recorded is where that
    /// [`reads`](Self::reads) it.
    pub fn run(
        &self,
        kind: Kind,
        batch: &Batch,
        learn: impl Fn(&Batch) -> Result<Counted, StepError>,
    ) -> Result<Counted, StepError> {
        let mut state = self.state.borrow_mut();
        if matches!(&*state, State::Seen(Some(seen), BEFORE..) if *seen == kind) {
            let recorded = self.record(batch, &learn)?;
            if let News::Awaited = self.news.get() {
                let launches = recorded.as_ref().map(|made| made.recording.launches);
                self.news.set(News::Made(launches.map_err(|why| *why)));
            }
            *state = recorded.map_or(State::Unlike, |recorded| State::Recorded(kind.clone(), recorded));
        }
        match &mut *state {
            State::Recorded(recorded, passes) if *recorded == kind => {
                return Ok(Counted::Later(passes.again(&self.device)?));
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
    ) -> candle_core::Result<Result<Recorded, &'static str>> {
        let made = {
            let _memory = self.card.passes();
            Recording::of(&self.device, || learn(batch))?
        };
        Ok(match made {
            Ok(_) if !self.card.passes_stay() => Err("its memory does not stay where it is"),
            Ok((recording, Counted::Later(counted))) => {
                Ok(Recorded { recording, batch: batch.clone(), counted })
            }
            Ok(_) => Err("the host waits for it"),
            Err(why) => Err(why),
        })
    }
}

impl Recorded {
    /// What the recorded pass counts of the micro-batch that is in its place now.
    fn again(&self, device: &CudaDevice) -> candle_core::Result<Tensor> {
        self.recording.repeat()?;
        copy(device, &self.counted)
    }
}
