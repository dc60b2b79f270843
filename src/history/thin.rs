//! Thins a curve to a bounded number of points while it is read.
//!
//! The steps are divided into buckets, of which each keeps the points of its lowest and of its highest value: no spike
//! is lost, and every point kept was measured. When there are too many buckets they become twice as wide, so that
//! neither the length of the run nor its number of points has to be known.

/// A value and where in the run it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub step: u64,
    pub samples: u64,
    /// Seconds of the run.
    pub time: f64,
    pub value: f64,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    index: u64,
    low: Point,
    high: Point,
}

/// A thinned curve.
#[derive(Clone, Debug)]
pub struct Curve {
    max_buckets: usize,
    /// Steps of a bucket.
    width: u64,
    buckets: Vec<Bucket>,
    first: Option<Point>,
    last: Option<Point>,
    /// Points whose value is not finite; they are not drawn.
    pub not_finite: u64,
}

impl Curve {
    pub fn new(max_buckets: usize) -> Self {
        let max_buckets = max_buckets.max(1);
        Self { max_buckets, width: 1, buckets: Vec::new(), first: None, last: None, not_finite: 0 }
    }

    /// Adds the next point. A step that is already there is not added again.
    pub fn add(&mut self, point: Point) {
        if !point.value.is_finite() {
            self.not_finite += 1;
            return;
        }
        if self.last.is_some_and(|last| point.step <= last.step) {
            return;
        }
        self.first.get_or_insert(point);
        self.last = Some(point);
        self.put(Bucket { index: point.step / self.width, low: point, high: point });
        while self.buckets.len() > self.max_buckets {
            self.width *= 2;
            for bucket in std::mem::take(&mut self.buckets) {
                self.put(Bucket { index: bucket.index / 2, ..bucket });
            }
        }
    }

    fn put(&mut self, new: Bucket) {
        match self.buckets.last_mut().filter(|last| last.index == new.index) {
            Some(bucket) => {
                bucket.low = if new.low.value < bucket.low.value { new.low } else { bucket.low };
                bucket.high = if new.high.value > bucket.high.value { new.high } else { bucket.high };
            }
            None => self.buckets.push(new),
        }
    }

    /// Forgets what comes after `step`, which is about to be repeated.
    pub fn rewind(&mut self, step: u64) {
        let kept: Vec<Point> = self.points().into_iter().filter(|point| point.step <= step).collect();
        (self.first, self.last) = (kept.first().copied(), kept.last().copied());
        self.buckets.clear();
        for point in kept {
            self.put(Bucket { index: point.step / self.width, low: point, high: point });
        }
    }

    pub fn last(&self) -> Option<Point> {
        self.last
    }

    /// The points in the order of their steps: the first, the last, and at most two per bucket.
    pub fn points(&self) -> Vec<Point> {
        let pairs = self.buckets.iter().flat_map(|bucket| {
            let (a, b) = (bucket.low, bucket.high);
            if a.step <= b.step { [a, b] } else { [b, a] }
        });
        let mut points: Vec<Point> = self.first.into_iter().chain(pairs).chain(self.last).collect();
        points.dedup_by_key(|point| point.step);
        points
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn point(step: u64, value: f64) -> Point {
        Point { step, samples: step * 8, time: step as f64 / 2.0, value }
    }

    fn curve(max_buckets: usize, values: &[(u64, f64)]) -> Curve {
        let mut curve = Curve::new(max_buckets);
        values.iter().for_each(|(step, value)| curve.add(point(*step, *value)));
        curve
    }

    #[test]
    fn a_short_curve_is_kept_whole() {
        let values = [(10, 3.0), (20, 1.0), (30, 2.0)];
        let points = curve(8, &values).points();
        assert_eq!(points, values.map(|(step, value)| point(step, value)));
        assert_eq!(curve(8, &[]).points(), []);
    }

    #[test]
    fn a_spike_survives_a_million_steps() {
        let mut long = Curve::new(100);
        for step in 1..=1_000_000 {
            long.add(point(step, if step == 777_777 { 1e9 } else { (step % 1000) as f64 }));
        }
        let points = long.points();
        assert!((100..=202).contains(&points.len()), "{}", points.len());
        assert!(points.contains(&point(777_777, 1e9)));
        assert_eq!((points[0].step, points[points.len() - 1].step), (1, 1_000_000));
    }

    #[test]
    fn values_that_are_not_finite_are_counted() {
        let curve = curve(4, &[(1, 1.0), (2, f64::NAN), (3, f64::INFINITY), (4, 0.5)]);
        assert_eq!((curve.not_finite, curve.points().len()), (2, 2));
    }

    #[test]
    fn a_rewound_curve_goes_on_from_its_step() {
        let mut rewound = curve(8, &[(1, 1.0), (2, 5.0), (3, 4.0)]);
        rewound.rewind(1);
        rewound.add(point(1, 1.0));
        rewound.add(point(2, 2.0));
        assert_eq!(rewound.points(), [point(1, 1.0), point(2, 2.0)]);
        rewound.rewind(0);
        assert_eq!(rewound.points(), []);
    }

    proptest! {
        /// Whatever comes: a bounded number of points, each measured, in order, with both extremes and both ends.
        #[test]
        fn points_are_few_real_and_in_order(
            values in prop::collection::btree_map(0u64..100_000, -1e3f64..1e3, 1..400),
            max_buckets in 1usize..50,
        ) {
            let values: BTreeMap<u64, f64> = values;
            let listed: Vec<(u64, f64)> = values.iter().map(|(step, value)| (*step, *value)).collect();
            let points = curve(max_buckets, &listed).points();
            prop_assert!(points.len() <= 2 * max_buckets + 2);
            prop_assert!(points.windows(2).all(|pair| pair[0].step < pair[1].step));
            prop_assert!(points.iter().all(|p| values.get(&p.step) == Some(&p.value)));
            prop_assert_eq!(points.first().map(|p| p.step), listed.first().map(|p| p.0));
            prop_assert_eq!(points.last().map(|p| p.step), listed.last().map(|p| p.0));
            let extreme = |better: fn(f64, f64) -> f64, from: &mut dyn Iterator<Item = f64>| from.reduce(better);
            for better in [f64::min as fn(f64, f64) -> f64, f64::max] {
                prop_assert_eq!(
                    extreme(better, &mut points.iter().map(|p| p.value)),
                    extreme(better, &mut values.values().copied())
                );
            }
        }
    }
}
