//! Buffers that readers use again, bounded in bytes: a set at once by as many as read from it.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fast_image_resize::Resizer;

use crate::data::DataError;

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

/// Pictures that need more than a reader's share: one at a time among all sets of a job, so that the memory of the
/// largest is enough for all of them.
#[derive(Debug, Default)]
pub struct Large {
    /// Held while such a picture is in memory.
    turn: Mutex<()>,
    largest: Mutex<Option<Largest>>,
}

/// The picture that takes the most memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Largest {
    pub picture: PathBuf,
    /// Bytes that decoding it takes in all.
    pub bytes: u64,
    /// Of them, those beyond a reader's share.
    pub beyond: u64,
    pub pixels: u64,
}

impl Large {
    /// Notes a picture that will be read, before the memory is planned.
    pub fn expect(&self, found: Largest) {
        let mut largest = self.largest.lock().unwrap_or_else(PoisonError::into_inner);
        if largest.as_ref().is_none_or(|known| known.beyond < found.beyond) {
            *largest = Some(found);
        }
    }

    pub fn largest(&self) -> Option<Largest> {
        self.largest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes that large pictures take at once beside the shares of readers.
    pub fn bytes(&self) -> u64 {
        self.largest().map_or(0, |largest| largest.beyond)
    }
}

/// Lends [`Scratch`]es. While no more than `readers` read at once, all of them take at most [`Pool::bytes`], but for one
/// picture at a time that takes as much more as its [`Large`] says.
pub struct Pool {
    readers: usize,
    each: u64,
    idle: Mutex<Vec<Scratch>>,
    large: Arc<Large>,
}

impl Pool {
    /// For `readers` threads with `each` bytes.
    pub fn new(readers: usize, each: u64) -> Self {
        Self::with_large(readers, each, Arc::default())
    }

    /// As [`Pool::new`], with pictures that need more than `each`.
    pub fn with_large(readers: usize, each: u64, large: Arc<Large>) -> Self {
        Self { readers: readers.max(1), each, idle: Mutex::default(), large }
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
    /// Before `bytes` are used in all for `picture`: waits, where that is more than a share, until nobody else uses so
    /// much. More than was planned for the largest picture is refused.
    pub fn ask(&mut self, picture: impl Fn() -> PathBuf, bytes: u64) -> Result<(), DataError> {
        if bytes <= self.pool.each {
            return Ok(());
        }
        let limit = self.pool.each + self.pool.large.bytes();
        if bytes > limit {
            return Err(DataError::Decode { picture: picture(), bytes, limit });
        }
        if self.alone.is_none() {
            self.alone = Some(self.pool.large.turn.lock().unwrap_or_else(PoisonError::into_inner));
            // Buffers of the usual size that wait are not needed by a picture that has its own.
            self.scratch = Scratch::default();
        }
        Ok(())
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
        let large = Arc::new(Large::default());
        let beyond = |beyond| Largest { picture: "big".into(), bytes: 1000 + beyond, beyond, pixels: 9 };
        large.expect(beyond(4000));
        large.expect(beyond(3000));
        let pool = Pool::with_large(1, 1000, large.clone());
        pool.lend().file.reserve_exact(900);
        assert_eq!(pool.idle()[0].bytes(), 900);
        {
            let (mut a, b) = (pool.lend(), pool.lend());
            assert_eq!((a.bytes(), b.bytes()), (900, 0));
            a.ask(|| "big".into(), 5000).unwrap();
            a.pixels.reserve_exact(4000);
            assert!(large.turn.try_lock().is_err());
            let error = a.ask(|| "other".into(), 5001).unwrap_err();
            assert!(matches!(error, DataError::Decode { bytes: 5001, limit: 5000, .. }), "{error}");
            assert!(error.is_memory() && !error.is_record());
        }
        assert!(large.turn.try_lock().is_ok());
        assert_eq!(pool.idle().iter().map(Scratch::bytes).collect::<Vec<_>>(), [0]);
    }
}
