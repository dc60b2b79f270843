//! Distillation through the binary: teachers of other kinds, resumes, the plan, and teachers that are refused.

use std::fs;
use std::path::Path;

use crate::harness::{FinalState, command, events, finish, job_folder, losses, named, read_json, trainer};

fn job(model: &str, train: &str, distill: &str) -> String {
    let distill = if distill.is_empty() { String::new() } else { format!("[distill]\n{distill}\n") };
    format!(
        "seed = 3\n[model]\n{model}\n[data]\nkind = \"shapes\"\ntrain_samples = 256\nvalid_samples = 64\nimage_size = 16\n\
         [train]\nbatch_size = 16\nsteps = 12\n{train}\n{distill}[checkpoint]\nevery_steps = 4\nkeep = 9\n\
         [log]\nevery_steps = 1\ntensorboard = false\n"
    )
}

const CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 16, norm = \"batch\" }, { channels = 32 }]\nhidden = [64]\nnorm_group = 8";
const MLP: &str = "kind = \"mlp\"\nhidden = [24]";

/// A folder with a trained teacher in `teacher` and a student that learns from it in `job.toml`.
fn student(teacher: &str, model: &str, train: &str, distill: &str) -> tempfile::TempDir {
    let folder = job_folder(job(teacher, "", ""));
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "teacher", "-q"]).expect(0);
    fs::write(
        folder.path().join("job.toml"),
        job(model, train, &format!("teacher = \"teacher\"\n{distill}")),
    )
    .unwrap();
    folder
}

fn fit(at: &Path, run: &str, more: &[&str]) -> Vec<f64> {
    trainer(at, &[&["fit", "job.toml", "--run-dir", run, "-q"], more].concat()).expect(0);
    // Without a checkpoint, the run is known by its job, which must be a valid one.
    trainer(at, &["check", &format!("{run}/job.toml"), "-q"]).expect(0);
    losses(&events(&at.join(run)))
}

/// A run that is killed, resumed or in other micro-batches learns the same, and its measured memory stays within the
/// plan. Returns the losses of the undisturbed run, in the folder `run`.
fn assert_undisturbed(at: &Path, train: &str) -> Vec<f64> {
    let whole = fit(at, "run", &[]);
    let undisturbed = FinalState::of(&at.join("run"));
    let mut killed = command(at, &["fit", "job.toml", "--run-dir", "killed", "-q"]);
    finish(killed.env("TRAINER_FAULT_CRASH", "kill:6")).expect(0);
    undisturbed.assert_same(&FinalState::of(&at.join("killed")));
    fit(at, "resumed", &["--max-steps", "8"]);
    fit(at, "resumed", &["--resume"]);
    // The end of a part is evaluated too, and may be the best.
    assert!(undisturbed.tensors == FinalState::of(&at.join("resumed")).tensors);
    let split = fit(at, "split", &["--set", "train.batch_size=8", "--set", "train.accumulation_steps=2"]);
    let bound = if train.is_empty() { 1e-3 } else { 5e-2 };
    assert!(whole.iter().zip(&split).all(|(a, b)| (a - b).abs() < bound * a), "{whole:?} {split:?}");
    let summary = read_json(&at.join("run/summary.json"));
    let bytes = |key: &str| summary[key]["ram"].as_u64().unwrap();
    assert!(bytes("measured_peak_bytes") <= bytes("planned_peak_bytes"), "{summary}");
    whole
}

