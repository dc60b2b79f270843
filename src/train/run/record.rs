//! What a run tells and leaves behind: steps, checkpoints, its end.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Ended, Run, Updated};
use crate::layers::loss::Tally;
use crate::layers::network::StepError;
use crate::memory::estimate::checkpoint_bytes;
use crate::memory::{Oom, Role, measure};
use crate::train::Failure;
use crate::train::checkpoint::{FORMAT, State};
use crate::train::event::{Event, Memory};
use crate::train::signals::Signal;

impl Run<'_> {
    pub(super) fn diverged(&mut self, tally: &Tally, norm: f64, epoch: u64, sample_ids: Vec<u64>) -> Failure {
        let value = if tally.mean_loss().is_finite() { norm } else { tally.mean_loss() };
        let checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.display().to_string());
        let (step, loss) = (self.step + 1, value.to_string());
        let event =
            Event::Diverged { step, epoch, loss: loss.clone(), sample_ids, checkpoint: checkpoint.clone() };
        match self.report.record(event) {
            Ok(()) => Failure::Diverged { step, loss, checkpoint },
            Err(error) => error.into(),
        }
    }

    pub(super) fn report_step(&mut self, done: &Updated, step_s: f64) -> Result<(), Failure> {
        let (samples_digest, ram_bytes) = (self.digest.to_string(), measure::take_recent_peak());
        self.measured = self.measured.max(ram_bytes);
        Ok(self.report.record(Event::Step {
            step: self.step,
            epoch: done.epoch,
            loss: done.tally.mean_loss(),
            lr: done.lr,
            grad_norm: done.grad_norm,
            samples: self.samples,
            micro_batch: self.way.micro_batch,
            accumulation_steps: self.way.accumulation_steps,
            step_s,
            data_wait_s: done.wait_s,
            ram_bytes,
            vram_bytes: 0,
            samples_digest,
            loss_scale: self.scaling.factor,
            skipped_updates: self.scaling.skipped,
        })?)
    }

    pub(super) fn checkpoint(&mut self, best: bool) -> Result<(), Failure> {
        let begun = Instant::now();
        self.engine.ledger.phase("checkpoint");
        let bytes = checkpoint_bytes(&self.setup.layout, self.setup.dtype);
        let ledger = self.engine.ledger.clone();
        let ask = || ledger.reserve(Role::CheckpointWriting, "checkpoint", bytes);
        let _hold = match ask() {
            Ok(hold) => hold,
            // Between updates only what was read ahead can be given back.
            Err(first) => {
                self.report.record(oom(self.step, &first))?;
                self.feed = None;
                ask().map_err(StepError::Oom)?
            }
        };
        let state = State {
            format: FORMAT,
            step: self.step,
            cursor: self.cursor,
            samples: self.samples,
            digest: self.digest,
            seed: self.setup.job.seed,
            way: self.way,
            descent: self.descent.clone(),
            best: self.best,
            scaling: self.scaling,
            metrics: self.metrics.clone(),
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            files: BTreeMap::new(),
        };
        let (path, bytes) = self.checkpoints.save(state, &self.engine.held())?;
        self.report.record(Event::Checkpoint {
            step: self.step,
            path: path.display().to_string(),
            bytes,
            write_s: begun.elapsed().as_secs_f64(),
            best,
        })?;
        self.last_checkpoint = Some((self.step, path));
        self.clock.last_checkpoint = Instant::now();
        self.checkpoints.prune(self.setup.job.checkpoint.keep, self.best.map(|(_, step)| step))
    }

    fn elapsed_s(&self) -> f64 {
        self.clock.before_s + self.clock.begun.elapsed().as_secs_f64()
    }

    pub(super) fn stop(&mut self, signal: Signal) -> Result<Ended, Failure> {
        if self.last_checkpoint.as_ref().is_none_or(|(step, _)| *step != self.step) {
            self.checkpoint(false)?;
        }
        let checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.display().to_string());
        self.report.record(Event::Interrupted {
            step: self.step,
            signal: signal.name().into(),
            checkpoint,
        })?;
        Ok(Ended::Stopped(signal))
    }

    pub(super) fn finish(&mut self) -> Result<Ended, Failure> {
        let mut metrics = self.metrics.clone();
        if let Some((value, _)) = self.best {
            metrics.insert(format!("best.{}", self.setup.job.checkpoint.best.name()), value);
        }
        let per_epoch = self.setup.order.updates_per_epoch();
        self.report.record(Event::Finished {
            steps: self.step,
            epochs: self.step / per_epoch,
            samples: self.samples,
            metrics,
            best_step: self.best.map(|(_, step)| step),
            planned_peak_bytes: Memory { ram: self.plan.peak.ram_bytes, vram: self.plan.peak.vram_bytes },
            measured_peak_bytes: Memory { ram: measure::peak(), vram: 0 },
            budget_bytes: Memory { ram: self.plan.budget.ram_bytes, vram: 0 },
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            samples_digest: self.digest.to_string(),
        })?;
        Ok(Ended::Done)
    }
}

pub(super) fn oom(step: u64, oom: &Oom) -> Event {
    let Oom { bytes, left, .. } = *oom;
    Event::Oom { step, phase: oom.phase.into(), asker: oom.asker.clone(), bytes, left }
}
