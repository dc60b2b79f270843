//! The readers of every file format accept arbitrary bytes or return an error: no panic, no hang, no allocation beyond
//! the budget. `fuzz/main.rs` feeds [`read`] what libFuzzer finds; here each format gets a few mutated files.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use candle_core::{DType, Device};
use trainer::base::proc_status::proc_status;
use trainer::data::cache::Cache;
use trainer::data::{DatasetContext, HostBatch, SampleKey};
use trainer::job::Job;
use trainer::param_store::ParamStore;
use trainer::params::{ParamInit, ParamRegistry};
use trainer::train::checkpoint::Checkpoints;
use trainer::train::datasets;
use trainer::train::tensor_files::load_views;

/// What is read as a dataset: the target, its model, and its `[data]`. The bytes are the file `file`.
#[rustfmt::skip]
const DATASETS: &[(&str, &str, &str)] = &[
    ("csv", MLP, "kind = 'csv'\ntarget = 'y'\ntrain = ['file']\non_bad_record = 'skip'"),
    ("json", MLP, "kind = 'json'\ntarget = 'y'\ntrain = ['file']\non_bad_record = 'skip'"),
    ("parquet", MLP, "kind = 'parquet'\ntarget = 'y'\ntrain = ['file']"),
    ("tar", CNN, "kind = 'images'\nimage_size = 8\nmax_pixels = 65536\ntrain = ['file.tar']"),
    ("zip", CNN, "kind = 'images'\nimage_size = 8\nmax_pixels = 65536\ntrain = ['file.zip']"),
    ("images", CNN, "kind = 'images'\nimage_size = 8\nmax_pixels = 65536\ntrain = ['set']"),
    ("idx", CNN, "kind = 'idx'\nclasses = 3\ntrain_images = 'images'\ntrain_labels = 'labels'\nvalid_images = 'images'\nvalid_labels = 'labels'"),
    ("text", GPT, "kind = 'text'\ntrain = ['file']"),
    ("tokens", GPT, "kind = 'tokens'\ntrain = ['file']"),
    ("tokenizer", GPT, "kind = 'text'\ntrain = ['text']\ntokens = 'file'"),
    ("jsonl", GPT, "kind = 'jsonl'\ntokens = 'bytes'\ntrain = ['file']"),
    ("chat", GPT, "kind = 'jsonl'\ntokens = 'bytes'\nchat = 'messages'\ntemplate = 'chatml'\ntrain = ['file']"),
];
const MLP: &str = "kind = 'mlp'\nhidden = [4]";
const CNN: &str = "kind = 'cnn'\nhidden = [4]\n[[model.stages]]\nchannels = 2";
const GPT: &str = "kind = 'gpt'\nlayers = 1\nheads = 1\nwidth = 4\ncontext = 8";

const CHAT: &str = r#"{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi "},
 {"role": "assistant", "content": "Hello!"}]}"#;

/// Reads bytes as the file of a target.
pub fn read(target: &str, bytes: &[u8]) {
    thread_local!(static FILES: RefCell<Option<Files>> = const { RefCell::new(None) });
    FILES.with_borrow_mut(|files| {
        let files = files.get_or_insert_with(Files::new);
        match target {
            "job" => read_job(bytes),
            "template" => read_template(files, bytes),
            "state" => read_state(files, bytes),
            "safetensors" => read_weights(files, bytes),
            "idx" => {
                // The last byte says how many bytes at the end are the file of labels.
                let labels = bytes.last().map_or(0, |n| usize::from(*n)).min(bytes.len());
                let (images, labels) = bytes.split_at(bytes.len() - labels);
                files.put("images", images);
                files.put("labels", labels);
                files.read_samples("idx", "");
            }
            _ => {
                files.put("file", bytes);
                files.read_samples(target, "");
            }
        }
    });
}

