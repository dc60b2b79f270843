//! Flattens an image to a vector in (channel, row, column) order, like PyTorch.

use candle_core::{Result, Tensor};

use super::{Cost, Layer, PassContext, SavedTensors};
use crate::base::MicroBatchSpec;
use crate::kernels::transpose;

pub struct Flatten {
    pub name: String,
    /// (height, width, channels) is transposed; any other shape is flattened in memory order.
    pub shape: Vec<usize>,
}

impl Flatten {
    /// (pixels, channels) if flattening needs a transpose.
    fn transpose_dims(&self) -> Option<(usize, usize)> {
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

    fn output_shape(&self) -> Vec<usize> {
        vec![self.len()]
    }

    fn forward(&self, x: &Tensor, _: &PassContext) -> Result<(Tensor, SavedTensors)> {
        let batch = x.dim(0)?;
        let x = match self.transpose_dims() {
            Some((pixels, c)) => transpose::forward(x, pixels, c)?,
            None => x.clone(),
        };
        Ok((x.reshape((batch, self.len()))?, SavedTensors::default()))
    }

    fn backward(&self, _: SavedTensors, dy: Tensor, _: &PassContext, _: bool) -> Result<Option<Tensor>> {
        let batch = dy.dim(0)?;
        let dx = match self.transpose_dims() {
            Some((pixels, c)) => transpose::forward(&dy, c, pixels)?,
            None => dy,
        };
        Ok(Some(dx.reshape([&[batch], self.shape.as_slice()].concat())?))
    }

    fn cost(&self, spec: MicroBatchSpec) -> Cost {
        let bytes = if self.transpose_dims().is_some() { spec.bytes(self.len()) } else { 0 };
        Cost { input_grad: bytes, output: bytes, output_is_view: bytes == 0, ..Cost::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gradcheck::{
        check_against_autograd, check_cost, check_finite_differences, random_tensor,
    };
    use super::*;

    #[test]
    fn gradients_are_right_and_the_order_is_channels_first() {
        for shape in [vec![3, 2, 4], vec![1, 1, 5], vec![3, 3, 1], vec![6]] {
            let build = |_: &mut crate::params::ParamRegistry| {
                Box::new(Flatten { name: "f".into(), shape: shape.clone() }) as Box<dyn Layer>
            };
            let input = |batch: usize| random_tensor(&[&[batch], shape.as_slice()].concat(), 1);
            check_finite_differences(&build, &input(2));
            check_cost(&build, &input);
            check_against_autograd(&build, &input(2), &|x, _| match shape.len() {
                3 => x.permute((0, 3, 1, 2))?.contiguous()?.flatten_from(1),
                _ => x.flatten_from(1)?.affine(1.0, 0.0),
            });
        }
    }
}
