//! `trainer profile`: its numbers add up, and its trace keeps the rules of the format.

use std::fs;

use serde_json::Value;

use crate::harness::{job_folder, trainer};

const JOB: &str = "[model]\nkind = 'mlp'\nhidden = [64, 32]\n[data]\nkind = 'shapes'\ntrain_samples = 256\n\
                   [train]\nbatch_size = 32\naccumulation_steps = 2\nsteps = 10\n[log]\ntensorboard = false\n";

#[test]
fn the_parts_add_up_and_the_trace_is_nested() {
    let folder = job_folder(JOB);
    let at = folder.path();
    let run = trainer(at, &["profile", "job.toml", "--steps", "3", "-o", "out", "--json"]).expect(0);
    let profile: Value = serde_json::from_str(&run.stdout).unwrap();
    let written: Value = serde_json::from_slice(&fs::read(at.join("out/profile.json")).unwrap()).unwrap();
    assert_eq!(profile, written);
    let update_s = profile["update_s"].as_f64().unwrap();
    let list = |key: &str| profile[key].as_array().unwrap().clone();
    let seconds = |part: &Value| part["seconds"].as_f64().unwrap();
    let total: f64 = list("parts").iter().map(seconds).sum();
    assert!((total - update_s).abs() < 1e-6 * update_s, "{total} {update_s}");
    let part =
        |name: &str| list("parts").iter().filter(|part| part["name"] == name).map(seconds).sum::<f64>();
    for (pass, name) in [("forward_s", "forward"), ("backward_s", "backward")] {
        let nodes: f64 = list("nodes").iter().map(|node| node[pass].as_f64().unwrap()).sum();
        assert!((nodes - part(name)).abs() < 1e-6 * update_s, "{name}: {nodes}");
    }
    // The kernels of a node, or of a part, never take longer than it.
    let kernels = |node: Option<u64>, part: &str| -> f64 {
        let is_within = |kernel: &&Value| kernel["node"].as_u64() == node && kernel["part"] == part;
        list("kernels").iter().filter(is_within).map(seconds).sum()
    };
    for (at, node) in list("nodes").iter().enumerate() {
        for (pass, name) in [("forward_s", "forward"), ("backward_s", "backward")] {
            let (inside, whole) = (kernels(Some(at as u64), name), node[pass].as_f64().unwrap());
            assert!(inside <= whole * (1.0 + 1e-9), "{node}: {inside} of {whole}");
        }
    }
    let matmul: f64 = list("kernels").iter().filter(|k| k["kernel"] == "matmul").map(seconds).sum();
    assert!(matmul > 0.0 && kernels(None, "optimizer") > 0.0, "{}", profile["kernels"]);
    for name in ["optimizer", "gradient norm"] {
        let (inside, whole) = (kernels(None, name), part(name));
        assert!(inside <= whole * (1.0 + 1e-9), "{name}: {inside} of {whole}");
    }
    assert!(list("nodes").len() >= 3 && list("nodes").iter().all(|node| node["planned_bytes"].is_u64()));

    let trace: Value = serde_json::from_slice(&fs::read(at.join("out/trace.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let (names, events): (Vec<&Value>, Vec<&Value>) = events.iter().partition(|event| event["ph"] == "M");
    assert_eq!(names.len(), 2);
    let span = |event: &Value| {
        let number = |key: &str| event[key].as_f64().unwrap();
        (number("ts"), number("ts") + number("dur"))
    };
    let passes: Vec<_> =
        events.iter().filter(|event| event["name"] == "micro-batch").copied().map(span).collect();
    assert_eq!(passes.len(), 3 * 2);
    let nodes: Vec<_> = events
        .iter()
        .filter(|event| ["forward", "backward"].iter().any(|pass| event["cat"] == *pass))
        .copied()
        .map(span)
        .collect();
    let matmuls: Vec<_> =
        events.iter().filter(|event| event["name"] == "matmul").copied().map(span).collect();
    let is_nested =
        |(start, end): &(f64, f64)| nodes.iter().any(|(from, to)| *from - 1.0 <= *start && *end <= *to + 1.0);
    assert!(!matmuls.is_empty() && matmuls.iter().all(is_nested), "kernels are within their layer");
    // In whole nanoseconds each event is within the one around it, or begins where it ended or later.
    let mut around: Vec<i64> = Vec::new();
    for event in &events {
        let whole = |microseconds: f64| (1e3 * microseconds).round() as i64;
        let (start, end) = span(event);
        let (start, end) = (whole(start), whole(end));
        while around.pop_if(|outer| *outer <= start).is_some() {}
        assert!(around.last().is_none_or(|outer| end <= *outer), "{event}");
        around.push(end);
    }
    for event in events {
        assert!(event["ph"] == "X" && event["pid"].is_u64() && event["tid"].is_u64(), "{event}");
        let (start, end) = span(event);
        assert!(start >= 0.0 && end >= start, "{event}");
        if event["cat"] != "update" && event["cat"] != "kernel" {
            // A microsecond for rounding.
            let inside = |(from, to): &(f64, f64)| *from - 1.0 <= start && end <= *to + 1.0;
            assert!(passes.iter().any(inside), "{event}");
        }
    }
    let flames = fs::read_to_string(at.join("out/flamegraph.svg")).unwrap();
    assert!(flames.contains("</svg>") && flames.contains("matmul"), "{flames}");
}

#[test]
fn people_get_the_hotspots_and_a_job_that_does_not_fit_gets_its_plan() {
    let folder = job_folder(JOB);
    let run = trainer(folder.path(), &["profile", "job.toml", "--steps", "2"]).expect(0);
    assert!(run.stdout.starts_with("profile 2 updates of 64 samples: "), "{}", run.stdout);
    assert!(run.stdout.contains("\nhotspots\n") && run.stdout.contains("\noverhead "), "{}", run.stdout);
    assert!(!folder.path().join("runs").join("job").exists(), "a profile leaves no run");
    let small = trainer(folder.path(), &["profile", "job.toml", "--set", "memory.ram=1MiB"]);
    small.expect(3);
}
