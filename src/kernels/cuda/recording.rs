//! Launches that are recorded once and repeated: one call of the host instead of hundreds, and shorter gaps between
//! kernels on the card.
//!
//! Kernels are recorded with the addresses they read and write, so all memory that is asked for meanwhile must come from
//! a pool that nobody else takes from as long as they are repeated (`memory::card::PassMemory`), and stay where it is: a pool
//! that finds no room in one piece moves what is free to another address. Memory is asked for and given back on an idle
//! stream of its own: in the order of the launches, and not as a part of them.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, result, sys};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

thread_local! {
    static MAKING: RefCell<Option<Making>> = const { RefCell::new(None) };
    static WATCHED: RefCell<Option<Watched>> = const { RefCell::new(None) };
}

/// Addresses that all tensors are to come from.
struct Watched {
    piece: Range<u64>,
    left: bool,
}

/// From here on, on this thread, it is watched whether tensors come from this piece of memory alone.
pub fn watch(piece: Range<u64>) {
    WATCHED.set(Some(Watched { piece, left: false }));
}

/// Whether they did; ends the watch.
pub fn stayed() -> bool {
    WATCHED.take().is_none_or(|watched| !watched.left)
}

/// So many bytes were given to a tensor.
pub(super) fn took(at: u64, bytes: usize) {
    WATCHED.with_borrow_mut(|watched| {
        if let Some(Watched { piece, left }) = watched {
            *left |= at < piece.start || at + bytes as u64 > piece.end;
        }
    });
}

/// A recording in the making, on this thread.
struct Making {
    /// Where memory is asked for.
    memory: Arc<CudaStream>,
    /// Why it cannot be repeated.
    varies: Option<&'static str>,
}

/// The stream on which tensors of a device are asked for now.
pub(super) fn memory(device: &CudaDevice) -> Arc<CudaStream> {
    MAKING.with_borrow(|making| making.as_ref().map_or_else(|| device.cuda_stream(), |m| m.memory.clone()))
}

/// To be called where what is launched depends on more than the values of tensors, with a word for it: it cannot be
/// repeated.
pub fn varies(why: &'static str) {
    MAKING.with_borrow_mut(|making| making.iter_mut().for_each(|making| making.varies = Some(why)));
}

/// Launches in their order.
pub struct Recording {
    graph: sys::CUgraph,
    ready: sys::CUgraphExec,
    stream: Arc<CudaStream>,
    /// How many there are.
    pub launches: usize,
}

impl Recording {
    /// Records what `launch` launches, none of which is done, and gives what it gives; or why that fails or could not be
    /// repeated: launched without being recorded it works, or is an error.
    pub fn of<R, E>(
        device: &CudaDevice,
        launch: impl FnOnce() -> std::result::Result<R, E>,
    ) -> Result<std::result::Result<(Self, R), &'static str>> {
        let stream = device.cuda_stream();
        // What was given back on the computing stream can be had on another once that has come so far.
        stream.synchronize().w()?;
        // Streams take memory of the card beside its pools, which others may have.
        let Ok(memory) = stream.context().new_stream() else { return Ok(Err("there is no stream for it")) };
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        MAKING.set(Some(Making { memory, varies: None }));
        let launched = launch();
        let varies = MAKING.take().and_then(|making| making.varies);
        // SAFETY: it was begun on this stream.
        let graph = unsafe { result::stream::end_capture(stream.cu_stream()) };
        let refused = stream.context().check_err();
        let recording = graph.ok().and_then(|graph| {
            let ready = std::ptr::null_mut();
            Self { graph, ready, stream: stream.clone(), launches: 0 }.made_ready()
        });
        match (launched, recording, refused) {
            (Ok(made), Some(recording), Ok(())) if varies.is_none() => Ok(Ok((recording, made))),
            (launched, ..) => {
                // What cannot be recorded, or not be given back after it was, is nobody else's error.
                drop(launched);
                let _ = stream.context().check_err();
                Ok(Err(varies.unwrap_or("the driver does not take it")))
            }
        }
    }

    /// Makes all ready to be repeated, where it can be.
    fn made_ready(mut self) -> Option<Self> {
        if self.graph.is_null() {
            return None;
        }
        // SAFETY: the graph is this one's own, and nothing that it launches is under way.
        unsafe {
            self.launches = recording_of_kernels(self.graph);
            if self.launches == 0 {
                return None;
            }
            self.ready = result::graph::instantiate(self.graph, sys::CUgraphInstantiate_flags(0)).ok()?;
            result::graph::upload(self.ready, self.stream.cu_stream()).ok()?;
        }
        Some(self)
    }

    /// Launches all of them once more.
    pub fn repeat(&self) -> Result<()> {
        // SAFETY: it was made ready, and whoever has it keeps the memory of its tensors for it.
        unsafe { result::graph::launch(self.ready, self.stream.cu_stream()) }.w()
    }
}

