//! Drives the program: one run in a process of its own, observed from outside.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::{self, children, events_so_far, finish, is_alive, measured_command, named};
use crate::random::generate::Scale;

/// Where and with what to run jobs.
#[derive(Clone, Debug)]
pub struct Runner {
    /// `cpu` or `cuda`.
    pub device: String,
    pub scale: Scale,
    /// Device memory budget per job, in bytes; its part of the GPU if several run in parallel.
    pub vram: u64,
    /// A run that takes longer hangs: jobs are sized for seconds, on a machine that may be busy.
    pub timeout: Duration,
    /// A fault for every run, as `(NAME, VALUE)` in its environment: proves that a check can fail.
    pub fault_env: Option<(&'static str, String)>,
}

impl Runner {
    pub fn from_env() -> Self {
        let device = std::env::var("TRAINER_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
        let scale = if device == "cpu" { Scale::Small } else { Scale::Large };
        Self { device, scale, vram: 20 << 30, timeout: Duration::from_secs(900), fault_env: None }
    }

    pub fn on_gpu(&self) -> bool {
        self.device != "cpu"
    }

    fn command(&self, job: &JobDir, args: &[&str]) -> Command {
        let mut command = measured_command(&job.folder, args);
        command.args(["--device", &self.device]);
        command.args(job.overrides.iter().flat_map(|set| ["--set", set]));
        command.env("RAYON_NUM_THREADS", job.threads.to_string());
        command
    }

    pub fn processors(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// `trainer plan --json`, or the exit code and stderr.
    pub fn plan(&self, job: &JobDir) -> Result<Value, (Option<i32>, String)> {
        let done = finish(&mut self.command(job, &["plan", "job.toml", "--json"]));
        let plan = serde_json::from_str(&done.stdout).ok().filter(|plan: &Value| plan["verdict"].is_string());
        plan.ok_or_else(|| (done.code(), done.text()))
    }

    /// Trains a job, or resumes it.
    pub fn fit(&self, job: &JobDir, run: &str, how: &FitOptions) -> ProcessResult {
        let root = job.folder.join(run);
        let log_path = |kind: &str| job.folder.join(format!("{run}.{kind}"));
        let mut args = vec!["fit", "job.toml", "-q", "--run-dir", run];
        args.extend(how.resume.then_some("--resume"));
        args.extend(how.reference.then_some("--backend=reference"));
        let mut command = self.command(job, &args);
        command
            .stdout(File::create(log_path("stdout")).unwrap())
            .stderr(File::create(log_path("stderr")).unwrap());
        command.envs(self.fault_env.clone());
        command.envs(how.kill_worker_at.map(|step| ("TRAINER_FAULT_CRASH", format!("kill:{step}"))));
        let begun = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let (mut resident, mut hung) = (0, false);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            let processes = [&[child.id()], &children(child.id())[..]].concat();
            resident = processes.iter().map(|pid| peak_resident_bytes(*pid)).fold(resident, u64::max);
            hung = begun.elapsed() > self.timeout;
            if hung || how.kill_supervisor_at.is_some_and(|step| last_step(&root) >= step) {
                child.kill().unwrap();
                let status = child.wait().unwrap();
                // The worker dies shortly after its supervisor.
                while processes.iter().any(|pid| is_alive(*pid)) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                break status;
            }
            std::thread::sleep(Duration::from_millis(4));
        };
        let stderr = fs::read(log_path("stderr")).unwrap_or_default();
        ProcessResult {
            root,
            code: status.code(),
            timed_out: hung,
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
            resident,
            seconds: begun.elapsed().as_secs_f64(),
        }
    }
}

/// A job in its folder, with its overrides.
#[derive(Clone, Debug)]
pub struct JobDir {
    pub folder: PathBuf,
    pub overrides: Vec<String>,
    pub threads: usize,
}

impl JobDir {
    pub fn set(&self, set: String) -> Self {
        Self { overrides: self.overrides.iter().cloned().chain([set]).collect(), ..self.clone() }
    }
}

/// What to do to a run.
#[derive(Clone, Debug, Default)]
pub struct FitOptions {
    pub resume: bool,
    /// On candle's own operations.
    pub reference: bool,
    /// The worker kills itself before the update after this step.
    pub kill_worker_at: Option<u64>,
    /// The started process is killed from outside once this step was made.
    pub kill_supervisor_at: Option<u64>,
}

/// A run that ended.
pub struct ProcessResult {
    pub root: PathBuf,
    /// `None` if a signal ended it.
    pub code: Option<i32>,
    pub timed_out: bool,
    pub stderr: String,
    /// Peak resident bytes sampled over its processes; misses the last milliseconds.
    pub resident: u64,
    pub seconds: f64,
}

impl ProcessResult {
    /// The run's events, in order; ignores a torn last line.
    pub fn events(&self) -> Vec<Value> {
        events_so_far(&self.root)
    }

    /// The tensor files of the newest checkpoint, by name; none if there is no checkpoint.
    pub fn tensors(&self) -> Vec<(String, Vec<u8>)> {
        let checkpoints = fs::read_dir(self.root.join("checkpoints")).into_iter().flatten().count();
        if checkpoints > 0 { harness::tensors(&self.root) } else { Vec::new() }
    }

    /// Folders beside the complete checkpoints.
    pub fn leftovers(&self) -> Vec<String> {
        let folders = fs::read_dir(self.root.join("checkpoints")).into_iter().flatten().flatten();
        let halves = folders.filter(|folder| !folder.path().join("DONE").exists());
        halves.map(|folder| folder.file_name().to_string_lossy().into_owned()).collect()
    }
}

/// Peak resident bytes of a process so far. Until a child has called `exec`, its memory is a copy of this process.
fn peak_resident_bytes(pid: u32) -> u64 {
    let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    if program(&pid.to_string()) == program("self") {
        return 0;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// The last step that a run reported.
fn last_step(root: &Path) -> u64 {
    named(&events_so_far(root), "step").iter().filter_map(|event| event["step"].as_u64()).max().unwrap_or(0)
}
