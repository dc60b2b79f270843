//! Rotary position embeddings: pairs of a head's values are rotated by an angle proportional to the position.
//!
//! Value `i` is paired with value `i + head / 2`, as in Llama's published weights.

#[cfg(feature = "cuda")]
mod gpu;

use std::sync::OnceLock;

use candle_core::{Result, Tensor, bail};

use super::{Elem, Real};

/// Cosines and sines of every position. Built at first use, so a model that is only planned does not allocate them.
pub struct Rotary {
    length: usize,
    half: usize,
    theta: f64,
    /// (length, head / 2)
    tables: OnceLock<CosSinTables>,
}

struct CosSinTables {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotary {
    /// `head` is the head dimension, an even number; pair `i` rotates by `theta^(-2 i / head)` per position.
    pub fn new(length: usize, head: usize, theta: f64) -> Self {
        Self { length, half: head / 2, theta, tables: OnceLock::new() }
    }

    /// Base of the wavelengths.
    pub fn theta(&self) -> f64 {
        self.theta
    }

    fn tables(&self) -> &CosSinTables {
        self.tables.get_or_init(|| {
            let half = self.half;
            let angle = |at: usize| {
                let (position, pair) = (at / half, at % half);
                position as f64 * self.theta.powf(-2.0 * pair as f64 / (2 * half) as f64)
            };
            let table = |f: fn(f64) -> f64| (0..self.length * half).map(|at| f(angle(at)) as f32).collect();
            CosSinTables { cos: table(f64::cos), sin: table(f64::sin) }
        })
    }

    /// The same rotation for this many positions.
    pub fn with_length(&self, length: usize) -> Self {
        Self { length, half: self.half, theta: self.theta, tables: OnceLock::new() }
    }

    /// Whether it is `other` for this many positions.
    pub fn is_extension_of(&self, other: &Self, length: usize) -> bool {
        (self.length, self.half, self.theta) == (length, other.half, other.theta)
    }

    /// Bytes of its tables, once they are built.
    pub fn table_bytes(&self) -> u64 {
        (2 * self.length * self.half * size_of::<f32>()) as u64
    }

    /// Reference implementation, over (batch, heads, length, head).
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        self.reference_from(x, 0)
    }

    /// The same for positions that begin at `first`.
    pub fn reference_from(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let (_, _, length, _) = x.dims4()?;
        if first + length > self.length {
            bail!("rotary: positions {first} to {} of {}", first + length, self.length)
        }
        let table = |values: &[f32]| {
            Tensor::new(&values[first * self.half..][..length * self.half], x.device())?
                .reshape((length, self.half))?
                .to_dtype(x.dtype())
        };
        let CosSinTables { cos, sin } = self.tables();
        let (cos, sin) = (table(cos)?, table(sin)?);
        let (a, b) = (x.narrow(3, 0, self.half)?, x.narrow(3, self.half, self.half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second], 3)
    }

    /// `to = scale rotate(from)` for a head at `position`. `inverse` rotates back, which is the gradient.
    #[inline(always)]
    pub fn rotate<A: Elem, B: Elem<Acc = A::Acc>>(
        &self,
        from: &[A],
        to: &mut [B],
        position: usize,
        scale: A::Acc,
        inverse: bool,
    ) {
        let table = position * self.half..(position + 1) * self.half;
        let sign = if inverse { -scale } else { scale };
        let ((a, b), (to_a, to_b)) = (from.split_at(self.half), to.split_at_mut(self.half));
        let CosSinTables { cos, sin } = self.tables();
        let angles = cos[table.clone()].iter().zip(&sin[table]);
        for ((((a, b), to_a), to_b), (cos, sin)) in a.iter().zip(b).zip(to_a).zip(to_b).zip(angles) {
            let (cos, sin) = (A::Acc::of_f64(*cos as f64) * scale, A::Acc::of_f64(*sin as f64) * sign);
            *to_a = B::from_acc(a.to_acc() * cos - b.to_acc() * sin);
            *to_b = B::from_acc(b.to_acc() * cos + a.to_acc() * sin);
        }
    }
}
