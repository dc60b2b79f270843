//! A page pool for large buffers: keeps the pages of freed buffers and reuses them.
//!
//! A step allocates the same large buffers over and over. If they went back to the system, the kernel would zero every
//! page again; left on the heap, the holes between them would stay resident. Here, freed runs of pages stay mapped,
//! neighbours coalesce, and an allocation takes the start of the smallest run that fits. Cached plus live bytes never
//! exceed the planned peak of the heap ([`PagePool::set_planned_peak`]), so caching takes no memory that the plan did not count;
//! without a plan they never exceed the peak of live bytes by more than [`SLACK`].

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::resident_limit;

/// Allocations of at least this size get pages of their own.
pub const LARGE_BYTES: usize = 64 << 10;
pub(super) const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that may be cached even at the peak if there is no plan, so that the few buffers free at that point are not
/// mapped anew in every step.
const SLACK: u64 = 4 << 20;
/// Maximum number of cached runs. Exceeding it costs only time.
const MAX_RUNS: usize = 1024;

/// Whether the page pool serves this allocation.
pub fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE_BYTES && layout.align() <= PAGE
}

/// The pool of the process's allocator.
pub static PAGE_POOL: PagePool = PagePool::new();

pub struct PagePool {
    free_runs: Mutex<FreeRuns>,
}

/// A run of cached pages.
#[derive(Clone, Copy)]
struct FreeRun {
    address: usize,
    len: usize,
}

struct FreeRuns {
    /// The first `count` are valid, oldest first.
    runs: [FreeRun; MAX_RUNS],
    count: usize,
    bytes: u64,
    /// Peak bytes in use since the last [`PagePool::release_all`].
    peak_live: u64,
    /// The planned peak of the heap; 0 without a plan.
    planned_peak: u64,
}

impl FreeRuns {
    const EMPTY: Self = Self {
        runs: [FreeRun { address: 0, len: 0 }; MAX_RUNS],
        count: 0,
        bytes: 0,
        peak_live: 0,
        planned_peak: 0,
    };

    fn push(&mut self, run: FreeRun) {
        if self.count == MAX_RUNS {
            unmap(self.remove(0));
        }
        self.runs[self.count] = run;
        self.count += 1;
        self.bytes += run.len as u64;
    }

    /// Takes `len` bytes from the smallest run that fits.
    fn take(&mut self, len: usize) -> Option<usize> {
        let fitting = (0..self.count).filter(|i| self.runs[*i].len >= len);
        let at = fitting.min_by_key(|i| self.runs[*i].len)?;
        let FreeRun { address, len: all } = self.runs[at];
        if all == len {
            self.remove(at);
        } else {
            self.runs[at] = FreeRun { address: address + len, len: all - len };
            self.bytes -= len as u64;
        }
        Some(address)
    }

    /// Inserts a run, coalesced with its neighbours.
    fn insert(&mut self, mut run: FreeRun) {
        let beside = |a: FreeRun, b: FreeRun| a.address + a.len == b.address;
        for after in [false, true] {
            let found = (0..self.count).find(|i| match after {
                false => beside(self.runs[*i], run),
                true => beside(run, self.runs[*i]),
            });
            if let Some(other) = found.map(|at| self.remove(at)) {
                run = FreeRun { address: run.address.min(other.address), len: run.len + other.len };
            }
        }
        self.push(run);
    }

    fn remove(&mut self, at: usize) -> FreeRun {
        let run = self.runs[at];
        self.runs.copy_within(at + 1..self.count, at);
        self.count -= 1;
        self.bytes -= run.len as u64;
        run
    }

