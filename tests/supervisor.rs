//! The supervisor through the binary: a worker that is killed or aborts is replaced, signals count once, and no
//! process is left behind. In a memory cgroup, if the machine allows one: the run survives the kernel's own OOM kill.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;

use crate::harness::{
    Finished, children, command, events_so_far, finish, is_alive, job_folder, measured_command, mlp_job,
    named, read_json, skip, tensors, through_shell, trainer,
};

fn job() -> String {
    mlp_job(&[
        "seed = 7",
        "model.dropout = 0.1",
        "train.steps = 30",
        "checkpoint.every_steps = 5",
        "eval.every_steps = 10",
    ])
}

fn fit(folder: &Path, args: &[&str]) -> Command {
    command(folder, &[&["fit", "job.toml", "--run-dir", "run"], args].concat())
}

/// The events of a run that may be in progress.
fn events_named(folder: &Path, name: &str) -> Vec<Value> {
    named(&events_so_far(&folder.join("run")), name).into_iter().cloned().collect()
}

fn digest(folder: &Path) -> Value {
    events_named(folder, "finished").last().expect("the run finished")["samples_digest"].clone()
}

fn reference_digest() -> Value {
    let folder = job_folder(job());
    finish(&mut fit(folder.path(), &["-q"])).expect(0);
    digest(folder.path())
}

#[test]
fn a_worker_that_is_lost_is_replaced_from_the_newest_checkpoint() {
    let reference = job_folder(job());
    finish(&mut fit(reference.path(), &["-q"])).expect(0);
    for (how, from, said, memory) in [
        ("kill:12", 10, "killed, not by the kernel's memory killer but by `kill -9`", false),
        ("alloc:22", 20, "aborted (an allocation failed)", true),
        ("kill:3", 0, "killed", false),
    ] {
        let folder = job_folder(job());
        let text = finish(fit(folder.path(), &[]).env("TRAINER_FAULT_CRASH", how)).expect(0).stderr;
        let restarted = events_named(folder.path(), "restarted");
        assert_eq!((restarted.len(), &restarted[0]["restarts"]), (1, &1.into()), "{how}");
        assert_eq!(events_named(folder.path(), "resumed")[0]["step"], from, "{how}");
        assert_eq!(digest(folder.path()), digest(reference.path()), "{how}: nothing lost, nothing repeated");
        let plans = events_named(folder.path(), "planned");
        let peak = |i: usize| plans[i]["plan"]["peak"]["ram_bytes"].as_u64().unwrap();
        assert_eq!(peak(1) < peak(0), memory, "{how}: {} after {}", peak(1), peak(0));
        if !memory {
            assert_eq!(plans[1]["plan"]["chosen"], plans[0]["plan"]["chosen"], "{how}: the same plan");
            let tensors = |folder: &Path| tensors(&folder.join("run"));
            assert!(tensors(folder.path()) == tensors(reference.path()), "{how}: the same to the bit");
        }
        assert!(text.contains(said) && text.contains("restarted 1 x"), "{text}");
        let kept = read_json(&folder.path().join("run/summary.json"));
        assert_eq!((&kept["restarts"], &kept["state"]), (&1.into(), &"finished".into()));
    }
}

#[test]
fn workers_that_make_no_progress_are_given_up_with_a_post_mortem() {
    let folder = job_folder(job());
    let mut command = fit(folder.path(), &["--set", "memory.max_retries=2", "--json"]);
    let text = finish(command.env("TRAINER_FAULT_CRASH", "alloc:7,kill:7,alloc:6,kill:8")).expect(3).stderr;
    assert!(text.contains("error: the run's process ended 3 times for lack of memory"), "{text}");
    assert!(text.contains("hint:"), "{text}");
    let post = read_json(&folder.path().join("run/oom.json"));
    assert_eq!(post["deaths"].as_array().unwrap().len(), 3);
    assert!(!post["live"].as_array().unwrap().is_empty());
    assert_eq!(events_named(folder.path(), "failed").len(), 1);
    // With more memory, the run resumes from there.
    finish(&mut fit(folder.path(), &["-q", "--resume"])).expect(0);
    assert_eq!(digest(folder.path()), reference_digest());
}

#[test]
fn a_worker_that_is_killed_again_and_again_did_not_lack_memory() {
    let folder = job_folder(job());
    let mut command = fit(folder.path(), &["--set", "memory.max_retries=1"]);
    let text = finish(command.env("TRAINER_FAULT_CRASH", "kill:7,kill:7")).expect(137).stderr;
    assert!(text.contains("ended by SIGKILL, 2 times without progress"), "{text}");
    assert!(text.contains("not a lack of memory") && !folder.path().join("run/oom.json").exists(), "{text}");
    assert_eq!(events_named(folder.path(), "failed").len(), 1);
}

