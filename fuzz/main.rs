//! Any bytes as each kind of file that the trainer reads: they are read or refused. A panic, a time-out, an allocation
//! beyond the limit (`-malloc_limit_mb`) or a broken promise below is a defect.
//!
//! `TARGET` names what the bytes are; a set of samples is opened and the first of them are read, as a run does it, from
//! files in memory. `just fuzz TARGET SECONDS` builds and runs it.

#![no_main]
#![allow(dead_code, unused_imports)]

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;

// The readers without the engine, which would take minutes to build and nothing here needs.
#[path = "../src/caught.rs"]
mod caught;
#[path = "../src/data/mod.rs"]
mod data;
#[path = "../src/features.rs"]
mod features;
#[path = "../src/job/mod.rs"]
mod job;
#[path = "../src/random.rs"]
mod random;
#[path = "../src/regular.rs"]
mod regular;
#[path = "../src/units.rs"]
mod units;

mod kernels {
    pub mod cross_entropy {
        /// As in the crate.
        pub const IGNORE: u32 = u32::MAX;
    }
}

use data::bad::OnBad;
use data::cache::Cache;
use data::idx::{self, Idx};
use data::images::{Columns, Images, Options, Packed, Set};
use data::language::tokenizer::{Separator, Units};
use data::language::windows::Placement;
use data::language::{bins, jsonl, text};
use data::picture::{Augment, Fit, Normalise, Pipeline};
use data::stream::Streamed;
use data::table::{self, Dialect, Format};
use data::{Batch, DataError, Key, Opening, Source};
use job::Job;

static TARGET: LazyLock<String> = LazyLock::new(|| std::env::var("TARGET").unwrap_or_default());

fuzz_target!(init: begin(), |data: &[u8]| {
    match &**TARGET {
        "job" => job(data),
        "idx" => with(data, idx),
        "tar" => with(data, |place| images(place, "file.tar")),
        "images" => with(data, |place| images(place, "set")),
        "csv" => with(data, |place| tables(place, Format::Csv(Dialect::default()))),
        "parquet" => with(data, |place| tables(place, Format::Parquet)),
        "jsonl" => with(data, |place| chats(place, place.file(), "chatml")),
        "template" => template(data),
        "tokenizer" => with(data, |place| texts(place, place.path("text"), Units::File(place.file()))),
        "text" => with(data, |place| texts(place, place.file(), Units::Characters)),
        "tokens" => with(data, tokens),
        other => panic!("no target is called `{other}`"),
    }
});

/// Writes a few Parquet files to begin with into the folder of inputs; `seeds.py` writes those of the other kinds.
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
        let properties = WriterProperties::builder().set_compression(compression).set_dictionary_enabled(i > 0).build();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema.into(), properties.into()).expect("a writer");
        let mut group = writer.next_row_group().expect("a row group");
        let mut column = group.next_column().expect("a column").expect("three columns");
        column.typed::<Int32Type>().write_batch(&[1, 2, 3, 4], None, None).expect("memory");
        column.close().expect("memory");
        let mut column = group.next_column().expect("a column").expect("three columns");
        column.typed::<DoubleType>().write_batch(&[0.5, 1.5, 2.5], Some(&[1, 1, 0, 1]), None).expect("memory");
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

/// Files in memory.
struct Place {
    folder: tempfile::TempDir,
    opening: Opening,
}

/// A training and a validation set.
type Sets = Result<Vec<Arc<dyn Source>>, DataError>;

impl Place {
    fn new() -> Self {
        let folder = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a folder in memory");
        let opening = Opening {
            max_bytes: 64 << 20,
            shuffle_buffer: 1 << 20,
            cache: Cache::at(folder.path().join("cache")),
            ..Opening::default()
        };
        let place = Self { folder, opening };
        fs::create_dir_all(place.path("set/class")).expect("memory for a folder");
        for (link, to) in [("file.tar", "file"), ("set/class/a.png", "../../file")] {
            std::os::unix::fs::symlink(to, place.path(link)).expect("memory for a link");
        }
        place.put("text", "ab ba, abba <eos> \u{dc}ber 12 \u{4e2d}\u{6587}\n".repeat(4).as_bytes());
        place.put("chat", CHAT);
        place
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

/// Puts `data` into the file, opens what `open` makes of it, and reads the first samples as a run does.
fn with(data: &[u8], open: impl FnOnce(&Place) -> Sets) {
    thread_local!(static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) });
    PLACE.with_borrow_mut(|place| {
        let place = place.get_or_insert_with(Place::new);
        place.put("file", data);
        for set in open(place).into_iter().flatten() {
            for sample in 0..set.len().min(32) {
                if let Ok(batch) = Batch::one(set.as_ref(), sample, Key { seed: 1, epoch: 0, sample }) {
                    assert_eq!(batch.ids, [sample]);
                }
            }
            set.about();
            set.balance();
        }
        if let Ok(made) = fs::read_dir(place.path("cache")) {
            made.flatten().for_each(|entry| drop(fs::remove_file(entry.path())));
        }
    });
}

