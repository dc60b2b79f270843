//! Chooses the next token from its logits. Pure: the same logits, history and draw give the same token.
//!
//! Filters apply in the order that other tools use: repetition penalty, temperature, top-k, top-p, min-p.

use crate::base::random::{RngKey, stream_id};

const SAMPLING: u64 = stream_id("sampling");

/// Candidates that are sorted first for top-p. Most distributions reach their mass within them.
const FIRST_SORTED: usize = 256;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy: the most probable token, the first on ties.
    pub temperature: f64,
    /// Only this many of the most probable tokens.
    pub top_k: Option<usize>,
    /// Only the most probable tokens that together reach this probability.
    pub top_p: f64,
    /// Only tokens at least this probable, relative to the most probable.
    pub min_p: f64,
    /// Divides positive and multiplies negative logits of tokens that occurred before; 1 changes nothing.
    pub repetition_penalty: f64,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

/// A setting outside of its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{name}` is {value}; expected {expected}")]
pub struct SamplingError {
    pub name: &'static str,
    pub value: f64,
    pub expected: &'static str,
}

impl Sampling {
    /// The most probable token at every step.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    pub fn check(&self) -> Result<(), SamplingError> {
        let check = |name, value: f64, valid: bool, expected| {
            if valid { Ok(()) } else { Err(SamplingError { name, value, expected }) }
        };
        let (t, p, m, r) = (self.temperature, self.top_p, self.min_p, self.repetition_penalty);
        check("temperature", t, t >= 0.0 && t.is_finite(), "a number from 0 on")?;
        check("top_k", 0.0, self.top_k != Some(0), "a number from 1 on")?;
        check("top_p", p, p > 0.0 && p <= 1.0, "a number above 0 and up to 1")?;
        check("min_p", m, (0.0..1.0).contains(&m), "a number from 0 to below 1")?;
        check("repetition_penalty", r, r > 0.0 && r.is_finite(), "a number above 0")
    }

    /// The draw for the token at `position`. It depends on the seed and the position alone, not on the batch.
    pub fn draw(&self, position: usize) -> f64 {
        RngKey::new(self.seed, SAMPLING).f64(position as u64)
    }

    /// Chooses a token; `draw` is uniform in [0, 1). `None` if a logit is NaN, or if none is finite.
    pub fn choose(&self, logits: &mut [f32], history: &[u32], draw: f64) -> Option<u32> {
        self.penalize(logits, history);
        let (most_probable, max) = argmax(logits)?;
        if self.temperature == 0.0 || self.top_k == Some(1) {
            return Some(most_probable);
        }
        let mut candidates = self.top_k(logits);
        // Probabilities relative to the most probable token, in place of the logits.
        for (_, value) in &mut candidates {
            *value = ((f64::from(*value) - f64::from(max)) / self.temperature).exp() as f32;
        }
        self.keep_top_p(&mut candidates);
        candidates.retain(|(_, p)| f64::from(*p) >= self.min_p);
        let total: f64 = candidates.iter().map(|(_, p)| f64::from(*p)).sum();
        let mut left = draw * total;
        for (token, p) in &candidates {
            left -= f64::from(*p);
            if left < 0.0 {
                return Some(*token);
            }
        }
        // Rounding left a rest of the draw.
        candidates.iter().rev().find(|(_, p)| *p > 0.0).map(|(token, _)| *token).or(Some(most_probable))
    }

    fn penalize(&self, logits: &mut [f32], history: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let (penalty, mut seen) = (self.repetition_penalty as f32, history.to_vec());
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }

    /// The tokens of the `top_k` largest logits, of all without `top_k`; the lower token on ties.
    fn top_k(&self, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut candidates: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        if let Some(k) = self.top_k.filter(|k| *k < candidates.len()) {
            candidates.select_nth_unstable_by(k, more_probable_first);
            candidates.truncate(k);
            candidates.sort_unstable_by_key(|(token, _)| *token);
        }
        candidates
    }

    /// Keeps the fewest of the most probable candidates that reach `top_p` of the total.
    fn keep_top_p(&self, candidates: &mut Vec<(u32, f32)>) {
        if self.top_p >= 1.0 {
            return;
        }
        let total: f64 = candidates.iter().map(|(_, p)| f64::from(*p)).sum();
        let mut sorted = FIRST_SORTED;
        loop {
            let n = sorted.min(candidates.len());
            if n < candidates.len() {
                candidates.select_nth_unstable_by(n, more_probable_first);
            }
            candidates[..n].sort_unstable_by(more_probable_first);
            let mut mass = 0.0;
            for at in 0..n {
                mass += f64::from(candidates[at].1);
                if mass >= self.top_p * total {
                    return candidates.truncate(at + 1);
                }
            }
            if n == candidates.len() {
                return;
            }
            sorted *= 16;
        }
    }
}

