//! Metric sums: what a loss accumulates over samples.

#[cfg(feature = "cuda")]
pub(super) mod gpu;

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

/// Sums over samples (tokens). Adding them is exact, however a dataset is split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MetricSums {
    /// Sum of weighted losses.
    pub loss: f64,
    /// Sum of weights. The mean loss is `loss / weight`, and 0 if nothing was counted.
    pub weight: f64,
    /// Counted targets, and how many of them are the top-1 class or among the top-5 classes.
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

/// Metric sums that are known, or that are still pending on the device: five f64 in the order of [`MetricSums`].
#[derive(Clone, Debug)]
pub enum PendingMetricSums {
    Ready(MetricSums),
    OnDevice(Tensor),
}

impl PendingMetricSums {
    /// The sums; synchronizes if they are pending.
    pub fn read(&self) -> Result<MetricSums> {
        match self {
            PendingMetricSums::Ready(sums) => Ok(*sums),
            PendingMetricSums::OnDevice(sums) => match sums.to_vec1::<f64>()?[..] {
                [loss, weight, count, top1, top5] => {
                    Ok(MetricSums { loss, weight, count: count as u64, top1: top1 as u64, top5: top5 as u64 })
                }
                _ => candle_core::bail!("metric sums: expected 5 values, got {:?}", sums.dims()),
            },
        }
    }
}

impl PendingMetricSums {
    /// The same with `factor` times the loss, plus `other`: one f64 on the same device.
    pub fn with_loss(&self, factor: f64, other: &Tensor) -> Result<Self> {
        match self {
            Self::Ready(sums) => {
                Ok(Self::Ready(MetricSums { loss: factor * sums.loss + other.to_scalar::<f64>()?, ..*sums }))
            }
            Self::OnDevice(sums) => {
                let loss = ((sums.narrow(0, 0, 1)? * factor)? + other.reshape(1)?)?;
                Ok(Self::OnDevice(Tensor::cat(&[loss, sums.narrow(0, 1, 4)?], 0)?))
            }
        }
    }
}

impl From<MetricSums> for PendingMetricSums {
    fn from(sums: MetricSums) -> Self {
        PendingMetricSums::Ready(sums)
    }
}

/// Bytes on a GPU for the metrics of `rows` rows and their sums.
pub fn cuda_workspace(rows: usize) -> u64 {
    (rows * (2 * size_of::<f64>() + size_of::<u32>()) + 5 * size_of::<f64>()) as u64
}
