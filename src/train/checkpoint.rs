//! Checkpoints: whole on disk or not there at all.
//!
//! A checkpoint is a folder `step-N`: weights and statistics in `model.safetensors` under names and
//! shapes other tools read, their moving average in `ema.safetensors` where one is kept, the optimizer's
//! buffers in `optimizer.safetensors`, the rest in `state.json`.
//! It is written under another name, synced, renamed, and marked `DONE` last; the marker and the state hold
//! checksums, so that a torn or damaged one is known for what it is and the one before is used.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use safetensors::tensor::SafeTensors;
use serde::{Deserialize, Serialize};

use super::Failure;
use super::retry::{Descent, Way};
use super::tensors::{Buffer, load_buffers, load_named, load_named_if, named, put, put_buffers, sync};
use crate::data::bad::LeftOut;
use crate::data::digest::Digest;
use crate::data::order::Cursor;
use crate::optim::Optimizer;
use crate::optim::scaling::Scaling;
use crate::params::Store;

const MODEL: &str = "model.safetensors";
const AVERAGE: &str = "ema.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const DONE: &str = "DONE";

/// What a run needs to go on, beside tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Of this layout of a checkpoint.
    pub format: u32,
    /// Updates made.
    pub step: u64,
    pub cursor: Cursor,
    /// Samples seen, and the digest of their ids in order.
    pub samples: u64,
    pub digest: Digest,
    /// All randomness follows from this and the cursor.
    pub seed: u64,
    /// The way of running in force, and the larger ones given up.
    pub way: Way,
    pub descent: Descent,
    /// The best value of the job's `checkpoint.best` so far and the step it was reached at.
    pub best: Option<(f64, u64)>,
    pub scaling: Scaling,
    /// Records that could not be used.
    #[serde(default)]
    pub left_out: LeftOut,
    /// Last values of the evaluation.
    pub metrics: BTreeMap<String, f64>,
    pub elapsed_s: f64,
    pub data_wait_s: f64,
    /// Checksum and length of each file.
    pub files: BTreeMap<String, (u32, u64)>,
}

pub const FORMAT: u32 = 2;

/// The checkpoints of a run.
pub struct Checkpoints {
    root: PathBuf,
}

/// The tensors of a run.
pub struct Held<'a> {
    pub store: &'a Store,
    pub optimizer: &'a Optimizer,
    /// The moving average of the weights.
    pub average: Option<&'a Tensor>,
}

impl Checkpoints {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// Steps of all that carry the marker, newest first.
    pub fn steps(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.root) else { return Vec::new() };
        let names = entries.filter_map(Result::ok).filter(|e| e.path().join(DONE).exists());
        let mut steps: Vec<u64> =
            names.filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        steps
    }

    /// Writes a checkpoint and gives its folder and its bytes. What was there before stays whole, and a
    /// failure leaves nothing behind.
    pub fn save(&self, mut state: State, held: &Held) -> Result<(PathBuf, u64), Failure> {
        let (path, temporary) =
            (self.path(state.step), self.root.join(format!(".step-{:08}.tmp", state.step)));
        let _ = fs::remove_dir_all(&temporary);
        fs::create_dir(&temporary).map_err(Failure::io("create the checkpoint", &temporary))?;
        let written = self.write(&temporary, &mut state, held).and_then(|bytes| {
            if path.exists() {
                // The same step again, as after a resume: the marker goes first, so that no half is taken
                // for a whole.
                remove(&path)?;
            }
            fs::rename(&temporary, &path).map_err(Failure::io("rename the checkpoint to", &path))?;
            sync(&self.root)?;
            Ok(bytes)
        });
        match written {
            Ok(bytes) => {
                let state = fs::read(path.join(STATE)).map_err(Failure::io("read", path.join(STATE)))?;
                let marker = crc32c::crc32c(&state).to_string();
                fs::write(path.join(DONE), marker).map_err(Failure::io("write", path.join(DONE)))?;
                sync(&path.join(DONE))?;
                sync(&path)?;
                Ok((path, bytes))
            }
            Err(failure) => {
                let _ = fs::remove_dir_all(&temporary);
                Err(failure)
            }
        }
    }

    fn write(&self, folder: &Path, state: &mut State, held: &Held) -> Result<u64, Failure> {
        let store = held.store;
        let (master, stats) = (Buffer::of(&store.master)?, Buffer::of(&store.stats)?);
        let mut model = named(&store.layout.params, &master)?;
        model.extend(named(&store.layout.stats, &stats)?);
        let mut files = vec![MODEL, OPTIMIZER];
        put(&folder.join(MODEL), &model)?;
        if let Some(average) = held.average {
            files.push(AVERAGE);
            put(&folder.join(AVERAGE), &named(&store.layout.params, &Buffer::of(average)?)?)?;
        }
        put_buffers(&folder.join(OPTIMIZER), held.optimizer.state()?)?;
        for file in files {
            let sum = checksum(&folder.join(file)).map_err(Failure::io("read", folder.join(file)))?;
            state.files.insert(file.into(), sum);
        }
        let text = serde_json::to_vec_pretty(&state).map_err(std::io::Error::from);
        let path = folder.join(STATE);
        text.and_then(|text| fs::write(&path, text)).map_err(Failure::io("write", &path))?;
        sync(&path)?;
        sync(folder)?;
        Ok(state.files.values().map(|(_, bytes)| bytes).sum())
    }

    /// Removes all but the newest `keep` and the one of step `best`.
    pub fn prune(&self, keep: usize, best: Option<u64>) -> Result<(), Failure> {
        let old = self.steps().into_iter().skip(keep).filter(|step| Some(*step) != best);
        old.map(|step| self.path(step)).try_for_each(|path| remove(&path))
    }

    /// The newest whole checkpoint, its folder, and why newer ones were passed over.
    pub fn newest(&self) -> (Option<(State, PathBuf)>, Vec<String>) {
        let mut skipped = Vec::new();
        for path in self.steps().into_iter().map(|step| self.path(step)) {
            match verify(&path) {
                Ok(state) => return (Some((state, path)), skipped),
                Err(reason) => skipped.push(format!("{}: {reason}", path.display())),
            }
        }
        (None, skipped)
    }
}

