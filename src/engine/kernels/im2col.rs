//! Convolution geometry, the blocking of output pixels, and im2col and col2im of a block on the CPU.

use std::ops::Range;

use candle_core::DType;

use super::cpu::acc_bytes;
use super::{Elem, Real};
use crate::vectorised;

/// Gathered values per block where patches are small: half a megabyte of f32, which leaves space in the L2 cache.
const BLOCK_ELEMENTS: usize = 128 * 1024;

/// Fewest rows per block: each block packs the whole weight for its GEMM, which fewer rows would not pay for.
const MIN_BLOCK_ROWS: usize = 256;

/// Values of a weight gradient summed at once: a megabyte of f32, which stays in the L2 cache while block after block
/// is added to it.
const WEIGHT_PANEL_ELEMENTS: usize = 256 * 1024;

/// The sizes of a convolution; a single number applies to height and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvGeometry {
    pub height: usize,
    pub width: usize,
    pub in_channels: usize,
    pub out_channels: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
    /// Inputs and outputs are split into `groups` independent groups.
    pub groups: usize,
}

impl ConvGeometry {
    fn output_dim(&self, size: usize) -> usize {
        let kernel_extent = self.dilation * (self.kernel - 1) + 1;
        (size + 2 * self.padding).checked_sub(kernel_extent).map_or(0, |slack| slack / self.stride + 1)
    }

    /// (height, width) of the output; 0 where the kernel does not fit in the image.
    pub fn output(&self) -> (usize, usize) {
        (self.output_dim(self.height), self.output_dim(self.width))
    }

    /// Values of a patch in one group.
    pub(super) fn patch_len(&self) -> usize {
        self.kernel_area() * self.group_channels()
    }

    /// The geometry of the convolution that computes this one's input gradient from its output gradient, with the
    /// weight flipped. `None` if the stride is more than 1 or the padding exceeds `dilation * (kernel - 1)`.
    pub(super) fn input_gradient_geometry(&self) -> Option<Self> {
        let (height, width) = self.output();
        let padding = (self.dilation * (self.kernel - 1)).checked_sub(self.padding)?;
        let (in_channels, out_channels) = (self.out_channels, self.in_channels);
        (self.stride == 1).then_some(Self { height, width, in_channels, out_channels, padding, ..*self })
    }

    /// Number of kernel taps.
    pub(super) fn kernel_area(&self) -> usize {
        self.kernel * self.kernel
    }

    /// Input channels per group.
    pub(super) fn group_channels(&self) -> usize {
        self.in_channels / self.groups
    }

    /// Taps whose weight gradients are summed at once, split as evenly as possible.
    pub(super) fn taps_per_panel(&self) -> usize {
        let max_taps = WEIGHT_PANEL_ELEMENTS / (self.out_channels / self.groups * self.group_channels());
        let panels = self.kernel_area().div_ceil(max_taps.max(1));
        self.kernel_area().div_ceil(panels)
    }

    /// The blocks that im2col gathers at once for `taps` taps of a patch.
    pub(super) fn blocking(&self, taps: usize, batch: usize, threads: usize) -> Blocking {
        let (max_rows, image_pixels) = (
            (BLOCK_ELEMENTS / (taps * self.group_channels())).max(MIN_BLOCK_ROWS),
            self.output_pixels().max(1),
        );
        let images_per_thread = batch.div_ceil(threads).max(1);
        Blocking {
            batch,
            image_pixels,
            block_images: (max_rows / image_pixels).clamp(1, images_per_thread),
            block_pixels: max_rows.min(image_pixels),
        }
    }

    pub(super) fn output_pixels(&self) -> usize {
        let (h, w) = self.output();
        h * w
    }

    pub fn flops(&self, batch: usize) -> u64 {
        2 * (batch * self.output_pixels() * self.out_channels * self.patch_len()) as u64
    }

