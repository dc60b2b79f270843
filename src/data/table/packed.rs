//! Tables of compressed text: files that are read forward, one a shard. A record is the number of its line, eight
//! bytes, and the row as it is written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;

use super::columns::Column;
use super::csv::{Head, TextRow};
use super::dialect::{Dialect, Fields};
use super::encoding::Encoding;
use super::rows::RowReader;
use super::{Cells, Raw, See};
use crate::data::cache::Fingerprint;
use crate::data::stream::{self, BLOCK, Block, Records, Shards};
use crate::data::{DataError, Features, Key, Opening, Row, files};

/// Bytes of a record before its row.
const LINE: usize = 8;

/// Files with the same columns, of which at least one is packed.
pub struct Packed {
    files: Vec<PackedFile>,
    dialect: Dialect,
    width: usize,
    blocks: Vec<Block>,
    rows: u64,
}

struct PackedFile {
    path: PathBuf,
    /// Rows of the files before.
    first: u64,
    /// Bytes as it lies on disk.
    bytes: u64,
}

impl Packed {
    /// Counts the rows of `paths`, or takes the counts of an earlier time from the cache.
    pub fn open(
        paths: &[PathBuf],
        heads: &[Head],
        dialect: Dialect,
        opening: &Opening,
    ) -> Result<Self, DataError> {
        let width = heads.first().map_or(0, |head| head.names.len());
        let count = |(shard, path): (usize, &PathBuf)| {
            let (_, bytes) = files::packing(path)?;
            Ok((bytes, count(shard as u32, path, bytes, dialect, opening)?))
        };
        let counted: Result<Vec<_>, DataError> = paths.par_iter().enumerate().map(count).collect();
        let mut packed = Self { files: Vec::new(), dialect, width, blocks: Vec::new(), rows: 0 };
        for (path, (bytes, blocks)) in paths.iter().zip(counted?) {
            packed.files.push(PackedFile { path: path.clone(), first: packed.rows, bytes });
            packed.rows += blocks.iter().map(|block| block.records).sum::<u64>();
            packed.blocks.extend(blocks);
        }
        Ok(packed)
    }
}

/// The blocks of one file.
fn count(
    shard: u32,
    path: &Path,
    bytes: u64,
    dialect: Dialect,
    opening: &Opening,
) -> Result<Vec<Block>, DataError> {
    use std::io::Write;
    let of = Fingerprint::of(&[path.to_owned()], &format!("{dialect:?} {BLOCK}"))?;
    let kept = opening.cache.find("csv-blocks", of).and_then(|path| std::fs::read(path).ok());
    if let Some(kept) = kept.and_then(|kept| serde_json::from_slice::<Vec<(u64, u64)>>(&kept).ok()) {
        return Ok(kept.into_iter().map(|(records, bytes)| Block { shard, records, bytes }).collect());
    }
    let doing = format!("counting the rows of {}", path.display());
    opening.watch.pass(&doing, 0, bytes);
    let mut reader = RowReader::open(path, dialect)?;
    reader.names()?;
    let mut failed = None;
    let sizes = std::iter::from_fn(|| match reader.next() {
        Ok(row) => row.map(|(_, row)| (LINE + row.len()) as u64),
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let blocks = stream::cut(shard, sizes, BLOCK);
    if let Some(error) = failed {
        return Err(error);
    }
    opening.watch.pass(&doing, bytes, bytes);
    let keep: Vec<(u64, u64)> = blocks.iter().map(|block| (block.records, block.bytes)).collect();
    let keep = serde_json::to_vec(&keep).unwrap_or_default();
    // A cache that cannot be written costs time only.
    drop(opening.cache.get("csv-blocks", of, |out| out.write_all(&keep).map_err(DataError::writing(path))));
    Ok(blocks)
}

impl Raw for Packed {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn parts(&self) -> usize {
        self.files.len()
    }

    fn part_bytes(&self, part: usize) -> u64 {
        self.files[part].bytes
    }

    fn pass(&self, part: usize, columns: &[Column], see: &mut See<'_>) -> Result<(), DataError> {
        let PackedFile { path, first, .. } = &self.files[part];
        let mut reader = RowReader::open(path, self.dialect)?;
        reader.names()?;
        let (mut number, mut fields) = (*first, Fields::default());
        while let Some((line, row)) = reader.next()? {
            let line = || line;
            let form = (self.dialect, self.width);
            let cells = TextRow::new(row, &mut fields, form, columns, path, &line);
            see(number, cells.as_ref().map(|cells| cells as &dyn Cells).map_err(Clone::clone))?;
            number += 1;
        }
        Ok(())
    }
}

/// Packed files as samples.
pub struct PackedCsv {
    pub packed: Packed,
    pub encoding: Arc<Encoding>,
    /// Rows of each class, where they were counted.
    pub balance: Option<Vec<u64>>,
}

struct PackedRecords {
    reader: RowReader,
}

impl Records for PackedRecords {
    fn next(&mut self, into: &mut Vec<u8>) -> Result<bool, DataError> {
        let Some((line, row)) = self.reader.next()? else { return Ok(false) };
        into.extend_from_slice(&line.to_le_bytes());
        into.extend_from_slice(row);
        Ok(true)
    }
}

impl Shards for PackedCsv {
    fn features(&self) -> &Features {
        &self.encoding.features
    }

    fn blocks(&self) -> &[Block] {
        &self.packed.blocks
    }

    fn open(&self, shard: u32) -> Result<Box<dyn Records>, DataError> {
        let mut reader = RowReader::open(&self.packed.files[shard as usize].path, self.packed.dialect)?;
        reader.names()?;
        Ok(Box::new(PackedRecords { reader }))
    }

    fn name(&self, shard: u32) -> String {
        format!("`{}`", self.packed.files[shard as usize].path.display())
    }

    fn decode(&self, record: &[u8], index: u64, _: Key, into: &mut Row<'_>) -> Result<(), DataError> {
        thread_local! {
            static FIELDS: std::cell::RefCell<Fields> = std::cell::RefCell::default();
        }
        let packed = &self.packed;
        let file = packed.files.partition_point(|file| file.first <= index) - 1;
        let (line, row) = record.split_first_chunk::<LINE>().unwrap_or((&[0; LINE], record));
        let line = || u64::from_le_bytes(*line);
        FIELDS.with_borrow_mut(|fields| {
            let (form, path) = ((packed.dialect, packed.width), &packed.files[file].path);
            let cells = TextRow::new(row, fields, form, &self.encoding.columns, path, &line)?;
            self.encoding.write(&cells, into)
        })
    }

    fn resident_bytes(&self) -> u64 {
        (self.packed.blocks.capacity() * size_of::<Block>()) as u64 + self.encoding.bytes()
    }

    fn balance(&self) -> Option<Vec<u64>> {
        self.balance.clone()
    }

    fn columns(&self) -> Vec<String> {
        self.encoding.inputs()
    }

    fn about(&self) -> Vec<(String, String)> {
        self.encoding.about()
    }
}
