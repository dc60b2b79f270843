//! Decodes JPEG, PNG and WebP, and [other formats](super::more_formats). The format is detected from the content.
//!
//! Output is (height, width, channels) bytes with the EXIF orientation applied. Alpha is dropped; grayscale and RGB are
//! converted to match `channels`. Dimensions in a header are checked against a pixel limit before anything is allocated
//! for them. Errors are messages about the image.

use std::io::Cursor;

use image_webp::WebPDecoder;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use super::exif::{self, Orientation};
use super::header::ImageHeader;
use super::more_formats::MoreFormat;
use super::other_formats;

/// An image with a validated header.
pub struct ImageDecoder<'a> {
    pub header: ImageHeader,
    height: usize,
    width: usize,
    /// Channels of a sample: 1 or 3.
    channels: usize,
    orientation: Orientation,
    decoder: FormatDecoder<'a>,
}

enum FormatDecoder<'a> {
    Jpeg(Box<JpegDecoder<ZCursor<&'a [u8]>>>),
    Png(Box<png::Reader<Cursor<&'a [u8]>>>),
    Webp(Box<WebPDecoder<Cursor<&'a [u8]>>>),
    More(MoreFormat, &'a [u8]),
}

impl<'a> ImageDecoder<'a> {
    /// Reads the header of `file` and refuses an image of more than `max_pixels`.
    pub fn new(file: &'a [u8], channels: usize, max_pixels: u64) -> Result<Self, String> {
        let (decoder, [height, width], orientation) = match file {
            [] => return Err("it is empty".into()),
            [0xff, 0xd8, 0xff, ..] => jpeg(file, channels)?,
            [0x89, b'P', b'N', b'G', ..] => png(file, max_pixels)?,
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => webp(file)?,
            _ => match MoreFormat::detect(file) {
                Some(format) => more(format, file, channels)?,
                None => return Err(other_formats::problem(file)),
            },
        };
        let pixels = (height as u64).saturating_mul(width as u64);
        if pixels == 0 {
            return Err("it has no pixels".into());
        }
        if pixels > max_pixels {
            return Err(format!(
                "its header declares {width} x {height} pixels, more than `max_pixels`, {max_pixels}"
            ));
        }
        // The memory estimate uses `ImageHeader`, so both parsers must agree on the size.
        let header = ImageHeader::parse(file, channels).ok_or("its header is damaged")?;
        if [header.height, header.width] != [height, width] {
            return Err(format!(
                "its headers differ: {} x {} pixels and {width} x {height}",
                header.width, header.height
            ));
        }
        Ok(Self { header, height, width, channels, orientation, decoder })
    }

    /// Decodes into `pixels`; `scratch` holds the intermediate image if channels or orientation change. Returns
    /// (height, width).
    pub fn decode(self, pixels: &mut Vec<u8>, scratch: &mut Vec<u8>) -> Result<[usize; 2], String> {
        let count = self.height * self.width;
        let source_channels = match self.decoder {
            FormatDecoder::Jpeg(mut decoder) => {
                let space = decoder.output_colorspace().unwrap_or(ColorSpace::RGB);
                let size = decoder.output_buffer_size().ok_or("its header has no size")?;
                pixels.clear();
                pixels.reserve_exact(size);
                pixels.resize(size, 0);
                decoder.decode_into(pixels).map_err(|e| decode_error("JPEG", &e))?;
                space.num_components()
            }
            FormatDecoder::Png(mut reader) => {
                let size = reader.output_buffer_size().ok_or("its header has no size")?;
                pixels.clear();
                pixels.reserve_exact(size);
                pixels.resize(size, 0);
                let info = reader.next_frame(pixels).map_err(|e| decode_error("PNG", &e))?;
                // Read to the end of the file to verify its checksums and detect truncation.
                reader.finish().map_err(|e| decode_error("PNG", &e))?;
                pixels.truncate(info.buffer_size());
                info.color_type.samples()
            }
            FormatDecoder::Webp(mut decoder) => {
                let size = decoder.output_buffer_size().ok_or("its header has no size")?;
                pixels.clear();
                pixels.reserve_exact(size);
                pixels.resize(size, 0);
                // Of an animation, the first frame.
                decoder.read_image(pixels).map_err(|e| decode_error("WebP", &e))?;
                if decoder.has_alpha() { 4 } else { 3 }
            }
            FormatDecoder::More(format, file) => format.decode(file, [self.height, self.width], pixels)?,
        };
        if pixels.len() != count * source_channels {
            return Err(format!("it decodes to {} bytes for {count} pixels", pixels.len()));
        }
        if source_channels != self.channels {
            scratch.resize(count * self.channels, 0);
            convert_channels(pixels, source_channels, scratch, self.channels);
            std::mem::swap(pixels, scratch);
        }
        let size = [self.height, self.width];
        if self.orientation == Orientation::default() {
            return Ok(size);
        }
        scratch.resize(pixels.len(), 0);
        let size = self.orientation.apply(pixels, size, self.channels, scratch);
        std::mem::swap(pixels, scratch);
        Ok(size)
    }
}

type OpenedFormat<'a> = (FormatDecoder<'a>, [usize; 2], Orientation);

fn decode_error(format: &str, error: &dyn std::fmt::Display) -> String {
    let mut text = format!("it is a damaged {format}: {error}");
    // Some decoders put whole tables into their messages.
    if let Some((end, _)) = text.char_indices().nth(300) {
        text.truncate(end);
    }
    text
}

fn jpeg(file: &[u8], channels: usize) -> Result<OpenedFormat<'_>, String> {
    // Strict mode: a truncated file is an error, not an image whose rest is gray.
    let options =
        DecoderOptions::default().set_strict_mode(true).set_max_width(65_535).set_max_height(65_535);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
    decoder.decode_headers().map_err(|e| decode_error("JPEG", &e))?;
    let input = decoder.input_colorspace().unwrap_or(ColorSpace::YCbCr);
    let grey = channels == 1 && matches!(input, ColorSpace::YCbCr | ColorSpace::Luma);
    let space = if grey || input == ColorSpace::Luma { ColorSpace::Luma } else { ColorSpace::RGB };
    decoder.set_options(options.jpeg_set_out_colorspace(space));
    let (width, height) = decoder.dimensions().ok_or("its header has no size")?;
    let orientation = decoder.exif().map(|exif| exif::read_orientation(exif)).unwrap_or_default();
    Ok((FormatDecoder::Jpeg(Box::new(decoder)), [height, width], orientation))
}

fn png(file: &[u8], max_pixels: u64) -> Result<OpenedFormat<'_>, String> {
    let bytes = usize::try_from(max_pixels.saturating_mul(8)).unwrap_or(usize::MAX);
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), png::Limits { bytes });
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let reader = decoder.read_info().map_err(|e| decode_error("PNG", &e))?;
    let info = reader.info();
    let orientation = info.exif_metadata.as_deref().map(exif::read_orientation).unwrap_or_default();
    let size = [info.height as usize, info.width as usize];
    Ok((FormatDecoder::Png(Box::new(reader)), size, orientation))
}