    /// Unmaps the oldest runs until, with `live` bytes in use, the total is within the planned peak or, without a plan,
    /// the peak so far plus the slack.
    fn trim(&mut self, live: u64) {
        self.peak_live = self.peak_live.max(live);
        let limit = if self.planned_peak == 0 {
            self.peak_live + SLACK
        } else {
            self.peak_live.max(self.planned_peak)
        };
        while self.count > 0 && live + self.bytes > limit {
            let over = (live + self.bytes - limit) as usize;
            let oldest = self.runs[0];
            let len = over.next_multiple_of(PAGE).min(oldest.len);
            if len == oldest.len {
                self.remove(0);
            } else {
                self.runs[0].len -= len;
                self.bytes -= len as u64;
            }
            unmap(FreeRun { address: oldest.address + oldest.len - len, len });
        }
    }
}

fn unmap(run: FreeRun) {
    // SAFETY: this pool owns the mapping, it has this length, and nobody holds a pointer into it.
    let _ = unsafe { munmap(run.address as *mut _, run.len) };
}

/// Maps `len` zeroed bytes, aligned to a huge page if at least that large. Null if the system refuses.
fn map(len: usize) -> *mut u8 {
    let spare = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no existing memory.
    let Ok(all) = (unsafe {
        mmap_anonymous(std::ptr::null_mut(), len + spare, ProtFlags::READ | ProtFlags::WRITE, flags)
    }) else {
        return std::ptr::null_mut();
    };
    if spare == 0 {
        return all.cast();
    }
    let begin = (all as usize).next_multiple_of(HUGE_PAGE);
    let before = begin - all as usize;
    for cut in [
        FreeRun { address: all as usize, len: before },
        FreeRun { address: begin + len, len: spare - before },
    ] {
        if cut.len > 0 {
            unmap(cut);
        }
    }
    let start = begin as *mut u8;
    // SAFETY: the range is within the mapping, and the advice changes no content. Without huge pages it has no effect.
    let _ = unsafe { madvise(start.cast(), len / HUGE_PAGE * HUGE_PAGE, Advice::LinuxHugepage) };
    start
}

impl PagePool {
    const fn new() -> Self {
        Self { free_runs: Mutex::new(FreeRuns::EMPTY) }
    }

    /// It holds only numbers and is consistent after every statement, so a poisoned lock is safe to use.
    fn free_runs(&self) -> MutexGuard<'_, FreeRuns> {
        self.free_runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer for `layout`, zeroed on request; `live` counts the bytes in use including it. Null if the system
    /// refuses.
    pub fn allocate(&self, layout: Layout, zeroed: bool, live: u64) -> *mut u8 {
        let len = layout.size().next_multiple_of(PAGE);
        let mut runs = self.free_runs();
        let reused = runs.take(len);
        runs.trim(live);
        drop(runs);
        match reused {
            Some(address) => {
                let pointer = address as *mut u8;
                if zeroed {
                    // SAFETY: the mapping has `len` bytes, at least as many as the layout.
                    unsafe { pointer.write_bytes(0, layout.size()) };
                }
                pointer
            }
            None => {
                resident_limit::make_room(len as u64);
                map(len)
            }
        }
    }

    /// Frees a buffer; `live` counts the bytes in use without it.
    ///
    /// # Safety
    /// `pointer` came from [`Self::allocate`] with this layout and is not used again.
    pub unsafe fn deallocate(&self, pointer: *mut u8, layout: Layout, live: u64) {
        let mut runs = self.free_runs();
        runs.insert(FreeRun { address: pointer as usize, len: layout.size().next_multiple_of(PAGE) });
        runs.trim(live);
    }

    /// Returns every cached run to the system and resets the peak, so that caching follows the use from now on.
    pub fn release_all(&self) {
        let mut runs = self.free_runs();
        while runs.count > 0 {
            let last = runs.count - 1;
            unmap(runs.remove(last));
        }
        runs.peak_live = 0;
    }

    /// Sets the planned peak of the whole heap in bytes, up to which freed buffers are cached; 0 for no plan.
    pub fn set_planned_peak(&self, bytes: u64) {
        self.free_runs().planned_peak = bytes;
    }

