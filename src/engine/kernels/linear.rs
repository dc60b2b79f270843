//! `y = act(x W^T + b)`: a GEMM with bias and activation fused.

#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod hopper;

use candle_core::{DType, Result, Tensor};

use super::activation::{apply, each_activation};
use super::clamp::ClampActivation;
use super::grid::GRID_SMS;
use super::matmul::{
    CpuEpilogue, MatView, Threading, Transposed, gemm, gemm_workspace, matmul, matmul_epilogue,
    matmul_workspace,
};
use super::partial_sums::{self, PartialSums};
use super::{Activation, Elem, SavedForBackward, cpu, reference};
use crate::{vectorised, with_elem};

/// Memory layout of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightLayout {
    /// (out, in), like `torch.nn.Linear`.
    OutIn,
    /// (in, out), like GPT-2's `Conv1D`.
    InOut,
}

/// The operands of a linear layer; `x` is (..., in), and its leading dimensions are rows.
pub struct LinearKernel<'a> {
    pub weight: &'a Tensor,
    pub weight_layout: WeightLayout,
    pub bias: Option<&'a Tensor>,
    pub act: Activation,
}

/// The gradients that a backward pass accumulates into; `None` for a frozen parameter.
#[derive(Clone, Copy)]
pub struct WeightBiasGrads<'a> {
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// The activation whose output is this layer's input: its backward pass can be fused into this layer's input-gradient
/// GEMM.
#[derive(Clone, Copy)]
pub struct ActBackward<'a> {
    pub act: Activation,
    /// Its pre-activation.
    pub v: &'a Tensor,
    /// The gradient of the bias added before it.
    pub bias: Option<&'a Tensor>,
}

