//! Global average pooling: a (height, width, channels) picture to its mean a channel.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::average::{whole, whole_backward};

pub struct GlobalPool {
    pub name: String,
    /// (height, width, channels)
    pub shape: [usize; 3],
}

impl Layer for GlobalPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        vec![self.shape[2]]
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        Ok((whole(x)?, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        let [h, w, _] = self.shape;
        want.then(|| whole_backward(&dy, (h, w))).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let [h, w, c] = self.shape;
        let acc = at.dtype.size_in_bytes().max(4);
        Cost {
            input: at.bytes(h * w * c),
            output: at.bytes(c),
            forward: (at.threads() * c * acc) as u64,
            flops: (at.batch * h * w * c) as u64,
            ..Cost::default()
        }
    }

    fn parameters(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{autograd_agrees, bf16_follows, cost_is_exact, differences_agree, random};
    use super::*;
    use crate::kernels::average::reference_whole;

    #[test]
    fn bf16_follows_f64() {
        let x = random(&[3, 9, 7, 40], 1);
        bf16_follows(&|_| Box::new(GlobalPool { name: "p".into(), shape: [9, 7, 40] }), &x);
    }

    #[test]
    fn gradients_are_right() {
        for shape in [[1, 1, 5], [3, 2, 4], [7, 7, 33]] {
            let build = |_: &mut crate::params::Declared| {
                Box::new(GlobalPool { name: "p".into(), shape }) as Box<dyn Layer>
            };
            let input = |batch: usize| random(&[batch, shape[0], shape[1], shape[2]], 1);
            differences_agree(&build, &input(2));
            cost_is_exact(&build, &input);
            autograd_agrees(&build, &input(2), &|x, _| reference_whole(x));
        }
    }
}
