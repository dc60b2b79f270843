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

/// Allocations from this size on lie in pages of their own, which go back to the system when they are freed.
const LARGE: usize = 4 << 20;
const HUGE_PAGE: usize = 2 << 20;

/// A step asks for large buffers again and again, each a page fault for every page of it: in pages of 2 MiB
/// these are five hundred times fewer. Such a buffer begins at a huge page.
fn aligned(layout: Layout) -> Layout {
    let huge = cfg!(target_os = "linux") && layout.size() >= LARGE;
    // An alignment of 2 MiB is valid for every size that was valid before but the very largest.
    if huge { layout.align_to(HUGE_PAGE).unwrap_or(layout) } else { layout }
}

/// Asks for huge pages under a large allocation; a system that has none goes on as it was.
///
/// # Safety
/// `size` bytes from `pointer` on are allocated.
unsafe fn in_huge_pages(pointer: *mut u8, size: usize) {
    #[cfg(target_os = "linux")]
    if size >= LARGE && (pointer as usize).is_multiple_of(HUGE_PAGE) {
        let whole = size / HUGE_PAGE * HUGE_PAGE;
        let advice = rustix::mm::Advice::LinuxHugepage;
        // SAFETY: the range is within the allocation; the advice changes no content.
        let _ = unsafe { rustix::mm::madvise(pointer.cast(), whole, advice) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (pointer, size);
}

// SAFETY: every call is passed on to the system's allocator, with the same or a stricter alignment,
// which a C allocator's `free` and `realloc` do not ask for; counting touches atomics only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let pointer = unsafe { System.alloc(aligned(layout)) };
        if !pointer.is_null() {
            grew(layout.size());
            unsafe { in_huge_pages(pointer, layout.size()) };
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

/// Fixes from what size on the system's allocator gives pages of their own. Left to itself it learns from what
/// is freed, puts large buffers on the heap, and the holes between them stay resident.
pub fn keep_large_buffers_apart() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        const TRIM_THRESHOLD: i32 = -1;
        const MMAP_THRESHOLD: i32 = -3;
        // SAFETY: both set plain numbers of the allocator. One that refuses them goes on as it was.
        unsafe {
            mallopt(MMAP_THRESHOLD, LARGE as i32);
            mallopt(TRIM_THRESHOLD, 16 * LARGE as i32);
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
