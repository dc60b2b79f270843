//! Checkpoints: complete on disk, or absent.
//!
//! A checkpoint is a folder `step-N`. It holds weights and running statistics in `model.safetensors`, under the names
//! and shapes other tools read; the EMA of the weights in `ema.safetensors`, if the job keeps one; the optimizer state
//! in `optimizer.safetensors`; the mask of pruned weights in `mask.safetensors`, if it prunes; the tokenizer, if the
//! data is text; what turns inputs into samples in `preprocessing.json`; everything else in `state.json`.
//!
//! `save` writes the folder under a hidden name, syncs it with its marker `DONE`, and renames it: the rename is the
//! commit point. Removal renames to a hidden name first, for the same reason. So a `step-N` without a marker was
//! damaged from outside, and a hidden folder is what an interrupted process left; [`Checkpoints::clean`] removes
//! those. The marker holds the checksum of the state, and the state the checksums of the files, so a resume detects
//! damage and falls back to the previous checkpoint.
//!
//! The run writes a checkpoint before it evaluates that step. The result is added afterwards, as a second state file
//! that supersedes the first.

mod state;

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::Failure;
use super::run_dir;
use super::tensor_files::{
    FlatBuffer, load_buffers, load_named, named_tensors, sync, write_buffers, write_tensors,
};
use crate::base::regular_file;
use crate::memory::resident_limit;
use crate::optim::Optimizer;
use crate::param_store::ParamStore;

pub use state::{CheckpointState, FORMAT};

pub const MODEL: &str = "model.safetensors";
pub const AVERAGE: &str = "ema.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const MASK: &str = "mask.safetensors";
pub const TOKENIZER: &str = "tokenizer.json";
pub const PREPROCESSING: &str = "preprocessing.json";
const STATE: &str = "state.json";
/// The state after this step's evaluation: one line with its checksum, then the state as JSON.
const EVALUATED: &str = "evaluated.json";
const DONE: &str = "DONE";
/// Marks weights whose next update was not finite.
const DIVERGED: &str = "DIVERGED";

/// The checkpoint folder of a run.
pub struct Checkpoints {
    root: PathBuf,
}

/// The tensors that a checkpoint saves and restores.
pub struct CheckpointTensors<'a> {
    pub store: &'a ParamStore,
    pub optimizer: &'a Optimizer,
    /// EMA of the weights.
    pub average: Option<&'a Tensor>,
    /// One byte per weight that may be pruned.
    pub mask: Option<&'a Tensor>,
}

/// Result of [`Checkpoints::newest`].
#[derive(Default)]
pub struct NewestCheckpoint {
    pub found: Option<(CheckpointState, PathBuf)>,
    /// Newer checkpoints that were rejected, each with the reason.
    pub skipped: Vec<String>,
}

