//! Gaussian blur of an image of bytes, as torchvision's `gaussian_blur`: a kernel of fixed size, mirrored borders.

use super::{bernoulli, uniform};
use crate::base::random::CounterRng;

/// With `probability`, blurs by a Gaussian whose standard deviation is drawn from a range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomBlur {
    pub probability: f64,
    /// Width of the kernel in pixels, odd.
    pub kernel: usize,
    /// Range of the standard deviation in pixels, above 0.
    pub sigma: [f64; 2],
}

impl RandomBlur {
    /// The standard deviation to blur with, if at all.
    pub fn draw(&self, draws: &mut CounterRng) -> Option<f64> {
        let blurs = bernoulli(draws, self.probability);
        blurs.then(|| uniform(draws, self.sigma))
    }
}

/// Weights of a Gaussian at the integers around its center; their sum is 1.
fn weights(kernel: usize, sigma: f64) -> Vec<f32> {
    let half = (kernel / 2) as f64;
    let density = |i: usize| (-0.5 * ((i as f64 - half) / sigma).powi(2)).exp();
    let total: f64 = (0..kernel).map(density).sum();
    (0..kernel).map(|i| (density(i) / total) as f32).collect()
}

/// Index of a pixel `at` beyond the border, mirrored without repeating the border pixel.
fn mirror(at: isize, len: usize) -> usize {
    let period = 2 * (len as isize - 1).max(1);
    let at = at.rem_euclid(period);
    (at.min(period - at) as usize).min(len - 1)
}

/// Blurs the (height, width, channels) `image` with a kernel of `kernel` x `kernel`; `rows` is a buffer of as many
/// floats.
pub fn gaussian_blur(
    [height, width, channels]: [usize; 3],
    image: &mut [u8],
    rows: &mut Vec<f32>,
    kernel: usize,
    sigma: f64,
) {
    let (weights, row, half) = (weights(kernel, sigma), width * channels, (kernel / 2) as isize);
    let taps = |at: usize, len: usize| {
        let neighbor = move |i: usize| mirror(at as isize + i as isize - half, len);
        weights.iter().enumerate().map(move |(i, weight)| (neighbor(i), *weight))
    };
    rows.clear();
    rows.resize(image.len(), 0.0);
    for (from, into) in image.chunks_exact(row).zip(rows.chunks_exact_mut(row)) {
        for x in 0..width {
            for (other, weight) in taps(x, width) {
                for c in 0..channels {
                    into[x * channels + c] += weight * f32::from(from[other * channels + c]);
                }
            }
        }
    }
    // One row of sums, so that each tap is a pass over contiguous values.
    let mut sums = vec![0.0; row];
    for (y, into) in image.chunks_exact_mut(row).enumerate() {
        sums.fill(0.0);
        for (other, weight) in taps(y, height) {
            let from = &rows[other * row..][..row];
            sums.iter_mut().zip(from).for_each(|(sum, value)| *sum += weight * value);
        }
        into.iter_mut().zip(&sums).for_each(|(value, sum)| *value = sum.round_ties_even() as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_are_mirrored_whatever_their_distance() {
        let line: Vec<usize> = (-5..8).map(|at| mirror(at, 3)).collect();
        assert_eq!(line, [1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1, 2, 1]);
        assert_eq!([mirror(-7, 1), mirror(0, 1), mirror(3, 1)], [0; 3]);
    }
}
