//! Parses image headers without decoding: the size, and the memory that decoding takes.
//!
//! Reads at most a few kilobytes of any image. A damaged header gives `None`; the decoder reports the reason.

use std::io;

use super::more_formats::MoreFormat;

/// What a header declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    pub height: usize,
    pub width: usize,
    /// Channels as the decoder outputs them, one byte each.
    decoded_channels: usize,
    /// The pixels may have to be rotated or mirrored.
    may_need_rotation: bool,
    /// Bytes the decoder allocates besides its output.
    decoder_bytes: u64,
}

/// Fixed bytes of every decoder: tables, decompression windows, rows.
const DECODER_FIXED_BYTES: u64 = 1 << 18;

/// Length of the prefix that usually holds the whole header.
const PREFIX_BYTES: usize = 4096;

/// Segments that are skipped before the parser gives up.
const MAX_SEGMENTS: usize = 1000;

impl ImageHeader {
    /// Reads the header of an image that will be decoded to `channels`, 1 or 3. `read` fills a buffer from an offset of
    /// the file and returns how many bytes there were.
    pub fn read(
        channels: usize,
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<Option<Self>> {
        let mut prefix = vec![0; PREFIX_BYTES];
        let len = read(0, &mut prefix)?;
        prefix.truncate(len);
        let mut read_at = |place: u64, into: &mut [u8]| -> io::Result<bool> {
            match usize::try_from(place).ok().and_then(|place| prefix.get(place..place + into.len())) {
                Some(bytes) => into.copy_from_slice(bytes),
                None if len < PREFIX_BYTES => return Ok(false),
                None => return Ok(read(place, into)? == into.len()),
            }
            Ok(true)
        };
        match &prefix[..] {
            [0xff, 0xd8, 0xff, ..] => jpeg(channels, &mut read_at),
            [0x89, b'P', b'N', b'G', ..] => png(&mut read_at),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => webp(&mut read_at),
            start => match MoreFormat::detect(start) {
                Some(format) => more(format, &mut read_at),
                None => Ok(None),
            },
        }
    }

    /// Whether a file that starts with these twelve bytes is an image.
    pub fn is_known_format(start: &[u8; 12]) -> bool {
        matches!(start, [0xff, 0xd8, 0xff, ..] | [0x89, b'P', b'N', b'G', ..])
            || (start.starts_with(b"RIFF") && start.ends_with(b"WEBP"))
            || MoreFormat::detect(start).is_some()
    }

    /// Parses the header of a file in memory.
    pub fn parse(file: &[u8], channels: usize) -> Option<Self> {
        let read = |place: u64, into: &mut [u8]| {
            let rest = usize::try_from(place).ok().and_then(|place| file.get(place..)).unwrap_or_default();
            let len = rest.len().min(into.len());
            into[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        };
        Self::read(channels, read).ok().flatten()
    }

    /// Encodes the header for the cache.
    pub fn to_words(self) -> [u64; 5] {
        [
            self.height as u64,
            self.width as u64,
            self.decoded_channels as u64,
            self.may_need_rotation as u64,
            self.decoder_bytes,
        ]
    }

    /// Inverse of [`ImageHeader::to_words`]; `None` if all words are zero.
    pub fn from_words(
        [height, width, decoded_channels, may_need_rotation, decoder_bytes]: [u64; 5],
    ) -> Option<Self> {
        let (height, width) = (usize::try_from(height).ok()?, usize::try_from(width).ok()?);
        (decoded_channels > 0).then_some(Self {
            height,
            width,
            decoded_channels: decoded_channels as usize,
            may_need_rotation: may_need_rotation == 1,
            decoder_bytes,
        })
    }

    /// Upper bound on the bytes that decoding to `channels` takes besides the file: decoded pixels, converted or
    /// rotated pixels, and the decoder's own memory.
    pub fn decode_bytes(&self, channels: usize) -> u64 {
        let pixels = (self.height as u64).saturating_mul(self.width as u64);
        let converted =
            if self.decoded_channels != channels || self.may_need_rotation { channels as u64 } else { 0 };
        pixels
            .saturating_mul(self.decoded_channels as u64 + converted)
            .saturating_add(self.decoder_bytes)
            .saturating_add(DECODER_FIXED_BYTES)
    }
}

pub(super) type ReadAt<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> io::Result<bool>;

/// Walks the segments up to the frame header: EXIF and Adobe markers, size, and subsampling of the components.
fn jpeg(channels: usize, read_at: ReadAt) -> io::Result<Option<ImageHeader>> {
    let (mut place, mut may_need_rotation, mut plain_rgb) = (2, false, false);
    for _ in 0..MAX_SEGMENTS {
        let mut head = [0; 18];
        // A segment may be shorter than `head`, but no valid image ends this soon after one.
        if !read_at(place, &mut head)? {
            return Ok(None);
        }
        let (marker, len) = (head[1], u64::from(u16::from_be_bytes([head[2], head[3]])));
        match marker {
            _ if head[0] != 0xff => return Ok(None),
            // Fill bytes may precede a marker.
            0xff => {
                place += 1;
                continue;
            }
            0xe1 => may_need_rotation |= head[4..].starts_with(b"Exif"),
            0xee => plain_rgb |= head[4..].starts_with(b"Adobe") && head[15] == 0,
            0xc0..=0xcf if !matches!(marker, 0xc4 | 0xc8 | 0xcc) => {
                let [height, width] = [[head[5], head[6]], [head[7], head[8]]].map(u16::from_be_bytes);
                let (height, width, component_count) = (height as usize, width as usize, head[9] as usize);
                if !(1..=4).contains(&component_count) {
                    return Ok(None);
                }
                let mut components = vec![0; 3 * component_count];
                if !read_at(place + 10, &mut components)? {
                    return Ok(None);
                }
                let factors = |c: &[u8]| [usize::from(c[1] >> 4).max(1), usize::from(c[1] & 15).max(1)];
                let max_factors =
                    components.chunks(3).map(factors).fold([1, 1], |a, b| [a[0].max(b[0]), a[1].max(b[1])]);
                let units = [width.div_ceil(8 * max_factors[0]), height.div_ceil(8 * max_factors[1])];
                let coefficients: usize = components
                    .chunks(3)
                    .map(|c| factors(c)[0] * factors(c)[1] * 64 * units[0] * units[1])
                    .sum();
                // With several scans the decoder keeps all coefficients, two bytes each.
                let scans = if marker == 0xc0 || marker == 0xc1 { 0 } else { 2 * coefficients as u64 };
                let decoder_bytes = scans + 600 * width as u64;
                let grey = component_count == 1 || component_count == 3 && channels == 1 && !plain_rgb;
                let decoded_channels = if grey { 1 } else { 3 };
                return Ok(Some(ImageHeader {
                    height,
                    width,
                    decoded_channels,
                    may_need_rotation,
                    decoder_bytes,
                }));
            }
            _ => {}
        }
        place += 2 + len;
    }
    Ok(None)
}

fn png(read_at: ReadAt) -> io::Result<Option<ImageHeader>> {
    let mut head = [0; 33];
    if !read_at(0, &mut head)? || &head[12..16] != b"IHDR" {
        return Ok(None);
    }
    let number = |i: usize| u32::from_be_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]) as usize;
    let (width, height, depth, colour) = (number(16), number(20), head[24] as usize, head[25]);
    let (mut place, mut alpha, mut may_need_rotation) = (33, false, false);
    for _ in 0..MAX_SEGMENTS {
        let mut chunk = [0; 8];
        if !read_at(place, &mut chunk)? || &chunk[4..] == b"IDAT" {
            break;
        }
        alpha |= &chunk[4..] == b"tRNS";
        may_need_rotation |= &chunk[4..] == b"eXIf";
        place += 12 + u64::from(u32::from_be_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]));
    }
    let (stored, decoded_channels) = match colour {
        0 => (1, 1 + usize::from(alpha)),
        2 => (3, 3 + usize::from(alpha)),
        3 => (1, 3 + usize::from(alpha)),
        4 => (2, 2),
        6 => (4, 4),
        _ => return Ok(None),
    };
    // Stored, filtered and expanded rows, and all inflated data that was not consumed yet.
    let row = (width * stored * depth.div_ceil(8)) as u64;
    let decoder_bytes = row.saturating_mul(8 + height as u64);
    Ok(Some(ImageHeader { height, width, decoded_channels, may_need_rotation, decoder_bytes }))
}