impl Checkpoints {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }

    /// Path of a checkpoint while it is being written (`tmp`), replaced (`old`) or removed (`removed`).
    fn hidden_path(&self, step: u64, what: &str) -> PathBuf {
        self.root.join(format!(".step-{step:08}.{what}"))
    }

    /// Steps of all checkpoints, newest first, including damaged ones.
    pub fn steps(&self) -> Vec<u64> {
        let names = entry_names(&self.root).unwrap_or_default();
        let mut steps: Vec<u64> =
            names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        steps
    }

    /// Removes what a killed process left half-written or half-removed. Only the owner of the run lock may call this.
    pub fn clean(&self) -> Result<(), Failure> {
        for name in entry_names(&self.root).map_err(Failure::io("read", &self.root))? {
            let path = self.root.join(&name);
            if let Some(old) = name.strip_prefix(".").and_then(|name| name.strip_suffix(".old"))
                && !self.root.join(old).exists()
            {
                // The process was killed between the two renames of a replacement.
                rename(&path, &self.root.join(old))?;
            } else if name.starts_with(".step-") {
                fs::remove_dir_all(&path).map_err(Failure::io("remove", &path))?;
            } else if name.starts_with("step-") {
                let leftover = path.join(EVALUATED).with_extension("tmp");
                if leftover.exists() {
                    fs::remove_file(&leftover).map_err(Failure::io("remove", &leftover))?;
                }
            }
        }
        Ok(())
    }

    /// Writes a checkpoint and returns its path and size in bytes. An existing checkpoint of the same step stays
    /// intact until the commit, and a failure leaves nothing behind. `attached` are files to copy into it.
    pub fn save(
        &self,
        mut state: CheckpointState,
        tensors: &CheckpointTensors,
        attached: &[PathBuf],
    ) -> Result<(PathBuf, u64), Failure> {
        let (path, temporary) = (self.path(state.step), self.hidden_path(state.step, "tmp"));
        let _ = fs::remove_dir_all(&temporary);
        fs::create_dir(&temporary).map_err(Failure::io("create the checkpoint", &temporary))?;
        let step = state.step;
        let written = self.write(&temporary, &mut state, tensors, attached).and_then(|bytes| {
            self.commit(step)?;
            Ok((path, bytes))
        });
        if written.is_err() {
            let _ = fs::remove_dir_all(&temporary);
        }
        written
    }

    /// Renames a written checkpoint to its final name. A checkpoint that already has the name, as when a resumed run
    /// repeats steps, stays until then.
    fn commit(&self, step: u64) -> Result<(), Failure> {
        let (temporary, path, old) =
            (self.hidden_path(step, "tmp"), self.path(step), self.hidden_path(step, "old"));
        let replaces = path.exists();
        if replaces {
            rename(&path, &old)?;
        }
        if let Err(failure) = rename(&temporary, &path) {
            if replaces {
                // Best effort: if this fails too, the next start restores it.
                let _ = fs::rename(&old, &path);
            }
            return Err(failure);
        }
        sync(&self.root)?;
        match replaces {
            true => fs::remove_dir_all(&old).map_err(Failure::io("remove", old)),
            false => Ok(()),
        }
    }

    fn write(
        &self,
        folder: &Path,
        state: &mut CheckpointState,
        tensors: &CheckpointTensors,
        attached: &[PathBuf],
    ) -> Result<u64, Failure> {
        let store = tensors.store;
        let (params, frozen) = (&store.layout.params, store.frozen_weights()?);
        let (master, frozen, stats) = (
            FlatBuffer::from_tensor(&store.master_weights)?,
            FlatBuffer::from_tensor(&frozen)?,
            FlatBuffer::from_tensor(&store.stats)?,
        );
        let mut model = named_tensors(params.trained(), &master)?;
        model.extend(named_tensors(params.frozen(), &frozen)?);
        model.extend(named_tensors(store.layout.stats.iter(), &stats)?);
        let mut files = vec![MODEL.to_owned(), OPTIMIZER.to_owned()];
        let mut not_finite = write_tensors(&folder.join(MODEL), &model)?;
        if let Some(average) = tensors.average {
            files.push(AVERAGE.to_owned());
            let average = FlatBuffer::from_tensor(average)?;
            let mut model = named_tensors(params.trained(), &average)?;
            model.extend(named_tensors(params.frozen(), &frozen)?);
            not_finite = not_finite.or(write_tensors(&folder.join(AVERAGE), &model)?);
        }
        not_finite = not_finite.or(write_buffers(&folder.join(OPTIMIZER), tensors.optimizer.state()?)?);
        if let Some(mask) = tensors.mask {
            files.push(MASK.to_owned());
            write_buffers(&folder.join(MASK), &[("mask", mask.clone())])?;
        }
        if let Some(tensor) = not_finite {
            return Err(Failure::NotFinite { step: state.step, tensor, checkpoint: None });
        }
        resident_limit::limit_code_now();
        for from in attached {
            let Some(name) = from.file_name() else { continue };
            let to = folder.join(name);
            fs::copy(from, &to).map_err(Failure::io("write", &to))?;
            sync(&to)?;
            files.push(name.to_string_lossy().into_owned());
        }
        for file in files {
            let sum = checksum(&folder.join(&file)).map_err(Failure::io("read", folder.join(&file)))?;
            state.files.insert(file, sum);
        }
        let text = json(state, &folder.join(STATE))?;
        write_synced(&folder.join(STATE), &text)?;
        write_synced(&folder.join(DONE), crc32c::crc32c(&text).to_string().as_bytes())?;
        sync(folder)?;
        Ok(state.files.values().map(|(_, bytes)| bytes).sum())
    }

    /// Adds the evaluation result to the checkpoint of its step: `state` supersedes the state saved first.
    pub fn save_evaluation(&self, state: &CheckpointState) -> Result<(), Failure> {
        let path = self.path(state.step).join(EVALUATED);
        let text = json(state, &path)?;
        let line = format!("{}\n", crc32c::crc32c(&text));
        run_dir::write_atomic(&path, &[line.as_bytes(), &text].concat())?;
        sync(&self.path(state.step))
    }

    /// Marks the checkpoints of `step` and later: the next update from them was not finite, so a resumed run starts
    /// from an earlier one.
    pub fn mark_diverged(&self, step: u64) -> Result<(), Failure> {
        let suspect = self.steps().into_iter().filter(|s| *s >= step);
        suspect.map(|step| self.path(step).join(DIVERGED)).try_for_each(|path| write_synced(&path, b""))
    }

    /// Whether the update after these weights was not finite.
    pub fn is_diverged(&self, step: u64) -> bool {
        self.path(step).join(DIVERGED).exists()
    }

    /// The newest complete checkpoint that is not marked as diverged; if all are, the newest.
    pub fn last_good(&self) -> Option<PathBuf> {
        let paths: Vec<PathBuf> = self.complete_steps().map(|step| self.path(step)).collect();
        paths.iter().find(|path| !path.join(DIVERGED).exists()).or(paths.first()).cloned()
    }

    /// The best checkpoint; the newest good one if none was evaluated.
    pub fn best_or_last(&self) -> Option<PathBuf> {
        let best = self.newest_state().and_then(|state| state.best).map(|(_, step)| self.path(step));
        best.filter(|path| path.exists()).or_else(|| self.last_good())
    }

    /// Steps of the checkpoints that carry the `DONE` marker, newest first.
    pub fn complete_steps(&self) -> impl Iterator<Item = u64> {
        self.steps().into_iter().filter(|step| self.path(*step).join(DONE).exists())
    }

    /// Points the link `name` (`best` or `last`) at the checkpoint of `step`. A file system without links has none.
    pub fn link(&self, name: &str, step: u64) {
        #[cfg(unix)]
        {
            let (temporary, link) = (self.root.join(format!(".step-{name}.tmp")), self.root.join(name));
            let _ = fs::remove_file(&temporary);
            // The links are for people and their scripts: no command depends on them.
            if std::os::unix::fs::symlink(format!("step-{step:08}"), &temporary).is_ok()
                && fs::rename(&temporary, &link).is_err()
            {
                let _ = fs::remove_file(&temporary);
            }
        }
        #[cfg(not(unix))]
        let _ = (name, step);
    }

    /// Removes all but the newest `keep` good checkpoints and the one of step `best`. Checkpoints newer than the
    /// newest good one stay.
    pub fn prune(&self, keep: usize, best: Option<u64>) -> Result<(), Failure> {
        let good = self.complete_steps().filter(|step| !self.path(*step).join(DIVERGED).exists());
        let good: Vec<u64> = good.collect();
        let Some(newest) = good.first() else { return Ok(()) };
        let is_kept = |step: &u64| good.iter().take(keep).any(|s| s == step) || Some(*step) == best;
        let old = self.steps().into_iter().filter(|step| step <= newest && !is_kept(step));
        old.into_iter().try_for_each(|step| {
            let removed = self.hidden_path(step, "gone");
            rename(&self.path(step), &removed)?;
            sync(&self.root)?;
            fs::remove_dir_all(&removed).map_err(Failure::io("remove", removed))
        })
    }

    /// The newest intact checkpoint that is not marked as diverged; if all intact ones are marked, the newest of
    /// those.
    pub fn newest(&self) -> NewestCheckpoint {
        let (mut newest, mut suspect) = (NewestCheckpoint::default(), None);
        for path in self.steps().into_iter().map(|step| self.path(step)) {
            let diverged = path.join(DIVERGED).exists();
            match verify_files(&path) {
                Ok(state) if !diverged => {
                    newest.found = Some((state, path));
                    return newest;
                }
                Ok(state) => {
                    newest.skipped.push(format!("{}: the next update was not finite", path.display()));
                    suspect.get_or_insert((state, path));
                }
                Err(reason) => newest.skipped.push(format!("{}: {reason}", path.display())),
            }
        }
        newest.found = suspect;
        newest
    }

    /// The newest readable state. Does not verify the tensor files.
    pub fn newest_state(&self) -> Option<CheckpointState> {
        self.steps().into_iter().find_map(|step| read_state(&self.path(step)).ok())
    }

    /// Bytes of everything in the checkpoint folder.
    pub fn bytes(&self) -> u64 {
        let folder = |path: PathBuf| fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
        let is_link = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_symlink());
        let checkpoints = folder(self.root.clone()).filter(|entry| !is_link(entry));
        let files = checkpoints.flat_map(|entry| folder(entry.path()));
        files.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.len()).sum()
    }
}

