//! Large buffers: each in pages of its own, kept when it is freed and used again for the next of its size.
//!
//! A step asks for the same large buffers again and again. Given back to the system each time, every page
//! of them is zeroed again by the kernel; left on the heap, the holes between them stay resident. Here a
//! freed buffer waits for the next ask of its size, and what waits plus what is in use is never more than
//! [`SLACK`] above the most that was in use at once: keeping buffers costs next to no memory the run did not
//! already need.

use std::alloc::Layout;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Allocations from this size on lie in pages of their own.
pub const LARGE: usize = 256 << 10;
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;
/// Bytes that may wait even at the peak, so that the few buffers not in use there are not mapped anew each step.
const SLACK: u64 = 4 << 20;
/// Buffers that may wait at once. A network of more buffers than this loses only some time.
const SLOTS: usize = 1024;

/// Whether this allocation is made here.
pub fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE && layout.align() <= PAGE
}

/// A mapping that waits to be used again.
#[derive(Clone, Copy)]
struct Kept {
    address: usize,
    len: usize,
}

struct Waiting {
    /// The first `count`, oldest first.
    kept: [Kept; SLOTS],
    count: usize,
    bytes: u64,
    /// The most bytes in use at once since the last [`give_back`].
    highest: u64,
}

static WAITING: Mutex<Waiting> =
    Mutex::new(Waiting { kept: [Kept { address: 0, len: 0 }; SLOTS], count: 0, bytes: 0, highest: 0 });

/// Numbers only, whole after every statement; a panic elsewhere cannot spoil them.
fn waiting() -> MutexGuard<'static, Waiting> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Waiting {
    fn remove(&mut self, at: usize) -> Kept {
        let kept = self.kept[at];
        self.kept.copy_within(at + 1..self.count, at);
        self.count -= 1;
        self.bytes -= kept.len as u64;
        kept
    }

    /// Unmaps the oldest buffers until, with `live` bytes in use, no more is held than ever was in use, and the slack.
    fn trim(&mut self, live: u64) {
        self.highest = self.highest.max(live);
        while self.count > 0 && live + self.bytes > self.highest + SLACK {
            unmap(self.remove(0));
        }
    }
}

fn unmap(kept: Kept) {
    // SAFETY: the mapping is ours alone and nobody holds a pointer into it. It was made with this length.
    let _ = unsafe { munmap(kept.address as *mut _, kept.len) };
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
    for cut in
        [Kept { address: all as usize, len: before }, Kept { address: begin + len, len: spare - before }]
    {
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
pub fn take(layout: Layout, zeroed: bool, live: u64) -> *mut u8 {
    let len = layout.size().next_multiple_of(PAGE);
    let mut waiting = waiting();
    let found = (0..waiting.count).rev().find(|i| waiting.kept[*i].len == len);
    let used_again = found.map(|at| waiting.remove(at));
    waiting.trim(live);
    drop(waiting);
    match used_again {
        Some(kept) => {
            let pointer = kept.address as *mut u8;
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
/// `pointer` came from [`take`] with this layout and is not used again.
pub unsafe fn put(pointer: *mut u8, layout: Layout, live: u64) {
    let mut waiting = waiting();
    if waiting.count == SLOTS {
        unmap(waiting.remove(0));
    }
    let (at, len) = (waiting.count, layout.size().next_multiple_of(PAGE));
    waiting.kept[at] = Kept { address: pointer as usize, len };
    waiting.count += 1;
    waiting.bytes += len as u64;
    waiting.trim(live);
}

/// Returns every waiting buffer to the system, and forgets how much was in use: what is kept from here on
/// follows what is in use from here on.
pub fn give_back() {
    let mut waiting = waiting();
    while waiting.count > 0 {
        let last = waiting.count - 1;
        unmap(waiting.remove(last));
    }
    waiting.highest = 0;
}

/// Bytes that wait to be used again.
pub fn kept() -> u64 {
    waiting().bytes
}
