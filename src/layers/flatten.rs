//! A picture as a vector, in the order (channel, row, column) that other tools flatten in.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::turn;

pub struct Flatten {
    pub name: String,
    /// (height, width, channels), or any other shape, which is flattened as it lies.
    pub shape: Vec<usize>,
}

impl Flatten {
    /// (pixels, channels) where the two have to change places.
    fn turns(&self) -> Option<(usize, usize)> {
        match self.shape.as_slice() {
            &[h, w, c] if h * w > 1 && c > 1 => Some((h * w, c)),
            _ => None,
        }
    }

    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Layer for Flatten {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.len()]
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        let batch = x.dim(0)?;
        let x = match self.turns() {
            Some((pixels, c)) => turn::forward(x, pixels, c)?,
            None => x.clone(),
        };
        Ok((x.reshape((batch, self.len()))?, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, _: &Pass, _: bool) -> Result<Option<Tensor>> {
        let batch = dy.dim(0)?;
        let dx = match self.turns() {
            Some((pixels, c)) => turn::forward(&dy, c, pixels)?,
            None => dy,
        };
        Ok(Some(dx.reshape([&[batch], self.shape.as_slice()].concat())?))
    }

    fn cost(&self, at: At) -> Cost {
        let bytes = if self.turns().is_some() { at.bytes(self.len()) } else { 0 };
        Cost { input: bytes, output: bytes, view: bytes == 0, ..Cost::default() }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, cost_is_exact, differences_agree, random};
    use super::*;

    #[test]
    fn gradients_are_right_and_the_order_is_channels_first() {
        for shape in [vec![3, 2, 4], vec![1, 1, 5], vec![3, 3, 1], vec![6]] {
            let build = |_: &mut crate::params::Declared| {
                Box::new(Flatten { name: "f".into(), shape: shape.clone() }) as Box<dyn Layer>
            };
            let input = |batch: usize| random(&[&[batch], shape.as_slice()].concat(), 1);
            differences_agree(&build, &input(2));
            cost_is_exact(&build, &input);
            autograd_agrees(&build, &input(2), &|x, _| match shape.len() {
                3 => x.permute((0, 3, 1, 2))?.contiguous()?.flatten_from(1),
                _ => x.flatten_from(1)?.affine(1.0, 0.0),
            });
        }
    }
}