    /// The planned peak of the whole heap; effectively unlimited without a plan.
    pub fn planned_peak(&self) -> u64 {
        match self.free_runs().planned_peak {
            0 => u64::MAX >> 1,
            planned => planned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A buffer in use, filled with its number.
    struct TestBuffer {
        pointer: *mut u8,
        layout: Layout,
        filled: u8,
    }

    impl TestBuffer {
        fn bytes(&self) -> &[u8] {
            // SAFETY: the buffer is in use.
            unsafe { std::slice::from_raw_parts(self.pointer, self.layout.size()) }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Whatever the order of allocations and frees, each buffer keeps its bytes until it is freed, none overlap,
        /// zeroed buffers are zero, and the pool caches no more than the planned peak, or the peak so far, allows.
        #[test]
        fn buffers_are_apart_and_pages_are_not_hoarded(
            asks in prop::collection::vec((1usize..40, any::<bool>(), any::<bool>(), 0usize..64), 1..60),
            planned in prop_oneof![Just(0u64), 1u64..64 << 20],
        ) {
            let pool = PagePool::new();
            pool.set_planned_peak(planned);
            let slack = if planned == 0 { SLACK } else { 0 };
            let (mut held, mut live, mut highest): (Vec<TestBuffer>, u64, u64) = (Vec::new(), 0, 0);
            for (i, (size, zeroed, free, which)) in asks.into_iter().enumerate() {
                if free && !held.is_empty() {
                    let buffer = held.swap_remove(which % held.len());
                    prop_assert!(buffer.bytes().iter().all(|b| *b == buffer.filled));
                    live -= buffer.layout.size() as u64;
                    // SAFETY: the buffer was allocated with this layout and is dropped here.
                    unsafe { pool.deallocate(buffer.pointer, buffer.layout, live) };
                } else {
                    let layout = Layout::from_size_align(LARGE_BYTES + size * 50_000, 64).unwrap();
                    live += layout.size() as u64;
                    highest = highest.max(live);
                    let pointer = pool.allocate(layout, zeroed, live);
                    prop_assert!(!pointer.is_null() && (pointer as usize).is_multiple_of(PAGE));
                    let buffer = TestBuffer { pointer, layout, filled: i as u8 };
                    prop_assert!(!zeroed || buffer.bytes().iter().all(|b| *b == 0));
                    // SAFETY: the buffer has this many bytes and a single owner.
                    unsafe { pointer.write_bytes(buffer.filled, layout.size()) };
                    held.push(buffer);
                }
                // Live bytes count requested sizes; the pool holds whole pages.
                let rounding = (PAGE * (held.len() + MAX_RUNS)) as u64;
                let cached = pool.free_runs().bytes;
                prop_assert!(live + cached <= highest.max(planned) + slack + rounding);
            }
            for buffer in held {
                prop_assert!(buffer.bytes().iter().all(|b| *b == buffer.filled));
                // SAFETY: the buffer was allocated with this layout and is dropped here.
                unsafe { pool.deallocate(buffer.pointer, buffer.layout, 0) };
            }
            pool.release_all();
            prop_assert_eq!(pool.free_runs().bytes, 0);
        }
    }

    #[test]
    fn pages_of_a_freed_buffer_serve_the_next_and_neighbours_are_joined() {
        let mut runs = FreeRuns::EMPTY;
        let at = |page: usize, pages: usize| FreeRun { address: page * PAGE, len: pages * PAGE };
        for run in [at(10, 5), at(20, 8), at(15, 5)] {
            runs.insert(run);
        }
        assert_eq!((runs.count, runs.bytes), (1, 18 * PAGE as u64));
        runs.insert(at(40, 4));
        assert_eq!(runs.take(4 * PAGE), Some(40 * PAGE), "the smallest that is long enough");
        assert_eq!(runs.take(6 * PAGE), Some(10 * PAGE));
        assert_eq!((runs.runs[0].address, runs.bytes), (16 * PAGE, 12 * PAGE as u64));
        assert_eq!(runs.take(13 * PAGE), None);
    }
}
