//! Text, tokens and JSON records through the program: padding changes nothing, and errors are reported.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use trainer::data::{BatchRow, BatchValues, HostBatch, SampleKey, SliceMut};
use trainer::job::Job;
use trainer::train::engine::{Engine, Ledgers};
use trainer::train::setup::Setup;

use crate::harness::{read_json, trainer};

/// A text of this many letters, and its class.
fn record(length: usize, class: usize) -> Value {
    let text: String =
        (0..length).map(|i| (b'a' + ((i * i + 3 * length + 7 * class) % 26) as u8) as char).collect();
    json!({ "text": text, "class": class })
}

fn records(folder: &Path, lengths: impl IntoIterator<Item = usize>) {
    let lines = lengths.into_iter().enumerate().map(|(i, length)| format!("{}\n", record(length, i % 3)));
    fs::write(folder.join("records.jsonl"), lines.collect::<String>()).unwrap();
}

const GPT: &str = "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 16\ncontext = 64\ndropout = 0.1";
const LLAMA: &str =
    "kind = 'llama'\nlayers = 2\nheads = 2\nkv_heads = 1\nwidth = 16\nhidden = 32\ncontext = 64";
const BERT: &str =
    "kind = 'bert'\nlayers = 2\nheads = 2\nwidth = 16\nhidden = 32\ncontext = 64\ndropout = 0.1";

fn job(folder: &Path, model: &str, data: &str, train: &str) {
    let job = format!(
        "name = 'job'\nseed = 3\n[model]\n{model}\n[data]\nkind = 'jsonl'\ntrain = ['records.jsonl']\n\
         valid = ['records.jsonl']\ntokens = 'bytes'\n{data}\n[train]\n{train}\n[optimizer]\nkind = 'adamw'\nlr = 0.001\n\
         [log]\nevery_steps = 1\ntensorboard = false\n"
    );
    fs::write(folder.join("job.toml"), job).unwrap();
}

/// Samples `ids` of the training set, as the loader delivers them.
fn batch(setup: &Setup, ids: &[u64]) -> HostBatch {
    let features = setup.features();
    let (inputs, targets) = (features.input_len(), features.target_len());
    let mut batch = HostBatch::with_capacity(features, ids.len()).unwrap();
    batch.ids.extend(ids);
    for &id in ids {
        let (mut input, mut target) = (vec![0; inputs], vec![0; targets]);
        let mut row =
            BatchRow { input: SliceMut::U32(&mut input), target: SliceMut::U32(&mut target), length: 0 };
        setup.datasets.train.read(id, SampleKey { seed: 3, epoch: 0, sample: id }, &mut row).unwrap();
        batch.lengths.push(row.length);
        let (BatchValues::U32(inputs), BatchValues::U32(targets)) = (&mut batch.inputs, &mut batch.targets)
        else {
            unreachable!()
        };
        inputs.extend(input);
        targets.extend(target);
    }
    batch
}

/// The gradients accumulated over some micro-batches, and their total loss and weight.
fn accumulated_gradients(setup: &Setup, parts: &[&[u64]]) -> (Vec<f32>, f64, f64) {
    let engine =
        Engine::new(setup, Ledgers::new(setup, u64::MAX, None), setup.plan(u64::MAX).chosen, false).unwrap();
    let (mut loss, mut weight) = (0.0, 0.0);
    for ids in parts {
        let metrics = engine.forward_backward(&batch(setup, ids), 1.0).unwrap().read().unwrap();
        loss += metrics.loss;
        weight += metrics.weight;
    }
    (engine.store.grads.flatten_all().unwrap().to_vec1().unwrap(), loss, weight)
}

