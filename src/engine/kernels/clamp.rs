//! Activations that only clamp: cheap enough to recompute where their derivative is needed.

use candle_core::{Result, Tensor};

use super::{Activation, Real, activation};

/// The activation a normalization fuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClampActivation {
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// `min(max(x, 0), 6)`.
    Relu6,
}

impl ClampActivation {
    /// `act` as a clamp, if it is one.
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

    /// The bounds of the clamp.
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

/// NaN compares false, so it propagates.
#[inline(always)]
pub(super) fn clamp<R: Real>(x: R, (low, high): (R, R)) -> R {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `d` where the clamp did not change `x`, else 0.
#[inline(always)]
pub(super) fn clamp_backward<R: Real>(x: R, d: R, (low, high): (R, R)) -> R {
    if x > low && x < high { d } else { R::ZERO }
}