/// A folder in memory.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let folder = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder in memory");
        let files = Self { folder };
        fs::create_dir_all(files.path("set/class")).expect("memory for a folder");
        for (link, to) in [("file.tar", "file"), ("file.zip", "file"), ("set/class/a.png", "../../file")] {
            std::os::unix::fs::symlink(to, files.path(link)).expect("memory for a link");
        }
        files.put("text", "ab ba, abba <eos> \u{dc}ber 12 \u{4e2d}\u{6587}\n".repeat(4).as_bytes());
        files.put("chats", CHAT.replace('\n', "").as_bytes());
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("memory for a file");
    }

    /// Opens the datasets of a target with more keys of `[data]`, and reads the first samples as a run does.
    fn read_samples(&self, target: &str, more: &str) {
        let (_, model, data) = DATASETS.iter().find(|(name, ..)| *name == target).expect("a known target");
        let text = format!("[model]\n{model}\n[data]\n{data}{more}\n[train]\nbatch_size = 1\nsteps = 1\n");
        let job = Job::parse(&text, &self.path("job.toml"), &[]).unwrap_or_else(|e| panic!("{target}: {e}"));
        let ctx = DatasetContext {
            max_bytes: proc_status("VmRSS:").unwrap_or(0) + (64 << 20),
            shuffle_buffer: 1 << 20,
            cache: Cache::at(self.path("cache")),
            ..DatasetContext::default()
        };
        if let Ok(sets) = datasets::open(&job, &ctx) {
            for set in [&sets.train, &sets.valid] {
                for sample in 0..set.len().min(32) {
                    let key = SampleKey { seed: 1, epoch: 0, sample };
                    if let Ok(batch) = HostBatch::single(set.as_ref(), sample, key) {
                        assert_eq!(batch.ids, [sample]);
                    }
                }
                set.describe();
                set.class_counts();
            }
        }
        if let Ok(entries) = fs::read_dir(self.path("cache")) {
            entries.flatten().for_each(|entry| drop(fs::remove_file(entry.path())));
        }
    }
}

/// The bytes are a chat template.
fn read_template(files: &Files, bytes: &[u8]) {
    // Text without a Jinja tag is taken for the name of a built-in template.
    let Ok(text) = str::from_utf8(bytes) else { return };
    files.put("file", &fs::read(files.path("chats")).expect("the chats"));
    let template = toml::Value::from(format!("{text}{{# #}}")).to_string();
    let chat = format!("\nchat = 'messages'\ntemplate = {template}");
    files.read_samples("jsonl", &chat);
}

/// The bytes are a job, and their last line a `--set`: a job that loads survives a round trip through TOML.
fn read_job(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let (job, set) = text.rsplit_once('\n').unwrap_or((text, ""));
    let path = Path::new("job.toml");
    for sets in [vec![], vec![set.to_owned()]] {
        match Job::parse(job, path, &sets) {
            Ok(job) => assert_eq!(Job::parse(&job.to_toml(), path, &[]).as_ref(), Ok(&job)),
            Err(errors) => assert!(errors.to_string().starts_with("error: ")),
        }
    }
}

/// The bytes are the state of a checkpoint, with a marker that matches.
fn read_state(files: &Files, bytes: &[u8]) {
    let folder = files.path("checkpoints");
    let step = folder.join("step-00000001");
    fs::create_dir_all(&step).expect("memory for a folder");
    let put = |name: &str, bytes: &[u8]| fs::write(step.join(name), bytes).expect("memory for a file");
    let sum = crc32c::crc32c(bytes).to_string();
    put("state.json", bytes);
    put("evaluated.json", &[sum.as_bytes(), b"\n", bytes].concat());
    put("DONE", sum.as_bytes());
    let checkpoints = Checkpoints::new(&folder);
    let newest = checkpoints.newest();
    assert_eq!(newest.found.is_none(), newest.skipped.len() == 1);
    if let Some(state) = checkpoints.newest_state() {
        serde_json::to_vec(&state).expect("a state that was read can be written");
    }
}

