//! Judging the validation set, in micro-batches of its own.

use std::collections::BTreeMap;
use std::time::Instant;

use super::{Run, ended_early, oom_event};
use crate::data::loader::Loader;
use crate::data::order::{Cursor, Order};
use crate::job::Metric;
use crate::layers::loss::Tally;
use crate::layers::network::StepError;
use crate::memory::{Oom, Role};
use crate::train::Failure;
use crate::train::event::Event;

impl Run<'_> {
    /// Judges the validation set; says whether it is the best so far.
    pub(super) fn evaluate(&mut self) -> Result<bool, Failure> {
        let (setup, begun) = (self.setup, Instant::now());
        let samples = setup.sets.valid.len();
        let order = Order::new(samples, samples, setup.job.seed, false)?;
        let (mut tally, mut done) = (Tally::default(), 0);
        self.engine.swap_average()?;
        'smaller: loop {
            let micro_batch = self.eval_micro_batch.min(samples as usize);
            let hold = self.engine.ledger.reserve(
                Role::DataPipeline,
                "evaluation prefetch",
                setup.pipeline(micro_batch),
            );
            let _hold = match hold {
                Ok(hold) => hold,
                Err(oom) => {
                    self.shrink_evaluation(oom)?;
                    continue 'smaller;
                }
            };
            let from = Cursor { update: 0, done };
            let source = setup.sets.valid.clone();
            let mut loader =
                Loader::start(source, order, from, 1, micro_batch, setup.prefetch, setup.workers)?;
            while done < samples {
                let batch = loader.next()?.ok_or_else(ended_early)?;
                match self.engine.judge(&batch) {
                    Ok(part) => {
                        tally += part;
                        done += batch.ids.len() as u64;
                    }
                    Err(StepError::Oom(oom)) => {
                        self.shrink_evaluation(oom)?;
                        continue 'smaller;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            break;
        }
        self.engine.swap_average()?;
        self.metrics = metrics(&tally, &setup.job.eval.metrics);
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
        Ok(better)
    }

    fn shrink_evaluation(&mut self, oom: Oom) -> Result<(), Failure> {
        self.report.record(oom_event(self.step, "eval", &oom))?;
        if self.eval_micro_batch == 1 || self.attempts >= self.setup.job.memory.max_retries {
            return Err(Failure::OutOfMemory { attempts: self.attempts, first: Box::new(oom) });
        }
        self.attempts += 1;
        self.eval_micro_batch = self.eval_micro_batch.div_ceil(2);
        Ok(self.report.record(Event::Shrunk {
            step: self.step,
            change: format!("evaluation micro-batch {}", self.eval_micro_batch),
            micro_batch: self.split.micro_batch,
            accumulation_steps: self.split.accumulation_steps,
        })?)
    }
}

fn metrics(tally: &Tally, wanted: &[Metric]) -> BTreeMap<String, f64> {
    let share = |n: u64| n as f64 / tally.count as f64;
    let of = |metric: &Metric| match metric {
        Metric::Accuracy => share(tally.top1),
        Metric::Top5 => share(tally.top5),
    };
    let named = wanted.iter().map(|metric| (format!("valid.{}", metric.name()), of(metric)));
    named.chain([("valid.loss".to_owned(), tally.mean_loss())]).collect()
}
