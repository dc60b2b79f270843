//! TIFF images: size from the first directory, and decoding to bytes, also of palettes and inks.

use std::io::{self, Cursor};

use tiff::decoder::{Decoder as TiffDecoder, DecodingResult, Limits};
use tiff::tags::Tag;
use tiff::{ColorType, TiffError, TiffUnsupportedError};

use super::bmp;
use super::header::ReadAt;

/// Entries of a directory that are looked at.
const MAX_TIFF_ENTRIES: u16 = 1024;
/// Tags, and the photometric interpretation of palettes.
const WIDTH: u16 = 256;
const LENGTH: u16 = 257;
const PHOTOMETRIC: u16 = 262;
const PALETTE: u32 = 3;

/// [height, width].
pub fn size(read_at: ReadAt) -> io::Result<Option<[usize; 2]>> {
    let (mut width, mut height) = (None, None);
    let whole = for_each_entry(read_at, &mut |entry| match entry.tag {
        WIDTH => width = Some(entry.value as usize),
        LENGTH => height = Some(entry.value as usize),
        _ => {}
    })?;
    Ok(height.zip(width).filter(|_| whole).map(|(height, width)| [height, width]))
}

/// A number of one value in the first directory.
struct DirectoryEntry {
    tag: u16,
    value: u32,
    /// Where the value is in the file.
    at: u64,
}

/// Calls `visit` with the numbers of the first directory; false if the file ends before it.
fn for_each_entry(read_at: ReadAt, visit: &mut dyn FnMut(DirectoryEntry)) -> io::Result<bool> {
    let mut head = [0; 8];
    if !read_at(0, &mut head)? {
        return Ok(false);
    }
    let big = head[0] == b'M';
    let short = |b: [u8; 2]| if big { u16::from_be_bytes(b) } else { u16::from_le_bytes(b) };
    let long = |b: [u8; 4]| if big { u32::from_be_bytes(b) } else { u32::from_le_bytes(b) };
    let start = u64::from(long([head[4], head[5], head[6], head[7]]));
    let mut count = [0; 2];
    if !read_at(start, &mut count)? {
        return Ok(false);
    }
    for i in 0..u64::from(short(count).min(MAX_TIFF_ENTRIES)) {
        let mut entry = [0; 12];
        if !read_at(start + 2 + 12 * i, &mut entry)? {
            return Ok(false);
        }
        let value = match short([entry[2], entry[3]]) {
            3 => u32::from(short([entry[8], entry[9]])),
            4 => long([entry[8], entry[9], entry[10], entry[11]]),
            _ => continue,
        };
        visit(DirectoryEntry { tag: short([entry[0], entry[1]]), value, at: start + 2 + 12 * i + 8 });
    }
    Ok(true)
}

/// Decodes a file whose image has `[height, width]` into `pixels`; returns the channels.
pub fn decode(file: &[u8], size: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
    match with_gray_indices(file) {
        Some(indices) => decode_palette(&indices, size, pixels),
        None => decode_colors(file, size, pixels),
    }
}

/// A copy of a file of palette colors that says it is gray, so that the decoder returns the indices; `None` for
/// others.
fn with_gray_indices(file: &[u8]) -> Option<Vec<u8>> {
    let mut read_at = |at: u64, into: &mut [u8]| {
        let part = usize::try_from(at).ok().and_then(|at| file.get(at..at.checked_add(into.len())?));
        part.inspect(|part| into.copy_from_slice(part));
        Ok(part.is_some())
    };
    let mut at = None;
    let found = for_each_entry(&mut read_at, &mut |entry| {
        if (entry.tag, entry.value) == (PHOTOMETRIC, PALETTE) {
            at = Some(entry.at as usize);
        }
    });
    let at = at.filter(|_| found.is_ok())?;
    let mut gray = file.to_vec();
    // A short in the order of the file: 1 for 3.
    gray.get_mut(at..at + 2)?.iter_mut().filter(|byte| **byte == PALETTE as u8).for_each(|byte| *byte = 1);
    Some(gray)
}