/// A padded micro-batch equals its samples one by one without padding: buckets have the lengths of the samples, so a
/// sample that runs alone has none.
#[test]
fn padding_changes_no_gradient() {
    let folder = tempfile::tempdir().unwrap();
    let lengths = [5, 8, 8, 13, 31];
    records(folder.path(), lengths);
    for (model, data) in [
        (GPT, "field = 'text'\nbuckets = [4, 7, 12, 30]"),
        (LLAMA, "field = 'text'\nbuckets = [4, 7, 12, 30]"),
        (BERT, "field = 'text'\nlabel = 'class'\nbuckets = [5, 8, 13, 31]"),
    ] {
        job(folder.path(), model, data, "batch_size = 5\nsteps = 1");
        let job = Job::load(&folder.path().join("job.toml"), &[]).unwrap();
        let opening = trainer::data::DatasetContext {
            cache: trainer::data::cache::Cache::at(folder.path().join("cache")),
            ..Default::default()
        };
        let setup = Setup::open(job, 1 << 30, &opening).unwrap();
        assert_eq!(setup.bucket_networks.len(), 3);
        let (together, loss, weight) = accumulated_gradients(&setup, &[&[0, 1, 2, 3, 4]]);
        let targets = if model == BERT { 5 } else { lengths.iter().sum::<usize>() - 5 };
        assert_eq!(weight, targets as f64, "padding does not count");
        for parts in
            [&[&[0][..], &[1], &[2], &[3], &[4]][..], &[&[0, 3], &[1, 2], &[4]], &[&[0, 1, 2, 3], &[4]]]
        {
            let (apart, other_loss, other_weight) = accumulated_gradients(&setup, parts);
            assert_eq!(weight, other_weight);
            assert!((loss - other_loss).abs() < 1e-4 * loss, "{model}: {loss} and {other_loss}");
            let max_gradient = together.iter().fold(0f32, |most, g| most.max(g.abs()));
            let max_difference =
                together.iter().zip(&apart).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(
                max_difference < 1e-5 * max_gradient.max(1e-3),
                "{model} {parts:?}: {max_difference} of {max_gradient}"
            );
        }
    }
}

/// The second law (memory changes how a job runs, never its result) with samples of every length: other splits put a
/// sample into other buckets.
#[test]
fn padded_jobs_are_the_same_experiment_however_they_run() {
    let folder = tempfile::tempdir().unwrap();
    records(folder.path(), (0..40).map(|i| 2 + (i * 17) % 60));
    for (model, data) in [(GPT, "field = 'text'\nbuckets = [8, 16, 32]"), (BERT, "label = 'class'")] {
        job(folder.path(), model, data, "batch_size = 12\nepochs = 2\nclip_norm = 1.0");
        let report = trainer(folder.path(), &["verify", "job.toml", "--json"]).expect(0).json();
        assert_eq!(report["passed"], true);
        assert!(report["variants"].as_array().unwrap().len() >= 5, "{report}");
    }
}

#[test]
fn a_chat_is_trained_on_and_its_tokenizer_left_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let talk = |i: usize| {
        json!({ "messages": [
            { "role": "user", "content": format!("What is {i} + 1?") },
            { "role": "assistant", "content": format!("It is {}.", i + 1) },
        ] })
    };
    let lines: String = (0..30).map(|i| format!("{}\n", talk(i))).collect();
    fs::write(folder.path().join("records.jsonl"), lines).unwrap();
    let model = GPT.replace("context = 64", "context = 128");
    for pack in [false, true] {
        job(
            folder.path(),
            &model,
            &format!("messages = 'messages'\ntemplate = 'plain'\npack = {pack}"),
            "batch_size = 6\nsteps = 4",
        );
        let run = format!("run-{pack}");
        let characters = ["--set", "data.tokens=characters", "--run-dir", &run, "-q"];
        trainer(folder.path(), &[&["fit", "job.toml"], &characters[..]].concat()).expect(0);
        let tokenizer = read_json(&folder.path().join(run).join("tokenizer.json"));
        assert_eq!(tokenizer["model"]["vocab"]["\n"], 0);
    }
    let said = trainer(folder.path(), &["check", "job.toml", "--set", "data.pack=false"]).expect(0).text();
    assert!(said.contains("64 tokens of 256"), "{said}");
}

