//! Rotation, translation, scaling and shear of an image of bytes, in one resampling.
//!
//! The matrix is that of torchvision's `affine`, the bilinear sampling that of Pillow's `transform`, except that values
//! are rounded where Pillow truncates them. Pixels from outside the image are black.

use super::uniform;
use crate::base::random::CounterRng;

/// A random affine map about the center of the image, as torchvision's `RandomAffine` draws it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomAffine {
    /// Largest angle in either direction, in degrees.
    pub rotation: f64,
    /// Largest shift in either direction, as a fraction of the side.
    pub translate: f64,
    /// Range of the factor by which the image grows.
    pub scale: [f64; 2],
    /// Largest angle in either direction, in degrees, by which vertical lines lean.
    pub shear: f64,
}

impl Default for RandomAffine {
    fn default() -> Self {
        Self { rotation: 0.0, translate: 0.0, scale: [1.0; 2], shear: 0.0 }
    }
}

impl RandomAffine {
    pub fn draw(&self, [height, width]: [usize; 2], draws: &mut CounterRng) -> AffineMap {
        let degrees = uniform(draws, [-self.rotation, self.rotation]);
        let mut shift = |side: usize| {
            let most = self.translate * side as f64;
            uniform(draws, [-most, most]).round()
        };
        let translate = [shift(width), shift(height)];
        let scale = uniform(draws, self.scale);
        let shear = [uniform(draws, [-self.shear, self.shear]), 0.0];
        let center = [width, height].map(|side| side as f64 / 2.0);
        AffineMap::new(&AffineParameters { center, degrees, translate, scale, shear })
    }
}

/// What an [`AffineMap`] does to an image. Pairs are (x, y).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineParameters {
    /// Fixed point of rotation, scaling and shear, in pixels.
    pub center: [f64; 2],
    /// Clockwise rotation.
    pub degrees: f64,
    /// Shift in pixels, after the rest.
    pub translate: [f64; 2],
    pub scale: f64,
    /// Shear along each axis, in degrees below 90.
    pub shear: [f64; 2],
}

/// Maps a point (x, y) of the result to the point of the image that it shows:
/// (m\[0\] x + m\[1\] y + m\[2\], m\[3\] x + m\[4\] y + m\[5\]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AffineMap([f64; 6]);

impl AffineMap {
    pub fn new(p: &AffineParameters) -> Self {
        let [rotation, shear_x, shear_y] = [p.degrees, p.shear[0], p.shear[1]].map(f64::to_radians);
        let (cos, sin) = ((rotation - shear_y).cos(), (rotation - shear_y).sin());
        let a = cos / shear_y.cos();
        let b = -cos * shear_x.tan() / shear_y.cos() - rotation.sin();
        let c = sin / shear_y.cos();
        let d = -sin * shear_x.tan() / shear_y.cos() + rotation.cos();
        // [[a, b], [c, d]] has determinant 1.
        let [d, b, c, a] = [d, -b, -c, a].map(|v| v / p.scale);
        let [x, y] = [0, 1].map(|i| p.center[i] + p.translate[i]);
        Self([d, b, p.center[0] - d * x - b * y, c, a, p.center[1] - c * x - a * y])
    }

    fn is_identity(&self) -> bool {
        self.0 == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    }

    /// Replaces the (height, width, channels) `image`; `spare` is a buffer of the same size.
    pub fn apply(&self, [height, width, channels]: [usize; 3], image: &mut Vec<u8>, spare: &mut Vec<u8>) {
        if self.is_identity() {
            return;
        }
        spare.clear();
        spare.resize(image.len(), 0);
        let m = &self.0;
        for (y, row) in spare.chunks_exact_mut(width * channels).enumerate() {
            for (x, pixel) in row.chunks_exact_mut(channels).enumerate() {
                let (x, y) = (x as f64 + 0.5, y as f64 + 0.5);
                let (from_x, from_y) = (m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]);
                if !(0.0..width as f64).contains(&from_x) || !(0.0..height as f64).contains(&from_y) {
                    continue;
                }
                let ([left, right], dx) = neighbors(from_x, width);
                let ([above, below], dy) = neighbors(from_y, height);
                for (c, value) in pixel.iter_mut().enumerate() {
                    let at = |y: usize, x: usize| f64::from(image[(y * width + x) * channels + c]);
                    let mix = |a: f64, b: f64, weight: f64| a + (b - a) * weight;
                    let (upper, lower) = (
                        mix(at(above, left), at(above, right), dx),
                        mix(at(below, left), at(below, right), dx),
                    );
                    *value = (mix(upper, lower, dy) + 0.5) as u8;
                }
            }
        }
        std::mem::swap(image, spare);
    }
}

/// The pixels on both sides of `at`, and the weight of the second. At the border both are the same.
fn neighbors(at: f64, len: usize) -> ([usize; 2], f64) {
    let first = (at - 0.5).floor();
    let clamp = |i: f64| i.clamp(0.0, (len - 1) as f64) as usize;
    ([clamp(first), clamp(first + 1.0)], at - 0.5 - first)
}
