//! The learning rate as a pure function of the step.

use std::f64::consts::PI;

use crate::job::ScheduleConfig;

/// The learning rate of update `step` (from 0) of `total`; `peak` is the optimizer's `lr`.
pub fn lr(schedule: &ScheduleConfig, peak: f64, step: u64, total: u64) -> f64 {
    let ratio = match schedule {
        ScheduleConfig::Constant(s) => warmup(s.warmup_steps, step).unwrap_or(1.0),
        ScheduleConfig::Linear(s) => {
            let decay = |t: f64| 1.0 - (1.0 - s.final_lr_ratio) * t;
            warmup(s.warmup_steps, step).unwrap_or_else(|| decay(progress(s.warmup_steps, step, total)))
        }
        ScheduleConfig::Cosine(s) => {
            let decay = |t: f64| lerp(s.final_lr_ratio, 1.0, cosine(t));
            warmup(s.warmup_steps, step).unwrap_or_else(|| decay(progress(s.warmup_steps, step, total)))
        }
        ScheduleConfig::Step(s) => warmup(s.warmup_steps, step)
            .unwrap_or_else(|| s.gamma.powf(((step - s.warmup_steps) / s.every_steps) as f64)),
        ScheduleConfig::Exponential(s) => {
            s.initial_lr_ratio * (s.final_lr_ratio / s.initial_lr_ratio).powf(progress(0, step, total))
        }
        ScheduleConfig::Onecycle(s) => {
            let (start, end) = (1.0 / s.div, 1.0 / (s.div * s.final_div));
            let t = progress(0, step, total);
            if t < s.warmup_fraction {
                lerp(1.0, start, cosine(t / s.warmup_fraction))
            } else {
                lerp(end, 1.0, cosine((t - s.warmup_fraction) / (1.0 - s.warmup_fraction)))
            }
        }
    };
    peak * ratio
}

/// The fraction of the peak during warmup; the first update already takes one step of it.
fn warmup(steps: u64, step: u64) -> Option<f64> {
    (step < steps).then(|| (step + 1) as f64 / steps as f64)
}

/// Progress through the rest of the run, from 0 at its first update to 1 at its last.
fn progress(begin: u64, step: u64, total: u64) -> f64 {
    let last = total.saturating_sub(begin + 1);
    if last == 0 { 0.0 } else { ((step - begin) as f64 / last as f64).min(1.0) }
}

/// Half a cosine wave, from 1 at 0 to 0 at 1.
fn cosine(t: f64) -> f64 {
    0.5 * (1.0 + (PI * t).cos())
}

/// `low` at 0, `high` at 1.
fn lerp(low: f64, high: f64, t: f64) -> f64 {
    low + (high - low) * t
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn schedule(text: &str) -> ScheduleConfig {
        toml::from_str(text).unwrap()
    }

    fn rates(text: &str, total: u64) -> Vec<f64> {
        let s = schedule(text);
        (0..total).map(|step| (lr(&s, 1.0, step, total) * 1e4).round() / 1e4).collect()
    }

    #[test]
    fn schedules_begin_and_end_where_they_say() {
        assert_eq!(rates("kind = 'constant'\nwarmup_steps = 4", 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(rates("kind = 'linear'\nwarmup_steps = 1", 5), [1.0, 1.0, 0.6667, 0.3333, 0.0]);
        assert_eq!(rates("kind = 'cosine'\nfinal_lr_ratio = 0.1", 3), [1.0, 0.55, 0.1]);
        assert_eq!(rates("kind = 'step'\nevery_steps = 2\ngamma = 0.1", 5), [1.0, 1.0, 0.1, 0.1, 0.01]);
        assert_eq!(rates("kind = 'exponential'", 3), [1.0, 0.1, 0.01]);
        let growth = "kind = 'exponential'\ninitial_lr_ratio = 0.001\nfinal_lr_ratio = 1.0";
        assert_eq!(rates(growth, 4), [0.001, 0.01, 0.1, 1.0]);
        let cycle = rates("kind = 'onecycle'\nwarmup_fraction = 0.5\ndiv = 10.0\nfinal_div = 100.0", 5);
        assert_eq!(cycle, [0.1, 0.55, 1.0, 0.5005, 0.001]);
    }

    proptest! {
        #[test]
        fn the_rate_is_always_a_fraction_of_the_peak(
            text in prop::sample::select(vec![
                "kind = 'constant'\nwarmup_steps = 7", "kind = 'linear'\nwarmup_steps = 7",
                "kind = 'cosine'\nwarmup_steps = 7",
                "kind = 'step'\nevery_steps = 3\nwarmup_steps = 7", "kind = 'onecycle'",
                "kind = 'exponential'", "kind = 'exponential'\ninitial_lr_ratio = 1e-8\nfinal_lr_ratio = 1.0",
            ]),
            total in 1u64..500,
            step in 0u64..600,
        ) {
            let rate = lr(&schedule(text), 2.0, step, total);
            prop_assert!((0.0..=2.0 + 1e-12).contains(&rate), "{rate}");
        }
    }
}
