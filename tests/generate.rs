//! `trainer generate` through the program: the same text each time, alone or in a batch, after the data is gone; and
//! what cannot be continued, with its exit code.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use tempfile::TempDir;

use crate::harness::{command, job_folder, trainer};

const CONTEXT: usize = 64;

/// A run in `run` whose model learned to count through the alphabet, from data that is deleted.
fn alphabet_run(model: &str) -> TempDir {
    let folder = job_folder(format!(
        "name = 'abc'\nseed = 3\n[model]\n{model}\n[data]\nkind = 'text'\ntrain = ['abc.txt']\nvalid = ['abc.txt']\n\
         [train]\nsteps = 150\nbatch_size = 8\n[optimizer]\nkind = 'adamw'\nlr = 0.005\n[log]\ntensorboard = false\n"
    ));
    let text = "abcdefghijklmnopqrstuvwxyz ".repeat(60);
    fs::write(folder.path().join("abc.txt"), text).unwrap();
    trainer(folder.path(), &["fit", "job.toml", "--run-dir", "run", "--device", "cpu"]).expect(0);
    fs::remove_file(folder.path().join("abc.txt")).unwrap();
    folder
}

fn generate(folder: &Path, args: &[&str]) -> crate::harness::Finished {
    trainer(folder, &[&["generate", "run", "--device", "cpu"], args].concat())
}

const MODELS: [&str; 2] = [
    "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64",
    "kind = 'llama'\nlayers = 2\nheads = 4\nkv_heads = 2\nwidth = 32\nhidden = 64\ncontext = 64",
];

#[test]
fn a_run_continues_prompts_alone_and_in_batches() {
    for model in MODELS {
        let run = alphabet_run(model);
        let folder = run.path();
        let one =
            generate(folder, &["--prompt", "abc", "--temperature", "0", "--max-tokens", "12"]).expect(0);
        assert_eq!(one.stdout, "defghijklmno\n", "{}", one.stderr);
        let stopped = &["--prompt", "abc", "--temperature", "0", "--stop", "hi", "--json"];
        let document = generate(folder, stopped).expect(0).json();
        assert_eq!((&document["text"], &document["finish"]), (&json!("defg"), &json!("stopped")));

        fs::write(folder.join("prompts.txt"), "abc\n\nxyz \nklmnop\nb\nuvw\n").unwrap();
        let sampled =
            ["--prompts", "prompts.txt", "--temperature", "1.5", "--seed", "5", "--max-tokens", "20"];
        let batch = |size: &str| {
            let lines =
                generate(folder, &[&sampled[..], &["--json", "--batch-size", size]].concat()).expect(0);
            lines.json_lines().iter().map(|line| line["text"].clone()).collect::<Vec<_>>()
        };
        let together = batch("4");
        assert_eq!(together.len(), 5);
        assert_eq!(batch("1"), together);
        let again =
            &["--prompt", "klmnop", "--temperature", "1.5", "--seed", "5", "--max-tokens", "20", "--json"];
        assert_eq!(generate(folder, again).expect(0).json()["text"], together[2]);
        let other =
            &["--prompt", "klmnop", "--temperature", "1.5", "--seed", "6", "--max-tokens", "20", "--json"];
        assert_ne!(generate(folder, other).expect(0).json()["text"], together[2]);
    }
}

#[test]
fn what_cannot_be_continued_says_what_to_do() {
    let run = alphabet_run(MODELS[0]);
    let folder = run.path();
    let long = "abcdefgh".repeat(CONTEXT / 8);
    let refused = generate(folder, &["--prompt", &long, "--max-tokens", "10"]).expect(2);
    assert!(refused.stderr.contains("has 64 tokens and 10 are to follow"), "{}", refused.stderr);
    assert!(refused.stderr.contains("--truncate-prompt"), "{}", refused.stderr);
    let cut = ["--prompt", &long, "--max-tokens", "10", "--truncate-prompt", "--temperature", "0", "--json"];
    assert_eq!(generate(folder, &cut).expect(0).json()["tokens"], 10);
    // The context ends a text for which no length is asked.
    let open = generate(folder, &["--prompt", "abc", "--json"]).expect(0).json();
    assert_eq!((&open["tokens"], &open["finish"]), (&json!(CONTEXT - 2), &json!("context")));

    let unknown = generate(folder, &["--prompt", "ABC"]).expect(4);
    assert!(unknown.stderr.contains("`A` has no token"), "{}", unknown.stderr);
    assert!(generate(folder, &["--prompt", "a", "--top-p", "2"]).expect(2).stderr.contains("`top_p` is 2"));
    assert!(generate(folder, &["--chat"]).expect(2).stderr.contains("--template"));
    assert!(generate(folder, &["--prompts", "none.txt"]).expect(4).stderr.contains("none.txt"));
    generate(folder, &[]).expect(2);
    let tight = generate(folder, &["--prompt", "abc", "--set", "memory.ram='1MiB'"]).expect(3);
    assert!(tight.stderr.contains("key-value cache"), "{}", tight.stderr);
}

#[test]
fn a_conversation_answers_line_by_line() {
    let run = alphabet_run(MODELS[1]);
    let args = ["generate", "run", "--device", "cpu", "--chat", "--template", "{{ messages[-1].content }}"];
    let args = [&args[..], &["--temperature", "0", "--max-tokens", "4"]].concat();
    let mut program = command(run.path(), &args);
    let mut child = program.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"abc\n\nklm\n").unwrap();
    let done = crate::harness::Finished::from(child.wait_with_output().unwrap()).expect(0);
    assert_eq!(done.stdout, "defg\nnopq\n", "{}", done.stderr);
}
