//! The windows of a convolution: its sizes, how its output pixels are cut into blocks, and how the windows of a
//! block are gathered into rows and added back.

use std::ops::Range;

use candle_core::DType;

use super::cpu::acc_bytes;
use super::{Elem, Real};
use crate::vectorised;

/// Gathered values a block holds where windows are small: half a megabyte of f32, which leaves room in the
/// second-level cache.
const BLOCK: usize = 128 * 1024;

/// Rows a block has at least: each block packs the whole weight for its product, which fewer would not pay.
const ROWS: usize = 256;

/// Values of a weight's gradient that are summed at once: a megabyte of f32, which the second-level cache keeps
/// while block after block is added to it.
const PANEL: usize = 256 * 1024;

/// The sizes of a convolution; the same along height and width where one number is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    pub height: usize,
    pub width: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
    /// Inputs and outputs are cut into so many groups that do not see each other.
    pub groups: usize,
}

impl Geometry {
    fn along(&self, size: usize) -> usize {
        let reach = self.dilation * (self.kernel - 1) + 1;
        (size + 2 * self.padding).checked_sub(reach).map_or(0, |room| room / self.stride + 1)
    }

    /// (height, width) of the output; 0 where the window does not fit in the picture.
    pub fn output(&self) -> (usize, usize) {
        (self.along(self.height), self.along(self.width))
    }

    /// Values a window has in one group.
    pub(super) fn window(&self) -> usize {
        self.cells() * self.depth()
    }

    /// The convolution that makes the gradient of the input of this one out of that of its output, with the weight's
    /// cells in reverse; none where windows move by more than one pixel.
    pub(super) fn back(&self) -> Option<Self> {
        let (height, width) = self.output();
        let padding = (self.dilation * (self.kernel - 1)).checked_sub(self.padding)?;
        let (inputs, outputs) = (self.outputs, self.inputs);
        (self.stride == 1).then_some(Self { height, width, inputs, outputs, padding, ..*self })
    }

    /// Cells of a window.
    pub(super) fn cells(&self) -> usize {
        self.kernel * self.kernel
    }

    /// Values a window has in one group in each cell.
    pub(super) fn depth(&self) -> usize {
        self.inputs / self.groups
    }

    /// Cells whose weight gradients are summed at once, in runs as even as they can be.
    pub(super) fn panel(&self) -> usize {
        let most = PANEL / (self.outputs / self.groups * self.depth());
        let runs = self.cells().div_ceil(most.max(1));
        self.cells().div_ceil(runs)
    }

    /// What is gathered at once where `cells` of a window are.
    pub(super) fn blocks(&self, cells: usize, batch: usize, threads: usize) -> Blocking {
        let (wanted, pixels) = ((BLOCK / (cells * self.depth())).max(ROWS), self.pixels().max(1));
        let each = batch.div_ceil(threads).max(1);
        Blocking { batch, pixels, pictures: (wanted / pixels).clamp(1, each), part: wanted.min(pixels) }
    }

    pub(super) fn pixels(&self) -> usize {
        let (h, w) = self.output();
        h * w
    }

    pub fn flops(&self, batch: usize) -> u64 {
        2 * (batch * self.pixels() * self.outputs * self.window()) as u64
    }

    /// A window of one pixel that moves by one: the picture is already the gathered matrix.
    pub(super) fn is_product(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0 && self.groups == 1
    }

    /// Bytes of `rows` gathered windows of so many cells, in the type that is computed in: none where they lie already.
    pub(super) fn gathered(&self, dtype: DType, rows: usize, cells: usize) -> usize {
        let acc = acc_bytes(dtype);
        if self.is_product() && dtype.size_in_bytes() == acc { 0 } else { rows * cells * self.depth() * acc }
    }

