//! How a run begins: planned, in its folder, from its first weights or from a checkpoint.

use std::path::{Path, PathBuf};

use super::{Options, Run};
use crate::job::Job;
use crate::kernels::update::round_into;
use crate::memory::measure;
use crate::memory::plan::{Plan, Verdict};
use crate::train::Failure;
use crate::train::checkpoint::{self, State};
use crate::train::event::Event;
use crate::train::folder::Folder;
use crate::train::setup::Setup;

/// The job made ready, its plan, and the bytes it may use: what the host has, and where another process was
/// lost, less than that one needed, as far as there is a leaner plan. `before` is the plan of the run that is
/// gone on with.
pub(super) fn planned(
    job: Job,
    options: &Options,
    before: Option<&Path>,
) -> Result<(Setup, Plan, u64), Failure> {
    let most = options.restart.as_ref().and_then(|restart| restart.most_ram);
    let ram = most.map_or(options.ram, |most| most.min(options.ram));
    let mut setup = Setup::open(job, ram, &options.opening)?.on_card(options.card.clone());
    // The plan is of the steps; what a pass over the files took is given back by now.
    measure::begin();
    let plan = setup.settle(ram, before);
    let least = plan.peak.ram_bytes;
    match plan.verdict {
        Verdict::DoesNotFit if ram < least && least <= options.ram => {
            let plan = setup.settle(least, before);
            Ok((setup, plan, least))
        }
        Verdict::DoesNotFit => Err(Failure::DoesNotFit(Box::new(plan))),
        Verdict::Fits | Verdict::FitsAfterShrink => Ok((setup, plan, ram)),
    }
}

pub(super) fn refuse_another_experiment(folder: &Folder, job: &Job) -> Result<(), Failure> {
    let Ok(before) = Job::load(&folder.job(), &[]) else { return Ok(()) };
    match before.structural_changes(job) {
        changes if changes.is_empty() => Ok(()),
        changes => Err(Failure::Changed(changes)),
    }
}

pub(super) fn started(setup: &Setup, folder: &Folder) -> Event {
    Event::Started {
        name: setup.job.name.clone(),
        run: folder.root.display().to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        seed: setup.job.seed,
        device: setup.machine(0, 0).device,
        threads: setup.threads,
        parameters: setup.parameters(),
        train_samples: setup.sets.train.len(),
        valid_samples: setup.sets.valid.len(),
        total_steps: setup.total_steps,
        steps_per_epoch: setup.order.updates_per_epoch(),
    }
}

impl Run<'_> {
    /// Takes the weights the job begins with, where it names some and none are there yet.
    pub(super) fn begin(&self, anew: bool) -> Result<(), Failure> {
        let store = &self.engine.store;
        match &self.setup.job.train.init {
            Some(file) if anew => {
                checkpoint::load_weights(file, store)?;
                match &self.engine.average {
                    Some(average) => Ok(round_into(&store.master, average)?),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Goes on from a checkpoint, or from the beginning where there is none yet.
    pub(super) fn resume(
        &mut self,
        found: Option<(State, PathBuf)>,
        skipped: Vec<String>,
    ) -> Result<(), Failure> {
        let checkpoint = found.as_ref().map(|(_, path)| path.display().to_string());
        if let Some((state, path)) = found {
            checkpoint::load(&path, &self.engine.held())?;
            self.scaling = state.scaling;
            (self.step, self.cursor, self.samples) = (state.step, state.cursor, state.samples);
            (self.told_bad, self.left_out) = (state.left_out.count(), state.left_out);
            (self.digest, self.best, self.metrics) = (state.digest, state.best, state.metrics);
            (self.clock.before_s, self.clock.data_wait_s) = (state.elapsed_s, state.data_wait_s);
            self.last_checkpoint = Some((state.step, path));
        }
        self.report.record(Event::Resumed { step: self.step, checkpoint, skipped })?;
        Ok(())
    }
}
