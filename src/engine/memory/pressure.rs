//! Reacts to host memory that other processes take during a run: polls, then decides by a pure function.
//!
//! The OOM killer gives no warning. What is left is the minimum over the system's available memory, the cgroup limit
//! and `RLIMIT_AS`; stalls come from the kernel's pressure stall information (PSI). A reading that fails counts as no
//! pressure.

use std::fs::read_to_string;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::probe;

/// Minimum time between polls: a reading costs some tenths of a millisecond.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// What is left of host memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PressureReading {
    /// Bytes this process can still allocate.
    pub available: u64,
    /// Maximum bytes this process could ever have.
    pub limit: u64,
    /// Fraction of the last ten seconds in which all tasks stalled on memory, if the kernel reports it.
    pub stalled: Option<f64>,
}

/// The response to a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PressureAction {
    Nothing,
    /// Prefetch fewer batches.
    ShrinkPrefetch,
    /// Use smaller micro-batches.
    ShrinkMicroBatch,
}

impl PressureReading {
    /// Below this many available bytes memory is low: a fiftieth of the limit, at most 512 MiB.
    pub fn low_watermark(&self) -> u64 {
        (self.limit / 50).min(512 << 20)
    }

    /// The OOM killer is near, or all tasks stall while the kernel reclaims memory.
    pub fn is_low(&self) -> bool {
        let thrashing =
            self.stalled.is_some_and(|fraction| fraction >= 0.2) && self.available < self.limit / 10;
        self.available < self.low_watermark() || thrashing
    }
}

/// Shrinks prefetch first, since that costs only waiting; then the micro-batch, one rung per reading.
pub fn choose_action(
    reading: PressureReading,
    prefetch_can_shrink: bool,
    micro_batch_can_shrink: bool,
) -> PressureAction {
    match (reading.is_low(), prefetch_can_shrink, micro_batch_can_shrink) {
        (true, true, _) => PressureAction::ShrinkPrefetch,
        (true, false, true) => PressureAction::ShrinkMicroBatch,
        _ => PressureAction::Nothing,
    }
}

/// The source of readings.
#[derive(Clone, Debug, Default)]
pub enum PressureMonitor {
    /// No readings.
    #[default]
    Off,
    /// From the system, at most once per `POLL_INTERVAL`; holds the time of the last poll.
    System(Option<Instant>),
    /// From a file, on every poll, for tests: available bytes, limit and optionally the stalled fraction.
    File(PathBuf),
}

impl PressureMonitor {
    /// A reading, if one is due and succeeds.
    pub fn poll(&mut self) -> Option<PressureReading> {
        match self {
            PressureMonitor::Off => None,
            PressureMonitor::File(path) => parse_reading(&read_to_string(path).ok()?),
            PressureMonitor::System(last) if last.is_some_and(|last| last.elapsed() < POLL_INTERVAL) => None,
            PressureMonitor::System(last) => {
                *last = Some(Instant::now());
                read_system()
            }
        }
    }
}

fn read_system() -> Option<PressureReading> {
    let host = probe::host().ok()?;
    let group = host.cgroup.as_ref().and_then(|g| read_to_string(g.path.join("memory.pressure")).ok());
    let stalls = group.or_else(|| read_to_string("/proc/pressure/memory").ok());
    let stalled = stalls.and_then(|text| parse_psi(&text));
    Some(PressureReading { available: host.usable(), limit: host.process_limit(), stalled })
}

fn parse_reading(text: &str) -> Option<PressureReading> {
    let mut words = text.split_whitespace();
    let mut number = || words.next()?.parse::<u64>().ok();
    let (available, limit) = (number()?, number()?);
    Some(PressureReading { available, limit, stalled: words.next().and_then(|word| word.parse().ok()) })
}

/// The fraction of the last ten seconds in which all tasks stalled, from the text of a PSI file.
fn parse_psi(text: &str) -> Option<f64> {
    let full = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let percent = full.split(' ').find_map(|field| field.strip_prefix("avg10="))?;
    Some(percent.parse::<f64>().ok()? / 100.0)
}

/// Returns cached free memory to the operating system, as far as possible.
pub fn release_to_os() {
    #[cfg(target_os = "linux")]
    super::page_pool::PAGE_POOL.release_all();
    trim_malloc();
}

/// Makes the C library release the whole pages of its freed small blocks.
pub fn trim_malloc() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: `malloc_trim` releases only memory that is not in use.
        unsafe { malloc_trim(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_fiftieth_left_is_too_little_and_so_is_thrashing() {
        let with = |left, stalled| PressureReading { available: left, limit: 10 * GIB, stalled }.is_low();
        assert!(!with(GIB, None) && !with(GIB, Some(0.9)), "stalls of others with a tenth left are theirs");
        assert!(with(GIB / 6, None) && with(GIB - 1, Some(0.2)));
        assert_eq!(
            PressureReading { available: 0, limit: 1000 * GIB, stalled: None }.low_watermark(),
            512 << 20
        );
    }

    proptest! {
        /// Whatever the reading: without pressure nothing happens, prefetch shrinks before the micro-batch, and what
        /// cannot shrink is left alone.
        #[test]
        fn prefetch_goes_first(
            left in 0u64..4000,
            most in 1u64..4000,
            stalled in prop::option::of(0f64..1.0),
            prefetch: bool,
            batch: bool,
        ) {
            let reading = PressureReading { available: left, limit: most, stalled };
            let action = choose_action(reading, prefetch, batch);
            prop_assert!(reading.is_low() || action == PressureAction::Nothing);
            match action {
                PressureAction::ShrinkPrefetch => prop_assert!(prefetch),
                PressureAction::ShrinkMicroBatch => prop_assert!(batch && !prefetch),
                PressureAction::Nothing => prop_assert!(!reading.is_low() || !(prefetch || batch)),
            }
        }
    }

    #[test]
    fn pressure_files_and_readings_are_parsed() {
        let text = "some avg10=12.50 avg60=3.00 avg300=0.00 total=1\nfull avg10=7.25 avg60=1.00 avg300=0.00 total=1\n";
        assert_eq!(parse_psi(text), Some(0.0725));
        assert_eq!(parse_psi("some avg10=1.0\n"), None);
        assert_eq!(parse_reading("5 9\n"), Some(PressureReading { available: 5, limit: 9, stalled: None }));
        assert_eq!(
            parse_reading("5 9 0.5"),
            Some(PressureReading { available: 5, limit: 9, stalled: Some(0.5) })
        );
        assert_eq!(parse_reading("5"), None);
    }

    #[test]
    fn this_machine_can_be_read() {
        assert!(
            PressureMonitor::System(None).poll().is_some_and(|reading| reading.available <= reading.limit)
        );
    }
}