    /// Some cells of the windows of a block, group `g`, as rows of the type that is computed in: gathered into `room`, or
    /// where they lie already.
    pub(super) fn windows<'a, T: Elem>(
        &self,
        values: &'a [T],
        block: Block,
        g: usize,
        cells: Range<usize>,
        room: &'a mut [T::Acc],
    ) -> &'a [T::Acc] {
        let (picture, k) = (self.height * self.width * self.inputs, cells.len() * self.depth());
        if self.is_product()
            && let Some(values) = T::as_acc(values)
        {
            return &values[block.row(self.pixels()) * k..][..block.rows() * k];
        }
        let pictures = values[block.picture * picture..].chunks_exact(picture);
        let room = &mut room[..block.rows() * k];
        vectorised!(T, || {
            for (rows, picture) in room.chunks_exact_mut(block.part * k).zip(pictures) {
                self.gather(picture, block.first, g, &cells, rows);
            }
        });
        room
    }

    /// Gathers these cells of the windows of output pixels `first..` of one picture, group `g`, into rows.
    #[inline(always)]
    fn gather<T: Elem>(
        &self,
        picture: &[T],
        first: usize,
        g: usize,
        cells: &Range<usize>,
        rows: &mut [T::Acc],
    ) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.depth(), self.kernel);
        for (i, mut row) in rows.chunks_exact_mut(cells.len() * cg).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for ky in cells.start / k..cells.end.div_ceil(k) {
                let (from, to) = (cells.start.max(ky * k) - ky * k, cells.end.min((ky + 1) * k) - ky * k);
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
                    copy(&picture[(start + left as usize) * c..][..line.len()], line);
                    continue;
                }
                for (kx, cell) in (from..to).zip(line.chunks_exact_mut(cg)) {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x < 0 || x >= self.width as isize {
                        cell.fill(T::Acc::ZERO);
                    } else {
                        copy(&picture[(start + x as usize) * c + g * cg..][..cg], cell);
                    }
                }
            }
        }
    }

    /// The reverse of [`Geometry::gather`]: adds the rows back to where they came from.
    #[inline(always)]
    pub(super) fn scatter<R: Real>(&self, rows: &[R], first: usize, g: usize, picture: &mut [R]) {
        let (_, out_w) = self.output();
        let (c, cg, k) = (self.inputs, self.depth(), self.kernel);
        for (i, row) in rows.chunks_exact(self.window()).enumerate() {
            let (oy, ox) = ((first + i) / out_w, (first + i) % out_w);
            let x0 = (ox * self.stride) as isize - self.padding as isize;
            for (ky, line) in row.chunks_exact(k * cg).enumerate() {
                let y = (oy * self.stride + ky * self.dilation) as isize - self.padding as isize;
                if y < 0 || y >= self.height as isize {
                    continue;
                }
                let start = y as usize * self.width;
                if self.dilation == 1 && self.groups == 1 && x0 >= 0 && x0 as usize + k <= self.width {
                    let to = &mut picture[(start + x0 as usize) * c..][..k * c];
                    to.iter_mut().zip(line).for_each(|(a, b)| *a += *b);
                    continue;
                }
                for (kx, cell) in line.chunks_exact(cg).enumerate() {
                    let x = x0 + (kx * self.dilation) as isize;
                    if x >= 0 && x < self.width as isize {
                        let to = &mut picture[(start + x as usize) * c + g * cg..][..cg];
                        to.iter_mut().zip(cell).for_each(|(a, b)| *a += *b);
                    }
                }
            }
        }
    }
}

/// A copy in the type that is computed in; not a call where there are a few values only, as in an image of one channel.
#[inline(always)]
fn copy<T: Elem>(from: &[T], to: &mut [T::Acc]) {
    match T::as_acc(from) {
        Some(from) if from.len() > 16 => to.copy_from_slice(from),
        _ => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.up()),
    }
}

/// How the output pixels of a batch are cut into blocks: several whole pictures, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    pub(super) batch: usize,
    /// Output pixels of a picture.
    pub(super) pixels: usize,
    /// Pictures of a block, and pixels of each.
    pub(super) pictures: usize,
    pub(super) part: usize,
}

/// A block: the pixels `first..first + part` of the pictures from `picture`.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) picture: usize,
    pub(super) pictures: usize,
    pub(super) first: usize,
    pub(super) part: usize,
}

impl Blocking {
    /// Rows a block has at most.
    pub(super) fn rows(&self) -> usize {
        self.pictures * self.part
    }

    /// The blocks of the images of a range, in order. A range that ends behind the batch, as the last of several equal
    /// ones may, ends with the batch: there are no blocks of images that do not exist.
    pub(super) fn of(self, pictures: std::ops::Range<usize>) -> impl Iterator<Item = Block> {
        let until = pictures.end.min(self.batch);
        (pictures.start..until).step_by(self.pictures).flat_map(move |picture| {
            let pictures = self.pictures.min(until - picture);
            (0..self.pixels).step_by(self.part).map(move |first| Block {
                picture,
                pictures,
                first,
                part: self.part.min(self.pixels - first),
            })
        })
    }

    pub(super) fn all(self) -> Vec<Block> {
        self.of(0..self.batch).collect()
    }
}

impl Block {
    pub(super) fn rows(&self) -> usize {
        self.pictures * self.part
    }

    /// The row of the whole batch that is the block's first. Its rows follow each other, because a block of
    /// several pictures has all their pixels.
    pub(super) fn row(&self, pixels: usize) -> usize {
        self.picture * pixels + self.first
    }
}
