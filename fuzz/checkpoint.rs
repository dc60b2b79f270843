//! Fuzzes checkpoint files: any bytes must be read or refused, as in `main.rs` for data.
//!
//! `TARGET=state`: a state with a matching marker. `TARGET=safetensors`: weights of this project or of another tool.

#![no_main]

use std::fs;
use std::sync::LazyLock;

use candle_core::{DType, Device};
use libfuzzer_sys::fuzz_target;
use trainer::param_store::ParamStore;
use trainer::params::{ParamInit, ParamRegistry};
use trainer::train::checkpoint::Checkpoints;
use trainer::train::tensor_files::load_views;

static TARGET: LazyLock<String> = LazyLock::new(|| std::env::var("TARGET").unwrap_or_default());

static FOLDER: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder in memory"));

static STORE: LazyLock<ParamStore> = LazyLock::new(|| {
    let mut registry = ParamRegistry::default();
    registry.param("a.weight", [3, 4], ParamInit::Constant(0.0));
    registry.conv_weight("b.weight", [2, 3, 2, 2], ParamInit::Constant(0.0));
    registry.running_stat("b.mean", 2, 0.0);
    let layout = registry.into_layout().expect("names that differ");
    ParamStore::new(layout, 1, DType::BF16, &Device::Cpu).expect("memory for weights")
});

fuzz_target!(|data: &[u8]| {
    match &**TARGET {
        "state" => state(data),
        "safetensors" => weights(data),
        other => panic!("no target is called `{other}`"),
    }
});

fn state(data: &[u8]) {
    let step = FOLDER.path().join("step-00000001");
    fs::create_dir_all(&step).expect("memory for a folder");
    let put = |name: &str, bytes: &[u8]| fs::write(step.join(name), bytes).expect("memory for a file");
    let sum = crc32c::crc32c(data).to_string();
    put("state.json", data);
    put("evaluated.json", &[sum.as_bytes(), b"\n", data].concat());
    put("DONE", sum.as_bytes());
    let checkpoints = Checkpoints::new(FOLDER.path());
    let newest = checkpoints.newest();
    assert_eq!(newest.found.is_none(), newest.skipped.len() == 1);
    if let Some(state) = checkpoints.newest_state() {
        serde_json::to_vec(&state).expect("a state that was read can be written");
    }
}

fn weights(data: &[u8]) {
    let file = FOLDER.path().join("model.safetensors");
    fs::write(&file, data).expect("memory for a file");
    if let Err(refused) = load_views(&file, &STORE.layout.params, STORE.weight_views()) {
        assert!(refused.to_string().contains("model.safetensors"), "{refused}");
    }
}
