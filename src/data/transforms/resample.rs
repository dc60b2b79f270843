//! Crops an image and resizes it: bilinear, antialiased, as torchvision and Pillow do, with one rounding instead of two.
//!
//! A value is a sum over columns of sums over rows, by the triangle filter of each axis. Rows are summed first, into one
//! line of f32 values, in which the columns are then summed. Written here because the resizing crates instantiate their
//! loops for every precision and layout, which takes longer to build than all other readers of images together. The order
//! of all sums is fixed, so that every CPU computes the same bits.

use super::geometry::Rect;
use super::{Image, Pixels, Scratch};

/// Values that a pixel is read as at once; a line has as many more than it needs.
const LANES: usize = 4;

/// Buffers of one resize.
#[derive(Default)]
pub(super) struct ResizeBuffers {
    /// A line of the image, summed over the rows of one output row.
    line: Vec<f32>,
    /// An output row.
    summed: Vec<f32>,
    columns: Filter,
    rows: Filter,
}

impl ResizeBuffers {
    pub fn bytes(&self) -> usize {
        4 * (self.line.capacity() + self.summed.capacity()) + self.columns.bytes() + self.rows.bytes()
    }
}

/// The triangle filter along one axis: the source positions `first..` and their weights, as many for every output position.
#[derive(Default)]
struct Filter {
    firsts: Vec<u32>,
    weights: Vec<f32>,
    /// Weights of an output position; those beyond the filter's reach are zero.
    reads: usize,
}

impl Filter {
    /// Most source positions that an output position reads: half of them to both sides.
    fn most_reads(reach: f64, from: usize) -> usize {
        ((2.0 * reach).ceil() as usize).min(from)
    }

    fn most_bytes(from: usize, to: usize) -> usize {
        4 * (to + 2 * from + 3 * to)
    }

    fn bytes(&self) -> usize {
        4 * (self.firsts.capacity() + self.weights.capacity())
    }

    /// Computes the filter that resizes `len` positions from `start` on, of `from` in all, to `to`.
    fn compute(&mut self, start: f64, len: f64, from: usize, to: usize) {
        let scale = len / to as f64;
        let reach = scale.max(1.0);
        self.reads = Self::most_reads(reach, from);
        set_len(&mut self.firsts, to);
        set_len(&mut self.weights, to * self.reads);
        for (i, (first, weights)) in
            self.firsts.iter_mut().zip(self.weights.chunks_exact_mut(self.reads)).enumerate()
        {
            let center = start + (i as f64 + 0.5) * scale;
            // Pixels outside of the crop count, those outside of the image do not.
            *first = ((center - reach + 0.5).max(0.0) as usize).min(from - self.reads) as u32;
            let weight = |k: usize| {
                let distance = (f64::from(*first) + k as f64 + 0.5 - center).abs();
                (1.0 - distance / reach).max(0.0)
            };
            let total: f64 = (0..self.reads).map(weight).sum();
            for (k, value) in weights.iter_mut().enumerate() {
                *value = (weight(k) / total) as f32;
            }
        }
    }

    /// The first source position of output position `i`, and the weights from there on.
    fn at(&self, i: usize) -> (usize, &[f32]) {
        (self.firsts[i] as usize, &self.weights[i * self.reads..][..self.reads])
    }
}

/// A value of an image.
trait Value: Copy + Default {
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Value for u8 {
    fn to_f32(self) -> f32 {
        f32::from(self)
    }

    fn from_f32(value: f32) -> Self {
        // In f32, what is added leaves no digit behind the point: it rounds, and the lowest byte is the integer. A cast,
        // which saturates, takes several times as long.
        (value + 8_388_608.0).to_bits() as u8
    }
}

impl Value for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn from_f32(value: f32) -> Self {
        value
    }
}

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
    if [image.height, image.width].into_iter().any(|side| u32::try_from(side).is_err()) {
        return Err(format!("a side of {} pixels is too long", image.height.max(image.width)));
    }
    let size = [image.height, image.width];
    let pixels = match image.pixels {
        Pixels::Bytes(from) => {
            let to = &mut scratch.resized;
            resize(from, size, rect, to, out_size, channels, &mut scratch.resize)?;
            Pixels::Bytes(to)
        }
        Pixels::Floats(from) => {
            let to = &mut scratch.resized_floats;
            resize(from, size, rect, to, out_size, channels, &mut scratch.resize)?;
            Pixels::Floats(to)
        }
    };
    Ok(Image { height, width, pixels })
}

/// Resizes `rect` of the (height, width) `size` image `from` to `out_size`, in wide vectors where the CPU has them.
fn resize<T: Value>(
    from: &[T],
    size: [usize; 2],
    rect: Rect,
    to: &mut Vec<T>,
    out_size: [usize; 2],
    channels: usize,
    buffers: &mut ResizeBuffers,
) -> Result<(), String> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide<T: Value>(
            from: &[T],
            size: [usize; 2],
            rect: Rect,
            to: &mut Vec<T>,
            out_size: [usize; 2],
            channels: usize,
            buffers: &mut ResizeBuffers,
        ) -> Result<(), String> {
            resize_any(from, size, rect, to, out_size, channels, buffers)
        }
        // SAFETY: the CPU has AVX2.
        return unsafe { wide(from, size, rect, to, out_size, channels, buffers) };
    }
    resize_any(from, size, rect, to, out_size, channels, buffers)
}