#[test]
fn an_abort_or_an_overflow_of_the_stack_is_no_lack_of_memory() {
    for how in ["abort:7", "overflow:7"] {
        let folder = job_folder(job());
        let text = finish(fit(folder.path(), &[]).env("TRAINER_FAULT_CRASH", how)).expect(134).stderr;
        assert!(text.contains("ended by SIGABRT") && text.contains("not a lack of memory"), "{text}");
        assert_eq!(events_named(folder.path(), "restarted").len(), 0, "{how}");
        assert_eq!(events_named(folder.path(), "failed").len(), 1, "{how}");
        finish(&mut fit(folder.path(), &["-q", "--resume"])).expect(0);
    }
}

#[test]
fn progress_renews_the_retries() {
    let folder = job_folder(job());
    let mut command = fit(folder.path(), &["-q", "--set", "memory.max_retries=1"]);
    finish(command.env("TRAINER_FAULT_CRASH", "kill:6,kill:11,kill:16")).expect(0);
    assert_eq!(events_named(folder.path(), "restarted").len(), 3);
}

#[test]
fn without_a_supervisor_a_kill_is_a_kill() {
    let folder = job_folder(job());
    let mut command = fit(folder.path(), &["--set", "memory.supervise=false"]);
    assert_eq!(finish(command.env("TRAINER_FAULT_CRASH", "kill:6")).status.signal(), Some(9));
}

#[test]
fn exit_codes_pass_through() {
    let folder = job_folder(job());
    finish(&mut fit(folder.path(), &["--set", "memory.ram=1MiB"])).expect(3);
    let wild = ["--set", "optimizer.lr=1e30", "--set", "optimizer.weight_decay=1e30"];
    finish(&mut fit(folder.path(), &wild)).expect(5);
    finish(&mut fit(folder.path(), &[])).expect(2);
}