/// Decodes indices, and looks up their colors.
fn decode_palette(file: &[u8], size: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
    let mut decoder = TiffDecoder::new(Cursor::new(file)).map_err(tiff_error)?;
    let bits = match decoder.colortype().map_err(tiff_error)? {
        ColorType::Gray(bits @ (1 | 2 | 4 | 8)) => bits,
        _ => return Err(unread_tiff("palette")),
    };
    let colors = decoder.get_tag_u16_vec(Tag::ColorMap).map_err(tiff_error)?;
    let count = 1usize << bits;
    if colors.len() != 3 * count {
        return Err(format!("its palette has {} values, and {} are expected", colors.len(), 3 * count));
    }
    decode_colors(file, size, pixels)?;
    let step = usize::from(u8::MAX) / (count - 1);
    // In place, from the end: three bytes for each.
    let indices = pixels.len();
    pixels.resize(3 * indices, 0);
    for i in (0..indices).rev() {
        let index = usize::from(pixels[i]) / step;
        // The upper byte, as for PNG.
        let color = [0, 1, 2].map(|channel| (colors[channel * count + index] >> 8) as u8);
        pixels[3 * i..3 * i + 3].copy_from_slice(&color);
    }
    Ok(3)
}

fn decode_colors(file: &[u8], [height, width]: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
    let mut limits = Limits::default();
    limits.decoding_buffer_size = height.saturating_mul(width).saturating_mul(8);
    limits.intermediate_buffer_size = limits.decoding_buffer_size.saturating_add(1 << 16);
    let mut decoder = TiffDecoder::new(Cursor::new(file)).map_err(tiff_error)?.with_limits(limits);
    let colour = decoder.colortype().map_err(tiff_error)?;
    let channels = match colour {
        ColorType::Gray(1 | 2 | 4 | 8 | 16) => 1,
        ColorType::GrayA(8 | 16) => 2,
        ColorType::RGB(8 | 16) | ColorType::CMYK(8 | 16) => 3,
        ColorType::RGBA(8 | 16) => 4,
        _ => return Err(unread_tiff("pixel format")),
    };
    let decoded = decoder.read_image().map_err(tiff_error)?;
    pixels.clear();
    match (colour, decoded) {
        (ColorType::Gray(bits @ (1 | 2 | 4)), DecodingResult::U8(values)) => {
            let bits = usize::from(bits);
            let white = u8::MAX / ((1 << bits) - 1);
            let row = |row: &[u8]| pixels.extend((0..width).map(|x| white * bmp::packed(row, x, bits)));
            values.chunks_exact((width * bits).div_ceil(8)).for_each(row);
        }
        (ColorType::CMYK(_), DecodingResult::U8(values)) => {
            pixels.extend(values.chunks_exact(4).flat_map(cmyk))
        }
        (ColorType::CMYK(_), DecodingResult::U16(values)) => {
            let upper = |sample: &[u16]| [0, 1, 2, 3].map(|i| (sample[i] >> 8) as u8);
            pixels.extend(values.chunks_exact(4).flat_map(|sample| cmyk(&upper(sample))));
        }
        (_, DecodingResult::U8(values)) => *pixels = values,
        // The upper byte, as for PNG.
        (_, DecodingResult::U16(values)) => pixels.extend(values.iter().map(|value| (value >> 8) as u8)),
        _ => return Err(unread_tiff("pixel format")),
    }
    Ok(channels)
}

/// RGB of cyan, magenta, yellow and black, with Pillow's rounding.
fn cmyk(ink: &[u8]) -> [u8; 3] {
    let light = 255 - u32::from(ink[3]);
    [0, 1, 2].map(|i| {
        let product = u32::from(ink[i]) * light + 128;
        (light - (((product >> 8) + product) >> 8)) as u8
    })
}

fn tiff_error(error: TiffError) -> String {
    match error {
        TiffError::UnsupportedError(error) => unread_tiff(match error {
            TiffUnsupportedError::UnknownCompressionMethod
            | TiffUnsupportedError::UnsupportedCompressionMethod(_) => "compression",
            _ => "pixel format",
        }),
        error => format!("it is a damaged TIFF: {}", error.to_string().chars().take(300).collect::<String>()),
    }
}

