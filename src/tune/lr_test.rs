//! Runs a learning-rate range test: the job itself in a child process, with a rate that grows until the loss diverges.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::child::ChildOptions;
use super::lr_range::{LrCurve, curve};
use super::sweep::last_error;
use crate::events::event::{Event, EventRecord};
use crate::events::jsonl::{LineFile, complete_lines};
use crate::job::{Job, JobErrors};
use crate::train::Failure;
use crate::train::run_dir::{RunDir, write_atomic};
use crate::train::signals::{Signal, Signals};

/// The rates and the length of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrTest {
    pub low: f64,
    pub high: f64,
    pub updates: u64,
}

/// Files of a test.
#[derive(Clone, Debug)]
pub struct LrFolder {
    pub root: PathBuf,
}

/// How a test ended.
#[derive(Clone, Debug, PartialEq)]
pub enum LrEnd {
    Curve(LrCurve),
    Stopped(Signal),
    /// The exit code of the run, and its error.
    Failed {
        code: i32,
        error: String,
    },
}

const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl LrFolder {
    /// One line per update: step, rate, loss, smoothed loss.
    pub fn curve_file(&self) -> PathBuf {
        self.root.join("lr.jsonl")
    }

    pub fn chart_file(&self) -> PathBuf {
        self.root.join("lr.txt")
    }

    pub fn svg_file(&self) -> PathBuf {
        self.root.join("lr.svg")
    }

    fn job(&self) -> PathBuf {
        self.root.join("lr.toml")
    }

    fn log(&self) -> PathBuf {
        self.root.join("lr.log")
    }

    fn run(&self) -> RunDir {
        RunDir::new(self.root.join("run"))
    }
}

impl LrTest {
    /// The job as the test runs it: its own data, model and optimizer, and no work besides updates.
    pub fn job(&self, path: &Path, sets: &[String]) -> Result<Job, JobErrors> {
        let own = [
            format!("optimizer.lr={:?}", self.high),
            format!(
                "schedule={{ kind = \"exponential\", initial_lr_ratio = {:?}, final_lr_ratio = 1.0 }}",
                self.low / self.high
            ),
            format!("train.steps={}", self.updates),
            "log={ every_steps = 1, tensorboard = false }".into(),
            "eval.every_steps=1000000000".into(),
            "eval.at_start=false".into(),
            "checkpoint.every_steps=1000000000".into(),
            "stop={}".into(),
        ];
        Job::load(path, &sets.iter().cloned().chain(own).collect::<Vec<_>>())
    }

    /// Runs the job of this test in `folder`, which holds the curve afterwards.
    pub fn run(
        &self,
        job: &Job,
        folder: &LrFolder,
        child: &ChildOptions,
        signals: &Signals,
        mut on_progress: impl FnMut(&LrCurve),
    ) -> Result<LrEnd, Failure> {
        write_atomic(&folder.job(), job.to_toml().as_bytes())?;
        let mut process = child.start(&folder.job(), &folder.run(), self.updates, &folder.log())?;
        let (mut stopped, mut diverged) = (None, false);
        let code = loop {
            if let Some(code) = process.exit_code()? {
                break code;
            }
            if let Some(signal) = signals.stop_requested().filter(|_| stopped.is_none()) {
                stopped = Some(signal);
                process.stop(signal);
            }
            let curve = read_curve(&folder.run())?;
            on_progress(&curve);
            if curve.diverged && !diverged {
                diverged = true;
                process.stop(Signal::Terminate);
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        if let Some(signal) = stopped {
            return Ok(LrEnd::Stopped(signal));
        }
        const DIVERGED: i32 = 5;
        let mut curve = read_curve(&folder.run())?;
        // An update whose loss is not finite has no event of its own.
        curve.diverged |= code == DIVERGED;
        if code != 0 && !curve.diverged {
            return Ok(LrEnd::Failed { code, error: last_error(&folder.log(), code) });
        }
        let write = || {
            let mut file = LineFile::open(&folder.curve_file())?;
            curve.points.iter().try_for_each(|point| file.append(point))
        };
        write().map_err(Failure::io("write", folder.curve_file()))?;
        // Weights trained at every rate are of no use, and may be large.
        let checkpoints = folder.run().checkpoints();
        std::fs::remove_dir_all(&checkpoints).map_err(Failure::io("remove", checkpoints))?;
        Ok(LrEnd::Curve(curve))
    }
}

/// The curve of a run so far.
fn read_curve(run: &RunDir) -> Result<LrCurve, Failure> {
    if !run.events().exists() {
        return Ok(LrCurve::default());
    }
    let failed = || Failure::io("read", run.events());
    let mut updates = Vec::new();
    for line in complete_lines(&run.events()).map_err(failed())? {
        match serde_json::from_str::<EventRecord>(&line.map_err(failed())?).map(|record| record.event) {
            Ok(Event::Step { step, lr, loss, .. }) => updates.push((step, lr, loss)),
            // The process was replaced: it repeats these updates.
            Ok(Event::Resumed { step, .. }) => updates.retain(|(done, ..)| *done <= step),
            _ => {}
        }
    }
    Ok(curve(updates))
}