    /// 1x1 kernel, stride 1, no padding, one group: the image already is the im2col matrix.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0 && self.groups == 1
    }

    /// Bytes of `rows` gathered patches of `taps` taps in the accumulator type; 0 where the image itself serves.
    pub(super) fn im2col_bytes(&self, dtype: DType, rows: usize, taps: usize) -> usize {
        let acc = acc_bytes(dtype);
        if self.is_pointwise() && dtype.size_in_bytes() == acc {
            0
        } else {
            rows * taps * self.group_channels() * acc
        }
    }

    /// The given taps of the patches of a block in one group, as rows in the accumulator type: gathered into `buffer`,
    /// or borrowed from `values` if the convolution is pointwise and needs no conversion.
    pub(super) fn im2col_block<'a, T: Elem>(
        &self,
        values: &'a [T],
        block: PixelBlock,
        group: usize,
        taps: Range<usize>,
        buffer: &'a mut [T::Acc],
    ) -> &'a [T::Acc] {
        let (image_len, k) =
            (self.height * self.width * self.in_channels, taps.len() * self.group_channels());
        if self.is_pointwise()
            && let Some(values) = T::as_acc(values)
        {
            return &values[block.first_row(self.output_pixels()) * k..][..block.rows() * k];
        }
        let images = values[block.first_image * image_len..].chunks_exact(image_len);
        let buffer = &mut buffer[..block.rows() * k];
        vectorised!(T, || {
            for (rows, image) in buffer.chunks_exact_mut(block.pixels * k).zip(images) {
                self.im2col(image, block.first_pixel, group, &taps, rows);
            }
        });
        buffer
    }

    /// Gathers the given taps of the patches of output pixels `first..` of one image and group into `rows`.
    #[inline(always)]
    fn im2col<T: Elem>(
        &self,
        image: &[T],
        first: usize,
        group: usize,
        taps: &Range<usize>,
        rows: &mut [T::Acc],
    ) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.in_channels, self.group_channels(), self.kernel);
        for (i, mut row) in rows.chunks_exact_mut(taps.len() * cg).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for ky in taps.start / k..taps.end.div_ceil(k) {
                let (from, to) = (taps.start.max(ky * k) - ky * k, taps.end.min((ky + 1) * k) - ky * k);
                let (line, rest) = row.split_at_mut((to - from) * cg);
                row = rest;
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    line.fill(T::Acc::ZERO);
                    continue;
                }
                let start = y as usize * self.width;
                let (left, right) = (x0 + from as isize, x0 + to as isize);
                if self.dilation == 1 && self.groups == 1 && left >= 0 && right <= self.width as isize {
                    copy_to_acc(&image[(start + left as usize) * c..][..line.len()], line);
                    continue;
                }
                for (kx, dst) in (from..to).zip(line.chunks_exact_mut(cg)) {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x < 0 || x >= self.width as isize {
                        dst.fill(T::Acc::ZERO);
                    } else {
                        copy_to_acc(&image[(start + x as usize) * c + group * cg..][..cg], dst);
                    }
                }
            }
        }
    }

    /// The transpose of [`ConvGeometry::im2col`]: adds the rows back to the pixels they came from.
    #[inline(always)]
    pub(super) fn col2im<R: Real>(&self, rows: &[R], first: usize, group: usize, image: &mut [R]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.in_channels, self.group_channels(), self.kernel);
        for (i, row) in rows.chunks_exact(self.patch_len()).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for (ky, line) in row.chunks_exact(k * cg).enumerate() {
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    continue;
                }
                let start = y as usize * self.width;
                if self.dilation == 1 && self.groups == 1 && x0 >= 0 && x0 as usize + k <= self.width {
                    let to = &mut image[(start + x0 as usize) * c..][..k * c];
                    to.iter_mut().zip(line).for_each(|(a, b)| *a += *b);
                    continue;
                }
                for (kx, src) in line.chunks_exact(cg).enumerate() {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x >= 0 && x < self.width as isize {
                        let to = &mut image[(start + x as usize) * c + group * cg..][..cg];
                        to.iter_mut().zip(src).for_each(|(a, b)| *a += *b);
                    }
                }
            }
        }
    }
}

/// Copies with conversion to the accumulator type. Short runs, as in an image of one channel, avoid the call to memcpy.
#[inline(always)]
fn copy_to_acc<T: Elem>(from: &[T], to: &mut [T::Acc]) {
    match T::as_acc(from) {
        Some(from) if from.len() > 16 => to.copy_from_slice(from),
        _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_acc()),
    }
}

/// How the output pixels of a batch are split into blocks: several whole images, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    pub(super) batch: usize,
    /// Output pixels per image.
    pub(super) image_pixels: usize,
    /// Images per block, and pixels of each.
    pub(super) block_images: usize,
    pub(super) block_pixels: usize,
}

/// The pixels `first_pixel..first_pixel + pixels` of the images `first_image..first_image + images`.
#[derive(Clone, Copy)]
pub(super) struct PixelBlock {
    pub(super) first_image: usize,
    pub(super) images: usize,
    pub(super) first_pixel: usize,
    pub(super) pixels: usize,
}

impl Blocking {
    /// Most rows of a block.
    pub(super) fn max_rows(&self) -> usize {
        self.block_images * self.block_pixels
    }

    /// The blocks of a range of images, in order. A range that ends past the batch, like the last of several equal
    /// ones, is cut at the batch.
    pub(super) fn blocks_of_images(self, images: std::ops::Range<usize>) -> impl Iterator<Item = PixelBlock> {
        let end = images.end.min(self.batch);
        (images.start..end).step_by(self.block_images).flat_map(move |first_image| {
            let images = self.block_images.min(end - first_image);
            (0..self.image_pixels).step_by(self.block_pixels).map(move |first_pixel| PixelBlock {
                first_image,
                images,
                first_pixel,
                pixels: self.block_pixels.min(self.image_pixels - first_pixel),
            })
        })
    }

    pub(super) fn blocks(self) -> Vec<PixelBlock> {
        self.blocks_of_images(0..self.batch).collect()
    }
}

impl PixelBlock {
    pub(super) fn rows(&self) -> usize {
        self.images * self.pixels
    }

    /// The block's first row in the whole batch. Its rows are contiguous, because a block of several images has all
    /// their pixels.
    pub(super) fn first_row(&self, pixels: usize) -> usize {
        self.first_image * pixels + self.first_pixel
    }
}
