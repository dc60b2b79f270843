//! Judging the validation set, in micro-batches of its own.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Run, Tried, ended_early, record};
use crate::data::bad::Set;
use crate::data::loader::Loader;
use crate::data::order::Cursor;
use crate::features::Target;
use crate::job::Metric;
use crate::layers::loss::Tally;
use crate::memory::Role;
use crate::train::Failure;
use crate::train::event::Event;

impl Run<'_> {
    /// Evaluates the validation set, and adds the result to the checkpoint of this step.
    pub(super) fn evaluate(&mut self) -> Result<(), Failure> {
        let (setup, begun) = (self.setup, Instant::now());
        let samples = setup.sets.valid.len();
        let (mut tally, mut done) = (Tally::default(), 0);
        self.engine.swap_average()?;
        'smaller: loop {
            self.engine.ledger.phase("eval");
            let micro_batch = self.way.eval_micro_batch.min(samples as usize);
            let ahead = self.pipeline(self.way, micro_batch);
            let hold = self.engine.host.reserve(Role::DataPipeline, "evaluation prefetch", ahead);
            let _hold = match hold {
                Ok(hold) => hold,
                Err(oom) => {
                    self.shrink_evaluation(oom)?;
                    continue 'smaller;
                }
            };
            let from = Cursor { update: 0, done };
            let source = setup.sets.valid.clone();
            let reading = setup.reading(micro_batch, self.way.prefetch);
            let mut loader = Loader::start(source, setup.valid_order.clone(), from, 1, reading)?;
            while done < samples {
                let batch = loader.next().map_err(|error| self.lacking(error));
                let judged = batch.and_then(|batch| {
                    let batch = batch.ok_or_else(|| Failure::Data(ended_early()))?;
                    let judged = match batch.ids.is_empty() {
                        true => Tally::default(),
                        false => self.engine.judge(&batch)?,
                    };
                    Ok((judged, batch.taken, batch.bad.clone()))
                });
                match judged {
                    Ok((part, samples, bad)) => {
                        tally += part;
                        done += samples;
                        let (left_out, told) = self.counted(Set::Valid, self.step, &bad)?;
                        self.left_out = left_out;
                        self.tell_bad(&told)?;
                    }
                    Err(Tried::Oom(oom)) => {
                        self.shrink_evaluation(oom)?;
                        continue 'smaller;
                    }
                    Err(Tried::Failed(failure)) => return Err(failure),
                }
            }
            break;
        }
        self.recovered();
        self.engine.swap_average()?;
        // Values that are predicted have no right class to count.
        let wanted: &[Metric] = match setup.features().target {
            Target::Values { .. } => &[],
            _ => &setup.job.eval.metrics,
        };
        self.metrics = metrics(&tally, wanted);
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
        self.keep_evaluation()?;
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

fn metrics(tally: &Tally, wanted: &[Metric]) -> BTreeMap<String, f64> {
    let share = |n: u64| n as f64 / tally.count as f64;
    let of = |metric: &Metric| match metric {
        Metric::Accuracy => share(tally.top1),
        Metric::Top5 => share(tally.top5),
    };
    let named = wanted.iter().map(|metric| (format!("valid.{}", metric.name()), of(metric)));
    named.chain([("valid.loss".to_owned(), record::loss(tally))]).collect()
}