impl LinearKernel<'_> {
    /// (in, out)
    fn in_out_features(&self) -> Result<(usize, usize)> {
        let (a, b) = self.weight.dims2()?;
        Ok(if self.weight_layout == WeightLayout::OutIn { (b, a) } else { (a, b) })
    }

    /// `W` as the (in, out) right operand.
    fn weight_matrix<'a, T>(&self, w: &'a [T]) -> Result<MatView<'a, T>> {
        let (a, b) = self.weight.dims2()?;
        let w = MatView::new(w, a, b);
        Ok(if self.weight_layout == WeightLayout::OutIn { w.t() } else { w })
    }

    fn output_shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let mut shape = x.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.in_out_features()?.1;
        }
        Ok(shape)
    }

    /// Reference implementation.
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        activate(&self.preactivation(x)?, self.act)
    }

    fn preactivation(&self, x: &Tensor) -> Result<Tensor> {
        let (k, _) = self.in_out_features()?;
        let rows = x.elem_count() / k;
        let w =
            if self.weight_layout == WeightLayout::OutIn { self.weight.t()? } else { self.weight.clone() };
        let y = x.reshape((rows, k))?.matmul(&w)?;
        let y = match self.bias {
            Some(b) => y.broadcast_add(b)?,
            None => y,
        };
        y.reshape(self.output_shape(x)?)
    }

    /// Returns the output, and the pre-activation if the activation's backward pass reads it.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
        on_cuda!(x, |device| self.forward_cuda(device, x, None));
        if !reference::has_cpu_kernel(x) {
            let pre = self.preactivation(x)?;
            let y = activate(&pre, self.act)?;
            return Ok((y, (self.act.saved_for_backward() == SavedForBackward::Input).then_some(pre)));
        }
        with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, None))
    }

    /// Like `forward`, then `act(y + residual)`. The addition is fused into the GEMM if neither activation is present.
    pub fn forward_add_act(
        &self,
        x: &Tensor,
        residual: &Tensor,
        act: Activation,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let unfused = || -> Result<(Tensor, Option<Tensor>)> {
            let (y, pre) = self.forward(x)?;
            Ok((super::add::inplace(&y, residual, act)?, pre))
        };
        if [self.act, act] != [Activation::Identity; 2] {
            return unfused();
        }
        on_cuda!(x, |device| self.forward_cuda(device, x, Some(residual)));
        if reference::has_cpu_kernel(x) {
            return with_elem!(x.dtype(), T => self.forward_cpu::<T>(x, Some(residual)));
        }
        unfused()
    }

    /// Adds `residual` to the output if it is given.
    fn forward_cpu<T: Elem>(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let ((k, n), shape) = (self.in_out_features()?, self.output_shape(x)?);
        let (values, w) = (cpu::view::<T>(x)?, cpu::view::<T>(self.weight)?);
        let bias = self.bias.map(cpu::view::<T>).transpose()?;
        let residual = residual.map(cpu::view::<T>).transpose()?;
        let rows = values.len() / k;
        let (x, w) = (MatView::new(&values, rows, k), self.weight_matrix(&w)?);
        let epilogue = CpuEpilogue {
            bias: bias.as_deref(),
            clamp: ClampActivation::from_activation(self.act).unwrap_or(ClampActivation::Identity),
            residual: residual.as_deref(),
        };
        let mut out = cpu::uninit::<T>(rows * n);
        match (epilogue.bias, epilogue.clamp, epilogue.residual) {
            (None, ClampActivation::Identity, None) => matmul(&mut out, x, w, Threading::Parallel),
            _ => matmul_epilogue(&mut out, x, w, epilogue),
        }
        if self.act.saved_for_backward() == SavedForBackward::Input {
            let mut y = cpu::uninit::<T>(rows * n);
            cpu::parallel_for_rows(&mut y, 1, |start, y| apply(&out[start..][..y.len()], y, self.act));
            return Ok((cpu::tensor(y, shape.clone())?, Some(cpu::tensor(out, shape)?)));
        }
        if ClampActivation::from_activation(self.act).is_none() {
            cpu::parallel_for_rows(&mut out, n, |_, rows| bias_activation(rows, n, None, self.act));
        }
        Ok((cpu::tensor(out, shape)?, None))
    }

    /// The shape of an input, from that of the gradient of its output.
    fn input_shape(&self, dy: &Tensor) -> Result<Vec<usize>> {
        let mut shape = dy.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.in_out_features()?.0;
        }
        Ok(shape)
    }

    /// Accumulates the parameter gradients into `grads` and returns the input gradient if `needs_input_grad`. Only the
    /// weight gradient reads `x`. `v` is the tensor that [`Activation::saved_for_backward`] names; `dy` is overwritten.
    pub fn backward(
        &self,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        on_cuda!(&dy, |device| self.backward_cuda(device, x, v, &dy, grads, needs_input_grad));
        if !reference::has_cpu_kernel(&dy) {
            return match x {
                Some(x) => self.backward_reference(x, dy, grads, needs_input_grad),
                None => candle_core::bail!("linear: the reference needs the input"),
            };
        }
        with_elem!(dy.dtype(), T => self.backward_cpu::<T>(x, v, dy, grads, needs_input_grad))
    }

    /// The part of `backward` that does not read the input; CUDA only. It turns `dy` into the gradient before the
    /// activation in place, accumulates the bias gradient, and returns the input gradient if requested, plus
    /// `residual_grad`. With `recompute`, `v` becomes the activation's output in the pass that computes its derivative.
    ///
    /// The second value of the result says whether `act_backward` was fused into the input gradient: then its `v` now
    /// holds its output, and its bias gradient is accumulated.
    pub fn backward_input(
        &self,
        v: Option<&Tensor>,
        dy: &Tensor,
        bias: Option<&Tensor>,
        (needs_input_grad, residual_grad): (bool, Option<&Tensor>),
        (recompute, act_backward): (bool, Option<ActBackward>),
    ) -> Result<(Option<Tensor>, bool)> {
        on_cuda!(dy, |device| self.backward_input_cuda(
            device,
            v,
            dy,
            bias,
            (needs_input_grad, residual_grad),
            (recompute, act_backward),
        ));
        let _ = (v, bias, needs_input_grad, residual_grad, recompute, act_backward);
        candle_core::bail!("linear: split backward needs a CUDA tensor, not {:?}", dy.device().location())
    }

    /// The rest of `backward` after [`backward_input`](Self::backward_input), with the `dy` that it left.
    pub fn backward_weight(&self, x: &Tensor, dy: &Tensor, dweight: &Tensor) -> Result<()> {
        on_cuda!(dy, |_device| self.backward_weight_cuda(x, dy, dweight));
        let _ = (x, dweight);
        candle_core::bail!("linear: split backward needs a CUDA tensor, not {:?}", dy.device().location())
    }

    fn backward_cpu<T: Elem>(
        &self,
        x: Option<&Tensor>,
        v: Option<&Tensor>,
        dy: Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let (k, n) = self.in_out_features()?;
        let values = x.map(cpu::view::<T>).transpose()?;
        let rows = dy.elem_count() / n;
        let preactivation_grad = |v| {
            let v = cpu::view::<T>(v)?;
            cpu::with_slice_mut::<T, _>(&dy, |d| {
                activation_backward(d, Some(&v), self.act, n, grads.bias.is_some())
            })
        };
        let mut sums = v.map(preactivation_grad).transpose()?;
        if let Some(bias) = grads.bias {
            // Freed before the GEMMs.
            let sums = match sums.take() {
                Some(sums) => sums,
                None => column_sums(&cpu::view::<T>(&dy)?, n),
            };
            cpu::with_slice_mut::<T::Acc, _>(bias, |bias| sums.add_to(bias, 0))?;
        }
        let (d, w) = (cpu::view::<T>(&dy)?, cpu::view::<T>(self.weight)?);
        let (d, w) = (MatView::new(&d, rows, n), self.weight_matrix(&w)?);
        let values = values.as_ref().map(|values| MatView::new(values, rows, k));
        let weight = || {
            let (Some(dw), Some(values)) = (grads.weight, values) else { return Ok(()) };
            cpu::with_slice_mut::<T::Acc, _>(dw, |dw| match self.weight_layout {
                WeightLayout::OutIn => gemm(dw, k, d.t(), values, true, Threading::Parallel),
                WeightLayout::InOut => gemm(dw, n, values.t(), d, true, Threading::Parallel),
            })
        };
        let input = || {
            let mut dx = cpu::uninit::<T>(rows * k);
            matmul(&mut dx, d, w.t(), Threading::Parallel);
            dx
        };
        // Both at once, so that threads rarely wait at the end of one.
        let (done, dx) = rayon::join(weight, || needs_input_grad.then(input));
        done?;
        dx.map(|dx| cpu::tensor(dx, self.input_shape(&dy)?)).transpose()
    }

    fn backward_reference(
        &self,
        x: &Tensor,
        dy: Tensor,
        grads: &WeightBiasGrads,
        needs_input_grad: bool,
    ) -> Result<Option<Tensor>> {
        let mut inputs = vec![x, self.weight];
        inputs.extend(self.bias);
        let computed = reference::gradients(&inputs, &dy, |t| {
            LinearKernel { weight: &t[1], weight_layout: self.weight_layout, bias: t.get(2), act: self.act }
                .reference(&t[0])
        })?;
        reference::accumulate_weight_bias(computed, grads, needs_input_grad)
    }
}

