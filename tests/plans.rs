//! Plans through the binary: the advice fits, a lock holds, and a GPU that is not here can be planned for.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::{Finished, command, finish, job_folder, names};

const JOB: &str = "\
[model]
kind = \"mlp\"
hidden = [64, 64, 64]

[data]
kind = \"shapes\"
image_size = 16
train_samples = 64
valid_samples = 16

[train]
batch_size = 32
steps = 3
";

/// A plan depends on the number of threads.
fn trainer(folder: &Path, args: &[&str]) -> Finished {
    finish(command(folder, args).env("RAYON_NUM_THREADS", "2"))
}

/// The plan and the exit code.
fn plan(folder: &Path, args: &[&str]) -> (Value, i32) {
    let done = trainer(folder, &[&["plan", "job.toml", "--json"], args].concat());
    (done.json(), done.code().unwrap())
}

/// The `key = value` pairs of an advice, as `--set` arguments.
fn sets(advice: &str) -> Vec<String> {
    let quoted = advice.split('`').skip(1).step_by(2).filter(|text| text.contains(" = "));
    quoted.flat_map(|text| ["--set".to_owned(), text.replacen(" = ", "=", 1)]).collect()
}

fn bytes(plan: &Value, path: &str) -> u64 {
    plan.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {plan}"))
}

/// A micro-batch has no more samples than there are, and the plan counts no more.
#[test]
fn a_batch_larger_than_its_samples_takes_no_more_than_they_do() {
    let folder = job_folder(JOB);
    let needs = |batch: &str, accumulation: &str| {
        let sets = [batch, accumulation].map(|set| ["--set".to_owned(), set.to_owned()]).concat();
        let args: Vec<&str> = ["--ram", "1GiB"].into_iter().chain(sets.iter().map(String::as_str)).collect();
        let (plan, code) = plan(folder.path(), &args);
        assert_eq!(code, 0, "{plan}");
        bytes(&plan, "/peak/ram_bytes")
    };
    let all = needs("train.batch_size=64", "train.accumulation_steps=1");
    for (batch, accumulation) in [(1000, 1), (1_000_000, 1), (1 << 20, 1024)] {
        let more =
            needs(&format!("train.batch_size={batch}"), &format!("train.accumulation_steps={accumulation}"));
        assert!(more.abs_diff(all) <= all / 100, "{more} for {batch}, {accumulation} times, {all} for 64");
    }
}

/// On the CPU, for budgets from nothing to enough: the plan fits, or its advice does once applied.
#[test]
fn what_is_advised_fits_when_it_is_applied() {
    let folder = job_folder(JOB);
    let path = folder.path();
    let (ample, code) = plan(path, &["--ram", "1GiB"]);
    assert_eq!((ample["verdict"].as_str(), code), (Some("fits"), 0));
    let needs = bytes(&ample, "/peak/ram_bytes");
    let forbid: [&[&str]; 3] = [
        &[],
        &["--set", "memory.on_oom=[]"],
        &["--set", "memory.on_oom=[\"recompute\"]", "--set", "eval.batch_size=4096"],
    ];
    let mut advised = 0;
    for forbidden in forbid {
        for part in [1, 40, 92, 99] {
            let ram = format!("memory.ram={}B", needs * part / 100);
            let args = [&["--set", &ram], forbidden].concat();
            let (first, code) = plan(path, &args);
            if code == 0 {
                continue;
            }
            assert_eq!((first["verdict"].as_str(), code), (Some("does_not_fit"), 3));
            let advice = first["advice"].as_str().unwrap();
            let sets = sets(advice);
            assert!(!sets.is_empty(), "{advice}");
            let args: Vec<&str> = args.into_iter().chain(sets.iter().map(String::as_str)).collect();
            let (then, code) = plan(path, &args);
            assert_eq!(code, 0, "{advice}: {}", then["advice"]);
            advised += 1;
        }
    }
    assert!(advised >= 6, "only {advised} plans did not fit");
}

