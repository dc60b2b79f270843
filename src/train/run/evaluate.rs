//! Evaluation on the validation set, in micro-batches of its own size.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Run, UpdateError, ended_early, record};
use crate::base::Role;
use crate::base::features::TargetSpec;
use crate::data::bad_records::DatasetSplit;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::events::event::Event;
use crate::job::Metric;
use crate::layers::loss::MetricSums;
use crate::train::Failure;

impl Run<'_> {
    /// Evaluates the validation set and adds the result to this step's checkpoint.
    pub(super) fn evaluate(&mut self) -> Result<(), Failure> {
        let (setup, begun) = (self.setup, Instant::now());
        let samples = setup.datasets.valid.len();
        let (mut metric_sums, mut done) = (MetricSums::default(), 0);
        self.engine.swap_average()?;
        'smaller: loop {
            self.engine.ledger.set_phase("eval");
            let micro_batch = self.runtime_plan.eval_micro_batch.min(samples as usize);
            let prefetch_bytes = self.loader_bytes(self.runtime_plan, micro_batch);
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
