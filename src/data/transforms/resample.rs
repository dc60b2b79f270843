//! Resizes with a triangle filter that widens when downscaling: antialiased bilinear, as in torchvision and Pillow.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::{F32, F32x3, U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use super::geometry::Rect;
use super::{Image, Pixels, Scratch};

/// Resizes `rect` of `image` to (height, width) `out_size`; returns the image itself if nothing changes.
pub fn crop_and_resize<'a>(
    image: Image<'a>,
    rect: Rect,
    out_size: [usize; 2],
    channels: usize,
    scratch: &'a mut Scratch,
) -> Result<Image<'a>, String> {
    let [height, width] = out_size;
    let whole = Rect { top: 0.0, left: 0.0, height: height as f64, width: width as f64 };
    if rect == whole && [image.height, image.width] == out_size {
        return Ok(image);
    }
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .use_alpha(false)
        .crop(rect.left, rect.top, rect.width, rect.height);
    let size = |n: usize| u32::try_from(n).map_err(|_| format!("a side of {n} pixels is too long"));
    let (w, h) = (size(image.width)?, size(image.height)?);
    let (len, source, target) = (height * width * channels, [w, h], [size(width)?, size(height)?]);
    let pixels = match image.pixels {
        Pixels::Bytes(from) => {
            scratch.resized.resize(len, 0);
            let into = &mut scratch.resized[..len];
            match channels {
                1 => resize::<U8>(&mut scratch.resizer, from, source, into, target, &options)?,
                3 => resize::<U8x3>(&mut scratch.resizer, from, source, into, target, &options)?,
                n => return Err(format!("images of {n} channels cannot be resized")),
            }
            Pixels::Bytes(&scratch.resized[..len])
        }
        Pixels::Floats(from) => {
            scratch.resized_floats.resize(len, 0.0);
            let (from, into) =
                (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(&mut scratch.resized_floats[..len]));
            match channels {
                1 => resize::<F32>(&mut scratch.resizer, from, source, into, target, &options)?,
                3 => resize::<F32x3>(&mut scratch.resizer, from, source, into, target, &options)?,
                n => return Err(format!("images of {n} channels cannot be resized")),
            }
            Pixels::Floats(&scratch.resized_floats[..len])
        }
    };
    Ok(Image { height, width, pixels })
}

/// Resizes (width, height) `source` to `target`. Generic over the pixel type: a resizer that dispatches at run time
/// would be compiled for all pixel types.
fn resize<P: PixelTrait>(
    resizer: &mut Resizer,
    from: &[u8],
    source: [u32; 2],
    into: &mut [u8],
    target: [u32; 2],
    options: &ResizeOptions,
) -> Result<(), String> {
    let refused = |error: &dyn std::fmt::Display| format!("it cannot be resized: {error}");
    let from = TypedImageRef::<P>::from_buffer(source[0], source[1], from).map_err(|e| refused(&e))?;
    let mut into = TypedImage::<P>::from_buffer(target[0], target[1], into).map_err(|e| refused(&e))?;
    resizer.resize_typed(&from, &mut into, options).map_err(|e| refused(&e))
}

