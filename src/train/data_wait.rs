//! Detects a run that waits too long for its data, and says why and what to change. Pure functions of times and
//! settings.

use std::time::Duration;

use crate::base::features::{Features, InputSpec};
use crate::base::units::Bytes;
use crate::data::loader::WaitTimes;

/// Upper limit on the fraction of update time spent waiting for data.
pub const MAX_WAIT_FRACTION: f64 = 0.05;
/// The monitor decides after this many updates and seconds; fewer say little, and a shorter run is over soon.
const MIN_UPDATES: u64 = 20;
const MIN_SECONDS: f64 = 5.0;

/// Accumulates update times. Skips the first update, which waits for the pipeline to fill.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DataWaitMonitor {
    updates: u64,
    spent_s: f64,
    waited_s: f64,
    reported: bool,
}

impl DataWaitMonitor {
    /// Adds an update. Returns the fraction of time spent waiting, once, if it exceeds [`MAX_WAIT_FRACTION`].
    pub fn record(&mut self, spent_s: f64, waited_s: f64) -> Option<f64> {
        self.updates += 1;
        if self.updates > 1 {
            self.spent_s += spent_s;
            self.waited_s += waited_s;
        }
        let fraction = self.waited_s / self.spent_s;
        let enough = self.updates > MIN_UPDATES && self.spent_s >= MIN_SECONDS;
        let report = enough && !self.reported && fraction > MAX_WAIT_FRACTION;
        self.reported |= report;
        report.then_some(fraction)
    }
}

/// Inputs of the advice.
#[derive(Clone, Copy, Debug)]
pub struct LoaderBottleneck<'a> {
    pub waits: WaitTimes,
    pub workers: usize,
    pub cores: usize,
    /// Limit of the read-ahead, in bytes.
    pub prefetch: u64,
    /// The data source is sequential: its files have no random access.
    pub sequential: bool,
    pub features: &'a Features,
}

impl LoaderBottleneck<'_> {
    /// Returns the bottleneck, and the setting to change.
    pub fn advice(&self) -> (&'static str, String) {
        let WaitTimes { for_workers, for_buffers } = self.waits;
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
            _ if self.sequential => "unpack the files, so that all workers can read them at once",
            InputSpec::Tokens { .. } => "turn the text into tokens ahead, and train on `kind = \"tokens\"`",
            InputSpec::Floats { shape } if shape.len() == 3 => {
                "store the images no larger than they are trained on, or transform them less"
            }
            InputSpec::Floats { .. } | InputSpec::Tabular { .. } => {
                "keep the files on a faster disk, or train on a machine with more cores"
            }
        };
        (slow, advice.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::features::TargetSpec;

    #[test]
    fn slow_data_is_reported_once_and_only_if_it_lasts() {
        let reports = |first: f64, share: f64, updates: usize| {
            let mut monitor = DataWaitMonitor::default();
            monitor.record(first, first);
            (0..updates).filter_map(|_| monitor.record(1.0, share)).collect::<Vec<_>>()
        };
        assert!(reports(100.0, 0.04, 100).is_empty(), "the first update does not count");
        assert!(reports(0.0, 0.2, 19).is_empty());
        let shares = reports(0.0, 0.2, 100);
        assert!(shares.len() == 1 && (shares[0] - 0.2).abs() < 1e-9, "{shares:?}");
    }

    #[test]
    fn the_advice_follows_the_bottleneck() {
        let images = Features::new(InputSpec::Floats { shape: vec![8, 8, 3] }, TargetSpec::Values { len: 1 });
        let tokens = Features::new(InputSpec::Tokens { length: 8, vocab: 9 }, TargetSpec::Tokens);
        let waits = WaitTimes { for_workers: Duration::from_secs(3), for_buffers: Duration::from_secs(1) };
        let bottleneck = LoaderBottleneck {
            waits,
            workers: 2,
            cores: 4,
            prefetch: 1 << 20,
            sequential: false,
            features: &images,
        };
        let advice = |bottleneck: LoaderBottleneck| bottleneck.advice().1;
        assert!(advice(bottleneck).contains("`data.workers = 4`"));
        let all = LoaderBottleneck { workers: 4, ..bottleneck };
        assert!(advice(all).contains("images"));
        assert!(advice(LoaderBottleneck { features: &tokens, ..all }).contains("tokens"));
        assert!(advice(LoaderBottleneck { sequential: true, ..all }).contains("unpack"));
        let waits = WaitTimes { for_workers: Duration::ZERO, for_buffers: Duration::from_secs(1) };
        assert!(advice(LoaderBottleneck { waits, ..all }).contains("`data.prefetch`, which is 1.00 MiB now"));
    }
}
