//! One run as its folder tells it, and the runs below a folder.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use super::order::by_folder;
use super::{EventReader, SkippedLines};
use crate::events::Summary;
use crate::events::summary::RunState;
use crate::job::job_values;
use crate::train::run_dir::RunDir;
use crate::train::run_lock::RunLock;

/// Folders below one another that are searched for runs.
const MAX_DEPTH: usize = 8;

#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    #[error("`{}` does not exist", .0.display())]
    Missing(PathBuf),
    #[error("`{}` is empty", .0.display())]
    Empty(PathBuf),
    #[error("`{}` is not the folder of a run", .0.display())]
    NotARun(PathBuf),
    #[error("there are no runs in `{}`", .0.display())]
    NoRuns(PathBuf),
    #[error("the run `{}` has no events yet", .0.display())]
    NoEvents(PathBuf),
    #[error("no run has the metric `{name}`")]
    UnknownMetric { name: String, known: Vec<String> },
    #[error("cannot read `{}`", path.display())]
    Read { path: PathBuf, source: io::Error },
}

impl HistoryError {
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Missing(_) | Self::Empty(_) | Self::NotARun(_) => Some(
                "a run is a folder with `events.jsonl`; `trainer runs DIR` lists those below a folder".into(),
            ),
            Self::NoRuns(_) => Some("`trainer fit JOB` trains a job in `runs/NAME/TIMESTAMP`".into()),
            Self::NoEvents(_) => Some("it is starting, or ended before its first event".into()),
            Self::UnknownMetric { known, .. } => {
                Some(format!("metrics: {}; or steps, time, peak", known.join(", ")))
            }
            Self::Read { .. } => None,
        }
    }
}

/// How a run ended, or that it has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordedState {
    /// A process holds the lock of its folder.
    Running,
    /// No process does, and the last one did not say how it ended.
    Killed,
    Interrupted,
    Diverged,
    Failed,
    Stopped,
    Finished,
}

impl std::fmt::Display for RecordedState {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        self.serialize(f)
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct RunRecord {
    pub folder: RunDir,
    pub state: RecordedState,
    pub summary: Summary,
    pub skipped: SkippedLines,
    /// Every value of its job by its dotted key, as JSON; empty if the job cannot be read.
    pub job: BTreeMap<String, String>,
}

impl RunRecord {
    /// A run by what is known of it; its job is unknown.
    pub fn new(root: PathBuf, summary: Summary) -> Self {
        let folder = RunDir::new(root);
        let state = RecordedState::Killed;
        let mut run = Self { folder, state, summary, skipped: SkippedLines::default(), job: BTreeMap::new() };
        run.update_state();
        run
    }

    /// Derives the state from the summary and the lock.
    pub(super) fn update_state(&mut self) {
        self.state = match self.summary.state {
            RunState::Unfinished if RunLock::is_held(&self.folder) => RecordedState::Running,
            RunState::Unfinished => RecordedState::Killed,
            RunState::Interrupted => RecordedState::Interrupted,
            RunState::Diverged => RecordedState::Diverged,
            RunState::Failed => RecordedState::Failed,
            RunState::Stopped => RecordedState::Stopped,
            RunState::Finished => RecordedState::Finished,
        };
    }

    /// What could not be read, for people.
    pub fn warnings(&self) -> Vec<String> {
        let job =
            self.job.is_empty().then(|| "`job.toml` is missing or damaged: its keys are unknown".to_owned());
        self.skipped.describe().into_iter().chain(job).collect()
    }

    /// Reads the run in a folder.
    pub fn read(root: &Path) -> Result<Self, HistoryError> {
        let folder = check_run(root)?;
        let (summary, skipped) = read_summary(&folder)?;
        Ok(Self { skipped, job: read_job(&folder), ..Self::new(folder.root, summary) })
    }

    /// The name of its job.
    pub fn name(&self) -> String {
        match self.summary.name.is_empty() {
            true => self.job.get("name").map(|name| name.trim_matches('"').to_owned()).unwrap_or_default(),
            false => self.summary.name.clone(),
        }
    }
}

/// The folder of a run, or why it is none.
pub(super) fn check_run(root: &Path) -> Result<RunDir, HistoryError> {
    let folder = RunDir::new(root);
    let is_empty = || fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_none());
    match () {
        () if is_run(&folder) => Ok(folder),
        () if !root.exists() => Err(HistoryError::Missing(root.into())),
        () if is_empty() => Err(HistoryError::Empty(root.into())),
        () => Err(HistoryError::NotARun(root.into())),
    }
}

/// A run has events; before the first it has its job and a folder for checkpoints.
fn is_run(folder: &RunDir) -> bool {
    folder.events().is_file() || folder.job().is_file() && folder.checkpoints().is_dir()
}

