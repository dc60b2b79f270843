//! Moments of a profile. On the CPU a moment is a reading of the host's clock; on a GPU it is an event in the compute
//! stream, which the GPU timestamps when it gets there. Taking one never waits; the interval between two waits for both.

use std::time::Instant;

use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, sys::CUevent_flags};

/// Where moments are taken.
#[derive(Clone, Default)]
pub enum Clock {
    #[default]
    Host,
    #[cfg(feature = "cuda")]
    Stream(std::sync::Arc<CudaStream>),
}

pub enum Moment {
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

    pub fn now(&self) -> Moment {
        match self {
            Self::Host => Moment::Host(Instant::now()),
            // An event is refused only by a device that has failed, which the next tensor read reports.
            #[cfg(feature = "cuda")]
            Self::Stream(stream) => match stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)) {
                Ok(event) => Moment::Event(event),
                Err(_) => Moment::Host(Instant::now()),
            },
        }
    }
}

impl Moment {
    /// Seconds from `self` to `later`, with a resolution of about half a microsecond on a GPU; 0 if the device has
    /// failed.
    pub fn seconds_to(&self, later: &Self) -> f64 {
        match (self, later) {
            (Self::Host(from), Self::Host(to)) => to.saturating_duration_since(*from).as_secs_f64(),
            #[cfg(feature = "cuda")]
            (Self::Event(from), Self::Event(to)) => {
                from.elapsed_ms(to).map_or(0.0, |ms| 1e-3 * f64::from(ms))
            }
            #[cfg(feature = "cuda")]
            _ => 0.0,
        }
    }
}
