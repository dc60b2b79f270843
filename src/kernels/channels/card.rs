//! Normalisation of pictures on a card: what batch norm and group norm ask of `channels.cu`.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{DType, Result, Tensor};

use super::super::clip::Clip;
use super::super::cuda::{Stream, checked, code, fresh, pointer, pointer_or_null, scratch, stream};
use super::super::linear::Grads;
use super::{Cut, Parts, card_workspace};

/// The type a card computes statistics of this type's values in.
pub fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A normalisation: its channels are cut into `groups` that have statistics of their own.
pub struct Norm<'a> {
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
    pub act: Clip,
    pub eps: f64,
    pub cut: Cut,
    pub groups: usize,
}

/// Running mean and variance, and the share a new unit has in them.
pub type Moving<'a> = (&'a Tensor, &'a Tensor, f64);

impl Norm<'_> {
    fn raw(&self, x: &Tensor, kept: &Tensor) -> Result<Raw> {
        let Parts { chunk, parts } = Parts::new(x.dtype(), &self.cut);
        Ok(Raw {
            dtype: code(x.dtype())?,
            clip: match self.act {
                Clip::Nothing => 0,
                Clip::Relu => 1,
                Clip::Relu6 => 2,
            },
            size: (self.cut.channels / self.groups) as c_int,
            channels: self.cut.channels as c_int,
            rows: self.cut.rows as i64,
            unit: self.cut.unit as i64,
            chunk: chunk as i64,
            parts: parts as c_int,
            eps: self.eps,
            x: pointer(x)?,
            weight: pointer(self.weight)?,
            bias: pointer(self.bias)?,
            kept: pointer(kept)?,
        })
    }

    /// The output and (units, 2, groups) of mean and one over the deviation; `onto` is added before the clip.
    pub fn forward(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        running: Option<Moving>,
        onto: Option<&Tensor>,
    ) -> Result<(Tensor, Tensor)> {
        let dtype = x.dtype();
        let kept = fresh(device, wide(dtype), (self.cut.units(), 2, self.groups))?;
        let y = fresh(device, dtype, x.shape())?;
        let room = scratch(device, card_workspace(dtype, &self.cut, self.groups).0)?;
        let (mean, var, share) = match running {
            Some((mean, var, share)) => (pointer(mean)?, pointer(var)?, share),
            None => (std::ptr::null_mut(), std::ptr::null_mut(), 0.0),
        };
        let (raw, onto) = (self.raw(x, &kept)?, pointer_or_null(onto)?);
        // SAFETY: the tensors have the sizes that `raw` states, and outlive the launches in the stream's order.
        checked("channels_forward", unsafe {
            channels_forward(&raw, onto, pointer(&y)?, pointer(&room)?, mean, var, share, stream(device))
        })?;
        Ok((y, kept))
    }

    /// The output from what [`forward`](Self::forward) kept.
    pub fn again(&self, device: &CudaDevice, x: &Tensor, kept: &Tensor) -> Result<Tensor> {
        let y = fresh(device, x.dtype(), x.shape())?;
        let raw = self.raw(x, kept)?;
        // SAFETY: as above.
        checked("channels_apply", unsafe { channels_apply(&raw, pointer(&y)?, stream(device)) })?;
        Ok(y)
    }

    /// The output by a mean and a variance a channel; all rows are one unit.
    pub fn judge(&self, device: &CudaDevice, x: &Tensor, mean: &Tensor, var: &Tensor) -> Result<Tensor> {
        let y = fresh(device, x.dtype(), x.shape())?;
        let kept = fresh(device, wide(x.dtype()), (2, self.cut.channels))?;
        let raw = self.raw(x, &kept)?;
        let (mean, var) = (pointer(mean)?, pointer(var)?);
        // SAFETY: as above.
        checked("channels_judge", unsafe { channels_judge(&raw, mean, var, pointer(&y)?, stream(device)) })?;
        Ok(y)
    }

    /// Adds the parameters' gradients to `grads` and returns the input's where it is wanted. Where something was added
    /// before the clip, its output `y` says what it let through, and `dy` becomes that, in place.
    pub fn backward(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        kept: &Tensor,
        (dy, y): (&Tensor, Option<&Tensor>),
        grads: &Grads,
        want: bool,
    ) -> Result<Option<Tensor>> {
        let dx = want.then(|| fresh(device, x.dtype(), x.shape())).transpose()?;
        let room = scratch(device, card_workspace(x.dtype(), &self.cut, self.groups).1)?;
        let raw = self.raw(x, kept)?;
        let (dweight, dbias) = (pointer(grads.weight)?, pointer_or_null(grads.bias)?);
        let (dy, y, to) = (pointer(dy)?, pointer_or_null(y)?, pointer_or_null(dx.as_ref())?);
        // SAFETY: as above; gradients are of the type computed with.
        checked("channels_backward", unsafe {
            channels_backward(&raw, dy, y, to, dweight, dbias, pointer(&room)?, stream(device))
        })?;
        Ok(dx)
    }
}

/// `Norm` in channels.cu.
#[repr(C)]
struct Raw {
    dtype: c_int,
    clip: c_int,
    size: c_int,
    channels: c_int,
    rows: i64,
    unit: i64,
    chunk: i64,
    parts: c_int,
    eps: f64,
    x: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    kept: *mut c_void,
}

unsafe extern "C" {
    fn channels_forward(
        norm: *const Raw,
        onto: *const c_void,
        y: *mut c_void,
        scratch: *mut c_void,
        mean: *mut c_void,
        var: *mut c_void,
        share: f64,
        stream: Stream,
    ) -> c_int;
    fn channels_apply(norm: *const Raw, y: *mut c_void, stream: Stream) -> c_int;
    fn channels_judge(
        norm: *const Raw,
        mean: *const c_void,
        var: *const c_void,
        y: *mut c_void,
        stream: Stream,
    ) -> c_int;
    fn channels_backward(
        norm: *const Raw,
        dy: *mut c_void,
        y: *const c_void,
        dx: *mut c_void,
        dweight: *mut c_void,
        dbias: *mut c_void,
        scratch: *mut c_void,
        stream: Stream,
    ) -> c_int;
}
