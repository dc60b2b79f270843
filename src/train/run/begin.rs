//! How a run begins: planned, in its folder, from its first weights or from a checkpoint.

use super::{Options, Run};
use crate::data::Opening;
use crate::data::fingerprint::{self, DataFingerprint};
use crate::features::{Input, Target};
use crate::job::Job;
use crate::kernels::update::round_into;
use crate::memory::measure;
use crate::memory::plan::{Plan, Verdict};
use crate::report::Summary;
use crate::train::Failure;
use crate::train::checkpoint::{self, Checkpoints, Newest, State};
use crate::train::event::Event;
use crate::train::folder::Folder;
use crate::train::sets::Sets;
use crate::train::setup::Setup;

/// The job made ready, its plan, and the bytes it may use: what the host has, and where another process was
/// lost, less than that one needed, as far as there is a leaner plan. `before` is the plan of the run that is
/// gone on with.
pub(super) fn planned(job: Job, options: &Options, before: Option<&State>) -> Result<Planned, Failure> {
    let most = options.restart.as_ref().and_then(|restart| restart.most_ram);
    let ram = most.map_or(options.ram, |most| most.min(options.ram));
    let mut setup = Setup::open(job, ram, &options.opening)?.on_card(options.card.clone());
    let known = before.and_then(|state| state.data.as_ref());
    let data = fingerprint(&setup, known, &options.opening)?;
    let before = before.map(|state| state.optimizer.as_str());
    if options.own_process {
        setup = setup.measured();
    }
    // The heap of the steps is compared with the plan; what preparing the data took is a phase of its own.
    measure::begin();
    let plan = setup.settle(ram, before);
    let least = plan.peak.ram_bytes;
    match plan.verdict {
        Verdict::DoesNotFit if ram < least && least <= options.ram => {
            let plan = setup.settle(least, before);
            Ok(Planned { setup, plan, ram: least, data })
        }
        Verdict::DoesNotFit => Err(Failure::DoesNotFit(Box::new(plan))),
        Verdict::Fits | Verdict::FitsAfterShrink => Ok(Planned { setup, plan, ram, data }),
    }
}

/// A job made ready, and what is known before its first step.
pub(super) struct Planned {
    pub setup: Setup,
    pub plan: Plan,
    /// Host bytes it may use.
    pub ram: u64,
    pub data: DataFingerprint,
}

/// What the data is; `known`: what the checkpoint says that is resumed from.
fn fingerprint(
    setup: &Setup,
    known: Option<&DataFingerprint>,
    opening: &Opening,
) -> Result<DataFingerprint, Failure> {
    let sources = fingerprint::of(Sets::inputs(&setup.job)?, known, &opening.cache, opening.watch.as_ref())?;
    let features = setup.features();
    let classes = match &features.target {
        Target::Class { names } => names.clone(),
        _ => Vec::new(),
    };
    let vocabulary = match features.input {
        Input::Tokens { vocab, .. } => Some(vocab),
        _ => None,
    };
    let tokenizer = setup.sets.train.tokenizer().map(|text| fingerprint::hash_bytes(&text));
    Ok(DataFingerprint { sources, classes, vocabulary, tokenizer })
}

/// Refuses to resume another experiment than the one of the checkpoint or, before there is one, of the folder's
/// `job.toml`; and the same one on other data, unless that is allowed.
pub(super) fn refuse_another_experiment(
    folder: &Folder,
    found: Option<&State>,
    job: &Job,
    options: &Options,
) -> Result<(), Failure> {
    let mut changes = match found {
        Some(state) => job.structural_changes_since(&state.job),
        None => match Job::load(&folder.job(), &[]) {
            Ok(before) => before.structural_changes(job),
            Err(_) => return Err(Failure::UnknownExperiment(folder.root.clone())),
        },
    };
    if let Some((was, now)) = found.and_then(|state| state.data.as_ref()).zip(options.data.as_ref()) {
        // Wherever the files lie: what is in them decides.
        changes.retain(|change| !change.is_of_files());
        let differs = was.changes(now);
        if changes.is_empty() && !differs.is_empty() && !options.allow_changed_data {
            return Err(Failure::DataChanged(differs));
        }
    }
    match changes.is_empty() {
        true => Ok(()),
        false => Err(Failure::Changed(changes)),
    }
}

/// Refuses to begin where the disk has no room for the checkpoints that the run will keep.
pub(super) fn refuse_a_full_disk(
    folder: &Folder,
    plan: &Plan,
    checkpoints: &Checkpoints,
) -> Result<(), Failure> {
    let needed = plan.disk.checkpoints_bytes.saturating_sub(checkpoints.bytes());
    match folder.free_bytes() {
        Some(free) if free < needed => {
            Err(Failure::DiskTooSmall { folder: folder.root.clone(), free, needed })
        }
        _ => Ok(()),
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
    pub(super) fn resume(&mut self, Newest { found, skipped }: Newest) -> Result<(), Failure> {
        let checkpoint = found.as_ref().map(|(_, path)| path.display().to_string());
        if let Some((state, path)) = found {
            checkpoint::load(&path, &self.engine.held())?;
            self.scaling = state.scaling;
            (self.step, self.cursor, self.samples) = (state.step, state.cursor, state.samples);
            (self.told_bad, self.left_out) = (state.left_out.count(), state.left_out);
            (self.digest, self.best, self.metrics) = (state.digest, state.best, state.metrics);
            (self.evaluation_due, self.owed.evaluation) = (state.evaluation_due, state.evaluation_owed);
            (self.last_finite, self.unproven) = (state.step, Some(state.step));
            (self.clock.before_s, self.clock.data_wait_s) = (state.elapsed_s, state.data_wait_s);
            self.last_checkpoint = Some((state.step, path));
        }
        self.report.record(Event::Resumed { step: self.step, checkpoint, skipped })?;
        Ok(())
    }
}

/// Lines of the run's events that are no events.
pub(super) fn damaged_events(folder: &Folder) -> Vec<String> {
    let path = folder.events();
    let lines = Summary::from_events(&path).map(|summary| summary.damaged_lines).unwrap_or_default();
    lines.iter().map(|line| format!("{}: line {line} is not an event", path.display())).collect()
}
