//! What a loss counts.

/// Sums over samples (tokens): adding tallies is exact however a set was split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Sum of weighted losses.
    pub loss: f64,
    /// Sum of weights; their mean loss is `loss / weight`, and 0 where nothing was to be judged.
    pub weight: f64,
    /// Targets judged, and of these those the highest score, or one of the five highest, was right for.
    pub count: u64,
    pub top1: u64,
    pub top5: u64,
}

impl Tally {
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.weight.max(f64::MIN_POSITIVE)
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.loss += other.loss;
        self.weight += other.weight;
        self.count += other.count;
        self.top1 += other.top1;
        self.top5 += other.top5;
    }
}
