//! The keys of samples: hashes of their classes or groups.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::PathBuf;

use crate::DataError;

/// The class or the group of each sample.
pub trait SplitKeys {
    /// Calls `visit` with the key of each sample, in the order of the samples.
    fn for_each(&self, visit: &mut dyn FnMut(u64) -> Result<(), DataError>) -> Result<(), DataError>;

    /// What a key stands for, in messages; `first` is the first sample that has it.
    fn name(&self, key: u64, first: u64) -> String;
}

/// The key of a class or group. Two values with the same key, which are unlikely below billions of values, would be
/// treated as one.
pub fn key_of(value: &[u8]) -> u64 {
    twox_hash::XxHash3_128::oneshot(value) as u64
}

/// Keys in a file, eight bytes each, little-endian: they are read as a stream.
pub struct KeyFile {
    pub path: PathBuf,
    /// What a sample is called in messages.
    pub noun: &'static str,
}

impl SplitKeys for KeyFile {
    fn for_each(&self, visit: &mut dyn FnMut(u64) -> Result<(), DataError>) -> Result<(), DataError> {
        let mut file = BufReader::new(File::open(&self.path).map_err(DataError::io(&self.path))?);
        let mut key = [0; 8];
        loop {
            match file.read_exact(&mut key) {
                Ok(()) => visit(u64::from_le_bytes(key))?,
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(DataError::io(&self.path)(error)),
            }
        }
    }

    fn name(&self, _: u64, first: u64) -> String {
        format!("that of {} {}", self.noun, first + 1)
    }
}
