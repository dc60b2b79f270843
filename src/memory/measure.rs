//! What memory really was used: a counting allocator, other code than what predicts.
//!
//! The binary and the tests install [`Counting`] as the global allocator. Two relaxed atomic additions
//! an allocation; the peak is exact for the heap and says nothing of code, stacks or mapped files.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The system's allocator, counted.
pub struct Counting;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
/// The peak since [`take_recent_peak`] was last called.
static RECENT: AtomicU64 = AtomicU64::new(0);

fn grew(bytes: usize) {
    let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    if live > RECENT.load(Relaxed) {
        RECENT.fetch_max(live, Relaxed);
        PEAK.fetch_max(live, Relaxed);
    }
}

fn shrank(bytes: usize) {
    LIVE.fetch_sub(bytes as u64, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            grew(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) };
        shrank(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            // While the system copies, both blocks may be there; count them as if they were.
            grew(size);
            shrank(layout.size());
        }
        moved
    }
}

/// Asks the system's allocator to keep what is freed: a step asks for the same sizes again and again, and
/// memory that went back to the system costs a page fault for every 4 KiB when it returns.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        const TRIM_THRESHOLD: i32 = -1;
        const MMAP_MAX: i32 = -4;
        // SAFETY: both set plain numbers of the allocator. One that refuses them goes on as it was.
        unsafe {
            mallopt(MMAP_MAX, 0);
            mallopt(TRIM_THRESHOLD, i32::MAX);
        }
    }
}

/// Heap bytes in use now; 0 where [`Counting`] is not installed.
pub fn live() -> u64 {
    LIVE.load(Relaxed)
}

/// The most heap bytes ever in use at once.
pub fn peak() -> u64 {
    PEAK.load(Relaxed)
}

/// The most heap bytes in use at once since the last call.
pub fn take_recent_peak() -> u64 {
    RECENT.swap(live(), Relaxed).max(live())
}