fn unread_tiff(what: &str) -> String {
    format!("it is a TIFF whose {what} is not read; `magick mogrify -format png *.tif` converts it")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of one strip.
    fn tiff(
        [height, width]: [u16; 2],
        bits: u16,
        samples: u16,
        photometric: u16,
        compression: u16,
        data: &[u8],
    ) -> Vec<u8> {
        let entries = [
            (256, width),
            (257, height),
            (258, bits),
            (259, compression),
            (262, photometric),
            (273, 8 + 2 + 9 * 12 + 4),
            (277, samples),
            (278, height),
            (279, data.len() as u16),
        ];
        let mut file = b"II*\0\x08\0\0\0\x09\0".to_vec();
        for (tag, value) in entries {
            // A short, of which there is one.
            file.extend([tag, 3, 1, 0, value, 0].map(u16::to_le_bytes).concat());
        }
        file.extend([0; 4]);
        file.extend(data);
        file
    }

    fn decoded(file: &[u8], size: [usize; 2]) -> Result<(usize, Vec<u8>), String> {
        let mut pixels = Vec::new();
        decode(file, size, &mut pixels).map(|channels| (channels, pixels))
    }

    #[test]
    fn tiffs_of_few_bits_and_of_inks_are_read() {
        let bits = [0b1010_0000, 0b1000_0000, 0b0101_1111, 0];
        let expected = [[255, 0, 255, 0, 0, 0, 0, 0, 255], [0, 255, 0, 255, 255, 255, 255, 255, 0]].concat();
        assert_eq!(decoded(&tiff([2, 9], 1, 1, 1, 1, &bits), [2, 9]).unwrap(), (1, expected.clone()));
        // White is 0.
        let inverted: Vec<u8> = expected.iter().map(|value| 255 - value).collect();
        assert_eq!(decoded(&tiff([2, 9], 1, 1, 0, 1, &bits), [2, 9]).unwrap(), (1, inverted));
        assert_eq!(decoded(&tiff([1, 3], 4, 1, 1, 1, &[0x0f, 0x30]), [1, 3]).unwrap(), (1, vec![0, 255, 51]));
        let inks = [0, 0, 0, 0, 255, 0, 0, 0, 0, 128, 255, 128];
        let expected = vec![255, 255, 255, 0, 255, 255, 127, 63, 0];
        assert_eq!(decoded(&tiff([1, 3], 8, 4, 5, 1, &inks), [1, 3]).unwrap(), (3, expected));
    }

    #[test]
    fn tiffs_that_are_not_read_are_not_called_damaged() {
        for (file, expected) in [
            (tiff([1, 3], 16, 1, 3, 1, &[0; 6]), "palette"),
            (tiff([1, 8], 1, 1, 0, 4, &[0]), "compression"),
            (tiff([1, 1], 32, 1, 1, 1, &[0; 4]), "pixel format"),
        ] {
            let error = decoded(&file, [1, 3]).unwrap_err();
            assert_eq!(error, unread_tiff(expected));
        }
        assert!(decoded(&tiff([1, 3], 8, 1, 1, 1, &[0]), [1, 3]).unwrap_err().contains("damaged"));
    }

    #[test]
    fn palettes_are_looked_up() {
        // The palette is behind the strip: 16 values of red, of green and of blue.
        let mut file = tiff([1, 3], 4, 1, 3, 1, &[0x0f, 0x30]);
        let (palette, count): (u32, u32) = (file.len() as u32, 48);
        let values = (0..48u16).map(|i| (i / 16 * 64 + i % 16) << 8);
        file.extend(values.flat_map(u16::to_le_bytes));
        // The entry of the palette takes the place of the number of rows in a strip.
        let at = 10 + 7 * 12;
        let entry =
            [&320u16.to_le_bytes()[..], &3u16.to_le_bytes(), &count.to_le_bytes(), &palette.to_le_bytes()]
                .concat();
        file[at..at + 12].copy_from_slice(&entry);
        let expected = vec![0, 64, 128, 15, 79, 143, 3, 67, 131];
        assert_eq!(decoded(&file, [1, 3]).unwrap(), (3, expected));
        let short = tiff([1, 3], 8, 1, 3, 1, &[0, 1, 2]);
        assert!(decoded(&short, [1, 3]).is_err(), "no palette");
    }
}
