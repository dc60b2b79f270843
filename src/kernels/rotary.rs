//! Rotary positions: pairs of a head's values are turned by an angle that grows with the position.
//!
//! Value `i` is paired with value `i + head / 2`, as Llama's published weights have it.

use candle_core::{Result, Tensor};

use super::{Elem, Real};

/// Cosines and sines of every position, computed once for a model.
pub struct Rotary {
    /// (length, head / 2)
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl Rotary {
    /// `head` values a head, an even number; pair `i` turns by `theta^(-2 i / head)` a position.
    pub fn new(length: usize, head: usize, theta: f64) -> Self {
        let half = head / 2;
        let angle = |at: usize| {
            let (position, pair) = (at / half, at % half);
            position as f64 * theta.powf(-2.0 * pair as f64 / head as f64)
        };
        let table = |f: fn(f64) -> f64| (0..length * half).map(|at| f(angle(at)) as f32).collect();
        Self { cos: table(f64::cos), sin: table(f64::sin), half }
    }

    /// The reference, over (batch, heads, length, head).
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let (_, _, length, _) = x.dims4()?;
        let table = |values: &[f32]| {
            Tensor::new(&values[..length * self.half], x.device())?
                .reshape((length, self.half))?
                .to_dtype(x.dtype())
        };
        let (cos, sin) = (table(&self.cos)?, table(&self.sin)?);
        let (a, b) = (x.narrow(3, 0, self.half)?, x.narrow(3, self.half, self.half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    /// `to = scale turn(from)` for a head at `position`; turned back, which is the gradient, where `back`.
    #[inline(always)]
    pub fn turn<A: Elem, B: Elem<Acc = A::Acc>>(
        &self,
        from: &[A],
        to: &mut [B],
        position: usize,
        scale: A::Acc,
        back: bool,
    ) {
        let table = position * self.half..(position + 1) * self.half;
        let sign = if back { -scale } else { scale };
        let ((a, b), (to_a, to_b)) = (from.split_at(self.half), to.split_at_mut(self.half));
        let angles = self.cos[table.clone()].iter().zip(&self.sin[table]);
        for ((((a, b), to_a), to_b), (cos, sin)) in a.iter().zip(b).zip(to_a).zip(to_b).zip(angles) {
            let (cos, sin) = (A::Acc::of(*cos as f64) * scale, A::Acc::of(*sin as f64) * sign);
            *to_a = B::down(a.up() * cos - b.up() * sin);
            *to_b = B::down(b.up() * cos + a.up() * sin);
        }
    }
}
