//! The distribution of many values, in two passes over pieces of them: their range, then counts in equal bins.

/// Bins between the lowest and the highest value.
const BINS: usize = 64;

/// Counts in bins of equal width. Values that are not finite are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    pub min: f64,
    pub max: f64,
    pub count: u64,
    pub sum: f64,
    pub sum_squares: f64,
    /// Upper edge of each bin.
    pub limits: Vec<f64>,
    pub counts: Vec<u64>,
}

impl Histogram {
    /// `for_each_piece` calls its argument with all values, in any pieces, and is called twice. `None` if no value is
    /// finite.
    pub fn of<E>(
        for_each_piece: impl Fn(&mut dyn FnMut(&[f32])) -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        let finite =
            |piece: &[f32]| piece.iter().map(|x| f64::from(*x)).filter(|x| x.is_finite()).collect::<Vec<_>>();
        let (mut count, mut sum, mut sum_squares) = (0, 0.0, 0.0);
        let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
        for_each_piece(&mut |piece| {
            for x in finite(piece) {
                (min, max) = (min.min(x), max.max(x));
                (count, sum, sum_squares) = (count + 1, sum + x, sum_squares + x * x);
            }
        })?;
        if count == 0 {
            return Ok(None);
        }
        let width = if max > min { (max - min) / BINS as f64 } else { f64::from(f32::EPSILON) };
        let mut counts = vec![0; BINS];
        for_each_piece(&mut |piece| {
            for x in finite(piece) {
                counts[(((x - min) / width) as usize).min(BINS - 1)] += 1;
            }
        })?;
        let limits = (1..=BINS).map(|bin| min + bin as f64 * width).collect();
        Ok(Some(Self { min, max, count, sum, sum_squares, limits, counts }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(values: &[f32], piece: usize) -> Option<Histogram> {
        let pieces = |each: &mut dyn FnMut(&[f32])| -> Result<(), ()> {
            values.chunks(piece).for_each(each);
            Ok(())
        };
        Histogram::of(pieces).unwrap()
    }

    #[test]
    fn values_are_counted_whatever_the_pieces() {
        let values: Vec<f32> = (0..=128).map(|i| i as f32 / 2.0).chain([f32::NAN, f32::INFINITY]).collect();
        let found = histogram(&values, 7).unwrap();
        assert_eq!((found.min, found.max, found.count, found.sum), (0.0, 64.0, 129, 4128.0));
        assert_eq!(
            (found.counts[0], found.counts[62], found.counts[63]),
            (2, 2, 3),
            "the last bin has its edge"
        );
        assert_eq!((found.limits[0], found.limits[63]), (1.0, 64.0));
        assert_eq!(histogram(&values, 1000), Some(found));
    }

    #[test]
    fn equal_values_and_none_are_no_exception() {
        assert_eq!(histogram(&[0.5; 9], 4).unwrap().counts[0], 9);
        assert_eq!(histogram(&[f32::NAN], 1), None);
    }
}