/// Every run below a folder, which may be a run itself, by folder. Follows no links, so that no run is found twice.
pub fn find_runs(root: &Path) -> Result<Vec<RunRecord>, HistoryError> {
    let mut found = Vec::new();
    if !root.exists() {
        return Err(HistoryError::Missing(root.into()));
    }
    if !root.is_dir() {
        return Err(HistoryError::NotARun(root.into()));
    }
    fs::read_dir(root).map_err(|source| HistoryError::Read { path: root.into(), source })?;
    walk(root, 0, &mut found);
    let mut runs = found.iter().map(|root| RunRecord::read(root)).collect::<Result<Vec<_>, _>>()?;
    runs.sort_by(by_folder);
    if runs.is_empty() { Err(HistoryError::NoRuns(root.into())) } else { Ok(runs) }
}

fn walk(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if is_run(&RunDir::new(folder)) {
        return found.push(folder.into());
    }
    // A folder that cannot be read is not ours.
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.filter_map(Result::ok) {
        let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
        if depth < MAX_DEPTH && !is_hidden && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), depth + 1, found);
        }
    }
}

/// `summary.json` of a run that has ended; otherwise the events, which may be many.
fn read_summary(folder: &RunDir) -> Result<(Summary, SkippedLines), HistoryError> {
    let kept = fs::read(folder.summary()).ok().and_then(|text| serde_json::from_slice::<Summary>(&text).ok());
    let is_newest = modified(&folder.summary()) >= modified(&folder.events());
    if let Some(summary) = kept.filter(|kept| is_newest && kept.has_ended() && kept.damaged_lines.is_empty())
    {
        return Ok((summary, SkippedLines::default()));
    }
    let mut summary = Summary::default();
    if !folder.events().exists() {
        return Ok((summary, SkippedLines::default()));
    }
    let read = |source| HistoryError::Read { path: folder.events(), source };
    let mut reader = EventReader::open(&folder.events()).map_err(read)?;
    let add = |record: &_| {
        summary.add(record);
        ControlFlow::Continue(())
    };
    reader.read(add).map_err(read)?;
    Ok((summary, reader.skipped))
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|about| about.modified()).ok()
}

pub(super) fn read_job(folder: &RunDir) -> BTreeMap<String, String> {
    let text = fs::read_to_string(folder.job()).unwrap_or_default();
    toml::from_str::<serde_json::Value>(&text).map(|job| job_values(&job)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;

    fn write_run(root: &Path, events: usize) -> RunDir {
        let folder = RunDir::new(root);
        fs::create_dir_all(&folder.root).unwrap();
        let lines: Vec<String> =
            fixtures::run()[..events].iter().map(|r| serde_json::to_string(r).unwrap() + "\n").collect();
        fs::write(folder.events(), lines.concat()).unwrap();
        folder
    }

    #[test]
    fn running_killed_and_finished_runs_are_told_apart() {
        let home = tempfile::tempdir().unwrap();
        write_run(&home.path().join("a/finished"), fixtures::run().len());
        write_run(&home.path().join("a/killed"), 5);
        let running = write_run(&home.path().join("b/c/running"), 5);
        fs::create_dir_all(home.path().join("a/.data/x")).unwrap();
        let lock = RunLock::acquire(&running).unwrap();
        let runs = find_runs(home.path()).unwrap();
        let states: Vec<RecordedState> = runs.iter().map(|run| run.state).collect();
        assert_eq!(states, [RecordedState::Finished, RecordedState::Killed, RecordedState::Running]);
        assert_eq!((runs[1].summary.steps, runs[1].name()), (2, "shapes".into()));
        drop(lock);
        assert_eq!(RunRecord::read(&running.root).unwrap().state, RecordedState::Killed);
    }

    #[test]
    fn a_folder_that_is_no_run_says_what_it_is() {
        let home = tempfile::tempdir().unwrap();
        let read = |path: &Path| RunRecord::read(path).unwrap_err();
        assert!(matches!(read(&home.path().join("none")), HistoryError::Missing(_)));
        assert!(matches!(read(home.path()), HistoryError::Empty(_)));
        assert!(matches!(find_runs(home.path()), Err(HistoryError::NoRuns(_))));
        fs::write(home.path().join("job.toml"), "").unwrap();
        assert!(matches!(read(home.path()), HistoryError::NotARun(_)));
        assert!(matches!(find_runs(&home.path().join("job.toml")), Err(HistoryError::NotARun(_))));
        fs::create_dir(home.path().join("checkpoints")).unwrap();
        assert_eq!(read_steps(home.path()), 0, "a run before its first event");
    }

    fn read_steps(root: &Path) -> u64 {
        RunRecord::read(root).unwrap().summary.steps
    }

    /// A summary older than the events is of a run that was resumed since.
    #[test]
    fn a_summary_is_used_only_while_it_is_the_newest() {
        let home = tempfile::tempdir().unwrap();
        let folder = write_run(home.path(), fixtures::run().len());
        let mut summary = Summary::from_events(&folder.events()).unwrap();
        summary.steps = 1234;
        summary.write(&folder.summary()).unwrap();
        assert_eq!(read_steps(home.path()), 1234);
        let later = SystemTime::now() + std::time::Duration::from_secs(60);
        fs::File::options().append(true).open(folder.events()).unwrap().set_modified(later).unwrap();
        assert_eq!(read_steps(home.path()), 6);
    }
}
