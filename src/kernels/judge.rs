//! What is to be done with the gradients of an update: their norm, and what they are multiplied with, from what its
//! micro-batches counted. A card finds that out by itself, and tells the host later: nobody waits for it.

#[cfg(feature = "cuda")]
pub mod card;

use super::tally::Tally;

/// What sums are judged by.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// What every sample's gradient was divided by, and then multiplied with.
    pub nominal: f64,
    pub scale: f64,
    /// The norm that a gradient is shortened to.
    pub clip: Option<f64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    pub tally: Tally,
    /// Of the mean gradient.
    pub norm: f64,
    /// What the gradients are multiplied with. It is not a number where the weights are to stay: nothing was counted,
    /// or the loss or the norm is not finite.
    pub grad_scale: f64,
}

impl Judged {
    pub fn is_finite(&self) -> bool {
        self.tally.mean_loss().is_finite() && self.norm.is_finite()
    }
}

impl Terms {
    /// What turns the gradients of an update of this tally into those of its mean loss.
    pub fn mean_factor(&self, tally: &Tally) -> f64 {
        // Where nothing was to be learned, nothing moves the weights.
        if tally.weight > 0.0 { self.nominal / (tally.weight * self.scale) } else { 0.0 }
    }

    /// The reference: `squares` is the sum of the gradients' squares.
    pub fn judge(&self, tally: Tally, squares: f64) -> Judged {
        let factor = self.mean_factor(&tally);
        let norm = squares.sqrt() * factor;
        let clip = self.clip.map_or(1.0, |most| (most / norm).min(1.0));
        let found = Judged { tally, norm, grad_scale: clip * factor };
        match found.is_finite() && tally.weight > 0.0 {
            true => found,
            false => Judged { grad_scale: f64::NAN, ..found },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TALLY: Tally = Tally { loss: 30.0, weight: 10.0, count: 10, top1: 3, top5: 4 };

    #[test]
    fn a_long_gradient_is_shortened_and_a_short_one_is_not() {
        let terms = Terms { nominal: 20.0, scale: 4.0, clip: Some(1.0) };
        // Their norm is 8; that of the mean gradient 8 * 20 / (10 * 4).
        assert_eq!(terms.judge(TALLY, 64.0), Judged { tally: TALLY, norm: 4.0, grad_scale: 0.125 });
        assert_eq!(terms.judge(TALLY, 1.0), Judged { tally: TALLY, norm: 0.5, grad_scale: 0.5 });
        let terms = Terms { clip: None, ..terms };
        assert_eq!(terms.judge(TALLY, 64.0), Judged { tally: TALLY, norm: 4.0, grad_scale: 0.5 });
    }

    #[test]
    fn what_is_not_finite_or_not_there_moves_nothing() {
        let terms = Terms { nominal: 20.0, scale: 1.0, clip: Some(1.0) };
        let lost = Tally { loss: f64::INFINITY, ..TALLY };
        for (tally, squares) in
            [(TALLY, f64::NAN), (TALLY, f64::INFINITY), (lost, 1.0), (Tally::default(), 0.0)]
        {
            assert!(terms.judge(tally, squares).grad_scale.is_nan(), "{tally:?} {squares}");
        }
        assert_eq!(terms.judge(Tally::default(), 0.0).norm, 0.0);
    }

    /// Two micro-batches, as a card judges them and as the reference does; then the update that follows.
    #[cfg(feature = "cuda")]
    #[test]
    fn a_card_judges_as_the_reference() {
        use crate::kernels::cuda::of;
        use crate::kernels::tally::Counted;
        use crate::kernels::update::sum_of_squares;
        use crate::layers::check::device;
        use candle_core::Tensor;

        let device = device();
        let Some(card) = of(&Tensor::zeros(1, candle_core::DType::F32, &device).unwrap()).cloned() else {
            return eprintln!("skipped: no card is asked for");
        };
        let mut judge = card::Judge::new(&card).unwrap();
        for (losses, clip) in [([3.0, 4.5], Some(1.0)), ([1e300, f64::NAN], Some(1.0)), ([0.3, 0.1], None)] {
            let counted =
                losses.map(|loss| Counted::Later(Tensor::new(&[loss, 7.0, 8.0, 2.0, 3.0], &device).unwrap()));
            let grads = Tensor::new(&[0.5f32, -0.25, 3.0, 1e-3, 7.0], &device).unwrap();
            let terms = Terms { nominal: 24.0, scale: 3.0, clip };
            let found = judge.judge(&counted, &grads, &terms).unwrap().read().unwrap();
            let mut tally = Tally::default();
            counted.iter().for_each(|part| tally += part.read().unwrap());
            let wanted = terms.judge(tally, sum_of_squares(&grads).unwrap());
            assert_eq!(format!("{found:?}"), format!("{wanted:?}"));
        }
    }
}