/// Killed, resumed and in other micro-batches, a student of another kind than its teacher learns the same; the measured
/// memory stays within the plan, which has the teacher.
#[test]
fn disturbances_change_nothing() {
    let cases = [
        (MLP, "", ""),
        (CNN, "precision = \"bf16\"\nema = 0.9", ""),
        (CNN, "", "teacher_precision = \"bf16\""),
        (MLP, "precision = \"bf16\"", "teacher_precision = \"f32\""),
        (MLP, "", "teacher_precision = \"int8\""),
        (CNN, "precision = \"bf16\"", "teacher_precision = \"int8\""),
    ];
    for (model, train, distill) in cases {
        let folder = student(CNN, model, train, distill);
        let at = folder.path();
        assert_undisturbed(at, train);
        let plan = trainer(at, &["plan", "job.toml", "--json", "--ram", "1GiB"]).expect(0).json();
        let parts = plan["parts"].as_array().unwrap();
        let teacher = parts.iter().find(|part| part["name"] == "teacher").unwrap();
        assert!(teacher["bytes"].as_u64().unwrap() > 64 * 512, "{teacher}");
    }
}

/// Logits that are stored once teach the same through kills, resumes and other micro-batches. The teacher is a phase of
/// the plan, and no part of training; a second run finds the file, one with a damaged file computes it again.
#[test]
fn stored_logits_change_nothing() {
    let cases = [
        (MLP, "", "logits = \"stored\"\ntop_k = 4"),
        (CNN, "precision = \"bf16\"", "logits = \"stored\"\ntop_k = 99\nteacher_precision = \"f32\""),
        (MLP, "", "logits = \"stored\"\ntop_k = 4\nteacher_precision = \"int8\""),
    ];
    for (model, train, distill) in cases {
        let folder = student(CNN, model, train, distill);
        let at = folder.path();
        let whole = assert_undisturbed(at, train);
        let stored = |run: &str| named(&events(&at.join(run)), "teacher_logits")[0].clone();
        assert_eq!(
            (&stored("run")["was_stored"], &stored("killed")["was_stored"]),
            (&false.into(), &true.into())
        );
        let file = at.join(stored("run")["path"].as_str().unwrap());
        let bytes = fs::read(&file).unwrap();
        let k: usize = if model == MLP { 4 } else { 10 };
        assert_eq!(bytes.len(), 256 * (4 * k + 4));
        let mut damaged = bytes.clone();
        damaged[7] ^= 1;
        fs::write(&file, damaged).unwrap();
        assert_eq!(fit(at, "again", &[]), whole);
        assert_eq!(stored("again")["was_stored"], false);
        assert_eq!(fs::read(&file).unwrap(), bytes);
        let plan = trainer(at, &["plan", "job.toml", "--json", "--ram", "1GiB"]).expect(0).json();
        assert_eq!(plan["disk"]["stored_logits_bytes"].as_u64(), Some(256 * (4 * k as u64 + 4)));
        let peak = |phase: &str| {
            let phases = plan["phases"].as_array().unwrap();
            phases.iter().find(|one| one["name"] == phase).unwrap()["ram_bytes"].as_u64().unwrap()
        };
        let every_step =
            ["plan", "job.toml", "--json", "--ram", "1GiB", "--set", "distill.logits=every_step"];
        fs::write(at.join("job.toml"), job(model, train, "teacher = \"teacher\"\n")).unwrap();
        let beside = trainer(at, &every_step).expect(0).json();
        assert!(peak("teacher") > 0 && peak("backward") < beside["peak"]["ram_bytes"].as_u64().unwrap());
    }
}

