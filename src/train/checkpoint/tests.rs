use std::collections::BTreeMap;

use super::*;
use crate::data::bad_records::SkippedRecords;
use crate::data::digest::Digest;
use crate::data::order::Cursor;
use crate::job::{InitHead, OptimizerKind};
use crate::optim::grad_scaler::GradScaler;
use crate::params::{ParamInit, ParamRegistry};
use crate::planner::ExecutionPlan;
use crate::train::initial_weights::InitialWeights;
use crate::train::retry::Backoff;
use candle_core::{DType, Device};

fn build(seed: u64) -> (ParamStore, Optimizer) {
    let mut declared = ParamRegistry::default();
    declared.conv_weight("conv.weight", [3, 2, 2, 2], ParamInit::Normal(1.0));
    declared.param("bias", [3], ParamInit::Normal(1.0));
    declared.running_stat("mean", 3, 0.5);
    let store = ParamStore::new(declared.into_layout().unwrap(), seed, DType::F32, &Device::Cpu).unwrap();
    let optimizer = Optimizer::new(&toml::from_str("kind = 'adamw8bit'").unwrap(), &store, false).unwrap();
    (store, optimizer)
}

fn state(step: u64) -> CheckpointState {
    CheckpointState {
        format: FORMAT,
        step,
        cursor: Cursor { update: step, done: 0 },
        samples: step * 4,
        digest: Digest::default(),
        seed: 1,
        job: serde_json::Value::Null,
        data: None,
        optimizer: OptimizerKind::Adamw8bit,
        plan: ExecutionPlan {
            micro_batch: 4,
            accumulation_steps: 1,
            recompute: 0,
            offload: &[],
            optimizer: OptimizerKind::Adamw8bit,
            eval_micro_batch: 4,
            prefetch: 1,
        },
        backoff: Backoff::default(),
        best: None,
        stop: Default::default(),
        train_sums: Default::default(),
        evaluation_due: true,
        evaluation_deferred: false,
        grad_scaler: GradScaler::disabled(),
        skipped_records: SkippedRecords::default(),
        metrics: BTreeMap::new(),
        elapsed_s: 0.0,
        data_wait_s: 0.0,
        written: 0.0,
        files: BTreeMap::new(),
    }
}

fn tensors<'a>(store: &'a ParamStore, optimizer: &'a Optimizer) -> CheckpointTensors<'a> {
    CheckpointTensors { store, optimizer, average: None, mask: None }
}

fn values(store: &ParamStore) -> Vec<f32> {
    store.master_weights.to_vec1().unwrap()
}

#[test]
fn what_is_saved_is_what_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    let (path, _) = checkpoints.save(state(7), &tensors(&store, &optimizer), &[]).unwrap();
    let NewestCheckpoint { found: Some((found, at)), skipped } = checkpoints.newest() else {
        panic!("not found")
    };
    assert_eq!((found.step, at, skipped), (7, path.clone(), vec![]));
    let (other, other_optimizer) = build(2);
    assert_ne!(values(&store), values(&other));
    load(&path, &tensors(&other, &other_optimizer)).unwrap();
    assert_eq!(values(&store), values(&other));
}

