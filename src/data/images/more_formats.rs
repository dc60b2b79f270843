//! GIF, BMP, TIFF, the PNM family (PPM, PGM, PBM) and, with its feature, AVIF: size from the header, and decoding to
//! bytes. Of an animation or a file of several pages, the first one is the image.

use std::io::{self, Cursor};

use tiff::decoder::{Decoder as TiffDecoder, DecodingResult, Limits};
use tiff::tags::PhotometricInterpretation;
use tiff::{ColorType, TiffError, TiffUnsupportedError};

#[cfg(feature = "avif")]
use super::avif;
use super::bmp;
use super::header::ReadAt;
use super::pnm::PnmHeader;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoreFormat {
    Gif,
    Bmp,
    Tiff,
    Pnm,
    #[cfg(feature = "avif")]
    Avif,
}

/// Entries of a TIFF directory that are looked at.
const MAX_TIFF_ENTRIES: u16 = 1024;

impl MoreFormat {
    /// The format of a file, from its first bytes.
    pub fn detect(start: &[u8]) -> Option<Self> {
        match start {
            [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some(Self::Gif),
            [b'B', b'M', _, _, _, _, 0, 0, 0, 0, ..] => Some(Self::Bmp),
            [b'I', b'I', b'*', 0, ..] | [b'M', b'M', 0, b'*', ..] => Some(Self::Tiff),
            [b'P', b'1'..=b'6', space, ..] if space.is_ascii_whitespace() => Some(Self::Pnm),
            #[cfg(feature = "avif")]
            start if super::other_formats::name(start) == Some("AVIF") => Some(Self::Avif),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Gif => "GIF",
            Self::Bmp => "BMP",
            Self::Tiff => "TIFF",
            Self::Pnm => "PNM",
            #[cfg(feature = "avif")]
            Self::Avif => "AVIF",
        }
    }

    /// (height, width), and the bytes that the decoder takes per pixel besides its output.
    pub fn size(self, read_at: ReadAt) -> io::Result<Option<([usize; 2], u64)>> {
        match self {
            // The frame in four channels, before it is drawn onto the canvas.
            Self::Gif => {
                let mut sides = [0; 4];
                let whole = read_at(6, &mut sides)?;
                let [width, height] = [[sides[0], sides[1]], [sides[2], sides[3]]].map(u16::from_le_bytes);
                Ok(whole.then_some(([height.into(), width.into()], 4)))
            }
            Self::Bmp => Ok(bmp::size(read_at)?.map(|size| (size, 0))),
            // Up to four samples of two bytes, as decoded and in one strip.
            Self::Tiff => Ok(tiff_size(read_at)?.map(|size| (size, 16))),
            Self::Pnm => Ok(PnmHeader::read(read_at)?.map(|header| ([header.height, header.width], 0))),
            #[cfg(feature = "avif")]
            Self::Avif => Ok(avif::size(read_at)?.map(|size| (size, avif::DECODER_BYTES_PER_PIXEL))),
        }
    }

    /// Decodes a file whose image has `[height, width]` into `pixels`; returns the channels.
    pub fn decode(self, file: &[u8], size: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
        match self {
            Self::Gif => decode_gif(file, size, pixels),
            Self::Bmp => {
                clear_to(pixels, 3 * size[0] * size[1]);
                bmp::decode(file, size, pixels)?;
                Ok(3)
            }
            Self::Tiff => decode_tiff(file, size, pixels),
            Self::Pnm => {
                let header = PnmHeader::parse(file).ok_or("its header is damaged")?;
                clear_to(pixels, size[0] * size[1] * header.channels());
                header.decode(file, pixels)?;
                Ok(header.channels())
            }
            #[cfg(feature = "avif")]
            Self::Avif => avif::decode(file, size, pixels),
        }
    }
}

fn clear_to(pixels: &mut Vec<u8>, bytes: usize) {
    pixels.clear();
    pixels.reserve_exact(bytes);
    pixels.resize(bytes, 0);
}

fn damaged(format: MoreFormat, error: &dyn std::fmt::Display) -> String {
    let text: String = error.to_string().chars().take(300).collect();
    format!("it is a damaged {}: {text}", format.name())
}

/// Width and length are in the first directory.
fn tiff_size(read_at: ReadAt) -> io::Result<Option<[usize; 2]>> {
    let mut head = [0; 8];
    if !read_at(0, &mut head)? {
        return Ok(None);
    }
    let big = head[0] == b'M';
    let short = |b: [u8; 2]| if big { u16::from_be_bytes(b) } else { u16::from_le_bytes(b) };
    let long = |b: [u8; 4]| if big { u32::from_be_bytes(b) } else { u32::from_le_bytes(b) };
    let start = u64::from(long([head[4], head[5], head[6], head[7]]));
    let mut count = [0; 2];
    if !read_at(start, &mut count)? {
        return Ok(None);
    }
    let (mut width, mut height) = (None, None);
    for i in 0..u64::from(short(count).min(MAX_TIFF_ENTRIES)) {
        let mut entry = [0; 12];
        if !read_at(start + 2 + 12 * i, &mut entry)? {
            return Ok(None);
        }
        let value = match short([entry[2], entry[3]]) {
            3 => u32::from(short([entry[8], entry[9]])),
            4 => long([entry[8], entry[9], entry[10], entry[11]]),
            _ => continue,
        };
        match short([entry[0], entry[1]]) {
            256 => width = Some(value as usize),
            257 => height = Some(value as usize),
            _ => {}
        }
    }
    Ok(height.zip(width).map(|(height, width)| [height, width]))
}

/// Draws the first frame onto a transparent canvas of the size that the header declares.
fn decode_gif(file: &[u8], [height, width]: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
    let wrong = |error: gif::DecodingError| damaged(MoreFormat::Gif, &error);
    let mut options = gif::DecodeOptions::new();
    options.set_color_output(gif::ColorOutput::RGBA);
    options.check_frame_consistency(true);
    let mut decoder = options.read_info(file).map_err(wrong)?;
    let frame = decoder.read_next_frame().map_err(wrong)?.ok_or("it has no frame")?;
    let (left, top) = (usize::from(frame.left), usize::from(frame.top));
    let (columns, rows) = (usize::from(frame.width), usize::from(frame.height));
    clear_to(pixels, 4 * height * width);
    if left + columns > width || top + rows > height || frame.buffer.len() != 4 * columns * rows {
        return Err("its first frame is larger than the image".into());
    }
    for (row, from) in frame.buffer.chunks_exact(4 * columns.max(1)).enumerate() {
        let at = 4 * ((top + row) * width + left);
        pixels[at..at + from.len()].copy_from_slice(from);
    }
    Ok(4)
}

fn decode_tiff(file: &[u8], [height, width]: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
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
            TiffUnsupportedError::InterpretationWithBits(PhotometricInterpretation::RGBPalette, _) => {
                "palette"
            }
            TiffUnsupportedError::UnknownCompressionMethod
            | TiffUnsupportedError::UnsupportedCompressionMethod(_) => "compression",
            _ => "pixel format",
        }),
        error => damaged(MoreFormat::Tiff, &error),
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
        decode_tiff(file, size, &mut pixels).map(|channels| (channels, pixels))
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
            (tiff([1, 3], 8, 1, 3, 1, &[0, 1, 2]), "palette"),
            (tiff([1, 8], 1, 1, 0, 4, &[0]), "compression"),
            (tiff([1, 1], 32, 1, 1, 1, &[0; 4]), "pixel format"),
        ] {
            let error = decoded(&file, [1, 3]).unwrap_err();
            assert_eq!(error, unread_tiff(expected));
        }
        assert!(decoded(&tiff([1, 3], 8, 1, 1, 1, &[0]), [1, 3]).unwrap_err().contains("damaged"));
    }
}
