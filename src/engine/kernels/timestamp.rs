//! Timestamps of a profile. On the CPU a timestamp is a reading of the host's clock; on a GPU it is an event in the
//! compute stream, whose time the GPU records when it gets there. Taking one never waits; the interval between two
//! waits for both.
//!
//! Taking a timestamp takes time itself: a [`TimeAxis`] takes that out again.

use std::cell::Cell;
#[cfg(feature = "cuda")]
use std::ffi::c_int;
use std::time::Instant;

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, sys::CUevent_flags};

#[cfg(feature = "cuda")]
use super::cuda::RawStream;

/// Where timestamps are taken.
#[derive(Clone, Default)]
pub enum Clock {
    #[default]
    Host,
    #[cfg(feature = "cuda")]
    Stream(std::sync::Arc<CudaStream>),
}

thread_local! {
    /// Timestamps that this thread has taken.
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

pub struct Timestamp {
    reading: Reading,
    /// Timestamps that its thread took before it.
    index: u64,
}

enum Reading {
    Host(Instant),
    #[cfg(feature = "cuda")]
    Event(CudaEvent),
}

impl Clock {
    /// The clock of what is computed on `device`.
    pub fn of(device: &Device) -> Self {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Self::Stream(cuda.cuda_stream()),
            _ => Self::Host,
        }
    }

    pub fn now(&self) -> Timestamp {
        let reading = match self {
            Self::Host => Reading::Host(Instant::now()),
            // An event is refused only by a device that has failed, which the next tensor read reports.
            #[cfg(feature = "cuda")]
            Self::Stream(stream) => match stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)) {
                Ok(event) => Reading::Event(event),
                Err(_) => Reading::Host(Instant::now()),
            },
        };
        Timestamp { reading, index: TAKEN.replace(TAKEN.get() + 1) }
    }

    /// Keeps a GPU busy for this long, so that the host can enqueue what follows before any of it runs: the intervals
    /// between the timestamps that follow are then those of the GPU. Does nothing on the CPU.
    pub fn occupy(&self, seconds: f64) {
        match self {
            Self::Host => {
                let _ = seconds;
            }
            // The launch is refused only by a device that has failed, which the next tensor read reports.
            #[cfg(feature = "cuda")]
            Self::Stream(stream) => {
                let nanoseconds = (1e9 * seconds.min(MAX_OCCUPIED_S)) as i64;
                // SAFETY: the kernel takes no memory.
                let _ = unsafe { timestamp_occupy(nanoseconds, stream.cu_stream().cast()) };
            }
        }
    }
}

#[cfg(feature = "cuda")]
const MAX_OCCUPIED_S: f64 = 1.0;

#[cfg(feature = "cuda")]
unsafe extern "C" {
    fn timestamp_occupy(nanoseconds: i64, stream: RawStream) -> c_int;
}

impl Timestamp {
    /// Timestamps taken from this one, which counts, to `later`, which does not; both are of one thread.
    pub fn timestamps_to(&self, later: &Self) -> u64 {
        later.index.saturating_sub(self.index)
    }

    /// Seconds from `self` to `later`, with a resolution of about half a microsecond on a GPU; 0 if the device has
    /// failed.
    pub fn seconds_to(&self, later: &Self) -> f64 {
        match (&self.reading, &later.reading) {
            (Reading::Host(from), Reading::Host(to)) => to.saturating_duration_since(*from).as_secs_f64(),
            #[cfg(feature = "cuda")]
            (Reading::Event(from), Reading::Event(to)) => {
                from.elapsed_ms(to).map_or(0.0, |ms| 1e-3 * f64::from(ms))
            }
            #[cfg(feature = "cuda")]
            _ => 0.0,
        }
    }
}

/// Seconds since an origin, without those spent on taking timestamps. Timestamps keep their order.
pub struct TimeAxis {
    first_index: u64,
    /// By the index of the timestamp, from the origin on.
    seconds: Vec<f64>,
}

impl TimeAxis {
    /// The axis of the timestamps `taken` since `origin`, each of which took `timestamp_s` to take. Waits for them.
    pub fn new<'a>(
        origin: &Timestamp,
        taken: impl IntoIterator<Item = &'a Timestamp>,
        timestamp_s: f64,
    ) -> Self {
        let mut seconds = vec![0.0];
        for timestamp in taken {
            let at = origin.timestamps_to(timestamp) as usize;
            seconds.resize(seconds.len().max(at + 1), 0.0);
            seconds[at] = origin.seconds_to(timestamp) - timestamp_s * at as f64;
        }
        let mut latest = 0.0f64;
        for timestamp in &mut seconds {
            latest = latest.max(*timestamp);
            *timestamp = latest;
        }
        Self { first_index: origin.index, seconds }
    }

    pub fn seconds(&self, timestamp: &Timestamp) -> f64 {
        self.seconds[(timestamp.index - self.first_index) as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_axis_is_without_the_time_that_its_timestamps_took_and_keeps_their_order() {
        let start = Instant::now();
        let timestamp = |milliseconds, index| Timestamp {
            reading: Reading::Host(start + Duration::from_millis(milliseconds)),
            index,
        };
        let origin = timestamp(0, 7);
        let taken = [timestamp(5, 8), timestamp(6, 9), timestamp(20, 10)];
        let axis = TimeAxis::new(&origin, &taken, 2e-3);
        let seconds = taken.each_ref().map(|timestamp| (1e6 * axis.seconds(timestamp)).round());
        // The second was taken 1 ms after the first, in less than the 2 ms of a timestamp: it stays at the first.
        assert_eq!(seconds, [3e3, 3e3, 14e3]);
        assert_eq!((axis.seconds(&origin), origin.timestamps_to(&taken[2])), (0.0, 3));
    }
}
