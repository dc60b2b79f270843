//! Windows of a convolution on a card as rows of a matrix, in runs that fit a workspace: gathered before a product, and
//! added back after one.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::cuda::product::Mat;
use super::super::cuda::{Stream, checked, code, fresh, pointer, stream};
use super::super::windows::{Block, Blocking};
use super::card::Raw;
use super::{Geometry, card_row};

/// A matrix inside a tensor.
pub(super) fn part(of: &Tensor, from: usize, rows: usize, cols: usize, stride: usize) -> Mat<'_> {
    Mat { of, from, rows, cols, stride, turned: false }
}

/// Runs of output pixels whose windows have `room` values at most, but one window at least.
pub(super) fn runs(g: &Geometry, batch: usize, room: usize) -> Blocking {
    let (rows, pixels) = ((room / card_row(g)).max(1), g.pixels());
    Blocking { batch, pixels, pictures: (rows / pixels).clamp(1, batch), part: rows.min(pixels) }
}

/// The windows of a block as rows of [`card_row`] values.
pub(super) fn gather(
    device: &CudaDevice,
    g: &Geometry,
    x: &Tensor,
    to: &Tensor,
    group: usize,
    block: Block,
) -> Result<()> {
    let (first, rows) = (block.row(g.pixels()) as i64, block.rows() as i64);
    let (dtype, raw) = (code(x.dtype())?, Raw::new(g));
    let (x, to) = (pointer(x)?, pointer(to)?);
    // SAFETY: the block lies in the batch, and its windows in `to`.
    checked("conv_gather", unsafe {
        conv_gather(dtype, &raw, x, to, group as c_int, first, rows, card_row(g) as c_int, stream(device))
    })
}

/// The (n, k) matrix `of` in so many bytes, zeros after each of its rows up to `row` values.
pub(super) fn spread(
    device: &CudaDevice,
    of: &Tensor,
    bytes: usize,
    n: usize,
    k: usize,
    row: usize,
) -> Result<Tensor> {
    let to = fresh(device, of.dtype(), bytes / of.dtype().size_in_bytes())?;
    let (dtype, from, rows) = (code(of.dtype())?, pointer(of)?, n as i64);
    // SAFETY: both have `n` rows of the lengths stated.
    checked("conv_spread", unsafe {
        conv_spread(dtype, from, pointer(&to)?, rows, k as c_int, row as c_int, stream(device))
    })?;
    Ok(to)
}

/// Adds the (n, k) matrix of this type that lies in `what`, with `row` values between rows, to a gradient.
pub(super) fn add_to(
    device: &CudaDevice,
    dtype: DType,
    what: &Tensor,
    into: &Tensor,
    n: usize,
    k: usize,
    row: usize,
) -> Result<()> {
    let (dtype, what, into) = (code(dtype)?, pointer(what)?, pointer(into)?);
    // SAFETY: both have `n` rows of the lengths stated, of the types stated.
    checked("conv_add_to", unsafe {
        conv_add_to(dtype, what, into, n as i64, k as c_int, row as c_int, stream(device))
    })
}

pub(super) fn scatter(
    device: &CudaDevice,
    g: &Geometry,
    windows: &Tensor,
    dx: &Tensor,
    group: usize,
    block: Block,
    add: bool,
) -> Result<()> {
    let (line, lines) = lines(g, block);
    let (first, rows) = (block.row(g.pixels()) as i64, block.rows() as i64);
    let (dtype, raw) = (code(dx.dtype())?, Raw::new(g));
    let (from, to) = (pointer(windows)?, pointer(dx)?);
    // SAFETY: the block lies in the batch, its windows in `windows`, and the lines in `dx`.
    checked("conv_scatter", unsafe {
        conv_scatter(
            dtype,
            &raw,
            from,
            to,
            group as c_int,
            first,
            rows,
            line as i64,
            lines as i64,
            add as c_int,
            stream(device),
        )
    })
}

/// The lines of the input, counted over the batch, that the windows of a block see: the first, and how many.
fn lines(g: &Geometry, block: Block) -> (usize, usize) {
    let start = block.picture * g.height;
    if block.part == g.pixels() {
        return (start, block.pictures * g.height);
    }
    let width = g.output().1;
    let (top, bottom) = (block.first / width, (block.first + block.part - 1) / width);
    let from = (top * g.stride).saturating_sub(g.padding);
    let until = bottom * g.stride + (g.kernel - 1) * g.dilation + 1;
    let until = until.saturating_sub(g.padding).min(g.height);
    (start + from, until.saturating_sub(from))
}

unsafe extern "C" {
    fn conv_gather(
        dtype: c_int,
        g: *const Raw,
        x: *const c_void,
        to: *mut c_void,
        group: c_int,
        first: i64,
        rows: i64,
        row: c_int,
        stream: Stream,
    ) -> c_int;
    fn conv_spread(
        dtype: c_int,
        from: *const c_void,
        to: *mut c_void,
        rows: i64,
        columns: c_int,
        row: c_int,
        stream: Stream,
    ) -> c_int;
    fn conv_scatter(
        dtype: c_int,
        g: *const Raw,
        windows: *const c_void,
        dx: *mut c_void,
        group: c_int,
        first: i64,
        rows: i64,
        line: i64,
        lines: i64,
        add: c_int,
        stream: Stream,
    ) -> c_int;
    fn conv_add_to(
        dtype: c_int,
        what: *const c_void,
        into: *mut c_void,
        rows: i64,
        columns: c_int,
        row: c_int,
        stream: Stream,
    ) -> c_int;
}