/// All logits, stored, teach nearly what the teacher teaches in every step; the file has them in 16 bits. Language
/// models store those of each token.
#[test]
fn stored_logits_teach_the_same() {
    let folder = student(CNN, MLP, "", "weight = 1.0");
    let at = folder.path();
    let exact = fit(at, "every_step", &[]);
    let close = |a: &[f64], b: &[f64], bound: f64| {
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < bound * a.abs().max(0.1)), "{a:?} {b:?}");
    };
    let all = fit(at, "all", &["--set", "distill.logits=stored", "--set", "distill.top_k=10"]);
    close(&exact, &all, 2e-3);
    let few = fit(at, "few", &["--set", "distill.logits=stored", "--set", "distill.top_k=2"]);
    // Classes that are one are never further apart than each by itself.
    assert!(few != all && few[0] < all[0], "{few:?} {all:?}");
    let text = |rest: &str| {
        format!(
            "[model]\nkind = \"gpt\"\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\n[data]\nkind = \"text-synthetic\"\n\
             [train]\nbatch_size = 4\nsteps = 4\n[log]\ntensorboard = false\nevery_steps = 1\n{rest}"
        )
    };
    fs::write(at.join("job.toml"), text("")).unwrap();
    fit(at, "gpt", &[]);
    fs::write(at.join("job.toml"), text("[distill]\nteacher = \"gpt\"\nweight = 1.0\n")).unwrap();
    let exact = fit(at, "llm", &["--set", "seed=7"]);
    let all = ["--set", "seed=7", "--set", "distill.logits=stored", "--set", "distill.top_k=65536"];
    close(&exact, &fit(at, "llm_stored", &all), 2e-3);
}

/// Out of memory while the teacher computes, a run continues with smaller micro-batches.
#[test]
fn the_teacher_retries_in_smaller_batches() {
    let folder = student(CNN, MLP, "", "logits = \"stored\"");
    let at = folder.path();
    let mut faulty = command(at, &["fit", "job.toml", "--run-dir", "faulty", "-q"]);
    finish(faulty.env("TRAINER_FAULT_OOM", "3,30")).expect(0);
    let all = events(&at.join("faulty"));
    let oom = named(&all, "oom");
    // Training has a ledger of its own, which counts again.
    let of_teacher = oom.iter().filter(|oom| oom["phase"] == "teacher").count();
    assert!(of_teacher == 2 && oom.len() == 4, "{oom:?}");
    let faulty = losses(&all);
    fs::remove_dir_all(at.join("runs/.data")).unwrap();
    let whole = fit(at, "run", &[]);
    assert!(whole.iter().zip(&faulty).all(|(a, b)| (a - b).abs() < 1e-4 * a), "{whole:?} {faulty:?}");
}

const SMALL_CNN: &str = "kind = \"cnn\"\nstages = [{ channels = 4 }, { channels = 6 }]\nhidden = [12]";

const FEATURES: &str = "\n[[distill.features]]\nstudent = \"stages.1\"\nteacher = \"stages.1\"\nweight = 0.5\n\
                        [[distill.features]]\nstudent = \"layers.0\"\nteacher = \"layers.0\"\n";

