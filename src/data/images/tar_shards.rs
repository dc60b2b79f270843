//! Images in gzip or zstd tar archives, read sequentially; one archive is one shard.

use std::io::{Read, sink};
use std::path::PathBuf;
use std::sync::Arc;

use super::listing::Extent;
use super::{ImageFiles, features};
use crate::streaming::{BLOCK_BYTES, RecordBlock, ShardReader, ShardedDataset, cut_into_blocks};
use crate::transforms::{Pipeline, ScratchPool};
use crate::{BatchRow, DataError, Features, SampleKey, files};

/// The images of a dataset in compressed archives.
pub struct TarShards {
    image_files: Arc<ImageFiles>,
    pipeline: Pipeline,
    features: Features,
    blocks: Vec<RecordBlock>,
    /// Index of the first image per archive, plus one past the last.
    first_images: Vec<usize>,
    pool: ScratchPool,
}

impl TarShards {
    pub fn new(image_files: Arc<ImageFiles>, pipeline: Pipeline) -> Self {
        let (mut blocks, mut firsts) = (Vec::new(), vec![0]);
        for shard in 0..image_files.listing.containers.len() {
            let first = firsts[shard];
            let end = first
                + (first..image_files.listing.len())
                    .take_while(|i| image_files.listing.container(*i) == shard)
                    .count();
            let sizes = image_files.listing.extents[first..end].iter().map(|extent| extent.len);
            blocks.extend(cut_into_blocks(shard as u32, sizes, BLOCK_BYTES));
            firsts.push(end);
        }
        let features = features(&pipeline, &image_files.listing);
        let pool = ScratchPool::with_large_images(
            image_files.options.readers,
            image_files.header_stats.bytes_per_reader + pipeline.augment_bytes(),
            image_files.large_images.clone(),
        );
        Self { image_files, pipeline, features, blocks, first_images: firsts, pool }
    }
}

impl ShardedDataset for TarShards {
    fn features(&self) -> &Features {
        &self.features
    }

    fn blocks(&self) -> &[RecordBlock] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn ShardReader>, DataError> {
        let shard = shard as usize;
        let file = self.image_files.listing.containers[shard].clone();
        Ok(Box::new(TarShardReader {
            input: files::open(&file)?,
            file,
            image_files: self.image_files.clone(),
            next: self.first_images[shard],
            end: self.first_images[shard + 1],
            position: 0,
        }))
    }

    fn name(&self, shard: u32) -> String {
        format!("`{}`", self.image_files.listing.containers[shard as usize].display())
    }

    fn decode(
        &self,
        record: &[u8],
        index: u64,
        key: SampleKey,
        into: &mut BatchRow<'_>,
    ) -> Result<(), DataError> {
        self.image_files.decode_sample(
            index as usize,
            record,
            &self.pipeline,
            key,
            &mut self.pool.acquire(),
            into,
        )
    }

    fn resident_bytes(&self) -> u64 {
        let blocks = self.blocks.capacity() * size_of::<RecordBlock>();
        self.image_files.listing.resident_bytes() + self.pool.bytes() + blocks as u64
    }

    fn class_counts(&self) -> Option<Vec<u64>> {
        Some(self.image_files.listing.class_counts())
    }

    fn describe(&self) -> Vec<(String, String)> {
        self.image_files.describe()
    }
}

/// An archive being read; the index gives the extents of its images.
struct TarShardReader {
    file: PathBuf,
    input: Box<dyn Read + Send>,
    image_files: Arc<ImageFiles>,
    next: usize,
    end: usize,
    /// Uncompressed bytes read so far.
    position: u64,
}

impl ShardReader for TarShardReader {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        if self.next == self.end {
            return Ok(false);
        }
        let Extent { start, len, .. } = self.image_files.listing.extents[self.next];
        let fault = |error| files::read_error(&self.file, error);
        let skipped = std::io::copy(&mut self.input.by_ref().take(start - self.position), &mut sink())
            .map_err(fault)?;
        let read = self.input.by_ref().take(len).read_to_end(into).map_err(fault)? as u64;
        self.position += skipped + read;
        if self.position != start + len {
            let (declared, found) = (start + len, self.position);
            return Err(DataError::Truncated { file: self.file.clone(), declared, found });
        }
        self.next += 1;
        Ok(true)
    }
}