#[inline(always)]
fn resize_any<T: Value>(
    from: &[T],
    size: [usize; 2],
    rect: Rect,
    to: &mut Vec<T>,
    out_size: [usize; 2],
    channels: usize,
    buffers: &mut ResizeBuffers,
) -> Result<(), String> {
    let ResizeBuffers { line, summed, columns, rows } = buffers;
    rows.compute(rect.top, rect.height, size[0], out_size[0]);
    columns.compute(rect.left, rect.width, size[1], out_size[1]);
    // Left to right, output columns read on.
    let (start, end) = (columns.at(0).0, columns.at(out_size[1] - 1).0 + columns.reads);
    let len = out_size[0] * out_size[1] * channels;
    set_len(to, len);
    set_len(line, (end - start) * channels + LANES);
    set_len(summed, out_size[1] * channels + LANES);
    for (y, to) in to.chunks_exact_mut(out_size[1] * channels).enumerate() {
        let (first, weights) = rows.at(y);
        let sums = &mut line[..(end - start) * channels];
        let begin = start * channels;
        sum_rows(sums, first, weights, |y| {
            &from[y * size[1] * channels + begin..][..(end - start) * channels]
        });
        match channels {
            1 => sum_columns::<1, 1>(line, columns, start, summed),
            3 => sum_columns::<3, LANES>(line, columns, start, summed),
            n => return Err(format!("images of {n} channels cannot be resized")),
        }
        for (to, sum) in to.iter_mut().zip(summed.iter()) {
            *to = T::from_f32(*sum);
        }
    }
    Ok(())
}

/// Sums the rows from `first` on by their weights, four in one pass over the sums.
#[inline(always)]
fn sum_rows<'a, T: Value + 'a>(
    sums: &mut [f32],
    first: usize,
    weights: &[f32],
    row: impl Fn(usize) -> &'a [T],
) {
    sums.fill(0.0);
    let (fours, rest) = weights.as_chunks::<4>();
    for (i, four) in fours.iter().enumerate() {
        let [a, b, c, d] = std::array::from_fn(|k| row(first + 4 * i + k));
        let values = a.iter().zip(b).zip(c.iter().zip(d));
        for (sum, ((a, b), (c, d))) in sums.iter_mut().zip(values) {
            let halfway = *sum + four[0] * a.to_f32() + four[1] * b.to_f32();
            *sum = halfway + four[2] * c.to_f32() + four[3] * d.to_f32();
        }
    }
    for (k, weight) in rest.iter().enumerate() {
        for (sum, value) in sums.iter_mut().zip(row(first + 4 * fours.len() + k)) {
            *sum += weight * value.to_f32();
        }
    }
}

/// Makes a buffer `len` values long; what they are is left over from the last use.
fn set_len<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.capacity() < len {
        buffer.clear();
        buffer.reserve_exact(len);
    }
    buffer.resize(len, T::default());
}

/// Sums the columns of a line of pixels of `C` channels, which begins at column `start` and is read `L` values at a time.
#[inline(always)]
fn sum_columns<const C: usize, const L: usize>(line: &[f32], columns: &Filter, start: usize, to: &mut [f32]) {
    match columns.reads {
        2 => sum_columns_of::<C, L, 2>(line, columns, start, to),
        3 => sum_columns_of::<C, L, 3>(line, columns, start, to),
        4 => sum_columns_of::<C, L, 4>(line, columns, start, to),
        5 => sum_columns_of::<C, L, 5>(line, columns, start, to),
        6 => sum_columns_of::<C, L, 6>(line, columns, start, to),
        _ => sum_columns_of::<C, L, 0>(line, columns, start, to),
    }
}

/// [`sum_columns`] of a filter that reads `N` columns, or any number of them if that is zero.
#[inline(always)]
fn sum_columns_of<const C: usize, const L: usize, const N: usize>(
    line: &[f32],
    columns: &Filter,
    start: usize,
    to: &mut [f32],
) {
    let reads = if N > 0 { N } else { columns.reads };
    let spans = columns.firsts.iter().zip(columns.weights.chunks_exact(reads));
    for (x, (first, weights)) in spans.enumerate() {
        let read = &line[(*first as usize - start) * C..][..(reads - 1) * C + L];
        let mut sums = [0.0; L];
        for (k, weight) in weights.iter().enumerate() {
            for (sum, value) in sums.iter_mut().zip(&read[k * C..k * C + L]) {
                *sum += weight * value;
            }
        }
        // What is beyond the pixel is written over by the next one.
        to[x * C..x * C + L].copy_from_slice(&sums);
    }
}

/// Upper bound on the scratch bytes for resizing an image of (height, width) `size` to `to`, with `bytes` bytes per value:
/// the result, a line of both, and the filters.
pub fn scratch_bytes(size: [usize; 2], to: [usize; 2], channels: usize, bytes: usize) -> u64 {
    let filters = Filter::most_bytes(size[0], to[0]) + Filter::most_bytes(size[1], to[1]);
    (to[0] * to[1] * channels * bytes + 4 * ((size[1] + to[1]) * channels + 2 * LANES) + filters) as u64
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

        /// Bytes are the formula, rounded; floats match it within 1e-5. Buffers take no more than stated.
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
                prop_assert!((*ours as f64 - expected).abs() <= 0.501, "{ours} {expected}");
            }
            prop_assert!(scratch.bytes() <= scratch_bytes(size, to, channels, 1));
            let resized = crop_and_resize(image(Pixels::Floats(&floats)), part, to, channels, &mut scratch).unwrap();
            let Pixels::Floats(ours) = resized.pixels else { panic!() };
            for (ours, expected) in ours.iter().zip(&expected) {
                prop_assert!((*ours as f64 - expected / 255.0).abs() < 1e-5, "{ours} {expected}");
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