impl Drop for Recording {
    /// What is under way ends first: the memory is others' from here on. A failure is the stream's, told by its next use.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        // SAFETY: both are this one's own, and nothing of them is under way.
        unsafe {
            if !self.ready.is_null() {
                let _ = result::graph::exec_destroy(self.ready);
            }
            if !self.graph.is_null() {
                let _ = result::graph::destroy(self.graph);
            }
        }
    }
}

unsafe extern "C" {
    fn recording_of_kernels(graph: sys::CUgraph) -> usize;
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::{copy, from_host, to_host};
    use super::*;
    use crate::kernels::update::card::squares;
    use crate::layers::check;

    /// A card with a stream that no other test uses.
    fn card() -> Option<CudaDevice> {
        let Device::Cuda(_) = check::device() else {
            eprintln!("skipped: no card is asked for");
            return None;
        };
        let Device::Cuda(card) = Device::new_cuda_with_stream(0).unwrap() else { return None };
        // SAFETY: the test works on the one stream of this device.
        unsafe { card.disable_event_tracking() };
        Some(card)
    }

    fn numbers(card: &CudaDevice) -> Result<Tensor> {
        Tensor::new(&[1f32, 2.0, 3.0], &Device::Cuda(card.clone()))
    }

    /// What is repeated reads what tensors hold by then, and does not run while it is recorded.
    #[test]
    fn what_is_recorded_is_done_when_it_is_repeated() {
        let Some(card) = card() else { return };
        let x = numbers(&card).unwrap();
        // The copy is kept, or its memory would be that of other tests.
        let sum = || -> Result<_> {
            let copied = copy(&card, &x)?;
            Ok((squares(&card, &copied)?, copied))
        };
        sum().unwrap();
        let (recording, (made, _copied)) = Recording::of(&card, sum).unwrap().expect("copies and sums");
        assert!(recording.launches >= 2, "{} launches", recording.launches);
        for values in [[1f32, 2.0, 3.0], [4.0, 5.0, 6.0], [0.5, 0.0, 0.0]] {
            from_host(&x, &values).unwrap();
            recording.repeat().unwrap();
            let wanted: f64 = values.iter().map(|v| (*v as f64).powi(2)).sum();
            assert_eq!(to_host::<f64>(&made).unwrap()[0], wanted);
        }
    }

    #[test]
    fn what_would_be_different_is_not_recorded() {
        let Some(card) = card() else { return };
        let x = numbers(&card).unwrap();
        let none = |launch: &dyn Fn() -> Result<Tensor>| Recording::of(&card, launch).unwrap().is_err();
        let sum = || squares(&card, &x);
        sum().unwrap();
        assert!(!none(&sum));
        assert!(none(&|| sum().inspect(|_| varies("luck"))), "it says so");
        assert!(none(&|| numbers(&card)), "values of the host's");
        assert!(none(&|| x.affine(2.0, 0.0)), "memory asked for on the computing stream");
        assert!(none(&|| to_host::<f32>(&x).and(sum())), "the host waits");
        assert!(none(&|| candle_core::bail!("it fails")));
        // None of which is in the way of what comes after.
        assert_eq!(to_host::<f64>(&sum().unwrap()).unwrap()[0], 14.0);
        assert!(!none(&sum));
    }
}
