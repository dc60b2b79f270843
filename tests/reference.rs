//! The reference backend: `--backend reference` trains any job in candle's own operations, within a plan of its own.

use std::path::Path;

use crate::docs::{DATASETS, configs_with_data};
use crate::harness::{dataset, events, finish, in_parallel, job_folder, last, losses, measured_command};

/// A job of every kind of model and target that candle computes in little time.
const JOBS: [&str; 6] = [
    "model = { kind = 'mlp', hidden = [24, 16], dropout = 0.1 }\ndata = { kind = 'shapes', image_size = 16, train_samples = 200 }",
    "model = { kind = 'cnn', stages = [{ channels = 8, norm = 'batch' }], norm_group = 4, hidden = [16] }\n\
     data = { kind = 'shapes', image_size = 17, train_samples = 200 }",
    // AdamW's first updates have the signs of the gradients, which rounding decides where these are almost 0.
    "model = { kind = 'mobilenet', width = 0.25, stem = 'small', norm_group = 4 }\n\
     optimizer = { kind = 'sgd', lr = 0.01 }\n\
     data = { kind = 'shapes', image_size = 16, train_samples = 200 }",
    "model = { kind = 'vit', patch = 4, layers = 2, heads = 2, width = 24, dropout = 0.1 }\n\
     data = { kind = 'shapes', image_size = 16, train_samples = 200 }",
    "model = { kind = 'llama', layers = 2, heads = 4, kv_heads = 2, width = 24, context = 12 }\n\
     data = { kind = 'text-synthetic', vocab = 32 }",
    "model = { kind = 'bert', layers = 2, heads = 2, width = 24, context = 12 }\n\
     data = { kind = 'text-synthetic', classes = 3 }",
];

/// Losses of the first updates of the job in `folder`, whose memory must stay within the plan.
fn train(folder: &Path, job: &str, updates: u32, backend: &str) -> Vec<f64> {
    let (steps, run) = (updates.to_string(), folder.join(backend));
    let args =
        ["fit", job, "--quiet", "--max-steps", &steps, "--backend", backend, "--device", "cpu", "--run-dir"];
    let mut command = measured_command(folder, &args);
    let data = DATASETS.map(|(name, path)| (name, dataset(path)));
    finish(command.arg(&run).envs(data)).expect(0);
    let events = events(&run);
    let finished = last(&events, "finished");
    let bytes = |key: &str| finished[key]["ram"].as_u64().unwrap();
    let (planned, measured) = (bytes("planned_peak_bytes"), bytes("measured_peak_bytes"));
    let resident = finished["resident_peak_bytes"].as_u64().unwrap();
    assert!(measured.max(resident) <= planned, "{job}: {measured} and {resident} bytes, {planned} planned");
    println!("{job} {backend}: {planned} planned, {measured} measured, {resident} resident");
    losses(&events)
}

fn assert_close(job: &str, ours: &[f64], candles: &[f64], tolerance: f64) {
    assert_eq!(ours.len(), candles.len(), "{job}");
    let apart = ours.iter().zip(candles).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max);
    assert!(apart <= tolerance, "{job}: losses {apart:.1e} apart:\n{ours:?}\n{candles:?}");
}

#[test]
fn every_kind_of_model_trains_alike_in_candles_operations() {
    in_parallel(2, &JOBS, |job| {
        let folder =
            job_folder(format!("{job}\ntrain = {{ batch_size = 16, accumulation_steps = 2, steps = 8 }}"));
        let [ours, candles] =
            ["auto", "reference"].map(|backend| train(folder.path(), "job.toml", 8, backend));
        // Rounding grows with every update.
        assert_close(job, &ours[..1], &candles[..1], 1e-4);
        assert_close(job, &ours, &candles, 0.1);
    });
}

/// `just reference` runs it.
#[test]
#[ignore = "takes minutes"]
fn twenty_updates_of_every_config() {
    for config in configs_with_data() {
        let folder = job_folder("");
        let config = config.to_str().unwrap();
        let [ours, candles] = ["auto", "reference"].map(|backend| train(folder.path(), config, 20, backend));
        assert_close(config, &ours[..1], &candles[..1], 1e-4);
        assert_close(config, &ours, &candles, 0.1);
    }
}