/// Names of the entries of a folder; empty if the folder does not exist.
fn entry_names(folder: &Path) -> std::io::Result<Vec<String>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
        Ok(entries) => {
            entries.map(|entry| entry.map(|e| e.file_name().to_string_lossy().into_owned())).collect()
        }
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), Failure> {
    fs::rename(from, to).map_err(Failure::io("rename the checkpoint to", to))
}

fn json(state: &CheckpointState, path: &Path) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec_pretty(state).map_err(std::io::Error::from).map_err(Failure::io("write", path))
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let write = || {
        let mut file = File::create(path)?;
        std::io::Write::write_all(&mut file, bytes)?;
        file.sync_all()
    };
    write().map_err(Failure::io("write", path))
}

/// CRC-32C and length of a file.
fn checksum(path: &Path) -> std::io::Result<(u32, u64)> {
    let (mut file, mut buffer) = (regular_file::open(path)?, vec![0; 1 << 20]);
    let (mut sum, mut length) = (0, 0);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((sum, length)),
            n => (sum, length) = (crc32c::crc32c_append(sum, &buffer[..n]), length + n as u64),
        }
    }
}

/// Upper bound on the size of a state file: reading refuses anything larger.
const MAX_STATE_BYTES: u64 = 256 << 20;

/// Reads the state of a checkpoint, preferring the one with the evaluation if that is intact; or says why it cannot.
fn read_state(path: &Path) -> Result<CheckpointState, String> {
    let read = |name: &str| {
        regular_file::read(&path.join(name), MAX_STATE_BYTES).map_err(|e| format!("cannot read {name}: {e}"))
    };
    let marker = match path.join(DONE).exists() {
        true => read(DONE)?,
        false => return Err(format!("it has no {DONE} marker")),
    };
    let text = read(STATE)?;
    if String::from_utf8_lossy(&marker).trim() != crc32c::crc32c(&text).to_string() {
        return Err(format!("{STATE} does not match its checksum"));
    }
    // Check the format first: a state of another format does not deserialize.
    let header: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| format!("{STATE} cannot be read: {e}"))?;
    if header["format"] != FORMAT {
        return Err(format!("it has format {} and this program reads {FORMAT}", header["format"]));
    }
    let state: CheckpointState =
        serde_json::from_value(header).map_err(|e| format!("{STATE} cannot be read: {e}"))?;
    let evaluated = read(EVALUATED).ok().and_then(|bytes| {
        let end = bytes.iter().position(|b| *b == b'\n')?;
        let (sum, text) = (String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 1..]);
        let evaluated: CheckpointState = serde_json::from_slice(text).ok()?;
        (sum == crc32c::crc32c(text).to_string() && evaluated.step == state.step).then_some(evaluated)
    });
    // A damaged evaluation file only costs another evaluation.
    Ok(match evaluated {
        Some(evaluated) => CheckpointState { files: state.files, ..evaluated },
        None => state,
    })
}

