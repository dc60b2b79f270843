//! Names the format of a file from its first bytes, so that a reader of another format can say what it was given.

/// The format of a binary file that starts with these bytes, 16 are enough, with an article; `None` for any other.
pub fn name(start: &[u8]) -> Option<&'static str> {
    Some(match start {
        [b'P', b'K', 3 | 5, 4 | 6, ..] => "a zip file, as `.npz`, `.pt` and `.docx` are",
        [b'P', b'A', b'R', b'1', ..] => "a Parquet file",
        [b'A', b'R', b'R', b'O', b'W', b'1', ..] => "an Arrow file",
        [0x89, b'H', b'D', b'F', ..] => "an HDF5 file",
        [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => "a NumPy file",
        [b'G', b'G', b'U', b'F', ..] => "a GGUF file",
        [b'S', b'Q', b'L', b'i', b't', b'e', b' ', ..] => "an SQLite database",
        [b'O', b'b', b'j', 1, ..] => "an Avro file",
        [b'%', b'P', b'D', b'F', ..] => "a PDF document",
        // Python's protocols 2 to 5, and the first opcode that follows.
        [0x80, 2..=5, b'}' | b']' | b'c' | b'(' | 0x8a | 0x95, ..] => "a pickle of Python",
        [0x1f, 0x8b, ..] => "a gzip file",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd file",
        [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', b'Y', ..] => "a bzip2 file",
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => "an xz file",
        [0x89, b'P', b'N', b'G', ..] | [0xff, 0xd8, 0xff, ..] => "an image",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_named_and_texts_are_not() {
        for (start, expected) in [
            (&b"PK\x03\x04\x14\0"[..], Some("a zip file, as `.npz`, `.pt` and `.docx` are")),
            (b"PAR1\x15\x04", Some("a Parquet file")),
            (b"\x80\x02}q\0", Some("a pickle of Python")),
            (b"\x1f\x8b\x08\0", Some("a gzip file")),
            (b"Hello, world", None),
            (b"PART 1", None),
            (&[1, 0, 2, 0], None),
            (b"", None),
        ] {
            assert_eq!(name(start), expected, "{start:?}");
        }
    }
}