/// A GPU that is not here: device and host memory are separate and both checked, and the host takes what does not
/// fit.
#[test]
fn a_gpu_that_is_not_here_is_planned_for() {
    let folder = job_folder(JOB);
    let path = folder.path();
    let (whole, code) = plan(path, &["--vram", "1GiB", "--ram", "1GiB"]);
    assert_eq!((code, whole["device"].as_str()), (0, Some("cuda")));
    let needs = bytes(&whole, "/peak/vram_bytes");
    let sum = |place: &str| -> u64 {
        let parts = whole["parts"].as_array().unwrap().iter().filter(|part| part["where"] == place);
        parts.map(|part| part["bytes"].as_u64().unwrap()).sum()
    };
    assert_eq!(sum("vram"), needs, "the parts are the peak");
    assert_eq!(sum("ram"), bytes(&whole, "/peak/ram_bytes"));
    let on_host = |part: &&Value| part["where"] == "ram";
    for part in whole["parts"].as_array().unwrap().iter().filter(on_host) {
        let role = part["role"].as_str().unwrap();
        assert!(["data_pipeline", "checkpoint_writing", "reserve"].contains(&role), "{part}");
    }
    // Host memory is checked too.
    let (host, code) = plan(path, &["--vram", "1GiB", "--ram", "1MiB"]);
    assert_eq!((code, host["verdict"].as_str()), (3, Some("does_not_fit")));
    // Between the peak as written and the lowest peak there are smaller plans to choose from.
    let (least, code) = plan(path, &["--vram", "1KiB", "--ram", "1GiB"]);
    assert_eq!(code, 3);
    let (low, high) = (bytes(&least, "/peak/vram_bytes"), needs);
    let vram = format!("{}B", low + (high - low) / 8);
    let (shrunk, code) = plan(path, &["--vram", &vram, "--ram", "1GiB"]);
    assert_eq!((code, shrunk["verdict"].as_str()), (0, Some("fits_after_shrink")));
    assert!(bytes(&shrunk, "/peak/vram_bytes") <= bytes(&shrunk, "/budget/vram_bytes"));
    assert_eq!(bytes(&shrunk, "/samples_per_update"), 32);
    assert!(!shrunk["shrunk"].as_array().unwrap().is_empty());
    let only = plan(path, &["--vram", &format!("{low}B"), "--ram", "1GiB"]).0;
    assert!(!only["chosen"]["offload"].as_array().unwrap().is_empty(), "{only}");
}

/// 8-bit state is planned, used, kept by a resumed run, and not adopted by a run that began without it.
#[test]
fn optimizer_state_in_bytes_is_really_used() {
    let job = JOB.replace("[64, 64, 64]", "[512, 512]").replace("steps = 3", "steps = 4");
    let folder = job_folder(&job);
    let path = folder.path();
    let allow = ["--set", "memory.on_oom=[\"optimizer-8bit\"]"];
    let (ample, _) = plan(path, &["--ram", "1GiB"]);
    let ram = format!("memory.ram={}B", bytes(&ample, "/peak/ram_bytes") - 1);
    let tight = [&["--set", &ram], &allow[..]].concat();
    let (chosen, code) = plan(path, &tight);
    assert_eq!((code, chosen["chosen"]["optimizer"].as_str()), (0, Some("adamw8bit")), "{chosen}");
    let fit = |run: &str, args: &[&str]| {
        trainer(path, &[&["fit", "job.toml", "-q", "--run-dir", run], args].concat()).expect(0);
    };
    let state = |run: &str, step: u64| {
        let file = path.join(run).join(format!("checkpoints/step-{step:08}/optimizer.safetensors"));
        fs::metadata(file).unwrap().len()
    };
    fit("bytes", &[&tight[..], &["--max-steps", "2"]].concat());
    fit("floats", &["--max-steps", "2"]);
    assert!(state("bytes", 2) * 3 < state("floats", 2));
    // Each run resumes with the optimizer it began with, whatever memory there is now.
    fit("bytes", &["--resume"]);
    assert!(state("bytes", 4) * 3 < state("floats", 2));
    let (less, _) = plan(path, &["--ram", "1MiB", "--set", "memory.on_oom=[\"shrink\"]"]);
    let budget = format!("memory.ram={}B", bytes(&less, "/peak/ram_bytes") + (1 << 20));
    fit("floats", &["--resume", "--set", &budget, "--set", "memory.on_oom=[\"shrink\", \"optimizer-8bit\"]"]);
    assert_eq!(state("floats", 4), state("floats", 2));
}

