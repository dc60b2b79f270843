//! What a run reports and writes: steps, checkpoints, its end.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::{PendingUpdate, Run, RunOutcome};
use crate::base::{Phase, Role};
use crate::data::bad_records::{BadRecord, DatasetSplit, SkippedRecords};
use crate::events::event::{Event, MemoryBytes};
use crate::graph::network::StepError;
use crate::kernels::grad_stats::GradStats;
use crate::layers::loss::MetricSums;
use crate::memory::device_heap::HeapStats;
use crate::memory::process::WorkPhase;
use crate::memory::{Oom, measure, probe};
use crate::planner::estimate::checkpoint_write_bytes;
use crate::train::Failure;
use crate::train::checkpoint::{CheckpointState, FORMAT};
use crate::train::data_wait::LoaderBottleneck;
use crate::train::setup::bad_record_policy;
use crate::train::signals::Signal;

impl Run<'_> {
    pub(super) fn divergence_failure(
        &mut self,
        stats: &GradStats,
        step: u64,
        epoch: u64,
        sample_ids: Vec<u64>,
    ) -> Failure {
        let loss = stats.metrics.mean_loss();
        let (what, value) = if loss.is_finite() { ("gradient norm", stats.norm) } else { ("loss", loss) };
        match self.report_diverged(step, epoch, value.to_string(), sample_ids) {
            Ok(checkpoint) => Failure::Diverged { step, what, value, checkpoint },
            Err(error) => error,
        }
    }

    /// Reports non-finite values and returns the checkpoint to resume from. Weights without a later finite update are
    /// suspect, so this is an earlier checkpoint if there is one.
    fn report_diverged(
        &mut self,
        step: u64,
        epoch: u64,
        loss: String,
        sample_ids: Vec<u64>,
    ) -> Result<Option<String>, Failure> {
        self.checkpoints.mark_diverged(self.last_finite)?;
        let checkpoint = self.checkpoints.last_good().map(|path| path.display().to_string());
        let reported = checkpoint.clone();
        self.report.record(Event::Diverged { step, epoch, loss, sample_ids, checkpoint: reported })?;
        Ok(checkpoint)
    }

    pub(super) fn report_step(
        &mut self,
        update: &PendingUpdate,
        stats: &GradStats,
        step_s: f64,
    ) -> Result<(), Failure> {
        let (samples_digest, ram_bytes) = (update.digest.to_string(), measure::take_recent_peak());
        let vram_bytes = self.setup.gpu.as_ref().map_or(0, |gpu| gpu.take_recent_peak());
        self.vram_peak = self.vram_peak.max(vram_bytes);
        let measured = match self.setup.gpu.is_some() {
            true => vram_bytes,
            false => self.host_usage(ram_bytes),
        };
        self.measured = self.measured.max(measured);
        Ok(self.report.record(Event::Step {
            step: update.step,
            epoch: update.epoch,
            loss: mean_loss(&stats.metrics),
            lr: update.lr,
            grad_norm: stats.norm,
            samples: update.samples,
            micro_batch: update.runtime_plan.micro_batch,
            accumulation_steps: update.runtime_plan.accumulation_steps,
            step_s,
            data_wait_s: update.wait_s,
            ram_bytes,
            vram_bytes,
            resident_bytes: measure::resident_peak(),
            samples_digest,
            loss_scale: self.grad_scaler.factor,
            skipped_updates: self.grad_scaler.skipped,
        })?)
    }

    /// Host bytes to compare with the ledger, given the heap's peak. Resident memory counts only beyond the plan: up
    /// to the plan it may be freed buffers that the allocator keeps and nobody reserves.
    fn host_usage(&self, heap: u64) -> u64 {
        let non_heap = self.setup.process.non_heap;
        // If the process is not planned, its resident memory says nothing about the plan.
        let resident = probe::proc_status("VmRSS:").filter(|_| non_heap > 0).unwrap_or(0);
        let unplanned = if resident > self.plan.peak.ram_bytes { resident } else { 0 };
        (heap + non_heap).max(unplanned)
    }

    /// Adds `bad` to the skipped records of an update or an evaluation. Returns the new counts and the texts to
    /// report, or the error that there are too many.
    pub(super) fn count_bad_records(
        &self,
        set: DatasetSplit,
        pass: u64,
        bad: &[BadRecord],
    ) -> Result<(SkippedRecords, Vec<String>), Failure> {
        let mut skipped_records = self.skipped_records.clone();
        let reported =
            skipped_records.record(set, pass, bad, bad_record_policy(&self.setup.job.data.loader))?;
        Ok((skipped_records, reported))
    }

    /// Reports skipped records, listing the first few.
    pub(super) fn report_bad_records(&mut self, records: &[String]) -> Result<(), Failure> {
        match records.is_empty() {
            true => Ok(()),
            false => self.report_bad_count(records),
        }
    }

    /// Reports the number of skipped records if it has changed.
    fn report_bad_count(&mut self, records: &[String]) -> Result<(), Failure> {
        let count = self.skipped_records.count();
        if count == self.reported_bad {
            return Ok(());
        }
        self.reported_bad = count;
        Ok(self.report.record(Event::BadRecords { step: self.step, count, records: records.to_vec() })?)
    }

    /// Reports, once, that updates wait too long for data.
    pub(super) fn report_data_wait(&mut self, step_s: f64, wait_s: f64) -> Result<(), Failure> {
        let Some(fraction) = self.data_wait.record(step_s, wait_s) else { return Ok(()) };
        let setup = self.setup;
        let (cause, advice) = LoaderBottleneck {
            waits: self.train_loader.as_ref().map(|feed| feed.loader.waits()).unwrap_or_default(),
            workers: setup.workers,
            cores: setup.threads,
            prefetch: self.runtime_plan.prefetch,
            sequential: setup.order.has_windows(),
            features: setup.features(),
        }
        .advice();
        let (step, cause) = (self.step, cause.to_owned());
        Ok(self.report.record(Event::SlowData { step, share: fraction, cause, advice })?)
    }

    /// Writes a checkpoint. Older ones are removed once it is known to be good.
    pub(super) fn checkpoint(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        self.report_bad_count(&[])?;
        self.engine.host_ledger.set_phase(Phase::Checkpoint);
        self.setup.limit_resident_memory(WorkPhase::Checkpoint);
        let bytes = checkpoint_write_bytes(&self.setup.layout, self.setup.dtype);
        let ledger = self.engine.host_ledger.clone();
        let reserve = || ledger.reserve(Role::CheckpointWriting, "checkpoint", bytes);
        let _hold = match reserve() {
            Ok(hold) => hold,
            // Between updates, only the read-ahead can be freed.
            Err(first) => {
                self.report.record(oom_event(self.step, &first))?;
                self.train_loader = None;
                reserve().map_err(StepError::Oom)?
            }
        };
        let saved = self.checkpoints.save(
            self.checkpoint_state(),
            &self.engine.checkpoint_tensors(),
            self.tokenizer.as_deref(),
        );
        let (path, bytes) = match saved {
            Err(Failure::NotFinite { step, tensor, .. }) => {
                let epoch = self.setup.order.update(step.saturating_sub(1)).epoch;
                let checkpoint =
                    self.report_diverged(step, epoch, format!("`{tensor}` is not finite"), Vec::new())?;
                return Err(Failure::NotFinite { step, tensor, checkpoint });
            }
            saved => saved?,
        };
        self.setup.limit_resident_memory(WorkPhase::Reporting);
        self.report.record(Event::Checkpoint {
            step: self.step,
            path: path.display().to_string(),
            bytes,
            write_s: begun.elapsed().as_secs_f64(),
        })?;
        self.last_checkpoint = Some((self.step, path));
        self.unproven_checkpoint = Some(self.step);
        self.clock.last_checkpoint = Instant::now();
        Ok(())
    }

    /// Adds the evaluation result to this step's checkpoint.
    pub(super) fn save_evaluation(&mut self) -> Result<(), Failure> {
        self.evaluation_due = false;
        self.checkpoints.save_evaluation(&self.checkpoint_state())
    }

    /// Removes checkpoints beyond those to keep.
    pub(super) fn prune(&mut self) -> Result<(), Failure> {
        self.unproven_checkpoint = None;
        self.checkpoints.prune(self.setup.job.checkpoint.keep, self.best.map(|(_, step)| step))
    }

    fn checkpoint_state(&self) -> CheckpointState {
        let written = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        CheckpointState {
            format: FORMAT,
            step: self.step,
            cursor: self.cursor,
            samples: self.samples,
            digest: self.digest,
            seed: self.setup.job.seed,
            job: self.setup.job.to_json(),
            data: self.options.data.clone(),
            optimizer: self.runtime_plan.optimizer,
            way: self.runtime_plan,
            descent: self.backoff.clone(),
            best: self.best,
            evaluation_due: self.evaluation_due,
            evaluation_owed: self.deferred.evaluation,
            scaling: self.grad_scaler,
            left_out: self.skipped_records.clone(),
            metrics: self.metrics.clone(),
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            written,
            files: BTreeMap::new(),
        }
    }

    fn elapsed_s(&self) -> f64 {
        self.clock.previous_s + self.clock.started.elapsed().as_secs_f64()
    }

    /// Reports why this session captured no CUDA graph, unless that was reported.
    fn report_no_graph(&mut self) -> Result<(), Failure> {
        match self.engine.no_graph_event(self.step) {
            Some(event) => Ok(self.report.record(event)?),
            None => Ok(()),
        }
    }

    pub(super) fn stop(&mut self, signal: Signal) -> Result<RunOutcome, Failure> {
        if self.last_checkpoint.as_ref().is_none_or(|(step, _)| *step != self.step) {
            self.checkpoint()?;
        }
        let checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.display().to_string());
        self.report_no_graph()?;
        self.report.record(Event::Interrupted {
            step: self.step,
            signal: signal.name().into(),
            checkpoint,
        })?;
        Ok(RunOutcome::Stopped(signal))
    }

    pub(super) fn finish(&mut self) -> Result<RunOutcome, Failure> {
        self.setup.limit_resident_memory(WorkPhase::Reporting);
        if !self.overflowed {
            self.prune()?;
        }
        let mut metrics = self.metrics.clone();
        if let Some((value, _)) = self.best {
            metrics.insert(format!("best.{}", self.setup.job.checkpoint.best.name()), value);
        }
        if let Some(gpu) = &self.setup.gpu {
            self.vram_peak = self.vram_peak.max(gpu.take_recent_peak());
            self.report_no_graph()?;
            let HeapStats {
                synchronizes,
                arena_passes,
                diverged,
                arena_bytes: arena,
                arena_lower_bound: arena_bound,
            } = gpu.stats();
            self.report.record(Event::DeviceHeap {
                step: self.step,
                synchronizes,
                arena_passes,
                diverged_passes: diverged,
                arena_bytes: arena,
                arena_waste_bytes: arena - arena_bound,
                outside_heap_bytes: gpu.outside_heap_bytes(),
            })?;
        }
        let per_epoch = self.setup.order.updates_per_epoch();
        self.report.record(Event::Finished {
            steps: self.step,
            epochs: self.step / per_epoch,
            samples: self.samples,
            metrics,
            best_step: self.best.map(|(_, step)| step),
            planned_peak_bytes: MemoryBytes {
                ram: self.plan.peak.ram_bytes,
                vram: self.plan.peak.vram_bytes,
            },
            measured_peak_bytes: MemoryBytes { ram: measure::peak_bytes(), vram: self.vram_peak },
            resident_peak_bytes: measure::resident_peak(),
            budget_bytes: MemoryBytes { ram: self.plan.budget.ram_bytes, vram: self.plan.budget.vram_bytes },
            elapsed_s: self.elapsed_s(),
            data_wait_s: self.clock.data_wait_s,
            samples_digest: self.digest.to_string(),
            bad_records: self.skipped_records.count(),
        })?;
        Ok(RunOutcome::Done)
    }
}

/// The mean loss; `NaN` if every record was skipped.
pub(super) fn mean_loss(metric_sums: &MetricSums) -> f64 {
    if metric_sums.weight == 0.0 { f64::NAN } else { metric_sums.mean_loss() }
}

pub(super) fn oom_event(step: u64, oom: &Oom) -> Event {
    let Oom { bytes, available: left, .. } = *oom;
    Event::Oom { step, phase: oom.phase, asker: oom.requester.clone(), bytes, left }
}
