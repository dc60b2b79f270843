//! Measures the kernels that a thread runs on the CPU, on request: where the time within a layer goes.
//!
//! A thread that has no recording pays one check per kernel. A kernel is known by its file in `src/kernels`. It counts
//! for the thread that calls it, which waits for the threads that help it: the part of a kernel that runs on another
//! thread is within the time of its caller and has no span of its own.

use std::cell::{Cell, RefCell};
use std::time::Instant;

/// One call of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpan {
    pub kernel: &'static str,
    pub start: Instant,
    pub seconds: f64,
    /// Without the kernels that it called in turn: these never add up to more than the time in which they ran.
    pub self_seconds: f64,
}

#[derive(Default)]
struct Recording {
    spans: Vec<KernelSpan>,
    /// Seconds of the kernels called by each kernel that is running, the innermost last.
    called_s: Vec<f64>,
}

thread_local! {
    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
    static RECORDING: RefCell<Recording> =
        const { RefCell::new(Recording { spans: Vec::new(), called_s: Vec::new() }) };
}

/// Records the kernels that this thread calls until [`take`].
pub fn start() {
    RECORDING.take();
    IS_RECORDING.set(true);
}

/// Kernels recorded so far.
pub fn count() -> usize {
    RECORDING.with_borrow(|recording| recording.spans.len())
}

/// Ends the recording and returns it, in the order in which the kernels ended.
pub fn take() -> Vec<KernelSpan> {
    IS_RECORDING.set(false);
    RECORDING.take().spans
}

/// A kernel that runs until this is dropped.
pub struct KernelScope {
    module: &'static str,
    start: Instant,
}

/// A scope of the kernel in this module, if this thread has a recording.
pub fn enter(module: &'static str) -> Option<KernelScope> {
    IS_RECORDING.get().then(|| {
        RECORDING.with_borrow_mut(|recording| recording.called_s.push(0.0));
        KernelScope { module, start: Instant::now() }
    })
}

impl Drop for KernelScope {
    fn drop(&mut self) {
        let seconds = self.start.elapsed().as_secs_f64();
        RECORDING.with_borrow_mut(|recording| {
            let self_seconds = seconds - recording.called_s.pop().unwrap_or(0.0);
            recording.called_s.last_mut().into_iter().for_each(|called| *called += seconds);
            let kernel = kernel_name(self.module);
            recording.spans.push(KernelSpan { kernel, start: self.start, seconds, self_seconds });
        });
    }
}

/// The kernel of a module path: `cross_entropy` of `trainer::kernels::cross_entropy::fused`.
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
        start();
        {
            let _outer = enter("trainer::kernels::linear");
            for _ in 0..2 {
                let _inner = enter("trainer::kernels::matmul::avx512");
                std::hint::black_box(vec![1u8; 1 << 20]);
            }
        }
        assert_eq!(count(), 3);
        let spans = take();
        assert_eq!(spans.iter().map(|span| span.kernel).collect::<Vec<_>>(), ["matmul", "matmul", "linear"]);
        let sum: f64 = spans.iter().map(|span| span.self_seconds).sum();
        assert!((sum - spans[2].seconds).abs() < 1e-9 && spans.iter().all(|span| span.self_seconds >= 0.0));
        assert!(enter(module_path!()).is_none() && take().is_empty());
        assert_eq!(kernel_name("trainer::layers::first_token"), "first_token");
    }
}
