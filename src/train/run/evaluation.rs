//! Evaluation on the validation set, in micro-batches of its own size.

use std::collections::BTreeMap;
use std::time::Instant;

use super::context::RunContext;
use super::memory::MemoryControl;
use super::skipped_records::SkippedRecordLog;
use super::{UpdateError, ended_early, mean_loss};
use crate::base::features::{Features, TargetSpec};
use crate::base::{Phase, Role};
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::data::split::DatasetSplit;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::layers::loss::MetricSums;
use crate::metrics::detail::TaskDetail;
use crate::planner::estimate::EVALUATION_METRICS;
use crate::train::Failure;
use crate::train::early_stop::StopProgress;
use crate::train::validation_metrics::ValidationMetrics;

#[derive(Default)]
pub(super) struct EvaluationState {
    /// The current weights are due for an evaluation.
    pub due: bool,
    /// The last values of the metrics.
    pub metrics: BTreeMap<String, f64>,
    /// What the last evaluation found besides them, until it is written.
    pub detail: Option<TaskDetail>,
    /// Best value of the job's `checkpoint.best` so far, and the step that reached it.
    pub best: Option<(f64, u64)>,
    /// What decides whether the run stops early.
    pub stop: StopProgress,
    /// Sums over the updates since the last evaluation.
    pub train_sums: MetricSums,
}

impl EvaluationState {
    /// On a GPU, evaluates the first samples, as many as a whole and as the last micro-batch have, and discards the
    /// result. The libraries, kernels and plans that evaluations use are then loaded before the first update: later,
    /// other processes may have taken the memory for them.
    pub fn warm_up(ctx: &mut RunContext, memory: &mut MemoryControl) -> Result<(), Failure> {
        let Some(gpu) = &ctx.setup.gpu else { return Ok(()) };
        loop {
            match try_warm_up(ctx) {
                // The evaluation itself reports what is wrong with the data.
                Ok(()) | Err(UpdateError::Failed(Failure::Data(_))) => break,
                Err(UpdateError::Oom(oom)) => memory.shrink_eval_after_oom(ctx, oom)?,
                Err(UpdateError::Failed(failure)) => return Err(failure),
            }
        }
        memory.reset_retries();
        ctx.engine.clear_staging();
        gpu.replenish_driver_reserve();
        memory.measure(ctx);
        ctx.report_cudnn_disabled()
    }

    /// Evaluates the validation set. A stop request abandons it, and it stays due: a resumed run repeats it.
    pub fn run(
        &mut self,
        ctx: &mut RunContext,
        memory: &mut MemoryControl,
        skipped: &mut SkippedRecordLog,
    ) -> Result<EvaluationOutcome, Failure> {
        let (setup, begun) = (ctx.setup, Instant::now());
        ctx.engine.swap_average()?;
        let (mut metrics, mut done) = (None, 0);
        ctx.begin(Work::Evaluation, setup.datasets.valid.len());
        loop {
            match evaluate_from(ctx, skipped, &mut done, &mut metrics) {
                Ok(true) => break,
                Ok(false) => {
                    ctx.engine.swap_average()?;
                    return Ok(EvaluationOutcome::Abandoned);
                }
                Err(UpdateError::Oom(oom)) => memory.shrink_eval_after_oom(ctx, oom)?,
                Err(UpdateError::Failed(failure)) => return Err(failure),
            }
        }
        memory.reset_retries();
        ctx.report_cudnn_disabled()?;
        ctx.engine.swap_average()?;
        (self.metrics, self.detail) = metrics.unwrap_or_else(|| ValidationMetrics::new(setup)).finish()?;
        self.metrics.extend(train_metrics(&std::mem::take(&mut self.train_sums), setup.features()));
        self.due = false;
        let step = ctx.position.step;
        ctx.record(Event::Eval {
            step,
            epoch: ctx.position.epoch(&setup.order),
            metrics: self.metrics.clone(),
            samples: setup.datasets.valid.len(),
            eval_s: begun.elapsed().as_secs_f64(),
        })?;
        let watched = setup.job.stop.metric.unwrap_or(setup.job.checkpoint.best);
        let value = self.metrics.get(&watched.name()).copied().unwrap_or(f64::NAN);
        if setup.job.is_reduced_after(step) {
            self.stop.count(value, watched, &setup.job.stop);
        }
        let rank = setup.job.checkpoint.best;
        let value = self.metrics.get(&rank.name()).copied().unwrap_or(f64::NAN);
        // Earlier weights that are less pruned, or not yet rounded, do not compete: they are not the model that the job
        // asks for.
        let is_as_small = |before: u64| {
            let (prune, quantize) = (setup.job.pruning(), setup.job.quantize.as_ref());
            prune.is_none_or(|prune| prune.sparsity(before) >= prune.sparsity(step))
                && quantize.is_none_or(|config| config.rounds_after(before) == config.rounds_after(step))
        };
        let rival = self.best.filter(|(_, before)| is_as_small(*before));
        let better = rival.is_none_or(|(best, _)| rank.improves(value, best)) && !value.is_nan();
        if better {
            self.best = Some((value, step));
        }
        Ok(if better { EvaluationOutcome::Best(value) } else { EvaluationOutcome::NotBest })
    }
}

