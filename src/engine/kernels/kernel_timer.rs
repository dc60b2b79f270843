//! Measures the kernels that a thread runs, on request: where the time within a layer goes.
//!
//! A thread that has no recording pays one check per kernel. A kernel is known by its file in `src/kernels`. On the
//! CPU it counts for the thread that calls it, which waits for the threads that help it: the part of a kernel that
//! runs on another thread is within the time of its caller and has no span of its own. On a GPU it is the time from
//! one event to another in the compute stream, and nothing waits while the kernels are recorded.

use std::cell::{Cell, RefCell};

use super::timestamp::{Clock, TimeAxis, Timestamp};

/// One call of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpan {
    pub kernel: &'static str,
    /// Since the origin of the recording.
    pub start_s: f64,
    pub seconds: f64,
    /// Without the kernels that it called in turn: these never add up to more than the time in which they ran.
    pub self_seconds: f64,
}

/// A call that has ended. Its times are known once the device has run it.
pub struct KernelCall {
    kernel: &'static str,
    start: Timestamp,
    end: Timestamp,
    /// Kernels that it ran within.
    depth: usize,
}

#[derive(Default)]
struct KernelRecording {
    clock: Clock,
    calls: Vec<KernelCall>,
    /// Kernels that are running.
    depth: usize,
}

thread_local! {
    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
    static RECORDING: RefCell<KernelRecording> =
        const { RefCell::new(KernelRecording { clock: Clock::Host, calls: Vec::new(), depth: 0 }) };
}

/// Calls that a recording has room for from the start, so that its growth is not measured as memory of a layer.
const EXPECTED_CALLS: usize = 4096;

/// Records the kernels that this thread calls until [`take`].
pub fn start(clock: Clock) {
    RECORDING.set(KernelRecording { clock, calls: Vec::with_capacity(EXPECTED_CALLS), depth: 0 });
    IS_RECORDING.set(true);
}

/// Kernels recorded so far.
pub fn count() -> usize {
    RECORDING.with_borrow(|recording| recording.calls.len())
}

/// Ends the recording and returns it, in the order in which the kernels ended.
pub fn take() -> Vec<KernelCall> {
    IS_RECORDING.set(false);
    RECORDING.take().calls
}

impl KernelCall {
    pub fn timestamps(&self) -> [&Timestamp; 2] {
        [&self.start, &self.end]
    }
}

/// The times of a whole recording.
pub fn spans(calls: Vec<KernelCall>, axis: &TimeAxis) -> Vec<KernelSpan> {
    let mut called_s = Vec::new();
    let span = |call: KernelCall| {
        let start_s = axis.seconds(&call.start);
        let seconds = axis.seconds(&call.end) - start_s;
        // The kernels that it called ended before it, one level deeper.
        called_s.resize(called_s.len().max(call.depth + 2), 0.0);
        called_s[call.depth] += seconds;
        let self_seconds = (seconds - std::mem::take(&mut called_s[call.depth + 1])).max(0.0);
        KernelSpan { kernel: call.kernel, start_s, seconds, self_seconds }
    };
    calls.into_iter().map(span).collect()
}

/// A kernel that runs until this is dropped.
pub struct KernelScope {
    module: &'static str,
    /// `None` once it has ended.
    start: Option<Timestamp>,
}

/// A scope of the kernel in this module, if this thread has a recording.
pub fn enter(module: &'static str) -> Option<KernelScope> {
    IS_RECORDING.get().then(|| {
        let start = RECORDING.with_borrow_mut(|recording| {
            recording.depth += 1;
            recording.clock.now()
        });
        KernelScope { module, start: Some(start) }
    })
}

impl Drop for KernelScope {
    fn drop(&mut self) {
        let Some(start) = self.start.take() else { return };
        RECORDING.with_borrow_mut(|recording| {
            let end = recording.clock.now();
            recording.depth = recording.depth.saturating_sub(1);
            let (kernel, depth) = (kernel_name(self.module), recording.depth);
            recording.calls.push(KernelCall { kernel, start, end, depth });
        });
    }
}

/// The kernel of a module path: `cross_entropy` of `trainer_engine::kernels::cross_entropy::fused`.
fn kernel_name(module: &'static str) -> &'static str {
    let mut parts = module.split("::").skip_while(|part| *part != "kernels").skip(1);
    parts.next().or(module.split("::").last()).unwrap_or(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_kernel_is_without_the_kernels_that_it_calls() {
        assert!(enter(module_path!()).is_none());
        let origin = Clock::Host.now();
        start(Clock::Host);
        {
            let _outer = enter("trainer::kernels::linear");
            for _ in 0..2 {
                let _inner = enter("trainer::kernels::matmul::avx512");
                std::hint::black_box(vec![1u8; 1 << 20]);
            }
        }
        assert_eq!(count(), 3);
        let calls = take();
        let axis = TimeAxis::new(&origin, calls.iter().flat_map(KernelCall::timestamps), 0.0);
        let spans = spans(calls, &axis);
        assert_eq!(spans.iter().map(|span| span.kernel).collect::<Vec<_>>(), ["matmul", "matmul", "linear"]);
        let sum: f64 = spans.iter().map(|span| span.self_seconds).sum();
        assert!((sum - spans[2].seconds).abs() < 1e-9 && spans.iter().all(|span| span.self_seconds >= 0.0));
        assert!(
            spans[2].start_s <= spans[0].start_s && spans[0].start_s + spans[0].seconds <= spans[1].start_s
        );
        assert!(enter(module_path!()).is_none() && take().is_empty());
        assert_eq!(kernel_name("trainer::layers::first_token"), "first_token");
    }
}
