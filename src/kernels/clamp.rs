//! Activations that only cut values off: cheap enough to be made again where their slope is wanted.

use candle_core::{Result, Tensor};

use super::{Activation, Real, activation};

/// What a normalisation applies to the values it makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClampActivation {
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `min(max(x, 0), 6)`.
    Relu6,
}

impl ClampActivation {
    /// The clip that is this activation, if it is one.
    pub fn from_activation(act: Activation) -> Option<Self> {
        match act {
            Activation::Identity => Some(ClampActivation::Identity),
            Activation::Relu => Some(ClampActivation::Relu),
            Activation::Relu6 => Some(ClampActivation::Relu6),
            _ => None,
        }
    }

    pub fn activation(self) -> Activation {
        match self {
            ClampActivation::Identity => Activation::Identity,
            ClampActivation::Relu => Activation::Relu,
            ClampActivation::Relu6 => Activation::Relu6,
        }
    }

    /// The lowest and the highest value let through.
    pub(super) fn bounds<R: Real>(self) -> (R, R) {
        let infinity = -R::NEG_INFINITY;
        match self {
            ClampActivation::Identity => (R::NEG_INFINITY, infinity),
            ClampActivation::Relu => (R::ZERO, infinity),
            ClampActivation::Relu6 => (R::ZERO, R::of_f64(6.0)),
        }
    }

    pub fn reference(self, x: &Tensor) -> Result<Tensor> {
        activation::reference::forward(x, self.activation())
    }
}

/// A NaN compares false and passes through.
#[inline(always)]
pub(super) fn clamp<R: Real>(x: R, (low, high): (R, R)) -> R {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `d` where the clipped value was let through as it was, else 0.
#[inline(always)]
pub(super) fn clamp_backward<R: Real>(x: R, d: R, (low, high): (R, R)) -> R {
    if x > low && x < high { d } else { R::ZERO }
}
