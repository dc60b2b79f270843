//! Drives the program: one run in a process of its own, observed from outside.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::generate::Scale;

/// Where and with what to run jobs.
#[derive(Clone, Debug)]
pub struct Runner {
    pub program: PathBuf,
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
        let program =
            std::env::var_os("TRAINER_BINARY").map_or(env!("CARGO_BIN_EXE_trainer").into(), PathBuf::from);
        let device = std::env::var("TRAINER_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
        let scale = if device == "cpu" { Scale::Small } else { Scale::Large };
        Self { program, device, scale, vram: 20 << 30, timeout: Duration::from_secs(900), fault_env: None }
    }

    pub fn on_gpu(&self) -> bool {
        self.device != "cpu"
    }

    fn command(&self, job: &JobDir, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).args(["--device", &self.device]).current_dir(&job.folder).stdin(Stdio::null());
        command.args(job.overrides.iter().flat_map(|set| ["--set", set]));
        command.env("RAYON_NUM_THREADS", job.threads.to_string());
        command
    }

    pub fn processors(&self) -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// `trainer plan --json`, or the exit code and stderr.
    pub fn plan(&self, job: &JobDir) -> Result<Value, (Option<i32>, String)> {
        let output =
            self.command(job, &["plan", "job.toml", "--json"]).output().map_err(|e| (None, e.to_string()))?;
        let plan =
            serde_json::from_slice(&output.stdout).ok().filter(|plan: &Value| plan["verdict"].is_string());
        let said = || String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        plan.ok_or_else(|| (output.status.code(), said()))
    }

    /// Trains a job, or resumes it.
    pub fn fit(&self, job: &JobDir, run: &str, how: &FitOptions) -> ProcessResult {
        let root = job.folder.join(run);
        let log_path = |kind: &str| job.folder.join(format!("{run}.{kind}"));
        let mut args = vec!["fit", "job.toml", "-q", "--run-dir", run];
        args.extend(how.resume.then_some("--resume"));
        let mut command = self.command(job, &args);
        command
            .stdout(File::create(log_path("stdout")).unwrap())
            .stderr(File::create(log_path("stderr")).unwrap());
        command.envs(self.fault_env.clone());
        command.envs(how.kill_worker_at.map(|step| ("TRAINER_FAULT_DIE", format!("kill:{step}"))));
        let begun = Instant::now();
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{}: {e}", self.program.display()));
        let (mut resident, mut hung) = (0, false);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            let processes = process_tree(&child);
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
        let text = fs::read_to_string(self.root.join("events.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The tensor files of the newest checkpoint, by name.
    pub fn tensors(&self) -> Vec<(String, Vec<u8>)> {
        let folders = fs::read_dir(self.root.join("checkpoints")).into_iter().flatten().flatten();
        let Some(newest) = folders.map(|f| f.path()).filter(|f| f.join("DONE").exists() || f.is_dir()).max()
        else {
            return Vec::new();
        };
        let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(newest)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|file| file.path().extension().is_some_and(|e| e == "safetensors"))
            .map(|file| {
                (file.file_name().to_string_lossy().into_owned(), fs::read(file.path()).unwrap_or_default())
            })
            .collect();
        files.sort();
        files
    }

    /// Folders beside the complete checkpoints.
    pub fn leftovers(&self) -> Vec<String> {
        let folders = fs::read_dir(self.root.join("checkpoints")).into_iter().flatten().flatten();
        let halves = folders.filter(|folder| !folder.path().join("DONE").exists());
        halves.map(|folder| folder.file_name().to_string_lossy().into_owned()).collect()
    }
}

/// A process and its children, if the system reports them.
fn process_tree(child: &Child) -> Vec<u32> {
    let id = child.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    [id].into_iter().chain(children.split_whitespace().filter_map(|id| id.parse().ok())).collect()
}

/// Peak resident bytes of a process so far.
fn peak_resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses; a zombie holds no memory.
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with('Z'))
}

/// The last step that a run reported.
fn last_step(root: &Path) -> u64 {
    let text = fs::read_to_string(root.join("events.jsonl")).unwrap_or_default();
    let steps = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    steps
        .filter(|event| event["event"] == "step")
        .filter_map(|event| event["step"].as_u64())
        .max()
        .unwrap_or(0)
}
