//! The gradient norm of an update and the factor that its gradients are multiplied with, from the metric sums of its
//! micro-batches. A GPU computes both itself and reports them to the host asynchronously.

#[cfg(feature = "cuda")]
pub mod gpu;

use super::metric_sums::MetricSums;

/// What the gradient statistics depend on besides the sums.
#[derive(Clone, Copy, Debug)]
pub struct GradStatsConfig {
    /// Divisor of every sample's gradient, and the loss scale it was then multiplied with.
    pub divisor: f64,
    pub loss_scale: f64,
    /// Norm to clip the gradient to.
    pub max_norm: Option<f64>,
}

/// Gradient norm, clipping factor and metric sums of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradStats {
    pub metrics: MetricSums,
    /// Norm of the mean gradient.
    pub norm: f64,
    /// Factor of the gradients. NaN if the update must be skipped: nothing was counted, or the loss or the norm is not
    /// finite.
    pub grad_scale: f64,
}

impl GradStats {
    pub fn is_finite(&self) -> bool {
        self.metrics.mean_loss().is_finite() && self.norm.is_finite()
    }
}

impl GradStatsConfig {
    /// The factor that turns the accumulated gradients into those of the mean loss.
    pub fn mean_factor(&self, metrics: &MetricSums) -> f64 {
        // Without a counted sample, the weights must not move.
        if metrics.weight > 0.0 { self.divisor / (metrics.weight * self.loss_scale) } else { 0.0 }
    }

    /// The reference; `squares` is the sum of squared gradients.
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
        // Their norm is 8; the norm of the mean gradient is 8 * 20 / (10 * 4).
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
        for (sums, squares) in
            [(METRICS, f64::NAN), (METRICS, f64::INFINITY), (lost, 1.0), (MetricSums::default(), 0.0)]
        {
            assert!(terms.compute(sums, squares).grad_scale.is_nan(), "{sums:?} {squares}");
        }
        assert_eq!(terms.compute(MetricSums::default(), 0.0).norm, 0.0);
    }

    /// Two micro-batches: the GPU and the reference agree, and so does the update that follows.
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
            return eprintln!("skipped: no GPU requested");
        };
        let mut grad_stats = gpu::DeviceGradStats::new(&gpu).unwrap();
        for (losses, clip) in [([3.0, 4.5], Some(1.0)), ([1e300, f64::NAN], Some(1.0)), ([0.3, 0.1], None)] {
            let counted = losses.map(|loss| {
                PendingMetricSums::OnDevice(Tensor::new(&[loss, 7.0, 8.0, 2.0, 3.0], &device).unwrap())
            });
            let grads = Tensor::new(&[0.5f32, -0.25, 3.0, 1e-3, 7.0], &device).unwrap();
            let terms = GradStatsConfig { divisor: 24.0, loss_scale: 3.0, max_norm: clip };
            let found = grad_stats.launch(&counted, &grads, &terms).unwrap().read().unwrap();
            let mut sums = MetricSums::default();
            counted.iter().for_each(|part| sums += part.read().unwrap());
            let wanted = terms.compute(sums, sum_of_squares(&grads).unwrap());
            assert_eq!(format!("{found:?}"), format!("{wanted:?}"));
        }
    }
}
