//! The directory of a run: where it is and what it contains.

use std::fs;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Failure;
use super::checkpoint::Checkpoints;
use crate::data::language::tokenizer::SETTINGS_FILES;
use crate::job::Job;

/// Paths of a run.
#[derive(Clone, Debug)]
pub struct RunDir {
    pub root: PathBuf,
}

/// What `--resume` and `--run-dir` request.
#[derive(Clone, Debug, Default)]
pub struct RequestedRun {
    pub run_dir: Option<PathBuf>,
    /// `--resume`, and the run it names.
    pub resume: Option<Option<PathBuf>>,
}

impl RunDir {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The run that has the checkpoint in this folder; `None` if it stands alone.
    pub fn of_checkpoint(folder: &Path) -> Option<Self> {
        let parent = folder.parent()?;
        let run = Self::new(parent.parent()?);
        (run.checkpoints() == parent).then_some(run)
    }

    pub fn job(&self) -> PathBuf {
        self.root.join("job.toml")
    }

    pub fn plan(&self) -> PathBuf {
        self.root.join("plan.json")
    }

    /// The tokenizer, if the data is text.
    pub fn tokenizer(&self) -> PathBuf {
        self.root.join("tokenizer.json")
    }

    /// What turns inputs into samples.
    pub fn preprocessing(&self) -> PathBuf {
        self.root.join("preprocessing.json")
    }

    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    pub fn summary(&self) -> PathBuf {
        self.root.join("summary.json")
    }

    /// What the best and the last evaluation found besides their metrics.
    pub fn evaluation(&self) -> PathBuf {
        self.root.join("evaluation.json")
    }

    /// How the model continues the prompts of the job.
    pub fn generated(&self) -> PathBuf {
        self.root.join("generated.json")
    }

    /// Post-mortem of a run that ran out of memory for good.
    pub fn oom(&self) -> PathBuf {
        self.root.join("oom.json")
    }

    /// Snapshots of who held what.
    pub fn memory(&self) -> PathBuf {
        self.root.join("memory")
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The MLflow run that this run is sent to.
    pub fn mlflow(&self) -> PathBuf {
        self.root.join("mlflow.json")
    }

    pub fn tensorboard(&self) -> PathBuf {
        self.root.join("tensorboard")
    }

    /// The report of the run as an HTML page.
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }

    fn contains_run(&self) -> bool {
        let has_checkpoints = || !Checkpoints::new(self.checkpoints()).steps().is_empty();
        self.job().exists() || self.events().exists() || has_checkpoints()
    }

    /// Time of the run's last activity, in seconds since the Unix epoch, from its events and checkpoints.
    fn last_active(&self) -> f64 {
        let event = last_line(&self.events()).and_then(|line| {
            let event: serde_json::Value = serde_json::from_str(&line).ok()?;
            event["t"].as_f64()
        });
        let written = Checkpoints::new(self.checkpoints()).newest_state().map(|state| state.written);
        event.unwrap_or(0.0).max(written.unwrap_or(0.0))
    }

    /// Removes files that a killed process left half-written. Only the owner of the run lock may call this.
    pub fn clean(&self) -> Result<(), Failure> {
        for path in [
            self.job(),
            self.plan(),
            self.tokenizer(),
            self.preprocessing(),
            self.summary(),
            self.evaluation(),
            self.generated(),
            self.oom(),
            self.metrics(),
            self.mlflow(),
            self.report(),
        ]
        .into_iter()
        .chain(SETTINGS_FILES.map(|name| self.root.join(name)))
        {
            let full = path.with_added_extension("tmp");
            for leftover in [path.with_extension("tmp"), full].into_iter().filter(|left| left.exists()) {
                fs::remove_file(&leftover).map_err(Failure::io("remove", leftover))?;
            }
        }
        let snapshots =
            fs::read_dir(self.memory()).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        for leftover in snapshots.filter(|path| path.extension().is_some_and(|extension| extension == "tmp"))
        {
            fs::remove_file(&leftover).map_err(Failure::io("remove", leftover))?;
        }
        Checkpoints::new(self.checkpoints()).clean()
    }

    /// Resolves the request to a directory, and whether a run there is resumed. Creates nothing.
    pub fn resolve(
        requested: &RequestedRun,
        job: &Job,
        runs: &Path,
        stamp: &str,
    ) -> Result<(RunDir, bool), Failure> {
        let resume = requested.resume.is_some();
        if let Some(Some(run)) = &requested.resume {
            let folder = RunDir::new(run);
            return if folder.contains_run() {
                Ok((folder, true))
            } else {
                Err(Failure::NotARun(run.clone()))
            };
        }
        if let Some(dir) = &requested.run_dir {
            let folder = RunDir::new(dir);
            return match (folder.contains_run(), resume) {
                (true, false) => Err(Failure::FolderTaken(dir.clone())),
                (there, _) => Ok((folder, there && resume)),
            };
        }
        let home = runs.join(&job.name);
        if resume && let Some(newest) = newest(&home)? {
            return Ok((newest, true));
        }
        // Two runs started within the same second get two directories.
        let free = (1..).map(|n| if n == 1 { stamp.to_owned() } else { format!("{stamp}-{n}") });
        let root = free.map(|name| home.join(name)).find(|path| !path.exists()).unwrap_or(home);
        Ok((RunDir::new(root), false))
    }

