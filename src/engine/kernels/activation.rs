//! Element-wise activations: value and derivative, standalone and for the kernels that fuse them.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Elem, Real, cpu, reference as reference_kernel};
use crate::{vectorised, with_elem};

/// What a layer applies to each value it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// None at all.
    Identity,
    /// `max(x, 0)`.
    #[default]
    Relu,
    /// `min(max(x, 0), 6)`.
    Relu6,
    /// `x Phi(x)`, exact.
    Gelu,
    /// GPT-2's approximation of GELU through `tanh`.
    GeluTanh,
    /// `x sigmoid(x)`, also called swish.
    Silu,
    Sigmoid,
    Tanh,
}

/// What an activation's backward pass reads: its input or its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavedForBackward {
    Nothing,
    Input,
    Output,
}

impl Activation {
    pub fn saved_for_backward(self) -> SavedForBackward {
        match self {
            Activation::Identity => SavedForBackward::Nothing,
            Activation::Relu | Activation::Relu6 | Activation::Sigmoid | Activation::Tanh => {
                SavedForBackward::Output
            }
            Activation::Gelu | Activation::GeluTanh | Activation::Silu => SavedForBackward::Input,
        }
    }

    #[inline(always)]
    pub fn value<R: Real>(self, x: R) -> R {
        let half = R::of_f64(0.5);
        match self {
            Activation::Identity => x,
            // NaN compares false, so it propagates.
            Activation::Relu => {
                if x < R::ZERO {
                    R::ZERO
                } else {
                    x
                }
            }
            Activation::Relu6 => {
                if x < R::ZERO {
                    R::ZERO
                } else if x > R::of_f64(6.0) {
                    R::of_f64(6.0)
                } else {
                    x
                }
            }
            Activation::Gelu => half * x * (R::ONE + (x * R::of_f64(std::f64::consts::FRAC_1_SQRT_2)).erf()),
            Activation::GeluTanh => half * x * (R::ONE + gelu_tanh_argument(x).tanh()),
            Activation::Silu => x * sigmoid(x),
            Activation::Sigmoid => sigmoid(x),
            Activation::Tanh => x.tanh(),
        }
    }

