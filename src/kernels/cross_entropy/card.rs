//! The body for cards: products by cuBLASLt around a kernel that scores rows in place, or those of `fused`.

use std::ffi::{c_int, c_void};

use candle_core::cuda_backend::CudaDevice;
use candle_core::{Device, Result, Tensor, bail};

use super::fused::{Chunk, Fused};
use super::{ClassWeights, Head, card_chunk, card_stride};
use crate::kernels::cuda::columns::add_sums;
use crate::kernels::cuda::product::{Mat, Onto, Then, multiply};
use crate::kernels::cuda::{Stream, checked, code, fresh, graph, pointer, pointer_or_null, room, stream};
use crate::kernels::linear::Grads;
use crate::kernels::tally::Counted;
use crate::kernels::tally::card::Rows;

impl Head<'_> {
    pub(super) fn learn_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        targets: &Tensor,
        scale: f64,
        grads: &Grads,
    ) -> Result<(Counted, Tensor)> {
        let dx = fresh(device, x.dtype(), x.shape())?;
        let counted = self.chunks_card(device, x, targets, Some((scale, grads, &dx)))?;
        Ok((counted, dx))
    }

    pub(super) fn judge_card(&self, device: &CudaDevice, x: &Tensor, targets: &Tensor) -> Result<Counted> {
        self.chunks_card(device, x, targets, None)
    }

    fn chunks_card(
        &self,
        device: &CudaDevice,
        x: &Tensor,
        targets: &Tensor,
        learn: Option<(f64, &Grads, &Tensor)>,
    ) -> Result<Counted> {
        let (classes, width) = self.weight.dims2()?;
        let rows = x.elem_count() / width;
        let per_row = targets.elem_count() / rows.max(1);
        if ![1, 3].contains(&per_row) || per_row * rows != targets.elem_count() {
            bail!("{} target values for {rows} rows", targets.elem_count())
        }
        let (chunk, stride) = (card_chunk(x.dtype(), rows, classes), card_stride(classes));
        let scores = fresh(device, x.dtype(), chunk * stride)?;
        let weights = self.class_weights.map(|weights| weights.on(x.device())).transpose()?;
        let all_weights = match self.class_weights {
            Some(w) => w.iter().map(|w| *w as f64).sum(),
            None => classes as f64,
        };
        let counts = Rows::new(device, rows)?;
        let filled = self.filled(classes, width, learn.map(|(_, grads, _)| grads))?;
        let w = Mat::new(self.weight, filled, width);
        let fused = match learn {
            Some(_) if per_row == 1 => Fused::new(self, device, x, chunk)?,
            _ => None,
        };
        for first in (0..rows).step_by(chunk.max(1)) {
            let n = chunk.min(rows - first);
            let part = |of| Mat { from: first * width, rows: n, ..Mat::new(of, rows, width) };
            let x = part(x);
            let d = Mat { rows: n, cols: filled, ..Mat::new(&scores, chunk, stride) };
            let targets = pointer(targets)?.cast::<u32>().wrapping_add(first * per_row);
            let tally = counts.from(first)?;
            if let (Some(fused), Some((scale, grads, dx))) = (&fused, learn) {
                fused.learn(device, Chunk { x, scores: d, dx: part(dx), targets, tally }, scale, grads)?;
                continue;
            }
            multiply(&d, x, w.t(), Onto::Nothing, Then::Nothing)?;
            let (loss, weight, hits) = tally;
            let asked = Asked {
                dtype: code(scores.dtype())?,
                learn: learn.is_some() as c_int,
                scores: pointer(&scores)?,
                bias: pointer_or_null(self.bias)?,
                weights: pointer_or_null(weights.as_ref())?.cast(),
                targets,
                loss,
                weight,
                hits,
                rows: n as i64,
                stride: stride as i64,
                classes: classes as c_int,
                filled: filled as c_int,
                per_row: per_row as c_int,
                smoothing: self.smoothing,
                all_weights,
                scale: learn.map_or(0.0, |(scale, ..)| scale),
            };
            // SAFETY: every pointer has `n` rows, or a value a class.
            checked("cross_entropy_score", unsafe { cross_entropy_score(&asked, stream(device)) })?;
            let Some((_, grads, dx)) = learn else { continue };
            multiply(&Mat::new(grads.weight, filled, width), d.t(), x, Onto::Itself, Then::Nothing)?;
            multiply(&part(dx), d, w, Onto::Nothing, Then::Nothing)?;
            if let Some(bias) = grads.bias {
                add_sums(device, bias, Mat { cols: classes, ..d })?;
            }
        }
        counts.add(device)
    }

    /// The classes that products are made with: as many more as tensor cores like to have, where the rows behind the
    /// weight's are there to be read. They are other parameters' in one buffer of all: the scores they give are looked at
    /// by nobody, and the gradient they get is zero.
    fn filled(&self, classes: usize, width: usize, grads: Option<&Grads>) -> Result<usize> {
        let filled = classes.next_multiple_of(8);
        let mut least = room(self.weight)?;
        if let Some(grads) = grads {
            least = least.min(room(grads.weight)?);
        }
        Ok(if filled * width <= least { filled } else { classes })
    }
}

impl ClassWeights {
    /// Uploaded by the first pass that needs them, which is not captured, and kept.
    fn on(&self, device: &Device) -> Result<Tensor> {
        if let Some(there) = self.uploaded.get() {
            return Ok(there.clone());
        }
        graph::not_capturable("class weights are not on the device yet");
        let there = Tensor::new(&**self, device)?;
        Ok(self.uploaded.get_or_init(|| there).clone())
    }
}

/// `Asked` in cross_entropy.cu.
#[repr(C)]
struct Asked {
    dtype: c_int,
    learn: c_int,
    scores: *mut c_void,
    bias: *const c_void,
    weights: *const f32,
    targets: *const u32,
    loss: *mut f64,
    weight: *mut f64,
    hits: *mut u32,
    rows: i64,
    stride: i64,
    classes: c_int,
    filled: c_int,
    per_row: c_int,
    smoothing: f64,
    all_weights: f64,
    scale: f64,
}

unsafe extern "C" {
    fn cross_entropy_score(asked: *const Asked, stream: Stream) -> c_int;
}