/// Bytes of [`column_sums`].
pub fn column_sums_bytes(dtype: DType, rows: usize, n: usize) -> u64 {
    partial_sums::bytes(dtype, rows, n, n)
}

/// What is trained of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct TrainedParts {
    pub weight: bool,
    pub bias: bool,
}

/// Bytes of temporaries of the forward and the backward pass with a weight of `k` inputs and `n` outputs.
pub fn workspace(
    dtype: DType,
    weight_layout: WeightLayout,
    rows: usize,
    (k, n): (usize, usize),
    trained: TrainedParts,
) -> (u64, u64) {
    let (of_output, of_input, of_weight) = match weight_layout {
        WeightLayout::OutIn => (Transposed::B, Transposed::NONE, (n, rows, k)),
        WeightLayout::InOut => (Transposed::NONE, Transposed::B, (k, rows, n)),
    };
    let output = matmul_workspace(dtype, (rows, k, n), of_output, Threading::Parallel);
    let input = matmul_workspace(dtype, (rows, n, k), of_input, Threading::Parallel);
    let weight = match trained.weight {
        true => gemm_workspace(dtype, of_weight, Transposed::A, Threading::Parallel),
        false => 0,
    };
    let sums = if trained.bias { column_sums_bytes(dtype, rows, n) } else { 0 };
    (output, (weight + input).max(sums))
}