fn remove(path: &Path) -> Result<(), Failure> {
    let marker = path.join(DONE);
    if marker.exists() {
        fs::remove_file(&marker).map_err(Failure::io("remove", &marker))?;
    }
    fs::remove_dir_all(path).map_err(Failure::io("remove", path))
}

/// CRC-32C and length of a file.
fn checksum(path: &Path) -> std::io::Result<(u32, u64)> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; 1 << 20]);
    let (mut sum, mut length) = (0, 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((sum, length)),
            n => (sum, length) = (crc32c::crc32c_append(sum, &buffer[..n]), length + n as u64),
        }
    }
}

/// The state of a checkpoint all of whose files are as they were written, or why not.
fn verify(path: &Path) -> Result<State, String> {
    let read = |name: &str| fs::read(path.join(name)).map_err(|e| format!("cannot read {name}: {e}"));
    let (marker, text) = (read(DONE)?, read(STATE)?);
    if String::from_utf8_lossy(&marker).trim() != crc32c::crc32c(&text).to_string() {
        return Err(format!("{STATE} does not match its checksum"));
    }
    let state: State = serde_json::from_slice(&text).map_err(|e| format!("{STATE} cannot be read: {e}"))?;
    if state.format != FORMAT {
        return Err(format!("it has format {} and this program reads {FORMAT}", state.format));
    }
    for (name, wanted) in &state.files {
        let found = checksum(&path.join(name)).map_err(|e| format!("cannot read {name}: {e}"))?;
        if found != *wanted {
            return Err(format!("{name} does not match its checksum"));
        }
    }
    Ok(state)
}

/// Reads a checkpoint's tensors into those of a run.
pub fn load(path: &Path, held: &Held) -> Result<(), Failure> {
    let store = held.store;
    load_named(&path.join(MODEL), &store.layout.params, &store.master)?;
    load_named(&path.join(MODEL), &store.layout.stats, &store.stats)?;
    if let Some(average) = held.average {
        // A run that begins to average when it is resumed begins with the weights it has.
        let file = if path.join(AVERAGE).exists() { AVERAGE } else { MODEL };
        load_named(&path.join(file), &store.layout.params, average)?;
    }
    load_buffers(&path.join(OPTIMIZER), held.optimizer.state()?)?;
    Ok(store.round()?)
}