/// The features of a teacher, in its type or another, survive kills, resumes and other micro-batches; their linear maps
/// are in the checkpoint and the plan, and not in the export.
#[test]
fn features_change_nothing() {
    let cases = [
        ("", "teacher_precision = \"bf16\""),
        ("precision = \"bf16\"\nema = 0.9", ""),
        ("", "teacher_precision = \"int8\""),
    ];
    for (train, distill) in cases {
        let folder = student(CNN, SMALL_CNN, train, &format!("{distill}{FEATURES}"));
        let at = folder.path();
        assert_undisturbed(at, train);
        let has_map = |path: &str| {
            let file = fs::read(at.join(path)).unwrap();
            let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            String::from_utf8_lossy(&file[8..8 + header]).contains("distill.features.1.weight")
        };
        assert!(has_map("run/checkpoints/step-00000012/model.safetensors"));
        trainer(at, &["export", "run", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
        assert!(!has_map("out/model.safetensors"));
        trainer(at, &["export", "run", "--format", "onnx", "-o", "onnx", "-q"]).expect(0);
        trainer(at, &["eval", "run", "-q"]).expect(0);
        let maps = 32 * 6 + 64 * 12;
        let plan = trainer(at, &["plan", "job.toml", "--json", "--ram", "1GiB"]).expect(0).json();
        let parameters = plan["parameters"].as_u64().unwrap();
        assert_eq!(plan["prediction"]["model"]["parameters"].as_u64(), Some(parameters - maps));
        // Our kernels and candle's own operations agree, in every split. The latter compute in f32: what the tolerance
        // allows is the rounding of the narrowest type.
        let verified = trainer(at, &["verify", "job.toml", "--json", "--updates", "2"]).expect(0).json();
        let is_wide = train.is_empty() && !distill.contains("bf16");
        assert_eq!(verified["tolerance"]["losses"], if is_wide { 1e-5 } else { 1e-2 });
        // The plan lists the blocks that can be named.
        let text = trainer(at, &["plan", "job.toml", "-v", "--ram", "1GiB"]).expect(0).stdout;
        for line in
            ["as `student`\n", "as `teacher`\n", "    stages.1 [4, 4, 6]\n", "    stages.1 [4, 4, 32]\n"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
    }
}

/// With features alone, the student comes to predict them.
#[test]
fn features_are_learned() {
    let folder = student(CNN, SMALL_CNN, "", &format!("weight = 0.0{FEATURES}"));
    let at = folder.path();
    let more =
        ["--set", "train.steps=60", "--set", "optimizer.lr=0.01", "--set", "checkpoint.every_steps=60"];
    let with = fit(at, "with", &more);
    fs::write(at.join("job.toml"), job(SMALL_CNN, "", "teacher = \"teacher\"\nweight = 0.0\n")).unwrap();
    let without = fit(at, "without", &more);
    let error = |range: std::ops::Range<usize>| -> f64 {
        with[range.clone()].iter().zip(&without[range]).map(|(with, without)| with - without).sum::<f64>()
    };
    assert!(error(0..5) > 0.0 && error(55..60) < 0.8 * error(0..5), "{with:?} {without:?}");
}

/// Blocks that are none, and shapes that cannot be compared.
#[test]
fn features_that_do_not_fit_are_refused() {
    let folder = student(CNN, SMALL_CNN, "", "");
    let at = folder.path();
    let refused = |student: &str, teacher: &str, logits: &str| {
        let features = format!("[[distill.features]]\nstudent = \"{student}\"\nteacher = \"{teacher}\"\n");
        let text = job(SMALL_CNN, "", &format!("teacher = \"teacher\"\n{logits}\n{features}"));
        fs::write(at.join("job.toml"), text).unwrap();
        trainer(at, &["check", "job.toml"]).expect(2).stderr
    };
    let text = refused("stage.1", "stages.1", "");
    assert!(
        text.contains("names `stage.1`, which is no block of the model; its blocks are `stages.1`"),
        "{text}"
    );
    let text = refused("stages.1", "stages.7", "");
    assert!(text.contains("names `stages.7`, which is no block of the teacher"), "{text}");
    let text = refused("stages.0", "stages.1", "");
    assert!(
        text.contains("`stages.0`, of shape [8, 8, 4]") && text.contains("`stages.1`, of shape [4, 4, 32]"),
        "{text}"
    );
    let text = refused("stages.1", "stages.1", "logits = \"stored\"");
    assert!(text.contains("`distill.features` needs the teacher in every step"), "{text}");
}

/// A teacher in bf16 takes half of the memory and one of 8-bit integers a quarter, and they teach nearly the same.
#[test]
fn a_teacher_has_a_precision_of_its_own() {
    let folder = student(CNN, MLP, "", "weight = 1.0");
    let at = folder.path();
    let bytes = |precision: &str| {
        let set = format!("distill.teacher_precision={precision}");
        let plan =
            trainer(at, &["plan", "job.toml", "--json", "--ram", "1GiB", "--set", &set]).expect(0).json();
        let parts = plan["parts"].as_array().unwrap();
        parts.iter().find(|part| part["name"] == "teacher").unwrap()["bytes"].as_u64().unwrap()
    };
    let statistics = 2 * 16 * 4;
    assert_eq!(bytes("same"), bytes("f32"));
    assert_eq!(2 * (bytes("bf16") - statistics), bytes("f32") - statistics);
    // A scale per output and the vectors are the rest.
    let smaller = (bytes("f32") - statistics) as f64 / (bytes("int8") - statistics) as f64;
    assert!((3.8..4.0).contains(&smaller), "{smaller}");
    let exact = fit(at, "f32", &[]);
    for precision in ["bf16", "int8"] {
        let set = format!("distill.teacher_precision={precision}");
        let rounded = fit(at, precision, &["--set", &set]);
        assert_ne!(exact, rounded);
        assert!(
            exact.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < 0.05 * a.abs() + 0.02),
            "{precision}: {exact:?} {rounded:?}"
        );
    }
    let text =
        trainer(at, &["check", "job.toml", "--set", "distill.teacher_precision=int4"]).expect(2).stderr;
    assert!(text.contains("`distill.teacher_precision` cannot be"), "{text}");
}

/// The plan and the check say what the student takes per sample beside its teacher.
#[test]
fn a_plan_compares_the_student_with_its_teacher() {
    let folder = student(CNN, MLP, "", "");
    let at = folder.path();
    let found =
        |command: &str| trainer(at, &[command, "job.toml", "--json"]).expect(0).json()["prediction"].clone();
    let plan = found("plan");
    assert_eq!(plan, found("check"));
    let number = |of: &str, key: &str| plan[of][key].as_u64().unwrap();
    assert_eq!(number("model", "parameters"), 256 * 24 + 24 + 24 * 10 + 10);
    assert_eq!(number("model", "operations"), 2 * (256 * 24 + 24 * 10));
    for key in ["parameters", "operations", "memory_bytes"] {
        assert!(number("teacher", key) > number("model", key), "{plan}");
    }
    assert!(number("model", "memory_bytes") > 4 * number("model", "parameters"), "{plan}");
    for words in [&["plan", "job.toml"][..], &["check", "job.toml", "-v"]] {
        let text = trainer(at, words).expect(0).stdout;
        assert!(text.contains("6,418 parameters, 12,768 operations and"), "{text}");
    }
}

/// Without weight the teacher changes no bit; with all of it the loss is another.
#[test]
fn a_teacher_without_weight_changes_nothing() {
    let folder = student(CNN, MLP, "", "weight = 0.0");
    let at = folder.path();
    let without = fit(at, "without", &[]);
    assert_ne!(without, fit(at, "with", &["--set", "distill.weight=1.0"]));
    fs::write(at.join("job.toml"), job(MLP, "", "")).unwrap();
    assert_eq!(without, fit(at, "alone", &[]));
}

/// A small student that learns from its teacher alone comes to agree with it, and so with the classes.
#[test]
fn a_student_learns_from_its_teacher_alone() {
    let row = |i: usize| format!("{},{},{}\n", i % 7, i * 3 % 11, if i % 7 < 3 { "low" } else { "high" });
    let job = |hidden: usize, distill: &str| {
        format!(
            "[model]\nkind = \"mlp\"\nhidden = [{hidden}]\n[data]\nkind = \"csv\"\ntrain = \"rows.csv\"\ntarget = \"y\"\n\
             [train]\nbatch_size = 16\nsteps = 80\n[optimizer]\nlr = 0.02\n[log]\ntensorboard = false\nevery_steps = 1\n{distill}"
        )
    };
    let folder = job_folder(job(32, ""));
    let at = folder.path();
    fs::write(at.join("rows.csv"), format!("a,b,y\n{}", (0..200).map(row).collect::<String>())).unwrap();
    fit(at, "teacher", &[]);
    let distill = "[distill]\nteacher = \"teacher\"\nweight = 1.0\ntemperature = 2.0\n";
    fs::write(at.join("job.toml"), job(4, distill)).unwrap();
    for precision in ["f32", "int8"] {
        let losses = fit(at, precision, &["--set", &format!("distill.teacher_precision={precision}")]);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (mean(&losses[..5]), mean(&losses[75..]));
        assert!(first > 0.0 && last < 0.5 * first, "{first} and {last}");
        let summary = read_json(&at.join(precision).join("summary.json"));
        let accuracy = summary["metrics"]["valid.accuracy"].as_f64().unwrap();
        assert!(accuracy > 0.9, "{precision}: {accuracy}");
    }
}

/// An export is a teacher too, and a language model of another kind and size with the same tokens.
#[test]
fn exports_and_language_models_teach() {
    let folder = student(MLP, MLP, "", "");
    let at = folder.path();
    trainer(at, &["export", "teacher", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
    let from_run = fit(at, "run", &[]);
    assert_eq!(fit(at, "export", &["--set", "distill.teacher=out"]), from_run);
    let text = |model: &str, rest: &str| {
        format!(
            "[model]\n{model}\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 16\n[data]\nkind = \"text-synthetic\"\n\
             [train]\nbatch_size = 4\nsteps = 4\n[log]\ntensorboard = false\nevery_steps = 1\n{rest}"
        )
    };
    fs::write(at.join("job.toml"), text("kind = \"gpt\"", "")).unwrap();
    let alone = fit(at, "gpt", &[]);
    fs::write(at.join("job.toml"), text("kind = \"llama\"", "[distill]\nteacher = \"gpt\"\n")).unwrap();
    let taught = fit(at, "llama", &[]);
    assert!(taught.iter().all(|loss| loss.is_finite()) && taught != alone);
}

/// An export has the tokenizer of its run in another form.
#[test]
fn an_export_with_a_tokenizer_teaches() {
    let job = |rest: &str| {
        format!(
            "[model]\nkind = \"gpt\"\nlayers = 1\nheads = 2\nwidth = 16\ncontext = 8\n[data]\nkind = \"text\"\n\
             train = \"a.txt\"\ntokens = \"characters\"\n[train]\nbatch_size = 4\nsteps = 4\n\
             [log]\ntensorboard = false\nevery_steps = 1\n{rest}"
        )
    };
    let folder = job_folder(job(""));
    let at = folder.path();
    fs::write(at.join("a.txt"), "the quick brown fox jumps over the lazy dog. ".repeat(40)).unwrap();
    fit(at, "teacher", &[]);
    trainer(at, &["export", "teacher", "--format", "safetensors", "-o", "out", "-q"]).expect(0);
    fs::write(at.join("job.toml"), job("[distill]\nteacher = \"teacher\"\n")).unwrap();
    let from_run = fit(at, "run", &[]);
    assert_eq!(fit(at, "export", &["--set", "distill.teacher=out"]), from_run);
    let mut other = read_json(&at.join("out/tokenizer.json"));
    other["added_by_a_test"] = true.into();
    fs::write(at.join("out/tokenizer.json"), other.to_string()).unwrap();
    let text = trainer(at, &["check", "job.toml", "--set", "distill.teacher=out"]).expect(2).stderr;
    assert!(text.contains("has another tokenizer than the data"), "{text}");
}

/// Sample weights, the place of columns in the file, and means that no sample depends on do not change what a teacher
/// reads.
#[test]
fn tables_that_are_read_alike_share_a_teacher() {
    let row = |i: usize| {
        let class = if i % 7 < 3 { "low" } else { "high" };
        format!("{},{},{},{class}\n", i % 7, i * 3 % 11, 0.5 * (i % 4) as f64)
    };
    let rows: Vec<String> = (0..200).map(row).collect();
    let job = |data: &str, distill: &str| {
        format!(
            "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"csv\"\ncolumns = [\"a\", \"b\"]\ntarget = \"y\"\n\
             {data}\n[train]\nbatch_size = 16\nsteps = 4\n[log]\ntensorboard = false\n{distill}"
        )
    };
    const ROWS: &str = "train = \"rows.csv\"\nvalid_fraction = 0.3";
    let raw = format!("{ROWS}\nstandardise = false");
    let folder = job_folder(job(ROWS, ""));
    let at = folder.path();
    fs::write(at.join("rows.csv"), format!("a,b,w,y\n{}", rows.concat())).unwrap();
    fs::write(at.join("moved.csv"), format!("z,a,b,w,y\n5,{}", rows.join("5,"))).unwrap();
    fit(at, "standard", &[]);
    fs::write(at.join("job.toml"), job(&raw, "")).unwrap();
    fit(at, "raw", &[]);
    let cases = [
        ("standard", format!("{ROWS}\nweight = \"w\""), true),
        ("raw", raw.replace("0.3", "0.2"), true),
        ("raw", raw.replace("rows.csv", "moved.csv"), true),
        ("raw", format!("{raw}\non_missing = \"mean\""), true),
        ("standard", ROWS.replace("0.3", "0.2"), false),
        ("standard", raw.clone(), false),
    ];
    for (i, (teacher, data, is_read_alike)) in cases.into_iter().enumerate() {
        fs::write(at.join("job.toml"), job(&data, &format!("[distill]\nteacher = \"{teacher}\"\n"))).unwrap();
        let out = trainer(at, &["fit", "job.toml", "--run-dir", &format!("run{i}"), "-q"]);
        let text = out.expect(if is_read_alike { 0 } else { 2 }).stderr;
        let is_refused = text.contains("reads the columns of the table in another way");
        assert_eq!(is_refused, !is_read_alike, "{data}: {text}");
    }
}

/// What does not fit the data is refused before anything is trained, and a teacher that changed when a run is resumed.
#[test]
fn other_teachers_are_refused() {
    let folder = student(CNN, MLP, "", "");
    let at = folder.path();
    let refused = |more: &[&str]| {
        let text = trainer(at, &[&["check", "job.toml"], more].concat()).expect(2).stderr;
        assert!(text.contains("`distill.teacher` is"), "{text}");
        text
    };
    assert!(refused(&["--set", "distill.teacher=nothing"]).contains("which does not exist"));
    let text = refused(&["--set", "data.image_size=20"]);
    assert!(
        text.contains("takes samples of shape [16, 16, 1], and the data has samples of shape [20, 20, 1]"),
        "{text}"
    );
    let rows = |classes: &[&str]| {
        let row = |i: usize| format!("{},{},{}\n", i % 7, i % 5, classes[i % classes.len()]);
        format!("a,b,y\n{}", (0..60).map(row).collect::<String>())
    };
    fs::write(at.join("two.csv"), rows(&["no", "yes"])).unwrap();
    fs::write(at.join("three.csv"), rows(&["no", "yes", "perhaps"])).unwrap();
    let table = "[model]\nkind = \"mlp\"\n[data]\nkind = \"csv\"\ntrain = \"three.csv\"\ntarget = \"y\"\n[train]\nsteps = 2\nbatch_size = 8\n\
                 [log]\ntensorboard = false\n";
    fs::write(at.join("table.toml"), table).unwrap();
    trainer(at, &["fit", "table.toml", "--run-dir", "three", "-q"]).expect(0);
    fs::write(at.join("table.toml"), format!("{table}[distill]\nteacher = \"three\"\n")).unwrap();
    trainer(at, &["check", "table.toml", "-q"]).expect(0);
    let text = trainer(at, &["check", "table.toml", "--set", "data.train=two.csv"]).expect(2).stderr;
    assert!(text.contains("has 3 classes: ") && text.contains("and the data has 2 classes: "), "{text}");
    // Trained on, the teacher has other weights.
    fit(at, "run", &["--max-steps", "4"]);
    fs::write(at.join("teacher.toml"), job(CNN, "", "")).unwrap();
    trainer(
        at,
        &["fit", "teacher.toml", "--run-dir", "teacher", "--resume", "-q", "--set", "train.steps=40"],
    )
    .expect(0);
    let text = trainer(at, &["fit", "job.toml", "--run-dir", "run", "--resume", "-q"]).expect(2).stderr;
    assert!(text.contains("`distill.teacher`"), "{text}");
}
