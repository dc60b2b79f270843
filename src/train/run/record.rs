//! What a run tells and leaves behind: steps, checkpoints, its end.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::{Ended, Made, Run};
use crate::data::bad::{Bad, LeftOut, Set};
use crate::kernels::judge::Judged;
use crate::layers::loss::Tally;
use crate::layers::network::StepError;
use crate::memory::estimate::checkpoint_bytes;
use crate::memory::heap::Stats;
use crate::memory::process::Work;
use crate::memory::{Oom, Role, measure, probe};
use crate::train::Failure;
use crate::train::checkpoint::{FORMAT, State};
use crate::train::event::{Event, Memory};
use crate::train::setup::on_bad;
use crate::train::signals::Signal;
use crate::train::waiting::Feeding;

impl Run<'_> {
    pub(super) fn diverged(
        &mut self,
        judged: &Judged,
        step: u64,
        epoch: u64,
        sample_ids: Vec<u64>,
    ) -> Failure {
        let loss = judged.tally.mean_loss();
        let (what, value) = if loss.is_finite() { ("gradient norm", judged.norm) } else { ("loss", loss) };
        match self.report_diverged(step, epoch, value.to_string(), sample_ids) {
            Ok(checkpoint) => Failure::Diverged { step, what, value, checkpoint },
            Err(error) => error,
        }
    }

    /// Tells of values that are not finite, and gives the checkpoint to resume from. Weights that no finite update
    /// followed are suspect: it is an earlier one, where there is one.
    fn report_diverged(
        &mut self,
        step: u64,
        epoch: u64,
        loss: String,
        sample_ids: Vec<u64>,
    ) -> Result<Option<String>, Failure> {
        self.checkpoints.diverged(self.last_finite)?;
        let checkpoint = self.checkpoints.last_good().map(|path| path.display().to_string());
        let told = checkpoint.clone();
        self.report.record(Event::Diverged { step, epoch, loss, sample_ids, checkpoint: told })?;
        Ok(checkpoint)
    }

    pub(super) fn report_step(&mut self, made: &Made, judged: &Judged, step_s: f64) -> Result<(), Failure> {
        let (samples_digest, ram_bytes) = (made.digest.to_string(), measure::take_recent_peak());
        let vram_bytes = self.setup.card.as_ref().map_or(0, |card| card.take_recent_peak());
        self.vram_peak = self.vram_peak.max(vram_bytes);
        let measured = match self.setup.card.is_some() {
            true => vram_bytes,
            false => self.host_bytes(ram_bytes),
        };
        self.measured = self.measured.max(measured);
        Ok(self.report.record(Event::Step {
            step: made.step,
            epoch: made.epoch,
            loss: loss(&judged.tally),
            lr: made.lr,
            grad_norm: judged.norm,
            samples: made.samples,
            micro_batch: made.way.micro_batch,
            accumulation_steps: made.way.accumulation_steps,
            step_s,
            data_wait_s: made.wait_s,
            ram_bytes,
            vram_bytes,
            resident_bytes: measure::resident_peak(),
            samples_digest,
            loss_scale: self.scaling.factor,
            skipped_updates: self.scaling.skipped,
        })?)
    }

    /// What the host's ledger is compared with where the heap had a peak of so many bytes. What is resident beyond
    /// the plan counts too; up to the plan it may be freed buffers that are kept, which nobody asks for.
    fn host_bytes(&self, heap: u64) -> u64 {
        let beside = self.setup.process.beside_heap;
        // Where the process is not planned, what is resident says nothing about the plan.
        let resident = probe::status("VmRSS:").filter(|_| beside > 0).unwrap_or(0);
        let unplanned = if resident > self.plan.peak.ram_bytes { resident } else { 0 };
        (heap + beside).max(unplanned)
    }

    /// The records left out once an update or an evaluation does without `bad`, and what to tell of it; or the
    /// error that they are too many.
    pub(super) fn counted(
        &self,
        set: Set,
        pass: u64,
        bad: &[Bad],
    ) -> Result<(LeftOut, Vec<String>), Failure> {
        let mut left_out = self.left_out.clone();
        let told = left_out.add(set, pass, bad, on_bad(&self.setup.job.data.loading))?;
        Ok((left_out, told))
    }

    /// Tells of records left out, the first few as they appear.
    pub(super) fn tell_bad(&mut self, records: &[String]) -> Result<(), Failure> {
        match records.is_empty() {
            true => Ok(()),
            false => self.tell_bad_count(records),
        }
    }

    /// Tells how many records were left out, if that is news.
    fn tell_bad_count(&mut self, records: &[String]) -> Result<(), Failure> {
        let count = self.left_out.count();
        if count == self.told_bad {
            return Ok(());
        }
        self.told_bad = count;
        Ok(self.report.record(Event::BadRecords { step: self.step, count, records: records.to_vec() })?)
    }

    /// Says so, once, when updates wait too long for data.
    pub(super) fn heed_waiting(&mut self, step_s: f64, wait_s: f64) -> Result<(), Failure> {
        let Some(share) = self.waiting.add(step_s, wait_s) else { return Ok(()) };
        let setup = self.setup;
        let (cause, advice) = Feeding {
            waits: self.feed.as_ref().map(|feed| feed.loader.waits()).unwrap_or_default(),
            workers: setup.workers,
            cores: setup.threads,
            prefetch: self.way.prefetch,
            forward: setup.order.has_windows(),
            features: setup.features(),
        }
        .advice();
        let (step, cause) = (self.step, cause.to_owned());
        Ok(self.report.record(Event::SlowData { step, share, cause, advice })?)
    }

    /// Writes a checkpoint. Older ones go when it is known to be good.
    pub(super) fn checkpoint(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        self.tell_bad_count(&[])?;
        self.engine.host.phase("checkpoint");
        self.setup.keep_within_plan(Work::Checkpoint);
        let bytes = checkpoint_bytes(&self.setup.layout, self.setup.dtype);
        let ledger = self.engine.host.clone();
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
        let saved = self.checkpoints.save(self.state(), &self.engine.held(), self.tokenizer.as_deref());
        let (path, bytes) = match saved {
            Err(Failure::NotFinite { step, tensor, .. }) => {
                let epoch = self.setup.order.update(step.saturating_sub(1)).epoch;
                let checkpoint =
                    self.report_diverged(step, epoch, format!("`{tensor}` is not finite"), Vec::new())?;
                return Err(Failure::NotFinite { step, tensor, checkpoint });
            }
            saved => saved?,
        };
        self.setup.keep_within_plan(Work::Reporting);
        self.report.record(Event::Checkpoint {
            step: self.step,
            path: path.display().to_string(),
            bytes,
            write_s: begun.elapsed().as_secs_f64(),
        })?;
        self.last_checkpoint = Some((self.step, path));
        self.unproven = Some(self.step);
        self.clock.last_checkpoint = Instant::now();
        Ok(())
    }

    /// Adds the result of an evaluation to the checkpoint of its step.
    pub(super) fn keep_evaluation(&mut self) -> Result<(), Failure> {
        self.evaluation_due = false;
        self.checkpoints.evaluated(&self.state())
    }

    /// Removes the checkpoints that are not to be kept.
    pub(super) fn prune(&mut self) -> Result<(), Failure> {
        self.unproven = None;
        self.checkpoints.prune(self.setup.job.checkpoint.keep, self.best.map(|(_, step)| step))
    }

    fn state(&self) -> State {
        let written = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        State {
            format: FORMAT,
            step: self.step,
            cursor: self.cursor,
            samples: self.samples,
            digest: self.digest,
            seed: self.setup.job.seed,
            job: self.setup.job.to_json(),
            data: self.options.data.clone(),
            optimizer: self.setup.optimizer.kind().into(),
            way: self.way,
            descent: self.descent.clone(),
            best: self.best,
            evaluation_due: self.evaluation_due,
            evaluation_owed: self.owed.evaluation,
            scaling: self.scaling,
            left_out: self.left_out.clone(),
            metrics: self.metrics.clone(),
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            written,
            files: BTreeMap::new(),
        }
    }

    fn elapsed_s(&self) -> f64 {
        self.clock.before_s + self.clock.begun.elapsed().as_secs_f64()
    }

    pub(super) fn stop(&mut self, signal: Signal) -> Result<Ended, Failure> {
        if self.last_checkpoint.as_ref().is_none_or(|(step, _)| *step != self.step) {
            self.checkpoint()?;
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
        self.setup.keep_within_plan(Work::Reporting);
        if !self.overflowed {
            self.prune()?;
        }
        let mut metrics = self.metrics.clone();
        if let Some((value, _)) = self.best {
            metrics.insert(format!("best.{}", self.setup.job.checkpoint.best.name()), value);
        }
        if let Some(card) = &self.setup.card {
            self.vram_peak = self.vram_peak.max(card.take_recent_peak());
            let Stats { synchronizes, arena_passes, diverged, arena, arena_bound } = card.stats();
            self.report.record(Event::DeviceHeap {
                step: self.step,
                synchronizes,
                arena_passes,
                diverged_passes: diverged,
                arena_bytes: arena,
                arena_waste_bytes: arena - arena_bound,
            })?;
        }
        let per_epoch = self.setup.order.updates_per_epoch();
        self.report.record(Event::Finished {
            steps: self.step,
            epochs: self.step / per_epoch,
            samples: self.samples,
            metrics,
            best_step: self.best.map(|(_, step)| step),
            planned_peak_bytes: Memory { ram: self.plan.peak.ram_bytes, vram: self.plan.peak.vram_bytes },
            measured_peak_bytes: Memory { ram: measure::peak(), vram: self.vram_peak },
            resident_peak_bytes: measure::resident_peak(),
            budget_bytes: Memory { ram: self.plan.budget.ram_bytes, vram: self.plan.budget.vram_bytes },
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            samples_digest: self.digest.to_string(),
            bad_records: self.left_out.count(),
        })?;
        Ok(Ended::Done)
    }
}

/// The mean loss; of nothing there is none.
pub(super) fn loss(tally: &Tally) -> f64 {
    if tally.weight == 0.0 { f64::NAN } else { tally.mean_loss() }
}

pub(super) fn oom(step: u64, oom: &Oom) -> Event {
    let Oom { bytes, left, .. } = *oom;
    Event::Oom { step, phase: oom.phase.into(), asker: oom.asker.clone(), bytes, left }
}
