//! The data files a job needs: what they are, and how they are written. Their content follows from the job's seed.

mod images;
mod language;
mod tables;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

pub use images::{Idx, Images, Layout};
pub use language::{Chat, Jsonl, Text, TokenFile, TokenUnits};
pub use tables::{Column, Rows, TableFormat, Tables};

use crate::draw::Draw;

/// What a job reads.
#[derive(Clone, Debug)]
pub enum Files {
    /// The program draws its samples itself.
    None,
    Table(Tables),
    Images(Images),
    Idx(Idx),
    Text(Text),
    Tokens(TokenFile),
    Jsonl(Jsonl),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

impl Packing {
    /// What a packed file's name ends with.
    pub fn ending(self) -> &'static str {
        match self {
            Packing::Plain => "",
            Packing::Gzip => ".gz",
            Packing::Zstd => ".zst",
        }
    }

    fn write(self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::create(path)?;
        match self {
            Packing::Plain => file.write_all(bytes),
            Packing::Gzip => {
                let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
                packed.write_all(bytes)?;
                packed.finish().map(drop)
            }
            Packing::Zstd => zstd::stream::copy_encode(bytes, file, 1),
        }
    }
}

impl Files {
    /// Writes the files into `folder/data`.
    pub fn write(&self, folder: &Path, seed: u64) -> io::Result<()> {
        let folder = folder.join("data");
        fs::create_dir_all(&folder)?;
        let mut draw = Draw::new(seed, "data");
        match self {
            Files::None => Ok(()),
            Files::Table(files) => files.write(&folder, &mut draw),
            Files::Images(files) => files.write(&folder, &mut draw),
            Files::Idx(files) => files.write(&folder, &mut draw),
            Files::Text(files) => files.write(&folder, &mut draw),
            Files::Tokens(files) => files.write(&folder, &mut draw),
            Files::Jsonl(files) => files.write(&folder, &mut draw),
        }
    }
}
