//! The data files a job needs: what they are, and how they are written. The job's seed determines their content.

mod images;
mod language;
mod tables;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

pub use images::{IdxSpec, ImageLayout, ImageSpec};
pub use language::{ChatSpec, JsonlSpec, TextSpec, TokenFileSpec, TokenUnits};
pub use tables::{ColumnSpec, RowCounts, TableFormat, TableSpec};

use crate::random::draw::Draw;

/// What a job reads.
#[derive(Clone, Debug)]
pub enum DataSpec {
    /// The program generates its samples itself.
    None,
    Table(TableSpec),
    Images(ImageSpec),
    Idx(IdxSpec),
    Text(TextSpec),
    Tokens(TokenFileSpec),
    Jsonl(JsonlSpec),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileCodec {
    Plain,
    Gzip,
    Zstd,
}

impl FileCodec {
    /// Extension of a compressed file.
    pub fn extension(self) -> &'static str {
        match self {
            FileCodec::Plain => "",
            FileCodec::Gzip => ".gz",
            FileCodec::Zstd => ".zst",
        }
    }

    fn write(self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::create(path)?;
        match self {
            FileCodec::Plain => file.write_all(bytes),
            FileCodec::Gzip => {
                let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
                packed.write_all(bytes)?;
                packed.finish().map(drop)
            }
            FileCodec::Zstd => zstd::stream::copy_encode(bytes, file, 1),
        }
    }
}

impl DataSpec {
    /// Writes the files into `folder/data`.
    pub fn write(&self, folder: &Path, seed: u64) -> io::Result<()> {
        let folder = folder.join("data");
        fs::create_dir_all(&folder)?;
        let mut draw = Draw::new(seed, "data");
        match self {
            DataSpec::None => Ok(()),
            DataSpec::Table(files) => files.write(&folder, &mut draw),
            DataSpec::Images(files) => files.write(&folder, &mut draw),
            DataSpec::Idx(files) => files.write(&folder, &mut draw),
            DataSpec::Text(files) => files.write(&folder, &mut draw),
            DataSpec::Tokens(files) => files.write(&folder, &mut draw),
            DataSpec::Jsonl(files) => files.write(&folder, &mut draw),
        }
    }
}
