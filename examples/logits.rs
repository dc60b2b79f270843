//! Writes the logits of a run's newest checkpoint for the first micro-batch of its validation set:
//! `cargo run --release --example logits -- RUN OUT.safetensors`.
//!
//! OUT holds `logits`, (samples, classes) or (samples, positions, vocabulary), in f32. They come from the weights in
//! `model.safetensors`, not from their moving average. `scripts/interop.py` compares them with PyTorch's.

use anyhow::{Context, bail};
use trainer::data::loader::Loader;
use trainer::data::order::{Cursor, Order};
use trainer::job::Job;
use trainer::memory::probe;
use trainer::planner::budget;
use trainer::train::checkpoint::Checkpoints;
use trainer::train::engine::{Engine, Ledgers};
use trainer::train::run_dir::RunDir;
use trainer::train::setup::Setup;
use trainer::train::tensor_files::load_views;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [run, out] = arguments.as_slice() else { bail!("usage: logits RUN OUT.safetensors") };
    let run_dir = RunDir::new(run);
    let job = Job::load(&run_dir.job(), &[])?;
    let ram = budget::host(&job.memory, &probe::host()?);
    let setup = Setup::new(job, ram)?;
    let plan = setup.plan(ram).chosen;
    let engine = Engine::new(&setup, Ledgers::new(&setup, ram, None), plan, false)?;
    let (_, checkpoint) =
        Checkpoints::new(run_dir.checkpoints()).newest().found.context("the run has no checkpoint")?;
    let (weights, store) = (checkpoint.join("model.safetensors"), &engine.store);
    load_views(&weights, &store.layout.params, store.weight_views())?;
    load_views(&weights, &store.layout.stats, store.stat_views())?;

    let (valid, first) = (setup.datasets.valid.clone(), Cursor::default());
    let samples = valid.len().min(setup.job.train.batch_size as u64);
    let order = Order::new(samples, samples, setup.job.seed, false)?;
    let mut loader =
        Loader::start(valid, order, first, 1, setup.loader_options(samples as usize, setup.prefetch))?;
    let batch = loader.next()?.context("the validation set is empty")?;
    Ok(engine.logits(&batch)?.save_safetensors("logits", out)?)
}