/// How an evaluation ended.
pub(super) enum EvaluationOutcome {
    /// The job's `checkpoint.best` has this value, the best so far.
    Best(f64),
    NotBest,
    Abandoned,
}

fn try_warm_up(ctx: &RunContext) -> Result<(), UpdateError> {
    let (setup, samples) = (ctx.setup, ctx.setup.datasets.valid.len() as usize);
    let micro_batch = ctx.engine.plan().eval_micro_batch.min(samples);
    let bytes = setup.eval_loader_bytes(micro_batch, 0);
    let hold = ctx.engine.host_ledger.reserve(Role::DataPipeline, "evaluation prefetch", bytes);
    let _hold = hold.map_err(UpdateError::Oom)?;
    for rows in [micro_batch, samples % micro_batch.max(1)].into_iter().filter(|rows| *rows > 0) {
        let (source, order) = (setup.datasets.valid.clone(), setup.valid_order.clone());
        let loader = Loader::start(source, order, Cursor::default(), 1, setup.loader_options(rows, 0));
        let batch = loader.map_err(Failure::from)?.next().map_err(|error| ctx.map_data_error(error))?;
        if let Some(batch) = batch.filter(|batch| !batch.ids.is_empty()) {
            ctx.engine.evaluate(&batch)?;
        }
    }
    Ok(())
}

/// Evaluates the samples after the first `done`, which it advances: after an OOM the rest is evaluated under another
/// plan. Returns whether all were evaluated, and not a stop requested.
fn evaluate_from<'a>(
    ctx: &mut RunContext<'a>,
    skipped: &mut SkippedRecordLog,
    done: &mut u64,
    metrics: &mut Option<ValidationMetrics<'a>>,
) -> Result<bool, UpdateError> {
    let (setup, plan, samples) = (ctx.setup, ctx.engine.plan(), ctx.setup.datasets.valid.len());
    ctx.engine.ledger.set_phase(Phase::Eval);
    let micro_batch = plan.eval_micro_batch.min(samples as usize);
    let prefetch_bytes = setup.eval_loader_bytes(micro_batch, plan.prefetch);
    let hold = ctx.engine.host_ledger.reserve(Role::DataPipeline, "evaluation prefetch", prefetch_bytes);
    let _hold = hold.map_err(UpdateError::Oom)?;
    let metric_bytes = setup.metrics.bytes;
    let hold = (metric_bytes > 0)
        .then(|| ctx.engine.host_ledger.reserve(Role::DataPipeline, EVALUATION_METRICS, metric_bytes));
    let _metrics = hold.transpose().map_err(UpdateError::Oom)?;
    let metrics = metrics.get_or_insert_with(|| ValidationMetrics::new(setup));
    let from = Cursor { update: 0, done: *done };
    let options = setup.loader_options(micro_batch, plan.prefetch);
    let source = setup.datasets.valid.clone();
    let loader = Loader::start(source, setup.valid_order.clone(), from, 1, options);
    let mut loader = loader.map_err(Failure::from)?;
    while *done < samples {
        if ctx.options.signals.stop_requested().is_some() {
            return Ok(false);
        }
        let batch = loader.next().map_err(|error| ctx.map_data_error(error))?;
        let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
        if !batch.ids.is_empty() {
            let (sums, outputs) = ctx.engine.evaluate(&batch)?;
            metrics.push(setup.datasets.valid.as_ref(), &batch, sums, &outputs)?;
        }
        *done += batch.consumed;
        ctx.advance(batch.consumed);
        let counted = skipped.count(ctx.setup, DatasetSplit::Valid, ctx.position.step, &batch.bad_records)?;
        skipped.keep(ctx, counted)?;
    }
    Ok(true)
}

/// Loss and accuracy of the training samples since the last evaluation, as computed in training: each before its
/// update, with dropout and augmentation.
fn train_metrics(sums: &MetricSums, features: &Features) -> BTreeMap<String, f64> {
    if sums.count == 0 {
        return BTreeMap::new();
    }
    let mut metrics = BTreeMap::from([("train.loss".to_owned(), mean_loss(sums))]);
    // Training counts no correct tokens: the fused kernel of a language model does not rank its logits.
    let has_accuracy = !matches!(features.target, TargetSpec::Values { .. } | TargetSpec::Tokens);
    if has_accuracy {
        metrics.insert("train.accuracy".to_owned(), sums.top1 as f64 / sums.count as f64);
    }
    metrics
}
