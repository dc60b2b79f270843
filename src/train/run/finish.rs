//! How a run ends: stopped by a signal, or done.

use super::{Run, RunOutcome};
use crate::events::event::{BestCheckpoint, Event, MemoryBytes};
use crate::memory::device_heap::HeapStats;
use crate::memory::measure;
use crate::memory::resident_limit;
use crate::train::Failure;
use crate::train::early_stop::StopReason;
use crate::train::memory_snapshot::SnapshotReason;
use crate::train::signals::Signal;

impl Run<'_> {
    /// Writes a checkpoint, unless the last one is of this step, and stops.
    pub(super) fn stop(&mut self, signal: Signal) -> Result<RunOutcome, Failure> {
        let step = self.ctx.position.step;
        if self.checkpoints.last.as_ref().is_none_or(|(last, _)| *last != step) {
            self.checkpoint()?;
        }
        let checkpoint = self.checkpoints.last_path();
        self.ctx.report_no_graph()?;
        self.ctx.snapshot_memory(SnapshotReason::End)?;
        self.ctx.record(Event::Interrupted { step, signal: signal.name().into(), checkpoint })?;
        Ok(RunOutcome::Stopped(signal))
    }

    /// Evaluates and writes the last weights, unless that was done, and ends the run.
    pub(super) fn stop_early(&mut self, reason: StopReason) -> Result<RunOutcome, Failure> {
        self.settle_pending_update()?;
        let (step, reason) = (self.ctx.position.step, self.describe(reason));
        if self.checkpoints.last.as_ref().is_none_or(|(last, _)| *last != step) {
            self.deferred.evaluation = self.ctx.options.observer.is_none();
            self.do_deferred_work()?;
            if let Some(signal) = self.ctx.options.signals.stop_requested().filter(|_| self.evaluation.due) {
                return self.stop(signal);
            }
        }
        self.ctx.record(Event::StoppedEarly { step, reason: reason.clone() })?;
        self.end(Some(reason))
    }

    pub(super) fn finish(&mut self) -> Result<RunOutcome, Failure> {
        let (step, total) = (self.ctx.position.step, self.ctx.setup.total_steps);
        let max_steps = self.ctx.options.max_steps.filter(|_| step < total);
        self.end(max_steps.map(|max| format!("--max-steps {max} of {total}")))
    }

    /// Ends the run; `stopped` says why it ends before its last update.
    fn end(&mut self, stopped: Option<String>) -> Result<RunOutcome, Failure> {
        let (setup, step) = (self.ctx.setup, self.ctx.position.step);
        resident_limit::trim();
        if !self.overflowed {
            self.prune_checkpoints()?;
        }
        self.ctx.snapshot_memory(SnapshotReason::End)?;
        self.memory.measure(&self.ctx);
        if let Some(gpu) = &setup.gpu {
            self.ctx.report_no_graph()?;
            let HeapStats { synchronizes, arena_passes, diverged, arena_bytes, arena_lower_bound } =
                gpu.stats();
            self.ctx.record(Event::DeviceHeap {
                step,
                synchronizes,
                arena_passes,
                diverged_passes: diverged,
                arena_bytes,
                arena_waste_bytes: arena_bytes - arena_lower_bound,
                outside_heap_bytes: gpu.outside_heap_bytes(),
            })?;
        }
        let best = self.evaluation.best.map(|(value, step)| BestCheckpoint {
            step,
            path: self.checkpoints.path(step),
            metric: setup.job.checkpoint.best.name(),
            value,
        });
        let (plan, position) = (&self.memory.plan, &self.ctx.position);
        let event = Event::Finished {
            steps: step,
            stopped,
            epochs: step as f64 / setup.order.updates_per_epoch() as f64,
            samples: position.samples,
            metrics: self.evaluation.metrics.clone(),
            best,
            planned_peak_bytes: MemoryBytes { ram: plan.peak.ram_bytes, vram: plan.peak.vram_bytes },
            measured_peak_bytes: MemoryBytes { ram: measure::peak_bytes(), vram: self.memory.vram_peak },
            resident_peak_bytes: measure::resident_peak(),
            budget_bytes: MemoryBytes { ram: plan.budget.ram_bytes, vram: plan.budget.vram_bytes },
            elapsed_s: self.clock.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            samples_digest: position.digest.to_string(),
            bad_records: self.skipped_records.records.count(),
        };
        self.ctx.record(event)?;
        Ok(RunOutcome::Done)
    }
}
