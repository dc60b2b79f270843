//! What the tests share: the program in a folder, what it printed, what a run leaves in its directory, and child
//! processes. [`command`] starts the program.

use std::any::type_name_of_val;
use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The program: `TRAINER_BINARY`, or the one that cargo built.
pub fn program() -> PathBuf {
    std::env::var_os("TRAINER_BINARY").map_or(env!("CARGO_BIN_EXE_trainer").into(), PathBuf::from)
}

/// A published dataset in the folder that `TRAINER_DATA` names; it may be missing.
pub fn dataset(path: &str) -> PathBuf {
    std::env::var_os("TRAINER_DATA").map_or(root().join("../shared/data"), PathBuf::from).join(path)
}

/// Reports that this machine cannot run a test, or a part of it.
pub fn skip(why: impl Display) {
    eprintln!("skipped: {why}");
}

/// Fails if anything was found wrong, and says so past the capture of output: the summary of failures comes only at the
/// end of a log, which may be cut.
pub fn assert_nothing_wrong(wrong: &[String]) {
    if !wrong.is_empty() {
        let text = wrong.join("\n");
        let _ = writeln!(std::io::stderr(), "{text}");
        panic!("{text}");
    }
}

/// A temporary folder with a `job.toml`.
pub fn job_folder(job: impl AsRef<[u8]>) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.toml"), job).unwrap();
    folder
}

/// A job that trains in a moment: an MLP on generated images of 16 x 16 pixels. `keys` are lines of dotted TOML, such
/// as `train.steps = 30`, that add to its keys or replace them.
pub fn mlp_job(keys: &[&str]) -> String {
    const KEYS: [&str; 8] = [
        "model.kind = 'mlp'",
        "model.hidden = [16]",
        "data.kind = 'shapes'",
        "data.train_samples = 256",
        "data.valid_samples = 32",
        "data.image_size = 16",
        "train.batch_size = 16",
        "log.every_steps = 1",
    ];
    let key = |line: &str| line.split_once(" = ").expect("a line is `key = value`").0.to_owned();
    let mut lines = KEYS.to_vec();
    for line in keys {
        match lines.iter_mut().find(|other| key(other) == key(line)) {
            Some(other) => *other = line,
            None => lines.push(line),
        }
    }
    lines.join("\n")
}

/// The program in a folder, with the process part of plans fixed at 0 bytes: plans are the same in every process.
pub fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = measured_command(folder, args);
    command.env("TRAINER_PROCESS_BYTES", "0");
    command
}

/// [`command`] with all that a plan depends on fixed: plans are the same on every machine.
pub fn reproducible_command(folder: &Path, args: &[&str]) -> Command {
    let mut command = command(folder, args);
    command.envs([
        ("RAYON_NUM_THREADS", "2"),
        ("TRAINER_CPU_DISPATCH", "portable"),
        ("TRAINER_L2_BYTES", "2097152"),
    ]);
    command
}

/// The program in a folder as users start it, which measures the process part of its plan.
pub fn measured_command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args).current_dir(folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs [`command`] to its end.
pub fn trainer(folder: &Path, args: &[&str]) -> Finished {
    finish(&mut command(folder, args))
}

/// Runs a command to its end.
pub fn finish(command: &mut Command) -> Finished {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}")).into()
}

/// A process that ended, and what it printed.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { status: output.status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

impl Finished {
    /// `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Asserts the exit code, and that nothing panicked.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), Some(code), "{:?}\n{}", self.status, self.text());
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// Stdout and stderr.
    pub fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// The JSON document on stdout.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The JSON lines on stdout.
    #[track_caller]
    pub fn json_lines(&self) -> Vec<Value> {
        parse_lines(&self.stdout)
    }
}

#[track_caller]
fn parse_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// A command inside `sh -c SCRIPT ARG0`, where `"$@"` is the command; its environment and folder stay the same.
pub fn through_shell(script: &str, arg0: impl AsRef<Path>, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(arg0.as_ref()).arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.current_dir(command.get_current_dir().unwrap()).stdin(Stdio::null());
    shell
}

/// Runs a test in a process of its own: this program again, with that test alone. Returns false in that process. For
/// a test that measures the memory of its own process, in which others run at the same time.
#[track_caller]
pub fn ran_in_own_process(test: impl Fn()) -> bool {
    const ENV_VAR: &str = "TRAINER_TEST_ALONE";
    if std::env::var_os(ENV_VAR).is_some() {
        return false;
    }
    // The path of a function begins with the name of the crate, which the test's name does not.
    let name = type_name_of_val(&test).split_once("::").unwrap().1;
    let mut child = Command::new(std::env::current_exe().unwrap());
    let child = finish(child.args([name, "--exact", "--nocapture"]).env(ENV_VAR, "1").stdin(Stdio::null()));
    print!("{}", child.stdout);
    // A name that no test has is no failure either.
    assert!(child.status.success() && child.stdout.contains("1 passed"), "{name}: {}", child.text());
    true
}