/// The bytes are weights of this project or of another tool.
fn read_weights(files: &Files, bytes: &[u8]) {
    static STORE: LazyLock<ParamStore> = LazyLock::new(|| {
        let mut registry = ParamRegistry::default();
        registry.param("a.weight", [3, 4], ParamInit::Constant(0.0));
        registry.conv_weight("b.weight", [2, 3, 2, 2], ParamInit::Constant(0.0));
        registry.running_stat("b.mean", 2, 0.0);
        let layout = registry.into_layout().expect("names that differ");
        ParamStore::new(layout, 1, DType::BF16, &Device::Cpu).expect("memory for weights")
    });
    files.put("model.safetensors", bytes);
    let file = files.path("model.safetensors");
    if let Err(refused) = load_views(&file, &STORE.layout.params, STORE.weight_views()) {
        assert!(refused.to_string().contains("model.safetensors"), "{refused}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::root;
    use trainer::base::random::{CounterRng, RngKey};

    /// Well-formed files of a target.
    fn seeds(target: &str) -> Vec<Vec<u8>> {
        let data = |name: &str| fs::read(root().join("tests/data").join(name)).expect(name);
        let bytes = |text: &str| vec![text.repeat(6).into_bytes()];
        match target {
            "csv" => bytes("a,b,y\n1,x,0\n2.5,\"q,\"\"r\",1\n"),
            "json" => bytes("{\"a\": 1.5, \"b\": {\"c\": \"x\"}, \"y\": 0}\n{\"a\": null, \"y\": 1}\n"),
            "parquet" => vec![data("brotli.parquet"), data("lz4.feather")],
            "job" => vec![fs::read(root().join("configs/quickstart.toml")).expect("the quickstart's job")],
            "template" => {
                vec![b"{% for m in messages %}{{ m.role + m['content'] | trim }}{% endfor %}".to_vec()]
            }
            "tokens" => vec![(0u16..40).flat_map(u16::to_le_bytes).collect()],
            "jsonl" => bytes("{\"text\": \"a\\u00e9\"}\n[1]\n"),
            "chat" => bytes(&format!("{}\n", CHAT.replace('\n', ""))),
            "idx" => vec![
                [
                    &[0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2][..],
                    &[7; 8],
                    &[0, 0, 8, 1, 0, 0, 0, 2, 0, 10],
                ]
                .concat(),
            ],
            "state" => vec![
                br#"{"format": 3, "step": 1, "cursor": {"update": 1, "done": 0}, "samples": 4}"#.to_vec(),
            ],
            "safetensors" => {
                let header = br#"{"a.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}"#;
                vec![[&(header.len() as u64).to_le_bytes()[..], header, &[0; 48]].concat()]
            }
            _ => bytes("some text, \u{dc}ber 12\n"),
        }
    }

    /// A copy with bytes changed, removed and repeated.
    fn mutated(seed: &[u8], rng: &mut CounterRng) -> Vec<u8> {
        let mut bytes = seed.to_vec();
        for _ in 0..=rng.below(4) {
            let at = rng.below(bytes.len().max(1) as u64) as usize;
            match rng.below(4) {
                0 => bytes.truncate(at),
                1 => bytes.extend_from_within(at..),
                2 if at < bytes.len() => {
                    bytes[at] = [0, b'"', b'\n', b',', 0x7f, 0xff][rng.below(6) as usize]
                }
                _ if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
                _ => {}
            }
        }
        bytes
    }

    #[test]
    fn every_reader_accepts_or_refuses_mutated_files() {
        let others = ["job", "template", "state", "safetensors"];
        for target in DATASETS.iter().map(|(name, ..)| *name).chain(others) {
            let mut rng = RngKey::new(7, 0).rng();
            for seed in seeds(target) {
                read(target, &seed);
                for _ in 0..60 {
                    read(target, &mutated(&seed, &mut rng));
                }
            }
        }
    }
}