/// Errors in files of every kind end with exit code 4 and a message; errors in what the job says about them, with 2.
/// A record takes more memory to prepare than the job has: the run ends with exit code 3, and does not skip the record,
/// since other memory would then mean other samples.
#[test]
fn records_are_prepared_within_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let chat = |content: &str| {
        let messages = ["user", "assistant"].map(|role| json!({ "role": role, "content": content }));
        json!({ "messages": messages }).to_string() + "\n"
    };
    fs::write(folder.path().join("records.jsonl"), chat("Hi") + &chat(&"Ho ".repeat(20_000))).unwrap();
    let letters = (b' '..=b'~').chain([b'\n']).zip(0..);
    let vocab: serde_json::Map<_, _> =
        letters.map(|(c, id)| (char::from(c).to_string(), json!(id))).collect();
    let tokenizer = json!({ "version": "1.0", "added_tokens": [],
                            "model": { "type": "BPE", "vocab": vocab, "merges": [] } });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let long = "template = '{% for i in range(200) %}{{ messages[0].content }}{% endfor %}'\nloss = 'all'";
    for (data, tokens, wanted) in [
        (long, "bytes", "line 2: rendering its chat template takes more than"),
        ("template = 'plain'", "tokenizer.json", "line 2: tokenizing it takes more than"),
    ] {
        let data = format!("messages = 'messages'\non_bad_record = 'skip'\n{data}");
        job(folder.path(), GPT, &data, "steps = 1\nbatch_size = 1");
        let tokens = format!("data.tokens={tokens}");
        let fit = |ram: &str, run: &str| {
            let args = ["fit", "job.toml", "--set", ram, "--set", &tokens, "--run-dir", run];
            trainer(folder.path(), &args)
        };
        let said = fit("memory.ram=56MiB", "tight").expect(3).stderr;
        assert!(said.contains(wanted) && said.contains("hint: raise `memory.ram`"), "{said}");
        fit("memory.ram=1GiB", "ample").expect(0);
        fit("memory.ram=56MiB", "prepared").expect(0);
        fs::remove_dir_all(folder.path().join("ample")).unwrap();
        fs::remove_dir_all(folder.path().join("prepared")).unwrap();
    }
}

#[test]
fn errors_in_data_files_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("odd.bin"), [1, 2, 3]).unwrap();
    fs::write(path("short.bin"), [1, 0, 2, 0]).unwrap();
    let mut header = vec![0u8; 1026];
    header[..8].copy_from_slice(&[0x88, 0xd8, 0x34, 0x01, 9, 0, 0, 0]);
    fs::write(path("version.bin"), header).unwrap();
    fs::write(path("bad.txt"), b"fine until \xff here").unwrap();
    fs::write(path("good.txt"), "some text ".repeat(100)).unwrap();
    fs::write(path("none.json"), "{}").unwrap();
    fs::write(path("bad.jsonl"), "{\"text\": \"one\"}\n{\"text\"\n").unwrap();
    fs::write(path("role.jsonl"), "{\"messages\": [{\"role\": \"king\", \"content\": \"x\"}]}\n").unwrap();
    let cases = [
        ("kind = 'tokens'\ntrain = ['odd.bin']", "its ids take 3 bytes, which is no multiple of 2"),
        ("kind = 'tokens'\ntrain = ['short.bin']", "it has 2 tokens, and a window needs 65"),
        ("kind = 'tokens'\ntrain = ['version.bin']", "llm.c's header of unknown version 9"),
        ("kind = 'tokens'\ntrain = ['*.none']", "no such file"),
        ("kind = 'text'\ntrain = ['bad.txt']", "byte 11 of"),
        (
            "kind = 'text'\ntrain = ['good.txt']\ntokens = 'none.json'",
            "cannot be used as a tokenizer: it has no `model`",
        ),
        (
            "kind = 'text'\ntrain = ['good.txt']\ntokens = 'gpt2'",
            "cannot be used as a tokenizer: there is no such file",
        ),
        ("kind = 'text'\ntrain = ['good.txt']\nseparator = '<|end|>'", "`separator` cannot be `<|end|>`"),
        ("kind = 'jsonl'\ntrain = ['bad.jsonl']", "line 2: it is no JSON"),
        (
            "kind = 'jsonl'\ntrain = ['bad.jsonl']\nfield = 'body'",
            "line 1: no field `body`; the fields are `text`",
        ),
        (
            "kind = 'jsonl'\ntrain = ['role.jsonl']\nmessages = 'messages'",
            "line 1: unknown role `king` of a message; expected one of",
        ),
        (
            "kind = 'jsonl'\ntrain = ['role.jsonl']\nmessages = 'messages'\ntemplate = '{% if %}'",
            "the chat template `{% if %}` cannot be used",
        ),
    ];
    for (data, wanted) in cases {
        fs::write(
            path("job.toml"),
            format!("[model]\n{GPT}\n[data]\n{data}\n[train]\nbatch_size = 4\nsteps = 2\n"),
        )
        .unwrap();
        let code = if data.contains("separator") || data.contains("template") { 2 } else { 4 };
        let said = trainer(folder.path(), &["check", "job.toml"]).expect(code).stderr;
        assert!(said.contains(wanted), "{data}: {said}");
    }
}