fn more_probable_first(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The first of the largest logits. `None` if there is a NaN, or if the largest is infinite.
fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, logit) in (0..).zip(logits) {
        if logit.is_nan() {
            return None;
        }
        if *logit > best.1 {
            best = (token, *logit);
        }
    }
    best.1.is_finite().then_some(best)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DRAWS: usize = 400;

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        proptest::collection::vec(-8f32..8.0, 1..600)
    }

    /// Tokens that `DRAWS` evenly spread draws choose.
    fn chosen(sampling: &Sampling, logits: &[f32]) -> Vec<u32> {
        let draw = |i| sampling.choose(&mut logits.to_vec(), &[], (i as f64 + 0.5) / DRAWS as f64);
        (0..DRAWS).map(|i| draw(i).unwrap()).collect()
    }

    /// Tokens and probabilities, most probable first, computed in f64.
    fn distribution(logits: &[f32], temperature: f64) -> Vec<(u32, f64)> {
        let weights: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut all: Vec<(u32, f64)> = (0..).zip(weights.iter().map(|w| w / total)).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all
    }

    proptest! {
        #[test]
        fn greedy_takes_the_first_of_the_largest(mut logits in logits(), draw in 0.0..1.0) {
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = logits.iter().position(|l| *l == top).unwrap() as u32;
            logits.push(top);
            prop_assert_eq!(Sampling::greedy().choose(&mut logits, &[], draw), Some(first));
        }

        #[test]
        fn top_k_never_draws_outside(logits in logits(), k in 1usize..40) {
            let sampling = Sampling { top_k: Some(k), temperature: 2.0, ..Sampling::default() };
            let allowed: Vec<u32> = distribution(&logits, 1.0).iter().take(k).map(|t| t.0).collect();
            prop_assert!(chosen(&sampling, &logits).iter().all(|token| allowed.contains(token)));
        }

        #[test]
        fn top_p_draws_from_the_fewest_that_reach_the_mass(logits in logits(), p in 0.05..0.99) {
            let sampling = Sampling { top_p: p, ..Sampling::default() };
            let (mut mass, mut allowed) = (0.0, Vec::new());
            for (token, probability) in distribution(&logits, 1.0) {
                // A token at the edge may fall on either side of it by rounding.
                if mass > p + 1e-6 {
                    break;
                }
                mass += probability;
                allowed.push(token);
            }
            prop_assert!(chosen(&sampling, &logits).iter().all(|token| allowed.contains(token)));
        }

        #[test]
        fn min_p_drops_what_is_improbable(logits in logits(), min_p in 0.01..0.9) {
            let sampling = Sampling { min_p, ..Sampling::default() };
            let all = distribution(&logits, 1.0);
            let least = min_p * all[0].1 * (1.0 - 1e-5);
            let probability = |token: u32| all.iter().find(|(t, _)| *t == token).unwrap().1;
            prop_assert!(chosen(&sampling, &logits).iter().all(|token| probability(*token) >= least));
        }

        /// Evenly spread draws choose each token as often as its probability says, to one draw on either side.
        #[test]
        fn tokens_are_drawn_by_their_probability(
            logits in proptest::collection::vec(-3f32..3.0, 1..12),
            temperature in 0.3..3.0,
        ) {
            let sampling = Sampling { temperature, ..Sampling::default() };
            let drawn = chosen(&sampling, &logits);
            for (token, probability) in distribution(&logits, temperature) {
                let count = drawn.iter().filter(|t| **t == token).count() as f64;
                prop_assert!((count - probability * DRAWS as f64).abs() <= 1.01, "{token}: {count}, {probability}");
            }
        }

        #[test]
        fn the_penalty_lowers_what_occurred(logits in logits(), penalty in 1.01..3.0, token in 0u32..600) {
            let sampling = Sampling { repetition_penalty: penalty, ..Sampling::default() };
            let mut penalized = logits.clone();
            sampling.penalize(&mut penalized, &[token, token, 9999]);
            for (i, (before, after)) in logits.iter().zip(&penalized).enumerate() {
                match i as u32 == token && *before != 0.0 {
                    true => prop_assert!(after < before),
                    false => prop_assert_eq!(after, before),
                }
            }
        }
    }

    #[test]
    fn the_same_seed_draws_the_same() {
        let (a, b) =
            (Sampling { seed: 1, ..Sampling::default() }, Sampling { seed: 2, ..Sampling::default() });
        let draws = |sampling: &Sampling| (0..50).map(|i| sampling.draw(i)).collect::<Vec<_>>();
        assert_eq!(draws(&a), draws(&a));
        assert_ne!(draws(&a), draws(&b));
        let mean = draws(&a).iter().sum::<f64>() / 50.0;
        assert!((mean - 0.5).abs() < 0.15, "{mean}");
    }

    #[test]
    fn logits_without_a_largest_give_no_token() {
        for logits in [[1.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            assert_eq!(Sampling::default().choose(&mut logits.clone(), &[], 0.5), None);
        }
        assert_eq!(Sampling::default().choose(&mut [f32::NEG_INFINITY, 0.0], &[], 0.999), Some(1));
    }

    #[test]
    fn settings_outside_of_their_range_are_refused() {
        let refused = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        assert!(Sampling::default().check().is_ok() && Sampling::greedy().check().is_ok());
        assert_eq!(
            refused(Sampling { top_p: 1.5, ..Sampling::default() }),
            "`top_p` is 1.5; expected a number above 0 and up to 1"
        );
        assert!(refused(Sampling { temperature: f64::NAN, ..Sampling::default() }).contains("`temperature`"));
        assert!(refused(Sampling { top_k: Some(0), ..Sampling::default() }).contains("`top_k`"));
        assert!(refused(Sampling { min_p: 1.0, ..Sampling::default() }).contains("`min_p`"));
        assert!(refused(Sampling { repetition_penalty: 0.0, ..Sampling::default() }).contains("penalty"));
    }
}
