//! `memory/` in the folder of a run: who held what when memory ran out and, if the job enables it, after an evaluation
//! and at the end. The number of files is bounded, and so is the size of each.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::engine::Ledgers;
use super::run_dir::RunDir;
use crate::base::{MemorySpace, Phase, Role};
use crate::events::event::MemoryBytes;
use crate::memory::Oom;
use crate::memory::recorder::LedgerSnapshot;

/// Of the snapshots of out-of-memory errors, the first and this many of the last are kept.
const LAST_KEPT: usize = 4;

/// Why a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotReason {
    Oom,
    Evaluation,
    End,
}

/// A request that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedRequest {
    pub space: MemorySpace,
    pub role: Role,
    pub requester: String,
    pub phase: Phase,
    /// Bytes requested, and bytes available.
    pub bytes: u64,
    pub left: u64,
}

/// Contents of a file in `memory/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemorySnapshot {
    /// Updates applied before it.
    pub step: u64,
    pub reason: SnapshotReason,
    /// The request that was refused, if that is the reason.
    pub refused: Option<RefusedRequest>,
    /// Device memory first, if tensors are there.
    pub spaces: Vec<LedgerSnapshot>,
}

impl MemorySnapshot {
    pub fn new(step: u64, reason: SnapshotReason, ledgers: &Ledgers, oom: Option<&Oom>) -> Self {
        let tensors = ledgers.tensors.snapshot(oom);
        // On the CPU both are the same ledger.
        let host = (tensors.space == MemorySpace::Vram).then(|| ledgers.host.snapshot(oom));
        let refused = oom.map(|oom| RefusedRequest {
            space: oom.space,
            role: oom.role,
            requester: oom.requester.clone(),
            phase: oom.phase,
            bytes: oom.bytes,
            left: oom.available,
        });
        Self { step, reason, refused, spaces: std::iter::once(tensors).chain(host).collect() }
    }

    /// The peak of each space.
    pub fn peak_bytes(&self) -> MemoryBytes {
        let of = |space| self.spaces.iter().filter(|s| s.space == space).map(|s| s.peak_bytes).sum();
        MemoryBytes { ram: of(MemorySpace::Ram), vram: of(MemorySpace::Vram) }
    }

    /// Writes the file and returns its path. It replaces the last one of its reason, except that the first and the last
    /// few out-of-memory errors are kept. It is streamed, since memory may just have run out.
    pub fn write(&self, folder: &RunDir) -> io::Result<PathBuf> {
        let folder = folder.memory();
        fs::create_dir_all(&folder)?;
        let path = folder.join(match self.reason {
            SnapshotReason::Oom => format!("oom-{}.json", oom_numbers(&folder).last().map_or(1, |n| n + 1)),
            SnapshotReason::Evaluation => "evaluation.json".into(),
            SnapshotReason::End => "end.json".into(),
        });
        let temporary = path.with_extension("tmp");
        let put = || {
            let mut out = BufWriter::new(fs::File::create(&temporary)?);
            serde_json::to_writer(&mut out, self)?;
            out.flush()?;
            fs::rename(&temporary, &path)
        };
        put().inspect_err(|_| drop(fs::remove_file(&temporary)))?;
        let numbers = oom_numbers(&folder);
        let dropped = numbers.len().saturating_sub(1 + LAST_KEPT);
        for number in numbers.iter().skip(1).take(dropped) {
            fs::remove_file(folder.join(format!("oom-{number}.json")))?;
        }
        Ok(path)
    }
}

/// The numbers of the out-of-memory errors that have a file, in order.
fn oom_numbers(folder: &Path) -> Vec<u64> {
    let names = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let number = |name: String| name.strip_prefix("oom-")?.strip_suffix(".json")?.parse().ok();
    let mut numbers: Vec<u64> = names.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// The files of a run in the order to show them: out-of-memory errors, the last evaluation, the end.
pub fn files(folder: &RunDir) -> Vec<PathBuf> {
    let folder = folder.memory();
    let names = oom_numbers(&folder).into_iter().map(|number| format!("oom-{number}.json"));
    let names = names.chain(["evaluation.json".into(), "end.json".into()]);
    names.map(|name| folder.join(name)).filter(|path| path.exists()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Ledger;

    #[test]
    fn the_first_and_the_last_few_are_kept() {
        let (home, ledger) = (tempfile::tempdir().unwrap(), Ledger::new(10, None));
        let (folder, ledgers) =
            (RunDir::new(home.path()), Ledgers { tensors: ledger.clone(), host: ledger.clone() });
        for step in 0..9 {
            let oom = ledger.reserve(Role::Weights, "w", 11).unwrap_err();
            MemorySnapshot::new(step, SnapshotReason::Oom, &ledgers, Some(&oom)).write(&folder).unwrap();
        }
        for step in 9..12 {
            MemorySnapshot::new(step, SnapshotReason::End, &ledgers, None).write(&folder).unwrap();
        }
        let read =
            |path: &PathBuf| -> MemorySnapshot { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        let kept: Vec<MemorySnapshot> = files(&folder).iter().map(read).collect();
        assert_eq!(kept.iter().map(|snapshot| snapshot.step).collect::<Vec<_>>(), [0, 5, 6, 7, 8, 11]);
        assert_eq!(fs::read_dir(folder.memory()).unwrap().count(), 6, "and nothing else");
        assert_eq!(kept[0].refused.as_ref().map(|refused| (refused.bytes, refused.left)), Some((11, 10)));
    }
}