#[test]
fn a_frozen_job_runs_with_the_locked_plan_or_not_at_all() {
    let folder = job_folder(JOB);
    let path = folder.path();
    let fit = |args: &[&str]| trainer(path, &[&["fit", "job.toml", "-q"], args].concat());
    let text = fit(&["--frozen", "--run-dir", "none"]).expect(2).stderr;
    assert!(text.contains("cannot read `job.lock`") && text.contains("--lock"), "{text}");
    fit(&["--lock", "--run-dir", "a"]).expect(0);
    let lock = fs::read_to_string(path.join("job.lock")).unwrap();
    fit(&["--frozen", "--run-dir", "b"]).expect(0);
    // More or less memory is not another plan as long as the execution plan is the same.
    fit(&["--frozen", "--run-dir", "c", "--set", "memory.ram=64MiB"]).expect(0);
    let text = fit(&["--frozen", "--run-dir", "d", "--set", "train.batch_size=16"]).expect(3).stderr;
    assert!(text.contains("`samples_per_update` was 32 and is 16"), "{text}");
    let text = fit(&["--frozen", "--run-dir", "d", "--set", "model.hidden=[512, 512, 512]"]).expect(3).stderr;
    assert!(text.contains("`peak.ram_bytes` was") && text.contains("`roles.weights` was"), "{text}");
    assert!(!path.join("d").exists(), "nothing was begun");
    let (_, code) = plan(path, &["--frozen"]);
    assert_eq!(code, 0);
    trainer(path, &["plan", "job.toml", "--lock", "-q"]).expect(0);
    assert_eq!(fs::read_to_string(path.join("job.lock")).unwrap(), lock, "the same text again");
}

#[test]
fn what_is_measured_is_chosen_and_leaves_nothing_behind() {
    let folder = job_folder(JOB);
    let path = folder.path();
    let (measured, code) = plan(path, &["--measure"]);
    assert_eq!(code, 0);
    let rungs = measured["candidates"].as_array().unwrap();
    let times: Vec<f64> = rungs.iter().filter_map(|rung| rung["measured_time"].as_f64()).collect();
    assert!(times.len() >= 2 && times.iter().all(|time| *time > 0.0), "{measured}");
    // The chosen plan is the one with the lowest time.
    let fastest = times.iter().copied().fold(f64::INFINITY, f64::min);
    let at = rungs.iter().find(|rung| rung["measured_time"].as_f64() == Some(fastest)).unwrap();
    let chosen = measured["chosen"]["micro_batch"].as_u64().unwrap();
    let change = at["change"].as_str().unwrap();
    let named = if change.is_empty() { "micro-batch 32,".to_owned() } else { change.to_owned() };
    assert!(named.starts_with(&format!("micro-batch {chosen},")), "{named}: {chosen}");
    assert_eq!(names(path), ["job.toml"]);
}

/// A plan for another GPU counts the workspaces of the kernels that run there; a GPU that no kernel supports is
/// refused.
#[test]
fn a_plan_is_for_the_gpu_that_is_named() {
    // Large enough for the Hopper-only kernels: GELU fused into the GEMM epilogue, and a language-model head that
    // saves sums.
    let model = "[model]\nkind = \"gpt\"\nlayers = 2\nheads = 6\nwidth = 768\ncontext = 1024\n";
    let data = "[data]\nkind = \"text-synthetic\"\nvocab = 8192\ntrain_samples = 64\nvalid_samples = 4\n";
    let train = "[train]\nbatch_size = 16\nsteps = 2\nprecision = \"bf16\"\n";
    let folder = job_folder(format!("{model}{data}{train}"));
    let peak = |args: &[&str]| {
        let (plan, code) = plan(folder.path(), &[&["--vram", "80GiB", "--ram", "8GiB"], args].concat());
        assert_eq!(code, 0, "{plan}");
        bytes(&plan, "/peak/vram_bytes")
    };
    let hopper = peak(&["--gpu", "9.0"]);
    assert_eq!(hopper, peak(&[]), "without a name it is the GPU that takes the most");
    for other in ["8.0", "8.6", "8.9", "12.0"] {
        assert!(peak(&["--gpu", other]) < hopper, "{other} has no workspaces of Hopper's kernels");
    }
    for wrong in
        [&["--vram", "8GiB", "--gpu", "7.5"][..], &["--vram", "8GiB", "--gpu", "ada"], &["--gpu", "8.9"]]
    {
        trainer(folder.path(), &[&["plan", "job.toml"], wrong].concat()).expect(2);
    }
}
