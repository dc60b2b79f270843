//! AVIF images: the size from the container, and decoding to RGB or grayscale. Of the cargo feature `avif`.
//!
//! Refuses grids, rotation and mirroring by the container. The first image of a sequence is decoded.

use std::io;

use re_rav1d::dav1d::pixel::{MatrixCoefficients, YUVRange};
use re_rav1d::dav1d::{Decoder, Error, Picture, PixelLayout, PlanarImageComponent, Settings};

use super::header::ReadAt;
use crate::base::panics::catch_panic;

/// Bytes per pixel that decoding takes besides its output: copies of the compressed image, three planes of 16 bits in
/// whole blocks, and what the decoder keeps per block.
pub const DECODER_BYTES_PER_PIXEL: u64 = 20;

/// Boxes that are looked at before the parser gives up.
const MAX_BOXES: usize = 200;

/// (height, width) of the largest image that the container describes.
pub fn size(read_at: ReadAt) -> io::Result<Option<[usize; 2]>> {
    let mut largest: Option<[usize; 2]> = None;
    // The properties of all items are in meta/iprp/ipco.
    let (mut at, mut boxes) = (0u64, 0);
    while boxes < MAX_BOXES {
        boxes += 1;
        let mut head = [0; 20];
        let whole = read_at(at, &mut head)?;
        if !whole && !read_at(at, &mut head[..8])? {
            break;
        }
        let word = |i: usize| u32::from_be_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
        at += match &head[4..8] {
            // Into the box: `meta` has a version before its children.
            b"meta" => 12,
            b"iprp" | b"ipco" => 8,
            b"ispe" if whole => {
                let found = [word(16) as usize, word(12) as usize];
                if largest.is_none_or(|known| known[0] * known[1] < found[0].saturating_mul(found[1])) {
                    largest = Some(found);
                }
                u64::from(word(0))
            }
            // What follows the metadata are the images.
            b"mdat" => break,
            _ if word(0) < 8 => break,
            _ => u64::from(word(0)),
        };
    }
    Ok(largest)
}

/// Decodes into `pixels`; returns the channels.
pub fn decode(file: &[u8], size: [usize; 2], pixels: &mut Vec<u8>) -> Result<usize, String> {
    // Properties that rotate or mirror the image; the metadata precedes the data.
    let metadata = &file[..memchr::memmem::find(file, b"mdat").unwrap_or(file.len())];
    if [&b"irot"[..], b"imir"].iter().any(|kind| memchr::memmem::find(metadata, kind).is_some()) {
        return Err("it is an AVIF that its container rotates, which is not supported; convert it".into());
    }
    let damaged = |error: &dyn std::fmt::Display| {
        let text: String = error.to_string().chars().take(300).collect();
        format!("it is a damaged AVIF: {text}")
    };
    let decoded = catch_panic(|| -> Result<Picture, String> {
        let items = avif_parse::read_avif(&mut &file[..]).map_err(|error| damaged(&error))?;
        decode_picture(items.primary_item.to_vec(), size).map_err(|error| damaged(&error))
    });
    let picture = decoded.map_err(|panic| damaged(&panic))??;
    if [picture.height() as usize, picture.width() as usize] != size {
        return Err(damaged(&"its frame has another size than its header"));
    }
    to_pixels(&picture, size, pixels).ok_or_else(|| damaged(&"a plane is too short"))
}

fn decode_picture(data: Vec<u8>, [height, width]: [usize; 2]) -> Result<Picture, Error> {
    let mut settings = Settings::new();
    settings.set_n_threads(1);
    settings.set_max_frame_delay(1);
    settings.set_frame_size_limit(u32::try_from(height * width).unwrap_or(u32::MAX));
    let mut decoder = Decoder::with_settings(&settings)?;
    let mut sent = decoder.send_data(data, None, None, None);
    loop {
        match decoder.get_picture() {
            // The decoder wants the rest of the data.
            Err(Error::Again) if sent == Err(Error::Again) => sent = decoder.send_pending_data(),
            other => return other,
        }
    }
}