/// Row ranges whose column sums CUDA computes separately. Enough thread blocks of 128 columns to put six on
/// each SM.
pub fn cuda_row_ranges(rows: usize, n: usize) -> usize {
    (6 * GRID_SMS / n.div_ceil(128)).clamp(1, rows.div_ceil(32).clamp(1, 256))
}

/// Bytes of the partial sums of a bias gradient on CUDA.
pub fn bias_gradient_workspace(dtype: DType, rows: usize, n: usize) -> u64 {
    (cuda_row_ranges(rows, n) * n * cpu::acc_bytes(dtype)) as u64
}

/// Whether the Hopper kernel takes a (rows, k) by (k, columns) GEMM of these sizes: whole column tiles, K long enough
/// that one tile's epilogue overlaps the next tile's main loop, and at least two tiles per SM.
pub fn hopper_supports(dtype: DType, rows: usize, columns: usize, k: usize) -> bool {
    let tiles = rows.div_ceil(128) * columns / 256;
    let whole = k.is_multiple_of(64) && columns.is_multiple_of(256);
    dtype == DType::BF16 && whole && k >= 6 * 64 && tiles >= 2 * GRID_SMS && rows <= i32::MAX as usize
}

/// Like [`hopper_supports`], for logits: the last column tile may be partial if there are many.
pub fn hopper_supports_logits(dtype: DType, rows: usize, classes: usize, width: usize) -> bool {
    classes >= 8 * 256 && hopper_supports(dtype, rows, classes.next_multiple_of(256), width)
}

/// Bytes of the per-column sums over every 64 rows that such a GEMM writes.
pub fn hopper_column_sums_bytes(rows: usize, columns: usize) -> usize {
    rows.div_ceil(64) * columns * size_of::<f32>()
}

fn activate(x: &Tensor, act: Activation) -> Result<Tensor> {
    super::activation::reference::forward(x, act)
}

/// `y = act(y + bias)` on rows of `n` values.
pub(super) fn bias_activation<T: Elem>(rows: &mut [T], n: usize, bias: Option<&[T]>, act: Activation) {
    match bias {
        None if act == Activation::Identity => {}
        None => vectorised!(T, || {
            each_activation!(act, f => rows.iter_mut().for_each(|y| *y = T::from_acc(f.value(y.to_acc()))))
        }),
        Some(bias) => vectorised!(T, || {
            each_activation!(act, f => {
                for row in rows.chunks_exact_mut(n) {
                    row.iter_mut().zip(bias).for_each(|(y, b)| *y = T::from_acc(f.value(y.to_acc() + b.to_acc())));
                }
            })
        }),
    }
}

/// Turns `d` into the gradient before the activation, in place. Returns the column sums of the result, of no columns
/// unless `with_sums`.
pub(super) fn activation_backward<T: Elem>(
    d: &mut [T],
    v: Option<&[T]>,
    act: Activation,
    n: usize,
    with_sums: bool,
) -> PartialSums<T::Acc> {
    let rows = if v.is_none() && !with_sums { 0 } else { d.len() / n };
    let d = cpu::DisjointSliceMut::new(d);
    PartialSums::of_rows(rows, n, if with_sums { n } else { 0 }, &|_, rows, sums| {
        // SAFETY: the ranges of rows do not overlap.
        let d = unsafe { d.range_mut(rows.start * n, rows.len() * n) };
        let v = v.map(|v| &v[rows.start * n..rows.end * n]);
        vectorised!(T, || {
            for (row, d) in d.chunks_exact_mut(n).enumerate() {
                if let Some(v) = v {
                    let v = &v[row * n..][..n];
                    each_activation!(act, f => d
                        .iter_mut()
                        .zip(v)
                        .for_each(|(d, v)| *d = T::from_acc(d.to_acc() * f.derivative(v.to_acc()))));
                }
                sums.iter_mut().zip(d).for_each(|(s, d)| *s += d.to_acc());
            }
        });
    })
}

/// Column sums of rows of `n` values.
pub(super) fn column_sums<T: Elem>(d: &[T], n: usize) -> PartialSums<T::Acc> {
    PartialSums::of_rows(d.len() / n, n, n, &|_, rows, sums| {
        vectorised!(T, || {
            for row in d[rows.start * n..rows.end * n].chunks_exact(n) {
                sums.iter_mut().zip(row).for_each(|(s, d)| *s += d.to_acc());
            }
        });
    })
}