    /// The derivative; `v` is the input or the output, as [`Activation::saved_for_backward`] says.
    #[inline(always)]
    pub fn derivative<R: Real>(self, v: R) -> R {
        let half = R::of_f64(0.5);
        match self {
            Activation::Identity => R::ONE,
            Activation::Relu => {
                if v > R::ZERO {
                    R::ONE
                } else {
                    R::ZERO
                }
            }
            Activation::Relu6 => {
                if v > R::ZERO && v < R::of_f64(6.0) {
                    R::ONE
                } else {
                    R::ZERO
                }
            }
            Activation::Gelu => {
                let phi = (-half * v * v).exp() * R::of_f64(0.398_942_280_401_432_7);
                half * (R::ONE + (v * R::of_f64(std::f64::consts::FRAC_1_SQRT_2)).erf()) + v * phi
            }
            Activation::GeluTanh => {
                let t = gelu_tanh_argument(v).tanh();
                let di = R::of_f64(SQRT_2_OVER_PI) * (R::ONE + R::of_f64(3.0 * CUBIC) * v * v);
                half * (R::ONE + t) + half * v * (R::ONE - t * t) * di
            }
            Activation::Silu => {
                let s = sigmoid(v);
                s * (R::ONE + v * (R::ONE - s))
            }
            Activation::Sigmoid => v * (R::ONE - v),
            Activation::Tanh => R::ONE - v * v,
        }
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044715;

#[inline(always)]
fn gelu_tanh_argument<R: Real>(x: R) -> R {
    R::of_f64(SQRT_2_OVER_PI) * x * (R::ONE + R::of_f64(CUBIC) * x * x)
}

#[inline(always)]
fn sigmoid<R: Real>(x: R) -> R {
    R::ONE / (R::ONE + (-x).exp())
}

/// Plain candle ops. They run on every device; tests differentiate them with autograd.
pub mod reference {
    use super::*;

    pub fn forward(x: &Tensor, act: Activation) -> Result<Tensor> {
        match act {
            Activation::Identity => Ok(x.clone()),
            Activation::Relu => x.relu(),
            Activation::Relu6 => x.clamp(0f32, 6f32),
            Activation::Gelu => x.gelu_erf(),
            Activation::GeluTanh => x.gelu(),
            Activation::Silu => x.silu(),
            Activation::Sigmoid => candle_nn::ops::sigmoid(x),
            Activation::Tanh => x.tanh(),
        }
    }

    pub fn backward(v: &Tensor, dy: &Tensor, act: Activation) -> Result<Tensor> {
        match act {
            Activation::Sigmoid => dy * (v - v.sqr()?)?,
            Activation::Tanh => dy * v.sqr()?.affine(-1.0, 1.0)?,
            // Computed from the output. Autograd would count the zeros that Relu makes as its derivative's kink.
            Activation::Relu => dy * v.gt(0.0)?.to_dtype(v.dtype())?,
            Activation::Relu6 => dy * (v.gt(0.0)? * v.lt(6.0)?)?.to_dtype(v.dtype())?,
            _ => Ok(reference_kernel::gradients(&[v], dy, |t| forward(&t[0], act))?.remove(0)),
        }
    }
}

/// `y = act(x)`, any shape.
pub fn forward(x: &Tensor, act: Activation) -> Result<Tensor> {
    on_cuda!(x, |device| gpu::forward(device, x, act));
    if !reference_kernel::has_cpu_kernel(x) {
        return reference::forward(x, act);
    }
    with_elem!(x.dtype(), T => {
        let values = cpu::view::<T>(x)?;
        let mut out = cpu::uninit::<T>(values.len());
        cpu::parallel_for_rows(&mut out, 1, |start, chunk| apply(&values[start..][..chunk.len()], chunk, act));
        cpu::tensor(out, x.shape())
    })
}

/// `dx = dy act'(v)`, where `v` is the tensor that [`Activation::saved_for_backward`] names.
pub fn backward(v: &Tensor, dy: &Tensor, act: Activation) -> Result<Tensor> {
    on_cuda!(dy, |device| {
        let dx = cuda::uninit(device, dy.dtype(), dy.shape())?;
        gpu::backward(device, v, dy, &dx, act)?;
        Ok(dx)
    });
    if !reference_kernel::has_cpu_kernel(dy) {
        return reference::backward(v, dy, act);
    }
    with_elem!(dy.dtype(), T => {
        let (v, g) = (cpu::view::<T>(v)?, cpu::view::<T>(dy)?);
        let mut out = cpu::uninit::<T>(g.len());
        cpu::parallel_for_rows(&mut out, 1, |start, chunk| {
            multiply_by_derivative(&v[start..][..chunk.len()], &g[start..][..chunk.len()], chunk, act)
        });
        cpu::tensor(out, dy.shape())
    })
}

/// Binds `$f` to the activation. Each common activation gets its own match arm, so the compiler sees a constant and
/// vectorizes the loop.
macro_rules! each_activation {
    ($act:expr, $f:ident => $body:expr) => {{
        macro_rules! arm {
            ($name:ident) => {{
                let $f = Activation::$name;
                $body
            }};
        }
        match $act {
            Activation::Identity => arm!(Identity),
            Activation::Relu => arm!(Relu),
            Activation::Gelu => arm!(Gelu),
            Activation::GeluTanh => arm!(GeluTanh),
            Activation::Silu => arm!(Silu),
            $f => $body,
        }
    }};
}
pub(super) use each_activation;

pub(super) fn apply<T: Elem>(x: &[T], y: &mut [T], act: Activation) {
    vectorised!(
        T,
        || each_activation!(act, f => x.iter().zip(y).for_each(|(x, y)| *y = T::from_acc(f.value(x.to_acc())))),
    )
}

fn multiply_by_derivative<T: Elem>(v: &[T], dy: &[T], dx: &mut [T], act: Activation) {
    vectorised!(T, || {
        each_activation!(act, f => {
            for ((dx, v), dy) in dx.iter_mut().zip(v).zip(dy) {
                *dx = T::from_acc(dy.to_acc() * f.derivative(v.to_acc()));
            }
        })
    })
}
