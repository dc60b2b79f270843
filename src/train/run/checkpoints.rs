//! The checkpoints of a run: when one is known to be good, and what is left when the run diverges.

use std::path::PathBuf;
use std::time::Instant;

use super::context::RunContext;
use crate::base::{Phase, Role};
use crate::data::language::tokenizer::settings_files;
use crate::events::activity::Work;
use crate::events::event::Event;
use crate::graph::network::StepError;
use crate::kernels::grad_stats::GradStats;
use crate::memory::resident_limit;
use crate::planner::estimate::checkpoint_write_bytes;
use crate::train::Failure;
use crate::train::checkpoint::{CheckpointState, Checkpoints};
use crate::train::run_dir::RunDir;
use crate::train::setup::Setup;

pub(super) struct RunCheckpoints {
    store: Checkpoints,
    /// Files of the run that every checkpoint has a copy of.
    attached: Vec<PathBuf>,
    /// The last checkpoint: its step and its folder.
    pub last: Option<(u64, PathBuf)>,
    /// Step of a checkpoint whose next update is not yet known to be finite. Older checkpoints stay until it is.
    unproven: Option<u64>,
    /// The last update with finite loss and gradient; the weights before it are good.
    last_finite: u64,
}

impl RunCheckpoints {
    pub fn new(folder: &RunDir, setup: &Setup) -> Self {
        let tokenizer = (setup.tokenizer_bytes > 0).then(|| folder.tokenizer());
        let settings: Vec<PathBuf> = tokenizer.iter().flat_map(|file| settings_files(file)).collect();
        Self {
            store: Checkpoints::new(folder.checkpoints()),
            attached: tokenizer.into_iter().chain(settings).chain([folder.preprocessing()]).collect(),
            last: None,
            unproven: None,
            last_finite: 0,
        }
    }

    /// The run resumes from this checkpoint; `best` is the step of the best so far.
    pub fn resume(&mut self, step: u64, path: PathBuf, best: Option<u64>) {
        // A process that was killed in between left them as they were.
        self.store.link("last", step);
        best.into_iter().for_each(|best| self.store.link("best", best));
        (self.last, self.unproven, self.last_finite) = (Some((step, path)), Some(step), step);
    }

    /// Folder of the checkpoint of a step.
    pub fn path(&self, step: u64) -> String {
        self.store.path(step).display().to_string()
    }

    /// Folder of the last checkpoint.
    pub fn last_path(&self) -> Option<String> {
        self.last.as_ref().map(|(_, path)| path.display().to_string())
    }

    /// Writes a checkpoint. Older ones are removed once it is known to be good.
    pub fn write(&mut self, ctx: &mut RunContext, state: CheckpointState) -> Result<(), Failure> {
        let (begun, step) = (Instant::now(), state.step);
        let (setup, ledger) = (ctx.setup, ctx.engine.host_ledger.clone());
        ctx.begin(Work::Checkpoint, 0);
        ledger.set_phase(Phase::Checkpoint);
        resident_limit::trim();
        let bytes = checkpoint_write_bytes(&setup.layout, setup.dtype);
        let reserve = || ledger.reserve(Role::CheckpointWriting, "checkpoint", bytes);
        let _hold = match reserve() {
            Ok(hold) => hold,
            // Between updates, only the read-ahead can be freed.
            Err(first) => {
                ctx.record_oom(&first)?;
                ctx.train_loader = None;
                reserve().map_err(StepError::Oom)?
            }
        };
        let saved = self.store.save(state, &ctx.engine.checkpoint_tensors(), &self.attached);
        let (path, bytes) = match saved {
            Err(Failure::NotFinite { step, tensor, .. }) => {
                let epoch = ctx.position.epoch(&setup.order);
                let what = format!("`{tensor}` is not finite");
                let checkpoint = self.report_diverged(ctx, step, epoch, what, Vec::new())?;
                return Err(Failure::NotFinite { step, tensor, checkpoint });
            }
            saved => saved?,
        };
        let write_s = begun.elapsed().as_secs_f64();
        ctx.record(Event::Checkpoint { step, path: path.display().to_string(), bytes, write_s })?;
        (self.last, self.unproven) = (Some((step, path)), Some(step));
        self.store.link("last", step);
        Ok(())
    }

    /// Adds the result of an evaluation to the checkpoint of its step.
    pub fn save_evaluation(&self, state: &CheckpointState) -> Result<(), Failure> {
        self.store.save_evaluation(state)?;
        if state.best.is_some_and(|(_, step)| step == state.step) {
            self.store.link("best", state.step);
        }
        Ok(())
    }

    /// An update was finite, so the weights before it are good. Returns whether older checkpoints can be removed now.
    pub fn record_finite(&mut self, step: u64) -> bool {
        self.last_finite = step;
        self.unproven.is_some_and(|unproven| unproven < step)
    }

    /// Removes checkpoints beyond those to keep and the one of step `best`.
    pub fn prune(&mut self, keep: usize, best: Option<u64>) -> Result<(), Failure> {
        self.unproven = None;
        self.store.prune(keep, best)
    }

    /// Reports an update whose loss or gradient is not finite, and returns the failure.
    pub fn divergence_failure(
        &self,
        ctx: &mut RunContext,
        stats: &GradStats,
        step: u64,
        epoch: u64,
        sample_ids: Vec<u64>,
    ) -> Failure {
        let loss = stats.metrics.mean_loss();
        let (what, value) = if loss.is_finite() { ("gradient norm", stats.norm) } else { ("loss", loss) };
        match self.report_diverged(ctx, step, epoch, value.to_string(), sample_ids) {
            Ok(checkpoint) => Failure::Diverged { step, what, value, checkpoint },
            Err(error) => error,
        }
    }

    /// Reports non-finite values and returns the checkpoint to resume from. Weights without a later finite update are
    /// suspect, so this is an earlier checkpoint if there is one.
    fn report_diverged(
        &self,
        ctx: &mut RunContext,
        step: u64,
        epoch: u64,
        loss: String,
        sample_ids: Vec<u64>,
    ) -> Result<Option<String>, Failure> {
        self.store.mark_diverged(self.last_finite)?;
        let checkpoint = self.store.last_good().map(|path| path.display().to_string());
        let reported = checkpoint.clone();
        ctx.record(Event::Diverged { step, epoch, loss, sample_ids, checkpoint: reported })?;
        Ok(checkpoint)
    }
}
