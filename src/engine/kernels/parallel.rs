//! Parallel loops over chunks of slices, written as rayon's are. Rayon's own iterators are compiled anew for every loop
//! body, with several copies of the body; these share one parallel loop, [`parallel_for`].

use super::cpu::{DisjointSliceMut, parallel_for, parallel_map, threads};

/// Items that parallel workers take by index.
pub(crate) trait ParallelItems: Sized + Sync {
    type Item;

    fn count(&self) -> usize;

    /// # Safety
    /// No index is taken twice.
    unsafe fn take(&self, index: usize) -> Self::Item;

    /// Pairs of items, as many as the shorter one has.
    fn zip<B: ParallelItems>(self, other: B) -> Zip<Self, B> {
        Zip(self, other)
    }

    fn enumerate(self) -> Zip<Indices, Self> {
        Zip(Indices, self)
    }

    fn for_each(self, body: impl Fn(Self::Item) + Sync) {
        // SAFETY: each index is passed once.
        parallel_for(self.count(), &|i| body(unsafe { self.take(i) }));
    }

    /// With a scratch value that consecutive items share.
    fn for_each_init<S>(self, init: impl Fn() -> S + Sync, body: impl Fn(&mut S, Self::Item) + Sync) {
        let count = self.count();
        // A few runs per thread: enough to balance them.
        let run = count.div_ceil(4 * threads()).max(1);
        parallel_for(count.div_ceil(run), &|r| {
            let mut scratch = init();
            for i in r * run..count.min((r + 1) * run) {
                // SAFETY: runs do not overlap.
                body(&mut scratch, unsafe { self.take(i) });
            }
        });
    }

    /// The results of `body`, in order.
    fn map_collect<R: Send>(self, body: impl Fn(Self::Item) -> R + Sync) -> Vec<R> {
        // SAFETY: each index is passed once.
        parallel_map(self.count(), &|i| body(unsafe { self.take(i) }))
    }
}

/// Chunks of `len` values; the last may be shorter.
pub(crate) struct Chunks<'a, T> {
    all: &'a [T],
    len: usize,
}

impl<'a, T: Sync> ParallelItems for Chunks<'a, T> {
    type Item = &'a [T];

    fn count(&self) -> usize {
        self.all.len().div_ceil(self.len)
    }

    unsafe fn take(&self, index: usize) -> &'a [T] {
        &self.all[index * self.len..self.all.len().min((index + 1) * self.len)]
    }
}

pub(crate) struct ChunksMut<'a, T> {
    all: DisjointSliceMut<'a, T>,
    len: usize,
}

impl<'a, T: Send> ParallelItems for ChunksMut<'a, T> {
    type Item = &'a mut [T];

    fn count(&self) -> usize {
        self.all.len().div_ceil(self.len)
    }

    unsafe fn take(&self, index: usize) -> &'a mut [T] {
        let start = index * self.len;
        // SAFETY: chunks do not overlap, and the caller takes each once.
        unsafe { self.all.range_mut(start, self.len.min(self.all.len() - start)) }
    }
}

pub(crate) struct Indices;

impl ParallelItems for Indices {
    type Item = usize;

    fn count(&self) -> usize {
        usize::MAX
    }

    unsafe fn take(&self, index: usize) -> usize {
        index
    }
}

pub(crate) struct Zip<A, B>(A, B);

impl<A: ParallelItems, B: ParallelItems> ParallelItems for Zip<A, B> {
    type Item = (A::Item, B::Item);

    fn count(&self) -> usize {
        self.0.count().min(self.1.count())
    }

    unsafe fn take(&self, index: usize) -> Self::Item {
        // SAFETY: the caller takes each index once.
        unsafe { (self.0.take(index), self.1.take(index)) }
    }
}

/// The values of a slice, one by one.
impl<'a, T: Sync> ParallelItems for &'a [T] {
    type Item = &'a T;

    fn count(&self) -> usize {
        self.len()
    }

    unsafe fn take(&self, index: usize) -> &'a T {
        &self[index]
    }
}

pub(crate) trait ParallelChunks<T> {
    fn par_chunks(&self, len: usize) -> Chunks<'_, T>;

    fn par_chunks_mut(&mut self, len: usize) -> ChunksMut<'_, T>;
}

impl<T> ParallelChunks<T> for [T] {
    fn par_chunks(&self, len: usize) -> Chunks<'_, T> {
        assert!(len > 0, "chunks of no values");
        Chunks { all: self, len }
    }

    fn par_chunks_mut(&mut self, len: usize) -> ChunksMut<'_, T> {
        assert!(len > 0, "chunks of no values");
        ChunksMut { all: DisjointSliceMut::new(self), len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A chunk to write with its number, one to read, and a factor.
    type TestItem<'a> = ((usize, &'a mut [u32]), (&'a [u32], &'a u32));

    fn update(((i, into), (from, scale)): TestItem) {
        into.iter_mut().zip(from).for_each(|(to, v)| *to = v * scale + i as u32 + 1);
    }

    proptest! {
        /// Every value is visited once, in the chunk that the standard library's iterators put it in.
        #[test]
        fn loops_visit_what_sequential_loops_visit(values in prop::collection::vec(0u32..9, 0..300), len in 1usize..70) {
            let scales: Vec<u32> = (0..values.len().div_ceil(len) as u32).collect();
            let mut expected = values.clone();
            for ((i, chunk), scale) in expected.chunks_mut(len).enumerate().zip(&scales) {
                chunk.iter_mut().for_each(|v| *v = *v * scale + i as u32 + 1);
            }
            let mut by_each = vec![0; values.len()];
            by_each.par_chunks_mut(len).enumerate().zip(values.par_chunks(len).zip(&*scales)).for_each(update);
            prop_assert_eq!(&by_each, &expected);
            let mut with_scratch = vec![0; values.len()];
            let items = with_scratch.par_chunks_mut(len).enumerate().zip(values.par_chunks(len).zip(&*scales));
            items.for_each_init(|| 0, |_, item| update(item));
            prop_assert_eq!(&with_scratch, &expected);
            let sums = values.par_chunks(len).map_collect(|chunk| chunk.iter().sum::<u32>());
            prop_assert_eq!(sums, values.chunks(len).map(|chunk| chunk.iter().sum::<u32>()).collect::<Vec<_>>());
        }
    }
}
