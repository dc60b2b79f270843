//! Buffers that readers use again, bounded in bytes: a set at once by as many as read from it.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fast_image_resize::Resizer;

/// What reading a picture needs besides the sample. Contents are left over from the last use.
#[derive(Default)]
pub struct Scratch {
    /// A file's bytes.
    pub file: Vec<u8>,
    /// Pixels as decoded, and as turned or converted.
    pub pixels: Vec<u8>,
    pub turned: Vec<u8>,
    /// Pixels as drawn.
    pub floats: Vec<f32>,
    pub(super) resizer: Resizer,
    pub(super) resized: Vec<u8>,
    pub(super) resized_floats: Vec<f32>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        let bytes = [&self.file, &self.pixels, &self.turned, &self.resized].map(Vec::capacity);
        let floats = 4 * (self.floats.capacity() + self.resized_floats.capacity());
        (bytes.iter().sum::<usize>() + floats + self.resizer.size_of_internal_buffers()) as u64
    }
}

/// Lends [`Scratch`]es. While no more than `readers` read at once, all of them take at most
/// [`Pool::bytes`], but for one picture at a time that needs more than `each` by itself.
pub struct Pool {
    readers: usize,
    each: u64,
    idle: Mutex<Vec<Scratch>>,
    /// Held while a picture that needs more than `each` is in memory.
    large: Mutex<()>,
}

impl Pool {
    /// For `readers` threads with `each` bytes.
    pub fn new(readers: usize, each: u64) -> Self {
        Self { readers: readers.max(1), each, idle: Mutex::default(), large: Mutex::new(()) }
    }

    pub fn bytes(&self) -> u64 {
        self.readers as u64 * self.each
    }

    /// Buffers of an unknown size up to `each` bytes.
    pub fn lend(&self) -> Lent<'_> {
        let scratch = self.idle().pop().unwrap_or_default();
        Lent { pool: self, scratch, alone: None }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Scratch>> {
        // Only a push and a pop happen under it: a poisoned list is still whole.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A [`Scratch`] that goes back when dropped; one that grew beyond its share is freed instead.
pub struct Lent<'a> {
    pool: &'a Pool,
    scratch: Scratch,
    alone: Option<MutexGuard<'a, ()>>,
}

impl Lent<'_> {
    /// Before `bytes` are used in all: waits, where that is more than a share, until nobody else uses so much.
    pub fn ask(&mut self, bytes: u64) {
        if bytes > self.pool.each && self.alone.is_none() {
            self.alone = Some(self.pool.large.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Deref for Lent<'_> {
    type Target = Scratch;

    fn deref(&self) -> &Scratch {
        &self.scratch
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let scratch = std::mem::take(&mut self.scratch);
        // What is too large is freed before the next large picture may begin.
        if scratch.bytes() <= self.pool.each {
            let mut idle = self.pool.idle();
            if idle.len() < self.pool.readers {
                idle.push(scratch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_large_ones_are_not_kept() {
        let pool = Pool::new(1, 1000);
        pool.lend().file.reserve_exact(900);
        assert_eq!(pool.idle()[0].bytes(), 900);
        {
            let (mut a, b) = (pool.lend(), pool.lend());
            assert_eq!((a.bytes(), b.bytes()), (900, 0));
            a.ask(5000);
            a.pixels.reserve_exact(4000);
            assert!(pool.large.try_lock().is_err());
        }
        assert!(pool.large.try_lock().is_ok());
        assert_eq!(pool.idle().iter().map(Scratch::bytes).collect::<Vec<_>>(), [0]);
    }
}
