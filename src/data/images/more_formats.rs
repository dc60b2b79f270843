//! GIF, BMP, TIFF, the PNM family (PPM, PGM, PBM) and, with its feature, AVIF: size from the header, and decoding to
//! bytes. Of an animation or a file of several pages, the first one is the image.

use std::io;

#[cfg(feature = "avif")]
use super::avif;
use super::bmp;
use super::header::ReadAt;
use super::pnm::PnmHeader;
use super::tiff_image;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoreFormat {
    Gif,
    Bmp,
    Tiff,
    Pnm,
    #[cfg(feature = "avif")]
    Avif,
}

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
            Self::Tiff => Ok(tiff_image::size(read_at)?.map(|size| (size, 16))),
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
            Self::Tiff => tiff_image::decode(file, size, pixels),
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