/// Reads weights from a file of ours or of another tool, by name; what else it has is passed over. A file of
/// weights alone leaves the statistics as they are; one that has some has all.
pub fn load_weights(file: &Path, store: &Store) -> Result<(), Failure> {
    let (params, stats) = (&store.layout.params, &store.layout.stats);
    load_named(file, params, &store.master)?;
    let has_some = |found: &SafeTensors| stats.iter().any(|(spec, _)| found.tensor(&spec.name).is_ok());
    load_named_if(file, stats, &store.stats, has_some)?;
    Ok(store.round()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{Declared, Init};
    use candle_core::{DType, Device};

    fn made(seed: u64) -> (Store, Optimizer) {
        let mut declared = Declared::default();
        declared.filter("conv.weight", [3, 2, 2, 2], Init::Normal(1.0));
        declared.param("bias", [3], Init::Normal(1.0));
        declared.stat("mean", 3, 0.5);
        let store = Store::new(declared.layout().unwrap(), seed, DType::F32, &Device::Cpu).unwrap();
        let optimizer =
            Optimizer::new(&toml::from_str("kind = 'adamw8bit'").unwrap(), &store, false).unwrap();
        (store, optimizer)
    }

    fn state(step: u64) -> State {
        State {
            format: FORMAT,
            step,
            cursor: Cursor { update: step, done: 0 },
            samples: step * 4,
            digest: Digest::default(),
            seed: 1,
            way: Way {
                micro_batch: 4,
                accumulation_steps: 1,
                recompute: 0,
                eval_micro_batch: 4,
                prefetch: 1,
            },
            descent: Descent::default(),
            best: None,
            scaling: Scaling::fixed(),
            left_out: LeftOut::default(),
            metrics: BTreeMap::new(),
            elapsed_s: 0.0,
            data_wait_s: 0.0,
            files: BTreeMap::new(),
        }
    }

    fn held<'a>(store: &'a Store, optimizer: &'a Optimizer) -> Held<'a> {
        Held { store, optimizer, average: None }
    }

    fn values(store: &Store) -> Vec<f32> {
        store.master.to_vec1().unwrap()
    }

    #[test]
    fn what_is_saved_is_what_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let (store, optimizer) = made(1);
        let (path, _) = checkpoints.save(state(7), &held(&store, &optimizer)).unwrap();
        let (Some((found, at)), skipped) = checkpoints.newest() else { panic!("not found") };
        assert_eq!((found.step, at, skipped), (7, path.clone(), vec![]));
        let (other, other_optimizer) = made(2);
        assert_ne!(values(&store), values(&other));
        load(&path, &held(&other, &other_optimizer)).unwrap();
        assert_eq!(values(&store), values(&other));
    }

    #[test]
    fn filters_are_named_channels_first() {
        let folder = tempfile::tempdir().unwrap();
        let (store, optimizer) = made(1);
        let (path, _) = Checkpoints::new(folder.path()).save(state(1), &held(&store, &optimizer)).unwrap();
        let tensors = candle_core::safetensors::load(path.join(MODEL), &Device::Cpu).unwrap();
        let kept = store.weights()[0]
            .permute((0, 3, 1, 2))
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let named = tensors["conv.weight"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(tensors["conv.weight"].dims(), [3, 2, 2, 2]);
        assert_eq!(named, kept);
    }

    #[test]
    fn a_damaged_checkpoint_is_passed_over_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let (store, optimizer) = made(1);
        for step in [1, 2, 3, 4] {
            checkpoints.save(state(step), &held(&store, &optimizer)).unwrap();
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
        let (Some((found, _)), skipped) = checkpoints.newest() else { panic!("not found") };
        assert_eq!(found.step, 1);
        assert_eq!(skipped.len(), 2);
        assert!(skipped[0].contains("state.json does not match"), "{skipped:?}");
        assert!(skipped[1].contains("model.safetensors does not match"), "{skipped:?}");
    }

    /// As other tools save: names in another order, some we have no use for, perhaps no statistics.
    #[test]
    fn weights_of_another_tool_are_taken_by_name() {
        let (folder, one) =
            (tempfile::tempdir().unwrap(), |n: f32| Tensor::full(n, 3, &Device::Cpu).unwrap());
        let filter = Tensor::ones((3, 2, 2, 2), DType::F32, &Device::Cpu).unwrap();
        let load = |names: &[(&str, Tensor)]| {
            let file = folder.path().join("theirs.safetensors");
            let tensors = names.iter().cloned().collect::<std::collections::HashMap<_, _>>();
            candle_core::safetensors::save(&tensors, &file).unwrap();
            let store = made(1).0;
            load_weights(&file, &store).map_err(|failure| failure.to_string()).map(|()| store)
        };
        let bare = [("conv.weight", filter.clone()), ("bias", one(2.0))];
        let batches = ("num_batches_tracked", Tensor::new(7i64, &Device::Cpu).unwrap());
        let whole = [&bare[..], &[("mean", one(3.0)), batches]].concat();
        let store = load(&whole).unwrap();
        assert_eq!(values(&store).iter().sum::<f32>(), 24.0 + 6.0);
        assert_eq!(store.stats.to_vec1::<f32>().unwrap(), [3.0; 3]);
        assert_eq!(load(&bare).unwrap().stats.to_vec1::<f32>().unwrap(), [0.5; 3]);
        let lacking = load(&bare[..1]).err().unwrap();
        assert!(lacking.ends_with("does not belong to this model: it has no `bias`"), "{lacking}");
        let odd = load(&[&bare[..], &[("mean", filter)]].concat()).err().unwrap();
        assert!(odd.contains("`mean` is F32 [3, 2, 2, 2] there and F32 [3] here"), "{odd}");
    }

    #[test]
    fn the_newest_and_the_best_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path());
        let (store, optimizer) = made(1);
        (1..=5).for_each(|step| drop(checkpoints.save(state(step), &held(&store, &optimizer)).unwrap()));
        checkpoints.prune(2, Some(2)).unwrap();
        assert_eq!(checkpoints.steps(), [5, 4, 2]);
    }

    #[test]
    fn a_folder_that_vanished_is_an_error_and_not_a_new_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (store, optimizer) = made(1);
        let gone = folder.path().join("gone");
        let failure = Checkpoints::new(&gone).save(state(1), &held(&store, &optimizer)).unwrap_err();
        assert!(failure.to_string().contains("cannot create the checkpoint"), "{failure}");
        assert!(!gone.exists());
    }
}