fn more(format: MoreFormat, file: &[u8], channels: usize) -> Result<OpenedFormat<'_>, String> {
    let header = ImageHeader::parse(file, channels);
    let header =
        header.ok_or_else(|| format!("it is a damaged {}: its header has no size", format.name()))?;
    Ok((FormatDecoder::More(format, file), [header.height, header.width], Orientation::default()))
}

fn webp(file: &[u8]) -> Result<OpenedFormat<'_>, String> {
    let mut decoder = WebPDecoder::new(Cursor::new(file)).map_err(|e| decode_error("WebP", &e))?;
    let (width, height) = decoder.dimensions();
    // The decoder allocates for the size in the frame header, which may contradict the container.
    if !decoder.is_animated()
        && let Some(frame) = lossy_frame(file)
        && frame != [height, width]
    {
        return Err(format!(
            "its frame has {} x {} pixels, but its header declares {width} x {height}",
            frame[1], frame[0]
        ));
    }
    decoder.set_memory_limit(file.len());
    let orientation =
        decoder.exif_metadata().ok().flatten().map(|exif| exif::read_orientation(&exif)).unwrap_or_default();
    Ok((FormatDecoder::Webp(Box::new(decoder)), [height as usize, width as usize], orientation))
}

/// (height, width) of the lossy frame of a WebP file, if it has one.
fn lossy_frame(file: &[u8]) -> Option<[u32; 2]> {
    let mut at = 12;
    loop {
        let head = file.get(at..at + 8)?;
        let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if &head[..4] == b"VP8 " {
            // A 3-byte frame tag, a 3-byte start code, then width and height in 14 bits each.
            let size = file.get(at + 14..at + 18)?;
            let side = |i: usize| (u16::from_le_bytes([size[i], size[i + 1]]) & 0x3fff) as u32;
            return Some([side(2), side(0)]);
        }
        at = at.checked_add(8 + len + len % 2)?;
    }
}

/// Converts grayscale or RGB, each with or without alpha, to grayscale or RGB.
fn convert_channels(pixels: &[u8], from_channels: usize, into: &mut [u8], to_channels: usize) {
    // Luma with Pillow's rounding.
    let luma =
        |p: &[u8]| ((p[0] as u32 * 19595 + p[1] as u32 * 38470 + p[2] as u32 * 7471 + 0x8000) >> 16) as u8;
    for (pixel, into) in pixels.chunks_exact(from_channels).zip(into.chunks_exact_mut(to_channels)) {
        match (pixel, into) {
            ([grey] | [grey, _], into) => into.fill(*grey),
            (colour, [grey]) => *grey = luma(colour),
            (colour, into) => into.copy_from_slice(&colour[..into.len()]),
        }
    }
}

#[cfg(test)]
mod tests;
