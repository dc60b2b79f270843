//! Feeds arbitrary bytes to the reader of each file format: the reader accepts them or returns an error. A panic, a
//! timeout, an allocation beyond the limit (`-malloc_limit_mb`) or a failed assertion below is a defect.
//!
//! `TARGET` names the format. The harness writes the bytes to a file in memory, opens it as a dataset and reads the
//! first samples, as a run does. `just fuzz TARGET SECONDS` builds and runs it.

#![no_main]
#![allow(dead_code, unused_imports)]

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;

// The readers without the engine, which takes minutes to build and is not used here. The module tree mirrors the crate's
// paths, because the included files import each other by `crate::`.
mod base;
#[path = "../src/data/mod.rs"]
mod data;
#[path = "../src/job/mod.rs"]
mod job;

mod kernels {
    pub mod cross_entropy {
        /// As in the crate.
        pub const IGNORE_INDEX: u32 = u32::MAX;
    }
}

mod memory {
    pub mod probe {
        /// Reports no resident memory: the fuzzer's own would use up the budget of every dataset, and
        /// `-rss_limit_mb` bounds it already.
        pub fn proc_status(_key: &str) -> Option<u64> {
            None
        }
    }
}

use data::bad_records::BadRecordPolicy;
use data::cache::Cache;
use data::idx::{IdxDataset, IdxFiles};
use data::images::{ImageDataset, ImageFiles, ImageOptions, LabelColumns, TarShards};
use data::language::token_windows::WindowPlacement;
use data::language::tokenizer::{Separator, TokenizerSpec};
use data::language::{jsonl, text, token_files};
use data::streaming::StreamingDataset;
use data::table::{self, Dialect, TableFileFormat};
use data::transforms::{Augmentation, Normalise, Pipeline, ResizeMode};
use data::{DataError, Dataset, DatasetContext, HostBatch, SampleKey};
use job::Job;

static TARGET: LazyLock<String> = LazyLock::new(|| std::env::var("TARGET").unwrap_or_default());

fuzz_target!(init: begin(), |data: &[u8]| {
    match &**TARGET {
        "job" => job(data),
        "idx" => with(data, idx),
        "tar" => with(data, |files| images(files, "file.tar")),
        "images" => with(data, |files| images(files, "set")),
        "csv" => with(data, |files| tables(files, TableFileFormat::Csv(Dialect::default()))),
        "parquet" => with(data, |files| tables(files, TableFileFormat::Parquet)),
        "jsonl" => with(data, |files| chats(files, files.file(), "chatml")),
        "template" => template(data),
        "tokenizer" => with(data, |files| texts(files, files.path("text"), TokenizerSpec::File(files.file()))),
        "text" => with(data, |files| texts(files, files.file(), TokenizerSpec::Characters)),
        "tokens" => with(data, tokens),
        other => panic!("no target is called `{other}`"),
    }
});

/// Writes a few Parquet files into the corpus to start from; `seeds.py` writes those of the other formats.
fn begin() {
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    if *TARGET != "parquet" {
        return;
    }
    for (i, compression) in [Compression::UNCOMPRESSED, Compression::SNAPPY].into_iter().enumerate() {
        let schema = "message t { required int32 a; optional double y; optional binary c (utf8); }";
        let schema = parquet::schema::parser::parse_message_type(schema).expect("a schema");
        let properties =
            WriterProperties::builder().set_compression(compression).set_dictionary_enabled(i > 0).build();
        let mut bytes = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut bytes, schema.into(), properties.into()).expect("a writer");
        let mut group = writer.next_row_group().expect("a row group");
        let mut column = group.next_column().expect("a column").expect("three columns");
        column.typed::<Int32Type>().write_batch(&[1, 2, 3, 4], None, None).expect("memory");
        column.close().expect("memory");
        let mut column = group.next_column().expect("a column").expect("three columns");
        column
            .typed::<DoubleType>()
            .write_batch(&[0.5, 1.5, 2.5], Some(&[1, 1, 0, 1]), None)
            .expect("memory");
        column.close().expect("memory");
        let mut column = group.next_column().expect("a column").expect("three columns");
        let texts = ["x", "y", "x"].map(ByteArray::from);
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&[1, 0, 1, 1]), None).expect("memory");
        column.close().expect("memory");
        group.close().expect("memory");
        writer.close().expect("memory");
        fs::create_dir_all("corpus/parquet").expect("a folder of inputs");
        fs::write(format!("corpus/parquet/seed-{i}-written"), bytes).expect("a file of inputs");
    }
}