/// Calls `work` with every item, on several threads; returns the results in the order of the items.
pub fn in_parallel<T: Sync, R: Send>(threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    let result = work(item);
                    results.lock().unwrap().push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The child processes of a process, if the system reports them.
pub fn children(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Whether a process runs; a zombie, whose parent may be slow to reap it, holds no memory.
pub fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// The events of a run.
#[track_caller]
pub fn events(run: &Path) -> Vec<Value> {
    parse_lines(&fs::read_to_string(run.join("events.jsonl")).unwrap())
}

/// The events of a run that has not begun, is running, was killed or is damaged: only the lines that are events.
pub fn events_so_far(run: &Path) -> Vec<Value> {
    let text = fs::read(run.join("events.jsonl")).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

pub fn named<'a>(events: &'a [Value], name: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["event"] == name).collect()
}

/// The last event of this name.
#[track_caller]
pub fn last<'a>(events: &'a [Value], name: &str) -> &'a Value {
    events.iter().rfind(|event| event["event"] == name).unwrap_or_else(|| panic!("no event `{name}`"))
}

/// The loss of every step.
pub fn losses(events: &[Value]) -> Vec<f64> {
    named(events, "step").iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[track_caller]
pub fn read_json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The sorted names in a folder.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn newest_checkpoint(run: &Path) -> PathBuf {
    let checkpoints = run.join("checkpoints");
    checkpoints.join(names(&checkpoints).last().expect("there is a checkpoint"))
}

/// The tensor files of the newest checkpoint, by name.
pub fn tensors(run: &Path) -> Vec<(String, Vec<u8>)> {
    let newest = newest_checkpoint(run);
    let files = names(&newest).into_iter().filter(|name| name.ends_with(".safetensors"));
    files.map(|name| (name.clone(), fs::read(newest.join(name)).unwrap())).collect()
}

/// What no disturbance may change: the last checkpoint's tensors, the metrics and the samples seen.
pub struct FinalState {
    pub tensors: Vec<(String, Vec<u8>)>,
    pub metrics: Value,
    /// Step and value of the best checkpoint.
    pub best: Value,
    pub samples_digest: Value,
}

impl FinalState {
    /// Of a run whose last event is `finished`.
    #[track_caller]
    pub fn of(run: &Path) -> Self {
        let events = events(run);
        let end = events.last().expect("the run has events");
        assert_eq!(end["event"], "finished", "{end}");
        let [metrics, samples_digest] = ["metrics", "samples_digest"].map(|key| end[key].clone());
        let best = ["step", "value"].map(|key| end["best"][key].clone()).to_vec().into();
        Self { tensors: tensors(run), metrics, best, samples_digest }
    }

    /// What differs, if anything.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let values = |state: &Self| {
            Value::from([&state.metrics, &state.best, &state.samples_digest].map(Clone::clone).to_vec())
        };
        let files =
            |state: &Self| -> Vec<String> { state.tensors.iter().map(|file| file.0.clone()).collect() };
        if values(self) != values(other) {
            return Some(format!(
                "metrics, best checkpoint and samples: {} and {}",
                values(self),
                values(other)
            ));
        }
        if files(self) != files(other) {
            return Some(format!("tensor files: {:?} and {:?}", files(self), files(other)));
        }
        let unlike = self.tensors.iter().zip(&other.tensors).find(|(a, b)| a != b);
        unlike.map(|(file, _)| format!("the bytes of {}", file.0))
    }

    #[track_caller]
    pub fn assert_same(&self, other: &Self) {
        assert_eq!(self.difference(other), None);
    }
}

/// Compares a text with a file of the repository; `TRAINER_UPDATE_SNAPSHOTS` rewrites the file.
#[track_caller]
pub fn assert_snapshot(path: &Path, text: &str) {
    if std::env::var_os("TRAINER_UPDATE_SNAPSHOTS").is_some() {
        fs::write(path, text).unwrap();
    }
    let expected = fs::read_to_string(path).unwrap_or_default();
    let path = path.display();
    assert!(text == expected, "{path} differs\n=== expected\n{expected}\n=== seen\n{text}");
}

/// A file system of this size on a folder, until it is dropped.
#[cfg(target_os = "linux")]
pub struct SmallDisk(PathBuf);

#[cfg(target_os = "linux")]
impl SmallDisk {
    /// `None` if the machine does not let us mount one.
    pub fn mount(folder: &Path, size: &str) -> Option<Self> {
        fs::create_dir(folder).unwrap();
        let option = format!("size={size}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &option, "tmpfs"]).arg(folder).status();
        let disk = mounted.is_ok_and(|status| status.success()).then(|| Self(folder.to_owned()));
        if disk.is_none() {
            skip("a small file system can be mounted by root only");
        }
        disk
    }
}

#[cfg(target_os = "linux")]
impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(&self.0).status());
    }
}

/// Writes files, each a path below `folder` and its bytes.
pub fn write_files(folder: &Path, files: &[(String, Vec<u8>)]) {
    for (name, bytes) in files {
        fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
        fs::write(folder.join(name), bytes).unwrap();
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

/// An archive of these files, each a path and its bytes.
pub fn tar<'a>(files: impl IntoIterator<Item = &'a (String, Vec<u8>)>) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, bytes) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, path, &bytes[..]).unwrap();
    }
    archive.into_inner().unwrap()
}
