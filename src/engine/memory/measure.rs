//! Measures actual memory use with a counting allocator, independent of the code that predicts it.
//!
//! The binary and the tests install [`CountingAllocator`] as the global allocator. It costs two relaxed atomic
//! additions per allocation. The peak is exact for the heap and excludes code, stacks and mapped files. Large buffers
//! go to the page pool.

use super::alloc_failure;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};

/// The system allocator with counters.
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

/// On other systems, the system allocator also serves large buffers.
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

/// Counts `layout` and allocates it with `small` or from the page pool; undoes the count on failure.
fn allocate_counted(layout: Layout, zeroed: bool, small: unsafe fn(&System, Layout) -> *mut u8) -> *mut u8 {
    let live = add_live(layout.size());
    let pointer = match page_pool::is_large(layout) {
        true => page_pool::PAGE_POOL.allocate(layout, zeroed, live),
        // SAFETY: the caller upholds the allocator's contract, which is passed on unchanged.
        false => unsafe { small(&System, layout) },
    };
    if pointer.is_null() {
        sub_live(layout.size());
        notify_alloc_failure();
        alloc_failure::record(layout.size());
    }
    pointer
}

/// File descriptor that reports failed allocations to a process that survives this one; -1 for none.
static FAILURE_FD: AtomicI32 = AtomicI32::new(-1);

/// Reports failed allocations from now on by writing a byte here. The descriptor stays open until the process exits.
#[cfg(unix)]
pub fn set_alloc_failure_fd(descriptor: std::os::fd::OwnedFd) {
    use std::os::fd::IntoRawFd;
    FAILURE_FD.store(descriptor.into_raw_fd(), Relaxed);
}

/// Must not allocate: an allocation just failed.
fn notify_alloc_failure() {
    #[cfg(unix)]
    if let descriptor @ 0.. = FAILURE_FD.load(Relaxed) {
        // SAFETY: `set_alloc_failure_fd` gave up ownership for good, so the descriptor is open and nobody else closes
        // it.
        let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) };
        let _ = rustix::io::write(descriptor, b"!");
    }
}

// SAFETY: every call goes to the system allocator or to the page pool, and the layout alone decides which; counting
// touches only atomics.
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
            true => unsafe { page_pool::PAGE_POOL.deallocate(pointer, layout, live) },
            false => unsafe { System.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller guarantees that the size is valid for this alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if page_pool::is_large(layout) || page_pool::is_large(new) {
            // SAFETY: both blocks are at least `min(old, new)` bytes long and do not overlap.
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
            // While the system copies, both blocks may exist; count them as if they did.
            add_live(size);
            sub_live(layout.size());
        }
        moved
    }
}

/// Tunes glibc malloc for a few threads that allocate the same sizes in every step: a single arena, whose top is not
/// trimmed and grown again between steps.
pub fn tune_malloc() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        const TRIM_THRESHOLD: i32 = -1;
        const MMAP_THRESHOLD: i32 = -3;
        const ARENA_MAX: i32 = -8;
        // SAFETY: these calls only set integer parameters. An allocator that rejects them keeps its defaults.
        unsafe {
            mallopt(MMAP_THRESHOLD, page_pool::LARGE_BYTES as i32);
            mallopt(TRIM_THRESHOLD, 4 * page_pool::LARGE_BYTES as i32);
            mallopt(ARENA_MAX, 1);
        }
    }
}

/// Sets the planned peak of the heap in bytes: freed buffers are cached only up to it.
pub fn set_planned_peak(bytes: u64) {
    #[cfg(target_os = "linux")]
    page_pool::PAGE_POOL.set_planned_peak(bytes);
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

/// The value last set by [`set_planned_peak`]; effectively unlimited if there is no plan.
pub fn planned_peak() -> u64 {
    #[cfg(target_os = "linux")]
    return page_pool::PAGE_POOL.planned_peak();
    #[cfg(not(target_os = "linux"))]
    return u64::MAX >> 1;
}

/// Heap bytes in use now; 0 if [`CountingAllocator`] is not installed.
pub fn live_bytes() -> u64 {
    LIVE.load(Relaxed)
}

/// Resets all peaks, so that earlier work such as scanning the data files does not count.
pub fn reset_peaks() {
    PEAK.store(live_bytes(), Relaxed);
    RECENT_PEAK.store(live_bytes(), Relaxed);
}

/// Peak heap bytes in use since [`reset_peaks`].
pub fn peak_bytes() -> u64 {
    PEAK.load(Relaxed)
}

/// Peak heap bytes in use since the last call.
pub fn take_recent_peak() -> u64 {
    RECENT_PEAK.swap(live_bytes(), Relaxed).max(live_bytes())
}

/// Peak resident memory of this process since it started, as the kernel counts it (`VmHWM`): heap, stacks, code and
/// pages of mapped files. 0 if the system does not report it.
pub fn resident_peak() -> u64 {
    crate::base::proc_status::proc_status("VmHWM:").unwrap_or(0)
}
