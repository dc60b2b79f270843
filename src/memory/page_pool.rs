//! Large buffers: in pages of their own, which are kept when a buffer is freed and used again for the next.
//!
//! A step asks for the same large buffers again and again. Given back to the system each time, every page
//! of them is zeroed again by the kernel; left on the heap, the holes between them stay resident. Here the
//! pages of a freed buffer wait for the next ask, neighbours become one, an ask takes the beginning of the
//! smallest run that is long enough. What waits plus what is in use is never more than the planned peak of the heap
//! ([`set_planned_peak`]), so that keeping buffers takes no memory that the plan did not count; without a plan it is never
//! more than [`SLACK`] above the most that was in use at once.

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Allocations from this size on lie in pages of their own.
pub const LARGE_BYTES: usize = 64 << 10;
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that may wait even at the peak where nothing was planned, so that the few buffers not in use there are not
/// mapped anew each step.
const SLACK: u64 = 4 << 20;
/// Runs that may wait at once. A network that leaves more than this loses only some time.
const MAX_RUNS: usize = 1024;

/// Whether this allocation is made here.
pub fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE_BYTES && layout.align() <= PAGE
}

/// A run of pages that waits to be used again.
#[derive(Clone, Copy)]
struct FreeRun {
    address: usize,
    len: usize,
}

struct FreeRuns {
    /// The first `count`, oldest first.
    runs: [FreeRun; MAX_RUNS],
    count: usize,
    bytes: u64,
    /// The most bytes in use at once since the last [`release_all`].
    peak_live: u64,
    /// The planned peak of the heap; 0 where there is no plan.
    planned_peak: u64,
}

static FREE_RUNS: Mutex<FreeRuns> = Mutex::new(FreeRuns {
    runs: [FreeRun { address: 0, len: 0 }; MAX_RUNS],
    count: 0,
    bytes: 0,
    peak_live: 0,
    planned_peak: 0,
});

/// Numbers only, whole after every statement; a panic elsewhere cannot spoil them.
fn free_runs() -> MutexGuard<'static, FreeRuns> {
    FREE_RUNS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FreeRuns {
    fn push(&mut self, run: FreeRun) {
        if self.count == MAX_RUNS {
            unmap(self.remove(0));
        }
        self.runs[self.count] = run;
        self.count += 1;
        self.bytes += run.len as u64;
    }

    /// Takes `len` bytes from the smallest run that has them.
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

    /// Takes back a run, as one with those that lie beside it.
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

    /// Unmaps so much of the oldest runs that, with `live` bytes in use, no more is held than was planned, or ever
    /// was in use.
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
    // SAFETY: the mapping is ours alone and nobody holds a pointer into it. It was made with this length.
    let _ = unsafe { munmap(run.address as *mut _, run.len) };
}

/// Maps `len` bytes, zeroed; from a huge page's size on at the beginning of one. Null when the system refuses.
fn map(len: usize) -> *mut u8 {
    let spare = if len >= HUGE_PAGE { HUGE_PAGE } else { 0 };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice touches nothing that is there.
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
    // SAFETY: the range is within the mapping; the advice changes no content. A system without huge pages goes on.
    let _ = unsafe { madvise(start.cast(), len / HUGE_PAGE * HUGE_PAGE, Advice::LinuxHugepage) };
    start
}

/// A buffer for `layout`, zeroed if asked; `live` is what is in use with it. Null when the system refuses.
pub fn allocate(layout: Layout, zeroed: bool, live: u64) -> *mut u8 {
    let len = layout.size().next_multiple_of(PAGE);
    let mut runs = free_runs();
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
        None => map(len),
    }
}

/// Takes a buffer back; `live` is what is in use without it.
///
/// # Safety
/// `pointer` came from [`allocate`] with this layout and is not used again.
pub unsafe fn deallocate(pointer: *mut u8, layout: Layout, live: u64) {
    let mut runs = free_runs();
    runs.insert(FreeRun { address: pointer as usize, len: layout.size().next_multiple_of(PAGE) });
    runs.trim(live);
}

/// Returns every waiting buffer to the system, and forgets how much was in use: what is kept from here on
/// follows what is in use from here on.
pub fn release_all() {
    let mut runs = free_runs();
    while runs.count > 0 {
        let last = runs.count - 1;
        unmap(runs.remove(last));
    }
    runs.peak_live = 0;
}

/// States the planned peak of the whole heap in bytes, up to which freed buffers are kept; 0 for none.
pub fn set_planned_peak(bytes: u64) {
    free_runs().planned_peak = bytes;
}

/// The planned peak of the whole heap; as much as there can be where there is none.
pub fn planned_peak() -> u64 {
    match free_runs().planned_peak {
        0 => u64::MAX >> 1,
        planned => planned,
    }
}

/// Bytes that wait to be used again.
pub fn cached_bytes() -> u64 {
    free_runs().bytes
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

        /// Buffers come and go in any order: each keeps its bytes until it is freed, none lies in another, what was
        /// asked for zeroed is, and no more waits than the peak allows.
        #[test]
        fn buffers_are_apart_and_pages_are_not_hoarded(asks in prop::collection::vec((1usize..40, any::<bool>(), any::<bool>(), 0usize..64), 1..60)) {
            let (mut held, mut live, mut highest): (Vec<TestBuffer>, u64, u64) = (Vec::new(), 0, 0);
            release_all();
            for (i, (size, zeroed, free, which)) in asks.into_iter().enumerate() {
                if free && !held.is_empty() {
                    let buffer = held.swap_remove(which % held.len());
                    prop_assert!(buffer.bytes().iter().all(|b| *b == buffer.filled));
                    live -= buffer.layout.size() as u64;
                    // SAFETY: it was taken with this layout and is forgotten here.
                    unsafe { deallocate(buffer.pointer, buffer.layout, live) };
                } else {
                    let layout = Layout::from_size_align(LARGE_BYTES + size * 50_000, 64).unwrap();
                    live += layout.size() as u64;
                    highest = highest.max(live);
                    let pointer = allocate(layout, zeroed, live);
                    prop_assert!(!pointer.is_null() && (pointer as usize).is_multiple_of(PAGE));
                    let buffer = TestBuffer { pointer, layout, filled: i as u8 };
                    prop_assert!(!zeroed || buffer.bytes().iter().all(|b| *b == 0));
                    // SAFETY: the buffer has these bytes and nobody else has it.
                    unsafe { pointer.write_bytes(buffer.filled, layout.size()) };
                    held.push(buffer);
                }
                // Sizes are counted as they are asked for and kept in whole pages.
                let rounding = (PAGE * (held.len() + MAX_RUNS)) as u64;
                prop_assert!(live + cached_bytes() <= highest + SLACK + rounding);
            }
            for buffer in held {
                prop_assert!(buffer.bytes().iter().all(|b| *b == buffer.filled));
                // SAFETY: as above.
                unsafe { deallocate(buffer.pointer, buffer.layout, 0) };
            }
            release_all();
            prop_assert_eq!(cached_bytes(), 0);
        }
    }

    #[test]
    fn pages_of_a_freed_buffer_serve_the_next_and_neighbours_are_joined() {
        let mut runs = Box::new(FreeRuns {
            runs: [FreeRun { address: 0, len: 0 }; MAX_RUNS],
            count: 0,
            bytes: 0,
            peak_live: 0,
            planned_peak: 0,
        });
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
