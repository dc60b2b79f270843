//! What a loss counts.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::{Result, Tensor};

/// Sums over samples (tokens): adding tallies is exact however a set was split.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MetricSums {
    /// Sum of weighted losses.
    pub loss: f64,
    /// Sum of weights; their mean loss is `loss / weight`, and 0 where nothing was to be judged.
    pub weight: f64,
    /// Targets judged, and of these those the highest score, or one of the five highest, was right for.
    pub count: u64,
    pub top1: u64,
    pub top5: u64,
}

impl MetricSums {
    pub fn mean_loss(&self) -> f64 {
        self.loss / self.weight.max(f64::MIN_POSITIVE)
    }
}

impl std::ops::AddAssign for MetricSums {
    fn add_assign(&mut self, other: MetricSums) {
        self.loss += other.loss;
        self.weight += other.weight;
        self.count += other.count;
        self.top1 += other.top1;
        self.top5 += other.top5;
    }
}

/// A tally that is known, or one that a card has yet to count: five f64 in the order of [`MetricSums`].
#[derive(Clone, Debug)]
pub enum PendingMetricSums {
    Ready(MetricSums),
    OnDevice(Tensor),
}

impl PendingMetricSums {
    /// Waits for the card where that is needed.
    pub fn read(&self) -> Result<MetricSums> {
        match self {
            PendingMetricSums::Ready(tally) => Ok(*tally),
            PendingMetricSums::OnDevice(sums) => match sums.to_vec1::<f64>()?[..] {
                [loss, weight, count, top1, top5] => {
                    Ok(MetricSums { loss, weight, count: count as u64, top1: top1 as u64, top5: top5 as u64 })
                }
                _ => candle_core::bail!("a tally of {:?} values", sums.dims()),
            },
        }
    }
}

impl From<MetricSums> for PendingMetricSums {
    fn from(tally: MetricSums) -> Self {
        PendingMetricSums::Ready(tally)
    }
}

/// Bytes a card has the tally of `rows` rows in, until it is added up, and those of the sums.
pub fn cuda_workspace(rows: usize) -> u64 {
    (rows * (2 * size_of::<f64>() + size_of::<u32>()) + 5 * size_of::<f64>()) as u64
}