/// Files in memory, and what opening them as a dataset may use.
struct TestFiles {
    folder: tempfile::TempDir,
    ctx: DatasetContext,
}

/// A training and a validation set.
type Datasets = Result<Vec<Arc<dyn Dataset>>, DataError>;

impl TestFiles {
    fn new() -> Self {
        let folder = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder in memory");
        let ctx = DatasetContext {
            max_bytes: 64 << 20,
            shuffle_buffer: 1 << 20,
            cache: Cache::at(folder.path().join("cache")),
            ..DatasetContext::default()
        };
        let files = Self { folder, ctx };
        fs::create_dir_all(files.path("set/class")).expect("memory for a folder");
        for (link, to) in [("file.tar", "file"), ("set/class/a.png", "../../file")] {
            std::os::unix::fs::symlink(to, files.path(link)).expect("memory for a link");
        }
        files.put("text", "ab ba, abba <eos> \u{dc}ber 12 \u{4e2d}\u{6587}\n".repeat(4).as_bytes());
        files.put("chat", CHAT);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&self) -> PathBuf {
        self.path("file")
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("memory for a file");
    }
}

/// Writes `data` to the file, opens it by `open`, and reads the first samples as a run does.
fn with(data: &[u8], open: impl FnOnce(&TestFiles) -> Datasets) {
    thread_local!(static TEST_FILES: RefCell<Option<TestFiles>> = const { RefCell::new(None) });
    TEST_FILES.with_borrow_mut(|files| {
        let files = files.get_or_insert_with(TestFiles::new);
        files.put("file", data);
        for set in open(files).into_iter().flatten() {
            for sample in 0..set.len().min(32) {
                if let Ok(batch) =
                    HostBatch::single(set.as_ref(), sample, SampleKey { seed: 1, epoch: 0, sample })
                {
                    assert_eq!(batch.ids, [sample]);
                }
            }
            set.describe();
            set.class_counts();
        }
        if let Ok(entries) = fs::read_dir(files.path("cache")) {
            entries.flatten().for_each(|entry| drop(fs::remove_file(entry.path())));
        }
    });
}

fn tables(files: &TestFiles, format: TableFileFormat) -> Datasets {
    let paths = table::TableFiles { train: vec![files.file()], valid: Vec::new(), test: Vec::new(), split: SplitSettings::random(0.5) };
    let settings =
        table::TableSettings { target: vec!["y".into()], skip_bad: true, ..table::TableSettings::default() };
    let sets = table::open(&paths, format, &settings, &files.ctx)?;
    Ok(vec![sets.train, sets.valid])
}

fn images(files: &TestFiles, name: &str) -> Datasets {
    let columns = LabelColumns { path: "path".into(), label: "label".into(), separator: None };
    let options = ImageOptions { channels: 3, size: [8, 8], max_pixels: 1 << 16, columns, multi_label: false, readers: 1 };
    let image_files = Arc::new(ImageFiles::open(&[files.path(name)], options, None, &files.ctx)?);
    let pipeline = Pipeline::new([8, 8, 3], ResizeMode::CenterCrop { fraction: 1.0 }, Normalise::default())?;
    Ok(vec![match image_files.compressed {
        true => Arc::new(StreamingDataset::new(Arc::new(TarShards::new(image_files, pipeline)), 1 << 20)),
        false => Arc::new(ImageDataset::new(image_files, pipeline)),
    }])
}

