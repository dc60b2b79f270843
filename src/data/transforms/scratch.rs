//! Scratch buffers that reader threads reuse, bounded in bytes by the number of concurrent readers.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fast_image_resize::Resizer;

use crate::DataError;

/// Buffers for reading an image. Their content is left over from the last use.
#[derive(Default)]
pub struct Scratch {
    /// The file.
    pub file: Vec<u8>,
    /// Decoded pixels, and rotated or converted pixels.
    pub pixels: Vec<u8>,
    pub converted: Vec<u8>,
    /// Generated pixels.
    pub floats: Vec<f32>,
    pub(super) resizer: Resizer,
    pub(super) resized: Vec<u8>,
    pub(super) resized_floats: Vec<f32>,
    pub(super) augment: AugmentBuffers,
}

/// Buffers for augmenting a sample as bytes.
#[derive(Default)]
pub(super) struct AugmentBuffers {
    pub image: Vec<u8>,
    /// The next image of an operation that cannot work in place.
    pub spare: Vec<u8>,
    /// Rows blurred along one axis.
    pub rows: Vec<f32>,
}

impl Scratch {
    fn bytes(&self) -> u64 {
        let AugmentBuffers { image, spare, rows } = &self.augment;
        let bytes =
            [&self.file, &self.pixels, &self.converted, &self.resized, image, spare].map(Vec::capacity);
        let floats = 4 * (self.floats.capacity() + self.resized_floats.capacity() + rows.capacity());
        (bytes.iter().sum::<usize>() + floats + self.resizer.size_of_internal_buffers()) as u64
    }
}

/// Images that exceed the scratch size of a reader. All datasets of a job decode them one at a time, so that the memory
/// of the largest one is enough for all of them.
#[derive(Debug, Default)]
pub struct LargeImages {
    /// Held while such an image is in memory.
    exclusive: Mutex<()>,
    largest: Mutex<Option<LargestImage>>,
}

/// The image that takes the most memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargestImage {
    pub path: PathBuf,
    /// Total bytes needed to decode it.
    pub bytes: u64,
    /// The part of `bytes` that exceeds the scratch size of a reader.
    pub extra_bytes: u64,
    pub pixels: u64,
}

impl LargeImages {
    /// Registers an image that will be read; call before memory is planned.
    pub fn register(&self, found: LargestImage) {
        let mut largest = self.largest.lock().unwrap_or_else(PoisonError::into_inner);
        if largest.as_ref().is_none_or(|known| known.extra_bytes < found.extra_bytes) {
            *largest = Some(found);
        }
    }

    pub fn largest(&self) -> Option<LargestImage> {
        self.largest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes that large images take at once, on top of the readers' scratch.
    pub fn extra_bytes(&self) -> u64 {
        self.largest().map_or(0, |largest| largest.extra_bytes)
    }
}

/// Lends [`Scratch`] buffers. With at most `readers` concurrent readers, all buffers take at most
/// [`ScratchPool::bytes`], except for one image at a time that takes up to [`LargeImages::extra_bytes`] more.
pub struct ScratchPool {
    readers: usize,
    bytes_per_reader: u64,
    idle: Mutex<Vec<Scratch>>,
    large_images: Arc<LargeImages>,
}

impl ScratchPool {
    /// A pool for `readers` threads of `bytes_per_reader` bytes each.
    pub fn new(readers: usize, bytes_per_reader: u64) -> Self {
        Self::with_large_images(readers, bytes_per_reader, Arc::default())
    }

    /// As [`ScratchPool::new`], for a dataset with images that exceed `bytes_per_reader`.
    pub fn with_large_images(readers: usize, bytes_per_reader: u64, large_images: Arc<LargeImages>) -> Self {
        Self { readers: readers.max(1), bytes_per_reader, idle: Mutex::default(), large_images }
    }

    pub fn bytes(&self) -> u64 {
        self.readers as u64 * self.bytes_per_reader
    }

    /// Borrows buffers; they may grow to `bytes_per_reader` bytes in total.
    pub fn acquire(&self) -> ScratchGuard<'_> {
        let scratch = self.idle().pop().unwrap_or_default();
        ScratchGuard { pool: self, scratch, exclusive: None }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Scratch>> {
        // Only a push and a pop happen under the lock, so a poisoned list is still consistent.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A borrowed [`Scratch`]; returned to the pool on drop, or freed if it grew beyond `bytes_per_reader`.
pub struct ScratchGuard<'a> {
    pool: &'a ScratchPool,
    scratch: Scratch,
    exclusive: Option<MutexGuard<'a, ()>>,
}

impl ScratchGuard<'_> {
    /// Call before using `bytes` bytes in total for an image. If that exceeds `bytes_per_reader`, waits until no other
    /// thread decodes a large image. Refuses more than was planned for the largest image.
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
            // Free the regular buffers: a large image allocates its own.
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
        // Free large buffers before the next large image may start.
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
