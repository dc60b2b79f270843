//! Reads the EXIF orientation of an image and applies it.

/// Pixel orientation: mirrored along one or both axes, then transposed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Orientation {
    mirror_rows: bool,
    mirror_columns: bool,
    transpose: bool,
}

/// Orientation from an EXIF block (TIFF data); the identity if the tag is absent or invalid.
pub fn read_orientation(block: &[u8]) -> Orientation {
    let turn =
        |mirror_rows, mirror_columns, transpose| Orientation { mirror_rows, mirror_columns, transpose };
    match orientation_tag(block) {
        Some(2) => turn(false, true, false),
        Some(3) => turn(true, true, false),
        Some(4) => turn(true, false, false),
        Some(5) => turn(false, false, true),
        Some(6) => turn(true, false, true),
        Some(7) => turn(true, true, true),
        Some(8) => turn(false, true, true),
        _ => Orientation::default(),
    }
}

fn orientation_tag(block: &[u8]) -> Option<u32> {
    let tiff = block.strip_prefix(b"Exif\0\0").unwrap_or(block);
    let mut reader = exif::Reader::new();
    // Cameras and editors write blocks that end early.
    let exif = reader.continue_on_error(true).read_raw(tiff.to_vec());
    let exif = exif.or_else(|error| error.distill_partial_result(|_| {})).ok()?;
    exif.get_field(exif::Tag::Orientation, exif::In::PRIMARY)?.value.get_uint(0)
}

impl Orientation {
    /// Writes `pixels`, (`height`, `width`, `channels`), upright to `into`; returns the new (height, width).
    pub fn apply(
        self,
        pixels: &[u8],
        [height, width]: [usize; 2],
        channels: usize,
        into: &mut [u8],
    ) -> [usize; 2] {
        let out = if self.transpose { [width, height] } else { [height, width] };
        for (i, into) in into.chunks_exact_mut(channels).enumerate() {
            let (row, column) = (i / out[1], i % out[1]);
            let (row, column) = if self.transpose { (column, row) } else { (row, column) };
            let row = if self.mirror_rows { height - 1 - row } else { row };
            let column = if self.mirror_columns { width - 1 - column } else { column };
            into.copy_from_slice(&pixels[(row * width + column) * channels..][..channels]);
        }
        out
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An EXIF block with one other entry before the orientation.
    pub fn block(orientation: u16, little: bool) -> Vec<u8> {
        let short = |v: u16| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let long = |v: u32| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let mut bytes = if little { b"II*\0".to_vec() } else { b"MM\0*".to_vec() };
        bytes.extend(long(8));
        bytes.extend(short(2));
        for (tag, value) in [(0x0100, 640), (0x0112, orientation)] {
            bytes.extend([short(tag), short(3)].concat());
            bytes.extend(long(1));
            bytes.extend([short(value), short(0)].concat());
        }
        bytes
    }

    #[test]
    fn the_eight_orientations_come_out_upright() {
        // What a camera stores for the upright image `1 2 3 / 4 5 6` under each of the eight orientations of the
        // standard.
        let stored: [(&[u8], [usize; 2]); 8] = [
            (&[1, 2, 3, 4, 5, 6], [2, 3]),
            (&[3, 2, 1, 6, 5, 4], [2, 3]),
            (&[6, 5, 4, 3, 2, 1], [2, 3]),
            (&[4, 5, 6, 1, 2, 3], [2, 3]),
            (&[1, 4, 2, 5, 3, 6], [3, 2]),
            (&[3, 6, 2, 5, 1, 4], [3, 2]),
            (&[6, 3, 5, 2, 4, 1], [3, 2]),
            (&[4, 1, 5, 2, 6, 3], [3, 2]),
        ];
        for (i, (pixels, size)) in stored.into_iter().enumerate() {
            for little in [true, false] {
                let turn = read_orientation(&block(i as u16 + 1, little));
                let mut out = [0; 6];
                assert_eq!(turn.apply(pixels, size, 1, &mut out), [2, 3], "orientation {}", i + 1);
                assert_eq!(out, [1, 2, 3, 4, 5, 6], "orientation {}", i + 1);
            }
        }
        assert_eq!(read_orientation(&block(9, true)), Orientation::default());
    }

    proptest! {
        #[test]
        fn any_block_is_read_or_ignored(bytes in prop::collection::vec(any::<u8>(), 0..60), cut in 0usize..40) {
            read_orientation(&bytes);
            let whole = block(6, false);
            read_orientation(&whole[..cut.min(whole.len())]);
            read_orientation(&[b"MM\0*\0\0\0\x08".to_vec(), bytes].concat());
        }
    }
}