/// The last byte says how many bytes at the end are the file of labels.
fn idx(files: &TestFiles) -> Datasets {
    let bytes = fs::read(files.file()).unwrap_or_default();
    let labels = bytes.last().map_or(0, |n| usize::from(*n)).min(bytes.len());
    let (images, labels) = bytes.split_at(bytes.len() - labels);
    files.put("images", images);
    files.put("labels", labels);
    let idx_files = IdxFiles {
        images: files.path("images"),
        labels: files.path("labels"),
        classes: ["a", "b", "c"].map(String::from).to_vec(),
        normalise: Normalise::default(),
        augmentation: Augmentation::default(),
        readers: 1,
        max_bytes: files.ctx.max_bytes,
    };
    Ok(vec![Arc::new(IdxDataset::open(&idx_files)?)])
}

fn texts(files: &TestFiles, file: PathBuf, tokenizer: TokenizerSpec) -> Datasets {
    let settings = text::TextSettings {
        train: vec![file],
        valid: Vec::new(),
        test: Vec::new(),
        split: SplitSettings::random(0.5),
        tokenizer,
        separator: Separator::Auto,
        context: 8,
        placement: WindowPlacement::Fixed,
    };
    let sets = text::open(&settings, &files.ctx)?;
    Ok(vec![Arc::new(sets.train), Arc::new(sets.valid)])
}

fn tokens(files: &TestFiles) -> Datasets {
    let settings = token_files::TokenFileSettings {
        train: vec![files.file()],
        valid: Vec::new(),
        test: Vec::new(),
        split: SplitSettings::random(0.5),
        width: None,
        vocab: None,
        tokenizer: None,
        context: 8,
        placement: WindowPlacement::Fixed,
    };
    let sets = token_files::open(&settings, &files.ctx)?;
    Ok(vec![Arc::new(sets.train), Arc::new(sets.valid)])
}

const CHAT: &[u8] = br#"{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello!"}]}"#;

fn chats(files: &TestFiles, file: PathBuf, template: &str) -> Datasets {
    let chat = jsonl::ChatSettings {
        field: "messages".into(),
        template: template.into(),
        loss: jsonl::ChatLossScope::Assistant,
    };
    let settings = jsonl::JsonlSettings {
        train: vec![file.clone()],
        valid: vec![file],
        test: Vec::new(),
        split: SplitSettings { valid: ValidSet::OwnFiles, ..SplitSettings::random(0.5) },
        tokenizer: TokenizerSpec::Bytes,
        separator: Separator::Auto,
        field: "text".into(),
        chat: Some(chat),
        label: None,
        pack: false,
        buckets: Vec::new(),
        too_long: jsonl::OverlongPolicy::Truncate,
        context: 64,
        on_bad: BadRecordPolicy::Skip { limit: 1000 },
    };
    let (train, valid) = jsonl::open(&settings, &files.ctx)?;
    Ok(vec![train, valid])
}

/// Parses and renders the text as a chat template.
fn template(data: &[u8]) {
    // Text without a Jinja tag is taken for the name of a built-in template.
    let Ok(text) = str::from_utf8(data) else { return };
    with(b"", |files| chats(files, files.path("chat"), &format!("{text}{{# #}}")));
}

/// Parses the text as a job and its last line as a `--set`; a job that loads must survive a round trip through TOML.
fn job(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let (job, set) = text.rsplit_once('\n').unwrap_or((text, ""));
    let path = Path::new("job.toml");
    for sets in [vec![], vec![set.to_owned()]] {
        match Job::parse(job, path, &sets) {
            Ok(job) => assert_eq!(Job::parse(&job.to_toml(), path, &[]).as_ref(), Ok(&job)),
            Err(errors) => assert!(errors.to_string().starts_with("error: ")),
        }
    }
}
