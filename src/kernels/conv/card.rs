//! Convolution on a card: a plain product where a window is one pixel; windows gathered in runs of rows and multiplied
//! where it has few channels; else cuDNN where it is there and has an engine that gives the same bits every time, and
//! gathered windows again where it has not.
//!
//! Whoever makes it is given the same room, so that what a convolution takes is known without asking.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::channels::card::wide;
use super::super::channels::{Cut, Parts};
use super::super::cuda::product::{Mat, Onto, Then, multiply, tf32};
use super::super::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream};
use super::gathered::{add_to, gather, part, runs, scatter, spread};
use super::{
    Activation, Conv, Geometry, Grads, Reads, card_filter, card_gradient, card_room, card_row, depthwise,
};

/// What cuDNN is asked for: `What` in conv/cudnn.cpp.
#[derive(Clone, Copy)]
enum What {
    Output = 0,
    InputGradient = 1,
    WeightGradient = 2,
}

impl Conv<'_> {
    pub(super) fn forward_card(&self, device: &CudaDevice, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        let g = &self.geometry;
        let ((h, w), batch) = (g.output(), x.dim(0)?);
        let y = fresh(device, x.dtype(), (batch, h, w, g.outputs))?;
        if y.elem_count() > 0 {
            if g.is_depthwise() {
                depthwise::card::forward(device, g, x, self.weight, &y)?;
            } else {
                self.products(device, x, &y)?;
            }
        }
        let keeps = self.act.reads() == Reads::Input;
        let pre = keeps.then(|| fresh(device, y.dtype(), y.shape())).transpose()?;
        if self.bias.is_some() || self.act != Activation::Identity {
            let (rows, Parts { chunk, parts }) = self.parts(&y);
            let (to, pre) = (pointer(&y)?, pointer_or_null(pre.as_ref())?);
            let bias = pointer_or_null(self.bias)?;
            let (dtype, act, n) = (code(y.dtype())?, self.act as c_int, g.outputs as c_int);
            // SAFETY: `y` and `pre` have `rows` rows of `n` values, and outlive the launch in the stream's order.
            checked("conv_finish", unsafe {
                conv_finish(
                    dtype,
                    act,
                    to,
                    pre,
                    bias,
                    rows as i64,
                    n,
                    chunk as i64,
                    parts as c_int,
                    stream(device),
                )
            })?;
        }
        Ok((y, pre))
    }

    /// The output before bias and activation.
    fn products(&self, device: &CudaDevice, x: &Tensor, y: &Tensor) -> Result<()> {
        let g = &self.geometry;
        let (k, n, batch) = (g.window(), g.outputs, x.dim(0)?);
        let rows = batch * g.pixels();
        if g.is_product() {
            let w = Mat::new(self.weight, n, k).t();
            return multiply(&Mat::new(y, rows, n), Mat::new(x, rows, k), w, Onto::Nothing, Then::Nothing);
        }
        let (dtype, row) = (x.dtype(), card_row(g));
        let room = fresh(device, dtype, card_room(g, batch, dtype) / dtype.size_in_bytes())?;
        if !gathers(g) && self.cudnn(device, What::Output, [x, self.weight, y], &room)? {
            return Ok(());
        }
        let apart = match card_filter(g, dtype) {
            0 => None,
            bytes => Some(spread(device, self.weight, bytes, n, k, row)?),
        };
        let (ng, weight) = (n / g.groups, apart.as_ref().unwrap_or(self.weight));
        for block in runs(g, batch, room.elem_count()).all() {
            for group in 0..g.groups {
                gather(device, g, x, &room, group, block)?;
                let out = part(y, block.row(g.pixels()) * n + group * ng, block.rows(), ng, n);
                let w = part(weight, group * ng * row, ng, row, row).t();
                multiply(&out, Mat::new(&room, block.rows(), row), w, Onto::Nothing, Then::Nothing)?;
            }
        }
        Ok(())
    }

    /// As `backward`; `onto` is added where the convolution is a product.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn backward_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        v: Option<&Tensor>,
        dy: &Tensor,
        grads: &Grads,
        want: bool,
        onto: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let g = &self.geometry;
        self.through(device, v, dy, grads)?;
        if dy.elem_count() == 0 {
            return match onto {
                Some(onto) => Ok(Some(onto.clone())),
                None => want.then(|| Tensor::zeros(x.shape(), x.dtype(), x.device())).transpose(),
            };
        }
        if g.is_depthwise() {
            depthwise::card::weight_gradient(device, g, x, dy, grads.weight)?;
            return want
                .then(|| depthwise::card::input_gradient(device, g, dy, self.weight, x.shape()))
                .transpose();
        }
        if !g.is_product() {
            self.weight_gradient_card(device, x, dy, grads.weight)?;
            return want.then(|| self.input_gradient_card(device, dy, x)).transpose();
        }
        let (k, n, rows) = (g.window(), g.outputs, x.dim(0)? * g.pixels());
        let d = Mat::new(dy, rows, n);
        let dw = Mat::new(grads.weight, n, k);
        multiply(&dw, d.t(), Mat::new(x, rows, k), Onto::Itself, Then::Nothing)?;
        if !want {
            return Ok(None);
        }
        let dx = fresh(device, x.dtype(), x.shape())?;
        let w = Mat::new(self.weight, n, k);
        multiply(&Mat::new(&dx, rows, k), d, w, onto.map_or(Onto::Nothing, Onto::Other), Then::Nothing)?;
        Ok(Some(dx))
    }

    /// Turns `dy` into the gradient before the activation, in place, and adds the bias's gradient.
    fn through(&self, device: &CudaDevice, v: Option<&Tensor>, dy: &Tensor, grads: &Grads) -> Result<()> {
        if grads.bias.is_none() && self.act == Activation::Identity {
            return Ok(());
        }
        let (rows, Parts { chunk, parts }) = self.parts(dy);
        let sums = grads
            .bias
            .map(|_| scratch(device, parts * self.geometry.outputs * wide(dy.dtype()).size_in_bytes()));
        let sums = sums.transpose()?;
        let (partials, dbias) = (pointer_or_null(sums.as_ref())?, pointer_or_null(grads.bias)?);
        let (v, d) = (pointer_or_null(v)?, pointer(dy)?);
        let (dtype, act, n) = (code(dy.dtype())?, self.act as c_int, self.geometry.outputs as c_int);
        // SAFETY: `v` and `dy` have `rows` rows of `n` values, the sums `parts`; all outlive the launches in the
        // stream's order.
        checked("conv_through", unsafe {
            conv_through(
                dtype,
                act,
                v,
                d,
                partials,
                dbias,
                rows as i64,
                n,
                chunk as i64,
                parts as c_int,
                stream(device),
            )
        })
    }

    /// Rows of an output, and how blocks go down them.
    fn parts(&self, y: &Tensor) -> (usize, Parts) {
        let channels = self.geometry.outputs;
        let rows = y.elem_count() / channels;
        (rows, Parts::new(y.dtype(), &Cut { channels, rows, unit: rows }))
    }

    fn weight_gradient_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        dy: &Tensor,
        into: &Tensor,
    ) -> Result<()> {
        let g = &self.geometry;
        let (k, n, batch, row) = (g.window(), g.outputs, x.dim(0)?, card_row(g));
        let (dtype, acc) = (x.dtype(), into.dtype());
        let apart = fresh(device, acc, card_gradient(g, dtype) / acc.size_in_bytes())?;
        let room = fresh(device, dtype, card_room(g, batch, dtype) / dtype.size_in_bytes())?;
        if !gathers(g) && self.cudnn(device, What::WeightGradient, [dy, x, &apart], &room)? {
            return add_to(device, dtype, &apart, into, n, k, k);
        }
        let (ng, direct) = (n / g.groups, row == k);
        let sums = if direct { into } else { &apart };
        for (i, block) in runs(g, batch, room.elem_count()).all().into_iter().enumerate() {
            for group in 0..g.groups {
                gather(device, g, x, &room, group, block)?;
                let d = part(dy, block.row(g.pixels()) * n + group * ng, block.rows(), ng, n).t();
                let out = part(sums, group * ng * row, ng, row, row);
                let onto = if direct || i > 0 { Onto::Itself } else { Onto::Nothing };
                multiply(&out, d, Mat::new(&room, block.rows(), row), onto, Then::Nothing)?;
            }
        }
        if direct { Ok(()) } else { add_to(device, acc, &apart, into, n, k, row) }
    }

    /// The gradient of the input `x`, whose values are not read.
    fn input_gradient_card(&self, device: &CudaDevice, dy: &Tensor, x: &Tensor) -> Result<Tensor> {
        let g = &self.geometry;
        let (k, n, batch) = (g.window(), g.outputs, x.dim(0)?);
        let (dtype, acc) = (x.dtype(), wide(x.dtype()));
        let windows = fresh(device, acc, card_room(g, batch, dtype) / acc.size_in_bytes())?;
        let dx = fresh(device, dtype, x.shape())?;
        if self.cudnn(device, What::InputGradient, [dy, self.weight, &dx], &windows)? {
            return Ok(dx);
        }
        let (ng, blocking) = (n / g.groups, runs(g, batch, windows.elem_count()));
        // Where a run is a part of a picture it adds to what the run before left.
        let whole = blocking.part == blocking.pixels;
        let dx = if whole {
            dx
        } else {
            drop(dx);
            Tensor::zeros(x.shape(), dtype, x.device())?
        };
        for block in blocking.all() {
            for group in 0..g.groups {
                let d = part(dy, block.row(g.pixels()) * n + group * ng, block.rows(), ng, n);
                let w = part(self.weight, group * ng * k, ng, k, k);
                multiply(&Mat::new(&windows, block.rows(), k), d, w, Onto::Nothing, Then::Nothing)?;
                scatter(device, g, &windows, &dx, group, block, !whole)?;
            }
        }
        Ok(dx)
    }

    /// Asks cuDNN for the last of three tensors, with `room` as workspace; whether it has an engine for that.
    fn cudnn(
        &self,
        device: &CudaDevice,
        what: What,
        [a, b, out]: [&Tensor; 3],
        room: &Tensor,
    ) -> Result<bool> {
        if a.dtype() == DType::F64 {
            return Ok(false);
        }
        let g = Raw::new(&self.geometry);
        let asked = Asked {
            dtype: code(a.dtype())?,
            what: what as c_int,
            tf32: tf32() as c_int,
            batch: a.dim(0)? as c_int,
            height: g.height,
            width: g.width,
            inputs: g.inputs,
            out_height: g.out_height,
            out_width: g.out_width,
            outputs: g.outputs,
            kernel: g.kernel,
            stride: g.stride,
            padding: g.padding,
            dilation: g.dilation,
            groups: g.groups,
            a: pointer(a)?,
            b: pointer(b)?,
            out: pointer(out)?,
            workspace: pointer(room)?,
            room: (room.elem_count() * room.dtype().size_in_bytes()) as i64,
        };
        // SAFETY: the tensors have the sizes of the geometry, and outlive the launch in the stream's order.
        match unsafe { conv_cudnn(&asked, stream(device)) } {
            NONE => Ok(false),
            code => checked("conv_cudnn", code).map(|()| true),
        }
    }
}

