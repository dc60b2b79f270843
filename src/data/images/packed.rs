//! Pictures in gzip or zstd tar files: read forward, a file a shard.

use std::io::{Read, sink};
use std::path::PathBuf;
use std::sync::Arc;

use super::listing::Extent;
use super::{Set, features};
use crate::data::picture::{Pipeline, Pool};
use crate::data::stream::{BLOCK, Block, Records, Shards, cut};
use crate::data::{DataError, Features, Key, Row, files};

/// The pictures of a set whose archives are packed.
pub struct Packed {
    set: Arc<Set>,
    pipeline: Pipeline,
    features: Features,
    blocks: Vec<Block>,
    /// The first picture of each archive, and one behind the last.
    firsts: Vec<usize>,
    pool: Pool,
}

impl Packed {
    pub fn new(set: Arc<Set>, pipeline: Pipeline) -> Self {
        let (mut blocks, mut firsts) = (Vec::new(), vec![0]);
        for shard in 0..set.listing.places.len() {
            let first = firsts[shard];
            let end =
                first + (first..set.listing.len()).take_while(|i| set.listing.place(*i) == shard).count();
            let sizes = set.listing.spans[first..end].iter().map(|extent| extent.len);
            blocks.extend(cut(shard as u32, sizes, BLOCK));
            firsts.push(end);
        }
        let features = features(&pipeline, set.names());
        let pool = Pool::with_large(set.options.readers, set.seen.each, set.large.clone());
        Self { set, pipeline, features, blocks, firsts, pool }
    }
}

impl Shards for Packed {
    fn features(&self) -> &Features {
        &self.features
    }

    fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn Records>, DataError> {
        let shard = shard as usize;
        let file = self.set.listing.places[shard].clone();
        Ok(Box::new(Reading {
            input: files::open(&file)?,
            file,
            set: self.set.clone(),
            next: self.firsts[shard],
            end: self.firsts[shard + 1],
            at: 0,
        }))
    }

    fn name(&self, shard: u32) -> String {
        format!("`{}`", self.set.listing.places[shard as usize].display())
    }

    fn decode(&self, record: &[u8], index: u64, key: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        self.set.sample(index as usize, record, &self.pipeline, key, &mut self.pool.lend(), into)
    }

    fn resident_bytes(&self) -> u64 {
        let blocks = self.blocks.capacity() * size_of::<Block>();
        self.set.listing.bytes() + self.pool.bytes() + blocks as u64
    }

    fn balance(&self) -> Option<Vec<u64>> {
        Some(self.set.listing.balance())
    }

    fn about(&self) -> Vec<(String, String)> {
        self.set.about()
    }
}

/// An archive that is being read: its pictures lie where the index says.
struct Reading {
    file: PathBuf,
    input: Box<dyn Read + Send>,
    set: Arc<Set>,
    next: usize,
    end: usize,
    /// Bytes of the archive that were read.
    at: u64,
}

impl Records for Reading {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        if self.next == self.end {
            return Ok(false);
        }
        let Extent { start, len } = self.set.listing.spans[self.next];
        let fault = |error| files::fault(&self.file, error);
        let skipped =
            std::io::copy(&mut self.input.by_ref().take(start - self.at), &mut sink()).map_err(fault)?;
        let read = self.input.by_ref().take(len).read_to_end(into).map_err(fault)? as u64;
        self.at += skipped + read;
        if self.at != start + len {
            let (promised, found) = (start + len, self.at);
            return Err(DataError::Truncated { file: self.file.clone(), promised, found });
        }
        self.next += 1;
        Ok(true)
    }
}
