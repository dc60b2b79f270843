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
    pub converted: Vec<u8>,
    /// Pixels as drawn.
    pub floats: Vec<f32>,
    pub(super) resizer: Resizer,
    pub(super) resized: Vec<u8>,
    pub(super) resized_floats: Vec<f32>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        let bytes = [&self.file, &self.pixels, &self.converted, &self.resized].map(Vec::capacity);
        let floats = 4 * (self.floats.capacity() + self.resized_floats.capacity());
        (bytes.iter().sum::<usize>() + floats + self.resizer.size_of_internal_buffers()) as u64
    }
}

/// Pictures that need more than a reader's share: one at a time among all sets of a job, so that the memory of the
/// largest is enough for all of them.
#[derive(Debug, Default)]
pub struct LargeImages {
    /// Held while such a picture is in memory.
    exclusive: Mutex<()>,
    largest: Mutex<Option<LargestImage>>,
}

/// The picture that takes the most memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargestImage {
    pub path: PathBuf,
    /// Bytes that decoding it takes in all.
    pub bytes: u64,
    /// Of them, those beyond a reader's share.
    pub extra_bytes: u64,
    pub pixels: u64,
}

impl LargeImages {
    /// Notes a picture that will be read, before the memory is planned.
    pub fn register(&self, found: LargestImage) {
        let mut largest = self.largest.lock().unwrap_or_else(PoisonError::into_inner);
        if largest.as_ref().is_none_or(|known| known.extra_bytes < found.extra_bytes) {
            *largest = Some(found);
        }
    }

    pub fn largest(&self) -> Option<LargestImage> {
        self.largest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes that large pictures take at once beside the shares of readers.
    pub fn extra_bytes(&self) -> u64 {
        self.largest().map_or(0, |largest| largest.extra_bytes)
    }
}

/// Lends [`Scratch`]es. While no more than `readers` read at once, all of them take at most [`ScratchPool::extra_bytes`], but for one
/// picture at a time that takes as much more as its [`LargeImages`] says.
pub struct ScratchPool {
    readers: usize,
    bytes_per_reader: u64,
    idle: Mutex<Vec<Scratch>>,
    large_images: Arc<LargeImages>,
}

impl ScratchPool {
    /// For `readers` threads with `bytes_per_reader` bytes.
    pub fn new(readers: usize, bytes_per_reader: u64) -> Self {
        Self::with_large_images(readers, bytes_per_reader, Arc::default())
    }

    /// As [`ScratchPool::new`], with pictures that need more than `bytes_per_reader`.
    pub fn with_large_images(readers: usize, bytes_per_reader: u64, large_images: Arc<LargeImages>) -> Self {
        Self { readers: readers.max(1), bytes_per_reader, idle: Mutex::default(), large_images }
    }

    pub fn bytes(&self) -> u64 {
        self.readers as u64 * self.bytes_per_reader
    }

    /// Buffers of an unknown size up to `bytes_per_reader` bytes.
    pub fn acquire(&self) -> ScratchGuard<'_> {
        let scratch = self.idle().pop().unwrap_or_default();
        ScratchGuard { pool: self, scratch, exclusive: None }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Scratch>> {
        // Only a push and a pop happen under it: a poisoned list is still whole.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A [`Scratch`] that goes back when dropped; one that grew beyond its share is freed instead.
pub struct ScratchGuard<'a> {
    pool: &'a ScratchPool,
    scratch: Scratch,
    exclusive: Option<MutexGuard<'a, ()>>,
}

impl ScratchGuard<'_> {
    /// Before `extra_bytes` are used in all for `picture`: waits, where that is more than a share, until nobody else uses so
    /// much. More than was planned for the largest picture is refused.
    pub fn reserve(&mut self, image_path: impl Fn() -> PathBuf, bytes: u64) -> Result<(), DataError> {
        if bytes <= self.pool.bytes_per_reader {
            return Ok(());
        }
        let limit = self.pool.bytes_per_reader + self.pool.large_images.extra_bytes();
        if bytes > limit {
            return Err(DataError::DecodeMemory { image: image_path(), bytes, limit });
        }
        if self.exclusive.is_none() {
            self.exclusive =
                Some(self.pool.large_images.exclusive.lock().unwrap_or_else(PoisonError::into_inner));
            // Buffers of the usual size that wait are not needed by a picture that has its own.
            self.scratch = Scratch::default();
        }
        Ok(())
    }
}

impl Deref for ScratchGuard<'_> {
    type Target = Scratch;

    fn deref(&self) -> &Scratch {
        &self.scratch
    }
}

impl DerefMut for ScratchGuard<'_> {
    fn deref_mut(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl Drop for ScratchGuard<'_> {
    fn drop(&mut self) {
        let scratch = std::mem::take(&mut self.scratch);
        // What is too large is freed before the next large picture may begin.
        if scratch.bytes() <= self.pool.bytes_per_reader {
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
    fn buffers_are_reused_and_large_ones_are_not_kept() {
        let large = Arc::new(LargeImages::default());
        let beyond = |beyond| LargestImage {
            path: "big".into(),
            bytes: 1000 + beyond,
            extra_bytes: beyond,
            pixels: 9,
        };
        large.register(beyond(4000));
        large.register(beyond(3000));
        let pool = ScratchPool::with_large_images(1, 1000, large.clone());
        pool.acquire().file.reserve_exact(900);
        assert_eq!(pool.idle()[0].bytes(), 900);
        {
            let (mut a, b) = (pool.acquire(), pool.acquire());
            assert_eq!((a.bytes(), b.bytes()), (900, 0));
            a.reserve(|| "big".into(), 5000).unwrap();
            a.pixels.reserve_exact(4000);
            assert!(large.exclusive.try_lock().is_err());
            let error = a.reserve(|| "other".into(), 5001).unwrap_err();
            assert!(matches!(error, DataError::DecodeMemory { bytes: 5001, limit: 5000, .. }), "{error}");
            assert!(error.is_out_of_memory() && !error.is_bad_record());
        }
        assert!(large.exclusive.try_lock().is_ok());
        assert_eq!(pool.idle().iter().map(Scratch::bytes).collect::<Vec<_>>(), [0]);
    }
}