fn tables(place: &Place, format: Format) -> Sets {
    let files = table::Files { train: vec![place.file()], valid: Vec::new(), valid_share: 0.5 };
    let settings = table::Settings { target: vec!["y".into()], skip_bad: true, ..table::Settings::default() };
    let (train, valid) = table::open(&files, format, &settings, &place.opening)?;
    Ok(vec![train, valid])
}

fn images(place: &Place, name: &str) -> Sets {
    let columns = Columns { path: "path".into(), label: "label".into() };
    let options = Options { channels: 3, max_pixels: 1 << 16, columns, readers: 1 };
    let set = Arc::new(Set::open(&[place.path(name)], options, None, &place.opening)?);
    let pipeline = Pipeline::new([8, 8, 3], Fit::Crop { share: 1.0 }, Normalise::default())?;
    Ok(vec![match set.packed {
        true => Arc::new(Streamed::new(Arc::new(Packed::new(set, pipeline)), 1 << 20)),
        false => Arc::new(Images::new(set, pipeline)),
    }])
}

/// The labels are as many of the last bytes as the last one says.
fn idx(place: &Place) -> Sets {
    let bytes = fs::read(place.file()).unwrap_or_default();
    let labels = bytes.last().map_or(0, |n| usize::from(*n)).min(bytes.len());
    let (images, labels) = bytes.split_at(bytes.len() - labels);
    place.put("images", images);
    place.put("labels", labels);
    let files = idx::Files {
        images: place.path("images"),
        labels: place.path("labels"),
        classes: ["a", "b", "c"].map(String::from).to_vec(),
        normalise: Normalise::default(),
        augment: Augment::default(),
        readers: 1,
        max_bytes: place.opening.max_bytes,
    };
    Ok(vec![Arc::new(Idx::open(&files)?)])
}

fn texts(place: &Place, file: PathBuf, units: Units) -> Sets {
    let settings = text::Settings {
        train: vec![file],
        valid: Vec::new(),
        valid_share: 0.5,
        units,
        separator: Separator::Auto,
        context: 8,
        placement: Placement::Fixed,
    };
    let (train, valid) = text::open(&settings, &place.opening)?;
    Ok(vec![Arc::new(train), Arc::new(valid)])
}

fn tokens(place: &Place) -> Sets {
    let settings = bins::Settings {
        train: vec![place.file()],
        valid: Vec::new(),
        valid_share: 0.5,
        width: None,
        vocab: None,
        tokenizer: None,
        context: 8,
        placement: Placement::Fixed,
    };
    let (train, valid) = bins::open(&settings, &place.opening)?;
    Ok(vec![Arc::new(train), Arc::new(valid)])
}

const CHAT: &[u8] = br#"{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Hello!"}]}"#;

fn chats(place: &Place, file: PathBuf, template: &str) -> Sets {
    let chat = jsonl::Chat { field: "messages".into(), template: template.into(), loss: jsonl::Loss::Answers };
    let settings = jsonl::Settings {
        train: vec![file.clone()],
        valid: vec![file],
        valid_share: 0.0,
        units: Units::Bytes,
        separator: Separator::Auto,
        field: "text".into(),
        chat: Some(chat),
        label: None,
        pack: false,
        buckets: Vec::new(),
        too_long: jsonl::TooLong::Cut,
        context: 64,
        on_bad: OnBad::Skip { most: 1000 },
    };
    let (train, valid) = jsonl::open(&settings, &place.opening)?;
    Ok(vec![train, valid])
}

/// Text as a chat template.
fn template(data: &[u8]) {
    // A text without a tag would be the name of a template.
    let Ok(text) = str::from_utf8(data) else { return };
    with(b"", |place| chats(place, place.path("chat"), &format!("{text}{{# #}}")));
}

/// Text as a job, its last line as a `--set`; what loads can be written out and read again.
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