fn more(format: MoreFormat, read_at: ReadAt) -> io::Result<Option<ImageHeader>> {
    let size = format.size(read_at)?;
    Ok(size.map(|([height, width], bytes_per_pixel)| ImageHeader {
        height,
        width,
        // At most.
        decoded_channels: 4,
        may_need_rotation: false,
        decoder_bytes: (height as u64).saturating_mul(width as u64).saturating_mul(bytes_per_pixel),
    }))
}

fn webp(read_at: ReadAt) -> io::Result<Option<ImageHeader>> {
    let (mut place, mut may_need_rotation, mut alpha, mut canvas) = (12, false, false, [0; 2]);
    for _ in 0..MAX_SEGMENTS {
        let mut head = [0; 18];
        if !read_at(place, &mut head)? {
            return Ok(None);
        }
        let len = u64::from(u32::from_le_bytes([head[4], head[5], head[6], head[7]]));
        match &head[..4] {
            b"VP8X" => {
                alpha |= head[8] & 0x10 != 0;
                may_need_rotation |= head[8] & 0x08 != 0;
                let side = |i: usize| 1 + u32::from_le_bytes([head[i], head[i + 1], head[i + 2], 0]) as usize;
                canvas = [side(15), side(12)];
            }
            // An animation: the canvas, a frame, and what decoding the frame takes.
            b"ANMF" => {
                let [height, width] = canvas;
                return Ok(Some(ImageHeader {
                    height,
                    width,
                    decoded_channels: 4,
                    may_need_rotation,
                    decoder_bytes: (height as u64).saturating_mul(width as u64).saturating_mul(18),
                }));
            }
            b"VP8 " => {
                let side = |i: usize| (u16::from_le_bytes([head[i], head[i + 1]]) & 0x3fff) as usize;
                let (width, height) = (side(14), side(16));
                let blocks = (width.next_multiple_of(16) * height.next_multiple_of(16)) as u64;
                // Luma, and chroma at half resolution on both axes; alpha is a separate lossless image.
                let decoder_bytes = 2 * blocks + if alpha { 6 * blocks } else { 0 } + 64 * width as u64;
                return Ok(Some(ImageHeader {
                    height,
                    width,
                    decoded_channels: if alpha { 4 } else { 3 },
                    may_need_rotation,
                    decoder_bytes,
                }));
            }
            b"VP8L" => {
                let bits = u32::from_le_bytes([head[9], head[10], head[11], head[12]]);
                let (width, height) = ((bits & 0x3fff) as usize + 1, (bits >> 14 & 0x3fff) as usize + 1);
                let alpha = alpha || bits >> 28 & 1 == 1;
                // Four bytes per pixel, plus the transforms.
                let decoder_bytes = 6 * (width * height) as u64;
                return Ok(Some(ImageHeader {
                    height,
                    width,
                    decoded_channels: if alpha { 4 } else { 3 },
                    may_need_rotation,
                    decoder_bytes,
                }));
            }
            _ => {}
        }
        place += 8 + len + len % 2;
    }
    Ok(None)
}
