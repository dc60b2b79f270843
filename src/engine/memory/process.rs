//! The process part of a plan: resident memory outside the counted heap.
//!
//! Code, thread stacks, allocator overhead and library caches are resident too, and the OOM killer counts the sum. They
//! are measured when the plan is made, after freed memory was returned to the system, and what is known to come later
//! is added: training has not touched its stacks yet. Code pages are dropped before measuring, since how many are
//! mapped depends on what ran before and on how the page cache holds the executable; while training runs,
//! [`resident_limit`] keeps them within their part.

use super::page_pool::PAGE;
use super::resident_limit::{self, ResidentLimit};
use super::{code_pages, measure, pressure};
use crate::base::proc_status::{exact_resident, proc_status};

/// How much code and constants of the program may be resident: slightly less than training, evaluation and checkpoints
/// touch.
const MAX_CODE_BYTES: u64 = 19 << 19;

/// Stack and thread-local memory that a thread touches: one that computes, besides the buffers of kernels, and one that
/// loads data, which decodes images.
const COMPUTE_STACK_BYTES: u64 = 64 << 10;
const LOADER_STACK_BYTES: u64 = 96 << 10;

/// Fragmentation: freed small blocks that the C library keeps between live ones and at the top of its heap, and the
/// unused ends of the pages of large buffers. Beyond this it is trimmed, see [`resident_limit`].
const FRAGMENTATION_BYTES: u64 = 4 << 19;

/// The process part is rounded up to this, so that `trainer plan` and the run, which measures again, mostly agree.
const GRANULARITY: u64 = 1 << 19;

/// Pages that Linux counts on a CPU before it adds them to the RSS of a process; twice the CPUs if that is more.
const RSS_BATCH_PAGES: u64 = 32;

/// Fixes the process part, for tests that compare plans byte by byte.
const FIXED_BYTES_VAR: &str = "TRAINER_PROCESS_BYTES";

/// Memory of a process outside its counted heap, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident during training and not on the heap.
    pub non_heap: u64,
    /// Peak of resident memory until the data was ready.
    pub preparation_peak: u64,
    /// Heap that data preparation left behind, in caches of libraries and threads.
    pub leftover_heap: u64,
    /// Maximum file-backed resident memory, a part of `non_heap`; 0 if it was not measured.
    max_file_rss: u64,
}

/// The threads of a run, whose stacks the plan counts.
#[derive(Clone, Copy, Debug)]
pub struct ThreadStacks {
    pub compute_threads: usize,
    /// Buffers of kernels on the stack of each thread that computes.
    pub kernel_bytes: u64,
    pub loader_threads: usize,
}

impl ThreadStacks {
    fn bytes(self) -> u64 {
        (COMPUTE_STACK_BYTES + self.kernel_bytes) * self.compute_threads as u64
            + LOADER_STACK_BYTES * self.loader_threads as u64
    }
}

/// How far the kernel's count of resident memory may lag: each CPU is up to a batch of pages off, up or down, so that
/// the sum grows with the root of their number, rounded up.
fn rss_lag(cpus: u64) -> u64 {
    RSS_BATCH_PAGES.max(2 * cpus) * PAGE as u64 * ((2 * cpus).isqrt() + 1)
}

impl ProcessMemory {
    /// Returns freed memory to the system and measures this process, which will touch these stacks. `leftover_heap`:
    /// live heap that no reservation covers. All zero if the system does not report its memory.
    pub fn measure(stacks: ThreadStacks, leftover_heap: u64) -> Self {
        if let Some(fixed) = std::env::var(FIXED_BYTES_VAR).ok().and_then(|text| text.parse().ok()) {
            return Self { non_heap: fixed, ..Self::default() };
        }
        pressure::release_to_os();
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64);
        let preparation_peak = (measure::resident_peak() + rss_lag(cpus)).next_multiple_of(GRANULARITY);
        code_pages::drop_all();
        let code = code_pages::total_bytes().min(MAX_CODE_BYTES);
        let Some(resident) = exact_resident() else { return Self::default() };
        let later = code + FRAGMENTATION_BYTES + stacks.bytes();
        let non_heap = (resident.saturating_sub(measure::live_bytes()) + later).next_multiple_of(GRANULARITY);
        let max_file_rss = proc_status("RssFile:").map_or(0, |file| file + code);
        Self { non_heap, preparation_peak, leftover_heap, max_file_rss }
    }

    /// Keeps resident memory outside the heap within this part from now on.
    pub fn enforce(&self) {
        if self.max_file_rss > 0 {
            resident_limit::set(ResidentLimit { non_heap: self.non_heap, max_file_rss: self.max_file_rss });
        }
    }
}