/// A run that would not end by itself, after it has made some updates.
fn start_endless_run(folder: &Path) -> Child {
    // Tests started by `nohup` ignore SIGHUP, and their children would too. A signal that is handled here is reset to
    // its default by exec, not ignored.
    static HEARD: AtomicBool = AtomicBool::new(false);
    signal_hook::flag::register(signal_hook::consts::SIGHUP, &HEARD).unwrap();
    let mut command = fit(folder, &["-q", "--set", "train.steps=1000000"]);
    let child = command.process_group(0).spawn().unwrap();
    while events_named(folder, "step").len() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

#[test]
fn a_signal_to_the_supervisor_or_to_all_stops_the_run_once() {
    for (signal, code, name) in
        [(Signal::INT, 130, "SIGINT"), (Signal::TERM, 143, "SIGTERM"), (Signal::HUP, 143, "SIGTERM")]
    {
        for all in [false, true] {
            let folder = job_folder(job());
            let child = start_endless_run(folder.path());
            match all {
                true => kill_process_group(Pid::from_child(&child), signal).unwrap(),
                false => kill_process(Pid::from_child(&child), signal).unwrap(),
            }
            Finished::from(child.wait_with_output().unwrap()).expect(code);
            let stopped = events_named(folder.path(), "interrupted");
            assert_eq!((stopped.len(), &stopped[0]["signal"]), (1, &name.into()));
            let step = stopped[0]["step"].as_u64().unwrap();
            assert!(folder.path().join(format!("run/checkpoints/step-{step:08}/DONE")).exists());
            assert_eq!(events_named(folder.path(), "restarted").len(), 0);
        }
    }
}

#[test]
fn a_killed_supervisor_takes_its_worker_along() {
    let folder = job_folder(job());
    let mut child = start_endless_run(folder.path());
    let worker = children(child.id())[0];
    child.kill().unwrap();
    child.wait().unwrap();
    // The orphan may take a moment to exit.
    while is_alive(worker) {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_budget_is_lowered_by_memory_that_was_not_reserved() {
    let folder = job_folder(job());
    let plan = trainer(folder.path(), &["plan", "job.toml", "--ram", "1GiB", "--json"]).json();
    let needs = plan["peak"]["ram_bytes"].as_u64().unwrap();
    let mut command = fit(folder.path(), &["--set", &format!("memory.ram={}B", needs + (1 << 20))]);
    let text = finish(command.env("TRAINER_FAULT_UNRESERVED", "32MiB")).expect(0).stderr;
    let corrected = events_named(folder.path(), "corrected");
    let of = |key: &str| corrected[0][key].as_u64().unwrap();
    assert!(of("measured") > of("reserved") + (16 << 20), "{corrected:?}");
    assert!(of("budget") < needs, "{corrected:?}");
    assert!(!events_named(folder.path(), "shrunk").is_empty(), "the plan in force shrinks");
    assert_eq!(digest(folder.path()), reference_digest());
    assert!(text.contains("the budget is"), "{text}");
}

/// A memory cgroup of this test's own, version 1 or 2; removed on drop.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    /// `None` if the machine does not let us make one.
    fn new(name: &str, limit: u64) -> Option<Self> {
        let name = format!("trainer-{name}-{}", std::process::id());
        let parents = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        for (parent, file) in parents {
            let group = MemoryCgroup(Path::new(parent).join(&name));
            if Path::new(parent).join("cgroup.procs").exists() && fs::create_dir(&group.0).is_ok() {
                // Swap would postpone the limit; a kernel that does not account for it has no such file.
                let _ = fs::write(group.0.join("memory.swap.max"), "0");
                if group.0.join(file).exists() && fs::write(group.0.join(file), limit.to_string()).is_ok() {
                    return Some(group);
                }
            }
        }
        skip("a memory cgroup can be made by root only, and where there is one");
        None
    }

    /// Runs a command inside the cgroup.
    fn run(&self, command: &Command) -> Finished {
        let procs = self.0.join("cgroup.procs");
        finish(&mut through_shell("echo $$ > \"$0\" && exec \"$@\"", procs, command))
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // The kernel releases the last process a moment after it was reaped.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Takes some 150 MiB as written, and little time.
fn large_job() -> String {
    mlp_job(&[
        "model.hidden = [64]",
        "data.train_samples = 16384",
        "data.image_size = 28",
        "data.prefetch = '1MiB'",
        "train.batch_size = 16384",
        "train.steps = 4",
    ])
}

#[test]
fn a_run_finishes_in_a_group_smaller_than_it_would_like() {
    let Some(group) = MemoryCgroup::new("small", 96 << 20) else { return };
    let folder = job_folder(large_job());
    group.run(&fit(folder.path(), &[])).expect(0);
    let plan = &events_named(folder.path(), "planned")[0]["plan"];
    assert_eq!(plan["verdict"], "fits_after_shrink", "{plan}");
    assert!(plan["budget"]["ram_bytes"].as_u64().unwrap() < 96 << 20);
    assert_eq!(events_named(folder.path(), "finished")[0]["samples"], 4 * 16384);
}

#[test]
fn the_kernels_kill_is_survived() {
    let Some(group) = MemoryCgroup::new("kill", 96 << 20) else { return };
    let folder = job_folder(large_job());
    // The plan fills the cgroup, and these bytes come on top of it.
    group
        .run(fit(folder.path(), &["--set", "memory.headroom=0B"]).env("TRAINER_FAULT_UNRESERVED", "40MiB"))
        .expect(0);
    let restarted = events_named(folder.path(), "restarted");
    assert!(!restarted.is_empty());
    assert!(restarted[0]["cause"].as_str().unwrap().starts_with("killed"), "{restarted:?}");
    assert_eq!(events_named(folder.path(), "finished")[0]["samples"], 4 * 16384);
    println!("restarted {} times: {}", restarted.len(), restarted[0]["cause"]);
}

/// With a limit on address space, an allocation fails and aborts the process.
#[test]
fn a_failed_allocation_is_survived() {
    let folder = job_folder(large_job());
    let sets = ["--set", "memory.headroom=0B", "--set", "data.workers=1"];
    let fit = [&["fit", "job.toml", "--run-dir", "run"], &sets[..]].concat();
    let mut command = measured_command(folder.path(), &fit);
    // The plan is well within the limit; with these bytes on top it is not.
    command.env("RAYON_NUM_THREADS", "1").env("TRAINER_FAULT_UNRESERVED", "400MiB");
    finish(&mut through_shell("ulimit -v 560000 && exec \"$@\"", "sh", &command)).expect(0);
    let restarted = events_named(folder.path(), "restarted");
    assert!(!restarted.is_empty());
    assert_eq!(restarted[0]["cause"], "aborted (an allocation failed)");
    assert_eq!(events_named(folder.path(), "finished")[0]["samples"], 4 * 16384);
}

/// More threads than machines have cores would be started one by one for minutes.
#[test]
fn an_absurd_number_of_threads_is_refused() {
    let folder = job_folder(large_job());
    let mut command = measured_command(folder.path(), &["fit", "job.toml", "--run-dir", "run"]);
    let refused = finish(command.env("RAYON_NUM_THREADS", "999999")).expect(2);
    assert!(
        refused.stderr.contains("RAYON_NUM_THREADS is 999999, expected at most 4096"),
        "{}",
        refused.stderr
    );
}