/// Whether windows are gathered also where cuDNN is: it would fill up the channels of such pictures with zeros first,
/// and takes two to five times as long.
fn gathers(g: &Geometry) -> bool {
    g.groups == 1 && g.inputs < 8
}

/// `Geometry` in cuda/windows.cuh.
#[repr(C)]
pub(in super::super) struct Raw {
    height: c_int,
    width: c_int,
    inputs: c_int,
    out_height: c_int,
    out_width: c_int,
    outputs: c_int,
    kernel: c_int,
    stride: c_int,
    padding: c_int,
    dilation: c_int,
    groups: c_int,
}

impl Raw {
    pub(in super::super) fn new(g: &Geometry) -> Self {
        let (h, w) = g.output();
        Self {
            height: g.height as c_int,
            width: g.width as c_int,
            inputs: g.inputs as c_int,
            out_height: h as c_int,
            out_width: w as c_int,
            outputs: g.outputs as c_int,
            kernel: g.kernel as c_int,
            stride: g.stride as c_int,
            padding: g.padding as c_int,
            dilation: g.dilation as c_int,
            groups: g.groups as c_int,
        }
    }
}

/// `Asked` in conv/cudnn.cpp.
#[repr(C)]
struct Asked {
    dtype: c_int,
    what: c_int,
    tf32: c_int,
    batch: c_int,
    height: c_int,
    width: c_int,
    inputs: c_int,
    out_height: c_int,
    out_width: c_int,
    outputs: c_int,
    kernel: c_int,
    stride: c_int,
    padding: c_int,
    dilation: c_int,
    groups: c_int,
    a: *const c_void,
    b: *const c_void,
    out: *mut c_void,
    workspace: *mut c_void,
    room: i64,
}

/// What `conv_cudnn` returns where there is no engine.
const NONE: c_int = -1;

unsafe extern "C" {
    fn conv_cudnn(asked: *const Asked, stream: Stream) -> c_int;
    fn conv_finish(
        dtype: c_int,
        act: c_int,
        y: *mut c_void,
        pre: *mut c_void,
        bias: *const c_void,
        rows: i64,
        n: c_int,
        chunk: i64,
        parts: c_int,
        stream: Stream,
    ) -> c_int;
    fn conv_through(
        dtype: c_int,
        act: c_int,
        v: *const c_void,
        dy: *mut c_void,
        sums: *mut c_void,
        dbias: *mut c_void,
        rows: i64,
        n: c_int,
        chunk: i64,
        parts: c_int,
        stream: Stream,
    ) -> c_int;
}
