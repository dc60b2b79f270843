//! The length of what is written, without keeping it.

use std::io;

/// Counts the bytes that are written to it.
#[derive(Debug, Default)]
pub struct ByteCount(pub u64);

impl io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
