//! Color jitter: random changes of brightness, contrast, saturation and hue, in random order.
//!
//! Operates on values of 0 to 1 and keeps them there. The formulas are torchvision's, without its rounding to bytes
//! after each step.

use super::uniform;
use crate::base::random::CounterRng;

/// Strength of each change. The first three multiply by a factor between max(0, 1 - x) and 1 + x; the hue shifts by up
/// to x of a full turn in either direction. 0 disables a change.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ColorJitter {
    pub brightness: f64,
    pub contrast: f64,
    pub saturation: f64,
    pub hue: f64,
}

impl ColorJitter {
    /// Applies the jitter to an image of 1 or 3 `channels`.
    pub fn apply(&self, channels: usize, draws: &mut CounterRng, values: &mut [f32]) {
        let mut factor = |reach: f64| uniform(draws, [(1.0 - reach).max(0.0), 1.0 + reach]) as f32;
        let factors = [factor(self.brightness), factor(self.contrast), factor(self.saturation)];
        let hue_shift = uniform(draws, [-self.hue, self.hue]) as f32;
        let mut order = [0, 1, 2, 3];
        for last in (1..order.len()).rev() {
            order.swap(last, draws.below(last as u64 + 1) as usize);
        }
        for change in order {
            match change {
                0 if self.brightness > 0.0 => brightness(values, factors[0]),
                1 if self.contrast > 0.0 => contrast(values, channels, factors[1]),
                2 if self.saturation > 0.0 && channels == 3 => saturation(values, factors[2]),
                3 if self.hue > 0.0 && channels == 3 => hue(values, hue_shift),
                _ => {}
            }
        }
    }
}

/// Perceived brightness of a pixel.
fn luma(pixel: &[f32]) -> f32 {
    match pixel {
        [r, g, b] => 0.2989 * r + 0.587 * g + 0.114 * b,
        _ => pixel[0],
    }
}

fn blend(value: f32, with: f32, weight: f32) -> f32 {
    (weight * value + (1.0 - weight) * with).clamp(0.0, 1.0)
}

fn brightness(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|v| *v = blend(*v, 0.0, factor));
}

/// Blends with the mean gray level of the image.
fn contrast(values: &mut [f32], channels: usize, factor: f32) {
    let pixels = values.len() / channels;
    let sum: f64 = values.chunks_exact(channels).map(|pixel| luma(pixel) as f64).sum();
    let mean = (sum / pixels as f64) as f32;
    values.iter_mut().for_each(|v| *v = blend(*v, mean, factor));
}

/// Blends each pixel with its own gray level.
fn saturation(values: &mut [f32], factor: f32) {
    for pixel in values.as_chunks_mut::<3>().0 {
        let grey = luma(pixel);
        pixel.iter_mut().for_each(|v| *v = blend(*v, grey, factor));
    }
}

/// Shifts the hue by `shift` of a full turn; saturation and value stay the same.
fn hue(values: &mut [f32], shift: f32) {
    for pixel in values.as_chunks_mut::<3>().0 {
        let [h, s, v] = hsv_from_rgb(*pixel);
        *pixel = rgb_from_hsv([(h + shift).rem_euclid(1.0), s, v]);
    }
}

/// Hue, saturation and value, each of 0 to 1.
fn hsv_from_rgb([r, g, b]: [f32; 3]) -> [f32; 3] {
    let (most, least) = (r.max(g).max(b), r.min(g).min(b));
    let spread = most - least;
    if spread <= 0.0 {
        return [0.0, 0.0, most];
    }
    let sixth = if most == r {
        (g - b) / spread
    } else if most == g {
        2.0 + (b - r) / spread
    } else {
        4.0 + (r - g) / spread
    };
    [(sixth / 6.0).rem_euclid(1.0), spread / most, most]
}

fn rgb_from_hsv([h, s, v]: [f32; 3]) -> [f32; 3] {
    // A channel is at its maximum for a third of the hue circle, at its minimum for another, and linear in between.
    let channel = |offset: f32| {
        let k = (offset + h * 6.0).rem_euclid(6.0);
        v - v * s * k.min(4.0 - k).clamp(0.0, 1.0)
    };
    [channel(5.0), channel(3.0), channel(1.0)].map(|x| x.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::random::RngKey;

    proptest! {
        #[test]
        fn values_stay_in_range_and_depend_on_the_draws_alone(
            values in prop::collection::vec(0.0..=1.0f32, 12), key: u64,
            reach in [0.0..2.0f64, 0.0..2.0f64, 0.0..2.0f64, 0.0..0.5f64],
        ) {
            let jitter = ColorJitter { brightness: reach[0], contrast: reach[1], saturation: reach[2], hue: reach[3] };
            let run = |channels| {
                let mut values = values.clone();
                jitter.apply(channels, &mut RngKey::new(key, 0).rng(), &mut values);
                values
            };
            for channels in [1, 3] {
                let once = run(channels);
                prop_assert!(once.iter().all(|v| (0.0..=1.0).contains(v)), "{once:?}");
                prop_assert_eq!(once, run(channels));
            }
        }

        #[test]
        fn hue_goes_round(pixel in [0.0..=1.0f32, 0.0..=1.0f32, 0.0..=1.0f32]) {
            let [h, s, v] = hsv_from_rgb(pixel);
            prop_assert!([h, s, v].iter().all(|x| (0.0..=1.0).contains(x)));
            for (back, was) in rgb_from_hsv([h, s, v]).iter().zip(&pixel) {
                prop_assert!((back - was).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn a_zero_jitter_changes_nothing() {
        let mut values = [0.1, 0.5, 0.9, 0.3, 0.3, 0.3];
        ColorJitter::default().apply(3, &mut RngKey::new(1, 2).rng(), &mut values);
        assert_eq!(values, [0.1, 0.5, 0.9, 0.3, 0.3, 0.3]);
    }

    #[test]
    fn each_change_is_its_formula() {
        let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        let mut v = [0.2, 0.4, 0.8];
        brightness(&mut v, 1.5);
        assert!(close(&v, &[0.3, 0.6, 1.0]), "{v:?}");
        let mut v = [0.2, 0.6];
        contrast(&mut v, 1, 0.5);
        assert!(close(&v, &[0.3, 0.5]), "{v:?}");
        let mut v = [1.0, 0.0, 0.0];
        saturation(&mut v, 0.0);
        assert!(close(&v, &[0.2989; 3]), "{v:?}");
        let mut v = [1.0, 0.0, 0.0];
        hue(&mut v, 1.0 / 3.0);
        assert!(close(&v, &[0.0, 1.0, 0.0]), "{v:?}");
        let mut v = [0.5, 0.25, 0.25];
        hue(&mut v, -1.0 / 3.0);
        assert!(close(&v, &[0.25, 0.25, 0.5]), "{v:?}");
    }
}
