//! What memory really was used: a counting allocator, other code than what predicts.
//!
//! The binary and the tests install [`CountingAllocator`] as the global allocator. Two relaxed atomic additions
//! an allocation; the peak is exact for the heap and says nothing of code, stacks or mapped files. Large
//! buffers go to [`super::pages`].

use super::alloc_failure;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// The system's allocator, counted.
pub struct CountingAllocator;

static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
/// The peak since [`take_recent_peak`] was last called.
static RECENT_PEAK: AtomicU64 = AtomicU64::new(0);

fn add_live(bytes: usize) -> u64 {
    let live = LIVE.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    if live > RECENT_PEAK.load(Relaxed) {
        RECENT_PEAK.fetch_max(live, Relaxed);
        PEAK.fetch_max(live, Relaxed);
    }
    live
}

fn sub_live(bytes: usize) -> u64 {
    LIVE.fetch_sub(bytes as u64, Relaxed) - bytes as u64
}

#[cfg(target_os = "linux")]
use super::page_pool;

/// Elsewhere the system's allocator gives large buffers too.
#[cfg(not(target_os = "linux"))]
mod pages {
    use std::alloc::Layout;

    pub fn is_large(_: Layout) -> bool {
        false
    }
    pub fn take(_: Layout, _: bool, _: u64) -> *mut u8 {
        std::ptr::null_mut()
    }
    pub unsafe fn put(_: *mut u8, _: Layout, _: u64) {}
}

/// Counts `layout` and gives it to `small` or to the pages; takes the count back when there is nothing.
fn allocate_counted(layout: Layout, zeroed: bool, small: unsafe fn(&System, Layout) -> *mut u8) -> *mut u8 {
    let live = add_live(layout.size());
    let pointer = match page_pool::is_large(layout) {
        true => page_pool::allocate(layout, zeroed, live),
        // SAFETY: the caller of the allocator keeps to its contract, which is passed on unchanged.
        false => unsafe { small(&System, layout) },
    };
    if pointer.is_null() {
        sub_live(layout.size());
        notify_alloc_failure();
        alloc_failure::record(layout.size());
    }
    pointer
}

/// Where a refused allocation is noted, for whoever survives the process: a file descriptor, or none.
static FAILURE_FD: AtomicI32 = AtomicI32::new(-1);

/// Notes refused allocations by a byte written here from now on. It stays open as long as the process.
#[cfg(unix)]
pub fn set_alloc_failure_fd(descriptor: std::os::fd::OwnedFd) {
    use std::os::fd::IntoRawFd;
    FAILURE_FD.store(descriptor.into_raw_fd(), Relaxed);
}

/// Allocates nothing: an allocation just failed.
fn notify_alloc_failure() {
    #[cfg(unix)]
    if let descriptor @ 0.. = FAILURE_FD.load(Relaxed) {
        // SAFETY: `set_alloc_failure_fd` gave it up for good, so it is open and nobody else's.
        let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
        let _ = rustix::io::write(descriptor, b"!");
    }
}

// SAFETY: every call goes to the system's allocator or to `pages`, which of the two the layout alone decides;
// counting touches atomics only.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        allocate_counted(layout, false, System::alloc)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        allocate_counted(layout, true, System::alloc_zeroed)
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let live = sub_live(layout.size());
        match page_pool::is_large(layout) {
            true => unsafe { page_pool::deallocate(pointer, layout, live) },
            false => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller gives a size that is valid with this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if page_pool::is_large(layout) || page_pool::is_large(new) {
            // SAFETY: both blocks are at least as long as the shorter, and they are not the same.
            let moved = unsafe { self.alloc(new) };
            if !moved.is_null() {
                unsafe {
                    std::ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size));
                    self.dealloc(pointer, layout);
                }
            }
            return moved;
        }
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if moved.is_null() {
            notify_alloc_failure();
            alloc_failure::record(size);
        } else {
            // While the system copies, both blocks may be there; count them as if they were.
            add_live(size);
            sub_live(layout.size());
        }
        moved
    }
}

/// Sets the system's allocator up for a few threads that ask for the same sizes again and again: one heap for
/// all, whose end is not given back and taken again between two steps.
pub fn tune_malloc() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        const TRIM_THRESHOLD: i32 = -1;
        const MMAP_THRESHOLD: i32 = -3;
        const ARENA_MAX: i32 = -8;
        // SAFETY: all set plain numbers of the allocator. One that refuses them goes on as it was.
        unsafe {
            mallopt(MMAP_THRESHOLD, page_pool::LARGE_BYTES as i32);
            mallopt(TRIM_THRESHOLD, 4 * page_pool::LARGE_BYTES as i32);
            mallopt(ARENA_MAX, 1);
        }
    }
}

/// States the planned peak of the heap in bytes: freed buffers are kept for later up to it, and no further.
pub fn set_planned_peak(bytes: u64) {
    #[cfg(target_os = "linux")]
    page_pool::set_planned_peak(bytes);
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

/// What [`set_planned_peak`] stated last; as much as there can be where nothing was planned.
pub fn planned_peak() -> u64 {
    #[cfg(target_os = "linux")]
    return page_pool::planned_peak();
    #[cfg(not(target_os = "linux"))]
    return u64::MAX >> 1;
}

/// Heap bytes in use now; 0 where [`CountingAllocator`] is not installed.
pub fn live_bytes() -> u64 {
    LIVE.load(Relaxed)
}

/// Begins all peaks anew: what came before, as a pass over the data's files, was another matter.
pub fn reset_peaks() {
    PEAK.store(live_bytes(), Relaxed);
    RECENT_PEAK.store(live_bytes(), Relaxed);
}

/// The most heap bytes in use at once since [`reset_peaks`].
pub fn peak_bytes() -> u64 {
    PEAK.load(Relaxed)
}

/// The most heap bytes in use at once since the last call.
pub fn take_recent_peak() -> u64 {
    RECENT_PEAK.swap(live_bytes(), Relaxed).max(live_bytes())
}

/// The peak of this process's resident memory since it started, as the kernel counts it (`VmHWM`): heap, stacks,
/// code and the pages of mapped files. 0 where the system does not say.
pub fn resident_peak() -> u64 {
    super::probe::proc_status("VmHWM:").unwrap_or(0)
}