/// Whether the folder is a checkpoint, intact or not.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join(STATE).exists()
}

/// Reads the state and verifies every file against its checksum; or says what is wrong.
pub fn verify_files(path: &Path) -> Result<CheckpointState, String> {
    let state = read_state(path)?;
    for (name, expected) in &state.files {
        let actual = checksum(&path.join(name)).map_err(|e| format!("cannot read {name}: {e}"))?;
        if actual != *expected {
            return Err(format!("{name} does not match its checksum"));
        }
    }
    Ok(state)
}

/// Loads the tensors of a checkpoint into those of a run.
pub fn load(path: &Path, tensors: &CheckpointTensors) -> Result<(), Failure> {
    let store = tensors.store;
    load_params(&path.join(MODEL), store)?;
    load_named(&path.join(MODEL), store.layout.stats.iter(), &store.stats)?;
    if let Some(average) = tensors.average {
        // A run that adds an EMA when it is resumed starts the EMA from the weights it loads.
        let file = if path.join(AVERAGE).exists() { AVERAGE } else { MODEL };
        load_named(&path.join(file), store.layout.params.trained(), average)?;
    }
    load_buffers(&path.join(OPTIMIZER), tensors.optimizer.state()?)?;
    if let Some(mask) = tensors.mask {
        load_buffers(&path.join(MASK), &[("mask", mask.clone())])?;
    }
    Ok(store.sync_compute_weights()?)
}

/// Loads the parameters by name: master weights, and frozen ones in the compute dtype.
fn load_params(file: &Path, store: &ParamStore) -> Result<(), Failure> {
    load_named(file, store.layout.params.trained(), &store.master_weights)?;
    load_named(file, store.layout.params.frozen(), &store.frozen_weights()?)
}

#[cfg(test)]
mod tests;
