//! What is to be done with the gradients of an update: their norm, and what they are multiplied with, from what its
//! micro-batches counted. A card finds that out by itself, and tells the host later: nobody waits for it.

#[cfg(feature = "cuda")]
pub mod gpu;

use super::metric_sums::MetricSums;

/// What sums are judged by.
#[derive(Clone, Copy, Debug)]
pub struct GradStatsConfig {
    /// What every sample's gradient was divided by, and then multiplied with.
    pub divisor: f64,
    pub loss_scale: f64,
    /// The norm that a gradient is shortened to.
    pub max_norm: Option<f64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradStats {
    pub metrics: MetricSums,
    /// Of the mean gradient.
    pub norm: f64,
    /// What the gradients are multiplied with. It is not a number where the weights are to stay: nothing was counted,
    /// or the loss or the norm is not finite.
    pub grad_scale: f64,
}

impl GradStats {
    pub fn is_finite(&self) -> bool {
        self.metrics.mean_loss().is_finite() && self.norm.is_finite()
    }
}

impl GradStatsConfig {
    /// What turns the gradients of an update of this tally into those of its mean loss.
    pub fn mean_factor(&self, metrics: &MetricSums) -> f64 {
        // Where nothing was to be learned, nothing moves the weights.
        if metrics.weight > 0.0 { self.divisor / (metrics.weight * self.loss_scale) } else { 0.0 }
    }

    /// The reference: `squares` is the sum of the gradients' squares.
    pub fn compute(&self, metrics: MetricSums, squares: f64) -> GradStats {
        let factor = self.mean_factor(&metrics);
        let norm = squares.sqrt() * factor;
        let clip_factor = self.max_norm.map_or(1.0, |most| (most / norm).min(1.0));
        let stats = GradStats { metrics, norm, grad_scale: clip_factor * factor };
        match stats.is_finite() && metrics.weight > 0.0 {
            true => stats,
            false => GradStats { grad_scale: f64::NAN, ..stats },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: MetricSums = MetricSums { loss: 30.0, weight: 10.0, count: 10, top1: 3, top5: 4 };

    #[test]
    fn gradients_are_clipped_to_max_norm() {
        let terms = GradStatsConfig { divisor: 20.0, loss_scale: 4.0, max_norm: Some(1.0) };
        // Their norm is 8; that of the mean gradient 8 * 20 / (10 * 4).
        assert_eq!(
            terms.compute(METRICS, 64.0),
            GradStats { metrics: METRICS, norm: 4.0, grad_scale: 0.125 }
        );
        assert_eq!(terms.compute(METRICS, 1.0), GradStats { metrics: METRICS, norm: 0.5, grad_scale: 0.5 });
        let terms = GradStatsConfig { max_norm: None, ..terms };
        assert_eq!(terms.compute(METRICS, 64.0), GradStats { metrics: METRICS, norm: 4.0, grad_scale: 0.5 });
    }

    #[test]
    fn non_finite_or_empty_updates_are_skipped() {
        let terms = GradStatsConfig { divisor: 20.0, loss_scale: 1.0, max_norm: Some(1.0) };
        let lost = MetricSums { loss: f64::INFINITY, ..METRICS };
        for (tally, squares) in
            [(METRICS, f64::NAN), (METRICS, f64::INFINITY), (lost, 1.0), (MetricSums::default(), 0.0)]
        {
            assert!(terms.compute(tally, squares).grad_scale.is_nan(), "{tally:?} {squares}");
        }
        assert_eq!(terms.compute(MetricSums::default(), 0.0).norm, 0.0);
    }

    /// Two micro-batches, as a card judges them and as the reference does; then the update that follows.
    #[cfg(feature = "cuda")]
    #[test]
    fn gpu_grad_stats_match_the_reference() {
        use crate::kernels::cuda::device_of;
        use crate::kernels::metric_sums::PendingMetricSums;
        use crate::kernels::update::sum_of_squares;
        use crate::layers::gradcheck::test_device;
        use candle_core::Tensor;

        let device = test_device();
        let Some(gpu) = device_of(&Tensor::zeros(1, candle_core::DType::F32, &device).unwrap()).cloned()
        else {
            return eprintln!("skipped: no card is asked for");
        };
        let mut grad_stats = gpu::DeviceGradStats::new(&gpu).unwrap();
        for (losses, clip) in [([3.0, 4.5], Some(1.0)), ([1e300, f64::NAN], Some(1.0)), ([0.3, 0.1], None)] {
            let counted = losses.map(|loss| {
                PendingMetricSums::OnDevice(Tensor::new(&[loss, 7.0, 8.0, 2.0, 3.0], &device).unwrap())
            });
            let grads = Tensor::new(&[0.5f32, -0.25, 3.0, 1e-3, 7.0], &device).unwrap();
            let terms = GradStatsConfig { divisor: 24.0, loss_scale: 3.0, max_norm: clip };
            let found = grad_stats.launch(&counted, &grads, &terms).unwrap().read().unwrap();
            let mut tally = MetricSums::default();
            counted.iter().for_each(|part| tally += part.read().unwrap());
            let wanted = terms.compute(tally, sum_of_squares(&grads).unwrap());
            assert_eq!(format!("{found:?}"), format!("{wanted:?}"));
        }
    }
}
