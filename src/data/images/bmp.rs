//! BMP of 1 to 32 bits per pixel: palettes, bit fields and run-length encoding, decoded to RGB. Alpha is dropped.

use std::io;

use super::header::ReadAt;

/// Length of the file header, which the information header follows.
const FILE_HEADER_BYTES: usize = 14;

/// (height, width), from the headers.
pub fn size(read_at: ReadAt) -> io::Result<Option<[usize; 2]>> {
    let mut head = [0; 26];
    if !read_at(0, &mut head)? {
        return Ok(None);
    }
    let long = |i: usize| i32::from_le_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    let short = |i: usize| u16::from_le_bytes([head[i], head[i + 1]]) as usize;
    Ok(match long(14) {
        12 => Some([short(20), short(18)]),
        // Rows from the top to the bottom have a negative height.
        40.. => Some([long(22).unsigned_abs() as usize, long(18).unsigned_abs() as usize]),
        _ => None,
    })
}

/// How the pixels are stored.
enum Coding {
    /// Indices of the palette, of this many bits.
    Indexed(usize),
    /// Runs of indices of this many bits.
    RunLength(usize),
    /// Blue, green, red, and bytes that are skipped: this many in all.
    Bytes(usize),
    /// Little-endian words of this many bytes, and the bits of red, green and blue in them.
    Masked(usize, [u32; 3]),
}

struct Bmp<'a> {
    coding: Coding,
    palette: Vec<[u8; 3]>,
    top_down: bool,
    /// The pixels, as stored.
    data: &'a [u8],
}

/// Decodes an image of `[height, width]` to RGB into `pixels`, which has as many bytes as that takes.
pub fn decode(file: &[u8], [height, width]: [usize; 2], pixels: &mut [u8]) -> Result<(), String> {
    let Bmp { coding, palette, top_down, data } = Bmp::parse(file)?;
    let colour = |index: u8| palette.get(usize::from(index)).copied().unwrap_or_default();
    let bits = match coding {
        Coding::Indexed(bits) => bits,
        Coding::RunLength(bits) => {
            pixels.as_chunks_mut().0.fill(colour(0));
            return for_each_run_pixel(data, bits, [height, width], |row, column, index| {
                let row = if top_down { row } else { height - 1 - row };
                pixels[3 * (row * width + column)..][..3].copy_from_slice(&colour(index));
            });
        }
        Coding::Bytes(bytes) | Coding::Masked(bytes, _) => 8 * bytes,
    };
    let row_bytes = (width * bits).div_ceil(8);
    for (row, into) in pixels.chunks_exact_mut(3 * width).enumerate() {
        let row = if top_down { row } else { height - 1 - row };
        // Rows are padded to four bytes.
        let start = row * row_bytes.next_multiple_of(4);
        let stored = data.get(start..start + row_bytes).ok_or_else(cut_short)?;
        for (x, into) in into.as_chunks_mut::<3>().0.iter_mut().enumerate() {
            *into = match coding {
                Coding::Indexed(_) | Coding::RunLength(_) => colour(packed(stored, x, bits)),
                Coding::Bytes(bytes) => [2, 1, 0].map(|i| stored[x * bytes + i]),
                Coding::Masked(bytes, masks) => {
                    let word = &stored[x * bytes..][..bytes];
                    let word = word.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
                    masks.map(|mask| scaled(word, mask))
                }
            };
        }
    }
    Ok(())
}

fn cut_short() -> String {
    "it is a damaged BMP: it is cut short".into()
}

impl<'a> Bmp<'a> {
    fn parse(file: &'a [u8]) -> Result<Self, String> {
        let word = |at: usize| {
            let bytes = file.get(at..).and_then(|rest| rest.first_chunk()).ok_or_else(cut_short)?;
            Ok::<u32, String>(u32::from_le_bytes(*bytes))
        };
        let (start, header_bytes) = (word(10)? as usize, word(14)? as usize);
        // OS/2's first header is shorter, and its palette has no fourth byte.
        let (bits, compression, colours, entry, top_down) = match header_bytes {
            12 => (word(22)? >> 16, 0, 0, 3, false),
            _ => (word(26)? >> 16, word(30)?, word(46)?, 4, (word(22)? as i32) < 0),
        };
        // The masks follow the fields of the shortest header, within a longer one or after it.
        let masks = || Ok::<_, String>([word(54)?, word(58)?, word(62)?]);
        let coding = match (bits, compression) {
            (1 | 2 | 4 | 8, 0) => Coding::Indexed(bits as usize),
            (8, 1) | (4, 2) => Coding::RunLength(bits as usize),
            (16, 0) => Coding::Masked(2, [0x7c00, 0x3e0, 0x1f]),
            (24 | 32, 0) => Coding::Bytes(bits as usize / 8),
            (16 | 32, 3 | 6) => Coding::Masked(bits as usize / 8, masks()?),
            _ => {
                return Err(format!(
                    "it is a BMP of {bits} bits per pixel with compression {compression}, which is not read: convert \
                     it to PNG"
                ));
            }
        };
        let mut palette = Vec::new();
        if bits <= 8 {
            let first = FILE_HEADER_BYTES.saturating_add(header_bytes);
            let stored = file.get(first..start.min(file.len())).ok_or_else(cut_short)?;
            let count = if colours == 0 { 1 << bits } else { colours.min(1 << bits) as usize };
            palette = stored.chunks_exact(entry).take(count).map(|bgr| [bgr[2], bgr[1], bgr[0]]).collect();
        }
        Ok(Self { coding, palette, top_down, data: file.get(start..).ok_or_else(cut_short)? })
    }
}

