//! One update: its samples, its gradients and its report, which on a GPU comes an update later.

use super::context::TrainLoader;
use super::{Run, UpdateError, ended_early, mean_loss};
use crate::data::digest::Digest;
use crate::data::split::DatasetSplit;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::job::QuantizeConfig;
use crate::kernels::grad_stats::GradStats;
use crate::memory::measure;
use crate::optim::grad_scaler::StepDecision;
use crate::optim::prune::PrunedCount;
use crate::optim::schedule;
use crate::planner::ExecutionPlan;
use crate::train::Failure;
use crate::train::data_wait::LoaderBottleneck;
use crate::train::engine::UpdateGradStats;

/// An applied update, with a snapshot of the run right after it.
pub(super) struct PendingUpdate {
    pub grad_stats: UpdateGradStats,
    lr: f64,
    /// From 1.
    epoch: u64,
    ids: Vec<u64>,
    step: u64,
    samples: u64,
    digest: Digest,
    plan: ExecutionPlan,
    wait_s: f64,
}

impl Run<'_> {
    /// Applies one update. After an OOM it retries the same samples from the same state under a smaller plan.
    pub(super) fn update(&mut self) -> Result<PendingUpdate, Failure> {
        self.ctx.engine.begin_update()?;
        let grad_scaler = self.grad_scaler;
        loop {
            match self.ctx.take_train_loader().and_then(|train_loader| self.try_update(train_loader)) {
                Ok(update) => {
                    self.memory.record_update();
                    if let Some(event) = self.ctx.engine.take_capture_event(self.ctx.position.step - 1) {
                        self.ctx.record(event)?;
                    }
                    return Ok(update);
                }
                Err(UpdateError::Oom(oom)) => {
                    self.settle_pending_update()?;
                    self.memory.shrink_after_oom(&mut self.ctx, oom)?;
                    self.ctx.engine.rollback_update()?;
                    self.grad_scaler = grad_scaler;
                }
                Err(UpdateError::Failed(failure)) => {
                    // Best effort: report this failure, not one from settling the previous update.
                    drop(self.settle_pending_update());
                    return Err(failure);
                }
            }
        }
    }

    /// Keeps `train_loader` for the next update on success.
    fn try_update(&mut self, mut train_loader: TrainLoader) -> Result<PendingUpdate, UpdateError> {
        let ctx = &mut self.ctx;
        let (job, step) = (&ctx.setup.job, ctx.position.step);
        let span = ctx.setup.order.update(ctx.position.cursor.update);
        let (mut pending_sums, mut ids, mut wait_s) =
            (Vec::new(), Vec::with_capacity(span.len() as usize), 0.0);
        let (mut taken, mut bad) = (0, Vec::new());
        ctx.begin(Work::Update, span.len());
        while taken < span.len() {
            let batch = train_loader.loader.next().map_err(|error| ctx.map_data_error(error))?;
            let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
            wait_s += train_loader.loader.last_wait().as_secs_f64();
            taken += batch.consumed;
            ids.extend_from_slice(&batch.ids);
            bad.extend_from_slice(&batch.bad_records);
            if !batch.ids.is_empty() {
                pending_sums.push(ctx.engine.forward_backward(&batch, self.grad_scaler.factor)?);
            }
            ctx.advance(batch.consumed);
        }
        // An observer, or a dynamic loss scale, needs the statistics before the next update.
        let now = ctx.options.observer.is_some() || self.grad_scaler.is_dynamic();
        let grad_stats = ctx.engine.compute_grad_stats(&pending_sums, self.grad_scaler.factor, now)?;
        let skipped = self.skipped_records.count(ctx.setup, DatasetSplit::Train, span.epoch, &bad)?;
        let lr = schedule::lr(&job.schedule, job.optimizer.lr(), step, ctx.setup.total_steps);
        let decision = match &grad_stats {
            UpdateGradStats::Ready(stats) => self.check_gradients(stats)?,
            // The GPU kernel itself skips an update whose gradients are not finite.
            UpdateGradStats::Pending(_) => StepDecision::Apply,
        };
        let ctx = &mut self.ctx;
        let compression = ctx.engine.reserve_compression(step + 1)?;
        match decision {
            StepDecision::Diverged => {
                let (stats, checkpoints) = (grad_stats.read()?, &self.checkpoints);
                return Err(checkpoints.divergence_failure(ctx, &stats, step + 1, span.epoch, ids).into());
            }
            StepDecision::Skip => ctx.engine.discard_gradients()?,
            StepDecision::Apply => ctx.engine.update(&grad_stats, lr, step + 1 - self.grad_scaler.skipped)?,
        }
        // By the steps of the run: an update that is skipped does not postpone it.
        if let Some(PrunedCount { pruned, weights, units }) = ctx.engine.prune(step + 1)? {
            let sparsity = pruned as f64 / weights.max(1) as f64;
            let (pruned_units, units) = (units.map(|count| count.pruned), units.map(|count| count.units));
            ctx.record(Event::Pruned { step: step + 1, sparsity, pruned, weights, pruned_units, units })?;
        }
        ctx.engine.quantize(step + 1)?;
        let begins = |config: &QuantizeConfig| config.rounds_after(step + 1) && !config.rounds_after(step);
        if ctx.setup.job.quantize.as_ref().is_some_and(begins) {
            ctx.record(Event::Quantized { step: step + 1 })?;
        }
        drop(compression);
        ctx.train_loader = Some(train_loader);
        ctx.position.advance(&ids);
        self.skipped_records.keep(ctx, skipped)?;
        self.clock.data_wait_s += wait_s;
        let (position, plan) = (&ctx.position, ctx.engine.plan());
        if let Some(observer) = &ctx.options.observer {
            observer.on_update(position.step, &ctx.engine.store, position.digest)?;
        }
        let (epoch, step, samples, digest) =
            (span.epoch + 1, position.step, position.samples, position.digest);
        Ok(PendingUpdate { grad_stats, lr, epoch, ids, step, samples, digest, plan, wait_s })
    }

    /// Decides what to do with known gradient statistics, and shows them to the observer.
    fn check_gradients(&mut self, stats: &GradStats) -> Result<StepDecision, Failure> {
        // If every record was skipped there is nothing to learn: the weights stay, but the update counts.
        if stats.metrics.weight == 0.0 {
            self.overflowed = false;
            return Ok(StepDecision::Skip);
        }
        if let Some(observer) = &self.ctx.options.observer {
            let (engine, loss) = (&self.ctx.engine, stats.metrics.mean_loss());
            let factor = engine.terms(self.grad_scaler.factor).mean_factor(&stats.metrics);
            let requests = engine.ledger.request_count();
            observer.on_gradients(self.ctx.position.step + 1, loss, &engine.store, factor, requests)?;
        }
        let skipped = self.grad_scaler.skipped;
        let decision = self.grad_scaler.update(stats.is_finite());
        self.overflowed = self.grad_scaler.skipped > skipped;
        Ok(decision)
    }

    /// Waits for the statistics of the last update and reports it.
    pub(super) fn settle_pending_update(&mut self) -> Result<(), Failure> {
        let Some(update) = self.pending_update.take() else { return Ok(()) };
        let (stats, step) = (update.grad_stats.read()?, update.step);
        let step_s = self.clock.end_step();
        if !stats.is_finite() && !self.grad_scaler.is_dynamic() {
            let (ctx, epoch) = (&mut self.ctx, update.epoch);
            return Err(self.checkpoints.divergence_failure(ctx, &stats, step, epoch, update.ids));
        }
        if stats.is_finite() {
            self.evaluation.train_sums += stats.metrics;
        }
        if stats.is_finite() && self.checkpoints.record_finite(step) {
            self.prune_checkpoints()?;
        }
        self.report_data_wait(step_s, update.wait_s)?;
        let job = &self.ctx.setup.job;
        let (last, log) = (step == self.ctx.position.last_step, job.log.every_steps);
        let evaluates = self.ctx.options.observer.is_none() && self.is_due(job.eval.every(), step);
        if last || evaluates || step == 1 || step.is_multiple_of(log) {
            self.report_step(&update, &stats, step_s)?;
            self.memory.correct_budget(&mut self.ctx)?;
        }
        Ok(())
    }

    fn report_step(&mut self, update: &PendingUpdate, stats: &GradStats, step_s: f64) -> Result<(), Failure> {
        let peaks = self.memory.measure(&self.ctx);
        self.ctx.record(Event::Step {
            step: update.step,
            epoch: update.epoch,
            loss: mean_loss(&stats.metrics),
            lr: update.lr,
            grad_norm: stats.norm,
            samples: update.samples,
            micro_batch: update.plan.micro_batch,
            accumulation_steps: update.plan.accumulation_steps,
            step_s,
            data_wait_s: update.wait_s,
            ram_bytes: peaks.ram,
            vram_bytes: peaks.vram,
            resident_bytes: measure::resident_peak(),
            samples_digest: update.digest.to_string(),
            loss_scale: self.grad_scaler.factor,
            skipped_updates: self.grad_scaler.skipped,
        })
    }

    /// Reports, once, that updates wait too long for data.
    fn report_data_wait(&mut self, step_s: f64, wait_s: f64) -> Result<(), Failure> {
        let Some(fraction) = self.clock.data_wait.record(step_s, wait_s) else { return Ok(()) };
        let (setup, ctx) = (self.ctx.setup, &mut self.ctx);
        let (cause, advice) = LoaderBottleneck {
            waits: ctx.train_loader.as_ref().map(|open| open.loader.waits()).unwrap_or_default(),
            workers: setup.workers,
            cores: setup.threads,
            prefetch: ctx.engine.plan().prefetch,
            sequential: setup.order.has_windows(),
            features: setup.features(),
        }
        .advice();
        ctx.record(Event::SlowData { step: ctx.position.step, fraction, cause: cause.to_owned(), advice })
    }
}
