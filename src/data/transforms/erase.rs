//! Random erasing: blanks a rectangle of the sample, so that the model cannot rely on any single region.

use std::ops::Range;

use super::bernoulli;
use super::geometry::random_rect;
use crate::base::random::CounterRng;

/// With `probability`, blanks a rectangle whose fraction of the area and whose aspect ratio (width / height) are drawn
/// from the given ranges. Blank is 0, the normalized mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomErasing {
    pub probability: f64,
    pub area: [f64; 2],
    pub ratio: [f64; 2],
}

/// Draws before giving up on a rectangle that fits; the sample then stays unchanged.
const MAX_TRIES: usize = 10;

impl RandomErasing {
    /// Rows and columns to blank in a sample of (height, width) `size`, if any.
    pub fn draw(&self, size: [usize; 2], draws: &mut CounterRng) -> Option<[Range<usize>; 2]> {
        if !bernoulli(draws, self.probability) {
            return None;
        }
        let part = (0..MAX_TRIES).find_map(|_| random_rect(size, self.area, self.ratio, draws))?;
        let range = |start: f64, len: f64| start as usize..(start + len) as usize;
        Some([range(part.top, part.height), range(part.left, part.width)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::RngKey;

    #[test]
    fn the_probability_the_area_and_the_ratio_are_those_requested() {
        let erasing = RandomErasing { probability: 0.25, area: [0.02, 0.33], ratio: [0.3, 3.3] };
        let drawn: Vec<_> =
            (0..4000).filter_map(|key| erasing.draw([60, 80], &mut RngKey::new(key, 7).rng())).collect();
        assert!((800..1200).contains(&drawn.len()), "{}", drawn.len());
        let mut areas = Vec::new();
        for [rows, columns] in drawn {
            assert!(rows.end <= 60 && columns.end <= 80 && !rows.is_empty() && !columns.is_empty());
            let ratio = columns.len() as f64 / rows.len() as f64;
            assert!(ratio > 0.25 && ratio < 3.9, "{ratio}");
            areas.push((rows.len() * columns.len()) as f64 / 4800.0);
        }
        let mean = areas.iter().sum::<f64>() / areas.len() as f64;
        // Uniform over the range, except for the few rectangles that did not fit.
        assert!((mean - 0.17).abs() < 0.02, "{mean}");
        assert!(
            RandomErasing { probability: 0.0, ..erasing }
                .draw([9, 9], &mut RngKey::new(1, 1).rng())
                .is_none()
        );
    }
}