/// Converts the planes to RGB, or to grayscale if there is no color; `None` if a plane is too short.
fn to_pixels(picture: &Picture, [height, width]: [usize; 2], pixels: &mut Vec<u8>) -> Option<usize> {
    let layout = picture.pixel_layout();
    let bits = picture.bits_per_component().map_or(8, |bits| bits.0);
    let plane = |component| Plane {
        values: picture.plane(component),
        stride: picture.stride(component) as usize,
        wide: bits > 8,
    };
    let luma = plane(PlanarImageComponent::Y);
    let unit = f32::from(1u16 << (bits - 8));
    let most = 256.0 * unit - 1.0;
    let full = picture.color_range() == YUVRange::Full;
    let gray = |y: f32| if full { y / most } else { (y - 16.0 * unit) / (219.0 * unit) };
    let byte = |value: f32| (value * 255.0 + 0.5).clamp(0.0, 255.0) as u8;
    pixels.clear();
    if layout == PixelLayout::I400 {
        pixels.reserve_exact(height * width);
        for y in 0..height {
            for x in 0..width {
                pixels.push(byte(gray(luma.at(y, x)?)));
            }
        }
        return Some(1);
    }
    let chroma = [plane(PlanarImageComponent::U), plane(PlanarImageComponent::V)];
    let halved = match layout {
        PixelLayout::I420 => [true, true],
        PixelLayout::I422 => [false, true],
        _ => [false, false],
    };
    let identity = picture.matrix_coefficients() == MatrixCoefficients::Identity;
    let (red, blue) = weights(picture.matrix_coefficients());
    let green = 1.0 - red - blue;
    let half = 128.0 * unit;
    let color = |c: f32| if full { (c - half) / most } else { (c - half) / (224.0 * unit) };
    pixels.reserve_exact(3 * height * width);
    for y in 0..height {
        let rows = neighbors(y, height, halved[0]);
        for x in 0..width {
            let columns = neighbors(x, width, halved[1]);
            let sample = |plane: &Plane| -> Option<f32> {
                let mut sum = 0.0;
                for (row, down) in rows {
                    for (column, across) in columns {
                        sum += down * across * plane.at(row, column)?;
                    }
                }
                Some(sum)
            };
            let (luma, u, v) = (luma.at(y, x)?, sample(&chroma[0])?, sample(&chroma[1])?);
            let [r, g, b] = match identity {
                true => [gray(v), gray(luma), gray(u)],
                false => {
                    let (luma, u, v) = (gray(luma), color(u), color(v));
                    let r = luma + 2.0 * (1.0 - red) * v;
                    let b = luma + 2.0 * (1.0 - blue) * u;
                    [r, (luma - red * r - blue * b) / green, b]
                }
            };
            pixels.extend([byte(r), byte(g), byte(b)]);
        }
    }
    Some(3)
}

struct Plane {
    values: re_rav1d::dav1d::Plane,
    /// Bytes per row.
    stride: usize,
    /// Values have two bytes.
    wide: bool,
}

impl Plane {
    fn at(&self, y: usize, x: usize) -> Option<f32> {
        let row = y * self.stride;
        match self.wide {
            true => {
                let bytes = self.values.get(row + 2 * x..row + 2 * x + 2)?;
                Some(f32::from(u16::from_le_bytes([bytes[0], bytes[1]])))
            }
            false => self.values.get(row + x).map(|value| f32::from(*value)),
        }
    }
}

/// The samples of a plane around `at`, of `len` pixels, and their weights. A halved plane has its samples between two
/// pixels.
fn neighbors(at: usize, len: usize, halved: bool) -> [(usize, f32); 2] {
    if !halved {
        return [(at, 1.0), (at, 0.0)];
    }
    let last = len.div_ceil(2) - 1;
    let other = if at.is_multiple_of(2) { (at / 2).saturating_sub(1) } else { (at / 2 + 1).min(last) };
    [(at / 2, 0.75), (other, 0.25)]
}

/// Weights of red and blue in luma.
fn weights(matrix: MatrixCoefficients) -> (f32, f32) {
    match matrix {
        MatrixCoefficients::BT709 => (0.2126, 0.0722),
        MatrixCoefficients::BT470M => (0.30, 0.11),
        MatrixCoefficients::ST240M => (0.212, 0.087),
        MatrixCoefficients::BT2020NonConstantLuminance => (0.2627, 0.0593),
        // libavif's default.
        _ => (0.299, 0.114),
    }
}