/// Value `x` of a row of values of `bits` bits, 1 to 8, the first in the highest bits of a byte.
pub fn packed(row: &[u8], x: usize, bits: usize) -> u8 {
    let at = x * bits;
    row[at / 8] >> (8 - bits - at % 8) & (0xff >> (8 - bits))
}

/// The bits of `mask` in `word`, scaled from their maximum to 255.
fn scaled(word: u32, mask: u32) -> u8 {
    let shift = mask.trailing_zeros() & 31;
    match mask >> shift {
        0 => 0,
        max => (u64::from((word & mask) >> shift) * 255 / u64::from(max)) as u8,
    }
}

/// Calls `set` with the stored row, the column and the index of every pixel that the runs name. A run ends with its
/// row.
fn for_each_run_pixel(
    data: &[u8],
    bits: usize,
    [height, width]: [usize; 2],
    mut set: impl FnMut(usize, usize, u8),
) -> Result<(), String> {
    let (mut at, mut row, mut column) = (0, 0, 0);
    let mut next = |count: usize| {
        let bytes = data.get(at..at + count).ok_or_else(cut_short);
        at += count;
        bytes
    };
    while row < height {
        let (count, values) = match *next(2)? {
            [0, 0] => {
                (row, column) = (row + 1, 0);
                continue;
            }
            [0, 1] => break,
            [0, 2] => {
                let moved = next(2)?;
                (column, row) = (column + usize::from(moved[0]), row + usize::from(moved[1]));
                continue;
            }
            // Literal values, padded to two bytes.
            [0, count] => {
                let count = usize::from(count);
                (count, next((count * bits).div_ceil(8).next_multiple_of(2))?)
            }
            // One byte repeated: of 4 bits each, two values in turn.
            [count, ref value] => (count.into(), std::slice::from_ref(value)),
            _ => return Err(cut_short()),
        };
        for i in 0..count.min(width.saturating_sub(column)) {
            let index = packed(values, if values.len() == 1 { i % (8 / bits) } else { i }, bits);
            set(row, column + i, index);
        }
        column += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of a 40-byte header, what follows it, and rows that are padded here.
    fn bmp(
        [height, width]: [i32; 2],
        bits: u16,
        compression: u32,
        extra: &[u8],
        rows: &[Vec<u8>],
    ) -> Vec<u8> {
        let start = 54 + extra.len() as u32;
        let mut file = b"BM\0\0\0\0\0\0\0\0".to_vec();
        file.extend(start.to_le_bytes());
        file.extend(40u32.to_le_bytes());
        file.extend([width, height].map(i32::to_le_bytes).concat());
        file.extend([1u16.to_le_bytes(), bits.to_le_bytes()].concat());
        file.extend([compression, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat());
        file.extend(extra);
        for row in rows {
            file.extend(row);
            file.resize(file.len() + row.len().next_multiple_of(4) - row.len(), 0xee);
        }
        file
    }

    fn decoded(file: &[u8], size: [usize; 2]) -> Result<Vec<u8>, String> {
        let mut pixels = vec![9; 3 * size[0] * size[1]];
        decode(file, size, &mut pixels).map(|()| pixels)
    }

    /// A value per pixel that differs along rows and columns, of at most `bits` bits.
    fn value(row: usize, column: usize, bits: usize) -> u32 {
        let mixed = (row as u32).wrapping_mul(0x9e37_79b9) ^ (column as u32 + 1).wrapping_mul(0x85eb_ca6b);
        (mixed ^ mixed >> 15) & (u32::MAX >> (32 - bits))
    }

    const HEIGHT: usize = 5;
    const WIDTHS: [usize; 8] = [1, 7, 13, 14, 15, 16, 17, 33];

    #[test]
    fn indices_of_every_width_are_read_from_padded_rows() {
        let palette = |i: u32| [(i * 15) as u8, 255 - (i * 13) as u8, (i * 7) as u8];
        for (bits, width) in [1, 2, 4, 8].into_iter().flat_map(|bits| WIDTHS.map(|width| (bits, width))) {
            let entries: Vec<u8> = (0..1 << bits).flat_map(|i| [&palette(i)[..], &[0]].concat()).collect();
            let row = |row: usize| -> Vec<u8> {
                let bits_of = |column| format!("{:0bits$b}", value(row, column, bits));
                let text: String = (0..width).map(bits_of).collect();
                let byte = |part: &[u8]| {
                    let part = format!("{:0<8}", str::from_utf8(part).unwrap());
                    u8::from_str_radix(&part, 2).unwrap()
                };
                text.as_bytes().chunks(8).map(byte).collect()
            };
            let expected = |row: usize| {
                (0..width).flat_map(move |column| {
                    let [blue, green, red] = palette(value(row, column, bits));
                    [red, green, blue]
                })
            };
            // The last row is stored first, unless the height is negative.
            let up: Vec<_> = (0..HEIGHT).rev().map(row).collect();
            let file = bmp([HEIGHT as i32, width as i32], bits as u16, 0, &entries, &up);
            let expected: Vec<u8> = (0..HEIGHT).flat_map(expected).collect();
            assert_eq!(decoded(&file, [HEIGHT, width]).unwrap(), expected, "{bits} bits, width {width}");
            let down: Vec<_> = (0..HEIGHT).map(row).collect();
            let file = bmp([-(HEIGHT as i32), width as i32], bits as u16, 0, &entries, &down);
            assert_eq!(decoded(&file, [HEIGHT, width]).unwrap(), expected, "{bits} bits, width {width}");
            let cut = decoded(&file[..file.len() - 4], [HEIGHT, width]).unwrap_err();
            assert!(cut.contains("cut short"), "{cut}");
        }
    }

    #[test]
    fn words_are_split_by_their_masks() {
        let masks = |masks: [u32; 3]| masks.map(u32::to_le_bytes).concat();
        let cases = [
            (16, 0, Vec::new(), [(10, 5), (5, 5), (0, 5)]),
            (16, 3, masks([0xf800, 0x7e0, 0x1f]), [(11, 5), (5, 6), (0, 5)]),
            (16, 3, masks([0xf00, 0xf0, 0xf]), [(8, 4), (4, 4), (0, 4)]),
            (24, 0, Vec::new(), [(16, 8), (8, 8), (0, 8)]),
            (32, 0, Vec::new(), [(16, 8), (8, 8), (0, 8)]),
            (32, 3, masks([0xff, 0xff00, 0xff_0000]), [(0, 8), (8, 8), (16, 8)]),
            (32, 3, masks([0x3ff0_0000, 0xf_fc00, 0x3ff]), [(20, 10), (10, 10), (0, 10)]),
        ];
        for ((bits, compression, extra, fields), width) in
            cases.iter().flat_map(|case| WIDTHS.map(|width| (case, width)))
        {
            let bytes = usize::from(*bits) / 8;
            let row = |row: usize| -> Vec<u8> {
                let word = |column| value(row, column, 8 * bytes).to_le_bytes();
                (0..width).flat_map(|column| word(column).into_iter().take(bytes)).collect()
            };
            let expected: Vec<u8> = (0..HEIGHT)
                .flat_map(|row| (0..width).map(move |column| value(row, column, 8 * bytes)))
                .flat_map(|word| {
                    fields.map(|(shift, len)| {
                        let max = (1u32 << len) - 1;
                        ((word >> shift & max) * 255 / max) as u8
                    })
                })
                .collect();
            let rows: Vec<_> = (0..HEIGHT).rev().map(row).collect();
            let file = bmp([HEIGHT as i32, width as i32], *bits, *compression, extra, &rows);
            assert_eq!(decoded(&file, [HEIGHT, width]).unwrap(), expected, "{bits} bits, width {width}");
        }
    }

    #[test]
    fn runs_are_read() {
        let gray =
            |count: u32| -> Vec<u8> { (0..count).flat_map(|i| [i as u8, i as u8, i as u8, 0]).collect() };
        let rows = |file: &[u8]| -> Vec<u8> {
            let pixels = decoded(file, [3, 5]).unwrap();
            pixels.chunks(3).map(|pixel| pixel[0]).collect()
        };
        // A run beyond the row, values as they are with padding, a move, and the end.
        let runs = vec![vec![9, 7, 0, 0, 0, 3, 1, 2, 3, 0, 1, 4, 0, 0, 0, 2, 3, 0, 1, 6, 0, 1]];
        let file = bmp([3, 5], 8, 1, &gray(256), &runs);
        assert_eq!(rows(&file), [0, 0, 0, 6, 0, 1, 2, 3, 4, 0, 7, 7, 7, 7, 7]);
        let runs = vec![vec![5, 0xab, 0, 0, 0, 5, 0x12, 0x34, 0x50, 0, 0, 0, 0, 1]];
        let file = bmp([3, 5], 4, 2, &gray(16), &runs);
        assert_eq!(rows(&file), [0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 10, 11, 10, 11, 10]);
        assert!(decoded(&file[..file.len() - 6], [3, 5]).unwrap_err().contains("cut short"));
        let jpeg = decoded(&bmp([3, 5], 24, 4, &[], &[]), [3, 5]).unwrap_err();
        assert!(jpeg.contains("24 bits per pixel with compression 4") && jpeg.contains("convert"), "{jpeg}");
    }
}
