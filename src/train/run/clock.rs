//! The clock of a run: its time, that of its steps, and what it waits for data.

use std::time::Instant;

use crate::train::data_wait::DataWaitMonitor;

/// Time spent, including sessions before a resume.
pub(super) struct RunClock {
    started: Instant,
    previous_s: f64,
    /// Waiting for data.
    pub data_wait_s: f64,
    last_checkpoint: Instant,
    /// End of the last update, or of what followed it.
    step_started: Instant,
    pub data_wait: DataWaitMonitor,
}

impl RunClock {
    pub fn start() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            previous_s: 0.0,
            data_wait_s: 0.0,
            last_checkpoint: now,
            step_started: now,
            data_wait: DataWaitMonitor::default(),
        }
    }

    /// Counts on from what an earlier session spent.
    pub fn resume(&mut self, elapsed_s: f64, data_wait_s: f64) {
        (self.previous_s, self.data_wait_s) = (elapsed_s, data_wait_s);
    }

    pub fn elapsed_s(&self) -> f64 {
        self.previous_s + self.started.elapsed().as_secs_f64()
    }

    pub fn begin_step(&mut self) {
        self.step_started = Instant::now();
    }

    /// Ends a step and begins the next; returns its seconds.
    pub fn end_step(&mut self) -> f64 {
        let step_s = self.step_started.elapsed().as_secs_f64();
        self.begin_step();
        step_s
    }

    pub fn checkpoint_written(&mut self) {
        self.last_checkpoint = Instant::now();
    }

    pub fn minutes_since_checkpoint(&self) -> u64 {
        self.last_checkpoint.elapsed().as_secs() / 60
    }
}
