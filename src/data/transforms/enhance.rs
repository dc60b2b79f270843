//! Changes of the values of an image of bytes, with the rounding of Pillow's `ImageEnhance` and `ImageOps`.
//!
//! An image is (height, width, channels) bytes with 1 or 3 channels.

/// Pillow's conversion of RGB to grayscale.
fn luma(pixel: &[u8]) -> u8 {
    match pixel {
        [r, g, b] => {
            ((u32::from(*r) * 19595 + u32::from(*g) * 38470 + u32::from(*b) * 7471 + 0x8000) >> 16) as u8
        }
        _ => pixel[0],
    }
}

/// Moves from `base` (factor 0) to `value` (factor 1) and beyond.
fn blend(base: u8, value: u8, factor: f32) -> u8 {
    // The conversion saturates and truncates, as Pillow does.
    (f32::from(base) + factor * (f32::from(value) - f32::from(base))) as u8
}

pub fn brightness(image: &mut [u8], factor: f32) {
    image.iter_mut().for_each(|value| *value = blend(0, *value, factor));
}

/// Blends with the mean gray level.
pub fn contrast(image: &mut [u8], channels: usize, factor: f32) {
    let sum: u64 = image.chunks_exact(channels).map(|pixel| u64::from(luma(pixel))).sum();
    let mean = (sum as f64 / (image.len() / channels) as f64 + 0.5) as u8;
    image.iter_mut().for_each(|value| *value = blend(mean, *value, factor));
}

/// Blends each pixel with its own gray level; grayscale stays as it is.
pub fn saturation(image: &mut [u8], channels: usize, factor: f32) {
    if channels == 3 {
        for pixel in image.chunks_exact_mut(channels) {
            let gray = luma(pixel);
            pixel.iter_mut().for_each(|value| *value = blend(gray, *value, factor));
        }
    }
}

/// Blends with the image smoothed by a 3 x 3 kernel, except for its border; `spare` is a buffer of the same size.
pub fn sharpness(
    [height, width, channels]: [usize; 3],
    image: &mut Vec<u8>,
    spare: &mut Vec<u8>,
    factor: f32,
) {
    if height < 3 || width < 3 {
        return;
    }
    spare.clear();
    spare.extend_from_slice(image);
    let row = width * channels;
    for y in 1..height - 1 {
        for x in channels..row - channels {
            let at = y * row + x;
            let mut sum = 4 * u32::from(image[at]);
            for line in [at - row, at, at + row] {
                sum +=
                    [line - channels, line, line + channels].map(|i| u32::from(image[i])).iter().sum::<u32>();
            }
            // Rounded; a half cannot occur, because 13 is odd.
            spare[at] = blend(((2 * sum + 13) / 26) as u8, image[at], factor);
        }
    }
    std::mem::swap(image, spare);
}

/// Keeps the upper `bits` bits of each value, 1 to 8.
pub fn posterize(image: &mut [u8], bits: u32) {
    let mask = !0u8 << (8 - bits);
    image.iter_mut().for_each(|value| *value &= mask);
}

/// Inverts the values from `threshold` on.
pub fn solarize(image: &mut [u8], threshold: f64) {
    image.iter_mut().filter(|value| f64::from(**value) >= threshold).for_each(|value| *value = 255 - *value);
}

/// Stretches the values of each channel to the whole range.
pub fn autocontrast(image: &mut [u8], channels: usize) {
    map_by_histogram(image, channels, |histogram| {
        let (low, high) = (first_used(histogram)?, histogram.iter().rposition(|count| *count > 0)?);
        let scale = 255.0 / (high.checked_sub(low).filter(|range| *range > 0)? as f64);
        let offset = -(low as f64) * scale;
        Some(std::array::from_fn(|i| (i as f64 * scale + offset) as u8))
    });
}

/// Gives the values of each channel a histogram that is as flat as possible.
pub fn equalize(image: &mut [u8], channels: usize) {
    map_by_histogram(image, channels, |histogram| {
        let last = histogram.iter().rposition(|count| *count > 0)?;
        let step = (histogram.iter().sum::<u64>() - histogram[last]) / 255;
        if first_used(histogram)? == last || step == 0 {
            return None;
        }
        let mut below = step / 2;
        Some(std::array::from_fn(|i| {
            let mapped = below / step;
            below += histogram[i];
            mapped.min(255) as u8
        }))
    });
}

fn first_used(histogram: &[u64; 256]) -> Option<usize> {
    histogram.iter().position(|count| *count > 0)
}

/// Maps the values of each channel by the table that `table` makes of their histogram, if it makes one.
fn map_by_histogram(image: &mut [u8], channels: usize, table: impl Fn(&[u64; 256]) -> Option<[u8; 256]>) {
    for c in 0..channels {
        let mut histogram = [0; 256];
        image.iter().skip(c).step_by(channels).for_each(|value| histogram[usize::from(*value)] += 1);
        if let Some(table) = table(&histogram) {
            image.iter_mut().skip(c).step_by(channels).for_each(|value| *value = table[usize::from(*value)]);
        }
    }
}