    /// Free bytes on its file system, if the system reports them.
    pub fn free_bytes(&self) -> Option<u64> {
        #[cfg(unix)]
        {
            let stat = rustix::fs::statvfs(&self.root).ok()?;
            Some(stat.f_bavail.saturating_mul(stat.f_frsize))
        }
        #[cfg(not(unix))]
        None
    }

    /// Creates the directory and writes the resolved job into it.
    pub fn create(&self, job: &Job) -> Result<(), Failure> {
        fs::create_dir_all(self.checkpoints())
            .map_err(Failure::io("create the folder", self.checkpoints()))?;
        write_atomic(&self.job(), job.to_toml().as_bytes())
    }
}

/// Writes a file completely or not at all: temporary file, sync, rename.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_atomic_with(path, |out| out.write_all(bytes))
}

/// The same, with content that is never in memory as a whole.
pub fn write_atomic_with(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), Failure> {
    let temporary = path.with_extension("tmp");
    let put = || {
        let mut out = BufWriter::new(fs::File::create(&temporary)?);
        write(&mut out)?;
        out.into_inner()?.sync_all()?;
        fs::rename(&temporary, path)
    };
    put().map_err(Failure::io("write", path))
}

/// The most recently active run under a job's name, whatever its directory is called.
fn newest(home: &Path) -> Result<Option<RunDir>, Failure> {
    let Ok(entries) = fs::read_dir(home) else { return Ok(None) };
    let folders = entries.filter_map(Result::ok).map(|entry| RunDir::new(entry.path()));
    let runs = folders.filter(RunDir::contains_run).map(|folder| (folder.last_active(), folder));
    let newest = runs.max_by(|(a, one), (b, other)| a.total_cmp(b).then(one.root.cmp(&other.root)));
    Ok(newest.map(|(_, folder)| folder))
}

/// The last complete line of a file.
fn last_line(path: &Path) -> Option<String> {
    let mut file = fs::File::open(path).ok()?;
    let start = file.metadata().ok()?.len().saturating_sub(1 << 16);
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut text = Vec::new();
    file.take(1 << 16).read_to_end(&mut text).ok()?;
    let end = text.iter().rposition(|b| *b == b'\n')?;
    let begin = text[..end].iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    Some(String::from_utf8_lossy(&text[begin..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job() -> Job {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.toml");
        fs::write(&path, "[model]\nkind = 'mlp'\n[data]\nkind = 'shapes'\n[train]\nsteps = 1\n").unwrap();
        Job::load(&path, &[]).unwrap()
    }

    #[test]
    fn a_run_is_never_written_over() {
        let (home, job) = (tempfile::tempdir().unwrap(), job());
        let choose =
            |requested: &RequestedRun| RunDir::resolve(requested, &job, home.path(), "20260101-000000");
        let new_run = RequestedRun::default();
        let (first, resumed) = choose(&new_run).unwrap();
        assert!(!resumed && first.root.ends_with("j/20260101-000000"));
        first.create(&job).unwrap();
        let (second, _) = choose(&new_run).unwrap();
        assert!(second.root.ends_with("j/20260101-000000-2"));
        let same_dir = RequestedRun { run_dir: Some(first.root.clone()), resume: None };
        assert!(matches!(choose(&same_dir), Err(Failure::FolderTaken(_))));
        let resumed = RequestedRun { resume: Some(None), ..same_dir };
        assert!(matches!(choose(&resumed), Ok((_, true))));
    }

    #[test]
    fn resume_alone_finds_the_newest_run_or_begins() {
        let (home, job) = (tempfile::tempdir().unwrap(), job());
        let resume = RequestedRun { run_dir: None, resume: Some(None) };
        let (_, resumed) = RunDir::resolve(&resume, &job, home.path(), "a").unwrap();
        assert!(!resumed);
        for stamp in ["20260101-000000", "20260301-000000", "20260201-000000"] {
            RunDir::new(home.path().join("j").join(stamp)).create(&job).unwrap();
        }
        // None has recorded activity: the last by name wins.
        let (folder, resumed) = RunDir::resolve(&resume, &job, home.path(), "a").unwrap();
        assert!(resumed && folder.root.ends_with("20260301-000000"));
        // A copied or renamed run is as old as its contents.
        for (stamp, t) in [("20260101-000000", 30), ("20260301-000000", 20), ("zz-copy", 10)] {
            let folder = RunDir::new(home.path().join("j").join(stamp));
            folder.create(&job).unwrap();
            fs::write(folder.events(), format!("{{\"t\":1}}\n{{\"t\":{t}}}\n{{\"t\":99")).unwrap();
        }
        let (folder, _) = RunDir::resolve(&resume, &job, home.path(), "a").unwrap();
        assert!(folder.root.ends_with("20260101-000000"), "{folder:?}");
        let named = RequestedRun { run_dir: None, resume: Some(Some(home.path().join("nowhere"))) };
        assert!(matches!(RunDir::resolve(&named, &job, home.path(), "a"), Err(Failure::NotARun(_))));
    }
}
