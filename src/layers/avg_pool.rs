//! Average pooling over (height, width, channels) pictures.

use candle_core::{Result, Tensor};

use super::{At, Cost, Layer, Pass, Saved};
use crate::kernels::average::{windows, windows_backward};
use crate::kernels::pool::Window;

pub struct AvgPool {
    pub name: String,
    pub window: Window,
}

impl Layer for AvgPool {
    fn name(&self) -> &str {
        &self.name
    }

    fn output(&self) -> Vec<usize> {
        let (h, w) = self.window.output();
        vec![h, w, self.window.channels]
    }

    fn forward(&self, x: &Tensor, _: &Pass) -> Result<(Tensor, Saved)> {
        Ok((windows(x, &self.window)?, Saved::default()))
    }

    fn backward(&self, _: Saved, dy: Tensor, _: &Pass, want: bool) -> Result<Option<Tensor>> {
        want.then(|| windows_backward(&dy, &self.window)).transpose()
    }

    fn cost(&self, at: At) -> Cost {
        let (w, output) = (&self.window, self.output().iter().product::<usize>());
        let acc = at.dtype.size_in_bytes().max(4);
        Cost {
            input: at.bytes(w.height * w.width * w.channels),
            output: at.bytes(output),
            forward: (at.threads() * w.channels * acc) as u64,
            flops: (at.batch * output * w.size * w.size) as u64,
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
    use crate::kernels::average::reference_windows;
    use proptest::prelude::*;

    #[test]
    fn bf16_follows_f64() {
        for (size, stride, padding) in [(2, 2, 0), (3, 2, 1), (3, 1, 1)] {
            let window = Window { height: 12, width: 10, channels: 24, size, stride, padding };
            let x = random(&[3, 12, 10, 24], 1);
            bf16_follows(&|_| Box::new(AvgPool { name: "p".into(), window }), &x);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn gradients_are_right(size in 1usize..4, stride in 1usize..4, padding in 0usize..2, channels in 1usize..4, dh in 0usize..5, dw in 0usize..5) {
            let window = Window { height: size + dh, width: size + dw, channels, size, stride, padding: padding.min(size / 2) };
            let build = |_: &mut crate::params::Declared| Box::new(AvgPool { name: "p".into(), window }) as Box<dyn Layer>;
            let input = |batch: usize| random(&[batch, window.height, window.width, channels], 1);
            differences_agree(&build, &input(2));
            cost_is_exact(&build, &input);
            autograd_agrees(&build, &input(2), &|x, _| reference_windows(x, &window));
        }
    }
}
