//! Evaluation on the validation set, in micro-batches of its own size.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Run, UpdateError, ended_early, record};
use crate::base::features::TargetSpec;
use crate::base::{Phase, Role};
use crate::data::bad_records::DatasetSplit;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::events::event::Event;
use crate::job::Metric;
use crate::layers::loss::MetricSums;
use crate::train::Failure;

impl Run<'_> {
    /// On a GPU, evaluates the first samples, as many as a whole and as the last micro-batch have, and discards the
    /// result. The libraries, kernels and plans that evaluations use are then loaded before the first update: later,
    /// other processes may have taken the memory for them.
    pub(super) fn warm_up_evaluation(&mut self) -> Result<(), Failure> {
        let Some(gpu) = &self.setup.gpu else { return Ok(()) };
        loop {
            match self.try_warm_up() {
                // The evaluation itself reports what is wrong with the data.
                Ok(()) | Err(UpdateError::Failed(Failure::Data(_))) => break,
                Err(UpdateError::Oom(oom)) => self.shrink_eval_after_oom(oom)?,
                Err(UpdateError::Failed(failure)) => return Err(failure),
            }
        }
        self.reset_retries();
        self.engine.clear_staging();
        gpu.replenish_driver_reserve();
        self.vram_peak = self.vram_peak.max(gpu.take_recent_peak());
        self.report_cudnn_disabled()
    }

    fn try_warm_up(&self) -> Result<(), UpdateError> {
        let (setup, samples) = (self.setup, self.setup.datasets.valid.len() as usize);
        let micro_batch = self.runtime_plan.eval_micro_batch.min(samples);
        let bytes = setup.loader_bytes(micro_batch, 0);
        let hold = self.engine.host_ledger.reserve(Role::DataPipeline, "evaluation prefetch", bytes);
        let _hold = hold.map_err(UpdateError::Oom)?;
        for rows in [micro_batch, samples % micro_batch.max(1)].into_iter().filter(|rows| *rows > 0) {
            let (source, order) = (setup.datasets.valid.clone(), setup.valid_order.clone());
            let options = setup.loader_options(rows, 0);
            let mut loader =
                Loader::start(source, order, Cursor::default(), 1, options).map_err(Failure::from)?;
            if let Some(batch) = loader.next().map_err(|error| self.map_data_error(error))?
                && !batch.ids.is_empty()
            {
                self.engine.evaluate(&batch)?;
            }
        }
        Ok(())
    }

    /// Reports, once, that evaluations do without cuDNN.
    fn report_cudnn_disabled(&mut self) -> Result<(), Failure> {
        match self.engine.take_cudnn_failure() {
            Some(reason) => Ok(self.report.record(Event::CudnnDisabled { step: self.step, reason })?),
            None => Ok(()),
        }
    }

    /// Evaluates the validation set and adds the result to this step's checkpoint.
    pub(super) fn evaluate(&mut self) -> Result<(), Failure> {
        let (setup, begun) = (self.setup, Instant::now());
        let samples = setup.datasets.valid.len();
        let (mut metric_sums, mut done) = (MetricSums::default(), 0);
        self.engine.swap_average()?;
        'smaller: loop {
            self.engine.ledger.set_phase(Phase::Eval);
            let micro_batch = self.runtime_plan.eval_micro_batch.min(samples as usize);
            let prefetch_bytes = setup.loader_bytes(micro_batch, self.runtime_plan.prefetch);
            let hold =
                self.engine.host_ledger.reserve(Role::DataPipeline, "evaluation prefetch", prefetch_bytes);
            let _hold = match hold {
                Ok(hold) => hold,
                Err(oom) => {
                    self.shrink_eval_after_oom(oom)?;
                    continue 'smaller;
                }
            };
            let from = Cursor { update: 0, done };
            let source = setup.datasets.valid.clone();
            let options = setup.loader_options(micro_batch, self.runtime_plan.prefetch);
            let mut loader = Loader::start(source, setup.valid_order.clone(), from, 1, options)?;
            while done < samples {
                let batch = loader.next().map_err(|error| self.map_data_error(error));
                let result = batch.and_then(|batch| {
                    let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
                    let batch_sums = match batch.ids.is_empty() {
                        true => MetricSums::default(),
                        false => self.engine.evaluate(&batch)?,
                    };
                    Ok((batch_sums, batch.consumed, batch.bad_records.clone()))
                });
                match result {
                    Ok((batch_sums, samples, bad)) => {
                        metric_sums += batch_sums;
                        done += samples;
                        let (skipped_records, reported) =
                            self.count_bad_records(DatasetSplit::Valid, self.step, &bad)?;
                        self.skipped_records = skipped_records;
                        self.report_bad_records(&reported)?;
                    }
                    Err(UpdateError::Oom(oom)) => {
                        self.shrink_eval_after_oom(oom)?;
                        continue 'smaller;
                    }
                    Err(UpdateError::Failed(failure)) => return Err(failure),
                }
            }
            break;
        }
        self.reset_retries();
        self.report_cudnn_disabled()?;
        self.engine.swap_average()?;
        // A regression target has no class to count as correct.
        let requested: &[Metric] = match setup.features().target {
            TargetSpec::Values { .. } => &[],
            _ => &setup.job.eval.metrics,
        };
        self.metrics = metrics_of(&metric_sums, requested);
        let epoch = setup.order.update(self.step.saturating_sub(1)).epoch;
        let event = Event::Eval {
            step: self.step,
            epoch,
            metrics: self.metrics.clone(),
            samples,
            eval_s: begun.elapsed().as_secs_f64(),
        };
        self.report.record(event)?;
        let rank = setup.job.checkpoint.best;
        let value = self.metrics.get(rank.name()).copied().unwrap_or(f64::NAN);
        let better = self.best.is_none_or(|(best, _)| rank.improves(value, best)) && !value.is_nan();
        if better {
            self.best = Some((value, self.step));
        }
        self.save_evaluation()?;
        match &self.last_checkpoint {
            Some((step, path)) if better => Ok(self.report.record(Event::Best {
                step: *step,
                path: path.display().to_string(),
                metric: rank.name().into(),
                value,
            })?),
            _ => Ok(()),
        }
    }
}

fn metrics_of(metric_sums: &MetricSums, requested: &[Metric]) -> BTreeMap<String, f64> {
    let fraction = |n: u64| n as f64 / metric_sums.count as f64;
    let of = |metric: &Metric| match metric {
        Metric::Accuracy => fraction(metric_sums.top1),
        Metric::Top5 => fraction(metric_sums.top5),
    };
    let named = requested.iter().map(|metric| (format!("valid.{}", metric.name()), of(metric)));
    named.chain([("valid.loss".to_owned(), record::mean_loss(metric_sums))]).collect()
}
