//! The PNM family: PBM, PGM and PPM, as text (P1 to P3) and binary (P4 to P6).

use std::io;

use super::header::ReadAt;

/// A parsed header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PnmHeader {
    /// 1 to 6.
    kind: u8,
    pub height: usize,
    pub width: usize,
    /// The largest value of a sample; 1 for bitmaps.
    max: u32,
    /// Offset of the first sample.
    data: usize,
}

/// Maximum bytes of a header with its comments.
const MAX_HEADER_BYTES: u64 = 1 << 16;

impl PnmHeader {
    /// Reads the header; `None` if it is damaged.
    pub fn read(read_at: ReadAt) -> io::Result<Option<Self>> {
        let mut magic = [0; 2];
        if !read_at(0, &mut magic)? {
            return Ok(None);
        }
        let kind = magic[1].wrapping_sub(b'0');
        let wanted = if matches!(kind, 1 | 4) { 2 } else { 3 };
        let (mut numbers, mut digits, mut comment, mut at) = (Vec::new(), None::<u32>, false, 2);
        while numbers.len() < wanted {
            let mut byte = [0];
            if at > MAX_HEADER_BYTES || !read_at(at, &mut byte)? {
                return Ok(None);
            }
            at += 1;
            match byte[0] {
                b'\n' | b'\r' => comment = false,
                _ if comment => continue,
                b'#' => comment = true,
                digit @ b'0'..=b'9' => {
                    let value = digits.unwrap_or(0).checked_mul(10);
                    let Some(value) = value.and_then(|value| value.checked_add(u32::from(digit - b'0')))
                    else {
                        return Ok(None);
                    };
                    digits = Some(value);
                    continue;
                }
                byte if byte.is_ascii_whitespace() => {}
                _ => return Ok(None),
            }
            numbers.extend(digits.take());
        }
        let max = numbers.get(2).copied().unwrap_or(1);
        let valid = (1..=6).contains(&kind) && (1..=65_535).contains(&max);
        let (width, height) = (numbers[0] as usize, numbers[1] as usize);
        Ok(valid.then_some(Self { kind, height, width, max, data: at as usize }))
    }

    pub fn parse(file: &[u8]) -> Option<Self> {
        Self::read(&mut |at, into: &mut [u8]| {
            let found = usize::try_from(at).ok().and_then(|at| file.get(at..at + into.len()));
            if let Some(bytes) = found {
                into.copy_from_slice(bytes);
            }
            Ok(found.is_some())
        })
        .ok()
        .flatten()
    }

    pub fn channels(&self) -> usize {
        if matches!(self.kind, 3 | 6) { 3 } else { 1 }
    }

    /// Decodes the samples to bytes, into as many as the image has.
    pub fn decode(&self, file: &[u8], into: &mut [u8]) -> Result<(), String> {
        let data = file.get(self.data..).unwrap_or_default();
        let truncated = || format!("it is truncated: expected {} samples", into_len(self));
        let scaled = |value: u32| (value.min(self.max) * 255 / self.max) as u8;
        match self.kind {
            5 | 6 if self.max > 255 => {
                let (samples, _) = data.as_chunks::<2>();
                let samples = samples.get(..into.len()).ok_or_else(truncated)?;
                for (into, sample) in into.iter_mut().zip(samples) {
                    *into = scaled(u16::from_be_bytes(*sample).into());
                }
            }
            5 | 6 => {
                let samples = data.get(..into.len()).ok_or_else(truncated)?;
                into.iter_mut().zip(samples).for_each(|(into, sample)| *into = scaled((*sample).into()));
            }
            // One bit per pixel, 1 is black; each row starts with a new byte.
            4 => {
                let row_bytes = self.width.div_ceil(8);
                for (y, row) in into.chunks_mut(self.width.max(1)).enumerate() {
                    let bits = data.get(y * row_bytes..(y + 1) * row_bytes).ok_or_else(truncated)?;
                    for (x, into) in row.iter_mut().enumerate() {
                        *into = if bits[x / 8] >> (7 - x % 8) & 1 == 1 { 0 } else { 255 };
                    }
                }
            }
            1 => {
                let mut bits = data.iter().filter(|byte| matches!(byte, b'0' | b'1'));
                for into in into.iter_mut() {
                    *into = if *bits.next().ok_or_else(truncated)? == b'1' { 0 } else { 255 };
                }
            }
            _ => {
                let text = String::from_utf8_lossy(data);
                let mut samples = text.split_ascii_whitespace();
                for into in into.iter_mut() {
                    let sample = samples.next().ok_or_else(truncated)?;
                    let value = sample.parse::<u32>().map_err(|_| format!("`{sample}` is not a sample"))?;
                    *into = scaled(value);
                }
            }
        }
        Ok(())
    }
}

fn into_len(header: &PnmHeader) -> usize {
    header.height * header.width * header.channels()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(file: &[u8]) -> Result<(usize, usize, Vec<u8>), String> {
        let header = PnmHeader::parse(file).ok_or("damaged")?;
        let mut pixels = vec![0; into_len(&header)];
        header.decode(file, &mut pixels)?;
        Ok((header.height, header.width, pixels))
    }

    #[test]
    fn every_kind_is_decoded() {
        assert_eq!(
            decoded(b"P6\n# by hand\n2 1\n255\n\x01\x02\x03\x04\x05\x06").unwrap(),
            (1, 2, vec![1, 2, 3, 4, 5, 6])
        );
        assert_eq!(decoded(b"P5 1 2 65535\n\xff\xff\x80\x00").unwrap(), (2, 1, vec![255, 127]));
        assert_eq!(decoded(b"P2\n2 1\n15\n15 0\n").unwrap(), (1, 2, vec![255, 0]));
        assert_eq!(decoded(b"P1\n3 1\n101\n").unwrap(), (1, 3, vec![0, 255, 0]));
        assert_eq!(decoded(b"P4\n3 1\n\xa0").unwrap(), (1, 3, vec![0, 255, 0]));
        assert!(decoded(b"P6\n2 1\n255\n\x01").unwrap_err().contains("truncated"));
        assert!(decoded(b"P6\n2 x\n255\n").is_err() && decoded(b"P6\n99999999999 1\n255\n").is_err());
    }
}