#[test]
fn filters_are_named_channels_first() {
    let folder = tempfile::tempdir().unwrap();
    let (store, optimizer) = build(1);
    let (path, _) =
        Checkpoints::new(folder.path()).save(state(1), &tensors(&store, &optimizer), &[]).unwrap();
    let tensors = candle_core::safetensors::load(path.join(MODEL), &Device::Cpu).unwrap();
    let expected = store.weight_views()[0]
        .permute((0, 3, 1, 2))
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    let named = tensors["conv.weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(tensors["conv.weight"].dims(), [3, 2, 2, 2]);
    assert_eq!(named, expected);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    for step in [1, 2, 3, 4] {
        checkpoints.save(state(step), &tensors(&store, &optimizer), &[]).unwrap();
    }
    let damage = |step: u64, file: &str, at: usize| {
        let path = checkpoints.path(step).join(file);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    fs::remove_file(checkpoints.path(4).join(DONE)).unwrap();
    damage(3, STATE, 3);
    damage(2, MODEL, 200);
    let NewestCheckpoint { found: Some((found, _)), skipped } = checkpoints.newest() else {
        panic!("not found")
    };
    assert_eq!(found.step, 1);
    assert_eq!(skipped.len(), 3);
    assert!(skipped[0].contains("it has no DONE marker"), "{skipped:?}");
    assert!(skipped[1].contains("state.json does not match"), "{skipped:?}");
    assert!(skipped[2].contains("model.safetensors does not match"), "{skipped:?}");
}

/// A file as another tool would save it: other order, extra tensors, possibly no running statistics.
#[test]
fn weights_of_another_tool_are_taken_by_name() {
    let (folder, one) = (tempfile::tempdir().unwrap(), |n: f32| Tensor::full(n, 3, &Device::Cpu).unwrap());
    let filter = Tensor::ones((3, 2, 2, 2), DType::F32, &Device::Cpu).unwrap();
    let load = |names: &[(&str, Tensor)]| {
        let file = folder.path().join("theirs.safetensors");
        let tensors = names.iter().cloned().collect::<std::collections::HashMap<_, _>>();
        candle_core::safetensors::save(&tensors, &file).unwrap();
        let store = build(1).0;
        let weights = InitialWeights::open(&file, &store.layout, "bias", InitHead::Strict);
        weights.map_err(|error| error.to_string()).map(|weights| {
            weights.load(&store).unwrap();
            store
        })
    };
    let bare = [("conv.weight", filter.clone()), ("bias", one(2.0))];
    let batches = ("num_batches_tracked", Tensor::new(7i64, &Device::Cpu).unwrap());
    let whole = [&bare[..], &[("mean", one(3.0)), batches]].concat();
    let store = load(&whole).unwrap();
    assert_eq!(values(&store).iter().sum::<f32>(), 24.0 + 6.0);
    assert_eq!(store.stats.to_vec1::<f32>().unwrap(), [3.0; 3]);
    assert_eq!(load(&bare).unwrap().stats.to_vec1::<f32>().unwrap(), [0.5; 3]);
    let missing = load(&bare[..1]).err().unwrap();
    assert!(missing.ends_with("the file lacks the tensor `bias`"), "{missing}");
    let odd = load(&[&bare[..], &[("mean", filter)]].concat()).err().unwrap();
    assert!(odd.contains("`mean` has shape [3, 2, 2, 2] in the file, and [3] in the model"), "{odd}");
}

#[test]
fn the_newest_and_the_best_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    (1..=5).for_each(|step| drop(checkpoints.save(state(step), &tensors(&store, &optimizer), &[]).unwrap()));
    checkpoints.prune(2, Some(2)).unwrap();
    assert_eq!(checkpoints.steps(), [5, 4, 2]);
}

#[test]
fn an_evaluation_is_added_and_one_that_is_damaged_is_due_again() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    let (path, _) = checkpoints.save(state(3), &tensors(&store, &optimizer), &[]).unwrap();
    let metrics = BTreeMap::from([("valid.loss".into(), f64::NAN), ("valid.accuracy".into(), 0.5)]);
    checkpoints.save_evaluation(&CheckpointState { evaluation_due: false, metrics, ..state(3) }).unwrap();
    let newest = || checkpoints.newest().found.unwrap().0;
    assert!(!newest().evaluation_due && newest().metrics["valid.loss"].is_nan());
    assert_eq!(newest().files.len(), 2);
    let text = fs::read_to_string(path.join(EVALUATED)).unwrap();
    fs::write(path.join(EVALUATED), text.replace("0.5", "0.6")).unwrap();
    assert!(newest().evaluation_due && newest().metrics.is_empty());
}