/// Scratch bytes for resizing an image of (height, width) `size` to `to`, with `pixel` bytes per pixel: the result, and
/// the intermediate image that is resized along one axis only.
pub fn scratch_bytes(size: [usize; 2], to: [usize; 2], pixel: usize) -> u64 {
    let halfway = (size[0] * to[1]).max(to[0] * size[1]);
    ((to[0] * to[1] + halfway) * pixel) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::{RngKey, stream_id};

    /// One value of a resampled line by the plain formula: weights fall off linearly from its center.
    fn resample_line(line: &[f64], start: f64, len: f64, out: usize, i: usize) -> f64 {
        let scale = len / out as f64;
        let (centre, reach) = (start + (i as f64 + 0.5) * scale, scale.max(1.0));
        // The filter also reads pixels outside of the crop but within the image.
        let first = (centre - reach).max(0.0).floor() as usize;
        let last = ((centre + reach).ceil() as usize).min(line.len());
        let weight = |x: usize| (1.0 - ((x as f64 + 0.5 - centre) / reach).abs()).max(0.0);
        let total: f64 = (first..last).map(weight).sum();
        (first..last).map(|x| weight(x) * line[x]).sum::<f64>() / total
    }

    fn naive(pixels: &[f64], size: [usize; 2], channels: usize, part: Rect, to: [usize; 2]) -> Vec<f64> {
        let mut out = vec![0.0; to[0] * to[1] * channels];
        for c in 0..channels {
            let row = |y: usize| -> Vec<f64> {
                let line: Vec<f64> = (0..size[1]).map(|x| pixels[(y * size[1] + x) * channels + c]).collect();
                (0..to[1]).map(|x| resample_line(&line, part.left, part.width, to[1], x)).collect()
            };
            let rows: Vec<Vec<f64>> = (0..size[0]).map(row).collect();
            for x in 0..to[1] {
                let column: Vec<f64> = rows.iter().map(|row| row[x]).collect();
                for y in 0..to[0] {
                    out[(y * to[1] + x) * channels + c] =
                        resample_line(&column, part.top, part.height, to[0], y);
                }
            }
        }
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Bytes match the formula up to rounding after each of the two passes; floats match it within 1e-4.
        #[test]
        fn resizing_is_the_triangle_filter(
            size in [1usize..40, 1usize..40], to in [1usize..30, 1usize..30], grey: bool,
            crop in [0.0..0.5f64, 0.0..0.5f64, 0.3..1.0f64, 0.3..1.0f64], seed: u64,
        ) {
            let channels = if grey { 1 } else { 3 };
            let part = Rect {
                top: (size[0] as f64 * crop[0]).floor(), left: (size[1] as f64 * crop[1]).floor(),
                height: (size[0] as f64 * (1.0 - crop[0]) * crop[2]).ceil(),
                width: (size[1] as f64 * (1.0 - crop[1]) * crop[3]).ceil(),
            };
            let key = RngKey::new(seed, stream_id("test"));
            let bytes: Vec<u8> = (0..size[0] * size[1] * channels).map(|i| key.bits(i as u64) as u8).collect();
            let floats: Vec<f32> = bytes.iter().map(|b| *b as f32 / 255.0).collect();
            let expected = naive(&bytes.iter().map(|b| *b as f64).collect::<Vec<_>>(), size, channels, part, to);
            let image = |pixels| Image { height: size[0], width: size[1], pixels };
            let mut scratch = Scratch::default();
            let resized = crop_and_resize(image(Pixels::Bytes(&bytes)), part, to, channels, &mut scratch).unwrap();
            let Pixels::Bytes(ours) = resized.pixels else { panic!() };
            for (ours, expected) in ours.iter().zip(&expected) {
                prop_assert!((*ours as f64 - expected).abs() <= 1.6, "{ours} {expected}");
            }
            let resized = crop_and_resize(image(Pixels::Floats(&floats)), part, to, channels, &mut scratch).unwrap();
            let Pixels::Floats(ours) = resized.pixels else { panic!() };
            for (ours, expected) in ours.iter().zip(&expected) {
                prop_assert!((*ours as f64 - expected / 255.0).abs() < 1e-4, "{ours} {expected}");
            }
        }
    }

    #[test]
    fn an_image_of_the_right_size_is_unchanged() {
        let bytes = [1, 2, 3, 4, 5, 6];
        let image = Image { height: 2, width: 3, pixels: Pixels::Bytes(&bytes) };
        let whole = Rect { top: 0.0, left: 0.0, height: 2.0, width: 3.0 };
        let mut scratch = Scratch::default();
        let Pixels::Bytes(same) = crop_and_resize(image, whole, [2, 3], 1, &mut scratch).unwrap().pixels
        else {
            panic!()
        };
        assert_eq!(same.as_ptr(), bytes.as_ptr());
    }
}
