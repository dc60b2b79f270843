//! Whether a run waits for its data too long, why, and what to change: pure functions of times and settings.

use std::time::Duration;

use crate::data::loader::Waits;
use crate::features::{Features, Input};
use crate::units::Bytes;

/// More than this share of the time is too long.
pub const TOO_LONG: f64 = 0.05;
/// It is judged once there were so many updates and seconds: less says little, and is soon over.
const UPDATES: u64 = 20;
const SECONDS: f64 = 5.0;

/// Time that updates took, the first left out: it waits for the pipeline to fill.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waiting {
    updates: u64,
    spent_s: f64,
    waited_s: f64,
    told: bool,
}

impl Waiting {
    /// Takes in an update; gives the share of the time that was waited, once, if it is too long.
    pub fn add(&mut self, spent_s: f64, waited_s: f64) -> Option<f64> {
        self.updates += 1;
        if self.updates > 1 {
            self.spent_s += spent_s;
            self.waited_s += waited_s;
        }
        let share = self.waited_s / self.spent_s;
        let enough = self.updates > UPDATES && self.spent_s >= SECONDS;
        let tell = enough && !self.told && share > TOO_LONG;
        self.told |= tell;
        tell.then_some(share)
    }
}

/// What the advice depends on.
#[derive(Clone, Copy, Debug)]
pub struct Feeding<'a> {
    pub waits: Waits,
    pub workers: usize,
    pub cores: usize,
    /// Bytes that may be read ahead.
    pub prefetch: u64,
    /// The files can only be read forward.
    pub forward: bool,
    pub features: &'a Features,
}

impl Feeding<'_> {
    /// What is too slow, and what to change.
    pub fn advice(&self) -> (&'static str, String) {
        let Waits { for_workers, for_buffers } = self.waits;
        let waited = for_workers + for_buffers;
        if waited > Duration::ZERO && for_buffers > for_workers {
            let now = Bytes(self.prefetch);
            return ("too little is read ahead", format!("raise `data.prefetch`, which is {now} now"));
        }
        let slow = "samples take longer to prepare than to learn from";
        if self.workers < self.cores {
            let (workers, cores) = (self.workers, self.cores);
            return (slow, format!("set `data.workers = {cores}`: it is {workers} now, on {cores} cores"));
        }
        let advice = match &self.features.input {
            _ if self.forward => "unpack the files, so that all workers can read them at once",
            Input::Tokens { .. } => "turn the text into tokens ahead, and train on `kind = \"tokens\"`",
            Input::Floats { shape } if shape.len() == 3 => {
                "store the pictures no larger than they are trained on, or transform them less"
            }
            Input::Floats { .. } | Input::Row { .. } => {
                "keep the files on a faster disk, or train on a machine with more cores"
            }
        };
        (slow, advice.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::Target;

    #[test]
    fn it_is_told_once_and_only_if_it_lasts() {
        let told = |first: f64, share: f64, updates: usize| {
            let mut waiting = Waiting::default();
            waiting.add(first, first);
            (0..updates).filter_map(|_| waiting.add(1.0, share)).collect::<Vec<_>>()
        };
        assert!(told(100.0, 0.04, 100).is_empty(), "the first update does not count");
        assert!(told(0.0, 0.2, 19).is_empty());
        let shares = told(0.0, 0.2, 100);
        assert!(shares.len() == 1 && (shares[0] - 0.2).abs() < 1e-9, "{shares:?}");
    }

    #[test]
    fn the_advice_follows_the_bottleneck() {
        let pictures = Features::new(Input::Floats { shape: vec![8, 8, 3] }, Target::Values { len: 1 });
        let tokens = Features::new(Input::Tokens { length: 8, vocab: 9 }, Target::Tokens);
        let waits = Waits { for_workers: Duration::from_secs(3), for_buffers: Duration::from_secs(1) };
        let feeding =
            Feeding { waits, workers: 2, cores: 4, prefetch: 1 << 20, forward: false, features: &pictures };
        let advice = |feeding: Feeding| feeding.advice().1;
        assert!(advice(feeding).contains("`data.workers = 4`"));
        let all = Feeding { workers: 4, ..feeding };
        assert!(advice(all).contains("pictures"));
        assert!(advice(Feeding { features: &tokens, ..all }).contains("tokens"));
        assert!(advice(Feeding { forward: true, ..all }).contains("unpack"));
        let waits = Waits { for_workers: Duration::ZERO, for_buffers: Duration::from_secs(1) };
        assert!(advice(Feeding { waits, ..all }).contains("`data.prefetch`, which is 1.00 MiB now"));
    }
}