#[test]
fn what_is_not_finite_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    crate::kernels::cpu::with_slice_mut::<f32, _>(&store.master_weights, |all| all[24] = f32::INFINITY)
        .unwrap();
    match checkpoints.save(state(4), &tensors(&store, &optimizer), &[]) {
        Err(Failure::NotFinite { step: 4, tensor, .. }) => assert_eq!(tensor, "bias"),
        other => panic!("{other:?}"),
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let (store, _) = build(1);
    let average = store.master_weights.copy().unwrap();
    crate::kernels::cpu::with_slice_mut::<f32, _>(&average, |all| all[0] = f32::NAN).unwrap();
    let averaged = CheckpointTensors { average: Some(&average), ..tensors(&store, &optimizer) };
    assert!(matches!(checkpoints.save(state(4), &averaged, &[]), Err(Failure::NotFinite { .. })));
}

#[test]
fn weights_whose_next_update_was_not_finite_are_the_last_resort() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    (1..=4).for_each(|step| drop(checkpoints.save(state(step), &tensors(&store, &optimizer), &[]).unwrap()));
    checkpoints.mark_diverged(3).unwrap();
    let newest = checkpoints.newest();
    assert_eq!((newest.found.unwrap().0.step, newest.skipped.len()), (2, 2));
    assert_eq!(checkpoints.last_good(), Some(checkpoints.path(2)));
    // Diverged checkpoints evict no good one, and stay until the run has passed their step again.
    checkpoints.prune(1, None).unwrap();
    assert_eq!(checkpoints.steps(), [4, 3, 2]);
    checkpoints.save(state(5), &tensors(&store, &optimizer), &[]).unwrap();
    checkpoints.prune(1, None).unwrap();
    assert_eq!(checkpoints.steps(), [5]);
    checkpoints.mark_diverged(0).unwrap();
    assert_eq!(checkpoints.newest().found.unwrap().0.step, 5);
}

#[test]
fn what_a_killed_process_left_is_cleaned_up() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path());
    let (store, optimizer) = build(1);
    (1..=2).for_each(|step| drop(checkpoints.save(state(step), &tensors(&store, &optimizer), &[]).unwrap()));
    let copy = |step: u64, name: &str| {
        fs::create_dir(folder.path().join(name)).unwrap();
        for file in [MODEL, OPTIMIZER, STATE, DONE] {
            fs::copy(checkpoints.path(step).join(file), folder.path().join(name).join(file)).unwrap();
        }
    };
    copy(2, ".step-00000003.tmp");
    copy(2, ".step-00000001.gone");
    copy(2, ".step-00000002.old");
    fs::rename(checkpoints.path(1), folder.path().join(".step-00000001.old")).unwrap();
    fs::write(checkpoints.path(2).join("evaluated.tmp"), "half").unwrap();
    checkpoints.clean().unwrap();
    let mut left: Vec<String> = entry_names(folder.path()).unwrap();
    left.sort();
    assert_eq!(left, ["step-00000001", "step-00000002"]);
    assert!(!checkpoints.path(2).join("evaluated.tmp").exists());
    assert_eq!(checkpoints.newest().skipped, [""; 0]);
}

#[test]
fn a_folder_that_vanished_is_an_error_and_not_a_new_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (store, optimizer) = build(1);
    let missing = folder.path().join("gone");
    let failure = Checkpoints::new(&missing).save(state(1), &tensors(&store, &optimizer), &[]).unwrap_err();
    assert!(failure.to_string().contains("cannot create the checkpoint"), "{failure}");
    assert!(!missing.exists());
}

/// Checkpoints of older versions have other names for some fields of `state.json`.
#[test]
fn old_names_of_state_fields_are_accepted() {
    // Not the default, which a field without a value would get.
    let new = serde_json::to_string(&state(3)).unwrap().replace("\"most\":0", "\"most\":7");
    let expected = serde_json::from_str::<CheckpointState>(&new).unwrap();
    let old = [
        ("plan", "way"),
        ("backoff", "descent"),
        ("evaluation_deferred", "evaluation_owed"),
        ("grad_scaler", "scaling"),
        ("skipped_records", "left_out"),
        ("reported", "told"),
    ]
    .iter()
    .fold(new, |text, (new, old)| {
        let new = format!("\"{new}\":");
        assert!(text.contains(&new), "{new} in {text}");
        text.replace(&new, &format!("\"{old}\":"))
    });
    assert_eq!(serde_json::from_str::<CheckpointState>(&old).unwrap(), expected);
}
